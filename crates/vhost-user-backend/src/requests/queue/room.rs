//! What requests in progress hold, and whether there is room for more.
//!
//! At a limit nothing fails: the ring is not read further, and chains that stay in it cost nothing.
//! Reading goes on when requests have ended. No request needs one behind it to end: it ends when
//! the disk completes it, or when a translation comes or times out.

use ringfence_virtq::Chain;

use super::{RequestQueue, Slot, State};
use crate::{Bus, requests::Serve};

/// For how many descriptors of a request, and as many pieces of memory, a slot keeps its
/// allocations when the request is over: a little more than most reads and writes of 128 KiB have.
pub const KEPT: usize = 64;
/// The most descriptors, and pieces of memory, that all requests in progress with more than that
/// have together. A ring at this limit is not read further; one request exceeds it by no more than
/// 2048.
pub const MOST_HELD: usize = 1 << 15;

impl<R: Default> Slot<R> {
    /// Ends the request. Its descriptors no longer count in `held`, if they did.
    pub(super) fn end(&mut self, held: &mut usize) {
        (self.state, self.wait) = (State::Free, None);
        let descs = self.chain.descs().len();
        if descs > KEPT {
            *held -= descs;
            (self.chain, self.request) = (Chain::default(), R::default());
        }
    }
}

impl<S: Serve> RequestQueue<S> {
    /// Whether requests wait for room.
    pub(super) fn is_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Counts the descriptors of a request that was taken, if they are many. False if no more are
    /// to be taken now.
    pub(super) fn hold(&mut self, at: u16) -> bool {
        let descs = self.slots[usize::from(at)].chain.descs().len();
        if descs <= KEPT {
            return true;
        }
        self.held += descs;
        self.stats.full += u64::from(self.is_full());
        !self.is_full()
    }

    /// Whether requests in progress take as much memory as they may: the ring is read further when
    /// some have ended.
    pub(super) fn is_full(&self) -> bool {
        self.held >= MOST_HELD
    }

    /// Whether there is something to do before another request is taken.
    pub(super) fn is_occupied(&self) -> bool {
        self.is_stalled() || self.is_spent()
    }

    /// Queues a request until its [`Serve`] has room.
    pub(super) fn stall(&mut self, at: u16) {
        self.stalled.push_back(at);
    }

    /// Goes on with requests that found no room, as far as there is some now.
    pub(super) fn advance_stalled(&mut self, bus: &Bus) {
        while !self.is_spent()
            && let Some(at) = self.stalled.pop_front()
        {
            let others = self.stalled.len();
            self.advance(at, bus);
            if self.stalled.len() > others {
                // It stays first.
                self.stalled.rotate_right(1);
                return;
            }
        }
    }

    /// Whether the last round ended because it had moved enough, so that there may be more to do.
    pub fn is_spent(&self) -> bool {
        self.serve.is_spent()
    }
}
