//! A domain that fails while slots are mapped, unmapped and given back.

use ringfence_dma::{BounceLimits, Direction, Error, ErrorKind, PoolBuffer};

use ringfence_iommu::Range;

use super::Rig;
use crate::mock::{Broken, Event, STATUS};

const LIMITS: BounceLimits = BounceLimits { largest: 32 << 10, max_bytes: 96 << 10, idle_ms: 100 };

/// Takes and gives back slots in every possible way; returns how many could not be taken.
fn program(rig: &Rig) -> usize {
    let [device, other] = &rig.devices;
    let mut failed = 0;
    let mut note = |taken: Result<PoolBuffer, Error>| match taken {
        Ok(buffer) => {
            assert!(rig.domain.reach(buffer.iova().0).is_some(), "it is mapped");
            Some(buffer)
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Device { status: STATUS });
            failed += 1;
            None
        }
    };
    // Growth by many, by one, for the other device, and slots for one use.
    let small = note(device.take_buffer(4096, Direction::ToDevice));
    let large = note(device.take_buffer(32 << 10, Direction::FromDevice));
    let single = note(other.take_buffer(40 << 10, Direction::ToDevice));
    drop((small, single));
    // No room: idle slots are given back; the same slot is remapped.
    let second = note(device.take_buffer(32 << 10, Direction::FromDevice));
    drop((large, second));
    let remapped: Vec<_> =
        (0..3).map(|_| note(device.take_buffer(32 << 10, Direction::Bidirectional))).collect();
    let beyond = note(other.take_buffer(32 << 10, Direction::ToDevice));
    drop((remapped, beyond));
    rig.pools.trim();
    drop(note(other.take_buffer(4096, Direction::ToDevice)));
    rig.clock.advance(100_000_000);
    rig.pools.expire();
    failed
}

#[test]
fn whichever_operation_fails_no_slot_is_lost() {
    // rules L34, L50
    let rig = Rig::new(LIMITS);
    assert_eq!(program(&rig), 0);
    let stats = rig.pools.stats();
    assert!(stats.remapped > 0 && stats.given_back > 0 && stats.single_use > 1, "{stats:?}");
    let operations = rig.domain.events().len();
    rig.end();
    let (mut failures, mut quarantines) = (0, 0);
    for good in 0..operations as i64 {
        let rig = Rig::new(LIMITS);
        rig.domain.fail_after(good);
        failures += program(&rig);
        let stats = rig.pools.stats();
        quarantines += usize::from(stats.quarantined_bytes > 0);
        assert!(rig.memory.bytes() <= LIMITS.max_bytes + stats.quarantined_bytes);
        rig.domain.fail_after(i64::MAX);
        rig.end();
    }
    assert!(failures > 5 && quarantines > 5, "{failures} {quarantines}");
}

#[test]
fn neighbours_are_mapped_with_one_sync_and_each_is_unmapped_by_itself() {
    let rig = Rig::new(LIMITS);
    let buffer = rig.devices[0].take_buffer(100, Direction::ToDevice).unwrap();
    let events = rig.domain.events();
    let maps = events.iter().filter(|event| matches!(event, Event::Map(..))).count();
    let syncs: Vec<_> = events.iter().filter(|event| matches!(event, Event::SyncMap(_))).collect();
    assert_eq!((maps, syncs.len()), (16, 1));
    let hull = rig.pools.classes()[0].range.first();
    assert!(matches!(syncs[0], Event::SyncMap(range) if range.first() == hull));
    assert_eq!(buffer.iova(), hull, "the lowest first");
    rig.domain.forget_events();
    rig.pools.trim();
    let events = rig.domain.events();
    let unmaps = events.iter().filter(|event| matches!(event, Event::Unmap { .. })).count();
    let syncs = events.iter().filter(|event| matches!(event, Event::Sync)).count();
    assert_eq!((unmaps, syncs), (1, 1), "what touches is one range, and all have one sync");
    assert_eq!((rig.memory.bytes(), rig.domain.cached().len()), (4096, 1));
    drop(buffer);
    rig.end();
}

#[test]
fn growth_that_fails_half_way_gives_what_it_got() {
    let rig = Rig::new(LIMITS);
    rig.domain.fail_after(5);
    let buffer = rig.devices[0].take_buffer(100, Direction::ToDevice).unwrap();
    let stats = rig.pools.stats();
    assert_eq!((stats.grown, stats.slots, stats.kept_bytes), (5, 1, 4 * 4096));
    assert_eq!(rig.memory.bytes(), 5 * 4096);
    // What it did not get is available to others.
    let rest: Vec<_> =
        (1..24).map(|_| rig.devices[0].take_buffer(100, Direction::ToDevice).unwrap()).collect();
    let stats = rig.pools.stats();
    assert_eq!((stats.grown, stats.single_use, stats.slot_bytes), (24, 0, LIMITS.max_bytes));
    let beyond = rig.devices[0].take_buffer(100, Direction::ToDevice).unwrap();
    assert_eq!(rig.pools.stats().single_use, 1);
    drop((buffer, rest, beyond));
    rig.end();
}

#[test]
fn a_slot_whose_unmap_fails_takes_no_other_with_it() {
    let rig = Rig::new(LIMITS);
    let take = |len| rig.devices[0].take_buffer(len, Direction::ToDevice).unwrap();
    // Of three classes, in ranges of their own.
    let buffers = [take(2 << 10), take(8 << 10), take(32 << 10)];
    let lost = Range::from_len(buffers[1].iova(), 4096).unwrap();
    drop(buffers);
    let slots = rig.pools.stats().kept_bytes;
    *rig.domain.broken.lock().unwrap() =
        Broken { sync: true, only: Some(lost), ..Broken::default() };
    // Polled for.
    rig.domain.hold();
    rig.pools.trim();
    *rig.domain.broken.lock().unwrap() = Broken::default();
    let stats = rig.pools.stats();
    assert!(stats.quarantined_bytes > 0 && stats.quarantined_bytes < slots, "{stats:?}");
    assert_eq!(rig.memory.bytes(), stats.quarantined_bytes);
    rig.domain.let_go();
    rig.end();
}

#[test]
fn a_slot_whose_unmap_fails_is_never_used_again() {
    for broken in
        [Broken { unmap: true, ..Broken::default() }, Broken { sync: true, ..Broken::default() }]
    {
        let rig = Rig::new(LIMITS);
        let device = &rig.devices[0];
        let buffer = device.take_buffer(32 << 10, Direction::ToDevice).unwrap();
        let lost = buffer.iova();
        drop(buffer);
        *rig.domain.broken.lock().unwrap() = broken;
        rig.pools.trim();
        let stats = rig.pools.stats();
        assert_eq!((stats.quarantined_bytes, stats.slots, stats.kept_bytes), (64 << 10, 0, 0));
        assert_eq!(rig.memory.bytes(), 64 << 10, "its memory is not given back");
        // It goes on failing: the memory lost that way is bounded.
        let single = device.take_buffer(40 << 10, Direction::ToDevice).unwrap();
        drop(single);
        for _ in 0..100 {
            drop(device.take_buffer(32 << 10, Direction::ToDevice));
            rig.pools.trim();
        }
        let error = device.take_buffer(40 << 10, Direction::ToDevice).unwrap_err();
        assert!(matches!(error, Error::BounceQuota { held, .. } if held > 120 << 10), "{error}");
        assert!(rig.memory.bytes() <= LIMITS.max_bytes + super::QUOTA);
        *rig.domain.broken.lock().unwrap() = Broken::default();
        let other = rig.devices[1].take_buffer(4096, Direction::ToDevice).unwrap();
        let range = Range::from_len(other.iova(), 4096).unwrap();
        assert!(!range.contains(lost));
        drop(other);
        rig.end();
    }
}

#[test]
fn memory_that_is_kept_elsewhere_is_given_back_before_there_is_none() {
    // rule L50
    let rig = Rig::new(LIMITS);
    let device = &rig.devices[0];
    rig.memory.set_room(64 << 10);
    drop(device.take_buffer(4096, Direction::ToDevice).unwrap());
    assert_eq!(rig.memory.bytes(), 64 << 10, "kept");
    let large = device.take_buffer(32 << 10, Direction::ToDevice).unwrap();
    assert!(rig.pools.stats().given_back >= 8);
    let error = device.take_buffer(40 << 10, Direction::ToDevice).unwrap_err();
    assert_eq!((error, error.kind()), (Error::Bounce(40 << 10), ErrorKind::BounceFull));
    assert_eq!(rig.pools.stats().kept_bytes, 0, "all that was kept was given back for it");
    drop(large);
    let single = device.take_buffer(40 << 10, Direction::ToDevice).unwrap();
    let error = device.take_buffer(32 << 10, Direction::ToDevice).unwrap_err();
    assert_eq!(error, Error::Bounce(32 << 10));
    assert_eq!(rig.held_by(0), 40 << 10, "what failed is not charged");
    drop(single);
    rig.end();
}
