//! Pool memory that the caller writes and reads in place.

use std::sync::Arc;

use ringfence_iommu::Iova;
use ringfence_mem::HostSlice;

use crate::{Segment, counter::Count, mapping::Owner, placed::Placed};

/// A buffer in pool memory, mapped already: the program writes or reads it in place, without a copy
/// and without a request to the IOMMU.
///
/// As long as it lives the device can reach it: it is exposed by choice, and counted as such
/// ([`Stats::taken`](crate::Stats::taken)). Its initial contents are what this device's own driver
/// left there, or zeros. Dropping it gives it back to the pool.
#[derive(Debug)]
pub struct PoolBuffer {
    /// With a slot, until it is dropped.
    pub(crate) placed: Placed,
    pub(crate) owner: Arc<dyn Owner>,
}

impl PoolBuffer {
    /// The address of the first byte for the device.
    pub fn iova(&self) -> Iova {
        self.placed.iova
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.placed.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What to put into descriptors.
    pub fn segments(&self) -> &[Segment] {
        &self.placed.segments
    }

    /// The bytes, to copy from and to.
    ///
    /// The slot is mapped as long as the buffer lives, and stays so afterwards: a device may write
    /// to it at any time, even between two reads. So there is no `&[u8]` of it. Copy out what is to
    /// be checked ([`read`](Self::read)): the copy does not change.
    pub fn piece(&self) -> HostSlice<'_> {
        let slot = self.placed.slot.as_ref().expect("it holds its slot until it is dropped");
        slot.piece(0, self.len())
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Panics
    /// If that exceeds the length.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.part(offset, bytes.len()).copy_to(bytes);
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Panics
    /// If that exceeds the length.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.part(offset, bytes.len()).copy_from(bytes);
    }

    fn part(&self, offset: u64, len: usize) -> HostSlice<'_> {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.len()), "past the end of a pool buffer");
        self.piece().part(offset as usize, len)
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let len = self.len();
        if let Some(mut slot) = self.placed.slot.take() {
            slot.dirty = slot.dirty.max(len);
            self.owner.counters().taken.take_back(1);
            self.owner.counters().taken_bytes.take_back(len);
            self.owner.give_back_slot(slot);
        }
    }
}
