//! Giving back idle memory.
//!
//! Every shelf tracks the least number of slots that it held in an interval: that many were not
//! needed. At the end of the interval these lose their memory, except a quarter of the number that
//! were needed. The timer runs for as long as slots come and go, and once more: then it has given
//! back all it can, and sleeps until a slot is taken again.

use std::{sync::atomic::Ordering, time::Duration};

use ringfence_iommu::Address;

use super::{BouncePools, Inner};

/// log2 of the nanoseconds of a tick: about a millisecond, so that 32 bits of them are weeks.
const TICK: u32 = 20;

impl<T: Address> BouncePools<T> {
    /// Gives back all memory that is not in use.
    pub fn trim(&self) {
        self.0.trim();
    }

    /// When [`expire`](Self::expire) is to be called next, by the environment's clock; `None` if
    /// there is nothing to do until a slot is taken.
    pub fn due_at_ns(&self) -> Option<u64> {
        self.0.timer.due_ns()
    }

    /// What the timer does when it is due: gives back the slots that were not needed since it was
    /// last due, except a quarter of the number that were. For callers with an event loop.
    pub fn expire(&self) {
        self.0.expire();
    }
}

impl<T: Address> Inner<T> {
    /// To be called after a slot came off a shelf, or went onto one: makes sure that the timer
    /// runs.
    ///
    /// Relaxed is enough. The shelf was touched under its lock. The timer clears `ticking` before
    /// it locks any shelf: if it locks this one later, it finds it touched; if it did earlier, this
    /// load sees `ticking` cleared.
    #[inline]
    pub(super) fn note_use(&self) {
        if !self.ticking.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let now_ns = self.look();
        // Ordering: of this and the timer's `expire` the later one sees what the other wrote before: if
        // `ticking` stays set, the timer is set, too.
        self.ticking.swap(true, Ordering::AcqRel);
        self.timer.arm(now_ns.saturating_add(self.interval_ns()));
    }

    fn interval_ns(&self) -> u64 {
        self.limits.idle_ms.max(1).saturating_mul(1_000_000)
    }

    pub(super) fn expire(&self) {
        // One at a time: of two, one would find untouched what the other has just visited, and stop
        // the timer.
        let _one = self.expiring.lock();
        self.timer.disarm();
        // Ordering: see `wake`.
        self.ticking.swap(false, Ordering::AcqRel);
        self.look();
        let mut touched = false;
        let mut victims = Vec::new();
        for zone in self.zones() {
            let mut slots = Vec::new();
            touched |= zone.take_idle(&mut slots);
            victims.push((zone, slots));
        }
        self.release(victims);
        if touched {
            self.wake();
        }
    }

    /// Reads the clock: returns nanoseconds, and stores the time in ticks for coarse readers.
    fn look(&self) -> u64 {
        let now_ns = self.clock.now_ns();
        self.tick.store((now_ns >> TICK) as u32, Ordering::Relaxed);
        now_ns
    }

    /// The time since `tick`.
    pub(super) fn age(&self, tick: u32) -> Duration {
        let ticks = ((self.clock.now_ns() >> TICK) as u32).wrapping_sub(tick);
        Duration::from_nanos(u64::from(ticks) << TICK)
    }
}
