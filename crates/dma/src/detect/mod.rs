//! Detecting use after unmap.
//!
//! If a device goes on using a buffer after its unmap, the device or its driver has a bug; under a
//! strict policy the access is refused, and the IOMMU's driver gets a [`Fault`] with an address but
//! no cause. With a [`Detector`] in the configuration, the device's allocator gets freed addresses
//! back only after a while, so that the address still identifies its mapping, and
//! [`Device::explain`](crate::Device::explain) reports where that was made and where it was
//! unmapped.

mod ledger;

use core::{
    fmt::{self, Display},
    panic::Location,
};
use std::thread::{self, Thread};

use parking_lot::Mutex;
use ringfence_iommu::{Fault, FaultReason, Iova, Prot, Range};

use self::ledger::{Ledger, Mark, Record};
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
pub struct CallSite {
    /// Where; `None` if that is not known, as for the drop of a mapping.
    pub at: Option<&'static Location<'static>>,
    /// When, by the environment's clock, in nanoseconds.
    pub ns: u64,
    /// The thread that did it.
    pub thread: Thread,
}

/// What a refused access was, as far as the detector knows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Explained {
    /// The device used a buffer that had been unmapped.
    UseAfterUnmap(UseAfterUnmap),
    /// The access violates the direction of a mapped buffer.
    WrongDirection(Misuse),
    /// The device went beyond a mapped buffer, by less than a granule of the allocator.
    OutOfBounds(Misuse),
    /// The address is mapped, with this permission. The device may have used it before the map had
    /// returned, or hit a pad between two pieces that keeps segments from crossing a boundary.
    Mapped(Misuse),
}

/// An access to an unmapped buffer.
#[derive(Clone, Debug)]
pub struct UseAfterUnmap {
    /// The access.
    pub fault: Fault,
    /// The addresses of the former mapping, in whole granules.
    pub range: Range,
    /// The direction of the former mapping.
    pub direction: Direction,
    /// Where it was mapped.
    pub mapped: CallSite,
    /// Where it was unmapped.
    pub unmapped: CallSite,
    /// How long before the explanation it was unmapped, in nanoseconds. The access itself was
    /// earlier than the explanation.
    pub age_ns: u64,
}

/// An access that relates to a mapping but is not allowed by it.
#[derive(Clone, Debug)]
pub struct Misuse {
    /// The access.
    pub fault: Fault,
    /// The addresses of the mapping, in whole granules.
    pub range: Range,
    /// The direction of the mapping.
    pub direction: Direction,
    /// Where it was mapped.
    pub mapped: CallSite,
}

/// The detector of a device: its records, and a lock.
#[derive(Debug)]
pub(crate) struct DetectorState {
    ledger: Mutex<Ledger>,
    /// The allocator's granule.
    granule: u64,
}

impl DetectorState {
    pub(crate) fn new(bounds: Detector, granule: u64) -> Box<DetectorState> {
        Box::new(DetectorState { ledger: Mutex::new(Ledger::new(bounds)), granule })
    }

    /// Records a mapping before its user gets the address.
    pub(crate) fn mapped(
        &self,
        range: Range,
        direction: Direction,
        at: &'static Location<'static>,
        now_ns: u64,
    ) {
        let mapped = Mark { at: Some(at), ns: now_ns, thread: thread::current() };
        self.ledger.lock().map(Record { range, direction, mapped, unmapped: None });
    }

    /// Records an unmap that begins.
    pub(crate) fn unmapping(
        &self,
        range: Range,
        at: Option<&'static Location<'static>>,
        now_ns: u64,
    ) {
        self.ledger.lock().unmap(range, Mark { at, ns: now_ns, thread: thread::current() });
    }

    /// Takes a range that was unmapped, and calls `free` with the ranges that may be allocated
    /// again.
    pub(crate) fn retire(&self, range: Range, now_ns: u64, free: &mut impl FnMut(Range)) {
        let mark = Mark { at: None, ns: now_ns, thread: thread::current() };
        self.ledger.lock().retire(range, mark, free);
    }

    /// Calls `free` with all that is held back; returns whether there was anything.
    pub(crate) fn release_all(&self, free: &mut impl FnMut(Range)) -> bool {
        self.ledger.lock().release_all(free)
    }

    /// How many ranges are held back, and how many bytes of address space.
    pub(crate) fn held(&self) -> (u64, u64) {
        self.ledger.lock().held()
    }

    /// Explains a fault; `None` if no record relates to it.
    pub(crate) fn explain(&self, fault: &Fault, now_ns: u64) -> Option<Explained> {
        if fault.reason == FaultReason::NoDomain {
            return None;
        }
        let ledger = self.ledger.lock();
        let fault = *fault;
        let misuse = |record: &Record| Misuse {
            fault,
            range: record.range,
            direction: record.direction,
            mapped: place(&record.mapped),
        };
        let Some(record) = ledger.at(fault.iova) else {
            // The fault's address may be the first beyond the mapping, after an access that began
            // within; or the last one before it.
            let beside = ledger.below(fault.iova, self.granule);
            let beside = beside.or_else(|| ledger.above(fault.iova, self.granule));
            return beside.map(|record| Explained::OutOfBounds(misuse(record)));
        };
        Some(match &record.unmapped {
            Some(unmapped) => Explained::UseAfterUnmap(UseAfterUnmap {
                fault,
                range: record.range,
                direction: record.direction,
                mapped: place(&record.mapped),
                unmapped: place(unmapped),
                age_ns: now_ns.saturating_sub(unmapped.ns),
            }),
            None if record.direction.prot().contains(fault.access) => {
                Explained::Mapped(misuse(record))
            }
            None => Explained::WrongDirection(misuse(record)),
        })
    }
}

fn place(mark: &Mark) -> CallSite {
    CallSite { at: mark.at, ns: mark.ns, thread: mark.thread.clone() }
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

/// "endpoint 7 read 0x1000".
struct AccessText(Fault);

impl Display for AccessText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { endpoint, access, iova, .. } = self.0;
        let read = access.contains(Prot::READ);
        let verb = match (read, access.contains(Prot::WRITE)) {
            (true, false) => "read",
            (false, true) => "wrote",
            (true, true) => "read and wrote",
            (false, false) => "used",
        };
        write!(f, "endpoint {endpoint} {verb} {:#x}", iova.0)
    }
}

/// A time span in readable form.
struct Age(u64);

impl Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "us"),
            1_000_000..1_000_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        write!(f, "{} {name}", self.0 / unit)
    }
}

impl Display for UseAfterUnmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let offset = self.fault.iova.0.saturating_sub(self.range.first().0);
        write!(
            f,
            "use after unmap: {}, {offset:#x} into {}, at most {} after it was unmapped {} \
             (mapped {})",
            AccessText(self.fault),
            self.range,
            Age(self.age_ns),
            self.unmapped,
            self.mapped
        )
    }
}

impl Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Explained::UseAfterUnmap(used) => used.fmt(f),
            Explained::WrongDirection(Misuse { fault, range, direction, mapped }) => {
                let only = match direction {
                    Direction::ToDevice => "only to be read",
                    Direction::FromDevice => "only to be written",
                    Direction::Bidirectional => "to be read and written",
                };
                write!(
                    f,
                    "wrong direction: {}; {range} is {only} (mapped {mapped})",
                    AccessText(*fault)
                )
            }
            Explained::OutOfBounds(Misuse { fault, range, mapped, .. }) => {
                let (by, side) = beside(*range, fault.iova);
                write!(
                    f,
                    "out of bounds: {}, {by:#x} bytes {side} {range} (mapped {mapped})",
                    AccessText(*fault)
                )
            }
            Explained::Mapped(Misuse { fault, range, mapped, .. }) => write!(
                f,
                "{}, which is mapped now; it came before {range} was (mapped {mapped}), or hit a \
                 pad in it",
                AccessText(*fault)
            ),
        }
    }
}

/// How far from a range an address lies, and on which side.
fn beside(range: Range, iova: Iova) -> (u64, &'static str) {
    match iova.0.checked_sub(range.last().0) {
        Some(beyond) => (beyond, "beyond"),
        None => (range.first().0.saturating_sub(iova.0), "before"),
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
    fn detector(direction: Direction) -> (Box<DetectorState>, String) {
        let detector = DetectorState::new(Detector::default(), 0x1000);
        let here = Location::caller();
        detector.mapped(range(), direction, here, 1_000);
        (detector, format!("{}:{}", here.file(), here.line()))
    }

    #[test]
    fn a_use_after_unmap_report_names_both_places_and_its_greatest_age() {
        let (detector, mapped) = detector(Direction::FromDevice);
        let here = Location::caller();
        detector.unmapping(range(), Some(here), 2_000);
        detector.retire(range(), 2_500, &mut |_| panic!("there is room"));
        let explained = detector.explain(&fault(0x11_234, Prot::WRITE), 3_002_000).unwrap();
        let Explained::UseAfterUnmap(used) = &explained else { panic!("{explained}") };
        assert_eq!((used.age_ns, used.range), (3_000_000, range()));
        assert_eq!((used.mapped.ns, used.unmapped.ns), (1_000, 2_000));
        let thread = thread::current();
        let thread = thread.name().unwrap();
        assert_eq!(
            explained.to_string(),
            format!(
                "use after unmap: endpoint 7 wrote 0x11234, 0x1234 into {}, at most 3 ms after it \
                 was unmapped at {}:{}, thread {thread:?} (mapped at {mapped}, thread {thread:?})",
                range(),
                here.file(),
                here.line()
            )
        );
    }

    #[test]
    fn an_unmap_by_a_drop_is_reported_as_one_without_a_place() {
        let (detector, _) = detector(Direction::ToDevice);
        detector.unmapping(range(), None, 2_000);
        // The unmap is not over yet, but the device already faulted on it.
        let text = detector.explain(&fault(0x10_000, Prot::READ), 2_900).unwrap().to_string();
        assert!(text.contains("at most 900 ns after it was unmapped by a drop"), "{text}");
    }

    #[test]
    fn live_mappings_explain_what_they_do_not_allow() {
        let (detector, _) = detector(Direction::ToDevice);
        let explain = |iova, access| detector.explain(&fault(iova, access), 5_000);
        let found = explain(0x10_004, Prot::WRITE).unwrap();
        assert!(matches!(found, Explained::WrongDirection(_)), "{found}");
        assert!(found.to_string().contains("only to be read"), "{found}");
        assert!(matches!(explain(0x10_004, Prot::RW).unwrap(), Explained::WrongDirection(_)));
        assert!(matches!(explain(0x10_004, Prot::READ).unwrap(), Explained::Mapped(_)));
        let found = explain(0x12_000, Prot::READ).unwrap();
        assert!(matches!(found, Explained::OutOfBounds(_)), "{found}");
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
        let (detector, _) = detector(Direction::ToDevice);
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
