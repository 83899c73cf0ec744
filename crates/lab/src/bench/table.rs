//! Blocks of a table for a terminal.

use std::fmt::Write;

use serde_json::Value;

use super::{Benchmark, Interval, Row};
use crate::text::{dash, number, optional, plain, wrap};

/// Rows by their keys, in the order in which these first come.
pub(super) fn groups<'r, K: PartialEq>(
    rows: impl IntoIterator<Item = &'r Row>,
    key: impl Fn(&Row) -> K,
) -> Vec<(K, Vec<&'r Row>)> {
    let mut groups: Vec<(K, Vec<&Row>)> = Vec::new();
    for row in rows {
        let key = key(row);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((key, vec![row])),
        }
    }
    groups
}

/// Keys of rows in the order in which they first come.
pub(super) fn distinct<'r, K: PartialEq>(
    rows: impl IntoIterator<Item = &'r Row>,
    key: impl Fn(&Row) -> K,
) -> Vec<K> {
    groups(rows, key).into_iter().map(|(key, _)| key).collect()
}

/// What was measured, in how many rounds (`each`: of how long), and where.
pub(super) fn headline(benchmark: &Benchmark, about: &str, each: &str) -> String {
    format!("{about}; {}; {}", rounds(benchmark, each), benchmark.host.describe())
}

/// `5 rounds of 8 ms, interrupted`.
pub(super) fn rounds(benchmark: &Benchmark, each: &str) -> String {
    let interrupted = if benchmark.interrupted { ", interrupted" } else { "" };
    format!("{} rounds{each}{interrupted}", benchmark.rounds)
}

/// A number that was chosen for the whole run.
pub(super) fn setting(benchmark: &Benchmark, key: &str) -> f64 {
    benchmark.settings.get(key).and_then(Value::as_f64).unwrap_or(0.0)
}

/// Words that were chosen for the whole run.
pub(super) fn setting_text<'b>(benchmark: &'b Benchmark, key: &str) -> &'b str {
    benchmark.settings.get(key).and_then(Value::as_str).unwrap_or("?")
}

/// Adds each note once for each implementation that it is about, except notes that `is_told`
/// already.
pub(super) fn notes(out: &mut String, benchmark: &Benchmark, is_told: impl Fn(&str) -> bool) {
    for (name, note) in
        distinct(&benchmark.rows, |row| (row.implementation.clone(), row.note.clone()))
    {
        if let Some(note) = note.filter(|note| !is_told(note)) {
            out.push_str(&wrap(&format!("note: {name}: {note}")));
        }
    }
}

/// Adds what a reader should know about the run.
pub(super) fn warnings(out: &mut String, benchmark: &Benchmark) {
    for warning in &benchmark.warnings {
        out.push_str(&wrap(&format!("warning: {}", plain(warning))));
    }
}

/// Adds a block of lines below a title.
pub(super) fn section(out: &mut String, title: &str, block: &str) {
    // Writing to a String does not fail.
    let _ = write!(out, "\n{title}\n{block}");
}

/// A figure of a row that has an interval; empty if the row has none of that name.
pub(super) fn interval(row: &Row, key: &str) -> Interval {
    let value = row.figures.get(key).cloned();
    value.and_then(|value| serde_json::from_value(value).ok()).unwrap_or_default()
}

/// What a row was measured with, in words.
pub(super) fn text(row: &Row, key: &str) -> String {
    match row.params.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// `x1.23`, or `-`.
pub(super) fn times(ratio: Option<f64>) -> String {
    ratio.map_or(dash(), |ratio| format!("x{}", number(ratio)))
}

/// The `±` of a figure; nothing if there is no figure.
pub(super) fn half_width(interval: Interval) -> String {
    match interval.median {
        Some(_) => optional(interval.half_width()),
        None => String::new(),
    }
}

/// A number that a row was measured with, or that was counted; 0 if there is none.
pub(super) fn count(row: &Row, key: &str) -> u64 {
    row.figures.get(key).or(row.params.get(key)).and_then(Value::as_u64).unwrap_or(0)
}

/// A figure that has no interval.
pub(super) fn single(row: &Row, key: &str) -> Option<f64> {
    row.figures.get(key).and_then(Value::as_f64)
}

/// An interval's median and its `±`.
pub(super) fn both(interval: Interval) -> [String; 2] {
    [optional(interval.median), half_width(interval)]
}

/// A figure of a row in another unit, and its `±`.
pub(super) fn figure(row: &Row, key: &str, factor: f64) -> [String; 2] {
    both(interval(row, key).scaled(factor))
}

/// A ratio of a row, and its `±`.
pub(super) fn ratio(row: &Row, key: &str) -> [String; 2] {
    let ratio = interval(row, key);
    [times(ratio.median), half_width(ratio)]
}

/// A label, unless it is that of the line before.
pub(super) fn once(before: &mut String, label: String) -> String {
    if *before == label {
        return String::new();
    }
    before.clone_from(&label);
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_a_dash() {
        assert_eq!((optional(None), times(None)), ("-".to_owned(), "-".to_owned()));
        assert_eq!(
            (optional(Some(1.234)), times(Some(0.5))),
            ("1.23".to_owned(), "x.500".to_owned())
        );
        assert_eq!(half_width(Interval::default()), "");
        let one = Interval { median: Some(1.0), lo: None, hi: None };
        assert_eq!(half_width(one), "-");
    }
}
