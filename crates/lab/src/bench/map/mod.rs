//! MAP and UNMAP of a virtio-iommu through a request queue, and of devices of another design.
//!
//! | module | what it holds |
//! |---|---|
//! | [`params`] | what can be varied, by name |
//! | `rig` | both ends of a request queue over memory that they share |
//! | `ours`, `peers` | the devices |
//! | `load` | a driver that maps and unmaps in batches |
//! | `measure` | times one device under one load, and checks it |
//! | `spread` | table memory a mapping |
//!
//! Every request is a virtio-iommu request in a split ring, and its status is checked. The driver
//! is ours for every device. All devices of a contest take turns in each round.

mod load;
mod measure;
mod ours;
pub mod params;
mod peers;
mod rig;
mod spread;

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use serde_json::json;

use self::{
    load::Load,
    measure::{Attach, Domains, How, OneOf, Pairs, Subject},
    params::{Batch, Form, Implementation, Live, Op, Order, Spread},
};
use super::{
    Benchmark, Interval, Measure, Row,
    clock::Clock,
    ping,
    report::{Against, Figure, Part, Sheet},
    rounds::{self, Rounds, Stop, stopped},
    row::{object, value},
    threads,
};
use crate::{
    list::{List, milliseconds},
    progress::{Kind, Progress},
};

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "MAP and UNMAP of a virtio-iommu",
    parts: &[
        Part {
            of: ("op", &["one-core", "two-cores", "two-domains"]),
            title: "pairs of MAP and UNMAP",
            operation: "a MAP and an UNMAP of a page of 4 KiB through a split ring, statuses checked",
            against: &[Against::PEERS],
            figures: &[
                Figure::new("pairs_per_s", "M/s", 1e6),
                Figure::new("scaling", "scaling", 1.0),
            ],
            ..Part::ALL
        },
        Part {
            of: ("op", &["one-of"]),
            title: "one mapping among many",
            operation: "an UNMAP and a MAP, both ends on one core",
            against: &[Against::PEERS],
            figures: &[
                Figure::new("unmap_ns", "unmap", 1.0).with_half(),
                Figure::new("unmap_ratio_to_fewest", "x fewest", 1.0),
                Figure::new("map_ns", "map", 1.0).with_half(),
                Figure::new("map_ratio_to_fewest", "x fewest", 1.0),
            ],
            ..Part::ALL
        },
        Part {
            of: ("op", &["attach"]),
            title: "a second endpoint joins a domain with many mappings",
            operation: "ATTACH, for each mapping",
            figures: &[Figure::new("attach_ns", "ATTACH", 1.0).with_half()],
            ..Part::ALL
        },
        Part {
            of: ("op", &["memory"]),
            title: "table memory of a domain",
            operation: "MAP",
            figures: &[Figure::new("bytes_per_mapping", "B/mapping", 1.0)],
            ..Part::ALL
        },
    ],
    legend: LEGEND,
};

const LEGEND: &str = "  rows             operation/batch/order of pages, or /number of threads and domains, or /mappings that live
  btreemap         mappings in a B-tree behind one lock, UNMAP looks at all of a domain: cloud-hypervisor's design
  btreemap-range   the same, but UNMAP looks at what lies in its range
  apart            two domains with a device each, too: what they still cost each other is the machine's
  mirror           the endpoint has a table of its own, where all is mapped again
ringfence completes an UNMAP when no thread uses the translation any more; the others cache none.
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench map
    ringfence bench map --op one-core,two-cores --batch 64 --order contiguous
    ringfence bench map --op one-of --live 1k,1m --json map.json

EXIT STATUS:
    0   done
    1   a device did not do what it should have, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// The devices to measure, separated by commas: btreemap is cloud-hypervisor's design,
    /// btreemap-range the same with a better UNMAP.
    #[arg(long = "impl", value_name = "LIST", default_value_t = List::from(&Implementation::ALL[..]))]
    pub implementations: List<Implementation>,

    /// What to measure: `one-core` and `two-cores` (pairs of MAP and UNMAP), `two-domains` (one
    /// thread and two), `one-of` (one mapping among many), `attach` (to a domain with many
    /// mappings), `memory` (table memory a mapping).
    #[arg(long = "op", value_name = "LIST", default_value_t = List::from(&Op::ALL[..]))]
    pub ops: List<Op>,

    /// How many mappings are mapped and unmapped together, up to 1024.
    #[arg(long = "batch", value_name = "LIST", default_value = "1,8,64,256")]
    pub batches: List<Batch>,

    /// How the pages of a batch lie; two-domains takes the first.
    #[arg(long = "order", value_name = "LIST", default_value_t = List::from(&Order::ALL[..]))]
    pub orders: List<Order>,

    /// How many mappings a domain holds, for one-of, attach and memory, up to 4m.
    #[arg(long = "live", value_name = "LIST", default_value = "1k,1m")]
    pub lives: List<Live>,

    /// Rounds.
    #[arg(long, visible_alias = "rounds", value_name = "N", default_value_t = 31,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// How long one measurement runs, milliseconds.
    #[arg(long, value_name = "MS", default_value = "2", value_parser = milliseconds)]
    pub budget: Duration,
}

/// One contest: what is measured in turns.
#[derive(Clone, Copy, Debug)]
struct Cell {
    op: Op,
    batch: Batch,
    order: Order,
}

/// One device under one load of a contest.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Of {
    implementation: Implementation,
    live: usize,
    threads: usize,
    form: Form,
}

impl Options {
    fn cells(&self) -> Vec<Cell> {
        let batches = |op, order| self.batches.iter().map(move |&batch| Cell { op, batch, order });
        let of = |&op: &Op| match op {
            Op::OneCore | Op::TwoCores => {
                self.orders.iter().flat_map(|&order| batches(op, order)).collect()
            }
            Op::TwoDomains => batches(op, self.orders[0]).collect(),
            Op::OneOf | Op::Attach => {
                vec![Cell { op, batch: Batch(1), order: Order::Scattered }]
            }
            Op::Memory => Vec::new(),
        };
        self.ops.iter().flat_map(of).collect()
    }

    fn entrants(&self, op: Op) -> Vec<Of> {
        let lives = match op {
            Op::OneOf | Op::Attach => self.lives.iter().map(|live| live.0).collect(),
            _ => vec![0],
        };
        let most = if op == Op::TwoDomains { 2 } else { 1 };
        let mut all = Vec::new();
        for live in lives {
            for threads in 1..=most {
                let form = Form::Usual;
                let of = |&implementation| Of { implementation, live, threads, form };
                all.extend(self.implementations.iter().map(of));
            }
        }
        let ours = |of: &Of| of.implementation == Implementation::Ringfence;
        let form = match op {
            Op::TwoDomains => Form::Apart,
            Op::Attach => {
                // The others translate by a lookup that takes the endpoint's domain each time.
                all.retain(ours);
                Form::Mirror
            }
            _ => return all,
        };
        let most = all.iter().filter(|of| ours(of) && of.threads == most);
        let too: Vec<Of> = most.map(|&of| Of { form, ..of }).collect();
        all.extend(too);
        all
    }
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        let cpus = threads::cpus();
        let mut benchmark = Benchmark::new("map", self.repeat);
        let clock = Clock::calibrate();
        let two = self.ops.iter().any(|op| matches!(op, Op::TwoCores | Op::TwoDomains));
        let round_trip = || match cpus[..] {
            [a, b, ..] if two => ping::round_trip_ns([a, b]),
            _ => None,
        };
        if two && cpus.len() < 2 {
            benchmark.warnings.push("two threads on one processor: they take turns".to_owned());
        }
        let before = round_trip();
        let expected = |cell: Cell| {
            let each = self.budget.mul_f64(1.3) * (self.repeat + 1);
            each * self.entrants(cell.op).len() as u32
        };
        let how = How { clock: &clock, cpus: &cpus, budget: self.budget };
        let cells = self.cells();
        let all = cells.iter().copied().map(expected).sum();
        let progress = Progress::new(progress, cells.len() as u64, all);
        for cell in cells.into_iter().take_while(|_| !stopped(stop)) {
            progress.begin(&format!("{}, batches of {}", cell.op, cell.batch));
            contest(cell, self, how, stop, &mut benchmark);
            progress.step(expected(cell));
        }
        if self.ops.contains(&Op::Memory) && !stopped(stop) {
            memory(self, &mut benchmark);
        }
        benchmark.settings = object([
            ("budget_ms", (self.budget.as_secs_f64() * 1e3).into()),
            ("cpus", json!(cpus)),
            ("clock", clock.name().into()),
            ("clock_ns", clock.cost_ns.into()),
            ("round_trip_ns", json!([before, round_trip()])),
        ]);
        benchmark.interrupted = stopped(stop);
        Ok(benchmark)
    }
}

fn contest(cell: Cell, options: &Options, how: How<'_>, stop: &Stop, into: &mut Benchmark) {
    let mut failed = |of: &Of, error: anyhow::Error| {
        into.errors.push(format!("{}, {}: {error:#}", of.implementation, cell.op));
    };
    let mut contest = Contest::new(options.entrants(cell.op), |of| {
        let made = subject(cell, *of).and_then(|mut subject| {
            subject.check()?;
            Ok(subject)
        });
        made.map_err(|error| {
            failed(of, error);
            "it failed its check".to_owned()
        })
    });
    // What is compared with two on the first of two CPUs, as one of these is; all else on the last.
    let cpu = if cell.op == Op::TwoDomains { how.cpus[0] } else { how.cpus[how.cpus.len() - 1] };
    let slice = |subject: &mut Box<dyn Subject>, budget| {
        let how = How { budget, ..how };
        // Those of several threads bind these themselves.
        threads::bound_to(cpu, || subject.sample(how))
    };
    let measure = |_: &_, subject: &mut Box<dyn Subject>, _| {
        // The processor's caches hold the others' data.
        slice(subject, options.budget / 4)?;
        slice(subject, options.budget)
    };
    contest.run(options.repeat, stop, measure, &mut failed);
    for entrant in &mut contest.0 {
        if let Ok(Err(error)) = entrant.subject.as_mut().map(|subject| subject.check()) {
            failed(&entrant.key, error);
            entrant.fail();
        }
    }
    into.rows.extend(contest.0.iter().map(|one| row(cell, one, &contest)));
}

type Entrant = rounds::Entrant<Of, Box<dyn Subject>>;
type Contest = rounds::Contest<Of, Box<dyn Subject>>;

fn row(Cell { op, batch, order }: Cell, one: &Entrant, contest: &Contest) -> Row {
    let (own, Of { implementation, live, threads, form }) = (&one.taken, one.key);
    let mut params =
        object([("op", op.name().into()), ("live", live.into()), ("form", form.name().into())]);
    let mut name = match op {
        Op::OneOf | Op::Attach => format!("{op}/{}", Live(live)),
        Op::TwoDomains => format!("{op}/{batch}/{threads}"),
        _ => format!("{op}/{batch}/{order}"),
    };
    if form != Form::Usual {
        name = format!("{name}/{}", form.name());
    }
    let mut figures = object([("operations", own.sum("operations").into())]);
    let ns = &own["ns"];
    match op {
        Op::OneOf => {
            let least = contest.0.iter().map(|one| one.key.live).min().unwrap_or(live);
            let fewest = contest.taken(&Of { live: least, ..one.key });
            figures.extend(object([
                ("map_ns", value(own["map"].interval())),
                ("unmap_ns", value(own["unmap"].interval())),
                ("map_ratio_to_fewest", value(own["map"].ratio_to(&fewest["map"]))),
                ("unmap_ratio_to_fewest", value(own["unmap"].ratio_to(&fewest["unmap"]))),
            ]));
        }
        Op::Attach => figures.extend(object([("attach_ns", value(own["map"].interval()))])),
        _ => {
            params.extend(object([
                ("batch", batch.0.into()),
                ("order", order.name().into()),
                ("threads", threads.into()),
            ]));
            figures.extend(object([("pairs_per_s", value(rate(ns)))]));
        }
    }
    if op == Op::TwoDomains && threads == 2 {
        let alone = contest.taken(&Of { threads: 1, form: Form::Usual, ..one.key });
        figures.extend(object([("scaling", value(alone["ns"].ratio_to(ns)))]));
    }
    let ours = contest.taken(&Of { implementation: Implementation::Ringfence, ..one.key });
    let out = one.subject.as_ref().err();
    let mut row = ns.row((name, implementation.name()), params, &ours["ns"], out);
    row.figures.extend(figures);
    row
}

/// Makes a device to measure.
fn subject(cell: Cell, of: Of) -> Result<Box<dyn Subject>> {
    // All requests of a load fit: there are three batches at most, and each request takes two
    // descriptors.
    let size = (8 * cell.batch.0).next_power_of_two().clamp(256, 8192) as u16;
    match (of.implementation, of.form) {
        (Implementation::Ringfence, form) if cell.op == Op::Attach => {
            Ok(Box::new(Attach::new(of.live, form == Form::Mirror)?))
        }
        (Implementation::Ringfence, Form::Apart) => {
            of_device(cell, of, |id| ours::Machine::new(id).rig(size, id))
        }
        (Implementation::Ringfence, _) => {
            let machine = ours::Machine::new(of.threads as u32);
            of_device(cell, of, |id| machine.rig(size, id))
        }
        (peer, _) => {
            let machine = peers::Machine::new(peer == Implementation::BTreeMap);
            of_device(cell, of, |id| machine.rig(size, id))
        }
    }
}

fn of_device<S: rig::Server + 'static>(
    Cell { op, batch, order }: Cell,
    of: Of,
    rig: impl Fn(u32) -> Result<rig::Rig<S>>,
) -> Result<Box<dyn Subject>> {
    let two = op == Op::TwoCores;
    let one = |id| Ok(Pairs { rig: rig(id)?, load: Load::new(batch.0, order), two });
    Ok(match op {
        Op::OneCore | Op::TwoCores | Op::TwoDomains => {
            Box::new(Domains((1..=of.threads as u32).map(one).collect::<Result<_>>()?))
        }
        Op::OneOf => Box::new(OneOf::new(rig(1)?, of.live)?),
        Op::Attach | Op::Memory => return Err(anyhow!("not measured of this device")),
    })
}

/// The rows of table memory.
fn memory(options: &Options, into: &mut Benchmark) {
    let live = options.lives.iter().map(|live| live.0).max().unwrap_or(0);
    for spread in Spread::ALL {
        let mut row = Row {
            name: format!("{}/{spread}", Op::Memory),
            implementation: Implementation::Ringfence.to_string(),
            ..Row::default()
        };
        row.params = object([("op", Op::Memory.name().into()), ("spread", spread.name().into())]);
        if let Err(error) = spread::measure(spread, live, &mut row) {
            into.errors.push(format!("table memory, {spread}: {error:#}"));
            row.note = Some("not measured: it failed".to_owned());
        }
        into.rows.push(row);
    }
}

/// Operations a second.
fn rate(ns: &Rounds) -> Interval {
    let Interval { median, lo, hi } = ns.interval();
    // The interval of few and unlike rounds may begin below zero.
    let a_second = |ns: Option<f64>| ns.filter(|&ns| ns > 0.0).map(|ns| 1e9 / ns);
    Interval { median: a_second(median), lo: a_second(hi), hi: a_second(lo) }
}

#[cfg(test)]
mod tests {
    use super::{super::options, *};

    fn tiny() -> Options {
        options("--batch 1,8,100 --live 10,2k --repeat 2 --budget 0.1")
    }

    #[test]
    fn every_device_has_a_row_for_every_load() {
        let benchmark = tiny().run(Kind::Silent, &Stop::default()).unwrap();
        assert_eq!(benchmark.errors, Vec::<String>::new());
        let all = Implementation::ALL.len();
        assert_eq!(benchmark.rows.len(), (2 * 6 + 3 * 2 + 2) * all + 3 + 2 * 2 + Spread::ALL.len());
        for row in &benchmark.rows {
            assert!(row.ns_per_op.median.is_some_and(|ns| ns > 0.0), "{row:?}");
            assert_eq!(row.note, None);
            if row.implementation == "ringfence" {
                assert_eq!(row.ratio_to_ringfence, Some(1.0));
            }
            let scaling = row.params["op"] == "two-domains" && row.params["threads"] == 2;
            assert_eq!(row.figures.contains_key("scaling"), scaling);
            if row.params["op"] == "memory" {
                assert!(row.figures["bytes_per_mapping"].as_f64().unwrap() > 8.0);
            }
        }
    }

    #[test]
    fn stopped_at_once_it_has_no_rows() {
        let benchmark = tiny().run(Kind::Silent, &Stop::new(true.into())).unwrap();
        assert!(benchmark.interrupted && benchmark.rows.is_empty());
    }
}
