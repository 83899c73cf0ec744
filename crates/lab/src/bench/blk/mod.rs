//! Our block back end with and without a device IOTLB, under the same load.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | what is measured: what requests do, how many at a time, by what addresses |
//! | `load` | one measurement between two processes |
//! | `rows` | what the rounds tell |
//! | [`table`] | all of it for a terminal |
//!
//! The driver has a CPU, and all of the back end has the other: its worker, its server, and what the
//! kernel does for it. The disk is a file, which the back end reaches through io_uring.

pub mod case;
mod load;
mod rows;
pub mod table;

use std::{
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use ringfence_devices::blk::load::{BLOCK, Content, MOST_QUEUES};

use self::{
    case::{Case, Choice},
    load::Window,
};
use super::{
    Benchmark,
    net::{Folder, object},
    ping,
    process::Process,
    threads,
};
use crate::{
    progress::{Kind as Show, Progress},
    run::Usage,
};

/// Blocks of the disk: 64 MiB, which the page cache holds.
const BLOCKS: u64 = 1 << 14;
/// After a window that writes, one of so many blocks of the disk is looked at.
const LOOK: usize = 61;
/// What a measurement takes beside its window.
const OVERHEAD: Duration = Duration::from_millis(140);

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cases.
    pub choice: Choice,
    /// Where the file lies that is the disk; `None`: in memory.
    pub folder: Option<PathBuf>,
    /// Rounds.
    pub repeat: u32,
    /// How long a window is.
    pub window: Duration,
    /// How to show progress.
    pub progress: Show,
}

/// One window of a round, or why there is none.
#[derive(Clone, Debug)]
struct Measured {
    window: Result<Window, String>,
    /// Round trip of a cache line before and after, nanoseconds.
    ping: [Option<f64>; 2],
}

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// What was asked for cannot be done: [`Usage`]. Or the back end does not start.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark> {
    let cases = options.choice.cases();
    if cases.is_empty() {
        return Err(Usage("there is nothing to measure".into()).into());
    }
    let cpus = threads::cpus();
    let cpus = [cpus[0], *cpus.last().expect("at least one")];
    let folder = Folder::new()?;
    let at = match &options.folder {
        Some(at) => at.as_path(),
        None => Some(Path::new("/dev/shm")).filter(|at| at.is_dir()).unwrap_or(&folder.0),
    };
    let mut benchmark = Benchmark::new("blk", options.repeat);
    benchmark.settings = object([
        ("window_s", options.window.as_secs_f64().into()),
        ("block_bytes", BLOCK.into()),
        ("disk_bytes", (BLOCKS * BLOCK as u64).into()),
        ("disk_folder", at.display().to_string().into()),
        ("backend_cpu", cpus[0].into()),
        ("driver_cpu", cpus[1].into()),
    ]);
    if cpus[0] == cpus[1] {
        let why = "there is one CPU only: driver and back end take turns, and figures mean little";
        benchmark.warnings.push(why.to_owned());
    }
    let mut device = Device::start(&folder.0, at, cpus[0])?;
    let total = u64::from(options.repeat) * cases.len() as u64;
    let step = options.window + OVERHEAD;
    let expected = step * u32::try_from(total).unwrap_or(u32::MAX);
    let progress = Progress::new(options.progress, total, expected);
    for warning in &benchmark.warnings {
        progress.note(&format!("warning: {warning}"));
    }
    let mut found = vec![Vec::new(); cases.len()];
    'rounds: for round in 1..=options.repeat {
        for (case, found) in cases.iter().zip(&mut found) {
            if stop.load(Ordering::Relaxed) {
                break 'rounds;
            }
            progress.begin(&format!("{}, round {round} of {}", case.name(), options.repeat));
            found.push(device.measure(case, options.window, cpus));
            progress.step(step);
        }
    }
    progress.finish();
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    rows::fill(&mut benchmark, &cases, &found);
    Ok(benchmark)
}

/// A running `ringfence blk`, and what its disk holds.
struct Device {
    process: Process,
    socket: PathBuf,
    disk: File,
    image: Image,
    content: Content,
}

/// The file that is the disk, which goes with this.
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        // What cannot be removed stays.
        let _ = fs::remove_file(&self.0);
    }
}

impl Device {
    fn start(folder: &Path, at: &Path, cpu: usize) -> Result<Device> {
        let image = Image(at.join(format!("ringfence-bench-{}.img", std::process::id())));
        let path = image.0.display().to_string();
        let disk = File::options().read(true).write(true).create_new(true).open(&image.0);
        let disk = disk.with_context(|| format!("making {path}"))?;
        let content = Content::new(BLOCKS);
        content.fill(&disk).with_context(|| format!("filling {path}"))?;
        // What is written back meanwhile would be measured, too.
        disk.sync_all().with_context(|| format!("writing {path}"))?;
        let program = std::env::current_exe().context("where this program is")?;
        let socket = folder.join("ringfence.sock");
        let (queues, listen) = (MOST_QUEUES.to_string(), socket.display().to_string());
        let arguments =
            ["blk", "--image", &path, "--queues", &queues, "--log", "info", "--socket", &listen];
        let arguments: Vec<String> = arguments.map(str::to_owned).into();
        let process =
            Process::start("ringfence blk", &program, &arguments, Some(cpu), &socket, false)?;
        process.pause()?;
        Ok(Device { process, socket, disk, image, content })
    }

    /// One window, with the probe before and after it.
    fn measure(&mut self, case: &Case, length: Duration, cpus: [usize; 2]) -> Measured {
        let before = ping::round_trip_ns(cpus);
        let window = threads::bound_to(cpus[1], || self.window(case, length));
        let ping = [before, ping::round_trip_ns(cpus)];
        let window = window.map_err(|error| {
            format!("{error:#} (it said: {})", self.process.last_words())
        });
        Measured { window, ping }
    }

    fn window(&mut self, case: &Case, length: Duration) -> Result<Window> {
        self.process.resume()?;
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.with_context(|| format!("connecting to {}", self.socket.display()))?;
        let window = load::measure(stream, &self.process, case, length, &mut self.content);
        // It learns that the connection has ended before it is stopped.
        std::thread::sleep(Duration::from_millis(10));
        self.process.pause()?;
        let mut window = match window {
            Ok(window) => window,
            Err(error) => {
                // What was under way may have been written, or not.
                self.content = Content::new(BLOCKS);
                let refilled = File::options().write(true).open(&self.image.0);
                self.content.fill(&refilled.context("filling the disk anew")?)?;
                return Err(error);
            }
        };
        if case.load().write {
            window.wrong_on_disk =
                self.content.wrong_in(&self.disk, LOOK).context("looking at the disk")?;
        }
        Ok(window)
    }
}
