//! The way through pool memory: taken for one I/O, filled or read in place, given back.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringfence_devices::{
    blk::{Done, DriverQueue, wire},
    ram::PagedBuffer,
};
use ringfence_dma::{Direction, PoolBuffer};

use super::{
    link::Dma,
    path::{Completed, Path},
};
use crate::workload::Op;

/// Through a virtqueue to the device process, in memory of the bounce pools. The job's own buffers
/// are never touched.
pub(crate) struct ZeroCopyPath {
    dma: Dma,
    queue: DriverQueue,
    /// By token, from `take` to `give_back`.
    taken: Vec<Option<Taken>>,
}

struct Taken {
    memory: PoolBuffer,
    /// How many bytes an answer must say were written.
    written: u64,
    /// The job's buffer, while the request is under way.
    own: Option<PagedBuffer>,
}

impl ZeroCopyPath {
    pub(crate) fn new(dma: Dma, queue: DriverQueue) -> ZeroCopyPath {
        ZeroCopyPath { dma, queue, taken: Vec::new() }
    }
}

impl Path for ZeroCopyPath {
    fn depth(&self) -> usize {
        self.queue.room()
    }

    fn take(&mut self, op: Op, len: u32, token: u32) -> Result<()> {
        let len = u64::from(len);
        let (direction, written) = match op {
            Op::Read => (Direction::FromDevice, len + 1),
            Op::Write => (Direction::ToDevice, 1),
        };
        let memory = self.dma.take_buffer(len, direction).context("a buffer of the pools")?;
        let at = token as usize;
        if self.taken.len() <= at {
            self.taken.resize_with(at + 1, || None);
        }
        self.taken[at] = Some(Taken { memory, written, own: None });
        Ok(())
    }

    fn bytes<'a>(&'a mut self, own: &'a mut PagedBuffer, token: u32) -> &'a mut [u8] {
        match self.taken.get_mut(token as usize) {
            Some(Some(taken)) => taken.memory.bytes_mut(),
            _ => own.bytes_mut(),
        }
    }

    fn give_back(&mut self, token: u32) {
        if let Some(taken) = self.taken.get_mut(token as usize) {
            *taken = None;
        }
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let kind = match op {
            Op::Read => wire::Kind::In,
            Op::Write => wire::Kind::Out,
        };
        let Some(Some(taken)) = self.taken.get_mut(token as usize) else {
            bail!("a request without memory");
        };
        let segments = taken.memory.segments();
        self.queue.submit(kind, offset / wire::SECTOR, segments, token.into())?;
        taken.own = Some(buffer);
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        self.queue.publish();
        Ok(())
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        while let Some(Done { token, ok, written }) = self.queue.reap()? {
            let taken = self.taken.get_mut(token as usize).and_then(Option::as_mut);
            let wanted = taken.as_ref().map(|taken| taken.written);
            let Some(buffer) = taken.and_then(|taken| taken.own.take()) else {
                bail!("an answer to no request");
            };
            let ok = ok && Some(u64::from(written)) == wanted;
            into.push(Completed { token: token as u32, buffer, ok });
        }
        Ok(())
    }

    fn wait(&mut self, idle: Duration) -> Result<()> {
        self.queue.wait(idle, Duration::from_millis(100));
        Ok(())
    }

    fn kicks(&self) -> u64 {
        self.queue.kicks()
    }
}
