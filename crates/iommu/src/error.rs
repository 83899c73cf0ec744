//! What can go wrong with a domain.

use core::fmt;

use crate::{Iova, Range};

/// The result of an operation on a domain.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why a domain refused or failed an operation: what was wrong, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address or a size is not a multiple of the granule (rules [L31], [V15]).
    ///
    /// [L31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l31
    /// [V15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v15
    #[error("{range} is not aligned to the granule of {granule:#x} bytes")]
    Unaligned {
        /// The requested range.
        range: Range,
        /// The smallest page of the domain.
        granule: u64,
    },
    /// A mapping would allow neither reads nor writes (rule [L31]).
    ///
    /// [L31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l31
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
    /// Something is mapped there already (rules [L36], [V16]). Nothing was changed.
    ///
    /// [L36]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l36
    /// [V16]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v16
    #[error("{range} overlaps a mapping at {at}")]
    Exists {
        /// The requested range.
        range: Range,
        /// An address of the mapping in the way.
        at: Iova,
    },
    /// The unmap would split a mapping (rules [V22], [L65]). Nothing was removed.
    ///
    /// [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
    /// [L65]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l65
    #[error("{range} would split the mapping at {at}")]
    WouldSplit {
        /// The requested range.
        range: Range,
        /// An address of the mapping that would be split.
        at: Iova,
    },
    /// The domain's limit on table memory or on mappings is reached (rule [L50], V section: NOMEM).
    ///
    /// [L50]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l50
    #[error("the domain is full: {used} of {limit} {what}")]
    Full {
        /// What is limited: "table bytes" or "mappings".
        what: &'static str,
        /// How much is used; of a budget's mappings, how many its tables have taken.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// There is no memory.
    #[error("cannot {operation} {range}: out of memory")]
    NoMemory {
        /// What was to be done, an infinitive.
        operation: &'static str,
        /// The requested range.
        range: Range,
    },
    /// The device replied with an error (for virtio-iommu: the status of its reply).
    #[error("the device refused to {operation} {range}: {}", Status(*.status))]
    Device {
        /// What was to be done, an infinitive.
        operation: &'static str,
        /// The requested range.
        range: Range,
        /// The device's status.
        status: u8,
    },
    /// The kernel failed a call for a reason that is none of the others (VFIO).
    #[error("the kernel refused to {operation} {range}: {}", Errno(*.errno))]
    Kernel {
        /// What was to be done, an infinitive.
        operation: &'static str,
        /// The requested range.
        range: Range,
        /// Linux' error number.
        errno: i32,
    },
    /// The device no longer replies, or its reply violates the protocol.
    #[error("the device is gone or broken: {0}")]
    Gone(&'static str),
    /// The domain cannot do this.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
}

/// Writes a number by its name, if it has one.
fn write(f: &mut fmt::Formatter<'_>, name: Option<&&str>, what: &str, number: i32) -> fmt::Result {
    match name {
        Some(name) => f.write_str(name),
        None => write!(f, "{what} {number}"),
    }
}

/// A status of a virtio-iommu (virtio 1.3, 5.13.6.2).
struct Status(u8);

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 9] =
            ["OK", "IOERR", "UNSUPP", "DEVERR", "INVAL", "RANGE", "NOENT", "FAULT", "NOMEM"];
        write(f, NAMES.get(usize::from(self.0)), "status", self.0.into())
    }
}

/// An error number that the calls of VFIO and iommufd return; those above 34 have other values on
/// Alpha, MIPS, PA-RISC and SPARC.
struct Errno(i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(i32, &str); 18] = [
            (1, "EPERM"),
            (2, "ENOENT"),
            (4, "EINTR"),
            (5, "EIO"),
            (7, "E2BIG"),
            (11, "EAGAIN"),
            (13, "EACCES"),
            (14, "EFAULT"),
            (16, "EBUSY"),
            (17, "EEXIST"),
            (22, "EINVAL"),
            (28, "ENOSPC"),
            (34, "ERANGE"),
            (38, "ENOSYS"),
            (75, "EOVERFLOW"),
            (90, "EMSGSIZE"),
            (95, "EOPNOTSUPP"),
            (98, "EADDRINUSE"),
        ];
        let name = NAMES.iter().find(|(number, _)| *number == self.0);
        write(f, name.map(|(_, name)| name), "error number", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn numbers_are_printed_by_name() {
        let range = Range::new(Iova(0), Iova(0xfff)).unwrap();
        let operation = "map";
        let device = |status| Error::Device { operation, range, status }.to_string();
        assert_eq!(device(8), "the device refused to map [0x0, 0xfff]: NOMEM");
        assert_eq!(device(9), "the device refused to map [0x0, 0xfff]: status 9");
        let kernel = |errno| Error::Kernel { operation, range, errno }.to_string();
        assert_eq!(kernel(95), "the kernel refused to map [0x0, 0xfff]: EOPNOTSUPP");
        assert_eq!(kernel(105), "the kernel refused to map [0x0, 0xfff]: error number 105");
    }
}
