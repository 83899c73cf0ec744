//! What requests under way hold, and whether there is room for more.
//!
//! At a bound nothing fails: the ring is not read further, and what is not taken from it costs nothing. The ring is read
//! on when requests have ended. No request needs one behind it to end: it ends when the disk answers, or when a
//! translation comes or is waited for no longer.

use ringfence_virtq::Chain;

use super::{RequestQueue, Slot, State};
use crate::{Bus, requests::Serve};

/// For how many descriptors of a request, and as many pieces of memory, a place keeps its memory when the request
/// is over: what reads and writes of 128 KiB mostly have, and some.
pub const KEPT: usize = 64;
/// The most descriptors that the requests under way which have more than that have together, and the most pieces of memory.
/// A ring that has as many is not read further; a request takes no more than 2048 beyond it.
pub const MOST_HELD: usize = 1 << 15;

impl<R: Default> Slot<R> {
    /// It is over. Of `held` descriptors, its own are not held any more if they counted.
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

    /// A request was taken: its descriptors count, if they are many. False if no more are to be taken now.
    pub(super) fn hold(&mut self, at: u16) -> bool {
        let descs = self.slots[usize::from(at)].chain.descs().len();
        if descs <= KEPT {
            return true;
        }
        self.held += descs;
        self.stats.full += u64::from(self.is_full());
        !self.is_full()
    }

    /// Whether what is under way takes as much memory as it may: the ring is read further when some of it has ended.
    pub(super) fn is_full(&self) -> bool {
        self.held >= MOST_HELD
    }

    /// Whether there is something to do before another request is taken.
    pub(super) fn is_occupied(&self) -> bool {
        self.is_stalled() || self.is_spent()
    }

    /// A request goes on when what serves it has room.
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
                // It comes first still.
                self.stalled.rotate_right(1);
                return;
            }
        }
    }

    /// Whether the last round has ended since it had moved enough, so that there may be more to do.
    pub fn is_spent(&self) -> bool {
        self.serve.is_spent()
    }
}
