//! Counters for statistics, and timing a sample of the calls.

use std::sync::Arc;
// The atomics of `std` under loom too: counts are not a way for threads to agree.
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_sync::{clock::Clock, wait};

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
    /// The calls; with the clock's own time, of calls that may be shorter than a reading of it.
    ns: AtomicU64,
    /// Wall time. Of such short calls: the time between two
    /// readings with nothing in between, once a sample.
    other_ns: AtomicU64,
}

impl TimeCounter {
    /// Adds the time of `calls` calls together; 0 for a part of calls that are already counted.
    pub(crate) fn note(&self, calls: u64, ns: u64, other_ns: u64) {
        self.count.add(calls);
        self.ns.add(ns);
        self.other_ns.add(other_ns);
    }

    pub(crate) fn add_to(&self, sum: &mut Sampled) {
        sum.count += self.count.get();
        sum.ns += self.ns.get();
        sum.wall_ns += self.other_ns.get();
    }

    /// As [`add_to`](Self::add_to), for calls that may be shorter than a reading of the clock.
    pub(crate) fn add_brief_to(&self, sum: &mut Sampled) {
        sum.count += self.count.get();
        // Subtracts the sums, not each sample: a clock's jitter may make a single difference
        // negative, and clamping it to 0 would make the mean too large.
        let ns = self.ns.get().saturating_sub(self.other_ns.get());
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

/// A clock that runs only while the calling thread does.
pub trait ThreadClock: Send + Sync {
    /// The CPU time of the calling thread, in nanoseconds.
    fn thread_ns(&self) -> u64;

    /// Whether other threads want the calling thread's CPU. Defaults to false.
    fn is_shared(&self) -> bool {
        false
    }
}

/// `CLOCK_THREAD_CPUTIME_ID`. A read is a system call of some 100 ns to 200 ns: hence sampling.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsThreadClock;

impl ThreadClock for OsThreadClock {
    fn thread_ns(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
    }

    fn is_shared(&self) -> bool {
        wait::is_shared()
    }
}

/// Chooses which calls to time, and times them.
pub(crate) struct Sampler {
    pub(crate) clock: Arc<dyn ThreadClock>,
    wall: Arc<dyn Clock>,
    /// Calls whose number, multiplied by [`SPREAD`], is at most this are timed; `None`: none are.
    at_most: Option<u64>,
    /// The difference between two readings in a row.
    cost: Reading,
}

/// Both clocks at one moment, or the difference between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    thread_ns: u64,
    wall_ns: u64,
}

/// 2^64 divided by the golden ratio. Its multiples modulo 2^64 are spread evenly, so that one in N
/// of them lies in the lowest N-th: on average every N-th call is timed, but not in step with
/// batches and rings, whose sizes are powers of two like N.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Sampler {
    /// Times one call in `every`, a power of two; none if 0.
    pub(crate) fn new(clock: Arc<dyn ThreadClock>, wall: Arc<dyn Clock>, every: u32) -> Sampler {
        let at_most = (every != 0).then(|| u64::MAX >> every.trailing_zeros());
        let mut sampler = Sampler { clock, wall, at_most, cost: Reading::default() };
        if at_most.is_some() {
            // The least of many: disturbances are not part of the clocks' own cost.
            let all = [(); 64].map(|()| sampler.since(sampler.begin()));
            let least = |of: fn(&Reading) -> u64| all.iter().map(of).min().unwrap_or(0);
            sampler.cost =
                Reading { thread_ns: least(|r| r.thread_ns), wall_ns: least(|r| r.wall_ns) };
        }
        sampler
    }

    fn begin(&self) -> Reading {
        let wall_ns = self.wall.now_ns();
        Reading { thread_ns: self.clock.thread_ns(), wall_ns }
    }

    fn since(&self, start: Reading) -> Reading {
        let thread_ns = self.clock.thread_ns().saturating_sub(start.thread_ns);
        let wall_ns = self.wall.now_ns().saturating_sub(start.wall_ns);
        Reading {
            thread_ns: thread_ns.saturating_sub(self.cost.thread_ns),
            wall_ns: wall_ns.saturating_sub(self.cost.wall_ns),
        }
    }

    /// The time now, if call `number` is to be timed.
    #[inline]
    pub(crate) fn start(&self, number: u64) -> Option<Reading> {
        (number.wrapping_mul(SPREAD) <= self.at_most?).then(|| self.begin())
    }

    /// The time now, if any calls are timed.
    pub(crate) fn start_always(&self) -> Option<Reading> {
        self.at_most.map(|_| self.begin())
    }

    /// Adds the time since `start` to `sum`, less the clock's own time; it counts as `calls` calls.
    #[inline]
    pub(crate) fn stop(&self, start: Option<Reading>, calls: u64, sum: &TimeCounter) {
        if let Some(start) = start {
            let Reading { thread_ns, wall_ns } = self.since(start);
            sum.note(calls, thread_ns, wall_ns);
        }
    }

    /// Makes a call that may take less time than a reading of a clock does, and times it if `number`
    /// is to be timed: it counts as `calls`, which is 0 for a part of a call that is already counted.
    ///
    /// Those are timed whose number, multiplied by [`SPREAD`], lies at the opposite end of the range
    /// to [`start`](Self::start)'s, so that of two calls with the same number at most one is timed,
    /// and neither affects the other's figure.
    #[inline]
    pub(crate) fn time<R>(
        &self,
        number: u64,
        calls: u64,
        sum: &TimeCounter,
        call: impl FnOnce() -> R,
    ) -> R {
        match self.at_most {
            Some(at_most) if number.wrapping_mul(SPREAD) >= !at_most => {
                self.timed(calls, sum, call)
            }
            _ => call(),
        }
    }

    #[cold]
    fn timed<R>(&self, calls: u64, sum: &TimeCounter, call: impl FnOnce() -> R) -> R {
        // The first reading finds the clock's code and the kernel's page uncached: it is not used.
        self.wall.now_ns();
        let empty = self.wall.now_ns();
        let start = self.wall.now_ns();
        let result = call();
        let end = self.wall.now_ns();
        sum.note(calls, end.saturating_sub(start), start.saturating_sub(empty));
        result
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use ringfence_sync::clock::ManualClock;

    use super::*;

    /// Each reading takes 100 ns; nothing else takes any time.
    #[derive(Default)]
    struct SlowClock(AtomicU64);

    impl ThreadClock for SlowClock {
        fn thread_ns(&self) -> u64 {
            self.0.fetch_add(100, Ordering::Relaxed)
        }
    }

    fn sampler(every: u32) -> Sampler {
        // Each reading of the other clock takes 30 ns.
        Sampler::new(Arc::new(SlowClock::default()), Arc::new(ManualClock::stepping(30)), every)
    }

    #[test]
    fn one_call_in_n_is_timed_and_the_clocks_own_cost_is_subtracted() {
        for every in [1, 2, 64, 1024] {
            let sampler = sampler(every);
            let counter = TimeCounter::default();
            for number in 0..8192 {
                let start = sampler.start(number);
                sampler.stop(start, 1, &counter);
            }
            let mut sum = Sampled::default();
            counter.add_to(&mut sum);
            assert_eq!((sum.ns, sum.wall_ns), (0, 0));
            assert!(sum.count.abs_diff(8192 / u64::from(every)) <= 1, "{every}: {}", sum.count);
        }
        assert_eq!(sampler(0).start(0), None);
    }

    #[test]
    fn time_asleep_is_in_the_walls_figure_only() {
        let wall = Arc::new(ManualClock::new(0));
        let sampler = Sampler::new(Arc::new(SlowClock::default()), Arc::clone(&wall) as _, 1);
        let counter = TimeCounter::default();
        let start = sampler.start(0);
        wall.advance(5000);
        sampler.stop(start, 1, &counter);
        let mut sum = Sampled::default();
        counter.add_to(&mut sum);
        assert_eq!(sum, Sampled { count: 1, ns: 0, wall_ns: 5000 });
    }

    #[test]
    fn sampling_does_not_beat_with_batches() {
        // Every 16th call is of another kind: the sample contains its share of them.
        let sampler = sampler(64);
        let timed = (0..1u64 << 16).filter(|&n| sampler.start(n).is_some());
        let first_of_batch = timed.filter(|n| n % 16 == 0).count();
        assert!(first_of_batch.abs_diff((1 << 16) / 64 / 16) <= 4, "{first_of_batch}");
    }

    #[test]
    fn a_brief_call_is_timed_without_the_clock() {
        for every in [1, 2, 64, 1024] {
            // Each reading takes 20 ns, each call 7.
            let clock = Arc::new(ManualClock::stepping(20));
            let sampler = Sampler::new(
                Arc::new(SlowClock::default()),
                Arc::clone(&clock) as Arc<dyn Clock>,
                every,
            );
            let counter = TimeCounter::default();
            for number in 0..8192 {
                sampler.time(number, 1, &counter, || clock.advance(7));
            }
            let mut sum = Sampled::default();
            counter.add_brief_to(&mut sum);
            assert!(sum.count.abs_diff(8192 / u64::from(every)) <= 1, "{every}: {}", sum.count);
            assert_eq!(sum.ns, 7 * sum.count);
        }
    }

    #[test]
    fn a_second_try_adds_time_and_no_call() {
        let clock = Arc::new(ManualClock::stepping(20));
        let sampler =
            Sampler::new(Arc::new(SlowClock::default()), Arc::clone(&clock) as Arc<dyn Clock>, 1);
        let counter = TimeCounter::default();
        sampler.time(1, 1, &counter, || clock.advance(5));
        sampler.time(1, 0, &counter, || clock.advance(6));
        let mut sum = Sampled::default();
        counter.add_brief_to(&mut sum);
        assert_eq!(sum, Sampled { count: 1, ns: 11, wall_ns: 11 });
    }

    #[test]
    fn no_call_is_timed_by_both_clocks_unless_all_are() {
        for every in [2, 64, 1024] {
            let long = sampler(every);
            let brief =
                Sampler::new(Arc::new(SlowClock::default()), Arc::new(ManualClock::new(0)), every);
            let counter = TimeCounter::default();
            for number in (0..1 << 16).filter(|&number| long.start(number).is_some()) {
                brief.time(number, 1, &counter, || ());
            }
            let mut sum = Sampled::default();
            counter.add_brief_to(&mut sum);
            assert_eq!(sum.count, 0, "{every}");
        }
        let none = Sampler::new(Arc::new(SlowClock::default()), Arc::new(ManualClock::new(0)), 0);
        let counter = TimeCounter::default();
        none.time(0, 1, &counter, || ());
        let mut sum = Sampled::default();
        counter.add_brief_to(&mut sum);
        assert_eq!(sum.count, 0);
    }

    #[test]
    fn the_systems_clock_runs() {
        let start = OsThreadClock.thread_ns();
        let mut end = start;
        // Bounded by CPU time, not by wall time.
        while end == start {
            end = OsThreadClock.thread_ns();
        }
        assert!(end > start);
    }
}
