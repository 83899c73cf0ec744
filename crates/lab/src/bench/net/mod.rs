//! Network back ends: ours and DPDK's, with and without a device IOTLB, under the same load.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | what is measured: which way packets go, and by what addresses |
//! | `load` | one measurement |
//! | `backend`, `testpmd` | the back ends |
//! | `notified` | our device behind our own IOMMU, in one process |
//! | `rows` | the rows that the rounds give |
//!
//! The driver and the back end have a CPU each, and poll. Back ends take turns: those that are not
//! measured are stopped.

pub(super) mod backend;
pub mod case;
mod load;
mod notified;
pub(super) mod rows;
mod testpmd;

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;

use super::{
    Benchmark, Measure,
    process::{self, Process, last_words},
    report::{self, Against, Figure, Sheet},
    rounds::{Stop, stopped, turns},
    row::object,
    window::{self, Measured},
};
use crate::{
    list::{List, seconds},
    progress::Kind,
    run::Usage,
};
use backend::End;
use case::{Case, Direction, Entry, Implementation, Part, Ring, Topic};

/// The most that may be lost: 0.005 %.
const MOST_LOST: f64 = 5e-5;
/// How long a back end may take to log why a connection ended.
const REASON: Duration = Duration::from_millis(300);
/// Time of a measurement besides its window.
const OVERHEAD: Duration = Duration::from_millis(160);

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "network back ends, driver and back end on a CPU each, frames of 64 bytes",
    parts: &[report::Part {
        title: "frames",
        operation: "a frame",
        against: &[Against::PEERS, Against::new("ratio_to_off", "part", "against no IOMMU")],
        figures: &[
            Figure::new("packets_per_s", "Mpps", 1e6).with_half(),
            Figure::new("ratio_to_off", "x off", 1.0).with_half(),
            Figure::new("ratio_to_dpdk", "x dpdk", 1.0),
            Figure::new("lost", "lost", 1.0),
            Figure::new("ping_ns", "ping", 1.0),
            Figure::new("windows_short_of_cpu", "short", 1.0),
            Figure::new("windows_placed_elsewhere", "moved", 1.0),
            Figure::new("windows_failed", "failed", 1.0),
            Figure::new("messages_per_s_single", "upd/s 1", 1.0),
            Figure::new("messages_per_s_many", "64", 1.0),
            Figure::new("messages_per_packet", "msg", 1.0),
            Figure::new("ratio_to_messages", "x msg", 1.0),
        ],
        ..report::Part::ALL
    }],
    legend: LEGEND,
};

const LEGEND: &str = "  rows       direction/ring/addresses: taken from the driver (tx), given to it (rx), both (loop)
  x off      against the same back end without an IOMMU, or without a proxy
  x dpdk     against DPDK's with the same addresses
  lost       frames; a window may lose 0.005 % of them
  ping       round trip of a cache line between the CPUs, ns; it shows where the host has put them
  short      windows in which an end had its CPU for less than 95 %; the medians include them
  moved      windows in which the CPUs lay elsewhere than in most; the medians include them
  failed     windows without a result; the medians leave them out
  4k, 2m     how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each use of a buffer has a page of its own, invalidated after it: the back end misses, or the driver pushes
  notified   as dynamic, with Ringfence as the IOMMU, in the device's process; a mapping is of 64 neighbouring buffers,
             of 64 scattered ones, or of one (each); notified off: the same driver and device without an IOMMU
  direct, proxy
             the driver at a back end that leaves its CPU while it has nothing to do, or at a proxy that shares that CPU
  upd/s      UPDATEs with their replies that the socket moves: with one in flight, and 64
  msg        messages of a frame: misses, UPDATEs and INVALIDATEs with their replies; x msg: frames a second times that,
             against the messages that the socket moves with 64 in flight
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench net
    ringfence bench net --only off,static --direction loop --entries 4k,2m --seconds 1
    ringfence bench net --only dynamic --direction tx --repeat 11
    ringfence bench net --only notified --seconds 1
    ringfence bench net --impl dpdk --json dpdk.json

EXIT STATUS:
    0   done
    1   ringfence net failed or changed a frame, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// What to measure, separated by commas: off (no IOMMU), static (buffers are mapped once),
    /// dynamic (each use of a buffer has its own address), notified (the same, mapped through the
    /// DMA API, with Ringfence as the IOMMU in the device's process), proxy (behind `ringfence
    /// proxy`, and not).
    #[arg(long = "only", value_name = "LIST", default_value_t = List::from(&Part::ALL[..]))]
    pub parts: List<Part>,

    /// The direction of frames: tx (the driver sends), rx, loop (what it sends comes back).
    #[arg(long = "direction", value_name = "LIST", default_value_t = List::from(&Direction::ALL[..]))]
    pub directions: List<Direction>,

    /// How much an entry of the static part covers: powers of two from 4k to 1g.
    #[arg(long, value_name = "LIST", default_value = "1g,2m,64k,4k")]
    pub entries: List<Entry>,

    /// Formats of rings: packed with the smallest entries only.
    #[arg(long = "ring", value_name = "LIST", default_value_t = List::from(&Ring::ALL[..]))]
    pub rings: List<Ring>,

    /// The back ends to measure.
    #[arg(long = "impl", value_name = "LIST", default_value_t = List::from(&Implementation::ALL[..]))]
    pub implementations: List<Implementation>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// The length of a window, seconds.
    #[arg(long = "seconds", value_name = "S", default_value = "0.2", value_parser = seconds)]
    pub window: Duration,
}

/// What was measured of a case with one implementation.
#[derive(Debug)]
struct Outcome {
    case: Case,
    implementation: Implementation,
    /// By rounds.
    windows: Vec<Measured>,
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        let cases = self.cases();
        if cases.is_empty() {
            return Err(Usage(
            "there is nothing to measure: with packed rings, no dynamic part and no notified one"
                .into(),
        )
        .into());
        }
        let mut benchmark = Benchmark::new("net", self.repeat);
        let cpus = window::cpus(&mut benchmark);
        benchmark.settings = object([
            ("window_s", self.window.as_secs_f64().into()),
            ("frame_bytes", 64.into()),
            ("ring", crate::load::net::RING.into()),
            ("backend_cpu", cpus[0].into()),
            ("driver_cpu", cpus[1].into()),
            ("most_lost", MOST_LOST.into()),
            ("messages_in_flight", load::DEPTH.into()),
        ]);
        let folder = process::folder()?;
        let mut backends = Vec::new();
        for &implementation in self.implementations.iter() {
            let proxies = self.parts.contains(&Part::Proxy);
            let started = match implementation {
                Implementation::Ringfence => backend::ringfence(folder.path(), cpus[0], proxies),
                Implementation::Dpdk if testpmd::is_there() => {
                    backend::testpmd(folder.path(), cpus[0])
                }
                Implementation::Dpdk => {
                    Err(anyhow!("DPDK's testpmd is not installed: apt-get install dpdk-dev"))
                }
            };
            let started = started.map_err(|error| format!("{error:#}"));
            if let Err(why) = &started {
                benchmark.warnings.push(format!("{implementation} is not measured: {why}"));
            }
            backends.push((implementation, started));
        }
        let outcomes = cases.iter().flat_map(|&case| {
            let all = self.implementations.iter().copied();
            let some = all.filter(move |implementation| case.is_for(*implementation));
            some.map(move |implementation| Outcome { case, implementation, windows: Vec::new() })
        });
        let mut outcomes: Vec<Outcome> = outcomes.collect();
        let total = u64::from(self.repeat) * outcomes.len() as u64;
        let step = self.window + OVERHEAD;
        let progress = window::progress(progress, total, step, &benchmark);
        for round in 1..=self.repeat {
            for contest in outcomes.chunk_by_mut(|a, b| a.case == b.case) {
                for Outcome { case, implementation, windows } in turns(contest, round, stop) {
                    let (name, repeat) = (case.name(), self.repeat);
                    progress.begin(&format!("{name}, {implementation}, round {round} of {repeat}"));
                    let backend = backends.iter_mut().find(|(one, _)| one == implementation);
                    let (_, backend) = backend.expect("one of each");
                    windows.push(measure(backend, case, self.window, cpus));
                    progress.step(step);
                }
            }
        }
        benchmark.interrupted = stopped(stop);
        rows::fill(&mut benchmark, &outcomes);
        Ok(benchmark)
    }
}

/// One window.
fn measure(
    ends: &mut Result<Vec<End>, String>,
    case: &Case,
    length: Duration,
    cpus: [usize; 2],
) -> Measured {
    let measured = match (case.topic, ends) {
        // A device process of its own, which lives as long as the window.
        (Topic::Notified(mapped), _) => {
            window::measured(cpus, || notified::measure(mapped, case.direction, length, cpus[0]))
        }
        (_, Err(why)) => Err(anyhow!("{why}")),
        (_, Ok(ends)) => {
            let end = backend::choose(ends, case);
            window::measured(cpus, || {
                end.processes.iter_mut().try_for_each(Process::resume)?;
                let window = load::measure(end, case, length).map_err(|error| {
                    // It logs the reason when its rings have stopped, after the connection was closed.
                    std::thread::sleep(REASON);
                    anyhow!("{error:#}{}", last_words(&end.processes))
                });
                // Let it see the end of the connection before it is stopped.
                std::thread::sleep(Duration::from_millis(10));
                end.processes.iter().try_for_each(Process::pause)?;
                window
            })
        }
    };
    measured.unwrap_or_else(|error| Measured::failed(format!("{error:#}")))
}
