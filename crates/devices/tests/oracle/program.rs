//! Random programs of one driver. After each step the device tries, from both workers, what it may
//! reach and much that it may not.

mod batches;
mod check;
mod copies;
mod moving;
mod steps;
mod unmaps;
mod uses;

use std::{collections::BTreeMap, sync::Arc};

use proptest::{collection::vec, prelude::*};
use ringfence_devices::disk::DiskBuffers;
use ringfence_dma::{
    BounceConfig, BounceLimits, Coherent, Direction, DmaConfig, Environment, FlushTuning, MapError,
    Mapping, Persistent, Policy, PoolBuffer, Segment, StaleIova, TimerKind, Trust,
};
use ringfence_iommu::FaultReason;
use ringfence_iommu_testing::{Kind, Stage, When};
use ringfence_run::worker::Notify;
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

use crate::{
    copied::{Copied, Shadow, Slots},
    history::Piece,
    lying::Lie,
    pages::Buf,
    rig::{self, Addresses, Dma, MapBatch, Rig, Setup, UnmapBatch},
    set::{Run, Set, State, runs},
};

pub(crate) use self::steps::{Meanwhile, Step, direction, kind, policy, setup, step};
use self::{copies::Requested, moving::Moving};

/// What the program has mapped.
enum Held {
    One(Mapping<Buf>),
    List(Mapping<Vec<Buf>>),
    Coherent(Coherent<Buf>),
    Persistent(Persistent<Buf>),
}

/// What is mapped together, and what is unmapped together; with their entries in the set.
struct Batches {
    maps: MapBatch<Vec<Buf>, Coming>,
    unmaps: UnmapBatch<Vec<Buf>, Going>,
}

/// A member of a batch that maps.
struct Coming {
    entry: usize,
    there: Requested,
    policy: Policy,
}

/// A member of a batch that unmaps.
struct Going {
    entry: usize,
    /// Whether it was begun under a strict policy.
    strictly: bool,
}

pub(crate) struct Program {
    // In the order of an end: what is mapped needs the device.
    batches: Option<Batches>,
    /// Each with its entry in the set.
    mappings: Vec<(usize, Held)>,
    watched: Vec<(usize, StaleIova)>,
    taken: Vec<(usize, PoolBuffer)>,
    /// Until the end.
    dma: Option<Dma>,
    rig: Rig,
    clock: Arc<ManualClock>,
    cpu: Arc<FixedCpu>,
    granule: u64,
    untrusted: bool,
    /// Whether all that is stale was unmapped under the bounds in force: not after a change of them
    /// with a failed flush.
    bounded: bool,
    set: Set,
    /// What the data pages must hold.
    shadow: Shadow,
    /// What the memory of slots may hold.
    slots: Slots,
    /// Which entries are copies.
    copies: BTreeMap<usize, Copied>,
    bounce: BounceConfig,
    /// How many buffers should have been bounced, and were mapped for lack of a slot.
    not_bounced: u64,
    /// Whether what fails may cost a pool its addresses.
    may_fail: bool,
    moving: Vec<Moving>,
    /// Where disks have its data.
    disk: Option<DiskBuffers>,
    /// Whether a front end refuses accesses by messages.
    by_messages: bool,
    random: u64,
    fills: u8,
    /// Whether the device may refuse mappings.
    limited: bool,
    /// Whether the device of the DMA API is to be dropped with entries in its flush queues.
    leaves_queued: bool,
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
        let batches = Batches { maps: dma.map_batch(), unmaps: dma.unmap_batch() };
        let mut program = Program {
            batches: Some(batches),
            shadow: Shadow { base: rig.pages.gpa(), bytes: vec![0; rig.pages.window().len()] },
            slots: Slots::new(rig.slots.gpa(), rig.slots.len()),
            copies: BTreeMap::new(),
            bounce: setup.config.bounce,
            not_bounced: 0,
            may_fail: setup.may_fail(),
            taken: Vec::new(),
            rig,
            dma: Some(dma),
            clock,
            cpu,
            granule: setup.granule,
            untrusted: setup.config.trust != Trust::Trusted,
            bounded: true,
            set: Set::new(setup.granule),
            mappings: Vec::new(),
            watched: Vec::new(),
            moving: Vec::new(),
            disk: setup.disk,
            by_messages: setup.kind == rig::Kind::VhostUser,
            random: 1,
            fills: 0,
            limited: setup.is_limited(),
            leaves_queued: setup.leaves_queued,
            reason: FaultReason::Mapping,
            accesses: 0,
            refused: 0,
            stale: 0,
        };
        // No two places hold the same, so that a byte shows where it came from.
        let chunks: Vec<_> =
            (0..program.shadow.bytes.len() / 8).map(|_| program.draw().to_le_bytes()).collect();
        program.shadow.bytes.copy_from_slice(chunks.as_flattened());
        program.rig.pages.window().write(0, &program.shadow.bytes);
        program.adopt();
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
                let (there, before) = (Requested::of(&buffer), self.rig.history.len());
                match self.dma().map(buffer, *direction) {
                    Ok(mapping) => {
                        let segments = mapping.segments().to_vec();
                        self.mapped(&segments, &there, *direction, before, Held::One(mapping))
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
                let (there, before) = (Requested::of_list(&list), self.rig.history.len());
                match self.dma().map(list, *direction) {
                    Ok(mapping) => {
                        let segments = mapping.segments().to_vec();
                        self.mapped(&segments, &there, *direction, before, Held::List(mapping))
                    }
                    Err(error) => self.not_mapped(error, *direction, before),
                }
            }
            Step::Coherent { pieces, from } => {
                let Some(buffer) = self.rig.pages.buffer(pieces, *from) else { return Ok(()) };
                let (there, before) = (Requested::of(&buffer), self.rig.history.len());
                let direction = Direction::Bidirectional;
                match self.dma().alloc_coherent(buffer) {
                    Ok(memory) => {
                        let segments = memory.segments().to_vec();
                        self.mapped(&segments, &there, direction, before, Held::Coherent(memory))
                    }
                    Err(error) => self.not_mapped(error, direction, before),
                }
            }
            Step::Persistent { pieces, from } => {
                let Some(buffer) = self.rig.pages.buffer(pieces, *from) else { return Ok(()) };
                let (there, before) = (Requested::of(&buffer), self.rig.history.len());
                let direction = Direction::Bidirectional;
                match self.dma().map_persistent(buffer, direction) {
                    Ok(mapping) => {
                        let segments = mapping.segments().to_vec();
                        self.mapped(&segments, &there, direction, before, Held::Persistent(mapping))
                    }
                    Err(error) => self.not_mapped(error, direction, before),
                }
            }
            Step::Unmap { which } => self.unmap(*which),
            Step::UnmapWatched { which } => self.unmap_watched(*which),
            Step::Drop { which } => {
                let Some((entry, held)) = self.take(*which) else { return Ok(()) };
                self.end_copy(entry, true);
                let failures = self.dma().stats().unmap_failures;
                let strictly = matches!(held, Held::Coherent(_) | Held::Persistent(_));
                drop(held);
                let failed = self.dma().stats().unmap_failures != failures;
                let lazily = self.is_lazy() && !strictly;
                self.unmapped(entry, lazily, if failed { Err(()) } else { Ok(Vec::new()) })
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
            Step::Hold { which, worker, us, then } => {
                self.hold(*which, *worker, *us)?;
                match then {
                    Some(Meanwhile::Unmap) => self.unmap(*which),
                    Some(Meanwhile::Detach) => self.detach(),
                    None => Ok(()),
                }
            }
            Step::Submit { buffers, direction, from, at_once } => {
                self.submit(buffers, *direction, *from)?;
                if *at_once { self.collect(false) } else { Ok(()) }
            }
            Step::Collect { wait } => self.collect(*wait),
            Step::Complete { which, count, watched, at_once } => {
                self.complete(*which, *count, *watched)?;
                if *at_once { self.reap(false) } else { Ok(()) }
            }
            Step::Reap { wait } => self.reap(*wait),
            Step::Switch { policy } => {
                let switched = self.dma().set_policy(*policy);
                self.adopt();
                self.bounded &= switched.is_ok();
                // Between policies with the same queues nothing need be flushed.
                self.flushed(switched.is_ok() && !self.is_lazy())
            }
            Step::Tune { tuning } => {
                let tuned = self.dma().set_flush_tuning(*tuning);
                self.bounded &= tuned.is_ok();
                self.flushed(tuned.is_ok() && self.is_lazy())
            }
            Step::Sync { which, part, for_cpu } => self.sync(*which, *part, *for_cpu),
            Step::Note { which, part } => self.note(*which, *part),
            Step::Take { len, direction } => self.take_buffer(*len, *direction),
            Step::Fill { which } => self.fill(*which),
            Step::GiveBack { which } => self.give_back(*which),
            Step::Trim => {
                if let Some(pools) = &self.rig.pools {
                    pools.trim();
                }
                Ok(())
            }
            Step::Flush => {
                let flushed = self.dma().flush();
                self.flushed(flushed.is_ok())
            }
            Step::Wait { ms } => {
                self.clock.advance(ms * 1_000_000);
                // What is idle loses its memory now, and at no other time: what the device reached is
                // judged by what is mapped then.
                let now_ns = self.clock.now_ns();
                if let Some(pools) = &self.rig.pools
                    && pools.due_at_ns().is_some_and(|due| due <= now_ns)
                {
                    pools.expire();
                }
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
            Step::Detach => self.detach(),
            Step::Attach => self.attach(),
            Step::Renew => self.detach().and_then(|()| self.attach()),
            Step::Fail { kind, stage, nth } => {
                self.may_fail = true;
                self.dma().domain().inject(*kind, When::Nth(*nth), *stage);
                Ok(())
            }
            Step::Mend => {
                self.dma().domain().clear();
                Ok(())
            }
        }
    }

    /// Rule V14: from here on the device reaches nothing, not by asynchronous I/O either.
    fn detach(&mut self) -> Result<(), String> {
        if self.rig.is_attached() {
            self.rig.detach()?;
            self.reason = self.rig.detached_reason();
            self.note_moving(None);
            if let Some(moving) = self.moving.iter().find(|moving| moving.reaches()) {
                return Err(format!("{moving} outlives the detach"));
            }
        }
        Ok(())
    }

    fn attach(&mut self) -> Result<(), String> {
        if !self.rig.is_attached() {
            match self.rig.attach() {
                Ok(()) => self.reason = FaultReason::Mapping,
                // It has no room for what was mapped meanwhile, and stays detached.
                Err(_) if self.limited => self.note_moving(None),
                Err(what) => return Err(what),
            }
        }
        Ok(())
    }

    fn mapped(
        &mut self,
        segments: &[Segment],
        there: &Requested,
        direction: Direction,
        before: usize,
        held: Held,
    ) -> Result<(), String> {
        // Rule L19: nothing that waits for a flush was handed out. A map that finds no address
        // flushes, so look first what is over.
        self.settle()?;
        let (bounced, lasts) = match &held {
            Held::One(mapping) => (mapping.is_bounced(), false),
            Held::List(mapping) => (mapping.is_bounced(), false),
            Held::Coherent(_) | Held::Persistent(_) => (false, true),
        };
        self.must_be(there, self.dma().effective_policy(), bounced, lasts)?;
        let numbers = self.rig.history.numbers(before);
        let entry = if bounced {
            if !numbers.is_empty() {
                return Err("a copy was made, and the buffer mapped too".to_owned());
            }
            let mut copied = self.model(there, direction);
            let runs = self.load(segments, &mut copied)?;
            let entry = self.set.add(runs, direction, numbers)?;
            self.copies.insert(entry, copied);
            entry
        } else {
            let runs = runs(segments, &there.pieces);
            let runs = runs.ok_or("the segments are not as long as the buffer")?;
            self.is_ready(&runs)?;
            self.set.add(runs, direction, numbers)?
        };
        self.mappings.push((entry, held));
        Ok(())
    }

    /// Rule L34: the device has the mappings of all that is handed out.
    fn is_ready(&self, runs: &[Run]) -> Result<(), String> {
        match runs.iter().find(|run| !self.rig.history.is_ready(run.iova, run.last())) {
            Some(run) => Err(format!("{run:x?} was handed out, and no sync has reported it")),
            None => Ok(()),
        }
    }

    /// What was mapped in the domain since then, in whole granules.
    fn recorded(&self, before: usize) -> Vec<Run> {
        let run = |piece: &Piece| Run {
            iova: piece.range.first().0,
            gpa: piece.target,
            len: piece.range.len() as u64,
        };
        let history = &self.rig.history;
        history.pieces(&history.numbers(before)).iter().map(run).collect()
    }

    /// Rules L29, L33, L34: nothing is left of it, or it is quarantined.
    fn not_mapped<B>(
        &mut self,
        error: MapError<B>,
        direction: Direction,
        before: usize,
    ) -> Result<(), String> {
        let numbers = self.rig.history.numbers(before);
        let (runs, why) = (self.recorded(before), error.error());
        // What the call had to flush to find an address is over.
        self.settle()?;
        let entry = self.set.add(runs, direction, numbers.clone())?;
        let undone = error.into_buffer().is_some();
        if undone && !self.rig.history.closed(&numbers) {
            return Err(format!("a map failed ({why}) and was not undone"));
        }
        self.set.entries[entry].state = if undone { State::Gone } else { State::Quarantined };
        self.disclaim();
        Ok(())
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
        // What a batch has unmapped and not handed out yet may wait for a flush too.
        self.bounded |=
            left.is_none() && self.set.entries.iter().all(|entry| entry.state != State::Going);
        match left.filter(|_| ok) {
            Some(left) => Err(format!("a flush has left {left:x?}")),
            None => Ok(()),
        }
    }

    /// Ends the program: nothing is left but what is quarantined, and without a domain nothing.
    pub(crate) fn finish(mut self) -> Result<Count, String> {
        self.dma().domain().clear();
        self.collect(true)?;
        self.reap(true)?;
        while !self.mappings.is_empty() {
            self.unmap(0)?;
        }
        self.watched.drain(..).for_each(|(entry, _)| self.set.entries[entry].watched = false);
        self.attach()?;
        if !self.leaves_queued {
            let flushed = self.dma().flush();
            self.flushed(flushed.is_ok())?;
            if let Err(error) = flushed {
                return Err(format!("the last flush failed: {error}"));
            }
        }
        while !self.taken.is_empty() {
            self.give_back(0)?;
        }
        self.check()?;
        if let Some(error) = self.rig.failed() {
            return Err(format!("the driver gave up: {error}"));
        }
        self.check_pools()?;
        let quarantined = self.dma().stats().quarantined;
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
        self.batches = None;
        self.dma = None;
        let pooled = self.rig.pools.take().is_some();
        // Rule L30: what was queued was flushed.
        self.flushed(true)?;
        self.rig.end();
        self.note_moving(None);
        let addresses = self.rig.allocator.stats();
        let live = addresses.allocs - addresses.frees;
        let leaks = pooled && self.may_fail;
        if live < quarantined || live > quarantined && !leaks || addresses.rejected_frees != 0 {
            return Err(format!(
                "{live} ranges are taken, {quarantined} quarantined: {addresses:?}"
            ));
        }
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

/// How many programs or seeds to try: from the environment, or `default`.
pub(crate) fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

/// A setup that does nothing besides what a program requests.
pub(crate) fn plain(policy: Policy) -> Setup {
    let flush = FlushTuning { slots: 8, ..FlushTuning::of(policy) };
    Setup {
        config: DmaConfig {
            flush: Some(flush),
            timer: TimerKind::Manual,
            ..DmaConfig::new(policy)
        },
        granule: 4096,
        addresses: Addresses::Slabs,
        at_the_top: false,
        mappings: 1 << 16,
        table_bytes: 16 << 20,
        notify: Notify::Adaptive,
        ring_size: 8,
        probe_first: false,
        kind: rig::Kind::Viommu,
        space: 1 << 20,
        entries: 1 << 16,
        leaves_queued: false,
        renews: None,
        bounces: Some((BounceLimits { largest: 4096, max_bytes: 16_384, idle_ms: 1000 }, 32)),
        disk: None,
        lie: Lie::Nothing,
    }
}

#[test]
fn a_strict_policy_that_follows_a_failed_one_is_strict() {
    // rules L17, L19, L27
    let map = Step::Map { pieces: vec![(0, 4096)], direction: Direction::Bidirectional, from: 0 };
    let fail = Step::Fail { kind: Kind::FlushAll, stage: Stage::Before, nth: 1 };
    let switch = |policy| Step::Switch { policy };
    for (first, second) in [
        (Policy::Bounce, Policy::Auto),
        (Policy::Strict, Policy::StrictMap),
        (Policy::Auto, Policy::Auto),
    ] {
        let unmap = Step::Unmap { which: 0 };
        let steps = [map.clone(), unmap, fail.clone(), switch(first), switch(second)];
        run(&plain(Policy::LazySq), &steps).unwrap();
    }
}

#[test]
fn what_a_batch_began_to_unmap_lazily_is_not_strict_when_the_policy_is() {
    let list =
        Step::MapList { buffers: vec![vec![(0, 4096)]], direction: Direction::ToDevice, from: 0 };
    let steps = [
        list.clone(),
        Step::Unmap { which: 0 },
        list,
        Step::Complete { which: 0, count: 1, watched: false, at_once: false },
        Step::Fail { kind: Kind::FlushAll, stage: Stage::Before, nth: 1 },
        Step::Switch { policy: Policy::Strict },
    ];
    run(&plain(Policy::LazySq), &steps).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(300)))]

    #[test]
    fn the_device_never_reaches_a_byte_that_it_may_not(
        setup in setup(),
        steps in vec(step(), 1..60),
    ) {
        // rules L17, L19, L22, L24, L27, L28, L29, L30, L33, L34, L43, D15, V14
        run(&setup, &steps).map_err(TestCaseError::fail)?;
    }
}
