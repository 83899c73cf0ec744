//! How far the device has come, and whether a thread sleeps until it has come further.
//!
//! No wake-up is lost: a follower counts itself and *then* looks at the number; a thread that
//! advances the number *then* looks whether there are followers. A fence stands between the two
//! steps of each. Of two such fences one comes first in their single order, so that the other's
//! thread sees what was written before it. (Nothing weaker forbids that both look too early.)

use ringfence_sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// The device has completed all requests up to a number.
#[derive(Default)]
pub(super) struct Retired {
    number: AtomicU64,
    followers: AtomicUsize,
}

impl Retired {
    /// The number of the last request up to which all are completed.
    #[inline]
    pub(super) fn get(&self) -> u64 {
        // Acquire: a thread that sees that a request is completed sees what the thread that took
        // its reply out of the ring has seen, the device's writes included.
        self.number.load(Ordering::Acquire)
    }

    /// Advances the number, under the ring's lock. True: a follower must be woken.
    #[inline]
    #[must_use]
    pub(super) fn advance(&self, to: u64) -> bool {
        self.number.store(to, Ordering::Release);
        fence(Ordering::SeqCst);
        self.followers.load(Ordering::Relaxed) > 0
    }

    /// Counts this thread among the followers while it calls `sleep`, which it does if the number is
    /// less than `target`.
    pub(super) fn follow(&self, target: u64, sleep: impl FnOnce()) {
        self.followers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.get() < target {
            sleep();
        }
        self.followers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::sync::Arc;

    use loom::thread;
    use ringfence_sync::model::check;

    use super::*;

    #[test]
    fn a_follower_that_sleeps_is_woken_and_sees_the_reply() {
        check(None, || {
            let retired = Arc::new((Retired::default(), AtomicU64::new(0)));
            let theirs = Arc::clone(&retired);
            let other = thread::spawn(move || {
                let (retired, reply) = &*theirs;
                reply.store(7, Ordering::Relaxed);
                retired.advance(1)
            });
            let (retired, reply) = &*retired;
            let mut other = Some(other);
            retired.follow(1, || {
                let woken = other.take().expect("called once").join().unwrap();
                assert!(woken, "asleep, and not woken");
            });
            if retired.get() >= 1 {
                assert_eq!(reply.load(Ordering::Relaxed), 7);
            }
            other.into_iter().for_each(|other| _ = other.join().unwrap());
        });
    }
}
