//! Pinning pages: our pinner beside the same work by hand, and what recorded work would gain.
//!
//! | module | what it holds |
//! |---|---|
//! | [`params`] | what can be varied, by name |
//! | `set` | the pages of a list |
//! | `memory` | memory to pin: small pages, huge ones |
//! | `ring` | the kernel's registered buffers, by hand |
//! | `ways` | our pinner, and pinning by hand over the same mechanism, timed and checked |
//! | [`runs`] | how long runs are in recordings of real work |
//!
//! All implementations take turns in each round, in alternating order, so that what slows the
//! machine for a while slows all of them and what drifts cancels out; ratios are those of a round.

mod memory;
pub mod params;
mod ring;
pub mod runs;
mod set;
mod ways;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};

use self::{
    memory::Memory,
    params::{Backing, Implementation, Lie, Pages},
    ring::Name,
    set::Set,
    ways::{Ours, PageByPage, RunsByHand, Subject, one_page_calls},
};
use super::{
    Benchmark, Measure, Row,
    clock::Clock,
    report::{Against, Figure, MISSING, Part, Sheet, render},
    rounds::{Contest, Rounds, Stop, stopped},
    row::{object, value},
    threads,
};
use crate::{
    list::{List, milliseconds},
    progress::{Kind, Progress},
};

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "pinning pages by io_uring's registered buffers",
    parts: &[Part {
        title: "pin and unpin",
        operation: "a page of the list, pinned and unpinned",
        against: &[Against::PEERS],
        others: &["ringfence-each", "runs-by-hand"],
        figures: &[
            Figure::new("pin_ns_per_page", "pin", 1.0).with_half(),
            Figure::new("pin_speedup", "x page", 1.0).with_half(),
            Figure::new("unpin_ns_per_page", "unpin", 1.0).with_half(),
            Figure::new("unpin_speedup", "x page", 1.0).with_half(),
        ],
        ..Part::ALL
    }],
    legend: LEGEND,
};

const LEGEND: &str = "  rows            pages/memory/list: pages side by side, in order (contiguous), in random order, no two side by side
                  (random), half of them in runs of up to 16 (mixed), side by side, every other run pinned already
  x page          how many times as fast as page-by-page
  page-by-page    the fastest call for one page, by hand, once a page; no account, no checks, no unwinding; what is
                  pinned already costs it nothing
  ringfence-each  ringfence, called once a page
  runs-by-hand    the list's runs by hand, known beforehand, 64 in a call: what the kernel takes of ringfence's time
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench pin
    ringfence bench pin --pages 1,512 --memory 4k,thp --list contiguous,half
    ringfence bench pin --repeat 101 --pages 1 --json pin.json
    ringfence bench pin --runs examples/traces/*.gz

HUGE PAGES:
    hugetlb needs huge pages that were set apart (sysctl vm.nr_hugepages=N): without, the output reports
    that it did not run, and named by --memory that is a failure

EXIT STATUS:
    0   done
    1   an implementation did not pin what it should have, named memory is not there, or Ctrl-C
    2   wrong usage, a file that is no recording included: nothing was run")]
pub struct Options {
    /// The implementations to measure, separated by commas; ringfence-each is called once a page.
    #[arg(long = "impl", value_name = "LIST", default_value_t = List::from(&Implementation::ALL[..]))]
    pub implementations: List<Implementation>,

    /// Lengths of lists, pages of 4 KiB, up to 16384.
    #[arg(long, value_name = "LIST", default_value = "1,8,64,512,4096")]
    pub pages: List<Pages>,

    /// What backs the memory: 4k, thp, hugetlb [default: all]; what is named and missing fails the
    /// run.
    #[arg(long = "memory", value_name = "LIST")]
    pub backings: Option<List<Backing>>,

    /// How the pages lie: `contiguous`, `random` (no two adjacent), `mixed` (or `half`: half of
    /// them in runs, half alone), `pinned` (adjacent, half of them pinned already).
    #[arg(long = "list", value_name = "LIST", default_value_t = List::from(&Lie::ALL[..]))]
    pub lists: List<Lie>,

    /// Rounds.
    #[arg(long, visible_alias = "rounds", value_name = "N", default_value_t = 31,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// How long one measurement runs, milliseconds, one list at least.
    #[arg(long, value_name = "MS", default_value = "1", value_parser = milliseconds)]
    pub budget: Duration,

    /// Prints instead how long the runs of pages in these recordings are (those of `ringfence
    /// replay`); `-` is standard input.
    #[arg(long, value_name = "TRACE", num_args = 1..,
        conflicts_with_all = ["implementations", "pages", "backings", "lists", "repeat", "budget"])]
    pub runs: Option<Vec<PathBuf>>,
}

/// One contest: what is measured in turns.
#[derive(Clone, Copy)]
struct Cell {
    backing: Backing,
    list: Lie,
    pages: usize,
}

impl Options {
    /// All of them, by what backs the memory.
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &backing in self.backings.as_deref().unwrap_or(&Backing::ALL) {
            for &list in self.lists.iter() {
                // One page is the same in every list.
                let pages = self.pages.iter().map(|pages| pages.0);
                let pages = pages.filter(|pages| *pages > 1 || list == self.lists[0]);
                cells.extend(pages.map(|pages| Cell { backing, list, pages }));
            }
        }
        cells
    }

    fn expected(&self, cell: &Cell) -> Duration {
        // A list of a page a call may take longer than a slice.
        let slice = self.budget.max(Duration::from_micros(cell.pages as u64)).mul_f64(1.25);
        slice * (self.repeat + 1) * self.implementations.len() as u32
    }

    /// On one CPU.
    fn measured(&self, mut benchmark: Benchmark, show: Kind, stop: &Stop) -> Result<Benchmark> {
        let (options, clock, cpus) = (self, Clock::calibrate(), threads::cpus());
        let most = options.pages.iter().map(|pages| pages.0).max().unwrap_or(1);
        let small = Memory::new(Backing::Small, Set::span(most))?;
        let Ok(small) = small else { unreachable!("small pages are always there") };
        let (name, calls) = one_page_calls(&small, &clock)?;
        drop(small);
        benchmark.settings = object([
            ("budget_ms", (options.budget.as_secs_f64() * 1e3).into()),
            ("cpu", cpus.last().copied().into()),
            ("clock", clock.name().into()),
            ("clock_ns", clock.cost_ns.into()),
            ("one_page_calls", calls.into()),
            (MISSING, json!([])),
        ]);
        let cells = options.cells();
        let expected = cells.iter().map(|cell| options.expected(cell)).sum();
        let progress = Progress::new(show, cells.len() as u64, expected);
        for cells in cells.chunk_by(|a, b| a.backing == b.backing) {
            let memory = Memory::new(cells[0].backing, Set::span(most))?
                .inspect_err(|why| absent(why, options.backings.is_some(), show, &mut benchmark));
            for &cell in cells.iter().take_while(|_| !stopped(stop)) {
                let Cell { backing, list, pages } = cell;
                progress.begin(&format!("{pages} pages, {backing}, {list}"));
                let on = (memory.as_ref(), name);
                contest(cell, options, on, (&clock, stop), &mut benchmark);
                progress.step(options.expected(&cell));
            }
        }
        benchmark.interrupted = stopped(stop);
        Ok(benchmark)
    }
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        if let Some(traces) = &self.runs {
            return runs::run(traces, progress, stop);
        }
        let cpu = *threads::cpus().last().unwrap_or(&0);
        // Made first: it counts the CPUs that this thread may use.
        let benchmark = Benchmark::new("pin", self.repeat);
        threads::bound_to(cpu, || self.measured(benchmark, progress, stop))
    }

    fn print(&self, benchmark: &Benchmark, details: bool) -> String {
        match &self.runs {
            Some(_) => render(benchmark, &runs::SHEET, true),
            None => render(benchmark, &SHEET, details),
        }
    }
}

/// Reports missing memory: as an error if it was named, else as a warning.
fn absent(why: &str, named: bool, show: Kind, into: &mut Benchmark) {
    if show != Kind::Silent && !named {
        eprintln!("{why}");
    }
    if let Some(Value::Array(missing)) = into.settings.get_mut(MISSING) {
        missing.push(why.into());
    }
    let lines = if named { &mut into.errors } else { &mut into.warnings };
    lines.push(why.to_owned());
}

fn contest(
    cell: Cell,
    options: &Options,
    (memory, name): (Result<&Memory, &String>, Name),
    (clock, stop): (&Clock, &Stop),
    into: &mut Benchmark,
) {
    let Cell { backing, list, pages } = cell;
    let (set, mut times) = (Set::new(list, pages), [Vec::new(), Vec::new()]);
    let mut contest = Contest::new(options.implementations.iter().copied(), |implementation| {
        let memory = memory.map_err(Clone::clone)?;
        subject(*implementation, cell, &set, memory, name).inspect_err(|why| {
            let about = format!("{implementation}, {pages} pages of {backing}, {list}");
            into.errors.push(format!("{about}: not measured: {why}"));
        })
    });
    let measure = |_: &_, subject: &mut Box<dyn Subject + '_>, _| {
        // The processor's caches hold the others' data.
        let mut slice = |budget| subject.time(&set, (clock, budget), &mut times);
        slice(options.budget / 4)?;
        slice(options.budget)
    };
    contest.run(options.repeat, stop, measure, |implementation, error| {
        into.errors.push(format!("{implementation}, {list}: {error:#}"));
    });
    let ours = &contest.taken(&Implementation::Ringfence)["both"];
    let peer = contest.taken(&Implementation::PageByPage);
    let a_page = |rounds: &Rounds| rounds.interval().scaled(1.0 / pages as f64);
    for one in &contest.0 {
        let [both, pin, unpin] = ["both", "pin", "unpin"].map(|figure| &one.taken[figure]);
        into.rows.push(Row {
            name: format!("{pages}/{backing}/{list}"),
            implementation: one.key.to_string(),
            params: object([
                ("pages", pages.into()),
                ("backing", backing.name().into()),
                ("list", list.name().into()),
            ]),
            ns_per_op: a_page(both),
            ratio_to_ringfence: both.ratio_to(ours).median,
            note: both.missing(one.subject.as_ref().err()),
            figures: object([
                ("pin_ns_per_page", value(a_page(pin))),
                ("unpin_ns_per_page", value(a_page(unpin))),
                ("pin_ns_per_list", value(pin.interval())),
                ("unpin_ns_per_list", value(unpin.interval())),
                ("pin_ratio_to_page_by_page", value(pin.ratio_to(&peer["pin"]))),
                ("unpin_ratio_to_page_by_page", value(unpin.ratio_to(&peer["unpin"]))),
                ("pin_speedup", value(peer["pin"].ratio_to(pin))),
                ("unpin_speedup", value(peer["unpin"].ratio_to(unpin))),
                ("lists", one.taken.sum("lists").into()),
                ("runs", set.runs.len().into()),
                ("held_pages", (pages - set.fresh.len()).into()),
            ]),
        });
    }
}

/// Makes and checks an implementation.
fn subject<'m>(
    implementation: Implementation,
    cell: Cell,
    set: &Set,
    memory: &'m Memory,
    name: Name,
) -> Result<Box<dyn Subject + 'm>, String> {
    let made = || -> Result<Box<dyn Subject + 'm>> {
        let mut subject: Box<dyn Subject + 'm> = match implementation {
            Implementation::Ringfence => Box::new(Ours::new(set, memory, usize::MAX)?),
            Implementation::RingfenceEach => Box::new(Ours::new(set, memory, 1)?),
            Implementation::PageByPage => Box::new(PageByPage::new(name, set.fresh.len(), memory)?),
            Implementation::RunsByHand => Box::new(RunsByHand::new(name, set, memory)?),
        };
        // A huge page of which a part is held is counted already.
        let counted = cell.backing == Backing::Small || set.held.is_empty();
        subject.check(set, if counted { set.fresh.len() } else { 0 })?;
        Ok(subject)
    };
    made().map_err(|error| {
        let limit = error.chain().any(|cause| {
            cause.downcast_ref::<rustix::io::Errno>() == Some(&rustix::io::Errno::NOMEM)
        });
        let help = match limit {
            true => "; the limit of locked memory (ulimit -l) may be in the way",
            false => "",
        };
        format!("{error:#}{help}")
    })
}

#[cfg(test)]
pub(super) mod tests {
    use parking_lot::{Mutex, MutexGuard};

    use super::{super::options, *};

    /// The kernel counts what the whole process has pinned, so that tests that read the count take
    /// turns.
    pub(super) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock()
    }

    fn tiny() -> Options {
        options("--pages 1,64 --repeat 2 --budget 0.1")
    }

    #[test]
    fn every_implementation_has_a_row_for_every_list() {
        let _alone = alone();
        let benchmark = tiny().run(Kind::Silent, &Stop::default()).unwrap();
        assert_eq!(benchmark.errors, Vec::<String>::new());
        assert_eq!(benchmark.rows.len(), 3 * (1 + 4) * Implementation::ALL.len());
        for row in &benchmark.rows {
            let absent = row.params["backing"] == "hugetlb" && !benchmark.warnings.is_empty();
            assert_eq!(row.ns_per_op.median.is_some(), !absent, "{row:?}");
            assert_eq!(row.note.is_some(), absent, "{row:?}");
            if !absent && row.implementation == "page-by-page" {
                assert_eq!(row.figures["pin_speedup"]["median"], 1.0);
            }
        }
        let calls = benchmark.settings["one_page_calls"].as_array().unwrap();
        assert_eq!(calls.iter().filter(|call| call["page_by_page"] == true).count(), 1);
    }

    #[test]
    fn an_implementation_that_pins_nothing_or_too_much_fails_the_check() {
        struct Lazy;
        impl Subject for Lazy {
            fn pin(&mut self, _: &Set) -> Result<()> {
                Ok(())
            }
            fn unpin(&mut self, _: &Set) -> Result<()> {
                Ok(())
            }
        }
        struct Hoarder<'m>(PageByPage<'m>);
        impl Subject for Hoarder<'_> {
            fn pin(&mut self, set: &Set) -> Result<()> {
                self.0.pin(set)
            }
            fn unpin(&mut self, _: &Set) -> Result<()> {
                Ok(())
            }
        }
        let _alone = alone();
        let set = Set::new(Lie::Contiguous, 8);
        let wrong = Lazy.check(&set, 8).unwrap_err().to_string();
        assert!(wrong.contains("not all are pinned"), "{wrong}");
        let Ok(memory) = Memory::new(Backing::Small, 16).unwrap() else { panic!() };
        let peer = PageByPage::new(Name::Descriptor, 8, &memory).unwrap();
        let wrong = Hoarder(peer).check(&set, 8).unwrap_err().to_string();
        assert!(wrong.contains("pinned afterwards"), "{wrong}");
    }

    #[test]
    fn memory_that_was_named_and_is_not_there_is_a_failure() {
        let _alone = alone();
        let options: Options =
            options("--memory 4k,hugetlb --pages 16384 --list contiguous --repeat 2 --budget 0.1");
        let benchmark = options.run(Kind::Silent, &Stop::default()).unwrap();
        let absent = benchmark.rows.iter().any(|row| row.note.is_some());
        assert_eq!(benchmark.errors.is_empty(), !absent, "{:?}", benchmark.errors);
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        let _alone = alone();
        let benchmark = tiny().run(Kind::Silent, &Stop::new(true.into())).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
    }
}
