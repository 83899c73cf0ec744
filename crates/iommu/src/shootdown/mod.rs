//! Invalidating every cache of translations, and detecting when all have dropped what was removed.
//!
//! A process has one [`Shootdown`]. Each thread that translates on behalf of a device has a
//! [`Reader`] of it, and a cache of any kind. The reader passes a quiet point ([`Reader::poll`])
//! between two pieces of work, where it receives what was invalidated since the last one and drops
//! that from its cache. Readers never wait.
//!
//! A writer that has removed a translation calls [`Shootdown::begin`], which writes the range to a
//! short log and starts a grace period ([`ringfence_sync::qsbr`]). The invalidation is over when
//! every reader has passed a quiet point since, and the [`Lease`]s that readers took on the range
//! before that point are given back: a lease stands for asynchronous I/O, which goes on using a
//! translation after the reader's quiet point.
//!
//! # Why a removed translation is not served
//! Consider an invalidation that is over, and a reader. Its grace period g is over, so the reader
//! has announced an epoch at or above g (or was offline; see below). It loaded that epoch *before*
//! it read the log, and the log was written *before* g was started: so it has replayed the range
//! and dropped what its cache held from before. Whatever it looked up in a table since then came
//! after the start of g, and so after the removal: it found nothing.
//!
//! A reader that was offline replays the log after the fence in its `online`, which pairs with the
//! one in the start of g: either the writer saw it online and waited, or the replay sees the range,
//! and later look-ups see the removal.
//!
//! # Why no lease is overlooked, and none waited for needlessly
//! A lease is marked with the epoch that its reader had announced last when it was taken. If that
//! is below g, the lease may stand on a translation removed before g, and the invalidation waits
//! for it. It was taken before the reader announced g, so a thread that has seen g over sees the
//! lease. If the mark is g or above, the lease was taken after the reader had dropped the removed
//! translation; it stands on a newer one (the same address may be mapped again by now), and the
//! invalidation does not wait for it.
//!
//! # Which readers an invalidation need not wait for
//! A reader may declare the [`Scope`] in which it translates, such as one domain; an invalidation
//! in another scope does not wait for it. The reader enters the scope ([`Reader::enter`]) before
//! its first look-up there, with a fence between: either the scan finds it in the scope and waits
//! for its quiet point, or its look-ups come after the removal. It leaves with a Release store,
//! once it no longer uses what it found there, so that the leases it took are visible, too. A lease
//! stands on a translation of the scope in which it was taken: invalidations in other scopes do not
//! wait for it. All readers replay the same log.

mod leases;
mod log;
mod scope;

use alloc::{boxed::Box, sync::Arc};
use core::fmt;

use arrayvec::ArrayVec;
use ringfence_sync::{
    Backoff,
    lock::SpinLock,
    mutant,
    qsbr::{self, Grace, Qsbr},
};

pub use self::scope::Scope;
use self::{leases::Leases, log::Log, scope::Scopes};
use crate::{Range, gather::Ranges};

/// How many invalidations with ranges are tracked separately while under way; more are merged.
const PENDING: usize = if cfg!(loom) { 2 } else { 32 };

/// How many ranges of an invalidation are tracked separately.
const RANGES: usize = 16;

/// The ranges of an invalidation.
type Gone = ArrayVec<Range, RANGES>;

/// Fills the empty `gone` with `ranges`, joined and widened if they do not fit (rule L42).
fn fill(gone: &mut Gone, ranges: &[Range]) {
    if gone.try_extend_from_slice(ranges).is_err() {
        let mut joined = Ranges::<RANGES>::default();
        ranges.iter().for_each(|&range| joined.add(range));
        gone.extend(joined.ranges.iter().copied());
    }
}

/// The invalidations of a process: see the [module](self).
pub struct Shootdown {
    qsbr: Arc<Qsbr>,
    log: Log,
    /// Its lock also serialises the writers of the log.
    pending: SpinLock<Pending>,
    /// One for each reader, by its index.
    leases: Box<[Arc<Leases>]>,
    scopes: Scopes,
}

impl Shootdown {
    /// Invalidations for up to `max_readers` readers at a time.
    pub fn new(max_readers: usize) -> Arc<Shootdown> {
        Arc::new(Shootdown {
            qsbr: Arc::new(Qsbr::new(max_readers)),
            log: Log::new(),
            pending: SpinLock::new(Pending::default()),
            leases: (0..max_readers).map(|_| Arc::new(Leases::new())).collect(),
            scopes: Scopes::new(max_readers),
        })
    }

    /// A scope for one more domain. There are some thousands; then they are reused, and an
    /// invalidation in a shared scope waits for the readers of all its domains.
    pub fn scope(&self) -> Scope {
        self.scopes.next()
    }

    /// Adds a reader, online, with an empty cache; `None` if there is no room for another.
    pub fn reader(self: &Arc<Self>) -> Option<Reader> {
        let inner = self.qsbr.register()?;
        // The previous reader at this index may have been in another scope.
        self.scopes.enter(inner.index(), Scope::ALL);
        Some(Reader {
            scope: Scope::ALL,
            leases: Arc::clone(&self.leases[inner.index()]),
            // After going online: what is logged from here on is replayed. What was logged before
            // was removed before; the Acquire in `position` lets every later look-up see that, and
            // nothing has been looked up yet.
            replayed: self.log.position(),
            inner,
            shootdown: Arc::clone(self),
        })
    }

    /// Begins to invalidate `ranges`, and returns a token for the invalidation (never 0). The
    /// caller has already removed the translations from their table. Without ranges this only
    /// starts a grace period.
    ///
    /// Never under-invalidates; with many ranges it may also invalidate addresses between them
    /// (rule [L42]).
    ///
    /// [L42]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l42
    #[inline]
    pub fn begin(&self, ranges: &[Range]) -> u64 {
        self.begin_in(Scope::ALL, ranges)
    }

    /// As [`begin`](Self::begin), for translations that only readers in `scope` can have.
    pub fn begin_in(&self, scope: Scope, ranges: &[Range]) -> u64 {
        let mut pending = self.pending.lock();
        if ranges.is_empty() {
            return scope.token(self.qsbr.start());
        }
        if pending.entries.is_full() {
            pending.entries.retain(|entry| !self.entry_is_over(entry));
        }
        let early =
            mutant!("grace begins before the log has the ranges").then(|| self.qsbr.start());
        let entry = pending.add(scope, ranges);
        // A `--cfg`, not a feature: features are unified over all dependants, so that any of them,
        // or `--all-features`, would switch invalidation off.
        if !cfg!(ringfence_mutant = "no-invalidation") {
            entry.gone.iter().for_each(|&range| self.log.push(range));
        }
        // After the log, so that a reader that sees this grace period sees the ranges. Inside the
        // lock, so that they enter `pending` in order.
        let grace = early.unwrap_or_else(|| self.qsbr.start());
        (entry.first, entry.last) = (grace.as_u64(), grace.as_u64());
        scope.token(grace)
    }

    /// Whether the invalidation that `token` stands for is over: no reader serves what was removed,
    /// now or later, and no lease stands on it. 0 is always over; a token that was not returned
    /// yet, never.
    pub fn is_over(&self, token: u64) -> bool {
        // Checks the leases only after the grace period: until then a reader may take further ones.
        let (grace, scope) = Scope::of_token(token);
        self.is_quiet_in(scope, grace) && {
            let mut pending = self.pending.lock();
            let epoch = grace.as_u64();
            match pending.entries.iter().position(|entry| entry.covers(epoch)) {
                None => true,
                Some(at) if self.entry_is_over(&pending.entries[at]) => {
                    pending.entries.remove(at);
                    true
                }
                Some(_) => false,
            }
        }
    }

    /// Whether every reader, in any scope, has passed a quiet point since `token` was returned,
    /// regardless of leases: the condition for reusing memory that only readers reach, such as
    /// table pages.
    #[inline]
    pub fn is_quiet(&self, token: u64) -> bool {
        self.qsbr.is_over(Scope::of_token(token).0)
    }

    /// Whether every reader that can have what was removed in `scope` has passed a quiet point
    /// since.
    #[inline]
    fn is_quiet_in(&self, scope: Scope, grace: Grace) -> bool {
        match scope {
            Scope::ALL => self.qsbr.is_over(grace),
            _ => self.qsbr.is_over_for(grace, |index| self.scopes.may_be_in(index, scope)),
        }
    }

    /// Waits until the invalidation that `token` stands for is over. A thread that has a reader
    /// online must not call it: it would wait for itself.
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
        let is_quiet = || self.is_quiet_in(entry.scope, Grace::from_u64(entry.last));
        let is_leased = || {
            let leases = &self.leases[..self.qsbr.slots_used()];
            leases.iter().any(|leases| leases.stand_on(&entry.gone, entry.last, entry.scope))
        };
        if mutant!("leases are looked at before the quiet points") {
            return !is_leased() && is_quiet();
        }
        is_quiet() && !is_leased()
    }
}

impl fmt::Debug for Shootdown {
    ringfence_sync::shows!(Shootdown as it, qsbr: it.qsbr, logged: it.logged());
}

/// A thread that translates: see the [module](self).
///
/// It is online from the start: the thread must poll often, or go [`offline`](Self::offline) before
/// it sleeps. It uses translations, and what is derived from them, only between two quiet points,
/// or under a [`Lease`] taken before the next one.
pub struct Reader {
    shootdown: Arc<Shootdown>,
    inner: qsbr::Reader,
    leases: Arc<Leases>,
    /// The position in the log up to which `poll` has replayed it.
    replayed: u64,
    /// The scope in which it translates.
    scope: Scope,
}

impl Reader {
    /// A quiet point: calls `f` with what was invalidated since the last one, oldest first, then
    /// announces the quiet point to the writers. If that is more than the log holds (256 ranges),
    /// `f` gets [`Range::ALL`]. With nothing new it is a single load.
    ///
    /// No effect while offline.
    #[inline]
    pub fn poll(&mut self, f: impl FnMut(Range)) {
        let Reader { shootdown, inner, replayed, .. } = self;
        // `quiescent_with` loads the epoch before it calls us, and announces it afterwards. If the
        // epoch has not changed, the log may still have a new range whose writer has not started
        // its grace period yet: the next poll replays it, and the writer will wait for that.
        inner.quiescent_with(|| shootdown.log.replay(replayed, f));
    }

    /// Translates in `scope` from now on, and nowhere else; the initial scope is [`Scope::ALL`].
    /// The caller no longer uses anything that it looked up before, and its cache is empty. Leases
    /// remain, in the scope in which they were taken.
    pub fn enter(&mut self, scope: Scope) {
        if self.scope != scope {
            self.shootdown.scopes.enter(self.inner.index(), scope);
            self.scope = scope;
        }
    }

    /// The scope in which it translates.
    #[inline]
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Goes offline: until the reader is [`online`](Self::online) again it translates nothing, and
    /// writers do not wait for it. Leases remain.
    pub fn offline(&mut self) {
        self.inner.offline();
    }

    /// Goes online again, and calls `f` with what was invalidated meanwhile. No effect while
    /// online.
    pub fn online(&mut self, f: impl FnMut(Range)) {
        if !self.inner.is_online() {
            let mut f = f;
            // In this order: a writer that finds us offline has logged its ranges before its scan,
            // and the fence in `online` lets us see them; see the module's comment.
            let early = mutant!("the log is replayed before the reader is online");
            if early {
                self.shootdown.log.replay(&mut self.replayed, &mut f);
            }
            self.inner.online();
            let guard = LeaveOnPanic(&mut self.inner);
            if !early {
                self.shootdown.log.replay(&mut self.replayed, f);
            }
            core::mem::forget(guard);
        }
    }

    /// Whether writers wait for this reader.
    #[inline]
    pub fn is_online(&self) -> bool {
        self.inner.is_online()
    }

    /// Allows the translations of `range` that the reader has looked up since its last quiet point
    /// to stay in use beyond the next one: their invalidation is not over before the lease is
    /// dropped. For asynchronous I/O that was started with them.
    ///
    /// Takes no lock. Allocates only when this reader holds more leases at a time than ever before.
    pub fn lease(&self, range: Range) -> Lease {
        let index = self.leases.take(range, self.scope.token(self.inner.passed()));
        Lease { leases: Arc::clone(&self.leases), index }
    }

    /// As [`lease`](Self::lease), in the slot of a lease that was [put to rest](Lease::rest):
    /// cheaper, since there is no search for a slot. If `lease` is not at rest, it ends first; if
    /// it is another reader's, a new one of this reader replaces it.
    pub fn renew(&self, lease: &mut Lease, range: Range) {
        if !Arc::ptr_eq(&lease.leases, &self.leases) {
            *lease = self.lease(range);
            return;
        }
        lease.rest();
        lease.leases.renew(lease.index, range, self.scope.token(self.inner.passed()));
    }

    /// The shootdown that this reader belongs to.
    #[inline]
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        &self.shootdown
    }
}

impl fmt::Debug for Reader {
    ringfence_sync::shows!(Reader as it, inner: it.inner, replayed: it.replayed);
}

/// Takes a reader offline if its callback panics: its cache may still hold what it should have
/// dropped.
struct LeaveOnPanic<'a>(&'a mut qsbr::Reader);

impl Drop for LeaveOnPanic<'_> {
    fn drop(&mut self) {
        self.0.offline();
    }
}

/// Holds up the invalidation of a range: see [`Reader::lease`]. Any thread may drop it, even after
/// the reader is gone.
#[must_use = "the lease ends when it is dropped"]
pub struct Lease {
    leases: Arc<Leases>,
    index: usize,
}

impl Lease {
    /// Ends it, as dropping it does, but keeps its slot for [`Reader::renew`].
    pub fn rest(&mut self) {
        self.leases.rest(self.index);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leases.give_back(self.index);
    }
}

impl fmt::Debug for Lease {
    ringfence_sync::shows!(Lease as it, index: it.index);
}

/// Invalidations under way: the ranges that leases are compared with once the grace period is over.
#[derive(Default)]
struct Pending {
    entries: ArrayVec<Entry, PENDING>,
}

/// One invalidation, or several that were merged.
struct Entry {
    /// The first and the last grace period of the invalidations in it.
    first: u64,
    last: u64,
    scope: Scope,
    gone: Gone,
}

impl Entry {
    fn covers(&self, epoch: u64) -> bool {
        self.first <= epoch && epoch <= self.last
    }
}

impl Pending {
    /// Adds an entry for `ranges`, whose grace period is not known yet.
    fn add(&mut self, scope: Scope, ranges: &[Range]) -> &mut Entry {
        if self.entries.is_full() {
            // Merges the two oldest: their callers have most likely abandoned them.
            let oldest = self.entries.remove(0);
            let merged = &mut self.entries[0];
            merged.first = oldest.first;
            if merged.scope != oldest.scope {
                merged.scope = Scope::ALL;
            }
            let both: ArrayVec<Range, { 2 * RANGES }> =
                oldest.gone.iter().chain(&merged.gone).copied().collect();
            merged.gone.clear();
            fill(&mut merged.gone, &both);
        }
        self.entries.push(Entry { first: 0, last: 0, scope, gone: Gone::new() });
        // Filled in place: ranges that were just written are slow to copy.
        let at = self.entries.len() - 1;
        let entry = &mut self.entries[at];
        fill(&mut entry.gone, ranges);
        entry
    }
}

#[cfg(all(test, not(loom), not(ringfence_mutant = "no-invalidation")))]
mod tests;

#[cfg(all(test, not(loom), ringfence_mutant = "no-invalidation"))]
mod mutant {
    use super::*;

    #[test]
    fn readers_get_no_range_and_the_grace_period_runs_all_the_same() {
        let shootdown = Shootdown::new(1);
        let mut reader = shootdown.reader().unwrap();
        let token = shootdown.begin(&[Range::ALL]);
        assert!(!shootdown.is_over(token));
        reader.poll(|_| panic!("this build is meant to be broken"));
        assert!(shootdown.is_over(token));
    }
}

#[cfg(all(test, loom))]
mod model;
