//! One job thread: keeps its requests in flight, checks every byte that comes back.
//!
//! Ordering: flags and counts by which the threads of a run agree that it is over.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Result, bail};
use ringfence_dma::{OsThreadClock, ThreadClock};
use ringfence_drivers::ram::PagedBuffer;
use ringfence_mem::HostSlice;
use ringfence_sync::clock::{Clock, MonotonicClock};

use super::{
    path::{Completed, Path},
    target::Content,
};
use crate::{
    block::BlockError,
    stats::Latencies,
    workload::{Io, Op, Workload},
};

/// A disk that has completed nothing for so long will not.
const SILENCE: Duration = Duration::from_secs(60);

/// What the threads of a stage share with the thread that conducts them.
#[derive(Default)]
pub(crate) struct Control {
    phase: AtomicU8,
    /// Threads that have nothing left to start.
    pub(super) finished: AtomicU32,
    pub(super) failed: AtomicBool,
    /// The other side is gone: nothing will complete any more, and the threads end without it.
    pub(super) abandoned: AtomicBool,
    /// When the measured part began (`MonotonicClock`), 0 before.
    measured_ns: AtomicU64,
    /// The number of the last write.
    sequence: AtomicU64,
}

/// Running in, measured, or ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    RunIn,
    Measured,
    Ending,
}

impl Control {
    pub(crate) fn enter(&self, phase: Phase) {
        if phase == Phase::Measured {
            self.measured_ns.store(MonotonicClock.now_ns(), Ordering::Relaxed);
        }
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// When the measured part began; `None` before.
    pub(crate) fn measured_ns(&self) -> Option<u64> {
        Some(self.measured_ns.load(Ordering::Relaxed)).filter(|&at| at != 0)
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::RunIn,
            1 => Phase::Measured,
            _ => Phase::Ending,
        }
    }
}

/// How often a read that came back torn is repeated. A block that is damaged stays so.
const REPEATS: u8 = 5;

/// One of a job's clones, as one thread runs it.
pub(crate) struct JobClone {
    /// Which job of the stage.
    pub(crate) job: usize,
    pub(crate) workload: Workload,
    /// How long it runs from the beginning of the measured part, if not until its end.
    pub(crate) runtime_ns: u64,
    /// Those buffers that are not in flight, numbered in the order of their addresses.
    pub(crate) buffers: BTreeMap<u32, PagedBuffer>,
}

/// Takes a free buffer for `op`, and its number; `None` if all are in flight. Reads take the lowest and
/// writes the highest, so that I/Os of one kind that are started together have neighbours where
/// there are any, as an allocator by address gives them.
fn take<B>(buffers: &mut BTreeMap<u32, B>, op: Op) -> Option<(u32, B)> {
    match op {
        Op::Read => buffers.pop_first(),
        Op::Write => buffers.pop_last(),
    }
}

/// What one thread counted of one job, in the measured phase.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) ios: u64,
    pub(crate) bytes: u64,
    /// When the last of them completed (`MonotonicClock`).
    pub(crate) last_ns: u64,
    /// Reads that were repeated, since a write was changing the block.
    pub(crate) torn: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    pub(crate) latency: Latencies,
}

impl Counted {
    /// Adds what another thread counted.
    pub(super) fn add(&mut self, more: &Counted) {
        self.ios += more.ios;
        self.bytes += more.bytes;
        self.last_ns = self.last_ns.max(more.last_ns);
        self.torn += more.torn;
        self.errors += more.errors;
        self.latency.merge(&more.latency);
        if self.first_error.is_none() {
            self.first_error.clone_from(&more.first_error);
        }
    }
}

/// What one thread did.
pub(crate) struct Ran {
    pub(crate) jobs: Vec<Counted>,
    /// Of the measured phase.
    pub(crate) thread_cpu_ns: u64,
    /// Of the measured phase.
    pub(crate) kicks: u64,
    /// Thread time in taking and giving back memory, of the measured phase.
    pub(crate) memory_ns: u64,
}

/// An I/O in flight, or one that waits for room.
struct Task {
    clone: usize,
    io: Io,
    /// The number of its buffer among its clone's.
    buffer: u32,
    started_ns: u64,
    repeats: u8,
}

/// Runs `clones` over `path` until the control ends them, or they end by themselves.
pub(crate) fn run(
    path: &mut dyn Path,
    clones: Vec<JobClone>,
    jobs: usize,
    content: Content,
    control: &Control,
) -> Result<Ran> {
    let (tasks, counted) = (Vec::new(), vec![Counted::default(); jobs]);
    let runner = Runner { clones, tasks, content, control, counted, under_way: 0 };
    runner.run(path).inspect_err(|_| control.failed.store(true, Ordering::Release))
}

struct Runner<'c> {
    clones: Vec<JobClone>,
    tasks: Vec<Task>,
    content: Content,
    control: &'c Control,
    counted: Vec<Counted>,
    under_way: usize,
}

impl Runner<'_> {
    fn run(mut self, path: &mut dyn Path) -> Result<Ran> {
        // Every task keeps its place for as long as its clone has I/O left.
        for (clone, about) in self.clones.iter().enumerate() {
            let io = Io { op: Op::Read, offset: 0, len: 0 };
            let task = || Task { clone, io, buffer: 0, started_ns: 0, repeats: 0 };
            self.tasks.extend((0..about.buffers.len()).map(|_| task()));
        }
        let mut ready: VecDeque<u32> = (0..self.tasks.len() as u32).collect();
        let mut again: Vec<(u32, PagedBuffer)> = Vec::new();
        let depth = path.depth();
        let thread_clock = OsThreadClock;
        let mut begun = None;
        let mut ended = None;
        let mut exhausted = false;
        let mut idle_since = None;
        let mut done: Vec<Completed> = Vec::with_capacity(depth);
        loop {
            if self.control.abandoned.load(Ordering::Relaxed) {
                bail!("given up: the device is gone");
            }
            let phase = self.control.phase();
            let mark = || (thread_clock.thread_ns(), path.kicks(), path.memory_ns());
            if phase == Phase::Measured && begun.is_none() {
                begun = Some(mark());
            }
            if phase == Phase::Ending && ended.is_none() {
                ended = Some(mark());
            }
            let now = MonotonicClock.now_ns();
            let mut started = false;
            // What was begun is completed, in any phase.
            while let Some((token, buffer)) = again.pop() {
                self.submit(path, token, buffer)?;
                started = true;
            }
            while phase != Phase::Ending && self.under_way < depth {
                let Some(token) = ready.pop_front() else { break };
                started |= self.start(path, now, token)?;
            }
            if phase != Phase::Ending {
                path.tick(now)?;
            }
            if started {
                path.publish()?;
            }
            path.reap(&mut done)?;
            if self.under_way == 0 && done.is_empty() {
                if phase == Phase::Ending && path.is_settled() {
                    break;
                }
                if ready.is_empty() && phase != Phase::Ending && !exhausted {
                    // Nothing is left to do: the conductor decides when all are through.
                    exhausted = true;
                    self.control.finished.fetch_add(1, Ordering::Release);
                }
            }
            if done.is_empty() {
                let since = *idle_since.get_or_insert(now);
                let idle = Duration::from_nanos(now.saturating_sub(since));
                if idle > SILENCE && (self.under_way > 0 || !path.is_settled()) {
                    bail!("the disk has completed nothing for {} s", SILENCE.as_secs());
                }
                if exhausted && self.under_way == 0 && path.is_settled() {
                    std::thread::sleep(Duration::from_micros(200));
                } else {
                    path.wait()?;
                }
                continue;
            }
            idle_since = None;
            let now = MonotonicClock.now_ns();
            for completed in done.drain(..) {
                let Completed { token, buffer, ok } = completed;
                let data = path.bytes(&buffer, token);
                if self.complete(token, data, ok, now, phase == Phase::Measured) {
                    path.give_back(token);
                    let task = &self.tasks[token as usize];
                    self.clones[task.clone].buffers.insert(task.buffer, buffer);
                    ready.push_back(token);
                } else {
                    again.push((token, buffer));
                }
            }
        }
        // It ends in no other phase.
        let ended = ended.unwrap_or_default();
        let begun = begun.unwrap_or(ended);
        Ok(Ran {
            jobs: self.counted,
            thread_cpu_ns: ended.0.saturating_sub(begun.0),
            kicks: ended.1 - begun.1,
            memory_ns: ended.2.saturating_sub(begun.2),
        })
    }

    /// Starts the next I/O of a task; false if its clone has none left, or its time is over.
    fn start(&mut self, path: &mut dyn Path, now_ns: u64, token: u32) -> Result<bool> {
        let task = &mut self.tasks[token as usize];
        let clone = &mut self.clones[task.clone];
        let begun = self.control.measured_ns().unwrap_or(now_ns);
        if now_ns.saturating_sub(begun) >= clone.runtime_ns {
            return Ok(false);
        }
        let Some(io) = clone.workload.next() else { return Ok(false) };
        // As many buffers as tasks: there is one for each that is ready.
        let Some((number, mut buffer)) = take(&mut clone.buffers, io.op) else {
            bail!("a job has more I/O under way than buffers");
        };
        task.io = io;
        task.buffer = number;
        task.repeats = 0;
        buffer.set_len(io.len as usize);
        path.take(io.op, io.len, token)?;
        self.submit(path, token, buffer)?;
        Ok(true)
    }

    fn submit(&mut self, path: &mut dyn Path, token: u32, buffer: PagedBuffer) -> Result<()> {
        let task = &mut self.tasks[token as usize];
        let Io { op, offset, .. } = task.io;
        let data = path.bytes(&buffer, token);
        match op {
            Op::Write => {
                let sequence = self.control.sequence.fetch_add(1, Ordering::Relaxed) + 1;
                self.content.format.fill_piece(data, offset, sequence);
            }
            // What comes back must have been written by the disk, not left over.
            Op::Read => self.content.format.poison(data),
        }
        task.started_ns = MonotonicClock.now_ns();
        path.submit(op, offset, buffer, token)?;
        self.under_way += 1;
        Ok(())
    }

    /// Checks what has come back and counts it; false if it is to be repeated.
    fn complete(
        &mut self,
        token: u32,
        data: HostSlice<'_>,
        ok: bool,
        now_ns: u64,
        measured: bool,
    ) -> bool {
        self.under_way -= 1;
        let Content { format, foreign, tears } = self.content;
        let task = &mut self.tasks[token as usize];
        let counted = &mut self.counted[self.clones[task.clone].job];
        let wrong = match (ok, task.io.op) {
            (false, op) => Some(format!("{op:?} at {:#x} failed", task.io.offset)),
            (true, Op::Write) => None,
            (true, Op::Read) => match format.check_piece(data, task.io.offset) {
                Ok(()) => None,
                // Foreign data cannot be checked, only that it was transferred.
                Err(error) if foreign && !matches!(error, BlockError::NotTransferred { .. }) => {
                    None
                }
                Err(BlockError::Damaged { .. }) if tears && task.repeats < REPEATS => {
                    task.repeats += 1;
                    counted.torn += 1;
                    return false;
                }
                Err(error) => Some(error.to_string()),
            },
        };
        if let Some(wrong) = wrong {
            // Errors count whenever they happen; figures only while they are measured.
            counted.errors += 1;
            counted.first_error.get_or_insert(wrong);
        }
        if measured {
            counted.ios += 1;
            counted.bytes += u64::from(task.io.len);
            counted.last_ns = now_ns;
            counted.latency.record(now_ns.saturating_sub(task.started_ns));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_take_the_lowest_and_writes_the_highest_free_buffer() {
        let mut buffers: BTreeMap<u32, ()> = (0..130).map(|number| (number, ())).collect();
        let mut taken = |op| take(&mut buffers, op).map(|(number, ())| number);
        let wanted = [(Op::Read, 0), (Op::Write, 129), (Op::Read, 1), (Op::Write, 128)];
        for (op, number) in wanted {
            assert_eq!(taken(op), Some(number));
        }
        buffers.extend([(0, ()), (129, ())]);
        assert_eq!(take(&mut buffers, Op::Read), Some((0, ())));
        assert_eq!(take(&mut buffers, Op::Write), Some((129, ())));
        buffers.clear();
        assert_eq!(take(&mut buffers, Op::Read), None);
    }
}
