//! Bounce pools: memory that stays mapped, to and from which buffers are copied.

mod copy;
mod memory;
mod pools;
mod taken;

use core::ptr::NonNull;

use ringfence_iommu::{Prot, Range};

use crate::Direction;

pub(crate) use copy::{Bytes, SlicesMut};
pub use memory::{BounceMemory, Chunk, HostMemory};
pub(crate) use pools::Client;
pub use pools::{BounceLimits, BouncePools, BounceStats, ClassStats, Holder};
pub use taken::PoolBuffer;

/// How a device bounces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceConfig {
    /// Under [`Policy::Bounce`](crate::Policy::Bounce), the longest mapping that is copied, in
    /// bytes; a longer one is mapped, strictly. Default: 1 MiB.
    pub threshold: u64,
    /// The most bytes of bounce slots that the device may hold at a time. Default: 256 MiB.
    pub quota: u64,
    /// Whether the driver reports how much the device wrote.
    pub written: Written,
}

impl Default for BounceConfig {
    fn default() -> BounceConfig {
        BounceConfig { threshold: 1 << 20, quota: 256 << 20, written: Written::Unknown }
    }
}

/// Whether the driver reports how much of a buffer the device wrote (rule L49, as far as it applies
/// here).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Written {
    /// It does not: a slot that the device may write is first loaded with the buffer's bytes, and
    /// all of it is copied back, so that what the device did not write stays as it was.
    #[default]
    Unknown,
    /// It does, by [`Mapping::note_written`](crate::Mapping::note_written) before the unmap
    /// (virtio's used length). Nothing is loaded, and only what was noted is copied back. If
    /// nothing is noted for a mapping, all of it is copied back, zeros where the device wrote
    /// nothing.
    Reported,
}

/// A piece of memory that a pool has handed out. Only the pool may duplicate this value, as holding
/// it means owning the memory.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Its granules, in the device's addresses.
    pub(crate) range: Range,
    /// Its memory, for the CPU.
    pub(crate) ptr: NonNull<u8>,
    /// What the device may do.
    pub(crate) prot: Prot,
    /// How many bytes from its beginning may be non-zero.
    pub(crate) dirty: u64,
    /// The number of the device that had it last; used by the pools only.
    pub(crate) key: u64,
}

// SAFETY: within this process only the holder of a slot touches its memory, from any thread.
unsafe impl Send for Slot {}
// SAFETY: nothing is done to its memory through a shared reference.
unsafe impl Sync for Slot {}

impl Bounced {
    /// A copy of `len` bytes, in a slot that was taken for it.
    pub(crate) fn new(slot: Slot, len: u64, direction: Direction) -> Bounced {
        let back = direction != Direction::ToDevice;
        Bounced { slot, len, back, noted: false, clean: 0 }
    }
}

/// A mapping that is a copy.
#[derive(Debug)]
pub(crate) struct Bounced {
    pub(crate) slot: Slot,
    /// The length of the buffer, in bytes.
    pub(crate) len: u64,
    /// Whether the device may write, so that bytes must be copied back.
    pub(crate) back: bool,
    /// Whether the driver has noted what the device wrote; then that was copied back already, and
    /// the unmap copies nothing.
    pub(crate) noted: bool,
    /// How many bytes from the beginning were copied back and zeroed in the slot.
    pub(crate) clean: u64,
}
