//! MAP and UNMAP requests at both ends of a virtio-iommu, over a ring in memory that they share.

use std::{
    hint::black_box,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use gungraun::prelude::*;
use ringfence_devices::iommu::Endpoints;
use ringfence_iommu::{
    Domain, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, SyncToken, Work,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint, View};
use ringfence_mem::{Access, GuestRam, Memory, Physical, Translate};
use ringfence_virtio_iommu::{
    device::{self, Device, RequestQueue},
    driver::{self, Buffers, Driver, Notify, Transport, ViommuDomain, negotiate},
    wire::IommuConfig,
};

use crate::{fixed::mix, rings};

/// Descriptors of the ring.
const SIZE: u16 = 256;
/// Memory for the ring, for requests and for the mapped pages.
const BYTES: usize = 1 << 20;
/// Mappings, no two of which touch: a request each.
const PAGES: u64 = 32;
/// Where they begin.
const BASE: u64 = 1 << 32;

fn page(n: u64) -> Range {
    Range::from_len(Iova(BASE + n * 0x3000), 4096).expect("far below the end")
}

fn target(n: u64) -> GuestPhys {
    GuestPhys((mix(n) % (BYTES as u64 >> 12)) << 12)
}

/// The device's end, and the memory in which it finds the ring.
struct Server {
    requests: RequestQueue<Endpoints>,
    bus: Physical,
}

/// Runs the device while the driver waits.
struct SameThread {
    server: Mutex<Option<Server>>,
    gone: AtomicBool,
}

impl Transport for SameThread {
    fn kick(&self, _queue: u16) {}

    fn wait(&self, _queue: u16, _timeout: Duration) {
        let mut server = self.server.lock().expect("nothing panics");
        if let Some(Server { requests, bus }) = &mut *server {
            requests.poll(bus).expect("the ring is sound");
        }
    }

    fn is_alive(&self) -> bool {
        !self.gone.load(Ordering::Relaxed)
    }
}

/// A driver and a device in one thread.
pub(crate) struct Rig {
    domain: Arc<ViommuDomain>,
    driver: Arc<Driver>,
    transport: Arc<SameThread>,
    server: Server,
    /// The device's view of its endpoint.
    view: View,
    endpoint: Arc<Endpoint>,
    maps: Vec<Map<GuestPhys>>,
    ranges: Vec<Range>,
    gather: Gather,
    token: SyncToken,
    step: Step,
}

/// How far a rig is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    Empty,
    MapsSent,
    MapsServed,
    Mapped,
    UnmapsSent,
    UnmapsServed,
    Unmapped,
}

impl Rig {
    fn new() -> Box<Rig> {
        let shootdown = Shootdown::new(1);
        let endpoint = Endpoint::new(1, Arc::clone(&shootdown), Binding::Blocked);
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let backing =
            Endpoints::new(vec![Arc::clone(&endpoint)], shootdown, geometry, Limits::NONE);
        let device = Device::new(Arc::new(backing), device::DeviceConfig::default());
        let features = negotiate(device.features().bits());
        device.set_features(features.bits());
        let config = IommuConfig::parse(&device.config()).expect("our own configuration");

        let ram = GuestRam::new(BYTES, 0).expect("memory");
        let memory = Memory::of_ram(&ram).expect("memory");
        let bus = Physical::new(Arc::clone(&memory));
        let at =
            ringfence_virtq::driver::QueueConfig { size: SIZE, event_idx: true, packed: false };
        let (front, mut queue) = rings::ends(&ram, &bus, at);
        queue.suppress_kicks();
        let requests = at.offsets().len.next_multiple_of(64);
        let len = Driver::buffer_bytes(SIZE, &config);
        let window = ram.window(requests, len).expect("it lies in the memory");
        let server = Server { requests: RequestQueue::new(Arc::new(device), queue), bus };
        let (server, gone) = (Mutex::new(Some(server)), AtomicBool::new(false));
        let transport = Arc::new(SameThread { server, gone });
        let options = driver::DriverConfig { notify: Notify::Sleep, timeout: None };
        let buffers = Buffers { window, addr: requests as u64 };
        let way = Arc::clone(&transport);
        let driver = Driver::new(way, front, buffers, config, features, options).expect("a driver");
        let domain = driver.domain().expect("a domain");
        domain.attach(1).expect("the endpoint is there");
        // From now on nothing waits, and the device's end runs only when it is called.
        let server = transport.server.lock().expect("nothing panics").take().expect("it is there");
        let view = View::new(Arc::clone(&endpoint), memory).expect("the first view");
        let maps: Vec<_> = (0..PAGES).map(|n| Map::new(page(n), target(n), Prot::RW)).collect();
        let ranges = maps.iter().map(Map::range).collect();
        let (gather, token, step) = (Gather::new(), SyncToken::DONE, Step::Empty);
        Box::new(Rig {
            domain,
            driver,
            transport,
            server,
            view,
            endpoint,
            maps,
            ranges,
            gather,
            token,
            step,
        })
    }

    fn send_maps(&mut self) {
        self.domain.map_pages(black_box(&self.maps)).expect("nothing is there");
        self.token = self.domain.sync_begin(Work::Map(&self.ranges)).expect("the device is there");
    }

    fn settle_maps(&mut self) {
        self.settle(Work::Map(&self.ranges));
    }

    fn send_unmaps(&mut self) {
        let unmapped = self.domain.unmap_pages(black_box(&self.ranges), &mut self.gather);
        unmapped.expect("they are mapped");
        self.token = self.domain.sync_begin(self.gather.work()).expect("the device is there");
        self.gather.clear_ranges();
    }

    fn settle_unmaps(&mut self) {
        self.settle(Work::Unmap { ranges: &self.ranges, exact: true });
    }

    fn settle(&self, work: Work<'_>) {
        let failed = &mut |range, error| panic!("{range}: {error}");
        assert!(self.domain.sync_poll(self.token, work, failed), "the device has replied");
    }

    /// A round of the worker that serves the ring and translates for the endpoint.
    fn serve(&mut self) {
        let Server { requests, bus } = &mut self.server;
        let progress = requests.poll(bus).expect("the ring is sound");
        self.view.quiet();
        if progress.pending {
            requests.poll(bus).expect("the ring is sound");
        }
    }

    fn step(&mut self) {
        self.step = match self.step {
            Step::Empty => (self.send_maps(), Step::MapsSent).1,
            Step::MapsSent => (self.serve(), Step::MapsServed).1,
            Step::MapsServed => (self.settle_maps(), Step::Mapped).1,
            Step::Mapped => (self.send_unmaps(), Step::UnmapsSent).1,
            Step::UnmapsSent => (self.serve(), Step::UnmapsServed).1,
            Step::UnmapsServed => (self.settle_unmaps(), Step::Unmapped).1,
            Step::Unmapped => Step::Empty,
        };
    }

    fn until(&mut self, step: Step) {
        while self.step != step {
            self.step();
        }
    }

    /// Where the device finds a page.
    fn found(&mut self, n: u64) -> Option<u64> {
        let base = self.view.memory().find_gpa(0)?.slice.as_ptr() as u64;
        let (iova, mut found) = (page(n).first().0, None);
        let each = |piece: ringfence_mem::HostSlice<'_>| found = Some(piece.as_ptr() as u64 - base);
        self.view.slices(iova, 1, Access::Read, each).ok()?;
        found
    }

    fn mappings(&self) -> u64 {
        match self.endpoint.binding() {
            Binding::Domain(domain) => domain.mappings(),
            _ => u64::MAX,
        }
    }
}

/// Continues after the counted part, and checks what both ends have done.
fn check(mut rig: Box<Rig>) {
    if rig.step < Step::Mapped {
        rig.until(Step::Mapped);
    }
    if rig.step == Step::Mapped {
        assert_eq!((rig.mappings(), rig.domain.mappings() as u64), (PAGES, PAGES));
        for n in 0..PAGES {
            assert_eq!(rig.found(n), Some(target(n).0), "page {n}");
        }
    }
    rig.until(Step::Unmapped);
    assert_eq!((rig.mappings(), rig.domain.mappings()), (0, 0));
    for n in 0..PAGES {
        assert_eq!(rig.found(n), None, "page {n} is reachable still");
    }
    let counters = rig.server.requests.counters();
    // The rig was warmed by a lap, and this was another.
    assert_eq!((counters.maps, counters.unmaps, counters.refused), (2 * PAGES, 2 * PAGES, 0));
    assert_eq!(rig.driver.stats().errors, 0);
    // The domain would wait for its endpoint to be detached.
    rig.transport.gone.store(true, Ordering::Relaxed);
    std::mem::forget(rig);
}

/// A rig that has done a whole lap, and is at a step.
fn at(step: Step) -> Box<Rig> {
    let mut rig = Rig::new();
    rig.until(Step::Unmapped);
    rig.until(Step::Empty);
    rig.until(step);
    rig
}

#[library_benchmark]
#[bench::map(args = (Step::Empty), setup = at, teardown = check)]
#[bench::unmap(args = (Step::Mapped), setup = at, teardown = check)]
fn driver_sends(mut rig: Box<Rig>) -> Box<Rig> {
    rig.step();
    rig
}

#[library_benchmark]
#[bench::map(args = (Step::MapsSent), setup = at, teardown = check)]
#[bench::unmap(args = (Step::UnmapsSent), setup = at, teardown = check)]
fn device_serves(mut rig: Box<Rig>) -> Box<Rig> {
    rig.step();
    rig
}

#[library_benchmark]
#[bench::map_and_unmap(args = (Step::Empty), setup = at, teardown = check)]
fn both_ends(mut rig: Box<Rig>) -> Box<Rig> {
    rig.until(Step::Unmapped);
    rig
}

library_benchmark_group!(name = viommu, benchmarks = [driver_sends, device_serves, both_ends]);
