//! Errors of pinning.

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use rustix::io::Errno;

use crate::account::LimitError;

/// Why nothing was pinned or unpinned, or no window added or removed. Everything is then as before
/// the call, except that dirty bits may be left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Not a multiple of the page size, or a range that is empty or passes the last address.
    #[error("{0}, {1:#x} bytes: not whole pages")]
    Misaligned(Iova, u64),
    /// No window has this IOVA.
    #[error("no window has IOVA {0}")]
    NoWindow(Iova),
    /// The window does not allow this.
    #[error("IOVA {iova} is in a window that allows {allowed:?}, not {requested:?}")]
    Denied {
        /// The page.
        iova: Iova,
        /// The access that was requested.
        requested: Prot,
        /// What the window allows.
        allowed: Prot,
    },
    /// The owner would have more memory pinned than it may (rule [L53]).
    ///
    /// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The backing cannot hold more runs.
    #[error("all {0} slots hold a run: pin longer runs, or give the backing more slots")]
    Slots(u32),
    /// The backing cannot hold a page.
    #[error("the page at {addr} for IOVA {iova} cannot be held: {errno}{}", hint(*errno))]
    Hold {
        /// The page.
        iova: Iova,
        /// Where it is in this process.
        addr: HostAddr,
        /// The kernel's error.
        errno: Errno,
    },
    /// The pin count of a page would overflow.
    #[error("IOVA {0} is pinned too often")]
    Count(Iova),
    /// A page to be unpinned is not pinned, or not that often.
    #[error("IOVA {0} is not pinned")]
    NotPinned(Iova),
    /// Another window has some of these IOVAs.
    #[error("{0:?} overlaps another window")]
    Overlap(Range),
    /// The window has pinned pages: those that pinned them must unpin them first (rule [L62]).
    ///
    /// [L62]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l62
    #[error("{pages} pages of {range:?} are pinned")]
    Busy {
        /// The window.
        range: Range,
        /// How many of its pages are pinned.
        pages: u64,
    },
    /// There is no memory for the page counts of a window of this size.
    #[error("no memory to keep count of {0:?}")]
    NoMemory(Range),
}

/// What to do about an error; empty if that is not known.
fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::FAULT => ": it is not memory that can be pinned for writing",
        Errno::NOMEM => {
            ": the kernel has no memory, or its own count is above RLIMIT_MEMLOCK (`ulimit -l`, \
             LimitMEMLOCK=, docker's `--ulimit memlock=`; CAP_IPC_LOCK lifts it)"
        }
        _ => "",
    }
}
