//! Looks after queues that have stopped while the kernel still had requests of theirs.

use ringfence_run::worker::Unit;
use std::{os::fd::BorrowedFd, sync::Arc};

use super::{RequestFigures, Serve};

/// How often to check whether the kernel is done with them: no worker is woken when it is, as the
/// event that it writes to was the queue's.
const EVERY_NS: u64 = 5_000_000;

/// Drops what stopped queues kept, once the kernel is done with it: memory, and leases that unmaps
/// wait for. On its own, it is the unit that a device leaves on its workers when a connection is
/// over.
pub struct Reaper<S: Serve> {
    figures: Arc<RequestFigures<S>>,
    due_ns: u64,
}

impl<S: Serve> Reaper<S> {
    /// For the queues of these figures.
    pub fn new(figures: &Arc<RequestFigures<S>>) -> Reaper<S> {
        Reaper { figures: Arc::clone(figures), due_ns: 0 }
    }

    /// When it checks again, if it has to.
    pub(super) fn due(&self) -> u64 {
        self.due_ns
    }
}

impl<S: Serve> Unit for Reaper<S> {
    #[inline]
    fn poll(&mut self, now_ns: u64) -> bool {
        if self.figures.stuck() == 0 {
            return false;
        }
        self.due_ns = now_ns.saturating_add(EVERY_NS);
        self.figures.reap()
    }

    fn next_due(&self) -> Option<u64> {
        (self.figures.stuck() > 0).then_some(self.due_ns)
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn disarm(&mut self) {}

    fn wakers<'a>(&'a self, _: &mut Vec<BorrowedFd<'a>>) {}
}
