//! `ringfence bench net`.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::bench::net::{
    self, Options,
    case::{Choice, Direction, Entry, Implementation, Part, Ring},
    table,
};

use super::show;
use crate::lab::{
    list::{List, list, time},
    session::{Begun, Session},
};

/// Rounds and windows for which the default run takes under three minutes.
const DEFAULT_REPEAT: u32 = 5;
const DEFAULT_SECONDS: f64 = 0.2;

/// Measures network back ends with and without a device IOTLB: `ringfence net`, and DPDK's testpmd
/// beside it.
///
/// A virtio-net driver, which is also the vhost-user front end, loads both in turn with the same
/// stream of 64-byte frames, each end on a CPU of its own, and checks every byte that comes back
/// and the number of every frame. The front end resolves IOTLB misses itself, with entries of the
/// requested size.
///
/// Where Ringfence is the IOMMU too (notified), the device and its virtio-iommu are one process,
/// and a driver maps the frames' buffers through the DMA API, with strict and other policies.
///
/// DPDK's testpmd is in Debian's package dpdk-dev; without it, its rows say so.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench net
    ringfence bench net --only off,static --direction loop --entries 4k,2m --seconds 1
    ringfence bench net --only dynamic --direction tx --repeat 11
    ringfence bench net --only notified --seconds 1
    ringfence bench net --impl dpdk --json dpdk.json

EXIT STATUS:
    0   done
    1   ringfence net failed or changed a frame, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// What to measure, separated by commas: off (no IOMMU), static (buffers are mapped once),
    /// dynamic (each use of a buffer has its own address), notified (the same, mapped through the
    /// DMA API, with Ringfence as the IOMMU in the device's process) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Part>)]
    only: Option<List<Part>>,

    /// The direction of frames: tx (the driver sends), rx, loop (what it sends comes back)
    /// [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Direction>)]
    direction: Option<List<Direction>>,

    /// How much an entry of the static part covers: powers of two from 4k to 1g
    /// [default: 1g,2m,64k,4k].
    #[arg(long, value_name = "LIST", value_parser = list::<Entry>)]
    entries: Option<List<Entry>>,

    /// Formats of rings: split, packed (with the smallest entries only) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Ring>)]
    ring: Option<List<Ring>>,

    /// The back ends to measure: ringfence, dpdk [default: all].
    #[arg(long = "impl", value_name = "LIST", value_parser = list::<Implementation>)]
    implementation: Option<List<Implementation>>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// The length of a window.
    #[arg(long, value_name = "S", default_value_t = DEFAULT_SECONDS, value_parser = parse_seconds)]
    seconds: f64,

    #[command(flatten)]
    session: Session,
}

pub(super) fn parse_seconds(text: &str) -> Result<f64, String> {
    time(text, ("seconds", 1.0), "1 or 0.2", 0.01..=3600.0).map(|time| time.as_secs_f64())
}

pub(super) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;

    let all = Choice::default();
    let options = Options {
        choice: Choice {
            parts: arguments.only.map_or(all.parts, |list| list.0),
            directions: arguments.direction.map_or(all.directions, |list| list.0),
            entries: arguments.entries.map_or(all.entries, |list| list.0),
            rings: arguments.ring.map_or(all.rings, |list| list.0),
        },
        implementations: arguments
            .implementation
            .map_or(Implementation::ALL.to_vec(), |list| list.0),
        repeat: arguments.repeat,
        window: Duration::from_secs_f64(arguments.seconds),
        progress,
    };
    let benchmark = net::run(&options, &stop)?;
    let measured = benchmark.rows.iter().any(|row| row.ns_per_op.median.is_some());
    show(benchmark, measured, json, progress, table::render)
}
