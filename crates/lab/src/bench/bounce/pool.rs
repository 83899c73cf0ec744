//! Our pools against a linear one, in one process: what it costs to take a slot, copy, copy back
//! and give it back.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};

use super::{
    PEER, Part,
    check::check,
    linear::LONGEST,
    subject::{Op, Ours, Subject, SwiotlbLike},
};
use crate::{
    bench::{
        Benchmark, Row,
        clock::{cpu_time, fitting},
        rounds::Rounds,
        row::{object, value},
        threads,
    },
    progress::{Kind, Progress},
    random::SplitMix,
    text::bytes,
};

/// Bytes of the linear pool: swiotlb's default.
pub(super) const BLOCK: u64 = 64 << 20;
/// Steps of a check.
const STEPS: u32 = 300;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Lengths of buffers, bytes.
    pub sizes: Vec<usize>,
    /// How much of the linear pool is held meanwhile, %.
    pub held: Vec<u32>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// How long one measurement runs.
    pub budget: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            sizes: [1 << 9, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20].to_vec(),
            held: vec![0, 50, 90],
            threads: vec![1, 2],
            budget: Duration::from_millis(3),
        }
    }
}

/// Runs all of it.
///
/// # Errors
/// Pools cannot be set up.
pub(super) fn run(
    options: &Options,
    repeat: u32,
    progress: Kind,
    stop: &AtomicBool,
    into: &mut Benchmark,
) -> Result<()> {
    let cells: Vec<(usize, u32)> = options
        .sizes
        .iter()
        .flat_map(|size| options.held.iter().map(|held| (*size, *held)))
        .collect();
    let each = options.budget.mul_f64(1.2) * (2 * Op::ALL.len() * options.threads.len()) as u32;
    let steps = cells.len() as u64 * u64::from(repeat);
    let progress = Progress::new(progress, steps, each.mul_f64(steps as f64));
    for (size, held) in cells {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let contest = Contest::new(size, held, options)?;
        contest.run(repeat, (&progress, each), stop, into);
    }
    progress.finish();
    Ok(())
}

/// The entrants at one size and one number of held slots.
struct Contest<'a> {
    size: usize,
    held: u32,
    options: &'a Options,
    cpus: Vec<usize>,
    entrants: Vec<(&'static str, Box<dyn Entrant>)>,
}

impl<'a> Contest<'a> {
    fn new(size: usize, held: u32, options: &'a Options) -> Result<Contest<'a>> {
        let cpus = threads::cpus();
        let theirs = SwiotlbLike::new(BLOCK, cpus.len()).context("memory for a linear pool")?;
        let full = match theirs.holds(size) {
            0 => (BLOCK / size as u64) as usize,
            full => full,
        };
        let too_long = size as u64 > LONGEST;
        let why = format!("it has at most {} in one piece", bytes(LONGEST));
        let theirs = Filled::new(theirs, size, (full, held), too_long.then_some(why));
        let ours = Filled::new(Ours::new()?, size, (full, held), None);
        let entrants: Vec<(&str, Box<dyn Entrant>)> =
            vec![(super::OURS, Box::new(ours)), (PEER, Box::new(theirs))];
        Ok(Contest { size, held, options, cpus, entrants })
    }

    fn run(
        mut self,
        repeat: u32,
        (progress, each): (&Progress, Duration),
        stop: &AtomicBool,
        into: &mut Benchmark,
    ) {
        let keys: Vec<(Op, usize)> = Op::ALL
            .into_iter()
            .flat_map(|op| self.options.threads.iter().map(move |threads| (op, *threads)))
            .collect();
        let mut measured = vec![vec![Rounds::default(); keys.len()]; self.entrants.len()];
        self.check(into);
        'rounds: for round in 1..=repeat {
            let what = format!("{}, {} % held", bytes(self.size as u64), self.held);
            progress.begin(&format!("pools: {what}, round {round} of {repeat}"));
            for (index, (op, threads)) in keys.iter().enumerate() {
                for ((_, entrant), rounds) in self.entrants.iter_mut().zip(&mut measured) {
                    if stop.load(Ordering::Relaxed) {
                        break 'rounds;
                    }
                    let cpus = &self.cpus;
                    if let Some(ns) = entrant.measure(*op, *threads, cpus, self.options.budget) {
                        rounds[index].push(ns);
                    }
                }
            }
            progress.step(each);
        }
        self.check(into);
        for (index, (op, threads)) in keys.iter().enumerate() {
            for ((name, entrant), rounds) in self.entrants.iter().zip(&measured) {
                let (own, ours) = (&rounds[index], &measured[0][index]);
                into.rows.push(self.row(name, (*op, *threads), own, ours, entrant.out()));
            }
        }
    }

    /// Checks that every entrant does what a pool must; one that does not is out.
    fn check(&mut self, into: &mut Benchmark) {
        for (name, entrant) in &mut self.entrants {
            if let Err(found) = entrant.check(&self.cpus) {
                let held = self.held;
                let about = format!("buffers of {}, {held} % held", bytes(self.size as u64));
                into.errors.push(format!("pools: {name} {found} ({about})"));
            }
        }
    }

    fn row(
        &self,
        name: &str,
        (op, threads): (Op, usize),
        own: &Rounds,
        ours: &Rounds,
        out: Option<&str>,
    ) -> Row {
        let Contest { size, held, .. } = self;
        let ratio = own.ratio_to(ours);
        let why = match (own.is_empty(), out) {
            (true, why) => Some(format!("not measured: {}", why.unwrap_or("interrupted"))),
            (false, why) => why.map(|why| format!("measured in part: {why}")),
        };
        Row {
            name: format!("pool/{}/{size}/{held}%/{threads}", op.name()),
            implementation: name.to_owned(),
            params: object([
                ("part", Part::Pool.name().into()),
                ("op", op.name().into()),
                ("size", (*size).into()),
                ("held_percent", (*held).into()),
                ("threads", threads.into()),
            ]),
            ns_per_op: own.interval(),
            ratio_to_ringfence: ratio.median,
            note: why,
            figures: object([("ratio_interval", value(ratio))]),
        }
    }
}

/// An implementation with the buffers that it holds.
trait Entrant {
    /// # Errors
    /// The rule that it breaks; it is not measured any more.
    fn check(&mut self, cpus: &[usize]) -> Result<(), String>;
    /// Nanoseconds an operation of a thread: of its CPU time if there is one, else of the wall's,
    /// as threads wait for each other. `None` if a pass failed.
    fn measure(&mut self, op: Op, threads: usize, cpus: &[usize], budget: Duration) -> Option<f64>;
    /// Why it is not measured.
    fn out(&self) -> Option<&str>;
}

struct Filled<S: Subject> {
    subject: S,
    size: usize,
    held: Vec<S::Held>,
    out: Option<String>,
}

impl<S: Subject> Filled<S> {
    /// With so many percent of `full` buffers held: all are taken, and random ones given back.
    fn new(subject: S, size: usize, (full, percent): (usize, u32), out: Option<String>) -> Self {
        let mut filled = Filled { subject, size, held: Vec::new(), out };
        if percent == 0 || filled.out.is_some() {
            return filled;
        }
        for _ in 0..full {
            match filled.subject.begin(vec![1; size], Op::Both) {
                Some(held) => filled.held.push(held),
                None => {
                    let fitted = filled.held.len();
                    filled.out = Some(format!("{fitted} of {full} buffers fitted"));
                    return filled;
                }
            }
        }
        let mut random = SplitMix(1);
        while filled.held.len() > full * percent as usize / 100 {
            let held = filled.held.swap_remove(random.index(filled.held.len()));
            if filled.subject.end(held, Op::Both, 0).is_none() {
                filled.out = Some("it lost a buffer that was held".to_owned());
                return filled;
            }
        }
        filled
    }
}

impl<S: Subject> Entrant for Filled<S> {
    fn check(&mut self, cpus: &[usize]) -> Result<(), String> {
        if self.out.is_some() {
            return Ok(());
        }
        let (subject, size) = (&self.subject, self.size);
        let before = subject.in_use();
        // A whole program of large buffers takes long.
        let steps = STEPS.min(((16 << 20) / size.max(1)) as u32).max(20);
        let found = threads::together(cpus, vec![1u64, 2], |index, seed| {
            check(&subject.for_thread(index), size, steps, seed)
        });
        let lost = match subject.in_use() {
            after if after != before => {
                Err(format!("holds {after} after {before}: slots are lost"))
            }
            _ => Ok(()),
        };
        let found = found.into_iter().find_map(Result::err).map_or(lost, Err);
        if let Err(found) = &found {
            self.out = Some(format!("it {found}"));
        }
        found
    }

    fn measure(&mut self, op: Op, threads: usize, cpus: &[usize], budget: Duration) -> Option<f64> {
        if self.out.is_some() {
            return None;
        }
        let (subject, size) = (&self.subject, self.size);
        let slices = threads::together(cpus, vec![(); threads], |index, ()| {
            slice(&subject.for_thread(index), op, size, budget)
        });
        let slices: Option<Vec<Slice>> = slices.into_iter().collect();
        let Some(slices) = slices else {
            self.out = Some("it had no room, or lost a buffer".to_owned());
            return None;
        };
        let ns = |slice: &Slice| if threads == 1 { slice.cpu } else { slice.wall };
        let per_ns: f64 =
            slices.iter().map(|one| one.passes as f64 / ns(one).as_nanos() as f64).sum();
        Some(threads as f64 / per_ns)
    }

    fn out(&self) -> Option<&str> {
        self.out.as_deref()
    }
}

/// What one thread did.
struct Slice {
    passes: u64,
    wall: Duration,
    cpu: Duration,
}

/// Passes for `budget`, and before that for a part of it untimed. `None` if one failed.
fn slice<S: Subject>(subject: &S, op: Op, size: usize, budget: Duration) -> Option<Slice> {
    let mut buffer = vec![1u8; size];
    passes(subject, op, &mut buffer, budget / 8)?;
    let begun = cpu_time();
    let (passes, wall) = passes(subject, op, &mut buffer, budget)?;
    Some(Slice { passes, wall, cpu: cpu_time().saturating_sub(begun) })
}

/// At least one pass.
fn passes<S: Subject>(
    subject: &S,
    op: Op,
    buffer: &mut Vec<u8>,
    budget: Duration,
) -> Option<(u64, Duration)> {
    let passes = |count| {
        // A loop for each: the choice is not part of an operation.
        if op == Op::Take {
            for _ in 0..count {
                subject.take(buffer.len()).then_some(()).ok_or(())?;
            }
        } else {
            for _ in 0..count {
                let len = buffer.len();
                let held = subject.begin(std::mem::take(buffer), op).ok_or(())?;
                *buffer = subject.end(held, op, len).ok_or(())?;
            }
        }
        Ok::<(), ()>(())
    };
    fitting(budget, passes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Options {
        let budget = Duration::from_micros(200);
        Options { sizes: vec![512, 1 << 20], held: vec![0, 90], threads: vec![1, 2], budget }
    }

    fn measured(stop: bool) -> Benchmark {
        let mut benchmark = Benchmark::new("bounce", 2);
        run(&tiny(), 2, Kind::Silent, &AtomicBool::new(stop), &mut benchmark).unwrap();
        benchmark
    }

    #[test]
    fn every_cell_is_measured_but_what_the_peer_cannot() {
        let benchmark = measured(false);
        assert_eq!(benchmark.errors, Vec::<String>::new());
        assert_eq!(benchmark.rows.len(), 2 * 2 * Op::ALL.len() * 2 * 2);
        for row in &benchmark.rows {
            let cannot = row.params["size"] == 1 << 20 && row.implementation == PEER;
            assert_eq!(row.ns_per_op.median.is_none(), cannot, "{row:?}");
            assert_eq!(row.ratio_to_ringfence.is_none(), cannot, "{row:?}");
            let note = row.note.as_deref().unwrap_or_default();
            assert_eq!(note.contains("256 KiB"), cannot, "{row:?}");
            if row.implementation == super::super::OURS {
                assert_eq!(row.ratio_to_ringfence, Some(1.0));
            }
        }
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        assert_eq!(measured(true).rows, Vec::new());
    }

    #[test]
    fn what_is_held_is_a_part_of_what_fits() {
        let theirs = SwiotlbLike::new(BLOCK, 2).unwrap();
        let full = theirs.holds(4096);
        assert_eq!(full as u64, BLOCK / 4096);
        let filled = Filled::new(theirs, 4096, (full, 90), None);
        assert_eq!(filled.out, None);
        assert_eq!(filled.subject.in_use(), (full * 90 / 100) as u64 * 4096);
        let theirs = SwiotlbLike::new(BLOCK, 2).unwrap();
        let over = Filled::new(theirs, 4096, (full + 1, 90), None);
        assert!(over.out.unwrap().contains("fitted"));
    }
}
