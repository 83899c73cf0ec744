//! From a region to its slab, for readers that never wait.
//!
//! A radix tree for each class. Its nodes are made when first needed and never freed, so that a
//! reader needs no protection from writers: it finds a slab, or none. Writers hold the core's lock.

use alloc::boxed::Box;
use core::ptr;

use once_cell::race::OnceBox;
use ringfence_sync::atomic::{AtomicPtr, Ordering};

use super::{
    key::Key,
    slab::{Handle, Slab},
};

/// Bits of a region's number that a node decodes: 9, so that a node is a page of 4 KiB.
#[cfg(not(loom))]
const BITS: u32 = 9;
#[cfg(loom)]
const BITS: u32 = 1;
const FAN: usize = 1 << BITS;

type L1 = [AtomicPtr<Slab>; FAN];
type L2 = [OnceBox<L1>; FAN];
type L3 = [OnceBox<L2>; FAN];
type L4 = [OnceBox<L3>; FAN];
type L5 = [OnceBox<L4>; FAN];
type L6 = [OnceBox<L5>; FAN];
type L7 = [OnceBox<L6>; FAN];

/// A node and all below it.
trait Level {
    fn empty() -> Box<Self>;
    fn get(&self, region: u64, shift: u32) -> *mut Slab;
    fn set(&self, region: u64, shift: u32, slab: *mut Slab);
}

impl Level for L1 {
    fn empty() -> Box<Self> {
        Box::new(core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())))
    }

    #[inline]
    fn get(&self, region: u64, _shift: u32) -> *mut Slab {
        // Acquire: the slab is seen in the state in which it was stored, or a later one.
        //
        // Ordering: needed, as any address may be freed, and its slab is then looked at: that of another
        // thread, on a page that it has just made. No model has two pages of slabs.
        self[region as usize % FAN].load(Ordering::Acquire)
    }

    // Ordering: see `get`.
    fn set(&self, region: u64, _shift: u32, slab: *mut Slab) {
        self[region as usize % FAN].store(slab, Ordering::Release);
    }
}

impl<T: Level> Level for [OnceBox<T>; FAN] {
    fn empty() -> Box<Self> {
        Box::new(core::array::from_fn(|_| OnceBox::new()))
    }

    #[inline]
    fn get(&self, region: u64, shift: u32) -> *mut Slab {
        match self[(region >> shift) as usize % FAN].get() {
            Some(below) => below.get(region, shift - BITS),
            None => ptr::null_mut(),
        }
    }

    fn set(&self, region: u64, shift: u32, slab: *mut Slab) {
        let below = self[(region >> shift) as usize % FAN].get_or_init(T::empty);
        below.set(region, shift - BITS, slab);
    }
}

/// The slabs of one class. Its depth is that of the address space.
pub(super) enum Index {
    D1(Box<L1>),
    D2(Box<L2>),
    D3(Box<L3>),
    D4(Box<L4>),
    D5(Box<L5>),
    D6(Box<L6>),
    D7(Box<L7>),
}

macro_rules! with {
    ($index:expr, |$node:ident, $shift:ident| $body:expr) => {
        match $index {
            Index::D1($node) => (|$shift: u32| $body)(0),
            Index::D2($node) => (|$shift: u32| $body)(BITS),
            Index::D3($node) => (|$shift: u32| $body)(2 * BITS),
            Index::D4($node) => (|$shift: u32| $body)(3 * BITS),
            Index::D5($node) => (|$shift: u32| $body)(4 * BITS),
            Index::D6($node) => (|$shift: u32| $body)(5 * BITS),
            Index::D7($node) => (|$shift: u32| $body)(6 * BITS),
        }
    };
}

impl Index {
    /// An empty index for regions up to the number `last`.
    pub(super) fn new(last: u64) -> Index {
        match (u64::BITS - last.leading_zeros()).div_ceil(BITS) {
            0 | 1 => Index::D1(L1::empty()),
            2 => Index::D2(L2::empty()),
            3 => Index::D3(L3::empty()),
            4 => Index::D4(L4::empty()),
            5 => Index::D5(L5::empty()),
            6 => Index::D6(L6::empty()),
            // 63 bits: a region is at least 32 granules.
            _ => Index::D7(L7::empty()),
        }
    }

    #[inline]
    pub(super) fn get(&self, region: u64) -> Option<Handle> {
        Handle::from_ptr(with!(self, |node, shift| node.get(region, shift)))
    }

    /// Under the core's lock.
    pub(super) fn set(&self, region: u64, slab: Option<Handle>) {
        let slab = slab.map_or(ptr::null_mut(), Handle::as_ptr);
        with!(self, |node, shift| node.set(region, shift, slab));
    }
}

/// The current slabs of the CPUs, or recent ones: most frees are of these, and one load finds them
/// here. Written only when a CPU gets another slab, so that readers on other CPUs keep their copy
/// of the cache line.
pub(super) struct Hints([AtomicPtr<Slab>; HINTS]);

/// 2 KiB, so that they stay in the nearest cache.
#[cfg(not(loom))]
const HINTS: usize = 256;
#[cfg(loom)]
const HINTS: usize = 2;

impl Hints {
    pub(super) fn new() -> Hints {
        Hints(core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())))
    }

    /// The slab, if it is here, at its own place or the one beside it.
    #[inline]
    pub(super) fn get(&self, key: Key) -> Option<Handle> {
        let place = key.hash() % HINTS;
        [place, place ^ 1].into_iter().find_map(|place| {
            // Acquire: the slab is seen initialised, or in a later state. Ordering: as in `L1::get`.
            let slab = Handle::from_ptr(self.0[place].load(Ordering::Acquire))?;
            (slab.key() == key).then_some(slab)
        })
    }

    /// Two current slabs with the same place both find one: otherwise each free would evict the
    /// other's.
    // Ordering: as in `L1::get`; a hint that is missed costs a walk of the index.
    pub(super) fn set(&self, slab: Handle) {
        let place = slab.key().hash() % HINTS;
        let there = |place: usize| Handle::from_ptr(self.0[place].load(Ordering::Acquire));
        if there(place) == Some(slab) || there(place ^ 1) == Some(slab) {
            return;
        }
        let used = there(place).is_some_and(|other| other.is_current());
        self.0[if used { place ^ 1 } else { place }].store(slab.as_ptr(), Ordering::Release);
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
            for region in [0, last / 3, last] {
                assert_eq!(index.get(region), None);
                index.set(region, Some(handle));
                assert_eq!(index.get(region), Some(handle));
                index.set(region, None);
                assert_eq!(index.get(region), None);
            }
        }
    }
}
