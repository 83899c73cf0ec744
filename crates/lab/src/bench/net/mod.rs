//! Network back ends: ours and DPDK's, with and without a device IOTLB, under the same load.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | what is measured: which way packets go, and by what addresses |
//! | `load` | one measurement |
//! | `backend`, `ringfence`, `testpmd` | the back ends |
//! | `notified` | our device behind our own IOMMU, in one process |
//! | `rows` | the rows that the rounds give |
//! | [`table`] | all of it for a terminal |
//!
//! The driver and the back end have a CPU each, and poll. Back ends take turns: those that are not
//! measured are stopped.

mod backend;
pub mod case;
mod load;
mod notified;
mod ringfence;
pub(super) mod rows;
pub mod table;
mod testpmd;

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Result;

use super::{
    Benchmark, ping,
    process::Folder,
    rounds,
    row::object,
    threads,
    window::{self, Measured},
};
use crate::{progress::Kind, run::Usage};
use backend::Backend;
use case::{Case, Choice, Implementation};

/// The most that may be lost: 0.005 %.
const MOST_LOST: f64 = 5e-5;
/// How long a back end may take to log why a connection ended.
const REASON: Duration = Duration::from_millis(300);
/// What a measurement takes besides its window.
const OVERHEAD: Duration = Duration::from_millis(160);

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cases.
    pub choice: Choice,
    /// The back ends.
    pub implementations: Vec<Implementation>,
    /// Rounds.
    pub repeat: u32,
    /// How long a window is.
    pub window: Duration,
    /// How to show progress.
    pub progress: Kind,
}

/// Runs the benchmark. `stop` ends it early; what was measured until then is returned.
///
/// # Errors
/// [`Usage`]: the options cannot be carried out.
pub fn run(options: &Options, stop: &AtomicBool) -> Result<Benchmark> {
    let cases = options.choice.cases();
    if cases.is_empty() {
        return Err(Usage(
            "there is nothing to measure: with packed rings, no dynamic part and no notified one"
                .into(),
        )
        .into());
    }
    let mut benchmark = Benchmark::new("net", options.repeat);
    let cpus = window::cpus(&mut benchmark);
    benchmark.settings = object([
        ("window_s", options.window.as_secs_f64().into()),
        ("frame_bytes", 64.into()),
        ("ring", crate::load::net::Options::default().ring.into()),
        ("backend_cpu", cpus[0].into()),
        ("driver_cpu", cpus[1].into()),
        ("most_lost", MOST_LOST.into()),
        ("messages_in_flight", load::DEPTH.into()),
    ]);
    let folder = Folder::new()?;
    let mut backends = Vec::new();
    for &implementation in &options.implementations {
        let started = match implementation {
            Implementation::Dpdk if !testpmd::is_there() => {
                Err("DPDK's testpmd is not installed: apt-get install dpdk-dev".to_owned())
            }
            _ => start(implementation, &folder.0, cpus[0])
                .and_then(|mut backend| backend.process().pause().map(|()| backend))
                .map_err(|error| format!("{error:#}")),
        };
        if let Err(why) = &started {
            benchmark.warnings.push(format!("{implementation} is not measured: {why}"));
        }
        backends.push((implementation, started));
    }
    let of = |case: &Case| {
        options
            .implementations
            .iter()
            .filter(|implementation| case.is_for(**implementation))
            .count()
    };
    let total = u64::from(options.repeat) * cases.iter().map(of).sum::<usize>() as u64;
    let step = options.window + OVERHEAD;
    let progress = window::progress(options.progress, total, step, &benchmark);
    let mut found = vec![vec![Vec::new(); backends.len()]; cases.len()];
    'rounds: for round in 1..=options.repeat {
        for (case, found) in cases.iter().zip(&mut found) {
            let turns = rounds::turns(backends.iter_mut().zip(found), round);
            for ((implementation, backend), found) in turns {
                if !case.is_for(*implementation) {
                    continue;
                }
                if stop.load(Ordering::Relaxed) {
                    break 'rounds;
                }
                progress.begin(&format!(
                    "{}, {implementation}, round {round} of {}",
                    case.name(),
                    options.repeat
                ));
                found.push(measure(backend, case, options.window, cpus));
                progress.step(step);
            }
        }
    }
    progress.finish();
    benchmark.interrupted = stop.load(Ordering::Relaxed);
    let implementations: Vec<_> = backends.iter().map(|(name, _)| *name).collect();
    rows::fill(&mut benchmark, &cases, &implementations, &found);
    Ok(benchmark)
}

/// Starts a back end in `folder`, on `cpu`.
fn start(implementation: Implementation, folder: &Path, cpu: usize) -> Result<Box<dyn Backend>> {
    Ok(match implementation {
        Implementation::Ringfence => Box::new(ringfence::Ringfence::start(folder, cpu)?),
        Implementation::Dpdk => Box::new(testpmd::Testpmd::start(folder, cpu)?),
    })
}

/// One window, with the probe before and after it.
fn measure(
    backend: &mut Result<Box<dyn Backend>, String>,
    case: &Case,
    length: Duration,
    cpus: [usize; 2],
) -> Measured {
    let mut ping = [None; 2];
    if let Some(mapped) = case.mapped {
        // A device process of its own, which lives as long as the window.
        ping[0] = ping::round_trip_ns(cpus);
        let window = threads::bound_to(cpus[1], || {
            notified::measure(mapped, case.direction, length, cpus[0])
        });
        ping[1] = ping::round_trip_ns(cpus);
        return Measured { window: window.map_err(|error| format!("{error:#}")), ping };
    }
    let window = backend.as_mut().map_err(|why| why.clone()).and_then(|backend| {
        backend.choose(case.direction);
        ping[0] = ping::round_trip_ns(cpus);
        let window = threads::bound_to(cpus[1], || {
            backend.process().resume()?;
            let window = load::measure(backend.as_mut(), case, length).map_err(|error| {
                // It logs the reason when its rings have stopped, after the connection was closed.
                std::thread::sleep(REASON);
                error.context(format!("it printed: {}", backend.process().last_words()))
            });
            // Let it see the end of the connection before it is stopped.
            std::thread::sleep(Duration::from_millis(10));
            backend.process().pause()?;
            window
        });
        ping[1] = ping::round_trip_ns(cpus);
        window.map_err(|error| {
            // The error first, then the back end's log.
            let chain: Vec<String> = error.chain().map(ToString::to_string).collect();
            match &chain[..] {
                [printed, rest @ ..] if !rest.is_empty() => {
                    format!("{} ({printed})", rest.join(": "))
                }
                _ => chain.join(": "),
            }
        })
    });
    Measured { window, ping }
}
