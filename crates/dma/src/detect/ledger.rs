//! The records of current and recent mappings.

use core::panic::Location;
use std::collections::{BTreeMap, VecDeque};

use ringfence_iommu::{Iova, Range};

use super::{CallSite, Detector};
use crate::Direction;

/// The record of an IOVA range.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) range: Range,
    pub(crate) direction: Direction,
    pub(crate) mapped: CallSite,
    /// Its unmap, as soon as that has begun.
    pub(crate) unmapped: Option<CallSite>,
}

/// The records of mapped ranges, and of freed ranges that are held back.
///
/// No two of them overlap: a range that is held back is not allocated again.
pub(crate) struct Ledger {
    bounds: Detector,
    /// The allocator's granule.
    pub(super) granule: u64,
    /// By the first address of the range.
    records: BTreeMap<u64, Record>,
    /// The ranges held back, oldest first.
    held: VecDeque<Range>,
    held_bytes: u128,
}

impl Ledger {
    pub(crate) fn new(bounds: Detector, granule: u64) -> Ledger {
        let (records, held) = (BTreeMap::new(), VecDeque::new());
        Ledger { bounds, granule, records, held, held_bytes: 0 }
    }

    /// Records a mapping before its user gets the address.
    pub(crate) fn mapped(
        &mut self,
        range: Range,
        direction: Direction,
        at: &'static Location<'static>,
        now_ns: u64,
    ) {
        let mapped = CallSite::now(Some(at), now_ns);
        self.records.insert(range.first().0, Record { range, direction, mapped, unmapped: None });
    }

    /// Records an unmap before it is done, as the device may already fault on it. If several places
    /// record it, the first is the one that requested it.
    pub(crate) fn unmapping(
        &mut self,
        range: Range,
        at: Option<&'static Location<'static>>,
        now_ns: u64,
    ) {
        if let Some(record) = self.records.get_mut(&range.first().0) {
            record.unmapped.get_or_insert_with(|| CallSite::now(at, now_ns));
        }
    }

    /// Takes a range that is free now, and calls `free` with the ranges that the allocator gets
    /// instead: the oldest, as far as the bounds demand.
    pub(crate) fn retire(&mut self, range: Range, now_ns: u64, free: &mut impl FnMut(Range)) {
        let bytes = size(range);
        let Some(record) = self.records.get_mut(&range.first().0) else {
            // A map that failed: no device ever got the address.
            return free(range);
        };
        record.unmapped.get_or_insert_with(|| CallSite::now(None, now_ns));
        if self.bounds.ranges == 0 || bytes > self.bounds.bytes.into() {
            // It would evict all others without fitting itself.
            self.records.remove(&range.first().0);
            return free(range);
        }
        self.held.push_back(range);
        self.held_bytes += bytes;
        while self.held.len() > self.bounds.ranges || self.held_bytes > self.bounds.bytes.into() {
            self.release_oldest(free);
        }
    }

    /// Gives everything that is held back to the allocator; returns whether there was anything.
    pub(crate) fn release_all(&mut self, free: &mut impl FnMut(Range)) -> bool {
        let any = !self.held.is_empty();
        while !self.held.is_empty() {
            self.release_oldest(free);
        }
        any
    }

    fn release_oldest(&mut self, free: &mut impl FnMut(Range)) {
        if let Some(oldest) = self.held.pop_front() {
            self.held_bytes -= size(oldest);
            // Removed before it is freed: the next mapping of the range has its own record.
            self.records.remove(&oldest.first().0);
            free(oldest);
        }
    }

    /// The record of the range that contains `iova`.
    pub(crate) fn at(&self, iova: Iova) -> Option<&Record> {
        let (_, record) = self.records.range(..=iova.0).next_back()?;
        record.range.contains(iova).then_some(record)
    }

    /// What is mapped at most `reach` bytes below `iova`.
    pub(crate) fn below(&self, iova: Iova, reach: u64) -> Option<&Record> {
        let (_, record) = self.records.range(..=iova.0).next_back()?;
        let beyond = iova.0.checked_sub(record.range.last().0)?;
        (record.unmapped.is_none() && beyond <= reach).then_some(record)
    }

    /// What is mapped at most `reach` bytes above `iova`.
    pub(crate) fn above(&self, iova: Iova, reach: u64) -> Option<&Record> {
        let (first, record) = self.records.range(iova.0..).next()?;
        (record.unmapped.is_none() && first - iova.0 <= reach).then_some(record)
    }

    /// How many ranges are held back, and how many bytes of address space.
    pub(crate) fn held(&self) -> (u64, u64) {
        (self.held.len() as u64, u64::try_from(self.held_bytes).unwrap_or(u64::MAX))
    }
}

/// How many bytes a range has.
fn size(range: Range) -> u128 {
    u128::from(range.extent()) + 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(ledger: &mut Ledger, range: Range) {
        ledger.mapped(range, Direction::ToDevice, Location::caller(), 1);
    }

    fn pages(first: u64, count: u64) -> Range {
        Range::from_len(Iova(first << 12), count << 12).unwrap()
    }

    #[test]
    fn the_last_address_is_one_like_any_other() {
        let mut ledger = Ledger::new(Detector { ranges: 4, bytes: u64::MAX }, 0x1000);
        let top = Range::new(Iova(u64::MAX - 0xfff), Iova(u64::MAX)).unwrap();
        map(&mut ledger, top);
        assert_eq!(ledger.at(Iova(u64::MAX)).unwrap().range, top);
        assert!(ledger.above(Iova(u64::MAX - 0x1000), 0x1000).is_some());
        assert!(ledger.below(Iova(u64::MAX - 0x1000), 0x1000).is_none());
        ledger.retire(top, 2, &mut |_| panic!("there is room"));
        map(&mut ledger, Range::ALL);
        let mut freed = Vec::new();
        ledger.retire(Range::ALL, 3, &mut |range| freed.push(range));
        // All addresses are one byte more than the bound.
        assert_eq!((freed, ledger.held()), (vec![Range::ALL], (1, 0x1000)));
    }

    #[test]
    fn a_range_larger_than_the_bound_pushes_nothing_out() {
        let mut ledger = Ledger::new(Detector { ranges: 4, bytes: 0x4000 }, 0x1000);
        let mut freed = Vec::new();
        for range in [pages(1, 1), pages(16, 5), pages(32, 4)] {
            map(&mut ledger, range);
            ledger.retire(range, 2, &mut |range| freed.push(range));
        }
        assert_eq!(freed, [pages(16, 5), pages(1, 1)]);
        assert_eq!(ledger.held(), (1, 0x4000));
        assert!(ledger.at(Iova(0x10_000)).is_none());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Map(u64),
        Unmap(usize),
        Exhausted,
        Find(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..8u64).prop_map(Step::Map),
            4 => any::<usize>().prop_map(Step::Unmap),
            1 => Just(Step::Exhausted),
            4 => (0..300u64).prop_map(Step::Find),
        ]
    }

    proptest! {
        // Against two plain lists: of mapped ranges, and of those held back, in order.
        #[test]
        fn it_does_what_two_lists_would_do(
            ranges in 0usize..6,
            bytes in 0u64..0x8000,
            steps in prop::collection::vec(step(), 0..120),
        ) {
            let mut ledger = Ledger::new(Detector { ranges, bytes }, 0x1000);
            let mut live: Vec<Range> = Vec::new();
            let mut held: Vec<Range> = Vec::new();
            for step in steps {
                let mut freed = Vec::new();
                let mut want = Vec::new();
                match step {
                    Step::Map(place) => {
                        // Places of four granules each, with one to four in use.
                        let range = pages(place * 4, place % 4 + 1);
                        if live.iter().chain(&held).any(|taken| taken.overlaps(range)) {
                            continue;
                        }
                        map(&mut ledger, range);
                        live.push(range);
                    }
                    Step::Unmap(at) => {
                        if live.is_empty() {
                            continue;
                        }
                        let range = live.remove(at % live.len());
                        ledger.unmapping(range, None, 2);
                        ledger.retire(range, 3, &mut |range| freed.push(range));
                        if ranges == 0 || size(range) > bytes.into() {
                            want.push(range);
                        } else {
                            held.push(range);
                        }
                        while held.len() > ranges
                            || held.iter().copied().map(size).sum::<u128>() > bytes.into()
                        {
                            want.push(held.remove(0));
                        }
                    }
                    Step::Exhausted => {
                        let any = ledger.release_all(&mut |range| freed.push(range));
                        prop_assert_eq!(any, !held.is_empty());
                        want.append(&mut held);
                    }
                    Step::Find(at) => {
                        let iova = Iova(at << 8);
                        let found = ledger.at(iova).map(|found| {
                            (found.range, found.unmapped.as_ref().map(|mark| mark.ns))
                        });
                        let holds = |range: &&Range| range.contains(iova);
                        let wanted = live.iter().find(holds).map(|range| (*range, None));
                        let wanted =
                            wanted.or_else(|| held.iter().find(holds).map(|r| (*r, Some(2))));
                        prop_assert_eq!(found, wanted);
                        let below = live.iter().find(|range| {
                            range.last() < iova && iova.0 - range.last().0 <= 0x1000
                        });
                        let above = live.iter().find(|range| {
                            range.first() > iova && range.first().0 - iova.0 <= 0x1000
                        });
                        if wanted.is_none() {
                            let ledger_below = ledger.below(iova, 0x1000).map(|r| r.range);
                            prop_assert_eq!(ledger_below, below.copied());
                            let ledger_above = ledger.above(iova, 0x1000).map(|r| r.range);
                            prop_assert_eq!(ledger_above, above.copied());
                        }
                    }
                }
                prop_assert_eq!(freed, want);
                let bytes = held.iter().copied().map(size).sum::<u128>() as u64;
                prop_assert_eq!(ledger.held(), (held.len() as u64, bytes));
            }
        }
    }
}
