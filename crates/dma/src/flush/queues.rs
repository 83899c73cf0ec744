//! The flush queues of a device, and the flag of their timer.
//!
//! The invariant, which the models check: **no entry (and with it no IOVA and no table page) is
//! released before a flush that started after it was queued has finished**, and none is lost: as
//! long as one is queued, the timer is armed or about to be.

use std::collections::TryReserveError;

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicBool, Ordering},
    lock::SpinLock,
};

use super::{
    Entry,
    budget::Budget,
    counters::Counters,
    ring::{Batch, Enqueued, Ring, Shape, memory},
};
use crate::Stats;

/// A ring for each CPU, of which a single queue uses only the first: so nothing is replaced or lost
/// when that changes.
pub(crate) struct FlushQueues {
    /// Started and finished around each flush of the domain.
    pub(crate) counters: CachePadded<Counters>,
    /// Whether the timer runs (rule L23).
    armed: CachePadded<AtomicBool>,
    /// The bytes that may be exposed in all rings together, if that is bounded.
    pub(crate) budget: CachePadded<Budget>,
    rings: Box<[CachePadded<SpinLock<Ring>>]>,
}

impl FlushQueues {
    /// `rings` closed queues.
    pub(crate) fn new(rings: usize) -> Self {
        FlushQueues {
            counters: CachePadded::new(Counters::new()),
            armed: CachePadded::new(AtomicBool::new(false)),
            budget: CachePadded::new(Budget::new()),
            rings: (0..rings.max(1))
                .map(|_| CachePadded::new(SpinLock::new(Ring::new())))
                .collect(),
        }
    }

    /// Opens the first `in_use` rings to entries, according to `shape`. The others change only
    /// their bounds until they are [`close`](Self::close)d. When it returns the queues are complete
    /// (rule L27).
    ///
    /// # Errors
    /// There is no memory for them; nothing has changed.
    pub(crate) fn open(&self, in_use: usize, shape: Shape) -> Result<(), TryReserveError> {
        // All of it before any ring changes, and without a lock: nothing is allocated afterwards.
        let memories: Result<Vec<_>, _> =
            self.rings.iter().take(in_use).map(|_| memory(shape.capacity)).collect();
        for (ring, mut memory) in self.rings.iter().zip(memories?) {
            ring.lock().open(shape, &mut memory);
        }
        self.rings.iter().skip(in_use).for_each(|ring| ring.lock().reshape(shape));
        Ok(())
    }

    /// Closes all but the first `in_use` rings to entries. What they hold waits for a flush.
    pub(crate) fn close(&self, in_use: usize) {
        self.rings.iter().skip(in_use).for_each(|ring| ring.lock().close());
    }

    /// Gives back the memory of the rings that are closed and empty.
    pub(crate) fn trim(&self) {
        for ring in &self.rings {
            // Freed after the lock is released.
            let memory = ring.lock().trim();
            drop(memory);
        }
    }

    /// Queues what was just unmapped, after taking out entries that may be released (rule L22).
    /// Takes `entry` if it is queued. `ring` is any number, taken modulo the number of rings.
    pub(crate) fn enqueue(
        &self,
        ring: usize,
        entry: &mut Option<Entry>,
        batch: &mut Batch,
    ) -> Enqueued {
        self.counters.removed();
        let pushed = {
            let mut ring = self.ring(ring).lock();
            ring.reap(&self.counters, batch);
            // Under the lock, so that stamps never decrease from the front of a ring to its end.
            ring.push(self.counters.stamp(), entry)
        };
        let Enqueued::Queued { high, .. } = pushed else { return pushed };
        // Most threads find it armed and only read the shared cache line. Acquire: see `expiring`.
        //
        // Ordering: with the Acquire, the caller sets the timer after the expiry that cleared the flag
        // has unset it. (In the models both are read-modify-writes or come later, in whose order there
        // is no doubt.) Nothing needs the Release. That an expiry which clears this flag finds the entry
        // follows from the ring's lock: had it reaped the ring before, its swap would come first.
        let arm = !self.armed.load(Ordering::Relaxed) && !self.armed.swap(true, Ordering::AcqRel);
        Enqueued::Queued { arm, high }
    }

    fn ring(&self, ring: usize) -> &SpinLock<Ring> {
        &self.rings[ring % self.rings.len()]
    }

    /// Counts an entry that was released without having been queued.
    pub(crate) fn note_released(&self, ring: usize, entry: &Entry, released_ns: u64) {
        self.ring(ring).lock().note_released(entry, released_ns);
    }

    /// Takes out of one ring what may be released, at most a batch. If the batch comes back full,
    /// there may be more.
    pub(crate) fn reap(&self, ring: usize, batch: &mut Batch) {
        self.ring(ring).lock().reap(&self.counters, batch);
    }

    /// To be called when the timer expires, *before* the flush it makes.
    ///
    /// An entry that this expiry does not release was queued with a stamp that counts its flush, or
    /// came into its ring after it was reaped. Both happen after this store, through the counter
    /// and through the ring's lock, so that the thread that queued it finds the flag clear and arms
    /// the timer again.
    pub(crate) fn expiring(&self) {
        // A swap, as arming is one: changes of the flag then follow each other, and a thread that
        // arms it after this also sets the timer after the caller has unset it.
        //
        // Ordering: with the Release, what the caller has unset is set again after it; nothing needs the
        // Acquire. See `enqueue`.
        self.armed.swap(false, Ordering::AcqRel);
    }

    /// Sets the timer's flag for what an expiry had to leave behind; returns whether the caller
    /// must arm it.
    // Ordering: as in `enqueue`, for the `expiring` of another thread that expires too.
    pub(crate) fn rearm(&self) -> bool {
        self.len() != 0 && !self.armed.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn rings(&self) -> usize {
        self.rings.len()
    }

    /// How many entries wait.
    pub(crate) fn len(&self) -> usize {
        self.rings.iter().map(|ring| ring.lock().len()).sum()
    }

    pub(crate) fn add_to(&self, stats: &mut Stats) {
        stats.flushes += self.counters.flushes();
        self.rings.iter().for_each(|ring| ring.lock().add_to(stats));
    }

    /// Takes out everything, covered or not.
    pub(crate) fn drain(&mut self, each: &mut dyn FnMut(Entry)) {
        for ring in &mut self.rings {
            ring.get_mut().drain().for_each(&mut *each);
        }
    }
}
