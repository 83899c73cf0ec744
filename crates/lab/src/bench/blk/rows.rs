//! The rows that the rounds give.

use super::Outcome;
use crate::bench::{
    Benchmark, Row,
    row::{object, value},
    window::{
        self, FULL_SHARE, Measured, Window, failures, figures, interval, messages_per, ratio,
    },
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
        benchmark.errors.extend(failures(windows).map(|why| format!("{name}: {why}")));
        benchmark.rows.push(row(outcome, off.map_or(&[], |off| &off.windows)));
    }
}

/// CPU time of the back end for a request, microseconds.
fn backend_us(window: &Window) -> f64 {
    window.backend_share * window.seconds * 1e6 / window.done.max(1) as f64
}

fn row(outcome: &Outcome, off: &[Measured]) -> Row {
    let Outcome { case, windows: own, tally, wrong_on_disk } = outcome;
    let rates = |of: &[Measured]| figures(of, |window| Some(window.rate()));
    let cpus = |of: &[Measured]| figures(of, |window| Some(backend_us(window)));
    let (rate, cpu) = (rates(own), cpus(own));
    // One that sleeps leaves its CPU.
    let is_short: fn(&Window) -> bool =
        if case.sleeps() { |_| false } else { |window| window.driver_share < FULL_SHARE };
    let mut row = window::row(case.name(), "ringfence", case.params(), own, is_short);
    row.ratio_to_ringfence = window::windows(own).next().map(|_| 1.0);
    row.figures.extend(object([
        ("requests_per_s", value(interval(&rate))),
        ("ratio_to_off", value(ratio(&rate, &rates(off)))),
        ("backend_cpu_us", value(interval(&cpu))),
        ("cpu_ratio_to_off", value(ratio(&cpu, &cpus(off)))),
        ("answered", tally.completed().into()),
        ("wrong", (tally.wrong + wrong_on_disk).into()),
        ("failed", tally.failed.into()),
    ]));
    if case.addressing().translated() {
        row.figures.extend(messages_per(own, "request"));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bench::{blk::Options, options},
        load::blk::Tally,
    };

    fn measured(requests: u64) -> Measured {
        let window = Window {
            seconds: 2.0,
            done: requests,
            driver_share: 1.0,
            backend_share: 0.5,
            ..Window::default()
        };
        Measured { window: Ok(window), ping: [Some(140.0), Some(400.0)] }
    }

    fn filled(found: [Vec<Measured>; 3], wrong: u64) -> Benchmark {
        let cases: Options =
            options("--only off,static --kind read --depth 128 --queues 1 --entries 4k");
        let outcomes = cases.cases().into_iter().zip(found).map(|(case, windows)| {
            let tally = Tally { good: 100, wrong, failed: 0 };
            Outcome { case, windows, tally, wrong_on_disk: 0 }
        });
        let mut benchmark = Benchmark::new("blk", 3);
        fill(&mut benchmark, &outcomes.collect::<Vec<_>>());
        benchmark
    }

    #[test]
    fn ratios_are_of_rounds_and_failures_are_reported() {
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
