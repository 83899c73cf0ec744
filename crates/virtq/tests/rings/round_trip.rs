//! Both ends over one piece of memory.

use proptest::prelude::*;
use ringfence_mem::{Access, Translate};
use ringfence_virtq::{AddError, Chain, Desc, RingError, cut, device, driver, layout, testing};

use crate::rig::{BASE, DATA, ram};

#[test]
fn a_chain_arrives_as_it_was_added_and_comes_back_with_its_token() {
    let ram = ram();
    let (mut driver, mut device) = testing::pair(&ram, BASE, 8, false);
    let descs = [
        Desc::readable(DATA, 16),
        Desc::readable(DATA + 100, 3),
        Desc::writable(DATA + 0x1000, 512),
        Desc::writable(DATA + 0x2000, 1),
    ];
    driver.add(&descs, 77).unwrap();
    let mut chain = Chain::new();
    assert_eq!(device.pop(&ram, &mut chain), Ok(false), "not published yet");
    driver.publish();
    assert!(driver.needs_kick());
    assert!(!driver.needs_kick(), "kicked once already");
    assert_eq!(device.pop(&ram, &mut chain), Ok(true));
    assert_eq!(chain.descs(), descs);
    assert_eq!((chain.readable(), chain.writable()), (&descs[..2], &descs[2..]));
    assert_eq!((chain.readable_len(), chain.writable_len()), (19, 513));
    assert_eq!((device.in_flight(), device.next_avail()), (1, 1));
    assert_eq!((driver.in_flight(), driver.free_descs()), (1, 4));
    device.push_used(chain.head(), 513);
    assert_eq!(driver.pop(), Ok(None), "not published yet");
    assert!(device.publish_used());
    assert!(!device.publish_used(), "nothing new");
    assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 77, len: 513 })));
    assert_eq!(driver.pop(), Ok(None));
    assert_eq!((driver.in_flight(), driver.free_descs(), device.in_flight()), (0, 8, 0));
    assert_eq!(device.pop(&ram, &mut chain), Ok(false));
    assert!(chain.descs().is_empty());
}

#[test]
fn an_indirect_table_takes_one_descriptor_and_may_lie_in_pieces() {
    let ram = ram().fragmented(7);
    let (mut driver, mut device) = testing::pair(&ram, BASE, 4, true);
    let table = ram.window(DATA + 5, 64, Access::ReadWrite).unwrap();
    let descs = [
        Desc::readable(DATA + 0x1000, 10),
        Desc::writable(DATA + 0x2000, 20),
        Desc::writable(DATA + 0x3000, 30),
        Desc::writable(DATA + 0x4000, 0),
    ];
    driver.add_indirect(DATA + 5, &table, &descs, 1).unwrap();
    assert_eq!(driver.free_descs(), 3);
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(device.pop(&ram, &mut chain), Ok(true));
    assert_eq!(chain.descs(), descs);
    device.push_used(chain.head(), 50);
    assert!(device.publish_used());
    assert_eq!(driver.pop().unwrap().unwrap().len, 50);
    assert_eq!(driver.free_descs(), 4);
    // With a table that is too short, the chain is refused and nothing changes.
    let short = table.part(0, 63).unwrap();
    let error = driver.add_indirect(DATA + 5, &short, &descs, 2).unwrap_err();
    assert_eq!(error, AddError::Table { wanted: 4, len: 63 });
    assert_eq!((driver.free_descs(), driver.in_flight()), (4, 0));
}

#[test]
fn bytes_are_copied_across_buffers_and_pieces() {
    let ram = ram().fragmented(13);
    let (mut driver, mut device) = testing::pair(&ram, BASE, 8, true);
    let text: Vec<u8> = (0..60).collect();
    ram.write(DATA, &text[..25]).unwrap();
    ram.write(DATA + 0x1000, &text[25..]).unwrap();
    let descs = [
        Desc::readable(DATA, 25),
        Desc::readable(DATA + 0x1000, 35),
        Desc::writable(DATA + 0x2000, 30),
        Desc::writable(DATA + 0x3000, 10),
    ];
    driver.add(&descs, 0).unwrap();
    driver.publish();
    let mut chain = Chain::new();
    assert!(device.pop(&ram, &mut chain).unwrap());
    let mut out = [0; 100];
    assert_eq!(chain.read_at(&ram, 20, &mut out), Ok(40));
    assert_eq!(out[..40], text[20..]);
    assert_eq!(chain.read_at(&ram, 60, &mut out), Ok(0));
    assert_eq!(chain.read_at(&ram, u64::MAX, &mut out), Ok(0));
    assert_eq!(chain.write_at(&ram, 25, &text), Ok(15));
    ram.read(DATA + 0x2000, &mut out[..30]).unwrap();
    assert_eq!((&out[..25], &out[25..30]), (&[0; 25][..], &text[..5]));
    ram.read(DATA + 0x3000, &mut out[..11]).unwrap();
    assert_eq!((&out[..10], out[10]), (&text[5..15], 0));
    let parts: Vec<Desc> = cut(chain.descs(), 24, 37).collect();
    assert_eq!(
        parts,
        [
            Desc::readable(DATA + 24, 1),
            Desc::readable(DATA + 0x1000, 35),
            Desc::writable(DATA + 0x2000, 1)
        ]
    );
}

#[test]
fn an_address_that_leads_nowhere_is_reported_when_it_is_used() {
    let ram = ram();
    let (mut driver, mut device) = testing::pair(&ram, BASE, 8, true);
    driver.add(&[Desc::readable(8, 16), Desc::writable(u64::MAX, 1)], 0).unwrap();
    driver.publish();
    let mut chain = Chain::new();
    assert_eq!(device.pop(&ram, &mut chain), Ok(true));
    assert!(chain.read_at(&ram, 0, &mut [0; 16]).is_err());
    assert!(chain.write_at(&ram, 0, &[0]).is_err());
    device.push_used(chain.head(), 0);
    let _ = device.publish_used();
    assert_eq!(driver.pop().unwrap().unwrap().len, 0);
}

#[test]
fn a_driver_is_refused_what_virtio_forbids_and_nothing_changes() {
    let ram = ram();
    let (mut driver, _) = testing::pair(&ram, BASE, 4, true);
    let [read, write] = [Desc::readable(DATA, 1), Desc::writable(DATA, 1)];
    assert_eq!(driver.add(&[], 0), Err(AddError::Empty));
    assert_eq!(driver.add(&[read; 5], 0), Err(AddError::TooMany { wanted: 5, size: 4 }));
    let table = ram.window(DATA, 16, Access::ReadWrite).unwrap();
    let too_many = driver.add_indirect(DATA, &table, &[read; 1025], 0).unwrap_err();
    assert_eq!(too_many.to_string(), "a chain of 1025 descriptors, of which it may have 1024");
    assert_eq!(driver.add(&[write, read], 0), Err(AddError::Order { at: 1 }));
    let wraps = Desc::writable(u64::MAX, 2);
    assert_eq!(driver.add(&[read, wraps], 0), Err(AddError::Wraps { at: 1 }));
    let huge = Desc::writable(0, u32::MAX);
    assert_eq!(driver.add(&[read, huge], 0), Err(AddError::TooLong { total: 1 << 32 }));
    driver.add(&[read; 3], 0).unwrap();
    assert_eq!(driver.add(&[read; 2], 0), Err(AddError::Full { wanted: 2, free: 1 }));
    assert_eq!((driver.free_descs(), driver.in_flight()), (1, 1));
    driver.add(&[huge], 0).unwrap();
    assert_eq!(driver.add(&[read], 0), Err(AddError::Full { wanted: 1, free: 0 }));
}

#[test]
fn a_queue_of_any_legal_size_starts_and_of_no_other() {
    let ram = testing::Ram::new(0, layout::offsets(layout::MAX_SIZE).len);
    for size in (0..16).map(|bit| 1 << bit) {
        let (mut driver, mut device) = testing::pair(&ram, 0, size, true);
        for token in 0..size {
            driver.add(&[Desc::readable(0, 1)], token.into()).unwrap();
        }
        driver.publish();
        let mut chain = Chain::new();
        while device.pop(&ram, &mut chain).unwrap() {
            device.push_used(chain.head(), 0);
        }
        let _ = device.publish_used();
        for token in 0..size {
            assert_eq!(driver.pop().unwrap().unwrap().token, u64::from(token));
        }
    }
    for size in [0, 3, 0x8001, 0xffff] {
        let (rings, config) = testing::areas(&ram, 0, 8, false);
        let error = RingError::Size { size };
        assert_eq!(driver::Queue::new(size, rings, false).unwrap_err(), error);
        let config = device::RingConfig { size, ..config };
        assert_eq!(device::Queue::new(config, &ram).unwrap_err(), error);
    }
}

#[test]
fn areas_that_are_unaligned_short_or_nowhere_are_refused() {
    let ram = ram();
    let (rings, config) = testing::areas(&ram, BASE, 8, false);
    let new = |config| device::Queue::new(config, &ram).map(drop).unwrap_err().to_string();
    let desc = config.desc + 8;
    let misaligned = "descriptor table at 0x40000008 is not aligned to 16 bytes";
    assert_eq!(new(device::RingConfig { desc, ..config }), misaligned);
    let avail = config.avail + 1;
    assert!(new(device::RingConfig { avail, ..config }).ends_with("is not aligned to 2 bytes"));
    let used = config.used + 2;
    assert!(new(device::RingConfig { used, ..config }).ends_with("is not aligned to 4 bytes"));
    for addr in [0, BASE + 0x20_0000 - 4, u64::MAX - 3] {
        let error = new(device::RingConfig { used: addr, ..config });
        assert!(error.starts_with(&format!("used ring at {addr:#x} cannot be reached")), "{error}");
    }
    let avail = rings.avail.part(0, layout::avail_bytes(8) - 2).unwrap();
    let rings = driver::Rings { avail, ..rings };
    assert!(driver::Queue::new(8, rings.clone(), false).is_ok(), "no event, no room for it");
    let error = driver::Queue::new(8, rings, true).unwrap_err();
    assert_eq!(error.to_string(), "available ring has 20 bytes and needs 22");
}

#[test]
fn without_event_idx_the_areas_may_end_before_the_events() {
    let ram = testing::Ram::new(0, 4096);
    let used = 4096 - (layout::used_bytes(8) as u64 - 2);
    let config = device::RingConfig {
        size: 8,
        desc: 0,
        avail: 512,
        used,
        event_idx: false,
        indirect: false,
        packed: false,
        base: 0,
    };
    assert!(device::Queue::new(config, &ram).is_ok());
    assert!(device::Queue::new(device::RingConfig { event_idx: true, ..config }, &ram).is_err());
}

#[test]
fn an_invalidated_queue_reports_it_and_goes_on_after_its_areas_are_found_again() {
    let ram = ram();
    let (mut driver, mut device) = testing::pair(&ram, BASE, 8, true);
    let mut chain = Chain::new();
    driver.add(&[Desc::writable(DATA, 8)], 1).unwrap();
    driver.publish();
    assert!(device.pop(&ram, &mut chain).unwrap());
    assert!(device.is_valid());
    ram.invalidate_windows();
    assert!(!device.is_valid());
    let elsewhere = testing::Ram::new(0, 4096);
    assert!(matches!(device.revalidate(&elsewhere), Err(RingError::Unreachable { .. })));
    assert!(!device.is_valid() && device.broken().is_none(), "a miss breaks nothing");
    assert_eq!(device.revalidate(&ram), Ok(()));
    assert!(device.is_valid());
    device.push_used(chain.head(), 8);
    let _ = device.publish_used();
    assert_eq!(driver.pop(), Ok(Some(driver::Used { token: 1, len: 8 })));
}

#[test]
fn a_stopped_queue_goes_on_from_its_base() {
    let ram = ram();
    let (mut driver, mut device) = testing::pair(&ram, BASE, 4, true);
    let mut chain = Chain::new();
    for token in 0..7 {
        driver.add(&[Desc::writable(DATA, 8)], token).unwrap();
        driver.publish();
        assert!(device.pop(&ram, &mut chain).unwrap());
        device.push_used(chain.head(), 0);
        let _ = device.publish_used();
        assert_eq!(driver.pop().unwrap().unwrap().token, token);
        let config = device::RingConfig { base: device.next_avail(), ..*device.config() };
        device = device::Queue::new(config, &ram).unwrap();
    }
    let config = device::RingConfig { base: 12, ..*device.config() };
    let error = device::Queue::new(config, &ram).unwrap_err();
    assert_eq!(error, RingError::Base { base: 12, used: 7, size: 4 });
}

/// One step of the property test.
#[derive(Clone, Debug)]
enum Step {
    Add {
        readable: u8,
        writable: u8,
        indirect: bool,
    },
    /// As many chains of one buffer.
    AddBurst(u8),
    Publish,
    Take,
    TakeBurst(u8),
    /// Puts back the chain at this place among those taken, if allowed.
    Untake(usize),
    Peek(u8),
    /// Gives back the chain at this place among those taken.
    GiveBack(usize),
    PublishUsed,
    PopAll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4_u8, 0..4_u8, any::<bool>()).prop_map(|(readable, writable, indirect)| {
            Step::Add { readable, writable, indirect }
        }),
        2 => (0..6_u8).prop_map(Step::AddBurst),
        2 => Just(Step::Publish),
        4 => Just(Step::Take),
        2 => (0..6_u8).prop_map(Step::TakeBurst),
        2 => any::<usize>().prop_map(Step::Untake),
        1 => (0..6_u8).prop_map(Step::Peek),
        4 => any::<usize>().prop_map(Step::GiveBack),
        2 => Just(Step::PublishUsed),
        1 => Just(Step::PopAll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Against two plain queues: what is added arrives in order and complete, what is given back
    /// comes back in order and once, whatever the batches and the order of completion.
    #[test]
    fn both_ends_agree_with_plain_queues(
        steps in prop::collection::vec(step(), 1..300),
        size in 1..17_u16,
        event_idx: bool,
        packed: bool,
    ) {
        use std::collections::VecDeque;
        let ram = ram().fragmented(97);
        let size = if packed { size } else { size.next_power_of_two() };
        let config = driver::QueueConfig { size, event_idx, packed };
        let (mut driver, mut device) = testing::pair_of(&ram, BASE, config);
        let (mut added, mut sent) = (VecDeque::new(), VecDeque::new());
        let (mut taken, mut given, mut back) = (Vec::new(), VecDeque::new(), VecDeque::new());
        // The tokens of all chains taken, in order, except those put back.
        let mut order = Vec::new();
        let (mut chain, mut burst) = (Chain::new(), device::Burst::new());
        let mut token = 0;
        for step in steps {
            match step {
                Step::AddBurst(count) => {
                    let first = token + 1;
                    let buffer = |at| Desc::writable(DATA + at % 64, 8);
                    let all = (first..first + u64::from(count)).map(|at| (buffer(at), at));
                    let free = driver.free_descs();
                    let some = driver.add_burst(all).unwrap();
                    prop_assert_eq!(some, usize::from(free).min(count.into()));
                    token += some as u64;
                    added.extend((first..=token).map(|at| (at, vec![buffer(at)])));
                }
                Step::TakeBurst(most) => {
                    let count = device.pop_burst(&ram, most.into(), &mut burst).unwrap();
                    prop_assert_eq!(count, sent.len().min(most.into()));
                    for chain in burst.iter() {
                        let (token, descs): (u64, Vec<Desc>) = sent.pop_front().unwrap();
                        prop_assert_eq!(chain.descs(), &descs[..]);
                        let len = chain.writable().iter().map(|desc| desc.len).sum();
                        order.push(token);
                        taken.push((token, chain.head(), len, descs));
                    }
                }
                Step::Untake(place) if !taken.is_empty() => {
                    let place = place % taken.len();
                    let newest = order.last() == Some(&taken[place].0);
                    prop_assert_eq!(device.untake(taken[place].1), newest);
                    if newest {
                        order.pop();
                        let (token, _, _, descs) = taken.remove(place);
                        sent.push_front((token, descs));
                    }
                }
                Step::Untake(_) => prop_assert!(!device.untake(0)),
                Step::Peek(ahead) => {
                    let mut seen = Vec::new();
                    device.peek_from(&ram, 0, ahead.into(), |glimpse| {
                        if let device::Glimpse::Buffer(desc) = glimpse {
                            seen.push(desc);
                        }
                    });
                    let next = sent.iter().take(ahead.into());
                    let expected: Vec<Desc> = next.flat_map(|(_, descs)| descs.clone()).collect();
                    prop_assert_eq!(seen, expected);
                }
                Step::Add { readable, writable, indirect } => {
                    token += 1;
                    let at = |n| DATA + token * 64 % 0x1000 + u64::from(n);
                    let descs: Vec<Desc> = (0..readable)
                        .map(|n| Desc::readable(at(n), n.into()))
                        .chain((0..writable).map(|n| Desc::writable(at(n), 64 + u32::from(n))))
                        .collect();
                    let free = driver.free_descs();
                    let result = if indirect {
                        let addr = DATA + 0x1000 + token * 128;
                        let table = ram.window(addr, 128, Access::ReadWrite).unwrap();
                        driver.add_indirect(addr, &table, &descs, token)
                    } else {
                        driver.add(&descs, token)
                    };
                    let wants = if indirect { 1 } else { descs.len() };
                    let fits = !descs.is_empty()
                        && (indirect || descs.len() <= usize::from(size))
                        && wants <= usize::from(free);
                    prop_assert_eq!(result.is_ok(), fits, "{:?}", result);
                    if fits {
                        added.push_back((token, descs));
                        prop_assert_eq!(driver.free_descs(), free - wants as u16);
                    } else {
                        prop_assert_eq!(driver.free_descs(), free);
                    }
                }
                Step::Publish => {
                    driver.publish();
                    sent.append(&mut added);
                }
                Step::Take => {
                    let some = device.pop(&ram, &mut chain).unwrap();
                    prop_assert_eq!(some, !sent.is_empty());
                    if let Some((token, descs)) = sent.pop_front() {
                        prop_assert_eq!(chain.descs(), &descs[..]);
                        order.push(token);
                        taken.push((token, chain.head(), chain.writable_len() as u32, descs));
                    }
                }
                Step::GiveBack(place) if !taken.is_empty() => {
                    let (token, head, len, _) = taken.swap_remove(place % taken.len());
                    device.push_used(head, len);
                    given.push_back(driver::Used { token, len });
                }
                Step::GiveBack(_) => {}
                Step::PublishUsed => {
                    let _ = device.publish_used();
                    back.append(&mut given);
                }
                Step::PopAll => {
                    while let Some(used) = driver.pop().unwrap() {
                        prop_assert_eq!(Some(used), back.pop_front());
                    }
                    prop_assert!(back.is_empty());
                }
            }
            let here = added.len() + sent.len() + taken.len() + given.len() + back.len();
            prop_assert_eq!(usize::from(driver.in_flight()), here);
            prop_assert_eq!(usize::from(device.in_flight()), taken.len());
        }
    }
}
