//! The ways from a job to a disk.

use std::{collections::VecDeque, os::fd::OwnedFd, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use ringfence_devices::disk::{Disk, FileIo, FileOp, Image};
use ringfence_dma::DmaBuffer;
use ringfence_drivers::ram::PagedBuffer;
use ringfence_mem::HostSlice;
use ringfence_run::worker::Notify;
use ringfence_sync::{
    clock::{Clock, MonotonicClock},
    wait::{Next, Wait},
};
use ringfence_virtq::blk;

use super::probe::Probe;
use crate::workload::Op;

/// How many requests are started, or taken back, before the other side, or the other direction, has
/// its turn: a job that unmapped all of a deep queue before it mapped anything would leave the disk
/// idle.
pub(super) const TURN: usize = 16;

/// What came back from the disk.
pub(crate) struct Completed {
    pub(crate) token: u32,
    pub(crate) buffer: PagedBuffer,
    pub(crate) ok: bool,
}

/// The kind of a request of `len` bytes, and how many bytes the device must report as written: for a read
/// all data and the status, for a write the status.
pub(super) fn transfer(op: Op, len: u64) -> (blk::Kind, u64) {
    match op {
        Op::Read => (blk::Kind::In, len + 1),
        Op::Write => (blk::Kind::Out, 1),
    }
}

/// The place of a token in a list that grows as far as it must.
pub(super) fn place<T: Default>(list: &mut Vec<T>, token: u32) -> &mut T {
    let at = token as usize;
    if list.len() <= at {
        list.resize_with(at + 1, T::default);
    }
    &mut list[at]
}

/// A way from one job thread to the disk.
pub(crate) trait Path {
    /// How many requests can be in flight at a time.
    fn depth(&self) -> usize;
    /// Readies the memory of a request of `len` bytes. Unless a path has other memory, that is the
    /// job's own buffer, and there is nothing to do.
    fn take(&mut self, _op: Op, _len: u32, _token: u32) -> Result<()> {
        Ok(())
    }
    /// The memory of a request that is not in flight: to be filled before it is submitted, to be
    /// checked when it has completed. `own` is the job's buffer for it.
    fn bytes<'a>(&'a self, own: &'a PagedBuffer, _token: u32) -> HostSlice<'a> {
        own.piece()
    }
    /// Releases what [`take`](Self::take) took.
    fn give_back(&mut self, _token: u32) {}
    /// Starts a request; there is room for it.
    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()>;
    /// Makes what was started known to the other side, if there is one.
    fn publish(&mut self) -> Result<()> {
        Ok(())
    }
    /// Takes back what has completed.
    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()>;
    /// Waits for a completion: for a moment awake, or asleep until there is one.
    fn wait(&mut self) -> Result<()>;
    /// Does what must be done now and then.
    fn tick(&mut self, _now_ns: u64) -> Result<()> {
        Ok(())
    }
    /// Whether nothing but requests is in flight.
    fn is_settled(&self) -> bool {
        true
    }
    /// Notifications sent so far.
    fn kicks(&self) -> u64 {
        0
    }
    /// Thread time in [`take`](Self::take) and [`give_back`](Self::give_back) so far, ns (sampled).
    fn memory_ns(&self) -> u64 {
        0
    }
    /// What the probe found.
    fn probe(&self) -> Option<&Probe> {
        None
    }
}

/// To a disk in memory, in the job's own thread: the same disk, nothing between.
pub(crate) struct MemoryPath {
    disk: Disk,
    depth: usize,
    wait: Wait,
    /// In flight, in order of completion.
    due: VecDeque<(u64, Op, u64, PagedBuffer, u32)>,
}

impl MemoryPath {
    pub(crate) fn new(disk: Disk, depth: usize, notify: Notify) -> MemoryPath {
        MemoryPath { disk, depth, wait: Wait::new(notify), due: VecDeque::with_capacity(depth) }
    }
}

impl Path for MemoryPath {
    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let at = match &self.disk {
            Disk::Paced(_, pacer) => {
                pacer.lock().schedule(MonotonicClock.now_ns(), DmaBuffer::len(&buffer))
            }
            _ => 0,
        };
        self.due.push_back((at, op, offset, buffer, token));
        Ok(())
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        let (Disk::Ram(ram) | Disk::Paced(ram, _)) = &self.disk else {
            bail!("a disk in memory was expected");
        };
        let now = MonotonicClock.now_ns();
        // A few at a time, as the device process does between its rounds: what has completed is
        // checked before it has left the cache.
        while into.len() < TURN
            && self.due.front().is_some_and(|&(at, ..)| at <= now)
            && let Some((_, op, offset, buffer, token)) = self.due.pop_front()
        {
            self.wait.found(|| now);
            match op {
                Op::Read => ram.read(offset, buffer.piece()),
                Op::Write => ram.write(offset, buffer.piece()),
            }
            into.push(Completed { token, buffer, ok: true });
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let due = self.due.front().map(|&(at, ..)| at);
        if self.wait.step(&MonotonicClock, || due) == Next::Sleep {
            let left = due.map_or(0, |at| at.saturating_sub(MonotonicClock.now_ns()));
            std::thread::sleep(Duration::from_nanos(left));
        }
        Ok(())
    }
}

/// To a file or block device through an io_uring of the job's thread: what an application without
/// virtual devices does.
pub(crate) struct FilePath {
    // Dropped first: it waits for what the kernel still has under way in the buffers.
    io: FileIo,
    /// By token. It never moves: the kernel holds pointers into it.
    under_way: Box<[UnderWay]>,
    wait: Wait,
}

struct UnderWay {
    buffer: Option<PagedBuffer>,
    piece: [libc::iovec; 1],
}

// SAFETY: the iovec points into the buffer beside it, which may go to another thread.
unsafe impl Send for UnderWay {}

impl FilePath {
    pub(crate) fn new(file: &OwnedFd, depth: usize, notify: Notify) -> Result<FilePath> {
        // Its length does not matter here: offsets are the job's.
        let image = Image::new(file.try_clone().context("the disk's descriptor")?, u64::MAX);
        let io = FileIo::new(Arc::new(image), depth as u32).context("setting up io_uring")?;
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let under_way = (0..depth).map(|_| UnderWay { buffer: None, piece: [none] }).collect();
        Ok(FilePath { io, under_way, wait: Wait::new(notify) })
    }
}

impl Path for FilePath {
    fn depth(&self) -> usize {
        self.under_way.len()
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let piece = buffer.piece();
        let held = &mut self.under_way[token as usize];
        held.piece = [libc::iovec { iov_base: piece.as_ptr().cast(), iov_len: piece.len() }];
        held.buffer = Some(buffer);
        let op = match op {
            Op::Read => FileOp::Read(offset),
            Op::Write => FileOp::Write(offset),
        };
        // SAFETY: `under_way` holds the iovec and, with the buffer, the memory until the completion;
        // it does not move, and is dropped after `io`.
        if !unsafe { self.io.submit(op, &held.piece, token.into()) } {
            bail!("more requests than the io_uring holds");
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        self.io.kick().context("io_uring")
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        let (under_way, wait) = (&mut self.under_way, &mut self.wait);
        self.io.reap(|token, result| {
            wait.found(|| MonotonicClock.now_ns());
            let held = &mut under_way[token as usize];
            let ok = result.is_ok_and(|moved| moved as usize == held.piece[0].iov_len);
            let buffer = held.buffer.take();
            into.extend(buffer.map(|buffer| Completed { token: token as u32, buffer, ok }));
        });
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        if self.wait.step(&MonotonicClock, || None) == Next::Sleep {
            self.io.wait().context("io_uring")?;
        }
        Ok(())
    }
}
