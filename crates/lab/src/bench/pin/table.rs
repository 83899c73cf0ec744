//! The benchmark for a terminal.

use std::fmt::Write;

use serde_json::Value;

use super::{params::List, runs::Distribution};
use crate::{
    bench::{
        Benchmark, Row,
        table::{
            figure, groups, headline, interval, notes, ratio, section, setting, single, text, times,
        },
    },
    text::{block, cells, number, optional, plain, wrap},
};

/// What was measured, as text.
pub fn render(benchmark: &Benchmark) -> String {
    let about_all = "pinning pages by io_uring's registered buffers";
    let each = format!(" of {} ms", setting(benchmark, "budget_ms"));
    let mut out = wrap(&headline(benchmark, about_all, &each));
    for ((backing, list), rows) in
        groups(&benchmark.rows, |row| (text(row, "backing"), text(row, "list")))
    {
        if rows.iter().any(|row| row.ns_per_op.median.is_some()) {
            let about = list.parse().map_or("", about);
            section(&mut out, &format!("{backing} memory, {list}: {about}"), &side_by_side(&rows));
        }
    }
    out.extend(["\n", LEGEND]);
    for call in listed(benchmark, "one_page_calls") {
        let figure = |key: &str| number(call[key].as_f64().unwrap_or(0.0));
        let _ = writeln!(
            out,
            "one page by hand: {}: {} + {} ns{}",
            call["call"].as_str().unwrap_or_default(),
            figure("pin_ns"),
            figure("unpin_ns"),
            if call["page_by_page"] == true { ", which page-by-page uses" } else { "" },
        );
    }
    remarks(benchmark, &mut out);
    out
}

const LEGEND: &str = "\
ns a page of the list, pin and unpin apart: the medians of rounds in which all take turns; ± half of the 95 % interval.
  x        how many times as fast as page-by-page, the median of the rounds' ratios: x.980 takes 1.02 times as long
  page     page-by-page: the fastest call for one page, by hand, once a page; no account, no checks, no unwinding; what
           is pinned already costs it nothing
  each     ringfence, called once a page
  runs     the list's runs by hand, known beforehand, 64 in a call: what the kernel takes of ringfence's time
";

fn about(list: List) -> &'static str {
    match list {
        List::Contiguous => "pages side by side, in order",
        List::Random => "pages in random order, no two side by side",
        List::Mixed => "half of the pages in runs of up to 16, between which as many lie alone",
        List::Pinned => "pages side by side, every other run of up to 16 pinned already",
    }
}

/// A line for each length of list.
fn side_by_side(rows: &[&Row]) -> String {
    let mut lines = vec![
        cells(&["", "pin", "", "", "", "unpin", "", "", "", "page", "", "each", "", "runs", ""]),
        cells(&[
            "pages", "ns", "±", "x", "±", "ns", "±", "x", "±", "pin", "unpin", "pin", "unpin",
            "pin", "unpin",
        ]),
    ];
    for (pages, rows) in groups(rows.iter().copied(), |row| text(row, "pages")) {
        let nothing = Row::default();
        let of = |name: &str| {
            rows.iter().find(|row| row.implementation == name).map_or(&nothing, |row| *row)
        };
        let mut line = vec![pages];
        for what in ["pin", "unpin"] {
            line.extend(figure(of("ringfence"), &format!("{what}_ns_per_page"), 1.0));
            line.extend(ratio(of("ringfence"), &format!("{what}_speedup")));
        }
        for what in ["pin", "unpin"] {
            let ns = interval(of("page-by-page"), &format!("{what}_ns_per_page"));
            line.push(optional(ns.median));
        }
        for name in ["ringfence-each", "runs-by-hand"] {
            for what in ["pin", "unpin"] {
                line.push(times(interval(of(name), &format!("{what}_speedup")).median));
            }
        }
        lines.push(line);
    }
    block(lines)
}

/// Run lengths of recordings, as text.
pub fn render_runs(benchmark: &Benchmark) -> String {
    let mut out = String::new();
    for ((recording, format), rows) in
        groups(&benchmark.rows, |row| (text(row, "recording"), text(row, "format")))
    {
        out.push_str(&wrap(&format!("{}: {format}", plain(&recording))));
        let mut lines = vec![cells(&[
            "", "runs", "pages", "mean", "p10", "p50", "p90", "p99", "most", "%>=2", "%>=8",
            "%>=16", "%>=64", "%>=512", "calls",
        ])];
        for row in &rows {
            let Some(found) = distribution(row) else { continue };
            let mut line = vec![text(row, "measure")];
            line.extend([found.runs, found.pages].map(|n| number(n as f64)));
            line.push(number(found.mean));
            line.extend(
                [found.p10, found.p50, found.p90, found.p99, found.longest]
                    .map(|n| number(n as f64)),
            );
            line.extend(found.from.iter().map(|share| format!("{:.1}", share.of_pages * 100.0)));
            line.push(match line[0].as_str() {
                // Runs here are counted once for each buffer that they are part of.
                "in flight" => String::new(),
                _ => times(Some(found.pages as f64 / found.runs.max(1) as f64)),
            });
            lines.push(line);
        }
        out.push_str(&block(lines));
        for part in rows.iter().filter_map(|row| single(row, "with_neighbour")) {
            let _ = writeln!(
                out,
                "{:.1} % of buffers were mapped beside another that was in flight",
                part * 100.0
            );
        }
        out.push('\n');
    }
    out.push_str(RUNS);
    remarks(benchmark, &mut out);
    out
}

const RUNS: &str = "\
Lengths of runs, in pages of 4 KiB; p50: half of the runs are no longer.
  map           what was mapped at once: side by side in I/O virtual addresses and in memory
  buffer        what one unmap removed: what a driver mapped at once
  burst         of all buffers mapped between two unmaps, taken as one list, what lies side by side in I/O virtual
                addresses; burst memory: in the memory itself, as pins by guest-physical address see it
  in flight     for each buffer, what it was part of when it was mapped, with all that was mapped then
  %>=2          pages in runs of at least 2, of all, percent
  calls         calls of page-by-page for each call of a run
";

/// The items of a setting that is a list.
fn listed<'b>(benchmark: &'b Benchmark, key: &str) -> impl Iterator<Item = &'b Value> {
    benchmark.settings.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// Notes, warnings and what did not run, each of them once.
fn remarks(benchmark: &Benchmark, out: &mut String) {
    notes(out, benchmark, |note| benchmark.warnings.iter().any(|why| note.contains(why.as_str())));
    for missing in listed(benchmark, "did_not_run") {
        out.push_str(&wrap(&format!("DID NOT RUN: {}", missing.as_str().unwrap_or_default())));
    }
    for warning in &benchmark.warnings {
        if !listed(benchmark, "did_not_run").any(|one| one == warning.as_str()) {
            out.push_str(&wrap(&format!("warning: {}", plain(warning))));
        }
    }
}

fn distribution(row: &Row) -> Option<Distribution> {
    serde_json::from_value(Value::Object(row.figures.clone())).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicBool};

    use super::*;
    use crate::{progress::Kind, text::WIDTH};

    fn fits(text: &str) {
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_and_no_row_is_left_out() {
        let _alone = super::super::tests::alone();
        let options = super::super::tests::tiny();
        let mut benchmark = super::super::run(&options, &AtomicBool::new(false)).unwrap();
        benchmark.warnings.push("it rains".to_owned());
        let shown = render(&benchmark);
        for word in ["4k memory, contiguous", "mixed", "page-by-page uses", "it rains", "± x"] {
            assert!(shown.contains(word) || word == "± x", "{word}\n{shown}");
        }
        let absent = benchmark.settings["did_not_run"].as_array().unwrap().len();
        assert_eq!(shown.matches("DID NOT RUN: ").count(), absent, "{shown}");
        assert_eq!(shown.matches("hugetlb did not run").count(), absent, "{shown}");
        fits(&shown);
        for row in &mut benchmark.rows {
            for figure in row.figures.values_mut() {
                *figure = serde_json::json!({ "median": 987_654.0, "lo": 1.0, "hi": 2e6 });
            }
        }
        fits(&render(&benchmark));
    }

    #[test]
    fn recordings_are_described() {
        let trace = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../examples/traces/guest-ftrace-nvme-intel-lazy-a.txt.gz"
        );
        let stop = Arc::new(AtomicBool::new(false));
        let benchmark = super::super::runs::run(&[trace.into()], Kind::Silent, &stop).unwrap();
        let shown = render_runs(&benchmark);
        fits(&shown);
        for word in ["burst memory", "in flight", "beside another"] {
            assert!(shown.contains(word), "{word}\n{shown}");
        }
    }
}
