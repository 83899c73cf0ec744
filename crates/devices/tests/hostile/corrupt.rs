//! Rings with a driver that breaks the rules.

use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_iommu::{FaultReason, Prot};
use ringfence_virtq::{
    blk::{HEADER_BYTES, Header, Kind},
    layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE},
};
use zerocopy::IntoBytes;

use crate::rig::*;

/// Breaks one queue of two and checks that it stops, with a reason that contains `why`, that
/// nothing else does, and that it can be started again.
fn breaks(translated: bool, why: &str, corrupt: impl FnOnce(&mut RawQueue)) {
    let mut rig = Rig::new(Setup::new(translated));
    let (mut bad, mut good) = (rig.queue(0), rig.queue(1));
    bad.go_round();
    good.go_round();
    let before = bad.used_index();
    corrupt(&mut bad);
    assert!(wait_for(&bad.err, LONG), "the front end gets no error event: {why}");
    let error = rig.failure(0).expect("the queue has stopped");
    assert!(error.contains(why), "{error:?} does not contain {why:?}");

    good.go_round();
    rig.iommu_works();
    assert_eq!(bad.used_index(), before, "{why}: a queue that has stopped completes requests");
    assert!(rig.failure(1).is_none());
    // Memory can still be added to the device.
    rig.share(&[]);
    good.go_round();

    rig.blk.get_vring_base(0).unwrap();
    bad.clear();
    bad.start(&mut rig.blk, 0);
    bad.go_round();
    good.go_round();
    assert!(rig.failure(0).is_none());
}

fn breaks_either_way(why: &str, corrupt: impl Fn(&mut RawQueue)) {
    breaks(false, why, &corrupt);
    breaks(true, why, &corrupt);
}

#[test]
fn a_loop_of_descriptors_stops_its_queue_alone() {
    breaks_either_way("a loop", |ring| {
        ring.desc(0, ring.bus, 16, DESC_F_NEXT, 1);
        ring.desc(1, ring.bus, 16, DESC_F_NEXT, 0);
        ring.push(0);
    });
}

#[test]
fn a_descriptor_outside_of_the_table_stops_its_queue_alone() {
    breaks_either_way("is followed by 16", |ring| {
        ring.desc(0, ring.bus, 16, DESC_F_NEXT, SIZE);
        ring.push(0);
    });
    breaks_either_way("the queue has 16 descriptors", |ring| ring.push(SIZE));
}

#[test]
fn an_available_index_that_jumps_stops_its_queue_alone() {
    breaks_either_way("available index 16384", |ring| ring.set_avail(0x4000));
    // One back is a jump, too.
    breaks_either_way("available index 2", |ring| ring.set_avail(2));
}

#[test]
fn lengths_that_overflow_stop_their_queue_alone() {
    breaks_either_way("past the end of the address space", |ring| {
        ring.desc(0, u64::MAX - 14, 16, 0, 0);
        ring.push(0);
    });
    breaks_either_way("more than 2^32 - 1", |ring| {
        ring.desc(0, ring.bus, u32::MAX, DESC_F_NEXT, 1);
        ring.desc(1, ring.bus, 1, DESC_F_WRITE, 0);
        ring.push(0);
    });
}

#[test]
fn readable_after_writable_stops_its_queue_alone() {
    breaks_either_way("device-readable after a device-writable", |ring| {
        ring.desc(0, ring.bus, 16, DESC_F_NEXT | DESC_F_WRITE, 1);
        ring.desc(1, ring.bus, 16, 0, 0);
        ring.push(0);
    });
}

#[test]
fn invalid_indirect_tables_stop_their_queue_alone() {
    let table = |ring: &RawQueue| ring.bus + TABLE_AT as u64;
    breaks_either_way("is itself indirect", |ring| {
        ring.page.write(TABLE_AT, &desc_bytes(table(ring), 16, DESC_F_INDIRECT, 0));
        ring.desc(0, table(ring), 16, DESC_F_INDIRECT, 0);
        ring.push(0);
    });
    breaks_either_way("a loop", |ring| {
        ring.page.write(TABLE_AT, &desc_bytes(ring.bus, 16, DESC_F_NEXT, 0));
        ring.desc(0, table(ring), 16, DESC_F_INDIRECT, 0);
        ring.push(0);
    });
    breaks_either_way("has 15 bytes", |ring| {
        ring.desc(0, table(ring), 15, DESC_F_INDIRECT, 0);
        ring.push(0);
    });
    breaks_either_way("has 4294967280 bytes", |ring| {
        ring.desc(0, table(ring), u32::MAX - 15, DESC_F_INDIRECT, 0);
        ring.push(0);
    });
    breaks_either_way("indirect and not the last", |ring| {
        ring.desc(0, table(ring), 16, DESC_F_INDIRECT | DESC_F_NEXT, 1);
        ring.push(0);
    });
    breaks_either_way("cannot be reached", |ring| {
        ring.desc(0, 0xdead_0000, 16, DESC_F_INDIRECT, 0);
        ring.push(0);
    });
}

#[test]
fn a_broken_queue_does_not_survive_a_reset_or_a_new_connection() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let mut bad = rig.queue(0);
        bad.push(SIZE);
        assert!(wait_for(&bad.err, LONG));
        rig.blk.reset_device().unwrap();
        rig.negotiate();
        bad.clear();
        bad.start(&mut rig.blk, 0);
        bad.go_round();

        bad.push(SIZE);
        assert!(wait_for(&bad.err, LONG));
        rig.reconnect();
        bad.clear();
        bad.start(&mut rig.blk, 0);
        bad.go_round();
        rig.iommu_works();
    }
}

#[test]
fn an_address_that_leads_nowhere_fails_its_request_and_no_more() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let mut queue = rig.queue(0);
        let page = rig.pages(1);
        let mut good = page.gpa();
        if translated {
            good = 0x4000_0000;
            rig.map(good, page.gpa(), PAGE as u64, Prot::RW);
        }
        for bad in [0, 0xdead_0000, u64::MAX - 511] {
            assert_eq!(queue.read(0, piece(bad, 512)), IOERR);
            if translated {
                let fault = rig.fault_at(bad);
                assert_eq!((fault.reason, fault.access), (FaultReason::Mapping, Prot::WRITE));
            }
            assert_eq!(queue.write(0, piece(bad, 512)), IOERR);
            if translated {
                assert_eq!(rig.fault_at(bad).access, Prot::READ);
            }
            assert_eq!(queue.read(0, piece(good, 512)), OK);
        }
        // Only half of it is mapped.
        let over = good + PAGE as u64 - 512;
        let beyond = if translated { over } else { GPA + rig.ram.len() as u64 - 512 };
        assert_eq!(queue.read(0, piece(beyond, 1024)), IOERR);
        // The header, then the status, where nothing is.
        queue.lay(Kind::Flush, 0, &[]);
        queue.desc(0, 0xdead_0000, 16, DESC_F_NEXT, 1);
        queue.push(0);
        assert_eq!(queue.finish(), IOERR);
        queue.lay(Kind::Flush, 0, &[]);
        queue.desc(1, 0xdead_0000, 1, DESC_F_WRITE, 0);
        queue.push(0);
        assert_eq!(queue.finish(), None);
        queue.go_round();
        assert!(rig.failure(0).is_none());
    }
}

#[test]
fn invalid_requests_are_completed_and_the_queue_goes_on() {
    let mut rig = Rig::new(Setup::new(false));
    let mut queue = rig.queue(0);
    let page = rig.pages(1).gpa();
    let sectors = (1 << 20) / 512;
    assert_eq!(queue.read(sectors - 1, piece(page, 512)), OK);
    assert_eq!(queue.read(sectors, piece(page, 512)), IOERR);
    assert_eq!(queue.read(sectors - 1, piece(page, 1024)), IOERR);
    assert_eq!(queue.read(u64::MAX, piece(page, 512)), IOERR);
    assert_eq!(queue.read(u64::MAX / 512, piece(page, 512)), IOERR);
    assert_eq!(queue.write(0, piece(page, 511)), IOERR);
    // A request of a kind that does not exist.
    queue.lay(Kind::Flush, 0, &[]);
    let header = Header { kind: 99.into(), reserved: 0.into(), sector: 0.into() };
    queue.page.write(2048, header.as_bytes());
    queue.push(0);
    assert_eq!(queue.finish(), Some(2));
    // No header, a header cut short, no room for a status, no buffers' bytes at all.
    let status = queue.bus + 2064;
    queue.desc(0, status, 1, DESC_F_WRITE, 0);
    queue.push(0);
    assert_eq!(queue.wait(), (0, 1));
    assert_eq!(queue.status(), 1);
    queue.desc(0, queue.bus + 2048, HEADER_BYTES as u32 - 1, DESC_F_NEXT, 1);
    queue.desc(1, status, 1, DESC_F_WRITE, 0);
    queue.push(0);
    assert_eq!(queue.wait(), (0, 1));
    queue.desc(0, queue.bus + 2048, 16, 0, 0);
    queue.push(0);
    assert_eq!(queue.wait(), (0, 0));
    queue.desc(0, 0, 0, DESC_F_WRITE, 0);
    queue.push(0);
    assert_eq!(queue.wait(), (0, 0));
    queue.go_round();
    assert!(rig.failure(0).is_none());
}

#[test]
fn garbage_written_under_a_running_ring_harms_no_other_queue() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let (mut bad, mut good) = (rig.queue(0), rig.queue(1));
        let mut random = TestRunner::default().rng().next_u64() | 1;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..100 {
            // Half of the words are such that they get past the first checks.
            for at in 0..SIZE {
                let (a, b) = (next(), next());
                let addr = if a & 1 == 0 { bad.bus + a % PAGE as u64 } else { a };
                let len = if b & 2 == 0 { b as u32 % 4096 } else { b as u32 };
                let flags = (b >> 32) as u16 % 8;
                bad.desc(at, addr, len, flags, (b >> 48) as u16 % (SIZE + 1));
                bad.push((a >> 48) as u16 % SIZE);
            }
            if next() % 4 == 0 {
                bad.set_avail(next() as u16);
            }
            good.go_round();
            rig.blk.get_vring_base(0).unwrap();
            bad.clear();
            bad.start(&mut rig.blk, 0);
        }
        bad.go_round();
        rig.iommu_works();
    }
}
