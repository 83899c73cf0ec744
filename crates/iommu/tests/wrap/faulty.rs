//! Calls that fail on purpose.

use ringfence_iommu::{Domain, Error, Gather};
use ringfence_iommu_testing::{Faulty, Kind, Stage, When};

use crate::fake::{Fake, map, page};

const INJECTED: Error = Error::Gone("injected fault");

#[test]
fn the_nth_call_of_its_kind_fails_and_no_other() {
    let domain = Faulty::new(Fake::default(), 0);
    domain.flush_iotlb_all().unwrap();
    domain.inject(Kind::FlushAll, When::Nth(2), Stage::Before);
    domain.iotlb_sync_map(page(0)).unwrap();
    domain.flush_iotlb_all().unwrap();
    assert_eq!(domain.flush_iotlb_all(), Err(INJECTED));
    domain.flush_iotlb_all().unwrap();
    assert_eq!(domain.injected(), 1);
}

#[test]
fn a_failure_before_changes_nothing_and_one_after_has_changed_it() {
    let domain = Faulty::new(Fake::default(), 0);
    let no_memory = Error::NoMemory { operation: "map", range: page(1) };
    domain.inject_error(Kind::Map, When::Nth(1), Stage::Before, no_memory);
    domain.inject(Kind::Map, When::Nth(2), Stage::After);
    let map = |n| domain.map(map(page(n), 0));
    assert_eq!(map(1), Err(no_memory));
    assert_eq!(domain.iova_to_phys(page(1).first()), None);
    assert_eq!(map(2), Err(INJECTED));
    assert!(domain.iova_to_phys(page(2).first()).is_some());
    assert_eq!(map(3), Ok(()));
    domain.inject(Kind::Sync, When::Nth(1), Stage::Before);
    domain.inject(Kind::SyncEnd, When::Nth(1), Stage::After);
    for _ in 0..2 {
        let mut gather = Gather::new();
        domain.unmap(page(3), &mut gather).unwrap();
        domain.unmap(page(5), &mut gather).unwrap();
        assert_eq!(domain.iotlb_sync(&mut gather), Err(INJECTED));
        assert!(gather.is_empty());
    }
}

#[test]
fn every_nth_always_and_never() {
    let domain = Faulty::new(Fake::default(), 0);
    domain.inject(Kind::FlushAll, When::Every(3), Stage::Before);
    domain.inject(Kind::FlushAll, When::Every(0), Stage::Before);
    let failed: Vec<_> = (1..10).filter(|_| domain.flush_iotlb_all().is_err()).collect();
    assert_eq!(failed, [3, 6, 9]);
    domain.inject(Kind::Lookup, When::Always, Stage::Before);
    domain.map(map(page(1), 0)).unwrap();
    assert_eq!(domain.iova_to_phys(page(1).first()), None);
    domain.clear();
    assert!(domain.iova_to_phys(page(1).first()).is_some());
}

#[test]
fn chance_is_about_as_configured_and_repeats_with_its_seed() {
    let run = |seed| {
        let domain = Faulty::new(Fake::default(), seed);
        domain.inject(Kind::FlushAll, When::PerMillion(100_000), Stage::Before);
        (0..2000).filter(|_| domain.flush_iotlb_all().is_err()).collect::<Vec<u32>>()
    };
    let first = run(42);
    assert!((100..300).contains(&first.len()), "{} of 2000 at 10 %", first.len());
    assert_eq!(first, run(42));
    assert_ne!(first, run(43));
}
