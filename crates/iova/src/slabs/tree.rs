//! The free granules of an address space, in a radix tree that tracks what fits where.
//!
//! A request of `c` granules is *naturally aligned* if it starts at a multiple of the next power of
//! two. One number describes what fits so: the **fit** of a piece of address space is the largest
//! `c` that fits into it, naturally aligned. Anything smaller fits too, as its alignment is
//! smaller; so a node need only store the fit of each child, and a search descends straight to a
//! place, without backtracking. The fit of a node is the largest of its children's, or that of a
//! run of children that are free from end to end; for the latter a node also stores each child's
//! **prefix**, the number of free granules that it begins with.
//!
//! The depth bounds the steps of every operation and is logarithmic in the size of the address
//! space: 9 levels for 48 bits of 4 KiB granules. A piece that is wholly free or wholly taken has
//! no node, so the memory grows with the number of boundaries between free and taken, not with the
//! address space.

mod leaf;

use alloc::vec::Vec;
use core::ops::ControlFlow;

use leaf::Leaf;

/// Children of a node: 16. Fewer make the tree deeper, more make a node's sums longer: with 16 both
/// take about the same time.
const FAN_BITS: u32 = 4;
const FAN: usize = 1 << FAN_BITS;
/// Granules of a word, one a bit.
const WORD_BITS: u32 = 6;
/// Granules of a leaf, which holds words instead of children.
const LEAF_BITS: u32 = WORD_BITS + FAN_BITS;
/// No node: the child is wholly free or wholly taken.
const NONE: u32 = u32::MAX;

/// The summary of a piece of address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sum {
    /// The largest request that fits, naturally aligned.
    fit: u64,
    /// The free granules that it begins with.
    prefix: u64,
}

impl Sum {
    const TAKEN: Sum = Sum { fit: 0, prefix: 0 };

    const fn all(granules: u64) -> Sum {
        Sum { fit: granules, prefix: granules }
    }
}

#[derive(Clone)]
struct Inner {
    fits: [u64; FAN],
    prefixes: [u64; FAN],
    children: [u32; FAN],
}

/// Nodes of one kind, with a list of the unused ones.
struct Nodes<N> {
    nodes: Vec<N>,
    unused: Vec<u32>,
}

impl<N> Nodes<N> {
    const fn new() -> Nodes<N> {
        Nodes { nodes: Vec::new(), unused: Vec::new() }
    }

    fn add(&mut self, node: N) -> u32 {
        match self.unused.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    fn remove(&mut self, id: u32) {
        self.unused.push(id);
    }
}

/// The free granules of an address space.
pub(super) struct Tree {
    inners: Nodes<Inner>,
    leaves: Nodes<Leaf>,
    /// Levels of inner nodes above the leaves.
    depth: u32,
    root: u32,
    sum: Sum,
    #[cfg(test)]
    free: u64,
}

impl Tree {
    /// An address space up to the granule `high`, all of it taken.
    pub(super) fn new(high: u64) -> Tree {
        let bits = u64::BITS - high.leading_zeros();
        let depth = bits.saturating_sub(LEAF_BITS).div_ceil(FAN_BITS);
        let mut tree = Tree {
            inners: Nodes::new(),
            leaves: Nodes::new(),
            depth,
            root: NONE,
            sum: Sum::TAKEN,
            #[cfg(test)]
            free: 0,
        };
        tree.root = tree.make(depth, false);
        tree
    }

    /// The largest request that fits anywhere, naturally aligned.
    pub(super) const fn fit(&self) -> u64 {
        self.sum.fit
    }

    /// How many granules are free.
    #[cfg(test)]
    pub(super) const fn free(&self) -> u64 {
        self.free
    }

    /// Bytes of memory in use.
    #[cfg(all(test, not(loom)))]
    pub(super) fn memory(&self) -> usize {
        self.inners.nodes.capacity() * size_of::<Inner>()
            + self.leaves.nodes.capacity() * size_of::<Leaf>()
            + (self.inners.unused.capacity() + self.leaves.unused.capacity()) * size_of::<u32>()
    }

    /// Makes `count` granules from `first` on free. They must all be taken, and granule 0 must
    /// never be among them.
    pub(super) fn give(&mut self, first: u64, count: u64) {
        debug_assert!(first != 0 && self.is_taken(first, count));
        #[cfg(test)]
        {
            self.free += count;
        }
        self.sum = self.set(self.depth, self.root, first, first + (count - 1), true);
    }

    /// Takes `count` granules from `first` on. They must all be free.
    pub(super) fn take(&mut self, first: u64, count: u64) {
        debug_assert_eq!(self.first_taken(first, first + (count - 1)), None);
        #[cfg(test)]
        {
            self.free -= count;
        }
        self.sum = self.set(self.depth, self.root, first, first + (count - 1), false);
    }

    /// The highest naturally aligned place for `count` granules that end at or below `limit`.
    pub(super) fn highest(&self, count: u64, limit: u64) -> Option<u64> {
        if count > self.sum.fit {
            return None;
        }
        self.highest_in(self.depth, self.root, &Natural::new(count), self.clamp(limit))
    }

    /// The lowest naturally aligned place for `count` granules that end at or below `limit`.
    pub(super) fn lowest(&self, count: u64, limit: u64) -> Option<u64> {
        if count > self.sum.fit {
            return None;
        }
        let place = self.lowest_in(self.depth, self.root, &Natural::new(count));
        // Any other place ends even higher.
        place.filter(|place| place + (count - 1) <= limit)
    }

    /// The first granule in `first..=last` that is taken.
    pub(super) fn first_taken(&self, first: u64, last: u64) -> Option<u64> {
        let mut next = first;
        let found = self.runs_up(first, last, &mut |low, high| {
            if low > next {
                return ControlFlow::Break(next);
            }
            match high.checked_add(1) {
                Some(after) => next = after,
                None => return ControlFlow::Break(u64::MAX),
            }
            ControlFlow::Continue(())
        });
        match found {
            ControlFlow::Break(u64::MAX) => None,
            ControlFlow::Break(taken) => Some(taken),
            ControlFlow::Continue(()) => (next <= last).then_some(next),
        }
    }

    fn is_taken(&self, first: u64, count: u64) -> bool {
        self.runs_up(first, first + (count - 1), &mut |_, _| ControlFlow::Break(())).is_continue()
    }

    /// Calls `run` with every free run in `first..=last`, from the lowest to the highest, clipped
    /// at both ends. Takes time for each run: for requests that cannot be met otherwise.
    pub(super) fn runs_up<B>(
        &self,
        first: u64,
        last: u64,
        run: &mut dyn FnMut(u64, u64) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let mut pending: Option<(u64, u64)> = None;
        let last = self.clamp(last);
        if first > last {
            return ControlFlow::Continue(());
        }
        self.visit(self.depth, self.root, 0, first, last, &mut |low, high| {
            match &mut pending {
                Some((_, end)) if end.checked_add(1) == Some(low) => *end = high,
                Some((start, end)) => {
                    let whole = (*start, *end);
                    pending = Some((low, high));
                    return run(whole.0, whole.1);
                }
                None => pending = Some((low, high)),
            }
            ControlFlow::Continue(())
        })?;
        match pending {
            Some((start, end)) => run(start, end),
            None => ControlFlow::Continue(()),
        }
    }

    /// `limit`, or the last granule of the tree if that is lower.
    fn clamp(&self, limit: u64) -> u64 {
        let bits = LEAF_BITS + FAN_BITS * self.depth;
        if bits >= u64::BITS { limit } else { limit.min((1 << bits) - 1) }
    }

    /// A node `level` levels above the leaves, wholly free or wholly taken.
    fn make(&mut self, level: u32, free: bool) -> u32 {
        if level == 0 {
            return self.leaves.add(Leaf::new(free));
        }
        let size = if free { 1u64 << child_bits(level) } else { 0 };
        self.inners.add(Inner { fits: [size; FAN], prefixes: [size; FAN], children: [NONE; FAN] })
    }

    /// Removes a node that is wholly free or wholly taken, and all below it.
    fn remove(&mut self, level: u32, id: u32) {
        if level == 0 {
            self.leaves.remove(id);
            return;
        }
        for index in 0..FAN {
            let child = self.inners.nodes[id as usize].children[index];
            if child != NONE {
                self.remove(level - 1, child);
            }
        }
        self.inners.remove(id);
    }

    /// Makes `low..=high` of a node free or taken.
    fn set(&mut self, level: u32, id: u32, low: u64, high: u64, free: bool) -> Sum {
        if level == 0 {
            return self.leaves.nodes[id as usize].set(low as usize, high as usize, free);
        }
        let bits = child_bits(level);
        let size = 1u64 << bits;
        let (from, to) = ((low >> bits) as usize, (high >> bits) as usize);
        for index in from..=to {
            let start = if index == from { low & (size - 1) } else { 0 };
            let end = if index == to { high & (size - 1) } else { size - 1 };
            let mut child = self.inners.nodes[id as usize].children[index];
            let sum = if start == 0 && end == size - 1 {
                if child != NONE {
                    self.remove(level - 1, child);
                    child = NONE;
                }
                if free { Sum::all(size) } else { Sum::TAKEN }
            } else {
                if child == NONE {
                    child = self.make(level - 1, !free);
                }
                let sum = self.set(level - 1, child, start, end, free);
                if sum.fit == 0 || sum.fit == size {
                    self.remove(level - 1, child);
                    child = NONE;
                }
                sum
            };
            let node = &mut self.inners.nodes[id as usize];
            node.children[index] = child;
            node.fits[index] = sum.fit;
            node.prefixes[index] = sum.prefix;
        }
        let node = &self.inners.nodes[id as usize];
        sum(&node.fits, &node.prefixes, bits)
    }

    fn highest_in(&self, level: u32, id: u32, wanted: &Natural, limit: u64) -> Option<u64> {
        if level == 0 {
            return self.leaves.nodes[id as usize].highest(wanted, limit);
        }
        let node = &self.inners.nodes[id as usize];
        let bits = child_bits(level);
        if wanted.order > bits {
            return runs(&node.prefixes, bits, wanted).find(|place| {
                place.checked_add(wanted.count - 1).is_some_and(|last| last <= limit)
            });
        }
        let top = (limit >> bits) as usize;
        for index in (0..=top.min(FAN - 1)).rev() {
            if node.fits[index] < wanted.count {
                continue;
            }
            // Only the child that contains the limit may turn out to have no place.
            let within = if index == top { limit & ((1 << bits) - 1) } else { (1 << bits) - 1 };
            let place = match node.children[index] {
                NONE => wanted.highest(within),
                child => self.highest_in(level - 1, child, wanted, within),
            };
            if let Some(place) = place {
                return Some(((index as u64) << bits) + place);
            }
        }
        None
    }

    fn lowest_in(&self, level: u32, id: u32, wanted: &Natural) -> Option<u64> {
        if level == 0 {
            return self.leaves.nodes[id as usize].lowest(wanted);
        }
        let node = &self.inners.nodes[id as usize];
        let bits = child_bits(level);
        if wanted.order > bits {
            return runs(&node.prefixes, bits, wanted).last();
        }
        let index = node.fits.iter().position(|fit| *fit >= wanted.count)?;
        let place = match node.children[index] {
            NONE => 0,
            child => self.lowest_in(level - 1, child, wanted)?,
        };
        Some(((index as u64) << bits) + place)
    }

    /// Calls `run` with free runs in `first..=last` of a node that begins at `base`. Runs that
    /// continue in the next node come in pieces.
    fn visit<B>(
        &self,
        level: u32,
        id: u32,
        base: u64,
        first: u64,
        last: u64,
        run: &mut dyn FnMut(u64, u64) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if level == 0 {
            return self.leaves.nodes[id as usize].visit(base, first, last, run);
        }
        let bits = child_bits(level);
        let size = 1u64 << bits;
        let node = &self.inners.nodes[id as usize];
        let (from, to) = (((first - base) >> bits) as usize, ((last - base) >> bits) as usize);
        for index in from..=to.min(FAN - 1) {
            if node.fits[index] == 0 {
                continue;
            }
            let start = base + ((index as u64) << bits);
            let (low, high) = (first.max(start), last.min(start + (size - 1)));
            match node.children[index] {
                NONE => run(low, high)?,
                child => self.visit(level - 1, child, start, low, high, run)?,
            }
        }
        ControlFlow::Continue(())
    }
}

/// Granules of a child, as a power of two.
const fn child_bits(level: u32) -> u32 {
    LEAF_BITS + FAN_BITS * (level - 1)
}

/// A request that is aligned to its size.
struct Natural {
    count: u64,
    /// The exponent of its size, rounded up to a power of two, and so of its alignment.
    order: u32,
}

impl Natural {
    fn new(count: u64) -> Natural {
        Natural { count, order: order_of(count) }
    }

    /// The highest place in a free piece of address space that ends at `limit`.
    fn highest(&self, limit: u64) -> Option<u64> {
        Some(limit.checked_sub(self.count - 1)? & !((1 << self.order) - 1))
    }
}

/// The power of two that `count` rounds up to. Not for 0.
pub(super) const fn order_of(count: u64) -> u32 {
    u64::BITS - (count - 1).leading_zeros()
}

/// The sum of a node, of whose children of 2^`bits` granules these are the fits and prefixes.
#[inline]
fn sum<N: Copy + Into<u64>>(fits: &[N; FAN], prefixes: &[N; FAN], bits: u32) -> Sum {
    let size = 1u64 << bits;
    // From the highest child to the lowest: `run` is what is free from the start of each on.
    let (mut fit, mut run) = (0, 0u64);
    for index in (0..FAN).rev() {
        fit = fit.max(fits[index].into());
        let prefix = prefixes[index].into();
        if prefix == size {
            // Granule 0 is always taken, so no run is 2^64 granules long.
            run += size;
            // A request that starts here is no larger than the alignment of the place.
            let aligned = match index {
                0 => u64::MAX,
                _ => size.saturating_mul(1 << index.trailing_zeros()),
            };
            fit = fit.max(run.min(aligned));
        } else {
            run = prefix;
        }
    }
    Sum { fit, prefix: run }
}

/// The places for a request larger than a child of 2^`bits` granules, from the highest on.
#[inline]
fn runs<N: Copy + Into<u64>>(
    prefixes: &[N; FAN],
    bits: u32,
    wanted: &Natural,
) -> impl Iterator<Item = u64> {
    let (size, step) = (1u64 << bits, 1usize.checked_shl(wanted.order - bits));
    let mut run = 0u64;
    (0..FAN).rev().filter_map(move |index| {
        run = match prefixes[index].into() {
            prefix if prefix == size => run + size,
            prefix => prefix,
        };
        let aligned = index % step.unwrap_or(usize::MAX) == 0;
        (aligned && run >= wanted.count).then_some((index as u64) << bits)
    })
}

#[cfg(all(test, not(loom)))]
mod tests;
