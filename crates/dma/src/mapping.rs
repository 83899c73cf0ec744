//! Buffers while the device has them.

use core::{fmt, ops::Range as Bytes};

use ringfence_iommu::{Iova, Range};

use crate::{OutOfBounds, Segment, SharedMemory, UnmapError};

/// A buffer that a device may touch. It owns the buffer: no one else does.
#[must_use = "dropping a mapping unmaps it"]
pub struct Mapping<B> {
    _todo: B,
}

impl<B> Mapping<B> {
    /// Where the mapping begins for the device: the address of the first byte (rule L43: its offset
    /// in the granule is the buffer's). Under policy `off`, the first byte's target address.
    pub fn iova(&self) -> Iova {
        todo!()
    }

    /// How many bytes the buffer has.
    pub fn len(&self) -> u64 {
        todo!()
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What to put into descriptors.
    pub fn segments(&self) -> &[Segment] {
        todo!()
    }

    /// Takes the buffer back from the device. Under a strict policy the device cannot reach it any
    /// more when this returns; under a lazy one it may for a while.
    ///
    /// # Errors
    /// The device did not acknowledge the invalidation and may still reach the buffer, which
    /// therefore is not handed back as safe.
    pub fn unmap(self) -> Result<B, UnmapError<B>> {
        todo!()
    }

    /// As [`unmap`](Self::unmap), and hands out the IOVA too, so that someone can watch for how
    /// long the device still reaches it.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    pub fn unmap_watched(self) -> Result<(B, StaleIova), UnmapError<B>> {
        todo!()
    }

    /// Makes what the device wrote to `bytes` (offsets in the buffer) visible to the CPU.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_cpu(&self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        let _ = bytes;
        todo!()
    }

    /// Makes what the CPU wrote to `bytes` (offsets in the buffer) visible to the device.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_device(&self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        let _ = bytes;
        todo!()
    }
}

impl<B: SharedMemory> Mapping<B> {
    /// The buffer, to look at while the device works on it.
    pub fn shared(&self) -> &B {
        todo!()
    }
}

impl<B> fmt::Debug for Mapping<B> {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

/// Memory that the device and the CPU share for as long as this lives.
pub struct Coherent<B>(Mapping<B>);

impl<B: SharedMemory> Coherent<B> {
    /// The memory.
    pub fn memory(&self) -> &B {
        self.0.shared()
    }
}

impl<B> Coherent<B> {
    /// The address of the first byte for the device.
    pub fn iova(&self) -> Iova {
        self.0.iova()
    }

    /// What to put into descriptors.
    pub fn segments(&self) -> &[Segment] {
        self.0.segments()
    }

    /// Takes the memory back. Always strict, whatever the policy: it is rare, and rings are what an
    /// attacker would want.
    ///
    /// # Errors
    /// As [`Mapping::unmap`].
    pub fn free(self) -> Result<B, UnmapError<B>> {
        todo!()
    }
}

/// An IOVA after its unmap, parked: while this lives, no other buffer gets it.
///
/// A probe uses it to find out for how long a device still reaches memory.
pub struct StaleIova {
    _todo: (),
}

impl StaleIova {
    /// The address that the mapping had.
    pub fn iova(&self) -> Iova {
        todo!()
    }

    /// The range that was unmapped, in whole granules; `None` under policy `off`.
    pub fn range(&self) -> Option<Range> {
        todo!()
    }

    /// When its translation was removed, by the environment's clock.
    pub fn queued_at_ns(&self) -> u64 {
        todo!()
    }

    /// When the device was known to reach it no longer; `None` if that time has not come. Under
    /// policy `off` it never comes.
    pub fn released_at_ns(&self) -> Option<u64> {
        todo!()
    }
}
