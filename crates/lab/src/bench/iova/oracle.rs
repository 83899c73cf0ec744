//! An account of what is live according to the caller, kept apart from every allocator.

use std::collections::BTreeMap;

use super::{pattern::LARGEST, peers::align};

/// One bit a granule, in pages that exist once something in them was taken.
///
/// It shows two things that an allocator does not: whether what it hands out was free, and, when it
/// hands out nothing, whether there was a hole.
pub(super) struct Oracle {
    /// By their number. All but the first hold [`LARGEST`] granules.
    pages: BTreeMap<u64, Box<Page>>,
    /// The last granule of the aperture; the first is 1.
    last: u64,
}

type Page = [u64; WORDS];
const WORDS: usize = (LARGEST / 64) as usize;

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
    /// Granules 1 to `last`, all of them free.
    pub(super) fn new(last: u64) -> Oracle {
        let mut oracle = Oracle { pages: BTreeMap::new(), last };
        // Granule 0 is never allocated (rule L2), nor is the part of the last page beyond `last`.
        oracle.set(0, 1);
        let beyond = last + 1;
        let rest = beyond.next_multiple_of(LARGEST) - beyond;
        if rest > 0 {
            oracle.set(beyond, rest);
        }
        oracle
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
        match self.first_taken(first, end + 1) {
            Some(taken) => Err(Violation::Overlap { first, granules, taken }),
            None => {
                self.set(first, granules);
                Ok(())
            }
        }
    }

    /// Notes that a range was given back.
    pub(super) fn give(&mut self, first: u64, granules: u64) {
        self.each_word(first, granules, |word, mask| *word &= !mask);
    }

    /// Whether there is a place for so many granules (up to [`LARGEST`]), aligned to their size.
    pub(super) fn has_hole(&self, granules: u64) -> bool {
        // A page that does not exist is free, all of it.
        let pages = (self.last / LARGEST) + 1;
        (self.pages.len() as u64) < pages || self.pages.values().any(|page| fits(page, granules))
    }

    /// The first granule from `at` up to `end` (not included) that is taken.
    fn first_taken(&self, mut at: u64, end: u64) -> Option<u64> {
        while at < end {
            let (bits, mask) = word(at, end);
            let page = self.pages.get(&(at / LARGEST));
            let taken = page.map_or(0, |page| page[index(at)] & mask);
            if taken != 0 {
                return Some(at - at % 64 + u64::from(taken.trailing_zeros()));
            }
            at += bits;
        }
        None
    }

    fn set(&mut self, first: u64, granules: u64) {
        self.each_word(first, granules, |word, mask| *word |= mask);
    }

    fn each_word(&mut self, first: u64, granules: u64, f: impl Fn(&mut u64, u64)) {
        let (mut at, end) = (first, first + granules);
        while at < end {
            let page = self.pages.entry(at / LARGEST).or_insert_with(|| Box::new([0; WORDS]));
            let (bits, mask) = word(at, end);
            f(&mut page[index(at)], mask);
            at += bits;
        }
    }
}

/// How many granules from `at` up to `end` lie in the same word as `at`, and their bits there.
fn word(at: u64, end: u64) -> (u64, u64) {
    let bits = (64 - at % 64).min(end - at);
    (bits, (u64::MAX >> (64 - bits)) << (at % 64))
}

/// The word of a page that holds a granule.
fn index(granule: u64) -> usize {
    (granule % LARGEST / 64) as usize
}

/// Whether a page holds `granules` free ones at a multiple of their size.
fn fits(page: &Page, granules: u64) -> bool {
    let step = align(granules);
    if step <= 64 {
        // Within a word: bit `n` stays if those from `n` on are free, so many of them.
        let starts = (0..64).step_by(step as usize).fold(0, |bits, at| bits | 1u64 << at);
        return page.iter().any(|word| {
            let mut free = !word;
            let mut have = 1;
            while have < granules {
                let more = have.min(granules - have);
                free &= free >> more;
                have += more;
            }
            free & starts != 0
        });
    }
    page.chunks((step / 64) as usize).any(|words| {
        let (whole, rest) = words.split_at((granules / 64) as usize);
        let free = |mask: u64| move |word: &u64| word & mask == 0;
        let mask = (1u64 << (granules % 64)) - 1;
        whole.iter().all(free(u64::MAX)) && rest.first().is_none_or(free(mask))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
    fn an_untouched_page_is_a_hole_of_any_size() {
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
