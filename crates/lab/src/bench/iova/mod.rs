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
mod work;

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use ringfence_iova::Aperture;

use super::{
    Benchmark, Measure, Row,
    clock::Clock,
    report::{Against, Figure, Part, Sheet, render},
    rounds::{NOTHING, Stop, stopped},
    row::{object, value},
    threads,
};
use crate::{
    list::{List, PLAIN, counted, milliseconds},
    placement,
    progress::{Kind, Progress},
    run::Usage,
};
use measure::{Entrant, Method};
use pattern::{Cell, Live, Pattern, Size};
use peers::Implementation;

/// Bytes of a granule: a page of most machines.
const GRANULE: u64 = 4096;
/// A full set's aperture, bits: 2^20 granules, the space that 32-bit devices share.
const FULL_BITS: u32 = 32;
/// Fewer timed operations than this in a row get a note.
const FEW: u64 = 100;

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "allocators of I/O virtual addresses",
    parts: &[Part {
        title: "alloc and free",
        operation: "one alloc and one free, of a thread's CPU time (with several, of the wall's)",
        against: &[Against::PEERS, UNCHECKED],
        others: &["unchecked", "control"],
        counts: &[
            Figure::new("failures", "requests that failed, of those that were checked", 1.0),
            Figure::new("failures_with_hole", "although a hole was free", 1.0),
            Figure::new("timed_failures", "of those that were timed", 1.0),
        ],
        figures: &[
            Figure::new("p99_ns", "p99", 1.0),
            Figure::new("worst_ns", "worst", 1.0),
            Figure::new("scaling", "scaling", 1.0).with_half(),
            Figure::new("bytes_per_live", "B/live", 1.0),
            Figure::new("failures", "failed", 1.0),
            Figure::new("failures_with_hole", "with hole", 1.0),
        ],
        ..Part::ALL
    }],
    legend: LEGEND,
};

/// What the checks cost.
const UNCHECKED: Against =
    Against { what: "ringfence against itself", only: "unchecked", ..Against::PEERS };

const LEGEND: &str = "  rows      pattern/live/size in granules/threads; live: ranges that are allocated meanwhile; 48%: a 32-bit space
            filled with blocks of 16 granules and random ones freed (48%x1: of 1 granule)
  unchecked ours without its checks: each free is believed, and the sizes of ranges are not recorded
  p99       of single operations, timed one by one; worst: whatever interrupted it included
  scaling   what several threads get done against what one does; that of `control` (two atomics on a line of the
            thread's own instead of an allocator) is what this machine can do
  B/live    memory, bytes for each live range: the heap before and after
  failed    of the requests that were checked; with hole: although a hole for it was free
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench iova
    ringfence bench iova --pattern random --live 1k,100k --sizes 1 --details
    ringfence bench iova --allocator ringfence,bitmap --live 48%x1 --pattern aligned16
    ringfence bench iova --placement=only --iotlb-sets 64 --iotlb-ways 8
    ringfence bench iova --repeat 15 --budget 50 --json iova.json

EXIT STATUS:
    0   done
    1   an allocator handed out what was taken, refused what it had handed out, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// The allocators to measure, separated by commas.
    #[arg(long = "allocator", value_name = "LIST", default_value_t = List::from(&Implementation::ALL[..]))]
    pub implementations: List<Implementation>,

    /// Live sets: numbers of ranges (0, 1k, 100k), or a 32-bit space filled in blocks of 16
    /// granules of which random ones are freed (48%), or in blocks of another size (48%x1)
    /// [default: 0,1k,10k,100k,48%,90%,48%x1].
    #[arg(long = "live", value_name = "LIST")]
    pub lives: Option<List<Live>>,

    /// Sizes in granules: one (16), or a mix (1-32) [default: 1,1-32,33-512,16].
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<List<Size>>,

    /// Patterns: `hot` (a range is allocated and freed, again and again), `aligned16` (the same, of
    /// 16 granules aligned to 16), `batch` (256 are allocated, then freed), `random` (a random live
    /// range is freed, another allocated) [default: all]. With --live, --sizes or --pattern, every
    /// combination is run; without them, those that differ.
    #[arg(long = "pattern", value_name = "LIST")]
    pub patterns: Option<List<Pattern>>,

    /// Numbers of threads, each bound to a CPU.
    #[arg(long, value_name = "LIST", default_value = "1,2")]
    pub threads: List<Threads>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 7,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// How long one measurement runs, milliseconds.
    #[arg(long, value_name = "MS", default_value = "8", value_parser = milliseconds)]
    pub budget: Duration,

    /// How long filling a live set may take, seconds; an allocator that takes longer is not
    /// measured with it.
    #[arg(long, value_name = "S", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub fill_limit: u64,

    /// The aperture, bits: 32, 39, 48, 57. Full sets (48%) have one of 32.
    #[arg(long = "aperture", value_name = "BITS", default_value_t = 48,
        value_parser = clap::value_parser!(u32).range(24..=57))]
    pub aperture_bits: u32,

    /// Measures as well (or, `only`, instead) what each placement costs the hardware: IOTLB
    /// entries, table pages and misses of competing streams, by a model of the caches; and huge
    /// ranges and a segment for each user, by the clock.
    #[arg(long, value_name = "only", num_args = 0..=1, require_equals = true,
        default_missing_value = "too", value_parser = ["too", "only"], hide_possible_values = true)]
    pub placement: Option<String>,

    /// Sets of the model's IOTLB, a power of two.
    #[arg(long, value_name = "N", requires = "placement")]
    pub iotlb_sets: Option<usize>,

    /// Ways of the model's IOTLB.
    #[arg(long, value_name = "N", requires = "placement")]
    pub iotlb_ways: Option<usize>,
}

counted! {
    /// A number of threads.
    Threads(usize), "number of threads", PLAIN, 1..=64
}

impl Options {
    fn placements(&self, kind: Kind, stop: &Stop) -> Result<Vec<Row>> {
        let defaults = placement::Options::default();
        let options = placement::Options {
            aperture_bits: self.aperture_bits,
            sets: self.iotlb_sets.unwrap_or(defaults.sets),
            ways: self.iotlb_ways.unwrap_or(defaults.ways),
            ..defaults
        };
        let (steps, expected) = placement::plan(&options);
        let progress = Progress::new(kind, steps, expected);
        placement::measure(&options, &progress, stop)
    }
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        // First, since it is short and may reject its options.
        let placement = self.placement.as_ref().map(|_| self.placements(progress, stop));
        let placement = placement.transpose()?;
        if self.placement.as_deref() == Some("only") {
            let interrupted = stopped(stop);
            let nothing = Benchmark::new("iova", self.repeat);
            return Ok(Benchmark { placement, interrupted, ..nothing });
        }
        let cells = Cell::plan(
            self.lives.as_deref().unwrap_or(&Live::DEFAULTS),
            self.sizes.as_deref().unwrap_or(&Size::DEFAULTS),
            self.patterns.as_deref().unwrap_or(&Pattern::ALL),
            self.lives.is_some() || self.sizes.is_some() || self.patterns.is_some(),
        );
        if cells.is_empty() {
            return Err(Usage(
                "nothing to measure: no combination of these live sets, sizes and patterns exists \
             (random needs a live set; give another --live or --pattern)"
                    .to_owned(),
            )
            .into());
        }
        let method = Method {
            clock: Clock::calibrate(),
            cpus: threads::cpus(),
            budget: self.budget,
            fill_limit: Duration::from_secs(self.fill_limit),
        };
        let mut benchmark = Benchmark::new("iova", self.repeat);
        benchmark.settings = object([
            ("aperture_bits", self.aperture_bits.into()),
            ("full_set_aperture_bits", FULL_BITS.into()),
            ("granule", GRANULE.into()),
            ("budget_ms", (self.budget.as_secs_f64() * 1e3).into()),
            ("clock", method.clock.name().into()),
            ("clock_ns", method.clock.cost_ns.into()),
            ("cpus", method.cpus.clone().into()),
        ]);
        let (most, cpus) = (self.threads.iter().map(|one| one.0).max(), method.cpus.len());
        benchmark.warnings.extend(most.filter(|most| *most > cpus).map(|most| {
            format!(
                "{most} threads on {cpus} processors: they take turns, and their scaling is \
                 meaningless"
            )
        }));
        let step = self.budget.mul_f64(1.0 + 1.0 / 8.0 + 1.0 / 2.0) * self.threads.len() as u32;
        let steps = cells.len() as u64 * self.implementations.len() as u64 * u64::from(self.repeat);
        let progress = Progress::new(progress, steps, step.mul_f64(steps as f64));
        benchmark.warnings.iter().for_each(|line| progress.note(line));

        let run = Run { options: self, method: &method, progress: &progress, step, stop };
        // Those of one live set and size stand together.
        let groups = cells.chunk_by(|a, b| (a.live, a.size) == (b.live, b.size));
        for group in groups.take_while(|_| !stopped(stop)) {
            run.group(group, &mut benchmark);
        }
        benchmark.interrupted = stopped(stop);
        benchmark.placement = placement;
        Ok(benchmark)
    }

    fn print(&self, benchmark: &Benchmark, details: bool) -> String {
        let placement = benchmark.placement.as_deref().map(placement::render);
        let timed = (!benchmark.rows.is_empty()).then(|| render(benchmark, &SHEET, details));
        [timed, placement].into_iter().flatten().collect::<Vec<_>>().join("\n")
    }
}

fn aperture(bits: u32) -> Aperture {
    Aperture::new(0, (1 << bits) - 1, GRANULE).expect("24 to 57 bits")
}

struct Run<'a> {
    options: &'a Options,
    method: &'a Method,
    progress: &'a Progress,
    /// What one step of the progress should take.
    step: Duration,
    stop: &'a Stop,
}

impl Run<'_> {
    /// All cells of one live set and size.
    fn group(&self, cells: &[Cell], into: &mut Benchmark) {
        let Some(Cell { live, size, .. }) = cells.first().copied() else { return };
        let bits = if live.is_full() { FULL_BITS } else { self.options.aperture_bits };
        let aperture = aperture(bits);
        let mut entrants = Vec::new();
        for &implementation in self.options.implementations.iter() {
            if stopped(self.stop) {
                return;
            }
            self.progress.begin(&format!("{implementation}: filling {live} of {size}"));
            let make = || implementation.make(aperture);
            let entrant = Entrant::new(implementation, make, aperture, (live, size), self.method);
            entrants.push(entrant);
        }
        for cell in cells {
            self.contest(cell, &mut entrants);
            for &Threads(threads) in self.options.threads.iter() {
                let row = |one| row(cell, bits, threads, one, &entrants);
                into.rows.extend(entrants.iter().map(row));
            }
            for entrant in &mut entrants {
                let about = format!("live {live}, size {size}");
                let found = entrant.violations.drain(..);
                into.errors.extend(found.map(|text| format!("{text} ({about})")));
            }
        }
    }

    /// One cell: checked, measured in interleaved rounds, checked again.
    fn contest(&self, cell: &Cell, entrants: &mut [Entrant]) {
        let (Cell { live, size, pattern }, repeat) = (cell, self.options.repeat);
        let begin = |entrant: &Entrant, what: &str| {
            let name = entrant.implementation;
            self.progress.begin(&format!("{pattern}, live {live}, size {size}: {name}, {what}"));
        };
        for entrant in entrants.iter_mut() {
            begin(entrant, "checking");
            entrant.prepare(*pattern);
            entrant.check(*pattern, 0, self.method);
        }
        for round in 1..=repeat {
            for entrant in entrants.iter_mut() {
                if stopped(self.stop) {
                    return;
                }
                begin(entrant, &format!("round {round} of {repeat}"));
                for &Threads(threads) in self.options.threads.iter() {
                    if *pattern != Pattern::Random || entrant.set.churned.len() >= threads {
                        entrant.measure(*pattern, threads, round.into(), self.method);
                    }
                }
                self.progress.step(self.step);
            }
        }
        for entrant in entrants.iter_mut() {
            entrant.check(*pattern, u64::from(repeat) + 1, self.method);
        }
    }
}

fn row(cell: &Cell, bits: u32, threads: usize, entrant: &Entrant, all: &[Entrant]) -> Row {
    let find = |implementation| all.iter().find(|one| one.implementation == implementation);
    let own = entrant.taken(threads);
    let params = object([
        ("pattern", cell.pattern.name().into()),
        ("live", cell.live.value()),
        ("size", cell.size.value()),
        ("threads", threads.into()),
        ("aperture_bits", bits.into()),
    ]);
    let name = format!("{}/{}/{}/{threads}", cell.pattern, cell.live, cell.size);
    let ours = find(Implementation::Ringfence).map_or(&NOTHING, |ours| ours.taken(threads));
    let ns = &own["ns"];
    let fewer = (entrant.set.churned.len() < threads && ns.0.is_empty())
        .then(|| "fewer live ranges than threads".to_owned());
    let out = entrant.out.as_ref().or(fewer.as_ref());
    let mut row = ns.row((name, entrant.implementation.name()), params, &ours["ns"], out);

    let operations = own.sum("operations");
    let mut notes = Vec::from_iter(row.note);
    if !ns.0.is_empty() && operations < FEW {
        notes.push(format!("fewer than {FEW} operations fitted the budget"));
    }
    if entrant.set.placed {
        let how = "filled range by range at given places, as requests would take too long";
        notes.push(how.to_owned());
    }
    row.note = (!notes.is_empty()).then(|| notes.join("; "));

    let latencies = entrant.samples.get(&threads).map(|samples| &samples.latencies);
    let single = |q: f64| latencies.map(|all| all.quantile(q));
    let checked = Some(entrant.checked).filter(|checked| checked.operations > 0);
    row.figures.extend(own.intervals(&["wall_ns_per_op", "cpu_ns_per_op"]));
    row.figures.extend(object([
        ("p99_ns", single(0.99).into()),
        ("worst_ns", single(1.0).into()),
        ("sampled_operations", latencies.map_or(0, |all| all.count()).into()),
        ("operations", operations.into()),
        ("timed_failures", own.sum("failures").into()),
        ("checked_operations", entrant.checked.operations.into()),
        ("failures", checked.map(|checked| checked.failures).into()),
        ("failures_with_hole", checked.map(|checked| checked.with_hole).into()),
        ("bytes_per_live", entrant.bytes_per_live.into()),
        ("empty_bytes", entrant.empty_bytes.into()),
    ]));
    if threads > 1 {
        // How much more several threads get done than one, a round each. On a machine that does
        // other work, waiting for a CPU hides waiting for the other thread. CPU time shows the
        // latter, except sleep at a lock.
        for (key, time) in [("scaling", "wall_ns_per_op"), ("cpu_scaling", "cpu_ns_per_op")] {
            let scaling = |of: &Entrant| {
                let [one, several] = [1, threads].map(|threads| &of.taken(threads)[time]);
                one.with(several, |one, several| threads as f64 * one / several)
            };
            let of_it = scaling(entrant);
            let control = find(Implementation::Control).map(scaling).unwrap_or_default();
            let ratio = of_it.ratio_to(&control);
            row.figures.insert(key.to_owned(), value(of_it.interval()));
            row.figures.insert(format!("{key}_to_control"), value(ratio));
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Interval, options},
        *,
    };

    pub(super) fn tiny() -> Options {
        options(
            "--live 0,100 --sizes 1 --pattern hot,random --repeat 2 --budget 0.2 --fill-limit 100 \
             --aperture 39",
        )
    }

    #[test]
    fn every_implementation_has_a_row_for_every_cell_and_number_of_threads() {
        let benchmark = tiny().run(Kind::Silent, &Stop::default()).unwrap();
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
        let large: Options = options(
            "--allocator btreemap --live 100k,1 --sizes 33-512 --pattern random --aperture 32 \
             --repeat 2 --budget 0.2 --fill-limit 100",
        );
        let benchmark = large.run(Kind::Silent, &Stop::default()).unwrap();
        let notes: Vec<_> = benchmark.rows.iter().map(|row| row.note.clone()).collect();
        assert!(notes[0].as_ref().unwrap().starts_with("not measured: "), "{notes:?}");
        // On a busy machine how it was filled, too.
        assert!(notes[0].as_ref().unwrap().contains("of 100000 ranges fitted"), "{notes:?}");
        assert_eq!(benchmark.rows[0].ns_per_op, Interval::default());
        assert_eq!(benchmark.rows[0].ratio_to_ringfence, None);
    }

    #[test]
    fn nothing_to_measure_is_wrong_usage() {
        let nothing: Options = options("--live 0 --pattern random");
        let error = nothing.run(Kind::Silent, &Stop::default()).unwrap_err();
        assert!(error.is::<Usage>() && error.to_string().contains("live set"), "{error}");
        assert!("65".parse::<Threads>().unwrap_err().contains("from 1 to 64"));
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        let benchmark = tiny().run(Kind::Silent, &Stop::new(true.into())).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
    }
}
