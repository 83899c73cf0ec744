//! Many mappings, one sync.
//!
//! A sync sends the device a request and waits for its completion, which takes longer than
//! everything else in a mapping. Buffers that are submitted together can share one, and so can
//! those that complete together: the guarantee is the same, since no buffer goes back to its owner
//! before the sync that covers it is over.
//!
//! [`MapBatch`] and [`UnmapBatch`] are queues for one thread. `push` gathers;
//! [`begin`](UnmapBatch::begin) starts one sync for all of it, without waiting; `poll` hands out
//! what has been synced, in order. So a driver of a ring never holds back a completion to make a
//! batch larger: it begins a batch with whatever has completed, does other work, and polls later.
//!
//! Ranges that touch are unmapped as one: allocators that place ranges side by side
//! ([`ringfence_iova::Ring`] always, [`ringfence_iova::Slabs`] mostly) turn many unmaps into one
//! request.
//!
//! Which policies share syncs: [`Policy::batches_maps`](crate::Policy::batches_maps) and
//! [`Policy::batches_unmaps`](crate::Policy::batches_unmaps). Under the others the batches work one
//! mapping at a time, so that a driver needs no second code path.

mod map;
mod unmap;

use std::collections::VecDeque;

use ringfence_iommu::{Pending, Range};

pub use map::MapBatch;
pub use unmap::UnmapBatch;

/// A sync that was begun for some members of a batch.
struct Flight {
    sync: Pending,
    /// How many of the members it covers were not handed out yet.
    members: usize,
    /// Whether the outcome of each of them is recorded.
    settled: bool,
    /// Whether settling it is timed, as its beginning was.
    timed: bool,
}

/// Syncs under way, oldest first, and lists of ranges to use again.
#[derive(Default)]
struct Flights {
    queue: VecDeque<Flight>,
    spare: Vec<Vec<Range>>,
}

impl Flights {
    /// An empty list for the ranges of the next flight.
    fn ranges(&mut self) -> Vec<Range> {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes a list back.
    fn reuse(&mut self, mut ranges: Vec<Range>) {
        ranges.clear();
        self.spare.push(ranges);
    }

    /// One more member of the latest.
    fn board(&mut self) {
        if let Some(flight) = self.queue.back_mut() {
            flight.members += 1;
        }
    }

    /// Takes out the oldest, once all of it was handed out.
    fn land(&mut self) {
        if let Some(flight) = self.queue.pop_front() {
            self.reuse(flight.sync.into_ranges());
        }
    }

    /// Calls `wait` on the oldest, unless it is over.
    fn wait(&mut self, wait: impl FnOnce(&mut Pending)) {
        if let Some(flight) = self.queue.front_mut()
            && !flight.sync.is_over()
        {
            wait(&mut flight.sync);
        }
    }
}

/// Sorts ranges and joins those that touch. All ranges of a batch are whole mappings, so that their
/// union contains nothing of others.
fn join(ranges: &mut Vec<Range>) {
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
