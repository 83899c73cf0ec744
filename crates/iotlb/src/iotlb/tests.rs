//! An IOTLB and its views, rule by rule.

use ringfence_mem::{Access, AccessError, Memory, Translate};

use super::*;
use crate::{
    Binding, Endpoint, View,
    view::tests::{Faults, REGIONS, host, joined, memory},
};

pub(super) const PAGE: u64 = 4096;
/// The first address of the first region.
pub(super) const GPA: u64 = REGIONS[0].0 * PAGE;

/// A front end that only records misses and failures.
#[derive(Default)]
struct Recorder {
    misses: Mutex<Vec<Miss>>,
    failures: Mutex<Vec<Miss>>,
}

impl MissSink for Recorder {
    fn send(&self, misses: &[Miss]) -> usize {
        self.misses.lock().extend(misses);
        misses.len()
    }

    fn fail(&self, misses: &[Miss]) {
        self.failures.lock().extend(misses);
    }
}

impl Recorder {
    /// The pages of the misses since the last call.
    fn pages(&self) -> Vec<u64> {
        self.misses.lock().drain(..).map(|miss| miss.iova.0 / PAGE).collect()
    }
}

pub(super) struct Bench {
    pub(super) iotlb: Arc<Iotlb>,
    pub(super) shootdown: Arc<Shootdown>,
    endpoint: Arc<Endpoint>,
    pub(super) memory: Arc<Memory>,
    sink: Arc<Recorder>,
    pub(super) faults: Arc<Faults>,
    pub(super) view: View,
}

pub(super) fn bench_with(config: IotlbConfig) -> Bench {
    let shootdown = Shootdown::new(4);
    // The same entries make room in each run.
    let config = IotlbConfig { seed: config.seed.or(Some(1)), ..config };
    let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
    let binding = Binding::Iotlb(Arc::clone(&iotlb));
    let endpoint = Endpoint::new(3, Arc::clone(&shootdown), binding);
    let sink = Arc::new(Recorder::default());
    iotlb.set_miss_sink(Some(Arc::clone(&sink) as _));
    let faults = Arc::new(Faults::default());
    endpoint.report_to(Arc::clone(&faults) as _);
    let memory = memory();
    let view = View::new(Arc::clone(&endpoint), Arc::clone(&memory)).unwrap();
    Bench { iotlb, shootdown, endpoint, memory, sink, faults, view }
}

fn bench() -> Bench {
    // Nothing here depends on time: each miss is sent once.
    bench_with(IotlbConfig { again: Duration::from_secs(1000), ..IotlbConfig::default() })
}

fn pages(iova: u64, count: u64) -> Range {
    Range::from_len(Iova(iova), count * PAGE).unwrap()
}

impl Bench {
    fn update(&self, iova: u64, gpa: u64, count: u64, prot: Prot) -> u64 {
        self.iotlb.update(pages(iova, count), GuestPhys(gpa), prot).unwrap()
    }

    /// The pieces of an access, as guest-physical addresses and lengths.
    fn pieces(&self, addr: u64, len: u64) -> std::result::Result<Vec<(usize, usize)>, AccessError> {
        let mut pieces = Vec::new();
        self.view.slices(addr, len, Access::Read, |piece| {
            let at = piece.as_ptr() as usize;
            pieces.push((at, at + piece.len()));
        })?;
        Ok(joined(pieces.into_iter()))
    }

    fn host(&self, gpa: u64) -> usize {
        host(&self.memory, gpa)
    }

    fn reads(&self, addr: u64) -> bool {
        self.view.read(addr, &mut [0]).is_ok()
    }

    fn writes(&self, addr: u64) -> bool {
        self.view.write(addr, &[0]).is_ok()
    }
}

#[test]
fn an_invalidation_takes_its_own_page_and_not_the_next() {
    // rule D15
    let mut bench = bench();
    for page in 0..3 {
        bench.update(page * PAGE, GPA + page * PAGE, 1, Prot::RW);
    }
    assert!((0..3).all(|page| bench.reads(page * PAGE)));
    let token = bench.iotlb.invalidate(pages(0, 1)).unwrap();
    assert!(!bench.shootdown.is_over(token));
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token));
    assert_eq!(bench.iotlb.entries(), 2);
    assert_eq!([0, 1, 2].map(|page| bench.reads(page * PAGE)), [false, true, true]);
    // Of the middle: neither the one before.
    bench.update(0, GPA, 1, Prot::RW);
    bench.iotlb.invalidate(pages(PAGE, 1)).unwrap();
    bench.view.quiet();
    assert_eq!([0, 1, 2].map(|page| bench.reads(page * PAGE)), [true, false, true]);
}

#[test]
fn an_access_over_two_entries_that_lead_apart_is_in_two_pieces() {
    // rule D23
    let bench = bench();
    bench.update(0, GPA + 4 * PAGE, 1, Prot::RW);
    bench.update(PAGE, GPA, 1, Prot::RW);
    let (first, second) = (bench.host(GPA + 4 * PAGE), bench.host(GPA));
    let expected = vec![(first, first + 4096), (second, second + 4096)];
    assert_eq!(bench.pieces(0, 2 * PAGE).unwrap(), expected);
    // And in one if they lead on from each other.
    bench.update(2 * PAGE, GPA + PAGE, 1, Prot::RW);
    assert_eq!(bench.pieces(PAGE, 2 * PAGE).unwrap(), [(second, second + 8192)]);
}

#[test]
fn entries_that_lead_on_from_each_other_keep_their_permissions() {
    let bench = bench();
    bench.update(0, GPA, 1, Prot::RW);
    bench.update(PAGE, GPA + PAGE, 1, Prot::READ);
    bench.update(2 * PAGE, GPA + 2 * PAGE, 1, Prot::RW);
    assert_eq!([0, 1, 2].map(|page| bench.reads(page * PAGE)), [true; 3]);
    assert_eq!([0, 1, 2].map(|page| bench.writes(page * PAGE)), [true, false, true]);
    assert_eq!(bench.pieces(0, 3 * PAGE).unwrap().len(), 1);
}

#[test]
fn an_update_that_permits_more_takes_effect() {
    let mut bench = bench();
    bench.update(0, GPA, 1, Prot::READ);
    assert!(bench.reads(0) && !bench.writes(0));
    // No invalidation in between.
    bench.update(0, GPA, 1, Prot::RW);
    assert!(bench.reads(0) && bench.writes(0));
    // And one that permits less, once it is in force.
    let token = bench.update(0, GPA, 1, Prot::READ);
    assert_ne!(token, 0);
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token) && bench.reads(0) && !bench.writes(0));
}

#[test]
fn an_update_that_leads_elsewhere_is_in_force_when_its_token_is_over() {
    // rule D21
    let mut bench = bench();
    assert_eq!(bench.update(0, GPA, 2, Prot::RW), 0, "nothing was there");
    assert_eq!(bench.update(0, GPA, 2, Prot::RW), 0, "the same was there");
    assert_eq!(bench.update(PAGE, GPA + PAGE, 1, Prot::RW), 0, "as part of it");
    let window = bench.view.window(0, 16, Access::Read).unwrap();
    let kept = bench.view.window(PAGE, 16, Access::Read).unwrap();
    bench.view.quiet();
    assert!(window.is_valid() && kept.is_valid());
    let token = bench.update(0, GPA + 4 * PAGE, 1, Prot::RW);
    assert!(!bench.shootdown.is_over(token));
    assert_eq!(bench.pieces(0, 1).unwrap()[0].0, bench.host(GPA), "still in use");
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token) && !window.is_valid());
    assert_eq!(bench.pieces(0, 1).unwrap()[0].0, bench.host(GPA + 4 * PAGE));
}

#[test]
fn an_update_replaces_all_that_it_overlaps() {
    let mut bench = bench();
    bench.update(0, GPA, 4, Prot::RW);
    bench.update(8 * PAGE, GPA, 1, Prot::RW);
    bench.update(3 * PAGE, GPA + 5 * PAGE, 6, Prot::READ);
    bench.view.quiet();
    assert_eq!(bench.iotlb.entries(), 1, "entries go as a whole");
    let found = bench.host(GPA + 5 * PAGE);
    assert_eq!(bench.pieces(3 * PAGE, 3 * PAGE).unwrap(), [(found, found + 3 * 4096)]);
    assert!(!bench.reads(0), "missing until the next update");
}

#[test]
fn an_update_that_is_refused_changes_nothing() {
    // rule D14
    let mut bench = bench();
    bench.update(0, GPA, 2, Prot::RW);
    let range = pages(0, 2);
    let none = bench.iotlb.update(range, GuestPhys(GPA), Prot::empty());
    assert_eq!(none, Err(Error::NoPermission(range)));
    let over = bench.iotlb.update(range, GuestPhys(u64::MAX - PAGE), Prot::RW);
    assert_eq!(over, Err(Error::TargetOverflow(range)));
    bench.view.quiet();
    assert!(bench.iotlb.entries() == 1 && bench.writes(PAGE));
    assert_eq!(bench.iotlb.stats().updates.load(Ordering::Relaxed), 1);
}

#[test]
fn an_invalidation_of_nothing_is_a_success_and_drops_what_views_still_hold() {
    // rules D15, D24
    let mut bench = bench_with(IotlbConfig { entries: 1, ..IotlbConfig::default() });
    let token = bench.iotlb.invalidate(Range::ALL).unwrap();
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token));
    bench.update(0, GPA, 1, Prot::RW);
    assert!(bench.reads(0));
    bench.update(PAGE, GPA, 1, Prot::RW);
    assert_eq!(bench.iotlb.entries(), 1, "the first has made room");
    assert!(bench.reads(0), "but is in use until the next quiet point");
    let token = bench.iotlb.invalidate(pages(0, 1)).unwrap();
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token) && !bench.reads(0));
}

#[test]
fn what_was_evicted_is_not_served_beside_what_replaces_it() {
    // rule D24
    let mut bench = bench_with(IotlbConfig { entries: 1, ..IotlbConfig::default() });
    bench.update(0, GPA, 1, Prot::RW);
    assert!(bench.reads(0));
    bench.update(PAGE, GPA, 1, Prot::RW);
    let token = bench.update(0, GPA + PAGE, 1, Prot::RW);
    assert!(!bench.shootdown.is_over(token), "the view may use what was evicted");
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token));
    assert_eq!(bench.pieces(0, 1).unwrap()[0].0, bench.host(GPA + PAGE));
    // No view passes a quiet point during many evictions: the same.
    for page in 0..100 {
        bench.update(page * PAGE, GPA, 1, Prot::RW);
        assert!(bench.reads(page * PAGE));
    }
    let token = bench.update(0, GPA + PAGE, 1, Prot::RW);
    assert!(!bench.shootdown.is_over(token));
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token));
}

#[test]
fn a_full_table_evicts_and_never_fails() {
    // rule D24
    let few = IotlbConfig { entries: 64, ..IotlbConfig::default() };
    // Not aligned to pages: such entries cost memory of their own.
    let small = IotlbConfig { table_bytes: 64 << 10, ..IotlbConfig::default() };
    for (config, odd) in [(few, 0), (small, 16)] {
        let mut bench = bench_with(config);
        for n in 0..2000 {
            let iova = (n * 7919 % 4096) << 22 | odd;
            let range = Range::from_len(Iova(iova), PAGE - odd).unwrap();
            // Table memory comes back when the views have passed a quiet point: this one sleeps.
            bench.view.offline();
            bench.iotlb.update(range, GuestPhys(GPA), Prot::RW).unwrap();
            bench.view.online();
            assert!(bench.iotlb.entries() <= 64 || odd != 0);
            assert!(bench.reads(iova), "the newest is there");
        }
        assert!(bench.iotlb.stats().evictions.load(Ordering::Relaxed) > 1000);
        assert!(bench.iotlb.entries() > 1);
    }
}

#[test]
fn a_full_table_whose_memory_a_view_holds_on_to_refuses_instead_of_waiting_for_it() {
    // rule D24
    let bench = bench_with(IotlbConfig { table_bytes: 64 << 10, ..IotlbConfig::default() });
    // The view is awake, and passes no quiet point.
    let refused = (0..10_000u64).find_map(|n| {
        let range = Range::from_len(Iova((n * 7919 % 4096) << 22 | 16), PAGE - 16).unwrap();
        bench.iotlb.update(range, GuestPhys(GPA), Prot::RW).err()
    });
    assert!(matches!(refused, Some(Error::Full { .. })), "{refused:?}");
}

#[test]
fn a_table_that_an_iommu_fills_refuses_what_does_not_fit() {
    // rule D30
    let bench = bench_with(IotlbConfig { entries: 2, ..IotlbConfig::default() });
    let iotlb = &bench.iotlb;
    let map = |page: u64| iotlb.map(Map::new(pages(page * PAGE, 1), GuestPhys(GPA), Prot::RW));
    assert_eq!((map(0), map(1)), (Ok(()), Ok(())));
    assert!(matches!(map(2), Err(Error::Full { .. })));
    assert!(bench.reads(0) && bench.reads(PAGE));
}

#[test]
fn all_addresses_are_one_entry_and_the_last_is_one_of_them() {
    // rule D30
    let mut bench = bench();
    bench.iotlb.update(Range::ALL, GuestPhys(0), Prot::RW).unwrap();
    assert!(bench.reads(GPA) && bench.reads(u64::MAX));
    assert!(bench.view.prefetch(GPA, 8 * PAGE, Access::Write));
    let token = bench.iotlb.invalidate(Range::ALL).unwrap();
    bench.view.quiet();
    assert!(bench.shootdown.is_over(token) && bench.iotlb.entries() == 0);
    assert!(!bench.reads(u64::MAX) && !bench.reads(0));
    // A range that ends at 2^64.
    bench.update(u64::MAX - 2 * PAGE + 1, GPA, 2, Prot::RW);
    assert!(bench.reads(u64::MAX));
    assert!(!bench.view.prefetch(u64::MAX - 3 * PAGE + 1, 3 * PAGE, Access::Read));
    let found = bench.host(GPA);
    assert_eq!(bench.pieces(u64::MAX - 2 * PAGE + 1, 2 * PAGE).unwrap(), [(found, found + 8192)]);
    bench.iotlb.invalidate(pages(u64::MAX - PAGE + 1, 1)).unwrap();
    bench.view.quiet();
    assert!(!bench.reads(u64::MAX));
}

/// Whether nothing is missing of several pieces, such as those of a chain.
fn prefetch_all(view: &View, pieces: impl IntoIterator<Item = (u64, u64, Access)>) -> bool {
    let all = |ready, (addr, len, access)| view.prefetch(addr, len, access) && ready;
    pieces.into_iter().fold(true, all)
}

#[test]
fn all_misses_of_a_chain_are_sent_together() {
    // rules D16, D17
    let bench = bench();
    bench.update(PAGE, GPA, 1, Prot::RW);
    let chain = || {
        [
            (PAGE - 8, 16, Access::Read),
            (PAGE, PAGE + 1, Access::Write),
            (10 * PAGE, 3 * PAGE, Access::Write),
            (10 * PAGE, 8, Access::Write),
        ]
    };
    assert!(!prefetch_all(&bench.view, chain()));
    let before = bench.view.updates_seen();
    bench.view.send_misses();
    assert_eq!(bench.sink.pages(), [0, 2, 10, 11, 12]);
    assert!(!prefetch_all(&bench.view, chain()));
    bench.view.send_misses();
    assert_eq!(bench.sink.pages(), [0u64; 0], "not twice");
    for page in [0, 2, 10, 11, 12] {
        assert!(!prefetch_all(&bench.view, chain()));
        bench.update(page * PAGE, GPA, 1, Prot::RW);
    }
    assert!(bench.view.updates_seen() > before && prefetch_all(&bench.view, chain()));
    assert_eq!(bench.iotlb.open_misses(), 0);
    assert!(bench.faults.0.lock().is_empty());
}

#[test]
fn a_range_without_end_is_not_walked_to_its_end() {
    // rule D17
    let bench = bench();
    assert!(!bench.view.prefetch(0, u64::MAX, Access::Read));
    assert!(!prefetch_all(&bench.view, (0..9).map(|n| (n << 50, 1 << 50, Access::Read))));
    bench.view.send_misses();
    assert_eq!(bench.sink.pages(), (0..256).collect::<Vec<_>>());
    // Past the end: left to the access.
    assert!(bench.view.prefetch(2, u64::MAX, Access::Read));
}

#[test]
fn a_refusal_is_a_fault_and_a_forbidden_access_is_reported() {
    // rule D16
    let bench = bench();
    bench.update(PAGE, GPA, 1, Prot::READ);
    // With `since`, an access fails however late it comes after the refusal.
    let since = bench.view.misses_sent();
    assert!(!bench.reads(0) && !bench.writes(PAGE));
    bench.view.send_misses();
    assert_eq!(bench.sink.pages(), [0, 1]);
    assert!(bench.faults.0.lock().is_empty());
    bench.iotlb.refuse(pages(0, 2), Prot::WRITE);
    bench.iotlb.refuse(pages(0, 2), Prot::READ);
    let unmapped = AccessError::Unmapped { addr: 0, access: Access::Read };
    assert_eq!(bench.view.set_since(Some(since)), None);
    assert_eq!(bench.view.read(0, &mut [0]), Err(unmapped));
    let forbidden = AccessError::NotPermitted { addr: PAGE, access: Access::Write };
    assert_eq!(bench.view.write(PAGE, &[0]), Err(forbidden));
    assert_eq!(bench.view.set_since(None), Some(since));
    assert!(bench.reads(PAGE));
    assert_eq!(bench.faults.0.lock().len(), 2);
    let reported = Miss { iova: Iova(PAGE), access: Prot::WRITE, again: None };
    assert_eq!(*bench.sink.failures.lock(), [reported], "once");
    // A translation that comes after all is used.
    bench.update(0, GPA, 2, Prot::RW);
    assert!(bench.reads(0) && bench.writes(PAGE));
}

#[test]
fn an_update_that_forbids_the_access_is_a_refusal_at_the_second_reply() {
    // rule D16
    let bench = bench();
    let since = bench.view.misses_sent();
    assert!(!bench.writes(0));
    bench.view.send_misses();
    bench.update(0, GPA, 1, Prot::READ);
    let number = bench.view.misses_sent();
    bench.iotlb.reply(Iova(0), Prot::WRITE, number, true);
    assert!(bench.sink.failures.lock().is_empty(), "one that permits it may be on its way");
    bench.iotlb.reply(Iova(0), Prot::WRITE, number, true);
    assert_eq!(bench.sink.failures.lock().len(), 1);
    let forbidden = AccessError::NotPermitted { addr: 0, access: Access::Write };
    assert_eq!(bench.view.set_since(Some(since)), None);
    assert_eq!(bench.view.write(0, &[0]), Err(forbidden));
}

#[test]
fn no_lock_is_held_while_misses_are_sent() {
    // rule D20
    struct Updates(std::sync::Weak<Iotlb>);
    impl MissSink for Updates {
        fn send(&self, misses: &[Miss]) -> usize {
            let iotlb = self.0.upgrade().unwrap();
            for miss in misses {
                let page = pages(miss.iova.0 & !(PAGE - 1), 1);
                iotlb.invalidate(pages(1 << 40, 1)).unwrap();
                iotlb.update(page, GuestPhys(GPA), Prot::RW).unwrap();
            }
            misses.len()
        }
    }
    let bench = bench();
    bench.iotlb.set_miss_sink(Some(Arc::new(Updates(Arc::downgrade(&bench.iotlb)))));
    let before = bench.view.updates_seen();
    assert!(!bench.view.prefetch(0, 8 * PAGE, Access::Write));
    bench.view.send_misses();
    assert!(bench.view.updates_seen() > before && bench.view.prefetch(0, 8 * PAGE, Access::Write));
}

#[test]
fn without_a_sink_accesses_wait_and_a_new_sink_gets_their_misses() {
    let mut bench = bench();
    bench.iotlb.set_miss_sink(None);
    let missing = AccessError::Again { addr: 0, access: Access::Read };
    for _ in 0..3 {
        assert_eq!(bench.view.read(0, &mut [0]), Err(missing));
        bench.view.quiet();
    }
    let before = bench.view.updates_seen();
    bench.iotlb.set_miss_sink(Some(Arc::clone(&bench.sink) as _));
    assert!(bench.view.updates_seen() > before, "woken to look again");
    assert_eq!(bench.view.read(0, &mut [0]), Err(missing));
    bench.view.quiet();
    assert_eq!(bench.sink.pages(), [0]);
    assert_eq!(bench.iotlb.stats().misses.load(Ordering::Relaxed), 1);
}

#[test]
fn the_misses_that_are_open_are_bounded() {
    // rule D17
    let config =
        IotlbConfig { misses: 8, again: Duration::from_secs(1000), ..IotlbConfig::default() };
    let bench = bench_with(config);
    for n in 0..100 {
        bench.view.prefetch(n << 30, 4 * PAGE, Access::Read);
        bench.view.send_misses();
        assert!(bench.iotlb.misses.listed() <= 8);
    }
    assert_eq!(bench.sink.pages().len(), 8);
}

#[test]
fn entries_that_lead_out_of_memory_go_and_leases_on_any_of_them_are_waited_for() {
    // rule D25
    let mut bench = bench();
    for page in 0..4 {
        bench.update(page << 30, GPA + page * PAGE, 1, Prot::RW);
        assert!(bench.reads(page << 30));
    }
    let lease = bench.view.lease(0, 8).unwrap();
    let keep =
        |first: GuestPhys, last: GuestPhys| first.0 >= GPA + 2 * PAGE && last.0 < GPA + 3 * PAGE;
    let token = bench.iotlb.retain_targets(keep).unwrap();
    bench.view.quiet();
    assert_eq!([0, 1, 2, 3].map(|page| bench.reads(page << 30)), [false, false, true, false]);
    assert!(!bench.shootdown.is_over(token), "the lease is on the first of them");
    drop(lease);
    assert!(bench.shootdown.is_over(token));
    assert_eq!(bench.iotlb.retain_targets(|_, _| true), Ok(0));
}

#[test]
fn leases_on_what_made_room_are_waited_for_too() {
    // rule D25
    let mut bench = bench_with(IotlbConfig { entries: 1, ..IotlbConfig::default() });
    bench.update(0, GPA, 1, Prot::RW);
    assert!(bench.reads(0));
    let lease = bench.view.lease(0, 8).unwrap();
    bench.update(1 << 30, GPA + PAGE, 1, Prot::RW);
    assert_eq!(bench.iotlb.entries(), 1);
    let token = bench.iotlb.retain_targets(|first, _| first.0 != GPA).unwrap();
    bench.view.quiet();
    assert!(!bench.shootdown.is_over(token), "the lease is on the one that made room");
    drop(lease);
    assert!(bench.shootdown.is_over(token));
}

#[test]
fn updates_that_fail_leave_a_bounded_record() {
    let bench = bench_with(IotlbConfig { table_bytes: 1, ..IotlbConfig::default() });
    for _ in 0..1000 {
        bench.iotlb.update(pages(0, 1), GuestPhys(GPA), Prot::RW).unwrap_err();
    }
    assert!(bench.iotlb.writer.lock().evicted.len() <= EVICTED);
}

#[test]
fn a_view_that_sleeps_is_woken_by_its_update() {
    // rule D18
    let bench = bench();
    let (send, wakes) = std::sync::mpsc::channel();
    let mut view = View::new(Arc::clone(&bench.endpoint), Arc::clone(&bench.memory)).unwrap();
    view.wake_with(Box::new(move || send.send(()).unwrap()));
    assert!(view.read(PAGE, &mut [0]).is_err());
    view.offline();
    assert_eq!(bench.sink.pages(), [1]);
    bench.update(0, GPA, 1, Prot::RW);
    assert!(wakes.try_recv().is_err(), "of no concern to it");
    bench.update(PAGE, GPA, 1, Prot::RW);
    assert!(wakes.try_recv().is_ok());
    view.online();
    assert!(view.read(PAGE, &mut [0]).is_ok());
}
