//! Pool memory that the caller fills in place.

use core::fmt;
use std::sync::Arc;

use ringfence_iommu::Iova;

use super::Slot;
use crate::{Segment, mapping::Owner, segment::Segments};

/// A buffer in pool memory, mapped already: filled or read in place, it needs no copy and no request
/// to the IOMMU.
///
/// As long as it lives the device reaches it: it is exposed by choice, and counted so
/// ([`Stats::taken`](crate::Stats::taken)). The device that had it before had it last: what it holds
/// at first is what this very device's driver left there, or zeros. Dropping it gives it back to the
/// pool.
pub struct PoolBuffer {
    /// Taken by `drop`.
    slot: Option<Slot>,
    len: u64,
    segments: Segments,
    owner: Arc<dyn Owner>,
}

impl PoolBuffer {
    pub(crate) fn new(slot: Slot, len: u64, segments: Segments, owner: Arc<dyn Owner>) -> Self {
        PoolBuffer { slot: Some(slot), len, segments, owner }
    }

    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("it holds its slot until it is dropped")
    }

    /// The address of the first byte for the device.
    pub fn iova(&self) -> Iova {
        self.slot().range.first()
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What to put into descriptors.
    pub fn segments(&self) -> &[Segment] {
        self.segments.as_slice()
    }

    /// The bytes, while the device does not work on them.
    ///
    /// A device that misbehaves may write at any time: whatever is read here must be valid whatever
    /// it is.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len as usize;
        let slot = self.slot.as_mut().expect("it holds its slot until it is dropped");
        // SAFETY: the slot holds at least so many bytes, is this value's alone, and borrowed
        // exclusively. The device is another agent, whose writes change plain integers.
        unsafe { core::slice::from_raw_parts_mut(slot.ptr.as_ptr(), len) }
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(mut slot) = self.slot.take() {
            slot.dirty = slot.dirty.max(self.len);
            self.owner.give_back_taken(slot, self.len);
        }
    }
}

impl fmt::Debug for PoolBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuffer")
            .field("iova", &self.iova())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
