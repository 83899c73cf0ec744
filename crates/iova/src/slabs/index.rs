//! From a region to its slab, for readers that never wait.
//!
//! A radix tree for each class. Its nodes are made when first needed and never freed, so that a
//! reader needs no protection from writers: it finds a slab, or none. Writers hold the core's lock.
//! Most readers find the leaf without a walk.

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use once_cell::race::OnceBox;
use ringfence_sync::atomic::{AtomicPtr, Ordering};

use super::{
    key::Key,
    slab::{Handle, Slab},
};

/// Bits of a region's number that a node decodes: 9, so that a node is 4 KiB.
#[cfg(not(loom))]
const BITS: u32 = 9;
#[cfg(loom)]
const BITS: u32 = 1;
const FAN: usize = 1 << BITS;
/// Leaves that are found without a walk: of pages, 4 GiB.
#[cfg(not(loom))]
const NEAR: usize = 64;
#[cfg(loom)]
const NEAR: usize = 2;

/// A node of the lowest level.
#[repr(C, align(64))]
struct Leaf {
    slabs: [AtomicPtr<Slab>; FAN],
    /// The number of its first region, without the bits that it decodes. On a cache line of its own,
    /// as every reader compares it.
    number: u64,
}

type L2 = [OnceBox<Leaf>; FAN];
type L3 = [OnceBox<L2>; FAN];
type L4 = [OnceBox<L3>; FAN];
type L5 = [OnceBox<L4>; FAN];
type L6 = [OnceBox<L5>; FAN];
type L7 = [OnceBox<L6>; FAN];

impl Leaf {
    #[inline]
    fn get(&self, region: u64) -> Option<Handle> {
        // Acquire: the slab is seen in the state in which it was stored, or a later one.
        //
        // Ordering: needed, as any address may be freed, and its slab is then looked at: that of another
        // thread, on a page that it has just made. No model has two pages of slabs.
        Handle::from_ptr(self.slabs[region as usize % FAN].load(Ordering::Acquire))
    }

    // Ordering: see `get`.
    fn set(&self, region: u64, slab: Option<Handle>) {
        let slab = slab.map_or(ptr::null_mut(), Handle::as_ptr);
        self.slabs[region as usize % FAN].store(slab, Ordering::Release);
    }
}

/// A node and all below it.
trait Level: Send + Sync {
    fn empty(region: u64) -> Box<Self>
    where
        Self: Sized;
    fn find(&self, region: u64, shift: u32) -> Option<&Leaf>;
    fn make(&self, region: u64, shift: u32) -> &Leaf;
}

impl Level for Leaf {
    fn empty(region: u64) -> Box<Self> {
        let slabs = core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut()));
        Box::new(Leaf { number: region >> BITS, slabs })
    }

    #[inline]
    fn find(&self, _region: u64, _shift: u32) -> Option<&Leaf> {
        Some(self)
    }

    fn make(&self, _region: u64, _shift: u32) -> &Leaf {
        self
    }
}

impl<T: Level> Level for [OnceBox<T>; FAN] {
    fn empty(_region: u64) -> Box<Self> {
        Box::new(core::array::from_fn(|_| OnceBox::new()))
    }

    #[inline]
    fn find(&self, region: u64, shift: u32) -> Option<&Leaf> {
        self[(region >> shift) as usize % FAN].get()?.find(region, shift - BITS)
    }

    fn make(&self, region: u64, shift: u32) -> &Leaf {
        let below = self[(region >> shift) as usize % FAN].get_or_init(|| T::empty(region));
        below.make(region, shift - BITS)
    }
}

const MOST_LEVELS: u32 = 7;

/// The empty node at the top of so many levels.
fn top(levels: u32) -> Box<dyn Level> {
    match levels {
        1 => Leaf::empty(0),
        2 => L2::empty(0),
        3 => L3::empty(0),
        4 => L4::empty(0),
        5 => L5::empty(0),
        6 => L6::empty(0),
        MOST_LEVELS => L7::empty(0),
        _ => unreachable!("as many levels as an index may have"),
    }
}

/// The slabs of one class. It has no node before the class is first used.
pub(super) struct Index {
    tree: OnceBox<Box<dyn Level>>,
    /// As many as the address space needs.
    levels: u32,
    /// Some leaves, each in the place of its number: the first there stays, so that readers on
    /// other CPUs keep their copy of the cache line.
    near: [AtomicPtr<Leaf>; NEAR],
}

impl Index {
    /// For regions up to the number `last`.
    pub(super) fn new(last: u64) -> Index {
        // Of 63 bits at most, as a region is at least 32 granules.
        let levels = (u64::BITS - last.leading_zeros()).div_ceil(BITS).clamp(1, MOST_LEVELS);
        let near = core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut()));
        Index { tree: OnceBox::new(), levels, near }
    }

    /// The place of a leaf. The highest of an address space and the highest below 4 GiB, where
    /// allocation begins, are half the places apart.
    #[inline]
    fn near(&self, number: u64) -> &AtomicPtr<Leaf> {
        let high = (number >> NEAR.trailing_zeros()) % (NEAR as u64 / 2);
        &self.near[(number ^ high) as usize % NEAR]
    }

    /// The slab of a region, if it has one. Most leaves are found without a walk of the tree.
    #[inline]
    pub(super) fn get(&self, region: u64) -> Option<Handle> {
        // Acquire: the leaf is seen initialised.
        //
        // Ordering: needed, as any address may be freed, in a leaf that another thread has just made. No
        // model frees there without having been handed a range of it.
        let leaf = NonNull::new(self.near(region >> BITS).load(Ordering::Acquire));
        // SAFETY: the pointer was stored for a leaf of this tree, which is neither moved nor freed before
        // the tree is dropped, and changes only through atomics.
        #[allow(unsafe_code)]
        match leaf.map(|leaf| unsafe { leaf.as_ref() }) {
            Some(leaf) if leaf.number == region >> BITS => leaf.get(region),
            _ => self.walk(region),
        }
    }

    /// The slab with that key, which it keeps as long as the core is locked.
    pub(super) fn with(&self, key: Key) -> Option<Handle> {
        self.get(key.region()).filter(|slab| slab.key() == key)
    }

    #[inline(never)]
    fn walk(&self, region: u64) -> Option<Handle> {
        self.tree.get()?.find(region, self.shift())?.get(region)
    }

    /// Under the core's lock.
    // Ordering: see `get`.
    pub(super) fn set(&self, region: u64, slab: Option<Handle>) {
        let tree = self.tree.get_or_init(|| Box::new(top(self.levels)));
        let leaf = tree.make(region, self.shift());
        leaf.set(region, slab);
        let near = self.near(leaf.number);
        if near.load(Ordering::Relaxed).is_null() {
            near.store(ptr::from_ref(leaf).cast_mut(), Ordering::Release);
        }
    }

    /// By how much the highest level shifts a region's number.
    fn shift(&self) -> u32 {
        (self.levels - 1) * BITS
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_found_whatever_the_depth() {
        let slab = Slab::none();
        let handle = Handle::new(&slab);
        for bits in 0..=59 {
            let last = (1u64 << bits) - 1;
            let index = Index::new(last);
            // More leaves than are found without a walk.
            let regions = (0..80).map(|n| last / 3 + (n << BITS)).filter(|region| *region < last);
            for region in [0, last].into_iter().chain(regions) {
                assert_eq!(index.get(region), None);
                index.set(region, Some(handle));
                assert_eq!(index.get(region), Some(handle));
                index.set(region, None);
                assert_eq!(index.get(region), None);
            }
        }
    }
}
