//! The mappings that are watched, in slots that a signal handler can look through: it waits for no
//! thread, and finds a mapping whole or not at all.
//!
//! A slot is a seqlock. Its state says whose turn it is, with a generation by which a reader notices
//! that the slot changed hands while it looked.

use ringfence_sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// A slot's state is `generation << 2 | phase`.
const FREE: u64 = 0;
const BUSY: u64 = 1;
const LIVE: u64 = 2;
const PHASE: u64 = 3;

/// Places for `N` mappings.
#[derive(Debug)]
pub(super) struct Registry<const N: usize> {
    slots: [Slot; N],
    /// No slot from here on was ever used.
    used: AtomicUsize,
    /// How many existing mappings are lost: the one word that the fast path looks at.
    lost: AtomicUsize,
}

#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
struct Slot {
    state: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
    lost: AtomicBool,
}

/// A mapping's place, given back when dropped.
#[derive(Debug)]
pub(super) struct Entry<const N: usize> {
    registry: &'static Registry<N>,
    index: usize,
}

/// A mapping that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: usize,
    pub(super) len: usize,
    /// The size of its pages.
    pub(super) page: usize,
}

impl<const N: usize> Registry<N> {
    #[cfg(not(loom))]
    pub(super) const fn new() -> Registry<N> {
        let slots = [const {
            Slot {
                state: AtomicU64::new(FREE),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                page: AtomicUsize::new(0),
                lost: AtomicBool::new(false),
            }
        }; N];
        Registry { slots, used: AtomicUsize::new(0), lost: AtomicUsize::new(0) }
    }

    /// The same: the model checker's atomics are no constants.
    #[cfg(loom)]
    pub(super) fn new() -> Registry<N> {
        let slots = std::array::from_fn(|_| Slot::default());
        Registry { slots, used: AtomicUsize::default(), lost: AtomicUsize::default() }
    }

    /// How many of the mappings that are entered are lost.
    #[inline]
    pub(super) fn lost(&self) -> usize {
        self.lost.load(Ordering::Relaxed)
    }

    /// Enters a mapping, whose page size is a power of two and its start and length multiples of it;
    /// `None` if all places are taken.
    pub(super) fn enter(&'static self, mapping: Mapping) -> Option<Entry<N>> {
        for (index, slot) in self.slots.iter().enumerate() {
            let state = slot.state.load(Ordering::Relaxed);
            let busy = (state & !PHASE) | BUSY;
            if state & PHASE != FREE
                || slot
                    .state
                    // Acquire: after all that the last owner did.
                    .compare_exchange(state, busy, Ordering::Acquire, Ordering::Relaxed)
                    .is_err()
            {
                continue;
            }
            // A reader that sees one of the fields below, and acquires, sees that the slot has
            // changed hands: BUSY, or what came later.
            fence(Ordering::Release);
            slot.start.store(mapping.start, Ordering::Relaxed);
            slot.len.store(mapping.len, Ordering::Relaxed);
            slot.page.store(mapping.page, Ordering::Relaxed);
            slot.lost.store(false, Ordering::Relaxed);
            // Release: a thread that sees LIVE sees the fields.
            slot.state.store((state & !PHASE) | LIVE, Ordering::Release);
            // Ordering: a thread that faults has the mapping from the one that entered it: this
            // number too.
            self.used.fetch_max(index + 1, Ordering::Release);
            return Some(Entry { registry: self, index });
        }
        None
    }

    /// The mapping with an address, if one has it that lives until this returns. Async-signal-safe.
    pub(super) fn find(&self, addr: usize) -> Option<(usize, Mapping)> {
        // Ordering: see `enter`.
        let used = self.used.load(Ordering::Acquire).min(N);
        self.slots[..used].iter().enumerate().find_map(|(index, slot)| {
            let state = slot.state.load(Ordering::Acquire);
            if state & PHASE != LIVE {
                return None;
            }
            let mapping = slot.mapping();
            // The three belong together only if the slot did not change hands meanwhile. If it did,
            // this is not the mapping of the access that faulted: its owner keeps that one alive.
            fence(Ordering::Acquire);
            let same = slot.state.load(Ordering::Relaxed) == state;
            (same && addr.wrapping_sub(mapping.start) < mapping.len).then_some((index, mapping))
        })
    }

    /// Marks a mapping that was found as lost.
    pub(super) fn lose(&self, index: usize) {
        // The count comes first, since another thread that finds the mark continues at once. Acquire:
        // that thread also sees the count of the one that set the mark.
        self.lost.fetch_add(1, Ordering::Relaxed);
        // Ordering: loom orders changes of the count as it executes them, so that no model can show
        // what the Acquire is for.
        if self.slots[index].lost.swap(true, Ordering::AcqRel) {
            self.lost.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Slot {
    fn mapping(&self) -> Mapping {
        Mapping {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
        }
    }
}

impl<const N: usize> Entry<N> {
    fn slot(&self) -> &'static Slot {
        &self.registry.slots[self.index]
    }

    /// Whether the mapping was lost.
    pub(super) fn is_lost(&self) -> bool {
        self.slot().lost.load(Ordering::Acquire)
    }

    pub(super) fn mapping(&self) -> Mapping {
        self.slot().mapping()
    }
}

impl<const N: usize> Drop for Entry<N> {
    fn drop(&mut self) {
        let slot = self.slot();
        if self.is_lost() {
            // No access to it is under way, so it cannot be lost again.
            self.registry.lost.fetch_sub(1, Ordering::Relaxed);
        }
        let next = (slot.state.load(Ordering::Relaxed) & !PHASE) + (PHASE + 1);
        // Release: all that we did comes before the next owner, which acquires in `enter`. A handler
        // that looks at this slot meanwhile serves another mapping: ours is no longer touched.
        slot.state.store(next | FREE, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::sync::Arc;

    use loom::thread;
    use ringfence_sync::model::{Memory, check};

    use super::*;

    fn registry<const N: usize>() -> &'static Registry<N> {
        Box::leak(Box::new(Registry::new()))
    }

    fn mapping(start: usize, len: usize) -> Mapping {
        Mapping { start, len, page: 1 }
    }

    #[test]
    fn a_mapping_is_found_whole_while_the_slot_before_it_changes_hands() {
        check(None, || {
            // The start of the one with the length of the other would hold the third.
            let (first, second, third) = (mapping(0, 10), mapping(70, 90), mapping(50, 10));
            let registry = registry::<2>();
            let entry = registry.enter(first).unwrap();
            let _third = registry.enter(third).unwrap();
            let thread = thread::spawn(move || {
                drop(entry);
                registry.enter(second).unwrap()
            });
            assert_eq!(registry.find(55), Some((1, third)));
            let _second = thread.join().unwrap();
        });
    }

    #[test]
    fn a_slot_goes_from_one_owner_to_the_next_with_all_that_was_done() {
        check(None, || {
            let registry = registry::<1>();
            let entry = registry.enter(mapping(0, 10)).unwrap();
            let pages = Arc::new(Memory::default());
            let theirs = Arc::clone(&pages);
            let thread = thread::spawn(move || {
                theirs.write();
                drop(entry);
            });
            let entry = loop {
                match registry.enter(mapping(20, 10)) {
                    Some(entry) => break entry,
                    None => thread::yield_now(),
                }
            };
            pages.write();
            assert!(!entry.is_lost());
            thread.join().unwrap();
        });
    }

    #[test]
    fn who_sees_that_a_mapping_is_lost_sees_the_count() {
        check(None, || {
            let registry = registry::<1>();
            let entry = registry.enter(mapping(0, 10)).unwrap();
            let lose = move || {
                let (index, _) = registry.find(5).expect("it is there");
                registry.lose(index);
                assert_ne!(registry.lost(), 0, "lost, and none is lost");
            };
            let threads = [thread::spawn(lose), thread::spawn(lose)];
            if entry.is_lost() {
                assert_ne!(registry.lost(), 0, "lost, and none is lost");
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(entry.is_lost());
            drop(entry);
            assert_eq!(registry.lost(), 0);
        });
    }
}
