//! A linear pool of small slots: the shape of Linux's swiotlb, whose limits are the peers' limits.
//!
//! The pool is one block, set aside at the beginning. It is cut into slots of 2 KiB, 128 slots make
//! a segment, and a buffer lies in one segment: it has no more than 256 KiB. Slots belong to areas,
//! one for each CPU, each with a lock of its own; an area is searched slot by slot from where the
//! last search ended, and if it has no room, the next area is. Each slot knows how many free slots
//! follow it in its segment, and which memory it bounces.

use parking_lot::Mutex;

/// Bytes of a slot.
pub(super) const SLOT: u64 = 2048;
/// Slots of a segment, in which a buffer must lie.
const SEGMENT: usize = 128;
/// The longest buffer.
pub(super) const LONGEST: u64 = SLOT * SEGMENT as u64;
/// A buffer of so many bytes begins at a multiple of them.
const PAGE: u64 = 4096;

/// Tracks which slots of a block are taken, and for which memory. The block itself is the caller's.
pub(super) struct Linear {
    areas: Box<[Mutex<Area>]>,
    per_area: usize,
}

struct Area {
    slots: Box<[Slot]>,
    /// Where the next search begins.
    next: usize,
    used: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Free slots from this one to the next that is taken, or to the end of the segment; 0: taken.
    run: usize,
    /// The memory that it bounces.
    original: u64,
    /// Bytes of the buffer from here to its end; 0: free.
    len: u64,
}

impl Linear {
    /// Slots for a block of about `bytes`: as many whole segments for each of the areas, whose
    /// number is the next power of two from `cpus` on.
    pub(super) fn new(bytes: u64, cpus: usize) -> Linear {
        let segments = (bytes / LONGEST).max(1) as usize;
        let areas = cpus.max(1).next_power_of_two().min(1 << segments.ilog2());
        let per_area = segments / areas * SEGMENT;
        let area = || {
            let slot = |at: usize| Slot { run: SEGMENT - at % SEGMENT, ..Slot::default() };
            Mutex::new(Area { slots: (0..per_area).map(slot).collect(), next: 0, used: 0 })
        };
        Linear { areas: (0..areas).map(|_| area()).collect(), per_area }
    }

    /// Bytes of the block.
    pub(super) fn bytes(&self) -> u64 {
        (self.areas.len() * self.per_area) as u64 * SLOT
    }

    /// Bytes of slots that are taken.
    pub(super) fn used(&self) -> u64 {
        self.areas.iter().map(|area| area.lock().used as u64 * SLOT).sum()
    }

    /// Takes slots for `len` bytes of the memory at `original`, aligned to `align` (a power of two):
    /// where in the block they begin. `None` if there is no room.
    pub(super) fn take(&self, cpu: usize, original: u64, len: u64, align: u64) -> Option<u64> {
        if len == 0 || len > LONGEST {
            return None;
        }
        let align = if len >= PAGE { align.max(PAGE) } else { align };
        let stride = align.div_ceil(SLOT).clamp(1, SEGMENT as u64) as usize;
        (0..self.areas.len()).find_map(|turn| {
            let index = (cpu + turn) % self.areas.len();
            let at = self.areas[index].lock().take(original, len, stride)?;
            Some((index * self.per_area + at) as u64 * SLOT)
        })
    }

    /// Frees what [`take`](Self::take) gave; returns the memory that it bounced, and its length.
    /// `None`, and nothing is done, if no buffer begins there.
    pub(super) fn give_back(&self, offset: u64) -> Option<(u64, u64)> {
        let at = (offset / SLOT) as usize;
        let area = self.areas.get(at / self.per_area).filter(|_| offset.is_multiple_of(SLOT))?;
        area.lock().give_back(at % self.per_area)
    }
}

impl Area {
    fn take(&mut self, original: u64, len: u64, stride: usize) -> Option<usize> {
        let count = len.div_ceil(SLOT) as usize;
        if self.used + count > self.slots.len() {
            return None;
        }
        let mut at = self.next.next_multiple_of(stride);
        for _ in 0..self.slots.len() / stride {
            if at >= self.slots.len() {
                at = 0;
            }
            if self.slots[at].run >= count {
                for (index, slot) in self.slots[at..at + count].iter_mut().enumerate() {
                    let skipped = index as u64 * SLOT;
                    let original = original.wrapping_add(skipped);
                    *slot = Slot { run: 0, original, len: len - skipped };
                }
                self.recount(at, 0);
                self.next = at + count;
                self.used += count;
                return Some(at);
            }
            at += stride;
        }
        None
    }

    fn give_back(&mut self, at: usize) -> Option<(u64, u64)> {
        let Slot { original, len, .. } = self.slots[at];
        // The `len` of two neighbouring slots differs by this much only within one buffer.
        let inner = !at.is_multiple_of(SEGMENT) && self.slots[at - 1].len == len + SLOT;
        if len == 0 || inner {
            return None;
        }
        let next = at + len.div_ceil(SLOT) as usize;
        self.used -= next - at;
        let run = if next.is_multiple_of(SEGMENT) { 0 } else { self.slots[next].run };
        for (before, slot) in self.slots[at..next].iter_mut().rev().enumerate() {
            *slot = Slot { run: run + before + 1, ..Slot::default() };
        }
        self.recount(at, self.slots[at].run);
        Some((original, len))
    }

    /// Updates the free slots before `at`, in its segment: the run from `at` is `run` slots long.
    fn recount(&mut self, at: usize, mut run: usize) {
        let first = at / SEGMENT * SEGMENT;
        for slot in self.slots[first..at].iter_mut().rev().take_while(|slot| slot.run > 0) {
            run += 1;
            slot.run = run;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A flag a slot, and no attempt to be fast.
    struct Naive {
        taken: Vec<bool>,
        per_area: usize,
    }

    impl Naive {
        fn fits(&self, at: usize, len: u64, align: u64) -> bool {
            let count = len.div_ceil(SLOT) as usize;
            let align = if len >= PAGE { align.max(PAGE) } else { align };
            let whole = at / SEGMENT == (at + count - 1) / SEGMENT;
            let place = (at % self.per_area) as u64 * SLOT;
            whole && place.is_multiple_of(align) && !self.taken[at..at + count].contains(&true)
        }
    }

    proptest! {
        #[test]
        fn slots_are_of_one_owner_and_found_where_there_are_any(
            steps in prop::collection::vec((any::<bool>(), 1..=LONGEST, 0u32..4, 0usize..3, any::<prop::sample::Index>()), 1..200),
        ) {
            let linear = Linear::new(4 * LONGEST, 2);
            prop_assert_eq!(linear.bytes(), 4 * LONGEST);
            let mut naive = Naive { taken: vec![false; 4 * SEGMENT], per_area: 2 * SEGMENT };
            let mut held: Vec<(u64, u64, u64)> = Vec::new();
            for (take, len, shift, cpu, which) in steps {
                // Many small ones, so that there are holes.
                let len = if shift == 0 { len } else { len.div_ceil(40) };
                let align = SLOT << shift >> 1;
                if take || held.is_empty() {
                    let original = 4096 * held.len() as u64;
                    match linear.take(cpu, original, len, align) {
                        Some(offset) => {
                            let at = (offset / SLOT) as usize;
                            prop_assert!(naive.fits(at, len, align), "{} at {}", len, offset);
                            naive.taken[at..at + len.div_ceil(SLOT) as usize].fill(true);
                            held.push((offset, len, original));
                        }
                        None => {
                            let hole = (0..naive.taken.len()).find(|at| naive.fits(*at, len, align));
                            prop_assert_eq!(hole, None, "{} bytes would fit", len);
                        }
                    }
                } else {
                    let (offset, len, original) = held.swap_remove(which.index(held.len()));
                    prop_assert_eq!(linear.give_back(offset), Some((original, len)));
                    prop_assert_eq!(linear.give_back(offset), None, "twice");
                    let at = (offset / SLOT) as usize;
                    naive.taken[at..at + len.div_ceil(SLOT) as usize].fill(false);
                }
                let taken = naive.taken.iter().filter(|taken| **taken).count() as u64;
                prop_assert_eq!(linear.used(), taken * SLOT);
            }
        }
    }

    #[test]
    fn what_is_longer_than_a_segment_is_refused() {
        let linear = Linear::new(1 << 20, 1);
        assert_eq!(linear.take(0, 0, LONGEST + 1, 1), None);
        assert_eq!(linear.take(0, 0, 0, 1), None);
        assert_eq!(linear.take(0, 0, LONGEST, 1), Some(0));
        assert_eq!(linear.give_back(SLOT), None, "the middle of a buffer");
        assert_eq!((linear.give_back(1), linear.give_back(1 << 40)), (None, None));
        assert_eq!(linear.give_back(0), Some((0, LONGEST)));
        assert_eq!(linear.used(), 0);
    }

    #[test]
    fn a_search_goes_on_where_the_last_one_ended_and_then_in_other_areas() {
        let linear = Linear::new(2 * LONGEST, 2);
        assert_eq!(linear.take(0, 0, 100, 1), Some(0));
        assert_eq!(linear.give_back(0), Some((0, 100)));
        assert_eq!(linear.take(0, 0, 100, 1), Some(SLOT), "not the first again");
        assert_eq!(linear.take(1, 0, LONGEST, 1), Some(LONGEST), "its own area");
        assert_eq!(linear.take(1, 0, 100, 1), Some(2 * SLOT), "another's");
        assert_eq!(linear.take(0, 0, LONGEST, 1), None);
    }
}
