//! Times one way to pin.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::set::{PAGE, Set};
use crate::{
    bench::clock::{Clock, middle},
    memory,
};

/// A way to pin the pages of a set, and to unpin them.
///
/// To be inlined into the timing loop: if the processor loses its return predictions during a
/// system call, a function that returns after it makes the call half as expensive again.
pub(super) trait Subject {
    /// Pins all of them.
    fn pin(&mut self, set: &Set) -> Result<()>;
    /// Unpins all of them.
    fn unpin(&mut self, set: &Set) -> Result<()>;

    /// Pins and unpins a list again and again for about the budget, at least once.
    ///
    /// The figure is the mean of the middle half of the calls: a mean, since a virtual machine's counter
    /// may have steps of 10 ns; of the middle half, since some calls are interrupted.
    fn time(&mut self, set: &Set, how: How<'_>, times: &mut Times) -> Result<Sample> {
        let How { clock, budget } = how;
        times.pin.clear();
        times.unpin.clear();
        let (budget, start) = (budget.as_nanos() as f64, clock.now());
        loop {
            let begun = clock.now();
            self.pin(set)?;
            let pinned = clock.now();
            self.unpin(set)?;
            let unpinned = clock.now();
            times.pin.push(pinned.wrapping_sub(begun));
            times.unpin.push(unpinned.wrapping_sub(pinned));
            if clock.ns(unpinned.wrapping_sub(start)) >= budget {
                break;
            }
        }
        let ns = |ticks: &mut [u64]| (clock.ns(1) * middle(ticks) - clock.cost_ns()).max(0.0);
        let lists = times.pin.len() as u64;
        Ok(Sample { pin: ns(&mut times.pin), unpin: ns(&mut times.unpin), lists })
    }

    /// Pins the list once, and checks with the kernel that it is pinned and, after that, unpinned.
    /// `new`: pages that were not pinned before.
    ///
    /// # Errors
    /// It cannot be pinned, or the kernel's count differs.
    fn check(&mut self, set: &Set, new: usize) -> Result<()> {
        let before = pinned_bytes()?;
        self.pin(set)?;
        let with = pinned_bytes()?;
        self.unpin(set)?;
        let after = pinned_bytes()?;
        // Of a huge page the kernel counts all pages, once.
        ensure!(
            with >= before + (new * PAGE) as u64,
            "of {new} pages not all are pinned: the kernel has {with} bytes, and had {before}"
        );
        ensure!(
            after == before,
            "the kernel has {after} bytes pinned afterwards, and had {before}"
        );
        Ok(())
    }
}

/// What a list took, ns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) pin: f64,
    pub(super) unpin: f64,
    pub(super) lists: u64,
}

/// Times of single calls, kept from slice to slice: memory that is new is slow.
#[derive(Default)]
pub(super) struct Times {
    pin: Vec<u64>,
    unpin: Vec<u64>,
}

/// With which clock, and for about how long.
#[derive(Clone, Copy)]
pub(super) struct How<'a> {
    pub(super) clock: &'a Clock,
    pub(super) budget: Duration,
}

/// How much of this process is pinned, as the kernel counts it.
fn pinned_bytes() -> Result<u64> {
    let kib = memory::number("/proc/self/status", "VmPin");
    kib.map(|kib| kib << 10).context("/proc/self/status has no VmPin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_interrupted_does_not_count() {
        assert_eq!(middle(&mut [1_000_000, 10, 12, 2]), 11.0);
        assert_eq!(middle(&mut [10]), 10.0);
        assert_eq!(middle(&mut [10, 13]), 11.5);
    }
}
