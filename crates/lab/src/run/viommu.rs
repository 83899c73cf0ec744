//! A device behind its virtio-iommu, from the driver's side: guest memory, the front ends, the DMA
//! API.

use std::{
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use ringfence_dma::{BounceLimits, BouncePools, Coherent, Device, DmaConfig, Policy};
use ringfence_drivers::ram::{RamMemory, RamPart};
use ringfence_mem::{GuestRam, Window};
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses};
use ringfence_virtio_iommu::{
    driver::{self, Buffers, Driver, Transport, ViommuDomain},
    wire::{CONFIG_LEN, Features, IommuConfig},
};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_VERSION_1, driver as ring, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    device::ENDPOINT,
    process::REPLY_TIMEOUT,
    space::{AnyAllocator, Dma},
};

/// Where guest memory begins for the device: beyond all that is special on a PC.
pub(super) const GUEST_BASE: u64 = 1 << 32;
const PAGE: usize = 4096;
/// Descriptors of the virtio-iommu's request queue: two a request, as Linux's driver has it.
const IOMMU_RING: u16 = 256;
/// Bytes of guest memory for the driver's ring and requests, generously: it takes well under a page
/// a descriptor.
const OWN_BYTES: usize = 2 * PAGE * IOMMU_RING as usize;

/// A front end, and the socket at which it is to be served.
pub(crate) fn front_end() -> Result<(Frontend, UnixStream)> {
    let (socket, theirs) = UnixStream::pair()?;
    Ok((Frontend::new(socket, REPLY_TIMEOUT), theirs))
}

/// How a device is brought up.
pub(crate) struct Setup {
    /// What errors call it.
    pub(crate) name: &'static str,
    /// Bytes of guest memory for its rings and buffers.
    pub(crate) bytes: usize,
    pub(crate) config: DmaConfig,
    /// Of its bounce pools; with a `max_bytes` of 0 there are none.
    pub(crate) limits: BounceLimits,
    pub(crate) notify: Notify,
    /// Whether its domain is lazy.
    pub(crate) lazy: bool,
}

/// A device behind its virtio-iommu, both served at the other ends of two sockets.
pub(crate) struct Behind<P> {
    // In the order of an orderly shutdown: mappings first, then the sockets, then the peer.
    pub(crate) dma: Dma,
    /// The rings that are mapped, for as long as the device may use them.
    rings: Vec<Coherent<RamPart>>,
    /// Whether the device is behind the IOMMU.
    protected: bool,
    pub(crate) iommu: Arc<Driver>,
    domain: Arc<ViommuDomain>,
    /// The device's.
    pub(crate) front: Frontend,
    _iommu_front: Frontend,
    /// To be shut down at the end, even if others hold them.
    sockets: [UnixStream; 2],
    /// The process or thread that serves them.
    pub(crate) peer: P,
    pub(crate) ram: Arc<GuestRam>,
}

impl<P> Behind<P> {
    /// Lets `start` serve a device, and the IOMMU at a socket, and brings up the latter's driver, with
    /// a domain, and the DMA API over `allocator`. `start` returns the device's front end, too.
    pub(crate) fn open(
        setup: Setup,
        allocator: impl FnOnce(&ViommuDomain) -> Result<AnyAllocator>,
        start: impl FnOnce(UnixStream) -> Result<(P, Frontend)>,
    ) -> Result<Behind<P>> {
        let Setup { name, bytes, config, limits, notify, lazy } = setup;
        let pools = limits.max_bytes as usize;
        let ram = GuestRam::new(bytes + OWN_BYTES + pools, GUEST_BASE);
        let ram = ram.context("making the guest memory")?;
        let (mut iommu_front, iommu_theirs) = front_end()?;
        let (peer, front) = start(iommu_theirs)?;
        let socket = |front: &Frontend| front.as_fd().try_clone_to_owned();
        let sockets = [socket(&front)?.into(), socket(&iommu_front)?.into()];
        let alive = socket(&iommu_front)?;
        let iommu = start_iommu(&mut iommu_front, &ram, notify, lazy, alive)
            .context("setting up the virtio-iommu")?;
        let domain = if lazy { iommu.lazy_domain() } else { iommu.domain() };
        let domain = domain.context("making a domain")?;
        if domain.is_lazy() != lazy {
            bail!("the virtio-iommu knows no lazy domains");
        }
        let protected = config.policy != Policy::Off;
        if protected {
            let attached = domain.attach(ENDPOINT);
            attached.with_context(|| format!("attaching the {name} to its domain"))?;
        }
        let allocator = allocator(&domain)?;
        let mut device =
            Device::builder(Arc::clone(&domain)).allocator(allocator.clone()).config(config);
        if pools > 0 {
            let memory = RamMemory::carve(&ram, pools).context("memory for bounce slots")?;
            let pools = BouncePools::new(domain.clone(), allocator, memory, limits);
            device = device.pools(&pools.context("setting up the bounce pools")?);
        }
        let dma = device.build().context("setting up the DMA API")?;
        let (rings, _iommu_front) = (Vec::new(), iommu_front);
        Ok(Behind { dma, rings, protected, iommu, domain, front, _iommu_front, sockets, peer, ram })
    }

    /// Negotiates exactly these features, and those that addresses need, with the device (`what`, in
    /// errors), and shares the memory with it.
    pub(crate) fn agree(
        &mut self,
        features: u64,
        protocol: ProtocolFeatures,
        what: &str,
    ) -> Result<()> {
        let platform = if self.protected { F_ACCESS_PLATFORM } else { 0 };
        let features = features | F_VERSION_1 | platform;
        let agreed = self.front.negotiate(features, protocol);
        let agreed = agreed.with_context(|| format!("agreeing with the {what}"))?;
        if agreed != features {
            bail!("the {what} does not offer features: {:#x} of {features:#x}", agreed & features);
        }
        let memory = [(self.ram.region(), self.ram.fd())];
        self.front.set_mem_table(&memory).context("sharing memory")
    }

    /// Memory for a ring. Whole pages, since an untrusted device must see nothing beside them; the
    /// address for the device, and the one for its front end: an IOVA both behind an IOMMU, else
    /// guest-physical and of this process (rule D2).
    pub(crate) fn ring_memory(&mut self, bytes: usize) -> Result<(Window, u64, u64)> {
        let part = RamPart::carve(&self.ram, bytes.next_multiple_of(PAGE), PAGE)?;
        let (window, gpa) = (part.window().clone(), part.gpa());
        if !self.protected {
            return Ok((window, gpa, self.ram.user_addr() + (gpa - self.ram.gpa())));
        }
        let coherent = self.dma.alloc_coherent(part).context("mapping a ring")?;
        let iova = coherent.iova().0;
        self.rings.push(coherent);
        Ok((window, iova, iova))
    }

    /// Ends it in order, once the rings were stopped and all buffers unmapped: frees the memory of
    /// the rings, and hangs up.
    pub(crate) fn hang_up(&mut self) -> Result<()> {
        for ring in self.rings.drain(..) {
            ring.free().context("unmapping a ring")?;
        }
        if let Some(pools) = self.dma.pools() {
            // While the IOMMU is there to unmap them.
            pools.trim();
        }
        if self.protected {
            self.domain.detach(ENDPOINT).context("detaching the device")?;
        }
        for socket in &self.sockets {
            socket.shutdown(Shutdown::Both).context("hanging up")?;
        }
        Ok(())
    }
}

/// Starts a split ring of a device, whose areas lie from the address `base` on.
pub(crate) fn start_ring(
    front: &mut Frontend,
    index: u16,
    size: u16,
    base: u64,
    kick: BorrowedFd<'_>,
    call: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let areas = layout::offsets(size);
    let [desc, avail, used] = [areas.desc, areas.avail, areas.used].map(|at| base + at as u64);
    front.set_vring_num(index, size)?;
    front.set_vring_base(index, 0)?;
    front.set_vring_addr(index, &RingAddresses { desc, avail, used, log: None })?;
    front.set_vring_call(index, call)?;
    front.set_vring_kick(index, Some(kick))?;
    front.set_vring_enable(index, true)?;
    Ok(())
}

/// The virtio-iommu's notifications.
struct Events {
    kick: OwnedFd,
    call: OwnedFd,
    /// The socket: hung up when the device process is gone.
    socket: OwnedFd,
}

impl Transport for Events {
    fn kick(&self, _queue: u16) {
        event::signal(&self.kick);
    }

    fn wait(&self, _queue: u16, timeout: Duration) {
        let mut fds =
            [PollFd::new(&self.call, PollFlags::IN), PollFd::new(&self.socket, PollFlags::HUP)];
        // A time beyond the clock's range is none. EINTR is an early return, which is allowed.
        let timeout = Timespec::try_from(timeout).ok();
        if poll(&mut fds, timeout.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::IN) {
            event::drain(&self.call);
        }
    }

    fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::HUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().contains(PollFlags::HUP)
    }
}

/// Brings the driver up; `lazy`: with lazy domains, if the device has them. `socket` is hung up
/// when the device process is gone.
fn start_iommu(
    front: &mut Frontend,
    ram: &Arc<GuestRam>,
    notify: Notify,
    lazy: bool,
    socket: OwnedFd,
) -> Result<Arc<Driver>> {
    let plain = F_VERSION_1 | F_EVENT_IDX;
    let proposed = if lazy { Features::LAZY_IOTLB_FLUSH } else { Features::empty() };
    let wanted = plain | driver::negotiate_proposed(u64::MAX, proposed).bits();
    let agreed = front.negotiate(wanted, ProtocolFeatures::CONFIG)?;
    if agreed & plain != plain {
        bail!("the device does not offer features: {agreed:#x}");
    }
    front.set_mem_table(&[(ram.region(), ram.fd())])?;
    let mut config = [0; CONFIG_LEN];
    front.config(0, &mut config)?;
    let config = IommuConfig::parse(&config)?;

    let rings = RamPart::carve(ram, layout::offsets(IOMMU_RING).len, PAGE)?;
    let areas = ring::Rings::in_window(rings.window(), IOMMU_RING)?;
    let queue = ring::Queue::new(IOMMU_RING, areas, true)?;
    let buffers = RamPart::carve(ram, Driver::buffer_bytes(IOMMU_RING, &config), PAGE)?;
    let events = Arc::new(Events { kick: event::new()?, call: event::new()?, socket });
    let user = ram.user_addr() + (rings.gpa() - ram.gpa());
    start_ring(front, 0, IOMMU_RING, user, events.kick.as_fd(), Some(events.call.as_fd()))?;
    let buffers = Buffers { window: buffers.window().clone(), addr: buffers.gpa() };
    let features = driver::negotiate_proposed(agreed, proposed);
    let own = driver::DriverConfig { notify, ..driver::DriverConfig::default() };
    Ok(Driver::new(events, queue, buffers, config, features, own)?)
}
