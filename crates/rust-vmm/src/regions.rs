//! The memory that a front end shared, as regions of rust-vmm.

use std::sync::Arc;

use ringfence_mem::{Memory, Region};
use vm_memory::{
    GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestRegionCollectionError, GuestUsize, MemoryRegionAddress,
    VolatileSlice,
    bitmap::{BS, Bitmap, NewBitmap},
};

/// A region of a [`Memory`], with a bitmap of what is written through it.
#[derive(Debug)]
pub struct SharedRegion<B = ()> {
    memory: Arc<Memory>,
    region: Region,
    bitmap: B,
}

/// The regions of `memory`, each with an empty bitmap.
///
/// # Errors
/// `memory` has none.
pub fn shared_regions<B: NewBitmap>(
    memory: &Arc<Memory>,
) -> Result<GuestRegionCollection<SharedRegion<B>>, GuestRegionCollectionError> {
    let regions = memory.regions().map(|&region| SharedRegion {
        memory: Arc::clone(memory),
        region,
        bitmap: B::with_len(region.size as usize),
    });
    GuestRegionCollection::from_regions(regions.collect())
}

impl<B> SharedRegion<B> {
    /// The memory that it belongs to.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    fn host(&self, offset: MemoryRegionAddress, count: usize) -> Option<*mut u8> {
        let last = offset.0.checked_add(count as u64)?;
        // One past the end is an address too, with no bytes.
        let base = self.memory.find_gpa(self.region.gpa).filter(|_| last <= self.region.size)?;
        Some(base.slice.as_ptr().wrapping_add(offset.0 as usize))
    }
}

impl<B: Bitmap> GuestMemoryRegion for SharedRegion<B> {
    type B = B;

    fn len(&self) -> GuestUsize {
        self.region.size
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.region.gpa)
    }

    fn bitmap(&self) -> BS<'_, B> {
        self.bitmap.slice_at(0)
    }

    fn get_host_address(&self, addr: MemoryRegionAddress) -> Result<*mut u8, GuestMemoryError> {
        self.host(addr, 1).ok_or(GuestMemoryError::InvalidBackendAddress)
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, B>>, GuestMemoryError> {
        let host = self.host(offset, count).ok_or(GuestMemoryError::InvalidBackendAddress)?;
        let bitmap = self.bitmap.slice_at(offset.0 as usize);
        // SAFETY: `host` found that the bytes lie in the region, which is mapped for as long as
        // `self.memory` lives; all code accesses them by volatile or atomic operations.
        Ok(unsafe { VolatileSlice::with_bitmap(host, count, bitmap, None) })
    }
}

impl<B: Bitmap> GuestMemoryRegionBytes for SharedRegion<B> {}
