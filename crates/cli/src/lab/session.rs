//! The common start of every command that measures.

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Context, Result};
use clap::{ArgAction, Args};
use ringfence_lab::progress::Kind;

use crate::output::{Output, print};

// Where results go, and whether to show progress. No documentation: clap would take it for that of the
// command that this is flattened into.
#[derive(Args)]
pub(crate) struct Session {
    /// Writes everything that was measured as JSON; `-` prints the JSON instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Shows no progress.
    #[arg(long, short, action = ArgAction::SetTrue)]
    quiet: bool,
}

/// A command that has begun.
pub(crate) struct Begun {
    pub(crate) json: Option<Output>,
    pub(crate) progress: Kind,
    /// Set by Ctrl-C, SIGTERM and SIGHUP.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Session {
    /// Opens the file now: a wrong path is an error before anything runs, not after.
    pub(crate) fn begin(&self) -> Result<Begun> {
        let json = self.json.as_deref().map(Output::open).transpose()?;
        let progress = if self.quiet { Kind::Silent } else { Kind::Auto };
        let stop = Arc::new(AtomicBool::new(false));
        ringfence_lab::run::stop_on_signals(&stop).context("catching signals")?;
        Ok(Begun { json, progress, stop })
    }
}

/// Whether standard output and standard error go to the same terminal, file or pipe.
fn same_place() -> bool {
    let place = |fd: BorrowedFd<'_>| {
        let file = File::from(fd.try_clone_to_owned().ok()?);
        let about = file.metadata().ok()?;
        Some((about.dev(), about.ino()))
    };
    let out = place(std::io::stdout().as_fd());
    out.is_some() && out == place(std::io::stderr().as_fd())
}

/// The warnings for a table: none if they were printed to the same place at the beginning.
pub(crate) fn unprinted(warnings: Vec<String>, progress: Kind) -> Vec<String> {
    if progress != Kind::Silent && same_place() { Vec::new() } else { warnings }
}

/// Prints `shown`, and the verdict on standard error: the command fails if there is a verdict, or
/// an error with its files.
pub(crate) fn conclude(shown: &str, verdict: &[String], files: Result<()>) -> Result<ExitCode> {
    let printed = print(shown);
    verdict.iter().for_each(|line| eprintln!("{line}"));
    files.and(printed)?;
    Ok(if verdict.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
