//! The holder of each slot of a zone, for the leak detector.

use core::{array, cmp::Reverse, panic::Location, ptr};
use std::{
    collections::HashMap,
    sync::{
        OnceLock,
        atomic::{AtomicPtr, AtomicU32, Ordering},
    },
};

use ringfence_iommu::Address;

use super::{BouncePools, Holder};

/// How many marks are allocated at a time, when the first of them is needed.
const BLOCK: usize = 64;

/// The holder of a slot, and since when.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotOwner {
    /// Where in the program it was taken.
    pub(super) at: &'static Location<'static>,
    pub(super) tick: u32,
}

/// The marks of a zone's slots, by number. Only for diagnosis: they are written with relaxed
/// stores, so that the two parts of a mark may be seen out of step.
pub(super) struct Marks(Box<[OnceLock<Box<[Mark; BLOCK]>>]>);

#[derive(Default)]
struct Mark {
    /// Null if the slot is free.
    at: AtomicPtr<Location<'static>>,
    tick: AtomicU32,
}

impl Marks {
    pub(super) fn new(slots: u32) -> Marks {
        Marks((0..slots.div_ceil(BLOCK as u32)).map(|_| OnceLock::new()).collect())
    }

    /// Makes sure that there is a mark for `number`, so that [`set`](Self::set) allocates nothing.
    pub(super) fn prepare(&self, number: u32) {
        if let Some(block) = self.0.get(number as usize / BLOCK) {
            block.get_or_init(|| Box::new(array::from_fn(|_| Mark::default())));
        }
    }

    #[inline]
    fn mark(&self, number: u32) -> Option<&Mark> {
        let number = number as usize;
        Some(&self.0.get(number / BLOCK)?.get()?[Self::place(number)])
    }

    /// The place of a slot's mark in its block: apart from those of its neighbours, which other
    /// CPUs often hold, so that they do not share a cache line.
    #[inline]
    fn place(number: usize) -> usize {
        number % 4 * (BLOCK / 4) + number / 4 % (BLOCK / 4)
    }

    #[inline]
    pub(super) fn set(&self, number: u32, held: SlotOwner) {
        if let Some(mark) = self.mark(number) {
            mark.tick.store(held.tick, Ordering::Relaxed);
            mark.at.store(ptr::from_ref(held.at).cast_mut(), Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn clear(&self, number: u32) {
        if let Some(mark) = self.mark(number) {
            mark.at.store(ptr::null_mut(), Ordering::Relaxed);
        }
    }

    pub(super) fn get(&self, number: u32) -> Option<SlotOwner> {
        let mark = self.mark(number)?;
        let at = mark.at.load(Ordering::Relaxed);
        // SAFETY: it is null, or what `set` stored: a `'static` reference.
        let at = unsafe { at.as_ref() }?;
        Some(SlotOwner { at, tick: mark.tick.load(Ordering::Relaxed) })
    }

    /// The owners of all slots that are held.
    pub(super) fn held(&self) -> impl Iterator<Item = SlotOwner> + '_ {
        let blocks = self.0.iter().enumerate().filter(|(_, block)| block.get().is_some());
        blocks.flat_map(move |(block, _)| {
            (0..BLOCK).filter_map(move |at| self.get((block * BLOCK + at) as u32))
        })
    }
}

impl<T: Address> BouncePools<T> {
    /// The places in the program that hold slots, those with the most bytes first.
    pub fn holders(&self) -> Vec<Holder> {
        let mut holders: HashMap<_, Holder> = HashMap::new();
        let mut note = |held: SlotOwner, size: u64| {
            let at = held.at;
            let place = (at.file(), at.line(), at.column());
            let none = Holder { at, slots: 0, bytes: 0, oldest: Default::default() };
            let holder = holders.entry(place).or_insert(none);
            holder.slots += 1;
            holder.bytes += size;
            holder.oldest = holder.oldest.max(self.0.age(held.tick));
        };
        for zone in self.0.zones() {
            zone.marks.held().for_each(|held| note(held, zone.slot_bytes()));
        }
        for single in self.0.singles.held() {
            note(single.held, single.range.extent() + 1);
        }
        let mut holders: Vec<Holder> = holders.into_values().collect();
        holders.sort_by_key(|holder| Reverse((holder.bytes, holder.oldest)));
        holders
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn marks_of_a_block_are_all_different() {
        let mut places: Vec<usize> = (0..BLOCK).map(|n| Marks::place(BLOCK * 3 + n)).collect();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..BLOCK));
    }

    #[test]
    fn a_mark_names_its_place_and_its_time_until_it_is_cleared() {
        let marks = Marks::new(100);
        let held = |tick| SlotOwner { at: Location::caller(), tick };
        marks.set(99, held(1));
        assert!(marks.get(99).is_none(), "it was not prepared");
        marks.prepare(99);
        marks.set(99, held(u32::MAX));
        marks.prepare(1000);
        marks.set(1000, held(3));
        let found: Vec<SlotOwner> = marks.held().collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].tick, u32::MAX);
        assert_eq!(found[0].at.file(), file!());
        marks.clear(99);
        assert!(marks.held().next().is_none());
    }
}
