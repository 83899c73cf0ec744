//! Dirty pages (rule L63).

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_iommu::{Domain, Error, HostAddr, Iova, Prot};
use ringfence_vfio::{
    DirtyMap, Tuning,
    kernel::{IommufdKernel, MapFlags},
};
use ringfence_vfio_testing::fake::{self, Memory};
use rustix::io::Errno;

use crate::common::{Ioas, Kernel, PAGE, memory, process, range, to, type1, unmap};

/// A container with a group of emulated devices only, whose writes are known.
fn with_known_writes() -> Kernel {
    let kernel = fake::Type1::new(fake::FakeConfig::default());
    let notify: fake::Notify = Arc::new(|_, _, _| ());
    kernel.attach_emulated(GROUP, notify).unwrap();
    kernel
}

const GROUP: u32 = 7;

fn dirty_pages(map: &DirtyMap) -> Vec<u64> {
    map.iter().map(|iova| iova.0 / PAGE).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn each_write_is_reported_once(
        chunk in prop_oneof![Just(PAGE), Just(8 * PAGE), Just(128 * PAGE)],
        // For each unit: the gap before it, and its length.
        units in prop::collection::vec((0..3_u64, 1..90_u64), 1..5),
        rounds in prop::collection::vec(prop::collection::vec(0..200_u64, 0..6), 1..4),
    ) {
        // rule L63
        let (fake, (_kept, vaddr)) = (with_known_writes(), memory(400));
        let domain = type1(&fake, Tuning { merge: false, chunk });
        let mut mapped = std::collections::BTreeSet::new();
        let mut at = 3;
        for (gap, pages) in units {
            at += gap;
            let target = HostAddr(vaddr + at * PAGE);
            domain.map(to(range(at, pages), target, Prot::RW)).unwrap();
            mapped.extend(at..at + pages);
            at += pages;
        }
        let whole = range(0, at.max(220));
        domain.start_dirty().unwrap();
        domain.start_dirty().unwrap();
        let mut map = DirtyMap::new(whole, PAGE).unwrap();
        let pinned = *mapped.first().unwrap();
        fake.pin_pages(GROUP, pinned * PAGE, 1, MapFlags::READ | MapFlags::WRITE).unwrap();
        for writes in rounds {
            // The holder of a pin may write to the page at any time.
            let mut wanted = std::collections::BTreeSet::from([pinned]);
            for page in writes {
                let wrote = fake.rw_write(page * PAGE + 7, &[1]).is_ok();
                prop_assert_eq!(wrote, mapped.contains(&page));
                wanted.extend(wrote.then_some(page));
            }
            domain.read_dirty(whole, &mut map).unwrap();
            prop_assert_eq!(dirty_pages(&map), wanted.into_iter().collect::<Vec<_>>());
            map.clear();
        }
        domain.stop_dirty().unwrap();
        fake.unpin_pages(pinned * PAGE, 1);
    }
}

#[test]
fn a_range_that_cuts_a_mapping_is_not_read() {
    let (fake, (_kept, vaddr)) = (process(1 << 20).0, memory(8));
    let domain = type1(&fake, Tuning::default());
    domain.map(to(range(0, 8), HostAddr(vaddr), Prot::RW)).unwrap();
    let mut map = DirtyMap::new(range(0, 8), PAGE).unwrap();
    assert!(domain.read_dirty(range(0, 8), &mut map).is_err(), "it was not started");
    domain.start_dirty().unwrap();
    fake.dma_write(0, &[1]).unwrap();
    let cut = domain.read_dirty(range(0, 4), &mut map);
    assert!(matches!(cut, Err(Error::WouldSplit { .. })), "{cut:?}");
    domain.read_dirty(range(0, 8), &mut map).unwrap();
    assert!(map.is_dirty(Iova(0)), "no bit was lost");
}

#[test]
fn an_unmap_reports_what_was_written_before() {
    // rule L63
    let (fake, (_kept, vaddr)) = (process(1 << 20).0, memory(300));
    let domain = type1(&fake, Tuning { merge: false, chunk: 64 * PAGE });
    domain.map(to(range(5, 200), HostAddr(vaddr), Prot::RW)).unwrap();
    domain.map(to(range(205, 3), HostAddr(vaddr + 200 * PAGE), Prot::RW)).unwrap();
    domain.start_dirty().unwrap();
    let whole = range(0, 256);
    let mut map = DirtyMap::new(whole, PAGE).unwrap();
    domain.read_dirty(whole, &mut map).unwrap();
    for page in [5, 68, 69, 204, 207] {
        fake.dma_write(page * PAGE, &[1]).unwrap();
    }
    map.clear();
    let removed = domain.unmap_dirty(whole, &mut map);
    assert_eq!(removed, Ok(203 * u128::from(PAGE)));
    for page in [5, 68, 69, 204, 207] {
        assert!(map.is_dirty(Iova(page * PAGE)), "{page}");
    }
    assert_eq!((fake.mappings(), domain.usage().mismatches), (0, 0));
}

#[test]
fn an_iommufd_reports_by_its_tables() {
    // rule L63
    let ((_kept, vaddr), ioas) = (memory(200), Ioas::new(1 << 20, Memory::process()));
    let (fake, device) = (&ioas.kernel, ioas.device);
    let domain = ioas.domain(Tuning { merge: false, chunk: 64 * PAGE });
    let whole = range(0, 256);
    domain.map(to(range(5, 200), HostAddr(vaddr), Prot::RW)).unwrap();
    let mut map = DirtyMap::new(whole, PAGE).unwrap();
    assert!(matches!(domain.start_dirty(), Err(Error::Unsupported(_))));
    assert!(matches!(domain.read_dirty(whole, &mut map), Err(Error::Unsupported(_))));
    let table = domain.dirty_table(device).unwrap();
    fake.attach(device, table).unwrap();
    domain.start_dirty().unwrap();
    let mut reported = |writes: &[u64]| {
        map.clear();
        writes.iter().for_each(|page| fake.dma_write(device, page * PAGE + 9, &[1]).unwrap());
        domain.read_dirty(whole, &mut map).unwrap();
        assert_eq!(dirty_pages(&map), writes);
    };
    reported(&[]);
    reported(&[5, 68, 69, 204]);
    reported(&[]);
    reported(&[70]);
    fake.dma_write(device, 71 * PAGE, &[1]).unwrap();
    map.clear();
    assert_eq!(domain.unmap_dirty(whole, &mut map), Ok(200 * u128::from(PAGE)));
    assert_eq!(dirty_pages(&map), [71]);
    domain.stop_dirty().unwrap();
    assert_eq!(unmap(&domain, whole), Ok(0));
    fake.detach(device).unwrap();
    drop(domain);
    assert_eq!(fake.track_dirty(table, true), Err(Errno::NOENT), "the table is gone");
    // Hardware without tracking returns an error.
    let domain = ioas.domain(Tuning::default());
    let other = fake.bind(&fake::Group { id: 1, ..Default::default() }, false);
    assert!(matches!(domain.dirty_table(other), Err(Error::Unsupported(_))));
}
