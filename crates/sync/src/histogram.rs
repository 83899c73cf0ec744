//! Values that many threads record, for means and quantiles.

use alloc::{boxed::Box, vec::Vec};
// The atomics of `core` even under loom: counts are not a way for threads to agree.
use core::{
    iter::repeat,
    sync::atomic::{AtomicU64, Ordering},
};

/// Sub-buckets per power of two: a value is kept to within an eighth.
const SUB_BITS: u32 = 3;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) << SUB_BITS;

/// A histogram that many threads record into without a lock: buckets grow with the value, eight to
/// each power of two.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// Records one value.
    #[inline]
    pub fn record(&self, value: u64) {
        self.buckets[bucket(value)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// The sum of the values so far (wraps after 2^64).
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// What was recorded so far. A value that is recorded meanwhile may be in the counts and not in
    /// the sum, or the reverse.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            counts: self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect(),
            sum: self.sum(),
        }
    }
}

/// The contents of a [`Histogram`] at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    counts: Vec<u64>,
    sum: u64,
}

impl HistogramSnapshot {
    /// How many values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the values (wraps after 2^64).
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The mean, or 0 if there are no values.
    pub fn mean(&self) -> f64 {
        match self.count() {
            0 => 0.0,
            count => self.sum as f64 / count as f64,
        }
    }

    /// The value that a share `quantile` (0 to 1) of the values do not exceed, rounded up by at
    /// most an eighth; 0 if there are no values.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let count = self.count();
        let exact = quantile * count as f64;
        // Rounded up, without the functions that `core` lacks.
        let whole = exact as u64;
        let wanted = whole.saturating_add(u64::from(exact > whole as f64));
        let wanted = wanted.clamp(1, count.max(1));
        let mut seen = 0;
        for (at, n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return last_of(at);
            }
        }
        0
    }

    /// Every bucket that is not empty, in ascending order: the largest value that falls into it,
    /// and how many did.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(at, n)| (last_of(at), *n))
    }

    /// What was recorded after `earlier`, a snapshot of the same histogram, was taken.
    pub fn since(&self, earlier: &HistogramSnapshot) -> HistogramSnapshot {
        let before = earlier.counts.iter().chain(repeat(&0));
        HistogramSnapshot {
            counts: self.counts.iter().zip(before).map(|(n, m)| n.saturating_sub(*m)).collect(),
            sum: self.sum.wrapping_sub(earlier.sum),
        }
    }

    /// Adds the values of `other`.
    pub fn merge(&mut self, other: &HistogramSnapshot) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (n, more) in self.counts.iter_mut().zip(&other.counts) {
            *n += more;
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

/// The bucket of a value: values below 8 have their own, then eight per power of two.
fn bucket(value: u64) -> usize {
    let power = value.checked_ilog2().unwrap_or(0);
    if power < SUB_BITS {
        return value as usize;
    }
    let sub = (value >> (power - SUB_BITS)) as usize & ((1 << SUB_BITS) - 1);
    (((power - SUB_BITS + 1) as usize) << SUB_BITS) + sub
}

/// The largest value of a bucket.
fn last_of(bucket: usize) -> u64 {
    let (power, sub) = (bucket >> SUB_BITS, bucket as u64 & ((1 << SUB_BITS) - 1));
    if power == 0 {
        return sub;
    }
    let shift = power as u32 - 1;
    let first = ((1 << SUB_BITS) + sub) << shift;
    first + ((1 << shift) - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_values_to_within_an_eighth() {
        // Buckets follow each other, so that what holds for both ends of each holds for every
        // value.
        let mut first = 0;
        for at in 0..BUCKETS {
            let last = last_of(at);
            assert_eq!((bucket(first), bucket(last)), (at, at));
            assert!(last - first <= first / 8, "bucket {at} spans {first} to {last}");
            first = last.wrapping_add(1);
        }
        assert_eq!(last_of(BUCKETS - 1), u64::MAX);
    }

    #[test]
    fn quantiles_are_those_of_the_values() {
        let histogram = Histogram::default();
        for value in 1..=1000 {
            histogram.record(value);
        }
        let first = histogram.snapshot();
        assert_eq!((first.count(), first.sum()), (1000, 500_500));
        assert!((500..=563).contains(&first.quantile(0.5)));
        assert!((990..=1114).contains(&first.quantile(0.99)));
        histogram.record(7);
        let later = histogram.snapshot().since(&first);
        assert_eq!((later.count(), later.quantile(0.5)), (1, 7));
        assert_eq!(HistogramSnapshot::default().quantile(0.5), 0);
    }
}
