//! Start positions of a ring, for every kind of value that a front end may send: the position is
//! refused, or the ring works from there.

use ringfence_mem::Translate;
use ringfence_virtq::{Chain, RingError, device, layout::packed, testing};

use crate::rig::*;

/// Halves of a packed ring's base: places in the ring, at its end and behind it, in both laps.
fn halves(size: u16) -> Vec<u16> {
    let ends = [0, 1, 2, 15, 16, 17, 0x3fff, 0x4000, 0x7ffe, 0x7fff];
    let near = [size / 2, size.saturating_sub(2), size - 1, size, size + 1, size.saturating_mul(2)];
    let places = ends.into_iter().chain(near).map(|at| at & 0x7fff);
    places.flat_map(|at| [at, at | 1 << 15]).collect()
}

/// How many descriptors lie between the two places; `None`: they do not exist in a ring of `size`,
/// or are further apart than it is long.
fn held(base: u32, size: u16) -> Option<u16> {
    let (avail, used) = (base as u16, (base >> 16) as u16);
    let used = if used == 0 && avail >> 15 != 0 { avail } else { used };
    let steps = |bits: u16| {
        let at = bits & 0x7fff;
        (at < size).then(|| u32::from(at) + if bits >> 15 == 0 { size.into() } else { 0 })
    };
    // The lap without the wrap bit is the second, or the one before the first.
    let (avail, used) = (steps(avail)?, steps(used)?);
    let ring = u32::from(size);
    let apart = (avail + 2 * ring - used) % (2 * ring);
    u16::try_from(apart).ok().filter(|&apart| apart <= size)
}

#[test]
fn a_packed_ring_starts_at_two_places_of_its_own_or_not_at_all() {
    let (mut chain, mut touched) = (Chain::new(), Vec::new());
    for size in [1, 2, 3, 6, 15, 16, 17, 256, 1000, 1024, 0x7fff, 0x8000] {
        let ram = ram();
        let (_, at) = testing::areas_of(&ram, BASE, config(size, true));
        for low in halves(size) {
            for base in halves(size).into_iter().map(|high| u32::from(high) << 16 | u32::from(low))
            {
                let config = device::RingConfig { base, ..at };
                let queue = device::Queue::postponed(config);
                let Some(held) = held(base, size) else {
                    let error = RingError::PackedBase { base, size };
                    assert!(queue.err() == Some(error), "{base:#x} of {size} is not a base");
                    continue;
                };
                let mut queue = queue.unwrap();
                queue.revalidate(&ram).unwrap();
                // A new ring at 0 starts from the beginning.
                let start = queue.next_avail();
                let (mut place, mut lap) = (start as u16 & 0x7fff, start as u16 >> 15 != 0);
                for _ in 0..(size - held).min(3) {
                    let used = (queue.next_avail() >> 16) as u16 & 0x7fff;
                    touched.extend([place, used]);
                    let lap_bit = if lap { packed::DESC_F_AVAIL } else { packed::DESC_F_USED };
                    write(&ram, at.desc, place, (DATA, 8, 0, lap_bit));
                    assert_eq!(queue.pop(&ram, &mut chain), Ok(true), "{base:#x} of {size}");
                    queue.push_used(chain.head(), 0);
                    let _ = queue.publish_used();
                    place += 1;
                    (place, lap) = if place == size { (0, !lap) } else { (place, lap) };
                }
                for half in [queue.next_avail() as u16, (queue.next_avail() >> 16) as u16] {
                    assert!(half & 0x7fff < size, "{base:#x} of {size}: {half:#x}");
                }
                // Old descriptors there must not count for the next queue.
                touched.drain(..).for_each(|place| write(&ram, at.desc, place, (0, 0, 0, 0)));
            }
        }
    }
}

#[test]
fn a_split_ring_starts_at_most_its_size_behind_its_used_index_or_not_at_all() {
    let mut chain = Chain::new();
    for size in [1, 2, 16, 256, 1024, 0x8000] {
        let ram = ram();
        let (_, at) = testing::areas(&ram, BASE, size, false);
        let near = |index: u16| [index.wrapping_sub(1), index, index.wrapping_add(1)];
        for used in [0, 1, size - 1, size, 0x7fff, 0x8000, 0xffff] {
            let indices = near(used).into_iter().chain(near(used.wrapping_add(size)));
            let low = indices.chain([0, 0x7fff, 0x8000, 0xffff]);
            for base in
                low.flat_map(|low| [0, 1, 0x8000, 0xffff].map(|high| high << 16 | u32::from(low)))
            {
                ram.write(at.used + 2, &used.to_le_bytes()).unwrap();
                let queue = device::Queue::new(device::RingConfig { base, ..at }, &ram);
                let held = u16::try_from(base).ok().map(|base| base.wrapping_sub(used));
                let Some(held) = held.filter(|&held| held <= size) else {
                    assert!(matches!(queue, Err(RingError::Base { .. })), "{base:#x} at {used}");
                    continue;
                };
                let mut queue = queue.unwrap();
                assert_eq!(queue.in_flight(), held);
                if held < size {
                    let next = (base as u16).wrapping_add(1);
                    ram.write(at.avail + 2, &next.to_le_bytes()).unwrap();
                    assert_eq!(queue.pop(&ram, &mut chain), Ok(true), "{base:#x} at {used}");
                    queue.push_used(chain.head(), 0);
                    let _ = queue.publish_used();
                }
                assert!(queue.next_avail() <= 0xffff);
            }
        }
    }
}
