//! A clock cheap enough for single operations.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Counts ticks: of the processor's time stamp counter where that runs evenly, else nanoseconds of
/// the operating system's clock.
///
/// If a clock of 25 ns timed an operation of 10 ns, it would mostly time itself. What is left of
/// that error is printed with the figures: [`cost_ns`](Self::cost_ns).
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    counter: bool,
    ns_per_tick: f64,
    /// What reading it costs, ns: about that much is in every time of a single operation.
    pub cost_ns: f64,
    base: Instant,
}

/// How long the two clocks are compared.
const CALIBRATION: Duration = Duration::from_millis(20);

impl Clock {
    /// Finds out which clock there is, how fast it ticks and what reading it costs.
    pub fn calibrate() -> Clock {
        let base = Instant::now();
        let mut clock = Clock { counter: runs_evenly(), ns_per_tick: 1.0, cost_ns: 0.0, base };
        if clock.counter {
            let (begun, first) = clock.both();
            while begun.elapsed() < CALIBRATION {
                std::hint::spin_loop();
            }
            let (ended, last) = clock.both();
            let ticks = last.wrapping_sub(first);
            clock.ns_per_tick = (ended - begun).as_nanos() as f64 / ticks.max(1) as f64;
        }
        // The median of many: some are interrupted.
        let mut costs: Vec<f64> = (0..101)
            .map(|_| {
                let first = clock.now();
                for _ in 0..100 {
                    std::hint::black_box(clock.now());
                }
                clock.ns(clock.now().wrapping_sub(first)) / 101.0
            })
            .collect();
        costs.sort_by(f64::total_cmp);
        clock.cost_ns = costs[costs.len() / 2];
        clock
    }

    /// The system's clock and this one, at one moment: the closest of some readings of both, as a
    /// thread may be interrupted between them.
    fn both(&self) -> (Instant, u64) {
        let looks = (0..32).map(|_| {
            let (before, at, after) = (self.now(), Instant::now(), self.now());
            (after.wrapping_sub(before), at, before)
        });
        let (_, at, ticks) = looks.min_by_key(|&(apart, ..)| apart).expect("some");
        (at, ticks)
    }

    /// Ticks since some moment.
    #[inline]
    pub fn now(&self) -> u64 {
        if self.counter { counter() } else { self.base.elapsed().as_nanos() as u64 }
    }

    /// The nanoseconds of so many ticks.
    #[inline]
    pub fn ns(&self, ticks: u64) -> f64 {
        ticks as f64 * self.ns_per_tick
    }

    /// The nanoseconds of single operations of so many ticks: of the [`middle`] half, without what the
    /// clock costs. It sorts them.
    pub(super) fn middle(&self, ticks: &mut [u64]) -> f64 {
        (self.ns(1) * middle(ticks) - self.cost_ns).max(0.0)
    }

    /// Which clock it is.
    pub fn name(&self) -> &'static str {
        if self.counter { "rdtsc" } else { "clock_gettime" }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets user space use it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

/// Whether there is a counter, and it runs at one speed whatever the processor does.
fn runs_evenly() -> bool {
    let flags = crate::memory::field("/proc/cpuinfo", "flags").unwrap_or_default();
    ["constant_tsc", "nonstop_tsc"].iter().all(|flag| flags.split(' ').any(|word| word == *flag))
}

/// This thread's CPU time.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Calls `step` with how many times to do something, once at least and until that has taken
/// `budget`; returns how many times it was, and how long it took. The clock is read seldom, so that
/// reading costs nothing, but often enough not to overrun by much: 64 times or so.
///
/// # Errors
/// Those of `step`.
#[inline]
pub(crate) fn fitting<E>(
    budget: Duration,
    mut step: impl FnMut(u64) -> Result<(), E>,
) -> Result<(u64, Duration), E> {
    let begun = Instant::now();
    let (mut done, mut chunk) = (0u64, 1u64);
    loop {
        step(chunk)?;
        done += chunk;
        let took = begun.elapsed();
        if took >= budget {
            return Ok((done, took));
        }
        let fitting = done as f64 * (budget.as_secs_f64() / 64.0) / took.as_secs_f64();
        chunk = (fitting as u64).clamp(1, chunk * 2);
    }
}

/// The mean of the middle half of some times; it sorts them. A mean, since a virtual machine's counter may
/// have steps of 10 ns; of the middle half, since some of what was timed was interrupted.
fn middle(values: &mut [u64]) -> f64 {
    values.sort_unstable();
    let quarter = values.len() / 4;
    let half = &values[quarter..values.len() - quarter];
    half.iter().sum::<u64>() as f64 / half.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_agrees_with_that_of_the_system() {
        // A busy machine may disturb any of the readings, but not all of a hundred.
        let agrees = |_| {
            let clock = Clock::calibrate();
            let (begun, first) = clock.both();
            std::thread::sleep(Duration::from_millis(20));
            let (ended, last) = clock.both();
            let ours = clock.ns(last.wrapping_sub(first));
            let its = (ended - begun).as_nanos() as f64;
            println!("{ours} for {its}, {clock:?}");
            let cheap = clock.cost_ns > 0.0 && clock.cost_ns < 10_000.0;
            cheap && (ours / its - 1.0).abs() < 0.1
        };
        assert!((0..100).any(agrees));
    }
    #[test]
    fn what_was_interrupted_does_not_count() {
        assert_eq!(middle(&mut [1_000_000, 10, 12, 2]), 11.0);
        assert_eq!(middle(&mut [10]), 10.0);
        assert_eq!(middle(&mut [10, 13]), 11.5);
    }
}
