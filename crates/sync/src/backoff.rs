//! Waiting for another thread, politely.

use core::cell::Cell;

/// How a thread waits for something that another is about to do: a few spins, then more, then
/// (with the feature `std`) giving the CPU away each time.
///
/// On a machine with few CPUs the thread waited for may need this very CPU: spinning for longer
/// than a scheduler wake-up takes gains nothing.
#[derive(Debug, Default)]
pub struct Backoff {
    step: Cell<u32>,
}

/// Up to 2^SPINS spin hints at a time, then the CPU is yielded: 127 hints in all, some
/// microseconds at most.
const SPINS: u32 = 6;

impl Backoff {
    /// Nothing waited yet.
    pub const fn new() -> Backoff {
        Backoff { step: Cell::new(0) }
    }

    /// Whether it has spun for so long that a caller that can sleep should do so.
    pub fn is_completed(&self) -> bool {
        self.step.get() > SPINS
    }

    /// Spins, longer each time up to a bound, and never yields.
    #[inline]
    pub fn spin(&self) {
        let step = self.step.get().min(SPINS);
        spin(step);
        self.step.set(step + 1);
    }

    /// Waits a little: spins at first, yields the CPU later.
    #[inline]
    pub fn snooze(&self) {
        let step = self.step.get();
        if step <= SPINS {
            spin(step);
            self.step.set(step + 1);
        } else {
            yield_now();
        }
    }
}

#[cfg(not(loom))]
fn spin(step: u32) {
    for _ in 0..1u32 << step {
        core::hint::spin_loop();
    }
}

#[cfg(all(feature = "std", not(loom)))]
fn yield_now() {
    std::thread::yield_now();
}

#[cfg(not(any(feature = "std", loom)))]
fn yield_now() {
    spin(SPINS);
}

// Under loom every turn of a spin loop must yield, or the model checker would explore spinning for
// ever.
#[cfg(loom)]
fn spin(_step: u32) {
    loom::thread::yield_now();
}

#[cfg(loom)]
fn yield_now() {
    loom::thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_spins_first_and_reports_when_it_is_time_to_sleep() {
        let backoff = Backoff::new();
        for _ in 0..=SPINS {
            assert!(!backoff.is_completed());
            backoff.snooze();
        }
        assert!(backoff.is_completed());
        backoff.snooze();
        let backoff = Backoff::new();
        assert!(!backoff.is_completed());
        for _ in 0..100 {
            backoff.spin();
        }
    }
}
