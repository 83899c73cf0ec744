//! What a driver and a back end get done in a window, each on a CPU of its own, and the figures of
//! rounds of windows.

use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::{
    Benchmark, Interval, Row,
    clock::cpu_time,
    ping,
    row::{object, value},
    threads,
};
use crate::{
    load::net::Messages,
    progress::{Kind, Progress},
    stats::Estimate,
};

/// An end that had its CPU for less of a window was not alone there.
pub(super) const FULL_SHARE: f64 = 0.95;
/// From one look at the clock to the next, in turns of a driver.
pub(super) const TURNS: u32 = 16;
/// How often a driver looks for misses while there should be none.
pub(super) const LOOK: Duration = Duration::from_micros(20);
/// A back end that does nothing for so long, though there is something to do, is given up.
pub(super) const STUCK: Duration = Duration::from_secs(60);

/// The CPUs of a back end and of its driver.
pub(super) fn cpus(benchmark: &mut Benchmark) -> [usize; 2] {
    let cpus = threads::cpus();
    let cpus = [cpus[0], *cpus.last().expect("at least one")];
    if cpus[0] == cpus[1] {
        let why =
            "there is one CPU only: driver and back end take turns, and figures are of little use";
        benchmark.warnings.push(why.to_owned());
    }
    cpus
}

/// The progress over so many windows of about `step` each; the warnings are printed first.
pub(super) fn progress(kind: Kind, steps: u64, step: Duration, benchmark: &Benchmark) -> Progress {
    let expected = step * u32::try_from(steps).unwrap_or(u32::MAX);
    let progress = Progress::new(kind, steps, expected);
    for warning in &benchmark.warnings {
        progress.note(&format!("warning: {warning}"));
    }
    progress
}

/// The result of one window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    pub(super) seconds: f64,
    /// Requests of the window, or its packets: that came back (loop), came (rx), were taken (tx).
    pub(super) done: u64,
    /// The part of the window in which each end had a CPU.
    pub(super) driver_share: f64,
    pub(super) backend_share: f64,
    /// In the window.
    pub(super) messages: Messages,
    /// Of the whole connection.
    pub(super) frames: Frames,
    /// UPDATEs with their replies a second: one after the other, and many in flight.
    pub(super) single_rate: Option<f64>,
    pub(super) many_rate: Option<f64>,
}

impl Window {
    pub(super) fn rate(&self) -> f64 {
        self.done as f64 / self.seconds
    }

    /// Nanoseconds each; a machine that does other work may leave no time for any.
    pub(super) fn ns(&self) -> Option<f64> {
        (self.done > 0).then(|| 1e9 / self.rate())
    }

    /// Messages of the window on both sockets: each miss is one, each update and each invalidation
    /// is two with its reply.
    pub(super) fn messages(&self) -> u64 {
        let Messages { misses, updates, invalidations } = self.messages;
        misses + 2 * (updates + invalidations)
    }
}

/// What became of frames.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frames {
    /// Those that should have come, and those of them that did not.
    pub(super) carried: u64,
    pub(super) lost: u64,
    pub(super) late: u64,
    pub(super) corrupt: u64,
}

impl Frames {
    /// Lost frames of those that were carried.
    pub(super) fn loss(&self) -> f64 {
        if self.carried == 0 { 0.0 } else { self.lost as f64 / self.carried as f64 }
    }
}

/// What is read at the ends of a window, by the driver's thread.
pub(super) struct Mark {
    pub(super) at: Instant,
    pub(super) done: u64,
    cpu: Duration,
    backend_ns: u64,
    messages: Messages,
}

impl Mark {
    /// So many were done until now, with so much of the back end's CPU time and so many messages.
    pub(super) fn new(done: u64, backend_ns: u64, messages: Messages) -> Mark {
        Mark { done, cpu: cpu_time(), backend_ns, messages, at: Instant::now() }
    }

    /// What was done up to another.
    pub(super) fn until(&self, end: &Mark) -> Window {
        let seconds = end.at.duration_since(self.at).as_secs_f64();
        let backend = Duration::from_nanos(end.backend_ns.saturating_sub(self.backend_ns));
        Window {
            seconds,
            done: end.done - self.done,
            driver_share: (end.cpu - self.cpu).as_secs_f64() / seconds,
            backend_share: backend.as_secs_f64() / seconds,
            messages: Messages {
                misses: end.messages.misses - self.messages.misses,
                updates: end.messages.updates - self.messages.updates,
                invalidations: end.messages.invalidations - self.messages.invalidations,
            },
            ..Window::default()
        }
    }
}

/// One window of a round, or why there is none.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) window: Result<Window, String>,
    /// Round trip of a cache line before and after, nanoseconds.
    pub(super) ping: [Option<f64>; 2],
}

impl Measured {
    /// There is none, for this reason.
    pub(super) fn failed(why: String) -> Measured {
        Measured { window: Err(why), ping: [None; 2] }
    }
}

/// What `work` gets done on the driver's CPU, with the probe before and after it.
pub(super) fn measured(
    cpus: [usize; 2],
    work: impl FnOnce() -> anyhow::Result<Window>,
) -> anyhow::Result<Measured> {
    let before = ping::round_trip_ns(cpus);
    let window = threads::bound_to(cpus[1], work)?;
    Ok(Measured { window: Ok(window), ping: [before, ping::round_trip_ns(cpus)] })
}

/// A figure of each round, where there is one.
pub(super) type Figures = Vec<Option<f64>>;

pub(super) fn windows(of: &[Measured]) -> impl Iterator<Item = &Window> {
    of.iter().filter_map(|measured| measured.window.as_ref().ok())
}

pub(super) fn figures(of: &[Measured], figure: impl Fn(&Window) -> Option<f64>) -> Figures {
    of.iter().map(|measured| figure(measured.window.as_ref().ok()?)).collect()
}

/// Why windows failed.
pub(super) fn failures(of: &[Measured]) -> impl Iterator<Item = &String> {
    of.iter().filter_map(|measured| measured.window.as_ref().err())
}

pub(super) fn interval(figures: &Figures) -> Interval {
    Estimate::of(&figures.iter().flatten().copied().collect::<Vec<_>>()).into()
}

/// The rounds' ratios; a round that one side does not have, or in which the base did nothing, is left out.
pub(super) fn ratio(own: &Figures, base: &Figures) -> Interval {
    let of = |(own, base): (&Option<f64>, &Option<f64>)| {
        (*base).filter(|base| *base > 0.0).and_then(|base| Some((*own)? / base))
    };
    interval(&own.iter().zip(base).map(of).collect())
}

/// The row of some windows, as far as it is the same for packets and requests; `is_short`: an end had its
/// CPU for too little of the window.
pub(super) fn row(
    name: String,
    implementation: &str,
    params: Map<String, Value>,
    own: &[Measured],
    is_short: fn(&Window) -> bool,
) -> Row {
    // The usual round trip between the CPUs, and how often it differed.
    let pings: Figures = own.iter().flat_map(|measured| measured.ping).collect();
    let usual = interval(&pings);
    let elsewhere = |measured: &&Measured| {
        let differs = |ns: f64| usual.median.is_some_and(|usual| ping::differ(ns, usual));
        measured.ping.into_iter().flatten().any(differs)
    };
    let share = |of: fn(&Window) -> f64| value(interval(&figures(own, |window| Some(of(window)))));
    let failed = failures(own).count();
    Row {
        name,
        implementation: implementation.to_owned(),
        params,
        ns_per_op: interval(&figures(own, Window::ns)),
        note: match failures(own).next() {
            Some(why) if failed == own.len() => Some(format!("not measured: {why}")),
            Some(why) => Some(format!("{failed} of {} windows failed: {why}", own.len())),
            None => own.is_empty().then(|| "not measured: interrupted".to_owned()),
        },
        figures: object([
            ("windows", own.len().into()),
            ("windows_failed", failed.into()),
            ("windows_short_of_cpu", windows(own).filter(|window| is_short(window)).count().into()),
            ("windows_placed_elsewhere", own.iter().filter(elsewhere).count().into()),
            ("ping_ns", value(usual)),
            ("driver_cpu_share", share(|window| window.driver_share)),
            ("backend_cpu_share", share(|window| window.backend_share)),
        ]),
        ..Row::default()
    }
}

/// Messages about translations for each `what` that was done.
pub(super) fn messages_per(own: &[Measured], what: &str) -> [(String, Value); 3] {
    let done = windows(own).map(|window| window.done).sum::<u64>().max(1) as f64;
    let each = |name: &str, count: fn(&Messages) -> u64| {
        let all: u64 = windows(own).map(|window| count(&window.messages)).sum();
        (format!("{name}_per_{what}"), Value::from(all as f64 / done))
    };
    [
        each("misses", |messages| messages.misses),
        each("updates", |messages| messages.updates),
        each("invalidations", |messages| messages.invalidations),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_window() {
        let mut begun = Mark::new(5, 7, Messages { misses: 0, updates: 0, invalidations: 0 });
        begun.cpu = Duration::ZERO;
        let (at, cpu) = (begun.at + Duration::from_secs(2), Duration::from_secs(1));
        let window = begun.until(&Mark { at, cpu, done: 9, backend_ns: 500_000_007, ..begun });
        let Window { seconds, done, driver_share, backend_share, .. } = window;
        assert_eq!((seconds, done, driver_share, backend_share), (2.0, 4, 0.5, 0.25));
    }

    #[test]
    fn a_round_in_which_the_base_did_nothing_has_no_ratio() {
        let base = vec![Some(0.0), Some(2.0), None];
        assert_eq!(ratio(&base, &base).median, Some(1.0));
        assert_eq!(ratio(&vec![Some(3.0); 3], &base).median, Some(1.5));
        assert_eq!(ratio(&vec![Some(3.0)], &vec![Some(0.0)]).median, None);
    }
}
