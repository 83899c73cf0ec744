use super::*;
use crate::{Align, AllocReason};
use std::vec::Vec;

const PAGE: u64 = 4096;
const LAST_32: u64 = 0xffff_ffff;

fn tree(first: u64, last: u64) -> RbTree {
    RbTree::new(Aperture::new(first, last, PAGE).unwrap())
}

fn alloc(tree: &RbTree, request: Request) -> u64 {
    tree.alloc(&request).unwrap()
}

#[test]
fn an_empty_space_gives_the_highest_place_at_or_below_the_limit() {
    // rule L3
    for (limit, size, expected) in [
        (u64::MAX, PAGE, 0xffff_ffff_f000),
        (LAST_32, PAGE, 0xffff_f000),
        (LAST_32 - 1, PAGE, 0xffff_e000),
        (LAST_32, 3 * PAGE, 0xffff_c000),
        (LAST_32, 1, 0xffff_f000),
        (0x2fff, PAGE, 0x2000),
    ] {
        let tree = tree(0, (1 << 48) - 1);
        assert_eq!(alloc(&tree, Request::new(size).limit(limit)), expected);
    }
}

#[test]
fn every_range_is_aligned_to_its_size_rounded_up() {
    // rule L4
    let tree = tree(0, (1 << 40) - 1);
    for pages in [1u64, 2, 3, 5, 7, 16, 31, 33, 64, 100, 513, 1 << 18] {
        let iova = alloc(&tree, Request::new(pages * PAGE));
        assert_eq!(iova % (pages.next_power_of_two() * PAGE), 0, "{pages} pages");
        // An explicit smaller alignment packs more tightly.
        let iova = alloc(&tree, Request::new(pages * PAGE).align(Align::Bytes(1)));
        assert_eq!(iova % PAGE, 0);
    }
}

#[test]
fn address_zero_and_what_lies_above_mask_or_aperture_are_never_handed_out() {
    // rule L2
    let tree = tree(0, 16 * PAGE - 1);
    let page = Request::new(PAGE);
    let mut low: Vec<u64> = (0..7).map(|_| alloc(&tree, page.limit(8 * PAGE - 1))).collect();
    low.sort_unstable();
    assert_eq!(low, (1..8).map(|n| n * PAGE).collect::<Vec<_>>());
    let error = tree.alloc(&page.limit(8 * PAGE - 1)).unwrap_err();
    assert_eq!(error.reason, AllocReason::Exhausted { first: PAGE, last: 8 * PAGE - 1 });
    let mut high: Vec<u64> = (0..8).map(|_| alloc(&tree, page)).collect();
    high.sort_unstable();
    assert_eq!(high, (8..16).map(|n| n * PAGE).collect::<Vec<_>>());
    assert!(tree.alloc(&page).is_err());
}

#[test]
fn a_failed_search_is_not_repeated_until_something_below_4_gib_is_freed() {
    // rule L13
    let tree = tree(LAST_32 - 4 * PAGE + 1, LAST_32 + 4 * PAGE);
    let four = alloc(&tree, Request::new(4 * PAGE).limit(LAST_32));
    let high = alloc(&tree, Request::new(PAGE));
    assert!(tree.alloc(&Request::new(PAGE).limit(LAST_32)).is_err());
    let searches = tree.stats().searches;
    for pages in 1..4 {
        assert!(tree.alloc(&Request::new(pages * PAGE).limit(LAST_32)).is_err());
        assert!(tree.alloc(&Request::new(pages * PAGE).limit(LAST_32 - PAGE)).is_err());
    }
    let stats = tree.stats();
    assert_eq!((stats.searches, stats.skipped_searches), (searches, 6));
    // A free above 4 GiB does not change it, one below does.
    tree.free(high, PAGE).unwrap();
    assert!(tree.alloc(&Request::new(PAGE).limit(LAST_32)).is_err());
    assert_eq!(tree.stats().searches, searches);
    tree.free(four, 4 * PAGE).unwrap();
    assert_eq!(alloc(&tree, Request::new(PAGE).limit(LAST_32)), 0xffff_f000);
}

#[test]
fn a_failed_search_does_not_refuse_a_request_that_is_easier_to_meet() {
    // rule L14
    // A failed size says nothing about the same size with more places allowed.
    let tree = tree(0, LAST_32);
    let page = Request::new(PAGE);
    assert!(tree.alloc(&page.limit(PAGE - 1)).is_err());
    let one = alloc(&tree, page.limit(2 * PAGE - 1));
    assert_eq!(one, PAGE);
    assert!(tree.alloc(&page.limit(2 * PAGE - 1)).is_err());
    assert_eq!(alloc(&tree, page), 0xffff_f000);
    // Nor does an alignment that failed.
    let aligned = Request::new(2 * PAGE).align(Align::Bytes(1 << 31));
    alloc(&tree, aligned);
    assert!(tree.alloc(&aligned).is_err());
    alloc(&tree, Request::new(2 * PAGE).align(Align::Bytes(PAGE)));
}

#[test]
fn a_hole_above_the_cached_node_is_found_by_the_second_search() {
    // rule L14
    let tree = tree(PAGE, 8 * PAGE - 1);
    // Fill the bottom with a low limit: the cached node is then the lowest range, with nothing free
    // below and everything free above.
    assert_eq!(alloc(&tree, Request::new(PAGE).limit(2 * PAGE - 1)), PAGE);
    assert_eq!(alloc(&tree, Request::new(PAGE).limit(3 * PAGE - 1)), 2 * PAGE);
    let mut rest: Vec<u64> = (0..5).map(|_| alloc(&tree, Request::new(PAGE))).collect();
    rest.sort_unstable();
    assert_eq!(rest, (3..8).map(|n| n * PAGE).collect::<Vec<_>>());
    assert!(tree.alloc(&Request::new(PAGE)).is_err());
}

#[test]
fn an_allocation_after_another_looks_at_one_hole() {
    let tree = tree(0, (1 << 48) - 1);
    for limit in [u64::MAX, LAST_32] {
        alloc(&tree, Request::new(PAGE).limit(limit));
        let before = tree.stats().search_steps;
        for _ in 0..1000 {
            alloc(&tree, Request::new(PAGE).limit(limit));
        }
        assert_eq!(tree.stats().search_steps - before, 1000);
    }
}

#[test]
fn a_freed_range_is_the_next_to_be_found() {
    let tree = tree(0, (1 << 48) - 1);
    let iovas: Vec<u64> = (0..100).map(|_| alloc(&tree, Request::new(PAGE))).collect();
    tree.free(iovas[40], PAGE).unwrap();
    assert_eq!(alloc(&tree, Request::new(PAGE)), iovas[40]);
    // The same below 4 GiB, where the removed node may be either cached node.
    let iovas: Vec<u64> =
        (0..10).map(|_| alloc(&tree, Request::new(PAGE).limit(LAST_32))).collect();
    for &iova in &iovas {
        tree.free(iova, PAGE).unwrap();
    }
    assert_eq!(alloc(&tree, Request::new(PAGE).limit(LAST_32)), iovas[0]);
}

#[test]
fn reservations_merge_and_are_never_handed_out() {
    // rule L15
    let tree = tree(0, 16 * PAGE - 1);
    tree.reserve(4 * PAGE, 6 * PAGE - 1).unwrap();
    tree.reserve(5 * PAGE + 1, 8 * PAGE).unwrap();
    tree.reserve(2 * PAGE, 4 * PAGE + 1).unwrap();
    // Twice, within, and outside of the aperture: nothing new.
    tree.reserve(2 * PAGE, 8 * PAGE).unwrap();
    tree.reserve(3 * PAGE, 3 * PAGE).unwrap();
    tree.reserve(16 * PAGE, u64::MAX).unwrap();
    assert_eq!(
        tree.state.lock().tree.iter().map(|n| (n.first, n.last)).collect::<Vec<_>>(),
        [(2, 8)]
    );
    let mut given: Vec<u64> = (0..8).map(|_| alloc(&tree, Request::new(1))).collect();
    given.sort_unstable();
    let expected: Vec<u64> = [1, 9, 10, 11, 12, 13, 14, 15].iter().map(|n| n * PAGE).collect();
    assert_eq!(given, expected);
    assert!(tree.alloc(&Request::new(1)).is_err());
    let error = tree.free(4 * PAGE, PAGE).unwrap_err();
    assert_eq!(error.reason, FreeReason::Reserved);
}

#[test]
fn a_reservation_over_an_allocated_range_is_refused_and_changes_nothing() {
    let tree = tree(0, 16 * PAGE - 1);
    tree.reserve(4 * PAGE, 5 * PAGE).unwrap();
    let iova = alloc(&tree, Request::new(2 * PAGE).limit(8 * PAGE - 1));
    assert_eq!(iova, 6 * PAGE);
    let error = tree.reserve(5 * PAGE, 7 * PAGE).unwrap_err();
    assert_eq!(error, ReserveError::InUse { first: 5 * PAGE, last: 7 * PAGE, taken: 6 * PAGE });
    assert!(matches!(tree.reserve(1, 0), Err(ReserveError::Inverted { .. })));
    tree.free(iova, 2 * PAGE).unwrap();
    tree.reserve(5 * PAGE, 7 * PAGE).unwrap();
    // The node that searches started from is gone; they start at another one.
    assert_eq!(alloc(&tree, Request::new(PAGE).limit(8 * PAGE - 1)), 3 * PAGE);
}

#[test]
fn a_wrong_free_is_an_error_and_changes_nothing() {
    let tree = tree(0, LAST_32);
    let iova = alloc(&tree, Request::new(4 * PAGE));
    for (at, size, reason) in [
        (iova, 3 * PAGE, FreeReason::WrongRange),
        (iova, 8 * PAGE, FreeReason::NotAllocated),
        (iova + PAGE, PAGE, FreeReason::WrongRange),
        (iova - PAGE, PAGE, FreeReason::NotAllocated),
        (iova + 1, 4 * PAGE, FreeReason::NotAllocated),
        (iova, 0, FreeReason::NotAllocated),
        (0, PAGE, FreeReason::NotAllocated),
        (u64::MAX, u64::MAX, FreeReason::NotAllocated),
    ] {
        let error = FreeError { iova: at, size, reason };
        assert_eq!(tree.check_free(at, size), Err(error));
        assert_eq!(tree.free(at, size), Err(error));
    }
    assert_eq!(tree.stats().rejected_frees, 8);
    assert_eq!(tree.stats().live_bytes, 4 * PAGE);
    // Rounded up to the granule, the size is the same.
    tree.free(iova, 3 * PAGE + 1).unwrap();
    assert_eq!(tree.free(iova, 4 * PAGE).unwrap_err().reason, FreeReason::NotAllocated);
    assert_eq!(tree.stats().live_bytes, 0);
}

#[test]
fn the_top_of_the_space_is_like_any_other_place() {
    // rule L2
    for granule in [1, PAGE] {
        let tree = RbTree::new(Aperture::new(0, u64::MAX, granule).unwrap());
        let top = alloc(&tree, Request::new(granule));
        assert_eq!(top, u64::MAX - (granule - 1));
        assert_eq!(alloc(&tree, Request::new(granule)), top - granule);
        tree.free(top, granule).unwrap();
        assert_eq!(alloc(&tree, Request::new(granule)), top);
        tree.reserve(u64::MAX - 0xffff, u64::MAX).unwrap_err();
        let half = alloc(&tree, Request::new(1 << 62));
        assert_eq!(half, 2 << 62);
        // All but the granule of IOVA 0, in one piece.
        let whole = RbTree::new(Aperture::new(0, u64::MAX, granule).unwrap());
        let all = Request::new(u64::MAX - (granule - 1)).align(Align::Bytes(1));
        assert_eq!(whole.alloc(&all), Ok(granule));
        assert!(whole.alloc(&Request::new(1)).is_err());
        whole.free(granule, u64::MAX - (granule - 1)).unwrap();
        assert!(whole.alloc(&Request::new(u64::MAX)).is_err());
    }
}
