//! Mapped once, used often.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ringfence_dma::{Direction, OutOfBounds, Policy, Segment};

use crate::mock::{Bench, Broken, Buf, Event, Setup};

fn buffer() -> Buf {
    Buf::new(&[(0x1000, 0x1000), (0x4200, 0x600), (0x9000, 0x1800)])
}

#[test]
fn it_is_mapped_once_and_no_io_costs_a_request() {
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        let persistent = bench.device.map_persistent(buffer(), Direction::Bidirectional).unwrap();
        bench.domain.forget_events();
        for at in 0..100 {
            let segments: Vec<_> = persistent.segments_for(at..at + 0x200).unwrap().collect();
            assert_eq!(segments, [Segment { addr: persistent.iova().0 + at, len: 0x200 }]);
            persistent.sync_for_device(at..at + 0x200).unwrap();
            persistent.sync_for_cpu(at..at + 0x200).unwrap();
        }
        assert_eq!(bench.domain.events(), []);
        let stats = bench.device.stats();
        assert_eq!((stats.maps, stats.syncs_for_cpu, stats.syncs_for_device), (1, 100, 100));
    }
}

#[test]
fn its_bytes_count_as_reachable_for_as_long_as_they_are() {
    let bench = Bench::new(Policy::StrictMap);
    let now = || {
        let stats = bench.device.stats();
        (stats.persistent, stats.persistent_bytes)
    };
    let other = bench.device.clone();
    let one = bench.device.map_persistent(buffer(), Direction::ToDevice).unwrap();
    let two = other.map_persistent(Buf::new(&[(0x5000, 7)]), Direction::ToDevice).unwrap();
    drop(bench.device.map(buffer(), Direction::ToDevice).unwrap());
    assert_eq!(now(), (2, 0x2e00 + 7));
    drop(other);
    assert_eq!(now(), (2, 0x2e00 + 7), "the clone that mapped it is gone, it is not");
    drop(two);
    assert_eq!(now(), (1, 0x2e00));
    let iova = one.iova().0;
    *bench.domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
    assert!(one.unmap().is_err());
    assert_eq!(now(), (1, 0x2e00), "what could not be unmapped is still reachable");
    assert!(bench.domain.reach(iova).is_some());
}

#[test]
fn unmapping_it_is_strict_under_every_policy() {
    // rule L17
    for policy in [Policy::StrictMap, Policy::LazySq, Policy::LazyMqMap] {
        for by_drop in [false, true] {
            let bench = Bench::new(policy);
            let buffer = buffer();
            let drops = buffer.drops();
            let persistent = bench.device.map_persistent(buffer, Direction::ToDevice).unwrap();
            if by_drop {
                drop(persistent);
                assert_eq!(drops.load(Ordering::Relaxed), 1);
            } else {
                let buffer = persistent.unmap().unwrap();
                assert_eq!(buffer.pieces.len(), 3);
            }
            bench.assert_nothing_leaked();
            let events = bench.domain.events();
            assert!(matches!(events[..], [.., Event::Sync, Event::Free(..)]), "{events:?}");
            assert_eq!(bench.device.stats().persistent, 0);
        }
    }
}

#[test]
fn parts_that_are_not_in_it_have_no_segments() {
    let bench = Bench::new(Policy::StrictMap);
    let persistent = bench.device.map_persistent(buffer(), Direction::ToDevice).unwrap();
    let refusal = |start, end| persistent.segments_for(start..end).map(|_| ()).err();
    let refused = |start, end| Some(OutOfBounds { start, end, len: 0x2e00 });
    assert_eq!(refusal(0x2e00, 0x2e01), refused(0x2e00, 0x2e01));
    assert_eq!(refusal(5, 4), refused(5, 4));
    assert_eq!(refusal(0, u64::MAX), refused(0, u64::MAX));
    assert_eq!(refusal(0, 0x2e00), None);
    assert_eq!(persistent.segments_for(0x2e00..0x2e00).unwrap().count(), 0);
    assert_eq!(persistent.segments_for(0..0).unwrap().count(), 0);
}

#[test]
fn its_buffer_can_be_filled_between_ios() {
    let bench = Bench::new(Policy::StrictMap);
    let mut persistent = bench.device.map_persistent(buffer(), Direction::ToDevice).unwrap();
    // SAFETY: there is no device and no memory, and the pieces are only read.
    assert_eq!(unsafe { persistent.buffer_mut() }.pieces.len(), 3);
    assert_eq!(persistent.shared().pieces.len(), 3);
}

proptest! {
    // Against the list of every byte's address.
    #[test]
    fn the_segments_of_a_part_are_the_addresses_of_its_bytes(
        lens in prop::collection::vec((0u64..3, 0u64..0xfff, 1u64..0x1800), 1..9),
        start in 0u64..0x6000,
        len in 0u64..0x6000,
        max_segment in prop::sample::select(vec![0x1000u64, 0x2000, u64::MAX]),
    ) {
        let mut at = 0x10_0000u64;
        let mut pieces = Vec::new();
        for (gap, offset, len) in lens {
            // Sometimes directly behind the one before.
            let first = if gap == 0 { at } else { at.next_multiple_of(0x1000) + offset };
            pieces.push((first, len));
            at = first + len;
        }
        let mut setup = Setup::new(Policy::StrictMap);
        setup.config.max_segment = max_segment;
        let bench = setup.build();
        let persistent = bench.device.map_persistent(Buf::new(&pieces), Direction::ToDevice);
        let persistent = persistent.unwrap();
        let bytes = |segment: Segment| segment.addr..segment.addr + segment.len;
        let all: Vec<u64> = persistent.segments().iter().copied().flat_map(bytes).collect();
        prop_assert_eq!(all.len() as u64, persistent.len());
        let start = start.min(persistent.len());
        let end = (start + len).min(persistent.len());
        let part: Vec<Segment> = persistent.segments_for(start..end).unwrap().collect();
        prop_assert!(part.iter().all(|segment| segment.len > 0));
        prop_assert!(part.len() <= persistent.segments().len());
        let part: Vec<u64> = part.into_iter().flat_map(bytes).collect();
        prop_assert_eq!(&part[..], &all[start as usize..end as usize]);
    }
}
