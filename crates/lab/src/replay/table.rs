//! The report for people.

use super::report::{AllocatorRow, PolicyRow, Report, TraceReport};
use crate::{
    stats::Estimate,
    text::{Column, bytes, count, dash, optional, plain, table, wrap},
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
    let median = |estimate: Option<Estimate>| optional(estimate.map(|e| e.median));
    let half = |of: Option<Estimate>| of.map_or(String::new(), |of| optional(of.half_width()));
    let columns: [Column<'_, AllocatorRow, 1>; 14] = [
        ([""], &|row| row.name.clone()),
        (["ns"], &|row| median(row.ns_per_op)),
        (["±"], &|row| half(row.ns_per_op)),
        (["x"], &|row| median(row.ratio_to_ringfence)),
        (["±"], &|row| half(row.ratio_to_ringfence)),
        (["alloc"], &|row| median(row.alloc_ns)),
        (["free"], &|row| median(row.free_ns)),
        (["p99"], &|row| median(row.p99_ns)),
        (["worst"], &|row| median(row.worst_ns)),
        (["steady"], &|row| optional(row.worst_steady_ns)),
        (["failed"], &|row| row.failures.to_string()),
        (["span"], &|row| bytes(row.peaks.span_bytes)),
        (["tables"], &|row| row.peaks.table_pages.to_string()),
        (["frag"], &|row| format!("{:.1}%", row.fragmentation * 100.0)),
    ];
    table(2, &columns, &trace.allocators)
}

fn policies(trace: &TraceReport) -> String {
    let count = |n: Option<u64>| n.map_or(dash(), |n| n.to_string());
    let name = |row: &PolicyRow| match &row.effective_policy {
        effective if *effective == row.policy => row.policy.clone(),
        effective => format!("{} (ran as {effective})", row.policy),
    };
    let columns: [Column<'_, PolicyRow, 2>; 11] = [
        (["", ""], &name),
        (["requests", "map"], &|row| row.map_requests.to_string()),
        (["", "unmap"], &|row| row.unmap_requests.to_string()),
        (["syncs", "all"], &|row| count(row.syncs)),
        (["", "map"], &|row| count(row.map_syncs)),
        (["", "unmap"], &|row| count(row.unmap_syncs)),
        (["", "flush"], &|row| count(row.flushes)),
        (["", "full"], &|row| count(row.full_queue_flushes)),
        (["deferred", "ms"], &|row| optional(row.max_deferred_ms)),
        (["", "most"], &|row| row.max_deferred_bytes.map_or(dash(), bytes)),
        (["", "failed"], &|row| count(row.failures)),
    ];
    table(2, &columns, &trace.policies)
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
            serde_json::from_value::<Report>(serde_json::to_value(&report).unwrap())
                .unwrap()
                .traces[0]
                .lines,
            1_000_000
        );
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(value["schema"], "ringfence.replay/1");
        assert_eq!(value["traces"][0]["allocators"][1]["impl"], "rbtree");
        assert!(value["traces"][0]["allocators"][1]["ns_per_op"]["median"].is_number());
    }
}
