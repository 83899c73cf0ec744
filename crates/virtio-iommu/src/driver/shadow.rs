//! What is mapped, as the driver knows it.

use std::collections::BTreeMap;

use ringfence_iommu::{Error, GuestPhys, Iova, Prot, Range, Result};

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    last: u64,
    pub(super) target: GuestPhys,
    pub(super) prot: Prot,
    /// The number of the MAP that made it; 0 if none was sent.
    seq: u64,
}

/// The mappings of a domain with their boundaries: to answer look-ups, to count what an unmap
/// removes, to refuse what would split a mapping before anything is sent, and to send all again
/// when an endpoint is attached (rule L65).
#[derive(Debug, Default)]
pub(super) struct Shadow {
    mappings: BTreeMap<u64, Mapping>,
}

/// What an unmap would remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Covered {
    /// From the first mapping's first address to the last one's last.
    pub(super) hull: Range,
    pub(super) bytes: u128,
    mappings: usize,
}

impl Shadow {
    pub(super) fn len(&self) -> usize {
        self.mappings.len()
    }

    /// The mapping that holds `at` and its range.
    pub(super) fn find(&self, at: Iova) -> Option<(Range, Mapping)> {
        let (&first, mapping) = self.mappings.range(..=at.0).next_back()?;
        (at.0 <= mapping.last).then(|| (span(first, mapping), *mapping))
    }

    /// The last mapping with an address in `range`.
    pub(super) fn overlapping(&self, range: Range) -> Option<Range> {
        let (&first, mapping) = self.mappings.range(..=range.last().0).next_back()?;
        (mapping.last >= range.first().0).then(|| span(first, mapping))
    }

    /// Notes a mapping. Nothing must overlap it.
    pub(super) fn insert(&mut self, range: Range, target: GuestPhys, prot: Prot, seq: u64) {
        debug_assert!(self.overlapping(range).is_none());
        let mapping = Mapping { last: range.last().0, target, prot, seq };
        self.mappings.insert(range.first().0, mapping);
    }

    /// What an unmap of `range` would remove; `None` if nothing.
    ///
    /// # Errors
    /// [`Error::WouldSplit`].
    pub(super) fn covered(&self, range: Range) -> Result<Option<Covered>> {
        let split = |at: Range| Err(Error::WouldSplit { range, at: at.first() });
        if let Some((held, _)) = self.find(range.first())
            && held.first() < range.first()
        {
            return split(held);
        }
        let mut covered: Option<Covered> = None;
        for (&first, mapping) in self.mappings.range(range.first().0..=range.last().0) {
            let held = span(first, mapping);
            if held.last() > range.last() {
                return split(held);
            }
            covered = Some(match covered {
                None => Covered { hull: held, bytes: held.len(), mappings: 1 },
                Some(so_far) => Covered {
                    hull: so_far.hull.hull(held),
                    bytes: so_far.bytes + held.len(),
                    mappings: so_far.mappings + 1,
                },
            });
        }
        Ok(covered)
    }

    /// Removes what [`covered`](Self::covered) has found.
    pub(super) fn remove(&mut self, covered: Covered) {
        if covered.mappings == 1 {
            self.mappings.remove(&covered.hull.first().0);
            return;
        }
        let mut at = covered.hull.first().0;
        for _ in 0..covered.mappings {
            let Some((&first, _)) = self.mappings.range(at..).next() else { return };
            self.mappings.remove(&first);
            at = first;
        }
    }

    /// Removes the mapping that the MAP `seq` was to make, if it is still noted: it may have been
    /// unmapped, and another made in its place, before the device's refusal was seen.
    pub(super) fn roll_back(&mut self, range: Range, seq: u64) -> bool {
        let first = range.first().0;
        let made = self.mappings.get(&first).is_some_and(|mapping| mapping.seq == seq);
        if made {
            self.mappings.remove(&first);
        }
        made
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Range, Mapping)> {
        self.mappings.iter().map(|(&first, mapping)| (span(first, mapping), *mapping))
    }

    pub(super) fn clear(&mut self) {
        self.mappings.clear();
    }
}

fn span(first: u64, mapping: &Mapping) -> Range {
    Range::new(Iova(first), Iova(mapping.last)).expect("made from a range")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    #[test]
    fn an_unmap_that_would_split_is_seen_at_both_ends() {
        // rule L65
        let mut shadow = Shadow::default();
        shadow.insert(range(0x1000, 0x2fff), GuestPhys(0), Prot::RW, 1);
        assert!(shadow.covered(range(0x1000, 0x1fff)).is_err());
        assert!(shadow.covered(range(0x2000, 0x2fff)).is_err());
        assert!(shadow.covered(range(0x2000, 0x8fff)).is_err());
        let covered = shadow.covered(Range::ALL).unwrap().unwrap();
        assert_eq!((covered.hull, covered.bytes), (range(0x1000, 0x2fff), 0x2000));
    }

    #[test]
    fn a_late_refusal_does_not_take_back_another_mapping_of_the_same_address() {
        let mut shadow = Shadow::default();
        shadow.insert(range(0, 0xfff), GuestPhys(0), Prot::RW, 2);
        assert!(!shadow.roll_back(range(0, 0xfff), 1));
        assert_eq!(shadow.len(), 1);
        assert!(shadow.roll_back(range(0, 0xfff), 2));
        assert_eq!(shadow.len(), 0);
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_list_of_ranges(
            steps in proptest::collection::vec((any::<bool>(), 0u64..40, 1u64..9), 1..80),
        ) {
            let mut shadow = Shadow::default();
            let mut oracle: BTreeSet<Range> = BTreeSet::new();
            for (map, first, len) in steps {
                let wanted = range(first, first + len - 1);
                if map {
                    let free = !oracle.iter().any(|held| held.overlaps(wanted));
                    prop_assert_eq!(shadow.overlapping(wanted).is_none(), free);
                    if free {
                        shadow.insert(wanted, GuestPhys(first), Prot::RW, 0);
                        oracle.insert(wanted);
                    }
                    continue;
                }
                let splits =
                    oracle.iter().any(|held| held.overlaps(wanted) && !wanted.covers(*held));
                prop_assert_eq!(shadow.covered(wanted).is_err(), splits);
                if let Ok(Some(covered)) = shadow.covered(wanted) {
                    let gone = oracle.iter().filter(|held| held.overlaps(wanted));
                    prop_assert_eq!(covered.bytes, gone.map(|held| held.len()).sum::<u128>());
                    shadow.remove(covered);
                    oracle.retain(|held| !held.overlaps(wanted));
                }
                prop_assert!(shadow.iter().map(|(range, _)| range).eq(oracle.iter().copied()));
            }
        }
    }
}
