//! Our own back end: this very program.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{
    backend::{Backend, Counted},
    case::Direction,
    process::Process,
};

/// A running `ringfence net`.
pub(super) struct Ringfence {
    process: Process,
    socket: PathBuf,
}

impl Ringfence {
    pub(super) fn start(folder: &Path, cpu: usize) -> Result<Ringfence> {
        let socket = folder.join("ringfence.sock");
        let program = std::env::current_exe().context("where this program is")?;
        let arguments = ["net", "--loopback", "--socket", &socket.display().to_string()];
        let arguments: Vec<String> = arguments.map(str::to_owned).into();
        let process = Process::start("ringfence net", &program, &arguments, cpu, &socket, false)?;
        Ok(Ringfence { process, socket })
    }
}

impl Backend for Ringfence {
    fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    fn refuses(&self, direction: Direction) -> Option<String> {
        (direction != Direction::Loop).then(|| "ringfence net has no such port".to_owned())
    }

    fn begin(&mut self, _: Direction) -> Result<()> {
        Ok(())
    }

    fn socket(&self) -> &Path {
        &self.socket
    }

    fn end(&mut self) -> Result<Option<Counted>> {
        Ok(None)
    }
}
