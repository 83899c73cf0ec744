//! The driver against devices that misbehave.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
};

use common::{
    Bench, all_features, map, range, refused,
    ring::{Link, link},
};
use proptest::prelude::*;
use ringfence_iommu::{
    Domain, Error, Fault, FaultReason, FaultSink, Gather, Iova, Prot, Range, ReservedKind,
    ReservedRegion, Work,
};
use ringfence_mem::Translate;
use ringfence_virtio_iommu::{
    device::{EventQueue, FaultQueue},
    driver::{Buffers, Driver, DriverConfig, EventReceiver, Notify, Transport},
    wire::{
        Features, Kind, MAX_REQUEST_LEN, MapRequest, Request, Status, UnmapRequest,
        write_properties,
    },
};
use ringfence_virtq::{Chain, testing};

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

fn options() -> DriverConfig {
    // Long: only a lost wake-up would let it pass.
    DriverConfig { notify: Notify::Poll, ..DriverConfig::default() }
}

fn fresh() -> Link {
    link(16, Bench::new().config(), all_features(), options())
}

/// What a device does with a request: the used length and the bytes it writes at the *end* of the
/// reply, that is at the tail.
type Reply = (u32, Vec<u8>);

/// The reply of a conforming device.
fn ok(room: u64) -> Reply {
    (room as u32, vec![0; 4])
}

/// Serves `link` with `device`, while `driver` runs.
fn against(
    link: Link,
    device: impl Fn(Request, u64) -> Reply + Sync,
    driver: impl FnOnce(&Link) + Send,
) {
    let stop = AtomicBool::new(false);
    let Link { ram, bells, driver: driver_end, mut queue, used } = link;
    let (stop, device) = (&stop, &device);
    let device_ram = ram.clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut chain = Chain::new();
            while !stop.load(Ordering::Relaxed) {
                if !queue.pop(&device_ram, &mut chain).expect("a sane driver") {
                    thread::yield_now();
                    continue;
                }
                let mut bytes = [0; MAX_REQUEST_LEN];
                let len = chain.read_at(&device_ram, 0, &mut bytes).unwrap();
                let request = Request::parse(&bytes[..len]).expect("a legal request");
                let room = chain.writable_len();
                let (used, tail) = device(request, room);
                let at = room - tail.len().min(room as usize) as u64;
                chain.write_at(&device_ram, at, &tail).unwrap();
                queue.push_used(chain.head(), used);
                let _ = queue.publish_used();
            }
        });
        // A queue for `Link` to be whole again: never served.
        let (_, idle) = testing::pair(&testing::Ram::new(0, 4096), 0, 2, false);
        let link = Link { ram, bells, driver: driver_end, queue: idle, used };
        driver(&link);
        stop.store(true, Ordering::Relaxed);
        link.bells.alive.store(false, Ordering::Relaxed);
    });
}

#[test]
fn a_used_length_of_zero_is_an_io_error_whatever_the_tail_says() {
    // rule V34
    // rule L64
    let device = |request: Request, room| match request {
        Request::Map(MapRequest { range, .. }) if range == page(2) => (0, vec![0; 4]),
        Request::Map(MapRequest { range, .. }) if range == page(3) => (3, vec![0; 4]),
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        domain.attach(1).unwrap();
        (1..4).for_each(|n| map(&domain, page(n), 0).unwrap());
        assert_eq!(domain.iotlb_sync_map(page(1)).map(drop), Ok(()));
        for n in 2..4 {
            assert_eq!(refused(domain.iotlb_sync_map(page(n))), Some(Status::IoErr as u8));
        }
        assert_eq!(domain.mappings(), 1);
    });
}

#[test]
fn reserved_bytes_of_a_tail_are_ignored_and_an_unwritten_or_unknown_status_is_an_error() {
    // rule V34
    let device = |request: Request, room| match request {
        Request::Map(MapRequest { range, .. }) if range == page(1) => (4, vec![0, 1, 2, 3]),
        Request::Map(MapRequest { range, .. }) if range == page(2) => (4, vec![]),
        Request::Map(MapRequest { range, .. }) if range == page(3) => (4, vec![99, 0, 0, 0]),
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        domain.attach(1).unwrap();
        (1..4).for_each(|n| map(&domain, page(n), 0).unwrap());
        assert_eq!(domain.iotlb_sync_map(page(1)).map(drop), Ok(()));
        assert_eq!(refused(domain.iotlb_sync_map(page(2))), Some(0xff));
        assert_eq!(refused(domain.iotlb_sync_map(page(3))), Some(99));
    });
}

#[test]
fn a_refused_attach_or_detach_changes_nothing() {
    // rule V37: the flags of each ATTACH are compared.
    let device = |request: Request, room| match request.kind() {
        Kind::Detach => (4, vec![Status::DevErr as u8, 0, 0, 0]),
        Kind::Attach if request == attach_of(2) => (4, vec![Status::Unsupp as u8, 0, 0, 0]),
        _ => ok(room),
    };
    fn attach_of(endpoint: u32) -> Request {
        let flags = ringfence_virtio_iommu::wire::AttachFlags::empty();
        Request::Attach { domain: 0, endpoint, flags }
    }
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        assert_eq!(refused(domain.attach(2)), Some(Status::Unsupp as u8));
        domain.attach(1).unwrap();
        assert_eq!(refused(domain.detach(1)), Some(Status::DevErr as u8));
        map(&domain, page(1), 0).unwrap();
        domain.iotlb_sync_map(page(1)).unwrap();
        assert_eq!(link.driver.stats().maps, 1, "it is attached still");
    });
}

#[test]
fn a_flush_fails_as_long_as_something_unmapped_may_be_reachable() {
    let stubborn = AtomicBool::new(true);
    let device = |request: Request, room| match request {
        Request::Unmap(UnmapRequest { range, .. })
            if range == page(1) && stubborn.load(Ordering::Relaxed) =>
        {
            (4, vec![Status::DevErr as u8, 0, 0, 0])
        }
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        domain.attach(1).unwrap();
        for n in 1..3 {
            map(&domain, page(n), 0).unwrap();
            domain.unmap(page(n), &mut Gather::queued()).unwrap();
        }
        let failed = Some(Status::DevErr as u8);
        assert_eq!(refused(domain.flush_iotlb_all()), failed);
        assert_eq!(refused(domain.flush_iotlb_all()), failed, "it is still there");
        stubborn.store(false, Ordering::Relaxed);
        let before = link.driver.stats().unmaps;
        assert_eq!(domain.flush_iotlb_all().map(drop), Ok(()));
        assert_eq!(link.driver.stats().unmaps, before + 1, "one more UNMAP was sent");
    });
}

#[test]
fn what_a_device_refuses_to_unmap_is_out_of_reach_once_no_endpoint_is_attached() {
    let device = |request: Request, room| match request.kind() {
        Kind::Unmap => (4, vec![Status::DevErr as u8, 0, 0, 0]),
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        domain.attach(1).unwrap();
        map(&domain, page(1), 0).unwrap();
        domain.unmap(page(1), &mut Gather::queued()).unwrap();
        assert_eq!(refused(domain.flush_iotlb_all()), Some(Status::DevErr as u8));
        domain.detach(1).unwrap();
        assert_eq!(domain.flush_iotlb_all().map(drop), Ok(()));
    });
}

#[test]
fn an_endpoint_that_cannot_be_detached_after_a_failed_attach_still_counts() {
    // rule L65
    let stubborn = AtomicBool::new(true);
    let refuse = |room| match stubborn.load(Ordering::Relaxed) {
        true => (4, vec![Status::DevErr as u8, 0, 0, 0]),
        false => ok(room),
    };
    let device = |request: Request, room| match request {
        Request::Map(MapRequest { range, .. }) if range == page(2) => refuse(room),
        Request::Detach { .. } => refuse(room),
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let domain = link.driver.domain().unwrap();
        (1..3).for_each(|n| map(&domain, page(n), 0).unwrap());
        let failed = Some(Status::DevErr as u8);
        assert_eq!(refused(domain.attach(1)), failed);
        // The device still has the first mapping: an unmap must be sent to it.
        let before = link.driver.stats().unmaps;
        domain.unmap(page(1), &mut Gather::new()).unwrap();
        assert_eq!(link.driver.stats().unmaps, before + 1);
        for endpoint in [1, 2] {
            assert_eq!(refused(domain.attach(endpoint)), failed, "not all of it is mapped");
        }
        let other = link.driver.domain().unwrap();
        assert!(matches!(other.attach(1), Err(Error::Unsupported(_))));
        let before = link.driver.stats().maps;
        stubborn.store(false, Ordering::Relaxed);
        domain.attach(2).unwrap();
        assert_eq!(link.driver.stats().maps, before + 1, "what is mapped is sent anew");
        other.attach(1).unwrap();
    });
}

#[test]
fn an_endpoint_that_a_failing_device_may_have_attached_still_counts() {
    // rule L65
    let at_detach = AtomicU8::new(Status::Inval as u8);
    let reply = |status| (4, vec![status, 0, 0, 0]);
    let device = |request: Request, room| match request {
        Request::Attach { endpoint: 1, .. } => reply(Status::DevErr as u8),
        Request::Detach { endpoint: 1, .. } => reply(at_detach.load(Ordering::Relaxed)),
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let (domain, other) = (link.driver.domain().unwrap(), link.driver.domain().unwrap());
        let failed = Some(Status::DevErr as u8);
        assert_eq!(refused(other.attach(1)), failed);
        // That was none of its domain's: the device says that it is not attached.
        at_detach.store(Status::DevErr as u8, Ordering::Relaxed);
        map(&domain, page(1), 0).unwrap();
        domain.attach(2).unwrap();
        assert_eq!(refused(domain.attach(1)), failed);
        domain.detach(2).unwrap();
        // The device may still have the domain, with its first endpoint.
        let before = link.driver.stats().unmaps;
        domain.unmap(page(1), &mut Gather::new()).unwrap();
        assert_eq!(link.driver.stats().unmaps, before + 1);
        assert!(matches!(other.attach(1), Err(Error::Unsupported(_))));
        at_detach.store(Status::Ok as u8, Ordering::Relaxed);
        domain.detach(1).unwrap();
        assert_eq!(refused(other.attach(1)), failed);
    });
}

#[test]
fn a_refused_unmap_of_a_lazy_domain_fails_each_flush_until_one_behind_it_succeeds() {
    let [at_unmap, at_flush] = [(); 2].map(|()| AtomicBool::new(false));
    let reply = |room, fails: &AtomicBool| match fails.load(Ordering::Relaxed) {
        true => (4, vec![Status::DevErr as u8, 0, 0, 0]),
        false => ok(room),
    };
    let device = |request: Request, room| match request.kind() {
        Kind::Unmap => reply(room, &at_unmap),
        Kind::IotlbFlush => reply(room, &at_flush),
        _ => ok(room),
    };
    let bench = Bench::new();
    let features = all_features() | Features::PROPOSED;
    against(link(16, bench.config(), features, options()), device, |link| {
        let domain = link.driver.lazy_domain().unwrap();
        domain.attach(1).unwrap();
        map(&domain, page(1), 0).unwrap();
        at_unmap.store(true, Ordering::Relaxed);
        domain.unmap(page(1), &mut Gather::queued()).unwrap();
        let earlier = domain.sync_begin(Work::All).unwrap();
        domain.sync_wait(earlier);
        // Another thread's flush: its UNMAP succeeds, and then the device does not invalidate.
        at_unmap.store(false, Ordering::Relaxed);
        at_flush.store(true, Ordering::Relaxed);
        assert_eq!(refused(domain.flush_iotlb_all()), Some(Status::DevErr as u8));
        let mut failed = Vec::new();
        assert!(domain.sync_poll(earlier, Work::All, &mut |range, _| failed.push(range)));
        assert_eq!(failed, [page(1)]);
        at_flush.store(false, Ordering::Relaxed);
        assert_eq!(domain.flush_iotlb_all().map(drop), Ok(()));
    });
}

#[test]
fn properties_are_parsed_with_tolerance() {
    // rule V41
    let device = |request: Request, room: u64| match request {
        Request::Probe { endpoint: 1 } => {
            let mut reply = vec![9, 0, 2, 0, 1, 1]; // unknown
            let range = range(0x5000, 0x5fff);
            let region = ReservedRegion { range, kind: ReservedKind::Reserved };
            let mut property = [0; 24];
            assert!(write_properties(&[region], &mut property));
            let mut ignored = property;
            ignored[1] = 0x80; // reserved bits in the header
            reply.extend(ignored);
            reply.extend(property);
            reply.resize(room as usize, 0);
            (room as u32, reply)
        }
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let properties = link.driver.probe(1).unwrap();
        assert_eq!(properties.len(), 1);
        assert_eq!(link.driver.probe(2).unwrap(), []);
    });
}

#[test]
fn a_device_that_breaks_the_ring_is_given_up() {
    let link = fresh();
    let domain = link.driver.domain().unwrap();
    map(&domain, page(1), 0).unwrap();
    // A used element for a chain that was never made, of a device that has read nothing.
    link.used.write(4, &999u32.to_le_bytes());
    link.used.write(8, &4u32.to_le_bytes());
    link.used.write(2, &1u16.to_le_bytes());
    assert!(matches!(domain.attach(1), Err(Error::Gone(_))));
    assert!(link.driver.failed().is_some());
    assert!(matches!(domain.attach(1), Err(Error::Gone(_))));
    assert!(matches!(link.driver.domain().unwrap().attach(2), Err(Error::Gone(_))));
}

#[test]
fn a_granule_above_a_page_and_memory_too_small_are_refused() {
    // rule L66
    let config = Bench::new().config();
    let ram = testing::Ram::new(0, 1 << 16);
    let make = |config, len| {
        let Link { bells, .. } = fresh();
        let transport: std::sync::Arc<dyn Transport> = bells;
        let (queue, _) = testing::pair(&ram, 0, 16, false);
        let access = ringfence_mem::Access::ReadWrite;
        let window = ringfence_mem::Translate::window(&ram, 0x1000, len, access).unwrap();
        let buffers = Buffers { window, addr: 0x1000 };
        Driver::new(transport, queue, buffers, config, all_features(), options())
    };
    let needed = Driver::buffer_bytes(16, &config) as u64;
    assert!(make(config, needed).is_ok());
    assert!(matches!(make(config, needed - 1), Err(Error::Unsupported(_))));
    let page_sizes = ringfence_iommu::PageSizes::from_granule(1 << 16).unwrap();
    let large = ringfence_virtio_iommu::wire::IommuConfig { page_sizes, ..config };
    assert!(matches!(make(large, needed), Err(Error::Unsupported(_))));
}

#[test]
fn bypass_is_the_only_field_that_is_ever_written_and_only_if_negotiated() {
    // rule V32
    // The transport has no way to write anything else; without the feature it is not called.
    let link = fresh();
    let cannot = link.driver.set_bypass(true);
    assert_eq!(cannot, Err(Error::Unsupported("this transport cannot write the configuration")));
    let features = all_features().difference(ringfence_virtio_iommu::wire::Features::BYPASS_CONFIG);
    let link = common::ring::link(16, Bench::new().config(), features, options());
    let refused = link.driver.set_bypass(true);
    assert_eq!(refused, Err(Error::Unsupported("the device has no bypass to set")));
}

#[test]
fn faults_reach_the_driver_but_for_those_to_be_ignored() {
    // rule V43
    let ram = testing::Ram::new(0x8000, 0x8000);
    let (front, back) = testing::pair(&ram, 0x8000, 8, false);
    let bytes = EventReceiver::buffer_bytes(8) as u64;
    let window = ram.window(0xc000, bytes, ringfence_mem::Access::ReadWrite).unwrap();
    let mut receiver = EventReceiver::new(front, window, 0xc000);
    let faults = FaultQueue::new(64);
    let mut events = EventQueue::new(Arc::clone(&faults), back);
    let mut came = Vec::new();
    let fault = |n: u64| {
        let endpoint = if n.is_multiple_of(4) { 1000 + n as u32 } else { 7 };
        Fault { reason: FaultReason::Mapping, endpoint, iova: Iova(n), access: Prot::WRITE }
    };
    for n in 0..16 {
        faults.report(fault(n));
        events.poll(&ram).unwrap();
        // A record that is to be ignored, otherwise like any other.
        if n == 5 {
            ram.write(0xc000 + 5 * 32 + 2, &[1]).unwrap();
        }
        receiver.poll(|record| came.push((record.endpoint, record.address))).unwrap();
    }
    let expected = (0..16).filter(|n| *n != 5).map(fault);
    let expected: Vec<_> = expected.map(|fault| (fault.endpoint, Some(fault.iova))).collect();
    assert_eq!(came, expected);
}

#[test]
fn a_probe_whose_reply_is_incomplete_is_an_error() {
    // rule V34
    // rule V41: `properties` has the length that the device requires, and the tail lies behind it
    let size = Bench::new().config().probe_size;
    let device = |request: Request, room: u64| match request {
        Request::Probe { endpoint } => {
            assert_eq!(room, u64::from(size) + 4);
            let mut reply = vec![0; room as usize];
            match endpoint {
                // No tail: bytes that look like one lie among the properties.
                1 => (4, vec![]),
                2 => (0, reply),
                _ => {
                    reply[size as usize] = Status::NoEnt as u8;
                    (room as u32, reply)
                }
            }
        }
        _ => ok(room),
    };
    against(fresh(), device, |link| {
        let probe = |endpoint| refused(link.driver.probe(endpoint).map(drop));
        assert_eq!(probe(1), Some(0xff));
        assert_eq!(probe(2), Some(Status::IoErr as u8));
        assert_eq!(probe(3), Some(Status::NoEnt as u8));
        // Rule V33: an endpoint that cannot be probed is not attached.
        let domain = link.driver.domain().unwrap();
        assert!(refused(domain.attach(3)).is_some());
        assert_eq!(link.driver.stats().others, 4, "four PROBEs and no ATTACH");
    });
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Map(u64),
    SyncMap(u64),
    Unmap(u64),
    Sync,
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u64..6).prop_map(Step::Map),
        (0u64..6).prop_map(Step::SyncMap),
        (0u64..6).prop_map(Step::Unmap),
        Just(Step::Sync),
        Just(Step::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever a device replies: after a sync the driver keeps no mapping that was refused, it
    /// reports errors where they belong, and neither hangs nor panics.
    #[test]
    fn any_replies_leave_the_driver_consistent(
        replies in proptest::collection::vec((0u32..6, prop_oneof![Just(0u8), any::<u8>()]), 64),
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let accepted = std::sync::Mutex::new(std::collections::BTreeSet::new());
        let device = |request: Request, room: u64| match request {
            Request::Map(MapRequest { range, .. }) => {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let (used, status) = replies[at % replies.len()];
                let mut accepted = accepted.lock().unwrap();
                if used >= 4 && status == 0 {
                    accepted.insert(range);
                } else {
                    accepted.remove(&range);
                }
                (used.min(4), vec![status, 0, 0, 0])
            }
            Request::Unmap(UnmapRequest { range, .. }) => {
                accepted.lock().unwrap().remove(&range);
                ok(room)
            }
            _ => ok(room),
        };
        against(fresh(), device, |link| {
            let domain = link.driver.domain().unwrap();
            domain.attach(1).unwrap();
            let mut gather = Gather::new();
            for step in steps {
                match step {
                    Step::Map(n) => _ = map(&domain, page(n), n << 12),
                    Step::SyncMap(n) => _ = domain.iotlb_sync_map(page(n)),
                    Step::Unmap(n) => _ = domain.unmap(page(n), &mut gather),
                    Step::Sync => assert_eq!(domain.iotlb_sync(&mut gather).map(drop), Ok(())),
                    Step::Flush => assert_eq!(domain.flush_iotlb_all().map(drop), Ok(())),
                }
            }
            domain.flush_iotlb_all().unwrap();
            let accepted = accepted.lock().unwrap();
            for n in 0..6 {
                let believes = domain.iova_to_phys(page(n).first()).is_some();
                assert_eq!(believes, accepted.contains(&page(n)), "page {n}");
            }
        });
    }
}
