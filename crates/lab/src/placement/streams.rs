//! Competing streams under each placement: which patterns are run, and their results.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::json;

use super::{
    GRANULE, Options,
    machine::{Machine, Order, Pattern, Totals},
};
use crate::{bench::Row, block::mix, progress::Progress};

/// The placements that are compared, and the peers, whose placement is their own.
pub(super) const PLACEMENTS: [&str; 8] =
    ["size", "lowest", "highest", "ring", "ring-apart", "rbtree", "bitmap", "magazines"];

/// About what one placement takes.
pub(super) const STEP: Duration = Duration::from_millis(1500);
/// Runs that a figure is the mean of, each with a seed of its own: streams drift slowly, and which
/// of them meet is chance.
pub(super) const RUNS: u32 = 4;

pub(super) fn measure(
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Vec<Row>> {
    let mut rows: Vec<Vec<Row>> = vec![Vec::new(); patterns(options).len()];
    for placement in PLACEMENTS {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        progress.begin(&format!("placement {placement}"));
        for (pattern, rows) in patterns(options).into_iter().zip(&mut rows) {
            let row = row(options, &pattern, placement)
                .with_context(|| format!("placement {placement}, {}", pattern.name))?;
            rows.push(row);
        }
        progress.step(STEP);
    }
    // A table a pattern.
    Ok(rows.into_iter().flatten().collect())
}

/// The buffers as configured, and the same bytes page by page; strict, and kept for a while.
pub(super) fn patterns(options: &Options) -> Vec<Pattern> {
    let bytes = options.buffer_bytes.next_multiple_of(GRANULE);
    let pages = options.buffers * (bytes / GRANULE) as usize;
    let mut shapes = vec![("buffers", options.buffers, bytes)];
    if bytes > GRANULE {
        shapes.push(("pages", pages, GRANULE));
    }
    let mut uses = vec![1];
    if options.reuse > 1 {
        uses.push(options.reuse);
    }
    let with = |(name, slots, bytes)| {
        uses.clone().into_iter().map(move |uses| Pattern { name, slots, bytes, uses })
    };
    shapes.into_iter().flat_map(with).collect()
}

fn row(options: &Options, pattern: &Pattern, placement: &str) -> Result<Row> {
    let runs = |order| {
        (0..RUNS).try_fold(Totals::default(), |sum, run| {
            let seed = mix(options.seed ^ u64::from(run) << 56);
            Machine::new(options, pattern, placement, seed)?.run(order, sum)
        })
    };
    let (drifting, lockstep) = (runs(Order::Drifting)?, runs(Order::Lockstep)?);
    let ours = !matches!(placement, "rbtree" | "bitmap" | "magazines");
    let per_gib = (1u64 << 30) as f64 / GRANULE as f64;
    let params = [
        ("pattern", pattern.name.into()),
        ("placement", placement.into()),
        ("aperture_bits", options.aperture_bits.into()),
        ("size", pattern.bytes.into()),
        ("streams", options.streams.into()),
        ("buffers", pattern.slots.into()),
        ("reuse", pattern.uses.into()),
        ("sets", options.sets.into()),
        ("ways", options.ways.into()),
    ];
    let mut row = super::row("streams", if ours { "ringfence" } else { placement }, params);
    let model = json!({
        "entries_filled_per_gib": drifting.misses().iotlb * per_gib,
        "table_pages_per_gib": drifting.per_gib(drifting.tables_in_flight),
        "table_pages_touched": drifting.tables_touched as f64 / f64::from(RUNS),
        "table_bytes_per_gib": drifting.per_gib(drifting.table_bytes),
        "drifting": drifting.misses(),
        "lockstep": lockstep.misses(),
        "fallbacks": drifting.fallbacks,
    });
    row.figures.insert("model".to_owned(), model);
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(streams: usize, buffers: usize, bytes: u64) -> Options {
        Options { streams, buffers, buffer_bytes: bytes, ..Options::default() }
    }

    #[test]
    fn every_placement_has_a_row_and_rings_keep_to_their_chunks() {
        let options = Options { reuse: 1, ..options(8, 16, GRANULE) };
        let pattern = &patterns(&options)[0];
        for placement in PLACEMENTS {
            let row = row(&options, pattern, placement).unwrap();
            let figure = |key| row.figures["model"].pointer(key).unwrap().as_f64().unwrap();
            assert!(
                figure("/drifting/iotlb") >= 1.0 && figure("/lockstep/iotlb") >= 1.0,
                "{row:?}"
            );
            assert!(figure("/table_pages_per_gib") > 0.0 && figure("/table_pages_touched") > 0.0);
            assert_eq!(figure("/fallbacks"), 0.0);
            if placement == "ring-apart" {
                // Eight streams in eight of sixteen sets.
                assert_eq!(figure("/lockstep/conflict"), 0.0);
            }
            // The same seed, the same figures.
            assert_eq!(super::row(&options, pattern, placement).unwrap(), row);
        }
        assert!(row(&options, pattern, "nowhere").is_err());
    }

    #[test]
    fn patterns_are_as_many_as_the_options_distinguish() {
        let names = |options: &Options| {
            let of = |pattern: Pattern| (pattern.name, pattern.slots, pattern.bytes, pattern.uses);
            patterns(options).into_iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(
            names(&options(1, 2, 8192)),
            [
                ("buffers", 2, 8192, 1),
                ("buffers", 2, 8192, 16),
                ("pages", 4, 4096, 1),
                ("pages", 4, 4096, 16)
            ]
        );
        let strict = Options { reuse: 1, ..options(1, 2, 100) };
        assert_eq!(names(&strict), [("buffers", 2, 4096, 1)]);
    }
}
