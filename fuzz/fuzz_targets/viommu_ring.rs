//! A virtio-iommu's request and event queue over rings that the driver breaks: no panic, no hang,
//! no growth past the limits, and nothing is mapped that no MAP may map.
//!
//! Memory begins as a sane driver leaves it, with requests in the ring and buffers for events. The
//! input changes bytes of it, polls, changes more.
#![no_main]

#[path = "../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use std::{cell::RefCell, sync::Arc};

use common::{Bench, range, twin::ENDPOINTS};
use libfuzzer_sys::fuzz_target;
use ringfence_iommu::{Fault, FaultReason, FaultSink, Iova, Prot, table::Limits};
use ringfence_mem::Translate;
use ringfence_virtio_iommu::{
    device::{Backing as _, Binding, DeviceConfig, EventQueue, FaultQueue, RequestQueue},
    wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, UnmapRequest},
};
use ringfence_virtq::{
    Desc, device, driver,
    testing::{Ram, areas},
};

const BASE: u64 = 0x1000;
const LEN: usize = 0x4000;
const SIZE: u16 = 16;
/// The second queue, and the buffers.
const EVENTS: u64 = BASE + 0x400;
const DATA: u64 = BASE + 0x800;

const LIMITS: Limits = Limits { table_bytes: 1 << 16, mappings: 8 };
const DOMAINS: usize = 3;

thread_local! {
    // Made once: a mapping for every run would take most of the time.
    static RAM: RefCell<Ram> = RefCell::new(Ram::new(BASE, LEN));
}

/// A sane driver's requests.
fn requests() -> Vec<Request> {
    let attach = |domain, endpoint| {
        let flags = AttachFlags::empty();
        Request::Attach { domain, endpoint, flags }
    };
    let map = |domain, page: u64| {
        let range = range(page << 12, (page << 12) + 0xfff);
        let flags = MapFlags::READ | MapFlags::WRITE;
        Request::Map(MapRequest { domain, range, phys: page << 12, flags })
    };
    let unmap = |domain| Request::Unmap(UnmapRequest { domain, range: range(0, u64::MAX) });
    vec![
        attach(1, 1),
        map(1, 0x20),
        map(1, 0x21),
        attach(2, 8),
        map(2, 0x20),
        Request::Probe { endpoint: 8 },
        unmap(1),
        Request::Detach { domain: 1, endpoint: 1 },
    ]
}

/// Fills memory; returns the device's ends of the two queues.
fn set_up(ram: &Ram, event_idx: bool) -> (device::RingConfig, device::RingConfig) {
    ram.write(BASE, &[0; LEN]).expect("all of the memory");
    let (rings, requests_at) = areas(ram, BASE, SIZE, event_idx);
    let config = driver::QueueConfig { size: SIZE, event_idx, packed: false };
    let mut queue = driver::Queue::with_config(config, rings).expect("a legal queue");
    for (n, request) in requests().into_iter().enumerate() {
        let at = DATA + n as u64 * 0x100;
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        ram.write(at, &bytes[..len]).expect("memory");
        let request = Desc { addr: at, len: len as u32, write: false };
        queue.add(&[request, Desc { addr: at + 0x80, len: 0x40, write: true }], 0).expect("room");
    }
    queue.publish();
    let (rings, events_at) = areas(ram, EVENTS, SIZE, event_idx);
    let mut queue = driver::Queue::with_config(config, rings).expect("a legal queue");
    for n in 0..4 {
        queue.add(&[Desc { addr: DATA + 0x1000 + n * 32, len: 24, write: true }], 0).expect("room");
    }
    queue.publish();
    (requests_at, events_at)
}

// Input: a byte of flags; then repeated [offset, offset, value], an offset beyond memory polls.
fuzz_target!(|data: &[u8]| RAM.with_borrow(|ram| run(ram, data)));

fn run(ram: &Ram, data: &[u8]) {
    let Some((&flags, data)) = data.split_first() else { return };
    let (requests_at, events_at) = set_up(ram, flags & 1 != 0);
    let options = DeviceConfig { max_domains: DOMAINS, probe_size: 48, ..DeviceConfig::default() };
    let bench = Bench::with(options, LIMITS);
    let faults = FaultQueue::new(8);
    let indirect = flags & 2 != 0;
    let [requests_at, events_at] =
        [requests_at, events_at].map(|config| device::RingConfig { indirect, ..config });
    let queue = device::Queue::new(requests_at, ram).expect("a legal queue");
    let mut requests = RequestQueue::new(Arc::clone(&bench.device), queue);
    let queue = device::Queue::new(events_at, ram).expect("a legal queue");
    let mut events = EventQueue::new(Arc::clone(&faults), queue);
    let mut poll = || {
        faults.report(Fault {
            reason: FaultReason::Mapping,
            endpoint: 1,
            iova: Iova(0x20_0000),
            access: Prot::READ,
        });
        let handled = requests.poll(ram).map(|progress| {
            // No reader is online: no invalidation has to wait.
            assert!(!progress.pending);
            progress.handled
        });
        assert!(handled.is_err() || handled.is_ok_and(|handled| handled <= SIZE.into()));
        if handled.is_err() {
            assert!(requests.poll(ram).is_err(), "it stays broken");
        }
        let delivered = events.poll(ram);
        assert!(delivered.is_err() || delivered.is_ok_and(|done| done.published <= SIZE.into()));
        assert!(faults.waiting() <= 8);
        check(&bench);
    };
    for change in data.chunks_exact(3) {
        let at = u64::from(u16::from_le_bytes([change[0], change[1]]));
        if ram.write(BASE + at, &change[2..]).is_err() {
            poll();
        }
    }
    poll();
}

fn check(bench: &Bench) {
    assert!(bench.device.domains() <= DOMAINS);
    for endpoint in ENDPOINTS {
        let binding = bench.endpoints.bindings.lock().get(&endpoint).cloned();
        let Some(Binding::Domain(domain)) = binding else { continue };
        assert!(domain.mappings() <= LIMITS.mappings);
        assert!(domain.table_bytes() <= LIMITS.table_bytes);
        let info = bench.endpoints.endpoint(endpoint).expect("an endpoint");
        domain.for_each(|held| {
            assert!(held.range.is_aligned(0x1000) && held.target & 0xfff == 0);
            assert!(held.prot.intersects(Prot::RW));
            assert!(info.reserved.iter().all(|region| !region.range.overlaps(held.range)));
        });
    }
}
