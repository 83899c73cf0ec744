//! The small cache in front of the table.

use std::{cell::Cell, ptr::NonNull};

use ringfence_iommu::{Iova, Prot, Range};

/// How many entries there are. 256 entries of 32 bytes fit the first-level data cache beside the
/// data.
const ENTRIES: usize = 256;
const PAGE_SHIFT: u32 = 12;
/// No entry leaves an aligned block of this size, so that what an invalidation may have to drop is
/// found from its addresses.
const BLOCK: u64 = 16 << PAGE_SHIFT;

/// Addresses that translate to one piece of this process's memory.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    /// The first address.
    pub(crate) first: u64,
    /// The number of bytes less one.
    pub(crate) extent: u64,
    /// Where the first address leads.
    pub(crate) host: NonNull<u8>,
    /// What is allowed. Nothing, for an entry that is not in use.
    pub(crate) prot: Prot,
}

impl Entry {
    const EMPTY: Entry =
        Entry { first: 0, extent: 0, host: NonNull::dangling(), prot: Prot::empty() };

    #[inline]
    pub(crate) fn covers(&self, addr: u64, wanted: Prot) -> bool {
        addr.wrapping_sub(self.first) <= self.extent && self.prot.contains(wanted)
    }

    fn overlaps(&self, range: Range) -> bool {
        let last = self.first.saturating_add(self.extent);
        self.first <= range.last().0 && range.first().0 <= last
    }
}

/// A direct-mapped cache of [`Entry`]s, indexed by page: each page of a large mapping gets an
/// entry where it is touched.
pub(crate) struct Cache {
    entries: Box<[Cell<Entry>; ENTRIES]>,
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache { entries: Box::new(std::array::from_fn(|_| Cell::new(Entry::EMPTY))) }
    }

    /// The aligned block that `addr` lies in: entries must not leave it.
    pub(crate) fn block(addr: u64) -> Range {
        let first = addr & !(BLOCK - 1);
        Range::new(Iova(first), Iova(first | (BLOCK - 1))).expect("ordered")
    }

    #[inline]
    fn slot(&self, addr: u64) -> &Cell<Entry> {
        &self.entries[(addr >> PAGE_SHIFT) as usize % ENTRIES]
    }

    /// The entry that may cover `addr`.
    #[inline]
    pub(crate) fn get(&self, addr: u64) -> Entry {
        self.slot(addr).get()
    }

    /// Keeps `entry` for the page of `addr`.
    pub(crate) fn put(&self, addr: u64, entry: Entry) {
        debug_assert_eq!(Self::block(entry.first), Self::block(entry.first + entry.extent));
        self.slot(addr).set(entry);
    }

    /// Drops every entry that overlaps `range`.
    pub(crate) fn invalidate(&self, range: Range) {
        // All pages of an entry lie in its block, so that the slots of the blocks that the range
        // touches are the only ones that can hold an entry of it.
        let first = Self::block(range.first().0).first().0 >> PAGE_SHIFT;
        let last = Self::block(range.last().0).last().0 >> PAGE_SHIFT;
        if last - first >= ENTRIES as u64 {
            return self.entries.iter().for_each(|slot| Self::drop_if(slot, range));
        }
        for page in first..=last {
            Self::drop_if(&self.entries[page as usize % ENTRIES], range);
        }
    }

    fn drop_if(slot: &Cell<Entry>, range: Range) {
        if slot.get().overlaps(range) {
            slot.set(Entry::EMPTY);
        }
    }

    /// Drops everything.
    pub(crate) fn clear(&self) {
        self.entries.iter().for_each(|slot| slot.set(Entry::EMPTY));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(first: u64, extent: u64) -> Entry {
        Entry { first, extent, host: NonNull::dangling(), prot: Prot::RW }
    }

    #[test]
    fn the_top_of_the_address_space_is_cached_and_dropped_like_any_other() {
        let cache = Cache::new();
        cache.put(u64::MAX, entry(u64::MAX - 0xfff, 0xfff));
        assert!(cache.get(u64::MAX).covers(u64::MAX, Prot::READ));
        cache.invalidate(Range::new(Iova(u64::MAX), Iova(u64::MAX)).unwrap());
        assert!(!cache.get(u64::MAX).covers(u64::MAX, Prot::READ));
    }

    #[test]
    fn an_empty_cache_covers_nothing_not_even_address_zero() {
        assert!(!Cache::new().get(0).covers(0, Prot::READ));
    }

    proptest! {
        #[test]
        fn no_entry_of_an_invalidated_range_survives(
            puts in proptest::collection::vec((0u64..1 << 24, 0u64..BLOCK), 1..200),
            first in 0u64..1 << 24,
            extent in 0u64..1 << 22,
        ) {
            let cache = Cache::new();
            for &(addr, reach) in &puts {
                let block = Cache::block(addr);
                let first = addr.saturating_sub(reach).max(block.first().0);
                let last = (addr + reach).min(block.last().0);
                cache.put(addr, entry(first, last - first));
            }
            let range = Range::new(Iova(first), Iova(first + extent)).unwrap();
            cache.invalidate(range);
            for (addr, _) in puts {
                let held = cache.get(addr);
                prop_assert!(held.prot.is_empty() || !held.overlaps(range));
            }
        }
    }
}
