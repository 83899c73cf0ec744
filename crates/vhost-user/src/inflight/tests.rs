//! A process dies between any two stores, and the next one finds what it had taken and not completed.

use std::{
    cell::Cell,
    collections::{BTreeSet, VecDeque},
};

use proptest::prelude::*;

use super::*;

thread_local! {
    /// How many stores this thread may still do before it dies; `None`: no limit.
    static STORES: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Counts a store that is due; returns whether it is still done.
pub(super) fn alive() -> bool {
    STORES.with(|stores| match stores.get() {
        None => true,
        Some(0) => false,
        Some(left) => {
            stores.set(Some(left - 1));
            true
        }
    })
}

/// From now on, this thread dies after so many stores.
fn live_for(stores: Option<u32>) {
    STORES.with(|left| left.set(stores));
}

/// The flags of a ring's descriptor that was never written.
fn zero(_: u16) -> Result<u16, InflightError> {
    Ok(0)
}

/// For a new region: recovery reads no flags of its ring.
fn nothing(_: u16) -> Result<u16, InflightError> {
    unreachable!("the region is new")
}

#[test]
fn a_ring_is_at_most_as_large_as_its_region() {
    for packed in [false, true] {
        let (made, _fd) = InflightRegion::allocate(1, 4, packed).unwrap();
        let refused = match packed {
            true => made.packed(0, 5, 1 << 15 | 1 << 31, zero).map(|_| ()),
            false => made.split(0, 5, 0).map(|_| ()),
        };
        assert!(matches!(refused, Err(InflightError::Ring { size: 5, most: 4 })));
    }
}

/// Nothing is decided by flags that cannot be read.
#[test]
fn a_ring_that_cannot_be_read_leaves_its_record_as_it_was() {
    let (made, _fd) = InflightRegion::allocate(1, 4, true).unwrap();
    let buffer = [PackedDescriptor { addr: 1, len: 2, flags: 0, id: 4 }];
    let (mut queue, _) = made.packed(0, 4, 1 << 15 | 1 << 31, nothing).unwrap();
    let taken = queue.take(&buffer).unwrap();
    queue.complete(taken);
    // It dies between the record of the batch's end and the used ring.
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        queue.publish(|| panic!("it is killed"))
    }));
    assert!(died.is_err());
    let unreadable = |_| Err::<u16, _>(InflightError::NoQueue(77));
    assert!(matches!(made.packed(0, 4, 0, unreadable), Err(InflightError::NoQueue(77))));
    // Not shown: the descriptor is available as in its first lap.
    let available = |_| Ok::<_, InflightError>(1 << 7);
    let (_, buffers) = made.packed(0, 4, 0, available).unwrap();
    assert_eq!(buffers.len(), 1, "it was completed and never shown");
}

#[test]
fn a_region_that_another_process_kept_is_the_same_region() {
    for packed in [false, true] {
        let (made, fd) = InflightRegion::allocate(3, 100, packed).unwrap();
        assert!(made.place().len >= 3 * part_len(100, packed) as u64);
        let again = InflightRegion::open(fd, &made.place(), packed).unwrap();
        if packed {
            let (mut queue, _) = made.packed(2, 100, 1 << 15 | 1 << 31, zero).unwrap();
            queue.take(&[PackedDescriptor { addr: 1, len: 2, flags: 3, id: 4 }]).unwrap();
            assert_eq!(again.packed(2, 100, 0, zero).unwrap().1.len(), 1);
            assert!(again.split(0, 100, 0).is_err());
        } else {
            let (mut queue, _) = made.split(2, 100, 0).unwrap();
            queue.take(99);
            assert_eq!(again.split(2, 100, 0).unwrap().1, [99]);
            assert!(again.packed(0, 100, 0, zero).is_err());
        }
        assert!(matches!(made.part(3, 100, packed), Err(InflightError::NoQueue(3))));
    }
}

#[test]
fn a_device_has_a_word_of_its_own_where_there_is_room_for_it() {
    let (made, fd) = InflightRegion::allocate(2, 64, false).unwrap();
    assert_eq!(made.note(), 0);
    made.set_note(u64::MAX - 7);
    let bytes = 2 * part_len(64, false);
    let again = |len: usize| {
        let place = msg::Inflight { len: len as u64, ..made.place() };
        InflightRegion::open(fd.try_clone().unwrap(), &place, false).unwrap()
    };
    let mut queue = again(bytes + ALIGN).split(1, 64, 0).unwrap().0;
    (0..64).for_each(|head| queue.take(head));
    assert_eq!(again(bytes + ALIGN).note(), u64::MAX - 7, "a queue wrote there");
    // A region that another program made may have no room for the note.
    let other = again(bytes);
    other.set_note(1);
    assert_eq!((other.note(), made.note()), (0, u64::MAX - 7));
}

#[test]
fn a_region_that_does_not_hold_its_queues_is_refused() {
    let (made, fd) = InflightRegion::allocate(2, 64, false).unwrap();
    let place = made.place();
    let open = |place| InflightRegion::open(fd.try_clone().unwrap(), &place, false);
    let needed = 2 * part_len(64, false) as u64;
    assert!(open(msg::Inflight { len: needed, ..place }).is_ok());
    let short = open(msg::Inflight { len: needed - 1, ..place });
    assert!(matches!(short, Err(InflightError::TooShort { .. })));
    for bad in [
        msg::Inflight { queues: 0, ..place },
        msg::Inflight { size: 0, ..place },
        msg::Inflight { size: 40_000, ..place },
        msg::Inflight { offset: 4096, ..place },
        msg::Inflight { offset: u64::MAX - 4095, ..place },
        msg::Inflight { queues: u16::MAX, size: 1 << 15, len: u64::MAX, ..place },
    ] {
        assert!(open(bad).is_err(), "{bad:?}");
    }
    assert!(InflightRegion::allocate(1, 0, true).is_err());
}

#[test]
fn a_layout_that_is_not_known_is_refused() {
    let (made, _fd) = InflightRegion::allocate(1, 64, false).unwrap();
    made.split(0, 64, 0).unwrap();
    made.part(0, 64, false).unwrap().put16(DESC_NUM_AT, 65);
    assert!(matches!(made.split(0, 64, 0), Err(InflightError::Broken { value: 65, .. })));
    made.part(0, 64, false).unwrap().put16(VERSION_AT, 2);
    assert!(matches!(made.split(0, 64, 0), Err(InflightError::Version(2))));
}

#[test]
fn a_split_part_lies_as_the_protocol_says() {
    let (made, _fd) = InflightRegion::allocate(1, 4, false).unwrap();
    let (mut queue, _) = made.split(0, 4, 7).unwrap();
    queue.take(3);
    queue.take(1);
    queue.take(2);
    queue.complete(3);
    queue.complete(2);
    queue.publish(|| 9);
    let word = |at: usize| made.file.u64_at(at).load(core::sync::atomic::Ordering::Relaxed);
    let bytes: Vec<u8> = (0..80).step_by(8).flat_map(|at| word(at).to_ne_bytes()).collect();
    let u16_at = |at: usize| u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap());
    // version, desc_num, last_batch_head, used_idx
    assert_eq!([8, 10, 12, 14].map(u16_at), [1, 4, 2, 9]);
    let entry =
        |head: usize| (bytes[16 + head * 16], u16_at(16 + head * 16 + 6), word(24 + head * 16));
    assert_eq!(entry(1), (1, 0, 1));
    assert_eq!((entry(3), entry(2)), ((0, 0, 0), (0, 3, 2)));
}

/// A step of the device; the numbers choose among the possible chains.
#[derive(Clone, Debug)]
enum Step {
    Take(u8),
    Complete(Vec<u8>),
    /// Puts back the chain that was taken last, unless it is completed.
    Forget,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => any::<u8>().prop_map(Step::Take),
        1 => prop::collection::vec(any::<u8>(), 1..9).prop_map(Step::Complete),
        1 => Just(Step::Forget),
    ];
    prop::collection::vec(step, 1..60)
}

const SIZE: u16 = 8;

/// The driver's side of a split ring: the chains it offered, in order, and those shown as done.
struct Ring {
    /// The heads of all chains ever offered.
    offered: Vec<u16>,
    free: VecDeque<u16>,
    used_idx: u16,
    /// How many of `offered` were shown as done, as positions in it.
    shown: BTreeSet<usize>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_split_ring_is_recovered_between_any_two_stores(
        start in any::<u16>(),
        lives in prop::collection::vec((steps(), 0..200u32, 0..12u32), 1..6),
    ) {
        let (region, _fd) = InflightRegion::allocate(1, SIZE, false).unwrap();
        let mut ring =
            Ring { offered: vec![], free: (0..SIZE).collect(), used_idx: start, shown: BTreeSet::new() };
        drop(region.split(0, SIZE, start).unwrap());
        for (steps, stores, recovery) in lives {
            // Dying while recovering changes nothing either.
            live_for(Some(recovery));
            drop(region.split(0, SIZE, ring.used_idx).unwrap());
            live_for(None);
            let (mut queue, heads) = region.split(0, SIZE, ring.used_idx).unwrap();
            // All chains that were taken and not shown, up to where the ring goes on.
            let base = usize::from(queue.base().wrapping_sub(start));
            let expected: Vec<u16> =
                (0..base).filter(|at| !ring.shown.contains(at)).map(|at| ring.offered[at]).collect();
            prop_assert_eq!(&heads, &expected);
            // The device carries them out again, and goes on.
            let mut held: Vec<usize> = (0..base).filter(|at| !ring.shown.contains(at)).collect();
            let mut next = base;
            let mut begun = next;
            live_for(Some(stores));
            let alive_now = || STORES.with(|left| left.get() != Some(0));
            for step in steps {
                match step {
                    Step::Take(which) => {
                        if next == ring.offered.len() {
                            // The driver offers one of the heads that it has.
                            let Some(at) = ring.free.len().checked_sub(1) else { continue };
                            let head = ring.free.remove(usize::from(which) % (at + 1)).unwrap();
                            ring.offered.push(head);
                        }
                        if !alive_now() {
                            break;
                        }
                        begun = next + 1;
                        queue.take(ring.offered[next]);
                        if !alive_now() {
                            break;
                        }
                        held.push(next);
                        next += 1;
                    }
                    Step::Complete(which) => {
                        let mut batch = Vec::new();
                        for which in which {
                            if let Some(at) = held.len().checked_sub(1) {
                                batch.push(held.swap_remove(usize::from(which) % (at + 1)));
                            }
                        }
                        batch.iter().for_each(|&at| queue.complete(ring.offered[at]));
                        queue.publish(|| {
                            let now = ring.used_idx.wrapping_add(batch.len() as u16);
                            if alive() {
                                ring.used_idx = now;
                                for &at in &batch {
                                    ring.shown.insert(at);
                                    ring.free.push_back(ring.offered[at]);
                                }
                            }
                            now
                        });
                    }
                    Step::Forget => {
                        let Some(newest) = held.iter().position(|&at| at + 1 == next) else { continue };
                        held.swap_remove(newest);
                        (begun, next) = (next, next - 1);
                        queue.complete(ring.offered[next]);
                        queue.publish(|| ring.used_idx);
                        if alive_now() {
                            begun = next;
                        }
                    }
                }
                if !alive_now() {
                    break;
                }
            }
            live_for(None);
            // A completed take is not forgotten, and what was never offered does not appear.
            let (queue, _) = region.split(0, SIZE, ring.used_idx).unwrap();
            let base = usize::from(queue.base().wrapping_sub(start));
            prop_assert!(base >= next && base <= begun.max(next), "{} {} {}", next, base, begun);
        }
    }

    #[test]
    fn a_packed_ring_is_recovered_between_any_two_stores(
        begin in (0..SIZE, any::<bool>()),
        extra in 0..4u16,
        lives in prop::collection::vec((steps(), 0..300u32, 0..12u32), 1..6),
    ) {
        let (region, _fd) = InflightRegion::allocate(1, SIZE + extra, true).unwrap();
        let half = u32::from(begin.0) | u32::from(begin.1) << 15;
        drop(region.packed(0, SIZE, half | half << 16, nothing).unwrap());
        let start = usize::from(begin.0) + if begin.1 { 0 } else { usize::from(SIZE) };
        // Positions count on for ever; a lap changes the wrap counter.
        let place = |at: usize| {
            let wrap = ((start + at) / usize::from(SIZE)).is_multiple_of(2);
            ((start + at) % usize::from(SIZE), wrap)
        };
        let encode = |at| u32::from(place(at).0 as u16) | u32::from(place(at).1) << 15;
        // The ring itself: the AVAIL and USED flags of each descriptor.
        let mut flags = [0u16; SIZE as usize];
        let available = |wrap| if wrap { 1 << 7 } else { 1u16 << 15 };
        let used = |wrap| if wrap { 1 << 7 | 1 << 15 } else { 0u16 };
        for at in 0..usize::from(SIZE) {
            // As the previous lap left them.
            let (index, wrap) = place(at);
            flags[index] = used(!wrap);
        }
        // Buffers by the order of their offer, as (first position, descriptors); what is shown.
        let mut offered: Vec<(usize, Vec<PackedDescriptor>)> = Vec::new();
        let mut shown = BTreeSet::new();
        let (mut offered_to, mut used_to) = (0, 0);
        for (steps, stores, recovery) in lives {
            live_for(Some(recovery));
            drop(region.packed(0, SIZE, 0, |index| Ok::<_, InflightError>(flags[usize::from(index)])).unwrap());
            live_for(None);
            let (mut queue, buffers) = region.packed(0, SIZE, 0, |index| Ok::<_, InflightError>(flags[usize::from(index)])).unwrap();
            let taken: usize = offered
                .iter()
                .position(|(at, _)| encode(*at) == queue.base() & 0xffff && *at >= used_to)
                .unwrap_or(offered.len());
            let expected: Vec<usize> = (0..taken).filter(|n| !shown.contains(n)).collect();
            let found: Vec<_> = buffers.iter().map(|b| b.descriptors.clone()).collect();
            let wanted: Vec<_> = expected.iter().map(|&n| offered[n].1.clone()).collect();
            prop_assert_eq!(found, wanted);
            prop_assert_eq!(queue.base() >> 16, encode(used_to));
            let mut held: Vec<(usize, u16)> =
                expected.into_iter().zip(buffers.iter().map(|b| b.slot)).collect();
            let mut next = taken;
            let mut begun = next;
            live_for(Some(stores));
            let alive_now = || STORES.with(|left| left.get() != Some(0));
            for step in steps {
                match step {
                    Step::Take(which) => {
                        if next == offered.len() {
                            // As many as the ring has room for behind what is used.
                            let room = usize::from(SIZE) - (offered_to - used_to);
                            let num = (usize::from(which) % 3 + 1).min(room);
                            if num == 0 {
                                continue;
                            }
                            let descriptor = |i: usize| PackedDescriptor {
                                addr: (offered_to + i) as u64,
                                len: offered.len() as u32 | 0xabc0_0000,
                                flags: i as u16,
                                id: offered.len() as u16,
                            };
                            let descriptors = (0..num).map(descriptor).collect();
                            for at in offered_to..offered_to + num {
                                let (index, wrap) = place(at);
                                flags[index] = available(wrap);
                            }
                            offered.push((offered_to, descriptors));
                            offered_to += num;
                        }
                        if !alive_now() {
                            break;
                        }
                        begun = next + 1;
                        let slot = queue.take(&offered[next].1);
                        if !alive_now() {
                            break;
                        }
                        held.push((next, slot.unwrap()));
                        next += 1;
                    }
                    Step::Complete(which) => {
                        let mut batch = Vec::new();
                        for which in which {
                            if let Some(at) = held.len().checked_sub(1) {
                                batch.push(held.swap_remove(usize::from(which) % (at + 1)));
                            }
                        }
                        if batch.is_empty() {
                            continue;
                        }
                        batch.iter().for_each(|&(_, slot)| queue.complete(slot));
                        queue.publish(|| {
                            if alive() {
                                // A used descriptor at the start of as many as the buffer had.
                                for &(n, _) in &batch {
                                    let (index, wrap) = place(used_to);
                                    flags[index] = used(wrap);
                                    used_to += offered[n].1.len();
                                    shown.insert(n);
                                }
                            }
                        });
                    }
                    Step::Forget => {
                        let Some(newest) = held.iter().position(|&(n, _)| n + 1 == next) else { continue };
                        let (_, slot) = held.swap_remove(newest);
                        (begun, next) = (next, next - 1);
                        queue.forget(slot);
                        prop_assert_eq!(queue.base() & 0xffff, encode(offered[next].0));
                        if alive_now() {
                            begun = next;
                        }
                    }
                }
                if !alive_now() {
                    break;
                }
            }
            live_for(None);
            let (queue, _) = region.packed(0, SIZE, 0, |index| Ok::<_, InflightError>(flags[usize::from(index)])).unwrap();
            let end = |n: usize| offered.get(n).map_or(offered_to, |(at, _)| *at);
            let base = queue.base() & 0xffff;
            prop_assert!((next..=begun.max(next)).any(|n| encode(end(n)) == base));
        }
    }

    #[test]
    fn a_region_of_arbitrary_bytes_is_read_or_refused(
        packed in any::<bool>(),
        bytes in prop::collection::vec((0..320usize, any::<u8>()), 0..60),
        words in prop::collection::vec((0..160usize, 0..10u16), 0..60),
        used in any::<u16>(),
        flags in any::<u16>(),
    ) {
        let (region, _fd) = InflightRegion::allocate(1, SIZE, packed).unwrap();
        let part = region.part(0, SIZE, packed).unwrap();
        let len = part_len(SIZE, packed);
        words.iter().for_each(|&(at, word)| part.put16(at * 2 % len, word));
        bytes.iter().for_each(|&(at, byte)| part.put8(at % len, byte));
        part.put16(VERSION_AT, 1);
        part.put16(DESC_NUM_AT, SIZE);
        if packed {
            if let Ok((mut queue, buffers)) = region.packed(0, SIZE, 0, |_| Ok::<_, InflightError>(flags)) {
                let in_flight: usize = buffers.iter().map(|b| b.descriptors.len()).sum();
                prop_assert!(in_flight <= usize::from(SIZE));
                // Later damage to the region is not read.
                bytes.iter().for_each(|&(at, byte)| part.put8(at % len, !byte));
                let descriptors = [PackedDescriptor::default(); SIZE as usize + 1];
                for num in 0..=descriptors.len() {
                    if let Some(slot) = queue.take(&descriptors[..num]).filter(|_| num % 2 == 0) {
                        queue.forget(slot);
                    }
                }
                (0..=u16::from(u8::MAX)).for_each(|slot| queue.complete(slot));
                queue.publish(|| ());
            }
        } else if let Ok((mut queue, heads)) = region.split(0, SIZE, used) {
            prop_assert!(heads.iter().all(|&head| head < SIZE));
            heads.into_iter().chain([SIZE, u16::MAX]).for_each(|head| {
                queue.take(head);
                queue.complete(head);
            });
            queue.publish(|| used);
        }
    }
}
