//! What the kernel's error numbers mean to a domain, and how dirty bits are read.

use ringfence_iommu::{Error, Range, Result};
use rustix::io::Errno;

use crate::{
    DirtyMap,
    kernel::{Bitmap, Locked},
};

/// Lets `read` set the dirty bits of a piece, in pages of `page` bytes, and marks them in `map`,
/// even if it fails.
pub(crate) fn collect(
    piece: Range,
    page: u64,
    map: &mut DirtyMap,
    read: impl FnOnce(Bitmap<'_>) -> Result<()>,
) -> Result<()> {
    let dirty = DirtyMap::new(piece, page);
    let mut dirty = dirty.ok_or(Error::Unaligned { range: piece, granule: page })?;
    let result = read(Bitmap { page, words: dirty.words_mut() });
    dirty.trim();
    map.merge(&dirty);
    result
}

/// The error for an error number that concerns neither limits nor mappings, of `operation`, an
/// infinitive.
pub(crate) fn lost(operation: &'static str, errno: Errno, range: Range) -> Error {
    match errno {
        Errno::NOTTY | Errno::BADF | Errno::NODEV | Errno::NXIO => {
            Error::Gone("the kernel no longer knows the address space")
        }
        Errno::NOMEM => Error::NoMemory { operation, range },
        errno => Error::Kernel { operation, range, errno: errno.raw_os_error() },
    }
}

/// The error for a refused map, given what is left of the limits.
pub(crate) fn refused(
    errno: Errno,
    range: Range,
    entries: u64,
    available: Option<u64>,
    locked: Option<Locked>,
) -> Error {
    match errno {
        Errno::EXIST => Error::Exists { range, at: range.first() },
        Errno::NOSPC => Error::Full {
            what: "mappings of the kernel's (vfio_iommu_type1.dma_entry_limit)",
            used: entries,
            limit: entries.saturating_add(available.unwrap_or(0)),
        },
        Errno::NOMEM => match locked {
            Some(Locked { used, limit }) if u128::from(used) + range.len() > limit.into() => {
                Error::Full { what: "bytes of locked memory (ulimit -l)", used, limit }
            }
            _ => lost("map", errno, range),
        },
        errno => lost("map", errno, range),
    }
}
