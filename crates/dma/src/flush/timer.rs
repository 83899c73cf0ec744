//! The timer of the flush queues.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use ringfence_sync::clock::Clock;

/// Not armed.
const NEVER: u64 = u64::MAX;

/// Expires once, some time after it was armed; a thread, if it has one, then calls back.
pub(crate) struct Timer {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    /// When to expire, or [`NEVER`]. Changed under the lock, read without.
    due_ns: AtomicU64,
    stop: Mutex<bool>,
    changed: Condvar,
}

impl Timer {
    /// A timer that somebody polls.
    pub(crate) fn manual() -> Timer {
        Timer {
            state: Arc::new(State {
                due_ns: AtomicU64::new(NEVER),
                stop: Mutex::new(false),
                changed: Condvar::new(),
            }),
            thread: None,
        }
    }

    /// A timer with a thread that calls `expire` when it is due, until that returns false or the
    /// timer is stopped.
    pub(crate) fn spawn(
        clock: Arc<dyn Clock>,
        expire: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<Timer> {
        let mut timer = Timer::manual();
        let state = Arc::clone(&timer.state);
        let thread = thread::Builder::new()
            .name("ringfence-flush".to_owned())
            .spawn(move || while state.wait(&*clock) && expire() {})?;
        timer.thread = Some(thread);
        Ok(timer)
    }

    /// Sets the timer to expire at `due_ns`.
    pub(crate) fn arm(&self, due_ns: u64) {
        {
            let _stop = self.state.stop.lock();
            self.state.due_ns.store(due_ns.min(NEVER - 1), Ordering::Relaxed);
        }
        self.state.changed.notify_one();
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

    /// Stops the timer and waits for its thread, unless called by that (rule L30).
    pub(crate) fn stop(&mut self) {
        *self.state.stop.lock() = true;
        self.state.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // The thread runs nothing of ours that panics; and if it did, there is nothing left to
            // be told.
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
    /// Sleeps until the timer is due; false if it was stopped instead.
    fn wait(&self, clock: &dyn Clock) -> bool {
        let mut stop = self.stop.lock();
        loop {
            if *stop {
                return false;
            }
            let due = self.due_ns.load(Ordering::Relaxed);
            if due == NEVER {
                self.changed.wait(&mut stop);
                continue;
            }
            let now = clock.now_ns();
            if now >= due {
                self.due_ns.store(NEVER, Ordering::Relaxed);
                return true;
            }
            self.changed.wait_for(&mut stop, Duration::from_nanos(due - now));
        }
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
        let timer =
            Timer::spawn(Arc::new(MonotonicClock), move || sender.send(()).is_ok()).unwrap();
        for _ in 0..3 {
            timer.arm(MonotonicClock.now_ns() + 1000);
            receiver.recv().unwrap();
            assert_eq!(timer.due_ns(), None);
        }
        drop(timer);
        assert!(receiver.recv().is_err(), "the thread has ended, and it called no more");
    }

    #[test]
    fn stopping_does_not_wait_for_the_timer_to_be_due() {
        // rule L30
        let timer = Timer::spawn(Arc::new(ManualClock::new(0)), || panic!("never due")).unwrap();
        timer.arm(u64::MAX);
        assert_eq!(timer.due_ns(), Some(u64::MAX - 1));
        drop(timer);
    }
}
