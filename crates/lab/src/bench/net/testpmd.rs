//! DPDK's testpmd, controlled through its standard input.

use std::{
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{ChildStdin, ChildStdout},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_setfl},
    io::Errno,
};

use super::{
    backend::{Backend, Counted},
    case::{Case, Direction},
};
use crate::bench::process::Process;

/// Where Debian puts it (package `dpdk-dev`).
const PROGRAM: &str = "/usr/bin/dpdk-testpmd";
/// How long it may take to carry out a command.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// A running testpmd.
pub(super) struct Testpmd {
    process: Process,
    commands: ChildStdin,
    output: ChildStdout,
    /// Output that was not looked at yet.
    unread: String,
    socket: PathBuf,
    /// Whether it forwards packets.
    forwards: bool,
}

/// Whether it is installed.
pub(super) fn is_there() -> bool {
    Path::new(PROGRAM).exists()
}

impl Testpmd {
    pub(super) fn start(folder: &Path, cpu: usize) -> Result<Testpmd> {
        let socket = folder.join("testpmd.sock");
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
            Process::start("dpdk-testpmd", Path::new(PROGRAM), &arguments, None, &socket, true)?;
        let commands = process.child.stdin.take().context("testpmd's standard input")?;
        let output = process.child.stdout.take().context("testpmd's standard output")?;
        fcntl_setfl(&output, OFlags::NONBLOCK).context("testpmd's standard output")?;
        let (unread, forwards) = (String::new(), false);
        let mut testpmd = Testpmd { process, commands, output, unread, socket, forwards };
        testpmd.until("testpmd>")?;
        testpmd.process.pause()?;
        Ok(testpmd)
    }

    fn command(&mut self, command: &str) -> Result<()> {
        self.unread.clear();
        writeln!(self.commands, "{command}").context("sending testpmd a command")
    }

    /// Its output up to and including `end`.
    fn until(&mut self, end: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            if let Some(at) = self.unread.find(end) {
                let rest = self.unread.split_off(at + end.len());
                return Ok(std::mem::replace(&mut self.unread, rest));
            }
            let mut buffer = [0; 4096];
            match self.output.read(&mut buffer) {
                Ok(0) => {
                    self.process.resume()?;
                    bail!("testpmd closed its standard output");
                }
                Ok(len) => self.unread.push_str(&String::from_utf8_lossy(&buffer[..len])),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if begun.elapsed() > REPLY_TIMEOUT {
                        bail!("testpmd did not print {end:?} within {REPLY_TIMEOUT:?}");
                    }
                    let short = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                    match poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&short)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno).context("waiting for testpmd"),
                    }
                }
                Err(error) => return Err(error).context("reading testpmd's output"),
            }
        }
    }
}

impl Backend for Testpmd {
    fn processes(&mut self) -> &mut [Process] {
        std::slice::from_mut(&mut self.process)
    }

    fn choose(&mut self, _: &Case) {}

    fn begin(&mut self, direction: Direction) -> Result<()> {
        if self.forwards {
            // The measurement before this one failed.
            self.end()?;
        }
        let mode = match direction {
            Direction::Tx => "rxonly",
            Direction::Rx => "txonly",
            Direction::Loop => "io",
        };
        self.command(&format!("set fwd {mode}"))?;
        self.until("packet forwarding mode")?;
        self.command("start")?;
        self.forwards = true;
        self.until("TX RS bit threshold")?;
        Ok(())
    }

    fn socket(&self) -> &Path {
        &self.socket
    }

    fn end(&mut self) -> Result<Option<Counted>> {
        self.command("stop")?;
        let statistics = self.until("Done.")?;
        self.forwards = false;
        let counted = counted(&statistics);
        counted
            .map(Some)
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
