//! A state of the model: what the threads share, and where each of them is.

/// A domain and a page: the table has one entry for each.
pub(crate) type At = (u8, u8);

/// [`Scope::ALL`](ringfence_iommu::shootdown::Scope::ALL); that of domain d is d + 1.
pub(crate) const ALL: u8 = 0;
/// The logged range of all pages.
pub(crate) const EVERY: u8 = 0b11;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) table: [[bool; 2]; 2],
    /// One table page for each domain.
    pub(crate) pages: [Page; 2],
    pub(crate) epoch: u8,
    /// Each range is a set of pages, a bit each.
    pub(crate) log: Vec<u8>,
    pub(crate) claimed: u8,
    pub(crate) written: u8,
    pub(crate) locked: bool,
    pub(crate) pending: Vec<Entry>,
    /// Where the endpoint of reader 0 is bound, and how often that was changed.
    pub(crate) bound: u8,
    pub(crate) changes: u8,
    pub(crate) readers: Vec<Reader>,
    pub(crate) writers: Vec<Writer>,
    /// Translations whose unmap has completed.
    pub(crate) gone: [[bool; 2]; 2],
    /// The change of the binding has completed.
    pub(crate) rebound: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Page {
    Linked,
    Deferred,
    /// Taken by the writer, which has not started the grace period yet.
    Taken(u8),
    Limbo(u8),
    Freed,
}

/// An invalidation that waits, or several that were merged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) first: u8,
    pub(crate) last: u8,
    pub(crate) scope: u8,
    pub(crate) gone: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reader {
    pub(crate) bound: u8,
    pub(crate) changes: u8,
    pub(crate) scope: u8,
    /// Its slot: 0 while offline.
    pub(crate) seen: u8,
    pub(crate) last: u8,
    pub(crate) replayed: u8,
    pub(crate) cache: [bool; 2],
    /// The translation in use since the last quiet point.
    pub(crate) held: Option<At>,
    /// It is inside the table page of this domain, on the way to this entry.
    pub(crate) walk: Option<At>,
    pub(crate) lease: Option<Lease>,
    pub(crate) step: Step,
}

/// Asynchronous I/O, and the lease that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lease {
    pub(crate) on: At,
    /// The epoch in its slot; 0: none is entered there.
    pub(crate) mark: u8,
    pub(crate) scope: u8,
    pub(crate) parked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Working,
    /// At a quiet point, before the epoch is loaded.
    Quiet,
    /// A change of the binding was seen; the next step is to follow it.
    Rebinding {
        then: Then,
    },
    Entering {
        then: Then,
    },
    Loaded {
        epoch: u8,
        waking: bool,
    },
    Reading {
        epoch: u8,
        waking: bool,
        from: u8,
        end: u8,
        word: Option<u8>,
    },
    Replayed {
        epoch: u8,
        all: bool,
    },
    Asleep,
    Waking,
    WakingAt {
        epoch: u8,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Then {
    Work,
    Load,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Writer {
    pub(crate) step: Writing,
    /// The entry has left the table, or the change of the binding is counted.
    pub(crate) removed: bool,
    pub(crate) grace: u8,
    pub(crate) position: u8,
    /// Readers that the scan has passed, a bit each.
    pub(crate) passed: u8,
    pub(crate) looked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Writing {
    Idle,
    Removed,
    Took,
    Locked,
    Claimed,
    Wrote,
    Logged,
    Waiting,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Job {
    Unmap(At),
    Bind(u8),
}

impl Job {
    pub(crate) fn scope(self) -> u8 {
        match self {
            Job::Unmap((domain, _)) => domain + 1,
            Job::Bind(_) => ALL,
        }
    }

    pub(crate) fn range(self) -> u8 {
        match self {
            Job::Unmap((_, page)) => 1 << page,
            Job::Bind(_) => EVERY,
        }
    }
}
