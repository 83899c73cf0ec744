//! A file that two processes share for their own bookkeeping: an in-flight region, a dirty log.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use ringfence_sync::atomic::{AtomicU8, AtomicU16, AtomicU64};

use crate::{Access, GuestRam, MemError, Memory, PAGE_SIZE, Region, Window};

/// Bytes of a file, mapped, that another process may change or truncate at any time.
///
/// They are reached as atomics only. Once [`sigbus::install`](crate::sigbus::install) was called,
/// the truncated part of a file reads as zeroes; without it, touching that part ends the process.
#[derive(Debug)]
pub struct SharedFile {
    window: Window,
    memory: Arc<Memory>,
}

impl SharedFile {
    /// Makes a file of at least `len` bytes, all zero, sealed against a change of its size, and
    /// maps it. The descriptor is for the other process.
    ///
    /// # Errors
    /// A length of zero, or a refusal of the system.
    pub fn create(len: usize) -> Result<(SharedFile, OwnedFd), MemError> {
        let wraps = MemError::Wraps { what: "offset", addr: 0, size: len as u64 };
        let whole = len.checked_next_multiple_of(PAGE_SIZE).ok_or(wraps)?;
        let ram = GuestRam::new(whole, 0)?;
        let fd = ram.fd().try_clone_to_owned().map_err(|source| MemError::Os {
            what: "another descriptor of a memory file",
            source,
        })?;
        Ok((SharedFile::of(Memory::of_ram(&ram)?, len as u64)?, fd))
    }

    /// Maps `len` bytes of a file that a peer made, from `offset`, a multiple of [`PAGE_SIZE`].
    ///
    /// # Errors
    /// A length of zero, a range that wraps or is not aligned, a file that is not memory (neither
    /// tmpfs nor hugetlbfs) or too short, or a refusal of the system.
    pub fn map(fd: impl AsFd, offset: u64, len: u64) -> Result<SharedFile, MemError> {
        let region = Region { gpa: 0, size: len, user_addr: 0, mmap_offset: offset };
        SharedFile::of(Memory::map(vec![(region, fd)])?, len)
    }

    fn of(memory: Arc<Memory>, len: u64) -> Result<SharedFile, MemError> {
        if memory.unmapped().next().is_some() {
            return Err(MemError::NotMemory);
        }
        let size = memory.regions().map(|region| region.size).sum();
        let window = memory.window(&memory.by_gpa, 0, len, Access::ReadWrite);
        let window = window.map_err(|_| MemError::OutOfBounds { offset: 0, len, size })?;
        Ok(SharedFile { window, memory })
    }

    /// How many bytes; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.window.len()
    }

    /// Whether the file was truncated under us and an access has run into that.
    pub fn is_lost(&self) -> bool {
        self.memory.lost()
    }

    /// The byte at an offset.
    ///
    /// # Panics
    /// If that passes the end: this process computes the offset, a peer never does.
    #[inline]
    pub fn u8_at(&self, at: usize) -> &AtomicU8 {
        // SAFETY: in bounds (checked by `ptr_at`), mapped while `self` lives; every access of this
        // process goes through atomics.
        unsafe { AtomicU8::from_ptr(self.ptr_at(at, 1)) }
    }

    /// The 16-bit word at an offset, native order.
    ///
    /// # Panics
    /// If that passes the end or is not aligned.
    #[inline]
    pub fn u16_at(&self, at: usize) -> &AtomicU16 {
        // SAFETY: as in `u8_at`; aligned (checked by `ptr_at`).
        unsafe { AtomicU16::from_ptr(self.ptr_at(at, 2).cast()) }
    }

    /// The 64-bit word at an offset, native order.
    ///
    /// # Panics
    /// As [`u16_at`](Self::u16_at).
    #[inline]
    pub fn u64_at(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as in `u16_at`.
        unsafe { AtomicU64::from_ptr(self.ptr_at(at, 8).cast()) }
    }

    #[inline]
    fn ptr_at(&self, at: usize, len: usize) -> *mut u8 {
        let part = self.window.slice().part(at, len);
        assert!(part.len() == len && at <= self.len(), "past the end of a shared file");
        assert!((part.as_ptr() as usize).is_multiple_of(len), "a field must be aligned");
        part.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn both_ends_see_the_same_bytes() {
        let (ours, fd) = SharedFile::create(5000).unwrap();
        let theirs = SharedFile::map(fd.try_clone().unwrap(), 0, 5000).unwrap();
        ours.u8_at(4999).store(7, Relaxed);
        ours.u64_at(8).store(9, Relaxed);
        assert_eq!(theirs.u8_at(4999).load(Relaxed), 7);
        assert_eq!(theirs.u64_at(8).load(Relaxed), 9);
        let tail = SharedFile::map(fd, 4096, 904).unwrap();
        assert_eq!((tail.len(), tail.u8_at(903).load(Relaxed)), (904, 7));
    }

    #[test]
    fn a_file_that_does_not_hold_the_range_is_refused() {
        let (_, fd) = SharedFile::create(4096).unwrap();
        for (offset, len) in [(0, 4097), (4096, 1), (1, 8), (0, 0), (u64::MAX - 4095, 4096)] {
            assert!(
                SharedFile::map(fd.try_clone().unwrap(), offset, len).is_err(),
                "{offset} {len}"
            );
        }
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(SharedFile::map(pipe, 0, 8), Err(MemError::NotMemory)));
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn nothing_is_reached_past_the_end() {
        let (file, _fd) = SharedFile::create(8).unwrap();
        file.u64_at(8);
    }

    #[test]
    #[should_panic(expected = "aligned")]
    fn a_field_is_aligned() {
        let (file, _fd) = SharedFile::create(16).unwrap();
        file.u16_at(3);
    }
}
