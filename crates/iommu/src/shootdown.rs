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

/// The ranges of an invalidation.
type Gone = ArrayVec<Range, 8>;

/// The same ranges, joined and widened until they fit (rule L42).
fn few(ranges: impl Iterator<Item = Range> + Clone) -> Gone {
    let mut gone = Gone::new();
    if ranges.clone().all(|range| gone.try_push(range).is_ok()) {
        return gone;
    }
    let mut gather = Gather::new();
    ranges.for_each(|range| gather.add(range));
    gather.ranges().iter().copied().collect()
}

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
        let gone = if all { few([Range::ALL].into_iter()) } else { few(ranges.iter().copied()) };
        let mut pending = self.pending.lock();
        if !cfg!(feature = "mutant-no-invalidation") {
            gone.iter().for_each(|&range| self.log.push(range));
        }
        // After the log, so that a reader that sees this grace period sees the ranges. Inside the
        // lock, so that tokens enter `pending` in order.
        let token = self.qsbr.start().as_u64();
        if !gone.is_empty() {
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
                .any(|leases| leases.stand_on(&entry.gone, entry.last))
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
            let guard = LeaveOnPanic(&mut self.inner);
            self.shootdown.log.replay(&mut self.replayed, f);
            core::mem::forget(guard);
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

/// A reader whose cache could not be told what it must drop may not be online.
struct LeaveOnPanic<'a>(&'a mut qsbr::Reader);

impl Drop for LeaveOnPanic<'_> {
    fn drop(&mut self) {
        self.0.offline();
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
    #[inline(never)]
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
    gone: Gone,
}

impl Entry {
    fn covers(&self, token: u64) -> bool {
        self.first <= token && token <= self.last
    }
}

impl Pending {
    fn push(&mut self, token: u64, gone: Gone) {
        if self.entries.is_full() {
            // The two oldest: they are the likeliest to have been forgotten by their callers.
            let oldest = self.entries.remove(0);
            let heir = &mut self.entries[0];
            heir.first = oldest.first;
            heir.gone = few(oldest.gone.iter().chain(&heir.gone).copied());
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

    #[cfg_attr(loom, allow(clippy::modulo_one, reason = "a chunk holds one lease in a model"))]
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

#[cfg(all(test, not(loom), not(feature = "mutant-no-invalidation")))]
mod tests {
    use alloc::{vec, vec::Vec};

    use super::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    fn polled(reader: &mut Reader) -> Vec<Invalidation> {
        let mut heard = Vec::new();
        reader.poll(|gone| heard.push(gone));
        heard
    }

    #[test]
    fn every_reader_hears_of_every_range_once_and_in_order() {
        let shootdown = Shootdown::new(2);
        let (mut a, mut b) = (shootdown.reader().unwrap(), shootdown.reader().unwrap());
        let first = shootdown.begin(&[range(0, 9)], false);
        assert_eq!(polled(&mut a), [Invalidation::Range(range(0, 9))]);
        let second = shootdown.begin(&[range(20, 29)], false);
        assert!(!shootdown.is_over(first) && second > first);
        assert_eq!(polled(&mut a), [Invalidation::Range(range(20, 29))]);
        assert!(polled(&mut a).is_empty());
        assert!(!shootdown.is_over(first));
        let both = [range(0, 9), range(20, 29)].map(Invalidation::Range);
        assert_eq!(polled(&mut b), both);
        assert!(shootdown.is_over(first) && shootdown.is_over(second) && shootdown.is_over(0));
        assert!(!shootdown.is_over(second + 1), "it was never begun");
    }

    #[test]
    fn all_is_all() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        shootdown.begin(&[], true);
        shootdown.begin(&[Range::ALL], false);
        assert_eq!(polled(&mut reader), [Invalidation::All]);
        assert!(Invalidation::All.hits(range(3, 3)));
        assert!(Invalidation::Range(range(3, 4)).hits(range(4, 5)));
        assert!(!Invalidation::Range(range(3, 4)).hits(range(5, 5)));
    }

    #[test]
    fn without_ranges_it_is_a_grace_period_alone() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let lease = reader.lease(Range::ALL);
        let token = shootdown.begin(&[], false);
        assert!(!shootdown.is_over(token));
        assert!(polled(&mut reader).is_empty());
        assert!(shootdown.is_over(token));
        drop(lease);
    }

    #[test]
    fn a_reader_that_was_lapped_drops_everything() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let tokens: Vec<_> =
            (0..=LOG as u64).map(|n| shootdown.begin(&[range(n * 10, n * 10)], false)).collect();
        assert_eq!(polled(&mut reader), [Invalidation::All]);
        assert!(tokens.iter().all(|&token| shootdown.is_over(token)));
        // Exactly as many as the log holds are still told apart.
        for n in 0..LOG as u64 {
            shootdown.begin(&[range(n * 10, n * 10)], false);
        }
        assert_eq!(polled(&mut reader).len(), LOG);
    }

    #[test]
    fn too_many_ranges_are_widened_and_none_is_lost() {
        // rule L42
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let gone: Vec<_> = (0..100).map(|n| range(n * n * 16, n * n * 16 + 3)).collect();
        shootdown.begin(&gone, false);
        let heard = polled(&mut reader);
        assert!(heard.len() <= 8);
        for part in gone {
            assert!(
                heard.iter().any(|h| matches!(h, Invalidation::Range(r) if r.covers(part))),
                "{part} was lost"
            );
        }
    }

    #[test]
    fn a_reader_that_was_offline_hears_of_it_on_coming_back() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        reader.offline();
        let token = shootdown.begin(&[range(5, 6)], false);
        assert!(shootdown.is_over(token), "nobody waits for it");
        assert!(polled(&mut reader).is_empty() && !reader.is_online());
        let mut heard = vec![];
        reader.online(|gone| heard.push(gone));
        assert_eq!(heard, [Invalidation::Range(range(5, 6))]);
        reader.online(|_| panic!("it is online already"));
        assert!(!shootdown.is_over(shootdown.begin(&[range(5, 6)], false)));
        drop(reader);
        shootdown.wait(shootdown.begin(&[range(5, 6)], false));
        let mut newborn = shootdown.reader().unwrap();
        assert!(polled(&mut newborn).is_empty(), "its cache was empty when that was removed");
    }

    #[test]
    fn a_cache_that_panics_while_it_is_told_is_told_again() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let panics = |f: &mut dyn FnMut()| {
            assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(f)).is_err());
        };
        let token = shootdown.begin(&[range(5, 6)], false);
        panics(&mut || reader.poll(|_| panic!("in the cache")));
        assert!(!shootdown.is_over(token));
        assert_eq!(polled(&mut reader), [Invalidation::Range(range(5, 6))]);
        reader.offline();
        shootdown.begin(&[range(7, 8)], false);
        panics(&mut || reader.online(|_| panic!("in the cache")));
        assert!(!reader.is_online());
        let mut heard = vec![];
        reader.online(|gone| heard.push(gone));
        assert_eq!(heard, [Invalidation::Range(range(7, 8))]);
    }

    #[test]
    fn an_invalidation_waits_for_older_leases_on_its_ranges_and_for_no_others() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let elsewhere = reader.lease(range(100, 199));
        let on_it = reader.lease(range(0, 50));
        assert_eq!(on_it.range(), range(0, 50));
        let token = shootdown.begin(&[range(40, 60), range(300, 400)], false);
        let all = shootdown.begin(&[], true);
        // Taken before the quiet point: it may stand on what was removed.
        let late = reader.lease(range(60, 60));
        polled(&mut reader);
        // Taken after it: it stands on what was mapped there since.
        let newer = reader.lease(range(0, 50));
        assert!(!shootdown.is_over(token) && shootdown.is_quiet(token));
        drop(on_it);
        assert!(!shootdown.is_over(token));
        std::thread::spawn(move || drop(late)).join().unwrap();
        assert!(shootdown.is_over(token));
        assert!(!shootdown.is_over(all));
        drop(elsewhere);
        assert!(shootdown.is_over(all));
        let next = shootdown.begin(&[range(0, 0)], false);
        polled(&mut reader);
        assert!(!shootdown.is_over(next));
        drop(newer);
        assert!(shootdown.is_over(next));
    }

    #[test]
    fn a_lease_outlives_its_reader_and_the_next_of_that_index() {
        let shootdown = Shootdown::new(1);
        let reader = shootdown.reader().unwrap();
        let lease = reader.lease(range(0, 9));
        drop(reader);
        let token = shootdown.begin(&[range(0, 9)], false);
        let next = shootdown.reader().unwrap();
        let theirs = next.lease(range(0, 9));
        drop((next, theirs));
        assert!(!shootdown.is_over(token));
        drop(lease);
        assert!(shootdown.is_over(token));
    }

    #[test]
    fn there_is_no_limit_to_leases_and_their_places_are_used_again() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        for _ in 0..2 {
            let mut leases: Vec<_> =
                (0..3 * CHUNK as u64).map(|n| reader.lease(range(n, n))).collect();
            let places: alloc::collections::BTreeSet<_> =
                leases.iter().map(|lease| lease.index).collect();
            assert_eq!(places.len(), leases.len());
            assert_eq!(places.last(), Some(&(3 * CHUNK - 1)));
            let token = shootdown.begin(&[Range::ALL], false);
            polled(&mut reader);
            while let Some(lease) = leases.pop() {
                assert!(!shootdown.is_over(token));
                drop(lease);
            }
            assert!(shootdown.is_over(token));
        }
    }

    #[test]
    fn forgotten_tokens_are_merged_and_none_is_over_too_early() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let lease = reader.lease(range(0, 0));
        // The first one is held up by the lease, the others by nothing but their quiet point.
        let tokens: Vec<_> = (0..3 * PENDING as u64)
            .map(|n| shootdown.begin(&[range(n * 16, n * 16)], false))
            .collect();
        polled(&mut reader);
        assert!(!shootdown.is_over(tokens[0]));
        assert!(shootdown.is_over(*tokens.last().unwrap()));
        drop(lease);
        assert!(tokens.iter().all(|&token| shootdown.is_over(token)));
        // Those that are over make room by themselves.
        for _ in 0..3 * PENDING {
            shootdown.begin(&[range(7, 7)], false);
            polled(&mut reader);
        }
        assert!(shootdown.pending.lock().entries.len() <= PENDING);
    }

    #[test]
    fn caches_and_leases_keep_their_promise_under_load() {
        use core::sync::atomic::{AtomicBool, AtomicU64 as Plain};
        // Each of 16 pages is mapped to the version it had when mapped, or to 0. Once an
        // invalidation is over the version's memory is poisoned, which no reader may ever see.
        const PAGES: usize = 16;
        const VERSIONS: usize = 1 << 13;
        struct World {
            table: [Plain; PAGES],
            poisoned: Vec<AtomicBool>,
            stop: AtomicBool,
        }
        let shootdown = Shootdown::new(4);
        let world = Arc::new(World {
            table: Default::default(),
            poisoned: (0..VERSIONS).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
        });
        let page = |n: usize| range(n as u64 * 4096, n as u64 * 4096 + 4095);
        let readers: Vec<_> = (1..=3usize)
            .map(|seed| {
                let (world, mut reader) = (Arc::clone(&world), shootdown.reader().unwrap());
                std::thread::spawn(move || {
                    let mut cache = [0u64; PAGES];
                    let mut leases: Vec<(Lease, u64)> = vec![];
                    let mut turn = seed;
                    let check = |version: u64| {
                        let poisoned = &world.poisoned[version as usize];
                        assert!(!poisoned.load(Ordering::Relaxed), "stale: {version}");
                    };
                    while !world.stop.load(Ordering::Relaxed) {
                        turn = turn.wrapping_mul(25_214_903_917).wrapping_add(11);
                        let n = (turn >> 20) % PAGES;
                        if cache[n] == 0 {
                            cache[n] = world.table[n].load(Ordering::Acquire);
                        }
                        check(cache[n]);
                        if turn >> 30 & 3 == 0 && cache[n] != 0 {
                            leases.push((reader.lease(page(n)), cache[n]));
                        }
                        leases.iter().for_each(|&(_, version)| check(version));
                        if leases.len() > 5 {
                            leases.clear();
                        }
                        let drop_from = |cache: &mut [u64; PAGES], gone: Invalidation| {
                            for (n, entry) in cache.iter_mut().enumerate() {
                                if gone.hits(page(n)) {
                                    *entry = 0;
                                }
                            }
                        };
                        if turn >> 34 & 15 == 0 {
                            reader.offline();
                            std::thread::yield_now();
                            reader.online(|gone| drop_from(&mut cache, gone));
                        } else if turn >> 33 & 1 == 0 {
                            // Else, with more threads than CPUs, others wait a time slice for us.
                            std::thread::yield_now();
                            reader.poll(|gone| drop_from(&mut cache, gone));
                        }
                    }
                })
            })
            .collect();
        let mut pending: Vec<(u64, u64)> = vec![];
        for version in 1..VERSIONS {
            let n = version * 7 % PAGES;
            let old = world.table[n].swap(0, Ordering::AcqRel);
            if old != 0 {
                pending.push((shootdown.begin(&[page(n)], false), old));
            }
            world.table[n].store(version as u64, Ordering::Release);
            while pending.len() > version % 50 {
                pending.retain(|&(token, old)| {
                    let over = shootdown.is_over(token);
                    if over {
                        world.poisoned[old as usize].store(true, Ordering::Relaxed);
                    }
                    !over
                });
                std::thread::yield_now();
            }
        }
        world.stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    }
}

#[cfg(all(test, not(loom), feature = "mutant-no-invalidation"))]
mod mutant {
    use super::*;

    #[test]
    fn readers_hear_of_nothing_and_the_grace_period_runs_all_the_same() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let token = shootdown.begin(&[Range::ALL], true);
        assert!(!shootdown.is_over(token));
        reader.poll(|_| panic!("this build is meant to be broken"));
        assert!(shootdown.is_over(token));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::thread;
    use ringfence_sync::{atomic::AtomicBool, cell::UnsafeCell};

    use super::*;

    const PAGE: Range = match Range::new(Iova(0x1000), Iova(0x1fff)) {
        Some(range) => range,
        None => unreachable!(),
    };
    const OTHER: Range = match Range::new(Iova(0x8000), Iova(0x8fff)) {
        Some(range) => range,
        None => unreachable!(),
    };

    /// One page, mapped at first, and the memory it leads to. Loom fails the model if a device's
    /// access to the memory overlaps its owner's, or is not ordered with it.
    struct World {
        mapped: AtomicBool,
        memory: UnsafeCell<u32>,
        /// Set by the owner once it has its memory back.
        returned: AtomicBool,
    }

    // SAFETY: who may touch the memory when is what the model checks.
    unsafe impl Sync for World {}
    // SAFETY: as above.
    unsafe impl Send for World {}

    fn world() -> Arc<World> {
        Arc::new(World {
            mapped: AtomicBool::new(true),
            memory: UnsafeCell::new(1),
            returned: AtomicBool::new(false),
        })
    }

    impl World {
        /// A device's access with a cache of one translation.
        fn access(&self, cache: &mut bool) -> bool {
            if !*cache {
                *cache = self.mapped.load(Ordering::Acquire);
            }
            if *cache {
                self.touch();
            }
            *cache
        }

        fn touch(&self) {
            assert!(!self.returned.load(Ordering::Relaxed), "reached after it was returned");
            // SAFETY: mapped when looked up, and the owner waits for us.
            assert_ne!(self.memory.with(|memory| unsafe { *memory }), 0);
        }

        /// The owner unmaps the page and, if the invalidation is seen to end within a few looks,
        /// uses its memory again.
        fn unmap(&self, shootdown: &Shootdown, looks: usize) {
            self.mapped.store(false, Ordering::Relaxed);
            let token = shootdown.begin(&[PAGE], false);
            self.take_back(shootdown, token, looks);
        }

        fn take_back(&self, shootdown: &Shootdown, token: u64, looks: usize) {
            for _ in 0..looks {
                if shootdown.is_over(token) {
                    self.returned.store(true, Ordering::Relaxed);
                    // SAFETY: the invalidation is over: no device reaches it.
                    self.memory.with_mut(|memory| unsafe { *memory = 0 });
                    return;
                }
                thread::yield_now();
            }
        }
    }

    fn forget(cache: &mut bool, gone: Invalidation) {
        if gone.hits(PAGE) {
            *cache = false;
        }
    }

    fn check(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(f);
    }

    #[test]
    fn a_cache_never_serves_what_was_invalidated() {
        check(4, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let mut reader = shootdown.reader().unwrap();
            let theirs = Arc::clone(&world);
            let device = thread::spawn(move || {
                let mut cache = false;
                for _ in 0..2 {
                    theirs.access(&mut cache);
                    reader.poll(|gone| forget(&mut cache, gone));
                }
                theirs.access(&mut cache);
            });
            world.unmap(&shootdown, 2);
            device.join().unwrap();
        });
    }

    #[test]
    fn nor_does_that_of_a_reader_which_was_offline() {
        check(4, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let mut reader = shootdown.reader().unwrap();
            let theirs = Arc::clone(&world);
            let device = thread::spawn(move || {
                let mut cache = false;
                theirs.access(&mut cache);
                reader.offline();
                reader.online(|gone| forget(&mut cache, gone));
                theirs.access(&mut cache);
                drop(reader);
            });
            world.unmap(&shootdown, 2);
            device.join().unwrap();
        });
    }

    #[test]
    fn nor_that_of_a_reader_which_is_born_meanwhile() {
        check(4, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let (theirs, from) = (Arc::clone(&world), Arc::clone(&shootdown));
            let device = thread::spawn(move || {
                let mut reader = from.reader().unwrap();
                let mut cache = false;
                theirs.access(&mut cache);
                reader.poll(|gone| forget(&mut cache, gone));
                theirs.access(&mut cache);
            });
            world.unmap(&shootdown, 2);
            device.join().unwrap();
        });
    }

    #[test]
    fn nor_that_of_a_reader_which_is_lapped() {
        check(3, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let mut reader = shootdown.reader().unwrap();
            let theirs = Arc::clone(&world);
            let device = thread::spawn(move || {
                let mut cache = false;
                theirs.access(&mut cache);
                reader.poll(|gone| forget(&mut cache, gone));
                theirs.access(&mut cache);
            });
            // Two ranges fit the log of a model: the third overwrites the one that matters.
            world.mapped.store(false, Ordering::Relaxed);
            let token = shootdown.begin(&[PAGE], false);
            shootdown.begin(&[OTHER], false);
            shootdown.begin(&[OTHER], false);
            world.take_back(&shootdown, token, 2);
            device.join().unwrap();
        });
    }

    #[test]
    fn a_lease_holds_its_memory_beyond_a_quiet_point() {
        check(4, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let mut reader = shootdown.reader().unwrap();
            let theirs = Arc::clone(&world);
            let device = thread::spawn(move || {
                let mut cache = false;
                let lease = theirs.access(&mut cache).then(|| reader.lease(PAGE));
                reader.poll(|gone| forget(&mut cache, gone));
                if lease.is_some() {
                    theirs.touch();
                }
                drop(lease);
                theirs.access(&mut cache);
            });
            world.unmap(&shootdown, 2);
            device.join().unwrap();
        });
    }

    #[test]
    fn a_lease_is_found_in_a_place_that_others_use_and_leave() {
        // A chunk holds one lease in a model: the first is on another page and makes way, or does
        // not, so that the one that matters goes to the same place or to a further chunk.
        check(3, || {
            let (shootdown, world) = (Shootdown::new(1), world());
            let mut reader = shootdown.reader().unwrap();
            let first = reader.lease(OTHER);
            let theirs = Arc::clone(&world);
            let device = thread::spawn(move || {
                let mut cache = false;
                let lease = theirs.access(&mut cache).then(|| reader.lease(PAGE));
                reader.poll(|gone| forget(&mut cache, gone));
                let other = reader.lease(OTHER);
                if lease.is_some() {
                    theirs.touch();
                }
                drop((lease, other));
            });
            let completion = thread::spawn(move || drop(first));
            world.unmap(&shootdown, 1);
            device.join().unwrap();
            completion.join().unwrap();
        });
    }
}
