//! Event descriptors.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering, fence},
};

use rustix::event::{EventfdFlags, eventfd};

/// A new one: non-blocking, closed on exec.
///
/// # Errors
/// No descriptor is left.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes whoever waits for it. A full counter means that they were woken already.
pub fn signal(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Takes what was signalled.
pub fn drain(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}

/// An event by which other threads of this process wake one that sleeps, and which costs them
/// nothing while it is awake.
pub struct Doorbell {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl Doorbell {
    /// Of a thread that is awake.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Doorbell> {
        Ok(Doorbell { event: new()?, asleep: AtomicBool::new(false) })
    }

    /// The owner is about to sleep: to be called before it looks for the last time.
    pub fn arm(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        // Either the owner sees what is written before `ring`, or `ring` sees that it sleeps.
        fence(Ordering::SeqCst);
    }

    /// The owner is awake.
    pub fn disarm(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// There is something to look at, written before this call.
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            signal(&self.event);
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
