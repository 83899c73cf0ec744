//! Why memory could not be made or mapped.

use std::io;

/// Why memory could not be made, shared or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// A region, a memory or a piece of zero bytes.
    #[error("memory of zero bytes")]
    Empty,
    /// A table without a region.
    #[error("a memory table without a region")]
    NoRegions,
    /// More regions than a memory holds.
    #[error("{count} memory regions; at most {max} are supported")]
    TooManyRegions {
        /// How many were given.
        count: usize,
        /// How many are allowed.
        max: usize,
    },
    /// More bytes than may be mapped for one peer.
    #[error(
        "{size:#x} bytes of memory to be mapped for one connection, which may have {most:#x} of this process's address \
         space: share less, or serve the device by a process of its own"
    )]
    TooManyBytes {
        /// How many there would be.
        size: u64,
        /// How many there may be.
        most: u64,
    },
    /// An address or an offset plus the size passes 2^64 (or, for the offset, 2^62).
    #[error("a region of {size:#x} bytes at {what} {addr:#x} passes the end")]
    Wraps {
        /// Which of the region's addresses.
        what: &'static str,
        /// Where the region begins there.
        addr: u64,
        /// How many bytes it has.
        size: u64,
    },
    /// Two regions share addresses.
    #[error("two regions overlap at {what} {addr:#x}")]
    Overlap {
        /// Which of the regions' addresses.
        what: &'static str,
        /// The first address that both have.
        addr: u64,
    },
    /// An address, an offset or a size that is no multiple of the page size.
    #[error("{what} {value:#x} is not a multiple of {align:#x}")]
    Misaligned {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it must be a multiple of.
        align: u64,
    },
    /// The file ends before the region does.
    #[error("a region ends at offset {needed:#x} of a file of {actual:#x} bytes")]
    FileTooShort {
        /// How long the file must be.
        needed: u64,
        /// How long it is.
        actual: u64,
    },
    /// The file is on a file system (disk, network, FUSE) that may take long to provide a page.
    #[error("the file is not memory: it must be a memfd, or on tmpfs or hugetlbfs")]
    NotMemory,
    /// A piece that does not lie within the memory.
    #[error("{len:#x} bytes at offset {offset:#x} pass the end of {size:#x} bytes")]
    OutOfBounds {
        /// Where the piece begins.
        offset: u64,
        /// How long it is.
        len: u64,
        /// How long the memory is.
        size: u64,
    },
    /// No room is left to carve a piece from.
    #[error("no room for {len:#x} bytes: {left:#x} are left")]
    Full {
        /// How many bytes were wanted; padding for their alignment comes on top.
        len: u64,
        /// How many are left.
        left: u64,
    },
    /// A scattered view would need more mappings than the kernel allows a process.
    #[error(
        "a view of {pages} scattered pages needs {mappings} mappings; a process may have {max} \
         (raise it with sysctl vm.max_map_count, or use larger runs of pages)"
    )]
    TooManyMappings {
        /// How many pages.
        pages: usize,
        /// How many mappings they need.
        mappings: usize,
        /// How many the kernel allows.
        max: usize,
    },
    /// No region begins at the guest-physical address with this size.
    #[error("no region of {size:#x} bytes begins at {gpa:#x}")]
    NoSuchRegion {
        /// The guest-physical address.
        gpa: u64,
        /// The size.
        size: u64,
    },
    /// More mappings are watched for truncation than the registry holds.
    #[error("more than {max} memory regions are mapped in this process")]
    RegistryFull {
        /// How many it holds.
        max: usize,
    },
    /// The operating system refused a call.
    #[error("{what}: {source}")]
    Os {
        /// The call.
        what: &'static str,
        /// The error that it returned.
        source: io::Error,
    },
}

impl MemError {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> MemError {
        move |errno| MemError::Os { what, source: errno.into() }
    }
}
