//! Our block back end with and without a device IOTLB, under the same load.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | what is measured: what requests do, how many at a time, by what addresses |
//! | `device` | a back end's process with its driver and its disk |
//! | `load` | one measurement between two processes |
//! | `path` | the data path by itself, in one thread |
//! | `rows` | the rows that the rounds give |
//!
//! The driver has a CPU, and all of the back end has the other: its worker, its server, and what
//! the kernel does for it. Each case has a process of its own, which is stopped while others are
//! measured: so windows can be short and alternate quickly, and what slows the machine slows the
//! whole round.
//!
//! The disk is a file that the page cache holds, which the back end reaches through io_uring. That is
//! fastest where the kernel need not hand a request to a thread: reads from a file of ext4, say, and
//! not from one in tmpfs. Writes are handed over in any case, and cost least in tmpfs.

pub mod case;
mod device;
mod load;
mod path;
mod rows;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use crate::load::blk::{BLOCK, Content, Tally};
use anyhow::Result;
use clap::Args;

use self::{
    case::{Case, Depth, Entry, Kind, Part, Queues, Ring},
    device::{BLOCKS, Device, Places, image},
};
use super::{
    Benchmark, Measure, process,
    report::{self, Against, Figure, Sheet},
    rounds::{Stop, stopped, turns},
    row::object,
    window::{self, Measured},
};
use crate::{
    list::{List, seconds},
    progress::Kind as Show,
    run::Usage,
};

/// Time of a measurement besides its window.
const OVERHEAD: Duration = Duration::from_millis(14);

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "block back end, driver and back end on a CPU each, requests of 4 KiB",
    parts: &[
        report::Part {
            of: ("part", &["off", "static", "dynamic", "buffers", "sandbox", "proxy"]),
            title: "requests",
            operation: "a request",
            against: &[Against::new("ratio_to_off", "part", "against the base")],
            figures: &[
                Figure::new("requests_per_s", "kIOPS", 1e3).with_half(),
                Figure::new("ratio_to_off", "x off", 1.0).with_half(),
                Figure::new("backend_cpu_us", "cpu", 1.0).with_half(),
                Figure::new("cpu_ratio_to_off", "x off", 1.0).with_half(),
                Figure::new("misses_per_request", "misses", 1.0),
                Figure::new("ping_ns", "ping", 1.0),
                Figure::new("windows_short_of_cpu", "short", 1.0),
                Figure::new("windows_placed_elsewhere", "moved", 1.0),
                Figure::new("windows_failed", "failed", 1.0),
            ],
            ..report::Part::ALL
        },
        report::Part {
            of: ("part", &["path"]),
            title: "data path in one thread",
            operation: "a request",
            against: &[Against::new("ratio_to_without", "iommu", "against no IOTLB")],
            figures: &[Figure::new("ratio_to_without", "x without", 1.0).with_half()],
            ..report::Part::ALL
        },
    ],
    legend: LEGEND,
};

const LEGEND: &str = "  rows       kind/ring/queues x requests in flight in each/addresses; random places of a file that the page cache holds;
             of each block that is read the first and last words are checked, of some all bytes, and after writes the
             file itself
  x off      against the same requests without an IOMMU, with the guest's buffers, unconfined, or without a proxy
  cpu        CPU time of the back end for a request, µs, the kernel's work for it included; x off as above
  ping       round trip of a cache line between the CPUs, ns; it shows where the host has put them
  short      windows in which the driver had its CPU for less than 95 %; the medians include them
  moved      windows in which the CPUs lay elsewhere than in most; the medians include them
  failed     windows without a result; the medians leave them out
  4k, 2m     how much an UPDATE covers: of entries that a back end can merge, or cannot
  dynamic    each request has two pages of its own (data; header, status and table), invalidated when it is done: the
             back end misses, or the driver pushes
  own, guest where data is while the disk has it: in buffers of the service's own, or in the guest's
  misses     of the back end's IOTLB, for each request
  direct, proxy
             the driver at the back end, or at a proxy before it, which then shares the back end's CPU
  asleep     all sleep whenever they wait, and the driver has a notification for each request
  path       what the device takes for a request, and how fast that is against the same code compiled without an IOTLB
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench blk
    ringfence bench blk --only off,static --depth 128 --repeat 101
    ringfence bench blk --only off,dynamic --kind read --queues 1
    ringfence bench blk --ring packed --disk /var/tmp --json blk.json

EXIT STATUS:
    0   done
    1   a request failed, a block was not what it should be, or Ctrl-C
    2   wrong usage: nothing was run")]
pub struct Options {
    /// What to measure, separated by commas: off (no IOMMU), static (buffers are mapped once),
    /// dynamic (each request has its own addresses), buffers (data in the service's own buffers,
    /// and in the guest's, with requests of 4 KiB and of 64), sandbox (confined, and not), proxy
    /// (behind `ringfence proxy`, and not, requests of two sizes), path (the data path alone,
    /// compiled with an IOTLB and without).
    #[arg(long = "only", value_name = "LIST", default_value_t = List::from(&Part::ALL[..]))]
    pub parts: List<Part>,

    /// What requests do.
    #[arg(long = "kind", value_name = "LIST", default_value_t = List::from(&Kind::ALL[..]))]
    pub kinds: List<Kind>,

    /// Requests in flight in each queue, up to 256.
    #[arg(long = "depth", value_name = "LIST", default_value = "1,128")]
    pub depths: List<Depth>,

    /// Numbers of queues: 1, 2 [default: 1,2; with one request in flight, 1].
    #[arg(long, value_name = "LIST")]
    pub queues: Option<List<Queues>>,

    /// How much an entry of the static part covers: powers of two from 4k to 1g.
    #[arg(long, value_name = "LIST", default_value = "2m,4k")]
    pub entries: List<Entry>,

    /// Formats of rings: split, packed.
    #[arg(long = "ring", value_name = "LIST", default_value = "split")]
    pub rings: List<Ring>,

    /// Where to put the files of the disks, of 16 MiB each [default: for reads, the folder for
    /// temporary files; for writes, /dev/shm].
    #[arg(long = "disk", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 21,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// The length of a window, seconds.
    #[arg(long = "seconds", value_name = "S", default_value = "0.05", value_parser = seconds)]
    pub window: Duration,
}

/// What was measured of a case.
#[derive(Debug)]
struct Outcome {
    case: Case,
    /// By rounds.
    windows: Vec<Measured>,
    /// What became of all requests.
    tally: Tally,
    /// Blocks of the disk that hold something else than was written, of those that were checked.
    wrong_on_disk: u64,
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Show, stop: &Stop) -> Result<Benchmark> {
        let cases = self.cases();
        let path = self.parts.contains(&Part::Path);
        if cases.is_empty() && !path {
            return Err(Usage("there is nothing to measure".into()).into());
        }
        let temporary = std::env::temp_dir();
        let memory = Some(Path::new("/dev/shm")).filter(|at| at.is_dir()).unwrap_or(&temporary);
        let read = self.folder.as_deref().unwrap_or(&temporary);
        let written = self.folder.as_deref().unwrap_or(memory);
        let mut benchmark = Benchmark::new("blk", self.repeat);
        let cpus = window::cpus(&mut benchmark);
        benchmark.settings = object([
            ("window_s", self.window.as_secs_f64().into()),
            ("block_bytes", BLOCK.into()),
            ("disk_bytes", (BLOCKS * BLOCK as u64).into()),
            ("read_folder", read.display().to_string().into()),
            ("written_folder", written.display().to_string().into()),
            ("backend_cpu", cpus[0].into()),
            ("driver_cpu", cpus[1].into()),
        ]);
        let folder = process::folder()?;
        let read = image(read, &Content::new(BLOCKS))?;
        let places = Places { sockets: folder.path(), read, written };
        let total = u64::from(self.repeat) * cases.len() as u64;
        let step = self.window + OVERHEAD;
        let progress = window::progress(progress, total, step, &benchmark);
        let mut outcomes = Vec::new();
        for contest in cases.chunk_by(|a, b| a.off() == b.off()) {
            let mut devices: Vec<Device> =
                contest.iter().map(|case| Device::new(case, &places, cpus)).collect();
            for round in 1..=self.repeat {
                for device in turns(devices.iter_mut(), round, stop) {
                    let name = device.name();
                    progress.begin(&format!("{name}, round {round} of {}", self.repeat));
                    device.measure(self.window);
                    progress.step(step);
                }
            }
            outcomes.extend(devices.into_iter().map(Device::end));
        }
        rows::fill(&mut benchmark, &outcomes);
        if path {
            let how = (self.repeat, self.window);
            let begin = |name: &str| progress.begin(name);
            path::measure(&mut benchmark, &self.kinds, how, stop, begin)?;
        }
        benchmark.interrupted = stopped(stop);
        Ok(benchmark)
    }
}
