//! Values of interleaved rounds, and their intervals and ratios.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Interval;
use crate::stats::Estimate;

/// What is measured in a round, in the order of turns. Each round reverses the order of the one
/// before: the second in turn is a percent or two slower, whatever it is.
pub(super) fn turns<T>(of: impl IntoIterator<Item = T>, round: u32) -> Vec<T> {
    let mut turns: Vec<T> = of.into_iter().collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns
}

/// Lets all take turns in `repeat` rounds, after one in which caches grow and which does not count.
/// What `measure` returns is `keep`t only if the round was not stopped: otherwise it has nothing to
/// compare with.
pub(super) fn contest<E, S>(
    entrants: &mut [E],
    repeat: u32,
    stop: &AtomicBool,
    mut measure: impl FnMut(&mut E) -> Option<S>,
    mut keep: impl FnMut(&mut E, S),
) {
    for round in 0..=repeat {
        let mut samples = Vec::new();
        for entrant in turns(entrants.iter_mut(), round) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            if let Some(sample) = measure(entrant) {
                samples.push((entrant, sample));
            }
        }
        if round > 0 && !stop.load(Ordering::Relaxed) {
            samples.into_iter().for_each(|(entrant, sample)| keep(entrant, sample));
        }
    }
}

/// What one implementation took in each round, in order.
///
/// The value at an index is of the round of that index, for every implementation: that is what
/// makes ratios of rounds possible.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rounds(Vec<f64>);

impl Rounds {
    /// The value of the next round.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Why there are none, if there are none: `out`, or that the run was stopped.
    pub(super) fn missing(&self, out: Option<&String>) -> Option<String> {
        out.cloned().or_else(|| self.is_empty().then(|| "not measured: interrupted".to_owned()))
    }

    /// The median and its interval.
    pub fn interval(&self) -> Interval {
        Estimate::of(&self.0).into()
    }

    /// The rounds' ratios to those of `base`, summarised.
    pub fn ratio_to(&self, base: &Rounds) -> Interval {
        Estimate::ratio(&self.0, &base.0).into()
    }

    /// The rounds of `f` of both values of a round; rounds that only one side has are left out.
    #[must_use]
    pub fn with(&self, other: &Rounds, f: impl Fn(f64, f64) -> f64) -> Rounds {
        Rounds(self.0.iter().zip(&other.0).map(|(a, b)| f(*a, *b)).collect())
    }
}

impl FromIterator<f64> for Rounds {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Rounds {
        Rounds(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_rounds_not_of_medians() {
        let ours: Rounds = [10.0, 20.0, 40.0].into_iter().collect();
        let theirs: Rounds = [20.0, 40.0, 80.0].into_iter().collect();
        let ratio = theirs.ratio_to(&ours);
        assert_eq!((ratio.median, ratio.half_width()), (Some(2.0), Some(0.0)));
        assert_eq!(ours.interval().median, Some(20.0));
    }

    #[test]
    fn a_round_that_one_side_lacks_is_left_out() {
        let ours: Rounds = [10.0].into_iter().collect();
        let theirs: Rounds = [20.0, 1000.0].into_iter().collect();
        assert_eq!(theirs.ratio_to(&ours).median, Some(2.0));
        assert_eq!(theirs.with(&ours, |a, b| a + b), [30.0].into_iter().collect());
        assert_eq!(Rounds::default().ratio_to(&ours), Interval::default());
    }
}
