//! What a link is for.

use std::{os::fd::OwnedFd, sync::Arc};

use ringfence_dma::{BounceConfig, Policy, Trust, Written};
use ringfence_drivers::blk::Batching;
use ringfence_run::worker::Notify;

use super::{device::DiskKind, space::Space, tuning::Tuning};
use crate::allocators::AllocatorKind;

const PAGE: usize = 4096;
/// Addresses of guest memory for bounce slots, at the least. No page of it is used before it is
/// needed.
const POOLS: usize = 512 << 20;

/// How the memory of a job's I/O is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As the policy says, for one I/O at a time.
    Streaming,
    /// All of it once, for as long as the job runs.
    Persistent,
    /// It is memory of the bounce pools, which is mapped already.
    ZeroCopy,
}

/// What a link is for.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) policy: Policy,
    pub(crate) way: Way,
    /// Whether the domain is lazy.
    pub(crate) lazy_domain: bool,
    /// Whether a proxy stands before the device process.
    pub(crate) proxied: bool,
    /// The allocator of I/O virtual addresses, and their space.
    pub(crate) allocator: AllocatorKind,
    pub(crate) space: Space,
    pub(crate) notify: Notify,
    pub(crate) kind: DiskKind,
    pub(crate) disk: Arc<OwnedFd>,
    pub(crate) disk_bytes: u64,
    /// Queues, with a job thread and a worker each.
    pub(crate) queues: u16,
    /// Requests in flight in each queue.
    pub(crate) depth: usize,
    /// The most pieces that a buffer lies in.
    pub(crate) pieces: usize,
    /// How long each buffer is.
    pub(crate) buffers: Vec<usize>,
    /// Pages of a buffer that lie side by side in guest memory.
    pub(crate) run_pages: usize,
    /// How the policy is carried out.
    pub(crate) tuning: Tuning,
    /// Whether the disk is trusted.
    pub(crate) trust: Trust,
    /// How requests share mappings and syncs.
    pub(crate) batching: Batching,
    /// How long unused bounce slots are kept, milliseconds.
    pub(crate) idle_ms: u64,
}

impl Plan {
    /// Addresses of guest memory that the bounce pools need; 0 if there are none.
    pub(super) fn pool_bytes(&self) -> usize {
        let pools =
            self.policy.bounces() || self.trust != Trust::Trusted || self.way == Way::ZeroCopy;
        // Half for reads and half for writes, which do not share slots.
        if pools { POOLS.max(2 * self.slot_bytes()) } else { 0 }
    }

    /// Bytes of the slots that hold all buffers at once.
    fn slot_bytes(&self) -> usize {
        self.buffers.iter().map(|len| len.next_multiple_of(PAGE).next_power_of_two()).sum()
    }

    /// How the disk bounces.
    pub(super) fn bounce(&self) -> BounceConfig {
        let default = BounceConfig::default();
        // Without a fallback every buffer must have a slot: the default quota grows until the job
        // fits.
        let must = self.way == Way::ZeroCopy || self.trust != Trust::Trusted;
        let quota = if must { default.quota.max(self.slot_bytes() as u64) } else { default.quota };
        BounceConfig {
            threshold: self.tuning.bounce_threshold.unwrap_or(default.threshold),
            quota: self.tuning.bounce_quota.unwrap_or(quota),
            written: Written::Reported,
        }
    }
}
