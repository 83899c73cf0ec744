//! What translates for the device, and how the device is attached to it.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_devices::iommu::{Endpoints, Iommu, IommuBackend, IommuOptions};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::{
    Fault, FaultReason, FaultSink, Geometry, GuestPhys, SoftDomain, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_mem::{GuestRam, Memory};
use ringfence_run::{PeerFd, event, worker::Worker};
use ringfence_vhost_user::{Handler, RingAddresses, RingSetup};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    driver::{self, Buffers, Driver, EventReceiver, Transport, ViommuDomain},
    wire::{CONFIG_LEN, FaultRecord, Features, IommuConfig},
};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, driver as ring, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    front::Front,
    rig::{ENDPOINT, IOMMU_UNIT, Kind, LONG, Setup, Translates},
};

pub(crate) enum Source {
    Viommu(Box<Viommu>),
    Here(Here),
}

impl Source {
    pub(crate) fn attach(&mut self) -> Result<(), String> {
        match self {
            Source::Viommu(viommu) => {
                { viommu.domain.upgrade().map_or(Ok(()), |domain| domain.attach(ENDPOINT)) }
                    .map_err(|error| format!("cannot attach: {error}"))
            }
            Source::Here(here) => {
                here.bind(true);
                Ok(())
            }
        }
    }

    pub(crate) fn detach(&mut self) -> Result<(), String> {
        match self {
            Source::Viommu(viommu) => {
                { viommu.domain.upgrade().map_or(Ok(()), |domain| domain.detach(ENDPOINT)) }
                    .map_err(|error| format!("cannot detach: {error}"))
            }
            Source::Here(here) => {
                here.bind(false);
                Ok(())
            }
        }
    }

    pub(crate) fn detached_reason(&self) -> FaultReason {
        match self {
            // The front end has nothing for it any more.
            Source::Here(Here { front: Some(_), .. }) => FaultReason::Mapping,
            _ => FaultReason::NoDomain,
        }
    }

    pub(crate) fn end(&mut self) {
        if let Source::Here(here) = self {
            here.end();
        }
    }

    pub(crate) fn poll_events(&mut self, mut each: impl FnMut(FaultRecord)) {
        match self {
            Source::Viommu(viommu) => {
                if viommu.events.poll(each).unwrap() {
                    event::signal(&viommu.event_kick);
                }
            }
            Source::Here(here) => {
                here.faults.0.lock().drain(..).for_each(|fault| each(fault.into()));
            }
        }
    }

    pub(crate) fn dropped_faults(&self) -> u64 {
        match self {
            Source::Viommu(viommu) => viommu.backend.iommu().figures().dropped_faults,
            Source::Here(_) => 0,
        }
    }

    pub(crate) fn mappings(&self) -> u64 {
        match self {
            Source::Viommu(viommu) => match viommu.endpoint.binding() {
                Binding::Domain(domain) => domain.mappings(),
                _ => 0,
            },
            Source::Here(here) => here.table.mappings(),
        }
    }

    pub(crate) fn failed(&self) -> Option<String> {
        match self {
            Source::Viommu(viommu) => viommu.driver.failed().map(|error| error.to_string()),
            Source::Here(_) => None,
        }
    }
}

/// Faults in the order in which they were reported.
#[derive(Default)]
struct Faults(Mutex<Vec<Fault>>);

impl FaultSink for Faults {
    fn report(&self, fault: Fault) {
        self.0.lock().push(fault);
    }
}

/// A table in this process that the driver changes itself, or that of a front end.
pub(crate) struct Here {
    endpoint: Arc<Endpoint>,
    table: Arc<SoftDomain<GuestPhys>>,
    /// Between the table and the device, if it is not the device's own.
    front: Option<Arc<Front>>,
    faults: Arc<Faults>,
}

impl Here {
    fn new(
        endpoint: &Arc<Endpoint>,
        table: Arc<SoftDomain<GuestPhys>>,
        front: Option<Arc<Front>>,
    ) -> Here {
        let faults = Arc::<Faults>::default();
        endpoint.report_to(Arc::clone(&faults) as _);
        Here { endpoint: Arc::clone(endpoint), table, front, faults }
    }

    pub(crate) fn table(
        endpoint: &Arc<Endpoint>,
        geometry: Geometry,
        limits: Limits,
    ) -> (Here, Translates) {
        let table = SoftDomain::new(geometry, limits, Arc::clone(endpoint.shootdown()));
        (Here::new(endpoint, Arc::clone(&table), None), table)
    }

    pub(crate) fn asked(
        endpoint: &Arc<Endpoint>,
        geometry: Geometry,
        limits: Limits,
        entries: u64,
    ) -> (Here, Translates) {
        let (front, binding) = Front::start(geometry, limits, endpoint.shootdown(), entries);
        let here = Here::new(endpoint, Arc::clone(front.table()), Some(Arc::clone(&front)));
        here.bind_to(binding);
        (here, front)
    }

    /// What has this front end, and an IOTLB that the endpoint is bound to already.
    pub(crate) fn of(front: Arc<Front>, endpoint: &Arc<Endpoint>) -> (Here, Translates) {
        let here = Here::new(endpoint, Arc::clone(front.table()), Some(Arc::clone(&front)));
        (here, front)
    }

    fn bind_to(&self, binding: Binding) {
        self.endpoint.shootdown().wait(self.endpoint.bind(binding));
    }

    fn bind(&self, attached: bool) {
        match &self.front {
            Some(front) => front.attach(attached),
            None if attached => self.bind_to(Binding::Domain(Arc::clone(&self.table))),
            None => self.bind_to(Binding::Blocked),
        }
    }

    fn end(&mut self) {
        self.bind_to(Binding::Blocked);
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        if let Some(front) = &self.front {
            front.end();
        }
    }
}

/// Both ends of a virtio-iommu.
pub(crate) struct Viommu {
    endpoint: Arc<Endpoint>,
    driver: Arc<Driver>,
    /// The device of the DMA API keeps it: with that it goes.
    domain: Weak<ViommuDomain>,
    events: EventReceiver,
    event_kick: OwnedFd,
    backend: IommuBackend,
}

impl Viommu {
    pub(crate) fn start(
        setup: &Setup,
        endpoint: &Arc<Endpoint>,
        geometry: Geometry,
        limits: Limits,
        workers: &Arc<[Worker]>,
        ram: &Arc<GuestRam>,
        memory: &Arc<Memory>,
    ) -> (Viommu, Translates) {
        let (page_sizes, notify) = (geometry.page_sizes, setup.notify);
        let shootdown = Arc::clone(endpoint.shootdown());
        let endpoints = Endpoints::new([Arc::clone(endpoint)], shootdown, geometry, limits);
        let features = DeviceConfig::default().features | Features::PROPOSED;
        let device = DeviceConfig { page_sizes, features, ..DeviceConfig::default() };
        let options = IommuOptions { device, unit: IOMMU_UNIT };
        let mut backend = Iommu::new(Arc::new(endpoints), options, Arc::clone(workers)).connect();

        let offer = backend.offer().features;
        let features = driver::negotiate_proposed(offer, Features::PROPOSED);
        backend.set_features(features.bits() | F_VERSION_1 | F_EVENT_IDX).unwrap();
        backend.set_memory(Arc::clone(memory)).unwrap();
        let mut config = [0; CONFIG_LEN];
        backend.config(0, &mut config).unwrap();
        let config = IommuConfig::parse(&config).unwrap();

        let transport = Events { kick: event::new().unwrap(), call: event::new().unwrap() };
        let size = setup.ring_size;
        let queue = start_ring(&mut backend, ram, 0, size, &transport.kick, Some(&transport.call));
        let buffers = RamPart::carve(ram, Driver::buffer_bytes(size, &config), 4096).unwrap();
        let buffers = Buffers { window: buffers.window().clone(), addr: buffers.gpa() };
        let options = driver::DriverConfig { notify, timeout: Some(LONG) };
        let driver =
            Driver::new(Arc::new(transport), queue, buffers, config, features, options).unwrap();

        let event_kick = event::new().unwrap();
        let queue = start_ring(&mut backend, ram, 1, 64, &event_kick, None);
        let buffers = RamPart::carve(ram, EventReceiver::buffer_bytes(64), 4096).unwrap();
        let events = EventReceiver::new(queue, buffers.window().clone(), buffers.gpa());
        event::signal(&event_kick);

        let lazy = setup.kind == Kind::LazyViommu;
        let domain = if lazy { driver.lazy_domain() } else { driver.domain() };
        let domain = domain.unwrap();
        assert_eq!(domain.is_lazy(), lazy);
        let (endpoint, weak) = (Arc::clone(endpoint), Arc::downgrade(&domain));
        (Viommu { endpoint, driver, domain: weak, events, event_kick, backend }, domain)
    }
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
