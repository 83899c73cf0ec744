//! Why no wake-up is lost, checked in every interleaving: what one end executes when it publishes
//! something, and what the other executes before it sleeps.
//!
//! The fields of a real ring lie in shared memory, where loom cannot track them; these are the same
//! stores, fences and loads in the same order, on fields that it can track. Driver and device
//! mirror each other (`needs_kick` and `enable_kicks`, `publish_used` and `enable_notifications`),
//! so that one model covers both.

use loom::{
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering, fence},
    },
    thread,
};

use crate::layout;

/// The shared fields: the index of the one end, and the notification that the other wants.
struct Shared {
    idx: AtomicU16,
    /// The event, or the flags.
    wanted: AtomicU16,
    /// An entry of the ring, to check that the index publishes it.
    entry: AtomicU16,
}

const SUPPRESSED: u16 = 1;

/// Runs every interleaving of an end that publishes `start + 1` and `start + 2` and one that goes
/// to sleep after `start + already`, and checks that the latter is notified or sees for itself.
fn check(event_idx: bool, start: u16, already: u16) {
    loom::model(move || {
        let wanted = if event_idx { start ^ 0x8000 } else { SUPPRESSED };
        let shared = Arc::new(Shared {
            idx: AtomicU16::new(start),
            wanted: AtomicU16::new(wanted),
            entry: AtomicU16::new(0),
        });
        let notifier = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut notified = None;
                for step in 1..=2 {
                    let (old, new) = (start.wrapping_add(step - 1), start.wrapping_add(step));
                    shared.entry.store(step, Ordering::Relaxed);
                    shared.idx.store(new, Ordering::Release);
                    fence(Ordering::SeqCst);
                    let wanted = shared.wanted.load(Ordering::Relaxed);
                    let notify = match event_idx {
                        true => layout::passed_event(wanted, new, old),
                        false => wanted & SUPPRESSED == 0,
                    };
                    notified = if notify { Some(step) } else { notified };
                }
                notified
            })
        };
        // It has taken `already` chains, since it saw the index reach that; now it wants to sleep.
        while shared.idx.load(Ordering::Acquire).wrapping_sub(start) < already {
            thread::yield_now();
        }
        let next = start.wrapping_add(already);
        shared.wanted.store(if event_idx { next } else { 0 }, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = shared.idx.load(Ordering::Acquire);
        let sleeps = seen == next;
        if !sleeps {
            let step = seen.wrapping_sub(start);
            assert!(shared.entry.load(Ordering::Relaxed) >= step, "an index without its entry");
        }
        let notified = notifier.join().unwrap();
        if sleeps && already < 2 {
            assert!(notified.is_some_and(|step| step > already), "asleep, and not notified");
        }
    });
}

#[test]
fn model_no_wake_up_is_lost_with_event_idx() {
    for start in [0, 0xfffe, 0xffff] {
        for already in 0..=2 {
            check(true, start, already);
        }
    }
}

#[test]
fn model_no_wake_up_is_lost_with_flags() {
    for already in 0..=2 {
        check(false, 0, already);
    }
}
