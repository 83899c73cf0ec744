//! The mode, which every map and unmap reads first.

use ringfence_sync::atomic::{AtomicU8, Ordering};

use crate::Policy;

/// The policy in force, and whether exposed bytes are bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) policy: Policy,
    /// Whether unmapped bytes are reserved before they are exposed.
    pub(crate) bounds_bytes: bool,
}

/// The mode of a device, which may change at any moment: in one word, for a single load.
#[derive(Debug)]
pub(crate) struct ModeCell(AtomicU8);

impl ModeCell {
    pub(crate) fn new(mode: Mode) -> ModeCell {
        ModeCell(AtomicU8::new(ModeCell::word(mode)))
    }

    fn word(mode: Mode) -> u8 {
        (mode.policy as u8) << 1 | u8::from(mode.bounds_bytes)
    }

    /// Rule L27. Acquire: a thread that sees a lazy mode sees its queues complete.
    // Ordering: queues are changed and used under their locks, so that a thread with an older mode
    // sees the change too; bytes are reserved before a translation goes, and a thread that reads an
    // older bound than that of its mode keeps one that was in force.
    #[inline]
    pub(crate) fn get(&self) -> Mode {
        let word = self.0.load(Ordering::Acquire);
        Mode { policy: Policy::ALL[usize::from(word >> 1)], bounds_bytes: word & 1 != 0 }
    }

    /// Release: see [`get`](Self::get).
    // Ordering: see `get`.
    pub(crate) fn set(&self, mode: Mode) {
        self.0.store(ModeCell::word(mode), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_its_policy_and_its_bound() {
        for policy in Policy::ALL {
            for bounds_bytes in [false, true] {
                let cell = ModeCell::new(Mode { policy: Policy::Off, bounds_bytes: false });
                cell.set(Mode { policy, bounds_bytes });
                assert_eq!(cell.get(), Mode { policy, bounds_bytes });
            }
        }
    }
}
