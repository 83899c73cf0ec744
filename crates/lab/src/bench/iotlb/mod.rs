//! Lookups in a device's IOTLB, and in other implementations of one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`params`] | what can be varied, by name |
//! | `set` | the entries that are looked up, and the memory they lead to |
//! | `peers` | the other implementations |
//! | `measure` | checks and times one implementation |
//!
//! All implementations and all numbers of entries of one order, one size of entries and one way of
//! merging take turns in each round, so that ratios between any two of them are taken within rounds.

mod measure;
pub mod params;
mod peers;
mod set;

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use self::{
    measure::{Cursor, Subject, check, subject},
    params::{Entries, Implementation, Merge, Order, Page},
    peers::SortedList,
    set::Set,
};
use super::{
    Benchmark, Measure, Row,
    report::{Against, Figure, Part, Sheet},
    rounds::{Contest, Entrant, Stop, stopped},
    row::{object, value},
    threads,
};
use crate::{
    list::{List, milliseconds},
    progress::{Kind, Progress},
};

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "lookups in a device's IOTLB",
    parts: &[Part {
        title: "lookups",
        operation: "an operation, of a thread's CPU time (with several, of the wall's)",
        against: &[Against::PEERS],
        figures: &[
            Figure::new("ratio_to_64_entries", "x64", 1.0),
            Figure::new("sorted_list_of_2048_to_this", "xlist", 1.0),
            Figure::new("scaling", "scaling", 1.0).with_half(),
            Figure::new("cpu_scaling", "by CPU", 1.0).with_half(),
        ],
        ..Part::ALL
    }],
    legend: LEGEND,
};

const LEGEND: &str = "  rows      order/merge/page/entries: 64 bytes of one entry after the other (seq), of a random one (random), each after
            the one before (dependent), 16 bytes, 4 KiB and 1 byte of random ones (chain), an entry invalidated,
            inserted again and looked up (churn), random lookups by two threads of which each renews an entry every
            8,192 (threads), or while a third renews 10,000 a second (steady)
  x64       ns against its own with 64 entries
  xlist     a sorted list of 2,048 entries against this
  scaling   what two threads get done against what one does, by the wall's time and by their CPU time: on a machine
            that does other work, the first hides what the second shows
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench iotlb
    ringfence bench iotlb --order random --merge unmergeable --page 4k
    ringfence bench iotlb --impl ringfence,vm-memory --order threads --entries 64,64k
    ringfence bench iotlb --repeat 15 --budget 20 --json iotlb.json

EXIT STATUS:
    0   done
    1   an implementation found something else than what was put in, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// The implementations to measure, separated by commas; sorted-list is walked from its
    /// beginning, and holds 2,048 entries at most.
    #[arg(long = "impl", value_name = "LIST", default_value_t = List::from(&Implementation::ALL[..]))]
    pub implementations: List<Implementation>,

    /// Numbers of entries, up to 1024k; for threads 512, if that is one of them.
    #[arg(long, value_name = "LIST", default_value = "1,4,64,512,2k,64k")]
    pub entries: List<Entries>,

    /// Sizes of entries: 4k, 2m, 1g [default: all; other orders than random for 4k only].
    #[arg(long = "page", value_name = "LIST")]
    pub pages: Option<List<Page>>,

    /// What an operation is: `seq` (64 bytes of one entry after the other), `random` (of a random
    /// one), `dependent` (the same, each after the one before), `chain` (three descriptors),
    /// `churn` (an entry is invalidated, inserted again and looked up), `threads` (random, by one
    /// thread and by two, an entry invalidated now and then), `steady` (the same, while another
    /// thread invalidates 10,000 a second) [default: all].
    #[arg(long = "order", value_name = "LIST")]
    pub orders: Option<List<Order>>,

    /// How entries are related.
    #[arg(long = "merge", value_name = "LIST", default_value_t = List::from(&Merge::ALL[..]))]
    pub merges: List<Merge>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 7,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// How long one measurement runs, milliseconds.
    #[arg(long, value_name = "MS", default_value = "8", value_parser = milliseconds)]
    pub budget: Duration,
}

/// One contest: what is measured in turns.
#[derive(Clone, Copy)]
struct Cell {
    order: Order,
    page: Page,
    merge: Merge,
}

impl Options {
    /// Whether combinations that show little are measured too: an order and a size were named.
    fn all(&self) -> bool {
        self.orders.is_some() && self.pages.is_some()
    }

    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &merge in self.merges.iter() {
            for &page in self.pages.as_deref().unwrap_or(&Page::ALL) {
                for &order in self.orders.as_deref().unwrap_or(&Order::ALL) {
                    // The size of an entry matters to few orders, and threads are measured with one
                    // way of merging.
                    let plain = page == Page::Small || order == Order::Random;
                    let threads = order.is_threads() && merge == Merge::Mergeable;
                    if self.all() || plain && !threads {
                        cells.push(Cell { order, page, merge });
                    }
                }
            }
        }
        cells
    }

    /// The numbers of entries of a contest: one of them for contests with threads.
    fn entries(&self, cell: Cell) -> Vec<Entries> {
        let few = cell.order.is_threads() && !self.all();
        let fewer: Vec<_> = self.entries.iter().copied().filter(|n| n.0 == 512).collect();
        if few && !fewer.is_empty() { fewer } else { self.entries.to_vec() }
    }
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        let (cells, cpus) = (self.cells(), threads::cpus());
        let mut benchmark = Benchmark::new("iotlb", self.repeat);
        if cells.iter().any(|cell| cell.order.is_threads()) && cpus.len() < 2 {
            benchmark.warnings.push("two threads on one processor: they take turns".to_owned());
        }
        benchmark.settings = object([
            ("budget_ms", (self.budget.as_secs_f64() * 1e3).into()),
            ("cpus", json!(cpus)),
            ("sorted_list_entries", SortedList::MOST.into()),
        ]);
        let expected = |cell: Cell| {
            // With warming up: a half of the budget, or twice a quarter.
            let times = if cell.order.is_threads() { 2.5 } else { 1.5 };
            let all = self.entries(cell).len() * self.implementations.len();
            self.budget.mul_f64(times * all as f64) * (self.repeat + 1)
        };
        let all_of_it = cells.iter().copied().map(expected).sum();
        let progress = Progress::new(progress, cells.len() as u64, all_of_it);
        for cell in cells.into_iter().take_while(|_| !stopped(stop)) {
            let Cell { order, page, merge } = cell;
            progress.begin(&format!("{merge} entries of {page}, {order}"));
            contest(cell, self, stop, &mut benchmark)?;
            progress.step(expected(cell));
        }
        benchmark.interrupted = stopped(stop);
        Ok(benchmark)
    }
}

/// An implementation with a number of entries.
struct Filled {
    set: Set,
    subject: Box<dyn Subject>,
    cursor: Cursor,
}

/// Names of the figures of one thread and of two.
const FIGURES: [[&str; 4]; 2] = [
    ["wall", "cpu", "renewed", "operations"],
    ["wall of 2", "cpu of 2", "renewed of 2", "operations of 2"],
];

fn contest(cell: Cell, options: &Options, stop: &Stop, into: &mut Benchmark) -> Result<()> {
    let (Cell { order, page, merge }, budget) = (cell, options.budget);
    let cpus = threads::cpus();
    let mut entrants = Vec::new();
    for entries in options.entries(cell) {
        let set = Set::new(entries, page, merge);
        let memory = match set.impossible() {
            Some(why) => Err(why),
            None => Ok(set.memory()?),
        };
        for &implementation in options.implementations.iter() {
            let filled = memory.as_ref().map_err(Clone::clone).and_then(|memory| {
                if implementation == Implementation::SortedList && set.entries > SortedList::MOST {
                    return Err(format!("it holds {} entries", SortedList::MOST));
                }
                let subject = subject(implementation, &set, memory).map_err(|error| {
                    into.errors.push(format!("{error:#} ({set:?})"));
                    "it failed its check".to_owned()
                })?;
                Ok(Filled { set, subject, cursor: Cursor::new(1) })
            });
            entrants.push(Entrant::new((implementation, set.entries), filled));
        }
    }
    let mut contest = Contest(entrants);
    // Of one thread and, where there are any, of two.
    let measure = |_: &_, Filled { set, subject, cursor }: &mut Filled, _| {
        let samples = if order.is_threads() {
            let cpus = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
            [1, 2].map(|n| subject.threads(set, order, &cpus[..n], budget)).to_vec()
        } else {
            // The processor's caches hold the others' data.
            subject.time(set, order, cursor, budget / 2);
            vec![subject.time(set, order, cursor, budget)]
        };
        let samples = samples.iter().map(|one| [one.wall, one.cpu, one.renewed, one.operations]);
        Ok(FIGURES.into_iter().flatten().zip(samples.flatten()).collect())
    };
    contest.run(options.repeat, stop, measure, |_, _| {});
    for Entrant { key: (implementation, _), subject, .. } in &mut contest.0 {
        let Ok(Filled { set, subject, .. }) = subject else { continue };
        if let Err(error) = check(&mut **subject, set) {
            into.errors.push(format!("{implementation}: {error:#}, afterwards"));
        }
    }
    let numbers: &[usize] = if order.is_threads() { &[1, 2] } else { &[1] };
    for &threads in numbers {
        into.rows.extend(contest.0.iter().map(|one| row(cell, threads, one, &contest)));
    }
    Ok(())
}

type Filling = Entrant<(Implementation, u64), Filled>;
type Fillings = Contest<(Implementation, u64), Filled>;

fn row(cell: Cell, threads: usize, one: &Filling, contest: &Fillings) -> Row {
    let Cell { order, page, merge } = cell;
    let ((implementation, entries), taken) = (one.key, &one.taken);
    let [wall, cpu, renewed, operations] = FIGURES[threads - 1];
    // One thread is measured by its CPU time; several wait for each other too.
    let time = if order.is_threads() { wall } else { cpu };
    let of = |implementation, entries| &contest.taken(&(implementation, entries))[time];
    let own = &taken[time];
    let label = if order.is_threads() { format!("/{threads}") } else { String::new() };
    let name = format!("{order}/{merge}/{page}/{}{label}", Entries(entries));
    let params = object([
        ("order", order.name().into()),
        ("merge", merge.name().into()),
        ("page", page.name().into()),
        ("entries", entries.into()),
        ("threads", threads.into()),
    ]);
    let (ours, out) = (of(Implementation::Ringfence, entries), one.subject.as_ref().err());
    let mut row = own.row((name, implementation.name()), params, ours, out);
    let list = of(Implementation::SortedList, SortedList::MOST);
    row.figures.extend(object([
        ("wall_ns_per_op", value(taken[wall].interval())),
        ("cpu_ns_per_op", value(taken[cpu].interval())),
        ("operations", taken.sum(operations).into()),
        ("ratio_to_64_entries", value(own.ratio_to(of(implementation, 64)))),
        ("sorted_list_of_2048_to_this", value(list.ratio_to(own))),
    ]));
    if order == Order::Steady {
        row.figures.insert("invalidations_per_s".to_owned(), value(taken[renewed].interval()));
    }
    if threads == 2 {
        for (key, figure) in [("scaling", 0), ("cpu_scaling", 1)] {
            let [one, two] = FIGURES.map(|names| &taken[names[figure]]);
            let more = one.with(two, |one, two| 2.0 * one / two);
            row.figures.insert(key.to_owned(), value(more.interval()));
        }
    }
    row
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::options, measure::Sample, *};

    fn tiny() -> Options {
        options("--entries 1,64,4k --page 4k,1g --repeat 2 --budget 0.1")
    }

    #[test]
    fn every_implementation_has_a_row_for_every_combination() {
        let benchmark = tiny().run(Kind::Silent, &Stop::default()).unwrap();
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
        let benchmark = tiny().run(Kind::Silent, &Stop::new(true.into())).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
    }
}
