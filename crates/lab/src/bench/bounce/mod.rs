//! Bounce pools: what copying costs against mapping, and against pools of another shape.
//!
//! | module | what it holds |
//! |---|---|
//! | [`seed`] | the table of seed 004: jobs under each policy, between two processes |
//! | [`list`] | scatter lists for an untrusted device, bounced whole and by element, over a virtio-iommu |
//! | [`pool`] | our pools against a linear one, in one process |
//! | `linear` | the linear pool |
//! | [`subject`] | both pools, as `pool` uses them |
//! | `check` | an account of its own of what pools do |
//! | [`table`] | all of it for a terminal |

mod check;
mod linear;
pub mod list;
pub mod pool;
pub mod seed;
pub mod subject;
pub mod table;

use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::Result;
use ringfence_run::worker::Notify;
use serde_json::{Map, Value, json};

use super::{Benchmark, Interval};
use crate::{list::parse, progress::Kind};

/// What our pools are called, as in every benchmark.
pub(super) const OURS: &str = "ringfence";
/// What the linear pool is called.
pub(super) const PEER: &str = "swiotlb-like";

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Jobs under each policy.
    Seed,
    /// Lists for an untrusted device.
    List,
    /// Pools in one process.
    Pool,
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Part; 3] = [Part::Seed, Part::List, Part::Pool];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Part::Seed => "seed",
            Part::List => "list",
            Part::Pool => "pool",
        }
    }

    /// The parts of a list such as `seed,pool`.
    ///
    /// # Errors
    /// A name is none, or the list is empty or names one twice.
    pub fn parse_list(text: &str) -> Result<Vec<Part>, String> {
        parse(text, "list of parts")
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(name: &str) -> Result<Part, String> {
        let names = Part::ALL.map(Part::name).join(", ");
        let found = Part::ALL.into_iter().find(|part| part.name() == name);
        found.ok_or_else(|| format!("no part is called {name:?}: there are {names}"))
    }
}

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which parts.
    pub parts: Vec<Part>,
    /// Rounds.
    pub repeat: u32,
    /// How both processes wait.
    pub notify: Notify,
    /// Of the part `seed`.
    pub seed: seed::Options,
    /// Of the part `list`.
    pub list: list::Options,
    /// Of the part `pool`.
    pub pool: pool::Options,
    /// How to show progress.
    pub progress: Kind,
}

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned. What goes
/// wrong in a part is an error of the benchmark, and the other parts are run.
///
/// # Errors
/// What was asked for cannot be done: [`Usage`](crate::run::Usage).
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark> {
    let mut benchmark = Benchmark::new("bounce", options.repeat);
    benchmark.settings = object([
        ("parts", options.parts.iter().map(|part| part.name()).collect()),
        ("notify", options.notify.to_string().into()),
        ("runtime_s", options.seed.runtime.as_secs_f64().into()),
        ("list_budget_ms", (options.list.budget.as_secs_f64() * 1e3).into()),
        ("pool_budget_ms", (options.pool.budget.as_secs_f64() * 1e3).into()),
        ("peer_bytes", pool::BLOCK.into()),
    ]);
    let (how, progress) = ((options.repeat, options.notify), options.progress);
    for part in &options.parts {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let ended = match part {
            Part::Seed => seed::run(&options.seed, how, progress, stop, &mut benchmark),
            Part::List => list::run(&options.list, how, progress, stop, &mut benchmark),
            Part::Pool => pool::run(&options.pool, options.repeat, progress, stop, &mut benchmark),
        };
        match ended {
            Err(error) if error.is::<crate::run::Usage>() => return Err(error),
            Err(error) => benchmark.errors.push(format!("{part}: {error:#}")),
            Ok(()) => {}
        }
    }
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    Ok(benchmark)
}

fn object<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn value(interval: Interval) -> Value {
    json!({ "median": interval.median, "lo": interval.lo, "hi": interval.hi })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_names() {
        assert_eq!(Part::parse_list("pool,seed"), Ok(vec![Part::Pool, Part::Seed]));
        let error = Part::parse_list("pools").unwrap_err();
        assert!(error.contains("seed, list, pool"), "{error}");
        assert!(Part::parse_list("pool,pool").is_err() && Part::parse_list("").is_err());
    }
}
