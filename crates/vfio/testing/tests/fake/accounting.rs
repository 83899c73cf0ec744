//! What is charged, and what is left after a failure.

use ringfence_vfio::kernel::Type1Kernel;
use ringfence_vfio_testing::fake::{Kind, Step};
use rustix::io::Errno;

use crate::common::{map, pages, pretended, unmap};

// rule L53
#[test]
fn the_limit_is_never_passed_and_the_capability_counts_when_mapping() {
    let (kernel, owner) = pretended(10, pages(1000));
    map(&kernel, 0, 100, 8).unwrap();
    assert_eq!(map(&kernel, 50, 200, 3), Err(Errno::NOMEM));
    assert_eq!((owner.used(), owner.peak(), kernel.pinned()), (8, 8, 8));
    map(&kernel, 50, 200, 2).unwrap();
    owner.set_capable(true);
    map(&kernel, 60, 300, 100).unwrap();
    owner.set_capable(false);
    assert_eq!(owner.used(), 110);
    assert_eq!(unmap(&kernel, 60, 100), Ok(100));
    assert_eq!(unmap(&kernel, 0, 100), Ok(10));
    assert_eq!((owner.used(), kernel.pinned(), kernel.mappings()), (0, 0, 0));
}

// rule L54
#[test]
fn a_page_mapped_twice_is_charged_twice_and_device_memory_never() {
    let memory = pages(1000).with(0x10_0000, 4, Kind::Reserved);
    let (kernel, owner) = pretended(10, memory);
    map(&kernel, 0, 0x200, 4).unwrap();
    map(&kernel, 8, 0x200, 4).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (8, 8));
    map(&kernel, 16, 0xff, 6).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (10, 10));
    assert_eq!(unmap(&kernel, 16, 6), Ok(6));
    assert_eq!((owner.used(), kernel.pinned()), (8, 8));
}

// rule L53
#[test]
fn nothing_is_left_of_a_map_that_failed_at_any_step() {
    let memory =
        pages(10_000).with(0x10_0000, 64, Kind::Scattered(2)).with(0x20_0000, 3, Kind::Reserved);
    let mut failures = 0;
    for step in [Step::Record, Step::Pin, Step::Table, Step::Map, Step::Bitmap] {
        for nth in 1.. {
            let (kernel, owner) = pretended(5000, memory.clone());
            kernel.track_dirty(true).unwrap();
            map(&kernel, 5000, 0x800, 3).unwrap();
            kernel.fail(step, nth);
            // Contiguous, then scattered; contiguous around device memory, over batches.
            let first = map(&kernel, 0, 0xe0, 96).err();
            let second = map(&kernel, 1000, 0x1f0, 1500).err();
            if kernel.heal() {
                break;
            }
            failures += 1;
            let left = [first, second].iter().filter(|failed| failed.is_none()).count();
            assert_eq!(left, 1, "{step:?} {nth}");
            let pages = if first.is_none() { 96 } else { 1497 };
            let info = kernel.info().unwrap();
            assert_eq!(
                (owner.used(), kernel.pinned(), kernel.mappings(), info.available),
                (pages + 3, pages + 3, 2, Some(65_533)),
                "{step:?} {nth}"
            );
            // What was left does not get in the way.
            if first.is_some() {
                map(&kernel, 0, 0xe0, 96).unwrap();
            } else {
                map(&kernel, 1000, 0x1f0, 1500).unwrap();
            }
        }
    }
    assert!(failures > 1500, "{failures} failures were tried");
}
