//! Scatter lists.

use proptest::{collection::vec, prelude::*};
use ringfence_dma::{Direction, Policy, Segment};
use ringfence_iommu::{Iova, Prot, Range};

use crate::mock::{Bench, Buf, Event, Setup};

fn maps(bench: &Bench) -> Vec<(Range, u64)> {
    let events = bench.domain.events().into_iter();
    events
        .filter_map(|event| match event {
            Event::Map(range, target, _) => Some((range, target)),
            _ => None,
        })
        .collect()
}

#[test]
fn elements_that_follow_each_other_in_memory_are_mapped_at_once() {
    // rule L35
    let bench = Bench::new(Policy::StrictMap);
    let list = vec![
        Buf::new(&[(0x5000, 0x800), (0x5800, 0x800)]),
        Buf::new(&[(0x6000, 0x1000)]),
        Buf::new(&[(0x9000, 0x1000)]),
    ];
    let mapping = bench.device.map(list, Direction::ToDevice).unwrap();
    let iova = mapping.iova();
    let (first, second) = (
        Range::from_len(iova, 0x2000).unwrap(),
        Range::from_len(Iova(iova.0 + 0x2000), 0x1000).unwrap(),
    );
    assert_eq!(maps(&bench), [(first, 0x5000), (second, 0x9000)]);
    // rule L45
    assert_eq!(mapping.segments(), [Segment { addr: iova.0, len: 0x3000 }]);
    assert_eq!(mapping.unmap().unwrap().len(), 3);
    bench.assert_nothing_leaked();
}

#[test]
fn elements_join_only_where_one_ends_on_a_granule_edge_and_the_next_begins_on_one() {
    // rule L45
    let bench = Bench::new(Policy::StrictMap);
    // Ends on a boundary; begins on one but ends within; begins on one; begins within.
    let pieces = [(0x5800, 0x800), (0x9000, 0x10), (0x3000, 0x1000), (0x7100, 0x10)];
    let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
    let base = mapping.iova().0 & !0xfff;
    assert_eq!(
        mapping.segments(),
        [
            Segment { addr: base + 0x800, len: 0x810 },
            Segment { addr: base + 0x2000, len: 0x1000 },
            Segment { addr: base + 0x3100, len: 0x10 },
        ]
    );
    drop(mapping);
    bench.assert_nothing_leaked();
}

#[test]
fn a_list_is_one_iova_range_and_unmapped_with_one_call() {
    // rules L44, L47
    let bench = Bench::new(Policy::StrictMap);
    let pieces: Vec<_> = (0..100).map(|n| (0x10_0000 - n * 0x2000, 0x1000)).collect();
    let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
    assert_eq!(mapping.segments(), [Segment { addr: mapping.iova().0, len: 100 * 0x1000 }]);
    let range = Range::from_len(mapping.iova(), 100 * 0x1000).unwrap();
    bench.domain.forget_events();
    drop(mapping);
    assert_eq!(bench.domain.events()[..2], [Event::Unmap { range, queued: false }, Event::Sync]);
    bench.assert_nothing_leaked();
}

#[test]
fn a_pad_before_a_segment_boundary_exposes_nothing() {
    // rule L44
    let mut setup = Setup::new(Policy::StrictMap);
    setup.config.segment_boundary = 0x3fff;
    let bench = setup.build();
    // The second would cross the boundary at 0x4000, and begins there instead.
    let pieces = [(0x10_0000, 0x3000), (0x20_0000, 0x3000)];
    let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
    let iova = mapping.iova().0;
    assert_eq!(iova & 0x3fff, 0);
    assert_eq!(
        mapping.segments(),
        [Segment { addr: iova, len: 0x3000 }, Segment { addr: iova + 0x4000, len: 0x3000 }]
    );
    assert_eq!(bench.domain.reach(iova + 0x3000), None);
    assert_eq!(bench.domain.reach(iova + 0x4000), Some((0x20_0000, Prot::READ)));
    drop(mapping);
    bench.assert_nothing_leaked();
}

#[test]
fn the_original_list_comes_back_unchanged() {
    // rule L46
    let bench = Bench::new(Policy::StrictMap);
    let pieces = [[(0x5003, 1)], [(0x5004, 0x1fff)], [(1, 2)]];
    let list = || pieces.iter().map(|pieces| Buf::new(pieces)).collect::<Vec<_>>();
    let back = |list: Vec<Buf>| list.into_iter().map(|buf| buf.pieces.clone()).collect::<Vec<_>>();
    let mapped = bench.device.map(list(), Direction::ToDevice).unwrap();
    assert_eq!(back(mapped.unmap().unwrap()), pieces);
    bench.domain.fail_after(1);
    let failed = bench.device.map(list(), Direction::ToDevice).unwrap_err();
    assert_eq!(back(failed.into_buffer().unwrap()), pieces);
}

#[test]
fn an_empty_list_and_a_list_past_the_end_of_addresses_are_refused() {
    use ringfence_dma::Error;
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        let map = |pieces: &[(u64, u64)]| {
            bench.device.map(Buf::new(pieces), Direction::ToDevice).unwrap_err().error()
        };
        assert_eq!(map(&[]), Error::Empty);
        assert_eq!(map(&[(0x1000, 0), (0, 0)]), Error::Empty);
        assert_eq!(map(&[(u64::MAX, 2)]), Error::TooLong);
        assert_eq!(map(&[(0, u64::MAX), (0, u64::MAX)]), Error::TooLong);
        let no_buffers: Vec<Buf> = Vec::new();
        let error = bench.device.map(no_buffers, Direction::ToDevice).unwrap_err();
        assert_eq!(error.error(), Error::Empty);
        bench.assert_nothing_leaked();
        assert_eq!(bench.device.stats().map_failures, 5);
    }
}

#[test]
fn the_last_byte_of_the_address_space_can_be_mapped() {
    let bench = Bench::new(Policy::StrictMap);
    let last = [(u64::MAX - 0xff, 0x100)];
    let mapping = bench.device.map(Buf::new(&last), Direction::ToDevice).unwrap();
    assert_eq!(mapping.iova().0 & 0xfff, 0xf00);
    assert_eq!(bench.domain.reach(mapping.iova().0 + 0xff), Some((u64::MAX, Prot::READ)));
    drop(mapping);
    bench.assert_nothing_leaked();
}

/// Pieces that do not overlap, some adjacent, at any offset.
fn pieces() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let gap = prop_oneof![Just(0u64), Just(0x1000), 1..0x3000u64];
    let len = prop_oneof![Just(0u64), Just(0x1000), Just(0x2000), 1..0x5000u64];
    vec((gap, len), 1..12).prop_map(|steps| {
        let mut at = 0x100_0000;
        let place = |(gap, len)| {
            let start = at + gap;
            at = start + len;
            (start, len)
        };
        steps.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the list and the limits: the segments lead to the bytes of the list, in order, keep
    /// to the limits, and the device reaches the granules of the list and nothing else.
    #[test]
    fn the_segments_lead_to_the_bytes_of_the_list_and_to_nothing_else(
        pieces in pieces(),
        granule in prop_oneof![Just(1u64), Just(0x100), Just(0x1000)],
        boundary in prop_oneof![Just(u64::MAX), Just(0xffffu64), Just(0x3fff), Just(0xfff)],
        max_segment in prop_oneof![Just(u64::MAX), Just(0x1000u64), Just(0x2800), Just(0x10000)],
        policy in prop_oneof![Just(Policy::Off), Just(Policy::Strict), Just(Policy::LazySqMap)],
    ) {
        // rules L43, L44
        let mut setup = Setup { granule, ..Setup::new(policy) };
        setup.config.segment_boundary = boundary;
        setup.config.max_segment = max_segment;
        let bench = setup.build();
        let total: u64 = pieces.iter().map(|(_, len)| len).sum();
        let mapping = match bench.device.map(Buf::new(&pieces), Direction::ToDevice) {
            Ok(mapping) => mapping,
            Err(error) => {
                prop_assert_eq!(error.error(), ringfence_dma::Error::Empty);
                prop_assert_eq!(total, 0);
                return Ok(());
            }
        };
        prop_assert_eq!(mapping.len(), total);
        let mut wanted = pieces.iter().flat_map(|&(addr, len)| addr..addr + len);
        for segment in mapping.segments() {
            prop_assert!(segment.len >= 1 && segment.len <= max_segment);
            let last = segment.addr + (segment.len - 1);
            prop_assert_eq!((segment.addr ^ last) & !boundary, 0, "a boundary is crossed");
            for addr in segment.addr..=last {
                let reached = match policy {
                    Policy::Off => Some(addr),
                    _ => bench.domain.reach(addr).map(|(target, _)| target),
                };
                prop_assert_eq!(reached, wanted.next());
            }
        }
        prop_assert_eq!(wanted.next(), None);

        // rule L46
        let cap = max_segment.min(boundary.saturating_add(1));
        let fits = |&(addr, len): &(u64, u64)| (addr & (granule - 1)) + len <= cap;
        let count = pieces.iter().filter(|(_, len)| *len != 0).count();
        if policy != Policy::Off && pieces.iter().all(fits) {
            prop_assert!(mapping.segments().len() <= count);
        }

        let held = |target: u64| {
            let granule_of = |addr: u64| addr & !(granule - 1);
            pieces.iter().any(|&(addr, len)| {
                len != 0 && granule_of(addr) <= target && target <= granule_of(addr + len - 1) + (granule - 1)
            })
        };
        for (range, target, _) in bench.domain.cached() {
            for step in (0..=range.extent()).step_by(granule as usize) {
                prop_assert!(held(target + step), "{:#x} is exposed", target + step);
            }
        }
        drop(mapping);
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}
