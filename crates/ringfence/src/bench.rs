//! `ringfence bench`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Allocators of I/O virtual addresses.
    Iova(Arguments),
}

#[derive(Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(bench: Bench) -> Result<ExitCode> {
    let Bench::Iova(Arguments {}) = bench;
    anyhow::bail!("not there yet")
}
