//! The device process with a network device behind its virtio-iommu, and the driver's side of it.

use std::{
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
};

use anyhow::{Context, Result};
use ringfence_dma::{BounceConfig, BounceLimits, DmaConfig, Policy, Written};
use ringfence_drivers::ram::{PagedBuffer, RamMemory};
use ringfence_mem::GuestRam;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtio_iommu::driver::{Stats, ViommuDomain};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_VERSION_1,
    driver::{self, Queue, Rings},
};

use super::Mapped;
use crate::run::{
    Dma,
    device::{ENDPOINT, Report, Served},
    link::{GUEST_BASE, scatter},
    process::Process,
    space::{Space, dma},
    viommu::{Behind, OWN_BYTES, RingMemory, front_end, ring_addresses, start_ring},
};

/// VIRTIO_NET_F_MRG_RXBUF (bit 15).
const F_MRG_RXBUF: u64 = 1 << 15;
/// Descriptors of each ring, as QEMU gives a device.
pub(super) const RING: u16 = 256;
/// Buffers of each ring, of a page each.
pub(super) const BUFFERS: usize = 1024;
const PAGE: usize = 4096;
/// Guest memory for bounce slots.
const POOLS: usize = 64 << 20;

/// What is at the other end of the sockets.
pub(super) enum Peer {
    Process(Process),
    #[cfg(test)]
    Thread(Option<std::thread::JoinHandle<Result<Report>>>),
}

impl Peer {
    /// A device process whose device loops back what is sent, or is a
    /// [probe](ringfence_devices::net::Way::Probe).
    pub(super) fn process(net: UnixStream, iommu: UnixStream, loops: bool) -> Result<Peer> {
        let served = Served::Net { loops };
        Process::start(served, 1, Notify::Poll, net.into(), iommu.into()).map(Peer::Process)
    }

    /// The same as a thread of this process.
    #[cfg(test)]
    pub(super) fn thread(net: UnixStream, iommu: UnixStream, loops: bool) -> Result<Peer> {
        let serve = move || crate::run::device::serve_net(net, iommu, loops, Notify::Poll);
        Ok(Peer::Thread(Some(std::thread::spawn(serve))))
    }

    fn finish(&mut self) -> Result<Report> {
        match self {
            Peer::Process(process) => process.finish(),
            #[cfg(test)]
            Peer::Thread(thread) => thread.take().expect("finished once").join().expect("no panic"),
        }
    }
}

/// A running network device behind its IOMMU.
pub(super) struct Link {
    // In the order of an orderly shutdown.
    /// `None`: buffers are not mapped.
    pub(super) dma: Option<Dma>,
    memory: Vec<RingMemory>,
    behind: Behind<Peer>,
}

impl Link {
    /// Brings up a device and its IOMMU; returns the queues of its rings (receive, transmit), and
    /// the bundles of each.
    #[allow(clippy::type_complexity, reason = "two of each")]
    pub(super) fn open(
        mapped: Mapped,
        peer: impl FnOnce(UnixStream, UnixStream) -> Result<Peer>,
    ) -> Result<(Link, [Queue; 2], [Vec<PagedBuffer>; 2])> {
        let config = driver::QueueConfig { size: RING, event_idx: false, packed: false };
        let ring_bytes = config.offsets().len.next_multiple_of(PAGE);
        let pools = if mapped.policy.bounces() { POOLS } else { 0 };
        let bytes = 2 * (BUFFERS * PAGE + ring_bytes) + OWN_BYTES + pools;
        let ram = GuestRam::new(bytes, GUEST_BASE).context("making the guest memory")?;

        let start = |iommu| {
            let (front, net) = front_end()?;
            Ok((peer(net, iommu).context("starting a device process")?, front))
        };
        let mut behind = Behind::open(Arc::clone(&ram), Notify::Poll, false, start)?;
        let domain = &behind.domain;
        let mut dma = None;
        if mapped.translated() {
            domain.attach(ENDPOINT).context("attaching the device to its domain")?;
            dma = Some(make_dma(mapped.policy, domain, &ram, pools)?);
        }

        let mut features = 1 << F_VERSION_1 | F_MRG_RXBUF;
        if mapped.translated() {
            features |= 1 << F_ACCESS_PLATFORM;
        }
        behind.agree(features, ProtocolFeatures::MQ, "network device")?;
        let (mut memory, mut queues) = (Vec::new(), Vec::new());
        for index in 0..2 {
            let (held, _, base) = RingMemory::new(&ram, ring_bytes, dma.as_ref())?;
            let offsets = config.offsets();
            let addresses = ring_addresses(base, [offsets.desc, offsets.avail, offsets.used]);
            let rings = Rings::placed(held.part().window(), &config)?;
            let mut queue = Queue::with_config(config, rings)?;
            // Both ends poll.
            queue.suppress_notifications();
            let kick = event::new()?;
            start_ring(&mut behind.front, index, RING, &addresses, kick.as_fd(), None)
                .with_context(|| format!("starting ring {index}"))?;
            memory.push(held);
            queues.push(queue);
        }
        let bundles = BUFFERS / mapped.bundle;
        let mut receive = scatter(&ram, &vec![mapped.bundle * PAGE; 2 * bundles], mapped.run)?;
        let transmit = receive.split_off(bundles);
        let link = Link { dma, memory, behind };
        let queues = queues.try_into().map_err(|_| anyhow::anyhow!("two rings"))?;
        Ok((link, queues, [receive, transmit]))
    }

    /// What the driver of the virtio-iommu has done.
    pub(super) fn iommu(&self) -> Stats {
        self.behind.iommu.stats()
    }

    /// CPU time of the device process so far, in nanoseconds.
    pub(super) fn device_cpu_ns(&self) -> u64 {
        match &self.behind.peer {
            Peer::Process(process) => process.cpu_ns(),
            #[cfg(test)]
            Peer::Thread(_) => 0,
        }
    }

    /// Stops both rings, transmit first: the device still gives back what it has taken.
    pub(super) fn stop_rings(&mut self) -> Result<()> {
        for index in [1, 0] {
            self.behind.front.get_vring_base(index).context("stopping a ring")?;
        }
        Ok(())
    }

    /// Ends it in order, once the rings are stopped and all buffers unmapped; returns the device's
    /// report.
    pub(super) fn close(mut self) -> Result<Report> {
        self.behind.hang_up(self.memory, self.dma.as_ref())?;
        self.behind.peer.finish()
    }
}

fn make_dma(
    policy: Policy,
    domain: &Arc<ViommuDomain>,
    ram: &Arc<GuestRam>,
    pools: usize,
) -> Result<Dma> {
    let lazy = policy.is_lazy();
    let allocator = Space::default().of_domain(Default::default(), domain, &[], lazy)?;
    let bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
    let config = DmaConfig { bounce, ..DmaConfig::new(policy) };
    let limits = BounceLimits { max_bytes: pools as u64, ..BounceLimits::default() };
    let memory = match pools {
        0 => None,
        bytes => Some(RamMemory::carve(ram, bytes).context("memory for bounce slots")?),
    };
    dma(domain, allocator, config, memory.map(|memory| (memory, limits)))
}
