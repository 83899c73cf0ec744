//! Bounce pools: memory that stays mapped, into which and out of which buffers are copied.

#[allow(unsafe_code)]
mod copy;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod pools;
mod taken;

use core::ptr::NonNull;

use ringfence_iommu::{Prot, Range};

use crate::Direction;

pub(crate) use copy::{Bytes, Slices, SlicesMut};
pub use memory::{BounceMemory, Chunk, HostMemory};
pub use pools::{
    BounceLimits, BouncePools, BounceStats, ClassStats, DeviceShare, Holder, SlotHolder, SlotInfo,
};
pub(crate) use pools::{Client, ClientParts};
pub use taken::PoolBuffer;

/// How a device bounces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BounceConfig {
    /// Under [`Policy::Bounce`](crate::Policy::Bounce), the longest mapping that is copied, in
    /// bytes; what is longer is mapped, strictly. Default: 1 MiB.
    pub threshold: u64,
    /// The most bytes of bounce slots that the device may hold at a time. Default: 256 MiB.
    pub quota: u64,
    /// Whether the driver tells how much the device wrote.
    pub written: Written,
}

impl Default for BounceConfig {
    fn default() -> BounceConfig {
        BounceConfig { threshold: 1 << 20, quota: 256 << 20, written: Written::Unknown }
    }
}

/// Whether it is known how much of a buffer the device wrote (rule L49, as far as it holds here).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Written {
    /// It is not: what the device may write is loaded with the buffer's own bytes first, and all of
    /// it is brought back, so that what it did not write stays as it was.
    #[default]
    Unknown,
    /// The driver says so, by [`Mapping::note_written`](crate::Mapping::note_written) before the
    /// unmap (virtio's used length). Nothing is loaded, and only what was noted is brought back. If
    /// nothing is ever noted of a mapping, all of it is brought back, zeros where the device wrote
    /// nothing.
    Reported,
}

/// A piece of memory that a pool has given out. Not to be copied but by the pool: who holds one holds
/// the memory.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Its granules, as the device sees them.
    pub(crate) range: Range,
    /// As the CPU does.
    pub(crate) ptr: NonNull<u8>,
    /// What the device may do.
    pub(crate) prot: Prot,
    /// So many bytes from its beginning may not be zero.
    pub(crate) dirty: u64,
    /// The number of the device that had it last; the pools' business.
    pub(crate) key: u64,
}

// SAFETY: who holds a slot is the only one of this process to touch its memory, from any thread.
unsafe impl Send for Slot {}
// SAFETY: nothing is done to its memory through a shared reference.
unsafe impl Sync for Slot {}

impl Bounced {
    /// Of `len` bytes, in a slot that was taken for that.
    pub(crate) fn new(slot: Slot, len: u64, direction: Direction) -> Bounced {
        let back = direction != Direction::ToDevice;
        Bounced { slot, len, back, noted: false, clean: 0 }
    }
}

/// A mapping that is a copy.
#[derive(Debug)]
pub(crate) struct Bounced {
    pub(crate) slot: Slot,
    /// Bytes of the buffer.
    pub(crate) len: u64,
    /// Whether the device may write, so that there is something to bring back.
    pub(crate) back: bool,
    /// Whether it was told what to bring back; then that is done, and the unmap brings back nothing.
    pub(crate) noted: bool,
    /// So many bytes from the beginning were brought back, and are zero in the slot.
    pub(crate) clean: u64,
}
