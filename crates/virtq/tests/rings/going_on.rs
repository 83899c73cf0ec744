//! Rings that are found later, move, stop with chains in flight, or continue after a crash, in both
//! formats.

use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};
use ringfence_virtq::{
    Chain, ChainFault, Desc, RingError, device,
    device::{Burst, Stored},
    driver, testing,
};

use crate::rig::{BASE, DATA, config, ram};

/// Memory without any translation yet.
struct Nothing;

impl Translate for Nothing {
    fn slices<F>(&self, addr: u64, _: u64, access: Access, _: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        Err(AccessError::Again { addr, access })
    }

    fn window(&self, addr: u64, _: u64, access: Access) -> Result<Window, AccessError> {
        Err(AccessError::Again { addr, access })
    }
}

// rule D21, rule D22
#[test]
fn a_ring_may_start_before_its_areas_can_be_found() {
    for packed in [false, true] {
        let ram = ram();
        let (rings, at) = testing::areas_of(&ram, BASE, config(8, packed));
        let mut driver = driver::Queue::with_config(config(8, packed), rings).unwrap();
        driver.add(&[Desc::writable(DATA, 8)], 5).unwrap();
        driver.publish();
        let mut queue = device::Queue::postponed(at).unwrap();
        let (mut chain, mut burst) = (Chain::new(), Burst::new());
        for _ in 0..2 {
            assert!(!queue.is_valid());
            let error = queue.revalidate(&Nothing).unwrap_err();
            assert!(matches!(error, RingError::Unreachable { .. }), "{error}");
            // The queue is empty, and reports nothing.
            assert_eq!(queue.pop(&ram, &mut chain), Ok(false));
            assert_eq!(queue.pop_burst(&ram, 8, &mut burst), Ok(0));
            queue.peek_from(&ram, 0, 8, |seen| panic!("{seen:?}"));
            queue.suppress_kicks();
            assert!(!queue.enable_kicks() && !queue.publish_used() && !queue.untake(0));
            assert_eq!((queue.broken(), queue.next_avail()), (None, at.base));
            assert_eq!(queue.in_flight(), 0);
        }
        assert_eq!(queue.revalidate(&ram), Ok(()));
        assert!(queue.is_valid());
        assert_eq!(queue.pop(&ram, &mut chain), Ok(true));
        queue.push_used(chain.head(), 3);
        assert!(queue.publish_used());
        assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 5, len: 3 })));
    }
}

#[test]
fn the_base_of_a_split_ring_is_checked_when_its_used_index_is_there() {
    let ram = ram();
    let (_, at) = testing::areas(&ram, BASE, 8, false);
    ram.write(at.used + 2, &20_u16.to_le_bytes()).unwrap();
    for (base, good) in [(19, false), (20, true), (28, true), (29, false)] {
        let mut queue = device::Queue::postponed(device::RingConfig { base, ..at }).unwrap();
        let found = queue.revalidate(&ram);
        assert_eq!(found.is_ok(), good, "{base}");
        if let Err(error) = found {
            assert_eq!(error, RingError::Base { base, used: 20, size: 8 });
            assert_eq!((queue.broken(), queue.is_valid()), (Some(error), false));
        } else {
            assert_eq!(u32::from(queue.in_flight()), base - 20);
        }
    }
    let error = device::Queue::postponed(device::RingConfig { base: 1 << 16, ..at }).unwrap_err();
    assert!(matches!(error, RingError::Base { base: 0x1_0000, .. }), "{error}");
}

#[test]
fn a_split_ring_that_was_left_without_a_word_goes_on_at_its_used_index() {
    let ram = ram();
    let (rings, at) = testing::areas_of(&ram, BASE, config(8, false));
    let mut driver = driver::Queue::with_config(config(8, false), rings).unwrap();
    let (mut chain, mut next) = (Chain::new(), 0);
    // Its index wraps; each device takes three chains more than it gives back.
    for round in 0..30_000_u64 {
        let mut device = match round {
            0 => device::Queue::postponed(at).unwrap(),
            _ => device::Queue::postponed_at_used(device::RingConfig { base: 77, ..at }).unwrap(),
        };
        assert_eq!((device.is_lost(), device.pop(&ram, &mut chain)), (round > 0, Ok(false)));
        device.revalidate(&ram).unwrap();
        assert!(!device.is_lost());
        assert_eq!((device.next_avail() as u16, device.in_flight()), ((3 * round) as u16, 0));
        for token in next..3 * round + 6 {
            driver.add(&[Desc::writable(DATA + token, 8)], token).unwrap();
        }
        next = 3 * round + 6;
        driver.publish();
        for _ in 0..3 {
            assert_eq!(device.pop(&ram, &mut chain), Ok(true));
            device.push_used(chain.head(), 8);
        }
        for _ in 0..3 {
            assert_eq!(device.pop(&ram, &mut chain), Ok(true));
        }
        let _ = device.publish_used();
        for token in 3 * round..3 * round + 3 {
            assert_eq!(driver.pop(), Ok(Some(driver::Used { token, len: 8 })));
        }
    }
    let packed = device::RingConfig { packed: true, ..at };
    assert_eq!(device::Queue::postponed_at_used(packed).unwrap_err(), RingError::Format);
}

#[test]
fn the_base_of_a_packed_ring_is_two_places() {
    let ram = ram();
    let (_, at) = testing::areas_of(&ram, BASE, config(6, true));
    let flight = |base| device::Queue::new(device::RingConfig { base, ..at }, &ram);
    for base in [0x8000_8000, 0x8000_0000, 0x8005_8005, 0x0005_0005, 0x8003_0001, 0x0000_0005] {
        assert_eq!(flight(base).unwrap().next_avail(), base, "{base:#x}");
    }
    // Only the low half, where both must be the same.
    for base in [0x8000, 0x8005] {
        assert_eq!(flight(base).unwrap().next_avail(), base | base << 16);
    }
    // Places that do not exist, or are further apart than the ring is long.
    for base in [0x8006_8006, 0x8000_8006, 0x8006_8000, 0x8003_8002, 0x8001_0002, 0x7fff_ffff] {
        let error = flight(base).unwrap_err();
        assert_eq!(error, RingError::PackedBase { base, size: 6 }, "{base:#x}");
    }
    for size in [0, 0x8001, 0xffff] {
        let error = device::Queue::postponed(device::RingConfig { size, ..at }).unwrap_err();
        assert_eq!(error, RingError::PackedSize { size });
    }
}

/// User-Mode Linux starts rings so, and a ring continues so at the beginning of every second lap.
#[test]
fn a_packed_ring_at_0_is_new_if_nothing_was_given_back_in_it() {
    let mut laps = 0;
    for size in 1..=5 {
        for lens in (1..=size).flat_map(|a| (1..=size).map(move |b| [a, b])) {
            let ram = ram();
            let (rings, at) = testing::areas_of(&ram, BASE, config(size, true));
            let at = device::RingConfig { base: 0, ..at };
            let mut driver = driver::Queue::with_config(config(size, true), rings).unwrap();
            let mut device = device::Queue::new(at, &ram).unwrap();
            assert_eq!(device.next_avail(), device::RingConfig::start(true));
            let mut chain = Chain::new();
            for token in 0..60 {
                let len = usize::from(lens[token as usize % 2]);
                driver.add(&vec![Desc::writable(DATA + token, 8); len], token).unwrap();
                // The first chain may be there before the device is.
                driver.publish();
                if token == 0 || device.next_avail() == 0 {
                    device = device::Queue::new(at, &ram).unwrap();
                }
                assert!(device.pop(&ram, &mut chain).unwrap(), "{size} {lens:?} {token}");
                assert_eq!(chain.descs()[0].addr, DATA + token);
                device.push_used(chain.head(), 0);
                let _ = device.publish_used();
                assert_eq!(driver.pop().unwrap().unwrap().token, token);
                if device.next_avail() == 0 {
                    laps += 1;
                    device = device::Queue::new(at, &ram).unwrap();
                    assert_eq!(device.next_avail(), 0, "{size} {lens:?} {token}");
                }
            }
        }
    }
    assert!(laps > 100, "{laps}");
}

// rule D21
#[test]
fn a_ring_that_moves_goes_on_where_its_contents_are() {
    for packed in [false, true] {
        let (ram, other) = (ram(), testing::Ram::new(0x7000_0000, 0x1_0000));
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(8, packed));
        let mut chain = Chain::new();
        for token in 0..11 {
            driver.add(&[Desc::writable(DATA, 8)], token).unwrap();
            driver.publish();
            assert!(device.pop(&ram, &mut chain).unwrap());
            if token < 10 {
                device.push_used(chain.head(), 1);
                let _ = device.publish_used();
                assert_eq!(driver.pop().unwrap().unwrap().token, token);
            }
        }
        let mut bytes = vec![0; config(8, packed).offsets().len];
        ram.read(BASE, &mut bytes).unwrap();
        other.write(other.base(), &bytes).unwrap();
        let device::RingConfig { desc, avail, used, .. } = *device.config();
        let moved = |addr| addr - BASE + other.base();
        device.relocate(moved(desc), moved(avail), moved(used));
        assert!(!device.is_valid());
        assert!(device.revalidate(&ram).is_err() && !device.is_valid(), "it is not there");
        assert_eq!(device.revalidate(&other), Ok(()));
        assert!(device.is_valid());
        assert_eq!(device.config().desc, moved(desc));
        device.push_used(chain.head(), 7);
        let _ = device.publish_used();
        assert_eq!(driver.pop(), Ok(None), "it is given back elsewhere");
        other.read(other.base(), &mut bytes).unwrap();
        ram.write(BASE, &bytes).unwrap();
        assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 10, len: 7 })));
    }
}

#[test]
fn what_was_not_begun_goes_back_newest_first_and_comes_again() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(8, packed));
        let mut chain = Chain::new();
        let mut token = 0;
        for round in 0..20 {
            let first = token;
            for len in [1, 2, 3] {
                driver.add(&vec![Desc::writable(DATA + token, 8); len], token).unwrap();
                token += 1;
            }
            driver.publish();
            let start = device.next_avail();
            let mut heads = Vec::new();
            let mut after = Vec::new();
            while device.pop(&ram, &mut chain).unwrap() {
                heads.push(chain.head());
                after.push(device.next_avail());
            }
            assert_eq!(heads.len(), 3);
            assert!(!device.untake(heads[0]) && !device.untake(heads[1]), "not the newest");
            // The second is completed first: what it leaves in the ring lies before the third.
            device.push_used(heads[1], 2);
            let _ = device.publish_used();
            assert!(device.untake(heads[2]), "round {round}");
            assert_eq!(device.next_avail() as u16, after[1] as u16);
            assert!(!device.untake(heads[2]) && !device.untake(heads[0]));
            // The queue stops like this, and continues as another.
            device.push_used(heads[0], 1);
            let _ = device.publish_used();
            let at = device::RingConfig { base: device.next_avail(), ..*device.config() };
            device = device::Queue::new(at, &ram).unwrap();
            assert_eq!(device.in_flight(), 0);
            assert!(device.pop(&ram, &mut chain).unwrap());
            assert_eq!((chain.head(), chain.descs()[0].addr), (heads[2], DATA + first + 2));
            device.push_used(chain.head(), 3);
            let _ = device.publish_used();
            for at in [1, 0, 2] {
                let used = driver.pop().unwrap().unwrap();
                assert_eq!((used.token, used.len), (first + at, at as u32 + 1));
            }
            assert_ne!(device.next_avail(), start);
        }
    }
}

#[test]
fn untaken_to_the_last_a_queue_is_where_it_was() {
    for packed in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(4, packed));
        let (mut burst, mut chain) = (Burst::new(), Chain::new());
        for round in 0..9 {
            for token in 0..3 {
                driver.add(&[Desc::readable(DATA + token, 1)], token).unwrap();
            }
            driver.publish();
            let start = device.next_avail();
            assert_eq!(device.pop_burst(&ram, 9, &mut burst), Ok(3));
            assert_eq!(device.in_flight(), 3);
            for taken in burst.iter().rev() {
                assert!(device.untake(taken.head()), "round {round}");
            }
            assert_eq!((device.next_avail(), device.in_flight()), (start, 0));
            for token in 0..3 {
                assert!(device.pop(&ram, &mut chain).unwrap());
                assert_eq!(chain.descs(), [Desc::readable(DATA + token, 1)]);
                device.push_used(chain.head(), 0);
            }
            let _ = device.publish_used();
            assert_eq!(driver.pop_burst(&mut [driver::Used::default(); 4]), Ok(3));
        }
    }
}

#[test]
fn after_a_crash_a_split_ring_goes_on_with_the_heads_in_flight() {
    // The front end may know up to where the ring was taken, or only up to where it was given back.
    for knows in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair(&ram, BASE, 8, true);
        let mut chain = Chain::new();
        for token in 0..5 {
            driver.add(&[Desc::writable(DATA + token, 8)], token).unwrap();
        }
        driver.publish();
        let mut heads = Vec::new();
        for _ in 0..4 {
            assert!(device.pop(&ram, &mut chain).unwrap());
            heads.push(chain.head());
        }
        device.push_used(heads[1], 1);
        let _ = device.publish_used();
        let next = device.next_avail();
        drop(device);
        let (_, at) = testing::areas(&ram, BASE, 8, true);
        let base = if knows { next } else { 1 };
        let mut device = device::Queue::new(device::RingConfig { base, ..at }, &ram).unwrap();
        for (token, head) in [(0, heads[0]), (2, heads[2]), (3, heads[3])] {
            device.take_head(&ram, head, &mut chain).unwrap();
            assert_eq!((chain.head(), chain.descs()[0].addr), (head, DATA + token));
        }
        assert_eq!((device.in_flight(), device.next_avail()), (3, next));
        assert!(!device.untake(heads[3]), "it was not taken from here");
        assert!(device.pop(&ram, &mut chain).unwrap());
        assert_eq!(chain.descs()[0].addr, DATA + 4);
        device.push_used_burst([(chain.head(), 4), (heads[3], 3), (heads[0], 0), (heads[2], 2)]);
        let _ = device.publish_used();
        let mut out = [driver::Used::default(); 8];
        assert_eq!(driver.pop_burst(&mut out), Ok(5));
        assert_eq!(out[..5].iter().map(|used| used.token).collect::<Vec<_>>(), [1, 4, 3, 0, 2]);
        assert!(!device.pop(&ram, &mut chain).unwrap());
    }
}

#[test]
fn a_record_of_heads_is_not_believed() {
    let ram = ram();
    let (_, mut device) = testing::pair(&ram, BASE, 4, true);
    let mut chain = Chain::new();
    let stored = device.take_stored(&ram, 0, Stored::Buffers(&[]), &mut chain);
    assert_eq!(stored, Err(RingError::Format));
    device.take_head(&ram, 2, &mut chain).unwrap();
    let error = device.take_head(&ram, 2, &mut chain).unwrap_err();
    let fault = ChainFault::InFlight;
    assert_eq!(error, RingError::Chain { index: 1, head: 2, fault });
    let (_, mut device) = testing::pair(&ram, BASE, 4, true);
    let error = device.take_head(&ram, 4, &mut chain).unwrap_err();
    let fault = ChainFault::Head { size: 4 };
    assert_eq!(error, RingError::Chain { index: 0, head: 4, fault });
    assert_eq!(device.broken(), Some(error));
}

#[test]
fn after_a_crash_a_packed_ring_goes_on_with_what_was_recorded() {
    for knows in [false, true] {
        let ram = ram();
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config(7, true));
        let mut chain = Chain::new();
        let table = ram.window(DATA + 0x1000, 64, Access::ReadWrite).unwrap();
        let four = [Desc::writable(DATA + 3, 8); 4];
        // First once round most of the ring, so that the chains in flight cross its end.
        for token in 0..5 {
            driver.add(&[Desc::writable(DATA, 8)], token).unwrap();
            driver.publish();
            assert!(device.pop(&ram, &mut chain).unwrap());
            device.push_used(chain.head(), 0);
            let _ = device.publish_used();
            driver.pop().unwrap().unwrap();
        }
        driver.add(&[Desc::writable(DATA + 10, 8)], 10).unwrap();
        driver.add(&[Desc::readable(DATA + 11, 8), Desc::writable(DATA, 9)], 11).unwrap();
        driver.add_indirect(DATA + 0x1000, &table, &four, 12).unwrap();
        driver.publish();
        let mut records = Vec::new();
        for _ in 0..3 {
            assert!(device.pop(&ram, &mut chain).unwrap());
            records.push((chain.head(), chain.count(), chain.table(), chain.descs().to_vec()));
        }
        assert_eq!(records[1].1, 2);
        assert_eq!((records[2].1, records[2].2), (1, Some((DATA + 0x1000, 64))));
        // The newest is given back first, in the place of the first, whose descriptor is then gone.
        device.push_used(records[2].0, 4);
        let _ = device.publish_used();
        let next = device.next_avail();
        drop(device);
        assert_eq!(driver.pop().unwrap().unwrap().token, 12);
        driver.add_indirect(DATA + 0x1000, &table, &four[..2], 13).unwrap();
        driver.publish();
        let (_, at) = testing::areas_of(&testing::Ram::new(BASE, 0x1000), BASE, config(7, true));
        let base = if knows { next } else { next >> 16 | next & 0xffff_0000 };
        let mut device = device::Queue::new(device::RingConfig { base, ..at }, &ram).unwrap();
        assert_eq!(device.take_head(&ram, 0, &mut chain), Err(RingError::Format));
        for (id, count, table, descs) in &records[..2] {
            assert_eq!((*table, usize::from(*count)), (None, descs.len()));
            device.take_stored(&ram, *id, Stored::Buffers(descs), &mut chain).unwrap();
            assert_eq!((chain.head(), chain.descs()), (*id, &descs[..]));
        }
        assert_eq!((device.in_flight(), device.next_avail()), (2, next));
        assert!(device.pop(&ram, &mut chain).unwrap());
        assert_eq!((chain.descs(), chain.table()), (&four[..2], Some((DATA + 0x1000, 32))));
        device.push_used_burst([(records[1].0, 2), (chain.head(), 3), (records[0].0, 1)]);
        let _ = device.publish_used();
        for (token, len) in [(11, 2), (13, 3), (10, 1)] {
            assert_eq!(driver.pop(), Ok(Some(driver::Used { token, len })));
        }
        assert_eq!((driver.free_descs(), device.in_flight()), (7, 0));
    }
}

#[test]
fn a_record_of_a_packed_ring_is_not_believed() {
    let ram = ram();
    let config = config(4, true);
    let mut chain = Chain::new();
    let mut take = |stored: &[(u16, Stored<'_>)]| {
        let (_, mut device) = testing::pair_of(&ram, BASE, config);
        let mut last = Ok(());
        for &(id, stored) in stored {
            last = device.take_stored(&ram, id, stored, &mut chain);
        }
        match last {
            Err(RingError::Chain { fault, .. }) => {
                assert!(device.broken().is_some() && chain.descs().is_empty());
                Some(fault)
            }
            other => {
                other.unwrap();
                None
            }
        }
    };
    let [read, write] = [Desc::readable(DATA, 1), Desc::writable(DATA, 1)];
    let two = Stored::Buffers(&[read, write]);
    assert_eq!(take(&[(0, two), (3, two)]), None);
    assert_eq!(take(&[(0, two), (0, two)]), Some(ChainFault::InFlight));
    assert_eq!(take(&[(4, two)]), Some(ChainFault::Head { size: 4 }));
    assert_eq!(take(&[(0, Stored::Buffers(&[]))]), Some(ChainFault::TooMany { room: 4 }));
    assert_eq!(take(&[(0, Stored::Buffers(&[read; 5]))]), Some(ChainFault::TooMany { room: 4 }));
    let three = Stored::Buffers(&[read; 3]);
    assert_eq!(take(&[(0, two), (1, three)]), Some(ChainFault::TooMany { room: 2 }));
    assert_eq!(take(&[(0, Stored::Buffers(&[write, read]))]), Some(ChainFault::Order { at: 1 }));
    let table = Stored::Table { addr: DATA, len: 17 };
    assert_eq!(take(&[(0, table)]), Some(ChainFault::IndirectLength { at: 0, len: 17 }));
    assert_eq!(take(&[(0, two), (1, two), (2, table)]), Some(ChainFault::TooMany { room: 0 }));
}
