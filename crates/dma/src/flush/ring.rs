//! One flush queue.

use std::collections::{TryReserveError, VecDeque};

use arrayvec::ArrayVec;
use ringfence_sync::mutant;

use super::{Entry, counters::Counters};
use crate::{Exposure, Stats};

/// How many entries are taken out at a time, so that the queue's lock is held briefly whatever the
/// length of the queue, and released ranges need no allocation.
pub(crate) const BATCH: usize = 32;

/// Entries whose flush has finished, out of the queue, for the caller to release.
pub(crate) struct Batch {
    pub(crate) entries: ArrayVec<Entry, BATCH>,
    /// When the newest flush finished: at the latest from then on the device cannot reach them.
    pub(crate) released_ns: u64,
}

impl Batch {
    pub(crate) fn new() -> Batch {
        Batch { entries: ArrayVec::new(), released_ns: 0 }
    }
}

pub(crate) struct Slot {
    stamp: u64,
    entry: Entry,
}

/// Memory for the entries of a ring.
pub(crate) type Memory = VecDeque<Slot>;

/// Memory for `capacity` entries.
///
/// # Errors
/// There is no memory.
pub(crate) fn memory(capacity: usize) -> Result<Memory, TryReserveError> {
    let mut memory = VecDeque::new();
    memory.try_reserve_exact(capacity)?;
    Ok(memory)
}

/// Which entries a ring accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// How many entries; never more than its memory holds.
    pub(crate) capacity: usize,
    /// How many entries make the timer due; `usize::MAX`: none do.
    pub(crate) high_water: usize,
    /// Entries exposed for longer are counted as late; `u64::MAX`: none are.
    pub(crate) late_after_ns: u64,
    /// Whether only entries with reserved bytes are accepted.
    pub(crate) reserved_only: bool,
}

impl Shape {
    /// Accepts nothing.
    const NONE: Shape = Shape {
        capacity: 0,
        high_water: usize::MAX,
        late_after_ns: u64::MAX,
        reserved_only: false,
    };
}

/// What [`FlushQueues::enqueue`](super::FlushQueues::enqueue) did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enqueued {
    /// The entry is queued.
    Queued {
        /// The timer does not run: the caller arms it.
        arm: bool,
        /// The queue is at its mark: the caller makes the timer due.
        high: bool,
    },
    /// The queue is full and holds nothing that may be released: the caller flushes and retries.
    Full,
    /// The queue takes no such entries any more (rule L27): the caller flushes and releases it.
    Closed,
}

/// A ring of entries in the order of their stamps.
///
/// The ring's lock serialises pushes and changes of what is accepted: an entry in flight while its
/// device becomes strict, or bounded, finds a ring that refuses it.
pub(crate) struct Ring {
    slots: Memory,
    shape: Shape,
    open: bool,
    bytes: u64,
    exposure: Exposure,
    late: u64,
}

impl Ring {
    /// A closed ring without memory.
    pub(crate) fn new() -> Ring {
        Ring {
            slots: Memory::new(),
            shape: Shape::NONE,
            open: false,
            bytes: 0,
            exposure: Exposure::default(),
            late: 0,
        }
    }

    /// Accepts entries from now on, according to `shape`. `memory` must have room for as many, and
    /// is exchanged for the memory that is no longer needed. Entries beyond a smaller capacity stay
    /// until they are released. Never allocates.
    pub(crate) fn open(&mut self, shape: Shape, memory: &mut Memory) {
        if memory.capacity() > self.slots.capacity() {
            memory.append(&mut self.slots);
            core::mem::swap(&mut self.slots, memory);
        }
        debug_assert!(self.slots.capacity() >= shape.capacity);
        self.shape = shape;
        self.open = true;
    }

    /// Changes all of the shape except the capacity, without opening the ring.
    pub(crate) fn reshape(&mut self, shape: Shape) {
        self.shape = Shape { capacity: self.shape.capacity, ..shape };
    }

    /// Accepts no more entries; what is queued stays.
    pub(crate) fn close(&mut self) {
        self.open = false;
    }

    /// Takes the memory, if the ring is empty and closed.
    pub(crate) fn trim(&mut self) -> Memory {
        let unused = !self.open && self.slots.is_empty();
        if unused { core::mem::take(&mut self.slots) } else { Memory::new() }
    }

    /// Takes out the entries that finished flushes cover, oldest first, as many as `batch` has room
    /// for.
    pub(crate) fn reap(&mut self, counters: &Counters, batch: &mut Batch) {
        if self.slots.is_empty() {
            return;
        }
        // Read under the ring's lock: all entries that a finished flush covers are in the ring
        // already.
        let finished = counters.finished();
        let released_ns = counters.finished_ns();
        batch.released_ns = released_ns;
        // Stamps are read under that lock too and so never decrease: stop at the first one that is
        // not covered.
        while !batch.entries.is_full()
            && let Some(oldest) = self.slots.front()
            && Counters::covers(oldest.stamp, finished)
            && let Some(Slot { entry, .. }) = self.slots.pop_front()
        {
            self.bytes -= entry.bytes;
            self.note_released(&entry, released_ns);
            batch.entries.push(entry);
        }
    }

    /// Counts an entry that was released, from this ring or bypassing it.
    pub(crate) fn note_released(&mut self, entry: &Entry, released_ns: u64) {
        let age = released_ns.saturating_sub(entry.since_ns);
        self.exposure.byte_ns += u128::from(entry.bytes) * u128::from(age);
        self.exposure.max_age_ns = self.exposure.max_age_ns.max(age);
        self.exposure.released += 1;
        self.late += u64::from(age > self.shape.late_after_ns);
    }

    /// Takes the entry, if there is one; leaves it in place if the ring is full or refuses it. (By
    /// reference: entries are moved once, into their slot.) Whether to arm the timer is for the caller to say.
    pub(crate) fn push(&mut self, stamp: u64, entry: &mut Option<Entry>) -> Enqueued {
        let arm = false;
        let Some(pushed) = entry else { return Enqueued::Queued { arm, high: false } };
        let takes = self.open && (pushed.reserved || !self.shape.reserved_only);
        if !takes && !mutant!("a closed queue takes entries") {
            return Enqueued::Closed;
        }
        // May exceed the capacity if that was lowered.
        if self.slots.len() >= self.shape.capacity {
            return Enqueued::Full;
        }
        self.bytes = self.bytes.saturating_add(pushed.bytes);
        if let Some(entry) = entry.take() {
            self.slots.push_back(Slot { stamp, entry });
        }
        Enqueued::Queued { arm, high: self.slots.len() >= self.shape.high_water }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Adds what waits, and what was released.
    pub(crate) fn add_to(&self, stats: &mut Stats) {
        stats.queued += self.slots.len() as u64;
        stats.queued_bytes += self.bytes;
        let (sum, exposure) = (&mut stats.exposure, &self.exposure);
        sum.byte_ns = sum.byte_ns.saturating_add(exposure.byte_ns);
        sum.max_age_ns = sum.max_age_ns.max(exposure.max_age_ns);
        sum.released += exposure.released;
        stats.late_releases += self.late;
    }

    /// Takes out everything, covered or not: only for when the whole domain is given up.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Entry> + '_ {
        self.bytes = 0;
        self.slots.drain(..).map(|slot| slot.entry)
    }
}
