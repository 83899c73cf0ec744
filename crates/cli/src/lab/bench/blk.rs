//! `ringfence bench blk`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::bench::blk::{
    self, Options,
    case::{Choice, Depth, Entry, Kind, Part, Queues, Ring},
    table,
};

use super::{net::parse_seconds, show};
use crate::lab::{
    list::{List, list},
    session::{Begun, Session},
};

/// Rounds and windows for which the default run takes under two minutes.
const DEFAULT_REPEAT: u32 = 21;
const DEFAULT_SECONDS: f64 = 0.05;

/// Measures `ringfence blk` with and without a device IOTLB.
///
/// A virtio-blk driver, which is also the vhost-user front end, loads a `ringfence blk` process
/// with requests, mostly of 4 KiB, each end on a CPU of its own, and checks what is read and
/// written. The front end resolves IOTLB misses itself, with entries of the requested size.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench blk
    ringfence bench blk --only off,static --depth 128 --repeat 101
    ringfence bench blk --only off,dynamic --kind read --queues 1
    ringfence bench blk --ring packed --disk /var/tmp --json blk.json

EXIT STATUS:
    0   done
    1   a request failed, a block was not what it should be, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// What to measure, separated by commas: off (no IOMMU), static (buffers are mapped once),
    /// dynamic (each request has its own addresses), buffers (data in the service's own buffers,
    /// and in the guest's, with requests of 4 KiB and of 64), sandbox (confined, and not), path
    /// (the data path alone, compiled with an IOTLB and without) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Part>)]
    only: Option<List<Part>>,

    /// What requests do: read, write [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Kind>)]
    kind: Option<List<Kind>>,

    /// Requests in flight in each queue, up to 256 [default: 1,128].
    #[arg(long, value_name = "LIST", value_parser = list::<Depth>)]
    depth: Option<List<Depth>>,

    /// Numbers of queues: 1, 2 [default: 1,2; with one request in flight, 1].
    #[arg(long, value_name = "LIST", value_parser = list::<Queues>)]
    queues: Option<List<Queues>>,

    /// How much an entry of the static part covers: powers of two from 4k to 1g [default: 2m,4k].
    #[arg(long, value_name = "LIST", value_parser = list::<Entry>)]
    entries: Option<List<Entry>>,

    /// Formats of rings: split, packed [default: split].
    #[arg(long, value_name = "LIST", value_parser = list::<Ring>)]
    ring: Option<List<Ring>>,

    /// Where to put the files of the disks, of 16 MiB each [default: for reads, the folder for
    /// temporary files; for writes, /dev/shm].
    #[arg(long, value_name = "FOLDER")]
    disk: Option<PathBuf>,

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

pub(super) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;

    let all = Choice::default();
    let chosen = arguments.queues.is_some();
    let options = Options {
        choice: Choice {
            parts: arguments.only.map_or(all.parts, |list| list.0),
            kinds: arguments.kind.map_or(all.kinds, |list| list.0),
            depths: arguments.depth.map_or(all.depths, |list| list.0),
            queues: arguments.queues.map_or(all.queues, |list| list.0),
            entries: arguments.entries.map_or(all.entries, |list| list.0),
            rings: arguments.ring.map_or(all.rings, |list| list.0),
            all: chosen,
        },
        folder: arguments.disk,
        repeat: arguments.repeat,
        window: Duration::from_secs_f64(arguments.seconds),
        progress,
    };
    let benchmark = blk::run(&options, &stop)?;
    let measured = benchmark.rows.iter().any(|row| row.ns_per_op.median.is_some());
    show(benchmark, measured, json, progress, table::render)
}
