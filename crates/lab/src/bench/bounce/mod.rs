//! Bounce pools: what copying costs against mapping, and against pools of another shape.
//!
//! | module | what it holds |
//! |---|---|
//! | [`seed`] | the table of seed 004: jobs under each policy, between two processes |
//! | [`list`] | scatter lists for an untrusted device, bounced whole and by element, over a virtio-iommu |
//! | [`pool`] | our pools against a linear one, in one process |
//! | `linear` | the linear pool |
//! | [`subject`] | both pools, as `pool` uses them |
//! | `check` | checks pools against a record of its own |

mod check;
mod linear;
pub mod list;
pub mod pool;
pub mod seed;
pub mod subject;

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use ringfence_run::worker::Notify;

use super::{
    Benchmark, Measure,
    report::{self, Against, Figure, Sheet},
    rounds::{Stop, stopped},
    row::object,
};
use crate::{
    list::{List, counted, milliseconds, named, seconds},
    progress::Kind,
};
use seed::Op;

/// What our pools are called, as in every benchmark.
pub(super) const OURS: &str = "ringfence";
/// What the linear pool is called.
pub(super) const PEER: &str = "swiotlb-like";

named! {
    /// A part of the benchmark.
    Part, "unknown part {:?}: there are {}":
    /// Jobs under each policy.
    Seed = "seed",
    /// Lists for an untrusted device.
    List = "list",
    /// Pools in one process.
    Pool = "pool",
}

/// How it is printed.
pub const SHEET: Sheet = Sheet {
    about: "bounce pools: copying against mapping, and against pools of another shape",
    parts: &[
        report::Part {
            of: ("part", &["seed"]),
            title: "sequential I/O, 64 deep, one job",
            operation: "an I/O",
            against: &[
                Against::new("ratio_to_off", "impl", "against off"),
                Against::new("ratio_to_strict_map", "impl", "against strict+map"),
            ],
            figures: &[
                Figure::new("bandwidth_bytes_per_s", "MiB/s", 1048576.0).with_half(),
                Figure::new("ratio_to_strict", "x strict", 1.0).with_half(),
                Figure::new("ratio_to_strict_map", "x +map", 1.0),
                Figure::new("ratio_to_off", "x off", 1.0).with_half(),
                Figure::new("map_ns_per_gib", "map ms/GiB", 1e6),
                Figure::new("map_change_percent", "%", 1.0),
                Figure::new("unmap_ns_per_gib", "unmap", 1e6),
                Figure::new("unmap_change_percent", "%", 1.0),
                Figure::new("cpu_ns_per_io", "CPU", 1e3),
            ],
            ..report::Part::ALL
        },
        report::Part {
            of: ("part", &["list"]),
            title: "lists for an untrusted device",
            operation: "a list of so many elements, mapped and unmapped",
            against: &[Against::PEERS],
            others: &["each"],
            figures: &[
                Figure::new("thread_cpu_ns", "thread µs", 1e3),
                Figure::new("device_cpu_ns", "device µs", 1e3),
                Figure::new("cpu_ns", "both µs", 1e3).with_half(),
                Figure::new("cpu_ratio", "x both", 1.0).with_half(),
                Figure::new("requests_per_list", "requests", 1.0),
            ],
            ..report::Part::ALL
        },
        report::Part {
            of: ("part", &["pool"]),
            title: "pools in one process",
            operation: "an operation, of a thread's CPU time (with several, of the wall's)",
            against: &[Against::PEERS],
            ..report::Part::ALL
        },
    ],
    legend: LEGEND,
};

const LEGEND: &str = "  seed        two processes over a virtio-iommu, disk in memory, unpaced; x strict: throughput against a sync for each
              map call and each unmap; map, unmap: ms a GiB mapped, by the wall's clock, copies and sleep included, and
              by how much percent that differs from strict's; x: against bounce; CPU of both processes, µs an I/O. Seed
              004 measured its pools, on its own machine, at 2.8, 4.7, 3.6 and 3.6 times strict for reads of 4, 16, 64
              and 128 KiB
  list        elements of 1, 2, 3 and 3.5 KiB, each in a page of its own, for an untrusted disk of another process;
              ringfence: the whole list in one slot of a pool; each: each element in a slot; single-use: as Linux
              bounces it, a slot of a linear pool mapped and synced, unmapped and synced for each element
  pool        over memory that is mapped already: ringfence by the DMA API, the peer by itself; so much percent of it
              is held meanwhile, in buffers of the same length at random places; take: a slot taken and given back; to:
              copied in besides; from: copied back (the device reports how much it wrote); preloaded: copied in and back
              (it does not); both: in and back
  swiotlb-like  one block of 64 MiB in slots of 2 KiB, searched in line, at most 256 KiB at once, an area and its lock
                for each CPU; it copies in whatever the direction
";

/// What to measure, and how.
#[derive(Clone, Debug, Args)]
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
pub struct Options {
    /// What to measure, separated by commas.
    #[arg(long = "only", value_name = "LIST", default_value_t = List::from(&Part::ALL[..]))]
    pub parts: List<Part>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// How long a row of `seed` runs in a round, seconds.
    #[arg(long, value_name = "S", default_value = "0.15", value_parser = seconds)]
    pub runtime: Duration,

    /// Block sizes of `seed`, and lengths of buffers of `pool`: multiples of 512, from 512 to 1m
    /// [default: 4k,16k,64k,128k; for `pool` 512,4k,16k,64k,256k,1m].
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<List<Size>>,

    /// The direction of data in `seed`.
    #[arg(long = "op", value_name = "LIST", default_value_t = List::from(&Op::ALL[..]))]
    pub ops: List<Op>,

    /// How both processes wait in `seed` and `list`: adaptive, poll, sleep. With sleep, a sync
    /// costs a wake-up, as it costs a guest an exit.
    #[arg(long, value_name = "MODE", default_value = "sleep")]
    pub notify: Notify,

    /// How long one measurement of `list` and of `pool` runs, milliseconds [default: 40 and 3].
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub budget: Option<Duration>,
}

counted! {
    /// A block size, bytes: whole sectors.
    Size(u32), "multiple of 512", ("km", 1 << 10), 512..=1 << 20, |bytes| bytes.is_multiple_of(512)
}

impl Measure for Options {
    const SHEET: &'static Sheet = &SHEET;

    fn run(&self, progress: Kind, stop: &Stop) -> Result<Benchmark> {
        let budget_ms = |usual| self.budget.unwrap_or(usual).as_secs_f64() * 1e3;
        let mut benchmark = Benchmark::new("bounce", self.repeat);
        benchmark.settings = object([
            ("parts", self.parts.iter().map(|part| part.name()).collect()),
            ("notify", self.notify.to_string().into()),
            ("runtime_s", self.runtime.as_secs_f64().into()),
            ("list_budget_ms", budget_ms(list::BUDGET).into()),
            ("pool_budget_ms", budget_ms(pool::BUDGET).into()),
            ("peer_bytes", pool::BLOCK.into()),
        ]);
        for part in self.parts.iter().take_while(|_| !stopped(stop)) {
            let run = match part {
                Part::Seed => seed::run,
                Part::List => list::run,
                Part::Pool => pool::run,
            };
            match run(self, progress, stop, &mut benchmark) {
                Err(error) if error.is::<crate::run::Usage>() => return Err(error),
                Err(error) => benchmark.errors.push(format!("{part}: {error:#}")),
                Ok(()) => {}
            }
        }
        benchmark.interrupted = stopped(stop);
        Ok(benchmark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_legend_has_the_shape_of_the_linear_pool() {
        let mib = super::pool::BLOCK >> 20;
        let (slot, longest) = (super::linear::SLOT >> 10, super::linear::LONGEST >> 10);
        let shape = format!("one block of {mib} MiB in slots of {slot} KiB");
        assert!(LEGEND.contains(&shape) && LEGEND.contains(&format!("at most {longest} KiB")));
    }

    #[test]
    fn sizes_are_whole_sectors() {
        let size = |text: &str| text.parse::<Size>().map(|size| size.0).ok();
        let found = ["512", "4k", "4K", "1m", "1536"].map(size);
        assert_eq!(found, [Some(512), Some(4096), Some(4096), Some(1 << 20), Some(1536)]);
        for wrong in ["", "k", "0", "511", "513", "2m", "-4k", "4.5k", "9999999999k", "4ä"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn parts_have_names() {
        let parse = str::parse::<List<Part>>;
        assert_eq!(parse("pool,seed"), Ok(List(vec![Part::Pool, Part::Seed])));
        let error = parse("pools").unwrap_err();
        assert!(error.contains("seed, list, pool"), "{error}");
        assert!(parse("pool,pool").is_err() && parse("").is_err());
    }
}
