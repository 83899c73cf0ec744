//! The `ringfence` command.
#![forbid(unsafe_code)]

mod compare;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// DMA protection for user-space I/O.
#[derive(Parser)]
#[command(name = "ringfence", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(about = "What each DMA policy costs on this machine, for a fio job")]
    Compare(compare::Arguments),
    /// The device process of `compare`, which starts it.
    #[command(hide = true)]
    Device,
}

fn main() -> ExitCode {
    // Wrong usage ends here, with exit code 2.
    let ended = match Arguments::parse().command {
        Command::Compare(arguments) => compare::run(arguments),
        Command::Device => ringfence_lab::run::device_main().map(|()| ExitCode::SUCCESS),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        // Wrong input is wrong usage, wherever it was found.
        let usage =
            error.is::<ringfence_lab::job::JobError>() || error.is::<ringfence_lab::run::Usage>();
        ExitCode::from(if usage { 2 } else { 1 })
    })
}
