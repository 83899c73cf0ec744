//! How few kernel mappings are used.

use ringfence_iommu::{Domain, Error, HostAddr, Prot};
use ringfence_vfio::{Tuning, Type1};
use ringfence_vfio_testing::fake::{self, Event, FakeConfig, Group, Memory};

use crate::common::{GIB, Ioas, MERGE, PAGE, bytes, kernel, map, range, to, type1, unmap};

const TARGET: u64 = 0x7f00_0000_0000;

#[test]
fn a_quarter_of_a_gigabyte_page_by_page_is_one_entry() {
    // rule L51
    let pages = (256 << 20) / PAGE;
    let (fake, owner) = kernel(pages);
    let whole = range(0, pages);
    let domain = type1(&fake, MERGE);
    for page in 0..pages {
        let target = HostAddr(TARGET + page * PAGE);
        domain.map(to(range(page, 1), target, Prot::RW)).unwrap();
    }
    assert_eq!(fake.mappings(), 0, "no sync was made");
    domain.iotlb_sync_map(whole).unwrap();
    assert_eq!((fake.mappings(), owner.used()), (1, pages));
    assert_eq!(domain.available(), Some(65_534));
    assert_eq!(unmap(&domain, whole), Ok(whole.len()));
    assert_eq!((fake.mappings(), owner.used(), domain.available()), (0, 0, Some(65_535)));

    let batch: Vec<_> =
        (0..pages).map(|n| to(range(n, 1), HostAddr(TARGET + n * PAGE), Prot::RW)).collect();
    let plain = type1(&fake, Tuning::default());
    plain.map_batch(&batch).unwrap();
    assert_eq!(fake.mappings(), 1, "a batch needs no promise");
}

#[test]
fn sixty_four_gigabytes_are_an_entry_a_gigabyte() {
    let pages = 64 * GIB / PAGE;
    let (fake, owner) = kernel(pages);
    // Not aligned to a gigabyte.
    let whole = bytes(4 * GIB + (2 << 20), 64 * GIB);
    for tuning in [MERGE, Tuning::default()] {
        let domain = type1(&fake, tuning);
        map(&domain, whole, TARGET).unwrap();
        assert_eq!((fake.mappings(), owner.used()), (64, pages));
        assert_eq!(domain.usage().entries, 64);
        assert_eq!(unmap(&domain, whole), Ok(whole.len()));
    }
    let ioas = Ioas::new(pages, Memory::pretended(1 << 40));
    let domain = ioas.domain(MERGE);
    let step = 256 << 10;
    for at in (0..64 * GIB).step_by(step as usize) {
        let part = bytes(whole.first().0 + at, step);
        domain.map(to(part, HostAddr(TARGET + at), Prot::READ)).unwrap();
    }
    domain.iotlb_sync_map(whole).unwrap();
    assert_eq!((domain.usage().entries, ioas.owner.used()), (64, pages));
    drop(domain);
    assert_eq!((ioas.owner.used(), ioas.kernel.pinned()), (0, 0));
}

#[test]
fn only_what_goes_on_in_every_way_becomes_one() {
    let (fake, _) = kernel(1000);
    let domain = type1(&fake, MERGE);
    let parts = [
        (0, 0, Prot::RW),
        (1, 1, Prot::RW),
        (2, 2, Prot::READ),
        (3, 3, Prot::READ),
        (4, 5, Prot::READ),
        (6, 7, Prot::READ),
    ];
    // Mapped in another order: only the addresses count.
    for (page, target, prot) in parts.into_iter().rev() {
        domain.map(to(range(page, 1), HostAddr(target * PAGE), prot)).unwrap();
    }
    domain.iotlb_sync_map(range(0, 7)).unwrap();
    assert_eq!(fake.mappings(), 4);
    // An existing mapping is left alone: its new neighbour gets its own.
    map(&domain, range(7, 1), 8 * PAGE).unwrap();
    assert_eq!(fake.mappings(), 5);
    for page in [0, 1, 2, 3] {
        let split = unmap(&domain, range(page, 1));
        assert!(matches!(split, Err(Error::WouldSplit { .. })), "{split:?}");
    }
    assert_eq!(fake.mappings(), 5, "nothing was removed");
    assert_eq!(unmap(&domain, range(2, 2)), Ok(2 * u128::from(PAGE)));
    assert_eq!(unmap(&domain, range(6, 1)), Ok(u128::from(PAGE)));
    assert_eq!(unmap(&domain, range(0, 9)), Ok(4 * u128::from(PAGE)));
    assert_eq!(fake.mappings(), 0);
}

#[test]
fn without_a_promise_everything_can_be_unmapped_as_it_was_mapped() {
    let (fake, _) = kernel(1000);
    let domain = type1(&fake, Tuning::default());
    for page in 0..8 {
        domain.map(to(range(page, 1), HostAddr(TARGET + page * PAGE), Prot::RW)).unwrap();
    }
    domain.iotlb_sync_map(range(0, 8)).unwrap();
    assert_eq!(fake.mappings(), 8);
    for page in [3, 0, 7] {
        assert_eq!(unmap(&domain, range(page, 1)), Ok(u128::from(PAGE)));
    }
    // Mappings that touch are removed with one request, which must not cover a gap: that may belong
    // to others.
    fake.events();
    assert_eq!(unmap(&domain, range(0, 8)), Ok(5 * u128::from(PAGE)));
    let unmapped = fake.events().into_iter().filter_map(|event| match event {
        Event::Unmapped { iova, asked, .. } => Some((iova / PAGE, asked)),
        _ => None,
    });
    let unmapped: Vec<_> = unmapped.collect();
    let pages = [1, 2, 4, 5, 6];
    let inside =
        |(first, count): &(u64, u64)| (*first..first + count).all(|it| pages.contains(&it));
    assert!(unmapped.iter().all(inside), "{unmapped:?}");
    assert_eq!(domain.usage(), Default::default());
}

#[test]
fn what_is_synced_by_one_is_not_what_another_has_noted() {
    let (fake, _) = kernel(1000);
    let domain = type1(&fake, MERGE);
    domain.map(to(range(0, 1), HostAddr(0), Prot::RW)).unwrap();
    domain.map(to(range(1, 1), HostAddr(PAGE), Prot::RW)).unwrap();
    domain.iotlb_sync_map(range(0, 1)).unwrap();
    domain.iotlb_sync_map(range(1, 1)).unwrap();
    assert_eq!(fake.mappings(), 2, "each has been synced by itself");
    // A mapping that was never synced is removed without the kernel.
    domain.map(to(range(2, 1), HostAddr(2 * PAGE), Prot::RW)).unwrap();
    assert_eq!(unmap(&domain, range(1, 2)), Ok(2 * u128::from(PAGE)));
    domain.iotlb_sync_map(range(0, 3)).unwrap();
    assert_eq!(fake.mappings(), 1);
}

#[test]
fn a_budget_that_is_spent_says_so_and_leaves_nothing() {
    // rule L51
    let kernel = fake::Type1::new(FakeConfig {
        budget: 3,
        memory: Memory::pretended(1 << 20),
        ..FakeConfig::default()
    });
    kernel.attach(&Group::default()).unwrap();
    let tuning = Tuning { merge: false, chunk: PAGE };
    let domain = Type1::new(kernel, tuning).unwrap();
    map(&domain, range(0, 2), 0).unwrap();
    for _ in 0..2 {
        let full = map(&domain, range(8, 2), 0);
        assert!(matches!(full, Err(Error::Full { used: 3, limit: 3, .. })), "{full:?}");
        assert_eq!(domain.kernel().mappings(), 2);
        assert_eq!(domain.iova_to_phys(range(8, 1).first()), None);
    }
    map(&domain, range(8, 1), 0).unwrap();
    assert_eq!((domain.available(), domain.usage().entries), (Some(0), 3));
    assert_eq!(unmap(&domain, range(0, 9)), Ok(3 * u128::from(PAGE)));
    assert_eq!(domain.available(), Some(3));
}
