//! A disk in a file or on a block device, through io_uring.

use std::{
    io,
    mem::ManuallyDrop,
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
    thread,
};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, poll};

use super::{
    Image, rings,
    submitter::{AGAIN, Pending},
};

/// What to do with the file. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileOp {
    /// Read from this offset.
    Read(u64),
    /// Write at this offset.
    Write(u64),
    /// Write at this offset, and complete when that is durable if the image
    /// [writes through](Image::writes_through); else as [`Write`](Self::Write).
    WriteThrough(u64),
    /// Make everything written durable.
    Flush,
    /// Make a range read as zeroes.
    Zero {
        /// Where it begins, in bytes.
        offset: u64,
        /// How long it is, in bytes.
        len: u64,
        /// Whether its space may be given back.
        punch: bool,
    },
}

/// Marks the tokens of flushes.
const FLUSH: u64 = 1 << 63;

/// One worker's way to a file: an io_uring of its own.
///
/// Requests are queued with [`submit`](Self::submit), handed to the kernel together by
/// [`kick`](Self::kick) and collected by [`reap`](Self::reap).
pub struct FileIo {
    /// There until this is dropped.
    ring: ManuallyDrop<IoUring>,
    image: Arc<Image>,
    /// Handed over or waiting to be; never more than the completion ring holds.
    in_flight: u32,
    depth: u32,
    /// Whether the kernel did not take all when it was last handed over.
    refused: bool,
    /// How long the image was when the first request that changes it was queued since the last kick.
    bytes: Option<u64>,
    /// Where another thread hands requests over.
    pending: Option<Arc<Pending>>,
}

impl FileIo {
    /// An io_uring for up to `depth` requests at a time: 1 to 4096, rounded up to a power of two,
    /// and no more than one that was [made ahead](Image::make_rings) is for.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here; all that were made ahead are in use; or no
    /// thread or descriptor is left for an image with [buffers](Image::has_own_buffers).
    pub fn new(image: Arc<Image>, depth: u32) -> io::Result<FileIo> {
        let depth = depth.clamp(1, 4096).next_power_of_two();
        let ring = image.rings.take(|| rings::make(depth))?;
        let depth = depth.min(ring.params().sq_entries());
        let ring = ManuallyDrop::new(ring);
        let mut io =
            FileIo { ring, image, in_flight: 0, depth, refused: false, bytes: None, pending: None };
        io.pending = io.image.submitter()?.map(|by| by.add(io.ring.as_raw_fd())).transpose()?;
        Ok(io)
    }

    /// Makes the kernel write to `event` whenever something completes.
    ///
    /// # Errors
    /// The system call's.
    pub fn notify(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// Whether a write can be durable by itself when it completes.
    pub fn writes_through(&self) -> bool {
        self.image.writes_through()
    }

    /// How many requests are not yet reaped.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Queues a request; false if `depth` are under way already. `token` is less than 2^63.
    ///
    /// A write or zeroing that would make the file longer completes with an error.
    ///
    /// # Safety
    /// `pieces` and the memory they name stay valid, and are not borrowed by Rust code, until the
    /// request is reaped (or the `FileIo` dropped, which waits).
    pub unsafe fn submit(&mut self, op: FileOp, pieces: &[libc::iovec], token: u64) -> bool {
        if self.in_flight == self.depth {
            return false;
        }
        let fits = self.fits(op, pieces);
        let fd = types::Fd(self.image.fd());
        let fd_for = |offset| types::Fd(self.image.fd_for(offset, pieces));
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let write =
            |offset| opcode::Writev::new(fd_for(offset), pieces.as_ptr(), count).offset(offset);
        let entry: squeue::Entry = match op {
            // No bytes are zeroed: the kernel refuses that, when it comes to it.
            _ if !fits => opcode::Fallocate::new(fd, 0).build(),
            FileOp::Read(offset) => {
                opcode::Readv::new(fd_for(offset), pieces.as_ptr(), count).offset(offset).build()
            }
            // The range alone, and by a write that is durable itself where the device has one.
            FileOp::WriteThrough(offset) if self.image.writes_through() => {
                write(offset).rw_flags(libc::RWF_DSYNC).build()
            }
            FileOp::Write(offset) | FileOp::WriteThrough(offset) => write(offset).build(),
            FileOp::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileOp::Zero { offset, len, punch } => {
                let how =
                    if punch { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
                let mode = how | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        let token = if op == FileOp::Flush { token | FLUSH } else { token };
        // SAFETY: the caller vouches for the memory until the completion.
        let queued = unsafe { self.ring.submission().push(&entry.user_data(token)) }.is_ok();
        self.in_flight += u32::from(queued);
        queued
    }

    /// Whether the range that a request changes is within the file. Checked once for all requests
    /// that are submitted together: a file that is made shorter between that and the request still
    /// grows by it. The locks prevent that; this keeps an image that was shrunk in spite of them
    /// from growing for good.
    fn fits(&mut self, op: FileOp, pieces: &[libc::iovec]) -> bool {
        let (offset, len) = match op {
            FileOp::Read(_) | FileOp::Flush => return true,
            FileOp::Zero { offset, len, .. } => (offset, len),
            FileOp::Write(offset) | FileOp::WriteThrough(offset) => {
                (offset, pieces.iter().map(|piece| piece.iov_len as u64).sum())
            }
        };
        let bytes = *self.bytes.get_or_insert_with(|| self.image.bytes());
        offset.checked_add(len).is_some_and(|end| end <= bytes)
    }

    /// Hands what is queued to the kernel.
    ///
    /// # Errors
    /// The ring is unusable.
    pub fn kick(&mut self) -> io::Result<()> {
        self.refused = false;
        while !self.ring.submission().is_empty() && !self.refused {
            if let Some(pending) = &self.pending {
                self.bytes = None;
                pending.hand_over();
                return Ok(());
            }
            self.enter(0)?;
        }
        Ok(())
    }

    /// Has the kernel take what is queued, and waits for so many completions, or for a signal.
    fn enter(&mut self, completions: usize) -> io::Result<()> {
        self.bytes = None;
        let entered = self.ring.submit_and_wait(completions);
        let errno = entered.as_ref().err().and_then(io::Error::raw_os_error);
        // It is short of memory, or of something that completions give back.
        self.refused = matches!(errno, Some(libc::EAGAIN | libc::EBUSY));
        match entered {
            Err(error) if !self.refused && errno != Some(libc::EINTR) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the kernel did not take what it was handed last: it must be handed over again, as nothing
    /// signals that it could be.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Calls `each` with the token and result (bytes moved) of every completed request. Once a flush of the
    /// image has failed, all later ones fail.
    pub fn reap(&mut self, mut each: impl FnMut(u64, io::Result<u32>)) {
        let mut reaped = 0;
        for entry in self.ring.completion() {
            reaped += 1;
            let result = u32::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            let token = entry.user_data();
            let flushes = token & FLUSH != 0;
            each(token & !FLUSH, if flushes { self.image.flushed(result) } else { result });
        }
        self.in_flight -= reaped;
    }

    /// [Hands over](Self::kick) what is queued and sleeps until at least one request completes; a
    /// signal, or a kernel that is short of memory, may end the sleep early. Does nothing if no
    /// request is under way.
    ///
    /// # Errors
    /// The ring is unusable.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        if self.pending.is_none() {
            self.enter(1)?;
            if self.refused {
                thread::sleep(AGAIN);
            }
            return Ok(());
        }
        self.kick()?;
        if !self.ring.completion().is_empty() {
            return Ok(());
        }
        // SAFETY: the descriptor is the ring's, which lives as long as `self` is borrowed.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        match poll(&mut [PollFd::from_borrowed_fd(ring, PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for FileIo {
    /// Waits for what is under way: the kernel must not write to memory that is then given away.
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.wait().is_err() {
                // The ring cannot be waited on; the memory it may still write to cannot be known
                // to be free. Nothing sound can follow.
                std::process::abort();
            }
            self.reap(|_, _| {});
        }
        // No longer handed over by another thread.
        self.pending = None;
        // SAFETY: it is taken once, here, and not used afterwards.
        self.image.rings.give_back(unsafe { ManuallyDrop::take(&mut self.ring) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::ImageOptions;
    use std::io::Write;

    fn iovec(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    fn run(io: &mut FileIo, op: FileOp, pieces: &[libc::iovec]) -> io::Result<u32> {
        // SAFETY: the loop below waits for the completion before anything is dropped.
        assert!(unsafe { io.submit(op, pieces, 7) });
        io.kick().unwrap();
        let mut result = None;
        while result.is_none() {
            io.wait().unwrap();
            io.reap(|token, outcome| {
                assert_eq!(token, 7);
                result = Some(outcome);
            });
        }
        result.unwrap()
    }

    #[test]
    fn scattered_memory_is_written_and_read_back() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 8192]).unwrap();
        let mut io = FileIo::new(Arc::new(Image::new(file.into(), 8192)), 4).unwrap();
        let (mut a, mut b) = (vec![1; 512], vec![2; 1024]);
        let pieces = [iovec(&mut a), iovec(&mut b)];
        assert_eq!(run(&mut io, FileOp::Write(512), &pieces).unwrap(), 1536);
        let mut back = vec![9; 2048];
        let piece = [iovec(&mut back)];
        assert_eq!(run(&mut io, FileOp::Read(0), &piece).unwrap(), 2048);
        assert_eq!(back[..512], [0; 512]);
        assert_eq!(back[512..1024], [1; 512]);
        assert_eq!(back[1024..], [2; 1024]);
        assert_eq!(run(&mut io, FileOp::Flush, &[]).unwrap(), 0);
    }

    #[test]
    fn an_image_that_is_made_shorter_gives_errors_and_does_not_grow_again() {
        for direct in [false, true] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(1 << 16).unwrap();
            let options = ImageOptions { direct, ..ImageOptions::default() };
            let image = match Image::open(file.path(), options) {
                // A file system without direct I/O.
                Err(_) if direct => continue,
                image => image.unwrap(),
            };
            let (len, holes) = (image.len(), image.holes());
            let mut io = FileIo::new(Arc::new(image), 4).unwrap();
            let mut pages = vec![7; 2 * 8192];
            let from = pages.as_ptr().align_offset(4096);
            let piece = [iovec(&mut pages[from..from + 8192])];
            let odd = [iovec(&mut pages[1..513])];
            assert_eq!(run(&mut io, FileOp::Write(len - 8192), &piece).unwrap(), 8192);
            file.as_file().set_len(12_288).unwrap();
            for at in [8192, 12_288, len - 8192] {
                for write in [FileOp::Write(at), FileOp::WriteThrough(at)] {
                    assert!(run(&mut io, write, &piece).is_err(), "{at}");
                }
                let moved = run(&mut io, FileOp::Read(at), &piece);
                assert!(moved.is_err() || moved.unwrap() < 8192);
                assert!(run(&mut io, FileOp::Write(at + 4096), &odd).is_err());
                if holes.punch {
                    let zero = FileOp::Zero { offset: at, len: 8192, punch: true };
                    assert!(run(&mut io, zero, &[]).is_err());
                }
            }
            assert_eq!(file.as_file().metadata().unwrap().len(), 12_288);
            // The rest is as good as before.
            assert_eq!(run(&mut io, FileOp::Write(4096), &piece).unwrap(), 8192);
            assert_eq!(run(&mut io, FileOp::WriteThrough(512), &odd).unwrap(), 512);
            assert_eq!(run(&mut io, FileOp::Read(4096), &piece).unwrap(), 8192);
            assert_eq!(file.as_file().metadata().unwrap().len(), 12_288);
        }
    }

    #[test]
    fn an_error_of_the_file_reaches_the_caller() {
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        let mut io = FileIo::new(Arc::new(Image::new(read_only.into(), 4096)), 4).unwrap();
        let mut data = vec![1; 512];
        let piece = [iovec(&mut data)];
        assert!(run(&mut io, FileOp::Write(0), &piece).is_err());
    }

    /// The system calls of this thread that enter an io_uring fail with EAGAIN from now on.
    fn refuse() {
        let statement = |code, k, jf| libc::sock_filter { code, jt: 0, jf, k };
        let mut program = [
            statement((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0),
            statement((libc::BPF_JMP | libc::BPF_JEQ) as u16, libc::SYS_io_uring_enter as u32, 1),
            statement(libc::BPF_RET as u16, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32, 0),
            statement(libc::BPF_RET as u16, libc::SECCOMP_RET_ALLOW, 0),
        ];
        let program = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
        // SAFETY: the arguments are numbers, and a program that outlives the call.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    #[test]
    fn what_the_kernel_refuses_for_now_is_handed_over_later() {
        let mut io = FileIo::new(Arc::new(Image::new(tempfile::tempfile().unwrap().into(), 0)), 4);
        let io = io.as_mut().unwrap();
        // SAFETY: it has no memory.
        assert!(unsafe { io.submit(FileOp::Flush, &[], 7) });
        thread::scope(|scope| {
            let refused = scope.spawn(|| {
                refuse();
                io.kick().unwrap();
                assert!(io.is_refused());
                io.wait().expect("it is tried again");
                assert!(io.is_refused());
            });
            refused.join().unwrap();
        });
        io.wait().unwrap();
        assert!(!io.is_refused());
        io.refused = true;
        io.kick().unwrap();
        assert!(!io.is_refused(), "nothing is queued");
    }
}
