//! Views by themselves.

use std::{
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, FaultSink, Gather, Geometry, GuestPhys, Map, PageSizes, SoftDomain, SyncToken, Work,
    shootdown::Shootdown, table::Limits,
};
use ringfence_mem::Region;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

pub(super) const PAGE: u64 = 4096;
/// Guest-physical memory: two regions that touch, a gap, and one that ends with the last address.
pub(crate) const REGIONS: [(u64, u64); 3] = [(16, 8), (24, 8), ((u64::MAX >> 12) - 7, 8)];

fn file(pages: u64) -> OwnedFd {
    let file = memfd_create("view", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, pages * PAGE).unwrap();
    file
}

pub(crate) fn memory() -> Arc<Memory> {
    let mut user_addr = 0x5000_0000;
    let regions = REGIONS.map(|(first, pages)| {
        user_addr += 1 << 30;
        let (gpa, size) = (first * PAGE, pages * PAGE);
        (Region { gpa, size, user_addr, mmap_offset: 0 }, file(pages))
    });
    Memory::map(regions.into()).unwrap()
}

pub(super) type Soft = Arc<SoftDomain<GuestPhys>>;

pub(super) fn domain(shootdown: &Arc<Shootdown>) -> Soft {
    let geometry = Geometry::new(PageSizes::from_granule(PAGE).unwrap(), Range::ALL);
    let limits = Limits { table_bytes: 16 << 20, mappings: 1 << 16 };
    SoftDomain::new(geometry, limits, Arc::clone(shootdown))
}

pub(super) fn pages(iova: u64, count: u64) -> Range {
    Range::from_len(Iova(iova), count * PAGE).unwrap()
}

fn map(domain: &Soft, iova: u64, gpa: u64, count: u64, prot: Prot) {
    domain.map(Map::new(pages(iova, count), GuestPhys(gpa), prot)).unwrap();
}

/// Unmaps, and begins to invalidate.
pub(super) fn unmap(domain: &Soft, iova: u64, count: u64) -> SyncToken {
    let mut gather = Gather::new();
    domain.unmap(pages(iova, count), &mut gather).unwrap();
    drop(gather.take_pages());
    domain.sync_begin(gather.work()).unwrap()
}

/// Whether an invalidation is over.
pub(super) fn is_over(domain: &Soft, token: SyncToken) -> bool {
    domain.sync_poll(token, Work::All, &mut |range, _| panic!("{range} has failed"))
}

#[derive(Default)]
pub(crate) struct Faults(pub(crate) Mutex<Vec<Fault>>);

impl FaultSink for Faults {
    fn report(&self, fault: Fault) {
        self.0.lock().push(fault);
    }
}

pub(super) struct Bench {
    pub(super) shootdown: Arc<Shootdown>,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) domain: Soft,
    pub(super) memory: Arc<Memory>,
    pub(super) faults: Arc<Faults>,
    pub(super) view: View,
}

/// A view of an endpoint that is bound to a domain.
pub(super) fn bench() -> Bench {
    let shootdown = Shootdown::new(2);
    let domain = domain(&shootdown);
    let binding = Binding::Domain(Arc::clone(&domain));
    let endpoint = Endpoint::new(3, Arc::clone(&shootdown), binding);
    let faults = Arc::new(Faults::default());
    endpoint.report_to(Arc::clone(&faults) as _);
    let memory = memory();
    let view = View::new(Arc::clone(&endpoint), Arc::clone(&memory)).unwrap();
    Bench { shootdown, endpoint, domain, memory, faults, view }
}

/// Where the first byte of a guest-physical address is in this process.
pub(crate) fn host(memory: &Memory, gpa: u64) -> usize {
    memory.find_gpa(gpa).unwrap().slice.as_ptr() as usize
}

#[test]
fn a_window_and_what_was_cached_go_before_the_invalidation_is_over() {
    let Bench { domain, mut view, memory, .. } = bench();
    map(&domain, 0x10_0000, 16 * PAGE, 2, Prot::RW);
    map(&domain, 0x20_1000, 18 * PAGE, 1, Prot::RW);
    let window = view.window(0x10_0000, 2 * PAGE, Access::ReadWrite).unwrap();
    let part = window.part(100, 100).unwrap();
    let other = view.window(0x20_1000, 10, Access::Read).unwrap();
    assert_eq!(window.slice().as_ptr() as usize, host(&memory, 16 * PAGE));
    let token = unmap(&domain, 0x10_0000, 2);
    // Until the quiet point the device may go on, and the sync does not complete.
    assert!(!is_over(&domain, token));
    assert!(window.is_valid());
    assert!(view.read(0x10_0000, &mut [0]).is_ok(), "cached");
    view.quiet();
    assert!(is_over(&domain, token));
    assert!(!window.is_valid() && !part.is_valid() && other.is_valid());
    let refused = AccessError::Unmapped { addr: 0x10_0000, access: Access::Read };
    assert_eq!(view.read(0x10_0000, &mut [0]), Err(refused));
    assert!(view.read(0x20_1000, &mut [0]).is_ok());
}

#[test]
fn a_lease_holds_up_its_range_and_no_other() {
    let Bench { domain, mut view, .. } = bench();
    map(&domain, 0, 16 * PAGE, 4, Prot::RW);
    map(&domain, 0x10_0000, 16 * PAGE, 4, Prot::RW);
    view.read(PAGE, &mut [0; 8]).unwrap();
    let lease = view.lease(PAGE, 8).unwrap();
    assert!(view.lease(u64::MAX, 2).is_none() && view.lease(5, 0).is_none());
    let other = unmap(&domain, 0x10_0000, 4);
    let held = unmap(&domain, 0, 4);
    view.quiet();
    assert!(is_over(&domain, other));
    assert!(!is_over(&domain, held));
    view.quiet();
    assert!(!is_over(&domain, held));
    drop(lease);
    assert!(is_over(&domain, held));
}

#[test]
fn a_new_binding_is_in_force_when_its_token_is_over() {
    let Bench { shootdown, endpoint, domain: first, mut view, faults, memory } = bench();
    map(&first, 0x1000, 16 * PAGE, 1, Prot::RW);
    let second = domain(&shootdown);
    map(&second, 0x1000, 17 * PAGE, 1, Prot::READ);
    let window = view.window(0x1000, 16, Access::ReadWrite).unwrap();

    let token = endpoint.bind(Binding::Domain(Arc::clone(&second)));
    assert!(!shootdown.is_over(token));
    view.quiet();
    assert!(shootdown.is_over(token) && !window.is_valid());
    let window = view.window(0x1000, 16, Access::Read).unwrap();
    assert_eq!(window.slice().as_ptr() as usize, host(&memory, 17 * PAGE));
    let refused = AccessError::NotPermitted { addr: 0x1000, access: Access::Write };
    assert_eq!(view.write(0x1000, &[1]), Err(refused));

    let token = endpoint.bind(Binding::Blocked);
    view.quiet();
    assert!(shootdown.is_over(token) && !window.is_valid());
    assert!(view.read(0x1000, &mut [0]).is_err());

    endpoint.bind(Binding::Bypass);
    view.quiet();
    view.write(16 * PAGE, &[1]).unwrap();
    let outside = AccessError::OutsideMemory { addr: 0x1000, access: Access::Read };
    assert_eq!(view.read(0x1000, &mut [0]), Err(outside));

    let reasons: Vec<_> = faults.0.lock().iter().map(|fault| fault.reason).collect();
    use FaultReason::{Mapping, NoDomain, Unknown};
    assert_eq!(reasons, [Mapping, NoDomain, Unknown]);
    assert!(faults.0.lock().iter().all(|fault| fault.endpoint == 3));
    view.quiet();
    assert_eq!(view.counters().faults.load(Ordering::Relaxed), 3);
    // No reference to a domain is left that is no longer used.
    assert_eq!(Arc::strong_count(&second), 1);
    assert_eq!(Arc::strong_count(&first), 1);
}

#[test]
fn an_invalidation_waits_for_views_of_its_domain_and_for_no_others() {
    let Bench { shootdown, endpoint, domain: here, memory, mut view, .. } = bench();
    let there = domain(&shootdown);
    let other = Endpoint::new(4, Arc::clone(&shootdown), Binding::Domain(Arc::clone(&there)));
    let mut elsewhere = View::new(other, memory).unwrap();
    let read = |view: &View| view.read(0x1000, &mut [0]);
    for (domain, gpa) in [(&here, 16 * PAGE), (&there, 17 * PAGE)] {
        map(domain, 0x1000, gpa, 1, Prot::RW);
    }
    assert_eq!([read(&view), read(&elsewhere)], [Ok(()); 2]);
    let gone = unmap(&there, 0x1000, 1);
    assert!(!shootdown.is_over(gone.as_u64()));
    elsewhere.quiet();
    assert!(shootdown.is_over(gone.as_u64()), "no other view looks there");
    assert!(read(&view).is_ok() && read(&elsewhere).is_err());

    // Bound to the other domain: until it has seen that, it is where it was.
    map(&there, 0x1000, 17 * PAGE, 1, Prot::RW);
    endpoint.bind(Binding::Domain(Arc::clone(&there)));
    elsewhere.quiet();
    let gone = unmap(&here, 0x1000, 1);
    assert!(!shootdown.is_over(gone.as_u64()));
    view.quiet();
    assert!(shootdown.is_over(gone.as_u64()) && read(&view).is_ok());
    let gone = unmap(&there, 0x1000, 1);
    elsewhere.quiet();
    assert!(!shootdown.is_over(gone.as_u64()), "now it is there");
    view.quiet();
    assert!(shootdown.is_over(gone.as_u64()) && read(&view).is_err());

    // An endpoint that is bound to no domain looks nothing up.
    endpoint.bind(Binding::Bypass);
    [&mut view, &mut elsewhere].into_iter().for_each(View::quiet);
    map(&there, 0x1000, 17 * PAGE, 1, Prot::RW);
    let gone = unmap(&there, 0x1000, 1);
    elsewhere.quiet();
    assert!(shootdown.is_over(gone.as_u64()));
}

#[test]
fn a_view_that_is_offline_is_not_waited_for_and_has_forgotten_when_it_is_back() {
    let Bench { shootdown, endpoint, domain, mut view, .. } = bench();
    map(&domain, 0x1000, 16 * PAGE, 2, Prot::RW);
    view.write(0x1000, &[1]).unwrap();
    let window = view.window(0x2000, 16, Access::Read).unwrap();
    view.offline();
    let token = unmap(&domain, 0x1000, 2);
    assert!(is_over(&domain, token));
    view.online();
    assert!(!window.is_valid());
    assert!(view.write(0x1000, &[1]).is_err());

    map(&domain, 0x1000, 16 * PAGE, 1, Prot::RW);
    view.write(0x1000, &[1]).unwrap();
    view.offline();
    assert!(shootdown.is_over(endpoint.bind(Binding::Blocked)));
    view.online();
    assert!(view.write(0x1000, &[1]).is_err());
}

#[test]
fn a_view_that_is_offline_does_not_keep_a_domain_that_goes() {
    let Bench { endpoint, domain, mut view, shootdown, .. } = bench();
    map(&domain, 0x1000, 16 * PAGE, 1, Prot::RW);
    view.write(0x1000, &[1]).unwrap();
    view.offline();
    let gone = Arc::downgrade(&domain);
    let next = self::domain(&shootdown);
    map(&next, 0x1000, 17 * PAGE, 1, Prot::RW);
    endpoint.bind(Binding::Domain(next));
    drop(domain);
    assert!(gone.upgrade().is_none(), "its mappings count against a limit that others share");
    view.online();
    let mut byte = [7];
    view.read(0x1000, &mut byte).unwrap();
    assert_eq!(byte, [0], "the next domain leads elsewhere");
}

#[test]
fn a_view_that_is_offline_finds_nothing_that_it_knew() {
    let Bench { domain, endpoint, mut view, .. } = bench();
    map(&domain, 0x1000, 16 * PAGE, 2, Prot::RW);
    let mut byte = [0];
    for binding in [None, Some(Binding::Bypass)] {
        let bypass = binding.is_some();
        if let Some(binding) = binding {
            endpoint.bind(binding);
            view.quiet();
        }
        let addr = if bypass { 16 * PAGE } else { 0x1000 };
        view.write(addr, &[7]).unwrap();
        let hits = view.hits.get();
        view.read(addr, &mut byte).unwrap();
        assert!(byte == [7] && view.hits.get() > hits, "it is in the cache");
        view.offline();
        view.offline();
        let mut access = |access: &mut dyn FnMut(&View)| {
            let found = catch_unwind(AssertUnwindSafe(|| access(&view)));
            assert!(
                found.is_err(),
                "a view that is offline has found something (bypass: {bypass})"
            );
            // What could not be looked up has not got into the cache either.
            view.quiet();
        };
        access(&mut |view| view.read(addr, &mut [0]).unwrap());
        access(&mut |view| view.write(addr, &[8]).unwrap());
        access(&mut |view| _ = view.piece(addr, 1, Access::Read).unwrap());
        access(&mut |view| _ = view.around(addr, Access::Read).unwrap());
        access(&mut |view| _ = view.window(addr, 16, Access::Read).unwrap());
        access(&mut |view| assert!(view.prefetch(addr, 16, Access::Read)));
        view.online();
        view.online();
        let misses = view.misses.get();
        view.read(addr, &mut byte).unwrap();
        assert_eq!((byte, view.misses.get()), ([7], misses), "what it knew it knows again");
    }
    // Memory that is replaced meanwhile is in neither of its caches.
    view.offline();
    view.set_memory(memory());
    view.online();
    view.read(16 * PAGE, &mut byte).unwrap();
    assert_eq!(byte, [0]);
}

#[test]
fn new_memory_replaces_all_pointers_into_the_old() {
    let Bench { domain, mut view, memory: old, .. } = bench();
    map(&domain, 0x1000, 16 * PAGE, 1, Prot::RW);
    view.write(0x1000, &[1]).unwrap();
    let window = view.window(0x1000, 16, Access::Read).unwrap();
    let new = memory();
    view.set_memory(Arc::clone(&new));
    assert!(!window.is_valid());
    let found = view.window(0x1000, 16, Access::Read).unwrap();
    assert_eq!(found.slice().as_ptr() as usize, host(&new, 16 * PAGE));
    assert_ne!(found.slice().as_ptr() as usize, host(&old, 16 * PAGE));
}

#[test]
fn faults_are_neither_counted_nor_reported_while_silent() {
    let Bench { view, faults, .. } = bench();
    let refused = view.silently(|| view.read(0, &mut [0]).is_err());
    assert!(refused && faults.0.lock().is_empty());
    assert!(view.read(0, &mut [0]).is_err());
    assert_eq!(faults.0.lock().len(), 1);
}

#[test]
fn the_last_address_is_an_address_and_none_follows_it() {
    let Bench { domain, view, .. } = bench();
    map(&domain, u64::MAX - 0xfff, 16 * PAGE, 1, Prot::RW);
    view.write(u64::MAX, &[7]).unwrap();
    let mut byte = [0];
    view.read(u64::MAX, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    let over = AccessError::Overflow { addr: u64::MAX, len: 2 };
    assert_eq!(view.write(u64::MAX, &[1, 2]), Err(over));
    assert!(view.window(u64::MAX, 2, Access::Read).is_err());
    assert_eq!(view.window(u64::MAX, 1, Access::Read).unwrap().len(), 1);
    assert!(view.slices(u64::MAX, 0, Access::Read, |_| panic!("of nothing")).is_ok());
}

#[test]
fn a_window_lies_in_one_piece_however_many_mappings_it_spans() {
    let Bench { domain, view, .. } = bench();
    // Two mappings with contiguous memory, and then one that breaks it.
    map(&domain, 0x1_f000, 17 * PAGE, 1, Prot::RW);
    map(&domain, 0x2_0000, 18 * PAGE, 1, Prot::RW);
    map(&domain, 0x2_1000, 16 * PAGE, 1, Prot::RW);
    assert_eq!(view.window(0x1_f000, 2 * PAGE, Access::Read).unwrap().len(), 8192);
    let broken = AccessError::Fragmented { addr: 0x2_0000, len: 2 * PAGE };
    assert_eq!(view.window(0x2_0000, 2 * PAGE, Access::Read).unwrap_err(), broken);
}

#[test]
fn a_truncated_file_is_noticed_before_anything_is_reported() {
    ringfence_mem::sigbus::install().unwrap();
    let Bench { domain, mut view, .. } = bench();
    view.check().unwrap();
    let unsealed = file(4);
    let copy = unsealed.try_clone().unwrap();
    let region = Region { gpa: 1 << 40, size: 4 * PAGE, user_addr: 0, mmap_offset: 0 };
    view.set_memory(Memory::map(vec![(region, copy)]).unwrap());
    map(&domain, 0x1000, 1 << 40, 1, Prot::RW);
    view.write(0x1000, &[1]).unwrap();
    view.check().unwrap();
    ftruncate(&unsealed, 0).unwrap();
    let mut byte = [9];
    view.read(0x1000, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    assert_eq!(view.check(), Err(AccessError::Lost { addr: 1 << 40 }));
}

#[test]
fn one_look_finds_all_that_leads_on_until_it_is_invalidated() {
    let Bench { domain, mut view, memory, faults, .. } = bench();
    // Mapped page by page; the next leads on, and may not be written.
    for page in 0..4 {
        map(&domain, 0x10_0000 + page * PAGE, (16 + page) * PAGE, 1, Prot::RW);
    }
    map(&domain, 0x10_4000, 20 * PAGE, 1, Prot::READ);
    let around = |view: &View, addr, access| {
        let (first, run) = view.around(addr, access)?;
        Some((first, run.as_ptr() as usize, run.len() as u64))
    };
    let whole = (0x10_0000, host(&memory, 16 * PAGE), 4 * PAGE);
    assert_eq!(around(&view, 0x10_2345, Access::Write), Some(whole));
    let last = (0x10_4000, host(&memory, 20 * PAGE), PAGE);
    assert_eq!(around(&view, 0x10_4fff, Access::Read), Some(last));
    assert_eq!(around(&view, 0x10_4fff, Access::Write), None);
    assert_eq!(around(&view, 0x10_5000, Access::Read), None);
    let token = unmap(&domain, 0x10_1000, 1);
    assert_eq!(around(&view, 0x10_2345, Access::Write), Some(whole), "until the quiet point");
    view.quiet();
    assert!(is_over(&domain, token));
    assert_eq!(around(&view, 0x10_1000, Access::Read), None);
    let (first, at, len) = around(&view, 0x10_2345, Access::Read).unwrap();
    assert!(first >= 0x10_2000 && at == host(&memory, 18 * PAGE) + (first - 0x10_2000) as usize);
    assert!(len <= 2 * PAGE);
    assert!(faults.0.lock().is_empty(), "the access itself is refused");
}

#[test]
fn the_number_of_views_is_bounded() {
    let Bench { endpoint, memory, view, .. } = bench();
    let second = View::new(Arc::clone(&endpoint), Arc::clone(&memory)).unwrap();
    assert!(View::new(Arc::clone(&endpoint), Arc::clone(&memory)).is_none());
    drop(view);
    assert!(View::new(endpoint, memory).is_some());
    drop(second);
}

/// Joins pieces that follow each other.
pub(crate) fn joined(pieces: impl Iterator<Item = (usize, usize)>) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (first, end) in pieces {
        match runs.last_mut() {
            Some(run) if run.1 == first => run.1 = end,
            _ => runs.push((first, end)),
        }
    }
    runs
}
