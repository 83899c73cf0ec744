//! Lazy invalidation: unmapped ranges wait in a queue for a flush of the whole domain.
//!
//! * [`counters`]: which flush covers which entry; the core.
//! * [`ring`], [`queues`]: the queues, reaped from the front, opened and closed at run time.
//! * [`budget`]: how many bytes may be exposed in all of them together.
//! * [`timer`], [`pace`]: timely flushes when the queues do not fill.
//! * [`watch`]: reports when an IOVA was released, and keeps it from being reused.

mod budget;
mod counters;
mod lazy;
#[cfg(all(test, loom))]
mod model;
mod pace;
mod queues;
mod ring;
mod timer;
mod watch;

use std::sync::Arc;

use ringfence_iommu::{Range, table::PageList};

pub(crate) use self::{
    lazy::{Lazy, Removed},
    pace::{Pace, bound_ns},
    queues::{Enqueued, FlushQueues},
    ring::{Batch, Queued, Shape},
    timer::Timer,
    watch::Watch,
};

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

impl Queued for Entry {
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn since_ns(&self) -> u64 {
        self.since_ns
    }
    fn is_reserved(&self) -> bool {
        self.reserved
    }
}
