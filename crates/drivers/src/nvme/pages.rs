//! Memory that the controller reaches: what it shares with the driver, and buffers for data.

use core::{
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};
use std::alloc::{Layout, alloc_zeroed, dealloc};

use ringfence_dma::{Coherent, Device, DmaBuffer, SharedMemory};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;
use ringfence_mem::{HostSlice, ReadSlice};

use super::Error;

/// A page of the controller, whatever the IOMMU's granule.
pub(super) const PAGE: u64 = 4096;

/// Whole pages of this process, at first zero, accessed only as atomics, or by their [`Buffer`].
#[derive(Debug)]
pub(super) struct Pages {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is this value's own; by itself it is reached by atomic accesses only.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len` bytes in whole pages, mapped for the controller as long as they live.
    ///
    /// # Errors
    /// There is no memory, or it could not be mapped.
    pub(super) fn shared<D: Domain<Target = HostAddr>, A: Allocator>(
        device: &Device<D, A>,
        len: usize,
    ) -> Result<Coherent<Pages>, Error> {
        // Whole granules too: the device can reach nothing beside them.
        let page = device.domain().geometry().page_sizes.granule().max(PAGE);
        let pages = usize::try_from(page).ok().and_then(|page| Pages::new(len, page));
        let pages = pages.ok_or(Error::NoMemory(len))?;
        device.alloc_coherent(pages).map_err(|error| Error::Map(error.error()))
    }

    fn new(len: usize, page: usize) -> Option<Pages> {
        let len = len.max(1).checked_next_multiple_of(page)?;
        let layout = Layout::from_size_align(len, page).ok()?;
        // SAFETY: the layout is not empty.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Pages { ptr, layout })
    }

    /// The 32 bits at `at`, a multiple of 4.
    ///
    /// # Panics
    /// `at` does not lie in it.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at < self.layout.size() && at.is_multiple_of(4), "beyond shared memory");
        // SAFETY: the word lies in the memory, which is aligned to more than 4 and lives as long as
        // the borrow; all accesses of this process are atomic.
        unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(at).cast()) }
    }

    /// The 64 bits at `at`, a multiple of 8.
    ///
    /// # Panics
    /// `at` does not lie in it.
    pub(super) fn long(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.layout.size() && at.is_multiple_of(8), "beyond shared memory");
        // SAFETY: as `word`.
        unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().add(at).cast()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` made it, with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

// SAFETY: heap memory of this value's own, which stays where it is until it is dropped.
unsafe impl DmaBuffer<HostAddr> for Pages {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(self.ptr.as_ptr().expose_provenance() as u64), self.layout.size() as u64);
    }
}

// SAFETY: a shared reference gives atomics only.
unsafe impl SharedMemory for Pages {}

/// Bytes of this process, at first zero, in whole pages of 4 KiB of their own. With an IOMMU's
/// granule of up to 4 KiB the device can reach nothing beside them. Several that fill their pages
/// make a list for one command.
#[derive(Debug)]
pub struct Buffer {
    pages: Pages,
    len: usize,
}

impl Buffer {
    /// `len` bytes; `None` if there is no memory, or `len` is 0.
    pub fn new(len: usize) -> Option<Buffer> {
        let pages = Pages::new(len, PAGE as usize).filter(|_| len > 0)?;
        Some(Buffer { pages, len })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes lie there, initialised, and are this value's: nothing accesses its
        // pages as atomics.
        unsafe { core::slice::from_raw_parts(self.pages.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.pages.ptr.as_ptr(), self.len) }
    }
}

// SAFETY: heap memory of this value's own, which stays where it is until it is dropped.
unsafe impl DmaBuffer<HostAddr> for Buffer {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(self.pages.ptr.as_ptr().expose_provenance() as u64), self.len as u64);
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each((&**self).into());
        true
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each((&mut **self).into());
        true
    }
}
