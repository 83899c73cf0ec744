//! Bounce pools: what copying costs against mapping, and against pools of another shape.
//!
//! | module | what it holds |
//! |---|---|
//! | [`seed`] | the table of seed 004: jobs under each policy, between two processes |
//! | [`list`] | scatter lists for an untrusted device, bounced whole and by element, over a virtio-iommu |
//! | [`pool`] | our pools against a linear one, in one process |
//! | `linear` | the linear pool |
//! | [`subject`] | both pools, as `pool` uses them |
//! | `check` | checks pools against a record of its own |
//! | [`table`] | all of it for a terminal |

mod check;
mod linear;
pub mod list;
pub mod pool;
pub mod seed;
pub mod subject;
pub mod table;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use ringfence_run::worker::Notify;

use super::{Benchmark, row::object};
use crate::{list::named, progress::Kind};

/// What our pools are called, as in every benchmark.
pub(super) const OURS: &str = "ringfence";
/// What the linear pool is called.
pub(super) const PEER: &str = "swiotlb-like";

named! {
    /// A part of the benchmark.
    Part, "unknown part {:?}: there are {}":
    /// Jobs under each policy.
    Seed = "seed",
    /// Lists for an untrusted device.
    List = "list",
    /// Pools in one process.
    Pool = "pool",
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

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned. A part that
/// fails is an error of the benchmark, and the other parts still run.
///
/// # Errors
/// [`Usage`](crate::run::Usage): the options cannot be carried out.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::parse;

    #[test]
    fn parts_have_names() {
        assert_eq!(parse::<Part>("pool,seed", "list"), Ok(vec![Part::Pool, Part::Seed]));
        let error = parse::<Part>("pools", "list").unwrap_err();
        assert!(error.contains("seed, list, pool"), "{error}");
        assert!(parse::<Part>("pool,pool", "list").is_err() && parse::<Part>("", "list").is_err());
    }
}
