//! The syncs of a batch, and the ranges they are for.

use std::collections::VecDeque;

use ringfence_iommu::{Pending, Range};

/// A sync that was begun for some members of a batch.
pub(super) struct Flight {
    pub(super) sync: Pending,
    /// How many of the members it covers were not handed out yet.
    pub(super) members: usize,
    /// Whether the outcome of each of them is recorded.
    pub(super) settled: bool,
    /// Whether settling it is timed, as its beginning was.
    pub(super) timed: bool,
}

/// Syncs under way, oldest first, and lists of ranges to use again.
#[derive(Default)]
pub(super) struct Flights {
    pub(super) queue: VecDeque<Flight>,
    spare: Vec<Vec<Range>>,
}

impl Flights {
    /// An empty list for the ranges of the next flight.
    pub(super) fn ranges(&mut self) -> Vec<Range> {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a list back.
    pub(super) fn reuse(&mut self, mut ranges: Vec<Range>) {
        ranges.clear();
        self.spare.push(ranges);
    }

    /// Takes out the oldest, once all of it was handed out.
    pub(super) fn land(&mut self) {
        if let Some(flight) = self.queue.pop_front() {
            self.reuse(flight.sync.into_ranges());
        }
    }

    /// Calls `wait` on the oldest, unless it is over.
    pub(super) fn wait(&mut self, wait: impl FnOnce(&mut Pending)) {
        if let Some(flight) = self.queue.front_mut()
            && !flight.sync.is_over()
        {
            wait(&mut flight.sync);
        }
    }
}

/// Sorts ranges and joins those that touch. All ranges of a batch are whole mappings, so that their
/// union contains nothing of others.
pub(super) fn join(ranges: &mut Vec<Range>) {
    // Ranges that were mapped together are usually in order already.
    if !ranges.is_sorted_by_key(|range| range.first()) {
        ranges.sort_unstable_by_key(|range| range.first());
    }
    ranges.dedup_by(|next, held| {
        let touches = held.last().0.checked_add(1) == Some(next.first().0);
        if touches {
            *held = held.hull(*next);
        }
        touches
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;
    use ringfence_iommu::Iova;

    use super::*;

    proptest! {
        #[test]
        fn joined_ranges_hold_the_same_addresses_and_do_not_touch(
            // Taken granules, each a range of its own, in any order.
            granules in proptest::collection::btree_set(0..40u64, 0..30),
            seed in any::<u64>(),
            at_the_end in any::<bool>(),
        ) {
            let base = if at_the_end { u64::MAX - 40 * 0x1000 + 1 } else { 0 };
            let range = |n: u64| {
                let first = base + n * 0x1000;
                Range::new(Iova(first), Iova(first + 0xfff)).unwrap()
            };
            let mut ranges: Vec<Range> = granules.iter().map(|&n| range(n)).collect();
            ranges.sort_by_key(|range| range.first().0.wrapping_mul(seed | 1));
            join(&mut ranges);
            let held = |n: &u64| ranges.iter().filter(|joined| joined.covers(range(*n))).count();
            prop_assert!(granules.iter().all(|n| held(n) == 1));
            let sum: u128 = ranges.iter().map(|range| range.len()).sum();
            prop_assert_eq!(sum, granules.len() as u128 * 0x1000);
            prop_assert!(ranges.windows(2).all(|two| two[0].last().0 + 1 < two[1].first().0));
        }
    }
}
