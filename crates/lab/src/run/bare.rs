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
    space::{Dma, Space},
    target::Target,
    tuning::Tuning,
};

/// Bytes of its disk, which is never read.
const DISK: u64 = 1 << 20;

/// A device process that serves a disk and its virtio-iommu, without a load.
pub(crate) struct Bare {
    link: Link,
    paths: Vec<LinkPath>,
}

impl Bare {
    /// Starts one whose disk is untrusted, under `policy`; and buffers of these lengths in guest
    /// memory, each in pages of its own.
    ///
    /// # Errors
    /// The device process cannot be started.
    pub(crate) fn untrusted(
        policy: Policy,
        notify: Notify,
        buffers: Vec<usize>,
    ) -> Result<(Bare, Vec<PagedBuffer>)> {
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
        let (link, paths, buffers) = Link::open(&plan).context("starting a device process")?;
        Ok((Bare { link, paths }, buffers))
    }

    /// The DMA API of its disk.
    pub(crate) fn dma(&self) -> &Dma {
        &self.link.dma
    }

    /// CPU time of the device process so far, in nanoseconds.
    pub(crate) fn device_cpu_ns(&self) -> u64 {
        self.link.device_cpu_ns()
    }

    /// Requests to the virtio-iommu so far.
    pub(crate) fn requests(&self) -> u64 {
        self.link.behind.iommu.stats().requests()
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// The device process failed.
    pub(crate) fn close(self) -> Result<()> {
        drop(self.paths);
        self.link.close().map(drop)
    }
}
