//! A clone of a device, which its mappings hold on to.

use core::{ops::Range as Span, panic::Location};
use std::sync::Arc;

use ringfence_iommu::{Domain, Range};
use ringfence_iova::Allocator;

use crate::{
    bounce::{Bounced, SlicesMut, Slot},
    counter::Count,
    flush::{self, Watch},
    mapping::{DeviceId, Owner},
    shared::Shared,
    stats::Counters,
};

/// A clone of a device, which its mappings hold on to.
pub(crate) struct Port<D: Domain, A: Allocator> {
    pub(crate) shared: Arc<Shared<D, A>>,
    pub(crate) counters: Arc<Counters>,
}

impl<D: Domain, A: Allocator> Port<D, A> {
    pub(crate) fn new(shared: Arc<Shared<D, A>>) -> Arc<Self> {
        Arc::new(Port { counters: shared.add_clone(), shared })
    }
}

impl<D: Domain, A: Allocator> Drop for Port<D, A> {
    fn drop(&mut self) {
        self.shared.remove_clone(&self.counters);
    }
}

impl<D: Domain, A: Allocator> Owner for Port<D, A> {
    fn unmap(
        &self,
        span: Option<flush::Span>,
        strictly: bool,
        watched: bool,
        at: Option<&'static Location<'static>>,
    ) -> ringfence_iommu::Result<Option<Arc<Watch>>> {
        let (shared, counters) = (&*self.shared, &*self.counters);
        if let (Some(detector), Some(span)) = (&shared.detector, span) {
            let now_ns = shared.clock.now_ns();
            detector.lock().unmapping(span.range, at, now_ns);
        }
        let start = shared.sampler.start(counters.unmaps.get());
        let result = match span {
            Some(span) => shared.unmap(span, strictly, watched, counters),
            None => Ok(None),
        };
        counters.note_unmap(&result);
        shared.sampler.stop(start, 1, &counters.unmap_time);
        result
    }

    fn free(&self, range: Range) {
        self.counters.frees.count.add(1);
        self.shared.free(range);
    }

    fn end_bounce(&self, bounced: Bounced, slices: Option<SlicesMut<'_>>) -> Slot {
        let (shared, counters) = (&*self.shared, &*self.counters);
        let start = shared.sampler.start(counters.unmaps.get());
        let (slot, copied) = bounced.finish(slices);
        counters.copied_bytes.add(copied);
        counters.unmaps.add(1);
        shared.sampler.stop(start, 1, &counters.unmap_time);
        slot
    }

    fn note_written(&self, bounced: &mut Bounced, bytes: Span<u64>, slices: SlicesMut<'_>) {
        let (shared, counters) = (&*self.shared, &*self.counters);
        // The unmap's own number, so that either both are timed or neither.
        let start = shared.sampler.start(counters.unmaps.get());
        counters.copied_bytes.add(bounced.note_written(bytes, slices));
        shared.sampler.stop(start, 0, &counters.unmap_time);
    }

    fn give_back_slot(&self, slot: Slot) {
        if let Some(bouncer) = &self.shared.bouncer {
            bouncer.client.give_back(slot);
        }
    }

    fn device_id(&self) -> DeviceId {
        DeviceId(Arc::as_ptr(&self.shared).addr())
    }

    fn now_ns(&self) -> u64 {
        self.shared.clock.now_ns()
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }
}
