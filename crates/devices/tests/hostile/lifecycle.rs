//! Rings that stop, start, move and wait; memory that changes under them.

use std::sync::{Arc, atomic::Ordering};

use parking_lot::Mutex;
use ringfence_devices::disk::{Disk, Pace, Pacer, Ram};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::Prot;
use ringfence_mem::GuestRam;
use ringfence_run::event;
use ringfence_vhost_user::{ProtocolFeatures, RingAddresses};
use ringfence_virtq::{F_RING_PACKED, F_VERSION_1, blk::Kind};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd;

use crate::rig::*;

#[test]
fn a_ring_goes_on_at_the_index_where_it_was_stopped() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let mut queue = rig.queue(0);
        for round in 1..40u32 {
            // Three requests: the index wraps around the ring of 16.
            queue.go_round();
            let base = rig.blk.get_vring_base(0).unwrap();
            assert_eq!(base, round * 3);
            // Stopped: the device does not read the ring, whatever happens to it.
            queue.submit(Kind::Flush, 0, &[]);
            rig.round(0);
            assert_eq!(queue.used_index(), (round * 3) as u16);
            queue.start(&mut rig.blk, base as u16);
            assert_eq!(queue.finish(), OK);
            let base = rig.blk.get_vring_base(0).unwrap();
            // And back by one, so that the counts stay simple.
            assert_eq!(base, round * 3 + 1);
            queue.clear();
            queue.resume_at((round * 3) as u16);
            queue.start(&mut rig.blk, (round * 3) as u16);
        }
    }
}

#[test]
fn a_base_that_the_used_ring_contradicts_is_refused() {
    let mut rig = Rig::new(Setup::new(false));
    let mut queue = rig.queue(0);
    queue.go_round();
    rig.blk.get_vring_base(0).unwrap();
    rig.blk.set_vring_base(0, 1000).unwrap();
    assert!(rig.blk.set_vring_kick(0, Some(queue.kick.as_fd())).is_err());
    queue.start(&mut rig.blk, 3);
    queue.go_round();
}

/// Whatever a front end sets for a ring, the request is refused, or the ring works or stops: the
/// worker goes on.
#[test]
fn no_base_and_no_address_of_a_ring_ends_its_worker() {
    let mut rig = Rig::new(Setup::new(false));
    let mut neighbour = Rig::new(Setup::new(false));
    let mut unharmed = neighbour.queue(0);
    let part = rig.pages(1);
    let user = rig.ram.user_addr() + (part.gpa() - rig.ram.gpa());
    let places = [0, 0x8000, 15, 0x800f, 16, 0x8010, 17, 0xffff_u32];
    let bases = places.iter().flat_map(|high| places.iter().map(move |low| high << 16 | low));
    let addresses = [user + 16, user + PAGE as u64 - 16, 0, u64::MAX - 15, u64::MAX - 255];
    let cases = bases.map(|base| (base, user)).chain(addresses.map(|addr| (0x8000_8000, addr)));
    for (base, addr) in cases {
        for packed in [false, true] {
            rig.reconnect();
            let features = F_VERSION_1 | if packed { F_RING_PACKED } else { 0 };
            rig.blk.negotiate(features, ProtocolFeatures::REPLY_ACK).unwrap();
            rig.share(&[]);
            let mut queue = RawQueue::new(0, part.window().clone(), part.gpa(), addr);
            queue.clear();
            let base = if packed || addr == user { base } else { 0 };
            let odd = RingAddresses { desc: addr, avail: addr, used: addr, log: None };
            let addresses = if addr == user { queue.addresses() } else { odd };
            let started = rig
                .blk
                .set_vring_num(0, SIZE)
                .and_then(|()| rig.blk.set_vring_base(0, base))
                .and_then(|()| rig.blk.set_vring_addr(0, &addresses))
                .and_then(|()| rig.blk.set_vring_kick(0, Some(queue.kick.as_fd())))
                .and_then(|()| rig.blk.set_vring_enable(0, true));
            if started.is_err() {
                continue;
            }
            // Whichever place is looked at, there is a chain, of whichever lap.
            for flags in [1 << 7, 1 << 15] {
                for at in 0..SIZE {
                    queue.page.write(usize::from(at) * 16, &desc_bytes(part.gpa(), 16, at, flags));
                }
                event::signal(&queue.kick);
                rig.round(0);
            }
            rig.blk.get_vring_base(0).unwrap();
        }
    }
    rig.reconnect();
    rig.queue(0).go_round();
    unharmed.go_round();
}

#[test]
fn a_ring_that_is_started_and_disabled_has_no_side_effects() {
    // rule D28
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let mut other = rig.queue(1);
        let mut queue = rig.queue(0);
        rig.blk.get_vring_base(0).unwrap();
        rig.blk.set_vring_enable(0, false).unwrap();
        queue.start_disabled(&mut rig.blk, 0);
        queue.submit(Kind::Flush, 0, &[]);
        other.go_round();
        rig.round(0);
        assert_eq!(queue.used_index(), 0);
        assert_eq!(rig.on_unit(0, |unit| unit.under_way(0)), 0);
        rig.blk.set_vring_enable(0, true).unwrap();
        assert_eq!(queue.finish(), OK);
        // And the other way round, while it runs.
        rig.blk.set_vring_enable(0, false).unwrap();
        queue.submit(Kind::Flush, 0, &[]);
        other.go_round();
        rig.round(0);
        assert_eq!(queue.used_index(), 1);
        rig.blk.set_vring_enable(0, true).unwrap();
        assert_eq!(queue.finish(), OK);
    }
}

#[test]
fn memory_can_be_added_and_replaced_under_running_rings() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let (mut queue, mut other) = (rig.queue(0), rig.queue(1));
        let more = GuestRam::new(64 * PAGE, 0x9_0000_0000).unwrap();
        let data = RamPart::carve(&more, PAGE, PAGE).unwrap();
        let mut addr = data.gpa();
        if translated {
            addr = 0x4000_0000;
            rig.map(addr, data.gpa(), PAGE as u64, Prot::WRITE);
        }
        let fd = more.fd().try_clone_to_owned().unwrap();
        for _ in 0..20 {
            assert_eq!(queue.read(0, piece(addr, PAGE)), IOERR);
            rig.share(&[(more.region(), &fd)]);
            fill(data.window(), 0xff);
            assert_eq!(queue.read(0, piece(addr, PAGE)), OK);
            assert!(holds(data.window(), 0));
            other.go_round();
            rig.share(&[]);
            other.go_round();
        }
        assert_eq!(unmapped_by(&rig.workers), 0);
    }
}

#[test]
fn a_ring_that_new_memory_leaves_out_is_used_no_more_until_it_is_back() {
    let mut rig = Rig::new(Setup::new(false));
    let (mut queue, mut other) = (rig.queue(0), rig.queue(1));
    let more = GuestRam::new(64 * PAGE, 0x9_0000_0000).unwrap();
    queue.go_round();
    rig.blk.set_mem_table(&[(more.region(), more.fd())]).unwrap();
    assert!(rig.on_unit(0, |unit| unit.is_away(0)) && rig.failure(0).is_none());
    let used = queue.used_index();
    queue.submit(Kind::Flush, 0, &[]);
    rig.round(0);
    assert_eq!(queue.used_index(), used);
    rig.share(&[]);
    assert_eq!(queue.finish(), OK);
    other.go_round();
    rig.blk.set_mem_table(&[(more.region(), more.fd())]).unwrap();
    (0..2).for_each(|ring| assert!(rig.blk.get_vring_base(ring).is_ok()));
    rig.share(&[]);
    // The rings had kept the memory that they were in.
    assert_eq!(unmapped_by(&rig.workers), 0);
    queue.clear();
    queue.start(&mut rig.blk, 0);
    queue.go_round();
}

#[test]
fn memory_that_the_rings_of_an_iommu_have_kept_is_unmapped_by_no_worker() {
    let mut rig = Rig::new(Setup::new(true));
    let more = GuestRam::new(64 * PAGE, 0x9_0000_0000).unwrap();
    // The rings are not in it, and fail. They are left as they are until they stop.
    for (ram, stops) in [(&more, false), (&rig.ram, true)] {
        // One guest's memories agree with each other.
        let front = &mut rig.iommu.front;
        front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        assert!(!stops || (0..2).all(|ring| front.get_vring_base(ring).is_ok()));
    }
    rig.iommu.given_up.store(true, Ordering::Relaxed);
    assert_eq!(unmapped_by(&rig.workers), 0);
}

#[test]
fn requests_that_a_paced_disk_has_not_completed_yet_are_when_the_ring_stops() {
    let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 20).unwrap();
    let ram = Arc::new(Ram::map(file.as_fd(), 1 << 20).unwrap());
    // An hour of latency.
    let pace = Pace { latency_ns: 3_600_000_000_000, ..Pace::default() };
    let disk = Disk::Paced(ram, Arc::new(Mutex::new(Pacer::new(pace))));
    for translated in [false, true] {
        let mut rig = Rig::new(Setup { disk: disk.clone(), ..Setup::new(translated) });
        let mut queue = rig.queue(0);
        let page = rig.pages(1);
        let mut addr = page.gpa();
        if translated {
            addr = 0x4000_0000;
            rig.map(addr, page.gpa(), PAGE as u64, Prot::WRITE);
        }
        fill(page.window(), 0xff);
        queue.submit(Kind::In, 0, &[piece(addr, PAGE)]);
        until("a request under way", || rig.on_unit(0, |unit| unit.under_way(0)) == 1);
        assert_eq!(queue.used_index(), 0);
        assert_eq!(rig.blk.get_vring_base(0).unwrap(), 1);
        assert_eq!(queue.finish(), OK);
        assert!(holds(page.window(), 0));
        assert!(wait_for(&queue.call, LONG), "and the driver is interrupted for it");
    }
}

#[test]
fn a_connection_that_ends_stops_its_rings() {
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    queue.go_round();
    rig.reconnect();
    queue.submit(Kind::Flush, 0, &[]);
    rig.iommu_works();
    assert_eq!(queue.used_index(), 3);
    queue.start(&mut rig.blk, 3);
    assert_eq!(queue.finish(), OK);
}
