//! Memory of the service's own, for data on its way to and from a disk that may hang.

use std::{
    io,
    ptr::{self, NonNull},
};

use ringfence_mem::HostSlice;
use ringfence_sync::named;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

named! {
    /// Where the data of requests is while the disk has them.
    #[derive(Default)]
    #[non_exhaustive]
    DiskBuffers, "{:?} is not a place for data: it must be one of {}":
    /// In memory of the service, and copied once more: requests that the disk does not complete hold
    /// no memory of the guest. An invalidation never waits for the disk.
    Own = "own",
    /// Where the driver has it. An invalidation waits until the disk is done with the memory in
    /// question, however long that takes, and so does the sender of the invalidation.
    Guest = "guest",
    /// [`Guest`](Self::Guest) for disks that never hang: memory, and local devices with a kernel
    /// driver that ends each request after a time; [`Own`](Self::Own) for all others.
    #[default]
    Auto = "auto",
}

/// Bytes of a buffer. A larger request has several, if available, and is otherwise done in pieces.
const BUFFER: usize = 16 << 10;
/// How many a queue has: 4 MiB, where buffers that were never used take no memory. Enough for as
/// many small requests as a ring usually has; those that find no buffer wait for one.
const BUFFERS: u32 = 256;
/// The most that one request has at a time: 1 MiB, as much as Linux requests at once.
const MOST: usize = 64;

const LEN: usize = BUFFERS as usize * BUFFER;

/// The buffers of one queue.
pub(crate) struct Buffers {
    memory: NonNull<u8>,
    free: Vec<u32>,
}

// SAFETY: the mapping belongs to this value alone, and is reached through it.
unsafe impl Send for Buffers {}

impl Buffers {
    /// All of them free.
    ///
    /// # Errors
    /// There is not enough address space.
    pub(crate) fn new() -> io::Result<Buffers> {
        let how = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping, at an address that the kernel chooses.
        let memory = unsafe {
            mmap_anonymous(ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, how)?
        };
        let memory = NonNull::new(memory.cast()).expect("the kernel maps nothing at 0");
        Ok(Buffers { memory, free: (0..BUFFERS).rev().collect() })
    }

    /// Buffers for `len` bytes, or for some of them; none if there is no buffer at all now. Each has
    /// [`BUFFER`] bytes.
    pub(crate) fn take(&mut self, len: u64, into: &mut Vec<u32>) -> usize {
        let wanted = usize::try_from(len.div_ceil(BUFFER as u64)).map_or(MOST, |n| n.min(MOST));
        let from = self.free.len() - wanted.min(self.free.len());
        into.extend(self.free.drain(from..));
        into.len()
    }

    /// Gives buffers back, which the kernel no longer uses.
    pub(crate) fn give_back(&mut self, buffers: &mut Vec<u32>) {
        self.free.append(buffers);
    }

    /// The memory of a buffer, from `at` on, up to `len` bytes of it.
    pub(crate) fn piece(&self, buffer: u32, len: u64) -> libc::iovec {
        assert!(buffer < BUFFERS, "buffer {buffer} of {BUFFERS}");
        let at = buffer as usize * BUFFER;
        let len = usize::try_from(len).map_or(BUFFER, |len| len.min(BUFFER));
        // SAFETY: looked at above.
        let base = unsafe { self.memory.add(at) };
        libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len }
    }

    /// A piece as it can be copied from and to.
    ///
    /// # Safety
    /// `piece` is one of [`piece`](Self::piece)'s of these buffers, or a part of it.
    pub(crate) unsafe fn slice(&self, piece: &libc::iovec) -> HostSlice<'_> {
        let base = NonNull::new(piece.iov_base.cast()).expect("a piece is somewhere");
        // SAFETY: the caller's promise; the mapping lives as long as `self`, and only copies reach it.
        unsafe { HostSlice::new(base, piece.iov_len) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; the kernel is done with it, since a `FileStore` drops
        // its io_uring, which waits for its requests, before its buffers.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), LEN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_what_it_needs_as_far_as_there_is() {
        let mut buffers = Buffers::new().unwrap();
        let mut small: Vec<Vec<u32>> = (0..BUFFERS as usize - MOST - 1)
            .map(|_| {
                let mut one = Vec::new();
                assert_eq!(buffers.take(1, &mut one), 1);
                one
            })
            .collect();
        let (mut large, mut last, mut none) = (Vec::new(), Vec::new(), Vec::new());
        assert_eq!(buffers.take(u64::MAX, &mut large), MOST);
        assert_eq!(buffers.take(BUFFER as u64 + 1, &mut last), 1);
        assert_eq!(buffers.take(1, &mut none), 0);
        let all = small.iter().flatten().chain(&large).chain(&last);
        let mut places: Vec<usize> =
            all.map(|&buffer| buffers.piece(buffer, u64::MAX).iov_base as usize).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == BUFFER), "none twice");
        buffers.give_back(&mut large);
        small.iter_mut().for_each(|one| buffers.give_back(one));
        assert_eq!(buffers.take(BUFFER as u64 + 1, &mut none), 2);
    }

    #[test]
    fn ways_have_names() {
        for way in [DiskBuffers::Own, DiskBuffers::Guest, DiskBuffers::Auto] {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        assert!("ours".parse::<DiskBuffers>().is_err());
    }
}
