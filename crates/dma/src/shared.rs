//! What all clones of a device share: the domain, the allocator, and the way back of an IOVA.

use std::sync::{Arc, atomic::AtomicU64};

use parking_lot::Mutex;
use ringfence_iommu::{Domain, Gather, Range, Result};
use ringfence_iova::Allocator;
use ringfence_sync::{clock::Clock, cpu::CpuId};

use crate::{
    Fallback, Policy, Stats,
    flush::{Batch, Enqueued, Entry, FlushQueues, Timer, Watch},
    layout::Limits,
    stats::{Count, Counters, FreeCounters, TimeCounter},
    thread_time::{BriefSampler, Sampler},
};

/// The part of a device that its clones, its mappings and its timer share.
pub(crate) struct Shared<D: Domain, A: Allocator> {
    pub(crate) domain: D,
    pub(crate) allocator: A,
    pub(crate) policy: Policy,
    pub(crate) fallback: Option<Fallback>,
    pub(crate) limits: Limits,
    /// The highest IOVA to hand out.
    pub(crate) limit: u64,
    pub(crate) sampler: Sampler,
    pub(crate) brief_sampler: BriefSampler,
    pub(crate) clock: Arc<dyn Clock>,
    cpu: Arc<dyn CpuId>,
    lazy: Option<Lazy>,
    flush_failures: AtomicU64,
    expiry_time: TimeCounter,
    /// What was given back by nobody's clone: the timer, or a flush that was asked for.
    frees: FreeCounters,
    quarantine: Quarantine,
    /// The counters of all clones, those that are gone summed up.
    clones: Mutex<Clones>,
}

/// What a lazy policy needs.
pub(crate) struct Lazy {
    pub(crate) queues: FlushQueues<Entry>,
    pub(crate) interval_ns: u64,
    pub(crate) timer: Timer,
}

#[derive(Default)]
struct Quarantine {
    ranges: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Clones {
    alive: Vec<Arc<Counters>>,
    gone: Stats,
}

/// The IOVA range of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// All of it, in whole granules, pads included.
    pub(crate) range: Range,
    /// How many bytes of it are mapped.
    pub(crate) mapped: u64,
}

/// An IOVA after its unmap, for who wants to watch it.
pub(crate) struct Unmapped {
    pub(crate) since_ns: u64,
    pub(crate) watch: Arc<Watch>,
}

/// The parts a [`Shared`] is made of.
pub(crate) struct Parts<D, A> {
    pub(crate) domain: D,
    pub(crate) allocator: A,
    pub(crate) policy: Policy,
    pub(crate) fallback: Option<Fallback>,
    pub(crate) limits: Limits,
    pub(crate) limit: u64,
    pub(crate) sampler: Sampler,
    pub(crate) brief_sampler: BriefSampler,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) cpu: Arc<dyn CpuId>,
    pub(crate) lazy: Option<Lazy>,
}

impl<D: Domain, A: Allocator> Shared<D, A> {
    pub(crate) fn new(parts: Parts<D, A>) -> Self {
        let Parts {
            domain,
            allocator,
            policy,
            fallback,
            limits,
            limit,
            sampler,
            brief_sampler,
            clock,
            cpu,
            lazy,
        } = parts;
        Shared {
            domain,
            allocator,
            policy,
            fallback,
            limits,
            limit,
            sampler,
            brief_sampler,
            clock,
            cpu,
            lazy,
            flush_failures: AtomicU64::new(0),
            expiry_time: TimeCounter::default(),
            frees: FreeCounters::default(),
            quarantine: Quarantine::default(),
            clones: Mutex::default(),
        }
    }

    /// Removes the translations of `span` and, at once or through a flush queue, what is cached of
    /// them; then frees its IOVA. With `watched`, the IOVA stays parked with the watcher.
    ///
    /// # Errors
    /// The device may still reach the range, which was quarantined.
    pub(crate) fn unmap(
        &self,
        span: Span,
        strictly: bool,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Unmapped>> {
        match &self.lazy {
            Some(lazy) if !strictly => self.unmap_lazily(lazy, span, watched, counters),
            _ => self.unmap_strictly(span, watched, counters),
        }
    }

    /// Rule L17: the invalidation is over before the IOVA is free (and before the caller gets its
    /// buffer back).
    fn unmap_strictly(
        &self,
        span: Span,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Unmapped>> {
        let mut gather = Gather::new();
        let mut unmapped = None;
        let result = self.domain.unmap_pages(span.range, &mut gather).and_then(|_| {
            if watched {
                let since_ns = self.clock.now_ns();
                unmapped = Some(Unmapped { since_ns, watch: Arc::default() });
            }
            counters.unmap_syncs.add(1);
            self.domain.iotlb_sync(&mut gather)
        });
        drop(gather);
        self.settle(span.range, unmapped, result, counters)
    }

    /// What follows the invalidation of a range that was unmapped strictly: it is free, or parked
    /// with its watcher, or quarantined if the invalidation failed.
    pub(crate) fn settle(
        &self,
        range: Range,
        unmapped: Option<Unmapped>,
        result: Result<()>,
        counters: &Counters,
    ) -> Result<Option<Unmapped>> {
        if let Err(error) = result {
            self.quarantine(range);
            return Err(error);
        }
        match &unmapped {
            // Nobody unwatches before it gets the watch: the IOVA is never ours here.
            Some(unmapped) => _ = unmapped.watch.release(self.clock.now_ns()),
            None => {
                counters.frees.count.add(1);
                // The number that decides whether the unmap is timed: they never both are.
                let (number, time) = (counters.unmaps.get(), &counters.frees.time);
                self.brief_sampler.time(number, 1, time, || self.free(range));
            }
        }
        Ok(unmapped)
    }

    /// The policy in force.
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Rule L18: translations go now; only the invalidation, the IOVA and the table pages wait.
    fn unmap_lazily(
        &self,
        lazy: &Lazy,
        span: Span,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Unmapped>> {
        let mut gather = Gather::queued();
        if let Err(error) = self.domain.unmap_pages(span.range, &mut gather) {
            self.quarantine(span.range);
            return Err(error);
        }
        let since_ns = self.clock.now_ns();
        let watch = watched.then(Arc::<Watch>::default);
        let unmapped = watch.clone().map(|watch| Unmapped { since_ns, watch });
        let mut entry = Some(Entry {
            range: span.range,
            bytes: span.mapped,
            since_ns,
            pages: gather.take_pages(),
            watch,
        });
        loop {
            let ring = if lazy.queues.rings() == 1 { 0 } else { self.cpu.current() };
            let mut batch = Batch::new();
            let enqueued = lazy.queues.enqueue(ring, &mut entry, &mut batch);
            self.release(&mut batch, &counters.frees);
            match enqueued {
                Enqueued::Queued => break,
                Enqueued::Arm => {
                    self.arm(lazy);
                    break;
                }
                Enqueued::Full => {
                    // Rule L22. Not under the queue's lock: others may queue meanwhile, where a
                    // flush of somebody else made room.
                    counters.full_queue_flushes.add(1);
                    if let Err(error) = self.flush_domain(lazy) {
                        self.quarantine(span.range);
                        return Err(error);
                    }
                    self.reap(lazy, ring, &counters.frees);
                }
            }
        }
        Ok(unmapped)
    }

    /// Takes back what a map call that failed had mapped. Rule L29: its IOVA is free at once, and
    /// never goes through the flush queue. Whether it worked; if not, the range is quarantined.
    pub(crate) fn unwind(&self, range: Range, counters: &Counters) -> bool {
        let span = Span { range, mapped: 0 };
        self.unmap_strictly(span, false, counters).is_ok()
    }

    /// Gives an IOVA range back to the allocator, other than by an unmap or a flush.
    pub(crate) fn free_counted(&self, range: Range, counters: &Counters) {
        counters.frees.count.add(1);
        self.free(range);
    }

    /// Gives an IOVA range back to the allocator.
    fn free(&self, range: Range) {
        // It was allocated with a size that fits 64 bits, rounded in the same way.
        let size = range.extent().saturating_add(1);
        let size = self.allocation_size(size).unwrap_or(size);
        // An allocator refuses what it never gave out: then there is nothing to give back, and it
        // has counted the attempt.
        let freed = self.allocator.free(range.first().0, size);
        debug_assert!(freed.is_ok(), "{freed:?}");
    }

    /// How much to ask the allocator for: whole granules of its own.
    pub(crate) fn allocation_size(&self, size: u64) -> Option<u64> {
        size.checked_next_multiple_of(self.allocator.granule())
    }

    /// Keeps an IOVA range from ever being used again. (Table pages need no such care: a list of
    /// them that is dropped goes back to its table, which frees it no sooner than it may.)
    pub(crate) fn quarantine(&self, range: Range) {
        self.quarantine.ranges.add(1);
        self.quarantine.bytes.add(range.extent().saturating_add(1));
    }

    /// Releases what flushes have covered: table pages, then IOVAs.
    fn release(&self, batch: &mut Batch<Entry>, frees: &FreeCounters) {
        if batch.entries.is_empty() {
            return;
        }
        let mut number = frees.count.get();
        let mut freed = 0;
        // By reference: a batch is some kilobytes, and mostly empty.
        for Entry { range, pages, watch, .. } in batch.entries.drain(..) {
            drop(pages);
            if watch.is_none_or(|watch| watch.release(batch.released_ns)) {
                self.brief_sampler.time(number, 1, &frees.time, || self.free(range));
                number += 1;
                freed += 1;
            }
        }
        frees.count.add(freed);
    }

    fn arm(&self, lazy: &Lazy) {
        lazy.timer.arm(self.clock.now_ns().saturating_add(lazy.interval_ns));
    }

    fn flush_domain(&self, lazy: &Lazy) -> Result<()> {
        let ticket = lazy.queues.start_flush();
        match self.domain.flush_iotlb_all() {
            Ok(()) => {
                lazy.queues.finish_flush(ticket, self.clock.now_ns());
                Ok(())
            }
            Err(error) => {
                self.flush_failures.add(1);
                Err(error)
            }
        }
    }

    /// Rule L24: whoever flushed, every queue can be reaped.
    fn reap_all(&self, lazy: &Lazy) {
        (0..lazy.queues.rings()).for_each(|ring| self.reap(lazy, ring, &self.frees));
    }

    /// Releases all of a queue that may be.
    fn reap(&self, lazy: &Lazy, ring: usize, frees: &FreeCounters) {
        loop {
            let mut batch = Batch::new();
            lazy.queues.reap(ring, &mut batch);
            let more = batch.entries.is_full();
            self.release(&mut batch, frees);
            if !more {
                return;
            }
        }
    }

    /// Flushes and releases all that this covers. Nothing to do under a policy that is not lazy.
    pub(crate) fn flush(&self) -> Result<()> {
        let Some(lazy) = &self.lazy else { return Ok(()) };
        self.flush_domain(lazy)?;
        self.reap_all(lazy);
        Ok(())
    }

    /// What is to be done when the timer expires (rule L23).
    pub(crate) fn expire(&self) -> Result<()> {
        let Some(lazy) = &self.lazy else { return Ok(()) };
        let start = self.sampler.start_always();
        lazy.timer.disarm();
        lazy.queues.expiring();
        let result = self.flush_domain(lazy);
        self.reap_all(lazy);
        if result.is_err() && lazy.queues.rearm() {
            self.arm(lazy);
        }
        self.sampler.stop(start, &self.expiry_time);
        result
    }

    /// Whether anything waits in a flush queue.
    pub(crate) fn has_queued(&self) -> bool {
        self.lazy.as_ref().is_some_and(|lazy| lazy.queues.len() != 0)
    }

    pub(crate) fn timer_due_ns(&self) -> Option<u64> {
        self.lazy.as_ref()?.timer.due_ns()
    }

    pub(crate) fn add_clone(&self, counters: &Arc<Counters>) {
        self.clones.lock().alive.push(Arc::clone(counters));
    }

    pub(crate) fn remove_clone(&self, counters: &Arc<Counters>) {
        let mut clones = self.clones.lock();
        clones.alive.retain(|alive| !Arc::ptr_eq(alive, counters));
        counters.add_to(&mut clones.gone);
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = {
            let clones = self.clones.lock();
            let mut stats = clones.gone;
            clones.alive.iter().for_each(|counters| counters.add_to(&mut stats));
            stats
        };
        stats.quarantined = self.quarantine.ranges.get();
        stats.quarantined_bytes = self.quarantine.bytes.get();
        stats.flush_failures = self.flush_failures.get();
        self.expiry_time.add_to(&mut stats.expiry_time);
        self.frees.add_to(&mut stats);
        if let Some(lazy) = &self.lazy {
            stats.flushes = lazy.queues.flushes();
            stats.queued = lazy.queues.len() as u64;
            stats.queued_bytes = lazy.queues.bytes();
            stats.exposure = lazy.queues.exposure();
        }
        stats
    }
}

impl<D: Domain, A: Allocator> Drop for Shared<D, A> {
    /// Rule L30. Unlike in Linux the domain and the allocator may outlive the device: so what is
    /// queued is flushed one last time, and only what that covers is given back.
    fn drop(&mut self) {
        let Some(mut lazy) = self.lazy.take() else { return };
        lazy.timer.stop();
        if lazy.queues.len() == 0 {
            return;
        }
        let flushed = self.domain.flush_iotlb_all().is_ok();
        lazy.queues.drain(&mut |Entry { range, pages, .. }| {
            drop(pages);
            if flushed {
                self.free(range);
            }
        });
    }
}
