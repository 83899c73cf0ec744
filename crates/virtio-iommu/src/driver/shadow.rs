//! The driver's record of what is mapped.

use std::collections::BTreeMap;

use ringfence_iommu::{Error, GuestPhys, Iova, Prot, Range, Result};

use super::{
    stretch::{GRANULE_BITS, Mapping, Stretch, mask},
    stretches::Stretches,
};

/// The mappings of a domain with their boundaries: for lookups, to count what an unmap removes, to
/// refuse what would split a mapping before anything is sent, and to send all again when an
/// endpoint is attached (rule L65).
///
/// Most mappings span a few granules, naturally aligned: they lie in one *stretch* of 64 granules,
/// where every lookup is a bit operation, and stretches are found by their number. So a map and an
/// unmap cost the same however much is mapped. The others, [wide](Self::wide) ones, are in a tree,
/// which is looked into only if there are any. An isolated page costs a kilobyte.
pub(super) struct Shadow {
    /// log2 of the granule.
    granule: u32,
    stretches: Stretches,
    /// Mappings that reach from one stretch into another, by first address, with their last.
    wide: BTreeMap<u64, (u64, Mapping)>,
    len: usize,
}

/// What an unmap would remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Covered {
    /// From the first mapping's first address to the last one's last.
    pub(super) hull: Range,
    pub(super) bytes: u128,
    mappings: usize,
}

impl Covered {
    #[inline]
    fn join(so_far: Option<Covered>, more: Covered) -> Option<Covered> {
        Some(so_far.map_or(more, |so_far| Covered {
            hull: so_far.hull.hull(more.hull),
            bytes: so_far.bytes + more.bytes,
            mappings: so_far.mappings + more.mappings,
        }))
    }
}

impl Shadow {
    /// Nothing mapped; `granule` is a power of two.
    pub(super) fn new(granule: u64) -> Shadow {
        debug_assert!(granule.is_power_of_two());
        Shadow {
            granule: granule.trailing_zeros(),
            stretches: Stretches::new(),
            wide: BTreeMap::new(),
            len: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The mapping that holds `at` and its range.
    pub(super) fn find(&self, at: Iova) -> Option<(Range, Mapping)> {
        let (number, granule) = self.place(at.0);
        if let Some(stretch) = self.stretches.get(number)
            && let Some((first, last)) = stretch.whole(granule)
        {
            return Some((self.range(number, first, last), stretch.mapping(first)));
        }
        let (&first, &(last, mapping)) = self.wide.range(..=at.0).next_back()?;
        (at.0 <= last).then(|| (span(first, last), mapping))
    }

    /// The last mapping with an address in `range`.
    #[inline]
    pub(super) fn overlapping(&self, range: Range) -> Option<Range> {
        let in_stretch = |number: u64, stretch: &Stretch, wanted: u64| {
            let (first, last) = stretch.whole(stretch.last_mapped(wanted)?)?;
            Some(self.range(number, first, last))
        };
        let held = match self.in_one(range) {
            Some((number, wanted)) => {
                self.stretches.get(number).and_then(|it| in_stretch(number, it, wanted))
            }
            None => {
                self.in_many(range).filter_map(|(n, it, wanted)| in_stretch(n, it, wanted)).max()
            }
        };
        if self.wide.is_empty() { held } else { held.max(self.overlapping_wide(range)) }
    }

    fn overlapping_wide(&self, range: Range) -> Option<Range> {
        let (&first, &(last, _)) = self.wide.range(..=range.last().0).next_back()?;
        (last >= range.first().0).then(|| span(first, last))
    }

    /// Notes a mapping of whole granules. Nothing must overlap it.
    #[inline]
    pub(super) fn insert(&mut self, range: Range, target: GuestPhys, prot: Prot, seq: u64) {
        debug_assert!(range.is_aligned(1 << self.granule));
        debug_assert!(self.overlapping(range).is_none());
        let mapping = Mapping { target, prot, seq };
        self.len += 1;
        match self.in_one(range) {
            Some((number, wanted)) => {
                self.stretches.get_or_make(number).insert(wanted, &mapping);
            }
            None => {
                self.wide.insert(range.first().0, (range.last().0, mapping));
            }
        }
    }

    /// What an unmap of `range`, which is granule-aligned, would remove; `None` if nothing.
    ///
    /// # Errors
    /// [`Error::WouldSplit`].
    #[inline]
    pub(super) fn covered(&self, range: Range) -> Result<Option<Covered>> {
        match self.in_one(range) {
            Some((number, wanted)) if self.wide.is_empty() => match self.stretches.get(number) {
                Some(stretch) => self.covered_in(number, stretch, wanted, range),
                None => Ok(None),
            },
            _ => self.covered_anywhere(range),
        }
    }

    fn covered_anywhere(&self, range: Range) -> Result<Option<Covered>> {
        let mut covered = None;
        for (number, stretch, wanted) in self.in_many(range) {
            if let Some(more) = self.covered_in(number, stretch, wanted, range)? {
                covered = Covered::join(covered, more);
            }
        }
        if self.wide.is_empty() { Ok(covered) } else { self.covered_wide(covered, range) }
    }

    #[inline]
    fn covered_in(
        &self,
        number: u64,
        stretch: &Stretch,
        wanted: u64,
        range: Range,
    ) -> Result<Option<Covered>> {
        if let Some(at) = stretch.split(wanted) {
            return Err(self.would_split(number, stretch, at, range));
        }
        Ok(stretch.hull(wanted).map(|(first, last, granules)| Covered {
            hull: self.range(number, first, last),
            bytes: u128::from(granules) << self.granule,
            mappings: stretch.mappings(wanted),
        }))
    }

    #[cold]
    fn would_split(&self, number: u64, stretch: &Stretch, at: u32, range: Range) -> Error {
        let (first, _) = stretch.whole(at).unwrap_or((at, at));
        Error::WouldSplit { range, at: self.range(number, first, at).first() }
    }

    fn covered_wide(&self, mut covered: Option<Covered>, range: Range) -> Result<Option<Covered>> {
        let split = |first| Err(Error::WouldSplit { range, at: Iova(first) });
        let below = self.wide.range(..range.first().0).next_back();
        if let Some((&first, _)) = below.filter(|(_, (last, _))| *last >= range.first().0) {
            return split(first);
        }
        for (&first, &(last, _)) in self.wide.range(range.first().0..=range.last().0) {
            if last > range.last().0 {
                return split(first);
            }
            let hull = span(first, last);
            covered = Covered::join(covered, Covered { hull, bytes: hull.len(), mappings: 1 });
        }
        Ok(covered)
    }

    /// Removes what [`covered`](Self::covered) has found.
    #[inline]
    pub(super) fn remove(&mut self, covered: Covered) {
        let Covered { hull, mappings, .. } = covered;
        self.len -= mappings;
        if !self.wide.is_empty() {
            while let Some((&first, _)) = self.wide.range(hull.first().0..=hull.last().0).next() {
                self.wide.remove(&first);
            }
        }
        match self.in_one(hull) {
            Some((number, wanted)) => {
                if let Some(stretch) = self.stretches.get_mut(number) {
                    stretch.remove(wanted);
                }
            }
            None => self.remove_many(hull),
        }
    }

    fn remove_many(&mut self, hull: Range) {
        let ((from, _), (to, _)) = (self.place(hull.first().0), self.place(hull.last().0));
        if to - from >= self.stretches.len() as u64 {
            let granule = self.granule;
            self.stretches.for_each_mut(|number, stretch| {
                if (from..=to).contains(&number) {
                    stretch.remove(part(granule, number, hull));
                }
            });
        } else {
            for number in from..=to {
                let wanted = part(self.granule, number, hull);
                if let Some(stretch) = self.stretches.get_mut(number) {
                    stretch.remove(wanted);
                }
            }
        }
    }

    /// Removes the mapping that the MAP `seq` was to make, if it is still noted: it may have been
    /// unmapped, and another made in its place, before the device's refusal was seen.
    pub(super) fn roll_back(&mut self, range: Range, seq: u64) -> bool {
        let first = range.first().0;
        let (number, granule) = self.place(first);
        let stretch = self.stretches.get_mut(number);
        let mut made = stretch.is_some_and(|stretch| stretch.roll_back(granule, seq));
        if !made && self.wide.get(&first).is_some_and(|(_, mapping)| mapping.seq == seq) {
            made = self.wide.remove(&first).is_some();
        }
        self.len -= usize::from(made);
        made
    }

    /// All mappings, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Range, Mapping)> {
        let wide = self.wide.iter().map(|(&first, &(last, mapping))| (span(first, last), mapping));
        let mut all: Vec<_> = wide.collect();
        for (number, stretch) in self.stretches.iter() {
            all.extend(
                stretch
                    .iter()
                    .map(|(first, last)| (self.range(number, first, last), stretch.mapping(first))),
            );
        }
        all.sort_unstable_by_key(|(range, _)| *range);
        all.into_iter()
    }

    /// The number of an address's stretch, and the granule in the stretch.
    #[inline]
    fn place(&self, at: u64) -> (u64, u32) {
        place(self.granule, at)
    }

    /// The granules `first ..= last` of a stretch.
    #[inline]
    fn range(&self, number: u64, first: u32, last: u32) -> Range {
        let at = |granule: u32| (number << GRANULE_BITS | u64::from(granule)) << self.granule;
        span(at(first), at(last) | ((1 << self.granule) - 1))
    }

    /// The stretch that has all of `range`, if one has, and the granules of it.
    #[inline]
    fn in_one(&self, range: Range) -> Option<(u64, u64)> {
        let (number, first) = self.place(range.first().0);
        let (end, last) = self.place(range.last().0);
        (number == end).then(|| (number, mask(first, last)))
    }

    /// The stretches with an address in `range`, in no order, and which granules of each. As many
    /// looks as there are stretches at most, however large the range.
    fn in_many(&self, range: Range) -> impl Iterator<Item = (u64, &Stretch, u64)> {
        let ((from, _), (to, _)) = (self.place(range.first().0), self.place(range.last().0));
        let few = to - from < self.stretches.len() as u64;
        let by_number = few.then_some(from..=to).into_iter().flatten();
        let by_number = by_number.filter_map(|n| Some((n, self.stretches.get(n)?)));
        let all = (!few).then(|| self.stretches.iter()).into_iter().flatten();
        let all = all.filter(move |(n, _)| (from..=to).contains(n));
        by_number.chain(all).map(move |(n, it)| (n, it, part(self.granule, n, range)))
    }
}

/// The number of an address's stretch, and the granule in the stretch.
#[inline]
fn place(granule: u32, at: u64) -> (u64, u32) {
    let at = at >> granule;
    (at >> GRANULE_BITS, at as u32 & ((1 << GRANULE_BITS) - 1))
}

/// Which granules of a stretch with an address in `range` have one.
fn part(granule: u32, number: u64, range: Range) -> u64 {
    let (from, first) = place(granule, range.first().0);
    let (to, last) = place(granule, range.last().0);
    mask(if number == from { first } else { 0 }, if number == to { last } else { 63 })
}

#[inline]
fn span(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).expect("made from a range")
}

#[cfg(test)]
mod tests {
    use super::{super::stretches::EMPTIES, *};
    use proptest::prelude::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    #[test]
    fn an_unmap_that_would_split_is_seen_at_both_ends() {
        // rule L65
        // In one stretch, and from one into the next.
        for at in [0x1000, 0x3f000] {
            let mut shadow = Shadow::new(4096);
            shadow.insert(range(at, at + 0x1fff), GuestPhys(0), Prot::RW, 1);
            let split = |first, last| {
                let range = range(first, last);
                assert_eq!(shadow.covered(range), Err(Error::WouldSplit { range, at: Iova(at) }));
            };
            split(at, at + 0xfff);
            split(at + 0x1000, at + 0x1fff);
            split(at + 0x1000, at + 0x6fff);
            split(0, at + 0xfff);
            let covered = shadow.covered(Range::ALL).unwrap().unwrap();
            assert_eq!((covered.hull, covered.bytes), (range(at, at + 0x1fff), 0x2000));
        }
    }

    #[test]
    fn a_late_refusal_does_not_take_back_another_mapping_of_the_same_address() {
        for last in [0xfff, 0xff_ffff] {
            let mut shadow = Shadow::new(4096);
            shadow.insert(range(0, last), GuestPhys(0), Prot::RW, 2);
            assert!(!shadow.roll_back(range(0, last), 1));
            assert_eq!(shadow.len(), 1);
            assert!(shadow.roll_back(range(0, last), 2));
            assert_eq!((shadow.len(), shadow.find(Iova(0))), (0, None));
        }
    }

    #[test]
    fn the_whole_address_space_is_a_mapping_like_any_other_whatever_the_granule() {
        for granule in [1, 4096, 1 << 58, 1 << 63] {
            let mut shadow = Shadow::new(granule);
            shadow.insert(Range::ALL, GuestPhys(0), Prot::RW, 1);
            assert_eq!(shadow.overlapping(range(u64::MAX, u64::MAX)), Some(Range::ALL));
            assert_eq!(shadow.find(Iova(u64::MAX)).map(|(range, _)| range), Some(Range::ALL));
            let covered = shadow.covered(Range::ALL).unwrap().unwrap();
            assert_eq!((covered.hull, covered.bytes), (Range::ALL, 1 << 64));
            shadow.remove(covered);
            assert_eq!((shadow.len(), shadow.iter().count()), (0, 0));
            let top = range(u64::MAX - (granule - 1), u64::MAX);
            shadow.insert(top, GuestPhys(0), Prot::READ, 2);
            assert_eq!(shadow.covered(Range::ALL).unwrap().map(|covered| covered.hull), Some(top));
            assert!(shadow.iter().map(|(range, _)| range).eq([top]));
        }
    }

    #[test]
    fn what_wanders_through_the_address_space_does_not_keep_all_it_ever_used() {
        let mut shadow = Shadow::new(4096);
        let far_page = |n: u64| range(n << 32, (n << 32) + 0xfff);
        for n in 0..5000 {
            shadow.insert(far_page(n), GuestPhys(n << 12), Prot::RW, n);
            if let Some(old) = n.checked_sub(100) {
                shadow.remove(shadow.covered(far_page(old)).unwrap().unwrap());
            }
            assert!(shadow.stretches.len() <= EMPTIES + 2 * 101);
        }
        let held = shadow.iter().map(|(_, mapping)| mapping.target.0 >> 12);
        assert!(held.eq(4900..5000));
    }

    type TestResult = std::result::Result<(), TestCaseError>;

    /// A list of mappings, in ascending order.
    type Oracle = Vec<(Range, Mapping)>;

    fn agrees(shadow: &Shadow, oracle: &Oracle, wanted: Range) -> TestResult {
        let held = || oracle.iter().filter(|(held, _)| held.overlaps(wanted));
        prop_assert_eq!(shadow.overlapping(wanted), held().next_back().map(|(range, _)| *range));
        let splits = held().find(|(held, _)| !wanted.covers(*held));
        match shadow.covered(wanted) {
            Err(Error::WouldSplit { range, at }) => {
                prop_assert!(splits.is_some() && range == wanted);
                prop_assert!(held().any(|(held, _)| held.first() == at && !wanted.covers(*held)));
            }
            covered => {
                prop_assert_eq!(splits, None);
                let hull = held().map(|(range, _)| *range).reduce(Range::hull);
                let bytes: u128 = held().map(|(range, _)| range.len()).sum();
                let covered = covered.unwrap().map(|covered| (covered.hull, covered.bytes));
                prop_assert_eq!(covered, hull.map(|hull| (hull, bytes)));
            }
        }
        for at in [wanted.first(), wanted.last()] {
            let found = oracle.iter().copied().find(|(held, _)| held.contains(at));
            prop_assert_eq!(shadow.find(at), found);
        }
        prop_assert_eq!(shadow.len(), oracle.len());
        prop_assert!(shadow.iter().eq(oracle.iter().copied()));
        Ok(())
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_list_of_ranges(
            granule in prop_oneof![Just(1_u64), Just(4096), Just(1 << 55)],
            high in any::<bool>(),
            // Small ones, mostly within a stretch, and ones that reach from one stretch into
            // others.
            steps in prop::collection::vec(
                (0u8..5, 0u64..400, prop_oneof![4 => 1u64..9, 1 => 1u64..200]), 1..80),
        ) {
            let mut shadow = Shadow::new(granule);
            let mut oracle = Oracle::new();
            // 400 granules, at either end of the address space.
            let base = if high { (u64::MAX / granule) - 399 } else { 0 };
            for (seq, (what, first, len)) in (1..).zip(steps) {
                let last = (first + len - 1).min(399);
                let wanted =
                    range((base + first) * granule, (base + last) * granule + (granule - 1));
                agrees(&shadow, &oracle, wanted)?;
                match what {
                    0..3 => if shadow.overlapping(wanted).is_none() {
                        let mapping = Mapping { target: GuestPhys(first), prot: Prot::READ, seq };
                        shadow.insert(wanted, mapping.target, mapping.prot, seq);
                        oracle.push((wanted, mapping));
                        oracle.sort_unstable_by_key(|(range, _)| *range);
                    },
                    3 => if let Ok(Some(covered)) = shadow.covered(wanted) {
                        shadow.remove(covered);
                        oracle.retain(|(held, _)| !held.overlaps(wanted));
                    },
                    _ => {
                        // One that may be there, and one that is not.
                        let (made, at) = oracle.last().map_or((seq, wanted), |(r, m)| (m.seq, *r));
                        prop_assert!(!shadow.roll_back(at, seq + 1));
                        prop_assert_eq!(shadow.roll_back(at, made), !oracle.is_empty());
                        oracle.pop();
                    }
                }
                agrees(&shadow, &oracle, wanted)?;
            }
            agrees(&shadow, &oracle, Range::ALL)?;
        }
    }
}
