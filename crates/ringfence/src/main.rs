//! The `ringfence` command.
#![forbid(unsafe_code)]

mod bench;
mod blk;
mod compare;
mod conformance;
mod doctor;
mod guard;
mod list;
mod net;
mod output;
mod replay;
mod serve;
mod session;

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
    #[command(about = "What a recorded stream of maps and unmaps costs under other allocators")]
    Replay(replay::Arguments),
    #[command(subcommand, about = "The tables of the components, with their peers beside them")]
    Bench(bench::Bench),
    #[command(about = "Serve a disk to vhost-user front ends such as QEMU")]
    Blk(Box<blk::Arguments>),
    #[command(about = "Serve a network to vhost-user front ends such as QEMU")]
    Net(net::Arguments),
    #[command(about = "How a virtio-iommu keeps the rules of its specification")]
    Conformance(conformance::Arguments),
    #[command(about = "Serve an IOMMU, and devices behind it, to a stock virtual machine")]
    Guard(Box<guard::Arguments>),
    #[command(about = "What this host lacks for protected I/O in user space, and what helps")]
    Doctor(doctor::Arguments),
    /// The device process of `compare`, which starts it.
    #[command(hide = true)]
    Device,
}

fn main() -> ExitCode {
    // Wrong usage ends here, with exit code 2.
    let ended = match Arguments::parse().command {
        Command::Compare(arguments) => compare::run(arguments),
        Command::Replay(arguments) => replay::run(arguments),
        Command::Net(arguments) => net::run(arguments),
        Command::Bench(bench) => bench::run(bench),
        Command::Blk(arguments) => blk::run(*arguments),
        Command::Conformance(arguments) => conformance::run(arguments),
        Command::Guard(arguments) => guard::run(*arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
        Command::Device => {
            serve::begin_quiet_log();
            ringfence_lab::run::device_main().map(|()| ExitCode::SUCCESS)
        }
    };
    serve::end_log();
    ended.unwrap_or_else(|error| {
        eprintln!("error: {}", explain(&error));
        // Wrong input is wrong usage, wherever it was found.
        let usage =
            error.is::<ringfence_lab::job::JobError>() || error.is::<ringfence_lab::run::Usage>();
        ExitCode::from(if usage { 2 } else { 1 })
    })
}

/// An error and its causes in one line. A cause that was told already, by an error that has it in
/// its own words, is not told again.
fn explain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            told if told.contains(&cause) => text,
            told => format!("{told}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Wordy(std::io::Error);

    impl std::fmt::Display for Wordy {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "no luck: {}", self.0)
        }
    }

    impl std::error::Error for Wordy {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn every_cause_is_told_once() {
        let error = anyhow::Error::new(Wordy(std::io::Error::other("it rains")));
        assert_eq!(explain(&error.context("going out")), "going out: no luck: it rains");
        let error = anyhow::anyhow!("it rains").context("no luck").context("going out");
        assert_eq!(explain(&error), "going out: no luck: it rains");
    }
}
