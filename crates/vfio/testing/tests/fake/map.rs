//! MAP.

use ringfence_iommu::{Iova, Range};
use ringfence_vfio::kernel::{MapFlags, Type1Kernel};
use ringfence_vfio_testing::fake::{Event, FakeConfig, Group, Kind, Type1};
use rustix::io::Errno;

use crate::common::{PAGE, RW, map, pages, pretended, unmap};

/// Maps with any arguments.
fn raw(kernel: &Type1, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> Result<(), Errno> {
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    unsafe { kernel.map(flags, iova, vaddr, size) }
}

// rule L51
#[test]
fn what_is_refused_in_which_order() {
    let config = FakeConfig { budget: 2, memory: pages(1000), ..FakeConfig::default() };
    let kernel = Type1::new(config);
    assert_eq!(map(&kernel, 0, 0, 1), Err(Errno::INVAL), "before a group is there");
    kernel.attach(&Group::default()).unwrap();
    map(&kernel, 16, 0, 4).unwrap();

    // Flags, alignment and wrap are checked before overlaps.
    let unknown = MapFlags::READ | MapFlags::from_bits_retain(8);
    for flags in [MapFlags::empty(), RW | MapFlags::VADDR, unknown] {
        assert_eq!(raw(&kernel, flags, 16 * PAGE, 0, PAGE), Err(Errno::INVAL), "{flags:?}");
    }
    let top = u64::MAX - PAGE + 1;
    for (iova, vaddr, size) in [
        (16 * PAGE, 0, 0),
        (16 * PAGE + 1, 0, PAGE),
        (16 * PAGE, 1, PAGE),
        (16 * PAGE, 0, PAGE + 1),
        (top, 0, 2 * PAGE),
        (0, top, 17 * PAGE),
    ] {
        assert_eq!(raw(&kernel, RW, iova, vaddr, size), Err(Errno::INVAL), "{iova:#x} {size:#x}");
    }
    // Overlap, though it also ends outside of what may be mapped.
    assert_eq!(raw(&kernel, RW, 16 * PAGE, 0, 0xfee0_0000), Err(Errno::EXIST));
    assert_eq!(raw(&kernel, RW, 15 * PAGE, 0, 2 * PAGE), Err(Errno::EXIST));
    // Outside while there is budget; a lack of budget comes first.
    for iova in [0xfee0_0000, 0xfedf_f000, 1 << 39, top] {
        let size = if iova == 0xfedf_f000 { 2 * PAGE } else { PAGE };
        assert_eq!(raw(&kernel, RW, iova, 0, size), Err(Errno::INVAL), "{iova:#x}");
    }
    map(&kernel, 0, 0, 1).unwrap();
    assert_eq!(raw(&kernel, RW, 0xfee0_0000, 0, PAGE), Err(Errno::NOSPC));
    assert_eq!(map(&kernel, 16, 0, 1), Err(Errno::EXIST));
    assert_eq!(kernel.info().unwrap().available, Some(0));
    // One unit for each call, whatever its size.
    assert_eq!(unmap(&kernel, 16, 4), Ok(4));
    assert_eq!(kernel.info().unwrap().available, Some(1));
    map(&kernel, 100, 0, 500).unwrap();
    assert_eq!(kernel.info().unwrap().available, Some(0));
}

// rule L51
#[test]
fn the_last_page_of_the_address_space_can_be_mapped() {
    let (kernel, owner) = pretended(10, pages(10));
    kernel.detach(0).unwrap();
    let group = Group { aperture: Range::ALL, ..Group::default() };
    kernel.attach(&group).unwrap();
    let top = u64::MAX - PAGE + 1;
    raw(&kernel, RW, top, top, PAGE).unwrap();
    assert_eq!(raw(&kernel, RW, top, 0, PAGE), Err(Errno::EXIST));
    assert_eq!(unmap(&kernel, top / PAGE, 1), Ok(1));
    assert_eq!(owner.used(), 0);
    let last = kernel.info().unwrap().ranges.unwrap().last().copied();
    assert_eq!(last.map(|range| range.last()), Some(Iova(u64::MAX)));
}

// rule L52
#[test]
fn runs_are_as_long_as_they_can_be_and_batches_have_512_pages() {
    // 1,000 contiguous pages, 8 scattered by twos, 1 of a device, 3 more.
    let memory =
        pages(10_000).with(1000 * PAGE, 8, Kind::Scattered(2)).with(1008 * PAGE, 1, Kind::Reserved);
    let kernel = Type1::new(FakeConfig { memory: memory.clone(), ..FakeConfig::default() });
    kernel.attach(&Group::default()).unwrap();
    kernel.events();
    map(&kernel, 0, 0, 1012).unwrap();
    let (mut runs, mut batches, mut open, mut left) = (Vec::new(), Vec::new(), 0, 0);
    for event in kernel.events() {
        match event {
            Event::Pinned { pages, .. } => {
                assert_eq!(open, left, "pages are pinned before all of a batch is used");
                batches.push(pages);
                open += pages;
            }
            Event::Mapped { iova, pages, reserved, .. } => {
                left = iova / PAGE + pages;
                runs.push((iova / PAGE, pages, reserved));
            }
            _ => {}
        }
        // A run that is not mapped yet may have used up the batch.
        left = left.max(open - open % 512);
    }
    assert_eq!(batches, [512, 500]);
    let twos = (0..4).map(|n| (1000 + 2 * n, 2, false));
    let expected = [(0, 1000, false)].into_iter().chain(twos);
    let expected: Vec<_> = expected.chain([(1008, 1, true), (1009, 3, false)]).collect();
    assert_eq!(runs, expected);

    let kernel = Type1::new(FakeConfig { memory, huge_pages: false, ..FakeConfig::default() });
    kernel.attach(&Group::default()).unwrap();
    map(&kernel, 0, 0, 1012).unwrap();
    let single = |event: &&Event| matches!(event, Event::Pinned { pages: 1, .. });
    let events = kernel.events();
    assert_eq!(events.iter().filter(single).count(), 1012);
    let mapped = |event: &&Event| matches!(event, Event::Mapped { .. });
    assert_eq!(events.iter().filter(mapped).count(), expected.len());
}
