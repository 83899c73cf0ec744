//! The rows for a terminal: a block for each pattern, no wider than the other tables.

use super::{Misses, Modelled, Row};
use crate::text::{CellAlignment, bytes, cells, columns, dash};

/// All rows, in blocks of those that belong together, and what the columns mean.
pub fn render(rows: &[Row]) -> String {
    let mut out = String::new();
    let mut rest = rows;
    while let Some(first) = rest.first() {
        let block = rest.iter().take_while(|row| title(row) == title(first)).count();
        let (rows, others) = rest.split_at(block);
        out.push_str(&title(first));
        out.push('\n');
        out.push_str(&match first.name.as_str() {
            "streams" => streams(rows),
            "huge" => huge(rows),
            _ => segment(rows),
        });
        out.push('\n');
        rest = others;
    }
    let has = |name: &str| rows.iter().any(|row| row.name == name);
    let legends = [("streams", STREAMS), ("huge", HUGE), ("segment", SEGMENT)];
    for (_, legend) in legends.into_iter().filter(|(name, _)| has(name)) {
        out.push_str(legend);
    }
    out
}

const STREAMS: &str = "\
streams: a model of the hardware's caches, fed with the addresses that each allocator gave (no hardware is measured).
  placement  ours: size-aligned, lowest first, highest first, a contiguous chunk a ring, the same with all chunks side
             by side, a page between them (ring-apart); then the peers, whose placement is their own
  filled     IOTLB entries filled, a GiB moved, drifting
  tables     table pages that the ranges in flight need, a GiB of them; touched: all that ever were
  miss, conf IOTLB misses a page of 4 KiB, and those that a fully associative IOTLB would not have had
  L1 L2 L3   misses of the page-walk caches, a page; reads: all misses, each a memory read that the device waits for
  lock-step  all streams at the same place of their rings; else they drift
  fell back  requests that a ring's chunk had no room for
";
const HUGE: &str = "\
huge: a range is allocated and freed while 1024 small ones are held; entries: IOTLB entries for all of it, by page size.
";
const SEGMENT: &str = "\
segment: a user's own range, with an allocator in it for so many CPUs, created with its first page (bytes: its memory)
  hot: alloc and free of one page, each thread in an allocator of its own or all in one; vs own is the same against a
  segment of one's own for all CPUs, in the same rounds
";

/// What distinguishes a block.
fn title(row: &Row) -> String {
    let params = &row.params;
    let size = params.size.map_or(String::new(), bytes);
    match row.name.as_str() {
        "streams" => {
            let kept = match params.reuse {
                None | Some(1) => "strict".to_owned(),
                Some(uses) => format!("kept for {uses} uses"),
            };
            format!(
                "{}, {kept}: {} streams, each with {} x {size} in flight; IOTLB of {} sets x {} ways, {} bits",
                params.pattern,
                params.streams.unwrap_or(0),
                params.buffers.unwrap_or(0),
                params.sets.unwrap_or(0),
                params.ways.unwrap_or(0),
                params.aperture_bits,
            )
        }
        "huge" => format!("huge ranges, {} bits", params.aperture_bits),
        _ => format!("a segment a user, {} bits", params.aperture_bits),
    }
}

fn streams(rows: &[Row]) -> String {
    let mut table = vec![
        cells(&[
            "",
            "filled",
            "tables",
            "",
            "drifting",
            "",
            "",
            "",
            "",
            "",
            "lock-step",
            "",
            "",
            "fell",
        ]),
        cells(&[
            "placement",
            "/GiB",
            "/GiB",
            "touched",
            "miss",
            "conf",
            "L1",
            "L2",
            "L3",
            "reads",
            "miss",
            "conf",
            "reads",
            "back",
        ]),
    ];
    for row in rows {
        let Some(Modelled { drifting, lockstep, .. }) = row.model else { continue };
        let model = row.model.unwrap_or_default();
        let name = row.params.placement.as_deref().unwrap_or(&row.implementation);
        let miss = |misses: Misses| [misses.iotlb, misses.conflict].map(three);
        let mut line = cells(&[name]);
        line.push(format!("{:.0}", model.entries_filled_per_gib));
        line.push(format!("{:.0}", model.table_pages_per_gib));
        line.push(format!("{:.0}", model.table_pages_touched));
        line.extend(miss(drifting));
        line.extend(drifting.walk.map(three));
        line.push(three(drifting.reads()));
        line.extend(miss(lockstep));
        line.push(three(lockstep.reads()));
        line.push(model.fallbacks.to_string());
        table.push(line);
    }
    block(table)
}

fn huge(rows: &[Row]) -> String {
    let mut table =
        vec![cells(&["allocator", "size", "ns a pair", "±", "vs ours", "1 GiB", "2 MiB", "4 KiB"])];
    for row in rows {
        let mut line = cells(&[&row.implementation, &row.params.size.map_or(String::new(), bytes)]);
        if row.failure.is_some() {
            line.push("fails".to_owned());
        } else {
            line.extend(timed(row));
            let entries = row.entries.unwrap_or_default();
            line.extend([entries.gib, entries.mib2, entries.kib4].map(|n| n.to_string()));
        }
        table.push(line);
    }
    let mut out = block(table);
    for row in rows {
        if let Some(failure) = &row.failure {
            let size = row.params.size.map_or(String::new(), bytes);
            out.push_str(&format!("  {}, {size}: {failure}\n", row.implementation));
        }
    }
    out
}

fn segment(rows: &[Row]) -> String {
    let mut table = vec![cells(&[
        "allocator",
        "what",
        "CPUs",
        "threads",
        "space",
        "ns",
        "±",
        "vs own",
        "bytes",
    ])];
    for row in rows {
        let params = &row.params;
        let name = params.placement.as_deref().unwrap_or(&row.implementation);
        let mut line = cells(&[name, &params.pattern]);
        line.push(params.cpus.map_or(String::new(), |cpus| cpus.to_string()));
        line.push(params.threads.map_or(String::new(), |threads| threads.to_string()));
        line.push(params.space.clone().unwrap_or_default());
        line.extend(timed(row));
        line.push(row.memory_bytes.map_or(String::new(), |bytes| format!("{bytes:.0}")));
        table.push(line);
    }
    block(table)
}

/// Median, half of its interval, ratio.
fn timed(row: &Row) -> [String; 3] {
    [
        row.ns_per_op.map_or(dash(), |ns| ns_text(ns.median)),
        row.ns_per_op.and_then(|ns| ns.half_width()).map_or(dash(), ns_text),
        row.ratio_to_ringfence.map_or(dash(), |ratio| format!("x{ratio:.2}")),
    ]
}

fn ns_text(ns: f64) -> String {
    if ns < 99.95 { format!("{ns:.1}") } else { format!("{ns:.0}") }
}

/// Distinguishes zero from very little.
fn three(n: f64) -> String {
    if n == 0.0 { "0".to_owned() } else { format!("{n:.3}") }
}

/// Columns, the first to the left, the others to the right.
fn block(lines: Vec<Vec<String>>) -> String {
    columns(lines, [(2, CellAlignment::Left), (1, CellAlignment::Right)])
}
