//! The way through pool memory: taken for one I/O, filled or read in place, given back.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringfence_dma::{Direction, OsThreadClock, PoolBuffer, ThreadClock};
use ringfence_drivers::{blk::DriverQueue, ram::PagedBuffer};
use ringfence_mem::HostSlice;
use ringfence_virtq::blk;

use super::{
    path::{Completed, Path, place, reap, transfer},
    space::Dma,
};
use crate::workload::Op;

/// Through a virtqueue to the device process, in memory of the bounce pools. The job's own buffers
/// are never touched.
pub(crate) struct ZeroCopyPath {
    dma: Dma,
    queue: DriverQueue,
    /// By token, from `take` to `give_back`.
    taken: Vec<Option<Taken>>,
    timed: Timed,
}

/// One call in so many is timed: odd, so that both kinds of call are sampled.
const SAMPLE_EVERY: u64 = 63;

/// What taking and giving back cost, by a sample of the calls.
#[derive(Default)]
struct Timed {
    calls: u64,
    sampled: u64,
    ns: u64,
}

impl Timed {
    fn call<R>(&mut self, what: impl FnOnce() -> R) -> R {
        self.calls += 1;
        if !self.calls.is_multiple_of(SAMPLE_EVERY) {
            return what();
        }
        let clock = OsThreadClock;
        let before = clock.thread_ns();
        let begun = clock.thread_ns();
        let result = what();
        let ended = clock.thread_ns();
        // The time of a clock reading is not the call's.
        let reading = begun.saturating_sub(before);
        self.ns += ended.saturating_sub(begun).saturating_sub(reading);
        self.sampled += 1;
        result
    }

    /// Of all calls, ns.
    fn all_ns(&self) -> u64 {
        let all = u128::from(self.ns) * u128::from(self.calls);
        (all / u128::from(self.sampled.max(1))).try_into().unwrap_or(u64::MAX)
    }
}

struct Taken {
    memory: PoolBuffer,
    kind: blk::Kind,
    /// How many bytes a completion must report as written.
    written: u64,
    /// The job's buffer, while the request is in flight.
    own: Option<PagedBuffer>,
}

impl ZeroCopyPath {
    pub(crate) fn new(dma: Dma, queue: DriverQueue) -> ZeroCopyPath {
        ZeroCopyPath { dma, queue, taken: Vec::new(), timed: Timed::default() }
    }
}

impl Path for ZeroCopyPath {
    fn depth(&self) -> usize {
        self.queue.room()
    }

    fn take(&mut self, op: Op, len: u32, token: u32) -> Result<()> {
        let direction = match op {
            Op::Read => Direction::FromDevice,
            Op::Write => Direction::ToDevice,
        };
        let (kind, written) = transfer(op, len.into());
        let memory = self.timed.call(|| self.dma.take_buffer(len.into(), direction));
        let memory = memory.context("a buffer of the pools")?;
        *place(&mut self.taken, token) = Some(Taken { memory, kind, written, own: None });
        Ok(())
    }

    fn bytes<'a>(&'a self, own: &'a PagedBuffer, token: u32) -> HostSlice<'a> {
        match self.taken.get(token as usize) {
            Some(Some(taken)) => taken.memory.piece(),
            _ => own.piece(),
        }
    }

    fn give_back(&mut self, token: u32) {
        if let Some(taken) = self.taken.get_mut(token as usize).and_then(Option::take) {
            self.timed.call(|| drop(taken));
        }
    }

    fn submit(&mut self, _op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let Some(Some(taken)) = self.taken.get_mut(token as usize) else {
            bail!("a request without memory");
        };
        let segments = taken.memory.segments();
        self.queue.submit(taken.kind, offset / blk::SECTOR, segments, token.into())?;
        taken.own = Some(buffer);
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        self.queue.publish();
        Ok(())
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        let taken = &mut self.taken;
        reap(&mut self.queue, into, |at| {
            let taken = taken.get_mut(at)?.as_mut()?;
            Some((taken.own.take()?, taken.written))
        })
    }

    fn wait(&mut self) -> Result<()> {
        self.queue.wait(Duration::from_millis(100));
        Ok(())
    }

    fn kicks(&self) -> u64 {
        self.queue.kicks()
    }

    fn memory_ns(&self) -> u64 {
        self.timed.all_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_the_calls_stands_for_all() {
        let timed = Timed { calls: 630, sampled: 10, ns: 500 };
        assert_eq!(timed.all_ns(), 31_500);
        assert_eq!(Timed::default().all_ns(), 0);
        assert_eq!(Timed { calls: u64::MAX, sampled: 1, ns: u64::MAX }.all_ns(), u64::MAX);
        let mut timed = Timed::default();
        let done: u64 = (0..200).map(|n| timed.call(|| n)).sum();
        assert_eq!((done, timed.calls, timed.sampled), (19_900, 200, 3));
    }
}
