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

mod fixed;
mod machine;
pub mod model;
mod streams;

use std::{sync::atomic::AtomicBool, time::Duration};

use anyhow::Result;
use serde_json::{Map, Value};

use crate::{
    bench::{
        Row,
        report::{Figure, Part, groups, rows_of, text},
    },
    progress::Progress,
    run::Usage,
    text::bytes,
};

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

/// A row; parameters that do not apply are `null` here, and left out of it.
fn row<const N: usize>(name: &str, implementation: &str, params: [(&str, Value); N]) -> Row {
    let there = |(key, value): (&str, Value)| (!value.is_null()).then(|| (key.to_owned(), value));
    Row {
        name: name.to_owned(),
        implementation: implementation.to_owned(),
        params: Map::from_iter(params.into_iter().filter_map(there)),
        ..Row::default()
    }
}

/// The kinds of rows by name, how they are printed, and what their figures mean.
const PARTS: [(&str, Part, &str); 3] = [
    (
        "streams",
        Part {
            title: "streams",
            figures: &[
                Figure::new("model/entries_filled_per_gib", "filled", 1.0),
                Figure::new("model/table_pages_per_gib", "tables", 1.0),
                Figure::new("model/table_pages_touched", "touched", 1.0),
                Figure::new("model/drifting/iotlb", "miss", 1.0),
                Figure::new("model/drifting/conflict", "conf", 1.0),
                Figure::new("model/drifting/walk/0", "L1", 1.0),
                Figure::new("model/drifting/walk/1", "L2", 1.0),
                Figure::new("model/drifting/walk/2", "L3", 1.0),
                Figure::new("model/drifting/reads", "reads", 1.0),
                Figure::new("model/lockstep/iotlb", "lock-step miss", 1.0),
                Figure::new("model/lockstep/conflict", "conf", 1.0),
                Figure::new("model/lockstep/reads", "reads", 1.0),
                Figure::new("model/fallbacks", "fell back", 1.0),
            ],
            ..Part::ALL
        },
        "\
streams: a model of the hardware's caches, fed with the addresses that each allocator gave (no hardware is measured).
  rows       ours: size-aligned, lowest first, highest first, a contiguous chunk per ring, the same with all chunks side
             by side, a page between them (ring-apart); then the peers, whose placement is their own
  filled     IOTLB entries filled, per GiB moved, drifting
  tables     table pages that the ranges in flight need, per GiB of them; touched: all that ever were
  miss, conf IOTLB misses per page of 4 KiB, and those that a fully associative IOTLB would not have had
  L1 L2 L3   misses of the page-walk caches, per page; reads: all misses, each a memory read that the device waits for
  lock-step  all streams at the same place of their rings; else they drift
  fell back  requests that a ring's chunk had no room for
",
    ),
    (
        "huge",
        Part {
            title: "huge ranges",
            operation: "an allocation and its free",
            figures: &[
                Figure::new("entries/gib", "1 GiB", 1.0),
                Figure::new("entries/mib2", "2 MiB", 1.0),
                Figure::new("entries/kib4", "4 KiB", 1.0),
            ],
            ..Part::ALL
        },
        "\
huge ranges: made while 1024 small ones are held; 1 GiB, 2 MiB, 4 KiB: IOTLB entries for all of it, by page size.
",
    ),
    (
        "segment",
        Part {
            title: "a segment per user",
            operation: "an operation",
            figures: &[Figure::new("memory_bytes", "bytes", 1.0)],
            ..Part::ALL
        },
        "\
segment: a user's own range, with an allocator in it for so many CPUs, created with its first page (bytes: its memory)
  hot: alloc and free of one page, each thread in an allocator of its own or all in one; x is the same against a
  segment of one's own for all CPUs, in the same rounds
",
    ),
];

/// All rows, in blocks of those that belong together, and what the columns mean.
pub fn render(rows: &[Row]) -> String {
    let (mut out, mut legends) = (String::new(), String::from("\n"));
    for (kind, part, legend) in &PARTS {
        let of_kind = groups(rows.iter().filter(|row| row.name == *kind), block);
        for (block, rows) in &of_kind {
            let named: Vec<Row> =
                rows.iter().map(|row| Row { name: label(row), ..(*row).clone() }).collect();
            out.extend(rows_of(part, block, &named.iter().collect::<Vec<_>>()));
            for row in &named {
                if let Some(Value::String(failure)) = row.figures.get("failure") {
                    out += &format!("  {}, {}: {failure}\n", row.implementation, row.name);
                }
            }
        }
        if !of_kind.is_empty() {
            legends += legend;
        }
    }
    if out.is_empty() { out } else { out + &legends }
}

/// What distinguishes a block.
fn block(row: &Row) -> String {
    let of = |key| text(row, key);
    let bits = of("aperture_bits");
    if row.name != "streams" {
        return format!("{bits} bits");
    }
    let kept = match of("reuse").as_str() {
        "1" => "strict".to_owned(),
        uses => format!("kept for {uses} uses"),
    };
    format!(
        "{}, {kept}: {} streams, each with {} x {} in flight; IOTLB of {} sets x {} ways, {bits} bits",
        of("pattern"),
        of("streams"),
        of("buffers"),
        size(row),
        of("sets"),
        of("ways"),
    )
}

/// What distinguishes a row from the others of its block.
fn label(row: &Row) -> String {
    match row.name.as_str() {
        "streams" => text(row, "placement"),
        "huge" => size(row),
        _ => {
            let counted = |key, what| row.params.get(key).map(|n| format!("{n} {what}"));
            let words = ["pattern", "space", "placement"].map(|key| Some(text(row, key)));
            let words =
                words.into_iter().chain([counted("threads", "threads"), counted("cpus", "CPUs")]);
            let words: Vec<String> = words.flatten().filter(|word| !word.is_empty()).collect();
            words.join(", ")
        }
    }
}

fn size(row: &Row) -> String {
    row.params.get("size").and_then(Value::as_u64).map_or_else(String::new, bytes)
}

/// How many steps [`measure`] makes, and how long they should take together: for a [`Progress`].
pub fn plan(options: &Options) -> (u64, Duration) {
    let placements = streams::PLACEMENTS.len() as u32;
    let expected = streams::STEP * placements + fixed::STEP * options.repeat;
    (u64::from(placements + options.repeat), expected)
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
    let within = |what: &str, n: usize, from: usize, to: usize| match (from..=to).contains(&n) {
        true => Ok(()),
        false => Err(Usage(format!("{what} is {n}: it must be {from} to {to}"))),
    };
    within("the aperture's number of bits", options.aperture_bits as usize, 32, 57)?;
    within("the number of IOTLB sets", options.sets, 1, MOST_ENTRIES)?;
    if !options.sets.is_power_of_two() {
        let sets = options.sets;
        return Err(Usage(format!("{sets} IOTLB sets: the number must be a power of two")));
    }
    within("the number of IOTLB ways", options.ways, 1, MOST_ENTRIES / options.sets)
}

#[cfg(test)]
mod tests {
    use super::{streams::PLACEMENTS, *};

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
    fn rows_are_rendered_and_have_their_keys() {
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
        let placements = |pattern: &str, reuse: u32| {
            let of = |row: &&Row| row.params["pattern"] == pattern && row.params["reuse"] == reuse;
            let streams = rows.iter().filter(|row| row.name == "streams");
            streams.filter(of).map(|row| text(row, "placement")).collect::<Vec<_>>()
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
        rows[0].figures["model"]["table_pages_per_gib"] = 262_144.into();
        rows[0].figures["model"]["table_pages_touched"] = 1e12.into();
        let text = render(&rows);
        for line in text.lines() {
            assert!(line.chars().count() <= crate::text::WIDTH, "{line}");
        }
        assert!(text.contains("ring-apart") && text.contains("a segment per user"));
        assert_eq!(render(&[]), "");
    }
}
