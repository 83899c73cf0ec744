//! The state of a lazy policy.

use parking_lot::Mutex;
use ringfence_iommu::table::PageList;

use super::{Entry, FlushQueues, Pace, Timer};

/// The state of a lazy policy. A strict device has it too, closed and without memory, so that it
/// can become lazy.
pub(crate) struct Lazy {
    pub(crate) queues: FlushQueues<Entry>,
    pub(crate) pace: Pace,
    pub(crate) timer: Timer,
    /// Held by the thread that flushes because the bound of bytes is reached, so that one flush
    /// serves all.
    pub(crate) at_bound: Mutex<()>,
}

/// Translations that were removed, but are not in a queue yet.
pub(crate) struct Removed {
    /// When.
    pub(crate) since_ns: u64,
    /// Table pages that were unlinked with them.
    pub(crate) pages: PageList,
}

impl Lazy {
    pub(crate) fn new(rings: usize) -> Lazy {
        Lazy {
            queues: FlushQueues::new(rings),
            pace: Pace::new(),
            timer: Timer::new(),
            at_bound: Mutex::new(()),
        }
    }
}
