//! Arbitrary memory under the device's end of a queue: rings, descriptors and indirect tables.
//!
//! The first bytes choose the queue's shape, the rest is laid over the memory. Every chain that is
//! taken must hold to virtio's rules, and everything must end.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use ringfence_mem::Translate;
use ringfence_virtq::{Chain, device, layout, testing};

const BASE: u64 = 0x1000;
const LEN: usize = 0x4000;

thread_local! {
    // Made once: a mapping for every run would take most of the time.
    static RAM: testing::Ram = testing::Ram::new(BASE, LEN);
    static CHAIN: RefCell<Chain> = RefCell::default();
}

fuzz_target!(|data: &[u8]| {
    let Some((&[bits, flags, rounds], content)) = data.split_first_chunk() else { return };
    let content = &content[..content.len().min(LEN)];
    RAM.with(|ram| CHAIN.with_borrow_mut(|chain| run(ram, chain, bits, flags, rounds, content)));
});

fn run(ram: &testing::Ram, chain: &mut Chain, bits: u8, flags: u8, rounds: u8, content: &[u8]) {
    ram.write(BASE, &[0; LEN]).expect("all of the memory");
    ram.write(BASE, content).expect("all of the memory");
    let size = 1 << (bits % 9);
    let event_idx = flags & 1 != 0;
    let at = layout::offsets(size);
    let mut used_idx = [0; 2];
    ram.read(BASE + at.used as u64 + 2, &mut used_idx).expect("the used ring");
    let config = device::RingConfig {
        size,
        desc: BASE + at.desc as u64,
        avail: BASE + at.avail as u64,
        used: BASE + at.used as u64,
        event_idx,
        indirect: flags & 2 != 0,
        packed: false,
        base: u16::from_le_bytes(used_idx).wrapping_add(u16::from(flags >> 4)).into(),
    };
    let Ok(mut queue) = device::Queue::new(config, ram) else { return };
    let mut bytes = [0; 64];
    for _ in 0..=rounds {
        match queue.pop(ram, chain) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                assert_eq!(queue.pop(ram, chain), Err(error), "it stays broken");
                assert!(chain.descs().is_empty());
                break;
            }
        }
        assert!(chain.head() < size);
        assert!(chain.readable().iter().all(|desc| !desc.write));
        assert!(chain.writable().iter().all(|desc| desc.write));
        let total: u64 = chain.descs().iter().map(|desc| u64::from(desc.len)).sum();
        assert_eq!(total, chain.readable_len() + chain.writable_len());
        assert!(total <= u32::MAX.into());
        let limit = usize::from(size) + usize::from(layout::MAX_INDIRECT);
        assert!(chain.descs().len() <= limit);
        // What a device does with it; the writes may well change the rings.
        let _ = chain.read_at(ram, u64::from(rounds), &mut bytes);
        let _ = chain.write_at(ram, u64::from(bits), &bytes);
        if flags & 4 != 0 {
            queue.push_used(chain.head(), chain.writable_len() as u32);
            let _ = queue.publish_used();
        }
    }
    queue.suppress_kicks();
    let _ = queue.enable_kicks();
}
