//! UNMAP.

use ringfence_vfio::kernel::{Bitmap, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{Event, FakeConfig, Group, Kind, Step, Type1};
use rustix::io::Errno;

use crate::common::{PAGE, assert_invalidated_before_unpin, group, map, pages, pretended, unmap};

// rule L55
#[test]
fn mappings_go_whole_or_not_at_all() {
    let (kernel, _) = pretended(100, pages(100));
    map(&kernel, 10, 0, 4).unwrap();
    map(&kernel, 20, 0, 4).unwrap();
    map(&kernel, 30, 0, 4).unwrap();
    for (iova, count) in [(10, 3), (11, 3), (11, 1), (9, 2), (13, 5), (5, 18), (22, 100)] {
        assert_eq!(unmap(&kernel, iova, count), Err(Errno::INVAL), "{iova} {count}");
        assert_eq!(kernel.mappings(), 3);
    }
    assert_eq!(unmap(&kernel, 14, 6), Ok(0));
    assert_eq!(unmap(&kernel, 5, 22), Ok(8));
    assert_eq!(unmap(&kernel, 5, 22), Ok(0));
    let raw = |iova, size| kernel.unmap(UnmapFlags::empty(), iova, size, None);
    let top = u64::MAX - PAGE + 1;
    for (iova, size) in [(0, 0), (1, PAGE), (0, 1), (top, 2 * PAGE)] {
        assert_eq!(raw(iova, size), Err(Errno::INVAL), "{iova:#x} {size:#x}");
    }
    assert_eq!(raw(0, top), Ok(4 * PAGE));
}

// rule L55
#[test]
fn version_1_looks_at_first_addresses_only() {
    let kernel = Type1::new(FakeConfig { v1: true, memory: pages(100), ..FakeConfig::default() });
    kernel.attach(&Group::default()).unwrap();
    map(&kernel, 10, 0, 4).unwrap();
    map(&kernel, 20, 0, 4).unwrap();
    assert_eq!(unmap(&kernel, 11, 1), Ok(0));
    assert_eq!(unmap(&kernel, 11, 100), Ok(0), "inside of one: what lies behind stays too");
    assert_eq!(unmap(&kernel, 10, 1), Ok(4));
    assert_eq!(unmap(&kernel, 19, 3), Ok(4));
    assert_eq!(kernel.track_dirty(true), Err(Errno::ACCESS));
}

// rule L56
#[test]
fn everything_has_no_range_and_no_bitmap() {
    let (kernel, owner) = pretended(100, pages(100));
    map(&kernel, 10, 0, 4).unwrap();
    map(&kernel, 0x10_0000, 0, 4).unwrap();
    let all = |flags, iova, size, bitmap| kernel.unmap(flags, iova, size, bitmap);
    let words = &mut [0; 64];
    let bitmap = Bitmap { page: PAGE, words };
    assert_eq!(all(UnmapFlags::ALL, PAGE, 0, None), Err(Errno::INVAL));
    assert_eq!(all(UnmapFlags::ALL, 0, PAGE, None), Err(Errno::INVAL));
    let both = UnmapFlags::ALL | UnmapFlags::GET_DIRTY;
    assert_eq!(all(both, 0, 0, Some(bitmap)), Err(Errno::INVAL));
    assert_eq!(kernel.mappings(), 2);
    assert_eq!(all(UnmapFlags::ALL, 0, 0, None), Ok(8 * PAGE));
    assert_eq!(all(UnmapFlags::ALL, 0, 0, None), Ok(0));
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
}

// rule L57
#[test]
fn pages_are_given_back_after_the_invalidation_that_covers_them() {
    let memory = pages(10_000).with(0, 2000, Kind::Scattered(1));
    let (kernel, owner) = pretended(10_000, memory);
    kernel.attach(&group(1)).unwrap();
    map(&kernel, 0, 0, 1500).unwrap();
    map(&kernel, 5000, 3000, 1000).unwrap();
    assert_eq!(unmap(&kernel, 0, 6000), Ok(2500));
    let events = kernel.events();
    assert_invalidated_before_unpin(&events);
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
    let syncs = |of: u32| {
        let regions = move |event: &Event| match *event {
            Event::Synced { iommu, regions } if iommu == of => Some(regions),
            _ => None,
        };
        events.iter().filter_map(regions).collect::<Vec<_>>()
    };
    assert_eq!(syncs(0), [512, 512, 476, 1], "the first IOMMU: region by region");
    assert_eq!(syncs(1), [1, 1], "the other one: all at once, before");
    // The mapping is removed from the other IOMMU before the first one begins with it.
    let first = |of: u32| {
        events
            .iter()
            .position(|event| matches!(event, Event::Unmapped { iommu, .. } if *iommu == of))
    };
    assert!(first(1) < first(0));
}

// rule L57
#[test]
fn without_memory_to_gather_a_region_it_is_synced_by_itself() {
    let (kernel, owner) = pretended(100, pages(100).with(0, 10, Kind::Scattered(1)));
    map(&kernel, 0, 0, 10).unwrap();
    kernel.fail(Step::Region, 4);
    assert_eq!(unmap(&kernel, 0, 10), Ok(10));
    let events = kernel.events();
    assert_invalidated_before_unpin(&events);
    let synced = |event: &Event| match event {
        Event::Synced { regions, .. } => Some(*regions),
        _ => None,
    };
    assert_eq!(events.iter().filter_map(synced).collect::<Vec<_>>(), [3, 1, 6]);
    assert_eq!(owner.used(), 0);
}

// rule L58
#[test]
fn contiguous_frames_are_looked_for_unless_superpages_show() {
    for superpages in [false, true] {
        let kernel = Type1::new(FakeConfig { memory: pages(5000), ..FakeConfig::default() });
        kernel.attach(&Group { superpages, ..Group::default() }).unwrap();
        assert!(kernel.events().contains(&Event::Probed { iommu: 0, both: superpages }));
        map(&kernel, 0, 0, 1000).unwrap();
        kernel.events();
        assert_eq!(unmap(&kernel, 0, 1000), Ok(1000));
        let events = kernel.events();
        assert_invalidated_before_unpin(&events);
        let sizes = |event: &Event| match *event {
            Event::Unmapped { asked, removed, .. } => Some((asked, removed)),
            _ => None,
        };
        let expected = if superpages { (1, 1000) } else { (1000, 1000) };
        assert_eq!(events.iter().filter_map(sizes).collect::<Vec<_>>(), [expected]);
        assert_eq!(kernel.pinned(), 0);
    }
}
