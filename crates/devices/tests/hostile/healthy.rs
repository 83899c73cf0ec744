//! A driver that keeps the rules.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_dma::Segment;
use ringfence_drivers::blk::{Done, DriverQueue, QueueLayout};
use ringfence_iommu::Prot;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::RingAddresses;
use ringfence_virtq::blk::Kind;

use crate::rig::*;

fn written_and_read_through_two_queues(translated: bool) {
    let mut rig = Rig::new(Setup::new(translated));
    let (mut one, mut two) = (rig.queue(0), rig.queue(1));
    let (from, to) = (rig.pages(2), rig.pages(2));
    let (mut out, mut back) = (from.gpa(), to.gpa());
    let len = 2 * PAGE;
    if translated {
        (out, back) = (0x5000_0000, 0xffff_ffff_ffff_e000);
        rig.map(out, from.gpa(), len as u64, Prot::READ);
        rig.map(back, to.gpa(), len as u64, Prot::WRITE);
    }
    fill(from.window(), 0x5a);
    assert_eq!(one.write(3, piece(out, len)), OK);
    // In pieces that end anywhere, the last one, if translated, up to address 2^64 - 1.
    let pieces = [piece(back, 100), piece(back + 100, 412), piece(back + 512, len - 512)];
    assert_eq!(two.request(Kind::In, 3, &pieces), OK);
    assert!(holds(to.window(), 0x5a));
    rig.round(0);
    let stats = rig.options.figures.sum();
    assert_eq!((stats.requests, stats.failed, stats.bytes), (2, 0, 2 * len as u64));
    assert!(rig.failure(0).is_none() && rig.failure(1).is_none());
}

#[test]
fn without_an_iommu_ring_addresses_are_user_addresses_and_buffers_guest_physical() {
    // rule D2
    written_and_read_through_two_queues(false);
}

#[test]
fn behind_an_iommu_addresses_of_rings_and_of_buffers_are_iovas() {
    // rule D2
    written_and_read_through_two_queues(true);
}

#[test]
fn what_one_mode_calls_an_address_means_nothing_in_the_other() {
    // rule D2
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    let data = rig.pages(1);
    // Guest-physical addresses are not looked at behind an IOMMU ...
    assert_eq!(queue.read(0, piece(data.gpa(), PAGE)), IOERR);
    // ... and user addresses find no ring.
    let ring = rig.pages(1);
    let user = rig.ram.user_addr() + (ring.gpa() - rig.ram.gpa());
    let other = RawQueue::new(1, ring.window().clone(), ring.gpa(), user);
    rig.blk.set_vring_num(1, SIZE).unwrap();
    rig.blk.set_vring_addr(1, &other.addresses()).unwrap();
    rig.blk.set_vring_kick(1, Some(other.kick.as_fd())).unwrap();
    rig.blk.set_vring_enable(1, true).unwrap();
    rig.round(0);
    assert!(rig.on_unit(0, |unit| unit.is_away(1)));

    let mut rig = Rig::new(Setup::new(false));
    let ring = rig.pages(1);
    let other = RawQueue::new(1, ring.window().clone(), ring.gpa(), ring.gpa());
    rig.blk.set_vring_num(1, SIZE).unwrap();
    rig.blk.set_vring_addr(1, &other.addresses()).unwrap();
    assert!(rig.blk.set_vring_kick(1, Some(other.kick.as_fd())).is_err());
}

#[test]
fn a_unit_does_not_outlive_the_meaning_of_its_addresses() {
    // rule D2
    let mut rig = Rig::new(Setup::new(false));
    let mut queue = rig.queue(0);
    queue.go_round();
    rig.blk.get_vring_base(0).unwrap();
    // The same connection settles on ACCESS_PLATFORM: from now on there is protection.
    rig.translated = true;
    rig.domain.attach(ENDPOINT).unwrap();
    rig.negotiate();
    let mut queue = rig.queue(0);
    queue.go_round();
    let data = rig.pages(1);
    assert_eq!(queue.read(0, piece(data.gpa(), PAGE)), IOERR);
}

/// Runs requests through the driver library that programs use, with notifications enabled on both
/// sides.
fn requests_are_completed(translated: bool, workers: usize, notify: Notify, count: u64) {
    let setup = Setup { workers, notify, event_idx: true, ..Setup::new(translated) };
    let mut rig = Rig::new(setup);
    let layout = QueueLayout::new(16, 4);
    let mut queues = Vec::new();
    for index in 0..2 {
        let part = rig.pages(layout.bytes().div_ceil(PAGE));
        let mut bus = part.gpa();
        let mut addr = rig.ram.user_addr() + (part.gpa() - rig.ram.gpa());
        if translated {
            bus = RING_IOVA + (u64::from(index) << 20);
            addr = bus;
            rig.map(bus, part.gpa(), part.window().len() as u64, Prot::RW);
        }
        let (kick, call) = (Arc::new(event::new().unwrap()), Arc::new(event::new().unwrap()));
        let (k, c) = (Arc::clone(&kick), Arc::clone(&call));
        let queue = DriverQueue::new(layout, part.window(), bus, k, c, notify).unwrap();
        let addresses = RingAddresses {
            desc: addr,
            avail: addr + layout.avail_at() as u64,
            used: addr + layout.used_at() as u64,
            log: None,
        };
        rig.blk.set_vring_num(index, 16).unwrap();
        rig.blk.set_vring_addr(index, &addresses).unwrap();
        rig.blk.set_vring_call(index, Some(call.as_fd())).unwrap();
        rig.blk.set_vring_kick(index, Some(kick.as_fd())).unwrap();
        rig.blk.set_vring_enable(index, true).unwrap();
        queues.push(queue);
    }
    let data = rig.pages(1);
    let mut addr = data.gpa();
    if translated {
        addr = 0x9000_0000;
        rig.map(addr, data.gpa(), PAGE as u64, Prot::RW);
    }
    let segment = [Segment { addr, len: 512 }];
    for n in 0..count {
        let queue = &mut queues[n as usize % 2];
        queue.submit(Kind::In, n % 8, &segment, n).unwrap();
        queue.publish();
        let start = Instant::now();
        loop {
            if let Some(done) = queue.reap().unwrap() {
                assert_eq!(done, Done { token: n, ok: true, written: 513 });
                break;
            }
            queue.wait(LONG);
            assert!(start.elapsed() < LONG, "{notify}: a notification was lost");
        }
    }
    if notify == Notify::Poll {
        // At most one in 2^16 chains by the rules of the event index.
        assert!(queues.iter().all(|queue| queue.sleeps() == 0 && queue.kicks() <= 1));
    }
}

#[test]
fn no_notification_is_lost_however_both_ends_wait() {
    for notify in [Notify::Sleep, Notify::Adaptive, Notify::Poll] {
        requests_are_completed(true, 2, notify, 300);
    }
    requests_are_completed(false, 1, Notify::Sleep, 300);
}

#[test]
fn a_fault_is_reported_although_the_worker_of_the_iommu_sleeps() {
    let mut rig = Rig::new(Setup { workers: 2, notify: Notify::Sleep, ..Setup::new(true) });
    // The second queue is the second worker's, the IOMMU's rings are the first one's.
    let mut queue = rig.queue(1);
    for round in 0..20 {
        let addr = 0x6000_0000 + round * PAGE as u64;
        assert_eq!(queue.read(0, piece(addr, 512)), IOERR);
        let record = rig.fault_at(addr);
        assert_eq!(record.access, Prot::WRITE);
    }
}

#[test]
fn a_worker_without_kicks_finds_what_there_is() {
    let mut rig = Rig::new(Setup { notify: Notify::Poll, ..Setup::new(true) });
    let mut queue = rig.queue(0);
    rig.blk.get_vring_base(0).unwrap();
    rig.blk.set_vring_kick(0, None).unwrap();
    queue.go_round();
    assert!(wait_for(&queue.call, Duration::ZERO), "an interrupt was sent all the same");
}
