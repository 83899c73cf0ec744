//! The virtio-iommu of a device process, from the driver's side.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, bail};
use ringfence_drivers::ram::RamPart;
use ringfence_mem::GuestRam;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses};
use ringfence_virtio_iommu::{
    driver::{self, Buffers, Driver, Transport},
    wire::{CONFIG_LEN, Config as IommuConfig, Features},
};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, driver as ring, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PAGE: usize = 4096;
/// Descriptors of the virtio-iommu's request queue: two a request, as Linux's driver has it.
const IOMMU_RING: u16 = 256;
/// Bytes of guest memory that the driver takes for its ring and requests, generously: it is well
/// under a page a descriptor.
pub(crate) const OWN_BYTES: usize = 2 * PAGE * IOMMU_RING as usize;

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
        // An interruption is an early return, which is allowed.
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

/// Brings the driver up; `lazy`: with lazy domains, if the device knows them. `socket` is hung up when the device process is gone.
pub(crate) fn start_iommu(
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
        bail!("the device lacks features: {agreed:#x}");
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
    let addresses = RingAddresses {
        desc: user,
        avail: user + areas.avail as u64,
        used: user + areas.used as u64,
        log: None,
    };
    start_ring(front, 0, IOMMU_RING, &addresses, events.kick.as_fd(), Some(events.call.as_fd()))?;
    let driver = Driver::new(
        events,
        queue,
        Buffers { window: buffers.window().clone(), addr: buffers.gpa() },
        config,
        driver::negotiate_proposed(agreed, proposed),
        driver::Options { notify, ..driver::Options::default() },
    )?;
    Ok(driver)
}
