//! What a link is for.

use ringfence_dma::{BounceConfig, Policy, Trust, Written};
use ringfence_run::worker::Notify;

use super::{Row, space::Space, target::Target, tuning::Tuning};
use crate::allocators::AllocatorKind;

const PAGE: usize = 4096;
/// Addresses of guest memory for bounce slots, at the least. No page of it is used before it is
/// needed.
const POOLS: usize = 512 << 20;

/// What a link is for.
#[derive(Clone)]
pub(crate) struct Plan<'a> {
    /// What runs through it: how the memory of a job's I/O is mapped, under which policy, in what
    /// kind of domain, and whether a proxy stands before the device process.
    pub(crate) row: Row,
    /// The allocator of I/O virtual addresses, and their space.
    pub(crate) allocator: AllocatorKind,
    pub(crate) space: Space,
    pub(crate) notify: Notify,
    /// How the policy is carried out.
    pub(crate) tuning: Tuning,
    /// The disk, and whether it is trusted.
    pub(crate) target: &'a Target,
    pub(crate) trust: Trust,
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
    /// How long unused bounce slots are kept, milliseconds.
    pub(crate) idle_ms: u64,
}

impl Plan<'_> {
    /// Whether there is an IOMMU between the jobs and the disk.
    pub(super) fn is_protected(&self) -> bool {
        self.row.policy() != Policy::Off
    }

    /// Whether every buffer must have a slot of the bounce pools.
    fn must_bounce(&self) -> bool {
        self.row == Row::ZeroCopy || self.trust != Trust::Trusted
    }

    /// Addresses of guest memory that the bounce pools need; 0 if there are none.
    pub(super) fn pool_bytes(&self) -> usize {
        let pools = self.row.policy().bounces() || self.must_bounce();
        // Half for reads and half for writes, which do not share slots.
        if pools { POOLS.max(2 * self.slot_bytes()) } else { 0 }
    }

    /// Bytes of the slots that hold all buffers at once.
    fn slot_bytes(&self) -> usize {
        self.buffers.iter().map(|len| len.next_multiple_of(PAGE).next_power_of_two()).sum()
    }

    /// How the disk bounces.
    pub(super) fn bounce(&self) -> BounceConfig {
        let BounceConfig { threshold, quota, .. } = BounceConfig::default();
        // Without a fallback every buffer must have a slot: the default quota grows until the job
        // fits.
        let needed = if self.must_bounce() { self.slot_bytes() as u64 } else { 0 };
        BounceConfig {
            threshold: self.tuning.bounce_threshold.unwrap_or(threshold),
            quota: self.tuning.bounce_quota.unwrap_or(quota.max(needed)),
            written: Written::Reported,
        }
    }
}
