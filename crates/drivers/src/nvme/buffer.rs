//! A buffer in the layout that suits a controller.

use core::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};

use ringfence_dma::DmaBuffer;
use ringfence_iommu::HostAddr;
use ringfence_mem::{HostSlice, ReadSlice};

use super::pages::PAGE;

/// Bytes of this process, at first zero, in whole pages of 4 KiB of their own: the device can reach
/// nothing beside them, and several of them make a list for one command.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
    layout: Layout,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference reads only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes; `None` if there is no memory, or `len` is 0.
    pub fn new(len: usize) -> Option<Buffer> {
        let size = len.checked_next_multiple_of(PAGE as usize)?;
        let layout = Layout::from_size_align(size, PAGE as usize).ok().filter(|_| len > 0)?;
        // SAFETY: the layout is not empty.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { ptr, len, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` made it, with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes lie there, initialised, and are this value's.
        unsafe { core::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: heap memory of this value's own, which stays where it is until it is dropped.
unsafe impl DmaBuffer<HostAddr> for Buffer {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(self.ptr.as_ptr().expose_provenance() as u64), self.len as u64);
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
