//! A ring whose addresses lead nowhere now.

use super::RequestQueue;
use crate::{
    Bus,
    requests::{QueueError, Serve},
};
use ringfence_virtq::{RingError, device};

/// How long a ring that is not mapped is left alone before it is looked for again: at first, and at
/// most.
const AWAY_NS: (u64, u64) = (500_000, 16_000_000);

/// A ring whose addresses lead nowhere now.
#[derive(Clone, Copy)]
pub(super) struct Away {
    /// When it is looked for again.
    pub(super) retry_at: u64,
    pause_ns: u64,
    /// The count of answers when it was looked for last.
    pub(super) answers: u64,
}

impl<S: Serve> RequestQueue<S> {
    /// Looks whether the ring is where it was, and for where it is else; false if it is away.
    #[inline]
    pub(super) fn find_ring(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        // Ring addresses are IOVAs only behind an IOMMU; plain ones never become invalid.
        if self.ring.is_valid() { Ok(true) } else { self.look_for_ring(bus) }
    }

    /// Notes that the ring was found when the endpoint had been bound anew so often.
    pub(in crate::requests) fn note_found(&mut self, bindings: u64) {
        self.found = Some(bindings);
    }

    #[cold]
    fn look_for_ring(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        let answers = bus.answers();
        let again = self.away.is_some();
        // One that was elsewhere's, where the endpoint was bound before, is looked for of our own
        // accord: firmware has left it, and the driver has not asked for anything.
        let left = self.found.is_some_and(|at| at != bus.bindings());
        match self.away {
            Some(Away { retry_at, answers: seen, .. })
                if self.now_ns < retry_at && seen == answers =>
            {
                return Ok(false);
            }
            _ if bus.iotlb().is_some() => ask_for_ring(self.ring.config(), bus),
            _ => {}
        }
        let found = match again || left {
            // The driver has been told the first time, if at all.
            true => bus.silently(|| self.find(bus)),
            false => self.find(bus),
        };
        match found {
            Ok(()) => {
                self.away = None;
                self.note_found(bus.bindings());
                // Nobody could say so while it was not there, and who looks for work is awake.
                self.disarm();
            }
            Err(QueueError::Ring(RingError::Unreachable { .. })) => {
                let (first, most) = AWAY_NS;
                let pause_ns = match self.away {
                    // There was an answer, perhaps the first of several.
                    Some(away) if away.answers != answers => first,
                    Some(away) => (away.pause_ns * 2).min(most),
                    None => first,
                };
                self.stats.away += u64::from(self.away.is_none());
                let retry_at = self.now_ns.saturating_add(pause_ns);
                self.away = Some(Away { retry_at, pause_ns, answers });
            }
            Err(error) => return Err(error),
        }
        Ok(self.away.is_none())
    }
}

/// Has all three areas asked for at once, as far as they are missing (rule D22).
fn ask_for_ring(config: &device::RingConfig, bus: &Bus) {
    for (addr, len, access) in config.areas() {
        bus.prefetch(addr, len as u64, access);
    }
}
