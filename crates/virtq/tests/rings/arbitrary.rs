//! A peer that writes arbitrary bytes: errors, and nothing worse.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proptest::{prelude::*, test_runner::TestRunner};
use ringfence_mem::{Access, Translate};
use ringfence_virtq::{
    Chain, Desc, RingError, device,
    layout::{self, DESC_F_INDIRECT as INDIRECT, DESC_F_NEXT as NEXT, DESC_F_WRITE as WRITE},
    testing,
};

use crate::rig::{
    Added, RAW as BASE, TABLE, bytes_of, contents, find, is_legal, likely_addr, likely_len,
    serve_random, unchanged_but,
};

const SIZE: u16 = 8;

/// A chain as virtio defines it, found in the simplest way; nothing if it breaks a rule.
fn oracle(bytes: &[u8], desc: u64, head: u16) -> Option<Vec<Desc>> {
    let read = |addr| find(bytes, addr);
    let mut descs = Vec::new();
    let (mut table, mut entries, mut at, mut nested) = (desc, u32::from(SIZE), head, false);
    let mut seen = HashSet::new();
    loop {
        if u32::from(at) >= entries || !seen.insert(at) {
            return None;
        }
        let (addr, len, flags, next) = read(table.checked_add(u64::from(at) * 16)?)?;
        if flags & INDIRECT != 0 {
            let size = len / 16;
            let whole = len % 16 == 0 && (1..=1024).contains(&size);
            if nested || flags & NEXT != 0 || !whole {
                return None;
            }
            // All of the table must be in the memory, and none of it before.
            read(addr.checked_add(u64::from(len) - 16)?)?;
            read(addr)?;
            (table, entries, at, nested) = (addr, size, 0, true);
            seen.clear();
            continue;
        }
        descs.push(Desc { addr, len, write: flags & WRITE != 0 });
        if flags & NEXT == 0 {
            break;
        }
        at = next;
    }
    is_legal(&descs).then_some(descs)
}

/// Descriptors that are often nearly valid: fully random ones are refused at once.
fn likely_desc() -> impl Strategy<Value = [u8; 16]> {
    let flags = prop_oneof![
        4 => Just(NEXT),
        2 => Just(WRITE),
        2 => Just(WRITE | NEXT),
        2 => Just(0),
        2 => Just(INDIRECT),
        1 => any::<u16>(),
    ];
    let next = prop_oneof![8 => 0..SIZE, 1 => 0..70_u16, 1 => any::<u16>()];
    (likely_addr(0x3000), likely_len(12), flags, next)
        .prop_map(|(addr, len, flags, next)| bytes_of((addr, len, flags, next)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// For any bytes in the rings and tables: each chain is what the oracle finds or the queue
    /// breaks, it ends, and only the used ring is ever written.
    #[test]
    fn arbitrary_rings_are_taken_by_the_rules_or_refused(
        descs in prop::collection::vec(likely_desc(), usize::from(SIZE)),
        tables in prop::collection::vec(likely_desc(), 80),
        heads in prop::collection::vec(prop_oneof![9 => 0..SIZE, 1 => any::<u16>()], 8),
        idx in prop_oneof![8 => 0..=SIZE, 1 => any::<u16>()],
        used_idx in prop_oneof![8 => Just(0), 1 => any::<u16>()],
        event_idx: bool,
        piece in 1..40_u64,
    ) {
        // Memory ends shortly behind the tables, so that some of them pass its end.
        let ram = testing::Ram::new(BASE, 0x3000).fragmented(piece);
        let (_, mut config) = testing::areas(&ram, BASE, SIZE, event_idx);
        config.event_idx = event_idx;
        ram.write(config.desc, &descs.concat()).unwrap();
        ram.write(TABLE, &tables.concat()).unwrap();
        ram.write(BASE + 0x3000 - 64 * 16, &tables[..64].concat()).unwrap();
        for (at, head) in heads.iter().enumerate() {
            ram.write(config.avail + 4 + 2 * at as u64, &head.to_le_bytes()).unwrap();
        }
        ram.write(config.avail + 2, &idx.to_le_bytes()).unwrap();
        ram.write(config.used + 2, &used_idx.to_le_bytes()).unwrap();
        let before = contents(&ram);

        let Ok(mut queue) = device::Queue::new(config, &ram) else {
            prop_assert!(0_u16.wrapping_sub(used_idx) > SIZE);
            return Ok(());
        };
        let mut chain = Chain::new();
        let mut taken = Vec::new();
        let room = SIZE - 0_u16.wrapping_sub(used_idx);
        loop {
            let next = queue.next_avail() as usize;
            match queue.pop(&ram, &mut chain) {
                Ok(true) => {
                    prop_assert_eq!(chain.head(), heads[next]);
                    prop_assert!(!taken.contains(&chain.head()));
                    let expected = oracle(&before, config.desc, chain.head());
                    prop_assert_eq!(Some(chain.descs()), expected.as_deref());
                    taken.push(chain.head());
                    // Using the content of a chain can do no harm either.
                    let _ = chain.read_at(&ram, 3, &mut [0; 100]);
                }
                Ok(false) => {
                    prop_assert_eq!(next, usize::from(idx));
                    break;
                }
                Err(RingError::AvailJump { .. }) => {
                    prop_assert!(idx > room);
                    break;
                }
                Err(error) => {
                    let head = heads[next];
                    let legal = oracle(&before, config.desc, head).is_some();
                    prop_assert!(!legal || taken.contains(&head), "{}", error);
                    prop_assert_eq!(queue.pop(&ram, &mut chain), Err(error));
                    break;
                }
            }
        }
        for head in taken {
            queue.push_used(head, 1);
        }
        let _ = queue.publish_used();
        queue.suppress_kicks();
        let _ = queue.enable_kicks();

        let events = if event_idx { 0 } else { 2 };
        let ring = layout::used_bytes(SIZE) as u64 - events;
        unchanged_but(&ram, &before, config.used..config.used + ring)?;
    }

    /// Rings of random bytes throughout, in an area that ends at a guard page.
    #[test]
    fn random_bytes_never_lead_outside(bytes in prop::collection::vec(any::<u8>(), 4096)) {
        let used = (4096 - layout::used_bytes(SIZE) as u64) & !3;
        let config = device::RingConfig {
            size: SIZE,
            desc: 4096 - 16 * u64::from(SIZE),
            avail: 4096 - layout::avail_bytes(SIZE) as u64,
            used,
            event_idx: true,
            indirect: true,
            packed: false,
            base: u16::from_le_bytes([bytes[used as usize + 2], bytes[used as usize + 3]]).into(),
        };
        serve_random(config, &bytes);
    }

    /// For anything that the device writes into the used ring: each token comes back at most once
    /// and only after it was published, and descriptors neither vanish nor appear.
    #[test]
    fn a_driver_survives_an_arbitrary_used_ring(
        chains in prop::collection::vec((1..4_usize, any::<bool>()), 1..12),
        elements in prop::collection::vec(
            (prop_oneof![9 => 0..u32::from(SIZE), 1 => any::<u32>()], 0..12_u32), 8),
        idx in prop_oneof![8 => 0..=SIZE, 1 => any::<u16>()],
        event_idx: bool,
    ) {
        let ram = testing::Ram::new(BASE, 4096);
        let (mut queue, device) = testing::pair(&ram, BASE, SIZE, event_idx);
        let added = Added::to(&mut queue, 4, &chains);
        let ring = device.config().used;
        for (at, (id, len)) in elements.iter().enumerate() {
            ram.write(ring + 4 + 8 * at as u64, &id.to_le_bytes()).unwrap();
            ram.write(ring + 8 + 8 * at as u64, &len.to_le_bytes()).unwrap();
        }
        ram.write(ring + 2, &idx.to_le_bytes()).unwrap();
        added.comes_back_at_most_once(&mut queue)?;
    }
}

#[test]
fn memory_that_changes_while_it_is_read_yields_only_chains_that_were_checked() {
    let ram = testing::Ram::new(BASE, 0x3000);
    let (_, config) = testing::areas(&ram, BASE, SIZE, true);
    let stop = AtomicBool::new(false);
    let seed = TestRunner::default().rng().next_u64();
    let next = |random: &mut u64| {
        *random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *random >> 33
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = seed;
            let descs = ram.window(config.desc, 128, Access::Write).unwrap();
            while !stop.load(Ordering::Relaxed) {
                let at = 16 * (next(&mut random) % 8) as usize;
                let flags = next(&mut random) as u32 & 7;
                let follow = next(&mut random) as u32 % 9;
                let len = if flags & 4 != 0 { 32 } else { next(&mut random) as u32 };
                descs.write(at, &(TABLE + next(&mut random) % 64 * 16).to_le_bytes());
                descs.write(at + 8, &len.to_le_bytes());
                descs.write(at + 12, &(flags | follow << 16).to_le_bytes());
                ram.write(TABLE + at as u64 + 12, &((flags & 3) | follow << 16).to_le_bytes())
                    .unwrap();
            }
        });
        let mut chain = Chain::new();
        let mut taken = 0;
        for round in 0..20_000 {
            ram.write(config.used + 2, &[0; 2]).unwrap();
            for at in 0..8 {
                ram.write(config.avail + 4 + 2 * at, &[at as u8, 0]).unwrap();
            }
            ram.write(config.avail + 2, &[8, 0]).unwrap();
            let mut queue = device::Queue::new(config, &ram).unwrap();
            while let Ok(true) = queue.pop(&ram, &mut chain) {
                taken += 1;
                assert!(chain.readable().iter().all(|desc| !desc.write), "round {round}");
                assert!(chain.writable().iter().all(|desc| desc.write), "round {round}");
                let sum = |descs: &[Desc]| descs.iter().map(|desc| u64::from(desc.len)).sum();
                let sums: [u64; 2] = [sum(chain.readable()), sum(chain.writable())];
                assert_eq!(sums, [chain.readable_len(), chain.writable_len()]);
                assert!(sums[0] + sums[1] <= u64::from(u32::MAX));
                assert!(chain.descs().len() <= usize::from(SIZE) + 2);
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(taken > 0);
    });
}
