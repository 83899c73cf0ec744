//! The rows that the rounds give.

use super::{
    MOST_LOST, Outcome,
    case::{Case, Implementation},
};
use crate::{
    bench::{
        Benchmark, Row,
        row::{object, value},
        window::{
            self, FULL_SHARE, Measured, Window, failures, figures, interval, messages_per, ratio,
            windows,
        },
    },
    load::net::FRAME,
};

/// Adds the rows of all cases.
pub(super) fn fill(benchmark: &mut Benchmark, outcomes: &[Outcome]) {
    let of = |case: Case, implementation: Implementation| -> &[Measured] {
        let is_it = |one: &&Outcome| one.case == case && one.implementation == implementation;
        outcomes.iter().find(is_it).map_or(&[], |one| &one.windows)
    };
    for outcome in outcomes {
        let Outcome { case, implementation, windows: own } = outcome;
        let ours = of(*case, Implementation::Ringfence);
        let dpdk = of(*case, Implementation::Dpdk);
        let row = row(outcome, [of(case.off(), *implementation), ours, dpdk]);
        let corrupt: u64 = windows(own).map(|window| window.frames.corrupt).sum();
        if corrupt > 0 {
            let what = format!("{}, {implementation}: {corrupt} frames were wrong", row.name);
            match implementation {
                Implementation::Ringfence => benchmark.errors.push(what),
                Implementation::Dpdk => benchmark.warnings.push(what),
            }
        }
        if *implementation == Implementation::Ringfence && windows(own).next().is_some() {
            let failed = failures(own).map(|why| format!("{}, {implementation}: {why}", row.name));
            benchmark.errors.extend(failed);
        }
        benchmark.rows.push(row);
    }
}

fn is_short(window: &Window) -> bool {
    window.driver_share.min(window.backend_share) < FULL_SHARE
}

fn row(outcome: &Outcome, [off, ours, dpdk]: [&[Measured]; 3]) -> Row {
    let Outcome { case, implementation, windows: own } = outcome;
    let rates = |of: &[Measured]| figures(of, |window| Some(window.rate()));
    let rate = rates(own);
    let alone = figures(own, |window| (!is_short(window)).then(|| window.rate()));
    let sum = |count: fn(&Window) -> u64| windows(own).map(count).sum::<u64>();
    let worst = windows(own).map(|window| window.frames.loss()).fold(0.0, f64::max);
    let mut row = window::row(case.name(), implementation.name(), case.params(), own, is_short);
    row.ratio_to_ringfence = ratio(&figures(own, Window::ns), &figures(ours, Window::ns)).median;
    row.note = row.note.or_else(|| {
        (worst > MOST_LOST).then(|| {
            format!(
                "more than {} % of the frames were lost, up to {:.3} %",
                MOST_LOST * 100.0,
                worst * 100.0
            )
        })
    });
    row.figures.extend(object([
        ("packets_per_s", value(interval(&rate))),
        ("packets_per_s_alone", value(interval(&alone))),
        ("bits_per_s", value(interval(&rate).scaled((FRAME * 8) as f64))),
        ("ratio_to_off", value(ratio(&rate, &rates(off)))),
        ("ratio_to_dpdk", value(ratio(&rate, &rates(dpdk)))),
        ("windows_over_loss", windows(own).filter(|w| w.frames.loss() > MOST_LOST).count().into()),
        ("carried", sum(|window| window.frames.carried).into()),
        ("lost", sum(|window| window.frames.lost).into()),
        ("late", sum(|window| window.frames.late).into()),
        ("corrupt", sum(|window| window.frames.corrupt).into()),
    ]));
    if case.translated() {
        row.figures.extend(messages_per(own, "packet"));
    }
    if case.addressing().is_fresh() {
        let packets = sum(|window| window.done).max(1);
        // Like with like: misses, updates, invalidations and replies of the window against as many
        // messages as the socket moves: an UPDATE and its reply are two.
        let messages = figures(own, |window| Some(window.messages() as f64 / window.seconds));
        let pairs = figures(own, |window| Some(2.0 * window.many_rate?));
        let of = |rate: fn(&Window) -> Option<f64>| value(interval(&figures(own, rate)));
        row.figures.extend(object([
            ("messages_per_s_single", of(|window| window.single_rate)),
            ("messages_per_s_many", of(|window| window.many_rate)),
            ("messages_per_packet", (sum(Window::messages) as f64 / packets as f64).into()),
            ("ratio_to_messages", value(ratio(&messages, &pairs))),
        ]));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Interval, net::Options, options, window::Frames};

    fn measured(packets: u64, lost: u64, share: f64, ping: f64) -> Measured {
        let window = Window {
            seconds: 2.0,
            done: packets,
            frames: Frames { carried: packets, lost, ..Frames::default() },
            driver_share: share,
            backend_share: 1.0,
            ..Window::default()
        };
        Measured { window: Ok(window), ping: [Some(ping), Some(140.0)] }
    }

    fn cases() -> Vec<Case> {
        let options: Options =
            options("--only off,static --direction loop --entries 4k --ring split");
        options.cases()
    }

    fn filled(found: Vec<Vec<Vec<Measured>>>) -> Benchmark {
        let mut benchmark = Benchmark::new("net", 3);
        let outcomes = cases().into_iter().zip(found).flat_map(|(case, found)| {
            let both = Implementation::ALL.into_iter().zip(found);
            both.map(move |(implementation, windows)| Outcome { case, implementation, windows })
        });
        fill(&mut benchmark, &outcomes.collect::<Vec<_>>());
        benchmark
    }

    #[test]
    fn ratios_are_of_rounds_and_nothing_is_left_out_in_silence() {
        let off = [10, 20, 40].map(|packets| measured(packets * 1000, 0, 1.0, 140.0)).to_vec();
        let mut on = [5, 10, 20].map(|packets| measured(packets * 1000, 0, 0.99, 140.0)).to_vec();
        on[1] = measured(10_000, 1, 0.9, 400.0);
        let dpdk = [1, 2, 4].map(|packets| measured(packets * 1000, 0, 1.0, 140.0)).to_vec();
        let none = vec![Measured { window: Err("gone".to_owned()), ping: [None; 2] }; 3];
        let found =
            filled(vec![vec![off, none.clone()], vec![on.clone(), dpdk.clone()], vec![on, dpdk]]);
        let row = &found.rows[2];
        assert_eq!(
            (row.name.as_str(), row.implementation.as_str()),
            ("loop/split/4k/mergeable", "ringfence")
        );
        let median = |key: &str| row.figures[key]["median"].as_f64();
        assert_eq!(median("packets_per_s"), Some(5000.0));
        assert_eq!(median("packets_per_s_alone"), Some(6250.0), "two of the three windows");
        assert_eq!((median("ratio_to_off"), median("ratio_to_dpdk")), (Some(0.5), Some(5.0)));
        assert_eq!(row.figures["windows"], 3);
        assert_eq!(row.figures["windows_short_of_cpu"], 1);
        assert_eq!(row.figures["windows_placed_elsewhere"], 1);
        assert_eq!(
            (&row.figures["windows_over_loss"], &row.figures["lost"]),
            (&1.into(), &1.into())
        );
        assert!(row.note.as_ref().unwrap().contains("0.010 %"), "{:?}", row.note);
        assert_eq!(found.rows[3].ratio_to_ringfence, Some(5.0), "nanoseconds a packet");
        let gone = &found.rows[1];
        assert_eq!(gone.note.as_deref(), Some("not measured: gone"));
        assert_eq!((gone.ns_per_op, gone.ratio_to_ringfence), (Interval::default(), None));
        assert!(found.rows[3].figures["ratio_to_off"]["median"].is_null());
        assert!(found.errors.is_empty());
    }

    #[test]
    fn wrong_frames_of_ours_are_errors() {
        let mut bad = measured(10, 0, 1.0, 140.0);
        bad.window.as_mut().unwrap().frames.corrupt = 1;
        let good = || vec![measured(10, 0, 1.0, 140.0)];
        let found = filled(vec![
            vec![vec![bad.clone()], good()],
            vec![good(), vec![bad]],
            vec![good(), good()],
        ]);
        assert_eq!(found.errors.len(), 1, "{:?}", found.errors);
        assert!(found.errors[0].contains("loop/split/off, ringfence"), "{:?}", found.errors);
        assert!(found.warnings[0].contains("dpdk"), "{:?}", found.warnings);
    }
}
