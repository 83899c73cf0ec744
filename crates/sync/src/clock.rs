//! Time as a trait.

// The atomics of `core` even under loom: time is data here, not a way for threads to agree, and a
// clock may live in a static.
use core::{
    ops::Deref,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// A duration in nanoseconds, as a [`Clock`] counts them; at most `u64::MAX`.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A source of time.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some moment in the past. Never goes back.
    fn now_ns(&self) -> u64;
}

impl<P: Deref<Target: Clock> + Send + Sync> Clock for P {
    fn now_ns(&self) -> u64 {
        (**self).now_ns()
    }
}

/// A clock that moves only when a test moves it.
#[derive(Debug, Default)]
pub struct ManualClock {
    ns: AtomicU64,
    /// How far each reading moves the clock, so that a loop that waits for time to pass ends.
    step: AtomicU64,
}

impl ManualClock {
    /// A clock that shows `ns` nanoseconds.
    pub const fn new(ns: u64) -> ManualClock {
        ManualClock { ns: AtomicU64::new(ns), step: AtomicU64::new(0) }
    }

    /// A clock that shows 0 and moves by `step` nanoseconds after each reading.
    pub const fn stepping(step: u64) -> ManualClock {
        ManualClock { ns: AtomicU64::new(0), step: AtomicU64::new(step) }
    }

    /// Moves the clock forward by `ns` nanoseconds; it stops at `u64::MAX` rather than going back.
    // Ordering: a test that moves the clock moves all that it did before into the past.
    pub fn advance(&self, ns: u64) {
        let later = |now: u64| Some(now.saturating_add(ns));
        let _ = self.ns.fetch_update(Ordering::AcqRel, Ordering::Relaxed, later);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        // Ordering: see `advance`.
        let now = self.ns.load(Ordering::Acquire);
        let step = self.step.load(Ordering::Relaxed);
        if step != 0 {
            self.advance(step);
        }
        now
    }
}

/// The system's monotonic clock.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug, Default)]
pub struct MonotonicClock;

#[cfg(feature = "std")]
impl Clock for MonotonicClock {
    #[inline]
    fn now_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // Both parts are non-negative for this clock, and 2^64 ns are 584 years of uptime.
        (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_only_when_it_is_advanced_and_never_back() {
        let clock = ManualClock::new(5);
        assert_eq!((clock.now_ns(), clock.now_ns()), (5, 5));
        clock.advance(10);
        assert_eq!(clock.now_ns(), 15);
        clock.advance(u64::MAX);
        assert_eq!(clock.now_ns(), u64::MAX);
        let stepping = ManualClock::stepping(3);
        assert_eq!((stepping.now_ns(), stepping.now_ns()), (0, 3));
    }

    #[cfg(feature = "std")]
    #[test]
    fn the_systems_clock_never_goes_back() {
        let mut last = MonotonicClock.now_ns();
        assert!(last > 0);
        for _ in 0..1000 {
            let now = MonotonicClock.now_ns();
            assert!(now >= last);
            last = now;
        }
    }
}
