//! When the flush timer fires.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::FlushTuning;

/// No bound.
const NEVER: u64 = u64::MAX;

const NS_PER_MS: u64 = 1_000_000;

/// How long an unmapped range waits for its flush, given how long it may be exposed and how long
/// flushes and wake-ups took so far.
///
/// All values are estimates that synchronise nothing: hence the atomics of `std`.
pub(crate) struct Pace {
    interval_ns: AtomicU64,
    /// How long memory may be exposed, or [`NEVER`].
    bound_ns: AtomicU64,
    /// The longest recent flush.
    flush_ns: AtomicU64,
    /// The longest recent delay of the timer's wake-up.
    wake_ns: AtomicU64,
}

impl Pace {
    pub(crate) fn new() -> Pace {
        Pace {
            interval_ns: AtomicU64::new(NEVER),
            bound_ns: AtomicU64::new(NEVER),
            flush_ns: AtomicU64::new(0),
            wake_ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn tune(&self, tuning: &FlushTuning) {
        let interval_ns = tuning.interval_ms.saturating_mul(NS_PER_MS);
        self.interval_ns.store(interval_ns, Ordering::Relaxed);
        self.bound_ns.store(bound_ns(tuning), Ordering::Relaxed);
    }

    /// Records how long a flush took.
    pub(crate) fn flushed(&self, ns: u64) {
        note(&self.flush_ns, ns);
    }

    /// Records how late the timer was.
    pub(crate) fn woke(&self, late_ns: u64) {
        note(&self.wake_ns, late_ns);
    }

    /// The time from the removal of a translation until the timer fires.
    pub(crate) fn wait_ns(&self) -> u64 {
        let interval_ns = self.interval_ns.load(Ordering::Relaxed);
        match self.bound_ns.load(Ordering::Relaxed) {
            NEVER => interval_ns,
            bound_ns => interval_ns.min(bound_ns - self.lead_ns(bound_ns)),
        }
    }

    /// How late the timer may be before another thread must flush. `None` without a bound.
    pub(crate) fn max_late_ns(&self) -> Option<u64> {
        let bound_ns = self.bound_ns.load(Ordering::Relaxed);
        if bound_ns == NEVER {
            return None;
        }
        // The flush itself must still fit into the bound.
        let flush_ns = with_margin(self.flush_ns.load(Ordering::Relaxed));
        let latest_ns = bound_ns.saturating_sub(flush_ns.max(bound_ns / 16));
        Some(latest_ns.saturating_sub(self.wait_ns()))
    }

    /// How long before the bound the timer fires: the recent time of a wake-up and a flush, plus a
    /// margin. At least an eighth of the bound, as they may take longer than before; at most three
    /// quarters, as flushing even more often would not make such slow flushes fit.
    fn lead_ns(&self, bound_ns: u64) -> u64 {
        let (flush_ns, wake_ns) = (&self.flush_ns, &self.wake_ns);
        let seen_ns =
            flush_ns.load(Ordering::Relaxed).saturating_add(wake_ns.load(Ordering::Relaxed));
        with_margin(seen_ns).clamp(bound_ns / 8, bound_ns - bound_ns / 4)
    }
}

/// How long memory may be exposed under a tuning, in nanoseconds; `u64::MAX` if there is no bound.
pub(crate) fn bound_ns(tuning: &FlushTuning) -> u64 {
    tuning.max_exposure_ms.map_or(NEVER, |ms| ms.saturating_mul(NS_PER_MS).min(NEVER - 1))
}

fn with_margin(ns: u64) -> u64 {
    ns.saturating_add(ns / 4)
}

/// A decaying maximum: it loses an eighth with each sample.
fn note(estimate: &AtomicU64, sample: u64) {
    let before = estimate.load(Ordering::Relaxed);
    let now = sample.max(before - before.div_ceil(8));
    // Most samples change nothing: the cache line stays shared.
    if now != before {
        estimate.store(now, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MS: u64 = NS_PER_MS;

    fn pace(interval_ms: u64, max_exposure_ms: Option<u64>) -> Pace {
        let pace = Pace::new();
        pace.tune(&FlushTuning { interval_ms, max_exposure_ms, ..FlushTuning::default() });
        pace
    }

    #[test]
    fn without_a_bound_the_interval_is_all() {
        let pace = pace(10, None);
        pace.flushed(50 * MS);
        pace.woke(50 * MS);
        assert_eq!((pace.wait_ns(), pace.max_late_ns()), (10 * MS, None));
    }

    #[test]
    fn the_timer_is_due_early_enough_for_what_flushes_and_wake_ups_take() {
        let pace = pace(1000, Some(80));
        assert_eq!(pace.wait_ns(), 70 * MS, "an eighth, whatever was seen");
        assert_eq!(pace.max_late_ns(), Some(5 * MS));
        pace.flushed(12 * MS);
        pace.woke(12 * MS);
        assert_eq!(pace.wait_ns(), 50 * MS, "24 ms and a margin of 6");
        assert_eq!(pace.max_late_ns(), Some(15 * MS), "the flush takes 12 ms and a margin of 3");
        pace.woke(200 * MS);
        assert_eq!(pace.wait_ns(), 20 * MS, "a quarter at least");
        for _ in 0..100 {
            pace.flushed(0);
            pace.woke(0);
        }
        assert_eq!(pace.wait_ns(), 70 * MS, "what was long ago is forgotten");
    }

    #[test]
    fn an_interval_shorter_than_the_bound_stays() {
        let pace = pace(10, Some(80));
        assert_eq!(pace.wait_ns(), 10 * MS);
        assert_eq!(pace.max_late_ns(), Some(65 * MS));
    }

    #[test]
    fn the_longest_times_do_not_overflow() {
        let pace = pace(u64::MAX, Some(u64::MAX));
        pace.flushed(u64::MAX);
        pace.woke(u64::MAX);
        assert!(pace.wait_ns() > 0);
        assert_eq!(pace.max_late_ns(), Some(0));
    }
}
