//! What calls a worker from its rings: mail, or the end.
//!
//! The worker that clears `rung` (Acquire) sees the mail, and `stops`, for which it was set
//! (Release). Nothing else makes it look, so that all other accesses are relaxed: a flag that is seen
//! too early ends a sleep, and one that is seen too late does not prolong it, as the event that is
//! signalled after the flag was set ends it, and the thread that has drained it sees the flag.

use std::os::fd::OwnedFd;

use ringfence_sync::atomic::{AtomicBool, Ordering};

use crate::event;

/// Ends the sleep of a thread that waits for it, also one that begins later.
pub(crate) trait Wake {
    /// Wakes the thread, for what was written before.
    fn wake(&self);
}

impl Wake for OwnedFd {
    fn wake(&self) {
        event::signal(self);
    }
}

/// The bell of one worker.
pub(crate) struct Bell<W> {
    /// Set while mail or the end is waiting, so that a busy worker looks with one load.
    rung: AtomicBool,
    stops: AtomicBool,
    /// Ends the worker's sleep.
    pub(crate) wake: W,
}

impl<W: Wake> Bell<W> {
    /// The bell of a worker that has no mail.
    pub(crate) fn new(wake: W) -> Bell<W> {
        Bell { rung: AtomicBool::new(false), stops: AtomicBool::new(false), wake }
    }

    /// Calls the worker, for mail that was sent before.
    pub(crate) fn ring(&self) {
        // A swap, not a store: the worker that finds this ring has seen what came before the one that it
        // has not found, too (the release sequence goes on).
        self.rung.swap(true, Ordering::Release);
        self.wake.wake();
    }

    /// Calls the worker for the last time.
    pub(crate) fn stop(&self) {
        self.stops.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// Whether there is something for the worker, which then looks at all of it.
    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        // A load first: a swap would hold up all stores of the round before.
        self.is_rung() && self.rung.swap(false, Ordering::Acquire)
    }

    /// Whether the worker is to end; to be read where the bell has rung.
    pub(crate) fn stops(&self) -> bool {
        self.stops.load(Ordering::Relaxed)
    }

    /// Whether it has rung, before a sleep.
    #[inline]
    pub(crate) fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::sync::Arc;

    use loom::{sync::Notify, thread};
    use ringfence_sync::{
        atomic::AtomicUsize,
        model::{Memory, check},
    };

    use super::*;

    /// In a model an event is loom's: a signal is kept until the worker takes it.
    impl Wake for Notify {
        fn wake(&self) {
            self.notify();
        }
    }

    /// Two callers: each call finds the mail of those before it, though the worker finds one ring.
    #[test]
    fn a_worker_that_two_call_at_once_finds_the_mail_of_both() {
        check(Some(3), || {
            let bell = Arc::new(Bell::new(Notify::new()));
            let mail = Arc::new(AtomicUsize::new(0));
            let callers = [(); 2].map(|()| {
                let (bell, mail) = (Arc::clone(&bell), Arc::clone(&mail));
                thread::spawn(move || {
                    mail.fetch_add(1, Ordering::Relaxed);
                    bell.ring();
                })
            });
            let mut read = 0;
            while read < 2 {
                if bell.has_rung() {
                    read = mail.load(Ordering::Relaxed);
                } else if !bell.is_rung() {
                    bell.wake.wait();
                }
            }
            callers.into_iter().for_each(|caller| caller.join().unwrap());
        });
    }

    #[test]
    fn a_worker_that_is_called_wakes_and_finds_its_mail_and_its_end() {
        check(Some(4), || {
            let bell = Arc::new(Bell::new(Notify::new()));
            let mail = Arc::new(Memory::default());
            let (theirs, sent) = (Arc::clone(&bell), Arc::clone(&mail));
            let caller = thread::spawn(move || {
                sent.write();
                theirs.ring();
                theirs.stop();
            });
            let read = loop {
                if bell.has_rung() {
                    let read = mail.read();
                    if bell.stops() {
                        break read;
                    }
                }
                if !bell.is_rung() {
                    bell.wake.wait();
                }
            };
            assert_eq!(read, 1, "the end comes after the mail");
            caller.join().unwrap();
        });
    }
}
