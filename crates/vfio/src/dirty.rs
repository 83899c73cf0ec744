//! Which pages were written to.

use ringfence_iommu::{Iova, Range};

/// Which pages of a range were written to, a bit each: the common form in which every source of
/// dirty bits (type1, iommufd, the pinner) reports them.
///
/// Bits are only ever set, until [`clear`](Self::clear): after an error, a clean page may be
/// marked, but a dirty page never goes unmarked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyMap {
    first: u64,
    shift: u32,
    pages: u64,
    words: Vec<u64>,
}

impl DirtyMap {
    /// A clean map of `range` in pages of `page` bytes; `None` unless `page` is a power of two to
    /// which `range` is aligned, or if there are 2^64 pages.
    pub fn new(range: Range, page: u64) -> Option<DirtyMap> {
        let aligned = |at: u64| at & (page.wrapping_sub(1)) == 0;
        let last = range.last().0;
        if !page.is_power_of_two() || !aligned(range.first().0) || !aligned(last.wrapping_add(1)) {
            return None;
        }
        let shift = page.trailing_zeros();
        // The number of pages minus one always fits, even for the whole address space; with pages
        // of one byte the number itself may not.
        let pages = (range.extent() >> shift).checked_add(1)?;
        let words = vec![0; usize::try_from(pages.div_ceil(64)).ok()?];
        Some(DirtyMap { first: range.first().0, shift, pages, words })
    }

    /// The size of a page in bytes.
    pub fn page(&self) -> u64 {
        1 << self.shift
    }

    /// How many pages there are.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The bits: page n is bit n % 64 of word n / 64, as in the kernel's interfaces.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The bits, for the kernel to write. Counting assumes that the bits beyond the last page are
    /// zero: call [`trim`](Self::trim) afterwards.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Clears the bits beyond the last page.
    pub fn trim(&mut self) {
        let rest = self.pages % 64;
        if let (1.., Some(last)) = (rest, self.words.last_mut()) {
            *last &= (1 << rest) - 1;
        }
    }

    /// Marks every page that `range` touches; ignores what lies outside of the map.
    pub fn mark(&mut self, range: Range) {
        let Some(end) = (range.last().0).checked_sub(self.first) else { return };
        let begin = range.first().0.saturating_sub(self.first) >> self.shift;
        let end = (end >> self.shift).min(self.pages - 1);
        if begin > end {
            return;
        }
        // A whole word at a time: the cost of a run is that of its words.
        let (from, to) = ((begin / 64) as usize, (end / 64) as usize);
        let (low, high) = (u64::MAX << (begin % 64), u64::MAX >> (63 - end % 64));
        if from == to {
            self.words[from] |= low & high;
            return;
        }
        self.words[from] |= low;
        self.words[from + 1..to].fill(u64::MAX);
        self.words[to] |= high;
    }

    /// Whether the page of `iova` is marked; false outside of the map.
    pub fn is_dirty(&self, iova: Iova) -> bool {
        let page = iova.0.checked_sub(self.first).map(|at| at >> self.shift);
        page.is_some_and(|n| n < self.pages && self.words[(n / 64) as usize] >> (n % 64) & 1 != 0)
    }

    /// How many pages are marked.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The first address of every marked page, in order.
    pub fn iter(&self) -> impl Iterator<Item = Iova> + '_ {
        self.words.iter().zip(0_u64..).flat_map(move |(&word, at)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 != 0)
                .map(move |bit| Iova(self.first + ((at * 64 + bit) << self.shift)))
        })
    }

    /// Marks the pages that are marked in `other`, whatever its page size and range.
    pub fn merge(&mut self, other: &DirtyMap) {
        for iova in other.iter() {
            // A page's last byte always has an address.
            let last = Iova(iova.0 + (other.page() - 1));
            if let Some(page) = Range::new(iova, last) {
                self.mark(page);
            }
        }
    }

    /// Unmarks all pages.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    proptest! {
        #[test]
        fn marks_are_those_of_a_set_of_pages(
            base in prop_oneof![Just(0_u64), Just(0x10_0000), Just(u64::MAX - 0xf_ffff)],
            marks in prop::collection::vec((0..0x20_0000_u64, 0..0x10_0000_u64), 0..20),
        ) {
            let whole = range(base, base + 0xf_ffff);
            let mut map = DirtyMap::new(whole, 4096).unwrap();
            let mut naive = std::collections::BTreeSet::new();
            for (at, len) in marks {
                let first = base.saturating_sub(0x8_0000).saturating_add(at);
                let mark = range(first, first.saturating_add(len));
                map.mark(mark);
                naive.extend((0..256).map(|n| base + n * 4096).filter(|&page| {
                    range(page, page + 4095).overlaps(mark)
                }));
            }
            prop_assert_eq!(map.iter().map(|iova| iova.0).collect::<Vec<_>>(),
                naive.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(map.count(), naive.len() as u64);
            let mut coarse = DirtyMap::new(whole, 0x1_0000).unwrap();
            coarse.merge(&map);
            prop_assert!(naive.iter().all(|&page| coarse.is_dirty(Iova(page))));
        }
    }

    #[test]
    fn ends_and_nonsense() {
        assert!(DirtyMap::new(range(0, 4095), 3000).is_none());
        assert!(DirtyMap::new(range(1, 4096), 4096).is_none());
        assert!(DirtyMap::new(Range::ALL, 1).is_none(), "2^64 pages");
        let mut map = DirtyMap::new(Range::ALL, 1 << 40).unwrap();
        map.mark(range(u64::MAX, u64::MAX));
        assert_eq!(map.iter().collect::<Vec<_>>(), [Iova(u64::MAX << 40)]);
        map.words_mut().fill(u64::MAX);
        map.trim();
        assert_eq!(map.count(), 1 << 24);
        map.clear();
        assert_eq!(map.count(), 0);
    }
}
