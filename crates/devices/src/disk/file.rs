//! A disk in a file or on a block device, through io_uring.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::Arc,
    time::Duration,
};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Image;

/// What to do with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOp {
    /// Read from this offset.
    Read(u64),
    /// Write at this offset.
    Write(u64),
    /// Make everything written durable.
    Flush,
    /// Make a range read as zeroes.
    Zero {
        /// Where it begins, in bytes.
        offset: u64,
        /// How long it is.
        len: u64,
        /// Whether its space may be given back.
        punch: bool,
    },
}

/// One worker's way to a file: an io_uring of its own.
///
/// Requests are queued with [`submit`](Self::submit), handed to the kernel together by
/// [`kick`](Self::kick) and collected by [`reap`](Self::reap).
pub struct FileIo {
    ring: IoUring,
    image: Arc<Image>,
    /// Handed over or waiting to be; never more than the completion ring holds.
    in_flight: u32,
    depth: u32,
}

impl FileIo {
    /// An io_uring for up to `depth` requests at a time.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here.
    pub fn new(image: Arc<Image>, depth: u32) -> io::Result<FileIo> {
        let depth = depth.clamp(1, 4096).next_power_of_two();
        let ring = IoUring::builder().setup_cqsize(depth * 2).build(depth)?;
        Ok(FileIo { ring, image, in_flight: 0, depth })
    }

    /// Has the kernel write to `event` whenever something completes.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn notify(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// The descriptor of the file.
    pub fn file(&self) -> RawFd {
        self.image.fd()
    }

    /// How many requests are not yet reaped.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Queues a request; false if `depth` are under way already.
    ///
    /// # Safety
    /// `pieces` and the memory they name stay valid, and are not borrowed by Rust code, until the
    /// request is reaped (or the `FileIo` dropped, which waits).
    pub unsafe fn submit(&mut self, op: FileOp, pieces: &[libc::iovec], token: u64) -> bool {
        if self.in_flight == self.depth {
            return false;
        }
        let fd = types::Fd(self.image.fd());
        let fd_for = |offset| types::Fd(self.image.fd_for(offset, pieces));
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let entry: squeue::Entry = match op {
            FileOp::Read(offset) => {
                opcode::Readv::new(fd_for(offset), pieces.as_ptr(), count).offset(offset).build()
            }
            FileOp::Write(offset) => {
                opcode::Writev::new(fd_for(offset), pieces.as_ptr(), count).offset(offset).build()
            }
            FileOp::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileOp::Zero { offset, len, punch } => {
                let how =
                    if punch { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
                let mode = how | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        // SAFETY: the caller vouches for the memory until the completion.
        let queued = unsafe { self.ring.submission().push(&entry.user_data(token)) }.is_ok();
        self.in_flight += u32::from(queued);
        queued
    }

    /// Hands what is queued to the kernel.
    ///
    /// # Errors
    /// The ring is unusable.
    pub fn kick(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of something that completions give back.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Calls `each` with the token and result (bytes moved) of every completed request.
    pub fn reap(&mut self, mut each: impl FnMut(u64, io::Result<u32>)) {
        let mut reaped = 0;
        for entry in self.ring.completion() {
            reaped += 1;
            let result = u32::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            each(entry.user_data(), result);
        }
        self.in_flight -= reaped;
    }

    /// Sleeps until at least one request completes, or for `limit`, or does nothing if none is
    /// under way.
    ///
    /// # Errors
    /// The ring is unusable.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let Some(limit) = limit else {
            return match self.ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => Err(error),
                _ => Ok(()),
            };
        };
        self.kick()?;
        if !self.ring.completion().is_empty() {
            return Ok(());
        }
        // SAFETY: the descriptor is the ring's, which lives as long as `self` is borrowed.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        let limit = Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(ring, PollFlags::IN)], Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for FileIo {
    /// Waits for what is under way: the kernel must not write to memory that is then given away.
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.wait(None).is_err() {
                // The ring cannot be waited on; the memory it may still write to cannot be known
                // to be free. Nothing sound can follow.
                std::process::abort();
            }
            self.reap(|_, _| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            io.wait(None).unwrap();
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
    fn an_error_of_the_file_reaches_the_caller() {
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        let mut io = FileIo::new(Arc::new(Image::new(read_only.into(), 4096)), 4).unwrap();
        let mut data = vec![1; 512];
        let piece = [iovec(&mut data)];
        assert!(run(&mut io, FileOp::Write(0), &piece).is_err());
    }
}
