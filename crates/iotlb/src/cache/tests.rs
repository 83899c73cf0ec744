use proptest::prelude::*;

use super::*;

/// Memory that begins there, as if it were; nothing is read.
fn host(at: u64) -> NonNull<u8> {
    NonNull::new(std::ptr::without_provenance_mut(at as usize)).unwrap()
}

fn entry(first: u64, extent: u64) -> Entry {
    Entry::new(first, extent, host(1 << 40), Prot::RW)
}

fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).unwrap()
}

#[test]
fn the_top_of_the_address_space_is_cached_and_dropped_like_any_other() {
    for extent in [0xfff, 0x1fff, 5] {
        let cache = Cache::new();
        cache.put(u64::MAX, entry(u64::MAX - extent, extent));
        assert!(cache.get(u64::MAX, Prot::READ).is_some());
        cache.invalidate(range(u64::MAX, u64::MAX));
        assert!(cache.get(u64::MAX, Prot::READ).is_none());
        assert_eq!(cache.get(u64::MAX - 1, Prot::READ).is_some(), extent != 0xfff);
    }
    let cache = Cache::new();
    cache.put(5, entry(0, u64::MAX));
    assert_eq!(cache.get(u64::MAX, Prot::RW).unwrap().extent, u64::MAX);
    cache.invalidate(range(0, 0));
    assert_eq!(cache.get(u64::MAX, Prot::RW).unwrap().first, 1);
    cache.invalidate(Range::ALL);
    assert!(cache.get(u64::MAX, Prot::RW).is_none());
}

#[test]
fn an_empty_cache_covers_nothing_not_even_address_zero() {
    for wanted in [Prot::READ, Prot::WRITE, Prot::RW] {
        assert!(Cache::new().get(0, wanted).is_none());
    }
}

#[test]
fn memory_in_one_piece_is_not_looked_up_again_in_whatever_order() {
    const PAGES: u64 = 1 << 18;
    for step in [1, 77_777, PAGES - 1] {
        let mut cache = Cache::new();
        let mut last = 0;
        // As walks find them: each block's pages as a run.
        for n in 0..3 * PAGES {
            let addr = (n * step % PAGES) << 12;
            if cache.get(addr, Prot::RW).is_none() {
                let block = addr & !0x1f_ffff;
                let at = host((1 << 40) + block);
                cache.put(addr, Entry::new(block, (2 << 20) - 1, at, Prot::RW));
                cache.grow();
                last = n;
            }
        }
        assert!(last < 2 * PAGES, "step {step}");
        let found = cache.get(0, Prot::RW).unwrap();
        assert!(found.extent == (1 << 30) - 1 || step != 1);
    }
}

#[test]
fn what_is_left_of_a_run_stays_and_joins_again() {
    let cache = Cache::new();
    cache.put(0, entry(0, (1 << 30) - 1));
    cache.invalidate(range(0x1000_0000, 0x1000_0fff));
    assert!(cache.get(0x1000_0000, Prot::READ).is_none());
    let above = cache.get(0x1000_1000, Prot::READ).unwrap();
    assert_eq!((above.first, above.host), (0x1000_1000, host((1 << 40) + 0x1000_1000)));
    // The block is not searched for runs for a while.
    let page = Entry::new(0x1000_0000, 0xfff, host((1 << 40) + 0x1000_0000), Prot::RW);
    cache.put(0x1000_0000, page);
    assert_eq!(cache.get(0x3000_0000, Prot::READ).unwrap().first, 0x1000_0000);
}

#[test]
fn a_block_whose_run_was_invalidated_is_not_searched_for_a_while() {
    let cache = Cache::new();
    // The largest run is elsewhere.
    cache.put(1 << 40, Entry::new(1 << 40, 1 << 30, host(1 << 41), Prot::RW));
    cache.put(0, entry(0, 0xffff));
    assert!(cache.get(0xffff, Prot::RW).is_some());
    cache.invalidate(range(0, 0xffff));
    let searched = (0..100).filter(|_| cache.search(0) == range(0, 0x1f_ffff)).count();
    assert_eq!(searched, 100 - HOLD as usize);
}

#[test]
fn runs_beside_each_other_in_a_block_are_found_however_they_come_and_go() {
    // As a driver maps and unmaps bursts of neighbouring buffers: 128 KiB each, some at a time.
    const BURST: u64 = 128 << 10;
    let cache = Cache::new();
    let mut walks = 0;
    for n in 0..1000u64 {
        // No two lead on from each other.
        let first = (n % 8) * BURST;
        let new =
            Entry::new(first, BURST - 1, host(0x10_0000 + (n * 7 % 16) * 2 * BURST), Prot::READ);
        for page in (first..first + BURST).step_by(PAGE as usize) {
            if cache.get(page, Prot::READ).is_none() {
                walks += 1;
                let within = cache.search(page);
                assert!(within.first().0 <= first && first + BURST - 1 <= within.last().0);
                cache.put(page, new);
            }
            let found = cache.get(page, Prot::READ).unwrap();
            assert_eq!(offset(found.host, page - found.first), offset(new.host, page - first));
        }
        if n >= 3 {
            let old = (n - 3) % 8 * BURST;
            cache.invalidate(range(old, old + BURST - 1));
            assert!(
                cache.get(old, Prot::READ).is_none()
                    && cache.get(old + BURST - 1, Prot::READ).is_none()
            );
        }
    }
    assert_eq!(walks, 1000, "one each");
}

#[test]
fn a_cache_that_is_too_small_grows_and_keeps_what_it_has() {
    let mut cache = Cache::new();
    // Each leads to the page before the last one: no two join.
    let put = |cache: &Cache, n: u64| {
        cache.put(n << 12, Entry::new(n << 12, 0xfff, host((1 << 40) - (n << 12)), Prot::READ));
    };
    for _ in 0..8 {
        (0..10_000).for_each(|n| put(&cache, n));
        cache.grow();
    }
    assert!(cache.pages.len() > 10_000 && cache.pages.len() <= PAGES[1]);
    for n in 0..10_000 {
        assert_eq!(cache.get(n << 12, Prot::READ).unwrap().host, host((1 << 40) - (n << 12)));
        assert!(cache.get(n << 12, Prot::WRITE).is_none());
    }
    // More often than there are distinct generations.
    for _ in 0..600 {
        put(&cache, 7);
        assert!(cache.get(7 << 12, Prot::READ).is_some());
        cache.clear();
        assert!((0..10_000).all(|n| cache.get(n << 12, Prot::READ).is_none()));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put { first: u64, extent: u64, at: u64, target: usize },
    Invalidate { first: u64, extent: u64 },
    Grow,
    Clear,
}

/// Few addresses, so that they meet: around borders of blocks and at both ends.
fn address() -> impl Strategy<Value = u64> {
    let spot = prop_oneof![Just(0u64), Just((4 << 20) - 0x8000), Just(u64::MAX - 0xffff)];
    let within = prop_oneof![(0..16u64).prop_map(|page| page << 12), 0..0x1_0000u64];
    (spot, within).prop_map(|(spot, within)| spot + within)
}

fn extent() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0xfffu64), Just(0x3fff), 0..0x9000u64, Just(u64::MAX)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (address(), extent(), any::<u64>(), 0..2usize)
            .prop_map(|(first, extent, at, target)| Op::Put { first, extent, at, target }),
        6 => (address(), extent()).prop_map(|(first, extent)| Op::Invalidate { first, extent }),
        1 => Just(Op::Grow),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn what_it_gives_was_put_there_and_not_invalidated_since(
        ops in proptest::collection::vec(op(), 1..100),
        probes in proptest::collection::vec(address(), 20),
    ) {
        let mut cache = Cache::new();
        // What was put, by the piece of memory it leads to; of each address the last that happened
        // to it counts.
        let mut done: Vec<(Range, Option<usize>)> = Vec::new();
        for op in ops {
            match op {
                Op::Put { first, extent, at, target } => {
                    let extent = extent.min(u64::MAX - first);
                    let gone = range(first, first + extent);
                    // What leads elsewhere is invalidated before.
                    cache.invalidate(gone);
                    let base = host((1 + target as u64) << 61).as_ptr().wrapping_add(first as usize);
                    let prot = [Prot::RW, Prot::READ][target];
                    let entry = Entry::new(first, extent, NonNull::new(base).unwrap(), prot);
                    let addr = first + if extent == u64::MAX { at } else { at % (extent + 1) };
                    cache.put(addr, entry);
                    done.push((gone, Some(target)));
                    let held = cache.get(addr, prot);
                    prop_assert!(held.is_none_or(|held| held.covers(addr, prot)));
                }
                Op::Invalidate { first, extent } => {
                    let gone = range(first, first.saturating_add(extent));
                    cache.invalidate(gone);
                    done.push((gone, None));
                }
                Op::Grow => {
                    if cache.pages.len() < PAGES[1] {
                        cache.conflicts.iter().for_each(|count| count.set(usize::MAX));
                        cache.grow();
                    }
                }
                Op::Clear => {
                    cache.clear();
                    done.push((Range::ALL, None));
                }
            }
            for &addr in &probes {
                for wanted in [Prot::READ, Prot::WRITE] {
                    let Some(held) = cache.get(addr, wanted) else { continue };
                    prop_assert!(held.covers(addr, wanted));
                    // The entry is right at both its ends and here.
                    for byte in [held.first, addr, held.last()] {
                        let last = done.iter().rev().find(|(range, _)| range.contains(Iova(byte)));
                        let target = last.and_then(|(_, target)| *target);
                        prop_assert!(target.is_some(), "{byte:#x} of {:#x}", held.first);
                        let base = host((1 + target.unwrap() as u64) << 61).as_ptr() as u64;
                        let leads = (held.host.as_ptr() as u64).wrapping_add(byte - held.first);
                        prop_assert_eq!(leads, base.wrapping_add(byte));
                        prop_assert!(wanted == Prot::READ || target == Some(0));
                    }
                }
            }
        }
    }
}
