//! The fake iommufd.

use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};
use ringfence_vfio::kernel::{Bitmap, Id, IommufdKernel, KernelResult, MapFlags};
use ringfence_vfio_testing::fake::{Group, Iommufd, Kind, Owner, Refused, Step};
use rustix::io::Errno;

use crate::common::{PAGE, RW, assert_invalidated_before_unpin, group, pages, range};

/// Maps pages at an IOVA; both are numbers of pages.
fn map(kernel: &Iommufd, ioas: Id, iova: u64, vaddr: u64, pages: u64) -> KernelResult<u64> {
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    unsafe { kernel.map(ioas, RW, Some(iova * PAGE), vaddr * PAGE, pages * PAGE) }
}

fn unmap(kernel: &Iommufd, ioas: Id, iova: u64, pages: u64) -> KernelResult<u64> {
    Ok(kernel.unmap(ioas, iova * PAGE, pages * PAGE)? / PAGE)
}

#[test]
fn what_a_map_is_refused_for() {
    let kernel = Iommufd::new(Owner::default(), pages(100));
    let ioas = kernel.new_ioas().unwrap();
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    let raw =
        |ioas, flags, iova, vaddr, size| unsafe { kernel.map(ioas, flags, iova, vaddr, size) };
    let top = u64::MAX;
    for (flags, iova, vaddr, size, number) in [
        (MapFlags::VADDR, Some(top), 0, 0, Errno::OPNOTSUPP),
        (MapFlags::empty(), Some(top), 0, PAGE, Errno::OVERFLOW),
        (MapFlags::empty(), None, 0, top, Errno::OVERFLOW),
        (MapFlags::empty(), None, 0, PAGE, Errno::INVAL),
        (RW, Some(0), 0, 0, Errno::INVAL),
        (RW, Some(0), top, 2, Errno::OVERFLOW),
        (RW, Some(top - 1), 0, 3, Errno::OVERFLOW),
    ] {
        assert_eq!(
            raw(ioas, flags, iova, vaddr, size),
            Err(number),
            "{flags:?} {iova:?} {size:#x}"
        );
    }
    assert_eq!(raw(Id::new(99), RW, None, 0, PAGE), Err(Errno::NOENT));
    let device = kernel.bind(&Group::default(), false);
    kernel.attach(device, ioas).unwrap();
    for (iova, vaddr, size) in [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 1)] {
        assert_eq!(raw(ioas, RW, Some(iova), vaddr, size), Err(Errno::INVAL));
    }
    map(&kernel, ioas, 16, 0, 4).unwrap();
    // Here, what may be mapped is checked before overlaps.
    assert_eq!(raw(ioas, RW, Some(16 * PAGE), 0, 0xfee0_0000), Err(Errno::INVAL));
    assert_eq!(map(&kernel, ioas, 15, 0, 2), Err(Errno::EXIST));
    assert_eq!(raw(ioas, RW, Some(1 << 39), 0, PAGE), Err(Errno::INVAL));
}

#[test]
fn a_mapping_is_never_cut() {
    let kernel = Iommufd::new(Owner::default(), pages(100));
    let ioas = kernel.new_ioas().unwrap();
    for iova in [10, 20, 30] {
        map(&kernel, ioas, iova, 0, 4).unwrap();
    }
    for (iova, count) in [(0, 5), (10, 3), (11, 3), (9, 2), (13, 2), (14, 6)] {
        assert_eq!(unmap(&kernel, ioas, iova, count), Err(Errno::NOENT), "{iova} {count}");
    }
    assert_eq!(unmap(&kernel, ioas, 5, 12), Ok(4));
    assert_eq!(kernel.unmap(ioas, 0, 0), Err(Errno::INVAL));
    assert_eq!(kernel.unmap(ioas, u64::MAX, 1), Err(Errno::OVERFLOW));
    assert_eq!(kernel.unmap(ioas, PAGE, u64::MAX), Err(Errno::OVERFLOW));
    assert_eq!(kernel.unmap(ioas, PAGE, u64::MAX - 1), Err(Errno::OVERFLOW));
    assert_eq!(kernel.unmap(ioas, 0, u64::MAX), Ok(8 * PAGE));
    assert_eq!(kernel.unmap(ioas, 0, u64::MAX), Ok(0));
    assert_eq!(kernel.unmap(Id::new(77), 0, u64::MAX), Err(Errno::NOENT));
}

#[test]
fn pages_are_pinned_while_a_page_table_is_there_and_once_for_all() {
    let owner = Owner::new(10);
    let kernel = Iommufd::new(owner.clone(), pages(1000).with(0, 100, Kind::Scattered(1)));
    let ioas = kernel.new_ioas().unwrap();
    map(&kernel, ioas, 0, 0, 6).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
    let [one, two] = [1, 2].map(|id| kernel.bind(&group(id), true));
    let first = kernel.attach(one, ioas).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (6, 6));
    let second = kernel.new_hwpt(two, ioas, true).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (6, 6), "once for both");
    // The same memory mapped again is charged again, but not above the limit.
    map(&kernel, ioas, 10, 0, 4).unwrap();
    assert_eq!(map(&kernel, ioas, 20, 0, 1), Err(Errno::NOMEM));
    owner.set_capable(true);
    map(&kernel, ioas, 20, 200, 50).unwrap();
    assert_eq!((owner.used(), owner.peak(), kernel.pinned()), (10, 10, 60));
    assert_eq!(unmap(&kernel, ioas, 10, 4), Ok(4));
    assert_eq!((owner.used(), kernel.pinned()), (6, 56));

    for busy in [ioas, first, one] {
        assert_eq!(kernel.destroy(busy), Err(Errno::BUSY));
    }
    kernel.detach(one).unwrap();
    assert_eq!(kernel.destroy(first), Err(Errno::NOENT), "it went with its device");
    assert_eq!((owner.used(), kernel.pinned()), (6, 56));
    kernel.destroy(second).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
    assert_invalidated_before_unpin(&kernel.events());
    kernel.destroy(ioas).unwrap();
    assert_eq!(kernel.destroy(ioas), Err(Errno::NOENT));
}

#[test]
fn nothing_is_left_of_what_failed_at_any_step() {
    let memory = pages(1000).with(0, 20, Kind::Scattered(2));
    let mut failures = 0;
    for step in [Step::Record, Step::Pin, Step::Map, Step::Table] {
        for nth in 1.. {
            let owner = Owner::new(1000);
            let kernel = Iommufd::new(owner.clone(), memory.clone());
            let ioas = kernel.new_ioas().unwrap();
            map(&kernel, ioas, 0, 0, 20).unwrap();
            map(&kernel, ioas, 100, 100, 10).unwrap();
            kernel.fail(step, nth);
            let devices = [1, 2].map(|id| kernel.bind(&group(id), false));
            let mut count = 0;
            for device in devices {
                let attached = kernel.attach(device, ioas);
                if attached.is_err() {
                    assert_eq!(kernel.pinned(), count, "{step:?} {nth}");
                    assert_eq!(kernel.destroy(ioas).is_ok(), count == 0);
                    break;
                }
                count = 30;
            }
            let mapped = map(&kernel, ioas, 200, 0, 10);
            if mapped.is_ok() {
                count += 10;
            }
            if mapped != Err(Errno::NOENT) {
                assert_eq!((owner.used(), kernel.pinned()), (count, count), "{step:?} {nth}");
            }
            assert_invalidated_before_unpin(&kernel.events());
            if kernel.heal() {
                break;
            }
            failures += 1;
        }
    }
    // One record, 40 pages, and each run twice: 11 of the earlier mappings and 5 of the last.
    assert_eq!(failures, 1 + 40 + 32 + 32);
}

#[test]
fn ranges_follow_the_devices_and_what_is_needed_is_kept() {
    let kernel = Iommufd::new(Owner::default(), pages(100));
    let ioas = kernel.new_ioas().unwrap();
    let fresh = kernel.iova_ranges(ioas).unwrap();
    assert_eq!((fresh.ranges, fresh.alignment), (vec![Range::ALL], 1));
    let device = kernel.bind(&Group::default(), false);
    kernel.attach(device, ioas).unwrap();
    let ranges = kernel.iova_ranges(ioas).unwrap();
    let at = |first, last| Range::new(Iova(first), Iova(last)).unwrap();
    let expected = vec![at(0, 0xfedf_ffff), at(0xfef0_0000, (1 << 39) - 1)];
    assert_eq!((ranges.ranges, ranges.alignment), (expected, PAGE));
    // Addresses are chosen from the allowed range, around what is mapped.
    kernel.allow(ioas, &[range(100, 20)]).unwrap();
    assert_eq!(kernel.allow(ioas, &[range(0xfee00, 1)]), Err(Errno::ADDRINUSE));
    assert_eq!(kernel.allow(ioas, &[range(0, 2), range(1, 2)]), Err(Errno::INVAL));
    map(&kernel, ioas, 102, 0, 1).unwrap();
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    let choose = |pages| unsafe { kernel.map(ioas, RW, None, 0, pages * PAGE) };
    assert_eq!(choose(4), Ok(104 * PAGE));
    assert_eq!(choose(2), Ok(100 * PAGE));
    assert_eq!(choose(16), Err(Errno::NOSPC));
    // A device that reserves an allowed or mapped range is refused.
    let hole = |first| Group {
        reserved: vec![ReservedRegion { range: range(first, 1), kind: ReservedKind::Direct }],
        ..group(5)
    };
    for refused in [hole(119), Group { aperture: range(0, 110), ..group(5) }] {
        let device = kernel.bind(&refused, false);
        assert_eq!(kernel.attach(device, ioas), Err(Errno::ADDRINUSE));
    }
    let device = kernel.bind(&hole(120), false);
    kernel.attach(device, ioas).unwrap();
    assert_eq!(map(&kernel, ioas, 120, 0, 1), Err(Errno::INVAL));
    kernel.detach(device).unwrap();
    map(&kernel, ioas, 120, 0, 1).unwrap();
}

#[test]
fn a_device_reaches_its_address_space_and_its_writes_are_reported() {
    let mut buffer = vec![0_u8; 9 * PAGE as usize];
    let addr = (buffer.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
    let kernel = Iommufd::default();
    let [first, second] = [0; 2].map(|_| kernel.new_ioas().unwrap());
    let device = kernel.bind(&group(0), true);
    let plain = kernel.bind(&group(1), false);
    assert_eq!(kernel.new_hwpt(plain, first, true), Err(Errno::OPNOTSUPP));
    let hwpt = kernel.new_hwpt(device, first, true).unwrap();
    kernel.attach(device, hwpt).unwrap();
    assert_eq!(kernel.attach(plain, hwpt), Err(Errno::INVAL));
    // SAFETY: the buffer exists until everything is unmapped.
    unsafe { kernel.map(first, RW, Some(0), addr, 4 * PAGE) }.unwrap();
    // SAFETY: as above.
    unsafe { kernel.map(first, MapFlags::READ, Some(4 * PAGE), addr, PAGE) }.unwrap();
    // SAFETY: as above.
    unsafe { kernel.map(second, RW, Some(0), addr + 4 * PAGE, 4 * PAGE) }.unwrap();
    kernel.dma_write(device, 0, &[1]).unwrap();
    let read = |iova, pages, words: &mut [u64]| {
        kernel.dirty(hwpt, iova * PAGE, pages * PAGE, Bitmap { page: PAGE, words })
    };
    assert_eq!(read(0, 4, &mut [0]), Err(Errno::INVAL), "not tracking");
    kernel.track_dirty(hwpt, true).unwrap();
    kernel.dma_write(device, 2 * PAGE - 1, &[2, 3]).unwrap();
    let mut back = [0; 2];
    kernel.dma_read(device, 2 * PAGE - 1, &mut back).unwrap();
    assert_eq!(back, [2, 3]);
    let mut words = [0b1000];
    read(0, 5, &mut words).unwrap();
    assert_eq!(words, [0b1110], "bits are set, never cleared");
    read(0, 5, &mut words).unwrap();
    assert_eq!(words, [0b1110]);
    let mut words = [0];
    read(0, 5, &mut words).unwrap();
    assert_eq!(words, [0], "clean after the read");
    assert_eq!(read(0, 6, &mut [0]), Err(Errno::INVAL), "not all of it is mapped");
    assert_eq!(read(0, 4, &mut []), Err(Errno::INVAL));
    let refused = Refused { iova: 4 * PAGE, write: true };
    assert_eq!(kernel.dma_write(device, 4 * PAGE, &[1]), Err(refused));
    assert!(kernel.dma_read(plain, 0, &mut [0]).is_err(), "not attached");
    assert_eq!(kernel.refused().len(), 2);
    // It changes over to the other address space.
    kernel.attach(device, second).unwrap();
    kernel.dma_write(device, 0, &[9]).unwrap();
    assert_eq!(kernel.destroy(hwpt), Ok(()));
    for ioas in [first, second] {
        kernel.unmap(ioas, 0, u64::MAX).unwrap();
    }
    assert_eq!(kernel.pinned(), 0);
    let offset = (addr + 4 * PAGE - buffer.as_ptr().addr() as u64) as usize;
    assert_eq!(buffer[offset], 9);
}
