//! A back end's process with its driver and its disk.

use std::{os::unix::net::UnixStream, path::Path, time::Duration};

use crate::load::blk::{BlkLoad, Content, Tally};
use anyhow::{Context, Result};
use ringfence_run::worker::Notify;
use tempfile::NamedTempFile;

use super::{
    Outcome,
    case::{Case, Kind, Topic},
    load,
};
use crate::bench::{
    net::backend,
    process::{Process, last_words},
    threads,
    window::{Measured, measured},
};

/// Blocks of a disk: 16 MiB, which the page cache holds. The less of the processor's caches they
/// take, the more of the time is the back end's.
pub(super) const BLOCKS: u64 = 1 << 12;
/// One in so many blocks of a disk that was written is checked.
const LOOK: usize = 3;

/// A file that is a disk, removed when this is dropped.
pub(super) fn image(at: &Path, content: &Content) -> Result<NamedTempFile> {
    let file = tempfile::Builder::new().prefix("ringfence-bench-").suffix(".img").tempfile_in(at);
    let file = file.with_context(|| format!("making a disk in {}", at.display()))?;
    // Write-back during a measurement would be measured, too.
    let filled = content.fill(file.as_file()).and_then(|()| file.as_file().sync_all());
    filled.with_context(|| format!("filling {}", file.path().display()))?;
    Ok(file)
}

/// Where files are made.
pub(super) struct Places<'a> {
    pub(super) sockets: &'a Path,
    /// The disk of all devices that only read.
    pub(super) read: NamedTempFile,
    /// Where the other devices' disks are.
    pub(super) written: &'a Path,
}

/// A device of a case, and its measurements.
pub(super) struct Device {
    outcome: Outcome,
    /// `None` once it has failed.
    running: Option<Running>,
    cpus: [usize; 2],
}

/// A running `ringfence blk` with its driver.
struct Running {
    load: BlkLoad,
    /// The back end, and its proxy if there is one.
    processes: Vec<Process>,
    /// The disk that it writes.
    image: Option<NamedTempFile>,
}

impl Device {
    /// Starts a back end for a case, which is stopped until it is measured.
    pub(super) fn new(case: &Case, places: &Places<'_>, cpus: [usize; 2]) -> Device {
        let (windows, tally) = (Vec::new(), Tally::default());
        let outcome = Outcome { case: *case, windows, tally, wrong_on_disk: 0 };
        let mut device = Device { outcome, running: None, cpus };
        match Running::start(case, places, cpus) {
            Ok(running) => device.running = Some(running),
            Err(error) => device.fail(&error),
        }
        device
    }

    pub(super) fn name(&self) -> String {
        self.outcome.case.name()
    }

    fn fail(&mut self, error: &anyhow::Error) {
        let words = self.running.take().map(|running| last_words(&running.processes));
        let words = words.unwrap_or_default();
        self.outcome.windows.push(Measured::failed(format!("{error:#}{words}")));
    }

    /// One window.
    pub(super) fn measure(&mut self, length: Duration) {
        let Some(running) = &mut self.running else { return };
        let measured = measured(self.cpus, || {
            running.processes.iter_mut().try_for_each(Process::resume)?;
            let window = load::measure(&mut running.load, &running.processes, length)?;
            running.processes.iter().try_for_each(Process::pause)?;
            Ok(window)
        });
        match measured {
            Ok(measured) => self.outcome.windows.push(measured),
            Err(error) => self.fail(&error),
        }
    }

    /// Stops it, and checks what it has written.
    pub(super) fn end(mut self) -> Outcome {
        if let Some(running) = &mut self.running
            && let Err(error) = running.end(&mut self.outcome)
        {
            self.fail(&error.context("at its end"));
        }
        self.outcome
    }
}

impl Running {
    fn start(case: &Case, places: &Places<'_>, cpus: [usize; 2]) -> Result<Running> {
        let name = case.name().replace('/', "-");
        let content = Content::new(BLOCKS);
        let image = match case.kind {
            Kind::Read => None,
            Kind::Write => Some(image(places.written, &content)?),
        };
        let disk = image.as_ref().unwrap_or(&places.read).path().display().to_string();
        let notify = if case.sleeps() { Notify::Sleep } else { Notify::Adaptive };
        let (queues, wait) = (case.queues.to_string(), notify.to_string());
        let mut arguments = vec!["blk", "--queues", &queues, "--image", &disk, "--notify", &wait];
        arguments.extend(["--disk-buffers", case.disk_buffers()]);
        if case.kind == Kind::Read {
            arguments.push("--read-only");
        }
        if case.topic == Topic::Sandbox(false) {
            arguments.extend(["--sandbox", "off"]);
        }
        let proxied = matches!(case.topic, Topic::Proxy { proxy: true, .. });
        let (place, proxy) = ((places.sockets, &*name), proxied.then_some(notify));
        let (processes, front) = backend::ours("ringfence blk", &arguments, place, cpus[0], proxy)?;
        let load = threads::bound_to(cpus[1], || {
            let stream = UnixStream::connect(&front).context("connecting");
            BlkLoad::open(stream?, case.load(), content)
        });
        let load = load.map_err(|error| error.context(last_words(&processes)))?;
        processes.iter().try_for_each(Process::pause)?;
        Ok(Running { load, processes, image })
    }

    fn end(&mut self, outcome: &mut Outcome) -> Result<()> {
        self.processes.iter_mut().try_for_each(Process::resume)?;
        let tally = self.load.tally;
        let content = self.load.stop()?;
        outcome.tally = tally;
        let Some(image) = &self.image else { return Ok(()) };
        let found = content.wrong_in(image.as_file(), LOOK);
        outcome.wrong_on_disk = found.context("looking at the disk")?;
        Ok(())
    }
}
