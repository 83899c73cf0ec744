//! Which flush covers which queued entry.

use core::marker::PhantomData;

use ringfence_sync::atomic::{AtomicU64, Ordering, fence};

/// The rules that make the counters sound, as constants: the models break one at a time and show
/// that the checker detects it.
pub(crate) trait Rules {
    /// Rule L25: the removal of a translation is visible before the stamp is read.
    const BARRIER: bool = true;
    /// Rule L20: the stamp counts the flushes that were started, not those that have finished: one
    /// in flight does not cover entries queued meanwhile.
    fn stamp(started: &AtomicU64, _finished: &AtomicU64) -> u64 {
        // Acquire pairs with the Release in `Counters::start`.
        started.load(Ordering::Acquire)
    }
    /// Rule L19: whether an entry stamped `stamp` may be released when `finished` is the
    /// newest flush that has finished.
    fn covers(stamp: u64, finished: u64) -> bool {
        stamp < finished
    }
    /// Rule L27: a closed queue takes no late entries.
    const CLOSES: bool = true;
    /// Bytes are checked for and reserved in one step.
    const RESERVES_AT_ONCE: bool = true;
}

/// The correct rules.
pub(crate) struct Sound;

impl Rules for Sound {}

/// Counts the whole-domain flushes that were started, and tracks the newest that finished.
///
/// Flushes are numbered from 1 in the order in which they start. What is unmapped is stamped with
/// the number of flushes started so far, *after* its translation was removed; so exactly the
/// flushes with a number above the stamp began after the translation was gone, and once one of them
/// has finished nothing stale can be left. With the highest number that finished, rather than a
/// count, flushes may overtake each other, and failed flushes need no care: they simply never
/// finish.
pub(crate) struct Counters<R = Sound> {
    started: AtomicU64,
    finished: AtomicU64,
    /// When the newest flush finished. Only reported, it decides nothing: hence an atomic of
    /// `core`, not the model's.
    finished_ns: core::sync::atomic::AtomicU64,
    rules: PhantomData<R>,
}

/// A flush that was started.
#[must_use = "a flush that is never finished releases nothing"]
pub(crate) struct Ticket(u64);

impl<R: Rules> Counters<R> {
    pub(crate) fn new() -> Self {
        Counters {
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            finished_ns: core::sync::atomic::AtomicU64::new(0),
            rules: PhantomData,
        }
    }

    /// To be called before the domain is flushed.
    pub(crate) fn start(&self) -> Ticket {
        // Release, not for the count itself, but so that a thread that reads a stamp that counts
        // this flush also sees what its thread did before (the timer's expiry clears its flag
        // before, see `FlushQueues::expiring`).
        let number = self.started.fetch_add(1, Ordering::Release) + 1;
        // The other half of the barrier in `removed`: either that thread's stamp counts this flush,
        // or this flush and every later walk of the table see the translation gone.
        if R::BARRIER {
            fence(Ordering::SeqCst);
        }
        Ticket(number)
    }

    /// To be called when the domain's flush has succeeded, with the time.
    pub(crate) fn finish(&self, ticket: Ticket, now_ns: u64) {
        self.finished_ns.fetch_max(now_ns, Ordering::Relaxed);
        // Release: a thread that sees the number also sees what the flush did.
        self.finished.fetch_max(ticket.0, Ordering::Release);
    }

    /// To be called after a translation was removed and before [`stamp`](Self::stamp).
    ///
    /// Rule L25. Without it the removal may still sit in this CPU's store buffer while the stamp is
    /// read: a flush could start in between, uncounted by the stamp, let the device walk the table
    /// and cache the dead translation again, and finish: the entry would be released while the
    /// device can still reach it.
    pub(crate) fn removed(&self) {
        if R::BARRIER {
            fence(Ordering::SeqCst);
        }
    }

    /// The stamp for a translation that was just removed.
    pub(crate) fn stamp(&self) -> u64 {
        R::stamp(&self.started, &self.finished)
    }

    /// The newest flush that has finished: to be read once for many [`covers`](Self::covers).
    pub(crate) fn finished(&self) -> u64 {
        self.finished.load(Ordering::Acquire)
    }

    /// When that was, or later, as a flush may have finished since. To be read after it.
    pub(crate) fn finished_ns(&self) -> u64 {
        self.finished_ns.load(Ordering::Relaxed)
    }

    /// Whether an entry stamped `stamp` may be released.
    pub(crate) fn covers(stamp: u64, finished: u64) -> bool {
        R::covers(stamp, finished)
    }

    /// How many flushes were started.
    pub(crate) fn flushes(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type Sounds = Counters<Sound>;

    #[test]
    fn a_flush_already_in_flight_when_the_entry_is_queued_does_not_release_it() {
        // rules L19, L20
        let counters = Sounds::new();
        let in_flight = counters.start();
        counters.removed();
        let stamp = counters.stamp();
        counters.finish(in_flight, 0);
        assert!(!Sounds::covers(stamp, counters.finished()));
        let later = counters.start();
        assert!(!Sounds::covers(stamp, counters.finished()));
        counters.finish(later, 0);
        assert!(Sounds::covers(stamp, counters.finished()));
    }

    #[test]
    fn flushes_that_overtake_each_other_release_no_more_than_they_cover() {
        // rule L20
        let counters = Sounds::new();
        let before = counters.stamp();
        let first = counters.start();
        let between = counters.stamp();
        let second = counters.start();
        let after = counters.stamp();
        counters.finish(second, 0);
        let finished = counters.finished();
        assert!(Sounds::covers(before, finished) && Sounds::covers(between, finished));
        assert!(!Sounds::covers(after, finished));
        counters.finish(first, 0);
        assert_eq!(counters.finished(), finished);
    }

    #[test]
    fn a_failed_flush_counts_for_nothing_and_delays_nothing() {
        // rule L19
        let counters = Sounds::new();
        let stamp = counters.stamp();
        let _failed = counters.start();
        assert!(!Sounds::covers(stamp, counters.finished()));
        let good = counters.start();
        counters.finish(good, 0);
        assert!(Sounds::covers(stamp, counters.finished()));
    }
}
