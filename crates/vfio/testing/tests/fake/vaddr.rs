//! Addresses that are invalidated and restored.

use std::sync::Arc;

use ringfence_vfio::kernel::{Extension, MapFlags, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::Owner;
use rustix::io::Errno;

use crate::common::{group, invalidate, map, pages, pretended, revalidate, unmap};

// rule L59
#[test]
fn marks_are_made_for_all_or_for_none() {
    let (kernel, owner) = pretended(100, pages(100));
    assert!(kernel.has(Extension::UpdateVaddr));
    for at in [10, 20, 30] {
        map(&kernel, at, at, 4).unwrap();
    }
    assert_eq!(invalidate(&kernel, 20, 3), Err(Errno::INVAL), "it would be cut");
    assert_eq!(invalidate(&kernel, 20, 4), Ok(4));
    // One of them is marked already: the marks of the others are undone.
    assert_eq!(invalidate(&kernel, 10, 24), Err(Errno::INVAL));
    assert_eq!(revalidate(&kernel, 10, 50, 4), Err(Errno::INVAL));
    assert_eq!(revalidate(&kernel, 30, 50, 4), Err(Errno::INVAL));
    // While one is marked: no group, no external pins, no access by software.
    assert_eq!(kernel.attach(&group(1)), Err(Errno::BUSY));
    assert_eq!(kernel.attach_emulated(2, Arc::new(|_, _, _| {})), Err(Errno::BUSY));
    assert_eq!(kernel.pin_pages(0, 0, 1, MapFlags::READ), Err(Errno::BUSY));
    assert_eq!(kernel.rw_read(0, &mut [0]), Err(Errno::BUSY));
    assert_eq!((owner.used(), kernel.pinned()), (12, 12), "only marked");
    revalidate(&kernel, 20, 50, 4).unwrap();
    kernel.attach(&group(1)).unwrap();
    // Removing a mapping removes its mark.
    assert_eq!(invalidate(&kernel, 10, 4), Ok(4));
    assert_eq!(unmap(&kernel, 10, 4), Ok(4));
    kernel.attach(&group(2)).unwrap();
    // With everything, and without anything.
    let all = UnmapFlags::ALL | UnmapFlags::VADDR;
    assert_eq!(kernel.unmap(all, 0, 0, None), Ok(8 * 4096));
    assert_eq!(invalidate(&kernel, 0, 4), Ok(0));
}

// rule L59
#[test]
fn software_devices_rule_it_out() {
    let (kernel, _) = pretended(100, pages(100));
    kernel.attach_emulated(1, Arc::new(|_, _, _| {})).unwrap();
    assert!(!kernel.has(Extension::UpdateVaddr));
    map(&kernel, 0, 0, 4).unwrap();
    assert_eq!(invalidate(&kernel, 0, 4), Err(Errno::BUSY));
}

// rule L60
#[test]
fn the_new_owner_is_charged_before_the_old_one_is_released() {
    let (kernel, old) = pretended(100, pages(100));
    map(&kernel, 10, 10, 8).unwrap();
    assert_eq!(revalidate(&kernel, 40, 0, 8), Err(Errno::NOENT));
    assert_eq!(revalidate(&kernel, 10, 0, 8), Err(Errno::INVAL), "it is not marked");
    invalidate(&kernel, 10, 8).unwrap();
    for (iova, count) in [(10, 7), (11, 7), (9, 9), (10, 9)] {
        assert_eq!(revalidate(&kernel, iova, 0, count), Err(Errno::INVAL), "{iova} {count}");
    }
    let poor = Owner::new(7);
    kernel.set_caller(&poor);
    assert_eq!(revalidate(&kernel, 10, 60, 8), Err(Errno::NOMEM));
    assert_eq!((old.used(), poor.used(), kernel.pinned()), (8, 0, 8));
    poor.set_capable(true);
    revalidate(&kernel, 10, 60, 8).unwrap();
    assert_eq!((old.used(), poor.used(), kernel.pinned()), (0, 8, 8));
    assert_eq!(revalidate(&kernel, 10, 60, 8), Err(Errno::INVAL));
    // The same process is not charged again, not even for a moment.
    invalidate(&kernel, 10, 8).unwrap();
    revalidate(&kernel, 10, 60, 8).unwrap();
    assert_eq!(poor.peak(), 8);
    assert_eq!(unmap(&kernel, 10, 8), Ok(8));
    assert_eq!((poor.used(), kernel.pinned()), (0, 0));
}
