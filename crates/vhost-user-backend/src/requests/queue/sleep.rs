//! When a queue has something to do, and what wakes its worker before then.

use super::RequestQueue;
use crate::{Bus, requests::Serve};

impl<S: Serve> RequestQueue<S> {
    /// When the clock next gives the queue something to do, if it does.
    pub fn next_due(&self) -> Option<u64> {
        if let Some(away) = self.away {
            // No event signals that it is mapped again, and the driver may omit kicks.
            return Some(away.retry_at);
        }
        let parked = self.waits().then(|| self.parked.due());
        parked.into_iter().chain(self.serve.next_due()).min()
    }

    /// Enables kicks before a sleep; true if there is something to do already.
    pub fn arm(&mut self, bus: &Bus) -> bool {
        match self.away {
            Some(away) => bus.updates() != away.updates,
            None if self.ring.is_valid() && self.ring.broken().is_none() => {
                // A chain that cannot be taken yet is not new. Misses for what it needs were sent.
                let takes = self.head.is_none() && !self.is_stalled() && !self.is_full();
                let more = self.ring.enable_kicks() && takes;
                self.look_behind(bus);
                self.log.mark(&mut self.ring);
                more || self.waits() && self.parked.has_updates(bus.updates())
            }
            None => false,
        }
    }

    /// Disables kicks while the worker is awake.
    pub fn disarm(&mut self) {
        if self.ring.is_valid() && self.ring.broken().is_none() {
            self.ring.suppress_kicks();
            self.log.mark(&mut self.ring);
        }
    }
}
