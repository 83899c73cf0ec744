//! The device's queues: requests in odd pieces, addresses that lead nowhere, fault events.

mod common;

use std::{cell::Cell, sync::Arc};

use common::{Bench, Endpoints, range};
use ringfence_iommu::{Fault, FaultReason, FaultSink, Iova, Prot};
use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};
use ringfence_virtio_iommu::{
    device::{EventQueue, FaultQueue, RequestQueue},
    driver::EventReceiver,
    wire::{
        AttachFlags, FAULT_LEN, FaultRecord, MAX_REQUEST_LEN, MapFlags, MapRequest, Request,
        Status, UnmapRequest,
    },
};
use ringfence_virtq::{
    Desc, driver, layout,
    testing::{Ram, pair},
};

const SIZE: u16 = 16;
const BASE: u64 = 0x8000;
const DATA: u64 = BASE + 0x4000;
const TABLE: u64 = BASE + 0x6000;

struct Rig {
    ram: Ram,
    driver: driver::Queue,
    requests: RequestQueue<Endpoints>,
    bench: Bench,
}

fn rig() -> Rig {
    let bench = Bench::new();
    let ram = Ram::new(BASE, 0x8000);
    let (driver, queue) = pair(&ram, BASE, SIZE, true);
    let requests = RequestQueue::new(Arc::clone(&bench.device), queue);
    Rig { ram, driver, requests, bench }
}

impl Rig {
    /// Sends `descs` after `request` was put at DATA; the used length.
    fn send(&mut self, request: Request, descs: &[Desc]) -> u32 {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        self.ram.write(DATA, &bytes[..len]).unwrap();
        self.ram.write(DATA + 0x1000, &[0xee; 0x1000]).unwrap();
        self.driver.add(descs, 7).unwrap();
        self.driver.publish();
        let progress = self.requests.poll(&self.ram).unwrap();
        assert_eq!((progress.handled, progress.published, progress.pending), (1, 1, false));
        let used = self.driver.pop().unwrap().expect("a reply");
        assert_eq!(used.token, 7);
        used.len
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.ram.read(at, &mut byte).unwrap();
        byte[0]
    }
}

fn attach() -> Request {
    Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() }
}

#[test]
fn a_request_may_come_in_any_pieces() {
    let mut rig = rig();
    let reply = DATA + 0x1000;
    let mut descs: Vec<_> = (0..5).map(|n| Desc::readable(DATA + n * 4, 4)).collect();
    descs.extend((0..4).map(|n| Desc::writable(reply + n * 16, 1)));
    descs.push(Desc::writable(reply + 100, 50));
    assert_eq!(rig.send(attach(), &descs), 4);
    assert_eq!([0, 16, 32, 48].map(|at| rig.byte(reply + at)), [Status::Ok as u8, 0, 0, 0]);
    assert_eq!([1, 17, 100].map(|at| rig.byte(reply + at)), [0xee; 3]);
    assert_eq!(rig.bench.device.domains(), 1);
}

#[test]
fn probe_puts_its_tail_where_the_properties_end() {
    let mut rig = rig();
    rig.send(attach(), &[Desc::readable(DATA, 20), Desc::writable(DATA + 0x1000, 4)]);
    let reply = DATA + 0x1000;
    for (endpoint, status) in [(8, Status::Ok), (77, Status::NoEnt)] {
        let probe = Request::Probe { endpoint };
        let descs =
            [Desc::readable(DATA, 72), Desc::writable(reply, 500), Desc::writable(reply + 500, 16)];
        assert_eq!(rig.send(probe, &descs), 516);
        assert_eq!(rig.byte(reply + 512), status as u8);
        assert_eq!(rig.byte(reply + 2) == 20, status == Status::Ok);
    }
    let descs = [Desc::readable(DATA, 72), Desc::writable(reply, 515)];
    assert_eq!(rig.send(Request::Probe { endpoint: 8 }, &descs), 515);
    assert_eq!((rig.byte(reply), rig.byte(reply + 511)), (0xee, Status::Inval as u8));
}

#[test]
fn addresses_that_lead_nowhere_get_completions_and_harm_nothing() {
    let mut rig = rig();
    let reply = Desc::writable(DATA + 0x1000, 4);
    assert_eq!(rig.send(attach(), &[Desc::readable(0x10, 20), reply]), 4);
    assert_eq!(rig.byte(DATA + 0x1000), Status::IoErr as u8);
    for nowhere in [0x10, u64::MAX - 3] {
        assert_eq!(rig.send(attach(), &[Desc::readable(DATA, 20), Desc::writable(nowhere, 4)]), 0);
    }
    assert_eq!(rig.send(attach(), &[Desc::readable(DATA, 20)]), 0);
    assert_eq!(rig.send(attach(), &[reply]), 0, "no head");
    assert_eq!(rig.requests.counters().refused, 3);
}

#[test]
fn a_broken_ring_ends_the_service_with_an_error() {
    // rule V30
    let mut rig = rig();
    let avail = ringfence_virtq::layout::offsets(SIZE).avail as u64;
    rig.ram.write(BASE + avail + 2, &(SIZE + 1).to_le_bytes()).unwrap();
    let error = rig.requests.poll(&rig.ram).unwrap_err();
    assert_eq!(rig.requests.poll(&rig.ram), Err(error));
    assert_eq!(rig.bench.device.domains(), 0);
}

#[test]
fn requests_before_one_that_cannot_be_read_are_carried_out() {
    let mut rig = rig();
    let map = |n: u64| {
        let range = range(n << 12, (n << 12) + 0xfff);
        Request::Map(MapRequest { domain: 1, range, phys: n << 16, flags: MapFlags::READ })
    };
    let mut bytes = [0; MAX_REQUEST_LEN];
    for (at, request) in [attach(), map(1), map(2)].iter().enumerate() {
        let len = request.emit(&mut bytes);
        let to = DATA + at as u64 * 64;
        rig.ram.write(to, &bytes[..len]).unwrap();
        let descs = [Desc::readable(to, len as u32), Desc::writable(to + 60, 4)];
        rig.driver.add(&descs, at as u64).unwrap();
    }
    let table = rig.ram.window(DATA + 0x2000, 32, Access::ReadWrite).unwrap();
    let descs = [Desc::readable(DATA, 20), Desc::writable(DATA + 60, 4)];
    rig.driver.add_indirect(0x10, &table, &descs, 3).unwrap();
    rig.driver.publish();
    assert!(rig.requests.poll(&rig.ram).is_err());
    assert_eq!(rig.bench.reads(1, 0x2000), Some(0x2_0000));
    assert_eq!(rig.requests.counters().maps, 2);
}

#[test]
fn a_batch_is_completed_in_the_order_of_the_ring() {
    let mut rig = rig();
    let flags = MapFlags::READ;
    let map = |n: u64| range(n << 12, (n << 12) + 0xfff);
    let requests = [
        attach(),
        Request::Map(MapRequest { domain: 1, range: map(1), phys: 0, flags }),
        Request::Unmap(UnmapRequest { domain: 1, range: map(1) }),
        Request::Map(MapRequest { domain: 1, range: map(1), phys: 0x5000, flags }),
        Request::Map(MapRequest { domain: 9, range: map(1), phys: 0x5000, flags }),
    ];
    let mut bytes = [0; MAX_REQUEST_LEN];
    for (at, request) in requests.iter().enumerate() {
        let len = request.emit(&mut bytes);
        let to = DATA + at as u64 * 64;
        rig.ram.write(to, &bytes[..len]).unwrap();
        let descs = [Desc::readable(to, len as u32), Desc::writable(to + 60, 4)];
        rig.driver.add(&descs, at as u64).unwrap();
    }
    rig.driver.publish();
    let progress = rig.requests.poll(&rig.ram).unwrap();
    assert_eq!((progress.handled, progress.published, progress.interrupt), (5, 5, true));
    for at in 0..5 {
        assert_eq!(rig.driver.pop().unwrap().map(|used| (used.token, used.len)), Some((at, 4)));
        let expected = if at == 4 { Status::NoEnt } else { Status::Ok };
        assert_eq!(rig.byte(DATA + at * 64 + 60), expected as u8);
    }
    assert_eq!(rig.bench.reads(1, 0x1000), Some(0x5000));
    let counters = rig.requests.counters();
    assert_eq!((counters.maps, counters.unmaps, counters.others), (3, 1, 1));
    assert_eq!((counters.refused, counters.syncs), (1, 1));
}

fn fault(n: u64) -> Fault {
    Fault { reason: FaultReason::Mapping, endpoint: 1, iova: Iova(n), access: Prot::WRITE }
}

#[test]
fn faults_reach_the_driver_and_wait_for_buffers_up_to_a_limit() {
    // rule V29
    let ram = Ram::new(BASE, 0x8000);
    let (front, back) = pair(&ram, BASE, 4, false);
    let bytes = EventReceiver::buffer_bytes(4) as u64;
    let window = ram.window(DATA, bytes, Access::ReadWrite).unwrap();
    let faults = FaultQueue::new(3);
    let mut events = EventQueue::new(Arc::clone(&faults), back);
    faults.report(fault(0));
    assert_eq!(events.poll(&ram).unwrap().published, 0, "no buffer: it waits");
    assert_eq!(faults.waiting(), 1, "and is seen to wait");
    let mut receiver = EventReceiver::new(front, window, DATA);
    let mut records = Vec::new();
    for n in 1..10 {
        faults.report(fault(n));
    }
    assert_eq!((faults.waiting(), faults.dropped()), (3, 7));
    let progress = events.poll(&ram).unwrap();
    assert_eq!((progress.published, progress.interrupt), (3, true));
    receiver.poll(|record| records.push(record)).unwrap();
    let expected: Vec<FaultRecord> = (0..3).map(|n| fault(n).into()).collect();
    assert_eq!(records, expected);
    // The buffers are the device's again.
    (20..24).for_each(|n| faults.report(fault(n)));
    assert_eq!(events.poll(&ram).unwrap().published, 3);
}

/// Memory in which the driver makes the same chain available again whenever its table is read.
struct Feeds<'a> {
    ram: &'a Ram,
    avail: Window,
    made: Cell<u16>,
}

impl Translate for Feeds<'_> {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        if addr == TABLE && self.made.get() < 1000 {
            self.made.set(self.made.get() + 1);
            self.avail.write(2, &self.made.get().to_le_bytes());
        }
        self.ram.slices(addr, len, access, each)
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.ram.window(addr, len, access)
    }
}

#[test]
fn a_driver_that_goes_on_offering_small_buffers_holds_up_nothing_else() {
    const SIZE: u16 = 4;
    let ram = Ram::new(BASE, 0x8000);
    let (mut front, back) = pair(&ram, BASE, SIZE, false);
    let faults = FaultQueue::new(8);
    let mut events = EventQueue::new(Arc::clone(&faults), back);
    let table = ram.window(TABLE, 64, Access::ReadWrite).unwrap();
    front
        .add_indirect(TABLE, &table, &[Desc::writable(DATA, 8), Desc::writable(DATA + 8, 8)], 1)
        .unwrap();
    front.publish();
    let avail = BASE + layout::offsets(SIZE).avail as u64;
    let avail = ram.window(avail, layout::avail_bytes(SIZE) as u64, Access::ReadWrite).unwrap();
    // The same head in every place.
    let mut head = [0; 2];
    avail.read(4, &mut head);
    (0..usize::from(SIZE)).for_each(|at| avail.write(4 + 2 * at, &head));
    let feeds = Feeds { ram: &ram, avail, made: Cell::new(1) };
    faults.report(fault(5));
    for _ in 0..3 {
        let progress = events.poll(&feeds).unwrap();
        assert_eq!((progress.handled, progress.published), (0, SIZE.into()));
    }
}

#[test]
fn a_buffer_too_small_for_a_record_is_given_back_empty() {
    // rule V29
    let ram = Ram::new(BASE, 0x8000);
    let (mut front, back) = pair(&ram, BASE, 4, false);
    let faults = FaultQueue::new(8);
    let mut events = EventQueue::new(Arc::clone(&faults), back);
    front.add(&[Desc::writable(DATA, FAULT_LEN as u32 - 1)], 1).unwrap();
    front.add(&[Desc::writable(DATA, 10), Desc::writable(DATA + 10, 14)], 2).unwrap();
    front.publish();
    faults.report(fault(5));
    let progress = events.poll(&ram).unwrap();
    assert_eq!((progress.handled, progress.published), (1, 2));
    assert_eq!(front.pop().unwrap().map(|used| (used.token, used.len)), Some((1, 0)));
    assert_eq!(front.pop().unwrap().map(|used| (used.token, used.len)), Some((2, 24)));
    let mut bytes = [0; FAULT_LEN];
    ram.read(DATA, &mut bytes).unwrap();
    assert_eq!(FaultRecord::parse(&bytes), Some(fault(5).into()));
    // Nor does a buffer that leads nowhere harm anything.
    front.add(&[Desc::writable(8, FAULT_LEN as u32)], 3).unwrap();
    front.publish();
    faults.report(fault(6));
    events.poll(&ram).unwrap();
    assert_eq!(front.pop().unwrap().map(|used| (used.token, used.len)), Some((3, 0)));
    assert_eq!(faults.dropped(), 1);
}
