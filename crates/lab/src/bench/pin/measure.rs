//! Times one way to pin.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::set::{PAGE, Set};
use crate::{
    bench::{clock::Clock, rounds::Sample},
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

    /// Pins and unpins a list again and again for about the budget, at least once: what a list took,
    /// ns.
    ///
    /// The figure is the mean of the middle half of the calls: a mean, since a virtual machine's counter
    /// may have steps of 10 ns; of the middle half, since some calls are interrupted.
    /// Times of single calls are kept from slice to slice: memory that is new is slow.
    fn time(
        &mut self,
        set: &Set,
        (clock, budget): (&Clock, Duration),
        [pin, unpin]: &mut [Vec<u64>; 2],
    ) -> Result<Sample> {
        pin.clear();
        unpin.clear();
        let (budget, start) = (budget.as_nanos() as f64, clock.now());
        loop {
            let begun = clock.now();
            self.pin(set)?;
            let pinned = clock.now();
            self.unpin(set)?;
            let unpinned = clock.now();
            pin.push(pinned.wrapping_sub(begun));
            unpin.push(unpinned.wrapping_sub(pinned));
            if clock.ns(unpinned.wrapping_sub(start)) >= budget {
                break;
            }
        }
        let lists = pin.len() as f64;
        let (pin, unpin) = (clock.middle(pin), clock.middle(unpin));
        Ok(vec![("pin", pin), ("unpin", unpin), ("both", pin + unpin), ("lists", lists)])
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

/// How much of this process is pinned, as the kernel counts it.
fn pinned_bytes() -> Result<u64> {
    let kib = memory::number("/proc/self/status", "VmPin");
    kib.map(|kib| kib << 10).context("/proc/self/status has no VmPin")
}
