//! What a CPU has: the slabs that it takes ranges from, and those that it will.

use core::ptr;

use ringfence_sync::{
    atomic::{AtomicPtr, AtomicU64, Ordering},
    lock::SpinLock,
};

use super::{
    index::Hints,
    key::Listing,
    slab::{Claimed, Handle, Slab},
};

/// Size classes there can be: from one granule to 1 GiB of granules of one byte.
#[cfg(not(loom))]
pub(super) const MAX_CLASSES: usize = 31;
/// A model has few things, as every one of them is followed.
#[cfg(loom)]
pub(super) const MAX_CLASSES: usize = 3;
/// Zones there can be: see [`SlabConfig::limits`](super::SlabConfig::limits).
#[cfg(not(loom))]
pub(super) const MAX_ZONES: usize = 4;
#[cfg(loom)]
pub(super) const MAX_ZONES: usize = 1;
const LISTS: usize = MAX_CLASSES * MAX_ZONES;

/// Where a class of a zone has its slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin(usize);

impl Bin {
    #[inline]
    pub(super) fn new(zone: usize, class: u32) -> Bin {
        Bin(zone * MAX_CLASSES + class as usize)
    }

    pub(super) fn all() -> impl Iterator<Item = Bin> {
        (0..LISTS).map(Bin)
    }
}

/// What a CPU has.
pub(super) struct Cpu {
    /// The slab that ranges are taken from, by bin. Written under the lock of the lists.
    current: [AtomicPtr<Slab>; LISTS],
    /// Written without a locked instruction, which would take as long as the allocation itself: a
    /// thread that is moved between CPUs in the middle may cost the count an event.
    pub(super) allocs: AtomicU64,
    pub(super) lists: SpinLock<Lists>,
}

/// The slabs with free ranges that a CPU has besides the current ones.
pub(super) struct Lists {
    /// Whether the CPU keeps slabs at all.
    pub(super) online: bool,
    /// The CPU's number.
    cpu: usize,
    lists: [List; LISTS],
}

#[derive(Clone, Copy)]
struct List {
    head: Option<Handle>,
    tail: Option<Handle>,
    /// How many ranges those have that are all free.
    idle: u32,
}

impl Cpu {
    pub(super) fn new(number: usize) -> Cpu {
        Cpu {
            current: core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            allocs: AtomicU64::new(0),
            lists: SpinLock::new(Lists {
                online: true,
                cpu: number,
                lists: [List { head: None, tail: None, idle: 0 }; LISTS],
            }),
        }
    }

    #[inline]
    pub(super) fn current(&self, bin: Bin) -> Option<Handle> {
        // Acquire: the slab is seen as it was set up.
        Handle::from_ptr(self.current[bin.0].load(Ordering::Acquire))
    }

    /// Under the lock of the lists.
    fn set_current(&self, bin: Bin, slab: Option<Handle>) {
        let slab = slab.map_or(ptr::null_mut(), Handle::as_ptr);
        self.current[bin.0].store(slab, Ordering::Release);
    }

    #[inline]
    pub(super) fn count_alloc(&self) {
        let count = self.allocs.load(Ordering::Relaxed).wrapping_add(1);
        self.allocs.store(count, Ordering::Relaxed);
    }

    /// A range of the current slab, or of the next in the list, which may become the current one.
    ///
    /// `lost` is told of slabs that have nothing left and may own nothing either.
    pub(super) fn take(
        &self,
        lists: &mut Lists,
        bin: Bin,
        hints: &Hints,
        lost: &mut impl FnMut(Handle),
    ) -> Option<(Handle, u32)> {
        let current = self.current(bin);
        if let Some(slab) = current
            && let Some(slot) = slab.take()
        {
            return Some((slab, slot));
        }
        while let Some(slab) = lists.pop(bin) {
            match slab.claim(current.is_none()) {
                Claimed::Last(slot) => return Some((slab, slot)),
                Claimed::Current(slot) => {
                    self.set_current(bin, Some(slab));
                    hints.set(slab);
                    if let Some(current) = current {
                        lists.displace(bin, current, lost);
                    }
                    return Some((slab, slot));
                }
                Claimed::None if slab.owned() == 0 => lost(slab),
                Claimed::None => {}
                Claimed::Frozen => {
                    // Whoever froze it is about to tell what becomes of it, under the core's lock.
                    lists.push(bin, slab);
                    return None;
                }
            }
        }
        None
    }

    /// Makes a slab, attached and marked as current, the current one. The one that was goes into
    /// the list if it has free ranges.
    pub(super) fn install(
        &self,
        lists: &mut Lists,
        bin: Bin,
        slab: Handle,
        lost: &mut impl FnMut(Handle),
    ) {
        let current = self.current(bin);
        self.set_current(bin, Some(slab));
        if let Some(current) = current {
            lists.displace(bin, current, lost);
        }
    }

    /// Whether the CPU has nothing to take from at once. Under the lock of the lists.
    pub(super) fn is_exhausted(&self, bin: Bin) -> bool {
        self.current(bin).is_none_or(|slab| slab.free() == 0)
    }

    /// Takes the CPU's slabs of a bin away from it; they stay attached.
    pub(super) fn strip(&self, lists: &mut Lists, bin: Bin) -> Option<Handle> {
        match self.current(bin) {
            Some(slab) => {
                self.set_current(bin, None);
                Some(slab)
            }
            None => lists.pop(bin),
        }
    }
}

impl Lists {
    /// Puts an attached slab in front.
    pub(super) fn push(&mut self, bin: Bin, slab: Handle) {
        debug_assert_eq!(slab.place(), Listing::NOWHERE);
        let list = &mut self.lists[bin.0];
        slab.set_place(Listing::new(self.cpu, 0));
        link(None, Some(slab));
        link(Some(slab), list.head);
        if list.head.is_none() {
            list.tail = Some(slab);
        }
        list.head = Some(slab);
    }

    /// Where a slab goes that was the current one: into the list, if it has free ranges.
    fn displace(&mut self, bin: Bin, slab: Handle, lost: &mut impl FnMut(Handle)) {
        if !slab.displace() {
            self.push(bin, slab);
        } else if slab.owned() == 0 {
            lost(slab);
        }
    }

    /// Takes the first one out.
    pub(super) fn pop(&mut self, bin: Bin) -> Option<Handle> {
        let slab = self.lists[bin.0].head?;
        self.unlink(bin, slab);
        Some(slab)
    }

    /// Takes one out.
    pub(super) fn unlink(&mut self, bin: Bin, slab: Handle) {
        debug_assert_eq!(slab.place().cpu(), Some(self.cpu), "not in this list");
        let list = &mut self.lists[bin.0];
        let previous = Handle::from_ptr(slab.previous.load(Ordering::Relaxed));
        let next = Handle::from_ptr(slab.next.load(Ordering::Relaxed));
        link(previous, next);
        if previous.is_none() {
            list.head = next;
        }
        if next.is_none() {
            list.tail = previous;
        }
        list.idle -= slab.place().idle();
        slab.set_place(Listing::NOWHERE);
    }

    /// Keeps a listed slab that is all free, behind those that are not so that these are used up
    /// first; or false if there are too many of them already: more than `most` ranges.
    pub(super) fn keep_idle(&mut self, bin: Bin, slab: Handle, most: u32) -> bool {
        if slab.place().idle() != 0 {
            return true;
        }
        // It may get more later, of which the list then has no count: what is subtracted is what
        // was added.
        let ranges = slab.owned().count_ones();
        if self.lists[bin.0].idle + ranges > most {
            return false;
        }
        self.unlink(bin, slab);
        let list = &mut self.lists[bin.0];
        list.idle += ranges;
        slab.set_place(Listing::new(self.cpu, ranges));
        link(list.tail, Some(slab));
        link(Some(slab), None);
        if list.tail.is_none() {
            list.head = Some(slab);
        }
        list.tail = Some(slab);
        true
    }
}

/// Makes two slabs neighbours, or one the first or the last.
fn link(previous: Option<Handle>, next: Option<Handle>) {
    let pointer = |slab: Option<Handle>| slab.map_or(ptr::null_mut(), Handle::as_ptr);
    if let Some(previous) = previous {
        previous.next.store(pointer(next), Ordering::Relaxed);
    }
    if let Some(next) = next {
        next.previous.store(pointer(previous), Ordering::Relaxed);
    }
}
