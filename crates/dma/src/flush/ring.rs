//! One flush queue.

use std::collections::{TryReserveError, VecDeque};

use arrayvec::ArrayVec;

use super::counters::{Counters, Rules};
use crate::Exposure;

/// What waits in a flush queue.
pub(crate) trait Queued {
    /// How many bytes stay reachable.
    fn bytes(&self) -> u64;
    /// Since when, by the device's clock.
    fn since_ns(&self) -> u64;
    /// Whether its bytes were reserved of the [`Budget`](super::Budget).
    fn is_reserved(&self) -> bool;
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

pub(crate) struct Slot<E> {
    stamp: u64,
    entry: E,
}

/// Memory for the entries of a ring.
pub(crate) type Memory<E> = VecDeque<Slot<E>>;

/// Memory for `capacity` entries.
///
/// # Errors
/// There is none.
pub(crate) fn memory<E>(capacity: usize) -> Result<Memory<E>, TryReserveError> {
    let mut memory = VecDeque::new();
    memory.try_reserve_exact(capacity)?;
    Ok(memory)
}

/// What a ring takes in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// How many entries; never more than its memory holds.
    pub(crate) capacity: usize,
    /// How many make the timer due; `usize::MAX`: none do.
    pub(crate) high_water: usize,
    /// Entries that were exposed for longer are counted; `u64::MAX`: none are.
    pub(crate) late_after_ns: u64,
    /// Only entries whose bytes were reserved.
    pub(crate) reserved_only: bool,
}

impl Shape {
    /// Nothing.
    const NONE: Shape = Shape {
        capacity: 0,
        high_water: usize::MAX,
        late_after_ns: u64::MAX,
        reserved_only: false,
    };
}

/// What became of an entry that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It is in; whether the ring is at its mark.
    In { high: bool },
    /// There is no room for it.
    Full,
    /// The ring takes no entries, or none such as this.
    Closed,
}

/// A ring of entries in the order of their stamps.
///
/// Who takes entries in and who changes what is taken in agree by the ring's lock: an entry that was
/// under way while its device became strict, or bounded, meets a ring that refuses it.
pub(crate) struct Ring<E> {
    slots: Memory<E>,
    shape: Shape,
    open: bool,
    bytes: u64,
    exposure: Exposure,
    late: u64,
}

impl<E: Queued> Ring<E> {
    /// A closed ring without memory.
    pub(crate) fn new() -> Ring<E> {
        Ring {
            slots: Memory::new(),
            shape: Shape::NONE,
            open: false,
            bytes: 0,
            exposure: Exposure::default(),
            late: 0,
        }
    }

    /// Takes entries in from now on, as `shape` says. `memory` must hold as many; what comes back in
    /// its place is not needed any more. Entries beyond a smaller capacity stay until they are
    /// released. Never allocates.
    pub(crate) fn open(&mut self, shape: Shape, memory: &mut Memory<E>) {
        if memory.capacity() > self.slots.capacity() {
            memory.append(&mut self.slots);
            core::mem::swap(&mut self.slots, memory);
        }
        debug_assert!(self.slots.capacity() >= shape.capacity);
        self.shape = shape;
        self.open = true;
    }

    /// As `shape` says from now on, but for the capacity, and without being opened.
    pub(crate) fn reshape(&mut self, shape: Shape) {
        self.shape = Shape { capacity: self.shape.capacity, ..shape };
    }

    /// Takes no more entries in; what is queued stays.
    pub(crate) fn close(&mut self) {
        self.open = false;
    }

    /// The memory, if nothing is in it and nothing can come in.
    pub(crate) fn trim(&mut self) -> Memory<E> {
        let unused = !self.open && self.slots.is_empty();
        if unused { core::mem::take(&mut self.slots) } else { Memory::new() }
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
            self.note_released(&entry, released_ns);
            batch.entries.push(entry);
        }
    }

    /// Counts what was released, from this ring or past it.
    pub(crate) fn note_released(&mut self, entry: &E, released_ns: u64) {
        let age = released_ns.saturating_sub(entry.since_ns());
        self.exposure.byte_ns += u128::from(entry.bytes()) * u128::from(age);
        self.exposure.max_age_ns = self.exposure.max_age_ns.max(age);
        self.exposure.released += 1;
        self.late += u64::from(age > self.shape.late_after_ns);
    }

    /// Takes the entry in, if there is one; leaves it where it is if the ring is full or takes none
    /// such. (By reference: entries are moved once, into their slot.)
    pub(crate) fn push<R: Rules>(&mut self, stamp: u64, entry: &mut Option<E>) -> Pushed {
        let Some(pushed) = entry else { return Pushed::In { high: false } };
        if R::CLOSES && !(self.open && (pushed.is_reserved() || !self.shape.reserved_only)) {
            return Pushed::Closed;
        }
        // More than its capacity if that was lowered.
        if self.slots.len() >= self.shape.capacity {
            return Pushed::Full;
        }
        self.bytes = self.bytes.saturating_add(pushed.bytes());
        if let Some(entry) = entry.take() {
            self.slots.push_back(Slot { stamp, entry });
        }
        Pushed::In { high: self.slots.len() >= self.shape.high_water }
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

    /// How many of those that were released had been exposed for too long.
    pub(crate) fn late(&self) -> u64 {
        self.late
    }

    /// Takes out everything, covered or not: only for who gives the whole domain up.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = E> + '_ {
        self.bytes = 0;
        self.slots.drain(..).map(|slot| slot.entry)
    }
}
