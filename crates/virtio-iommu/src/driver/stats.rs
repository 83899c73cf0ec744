//! What a driver counts.

pub use ringfence_sync::histogram::{Histogram, HistogramSnapshot};

/// What a driver has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// MAP requests sent.
    pub maps: u64,
    /// UNMAP requests sent.
    pub unmaps: u64,
    /// Other requests sent.
    pub others: u64,
    /// Sync points: `iotlb_sync_map`, `iotlb_sync`, `flush_iotlb_all`.
    pub syncs: u64,
    /// Times a thread found the ring full and had to wait.
    pub ring_full: u64,
    /// Notifications sent to the device.
    pub kicks: u64,
    /// Requests that the device did not answer with OK.
    pub errors: u64,
    /// How long sync points waited, in nanoseconds.
    pub sync_wait_ns: HistogramSnapshot,
}

impl Stats {
    /// All requests sent.
    pub fn requests(&self) -> u64 {
        self.maps + self.unmaps + self.others
    }

    /// What was done after `earlier`, taken from the same driver.
    pub fn since(&self, earlier: &Stats) -> Stats {
        Stats {
            maps: self.maps - earlier.maps,
            unmaps: self.unmaps - earlier.unmaps,
            others: self.others - earlier.others,
            syncs: self.syncs - earlier.syncs,
            ring_full: self.ring_full - earlier.ring_full,
            kicks: self.kicks - earlier.kicks,
            errors: self.errors - earlier.errors,
            sync_wait_ns: self.sync_wait_ns.since(&earlier.sync_wait_ns),
        }
    }
}
