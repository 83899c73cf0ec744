//! Per-CPU state: the current slabs, and lists of further slabs with free ranges.

use core::{array, ptr};

use ringfence_sync::{
    atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    lock::SpinLock,
};

use super::{
    key::{Key, Listing},
    slab::{Claimed, Handle, Slab},
};

/// The maximum number of size classes: from one granule to 1 GiB of granules of one byte.
#[cfg(not(loom))]
pub(super) const MAX_CLASSES: usize = 31;
/// A model has few of everything, as the checker follows each.
#[cfg(loom)]
pub(super) const MAX_CLASSES: usize = 3;
/// The maximum number of zones: see [`SlabConfig::limits`](super::SlabConfig::limits).
#[cfg(not(loom))]
pub(super) const MAX_ZONES: usize = 4;
#[cfg(loom)]
pub(super) const MAX_ZONES: usize = 1;
const LISTS: usize = MAX_CLASSES * MAX_ZONES;
/// How many loose slabs a CPU remembers of a bin: with their number they fill a cache line.
#[cfg(not(loom))]
const LOOSE: usize = 7;
#[cfg(loom)]
const LOOSE: usize = 1;

/// The list index of a class in a zone.
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

/// The state of a CPU.
pub(super) struct Cpu {
    /// The slab to take ranges from, by bin. Written under the lock of the lists.
    current: [AtomicPtr<Slab>; LISTS],
    /// Updated without a locked instruction, which would take as long as the allocation itself: a
    /// thread that migrates between CPUs in the middle may lose a count.
    pub(super) allocs: AtomicU64,
    /// Whether the CPU keeps slabs at all. Written under the lock of the lists.
    online: AtomicBool,
    /// A free here has left a slab loose since that was last asked.
    loosened: AtomicBool,
    loose: [Loose; LISTS],
    pub(super) lists: SpinLock<Lists>,
}

/// The slabs of a bin that frees on this CPU have left loose, the last one first.
///
/// It is changed without locked instructions: threads that do so at once may lose one of them, or remember
/// one twice. Nothing depends on it: what is remembered is asked whether it is loose, and what is
/// forgotten is attached by its next free, and found when [everything](super::Slabs::withdraw_all) is taken back.
#[repr(align(64))]
struct Loose {
    count: AtomicUsize,
    slabs: [AtomicPtr<Slab>; LOOSE],
}

/// A CPU's slabs with free ranges, besides the current ones.
pub(super) struct Lists {
    /// The CPU's number.
    cpu: usize,
    lists: [List; LISTS],
}

#[derive(Clone, Copy)]
struct List {
    head: Option<Handle>,
    tail: Option<Handle>,
    /// How many ranges the idle slabs (all of them free) have.
    idle: u32,
}

impl Cpu {
    pub(super) fn new(number: usize) -> Cpu {
        Cpu {
            current: array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            allocs: AtomicU64::new(0),
            online: AtomicBool::new(true),
            loosened: AtomicBool::new(false),
            loose: array::from_fn(|_| Loose {
                count: AtomicUsize::new(0),
                slabs: array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            }),
            lists: SpinLock::new(Lists {
                cpu: number,
                lists: [List { head: None, tail: None, idle: 0 }; LISTS],
            }),
        }
    }

    #[inline]
    pub(super) fn current(&self, bin: Bin) -> Option<Handle> {
        // Acquire: the slab is seen initialised.
        Handle::from_ptr(self.current[bin.0].load(Ordering::Acquire))
    }

    /// Under the lock of the lists.
    fn set_current(&self, bin: Bin, slab: Option<Handle>) {
        let slab = slab.map_or(ptr::null_mut(), Handle::as_ptr);
        self.current[bin.0].store(slab, Ordering::Release);
    }

    /// Under the lock of the lists; or a hint, but for a free that has left a slab loose: if the CPU has gone
    /// offline before [`Core::withdraw_loose`](super::Core::withdraw_loose) looked at the slab, it is seen.
    pub(super) fn is_online(&self) -> bool {
        self.online.load(Ordering::Relaxed)
    }

    /// Under the lock of the lists.
    pub(super) fn set_online(&self, online: bool) {
        self.online.store(online, Ordering::Relaxed);
    }

    /// A range of a slab that a free here has left loose.
    #[inline]
    pub(super) fn take_loose(&self, bin: Bin) -> Option<(Handle, u32)> {
        let loose = &self.loose[bin.0];
        loop {
            let last = loose.count.load(Ordering::Relaxed).checked_sub(1)?;
            // Acquire: the slab is seen initialised.
            //
            // Ordering: needed if another thread has made it since this one last took a lock. No model has that.
            let slab = Handle::from_ptr(loose.slabs[last].load(Ordering::Acquire));
            loose.count.store(last, Ordering::Relaxed);
            if let Some(slab) = slab
                && let Some(slot) = slab.take_loose()
            {
                return Some((slab, slot));
            }
        }
    }

    /// Frees a range of a detached slab, which is loose then, and remembers the slab. False: it is to be
    /// attached.
    #[inline]
    pub(super) fn give_loose(&self, bin: Bin, slab: Handle, key: Key, slot: u32) -> bool {
        let loose = &self.loose[bin.0];
        let count = loose.count.load(Ordering::Relaxed);
        if count >= LOOSE || !slab.give_loose(key, slot) {
            return false;
        }
        // Ordering: see `take_loose`.
        loose.slabs[count].store(slab.as_ptr(), Ordering::Release);
        loose.count.store(count + 1, Ordering::Relaxed);
        self.loosened.store(true, Ordering::Relaxed);
        true
    }

    /// Forgets a slab that is about to be attached, if it was the last one to become loose: ranges that are
    /// freed in order would leave nothing but such.
    pub(super) fn forget_loose(&self, bin: Bin, slab: Handle) {
        let loose = &self.loose[bin.0];
        let Some(last) = loose.count.load(Ordering::Relaxed).checked_sub(1) else { return };
        if loose.slabs[last].load(Ordering::Relaxed) == slab.as_ptr() {
            loose.count.store(last, Ordering::Relaxed);
        }
    }

    /// Whether a slab may have become loose here since the last call. Under the core's lock; `withdraw_loose` must
    /// follow. A free whose exchange comes after that sets the flag after it was cleared here.
    pub(super) fn has_loosened(&self) -> bool {
        let loosened = self.loosened.load(Ordering::Relaxed);
        if loosened {
            self.loosened.store(false, Ordering::Relaxed);
        }
        loosened
    }

    #[inline]
    pub(super) fn count_alloc(&self) {
        let count = self.allocs.load(Ordering::Relaxed).wrapping_add(1);
        self.allocs.store(count, Ordering::Relaxed);
    }

    /// A range of the current slab, or of the next in the list, which may become the current one.
    ///
    /// Calls `lost` for slabs that have nothing left and may own nothing either.
    pub(super) fn take(
        &self,
        lists: &mut Lists,
        bin: Bin,
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
                    if let Some(current) = current {
                        lists.displace(bin, current, lost);
                    }
                    return Some((slab, slot));
                }
                Claimed::None if slab.is_empty() => lost(slab),
                Claimed::None => {}
                Claimed::Frozen => {
                    // The thread that froze it, under the core's lock, is about to decide what
                    // becomes of it.
                    lists.push(bin, slab);
                    return None;
                }
            }
        }
        None
    }

    /// Makes a slab, attached and marked as current, the current one. The previous one goes into
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

    /// Whether the CPU's current slab has no free range. Under the lock of the lists.
    pub(super) fn is_exhausted(&self, bin: Bin) -> bool {
        self.current(bin).is_none_or(|slab| slab.free() == 0)
    }

    /// Takes one of the CPU's slabs of a bin away from it; the slab stays attached.
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
    /// Puts an attached slab at the front of its list.
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

    /// Moves a slab that was current into the list, if it has free ranges.
    fn displace(&mut self, bin: Bin, slab: Handle, lost: &mut impl FnMut(Handle)) {
        if !slab.displace() {
            self.push(bin, slab);
        } else if slab.is_empty() {
            lost(slab);
        }
    }

    /// Takes the first slab out.
    pub(super) fn pop(&mut self, bin: Bin) -> Option<Handle> {
        let slab = self.lists[bin.0].head?;
        self.unlink(bin, slab);
        Some(slab)
    }

    /// Takes a slab out.
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

    /// Keeps a listed slab that is all free, behind the others so that those are used up first.
    /// Returns false if idle slabs would then have more than `most` ranges.
    pub(super) fn keep_idle(&mut self, bin: Bin, slab: Handle, most: u32) -> bool {
        if slab.place().idle() != 0 {
            return true;
        }
        // The slab may own more ranges later, which the list does not count: `place` keeps the
        // number to subtract.
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

/// Links two slabs as neighbours, or makes one the first or the last.
fn link(previous: Option<Handle>, next: Option<Handle>) {
    let pointer = |slab: Option<Handle>| slab.map_or(ptr::null_mut(), Handle::as_ptr);
    if let Some(previous) = previous {
        previous.next.store(pointer(next), Ordering::Relaxed);
    }
    if let Some(next) = next {
        next.previous.store(pointer(previous), Ordering::Relaxed);
    }
}
