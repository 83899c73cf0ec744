//! Two drivers at once, and two workers that never stop touching what is mapped and what was.
//!
//! Every access is recorded with a number of the sequence before its translation and one after its
//! last byte. Judged afterwards: one that succeeded must have ended between the map of a piece that
//! allows it and the end of the invalidation that covers its unmap; one that was refused must not
//! lie between the return of a map and the call of its unmap.

mod judge;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use proptest::{collection::vec, prelude::*};
use ringfence_dma::{
    BounceConfig, Coherent, Direction, DmaConfig, Environment, FlushTuning, Mapping, Persistent,
    Policy, Segment, StaleIova, TimerKind, Written,
};
use ringfence_iommu::Prot;
use ringfence_iommu_testing::{Kind, Stage, When};

use crate::{
    history::History,
    pages::{Buf, PAGE, Pages},
    probe::{HALF, ProbeUnit, Record, Roaming},
    program::{self, cases, direction, policy},
    rig::{self, Dma, LONG, Rig, Setup},
    set::{Run, runs},
    together::judge::{Judge, check_stamps},
};

/// How many pages each driver hands to the probes at a time.
const TARGETS: usize = 24;
/// The shortest time that is slept.
const SLEEP: Duration = Duration::from_micros(50);
/// Marks what the CPU writes to a buffer that it has to itself.
const PRIVATE: u64 = 0xcc << 56;
/// Marks the words that never change, which name their own address.
const NAME: u64 = 0x1d << 56;
/// Marks what the probes write.
const STAMP: u64 = 0xd0 << 56;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Buffers of `counts` pages.
    Map {
        counts: Vec<u64>,
        direction: Direction,
    },
    MapList {
        counts: Vec<u64>,
        direction: Direction,
    },
    Coherent {
        count: u64,
    },
    Persistent {
        count: u64,
        direction: Direction,
    },
    Unmap {
        which: usize,
    },
    UnmapWatched {
        which: usize,
    },
    Unwatch {
        which: usize,
    },
    Drop {
        which: usize,
    },
    /// Maps as many buffers together, and does something else meanwhile.
    Submit {
        counts: Vec<u64>,
        direction: Direction,
        us: u64,
    },
    /// Unmaps `count` mappings together, and does something else meanwhile.
    Complete {
        count: usize,
        us: u64,
    },
    /// Another policy, for both drivers.
    Switch {
        policy: Policy,
    },
    Flush,
    Trim,
    Linger {
        us: u64,
    },
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let which = || any::<usize>();
    let counts = || vec(1..4u64, 1..4);
    prop_oneof![
        6 => (counts(), direction()).prop_map(|(counts, direction)| Step::Map { counts, direction }),
        2 => (counts(), direction())
            .prop_map(|(counts, direction)| Step::MapList { counts, direction }),
        2 => (counts(), direction(), 0..40u64)
            .prop_map(|(counts, direction, us)| Step::Submit { counts, direction, us }),
        3 => (1..6usize, 0..40u64).prop_map(|(count, us)| Step::Complete { count, us }),
        1 => (1..4u64).prop_map(|count| Step::Coherent { count }),
        1 => (1..4u64, direction())
            .prop_map(|(count, direction)| Step::Persistent { count, direction }),
        6 => which().prop_map(|which| Step::Unmap { which }),
        1 => which().prop_map(|which| Step::UnmapWatched { which }),
        1 => which().prop_map(|which| Step::Unwatch { which }),
        1 => which().prop_map(|which| Step::Drop { which }),
        1 => policy().prop_map(|policy| Step::Switch { policy }),
        1 => Just(Step::Flush),
        1 => Just(Step::Trim),
        3 => (0..60u64).prop_map(|us| Step::Linger { us }),
    ]
}

enum Held {
    One(Mapping<Buf>),
    List(Mapping<Vec<Buf>>),
    Coherent(Coherent<Buf>),
    Persistent(Persistent<Buf>),
}

/// When a mapping was one, as the program sees it.
struct Live {
    runs: Vec<Run>,
    prot: Prot,
    /// After the map had returned.
    from: u64,
    /// Before the unmap was called.
    until: u64,
    /// Whether it is a copy in a slot.
    copy: bool,
    /// Before the map was called, and after the unmap had returned.
    requested: u64,
    gone: u64,
}

/// What is to be mapped, and since when.
struct Requested {
    pieces: Vec<(u64, u64)>,
    requested: u64,
}

/// A strict unmap that has returned.
struct Returned {
    runs: Vec<Run>,
    by: ThreadId,
    at: u64,
}

/// A word that the CPU had to itself, when an unmap had returned, and found overwritten with `word`.
struct Overwritten {
    gpa: u64,
    word: u64,
    /// After the unmap had returned.
    at: u64,
}

#[derive(Default)]
struct Account {
    live: Vec<Live>,
    returned: Vec<Returned>,
    overwritten: Vec<Overwritten>,
}

/// How many changes of the policy there were.
#[derive(Default)]
struct Switches {
    begun: AtomicU64,
    done: AtomicU64,
}

struct Driver<'a> {
    switches: &'a Switches,
    dma: Dma,
    pages: &'a Arc<Pages>,
    history: &'a History,
    targets: &'a [AtomicU64],
    next_target: usize,
    held: Vec<(usize, Held)>,
    watched: Vec<StaleIova>,
    account: Account,
    /// How often each probe has looked, if it is waited for.
    looks: Option<&'a [Arc<AtomicU64>]>,
}

impl Driver<'_> {
    fn run(mut self, steps: &[Step]) -> Result<Account, String> {
        for (step, number) in steps.iter().zip(1..) {
            self.step(step)?;
            self.await_probes(number);
        }
        while !self.held.is_empty() {
            self.step(&Step::Unmap { which: 0 })?;
        }
        Ok(self.account)
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Map { counts, direction } => {
                let pieces: Vec<_> = counts.iter().map(|count| (0, count * PAGE)).collect();
                let Some(buffer) = self.pages.buffer(&pieces, self.next_target * 7) else {
                    return Ok(());
                };
                let there = self.request(buffer.pieces.clone());
                if let Ok(mapping) = self.dma.map(buffer, *direction) {
                    self.mapped(mapping.segments(), &there, *direction, mapping.is_bounced())?;
                    self.held.push((self.account.live.len() - 1, Held::One(mapping)));
                }
            }
            Step::MapList { counts, direction } => {
                let buffer = |count: &u64| self.pages.buffer(&[(0, count * PAGE)], 0);
                let list: Vec<_> = counts.iter().filter_map(buffer).collect();
                let pieces = list.iter().flat_map(|buffer| buffer.pieces.clone()).collect();
                let there = self.request(pieces);
                if list.is_empty() {
                    return Ok(());
                }
                if let Ok(mapping) = self.dma.map(list, *direction) {
                    self.mapped(mapping.segments(), &there, *direction, mapping.is_bounced())?;
                    self.held.push((self.account.live.len() - 1, Held::List(mapping)));
                }
            }
            Step::Coherent { count } => {
                let Some(buffer) = self.pages.buffer(&[(0, count * PAGE)], 0) else {
                    return Ok(());
                };
                let there = self.request(buffer.pieces.clone());
                if let Ok(memory) = self.dma.alloc_coherent(buffer) {
                    self.mapped(memory.segments(), &there, Direction::Bidirectional, false)?;
                    self.held.push((self.account.live.len() - 1, Held::Coherent(memory)));
                }
            }
            Step::Persistent { count, direction } => {
                let Some(buffer) = self.pages.buffer(&[(0, count * PAGE)], 0) else {
                    return Ok(());
                };
                let there = self.request(buffer.pieces.clone());
                if let Ok(mapping) = self.dma.map_persistent(buffer, *direction) {
                    self.mapped(mapping.segments(), &there, *direction, false)?;
                    self.held.push((self.account.live.len() - 1, Held::Persistent(mapping)));
                }
            }
            Step::Unmap { which } => {
                let strict = self.is_strict();
                let Some((live, held)) = self.take(*which) else { return Ok(()) };
                let (strictly, result) = match held {
                    Held::One(mapping) => (false, mapping.unmap().map(|buffer| vec![buffer]).ok()),
                    Held::List(mapping) => (false, mapping.unmap().ok()),
                    Held::Coherent(memory) => (true, memory.free().map(|buffer| vec![buffer]).ok()),
                    Held::Persistent(mapping) => {
                        (true, mapping.unmap().map(|buffer| vec![buffer]).ok())
                    }
                };
                self.unmapped(live, strictly || self.stays_strict(strict), result)?;
            }
            Step::UnmapWatched { which } => {
                let strict = self.is_strict();
                let Some((live, held)) = self.take(*which) else { return Ok(()) };
                let (strictly, result) = match held {
                    Held::One(mapping) => match mapping.unmap_watched() {
                        Ok((buffer, stale)) => {
                            self.watched.push(stale);
                            (false, Some(vec![buffer]))
                        }
                        Err(_) => (false, None),
                    },
                    Held::List(mapping) => match mapping.unmap_watched() {
                        Ok((buffers, stale)) => {
                            self.watched.push(stale);
                            (false, Some(buffers))
                        }
                        Err(_) => (false, None),
                    },
                    Held::Coherent(memory) => (true, memory.free().map(|buffer| vec![buffer]).ok()),
                    Held::Persistent(mapping) => {
                        (true, mapping.unmap().map(|buffer| vec![buffer]).ok())
                    }
                };
                self.unmapped(live, strictly || self.stays_strict(strict), result)?;
            }
            Step::Unwatch { which } => {
                if !self.watched.is_empty() {
                    drop(self.watched.swap_remove(which % self.watched.len()));
                }
            }
            Step::Drop { which } => {
                if let Some((live, held)) = self.take(*which) {
                    drop(held);
                    self.account.live[live].gone = self.history.sequence.next();
                }
            }
            Step::Trim => {
                if let Some(pools) = self.dma.pools() {
                    pools.trim();
                }
            }
            Step::Submit { counts, direction, us } => self.submit(counts, *direction, *us)?,
            Step::Complete { count, us } => self.complete(*count, *us)?,
            Step::Switch { policy } => {
                self.switches.begun.fetch_add(1, Ordering::SeqCst);
                // If it fails, the timer flushes.
                let _ = self.dma.set_policy(*policy);
                self.switches.done.fetch_add(1, Ordering::SeqCst);
            }
            // If it fails, the timer tries again.
            Step::Flush => drop(self.dma.flush()),
            Step::Linger { us } => linger(Duration::from_micros(*us)),
        }
        Ok(())
    }

    /// Where probes are waited for, waits after every eighth event until each has begun another
    /// access and ended it: on a busy machine it might not run at all while something is mapped.
    fn await_probes(&self, number: u64) {
        let Some(looks) = self.looks.filter(|_| number.is_multiple_of(8)) else { return };
        // They look at nothing while nothing was ever mapped.
        if self.next_target > 0 {
            let now = |look: &Arc<AtomicU64>| look.load(Ordering::SeqCst);
            let (begun, before) = (Instant::now(), looks.iter().map(now).collect::<Vec<_>>());
            let has =
                |(look, before): (&Arc<AtomicU64>, &u64)| now(look) > before.saturating_add(1);
            let all = || looks.iter().zip(&before).all(has);
            while !(all() || looks.iter().any(|look| now(look) == u64::MAX)) {
                assert!(begun.elapsed() < LONG, "a probe does not look");
                thread::yield_now();
            }
        }
    }

    /// If the policy is strict and no thread is changing it: how often it was changed so far.
    fn is_strict(&self) -> Option<u64> {
        let begun = self.switches.begun.load(Ordering::SeqCst);
        let settled = self.switches.done.load(Ordering::SeqCst) == begun;
        (settled && self.dma.effective_policy().is_strict()).then_some(begun)
    }

    /// Whether it has been strict since [`is_strict`](Self::is_strict) was called.
    fn stays_strict(&self, since: Option<u64>) -> bool {
        since == Some(self.switches.begun.load(Ordering::SeqCst))
    }

    fn submit(&mut self, counts: &[u64], direction: Direction, us: u64) -> Result<(), String> {
        let mut batch = self.dma.map_batch();
        for count in counts {
            let Some(buffer) = self.pages.buffer(&[(0, count * PAGE)], 0) else { continue };
            let there = self.request(buffer.pieces.clone());
            // What is refused at once is undone at once.
            drop(batch.push(vec![buffer], direction, there));
        }
        batch.begin();
        let mut mapped = Vec::new();
        // Polls until all are done, or does something else and then waits.
        if us.is_multiple_of(2) {
            while !batch.is_empty() {
                batch.poll(|there, mapping| mapped.extend(mapping.ok().map(|m| (there, m))));
            }
        } else {
            linger(Duration::from_micros(us));
            batch.finish(|there, mapping| mapped.extend(mapping.ok().map(|m| (there, m))));
        }
        for (there, mapping) in mapped {
            self.mapped(mapping.segments(), &there, direction, mapping.is_bounced())?;
            self.held.push((self.account.live.len() - 1, Held::List(mapping)));
        }
        Ok(())
    }

    fn complete(&mut self, count: usize, us: u64) -> Result<(), String> {
        let strict = self.is_strict();
        let mut batch = self.dma.unmap_batch();
        for _ in 0..count {
            let lists = |(_, held): &(usize, Held)| matches!(held, Held::List(_));
            let Some(at) = self.held.iter().position(lists) else { break };
            if let Some((live, Held::List(mapping))) = self.take(at)
                && batch.push(mapping, live).is_err()
            {
                return Err("a batch does not take a mapping of its device".to_owned());
            }
        }
        batch.begin();
        let mut returned = Vec::new();
        if us.is_multiple_of(2) {
            while !batch.is_empty() {
                batch.poll(|live, result| returned.push((live, result.ok().map(|r| r.buffer))));
            }
        } else {
            linger(Duration::from_micros(us));
            batch.finish(|live, result| returned.push((live, result.ok().map(|r| r.buffer))));
        }
        let strictly = self.stays_strict(strict);
        returned.into_iter().try_for_each(|(live, buffers)| self.unmapped(live, strictly, buffers))
    }

    fn mapped(
        &mut self,
        segments: &[Segment],
        there: &Requested,
        direction: Direction,
        copy: bool,
    ) -> Result<(), String> {
        let from = self.history.sequence.next();
        let runs =
            runs(segments, &there.pieces).ok_or("the segments are not as long as the buffer")?;
        for run in &runs {
            if !self.history.is_ready(run.iova, run.last()) {
                return Err(format!("{run:x?} was handed out, and no sync has reported it"));
            }
            for at in (0..run.len).step_by(PAGE as usize) {
                let target = &self.targets[self.next_target % self.targets.len()];
                target.store(run.iova + at, Ordering::SeqCst);
                self.next_target += 1;
            }
        }
        let (prot, until, gone) = (direction.prot(), u64::MAX, u64::MAX);
        let requested = there.requested;
        self.account.live.push(Live { runs, prot, from, until, copy, requested, gone });
        Ok(())
    }

    fn request(&self, pieces: Vec<(u64, u64)>) -> Requested {
        Requested { pieces, requested: self.history.sequence.next() }
    }

    fn take(&mut self, which: usize) -> Option<(usize, Held)> {
        let count = self.held.len();
        let taken = (count > 0).then(|| self.held.swap_remove(which % count))?;
        self.account.live[taken.0].until = self.history.sequence.next();
        Some(taken)
    }

    /// An unmap has returned: with the buffers, or with none.
    fn unmapped(
        &mut self,
        live: usize,
        strictly: bool,
        buffers: Option<Vec<Buf>>,
    ) -> Result<(), String> {
        let at = self.history.sequence.next();
        self.account.live[live].gone = at;
        let Some(buffers) = buffers else { return Ok(()) };
        if !strictly {
            return Ok(());
        }
        let runs = self.account.live[live].runs.clone();
        self.account.returned.push(Returned { runs, by: thread::current().id(), at });
        // Rule L17: the CPU has them to itself now.
        let words = || buffers.iter().flat_map(|buffer| &buffer.pieces).flat_map(second_halves);
        let private = |gpa: u64| (PRIVATE | gpa).to_le_bytes();
        let window = self.pages.window();
        let place = |gpa: u64| (gpa - self.pages.gpa()) as usize;
        words().for_each(|gpa| window.write(place(gpa), &private(gpa)));
        linger(Duration::from_micros(at % 32));
        self.await_probes(at);
        for gpa in words() {
            let mut bytes = [0; 8];
            window.read(place(gpa), &mut bytes);
            if bytes != private(gpa) {
                let word = u64::from_le_bytes(bytes);
                self.account.overwritten.push(Overwritten { gpa, word, at });
            }
        }
        Ok(())
    }
}

/// A word of each 64 bytes of what the probes write.
fn second_halves(&(gpa, len): &(u64, u64)) -> impl Iterator<Item = u64> {
    let pages = (gpa..gpa + len).step_by(PAGE as usize);
    pages.flat_map(|page| (page + HALF..page + PAGE).step_by(64))
}

fn linger(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        thread::yield_now();
    }
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    pub(crate) succeeded: u64,
    pub(crate) refused: u64,
    /// Successes after the unmap had been requested.
    pub(crate) stale: u64,
    /// Writes to what the CPU had to itself, by an address that an earlier mapping of the same page
    /// had left reachable.
    pub(crate) reused: u64,
}

pub(crate) fn run(
    setup: &Setup,
    failures: u32,
    programs: &[Vec<Step>; 2],
) -> Result<Count, String> {
    run_beside(setup, failures, programs, false)
}

/// The same, with drivers that now and then wait until the probes have looked, where it counts that
/// something is met and not when.
pub(crate) fn run_awaiting(setup: &Setup, programs: &[Vec<Step>; 2]) -> Result<Count, String> {
    run_beside(setup, 0, programs, true)
}

fn run_beside(
    setup: &Setup,
    failures: u32,
    programs: &[Vec<Step>; 2],
    awaits: bool,
) -> Result<Count, String> {
    let (mut rig, dma) = Rig::new(setup, Environment::default());
    let pages = Arc::clone(&rig.pages);
    for gpa in (pages.gpa()..pages.gpa() + pages.window().len() as u64).step_by(8) {
        let word = if gpa % PAGE < HALF { NAME | gpa } else { 0 };
        pages.window().write((gpa - pages.gpa()) as usize, &word.to_le_bytes());
    }
    let kinds = [Kind::SyncMap, Kind::Unmap, Kind::Sync, Kind::FlushAll, Kind::SyncEnd];
    for kind in kinds {
        dma.domain().inject(kind, When::PerMillion(failures), Stage::Before);
    }
    let targets: Arc<Vec<AtomicU64>> =
        Arc::new((0..2 * TARGETS).map(|_| AtomicU64::new(0)).collect());
    let history = rig.history.clone();
    let unit = rig.probe_unit;
    let looks: Vec<Arc<AtomicU64>> = rig.workers.iter().map(|_| Arc::default()).collect();
    for ((number, worker), looks) in (0..).zip(&*rig.workers).zip(&looks) {
        let stamp = STAMP | number << 48;
        let roaming = Roaming::new(&targets, history.sequence.clone(), number, stamp, looks);
        worker.call(move |work| work.unit::<ProbeUnit>(unit).unwrap().roaming = Some(roaming));
    }
    let (mut reported, switches) = (Vec::new(), Switches::default());
    let (mut downs, mut renewed) = (Vec::<Down>::new(), Ok(()));
    let accounts = thread::scope(|scope| {
        let drivers: Vec<_> = programs
            .iter()
            .zip(targets.chunks(TARGETS))
            .map(|(steps, targets)| {
                let driver = Driver {
                    switches: &switches,
                    dma: dma.clone(),
                    pages: &pages,
                    history: &history,
                    targets,
                    next_target: 0,
                    held: Vec::new(),
                    watched: Vec::new(),
                    account: Account::default(),
                    looks: awaits.then_some(&looks[..]),
                };
                scope.spawn(move || driver.run(steps))
            })
            .collect();
        while drivers.iter().any(|driver| !driver.is_finished()) {
            rig.poll_events(|record| reported.push(record));
            let (up, down) = setup.renews.unwrap_or((200, 0));
            match Duration::from_micros(up) {
                // A sleep takes longer.
                up if up < SLEEP => linger(up),
                up => thread::sleep(up),
            }
            if renewed.is_ok() && setup.renews.is_some() {
                let (time, limited) = (Duration::from_micros(down), setup.is_limited());
                renewed = renew(&mut rig, time, limited, &mut downs);
            }
        }
        drivers.into_iter().map(|driver| driver.join().unwrap()).collect::<Vec<_>>()
    });
    let records: Vec<Vec<Record>> =
        rig.workers.iter().map(|worker| ProbeUnit::end_roaming(worker, unit)).collect();
    renewed?;
    if let (false, Some(down)) = (rig.is_attached(), downs.last()) {
        let (begins, never) = (down.ends, u64::MAX);
        downs.push(Down { begins, begun: down.ended, ends: never, ended: never });
    }
    dma.domain().clear();
    if !setup.leaves_queued {
        dma.flush().map_err(|error| error.to_string())?;
    }
    let taken = match &rig.pools {
        None if !setup.leaves_queued => taken_for_long(&dma),
        _ => None,
    };
    let quarantined = dma.stats().quarantined;
    drop(dma);
    if let Some(violation) = rig.history.violations().first() {
        return Err(violation.clone());
    }
    let accounts = accounts.into_iter().collect::<Result<Vec<_>, _>>()?;
    if let Some(taken) = taken {
        return Err(taken);
    }
    // What fails may cost a pool its addresses.
    let exact = failures == 0 && !setup.may_fail();
    slots_left(&mut rig, quarantined, exact)?;
    let judge = Judge::new(&rig.history, accounts, downs);
    let mut count = Count::default();
    for record in records.iter().flatten() {
        judge.judge(record, &mut count)?;
    }
    judge.check_returned()?;
    count.reused = judge.check_overwritten(&records)?;
    check_stamps(&pages, &records, &judge)?;
    // Every refusal that was not silenced was reported, or counted as dropped.
    let loud: Vec<_> = records.iter().flatten().filter(|r| !r.ok && r.loud).collect();
    let expected = (loud.len() as u64 - rig.dropped_faults()) as usize;
    let missing = expected.checked_sub(reported.len()).ok_or("too many fault records")?;
    reported.extend(rig.wait_for_events(missing)?);
    let refused: HashSet<_> = loud.iter().map(|record| (record.addr, record.write)).collect();
    for record in reported {
        let addr = record.address.ok_or("a fault record without an address")?;
        if !refused.contains(&(addr.0, record.access == Prot::WRITE)) {
            return Err(format!("nothing was refused that {record:?} could be of"));
        }
    }
    Ok(count)
}

/// When the device was detached.
pub(crate) struct Down {
    /// Before it was, and after.
    begins: u64,
    begun: u64,
    /// Before it was attached again, and after.
    ends: u64,
    ended: u64,
}

/// Detaches the device for so long. With `limited` mappings the device may refuse those that were made
/// meanwhile, and stays detached until it has room.
fn renew(
    rig: &mut Rig,
    time: Duration,
    limited: bool,
    downs: &mut Vec<Down>,
) -> Result<(), String> {
    let sequence = rig.history.sequence.clone();
    let mut begins = sequence.next();
    if rig.is_attached() {
        rig.detach()?;
    } else {
        // It may have been attached for a moment since the last one ended.
        begins = downs.last().map_or(begins, |down| down.ends);
    }
    let begun = sequence.next();
    linger(time);
    let ends = sequence.next();
    let attached = rig.attach();
    downs.push(Down { begins, begun, ends, ended: sequence.next() });
    if limited { Ok(()) } else { attached }
}

/// Whether addresses are taken that nothing is mapped at, but what is quarantined. The timer may
/// just have taken out of a queue what it is about to free.
fn taken_for_long(dma: &Dma) -> Option<String> {
    let start = Instant::now();
    loop {
        let (quarantined, addresses) = (dma.stats().quarantined, dma.allocator().stats());
        let taken = addresses.allocs - addresses.frees;
        if taken == quarantined && addresses.rejected_frees == 0 {
            return None;
        }
        if start.elapsed() > LONG {
            return Some(format!(
                "{taken} ranges are taken, {quarantined} quarantined: {addresses:?}"
            ));
        }
        thread::yield_now();
    }
}

/// Without its devices a pool holds no slot, and once it is gone, nothing.
fn slots_left(rig: &mut Rig, quarantined: u64, exact: bool) -> Result<(), String> {
    let Some(pools) = rig.pools.take() else { return Ok(()) };
    let start = Instant::now();
    while pools.stats().slots != 0 {
        // The timer, which may be running for the device, may drop it last.
        if start.elapsed() > LONG {
            return Err(format!("slots are lost: {:?}", pools.stats()));
        }
        thread::yield_now();
    }
    pools.trim();
    drop(pools);
    let start = Instant::now();
    loop {
        let (addresses, left) = (rig.allocator.stats(), rig.history.slots());
        let taken = addresses.allocs - addresses.frees;
        if taken == quarantined && left.is_empty() || !exact && taken >= quarantined {
            return Ok(());
        }
        // A thread of the pools may drop them last, or be unmapping a slot that it has taken out of them.
        if start.elapsed() > LONG {
            return Err(format!("{taken} ranges are taken, {quarantined} quarantined; {left:x?}"));
        }
        thread::yield_now();
    }
}

prop_compose! {
    pub(crate) fn setup()(
        setup in program::setup(),
        kind in program::kind(4),
        ms in 1..5u64,
        renews in prop_oneof![
            2 => Just(None),
            1 => (1..2000u64, 0..200u64).prop_map(Some),
            1 => (1..20u64, 0..20u64).prop_map(Some)
        ],
    ) -> Setup {
        let config = DmaConfig {
            timer: TimerKind::Thread,
            flush: setup.config.flush.map(|tuning| FlushTuning { interval_ms: ms, ..tuning }),
            // It keeps addresses, which the final count of addresses does not expect.
            detect: None,
            // The words that name their address stay where they are.
            bounce: BounceConfig { written: Written::Unknown, ..setup.config.bounce },
            // Whole pages, as the probes assume.
            max_segment: setup.config.max_segment & !(PAGE - 1),
            ..setup.config
        };
        Setup { config, kind, renews, ..setup }
    }
}

#[test]
fn a_page_that_a_lazy_unmap_left_reachable_is_written_after_a_strict_one_of_its_next_owner() {
    // The same page: mapped and unmapped lazily, and by another address as coherent memory.
    let page = [
        Step::MapList { counts: vec![1], direction: Direction::Bidirectional },
        Step::Unmap { which: 0 },
        Step::Coherent { count: 1 },
        Step::Unmap { which: 0 },
    ];
    let flush = FlushTuning { slots: 64, interval_ms: 1000, ..FlushTuning::of(Policy::LazySq) };
    let plain = program::plain(Policy::LazySq);
    let config = DmaConfig { flush: Some(flush), timer: TimerKind::Thread, ..plain.config };
    let setup = Setup { config, kind: rig::Kind::Table, bounces: None, ..plain };
    let steps: Vec<_> = page.iter().cycle().take(400).cloned().collect();
    let programs = [steps, vec![]];
    let reused = (0..100).any(|_| run_awaiting(&setup, &programs).unwrap().reused > 0);
    assert!(reused, "no probe has written by the earlier address");
}

#[test]
fn what_is_unmapped_while_the_device_is_put_elsewhere_is_reached_no_more() {
    // Few addresses: what a probe has found is what is unmapped.
    let page = [
        Step::Map { counts: vec![1], direction: Direction::Bidirectional },
        Step::Linger { us: 20 },
        Step::Unmap { which: 0 },
    ];
    let plain = program::plain(Policy::Strict);
    let config = DmaConfig { timer: TimerKind::Thread, ..plain.config };
    let renews = Some((0, 0));
    let setup = Setup { config, kind: rig::Kind::Table, bounces: None, renews, ..plain };
    let steps: Vec<_> = page.iter().cycle().take(600).cloned().collect();
    for _ in 0..cases(5) {
        run(&setup, 0, &[steps.clone(), vec![]]).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        // A failure depends on the moment: it may not come again.
        max_shrink_iters: 100,
        ..ProptestConfig::with_cases(cases(40))
    })]

    #[test]
    fn no_access_outlives_what_allowed_it(
        setup in setup(),
        failures in prop_oneof![2 => Just(0u32), 1 => Just(20_000)],
        programs in [vec(step(), 1..400), vec(step(), 1..400)],
    ) {
        // rules L17, L19, L20, L22, L23, L24, L27, L34, D15, V14
        run(&setup, failures, &programs).map_err(TestCaseError::fail)?;
    }
}
