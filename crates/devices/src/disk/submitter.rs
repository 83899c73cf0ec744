//! A thread that hands requests to the kernel, for an image that may hang.
//!
//! `io_uring_enter` may block if a file system ignores the request not to, and what it does not
//! finish at once is done by a limited number of kernel threads that belong to the calling thread.
//! So an image that may hang has a submitting thread of its own: neither the worker nor another
//! image waits for it.
//!
//! Ordering: a request is in the ring before `queued` is set (Release), and the thread clears the flag
//! before it enters the ring (Acquire): it finds the request, or the flag is set again. Of those that set
//! it one alone finds it clear, and signals the event, which the thread reads first.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_run::event;
use rustix::io_uring::{IoringEnterFlags, io_uring_enter};

/// How long what the kernel cannot take now is left alone.
pub(super) const AGAIN: Duration = Duration::from_millis(1);

/// The thread of one image, from outside. It ends when this is dropped, and is not waited for: the kernel may
/// not let it go.
#[derive(Debug)]
pub(super) struct Submitter {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Blocking: only this process has it.
    bell: OwnedFd,
    over: AtomicBool,
    rings: Mutex<Vec<Weak<Pending>>>,
}

/// A ring that it submits requests of.
#[derive(Debug)]
pub(super) struct Pending {
    ring: OwnedFd,
    queued: AtomicBool,
    shared: Arc<Shared>,
}

impl Submitter {
    /// # Errors
    /// No thread or descriptor is left.
    pub(super) fn spawn() -> io::Result<Submitter> {
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (over, rings) = (AtomicBool::new(false), Mutex::default());
        let shared = Arc::new(Shared { bell, over, rings });
        let theirs = Arc::clone(&shared);
        thread::Builder::new().name("disk".into()).spawn(move || theirs.run())?;
        Ok(Submitter { shared })
    }

    /// Adds `ring`: [`Pending::hand_over`] submits what is queued in it from now on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn add(&self, ring: RawFd) -> io::Result<Arc<Pending>> {
        // SAFETY: the caller's ring is open now.
        let ring = unsafe { BorrowedFd::borrow_raw(ring) }.try_clone_to_owned()?;
        let (queued, shared) = (AtomicBool::new(false), Arc::clone(&self.shared));
        let pending = Arc::new(Pending { ring, queued, shared });
        let mut rings = self.shared.rings.lock();
        rings.retain(|ring| ring.strong_count() > 0);
        rings.push(Arc::downgrade(&pending));
        Ok(pending)
    }
}

impl Drop for Submitter {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        event::signal(&self.shared.bell);
    }
}

impl Pending {
    /// There is something in the ring.
    pub(super) fn hand_over(&self) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            event::signal(&self.shared.bell);
        }
    }
}

impl Shared {
    fn run(&self) {
        #[cfg(feature = "sandbox")]
        ringfence_sandbox::confine(ringfence_sandbox::Role::Disk);
        while !self.over.load(Ordering::Acquire) {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            let rings: Vec<Arc<Pending>> =
                self.rings.lock().iter().filter_map(Weak::upgrade).collect();
            for pending in rings {
                // Before the ring is entered: what is queued later sets the flag again.
                if pending.queued.swap(false, Ordering::AcqRel) {
                    enter(pending.ring.as_fd());
                }
            }
        }
    }
}

/// Hands over all that is queued. What cannot be now is tried again: what waits for it waits for the disk.
fn enter(ring: BorrowedFd<'_>) {
    loop {
        // SAFETY: the requests' memory stays valid by the contract of `FileIo::submit`, which queued them.
        let done = unsafe { io_uring_enter(ring, u32::MAX, 0, IoringEnterFlags::empty()) };
        match done {
            Ok(_) => return,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::BUSY) => thread::sleep(AGAIN),
            Err(error) => {
                let ring = ring.as_raw_fd();
                return tracing::error!("io_uring {ring} takes no requests: {error}");
            }
        }
    }
}
