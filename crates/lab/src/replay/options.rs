//! What to replay, and how; lists of names as the command line gives them.

use std::path::PathBuf;

use clap::Args;
use ringfence_dma::Policy;

use crate::{
    allocators::{AllocatorKind, PlacementName},
    list::List,
};

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
#[derive(Clone, Debug, Args)]
#[command(after_help = "EXAMPLES:
    ringfence replay examples/traces/*.gz
    ringfence replay guest.log --allocator rbtree,ringfence --policy strict+map,lazy-mq+map
    trace-cmd report | ringfence replay - --json replay.json

RECORDING:
    QEMU      -device virtio-iommu-pci -msg timestamp=on -D guest.log -trace 'virtio_iommu_*'
    Linux     cd /sys/kernel/tracing; echo 1 > events/iommu/enable; (work); cat trace > /tmp/t.txt

EXIT STATUS:
    0   done; damaged lines and recordings that were cut are reported; they are no failure
    1   an allocator or a domain failed, or Ctrl-C
    2   wrong usage, a file that is no recording included: nothing was replayed")]
pub struct Options {
    /// Recordings of maps and unmaps; `-` is standard input.
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,

    /// The allocators, separated by commas: rbtree, bitmap, magazines, ringfence [default: all].
    #[arg(long = "allocator", value_name = "LIST", default_value_t = List::from(&AllocatorKind::ALL[..]),
        hide_default_value = true)]
    pub allocators: List<AllocatorKind>,

    /// The policies, separated by commas: off, strict, strict+map, lazy-sq, lazy-mq, lazy-sq+map,
    /// lazy-mq+map [default: all but off]. `bounce` and `auto` copy, and a recording has no data.
    #[arg(long = "policy", value_name = "LIST", value_parser = parse_policies,
        default_value_t = default_policies(), hide_default_value = true)]
    pub policies: List<Policy>,

    /// Bits of the addresses that allocators may hand out [default: 32, or as many more as the
    /// recorded addresses have].
    #[arg(long = "aperture", value_name = "BITS", value_parser = clap::value_parser!(u32).range(13..=64))]
    pub aperture_bits: Option<u32>,

    /// Where `ringfence` puts ranges: `size`, adjacent by size, from the top (as the DMA API needs
    /// them, fastest); `lowest` or `highest`, at the lowest or the highest place that fits. The
    /// other allocators have placements of their own.
    #[arg(long, value_name = "NAME", value_parser = parse_placement,
        default_value_t = PlacementName::default())]
    pub placement: PlacementName,

    /// Measured rounds of every allocator; one more before them warms up and is discarded.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,

    /// Slots of each flush queue [default: 32768 for lazy-sq, 256 for lazy-mq].
    #[arg(long, value_name = "N",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1 << 20))]
    pub flush_queue_slots: Option<usize>,

    /// How long an unmapped range waits for its flush at most [default: 1000 for lazy-sq, 10 for
    /// lazy-mq].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub flush_queue_ms: Option<u64>,
}

/// All policies that protect and can be replayed: a recording holds no data that could be copied.
pub(super) fn default_policies() -> List<Policy> {
    let protects = |policy: &Policy| *policy != Policy::Off && !policy.bounces();
    List(Policy::ALL.into_iter().filter(protects).collect())
}

/// The policies of a list such as `strict,lazy-mq+map`.
fn parse_policies(text: &str) -> Result<List<Policy>, String> {
    let policies: List<Policy> = text.parse()?;
    match policies.iter().find(|policy| policy.bounces()) {
        Some(policy) => Err(format!(
            "{policy} cannot be replayed: it copies, and a recording holds no data; `ringfence compare \
             --policy {policy}` measures it"
        )),
        None => Ok(policies),
    }
}

/// The placement called `name`; a recording's buffers are in no ring that could be one chunk.
fn parse_placement(name: &str) -> Result<PlacementName, String> {
    match name.parse()? {
        PlacementName::Ring => {
            Err("ring is no placement here: there are size, lowest, highest".into())
        }
        placement => Ok(placement),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_policies_name_each_once() {
        assert_eq!(parse_policies("strict, off"), Ok(List(vec![Policy::Strict, Policy::Off])));
        assert!(parse_policies("strict,strict").unwrap_err().contains("twice"));
        assert!(parse_policies(",").unwrap_err().contains("empty"));
        assert_eq!(parse_placement("lowest"), Ok(PlacementName::Lowest));
        assert_eq!(parse_placement("size"), parse_placement("size-aligned"));
        for name in ["low", "ring"] {
            assert!(parse_placement(name).unwrap_err().contains("size, lowest"), "{name}");
        }
        assert!(parse_policies("strictest").unwrap_err().contains("lazy-mq+map"));
    }

    #[test]
    fn what_copies_is_not_replayed() {
        for policy in ["bounce", "auto"] {
            let error = parse_policies(&format!("strict,{policy}")).unwrap_err();
            assert!(error.starts_with(policy) && error.contains("no data"), "{error}");
        }
        let defaults = default_policies();
        assert_eq!(defaults.len(), 6);
        assert!(!defaults.iter().any(|policy| policy.bounces() || *policy == Policy::Off));
    }
}
