//! A link without jobs, for benchmarks of the DMA API between two processes.

use std::sync::Arc;

use anyhow::{Context, Result};
use ringfence_dma::{Policy, Trust};
use ringfence_drivers::{blk::Batching, ram::PagedBuffer};
use ringfence_run::worker::Notify;

use super::{
    DiskChoice,
    link::{Link, LinkPath},
    plan::{Plan, Way},
    space::Space,
    target::Target,
    tuning::Tuning,
};

/// Bytes of its disk, which is never read.
const DISK: u64 = 1 << 20;

/// Starts a device process that serves an untrusted disk and its virtio-iommu, under `policy` and
/// without a load; and buffers of these lengths in guest memory, each in pages of its own.
///
/// # Errors
/// The device process cannot be started.
pub(crate) fn untrusted(
    policy: Policy,
    notify: Notify,
    buffers: Vec<usize>,
) -> Result<(Link, Vec<LinkPath>, Vec<PagedBuffer>)> {
    let target = Target::open(&DiskChoice::Ram, DISK, &[], true)?;
    let plan = Plan {
        policy,
        way: Way::Streaming,
        lazy_domain: false,
        proxied: false,
        allocator: Default::default(),
        space: Space::default(),
        notify,
        kind: target.kind,
        disk: Arc::clone(&target.file),
        disk_bytes: target.bytes,
        queues: 1,
        depth: 1,
        pieces: 1,
        buffers,
        run_pages: 1,
        tuning: Tuning::default(),
        trust: Trust::described(false),
        batching: Batching::default(),
        // Slots that come and go between measurements would be counted as theirs.
        idle_ms: 1 << 30,
    };
    Link::open(&plan).context("starting a device process")
}
