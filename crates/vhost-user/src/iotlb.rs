//! The messages of the device IOTLB, the same in both directions.

use ringfence_mem::Access;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An IOTLB message as it goes over the wire: 32 bytes, of which the last 6 are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IotlbWire {
    /// The first I/O virtual address.
    pub iova: u64,
    /// How many bytes (update, invalidate).
    pub size: u64,
    /// The address of `iova` in the front end's process (update).
    pub user_addr: u64,
    /// 0 nothing, 1 read, 2 write, 3 both.
    pub perm: u8,
    /// 1 miss, 2 update, 3 invalidate, 4 access-fail.
    pub kind: u8,
    /// Ignored.
    pub padding: [u8; 6],
}

const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
const ACCESS_FAIL: u8 = 4;

/// A device IOTLB message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iotlb {
    /// A miss of the back end's IOTLB (rule [D16]).
    ///
    /// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
    Miss {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
    /// An IOTLB update (rule [D5]).
    ///
    /// [D5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d5
    Update {
        /// Its first address.
        first: u64,
        /// Its last address, inclusive.
        last: u64,
        /// The address of `first` in the front end's process; the range does not wrap there
        /// either.
        user_addr: u64,
        /// What it permits; `None`: nothing.
        access: Option<Access>,
    },
    /// An invalidation (rule [D6]).
    ///
    /// [D6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d6
    Invalidate {
        /// The first address.
        first: u64,
        /// The last address, inclusive.
        last: u64,
    },
    /// There is a translation, but not for this access (rule [D16]).
    ///
    /// [D16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d16
    AccessFail {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
}

/// Why an IOTLB message is refused (rule [D14]): with a reply; the connection goes on.
///
/// [D14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d14
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadIotlb {
    /// An unknown type.
    #[error("IOTLB message of type {0}: 1 (miss) to 4 (access-fail) are known")]
    Kind(u8),
    /// Permissions other than 0 to 3, or none where some are needed.
    #[error("IOTLB message with permissions {0}: 1 to 3 are valid, and 0 in an update")]
    Perm(u8),
    /// A range of zero bytes.
    #[error("IOTLB message about zero bytes: it takes at least one")]
    Empty,
    /// A range that passes the end of the address space.
    #[error("IOTLB message about {size:#x} bytes at {addr:#x}, which pass 2^64")]
    Wraps {
        /// Where the range begins.
        addr: u64,
        /// How long it is.
        size: u64,
    },
}

impl IotlbWire {
    /// Reads the message. Fields that its type does not use are ignored: in the invalidations of
    /// real front ends they are garbage.
    ///
    /// # Errors
    /// See [`BadIotlb`].
    pub fn parse(&self) -> Result<Iotlb, BadIotlb> {
        let &IotlbWire { iova, size, user_addr, perm, kind, .. } = self;
        let access = match perm {
            0 => Ok(None),
            1 => Ok(Some(Access::Read)),
            2 => Ok(Some(Access::Write)),
            3 => Ok(Some(Access::ReadWrite)),
            _ => Err(BadIotlb::Perm(perm)),
        };
        let last = |addr: u64| match size.checked_sub(1) {
            None => Err(BadIotlb::Empty),
            Some(more) => addr.checked_add(more).ok_or(BadIotlb::Wraps { addr, size }),
        };
        Ok(match kind {
            MISS => Iotlb::Miss { iova, access: access?.ok_or(BadIotlb::Perm(perm))? },
            UPDATE => {
                last(user_addr)?;
                Iotlb::Update { first: iova, last: last(iova)?, user_addr, access: access? }
            }
            INVALIDATE => Iotlb::Invalidate { first: iova, last: last(iova)? },
            ACCESS_FAIL => Iotlb::AccessFail { iova, access: access?.ok_or(BadIotlb::Perm(perm))? },
            _ => return Err(BadIotlb::Kind(kind)),
        })
    }
}

impl Iotlb {
    /// The message as it goes over the wire; `None` if its range cannot be written: `last` is below
    /// `first`, or it is [0, 2^64-1] with a size of 2^64 (see [`halves`](Self::halves)).
    pub fn emit(&self) -> Option<IotlbWire> {
        let wire = |kind, iova, size, user_addr, access: Option<Access>| IotlbWire {
            iova,
            size,
            user_addr,
            perm: access
                .map_or(0, |access| u8::from(access.reads()) | u8::from(access.writes()) << 1),
            kind,
            padding: [0; 6],
        };
        let size = |first: u64, last: u64| last.checked_sub(first)?.checked_add(1);
        Some(match *self {
            Iotlb::Miss { iova, access } => wire(MISS, iova, 0, 0, Some(access)),
            Iotlb::Update { first, last, user_addr, access } => {
                wire(UPDATE, first, size(first, last)?, user_addr, access)
            }
            Iotlb::Invalidate { first, last } => {
                wire(INVALIDATE, first, size(first, last)?, 0, None)
            }
            Iotlb::AccessFail { iova, access } => wire(ACCESS_FAIL, iova, 0, 0, Some(access)),
        })
    }

    /// The message, split in two if it covers all of [0, 2^64-1], whose size does not fit the field
    /// (rule [D30]).
    ///
    /// [D30]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d30
    pub fn halves(self) -> impl Iterator<Item = Iotlb> {
        const MIDDLE: u64 = 1 << 63;
        let (one, two) = match self {
            Iotlb::Invalidate { first: 0, last: u64::MAX } => (
                Iotlb::Invalidate { first: 0, last: MIDDLE - 1 },
                Some(Iotlb::Invalidate { first: MIDDLE, last: u64::MAX }),
            ),
            // With any other `user_addr` such an update would wrap.
            Iotlb::Update { first: 0, last: u64::MAX, user_addr: 0, access } => (
                Iotlb::Update { first: 0, last: MIDDLE - 1, user_addr: 0, access },
                Some(Iotlb::Update { first: MIDDLE, last: u64::MAX, user_addr: MIDDLE, access }),
            ),
            other => (other, None),
        };
        core::iter::once(one).chain(two)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wire(kind: u8, iova: u64, size: u64, user_addr: u64, perm: u8) -> IotlbWire {
        IotlbWire { iova, size, user_addr, perm, kind, padding: [0xaa; 6] }
    }

    #[test]
    fn an_update_carries_its_range_its_target_and_its_permission() {
        assert_eq!(size_of::<IotlbWire>(), 32);
        let update = Iotlb::Update {
            first: 0x1000,
            last: 0x1fff,
            user_addr: 0x7000,
            access: Some(Access::ReadWrite),
        };
        assert_eq!(wire(2, 0x1000, 0x1000, 0x7000, 3).parse(), Ok(update));
    }

    #[test]
    fn an_invalidation_is_read_for_its_range_only() {
        // rule D6
        let invalidate = Iotlb::Invalidate { first: 0x1000, last: 0x1fff };
        assert_eq!(wire(3, 0x1000, 0x1000, u64::MAX, 0xff).parse(), Ok(invalidate));
    }

    #[test]
    fn a_miss_and_an_access_failure_carry_an_address_and_a_permission() {
        // rule D16
        let access = Access::Write;
        assert_eq!(wire(1, 5, 0, 0, 2).parse(), Ok(Iotlb::Miss { iova: 5, access }));
        assert_eq!(wire(4, 5, 0, 0, 2).parse(), Ok(Iotlb::AccessFail { iova: 5, access }));
        assert_eq!(wire(1, 5, 0, 0, 0).parse(), Err(BadIotlb::Perm(0)));
    }

    #[test]
    fn impossible_messages_are_refused() {
        for kind in [0, 5, 6, 255] {
            assert_eq!(wire(kind, 0, 1, 0, 3).parse(), Err(BadIotlb::Kind(kind)));
        }
        assert_eq!(wire(2, 0, 1, 0, 4).parse(), Err(BadIotlb::Perm(4)));
        assert_eq!(wire(2, 0, 0, 0, 3).parse(), Err(BadIotlb::Empty));
        assert_eq!(wire(3, 0, 0, 0, 3).parse(), Err(BadIotlb::Empty));
        assert!(matches!(wire(2, u64::MAX, 2, 0, 3).parse(), Err(BadIotlb::Wraps { .. })));
        assert!(matches!(wire(2, 0, 2, u64::MAX, 3).parse(), Err(BadIotlb::Wraps { .. })));
        assert!(matches!(wire(3, 2, u64::MAX, 0, 0).parse(), Err(BadIotlb::Wraps { .. })));
        // The last byte of the address space is an address like others.
        assert!(wire(3, 1, u64::MAX, 0, 0).parse().is_ok());
    }

    #[test]
    fn the_whole_address_space_is_sent_in_two_halves() {
        // rule D30
        let whole = Iotlb::Invalidate { first: 0, last: u64::MAX };
        assert_eq!(whole.emit(), None);
        let halves: Vec<_> = whole.halves().map(|half| half.emit().unwrap()).collect();
        assert_eq!(halves.len(), 2);
        assert_eq!((halves[0].iova, halves[0].size), (0, 1 << 63));
        assert_eq!((halves[1].iova, halves[1].size), (1 << 63, 1 << 63));
        let update = Iotlb::Update { first: 0, last: u64::MAX, user_addr: 0, access: None };
        let halves: Vec<_> = update.halves().map(|half| half.emit().unwrap()).collect();
        assert!(halves.iter().all(|half| half.parse().is_ok() && half.iova == half.user_addr));
        let most = Iotlb::Invalidate { first: 1, last: u64::MAX };
        assert_eq!(most.halves().count(), 1);
    }

    proptest! {
        #[test]
        fn what_can_be_read_is_written_the_same(
            kind in 0..6u8,
            iova in prop_oneof![any::<u64>(), 0..10u64, (u64::MAX - 10)..=u64::MAX],
            size in prop_oneof![any::<u64>(), 0..10u64, (u64::MAX - 10)..=u64::MAX],
            user_addr in prop_oneof![any::<u64>(), 0..10u64],
            perm in 0..5u8,
        ) {
            if let Ok(message) = wire(kind, iova, size, user_addr, perm).parse() {
                let again = message.emit().unwrap();
                prop_assert_eq!(again.parse(), Ok(message));
                prop_assert_eq!((again.kind, again.iova), (kind, iova));
            }
        }
    }
}
