//! The report for people.

use super::report::{AllocatorRow, PolicyRow, Report, TraceReport};
use crate::{
    stats::Estimate,
    text::{block, bytes, cells, count, dash, number, optional, plain, wrap},
};

const ALLOCATORS: &str = "\
An operation is an allocation or a free. Times are medians of rounds (allocators take turns); ± is the 95 % confidence.
  ns         an operation, timed all together; alloc, free, p99, worst: timed one by one
  steady     the worst, if each operation counts with its fastest round: what the machine did meanwhile is not in it
  x          ns against ringfence's of the same round: above 1 is slower
  failed     allocations that found no place
  span       high-water mark: from the lowest to the highest address in use at one time
  tables     distinct 2 MiB regions touched: leaf table pages
  frag       part of the span that was not in use, mean over the operations
  recorded   where the recorded guest had put things (under lazy invalidation, while it held what waited for a flush)
";

const POLICIES: &str = "\
What each policy sends for the same mappings:
  map, unmap requests    physically contiguous pieces go as one
  syncs                  waits for the device: for maps, for unmaps, for flushes of a domain (full: as a queue was full)
  deferred               longest that unmapped memory stayed reachable, and the most of it at once
";

/// All of it.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let interrupted = if report.interrupted { "; interrupted" } else { "" };
    out.push_str(&wrap(&format!(
        "{} rounds; {}{interrupted}",
        report.rounds,
        report.host.describe()
    )));
    for trace in &report.traces {
        out.push('\n');
        out.push_str(&wrap(&title(trace)));
        if !trace.allocators.is_empty() {
            out.push_str(&allocators(trace));
        }
        if !trace.policies.is_empty() {
            out.push('\n');
            out.push_str(&policies(trace));
        }
    }
    out.push('\n');
    out.push_str(ALLOCATORS);
    out.push_str(POLICIES);
    for warning in &report.warnings {
        out.push_str(&wrap(&format!("warning: {}", plain(warning))));
    }
    out
}

fn title(trace: &TraceReport) -> String {
    format!(
        "{}: {}, {} lines{}; {} maps and {} unmaps in {}; {}, {} bits: {} allocations, {} frees, at \
         most {} live ({})",
        plain(&trace.file),
        trace.format,
        trace.lines,
        if trace.damaged > 0 { format!(", {} damaged", trace.damaged) } else { String::new() },
        trace.maps,
        trace.unmaps,
        time(trace.seconds),
        count(trace.domains, "domain"),
        trace.aperture_bits,
        trace.allocations,
        trace.frees,
        trace.peak_live_ranges,
        bytes(trace.peak_live_bytes),
    )
}

fn time(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{seconds:.1} s") } else { format!("{:.1} ms", seconds * 1e3) }
}

fn allocators(trace: &TraceReport) -> String {
    let mut lines = vec![cells(&[
        "", "ns", "±", "x", "±", "alloc", "free", "p99", "worst", "steady", "failed", "span",
        "tables", "frag",
    ])];
    lines.extend(trace.allocators.iter().map(allocator_cells));
    block(2, lines)
}

fn allocator_cells(row: &AllocatorRow) -> Vec<String> {
    let [ns, ns_half] = both(row.ns_per_op);
    let [ratio, ratio_half] = both(row.ratio_to_ringfence);
    let median = |estimate: Option<Estimate>| optional(estimate.map(|e| e.median));
    vec![
        row.name.clone(),
        ns,
        ns_half,
        ratio,
        ratio_half,
        median(row.alloc_ns),
        median(row.free_ns),
        median(row.p99_ns),
        median(row.worst_ns),
        optional(row.worst_steady_ns),
        row.failures.to_string(),
        bytes(row.peaks.span_bytes),
        row.peaks.table_pages.to_string(),
        format!("{:.1}%", row.fragmentation * 100.0),
    ]
}

fn both(estimate: Option<Estimate>) -> [String; 2] {
    estimate.map_or([dash(), String::new()], |estimate| {
        [number(estimate.median), optional(estimate.half_width())]
    })
}

fn policies(trace: &TraceReport) -> String {
    let mut lines = vec![
        cells(&["", "requests", "", "syncs", "", "", "", "", "deferred", "", ""]),
        cells(&[
            "", "map", "unmap", "all", "map", "unmap", "flush", "full", "ms", "most", "failed",
        ]),
    ];
    lines.extend(trace.policies.iter().map(policy_cells));
    block(2, lines)
}

fn policy_cells(row: &PolicyRow) -> Vec<String> {
    let count = |n: Option<u64>| n.map_or(dash(), |n| n.to_string());
    let name = if row.effective_policy == row.policy {
        row.policy.clone()
    } else {
        format!("{} (ran as {})", row.policy, row.effective_policy)
    };
    vec![
        name,
        row.map_requests.to_string(),
        row.unmap_requests.to_string(),
        count(row.syncs),
        count(row.map_syncs),
        count(row.unmap_syncs),
        count(row.flushes),
        count(row.full_queue_flushes),
        optional(row.max_deferred_ms),
        row.max_deferred_bytes.map_or(dash(), bytes),
        count(row.failures),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{replay::space::Peaks, text::WIDTH};

    fn report() -> Report {
        let mut report = Report::new(15);
        let estimate = Some(Estimate { median: 123_456.0, lo: Some(1e5), hi: Some(2e5) });
        let allocator = |name: &str| AllocatorRow {
            name: name.to_owned(),
            ns_per_op: estimate,
            alloc_ns: estimate,
            free_ns: estimate,
            p99_ns: estimate,
            worst_ns: estimate,
            worst_steady_ns: Some(123_456.0),
            ratio_to_ringfence: estimate,
            failures: 1_234_567,
            peaks: Peaks { span_bytes: u64::MAX, table_pages: 1 << 31, ..Peaks::default() },
            fragmentation: 0.123_456,
            ..AllocatorRow::default()
        };
        let policy = |name: &str| PolicyRow {
            policy: name.to_owned(),
            effective_policy: name.to_owned(),
            map_requests: 12_345_678,
            unmap_requests: 12_345_678,
            syncs: Some(12_345_678),
            map_syncs: Some(12_345_678),
            max_deferred_ms: Some(1000.0),
            max_deferred_bytes: Some(123 << 20),
            ..PolicyRow::default()
        };
        report.traces.push(TraceReport {
            file: "a \u{1b}[2J".repeat(40),
            format: "qemu-virtio-iommu".to_owned(),
            lines: 1_000_000,
            damaged: 3,
            allocators: ["recorded", "rbtree", "ringfence"].map(allocator).to_vec(),
            policies: ["recorded", "strict", "lazy-mq+map"].map(policy).to_vec(),
            ..TraceReport::default()
        });
        report.warnings.push("x".repeat(300));
        report
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_and_no_name_moves_the_cursor() {
        let text = render(&report());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn every_row_is_shown() {
        let text = render(&report());
        for name in ["recorded", "rbtree", "ringfence", "strict", "lazy-mq+map", "3 damaged"] {
            assert!(text.contains(name), "{name}: {text}");
        }
    }

    #[test]
    fn json_is_read_back() {
        let report = report();
        assert_eq!(
            serde_json::from_str::<Report>(&report.to_json()).unwrap().traces[0].lines,
            1_000_000
        );
        let value: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(value["schema"], "ringfence.replay/1");
        assert_eq!(value["traces"][0]["allocators"][1]["impl"], "rbtree");
        assert!(value["traces"][0]["allocators"][1]["ns_per_op"]["median"].is_number());
    }
}
