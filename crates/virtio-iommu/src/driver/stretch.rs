//! Mappings within 64 adjacent granules, as bits.

use ringfence_iommu::{GuestPhys, Prot};

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) target: GuestPhys,
    pub(super) prot: Prot,
    /// The number of the MAP that made it; 0 if none was sent.
    pub(super) seq: u64,
}

/// log2 of the granules of a stretch.
pub(super) const GRANULE_BITS: u32 = 6;
/// The granules of a stretch.
const GRANULES: usize = 1 << GRANULE_BITS;

const _: () = assert!(Prot::all().bits() < 1 << Note::SEQ_AT, "a note has room for permissions");

/// What a mapping leads to, in two words: a cache line holds four.
#[derive(Clone, Copy, Default)]
struct Note {
    target: u64,
    /// `number of the MAP | permission`. There are not 2^61 requests in the life of a machine.
    word: u64,
}

impl Note {
    const SEQ_AT: u32 = 3;

    fn new(mapping: &Mapping) -> Note {
        let word = mapping.seq << Note::SEQ_AT | u64::from(mapping.prot.bits());
        Note { target: mapping.target.0, word }
    }

    fn seq(self) -> u64 {
        self.word >> Note::SEQ_AT
    }

    fn mapping(self) -> Mapping {
        let prot = Prot::from_bits_truncate(self.word as u32);
        Mapping { target: GuestPhys(self.target), prot, seq: self.seq() }
    }
}

/// The mappings that lie wholly in 64 adjacent granules.
///
/// Targets are stored apart: an unmap needs boundaries only, and does not touch them.
pub(super) struct Stretch {
    /// Which granules are mapped, a bit each.
    mapped: u64,
    /// At which granules a mapping begins.
    starts: u64,
    /// Of each granule at which a mapping begins.
    notes: Box<[Note; GRANULES]>,
}

/// The granules `first ..= last` as bits.
#[inline]
pub(super) fn mask(first: u32, last: u32) -> u64 {
    debug_assert!(first <= last && last < GRANULES as u32);
    (u64::MAX << first) & (u64::MAX >> (63 - last))
}

/// The lowest and the highest of some bits.
#[inline]
fn ends(bits: u64) -> Option<(u32, u32)> {
    (bits != 0).then(|| (bits.trailing_zeros(), 63 - bits.leading_zeros()))
}

/// How many bits are set: mostly one, and most target baselines lack an instruction that counts.
#[inline]
fn count(bits: u64) -> u32 {
    #[cold]
    #[inline(never)]
    fn many(bits: u64) -> u32 {
        bits.count_ones()
    }
    match bits & bits.wrapping_sub(1) {
        0 => u32::from(bits != 0),
        _ => many(bits),
    }
}

impl Stretch {
    pub(super) fn new() -> Stretch {
        Stretch { mapped: 0, starts: 0, notes: Box::new([Note::default(); GRANULES]) }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.mapped == 0
    }

    /// The first and the last granule of the mapping that has the granule `at`.
    #[inline]
    pub(super) fn whole(&self, at: u32) -> Option<(u32, u32)> {
        if self.mapped >> at & 1 == 0 {
            return None;
        }
        let (_, first) = ends(self.starts & mask(0, at))?;
        // It ends before the next that begins, or before what is not mapped.
        let others = (!self.mapped | self.starts) & !mask(0, at);
        Some((first, ends(others).map_or(63, |(next, _)| next - 1)))
    }

    /// What the mapping that begins with the granule `first` leads to.
    #[inline]
    pub(super) fn mapping(&self, first: u32) -> Mapping {
        self.notes[first as usize % GRANULES].mapping()
    }

    /// The last of the granules `wanted` that is mapped.
    #[inline]
    pub(super) fn last_mapped(&self, wanted: u64) -> Option<u32> {
        ends(self.mapped & wanted).map(|(_, last)| last)
    }

    /// The first and the last of the granules `wanted` that are mapped, and how many are.
    #[inline]
    pub(super) fn hull(&self, wanted: u64) -> Option<(u32, u32, u32)> {
        let bits = self.mapped & wanted;
        ends(bits).map(|(first, last)| (first, last, count(bits)))
    }

    /// How many mappings begin in the granules `wanted`.
    #[inline]
    pub(super) fn mappings(&self, wanted: u64) -> usize {
        count(self.starts & wanted) as usize
    }

    /// A granule of a mapping of which `wanted`, adjacent granules, has only a part.
    #[inline]
    pub(super) fn split(&self, wanted: u64) -> Option<u32> {
        // A mapping crosses the first of them, or the granule after the last; there is none if the
        // last one is the stretch's.
        let first = wanted & wanted.wrapping_neg();
        let after = wanted.wrapping_add(first);
        let goes_on = self.mapped & !self.starts & (first | after);
        if goes_on == 0 {
            return None;
        }
        let (first, last) = ends(wanted)?;
        Some(if goes_on >> first & 1 != 0 { first } else { last })
    }

    /// Notes a mapping of the granules `wanted`, adjacent and not mapped.
    #[inline]
    pub(super) fn insert(&mut self, wanted: u64, mapping: &Mapping) {
        debug_assert!(wanted != 0 && self.mapped & wanted == 0);
        let first = wanted.trailing_zeros();
        self.mapped |= wanted;
        self.starts |= 1 << first;
        self.notes[first as usize % GRANULES] = Note::new(mapping);
    }

    /// Removes the mappings in the granules `wanted`, which split none.
    #[inline]
    pub(super) fn remove(&mut self, wanted: u64) {
        self.mapped &= !wanted;
        self.starts &= !wanted;
    }

    /// Removes the mapping that begins with the granule `first` if the MAP `seq` made it.
    pub(super) fn roll_back(&mut self, first: u32, seq: u64) -> bool {
        let made = self.starts >> first & 1 != 0 && self.mapping(first).seq == seq;
        if made && let Some((first, last)) = self.whole(first) {
            self.remove(mask(first, last));
        }
        made
    }

    /// All mappings: the first and the last granule of each.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..GRANULES as u32).filter(|at| self.starts >> at & 1 != 0).filter_map(|at| self.whole(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(seq: u64) -> Mapping {
        Mapping { target: GuestPhys(seq << 12), prot: Prot::all(), seq }
    }

    #[test]
    fn neighbours_stay_apart_and_ends_are_found_at_both_edges() {
        let mut stretch = Stretch::new();
        for (first, last) in [(0, 0), (1, 3), (5, 62), (63, 63)] {
            stretch.insert(mask(first, last), &mapping(u64::from(first)));
        }
        for (first, last) in [(0, 0), (1, 3), (5, 62), (63, 63)] {
            for at in first..=last {
                assert_eq!(stretch.whole(at), Some((first, last)));
            }
            assert_eq!(stretch.split(mask(first, last)), None);
            assert_eq!(stretch.mapping(first), mapping(u64::from(first)));
        }
        assert_eq!(stretch.whole(4), None);
        assert_eq!(stretch.split(mask(0, 2)), Some(2));
        assert_eq!(stretch.split(mask(6, 63)), Some(6));
        assert_eq!(stretch.split(mask(0, 63)), None);
        assert_eq!(stretch.hull(mask(2, 61)), Some((2, 61, 59)));
        assert!(stretch.iter().eq([(0, 0), (1, 3), (5, 62), (63, 63)]));
        stretch.remove(mask(0, 4));
        assert_eq!((stretch.mappings(u64::MAX), stretch.last_mapped(mask(0, 4))), (2, None));
    }

    #[test]
    fn only_the_map_that_made_a_mapping_takes_it_back() {
        let mut stretch = Stretch::new();
        stretch.insert(mask(8, 15), &mapping(u64::MAX >> 3));
        assert!(!stretch.roll_back(8, 0) && !stretch.roll_back(9, u64::MAX >> 3));
        assert!(stretch.roll_back(8, u64::MAX >> 3) && stretch.is_empty());
    }
}
