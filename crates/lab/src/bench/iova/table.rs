//! The benchmark for a terminal: peers beside each other, a block for each pattern and size.

use serde_json::Value;

use super::pattern::{Live, Pattern, Size};
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            both, count, distinct, groups, interval, ratio, rounds, section, setting, setting_text,
            single, text, times, warnings,
        },
    },
    text::{block, cells, number, optional, wrap},
};

/// All of it; with `details` every figure of every row as well.
pub fn render(benchmark: &Benchmark, details: bool) -> String {
    let mut out = wrap(&format!(
        "allocators of I/O virtual addresses; aperture of {} bits ({} for full sets), granule 4 KiB; \
         {}; single operations by {}, which takes {} ns of each; {}",
        setting(benchmark, "aperture_bits"),
        setting(benchmark, "full_set_aperture_bits"),
        rounds(benchmark, &format!(" of {} ms", setting(benchmark, "budget_ms"))),
        setting_text(benchmark, "clock"),
        number(setting(benchmark, "clock_ns")),
        benchmark.host.describe(),
    ));
    let names = distinct(&benchmark.rows, |row| row.implementation.clone());
    let kind = |row: &Row| (text(row, "pattern"), text(row, "size"));
    let blocks = groups(&benchmark.rows, kind);
    for ((pattern, size), rows) in &blocks {
        let words = size.parse().map_or(size.clone(), |size: Size| size.about());
        let about = pattern.parse().map_or("", Pattern::about);
        section(&mut out, &format!("{pattern}, {words}: {about}"), &side_by_side(&names, rows));
        if details {
            section(&mut out, &format!("{pattern}, {size}, in detail"), &in_detail(rows));
        }
    }
    if !blocks.is_empty() {
        let title = "memory, bytes a live range (measured: the heap before and after)";
        section(&mut out, title, &memory(&names, &benchmark.rows));
        failures(&mut out, &benchmark.rows);
        out.extend(["\n", LEGEND]);
    }
    notes(&mut out, &benchmark.rows);
    warnings(&mut out, benchmark);
    out
}

const LEGEND: &str = "\
An operation is one alloc and one free; ns: what it takes a thread (of its CPU time; of the wall's if there are
several), the median of rounds, in which all take turns.
  ±         half of its 95 % interval     x   ns against those of ringfence, the median of the rounds' ratios
  p99       of single operations, timed one by one; beside it the worst, whatever interrupted it included
  live      ranges that are allocated meanwhile (of the sizes that are measured), dealt out among the threads;
            48%: a 32-bit space, filled with blocks of 16 granules and random ones freed (48%x1: of 1 granule)
  scaling   what several threads get done against what one does; that of `control` (two atomics on a line of the
            thread's own instead of an allocator) is what this machine can do
  !         a request failed although a hole for it was free     *   requests failed, and none was free for them
";

/// Rows that a note names; the JSON has it at each.
const MOST_NAMED: usize = 4;

/// A column pair for each implementation, a line for each live set and number of threads.
fn side_by_side(names: &[String], rows: &[&Row]) -> String {
    let mut head = vec![String::new(), String::new()];
    let mut units = cells(&["live", "threads"]);
    for (index, name) in names.iter().enumerate() {
        head.extend([name.clone(), String::new()]);
        units.extend(cells(&["ns", if index == 0 { "±" } else { "x" }]));
    }
    let mut lines = vec![head, units];
    for (live, rows) in groups(rows.iter().copied(), live) {
        let mut label = live;
        for (threads, rows) in groups(rows, threads) {
            let of = |name: &String| rows.iter().find(|row| row.implementation == *name).copied();
            let first = !label.is_empty();
            let mut line = vec![std::mem::take(&mut label), threads.to_string()];
            for (index, name) in names.iter().enumerate() {
                line.extend(match of(name) {
                    Some(row) if index == 0 => [marked(row), both(row.ns_per_op)[1].clone()],
                    Some(row) => [marked(row), times(row.ratio_to_ringfence)],
                    None => [String::new(), String::new()],
                });
            }
            lines.push(line);
            // Once a live set: the details have the rest.
            if first {
                let mut line = cells(&["", "p99"]);
                for name in names {
                    let one = |key| optional(of(name).and_then(|row| single(row, key)));
                    line.extend(["p99_ns", "worst_ns"].map(one));
                }
                lines.push(line);
            }
            let scaling = |name| of(name).and_then(|row| interval(row, "scaling").median);
            if names.iter().any(|name| scaling(name).is_some()) {
                let mut line = cells(&["", "scaling"]);
                for name in names {
                    line.extend([times(scaling(name)), String::new()]);
                }
                lines.push(line);
            }
        }
    }
    block(lines)
}

/// Nanoseconds, with a mark if requests failed.
fn marked(row: &Row) -> String {
    let failed = |key| count(row, key) > 0;
    let mark = match failed("failures_with_hole") {
        true => "!",
        false if failed("failures") || failed("timed_failures") => "*",
        false => "",
    };
    optional(row.ns_per_op.median) + mark
}

fn in_detail(rows: &[&Row]) -> String {
    let mut lines = vec![cells(&[
        "live",
        "threads",
        "impl",
        "ns",
        "lo",
        "hi",
        "x",
        "p99",
        "worst",
        "scaling",
        "±",
        "operations",
    ])];
    for row in rows {
        let mut line = vec![live(row), threads(row).to_string(), row.implementation.clone()];
        line.push(marked(row));
        line.extend([row.ns_per_op.lo, row.ns_per_op.hi].map(optional));
        line.push(times(row.ratio_to_ringfence));
        line.extend(["p99_ns", "worst_ns"].map(|key| optional(single(row, key))));
        line.extend(ratio(row, "scaling"));
        line.push(times(interval(row, "cpu_scaling").median));
        line.push(count(row, "operations").to_string());
        lines.push(line);
    }
    block(lines)
}

fn memory(names: &[String], rows: &[Row]) -> String {
    let names = || names.iter().filter(|name| *name != "control");
    let mut head = cells(&["size", "live"]);
    head.extend(names().cloned());
    let mut lines = vec![head];
    for ((size, live), rows) in groups(rows, |row| (text(row, "size"), live(row))) {
        if live != "0" {
            let of = |name: &String| {
                single(rows.iter().find(|row| row.implementation == *name)?, "bytes_per_live")
            };
            let mut line = vec![size, live];
            line.extend(names().map(|name| optional(of(name))));
            lines.push(line);
        }
    }
    block(lines)
}

/// What failed when it was checked, once for all numbers of threads.
fn failures(out: &mut String, rows: &[Row]) {
    let key = |row: &Row| {
        let [pattern, size] = ["pattern", "size"].map(|key| text(row, key));
        [pattern, size, live(row), row.implementation.clone()]
    };
    let mut lines = Vec::new();
    for (key, rows) in groups(rows, key) {
        if count(rows[0], "failures") > 0 {
            let counts = ["checked_operations", "failures", "failures_with_hole"];
            let counts = counts.map(|key| count(rows[0], key).to_string());
            lines.push([&key[..], &counts].concat());
        }
    }
    if lines.is_empty() {
        out.push_str("\nno request failed that was checked\n");
    } else {
        let head = ["pattern", "size", "live", "impl", "checked", "failed", "with a hole"];
        lines.insert(0, cells(&head));
        let title = "requests that failed, and how many although a hole was free";
        section(out, title, &block(lines));
    }
}

/// Every note once, with the rows that it is about.
fn notes(out: &mut String, rows: &[Row]) {
    let mut all: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for row in rows {
        let note = row.note.as_deref().unwrap_or_default();
        for part in note.split("; ").filter(|part| !part.is_empty()) {
            let same = |(implementation, other, _): &&mut (&str, &str, _)| {
                (*implementation, *other) == (row.implementation.as_str(), part)
            };
            match all.iter_mut().find(same) {
                Some((_, _, about)) => about.push(&row.name),
                None => all.push((&row.implementation, part, vec![&row.name])),
            }
        }
    }
    for (implementation, part, mut about) in all {
        let more = about.len().saturating_sub(MOST_NAMED);
        about.truncate(MOST_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        out.push_str(&wrap(&format!(
            "note: {implementation}: {part} ({}{more})",
            about.join(", ")
        )));
    }
}

fn threads(row: &Row) -> u64 {
    row.params.get("threads").and_then(Value::as_u64).unwrap_or(1)
}

/// The live set as it was written on the command line.
fn live(row: &Row) -> String {
    match row.params.get("live").and_then(Value::as_u64) {
        Some(live) => Live::Count(live).to_string(),
        None => text(row, "live"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::text::WIDTH;

    fn measured() -> Benchmark {
        super::super::run(&super::super::tests::tiny(), &AtomicBool::new(false)).unwrap()
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_however_large_the_figures() {
        let mut benchmark = measured();
        for row in &mut benchmark.rows {
            row.ns_per_op = row.ns_per_op.scaled(123_456.0);
            row.ratio_to_ringfence = Some(987_654.0);
            row.figures.insert("failures_with_hole".to_owned(), 12_345.into());
            row.figures.insert("failures".to_owned(), 12_345.into());
            row.note = Some("not measured: ".to_owned() + &"x".repeat(300));
        }
        for line in render(&benchmark, true).lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn every_implementation_live_set_and_warning_is_printed() {
        let mut benchmark = measured();
        benchmark.warnings.push("it rains".to_owned());
        let text = render(&benchmark, false);
        for word in
            ["ringfence", "vm-allocator", "control", "100", "scaling", "it rains", "39 bits"]
        {
            assert!(text.contains(word), "{word}\n{text}");
        }
        assert!(text.contains("hot, 1 granule") && text.contains("random, 1 granule"), "{text}");
        assert!(!text.contains("in detail"), "{text}");
        assert!(render(&benchmark, true).contains("in detail"));
    }

    #[test]
    fn a_failure_with_a_hole_is_marked_and_listed() {
        let mut benchmark = measured();
        let row = &mut benchmark.rows[1];
        row.figures.insert("failures".to_owned(), 7.into());
        row.figures.insert("failures_with_hole".to_owned(), 5.into());
        let text = render(&benchmark, false);
        assert!(text.contains('!') && text.contains("although a hole was free"), "{text}");
        assert!(!text.contains("no request failed"), "{text}");
        assert!(render(&measured(), false).contains("no request failed"));
    }
}
