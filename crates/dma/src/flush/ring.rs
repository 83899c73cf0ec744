//! One flush queue.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use super::counters::{Counters, Rules};
use crate::Exposure;

/// What waits in a flush queue.
pub(crate) trait Queued {
    /// How many bytes stay reachable.
    fn bytes(&self) -> u64;
    /// Since when, by the device's clock.
    fn since_ns(&self) -> u64;
}

/// How many entries are taken out in one go, so that the queue's lock is held shortly whatever the
/// length of the queue, and released ranges need no allocation.
pub(crate) const BATCH: usize = 32;

/// Entries whose flush has finished, out of the queue and to be released by who took them.
pub(crate) struct Batch<E> {
    pub(crate) entries: ArrayVec<E, BATCH>,
    /// When the newest flush finished: since then at the latest nothing reaches them.
    pub(crate) released_ns: u64,
}

impl<E> Batch<E> {
    pub(crate) fn new() -> Batch<E> {
        Batch { entries: ArrayVec::new(), released_ns: 0 }
    }
}

struct Slot<E> {
    stamp: u64,
    entry: E,
}

/// A ring of entries in the order of their stamps.
pub(crate) struct Ring<E> {
    slots: VecDeque<Slot<E>>,
    capacity: usize,
    bytes: u64,
    exposure: Exposure,
}

impl<E: Queued> Ring<E> {
    /// A ring of `slots` slots, which holds one entry less (rule L22). Never allocates afterwards.
    pub(crate) fn new(slots: usize) -> Ring<E> {
        let capacity = slots.saturating_sub(1);
        Ring {
            slots: VecDeque::with_capacity(capacity),
            capacity,
            bytes: 0,
            exposure: Exposure::default(),
        }
    }

    /// Takes out the entries that finished flushes cover, oldest first, as many as `batch` still
    /// holds.
    pub(crate) fn reap<R: Rules>(&mut self, counters: &Counters<R>, batch: &mut Batch<E>) {
        if self.slots.is_empty() {
            return;
        }
        // Read under the ring's lock: what a flush that has finished covers is in the ring already.
        let finished = counters.finished();
        let released_ns = counters.finished_ns();
        batch.released_ns = released_ns;
        // Stamps are read under that lock too and so never fall: the first one that is not covered
        // ends it.
        while !batch.entries.is_full()
            && let Some(oldest) = self.slots.front()
            && Counters::<R>::covers(oldest.stamp, finished)
            && let Some(Slot { entry, .. }) = self.slots.pop_front()
        {
            self.bytes -= entry.bytes();
            let age = released_ns.saturating_sub(entry.since_ns());
            self.exposure.byte_ns += u128::from(entry.bytes()) * u128::from(age);
            self.exposure.max_age_ns = self.exposure.max_age_ns.max(age);
            self.exposure.released += 1;
            batch.entries.push(entry);
        }
    }

    /// Takes the entry in, if there is one; leaves it where it is if the ring is full. (By
    /// reference: entries are moved once, into their slot.)
    pub(crate) fn push(&mut self, stamp: u64, entry: &mut Option<E>) -> bool {
        if self.slots.len() == self.capacity {
            return false;
        }
        if let Some(entry) = entry.take() {
            self.bytes = self.bytes.saturating_add(entry.bytes());
            self.slots.push_back(Slot { stamp, entry });
        }
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn exposure(&self) -> Exposure {
        self.exposure
    }

    /// Takes out everything, covered or not: only for who gives the whole domain up.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = E> + '_ {
        self.bytes = 0;
        self.slots.drain(..).map(|slot| slot.entry)
    }
}
