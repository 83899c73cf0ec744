//! What the IOMMU's driver takes away is out of reach.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringfence_drivers::ram::RamPart;
use ringfence_iommu::{Domain, FaultReason, Gather, GuestPhys, Iova, Map, Prot, Range};
use ringfence_virtq::blk::Kind;

use crate::rig::*;

/// Not in the IOTLB slot of a ring's page: else every request would begin with a cold cache, and
/// prove nothing.
const DATA: u64 = 0x4000_5000;

/// Fills the first sectors of the disk with a byte.
fn prepare(rig: &Rig, queue: &mut RawQueue, byte: u8) {
    let page = rig.pages(1);
    fill(page.window(), byte);
    rig.map(DATA, page.gpa(), PAGE as u64, Prot::READ);
    assert_eq!(queue.write(0, piece(DATA, PAGE)), OK);
    rig.unmap(DATA, PAGE as u64);
}

#[test]
fn after_a_strict_unmap_the_old_address_is_refused_however_warm_the_caches_are() {
    let mut rig = Rig::new(Setup { workers: 2, ..Setup::new(true) });
    // The first queue shares its worker with the IOMMU's rings, the second does not.
    let mut queues = [rig.queue(0), rig.queue(1)];
    prepare(&rig, &mut queues[0], 0x77);
    let pages = rig.pages(16);
    let (mut refused, mut round) = (0, 0u64);
    while refused < 10_000 {
        let queue = &mut queues[(round % 2) as usize];
        // One mapping alone, or some that are unmapped together; again and again the same
        // addresses, and now and then others of the same slots.
        let count = [1, 16, 16, 16][(round / 2 % 4) as usize];
        let base = DATA + (round % 3) * (1 << 20);
        let iovas: Vec<u64> = (0..count).map(|n| base + n * PAGE as u64).collect();
        for (n, &iova) in (0..).zip(&iovas) {
            let gpa = GuestPhys(pages.gpa() + n * PAGE as u64);
            let range = Range::from_len(Iova(iova), PAGE as u64).unwrap();
            rig.domain.map(Map::new(range, gpa, Prot::WRITE)).unwrap();
        }
        let all = Range::from_len(Iova(base), count * PAGE as u64).unwrap();
        rig.domain.iotlb_sync_map(all).unwrap();
        for &iova in &iovas {
            assert_eq!(queue.read(0, piece(iova, 512)), OK);
        }
        rig.unmap(base, count * PAGE as u64);
        for (n, &iova) in iovas.iter().enumerate() {
            let start = pages.window().part(n * PAGE, 512).unwrap();
            fill(&start, 0);
            assert_eq!(queue.read(0, piece(iova, 512)), IOERR, "round {round}: a leak");
            assert!(holds(&start, 0), "round {round}: refused, but written");
            refused += 1;
        }
        round += 1;
    }
    rig.round(0);
    rig.round(1);
    assert_eq!(rig.options.figures.sum().failed, refused);
}

#[test]
fn an_address_mapped_anew_leads_to_the_new_page_only() {
    let mut rig = Rig::new(Setup { workers: 2, ..Setup::new(true) });
    let mut queue = rig.queue(1);
    prepare(&rig, &mut queue, 0x42);
    let pages: [RamPart; 2] = [rig.pages(1), rig.pages(1)];
    for round in 0..200 {
        let (new, old) = (&pages[round % 2], &pages[(round + 1) % 2]);
        fill(new.window(), 0);
        fill(old.window(), 0);
        rig.map(DATA, new.gpa(), PAGE as u64, Prot::RW);
        assert_eq!(queue.read(0, piece(DATA, PAGE)), OK);
        assert!(holds(new.window(), 0x42) && holds(old.window(), 0), "round {round}");
        rig.unmap(DATA, PAGE as u64);
    }
}

#[test]
fn permissions_hold_from_the_drivers_map_to_the_devices_access() {
    // rule V19
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    prepare(&rig, &mut queue, 0x11);
    let page = rig.pages(2);
    fill(page.window(), 0x99);
    rig.map(DATA, page.gpa(), PAGE as u64, Prot::READ);
    rig.map(DATA + PAGE as u64, page.gpa() + PAGE as u64, PAGE as u64, Prot::WRITE);
    for _ in 0..100 {
        assert_eq!(queue.write(8, piece(DATA, PAGE)), OK);
        assert_eq!(queue.read(0, piece(DATA, PAGE)), IOERR);
        let fault = rig.fault_at(DATA);
        assert_eq!((fault.reason, fault.access), (FaultReason::Mapping, Prot::WRITE));
        assert!(holds(&page.window().part(0, PAGE).unwrap(), 0x99), "written without leave");

        let second = DATA + PAGE as u64;
        assert_eq!(queue.read(0, piece(second, PAGE)), OK);
        assert_eq!(queue.write(0, piece(second, PAGE)), IOERR);
        assert_eq!(rig.fault_at(second).access, Prot::READ);
        // A buffer that lies in both.
        assert_eq!(queue.read(0, piece(DATA, 2 * PAGE)), IOERR);
        assert_eq!(rig.fault_at(DATA).access, Prot::WRITE);
    }
}

#[test]
fn what_another_domain_maps_is_out_of_reach() {
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    let page = rig.pages(1);
    let other = rig.iommu.driver.domain().unwrap();
    other.attach(OTHER_ENDPOINT).unwrap();
    map(&other, DATA, page.gpa(), PAGE as u64, Prot::RW);
    assert_eq!(queue.read(0, piece(DATA, 512)), IOERR);
    assert_eq!(rig.fault_at(DATA).reason, FaultReason::Mapping);
    // Nor does an unmap in the other domain touch ours.
    rig.map(DATA, page.gpa(), PAGE as u64, Prot::RW);
    assert_eq!(queue.read(0, piece(DATA, 512)), OK);
    unmap(&other, DATA, PAGE as u64);
    assert_eq!(queue.read(0, piece(DATA, 512)), OK);
    other.detach(OTHER_ENDPOINT).unwrap();
    assert_eq!(queue.read(0, piece(DATA, 512)), OK);
}

#[test]
fn a_detached_endpoint_reaches_neither_buffers_nor_rings_until_it_is_attached_again() {
    // rules V6, V14
    // The driver replays its mappings in the order of their addresses, and a queue goes on as soon
    // as its ring is there: so the data comes first.
    const LOW: u64 = 0x123_5000;
    let mut rig = Rig::new(Setup { workers: 2, ..Setup::new(true) });
    let mut queues = [rig.queue(0), rig.queue(1)];
    prepare(&rig, &mut queues[0], 0x33);
    let pages = [rig.pages(1), rig.pages(1)];
    for (at, page) in (0..).zip(&pages) {
        rig.map(LOW + at * PAGE as u64, page.gpa(), PAGE as u64, Prot::RW);
    }
    for _ in 0..20 {
        for (at, queue) in (0..).zip(&mut queues) {
            assert_eq!(queue.read(0, piece(LOW + at * PAGE as u64, PAGE)), OK);
        }
        rig.domain.detach(ENDPOINT).unwrap();
        let used: Vec<u16> = queues.iter().map(|queue| queue.used_index()).collect();
        for (at, queue) in (0..).zip(&mut queues) {
            fill(pages[at as usize].window(), 0);
            queue.submit(Kind::In, 0, &[piece(LOW + at * PAGE as u64, PAGE)]);
            rig.round(queue.index);
            let index = queue.index;
            assert!(rig.on_unit(index, move |unit| unit.is_away(index)));
        }
        for (at, queue) in queues.iter().enumerate() {
            assert_eq!(queue.used_index(), used[at]);
            assert!(holds(pages[at].window(), 0));
        }
        // The driver replays its mappings; the queues go on where they were.
        rig.domain.attach(ENDPOINT).unwrap();
        for (at, queue) in queues.iter_mut().enumerate() {
            assert_eq!(queue.finish(), OK);
            assert!(holds(pages[at].window(), 0x33));
        }
    }
}

#[test]
fn a_lazy_unmap_is_in_force_once_the_flush_is_over() {
    let mut rig = Rig::new(Setup { workers: 2, ..Setup::new(true) });
    let mut queue = rig.queue(1);
    let page = rig.pages(16);
    for _ in 0..50 {
        for n in 0..16 * PAGE as u64 / 4096 {
            let iova = DATA + n * 4096;
            rig.map(iova, page.gpa() + n * 4096, 4096, Prot::WRITE);
            assert_eq!(queue.read(0, piece(iova, 512)), OK);
        }
        for n in 0..16 {
            let range = Range::from_len(Iova(DATA + n * 4096), 4096).unwrap();
            assert_eq!(rig.domain.unmap(range, &mut Gather::queued()).unwrap(), 4096);
        }
        rig.domain.flush_iotlb_all().unwrap();
        for n in 0..16 {
            assert_eq!(queue.read(0, piece(DATA + n * 4096, 512)), IOERR);
        }
    }
}

#[test]
fn a_ring_that_is_unmapped_waits_and_goes_on_when_it_is_mapped_again() {
    // rules D21, D22
    let mut rig = Rig::new(Setup::new(true));
    let (mut queue, mut other) = (rig.queue(0), rig.queue(1));
    let first = queue.page.clone();
    let home = GPA + (first.slice().as_ptr() as u64 - rig.ram.user_addr());
    let second = rig.pages(1);
    queue.go_round();
    for round in 0..20 {
        rig.unmap(queue.bus, PAGE as u64);
        // The device does not read what the driver now writes to the page.
        queue.submit(Kind::Flush, 0, &[]);
        let mut before = vec![0; PAGE];
        queue.page.read(0, &mut before);
        other.go_round();
        rig.round(0);
        assert!(rig.on_unit(0, |unit| unit.is_away(0)));
        assert!(rig.failure(0).is_none());
        let mut after = vec![0; PAGE];
        queue.page.read(0, &mut after);
        assert!(before == after, "round {round}: the device wrote to a ring that was unmapped");

        // The ring comes back, every other time in another page, to which its content moved.
        let (gpa, page) = match round % 2 {
            0 => (second.gpa(), second.window().clone()),
            _ => (home, first.clone()),
        };
        page.write(0, &before);
        let old = std::mem::replace(&mut queue.page, page);
        fill(&old, 0xdb);
        rig.map(queue.bus, gpa, PAGE as u64, Prot::RW);
        assert_eq!(queue.finish(), OK);
        assert!(!rig.on_unit(0, |unit| unit.is_away(0)));
        queue.go_round();
        assert!(holds(&old, 0xdb), "round {round}: the device used the old page");
    }
    // Each time it was unmapped, one fault was reported.
    let fault = rig.fault_at(queue.bus);
    assert_eq!(fault.reason, FaultReason::Mapping);
}

#[test]
fn a_ring_area_without_the_permission_it_needs_is_not_used() {
    // rule D22
    let mut rig = Rig::new(Setup::new(true));
    let (mut queue, mut other) = (rig.queue(0), rig.queue(1));
    queue.go_round();
    let gpa = GPA + (queue.page.slice().as_ptr() as u64 - rig.ram.user_addr());
    rig.unmap(queue.bus, PAGE as u64);
    rig.map(queue.bus, gpa, PAGE as u64, Prot::READ);
    queue.submit(Kind::Flush, 0, &[]);
    let used = queue.used_index();
    rig.round(0);
    other.go_round();
    assert!(rig.on_unit(0, |unit| unit.is_away(0)));
    assert_eq!(queue.used_index(), used);
    rig.unmap(queue.bus, PAGE as u64);
    rig.map(queue.bus, gpa, PAGE as u64, Prot::RW);
    assert_eq!(queue.finish(), OK);

    // When it is started, too.
    rig.blk.get_vring_base(0).unwrap();
    rig.unmap(queue.bus, PAGE as u64);
    rig.map(queue.bus, gpa, PAGE as u64, Prot::READ);
    rig.blk.set_vring_kick(0, Some(queue.kick.as_fd())).unwrap();
    rig.blk.set_vring_enable(0, true).unwrap();
    other.go_round();
    rig.round(0);
    assert!(rig.on_unit(0, |unit| unit.is_away(0)));
}

#[test]
fn a_driver_that_unmaps_under_running_requests_never_finds_a_page_touched() {
    // Requests and unmaps race; what was unmapped may have been written before, never after.
    let mut rig = Rig::new(Setup { workers: 2, queues: 4, ..Setup::new(true) });
    let mut queues = [rig.queue(1), rig.queue(3)];
    prepare(&rig, &mut queues[0], 0x66);
    let page = rig.pages(1);
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for queue in &mut queues {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let status = queue.read(0, piece(DATA, PAGE));
                    assert!(status == OK || status == IOERR);
                }
            });
        }
        for round in 0..500 {
            rig.map(DATA, page.gpa(), PAGE as u64, Prot::RW);
            if round % 5 == 0 {
                until("a write", || !holds(page.window(), 0));
            }
            for _ in 0..round % 50 {
                std::thread::yield_now();
            }
            rig.unmap(DATA, PAGE as u64);
            fill(page.window(), 0);
            for _ in 0..20 {
                std::thread::yield_now();
            }
            if !holds(page.window(), 0) {
                stop.store(true, Ordering::Relaxed);
                panic!("round {round}: written after the unmap was completed");
            }
        }
        until("a refusal", || rig.options.figures.iotlb.totals().faults > 0);
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_reset_of_the_iommu_blocks_every_endpoint() {
    // rule V4
    let mut rig = Rig::new(Setup { workers: 2, ..Setup::new(true) });
    let mut queue = rig.queue(1);
    prepare(&rig, &mut queue, 0x21);
    let page = rig.pages(1);
    rig.map(DATA, page.gpa(), PAGE as u64, Prot::RW);
    assert_eq!(queue.read(0, piece(DATA, PAGE)), OK);
    rig.iommu.front.reset_device().unwrap();
    fill(page.window(), 0);
    let used = queue.used_index();
    queue.submit(Kind::In, 0, &[piece(DATA, PAGE)]);
    rig.round(1);
    rig.round(1);
    assert_eq!(queue.used_index(), used);
    assert!(holds(page.window(), 0));
    rig.iommu.given_up.store(true, Ordering::Relaxed);
}
