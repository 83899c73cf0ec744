//! Lazy invalidation: unmapped ranges wait in a queue for a flush of the whole domain.
//!
//! * [`counters`]: which flush covers which entry; the core.
//! * [`ring`], [`queues`]: the queues, reaped from the front, opened and closed at run time.
//! * [`budget`]: how many bytes may be exposed in all of them together.
//! * [`timer`], [`pace`]: timely flushes when the queues do not fill.
//! * [`Watch`]: reports when an IOVA was released, and keeps it from being reused.

mod budget;
mod counters;
#[cfg(all(test, loom))]
mod model;
mod pace;
mod queues;
mod ring;
mod timer;

use std::sync::Arc;

use ringfence_iommu::{Range, table::PageList};
use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::Mutex,
};

pub(crate) use self::{
    pace::{Pace, bound_ns},
    queues::FlushQueues,
    ring::{Batch, Enqueued, Shape},
    timer::Timer,
};

/// The IOVA range of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// All of it, in whole granules, pads included.
    pub(crate) range: Range,
    /// How many bytes of it are mapped.
    pub(crate) mapped: u64,
}

/// The state of a lazy policy. A strict device has it too, closed and without memory, so that it
/// can become lazy.
pub(crate) struct Lazy {
    pub(crate) queues: FlushQueues,
    pub(crate) pace: Pace,
    pub(crate) timer: Timer,
    /// Held by the thread that flushes because the bound of bytes is reached, so that one flush
    /// serves all.
    pub(crate) at_bound: Mutex<()>,
}

impl Lazy {
    pub(crate) fn new(rings: usize) -> Lazy {
        Lazy {
            queues: FlushQueues::new(rings),
            pace: Pace::new(),
            timer: Timer::named("ringfence-flush"),
            at_bound: Mutex::new(()),
        }
    }
}

/// Translations that were removed, but are not in a queue yet.
pub(crate) struct Removed {
    /// When.
    pub(crate) since_ns: u64,
    /// Table pages that were unlinked with them.
    pub(crate) pages: PageList,
}

/// An unmapped range that waits for its flush.
pub(crate) struct Entry {
    /// The range, in whole granules of the domain.
    pub(crate) range: Range,
    /// How many bytes of it were mapped.
    pub(crate) bytes: u64,
    /// When its translation was removed.
    pub(crate) since_ns: u64,
    /// Table pages that were unlinked with it (rule L21).
    pub(crate) pages: PageList,
    /// The watcher of the IOVA, if there is one.
    pub(crate) watch: Option<Arc<Watch>>,
    /// Whether its bytes were reserved from the budget.
    pub(crate) reserved: bool,
}

/// Neither released nor unwatched yet.
const WAITING: u64 = 0;
/// The watcher is gone.
const UNWATCHED: u64 = u64::MAX;

/// Shared by the flush queue and a watcher of one of its entries. The IOVA goes back to the
/// allocator when both are done with it; the second one gives it back.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// When the translation was removed.
    pub(crate) since_ns: u64,
    /// [`WAITING`], [`UNWATCHED`], or the time of the release plus one.
    state: AtomicU64,
}

impl Watch {
    /// Of an IOVA whose translation was removed then.
    pub(crate) fn new(since_ns: u64) -> Arc<Watch> {
        Arc::new(Watch { since_ns, ..Watch::default() })
    }

    /// Records that the flush has finished. Returns whether the caller must give back the IOVA.
    #[must_use]
    pub(crate) fn release(&self, now_ns: u64) -> bool {
        let released = now_ns.saturating_add(1).min(UNWATCHED - 1);
        // The second of the two threads sees all that the first has done. Nothing came before WAITING.
        self.state
            .compare_exchange(WAITING, released, Ordering::Release, Ordering::Acquire)
            .is_err()
    }

    /// Records that the watcher is gone. Returns whether the caller must give back the IOVA.
    #[must_use]
    pub(crate) fn unwatch(&self) -> bool {
        self.state.swap(UNWATCHED, Ordering::AcqRel) != WAITING
    }

    /// When the release was.
    pub(crate) fn released_at_ns(&self) -> Option<u64> {
        match self.state.load(Ordering::Acquire) {
            WAITING | UNWATCHED => None,
            released => Some(released - 1),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_flush_and_watcher_gives_the_iova_back() {
        let watch = Watch::default();
        assert_eq!(watch.released_at_ns(), None);
        assert!(!watch.release(0));
        assert_eq!(watch.released_at_ns(), Some(0));
        assert!(watch.unwatch());

        let watch = Watch::default();
        assert!(!watch.unwatch());
        assert!(watch.release(5));
    }
}
