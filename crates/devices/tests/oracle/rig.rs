//! A device process in this process: workers, a virtio-iommu and a probe on each worker; and the
//! driver's end of it.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_devices::iommu::{Endpoints, Iommu, IommuBackend, IommuOptions};
use ringfence_dma::{BounceLimits, BouncePools, Device, DmaConfig, Environment, Trust};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::{
    Geometry, GuestPhys, Iova, PageSizes, Range, ReservedKind, ReservedRegion,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iommu_testing::Faulty;
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_iova::{Allocator, Aperture, Magazines, RbTree, Slabs};
use ringfence_mem::{GuestRam, Memory};
use ringfence_run::{
    PeerFd, event,
    worker::{Notify, Worker},
};
use ringfence_sync::cpu::OsCpu;
use ringfence_vhost_user::{Handler, RingAddresses, RingSetup};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    driver::{self, Buffers, Driver, EventReceiver, Transport, ViommuDomain},
    wire::{CONFIG_LEN, FaultRecord, Features, IommuConfig},
};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, driver as ring, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    history::{History, Recorded},
    lying::{Lie, Lying},
    pages::Pages,
    probe::Probe,
    slots::{Lent, SlotMemory},
};

/// The endpoint ID of the probes.
pub(crate) const ENDPOINT: u32 = 7;
/// Guest-physical base of the memory.
const GPA: u64 = 1 << 32;
/// The IOMMU's unit; probes come before it or after it in a worker's turn.
const IOMMU_UNIT: u32 = 5;
/// Longer than any reply takes on a busy machine; a test that waits so long has failed.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Reserved by the device: never to be mapped.
pub(crate) const RESERVED: Range = match Range::new(Iova(0x4_0000), Iova(0x4_ffff)) {
    Some(range) => range,
    None => panic!("not empty"),
};
/// How many pages of data there are.
pub(crate) const PAGES: usize = 96;
/// How much address space there is for them.
const APERTURE: u64 = 1 << 20;

/// The driver's side, from what fails on demand down to what sends requests.
pub(crate) type Stack = Faulty<Recorded<Lying<Arc<ViommuDomain>>>>;
pub(crate) type Dma = Device<Arc<Stack>, Arc<dyn Allocator>>;
pub(crate) type MapBatch<B, T> = ringfence_dma::MapBatch<Arc<Stack>, Arc<dyn Allocator>, B, T>;
pub(crate) type UnmapBatch<B, T> = ringfence_dma::UnmapBatch<Arc<Stack>, Arc<dyn Allocator>, B, T>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    Slabs,
    Magazines,
    Tree,
}

/// How a rig is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) config: DmaConfig,
    pub(crate) granule: u64,
    pub(crate) addresses: Addresses,
    /// IOVAs end at 2^64-1.
    pub(crate) at_the_top: bool,
    /// How many mappings the device holds before it refuses more.
    pub(crate) mappings: u64,
    pub(crate) notify: Notify,
    /// Requests under way at a time, twice.
    pub(crate) ring_size: u16,
    pub(crate) probe_first: bool,
    /// Whether the virtio-iommu answers an UNMAP before its invalidation.
    pub(crate) lazy_domain: bool,
    /// The limits of its bounce pools, and pages of memory for them; `None` for no pools.
    pub(crate) bounces: Option<(BounceLimits, usize)>,
    pub(crate) lie: Lie,
}

pub(crate) struct Rig {
    pub(crate) pools: Option<BouncePools<GuestPhys>>,
    pub(crate) slots: Arc<SlotMemory>,
    pub(crate) allocator: Arc<dyn Allocator>,
    pub(crate) history: History,
    pub(crate) pages: Arc<Pages>,
    pub(crate) endpoint: Arc<Endpoint>,
    /// One on each worker.
    pub(crate) probes: Vec<Probe>,
    pub(crate) probe_unit: u32,
    driver: Arc<Driver>,
    events: EventReceiver,
    event_kick: OwnedFd,
    pub(crate) backend: IommuBackend,
    pub(crate) workers: Arc<[Worker]>,
}

/// The virtio-iommu's notifications.
struct Events {
    kick: OwnedFd,
    call: OwnedFd,
}

impl Transport for Events {
    fn kick(&self, _: u16) {
        event::signal(&self.kick);
    }

    fn wait(&self, _: u16, timeout: Duration) {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let nanos = timeout.subsec_nanos().into();
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: nanos };
        if poll(&mut fds, Some(&timeout)).is_ok_and(|woken| woken > 0) {
            event::drain(&self.call);
        }
    }
}

impl Rig {
    /// The device's end, the driver, and a DMA API over both.
    pub(crate) fn new(setup: &Setup, environment: Environment) -> (Rig, Dma) {
        let notify = setup.notify;
        let workers: Arc<[Worker]> =
            (0..2).map(|n| Worker::spawn(&format!("worker-{n}"), notify).unwrap()).collect();
        let shootdown = Shootdown::new(workers.len());
        let endpoint = Endpoint::new(ENDPOINT, Arc::clone(&shootdown), Binding::Blocked);
        let page_sizes = PageSizes::from_granule(setup.granule).unwrap();
        let reserved = ReservedRegion { range: RESERVED, kind: ReservedKind::Reserved };
        let geometry =
            Geometry { reserved: [reserved].into(), ..Geometry::new(page_sizes, Range::ALL) };
        let limits = Limits { table_bytes: 16 << 20, mappings: setup.mappings };
        let endpoints = Endpoints::new([Arc::clone(&endpoint)], shootdown, geometry, limits);
        let features = DeviceConfig::default().features | Features::PROPOSED;
        let device = DeviceConfig { page_sizes, features, ..DeviceConfig::default() };
        let options = IommuOptions { device, unit: IOMMU_UNIT };
        let mut backend = Iommu::new(Arc::new(endpoints), options, Arc::clone(&workers)).connect();

        let ram = GuestRam::new(2 << 20, GPA).unwrap();
        let memory = Memory::of_ram(&ram).unwrap();
        let offer = backend.features();
        let features = driver::negotiate_proposed(offer, Features::PROPOSED);
        backend.set_features(features.bits() | 1 << F_VERSION_1 | 1 << F_EVENT_IDX).unwrap();
        backend.set_memory(Arc::clone(&memory)).unwrap();
        let mut config = [0; CONFIG_LEN];
        backend.config(0, &mut config).unwrap();
        let config = IommuConfig::parse(&config).unwrap();

        let transport = Events { kick: event::new().unwrap(), call: event::new().unwrap() };
        let size = setup.ring_size;
        let queue = start_ring(&mut backend, &ram, 0, size, &transport.kick, Some(&transport.call));
        let buffers = RamPart::carve(&ram, Driver::buffer_bytes(size, &config), 4096).unwrap();
        let buffers = Buffers { window: buffers.window().clone(), addr: buffers.gpa() };
        let options =
            driver::DriverConfig { notify, timeout: Some(LONG), ..driver::DriverConfig::default() };
        let driver =
            Driver::new(Arc::new(transport), queue, buffers, config, features, options).unwrap();

        let event_kick = event::new().unwrap();
        let queue = start_ring(&mut backend, &ram, 1, 64, &event_kick, None);
        let buffers = RamPart::carve(&ram, EventReceiver::buffer_bytes(64), 4096).unwrap();
        let events = EventReceiver::new(queue, buffers.window().clone(), buffers.gpa());
        event::signal(&event_kick);

        let probe_unit = if setup.probe_first { IOMMU_UNIT - 1 } else { IOMMU_UNIT + 1 };
        let probes =
            workers.iter().map(|w| Probe::start(w, probe_unit, &endpoint, &memory)).collect();
        let pages = Pages::carve(&ram, PAGES);
        let domain = match setup.lazy_domain {
            true => driver.lazy_domain(),
            false => driver.domain(),
        };
        let domain = domain.unwrap();
        assert_eq!(domain.is_lazy(), setup.lazy_domain);
        domain.attach(ENDPOINT).unwrap();
        let history = History::default();
        let stack = Lying::new(domain, setup.lie);
        let stack = Arc::new(Faulty::new(Recorded::new(stack, history.clone()), 1));
        let allocator: Arc<dyn Allocator> = Arc::from(allocator(setup));
        let room = setup.bounces.map_or(1, |(_, pages)| pages);
        let slots = SlotMemory::carve(&ram, room, history.clone(), setup.lie);
        let pools = setup.bounces.map(|(limits, _)| {
            let (domain, addresses) = (Arc::clone(&stack), Arc::clone(&allocator));
            let (memory, environment) = (Lent(Arc::clone(&slots)), environment.clone());
            // As the device's own: by the caller, or by a thread.
            let timer = setup.config.timer;
            BouncePools::with_environment(domain, addresses, memory, limits, environment, timer)
                .unwrap()
        });
        let (mut config, addresses) = (setup.config.clone(), Arc::clone(&allocator));
        if setup.lie == Lie::Trusts {
            config.trust = Trust::Trusted;
        }
        let mut dma =
            Device::builder(stack).allocator(addresses).config(config).environment(environment);
        if let Some(pools) = &pools {
            dma = dma.pools(pools);
        }
        let dma = dma.build().unwrap();
        let rig = Rig {
            pools,
            slots,
            allocator,
            history,
            pages,
            endpoint,
            probes,
            probe_unit,
            driver,
            events,
            event_kick,
            backend,
            workers,
        };
        (rig, dma)
    }

    /// Calls `each` with every fault record that has come.
    pub(crate) fn poll_events(&mut self, each: impl FnMut(FaultRecord)) {
        if self.events.poll(each).unwrap() {
            event::signal(&self.event_kick);
        }
    }

    /// Waits for `count` fault records, in order; an error if they do not arrive.
    pub(crate) fn wait_for_events(&mut self, count: usize) -> Result<Vec<FaultRecord>, String> {
        let start = Instant::now();
        let mut records = Vec::new();
        while records.len() < count {
            self.poll_events(|record| records.push(record));
            if start.elapsed() > LONG {
                return Err(format!("{} fault records of {count} came", records.len()));
            }
            std::thread::yield_now();
        }
        Ok(records)
    }

    /// How many mappings the device has in its table.
    pub(crate) fn mappings_in_the_device(&self) -> u64 {
        match self.endpoint.binding() {
            Binding::Domain(domain) => domain.mappings(),
            _ => 0,
        }
    }

    /// What the driver noted of a device that it gave up.
    pub(crate) fn failed(&self) -> Option<String> {
        self.driver.failed().map(|error| error.to_string())
    }
}

fn allocator(setup: &Setup) -> Box<dyn Allocator> {
    let aperture = match setup.at_the_top {
        true => Aperture::new(u64::MAX - (APERTURE - 1), u64::MAX, setup.granule),
        false => Aperture::new(0, APERTURE - 1, setup.granule),
    };
    let aperture = aperture.unwrap();
    match setup.addresses {
        Addresses::Slabs => Box::new(Slabs::new(aperture, OsCpu::new())),
        Addresses::Magazines => Box::new(Magazines::new(RbTree::new(aperture), OsCpu::new())),
        Addresses::Tree => Box::new(RbTree::new(aperture)),
    }
}

/// Both ends of a ring of the virtio-iommu.
fn start_ring(
    backend: &mut IommuBackend,
    ram: &Arc<GuestRam>,
    index: u16,
    size: u16,
    kick: &OwnedFd,
    call: Option<&OwnedFd>,
) -> ring::Queue {
    let at = layout::offsets(size);
    let part = RamPart::carve(ram, at.len, 4096).unwrap();
    let rings = ring::Rings::in_window(part.window(), size).unwrap();
    let queue = ring::Queue::new(size, rings, true).unwrap();
    let user = ram.user_addr() + (part.gpa() - ram.gpa());
    let addresses = RingAddresses {
        desc: user,
        avail: user + at.avail as u64,
        used: user + at.used as u64,
        log: None,
    };
    let kick = Some(kick.try_clone().unwrap());
    let setup = RingSetup {
        size,
        addresses,
        base: Some(0),
        kick: kick.map(PeerFd::from),
        enabled: true,
        resumed: false,
    };
    backend.start_ring(index, setup).unwrap();
    backend.set_call(index, call.map(|call| call.try_clone().unwrap().into())).unwrap();
    queue
}
