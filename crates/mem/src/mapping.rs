//! One span of this process's addresses, unmapped when dropped.

use crate::{MemError, sigbus::Registered};
use core::ptr::{self, NonNull};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::{
    cell::Cell,
    os::fd::BorrowedFd,
    sync::{
        OnceLock,
        mpsc::{self, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// A mapped span. Nothing hands out references into it, only pointers.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Notices a truncation, if another process owns the file.
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
        // SAFETY: only addresses of this span are replaced (checked above), and `&mut self` means
        // that nothing uses them yet.
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

    /// Whether the file behind the span was truncated and an access has run into that.
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Registered::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let span = Remains { base: self.base, len: self.len, watch: self.watch.take() };
        if let Some(unmapper) = ELSEWHERE.get() {
            // If the unmapper has ended, the span is unmapped here.
            let _ = unmapper.send(span);
        }
    }
}

/// What a [`Mapping`] that was dropped leaves to be unmapped.
struct Remains {
    base: NonNull<u8>,
    len: usize,
    watch: Option<Registered>,
}

// SAFETY: the span is plain memory that nothing uses any more; it is only unmapped.
unsafe impl Send for Remains {}

impl Drop for Remains {
    fn drop(&mut self) {
        // Before the span is free: another thread may map and watch the same addresses at once.
        self.watch = None;
        UNMAPPED.set(UNMAPPED.get() + 1);
        // SAFETY: the span is ours, still mapped from `at` on, and its last owner is gone. If the
        // call fails, the memory only stays mapped.
        let unmap = |at, len| unsafe { mm::munmap(self.base.as_ptr().add(at).cast(), len) };
        let (mut at, mut piece) = (0, PIECE);
        while at < self.len {
            let (left, begun) = (self.len - at, Instant::now());
            // The kernel refuses to unmap a part of a larger page. Mappings of such pages have few
            // of them.
            if unmap(at, piece.min(left)).is_err() {
                let _ = unmap(at, left);
                break;
            }
            at += piece.min(left);
            // Untouched memory has no pages to free, and may be any amount.
            piece = if begun.elapsed() < SHORT { piece.saturating_mul(2) } else { PIECE };
        }
    }
}

/// If a piece takes less time than this, the next may be larger.
const SHORT: Duration = Duration::from_micros(100);

/// How much one call unmaps at first: for as long as it takes, no other thread of the process can
/// map or unmap anything, such as a ring for io_uring.
const PIECE: usize = 64 << 20;

thread_local! {
    /// The thread that unmaps what this thread is the last to drop; `None`: this thread itself.
    static ELSEWHERE: Cell<Option<&'static Sender<Remains>>> = const { Cell::new(None) };
    static UNMAPPED: Cell<u64> = const { Cell::new(0) };
}

/// From now on, a thread that does nothing else unmaps the memory that the calling thread is the
/// last to drop: for a thread that serves several peers. Unmapping a whole guest takes seconds.
///
/// Where no such thread can be started, the calling thread unmaps by itself.
pub fn unmap_elsewhere() {
    static UNMAPPER: OnceLock<Option<Sender<Remains>>> = OnceLock::new();
    let unmapper = UNMAPPER.get_or_init(|| {
        let (unmapper, spans) = mpsc::channel();
        let unmap = move || spans.into_iter().for_each(drop::<Remains>);
        thread::Builder::new().name("unmap".into()).spawn(unmap).ok().map(|_| unmapper)
    });
    ELSEWHERE.set(unmapper.as_ref());
}

/// How many mappings the calling thread has unmapped.
pub fn unmapped_here() -> u64 {
    UNMAPPED.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;

    #[test]
    fn a_thread_that_unmaps_elsewhere_unmaps_nothing_and_it_is_unmapped() {
        const NAME: &str = "unmapped-elsewhere";
        // No page of it is touched.
        const LEN: usize = 2 * PIECE + 4096;
        let mapping = || {
            let fd = memfd_create(NAME, MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, LEN as u64).unwrap();
            let mut mapping = Mapping::file(fd.as_fd(), 0, LEN).unwrap();
            mapping.watch(4096).unwrap();
            mapping
        };
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(NAME);
        let held_up = thread::spawn(move || {
            let before = mapping();
            drop(mapping());
            assert_eq!(unmapped_here(), 1);
            unmap_elsewhere();
            drop([before, mapping()]);
            unmapped_here()
        });
        assert_eq!(held_up.join().unwrap(), 1);
        while is_mapped() {
            thread::yield_now();
        }
    }
}
