//! The driver process's side of a link: the device process, its queues, the buffers of jobs.

use std::{
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    process::ExitStatus,
    sync::Arc,
};

use anyhow::{Context, Result};
use ringfence_dma::{BounceLimits, Direction, DmaConfig};
use ringfence_drivers::{
    blk::{DriverQueue, QueueLayout},
    ram::PagedBuffer,
};
use ringfence_mem::GuestRam;
use ringfence_run::event;
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::{F_EVENT_IDX, F_INDIRECT_DESC, blk::feature};

use super::{
    Row,
    device::{Report, Served},
    figures::Stock,
    mapped::VirtioPath,
    path::Path,
    plan::Plan,
    probe::Probe,
    process::Process,
    proxied::Proxied,
    standing::{Memory, StandingPath},
    viommu::{Behind, GUEST_BASE, Setup, front_end, start_ring},
};
use crate::random::SplitMix;

/// On average one map and one unmap call in so many is timed.
const SAMPLE_EVERY: u32 = 64;
const PAGE: usize = 4096;
/// The most runs of pages that buffers are scattered in.
const MOST_RUNS: usize = 30_000;

/// A way to the device process.
pub(crate) type LinkPath = Box<dyn Path + Send>;

/// A link to a running device process.
pub(crate) struct Link {
    pub(crate) behind: Behind<Process>,
    queues: u16,
    proxy: Option<Proxied>,
}

impl Link {
    /// Starts a device process and brings everything up; returns a path for each queue, without
    /// buffers for data yet.
    pub(crate) fn open(plan: &Plan<'_>) -> Result<(Link, Vec<LinkPath>, Vec<PagedBuffer>)> {
        let Plan { row, notify, target, queues, .. } = *plan;
        let policy = row.policy();
        let streams = !row.stays_mapped();
        // A chain, even through an indirect table, is never longer than its queue.
        let queue_size = plan.depth.max(plan.pieces + 2).next_power_of_two().min(1024) as u16;
        let layout = QueueLayout::new(queue_size, plan.pieces);
        let rings = std::iter::repeat_n(layout.bytes(), queues.into());
        let rings_bytes: usize = rings.clone().map(|len| len.next_multiple_of(PAGE)).sum();
        let mut lens = plan.buffers.clone();
        // A page for each queue's probe.
        if streams {
            lens.extend(std::iter::repeat_n(PAGE, queues.into()));
        }
        let max_bytes = plan.pool_bytes() as u64;
        let setup = Setup {
            name: "disk",
            bytes: pages_of(&lens) * PAGE + rings_bytes,
            config: DmaConfig {
                policy,
                sample_every: SAMPLE_EVERY,
                flush: Some(plan.tuning.flush(policy)),
                trust: plan.trust,
                bounce: plan.bounce(),
                ..DmaConfig::default()
            },
            limits: BounceLimits { max_bytes, idle_ms: plan.idle_ms, ..BounceLimits::default() },
            notify,
            lazy: matches!(row, Row::LazyDomain(_)),
        };
        let allocator = |domain: &ViommuDomain| {
            let mapped: Vec<usize> = lens.iter().copied().chain(rings).collect();
            plan.space.of_domain(plan.allocator, domain, &mapped, policy.is_lazy())
        };
        let mut proxy = None;
        let start = |iommu: UnixStream| {
            let file = target.file.as_raw_fd();
            let served = Served::Disk { file, kind: target.kind, bytes: target.bytes };
            let (front, device) = match row {
                Row::Proxy => {
                    let (started, front, device) = Proxied::start(notify)?;
                    proxy = Some(started);
                    (front, device)
                }
                _ => front_end()?,
            };
            Ok((Process::start(served, queues, notify, device.into(), iommu.into())?, front))
        };
        let mut behind = Behind::open(setup, allocator, start)?;

        // Without FLUSH each write would be made durable by itself, which `host` does not do.
        let features = feature::FLUSH | F_EVENT_IDX | F_INDIRECT_DESC;
        behind.agree(features, ProtocolFeatures::MQ | ProtocolFeatures::CONFIG, "virtio-blk")?;
        let mut drivers = Vec::new();
        for index in 0..queues {
            let (window, bus, base) = behind.ring_memory(layout.bytes())?;
            let (kick, call) = (Arc::new(event::new()?), Arc::new(event::new()?));
            let (kicks, calls) = (Arc::clone(&kick), Arc::clone(&call));
            drivers.push(DriverQueue::new(layout, &window, bus, kicks, calls, notify)?);
            let (kick, call) = (kick.as_fd(), Some(call.as_fd()));
            start_ring(&mut behind.front, index, queue_size, base, kick, call)
                .with_context(|| format!("starting queue {index}"))?;
        }

        let dma = &behind.dma;
        let mut buffers = scatter(&behind.ram, &lens, plan.run_pages)?;
        let mut registered = None;
        if row == Row::Persistent {
            let first = buffers.first().context("a buffer to map")?;
            // SAFETY: a job thread touches a buffer only while no request of that buffer is in
            // flight, and the paths and their requests are gone before the arena is dropped.
            let arena = unsafe { first.arena() };
            let arena = dma.map_persistent(arena, Direction::Bidirectional);
            registered = Some(Arc::new(arena.context("mapping the buffers")?));
        }
        let mut paths: Vec<LinkPath> = Vec::new();
        for queue in drivers {
            if streams {
                let page = buffers.pop().context("a page for each probe")?;
                // The policy in force: it may be another for an untrusted device.
                let strict = dma.effective_policy().is_strict();
                let probe = plan.is_protected().then(|| Probe::new(page, strict));
                paths.push(Box::new(VirtioPath::new(dma.clone(), queue, probe, &plan.tuning)));
                continue;
            }
            let memory =
                registered.clone().map_or_else(|| Memory::Pools(dma.clone()), Memory::Registered);
            paths.push(Box::new(StandingPath::new(memory, queue)));
        }
        Ok((Link { behind, queues, proxy }, paths, buffers))
    }

    /// CPU time of the device process so far, and of its proxy, in nanoseconds.
    pub(crate) fn device_cpu_ns(&self) -> u64 {
        let proxy = self.proxy.as_ref().map_or(0, |proxy| proxy.process.lock().cpu_ns());
        self.behind.peer.cpu_ns() + proxy
    }

    /// How the device process, or its proxy, ended, if it has: none should before the sockets are hung
    /// up.
    pub(crate) fn lost(&self) -> Option<(&'static str, ExitStatus)> {
        let proxy = self.proxy.as_ref().and_then(|proxy| proxy.process.lock().ended());
        let proxy = proxy.map(|how| ("proxy", how));
        proxy.or_else(|| self.behind.peer.ended().map(|how| ("device process", how)))
    }

    /// What was counted so far.
    pub(super) fn stock(&self) -> Stock {
        let Behind { dma, iommu, .. } = &self.behind;
        Stock { dma: dma.stats(), waits: dma.waits(), iommu: iommu.stats() }
    }

    /// Ends the link in order: stops the rings, frees their memory, hangs up, and reads the device
    /// process's report.
    pub(crate) fn close(mut self) -> Result<Report> {
        for index in 0..self.queues {
            self.behind.front.get_vring_base(index).context("stopping a queue")?;
        }
        self.behind.hang_up()?;
        self.behind.peer.finish()
    }
}

/// Pages of guest memory as an application that has run for a while has them: side by side for the
/// CPU, scattered in physical memory, in runs of `run` pages. The order is the same in every run of
/// the program.
pub(crate) fn scatter(ram: &Arc<GuestRam>, lens: &[usize], run: usize) -> Result<Vec<PagedBuffer>> {
    let pages = pages_of(lens);
    let first = ram.carve(pages * PAGE, PAGE)? / PAGE;
    // Each run is a mapping of its own, and the kernel bounds these (vm.max_map_count, 65,530).
    let run = run.max(pages.div_ceil(MOST_RUNS)).max(1);
    let mut runs: Vec<usize> = (0..pages).step_by(run).collect();
    SplitMix(0x9e37_79b9_7f4a_7c15).shuffle(&mut runs);
    let frames: Vec<u64> = runs
        .into_iter()
        .flat_map(|start| start..(start + run).min(pages))
        .map(|page| ((first + page) * PAGE) as u64)
        .collect();
    let view = ram.scattered(&frames).context("mapping the buffers")?;
    Ok(PagedBuffer::cut(view, lens.iter().copied()))
}

/// Buffers of these lengths in memory of their own, laid out as those of a link are.
pub(crate) fn local_buffers(lens: &[usize], run: usize) -> Result<Vec<PagedBuffer>> {
    let ram = GuestRam::new(pages_of(lens) * PAGE, GUEST_BASE).context("making the buffers")?;
    scatter(&ram, lens, run)
}

fn pages_of(lens: &[usize]) -> usize {
    lens.iter().map(|len| len.div_ceil(PAGE)).sum::<usize>().max(1)
}
