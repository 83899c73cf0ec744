//! Event descriptors of this process. A peer's are [`crate::notifier`]'s.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use ringfence_sync::atomic::{AtomicBool, Ordering, fence};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::ReadWriteFlags,
};

/// A new eventfd: non-blocking, closed on exec.
///
/// # Errors
/// No descriptor is left.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the threads that wait for it. A full counter means that they were woken already.
pub fn signal(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Resets the counter. Does not block, even where a peer that shares the description has made it
/// blocking and has taken the count first.
pub fn drain(event: impl AsFd) {
    let mut count = [0; 8];
    let mut into = [IoSliceMut::new(&mut count)];
    // The offset for files that have none.
    let _ = rustix::io::preadv2(event, &mut into, u64::MAX, ReadWriteFlags::NOWAIT);
}

/// An event by which other threads of this process wake a thread that sleeps, without a system call
/// while it is awake.
pub struct Doorbell {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl Doorbell {
    /// The doorbell of a thread that is awake.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Doorbell> {
        Ok(Doorbell { event: new()?, asleep: AtomicBool::new(false) })
    }

    /// The owner is about to sleep. It calls this before it looks for work one last time.
    pub fn arm(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        // Either the owner sees what is written before `ring`, or `ring` sees that it sleeps.
        fence(Ordering::SeqCst);
    }

    /// The owner is awake.
    pub fn disarm(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Wakes the owner, if it sleeps, for what was written before this call.
    pub fn ring(&self) {
        if self.is_wanted() {
            signal(&self.event);
        }
    }

    /// Whether the owner sleeps, or is about to, and has not seen what was written before this
    /// call.
    fn is_wanted(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed)
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Doorbells that one thread rings a little late, all at once: a thread that signals many small
/// things one after the other wakes each owner once for all of them.
///
/// Only what is rung between [`hold`](Self::hold) and [`pass`](Self::pass) is late, and a thread
/// that has called these calls [`release`](Self::release) before it waits for anything. An owner
/// that is awake sees everything at once.
#[derive(Default)]
pub struct Bells {
    held: Mutex<LateBells>,
}

#[derive(Default)]
struct LateBells {
    holds: bool,
    late: Vec<Arc<Doorbell>>,
    /// When the first of `late` was rung.
    since: Option<Instant>,
}

/// The longest that a bell is late while more comes.
const LATE: Duration = Duration::from_micros(500);

impl Bells {
    /// As [`Doorbell::ring`], late if bells are held.
    pub fn ring(&self, bell: &Arc<Doorbell>) {
        if !bell.is_wanted() {
            return;
        }
        let mut held = self.held.lock();
        if !held.holds {
            drop(held);
            return bell.ring();
        }
        held.since.get_or_insert_with(Instant::now);
        if !held.late.iter().any(|late| Arc::ptr_eq(late, bell)) {
            held.late.push(Arc::clone(bell));
        }
    }

    /// Rings are late from now on.
    pub fn hold(&self) {
        self.held.lock().holds = true;
    }

    /// Bells ring at once again. Late ones ring now if the first has waited for half a millisecond.
    pub fn pass(&self) {
        self.pass_after(LATE);
    }

    fn pass_after(&self, late: Duration) {
        let mut held = self.held.lock();
        held.holds = false;
        let long = held.since.is_some_and(|since| since.elapsed() >= late);
        drop(held);
        if long {
            self.release();
        }
    }

    /// Rings the late bells.
    pub fn release(&self) {
        let mut held = self.held.lock();
        held.since = None;
        held.late.drain(..).for_each(|bell| bell.ring());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// Whether the owner of a bell would wake now.
    fn rung(bell: &Doorbell) -> bool {
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        let rung = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1;
        drain(bell);
        rung
    }

    #[test]
    fn bells_that_are_held_are_rung_once_and_none_is_lost() {
        let (bells, bell) = (Bells::default(), Arc::new(Doorbell::new().unwrap()));
        bells.ring(&bell);
        assert!(!rung(&bell), "its owner is awake");
        bell.arm();
        bells.ring(&bell);
        assert!(rung(&bell), "nothing is held");
        bells.hold();
        bells.ring(&bell);
        bells.ring(&bell);
        assert!(!rung(&bell));
        bells.pass_after(Duration::MAX);
        // Another bell that is rung meanwhile is not late.
        let other = Arc::new(Doorbell::new().unwrap());
        other.arm();
        bells.ring(&other);
        assert!(rung(&other) && !rung(&bell));
        bells.release();
        assert!(rung(&bell) && !rung(&other));
        bells.release();
        assert!(!rung(&bell));
        // The owner woke by itself: no ring is needed.
        bells.hold();
        bells.ring(&bell);
        bell.disarm();
        bells.pass();
        bells.release();
        assert!(!rung(&bell));
    }

    #[test]
    fn bells_are_not_held_for_long_while_more_comes() {
        let (bells, bell) = (Bells::default(), Arc::new(Doorbell::new().unwrap()));
        bell.arm();
        bells.hold();
        bells.ring(&bell);
        std::thread::sleep(LATE);
        bells.ring(&bell);
        bells.pass();
        assert!(rung(&bell));
        // The next wait begins anew.
        bells.hold();
        bells.ring(&bell);
        bells.release();
        assert!(rung(&bell));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::thread;
    use ringfence_sync::{atomic::AtomicUsize, model::check};

    use super::*;

    #[test]
    fn an_owner_that_sleeps_is_woken_for_what_it_has_not_seen() {
        check(None, || {
            let bell = Arc::new(Doorbell::new().unwrap());
            let work = Arc::new(AtomicUsize::new(0));
            let (theirs, written) = (Arc::clone(&bell), Arc::clone(&work));
            let other = thread::spawn(move || {
                [1, 2].map(|n| {
                    written.store(n, Ordering::Relaxed);
                    theirs.is_wanted()
                })
            });
            bell.arm();
            let seen = work.load(Ordering::Relaxed);
            let rung = other.join().unwrap();
            assert!(rung[seen..].iter().all(|rung| *rung), "{seen} seen, rung for {rung:?}");
        });
    }
}
