//! Which blocks of which chunks are free.

use std::collections::{BTreeMap, BTreeSet};

/// A block: its chunk, and where it begins there.
pub(super) type Place = (u64, u64);

/// Chunks of 2^`largest` bytes each, in blocks of 2^`smallest` bytes and more. A block that is
/// freed joins its buddy as soon as that is free too.
///
/// The lowest place is taken first, so that chunks that came later fall empty.
#[derive(Debug)]
pub(super) struct Buddy {
    smallest: u32,
    largest: u32,
    /// Free blocks by the logarithm of their size, from `smallest` on.
    free: Vec<BTreeSet<Place>>,
    /// Bytes in use of each chunk.
    used: BTreeMap<u64, u64>,
}

impl Buddy {
    pub(super) fn new(smallest: u32, largest: u32) -> Buddy {
        let orders = (smallest..=largest).map(|_| BTreeSet::new());
        Buddy { smallest, largest, free: orders.collect(), used: BTreeMap::new() }
    }

    /// Adds a chunk, all of it free.
    pub(super) fn add(&mut self, chunk: u64) {
        self.used.insert(chunk, 0);
        self.free_blocks(self.largest).insert((chunk, 0));
    }

    /// Takes a chunk away if nothing of it is in use; whether that was so.
    pub(super) fn remove(&mut self, chunk: u64) -> bool {
        if self.used.get(&chunk) != Some(&0) {
            return false;
        }
        self.used.remove(&chunk);
        self.free_blocks(self.largest).remove(&(chunk, 0))
    }

    /// Whether nothing of a chunk is in use.
    pub(super) fn is_empty(&self, chunk: u64) -> bool {
        self.used.get(&chunk) == Some(&0)
    }

    /// A block of 2^`order` bytes; `None` if none is free.
    pub(super) fn alloc(&mut self, order: u32) -> Option<Place> {
        let mut from = (order..=self.largest).find(|from| !self.free_blocks(*from).is_empty())?;
        let (chunk, offset) = self.free_blocks(from).pop_first()?;
        while from > order {
            from -= 1;
            self.free_blocks(from).insert((chunk, offset + (1 << from)));
        }
        *self.used.entry(chunk).or_default() += 1 << order;
        Some((chunk, offset))
    }

    /// Takes back a block that [`alloc`](Self::alloc) gave out for the same order.
    pub(super) fn free(&mut self, (chunk, mut offset): Place, order: u32) {
        if let Some(used) = self.used.get_mut(&chunk) {
            *used = used.saturating_sub(1 << order);
        }
        let mut order = order;
        while order < self.largest
            && self.free_blocks(order).remove(&(chunk, offset ^ (1 << order)))
        {
            offset &= !(1 << order);
            order += 1;
        }
        self.free_blocks(order).insert((chunk, offset));
    }

    fn free_blocks(&mut self, order: u32) -> &mut BTreeSet<Place> {
        &mut self.free[(order - self.smallest) as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Add,
        Remove(u64),
        Alloc(u32),
        Free(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            1 => Just(Step::Add),
            1 => (0..6u64).prop_map(Step::Remove),
            6 => (6..=10u32).prop_map(Step::Alloc),
            5 => any::<usize>().prop_map(Step::Free),
        ]
    }

    proptest! {
        // Against a map of bits, one for every 64 bytes, in which aligned holes are looked for.
        #[test]
        fn a_block_is_found_where_an_aligned_hole_is(
            steps in prop::collection::vec(step(), 0..200),
        ) {
            let mut buddy = Buddy::new(6, 10);
            let mut bits: BTreeMap<u64, [bool; 16]> = BTreeMap::new();
            let mut blocks: Vec<(Place, u32)> = Vec::new();
            let mut next = 0;
            for step in steps {
                match step {
                    Step::Add => {
                        buddy.add(next);
                        bits.insert(next, [false; 16]);
                        next += 1;
                    }
                    Step::Remove(chunk) => {
                        let empty = bits.get(&chunk).is_some_and(|bits| *bits == [false; 16]);
                        prop_assert_eq!(buddy.is_empty(chunk), empty);
                        prop_assert_eq!(buddy.remove(chunk), empty);
                        if empty {
                            bits.remove(&chunk);
                        }
                    }
                    Step::Alloc(order) => {
                        let count = 1usize << (order - 6);
                        let hole = bits.values().any(|bits| {
                            bits.chunks(count).any(|hole| hole.iter().all(|taken| !taken))
                        });
                        let block = buddy.alloc(order);
                        prop_assert_eq!(block.is_some(), hole);
                        let Some((chunk, offset)) = block else { continue };
                        prop_assert_eq!(offset % (1 << order), 0);
                        let first = offset as usize / 64;
                        for taken in &mut bits.get_mut(&chunk).unwrap()[first..first + count] {
                            prop_assert!(!*taken, "given out twice");
                            *taken = true;
                        }
                        blocks.push(((chunk, offset), order));
                    }
                    Step::Free(at) => {
                        if blocks.is_empty() {
                            continue;
                        }
                        let (place, order) = blocks.swap_remove(at % blocks.len());
                        buddy.free(place, order);
                        let first = place.1 as usize / 64;
                        let count = 1usize << (order - 6);
                        bits.get_mut(&place.0).unwrap()[first..first + count].fill(false);
                    }
                }
            }
        }
    }
}
