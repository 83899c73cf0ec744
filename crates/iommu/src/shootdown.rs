//! Telling every cache of translations what is no longer true, and knowing when all have heard.
//!
//! A process has one [`Shootdown`]. Each thread that translates on behalf of a device has a
//! [`Reader`] of it, and whatever it likes as a cache. The reader comes by a quiet point
//! ([`Reader::poll`]) between two pieces of work; there it is told what was invalidated since the
//! last one, and drops that from its cache. Readers never wait.
//!
//! Whoever removed a translation calls [`Shootdown::begin`], which writes the range to a short log
//! and starts a grace period ([`ringfence_sync::qsbr`]). The invalidation is over when every reader
//! has passed a quiet point since, and when the [`Lease`]s that such readers had taken on the range
//! before are given back: a lease stands for asynchronous I/O, which goes on using a translation
//! after the reader's quiet point.
//!
//! # Why a removed translation is not served
//! Take an invalidation that is over, and a reader. Its grace period g is over, so the reader has
//! announced an epoch at or above g (or was offline; below). It loaded that epoch *before* it
//! looked at the log, and the log was written *before* g was started: so it has replayed the range,
//! and what its cache held from before is gone. And whatever it looked up in a table since then
//! comes after the start of g, and so after the removal: it found nothing.
//!
//! A reader that was offline replays the log after the fence of its coming online, which is paired
//! with the one in the start of g: either the writer saw it online and waited, or the replay sees
//! the range, and later look-ups the removal.
//!
//! # Why a lease is not overlooked, and not waited for in vain
//! A lease is marked with the epoch that its reader had announced last when it was taken. If that
//! is below g the lease may stand on a translation that g removes: it is waited for. It was taken
//! before the reader announced g, so whoever knows that g is over sees it. If the mark is g or
//! above, the lease was taken after the reader had dropped the removed translation; it stands on a
//! newer one (the same address may be mapped again by now) and is not waited for.

use alloc::{boxed::Box, sync::Arc};
use core::{fmt, ptr};

use arrayvec::ArrayVec;
use ringfence_sync::{
    Backoff, CachePadded,
    atomic::{AtomicPtr, AtomicU64, Ordering, fence},
    lock::SpinLock,
    qsbr::{self, Grace, Qsbr},
};

use crate::{Gather, Iova, Range};

/// How many invalidated ranges the log remembers. A reader that comes by more rarely than that
/// drops everything. (A model checker explores lapping with fewer.)
const LOG: usize = if cfg!(loom) { 2 } else { 64 };

/// How many invalidations with ranges can be told apart while they are under way; more are merged.
const PENDING: usize = if cfg!(loom) { 2 } else { 32 };

/// How many leases a link of a [`Leases`] chain holds.
const CHUNK: usize = if cfg!(loom) { 1 } else { 64 };

/// What a cache must drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// Every translation of an address in the range.
    Range(Range),
    /// Every translation.
    All,
}

impl Invalidation {
    /// Whether a cached translation of addresses in `range` must be dropped.
    #[inline]
    pub const fn hits(self, range: Range) -> bool {
        match self {
            Invalidation::Range(gone) => gone.overlaps(range),
            Invalidation::All => true,
        }
    }
}

/// The invalidations of a process: see the [module](self).
pub struct Shootdown {
    qsbr: Arc<Qsbr>,
    log: Log,
    /// Also makes writers of the log take turns.
    pending: SpinLock<Pending>,
    /// One for each reader, by its index.
    leases: Box<[Arc<Leases>]>,
}

impl Shootdown {
    /// Invalidations for up to `max_readers` readers at a time.
    pub fn new(max_readers: usize) -> Arc<Shootdown> {
        Arc::new(Shootdown {
            qsbr: Arc::new(Qsbr::new(max_readers)),
            log: Log::new(),
            pending: SpinLock::new(Pending::default()),
            leases: (0..max_readers).map(|_| Arc::new(Leases::new())).collect(),
        })
    }

    /// Adds a reader, online, which has an empty cache; `None` if there are as many as there can
    /// be.
    pub fn reader(self: &Arc<Self>) -> Option<Reader> {
        let inner = self.qsbr.register()?;
        Some(Reader {
            leases: Arc::clone(&self.leases[inner.index()]),
            // After going online: what is logged from here on is replayed. What was logged before
            // was removed before, as the Acquire in `position` lets every later look-up see; and
            // nothing has been looked up yet.
            replayed: self.log.position(),
            inner,
            shootdown: Arc::clone(self),
        })
    }

    /// Begins to invalidate `ranges`, or every address if `all`, and returns a token that names the
    /// invalidation (never 0). The translations have been removed from their table before. Without
    /// ranges it is a grace period alone.
    ///
    /// Never under-invalidates; if there are many ranges it invalidates addresses between them too
    /// (rule L42).
    pub fn begin(&self, ranges: &[Range], all: bool) -> u64 {
        // Joins and widens until a few are left.
        let mut gone = Gather::new();
        if all {
            gone.add(Range::ALL);
        } else {
            ranges.iter().for_each(|&range| gone.add(range));
        }
        let mut pending = self.pending.lock();
        if !cfg!(feature = "mutant-no-invalidation") {
            gone.ranges().iter().for_each(|&range| self.log.push(range));
        }
        // After the log, so that a reader that sees this grace period sees the ranges. Inside the
        // lock, so that tokens enter `pending` in order.
        let token = self.qsbr.start().as_u64();
        if !gone.ranges().is_empty() {
            if pending.entries.is_full() {
                pending.entries.retain(|entry| !self.entry_is_over(entry));
            }
            pending.push(token, gone);
        }
        token
    }

    /// Whether the invalidation that gave `token` is over: no reader serves what was removed, now or
    /// later, and no lease stands on it. 0 is always over; a token that was not given yet, never.
    pub fn is_over(&self, token: u64) -> bool {
        // The leases only after the grace period: until then a reader may take further ones.
        self.is_quiet(token) && {
            let mut pending = self.pending.lock();
            match pending.entries.iter().position(|entry| entry.covers(token)) {
                None => true,
                Some(at) if self.entry_is_over(&pending.entries[at]) => {
                    pending.entries.remove(at);
                    true
                }
                Some(_) => false,
            }
        }
    }

    /// Whether every reader has passed a quiet point since `token` was given, whatever leases there
    /// are: the condition for reusing memory that only readers reach, such as table pages.
    #[inline]
    pub fn is_quiet(&self, token: u64) -> bool {
        self.qsbr.is_over(Grace::from_u64(token))
    }

    /// Waits until the invalidation that gave `token` is over. Never to be called by a thread that
    /// has a reader online, which would wait for itself.
    pub fn wait(&self, token: u64) {
        let backoff = Backoff::new();
        while !self.is_over(token) {
            backoff.snooze();
        }
    }

    /// How many ranges were logged so far.
    pub fn logged(&self) -> u64 {
        self.log.position()
    }

    fn entry_is_over(&self, entry: &Entry) -> bool {
        self.is_quiet(entry.last)
            && !self.leases[..self.qsbr.slots_used()]
                .iter()
                .any(|leases| leases.stand_on(entry.gone.ranges(), entry.last))
    }
}

impl fmt::Debug for Shootdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shootdown")
            .field("qsbr", &self.qsbr)
            .field("logged", &self.logged())
            .finish()
    }
}

/// A thread that translates: see the [module](self).
///
/// It is online from birth: the thread must poll often, or go [`offline`](Self::offline) before it
/// sleeps. Translations, and what was derived from them, are used only between two quiet points, or
/// under a [`Lease`] taken before the next one.
pub struct Reader {
    shootdown: Arc<Shootdown>,
    inner: qsbr::Reader,
    leases: Arc<Leases>,
    /// The position in the log up to which `poll` has replayed it.
    replayed: u64,
}

impl Reader {
    /// A quiet point: calls `f` with what was invalidated since the last one, oldest first, then
    /// lets the writers know. With nothing new it is a single load.
    ///
    /// Without effect while offline.
    #[inline]
    pub fn poll(&mut self, f: impl FnMut(Invalidation)) {
        let Reader { shootdown, inner, replayed, .. } = self;
        // `quiescent_with` loads the epoch before it calls us, and announces it afterwards. If the
        // epoch is still the same there may be a range in the log already, whose writer has not
        // started its grace period: it is replayed next time, as the writer will wait for that.
        inner.quiescent_with(|| shootdown.log.replay(replayed, f));
    }

    /// Leaves: until the reader is back [`online`](Self::online) it translates nothing, and writers
    /// do not wait for it. Leases stay.
    pub fn offline(&mut self) {
        self.inner.offline();
    }

    /// Comes back, and calls `f` with what was invalidated meanwhile. Without effect while online.
    pub fn online(&mut self, f: impl FnMut(Invalidation)) {
        if !self.inner.is_online() {
            // In this order: a writer that finds us offline has logged its ranges before it
            // looked, and the fence in `online` lets us see them; see the module's comment.
            self.inner.online();
            self.shootdown.log.replay(&mut self.replayed, f);
        }
    }

    /// Whether writers wait for this reader.
    #[inline]
    pub fn is_online(&self) -> bool {
        self.inner.is_online()
    }

    /// Keeps the translations of `range` that the reader has looked up since its last quiet point in
    /// use beyond the next one: their invalidation is not over before the lease is dropped. For
    /// asynchronous I/O that was started with them.
    ///
    /// Takes no lock. It allocates only when more leases are held at a time than ever before by
    /// this reader.
    pub fn lease(&self, range: Range) -> Lease {
        let index = self.leases.take(range, self.inner.passed().as_u64());
        Lease { leases: Arc::clone(&self.leases), index, range }
    }

    /// What this is a reader of.
    #[inline]
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        &self.shootdown
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("inner", &self.inner)
            .field("replayed", &self.replayed)
            .finish()
    }
}

/// Holds up the invalidation of a range: see [`Reader::lease`]. It may be dropped by any thread, and
/// after the reader itself.
#[must_use = "the lease ends when it is dropped"]
pub struct Lease {
    leases: Arc<Leases>,
    index: usize,
    range: Range,
}

impl Lease {
    /// The range.
    pub fn range(&self) -> Range {
        self.range
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leases.give_back(self.index);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.range).finish()
    }
}

/// The last invalidated ranges, in a ring.
///
/// Writers take turns (by the lock of [`Shootdown::pending`]); readers take no lock and may find a
/// place overwritten under them. `claimed` tells: it is raised before a place is overwritten, as
/// `written` is after.
struct Log {
    claimed: CachePadded<AtomicU64>,
    written: AtomicU64,
    places: Box<[Place]>,
}

struct Place {
    first: AtomicU64,
    last: AtomicU64,
}

impl Log {
    fn new() -> Log {
        let place = |_| Place { first: AtomicU64::new(0), last: AtomicU64::new(0) };
        Log {
            claimed: CachePadded::new(AtomicU64::new(0)),
            written: AtomicU64::new(0),
            places: (0..LOG).map(place).collect(),
        }
    }

    /// How many ranges were logged so far. Acquire: the caller sees all that was done before they
    /// were.
    fn position(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    fn place(&self, position: u64) -> &Place {
        &self.places[(position % LOG as u64) as usize]
    }

    /// One writer at a time.
    fn push(&self, range: Range) {
        let position = self.written.load(Ordering::Relaxed);
        self.claimed.store(position + 1, Ordering::Relaxed);
        // Pairs with the fence in `get`: a reader that sees one of the two stores below sees the
        // claim above.
        fence(Ordering::Release);
        let place = self.place(position);
        place.first.store(range.first().0, Ordering::Relaxed);
        place.last.store(range.last().0, Ordering::Relaxed);
        // Release: a reader that sees the position sees the range, and what was removed before.
        self.written.store(position + 1, Ordering::Release);
    }

    /// The range at `position`, which was written; `None` if it was overwritten.
    fn get(&self, position: u64) -> Option<Range> {
        let place = self.place(position);
        let first = place.first.load(Ordering::Relaxed);
        let last = place.last.load(Ordering::Relaxed);
        // Pairs with the fence in `push`.
        fence(Ordering::Acquire);
        if self.claimed.load(Ordering::Relaxed) - position > LOG as u64 {
            return None;
        }
        Range::new(Iova(first), Iova(last))
    }

    /// Calls `f` with every range from `*replayed` on, and moves that to the end.
    #[cold]
    fn replay(&self, replayed: &mut u64, mut f: impl FnMut(Invalidation)) {
        let end = self.position();
        // If `f` panics, the reader stays where it was and will replay everything again.
        for position in *replayed..end {
            match self.get(position) {
                Some(range) if range != Range::ALL => f(Invalidation::Range(range)),
                // All that follows is part of it. And so is what was lost if we were lapped.
                _ => {
                    f(Invalidation::All);
                    break;
                }
            }
        }
        *replayed = end;
    }
}

/// Invalidations under way: the ranges that leases are compared with once the grace period is over.
#[derive(Default)]
struct Pending {
    entries: ArrayVec<Entry, PENDING>,
}

/// One invalidation, or several that were merged.
struct Entry {
    /// The tokens of those in it.
    first: u64,
    last: u64,
    gone: Gather,
}

impl Entry {
    fn covers(&self, token: u64) -> bool {
        self.first <= token && token <= self.last
    }
}

impl Pending {
    fn push(&mut self, token: u64, gone: Gather) {
        if self.entries.is_full() {
            // The two oldest: they are the likeliest to have been forgotten by their callers.
            let oldest = self.entries.remove(0);
            let heir = &mut self.entries[0];
            heir.first = oldest.first;
            oldest.gone.ranges().iter().for_each(|&range| heir.gone.add(range));
        }
        self.entries.push(Entry { first: token, last: token, gone });
    }
}

/// The leases that the readers of one index have taken: a chain of chunks that only grows.
struct Leases {
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
    /// The epoch that the reader had announced last when it took the lease; 0 while the slot is
    /// being filled or is free.
    mark: AtomicU64,
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
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let slot = used.trailing_ones() as usize;
            if slot >= CHUNK {
                return None;
            }
            // Acquire pairs with the Release in `give_back`: the last lease in this slot is over,
            // and what we write to the slot comes after.
            match self.used.compare_exchange_weak(
                used,
                used | 1 << slot,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(slot),
                Err(now) => used = now,
            }
        }
    }

    fn next(&self) -> Option<&Chunk> {
        // Acquire pairs with the Release in `grow`: the chunk is seen as it was made.
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: null, or a chunk that `grow` made and that is freed only when the chain is
        // dropped, which `self` being borrowed rules out.
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
                // SAFETY: made above by `Box::into_raw`, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: not null, as it was not what was expected; see `next`.
                unsafe { &*other }
            }
        }
    }
}

impl Leases {
    fn new() -> Leases {
        Leases { head: Chunk::new() }
    }

    fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        core::iter::successors(Some(&self.head), |chunk| chunk.next())
    }

    /// Enters a lease; returns its index.
    fn take(&self, range: Range, mark: u64) -> usize {
        let mut chunk = &self.head;
        let mut base = 0;
        let at = loop {
            match chunk.claim() {
                Some(at) => break at,
                None => chunk = chunk.next().unwrap_or_else(|| chunk.grow()),
            }
            base += CHUNK;
        };
        let slot = &chunk.slots[at];
        // Pairs with the fence in `stand_on`: whoever sees one of the two stores below sees that
        // the lease before this one, if it was looking at that, is over.
        fence(Ordering::Release);
        slot.first.store(range.first().0, Ordering::Relaxed);
        slot.last.store(range.last().0, Ordering::Relaxed);
        // Release: whoever sees the mark sees the range.
        slot.mark.store(mark, Ordering::Release);
        base + at
    }

    fn give_back(&self, index: usize) {
        let chunk = self.chunks().nth(index / CHUNK).expect("chunks are never taken away");
        let at = index % CHUNK;
        // Release, both: what was done under the lease comes before it is seen to be over.
        chunk.slots[at].mark.store(0, Ordering::Release);
        chunk.used.fetch_and(!(1 << at), Ordering::Release);
    }

    /// Whether a lease that was taken before its reader had passed the grace period `grace` stands
    /// on one of `ranges`. May say so of one that is just being given back.
    ///
    /// The caller knows that the grace period is over. So every lease that counts is complete and
    /// visible here: its reader made it before the quiet point that the caller knows of. What is
    /// seen half-made was begun after, and does not count.
    fn stand_on(&self, ranges: &[Range], grace: u64) -> bool {
        self.chunks().any(|chunk| {
            // Acquire: a slot seen as free is one whose lease is over. (All changes of `used` are
            // read-modify-writes, so this holds of earlier ones too.)
            let mut used = chunk.used.load(Ordering::Acquire);
            while used != 0 {
                let slot = &chunk.slots[used.trailing_zeros() as usize];
                used &= used - 1;
                let mark = slot.mark.load(Ordering::Acquire);
                if mark == 0 || mark >= grace {
                    continue;
                }
                let first = slot.first.load(Ordering::Relaxed);
                let last = slot.last.load(Ordering::Relaxed);
                fence(Ordering::Acquire);
                // If the slot has changed hands meanwhile, the two numbers mean nothing: say yes,
                // the caller asks again.
                if slot.mark.load(Ordering::Relaxed) != mark {
                    return true;
                }
                // Both ends of one lease; or, if the slot went to a lease with the same mark, of
                // whatever: then the first one is over, as the fences have shown us, and the
                // other does not count.
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
        let mut next = self.head.next.load(Ordering::Acquire);
        while !next.is_null() {
            // SAFETY: made by `Box::into_raw` in `grow`, reached from its one predecessor, which
            // is gone after this; nobody else is left, as `self` is borrowed exclusively.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.load(Ordering::Acquire);
        }
    }
}
