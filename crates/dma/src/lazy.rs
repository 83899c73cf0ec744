//! Lazy unmaps: what waits for a flush, and when threads flush.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use ringfence_iommu::{Domain, Gather, Result};
use ringfence_iova::Allocator;
use ringfence_sync::{histogram::Histogram, mutant};

use crate::{
    Device, QueueKind,
    counter::Count,
    flush::{Batch, Enqueued, Entry, Lazy, Removed, Span, Watch},
    mode::Mode,
    shared::Shared,
    stats::{Counters, FreeCounters},
};

impl<D: Domain, A: Allocator> Shared<D, A> {
    /// Rule L18: removes translations now; only the invalidation, the IOVA and the table pages
    /// wait.
    pub(crate) fn unmap_lazily(
        &self,
        mode: Mode,
        span: Span,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Arc<Watch>>> {
        let reserved = mode.bounds_bytes;
        let late = mutant!("bytes are reserved after they are exposed");
        if reserved && !late && !self.reserve(span.mapped, counters) {
            counters.bound_unmaps.add(1);
            return self.unmap_strictly(span, watched, counters);
        }
        let mut gather = Gather::queued();
        if mutant!("a range is queued before its translation is removed") {
            let removed = Removed { since_ns: self.clock.now_ns(), pages: gather.take_pages() };
            let queued = self.queue(span, removed, reserved, watched, counters);
            self.domain.unmap(span.range, &mut gather)?;
            return queued;
        }
        if let Err(error) = self.domain.unmap(span.range, &mut gather) {
            self.give_up(span, reserved);
            return Err(error);
        }
        if reserved && late {
            while !self.reserve(span.mapped, counters) {}
        }
        let removed = Removed { since_ns: self.clock.now_ns(), pages: gather.take_pages() };
        self.queue(span, removed, reserved, watched, counters)
    }

    /// Queues what was removed of a range for a flush.
    pub(crate) fn queue(
        &self,
        span: Span,
        removed: Removed,
        reserved: bool,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Arc<Watch>>> {
        let Removed { since_ns, pages } = removed;
        let watch = watched.then(|| Watch::new(since_ns));
        let unmapped = watch.clone();
        let mut entry =
            Some(Entry { range: span.range, bytes: span.mapped, since_ns, pages, watch, reserved });
        loop {
            // Read each time: the queues may change while this thread flushes.
            let per_cpu = self.mode.get().policy.queue_kind() == Some(QueueKind::PerCpu);
            let ring = if per_cpu { self.cpu.current() } else { 0 };
            let mut batch = Batch::new();
            let enqueued = self.lazy.queues.enqueue(ring, &mut entry, &mut batch);
            self.release(&mut batch, &counters.frees);
            match enqueued {
                Enqueued::Queued { arm, high } => {
                    self.watch_time(since_ns, arm, high, counters);
                    break;
                }
                // Rule L22. Flushes without the queue's lock: other threads may queue meanwhile, if
                // another flush made room.
                Enqueued::Full => counters.full_queue_flushes.add(1),
                // Rule L27: the device became strict, or bounded, after this thread had read the
                // mode.
                Enqueued::Closed => counters.bound_flushes.add(1),
            }
            let left = mutant!("a refused entry is left to the flush of another thread");
            if !(left && enqueued == Enqueued::Closed)
                && let Err(error) = self.flush_domain(&counters.waits.full)
            {
                self.give_up(span, reserved);
                return Err(error);
            }
            if enqueued == Enqueued::Full {
                self.reap(ring, &counters.frees);
            } else if let Some(entry) = entry.take() {
                // The flush began after the entry's translation was removed: it need not be queued.
                let mut batch = Batch::new();
                batch.released_ns = self.clock.now_ns();
                self.lazy.queues.note_released(ring, &entry, batch.released_ns);
                batch.entries.push(entry);
                self.release(&mut batch, &counters.frees);
                break;
            }
        }
        if reserved && self.lazy.queues.budget.is_overdrawn() {
            // The bound was lowered since this thread reserved. If the flush fails, the timer
            // flushes what is queued.
            counters.bound_flushes.add(1);
            let _ = self.flush_domain(&counters.waits.full);
            self.reap_all(&counters.frees);
        }
        Ok(unmapped)
    }

    /// Quarantines a range whose unmap failed. Its buffer is not given back, so that it does not
    /// count as exposed.
    fn give_up(&self, span: Span, reserved: bool) {
        self.quarantine(span.range);
        if reserved {
            self.lazy.queues.budget.give_back(span.mapped);
        }
    }

    /// Reserves bytes that are to be exposed, with a flush if the bound is reached. Returns whether
    /// it succeeded; if not, they must not be exposed.
    fn reserve(&self, bytes: u64, counters: &Counters) -> bool {
        let budget = &self.lazy.queues.budget;
        if !budget.fits(bytes) {
            return false;
        }
        if budget.reserve(bytes) {
            return true;
        }
        let _alone = self.lazy.at_bound.lock();
        // Another thread may have made room while this one waited for the lock.
        if budget.reserve(bytes) {
            return true;
        }
        counters.bound_flushes.add(1);
        if self.flush_domain(&counters.waits.full).is_err() {
            return false;
        }
        self.reap_all(&counters.frees);
        // Others may have taken all of it; do not wait for more than one flush.
        budget.reserve(bytes)
    }

    /// Makes the timer due in time for what was just queued, and flushes here if the timer is
    /// overdue.
    fn watch_time(&self, since_ns: u64, arm: bool, high: bool, counters: &Counters) {
        let Lazy { pace, timer, .. } = &self.lazy;
        let due_ns = if high { since_ns } else { since_ns.saturating_add(pace.wait_ns()) };
        let max_late_ns = pace.max_late_ns();
        // Usually it is armed already. If time is bounded it may have been armed for an entry that
        // was unmapped later but queued sooner.
        if arm || (high || max_late_ns.is_some()) && timer.is_later_than(due_ns) {
            timer.arm(due_ns);
        }
        if let Some(max_late_ns) = max_late_ns
            && let Some(latest_ns) = since_ns.checked_sub(max_late_ns.saturating_add(1))
            && timer.take_overdue(latest_ns)
        {
            counters.bound_flushes.add(1);
            // If it fails, it is counted, and the timer flushes what is queued.
            let _ = self.expire_in(&counters.waits.full, &counters.frees);
        }
    }

    /// Releases what flushes have covered: table pages, then IOVAs.
    fn release(&self, batch: &mut Batch, frees: &FreeCounters) {
        if batch.entries.is_empty() {
            return;
        }
        let mut number = frees.count.get();
        let (mut freed, mut reserved_bytes) = (0, 0);
        // By reference: a batch takes some kilobytes, and is mostly empty.
        for Entry { range, pages, watch, reserved, bytes, .. } in batch.entries.drain(..) {
            drop(pages);
            if reserved {
                // The sum of what is reserved fits 63 bits.
                reserved_bytes += bytes;
            }
            if watch.is_none_or(|watch| watch.release(batch.released_ns)) {
                self.sampler.time(number, 1, &frees.time, || self.free(range));
                number += 1;
                freed += 1;
            }
        }
        frees.count.add(freed);
        if reserved_bytes != 0 {
            self.lazy.queues.budget.give_back(reserved_bytes);
        }
    }

    /// Flushes the domain, without releasing anything; records in `waits` how long it took.
    pub(crate) fn flush_domain(&self, waits: &Histogram) -> Result<()> {
        let ticket = self.lazy.queues.counters.start();
        let begun_ns = self.clock.now_ns();
        let result = self.domain.flush_iotlb_all();
        let ended_ns = self.clock.now_ns();
        let took_ns = ended_ns.saturating_sub(begun_ns);
        waits.record(took_ns);
        self.lazy.pace.flushed(took_ns);
        match result {
            Ok(_) => self.lazy.queues.counters.finish(ticket, ended_ns),
            Err(_) => self.flush_failures.add(1),
        }
        result.map(|_synced| ())
    }

    /// Rule L24: after a flush by any thread, every queue can be reaped, in use or formerly in use.
    pub(crate) fn reap_all(&self, frees: &FreeCounters) {
        let rings = if mutant!("one queue is reaped") { 1 } else { self.lazy.queues.rings() };
        (0..rings).for_each(|ring| self.reap(ring, frees));
    }

    /// Releases all that may be released from a queue.
    fn reap(&self, ring: usize, frees: &FreeCounters) {
        loop {
            let mut batch = Batch::new();
            self.lazy.queues.reap(ring, &mut batch);
            let more = batch.entries.is_full();
            self.release(&mut batch, frees);
            if !more {
                return;
            }
        }
    }

    /// Whether a flush may have anything to do.
    pub(crate) fn wants_flush(&self) -> bool {
        self.mode.get().policy.is_lazy() || self.has_queued()
    }

    /// What the timer does, `late_ns` nanoseconds after it was due (rule L23).
    pub(crate) fn expire_late(&self, late_ns: u64) -> Result<()> {
        let start = self.sampler.start_always();
        self.lazy.pace.woke(late_ns);
        let result = self.expire_in(&self.waits.timer, &self.frees);
        self.sampler.stop(start, 1, &self.expiry_time);
        result
    }

    /// An expiry; `waits` and `frees` are the counters of its caller.
    pub(crate) fn expire_in(&self, waits: &Histogram, frees: &FreeCounters) -> Result<()> {
        let Lazy { queues, pace, timer, .. } = &self.lazy;
        timer.disarm();
        let late = mutant!("the flag is cleared after the flush");
        let idle =
            mutant!("an expiry with nothing to flush leaves the flag") && !self.wants_flush();
        if !late && !idle {
            queues.expiring();
        }
        // After the flag was cleared: if the device becomes lazy again meanwhile, its threads must
        // find it clear.
        if !self.wants_flush() {
            return Ok(());
        }
        let result = catch_unwind(AssertUnwindSafe(|| {
            let result = self.flush_domain(waits);
            self.reap_all(frees);
            result
        }));
        if late {
            queues.expiring();
        }
        // What a flush that fails or panics leaves is still reachable.
        if !matches!(result, Ok(Ok(()))) {
            let due_ns = self.clock.now_ns().saturating_add(pace.wait_ns());
            if queues.rearm() {
                timer.arm(due_ns);
            }
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Whether anything waits in a flush queue.
    pub(crate) fn has_queued(&self) -> bool {
        self.lazy.queues.len() != 0
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// Flushes the domain and releases everything that this covers, now. Does nothing if the policy
    /// is not lazy and nothing is queued.
    ///
    /// # Errors
    /// The flush failed; what was queued stays queued.
    pub fn flush(&self) -> Result<()> {
        let shared = self.shared();
        if !shared.wants_flush() {
            return Ok(());
        }
        shared.flush_domain(&shared.waits.asked)?;
        shared.reap_all(&shared.frees);
        Ok(())
    }

    /// When the flush queue's timer is due, by the environment's clock; `None` if it is not armed.
    pub fn timer_due_at_ns(&self) -> Option<u64> {
        self.shared().lazy.timer.due_ns()
    }

    /// What the timer does when it expires: one flush, and every queue reaped (rule [L23]).
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the timer is armed again.
    ///
    /// [L23]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l23
    pub fn expire(&self) -> Result<()> {
        let now_ns = self.shared().clock.now_ns();
        let late_ns = self.timer_due_at_ns().and_then(|due_ns| now_ns.checked_sub(due_ns));
        self.shared().expire_late(late_ns.unwrap_or(0))
    }
}
