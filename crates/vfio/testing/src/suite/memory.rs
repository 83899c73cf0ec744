//! Memory for a kernel to map.

use std::{ffi::c_void, ptr};

use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
};

/// Pages used for nothing else, written to once, so that they exist.
pub(super) struct Memory {
    at: *mut c_void,
    len: usize,
}

impl Memory {
    /// `pages` pages of `page` bytes, aligned to their size.
    pub(super) fn new(pages: u64, page: u64) -> Result<Memory, Errno> {
        // One page more, so that an aligned start lies in it.
        let len = usize::try_from((pages + 1) * page).map_err(|_| Errno::NOMEM)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: new memory at a place of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }?;
        Ok(Memory { at, len })
    }

    /// The address of the first page.
    pub(super) fn addr(&self, page: u64) -> u64 {
        (self.at.expose_provenance() as u64).next_multiple_of(page)
    }

    /// Unmaps the page at `addr`, which lies in this memory, with its content.
    pub(super) fn punch(&self, addr: u64, page: u64) -> Result<(), Errno> {
        let at = ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: it lies in memory that nothing else uses or reads.
        unsafe { munmap(at, page as usize) }
    }

    /// Leaves it mapped, since a kernel may still have it mapped for devices.
    pub(super) fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it is mapped for no device any more, or it was leaked.
        let unmapped = unsafe { munmap(self.at, self.len) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}
