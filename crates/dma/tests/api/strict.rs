//! Mapping, and the guarantee of the strict policies.

use std::sync::atomic::Ordering;

use ringfence_dma::{Direction, DmaConfig, OutOfBounds, Policy, Segment};
use ringfence_iommu::{Iova, Prot, Range};

use crate::mock::{Bench, Buf, Event, MSI, Setup};

const STRICT: [Policy; 2] = [Policy::Strict, Policy::StrictMap];

#[test]
fn a_strict_unmap_invalidates_before_the_iova_is_free_and_the_buffer_returned() {
    // rule L17
    for policy in STRICT {
        let bench = Bench::new(policy);
        let mapping = bench.device.map(Buf::new(&[(0x5000, 0x2000)]), Direction::ToDevice).unwrap();
        let iova = mapping.iova().0;
        assert_eq!(bench.domain.reach(iova + 0x1fff), Some((0x6fff, Prot::READ)));
        bench.domain.forget_events();
        let buffer = mapping.unmap().unwrap();
        assert_eq!(buffer.pieces, [(0x5000, 0x2000)]);
        assert_eq!(bench.domain.reach(iova), None);
        let range = Range::from_len(Iova(iova), 0x2000).unwrap();
        assert_eq!(
            bench.domain.events(),
            [Event::Unmap { range, queued: false }, Event::Sync, Event::Free(iova, 0x2000)]
        );
        bench.assert_nothing_leaked();
    }
}

#[test]
fn the_map_policies_sync_once_over_the_whole_range_and_the_others_after_each_map_call() {
    // rule L34
    let pieces = [(0x1000, 0x1000), (0x3000, 0x1000), (0x8000, 0x2000)];
    for policy in [Policy::Strict, Policy::LazySq, Policy::LazyMq] {
        let bench = Bench::new(policy);
        let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
        let events = bench.domain.events();
        assert_eq!(events.len(), 6);
        for pair in events.chunks(2) {
            assert!(
                matches!(pair, [Event::Map(range, ..), Event::SyncMap(synced)] if range == synced)
            );
        }
        assert_eq!(bench.device.stats().map_syncs, 3);
        drop(mapping);
    }
    for policy in [Policy::StrictMap, Policy::LazySqMap, Policy::LazyMqMap] {
        let bench = Bench::new(policy);
        let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
        let events = bench.domain.events();
        assert_eq!(events.len(), 4);
        let whole = Range::from_len(mapping.iova(), 0x4000).unwrap();
        assert_eq!(events[3], Event::SyncMap(whole));
        assert_eq!(bench.device.stats().map_syncs, 1);
        drop(mapping);
    }
}

#[test]
fn a_direction_allows_the_device_what_it_needs_and_no_more() {
    // rule L43
    let bench = Bench::new(Policy::StrictMap);
    for (direction, prot) in [
        (Direction::ToDevice, Prot::READ),
        (Direction::FromDevice, Prot::WRITE),
        (Direction::Bidirectional, Prot::RW),
    ] {
        let mapping = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), direction).unwrap();
        assert_eq!(bench.domain.reach(mapping.iova().0), Some((0x1000, prot)));
    }
}

#[test]
fn the_offset_in_the_granule_is_kept_and_the_length_rounded_to_granules() {
    // rule L43
    let bench = Bench::new(Policy::StrictMap);
    let mapping = bench.device.map(Buf::new(&[(0x5a03, 0x1000)]), Direction::ToDevice).unwrap();
    let iova = mapping.iova().0;
    assert_eq!(iova & 0xfff, 0xa03);
    assert_eq!(mapping.segments(), [Segment { addr: iova, len: 0x1000 }]);
    let range = Range::from_len(Iova(iova & !0xfff), 0x2000).unwrap();
    assert_eq!(bench.domain.cached(), [(range, 0x5000, Prot::READ)]);
    assert_eq!(mapping.len(), 0x1000);
}

#[test]
fn a_domain_of_single_bytes_maps_exactly_the_buffer() {
    // rule L43
    let setup = Setup { granule: 1, ..Setup::new(Policy::StrictMap) };
    let bench = setup.build();
    let pieces = [(0x5a03, 0x101), (0x9001, 0x7)];
    let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    assert_eq!(mapping.segments(), [Segment { addr: iova.0, len: 0x108 }]);
    let first = Range::from_len(iova, 0x101).unwrap();
    let second = Range::from_len(Iova(iova.0 + 0x101), 7).unwrap();
    assert_eq!(bench.domain.cached(), [(first, 0x5a03, Prot::READ), (second, 0x9001, Prot::READ)]);
    assert_eq!(bench.domain.reach(iova.0 + 0x108), None);
    drop(mapping);
    bench.assert_nothing_leaked();
}

#[test]
fn off_maps_nothing_and_returns_the_buffers_own_addresses() {
    let bench = Bench::new(Policy::Off);
    let pieces = [(0x1000, 0x800), (0x1800, 0x10), (0x9000, 1), (0, 0)];
    let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
    assert_eq!(
        mapping.segments(),
        [Segment { addr: 0x1000, len: 0x810 }, Segment { addr: 0x9000, len: 1 }]
    );
    assert_eq!((mapping.iova().0, mapping.len()), (0x1000, 0x811));
    drop(mapping.unmap().unwrap());
    assert_eq!(bench.domain.events(), []);
    let stats = bench.device.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.bytes, stats.map_syncs), (1, 1, 0x811, 0));
}

#[test]
fn dropping_a_mapping_unmaps_it_and_drops_the_buffer_after() {
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        let buffer = Buf::new(&[(0x1000, 0x1000)]);
        let drops = buffer.drops();
        drop(bench.device.map(buffer, Direction::ToDevice).unwrap());
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(bench.domain.table.mappings(), 0);
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
        let stats = bench.device.stats();
        assert_eq!((stats.maps, stats.unmaps, stats.bytes), (1, 1, 0x1000));
    }
}

#[test]
fn a_sync_outside_of_the_buffer_is_refused() {
    let bench = Bench::new(Policy::StrictMap);
    let mut mapping = bench.device.map(Buf::new(&[(0x1000, 10)]), Direction::FromDevice).unwrap();
    assert_eq!(mapping.sync_for_cpu(0..10), Ok(()));
    assert_eq!(mapping.sync_for_cpu(10..10), Ok(()));
    assert_eq!(mapping.sync_for_device(3..4), Ok(()));
    assert_eq!(mapping.sync_for_cpu(0..11), Err(OutOfBounds { start: 0, end: 11, len: 10 }));
    #[allow(clippy::reversed_empty_ranges, reason = "what is to be refused")]
    let reversed = 4..3;
    assert!(mapping.sync_for_device(reversed).is_err());
    assert!(mapping.sync_for_cpu(u64::MAX..u64::MAX).is_err());
    let stats = bench.device.stats();
    assert_eq!((stats.syncs_for_cpu, stats.syncs_for_device), (2, 1));
}

#[test]
fn coherent_memory_can_be_used_while_mapped_and_is_freed_strictly_under_every_policy() {
    // rule L17
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        let ring = bench.device.alloc_coherent(Buf::new(&[(0x2000, 0x1000)])).unwrap();
        assert_eq!(ring.memory().pieces, [(0x2000, 0x1000)]);
        let iova = ring.iova().0;
        assert_eq!(ring.segments(), [Segment { addr: iova, len: 0x1000 }]);
        if policy != Policy::Off {
            assert_eq!(bench.domain.reach(iova), Some((0x2000, Prot::RW)));
        }
        assert_eq!(ring.free().unwrap().pieces, [(0x2000, 0x1000)]);
        bench.assert_nothing_leaked();
        drop(bench.device.alloc_coherent(Buf::new(&[(0x2000, 0x1000)])).unwrap());
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_mapping_outlives_the_device_it_was_made_with() {
    let Bench { device, domain, allocator, .. } = Bench::new(Policy::LazySq);
    let mapping = device.map(Buf::new(&[(0x2000, 0x1000)]), Direction::ToDevice).unwrap();
    drop(device);
    assert_eq!(domain.table.mappings(), 1);
    drop(mapping);
    assert_eq!((domain.table.mappings(), allocator.live()), (0, 0));
}

#[test]
fn clones_count_together_and_their_counts_outlive_them() {
    let bench = Bench::new(Policy::StrictMap);
    for n in 1..=3 {
        let clone = bench.device.clone();
        drop(clone.map(Buf::new(&[(0x2000, 0x1000)]), Direction::ToDevice).unwrap());
        assert_eq!(bench.device.stats().maps, n);
    }
    let stats = bench.device.stats();
    assert_eq!((stats.unmaps, stats.bytes, stats.unmap_syncs), (3, 0x3000, 3));
}

#[test]
fn the_default_is_strict_and_syncs_maps_once() {
    assert_eq!(DmaConfig::default().policy, Policy::StrictMap);
}

#[test]
fn sampled_thread_time_is_counted_for_maps_and_unmaps_apart() {
    let mut setup = Setup::new(Policy::StrictMap);
    setup.config.sample_every = 1;
    let bench = setup.build();
    let mappings: Vec<_> = (1..=8)
        .map(|n| bench.device.map(Buf::new(&[(n * 0x1000, 0x1000)]), Direction::ToDevice).unwrap())
        .collect();
    let stats = bench.device.stats();
    // The clock moves only by its own cost, which is subtracted.
    assert_eq!((stats.map_time.count, stats.map_time.ns), (8, 0));
    assert_eq!(stats.unmap_time.count, 0);
    drop(mappings);
    assert_eq!(bench.device.stats().unmap_time.count, 8);
}

#[test]
fn the_domains_reserved_regions_are_kept_free() {
    let bench = Bench::new(Policy::StrictMap);
    assert_eq!(bench.allocator.reserved(), [(MSI.first().0, MSI.last().0)]);
}
