//! The driver against the device, over a ring in memory, two threads.

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{
    Bench, Endpoints, RESERVED, map, range, refused,
    ring::{Served, link},
};
use ringfence_iommu::{
    Domain, Error, Gather, GuestPhys, Iova, Map, Pending, Prot, Range, ReservedKind, table::Limits,
};
use ringfence_virtio_iommu::{
    device::{Binding, DeviceConfig, RequestQueue},
    driver::{DriverConfig, Notify, ViommuDomain},
    wire::{Features, IommuConfig, Status},
};
use ringfence_virtq::testing::Ram;

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

fn served(notify: Notify, polling: bool) -> Served {
    Served::start(Bench::new(), 64, DriverConfig { notify, ..DriverConfig::default() }, polling)
}

fn sleeping() -> Served {
    served(Notify::Sleep, false)
}

fn unmap_now(domain: &ViommuDomain, range: Range) -> ringfence_iommu::Result<u128> {
    let mut gather = Gather::new();
    let bytes = domain.unmap(range, &mut gather)?;
    domain.iotlb_sync(&mut gather).map(|_synced| bytes)
}

/// Mappings as the device has them.
fn reads(served: &Served, endpoint: u32, iova: u64) -> Option<u64> {
    served.endpoints.access(endpoint, iova, Prot::READ)
}

/// The device's own domain of endpoint 1.
fn devices_domain(served: &Served) -> std::sync::Arc<common::Soft> {
    match served.endpoints.bindings.lock().get(&1) {
        Some(Binding::Domain(domain)) => std::sync::Arc::clone(domain),
        other => panic!("endpoint 1 is bound to {other:?}"),
    }
}

#[test]
fn a_mapping_made_here_is_one_there_in_every_mode() {
    for notify in [Notify::Sleep, Notify::Poll, Notify::Adaptive] {
        for polling in [false, true] {
            let served = served(notify, polling);
            let domain = served.driver.domain().unwrap();
            domain.attach(1).unwrap();
            for round in 0..50 {
                map(&domain, page(round), 0x10_0000 + (round << 12)).unwrap();
                domain.iotlb_sync_map(page(round)).unwrap();
                assert_eq!(reads(&served, 1, (round << 12) + 5), Some(0x10_0005 + (round << 12)));
                assert_eq!(
                    domain.iova_to_phys(Iova((round << 12) + 5)),
                    Some(GuestPhys(0x10_0005 + (round << 12)))
                );
            }
            for round in 0..50 {
                assert_eq!(unmap_now(&domain, page(round)), Ok(4096));
                assert_eq!(reads(&served, 1, round << 12), None);
                assert_eq!(domain.iova_to_phys(Iova(round << 12)), None);
            }
            domain.detach(1).unwrap();
            assert_eq!(domain.driver().failed(), None);
        }
    }
}

#[test]
fn requests_are_queued_without_a_kick_and_one_sync_waits_for_all() {
    // rule L64
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    let before = served.driver.stats();
    for n in 0..20 {
        map(&domain, page(n), n << 12).unwrap();
    }
    let queued = served.driver.stats().since(&before);
    assert_eq!((queued.maps, queued.kicks, queued.syncs), (20, 0, 0));
    domain.iotlb_sync_map(range(0, 0x13fff)).unwrap();
    for n in 0..20 {
        assert_eq!(reads(&served, 1, n << 12), Some(n << 12));
    }
    let mut gather = Gather::queued();
    for n in 0..20 {
        assert_eq!(domain.unmap(page(n), &mut gather), Ok(4096));
    }
    domain.flush_iotlb_all().unwrap();
    assert!((0..20).all(|n| reads(&served, 1, n << 12).is_none()));
    let done = served.driver.stats().since(&before);
    assert_eq!((done.maps, done.unmaps, done.syncs, done.errors), (20, 20, 2, 0));
    assert!(done.kicks <= 2, "{} kicks", done.kicks);
    assert_eq!(done.sync_wait_ns.count(), 2);
}

/// What takes so long never happens.
const LONG: Duration = Duration::from_secs(120);

/// Serves until nothing is in the ring; the next request that is waited for kicks.
fn serve_all(requests: &mut RequestQueue<Endpoints>, ram: &Ram) {
    loop {
        while !requests.poll(ram).unwrap().is_idle() {}
        // What came meanwhile comes without a kick.
        if !requests.queue().enable_kicks() {
            break;
        }
    }
}

#[test]
fn a_sync_kicks_a_device_that_sleeps() {
    // rule L64
    let bench = Bench::new();
    let features = bench.device.features();
    let link = link(64, bench.config(), features, DriverConfig::default());
    let mut requests = RequestQueue::new(bench.device, link.queue);
    let domain = link.driver.domain().unwrap();
    let alive = |alive| link.bells.alive.store(alive, std::sync::atomic::Ordering::Relaxed);
    let mut serve = || {
        assert!(requests.queue().next_avail() < 100);
        serve_all(&mut requests, &link.ram);
        link.bells.used.raise();
    };
    thread::scope(|scope| {
        let attach = scope.spawn(|| domain.attach(1));
        // PROBE and ATTACH, each waited for: the second needs no kick if it comes before the device
        // sleeps again.
        let begun = Instant::now();
        while !attach.is_finished() {
            if link.bells.kick.wait(Duration::from_millis(1)) {
                serve();
            }
            // Without its kick it fails.
            alive(begun.elapsed() < LONG);
        }
        attach.join().unwrap().unwrap();
        // A kick for what was served without it.
        link.bells.kick.wait(Duration::ZERO);
        let kicks = || link.bells.kicks.load(std::sync::atomic::Ordering::Relaxed);
        let before = kicks();
        assert!((1..=2).contains(&before), "{before} kicks for PROBE and ATTACH");
        for n in 0..10 {
            map(&domain, page(n), 0).unwrap();
        }
        assert_eq!(kicks(), before, "no kick for requests that are not waited for");
        let sync = scope.spawn(|| domain.iotlb_sync_map(Range::ALL));
        alive(link.bells.kick.wait(LONG));
        serve();
        sync.join().unwrap().unwrap();
        assert_eq!(kicks(), before + 1);
    });
    alive(false);
}

#[test]
fn a_sync_that_was_begun_is_over_once_the_device_has_completed_it_and_not_before() {
    // rules L17, L64
    let bench = Bench::new();
    let features = bench.device.features();
    let link = link(64, bench.config(), features, DriverConfig::default());
    let mut requests = RequestQueue::new(bench.device, link.queue);
    let domain = link.driver.domain().unwrap();
    let mut serve = || serve_all(&mut requests, &link.ram);
    thread::scope(|scope| {
        let attach = scope.spawn(|| domain.attach(1));
        while !attach.is_finished() {
            serve();
        }
        attach.join().unwrap().unwrap();
    });
    let there = |n: u64| bench.endpoints.access(1, n << 12, Prot::READ).is_some();
    let kicks = || link.driver.stats().kicks;
    let before = kicks();
    (0..4).for_each(|n| map(&domain, page(n), n << 12).unwrap());
    let mut maps = Pending::map(&*domain, vec![range(0, 0x3fff)]);
    assert_eq!(kicks(), before + 1, "a sync that begins kicks");
    for _ in 0..3 {
        assert!(!maps.poll(&*domain));
        assert_eq!(maps.outcome(Range::ALL), None);
    }
    // What comes later is not waited for.
    map(&domain, page(9), 0).unwrap();
    assert!(!there(0));
    serve();
    assert!(maps.poll(&*domain));
    assert!(matches!(maps.outcome(Range::ALL), Some(Ok(_))));
    assert!((0..4).all(there));

    let mut gather = Gather::new();
    domain.unmap(range(0, 0x3fff), &mut gather).unwrap();
    let mut unmaps = Pending::unmap(&*domain, vec![range(0, 0x3fff)], &mut gather);
    assert!(gather.is_empty());
    assert!(!unmaps.poll(&*domain));
    assert!((0..4).all(there), "the device has not looked yet");
    serve();
    assert!(unmaps.poll(&*domain));
    assert!(matches!(unmaps.outcome(Range::ALL), Some(Ok(_))));
    assert!(!(0..4).any(there));
    // Nothing is in the ring: there is nothing to wait for.
    let mut nothing = Pending::unmap(&*domain, vec![page(0)], &mut Gather::new());
    assert!(nothing.poll(&*domain));
    link.bells.alive.store(false, std::sync::atomic::Ordering::Relaxed);
}

#[test]
fn what_a_begun_sync_finds_refused_is_reported_to_its_ranges_and_to_no_other() {
    // rule L34
    let limits = Limits { mappings: 3, ..Limits::NONE };
    let bench = Bench::with(DeviceConfig::default(), limits);
    let served = Served::start(bench, 64, DriverConfig::default(), false);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    (0..4).for_each(|n| map(&domain, page(n), n << 12).unwrap());
    let mut sync = Pending::map(&*domain, vec![page(0), page(1)]);
    let mut other = Pending::map(&*domain, vec![page(2), page(3)]);
    other.wait(&*domain);
    assert!(sync.poll(&*domain));
    assert!(matches!(sync.outcome(Range::ALL), Some(Ok(_))));
    for _ in 0..2 {
        assert!(other.poll(&*domain));
        assert!(matches!(other.outcome(page(2)), Some(Ok(_))));
        assert_eq!(refused(other.outcome(page(3)).unwrap()), Some(Status::NoMem as u8));
    }
    assert_eq!(domain.mappings(), 3);

    // Behind the driver's back a mapping grows: its UNMAP would split it.
    let theirs = devices_domain(&served);
    theirs.unmap(Range::ALL, &mut Gather::new()).unwrap();
    theirs.map(Map::new(range(0x2000, 0x4fff), GuestPhys(0), Prot::READ)).unwrap();
    let mut gather = Gather::new();
    domain.unmap(page(2), &mut gather).unwrap();
    let mut another = Pending::unmap(&*domain, vec![page(0)], &mut Gather::new());
    another.wait(&*domain);
    assert!(matches!(another.outcome(Range::ALL), Some(Ok(_))), "another thread's");
    let mut sync = Pending::unmap(&*domain, vec![page(2)], &mut gather);
    sync.wait(&*domain);
    assert_eq!(refused(sync.outcome(page(2)).unwrap()), Some(Status::Range as u8));
}

#[test]
fn a_full_ring_is_emptied_without_a_sync() {
    // rule L64
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    for n in 0..500 {
        map(&domain, page(n), n << 12).unwrap();
    }
    assert!(served.driver.stats().ring_full > 0);
    domain.iotlb_sync_map(range(0, (500 << 12) - 1)).unwrap();
    assert!((0..500).all(|n| reads(&served, 1, n << 12) == Some(n << 12)));
    assert_eq!(unmap_now(&domain, Range::ALL), Ok(500 * 4096));
    assert!((0..500).all(|n| reads(&served, 1, n << 12).is_none()));
}

#[test]
fn nothing_is_sent_unattached_and_the_first_attach_sends_it_all() {
    // rule L65
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    for n in 0..200 {
        map(&domain, page(n), n << 20).unwrap();
    }
    domain.iotlb_sync_map(range(0, 0xfffff)).unwrap();
    assert_eq!(unmap_now(&domain, page(7)), Ok(4096));
    domain.flush_iotlb_all().unwrap();
    assert_eq!(served.driver.stats().requests(), 0);
    domain.attach(1).unwrap();
    for n in 0..200 {
        assert_eq!(reads(&served, 1, n << 12), (n != 7).then_some(n << 20));
    }
    domain.attach(2).unwrap();
    assert_eq!(reads(&served, 2, 0x3000), Some(3 << 20));
    domain.detach(1).unwrap();
    domain.detach(2).unwrap();
    let sent = served.driver.stats().requests();
    map(&domain, page(7), 0).unwrap();
    assert_eq!(served.driver.stats().requests(), sent);
    domain.attach(2).unwrap();
    assert_eq!(reads(&served, 2, 0x7000), Some(0));
    assert_eq!(domain.mappings(), 200);
}

#[test]
fn an_unmap_that_would_split_is_refused_before_anything_is_sent() {
    // rule L65
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    map(&domain, range(0x1000, 0x4fff), 0).unwrap();
    map(&domain, page(9), 0).unwrap();
    domain.iotlb_sync_map(Range::ALL).unwrap();
    let before = served.driver.stats();
    for wanted in [page(1), page(4), range(0x2000, 0x9fff), range(0, 0x1fff)] {
        let refused = domain.unmap(wanted, &mut Gather::new());
        assert!(matches!(refused, Err(Error::WouldSplit { .. })), "{refused:?}");
    }
    assert_eq!(domain.unmap(page(100), &mut Gather::new()), Ok(0));
    assert_eq!(served.driver.stats().since(&before).requests(), 0);
    assert_eq!(reads(&served, 1, 0x1000), Some(0));
}

#[test]
fn requests_never_leave_the_ranges_and_an_unmap_ends_where_mappings_do() {
    // rule V35
    // rule V40
    let input_range = range(0x1_0000, 0xffff_ffff);
    let options = DeviceConfig { input_range, domain_range: (5, 6), ..DeviceConfig::default() };
    let bench = Bench::with(options, Limits::NONE);
    let served = Served::start(bench, 64, DriverConfig::default(), false);
    let domain = served.driver.domain().unwrap();
    assert_eq!(served.driver.domain().unwrap().id(), 6);
    let second = served.driver.domain().unwrap();
    assert_eq!((domain.id(), second.id()), (5, 6), "the number of a dropped domain is used again");
    assert!(matches!(served.driver.domain(), Err(Error::Full { .. })));
    assert_eq!(domain.geometry().aperture, input_range);
    domain.attach(1).unwrap();
    let outside = map(&domain, page(1), 0);
    assert!(matches!(outside, Err(Error::OutsideAperture { .. })));
    map(&domain, page(0x20), 0).unwrap();
    map(&domain, page(0x30), 0).unwrap();
    // The device would complete nothing here with RANGE: it is sent [first mapping, last mapping].
    assert_eq!(unmap_now(&domain, Range::ALL), Ok(8192));
    assert_eq!(served.driver.stats().errors, 0);
}

#[test]
fn a_refused_map_is_reported_by_the_sync_that_covers_it_and_rolled_back() {
    let limits = Limits { mappings: 3, ..Limits::NONE };
    let bench = Bench::with(DeviceConfig::default(), limits);
    let served = Served::start(bench, 64, DriverConfig::default(), false);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    for n in 0..4 {
        map(&domain, page(n), n << 12).unwrap();
    }
    // Another thread's sync elsewhere does not take the report away.
    assert_eq!(domain.iotlb_sync_map(page(0)).map(drop), Ok(()));
    assert_eq!(refused(domain.iotlb_sync_map(page(3))), Some(Status::NoMem as u8));
    assert_eq!(domain.iova_to_phys(Iova(0x3000)), None);
    assert_eq!(domain.mappings(), 3);
    assert_eq!(domain.iotlb_sync_map(Range::ALL).map(drop), Ok(()), "reported once");
    assert_eq!(served.driver.stats().errors, 1);
    // The caller unmaps the whole, and what is freed can be mapped again.
    assert_eq!(unmap_now(&domain, range(0, 0x3fff)), Ok(3 * 4096));
    map(&domain, page(3), 0x9000).unwrap();
    domain.iotlb_sync_map(page(3)).unwrap();
    assert_eq!(reads(&served, 1, 0x3000), Some(0x9000));
}

#[test]
fn what_the_device_finds_mapped_or_out_of_range_is_reported() {
    let input_range = range(0, (1 << 40) - 1);
    let options = DeviceConfig { input_range, ..DeviceConfig::default() };
    let bench = Bench::with(options, Limits::NONE);
    let config = IommuConfig { input_range: Range::ALL, ..bench.config() };
    let served = Served::with_config(bench, 64, DriverConfig::default(), false, config);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    // Behind the driver's back.
    devices_domain(&served).map(Map::new(page(5), GuestPhys(0), Prot::READ)).unwrap();
    map(&domain, range(0x4000, 0x6fff), 0).unwrap();
    map(&domain, page(1 << 30), 0).unwrap();
    map(&domain, page(8), 0x8000).unwrap();
    assert_eq!(refused(domain.iotlb_sync_map(range(0, 0x7fff))), Some(Status::Inval as u8));
    assert_eq!(refused(domain.iotlb_sync_map(Range::ALL)), Some(Status::Range as u8));
    assert_eq!(domain.mappings(), 1);
    assert_eq!(domain.iova_to_phys(Iova(0x8000)), Some(GuestPhys(0x8000)));
}

#[test]
fn a_refused_unmap_is_reported_by_its_sync_or_by_a_flush() {
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    let refuse = |domain: &ViommuDomain| {
        map(domain, page(5), 0).unwrap();
        domain.iotlb_sync_map(page(5)).unwrap();
        // Behind the driver's back the mapping grows: the UNMAP would split it.
        let theirs = devices_domain(&served);
        theirs.unmap(Range::ALL, &mut Gather::new()).unwrap();
        theirs.map(Map::new(range(0x4000, 0x6fff), GuestPhys(0), Prot::READ)).unwrap();
    };
    let cleanup = || {
        devices_domain(&served).unmap(Range::ALL, &mut Gather::new()).unwrap();
    };
    refuse(&domain);
    let mut gather = Gather::new();
    assert_eq!(domain.unmap(page(5), &mut gather), Ok(4096));
    assert_eq!(domain.iotlb_sync(&mut Gather::new()).map(drop), Ok(()), "another thread's");
    assert_eq!(refused(domain.iotlb_sync(&mut gather)), Some(Status::Range as u8));
    assert_eq!(domain.flush_iotlb_all().map(drop), Ok(()), "reported once");
    cleanup();
    refuse(&domain);
    assert_eq!(domain.unmap(page(5), &mut Gather::queued()), Ok(4096));
    assert_eq!(refused(domain.flush_iotlb_all()), Some(Status::Range as u8));
}

#[test]
fn a_refused_unmap_is_reported_to_its_thread_even_after_other_threads_have_seen_it() {
    // rule L42
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    // Thread A unmaps more ranges than a gather holds, so that it also covers what lies between.
    let mut theirs = Gather::new();
    for n in 0..100 {
        map(&domain, page(4 * n), 0).unwrap();
        domain.unmap(page(4 * n), &mut theirs).unwrap();
    }
    let between = theirs.ranges().iter().find(|range| range.len() > 4096).unwrap();
    let mine = page((between.first().0 >> 12) + 1);
    let refuse = || {
        map(&domain, mine, 0).unwrap();
        domain.iotlb_sync_map(mine).unwrap();
        // Behind the driver's back the mapping grows: the UNMAP would split it.
        let devices = devices_domain(&served);
        devices.unmap(Range::ALL, &mut Gather::new()).unwrap();
        let grown = range(mine.first().0 - 0x1000, mine.last().0);
        devices.map(Map::new(grown, GuestPhys(0), Prot::READ)).unwrap();
        let mut gather = Gather::new();
        assert_eq!(domain.unmap(mine, &mut gather), Ok(4096));
        gather
    };
    // Thread B's UNMAP is refused, and A syncs first.
    let mut gather = refuse();
    assert_eq!(refused(domain.iotlb_sync(&mut theirs)), Some(Status::Range as u8));
    assert_eq!(refused(domain.iotlb_sync(&mut gather)), Some(Status::Range as u8));
    devices_domain(&served).unmap(Range::ALL, &mut Gather::new()).unwrap();
    // And so if A flushes.
    let mut gather = refuse();
    assert_eq!(refused(domain.flush_iotlb_all()), Some(Status::Range as u8));
    assert_eq!(refused(domain.flush_iotlb_all()), Some(Status::Range as u8));
    assert_eq!(refused(domain.iotlb_sync(&mut gather)), Some(Status::Range as u8));
}

#[test]
fn a_late_refusal_does_not_take_back_a_later_mapping() {
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    let theirs = devices_domain(&served);
    theirs.map(Map::new(page(5), GuestPhys(0), Prot::READ)).unwrap();
    // MAP is refused, UNMAP removes what is in its way, the second MAP succeeds: all in one batch.
    map(&domain, page(5), 0x1000).unwrap();
    assert_eq!(domain.unmap(page(5), &mut Gather::new()), Ok(4096));
    map(&domain, page(5), 0x2000).unwrap();
    assert_eq!(domain.iotlb_sync_map(page(5)).map(drop), Ok(()));
    assert_eq!(domain.iova_to_phys(Iova(0x5000)), Some(GuestPhys(0x2000)));
    assert_eq!(reads(&served, 1, 0x5000), Some(0x2000));
}

#[test]
fn an_attach_whose_mappings_are_refused_does_not_happen() {
    let limits = Limits { mappings: 3, ..Limits::NONE };
    let bench = Bench::with(DeviceConfig::default(), limits);
    let served = Served::start(bench, 16, DriverConfig::default(), false);
    let domain = served.driver.domain().unwrap();
    for n in 0..40 {
        map(&domain, page(n), n << 12).unwrap();
    }
    assert_eq!(refused(domain.attach(1)), Some(Status::NoMem as u8));
    assert_eq!(reads(&served, 1, 0), None);
    assert_eq!(domain.mappings(), 40, "nothing that was noted is lost");
    unmap_now(&domain, range(0x3000, 0xfffff)).unwrap();
    domain.attach(1).unwrap();
    assert_eq!(reads(&served, 1, 0x2000), Some(0x2000));
}

#[test]
fn an_unknown_endpoint_is_an_error_and_an_endpoint_has_one_domain() {
    let served = sleeping();
    let (one, two) = (served.driver.domain().unwrap(), served.driver.domain().unwrap());
    assert_eq!(refused(one.attach(77)), Some(Status::NoEnt as u8));
    one.attach(1).unwrap();
    assert!(matches!(two.attach(1), Err(Error::Unsupported(_))));
    assert!(matches!(two.detach(1), Err(Error::Unsupported(_))));
    drop(one);
    assert_eq!(reads(&served, 1, 0), None);
    two.attach(1).unwrap();
}

#[test]
fn an_endpoint_is_probed_and_its_regions_are_not_mapped() {
    // rule V33
    // rule V42
    let served = sleeping();
    let domain = served.driver.domain().unwrap();
    let before = served.driver.stats();
    domain.attach(8).unwrap();
    assert_eq!(served.driver.stats().since(&before).others, 2, "a PROBE and an ATTACH");
    let reserved = domain.geometry().reserved;
    let kinds: Vec<_> = reserved.iter().map(|region| region.kind).collect();
    assert_eq!(kinds, [ReservedKind::Reserved, ReservedKind::Msi]);
    assert!(matches!(map(&domain, page(RESERVED.0 >> 12), 0), Err(Error::Reserved { .. })));
    // What is mapped already where an endpoint cannot have it keeps the endpoint out.
    let other = served.driver.domain().unwrap();
    map(&other, page(3), 0).unwrap();
    domain.detach(8).unwrap();
    assert!(matches!(other.attach(8), Err(Error::Reserved { .. })));
}

#[test]
fn a_device_that_names_no_window_for_msis_gets_one() {
    // rule L66
    let served = sleeping();
    let regions = served.driver.reserved_regions(1).unwrap();
    assert_eq!(regions.len(), 1);
    assert_eq!(regions[0].kind, ReservedKind::Msi);
    assert_eq!(regions[0].range, range(0x800_0000, 0x80f_ffff));
    assert_eq!(served.driver.reserved_regions(8).unwrap().len(), 2);
}

#[test]
fn a_device_that_goes_silent_is_given_up_and_no_thread_waits_for_ever() {
    for notify in [Notify::Sleep, Notify::Poll, Notify::default()] {
        let options = DriverConfig { notify, timeout: Some(Duration::from_millis(60)) };
        // A device that a busy machine does not run in time is given up, too.
        let begin = |_| {
            let served = Served::start(Bench::new(), 16, options, false);
            let domain = served.driver.domain().ok()?;
            domain.attach(1).ok().map(|()| (served, domain))
        };
        let (mut served, domain) =
            (0..1000).find_map(begin).expect("a device that completes requests");
        served.silence();
        let start = Instant::now();
        let gone = thread::scope(|scope| {
            let waiters: Vec<_> = (0..4u64)
                .map(|thread| {
                    let domain = &domain;
                    scope.spawn(move || {
                        (0..20).try_for_each(|n| {
                            map(domain, page(thread * 100 + n), 0)?;
                            domain.iotlb_sync_map(page(thread * 100 + n)).map(drop)
                        })
                    })
                })
                .collect();
            waiters
                .into_iter()
                .all(|waiter| matches!(waiter.join().expect("no panic"), Err(Error::Gone(_))))
        });
        assert!(gone);
        assert!(start.elapsed() < Duration::from_secs(120), "took {:?}", start.elapsed());
        // From here on it stays so, at once.
        assert!(matches!(map(&domain, page(1000), 0), Err(Error::Gone(_))));
        assert!(matches!(domain.flush_iotlb_all(), Err(Error::Gone(_))));
        assert!(served.driver.failed().is_some());
    }
}

#[test]
fn a_transport_that_knows_that_the_device_died_ends_the_wait_early() {
    let options =
        DriverConfig { timeout: Some(Duration::from_secs(3600)), ..DriverConfig::default() };
    let mut served = Served::start(Bench::new(), 16, options, false);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    served.silence();
    served.bells.alive.store(false, std::sync::atomic::Ordering::Relaxed);
    map(&domain, page(1), 0).unwrap();
    assert!(matches!(domain.iotlb_sync_map(page(1)), Err(Error::Gone(_))));
}

#[test]
fn many_threads_share_the_ring_and_none_loses_a_wake_up() {
    for notify in [Notify::Sleep, Notify::Adaptive] {
        for polling in [false, true] {
            let options = DriverConfig { notify, ..DriverConfig::default() };
            // So small a ring that it is full most of the time.
            let served = Served::start(Bench::new(), 8, options, polling);
            let domain = served.driver.domain().unwrap();
            domain.attach(1).unwrap();
            thread::scope(|scope| {
                for thread in 0..4u64 {
                    let (domain, served) = (&domain, &served);
                    scope.spawn(move || {
                        let base = thread << 20;
                        for round in 0..60 {
                            let at = range(base, base + 0x3fff);
                            for n in 0..4 {
                                map(domain, page((base >> 12) + n), round << 12).unwrap();
                            }
                            domain.iotlb_sync_map(at).unwrap();
                            assert_eq!(reads(served, 1, base), Some(round << 12));
                            assert_eq!(unmap_now(domain, at), Ok(4 * 4096));
                            assert_eq!(reads(served, 1, base), None);
                        }
                    });
                }
            });
            let stats = served.driver.stats();
            assert_eq!((stats.maps, stats.unmaps, stats.errors), (960, 240, 0));
        }
    }
}

#[test]
fn an_unmap_is_completed_only_once_no_reader_can_use_what_it_removed() {
    let bench = Bench::new();
    let features = bench.device.features();
    // It has no limit: only the reader below decides.
    let link = link(64, bench.config(), features, DriverConfig::default());
    let mut requests = RequestQueue::new(bench.device, link.queue);
    let domain = link.driver.domain().unwrap();
    map(&domain, page(1), 0x5000).unwrap();
    let mut reader = bench.endpoints.shootdown.reader().expect("a reader");
    let mut quiet = || reader.poll(|_| ());
    thread::scope(|scope| {
        let attached = scope.spawn(|| domain.attach(1));
        while !attached.is_finished() {
            requests.poll(&link.ram).unwrap();
            quiet();
            link.bells.used.raise();
        }
        attached.join().unwrap().unwrap();
        let mut gather = Gather::new();
        domain.unmap(page(1), &mut gather).unwrap();
        map(&domain, page(2), 0).unwrap();
        let progress = requests.poll(&link.ram).unwrap();
        assert_eq!((progress.handled, progress.published), (2, 0));
        assert!(progress.pending && requests.is_pending());
        // The table has changed, but the reader may still hold what it saw before.
        assert_eq!(bench.endpoints.access(1, 0x1000, Prot::READ), None);
        map(&domain, page(3), 0).unwrap();
        for _ in 0..10 {
            assert_eq!(requests.poll(&link.ram).unwrap().handled, 0, "a later request must wait");
        }
        quiet();
        let progress = requests.poll(&link.ram).unwrap();
        assert_eq!(progress.published, 2);
        assert_eq!(requests.poll(&link.ram).unwrap().published, 1);
        assert_eq!(requests.counters().syncs, 1);
        domain.iotlb_sync(&mut gather).unwrap();
    });
    assert_eq!(reads_of(&bench.endpoints, 0x3000), Some(0));
    // The device is served no longer: the domain's detach must not wait for long.
    link.bells.alive.store(false, std::sync::atomic::Ordering::Relaxed);
}

fn reads_of(endpoints: &common::Endpoints, iova: u64) -> Option<u64> {
    endpoints.access(1, iova, Prot::READ)
}

#[test]
fn a_device_without_map_and_unmap_has_no_domains() {
    // rule V31
    let features = Features::BYPASS_CONFIG | Features::PROBE;
    let options = DeviceConfig { features, ..DeviceConfig::default() };
    let served =
        Served::start(Bench::with(options, Limits::NONE), 16, DriverConfig::default(), false);
    assert!(matches!(served.driver.domain(), Err(Error::Unsupported(_))));
    let accepted = ringfence_virtio_iommu::driver::negotiate(u64::MAX);
    assert!(accepted.contains(Features::INPUT_RANGE | Features::DOMAIN_RANGE | Features::PROBE));
    assert!(!accepted.contains(Features::BYPASS));
}

#[test]
fn flags_and_memory_types_are_kept_to() {
    // rule V39
    let features = Features::all().difference(Features::MMIO);
    let options = DeviceConfig { features, ..DeviceConfig::default() };
    let served =
        Served::start(Bench::with(options, Limits::NONE), 16, DriverConfig::default(), false);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    let mmio = domain.map(Map::new(page(1), GuestPhys(0), Prot::RW | Prot::MMIO));
    assert!(matches!(mmio, Err(Error::Unsupported(_))));
    assert!(matches!(
        domain.map(Map::new(page(1), GuestPhys(0), Prot::empty())),
        Err(Error::NoPermission(_))
    ));
    domain.map(Map::new(page(1), GuestPhys(0), Prot::READ)).unwrap();
    domain.map(Map::new(page(2), GuestPhys(0), Prot::WRITE)).unwrap();
    domain.iotlb_sync_map(Range::ALL).unwrap();
    assert_eq!(served.endpoints.access(1, 0x1000, Prot::READ), Some(0));
    assert_eq!(served.endpoints.access(1, 0x1000, Prot::WRITE), None);
    assert_eq!(served.endpoints.access(1, 0x2000, Prot::WRITE), Some(0));
}
