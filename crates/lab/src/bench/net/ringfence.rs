//! Our own back end: this very program.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{
    backend::{Backend, Counted},
    case::Direction,
};
use crate::bench::process::Process;

/// A running `ringfence net`.
///
/// One for each socket: with `--loopback`, and with `--probe`. The unused one sleeps.
pub(super) struct Ringfence {
    looped: End,
    probed: End,
    /// The one that is used.
    loops: bool,
}

struct End {
    process: Process,
    socket: PathBuf,
}

impl Ringfence {
    pub(super) fn start(folder: &Path, cpu: usize) -> Result<Ringfence> {
        let program = std::env::current_exe().context("where this program is")?;
        let start = |way: &str| -> Result<End> {
            let socket = folder.join(format!("ringfence{way}.sock"));
            let path = socket.display().to_string();
            // Polls, as testpmd does.
            let arguments = ["net", way, "--notify", "poll", "--log", "info", "--socket", &path];
            let arguments: Vec<String> = arguments.map(str::to_owned).into();
            let process =
                Process::start("ringfence net", &program, &arguments, Some(cpu), &socket, false)?;
            process.pause()?;
            Ok(End { process, socket })
        };
        Ok(Ringfence { looped: start("--loopback")?, probed: start("--probe")?, loops: true })
    }

    fn used(&self) -> &End {
        if self.loops { &self.looped } else { &self.probed }
    }
}

impl Backend for Ringfence {
    fn process(&mut self) -> &mut Process {
        if self.loops { &mut self.looped.process } else { &mut self.probed.process }
    }

    fn choose(&mut self, direction: Direction) {
        self.loops = direction == Direction::Loop;
    }

    fn begin(&mut self, _: Direction) -> Result<()> {
        Ok(())
    }

    fn socket(&self) -> &Path {
        &self.used().socket
    }

    fn end(&mut self) -> Result<Option<Counted>> {
        Ok(None)
    }
}
