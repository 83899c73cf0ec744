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
    /// Whatever the sender had there.
    pub padding: [u8; 6],
}

const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
const ACCESS_FAIL: u8 = 4;

/// A message of the device IOTLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iotlb {
    /// The back end lacks a translation (rule D16).
    Miss {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
    /// A translation (rule D5).
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
    /// Translations that are no longer true (rule D6).
    Invalidate {
        /// The first address.
        first: u64,
        /// The last address, inclusive.
        last: u64,
    },
    /// There is a translation, but not for this access (rule D16).
    AccessFail {
        /// The address.
        iova: u64,
        /// For which access.
        access: Access,
    },
}

/// Why an IOTLB message is refused (rule D14): by an answer, the connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadIotlb {
    /// A type that is not known.
    #[error("IOTLB message of unknown type {0}")]
    Kind(u8),
    /// Permissions other than 0 to 3, or none where some are needed.
    #[error("IOTLB message with permissions {0}")]
    Perm(u8),
    /// A range of zero bytes.
    #[error("IOTLB message about zero bytes")]
    Empty,
    /// A range that passes the end of the address space.
    #[error("IOTLB message about {size:#x} bytes at {addr:#x}")]
    Wraps {
        /// Where the range begins.
        addr: u64,
        /// How long it is.
        size: u64,
    },
}

impl IotlbWire {
    /// Reads the message. What a type has no use for is not looked at: in the invalidations of
    /// real front ends it is garbage.
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
    /// The message as it goes over the wire; `None` if its range cannot be written: [0, 2^64-1]
    /// has a size of 2^64. See [`halves`](Self::halves).
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

    /// The message, in two if it is about all of [0, 2^64-1], which one cannot say (rule D30).
    pub fn halves(self) -> impl Iterator<Item = Iotlb> {
        const MIDDLE: u64 = 1 << 63;
        let (one, two) = match self {
            Iotlb::Invalidate { first: 0, last: u64::MAX } => (
                Iotlb::Invalidate { first: 0, last: MIDDLE - 1 },
                Some(Iotlb::Invalidate { first: MIDDLE, last: u64::MAX }),
            ),
            // Only with `user_addr` 0 does such an update not wrap.
            Iotlb::Update { first: 0, last: u64::MAX, user_addr: 0, access } => (
                Iotlb::Update { first: 0, last: MIDDLE - 1, user_addr: 0, access },
                Some(Iotlb::Update { first: MIDDLE, last: u64::MAX, user_addr: MIDDLE, access }),
            ),
            other => (other, None),
        };
        core::iter::once(one).chain(two)
    }
}
