//! Commands for contributors: `cargo xtask test`, `cargo xtask rules` and what they are made of.
#![forbid(unsafe_code)]

mod architecture;
mod bench_guest;
mod book;
mod circles;
mod debian;
mod deny;
mod evidence;
mod fetch;
mod floors;
mod front_door;
mod fuzz;
mod gate;
mod guests;
mod house;
mod interface;
mod links;
mod modules;
mod mutants;
mod pace;
mod packages;
mod readme;
mod rules;
mod soak;
mod steps;
mod suite;
mod timeline;
mod tools;
mod workspace;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Commands for contributors to Ringfence.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs everything: format, lints, unit, property and model tests, examples, fuzz smoke runs,
    /// end-to-end runs, licences, the rules' account.
    Test {
        /// Only the steps whose name contains this (see --list).
        #[arg(long)]
        only: Option<String>,
        /// Also the long steps; the result goes to docs/all.txt, to be committed.
        #[arg(long)]
        all: bool,
        /// Names the steps and runs none.
        #[arg(long)]
        list: bool,
    },
    /// Lists every numbered rule with its test or the reason why it has none; fails on a gap.
    Rules {
        /// Also prints the rules that are in order.
        #[arg(long)]
        all: bool,
    },
    /// Compares docs/evidence.md, what stands behind each promise of the README, with the tree.
    Evidence {
        /// Makes the page anew.
        #[arg(long)]
        update: bool,
    },
    /// Counts lines of the product and `unsafe` by crate; fails if there is more than in
    /// xtask/house.toml, if files import each other, or if a long file has no reason.
    House {
        /// Puts the new counts into xtask/house.toml.
        #[arg(long)]
        update: bool,
    },
    /// Compares what each published crate offers with docs/interface, and fails on a difference.
    Interface {
        /// Puts the new interfaces there.
        #[arg(long)]
        update: bool,
    },
    /// Makes a site of README.md, docs/ and the other pages, in target/book, and checks its links.
    Book,
    /// Checks licences, sources and bans of all dependencies against deny.toml.
    Deny,
    /// Counts the instructions of hot paths under Valgrind, and fails if one has changed by more than
    /// 1 % from gate/counts.toml.
    Gate {
        /// Puts the new counts into gate/counts.toml.
        #[arg(long)]
        update: bool,
        /// Only the paths whose name contains this.
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
    },
    /// Explores all models, then takes each ordering of the product away, one at a time: a model must
    /// fail, or a comment at the place must say why it need not.
    Mutants {
        /// Only orderings whose place contains this: a file, a function.
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Tries all models for each anew, and writes the table, docs/mutants.txt.
        #[arg(long)]
        update: bool,
    },
    /// Makes what the tests with real guests need, in target/guests: a QEMU, kernels, initramfs.
    Guests {
        /// The packages of a kernel that has iommufd, for the tests that need one: Debian builds none.
        #[arg(long, num_args = 1.., value_name = "DEB")]
        iommufd: Vec<PathBuf>,
    },
    /// Makes what tests take from elsewhere: guests, and other projects' programs. `test` does so by itself.
    Fetch,
    /// Measures disks in real guests: `guard`, `blk` and `proxy` against QEMU's own, with 1, 2 and 4 virtual CPUs
    /// (about three quarters of an hour).
    BenchGuest {
        /// Numbers of virtual CPUs.
        #[arg(long, value_delimiter = ',', default_values_t = bench_guest::CPUS)]
        cpus: Vec<u32>,
        /// Only guests whose driver unmaps in this mode, or that have no IOMMU.
        #[arg(long)]
        only: Option<bench_guest::Mode>,
        /// Puts the tables into docs/guests.md, in place of those that they replace.
        #[arg(long)]
        update: bool,
    },
    /// Runs the commands whose tables README.md and docs/ show and puts their output in.
    Readme {
        /// Only those that contain this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Runs property tests and fuzz targets with new seeds until the time is over. What fails is kept as a
    /// case, to be committed, and the line that repeats it is printed.
    Soak {
        /// For how long.
        #[arg(long, default_value_t = 60)]
        minutes: u64,
        /// Only tests and targets whose name contains this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Traces the scheduler (as root), and prints how soon a woken thread runs, and which threads
    /// ran meanwhile.
    Timeline {
        /// The thread's name, as `top -H` shows it: guard-0, say.
        thread: String,
        /// For how long.
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
        /// How much of the trace is printed around a wake-up.
        #[arg(long, default_value_t = 40)]
        lines: usize,
    },
    /// Runs every fuzz target for a while; fuzz/hours.toml adds it up.
    Fuzz {
        /// Runs none, but writes fuzz/seeds anew.
        #[arg(long)]
        seeds: bool,
        /// Runs none, but prints how much of each parser the inputs that there are reach.
        #[arg(long)]
        coverage: bool,
        /// How long each runs.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Only the targets whose name contains this.
        #[arg(long)]
        only: Option<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Test { only, all, list } => steps::test(only.as_deref(), all, list),
        Command::Rules { all } => rules::account(all),
        Command::Evidence { update } => evidence::check(update),
        Command::House { update } => house::check(update),
        Command::Interface { update } => interface::check(update),
        Command::Book => book::make(),
        Command::Deny => deny::check(),
        Command::Gate { update, only } => gate::run(only.as_deref(), update),
        Command::Mutants { only, update } => mutants::run(
            only.as_deref(),
            if update { mutants::Table::Write } else { mutants::Table::Follow },
        ),
        Command::Guests { iommufd } => guests::make(&iommufd),
        Command::Fetch => fetch::everything(),
        Command::BenchGuest { cpus, only, update } => bench_guest::run(&cpus, only, update),
        Command::Readme { only } => readme::regenerate(only.as_deref()),
        Command::Soak { minutes, only } => soak::soak(minutes, only.as_deref()),
        Command::Timeline { thread, seconds, lines } => timeline::run(&thread, seconds, lines),
        Command::Fuzz { seeds: true, .. } => fuzz::seeds::write(),
        Command::Fuzz { coverage: true, only, .. } => fuzz::coverage::print(only.as_deref()),
        Command::Fuzz { seconds, only, .. } => {
            let (seed, noted) = (std::process::id().into(), true);
            fuzz::build(only.as_deref(), true)?.run(fuzz::Length::Explore { seconds, seed, noted })
        }
    }
}
