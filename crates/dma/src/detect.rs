//! Detecting use after unmap.
//!
//! If a device goes on using a buffer after its unmap, the device or its driver has a bug; under a
//! strict policy the access is refused, and the IOMMU's driver gets a [`Fault`] with an address but
//! no cause. With a [`Detector`] in the configuration, the device's allocator gets freed addresses
//! back only after a while, so that the address still identifies its mapping, and
//! [`Device::explain`](crate::Device::explain) reports where that was made and where it was
//! unmapped.

use core::{
    fmt::{self, Display},
    panic::Location,
    time::Duration,
};
use std::{
    collections::{BTreeMap, VecDeque},
    thread::{self, Thread},
};

use ringfence_iommu::{Fault, FaultReason, Iova, Prot, Range};

use crate::Direction;

/// How much address space the detector holds back. The oldest range goes back to the allocator
/// first, and all of them when the allocator has nothing else; their records are dropped then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detector {
    /// How many unmapped ranges at most.
    pub ranges: usize,
    /// How many bytes of address space at most. A range that alone is larger is not held back.
    pub bytes: u64,
}

impl Default for Detector {
    /// 4096 ranges, 1 GiB of addresses.
    fn default() -> Detector {
        Detector { ranges: 4096, bytes: 1 << 30 }
    }
}

/// A place in the program, with time and thread.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CallSite {
    /// Where; `None` if that is not known, as for the drop of a mapping.
    pub at: Option<&'static Location<'static>>,
    /// When, by the environment's clock, in nanoseconds.
    pub ns: u64,
    /// The thread that did it.
    pub thread: Thread,
}

impl CallSite {
    fn now(at: Option<&'static Location<'static>>, ns: u64) -> CallSite {
        CallSite { at, ns, thread: thread::current() }
    }
}

/// What a refused access was, as far as the detector knows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Explained {
    /// The access.
    pub fault: Fault,
    /// The addresses of the mapping, in whole granules.
    pub range: Range,
    /// The direction of the mapping.
    pub direction: Direction,
    /// Where it was mapped.
    pub mapped: CallSite,
    /// What was wrong with the access.
    pub cause: Cause,
}

/// Why an access was refused.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The device used a buffer that had been unmapped.
    UseAfterUnmap {
        /// Where it was unmapped.
        unmapped: CallSite,
        /// How long before the explanation, in nanoseconds. The access itself was earlier than the
        /// explanation.
        age_ns: u64,
    },
    /// The access violates the direction of a mapped buffer.
    WrongDirection,
    /// The device went past the end or the beginning of a mapped buffer, by at most a granule of
    /// the allocator.
    OutOfBounds,
    /// The address is mapped, with this permission. The device may have used it before the map had
    /// returned, or hit a pad between two pieces that keeps segments from crossing a boundary.
    Mapped,
}

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
    granule: u64,
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
        let bytes = range.len();
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
            self.held_bytes -= oldest.len();
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

impl Ledger {
    /// Explains a fault; `None` if no record relates to it.
    pub(crate) fn explain(&self, fault: &Fault, now_ns: u64) -> Option<Explained> {
        if fault.reason == FaultReason::NoDomain {
            return None;
        }
        let (record, cause) = match self.at(fault.iova) {
            Some(record) => {
                let cause = match &record.unmapped {
                    Some(unmapped) => Cause::UseAfterUnmap {
                        unmapped: unmapped.clone(),
                        age_ns: now_ns.saturating_sub(unmapped.ns),
                    },
                    None if record.direction.prot().contains(fault.access) => Cause::Mapped,
                    None => Cause::WrongDirection,
                };
                (record, cause)
            }
            // The fault's address may be the first beyond the mapping, after an access that began
            // within; or the last one before it.
            None => {
                let below = self.below(fault.iova, self.granule);
                let beside = below.or_else(|| self.above(fault.iova, self.granule))?;
                (beside, Cause::OutOfBounds)
            }
        };
        let &Record { range, direction, ref mapped, .. } = record;
        Some(Explained { fault: *fault, range, direction, mapped: mapped.clone(), cause })
    }
}

impl Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            Some(at) => write!(f, "at {}:{}", at.file(), at.line())?,
            None => f.write_str("by a drop")?,
        }
        match self.thread.name() {
            Some(name) => write!(f, ", thread {name:?}"),
            None => write!(f, ", {:?}", self.thread.id()),
        }
    }
}

impl Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explained { fault, range, direction, mapped, cause } = self;
        let Fault { endpoint, access, iova: Iova(iova), .. } = *fault;
        let verb = match (access.contains(Prot::READ), access.contains(Prot::WRITE)) {
            (true, false) => "read",
            (false, true) => "wrote",
            (true, true) => "read and wrote",
            (false, false) => "used",
        };
        let (access, first) =
            (format_args!("endpoint {endpoint} {verb} {iova:#x}"), range.first().0);
        match cause {
            Cause::UseAfterUnmap { unmapped, age_ns } => write!(
                f,
                "use after unmap: {access}, {:#x} into {range}, at most {} after it was unmapped \
                 {unmapped} (mapped {mapped})",
                iova.saturating_sub(first),
                format_args!("{:.0?}", Duration::from_nanos(*age_ns))
            ),
            Cause::WrongDirection => {
                let only = match direction {
                    Direction::ToDevice => "only to be read",
                    Direction::FromDevice => "only to be written",
                    Direction::Bidirectional => "to be read and written",
                };
                write!(f, "wrong direction: {access}; {range} is {only} (mapped {mapped})")
            }
            Cause::OutOfBounds => {
                let (by, side) = match iova.checked_sub(range.last().0) {
                    Some(beyond) => (beyond, "beyond"),
                    None => (first.saturating_sub(iova), "before"),
                };
                write!(f, "out of bounds: {access}, {by:#x} bytes {side} {range} (mapped {mapped})")
            }
            Cause::Mapped => write!(
                f,
                "{access}, which is mapped now; it came before {range} was (mapped {mapped}), or \
                 hit a pad in it"
            ),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn fault(iova: u64, access: Prot) -> Fault {
        Fault { reason: FaultReason::Mapping, endpoint: 7, iova: Iova(iova), access }
    }

    fn range() -> Range {
        Range::new(Iova(0x10_000), Iova(0x11_fff)).unwrap()
    }

    /// A detector with one mapping, and the place where that was made.
    fn detector(direction: Direction) -> (Ledger, String) {
        let mut detector = Ledger::new(Detector::default(), 0x1000);
        let here = Location::caller();
        detector.mapped(range(), direction, here, 1_000);
        (detector, format!("{}:{}", here.file(), here.line()))
    }

    #[test]
    fn a_use_after_unmap_report_names_both_places_and_its_greatest_age() {
        let (mut detector, mapped) = detector(Direction::FromDevice);
        let here = Location::caller();
        detector.unmapping(range(), Some(here), 2_000);
        detector.retire(range(), 2_500, &mut |_| panic!("there is room"));
        let explained = detector.explain(&fault(0x11_234, Prot::WRITE), 3_002_000).unwrap();
        let Cause::UseAfterUnmap { unmapped, age_ns } = &explained.cause else {
            panic!("{explained}")
        };
        assert_eq!((*age_ns, explained.range), (3_000_000, range()));
        assert_eq!((explained.mapped.ns, unmapped.ns), (1_000, 2_000));
        let thread = thread::current();
        let thread = thread.name().unwrap();
        assert_eq!(
            explained.to_string(),
            format!(
                "use after unmap: endpoint 7 wrote 0x11234, 0x1234 into {}, at most 3ms after it \
                 was unmapped at {}:{}, thread {thread:?} (mapped at {mapped}, thread {thread:?})",
                range(),
                here.file(),
                here.line()
            )
        );
    }

    #[test]
    fn an_unmap_by_a_drop_is_reported_as_one_without_a_place() {
        let (mut detector, _) = detector(Direction::ToDevice);
        detector.unmapping(range(), None, 2_000);
        // The unmap is not over yet, but the device already faulted on it.
        let text = detector.explain(&fault(0x10_000, Prot::READ), 2_900).unwrap().to_string();
        assert!(text.contains("at most 900ns after it was unmapped by a drop"), "{text}");
    }

    #[test]
    fn live_mappings_explain_what_they_do_not_allow() {
        let (detector, _) = detector(Direction::ToDevice);
        let explain = |iova, access| detector.explain(&fault(iova, access), 5_000);
        let found = explain(0x10_004, Prot::WRITE).unwrap();
        assert!(matches!(found.cause, Cause::WrongDirection), "{found}");
        assert!(found.to_string().contains("only to be read"), "{found}");
        assert!(matches!(explain(0x10_004, Prot::RW).unwrap().cause, Cause::WrongDirection));
        assert!(matches!(explain(0x10_004, Prot::READ).unwrap().cause, Cause::Mapped));
        let found = explain(0x12_000, Prot::READ).unwrap();
        assert!(matches!(found.cause, Cause::OutOfBounds), "{found}");
        assert!(found.to_string().contains("0x1 bytes beyond"), "{found}");
        let found = explain(0xf_ff8, Prot::READ).unwrap();
        assert!(found.to_string().contains("0x8 bytes before"), "{found}");
        // Too far from any mapping: no explanation.
        assert!(explain(0x13_000, Prot::READ).is_none());
        assert!(explain(0xe_fff, Prot::READ).is_none());
        assert!(explain(0, Prot::READ).is_none());
        assert!(explain(u64::MAX, Prot::READ).is_none());
        let unattached = Fault { reason: FaultReason::NoDomain, ..fault(0x10_004, Prot::WRITE) };
        assert!(detector.explain(&unattached, 5_000).is_none());
    }

    #[test]
    fn what_is_given_back_to_the_allocator_is_forgotten() {
        let (mut detector, _) = detector(Direction::ToDevice);
        detector.unmapping(range(), None, 2_000);
        detector.retire(range(), 2_000, &mut |_| panic!("there is room"));
        assert_eq!(detector.held(), (1, 0x2000));
        assert!(detector.explain(&fault(0x10_000, Prot::READ), 3_000).is_some());
        let mut freed = Vec::new();
        assert!(detector.release_all(&mut |range| freed.push(range)));
        assert_eq!((freed, detector.held()), (vec![range()], (0, 0)));
        assert!(detector.explain(&fault(0x10_000, Prot::READ), 3_000).is_none());
        assert!(!detector.release_all(&mut |_| panic!("nothing is left")));
    }
}

#[cfg(all(test, not(loom)))]
mod ledger {
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
                        if ranges == 0 || range.len() > bytes.into() {
                            want.push(range);
                        } else {
                            held.push(range);
                        }
                        while held.len() > ranges
                            || held.iter().map(|range| range.len()).sum::<u128>() > bytes.into()
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
                let bytes = held.iter().map(|range| range.len()).sum::<u128>() as u64;
                prop_assert_eq!(ledger.held(), (held.len() as u64, bytes));
            }
        }
    }
}
