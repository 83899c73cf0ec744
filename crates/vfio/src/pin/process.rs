//! Which process made a value, checked without a system call each time.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The process that made this value. A fork copies the value, but in the child it is not
/// [`is_here`](Self::is_here).
///
/// The number of the process lies in a page that the kernel zeroes in the child of any fork
/// (MADV_WIPEONFORK), so that the check costs a load. A child that makes values of its own writes
/// its own number there, which differs from its parent's as long as the parent lives.
#[derive(Clone, Copy)]
pub(super) struct Process {
    current: &'static AtomicU32,
    number: u32,
}

impl Process {
    /// The calling process.
    ///
    /// # Errors
    /// The kernel refuses the page, or does not know how to zero it (before Linux 4.14).
    pub(super) fn this() -> Result<Process, Errno> {
        static PAGE: OnceLock<Result<&'static AtomicU32, Errno>> = OnceLock::new();
        let current = (*PAGE.get_or_init(page))?;
        // Several threads of a child may do this: all store the same number, which is never 0.
        if current.load(Relaxed) == 0 {
            current.store(std::process::id(), Relaxed);
        }
        Ok(Process { current, number: current.load(Relaxed) })
    }

    /// Whether the calling process is the one that made it.
    #[inline(always)]
    pub(super) fn is_here(self) -> bool {
        self.current.load(Relaxed) == self.number
    }
}

/// A page of zeroes for the lifetime of the process; zeroed again in the child of a fork.
fn page() -> Result<&'static AtomicU32, Errno> {
    let (rw, len) = (ProtFlags::READ | ProtFlags::WRITE, size_of::<AtomicU32>());
    // SAFETY: a new page of memory, wherever the kernel chooses; it is aligned, zero, and unmapped
    // only if no reference to it was made.
    unsafe {
        let at = mmap_anonymous(ptr::null_mut(), len, rw, MapFlags::PRIVATE)?;
        if let Err(errno) = madvise(at, len, Advice::LinuxWipeOnFork) {
            let _ = munmap(at, len);
            return Err(errno);
        }
        Ok(AtomicU32::from_ptr(at.cast()))
    }
}
