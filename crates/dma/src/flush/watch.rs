//! Watching an unmapped IOVA until it is released.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Neither released nor unwatched yet.
const WAITING: u64 = 0;
/// The watcher is gone.
const UNWATCHED: u64 = u64::MAX;

/// Shared by the flush queue and a watcher of one of its entries. The IOVA goes back to the
/// allocator when both are done with it; the second one gives it back.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// [`WAITING`], [`UNWATCHED`], or the time of the release plus one.
    state: AtomicU64,
}

impl Watch {
    /// Records that the flush has finished. Returns whether the caller must give back the IOVA.
    #[must_use]
    pub(crate) fn release(&self, now_ns: u64) -> bool {
        let released = now_ns.saturating_add(1).min(UNWATCHED - 1);
        self.state.compare_exchange(WAITING, released, Ordering::AcqRel, Ordering::Acquire).is_err()
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

/// An IOVA after its unmap, for a watcher.
#[derive(Debug)]
pub(crate) struct Unmapped {
    pub(crate) since_ns: u64,
    pub(crate) watch: Arc<Watch>,
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
