//! Statistics of rounds: medians with intervals, ratios, latencies.
//!
//! A figure of a comparison is the **median over its rounds**: one round with a backup or a thermal
//! limit in it does not move it. Beside it is a 95 % confidence interval:
//!
//! - from 6 rounds on, the interval between order statistics, interpolated after Hettmansperger and
//!   Sheather to 95 %: no assumption about the distribution. (With 6, the extremes cover 96.9 %;
//!   with fewer no pair of order statistics reaches 95 %.)
//! - from 2 to 5 rounds, the t-interval `t(n-1) * s / sqrt(n)`, as the seed has it for its mean, put
//!   around the median and widened by what a median of so few normal values varies more than their
//!   mean. It is wide, and should be.
//! - from one round there is none.
//!
//! A **ratio to `off`** is taken in each round, between runs that were next to each other (A B C A
//! B C ...), and then summarised: what slows a machine for minutes cancels out.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// A median over rounds with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The median.
    pub median: f64,
    /// Lower end of the interval; None (JSON `null`) from one round.
    pub lo: Option<f64>,
    /// Upper end.
    pub hi: Option<f64>,
}

impl Estimate {
    /// The median of `values` and its interval. None if there are no values, or one is not finite.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = median(&sorted);
        let interval = match sorted.len() {
            1 => None,
            2..=5 => Some(t_half_width(&sorted)).map(|half| (median - half, median + half)),
            _ => Some(order_interval(&sorted)),
        };
        let (lo, hi) = interval.unzip();
        Some(Estimate { median, lo, hi })
    }

    /// The ratios `values[i] / base[i]`, summarised; rounds that only one side has are left out.
    /// None if no round is left, or a base is 0.
    pub fn ratio(values: &[f64], base: &[f64]) -> Option<Estimate> {
        let ratios: Vec<f64> = values.iter().zip(base).map(|(value, base)| value / base).collect();
        Estimate::of(&ratios)
    }

    /// Half the width of the interval: the `±` of a table.
    pub fn half_width(&self) -> Option<f64> {
        Some((self.hi? - self.lo?) / 2.0)
    }
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        sorted[middle - 1] / 2.0 + sorted[middle] / 2.0
    }
}

/// For 2 to 5 values.
fn t_half_width(sorted: &[f64]) -> f64 {
    /// Two-sided 95 % of Student's t for 1 to 4 degrees of freedom.
    const T: [f64; 4] = [12.706, 4.303, 3.182, 2.776];
    /// Standard error of the median over that of the mean, for 2 to 5 normal values.
    const WIDER: [f64; 4] = [1.0, 1.160, 1.092, 1.198];
    let n = sorted.len() as f64;
    let mean = sorted.iter().sum::<f64>() / n;
    let variance = sorted.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let index = sorted.len() - 2;
    T[index] * WIDER[index] * (variance / n).sqrt()
}

/// For 6 values and more.
fn order_interval(sorted: &[f64]) -> (f64, f64) {
    let n = sorted.len();
    // The d-th smallest and the d-th largest value cover the median with 1 - 2 P(Bin(n, 1/2) < d).
    let mut term = 0.5f64.powi(n as i32);
    let mut below = term;
    let (mut d, mut coverage) = (1, 1.0 - 2.0 * below);
    let (inner, inner_coverage) = loop {
        term *= (n - d + 1) as f64 / d as f64;
        below += term;
        let next = 1.0 - 2.0 * below;
        // n / 2 is as far in as a pair can go; no n from 6 on comes that far above 95 %.
        if next < 0.95 || d + 1 > n / 2 {
            break (d + 1, next);
        }
        (d, coverage) = (d + 1, next);
    };
    let weight = (coverage - 0.95) / (coverage - inner_coverage);
    let share = (n - d) as f64 * weight / (d as f64 + (n - 2 * d) as f64 * weight);
    let between = |outer: f64, inner: f64| outer + share * (inner - outer);
    (
        between(sorted[d - 1], sorted[(inner - 1).min(n - 1)]),
        between(sorted[n - d], sorted[n.saturating_sub(inner)]),
    )
}

/// A histogram of times, ns, of three digits each, up to 1000 s (longer ones count as that).
///
/// Each job thread has its own; they are merged when a round is over.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

/// The summary of a [`Latencies`] in reports, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean: f64,
    /// Half took no longer.
    pub p50: u64,
    /// 99 of 100 took no longer.
    pub p99: u64,
    /// 999 of 1000 took no longer.
    pub p999: u64,
}

impl Default for Latencies {
    /// An empty one. Allocates all it will ever need: [`Latencies::record`] does not.
    fn default() -> Latencies {
        Latencies(Histogram::new_with_max(Latencies::MAX, 3).expect("the bounds are legal"))
    }
}

impl Latencies {
    const MAX: u64 = 1_000_000_000_000;

    /// Counts one.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    /// Counts one `n` times.
    pub fn record_n(&mut self, ns: u64, n: u64) {
        self.0.saturating_record_n(ns, n);
    }

    /// Counts what `other` counted, too.
    pub fn merge(&mut self, other: &Latencies) {
        // All have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// Forgets everything.
    #[cfg(test)]
    fn clear(&mut self) {
        self.0.reset();
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Their mean, ns; 0 if there are none.
    pub fn mean(&self) -> f64 {
        self.0.mean()
    }

    /// The time which a part `q` (0 to 1) did not exceed, ns; 0 if there are none.
    pub fn quantile(&self, q: f64) -> u64 {
        self.0.value_at_quantile(q)
    }

    /// All of it in a few figures.
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            mean: self.mean(),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            p999: self.quantile(0.999),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_round_has_no_interval() {
        let estimate = Estimate::of(&[3.0]).unwrap();
        assert_eq!(estimate, Estimate { median: 3.0, lo: None, hi: None });
        assert_eq!(estimate.half_width(), None);
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn few_rounds_have_the_t_interval() {
        let two = Estimate::of(&[1.0, 3.0]).unwrap();
        assert!((two.half_width().unwrap() - 12.706).abs() < 1e-9);
        let three = Estimate::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(three.median, 2.0);
        assert!((three.half_width().unwrap() - 4.303 * 1.160 / 3f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn many_rounds_have_the_interval_between_order_statistics() {
        let values = |n: i32| (1..=n).map(f64::from).collect::<Vec<_>>();
        let at = |n| Estimate::of(&values(n)).unwrap();
        // 6: the extremes cover 96.9 %, the next pair 78.1 %.
        let six = at(6);
        assert!((1.3..1.4).contains(&six.lo.unwrap()) && (5.6..5.7).contains(&six.hi.unwrap()));
        // 10: ranks 2 and 9 cover 97.9 %, 3 and 8 cover 89.1 %.
        let ten = at(10);
        assert!((2.0..3.0).contains(&ten.lo.unwrap()) && (8.0..9.0).contains(&ten.hi.unwrap()));
        // 30: ranks 10 and 21 cover 95.7 %, 11 and 20 cover 90.1 %.
        let thirty = at(30);
        assert!((10.0..11.0).contains(&thirty.lo.unwrap()));
        assert!((20.0..21.0).contains(&thirty.hi.unwrap()));
        assert_eq!(thirty.median, 15.5);
    }

    #[test]
    fn the_interval_covers_the_true_median_about_95_times_in_100() {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            (crate::block::mix(state) >> 11) as f64 / (1u64 << 53) as f64
        };
        for n in [2, 3, 5, 6, 7, 10, 15, 30] {
            let covered = (0..4000)
                .filter(|_| {
                    // Normal enough: the sum of twelve.
                    let values: Vec<f64> =
                        (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f64>()).collect();
                    let estimate = Estimate::of(&values).unwrap();
                    (estimate.lo.unwrap()..=estimate.hi.unwrap()).contains(&6.0)
                })
                .count();
            assert!((3720..=3900).contains(&covered), "n = {n}: {covered} of 4000");
        }
    }

    #[test]
    fn a_ratio_pairs_rounds_so_that_what_slows_both_cancels_out() {
        let off = [100.0, 50.0, 200.0, 100.0];
        let half = off.map(|value| value / 2.0);
        let ratio = Estimate::ratio(&half, &off).unwrap();
        assert_eq!((ratio.median, ratio.half_width()), (0.5, Some(0.0)));
        assert_eq!(Estimate::ratio(&half[..1], &off).unwrap().lo, None);
        assert_eq!(Estimate::ratio(&[1.0], &[0.0]), None);
        assert_eq!(Estimate::ratio(&[], &off), None);
    }

    #[test]
    fn merged_latencies_are_those_of_one_histogram() {
        let (mut a, mut b, mut both) =
            (Latencies::default(), Latencies::default(), Latencies::default());
        for ns in 1..=1000u64 {
            let part = if ns % 3 == 0 { &mut a } else { &mut b };
            part.record(ns * 1000);
            both.record(ns * 1000);
        }
        a.merge(&b);
        assert_eq!(a.summary(), both.summary());
        let summary = a.summary();
        assert!((summary.mean / 500_500.0 - 1.0).abs() < 0.001);
        for (value, expected) in [(summary.p50, 500e3), (summary.p99, 990e3), (summary.p999, 999e3)]
        {
            assert!((value as f64 / expected - 1.0).abs() < 0.002, "{value} for {expected}");
        }
        a.clear();
        assert_eq!((a.count(), a.mean(), a.quantile(0.5)), (0, 0.0, 0));
        a.record(u64::MAX);
        assert_eq!(a.count(), 1);
    }

    proptest! {
        #[test]
        fn the_median_lies_in_its_interval(values in prop::collection::vec(-1e9f64..1e9, 1..60)) {
            let estimate = Estimate::of(&values).unwrap();
            if let (Some(lo), Some(hi)) = (estimate.lo, estimate.hi) {
                prop_assert!(lo <= estimate.median && estimate.median <= hi);
                if values.len() > 5 {
                    let (min, max) = values.iter().fold((f64::MAX, f64::MIN),
                        |(min, max), v| (min.min(*v), max.max(*v)));
                    prop_assert!(min <= lo && hi <= max);
                }
            } else {
                prop_assert_eq!(values.len(), 1);
            }
        }
    }
}
