//! The state that all CPUs share, under one lock: the free granules, and what is in no slab.

use alloc::{collections::BTreeMap, sync::Arc, vec::Vec};
use core::ops::ControlFlow;

use super::{
    Placement,
    index::Index,
    key::{Key, slot_of},
    slab::{Handle, Slab},
    tree::{Tree, order_of},
};
use crate::aperture::GranuleRequest;

/// Slabs in a page: 4 KiB of them.
#[cfg(not(loom))]
const PAGE: usize = 32;
#[cfg(loom)]
const PAGE: usize = 2;

/// The state that all CPUs share.
pub(super) struct Core {
    pub(super) tree: Tree,
    /// Ranges that are in no slab, or in none any more: first and last granule of each.
    pub(super) exact: BTreeMap<u64, u64>,
    /// Reserved ranges: first and last granule of each, not touching one another.
    pub(super) reserved: BTreeMap<u64, u64>,
    /// Slabs, in memory that is neither moved nor freed: see [`Handle`]. Shared pointers, as unique
    /// ones would forbid the handles.
    pub(super) pages: Vec<Arc<[Slab]>>,
    /// Slabs not in use.
    pub(super) unused: Vec<Handle>,
    /// Searches of the tree.
    pub(super) searches: u64,
    /// How many ranges came from the tree.
    pub(super) found: u64,
}

impl Core {
    pub(super) fn new(tree: Tree) -> Core {
        Core {
            tree,
            exact: BTreeMap::new(),
            reserved: BTreeMap::new(),
            pages: Vec::new(),
            unused: Vec::new(),
            searches: 0,
            found: 0,
        }
    }

    /// All slabs that own ranges.
    pub(super) fn slabs(&self) -> impl Iterator<Item = &Slab> {
        self.pages.iter().flat_map(|page| page.iter()).filter(|slab| slab.owned() != 0)
    }

    /// The slab with that key; a new one, detached, if there is none.
    pub(super) fn slab_at(&mut self, index: &Index, key: Key) -> Handle {
        if let Some(slab) = index.get(key.region()) {
            return slab;
        }
        let slab = self.unused.pop().unwrap_or_else(|| self.more_slabs());
        slab.set_up(key);
        index.set(key.region(), Some(slab));
        slab
    }

    #[cold]
    fn more_slabs(&mut self) -> Handle {
        let page: Arc<[Slab]> = (0..PAGE).map(|_| Slab::none()).collect();
        self.unused.extend(page[1..].iter().rev().map(Handle::new));
        let first = Handle::new(&page[0]);
        self.pages.push(page);
        first
    }

    /// Finds a place for a request.
    pub(super) fn place(&mut self, wanted: &GranuleRequest, placement: Placement) -> Option<u64> {
        self.searches += 1;
        let (count, limit) = (wanted.count, wanted.limit);
        let Some(natural) = 1u64.checked_shl(order_of(count)) else {
            return self.place_anywhere(wanted, placement);
        };
        let find = |tree: &Tree, count| match placement {
            Placement::Lowest => tree.lowest(count, limit),
            Placement::SizeAligned | Placement::Highest => tree.highest(count, limit),
        };
        // A naturally aligned range crosses no boundary, as boundaries are at least its size apart.
        if wanted.align == natural {
            return find(&self.tree, count);
        }
        if placement == Placement::SizeAligned {
            // With more alignment than its natural one: a place for a size that is aligned that
            // much naturally.
            let sure = if wanted.align > natural { wanted.align / 2 + 1 } else { count };
            if let Some(place) = find(&self.tree, sure) {
                return Some(place);
            }
        }
        self.place_anywhere(wanted, placement)
    }

    /// The last resort, for requests with another alignment than their natural one: examines every
    /// hole.
    fn place_anywhere(&self, wanted: &GranuleRequest, placement: Placement) -> Option<u64> {
        let mut place = None;
        let end = self.tree.runs_up(0, wanted.limit, &mut |low, high| {
            if placement == Placement::Lowest {
                return match wanted.lowest_in(low, high) {
                    Some(place) => ControlFlow::Break(place),
                    None => ControlFlow::Continue(()),
                };
            }
            place = wanted.highest_in(low, high).or(place);
            ControlFlow::Continue(())
        });
        match end {
            ControlFlow::Break(place) => Some(place),
            ControlFlow::Continue(()) => place,
        }
    }

    /// Takes a range at `number` and records it: as a range of a slab if its size and alignment allow,
    /// otherwise on its own.
    pub(super) fn enter(&mut self, indexes: &[Index], number: u64, count: u64) {
        self.tree.take(number, count);
        let class = order_of(count);
        let whole = number.trailing_zeros() >= class && count.is_power_of_two();
        match indexes.get(class as usize).filter(|_| whole) {
            Some(index) => {
                let slot = slot_of(number, class);
                self.slab_at(index, Key::of(number, class)).own(1 << slot);
            }
            None => {
                self.exact.insert(number, number + (count - 1));
            }
        }
    }

    /// Takes the free ranges out of a slab that is in no list, and detaches the slab from its CPU.
    pub(super) fn withdraw(&mut self, indexes: &[Index], slab: Handle) {
        let free = slab.freeze();
        self.take_back(indexes, slab, free);
    }

    /// Takes the free ranges out of all loose slabs.
    pub(super) fn withdraw_loose(&mut self, indexes: &[Index]) {
        for page in 0..self.pages.len() {
            for number in 0..PAGE {
                self.withdraw_if_loose(indexes, Handle::new(&self.pages[page][number]));
            }
        }
    }

    /// Takes the free range out of a slab if it is loose.
    pub(super) fn withdraw_if_loose(&mut self, indexes: &[Index], slab: Handle) {
        if slab.owned() != 0
            && let Some(free) = slab.freeze_loose()
        {
            self.take_back(indexes, slab, free);
        }
    }

    /// Ends the freezing of a slab that is in no list: its `free` ranges go back to the tree.
    pub(super) fn take_back(&mut self, indexes: &[Index], slab: Handle, free: u32) {
        let class = slab.class();
        slab.disown(free);
        let mut rest = u64::from(free);
        while rest != 0 {
            let from = rest.trailing_zeros();
            let length = (!(rest >> from)).trailing_zeros();
            self.tree.give(slab.key().number(from), u64::from(length) << class);
            rest &= u64::MAX << (from + length);
        }
        if slab.is_empty() {
            self.retire(indexes, slab);
        } else {
            slab.thaw_detached();
        }
    }

    /// Retires a frozen slab that owns nothing.
    fn retire(&mut self, indexes: &[Index], slab: Handle) {
        let key = slab.key();
        indexes[key.class() as usize].set(key.region(), None);
        self.unused.push(slab);
    }

    /// Retires a slab if it owns nothing and is attached to no CPU.
    pub(super) fn retire_lost(&mut self, indexes: &[Index], slab: Handle) {
        if slab.is_empty() && !slab.is_attached() && !slab.is_frozen() {
            let free = slab.freeze();
            debug_assert_eq!(free, 0);
            self.retire(indexes, slab);
        }
    }

    /// Cuts off the unused tails of all ranges that are shorter than their class.
    pub(super) fn trim(&mut self) {
        let Core { pages, tree, exact, .. } = self;
        let slabs = pages.iter().flat_map(|page| page.iter());
        for slab in slabs.filter(|slab| slab.owned() != 0 && slab.has_shorter()) {
            let free = slab.freeze();
            slab.cut_tails(free, |number, count, tail| {
                exact.insert(number, number + (count - 1));
                tree.give(number + count, tail);
            });
            slab.thaw(free);
        }
    }

    /// The parts of `low..=high` that are not reserved.
    pub(super) fn unreserved(&self, low: u64, high: u64) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        let mut next = Some(low);
        let before = self.reserved.range(..=low).next_back();
        for (&first, &last) in before.into_iter().chain(
            self.reserved
                .range((core::ops::Bound::Excluded(low), core::ops::Bound::Included(high))),
        ) {
            let Some(start) = next else { break };
            if first > start {
                parts.push((start, first - 1));
            }
            if last >= start {
                next = last.checked_add(1);
            }
        }
        if let Some(start) = next.filter(|start| *start <= high) {
            parts.push((start, high));
        }
        parts
    }

    /// Records a reservation, merged with those that it touches.
    pub(super) fn note_reserved(&mut self, mut low: u64, mut high: u64) {
        while let Some((&first, &last)) = self.reserved.range(..=high.saturating_add(1)).next_back()
            && last.saturating_add(1) >= low
        {
            self.reserved.remove(&first);
            (low, high) = (low.min(first), high.max(last));
        }
        self.reserved.insert(low, high);
    }

    pub(super) fn is_reserved(&self, number: u64) -> bool {
        holds(&self.reserved, number)
    }

    /// Whether `number` lies in a range that is in no slab.
    pub(super) fn exact_holds(&self, number: u64) -> bool {
        holds(&self.exact, number)
    }
}

/// Whether one of `ranges`, by first and last granule, contains `number`.
fn holds(ranges: &BTreeMap<u64, u64>, number: u64) -> bool {
    ranges.range(..=number).next_back().is_some_and(|(_, last)| *last >= number)
}
