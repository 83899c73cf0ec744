//! `ringfence bench`.

mod blk;
mod bounce;
mod iotlb;
mod map;
mod net;
mod pin;

use std::{
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Result;
use clap::{Args, Subcommand};
use ringfence_lab::{
    bench::{
        Benchmark,
        iova::{
            self, Options,
            pattern::{Live, Pattern, Size},
            peers::Implementation,
        },
    },
    list::{PLAIN, number},
    placement,
    progress::{Kind, Progress},
};

use crate::lab::{
    list::{List, list, time},
    session::{Begun, Session, conclude, untold},
};
use crate::output::Output;

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    #[command(about = "Allocators of I/O virtual addresses")]
    Iova(Arguments),
    #[command(about = "Bounce pools: copying against mapping, and against pools of another shape")]
    Bounce(bounce::Arguments),
    #[command(about = "Lookups in a device's IOTLB, with other ways to keep one beside")]
    Iotlb(iotlb::Arguments),
    #[command(about = "Network back ends with and without a device IOTLB, beside DPDK's")]
    Net(net::Arguments),
    #[command(about = "The block back end with and without a device IOTLB")]
    Blk(blk::Arguments),
    #[command(about = "Pinning pages, beside one call a page; run lengths in recordings")]
    Pin(pin::Arguments),
    #[command(about = "MAP and UNMAP of a virtio-iommu, beside devices of another design")]
    Map(map::Arguments),
}

/// Rounds and their length for which the default run takes under four minutes.
const DEFAULT_REPEAT: u32 = 7;
const DEFAULT_BUDGET: Duration = Duration::from_millis(8);

/// Measures allocators of I/O virtual addresses, with peers in the same run.
///
/// Every allocator is made and filled anew for each live set and size. Then, for each pattern, the
/// ranges that it returns are checked against a separate record (a range returned twice fails the
/// run; a request that fails although a hole is free is counted), and it is timed in rounds in
/// which all take turns. An operation is one alloc and one free.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench iova
    ringfence bench iova --pattern random --live 1k,100k --sizes 1 --details
    ringfence bench iova --allocator ringfence,bitmap --live 48%x1 --pattern aligned16
    ringfence bench iova --placement=only --iotlb-sets 64 --iotlb-ways 8
    ringfence bench iova --repeat 15 --budget 50 --json iova.json

EXIT STATUS:
    0   done
    1   an allocator handed out what was taken, refused what it had handed out, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// The allocators to measure, separated by commas: ringfence, rbtree, bitmap, magazines,
    /// vm-allocator, btreemap, control [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Implementation>)]
    allocator: Option<List<Implementation>>,

    /// Live sets: numbers of ranges (0, 1k, 100k), or a 32-bit space filled in blocks of 16
    /// granules of which random ones are freed (48%), or in blocks of another size (48%x1)
    /// [default: 0,1k,10k,100k,48%,90%,48%x1].
    #[arg(long, value_name = "LIST", value_parser = list::<Live>)]
    live: Option<List<Live>>,

    /// Sizes in granules: one (16), or a mix (1-32) [default: 1,1-32,33-512,16].
    #[arg(long, value_name = "LIST", value_parser = list::<Size>)]
    sizes: Option<List<Size>>,

    /// Patterns: `hot` (a range is allocated and freed, again and again), `aligned16` (the same, of
    /// 16 granules aligned to 16), `batch` (256 are allocated, then freed), `random` (a random live
    /// range is freed, another allocated) [default: all]. With --live, --sizes or --pattern, every
    /// combination is run; without them, those that differ.
    #[arg(long, value_name = "LIST", value_parser = list::<Pattern>)]
    pattern: Option<List<Pattern>>,

    /// Numbers of threads, each bound to a CPU.
    #[arg(long, value_name = "LIST", default_value = "1,2", value_parser = list::<Threads>)]
    threads: List<Threads>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// How long one measurement runs, milliseconds [default: 8].
    #[arg(long, value_name = "MS", value_parser = parse_budget)]
    budget: Option<Duration>,

    /// How long filling a live set may take, seconds; an allocator that takes longer is not
    /// measured with it.
    #[arg(long, value_name = "S", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    fill_limit: u64,

    /// The aperture, bits: 32, 39, 48, 57. Full sets (48%) have one of 32.
    #[arg(long, value_name = "BITS", default_value_t = 48,
        value_parser = clap::value_parser!(u32).range(24..=57))]
    aperture: u32,

    /// Measures as well (or, `only`, instead) what each placement costs the hardware: IOTLB
    /// entries, table pages and misses of competing streams, by a model of the caches; and huge
    /// ranges and a segment for each user, by the clock.
    #[arg(long, value_name = "only", num_args = 0..=1, require_equals = true,
        default_missing_value = "too", value_parser = ["too", "only"], hide_possible_values = true)]
    placement: Option<String>,

    /// Sets of the model's IOTLB, a power of two.
    #[arg(long, value_name = "N", requires = "placement")]
    iotlb_sets: Option<usize>,

    /// Ways of the model's IOTLB.
    #[arg(long, value_name = "N", requires = "placement")]
    iotlb_ways: Option<usize>,

    /// Prints every figure: intervals, p99 and worst of single operations.
    #[arg(long)]
    details: bool,

    #[command(flatten)]
    session: Session,
}

/// A number of threads.
#[derive(Clone, PartialEq)]
struct Threads(usize);

impl std::str::FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Threads, String> {
        number(text, "number of threads", PLAIN, 1..=64).map(|n| Threads(n as usize))
    }
}

fn parse_budget(text: &str) -> Result<Duration, String> {
    time(text, ("milliseconds", 1e3), "8 or 0.5", 0.1..=60_000.0)
}

pub(crate) fn run(bench: Bench) -> Result<ExitCode> {
    match bench {
        Bench::Iova(arguments) => run_iova(&arguments),
        Bench::Bounce(arguments) => bounce::run(arguments),
        Bench::Iotlb(arguments) => iotlb::run(&arguments),
        Bench::Net(arguments) => net::run(arguments),
        Bench::Blk(arguments) => blk::run(arguments),
        Bench::Pin(arguments) => pin::run(&arguments),
        Bench::Map(arguments) => map::run(&arguments),
    }
}

fn run_iova(arguments: &Arguments) -> Result<ExitCode> {
    let chosen =
        arguments.live.is_some() || arguments.sizes.is_some() || arguments.pattern.is_some();
    let Begun { json, progress, stop } = arguments.session.begin()?;

    let options = Options {
        implementations: or(&arguments.allocator, Implementation::ALL),
        lives: or(&arguments.live, Live::DEFAULTS),
        sizes: or(&arguments.sizes, Size::DEFAULTS),
        patterns: or(&arguments.pattern, Pattern::ALL),
        all: chosen,
        threads: arguments.threads.0.iter().map(|threads| threads.0).collect(),
        repeat: arguments.repeat,
        budget: arguments.budget.unwrap_or(DEFAULT_BUDGET),
        fill_limit: Duration::from_secs(arguments.fill_limit),
        aperture_bits: arguments.aperture,
        progress,
    };
    // First, since it is short and may reject its options.
    let placement = arguments.placement.as_deref();
    let placements = match placement {
        Some(_) => Some(measure_placements(arguments, progress, &stop)?),
        None => None,
    };
    let mut benchmark = match placement {
        Some("only") => Benchmark::new("iova", arguments.repeat),
        _ => iova::run(&options, &stop)?,
    };
    benchmark.placement = placements;
    benchmark.interrupted = stop.load(Ordering::Relaxed);

    let timed = !benchmark.rows.is_empty();
    let measured = timed || benchmark.placement.is_some();
    show(benchmark, measured, json, progress, |benchmark| {
        let mut text = String::new();
        if timed {
            text.push_str(&iova::table::render(benchmark, arguments.details));
        }
        if let Some(rows) = &benchmark.placement {
            text.push_str(if timed { "\n" } else { "" });
            text.push_str(&placement::render(rows));
        }
        text
    })
}

/// Writes the JSON, and prints the text (unless the JSON goes to standard output). Failures go to
/// standard error and decide the exit status.
fn show(
    mut benchmark: Benchmark,
    measured: bool,
    json: Option<Output>,
    progress: Kind,
    render: impl Fn(&Benchmark) -> String,
) -> Result<ExitCode> {
    let table = !json.as_ref().is_some_and(Output::is_stdout);
    let mut verdict: Vec<String> =
        benchmark.errors.iter().map(|error| format!("error: {error}")).collect();
    if benchmark.interrupted {
        verdict.push(match measured {
            true => "interrupted: the figures are of what was complete".to_owned(),
            false => "interrupted before anything was complete".to_owned(),
        });
    }
    let json = json.map_or(Ok(()), |output| output.write(&benchmark.json()));
    benchmark.warnings = untold(benchmark.warnings, progress);
    let shown = if table { render(&benchmark) } else { String::new() };
    conclude(&shown, &verdict, json)
}

/// As [`show`]; without rows no text is printed.
fn show_rows(
    benchmark: Benchmark,
    json: Option<Output>,
    progress: Kind,
    render: fn(&Benchmark) -> String,
) -> Result<ExitCode> {
    let measured = !benchmark.rows.is_empty();
    show(benchmark, measured, json, progress, |benchmark| match measured {
        true => render(benchmark),
        false => String::new(),
    })
}

fn measure_placements(
    arguments: &Arguments,
    kind: Kind,
    stop: &AtomicBool,
) -> Result<Vec<placement::Row>> {
    let defaults = placement::Options::default();
    let options = placement::Options {
        aperture_bits: arguments.aperture,
        sets: arguments.iotlb_sets.unwrap_or(defaults.sets),
        ways: arguments.iotlb_ways.unwrap_or(defaults.ways),
        ..defaults
    };
    let (steps, expected) = placement::plan(&options);
    let progress = Progress::new(kind, steps, expected);
    let rows = placement::measure(&options, &progress, stop);
    progress.finish();
    rows
}

/// The items that were asked for, or all.
fn or<T: Clone>(list: &Option<List<T>>, all: impl AsRef<[T]>) -> Vec<T> {
    list.as_ref().map_or(all.as_ref(), |list| &list.0).to_vec()
}
