//! Mapping together what is submitted together.

use core::{fmt, mem::ManuallyDrop, panic::Location};
use std::{collections::VecDeque, sync::Arc};

use ringfence_iommu::{Domain, Pending, Range};
use ringfence_iova::Allocator;

use super::{Flight, Flights, join};
use crate::{
    Device, Direction, DmaBuffer, Error, MapError, Mapping,
    bounce::Bytes,
    counter::Count,
    map_call::{Failed, Lasting, Made, MapCall, Sync},
    placed::Placed,
    waits::timed,
};

/// Maps buffers for one device together: one map sync for all of them, after which their addresses
/// are handed out (rule [L34], for the batch).
///
/// `B` is the buffer, `T` a tag that comes back with it, such as a request. A batch whose `B` is
/// `Vec<B>` maps scatter lists: buffers of a submission that are adjacent in memory, pushed as one
/// list, need one request to the device to map, and one to unmap.
///
/// Made by [`Device::map_batch`]. Dropping it unmaps what it holds. It allocates nothing once it
/// has grown to the number of buffers pushed at a time.
///
/// [L34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l34
pub struct MapBatch<D: Domain + 'static, A: Allocator + 'static, B, T = ()> {
    device: Device<D, A>,
    gathered: Vec<Member<B, T>>,
    begun: VecDeque<Member<B, T>>,
    flights: Flights,
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// A queue that makes mappings of this device with shared syncs.
    pub fn map_batch<B, T>(&self) -> MapBatch<D, A, B, T> {
        MapBatch {
            device: self.clone(),
            gathered: Vec::new(),
            begun: VecDeque::new(),
            flights: Flights::default(),
        }
    }
}

struct Member<B, T> {
    tag: T,
    /// After a panic it is leaked rather than dropped while mapped.
    buffer: ManuallyDrop<B>,
    placed: Placed,
    made: Made<B>,
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> MapBatch<D, A, B, T> {
    /// Adds a buffer: as [`Device::map`], but not synced yet.
    ///
    /// # Errors
    /// As [`Device::map`]; nothing was added, and `tag` is given back.
    #[track_caller]
    pub fn push(&mut self, buffer: B, direction: Direction, tag: T) -> Result<(), (T, MapError<B>)>
    where
        B: DmaBuffer<D::Target>,
    {
        let buffer = ManuallyDrop::new(buffer);
        let made = Made { direction, at: Location::caller(), bytes: Bytes::of::<D::Target>() };
        let placed = self.device.place(&MapCall {
            buffer: &*buffer,
            direction,
            at: made.at,
            lasting: Lasting::Streaming,
            sync: Sync::Later,
        });
        match placed {
            Ok(placed) => {
                self.gathered.push(Member { tag, buffer, placed, made });
                Ok(())
            }
            Err(failed) => Err((tag, self.device.failed(ManuallyDrop::into_inner(buffer), failed))),
        }
    }

    /// How many buffers were pushed but not begun.
    pub fn gathered(&self) -> usize {
        self.gathered.len()
    }

    /// Whether everything was handed out.
    pub fn is_empty(&self) -> bool {
        self.gathered.is_empty() && self.begun.is_empty()
    }

    /// Begins one map sync for all that was pushed. (Under a policy that does not share syncs
    /// ([`Policy::batches_maps`](crate::Policy::batches_maps)) it is synced already.)
    ///
    /// [`poll`](Self::poll) reports failures.
    pub fn begin(&mut self) {
        if self.gathered.is_empty() {
            return;
        }
        let (shared, counters) = (self.device.shared(), &*self.device.port.counters);
        let members = self.gathered.len();
        let mut ranges = self.flights.ranges();
        let start = shared.sampler.start(counters.map_batches.get());
        counters.map_batches.add(1);
        // By the members, not the policy, which may have changed since they were pushed.
        let unsynced = self.gathered.iter().filter(|member| !member.placed.synced);
        ranges.extend(unsynced.filter_map(|member| Some(member.placed.span?.range)));
        join(&mut ranges);
        counters.map_syncs.add(u64::from(!ranges.is_empty()));
        let sync = Pending::map(&shared.domain, ranges);
        // The calls were counted, and some timed, when they were pushed.
        shared.sampler.stop(start, 0, &counters.map_time);
        self.begun.extend(self.gathered.drain(..));
        self.flights.queue.push_back(Flight { sync, members, settled: false, timed: false });
    }

    /// Hands out, in the order in which they were pushed, the mappings that are synced; returns how
    /// many, errors included. Waits only to undo mappings.
    ///
    /// If the device refuses one of those that were begun together, all of them are undone, and
    /// each buffer is in an error with the device's own status (rule [L34]), except copies in
    /// bounce slots, which need no sync.
    ///
    /// [L34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l34
    pub fn poll(&mut self, mut each: impl FnMut(T, Result<Mapping<B>, MapError<B>>)) -> usize {
        let device = Device { port: Arc::clone(&self.device.port) };
        let (shared, counters) = (device.shared(), &*device.port.counters);
        let mut handed_out = 0;
        while let Some(flight) = self.flights.queue.front_mut() {
            if !flight.sync.poll(&shared.domain) {
                break;
            }
            let Some(over) = flight.sync.outcome(Range::ALL) else { break };
            while flight.members > 0 {
                // Counted first, so that the count stays right if the caller's code panics.
                flight.members -= 1;
                let Some(Member { tag, buffer, placed, made }) = self.begun.pop_front() else {
                    break;
                };
                handed_out += 1;
                let outcome = match over {
                    Ok(_synced) => Ok(placed),
                    // A copy does not depend on that sync: its slot is mapped, and stays so.
                    Err(_) if placed.bounced.is_some() => Ok(placed),
                    Err(error) => {
                        counters.maps.take_back(1);
                        counters.bytes.take_back(placed.len);
                        // Rule L29: strictly, whatever the policy.
                        let range = placed.span.map(|span| span.range);
                        let undone = range.is_none_or(|range| shared.unwind(range, counters));
                        Err(Failed { error: Error::Domain(error), undone })
                    }
                };
                each(tag, device.finish(ManuallyDrop::into_inner(buffer), made, outcome));
            }
            self.flights.land();
        }
        handed_out
    }

    /// Waits until the oldest sync that was begun is over, if there is one.
    pub fn wait(&mut self) {
        let (shared, waits) = (self.device.shared(), &self.device.port.counters.waits.map);
        self.flights.wait(|sync| timed(&*shared.clock, waits, || sync.wait(&shared.domain)));
    }

    /// Syncs all that is left, waits for it, and hands it out.
    pub fn finish(&mut self, mut each: impl FnMut(T, Result<Mapping<B>, MapError<B>>)) {
        self.begin();
        while !self.flights.queue.is_empty() {
            self.wait();
            self.poll(&mut each);
        }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> Drop for MapBatch<D, A, B, T> {
    fn drop(&mut self) {
        // Each mapping unmaps itself.
        self.finish(|_, mapping| drop(mapping));
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, B, T> fmt::Debug for MapBatch<D, A, B, T> {
    ringfence_sync::shows!(MapBatch as it, gathered: it.gathered.len(), begun: it.begun.len());
}
