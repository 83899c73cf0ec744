//! The commands that measure: `compare`, `replay` and `bench`, over `ringfence-lab`.

mod bench;
mod compare;
mod replay;
mod session;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum Command {
    #[command(about = "What each DMA policy costs on this machine, for a fio job")]
    Compare(compare::Arguments),
    #[command(about = "What a recorded stream of maps and unmaps costs under other allocators")]
    Replay(replay::Arguments),
    #[command(
        subcommand,
        about = "The tables of the components, with their peers beside them",
        after_help = "EXAMPLES:\n    ringfence bench iova\n    ringfence bench map --json map.json"
    )]
    Bench(bench::Bench),
    /// The device process that `compare` starts.
    #[command(hide = true)]
    Device,
}

pub(crate) fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Compare(arguments) => compare::run(arguments),
        Command::Replay(arguments) => replay::run(arguments),
        Command::Bench(bench) => bench::run(bench),
        Command::Device => {
            crate::serve::begin_quiet_log();
            ringfence_lab::run::device_main().map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Whether the laboratory rejected its input.
pub(crate) fn is_usage(error: &anyhow::Error) -> bool {
    error.is::<ringfence_lab::job::JobError>() || error.is::<ringfence_lab::run::Usage>()
}
