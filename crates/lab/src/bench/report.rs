//! A benchmark for a terminal: first how ours does against each peer and where it is slower, then,
//! with details, each row with its figures. The benchmarks only list which figures there are.

use std::fmt::Write;

use serde_json::Value;

use super::{Benchmark, Interval, Row};
use crate::text::{
    CellAlignment::{Left, Right},
    clauses, columns, count, dash, number, optional, plain, wrap,
};

/// A row below this ratio is slower than what it is compared with: less is noise.
const SLOWER: f64 = 0.95;
/// Rows that the first table lists as slower.
const MOST_SLOWER: usize = 8;
/// Rows that a note names; the JSON has it at each.
const MOST_NAMED: usize = 4;
/// Our implementation.
const OURS: &str = "ringfence";
/// So few rows are all printed, without --details.
const FEW: usize = 24;
/// The setting that lists why something did not run.
pub(super) const MISSING: &str = "did_not_run";

/// What the details of every benchmark have.
const LEGEND: &str = "\
Each figure is the median of rounds in which all take turns, each ratio the median of the rounds' ratios.
  ±         half of the 95 % interval
  x         against ringfence: how many times as long it takes; <.9 marks what is faster than ringfence
";

/// How a benchmark is printed.
#[derive(Debug)]
pub struct Sheet {
    /// What is measured.
    pub about: &'static str,
    /// Kinds of rows that have different figures.
    pub parts: &'static [Part],
    /// What the figures mean, for the details.
    pub legend: &'static str,
}

/// Rows of one kind.
#[derive(Debug)]
pub struct Part {
    /// A parameter and its values in these rows; all rows, if it is empty.
    pub of: (&'static str, &'static [&'static str]),
    /// What is measured in them: the title.
    pub title: &'static str,
    /// What a value of `ns_per_op` is of.
    pub operation: &'static str,
    /// A parameter of which each value has a block of its own in the details; none, if it is empty.
    pub by: &'static str,
    /// What they are compared with in the first table.
    pub against: &'static [Against],
    /// Implementations that are no peers: ours in another way, or what the machine can do.
    pub others: &'static [&'static str],
    /// Numbers whose sums the first table prints for each implementation.
    pub counts: &'static [Figure],
    /// What the details print beside `ns_per_op` and `ratio_to_ringfence`.
    pub figures: &'static [Figure],
}

/// A comparison in the first table. Its ratio says how many times as fast the first of both is.
#[derive(Debug)]
pub struct Against {
    /// The ratio: a figure, or `ratio_to_ringfence`.
    pub ratio: &'static str,
    /// What is compared, a line for each value: a parameter, or `impl`.
    pub by: &'static str,
    /// How the line begins.
    pub what: &'static str,
    /// The one implementation that is compared, which is no peer; all peers, if it is empty.
    pub only: &'static str,
}

impl Against {
    /// Ours against each peer: a peer's time over ours.
    pub const PEERS: Against = Against::new("ratio_to_ringfence", "impl", "ringfence against");

    /// All peers, by a figure that is a ratio, a line for each value of `by`; `what` begins it.
    pub const fn new(ratio: &'static str, by: &'static str, what: &'static str) -> Against {
        Against { ratio, by, what, only: "" }
    }
}

/// A figure of a row.
#[derive(Debug)]
pub struct Figure {
    key: &'static str,
    head: &'static str,
    scale: f64,
    half: bool,
}

impl Figure {
    /// The figure `key` below the heading `head`, in a unit of which there are `scale` in the
    /// JSON's.
    pub const fn new(key: &'static str, head: &'static str, scale: f64) -> Figure {
        Figure { key, head, scale, half: false }
    }

    /// The same, with half of its interval after it.
    #[must_use]
    pub const fn with_half(self) -> Figure {
        Figure { half: true, ..self }
    }
}

impl Part {
    /// All rows: the base of a benchmark with one kind.
    pub const ALL: Part = Part {
        of: ("", &[]),
        title: "",
        operation: "",
        by: "",
        against: &[],
        others: &[],
        counts: &[],
        figures: &[],
    };

    fn is_peer(&self, row: &Row) -> bool {
        let implementation = row.implementation.as_str();
        implementation != OURS && !self.others.contains(&implementation)
    }

    fn rows<'b>(&self, benchmark: &'b Benchmark) -> Vec<&'b Row> {
        let (key, values) = self.of;
        let is_one = |row: &&Row| key.is_empty() || values.contains(&text(row, key).as_str());
        benchmark.rows.iter().filter(is_one).collect()
    }
}

/// A benchmark as text; all of its rows with `details`, or if there are few.
pub fn render(benchmark: &Benchmark, sheet: &Sheet, details: bool) -> String {
    let interrupted = if benchmark.interrupted { ", interrupted" } else { "" };
    let rounds = match benchmark.rounds {
        0 => String::new(),
        rounds => format!("; {}{interrupted}", count(rounds, "round")),
    };
    let mut out = wrap(&format!("{}{rounds}; {}", sheet.about, benchmark.host.describe()));
    let parts: Vec<(&Part, Vec<&Row>)> =
        sheet.parts.iter().map(|part| (part, part.rows(benchmark))).collect();
    first(&mut out, &parts);
    if details || benchmark.rows.len() <= FEW {
        for (part, rows) in &parts {
            // What was not measured has a note.
            let rows = rows.iter().filter(|r| r.ns_per_op.median.is_some() || r.note.is_none());
            let blocks = groups(rows.copied(), |row| text(row, part.by));
            out.extend(blocks.iter().filter_map(|(by, rows)| rows_of(part, by, rows)));
        }
        let timed = benchmark.rows.iter().any(|row| row.ns_per_op.median.is_some());
        out.extend(["\n", if timed { LEGEND } else { "" }, sheet.legend]);
        let settings = benchmark.settings.iter().filter(|(key, _)| *key != MISSING);
        let settings = settings.map(|(key, value)| format!("{key} {value}"));
        out.extend(clauses("settings", settings).iter().map(|line| wrap(line)));
    } else {
        let _ = writeln!(out, "{} rows in all: --details prints them", benchmark.rows.len());
    }
    notes(&mut out, benchmark);
    let missing = missing(benchmark);
    out.extend(missing.iter().map(|why| wrap(&format!("DID NOT RUN: {}", plain(why)))));
    let warnings = benchmark.warnings.iter().filter(|why| !missing.contains(&why.as_str()));
    out.extend(warnings.map(|why| wrap(&format!("warning: {}", plain(why)))));
    out
}

/// Why something did not run.
fn missing(benchmark: &Benchmark) -> Vec<&str> {
    let missing = benchmark.settings.get(MISSING).and_then(Value::as_array);
    missing.into_iter().flatten().filter_map(Value::as_str).collect()
}

/// A line for each comparison, and the rows that are slower.
fn first(out: &mut String, parts: &[(&Part, Vec<&Row>)]) {
    let mut lines = Vec::new();
    let mut slower = Vec::new();
    for (part, rows) in parts {
        for against in part.against {
            let compared = compared(part, rows, against);
            if !compared.is_empty() {
                let label = format!("{}, {}", part.title, against.what);
                let heads = [&label, "rows", "x", "least", "most", "slower"];
                lines.extend([[""; 6], heads].map(|line| line.map(str::to_owned).to_vec()));
            }
            for (base, of) in groups(&compared, |(_, base, _)| base) {
                let ratios = || of.iter().map(|(.., ratio)| *ratio);
                let mean = ratios().map(f64::ln).sum::<f64>() / of.len() as f64;
                let least = ratios().fold(f64::INFINITY, f64::min);
                let most = ratios().fold(0.0, f64::max);
                let below = ratios().filter(|ratio| *ratio < SLOWER).count();
                let mut line = vec![format!("  {base}"), of.len().to_string()];
                line.extend([mean.exp(), least, most].map(number));
                line.push(if below > 0 { below.to_string() } else { String::new() });
                lines.push(line);
            }
            if against.ratio == Against::PEERS.ratio && against.only.is_empty() {
                slower.extend(compared.into_iter().filter(|(.., ratio)| *ratio < SLOWER));
            }
        }
    }
    if lines.is_empty() {
        return;
    }
    out.push_str(&labelled(lines));
    out.push_str(
        "x: how many times as fast (the rows' geometric mean); slower: rows whose x is below .95\n",
    );
    for (part, rows) in parts {
        out.extend(part.counts.iter().filter_map(|one| counted(one, rows)));
    }
    if slower.is_empty() {
        return;
    }
    slower.sort_by(|(.., a), (.., b)| a.total_cmp(b));
    let all = count(slower.len() as u64, "row");
    let _ = writeln!(out, "\nslower than a peer, the worst of {all} first");
    let lines = slower.iter().take(MOST_SLOWER).map(|(row, base, ratio)| {
        vec![format!("  {}, {base}", row.name), format!("x{}", number(*ratio))]
    });
    out.push_str(&labelled(lines));
}

/// The sum of a figure for each implementation that has it.
fn counted(one: &Figure, rows: &[&Row]) -> Option<String> {
    let of = rows.iter().filter_map(|row| Some((*row, figure(row, one.key).median?)));
    let of: Vec<(&Row, f64)> = of.collect();
    let sums = groups(&of, |(row, _)| &row.implementation).into_iter();
    let sums = sums.map(|(name, of)| (name, of.iter().map(|(_, sum)| sum).sum::<f64>()));
    let sums = sums.filter(|(_, sum)| *sum > 0.0);
    let sums: Vec<String> = sums.map(|(name, sum)| format!("{name} {}", number(sum))).collect();
    let sums = if sums.is_empty() { "none".to_owned() } else { sums.join(", ") };
    (!of.is_empty()).then(|| wrap(&plain(&format!("{}: {sums}", one.head))))
}

/// The rows that are compared, with what, and their ratios.
fn compared<'r>(part: &Part, rows: &[&'r Row], against: &Against) -> Vec<(&'r Row, String, f64)> {
    let peer = against.ratio == Against::PEERS.ratio;
    let compared = rows.iter().filter_map(|row| {
        // Without a line for each implementation, a line is about ours.
        let counts = match peer {
            true if against.only.is_empty() => part.is_peer(row),
            true => row.implementation == against.only,
            false => against.by == "impl" || row.implementation == OURS,
        };
        let ratio = if peer { row.ratio_to_ringfence } else { figure(row, against.ratio).median };
        // What is compared with itself says nothing.
        let ratio = ratio.filter(|ratio| counts && *ratio > 0.0 && (peer || *ratio != 1.0))?;
        Some((*row, text(row, against.by), ratio))
    });
    compared.collect()
}

/// A line for each row that has a figure; names are printed once for all implementations.
pub(crate) fn rows_of(part: &Part, by: &str, rows: &[&Row]) -> Option<String> {
    let medians = |one: &Figure| rows.iter().filter_map(|row| figure(row, one.key).median);
    let having = part.figures.iter().filter(|one| medians(one).next().is_some());
    let (figures, zeros): (Vec<&Figure>, Vec<&Figure>) =
        having.partition(|one| medians(one).any(|n| n != 0.0));
    let timed = rows.iter().any(|row| row.ns_per_op.median.is_some());
    if !timed && figures.is_empty() && zeros.is_empty() {
        return None;
    }
    let several = rows.iter().any(|row| row.implementation != rows[0].implementation);
    let peers = part.against.iter().any(|against| against.ratio == Against::PEERS.ratio);
    let shown = [true, several, timed, timed, timed && several];
    let line = |cells: [String; 5], of: &dyn Fn(&Figure) -> [String; 2]| -> Vec<String> {
        let cells = cells.into_iter().zip(shown).filter_map(|(cell, shown)| shown.then_some(cell));
        let halves = |one: &Figure| of(one).into_iter().take(if one.half { 2 } else { 1 });
        cells.chain(figures.iter().copied().flat_map(halves)).collect()
    };
    let heads = ["", "impl", "ns", "±", "x"].map(str::to_owned);
    let mut lines = vec![line(heads, &|one| [one.head, "±"].map(str::to_owned))];
    let mut before = "";
    for row in rows {
        let x = match row.ratio_to_ringfence {
            Some(ratio) if ratio < SLOWER && peers && part.is_peer(row) => {
                format!("<{}", number(ratio))
            }
            ratio => optional(ratio),
        };
        let name = row.name.strip_suffix(by).map_or(&*row.name, |name| name.trim_end_matches('/'));
        let label = if before == name { String::new() } else { plain(name) };
        before = name;
        let [ns, half] = both(row.ns_per_op);
        let cells = [label, row.implementation.clone(), ns, half, x];
        lines.push(line(cells, &|one| both(figure(row, one.key).scaled(1.0 / one.scale))));
    }
    let mut title = part.title.to_owned();
    if !by.is_empty() {
        title = format!("{title}, {by}");
    }
    if timed {
        title = format!("{title}; ns: {}", part.operation);
    }
    let zeros: Vec<&str> = zeros.iter().map(|one| one.head).collect();
    let mut out = format!("\n{title}\n{}", labelled(lines));
    if !zeros.is_empty() {
        out.push_str(&wrap(&format!("0 in each row: {}", zeros.join(", "))));
    }
    Some(out)
}

/// Lines whose first cell is a label.
fn labelled(lines: impl IntoIterator<Item = Vec<String>>) -> String {
    columns(lines, [(0, Left), (1, Right)])
}

/// Every note once, with the rows that it is about, except those that a warning repeats.
fn notes(out: &mut String, benchmark: &Benchmark) {
    let parts = benchmark.rows.iter().flat_map(|row| {
        let note = row.note.as_deref().unwrap_or_default().split("; ");
        note.filter(|part| !part.is_empty()).map(move |part| (row, part))
    });
    let warned = |note: &str| {
        let what = note.strip_prefix("not measured: ").unwrap_or(note);
        let warnings = benchmark.warnings.iter().map(String::as_str);
        warnings.chain(missing(benchmark)).any(|warning| warning.contains(what))
    };
    let parts = parts.filter(|(_, note)| !warned(note));
    let key = |(row, note): (&Row, &str)| (row.implementation.clone(), note.to_owned());
    for ((implementation, note), of) in groups(parts, key) {
        let mut names: Vec<&str> = of.iter().map(|(row, _)| row.name.as_str()).collect();
        let more = names.len().saturating_sub(MOST_NAMED);
        names.truncate(MOST_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let names = names.join(", ");
        out.push_str(&wrap(&plain(&format!("note: {implementation}: {note} ({names}{more})"))));
    }
}

/// Items by their keys, in the order in which these first come.
pub(crate) fn groups<T: Copy, K: PartialEq>(
    items: impl IntoIterator<Item = T>,
    key: impl Fn(T) -> K,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let key = key(item);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, items)) => items.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups
}

/// A figure of a row, which may be below another (`/map/p50`): an interval, or a number by itself.
fn figure(row: &Row, key: &str) -> Interval {
    let (first, below) = key.split_at(key.find('/').unwrap_or(key.len()));
    match row.figures.get(first).and_then(|value| value.pointer(below)) {
        Some(Value::Object(interval)) => {
            serde_json::from_value(Value::Object(interval.clone())).unwrap_or_default()
        }
        Some(value) => Interval { median: value.as_f64(), ..Interval::default() },
        None => Interval::default(),
    }
}

/// What a row was measured with, in words: `iommu off`; `impl` is its implementation.
pub(crate) fn text(row: &Row, key: &str) -> String {
    match row.params.get(key) {
        _ if key == "impl" => row.implementation.clone(),
        Some(Value::String(text)) => plain(text),
        Some(Value::Bool(on)) => format!("{key} {}", if *on { "on" } else { "off" }),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// An interval's median and its `±`.
fn both(interval: Interval) -> [String; 2] {
    match interval.median {
        Some(median) => [number(median), interval.half_width().map_or(String::new(), number)],
        None => [dash(), String::new()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bench::row::{object, value},
        text::WIDTH,
    };

    const SHEET: Sheet = Sheet {
        about: "wheels",
        parts: &[
            Part {
                of: ("part", &["round"]),
                title: "round ones",
                operation: "a turn",
                against: &[Against::PEERS],
                others: &["control"],
                counts: &[Figure::new("lost", "lost wheels", 1.0)],
                figures: &[
                    Figure::new("p99_ns", "p99", 1e3),
                    Figure::new("gone", "gone", 1.0),
                    Figure::new("lost", "lost", 1.0),
                ],
                ..Part::ALL
            },
            Part {
                of: ("part", &["square"]),
                title: "square ones",
                operation: "a push",
                against: &[Against {
                    ratio: "ratio_to_off",
                    by: "size",
                    what: "against sledges",
                    ..Against::PEERS
                }],
                figures: &[Figure::new("ratio_to_off", "x off", 1.0).with_half()],
                ..Part::ALL
            },
        ],
        legend: "  p99       of turns\n",
    };

    fn row(name: &str, implementation: &str, ratio: f64, params: &[(&str, &str)]) -> Row {
        Row {
            name: name.to_owned(),
            implementation: implementation.to_owned(),
            params: params.iter().map(|(k, v)| ((*k).to_owned(), Value::from(*v))).collect(),
            ns_per_op: Interval { median: Some(100.0 * ratio), lo: Some(90.0), hi: Some(110.0) },
            ratio_to_ringfence: Some(ratio),
            ..Row::default()
        }
    }

    fn benchmark() -> Benchmark {
        let round = [("part", "round")];
        let mut benchmark = Benchmark::new("wheels", 3);
        benchmark.settings = object([("budget_ms", 8.into())]);
        for (name, ratios) in [("round/1", [1.0, 2.0, 0.1]), ("round/2", [1.0, 0.5, 0.1])] {
            for (implementation, ratio) in [OURS, "ox", "control"].into_iter().zip(ratios) {
                let mut row = row(name, implementation, ratio, &round);
                row.figures = object([("p99_ns", 7000.into())]);
                benchmark.rows.push(row);
            }
        }
        for (size, ratio) in [("a", 0.5), ("a", 0.8), ("b", 1.0)] {
            let mut row = row("square", "ringfence", 1.0, &[("part", "square"), ("size", size)]);
            let ratio = Interval { median: Some(ratio), lo: Some(0.1), hi: Some(0.3) };
            row.figures = object([("ratio_to_off", value(ratio))]);
            benchmark.rows.push(row);
        }
        benchmark
    }

    fn cells_of(text: &str, begin: &str) -> Vec<String> {
        let line = text.lines().find(|line| line.trim_start().starts_with(begin));
        line.unwrap_or_else(|| panic!("no {begin} in {text}"))
            .split_whitespace()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn each_peer_has_a_line_and_what_is_slower_is_listed_worst_first() {
        let mut benchmark = benchmark();
        benchmark.rows.push(row("round/3", "ox", 0.25, &[("part", "round")]));
        let text = render(&benchmark, &SHEET, false);
        // The geometric mean of 2, 1/2 and 1/4.
        assert_eq!(cells_of(&text, "ox"), ["ox", "3", ".630", ".250", "2.00", "2"]);
        let slower = text.split("slower than a peer, the worst of 2 rows first\n").nth(1).unwrap();
        let lines: Vec<&str> = slower.lines().take(2).collect();
        assert_eq!(lines, ["  round/3, ox x.250", "  round/2, ox x.500"]);
        assert!(!slower.starts_with("  square"), "without a peer nothing is slower than one");
        // The control is no peer, and what is its own base is not compared.
        assert_eq!(cells_of(&text, "a"), ["a", "2", ".632", ".500", ".800", "2"]);
        assert!(!text.contains("\n  control") && !text.contains("\n  b "), "{text}");
    }

    #[test]
    fn a_switch_is_on_or_off() {
        let params = object([("iommu", false.into()), ("sandbox", true.into())]);
        let row = Row { params, ..Row::default() };
        assert_eq!(
            ["iommu", "sandbox"].map(|key| super::text(&row, key)),
            ["iommu off", "sandbox on"]
        );
    }

    #[test]
    fn a_line_of_a_parameter_is_about_our_rows() {
        let mut benchmark = benchmark();
        let mut other = row("square", "sledge", 1.0, &[("part", "square"), ("size", "a")]);
        other.figures = object([("ratio_to_off", 0.1.into())]);
        benchmark.rows.push(other);
        let text = render(&benchmark, &SHEET, false);
        assert_eq!(cells_of(&text, "a"), ["a", "2", ".632", ".500", ".800", "2"]);
    }

    #[test]
    fn a_count_is_summed_and_a_column_of_zeros_is_a_line() {
        let mut benchmark = benchmark();
        for row in &mut benchmark.rows {
            row.figures.insert("lost".to_owned(), 0.into());
        }
        let text = render(&benchmark, &SHEET, true);
        assert!(text.contains("lost wheels: none\n") && text.contains("0 in each row: lost\n"));
        benchmark.rows[1].figures.insert("lost".to_owned(), 2.into());
        benchmark.rows[4].figures.insert("lost".to_owned(), 1.into());
        let text = render(&benchmark, &SHEET, true);
        assert!(text.contains("lost wheels: ox 3.00\n"), "{text}");
        assert_eq!(cells_of(&text, "round/1 ").last().unwrap(), "0");
    }

    #[test]
    fn details_have_every_row_in_its_units() {
        let text = render(&benchmark(), &SHEET, true);
        assert!(text.contains("round ones; ns: a turn\n") && text.contains("of turns"), "{text}");
        let head = cells_of(&text, "impl");
        assert_eq!(head, ["impl", "ns", "±", "x", "p99"], "a figure that no row has is left out");
        assert_eq!(
            cells_of(&text, "round/2 "),
            ["round/2", "ringfence", "100", "10.0", "1.00", "7.00"]
        );
        assert!(text.contains("<.500") && !text.contains("<.100"), "a faster peer is marked");
        assert_eq!(cells_of(&text, "square 100"), ["square", "100", "10.0", ".500", ".100"]);
        assert!(text.contains("settings: budget_ms 8"), "{text}");
    }

    #[test]
    fn only_peers_are_marked_as_faster_and_a_change_has_its_sign() {
        let mut benchmark = benchmark();
        let mut other = row("square", "lazy", 0.2, &[("part", "square")]);
        other.figures = object([("ratio_to_off", (-97.06).into())]);
        benchmark.rows.push(other);
        let text = render(&benchmark, &SHEET, true);
        assert!(text.contains("lazy") && !text.contains("<.200"), "{text}");
        assert!(text.contains("-97.1"), "{text}");
    }

    #[test]
    fn many_rows_are_printed_only_if_they_are_asked_for() {
        let mut benchmark = benchmark();
        for _ in 0..FEW {
            benchmark.rows.push(row("round/4", "ox", 2.0, &[("part", "round")]));
        }
        let few = render(&benchmark, &SHEET, false);
        assert!(few.contains("33 rows in all: --details prints them") && !few.contains("round/4"));
        assert!(render(&benchmark, &SHEET, true).contains("round/4"));
    }

    #[test]
    fn a_note_is_printed_once_with_its_rows() {
        let mut benchmark = benchmark();
        benchmark.warnings = vec!["it rains".to_owned()];
        benchmark.settings.insert(MISSING.to_owned(), serde_json::json!(["no oats"]));
        for index in 0..6 {
            let mut row = Row { name: format!("round/{index}"), ..Row::default() };
            row.implementation = "mule".to_owned();
            row.params = object([("part", "round".into())]);
            row.note = Some("not measured: no oats; stubborn\u{1b}".to_owned());
            benchmark.rows.push(row);
        }
        let text = render(&benchmark, &SHEET, true);
        let note = "note: mule: stubborn? (round/0, round/1, round/2, round/3 and 2 more)";
        assert!(text.contains(note), "{text}");
        assert_eq!(text.matches("no oats").count(), 1, "a warning has said it: {text}");
        assert!(text.contains("DID NOT RUN: no oats") && text.contains("warning: it rains"));
        assert!(!text.contains("round/5  "), "what was not measured has no line");
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_however_large_the_figures() {
        let mut benchmark = benchmark();
        benchmark.warnings.push("it rains ".repeat(40));
        benchmark.settings.insert("calls".to_owned(), "quite long".repeat(40).into());
        for row in &mut benchmark.rows {
            row.ns_per_op = row.ns_per_op.scaled(1.234e14);
            row.ratio_to_ringfence = Some(987_654.0);
            row.note = Some("x".repeat(300));
        }
        for line in render(&benchmark, &SHEET, true).lines() {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", line.chars().count());
        }
    }

    #[test]
    fn every_legend_fits_a_terminal() {
        use crate::bench::{blk, bounce, iotlb, iova, map, net, pin};
        let sheets = [
            &blk::SHEET,
            &bounce::SHEET,
            &iotlb::SHEET,
            &iova::SHEET,
            &map::SHEET,
            &net::SHEET,
            &pin::SHEET,
            &pin::runs::SHEET,
        ];
        for sheet in sheets {
            for line in sheet.legend.lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
        }
    }
}
