use super::*;
use crate::{FreeReason, MagazineConfig, Magazines, RbTree};
use ringfence_sync::cpu::OneCpu;
use std::{
    sync::{Arc, Mutex},
    thread,
    vec::Vec,
};

const PAGE: u64 = 4096;

/// 64 pages from page 1 on.
fn tree() -> RbTree {
    RbTree::new(Aperture::new(0, 65 * PAGE - 1, PAGE).unwrap())
}

fn pages(n: u64) -> Request {
    Request::new(n * PAGE)
}

#[test]
fn buffers_lie_in_the_order_of_the_ring_around_and_around() {
    // rule L1
    let ring = Ring::new(tree(), 8 * PAGE).unwrap();
    let base = ring.chunk().first();
    assert_eq!(base % (8 * PAGE), 0);
    let mut in_flight: Vec<u64> = (0..8).map(|_| ring.alloc(&pages(1)).unwrap()).collect();
    for lap in 0..3 {
        for (n, slot) in in_flight.iter_mut().enumerate() {
            assert_eq!(*slot, base + n as u64 * PAGE, "lap {lap}");
            ring.free(*slot, PAGE).unwrap();
            *slot = ring.alloc(&pages(1)).unwrap();
        }
    }
    assert_eq!((ring.fallbacks(), ring.stats().allocs, ring.stats().frees), (0, 32, 24));
}

#[test]
fn a_place_that_is_still_in_use_is_stepped_over() {
    let ring = Ring::new(tree(), 4 * PAGE).unwrap();
    let base = ring.chunk().first();
    let all: Vec<u64> = (0..4).map(|_| ring.alloc(&pages(1)).unwrap()).collect();
    // They are freed out of order; the second late.
    for n in [3, 0, 2] {
        ring.free(all[n], PAGE).unwrap();
    }
    let again: Vec<u64> = (0..3).map(|_| ring.alloc(&pages(1)).unwrap()).collect();
    assert_eq!(again, [base, base + 2 * PAGE, base + 3 * PAGE]);
}

#[test]
fn a_lead_shifts_the_chunk_and_is_never_handed_out() {
    let tree = Arc::new(tree());
    let ring = Ring::with_lead(Arc::clone(&tree), 8 * PAGE, 2 * PAGE + 5).unwrap();
    let base = ring.chunk().first();
    assert_eq!(base, 57 * PAGE, "the last eight");
    let chunk = ring.chunk();
    let size = chunk.last() - chunk.first() + 1;
    assert_eq!((tree.stats().live_bytes, size), (11 * PAGE, 8 * PAGE));
    let two = pages(2).align(Align::Bytes(PAGE));
    let at: Vec<u64> = (0..4).map(|_| (ring.alloc(&two).unwrap() - base) / PAGE).collect();
    assert_eq!(at, [0, 2, 4, 6]);
    assert!(ring.free(base - 3 * PAGE, 11 * PAGE).is_err(), "nor can a caller free all of it");
    while let Ok(iova) = ring.alloc(&pages(1)) {
        assert!(iova < base - 3 * PAGE || base + 8 * PAGE <= iova);
    }
    assert_eq!(ring.stats().live_bytes, 61 * PAGE, "all but the lead");
    for n in at {
        ring.free(base + n * PAGE, 2 * PAGE).unwrap();
    }
    drop(ring);
    assert_eq!(tree.stats().live_bytes, 53 * PAGE);
}

#[test]
fn rings_of_a_ring_lie_a_lead_apart() {
    let device = Arc::new(Ring::new(tree(), 27 * PAGE).unwrap());
    let base = device.chunk().first();
    let queues: Vec<_> =
        (0..3).map(|_| Ring::with_lead(Arc::clone(&device), 8 * PAGE, PAGE).unwrap()).collect();
    let firsts: Vec<u64> = queues.iter().map(|ring| (ring.chunk().first() - base) / PAGE).collect();
    assert_eq!(firsts, [1, 10, 19]);
    assert_eq!(device.fallbacks(), 0);
    drop(queues);
    assert_eq!(device.stats().live_ranges, 0);
}

#[test]
fn alignment_limit_and_boundary_hold_within_the_chunk() {
    // rules L1, L2
    let ring = Ring::new(tree(), 16 * PAGE).unwrap();
    let base = ring.chunk().first();
    assert_eq!(ring.alloc(&pages(1)), Ok(base));
    assert_eq!(ring.alloc(&pages(3)), Ok(base + 4 * PAGE), "aligned to four");
    assert_eq!(ring.alloc(&pages(3).align(Align::Bytes(1))), Ok(base + 7 * PAGE));
    // From page 10 on, four pages would cross the segment that ends before page 12.
    let request = pages(4).align(Align::Bytes(PAGE)).boundary(4 * PAGE - 1);
    assert_eq!(ring.alloc(&request), Ok(base + 12 * PAGE));
    let low = base + 4 * PAGE - 1;
    assert_eq!(ring.alloc(&pages(2).limit(low)), Ok(base + 2 * PAGE));
    assert_eq!(ring.fallbacks(), 0);
}

#[test]
fn what_the_chunk_cannot_hold_comes_from_below_and_is_counted() {
    // rule L2
    let tree = Arc::new(tree());
    let ring = Ring::new(Arc::clone(&tree), 8 * PAGE).unwrap();
    let base = ring.chunk().first();
    let below = ring.alloc(&pages(1).limit(base - 1)).unwrap();
    assert!(0 < below && below < base, "IOVA 0 is never handed out");
    let large = ring.alloc(&pages(16)).unwrap();
    assert!(large + 16 * PAGE <= base || large > ring.chunk().last());
    assert_eq!(ring.fallbacks(), 2);
    assert!(ring.alloc(&pages(64)).is_err(), "nowhere");
    let stats = ring.stats();
    assert_eq!((stats.allocs, stats.failures, stats.live_ranges), (2, 1, 2));
    assert_eq!(stats.live_bytes, 17 * PAGE);
    assert_eq!(ring.check_free(large, 16 * PAGE), Ok(()));
    ring.free(large, 16 * PAGE).unwrap();
    ring.free(below, PAGE).unwrap();
    let stats = ring.stats();
    assert_eq!((stats.frees, stats.live_ranges, stats.live_bytes), (2, 0, 0));
    assert_eq!(tree.stats().live_ranges, 1, "the chunk");
}

#[test]
fn invalid_requests_are_not_passed_on() {
    let tree = Arc::new(tree());
    let ring = Ring::new(Arc::clone(&tree), 8 * PAGE).unwrap();
    for request in [Request::new(0), pages(1).align(Align::Bytes(3)), pages(2).boundary(PAGE - 1)] {
        let error = ring.alloc(&request).unwrap_err();
        assert!(error.reason.is_invalid() && error.request == request);
    }
    assert_eq!((ring.stats().failures, tree.stats().failures), (3, 0));
}

#[test]
fn a_chunk_that_cannot_be_allocated_is_an_error_and_takes_nothing() {
    let tree = Arc::new(tree());
    let why = |bytes| Ring::new(Arc::clone(&tree), bytes).unwrap_err().reason;
    assert_eq!(why(0), AllocReason::ZeroSize);
    assert!(Ring::with_lead(Arc::clone(&tree), 0, PAGE).is_err());
    assert!(Ring::with_lead(Arc::clone(&tree), PAGE, u64::MAX - PAGE).is_err());
    assert_eq!(why(u64::MAX), AllocReason::TooBig);
    assert_eq!(why((MAX_GRANULES + 1) * PAGE), AllocReason::TooBig);
    assert!(matches!(why(64 * PAGE), AllocReason::ApertureTooSmall { .. }));
    assert_eq!(tree.stats().live_ranges, 0);
}

#[test]
fn wrong_frees_are_refused_and_harm_nothing() {
    let ring = Ring::new(tree(), 8 * PAGE).unwrap();
    let base = ring.chunk().first();
    let two = ring.alloc(&pages(2)).unwrap();
    let one = ring.alloc(&pages(1)).unwrap();
    let outside = ring.alloc(&pages(16)).unwrap();
    ring.reserve(base + 7 * PAGE, base + 7 * PAGE).unwrap();
    let wrong = [
        (two, 1, FreeReason::WrongRange),
        (two, 3, FreeReason::WrongRange),
        (two + PAGE, 1, FreeReason::WrongRange),
        (two + 1, 2, FreeReason::NotAllocated),
        (base + 4 * PAGE, 1, FreeReason::NotAllocated),
        (base + 7 * PAGE, 1, FreeReason::Reserved),
        (one, 8, FreeReason::NotAllocated),
        (outside, 8, FreeReason::WrongRange),
        (0, 1, FreeReason::NotAllocated),
        (u64::MAX - (PAGE - 1), 1, FreeReason::NotAllocated),
    ];
    for (n, (iova, count, reason)) in wrong.into_iter().enumerate() {
        let size = count * PAGE;
        let error = Err(FreeError { iova, size, reason });
        assert_eq!(ring.check_free(iova, size), error, "{n}");
        assert_eq!(ring.free(iova, size), error, "{n}");
    }
    // Nor can callers of the ring free the chunk itself.
    assert!(ring.free(base, 8 * PAGE).is_err());
    assert_eq!(ring.stats().rejected_frees, wrong.len() as u64 + 1);
    for (iova, count) in [(two, 2), (one, 1), (outside, 16)] {
        ring.free(iova, count * PAGE).unwrap();
        assert!(ring.free(iova, count * PAGE).is_err(), "twice");
    }
    assert_eq!(ring.stats().live_ranges, 0);
}

#[test]
fn the_chunk_stays_allocated_below_and_is_given_back_with_the_ring() {
    // rule L9
    let tree = Arc::new(tree());
    let ring = Ring::new(Arc::clone(&tree), 32 * PAGE).unwrap();
    let chunk = ring.chunk();
    let mut others = Vec::new();
    while let Ok(iova) = tree.alloc(&pages(1)) {
        assert!(iova < chunk.first() || chunk.last() < iova);
        others.push(iova);
    }
    assert_eq!(others.len(), 32);
    let buffer = ring.alloc(&pages(4)).unwrap();
    ring.free(buffer, 4 * PAGE).unwrap();
    drop(ring);
    assert_eq!(tree.stats().live_ranges, 32);
    assert_eq!(tree.alloc(&pages(32)), Ok(chunk.first()));
}

#[test]
fn a_chunk_with_a_buffer_in_use_stays_allocated_after_its_ring() {
    // rule L9
    let tree = Arc::new(tree());
    let ring = Ring::new(Arc::clone(&tree), 8 * PAGE).unwrap();
    ring.alloc(&pages(1)).unwrap();
    drop(ring);
    assert_eq!(tree.stats().live_bytes, 8 * PAGE);
}

#[test]
fn reservations_hold_within_the_chunk_and_around_it() {
    // rule L15
    let tree = Arc::new(tree());
    let ring = Ring::new(Arc::clone(&tree), 8 * PAGE).unwrap();
    let chunk = ring.chunk();
    ring.reserve(chunk.first() - 2 * PAGE, chunk.first() + PAGE).unwrap();
    ring.reserve(chunk.first() + PAGE, chunk.first() + 2 * PAGE).unwrap();
    for _ in 0..5 {
        assert!(ring.alloc(&pages(1)).unwrap() >= chunk.first() + 3 * PAGE);
    }
    assert_eq!(ring.fallbacks(), 0);
    while let Ok(iova) = ring.alloc(&pages(1)) {
        assert!(iova < chunk.first() - 2 * PAGE || chunk.last() < iova);
    }
    let taken = chunk.first() + 3 * PAGE;
    let (first, last) = (chunk.first() + PAGE, u64::MAX);
    assert_eq!(ring.reserve(first, last), Err(ReserveError::InUse { first, last, taken }));
    assert_eq!(ring.reserve(2, 1), Err(ReserveError::Inverted { first: 2, last: 1 }));
    // The allocator below does not know what was reserved in the chunk, so it does not get the
    // chunk back.
    for page in 3..8 {
        ring.free(chunk.first() + page * PAGE, PAGE).unwrap();
    }
    drop(ring);
    assert!(tree.alloc(&pages(8)).is_err());
}

#[test]
fn a_fall_back_drains_the_caches_below_only_if_it_may() {
    // rule L11
    let config = MagazineConfig { checked: true, ..MagazineConfig::default() };
    let below = Magazines::with_config(tree(), OneCpu, config);
    let ring = Ring::new(below, 8 * PAGE).unwrap();
    let mut singles = Vec::new();
    while let Ok(iova) = ring.alloc(&pages(1)) {
        singles.push(iova);
    }
    for iova in singles {
        ring.free(iova, PAGE).unwrap();
    }
    // Everything outside the chunk is cached, page by page.
    let request = pages(16);
    assert!(ring.alloc(&request.flush(false)).is_err());
    let drains = ring.stats().drains;
    let iova = ring.alloc(&request).unwrap();
    assert_eq!(ring.stats().drains, drains + 1);
    ring.free(iova, 16 * PAGE).unwrap();
    ring.drain();
    assert_eq!(ring.stats().cached_ranges, 0);
}

#[test]
fn a_ring_lies_at_the_very_end_of_the_addresses() {
    let last = u64::MAX;
    let tree = RbTree::new(Aperture::new(last - (16 * PAGE - 1), last, PAGE).unwrap());
    let ring = Ring::new(tree, 8 * PAGE).unwrap();
    assert_eq!(ring.chunk().last(), last);
    ring.reserve(last - 1, last).unwrap();
    let got: Vec<u64> = (0..7).map(|_| ring.alloc(&pages(1)).unwrap()).collect();
    assert_eq!(got.last(), Some(&(last - (2 * PAGE - 1))));
    assert_eq!(ring.fallbacks(), 0);
}

#[test]
fn threads_share_a_ring() {
    let ring = Arc::new(Ring::new(tree(), 16 * PAGE).unwrap());
    let owned = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let work = |seed: u64| {
        let (ring, owned) = (Arc::clone(&ring), Arc::clone(&owned));
        move || {
            for n in 0..2000u64 {
                let count = (n * seed) % 4 + 1;
                let iova = ring.alloc(&pages(count)).unwrap();
                for page in 0..count {
                    assert!(owned.lock().unwrap().insert(iova + page * PAGE), "handed out twice");
                }
                for page in 0..count {
                    owned.lock().unwrap().remove(&(iova + page * PAGE));
                }
                ring.free(iova, count * PAGE).unwrap();
            }
        }
    };
    thread::scope(|scope| {
        for seed in [1, 3, 7] {
            scope.spawn(work(seed));
        }
    });
    let stats = ring.stats();
    assert_eq!((stats.allocs, stats.frees, stats.live_ranges), (6000, 6000, 0));
}
