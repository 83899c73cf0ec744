//! Benchmarks of components, with their peers in the same run.
//!
//! What every benchmark shares, and then a module for each:
//!
//! | module | what it holds |
//! |---|---|
//! | [`row`] | the data model (`ringfence.bench/1`) and its text |
//! | [`rounds`] | what takes turns in interleaved rounds, what was measured of each, intervals and ratios |
//! | [`clock`] | a clock cheap enough for single operations |
//! | [`threads`] | threads that start together, each on a CPU of its own |
//! | [`report`] | all of it for a terminal |
//! | [`iova`] | allocators of I/O virtual addresses |
//! | [`bounce`] | bounce pools, against mapping and against pools of another shape |
//! | [`iotlb`] | lookups in a device's IOTLB |
//! | [`pin`] | pinning pages, and how long runs are in recordings |
//! | [`map`] | MAP and UNMAP of a virtio-iommu, beside devices of another design |
//! | `ping` | where the host has put the CPUs |
//! | `process` | a back end's process |
//! | `window` | what a driver and a back end get done in a while |
//! | [`net`] | network back ends with and without a device IOTLB, beside DPDK's |
//! | [`blk`] | block back ends with and without a device IOTLB |
//!
//! A benchmark measures its implementations in turns (A B C A B C ...), so that what slows a machine
//! for a while slows all of them, and takes ratios within a round.

pub mod blk;
pub mod bounce;
pub mod clock;
pub mod iotlb;
pub mod iova;
pub mod map;
pub mod net;
pub mod pin;
mod ping;
pub(crate) mod process;
pub mod report;
pub mod rounds;
pub mod row;
pub mod threads;
mod window;

use std::sync::{Arc, atomic::AtomicBool};

use crate::progress::Kind;
pub use row::{Benchmark, Interval, Row};

/// The options of a benchmark, which can be carried out.
pub trait Measure: clap::Args {
    /// Runs it. `stop` ends it early; what was measured until then is returned.
    ///
    /// # Errors
    /// [`Usage`](crate::run::Usage): the options leave nothing to measure, or make no sense
    /// together. Or what all of it needs is not there.
    fn run(&self, progress: Kind, stop: &Arc<AtomicBool>) -> anyhow::Result<Benchmark>;

    /// How it is printed.
    const SHEET: &'static report::Sheet;

    /// What was measured, for a terminal; all rows with `details`.
    fn print(&self, benchmark: &Benchmark, details: bool) -> String {
        report::render(benchmark, Self::SHEET, details)
    }
}

/// Options as on the command line.
#[cfg(test)]
pub(crate) fn options<T: clap::Args>(words: &str) -> T {
    let command = T::augment_args(clap::Command::new("bench").no_binary_name(true));
    let found = command.try_get_matches_from(words.split_whitespace()).unwrap();
    T::from_arg_matches(&found).unwrap()
}
