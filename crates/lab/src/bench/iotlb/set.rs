//! The entries that are looked up, and the memory they lead to.

use std::sync::Arc;

use anyhow::{Context, Result};
use ringfence_mem::{Memory, Region};

use super::params::{Entries, Merge, Page};
use crate::memory;

/// The I/O virtual address of the first entry.
pub(super) const BASE: u64 = 1 << 40;

/// The most memory that entries lead to; it is never touched, and so takes none.
const MOST: u64 = 128 << 30;

/// So many entries of a size, side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set {
    pub(super) entries: u64,
    pub(super) page: u64,
    pub(super) merge: Merge,
}

impl Set {
    pub(super) fn new(Entries(entries): Entries, page: Page, merge: Merge) -> Set {
        Set { entries, page: page.bytes(), merge }
    }

    /// Why this set is impossible.
    pub(super) fn impossible(&self) -> Option<String> {
        let bytes = self.entries.checked_mul(self.page);
        let large = self.merge == Merge::Mergeable && bytes.is_none_or(|bytes| bytes > MOST);
        large.then(|| "they would lead to more than 128 GiB".to_owned())
    }

    /// How many places of its size the memory has.
    fn places(&self) -> u64 {
        match self.merge {
            Merge::Mergeable => self.entries,
            // At least so many that steps of 27 never lead to the neighbour.
            Merge::Unmergeable => (self.entries.max(64).next_power_of_two()).min(MOST / self.page),
        }
    }

    /// Memory for all of it, of which no page is present until it is touched.
    pub(super) fn memory(&self) -> Result<Arc<Memory>> {
        let size = self.places() * self.page;
        let file = memory::file("bench", size)?;
        let region = Region { gpa: 0, size, user_addr: 0, mmap_offset: 0 };
        Memory::map(vec![(region, file)]).context("mapping memory")
    }

    /// The first address of an entry.
    #[inline]
    pub(super) fn iova(&self, entry: u64) -> u64 {
        BASE + entry * self.page
    }

    /// An entry's target.
    #[inline]
    pub(super) fn target(&self, entry: u64) -> u64 {
        match self.merge {
            Merge::Mergeable => entry * self.page,
            Merge::Unmergeable => entry * 27 % self.places() * self.page,
        }
    }
}

/// Random numbers that cost a nanosecond.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// One below `end`.
    #[inline]
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 32) * end) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_lead_on_from_each_other_or_never_do() {
        for entries in [1, 4, 64, 512, 2 << 10, 64 << 10].map(Entries) {
            for page in Page::ALL {
                for merge in Merge::ALL {
                    let set = Set::new(entries, page, merge);
                    if set.impossible().is_some() {
                        continue;
                    }
                    for n in 1..entries.0 {
                        let on = set.target(n) == set.target(n - 1) + set.page;
                        assert_eq!(on, merge == Merge::Mergeable, "{set:?} {n}");
                        assert!(set.target(n) + set.page <= set.places() * set.page);
                    }
                }
            }
        }
    }
}
