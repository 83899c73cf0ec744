//! The benchmark for a terminal.

use std::fmt::Write;

use serde_json::Value;

use super::params::{Implementation, Op};
use crate::{
    bench::{
        Benchmark, Row,
        table::{distinct, half_width, interval, machine, text, times},
    },
    text::{block, number, optional, plain, wrap},
};

/// What was measured, as text.
pub fn render(benchmark: &Benchmark) -> String {
    let mut out = wrap(&headline(benchmark));
    for &op in Op::ALL {
        let rows: Vec<&Row> =
            benchmark.rows.iter().filter(|row| text(row, "op") == op.name()).collect();
        if rows.iter().all(|row| row.ns_per_op.median.is_none()) {
            continue;
        }
        let _ = write!(out, "\n{}\n", about(op));
        out.push_str(&match op {
            Op::OneCore | Op::TwoCores => pairs(&rows, &["batch", "order"], false),
            Op::TwoDomains => pairs(&rows, &["batch", "threads", "form"], true),
            Op::OneOf => one_of(&rows),
            Op::Attach => attach(&rows),
            Op::Memory => memory(&rows),
        });
    }
    let _ = write!(out, "\n{LEGEND}");
    for row in benchmark.rows.iter().filter(|row| row.note.is_some()) {
        let note = row.note.as_deref().unwrap_or_default();
        out.push_str(&wrap(&format!("note: {}, {}: {note}", row.implementation, row.name)));
    }
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {}", plain(warning))));
    }
    out
}

const LEGEND: &str = "\
Medians of rounds in which all devices take turns; ± half of the 95 % interval; the driver is ours throughout.
  pair             a MAP and an UNMAP of a page of 4 KiB, requests of virtio-iommu through a split ring, statuses checked
  M/s              million pairs a second
  x                how many times as long as ringfence
  btreemap         mappings in a B-tree behind one lock, UNMAP looks at all of a domain: the design of cloud-hypervisor's
  btreemap-range   the same, but UNMAP looks at what lies in its range
ringfence answers an UNMAP when no thread uses the translation any more; the others cache none.
";

fn headline(benchmark: &Benchmark) -> String {
    let setting = |key: &str| benchmark.settings.get(key);
    let budget = setting("budget_ms").and_then(Value::as_f64).unwrap_or(0.0);
    let trips: Vec<String> = setting("round_trip_ns")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_f64)
        .map(number)
        .collect();
    let apart = match trips[..] {
        [] => String::new(),
        _ => format!(
            "; a cache line goes to the other CPU and back in {} ns",
            trips.join(", later ")
        ),
    };
    format!(
        "MAP and UNMAP of a virtio-iommu; {} rounds of {budget} ms{}; {}{apart}",
        benchmark.rounds,
        if benchmark.interrupted { ", interrupted" } else { "" },
        machine(benchmark),
    )
}

fn about(op: Op) -> &'static str {
    match op {
        Op::OneCore => "both ends on one core: they take turns in one thread",
        Op::TwoCores => "driver and device on a core each",
        Op::TwoDomains => {
            "one or two domains, each with a thread and a request queue of its own; apart: with a device \
             of its own, too"
        }
        Op::OneOf => "one mapping among many, UNMAP and MAP each by itself, both ends on one core",
        Op::Attach => {
            "a second endpoint joins a domain with many mappings; mirror: it has a table of its own, where \
             all is mapped again"
        }
        Op::Memory => "table memory of a domain",
    }
}

fn cells(text: &[&str]) -> Vec<String> {
    text.iter().map(|cell| (*cell).to_owned()).collect()
}

/// The rows of one implementation, in order.
fn of<'r>(rows: &[&'r Row], who: Implementation) -> Vec<&'r Row> {
    rows.iter().copied().filter(|row| row.implementation == who.name()).collect()
}

/// A line for each load, with the others' ratios behind ours.
fn pairs(rows: &[&Row], keys: &[&str], scaling: bool) -> String {
    let mut head = cells(keys);
    head.extend(cells(&["ns", "±", "M/s"]));
    if scaling {
        head.push("scaling".to_owned());
    }
    let others = others(rows);
    for who in &others {
        head.extend(cells(&[who.name(), "x"]));
        if scaling {
            head.push("scaling".to_owned());
        }
    }
    let mut lines = vec![head];
    let names = distinct(rows.iter().copied(), |row| row.name.clone());
    for name in names {
        let find = |who: Implementation| {
            rows.iter().find(|row| row.name == name && row.implementation == who.name())
        };
        let Some(any) = rows.iter().find(|row| row.name == name) else { continue };
        let mut line: Vec<String> = keys.iter().map(|key| text(any, key)).collect();
        let scales = |row: &Row| times(interval(row, "scaling").median);
        match find(Implementation::Ringfence) {
            Some(row) => {
                line.extend([optional(row.ns_per_op.median), half_width(row.ns_per_op)]);
                line.push(optional(interval(row, "pairs_per_s").scaled(1e-6).median));
                if scaling {
                    line.push(scales(row));
                }
            }
            None => line.extend(vec![String::new(); if scaling { 4 } else { 3 }]),
        }
        for &who in &others {
            match find(who) {
                Some(row) => {
                    line.extend([optional(row.ns_per_op.median), times(row.ratio_to_ringfence)]);
                    if scaling {
                        line.push(scales(row));
                    }
                }
                None => line.extend(vec![String::new(); if scaling { 3 } else { 2 }]),
            }
        }
        lines.push(line);
    }
    block(lines)
}

fn others(rows: &[&Row]) -> Vec<Implementation> {
    let others = Implementation::ALL.iter().copied();
    let measured = |who: &Implementation| !of(rows, *who).is_empty();
    others.filter(|who| *who != Implementation::Ringfence).filter(measured).collect()
}

fn one_of(rows: &[&Row]) -> String {
    let mut lines =
        vec![cells(&["device", "live", "unmap", "±", "x fewest", "map", "±", "x fewest"])];
    for row in rows {
        let mut line = vec![row.implementation.clone(), text(row, "live")];
        for what in ["unmap", "map"] {
            let ns = interval(row, &format!("{what}_ns"));
            line.extend([optional(ns.median), half_width(ns)]);
            line.push(times(interval(row, &format!("{what}_ratio_to_fewest")).median));
        }
        lines.push(line);
    }
    block(lines)
}

fn attach(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&["live", "table", "ATTACH ns", "±", "ns a mapping"])];
    for row in rows {
        let ns = interval(row, "attach_ns");
        lines.push(vec![
            text(row, "live"),
            text(row, "form"),
            optional(ns.median),
            half_width(ns),
            optional(row.ns_per_op.median),
        ]);
    }
    block(lines)
}

fn memory(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&["mappings", "live", "bytes a mapping", "MAP ns"])];
    for row in rows {
        let each = row.figures.get("bytes_per_mapping").and_then(Value::as_f64);
        lines.push(vec![
            text(row, "spread"),
            text(row, "live"),
            optional(each),
            optional(row.ns_per_op.median),
        ]);
    }
    block(lines)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::{super::tests::tiny, *};

    #[test]
    fn each_block_has_a_line_for_each_load() {
        let benchmark = super::super::run(&tiny(), &AtomicBool::new(false)).unwrap();
        let text = render(&benchmark);
        for &op in Op::ALL {
            assert!(text.contains(about(op)), "{text}");
        }
        assert!(text.contains("btreemap-range") && text.contains("scattered"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 130), "{text}");
        let nothing = super::super::run(&tiny(), &AtomicBool::new(true)).unwrap();
        assert!(render(&nothing).contains("interrupted"));
    }
}
