//! A controller comes up, is shared by queues, and is stopped before its memory goes.

use std::sync::atomic::Ordering;

use ringfence_dma::Policy;
use ringfence_drivers::nvme::{Data, Error, NotSubmitted, Op};

use crate::{
    controller::{BLOCK, Character, ENTRIES, Evil, QUEUES},
    rig::{BLOCKS, Buffer, LIMIT, Queue, Rig, pattern},
};

#[test]
fn a_controller_is_identified() {
    let rig = Rig::new(Policy::StrictMap);
    let (identity, space) = (rig.disk().identity(), rig.space());
    assert_eq!(
        (identity.serial.as_str(), identity.model.as_str()),
        ("software", "a disk for tests")
    );
    assert!(identity.volatile_cache && identity.deallocates);
    assert_eq!((space.id(), space.blocks(), space.block_bytes()), (1, BLOCKS as u64, BLOCK as u64));
    assert_eq!(rig.disk().queues(), usize::from(QUEUES));
    assert_eq!(rig.disk().depth(), ENTRIES - 1);
}

#[test]
fn queues_are_used_by_threads_and_come_back() {
    let character = Character { stride: 3, ..Character::GOOD };
    let rig = Rig::with(Policy::StrictMap, character);
    for _ in 0..2 {
        let queues: Vec<Queue> =
            (0..QUEUES).map(|n| rig.queue(ENTRIES - 1 - u32::from(n))).collect();
        let none = rig.disk().queue::<Buffer>(1);
        assert!(matches!(none, Err(Error::NoQueue(QUEUES))));
        let space = rig.space();
        std::thread::scope(|scope| {
            for (id, mut queue) in (1..).zip(queues) {
                scope.spawn(move || {
                    for n in 0..200 {
                        let lba = id * 1000 + n;
                        let data = Data::Buffer(Buffer::holding(0, &pattern(BLOCK, lba)));
                        let written = queue.carry_out(&space, Op::Write { lba }, data).unwrap();
                        assert_eq!(written.outcome, Ok(()));
                    }
                });
            }
        });
        let disk = rig.soft.disk();
        for lba in (1..=u64::from(QUEUES)).flat_map(|id| (0..200).map(move |n| id * 1000 + n)) {
            assert!(disk[lba as usize * BLOCK..][..BLOCK] == pattern(BLOCK, lba));
        }
    }
    for depth in [0, ENTRIES, u32::MAX] {
        assert!(matches!(rig.disk().queue::<Buffer>(depth), Err(Error::Depth { .. })));
    }
}

#[test]
fn a_shutdown_is_in_order_and_ends_all_queues() {
    let rig = Rig::new(Policy::StrictMap);
    let (mut queue, space) = (rig.queue(4), rig.space());
    assert_eq!(rig.disk().shut_down(), Ok(()));
    assert!(rig.soft.stats().shut_down.load(Ordering::Acquire));
    assert_eq!(rig.soft.stats().stops.load(Ordering::Acquire), 1);
    let data = Data::Buffer(Buffer::new(0, 512));
    assert_eq!(queue.carry_out(&space, Op::Read { lba: 0 }, data).unwrap_err(), Error::Stopped);
    let mut back = 0;
    queue.abandon(|_| back += 1).unwrap();
    assert_eq!(back, 1, "what was in flight comes back");
    let refused = queue.submit(&space, Op::Flush, Data::None, 0).unwrap_err();
    assert_eq!(refused.why, NotSubmitted::Queue(Error::Stopped));
    assert!(matches!(rig.disk().queue::<Buffer>(1), Err(Error::Stopped)));
    assert_eq!(rig.disk().shut_down(), Ok(()), "a second shutdown does nothing");
}

/// A queue, and then a controller, that is dropped with commands in flight is stopped before any of
/// their memory is unmapped.
#[test]
fn what_is_dropped_in_the_middle_is_stopped_first() {
    for deletes in [true, false] {
        let character = Character { deletes, ..Character::GOOD };
        let rig = Rig::with(Policy::StrictMap, character);
        let (mut queue, space) = (rig.queue(16), rig.space());
        rig.soft.be(Evil::Silent);
        for n in 0..16 {
            let data = Data::Buffer(Buffer::new(0, 8192));
            queue.submit(&space, Op::Read { lba: n * 16 }, data, n).unwrap();
        }
        queue.publish().unwrap();
        let mapped = rig.domain.mappings();
        assert!(mapped >= 16);
        drop(queue);
        assert_eq!(rig.soft.stats().mapped_at_stop.load(Ordering::Acquire), mapped, "{deletes}");
        assert_eq!(rig.soft.stats().stops.load(Ordering::Acquire), u64::from(!deletes));
        // Nothing is left of the queue; the admin queue stays mapped if the controller still runs.
        let own = rig.domain.mappings();
        assert_eq!(own > 0, deletes);
        drop(rig.disk);
        if deletes {
            assert_eq!(rig.soft.stats().mapped_at_stop.load(Ordering::Acquire), own);
        }
        assert_eq!(rig.domain.mappings(), 0);
        assert_eq!(rig.soft.faults(), 0);
    }
}

#[test]
fn one_that_never_starts_or_never_stops_is_an_error() {
    let starts = Character { starts: false, ..Character::GOOD };
    let rig = Rig::with(Policy::StrictMap, starts);
    assert_eq!(rig.disk.as_ref().unwrap_err(), &Error::NotReady(LIMIT));
    assert_eq!(rig.domain.mappings(), 0);

    let stops = Character { stops: false, deletes: false, ..Character::GOOD };
    let rig = Rig::with(Policy::StrictMap, stops);
    let (mut queue, space) = (rig.queue(2), rig.space());
    rig.soft.be(Evil::Silent);
    let data = Data::Buffer(Buffer::new(0, 8192));
    queue.submit(&space, Op::Read { lba: 0 }, data, 0).unwrap();
    queue.publish().unwrap();
    assert_eq!(
        queue.abandon(|_| panic!("it may still write there")),
        Err(Error::NotStopped(LIMIT))
    );
    drop(queue);
    drop(rig.disk);
    // The controller goes on, and reaches nothing.
    assert_eq!(rig.domain.mappings(), 0);
}
