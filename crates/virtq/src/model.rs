//! Both ends of a queue under the model checker: no wake-up is lost, and what one end has written
//! before it publishes a chain the other sees when it has taken it. The rings lie in memory as always;
//! the checker tracks their fields (`AtomicU16::from_ptr`), and the buffers are cells that it watches.

use std::{sync::Arc, vec::Vec};

use loom::thread;
use ringfence_sync::model::{Memory, check};

use crate::{
    Chain, Desc,
    device::{self, Glimpse},
    driver::{self, QueueConfig},
    testing::{Ram, pair_of},
};

/// How many chains the one end publishes.
const COUNT: usize = 2;
/// The ring has one more place, so that it begins anew at another place each lap; a split one has
/// to have a power of two.
const SIZE: [u16; 2] = [4, 3];
/// Where the buffers are, for the device.
const BUFFERS: u64 = 0x10_0000;

/// What the chains lead to.
type Buffers = [Memory; COUNT];

fn desc(n: usize) -> Desc {
    Desc { addr: BUFFERS + n as u64, len: 1, write: true }
}

/// A queue of which `laps` chains, at least as many as it has places, have gone through, one at a time: loom
/// makes an atomic in memory at its first use, which must come before the other thread's.
fn queue(config: QueueConfig, laps: usize) -> (Ram, driver::Queue, device::Queue) {
    let ram = Ram::new(0, 4096);
    let (mut driver, mut device) = pair_of(&ram, 0, config);
    for _ in 0..laps {
        driver.add(&[desc(COUNT)], 0).unwrap();
        driver.publish();
        let _ = (driver.needs_kick(), device.enable_kicks());
        let head = take(&mut device, &ram).expect("it was published").0;
        give(&mut device, head);
        let _ = (device.publish_used(), driver.enable_notifications());
        assert!(driver.pop().unwrap().is_some());
    }
    (ram, driver, device)
}

/// The next chain's head, and the number of its buffer.
fn take(device: &mut device::Queue, ram: &Ram) -> Option<(u16, usize)> {
    let mut chain = Chain::default();
    let some = device.pop(ram, &mut chain).unwrap();
    some.then(|| (chain.head(), (chain.descs()[0].addr - BUFFERS) as usize))
}

fn give(device: &mut device::Queue, head: u16) {
    device.push_used(head, 1);
}

/// Publishes in batches; returns how many were published when the other end was last notified.
fn publish(
    batches: &[usize],
    mut one: impl FnMut(usize),
    mut batch: impl FnMut() -> bool,
) -> usize {
    let (mut next, mut notified) = (0, 0);
    for count in batches {
        (next..next + count).for_each(&mut one);
        next += count;
        if batch() {
            notified = next;
        }
    }
    notified
}

/// Takes `already` of what the other end publishes and wants to sleep; returns how many it has taken if it
/// sleeps.
fn sleep(already: usize, mut take: impl FnMut() -> bool, enable: impl FnOnce() -> bool) -> bool {
    for _ in 0..already {
        while !take() {
            thread::yield_now();
        }
    }
    !enable()
}

/// The driver makes chains available, the device sleeps.
fn kicks(config: QueueConfig, laps: usize, batches: &'static [usize], already: usize) {
    check(None, move || {
        let (ram, driver, mut device) = queue(config, laps);
        let buffers = Arc::new(Buffers::default());
        device.suppress_kicks();
        let theirs = Arc::clone(&buffers);
        let thread = thread::spawn(move || {
            let driver = std::cell::RefCell::new(driver);
            let add = |n: usize| {
                theirs[n].write();
                driver.borrow_mut().add(&[desc(n)], n as u64).unwrap();
            };
            publish(batches, add, || {
                driver.borrow_mut().publish();
                driver.borrow_mut().needs_kick()
            })
        });
        let device = std::cell::RefCell::new(device);
        let mut taken = 0;
        let mut next = || {
            let mut device = device.borrow_mut();
            device.peek_from(&ram, 0, 4, |seen| {
                let Glimpse::Buffer(seen) = seen else { panic!("a table, of none") };
                assert!(
                    (BUFFERS..BUFFERS + COUNT as u64).contains(&seen.addr),
                    "a peek at what is not there"
                );
            });
            let chain = take(&mut device, &ram);
            if let Some((_, n)) = chain {
                assert_eq!((n, buffers[n].read()), (taken, 1));
                taken += 1;
            }
            chain.is_some()
        };
        let sleeps = sleep(already, &mut next, || device.borrow_mut().enable_kicks());
        assert!(sleeps || next(), "awake for nothing");
        let kicked = thread.join().unwrap();
        assert!(!sleeps || already == COUNT || kicked > already, "asleep, and not kicked");
    });
}

/// The device gives chains back, the driver sleeps.
fn notifications(config: QueueConfig, laps: usize, batches: &'static [usize], already: usize) {
    check(None, move || {
        let (ram, mut driver, mut device) = queue(config, laps);
        let buffers = Arc::new(Buffers::default());
        for n in 0..COUNT {
            driver.add(&[desc(n)], n as u64).unwrap();
        }
        driver.publish();
        driver.suppress_notifications();
        let theirs = Arc::clone(&buffers);
        let chains: Vec<_> = (0..COUNT).map(|_| take(&mut device, &ram).unwrap()).collect();
        let thread = thread::spawn(move || {
            let device = std::cell::RefCell::new(device);
            let put = |n: usize| {
                theirs[chains[n].1].write();
                give(&mut device.borrow_mut(), chains[n].0);
            };
            publish(batches, put, || device.borrow_mut().publish_used())
        });
        let driver = std::cell::RefCell::new(driver);
        let next = || {
            let used = driver.borrow_mut().pop().unwrap();
            if let Some(used) = used {
                // It was the device's, and is the driver's own again.
                buffers[used.token as usize].write();
                assert_eq!(buffers[used.token as usize].read(), 2);
            }
            used.is_some()
        };
        let sleeps = sleep(already, next, || driver.borrow_mut().enable_notifications());
        assert!(sleeps || next(), "awake for nothing");
        let notified = thread.join().unwrap();
        assert!(!sleeps || already == COUNT || notified > already, "asleep, and not notified");
    });
}

/// Every way to publish two chains and to have taken some of them, from several places of the ring.
fn all(packed: bool, event_idx: bool, model: fn(QueueConfig, usize, &'static [usize], usize)) {
    let config = QueueConfig { size: SIZE[usize::from(packed)], event_idx, packed };
    for laps in config.size as usize..config.size as usize + 3 {
        for already in 0..=COUNT {
            for batches in [&[1, 1][..], &[2]] {
                model(config, laps, batches, already);
            }
        }
    }
}

#[test]
fn a_device_that_sleeps_is_kicked_by_event() {
    all(false, true, kicks);
}

#[test]
fn a_device_that_sleeps_is_kicked_by_flag() {
    all(false, false, kicks);
}

#[test]
fn a_driver_that_sleeps_is_notified_by_event() {
    all(false, true, notifications);
}

#[test]
fn a_driver_that_sleeps_is_notified_by_flag() {
    all(false, false, notifications);
}

#[test]
fn a_device_that_sleeps_is_kicked_by_event_of_a_packed_ring() {
    all(true, true, kicks);
}

#[test]
fn a_device_that_sleeps_is_kicked_by_flag_of_a_packed_ring() {
    all(true, false, kicks);
}

#[test]
fn a_driver_that_sleeps_is_notified_by_event_of_a_packed_ring() {
    all(true, true, notifications);
}

#[test]
fn a_driver_that_sleeps_is_notified_by_flag_of_a_packed_ring() {
    all(true, false, notifications);
}
