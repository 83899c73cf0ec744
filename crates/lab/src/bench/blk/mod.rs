//! Our block back end with and without a device IOTLB, under the same load.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | what is measured: what requests do, how many at a time, by what addresses |
//! | `device` | a back end's process with its driver and its disk |
//! | `load` | one measurement between two processes |
//! | `path` | the data path by itself, in one thread |
//! | `rows` | the rows that the rounds give |
//! | [`table`] | all of it for a terminal |
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
pub mod table;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::load::blk::{BLOCK, Tally};
use anyhow::Result;

use self::{
    case::{Case, Choice, Part},
    device::{BLOCKS, Device, Places},
};
use super::{
    Benchmark,
    process::Folder,
    rounds,
    row::object,
    window::{self, Measured},
};
use crate::{progress::Kind as Show, run::Usage};

/// What a measurement takes besides its window.
const OVERHEAD: Duration = Duration::from_millis(14);

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cases.
    pub choice: Choice,
    /// Where the disks' files are; `None`: disks that are read in the folder for temporary files,
    /// disks that are written in memory.
    pub folder: Option<PathBuf>,
    /// Rounds.
    pub repeat: u32,
    /// How long a window is.
    pub window: Duration,
    /// How to show progress.
    pub progress: Show,
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

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// [`Usage`]: the options cannot be carried out. Or there is no room for a disk.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark> {
    let cases = options.choice.cases();
    let path = options.choice.parts.contains(&Part::Path);
    if cases.is_empty() && !path {
        return Err(Usage("there is nothing to measure".into()).into());
    }
    let temporary = std::env::temp_dir();
    let memory = Some(Path::new("/dev/shm")).filter(|at| at.is_dir()).unwrap_or(&temporary);
    let read = options.folder.as_deref().unwrap_or(&temporary);
    let written = options.folder.as_deref().unwrap_or(memory);
    let mut benchmark = Benchmark::new("blk", options.repeat);
    let cpus = window::cpus(&mut benchmark);
    benchmark.settings = object([
        ("window_s", options.window.as_secs_f64().into()),
        ("block_bytes", BLOCK.into()),
        ("disk_bytes", (BLOCKS * BLOCK as u64).into()),
        ("read_folder", read.display().to_string().into()),
        ("written_folder", written.display().to_string().into()),
        ("backend_cpu", cpus[0].into()),
        ("driver_cpu", cpus[1].into()),
    ]);
    let folder = Folder::new()?;
    let places = Places::new(&folder.0, read, written)?;
    let total = u64::from(options.repeat) * cases.len() as u64;
    let step = options.window + OVERHEAD;
    let progress = window::progress(options.progress, total, step, &benchmark);
    let mut outcomes = Vec::new();
    for contest in cases.chunk_by(|a, b| a.off() == b.off()) {
        let mut devices: Vec<Device> =
            contest.iter().map(|case| Device::new(case, &places, cpus)).collect();
        for round in 1..=options.repeat {
            for device in rounds::turns(devices.iter_mut(), round) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let name = device.name();
                progress.begin(&format!("{name}, round {round} of {}", options.repeat));
                device.measure(options.window);
                progress.step(step);
            }
        }
        outcomes.extend(devices.into_iter().map(Device::end));
    }
    rows::fill(&mut benchmark, &outcomes);
    if path {
        let how = (options.repeat, options.window);
        let begin = |name: &str| progress.begin(name);
        path::measure(&mut benchmark, &options.choice.kinds, how, stop, begin)?;
    }
    progress.finish();
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    Ok(benchmark)
}
