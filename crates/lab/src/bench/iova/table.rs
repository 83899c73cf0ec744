//! The benchmark for a terminal: peers beside each other, a block for each pattern and size.

use std::fmt::Write;

use serde_json::Value;

use super::pattern::{Pattern, Size};
use crate::{
    bench::{
        Benchmark, Interval, Row,
        table::{distinct, half_width, machine, times},
    },
    text::{block, number, optional, wrap},
};

/// All of it; with `details` every figure of every row as well.
pub fn render(benchmark: &Benchmark, details: bool) -> String {
    let mut out = wrap(&headline(benchmark));
    let names = distinct(&benchmark.rows, |row| row.implementation.clone());
    let blocks = distinct(&benchmark.rows, kind);
    for (pattern, size) in &blocks {
        let rows =
            || benchmark.rows.iter().filter(|row| kind(row) == (pattern.clone(), size.clone()));
        let _ = write!(out, "\n{}", title(pattern, size));
        out.push_str(&side_by_side(&names, rows().collect()));
        if details {
            let _ = write!(out, "\n{pattern}, {size}, in detail\n");
            out.push_str(&in_detail(rows()));
        }
    }
    if !blocks.is_empty() {
        out.push_str("\nmemory, bytes a live range (measured: the heap before and after)\n");
        out.push_str(&memory(&names, &benchmark.rows));
        out.push_str(&failures(&benchmark.rows));
        let _ = write!(out, "\n{LEGEND}");
    }
    for line in notes(&benchmark.rows) {
        out.push_str(&wrap(&line));
    }
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {warning}")));
    }
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

fn headline(benchmark: &Benchmark) -> String {
    let setting = |key: &str| benchmark.settings.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let clock = benchmark.settings.get("clock").and_then(Value::as_str).unwrap_or("");
    format!(
        "allocators of I/O virtual addresses; aperture of {} bits ({} for full sets), granule 4 KiB; \
         {} rounds of {} ms{}; single operations by {clock}, which takes {} ns of each; {}",
        setting("aperture_bits"),
        setting("full_set_aperture_bits"),
        benchmark.rounds,
        setting("budget_ms"),
        if benchmark.interrupted { ", interrupted" } else { "" },
        number(setting("clock_ns")),
        machine(benchmark),
    )
}

fn title(pattern: &str, size: &str) -> String {
    let size = size.parse().map_or(size.to_owned(), |size: Size| size.about());
    let about = pattern.parse().map_or("", |pattern: Pattern| pattern.about());
    format!("{pattern}, {size}: {about}\n")
}

/// A column pair for each implementation, a line for each live set and number of threads.
fn side_by_side(names: &[String], rows: Vec<&Row>) -> String {
    let mut head = vec![String::new(), String::new()];
    let mut units = vec!["live".to_owned(), "threads".to_owned()];
    for (index, name) in names.iter().enumerate() {
        head.extend([name.clone(), String::new()]);
        units.extend(["ns", if index == 0 { "±" } else { "x" }].map(str::to_owned));
    }
    let mut lines = vec![head, units];
    for live in distinct(rows.iter().copied(), |row| text(&row.params, "live")) {
        let of_live = || rows.iter().copied().filter(|row| text(&row.params, "live") == live);
        let mut label = live.clone();
        for threads in distinct(of_live(), threads_of) {
            let of = |name: &String| {
                of_live().find(|row| threads_of(row) == threads && row.implementation == *name)
            };
            let mut line = vec![std::mem::take(&mut label), threads.to_string()];
            for (index, name) in names.iter().enumerate() {
                line.extend(match of(name) {
                    Some(row) if index == 0 => [figure(row), half_width(row.ns_per_op)],
                    Some(row) => [figure(row), times(row.ratio_to_ringfence)],
                    None => [String::new(), String::new()],
                });
            }
            lines.push(line);
            // Once a live set: the rest is told in detail.
            if lines.last().is_some_and(|line| !line[0].is_empty()) {
                let mut line = vec![String::new(), "p99".to_owned()];
                for name in names {
                    let single = |key| of(name).and_then(|row| row.figures.get(key)?.as_f64());
                    line.extend(["p99_ns", "worst_ns"].map(|key| optional(single(key))));
                }
                lines.push(line);
            }
            if names.iter().filter_map(of).any(|row| scaling(row).is_some()) {
                let mut line = vec![String::new(), "scaling".to_owned()];
                for name in names {
                    line.extend([times(of(name).and_then(scaling)), String::new()]);
                }
                lines.push(line);
            }
        }
    }
    block(lines)
}

fn figure(row: &Row) -> String {
    let mark = match (
        count(row, "failures_with_hole"),
        count(row, "failures"),
        count(row, "timed_failures"),
    ) {
        (1.., _, _) => "!",
        (_, 1.., _) | (_, _, 1..) => "*",
        _ => "",
    };
    optional(row.ns_per_op.median) + mark
}

fn in_detail<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let head = [
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
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let single = |key: &str| optional(row.figures.get(key).and_then(Value::as_f64));
        let interval = |key: &str| -> Interval {
            let value = row.figures.get(key).cloned();
            value.and_then(|value| serde_json::from_value(value).ok()).unwrap_or_default()
        };
        let scaling = interval("scaling");
        lines.push(vec![
            text(&row.params, "live"),
            threads_of(row).to_string(),
            row.implementation.clone(),
            figure(row),
            optional(row.ns_per_op.lo),
            optional(row.ns_per_op.hi),
            times(row.ratio_to_ringfence),
            single("p99_ns"),
            single("worst_ns"),
            times(scaling.median),
            half_width(scaling),
            times(interval("cpu_scaling").median),
            count(row, "operations").to_string(),
        ]);
    }
    block(lines)
}

fn memory(names: &[String], rows: &[Row]) -> String {
    let mut head = vec!["size".to_owned(), "live".to_owned()];
    head.extend(names.iter().filter(|name| *name != "control").cloned());
    let mut lines = vec![head];
    let key = |row: &Row| (text(&row.params, "size"), text(&row.params, "live"));
    for (size, live) in distinct(rows, key) {
        let of = |name: &String| {
            let mut same = rows.iter().filter(|row| key(row) == (size.clone(), live.clone()));
            same.find(|row| row.implementation == *name)
                .and_then(|row| row.figures.get("bytes_per_live")?.as_f64())
        };
        if live == "0" {
            continue;
        }
        let mut line = vec![size.clone(), live.clone()];
        line.extend(names.iter().filter(|name| *name != "control").map(|name| optional(of(name))));
        lines.push(line);
    }
    block(lines)
}

/// What failed when it was checked; nothing if nothing did.
fn failures(rows: &[Row]) -> String {
    let head = ["pattern", "size", "live", "impl", "checked", "failed", "with a hole"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let failed = count(row, "failures");
        // Checked once for all numbers of threads.
        let first = rows.iter().find(|other| {
            let same = |key| text(&other.params, key) == text(&row.params, key);
            other.implementation == row.implementation
                && same("pattern")
                && same("size")
                && same("live")
        });
        if failed > 0 && first.is_some_and(|first| std::ptr::eq(first, row)) {
            let mut line = ["pattern", "size", "live"].map(|key| text(&row.params, key)).to_vec();
            line.push(row.implementation.clone());
            line.push(count(row, "checked_operations").to_string());
            line.push(failed.to_string());
            line.push(count(row, "failures_with_hole").to_string());
            lines.push(line);
        }
    }
    match lines.len() {
        1 => "\nno request failed that was checked\n".to_owned(),
        _ => format!(
            "\nrequests that failed, and how many although a hole was free\n{}",
            block(lines)
        ),
    }
}

/// Every note once, with the rows that it is about.
fn notes(rows: &[Row]) -> Vec<String> {
    let parts = |row: &Row| -> Vec<(String, String)> {
        let note = row.note.as_deref().unwrap_or_default();
        let parts = note.split("; ").filter(|part| !part.is_empty());
        parts.map(|part| (row.implementation.clone(), part.to_owned())).collect()
    };
    let mut all: Vec<(String, String)> = Vec::new();
    for part in rows.iter().flat_map(parts) {
        if !all.contains(&part) {
            all.push(part);
        }
    }
    all.into_iter()
        .map(|part| {
            let same = rows.iter().filter(|row| parts(row).contains(&part));
            let mut about: Vec<&str> = same.map(|row| row.name.as_str()).collect();
            let more = about.len().saturating_sub(MOST_NAMED);
            about.truncate(MOST_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("note: {}: {} ({}{more})", part.0, part.1, about.join(", "))
        })
        .collect()
}

fn kind(row: &Row) -> (String, String) {
    (text(&row.params, "pattern"), text(&row.params, "size"))
}

fn threads_of(row: &Row) -> u64 {
    row.params.get("threads").and_then(Value::as_u64).unwrap_or(1)
}

fn scaling(row: &Row) -> Option<f64> {
    row.figures.get("scaling")?.get("median")?.as_f64()
}

fn count(row: &Row, key: &str) -> u64 {
    row.figures.get(key).and_then(Value::as_u64).unwrap_or(0)
}

/// A parameter as it was written on the command line.
fn text(params: &serde_json::Map<String, Value>, key: &str) -> String {
    match params.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(n)) if key == "live" => match n.as_u64() {
            Some(live) => super::pattern::Live::Count(live).to_string(),
            None => n.to_string(),
        },
        Some(value) => value.to_string(),
        None => String::new(),
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
    fn every_implementation_live_set_and_warning_is_told() {
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
