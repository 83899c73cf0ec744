//! Which slots of a backing hold which pages.

/// Slots, 64 to a word: slots taken together are adjacent, so that one call fills them.
pub(super) struct Slots {
    /// A set bit is a free slot.
    free: Vec<u64>,
    /// No word before this one has a free slot.
    first: usize,
    /// No word before this one is free as a whole.
    whole: usize,
    held: Vec<SlotPages>,
}

/// What a slot holds: pages of one window.
#[derive(Clone, Copy, Default)]
pub(super) struct SlotPages {
    /// The first page, counted from the start of its window.
    pub(super) first: usize,
    /// How many there are.
    pub(super) pages: u32,
    /// How many of them are pinned.
    pub(super) live: u32,
}

impl Slots {
    /// `slots` slots, of which at most `first` have a number below 64.
    pub(super) fn new(slots: u32, first: u32) -> Slots {
        let first = first.clamp(1, 64).min(slots);
        let (rest, all) = ((slots - first) as usize, slots as usize);
        let mut free = vec![mask(first)];
        free.resize(1 + rest.div_ceil(64), u64::MAX);
        if let (1.., Some(last)) = (rest % 64, free.last_mut()) {
            *last = mask((rest % 64) as u32);
        }
        let numbers = if rest == 0 { all } else { 64 + rest };
        Slots { free, first: 0, whole: 0, held: vec![SlotPages::default(); numbers] }
    }

    /// Takes up to `want` adjacent slots, at least one; returns the first, and how many.
    #[inline(always)]
    pub(super) fn take(&mut self, want: usize) -> Option<(u32, usize)> {
        let word = if want > 1 { self.find_whole() } else { None };
        let word = match word {
            Some(word) => word,
            None if self.free.get(self.first).is_some_and(|&bits| bits != 0) => self.first,
            None => self.find_any()?,
        };
        let bits = self.free[word];
        let at = bits.trailing_zeros();
        let many = (!(bits >> at)).trailing_zeros().min(64 - at).min(want.min(64) as u32);
        self.free[word] = bits & !(mask(many) << at);
        Some((word as u32 * 64 + at, many as usize))
    }

    /// Gives back `many` slots from `slot`, all of one word.
    #[inline(always)]
    pub(super) fn give(&mut self, slot: u32, many: usize) {
        let word = (slot / 64) as usize;
        self.free[word] |= mask(many as u32) << (slot % 64);
        self.first = self.first.min(word);
        self.whole = self.whole.min(word);
    }

    #[inline(always)]
    pub(super) fn held(&mut self, slot: u32) -> &mut SlotPages {
        &mut self.held[slot as usize]
    }

    fn find_any(&mut self) -> Option<usize> {
        let next = self.free.get(self.first..)?.iter().position(|&bits| bits != 0)?;
        self.first += next;
        Some(self.first)
    }

    fn find_whole(&mut self) -> Option<usize> {
        let rest = self.free.get(self.whole..)?;
        let next = rest.iter().position(|&bits| bits == u64::MAX);
        self.whole += next.unwrap_or(rest.len());
        next.map(|_| self.whole)
    }
}

fn mask(many: u32) -> u64 {
    u64::MAX.checked_shr(64 - many).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slots_are_those_of_a_set(
            size in 1..300_u32,
            first in 1..65_u32,
            steps in prop::collection::vec((any::<bool>(), 0..300_usize), 1..200),
        ) {
            let mut slots = Slots::new(size, first);
            let mut taken = Vec::<(u32, usize)>::new();
            let mut set = std::collections::BTreeSet::new();
            for (take, n) in steps {
                if take {
                    match slots.take(n + 1) {
                        Some((slot, many)) => {
                            prop_assert!((1..=n + 1).contains(&many));
                            prop_assert_eq!(slot / 64, (slot + many as u32 - 1) / 64);
                            for slot in slot..slot + many as u32 {
                                prop_assert!(slot < first || slot >= 64);
                                prop_assert!(slot < size.max(size + 64 - first.min(size)));
                                prop_assert!(set.insert(slot));
                            }
                            taken.push((slot, many));
                        }
                        None => prop_assert_eq!(set.len(), size as usize),
                    }
                } else if !taken.is_empty() {
                    let (slot, many) = taken.swap_remove(n % taken.len());
                    (slot..slot + many as u32).for_each(|slot| _ = set.remove(&slot));
                    slots.give(slot, many);
                }
            }
        }
    }

    #[test]
    fn what_is_taken_together_lies_side_by_side() {
        let mut slots = Slots::new(256, 64);
        let (lone, _) = slots.take(1).unwrap();
        assert_eq!(slots.take(64), Some((64, 64)));
        assert_eq!(slots.take(100), Some((128, 64)));
        slots.give(lone, 1);
        assert_eq!(slots.take(1000), Some((0, 64)));
    }
}
