use super::*;
use crate::{Aperture, Bitmap, DEFAULT_WINDOW, RbTree};
use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_sync::cpu::{FixedCpu, OneCpu};
use std::{
    collections::HashSet,
    sync::{Arc, atomic::AtomicBool},
    vec::Vec,
};

const PAGE: u64 = 4096;
const SLOTS: u64 = MAGAZINE_SLOTS as u64;

fn tree(pages: u64) -> RbTree {
    RbTree::new(Aperture::new(PAGE, (pages + 1) * PAGE - 1, PAGE).unwrap())
}

fn big() -> RbTree {
    tree(1 << 36)
}

fn checked<A: Allocator, C: CpuId>(inner: A, cpu: C, max_magazines: usize) -> Magazines<A, C> {
    Magazines::with_config(inner, cpu, MagazineConfig { max_magazines, checked: true })
}

fn pages<A: Allocator, C: CpuId>(magazines: &Magazines<A, C>, count: u64) -> Vec<u64> {
    (0..count).map(|_| magazines.alloc(&Request::new(PAGE)).unwrap()).collect()
}

fn free_all<A: Allocator, C: CpuId>(magazines: &Magazines<A, C>, iovas: &[u64]) {
    for &iova in iovas {
        magazines.free(iova, PAGE).unwrap();
    }
}

/// The fill of loaded, previous and depot, for the class of one page on the first CPU.
fn fill<A: Allocator, C: CpuId>(magazines: &Magazines<A, C>) -> (usize, usize, usize) {
    let cpu = magazines.cpus[0].lock();
    let Pair { loaded, previous } = &cpu.classes[0];
    (loaded.slots.len(), previous.slots.len(), magazines.depots[0].lock().full.len())
}

#[test]
fn small_sizes_are_rounded_up_and_freed_into_the_class_they_came_from() {
    // rules L4, L5
    let magazines = checked(big(), OneCpu, usize::MAX);
    for count in 1..=32u64 {
        let rounded = count.next_power_of_two();
        let iova = magazines.alloc(&Request::new(count * PAGE - 1)).unwrap();
        assert_eq!(iova % (rounded * PAGE), 0);
        assert_eq!(magazines.inner().check_free(iova, rounded * PAGE), Ok(()));
        magazines.free(iova, count * PAGE - 1).unwrap();
        // It is returned for every size of its class.
        let again = magazines.alloc(&Request::new(rounded * PAGE)).unwrap();
        assert_eq!(again, iova, "{count} pages");
        magazines.free(again, rounded * PAGE).unwrap();
    }
    assert_eq!(magazines.stats().live_ranges, 6);
}

#[test]
fn alignments_within_the_size_are_met_from_the_cache_and_larger_ones_below() {
    // rule L4
    let magazines = checked(big(), OneCpu, usize::MAX);
    let loose = Request::new(3 * PAGE).align(Align::Bytes(PAGE));
    let iova = magazines.alloc(&loose).unwrap();
    assert_eq!(iova % (4 * PAGE), 0);
    magazines.free(iova, 3 * PAGE).unwrap();
    let strict = Request::new(3 * PAGE).align(Align::Bytes(1 << 20));
    let aligned = magazines.alloc(&strict).unwrap();
    assert_eq!((aligned % (1 << 20), magazines.stats().cache_hits), (0, 0));
    magazines.free(aligned, 3 * PAGE).unwrap();
    assert_eq!(magazines.alloc(&loose.boundary(4 * PAGE - 1)), Ok(aligned));
    for bad in [loose.align(Align::Bytes(3)), loose.boundary(0x5fff), loose.boundary(2 * PAGE - 1)]
    {
        let error = magazines.alloc(&bad).unwrap_err();
        assert!(error.reason.is_invalid());
        assert_eq!(error.request, bad);
    }
}

#[test]
fn ranges_above_32_granules_never_enter_or_leave_the_caches() {
    // rule L6
    let magazines = checked(big(), OneCpu, usize::MAX);
    for size in [32 * PAGE + 1, 33 * PAGE, 64 * PAGE, 1 << 30] {
        let iova = magazines.alloc(&Request::new(size)).unwrap();
        magazines.free(iova, size).unwrap();
        let stats = magazines.stats();
        assert_eq!((stats.live_ranges, stats.cached_ranges, stats.cache_hits), (0, 0, 0));
    }
    let iova = magazines.alloc(&Request::new(32 * PAGE)).unwrap();
    magazines.free(iova, 32 * PAGE).unwrap();
    assert_eq!(magazines.stats().cached_ranges, 1);
}

#[test]
fn a_freed_range_goes_to_loaded_then_previous_then_a_new_magazine_then_below() {
    // rule L7
    // Four magazines: two of the CPU, and two for full ones.
    let magazines = checked(big(), OneCpu, 4);
    let iovas = pages(&magazines, 4 * SLOTS + 10);
    let mut freed = iovas.iter();
    let mut free = |count: u64| {
        for &iova in freed.by_ref().take(count as usize) {
            magazines.free(iova, PAGE).unwrap();
        }
        fill(&magazines)
    };
    assert_eq!(free(1), (1, 0, 0));
    assert_eq!(free(SLOTS - 1), (127, 0, 0));
    // Full: swapped with the previous one, which has room.
    assert_eq!(free(1), (1, 127, 0));
    assert_eq!(free(SLOTS - 1), (127, 127, 0));
    // Both full: one to the depot, a new one in its place.
    assert_eq!(free(1), (1, 127, 1));
    assert_eq!(free(SLOTS), (1, 127, 2));
    assert_eq!(free(SLOTS - 1), (127, 127, 2));
    // No more magazines: below.
    let live = magazines.inner().stats().live_ranges;
    assert_eq!(free(10), (127, 127, 2));
    assert_eq!(magazines.inner().stats().live_ranges, live - 10);
    assert_eq!(magazines.stats().frees, 4 * SLOTS + 10);
    assert_eq!(magazines.stats().cached_ranges, 4 * SLOTS);
    // A drained magazine can be made again.
    magazines.drain();
    assert_eq!(magazines.inner().stats().live_ranges, 0);
    let again = pages(&magazines, 200);
    free_all(&magazines, &again);
    assert_eq!(fill(&magazines), (73, 127, 0));
}

#[test]
fn a_request_takes_from_loaded_then_previous_then_the_depot_then_below() {
    // rule L8
    let magazines = checked(big(), OneCpu, usize::MAX);
    let iovas = pages(&magazines, 3 * SLOTS + 1);
    free_all(&magazines, &iovas);
    assert_eq!(fill(&magazines), (1, 127, 2));
    // Newest first.
    assert_eq!(pages(&magazines, 1), iovas[3 * SLOTS as usize..]);
    assert_eq!(fill(&magazines), (0, 127, 2));
    pages(&magazines, 1);
    assert_eq!(fill(&magazines), (126, 0, 2));
    pages(&magazines, 126);
    assert_eq!(fill(&magazines), (0, 0, 2));
    pages(&magazines, 1);
    assert_eq!(fill(&magazines), (126, 0, 1));
    pages(&magazines, 126 + SLOTS);
    assert_eq!(fill(&magazines), (0, 0, 0));
    let hits = magazines.stats().cache_hits;
    assert_eq!(hits, 3 * SLOTS + 1);
    pages(&magazines, 1);
    assert_eq!(magazines.stats().cache_hits, hits);
}

#[test]
fn only_the_chosen_magazine_is_scanned_for_a_range_below_the_limit() {
    // rule L8
    let magazines = checked(tree(1 << 24), OneCpu, usize::MAX);
    // Low addresses end up in the previous magazine, high ones in the loaded one.
    let limit = 0xffff_ffff;
    let low: Vec<u64> =
        (0..SLOTS).map(|_| magazines.alloc(&Request::new(PAGE).limit(limit)).unwrap()).collect();
    let high = pages(&magazines, 3);
    assert!(high.iter().all(|&iova| iova > limit));
    free_all(&magazines, &low);
    free_all(&magazines, &high);
    assert_eq!(fill(&magazines), (3, 127, 0));
    let below = magazines.alloc(&Request::new(PAGE).limit(limit)).unwrap();
    assert!(below <= limit && !low.contains(&below));
    assert_eq!((fill(&magazines), magazines.stats().cache_hits), ((3, 127, 0), 0));
    // Within a magazine the newest that fits is taken, even if it is not on top.
    magazines.free(below, PAGE).unwrap();
    magazines.free(pages(&magazines, 1)[0], PAGE).unwrap();
    let again = magazines.alloc(&Request::new(PAGE).limit(below + PAGE - 1)).unwrap();
    assert_eq!(again, below);
    // The limit is inclusive: the last address of the range may equal it.
    magazines.free(again, PAGE).unwrap();
    let other = magazines.alloc(&Request::new(PAGE).limit(below + PAGE - 2)).unwrap();
    assert!(other < below);
}

#[test]
fn a_cpu_that_is_offline_takes_no_magazine_that_all_share() {
    // rule L9
    let magazines = checked(big(), OneCpu, usize::MAX);
    let iovas = pages(&magazines, 3 * SLOTS);
    free_all(&magazines, &iovas);
    let (_, _, shared) = fill(&magazines);
    assert!(shared > 0);
    magazines.offline(0);
    pages(&magazines, 1);
    assert_eq!(fill(&magazines), (0, 0, shared));
}

#[test]
fn cached_ranges_stay_allocated_below_until_their_cpu_goes_offline() {
    // rule L9
    let cpu = FixedCpu::new(2);
    let magazines = checked(tree(64), &cpu, usize::MAX);
    let iovas = pages(&magazines, 64);
    free_all(&magazines, &iovas[..40]);
    cpu.set(1);
    free_all(&magazines, &iovas[40..]);
    // The tree cannot hand them out a second time.
    assert_eq!(magazines.inner().stats().live_ranges, 64);
    assert!(magazines.inner().alloc(&Request::new(PAGE)).is_err());
    magazines.offline(0);
    assert_eq!(magazines.inner().stats().live_ranges, 24);
    assert_eq!(magazines.stats().cached_ranges, 24);
    assert!(magazines.inner().alloc(&Request::new(PAGE)).is_ok());
    // A thread still on that CPU caches nothing until the CPU is back online.
    cpu.set(0);
    let iova = pages(&magazines, 1)[0];
    magazines.free(iova, PAGE).unwrap();
    assert_eq!(magazines.stats().cached_ranges, 24);
    magazines.offline(0);
    magazines.online(0);
    magazines.online(0);
    magazines.free(pages(&magazines, 1)[0], PAGE).unwrap();
    assert_eq!(magazines.stats().cached_ranges, 25);
    assert_eq!(magazines.online.load(Ordering::Relaxed), 2);
    magazines.offline(7);
    // Dropping the caches leaves nothing allocated.
    let shared = Arc::new(tree(64));
    let magazines = checked(Arc::clone(&shared), &cpu, usize::MAX);
    let iovas = pages(&magazines, 10);
    free_all(&magazines, &iovas);
    drop(magazines);
    assert_eq!(shared.stats().live_ranges, 0);
}

#[test]
fn the_depot_is_trimmed_by_one_magazine_in_100_ms_down_to_the_cpus_online() {
    // rule L10
    let cpu = FixedCpu::new(3);
    let magazines = checked(big(), &cpu, usize::MAX);
    let iovas = pages(&magazines, 7 * SLOTS);
    free_all(&magazines, &iovas);
    assert_eq!(fill(&magazines), (127, 127, 5));
    let depot = || magazines.stats().depot_magazines;
    let ms = 1_000_000;
    magazines.tick(1000 * ms);
    assert_eq!(depot(), 4);
    for now in [1000, 1001, 1099] {
        magazines.tick(now * ms);
        assert_eq!(depot(), 4);
    }
    // However late, it trims one; and a clock that goes back trims none.
    magazines.tick(5000 * ms);
    assert_eq!(depot(), 3);
    magazines.tick(100 * ms);
    magazines.tick(9000 * ms);
    assert_eq!(depot(), 3);
    assert_eq!(magazines.inner().stats().live_ranges, 5 * SLOTS);
    magazines.offline(2);
    magazines.tick(9000 * ms);
    magazines.tick(9100 * ms);
    magazines.tick(9200 * ms);
    assert_eq!(depot(), 2);
}

/// Counts what arrives at the allocator below.
struct Counting<A> {
    inner: A,
    allocs: AtomicU64,
}

impl<A: Allocator> Allocator for Counting<A> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        self.allocs.fetch_add(1, Ordering::Relaxed);
        self.inner.alloc(request)
    }
    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.free(iova, size)
    }
    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        self.inner.reserve(first, last)
    }
    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.check_free(iova, size)
    }
    fn granule(&self) -> u64 {
        self.inner.granule()
    }
    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

#[test]
fn a_request_that_fails_drains_every_cache_and_tries_exactly_once_more() {
    // rule L11
    let cpu = FixedCpu::new(2);
    let below = Counting { inner: tree(512), allocs: AtomicU64::new(0) };
    let magazines = checked(below, &cpu, usize::MAX);
    let iovas = pages(&magazines, 512);
    free_all(&magazines, &iovas[..400]);
    cpu.set(1);
    free_all(&magazines, &iovas[400..]);
    assert!(magazines.stats().depot_magazines > 0);
    let tries = || magazines.inner().allocs.swap(0, Ordering::Relaxed);
    let large = Request::new(64 * PAGE);
    tries();
    // Not without the flag.
    assert!(magazines.alloc(&large.flush(false)).is_err());
    assert_eq!((tries(), magazines.stats().cached_ranges), (1, 512));
    magazines.alloc(&large).unwrap();
    assert_eq!((tries(), magazines.stats().drains), (2, 1));
    assert_eq!(magazines.stats().cached_ranges, 0);
    // It fails: it tries once more, not twice.
    assert!(magazines.alloc(&Request::new(512 * PAGE)).is_err());
    assert_eq!((tries(), magazines.stats().drains), (1, 1)); // too large for the aperture, ever
    assert!(magazines.alloc(&Request::new(128 * PAGE).limit(400 * PAGE)).is_ok());
    tries();
    assert!(magazines.alloc(&Request::new(256 * PAGE).limit(512 * PAGE - 1)).is_err());
    assert_eq!((tries(), magazines.stats().drains), (2, 2));
    assert_eq!(magazines.stats().failures, 3);
}

#[test]
fn a_reservation_over_a_cached_range_empties_the_caches_first() {
    // rule L15
    let magazines = checked(tree(16), OneCpu, usize::MAX);
    let iovas = pages(&magazines, 16);
    free_all(&magazines, &iovas[1..]);
    magazines.reserve(2 * PAGE, 5 * PAGE - 1).unwrap();
    assert_eq!(pages(&magazines, 12).len(), 12);
    assert!(magazines.alloc(&Request::new(PAGE)).is_err());
    assert!(magazines.reserve(iovas[0], iovas[0]).is_err());
}

#[test]
fn a_wrong_free_of_a_cached_size_is_an_error_when_checked() {
    let magazines = checked(big(), OneCpu, usize::MAX);
    let iova = magazines.alloc(&Request::new(4 * PAGE)).unwrap();
    for (at, size, reason) in [
        (iova, PAGE, FreeReason::WrongRange),
        (iova, 8 * PAGE, FreeReason::NotAllocated),
        (iova + PAGE, PAGE, FreeReason::WrongRange),
        (iova + PAGE, 4 * PAGE, FreeReason::NotAllocated),
        (0, PAGE, FreeReason::NotAllocated),
        (PAGE, PAGE, FreeReason::NotAllocated),
        (iova, 0, FreeReason::NotAllocated),
        (u64::MAX, u64::MAX, FreeReason::NotAllocated),
    ] {
        let error = magazines.free(at, size).unwrap_err();
        assert_eq!((error.iova, error.size), (at, size));
        if size != 8 * PAGE {
            assert_eq!(error.reason, reason, "{size:#x} at {at:#x}");
        }
    }
    magazines.free(iova, 4 * PAGE).unwrap();
    assert_eq!(magazines.free(iova, 3 * PAGE).unwrap_err().reason, FreeReason::AlreadyFree);
    assert_eq!(magazines.check_free(iova, 3 * PAGE).unwrap_err().reason, FreeReason::AlreadyFree);
    magazines.drain();
    assert_eq!(magazines.free(iova, 4 * PAGE).unwrap_err().reason, FreeReason::NotAllocated);
    let stats = magazines.stats();
    assert_eq!((stats.rejected_frees, stats.live_ranges), (10, 0));
}

#[test]
fn an_unchecked_double_free_is_counted_when_it_comes_back_and_harms_no_other_range() {
    let config = MagazineConfig { checked: false, ..MagazineConfig::default() };
    let magazines = Magazines::with_config(big(), OneCpu, config);
    let iovas = pages(&magazines, 2);
    magazines.free(iovas[0], PAGE).unwrap();
    magazines.free(iovas[0], PAGE).unwrap();
    magazines.drain();
    let stats = magazines.stats();
    assert_eq!((stats.rejected_frees, stats.live_ranges), (1, 1));
    assert_eq!(magazines.inner().check_free(iovas[1], PAGE), Ok(()));
}

#[test]
fn granules_too_large_for_a_class_are_not_cached() {
    let tree = RbTree::new(Aperture::new(0, u64::MAX, 1 << 61).unwrap());
    let magazines = checked(tree, OneCpu, usize::MAX);
    let size = 3u64 << 61;
    // Rounded up, it takes half the space; four granules, at the only possible place.
    let iova = magazines.alloc(&Request::new(size)).unwrap();
    assert_eq!(iova, 1 << 63);
    magazines.free(iova, size).unwrap();
    assert!(magazines.alloc(&Request::new(u64::MAX)).is_err());
}

/// Two threads that switch between CPUs share one space; a third drains and trims.
fn no_iova_twice<A: Allocator>(magazines: &Magazines<A, Hopping>) {
    // One flag a page: set while a thread holds it.
    let held: Vec<AtomicBool> = (0..=4096).map(|_| AtomicBool::new(false)).collect();
    let index = |iova: u64| (iova / PAGE) as usize;
    let give_back = |(iova, pages): (u64, u64)| {
        for page in 0..pages as usize {
            held[index(iova) + page].store(false, Ordering::Release);
        }
        magazines.free(iova, pages * PAGE).unwrap();
    };
    let seed = TestRunner::default().rng().next_u64();
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (held, give_back) = (&held, &give_back);
            scope.spawn(move || {
                let mut mine: Vec<(u64, u64)> = Vec::new();
                let mut random = seed.wrapping_add(thread);
                for step in 0..20_000u64 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                    let pages = 1 << (random >> 60 & 3);
                    if random >> 40 & 1 == 0 || mine.is_empty() {
                        let Ok(iova) = magazines.alloc(&Request::new(pages * PAGE)) else {
                            continue;
                        };
                        for page in 0..pages as usize {
                            let before = held[index(iova) + page].swap(true, Ordering::AcqRel);
                            assert!(!before, "{iova:#x} is handed out twice");
                        }
                        mine.push((iova, pages));
                    } else {
                        let which = (random >> 32) as usize % mine.len();
                        give_back(mine.swap_remove(which));
                    }
                    if step % 1000 == 0 {
                        magazines.tick(step * 1_000_000);
                        magazines.offline(thread as usize);
                        magazines.online(thread as usize);
                    }
                    if step % 3000 == 0 {
                        magazines.drain();
                    }
                }
                mine.into_iter().for_each(give_back);
            });
        }
    });
    magazines.drain();
    let stats = magazines.stats();
    assert_eq!((stats.cached_ranges, stats.rejected_frees), (0, 0));
    assert_eq!(stats.allocs, stats.frees);
}

/// Returns another CPU for every call, so that ranges are freed on other CPUs than they were
/// allocated on.
struct Hopping(AtomicUsize);

impl CpuId for Hopping {
    fn current(&self) -> usize {
        self.0.fetch_add(1, Ordering::Relaxed) % 2
    }
    fn count(&self) -> usize {
        2
    }
}

#[test]
fn two_threads_are_never_given_the_same_address() {
    // rule L9
    for checked in [true, false] {
        let config = MagazineConfig { checked, ..MagazineConfig::default() };
        let over_tree = Magazines::with_config(tree(4096), Hopping(AtomicUsize::new(0)), config);
        no_iova_twice(&over_tree);
        assert_eq!(over_tree.inner().stats().live_ranges, 0);
        let aperture = Aperture::new(PAGE, 4097 * PAGE - 1, PAGE).unwrap();
        let lazy = Bitmap::lazy(aperture, DEFAULT_WINDOW, std::boxed::Box::new(|| Ok(())));
        no_iova_twice(&Magazines::with_config(lazy, Hopping(AtomicUsize::new(0)), config));
    }
}

#[test]
fn every_cached_range_is_handed_out_once() {
    let magazines = checked(big(), OneCpu, usize::MAX);
    let iovas = pages(&magazines, 1000);
    free_all(&magazines, &iovas);
    let again: HashSet<u64> = pages(&magazines, 1000).into_iter().collect();
    assert_eq!(again, iovas.into_iter().collect());
    assert_eq!(magazines.stats().live_ranges, 1000);
}
