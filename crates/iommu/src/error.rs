//! What can go wrong with a domain.

use crate::{Iova, Range};

/// The result of an operation on a domain.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why a domain refused or failed an operation: what was wrong, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address or a size is not a multiple of the granule (rules L31, V15).
    #[error("{range} is not aligned to the granule of {granule:#x} bytes")]
    Unaligned {
        /// The requested range.
        range: Range,
        /// The smallest page of the domain.
        granule: u64,
    },
    /// A mapping would allow neither reads nor writes (rule L31).
    #[error("the mapping of {0} has neither read nor write permission")]
    NoPermission(Range),
    /// The target address plus the size passes 2^64.
    #[error("the target of {0} would pass the end of the address space")]
    TargetOverflow(Range),
    /// Outside what the domain can map.
    #[error("{range} lies outside the aperture {aperture}")]
    OutsideAperture {
        /// The requested range.
        range: Range,
        /// What can be mapped.
        aperture: Range,
    },
    /// In a reserved region.
    #[error("{range} overlaps the reserved region {reserved}")]
    Reserved {
        /// The requested range.
        range: Range,
        /// The region.
        reserved: Range,
    },
    /// Something is mapped there already (rules L36, V16). Nothing was changed.
    #[error("{range} overlaps a mapping at {at}")]
    Exists {
        /// The requested range.
        range: Range,
        /// An address of the mapping in the way.
        at: Iova,
    },
    /// The unmap would split a mapping (rules V22, L65). Nothing was removed.
    #[error("{range} would split the mapping at {at}")]
    WouldSplit {
        /// The requested range.
        range: Range,
        /// An address of the mapping that would be split.
        at: Iova,
    },
    /// The domain's limit on table memory or on mappings is reached (rule L50, V section: NOMEM).
    #[error("the domain is full: {used} of {limit} {what}")]
    Full {
        /// What is limited: "table bytes" or "mappings".
        what: &'static str,
        /// How much is used.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// There is no memory.
    #[error("out of memory")]
    NoMemory,
    /// The device replied with an error (for virtio-iommu: the status of its reply).
    #[error("the device refused {range}: status {status}")]
    Device {
        /// The requested range.
        range: Range,
        /// The device's status.
        status: u8,
    },
    /// The device no longer replies, or its reply violates the protocol.
    #[error("the device is gone or broken: {0}")]
    Gone(&'static str),
    /// The domain cannot do this.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
}
