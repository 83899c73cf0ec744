//! What a placement of I/O virtual addresses costs the hardware: IOTLB entries, table pages, misses;
//! and what two static patterns cost the allocator.
//!
//! Two allocators that are equally fast may still differ in *where* they put ranges, and the device
//! pays for that: a walk that misses a cache reads memory while the device waits. No hardware is
//! asked here: real addresses from real allocators are fed to a model of the hardware's caches, and
//! everything that comes of it is marked as a model's.
//!
//! | module | what it holds |
//! |---|---|
//! | [`model`] | the model: a set-associative IOTLB, page-walk caches |
//! | `streams` | competing rings of buffers under each placement, through the model |
//! | `fixed` | huge ranges, and a segment for each user: measured, no model |
//! | `table` | the rows for a terminal |

mod fixed;
pub mod model;
mod streams;
mod table;

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{progress::Progress, run::Usage, stats::Estimate};

pub use streams::PLACEMENTS;
pub use table::render;

/// The granule of everything here, bytes.
pub(crate) const GRANULE: u64 = 4096;

/// What is modelled and measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bits of the aperture that every allocator hands out from: 32 to 57.
    pub aperture_bits: u32,
    /// Sets of the IOTLB: a power of two.
    pub sets: usize,
    /// Entries of a set.
    pub ways: usize,
    /// Entries of the page-walk caches: those of L1 lead to tables for 512 GiB, of L2 for 1 GiB, of
    /// L3 for 2 MiB. Each is fully associative.
    pub walk_entries: [usize; 3],
    /// Rings that compete for the caches.
    pub streams: usize,
    /// Buffers that each ring has in flight.
    pub buffers: usize,
    /// Bytes of a buffer; rounded up to whole pages of 4 KiB.
    pub buffer_bytes: u64,
    /// Bytes that the device moves for one stream before another has its turn.
    pub burst_bytes: u64,
    /// How often a buffer is used before it is unmapped, where mappings are kept.
    pub reuse: u32,
    /// Rounds of what is measured by the clock.
    pub repeat: u32,
    /// What random choices start from: the same seed, the same addresses and misses.
    pub seed: u64,
}

impl Default for Options {
    /// Why these:
    /// * 48 bits is what VT-d and SMMU domains of four levels have.
    /// * 64 entries is where measurements of a server's IOMMU found the cliff (Neugebauer et al.,
    ///   SIGCOMM 2018: 256 KiB of 4 KiB pages). How they are divided is not published; four ways is
    ///   an assumption.
    /// * Walk caches of 4, 4 and 32 entries are about what has been found of those of CPUs; those of
    ///   IOMMUs are not published.
    /// * 16 rings of 16 buffers of 64 KiB are the job of the mailing list's table.
    /// * 512 bytes is a large PCIe payload: after it another request may come.
    fn default() -> Options {
        Options {
            aperture_bits: 48,
            sets: 16,
            ways: 4,
            walk_entries: [4, 4, 32],
            streams: 16,
            buffers: 16,
            buffer_bytes: 64 << 10,
            burst_bytes: 512,
            reuse: 16,
            repeat: 9,
            seed: 1,
        }
    }
}

/// One line of the results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// `streams`, `huge` or `segment`.
    pub name: String,
    /// The allocator: `ringfence`, `rbtree`, `bitmap`, `magazines`.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Under which circumstances.
    pub params: Params,
    /// What the model says of it (`streams`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Modelled>,
    /// ns an operation (`huge`, `segment`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns_per_op: Option<Estimate>,
    /// The same against `ringfence` in the same rounds: above 1 is slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_ringfence: Option<Estimate>,
    /// IOTLB entries that hold all of the range, by page size (`huge`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Entries>,
    /// Bytes of memory that a segment's allocator takes (`segment`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<f64>,
    /// Why there are no figures, if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The circumstances of a [`Row`]; what does not apply is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// `buffers` or `pages` (`streams`); `alloc+free` (`huge`); `create+destroy` or `hot` (`segment`).
    pub pattern: String,
    /// `size`, `lowest`, `highest`, `ring`; a peer's own is its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    /// Bits of the aperture.
    pub aperture_bits: u32,
    /// Bytes of a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Rings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<usize>,
    /// Ranges that each ring has in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffers: Option<usize>,
    /// How often each is used before it is unmapped; 1 is strict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reuse: Option<u32>,
    /// Sets of the IOTLB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sets: Option<usize>,
    /// Ways of the IOTLB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ways: Option<usize>,
    /// Threads at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// `own`: each thread in a segment of its own; `shared`: all in one allocator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space: Option<String>,
}

/// What the model says. A page is one of 4 KiB that the device has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Modelled {
    /// IOTLB entries filled, a GiB moved.
    pub entries_filled_per_gib: f64,
    /// Table pages that what is in flight needs, a GiB in flight.
    pub table_pages_per_gib: f64,
    /// Table pages that were ever touched.
    pub table_pages_touched: u64,
    /// With streams that drift against each other.
    pub drifting: Misses,
    /// With streams in lock-step: all at the same place of their rings.
    pub lockstep: Misses,
    /// Requests that the ring's chunk could not meet.
    pub fallbacks: u64,
}

/// Misses, each a page moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Misses {
    /// Of the IOTLB.
    pub iotlb: f64,
    /// Those of them that a fully associative IOTLB of the same size would not have had.
    pub conflict: f64,
    /// Of the walk caches L1, L2 and L3.
    pub walk: [f64; 3],
}

impl Misses {
    /// Memory reads that the device waits for, a page: IOTLB misses and walk-cache misses. It is the
    /// M of the throughput model `T = p / (l0 + M * lm)`.
    pub fn reads(&self) -> f64 {
        self.iotlb + self.walk.iter().sum::<f64>()
    }
}

/// IOTLB entries by page size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entries {
    /// Of 1 GiB.
    pub gib: u64,
    /// Of 2 MiB.
    pub mib2: u64,
    /// Of 4 KiB.
    pub kib4: u64,
}

/// How many steps [`measure`] makes, and how long they should take together: for a [`Progress`].
pub fn plan(options: &Options) -> (u64, Duration) {
    let steps = streams::steps() + fixed::steps(options);
    (steps, streams::STEP * streams::steps() as u32 + fixed::STEP * fixed::steps(options) as u32)
}

/// Models the streams under every placement, and measures the static patterns.
///
/// # Errors
/// [`Usage`] if the options make no sense; else an allocator did what it must not.
pub fn measure(options: &Options, progress: &Progress) -> Result<Vec<Row>> {
    check(options)?;
    let mut rows = streams::measure(options, progress)?;
    rows.extend(fixed::measure(options, progress)?);
    Ok(rows)
}

/// Refuses what makes no sense, and what would take hours or all memory.
fn check(options: &Options) -> Result<(), Usage> {
    /// Far above any IOTLB there is.
    const MOST_ENTRIES: usize = 1 << 16;
    /// What one pattern may move, bytes: some minutes of work.
    const MOST_MOVED: u128 = 64 << 30;
    let within = |what: &str, n: u64, from: u64, to: u64| match (from..=to).contains(&n) {
        true => Ok(()),
        false => Err(Usage(format!("{what} is {n}: it must be {from} to {to}"))),
    };
    within("the aperture's number of bits", options.aperture_bits.into(), 32, 57)?;
    within("the number of IOTLB sets", options.sets as u64, 1, MOST_ENTRIES as u64)?;
    if !options.sets.is_power_of_two() {
        let sets = options.sets;
        return Err(Usage(format!("{sets} IOTLB sets: the number must be a power of two")));
    }
    within(
        "the number of IOTLB ways",
        options.ways as u64,
        1,
        (MOST_ENTRIES / options.sets) as u64,
    )?;
    for (entries, level) in options.walk_entries.iter().zip(1..) {
        within(&format!("the size of walk cache L{level}"), *entries as u64, 1, 4096)?;
    }
    within("the number of streams", options.streams as u64, 1, 4096)?;
    within("the number of buffers", options.buffers as u64, 1, 1 << 20)?;
    within("the size of a buffer", options.buffer_bytes, 1, 1 << 30)?;
    within("the size of a burst", options.burst_bytes, 64, GRANULE)?;
    within("the number of uses of a buffer", options.reuse.into(), 1, 1 << 20)?;
    within("the number of rounds", options.repeat.into(), 1, 10_000)?;
    let in_flight = options.streams as u128
        * options.buffers as u128
        * u128::from(options.buffer_bytes.next_multiple_of(GRANULE).next_power_of_two());
    if in_flight > 1 << (options.aperture_bits - 2) {
        return Err(Usage(format!(
            "{} streams of {} buffers of {} bytes fill more than a quarter of an aperture of {} bits",
            options.streams, options.buffers, options.buffer_bytes, options.aperture_bits
        )));
    }
    if in_flight * u128::from(options.reuse) > MOST_MOVED {
        return Err(Usage(format!(
            "{in_flight} bytes in flight, used {} times, are more than the {} GiB that a model is run for",
            options.reuse,
            MOST_MOVED >> 30
        )));
    }
    Ok(())
}
