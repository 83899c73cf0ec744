//! Lazy invalidation: what was unmapped waits in a queue for a flush of the whole domain.
//!
//! As Linux tunes it: one queue of 32,768 slots flushed at the latest after a second (`sq`), or a
//! queue of 256 slots per CPU flushed after 10 ms (`mq`).
//!
//! * [`counters`]: which flush covers what; the heart of it.
//! * [`ring`], [`queues`]: the queues, reaped from the front.
//! * [`timer`]: flushes in time when nothing fills the queue.
//! * [`watch`]: lets someone learn when an IOVA was released, and keeps it from being reused.

mod counters;
#[cfg(all(test, loom))]
mod model;
mod queues;
mod ring;
mod timer;
mod watch;

use std::sync::Arc;

use ringfence_iommu::{Range, table::PageList};

pub(crate) use self::{
    queues::{Enqueued, FlushQueues},
    ring::{Batch, Queued},
    timer::Timer,
    watch::Watch,
};

/// Slots of a single queue.
pub(crate) const SINGLE_SLOTS: usize = 32_768;
/// How long a single queue waits, in milliseconds.
pub(crate) const SINGLE_MS: u64 = 1000;
/// Slots of each queue where every CPU has one.
pub(crate) const PER_CPU_SLOTS: usize = 256;
/// How long queues per CPU wait, in milliseconds.
pub(crate) const PER_CPU_MS: u64 = 10;

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
    /// Who wants to know.
    pub(crate) watch: Option<Arc<Watch>>,
}

impl Queued for Entry {
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn since_ns(&self) -> u64 {
        self.since_ns
    }
}
