//! Free slots, by the direction for which they are mapped.

use crate::{Direction, bounce::Slot};

/// How many kinds of slots there are: one for each direction.
const KINDS: usize = Direction::Bidirectional as usize + 1;

/// Free slots of one kind: the slot given back last is taken first, as its bytes are still cached.
#[derive(Default)]
struct Stack {
    slots: Vec<Slot>,
    /// The least number of slots that it held since the interval began: that many were not needed.
    low: usize,
}

/// Free slots of all kinds.
#[derive(Default)]
pub(super) struct Shelf {
    kinds: [Stack; KINDS],
    len: usize,
    /// Whether any slot came or went since the interval began.
    touched: bool,
}

impl Shelf {
    /// How many slots it holds.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn pop(&mut self, kind: Direction) -> Option<Slot> {
        self.touched = true;
        let stack = &mut self.kinds[kind as usize];
        let slot = stack.slots.pop()?;
        stack.low = stack.low.min(stack.slots.len());
        self.len -= 1;
        Some(slot)
    }

    #[inline]
    pub(super) fn push(&mut self, slot: Slot) {
        self.touched = true;
        self.len += 1;
        self.kinds[slot.direction as usize].slots.push(slot);
    }

    /// Reserves room for `more` slots of a kind, so that pushing them allocates nothing.
    pub(super) fn reserve(&mut self, kind: Direction, more: usize) {
        self.kinds[kind as usize].slots.reserve(more);
    }

    /// Moves up to `most` slots of `kind` from `from`, the ones used last on top.
    pub(super) fn refill(&mut self, from: &mut Shelf, kind: Direction, most: usize) {
        let source = &mut from.kinds[kind as usize];
        let count = most.min(source.slots.len());
        let rest = source.slots.len() - count;
        self.kinds[kind as usize].slots.extend(source.slots.drain(rest..));
        source.low = source.low.min(rest);
        from.len -= count;
        self.len += count;
        from.touched = true;
    }

    /// Moves the coldest half (rounded up) of the kind that has most slots to `to`.
    pub(super) fn spill(&mut self, to: &mut Shelf) {
        let Some(most) = (0..KINDS).max_by_key(|&kind| self.kinds[kind].slots.len()) else {
            return;
        };
        let count = self.kinds[most].slots.len().div_ceil(2);
        to.kinds[most].slots.extend(self.kinds[most].cut(count));
        self.len -= count;
        to.len += count;
        to.touched = true;
    }

    /// The least recently used slot of another kind, of the kind with the most slots.
    pub(super) fn pop_other(&mut self, than: Direction) -> Option<Slot> {
        let other = (0..KINDS)
            .filter(|&kind| kind != than as usize && !self.kinds[kind].slots.is_empty())
            .max_by_key(|&kind| self.kinds[kind].slots.len())?;
        let slot = self.kinds[other].cut(1).next()?;
        self.len -= 1;
        self.touched = true;
        Some(slot)
    }

    /// How many of its slots were not needed since the interval began.
    pub(super) fn idle(&self) -> usize {
        self.kinds.iter().map(|stack| stack.low).sum()
    }

    /// Moves up to `most` slots to `into`, the least recently used first; if `idle`, only those that
    /// were not needed.
    pub(super) fn take(&mut self, most: usize, idle: bool, into: &mut Vec<Slot>) {
        let before = into.len();
        for stack in &mut self.kinds {
            let there = if idle { stack.low } else { stack.slots.len() };
            let count = there.min(most - (into.len() - before));
            into.extend(stack.cut(count));
        }
        self.len -= into.len() - before;
    }

    /// Begins an interval; returns whether any slot came or went in the one that ends.
    pub(super) fn begin_interval(&mut self) -> bool {
        self.kinds.iter_mut().for_each(|stack| stack.low = stack.slots.len());
        std::mem::take(&mut self.touched)
    }
}

impl Stack {
    /// Removes the `count` least recently used slots.
    fn cut(&mut self, count: usize) -> impl Iterator<Item = Slot> + '_ {
        self.low = self.low.saturating_sub(count).min(self.slots.len() - count);
        self.slots.drain(..count)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::ptr::NonNull;

    use ringfence_iommu::{Iova, Range};

    use super::*;

    fn slot(number: u64, direction: Direction) -> Slot {
        let range = Range::from_len(Iova(number << 12), 4096).unwrap();
        Slot { range, ptr: NonNull::dangling(), direction, dirty: 0, key: 0 }
    }

    fn numbers(slots: &[Slot]) -> Vec<u64> {
        slots.iter().map(|slot| slot.range.first().0 >> 12).collect()
    }

    #[test]
    fn idle_is_what_was_never_taken_in_an_interval() {
        let (mut shelf, kind) = (Shelf::default(), Direction::Bidirectional);
        (0..10).for_each(|number| shelf.push(slot(number, kind)));
        assert_eq!(shelf.idle(), 0, "they came in this interval");
        assert!(shelf.begin_interval());
        assert_eq!(shelf.idle(), 10);
        let used: Vec<Slot> = (0..4).map(|_| shelf.pop(kind).unwrap()).collect();
        assert_eq!(numbers(&used), [9, 8, 7, 6]);
        used.into_iter().for_each(|slot| shelf.push(slot));
        assert_eq!(shelf.idle(), 6);
        let mut idle = Vec::new();
        shelf.take(5, true, &mut idle);
        assert_eq!((numbers(&idle), shelf.idle(), shelf.len()), (vec![0, 1, 2, 3, 4], 1, 5));
        assert!(shelf.begin_interval());
        assert!(!shelf.begin_interval(), "nothing happened");
        assert_eq!(shelf.idle(), 5);
    }

    #[test]
    fn slots_go_from_shelf_to_shelf_and_none_is_lost() {
        let (mut cache, mut depot) = (Shelf::default(), Shelf::default());
        let (read, write) = (Direction::ToDevice, Direction::FromDevice);
        (0..5).for_each(|number| cache.push(slot(number, read)));
        (5..7).for_each(|number| cache.push(slot(number, write)));
        cache.spill(&mut depot);
        assert_eq!((cache.len(), depot.len()), (4, 3));
        assert_eq!(numbers(&[cache.pop(read).unwrap()]), [4], "the warmest stayed");
        cache.refill(&mut depot, read, 2);
        assert_eq!((cache.len(), depot.len()), (5, 1));
        assert_eq!(numbers(&[cache.pop_other(write).unwrap()]), [3]);
        assert_eq!(numbers(&[cache.pop_other(read).unwrap()]), [5]);
        let mut rest = Vec::new();
        cache.take(10, false, &mut rest);
        depot.take(10, false, &mut rest);
        let mut rest = numbers(&rest);
        rest.sort_unstable();
        assert_eq!((rest, cache.len(), depot.len()), (vec![0, 1, 2, 6], 0, 0));
        assert_eq!(cache.idle(), 0);
    }
}
