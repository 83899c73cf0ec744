//! The slots of one size in one range of addresses.

use core::{cmp::Reverse, ops::Range as Numbers};
use std::collections::BinaryHeap;

use parking_lot::Mutex;
use ringfence_iommu::{Iova, Range};
use ringfence_sync::{CachePadded, lock::SpinLock};

use super::{ClassStats, mark::Marks, shelf::Shelf};
use crate::{
    Direction,
    bounce::{Chunk, Slot},
};

/// The most bytes, and the most slots, that a CPU's cache of a zone holds.
const CACHE_BYTES: u64 = 256 << 10;
const CACHE_SLOTS: u64 = 64;

/// A range of addresses, divided into slots. Slot n begins n slots after the range does, so that
/// the slot at an address follows by arithmetic.
///
/// Free slots lie in the cache of a CPU, behind a lock that is only tried on the fast path, or in
/// the depot. A cache's lock is taken before the depot's, and neither is held during calls of the
/// domain.
pub(super) struct Zone<T> {
    pub(super) range: Range,
    shift: u32,
    slots: u32,
    /// The highest address of the device for which it was made.
    pub(super) made_for: u64,
    /// How many slots a cache holds at most.
    depth: usize,
    caches: Box<[CachePadded<SpinLock<Shelf>>]>,
    depot: Mutex<Depot<T>>,
    /// The holder of each slot.
    pub(super) marks: Marks,
}

/// The part that all CPUs share.
struct Depot<T> {
    shelf: Shelf,
    /// The memory of each slot that ever had any, by number; `None` if it has none.
    chunks: Vec<Option<Chunk<T>>>,
    /// The slots in `chunks` that have none.
    bare: BinaryHeap<Reverse<u32>>,
    /// Slots that have memory, and how many of these are never used again.
    live: usize,
    quarantined: usize,
}

impl<T: Copy> Zone<T> {
    /// `slots` slots of `1 << shift` bytes from `first`, for `cpus` CPUs, a power of two. `None` if
    /// they would pass the end of the address space.
    pub(super) fn new(
        first: u64,
        shift: u32,
        slots: u32,
        made_for: u64,
        cpus: usize,
    ) -> Option<Self> {
        let range = Range::from_len(Iova(first), u64::from(slots).checked_shl(shift)?)?;
        Some(Zone {
            range,
            shift,
            slots,
            made_for,
            depth: (CACHE_BYTES >> shift).min(CACHE_SLOTS) as usize,
            caches: (0..cpus).map(|_| CachePadded::new(SpinLock::default())).collect(),
            depot: Mutex::new(Depot {
                shelf: Shelf::default(),
                chunks: Vec::new(),
                bare: BinaryHeap::new(),
                live: 0,
                quarantined: 0,
            }),
            marks: Marks::new(slots),
        })
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// The number of the slot at `iova`, which lies in the range.
    #[inline]
    pub(super) fn number(&self, iova: Iova) -> u32 {
        ((iova.0 - self.range.first().0) >> self.shift) as u32
    }

    /// The addresses of the slots of these numbers, which are at least one.
    pub(super) fn range_of(&self, numbers: &Numbers<u32>) -> Range {
        let at = |number: u32| self.range.first().0 + (u64::from(number) << self.shift);
        // Within the zone's range, which does not wrap.
        let last = at(numbers.end - 1) + (self.slot_bytes() - 1);
        Range::new(Iova(at(numbers.start)), Iova(last)).expect("at least one slot")
    }

    /// A free slot: from the CPU's cache, or from the depot.
    #[inline]
    pub(super) fn pop(&self, cpu: usize, kind: Direction) -> Option<Slot> {
        // The lock is held by a running thread, or by one preempted on this CPU: do not wait for
        // it.
        let cache = (self.depth > 0).then(|| self.caches[cpu & (self.caches.len() - 1)].try_lock());
        let Some(mut cache) = cache.flatten() else { return self.depot.lock().shelf.pop(kind) };
        match cache.pop(kind) {
            Some(slot) => Some(slot),
            None => self.refill(&mut cache, kind),
        }
    }

    #[cold]
    fn refill(&self, cache: &mut Shelf, kind: Direction) -> Option<Slot> {
        let most = self.depth.div_ceil(2).min(self.depth - cache.len().min(self.depth));
        let mut depot = self.depot.lock();
        let slot = depot.shelf.pop(kind)?;
        // One less, since that slot comes back to the cache too.
        cache.refill(&mut depot.shelf, kind, most.saturating_sub(1));
        Some(slot)
    }

    /// Takes a slot back.
    #[inline]
    pub(super) fn push(&self, cpu: usize, slot: Slot) {
        let cache = (self.depth > 0).then(|| self.caches[cpu & (self.caches.len() - 1)].try_lock());
        let Some(mut cache) = cache.flatten() else { return self.depot.lock().shelf.push(slot) };
        if cache.len() >= self.depth {
            self.spill(&mut cache);
        }
        cache.push(slot);
    }

    #[cold]
    fn spill(&self, cache: &mut Shelf) {
        cache.spill(&mut self.depot.lock().shelf);
    }

    /// Visits every place where free slots lie, one after the other.
    fn each_shelf(&self, mut visit: impl FnMut(&mut Shelf)) {
        visit(&mut self.depot.lock().shelf);
        self.caches.iter().for_each(|cache| visit(&mut cache.lock()));
    }

    /// A free slot from the first shelf from which one can be taken.
    pub(super) fn steal(&self, take: impl Fn(&mut Shelf) -> Option<Slot>) -> Option<Slot> {
        let mut found = None;
        self.each_shelf(|shelf| found = found.take().or_else(|| take(shelf)));
        found
    }

    /// Moves up to `most` free slots to `into`, the least recently used first.
    pub(super) fn take_free(&self, most: usize, into: &mut Vec<Slot>) {
        let end = into.len().saturating_add(most);
        self.each_shelf(|shelf| shelf.take(end - into.len(), false, into));
    }

    /// Ends an interval: takes the slots that were not needed in it, but leaves a quarter of the
    /// number that were. Returns whether any came or went in it.
    pub(super) fn take_idle(&self, into: &mut Vec<Slot>) -> bool {
        let mut idle = 0;
        self.each_shelf(|shelf| idle += shelf.idle());
        let (live, quarantined) = self.live();
        // The least that a shelf held throughout the interval was never needed.
        let needed = live.saturating_sub(quarantined).saturating_sub(idle);
        let end = into.len() + idle.saturating_sub(needed / 4);
        let mut touched = false;
        self.each_shelf(|shelf| {
            shelf.take(end - into.len(), true, into);
            touched |= shelf.begin_interval();
        });
        touched
    }

    /// Up to `most` consecutive numbers, from the lowest, of slots that have no memory. `None` if
    /// all have. The caller gives them memory or [`leave`](Self::leave)s them bare.
    pub(super) fn take_bare(&self, most: u32) -> Option<Numbers<u32>> {
        let depot = &mut *self.depot.lock();
        let lowest = |depot: &Depot<T>| {
            depot.bare.peek().map_or(depot.chunks.len() as u32, |Reverse(lowest)| *lowest)
        };
        let start = lowest(depot);
        let mut end = start;
        while end < self.slots && end - start < most && lowest(depot) == end {
            if depot.bare.pop().is_none() {
                depot.chunks.push(None);
            }
            self.marks.prepare(end);
            end += 1;
        }
        (start < end).then_some(start..end)
    }

    /// Returns slots that were taken bare.
    pub(super) fn leave(&self, numbers: Numbers<u32>) {
        self.depot.lock().bare.extend(numbers.map(Reverse));
    }

    /// Adds memory to the slots from `first` on; those in `free` are free.
    pub(super) fn add(
        &self,
        first: u32,
        chunks: &[Chunk<T>],
        kind: Direction,
        mut free: Vec<Slot>,
    ) {
        let depot = &mut *self.depot.lock();
        depot.live += chunks.len();
        for (entry, chunk) in depot.chunks[first as usize..].iter_mut().zip(chunks) {
            *entry = Some(*chunk);
        }
        // Room for all slots, as any may come here.
        let live = depot.live;
        let missing = live.saturating_sub(depot.shelf.len());
        depot.shelf.reserve(kind, missing);
        // The lowest number on top.
        while let Some(slot) = free.pop() {
            depot.shelf.push(slot);
        }
    }

    /// The memory of a slot.
    pub(super) fn chunk(&self, number: u32) -> Option<Chunk<T>> {
        *self.depot.lock().chunks.get(number as usize)?
    }

    /// Takes the memory of slots away and puts it into `into`.
    pub(super) fn strip(&self, numbers: impl Iterator<Item = u32>, into: &mut Vec<Chunk<T>>) {
        let depot = &mut *self.depot.lock();
        for number in numbers {
            if let Some(chunk) = depot.chunks.get_mut(number as usize).and_then(Option::take) {
                into.push(chunk);
                depot.live -= 1;
                depot.bare.push(Reverse(number));
            }
        }
    }

    /// Counts slots that the device may still reach, `new` of which were never added: they are
    /// never used again.
    pub(super) fn quarantine(&self, slots: usize, new: usize) {
        let depot = &mut *self.depot.lock();
        depot.live += new;
        depot.quarantined += slots;
    }

    /// The number of slots that have memory, and of those in quarantine.
    pub(super) fn live(&self) -> (usize, usize) {
        let depot = self.depot.lock();
        (depot.live, depot.quarantined)
    }

    /// The statistics of the zone.
    pub(super) fn stats(&self) -> ClassStats {
        let mut kept = 0;
        self.each_shelf(|shelf| kept += shelf.len());
        let (live, quarantined) = self.live();
        ClassStats {
            slot_bytes: self.slot_bytes(),
            range: self.range,
            used: live.saturating_sub(quarantined).saturating_sub(kept) as u64,
            kept: kept as u64,
            room: self.slots.into(),
        }
    }
}
