//! DPDK's testpmd, controlled through its standard input.

use std::{
    io::{Read, Write},
    path::Path,
    process::{ChildStdin, ChildStdout},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
};

use super::case::Direction;
use crate::bench::process::Process;

/// Where Debian puts it (package `dpdk-dev`).
const PROGRAM: &str = "/usr/bin/dpdk-testpmd";
/// How long it may take to carry out a command.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Frames that a back end reports as taken from the driver and given to it since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) taken: u64,
    pub(super) given: u64,
}

/// A running testpmd's standard input and output.
pub(super) struct Console {
    commands: ChildStdin,
    output: ChildStdout,
    /// Output that was not looked at yet.
    unread: String,
    /// Whether it forwards packets.
    forwards: bool,
}

/// Whether it is installed.
pub(super) fn is_there() -> bool {
    Path::new(PROGRAM).exists()
}

impl Console {
    /// Starts one that listens at `socket`; it is stopped until it is measured.
    pub(super) fn start(socket: &Path, cpu: usize) -> Result<(Process, Console)> {
        // Two lcores, the least it takes, on one CPU: the first only waits for commands, and the
        // other never gives the CPU away. So the thread that serves the socket goes where EAL puts
        // it, on another CPU: beside the lcore it would wait for milliseconds, for each message.
        let arguments = format!(
            "--lcores 0@{cpu},1@{cpu} --no-huge --no-pci --no-telemetry --iova-mode=va -m 256 \
             --file-prefix ringfence --vdev net_vhost0,iface={},iommu-support=1,queues=1 -- \
             -i --port-topology=loop --total-num-mbufs=8192",
            socket.display()
        );
        let arguments: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
        let mut process =
            Process::start("dpdk-testpmd", Path::new(PROGRAM), &arguments, None, socket, true)?;
        let commands = process.child.stdin.take().context("testpmd's standard input")?;
        let output = process.child.stdout.take().context("testpmd's standard output")?;
        let mut console = Console { commands, output, unread: String::new(), forwards: false };
        console.until(&mut process, "testpmd>")?;
        process.pause()?;
        Ok((process, console))
    }

    fn command(&mut self, command: &str) -> Result<()> {
        self.unread.clear();
        writeln!(self.commands, "{command}").context("sending testpmd a command")
    }

    /// Its output up to and including `end`.
    fn until(&mut self, process: &mut Process, end: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            if let Some(at) = self.unread.find(end) {
                let rest = self.unread.split_off(at + end.len());
                return Ok(std::mem::replace(&mut self.unread, rest));
            }
            let left = Timespec::try_from(REPLY_TIMEOUT.saturating_sub(begun.elapsed()))?;
            let mut fds = [PollFd::new(&self.output, PollFlags::IN)];
            if retry_on_intr(|| poll(&mut fds, Some(&left))).context("waiting for testpmd")? == 0 {
                bail!("testpmd did not print {end:?} within {REPLY_TIMEOUT:?}");
            }
            let mut buffer = [0; 4096];
            match self.output.read(&mut buffer).context("reading testpmd's output")? {
                0 => {
                    process.resume()?;
                    bail!("testpmd closed its standard output");
                }
                len => self.unread.push_str(&String::from_utf8_lossy(&buffer[..len])),
            }
        }
    }

    /// Makes `process` carry packets in `direction`.
    pub(super) fn begin(&mut self, process: &mut Process, direction: Direction) -> Result<()> {
        if self.forwards {
            // The measurement before this one failed.
            self.end(process)?;
        }
        let mode = match direction {
            Direction::Tx => "rxonly",
            Direction::Rx => "txonly",
            Direction::Loop => "io",
        };
        self.command(&format!("set fwd {mode}"))?;
        self.until(process, "packet forwarding mode")?;
        self.command("start")?;
        self.forwards = true;
        self.until(process, "TX RS bit threshold").map(drop)
    }

    /// Makes `process` stop; returns what it has counted since it began.
    pub(super) fn end(&mut self, process: &mut Process) -> Result<Counted> {
        self.command("stop")?;
        let statistics = self.until(process, "Done.")?;
        self.forwards = false;
        counted(&statistics)
            .with_context(|| format!("no statistics in testpmd's output: {statistics:?}"))
    }
}

/// The figures of the first port in what `stop` prints.
fn counted(statistics: &str) -> Option<Counted> {
    let figure = |name: &str| {
        let rest = &statistics[statistics.find(name)? + name.len()..];
        rest.split_whitespace().next()?.parse().ok()
    };
    Some(Counted { taken: figure("RX-packets:")?, given: figure("TX-packets:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_found() {
        let text = "Telling cores to stop...\n\n  ------- Forward statistics for port 0  -----\n  \
            RX-packets: 14508448       RX-dropped: 0             RX-total: 14508448\n  \
            TX-packets: 7              TX-dropped: 3             TX-total: 10\n  ---\n\nDone.";
        assert_eq!(counted(text), Some(Counted { taken: 14_508_448, given: 7 }));
        assert_eq!(counted("Done."), None);
    }
}
