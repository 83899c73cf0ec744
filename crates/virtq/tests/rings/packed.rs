//! A packed ring written and read byte by byte, as in virtio 1.3, 2.8; a peer that breaks one rule
//! at a time; and one that writes arbitrary bytes.

use std::collections::HashSet;

use proptest::prelude::*;
use ringfence_mem::{Access, Translate};
use ringfence_virtq::{
    Chain, ChainFault, Desc, RingError, device, driver,
    layout::{
        self, DESC_F_INDIRECT as INDIRECT, DESC_F_NEXT as NEXT, DESC_F_WRITE as WRITE,
        packed::{DESC_F_AVAIL as AVAIL, DESC_F_USED as USED},
    },
    testing,
};

use crate::rig::{
    Added, RAW as BASE, Raw, TABLE, bytes_of, contents, find, is_legal, likely_addr, likely_len,
    read, serve_random, unchanged_but, write,
};

const SIZE: u16 = 5;
const CONFIG: driver::QueueConfig =
    driver::QueueConfig { size: SIZE, event_idx: true, packed: true };

#[test]
fn both_ends_write_what_virtio_says() {
    let ram = testing::Ram::new(BASE, 0x10000);
    let (mut driver, mut device) = testing::pair_of(&ram, BASE, CONFIG);
    let mut chain = Chain::new();
    let mut event = [0; 4];
    let event_of = |event: [u8; 4]| {
        let word = u32::from_le_bytes(event);
        (word as u16, (word >> 16) as u16)
    };
    let (first, second) = ([Desc::readable(0x111, 1), Desc::writable(0x222, 2)], 0x8000);
    driver.add(&first, 1).unwrap();
    driver.add(&[Desc::writable(0x333, 3)], 2).unwrap();
    assert_eq!(read(&ram, BASE, 0).3, 0, "not published");
    driver.publish();
    assert_eq!(read(&ram, BASE, 0), (0x111, 1, 0, NEXT | AVAIL));
    assert_eq!(read(&ram, BASE, 1), (0x222, 2, 0, WRITE | AVAIL));
    assert_eq!(read(&ram, BASE, 2), (0x333, 3, 1, WRITE | AVAIL));
    for _ in 0..2 {
        assert!(device.pop(&ram, &mut chain).unwrap());
    }
    assert!(!device.enable_kicks());
    ram.read(device.config().used, &mut event).unwrap();
    assert_eq!(event_of(event), (3 | second, 2), "when place 3 of the first lap is passed");
    device.suppress_kicks();
    ram.read(device.config().used, &mut event).unwrap();
    assert_eq!(event_of(event).1, 1, "none");
    device.push_used(1, 3);
    device.push_used(0, 0);
    assert_eq!(read(&ram, BASE, 0).3, NEXT | AVAIL, "not published");
    assert!(device.publish_used());
    assert_eq!(read(&ram, BASE, 0), (0x111, 3, 1, WRITE | AVAIL | USED));
    assert_eq!(read(&ram, BASE, 1), (0x222, 0, 0, AVAIL | USED), "the place after one descriptor");
    assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 2, len: 3 })));
    assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 1, len: 0 })));
    assert!(!driver.enable_notifications());
    ram.read(device.config().avail, &mut event).unwrap();
    assert_eq!(event_of(event), (3 | second, 2));
    // Past the end: the wrap counter flips within the chain.
    driver.add(&[Desc::readable(0x444, 4); 3], 3).unwrap();
    driver.publish();
    assert_eq!(read(&ram, BASE, 3).3, NEXT | AVAIL);
    assert_eq!(read(&ram, BASE, 4).3, NEXT | AVAIL);
    assert_eq!(read(&ram, BASE, 0).3, USED);
    assert!(device.pop(&ram, &mut chain).unwrap());
    assert_eq!(chain.descs().len(), 3);
    assert_eq!(device.next_avail(), 0x8003_0001);
    device.push_used(chain.head(), 0);
    assert!(device.publish_used(), "enabled for place 3");
    assert_eq!(device.next_avail(), 0x0001_0001);
    assert_eq!(read(&ram, BASE, 3).3, AVAIL | USED);
    assert_eq!(driver.pop().unwrap().unwrap().token, 3);
    driver.add(&[Desc::writable(0x555, 5)], 4).unwrap();
    driver.publish();
    assert_eq!(read(&ram, BASE, 1).3, WRITE | USED);
    assert!(device.pop(&ram, &mut chain).unwrap());
    device.push_used(chain.head(), 5);
    assert!(!device.publish_used(), "not enabled again");
    assert_eq!(read(&ram, BASE, 1).3, WRITE, "both flags are off in the second lap");
}

#[test]
fn an_indirect_table_is_a_list_without_links() {
    let ram = testing::Ram::new(BASE, 0x10000);
    let (mut driver, mut device) = testing::pair_of(&ram, BASE, CONFIG);
    let table = ram.window(TABLE, 64, Access::ReadWrite).unwrap();
    let descs = [Desc::readable(1, 1), Desc::writable(2, 2), Desc::writable(3, 3)];
    driver.add_indirect(TABLE, &table, &descs, 0).unwrap();
    driver.publish();
    assert_eq!(read(&ram, BASE, 0), (TABLE, 48, 0, INDIRECT | AVAIL));
    for (at, desc) in (0..).zip(descs) {
        let flags = if desc.write { WRITE } else { 0 };
        assert_eq!(read(&ram, TABLE, at), (desc.addr, desc.len, 0, flags));
    }
    // Its other flags and its ids are ignored.
    write(&ram, TABLE, 0, (1, 1, 77, NEXT | AVAIL | USED));
    let mut chain = Chain::new();
    assert!(device.pop(&ram, &mut chain).unwrap());
    assert_eq!((chain.descs(), chain.count()), (&descs[..], 1));
}

/// The fault of a chain of such descriptors in a ring of 5, with a table of such.
fn fault(ring: &[Raw], table: &[Raw]) -> (u16, ChainFault) {
    let ram = testing::Ram::new(BASE, 0x10000);
    let (_, mut device) = testing::pair_of(&ram, BASE, CONFIG);
    for (at, &(addr, len, id, flags)) in (0..).zip(ring) {
        write(&ram, BASE, at, (addr, len, id, flags | AVAIL));
    }
    for (at, &raw) in (0..).zip(table) {
        write(&ram, TABLE, at, raw);
    }
    let (mut chain, mut burst) = (Chain::new(), device::Burst::new());
    let error = device.pop(&ram, &mut chain).unwrap_err();
    assert!(chain.descs().is_empty());
    let RingError::Chain { index: 0, head, fault } = error else { panic!("{error}") };
    if matches!(fault, ChainFault::IndirectUnreachable { .. }) {
        assert_eq!(device.broken(), None);
    } else {
        assert_eq!(device.pop(&ram, &mut chain), Err(error), "it stays broken");
        assert_eq!(device.pop_burst(&ram, 4, &mut burst), Err(error));
        assert_eq!((device.broken(), device.revalidate(&ram)), (Some(error), Err(error)));
        assert!(device.enable_kicks(), "a device that sleeps now would miss the error");
        // A burst finds the same fault.
        let at = *device.config();
        let mut device = device::Queue::new(at, &ram).unwrap();
        assert_eq!(device.pop_burst(&ram, 4, &mut burst), Err(error));
    }
    (head, fault)
}

#[test]
fn a_chain_is_held_to_its_rules() {
    let (read, table) = ((1, 1, 0, NEXT), (TABLE, 16, 3, INDIRECT));
    assert_eq!(fault(&[read; 5], &[]).1, ChainFault::TooMany { room: 5 });
    assert_eq!(fault(&[(1, 1, 5, 0)], &[]), (5, ChainFault::Head { size: 5 }));
    assert_eq!(fault(&[read, (1, 1, 0xffff, 0)], &[]), (0xffff, ChainFault::Head { size: 5 }));
    assert_eq!(fault(&[read, table], &[]).1, ChainFault::IndirectNext { at: 1 });
    let linked = (TABLE, 16, 3, INDIRECT | NEXT);
    assert_eq!(fault(&[linked], &[]).1, ChainFault::IndirectNext { at: 0 });
    let order = fault(&[(1, 1, 0, NEXT | WRITE), (1, 1, 0, 0)], &[]).1;
    assert_eq!(order, ChainFault::Order { at: 1 });
    let wraps = ChainFault::Wraps { at: 0, addr: u64::MAX, len: 2 };
    assert_eq!(fault(&[(u64::MAX, 2, 0, 0)], &[]).1, wraps);
    let long = fault(&[(1, u32::MAX, 0, NEXT), (1, 1, 0, 0)], &[]).1;
    assert_eq!(long, ChainFault::TooLong { total: 1 << 32 });
    assert_eq!(fault(&[table], &[(0, 0, 0, INDIRECT)]), (3, ChainFault::Nested { at: 0 }));
    for len in [0, 15, 17, 16 * 1025, u32::MAX] {
        let found = fault(&[(TABLE, len, 0, INDIRECT)], &[]).1;
        assert_eq!(found, ChainFault::IndirectLength { at: 0, len });
    }
    let away = fault(&[(8, 16, 0, INDIRECT)], &[]).1;
    assert!(matches!(away, ChainFault::IndirectUnreachable { addr: 8, .. }));
}

#[test]
fn an_id_in_flight_is_not_taken_again_and_a_full_ring_is_not_looked_at() {
    let ram = testing::Ram::new(BASE, 0x10000);
    let (_, mut device) = testing::pair_of(&ram, BASE, CONFIG);
    let mut chain = Chain::new();
    for at in 0..2 {
        write(&ram, BASE, at, (1, 1, 2, AVAIL));
    }
    assert!(device.pop(&ram, &mut chain).unwrap());
    let error = device.pop(&ram, &mut chain).unwrap_err();
    let fault = ChainFault::InFlight;
    assert_eq!(error, RingError::Chain { index: 1, head: 2, fault });
    // Chains that were taken before can still be given back.
    device.push_used(2, 0);
    let _ = device.publish_used();
    let (_, mut device) = testing::pair_of(&ram, BASE, CONFIG);
    for at in 0..SIZE {
        write(&ram, BASE, at, (1, 1, at, AVAIL));
        assert!(device.pop(&ram, &mut chain).unwrap());
        write(&ram, BASE, at, (1, 1, at, USED));
    }
    assert!(!device.pop(&ram, &mut chain).unwrap() && !device.enable_kicks());
    assert_eq!(device.pop_burst(&ram, 9, &mut device::Burst::new()), Ok(0));
}

#[test]
fn a_device_that_gives_back_what_it_has_not_breaks_the_drivers_queue() {
    let used = |len, id, flags| {
        let ram = testing::Ram::new(BASE, 0x10000);
        let (mut queue, _) = testing::pair_of(&ram, BASE, CONFIG);
        queue.add(&[Desc::readable(0, 4), Desc::writable(4, 4)], 5).unwrap();
        queue.publish();
        queue.add(&[Desc::writable(8, 8)], 6).unwrap();
        write(&ram, BASE, 0, (0, len, id, flags));
        let result = queue.pop();
        if let Err(error) = result {
            assert_eq!((queue.pop(), queue.broken()), (Err(error), Some(error)));
            assert_eq!(queue.pop_burst(&mut [driver::Used::default()]), Err(error));
            let refused = ringfence_virtq::AddError::Broken(error);
            assert_eq!(queue.add(&[Desc::readable(0, 4)], 7), Err(refused));
            assert_eq!(queue.add_burst([(Desc::readable(0, 4), 7)]), Err(refused));
            assert!(queue.enable_notifications());
        }
        result.map_err(|error| error.to_string())
    };
    let done = AVAIL | USED;
    let error = |text: &str| Err(text.to_owned());
    assert_eq!(used(4, 0, done | WRITE), Ok(Some(driver::Used { token: 5, len: 4 })));
    // Some devices report a length without the flag; and if the flag is off and the length invalid,
    // it is ignored.
    assert_eq!(used(4, 0, done), Ok(Some(driver::Used { token: 5, len: 4 })));
    assert_eq!(used(99, 0, done), Ok(Some(driver::Used { token: 5, len: 0 })));
    for flags in [0, AVAIL, USED, WRITE, NEXT | INDIRECT] {
        assert_eq!(used(4, 0, flags), Ok(None), "{flags:#x}");
    }
    let text = "used index 0: 5 bytes written to id 0, which has room for 4";
    assert_eq!(used(5, 0, done | WRITE), error(text));
    assert_eq!(used(0, 5, done), error("used index 0: id 5 in a queue of 5"));
    assert_eq!(used(0, 0xffff, done), error("used index 0: id 65535 in a queue of 5"));
    assert_eq!(used(0, 1, done), error("used index 0: id 1 is not in flight"), "not published");
    assert_eq!(used(0, 4, done), error("used index 0: id 4 is not in flight"), "free");
}

/// A chain as virtio defines it, found in the simplest way: its id, its buffers, and where the next
/// one begins; nothing if it breaks a rule.
fn oracle(bytes: &[u8], (mut at, mut wrap): (u16, bool), room: u16) -> Found {
    let read = |addr| find(bytes, addr);
    let ring = |at| read(BASE + 16 * u64::from(at)).unwrap();
    let is_available = |flags: u16| (flags & AVAIL != 0) == wrap && (flags & USED != 0) != wrap;
    if room == 0 || !is_available(ring(at).3) {
        return Found::Nothing;
    }
    let mut descs = Vec::new();
    for count in 1..=room {
        let (addr, len, id, flags) = ring(at);
        (at, wrap) = if at + 1 == SIZE { (0, !wrap) } else { (at + 1, wrap) };
        if flags & INDIRECT != 0 {
            let entries = u64::from(len / 16);
            let whole = len % 16 == 0 && (1..=1024).contains(&entries);
            if count > 1 || flags & NEXT != 0 || !whole {
                return Found::Fault;
            }
            for entry in 0..entries {
                match addr.checked_add(16 * entry).and_then(read) {
                    Some((_, _, _, flags)) if flags & INDIRECT != 0 => return Found::Fault,
                    Some((addr, len, _, flags)) => {
                        descs.push(Desc { addr, len, write: flags & WRITE != 0 });
                    }
                    None => return Found::Fault,
                }
            }
        } else {
            descs.push(Desc { addr, len, write: flags & WRITE != 0 });
        }
        if flags & NEXT == 0 {
            return if is_legal(&descs) && id < SIZE {
                Found::Chain(id, descs, count, (at, wrap))
            } else {
                Found::Fault
            };
        }
    }
    Found::Fault
}

enum Found {
    Nothing,
    Fault,
    Chain(u16, Vec<Desc>, u16, (u16, bool)),
}

/// Descriptors that are often nearly valid.
fn likely_desc() -> impl Strategy<Value = [u8; 16]> {
    let kind = prop_oneof![
        4 => Just(0), 3 => Just(NEXT), 3 => Just(WRITE), 2 => Just(WRITE | NEXT),
        3 => Just(INDIRECT), 1 => any::<u16>(),
    ];
    let lap = prop_oneof![8 => Just(AVAIL), 2 => Just(USED), 1 => Just(0), 1 => Just(AVAIL | USED)];
    let id = prop_oneof![12 => 0..SIZE, 1 => any::<u16>()];
    (likely_addr(0x2000), likely_len(4), id, kind, lap)
        .prop_map(|(addr, len, id, kind, lap)| bytes_of((addr, len, id, kind | lap)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// For any bytes in the ring and the tables: each chain is what the oracle finds, or the queue
    /// breaks; it ends, and only the device's event structure is written.
    #[test]
    fn an_arbitrary_ring_is_taken_by_the_rules_or_refused(
        ring in prop::collection::vec(likely_desc(), usize::from(SIZE)),
        tables in prop::collection::vec(likely_desc(), 64),
        base in 0..2 * SIZE,
        bursts: bool,
        piece in 1..40_u64,
    ) {
        let ram = testing::Ram::new(BASE, 0x2000).fragmented(piece);
        let (_, mut at) = testing::areas_of(&ram, BASE, CONFIG);
        ram.write(BASE, &ring.concat()).unwrap();
        ram.write(TABLE, &tables.concat()).unwrap();
        ram.write(BASE + 0x2000 - 512, &tables[..32].concat()).unwrap();
        let before = contents(&ram);
        let mut place = (base % SIZE, base < SIZE);
        let bits = u32::from(place.0) | u32::from(place.1) << 15;
        // A ring at 0 in which nothing was given back is new.
        let given_back = |desc: &[u8; 16]| u16::from_le_bytes([desc[14], desc[15]]) & USED != 0;
        place.1 |= place.0 == 0 && !ring.iter().any(given_back);
        at.base = bits | bits << 16;
        let mut queue = device::Queue::new(at, &ram).unwrap();
        queue.peek_from(&ram, 0, 8, |_| ());
        let (mut chain, mut burst) = (Chain::new(), device::Burst::new());
        let (mut taken, mut room) = (HashSet::new(), SIZE);
        loop {
            let found = if bursts {
                queue.pop_burst(&ram, 1, &mut burst).map(|count| count > 0)
            } else {
                queue.pop(&ram, &mut chain)
            };
            match (found, oracle(&before, place, room)) {
                (Ok(true), Found::Chain(id, descs, count, next)) => {
                    prop_assert!(taken.insert(id));
                    (place, room) = (next, room - count);
                    if bursts {
                        let chain = burst.get(0).unwrap();
                        prop_assert_eq!((chain.head(), chain.descs()), (id, &descs[..]));
                    } else {
                        prop_assert_eq!((chain.head(), chain.descs()), (id, &descs[..]));
                        prop_assert_eq!(chain.count(), count);
                        let _ = chain.read_at(&ram, 3, &mut [0; 100]);
                    }
                }
                (Ok(false), Found::Nothing) => break,
                (Err(error), found) => {
                    let legal = match found {
                        Found::Chain(id, ..) => !taken.contains(&id),
                        Found::Nothing => true,
                        Found::Fault => false,
                    };
                    prop_assert!(!legal, "{}", error);
                    prop_assert_eq!(queue.pop(&ram, &mut chain), Err(error));
                    break;
                }
                (Ok(some), _) => prop_assert!(false, "{} against the rules", some),
            }
        }
        queue.suppress_kicks();
        let _ = queue.enable_kicks();
        unchanged_but(&ram, &before, at.used..at.used + 4)?;
        // All taken chains can be given back, and are in the ring then.
        queue.push_used_burst(taken.iter().map(|&id| (id, 0)));
        let _ = queue.publish_used();
        prop_assert_eq!(queue.in_flight(), 0);
    }

    /// Random bytes throughout, in areas that end at a guard page.
    #[test]
    fn random_bytes_never_lead_outside(bytes in prop::collection::vec(any::<u8>(), 4096)) {
        let config = device::RingConfig {
            size: 17,
            desc: 4096 - layout::desc_bytes(17) as u64,
            avail: 4092,
            used: 4092,
            event_idx: true,
            indirect: true,
            packed: true,
            base: 0x8000_8000,
        };
        serve_random(config, &bytes);
    }

    /// For anything that the device writes into the ring: each token comes back at most once and
    /// only after it was published, and descriptors neither vanish nor appear.
    #[test]
    fn a_driver_survives_an_arbitrary_ring(
        chains in prop::collection::vec((1..4_usize, any::<bool>()), 1..9),
        ring in prop::collection::vec(likely_desc(), usize::from(SIZE)),
        lap in prop::collection::vec(any::<bool>(), usize::from(SIZE)),
        event: u32,
    ) {
        let ram = testing::Ram::new(BASE, 4096);
        let (mut queue, device) = testing::pair_of(&ram, BASE, CONFIG);
        let added = Added::to(&mut queue, 20, &chains);
        ram.write(BASE, &ring.concat()).unwrap();
        for (at, used) in (0..).zip(lap) {
            if used {
                let (addr, len, id, flags) = read(&ram, BASE, at);
                write(&ram, BASE, at, (addr, len, id, flags | AVAIL | USED));
            }
        }
        ram.write(device.config().used, &event.to_le_bytes()).unwrap();
        let _ = queue.needs_kick();
        added.comes_back_at_most_once(&mut queue)?;
    }
}
