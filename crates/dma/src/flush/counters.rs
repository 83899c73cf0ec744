//! Which flush covers which queued entry.

use ringfence_sync::{
    atomic::{AtomicU64, Ordering, fence},
    mutant,
};

/// Counts the whole-domain flushes that were started, and tracks the newest that finished.
///
/// Flushes are numbered from 1 in the order in which they start. What is unmapped is stamped with
/// the number of flushes started so far, *after* its translation was removed; so exactly the
/// flushes with a number above the stamp began after the translation was gone, and once one of them
/// has finished nothing stale can be left. With the highest number that finished, rather than a
/// count, flushes may overtake each other, and failed flushes need no care: they simply never
/// finish.
pub(crate) struct Counters {
    started: AtomicU64,
    finished: AtomicU64,
    /// When the newest flush finished. Only reported, it decides nothing: hence an atomic of
    /// `core`, not the model's.
    finished_ns: core::sync::atomic::AtomicU64,
}

/// A flush that was started.
#[must_use = "a flush that is never finished releases nothing"]
pub(crate) struct Ticket(u64);

impl Counters {
    pub(crate) fn new() -> Self {
        Counters {
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            finished_ns: core::sync::atomic::AtomicU64::new(0),
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
        fence(Ordering::SeqCst);
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
        fence(Ordering::SeqCst);
    }

    /// The stamp for a translation that was just removed. Rule L20: it counts the flushes that were
    /// started, not those that have finished: one in flight does not cover entries queued meanwhile.
    pub(crate) fn stamp(&self) -> u64 {
        if mutant!("a stamp counts the flushes that have finished") {
            return self.finished();
        }
        // Acquire pairs with the Release in `start`.
        self.started.load(Ordering::Acquire)
    }

    /// The newest flush that has finished: to be read once for many [`covers`](Self::covers).
    pub(crate) fn finished(&self) -> u64 {
        self.finished.load(Ordering::Acquire)
    }

    /// When that was, or later, as a flush may have finished since. To be read after it.
    pub(crate) fn finished_ns(&self) -> u64 {
        self.finished_ns.load(Ordering::Relaxed)
    }

    /// Rule L19: whether an entry stamped `stamp` may be released when `finished` is the newest flush
    /// that has finished.
    pub(crate) fn covers(stamp: u64, finished: u64) -> bool {
        stamp < finished || mutant!("a flush covers what its stamp counts") && stamp == finished
    }

    /// How many flushes were started.
    pub(crate) fn flushes(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_flush_already_in_flight_when_the_entry_is_queued_does_not_release_it() {
        // rules L19, L20
        let counters = Counters::new();
        let in_flight = counters.start();
        counters.removed();
        let stamp = counters.stamp();
        counters.finish(in_flight, 0);
        assert!(!Counters::covers(stamp, counters.finished()));
        let later = counters.start();
        assert!(!Counters::covers(stamp, counters.finished()));
        counters.finish(later, 0);
        assert!(Counters::covers(stamp, counters.finished()));
    }

    #[test]
    fn flushes_that_overtake_each_other_release_no_more_than_they_cover() {
        // rule L20
        let counters = Counters::new();
        let before = counters.stamp();
        let first = counters.start();
        let between = counters.stamp();
        let second = counters.start();
        let after = counters.stamp();
        counters.finish(second, 0);
        let finished = counters.finished();
        assert!(Counters::covers(before, finished) && Counters::covers(between, finished));
        assert!(!Counters::covers(after, finished));
        counters.finish(first, 0);
        assert_eq!(counters.finished(), finished);
    }

    #[test]
    fn a_failed_flush_counts_for_nothing_and_delays_nothing() {
        // rule L19
        let counters = Counters::new();
        let stamp = counters.stamp();
        let _failed = counters.start();
        assert!(!Counters::covers(stamp, counters.finished()));
        let good = counters.start();
        counters.finish(good, 0);
        assert!(Counters::covers(stamp, counters.finished()));
    }
}
