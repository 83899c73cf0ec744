//! Slots for one use.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use parking_lot::Mutex;
use ringfence_iommu::{Address, Iova, Range};
use ringfence_iova::Request;

use super::{Inner, client::Charge, mark::SlotOwner};
use crate::{
    Direction, Error,
    bounce::{Chunk, Slot},
};

/// The slots that are mapped for one use, by their first addresses.
pub(super) struct Singles<T>(pub(super) Mutex<BTreeMap<u64, Single<T>>>);

#[derive(Clone, Copy)]
pub(super) struct Single<T> {
    pub(super) range: Range,
    chunk: Chunk<T>,
    pub(super) held: SlotOwner,
}

impl<T: Copy> Singles<T> {
    /// The number of slots, and of their bytes.
    pub(super) fn total(&self) -> (u64, u64) {
        let singles = self.0.lock();
        (singles.len() as u64, singles.values().map(|single| single.range.extent() + 1).sum())
    }

    /// All slots for one use.
    pub(super) fn held(&self) -> Vec<Single<T>> {
        self.0.lock().values().copied().collect()
    }
}

impl<T: Address> Inner<T> {
    /// Maps a slot of `size` bytes, in whole granules, at or below `limit`.
    pub(super) fn take_single(
        &self,
        (size, direction, limit): (u64, Direction, u64),
        held: SlotOwner,
        charge: Charge<'_>,
    ) -> Result<Slot, Error> {
        let request = Request::new(size).limit(limit);
        let first = self
            .allocator
            .alloc(&request)
            .map_err(|error| Error::no_iova(error, &*self.allocator))?;
        let free = |error| {
            // If the allocator refuses the free, nothing can be lost in it.
            let _ = self.allocator.free(first, size);
            error
        };
        let range = Range::from_len(Iova(first), size).ok_or(Error::TooLong)?;
        let mapped = match self.map_slot(range, direction) {
            // Kept slots may hold the memory that is missing.
            Err(Error::Bounce(_)) if self.trim() => self.map_slot(range, direction),
            mapped => mapped,
        };
        let chunk = mapped.map_err(free)?;
        if let Err(error) = self.domain.iotlb_sync_map(range) {
            if self.unmap_now(range).is_ok() {
                self.give_back_memory(chunk);
                return Err(free(error.into()));
            }
            self.note_quarantine(size);
            charge.keep();
            return Err(error.into());
        }
        charge.keep();
        self.usage.single_use.fetch_add(1, Ordering::Relaxed);
        self.singles.0.lock().insert(first, Single { range, chunk, held });
        Ok(Slot { range, ptr: chunk.ptr, direction, dirty: 0, key: 0 })
    }

    /// Unmaps the slot strictly; returns whether the device can no longer reach it. If not, neither
    /// its memory nor its addresses are used again.
    pub(super) fn give_back_single(&self, slot: &Slot) -> bool {
        let first = slot.range.first().0;
        let Some(single) = self.singles.0.lock().remove(&first) else { return false };
        let size = single.range.extent() + 1;
        if self.unmap_now(single.range).is_err() {
            self.note_quarantine(size);
            return false;
        }
        let _ = self.allocator.free(first, size);
        self.give_back_memory(single.chunk);
        true
    }
}
