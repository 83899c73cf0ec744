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
    time::Duration,
};
use std::thread::{self, Thread};

use ringfence_iommu::{Fault, FaultReason, Iova, Prot, Range};

pub(crate) use self::ledger::Ledger;
use self::ledger::Record;
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
    /// The device went beyond a mapped buffer, by less than a granule of the allocator.
    OutOfBounds,
    /// The address is mapped, with this permission. The device may have used it before the map had
    /// returned, or hit a pad between two pieces that keeps segments from crossing a boundary.
    Mapped,
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
