//! Changing process addresses (rules L59, L60).

use ringfence_iommu::{Domain, Error, HostAddr, Prot};
use ringfence_vfio::Tuning;
use ringfence_vfio_testing::fake::Notify;

use crate::common::{MERGE, PAGE, kernel, map, memory, process, range, to, type1, unmap};

const CHUNKED: Tuning = Tuning { merge: false, chunk: 4 * PAGE };

#[test]
fn mappings_get_other_addresses_and_keep_their_place() {
    // rule L59, rule L60
    let (fake, owner) = kernel(100);
    let domain = type1(&fake, CHUNKED);
    map(&domain, range(0, 9), 16 * PAGE).unwrap();
    map(&domain, range(20, 1), 64 * PAGE).unwrap();
    let mut update = domain.begin_vaddr_update().unwrap();
    assert!(matches!(map(&domain, range(30, 1), 0), Err(Error::Unsupported(_))));
    assert!(matches!(unmap(&domain, range(0, 9)), Err(Error::Unsupported(_))));
    assert!(matches!(domain.unmap_all(), Err(Error::Unsupported(_))));
    assert!(matches!(domain.begin_vaddr_update(), Err(Error::Unsupported(_))));
    let mut calls = 0;
    // SAFETY: the memory is pretended.
    unsafe {
        update.finish(|_, old| {
            calls += 1;
            HostAddr(old.0 + (1 << 30))
        })
    }
    .unwrap();
    drop(update);
    assert_eq!(calls, 2);
    for (page, target) in [(0, 16), (8, 24), (20, 64)] {
        let found = domain.iova_to_phys(range(page, 1).first());
        assert_eq!(found, Some(HostAddr((1 << 30) + target * PAGE)));
    }
    assert_eq!((fake.mappings(), owner.used()), (4, 10));
    map(&domain, range(30, 1), 0).unwrap();
    assert_eq!(unmap(&domain, range(0, 40)), Ok(11 * u128::from(PAGE)));
}

#[test]
fn an_update_that_is_dropped_gives_the_old_addresses_back() {
    let (fake, _) = kernel(100);
    let domain = type1(&fake, CHUNKED);
    map(&domain, range(0, 9), 0).unwrap();
    drop(domain.begin_vaddr_update().unwrap());
    // If one address were missing, another update could not begin.
    let mut update = domain.begin_vaddr_update().unwrap();
    // SAFETY: the memory is pretended.
    let odd = unsafe { update.finish(|_, _| HostAddr(1)) };
    assert!(matches!(odd, Err(Error::Unaligned { .. })), "{odd:?}");
    // SAFETY: as above.
    let high = unsafe { update.finish(|_, _| HostAddr(u64::MAX - (PAGE - 1))) };
    assert!(matches!(high, Err(Error::TargetOverflow(_))), "{high:?}");
    drop(update);
    drop(domain.begin_vaddr_update().unwrap());
    assert_eq!(domain.iova_to_phys(range(8, 1).first()), Some(HostAddr(8 * PAGE)));
}

#[test]
fn what_was_noted_and_not_synced_moves_too() {
    let ((_kept, vaddr), (fake, _)) = (memory(8), process(100));
    let domain = type1(&fake, MERGE);
    domain.map(to(range(0, 1), HostAddr(vaddr), Prot::RW)).unwrap();
    let mut update = domain.begin_vaddr_update().unwrap();
    assert!(matches!(domain.iotlb_sync_map(range(0, 1)), Err(Error::Unsupported(_))));
    // SAFETY: the memory is pretended.
    unsafe { update.finish(|_, _| HostAddr(vaddr + 5 * PAGE)) }.unwrap();
    drop(update);
    domain.iotlb_sync_map(range(0, 1)).unwrap();
    assert_eq!(fake.translate(0, false).map(|it| it.0), Some(HostAddr(vaddr + 5 * PAGE)));
}

#[test]
fn a_kernel_that_cannot_says_so() {
    // rule L59
    let (fake, _) = kernel(100);
    let domain = type1(&fake, CHUNKED);
    let notify: Notify = std::sync::Arc::new(|_, _, _| ());
    fake.attach_emulated(9, notify).unwrap();
    let refused = domain.begin_vaddr_update();
    assert!(matches!(refused, Err(Error::Unsupported(_))));
    drop(refused);
    map(&domain, range(0, 1), 0).unwrap();
}
