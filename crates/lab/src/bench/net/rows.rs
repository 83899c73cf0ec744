//! What the rounds tell.

use crate::load::net::FRAME;
use serde_json::{Value, json};

use super::{
    MOST_LOST, Measured,
    case::{Case, Implementation},
    load::Window,
    object,
};
use crate::{
    bench::{Benchmark, Interval, Row, ping},
    stats::Estimate,
};

/// Who has its CPU for less of a window was not measured alone.
pub(in crate::bench) const FULL_SHARE: f64 = 0.95;

/// A figure of each round, where there is one.
pub(in crate::bench) type Figures = Vec<Option<f64>>;

/// Adds the rows of all cases. `found`: for each case and implementation the windows, by rounds.
pub(super) fn fill(
    benchmark: &mut Benchmark,
    cases: &[Case],
    implementations: &[Implementation],
    found: &[Vec<Vec<Measured>>],
) {
    let of = |case: &Case, implementation: Implementation| {
        let case = cases.iter().position(|other| other == case)?;
        let who = implementations.iter().position(|other| *other == implementation)?;
        Some(found[case][who].as_slice())
    };
    for case in cases {
        for &implementation in implementations.iter().filter(|who| case.is_for(**who)) {
            let own = of(case, implementation).unwrap_or_default();
            let off = of(&case.off(), implementation).unwrap_or_default();
            let ours = of(case, Implementation::Ringfence).unwrap_or_default();
            let dpdk = of(case, Implementation::Dpdk).unwrap_or_default();
            let row = row(case, implementation, own, [off, ours, dpdk]);
            let corrupt: u64 = windows(own).map(|window| window.corrupt).sum();
            if corrupt > 0 {
                let what = format!("{}, {implementation}: {corrupt} frames were wrong", row.name);
                match implementation {
                    Implementation::Ringfence => benchmark.errors.push(what),
                    Implementation::Dpdk => benchmark.warnings.push(what),
                }
            }
            let failed = own.iter().filter_map(|measured| measured.window.as_ref().err());
            if implementation == Implementation::Ringfence && windows(own).next().is_some() {
                let failed = failed.map(|why| format!("{}, {implementation}: {why}", row.name));
                benchmark.errors.extend(failed);
            }
            benchmark.rows.push(row);
        }
    }
}

fn windows(of: &[Measured]) -> impl Iterator<Item = &Window> {
    of.iter().filter_map(|measured| measured.window.as_ref().ok())
}

fn figures(of: &[Measured], figure: impl Fn(&Window) -> Option<f64>) -> Figures {
    of.iter().map(|measured| figure(measured.window.as_ref().ok()?)).collect()
}

pub(in crate::bench) fn interval(figures: &Figures) -> Interval {
    Estimate::of(&figures.iter().flatten().copied().collect::<Vec<_>>()).into()
}

/// The rounds' ratios; a round that one side lacks is left out.
pub(in crate::bench) fn ratio(own: &Figures, base: &Figures) -> Interval {
    let ratios = own.iter().zip(base).map(|(own, base)| Some((*own)? / (*base)?)).collect();
    interval(&ratios)
}

pub(in crate::bench) fn value(interval: Interval) -> Value {
    json!({ "median": interval.median, "lo": interval.lo, "hi": interval.hi })
}

fn is_alone(window: &Window) -> bool {
    window.driver_share.min(window.backend_share) >= FULL_SHARE
}

fn row(
    case: &Case,
    implementation: Implementation,
    own: &[Measured],
    [off, ours, dpdk]: [&[Measured]; 3],
) -> Row {
    let rates = |of: &[Measured]| figures(of, |window| Some(window.rate()));
    let times = |of: &[Measured]| {
        let spent = |window: &Window| (window.packets > 0).then(|| 1e9 / window.rate());
        figures(of, spent)
    };
    let rate = rates(own);
    let alone = figures(own, |window| is_alone(window).then(|| window.rate()));
    let sum = |count: fn(&Window) -> u64| windows(own).map(count).sum::<u64>();
    let count = |which: &dyn Fn(&Window) -> bool| windows(own).filter(|w| which(w)).count();
    let per_packet = |total: u64| total as f64 / sum(|window| window.packets).max(1) as f64;
    let many = figures(own, |window| window.many_rate);
    let worst = windows(own).map(Window::loss).fold(0.0, f64::max);

    // Where the CPUs were, and how often elsewhere.
    let pings: Figures = own.iter().flat_map(|measured| measured.ping).collect();
    let usual = interval(&pings);
    let elsewhere = |measured: &&Measured| {
        let differs = |ns: f64| usual.median.is_some_and(|usual| ping::differ(ns, usual));
        measured.ping.into_iter().flatten().any(differs)
    };

    let failed: Vec<&String> =
        own.iter().filter_map(|measured| measured.window.as_ref().err()).collect();
    let note = match failed.first() {
        Some(why) if failed.len() == own.len() => Some(format!("not measured: {why}")),
        Some(why) => Some(format!("{} of {} windows failed: {why}", failed.len(), own.len())),
        None if own.is_empty() => Some("not measured: interrupted".to_owned()),
        None if worst > MOST_LOST => Some(format!(
            "more than {} % of the frames were lost, up to {:.3} %",
            MOST_LOST * 100.0,
            worst * 100.0
        )),
        None => None,
    };
    let mut row = Row {
        name: case.name(),
        implementation: implementation.name().to_owned(),
        params: case.params(),
        ns_per_op: interval(&times(own)),
        ratio_to_ringfence: ratio(&times(own), &times(ours)).median,
        note,
        figures: object([
            ("packets_per_s", value(interval(&rate))),
            ("packets_per_s_alone", value(interval(&alone))),
            ("bits_per_s", value(interval(&rate).scaled((FRAME * 8) as f64))),
            ("ratio_to_off", value(ratio(&rate, &rates(off)))),
            ("ratio_to_dpdk", value(ratio(&rate, &rates(dpdk)))),
            ("windows", own.len().into()),
            ("windows_failed", failed.len().into()),
            ("windows_short_of_cpu", count(&|window| !is_alone(window)).into()),
            ("windows_placed_elsewhere", own.iter().filter(elsewhere).count().into()),
            ("windows_over_loss", count(&|window| window.loss() > MOST_LOST).into()),
            ("ping_ns", value(usual)),
            ("driver_cpu_share", value(interval(&figures(own, |w| Some(w.driver_share))))),
            ("backend_cpu_share", value(interval(&figures(own, |w| Some(w.backend_share))))),
            ("carried", sum(|window| window.carried).into()),
            ("lost", sum(|window| window.lost).into()),
            ("late", sum(|window| window.late).into()),
            ("corrupt", sum(|window| window.corrupt).into()),
        ]),
    };
    if case.translated() {
        row.figures.extend(object([
            ("misses_per_packet", per_packet(sum(|window| window.misses)).into()),
            ("updates_per_packet", per_packet(sum(|window| window.updates)).into()),
            ("invalidations_per_packet", per_packet(sum(|window| window.invalidations)).into()),
        ]));
    }
    if case.addressing.is_fresh() {
        let single = figures(own, |window| window.single_rate);
        let packets = sum(|window| window.packets).max(1);
        // Like with like: misses, updates, invalidations and answers of the window against as many
        // messages as the socket moves: an UPDATE and its answer are two.
        let messages = figures(own, |window| Some(window.messages() as f64 / window.seconds));
        let pairs = figures(own, |window| Some(2.0 * window.many_rate?));
        row.figures.extend(object([
            ("messages_per_s_single", value(interval(&single))),
            ("messages_per_s_many", value(interval(&many))),
            ("messages_per_packet", (sum(Window::messages) as f64 / packets as f64).into()),
            ("ratio_to_messages", value(ratio(&messages, &pairs))),
        ]));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::net::case::{Choice, Direction, Part, Ring};

    fn measured(packets: u64, lost: u64, share: f64, ping: f64) -> Measured {
        let window = Window {
            seconds: 2.0,
            packets,
            carried: packets,
            lost,
            driver_share: share,
            backend_share: 1.0,
            ..Window::default()
        };
        Measured { window: Ok(window), ping: [Some(ping), Some(140.0)] }
    }

    fn cases() -> Vec<Case> {
        let (parts, directions) = (vec![Part::Off, Part::Static], vec![Direction::Loop]);
        let entries = vec!["4k".parse().unwrap()];
        Choice { parts, directions, entries, rings: vec![Ring::Split] }.cases()
    }

    fn filled(found: Vec<Vec<Vec<Measured>>>) -> Benchmark {
        let mut benchmark = Benchmark::new("net", 3);
        fill(&mut benchmark, &cases(), Implementation::ALL, &found);
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
        bad.window.as_mut().unwrap().corrupt = 1;
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
