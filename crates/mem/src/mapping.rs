//! One span of this process's addresses, unmapped when dropped.

use crate::{MemError, sigbus::Registered};
use core::ptr::{self, NonNull};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::os::fd::BorrowedFd;

/// A mapped span. Nothing hands out references into it, only pointers.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Where a truncation is noticed, if somebody else owns the file.
    watch: Option<Registered>,
}

// SAFETY: the span is plain memory, shared with other processes anyway; `Mapping` only gives its
// address away and unmaps it when the last owner is gone.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file from `offset`, readable and writable, shared. Both must be
    /// multiples of the file's page size.
    pub(crate) fn file(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Mapping, MemError> {
        // SAFETY: the kernel chooses a free place, so nothing that exists is replaced.
        let base = unsafe {
            mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                offset,
            )
        }
        .map_err(MemError::os("mmap of shared memory"))?;
        Ok(Mapping::own(base.cast(), len))
    }

    /// Reserves `len` bytes of addresses, without memory behind them.
    pub(crate) fn reserve(len: usize) -> Result<Mapping, MemError> {
        // SAFETY: as in `file`.
        let base = unsafe {
            mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(MemError::os("mmap of an address span"))?;
        Ok(Mapping::own(base.cast(), len))
    }

    fn own(base: *mut u8, len: usize) -> Mapping {
        let base = NonNull::new(base).expect("mmap without MAP_FIXED never returns 0");
        Mapping { base, len, watch: None }
    }

    /// Puts `len` bytes of a file from `offset` at `at` bytes into the span.
    ///
    /// # Panics
    /// If that passes the end of the span.
    pub(crate) fn place(
        &mut self,
        at: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
    ) -> Result<(), rustix::io::Errno> {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "past the span");
        // SAFETY: only addresses of this span are replaced (checked above), and `&mut self` says
        // that nobody uses them yet.
        unsafe {
            mm::mmap(
                self.base.as_ptr().add(at).cast(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                offset,
            )
        }
        .map(drop)
    }

    /// Watches the span for a truncation of the file behind it, whose pages have `page` bytes.
    pub(crate) fn watch(&mut self, page: usize) -> Result<(), MemError> {
        self.watch = Some(Registered::new(self.base.as_ptr() as usize, self.len, page)?);
        Ok(())
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the file behind the span was truncated, and somebody noticed by touching it.
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Registered::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the span is free: another thread may map the same addresses at once, and watch
        // them itself.
        self.watch = None;
        // SAFETY: the span is ours and its last owner is gone. It cannot fail for a whole span;
        // if it did, the memory would only stay mapped.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
