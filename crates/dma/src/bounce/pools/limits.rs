//! The limits of pools, and their statistics.

use core::{panic::Location, time::Duration};

use ringfence_iommu::Range;

/// How much memory the pools of a domain may have, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceLimits {
    /// Bytes of the largest slot that is kept, a power of two; a longer one is mapped for one use.
    pub largest: u64,
    /// Bytes of all slots of the pools together, in use or kept. Beyond it, slots are mapped for
    /// one use, bounded by the quotas of the devices.
    pub max_bytes: u64,
    /// The least time that unused memory is kept, in milliseconds; the most is twice that.
    pub idle_ms: u64,
}

impl Default for BounceLimits {
    /// Slots up to 4 MiB, 256 MiB in all, idle memory kept for a second.
    fn default() -> BounceLimits {
        BounceLimits { largest: 4 << 20, max_bytes: 256 << 20, idle_ms: 1000 }
    }
}

/// What the pools of a domain hold, and what they did. The counters are read one after the other,
/// while other threads may take and give back slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BounceStats {
    /// Slots in use, those for one use included.
    pub slots: u64,
    /// Bytes of these slots.
    pub slot_bytes: u64,
    /// Bytes that are kept mapped for the next use.
    pub kept_bytes: u64,
    /// The most bytes of memory at any one time, in use or kept.
    pub peak_bytes: u64,
    /// Slots that were mapped for one use, so far.
    pub single_use: u64,
    /// Slots that were given memory and mapped for keeping, so far.
    pub grown: u64,
    /// Slots whose memory was given back, so far, without those for one use.
    pub given_back: u64,
    /// Slots that were remapped with other permissions, so far.
    pub remapped: u64,
    /// Bytes that the device may still reach because the invalidation of their unmap failed.
    /// Neither the memory nor the addresses are ever used again.
    pub quarantined_bytes: u64,
}

/// The slots of one size in one range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// The addresses of the slots; slot n begins n slots after the first address.
    pub range: Range,
    /// Slots in use.
    pub used: u64,
    /// Slots kept mapped for the next use.
    pub kept: u64,
    /// How many slots may have memory at a time.
    pub room: u64,
}

/// A place in the program that holds slots.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// Where in the program they were taken.
    pub at: &'static Location<'static>,
    /// How many.
    pub slots: u64,
    /// Bytes of these slots.
    pub bytes: u64,
    /// For how long the oldest of them has been held, exact to about [`BounceLimits::idle_ms`].
    pub oldest: Duration,
}
