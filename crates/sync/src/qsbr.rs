//! Quiescent-state-based reclamation: writers wait for readers, readers never wait.
//!
//! A *reader* is a thread that walks a shared structure without locks. Between two *quiet points*
//! it may hold pointers into the structure, or copies of what it read there; at a quiet point it
//! holds none. A *writer* unlinks something and starts a *grace period*; once every reader has
//! passed a quiet point since, no reader can see what was unlinked: its memory may be reused, or an
//! IOMMU may report that the unmapped address is out of reach.
//!
//! # The invariant
//! There is one counter, the epoch. A grace period is the epoch that its start produced. Each
//! reader has a slot that holds the epoch it last announced, or 0 while it is offline. Then:
//!
//! 1. *A reader that announced epoch e sees everything that was unlinked before the start of any
//!    grace period g <= e*, in all reads after the announcement. It loaded e with Acquire from a
//!    counter that only read-modify-writes with Release change, so every start up to e happens
//!    before those reads.
//! 2. *What a reader read before it announced e happens before the writer sees e*: the slot is
//!    stored with Release and scanned with Acquire.
//!
//! So when a scan finds every slot at g or above, accesses from before the announcement are over
//! (2) and later ones cannot reach what was unlinked (1). A reader that stays online needs no full
//! fence: a late store of its slot only delays the writer.
//!
//! A reader that comes *online* is different, because a writer may have skipped its slot: either
//! the scan sees the slot in use, or the reader's first read sees what was unlinked before. This is
//! Dekker's pattern (each side writes one place and reads the other's) and needs a SeqCst fence on
//! both sides: in [`Reader::online`] between slot and reads, in [`Qsbr::start`] between the
//! unlinking and the scan.

use alloc::{boxed::Box, sync::Arc};
use core::fmt;

use crate::{
    CachePadded,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence, leading_fence},
    mutant,
};

/// What a slot holds while its reader is offline or it has no reader.
const OFFLINE: u64 = 0;

/// A grace period: it begins at one moment, and is over when every reader has passed a quiet point
/// since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Grace(u64);

impl Grace {
    /// The grace period as a number. Later ones have larger numbers; 0 stands for none, and is
    /// always over.
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// The grace period with a number that [`as_u64`](Self::as_u64) returned. One that was never
    /// started is not over.
    pub const fn from_u64(raw: u64) -> Grace {
        Grace(raw)
    }
}

/// Tracks the readers of one or more lock-free structures.
pub struct Qsbr {
    /// Counts grace periods. Changed only by read-modify-writes, see the module's invariant.
    epoch: CachePadded<AtomicU64>,
    /// All grace periods up to this one are over, so that most checks need no scan.
    over: CachePadded<AtomicU64>,
    /// How many slots, from the first, were ever used: a scan skips the others.
    used: AtomicUsize,
    slots: Box<[CachePadded<Slot>]>,
}

struct Slot {
    /// The epoch that the reader announced last, or [`OFFLINE`].
    seen: AtomicU64,
    /// Whether a [`Reader`] owns this slot.
    taken: AtomicBool,
}

impl Qsbr {
    /// Room for `max_readers` readers at a time.
    pub fn new(max_readers: usize) -> Qsbr {
        let slot = |_| {
            CachePadded::new(Slot { seen: AtomicU64::new(OFFLINE), taken: AtomicBool::new(false) })
        };
        Qsbr {
            // Not 0, which means offline.
            epoch: CachePadded::new(AtomicU64::new(1)),
            over: CachePadded::new(AtomicU64::new(0)),
            used: AtomicUsize::new(0),
            slots: (0..max_readers).map(slot).collect(),
        }
    }

    /// How many of the readers' [indices](Reader::index), from 0, were ever used. A caller that has
    /// seen a grace period over sees here every reader that the period waited for.
    pub fn slots_used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Adds a reader, online; `None` if all slots are taken.
    pub fn register(self: &Arc<Self>) -> Option<Reader> {
        let index = self.slots.iter().position(|slot| {
            // Acquire pairs with the Release in `Reader::drop`: the last owner is done with it.
            slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        // A scan must not miss this slot. The fence in `online` makes it see the new count, as it
        // does for the slot itself.
        self.used.fetch_max(index + 1, Ordering::Relaxed);
        let mut reader = Reader { qsbr: Arc::clone(self), index, last: OFFLINE, online: false };
        reader.online();
        Some(reader)
    }

    /// Starts a grace period. It covers what the caller unlinked before.
    #[inline]
    pub fn start(&self) -> Grace {
        // The writer's half of the pattern in the module's comment: the unlinking comes before
        // this fence, every scan for the grace period after it (`is_over` loads the epoch that
        // the next line stores, with Acquire). It pairs with the fence in `Reader::online`.
        leading_fence(Ordering::SeqCst);
        // A reader that sees this epoch sees the unlinking before it, and before every earlier start,
        // on whatever thread.
        //
        // Ordering: a read-modify-write goes on with the releases before it, and the Acquire is needed where it
        // stands for the fence, on x86, so that no scan comes before it. (By C11 a fence makes any store after it
        // a release; loom's does not.)
        Grace(self.epoch.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Whether every reader has passed a quiet point since `grace` was started. If so, everything
    /// they read before that point happens before the return.
    #[inline]
    pub fn is_over(&self, grace: Grace) -> bool {
        // Acquire pairs with the Release of the scan that found it over, which acquired the
        // readers' slots.
        self.over.load(Ordering::Acquire) >= grace.0 || self.scan(grace)
    }

    /// As [`is_over`](Self::is_over), but only for readers for whose [index](Reader::index)
    /// `concerns` returns true: the caller guarantees that the others cannot have read what was
    /// unlinked.
    ///
    /// `concerns` is called after the start of the grace period. What it loads with Acquire and the
    /// reader stored with Release is ordered as the reader's slot is.
    #[inline]
    pub fn is_over_for(&self, grace: Grace, concerns: impl Fn(usize) -> bool) -> bool {
        if self.over.load(Ordering::Acquire) >= grace.0 {
            return true;
        }
        // As in `scan`, but a result for some readers must not be stored in `over`, which stands
        // for all.
        if self.epoch.load(Ordering::Acquire) < grace.0 {
            return false;
        }
        let used = self.used.load(Ordering::Relaxed);
        self.slots[..used].iter().enumerate().all(|(index, slot)| {
            let seen = slot.seen.load(Ordering::Acquire);
            seen == OFFLINE || seen >= grace.0 || !concerns(index)
        })
    }

    fn scan(&self, grace: Grace) -> bool {
        // All grace periods up to this one were started before the scan, fences included. The
        // Acquire ensures it even if the caller obtained the number through some unordered path.
        let mut oldest = self.epoch.load(Ordering::Acquire);
        if oldest < grace.0 {
            return false;
        }
        let used = self.used.load(Ordering::Relaxed);
        for slot in &self.slots[..used] {
            let seen = slot.seen.load(Ordering::Acquire);
            if seen != OFFLINE {
                oldest = oldest.min(seen);
                if oldest < grace.0 {
                    return false;
                }
            }
        }
        // Release: a thread that finds the period in `over` acquires all that the scans have seen.
        //
        // Ordering: Acquire adds nothing: this goes on with the releases of the scans before.
        self.over.fetch_max(oldest, Ordering::AcqRel);
        true
    }
}

impl fmt::Debug for Qsbr {
    crate::shows!(
        Qsbr as it, epoch: it.epoch.load(Ordering::Relaxed), over: it.over.load(Ordering::Relaxed),
        max_readers: it.slots.len()
    );
}

/// A thread that reads what the [`Qsbr`] protects. It is online from the start.
///
/// Its thread must pass a quiet point often, or go [`offline`](Self::offline) before it sleeps:
/// writers wait for it. Dropping the reader takes it offline for good.
pub struct Reader {
    qsbr: Arc<Qsbr>,
    index: usize,
    /// What the slot holds, or held before the reader went offline.
    last: u64,
    online: bool,
}

impl Reader {
    /// A quiet point: the reader no longer holds anything that it read before.
    ///
    /// A reader that has work to do first, such as dropping from its caches what was unlinked, does
    /// it in `before`: that is called only if a grace period was started since the last quiet point,
    /// and sees everything that its writer did before starting it. Returns whether it was called.
    ///
    /// One Acquire load, and, only if it was, one Release store. No effect while offline.
    #[inline]
    pub fn quiescent_with(&mut self, before: impl FnOnce()) -> bool {
        if !self.online {
            return false;
        }
        // Acquire: part 1 of the invariant. This load must precede `before`: an epoch loaded after
        // it could be one whose invalidations `before` had not yet seen.
        let epoch = self.qsbr.epoch.load(Ordering::Acquire);
        if epoch == self.last {
            // No grace period was started since the last announcement, so no writer waits for a
            // newer one.
            return false;
        }
        before();
        let epoch = if mutant!("the epoch is loaded after the work") {
            self.qsbr.epoch.load(Ordering::Relaxed)
        } else {
            epoch
        };
        // Release: part 2 of the invariant.
        self.slot().seen.store(epoch, Ordering::Release);
        self.last = epoch;
        true
    }

    /// Goes offline: until it is [`online`](Self::online) again, the reader reads nothing and
    /// writers do not wait for it.
    pub fn offline(&mut self) {
        // Release: part 2 of the invariant, for a scan that sees the reader offline.
        self.slot().seen.store(OFFLINE, Ordering::Release);
        self.online = false;
    }

    /// Goes online again. No effect while online.
    pub fn online(&mut self) {
        if self.online {
            return;
        }
        // The epoch may be old by the time it is stored; then writers wait needlessly for the next
        // quiet point, which does no harm.
        //
        // Ordering: part 1 of the invariant. The fence below would acquire what a relaxed load has read.
        let epoch = self.qsbr.epoch.load(Ordering::Acquire);
        // Release, so that part 2 also holds for a scan that never saw the reader offline.
        self.slot().seen.store(epoch, Ordering::Release);
        // The reader's half of the pattern in the module's comment. If a writer's fence in `start`
        // comes before this one, the reads below see what it unlinked. If it comes after, the
        // writer's scan sees the slot in use and waits.
        fence(Ordering::SeqCst);
        self.last = epoch;
        self.online = true;
    }

    /// Whether writers wait for this reader.
    #[inline]
    pub fn is_online(&self) -> bool {
        self.online
    }

    /// The newest grace period that this reader has passed: what it read since its last quiet point
    /// was still linked, or was unlinked after the start of that period.
    #[inline]
    pub fn passed(&self) -> Grace {
        Grace(self.last)
    }

    /// The reader's number: below the maximum of its [`Qsbr`], and no other reader has it at the
    /// same time.
    #[inline]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The [`Qsbr`] that this reader belongs to.
    #[inline]
    pub fn qsbr(&self) -> &Arc<Qsbr> {
        &self.qsbr
    }

    #[inline]
    fn slot(&self) -> &Slot {
        &self.qsbr.slots[self.index]
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.offline();
        // Release pairs with the Acquire in `register`: the next owner's stores come after ours.
        self.slot().taken.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Reader {
    crate::shows!(Reader as it, index: it.index, passed: it.last, online: it.online);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn without_readers_a_grace_period_is_over_at_once() {
        let qsbr = Arc::new(Qsbr::new(4));
        let grace = qsbr.start();
        assert!(qsbr.is_over(grace));
    }

    #[test]
    fn a_grace_period_ends_when_every_reader_has_been_quiet_since_its_start() {
        let qsbr = Arc::new(Qsbr::new(4));
        let mut a = qsbr.register().unwrap();
        let mut b = qsbr.register().unwrap();
        let first = qsbr.start();
        assert!(!qsbr.is_over(first));
        a.quiescent_with(|| ());
        assert!(!qsbr.is_over(first));
        let second = qsbr.start();
        assert!(second > first);
        b.quiescent_with(|| ());
        assert!(qsbr.is_over(first) && !qsbr.is_over(second));
        a.quiescent_with(|| ());
        assert!(qsbr.is_over(second));
    }

    #[test]
    fn no_grace_period_waits_for_a_reader_that_is_offline_or_gone() {
        let qsbr = Arc::new(Qsbr::new(2));
        let mut a = qsbr.register().unwrap();
        let b = qsbr.register().unwrap();
        a.offline();
        assert!(!a.is_online());
        let grace = qsbr.start();
        assert!(!qsbr.is_over(grace));
        drop(b);
        assert!(qsbr.is_over(grace));
        a.quiescent_with(|| ());
        let grace = qsbr.start();
        assert!(qsbr.is_over(grace), "a quiet point does not bring a reader online");
        a.online();
        let grace = qsbr.start();
        assert!(!qsbr.is_over(grace));
        a.quiescent_with(|| ());
        assert!(qsbr.is_over(grace));
    }

    #[test]
    fn a_reader_is_born_online_and_its_slot_is_used_again() {
        let qsbr = Arc::new(Qsbr::new(1));
        for _ in 0..3 {
            let reader = qsbr.register().unwrap();
            assert!(reader.is_online());
            assert!(qsbr.register().is_none());
            assert_eq!(reader.index(), 0);
            let grace = qsbr.start();
            assert!(!qsbr.is_over(grace));
            drop(reader);
            assert!(qsbr.is_over(grace));
        }
        assert!(Arc::new(Qsbr::new(0)).register().is_none());
    }

    #[test]
    fn work_before_a_quiet_point_is_done_only_if_something_was_started() {
        let qsbr = Arc::new(Qsbr::new(1));
        let mut reader = qsbr.register().unwrap();
        assert!(!reader.quiescent_with(|| panic!("nothing was started")));
        let grace = qsbr.start();
        let mut called = false;
        assert!(reader.quiescent_with(|| {
            called = true;
            assert!(!qsbr.is_over(grace), "announced before the work was done");
        }));
        assert!(called && qsbr.is_over(grace));
        assert_eq!(reader.passed(), grace);
    }

    #[test]
    fn a_grace_period_that_was_never_started_is_not_over() {
        let qsbr = Qsbr::new(1);
        assert!(!qsbr.is_over(Grace::from_u64(u64::MAX)));
        assert!(qsbr.is_over(Grace::from_u64(0)));
    }

    #[test]
    fn a_retired_value_is_never_seen_again_under_load() {
        use core::sync::atomic::{AtomicBool, AtomicUsize};
        // The value that an index leads to is zeroed once its grace period is over: no reader may
        // ever find a zero.
        let qsbr = Arc::new(Qsbr::new(4));
        let values: Arc<Vec<AtomicUsize>> = Arc::new((0..8).map(|_| AtomicUsize::new(1)).collect());
        let current = Arc::new(AtomicUsize::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..3)
            .map(|n| {
                let (values, current, stop) = (values.clone(), current.clone(), stop.clone());
                let mut reader = qsbr.register().unwrap();
                std::thread::spawn(move || {
                    let mut turns = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        let at = current.load(Ordering::Acquire);
                        assert_ne!(values[at].load(Ordering::Relaxed), 0);
                        turns += 1;
                        // Otherwise, with more threads than CPUs, each turn of the writer takes a
                        // time slice or two.
                        std::thread::yield_now();
                        if turns.is_multiple_of(n + 2) {
                            reader.offline();
                            reader.online();
                        } else {
                            reader.quiescent_with(|| ());
                        }
                    }
                })
            })
            .collect();
        for turn in 1..500 {
            let next = turn % values.len();
            values[next].store(1, Ordering::Relaxed);
            let old = current.swap(next, Ordering::AcqRel);
            let grace = qsbr.start();
            while !qsbr.is_over(grace) {
                std::thread::yield_now();
            }
            values[old].store(0, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::model::{Memory, check};
    use alloc::vec::Vec;
    use loom::thread;

    /// The smallest structure with one pointer: `root` says which of two cells is linked.
    /// Reclaiming a cell writes to it; loom fails the model if a reader's access to the cell
    /// overlaps that write or is not ordered with it.
    struct Shared {
        root: AtomicUsize,
        cells: [Memory; 2],
        reclaimed: [AtomicBool; 2],
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared {
            root: AtomicUsize::new(0),
            cells: Default::default(),
            reclaimed: [AtomicBool::new(false), AtomicBool::new(false)],
        })
    }

    /// One critical section.
    fn read(shared: &Shared) {
        let at = shared.root.load(Ordering::Acquire);
        assert!(!shared.reclaimed[at].load(Ordering::Relaxed), "a reclaimed cell was reached");
        shared.cells[at].read();
    }

    /// Unlinks the linked cell, and reclaims it if the grace period ends within `polls` checks.
    /// (Bounded, as loom explores a scan for each check.)
    fn replace(shared: &Shared, qsbr: &Qsbr, polls: usize) {
        replace_if(shared, qsbr, polls, Qsbr::is_over);
    }

    fn replace_if(
        shared: &Shared,
        qsbr: &Qsbr,
        polls: usize,
        is_over: impl Fn(&Qsbr, Grace) -> bool,
    ) {
        // Relaxed would do for the cell that is linked now, which was there from the beginning.
        shared.root.store(1, Ordering::Release);
        let grace = qsbr.start();
        for _ in 0..polls {
            if is_over(qsbr, grace) {
                shared.reclaimed[0].store(true, Ordering::Relaxed);
                shared.cells[0].write();
                return;
            }
            thread::yield_now();
        }
    }

    #[test]
    fn a_reader_never_sees_reclaimed_memory() {
        check(None, || {
            let qsbr = Arc::new(Qsbr::new(1));
            let shared = shared();
            let mut reader = qsbr.register().unwrap();
            let theirs = Arc::clone(&shared);
            let thread = thread::spawn(move || {
                read(&theirs);
                reader.quiescent_with(|| ());
                read(&theirs);
            });
            replace(&shared, &qsbr, 2);
            thread.join().unwrap();
        });
    }

    #[test]
    fn nor_one_that_is_born_meanwhile() {
        check(None, || {
            let qsbr = Arc::new(Qsbr::new(1));
            let shared = shared();
            let (theirs, from) = (Arc::clone(&shared), Arc::clone(&qsbr));
            let thread = thread::spawn(move || {
                let mut reader = from.register().unwrap();
                read(&theirs);
                reader.quiescent_with(|| ());
                read(&theirs);
            });
            replace(&shared, &qsbr, 2);
            thread.join().unwrap();
        });
    }

    #[test]
    fn nor_one_that_goes_offline_and_comes_back() {
        check(None, || {
            let qsbr = Arc::new(Qsbr::new(1));
            let shared = shared();
            let mut reader = qsbr.register().unwrap();
            let theirs = Arc::clone(&shared);
            let thread = thread::spawn(move || {
                read(&theirs);
                reader.offline();
                reader.online();
                read(&theirs);
                drop(reader);
            });
            replace(&shared, &qsbr, 2);
            thread.join().unwrap();
        });
    }

    #[test]
    fn nor_one_of_two() {
        check(Some(3), || {
            let qsbr = Arc::new(Qsbr::new(2));
            let shared = shared();
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let mut reader = qsbr.register().unwrap();
                    let theirs = Arc::clone(&shared);
                    thread::spawn(move || {
                        read(&theirs);
                        reader.quiescent_with(|| ());
                        read(&theirs);
                    })
                })
                .collect();
            replace(&shared, &qsbr, 2);
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    /// The result may come from another thread's scan, through `over`.
    fn found_by_another(is_over: fn(&Qsbr, Grace) -> bool) {
        check(Some(3), move || {
            let qsbr = Arc::new(Qsbr::new(1));
            let shared = shared();
            let mut reader = qsbr.register().unwrap();
            let theirs = Arc::clone(&shared);
            let reading = thread::spawn(move || {
                read(&theirs);
                reader.quiescent_with(|| ());
                read(&theirs);
            });
            let checking = Arc::clone(&qsbr);
            let other = thread::spawn(move || {
                let _ = checking.is_over(Grace::from_u64(2));
            });
            replace_if(&shared, &qsbr, 2, is_over);
            reading.join().unwrap();
            other.join().unwrap();
        });
    }

    #[test]
    fn a_thread_that_finds_it_over_may_reclaim() {
        found_by_another(Qsbr::is_over);
    }

    #[test]
    fn so_may_one_that_asks_for_some_readers() {
        found_by_another(|qsbr, grace| qsbr.is_over_for(grace, |_| true));
    }

    /// A thread that has the number of a grace period from the one that has started it, by a way that orders
    /// nothing.
    fn passed_on(is_over: fn(&Qsbr, Grace) -> bool) {
        check(Some(3), move || {
            let qsbr = Arc::new(Qsbr::new(1));
            let (shared, number) = (shared(), Arc::new(AtomicU64::new(0)));
            let (theirs, from) = (Arc::clone(&shared), Arc::clone(&qsbr));
            let reading = thread::spawn(move || {
                let mut reader = from.register().unwrap();
                read(&theirs);
                reader.quiescent_with(|| ());
                read(&theirs);
            });
            let (theirs, from, passed) =
                (Arc::clone(&shared), Arc::clone(&qsbr), Arc::clone(&number));
            let other = thread::spawn(move || {
                let grace = Grace::from_u64(passed.load(Ordering::Relaxed));
                if grace.as_u64() > 0 && is_over(&from, grace) {
                    theirs.reclaimed[0].store(true, Ordering::Relaxed);
                    theirs.cells[0].write();
                }
            });
            shared.root.store(1, Ordering::Release);
            number.store(qsbr.start().as_u64(), Ordering::Relaxed);
            reading.join().unwrap();
            other.join().unwrap();
        });
    }

    #[test]
    fn a_thread_that_was_passed_its_number_may_reclaim() {
        passed_on(Qsbr::is_over);
    }

    #[test]
    fn so_may_one_for_which_some_readers_count() {
        passed_on(|qsbr, grace| qsbr.is_over_for(grace, |_| true));
    }

    #[test]
    fn work_before_a_quiet_point_sees_what_came_before_the_start() {
        check(None, || {
            let qsbr = Arc::new(Qsbr::new(1));
            let mut reader = qsbr.register().unwrap();
            let published = Arc::new(AtomicUsize::new(0));
            let (from, theirs) = (Arc::clone(&qsbr), Arc::clone(&published));
            let thread = thread::spawn(move || {
                theirs.store(1, Ordering::Relaxed);
                from.start();
            });
            reader.quiescent_with(|| assert_eq!(published.load(Ordering::Relaxed), 1));
            thread.join().unwrap();
        });
    }
}
