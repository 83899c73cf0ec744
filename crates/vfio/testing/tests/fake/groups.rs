//! Attaching and detaching groups.

use std::sync::Arc;

use ringfence_iommu::{ReservedKind, ReservedRegion};
use ringfence_vfio::kernel::Type1Kernel;
use ringfence_vfio_testing::fake::{Group, Kind, Step};
use rustix::io::Errno;

use crate::common::{
    PAGE, RW, assert_invalidated_before_unpin, group, map, pages, pretended, range, unmap,
};

// rule L61
#[test]
fn a_group_whose_limits_are_in_the_way_is_refused_and_nothing_changes() {
    let (kernel, _) = pretended(1000, pages(1000));
    let before = kernel.info().unwrap();
    map(&kernel, 100, 0, 10).unwrap();
    let region =
        |first, pages| ReservedRegion { range: range(first, pages), kind: ReservedKind::Reserved };
    let narrow = |aperture| Group { aperture, ..group(1) };
    let holey = |hole| Group { reserved: vec![hole], ..group(1) };
    for refused in [
        narrow(range(101, 1000)),
        narrow(range(0, 109)),
        holey(region(109, 1)),
        holey(region(50, 51)),
        Group { iommu: 7, ..group(0) },
    ] {
        assert_eq!(kernel.attach(&refused), Err(Errno::INVAL), "{refused:?}");
    }
    let without_remapping = Group { remaps_interrupts: false, ..group(1) };
    assert_eq!(kernel.attach(&without_remapping), Err(Errno::PERM));
    let after = kernel.info().unwrap();
    assert_eq!((after.ranges, after.page_sizes), (before.ranges.clone(), before.page_sizes));

    // On success they narrow, and when the group is detached they widen again.
    let narrow = Group { reserved: vec![region(50, 50)], ..narrow(range(10, 100)) };
    kernel.attach(&Group { page_sizes: !0xffff | 0x1000, ..narrow.clone() }).unwrap();
    let ranges = kernel.info().unwrap().ranges;
    assert_eq!(ranges, Some(vec![range(10, 40), range(100, 10)]));
    assert_eq!(kernel.info().unwrap().page_sizes, 0x4020_1000);
    assert_eq!(map(&kernel, 9, 0, 1), Err(Errno::INVAL));
    kernel.detach(1).unwrap();
    assert_eq!(kernel.info().unwrap().ranges, before.ranges);
}

// rule L61
#[test]
fn a_replay_that_fails_removes_only_what_it_added() {
    let memory = pages(1000).with(0, 50, Kind::Scattered(1));
    // What is in the tables already is mapped, not pinned again; the rest is pinned and charged.
    for emulated in [false, true] {
        let mut failures = 0;
        for step in [Step::Pin, Step::Map, Step::Table] {
            for nth in 1.. {
                let (kernel, owner) = pretended(1000, memory.clone());
                if emulated {
                    kernel.detach(0).unwrap();
                    kernel.attach_emulated(9, Arc::new(|_, _, _| {})).unwrap();
                }
                map(&kernel, 10, 10, 8).unwrap();
                map(&kernel, 100, 200, 50).unwrap();
                if emulated {
                    kernel.pin_pages(9, 12 * PAGE, 2, RW).unwrap();
                }
                let before = (owner.used(), kernel.pinned(), kernel.info().unwrap());
                kernel.fail(step, nth);
                let attached = kernel.attach(&group(1));
                if attached.is_ok() {
                    assert!(kernel.heal());
                    let charged = 58;
                    assert_eq!(owner.used(), charged, "pinned externally: charged once");
                    assert_eq!(kernel.pinned(), charged + if emulated { 2 } else { 0 });
                    break;
                }
                failures += 1;
                let after = (owner.used(), kernel.pinned(), kernel.info().unwrap());
                assert_eq!(before, after, "{step:?} {nth}");
                assert_invalidated_before_unpin(&kernel.events());
                kernel.attach(&group(1)).unwrap();
            }
        }
        // Without another group: 8 scattered runs and one of 50, each mapped, with its tables;
        // pages are pinned.
        assert_eq!(failures, if emulated { 58 + 9 + 9 } else { 9 + 9 });
    }
}

// rule L61
#[test]
fn groups_behind_one_iommu_share_it_and_the_last_one_takes_all_along() {
    let (kernel, owner) = pretended(1000, pages(1000));
    map(&kernel, 0, 0, 8).unwrap();
    kernel.events();
    kernel.attach(&Group { id: 5, ..Group::default() }).unwrap();
    assert_eq!(kernel.events(), [], "nothing is mapped again");
    assert_eq!(kernel.detach(6), Err(Errno::INVAL));
    kernel.detach(0).unwrap();
    assert_eq!((kernel.mappings(), owner.used()), (1, 8));
    kernel.detach(5).unwrap();
    assert_eq!((kernel.mappings(), owner.used(), kernel.pinned()), (0, 0, 0));
    assert_invalidated_before_unpin(&kernel.events());
    assert_eq!(kernel.info(), Err(Errno::INVAL));
    assert_eq!(unmap(&kernel, 0, 8), Err(Errno::INVAL));
}
