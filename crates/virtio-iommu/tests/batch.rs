//! Many MAPs and UNMAPs at a time: the same as one after the other, over rings that hold them all or
//! far from it.
#![cfg(not(loom))]

mod common;

use common::{Bench, range, ring::Served};
use ringfence_iommu::{Domain, Error, Gather, GuestPhys, Iova, Map, Prot, Range, table::Limits};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    driver::{DriverConfig, Notify, ViommuDomain},
};

fn served(size: u16) -> Served {
    Served::start(
        Bench::new(),
        size,
        DriverConfig { notify: Notify::Poll, ..DriverConfig::default() },
        true,
    )
}

fn page(n: u64) -> Range {
    let first = 0x1_0000_0000 + (n << 12);
    range(first, first + 0xfff)
}

fn maps(pages: std::ops::Range<u64>) -> Vec<Map<GuestPhys>> {
    pages.map(|n| Map::new(page(n), GuestPhys(n << 13), Prot::RW)).collect()
}

/// How many of a list are mapped.
fn map(domain: &ViommuDomain, maps: &[Map<GuestPhys>]) -> usize {
    domain.map_pages(maps).map_or_else(|partial| partial.done, |()| maps.len())
}

/// How many of a list are unmapped.
fn unmap(domain: &ViommuDomain, ranges: &[Range], gather: &mut Gather) -> usize {
    domain.unmap_pages(ranges, gather).map_or_else(|partial| partial.done, |_| ranges.len())
}

/// Where the device leads an access of endpoint 1 to.
fn reads(served: &Served, n: u64) -> Option<u64> {
    served.endpoints.access(1, page(n).first().0 + 5, Prot::READ)
}

/// More than are kept one by one.
#[test]
fn maps_that_the_device_has_refused_concern_no_later_ones() {
    let limits = Limits { mappings: 200, ..Limits::NONE };
    let options = DriverConfig { notify: Notify::Poll, ..DriverConfig::default() };
    let served = Served::start(Bench::with(DeviceConfig::default(), limits), 256, options, true);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    let full = maps(0..200);
    assert_eq!(map(&domain, &full), 200);
    domain.iotlb_sync_map(page(0).hull(page(199))).unwrap();
    // None beside another.
    let refused: Vec<_> =
        (1000..1400).step_by(4).map(|n| Map::new(page(n), GuestPhys(n << 13), Prot::RW)).collect();
    assert_eq!(map(&domain, &refused), refused.len());
    for one in &refused {
        assert!(domain.iotlb_sync_map(one.range()).is_err());
        assert_eq!(unmap(&domain, &[one.range()], &mut Gather::new()), 1);
    }
    let mut gather = Gather::new();
    assert_eq!(unmap(&domain, &full.iter().map(Map::range).collect::<Vec<_>>(), &mut gather), 200);
    domain.iotlb_sync(&mut gather).unwrap();
    for n in 1250..1400 {
        let later = Map::new(page(n), GuestPhys(n << 13), Prot::RW);
        domain.map(later).unwrap();
        assert_eq!(domain.iotlb_sync_map(later.range()).map(|_| ()), Ok(()), "page {n}");
        assert_eq!(reads(&served, n), Some((n << 13) + 5));
    }
}

#[test]
fn batches_of_any_size_pass_rings_of_any_size() {
    // rules V20, V23, L64
    for size in [4, 6, 16, 100, 256] {
        let served = served(size);
        let domain = served.driver.domain().unwrap();
        domain.attach(1).unwrap();
        for count in [1, 2, 7, 8, 9, 64, 65, 200] {
            assert_eq!(map(&domain, &maps(0..count)), count as usize, "{size} {count}");
            domain.iotlb_sync_map(page(0).hull(page(count - 1))).unwrap();
            assert_eq!(domain.mappings(), count as usize);
            assert!((0..count).all(|n| reads(&served, n) == Some((n << 13) + 5)), "{size} {count}");
            // One of them twice: there is nothing left to remove.
            let mut pages: Vec<Range> = (0..count).map(page).collect();
            pages.push(page(0));
            let mut gather = Gather::new();
            assert_eq!(unmap(&domain, &pages, &mut gather), pages.len());
            assert_eq!(gather.ranges(), [page(0).hull(page(count - 1))]);
            domain.iotlb_sync(&mut gather).unwrap();
            assert!((0..count).all(|n| reads(&served, n).is_none()), "{size} {count}");
        }
        let stats = served.driver.stats();
        assert_eq!((stats.maps, stats.unmaps, stats.errors), (356, 356, 0));
    }
}

#[test]
fn a_batch_ends_before_the_first_that_is_refused() {
    // rules L31, L36, L65, V35
    let served = served(64);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    domain.map(Map::new(page(3), GuestPhys(0), Prot::READ)).unwrap();
    domain.map(Map::new(page(8).hull(page(9)), GuestPhys(0), Prot::READ)).unwrap();
    assert_eq!(map(&domain, &maps(0..8)), 3);
    let held = domain.map(Map::new(page(3), GuestPhys(0), Prot::RW));
    assert_eq!(held, Err(Error::Exists { range: page(3), at: page(3).first() }));
    for wrong in [
        Map::new(range(0x800, 0x17ff), GuestPhys(0), Prot::RW),
        Map::new(page(20), GuestPhys(1), Prot::RW),
        Map::new(page(20), GuestPhys(0), Prot::empty()),
        Map::new(range(0x800_0000, 0x800_0fff), GuestPhys(0), Prot::RW),
        Map::new(page(20), GuestPhys(u64::MAX - 0x7ff), Prot::RW),
    ] {
        assert_eq!(map(&domain, &[wrong, maps(20..21)[0]]), 0, "{wrong:?}");
        assert!(domain.map(wrong).is_err(), "{wrong:?}");
    }
    domain.iotlb_sync_map(Range::ALL).unwrap();
    let mut gather = Gather::new();
    let pages = [page(1), page(3), page(8), page(0)];
    assert_eq!(unmap(&domain, &pages, &mut gather), 2, "the third would be split");
    let split = domain.unmap(page(8), &mut gather);
    assert_eq!(split, Err(Error::WouldSplit { range: page(8), at: page(8).first() }));
    domain.iotlb_sync(&mut gather).unwrap();
    let found: Vec<u64> = (0..10).filter(|&n| reads(&served, n).is_some()).collect();
    assert_eq!(found, [0, 2, 8, 9]);
    assert_eq!((domain.mappings(), served.driver.stats().errors), (3, 0));
}

#[test]
fn what_is_mapped_before_an_endpoint_is_there_is_noted_and_sent_by_the_attach() {
    // rule L65
    let served = served(16);
    let domain = served.driver.domain().unwrap();
    assert_eq!(map(&domain, &maps(0..100)), 100);
    assert_eq!(map(&domain, &maps(200..201)), 1);
    assert_eq!(unmap(&domain, &[page(200), page(5)], &mut Gather::new()), 2);
    assert_eq!((served.driver.stats().maps, domain.mappings()), (0, 99));
    domain.attach(1).unwrap();
    assert_eq!((reads(&served, 5), reads(&served, 6)), (None, Some((6 << 13) + 5)));
    assert_eq!(domain.iova_to_phys(Iova(page(99).first().0)), Some(GuestPhys(99 << 13)));
}

#[test]
fn what_only_the_device_refuses_is_reported_by_the_sync() {
    // rule L34
    let served = served(64);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    // The device's domain has a mapping there that the driver does not have.
    let binding = served.endpoints.bindings.lock()[&1].clone();
    let ringfence_virtio_iommu::device::Binding::Domain(behind) = binding else { panic!() };
    behind.map(Map::new(page(2), GuestPhys(0), Prot::READ)).unwrap();
    assert_eq!(map(&domain, &maps(0..4)), 4);
    let reported = domain.iotlb_sync_map(page(0).hull(page(3)));
    assert!(
        matches!(reported, Err(Error::Device { range, .. }) if range == page(2)),
        "{reported:?}"
    );
    assert_eq!(domain.mappings(), 3);
}

#[test]
fn a_dead_device_takes_no_batch_for_long() {
    let mut served = served(4);
    let domain = served.driver.domain().unwrap();
    domain.attach(1).unwrap();
    served.silence();
    served.bells.alive.store(false, std::sync::atomic::Ordering::Relaxed);
    assert!(map(&domain, &maps(0..10)) < 10, "the ring holds two");
    assert!(served.driver.failed().is_some());
    assert_eq!(map(&domain, &maps(20..22)), 0);
}
