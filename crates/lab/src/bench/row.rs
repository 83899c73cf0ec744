//! The contract `ringfence.bench/1`: rows, and their JSON.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{report::Machine, stats::Estimate};

/// The schema's name.
pub const SCHEMA: &str = "ringfence.bench/1";

/// Everything that one benchmark measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Benchmark {
    /// [`SCHEMA`].
    pub schema: String,
    /// The component: `iova`.
    pub bench: String,
    /// Where it ran.
    pub host: Machine,
    /// Rounds requested.
    pub rounds: u32,
    /// Whether it was stopped before they were complete.
    pub interrupted: bool,
    /// What else was chosen for the whole run.
    pub settings: Map<String, Value>,
    /// One for each implementation and each set of parameters.
    pub rows: Vec<Row>,
    /// What each placement costs the hardware, if that was requested (`iova`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Vec<Row>>,
    /// What a reader should know about the run.
    pub warnings: Vec<String>,
    /// The rules that implementations broke: each makes the run a failure.
    pub errors: Vec<String>,
}

impl Benchmark {
    /// A benchmark without rows, on this machine.
    pub fn new(bench: &str, rounds: u32) -> Benchmark {
        Benchmark {
            schema: SCHEMA.to_owned(),
            bench: bench.to_owned(),
            host: Machine::detect(),
            rounds,
            ..Benchmark::default()
        }
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        let measured = |row: &Row| row.ns_per_op.median.is_some() || row.note.is_none();
        !self.rows.iter().any(measured) && self.placement.is_none()
    }
}

/// One implementation under one set of parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The parameters in one word: rows of one name are of one contest.
    pub name: String,
    /// `ringfence`, or the name of the peer.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The parameters.
    pub params: Map<String, Value>,
    /// Nanoseconds an operation; all `null` if it was not measured.
    pub ns_per_op: Interval,
    /// The median of the rounds' ratios to `ringfence` in the same round; `null` if either was not
    /// measured.
    pub ratio_to_ringfence: Option<f64>,
    /// Why something was not measured, or how it was.
    pub note: Option<String>,
    /// The figures that only this benchmark has.
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

/// A median with its 95 % interval, each of which may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The median; `null` without a round.
    pub median: Option<f64>,
    /// Lower end of the interval; `null` from less than two rounds.
    pub lo: Option<f64>,
    /// Upper end.
    pub hi: Option<f64>,
}

impl Interval {
    /// Half the width of the interval: the `±` of a table.
    pub fn half_width(&self) -> Option<f64> {
        Some((self.hi? - self.lo?) / 2.0)
    }

    /// The same in another unit.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Interval {
        let scale = |value: Option<f64>| value.map(|value| value * factor);
        Interval { median: scale(self.median), lo: scale(self.lo), hi: scale(self.hi) }
    }
}

impl From<Option<Estimate>> for Interval {
    fn from(estimate: Option<Estimate>) -> Interval {
        let Some(Estimate { median, lo, hi }) = estimate else { return Interval::default() };
        Interval { median: Some(median), lo, hi }
    }
}

/// A JSON object of these entries.
pub(super) fn object<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// An interval as a figure of a row.
pub(super) fn value(interval: Interval) -> Value {
    serde_json::json!({ "median": interval.median, "lo": interval.lo, "hi": interval.hi })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let mut row = Row { name: "hot/0/1/1".to_owned(), ..Row::default() };
        row.implementation = "rbtree".to_owned();
        row.params.insert("live".to_owned(), Value::from("48%"));
        row.ns_per_op = Interval { median: Some(2.5), lo: None, hi: Some(3.0) };
        row.ratio_to_ringfence = Some(1.5);
        row.figures.insert("p99_ns".to_owned(), Value::from(7));
        row
    }

    #[test]
    fn the_contract_holds_key_by_key() {
        let mut benchmark = Benchmark::new("iova", 3);
        benchmark.rows.push(row());
        let value = serde_json::to_value(benchmark).unwrap();
        assert_eq!(value["schema"], "ringfence.bench/1");
        assert_eq!(value["bench"], "iova");
        let row = &value["rows"][0];
        assert_eq!(row["impl"], "rbtree");
        assert_eq!(row["params"]["live"], "48%");
        assert_eq!(row["ns_per_op"]["median"], 2.5);
        assert!(row["ns_per_op"]["lo"].is_null());
        assert_eq!(row["ratio_to_ringfence"], 1.5);
        assert_eq!(row["p99_ns"], 7, "own figures stand beside the common ones");
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut benchmark = Benchmark::new("iova", 3);
        benchmark.rows.push(row());
        let text = serde_json::to_string(&benchmark).unwrap();
        assert_eq!(serde_json::from_str::<Benchmark>(&text).unwrap(), benchmark);
    }

    #[test]
    fn what_was_not_measured_is_null() {
        let row = Row { note: Some("not measured: too slow".to_owned()), ..Row::default() };
        let value = serde_json::to_value(row).unwrap();
        for key in ["median", "lo", "hi"] {
            assert!(value["ns_per_op"].get(key).is_some_and(Value::is_null), "{key}");
        }
        assert!(value.get("ratio_to_ringfence").is_some_and(Value::is_null));
    }
}
