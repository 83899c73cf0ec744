//! The timer of the flush queues, and of the bounce pools.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    clock::Clock,
};
use rustix::io::Errno;

/// Not armed.
const NEVER: u64 = u64::MAX;

/// Expires once, some time after it was armed; a thread, if it has one, then calls back.
pub(crate) struct Timer {
    /// The thread's name.
    name: &'static str,
    state: Arc<State>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    /// When to expire, or [`NEVER`].
    due_ns: AtomicU64,
    /// Held by the thread from before it reads `due_ns` until it sleeps.
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Timer {
    /// A timer that the caller polls, or that is yet to be [`start`](Self::start)ed, with a thread of
    /// that name.
    pub(crate) fn named(name: &'static str) -> Timer {
        Timer {
            name,
            state: Arc::new(State {
                due_ns: AtomicU64::new(NEVER),
                stop: Mutex::new(false),
                changed: Condvar::new(),
            }),
            thread: Mutex::new(None),
        }
    }

    /// Starts a thread, unless there is one, that calls `expire` when the timer is due, with the
    /// delay in nanoseconds, until `owner` is gone or the timer is stopped.
    ///
    /// # Errors
    /// The system's, when it starts no thread.
    pub(crate) fn start<T: Send + Sync + 'static>(
        &self,
        clock: &Arc<dyn Clock>,
        owner: &Arc<T>,
        expire: fn(&T, u64),
    ) -> Result<(), Errno> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (state, clock) = (Arc::clone(&self.state), Arc::clone(clock));
            // A weak reference: the thread ends with the owner.
            let owner = Arc::downgrade(owner);
            let wait = move || {
                while let Some(late_ns) = state.wait(&*clock)
                    && let Some(owner) = owner.upgrade()
                {
                    // A domain or an allocator that panics has not flushed: the next time it is
                    // tried again.
                    let _ = catch_unwind(AssertUnwindSafe(move || expire(&owner, late_ns)));
                }
            };
            let started = thread::Builder::new().name(self.name.to_owned()).spawn(wait);
            // The system's error always has a number.
            *thread = Some(
                started.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?,
            );
        }
        Ok(())
    }

    /// Sets the timer to expire at `due_ns`, if it would not do so earlier.
    pub(crate) fn arm(&self, due_ns: u64) {
        self.state.due_ns.fetch_min(due_ns.min(NEVER - 1), Ordering::Relaxed);
        // A thread that has not read the new time sleeps by now.
        drop(self.state.stop.lock());
        self.state.changed.notify_one();
    }

    /// Whether it would expire after `due_ns`, or not at all.
    pub(crate) fn is_later_than(&self, due_ns: u64) -> bool {
        self.state.due_ns.load(Ordering::Relaxed) > due_ns
    }

    /// Unsets it if it was due at `latest_ns` or before. Of several threads that try, one succeeds.
    pub(crate) fn take_overdue(&self, latest_ns: u64) -> bool {
        let due = self.state.due_ns.load(Ordering::Relaxed);
        due <= latest_ns && due != NEVER && self.state.take(due)
    }

    /// Unsets it.
    pub(crate) fn disarm(&self) {
        self.state.due_ns.store(NEVER, Ordering::Relaxed);
    }

    /// When it expires.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        match self.state.due_ns.load(Ordering::Relaxed) {
            NEVER => None,
            due => Some(due),
        }
    }

    /// Stops the timer and waits for its thread, unless called on that thread (rule L30).
    pub(crate) fn stop(&mut self) {
        *self.state.stop.lock() = true;
        self.state.changed.notify_one();
        if let Some(thread) = self.thread.get_mut().take()
            && thread.thread().id() != thread::current().id()
        {
            // Our code on that thread does not panic; and if it did, there would be nothing left to
            // notify.
            let _ = thread.join();
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl State {
    /// Sleeps until the timer is due; returns how late that was, in nanoseconds. `None` if the
    /// timer was stopped instead.
    fn wait(&self, clock: &dyn Clock) -> Option<u64> {
        let mut stop = self.stop.lock();
        loop {
            if *stop {
                return None;
            }
            let due = self.due_ns.load(Ordering::Relaxed);
            if due == NEVER {
                self.changed.wait(&mut stop);
                continue;
            }
            let now = clock.now_ns();
            if now < due {
                self.changed.wait_for(&mut stop, Duration::from_nanos(due - now));
            } else if self.take(due) {
                return Some(now - due);
            }
        }
    }

    /// Unsets the timer if it is still due then. Of several threads that try, one succeeds.
    fn take(&self, due_ns: u64) -> bool {
        let relaxed = Ordering::Relaxed;
        self.due_ns.compare_exchange(due_ns, NEVER, relaxed, relaxed).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

    use ringfence_sync::clock::{ManualClock, MonotonicClock};

    use super::*;

    #[test]
    fn a_timer_expires_once_for_each_time_it_is_armed() {
        let (sender, receiver) = mpsc::channel();
        let (timer, clock) = (Timer::named("test"), Arc::new(MonotonicClock) as Arc<dyn Clock>);
        let sender = Arc::new(sender);
        timer.start(&clock, &sender, |sender, late| sender.send(late).unwrap()).unwrap();
        timer.start(&clock, &sender, |_, _| panic!("a second thread")).unwrap();
        for _ in 0..3 {
            let due = MonotonicClock.now_ns() + 1000;
            timer.arm(due);
            let late = receiver.recv().unwrap();
            assert!(due + late <= MonotonicClock.now_ns());
            assert_eq!(timer.due_ns(), None);
        }
        drop((timer, sender));
        assert!(receiver.recv().is_err(), "the thread has ended, and it called no more");
    }

    #[test]
    fn stopping_does_not_wait_for_the_timer_to_be_due() {
        // rule L30
        let timer = Timer::named("test");
        let clock = Arc::new(ManualClock::new(0)) as Arc<dyn Clock>;
        timer.start(&clock, &Arc::new(()), |_, _| panic!("never due")).unwrap();
        timer.arm(u64::MAX);
        assert_eq!(timer.due_ns(), Some(u64::MAX - 1));
        drop(timer);
    }

    #[test]
    fn a_timer_that_is_armed_again_keeps_the_earlier_time() {
        let timer = Timer::named("test");
        assert!(timer.is_later_than(u64::MAX - 1) && !timer.take_overdue(u64::MAX));
        for (due, expected) in [(50, 50), (70, 50), (30, 30)] {
            timer.arm(due);
            assert_eq!(timer.due_ns(), Some(expected));
        }
        assert!(timer.is_later_than(29) && !timer.is_later_than(30));
        assert!(!timer.take_overdue(29));
        assert!(timer.take_overdue(30));
        assert_eq!(timer.due_ns(), None);
        timer.arm(70);
        timer.disarm();
        assert_eq!(timer.due_ns(), None);
    }
}
