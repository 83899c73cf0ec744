//! The number of the CPU as a trait.

use core::{
    ops::Deref,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The number of the CPU that the caller runs on, to choose among per-CPU structures.
///
/// The number is a hint: the thread may move at any moment, so a structure chosen by it still needs
/// its own lock or atomics.
pub trait CpuId: Send + Sync {
    /// The CPU the caller runs on: always below [`count`](Self::count).
    fn current(&self) -> usize;
    /// How many CPUs there are: at least 1, and always the same.
    fn count(&self) -> usize;
}

impl<P: Deref<Target: CpuId> + Send + Sync> CpuId for P {
    fn current(&self) -> usize {
        (**self).current()
    }
    fn count(&self) -> usize {
        (**self).count()
    }
}

/// A machine of one CPU: everything shares one structure.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneCpu;

impl CpuId for OneCpu {
    fn current(&self) -> usize {
        0
    }
    fn count(&self) -> usize {
        1
    }
}

/// A machine on which every caller runs on the CPU that was last [`set`](Self::set): for tests.
#[derive(Debug)]
pub struct FixedCpu {
    current: AtomicUsize,
    count: usize,
}

impl FixedCpu {
    /// A machine of `count` CPUs (at least one), on the first of which every caller runs.
    pub const fn new(count: usize) -> FixedCpu {
        FixedCpu { current: AtomicUsize::new(0), count: if count == 0 { 1 } else { count } }
    }

    /// Moves every caller to `cpu`, modulo the number of CPUs.
    pub fn set(&self, cpu: usize) {
        self.current.store(cpu % self.count, Ordering::Relaxed);
    }
}

impl CpuId for FixedCpu {
    fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }
    fn count(&self) -> usize {
        self.count
    }
}

/// The CPUs of this machine, as the operating system numbers them.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
pub struct OsCpu {
    count: usize,
}

#[cfg(feature = "std")]
impl OsCpu {
    /// Reads from the operating system how many CPUs there can be.
    pub fn new() -> OsCpu {
        // The highest number a CPU may ever have, not how many this process may use: a process
        // bound to CPUs 6 and 7 runs on numbers 6 and 7.
        let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible")
            .ok()
            .and_then(|list| count_of_list(&list));
        let count = possible
            .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
            .unwrap_or(1);
        OsCpu { count }
    }
}

#[cfg(feature = "std")]
impl Default for OsCpu {
    fn default() -> Self {
        OsCpu::new()
    }
}

#[cfg(feature = "std")]
impl CpuId for OsCpu {
    #[inline]
    fn current(&self) -> usize {
        let cpu = rustix::thread::sched_getcpu();
        // A number out of range (if the list above is wrong) must still yield a valid one. The
        // branch avoids a division, which would cost more than the rest of this function.
        if cpu < self.count { cpu } else { cpu % self.count }
    }
    fn count(&self) -> usize {
        self.count
    }
}

/// One more than the highest number in a list such as `0-3,8-11`.
#[cfg(feature = "std")]
fn count_of_list(list: &str) -> Option<usize> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_cpu_stays_below_its_count() {
        let cpus = FixedCpu::new(4);
        assert_eq!((cpus.current(), cpus.count()), (0, 4));
        cpus.set(3);
        assert_eq!(cpus.current(), 3);
        cpus.set(6);
        assert_eq!(cpus.current(), 2);
        assert_eq!(FixedCpu::new(0).count(), 1);
        assert_eq!((OneCpu.current(), OneCpu.count()), (0, 1));
    }

    #[cfg(feature = "std")]
    #[test]
    fn the_highest_cpu_of_a_list_gives_the_count() {
        assert_eq!(count_of_list("0-3\n"), Some(4));
        assert_eq!(count_of_list("0"), Some(1));
        assert_eq!(count_of_list("0-3,8-11"), Some(12));
        assert_eq!(count_of_list(""), None);
        assert_eq!(count_of_list("0-"), None);
    }

    #[cfg(feature = "std")]
    #[test]
    fn this_thread_runs_on_one_of_the_cpus() {
        let cpus = OsCpu::new();
        assert!(cpus.current() < cpus.count());
    }
}
