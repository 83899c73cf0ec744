//! Medians, intervals, ratios, latency.
#![allow(missing_docs)]

use serde::{Deserialize, Serialize};

/// A median over rounds with its 95 % interval; no interval from one round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    pub median: f64,
    pub lo: Option<f64>,
    pub hi: Option<f64>,
}

impl Estimate {
    /// None if `values` is empty or holds a value that is not finite.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let _ = values;
        todo!()
    }
    /// Pairwise `values[i] / base[i]`, one pair a round.
    pub fn ratio(values: &[f64], base: &[f64]) -> Option<Estimate> {
        let _ = (values, base);
        todo!()
    }
}

/// Nanoseconds, mergeable (a job thread has its own; one merge at the end of a round).
#[derive(Clone, Debug)]
pub struct Latencies {}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    pub mean: f64,
    pub p50: u64,
    pub p99: u64,
    pub p999: u64,
}

impl Latencies {
    pub fn new() -> Latencies {
        todo!()
    }
    pub fn record(&mut self, ns: u64) {
        let _ = ns;
        todo!()
    }
    pub fn merge(&mut self, other: &Latencies) {
        let _ = other;
        todo!()
    }
    pub fn count(&self) -> u64 {
        todo!()
    }
    pub fn mean(&self) -> f64 {
        todo!()
    }
    pub fn quantile(&self, q: f64) -> u64 {
        let _ = q;
        todo!()
    }
    pub fn summary(&self) -> LatencySummary {
        todo!()
    }
}
