//! The use-after-unmap detector.

use std::sync::Arc;

use ringfence_dma::{CallSite, Cause, Detector, Direction, Explained, Fallback, Policy};
use ringfence_iommu::{Fault, FaultReason, Iova, Prot};
use ringfence_sync::clock::Clock;

use crate::mock::{Bench, Broken, Buf, Setup};

fn detecting(policy: Policy, ranges: usize, bytes: u64) -> Bench {
    let mut setup = Setup::new(policy);
    setup.config.detect = Some(Detector { ranges, bytes });
    setup.build()
}

fn page() -> Buf {
    Buf::new(&[(0x5000, 0x1000)])
}

fn fault(iova: u64, access: Prot) -> Fault {
    Fault { reason: FaultReason::Mapping, endpoint: 3, iova: Iova(iova), access }
}

/// A use after unmap, with the place of the unmap and its age.
fn used(bench: &Bench, iova: u64) -> Option<(Explained, CallSite, u64)> {
    let explained = bench.device.explain(&fault(iova, Prot::WRITE))?;
    match explained.cause.clone() {
        Cause::UseAfterUnmap { unmapped, age_ns } => Some((explained, unmapped, age_ns)),
        _ => None,
    }
}

#[test]
fn it_names_the_lines_that_mapped_and_unmapped() {
    let bench = detecting(Policy::StrictMap, 8, 1 << 20);
    let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
    let mapped = line!() - 1;
    let iova = mapping.iova().0;
    assert!(matches!(
        bench.device.explain(&fault(iova, Prot::READ)),
        Some(Explained { cause: Cause::WrongDirection, .. })
    ));
    mapping.unmap().unwrap();
    let unmapped = line!() - 1;
    bench.clock.advance(7_000_000);
    let (found, unmap, age_ns) = used(&bench, iova + 0x123).unwrap();
    let (at, by) = (found.mapped.at.unwrap(), unmap.at.unwrap());
    assert_eq!((at.file(), at.line()), (file!(), mapped));
    assert_eq!((by.file(), by.line()), (file!(), unmapped));
    assert_eq!(age_ns, 7_000_000);
    assert_eq!(found.range.first().0, iova);
    let text = found.to_string();
    assert!(text.contains("0x123 into"), "{text}");
    assert!(text.contains(&format!("at most 7ms after it was unmapped at {}", file!())), "{text}");
}

#[test]
fn every_way_to_map_and_to_unmap_records_its_place() {
    let bench = detecting(Policy::StrictMap, 8, 1 << 20);
    let mut iovas = Vec::new();
    let list = bench.device.map(vec![page(), page()], Direction::FromDevice).unwrap();
    iovas.push(list.iova().0);
    let (_, stale) = list.unmap_watched().unwrap();
    let coherent = bench.device.alloc_coherent(page()).unwrap();
    iovas.push(coherent.iova().0);
    coherent.free().unwrap();
    let persistent = bench.device.map_persistent(page(), Direction::FromDevice).unwrap();
    iovas.push(persistent.iova().0);
    persistent.unmap().unwrap();
    let after = line!();
    for iova in iovas {
        let (found, unmapped, _) = used(&bench, iova).unwrap();
        for at in [found.mapped.at.unwrap(), unmapped.at.unwrap()] {
            assert_eq!(at.file(), file!());
            assert!((after - 13..after).contains(&at.line()), "{at}");
        }
    }
    // A watched address belongs to the watcher first, then to the detector.
    assert_eq!(bench.device.stats().withheld, 2);
    let iova = stale.iova().0;
    drop(stale);
    assert_eq!(bench.device.stats().withheld, 3);
    assert!(used(&bench, iova).is_some());
    // A drop has no place.
    let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
    let iova = mapping.iova().0;
    drop(mapping);
    let (found, unmapped, _) = used(&bench, iova).unwrap();
    assert!(unmapped.at.is_none() && found.mapped.at.is_some());
    let coherent = bench.device.alloc_coherent(page()).unwrap();
    let iova = coherent.iova().0;
    drop(coherent);
    assert!(used(&bench, iova).unwrap().1.at.is_none());
}

#[test]
fn what_goes_in_a_batch_was_mapped_and_unmapped_where_it_was_pushed() {
    for policy in [Policy::Strict, Policy::StrictMap] {
        let bench = detecting(policy, 8, 1 << 20);
        let mut maps = bench.device.map_batch();
        maps.push(page(), Direction::FromDevice, ()).unwrap();
        let mapped = line!() - 1;
        let mut mapping = None;
        maps.finish(|(), outcome| mapping = Some(outcome.unwrap()));
        let mapping = mapping.unwrap();
        let iova = mapping.iova().0;
        let mut unmaps = bench.device.unmap_batch();
        unmaps.push(mapping, ()).unwrap();
        let unmapped = line!() - 1;
        unmaps.finish(|(), outcome| drop(outcome.unwrap()));
        let (found, by, _) = used(&bench, iova).unwrap();
        assert_eq!(found.mapped.at.map(|at| (at.file(), at.line())), Some((file!(), mapped)));
        assert_eq!(by.at.map(|at| (at.file(), at.line())), Some((file!(), unmapped)));
        assert_eq!(bench.device.stats().withheld, 1);
    }
}

#[test]
fn an_address_is_held_back_until_newer_ones_push_it_out() {
    // The allocator reuses at once what was freed last: without the detector, always the same
    // range.
    let bench = detecting(Policy::StrictMap, 3, 1 << 20);
    let mut iovas = Vec::new();
    for _ in 0..4 {
        let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
        iovas.push(mapping.iova().0);
        drop(mapping);
    }
    assert_eq!(bench.device.stats().withheld, 3);
    assert_eq!(bench.device.stats().withheld_bytes, 3 * 4096);
    assert!(used(&bench, iovas[0]).is_none(), "the oldest is forgotten");
    assert!(iovas[1..].iter().all(|iova| used(&bench, *iova).is_some()));
    let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
    assert_eq!(mapping.iova().0, iovas[0], "and is allocated again");
    let explained = bench.device.explain(&fault(iovas[0], Prot::WRITE));
    assert!(matches!(explained, Some(Explained { cause: Cause::Mapped, .. })), "{explained:?}");
}

#[test]
fn an_exhausted_allocator_gets_all_of_it_back() {
    let mut setup = Setup::new(Policy::StrictMap);
    setup.config.detect = Some(Detector::default());
    setup.config.limit = Iova(0x10_1fff);
    let bench = setup.build();
    for _ in 0..10 {
        let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
        drop(mapping);
    }
    let (one, two) = (
        bench.device.map(page(), Direction::FromDevice).unwrap(),
        bench.device.map(page(), Direction::FromDevice).unwrap(),
    );
    assert!(bench.device.map(page(), Direction::FromDevice).is_err(), "all are mapped");
    drop((one, two));
    assert_eq!(bench.device.stats().withheld, 2);
    let Bench { device, domain, allocator, .. } = bench;
    assert_eq!(allocator.live(), 2);
    drop(device);
    // The allocator outlives the device, and has everything back.
    assert_eq!((allocator.live(), domain.table.mappings()), (0, 0));
}

#[test]
fn a_detecting_device_is_strict() {
    for policy in Policy::ALL {
        let bench = detecting(policy, 8, 1 << 20);
        assert!(bench.device.effective_policy().is_strict());
        let fallback = bench.device.fallback();
        // A slot used after its unmap would already belong to the next mapping.
        let refused = !policy.is_strict() || policy.bounces();
        assert_eq!(fallback, refused.then_some(Fallback::Detector));
        let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
        let iova = mapping.iova().0;
        drop(mapping);
        assert_eq!(bench.domain.reach(iova), None);
        assert!(used(&bench, iova).is_some());
    }
}

#[test]
fn failures_stay_failures() {
    let bench = detecting(Policy::StrictMap, 8, 1 << 20);
    bench.domain.fail_after(1);
    drop(bench.device.map(page(), Direction::FromDevice).unwrap_err());
    // No device ever got the address: nothing to hold back.
    assert_eq!((bench.device.stats().withheld, bench.allocator.live()), (0, 0));
    let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
    let iova = mapping.iova().0;
    *bench.domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
    assert!(mapping.unmap().is_err());
    let stats = bench.device.stats();
    assert_eq!((stats.quarantined, stats.withheld), (1, 0));
    assert!(used(&bench, iova).is_some(), "an unmap was requested, though it failed");
}

#[test]
fn nothing_is_known_and_nothing_kept_without_it() {
    let bench = Bench::new(Policy::StrictMap);
    let mapping = bench.device.map(page(), Direction::FromDevice).unwrap();
    let iova = mapping.iova().0;
    assert!(bench.device.explain(&fault(iova, Prot::READ)).is_none());
    drop(mapping);
    assert!(bench.device.explain(&fault(iova, Prot::READ)).is_none());
    assert_eq!(bench.device.stats().withheld, 0);
    bench.assert_nothing_leaked();
}

#[test]
fn threads_may_map_unmap_and_explain_faults_at_once() {
    let bench = detecting(Policy::StrictMap, 16, 1 << 20);
    let clock: Arc<dyn Clock> = Arc::clone(&bench.clock) as _;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let device = bench.device.clone();
                for _ in 0..300 {
                    let mapping = device.map(page(), Direction::FromDevice).unwrap();
                    let iova = mapping.iova().0;
                    assert!(matches!(
                        device.explain(&fault(iova, Prot::WRITE)),
                        Some(Explained { cause: Cause::Mapped, .. })
                    ));
                    drop(mapping);
                    if let Some(used) = device.explain(&fault(iova, Prot::WRITE))
                        && let Cause::UseAfterUnmap { unmapped, .. } = used.cause
                    {
                        assert_eq!(used.range.first().0, iova);
                        assert!(unmapped.ns <= clock.now_ns());
                    }
                }
            });
        }
    });
    let stats = bench.device.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.withheld), (900, 900, 16));
    assert_eq!(bench.allocator.live(), 16);
}
