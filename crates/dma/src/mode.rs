//! The mode, which every map and unmap reads first.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::Policy;

const OFF: u8 = 1;
const LAZY: u8 = 1 << 1;
const PER_CPU: u8 = 1 << 2;
const BATCHES_MAPS: u8 = 1 << 3;
const BOUNDS_BYTES: u8 = 1 << 4;
const BOUNCES: u8 = 1 << 5;
const CHOOSES: u8 = 1 << 6;

/// The policy in force, and whether exposed bytes are bounded: in one word, for a single load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode(u8);

impl Mode {
    pub(crate) fn new(policy: Policy, bounds_bytes: bool) -> Mode {
        let bit = |bit, set| if set { bit } else { 0 };
        Mode(
            bit(OFF, policy == Policy::Off)
                | bit(LAZY, policy.is_lazy())
                | bit(PER_CPU, policy.is_per_cpu())
                | bit(BATCHES_MAPS, policy.batches_maps())
                | bit(BOUNDS_BYTES, bounds_bytes)
                | bit(BOUNCES, policy.bounces())
                | bit(CHOOSES, policy == Policy::Auto),
        )
    }

    pub(crate) fn policy(self) -> Policy {
        if self.bounces() {
            return if self.chooses() { Policy::Auto } else { Policy::Bounce };
        }
        match (self.is_off(), self.is_lazy(), self.is_per_cpu(), self.batches_maps()) {
            (true, ..) => Policy::Off,
            (_, false, _, false) => Policy::Strict,
            (_, false, _, true) => Policy::StrictMap,
            (_, true, false, false) => Policy::LazySq,
            (_, true, true, false) => Policy::LazyMq,
            (_, true, false, true) => Policy::LazySqMap,
            (_, true, true, true) => Policy::LazyMqMap,
        }
    }

    #[inline]
    pub(crate) fn is_off(self) -> bool {
        self.0 & OFF != 0
    }

    #[inline]
    pub(crate) fn is_lazy(self) -> bool {
        self.0 & LAZY != 0
    }

    #[inline]
    pub(crate) fn is_per_cpu(self) -> bool {
        self.0 & PER_CPU != 0
    }

    #[inline]
    pub(crate) fn batches_maps(self) -> bool {
        self.0 & BATCHES_MAPS != 0
    }

    /// Whether mappings may be copies.
    #[inline]
    pub(crate) fn bounces(self) -> bool {
        self.0 & BOUNCES != 0
    }

    /// Whether there is a new decision for each mapping whether to copy it.
    #[inline]
    pub(crate) fn chooses(self) -> bool {
        self.0 & CHOOSES != 0
    }

    /// Whether unmapped bytes are reserved before they are exposed.
    #[inline]
    pub(crate) fn bounds_bytes(self) -> bool {
        self.0 & BOUNDS_BYTES != 0
    }
}

/// The mode of a device, which may change at any moment.
#[derive(Debug)]
pub(crate) struct ModeCell(AtomicU8);

impl ModeCell {
    pub(crate) fn new(mode: Mode) -> ModeCell {
        ModeCell(AtomicU8::new(mode.0))
    }

    /// Rule L27. Acquire: a thread that sees a lazy mode sees its queues complete.
    #[inline]
    pub(crate) fn get(&self) -> Mode {
        Mode(self.0.load(Ordering::Acquire))
    }

    /// Release: see [`get`](Self::get).
    pub(crate) fn set(&self, mode: Mode) {
        self.0.store(mode.0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_its_policy_and_its_bound() {
        for policy in Policy::ALL {
            for bounds_bytes in [false, true] {
                let cell = ModeCell::new(Mode::new(Policy::Off, false));
                cell.set(Mode::new(policy, bounds_bytes));
                let mode = cell.get();
                assert_eq!((mode.policy(), mode.bounds_bytes()), (policy, bounds_bytes));
                assert_eq!(mode.is_off(), policy == Policy::Off);
                assert_eq!(mode.is_lazy(), policy.is_lazy());
                assert_eq!(mode.is_per_cpu(), policy.is_per_cpu());
                assert_eq!(mode.batches_maps(), policy.batches_maps());
            }
        }
    }
}
