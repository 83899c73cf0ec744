//! A disk in memory.

use std::{io, os::fd::BorrowedFd, ptr::NonNull};

use parking_lot::Mutex;
use ringfence_mem::HostSlice;
use rustix::mm::{MapFlags, ProtFlags};

/// How many bytes of the disk share a lock: a transfer of up to that much (aligned) is atomic.
const STRIPE: u64 = 64 << 10;
/// How many locks there are; stripes share them in turn.
const LOCKS: usize = 256;

/// A disk in memory: a shared mapping of a file that lives in memory, so that its content outlasts
/// the process that serves it.
///
/// Transfers take a lock for each stripe they touch, so that two workers never tear a block: a
/// real disk does not either.
pub struct Ram {
    base: NonNull<u8>,
    len: u64,
    locks: Box<[Mutex<()>]>,
}

// SAFETY: the mapping belongs to this value alone and is reached through copies under its locks.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// Maps `len` bytes of `file`, which must be that long, and touches every page so that the
    /// first request does not pay for it.
    ///
    /// # Errors
    /// The file is shorter, `len` is 0, or there is not enough memory.
    pub fn map(file: BorrowedFd<'_>, len: u64) -> io::Result<Ram> {
        let size = rustix::fs::fstat(file)?.st_size;
        if u64::try_from(size).unwrap_or(0) < len || len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a disk of {len} bytes on a file of {size} bytes"),
            ));
        }
        let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh mapping at an address the kernel chooses; `bytes` is not 0.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at 0");
        Ok(Ram { base, len, locks: (0..LOCKS).map(|_| Mutex::new(())).collect() })
    }

    /// Bytes in all: never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies from the disk at `offset` into `to`. The caller has checked that it fits.
    ///
    /// # Panics
    /// If it does not.
    pub fn read(&self, offset: u64, to: HostSlice<'_>) {
        self.pieces(offset, to, |disk, memory| {
            // SAFETY: both hold `memory.len()` bytes (see `pieces`), and the disk's mapping is
            // private to `Ram`, so they do not overlap.
            unsafe { memory.as_ptr().copy_from_nonoverlapping(disk, memory.len()) }
        });
    }

    /// Copies `from` to the disk at `offset`. The caller has checked that it fits.
    ///
    /// # Panics
    /// If it does not.
    pub fn write(&self, offset: u64, from: HostSlice<'_>) {
        self.pieces(offset, from, |disk, memory| {
            // SAFETY: as in `read`.
            unsafe { disk.copy_from_nonoverlapping(memory.as_ptr(), memory.len()) }
        });
    }

    /// Writes zeroes over `len` bytes at `offset`. The caller has checked that it fits.
    ///
    /// # Panics
    /// If it does not.
    pub fn zero(&self, offset: u64, len: u64) {
        let mut at = offset;
        let end = offset.checked_add(len).filter(|&end| end <= self.len).expect("checked");
        while at < end {
            let next = (at - at % STRIPE).saturating_add(STRIPE).min(end);
            let _held = self.lock(at);
            // SAFETY: `at..next` lies within the mapping.
            unsafe { self.base.add(at as usize).write_bytes(0, (next - at) as usize) };
            at = next;
        }
    }

    fn lock(&self, offset: u64) -> parking_lot::MutexGuard<'_, ()> {
        self.locks[(offset / STRIPE) as usize % LOCKS].lock()
    }

    fn pieces(&self, offset: u64, memory: HostSlice<'_>, copy: impl Fn(*mut u8, HostSlice<'_>)) {
        let len = memory.len() as u64;
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "a transfer past the end of the disk must be refused before"
        );
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let part = (STRIPE - at % STRIPE).min(len - done);
            let _held = self.lock(at);
            // SAFETY: `at` lies within the mapping (asserted above).
            let disk = unsafe { self.base.as_ptr().add(at as usize) };
            copy(disk, memory.part(done as usize, part as usize));
            done += part;
        }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are of the mapping made in `map`; nothing else refers to it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;

    fn slice(bytes: &mut [u8]) -> HostSlice<'_> {
        // SAFETY: `bytes` is exclusively borrowed for as long as the slice lives.
        unsafe { HostSlice::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    #[test]
    fn what_is_written_is_read_even_across_stripes() {
        let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 20).unwrap();
        let disk = Ram::map(file.as_fd(), 1 << 20).unwrap();
        let mut data: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
        disk.write(12_345, slice(&mut data));
        let mut back = vec![0; data.len()];
        disk.read(12_345, slice(&mut back));
        assert_eq!(data, back);
        disk.zero(12_345, 100_000);
        disk.read(12_345, slice(&mut back));
        assert!(back[..100_000].iter().all(|&b| b == 0));
        assert_eq!(back[100_000..], data[100_000..]);
    }

    #[test]
    fn a_file_shorter_than_the_disk_is_refused() {
        let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        assert!(Ram::map(file.as_fd(), 8192).is_err());
    }
}
