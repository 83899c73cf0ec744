//! What a sync is for, its token and its proof.

use crate::Range;

/// What a sync ensures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work<'a> {
    /// The device can use what was mapped in these ranges before.
    Map(&'a [Range]),
    /// No device access succeeds to what was unmapped in these ranges before.
    Unmap {
        /// The ranges.
        ranges: &'a [Range],
        /// Whether the caller unmapped everything in them. Otherwise parts may be another thread's,
        /// and a failure reported to this sync is reported to that thread's too.
        exact: bool,
    },
    /// No device access succeeds to anything that was unmapped before.
    All,
}

/// Names a sync that was begun on a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncToken(u64);

impl SyncToken {
    /// A sync that was over as soon as it began, and succeeded.
    pub const DONE: SyncToken = SyncToken(0);

    /// A token with a number of the domain's choice; 0 is [`DONE`](Self::DONE).
    #[inline]
    pub const fn new(number: u64) -> SyncToken {
        SyncToken(number)
    }

    /// The number, for the domain that made the token.
    #[inline]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

/// The proof that a sync of a domain is over and succeeded: without it an I/O virtual address is
/// not used again, and a buffer not given back. Only the syncs of this crate make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced(());

impl Synced {
    pub(crate) const PROOF: Synced = Synced(());
}
