//! An account of what is live according to the caller, kept apart from every allocator.

use super::peers::align;
use crate::ranges::Ranges;

/// The granules that are free.
///
/// It shows two things that an allocator does not: whether what it hands out was free, and, when it
/// hands out nothing, whether there was a hole. (The peer `btreemap` is of such ranges too: whether they
/// are right is tested by themselves.)
pub(super) struct Oracle {
    free: Ranges,
    /// The last granule of the aperture; the first is 1.
    last: u64,
}

/// A rule that an allocator broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("handed out {granules} granules at {first:#x}, of which {taken:#x} was taken already")]
    Overlap { first: u64, granules: u64, taken: u64 },
    #[error("handed out {granules} granules at {first:#x}, which is not within 0x1 to {last:#x}")]
    Outside { first: u64, granules: u64, last: u64 },
    #[error("handed out {granules} granules at {first:#x}, which is not aligned to their size")]
    Misaligned { first: u64, granules: u64 },
    #[error("refused to take back {granules} granules at {first:#x}, which it had handed out")]
    Refused { first: u64, granules: u64 },
}

impl Oracle {
    /// Granules 1 to `last`, all of them free. Granule 0 is never allocated (rule L2).
    pub(super) fn new(last: u64) -> Oracle {
        Oracle { free: Ranges([(1, last)].into()), last }
    }

    /// Notes a range that was handed out.
    pub(super) fn take(&mut self, first: u64, granules: u64) -> Result<(), Violation> {
        let end = first.checked_add(granules - 1).filter(|end| first > 0 && *end <= self.last);
        let Some(end) = end else {
            return Err(Violation::Outside { first, granules, last: self.last });
        };
        if !first.is_multiple_of(align(granules)) {
            return Err(Violation::Misaligned { first, granules });
        }
        if self.free.remove(first, end) {
            return Ok(());
        }
        let below = self.free.0.range(..=first).next_back();
        let taken = below.map_or(first, |(_, last)| first.max(last + 1));
        Err(Violation::Overlap { first, granules, taken })
    }

    /// Notes that a range was given back.
    pub(super) fn give(&mut self, first: u64, granules: u64) {
        self.free.insert(first, first + (granules - 1));
    }

    /// Whether there is a place for so many granules, aligned to their size.
    pub(super) fn has_hole(&self, granules: u64) -> bool {
        self.free.0.iter().any(|(first, last)| {
            let place = first.next_multiple_of(align(granules));
            place + (granules - 1) <= *last
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::pattern::LARGEST, *};

    #[test]
    fn what_no_allocator_may_do_is_found() {
        let mut oracle = Oracle::new(255);
        assert_eq!(oracle.take(16, 16), Ok(()));
        let overlap = Err(Violation::Overlap { first: 24, granules: 8, taken: 24 });
        assert_eq!(oracle.take(24, 8), overlap);
        for (first, granules) in [(0, 1), (256, 1), (u64::MAX, 2), (192, 65)] {
            let outside = Violation::Outside { first, granules, last: 255 };
            assert_eq!(oracle.take(first, granules), Err(outside));
        }
        let misaligned = Violation::Misaligned { first: 34, granules: 3 };
        assert_eq!(oracle.take(34, 3), Err(misaligned));
        oracle.give(16, 16);
        assert_eq!(oracle.take(24, 8), Ok(()));
    }

    #[test]
    fn granule_0_and_what_lies_beyond_are_no_holes() {
        let mut oracle = Oracle::new(31);
        assert!(oracle.has_hole(16));
        assert!(!oracle.has_hole(32));
        assert_eq!(oracle.take(16, 16), Ok(()));
        assert!(!oracle.has_hole(9) && oracle.has_hole(8));
    }

    #[test]
    fn what_was_never_touched_is_a_hole_of_any_size() {
        let mut oracle = Oracle::new((1 << 45) - 1);
        oracle.take(1, 1).unwrap();
        assert!(oracle.has_hole(LARGEST));
    }

    proptest! {
        #[test]
        fn a_hole_is_one_that_a_search_granule_by_granule_finds(
            ranges in prop::collection::vec((0u64..3 * LARGEST, 0u32..8, 0u64..8), 1..60),
            granules in 1u64..600,
        ) {
            let last = 2 * LARGEST + 1234;
            let mut oracle = Oracle::new(last);
            let mut taken = vec![false; last as usize + 1];
            taken[0] = true;
            for (first, order, less) in ranges {
                let granules = (1u64 << order).saturating_sub(less).max(1);
                let first = first & !(align(granules) - 1);
                let end = first + granules;
                let free = first > 0 && end <= last + 1
                    && !taken[first as usize..end as usize].contains(&true);
                prop_assert_eq!(oracle.take(first, granules).is_ok(), free);
                if free {
                    taken[first as usize..end as usize].fill(true);
                }
            }
            let place = (0..=last).step_by(align(granules) as usize).find(|first| {
                first + granules <= last + 1
                    && !taken[*first as usize..(first + granules) as usize].contains(&true)
            });
            prop_assert_eq!(oracle.has_hole(granules), place.is_some());
        }
    }
}
