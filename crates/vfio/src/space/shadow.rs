//! What is mapped, as a domain over a kernel records it.

use std::collections::BTreeMap;

use ringfence_iommu::{Address, Error, HostAddr, Iova, Map, Prot, Range, Result};

/// The state of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Recorded here, but not made in the kernel.
    Noted,
    /// A thread is about to make or remove it.
    Busy,
    /// The kernel has it.
    Made,
}

/// A range that is mapped and unmapped as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) range: Range,
    pub(crate) target: HostAddr,
    pub(crate) prot: Prot,
    pub(crate) stage: Stage,
}

impl Unit {
    pub(crate) fn new(map: &Map<HostAddr>, stage: Stage) -> Unit {
        Unit { range: map.range(), target: map.target(), prot: map.prot(), stage }
    }

    /// Joins units that follow each other.
    pub(super) fn joined(run: &[Unit]) -> Map<HostAddr> {
        let range = run.iter().map(|unit| unit.range).reduce(Range::hull).unwrap_or(run[0].range);
        // SAFETY: each unit was made from such a `Map`.
        unsafe { Map::of(range, run[0].target, run[0].prot) }
    }

    /// Whether `next` continues this one: address, target and permission.
    pub(crate) fn leads_to(&self, next: &Unit) -> bool {
        let after = |at: u64| at.checked_add(self.range.extent())?.checked_add(1);
        self.prot == next.prot
            && after(self.range.first().0) == Some(next.range.first().0)
            && after(self.target.0) == Some(next.target.0)
    }
}

/// The units, by address: each lookup costs a search in a tree, far less than the system call that
/// goes with it.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    units: BTreeMap<u64, Unit>,
}

impl Shadow {
    pub(crate) fn len(&self) -> usize {
        self.units.len()
    }

    /// Records a unit. It must not overlap another.
    pub(crate) fn insert(&mut self, unit: Unit) {
        debug_assert!(self.overlapping(unit.range).is_none());
        self.units.insert(unit.range.first().0, unit);
    }

    pub(crate) fn remove(&mut self, range: Range) {
        self.units.remove(&range.first().0);
    }

    pub(crate) fn set(&mut self, range: Range, stage: Stage) {
        if let Some(unit) = self.units.get_mut(&range.first().0) {
            unit.stage = stage;
        }
    }

    pub(crate) fn retarget(&mut self, range: Range, target: HostAddr) {
        if let Some(unit) = self.units.get_mut(&range.first().0) {
            unit.target = target;
        }
    }

    /// A unit with an address in `range`.
    pub(crate) fn overlapping(&self, range: Range) -> Option<&Unit> {
        let (_, unit) = self.units.range(..=range.last().0).next_back()?;
        unit.range.overlaps(range).then_some(unit)
    }

    /// The units with an address in `range`, in order.
    pub(crate) fn in_range(&self, range: Range) -> impl Iterator<Item = &Unit> {
        let before = self.units.range(..range.first().0).next_back();
        let before = before.map(|(_, unit)| unit).filter(|unit| unit.range.overlaps(range));
        before.into_iter().chain(self.units.range(range.first().0..=range.last().0).map(|it| it.1))
    }

    /// The units in `range`, in order.
    ///
    /// # Errors
    /// [`Error::WouldSplit`]: one of them does not lie wholly in it.
    pub(crate) fn covered(&self, range: Range) -> Result<Vec<Unit>> {
        let whole = |unit: &Unit| match range.covers(unit.range) {
            true => Ok(*unit),
            false => Err(Error::WouldSplit { range, at: unit.range.first() }),
        };
        self.in_range(range).map(whole).collect()
    }

    pub(crate) fn find(&self, iova: Iova) -> Option<HostAddr> {
        let (_, unit) = self.units.range(..=iova.0).next_back()?;
        let offset = iova.0 - unit.range.first().0;
        (offset <= unit.range.extent()).then(|| unit.target.checked_add(offset))?
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unit> + Clone {
        self.units.values()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: u64 = 64;

    proptest! {
        #[test]
        fn a_shadow_behaves_as_a_list_of_pages_does(
            base in prop_oneof![Just(0_u64), Just(u64::MAX - (SPAN - 1))],
            steps in prop::collection::vec((0..SPAN, 1..9_u64, any::<bool>()), 0..60),
        ) {
            let mut shadow = Shadow::default();
            let mut naive: Vec<Option<(u64, u64)>> = vec![None; SPAN as usize];
            for (at, len, insert) in steps {
                let last = (at + len - 1).min(SPAN - 1);
                let range = Range::new(Iova(base + at), Iova(base + last)).unwrap();
                let pages = at as usize..=last as usize;
                let held: Vec<_> = naive[pages.clone()].iter().flatten().copied().collect();
                prop_assert_eq!(shadow.overlapping(range).is_some(), !held.is_empty());
                let cut = held.iter().find(|it| it.0 < at || it.1 > last);
                let covered = shadow.covered(range);
                match cut {
                    Some(_) => prop_assert!(matches!(covered, Err(Error::WouldSplit { .. })), "split"),
                    None => {
                        let units = covered.unwrap();
                        let mut wanted = held.clone();
                        wanted.dedup();
                        let found: Vec<_> = units.iter()
                            .map(|it| (it.range.first().0 - base, it.range.last().0 - base))
                            .collect();
                        prop_assert_eq!(found, wanted);
                        if !insert {
                            units.iter().for_each(|unit| shadow.remove(unit.range));
                            naive[pages.clone()].fill(None);
                        }
                    }
                }
                if insert && held.is_empty() {
                    let target = HostAddr(1000 + at);
                    shadow.insert(Unit { range, target, prot: Prot::RW, stage: Stage::Made });
                    naive[pages].fill(Some((at, last)));
                }
                for page in 0..SPAN {
                    let wanted = naive[page as usize].map(|_| HostAddr(1000 + page));
                    prop_assert_eq!(shadow.find(Iova(base + page)), wanted);
                }
            }
        }
    }
}
