//! Notifications: enabled, suppressed, and never lost.

use std::{
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    thread,
    time::Duration,
};

use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_virtq::{Chain, Desc, device, driver, layout, testing};

fn pair(size: u16, event_idx: bool, packed: bool) -> (testing::Ram, driver::Queue, device::Queue) {
    let config = driver::QueueConfig { size, event_idx, packed };
    let ram = testing::Ram::new(0, config.offsets().len);
    let (driver, device) = testing::pair_of(&ram, 0, config);
    (ram, driver, device)
}

#[test]
fn passing_an_event_is_what_counting_one_by_one_says() {
    for old in [0, 1, 0x7fff, 0x8000, 0xfff0, 0xfffe, 0xffff_u16] {
        for steps in [0, 1, 2, 31, 0x7fff, 0x8000, 0xffff_u16] {
            let new = old.wrapping_add(steps);
            for event in (0..=40).map(|n| old.wrapping_sub(4).wrapping_add(n)).chain([new, old]) {
                // The event means "notify me when entry `event` has been added".
                let passed = event.wrapping_sub(old) < steps;
                assert_eq!(layout::passed_event(event, new, old), passed, "{event} {new} {old}");
            }
        }
    }
}

#[test]
fn with_event_idx_each_end_is_notified_once_across_the_wrap_of_the_index() {
    for packed in [false, true] {
        let (ram, mut driver, mut device) = pair(4, true, packed);
        let mut chain = Chain::new();
        for token in 0..140_000 {
            // Both want a notification of the next one.
            assert!(!device.enable_kicks() && !driver.enable_notifications());
            driver.add(&[Desc::readable(0, 1)], token).unwrap();
            driver.publish();
            assert!(driver.needs_kick(), "at {token}");
            driver.add(&[Desc::readable(0, 1)], token).unwrap();
            driver.publish();
            assert!(!driver.needs_kick(), "kicks are not enabled again, at {token}");
            for first in [true, false] {
                assert!(device.pop(&ram, &mut chain).unwrap());
                device.push_used(chain.head(), 0);
                assert_eq!(device.publish_used(), first, "at {token}");
                assert!(driver.pop().unwrap().is_some());
            }
        }
    }
}

#[test]
fn a_batch_that_crosses_the_wrap_and_the_event_in_it_notifies() {
    for packed in [false, true] {
        let (ram, mut driver, mut device) = pair(8, true, packed);
        let mut chain = Chain::new();
        for round in 0..40_000 {
            assert!(!device.enable_kicks() && !driver.enable_notifications());
            for token in 0..5 {
                driver.add(&[Desc::readable(0, 1)], token).unwrap();
            }
            driver.publish();
            assert!(driver.needs_kick(), "round {round}");
            while device.pop(&ram, &mut chain).unwrap() {
                device.push_used(chain.head(), 0);
            }
            assert!(device.publish_used(), "round {round}");
            while driver.pop().unwrap().is_some() {}
        }
    }
}

#[test]
fn an_end_that_polls_is_notified_at_most_once_in_65536_chains() {
    for packed in [false, true] {
        for (event_idx, most) in [(true, 3), (false, 0)] {
            let (ram, mut driver, mut device) = pair(16, event_idx, packed);
            let mut chain = Chain::new();
            driver.suppress_notifications();
            device.suppress_kicks();
            let (mut kicks, mut interrupts) = (0, 0);
            for token in 0..3 * 65536 {
                driver.add(&[Desc::readable(0, 1)], token).unwrap();
                driver.publish();
                kicks += u32::from(driver.needs_kick());
                assert!(device.pop(&ram, &mut chain).unwrap());
                device.push_used(chain.head(), 0);
                interrupts += u32::from(device.publish_used());
                assert!(driver.pop().unwrap().is_some());
            }
            assert!(kicks <= most && interrupts <= most, "{kicks} {interrupts}");
        }
    }
}

#[test]
fn a_kick_is_sent_after_a_whole_lap_without_one() {
    for packed in [false, true] {
        let (ram, mut driver, mut device) = pair(16, true, packed);
        let mut chain = Chain::new();
        for token in 0..65_537 {
            assert!(!device.enable_kicks());
            driver.add(&[Desc::readable(0, 1)], token).unwrap();
            driver.publish();
            assert!(device.pop(&ram, &mut chain).unwrap());
            device.push_used(chain.head(), 0);
            let _ = device.publish_used();
            assert!(driver.pop().unwrap().is_some());
        }
        assert!(driver.needs_kick());
    }
}

#[test]
fn enabling_reports_what_came_meanwhile() {
    for packed in [false, true] {
        for event_idx in [true, false] {
            let (ram, mut driver, mut device) = pair(16, event_idx, packed);
            let mut chain = Chain::new();
            device.suppress_kicks();
            driver.suppress_notifications();
            driver.add(&[Desc::readable(0, 1)], 0).unwrap();
            assert!(!device.enable_kicks());
            device.suppress_kicks();
            driver.publish();
            assert!(!driver.needs_kick());
            assert!(device.enable_kicks());
            assert!(device.pop(&ram, &mut chain).unwrap());
            device.push_used(chain.head(), 0);
            assert!(!driver.enable_notifications());
            driver.suppress_notifications();
            assert!(!device.publish_used());
            assert!(driver.enable_notifications());
        }
    }
}

/// A doorbell: rung any number of times, it wakes once.
fn bell() -> (impl Fn() + Send, impl Fn() + Send) {
    let (ring, wait): (SyncSender<()>, Receiver<()>) = sync_channel(1);
    let ring = move || match ring.try_send(()) {
        Ok(()) | Err(TrySendError::Full(())) => {}
        // The other end has finished.
        Err(TrySendError::Disconnected(())) => {}
    };
    // Reached only if a wake-up is lost: load never delays one that long.
    let wait = move || wait.recv_timeout(Duration::from_secs(120)).expect("a lost wake-up");
    (ring, wait)
}

/// Two threads that sleep whenever they find nothing, and batches of varying length.
fn ping_pong(event_idx: bool, packed: bool, size: u16, requests: u64) {
    let (ram, mut driver, mut device) = pair(size, event_idx, packed);
    let (kick, wait_kick) = bell();
    let (interrupt, wait_interrupt) = bell();
    let seed = TestRunner::default().rng().next_u64();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut chain = Chain::new();
            let (mut done, mut random) = (0, !seed);
            while done < requests {
                device.suppress_kicks();
                while device.pop(&ram, &mut chain).unwrap() {
                    assert_eq!(chain.descs()[0].addr, done, "in order, none lost");
                    assert_eq!(chain.descs().len() as u64, 1 + done % 2);
                    device.push_used(chain.head(), chain.writable_len() as u32);
                    done += 1;
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                    if random >> 62 == 0 && device.publish_used() {
                        interrupt();
                    }
                }
                if device.publish_used() {
                    interrupt();
                }
                if done < requests && !device.enable_kicks() {
                    wait_kick();
                }
            }
        });
        let (mut sent, mut done, mut random) = (0, 0, seed);
        while done < requests {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            for _ in 0..=random >> 61 {
                let descs = [Desc::readable(sent, 1), Desc::writable(sent, 9)];
                let descs = &descs[..1 + sent as usize % 2];
                if sent < requests && driver.add(descs, sent).is_ok() {
                    sent += 1;
                }
            }
            driver.publish();
            if driver.needs_kick() {
                kick();
            }
            driver.suppress_notifications();
            while let Some(used) = driver.pop().unwrap() {
                assert_eq!((used.token, u64::from(used.len)), (done, done % 2 * 9));
                done += 1;
            }
            let stuck = sent == requests || driver.free_descs() < 2;
            if done < sent && stuck && !driver.enable_notifications() {
                wait_interrupt();
            }
        }
    });
}

#[test]
fn no_wake_up_is_lost_between_two_threads_with_event_idx() {
    ping_pong(true, false, 16, 40_000);
    ping_pong(true, false, 2, 10_000);
    ping_pong(true, true, 15, 40_000);
    ping_pong(true, true, 2, 10_000);
}

#[test]
fn no_wake_up_is_lost_between_two_threads_with_flags() {
    ping_pong(false, false, 16, 40_000);
    ping_pong(false, false, 2, 10_000);
    ping_pong(false, true, 15, 40_000);
    ping_pong(false, true, 2, 10_000);
}
