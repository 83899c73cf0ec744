//! `ringfence replay`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Args;
use ringfence_lab::{
    allocators::{AllocatorKind, PlacementName},
    list::List,
    replay::{Ended, Options, Policy, options, replay, table},
};

use crate::lab::session::{Begun, Session, conclude, untold};
use crate::output::Output;

/// Rounds of every allocator: with 15, the 95 % interval lies well within the extremes.
const DEFAULT_REPEAT: u32 = 15;

/// Replays recorded maps and unmaps under other allocators and policies.
///
/// A recording of what a guest or a kernel mapped and unmapped is turned back into allocations of
/// I/O virtual addresses and their frees. Every allocator serves them, in recorded order: how long
/// it takes, and how the ranges lie then. Under every policy the same mappings go through the DMA
/// API, by the recording's clock: what it sends, and for how long unmapped memory stays reachable.
///
/// Recordings are QEMU's log of its virtio-iommu device, and text of the kernel's tracepoints
/// iommu:map and iommu:unmap (from tracefs, trace-cmd report or perf script); with gzip or without.
/// The format is detected from the content. A damaged line is reported with its number and skipped.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence replay examples/traces/*.gz
    ringfence replay guest.log --allocator rbtree,ringfence --policy strict+map,lazy-mq+map
    trace-cmd report | ringfence replay - --json replay.json

RECORDING:
    QEMU      -device virtio-iommu-pci -msg timestamp=on -D guest.log -trace 'virtio_iommu_*'
    Linux     cd /sys/kernel/tracing; echo 1 > events/iommu/enable; (work); cat trace > /tmp/t.txt

EXIT STATUS:
    0   done; damaged lines and recordings that were cut are told, and are no failure
    1   an allocator or a domain failed, or Ctrl-C
    2   wrong usage, a file that is no recording included: nothing was replayed")]
pub(crate) struct Arguments {
    /// Recordings of maps and unmaps; `-` is standard input.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// The allocators, separated by commas: rbtree, bitmap, magazines, ringfence [default: all].
    #[arg(long, value_name = "LIST")]
    allocator: Option<List<AllocatorKind>>,

    /// The policies, separated by commas: off, strict, strict+map, lazy-sq, lazy-mq, lazy-sq+map,
    /// lazy-mq+map [default: all but off]. `bounce` and `auto` copy, and a recording has no data.
    #[arg(long, value_name = "LIST", value_parser = parse_policies)]
    policy: Option<List<Policy>>,

    /// Bits of the addresses that allocators may hand out [default: 32, or as many more as the
    /// recorded addresses have].
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u32).range(13..=64))]
    aperture: Option<u32>,

    /// Where `ringfence` puts ranges: `size`, adjacent by size, from the top (as the DMA API needs
    /// them, fastest); `lowest` or `highest`, at the lowest or the highest place that fits. The
    /// other allocators have placements of their own.
    #[arg(long, value_name = "NAME", value_parser = options::parse_placement,
        default_value_t = PlacementName::default())]
    placement: PlacementName,

    /// Measured rounds of every allocator; one more before them warms up and is discarded.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// Slots of each flush queue [default: 32768 for lazy-sq, 256 for lazy-mq].
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1 << 20))]
    flush_queue_slots: Option<usize>,

    /// How long an unmapped range waits for its flush at most [default: 1000 for lazy-sq, 10 for
    /// lazy-mq].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    flush_queue_ms: Option<u64>,

    #[command(flatten)]
    session: Session,
}

fn parse_policies(text: &str) -> Result<List<Policy>, String> {
    options::parse_policies(text).map(List)
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let show = !json.as_ref().is_some_and(Output::is_stdout);

    let asked = Options {
        allocators: arguments.allocator.map_or_else(|| AllocatorKind::ALL.to_vec(), |list| list.0),
        policies: arguments.policy.map_or_else(options::default_policies, |list| list.0),
        aperture_bits: arguments.aperture,
        placement: arguments.placement,
        repeat: arguments.repeat,
        flush_queue_slots: arguments.flush_queue_slots,
        flush_queue_ms: arguments.flush_queue_ms,
        progress,
    };
    let Ended { mut report, failure } = replay(&arguments.traces, &asked, &stop)?;

    let mut verdict: Vec<String> = Vec::new();
    verdict.extend(failure.map(|failure| format!("error: {}", crate::explain(&failure))));
    if report.interrupted {
        verdict.push("interrupted: the figures are of what was complete".to_owned());
    }
    let told = report.warnings.clone();
    report.warnings.extend(verdict.iter().cloned());
    let json = json.map_or(Ok(()), |output| output.write(&report.to_json()));
    report.warnings = untold(told, progress);
    let shown = match show && !report.traces.is_empty() {
        true => table::render(&report),
        false => String::new(),
    };
    conclude(&shown, &verdict, json)
}
