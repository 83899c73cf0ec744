//! The contract suite for domains: ours pass it, and each domain with one defect fails the check
//! for that defect.
#![cfg(not(loom))]

mod broken;

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
};

use broken::{Broken, Wrong};
use ringfence_iommu::{
    Domain, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, ReservedKind, ReservedRegion,
    SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_iommu_testing::{
    Faulty, Kind, Stage, When,
    suite::{Cache, MEMORY, Outcome, Subject, Verdict, checks, pass, run},
};

pub(crate) type Soft = SoftDomain<GuestPhys>;

/// Guest-physical memory begins here.
const BASE: u64 = 0x40_0000;

/// A device in a thread of its own, behind a domain that is, or consists of, `soft`.
struct Rig<D> {
    domain: D,
    granule: u64,
    accesses: Sender<(Iova, Prot)>,
    targets: Receiver<Option<u64>>,
    fail_next: Option<Arc<Faulty<Arc<Soft>>>>,
}

fn soft(granule: u64) -> Arc<Soft> {
    let reserved = Range::from_len(Iova(0), granule).unwrap();
    let geometry = Geometry {
        reserved: [ReservedRegion { range: reserved, kind: ReservedKind::Msi }].into(),
        ..Geometry::new(PageSizes::from_granule(granule).unwrap(), Range::ALL)
    };
    Soft::new(geometry, Limits::NONE, Shootdown::new(1))
}

impl<D: Domain<Target = GuestPhys>> Rig<D> {
    fn new(soft: &Arc<Soft>, domain: D) -> Rig<D> {
        let (accesses, requests) = mpsc::channel();
        let (results, targets) = mpsc::channel();
        let behind = Arc::clone(soft);
        thread::spawn(move || {
            let mut cache = Cache::new(behind.shootdown().reader().unwrap());
            loop {
                match requests.try_recv() {
                    Ok((iova, prot)) => results.send(cache.access(&behind, iova, prot)).unwrap(),
                    Err(TryRecvError::Empty) => {
                        cache.quiet();
                        thread::yield_now();
                    }
                    Err(TryRecvError::Disconnected) => break,
                }
            }
        });
        let granule = soft.geometry().page_sizes.granule();
        Rig { domain, granule, accesses, targets, fail_next: None }
    }
}

impl<D: Domain<Target = GuestPhys>> Subject for Rig<D> {
    type Domain = D;
    fn domain(&self) -> &D {
        &self.domain
    }
    fn map(&self, range: Range, to: u64, prot: Prot) -> Map<GuestPhys> {
        assert!(to < MEMORY);
        Map::new(range, GuestPhys(BASE + to * self.granule), prot)
    }
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64> {
        self.accesses.send((iova, prot)).unwrap();
        self.targets.recv().unwrap()
    }
    fn fail_next(&mut self) -> bool {
        let faulty = self.fail_next.as_ref();
        faulty.inspect(|it| it.inject(Kind::Sync, When::Nth(1), Stage::Before)).is_some()
    }
}

fn failures(outcomes: &[Outcome]) -> Vec<&Outcome> {
    outcomes.iter().filter(|it| matches!(it.verdict, Verdict::Fail(_))).collect()
}

#[test]
fn a_domain_in_software_keeps_it_whatever_the_granule() {
    for granule in [1 << 12, 1 << 16, 1] {
        let soft = soft(granule);
        let mut rig = Rig::new(&soft, Arc::clone(&soft));
        assert_eq!(pass(&mut rig).as_deref(), Ok(&["reports_a_sync_that_failed"][..]));
    }
}

#[test]
fn a_wrapper_keeps_it_and_a_sync_that_is_made_to_fail_is_reported() {
    let soft = soft(4096);
    let faulty = Arc::new(Faulty::new(Arc::clone(&soft), 0));
    let mut rig = Rig::new(&soft, Arc::clone(&faulty));
    rig.fail_next = Some(faulty);
    assert_eq!(pass(&mut rig).as_deref(), Ok(&[][..]));
}

#[test]
fn each_domain_that_is_wrong_in_one_thing_fails_the_check_of_it() {
    let mut met = Vec::new();
    for (wrong, check) in Wrong::ALL {
        let soft = soft(4096);
        let faulty = Arc::new(Faulty::new(Arc::clone(&soft), 0));
        let mut rig = Rig::new(&soft, Broken::new(Arc::clone(&faulty), wrong));
        rig.fail_next = Some(faulty);
        let outcomes = run(&mut rig);
        // A domain may be so broken that nothing can be cleaned up after it: that is a failure of
        // the suite.
        let outcomes = outcomes.unwrap_or_else(|why| panic!("{wrong:?}: {why}"));
        let failed = failures(&outcomes);
        assert!(failed.iter().any(|it| it.check == check), "{wrong:?} passes {check}: {failed:?}");
        assert!(!met.contains(&check), "{check} is the check of another");
        met.push(check);
    }
    assert!(met.len() >= 10);
    // No broken domain stands for the other two, which concern domains whose device may refuse, and
    // the last granule.
    let every: Vec<_> = checks::<Rig<Arc<Soft>>>().iter().map(|check| check.name).collect();
    assert!(met.iter().all(|check| every.contains(check)));
    let missed: Vec<_> = every.into_iter().filter(|check| !met.contains(check)).collect();
    assert_eq!(missed, ["ends_a_sync_that_was_begun", "maps_its_last_granule"]);
}
