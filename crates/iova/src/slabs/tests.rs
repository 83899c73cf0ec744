use std::{collections::BTreeSet, sync::Arc, thread, vec, vec::Vec};

use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_sync::cpu::{FixedCpu, OneCpu, OsCpu};

use super::*;
use crate::{AllocReason, FreeReason, Preferred32};

const PAGE: u64 = 4096;

fn aperture(bits: u32) -> Aperture {
    Aperture::new(0, u64::MAX >> (64 - bits), PAGE).unwrap()
}

fn one_cpu(bits: u32) -> Slabs<OneCpu> {
    Slabs::new(aperture(bits), OneCpu)
}

fn pages(count: u64) -> Request {
    Request::new(count * PAGE)
}

#[test]
fn what_is_allocated_in_turn_lies_side_by_side() {
    let slabs = one_cpu(48);
    let ranges: Vec<u64> = (0..32).map(|_| slabs.alloc(&pages(1)).unwrap()).collect();
    assert!(ranges.windows(2).all(|pair| pair[1] == pair[0] + PAGE));
    // Freed ranges are reused first, the lowest before the others.
    for index in [20, 7] {
        slabs.free(ranges[index], PAGE).unwrap();
    }
    assert_eq!(slabs.alloc(&pages(1)), Ok(ranges[7]));
    assert_eq!(slabs.alloc(&pages(1)), Ok(ranges[20]));
}

#[test]
fn without_checks_what_is_freed_is_free_again() {
    let slabs = Slabs::unchecked(aperture(32), OneCpu, SlabConfig::default());
    for _ in 0..3 {
        // Until nothing fits: tails are not cut off.
        let sizes = (1..=64).cycle().map(|count| count * PAGE);
        let mut taken = Vec::new();
        for size in sizes {
            let Ok(iova) = slabs.alloc(&Request::new(size)) else { break };
            taken.push((iova, size));
        }
        let mut places = taken.clone();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        // In another order than they came in.
        let (odd, even): (Vec<_>, Vec<_>) =
            taken.chunks(3).partition(|chunk| chunk[0].1 & PAGE != 0);
        for (iova, size) in odd.into_iter().chain(even).flatten() {
            slabs.free(*iova, *size).unwrap();
        }
        slabs.drain();
        assert_eq!(slabs.stats().live_bytes, 0);
    }
}

#[test]
fn a_range_that_is_short_of_its_class_by_any_number_is_freed_with_its_own_size_alone() {
    let space = one_cpu(48);
    let classes = [2, 16, 17, 18];
    for class in classes {
        let half = 1u64 << (class - 1);
        for count in [half + 1, 2 * half - 1] {
            let iova = space.alloc(&pages(count)).unwrap();
            for wrong in
                [half, half + 1, 2 * half - 1, 2 * half].into_iter().filter(|n| *n != count)
            {
                space.free(iova, wrong * PAGE).unwrap_err();
            }
            space.free(iova, count * PAGE).unwrap();
            space.free(iova, count * PAGE).unwrap_err();
        }
    }
    let stats = space.stats();
    assert_eq!(stats.live_ranges, stats.cached_ranges);
}

#[test]
fn without_checks_too_a_range_that_no_slab_has_is_freed_where_it_is_recorded() {
    let space: Slabs<OneCpu, false> =
        Slabs::unchecked(Aperture::new(0, 0xffff, PAGE).unwrap(), OneCpu, SlabConfig::default());
    let first = space.alloc(&pages(1)).unwrap();
    // Two of a slab of four pages each, and one in the rest, which is recorded by itself.
    let threes: Vec<u64> = (0..3).map(|_| space.alloc(&pages(3)).unwrap()).collect();
    for three in threes.into_iter().rev() {
        space.free(three, 3 * PAGE).unwrap();
    }
    space.free(first, PAGE).unwrap();
    assert_eq!(space.alloc(&pages(8)).unwrap(), 0x8000);
    assert_eq!(space.stats().live_ranges, 1);
}

#[test]
fn every_class_from_a_granule_to_a_gibibyte_has_slabs_and_what_is_larger_has_not() {
    // rule L1
    let slabs = one_cpu(48);
    for order in 0..=18 {
        let (size, before) = (PAGE << order, slabs.stats().searches);
        let ranges: Vec<u64> = (0..8).map(|_| slabs.alloc(&Request::new(size)).unwrap()).collect();
        assert!(ranges.iter().all(|iova| iova % size == 0));
        assert_eq!(slabs.stats().searches, before + 1, "one search for all of order {order}");
        for iova in ranges {
            slabs.free(iova, size).unwrap();
        }
    }
    let huge = 64 << 30;
    let iova = slabs.alloc(&Request::new(huge)).unwrap();
    assert_eq!(iova % huge, 0);
    assert_eq!(slabs.core.lock().exact.len(), 1);
    assert!(slabs.free(iova, huge - PAGE).is_err());
    slabs.free(iova, huge).unwrap();
}

#[test]
fn apertures_of_all_widths_take_memory_for_what_is_allocated_only() {
    for bits in [32, 39, 48, 57, 64] {
        let slabs = one_cpu(bits);
        let ranges: Vec<u64> = (0..1000).map(|_| slabs.alloc(&pages(1)).unwrap()).collect();
        assert_eq!(ranges.iter().collect::<BTreeSet<_>>().len(), 1000);
        // rule L2
        assert!(ranges.iter().all(|iova| *iova != 0 && iova >> (bits - 1) <= 1));
        let core = slabs.core.lock();
        let memory =
            core.tree.memory() + core.pages.iter().map(|page| size_of_val(&**page)).sum::<usize>();
        assert!(memory < 32 << 10, "{memory} bytes for {bits} bits");
        drop(core);
        for iova in ranges {
            slabs.free(iova, PAGE).unwrap();
        }
    }
}

#[test]
fn a_small_aperture_is_not_divided_among_classes() {
    // An aperture of 1 MiB: no slab has more than one range.
    let slabs = Slabs::new(Aperture::new(0, (1 << 20) - 1, PAGE).unwrap(), OneCpu);
    let ranges: Vec<u64> = (0..100).map(|_| slabs.alloc(&pages(1)).unwrap()).collect();
    assert_eq!(slabs.stats().cached_ranges, 0);
    assert_eq!(slabs.core.lock().tree.free(), 255 - 100);
    drop(ranges);
}

#[test]
fn wrong_frees_are_reported_and_harm_nothing() {
    let slabs = one_cpu(48);
    slabs.reserve(0xfee0_0000, 0xfeef_ffff).unwrap();
    let why = |iova, size| slabs.free(iova, size).unwrap_err().reason;
    let three = slabs.alloc(&pages(3)).unwrap();
    let four = slabs.alloc(&pages(4)).unwrap();
    assert_eq!((three % (4 * PAGE), four), (0, three + 4 * PAGE));
    assert_eq!(why(three, 4 * PAGE), FreeReason::WrongRange);
    assert_eq!(why(three, 2 * PAGE), FreeReason::WrongRange);
    assert_eq!(why(four, 3 * PAGE), FreeReason::WrongRange);
    assert_eq!(why(four + PAGE, PAGE), FreeReason::WrongRange);
    assert_eq!(why(four + 1, PAGE), FreeReason::WrongRange);
    assert_eq!(why(four, 1 << 40), FreeReason::WrongRange);
    assert_eq!(why(four + 4 * PAGE, 4 * PAGE), FreeReason::AlreadyFree);
    assert_eq!(why(PAGE, PAGE), FreeReason::NotAllocated);
    assert_eq!(why(0, PAGE), FreeReason::NotAllocated);
    assert_eq!(why(1 << 50, PAGE), FreeReason::NotAllocated);
    // The index does not look at so high a bit.
    assert_eq!(why(four | 1 << 55, 4 * PAGE), FreeReason::NotAllocated);
    assert_eq!(why(u64::MAX, u64::MAX), FreeReason::NotAllocated);
    assert_eq!(why(four, 0), FreeReason::WrongRange);
    assert_eq!(why(0xfee0_0000, PAGE), FreeReason::Reserved);
    slabs.free(three, 3 * PAGE).unwrap();
    slabs.free(four, 4 * PAGE).unwrap();
    assert_eq!(why(three, 3 * PAGE), FreeReason::AlreadyFree);
    assert_eq!(why(four, 4 * PAGE), FreeReason::AlreadyFree);
    let stats = slabs.stats();
    assert_eq!((stats.allocs, stats.frees, stats.rejected_frees), (2, 2, 16));
    // Nothing was damaged: all of it can be allocated.
    slabs.drain();
    let core = slabs.core.lock();
    assert_eq!(core.tree.free(), (1 << 36) - 1 - 256);
}

#[test]
fn what_is_kept_idle_is_bounded() {
    let config = SlabConfig { idle_slabs: 3, ..SlabConfig::default() };
    let slabs = Slabs::with_config(aperture(48), OneCpu, config);
    let ranges: Vec<u64> = (0..10_000).map(|_| slabs.alloc(&pages(1)).unwrap()).collect();
    for iova in ranges {
        slabs.free(iova, PAGE).unwrap();
    }
    // Three in the list, and the current one.
    assert_eq!(slabs.stats().cached_ranges, 4 * 32);
    slabs.drain();
    assert_eq!(slabs.stats().live_ranges, 0);
    assert_eq!(slabs.core.lock().tree.free(), (1 << 36) - 1);
    // In a small aperture less is kept.
    let slabs = one_cpu(32);
    let ranges: Vec<u64> = (0..1000).map(|_| slabs.alloc(&pages(512)).unwrap()).collect();
    for iova in ranges {
        slabs.free(iova, 512 * PAGE).unwrap();
    }
    let kept = slabs.stats().live_bytes;
    // 1/64 of it, and the 32 ranges of the current slab.
    assert!(kept <= (1 << 32) / 64 + 32 * 512 * PAGE, "{kept:#x}");
}

#[test]
fn one_cpus_frees_serve_another_when_nothing_else_is_left() {
    // rule L11
    let cpu = FixedCpu::new(2);
    let slabs = Slabs::new(Aperture::new(0, 0xffff_ffff, PAGE).unwrap(), &cpu);
    // CPU 0 takes all of it.
    let mut ranges = Vec::new();
    while let Ok(iova) = slabs.alloc(&pages(1).flush(false)) {
        ranges.push(iova);
    }
    assert_eq!(ranges.len(), (1 << 20) - 1);
    for iova in ranges.drain(..100) {
        slabs.free(iova, PAGE).unwrap();
    }
    cpu.set(1);
    for _ in 0..100 {
        slabs.alloc(&pages(1).flush(false)).unwrap();
    }
    let error = slabs.alloc(&pages(1)).unwrap_err();
    assert!(matches!(error.reason, AllocReason::Exhausted { .. }));
    assert_eq!(slabs.stats().failures, 2);
}

#[test]
fn what_takes_more_than_half_of_all_addresses_fits_if_they_are_free() {
    let slabs = Slabs::new(Aperture::new(0, u64::MAX, 1).unwrap(), OneCpu);
    let request = Request::new((1 << 63) + 1).align(Align::Bytes(1));
    for _ in 0..2 {
        let iova = slabs.alloc(&request).unwrap();
        assert!(slabs.alloc(&request).is_err());
        slabs.check_free(iova, request.size).unwrap();
        assert!(slabs.check_free(iova, request.size + 1).is_err());
        slabs.free(iova, request.size).unwrap();
    }
}

/// As if another thread had freed the range, and allocated it again, since its size was checked.
#[test]
fn a_free_whose_size_was_checked_is_refused_if_the_range_has_another_one_now() {
    let slabs = one_cpu(48);
    let iova = slabs.alloc(&pages(6)).unwrap();
    assert!(slabs.free_cold(iova, 5 * PAGE, 0).is_err());
    slabs.free(iova, 6 * PAGE).unwrap();
}

#[test]
fn ranges_that_came_from_a_slab_are_counted_whatever_failed() {
    let slabs = one_cpu(48);
    for _ in 0..320 {
        slabs.alloc(&pages(1)).unwrap();
    }
    for _ in 0..20 {
        assert!(slabs.alloc(&pages(1).limit(PAGE - 1)).is_err());
    }
    assert!(slabs.alloc(&Request::new(0)).is_err());
    let Stats { allocs, cache_hits, failures, .. } = slabs.stats();
    assert_eq!((allocs, cache_hits, failures), (320, 310, 21));
}

#[test]
fn slabs_larger_than_the_aperture_do_not_keep_it_tight() {
    let config = SlabConfig { largest_slab: Some(1 << 40), ..SlabConfig::default() };
    let slabs = Slabs::with_config(aperture(32), OneCpu, config);
    let mut ranges = Vec::new();
    while let Ok(iova) = slabs.alloc(&pages(3 << 10)) {
        ranges.push(iova);
    }
    assert!(slabs.tight.load(Ordering::Relaxed));
    ranges.into_iter().for_each(|iova| slabs.free(iova, (3 << 10) * PAGE).unwrap());
    slabs.alloc(&pages(3)).unwrap();
    assert!(!slabs.tight.load(Ordering::Relaxed));
}

#[test]
fn what_lies_behind_short_ranges_is_found_when_nothing_else_is_left() {
    let slabs = one_cpu(32);
    // Ranges of 33 pages, each in 64.
    let mut short = Vec::new();
    while let Ok(iova) = slabs.alloc(&pages(33)) {
        short.push(iova);
    }
    // None in the first 64, as granule 0 is never handed out.
    assert_eq!(short.len(), (1 << 14) - 1);
    // 16 of the 31 behind each, and three times 16 in the first 64.
    let behind: Vec<u64> = (0..(1 << 14) + 2).map(|_| slabs.alloc(&pages(16)).unwrap()).collect();
    assert_eq!(behind.iter().filter(|iova| *iova % (64 * PAGE) == 48 * PAGE).count(), 1 << 14);
    assert_eq!(slabs.alloc(&pages(16)).unwrap_err().request.size, 16 * PAGE);
    for iova in behind {
        slabs.free(iova, 16 * PAGE).unwrap();
    }
    for iova in short {
        slabs.free(iova, 33 * PAGE).unwrap();
    }
    slabs.drain();
    assert_eq!(slabs.core.lock().tree.free(), (1 << 20) - 1);
    // There is room again, so that slabs are used again.
    let ranges: Vec<u64> = (0..16).map(|_| slabs.alloc(&pages(33)).unwrap()).collect();
    assert!(slabs.stats().cached_ranges > 0);
    drop(ranges);
}

#[test]
fn zones_keep_ranges_for_devices_of_fewer_bits_apart() {
    // rules L2, L12
    let config = SlabConfig {
        limits: vec![u32::MAX.into(), (1 << 40) - 1, u64::MAX],
        ..SlabConfig::default()
    };
    let slabs = Arc::new(Slabs::with_config(aperture(48), OneCpu, config));
    for (limit, low) in [(u64::MAX, 1 << 47), ((1 << 40) - 1, 1 << 39), (0xffff_ffff, 1 << 31)] {
        let before = slabs.stats().searches;
        let ranges: Vec<u64> =
            (0..32).map(|_| slabs.alloc(&pages(1).limit(limit)).unwrap()).collect();
        assert!(ranges.iter().all(|iova| (low..=limit).contains(iova)));
        assert_eq!(slabs.stats().searches, before + 1);
    }
    // A limit that is not one of them is respected too.
    let limit = (1 << 30) - 1;
    let iova = slabs.alloc(&pages(4).limit(limit)).unwrap();
    assert_eq!(iova + 4 * PAGE - 1, limit);
    // 32 bits first, and all of them once these are used up.
    let device = Preferred32::new(Arc::clone(&slabs));
    let mut high = 0;
    for _ in 0..9 {
        let iova = device.alloc(&Request::new(1 << 30)).unwrap();
        high += u64::from(iova > u64::from(u32::MAX));
    }
    assert!((5..9).contains(&high), "{high} of 9");
}

#[test]
fn a_limit_within_the_last_granule_keeps_all_of_it_out() {
    // rule L2
    let slabs = one_cpu(64);
    let top = slabs.alloc(&pages(1)).unwrap();
    let last = top + 31 * PAGE;
    assert_eq!(last, u64::MAX - (PAGE - 1));
    (1..31).for_each(|_| assert!(slabs.alloc(&pages(1)).is_ok()));
    // The current slab has the last page left, and it ends beyond the limit.
    let short = Request::new(PAGE - 1).limit(u64::MAX - 1);
    assert!(slabs.alloc(&short).unwrap() < top);
    assert_eq!(slabs.alloc(&pages(1)), Ok(last));
}

#[test]
fn a_reserved_gap_is_passed_over() {
    let slabs = Slabs::new(Aperture::new(0, (1 << 39) - 1, PAGE).unwrap(), OneCpu);
    slabs.reserve(0xfee0_0000, 0xfeef_ffff).unwrap();
    let below = slabs.alloc(&pages(1).limit(0xfeef_ffff)).unwrap();
    assert_eq!(below >> 21, 0xfedf_ffff >> 21, "just below the gap: {below:#x}");
    assert_eq!(slabs.free(0xfee0_0000, PAGE).unwrap_err().reason, FreeReason::Reserved);
}

#[test]
fn reservations_merge_and_are_never_handed_out() {
    // rule L15
    let slabs = one_cpu(32);
    let iova = slabs.alloc(&pages(1)).unwrap();
    let error = slabs.reserve(iova + 5, iova + 10).unwrap_err();
    assert_eq!(error, ReserveError::InUse { first: iova + 5, last: iova + 10, taken: iova + 5 });
    slabs.free(iova, PAGE).unwrap();
    // The range is only kept in a slab: no reason to refuse.
    for (first, last) in [(0x1_0000, 0x1_ffff), (0x3_0000, 0x3_ffff), (0x1_8000, 0x3_0000)] {
        slabs.reserve(first, last).unwrap();
    }
    slabs.reserve(iova, iova).unwrap();
    slabs.reserve(u64::MAX - 1, u64::MAX).unwrap();
    assert_eq!(slabs.core.lock().reserved.len(), 2);
    assert_eq!(slabs.core.lock().tree.free(), (1 << 20) - 1 - 48 - 1);
    assert!(slabs.reserve(2, 1).is_err());
    slabs.reserve(0, u64::MAX).unwrap();
    assert_eq!(slabs.core.lock().tree.free(), 0);
    assert!(slabs.alloc(&pages(1)).is_err());
}

#[test]
fn the_lowest_and_the_highest_place_are_just_that() {
    for (placement, first, second) in
        [(Placement::Lowest, 0x1000, 0x2000), (Placement::Highest, 0xffff_f000, 0xffff_e000)]
    {
        let config = SlabConfig { placement, ..SlabConfig::default() };
        let slabs = Slabs::with_config(aperture(32), OneCpu, config);
        assert_eq!(slabs.alloc(&pages(1)), Ok(first));
        assert_eq!(slabs.alloc(&pages(1)), Ok(second));
        slabs.free(first, PAGE).unwrap();
        assert_eq!(slabs.alloc(&pages(1)), Ok(first));
        let odd = slabs.alloc(&pages(3).align(Align::Bytes(PAGE))).unwrap();
        assert_eq!(odd, if placement == Placement::Lowest { 0x3000 } else { 0xffff_b000 });
        slabs.free(odd, 3 * PAGE).unwrap();
        assert_eq!(slabs.stats().cached_ranges, 0);
    }
}

#[test]
fn a_cpu_that_is_offline_keeps_nothing() {
    // rule L9
    let cpu = FixedCpu::new(2);
    let slabs = Slabs::new(aperture(48), &cpu);
    let ranges: Vec<u64> = (0..40).map(|_| slabs.alloc(&pages(1)).unwrap()).collect();
    slabs.offline(0);
    assert_eq!(slabs.stats().cached_ranges, 0);
    let more = slabs.alloc(&pages(1)).unwrap();
    for iova in ranges.into_iter().chain([more]) {
        slabs.free(iova, PAGE).unwrap();
    }
    assert_eq!(slabs.stats().live_ranges, 0);
    assert_eq!(slabs.core.lock().tree.free(), (1 << 36) - 1);
    slabs.online(0);
    slabs.alloc(&pages(1)).unwrap();
    assert_eq!(slabs.stats().cached_ranges, 31);
    slabs.offline(7);
    slabs.online(7);
}

#[test]
fn other_alignments_are_met_where_there_is_room_for_them() {
    let slabs = one_cpu(32);
    let wide = slabs.alloc(&pages(1).align(Align::Bytes(1 << 30))).unwrap();
    assert_eq!(wide % (1 << 30), 0);
    slabs.free(wide, PAGE).unwrap();
    // 3 pages at any page: no aligned place is left, but an unaligned one is.
    let config = SlabConfig { largest_slab: Some(PAGE), ..SlabConfig::default() };
    let slabs = Slabs::with_config(Aperture::new(0, 0x7fff, PAGE).unwrap(), OneCpu, config);
    let taken = slabs.alloc(&pages(1).limit(0x4fff)).unwrap();
    assert_eq!(taken, 0x4000);
    assert!(slabs.alloc(&pages(3)).is_err());
    assert_eq!(slabs.alloc(&pages(3).align(Align::Bytes(PAGE))), Ok(0x5000));
    slabs.free(0x5000, 3 * PAGE).unwrap();
    slabs.free(0x4000, PAGE).unwrap();
    slabs.drain();
    assert_eq!(slabs.core.lock().tree.free(), 7);
}

/// Threads that allocate, hand over and free as fast as they can, and check that no granule is
/// handed out twice.
#[test]
fn threads_that_pass_ranges_to_each_other_never_get_the_same_one() {
    use ringfence_sync::atomic::AtomicU8;
    use std::sync::mpsc;
    let seed = TestRunner::default().rng().next_u64();
    for bits in [24, 32] {
        let slabs = Slabs::new(aperture(bits), OsCpu::new());
        let owners: Vec<AtomicU8> = (0..1u64 << (bits - 12)).map(|_| AtomicU8::new(0)).collect();
        let mark = |iova: u64, count: u64, from: u8, to: u8| {
            for number in iova / PAGE..iova / PAGE + count {
                let was = owners[number as usize].swap(to, Ordering::Relaxed);
                assert_eq!(was, from, "granule {number:#x}");
            }
        };
        thread::scope(|scope| {
            let mut ends = Vec::new();
            let mut inboxes = Vec::new();
            for _ in 0..4 {
                let (sender, inbox) = mpsc::channel::<(u64, u64)>();
                ends.push(sender);
                inboxes.push(inbox);
            }
            for (me, inbox) in inboxes.into_iter().enumerate() {
                let (slabs, mark) = (&slabs, &mark);
                let next = ends[(me + 1) % 4].clone();
                scope.spawn(move || {
                    let mut random = seed.wrapping_mul(2 * me as u64 + 1) | 1;
                    let mut mine = Vec::new();
                    for round in 0..20_000u32 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let count = random % 40 + 1;
                        if let Ok(iova) = slabs.alloc(&pages(count)) {
                            mark(iova, count, 0, 1);
                            mine.push((iova, count));
                        }
                        if mine.len() > 64 || random & 1 << 40 != 0 {
                            let at = (random >> 20) as usize % mine.len().max(1);
                            if let Some(range) = mine.get(at).copied() {
                                mine.swap_remove(at);
                                // Hands some to the next thread, frees the others.
                                if random & 1 << 41 != 0 && next.send(range).is_ok() {
                                    continue;
                                }
                                mark(range.0, range.1, 1, 0);
                                slabs.free(range.0, range.1 * PAGE).unwrap();
                            }
                        }
                        for (iova, count) in inbox.try_iter().take(4) {
                            mark(iova, count, 1, 0);
                            slabs.free(iova, count * PAGE).unwrap();
                        }
                        if round % 1000 == 0 && me == 0 {
                            slabs.drain();
                        }
                    }
                    drop(next);
                    for (iova, count) in mine.into_iter().chain(inbox.try_iter()) {
                        mark(iova, count, 1, 0);
                        slabs.free(iova, count * PAGE).unwrap();
                    }
                    // Ranges that arrive later stay allocated and are counted below.
                    inbox
                });
            }
        });
        // Ranges sent to a thread that had ended were never freed.
        let left = owners.iter().filter(|owner| owner.load(Ordering::Relaxed) == 1).count() as u64;
        slabs.drain();
        let core = slabs.core.lock();
        let all = (1 << (bits - 12)) - 1;
        if !slabs.tight.load(Ordering::Relaxed) {
            let held: u64 =
                core.slabs().map(|slab| u64::from(slab.owned().count_ones()) << slab.class()).sum();
            assert_eq!(core.tree.free() + held, all);
        }
        assert!(core.tree.free() + left <= all);
    }
}
