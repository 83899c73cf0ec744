//! Counters for statistics.

// The atomics of `std` under loom too: counts are not a way for threads to agree.
use std::sync::atomic::{AtomicU64, Ordering};

/// Time measured on a sample of the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// How many calls were timed.
    pub count: u64,
    /// Their time together, in nanoseconds, the cost of reading the clock subtracted: thread CPU
    /// time, unless stated otherwise.
    pub ns: u64,
    /// Their wall time together: more, if the thread slept or lost its CPU.
    pub wall_ns: u64,
}

impl Sampled {
    /// The mean per call in nanoseconds; 0 if nothing was timed.
    pub fn mean_ns(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.ns as f64 / self.count as f64 }
    }
}

/// A sum of sampled times.
#[derive(Debug, Default)]
pub(crate) struct TimeCounter {
    count: AtomicU64,
    ns: AtomicU64,
    wall_ns: AtomicU64,
}

impl TimeCounter {
    /// Adds the time of `calls` calls together; 0 for a part of calls that are already counted.
    pub(crate) fn note(&self, calls: u64, ns: u64, wall_ns: u64) {
        self.count.add(calls);
        self.ns.add(ns);
        self.wall_ns.add(wall_ns);
    }

    pub(crate) fn add_to(&self, sum: &mut Sampled) {
        sum.count += self.count.get();
        sum.ns += self.ns.get();
        sum.wall_ns += self.wall_ns.get();
    }
}

/// A sum of sampled times of calls that may be shorter than a reading of the clock.
#[derive(Debug, Default)]
pub(crate) struct BriefCounter {
    count: AtomicU64,
    /// The calls, with the clock's own time between two readings.
    ns: AtomicU64,
    /// The time between two readings with nothing in between, once a sample.
    clock_ns: AtomicU64,
}

impl BriefCounter {
    pub(crate) fn note(&self, calls: u64, ns: u64, clock_ns: u64) {
        self.count.add(calls);
        self.ns.add(ns);
        self.clock_ns.add(clock_ns);
    }

    pub(crate) fn add_to(&self, sum: &mut Sampled) {
        sum.count += self.count.get();
        // Subtracts the sums, not each sample: a clock's jitter may make a single difference
        // negative, and clamping it to 0 would make the mean too large.
        let ns = self.ns.get().saturating_sub(self.clock_ns.get());
        sum.ns += ns;
        sum.wall_ns += ns;
    }
}

/// Counting with relaxed operations.
pub(crate) trait Count {
    fn add(&self, n: u64);
    /// Undoes an [`add`](Self::add).
    fn take_back(&self, n: u64);
    fn get(&self) -> u64;
}

impl Count for AtomicU64 {
    #[inline]
    fn add(&self, n: u64) {
        self.fetch_add(n, Ordering::Relaxed);
    }
    #[inline]
    fn take_back(&self, n: u64) {
        self.fetch_sub(n, Ordering::Relaxed);
    }
    #[inline]
    fn get(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
}
