//! The state that all clones of a device share: the domain, the allocator, and the release of
//! IOVAs.

use std::sync::{Arc, atomic::AtomicU64};

use ringfence_iommu::{Address, Domain, Gather, Range, Result, Synced};
use ringfence_iova::Allocator;
use ringfence_sync::{clock::Clock, cpu::CpuId, lock::Mutex, mutant};

use crate::{
    BounceConfig, Choices, Policy, Stats, TimerKind, Waits,
    auto::{Auto, Tally},
    bounce::Client,
    counter::{Count, Sampler, TimeCounter},
    detect::Ledger,
    flush::{Entry, Lazy, Span, Watch},
    layout::Limits,
    mode::ModeCell,
    stats::{Counters, FreeCounters},
    trust::Means,
    tuning::Control,
    waits::{OtherWaits, timed},
};

/// The part of a device that its clones, its mappings and its timer share.
pub(crate) struct Shared<D: Domain, A: Allocator> {
    pub(crate) domain: D,
    pub(crate) allocator: A,
    /// The policy in force.
    pub(crate) mode: ModeCell,
    pub(crate) means: Means,
    /// Where it gets bounce slots, if it has pools.
    pub(crate) bouncer: Option<Bouncer<D::Target>>,
    /// Holds freed IOVAs back, if the use-after-unmap detector is on.
    pub(crate) detector: Option<Mutex<Ledger>>,
    pub(crate) limits: Limits,
    /// The highest IOVA to hand out.
    pub(crate) limit: u64,
    pub(crate) sampler: Sampler,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) cpu: Arc<dyn CpuId>,
    pub(crate) lazy: Lazy,
    pub(crate) timer_kind: TimerKind,
    /// The lock that serialises changes of policy and tuning.
    pub(crate) control: Mutex<Control>,
    pub(crate) flush_failures: AtomicU64,
    pub(crate) expiry_time: TimeCounter,
    /// What was freed outside the clones' calls: by the timer, or a requested flush.
    pub(crate) frees: FreeCounters,
    /// The waits for that.
    pub(crate) waits: OtherWaits,
    /// The ranges that are never used again, and their bytes.
    pub(crate) quarantined: [AtomicU64; 2],
    /// The counters of all clones, with a sum for those that are gone.
    pub(crate) clones: Mutex<Clones>,
}

/// A device's share of its domain's pools.
pub(crate) struct Bouncer<T: Address> {
    pub(crate) client: Client<T>,
    pub(crate) config: BounceConfig,
    /// Chooses under a policy that leaves it open.
    pub(crate) auto: Auto,
}

#[derive(Default)]
pub(crate) struct Clones {
    alive: Vec<Arc<Counters>>,
    gone: Stats,
    gone_waits: Waits,
    gone_tally: Tally,
}

impl<D: Domain, A: Allocator> Shared<D, A> {
    /// Removes the translations of `span` and, at once or through a flush queue, their cached
    /// copies; then frees its IOVA. With `watched`, the IOVA stays parked with the watcher.
    ///
    /// # Errors
    /// The device may still reach the range, which was quarantined.
    pub(crate) fn unmap(
        &self,
        span: Span,
        strictly: bool,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Arc<Watch>>> {
        let mode = self.mode.get();
        if mode.policy.is_lazy() && !strictly {
            self.unmap_lazily(mode, span, watched, counters)
        } else {
            self.unmap_strictly(span, watched, counters)
        }
    }

    /// Rule L17: the invalidation is over before the IOVA is free (and before the caller gets its
    /// buffer back).
    pub(crate) fn unmap_strictly(
        &self,
        span: Span,
        watched: bool,
        counters: &Counters,
    ) -> Result<Option<Arc<Watch>>> {
        let mut gather = Gather::new();
        let mut unmapped = None;
        let result = self.domain.unmap(span.range, &mut gather).and_then(|_| {
            unmapped = watched.then(|| Watch::new(self.clock.now_ns()));
            counters.unmap_syncs.add(1);
            timed(&*self.clock, &counters.waits.unmap, || self.domain.iotlb_sync(&mut gather))
        });
        drop(gather);
        self.settle(span.range, unmapped, result, counters)
    }

    /// Completes a strict unmap after its invalidation: the range becomes free, or is parked with
    /// its watcher, or quarantined if the invalidation failed.
    pub(crate) fn settle(
        &self,
        range: Range,
        unmapped: Option<Arc<Watch>>,
        result: Result<Synced>,
        counters: &Counters,
    ) -> Result<Option<Arc<Watch>>> {
        if let Err(error) = result {
            self.quarantine(range);
            return Err(error);
        }
        match &unmapped {
            // The watcher, which does not have the watch yet, cannot be gone: it will free the
            // IOVA.
            Some(watch) => _ = watch.release(self.clock.now_ns()),
            None => {
                counters.frees.count.add(1);
                // By the number that decides whether the unmap is timed, so that never both are.
                let (number, time) = (counters.unmaps.get(), &counters.frees.time);
                self.sampler.time(number, 1, time, || self.free(range));
            }
        }
        Ok(unmapped)
    }

    /// Undoes a map call that failed. Rule L29: its IOVA is free at once, and never goes through
    /// the flush queue. Returns whether that succeeded; if not, the range is quarantined.
    pub(crate) fn unwind(&self, range: Range, counters: &Counters) -> bool {
        let span = Span { range, mapped: 0 };
        self.unmap_strictly(span, false, counters).is_ok()
    }

    /// Gives an IOVA range back to the allocator, or to the detector, which may then release
    /// another.
    pub(crate) fn free(&self, range: Range) {
        match &self.detector {
            None => give_back(&self.allocator, range),
            Some(detector) => {
                let mut give_back = |range| give_back(&self.allocator, range);
                let now_ns = self.clock.now_ns();
                detector.lock().retire(range, now_ns, &mut give_back);
            }
        }
    }

    /// Gives back to the allocator what the detector holds; returns whether it held anything.
    pub(crate) fn free_held(&self) -> bool {
        let mut give_back = |range| give_back(&self.allocator, range);
        self.detector.as_ref().is_some_and(|held| held.lock().release_all(&mut give_back))
    }

    /// The size to request from the allocator: whole granules of the allocator.
    pub(crate) fn allocation_size(&self, size: u64) -> Option<u64> {
        size.checked_next_multiple_of(self.allocator.granule())
    }

    /// Keeps an IOVA range from ever being used again. (Table pages need no such care: a dropped
    /// list of them goes back to its table, which frees it no sooner than allowed.)
    pub(crate) fn quarantine(&self, range: Range) {
        self.quarantined[0].add(1);
        self.quarantined[1].add(range.extent().saturating_add(1));
    }

    /// What was chosen, and why, if the policy makes choices.
    pub(crate) fn choices(&self) -> Option<Choices> {
        let bouncer = self.bouncer.as_ref().filter(|_| self.mode.get().policy == Policy::Auto)?;
        let sum = Tally::default();
        {
            let clones = self.clones.lock();
            clones.gone_tally.add_to(&sum);
            let tallies = clones.alive.iter().filter_map(|counters| counters.tally.as_deref());
            tallies.for_each(|tally| tally.add_to(&sum));
        }
        Some(bouncer.auto.choices(&sum))
    }

    /// The counters of a new clone.
    pub(crate) fn add_clone(&self) -> Arc<Counters> {
        let counters = Arc::new(Counters::new(self.bouncer.is_some()));
        self.clones.lock().alive.push(Arc::clone(&counters));
        counters
    }

    pub(crate) fn remove_clone(&self, counters: &Arc<Counters>) {
        let mut clones = self.clones.lock();
        clones.alive.retain(|alive| !Arc::ptr_eq(alive, counters));
        counters.add_to(&mut clones.gone);
        counters.waits.add_to(&mut clones.gone_waits);
        if let Some(tally) = &counters.tally {
            tally.add_to(&clones.gone_tally);
        }
    }

    pub(crate) fn waits(&self) -> Waits {
        let mut waits = {
            let clones = self.clones.lock();
            let mut waits = clones.gone_waits.clone();
            clones.alive.iter().for_each(|counters| counters.waits.add_to(&mut waits));
            waits
        };
        self.waits.add_to(&mut waits);
        waits
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = {
            let clones = self.clones.lock();
            let mut stats = clones.gone;
            clones.alive.iter().for_each(|counters| counters.add_to(&mut stats));
            stats
        };
        [stats.quarantined, stats.quarantined_bytes] =
            [self.quarantined[0].get(), self.quarantined[1].get()];
        stats.flush_failures = self.flush_failures.get();
        if let Some(detector) = &self.detector {
            (stats.withheld, stats.withheld_bytes) = detector.lock().held();
        }
        self.expiry_time.add_to(&mut stats.expiry_time);
        self.frees.add_to(&mut stats);
        self.lazy.queues.add_to(&mut stats);
        stats
    }
}

impl<D: Domain, A: Allocator> Drop for Shared<D, A> {
    /// Rule L30. Unlike in Linux the domain and the allocator may outlive the device: so queued
    /// entries are flushed one last time, and only what that flush covers is given back.
    fn drop(&mut self) {
        self.free_held();
        self.lazy.timer.stop();
        if self.lazy.queues.len() == 0 {
            return;
        }
        let flushed =
            mutant!("a device ends without a flush") || self.domain.flush_iotlb_all().is_ok();
        let Shared { lazy, allocator, .. } = self;
        lazy.queues.drain(&mut |Entry { range, pages, .. }| {
            drop(pages);
            if flushed {
                give_back(allocator, range);
            }
        });
    }
}

fn give_back<A: Allocator>(allocator: &A, range: Range) {
    // It was allocated with a size that fits 64 bits, rounded in the same way.
    let size = range.extent().saturating_add(1);
    let size = size.checked_next_multiple_of(allocator.granule()).unwrap_or(size);
    // An allocator refuses a range that it never handed out: then there is nothing to give back,
    // and it has counted the attempt.
    let freed = allocator.free(range.first().0, size);
    debug_assert!(freed.is_ok(), "{freed:?}");
}
