//! The benchmark for a terminal.

use serde_json::Value;

use super::params::{Implementation, Op};
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            both, figure, groups, headline, interval, section, setting, single, text, times,
            warnings,
        },
    },
    text::{block, cells, number, optional, wrap},
};

/// What was measured, as text.
pub fn render(benchmark: &Benchmark) -> String {
    let trips: Vec<String> = benchmark
        .settings
        .get("round_trip_ns")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_f64)
        .map(number)
        .collect();
    let apart = match trips[..] {
        [] => String::new(),
        _ => {
            let trips = trips.join(", later ");
            format!("; a cache line goes to the other CPU and back in {trips} ns")
        }
    };
    let each = format!(" of {} ms", setting(benchmark, "budget_ms"));
    let mut out = wrap(&(headline(benchmark, "MAP and UNMAP of a virtio-iommu", &each) + &apart));
    for op in Op::ALL {
        let rows: Vec<&Row> =
            benchmark.rows.iter().filter(|row| text(row, "op") == op.name()).collect();
        if rows.iter().all(|row| row.ns_per_op.median.is_none()) {
            continue;
        }
        let block = match op {
            Op::OneCore | Op::TwoCores => pairs(&rows, &["batch", "order"], false),
            Op::TwoDomains => pairs(&rows, &["batch", "threads", "form"], true),
            Op::OneOf => one_of(&rows),
            Op::Attach => attach(&rows),
            Op::Memory => memory(&rows),
        };
        section(&mut out, about(op), &block);
    }
    out.extend(["\n", LEGEND]);
    for row in &benchmark.rows {
        if let Some(note) = &row.note {
            out.push_str(&wrap(&format!("note: {}, {}: {note}", row.implementation, row.name)));
        }
    }
    warnings(&mut out, benchmark);
    out
}

const LEGEND: &str = "\
Medians of rounds in which all devices take turns; ± half of the 95 % interval; the driver is ours throughout.
  pair             a MAP and an UNMAP of a page of 4 KiB, requests of virtio-iommu through a split ring, statuses checked
  M/s              million pairs a second
  x                how many times as long as ringfence
  btreemap         mappings in a B-tree behind one lock, UNMAP looks at all of a domain: the design of cloud-hypervisor's
  btreemap-range   the same, but UNMAP looks at what lies in its range
ringfence completes an UNMAP when no thread uses the translation any more; the others cache none.
";

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

/// A line for each load, with the others' ratios after ours.
fn pairs(rows: &[&Row], keys: &[&str], scaling: bool) -> String {
    let is_there = |implementation: &Implementation| {
        rows.iter().any(|row| row.implementation == implementation.name())
    };
    let others = Implementation::ALL
        .into_iter()
        .filter(|implementation| *implementation != Implementation::Ringfence);
    let others: Vec<Implementation> = others.filter(is_there).collect();
    // The last column of each.
    let scaling = scaling.then_some("scaling");
    let mut head = cells(keys);
    head.extend(["ns", "±", "M/s"].into_iter().chain(scaling).map(str::to_owned));
    for implementation in &others {
        head.extend([implementation.name(), "x"].into_iter().chain(scaling).map(str::to_owned));
    }
    let mut lines = vec![head];
    for (_, rows) in groups(rows.iter().copied(), |row| row.name.clone()) {
        let find = |implementation: Implementation| {
            rows.iter().find(|row| row.implementation == implementation.name())
        };
        let scales = |row: Option<&&Row>| {
            scaling.map(|key| row.map_or(String::new(), |row| times(interval(row, key).median)))
        };
        let mut line: Vec<String> = keys.iter().map(|key| text(rows[0], key)).collect();
        let own = find(Implementation::Ringfence);
        line.extend(own.map_or([String::new(), String::new()], |row| both(row.ns_per_op)));
        line.extend(own.map_or([String::new()], |row| {
            [optional(interval(row, "pairs_per_s").scaled(1e-6).median)]
        }));
        line.extend(scales(own));
        for &implementation in &others {
            line.extend(find(implementation).map_or([String::new(), String::new()], |row| {
                [optional(row.ns_per_op.median), times(row.ratio_to_ringfence)]
            }));
            line.extend(scales(find(implementation)));
        }
        lines.push(line);
    }
    block(lines)
}

fn one_of(rows: &[&Row]) -> String {
    let mut lines =
        vec![cells(&["device", "live", "unmap", "±", "x fewest", "map", "±", "x fewest"])];
    for row in rows {
        let mut line = vec![row.implementation.clone(), text(row, "live")];
        for what in ["unmap", "map"] {
            line.extend(figure(row, &format!("{what}_ns"), 1.0));
            line.push(times(interval(row, &format!("{what}_ratio_to_fewest")).median));
        }
        lines.push(line);
    }
    block(lines)
}

fn attach(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&["live", "table", "ATTACH ns", "±", "ns a mapping"])];
    for row in rows {
        let mut line = ["live", "form"].map(|key| text(row, key)).to_vec();
        line.extend(figure(row, "attach_ns", 1.0));
        line.push(optional(row.ns_per_op.median));
        lines.push(line);
    }
    block(lines)
}

fn memory(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&["mappings", "live", "bytes a mapping", "MAP ns"])];
    for row in rows {
        let mut line = ["spread", "live"].map(|key| text(row, key)).to_vec();
        line.extend([single(row, "bytes_per_mapping"), row.ns_per_op.median].map(optional));
        lines.push(line);
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
        for op in Op::ALL {
            assert!(text.contains(about(op)), "{text}");
        }
        assert!(text.contains("btreemap-range") && text.contains("scattered"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 130), "{text}");
        let nothing = super::super::run(&tiny(), &AtomicBool::new(true)).unwrap();
        assert!(render(&nothing).contains("interrupted"));
    }
}
