//! When a queue has something to do, and what wakes its worker before.

use super::RequestQueue;
use crate::{Bus, requests::Serve};

impl<S: Serve> RequestQueue<S> {
    /// When there is something to do by the clock, if there will be.
    pub fn next_due(&self) -> Option<u64> {
        if let Some(away) = self.away {
            // Nobody tells when it is mapped again, and the driver may think us awake.
            return Some(away.retry_at);
        }
        let parked = self.waits().then(|| self.parked.due());
        parked.into_iter().chain(self.serve.next_due()).min()
    }

    /// Asks for kicks before a sleep; true if there is something to do already.
    pub fn arm(&mut self, bus: &Bus) -> bool {
        match self.away {
            Some(away) => bus.answers() != away.answers,
            None if self.ring.is_valid() && self.ring.broken().is_none() => {
                // What cannot be taken yet is no news. What it needs is asked for.
                let takes = self.head.is_none() && !self.is_stalled() && !self.is_full();
                let more = self.ring.enable_kicks() && takes;
                self.look_behind(bus);
                self.log.mark(&mut self.ring);
                more || self.waits() && self.parked.has_answers(bus.answers())
            }
            None => false,
        }
    }

    /// Asks for no kicks while the worker is awake.
    pub fn disarm(&mut self) {
        if self.ring.is_valid() && self.ring.broken().is_none() {
            self.ring.suppress_kicks();
            self.log.mark(&mut self.ring);
        }
    }
}
