//! Random programs of one driver. After each step the device tries, from both workers, what it may
//! reach and much that it may not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use proptest::{collection::vec, prelude::*};
use ringfence_devices::worker::Notify;
use ringfence_dma::{
    Coherent, Config, Direction, Environment, MapError, Mapping, Policy, StaleIova, TimerKind,
};
use ringfence_iommu::{
    FaultReason, Prot,
    wrap::{Kind, Stage, When},
};
use ringfence_mem::AccessError;
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

use crate::{
    history::Piece,
    lying::Lie,
    pages::Buf,
    probe::{How, Touch, Touched},
    rig::{Addresses, Dma, ENDPOINT, RESERVED, Rig, Setup},
    set::{Run, Set, State, Verdict, runs},
};

/// So many accesses are asked for at once: fewer than there is room for refusals.
const AT_ONCE: usize = 120;
/// The window for MSIs that the driver keeps free where the device names none.
const MSI: u64 = 0x800_0000;

type Pieces = Vec<(u64, u64)>;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Map {
        pieces: Pieces,
        direction: Direction,
        from: usize,
    },
    MapList {
        buffers: Vec<Pieces>,
        direction: Direction,
        from: usize,
    },
    Coherent {
        pieces: Pieces,
        from: usize,
    },
    Unmap {
        which: usize,
    },
    UnmapWatched {
        which: usize,
    },
    Drop {
        which: usize,
    },
    Unwatch {
        which: usize,
    },
    /// A persistent mapping at work: the CPU writes, the device reads and writes, the CPU reads.
    Use {
        which: usize,
    },
    /// Asynchronous I/O of the device, which goes on while the program does.
    Hold {
        which: usize,
        worker: usize,
        us: u64,
    },
    Flush,
    Wait {
        ms: u64,
    },
    MoveToCpu(usize),
    Fail {
        kind: Kind,
        stage: Stage,
        nth: u64,
    },
    Mend,
}

fn pieces() -> impl Strategy<Value = Pieces> {
    let offset = prop_oneof![3 => Just(0u64), 2 => 0..4096u64];
    let len = prop_oneof![Just(4096u64), Just(8192), 1..12_000u64];
    vec((offset, len), 1..4)
}

pub(crate) fn direction() -> impl Strategy<Value = Direction> {
    prop_oneof![
        Just(Direction::ToDevice),
        Just(Direction::FromDevice),
        Just(Direction::Bidirectional)
    ]
}

fn failure() -> impl Strategy<Value = Step> {
    // A map that fails has changed nothing, as the trait has it: never afterwards.
    let call = prop_oneof![
        Just((Kind::Map, Stage::Before)),
        Just((Kind::SyncMap, Stage::Before)),
        Just((Kind::SyncMap, Stage::After)),
        Just((Kind::Unmap, Stage::Before)),
        Just((Kind::Unmap, Stage::After)),
        Just((Kind::Sync, Stage::Before)),
        Just((Kind::Sync, Stage::After)),
        Just((Kind::FlushAll, Stage::Before)),
        Just((Kind::FlushAll, Stage::After)),
    ];
    (call, 1..4u64).prop_map(|((kind, stage), nth)| Step::Fail { kind, stage, nth })
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let from = 0..96usize;
    let which = || any::<usize>();
    let lists = vec(pieces(), 1..4);
    prop_oneof![
        7 => (pieces(), direction(), from.clone())
            .prop_map(|(pieces, direction, from)| Step::Map { pieces, direction, from }),
        2 => (lists, direction(), from.clone())
            .prop_map(|(buffers, direction, from)| Step::MapList { buffers, direction, from }),
        1 => (pieces(), from).prop_map(|(pieces, from)| Step::Coherent { pieces, from }),
        6 => which().prop_map(|which| Step::Unmap { which }),
        1 => which().prop_map(|which| Step::UnmapWatched { which }),
        1 => which().prop_map(|which| Step::Drop { which }),
        1 => which().prop_map(|which| Step::Unwatch { which }),
        1 => which().prop_map(|which| Step::Use { which }),
        2 => (which(), 0..2usize, 0..400u64)
            .prop_map(|(which, worker, us)| Step::Hold { which, worker, us }),
        1 => Just(Step::Flush),
        1 => (0..20u64).prop_map(|ms| Step::Wait { ms }),
        1 => (0..2usize).prop_map(Step::MoveToCpu),
        1 => failure(),
        1 => Just(Step::Mend),
    ]
}

pub(crate) fn policy() -> impl Strategy<Value = Policy> {
    let protecting: Vec<_> = Policy::ALL.into_iter().filter(|p| *p != Policy::Off).collect();
    prop::sample::select(protecting)
}

prop_compose! {
    pub(crate) fn setup()(
        policy in policy(),
        slots in 2..6usize,
        boundary in prop_oneof![3 => Just(u64::MAX), 1 => Just(0x3fff), 1 => Just(0xffff)],
        max_segment in prop_oneof![3 => Just(u64::MAX), 1 => 4096..20_000u64],
        granule in prop_oneof![3 => Just(4096u64), 1 => Just(512)],
        addresses in prop_oneof![
            Just(Addresses::Slabs),
            Just(Addresses::Magazines),
            Just(Addresses::Tree)
        ],
        at_the_top in any::<bool>(),
        mappings in prop_oneof![2 => Just(1u64 << 16), 1 => 4..40u64],
        notify in prop_oneof![2 => Just(Notify::Adaptive), 1 => Just(Notify::Sleep)],
        ring_size in prop_oneof![Just(8u16), Just(64)],
        probe_first in any::<bool>(),
    ) -> Setup {
        let config = Config {
            flush_queue_slots: Some(slots),
            segment_boundary: boundary,
            max_segment,
            timer: TimerKind::Manual,
            ..Config::new(policy)
        };
        let lie = Lie::Nothing;
        Setup {
            config, granule, addresses, at_the_top, mappings, notify, ring_size, probe_first, lie,
        }
    }
}

/// What the program has mapped.
enum Held {
    One(Mapping<Buf>),
    List(Mapping<Vec<Buf>>),
    Coherent(Coherent<Buf>),
}

/// Asynchronous I/O under way: when it is over, these eight bytes have been written once more.
struct Moving {
    entry: usize,
    gpa: u64,
    over: Arc<AtomicBool>,
}

pub(crate) struct Program {
    // In the order of an end: what is mapped needs the device.
    /// Each with its entry in the set.
    mappings: Vec<(usize, Held)>,
    watched: Vec<(usize, StaleIova)>,
    /// Until the end.
    dma: Option<Dma>,
    rig: Rig,
    clock: Arc<ManualClock>,
    cpu: Arc<FixedCpu>,
    granule: u64,
    set: Set,
    /// What the data pages must hold.
    shadow: Vec<u8>,
    moving: Vec<Moving>,
    random: u64,
    fills: u8,
    /// Why an access is refused.
    reason: FaultReason,
    accesses: u64,
    refused: u64,
    stale: u64,
}

/// What a program's device did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    pub(crate) accesses: u64,
    pub(crate) refused: u64,
    /// Bytes that were reached after their unmap, which a strict policy does not allow.
    pub(crate) stale: u64,
}

impl core::ops::AddAssign for Count {
    fn add_assign(&mut self, more: Count) {
        self.accesses += more.accesses;
        self.refused += more.refused;
        self.stale += more.stale;
    }
}

impl Program {
    pub(crate) fn new(setup: &Setup) -> Program {
        let (clock, cpu) = (Arc::new(ManualClock::new(1)), Arc::new(FixedCpu::new(2)));
        let environment = Environment {
            clock: Arc::clone(&clock) as _,
            cpu: Arc::clone(&cpu) as _,
            ..Environment::default()
        };
        let (rig, dma) = Rig::new(setup, environment);
        let mut program = Program {
            shadow: vec![0; rig.pages.window().len()],
            rig,
            dma: Some(dma),
            clock,
            cpu,
            granule: setup.granule,
            set: Set::new(setup.granule),
            mappings: Vec::new(),
            watched: Vec::new(),
            moving: Vec::new(),
            random: 1,
            fills: 0,
            reason: FaultReason::Mapping,
            accesses: 0,
            refused: 0,
            stale: 0,
        };
        // No two places hold the same, so that a byte tells where it came from.
        let chunks: Vec<_> =
            (0..program.shadow.len() / 8).map(|_| program.draw().to_le_bytes()).collect();
        program.shadow.copy_from_slice(chunks.as_flattened());
        program.rig.pages.window().write(0, &program.shadow);
        program
    }

    fn draw(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x14057b7ef767814f);
        self.random ^ (self.random >> 29)
    }

    fn dma(&self) -> &Dma {
        self.dma.as_ref().expect("there until the end")
    }

    fn is_lazy(&self) -> bool {
        self.dma().effective_policy().is_lazy()
    }

    pub(crate) fn run(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Map { pieces, direction, from } => {
                let Some(buffer) = self.rig.pages.buffer(pieces, *from) else { return Ok(()) };
                let (there, before) = (buffer.pieces.clone(), self.rig.history.len());
                match self.dma().map(buffer, *direction) {
                    Ok(mapping) => {
                        let runs = runs(mapping.segments(), &there);
                        self.mapped(runs, *direction, before, Held::One(mapping))
                    }
                    Err(error) => self.not_mapped(error, *direction, before),
                }
            }
            Step::MapList { buffers, direction, from } => {
                let mut list = Vec::new();
                for pieces in buffers {
                    list.extend(self.rig.pages.buffer(pieces, *from));
                }
                if list.is_empty() {
                    return Ok(());
                }
                let there: Vec<_> = list.iter().flat_map(|buffer| buffer.pieces.clone()).collect();
                let before = self.rig.history.len();
                match self.dma().map_sg(list, *direction) {
                    Ok(mapping) => {
                        let runs = runs(mapping.segments(), &there);
                        self.mapped(runs, *direction, before, Held::List(mapping))
                    }
                    Err(error) => self.not_mapped(error, *direction, before),
                }
            }
            Step::Coherent { pieces, from } => {
                let Some(buffer) = self.rig.pages.buffer(pieces, *from) else { return Ok(()) };
                let (there, before) = (buffer.pieces.clone(), self.rig.history.len());
                let direction = Direction::Bidirectional;
                match self.dma().alloc_coherent(buffer) {
                    Ok(memory) => {
                        let runs = runs(memory.segments(), &there);
                        self.mapped(runs, direction, before, Held::Coherent(memory))
                    }
                    Err(error) => self.not_mapped(error, direction, before),
                }
            }
            Step::Unmap { which } => self.unmap(*which),
            Step::UnmapWatched { which } => self.unmap_watched(*which),
            Step::Drop { which } => {
                let Some((entry, held)) = self.take(*which) else { return Ok(()) };
                let failures = self.dma().stats().unmap_failures;
                let strictly = matches!(held, Held::Coherent(_));
                drop(held);
                let failed = self.dma().stats().unmap_failures != failures;
                self.unmapped(entry, strictly, if failed { Err(()) } else { Ok(Vec::new()) })
            }
            Step::Unwatch { which } => {
                if !self.watched.is_empty() {
                    let (entry, stale) = self.watched.swap_remove(which % self.watched.len());
                    self.set.entries[entry].watched = false;
                    drop(stale);
                }
                Ok(())
            }
            Step::Use { which } => self.use_it(*which),
            Step::Hold { which, worker, us } => self.hold(*which, *worker, *us),
            Step::Flush => {
                let flushed = self.dma().flush();
                self.flushed(flushed.is_ok())
            }
            Step::Wait { ms } => {
                self.clock.advance(ms * 1_000_000);
                match self.dma().timer_due_at_ns() {
                    Some(due) if due <= self.clock.now_ns() => {
                        let flushed = self.dma().expire();
                        self.flushed(flushed.is_ok())
                    }
                    _ => Ok(()),
                }
            }
            Step::MoveToCpu(cpu) => {
                self.cpu.set(*cpu);
                Ok(())
            }
            Step::Fail { kind, stage, nth } => {
                self.dma().domain().inject(*kind, When::Nth(*nth), *stage);
                Ok(())
            }
            Step::Mend => {
                self.dma().domain().clear();
                Ok(())
            }
        }
    }

    fn mapped(
        &mut self,
        runs: Option<Vec<Run>>,
        direction: Direction,
        before: usize,
        held: Held,
    ) -> Result<(), String> {
        // Rule L19: nothing that waits for a flush was handed out. A map that finds no address
        // flushes, so look first what is over.
        self.settle()?;
        let runs = runs.ok_or("the segments are not as long as the buffer")?;
        let entry = self.set.add(runs, direction, before..self.rig.history.len())?;
        self.mappings.push((entry, held));
        Ok(())
    }

    /// Rules L29, L33, L34: nothing is left of it, or it is quarantined.
    fn not_mapped<B>(
        &mut self,
        error: MapError<B>,
        direction: Direction,
        before: usize,
    ) -> Result<(), String> {
        let numbers = before..self.rig.history.len();
        let run = |piece: &Piece| Run {
            iova: piece.range.first().0,
            gpa: piece.target,
            len: piece.range.len() as u64,
        };
        let runs: Vec<_> = self.rig.history.since(before).iter().map(run).collect();
        let why = error.error();
        // What the call had to flush to find an address is over.
        self.settle()?;
        let entry = self.set.add(runs, direction, numbers.clone())?;
        let undone = error.into_buffer().is_some();
        if undone && !self.rig.history.closed(numbers) {
            return Err(format!("a map failed ({why}) and was not undone"));
        }
        self.set.entries[entry].state = if undone { State::Gone } else { State::Quarantined };
        Ok(())
    }

    fn take(&mut self, which: usize) -> Option<(usize, Held)> {
        let count = self.mappings.len();
        (count > 0).then(|| self.mappings.swap_remove(which % count))
    }

    fn unmap(&mut self, which: usize) -> Result<(), String> {
        let Some((entry, held)) = self.take(which) else { return Ok(()) };
        match held {
            Held::One(mapping) => {
                let result = mapping.unmap().map(|buffer| vec![buffer]).map_err(|_| ());
                self.unmapped(entry, false, result)
            }
            Held::List(mapping) => {
                let result = mapping.unmap().map_err(|_| ());
                self.unmapped(entry, false, result)
            }
            Held::Coherent(memory) => {
                let result = memory.free().map(|buffer| vec![buffer]).map_err(|_| ());
                self.unmapped(entry, true, result)
            }
        }
    }

    fn unmap_watched(&mut self, which: usize) -> Result<(), String> {
        let Some((entry, held)) = self.take(which) else { return Ok(()) };
        let result = match held {
            Held::One(mapping) => {
                mapping.unmap_watched().map(|(buffer, stale)| (vec![buffer], stale)).map_err(|_| ())
            }
            Held::List(mapping) => mapping.unmap_watched().map_err(|_| ()),
            coherent @ Held::Coherent(_) => {
                self.mappings.push((entry, coherent));
                return Ok(());
            }
        };
        match result {
            Ok((buffers, stale)) => {
                self.set.entries[entry].watched = true;
                self.watched.push((entry, stale));
                self.unmapped(entry, false, Ok(buffers))
            }
            Err(()) => self.unmapped(entry, false, Err(())),
        }
    }

    /// An unmap has returned: with the buffers, or with none.
    fn unmapped(
        &mut self,
        entry: usize,
        strictly: bool,
        result: Result<Vec<Buf>, ()>,
    ) -> Result<(), String> {
        let lazily = self.is_lazy() && !strictly;
        let state = match &result {
            Err(()) => State::Quarantined,
            Ok(_) if lazily => State::Stale,
            Ok(_) => State::Gone,
        };
        self.set.entries[entry].state = state;
        if state == State::Gone {
            // Rule L17.
            if !self.rig.history.closed(self.set.entries[entry].pieces.clone()) {
                return Err("a strict unmap has returned, without an invalidation".to_owned());
            }
            self.is_gone(entry)?;
        }
        // The CPU has them to itself now, and uses them.
        for buffer in result.iter().flatten() {
            self.fills = self.fills.wrapping_add(1);
            let gpa = self.rig.pages.gpa();
            buffer.fill(self.fills, |at, len| {
                self.shadow[(at - gpa) as usize..][..len].fill(self.fills);
            });
        }
        self.settle()
    }

    /// Asynchronous I/O does not outlive what it is to.
    fn is_gone(&self, entry: usize) -> Result<(), String> {
        match self.moving.iter().find(|m| m.entry == entry && !m.over.load(Ordering::SeqCst)) {
            Some(moving) => Err(format!("I/O to {:#x} outlives its mapping", moving.gpa)),
            None => Ok(()),
        }
    }

    fn settle(&mut self) -> Result<(), String> {
        let mut gone = Vec::new();
        self.set.settle(&self.rig.history, |entry| gone.push(entry));
        gone.into_iter().try_for_each(|entry| self.is_gone(entry))?;
        for (entry, stale) in &self.watched {
            if stale.released_at_ns().is_some() && self.set.entries[*entry].state != State::Gone {
                return Err(format!("{} was released too early", stale.iova()));
            }
        }
        Ok(())
    }

    /// Rules L19, L24: after a flush nothing that was unmapped before is left.
    fn flushed(&mut self, ok: bool) -> Result<(), String> {
        self.settle()?;
        let left = self.set.entries.iter().find(|entry| entry.state == State::Stale);
        match left.filter(|_| ok) {
            Some(left) => Err(format!("a flush has left {left:x?}")),
            None => Ok(()),
        }
    }

    fn use_it(&mut self, which: usize) -> Result<(), String> {
        let Some(count) = self.mappings.len().checked_sub(1) else { return Ok(()) };
        let (entry, held) = &self.mappings[which % (count + 1)];
        let (entry, len) = (
            *entry,
            match held {
                Held::One(mapping) => mapping.len(),
                Held::List(mapping) => mapping.len(),
                Held::Coherent(memory) => memory.len(),
            },
        );
        let sync = |for_cpu: bool| match (held, for_cpu) {
            (Held::One(mapping), true) => mapping.sync_for_cpu(0..len),
            (Held::One(mapping), false) => mapping.sync_for_device(0..len),
            (Held::List(mapping), true) => mapping.sync_for_cpu(0..len),
            (Held::List(mapping), false) => mapping.sync_for_device(0..len),
            (Held::Coherent(_), _) => Ok(()),
        };
        // What the CPU writes now, the device reads in the check that follows.
        let run = *self.set.entries[entry].runs.last().expect("a mapping has bytes");
        let at = (run.gpa - self.rig.pages.gpa()) as usize;
        let bytes = vec![0x5a; run.len as usize];
        self.rig.pages.window().write(at, &bytes);
        sync(false).map_err(|error| error.to_string())?;
        self.shadow[at..at + bytes.len()].copy_from_slice(&bytes);
        sync(true).map_err(|error| error.to_string())
    }

    fn hold(&mut self, which: usize, worker: usize, us: u64) -> Result<(), String> {
        let Some(count) = self.mappings.len().checked_sub(1) else { return Ok(()) };
        let entry = self.mappings[which % (count + 1)].0;
        let found = &self.set.entries[entry];
        // Bytes that nothing else touches, and eight of one granule.
        let run = found.runs.iter().find(|run| {
            run.len >= 64 && ((run.iova + 24) & (self.granule - 1)) <= self.granule - 8
        });
        let Some(&run) = run.filter(|_| found.prot.contains(Prot::WRITE)) else { return Ok(()) };
        let (first, last) = (self.draw().to_le_bytes(), self.draw().to_le_bytes());
        let (over, time) = (Arc::new(AtomicBool::new(false)), Duration::from_micros(us));
        let how = How::Hold { first, last, time, over: Arc::clone(&over) };
        let touch = Touch { addr: run.iova + 24, len: 8, how };
        let touched = self.rig.probes[worker].touch(vec![touch]);
        if let [Err(error)] = touched[..] {
            return Err(format!("I/O to a live mapping was refused: {error}"));
        }
        let gpa = run.gpa + 24;
        self.moving.push(Moving { entry, gpa, over });
        Ok(())
    }

    /// The data pages hold what they must, and nothing else.
    fn check_memory(&mut self) -> Result<(), String> {
        // Looked at before memory is, so that what is over by then is seen.
        let under_way: Vec<bool> =
            self.moving.iter().map(|m| !m.over.load(Ordering::SeqCst)).collect();
        let mut memory = vec![0; self.shadow.len()];
        self.rig.pages.window().read(0, &mut memory);
        let base = self.rig.pages.gpa();
        for moving in &self.moving {
            // Overwritten once more at some time: whatever is there is right.
            let at = (moving.gpa - base) as usize;
            self.shadow[at..at + 8].copy_from_slice(&memory[at..at + 8]);
        }
        let mut still = under_way.iter();
        self.moving.retain(|_| *still.next().unwrap_or(&false));
        if memory != self.shadow {
            let at = memory.iter().zip(&self.shadow).position(|(a, b)| a != b).unwrap_or(0);
            return Err(format!("the byte at {:#x} was changed", base + at as u64));
        }
        Ok(())
    }

    /// Whether the byte at `gpa` may change at any time.
    fn moves(&self, gpa: u64) -> bool {
        self.moving.iter().any(|moving| (moving.gpa..moving.gpa + 8).contains(&gpa))
    }

    /// Has the device try everything of interest, from both workers.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        if let Some(violation) = self.rig.history.violations().first() {
            return Err(violation.clone());
        }
        for worker in 0..self.rig.probes.len() {
            let touches = self.touches();
            for touches in touches.chunks(AT_ONCE) {
                let touched = self.rig.probes[worker].touch(touches.to_vec());
                self.judge(touches, &touched)?;
            }
            self.check_memory()?;
        }
        Ok(())
    }

    fn touches(&mut self) -> Vec<Touch> {
        let mut all = Vec::new();
        let mask = self.granule - 1;
        let recent = self.set.entries.len().saturating_sub(12);
        let mut edges = Vec::new();
        for (number, entry) in self.set.entries.iter().enumerate() {
            if entry.state == State::Live {
                edges.extend(entry.runs.iter().map(|run| (*run, true)));
            } else if number >= recent || self.watched.iter().any(|(at, _)| *at == number) {
                edges.extend(entry.runs.first().map(|run| (*run, false)));
                edges.extend(entry.runs.last().map(|run| (*run, false)));
            }
        }
        let read = |addr, len| Touch { addr, len, how: How::Read };
        for (run, live) in edges {
            // Its first bytes and its last, each within a granule.
            let first = run.len.min(8).min(self.granule - (run.iova & mask));
            let last = run.len.min(8).min((run.last() & mask) + 1);
            for (addr, len) in [(run.iova, first), (run.last() - (last - 1), last)] {
                all.push(read(addr, len as usize));
                let how = How::Write(self.draw().to_le_bytes());
                all.push(Touch { addr, len: len as usize, how });
            }
            if live {
                // The rest of its granules, and what is beside them.
                let (from, to) = (run.iova & !mask, run.last() | mask);
                all.push(read(to, 1));
                all.extend(to.checked_add(1).map(|addr| read(addr, 1)));
                let how = How::Write(self.draw().to_le_bytes());
                all.extend(from.checked_sub(1).map(|addr| Touch { addr, len: 1, how }));
                // From one granule into the next.
                let len = (u64::MAX - (to - 3)).saturating_add(1).min(8);
                all.push(read(to - 3, len as usize));
            }
        }
        for addr in [0, RESERVED.first().0, RESERVED.last().0, MSI, u64::MAX] {
            all.push(read(addr, 1));
            all.push(Touch { addr, len: 1, how: How::Write([1; 8]) });
        }
        for _ in 0..4 {
            let draw = self.draw();
            let near = match draw & 1 << 62 {
                0 => draw % (4 << 20),
                _ => u64::MAX - draw % (4 << 20),
            };
            all.push(read(if draw & 1 << 61 == 0 { near } else { draw }, 1));
        }
        all
    }

    fn judge(&mut self, touches: &[Touch], touched: &[Touched]) -> Result<(), String> {
        let mut refused = Vec::new();
        let base = self.rig.pages.gpa();
        for (touch, touched) in touches.iter().zip(touched) {
            self.accesses += 1;
            let write = touch.writes();
            let verdict_at = |n: usize| self.set.verdict(touch.addr + n as u64, write);
            let failed = match touched {
                Ok(_) => None,
                Err(
                    AccessError::Unmapped { addr, .. } | AccessError::NotPermitted { addr, .. },
                ) => {
                    refused.push((*addr, write));
                    Some((addr - touch.addr) as usize)
                }
                Err(other) => return Err(format!("{touch:x?}: {other}")),
            };
            for n in 0..failed.unwrap_or(touch.len) {
                if verdict_at(n) == Verdict::Never {
                    let addr = touch.addr + n as u64;
                    return Err(format!("the device reaches {addr:#x}: {touch:x?}"));
                }
            }
            if let Some(n) = failed {
                if let Verdict::Must(gpa) = verdict_at(n) {
                    return Err(format!("{touch:x?} was refused, {gpa:#x} is mapped there"));
                }
                continue;
            }
            let mut bytes = Vec::new();
            for n in 0..touch.len {
                bytes.push(match verdict_at(n) {
                    Verdict::Must(gpa) => gpa,
                    Verdict::May(gpa) => gpa,
                    Verdict::Stale(gpa) => {
                        self.stale += 1;
                        gpa
                    }
                    Verdict::Never => unreachable!("looked for above"),
                });
            }
            for (n, gpa) in bytes.into_iter().enumerate() {
                let at = (gpa.wrapping_sub(base)) as usize;
                if at >= self.shadow.len() {
                    return Err(format!("{touch:x?} leads to {gpa:#x}, which is no data"));
                }
                match (&touch.how, touched) {
                    (How::Write(data), _) => self.shadow[at] = data[n],
                    (_, Ok(read)) if read[n] != self.shadow[at] && !self.moves(gpa) => {
                        return Err(format!("{touch:x?} does not read what is at {gpa:#x}"));
                    }
                    _ => {}
                }
            }
        }
        self.refused += refused.len() as u64;
        self.check_faults(&refused)
    }

    /// Each refusal was reported, in its order, with its address.
    fn check_faults(&mut self, refused: &[(u64, bool)]) -> Result<(), String> {
        let records = self.rig.wait_for_events(refused.len())?;
        let mut expected = refused.iter();
        for record in &records {
            let Some(&(addr, write)) = expected.next() else {
                return Err(format!("nothing was refused that {record:?} could be of"));
            };
            let access = if write { Prot::WRITE } else { Prot::READ };
            let right = record.address.map(|addr| addr.0) == Some(addr)
                && record.access == access
                && record.endpoint == ENDPOINT
                && record.reason == self.reason;
            if !right {
                return Err(format!("{record:?} reports {access:?} at {addr:#x}"));
            }
        }
        Ok(())
    }

    /// Ends the program: nothing is left but what is quarantined, and without a domain nothing.
    pub(crate) fn finish(mut self) -> Result<Count, String> {
        self.dma().domain().clear();
        while !self.mappings.is_empty() {
            self.unmap(0)?;
        }
        self.watched.drain(..).for_each(|(entry, _)| self.set.entries[entry].watched = false);
        let flushed = self.dma().flush();
        self.flushed(flushed.is_ok())?;
        if let Err(error) = flushed {
            return Err(format!("the last flush failed: {error}"));
        }
        self.check()?;
        if let Some(error) = self.rig.failed() {
            return Err(format!("the driver gave up: {error}"));
        }
        let quarantined = self.dma().stats().quarantined;
        let addresses = self.dma().allocator().stats();
        let live = addresses.allocs - addresses.frees;
        if live != quarantined || addresses.rejected_frees != 0 {
            return Err(format!(
                "{live} ranges are taken, {quarantined} quarantined: {addresses:?}"
            ));
        }
        let pieces = self.rig.history.since(0);
        let open = pieces.iter().filter(|piece| piece.closed.is_none()).count() as u64;
        let mapped = self.rig.mappings_in_the_device();
        if mapped > open {
            return Err(format!("the device holds {mapped} mappings, {open} are quarantined"));
        }
        if quarantined == 0 && self.rig.pages.free_pages() != crate::rig::PAGES {
            return Err("pages of a buffer have leaked".to_owned());
        }
        // Without the device of the DMA API its domain goes, and the probes are attached to none.
        self.dma = None;
        self.set.entries.iter_mut().for_each(|entry| entry.state = State::Gone);
        self.reason = FaultReason::NoDomain;
        self.check()?;
        Ok(Count { accesses: self.accesses, refused: self.refused, stale: self.stale })
    }
}

/// Runs a program on a new rig.
///
/// # Errors
/// What went wrong, and after which step.
pub(crate) fn run(setup: &Setup, steps: &[Step]) -> Result<Count, String> {
    let mut program = Program::new(setup);
    for (number, step) in steps.iter().enumerate() {
        let result = program.run(step).and_then(|()| program.check());
        result.map_err(|what| format!("after step {number}, {step:?}: {what}"))?;
    }
    program.finish()
}

/// How many programs or seeds to try: as the environment says, else so many.
pub(crate) fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(150)))]

    #[test]
    fn the_device_never_reaches_a_byte_that_it_may_not(
        setup in setup(),
        steps in vec(step(), 1..60),
    ) {
        // rules L17, L18, L19, L22, L24, L29, L33, L34, L43, L44, D15
        run(&setup, &steps).map_err(TestCaseError::fail)?;
    }
}
