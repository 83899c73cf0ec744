//! Allocators of I/O virtual addresses: what an alloc and a free cost, which of them find holes,
//! and how much memory they take.
//!
//! | module | what it holds |
//! |---|---|
//! | [`pattern`] | what is varied: patterns, sizes, live sets |
//! | [`peers`] | the implementations |
//! | `fill` | live sets |
//! | `work` | the patterns, operation by operation |
//! | `oracle` | what is live according to the caller |
//! | `measure` | one implementation over one live set |
//! | [`table`] | all of it for a terminal |
//!
//! **An operation** is one alloc and one free. For each live set and size every implementation is
//! made and filled anew; then for each pattern it is *checked* (untimed, against an oracle), *timed*
//! in interleaved rounds (operations in a row; the median over rounds), *sampled* in the same rounds
//! (each operation timed by itself: p99 and worst), and checked once more, so that what threads did
//! to each other is seen too.
//!
//! With several threads the live set is dealt out among them: the allocator holds as much as with
//! one.

mod fill;
mod measure;
mod oracle;
pub mod pattern;
pub mod peers;
pub mod table;
mod work;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use ringfence_iova::Aperture;
use serde_json::{Map, Value};

use super::{
    Benchmark, Interval, Row,
    clock::Clock,
    rounds::Rounds,
    row::{object, value},
    threads,
};
use crate::{
    progress::{Kind, Progress},
    run::Usage,
};
use measure::{Entrant, Method, Samples};
use pattern::{Cell, Live, Pattern, Size};
use peers::{Implementation, MOST_THREADS};
use work::Checked;

/// Bytes of a granule: a page of most machines.
const GRANULE: u64 = 4096;
/// A full set's aperture, bits: 2^20 granules, the space that 32-bit devices share.
const FULL_BITS: u32 = 32;
/// Fewer timed operations than this in a row get a note.
const FEW: u64 = 100;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Implementations, in the order of the table.
    pub implementations: Vec<Implementation>,
    /// Live sets.
    pub lives: Vec<Live>,
    /// Sizes.
    pub sizes: Vec<Size>,
    /// Patterns.
    pub patterns: Vec<Pattern>,
    /// Also combinations that show little.
    pub all: bool,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Rounds.
    pub repeat: u32,
    /// How long one measurement runs.
    pub budget: Duration,
    /// How long filling one live set may take.
    pub fill_limit: Duration,
    /// The aperture, bits. Full sets have one of 32.
    pub aperture_bits: u32,
    /// How to show progress.
    pub progress: Kind,
}

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// [`Usage`]: the options leave nothing to measure, or make no sense together.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark, Usage> {
    let cells = Cell::plan(&options.lives, &options.sizes, &options.patterns, options.all);
    if cells.is_empty() {
        return Err(Usage(
            "nothing to measure: no combination of these live sets, sizes and patterns exists \
             (random needs a live set; give another --live or --pattern)"
                .to_owned(),
        ));
    }
    for bits in [options.aperture_bits, FULL_BITS] {
        aperture(bits).map_err(|error| Usage(format!("--aperture {bits}: {error}")))?;
    }
    if let Some(threads) = options.threads.iter().find(|n| !(1..=MOST_THREADS).contains(*n)) {
        return Err(Usage(format!("--threads {threads}: from 1 to {MOST_THREADS}")));
    }
    let method = Method {
        clock: Clock::calibrate(),
        cpus: threads::cpus(),
        budget: options.budget,
        fill_limit: options.fill_limit,
    };
    let mut benchmark = Benchmark::new("iova", options.repeat);
    benchmark.settings = object([
        ("aperture_bits", options.aperture_bits.into()),
        ("full_set_aperture_bits", FULL_BITS.into()),
        ("granule", GRANULE.into()),
        ("budget_ms", (options.budget.as_secs_f64() * 1e3).into()),
        ("clock", method.clock.name().into()),
        ("clock_ns", method.clock.cost_ns().into()),
        ("cpus", method.cpus.clone().into()),
    ]);
    if let Some(most) = options.threads.iter().max().filter(|most| **most > method.cpus.len()) {
        benchmark.warnings.push(format!(
            "{most} threads on {} processors: they take turns, and their scaling is meaningless",
            method.cpus.len()
        ));
    }
    let step = options.budget.mul_f64(1.0 + 1.0 / 8.0 + 1.0 / 2.0) * options.threads.len() as u32;
    let steps =
        cells.len() as u64 * options.implementations.len() as u64 * u64::from(options.repeat);
    let progress = Progress::new(options.progress, steps, step.mul_f64(steps as f64));
    benchmark.warnings.iter().for_each(|line| progress.note(line));

    let run = Run { options, method: &method, progress: &progress, step, stop };
    // Those of one live set and size stand together.
    for group in cells.chunk_by(|a, b| (a.live, a.size) == (b.live, b.size)) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        run.group(group, &mut benchmark);
    }
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    progress.finish();
    Ok(benchmark)
}

fn aperture(bits: u32) -> Result<Aperture, ringfence_iova::ApertureError> {
    let last = 1u64.checked_shl(bits).map_or(u64::MAX, |end| end - 1);
    Aperture::new(0, last, GRANULE)
}

struct Run<'a> {
    options: &'a Options,
    method: &'a Method,
    progress: &'a Progress,
    /// What one step of the progress should take.
    step: Duration,
    stop: &'a AtomicBool,
}

impl Run<'_> {
    /// All cells of one live set and size.
    fn group(&self, cells: &[Cell], benchmark: &mut Benchmark) {
        let Some(Cell { live, size, .. }) = cells.first().copied() else { return };
        let bits = if live.is_full() { FULL_BITS } else { self.options.aperture_bits };
        // Checked before.
        let Ok(aperture) = aperture(bits) else { return };
        let mut entrants = Vec::new();
        for implementation in &self.options.implementations {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            self.progress.begin(&format!("{implementation}: filling {live} of {size}"));
            entrants.push(Entrant::new(*implementation, aperture, (live, size), self.method));
        }
        for cell in cells {
            let contest = self.contest(cell, &mut entrants);
            contest.rows(cell, bits, &self.options.threads, &entrants, benchmark);
            for entrant in &mut entrants {
                let about = format!("live {live}, size {size}");
                let found = entrant.violations.drain(..);
                benchmark.errors.extend(found.map(|text| format!("{text} ({about})")));
            }
        }
    }

    /// One cell: checked, measured in interleaved rounds, checked again.
    fn contest(&self, cell: &Cell, entrants: &mut [Entrant]) -> Contest {
        let pattern = cell.pattern;
        let mut contest = Contest::default();
        for (index, entrant) in entrants.iter_mut().enumerate() {
            self.begin(cell, entrant, "checking");
            entrant.prepare(pattern);
            contest.checked.entry(index).or_default().add(entrant.check(pattern, 0, self.method));
        }
        for round in 1..=self.options.repeat {
            for (index, entrant) in entrants.iter_mut().enumerate() {
                if self.stop.load(Ordering::Relaxed) {
                    return contest;
                }
                self.begin(cell, entrant, &format!("round {round} of {}", self.options.repeat));
                for threads in &self.options.threads {
                    if pattern == Pattern::Random && entrant.churned() < *threads {
                        continue;
                    }
                    let samples = contest.samples.entry((index, *threads)).or_default();
                    entrant.measure(pattern, *threads, round.into(), self.method, samples);
                }
                self.progress.step(self.step);
            }
        }
        for (index, entrant) in entrants.iter_mut().enumerate() {
            let part = u64::from(self.options.repeat) + 1;
            contest.checked.entry(index).or_default().add(entrant.check(
                pattern,
                part,
                self.method,
            ));
        }
        contest
    }

    fn begin(&self, cell: &Cell, entrant: &Entrant, what: &str) {
        let Cell { live, size, pattern } = cell;
        let name = entrant.implementation;
        self.progress.begin(&format!("{pattern}, live {live}, size {size}: {name}, {what}"));
    }
}

/// One of the times of some samples.
type TimeOf = fn(&Samples) -> &Rounds;

/// What came out of one cell, by the index of the implementation.
#[derive(Default)]
struct Contest {
    checked: BTreeMap<usize, Checked>,
    samples: BTreeMap<(usize, usize), Samples>,
}

impl Contest {
    fn rows(
        self,
        cell: &Cell,
        bits: u32,
        numbers: &[usize],
        entrants: &[Entrant],
        into: &mut Benchmark,
    ) {
        let find = |wanted| entrants.iter().position(|one| one.implementation == wanted);
        let (ours, control) = (find(Implementation::OURS), find(Implementation::Control));
        let nothing = Samples::default();
        let samples = |index: Option<usize>, threads| {
            index.and_then(|index| self.samples.get(&(index, threads))).unwrap_or(&nothing)
        };
        // How much more several threads get done than one, a round each.
        let scaling = |index: Option<usize>, threads: usize, time: TimeOf| {
            let (one, several) = (time(samples(index, 1)), time(samples(index, threads)));
            one.with(several, |one, several| threads as f64 * one / several)
        };
        for threads in numbers.iter().copied() {
            for (index, entrant) in entrants.iter().enumerate() {
                let own = samples(Some(index), threads);
                let checked = self.checked.get(&index).copied().unwrap_or_default();
                let ratio = own.ns.ratio_to(&samples(ours, threads).ns);
                let mut row = Row {
                    name: format!("{}/{}/{}/{threads}", cell.pattern, cell.live, cell.size),
                    implementation: entrant.implementation.to_string(),
                    params: params(cell, threads, bits),
                    ns_per_op: own.ns.interval(),
                    ratio_to_ringfence: ratio.median,
                    note: note(entrant, own, threads),
                    figures: figures(entrant, own, checked, ratio),
                };
                if threads > 1 {
                    // On a machine that does other work, waiting for a CPU hides waiting for the
                    // other thread. CPU time shows the latter, except sleep at a lock.
                    let times: [(_, TimeOf); 2] = [
                        ("scaling", |samples| &samples.wall),
                        ("cpu_scaling", |samples| &samples.cpu),
                    ];
                    for (key, time) in times {
                        let of_it = scaling(Some(index), threads, time);
                        let ratio = of_it.ratio_to(&scaling(control, threads, time));
                        row.figures.insert(key.to_owned(), value(of_it.interval()));
                        row.figures.insert(format!("{key}_to_control"), value(ratio));
                    }
                }
                into.rows.push(row);
            }
        }
    }
}

fn params(cell: &Cell, threads: usize, bits: u32) -> Map<String, Value> {
    object([
        ("pattern", cell.pattern.name().into()),
        ("live", cell.live.value()),
        ("size", cell.size.value()),
        ("threads", threads.into()),
        ("aperture_bits", bits.into()),
    ])
}

fn note(entrant: &Entrant, samples: &Samples, threads: usize) -> Option<String> {
    let mut notes = Vec::new();
    if samples.ns.is_empty() {
        let why = entrant.out.clone().unwrap_or_else(|| match entrant.churned() < threads {
            true => "fewer live ranges than threads".to_owned(),
            false => "interrupted".to_owned(),
        });
        notes.push(format!("not measured: {why}"));
    } else {
        notes.extend(entrant.out.as_ref().map(|why| format!("measured in part: {why}")));
        if samples.operations < FEW {
            notes.push(format!("fewer than {FEW} operations fitted the budget"));
        }
    }
    notes.extend(entrant.note().map(str::to_owned));
    (!notes.is_empty()).then(|| notes.join("; "))
}

fn figures(
    entrant: &Entrant,
    samples: &Samples,
    checked: Checked,
    ratio: Interval,
) -> Map<String, Value> {
    let single = |q: f64| samples.latencies.as_ref().map(|all| all.quantile(q));
    let was_checked = checked.operations > 0;
    object([
        ("ratio_interval", value(ratio)),
        ("wall_ns_per_op", value(samples.wall.interval())),
        ("cpu_ns_per_op", value(samples.cpu.interval())),
        ("p99_ns", single(0.99).into()),
        ("worst_ns", single(1.0).into()),
        ("sampled_operations", samples.latencies.as_ref().map_or(0, |all| all.count()).into()),
        ("operations", samples.operations.into()),
        ("timed_failures", samples.failures.into()),
        ("checked_operations", checked.operations.into()),
        ("failures", was_checked.then_some(checked.failures).into()),
        ("failures_with_hole", was_checked.then_some(checked.with_hole).into()),
        ("bytes_per_live", entrant.bytes_per_live.into()),
        ("empty_bytes", entrant.empty_bytes.into()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn tiny() -> Options {
        Options {
            implementations: Implementation::ALL.to_vec(),
            lives: vec![Live::Count(0), Live::Count(100)],
            sizes: vec![Size { min: 1, max: 1 }],
            patterns: vec![Pattern::Hot, Pattern::Random],
            all: false,
            threads: vec![1, 2],
            repeat: 2,
            budget: Duration::from_micros(200),
            fill_limit: Duration::from_secs(100),
            aperture_bits: 39,
            progress: Kind::Silent,
        }
    }

    #[test]
    fn every_implementation_has_a_row_for_every_cell_and_number_of_threads() {
        let benchmark = run(&tiny(), &AtomicBool::new(false)).unwrap();
        assert_eq!(benchmark.errors, Vec::<String>::new());
        assert_eq!(benchmark.rows.len(), 3 * 2 * Implementation::ALL.len());
        for row in &benchmark.rows {
            assert!(row.ns_per_op.median.unwrap() > 0.0, "{row:?}");
            assert!(row.ratio_to_ringfence.unwrap() > 0.0, "{row:?}");
            assert!(row.figures["p99_ns"].as_u64() <= row.figures["worst_ns"].as_u64());
            assert_eq!(row.params["aperture_bits"], 39);
            assert_eq!(row.figures.contains_key("scaling"), row.params["threads"] == 2);
            if row.implementation == "ringfence" {
                assert_eq!(row.ratio_to_ringfence, Some(1.0));
            }
        }
    }

    #[test]
    fn what_cannot_be_measured_has_a_row_that_says_why() {
        let large = Options {
            implementations: vec!["btreemap".parse().unwrap()],
            lives: vec![Live::Count(100_000), Live::Count(1)],
            sizes: vec![Size { min: 33, max: 512 }],
            patterns: vec![Pattern::Random],
            aperture_bits: 32,
            ..tiny()
        };
        let benchmark = run(&large, &AtomicBool::new(false)).unwrap();
        let notes: Vec<_> = benchmark.rows.iter().map(|row| row.note.clone()).collect();
        assert!(notes[0].as_ref().unwrap().starts_with("not measured: "), "{notes:?}");
        // On a busy machine how it was filled, too.
        assert!(notes[0].as_ref().unwrap().contains("of 100000 ranges fitted"), "{notes:?}");
        assert_eq!(benchmark.rows[0].ns_per_op, Interval::default());
        assert_eq!(benchmark.rows[0].ratio_to_ringfence, None);
    }

    #[test]
    fn nothing_to_measure_is_wrong_usage() {
        let nothing =
            Options { lives: vec![Live::Count(0)], patterns: vec![Pattern::Random], ..tiny() };
        assert!(run(&nothing, &AtomicBool::new(false)).unwrap_err().0.contains("live set"));
        let many = Options { threads: vec![1, 65], ..tiny() };
        assert!(run(&many, &AtomicBool::new(false)).unwrap_err().0.contains("65"));
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        let benchmark = run(&tiny(), &AtomicBool::new(true)).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
    }
}
