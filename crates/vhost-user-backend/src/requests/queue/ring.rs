//! A ring whose addresses are not mapped now.

use super::RequestQueue;
use crate::{
    Bus,
    requests::{QueueError, Serve},
};
use ringfence_virtq::{RingError, device};

/// The pause before a ring that is not mapped is looked up again: the first one, and the longest.
const PAUSE_NS: (u64, u64) = (500_000, 16_000_000);

/// A ring whose addresses are not mapped now.
#[derive(Clone, Copy)]
pub(super) struct Away {
    /// When to look it up again; `None`: when the memory changes.
    pub(super) retry_at: Option<u64>,
    pause_ns: u64,
    /// The count of updates and refusals at the last lookup.
    pub(super) updates: u64,
}

impl<S: Serve> RequestQueue<S> {
    /// Checks that the ring is still mapped, or looks it up again; false if it is away.
    #[inline]
    pub(super) fn find_ring(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        // Ring addresses are IOVAs only behind an IOMMU; plain ones change with the memory.
        match self.ring.is_valid() && self.away.is_none() {
            true => Ok(true),
            false => self.look_for_ring(bus),
        }
    }

    /// The memory that has the ring is gone. It may come back at the same addresses: a region that
    /// changes is first removed and then added again.
    pub(in crate::requests) fn is_gone(&mut self, bus: &Bus) {
        self.stats.away += u64::from(self.away.is_none());
        self.away = Some(Away { retry_at: None, pause_ns: 0, updates: bus.updates() });
    }

    /// Records that the ring was found, and how often the endpoint had been rebound by then.
    pub(in crate::requests) fn note_found(&mut self, bindings: u64) {
        self.found = Some(bindings);
    }

    #[cold]
    fn look_for_ring(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        let updates = bus.updates();
        let again = self.away.is_some();
        // If the endpoint was rebound since, the ring is one that firmware left running: its faults
        // are not the driver's.
        let stale = self.found.is_some_and(|at| at != bus.bindings());
        match self.away {
            Some(Away { retry_at, updates: seen, .. })
                if retry_at.is_none_or(|at| self.now_ns < at) && seen == updates =>
            {
                return Ok(false);
            }
            _ if bus.iotlb().is_some() => prefetch_ring(self.ring.config(), bus),
            _ => {}
        }
        let found = match again || stale {
            // Only the first lookup reports a fault to the driver.
            true => bus.silently(|| self.find(bus)),
            false => self.find(bus),
        };
        match found {
            Ok(()) => {
                self.away = None;
                self.note_found(bus.bindings());
                // Kicks could not be disabled while it was away, and a worker that polls needs
                // none.
                self.disarm();
            }
            Err(QueueError::Ring(RingError::Unreachable { .. })) => {
                let (first, most) = PAUSE_NS;
                let pause_ns = match self.away {
                    // There was an update, perhaps the first of several: look again soon.
                    Some(away) if away.updates != updates => first,
                    Some(away) => (away.pause_ns * 2).min(most),
                    None => first,
                };
                self.stats.away += u64::from(self.away.is_none());
                let retry_at = Some(self.now_ns.saturating_add(pause_ns));
                self.away = Some(Away { retry_at, pause_ns, updates });
            }
            Err(error) => return Err(error),
        }
        Ok(self.away.is_none())
    }
}

/// Sends the misses for all three areas at once, if they have no translation (rule D22).
fn prefetch_ring(config: &device::RingConfig, bus: &Bus) {
    for (addr, len, access) in config.areas() {
        bus.prefetch(addr, len as u64, access);
    }
}
