//! The `ringfence` command.
#![forbid(unsafe_code)]

mod blk;
mod conformance;
mod device;
mod doctor;
mod guard;
#[cfg(feature = "lab")]
mod lab;
mod net;
mod output;
mod proxy;
mod serve;
mod usage;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// DMA protection for user-space I/O.
#[derive(Parser)]
#[command(name = "ringfence", version, about, arg_required_else_help = true)]
#[command(after_help = "EXAMPLES:
    ringfence blk --socket disk.sock --image disk.img
    ringfence guard --iommu vm.iommu --blk vm.disk=disk.img --memory 1G
    ringfence doctor --for vhost-user")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[cfg(feature = "lab")]
    #[command(flatten)]
    Lab(lab::Command),
    #[command(about = "Serve a disk to vhost-user front ends such as QEMU")]
    Blk(Box<blk::Arguments>),
    #[command(about = "Serve a network to vhost-user front ends such as QEMU")]
    Net(net::Arguments),
    #[command(about = "How a virtio-iommu keeps the rules of its specification")]
    Conformance(conformance::Arguments),
    #[command(about = "Serve an IOMMU, and devices behind it, to a stock virtual machine")]
    Guard(Box<guard::Arguments>),
    #[command(
        about = "Stand between a VMM and any vhost-user back end, which reaches nothing of the guest's"
    )]
    Proxy(proxy::Arguments),
    #[command(about = "What this host lacks for protected I/O in user space, and what helps")]
    Doctor(doctor::Arguments),
}

fn main() -> ExitCode {
    // Wrong usage ends here, with exit code 2.
    let ended = match Arguments::parse().command {
        #[cfg(feature = "lab")]
        Command::Lab(command) => lab::run(command),
        Command::Net(arguments) => net::run(arguments),
        Command::Blk(arguments) => blk::run(*arguments),
        Command::Conformance(arguments) => conformance::run(arguments),
        Command::Guard(arguments) => guard::run(*arguments),
        Command::Proxy(arguments) => proxy::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
    };
    serve::end_log();
    ended.unwrap_or_else(|error| {
        eprintln!("error: {}", explain(&error));
        ExitCode::from(if is_usage(&error) { 2 } else { 1 })
    })
}

/// Whether an error lies in the arguments, or in a file that they name, wherever it was found.
fn is_usage(error: &anyhow::Error) -> bool {
    #[cfg(feature = "lab")]
    if lab::is_usage(error) {
        return true;
    }
    error.is::<usage::Usage>()
}

/// An error and its causes in one line. A cause that an outer error already quotes is not repeated.
fn explain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            known if known.contains(&cause) => text,
            known => format!("{known}: {cause}"),
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
    fn every_cause_is_printed_once() {
        let error = anyhow::Error::new(Wordy(std::io::Error::other("it rains")));
        assert_eq!(explain(&error.context("going out")), "going out: no luck: it rains");
        let error = anyhow::anyhow!("it rains").context("no luck").context("going out");
        assert_eq!(explain(&error), "going out: no luck: it rains");
    }
}
