//! The model of the hardware's caches: a set-associative IOTLB, and page-walk caches for what it
//! misses.
//!
//! * The **IOTLB** has sets of a few ways, the least recently used entry of a set goes first. One
//!   entry is one page: 4 KiB, 2 MiB or 1 GiB, as the table maps it. The set is chosen by the
//!   lowest bits of the page's number, so pages that are as far apart as all sets together cover
//!   use the same set: they *alias*. A shadow of the same size with a single set shows which misses
//!   come of that alone.
//! * The **walk caches** hold pointers to table pages: L3 those of the tables for 2 MiB, L2 for 1
//!   GiB, L1 for 512 GiB; the root is always cached. A walk starts from the lowest pointer that is
//!   cached and reads one entry from memory for each level below it. That gives the M of Fast &
//!   Safe (SOSP 2024): IOTLB misses and walk-cache misses together are the reads a device waits
//!   for.
//! * An **invalidation** takes a page's entry from the IOTLB. The walk caches keep what they have:
//!   while a table page is not freed, nothing else is needed (rule L41 keeps it).
//!
//! What is not in it: prefetching, several devices behind one IOMMU, caches in the device, and the
//! time that a read takes. Vendors do not publish how an IOTLB is built; the shape is a parameter.

/// The size of a page, of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageSize {
    /// 4 KiB, an entry of a table for 2 MiB.
    Kib4,
    /// 2 MiB.
    Mib2,
    /// 1 GiB.
    Gib1,
}

impl PageSize {
    /// From the largest to the smallest.
    pub const ALL: [PageSize; 3] = [PageSize::Gib1, PageSize::Mib2, PageSize::Kib4];

    /// The number of address bits within it.
    pub const fn shift(self) -> u32 {
        12 + 9 * self as u32
    }

    /// In bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// The page in which the byte `offset` of a mapping of `bytes` at `iova` lies: the largest that
    /// is aligned and within. The memory behind it is taken to be contiguous and aligned to any
    /// page, so that the IOVA alone decides.
    pub fn of(iova: u64, bytes: u64, offset: u64) -> PageSize {
        let fits = |size: &PageSize| {
            let start = offset & !(size.bytes() - 1);
            (iova.wrapping_add(start)).is_multiple_of(size.bytes())
                && bytes.saturating_sub(start) >= size.bytes()
        };
        PageSize::ALL.into_iter().find(fits).unwrap_or(PageSize::Kib4)
    }
}

/// The pages that a mapping of `bytes` at `iova` takes: the first address and the size of each.
pub fn pages(iova: u64, bytes: u64) -> impl Iterator<Item = (u64, PageSize)> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        if offset >= bytes {
            return None;
        }
        let (at, size) = (iova + offset, PageSize::of(iova, bytes, offset));
        offset += size.bytes();
        Some((at, size))
    })
}

/// The table pages that a page of the given size at `iova` needs, the root left out: the level (1 to
/// 3) and the number of each.
pub fn tables(iova: u64, size: PageSize) -> impl Iterator<Item = (usize, u64)> {
    (1..=lowest_level(size)).map(move |level| (level, region(iova, level)))
}

/// The level of the table that has the page's entry.
fn lowest_level(size: PageSize) -> usize {
    3 - size as usize
}

/// Which table of a level translates `iova`: those of L1 are for 512 GiB, of L3 for 2 MiB.
fn region(iova: u64, level: usize) -> u64 {
    iova >> (48 - 9 * level)
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Accesses of the device.
    pub accesses: u64,
    /// Accesses that missed in the IOTLB.
    pub iotlb_misses: u64,
    /// Misses that would have hit in a fully associative IOTLB of the same size.
    pub conflict_misses: u64,
    /// Look-ups in the walk caches L1, L2 and L3 that found nothing.
    pub walk_misses: [u64; 3],
}

/// The caches.
#[derive(Clone, Debug)]
pub struct Caches {
    iotlb: Cache,
    /// The same number of entries in one set.
    shadow: Cache,
    /// L1, L2, L3.
    walk: [Cache; 3],
    counts: Counts,
}

impl Caches {
    /// Empty ones: `sets` sets of `ways`, and so many entries in the walk caches L1, L2 and L3.
    pub fn new(sets: usize, ways: usize, walk: [usize; 3]) -> Caches {
        Caches {
            iotlb: Cache::new(sets, ways),
            shadow: Cache::new(1, sets * ways),
            walk: walk.map(|entries| Cache::new(1, entries)),
            counts: Counts::default(),
        }
    }

    /// The device touches `iova`, which lies in a page of `size`.
    pub fn access(&mut self, iova: u64, size: PageSize) {
        let (number, tag) = entry(iova, size);
        let hit = self.iotlb.touch(number, tag);
        let shadow_hit = self.shadow.touch(number, tag);
        self.counts.accesses += 1;
        if hit {
            return;
        }
        self.counts.iotlb_misses += 1;
        self.counts.conflict_misses += u64::from(shadow_hit);
        for level in (1..=lowest_level(size)).rev() {
            let table = region(iova, level);
            if self.walk[level - 1].touch(table, table) {
                break;
            }
            self.counts.walk_misses[level - 1] += 1;
        }
    }

    /// The IOTLB forgets the page of `size` that `iova` lies in.
    pub fn invalidate(&mut self, iova: u64, size: PageSize) {
        let (number, tag) = entry(iova, size);
        self.iotlb.remove(number, tag);
        self.shadow.remove(number, tag);
    }

    /// What was counted since [`restart`](Self::restart).
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Counts on from `counts`; the caches keep what they hold.
    pub fn restart(&mut self, counts: Counts) {
        self.counts = counts;
    }
}

/// The number of a page, and a tag that distinguishes its entry from those of other sizes.
fn entry(iova: u64, size: PageSize) -> (u64, u64) {
    let number = iova >> size.shift();
    (number, number << 2 | size as u64)
}

/// Sets of entries, each with the most recently used first.
#[derive(Clone, Debug)]
struct Cache {
    sets: Vec<Vec<u64>>,
    ways: usize,
}

impl Cache {
    /// The number of sets is a power of two.
    fn new(sets: usize, ways: usize) -> Cache {
        let sets = sets.next_power_of_two();
        let ways = ways.max(1);
        Cache { sets: vec![Vec::with_capacity(ways); sets], ways }
    }

    fn set(&mut self, number: u64) -> &mut Vec<u64> {
        let index = number as usize & (self.sets.len() - 1);
        &mut self.sets[index]
    }

    /// Whether the entry was there. It is there now, in place of the least recently used.
    fn touch(&mut self, number: u64, tag: u64) -> bool {
        let ways = self.ways;
        let set = self.set(number);
        match set.iter().position(|&other| other == tag) {
            Some(at) => {
                set[..=at].rotate_right(1);
                true
            }
            None => {
                set.truncate(ways - 1);
                set.insert(0, tag);
                false
            }
        }
    }

    fn remove(&mut self, number: u64, tag: u64) {
        self.set(number).retain(|&other| other != tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB4: PageSize = PageSize::Kib4;
    const WALK: [usize; 3] = [4, 4, 4];

    /// Touches pages of 4 KiB by number; returns which missed.
    fn misses(caches: &mut Caches, numbers: &[u64]) -> Vec<bool> {
        let miss = |&number: &u64| {
            let before = caches.counts().iotlb_misses;
            caches.access(number << 12, KIB4);
            caches.counts().iotlb_misses > before
        };
        numbers.iter().map(miss).collect()
    }

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let mut caches = Caches::new(1, 2, WALK);
        let missed = misses(&mut caches, &[1, 2, 1, 3, 1, 2]);
        // 3 pushes out 2, as 1 was used since; 2 then pushes out 3.
        assert_eq!(missed, [true, true, false, true, false, true]);
        assert_eq!(misses(&mut caches, &[1, 3]), [false, true]);
        // With a single set nothing is a conflict.
        assert_eq!(caches.counts().conflict_misses, 0);
    }

    #[test]
    fn pages_that_alias_push_each_other_out_while_there_is_room_elsewhere() {
        let mut caches = Caches::new(4, 1, WALK);
        // 0 and 4 share a set of one way; 1 has another.
        assert_eq!(misses(&mut caches, &[8, 4, 1, 8, 4, 1]), [true, true, true, true, true, false]);
        // The first three would have missed anyway.
        let counts = caches.counts();
        assert_eq!((counts.accesses, counts.iotlb_misses, counts.conflict_misses), (6, 5, 2));
        // Too many for any IOTLB of four entries: no conflicts.
        let mut caches = Caches::new(4, 1, WALK);
        misses(&mut caches, &[0, 4, 8, 12, 16, 0, 4, 8, 12, 16]);
        assert_eq!((caches.counts().iotlb_misses, caches.counts().conflict_misses), (10, 0));
    }

    #[test]
    fn an_entry_holds_a_page_of_its_size() {
        let mut caches = Caches::new(4, 2, WALK);
        let gib = 1 << 30;
        for offset in [0, 4096, 5 << 20, gib - 1] {
            caches.access(3 * gib + offset, PageSize::Gib1);
        }
        assert_eq!(caches.counts().iotlb_misses, 1);
        // Another size at the same place is another entry.
        caches.access(3 * gib, PageSize::Mib2);
        caches.access(3 * gib + (1 << 20), PageSize::Mib2);
        caches.access(3 * gib + (2 << 20), PageSize::Mib2);
        assert_eq!(caches.counts().iotlb_misses, 3);
        caches.invalidate(3 * gib + 1, PageSize::Mib2);
        caches.access(3 * gib + (3 << 20), PageSize::Mib2);
        caches.access(3 * gib, PageSize::Mib2);
        assert_eq!(caches.counts().iotlb_misses, 4);
    }

    #[test]
    fn a_walk_starts_from_the_lowest_pointer_that_is_cached() {
        let mut caches = Caches::new(16, 4, [1, 1, 2]);
        let at = |t: u64, g: u64, m: u64, p: u64| t << 39 | g << 30 | m << 21 | p << 12;
        let mut walk = |iova, size| {
            caches.restart(Counts::default());
            caches.access(iova, size);
            caches.counts().walk_misses
        };
        assert_eq!(walk(at(1, 1, 1, 1), KIB4), [1, 1, 1], "all is read");
        assert_eq!(walk(at(1, 1, 1, 2), KIB4), [0, 0, 0], "the leaf table is known");
        assert_eq!(walk(at(1, 1, 2, 1), KIB4), [0, 0, 1], "the table above it is");
        assert_eq!(walk(at(1, 2, 1, 1), KIB4), [0, 1, 1]);
        assert_eq!(walk(at(1, 1, 2, 2), KIB4), [0, 0, 0], "two leaf tables are cached");
        assert_eq!(walk(at(1, 1, 1, 3), KIB4), [0, 1, 1], "the third pushed it out");
        assert_eq!(walk(at(1, 1, 9, 0), PageSize::Mib2), [0, 0, 0], "2 MiB needs no leaf table");
        assert_eq!(walk(at(1, 7, 0, 0), PageSize::Gib1), [0, 0, 0]);
        assert_eq!(walk(at(2, 7, 0, 0), PageSize::Gib1), [1, 0, 0]);
        assert_eq!(walk(at(2, 7, 0, 5), PageSize::Gib1), [0, 0, 0], "a hit walks nowhere");
    }

    #[test]
    fn an_invalidation_leaves_the_walk_caches() {
        let mut caches = Caches::new(16, 4, WALK);
        caches.access(0x1000, KIB4);
        caches.invalidate(0x1000, KIB4);
        caches.invalidate(0x7000, KIB4);
        caches.access(0x1000, KIB4);
        let counts = caches.counts();
        assert_eq!((counts.iotlb_misses, counts.walk_misses), (2, [1, 1, 1]));
        assert_eq!(counts.conflict_misses, 0, "the shadow forgot it too");
    }

    #[test]
    fn a_mapping_takes_the_largest_pages_that_its_alignment_allows() {
        const MIB: u64 = 1 << 20;
        let count = |iova, bytes| {
            let mut counts = [0; 3];
            let mut next = iova;
            for (at, size) in pages(iova, bytes) {
                assert_eq!(at, next);
                assert_eq!(PageSize::of(iova, bytes, at - iova), size);
                next += size.bytes();
                counts[size as usize] += 1;
            }
            assert_eq!(next, iova + bytes);
            counts
        };
        assert_eq!(count(1 << 30, 1 << 30), [0, 0, 1]);
        assert_eq!(count(1 << 30, (2 << 30) + 3 * MIB), [256, 1, 2]);
        assert_eq!(count(2 * MIB, 1 << 30), [0, 512, 0], "aligned to 2 MiB only");
        assert_eq!(count(4096, 4 * MIB), [1024, 0, 0], "aligned to 4 KiB only");
        assert_eq!(count(2 * MIB, 64 << 10), [16, 0, 0], "too small");
        assert_eq!(pages(0x1000, 0).count(), 0);
    }

    #[test]
    fn a_page_needs_the_tables_above_its_entry() {
        let iova = 1 << 39 | 2 << 30 | 3 << 21 | 4 << 12;
        let of = |size| tables(iova, size).collect::<Vec<_>>();
        assert_eq!(of(PageSize::Gib1), [(1, 1)]);
        assert_eq!(of(PageSize::Mib2), [(1, 1), (2, 1 << 9 | 2)]);
        assert_eq!(of(KIB4)[2], (3, iova >> 21));
    }
}
