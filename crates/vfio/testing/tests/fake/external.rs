//! Pages that emulated devices pin.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use ringfence_vfio::kernel::{MapFlags, Type1Kernel};
use ringfence_vfio_testing::fake::{Event, FakeConfig, Notify, Step, Type1};
use rustix::io::Errno;

use crate::common::{
    PAGE, RW, assert_invalidated_before_unpin, group, map, pages, pretended, unmap,
};

/// Releases all pins of a mapping, one pin of each page at a time.
fn gives_up() -> Notify {
    Arc::new(|kernel, iova, size| kernel.unpin_pages(iova, size / PAGE))
}

// rule L62
#[test]
fn pins_are_counted_page_by_page_and_checked() {
    let (kernel, owner) = pretended(5, pages(1000));
    kernel.detach(0).unwrap();
    kernel.attach_emulated(1, gives_up()).unwrap();
    map(&kernel, 0, 0, 4).unwrap();
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    unsafe { kernel.map(MapFlags::READ, 4 * PAGE, 4 * PAGE, 4 * PAGE) }.unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (0, 0), "no IOMMU, nothing pinned");
    let pin = |iova: u64, count, prot| kernel.pin_pages(1, iova * PAGE, count, prot);
    assert_eq!(pin(0, 3, RW).map(|frames| frames.len()), Ok(3));
    assert_eq!(pin(1, 3, RW).map(|frames| frames.len()), Ok(3));
    assert_eq!((owner.used(), kernel.pinned(), kernel.external_pins()), (4, 4, 6));
    // Undone completely: permission, a gap, the limit, memory.
    assert_eq!(pin(2, 3, RW), Err(Errno::PERM));
    assert_eq!(pin(7, 2, MapFlags::READ), Err(Errno::INVAL));
    assert_eq!(pin(3, 3, MapFlags::READ), Err(Errno::NOMEM));
    kernel.fail(Step::ExternalPin, 1);
    assert_eq!(pin(3, 2, MapFlags::READ), Err(Errno::NOMEM));
    assert_eq!(pin(0, 0, RW), Err(Errno::INVAL));
    assert_eq!(pin(0, 513, RW), Err(Errno::TOOBIG));
    assert_eq!(kernel.pin_pages(3, 0, 1, RW), Err(Errno::INVAL));
    assert_eq!((owner.used(), kernel.pinned(), kernel.external_pins()), (4, 4, 6));
    kernel.unpin_pages(0, 4);
    assert_eq!((owner.used(), kernel.pinned(), kernel.external_pins()), (2, 2, 2));
    kernel.unpin_pages(0, 100);
    kernel.unpin_pages(0, u64::MAX);
    assert_eq!((owner.used(), kernel.pinned(), kernel.external_pins()), (0, 0, 0));
}

// rule L62
#[test]
fn an_unmap_notifies_again_until_no_page_is_held() {
    let (kernel, owner) = pretended(1000, pages(1000));
    kernel.attach_emulated(1, gives_up()).unwrap();
    map(&kernel, 0, 0, 4).unwrap();
    map(&kernel, 10, 10, 4).unwrap();
    for _ in 0..3 {
        kernel.pin_pages(1, 11 * PAGE, 2, RW).unwrap();
    }
    assert_eq!(owner.used(), 8, "pinned and charged already");
    assert_eq!(kernel.pinned(), 10);
    kernel.events();
    assert_eq!(unmap(&kernel, 0, 20), Ok(8));
    let events = kernel.events();
    assert_invalidated_before_unpin(&events);
    let notified = Event::Notified { iova: 10 * PAGE, size: 4 * PAGE };
    assert_eq!(events.iter().filter(|&&event| event == notified).count(), 3);
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
}

// rule L62
#[test]
fn a_holder_that_never_unpins_is_notified_eleven_times() {
    let notices = Arc::new(AtomicU32::new(0));
    let kernel = Type1::new(FakeConfig { memory: pages(100), ..FakeConfig::default() });
    let count = notices.clone();
    let stubborn: Notify = Arc::new(move |_, _, _| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    kernel.attach_emulated(1, stubborn).unwrap();
    map(&kernel, 0, 0, 4).unwrap();
    kernel.pin_pages(1, 0, 1, RW).unwrap();
    assert_eq!(unmap(&kernel, 0, 4), Err(Errno::BUSY));
    assert_eq!(notices.load(Ordering::Relaxed), 11);
    // Detaching the last group releases the pins.
    kernel.detach(1).unwrap();
    assert_eq!((kernel.pinned(), kernel.mappings()), (0, 0));
}

// rules L53, L62
#[test]
fn what_is_charged_follows_the_groups() {
    let (kernel, owner) = pretended(1000, pages(1000));
    kernel.attach_emulated(1, gives_up()).unwrap();
    map(&kernel, 0, 0, 16).unwrap();
    kernel.pin_pages(1, 0, 3, RW).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (16, 19));
    // The last IOMMU is removed: what is pinned externally stays pinned and charged.
    kernel.detach(0).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (3, 3));
    kernel.pin_pages(1, 2 * PAGE, 2, RW).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (4, 4));
    // An IOMMU is added: everything is pinned, but only the other pages are charged.
    owner.set_limit(16);
    kernel.attach(&group(2)).unwrap();
    assert_eq!((owner.used(), kernel.pinned()), (16, 20));
    // Released while everything is charged: nothing is uncharged.
    kernel.unpin_pages(0, 1);
    assert_eq!((owner.used(), kernel.pinned()), (16, 19));
    assert_eq!(unmap(&kernel, 0, 16), Ok(16));
    assert_eq!((owner.used(), kernel.pinned()), (0, 0));
}
