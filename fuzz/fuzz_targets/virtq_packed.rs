//! Arbitrary memory under both ends of a packed queue: the ring, indirect tables, event structures.
//!
//! The first bytes choose the queue's shape, the rest is laid over the memory: under the device's
//! end, and then, once the driver's end has added what the same bytes say, under that. Every chain
//! that is taken must hold to virtio's rules, no token comes back twice, and everything must end.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use ringfence_mem::{Access, Translate};
use ringfence_virtq::{Chain, Desc, device, driver, layout, testing};

const BASE: u64 = 0x1000;
const LEN: usize = 0x4000;

thread_local! {
    // Made once: a mapping for every run would take most of the time.
    static RAM: testing::Ram = testing::Ram::new(BASE, LEN);
    static ROOM: RefCell<(Chain, device::Burst)> = RefCell::default();
}

fuzz_target!(|data: &[u8]| {
    let Some((&[size, flags, rounds, place], content)) = data.split_first_chunk() else { return };
    let content = &content[..content.len().min(LEN)];
    let config =
        driver::QueueConfig { size: u16::from(size) + 1, event_idx: flags & 1 != 0, packed: true };
    RAM.with(|ram| {
        ROOM.with_borrow_mut(|(chain, burst)| {
            serve(ram, chain, burst, config, [flags, rounds, place], content);
        });
        drive(ram, config, rounds, content);
    });
});

/// Checks a chain, and does with it what a device does; the writes may well change the ring.
fn look_at(ram: &testing::Ram, chain: &Chain, size: u16, rounds: u8) {
    assert!(chain.head() < size && (1..=size).contains(&chain.count()));
    assert!(chain.readable().iter().all(|desc| !desc.write));
    assert!(chain.writable().iter().all(|desc| desc.write));
    let total: u64 = chain.descs().iter().map(|desc| u64::from(desc.len)).sum();
    assert_eq!(total, chain.readable_len() + chain.writable_len());
    assert!(total <= u32::MAX.into());
    assert!(chain.descs().len() <= usize::from(size.max(layout::MAX_INDIRECT)));
    let mut bytes = [0; 64];
    let _ = chain.read_at(ram, u64::from(rounds), &mut bytes);
    let _ = chain.write_at(ram, u64::from(rounds), &bytes);
}

fn serve(
    ram: &testing::Ram,
    chain: &mut Chain,
    burst: &mut device::Burst,
    config: driver::QueueConfig,
    [flags, rounds, place]: [u8; 3],
    content: &[u8],
) {
    ram.write(BASE, &[0; LEN]).expect("all of the memory");
    ram.write(BASE, content).expect("all of the memory");
    let size = config.size;
    let at = config.offsets();
    let place = u32::from(u16::from(place) % size) | u32::from(flags & 8 != 0) << 15;
    let device = device::RingConfig {
        size,
        desc: BASE,
        avail: BASE + at.avail as u64,
        used: BASE + at.used as u64,
        event_idx: config.event_idx,
        indirect: flags & 2 != 0,
        packed: true,
        base: place | place << 16,
    };
    let mut queue = device::Queue::new(device, ram).expect("a legal queue");
    for round in 0..=rounds {
        let mut seen = 0;
        queue.peek_from(ram, 0, u16::from(round), |_| seen += 1);
        assert!(seen <= 2 * device::PEEK_DESCS);
        let before = (queue.in_flight(), queue.next_avail());
        let head = match queue.pop(ram, chain) {
            Ok(true) => chain.head(),
            Ok(false) => break,
            Err(error) => {
                assert_eq!(queue.pop(ram, chain), Err(error), "it stays broken");
                assert!(chain.descs().is_empty());
                break;
            }
        };
        assert!(queue.untake(head));
        assert_eq!((queue.in_flight(), queue.next_avail()), before);
        // A burst finds what a single call found.
        assert_eq!(queue.pop_burst(ram, 1, burst), Ok(1));
        let taken = burst.get(0).expect("one chain");
        assert_eq!((taken.head(), taken.descs()), (head, chain.descs()));
        look_at(ram, chain, size, rounds);
        if flags & 4 != 0 {
            queue.push_used(head, chain.writable_len() as u32);
            let _ = queue.publish_used();
        }
    }
    queue.suppress_kicks();
    let _ = queue.enable_kicks();
}

fn drive(ram: &testing::Ram, config: driver::QueueConfig, rounds: u8, content: &[u8]) {
    let memory = ram.window(BASE, LEN as u64, Access::ReadWrite).expect("all of the memory");
    let rings = driver::Rings::placed(&memory, &config).expect("there is room");
    let mut queue = driver::Queue::with_config(config, rings).expect("a legal queue");
    let mut out = vec![false; usize::from(rounds)];
    for (token, added) in out.iter_mut().enumerate() {
        let count = 1 + content.get(token).map_or(0, |byte| usize::from(byte % 4));
        *added = queue.add(&[Desc::writable(0, 16); 4][..count], token as u64).is_ok();
        if token % 8 != 7 {
            queue.publish();
        }
    }
    ram.write(BASE, content).expect("all of the memory");
    let _ = queue.needs_kick();
    while let Ok(Some(used)) = queue.pop() {
        assert!(std::mem::replace(&mut out[used.token as usize], false), "given back twice");
        assert!(used.len <= 64);
    }
    assert_eq!(usize::from(queue.in_flight()), out.iter().filter(|&&out| out).count());
    let _ = queue.enable_notifications();
}
