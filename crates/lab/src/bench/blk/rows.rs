//! What the rounds tell.

use super::{Measured, Outcome, load::Window};
use crate::bench::{
    Benchmark, Row,
    net::{
        object,
        rows::{FULL_SHARE, Figures, interval, ratio, value},
    },
    ping,
};

/// Adds the rows of all cases.
pub(super) fn fill(benchmark: &mut Benchmark, outcomes: &[Outcome]) {
    for outcome in outcomes {
        let Outcome { case, windows, tally, wrong_on_disk } = outcome;
        let off = outcomes.iter().find(|other| other.case == case.off());
        let name = case.name();
        for (number, what) in [
            (tally.wrong, "blocks were read that are not what was written"),
            (tally.failed, "requests failed"),
            (*wrong_on_disk, "blocks on the disk are not what was written"),
        ] {
            if number > 0 {
                benchmark.errors.push(format!("{name}: {number} {what}"));
            }
        }
        let failed = windows.iter().filter_map(|measured| measured.window.as_ref().err());
        benchmark.errors.extend(failed.map(|why| format!("{name}: {why}")));
        benchmark.rows.push(row(outcome, off.map_or(&[], |off| &off.windows)));
    }
}

fn windows(of: &[Measured]) -> impl Iterator<Item = &Window> {
    of.iter().filter_map(|measured| measured.window.as_ref().ok())
}

fn figures(of: &[Measured], figure: impl Fn(&Window) -> f64) -> Figures {
    of.iter().map(|measured| Some(figure(measured.window.as_ref().ok()?))).collect()
}

fn row(outcome: &Outcome, off: &[Measured]) -> Row {
    let Outcome { case, windows: own, tally, wrong_on_disk } = outcome;
    let rate = figures(own, Window::rate);
    let time = |measured: &Measured| {
        let window = measured.window.as_ref().ok()?;
        // A machine that does other work may leave no time for a request.
        (window.requests > 0).then(|| 1e9 / window.rate())
    };
    let times: Figures = own.iter().map(time).collect();
    let cpu = figures(own, Window::backend_us);
    let sum = |count: fn(&Window) -> u64| windows(own).map(count).sum::<u64>();
    let each = |count| sum(count) as f64 / sum(|window| window.requests).max(1) as f64;
    let is_short = |window: &&Window| window.driver_share < FULL_SHARE;

    // Where the CPUs were, and how often elsewhere.
    let pings: Figures = own.iter().flat_map(|measured| measured.ping).collect();
    let usual = interval(&pings);
    let elsewhere = |measured: &&Measured| {
        let differs = |ns: f64| usual.median.is_some_and(|usual| ping::differ(ns, usual));
        measured.ping.into_iter().flatten().any(differs)
    };
    let failed = own.iter().filter_map(|measured| measured.window.as_ref().err());
    let failed: Vec<&String> = failed.collect();
    let note = match failed.first() {
        Some(why) if failed.len() == own.len() => Some(format!("not measured: {why}")),
        Some(why) => Some(format!("{} of {} windows failed: {why}", failed.len(), own.len())),
        None => own.is_empty().then(|| "not measured: interrupted".to_owned()),
    };
    let mut row = Row {
        name: case.name(),
        implementation: "ringfence".to_owned(),
        params: case.params(),
        ns_per_op: interval(&times),
        ratio_to_ringfence: (!own.is_empty() && failed.len() < own.len()).then_some(1.0),
        note,
        figures: object([
            ("requests_per_s", value(interval(&rate))),
            ("ratio_to_off", value(ratio(&rate, &figures(off, Window::rate)))),
            ("backend_cpu_us", value(interval(&cpu))),
            ("cpu_ratio_to_off", value(ratio(&cpu, &figures(off, Window::backend_us)))),
            ("windows", own.len().into()),
            ("windows_failed", failed.len().into()),
            ("windows_short_of_cpu", windows(own).filter(is_short).count().into()),
            ("windows_placed_elsewhere", own.iter().filter(elsewhere).count().into()),
            ("ping_ns", value(usual)),
            ("driver_cpu_share", value(interval(&figures(own, |window| window.driver_share)))),
            ("backend_cpu_share", value(interval(&figures(own, |window| window.backend_share)))),
            ("answered", tally.answered().into()),
            ("wrong", (tally.wrong + wrong_on_disk).into()),
            ("failed", tally.failed.into()),
        ]),
    };
    if case.addressing.translated() {
        row.figures.extend(object([
            ("misses_per_request", each(|window| window.misses).into()),
            ("updates_per_request", each(|window| window.updates).into()),
            ("invalidations_per_request", each(|window| window.invalidations).into()),
        ]));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::blk::case::{Choice, Depth, Kind, Part, Queues};
    use crate::load::blk::Tally;

    fn measured(requests: u64) -> Measured {
        let window = Window {
            seconds: 2.0,
            requests,
            driver_share: 1.0,
            backend_share: 0.5,
            ..Window::default()
        };
        Measured { window: Ok(window), ping: [Some(140.0), Some(400.0)] }
    }

    fn filled(found: [Vec<Measured>; 3], wrong: u64) -> Benchmark {
        let choice = Choice {
            parts: vec![Part::Off, Part::Static],
            kinds: vec![Kind::Read],
            depths: vec![Depth(128)],
            queues: vec![Queues(1)],
            entries: vec!["4k".parse().unwrap()],
            ..Choice::default()
        };
        let outcomes = choice.cases().into_iter().zip(found).map(|(case, windows)| {
            let tally = Tally { good: 100, wrong, failed: 0 };
            Outcome { case, windows, tally, wrong_on_disk: 0 }
        });
        let mut benchmark = Benchmark::new("blk", 3);
        fill(&mut benchmark, &outcomes.collect::<Vec<_>>());
        benchmark
    }

    #[test]
    fn ratios_are_of_rounds_and_failures_are_told() {
        let off = [10, 20, 40].map(|requests| measured(requests * 1000)).to_vec();
        let on = [5, 10, 20].map(|requests| measured(requests * 1000)).to_vec();
        let none = vec![Measured { window: Err("gone".to_owned()), ping: [None; 2] }];
        let found = filled([off.clone(), on.clone(), none.clone()], 0);
        let median = |row: &Row, key: &str| row.figures[key]["median"].as_f64();
        let row = &found.rows[1];
        assert_eq!(row.name, "read/split/1x128/4k/mergeable");
        assert_eq!(median(row, "requests_per_s"), Some(5000.0));
        assert_eq!(median(row, "ratio_to_off"), Some(0.5));
        assert_eq!(median(row, "backend_cpu_us"), Some(100.0));
        assert_eq!(median(row, "cpu_ratio_to_off"), Some(2.0));
        assert_eq!(row.figures["windows_placed_elsewhere"], 3);
        assert_eq!(found.rows[2].note.as_deref(), Some("not measured: gone"));
        assert_eq!(found.errors, ["read/split/1x128/4k/unmergeable: gone"]);
        assert!(!found.rows[0].figures.contains_key("misses_per_request"));

        let found = filled([off, on, none], 2);
        assert!(found.errors[0].contains("1x128/off: 2 blocks were read"), "{found:?}");
    }
}
