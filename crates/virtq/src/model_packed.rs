//! As `model`, for packed rings: the first descriptor of a batch takes the place of the index.
//!
//! Besides wake-ups it checks that a batch becomes visible at once. Its other descriptors are
//! stored before the first, unordered among themselves; an end that has seen the first finds them
//! all.

use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering, fence},
    },
    thread,
};

use crate::packed::{EventWord, RingPos};

/// How many descriptors the ring has.
const SIZE: u16 = 3;
/// How many the one end publishes.
const COUNT: usize = 2;

struct Descriptor {
    /// The word that shows that it is there.
    state: AtomicBool,
    /// Its address, and the content of its buffer.
    content: AtomicBool,
}

struct Shared {
    ring: [Descriptor; COUNT],
    event: AtomicU32,
}

/// Runs every interleaving of an end that publishes two descriptors from `start` on, in such
/// batches, and one that goes to sleep after it has taken `already` of them, and checks that the
/// latter is notified or sees for itself.
fn check(event_idx: bool, start: RingPos, batches: &'static [usize], already: usize) {
    loom::model(move || {
        let descriptor =
            || Descriptor { state: AtomicBool::new(false), content: AtomicBool::new(false) };
        let shared = Arc::new(Shared {
            ring: std::array::from_fn(|_| descriptor()),
            event: AtomicU32::new(EventWord::NONE.0),
        });
        let notifier = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (mut notified, mut next) = (None, 0);
                for &batch in batches {
                    let (first, end) = (next, next + batch);
                    shared.ring[first].content.store(true, Ordering::Relaxed);
                    for descriptor in &shared.ring[first + 1..end] {
                        descriptor.content.store(true, Ordering::Relaxed);
                        descriptor.state.store(true, Ordering::Relaxed);
                    }
                    shared.ring[first].state.store(true, Ordering::Release);
                    next = end;
                    fence(Ordering::SeqCst);
                    let wanted = EventWord(shared.event.load(Ordering::Relaxed));
                    let now = start.forward(next as u16, SIZE);
                    if wanted.is_due(now, batch as u64, SIZE, event_idx) {
                        notified = Some(next);
                    }
                }
                notified
            })
        };
        for descriptor in &shared.ring[..already] {
            while !descriptor.state.load(Ordering::Acquire) {
                thread::yield_now();
            }
            assert!(descriptor.content.load(Ordering::Relaxed), "there, without its content");
        }
        let next = start.forward(already as u16, SIZE);
        let wanted = if event_idx { EventWord::at(next) } else { EventWord::ALL };
        shared.event.store(wanted.0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let sleeps =
            shared.ring.get(already).is_none_or(|next| !next.state.load(Ordering::Relaxed));
        if !sleeps {
            // What `pop` does then.
            assert!(shared.ring[already].state.load(Ordering::Acquire));
            assert!(shared.ring[already].content.load(Ordering::Relaxed));
        }
        let notified = notifier.join().unwrap();
        if sleeps && already < COUNT {
            assert!(notified.is_some_and(|up_to| up_to > already), "asleep, and not notified");
        }
    });
}

/// Both ways to publish, from every place of the ring.
fn check_all(event_idx: bool) {
    for wrap in [true, false] {
        for at in 0..SIZE {
            for already in 0..=COUNT {
                check(event_idx, RingPos { at, wrap }, &[1, 1], already);
                check(event_idx, RingPos { at, wrap }, &[2], already);
            }
        }
    }
}

#[test]
fn model_no_wake_up_is_lost_on_a_packed_ring_with_event_idx() {
    check_all(true);
}

#[test]
fn model_no_wake_up_is_lost_on_a_packed_ring_with_flags() {
    check_all(false);
}
