//! The ways in memory that stays mapped: registered buffers, and memory of the bounce pools.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use ringfence_dma::{
    Direction, DmaBuffer, OsThreadClock, Persistent, PoolBuffer, Segment, ThreadClock,
};
use ringfence_drivers::{
    blk::{Done, DriverQueue},
    ram::{Arena, PagedBuffer},
};
use ringfence_mem::HostSlice;
use ringfence_virtq::blk;

use super::{
    path::{Completed, Path, place, transfer},
    space::Dma,
};
use crate::workload::Op;

/// Where the memory of an I/O comes from.
pub(crate) enum Memory {
    /// All buffers of all paths, mapped once.
    Registered(Arc<Persistent<Arena>>),
    /// The bounce pools: memory is taken for one I/O, filled or read in place, and given back. The job's
    /// own buffers are never touched.
    Pools(Dma),
}

/// Through a virtqueue to the device process, in memory that stays mapped.
pub(crate) struct StandingPath {
    queue: DriverQueue,
    memory: Memory,
    /// By token: memory of the pools, from `take` to `give_back`.
    taken: Vec<Option<PoolBuffer>>,
    /// By token: the job's buffer of a request in flight, and how many bytes its completion must report as
    /// written.
    under_way: Vec<Option<(PagedBuffer, u64)>>,
    segments: Vec<Segment>,
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

impl StandingPath {
    pub(crate) fn new(memory: Memory, queue: DriverQueue) -> StandingPath {
        let (taken, under_way, segments) = (Vec::new(), Vec::new(), Vec::new());
        StandingPath { memory, queue, taken, under_way, segments, timed: Timed::default() }
    }
}

impl Path for StandingPath {
    fn depth(&self) -> usize {
        self.queue.room()
    }

    fn take(&mut self, op: Op, len: u32, token: u32) -> Result<()> {
        let Memory::Pools(dma) = &self.memory else { return Ok(()) };
        let direction = match op {
            Op::Read => Direction::FromDevice,
            Op::Write => Direction::ToDevice,
        };
        let memory = self.timed.call(|| dma.take_buffer(len.into(), direction));
        *place(&mut self.taken, token) = Some(memory.context("a buffer of the pools")?);
        Ok(())
    }

    fn bytes<'a>(&'a self, own: &'a PagedBuffer, token: u32) -> HostSlice<'a> {
        match self.taken.get(token as usize) {
            Some(Some(taken)) => taken.piece(),
            _ => own.piece(),
        }
    }

    fn give_back(&mut self, token: u32) {
        if let Some(taken) = self.taken.get_mut(token as usize).and_then(Option::take) {
            self.timed.call(|| drop(taken));
        }
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let (kind, written) = transfer(op, buffer.len());
        let segments = match &self.memory {
            Memory::Registered(arena) => {
                let first = buffer.offset() as u64;
                self.segments.clear();
                let parts = arena.segments_for(first..first + buffer.len());
                self.segments.extend(parts.context("a buffer of another arena")?);
                &self.segments
            }
            Memory::Pools(_) => {
                let taken = self.taken.get(token as usize).and_then(Option::as_ref);
                taken.context("a request without memory")?.segments()
            }
        };
        self.queue.submit(kind, offset / blk::SECTOR, segments, token.into())?;
        *place(&mut self.under_way, token) = Some((buffer, written));
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        self.queue.publish();
        Ok(())
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        while let Some(Done { token, ok, written }) = self.queue.reap()? {
            let held = self.under_way.get_mut(token as usize).and_then(Option::take);
            let (buffer, wanted) = held.context("a completion of no request")?;
            let ok = ok && u64::from(written) == wanted;
            into.push(Completed { token: token as u32, buffer, ok });
        }
        Ok(())
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
