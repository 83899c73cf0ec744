//! Random programs of takes, returns, trims and failures, against a list of what is held.

use proptest::prelude::*;
use ringfence_dma::{BounceLimits, Direction, Error, ErrorKind, PoolBuffer};
use ringfence_iommu::Range;

use super::{NARROW, QUOTA, Rig};
use crate::mock::Broken;

const LIMITS: BounceLimits = BounceLimits { largest: 32 << 10, max_bytes: 128 << 10, idle_ms: 100 };

#[derive(Clone, Debug)]
enum Op {
    Take { device: usize, len: u64, direction: Direction, cpu: usize },
    GiveBack { which: usize, cpu: usize },
    Trim,
    Expire,
    FailAfter(i64),
    Break { unmap: bool, sync: bool },
    Room(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let direction = prop_oneof![
        Just(Direction::ToDevice),
        Just(Direction::FromDevice),
        Just(Direction::Bidirectional)
    ];
    let len = prop_oneof![1u64..5000, 1u64..(33 << 10), (32u64 << 10)..(60 << 10)];
    prop_oneof![
        8 => (0usize..2, len, direction, 0usize..2).prop_map(|(device, len, direction, cpu)| {
            Op::Take { device, len, direction, cpu }
        }),
        7 => (any::<usize>(), 0usize..2).prop_map(|(which, cpu)| Op::GiveBack { which, cpu }),
        1 => Just(Op::Trim),
        1 => Just(Op::Expire),
        1 => (0i64..20).prop_map(Op::FailAfter),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(unmap, sync)| Op::Break { unmap, sync }),
        1 => (0u64..400).prop_map(|kib| Op::Room(kib << 10)),
    ]
}

/// A buffer that is held, and its expected state.
struct Held {
    buffer: PoolBuffer,
    device: usize,
    slot: Range,
    target: u64,
    direction: Direction,
}

/// The size of the slot for `len` bytes.
fn size_of(len: u64) -> u64 {
    match len {
        0..=4096 => 4096,
        len if len <= LIMITS.largest => len.next_power_of_two(),
        len => len.next_multiple_of(4096),
    }
}

/// Whether a slot lies in no class.
fn is_single_use(rig: &Rig, slot: Range) -> bool {
    !rig.pools.classes().iter().any(|class| class.range.covers(slot))
}

/// Takes a buffer if possible, and checks all guarantees about it.
fn take(rig: &Rig, device: usize, len: u64, direction: Direction, failing: bool) -> Option<Held> {
    let (size, before) = (size_of(len), rig.held_by(device));
    let result = rig.devices[device].take_buffer(len, direction);
    if let Err(error @ Error::BounceQuota { size: asked, held, quota }) = result {
        assert_eq!((asked, held, quota), (size, before, QUOTA));
        assert!(before + size > QUOTA, "{error}");
    } else {
        assert!(before + size <= QUOTA, "{size:#x} more than {before:#x} is beyond the quota");
    }
    let buffer = match result {
        Ok(buffer) => buffer,
        Err(error) => {
            match error.kind() {
                ErrorKind::BounceFull => {}
                ErrorKind::Device { .. } => assert!(failing, "{error}"),
                // The allocator returns to low addresses only for the same size.
                ErrorKind::AddressSpace => assert_eq!(device, 1, "{error}"),
                kind => panic!("{error}: {kind:?}"),
            }
            return None;
        }
    };
    let slot = Range::from_len(buffer.iova(), size).unwrap();
    assert!(is_single_use(rig, slot) || buffer.iova().0.is_multiple_of(size));
    if device == 1 {
        assert!(slot.last().0 <= NARROW, "beyond what the device reaches");
    }
    let (target, _) = rig.domain.reach(buffer.iova().0).unwrap();
    // It contains zeros, or this device's bytes; from now on it has this device's.
    let mine = device as u8 + 1;
    let found = buffer.piece().to_vec();
    assert!(found.iter().all(|&byte| byte == 0 || byte == mine), "another's bytes");
    buffer.piece().fill(mine);
    Some(Held { buffer, device, slot, target, direction })
}

fn check(rig: &Rig, held: &[Held]) {
    for (n, one) in held.iter().enumerate() {
        let size = one.slot.extent() + 1;
        let last = one.slot.last().0;
        for (iova, target) in [(one.slot.first().0, one.target), (last, one.target + (size - 1))] {
            assert_eq!(rig.domain.reach(iova), Some((target, one.direction.prot())));
        }
        assert!(rig.memory.holds(one.target, size), "its memory was given back");
        for other in &held[..n] {
            assert!(!other.slot.overlaps(one.slot), "two slots at {}", one.slot);
            let apart = other.target + other.slot.extent() < one.target
                || one.target + one.slot.extent() < other.target;
            assert!(apart, "two slots in the same memory");
        }
    }
    let stats = rig.pools.stats();
    let bytes: u64 = held.iter().map(|held| held.slot.extent() + 1).sum();
    assert_eq!((stats.slots, stats.slot_bytes), (held.len() as u64, bytes));
    let singles = held.iter().filter(|held| is_single_use(rig, held.slot));
    let singles: u64 = singles.map(|held| held.slot.extent() + 1).sum();
    assert!(bytes - singles + stats.kept_bytes <= LIMITS.max_bytes);
    assert_eq!(rig.memory.bytes(), bytes + stats.kept_bytes + stats.quarantined_bytes);
    let places: u64 = rig.pools.holders().iter().map(|holder| holder.bytes).sum();
    assert_eq!(places, bytes, "the leak detector sees all, and nothing else");
    for device in 0..2 {
        let mine = held.iter().filter(|held| held.device == device);
        let mine: u64 = mine.map(|held| held.slot.extent() + 1).sum();
        let charged = rig.held_by(device);
        assert!((mine..=mine + stats.quarantined_bytes).contains(&charged));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_slot_has_two_owners(ops in prop::collection::vec(op(), 1..80)) {
        let rig = Rig::new(LIMITS);
        let mut held: Vec<Held> = Vec::new();
        let mut failing = false;
        for op in ops {
            match op {
                Op::Take { device, len, direction, cpu } => {
                    rig.cpu.set(cpu);
                    held.extend(take(&rig, device, len, direction, failing));
                }
                Op::GiveBack { which, cpu } if !held.is_empty() => {
                    rig.cpu.set(cpu);
                    let one = held.swap_remove(which % held.len());
                    drop(one.buffer);
                }
                Op::GiveBack { .. } => {}
                Op::Trim => rig.pools.trim(),
                Op::Expire => {
                    rig.clock.advance(100_000_000);
                    rig.pools.expire();
                }
                Op::FailAfter(good) => {
                    rig.domain.fail_after(good);
                    failing = true;
                }
                Op::Break { unmap, sync } => {
                    *rig.domain.broken.lock().unwrap() = Broken { unmap, sync, ..Broken::default() };
                    failing |= unmap || sync;
                }
                Op::Room(bytes) => rig.memory.set_room(bytes),
            }
            check(&rig, &held);
        }
        // No more failures: nothing more is lost.
        rig.domain.fail_after(i64::MAX);
        *rig.domain.broken.lock().unwrap() = Broken::default();
        drop(held);
        rig.end();
    }
}
