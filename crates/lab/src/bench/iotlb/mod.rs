//! Lookups in a device's IOTLB, and in other implementations of one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`params`] | what can be varied, by name |
//! | `set` | the entries that are looked up, and the memory they lead to |
//! | `peers` | the other implementations |
//! | `measure` | checks and times one implementation |
//! | [`table`] | all of it for a terminal |
//!
//! All implementations and all numbers of entries of one order, one size of entries and one way of
//! merging take turns in each round, so that ratios between any two of them are taken within rounds.

mod measure;
pub mod params;
mod peers;
mod set;
pub mod table;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Result;
use serde_json::json;

use self::{
    measure::{Cursor, Sample, Subject, check, subject},
    params::{Entries, Implementation, Merge, Order, Page},
    peers::{SortedList, Table},
    set::Set,
};
use super::{
    Benchmark, Row,
    rounds::{self, Rounds},
    row::{object, value},
    threads,
};
use crate::{
    progress::{Kind, Progress},
    run::Usage,
};

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The implementations to measure.
    pub implementations: Vec<Implementation>,
    /// Numbers of entries.
    pub entries: Vec<Entries>,
    /// Sizes of entries.
    pub pages: Vec<Page>,
    /// Orders.
    pub orders: Vec<Order>,
    /// Ways in which entries are related.
    pub merges: Vec<Merge>,
    /// Also combinations that show little.
    pub all: bool,
    /// Rounds.
    pub repeat: u32,
    /// How long one measurement runs.
    pub budget: Duration,
    /// How to show progress.
    pub progress: Kind,
}

/// One contest: what is measured in turns.
#[derive(Clone, Copy)]
struct Cell {
    order: Order,
    page: Page,
    merge: Merge,
}

impl Options {
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &merge in &self.merges {
            for &page in &self.pages {
                for &order in &self.orders {
                    // The size of an entry matters to few orders, and threads are measured with one
                    // way of merging.
                    let plain = page == Page::Small || order == Order::Random;
                    let threads = order.is_threads() && merge == Merge::Mergeable;
                    if self.all || plain && !threads {
                        cells.push(Cell { order, page, merge });
                    }
                }
            }
        }
        cells
    }

    /// The numbers of entries of a contest: one of them for contests with threads.
    fn entries(&self, cell: Cell) -> Vec<Entries> {
        let few = cell.order.is_threads() && !self.all;
        let fewer: Vec<_> = self.entries.iter().copied().filter(|n| n.0 == 512).collect();
        if few && !fewer.is_empty() { fewer } else { self.entries.clone() }
    }
}

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// [`Usage`]: there is nothing to measure. Or memory for the entries cannot be mapped.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark> {
    let cells = options.cells();
    if cells.is_empty() || options.entries.is_empty() || options.implementations.is_empty() {
        return Err(Usage("nothing to measure".to_owned()).into());
    }
    let cpus = threads::cpus();
    let mut benchmark = Benchmark::new("iotlb", options.repeat);
    if cells.iter().any(|cell| cell.order.is_threads()) && cpus.len() < 2 {
        benchmark.warnings.push("two threads on one processor: they take turns".to_owned());
    }
    benchmark.settings = object([
        ("budget_ms", (options.budget.as_secs_f64() * 1e3).into()),
        ("cpus", json!(cpus)),
        ("sorted_list_entries", SortedList::MOST.into()),
    ]);
    let each = |cell: &Cell| {
        // With warming up: a half of the budget, or twice a quarter.
        let times = if cell.order.is_threads() { 2.5 } else { 1.5 };
        let all = options.entries(*cell).len() * options.implementations.len();
        options.budget.mul_f64(times * all as f64) * (options.repeat + 1)
    };
    let expected: Duration = cells.iter().map(each).sum();
    let progress = Progress::new(options.progress, cells.len() as u64, expected);
    for cell in cells {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let Cell { order, page, merge } = cell;
        progress.begin(&format!("{merge} entries of {page}, {order}"));
        Contest::new(cell, options, &cpus, &mut benchmark)?.run(options, stop, &mut benchmark);
        progress.step(each(&cell));
    }
    progress.finish();
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    Ok(benchmark)
}

/// An implementation with a number of entries.
struct Entrant {
    implementation: Implementation,
    set: Set,
    /// Why it is not measured.
    out: Option<String>,
    subject: Option<Box<dyn Subject>>,
    cursor: Cursor,
    /// Of one thread and of two.
    samples: [Samples; 2],
}

/// What operations took in each round.
#[derive(Default)]
struct Samples {
    wall: Rounds,
    cpu: Rounds,
    /// Entries that others renewed meanwhile, a second.
    renewed: Rounds,
    operations: u64,
}

impl Samples {
    fn add(&mut self, sample: Sample) {
        self.wall.push(sample.wall);
        self.cpu.push(sample.cpu);
        self.renewed.push(sample.renewed);
        self.operations += sample.operations;
    }
}

struct Contest<'a> {
    cell: Cell,
    cpus: &'a [usize],
    entrants: Vec<Entrant>,
}

impl<'a> Contest<'a> {
    fn new(
        cell: Cell,
        options: &Options,
        cpus: &'a [usize],
        into: &mut Benchmark,
    ) -> Result<Contest<'a>> {
        let mut entrants = Vec::new();
        for entries in options.entries(cell) {
            let set = Set::new(entries, cell.page, cell.merge);
            let memory = match set.impossible() {
                None => Some(set.memory()?),
                Some(_) => None,
            };
            for &implementation in &options.implementations {
                let too_many =
                    implementation == Implementation::SortedList && set.entries > SortedList::MOST;
                let mut out = set.impossible().or_else(|| {
                    too_many.then(|| format!("not measured: it holds {} entries", SortedList::MOST))
                });
                let made = match (&memory, &out) {
                    (Some(memory), None) => subject(implementation, &set, memory).map(Some),
                    _ => Ok(None),
                };
                let subject = made.unwrap_or_else(|error| {
                    into.errors.push(format!("{error:#} ({set:?})"));
                    out = Some("not measured: it failed its check".to_owned());
                    None
                });
                let (cursor, samples) = (Cursor::new(1), Default::default());
                entrants.push(Entrant { implementation, set, out, subject, cursor, samples });
            }
        }
        Ok(Contest { cell, cpus, entrants })
    }

    fn run(mut self, options: &Options, stop: &AtomicBool, into: &mut Benchmark) {
        let (order, budget, cpus) = (self.cell.order, options.budget, self.cpus);
        // Of one thread and, where there are any, of two.
        let measure = |entrant: &mut Entrant| {
            let (subject, set) = (entrant.subject.as_mut()?, &entrant.set);
            if !order.is_threads() {
                let cursor = &mut entrant.cursor;
                // The processor's caches hold the others' data.
                subject.time(set, order, cursor, budget / 2);
                return Some(vec![subject.time(set, order, cursor, budget)]);
            }
            let cpus = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
            Some([1, 2].map(|n| subject.threads(set, order, &cpus[..n], budget)).to_vec())
        };
        let keep = |entrant: &mut Entrant, samples: Vec<Sample>| {
            entrant.samples.iter_mut().zip(samples).for_each(|(all, sample)| all.add(sample));
        };
        rounds::contest(&mut self.entrants, options.repeat, stop, measure, keep);
        for entrant in &mut self.entrants {
            let Some(subject) = &mut entrant.subject else { continue };
            if let Err(error) = check(&mut **subject, &entrant.set) {
                into.errors.push(format!("{}: {error:#}, afterwards", entrant.implementation));
            }
        }
        self.rows(into);
    }

    fn rows(&self, into: &mut Benchmark) {
        let Cell { order, page, merge } = self.cell;
        let numbers: &[usize] = if order.is_threads() { &[0, 1] } else { &[0] };
        let none = Samples::default();
        let find = |implementation, entries, threads: usize| {
            self.entrants
                .iter()
                .find(|one| one.implementation == implementation && one.set.entries == entries)
                .map_or(&none, |one| &one.samples[threads])
        };
        // One thread is measured by its CPU time; several wait for each other too.
        let time = |samples: &'_ Samples| -> Rounds {
            if order.is_threads() { samples.wall.clone() } else { samples.cpu.clone() }
        };
        for &threads in numbers {
            for entrant in &self.entrants {
                let own = &entrant.samples[threads];
                let entries = entrant.set.entries;
                let ours = find(Implementation::Ringfence, entries, threads);
                let ratio = time(own).ratio_to(&time(ours));
                let same = |entries| find(entrant.implementation, entries, threads);
                let list = find(Implementation::SortedList, SortedList::MOST, threads);
                let mut figures = object([
                    ("ratio_interval", value(ratio)),
                    ("wall_ns_per_op", value(own.wall.interval())),
                    ("cpu_ns_per_op", value(own.cpu.interval())),
                    ("operations", own.operations.into()),
                    ("ratio_to_64_entries", value(time(own).ratio_to(&time(same(64))))),
                    ("sorted_list_of_2048_to_this", value(time(list).ratio_to(&time(own)))),
                ]);
                if order == Order::Steady {
                    let renewed = own.renewed.interval();
                    figures.insert("invalidations_per_s".to_owned(), value(renewed));
                }
                if threads == 1 {
                    for (key, time) in [
                        ("scaling", (|samples| &samples.wall) as fn(&Samples) -> &Rounds),
                        ("cpu_scaling", |samples| &samples.cpu),
                    ] {
                        let one = time(&entrant.samples[0]);
                        let more = one.with(time(own), |one, two| 2.0 * one / two);
                        figures.insert(key.to_owned(), value(more.interval()));
                    }
                }
                let label =
                    if order.is_threads() { format!("/{}", threads + 1) } else { String::new() };
                into.rows.push(Row {
                    name: format!("{order}/{merge}/{page}/{}{label}", Entries(entries)),
                    implementation: entrant.implementation.to_string(),
                    params: object([
                        ("order", order.name().into()),
                        ("merge", merge.name().into()),
                        ("page", page.name().into()),
                        ("entries", entries.into()),
                        ("threads", (threads + 1).into()),
                    ]),
                    ns_per_op: time(own).interval(),
                    ratio_to_ringfence: ratio.median,
                    note: own.wall.missing(entrant.out.as_ref()),
                    figures,
                });
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(super) fn tiny() -> Options {
        Options {
            implementations: Implementation::ALL.to_vec(),
            entries: vec![Entries(1), Entries(64), Entries(4096)],
            pages: vec![Page::Small, Page::Huge],
            orders: Order::ALL.to_vec(),
            merges: Merge::ALL.to_vec(),
            all: false,
            repeat: 2,
            budget: Duration::from_micros(100),
            progress: Kind::Silent,
        }
    }

    #[test]
    fn every_implementation_has_a_row_for_every_combination() {
        let benchmark = run(&tiny(), &AtomicBool::new(false)).unwrap();
        assert_eq!(benchmark.errors, Vec::<String>::new());
        // Mergeable: five orders of 4k, one of 1g. Unmergeable: the same and two numbers of threads,
        // twice.
        assert_eq!(benchmark.rows.len(), (6 + 10) * 3 * Implementation::ALL.len());
        for row in &benchmark.rows {
            let out = row.implementation == "sorted-list" && row.params["entries"] == 4096
                || row.params["page"] == "1g"
                    && row.params["entries"] == 4096
                    && row.params["merge"] == "mergeable";
            assert_eq!(row.ns_per_op.median.is_some(), !out, "{row:?}");
            assert_eq!(row.note.is_some(), out, "{row:?}");
            assert_eq!(row.figures.contains_key("scaling"), row.params["threads"] == 2);
            if row.implementation == "ringfence" && !out {
                assert_eq!(row.ratio_to_ringfence, Some(1.0));
            }
        }
    }

    #[test]
    fn what_finds_something_else_fails_the_run() {
        struct Wrong;
        impl Subject for Wrong {
            fn find(&mut self, addr: u64) -> Option<u64> {
                Some(addr)
            }
            fn time(&mut self, _: &Set, _: Order, _: &mut Cursor, _: Duration) -> Sample {
                unreachable!()
            }
            fn threads(&mut self, _: &Set, _: Order, _: &[usize], _: Duration) -> Sample {
                unreachable!()
            }
        }
        let set = Set::new(Entries(4), Page::Small, Merge::Unmergeable);
        assert!(check(&mut Wrong, &set).unwrap_err().to_string().contains("entry 0 leads to"));
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        let benchmark = run(&tiny(), &AtomicBool::new(true)).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
        assert!(run(&Options { orders: Vec::new(), ..tiny() }, &AtomicBool::new(false)).is_err());
    }
}
