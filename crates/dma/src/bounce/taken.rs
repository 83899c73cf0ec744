//! Pool memory that the caller fills and reads in place.

use core::fmt;
use std::sync::Arc;

use ringfence_iommu::Iova;
use ringfence_mem::HostSlice;

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

    /// The bytes, to copy from and to.
    ///
    /// The slot is mapped as long as the buffer lives, and stays so behind it: a device may write to it at any
    /// time, between two looks too. So there is no `&[u8]` of it. What is to be checked is copied first
    /// ([`read`](Self::read)), and what was copied stays what it is.
    pub fn piece(&self) -> HostSlice<'_> {
        self.slot().piece(0, self.len)
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Panics
    /// If that passes the end.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.part(offset, bytes.len()).copy_to(bytes);
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Panics
    /// If that passes the end.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.part(offset, bytes.len()).copy_from(bytes);
    }

    fn part(&self, offset: u64, len: usize) -> HostSlice<'_> {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.len), "past the end of a pool buffer");
        self.piece().part(offset as usize, len)
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
