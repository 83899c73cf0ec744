//! `ringfence replay`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Recordings of maps and unmaps.
    #[arg(required = true)]
    traces: Vec<PathBuf>,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    anyhow::bail!("not there yet: {:?}", arguments.traces)
}
