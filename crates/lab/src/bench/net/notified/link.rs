//! The device process with a network device behind its virtio-iommu, and the driver's side of it.

use std::{
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use ringfence_dma::{
    BounceConfig, BounceLimits, BouncePools, Config, Device, Environment, Policy, Written,
};
use ringfence_drivers::ram::{PagedBuffer, RamMemory, RamPart};
use ringfence_iommu::Domain;
use ringfence_mem::GuestRam;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses};
use ringfence_virtio_iommu::driver::{Driver, Stats, ViommuDomain};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_VERSION_1,
    driver::{self, Queue, Rings},
};

use super::Mapped;
use crate::run::{
    Dma,
    device::{ENDPOINT, Report, Served},
    link::{GUEST_BASE, RingMemory, scatter},
    process::{ANSWER, Process},
    space::{Needs, Space},
    viommu::{OWN_BYTES, start_iommu, start_ring},
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
    /// A device process whose device gives back what is sent, or is a
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
    // In the order of an orderly end.
    /// `None`: buffers are not mapped.
    pub(super) dma: Option<Dma>,
    memory: Vec<RingMemory>,
    iommu: Arc<Driver>,
    domain: Arc<ViommuDomain>,
    net_front: Frontend,
    _iommu_front: Frontend,
    sockets: [UnixStream; 2],
    peer: Peer,
    _ram: Arc<GuestRam>,
}

impl Link {
    /// Brings a device and its IOMMU up; the queues of its rings (receive, transmit), and the
    /// bundles of each.
    #[allow(clippy::type_complexity, reason = "two of each")]
    pub(super) fn open(
        mapped: Mapped,
        peer: impl FnOnce(UnixStream, UnixStream) -> Result<Peer>,
    ) -> Result<(Link, [Queue; 2], [Vec<PagedBuffer>; 2])> {
        let config = driver::Config { size: RING, event_idx: false, packed: false };
        let ring_bytes = config.offsets().len.next_multiple_of(PAGE);
        let pools = if mapped.policy.bounces() { POOLS } else { 0 };
        let bytes = 2 * (BUFFERS * PAGE + ring_bytes) + OWN_BYTES + pools;
        let ram = GuestRam::new(bytes, GUEST_BASE).context("making the guest memory")?;

        let (net_socket, net_theirs) = UnixStream::pair()?;
        let (iommu_socket, iommu_theirs) = UnixStream::pair()?;
        let peer = peer(net_theirs, iommu_theirs).context("starting a device process")?;
        let alive = iommu_socket.try_clone()?;
        let sockets = [net_socket.try_clone()?, iommu_socket.try_clone()?];
        let mut iommu_front = Frontend::new(iommu_socket, ANSWER);
        let iommu = start_iommu(&mut iommu_front, &ram, Notify::Poll, false, alive.into())
            .context("setting up the virtio-iommu")?;
        let domain = iommu.domain().context("making a domain")?;
        let mut dma = None;
        if mapped.translated() {
            domain.attach(ENDPOINT).context("attaching the device to its domain")?;
            dma = Some(make_dma(mapped.policy, &domain, &ram, pools)?);
        }

        let mut net_front = Frontend::new(net_socket, ANSWER);
        let mut features = 1 << F_VERSION_1 | F_MRG_RXBUF;
        if mapped.translated() {
            features |= 1 << F_ACCESS_PLATFORM;
        }
        let agreed = net_front
            .negotiate(features, ProtocolFeatures::MQ)
            .context("agreeing with the network device")?;
        if agreed != features {
            bail!("the network device lacks features: {:#x} of {features:#x}", agreed & features);
        }
        net_front.set_mem_table(&[(ram.region(), ram.fd())]).context("sharing memory")?;

        let (mut memory, mut queues) = (Vec::new(), Vec::new());
        for index in 0..2 {
            let part = RamPart::carve(&ram, ring_bytes, PAGE)?;
            let (held, base) = match &dma {
                Some(dma) => {
                    let coherent = dma.alloc_coherent(part).context("mapping a ring")?;
                    let iova = coherent.iova().0;
                    (RingMemory::Mapped(coherent), iova)
                }
                // Without an IOMMU: addresses of this process (rule D2).
                None => {
                    let user = ram.user_addr() + (part.gpa() - ram.gpa());
                    (RingMemory::Plain(part), user)
                }
            };
            let offsets = config.offsets();
            let addresses = RingAddresses {
                desc: base + offsets.desc as u64,
                avail: base + offsets.avail as u64,
                used: base + offsets.used as u64,
                log: None,
            };
            let rings = Rings::placed(held.part().window(), &config)?;
            let mut queue = Queue::with_config(config, rings)?;
            // Both ends poll.
            queue.suppress_notifications();
            let kick = event::new()?;
            start_ring(&mut net_front, index, RING, &addresses, kick.as_fd(), None)
                .with_context(|| format!("starting ring {index}"))?;
            memory.push(held);
            queues.push(queue);
        }
        let bundles = BUFFERS / mapped.bundle;
        let mut receive = scatter(&ram, &vec![mapped.bundle * PAGE; 2 * bundles], mapped.run)?;
        let transmit = receive.split_off(bundles);
        let link = Link {
            dma,
            memory,
            iommu,
            domain,
            net_front,
            _iommu_front: iommu_front,
            sockets,
            peer,
            _ram: ram,
        };
        let queues = queues.try_into().map_err(|_| anyhow::anyhow!("two rings"))?;
        Ok((link, queues, [receive, transmit]))
    }

    /// What the driver of the virtio-iommu has done.
    pub(super) fn iommu(&self) -> Stats {
        self.iommu.stats()
    }

    /// CPU time of the device process so far, in nanoseconds.
    pub(super) fn device_cpu_ns(&self) -> u64 {
        match &self.peer {
            Peer::Process(process) => process.cpu_ns(),
            #[cfg(test)]
            Peer::Thread(_) => 0,
        }
    }

    /// Stops both rings, transmit first: what the device has taken it gives back.
    pub(super) fn stop_rings(&mut self) -> Result<()> {
        for index in [1, 0] {
            self.net_front.get_vring_base(index).context("stopping a ring")?;
        }
        Ok(())
    }

    /// Ends it in order, once the rings were stopped and all buffers unmapped; what the device has to
    /// report.
    pub(super) fn close(mut self) -> Result<Report> {
        for memory in self.memory.drain(..) {
            if let RingMemory::Mapped(coherent) = memory {
                coherent.free().context("unmapping a ring")?;
            }
        }
        if let Some(dma) = &self.dma {
            if let Some(pools) = dma.pools() {
                pools.trim();
            }
            self.domain.detach(ENDPOINT).context("detaching the device")?;
        }
        for socket in &self.sockets {
            socket.shutdown(Shutdown::Both).context("hanging up")?;
        }
        self.peer.finish()
    }
}

fn make_dma(
    policy: Policy,
    domain: &Arc<ViommuDomain>,
    ram: &Arc<GuestRam>,
    pools: usize,
) -> Result<Dma> {
    let reserved = domain.geometry().reserved;
    let reserved: Vec<(u64, u64)> =
        reserved.iter().map(|region| (region.range.first().0, region.range.last().0)).collect();
    let needs = Needs { reserved: &reserved, lazy: policy.is_lazy(), ..Needs::default() };
    let allocator = Space::default().make(Default::default(), needs)?;
    let bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
    let config = Config { bounce, ..Config::new(policy) };
    if pools == 0 {
        return Device::new(Arc::clone(domain), allocator, config)
            .context("setting up the DMA API");
    }
    let memory = RamMemory::carve(ram, pools).context("memory for bounce slots")?;
    let limits = BounceLimits { max_bytes: pools as u64, ..BounceLimits::default() };
    let of_pools = (Arc::clone(domain), Arc::clone(&allocator));
    let pools = BouncePools::new(of_pools.0, of_pools.1, memory, limits)
        .context("setting up the bounce pools")?;
    let environment = Environment::default();
    Device::with_pools(Arc::clone(domain), allocator, config, environment, &pools)
        .context("setting up the DMA API")
}
