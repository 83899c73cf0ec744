//! The virtio-iommu of a device process, from the driver's side.

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
use ringfence_dma::{Coherent, Policy};
use ringfence_drivers::ram::RamPart;
use ringfence_mem::GuestRam;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses};
use ringfence_virtio_iommu::{
    driver::{self, Buffers, Driver, Transport, ViommuDomain},
    wire::{CONFIG_LEN, Features, IommuConfig},
};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, driver as ring, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{device::ENDPOINT, process::REPLY_TIMEOUT, space::Dma};

const PAGE: usize = 4096;
/// Descriptors of the virtio-iommu's request queue: two a request, as Linux's driver has it.
const IOMMU_RING: u16 = 256;
/// Bytes of guest memory for the driver's ring and requests, generously: it takes well under a page
/// a descriptor.
pub(crate) const OWN_BYTES: usize = 2 * PAGE * IOMMU_RING as usize;

/// Holds a ring's memory for as long as the device may use it.
// There is one for each ring: the size of the larger variant costs nothing.
#[allow(clippy::large_enum_variant)]
pub(crate) enum RingMemory {
    Plain(RamPart),
    Mapped(Coherent<RamPart>),
}

impl RingMemory {
    /// Whole pages, since an untrusted device must see nothing beside them; the address for the device, and
    /// the one for its front end: an IOVA both behind an IOMMU, else guest-physical and of this process
    /// (rule D2).
    pub(crate) fn new(
        ram: &Arc<GuestRam>,
        bytes: usize,
        dma: Option<&Dma>,
    ) -> Result<(RingMemory, u64, u64)> {
        let part = RamPart::carve(ram, bytes.next_multiple_of(PAGE), PAGE)?;
        let Some(dma) = dma else {
            let gpa = part.gpa();
            return Ok((RingMemory::Plain(part), gpa, ram.user_addr() + (gpa - ram.gpa())));
        };
        let coherent = dma.alloc_coherent(part).context("mapping a ring")?;
        let iova = coherent.iova().0;
        Ok((RingMemory::Mapped(coherent), iova, iova))
    }

    pub(crate) fn part(&self) -> &RamPart {
        match self {
            RingMemory::Plain(part) => part,
            RingMemory::Mapped(coherent) => coherent.memory(),
        }
    }
}

/// A front end, and the socket at which it is to be served.
pub(crate) fn front_end() -> Result<(Frontend, UnixStream)> {
    let (socket, theirs) = UnixStream::pair()?;
    Ok((Frontend::new(socket, REPLY_TIMEOUT), theirs))
}

/// A device behind its virtio-iommu, both served at the other ends of two sockets.
pub(crate) struct Behind<P> {
    // In the order of an orderly shutdown.
    pub(crate) iommu: Arc<Driver>,
    pub(crate) domain: Arc<ViommuDomain>,
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
    /// Lets `start` serve a device, and the IOMMU at a socket, and brings up the latter's driver, with a
    /// domain that is lazy or not. `start` returns the device's front end, too.
    pub(crate) fn open(
        ram: Arc<GuestRam>,
        notify: Notify,
        lazy: bool,
        start: impl FnOnce(UnixStream) -> Result<(P, Frontend)>,
    ) -> Result<Behind<P>> {
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
        Ok(Behind { iommu, domain, front, _iommu_front: iommu_front, sockets, peer, ram })
    }

    /// Negotiates exactly these features with the device (`what`, in errors), and shares the memory
    /// with it.
    pub(crate) fn agree(
        &mut self,
        features: u64,
        protocol: ProtocolFeatures,
        what: &str,
    ) -> Result<()> {
        let agreed = self.front.negotiate(features, protocol);
        let agreed = agreed.with_context(|| format!("agreeing with the {what}"))?;
        if agreed != features {
            bail!("the {what} does not offer features: {:#x} of {features:#x}", agreed & features);
        }
        let memory = [(self.ram.region(), self.ram.fd())];
        self.front.set_mem_table(&memory).context("sharing memory")
    }

    /// Ends it in order, once the rings were stopped and all buffers unmapped: frees the memory of
    /// the rings, and hangs up.
    pub(crate) fn hang_up(&mut self, rings: Vec<RingMemory>, dma: Option<&Dma>) -> Result<()> {
        for ring in rings {
            if let RingMemory::Mapped(coherent) = ring {
                coherent.free().context("unmapping a ring")?;
            }
        }
        if let Some(pools) = dma.and_then(Dma::pools) {
            // While the IOMMU is there to unmap them.
            pools.trim();
        }
        if dma.is_some_and(|dma| dma.effective_policy() != Policy::Off) {
            self.domain.detach(ENDPOINT).context("detaching the device")?;
        }
        for socket in &self.sockets {
            socket.shutdown(Shutdown::Both).context("hanging up")?;
        }
        Ok(())
    }
}

/// Addresses of a ring's areas, at these offsets from an address.
pub(crate) fn ring_addresses(base: u64, offsets: [usize; 3]) -> RingAddresses {
    let [desc, avail, used] = offsets.map(|at| base + at as u64);
    RingAddresses { desc, avail, used, log: None }
}

/// Starts a ring of a device.
pub(crate) fn start_ring(
    front: &mut Frontend,
    index: u16,
    size: u16,
    addresses: &RingAddresses,
    kick: BorrowedFd<'_>,
    call: Option<BorrowedFd<'_>>,
) -> Result<()> {
    front.set_vring_num(index, size)?;
    front.set_vring_base(index, 0)?;
    front.set_vring_addr(index, addresses)?;
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
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        // EINTR is an early return, which is allowed.
        if poll(&mut fds, Some(&timeout)).is_ok() && fds[0].revents().contains(PollFlags::IN) {
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
    let plain = 1 << F_VERSION_1 | 1 << F_EVENT_IDX;
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

    let areas = layout::offsets(IOMMU_RING);
    let rings = RamPart::carve(ram, areas.len, PAGE)?;
    let queue =
        ring::Queue::new(IOMMU_RING, ring::Rings::in_window(rings.window(), IOMMU_RING)?, true)?;
    let buffers = RamPart::carve(ram, Driver::buffer_bytes(IOMMU_RING, &config), PAGE)?;
    let events = Arc::new(Events { kick: event::new()?, call: event::new()?, socket });
    let user = ram.user_addr() + (rings.gpa() - ram.gpa());
    let addresses = ring_addresses(user, [0, areas.avail, areas.used]);
    start_ring(front, 0, IOMMU_RING, &addresses, events.kick.as_fd(), Some(events.call.as_fd()))?;
    let driver = Driver::new(
        events,
        queue,
        Buffers { window: buffers.window().clone(), addr: buffers.gpa() },
        config,
        driver::negotiate_proposed(agreed, proposed),
        driver::DriverConfig { notify, ..driver::DriverConfig::default() },
    )?;
    Ok(driver)
}
