//! Mirrors that come and go while others map.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use parking_lot::Mutex;
use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, HostAddr, Map, PageSizes, Partial, Prot, Range,
    Result, SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_virtio_iommu::device::{Binding, Joint, Outside};

use super::{Far, Soft, mappings, mirror, page, range};

/// Calls something, once, after a map or an unmap of the domain within.
struct Hooked {
    inner: Arc<Soft>,
    before: bool,
    hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Hooked {
    fn around<R>(&self, call: impl FnOnce() -> R) -> R {
        let run = || {
            if let Some(hook) = self.hook.lock().take() {
                hook();
            }
        };
        if self.before {
            run();
        }
        let result = call();
        if !self.before {
            run();
        }
        result
    }
}

// SAFETY: all calls pass to the inner domain, which fulfils the contract.
unsafe impl Domain for Hooked {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(
        inner: geometry, capabilities, sync_begin, sync_poll, sync_wait, iova_to_phys, mappings_from
    );

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        self.around(|| self.inner.map_pages(maps))
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        self.around(|| self.inner.unmap_pages(ranges, gather))
    }
}

/// A domain to host addresses that calls something, once, when it is about to map.
struct Slowly {
    inner: Arc<SoftDomain<HostAddr>>,
    hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

// SAFETY: all calls pass to the inner domain, which fulfils the contract.
unsafe impl Domain for Slowly {
    type Target = HostAddr;

    ringfence_iommu::pass_on!(
        inner: geometry, capabilities, sync_begin, sync_poll, sync_wait, iova_to_phys
    );

    fn map_pages(&self, maps: &[Map<HostAddr>]) -> Result<(), Partial> {
        if let Some(hook) = self.hook.lock().take() {
            hook();
        }
        self.inner.map_pages(maps)
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        self.inner.unmap_pages(ranges, gather)
    }
}

#[test]
fn what_is_mapped_behind_the_back_of_a_replay_waits_for_it() {
    // rule V20
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let soft = SoftDomain::new(geometry.clone(), Limits::NONE, Shootdown::new(0));
    soft.map(Map::new(page(5), GuestPhys(0x5000), Prot::RW)).unwrap();
    let joint = Joint::new(soft);
    let inner = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(0));
    let slowly = Arc::new(Slowly { inner: Arc::clone(&inner), hook: Mutex::default() });
    let outside = Outside::new(mirror(slowly.clone(), true));
    let (other, mapper) = (Arc::clone(&joint), Arc::new(Mutex::new(None)));
    let started = Arc::clone(&mapper);
    *slowly.hook.lock() = Some(Box::new(move || {
        // The replay is at page 5 by now.
        let mapping =
            thread::spawn(move || other.map(Map::new(page(1), GuestPhys(0x1000), Prot::RW)));
        // It waits: otherwise it would be finished by then.
        (0..10_000).take_while(|_| !mapping.is_finished()).for_each(|_| thread::yield_now());
        *started.lock() = Some(mapping);
    }));
    outside.bind(Binding::Domain(joint)).unwrap();
    let mapping = mapper.lock().take().expect("the hook was called");
    mapping.join().unwrap().unwrap();
    let there: Vec<_> = mappings(&*inner).iter().map(|m| m.range.first().0 >> 12).collect();
    assert_eq!(there, [1, 5]);
}

/// What a mirror has that joined while a call was in the domain: before it did its work, or after it.
fn joined_during(before: bool, call: impl FnOnce(&Joint<Hooked>)) -> Vec<u64> {
    let soft =
        SoftDomain::new(Geometry::new(PageSizes::X86, Range::ALL), Limits::NONE, Shootdown::new(0));
    soft.map(Map::new(page(1), GuestPhys(0x1000), Prot::RW)).unwrap();
    soft.map(Map::new(page(3), GuestPhys(0x3000), Prot::RW)).unwrap();
    let hooked = Arc::new(Hooked { inner: soft, before, hook: Mutex::default() });
    let joint = Joint::new(Arc::clone(&hooked));
    let domain = SoftDomain::<HostAddr>::new(
        Geometry::new(PageSizes::X86, Range::ALL),
        Limits::NONE,
        Shootdown::new(0),
    );
    let outside = Arc::new(Outside::new(mirror(domain.clone(), true)));
    let (joining, to) = (Arc::clone(&outside), Arc::clone(&joint));
    *hooked.hook.lock() = Some(Box::new(move || joining.bind(Binding::Domain(to)).unwrap()));
    call(&joint);
    assert!(hooked.hook.lock().is_none());
    assert!(matches!(outside.binding(), Binding::Domain(_)));
    assert_eq!(outside.mirror().failures(), 0);
    mappings(&*domain).iter().map(|mapping| mapping.range.first().0 >> 12).collect()
}

#[test]
fn a_mirror_that_joins_while_something_is_mapped_or_unmapped_has_it_right() {
    // rule V20
    for before in [true, false] {
        let map = |joint: &Joint<Hooked>| {
            joint.map(Map::new(page(2), GuestPhys(0x2000), Prot::RW)).unwrap();
        };
        assert_eq!(joined_during(before, map), [1, 2, 3], "before: {before}");
        let unmap = |joint: &Joint<Hooked>| {
            let mut gather = Gather::new();
            joint.unmap(range(0, 0x2fff), &mut gather).unwrap();
            joint.iotlb_sync(&mut gather).unwrap();
        };
        assert_eq!(joined_during(before, unmap), [3], "before: {before}");
        // What leads to no memory is refused when it is found that there is a mirror, and goes again.
        if before {
            let nowhere = |joint: &Joint<Hooked>| {
                let mapped = joint.map(Map::new(page(2), GuestPhys(1 << 40), Prot::RW));
                assert!(matches!(mapped, Err(Error::Unsupported(_))));
                assert_eq!(joint.iova_to_phys(page(2).first()), None);
            };
            assert_eq!(joined_during(before, nowhere), [1, 3]);
        }
    }
}

#[test]
fn mirrors_come_and_go_while_others_map() {
    // rule V20
    let soft =
        SoftDomain::new(Geometry::new(PageSizes::X86, Range::ALL), Limits::NONE, Shootdown::new(0));
    let joint = Joint::new(soft);
    let far = Far::plain();
    let over = AtomicBool::new(false);
    let seed = TestRunner::default().rng().next_u64();
    thread::scope(|scope| {
        let mappers: Vec<_> = (0..2u64)
            .map(|half| {
                let joint = &joint;
                scope.spawn(move || {
                    let mut held = [false; 64];
                    let mut state = seed.wrapping_add(half);
                    for _ in 0..20_000 {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                        let n = (state >> 40) % 64;
                        let at = page(half * 64 + n);
                        if held[n as usize] {
                            let mut gather = Gather::new();
                            assert_eq!(joint.unmap(at, &mut gather), Ok(4096));
                            joint.iotlb_sync(&mut gather).unwrap();
                        } else {
                            joint.map(Map::new(at, GuestPhys(n << 12), Prot::RW)).unwrap();
                        }
                        held[n as usize] ^= true;
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                far.outside.bind(Binding::Domain(Arc::clone(&joint))).unwrap();
                thread::yield_now();
                far.outside.bind(Binding::Blocked).unwrap();
                assert!(far.seen().is_empty());
            }
            far.outside.bind(Binding::Domain(Arc::clone(&joint))).unwrap();
        });
        mappers.into_iter().for_each(|mapper| mapper.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
    let here: Vec<_> = mappings(&*joint).iter().map(|m| m.range.first().0).collect();
    let there: Vec<_> = far.seen().into_keys().collect();
    assert_eq!(here, there);
    assert_eq!(far.outside.mirror().failures(), 0);
}
