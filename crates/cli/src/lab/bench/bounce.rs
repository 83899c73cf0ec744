//! `ringfence bench bounce`.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::{
    bench::bounce::{self, Options, Part, list, pool, seed, seed::Op, table},
    list::number,
    run::Notify,
};

use super::show_rows;
use crate::lab::{
    list::{List, list, time},
    session::{Begun, Session},
};

/// Rounds and their length for which the default run takes under three minutes.
const DEFAULT_REPEAT: u32 = 5;

/// Measures bounce pools: copying against mapping, and against pools of another shape.
///
/// `seed`: sequential reads and writes, 64 deep, by block size, for the rows off, strict,
/// strict+map, lazy-mq+map, bounce, auto and persistent, between two processes over a virtio-iommu,
/// on an unpaced disk in memory. `strict` shares no syncs, whatever is submitted together.
///
/// `list`: scatter lists for an untrusted disk, whose elements do not fill their granules: bounced
/// whole, element by element in our pools, and element by element as in Linux.
///
/// `pool`: our pools against one of swiotlb's shape, in one process. Both are checked, before and
/// after, against a record of the data that each buffer must hold.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench bounce
    ringfence bench bounce --only seed --notify adaptive --repeat 10 --runtime 1
    ringfence bench bounce --only seed --op read --sizes 4k,64k,1m
    ringfence bench bounce --only list,pool --json bounce.json
    ringfence compare examples/seed-004.fio --disk ram --notify sleep

EXIT STATUS:
    0   done
    1   data was wrong, a pool gave out what was taken, a row failed, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// What to measure, separated by commas: seed, list, pool [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Part>)]
    only: Option<List<Part>>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// How long a row of `seed` runs in a round, seconds [default: 0.15].
    #[arg(long, value_name = "S", value_parser = parse_runtime)]
    runtime: Option<Duration>,

    /// Block sizes of `seed`, and lengths of buffers of `pool`: multiples of 512, from 512 to 1m
    /// [default: 4k,16k,64k,128k; for `pool` 512,4k,16k,64k,256k,1m].
    #[arg(long, value_name = "LIST", value_parser = list::<Size>)]
    sizes: Option<List<Size>>,

    /// The direction of data in `seed`: read, write, or both [default: both].
    #[arg(long, value_name = "LIST", value_parser = list::<Op>)]
    op: Option<List<Op>>,

    /// How both processes wait in `seed` and `list`: adaptive, poll, sleep. With sleep, a sync
    /// costs a wake-up, as it costs a guest an exit.
    #[arg(long, value_name = "MODE", default_value = "sleep")]
    notify: Notify,

    /// How long one measurement of `list` and of `pool` runs, milliseconds [default: 40 and 3].
    #[arg(long, value_name = "MS", value_parser = super::parse_budget)]
    budget: Option<Duration>,

    #[command(flatten)]
    session: Session,
}

/// A block size.
#[derive(Clone, Copy, PartialEq)]
struct Size(u32);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let bytes = number(text, "size", ("km", 1 << 10), 512..=1 << 20);
        match bytes {
            Ok(bytes) if bytes.is_multiple_of(512) => Ok(Size(bytes as u32)),
            _ => Err(format!("{text:?} is no size: a multiple of 512 from 512 to 1m")),
        }
    }
}

fn parse_runtime(text: &str) -> Result<Duration, String> {
    time(text, ("seconds", 1.0), "1 or 0.2", 0.01..=3600.0)
}

pub(super) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;

    let mut options = Options {
        parts: arguments.only.map_or(Part::ALL.to_vec(), |list| list.0),
        repeat: arguments.repeat,
        notify: arguments.notify,
        seed: seed::Options::default(),
        list: list::Options::default(),
        pool: pool::Options::default(),
        progress,
    };
    if let Some(List(sizes)) = arguments.sizes {
        options.seed.sizes = sizes.iter().map(|size| size.0).collect();
        options.pool.sizes = sizes.iter().map(|size| size.0 as usize).collect();
    }
    if let Some(List(ops)) = arguments.op {
        options.seed.ops = ops;
    }
    if let Some(runtime) = arguments.runtime {
        options.seed.runtime = runtime;
    }
    if let Some(budget) = arguments.budget {
        (options.list.budget, options.pool.budget) = (budget, budget);
    }
    let benchmark = bounce::run(&options, &stop)?;
    show_rows(benchmark, json, progress, table::render)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_sectors() {
        let size = |text: &str| text.parse::<Size>().map(|size| size.0).ok();
        let found = ["512", "4k", "4K", "1m", "1536"].map(size);
        assert_eq!(found, [Some(512), Some(4096), Some(4096), Some(1 << 20), Some(1536)]);
        for wrong in ["", "k", "0", "511", "513", "2m", "-4k", "4.5k", "9999999999k", "4ä"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
    }
}
