//! The software domain against rules and an oracle.

use alloc::{collections::BTreeSet, vec};
use proptest::prelude::*;

use super::*;
use crate::{GuestPhys, PageSizes, Prot, ReservedKind, ReservedRegion, shootdown::Lease};

type Soft = SoftDomain<GuestPhys>;

fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).unwrap()
}

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

fn domain(readers: usize) -> (Arc<Soft>, Arc<Shootdown>) {
    let shootdown = Shootdown::new(readers);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    (Soft::new(geometry, Limits::NONE, Arc::clone(&shootdown)), shootdown)
}

fn map(domain: &Soft, n: u64) {
    domain.map(Map::new(page(n), GuestPhys(0x10_0000 + (n << 12)), Prot::RW)).unwrap();
}

/// The raw beginning of a sync of what was gathered.
fn begin(domain: &Soft, gather: &mut Gather) -> SyncToken {
    drop(gather.take_pages());
    let token = domain.sync_begin(gather.work()).unwrap();
    gather.clear_ranges();
    token
}

fn is_over(domain: &Soft, token: SyncToken) -> bool {
    token == SyncToken::DONE
        || domain.sync_poll(token, Work::All, &mut |range, _| panic!("{range} has failed"))
}

#[test]
fn what_is_mapped_is_found_by_readers_and_by_the_owner() {
    let (domain, shootdown) = domain(1);
    let reader = shootdown.reader().unwrap();
    let run = range(0x4000, 0x6fff);
    domain.map(Map::new(run, GuestPhys(0x1000), Prot::READ)).unwrap();
    domain.iotlb_sync_map(run).unwrap();
    for offset in [0, 1, 0xfff, 0x1234, 0x2fff] {
        let found = domain.translate(&reader, Iova(0x4000 + offset)).unwrap();
        assert_eq!(found.target(Iova(0x4000 + offset)), 0x1000 + offset);
        assert_eq!(found.prot, Prot::READ);
        let there = domain.iova_to_phys(Iova(0x4000 + offset));
        assert_eq!(there, Some(GuestPhys(0x1000 + offset)));
    }
    assert_eq!(domain.translate_run(&reader, Iova(0x5000), run).unwrap().range, run);
    for outside in [0, 0x3fff, 0x7000, u64::MAX] {
        assert_eq!(domain.translate(&reader, Iova(outside)), None);
        assert_eq!(domain.iova_to_phys(Iova(outside)), None);
    }
    assert_eq!(domain.mapping(Iova(0x5000)).unwrap().range, run);
    assert_eq!((domain.mappings(), domain.table_bytes() > 0), (1, true));
    let mut met = vec![];
    domain.for_each(|mapping| met.push(mapping.range));
    assert_eq!(met, [run]);
}

#[test]
fn unaligned_and_unpermitted_mappings_are_refused_and_change_nothing() {
    // rule L31
    let (domain, _) = domain(0);
    let unaligned = |range| Err(Error::Unaligned { range, granule: 4096 });
    for wrong in [range(0x1000, 0x1ffe), range(0x1001, 0x2000), range(0x800, 0x1fff)] {
        assert_eq!(domain.map(Map::new(wrong, GuestPhys(0), Prot::RW)), unaligned(wrong));
        let unmapped = domain.unmap(wrong, &mut Gather::new());
        assert_eq!(unmapped.map(drop), unaligned(wrong));
    }
    assert_eq!(domain.map(Map::new(page(1), GuestPhys(0x800), Prot::RW)), unaligned(page(1)));
    for none in [Prot::empty(), Prot::MMIO] {
        let refused = domain.map(Map::new(page(1), GuestPhys(0), none));
        assert_eq!(refused, Err(Error::NoPermission(page(1))));
    }
    assert_eq!(domain.mappings(), 0);
}

#[test]
fn targets_that_would_wrap_are_refused_up_to_the_very_end() {
    let (domain, _) = domain(0);
    let two = range(0, 0x1fff);
    let top = GuestPhys(u64::MAX - 0xfff);
    assert_eq!(domain.map(Map::new(two, top, Prot::RW)), Err(Error::TargetOverflow(two)));
    domain.map(Map::new(page(0), top, Prot::RW)).unwrap();
    assert_eq!(domain.iova_to_phys(Iova(0xfff)), Some(GuestPhys(u64::MAX)));
    assert_eq!(domain.unmap(Range::ALL, &mut Gather::new()), Ok(4096));
    domain.map(Map::new(Range::ALL, GuestPhys(0), Prot::RW)).unwrap();
    assert_eq!(domain.iova_to_phys(Iova(u64::MAX)), Some(GuestPhys(u64::MAX)));
    assert_eq!(domain.unmap(Range::ALL, &mut Gather::new()), Ok(1 << 64));
}

#[test]
fn nothing_is_mapped_outside_the_aperture_or_in_a_reserved_region() {
    let aperture = range(0x1_0000, 0xffff_ffff);
    let reserved = range(0xfee0_0000, 0xfeef_ffff);
    let geometry = Geometry {
        reserved: Arc::from([ReservedRegion { range: reserved, kind: ReservedKind::Msi }]),
        ..Geometry::new(PageSizes::X86, aperture)
    };
    let domain = Soft::new(geometry.clone(), Limits::NONE, Shootdown::new(0));
    assert_eq!(domain.geometry(), geometry);
    assert_eq!(domain.capabilities(), Capabilities::FULL);
    let try_map = |range| domain.map(Map::new(range, GuestPhys(0), Prot::RW));
    for outside in [page(0xf), range(0xf000, 0x1_0fff), page(0x10_0000), Range::ALL] {
        let refused = Err(Error::OutsideAperture { range: outside, aperture });
        assert_eq!(try_map(outside), refused);
    }
    for overlapping in [page(0xf_ee00), page(0xf_eeff), range(0xfed0_0000, 0xfff0_0fff)] {
        let refused = Err(Error::Reserved { range: overlapping, reserved });
        assert_eq!(try_map(overlapping), refused);
    }
    assert_eq!(domain.mappings(), 0);
    for free in [page(0x10), page(0xf_edff), page(0xf_ef00), page(0xf_ffff)] {
        try_map(free).unwrap();
    }
    // An unmap may reach beyond it.
    assert_eq!(domain.unmap(Range::ALL, &mut Gather::new()), Ok(4 * 4096));
}

#[test]
fn mapping_over_a_mapping_fails_and_changes_nothing() {
    // rule L36
    let (domain, _) = domain(0);
    map(&domain, 5);
    let over = range(0x3000, 0x6fff);
    let refused = domain.map(Map::new(over, GuestPhys(0), Prot::READ));
    assert_eq!(refused, Err(Error::Exists { range: over, at: Iova(0x5000) }));
    assert_eq!(domain.mappings(), 1);
    assert_eq!(domain.iova_to_phys(Iova(0x3000)), None);
    assert_eq!(domain.iova_to_phys(Iova(0x5000)), Some(GuestPhys(0x10_5000)));
}

#[test]
fn a_map_that_fails_for_want_of_memory_leaves_nothing_behind() {
    // rule L33
    let shootdown = Shootdown::new(1);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let limits = Limits { table_bytes: 20_000, mappings: 1000 };
    let domain = Soft::new(geometry, limits, Arc::clone(&shootdown));
    let reader = shootdown.reader().unwrap();
    // An awkward range needs a node on each level at both of its ends.
    let wide = range(0x1000, u64::MAX - 0x1000);
    let refused = domain.map(Map::new(wide, GuestPhys(0), Prot::RW));
    assert!(matches!(refused, Err(Error::Full { what: "table bytes", .. })), "{refused:?}");
    assert_eq!(domain.mappings(), 0);
    for at in [0x1000, 0x20_0000, 1 << 40, 1 << 63, u64::MAX - 0x1000] {
        assert_eq!(domain.translate(&reader, Iova(at)), None);
    }
    map(&domain, 1);
}

#[test]
fn a_walk_fails_at_once_after_an_unmap_even_a_queued_one() {
    // rule L18
    let (domain, shootdown) = domain(1);
    let reader = shootdown.reader().unwrap();
    for mut gather in [Gather::new(), Gather::queued()] {
        map(&domain, 7);
        assert!(domain.translate(&reader, Iova(0x7000)).is_some());
        assert_eq!(domain.unmap(page(7), &mut gather), Ok(4096));
        assert_eq!(domain.translate(&reader, Iova(0x7000)), None);
        assert_eq!(domain.iova_to_phys(Iova(0x7000)), None);
    }
}

#[test]
fn a_strict_sync_invalidates_its_ranges_and_a_flush_everything() {
    // rule L26
    let (domain, shootdown) = domain(1);
    let mut reader = shootdown.reader().unwrap();
    let received = |reader: &mut Reader| {
        let mut all = vec![];
        reader.poll(|gone| all.push(gone));
        all
    };
    map(&domain, 1);
    map(&domain, 9);
    let mut gather = Gather::new();
    domain.unmap(page(1), &mut gather).unwrap();
    // Where nothing is: another may have removed it and not have synced.
    domain.unmap(page(2), &mut gather).unwrap();
    let token = begin(&domain, &mut gather);
    assert!(gather.is_empty());
    assert!(!is_over(&domain, token));
    let both = page(1).hull(page(2));
    assert_eq!(received(&mut reader), [both]);
    assert!(is_over(&domain, token));
    // Nothing gathered, nothing to wait for.
    assert_eq!(begin(&domain, &mut gather), SyncToken::DONE);
    domain.iotlb_sync(&mut gather).unwrap();
    // A queued gather has no ranges: a sync of it, like a flush, covers everything.
    let mut gather = Gather::queued();
    domain.unmap(page(9), &mut gather).unwrap();
    assert!(received(&mut reader).is_empty());
    let token = begin(&domain, &mut gather);
    assert_eq!(received(&mut reader), [Range::ALL]);
    assert!(is_over(&domain, token));
    reader.offline();
    domain.flush_iotlb_all().unwrap();
    let mut all = vec![];
    reader.online(|gone| all.push(gone));
    assert_eq!(all, [Range::ALL]);
}

#[test]
fn a_table_page_is_not_freed_before_its_invalidation_is_over() {
    // rules L21, L40
    let (domain, shootdown) = domain(1);
    let mut reader = shootdown.reader().unwrap();
    for queued in [false, true] {
        map(&domain, 3);
        let mapped = domain.table_bytes();
        assert!(mapped > 0);
        let mut gather = if queued { Gather::queued() } else { Gather::new() };
        domain.unmap(Range::ALL, &mut gather).unwrap();
        assert_eq!(domain.table_bytes(), mapped);
        let token = begin(&domain, &mut gather);
        assert!(!is_over(&domain, token));
        assert_eq!(domain.table_bytes(), mapped);
        reader.poll(|_| ());
        assert_eq!(domain.table_bytes(), mapped);
        assert!(is_over(&domain, token));
        assert_eq!(domain.table_bytes(), 0);
    }
}

#[test]
fn whatever_becomes_of_a_gather_its_table_pages_wait_for_their_own_readers() {
    // rules L21, L40
    let (ours, shootdown) = domain(1);
    let (other, _) = domain(0);
    let mut reader = shootdown.reader().unwrap();
    let retire = || {
        map(&ours, 3);
        let mut gather = Gather::new();
        ours.unmap(Range::ALL, &mut gather).unwrap();
        gather
    };
    drop(retire());
    assert!(ours.table_bytes() > 0);
    drop(retire().take_pages());
    // The sync of a domain with other readers (here, none) is over at once.
    let mut misplaced = retire();
    map(&other, 3);
    other.unmap(Range::ALL, &mut misplaced).unwrap();
    other.iotlb_sync(&mut misplaced).unwrap();
    assert!(misplaced.is_empty());
    assert_eq!(other.table_bytes(), 0);
    let waiting = ours.table_bytes();
    assert!(waiting > 0);
    let token = begin(&ours, &mut retire());
    assert!(ours.table_bytes() > waiting);
    reader.poll(|_| ());
    assert!(is_over(&ours, token));
    assert_eq!(ours.table_bytes(), 0);
}

#[test]
fn table_pages_that_only_wait_do_not_fill_the_domain_for_long() {
    let shootdown = Shootdown::new(1);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let limits = Limits { table_bytes: 20_000, mappings: 1000 };
    let domain = Soft::new(geometry, limits, Arc::clone(&shootdown));
    let mut reader = shootdown.reader().unwrap();
    let mut turns = 0;
    // Never synced, so that pages pile up until the limit is reached.
    while domain.map(Map::new(page(1), GuestPhys(0), Prot::RW)).is_ok() {
        domain.unmap(Range::ALL, &mut Gather::new()).unwrap();
        turns += 1;
        assert!(turns < 1000, "the limit is never met");
    }
    reader.poll(|_| ());
    domain.map(Map::new(page(1), GuestPhys(0), Prot::RW)).unwrap();
    reader.offline();
    for _ in 0..turns * 3 {
        domain.unmap(Range::ALL, &mut Gather::new()).unwrap();
        domain.map(Map::new(page(1), GuestPhys(0), Prot::RW)).unwrap();
    }
}

#[test]
fn more_batches_of_table_pages_than_there_are_places_wait_together() {
    let (domain, shootdown) = domain(1);
    let mut reader = shootdown.reader().unwrap();
    let tokens: Vec<_> = (0..3 * LIMBO)
        .map(|_| {
            map(&domain, 1);
            let mut gather = Gather::new();
            domain.unmap(Range::ALL, &mut gather).unwrap();
            begin(&domain, &mut gather)
        })
        .collect();
    assert!(domain.table_bytes() > 0);
    reader.poll(|_| ());
    assert!(tokens.iter().all(|&token| is_over(&domain, token)));
    assert_eq!(domain.table_bytes(), 0);
}

#[test]
#[should_panic(expected = "the reader belongs to another shootdown")]
fn a_reader_of_another_shootdown_is_refused() {
    let foreign = Shootdown::new(1).reader().unwrap();
    let _ = domain(1).0.translate(&foreign, Iova(0));
}

#[test]
#[should_panic(expected = "the reader is offline")]
fn so_is_one_that_is_offline() {
    let (domain, shootdown) = domain(1);
    let mut reader = shootdown.reader().unwrap();
    reader.offline();
    let _ = domain.translate_run(&reader, Iova(0), Range::ALL);
}

#[test]
fn when_a_sync_returns_no_reader_reaches_what_was_unmapped() {
    use core::sync::atomic::{AtomicBool, Ordering};
    // Each mapping has a target page of its own, which is marked once its sync has returned.
    const PAGES: u64 = 32;
    const TURNS: usize = 500;
    let (domain, shootdown) = domain(2);
    let returned: Arc<Vec<_>> = Arc::new((0..TURNS).map(|_| AtomicBool::new(false)).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2u64)
        .map(|seed| {
            let (domain, returned, stop) = (domain.clone(), returned.clone(), stop.clone());
            let mut reader = shootdown.reader().unwrap();
            std::thread::spawn(move || {
                let mut cache: Vec<Option<Translation>> = vec![None; PAGES as usize];
                let mut turn = seed;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..8 {
                        turn = turn.wrapping_mul(25_214_903_917).wrapping_add(11);
                        let n = (turn >> 24) % PAGES;
                        let iova = Iova(n << 12);
                        let cached = &mut cache[n as usize];
                        *cached = cached.or_else(|| domain.translate(&reader, iova));
                        if let Some(found) = cached {
                            let version = (found.target(iova) >> 12) as usize;
                            let stale = returned[version].load(Ordering::Relaxed);
                            assert!(!stale, "{version} was reached after its sync");
                        }
                    }
                    // Otherwise, with more threads than CPUs, each sync takes a time slice or two.
                    std::thread::yield_now();
                    reader.poll(|gone| {
                        let hit = |t: &Translation| gone.overlaps(t.range);
                        cache
                            .iter_mut()
                            .filter(|t| t.as_ref().is_some_and(hit))
                            .for_each(|t| *t = None);
                    });
                }
            })
        })
        .collect();
    let mut mapped: Vec<Option<usize>> = vec![None; PAGES as usize];
    for turn in 0..TURNS {
        let n = turn * 13 % PAGES as usize;
        if let Some(old) = mapped[n].take() {
            let mut gather = Gather::new();
            domain.unmap(page(n as u64), &mut gather).unwrap();
            if turn % 16 == 0 {
                domain.unmap(Range::ALL, &mut gather).unwrap();
            }
            domain.iotlb_sync(&mut gather).unwrap();
            returned[old].store(true, Ordering::Relaxed);
            if turn % 16 == 0 {
                for gone in mapped.iter_mut().filter_map(Option::take) {
                    returned[gone].store(true, Ordering::Relaxed);
                }
            }
        }
        let target = GuestPhys((turn as u64) << 12);
        domain.map(Map::new(page(n as u64), target, Prot::RW)).unwrap();
        mapped[n] = Some(turn);
    }
    stop.store(true, Ordering::Relaxed);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

/// What can happen between an owner and two readers, in any order.
#[derive(Clone, Debug)]
enum Step {
    Map(u64),
    Unmap(u64, u64),
    Begin,
    Flush,
    PollSyncs,
    Use(usize, u64),
    Poll(usize),
    Sleep(usize),
    Wake(usize),
    Lease(usize, u64),
    GiveBack(usize),
}

const PAGES: u64 = 8;

fn step() -> impl Strategy<Value = Step> {
    let (n, r) = (0..PAGES, 0..2usize);
    prop_oneof![
        4 => n.clone().prop_map(Step::Map),
        2 => (n.clone(), 0..3u64).prop_map(|(n, more)| Step::Unmap(n, (n + more).min(PAGES - 1))),
        2 => Just(Step::Begin),
        1 => Just(Step::Flush),
        3 => Just(Step::PollSyncs),
        8 => (r.clone(), n.clone()).prop_map(|(r, n)| Step::Use(r, n)),
        4 => r.clone().prop_map(Step::Poll),
        1 => r.clone().prop_map(Step::Sleep),
        1 => r.clone().prop_map(Step::Wake),
        2 => (r, n).prop_map(|(r, n)| Step::Lease(r, n)),
        2 => (0..16usize).prop_map(Step::GiveBack),
    ]
}

struct Device {
    reader: Reader,
    cache: Vec<Option<Translation>>,
}

fn forget(cache: &mut [Option<Translation>], gone: Range) {
    for entry in cache.iter_mut() {
        if entry.is_some_and(|found| gone.overlaps(found.range)) {
            *entry = None;
        }
    }
}

proptest! {
    #[test]
    fn in_whatever_order_nothing_reaches_what_a_sync_gave_back(
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        let (domain, shootdown) = domain(2);
        let mut devices: Vec<_> = (0..2)
            .map(|_| Device {
                reader: shootdown.reader().unwrap(),
                cache: vec![None; PAGES as usize],
            })
            .collect();
        // Every mapping has a target of its own, which identifies it.
        let mut next = 1u64;
        let mut mapped: Vec<Option<u64>> = vec![None; PAGES as usize];
        let mut gather = Gather::new();
        let mut gathered: Vec<u64> = vec![];
        let mut syncs: Vec<(SyncToken, Vec<u64>)> = vec![];
        let mut returned = BTreeSet::new();
        let mut leases: Vec<(Lease, u64)> = vec![];
        for step in steps {
            match step {
                Step::Map(n) => {
                    let result = domain.map(Map::new(page(n), GuestPhys(next << 12), Prot::RW));
                    prop_assert_eq!(result.is_ok(), mapped[n as usize].is_none());
                    if result.is_ok() {
                        mapped[n as usize] = Some(next);
                        next += 1;
                    }
                }
                Step::Unmap(first, last) => {
                    let all = page(first).hull(page(last));
                    domain.unmap(all, &mut gather).unwrap();
                    let gone = &mut mapped[first as usize..=last as usize];
                    gathered.extend(gone.iter_mut().filter_map(Option::take));
                }
                Step::Begin => {
                    let token = begin(&domain, &mut gather);
                    syncs.push((token, core::mem::take(&mut gathered)));
                }
                Step::Flush => {
                    let token = SyncToken::new(domain.begin(&[Range::ALL]));
                    // What is gathered is covered, and may stay in the gather.
                    syncs.push((token, gathered.clone()));
                }
                Step::PollSyncs => syncs.retain(|(token, gone)| {
                    let over = is_over(&domain, *token);
                    if over {
                        returned.extend(gone.iter().copied());
                    }
                    !over
                }),
                Step::Use(r, n) => {
                    let Device { reader, cache } = &mut devices[r];
                    if reader.is_online() {
                        let iova = page(n).first();
                        let entry = &mut cache[n as usize];
                        *entry = entry.or_else(|| domain.translate(reader, iova));
                        if let Some(found) = entry {
                            let target = found.target(iova) >> 12;
                            prop_assert!(!returned.contains(&target), "{} is stale", target);
                        }
                    }
                }
                Step::Poll(r) => {
                    let Device { reader, cache } = &mut devices[r];
                    reader.poll(|gone| forget(cache, gone));
                }
                Step::Sleep(r) => devices[r].reader.offline(),
                Step::Wake(r) => {
                    let Device { reader, cache } = &mut devices[r];
                    reader.online(|gone| forget(cache, gone));
                }
                Step::Lease(r, n) => {
                    let Device { reader, cache } = &devices[r];
                    if let Some(found) = cache[n as usize].filter(|_| reader.is_online()) {
                        let target = found.target(page(n).first()) >> 12;
                        leases.push((reader.lease(page(n)), target));
                    }
                }
                Step::GiveBack(at) => {
                    if at < leases.len() {
                        drop(leases.swap_remove(at));
                    }
                }
            }
            for (_, target) in &leases {
                prop_assert!(!returned.contains(target), "{} is leased", target);
            }
        }
        // All syncs end once the readers have been quiet and the leases are gone.
        leases.clear();
        devices.iter_mut().for_each(|device| device.reader.poll(|_| ()));
        for (token, _) in syncs {
            prop_assert!(is_over(&domain, token));
        }
        domain.unmap(Range::ALL, &mut gather).unwrap();
        drop(devices);
        domain.flush_iotlb_all().unwrap();
        domain.iotlb_sync(&mut gather).unwrap();
        prop_assert_eq!(domain.table.retired_bytes(), 0);
    }
}
