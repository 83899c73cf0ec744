//! What a placement of I/O virtual addresses costs the hardware: IOTLB entries, table pages, misses;
//! and what two static patterns cost the allocator.
//!
//! Two allocators that are equally fast may still differ in *where* they put ranges, and the device
//! pays for that: a walk that misses a cache reads memory while the device waits. No hardware is
//! measured here: real addresses from real allocators are fed to a model of the hardware's caches,
//! and all its results are marked as a model's.
//!
//! | module | what it holds |
//! |---|---|
//! | [`model`] | the model: a set-associative IOTLB, page-walk caches |
//! | `machine` | an aged allocator, competing rings of buffers, a device that walks them |
//! | `streams` | which of those are run, under each placement |
//! | `fixed` | huge ranges, and a segment for each user: measured, no model |
//! | `table` | the rows for a terminal |

mod fixed;
mod machine;
pub mod model;
mod streams;
mod table;

use std::{sync::atomic::AtomicBool, time::Duration};

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
    /// What random choices start from: the same seed, the same misses in the model.
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
    /// What the model computes for it (`streams`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Modelled>,
    /// ns an operation (`huge`, `segment`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns_per_op: Option<Estimate>,
    /// The same against `ringfence` (in `segment` in a segment of its own, for all CPUs) in the same rounds, the
    /// median: above 1 is slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_ringfence: Option<f64>,
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
    /// `buffers` or `pages` (`streams`); `alloc+free` (`huge`); `create`, `destroy` or `hot`
    /// (`segment`).
    pub pattern: String,
    /// `size`, `lowest`, `highest`, `ring`, `ring-apart`; a peer's own is its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    /// Bits of the aperture.
    pub aperture_bits: u32,
    /// Bytes of a range, or of a segment.
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
    /// CPUs that a segment's allocator is made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<usize>,
    /// `own`: each thread in a segment of its own; `shared`: all in one allocator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space: Option<String>,
}

/// The model's results. A page is one of 4 KiB that the device has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Modelled {
    /// IOTLB entries filled, a GiB moved.
    pub entries_filled_per_gib: f64,
    /// Table pages that what is in flight needs, a GiB in flight.
    pub table_pages_per_gib: f64,
    /// Table pages that were ever touched, a run.
    pub table_pages_touched: f64,
    /// Bytes of this project's own table with what is in flight mapped in it, a GiB in flight.
    pub table_bytes_per_gib: f64,
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
    /// Misses that would have hit in a fully associative IOTLB of the same size.
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

/// Models the streams under every placement, and measures the static patterns. Once `stop` is set,
/// returns what is there so far: placements that were run, and static patterns of complete rounds.
///
/// # Errors
/// [`Usage`] if the options make no sense; else an allocator broke a rule.
pub fn measure(options: &Options, progress: &Progress, stop: &AtomicBool) -> Result<Vec<Row>> {
    check(options)?;
    let mut rows = streams::measure(options, progress, stop)?;
    rows.extend(fixed::measure(options, progress, stop)?);
    Ok(rows)
}

/// Refuses what makes no sense, and what would take hours or all memory.
fn check(options: &Options) -> Result<(), Usage> {
    /// Far above any IOTLB there is.
    const MOST_ENTRIES: usize = 1 << 16;
    /// What one pattern may move, bytes: some minutes of work.
    const MOST_MOVED: u128 = 16 << 30;
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
    // Rings are contiguous, aligned as they are long, and all of them may be one.
    if in_flight > 1 << (options.aperture_bits - 3) {
        return Err(Usage(format!(
            "{} streams of {} buffers of {} bytes fill more than an eighth of an aperture of {} bits",
            options.streams, options.buffers, options.buffer_bytes, options.aperture_bits
        )));
    }
    let uses = options.reuse.max(machine::LEAST_LAPS) * streams::RUNS;
    if in_flight * u128::from(uses) > MOST_MOVED {
        return Err(Usage(format!(
            "{} MiB in flight, used {uses} times, are more than the {} GiB that the model moves",
            in_flight >> 20,
            MOST_MOVED >> 30
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_options_are_wrong_usage() {
        let base = Options::default;
        check(&base()).unwrap();
        for (bad, word) in [
            (Options { aperture_bits: 31, ..base() }, "aperture"),
            (Options { aperture_bits: 64, ..base() }, "aperture"),
            (Options { sets: 0, ..base() }, "sets"),
            (Options { sets: 12, ..base() }, "power of two"),
            (Options { ways: 0, ..base() }, "ways"),
            (Options { ways: 1 << 20, ..base() }, "ways"),
            (Options { walk_entries: [4, 0, 4], ..base() }, "walk cache L2"),
            (Options { streams: 0, ..base() }, "streams"),
            (Options { buffers: usize::MAX, ..base() }, "buffers"),
            (Options { buffer_bytes: 0, ..base() }, "size of a buffer"),
            (Options { buffer_bytes: u64::MAX, ..base() }, "size of a buffer"),
            (Options { burst_bytes: 8192, ..base() }, "burst"),
            (Options { reuse: 0, ..base() }, "uses"),
            (Options { repeat: 0, ..base() }, "rounds"),
            (Options { aperture_bits: 32, buffer_bytes: 16 << 20, ..base() }, "eighth"),
            (Options { reuse: 1 << 20, ..base() }, "GiB that the model moves"),
        ] {
            let Usage(text) = check(&bad).unwrap_err();
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn nothing_is_begun_once_it_is_to_stop() {
        let options = Options::default();
        let progress = Progress::new(crate::progress::Kind::Silent, 1, Duration::ZERO);
        let rows = measure(&options, &progress, &AtomicBool::new(true)).unwrap();
        assert_eq!(rows, []);
        let wrong = Options { sets: 3, ..options };
        assert!(measure(&wrong, &progress, &AtomicBool::new(true)).is_err());
    }

    #[test]
    fn rows_are_rendered_and_read_back_from_json() {
        let options = Options {
            streams: 2,
            buffers: 2,
            buffer_bytes: 8192,
            reuse: 2,
            repeat: 2,
            ..Options::default()
        };
        let (steps, expected) = plan(&options);
        let progress = Progress::new(crate::progress::Kind::Silent, steps, expected);
        let mut rows = measure(&options, &progress, &AtomicBool::new(false)).unwrap();
        let placements = |pattern: &str, reuse| {
            let of = |row: &&Row| row.params.pattern == pattern && row.params.reuse == Some(reuse);
            rows.iter()
                .filter(of)
                .filter_map(|row| row.params.placement.clone())
                .collect::<Vec<_>>()
        };
        for pattern in ["buffers", "pages"] {
            assert_eq!(placements(pattern, 1), PLACEMENTS);
            assert_eq!(placements(pattern, 2), PLACEMENTS);
        }
        let value = serde_json::to_value(&rows).unwrap();
        for row in value.as_array().unwrap() {
            assert!(row["impl"].is_string() && row["params"]["pattern"].is_string());
            match row["name"].as_str().unwrap() {
                "streams" => {
                    assert!(row.pointer("/model/drifting/iotlb").unwrap().is_number());
                    assert_eq!(
                        row.pointer("/model/lockstep/walk").unwrap().as_array().unwrap().len(),
                        3
                    );
                }
                "huge" | "segment" => {
                    assert!(row.pointer("/ns_per_op/median").unwrap().is_number())
                }
                other => panic!("{other}"),
            }
        }
        // Figures that decimal text holds exactly; the rest is text and whole numbers.
        for row in &mut rows {
            row.model = row.model.map(|_| Modelled { fallbacks: 3, ..Modelled::default() });
            row.ns_per_op =
                row.ns_per_op.map(|_| Estimate { median: 0.5, lo: None, hi: Some(1.0) });
            row.ratio_to_ringfence = row.ratio_to_ringfence.map(|_| 1.25);
            row.memory_bytes = row.memory_bytes.map(|_| 4096.0);
        }
        let text = serde_json::to_string(&rows).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Row>>(&text).unwrap(), rows);
        rows[0].model = Some(Modelled {
            table_pages_per_gib: 262_144.0,
            table_pages_touched: 1e12,
            ..Modelled::default()
        });
        let text = render(&rows);
        for line in text.lines() {
            assert!(line.chars().count() <= crate::text::WIDTH, "{line}");
        }
        assert!(text.contains("ring-apart") && text.contains("a segment a user"));
        assert_eq!(render(&[]), "");
    }
}
