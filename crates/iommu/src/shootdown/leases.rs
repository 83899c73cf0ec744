//! Leases: translations still in use after their reader's quiet point.

use alloc::boxed::Box;
use core::ptr;

use ringfence_sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

use super::scope::Scope;
use crate::{Iova, Range};

/// How many leases a link of a [`Leases`] chain holds.
pub(super) const CHUNK: usize = if cfg!(loom) { 1 } else { 64 };

/// The leases that the readers of one index have taken: a chain of chunks that only grows.
pub(super) struct Leases {
    head: Chunk,
}

struct Chunk {
    /// Which slots are in use, a bit each.
    used: AtomicU64,
    slots: Box<[LeaseSlot]>,
    /// The next chunk, or null: set once, freed with the chain.
    next: AtomicPtr<Chunk>,
}

struct LeaseSlot {
    first: AtomicU64,
    last: AtomicU64,
    /// A token: the scope of the reader when it took the lease, and the epoch that it had announced
    /// last; 0 while the slot is being filled, is free or is kept for a later lease.
    mark: AtomicU64,
}

impl LeaseSlot {
    /// Enters a lease in a slot without one.
    fn fill(&self, range: Range, mark: u64) {
        // Pairs with the fence in `stand_on`: a thread that was checking the previous lease here
        // and sees one of the two stores below sees that the previous lease is over.
        fence(Ordering::Release);
        self.first.store(range.first().0, Ordering::Relaxed);
        self.last.store(range.last().0, Ordering::Relaxed);
        // Release: a thread that sees the mark sees the range.
        //
        // Ordering: a lease that counts is seen with its reader's quiet point in any case, and by the fence
        // a thread that looks at the one before it sees that that is over.
        self.mark.store(mark, Ordering::Release);
    }
}

impl Chunk {
    fn new() -> Chunk {
        let slot = |_| LeaseSlot {
            first: AtomicU64::new(0),
            last: AtomicU64::new(0),
            mark: AtomicU64::new(0),
        };
        Chunk {
            used: AtomicU64::new(0),
            slots: (0..CHUNK).map(slot).collect(),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Takes a free slot.
    fn claim(&self) -> Option<usize> {
        let free = |used: u64| Some(used.trailing_ones() as usize).filter(|slot| *slot < CHUNK);
        let more = |used| free(used).map(|slot| used | 1 << slot);
        // Acquire pairs with the Release in `give_back`: the last lease in this slot is over
        // before we write to the slot.
        self.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok().and_then(free)
    }

    fn next(&self) -> Option<&Chunk> {
        // Acquire pairs with the Release in `grow`: the chunk is seen initialised.
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: null, or a chunk that `grow` made. It is freed only when the chain is dropped,
        // which the borrow of `self` rules out.
        unsafe { next.as_ref() }
    }

    /// The next chunk, made if there is none.
    #[cold]
    fn grow(&self) -> &Chunk {
        let new = Box::into_raw(Box::new(Chunk::new()));
        match self.next.compare_exchange(ptr::null_mut(), new, Ordering::Release, Ordering::Acquire)
        {
            // SAFETY: it is part of the chain now; see `next`.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: made above by `Box::into_raw`, and no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: not null, since the exchange, which expected null, failed; see `next`.
                unsafe { &*other }
            }
        }
    }
}

impl Leases {
    pub(super) fn new() -> Leases {
        Leases { head: Chunk::new() }
    }

    fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        core::iter::successors(Some(&self.head), |chunk| chunk.next())
    }

    /// Enters a lease; returns its index.
    pub(super) fn take(&self, range: Range, mark: u64) -> usize {
        let mut chunk = &self.head;
        let mut base = 0;
        let at = loop {
            match chunk.claim() {
                Some(at) => break at,
                None => chunk = chunk.next().unwrap_or_else(|| chunk.grow()),
            }
            base += CHUNK;
        };
        chunk.slots[at].fill(range, mark);
        base + at
    }

    /// The chunk and the slot in it of the lease with this index.
    #[cfg_attr(loom, allow(clippy::modulo_one, reason = "a chunk holds one lease in a model"))]
    fn place(&self, index: usize) -> (&Chunk, usize) {
        let chunk = self.chunks().nth(index / CHUNK).expect("chunks are never taken away");
        (chunk, index % CHUNK)
    }

    /// Ends a lease but keeps its slot.
    pub(super) fn rest(&self, index: usize) {
        let (chunk, at) = self.place(index);
        // Release: a thread that sees the lease over sees all that was done under it.
        chunk.slots[at].mark.store(0, Ordering::Release);
    }

    /// Enters a lease in a slot that was kept.
    pub(super) fn renew(&self, index: usize, range: Range, mark: u64) {
        let (chunk, at) = self.place(index);
        // The last lease in this slot is over, visibly to the caller, which owns the slot.
        chunk.slots[at].fill(range, mark);
    }

    pub(super) fn give_back(&self, index: usize) {
        let (chunk, at) = self.place(index);
        // Release, both: a thread that sees the lease over sees all that was done under it.
        chunk.slots[at].mark.store(0, Ordering::Release);
        chunk.used.fetch_and(!(1 << at), Ordering::Release);
    }

    /// Whether a lease of a translation in `scope`, taken before its reader had passed the grace
    /// period `grace`, stands on one of `ranges`. May return true for a lease that is just being
    /// given back.
    ///
    /// The caller has seen that the grace period is over. So every lease that counts is complete
    /// and visible here: its reader took it before the quiet point that the caller has seen. A
    /// half-filled slot was begun after that point, and does not count.
    pub(super) fn stand_on(&self, ranges: &[Range], grace: u64, scope: Scope) -> bool {
        self.chunks().any(|chunk| {
            // Acquire: the lease of a slot seen as free is over. (All changes of `used` are
            // read-modify-writes, so this holds for earlier leases too.)
            let mut used = chunk.used.load(Ordering::Acquire);
            while used != 0 {
                let slot = &chunk.slots[used.trailing_zeros() as usize];
                used &= used - 1;
                let mark = slot.mark.load(Ordering::Acquire);
                let (passed, of) = Scope::of_token(mark);
                if mark == 0 || passed.as_u64() >= grace || !of.meets(scope) {
                    continue;
                }
                let first = slot.first.load(Ordering::Relaxed);
                let last = slot.last.load(Ordering::Relaxed);
                fence(Ordering::Acquire);
                // If the slot was reused meanwhile, the two numbers mean nothing: return true, and
                // the caller will check again.
                if slot.mark.load(Ordering::Relaxed) != mark {
                    return true;
                }
                // Usually both ends of one lease. If the slot was reused by a lease with the same
                // mark, the ends may be mixed: then the fences show that the first lease is over,
                // and the other does not count.
                if Range::new(Iova(first), Iova(last))
                    .is_none_or(|held| ranges.iter().any(|range| range.overlaps(held)))
                {
                    return true;
                }
            }
            false
        })
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        // Ordering: no other thread has the chain.
        let mut next = self.head.next.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: made by `Box::into_raw` in `grow`, reached from its one predecessor, which is
            // gone after this; no other thread can reach it, as `self` is borrowed exclusively.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.load(Ordering::Relaxed);
        }
    }
}
