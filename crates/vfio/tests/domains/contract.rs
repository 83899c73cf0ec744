//! The contract of every domain, checked against a list of pages: for the domains over a kernel and
//! for the software one.

use proptest::prelude::*;
use ringfence_iommu::{
    Domain, Error, Geometry, HostAddr, Iova, PageSizes, Prot, Range, ReservedKind, ReservedRegion,
    SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_vfio::{Iommufd, Tuning, Usage, kernel::IommufdKernel};
use ringfence_vfio_testing::fake::{self, Memory};
use rustix::io::Errno;

use crate::common::{
    GIB, Ioas, Kernel, MERGE, PAGE, kernel, map, memory, process, range, to, type1, unmap,
};

/// Pages around the MSI window: the last before it, and the first behind it.
const BASE: u64 = 0xfee0_0000 / PAGE - 32;
const HOLE: std::ops::Range<u64> = 0xfee0_0000 / PAGE..0xfef0_0000 / PAGE;
const SPAN: u64 = 64 + 256;

#[derive(Clone, Copy, Debug)]
enum Step {
    Map { first: u64, pages: u64, target: u64, prot: u8 },
    Unmap { first: u64, pages: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let place = || prop_oneof![0..40_u64, 280..SPAN];
    prop_oneof![
        (place(), 1..12_u64, 0..1000_u64, 0..4_u8)
            .prop_map(|(first, pages, target, prot)| Step::Map { first, pages, target, prot }),
        (place(), prop_oneof![1..12_u64, Just(SPAN)])
            .prop_map(|(first, pages)| Step::Unmap { first, pages }),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    unit: (u64, u64),
    target: u64,
}

/// Runs `steps` on a domain and on a list of pages, and compares everything that can be seen.
fn program<D: Domain<Target = HostAddr>>(
    domain: &D,
    memory: u64,
    steps: &[Step],
    mut look: impl FnMut(u64, Option<u64>),
) {
    let mut pages: Vec<Option<Page>> = vec![None; 2 * SPAN as usize];
    for &step in steps {
        match step {
            Step::Map { first, pages: count, target, prot } => {
                let wanted = range(BASE + first, count);
                let prot = Prot::from_bits_truncate(prot.into());
                let in_hole = (first..first + count).any(|page| HOLE.contains(&(BASE + page)));
                let held =
                    pages[first as usize..(first + count) as usize].iter().any(Option::is_some);
                let made = domain
                    .map(to(wanted, HostAddr(memory + target * PAGE), prot))
                    .and_then(|()| domain.iotlb_sync_map(wanted).map(drop));
                match made {
                    Ok(()) => {
                        assert!(!in_hole && !held && prot != Prot::empty(), "{step:?}");
                        for page in 0..count {
                            let target = memory + (target + page) * PAGE;
                            let unit = (first, first + count - 1);
                            pages[(first + page) as usize] = Some(Page { unit, target });
                        }
                    }
                    Err(Error::NoPermission(_)) => assert!(prot.is_empty(), "{step:?}"),
                    Err(Error::Reserved { .. }) => assert!(in_hole, "{step:?}"),
                    Err(Error::Exists { at, .. }) => {
                        assert!(held, "{step:?}");
                        assert!(domain.iova_to_phys(at).is_some());
                    }
                    Err(error) => panic!("{step:?}: {error}"),
                }
            }
            Step::Unmap { first, pages: count } => {
                let there = &mut pages[first as usize..(first + count) as usize];
                let last = first + count - 1;
                let split = there.iter().flatten().any(|it| it.unit.0 < first || it.unit.1 > last);
                let held = there.iter().flatten().count() as u128 * u128::from(PAGE);
                match unmap(domain, range(BASE + first, count)) {
                    Ok(bytes) => {
                        assert!(!split, "{step:?}");
                        assert_eq!(bytes, held, "{step:?}");
                        there.fill(None);
                    }
                    Err(Error::WouldSplit { .. }) => assert!(split, "{step:?}"),
                    Err(error) => panic!("{step:?}: {error}"),
                }
            }
        }
        for (page, held) in (0..).zip(&pages) {
            let iova = (BASE + page) * PAGE;
            let target = held.map(|held| held.target);
            let found = domain.iova_to_phys(Iova(iova + 5)).map(|found| found.0);
            assert_eq!(found, target.map(|target| target + 5), "{iova:#x} after {step:?}");
            look(iova, target);
        }
    }
}

/// Checks that a device reads what the domain translates: at each address the 8 bytes that hold
/// their own address, unless it may only write there.
fn agrees(
    read: impl Fn(u64, &mut [u8]) -> bool,
    write: impl Fn(u64) -> bool,
) -> impl FnMut(u64, Option<u64>) {
    move |iova, target| {
        let mut bytes = [0; 8];
        let found = read(iova, &mut bytes).then(|| u64::from_ne_bytes(bytes));
        match found {
            Some(_) => assert_eq!(found, target, "{iova:#x}"),
            None => assert_eq!(write(iova + 8), target.is_some(), "{iova:#x}"),
        }
    }
}

/// Memory in which each page holds its own address.
fn signed(pages: u64) -> (Vec<u8>, u64) {
    let (mut memory, first) = memory(pages);
    let offset = first as usize - memory.as_ptr().addr();
    for page in 0..pages {
        let at = offset + (page * PAGE) as usize;
        memory[at..at + 8].copy_from_slice(&(first + page * PAGE).to_ne_bytes());
    }
    (memory, first)
}

fn check_usage(usage: Usage, kernel: &Kernel) {
    assert_eq!(usage.entries, kernel.mappings() as u64);
    assert_eq!(usage.mismatches, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_domain_maps_what_it_says(
        steps in prop::collection::vec(step(), 1..40),
        chunk in prop_oneof![Just(PAGE), Just(4 * PAGE), Just(GIB)],
        merge in any::<bool>(),
    ) {
        // rule L31, rule L33, rule L36, rule L51, rule L55
        let tuning = Tuning { merge, chunk };
        let (_kept, vaddr) = signed(1024);
        let (fake, owner) = process(1 << 20);
        let domain = type1(&fake, tuning);
        let reached = agrees(
            |iova, into| fake.dma_read(iova, into).is_ok(),
            |iova| fake.dma_write(iova, &[1]).is_ok(),
        );
        program(&domain, vaddr, &steps, reached);
        check_usage(domain.usage(), &fake);
        drop(domain);
        prop_assert_eq!((fake.mappings(), fake.pinned(), owner.used()), (0, 0, 0));

        let ioas = Ioas::new(1 << 20, Memory::process());
        let (fake, device) = (&ioas.kernel, ioas.device);
        let domain = ioas.domain(tuning);
        let reached = agrees(
            |iova, into| fake.dma_read(device, iova, into).is_ok(),
            |iova| fake.dma_write(device, iova, &[1]).is_ok(),
        );
        program(&domain, vaddr, &steps, reached);
        drop(domain);
        prop_assert_eq!((fake.pinned(), ioas.owner.used()), (0, 0));

        let geometry = Geometry {
            reserved: [ReservedRegion {
                range: Range::new(Iova(0xfee0_0000), Iova(0xfeef_ffff)).unwrap(),
                kind: ReservedKind::Reserved,
            }].into(),
            ..Geometry::new(PageSizes::X86, range(0, 1 << 27))
        };
        let soft = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(1));
        program(&soft, vaddr, &steps, |_, _| ());
    }
}

#[test]
fn the_geometry_is_the_kernels() {
    let ((fake, _), ioas) = (kernel(1), Ioas::new(1, Memory::process()));
    for geometry in [type1(&fake, MERGE).geometry(), ioas.domain(MERGE).geometry()] {
        assert_eq!(geometry.aperture, range(0, 1 << 27));
        assert_eq!(geometry.page_sizes.granule(), PAGE);
        let hole = geometry.reserved[0];
        assert_eq!((hole.range, hole.kind), (range(0xf_ee00, 0x100), ReservedKind::Msi));
        assert_eq!(geometry.reserved.len(), 1);
    }
    let domain = type1(&fake, MERGE);
    let (caps, beyond) = (domain.capabilities(), range(1 << 27, 1));
    assert!(!caps.deferred_flush && caps.enforces_prot);
    let outside = map(&domain, beyond, PAGE);
    assert!(matches!(outside, Err(Error::OutsideAperture { .. })), "{outside:?}");
    for (first, target) in [(1, 0), (0, 1)] {
        let odd = Range::from_len(Iova(first), PAGE).unwrap();
        assert!(matches!(map(&domain, odd, target), Err(Error::Unaligned { .. })));
    }
    let high = map(&domain, range(0, 2), u64::MAX - (PAGE - 1));
    assert!(matches!(high, Err(Error::TargetOverflow(_))), "{high:?}");
    assert!(matches!(
        unmap(&domain, Range::new(Iova(1), Iova(2)).unwrap()),
        Err(Error::Unaligned { .. })
    ));
}

#[test]
fn a_group_that_comes_changes_the_geometry() {
    // rule L61
    let (fake, _) = kernel(1 << 20);
    let domain = type1(&fake, MERGE);
    let group = ringfence_vfio_testing::fake::Group {
        id: 7,
        iommu: 1,
        reserved: vec![ReservedRegion { range: range(0, 1), kind: ReservedKind::Direct }],
        ..Default::default()
    };
    fake.attach(&group).unwrap();
    assert!(domain.geometry().is_mappable(Iova(0)));
    domain.refresh().unwrap();
    let geometry = domain.geometry();
    // The hole lies at the end, and the aperture begins behind it.
    assert!(!geometry.is_mappable(Iova(0)) && geometry.is_mappable(Iova(PAGE)));
}

#[test]
fn an_address_space_goes_when_nothing_needs_it() {
    let ioas = Ioas::new(8, Memory::process());
    let domain = ioas.domain(MERGE);
    let name = domain.ioas();
    ioas.kernel.detach(ioas.device).unwrap();
    // Without a device there is no hole.
    domain.refresh().unwrap();
    assert!(domain.geometry().is_mappable(Iova(0xfee0_0000)));
    let (_kept, vaddr) = memory(2);
    map(&domain, range(0xf_ee00, 1), vaddr).unwrap();
    assert_eq!((ioas.kernel.pinned(), domain.usage().entries), (0, 1));
    assert!(ioas.kernel.attach(ioas.device, name).is_err(), "it cannot have that address");
    drop(domain);
    assert_eq!(ioas.kernel.destroy(name), Err(Errno::NOENT), "it is gone");
}

#[test]
fn type1_leaves_the_very_last_page_out() {
    let fake = fake::Type1::new(fake::FakeConfig::default());
    let reserved = Vec::new();
    fake.attach(&fake::Group { aperture: Range::ALL, reserved, ..Default::default() }).unwrap();
    let domain = type1(&fake, MERGE);
    let aperture = domain.geometry().aperture;
    assert_eq!((aperture.first(), aperture.last()), (Iova(0), Iova(u64::MAX - PAGE)));
    let ((_kept, vaddr), top) = (memory(2), u64::MAX / PAGE);
    let made = map(&domain, range(top - 1, 2), vaddr);
    assert!(matches!(made, Err(Error::OutsideAperture { .. })), "{made:?}");
    map(&domain, range(top - 1, 1), vaddr).unwrap();
    assert_eq!(unmap(&domain, Range::ALL), Ok(u128::from(PAGE)));
    // An iommufd can unmap it.
    let ioas = Ioas::new(8, Memory::process());
    let domain = Iommufd::new(ioas.kernel, Tuning::default()).unwrap();
    assert_eq!(domain.geometry().aperture, Range::ALL);
    map(&domain, range(top - 1, 2), vaddr).unwrap();
    assert_eq!(unmap(&domain, Range::ALL), Ok(2 * u128::from(PAGE)));
}
