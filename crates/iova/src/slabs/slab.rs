//! A slab: 32 adjacent ranges of one size class, and which of them are free.
//!
//! Everything that a hot path changes is in one word: a bit for each range (set: free), and flags.
//! Taking a range clears its bit, giving it back sets it; each is one compare-and-exchange, and
//! neither waits for another thread.
//!
//! **Holding a range pins the slab.** Slabs are reused for other places and classes, but only once
//! no range of them is taken. A thread with an old pointer may therefore take a range of a slab
//! that has been reused; once it holds a range, the slab no longer changes, and the thread can
//! check what it got. A free of a range that the caller does not hold fails: the word's version
//! changes whenever the slab does, so that every compare-and-exchange based on an earlier state
//! fails.
//!
//! **Sizes.** A range that is shorter than its class has a number of its own, how much shorter, which its owner
//! writes; a free compares it and clears it before it gives the range back. Neither is an exchange: what decides is the
//! word. A wrong free that is late, so that others have freed the range and taken it again meanwhile, may therefore
//! clear the next owner's number, so that its free is refused, or free the range although its size is
//! another now. A tail is cut off while the slab is frozen: no free that has compared a size before that succeeds
//! after it.
//!
//! The flags:
//!
//! | flag | meaning | set and cleared |
//! |---|---|---|
//! | `ATTACHED` | a CPU has the slab: it is current, or in a list | under that CPU's lock |
//! | `CURRENT` | a CPU takes ranges from it | under that CPU's lock |
//! | `FROZEN` | its free ranges are being taken out; or it is unused | under the core's lock |
//!
//! A slab without free ranges belongs to no CPU: it is *detached*. The first free leaves it *loose*,
//! detached with one free range, which the CPU of the free remembers and takes next: where ranges
//! are freed in random order, most slabs have none or one. The second free, or a CPU that remembers
//! enough of them, attaches it again.
//!
//! **Orderings.** In use, the word is changed by read-modify-writes alone, so that each change goes on
//! with the releases before it, and a thread that acquires it has all of them. A free releases the
//! range to its next owner. The key changes, and ranges cease to be owned, between two versions of
//! the word: a thread that decides by an older state of them fails in the exchange. A range that
//! comes to be owned is published by `owned`.

use core::{
    array, fmt,
    ops::Deref,
    ptr::{self, NonNull},
};

use ringfence_sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::key::{Key, Listing, SLOTS};

const FREE: u64 = u32::MAX as u64;
const ATTACHED: u64 = 1 << 32;
const CURRENT: u64 = 1 << 33;
const FROZEN: u64 = 1 << 34;
const VERSION: u64 = 1 << 35;

/// The largest class that has shorter ranges: how much shorter fits 16 bits.
pub(super) const MOST_SHORTER: u32 = u16::BITS + 1;

/// 32 ranges of one class, on two cache lines of its own: the second is only for ranges that are shorter
/// than the class.
#[repr(C, align(128))]
pub(super) struct Slab {
    /// Free ranges, flags, version.
    word: AtomicU64,
    /// Its place and the size class of its ranges: its [`Key`].
    key: AtomicU64,
    /// The ranges that the slab owns. Changed under the core's lock.
    owned: AtomicU32,
    /// The ranges whose tails have been cut off: the core knows them, each on its own. Under its lock.
    cut: AtomicU32,
    /// Whether any range was shorter than the class since the slab was set up.
    shorter: AtomicBool,
    /// The list it is in: a [`Listing`], under that CPU's lock, as its neighbours are. In one word,
    /// as threads read it to find out which lock to take.
    place: AtomicU32,
    pub(super) next: AtomicPtr<Slab>,
    pub(super) previous: AtomicPtr<Slab>,
    missing: Missing,
}

/// By how many granules each range is shorter than the class.
#[repr(align(64))]
struct Missing([AtomicU16; SLOTS as usize]);

/// The outcome of an attempt to free a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// It is free. `last`: it was the last taken range of a slab in a list.
    Done { last: bool },
    /// The slab is detached: it has to be attached, or left loose.
    Detached,
    /// Not decidable here: to be checked under the core's lock.
    Unclear,
}

/// The outcome of an attempt to take a range of a slab in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claimed {
    /// This range, with more left: the slab is current now.
    Current(u32),
    /// This range, the only one: the slab is detached now.
    Last(u32),
    /// No range was free: the slab is detached now.
    None,
    /// Another thread is about to take its ranges out.
    Frozen,
}

impl Slab {
    /// An unused slab, which must be [set up](Self::set_up) before use.
    pub(super) fn none() -> Slab {
        Slab {
            word: AtomicU64::new(FROZEN),
            key: AtomicU64::new(0),
            owned: AtomicU32::new(0),
            cut: AtomicU32::new(0),
            shorter: AtomicBool::new(false),
            place: AtomicU32::new(Listing::NOWHERE.0),
            next: AtomicPtr::new(ptr::null_mut()),
            previous: AtomicPtr::new(ptr::null_mut()),
            missing: Missing(array::from_fn(|_| AtomicU16::new(0))),
        }
    }

    /// Sets up an unused slab: detached, owning nothing. Under the core's lock.
    // Ordering: needed for a second free, by an old pointer to the slab, which may find the new word: it must
    // find the new key, too. In the models a lock comes between.
    pub(super) fn set_up(&self, key: Key) {
        let word = self.word.load(Ordering::Relaxed);
        debug_assert_eq!((word & (FROZEN | FREE), self.is_empty()), (FROZEN, true));
        if self.shorter.load(Ordering::Relaxed) {
            // What an owner wrote whose range was freed wrongly before.
            self.missing.0.iter().for_each(|missing| missing.store(0, Ordering::Relaxed));
            self.shorter.store(false, Ordering::Relaxed);
        }
        self.key.store(key.0, Ordering::Relaxed);
        // Release: a thread that sees the new word sees the new key. Other threads change only
        // flags of a frozen word, which this one does not have now.
        let word = (word & !(FROZEN | ATTACHED | CURRENT)).wrapping_add(VERSION);
        self.word.store(word, Ordering::Release);
    }

    /// Its identity. Only stable while the caller holds a range of it or the core's lock.
    #[inline]
    pub(super) fn key(&self) -> Key {
        Key(self.key.load(Ordering::Relaxed))
    }

    pub(super) fn class(&self) -> u32 {
        self.key().class()
    }

    /// Only stable under the lock of the CPU that it names.
    pub(super) fn place(&self) -> Listing {
        Listing(self.place.load(Ordering::Relaxed))
    }

    /// Under the lock of the CPU that it names, or named before.
    pub(super) fn set_place(&self, place: Listing) {
        self.place.store(place.0, Ordering::Relaxed);
    }

    pub(super) fn owned(&self) -> u32 {
        self.owned.load(Ordering::Relaxed)
    }

    pub(super) fn free(&self) -> u32 {
        self.word.load(Ordering::Relaxed) as u32
    }

    pub(super) fn is_attached(&self) -> bool {
        self.word.load(Ordering::Relaxed) & ATTACHED != 0
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.word.load(Ordering::Relaxed) & FROZEN != 0
    }

    /// Whether a range of it may be shorter than the class.
    pub(super) fn has_shorter(&self) -> bool {
        self.shorter.load(Ordering::Relaxed)
    }

    /// Whether it has no range, not even one whose tail has been cut off.
    pub(super) fn is_empty(&self) -> bool {
        self.owned() == 0 && self.cut.load(Ordering::Relaxed) == 0
    }

    /// Whether it owns ranges and all of them are free.
    pub(super) fn is_all_free(&self) -> bool {
        let owned = self.owned();
        owned != 0 && self.free() == owned
    }

    /// Takes the lowest free range, so that neighbours in time become neighbours in the address
    /// space.
    #[inline]
    pub(super) fn take(&self) -> Option<u32> {
        // A frozen slab has no free range.
        let less = |word: u64| (word as u32 != 0).then(|| word & !(1 << word.trailing_zeros()));
        // Acquire: the key that belongs to this word is seen, and what the last owner did.
        // Release: what this thread read of the slab before, to find it, it did not read later, when
        // the slab is another.
        //
        // Ordering: no model shows loads that move behind the exchange (loom executes them in order).
        let taken = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        taken.ok().map(|word| word.trailing_zeros())
    }

    /// Frees a range, if that is simple. `missing`: the number passed to [`note_missing`](Self::note_missing),
    /// else 0; set to 0 once it has been compared and cleared. Unless `CHECKED`, the caller has the
    /// range, and its size was not recorded.
    #[inline]
    pub(super) fn give<const CHECKED: bool>(
        &self,
        key: Key,
        slot: u32,
        missing: &mut u32,
    ) -> Freed {
        // Acquire: what is read below belongs to this word's slab or to a later one; in the latter
        // case the exchange fails, as the version has changed.
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let bit = 1u32 << slot;
            // Acquire: what made the range the slab's is seen.
            //
            // Ordering: a thread that frees what it has been given has that from there. For a
            // free of what it does not have, of a range that becomes the slab's meanwhile, it is
            // needed; no model has that.
            let owned = self.owned.load(Ordering::Acquire);
            let known = || self.key() == key && word as u32 & bit == 0;
            if word & FROZEN != 0 || owned & bit == 0 || CHECKED && !known() {
                return Freed::Unclear;
            }
            if CHECKED && key.class() > 1 && !self.clear_missing(slot, missing) {
                return Freed::Unclear;
            }
            if word & ATTACHED == 0 {
                return Freed::Detached;
            }
            let after = word | u64::from(bit);
            // Release: what this owner did with the range comes before what the next one does.
            // Acquire: as above.
            //
            // Ordering: the Acquire of success: what is read afterwards is read under a lock.
            match self.word.compare_exchange_weak(word, after, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => {
                    let current = word & CURRENT != 0;
                    return Freed::Done { last: after as u32 == owned && !current };
                }
                Err(now) => word = now,
            }
        }
    }

    /// Frees a range of a detached slab that has no other and owns others, and leaves it loose: decided by the
    /// word, as every free. False: it is not so simple.
    #[inline]
    pub(super) fn give_loose(&self, key: Key, slot: u32) -> bool {
        // Acquire: if `freeze_loose` came before, what its thread had done is seen: a CPU is offline, a flag is cleared.
        let (word, bit) = (self.word.load(Ordering::Acquire), 1u32 << slot);
        let owned = self.owned();
        let known = word & (FROZEN | ATTACHED | FREE) == 0 && self.key() == key;
        // Alone in the slab, it would leave nothing but free ranges, which lists keep a bound on.
        if !known || owned & bit == 0 || owned == bit {
            return false;
        }
        // Release: what this owner did with the range comes before what the next one does.
        let after = word | u64::from(bit);
        self.word.compare_exchange(word, after, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Takes a range of a loose slab, if it still is one.
    #[inline]
    pub(super) fn take_loose(&self) -> Option<u32> {
        let word = self.word.load(Ordering::Relaxed);
        let free = word as u32;
        if free == 0 || word & (FROZEN | ATTACHED) != 0 {
            return None;
        }
        let slot = free.trailing_zeros();
        let after = word & !(1 << slot);
        // Acquire and Release: as in `take`.
        //
        // Ordering: the Release, as in `take`. The Acquire is needed for a slab that is remembered from before, and
        // was left loose again on another CPU; in the models the pointer to it has that.
        let taken =
            self.word.compare_exchange(word, after, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        taken.then_some(slot)
    }

    /// Frees a range of a detached slab and attaches the slab, as current or for the list. Under
    /// the lock of the CPU to which it becomes attached.
    // Ordering: needed as in `give`, from which it differs by the CPU's lock; the models that have a
    // second free end there.
    pub(super) fn give_and_attach(&self, key: Key, slot: u32, current: bool) -> Freed {
        let flags = if current { ATTACHED | CURRENT } else { ATTACHED };
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let bit = 1u32 << slot;
            let known = word & FROZEN == 0 && self.key() == key;
            if !known || self.owned() & bit == 0 || word as u32 & bit != 0 {
                return Freed::Unclear;
            }
            // Another thread has just attached it with another range: then a free is simple.
            let attached = word & ATTACHED != 0;
            let after = word | u64::from(bit) | if attached { 0 } else { flags };
            match self.word.compare_exchange_weak(word, after, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) if attached => return Freed::Done { last: false },
                Ok(_) => return Freed::Detached,
                Err(now) => word = now,
            }
        }
    }

    /// Records by how much a range is shorter than the class. The caller has just taken it.
    #[inline]
    pub(super) fn note_missing(&self, slot: u32, missing: u32) {
        if !self.shorter.load(Ordering::Relaxed) {
            self.shorter.store(true, Ordering::Relaxed);
        }
        self.missing.0[slot as usize].store(missing as u16, Ordering::Relaxed);
    }

    /// Whether the range is shorter than the class by that much, which it clears.
    #[inline]
    fn clear_missing(&self, slot: u32, missing: &mut u32) -> bool {
        let noted = &self.missing.0[slot as usize];
        if *missing == 0 {
            // If it is gone because the tail was cut off, the exchange that follows fails: one that came before the
            // freeze would happen before the number was cleared, and so would this load.
            return !self.shorter.load(Ordering::Relaxed) || noted.load(Ordering::Relaxed) == 0;
        }
        if u32::from(noted.load(Ordering::Relaxed)) != *missing {
            return false;
        }
        // The exchange that gives the range back releases this: its next owner finds 0, and so does a thread
        // that cuts tails off before that one has written its own.
        noted.store(0, Ordering::Relaxed);
        *missing = 0;
        true
    }

    /// The size of a range that is taken, in granules.
    pub(super) fn size(&self, slot: u32) -> u64 {
        (1 << self.class()) - u64::from(self.missing.0[slot as usize].load(Ordering::Relaxed))
    }

    /// Adds ranges to the slab, taken or just made free. Under the core's lock.
    pub(super) fn own(&self, slots: u32) {
        // Release: as `give` acquires it. Ordering: see there.
        self.owned.store(self.owned() | slots, Ordering::Release);
    }

    /// Forgets a range whose tail was cut off, which is free now. Under the core's lock.
    pub(super) fn forget_cut(&self, slot: u32) {
        self.cut.store(self.cut.load(Ordering::Relaxed) & !(1 << slot), Ordering::Relaxed);
        // Release: a thread that detaches the slab after this finds it empty; else the caller finds it detached.
        self.word.fetch_add(VERSION, Ordering::Release);
    }

    /// Makes ranges free that the slab owns or is about to. If it is detached, it becomes a
    /// CPU's current one, and this returns true. Under that CPU's and the core's lock.
    // Ordering: Acquire, for a slab that `claim` has detached under another CPU's lock: its place in
    // lists. No model moves a slab from list to list. Release: what `set_up` released goes on.
    pub(super) fn add_free_as_current(&self, slots: u32) -> bool {
        let more = |word| {
            let flags = if word & ATTACHED == 0 { ATTACHED | CURRENT } else { 0 };
            Some(word | u64::from(slots) | flags)
        };
        let before = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more);
        before.is_ok_and(|word| word & ATTACHED == 0)
    }

    /// Takes a range of a slab that was just taken out of a list, under that list's lock: once it
    /// is detached, another CPU may attach it.
    ///
    /// Taking the only free range detaches the slab, unless `keep`: making it current would be
    /// wasted work, as it is exhausted.
    //
    // Ordering: Acquire as in `take`. Release, for a slab that is detached here and attached under another
    // CPU's lock: its place in lists. No model moves a slab from list to list.
    pub(super) fn claim(&self, keep: bool) -> Claimed {
        let mut claimed = Claimed::Frozen;
        let claim = |word| {
            let free = word as u32;
            let slot = free.trailing_zeros();
            let rest = free & free.wrapping_sub(1);
            let after;
            (after, claimed) = match (free, rest) {
                _ if word & FROZEN != 0 => (None, Claimed::Frozen),
                (0, _) => (Some(word & !ATTACHED), Claimed::None),
                (_, 0) if !keep => {
                    (Some(word & !(ATTACHED | u64::from(free))), Claimed::Last(slot))
                }
                _ => (Some((word & !(1 << slot)) | CURRENT), Claimed::Current(slot)),
            };
            after
        };
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, claim);
        claimed
    }

    /// Makes the slab no longer current; if it has no free range, detaches it and returns true.
    /// Under the lock of the CPU that had it as current.
    // Ordering: Acquire, so that what `forget_cut` has done is seen. It gives nothing that needs the Release; the
    // lock orders the rest.
    pub(super) fn displace(&self) -> bool {
        // A frozen slab may get its ranges back.
        let detach = |word| word & (FROZEN | FREE) == 0;
        let less = |word| Some(word & !if detach(word) { ATTACHED | CURRENT } else { CURRENT });
        self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less).is_ok_and(detach)
    }

    /// Takes all free ranges at once, and keeps other threads from changing the slab until it is
    /// [thawed](Self::thaw). Under the core's lock.
    // Ordering: the core's lock orders what is changed until then.
    pub(super) fn freeze(&self) -> u32 {
        // Acquire: the frees that this sees are complete.
        let taken = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, frozen);
        taken.expect("a slab is not frozen twice") as u32
    }

    /// Freezes the slab if it is loose. Under the core's lock.
    ///
    /// A free that this does not see sees what the caller did before: it changes the word after this has.
    pub(super) fn freeze_loose(&self) -> Option<u32> {
        // Release: each later change of the word goes on with it.
        self.word.fetch_add(VERSION, Ordering::Release);
        let loose = |word: &u64| *word as u32 != 0 && word & ATTACHED == 0;
        let freeze = |word| Some(word).filter(loose).and_then(frozen);
        // Acquire: the free that this sees is complete.
        //
        // Ordering: `thaw_detached` acquires too, unless the slab ends here.
        let taken = self.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, freeze);
        taken.ok().map(|word| word as u32)
    }

    /// Ends [`freeze`](Self::freeze) with these ranges free. Flags may have changed meanwhile.
    // Ordering: a range that becomes free here was freed before the freeze or is freed by the caller, under
    // locks that the next owner's `freeze` or list has.
    pub(super) fn thaw(&self, free: u32) {
        let thawed = |word| Some((word & !FROZEN) | u64::from(free));
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, thawed);
    }

    /// Ends [`freeze`](Self::freeze), detached and with no free range.
    // Ordering: as in `thaw`.
    pub(super) fn thaw_detached(&self) {
        debug_assert_eq!(self.place(), Listing::NOWHERE, "in a list and detached");
        self.word.fetch_and(!(FROZEN | ATTACHED | CURRENT), Ordering::AcqRel);
    }

    /// Gives up ranges. Only while frozen.
    // Ordering: see `thaw`.
    pub(super) fn disown(&self, slots: u32) {
        self.owned.store(self.owned() & !slots, Ordering::Release);
    }

    /// Cuts off the tails of taken ranges that are shorter than the class: calls `range` with the first
    /// granule of each, its granules and those of its tail. They are no longer the slab's, which lasts as long as
    /// they do. Only while frozen; `free` is what [`freeze`](Self::freeze) returned.
    pub(super) fn cut_tails(&self, free: u32, mut range: impl FnMut(u64, u64, u64)) {
        let mut taken = self.owned() & !free;
        while taken != 0 {
            let slot = taken.trailing_zeros();
            taken &= taken - 1;
            let missing = &self.missing.0[slot as usize];
            // 0: the full size of the class, or the range is just being taken or freed.
            let tail = u64::from(missing.load(Ordering::Relaxed));
            if tail == 0 {
                continue;
            }
            self.cut.store(self.cut.load(Ordering::Relaxed) | 1 << slot, Ordering::Relaxed);
            self.disown(1 << slot);
            missing.store(0, Ordering::Relaxed);
            range(self.key().number(slot), (1 << self.class()) - tail, tail);
        }
    }
}

/// The word of a slab whose free ranges were taken out; `None` if it is frozen already.
fn frozen(word: u64) -> Option<u64> {
    (word & FROZEN == 0).then(|| ((word & !FREE) | FROZEN).wrapping_add(VERSION))
}

impl fmt::Debug for Slab {
    ringfence_sync::shows!(
        Slab as it, key: it.key(), word: format_args!("{:#x}", it.word.load(Ordering::Relaxed)),
        owned: format_args!("{:#x}", it.owned())
    );
}

/// A reference to a slab of the same allocator.
///
/// Slabs lie in pages that live as long as the allocator does (`Core::pages`), and handles exist
/// only in that allocator and in its methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(NonNull<Slab>);

// SAFETY: a handle is a shared reference to a slab, which is `Sync`.
#[allow(unsafe_code)]
unsafe impl Send for Handle {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Handle {}

impl Handle {
    pub(super) fn new(slab: &Slab) -> Handle {
        Handle(slab.into())
    }

    #[inline]
    pub(super) fn from_ptr(slab: *mut Slab) -> Option<Handle> {
        NonNull::new(slab).map(Handle)
    }

    pub(super) fn as_ptr(self) -> *mut Slab {
        self.0.as_ptr()
    }
}

impl Deref for Handle {
    type Target = Slab;

    #[inline]
    fn deref(&self) -> &Slab {
        // SAFETY: a handle is made from a reference to a slab in a page of the allocator, or from a
        // pointer that was stored for such a handle; pages are neither moved nor freed before the
        // allocator is dropped, and no handle outlives it. Slabs change only through atomics.
        #[allow(unsafe_code)]
        unsafe {
            self.0.as_ref()
        }
    }
}
