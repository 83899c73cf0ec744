//! A link without jobs, for benchmarks of the DMA API between two processes.

use anyhow::{Context, Result};
use ringfence_dma::{Policy, Trust};
use ringfence_drivers::ram::PagedBuffer;
use ringfence_run::worker::Notify;

use super::{
    DiskChoice, Row,
    link::{Link, LinkPath},
    plan::Plan,
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
    let plan = Plan {
        row: Row::Policy(policy),
        allocator: Default::default(),
        space: Space::default(),
        notify,
        tuning: Tuning::default(),
        target: &Target::open(&DiskChoice::Ram, DISK, &[], true, &mut Vec::new())?,
        trust: Trust::described(false),
        queues: 1,
        depth: 1,
        pieces: 1,
        buffers,
        run_pages: 1,
        // Slots that come and go between measurements would be counted as theirs.
        idle_ms: 1 << 30,
    };
    Link::open(&plan).context("starting a device process")
}
