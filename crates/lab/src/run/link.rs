//! The driver process's side of a link: guest memory, the device process, both front ends, the
//! DMA API.

use std::{
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    process::ExitStatus,
    sync::Arc,
};

use anyhow::{Context, Result};
use ringfence_dma::{BounceLimits, Direction, DmaConfig, Policy};
use ringfence_drivers::{
    blk::{DriverQueue, QueueLayout},
    ram::{PagedBuffer, RamMemory},
};
use ringfence_mem::GuestRam;
use ringfence_run::event;
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, blk::feature};

use super::{
    device::{ENDPOINT, Report, Served},
    mapped::VirtioPath,
    path::Path,
    plan::{Plan, Way},
    probe::Probe,
    process::Process,
    proxied::Proxied,
    space::{Dma, dma},
    standing::{Memory, StandingPath},
    viommu::{Behind, OWN_BYTES, RingMemory, front_end, ring_addresses, start_ring},
};
use crate::random::XorShift;

/// Where guest memory begins for the device: beyond all that is special on a PC.
pub(crate) const GUEST_BASE: u64 = 1 << 32;
/// On average one map and one unmap call in so many is timed.
const SAMPLE_EVERY: u32 = 64;
const PAGE: usize = 4096;
/// The most runs of pages that buffers are scattered in.
const MOST_RUNS: usize = 30_000;

/// A way to the device process.
pub(crate) type LinkPath = Box<dyn Path + Send>;

/// A link to a running device process.
pub(crate) struct Link {
    // In the order of an orderly shutdown: queues and mappings first, then the sockets, then the
    // child.
    pub(crate) dma: Dma,
    rings: Vec<RingMemory>,
    pub(crate) behind: Behind<Process>,
    proxy: Option<Proxied>,
}

impl Link {
    /// Starts a device process and brings everything up; returns a path for each queue, without
    /// buffers for data yet.
    pub(crate) fn open(plan: &Plan) -> Result<(Link, Vec<LinkPath>, Vec<PagedBuffer>)> {
        let protected = plan.policy != Policy::Off;
        // A chain, even through an indirect table, is never longer than its queue.
        let queue_size = plan.depth.max(plan.pieces + 2).next_power_of_two().min(1024) as u16;
        let queue_layout = QueueLayout::new(queue_size, plan.pieces);
        let rings_bytes = queue_layout.bytes().next_multiple_of(PAGE) * usize::from(plan.queues);
        let mut lens = plan.buffers.clone();
        // A page for each queue's probe.
        if plan.way == Way::Streaming {
            lens.extend(std::iter::repeat_n(PAGE, plan.queues.into()));
        }
        let pools = plan.pool_bytes();
        let ram =
            GuestRam::new(pages_of(&lens) * PAGE + rings_bytes + OWN_BYTES + pools, GUEST_BASE)
                .context("making the guest memory")?;

        let mut proxy = None;
        let start = |iommu: UnixStream| {
            let file = plan.disk.as_raw_fd();
            let served = Served::Disk { file, kind: plan.kind, bytes: plan.disk_bytes };
            let (front, device) = match plan.proxied {
                false => front_end()?,
                true => {
                    let (started, front, device) = Proxied::start(plan.notify)?;
                    proxy = Some(started);
                    (front, device)
                }
            };
            let (queues, notify) = (plan.queues, plan.notify);
            Ok((Process::start(served, queues, notify, device.into(), iommu.into())?, front))
        };
        let mut behind = Behind::open(Arc::clone(&ram), plan.notify, plan.lazy_domain, start)?;
        let domain = &behind.domain;
        if protected {
            domain.attach(ENDPOINT).context("attaching the disk to its domain")?;
        }
        let rings = std::iter::repeat_n(queue_layout.bytes(), plan.queues.into());
        let mapped: Vec<usize> = lens.iter().copied().chain(rings).collect();
        let memory = match pools {
            0 => None,
            bytes => Some(RamMemory::carve(&ram, bytes).context("memory for bounce slots")?),
        };
        let dma = make_dma(plan, domain, &mapped, memory)?;

        // Without FLUSH each write would be made durable by itself, which `host` does not do.
        let mut features =
            feature::FLUSH | 1 << F_VERSION_1 | 1 << F_EVENT_IDX | 1 << F_INDIRECT_DESC;
        if protected {
            features |= 1 << F_ACCESS_PLATFORM;
        }
        behind.agree(features, ProtocolFeatures::MQ | ProtocolFeatures::CONFIG, "virtio-blk")?;
        let mut rings = Vec::new();
        let mut queues = Vec::new();
        for index in 0..plan.queues {
            let (memory, bus, base) =
                RingMemory::new(&ram, queue_layout.bytes(), protected.then_some(&dma))?;
            let (kick, call) = (Arc::new(event::new()?), Arc::new(event::new()?));
            let window = memory.part().window();
            let queue = DriverQueue::new(
                queue_layout,
                window,
                bus,
                Arc::clone(&kick),
                Arc::clone(&call),
                plan.notify,
            )?;
            let addresses =
                ring_addresses(base, [0, queue_layout.avail_at(), queue_layout.used_at()]);
            start_ring(
                &mut behind.front,
                index,
                queue_size,
                &addresses,
                kick.as_fd(),
                Some(call.as_fd()),
            )
            .with_context(|| format!("starting queue {index}"))?;
            rings.push(memory);
            queues.push(queue);
        }

        let mut buffers = scatter(&ram, &lens, plan.run_pages)?;
        let mut registered = None;
        if plan.way == Way::Persistent {
            let first = buffers.first().context("a buffer to map")?;
            // SAFETY: a job thread touches a buffer only while no request of that buffer is in
            // flight, and the paths and their requests are gone before the arena is dropped.
            let arena = unsafe { first.arena() };
            let arena = dma.map_persistent(arena, Direction::Bidirectional);
            registered = Some(Arc::new(arena.context("mapping the buffers")?));
        }
        let mut paths: Vec<LinkPath> = Vec::new();
        for queue in queues {
            if plan.way == Way::Streaming {
                let page = buffers.pop().context("a page for each probe")?;
                // The policy in force: it may be another for an untrusted device.
                let strict = dma.effective_policy().is_strict();
                let probe = protected.then(|| Probe::new(page, strict));
                paths.push(Box::new(VirtioPath::new(dma.clone(), queue, probe, plan.batching)));
                continue;
            }
            let memory =
                registered.clone().map_or_else(|| Memory::Pools(dma.clone()), Memory::Registered);
            paths.push(Box::new(StandingPath::new(memory, queue)));
        }
        Ok((Link { dma, rings, behind, proxy }, paths, buffers))
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

    /// Ends the link in order: stops the rings, frees their memory, hangs up, and reads the device
    /// process's report.
    pub(crate) fn close(mut self) -> Result<Report> {
        for index in 0..self.rings.len() {
            self.behind.front.get_vring_base(index as u16).context("stopping a queue")?;
        }
        self.behind.hang_up(self.rings, Some(&self.dma))?;
        self.behind.peer.finish()
    }
}

fn make_dma(
    plan: &Plan,
    domain: &Arc<ViommuDomain>,
    mapped: &[usize],
    memory: Option<RamMemory>,
) -> Result<Dma> {
    let lazy = plan.policy.is_lazy();
    let allocator = plan.space.of_domain(plan.allocator, domain, mapped, lazy)?;
    let config = DmaConfig {
        policy: plan.policy,
        sample_every: SAMPLE_EVERY,
        flush: Some(plan.tuning.flush(plan.policy)),
        trust: plan.trust,
        bounce: plan.bounce(),
        ..DmaConfig::default()
    };
    let max_bytes = plan.pool_bytes() as u64;
    let limits = BounceLimits { max_bytes, idle_ms: plan.idle_ms, ..BounceLimits::default() };
    dma(domain, allocator, config, memory.map(|memory| (memory, limits)))
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
    XorShift(0x9e37_79b9_7f4a_7c15).shuffle(&mut runs);
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
