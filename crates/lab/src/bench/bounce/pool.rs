//! Our pools against a linear one, in one process: what it costs to take a slot, copy, copy back
//! and give it back.

use std::time::Duration;

use anyhow::{Context, Result};

use super::{
    OURS, Options, PEER, Part,
    check::check,
    linear::LONGEST,
    subject::{Op, Ours, Subject, SwiotlbLike},
};
use crate::{
    bench::{
        Benchmark,
        clock::{cpu_time, fitting},
        rounds::{Rounds, Stop, stopped, turns},
        row::object,
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

/// Lengths of buffers, bytes, if not said otherwise.
const SIZES: [usize; 6] = [1 << 9, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20];
/// How much of the linear pool is held meanwhile, %.
const HELD: [u32; 3] = [0, 50, 90];
/// Numbers of threads.
const THREADS: [usize; 2] = [1, 2];
/// How long one measurement runs, if not said otherwise.
pub(super) const BUDGET: Duration = Duration::from_millis(3);

/// Runs all of it.
///
/// # Errors
/// Pools cannot be set up.
pub(super) fn run(options: &Options, show: Kind, stop: &Stop, into: &mut Benchmark) -> Result<()> {
    let (repeat, budget) = (options.repeat, options.budget.unwrap_or(BUDGET));
    let sizes = options.sizes.as_ref();
    let sizes =
        sizes.map_or(SIZES.to_vec(), |sizes| sizes.iter().map(|size| size.0 as usize).collect());
    let cells = sizes.iter().flat_map(|size| HELD.map(|held| (*size, held)));
    let each = budget.mul_f64(1.2) * (2 * Op::ALL.len() * THREADS.len()) as u32;
    let steps = (sizes.len() * HELD.len()) as u64 * u64::from(repeat);
    let progress = Progress::new(show, steps, each.mul_f64(steps as f64));
    for cell in cells.take_while(|_| !stopped(stop)) {
        contest(cell, (repeat, budget), (&progress, each), stop, into)?;
    }
    Ok(())
}

/// A pool by name, or why it is not measured.
type Entrant = (&'static str, Result<Box<dyn Pool>, String>);

/// Both pools at one size and one number of held slots.
fn contest(
    (size, held): (usize, u32),
    (repeat, budget): (u32, Duration),
    (progress, each): (&Progress, Duration),
    stop: &Stop,
    into: &mut Benchmark,
) -> Result<()> {
    let cpus = threads::cpus();
    let theirs = SwiotlbLike::new(BLOCK, cpus.len()).context("memory for a linear pool")?;
    let full = match theirs.holds(size) {
        0 => (BLOCK / size as u64) as usize,
        full => full,
    };
    let ours = fill(Ours::new()?, size, full, held).map(|pool| Box::new(pool) as Box<dyn Pool>);
    let theirs = match size as u64 > LONGEST {
        true => Err(format!("it has at most {} in one piece", bytes(LONGEST))),
        false => fill(theirs, size, full, held).map(|pool| Box::new(pool) as Box<dyn Pool>),
    };
    let mut pools = [(OURS, ours), (PEER, theirs)];
    let keys = Op::ALL.into_iter().flat_map(|op| THREADS.map(|threads| (op, threads)));
    let keys: Vec<(Op, usize)> = keys.collect();
    let mut measured = vec![[Rounds::default(), Rounds::default()]; keys.len()];
    let what = format!("{}, {held} % held", bytes(size as u64));
    // Whether each does what a pool must; one that does not is out.
    let mut check = |pools: &mut [Entrant]| {
        for (name, pool) in pools {
            if let Ok(Err(found)) = pool.as_ref().map(|pool| pool.check(&cpus)) {
                into.errors.push(format!("pools: {name} {found} (buffers of {what})"));
                *pool = Err(format!("it {found}"));
            }
        }
    };
    check(&mut pools);
    for round in 1..=repeat {
        progress.begin(&format!("pools: {what}, round {round} of {repeat}"));
        for ((op, threads), rounds) in keys.iter().zip(&mut measured) {
            for ((_, pool), rounds) in turns(pools.iter_mut().zip(rounds), round, stop) {
                match pool.as_ref().map(|pool| pool.measure(*op, *threads, &cpus, budget)) {
                    Ok(Some(ns)) => rounds.0.push(ns),
                    Ok(None) => *pool = Err("it had no room, or lost a buffer".to_owned()),
                    Err(_) => {}
                }
            }
        }
        progress.step(each);
    }
    check(&mut pools);
    for ((op, threads), rounds) in keys.iter().zip(&measured) {
        for ((name, pool), own) in pools.iter().zip(rounds) {
            let op = op.name();
            let params = object([
                ("part", Part::Pool.name().into()),
                ("op", op.into()),
                ("size", size.into()),
                ("held_percent", held.into()),
                ("threads", (*threads).into()),
            ]);
            let row = format!("pool/{op}/{size}/{held}%/{threads}");
            into.rows.push(own.row((row, name), params, &rounds[0], pool.as_ref().err()));
        }
    }
    Ok(())
}

/// An implementation with the buffers that it holds.
trait Pool {
    /// # Errors
    /// The rule that it breaks.
    fn check(&self, cpus: &[usize]) -> Result<(), String>;
    /// Nanoseconds an operation of a thread: of its CPU time if there is one, else of the wall's,
    /// as threads wait for each other. `None` if a pass failed.
    fn measure(&self, op: Op, threads: usize, cpus: &[usize], budget: Duration) -> Option<f64>;
}

struct Filled<S: Subject> {
    subject: S,
    size: usize,
    _held: Vec<S::Held>,
}

/// A pool with so many percent of `full` buffers held: all are taken, and random ones given back.
fn fill<S: Subject>(
    subject: S,
    size: usize,
    full: usize,
    percent: u32,
) -> Result<Filled<S>, String> {
    let mut held = Vec::new();
    let full = if percent == 0 { 0 } else { full };
    for fitted in 0..full {
        let begun = subject.begin(0, vec![1; size], Op::Both);
        held.push(begun.ok_or_else(|| format!("{fitted} of {full} buffers fitted"))?);
    }
    let mut random = SplitMix(1);
    while held.len() > full * percent as usize / 100 {
        let ended = subject.end(held.swap_remove(random.index(held.len())), Op::Both, 0);
        ended.ok_or("it lost a buffer that was held")?;
    }
    Ok(Filled { subject, size, _held: held })
}

impl<S: Subject> Pool for Filled<S> {
    fn check(&self, cpus: &[usize]) -> Result<(), String> {
        let (subject, size) = (&self.subject, self.size);
        let before = subject.in_use();
        // A whole program of large buffers takes long.
        let steps = STEPS.min(((16 << 20) / size.max(1)) as u32).max(20);
        let found =
            threads::together(cpus, vec![(); 2], |thread, ()| check(subject, thread, size, steps));
        found.into_iter().find_map(Result::err).map_or(Ok(()), Err)?;
        match subject.in_use() {
            after if after != before => {
                Err(format!("holds {after} after {before}: slots are lost"))
            }
            _ => Ok(()),
        }
    }

    fn measure(&self, op: Op, threads: usize, cpus: &[usize], budget: Duration) -> Option<f64> {
        let (subject, size) = (&self.subject, self.size);
        let slices = threads::together(cpus, vec![(); threads], |thread, ()| {
            slice((subject, thread), op, size, budget, threads == 1)
        });
        let per_ns: Option<f64> = slices.into_iter().sum();
        Some(threads as f64 / per_ns?)
    }
}

/// Passes of a thread for `budget`, and before that for a part of it untimed; how many there were for
/// each nanosecond, of the CPU's time if it is `alone`, else of the wall's. `None` if one failed.
fn slice(
    (subject, thread): (&impl Subject, usize),
    op: Op,
    size: usize,
    budget: Duration,
    alone: bool,
) -> Option<f64> {
    let mut buffer = vec![1u8; size];
    let mut pass = |count| {
        // A loop for each: the choice is not part of an operation.
        if op == Op::Take {
            for _ in 0..count {
                subject.take(thread, size).then_some(()).ok_or(())?;
            }
        } else {
            for _ in 0..count {
                let held = subject.begin(thread, std::mem::take(&mut buffer), op).ok_or(())?;
                buffer = subject.end(held, op, size).ok_or(())?;
            }
        }
        Ok::<(), ()>(())
    };
    fitting(budget / 8, &mut pass).ok()?;
    let begun = cpu_time();
    let (passes, wall) = fitting(budget, &mut pass).ok()?;
    let took = if alone { cpu_time().saturating_sub(begun) } else { wall };
    Some(passes as f64 / took.as_nanos() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options;

    fn measured(stop: bool) -> Benchmark {
        let tiny: Options = options("--sizes 512,1m --budget 0.2 --repeat 2");
        let mut benchmark = Benchmark::new("bounce", 2);
        run(&tiny, Kind::Silent, &Stop::new(stop.into()), &mut benchmark).unwrap();
        benchmark
    }

    #[test]
    fn every_cell_is_measured_but_what_the_peer_cannot() {
        let benchmark = measured(false);
        assert_eq!(benchmark.errors, Vec::<String>::new());
        assert_eq!(benchmark.rows.len(), 2 * 3 * Op::ALL.len() * 2 * 2);
        for row in &benchmark.rows {
            let cannot = row.params["size"] == 1 << 20 && row.implementation == PEER;
            assert_eq!(row.ns_per_op.median.is_none(), cannot, "{row:?}");
            assert_eq!(row.ratio_to_ringfence.is_none(), cannot, "{row:?}");
            let note = row.note.as_deref().unwrap_or_default();
            assert_eq!(note.contains("256 KiB"), cannot, "{row:?}");
            if row.implementation == OURS {
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
        let filled = fill(theirs, 4096, full, 90).unwrap();
        assert_eq!(filled.subject.in_use(), (full * 90 / 100) as u64 * 4096);
        let theirs = SwiotlbLike::new(BLOCK, 2).unwrap();
        let over = fill(theirs, 4096, full + 1, 90);
        assert!(over.err().unwrap().contains("fitted"));
    }
}
