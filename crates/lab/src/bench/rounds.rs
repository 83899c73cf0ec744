//! Contests in interleaved rounds: what takes turns, what was measured of each, intervals and ratios.

use std::{
    collections::BTreeMap,
    ops::Index,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde_json::{Map, Value};

use super::{
    Interval, Row,
    row::{object, value},
};
use crate::stats::Estimate;

/// Set when a run is to end early.
pub type Stop = Arc<AtomicBool>;

/// Whether it is.
pub(super) fn stopped(stop: &Stop) -> bool {
    stop.load(Ordering::Relaxed)
}

/// What is measured in a round, in the order of turns. Each round reverses the order of the one
/// before: the second in turn is a percent or two slower, whatever it is. None has a turn once the run is to
/// end.
pub(super) fn turns<T>(
    of: impl IntoIterator<Item = T>,
    round: u32,
    stop: &Stop,
) -> impl Iterator<Item = T> {
    let mut turns: Vec<T> = of.into_iter().collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns.into_iter().take_while(|_| !stopped(stop))
}

/// One of those that take turns.
pub(crate) struct Entrant<K, S> {
    /// Which implementation it is, and what else distinguishes it from the others.
    pub(crate) key: K,
    /// What is measured, or why it is not.
    pub(crate) subject: Result<S, String>,
    /// What was measured of it.
    pub(crate) taken: Taken,
}

impl<K, S> Entrant<K, S> {
    pub(super) fn new(key: K, subject: Result<S, String>) -> Entrant<K, S> {
        Entrant { key, subject, taken: Taken::default() }
    }

    /// It is measured no more, and what was measured of it counts no more.
    pub(super) fn fail(&mut self) {
        (self.subject, self.taken) = (Err("it failed".to_owned()), Taken::default());
    }
}

/// Those that take turns.
pub(crate) struct Contest<K, S>(pub(crate) Vec<Entrant<K, S>>);

impl<K: PartialEq, S> Contest<K, S> {
    /// A contest of what `make` makes.
    pub(crate) fn new(
        keys: impl IntoIterator<Item = K>,
        mut make: impl FnMut(&K) -> Result<S, String>,
    ) -> Contest<K, S> {
        let subjects = keys.into_iter().map(|key| (make(&key), key));
        Contest(subjects.map(|(subject, key)| Entrant::new(key, subject)).collect())
    }

    /// Lets all take turns in `repeat` rounds, after one in which caches grow and which does not
    /// count, number 0. What `measure` returns counts only if the round was not stopped: otherwise it has
    /// nothing to compare with. What fails is out, and `failed` is called with it.
    pub(crate) fn run(
        &mut self,
        repeat: u32,
        stop: &Stop,
        mut measure: impl FnMut(&K, &mut S, u32) -> anyhow::Result<Sample>,
        mut failed: impl FnMut(&K, anyhow::Error),
    ) {
        for round in 0..=repeat {
            let mut samples = Vec::new();
            for entrant in turns(&mut self.0, round, stop) {
                let Ok(subject) = &mut entrant.subject else { continue };
                match measure(&entrant.key, subject, round) {
                    Ok(sample) => samples.push((entrant, sample)),
                    Err(error) => {
                        failed(&entrant.key, error);
                        entrant.fail();
                    }
                }
            }
            if round > 0 && !stopped(stop) {
                samples.into_iter().for_each(|(entrant, sample)| entrant.taken.push(sample));
            }
        }
    }

    /// What was measured of one of them: nothing, if it does not take part.
    pub(crate) fn taken(&self, key: &K) -> &Taken {
        self.0.iter().find(|one| one.key == *key).map_or(&NOTHING, |one| &one.taken)
    }
}

/// What was measured in a turn, by name.
pub(crate) type Sample = Vec<(&'static str, f64)>;

/// What was measured of one implementation: rounds of named figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Taken(BTreeMap<&'static str, Rounds>);

/// Of what does not take part.
pub(super) static NOTHING: Taken = Taken(BTreeMap::new());

impl Taken {
    /// The values of the next round.
    pub(super) fn push(&mut self, sample: impl IntoIterator<Item = (&'static str, f64)>) {
        for (name, value) in sample {
            self.0.entry(name).or_default().0.push(value);
        }
    }

    /// The intervals of some of them, as figures of a row.
    pub(super) fn intervals(&self, names: &[&str]) -> impl Iterator<Item = (String, Value)> {
        names.iter().map(|name| ((*name).to_owned(), value(self[name].interval())))
    }

    /// The sum of a count over all rounds.
    pub(super) fn sum(&self, name: &str) -> u64 {
        self[name].0.iter().sum::<f64>() as u64
    }
}

/// The rounds of a figure: none, if it was not measured.
impl Index<&str> for Taken {
    type Output = Rounds;

    fn index(&self, name: &str) -> &Rounds {
        static NONE: Rounds = Rounds(Vec::new());
        self.0.get(name).unwrap_or(&NONE)
    }
}

/// What one implementation took in each round, in order.
///
/// The value at an index is of the round of that index, for every implementation: that is what
/// makes ratios of rounds possible.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rounds(pub(crate) Vec<f64>);

impl Rounds {
    /// What is missing, for a row's note: all of it if there is no round, because of `out` or because
    /// the run was stopped.
    pub(super) fn missing(&self, out: Option<&String>) -> Option<String> {
        match self.0.is_empty() {
            true => Some(format!("not measured: {}", out.map_or("interrupted", String::as_str))),
            false => out.map(|why| format!("measured in part: {why}")),
        }
    }

    /// The row of these rounds of nanoseconds, beside ours; `out`: why it was measured no more.
    pub(super) fn row(
        &self,
        (name, implementation): (String, &str),
        params: Map<String, Value>,
        ours: &Rounds,
        out: Option<&String>,
    ) -> Row {
        let ratio = self.ratio_to(ours);
        Row {
            name,
            implementation: implementation.to_owned(),
            params,
            ns_per_op: self.interval(),
            ratio_to_ringfence: ratio.median,
            note: self.missing(out),
            figures: object([("ratio_interval", value(ratio))]),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_rounds_not_of_medians() {
        let ours = Rounds(vec![10.0, 20.0, 40.0]);
        let theirs = Rounds(vec![20.0, 40.0, 80.0]);
        let ratio = theirs.ratio_to(&ours);
        assert_eq!((ratio.median, ratio.half_width()), (Some(2.0), Some(0.0)));
        assert_eq!(ours.interval().median, Some(20.0));
    }

    #[test]
    fn a_round_that_one_side_lacks_is_left_out() {
        let ours = Rounds(vec![10.0]);
        let theirs = Rounds(vec![20.0, 1000.0]);
        assert_eq!(theirs.ratio_to(&ours).median, Some(2.0));
        assert_eq!(theirs.with(&ours, |a, b| a + b), Rounds(vec![30.0]));
        assert_eq!(Rounds::default().ratio_to(&ours), Interval::default());
    }

    #[test]
    fn the_first_round_does_not_count_and_who_fails_is_out() {
        let of = |key: &u32| if *key == 3 { Err("too many".to_owned()) } else { Ok((*key, 0)) };
        let mut contest = Contest::new([1, 2, 3], of);
        let mut failed = Vec::new();
        let measure = |key: &u32, (_, times): &mut (u32, u32), _| {
            *times += 1;
            anyhow::ensure!(*key == 1 || *times < 3, "it broke");
            Ok(vec![("ns", f64::from(*times)), ("operations", 2.0)])
        };
        let error = |key: &u32, error: anyhow::Error| failed.push(format!("{key}: {error}"));
        contest.run(3, &Stop::default(), measure, error);
        assert_eq!(failed, ["2: it broke"]);
        assert_eq!(contest.taken(&1)["ns"], Rounds(vec![2.0, 3.0, 4.0]));
        assert_eq!(contest.taken(&1).sum("operations"), 6);
        let notes: Vec<_> = contest
            .0
            .iter()
            .map(|one| one.taken["ns"].missing(one.subject.as_ref().err()))
            .collect();
        let why = ["it failed", "too many"].map(|why| Some(format!("not measured: {why}")));
        assert_eq!((&notes[0], &notes[1..]), (&None, &why[..]));
        assert!(contest.taken(&4)["ns"].0.is_empty(), "it does not take part");
        contest.run(3, &Stop::new(true.into()), |_, _, _| unreachable!(), |_, _| unreachable!());
        assert_eq!(contest.taken(&1)["ns"].0.len(), 3);
    }
}
