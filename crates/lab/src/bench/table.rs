//! Blocks of a table for a terminal.

use super::{Benchmark, Interval};
use crate::text::{bytes, number, optional, plain};

/// Keys of rows in the order in which they first come.
pub(super) fn distinct<'r, K: PartialEq>(
    rows: impl IntoIterator<Item = &'r super::Row>,
    key: impl Fn(&super::Row) -> K,
) -> Vec<K> {
    let mut keys = Vec::new();
    for row in rows {
        let key = key(row);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// Where it ran: `2 CPUs (AMD EPYC), 23.5 GiB, Linux 6.18`.
pub(super) fn machine(benchmark: &Benchmark) -> String {
    let host = &benchmark.host;
    let cpu = match host.cpu.as_str() {
        "" => String::new(),
        cpu => format!(" ({cpu})"),
    };
    let memory = bytes(host.memory_bytes);
    plain(&format!("{} CPUs{cpu}, {memory}, Linux {}", host.cpus, host.kernel))
}

/// A figure of a row that has an interval; empty if the row has none of that name.
pub(super) fn interval(row: &super::Row, key: &str) -> Interval {
    let value = row.figures.get(key).cloned();
    value.and_then(|value| serde_json::from_value(value).ok()).unwrap_or_default()
}

/// What a row was measured with, in words.
pub(super) fn text(row: &super::Row, key: &str) -> String {
    match row.params.get(key) {
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// `x1.23`, or `-`.
pub(super) fn times(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |ratio| format!("x{}", number(ratio)))
}

/// The `±` of a figure; nothing if there is no figure.
pub(super) fn half_width(interval: Interval) -> String {
    match interval.median {
        Some(_) => optional(interval.half_width()),
        None => String::new(),
    }
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
