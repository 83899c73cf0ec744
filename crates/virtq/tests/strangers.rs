//! Our driver's end against rust-vmm's device end.

use std::{collections::VecDeque, ptr::NonNull, sync::Arc};

use proptest::prelude::*;
use ringfence_mem::Window;
use ringfence_virtq::{Desc, driver, layout};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const DATA: u64 = 0x1_0000;
const LEN: usize = 0x10_0000;

/// One step of the test.
#[derive(Clone, Debug)]
enum Step {
    Add { readable: u8, writable: u8, indirect: bool },
    Burst(u8),
    Publish,
    Take,
    GiveBack(usize),
    PopAll,
    Sleep,
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4_u8, 0..4_u8, any::<bool>()).prop_map(|(readable, writable, indirect)| {
            Step::Add { readable, writable, indirect }
        }),
        2 => (1..6_u8).prop_map(Step::Burst),
        2 => Just(Step::Publish),
        6 => Just(Step::Take),
        5 => any::<usize>().prop_map(Step::GiveBack),
        1 => Just(Step::PopAll),
        1 => Just(Step::Sleep),
        1 => Just(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// virtio-queue finds what we add in order and complete; what it gives back, we take back, in
    /// any order; and an end that enabled notifications before it slept is notified.
    #[test]
    fn virtio_queue_understands_our_driver(
        steps in prop::collection::vec(step(), 1..300),
        bits in 0..5_u8,
        event_idx: bool,
    ) {
        let size = 1_u16 << bits;
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN)]).unwrap();
        let memory = Arc::new(memory);
        let base = memory.get_host_address(GuestAddress(0)).unwrap();
        // SAFETY: the memory is mapped as long as the Arc lives, and vm-memory makes no references
        // to it.
        let window = unsafe {
            Window::new(NonNull::new(base).unwrap(), LEN, Arc::<GuestMemoryMmap>::clone(&memory))
        };
        let config = driver::QueueConfig { size, event_idx, packed: false };
        let rings = driver::Rings::placed(&window, &config).unwrap();
        let mut driver = driver::Queue::with_config(config, rings).unwrap();
        let mut device = Queue::new(size).unwrap();
        let at = layout::offsets(size);
        device.set_size(size);
        device.set_desc_table_address(Some(at.desc as u32), Some(0));
        device.set_avail_ring_address(Some(at.avail as u32), Some(0));
        device.set_used_ring_address(Some(at.used as u32), Some(0));
        device.set_event_idx(event_idx);
        device.set_ready(true);
        prop_assert!(device.is_valid(&*memory));

        let (mut added, mut sent) = (VecDeque::new(), VecDeque::new());
        let (mut taken, mut back) = (Vec::new(), VecDeque::new());
        let (mut token, mut asleep, mut waits) = (0, false, false);
        for step in steps {
            match step {
                Step::Add { readable, writable, indirect } => {
                    token += 1;
                    let at = |n| DATA + token % 64 * 64 + u64::from(n);
                    let descs: Vec<Desc> = (0..readable)
                        .map(|n| Desc::readable(at(n), n.into()))
                        .chain((0..writable).map(|n| Desc::writable(at(n), 64 + u32::from(n))))
                        .collect();
                    let result = if indirect {
                        let addr = DATA + 0x1000 + token * 128;
                        let table = window.part(addr as usize, 128).unwrap();
                        driver.add_indirect(addr, &table, &descs, token)
                    } else {
                        driver.add(&descs, token)
                    };
                    if result.is_ok() {
                        added.push_back((token, descs));
                    }
                }
                Step::Burst(count) => {
                    let first = token + 1;
                    let buffer = |token| Desc::writable(DATA + token % 64 * 64, 64);
                    let burst = (first..first + u64::from(count)).map(|at| (buffer(at), at));
                    let count = driver.add_burst(burst).unwrap() as u64;
                    added.extend((first..first + count).map(|at| (at, vec![buffer(at)])));
                    token += count;
                }
                Step::Publish => {
                    driver.publish();
                    let fresh = !added.is_empty();
                    sent.append(&mut added);
                    let kick = driver.needs_kick();
                    prop_assert!(fresh || !kick);
                    if fresh && asleep {
                        prop_assert!(kick, "asleep, and not notified");
                        asleep = false;
                    }
                }
                Step::Take => {
                    asleep = false;
                    let chain = device.pop_descriptor_chain(&*memory);
                    prop_assert_eq!(chain.is_some(), !sent.is_empty());
                    if let Some(chain) = chain {
                        let (token, descs) = sent.pop_front().unwrap();
                        let head = chain.head_index();
                        let found: Vec<Desc> = chain
                            .map(|desc| Desc {
                                addr: desc.addr().0,
                                len: desc.len(),
                                write: desc.is_write_only(),
                            })
                            .collect();
                        prop_assert_eq!(&found, &descs);
                        let writable = descs.iter().filter(|desc| desc.write);
                        let room: u32 = writable.map(|desc| desc.len).sum();
                        taken.push((token, head, room));
                    }
                }
                Step::GiveBack(place) if !taken.is_empty() => {
                    let (token, head, len) = taken.swap_remove(place % taken.len());
                    device.add_used(&*memory, head, len).unwrap();
                    back.push_back(driver::Used { token, len });
                    let notified = device.needs_notification(&*memory).unwrap();
                    prop_assert!(notified || !waits, "it waits, and is not notified");
                    waits = false;
                }
                Step::GiveBack(_) => {}
                Step::PopAll => {
                    waits = false;
                    let mut out = [driver::Used::default(); 3];
                    loop {
                        let count = driver.pop_burst(&mut out).unwrap();
                        for used in &out[..count] {
                            prop_assert_eq!(Some(*used), back.pop_front());
                        }
                        if count == 0 {
                            break;
                        }
                    }
                    prop_assert!(back.is_empty());
                }
                Step::Sleep => {
                    let more = device.enable_notification(&*memory).unwrap();
                    prop_assert_eq!(more, !sent.is_empty());
                    asleep = !more;
                }
                Step::Wait => {
                    let more = driver.enable_notifications();
                    prop_assert_eq!(more, !back.is_empty());
                    waits = !more;
                }
            }
        }
    }
}
