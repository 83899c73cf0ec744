//! The flush queues of a device, and the flag of their timer.
//!
//! What must hold, and what the models check: **no entry (and with it no IOVA and no table page)
//! is released before a flush that started after it was queued has finished**, and none is lost:
//! as long as one is queued, the timer is armed or about to be.

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicBool, Ordering},
    lock::SpinLock,
};

use super::{
    counters::{Counters, Rules, Sound, Ticket},
    ring::{Batch, Queued, Ring},
};
use crate::Exposure;

/// One flush queue, or one per CPU.
pub(crate) struct FlushQueues<E, R = Sound> {
    counters: CachePadded<Counters<R>>,
    /// Whether the timer runs (rule L23).
    armed: CachePadded<AtomicBool>,
    rings: Box<[CachePadded<SpinLock<Ring<E>>>]>,
}

/// What [`FlushQueues::enqueue`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enqueued {
    /// The entry is queued and the timer runs already.
    Queued,
    /// The entry is queued; the caller arms the timer.
    Arm,
    /// The queue is full and holds nothing that may be released: the caller flushes and comes again.
    Full,
}

impl<E: Queued, R: Rules> FlushQueues<E, R> {
    /// `rings` queues of `slots` slots each.
    pub(crate) fn new(rings: usize, slots: usize) -> Self {
        FlushQueues {
            counters: CachePadded::new(Counters::new()),
            armed: CachePadded::new(AtomicBool::new(false)),
            rings: (0..rings.max(1))
                .map(|_| CachePadded::new(SpinLock::new(Ring::new(slots))))
                .collect(),
        }
    }

    /// Queues what was unmapped just now, after taking out entries that may be released (rule L22).
    /// `entry` is taken unless the queue is full. `ring` is any number; it is taken modulo the number
    /// of rings.
    pub(crate) fn enqueue(
        &self,
        ring: usize,
        entry: &mut Option<E>,
        batch: &mut Batch<E>,
    ) -> Enqueued {
        self.counters.removed();
        {
            let mut ring = self.rings[ring % self.rings.len()].lock();
            ring.reap(&self.counters, batch);
            // Under the lock, so that stamps never fall from the front of a ring to its end.
            if !ring.push(self.counters.stamp(), entry) {
                return Enqueued::Full;
            }
        }
        // Most find it armed and only read the line that they share.
        if !self.armed.load(Ordering::Relaxed) && !self.armed.swap(true, Ordering::AcqRel) {
            Enqueued::Arm
        } else {
            Enqueued::Queued
        }
    }

    /// Takes out of one ring what may be released, at most a batch. A batch that comes back full
    /// may not have been all.
    pub(crate) fn reap(&self, ring: usize, batch: &mut Batch<E>) {
        self.rings[ring % self.rings.len()].lock().reap(&self.counters, batch);
    }

    /// To be called before the domain is flushed.
    pub(crate) fn start_flush(&self) -> Ticket {
        self.counters.start()
    }

    /// To be called when the domain's flush has succeeded, with the time.
    pub(crate) fn finish_flush(&self, ticket: Ticket, now_ns: u64) {
        self.counters.finish(ticket, now_ns);
    }

    /// To be called when the timer expires, *before* the flush it makes.
    ///
    /// An entry that this expiry does not release was queued with a stamp that counts its flush, or
    /// came into its ring after it was reaped. Both happen after this store, through the counter
    /// and through the ring's lock, so that who queued it finds the flag clear and arms the timer
    /// again.
    pub(crate) fn expiring(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Sets the timer's flag for what an expiry had to leave behind; whether the caller must arm it.
    pub(crate) fn rearm(&self) -> bool {
        self.len() != 0 && !self.armed.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn rings(&self) -> usize {
        self.rings.len()
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.counters.flushes()
    }

    /// How many entries wait.
    pub(crate) fn len(&self) -> usize {
        self.rings.iter().map(|ring| ring.lock().len()).sum()
    }

    /// How many bytes wait.
    pub(crate) fn bytes(&self) -> u64 {
        self.rings.iter().map(|ring| ring.lock().bytes()).sum()
    }

    /// What was released so far.
    pub(crate) fn exposure(&self) -> Exposure {
        self.rings.iter().fold(Exposure::default(), |sum, ring| sum.plus(ring.lock().exposure()))
    }

    /// Takes out everything, covered or not.
    pub(crate) fn drain(&mut self, each: &mut dyn FnMut(E)) {
        for ring in &mut self.rings {
            ring.get_mut().drain().for_each(&mut *each);
        }
    }
}
