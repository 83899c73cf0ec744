//! What a replay found: the contract `ringfence.replay/1`. Fields are added, never renamed.

use serde::{Deserialize, Serialize};

use super::{
    space::{Moment, Peaks},
    stream::LeftOut,
};
use crate::{report::Machine, stats::Estimate};

/// Name and version of the JSON contract.
pub const SCHEMA: &str = "ringfence.replay/1";

/// The recorded guest's own row.
pub const RECORDED: &str = "recorded";

/// One run: the whole of `--json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the program.
    pub version: String,
    /// The machine.
    pub host: Machine,
    /// Rounds requested.
    pub rounds: u32,
    /// Whether the run was stopped before all of it was done.
    pub interrupted: bool,
    /// What a reader must know, of all recordings.
    pub warnings: Vec<String>,
    /// One a recording, in the order requested.
    pub traces: Vec<TraceReport>,
}

/// One recording.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceReport {
    /// Its name on the command line.
    pub file: String,
    /// `qemu-virtio-iommu` or `ftrace`.
    pub format: String,
    /// Lines of all kinds.
    pub lines: u64,
    /// Lines that were damaged, and skipped.
    pub damaged: u64,
    /// Whether it was read to its end.
    pub complete: bool,
    /// Maps in it, also those that were left out.
    pub maps: u64,
    /// Unmaps in it, likewise.
    pub unmaps: u64,
    /// Events that the recorded kernel had dropped.
    pub lost_events: u64,
    /// Maps and unmaps that were not replayed.
    pub left_out: LeftOut,
    /// Allocations and frees: what times are divided by.
    pub operations: u64,
    /// Allocations.
    pub allocations: u64,
    /// Frees.
    pub frees: u64,
    /// Allocations that were never freed.
    pub live_at_end: u64,
    /// Domains.
    pub domains: u64,
    /// Devices that were attached, as far as the recording has them.
    pub attached: u64,
    /// CPUs, as far as the recording has them.
    pub cpus: u64,
    /// From the first operation to the last, by the recording's clock.
    pub seconds: f64,
    /// Most ranges that were in use at once.
    pub peak_live_ranges: u64,
    /// Most bytes that were in use at once.
    pub peak_live_bytes: u64,
    /// Bits of the aperture that the allocators had.
    pub aperture_bits: u32,
    /// The placement that `ringfence` was given: `size`, `lowest` or `highest`.
    pub placement: String,
    /// Rounds measured.
    pub rounds: u32,
    /// What the loop over the operations takes without an allocator: part of every `ns_per_op`.
    pub loop_ns_per_op: Option<Estimate>,
    /// First the recorded guest's own placement, then one an allocator.
    pub allocators: Vec<AllocatorRow>,
    /// First the recorded guest's own requests, then one a policy.
    pub policies: Vec<PolicyRow>,
}

/// A recording under one allocator. `null` in JSON: does not apply, or was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AllocatorRow {
    /// The allocator, or `recorded`.
    #[serde(rename = "impl")]
    pub name: String,
    /// An operation, allocations and frees together.
    pub ns_per_op: Option<Estimate>,
    /// An allocation, measured one by one; the clock's cost is subtracted.
    pub alloc_ns: Option<Estimate>,
    /// A free, likewise.
    pub free_ns: Option<Estimate>,
    /// 99 of 100 operations of a round took no longer.
    pub p99_ns: Option<Estimate>,
    /// The slowest operation of a round, whatever the machine did meanwhile.
    pub worst_ns: Option<Estimate>,
    /// The slowest operation if each counts with the shortest time that any round found for it
    /// (the warm-up included): what the allocator itself takes at worst.
    pub worst_steady_ns: Option<f64>,
    /// `ns_per_op` against that of `ringfence`, paired by round: above 1 is slower.
    pub ratio_to_ringfence: Option<Estimate>,
    /// Allocations that found no place. (`recorded`: those whose place was still in use, about
    /// which the derivation was wrong.)
    pub failures: u64,
    /// What was in use.
    #[serde(flatten)]
    pub peaks: Peaks,
    /// The part of the span that was not in use, as a mean over the operations.
    pub fragmentation: f64,
    /// The same at some moments, with what it is made of.
    pub fragmentation_over_time: Vec<Moment>,
}

/// A recording under one policy. `null` in JSON: does not apply, or is not known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyRow {
    /// The policy, or `recorded`.
    pub policy: String,
    /// The policy in force.
    pub effective_policy: String,
    /// Requests to map.
    pub map_requests: u64,
    /// Requests to unmap.
    pub unmap_requests: u64,
    /// Times that the device was waited for, of all three kinds.
    pub syncs: Option<u64>,
    /// Waits for maps.
    pub map_syncs: Option<u64>,
    /// Waits for an unmap's invalidation.
    pub unmap_syncs: Option<u64>,
    /// Waits for a flush of a whole domain.
    pub flushes: Option<u64>,
    /// Flushes because a queue was full; the others because its timer ran out.
    pub full_queue_flushes: Option<u64>,
    /// The longest that unmapped memory stayed reachable, ms.
    pub max_deferred_ms: Option<f64>,
    /// The most memory that was unmapped and still reachable, bytes.
    pub max_deferred_bytes: Option<u64>,
    /// Exposed bytes times ms.
    pub deferred_byte_ms: Option<f64>,
    /// Maps that failed.
    pub failures: Option<u64>,
}

impl Report {
    /// An empty report on this machine.
    pub fn new(rounds: u32) -> Report {
        Report {
            schema: SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: Machine::detect(),
            rounds,
            ..Report::default()
        }
    }
}
