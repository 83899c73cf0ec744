//! The evidence from trials.

/// How many trials the mean covers at most: older ones count less and less.
const MEMORY: f64 = 8.0;
/// An error to assume for a trial's result beyond the measured one, as one or two results do not
/// show their variance.
const DOUBT: f64 = 0.05;

/// Logarithms of ratios, one a trial: their mean, and its error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Evidence {
    trials: u32,
    mean: f64,
    variance: f64,
    /// The mean of the variances that the trials themselves reported.
    noise: f64,
}

impl Evidence {
    pub(crate) const NONE: Evidence = Evidence { trials: 0, mean: 0.0, variance: 0.0, noise: 0.0 };

    /// Adds the result of a trial; `noise` is its variance as estimated from the trial alone.
    /// Results that are not finite are ignored.
    pub(crate) fn add(&mut self, result: f64, noise: f64) {
        if !result.is_finite() || !noise.is_finite() {
            return;
        }
        self.trials = self.trials.saturating_add(1);
        let weight = 1.0 / self.weight();
        let off = result - self.mean;
        self.mean += weight * off;
        self.noise += weight * (noise - self.noise);
        self.variance = (1.0 - weight) * (self.variance + weight * off * off);
    }

    /// Reduces the weight of past results to that of two trials: conditions may have changed.
    pub(crate) fn fade(&mut self) {
        self.trials = self.trials.min(2);
    }

    /// Whether a result contradicts the evidence so far.
    pub(crate) fn contradicts(&self, result: f64) -> bool {
        self.trials > 0
            && (result - self.mean).abs()
                > f64::max(0.15, 4.0 * self.variance.max(self.noise).sqrt())
    }

    pub(crate) fn trials(&self) -> u32 {
        self.trials
    }

    pub(crate) fn mean(&self) -> f64 {
        self.mean
    }

    /// The error of the mean: two standard errors, and more the fewer results they are estimated
    /// from.
    pub(crate) fn margin(&self) -> f64 {
        if self.trials == 0 {
            return f64::INFINITY;
        }
        let count = self.weight();
        let variance = self.variance.max(self.noise) + DOUBT * DOUBT / count;
        (2.0 + 2.5 / count) * (variance / count).sqrt()
    }

    /// Whether the mean is above 0 (or below), by more than `least` and more than its error.
    pub(crate) fn verdict(&self, least: f64) -> Option<bool> {
        (self.mean.abs() > least.max(self.margin())).then_some(self.mean > 0.0)
    }

    fn weight(&self) -> f64 {
        f64::from(self.trials).clamp(1.0, MEMORY)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_result_decides_only_if_it_is_clear() {
        let of = |results: &[f64]| {
            let mut evidence = Evidence::NONE;
            results.iter().for_each(|&result| evidence.add(result, 0.0));
            evidence.verdict(0.03)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[0.1]), None);
        assert_eq!(of(&[0.5]), Some(true));
        assert_eq!(of(&[-0.5]), Some(false));
        assert_eq!(of(&[0.1, 0.1, 0.1]), Some(true));
        assert_eq!(of(&[0.02; 20]), None, "less than matters");
        assert_eq!(of(&[0.4, -0.4, 0.4, -0.4]), None, "noise");
        assert_eq!(of(&[f64::NAN, f64::INFINITY, -0.5]), Some(false));
    }

    #[test]
    fn a_trial_that_reports_noise_counts_for_less() {
        let mut evidence = Evidence::NONE;
        evidence.add(0.5, 0.04);
        assert_eq!(evidence.verdict(0.03), None);
        (0..4).for_each(|_| evidence.add(0.5, 0.04));
        assert_eq!(evidence.verdict(0.03), Some(true));
    }

    #[test]
    fn another_world_contradicts() {
        let mut evidence = Evidence::NONE;
        assert!(!evidence.contradicts(9.0), "nothing is known");
        [0.3, 0.32, 0.28].into_iter().for_each(|result| evidence.add(result, 0.0));
        assert!(!evidence.contradicts(0.35));
        assert!(evidence.contradicts(-0.3));
    }

    proptest! {
        #[test]
        fn few_results_have_the_exact_mean_and_variance(
            results in proptest::collection::vec(-2.0..2.0f64, 1..=8),
        ) {
            let mut evidence = Evidence::NONE;
            results.iter().for_each(|&result| evidence.add(result, 0.0));
            let count = results.len() as f64;
            let mean = results.iter().sum::<f64>() / count;
            let variance = results.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / count;
            prop_assert!((evidence.mean - mean).abs() < 1e-9);
            prop_assert!((evidence.variance - variance).abs() < 1e-9);
        }

        #[test]
        fn what_is_long_ago_is_forgotten(old in -2.0..2.0f64, new in -2.0..2.0f64) {
            let mut evidence = Evidence::NONE;
            (0..50).for_each(|_| evidence.add(old, 0.0));
            (0..100).for_each(|_| evidence.add(new, 0.0));
            prop_assert!((evidence.mean - new).abs() < 1e-3);
        }
    }
}
