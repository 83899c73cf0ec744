//! What keeps a guard's translations in use, and how a thread waits for one without being in the
//! way of their invalidation.

use std::{
    cell::{Cell, RefCell},
    rc::{Rc, Weak},
    sync::{Arc, atomic::Ordering},
    thread,
    time::Instant,
};

use ringfence_iommu::{Iova, Prot, Range, shootdown::Lease, table::Translation};

use super::{
    Failure,
    guards::{Found, Guards, Looker},
    pieces::Pieces,
};
use crate::{Miss, misses::PAGE};

/// The most leases of a guard: instead of one more it takes one on the whole address space.
const LEASES: usize = 256;
/// The most pieces of a guard and runs of pages in them: with more it keeps what it has, and cannot
/// wait any more.
const REMEMBERED: usize = 1 << 14;
/// The most pieces of an access.
pub(super) const PIECES: usize = 1 << 16;
/// How many addresses are found without a search.
const RECENT: usize = 8;
/// The most misses that are sent at a time.
const MISSES: usize = 1024;

thread_local! {
    /// The guards of this thread. While it waits none of them is used.
    static HERE: RefCell<Vec<Weak<GuardState>>> = const { RefCell::new(Vec::new()) };
}

fn here() -> Vec<Guard> {
    HERE.with_borrow(|here| here.iter().filter_map(Weak::upgrade).map(Guard).collect())
}

/// What one piece of work has translated and keeps in use. It and its clones, which are the same,
/// stay with the thread that made it. With more than 16,384 pieces it is [held](Self::hold) from
/// then on.
#[derive(Clone)]
pub struct Guard(Rc<GuardState>);

/// The guards of a thread that waits. A panic meanwhile leaves none of them usable.
struct Waiting(Vec<Guard>);

impl Drop for Waiting {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.iter().for_each(|held| held.0.failure.set(Some(Failure::Changed { addr: 0 })));
        }
    }
}

/// What a guard and its clones hold.
struct GuardState {
    source: Arc<Guards>,
    /// Whether a target, with as many bytes as are given and one more, is in the same place of this
    /// process still.
    same_place: Box<dyn Fn(u64, u64) -> bool>,
    inner: RefCell<Inner>,
    /// What was handed out last, by its first page, to be handed out again without a search. After
    /// a wait it is good again, as all that was handed out, or nothing is.
    recent: [Cell<Recent>; RECENT],
    failure: Cell<Option<Failure>>,
    /// Never drops its leases, and so never waits.
    fixed: Cell<bool>,
}

/// Addresses of one piece that were handed out.
#[derive(Clone, Copy)]
struct Recent {
    first: u64,
    last: u64,
    delta: u64,
    /// What for. Nothing, where there are none.
    used: Prot,
}

impl Recent {
    const NONE: Recent = Recent { first: 0, last: 0, delta: 0, used: Prot::empty() };
}

#[derive(Default)]
struct Inner {
    pieces: Pieces,
    leases: Leases,
    /// The pieces are what was handed out; no lease covers them.
    let_go: bool,
}

#[derive(Default)]
struct Leases {
    held: Vec<Lease>,
    all: bool,
}

impl Leases {
    fn take(&mut self, looker: &Looker, range: Range) {
        if !self.all {
            self.all = self.held.len() >= LEASES;
            // A lease on everything also covers what is looked up later: an invalidation of that
            // begins after this lease was taken.
            self.held.push(looker.lease(if self.all { Range::ALL } else { range }));
        }
    }
}

impl Guard {
    /// A guard of `source`, for this thread. `same_place(target, extent)` returns whether the
    /// `extent + 1` bytes at a target still lie where they lay when the guard was made; it is
    /// called after a wait.
    pub fn new(source: &Arc<Guards>, same_place: Box<dyn Fn(u64, u64) -> bool>) -> Guard {
        let state = Rc::new(GuardState {
            source: Arc::clone(source),
            same_place,
            inner: RefCell::default(),
            recent: [const { Cell::new(Recent::NONE) }; RECENT],
            failure: Cell::new(None),
            fixed: Cell::new(false),
        });
        HERE.with_borrow_mut(|here| here.push(Rc::downgrade(&state)));
        Guard(state)
    }

    /// From here on what was handed out stays in use until the guard is dropped, even while this
    /// thread waits: for asynchronous I/O that goes on meanwhile. In return an access that would
    /// have to wait fails.
    pub fn hold(&self) {
        self.0.fixed.set(true);
    }

    /// Calls `each` with every target of the `count` bytes at `addr` and its number of bytes less
    /// one, and keeps them in use, waiting for what is missing. If one part cannot be translated,
    /// none is, and the guard has failed. `each` must not use the guard.
    ///
    /// # Errors
    /// See [`Failure`]. Every later access returns the same, except that a
    /// [`WouldWait`](Failure::WouldWait) of a guard that is not [held](Self::hold) lasts only until
    /// the other access ends.
    #[inline]
    pub fn translate(
        &self,
        addr: u64,
        count: usize,
        prot: Prot,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), Failure> {
        self.check()?;
        let Some(range) = self.range(addr, count).map_err(|failure| self.fail(failure, prot))?
        else {
            return Ok(());
        };
        let slot = &self.0.recent[(addr / PAGE) as usize % RECENT];
        let recent = slot.get();
        if recent.first <= addr
            && range.last().0 <= recent.last
            && recent.used.allows(prot)
            && !recent.used.is_empty()
        {
            each(addr.wrapping_add(recent.delta), range.extent());
            return Ok(());
        }
        self.is_here(addr)?;
        // Mostly it is one piece, and mostly known.
        for known in [true, false] {
            if let Some(piece) = self.0.inner.borrow_mut().pieces.touch_one(range, prot) {
                each(addr.wrapping_add(piece.delta), range.extent());
                // What was touched is whole pages.
                let first = (addr & !(PAGE - 1)).max(piece.range().first().0);
                let last = (range.last().0 | (PAGE - 1)).min(piece.range().last().0);
                slot.set(Recent { first, last, delta: piece.delta, used: piece.used });
                return Ok(());
            }
            if known && !self.0.inner.borrow().pieces.covers(range, prot) {
                self.ensure(&[(range, prot)]).map_err(|failure| self.fail(failure, prot))?;
            }
        }
        let mut inner = self.0.inner.borrow_mut();
        inner.pieces.touch(range, prot);
        inner.pieces.targets(range, each);
        Ok(())
    }

    /// As [`translate`](Self::translate), but the targets stay in use only until this thread waits
    /// again, and the guard does not fail if there is no translation.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn probe(
        &self,
        addr: u64,
        count: usize,
        prot: Prot,
        each: impl FnMut(u64, u64),
    ) -> Result<(), Failure> {
        self.check()?;
        let Some(range) = self.range(addr, count)? else { return Ok(()) };
        self.is_here(addr)?;
        if !self.0.inner.borrow().pieces.covers(range, prot) {
            self.ensure(&[(range, prot)])?;
        }
        self.0.inner.borrow().pieces.targets(range, each);
        Ok(())
    }

    /// Translates all of `parts` (addresses, bytes, accesses), before the first of them is used;
    /// their misses are sent together, and waited for once.
    ///
    /// # Errors
    /// As [`translate`](Self::translate).
    pub fn prefetch(&self, parts: &[(u64, usize, Prot)]) -> Result<(), Failure> {
        self.check()?;
        self.is_here(parts.first().map_or(0, |part| part.0))?;
        let mut ranges = Vec::with_capacity(parts.len());
        for &(addr, count, prot) in parts {
            let range = self.range(addr, count).map_err(|failure| self.fail(failure, prot))?;
            ranges.extend(range.map(|range| (range, prot)));
        }
        self.ensure(&ranges).map_err(|failure| {
            let at = match failure {
                Failure::Refused { addr }
                | Failure::TimedOut { addr }
                | Failure::OutsideMemory { addr } => Iova(addr),
                _ => ranges.first().map_or(Iova(0), |(range, _)| range.first()),
            };
            let part = ranges.iter().find(|(range, _)| range.contains(at));
            self.fail(failure, part.map_or(Prot::empty(), |&(_, prot)| prot))
        })?;
        // As if handed out: otherwise a wait would drop them.
        let pieces = &mut self.0.inner.borrow_mut().pieces;
        ranges.iter().for_each(|&(range, prot)| pieces.touch(range, prot));
        Ok(())
    }

    /// Whether every access so far was translated: to be called before their results are published.
    ///
    /// # Errors
    /// Why not.
    #[inline]
    pub fn check(&self) -> Result<(), Failure> {
        self.0.failure.get().or_else(|| self.0.source.failure()).map_or(Ok(()), Err)
    }

    /// Makes it fail for good, and reports the fault; returns the first failure, which every later
    /// access returns.
    pub fn fail(&self, failure: Failure, access: Prot) -> Failure {
        if let Some(first) = self.0.failure.get() {
            return first;
        }
        self.0.failure.set(Some(failure));
        self.0.source.failed(failure, access);
        failure
    }

    /// While the thread waits no lease covers what was handed out: code that it calls meanwhile (a
    /// sink of misses, the VMM's memory) gets none of it. Nor does code that is called with a
    /// target.
    fn is_here(&self, addr: u64) -> Result<(), Failure> {
        match self.0.inner.try_borrow_mut() {
            Ok(inner) if !inner.let_go => Ok(()),
            _ => Err(Failure::WouldWait { addr }),
        }
    }

    fn range(&self, addr: u64, count: usize) -> Result<Option<Range>, Failure> {
        if count == 0 {
            return Ok(None);
        }
        let range = Range::from_len(Iova(addr), count as u64);
        range.map(Some).ok_or(Failure::Overflow { addr, count })
    }

    /// Translates and leases `parts`. While it waits for one of them no guard of this thread holds
    /// a lease, so that an invalidation that the front end waits for can complete; when it goes on,
    /// all of them lead where they led.
    fn ensure(&self, parts: &[(Range, Prot)]) -> Result<(), Failure> {
        self.bound();
        let mut others = Waiting(Vec::new());
        let mut began = None;
        let since = self.0.source.misses_sent();
        let result = loop {
            let updates = self.0.source.updates_seen();
            let mut wanted = Vec::new();
            match self.attempt(&others.0, (parts, since), &mut wanted) {
                Ok(true) => break Ok(()),
                Err(failure) => break Err(failure),
                Ok(false) if self.0.fixed.get() => {
                    let addr = wanted.first().map_or(parts[0].0.first().0, |miss| miss.iova.0);
                    break Err(Failure::WouldWait { addr });
                }
                Ok(false) => {}
            }
            let now = Instant::now();
            let (_, until) = *began.get_or_insert_with(|| {
                self.0.source.counted.waits.fetch_add(1, Ordering::Relaxed);
                others.0 = here();
                others.0.retain(|held| !held.0.fixed.get());
                (now, now + self.0.source.timeout())
            });
            others.0.iter().for_each(|held| held.let_go());
            if now >= until {
                self.0.source.timed_out();
                let addr = wanted.first().map_or(parts[0].0.first().0, |miss| miss.iova.0);
                break Err(Failure::TimedOut { addr });
            }
            // Else something changed while we looked, and is there now.
            if !wanted.is_empty() {
                self.0.source.send_and_wait(&mut wanted, updates, until);
            }
        };
        if let Some((began, _)) = began {
            let waited = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.0.source.counted.waited_ns.fetch_add(waited, Ordering::Relaxed);
        }
        // Guards that cannot go on fail here, before they use memory whose leases are gone.
        for held in others.0.iter().filter(|_| result.is_err()) {
            held.settle();
        }
        result
    }

    /// One look at all that the guards of this thread need. `wanted` receives what is missing of
    /// it.
    fn attempt(
        &self,
        others: &[Guard],
        (parts, since): (&[(Range, Prot)], u64),
        wanted: &mut Vec<Miss>,
    ) -> Result<bool, Failure> {
        let mut ready = true;
        for held in others {
            ready &=
                held.take_up(since, wanted).map_err(|failure| held.fail(failure, Prot::empty()))?;
        }
        let mut inner = self.0.inner.borrow_mut();
        let Inner { pieces, leases, .. } = &mut *inner;
        self.0.source.look(since, |looker| {
            for &(range, prot) in parts {
                ready &= cover(looker, pieces, leases, range, prot, wanted)?;
            }
            Ok(ready)
        })
    }

    fn let_go(&self) {
        let mut inner = self.0.inner.borrow_mut();
        inner.pieces.forget_untouched();
        inner.leases = Leases::default();
        inner.let_go = true;
        self.0.recent.iter().for_each(|recent| recent.set(Recent::NONE));
    }

    /// Translates all that was handed out again, if its leases were dropped. False if some of it is
    /// missing, which is added to `wanted`.
    fn take_up(&self, since: u64, wanted: &mut Vec<Miss>) -> Result<bool, Failure> {
        let mut inner = self.0.inner.borrow_mut();
        if !inner.let_go || self.0.failure.get().is_some() {
            return Ok(true);
        }
        let mut new = Inner::default();
        let (mut ready, mut places) = (true, Vec::new());
        self.0.source.look(since, |looker| {
            for old in inner.pieces.iter() {
                for range in old.touched() {
                    let changed = Failure::Changed { addr: range.first().0 };
                    let there =
                        cover(looker, &mut new.pieces, &mut new.leases, range, old.used, wanted);
                    match there {
                        Ok(true) => {}
                        Ok(false) => {
                            ready = false;
                            continue;
                        }
                        Err(_) => return Err(changed),
                    }
                    new.pieces.touch(range, old.used);
                    let target = range.first().0.wrapping_add(old.delta);
                    let (mut same, mut runs) = (true, 0);
                    new.pieces.targets(range, |first, _| {
                        same &= first == target;
                        runs += 1;
                    });
                    if !same || runs != 1 {
                        return Err(changed);
                    }
                    places.push((target, range.extent(), changed));
                }
            }
            Ok(())
        })?;
        // Under their leases by now, and under no lock: this calls the VMM's code.
        for (target, extent, changed) in places {
            if !(self.0.same_place)(target, extent) {
                return Err(changed);
            }
        }
        if ready {
            *inner = new;
        }
        Ok(ready)
    }

    /// After a wait that failed: goes on if it can, and fails if not.
    fn settle(&self) {
        let result = self.take_up(u64::MAX, &mut Vec::new());
        let addr = || self.0.inner.borrow().pieces.iter().next().map_or(0, |p| p.range().first().0);
        match result {
            Ok(true) => {}
            Ok(false) => drop(self.fail(Failure::Changed { addr: addr() }, Prot::empty())),
            Err(failure) => drop(self.fail(failure, Prot::empty())),
        }
    }

    /// Bounds the number of pieces that a guard keeps.
    fn bound(&self) {
        let mut inner = self.0.inner.borrow_mut();
        if inner.pieces.len() > REMEMBERED {
            self.0.fixed.set(true);
            // The pieces are only a cache now: leases are kept, and taken until one is of everything.
            inner.pieces = Pieces::default();
        }
    }
}

impl Drop for GuardState {
    fn drop(&mut self) {
        // The list of a thread that ends is not used any more.
        let _ = HERE.try_with(|here| {
            here.borrow_mut().retain(|held| held.strong_count() != 0);
        });
    }
}

/// Translates what is not in `pieces` yet of `range`, and takes leases on it. False if some of it
/// is missing, which is added to `wanted`.
fn cover(
    looker: &Looker,
    pieces: &mut Pieces,
    leases: &mut Leases,
    range: Range,
    prot: Prot,
    wanted: &mut Vec<Miss>,
) -> Result<bool, Failure> {
    let (mut at, mut ready) = (range.first().0, true);
    let most = pieces.len() + PIECES;
    // What was found last, to which the next may be joined: one piece, and one lease, for both.
    let mut run: Option<Translation> = None;
    let mut enter = |pieces: &mut Pieces, run: &mut Option<Translation>| {
        if let Some(run) = run.take() {
            pieces.add(&run);
            leases.take(looker, run.range);
        }
    };
    loop {
        let last = match pieces.find(at) {
            Some(piece) if piece.prot.allows(prot) => piece.range().last().0,
            // It allows less than the access needs: nothing of it may be leased while it is
            // replaced.
            known => match (looker.find(Iova(at), prot), known.map(|piece| piece.range())) {
                (Found::There(found), None) => {
                    if pieces.len() >= most {
                        return Err(Failure::TooManyParts { addr: range.first().0 });
                    }
                    let gap = pieces.gap(at, found.range);
                    // `at` lies behind the run, whose pieces are not entered yet.
                    let ended = run.map(|run| run.range.last().0 + 1);
                    let first = Iova(ended.map_or(gap.first().0, |ended| ended.max(gap.first().0)));
                    let joins = |run: &Translation| {
                        ended == Some(first.0) && (run.delta, run.prot) == (found.delta, found.prot)
                    };
                    let from = match run.filter(joins) {
                        Some(run) => run.range.first(),
                        None => {
                            enter(pieces, &mut run);
                            first
                        }
                    };
                    let range = Range::new(from, gap.last()).expect("`at` lies in it");
                    run = Some(Translation { range, ..found });
                    gap.last().0
                }
                (Found::There(_), Some(known)) => {
                    ready = false;
                    known.last().0
                }
                (Found::Missing, _) => {
                    ready = false;
                    wanted.push(Miss { iova: Iova(at), access: prot, again: None });
                    if wanted.len() >= MISSES {
                        return Ok(false);
                    }
                    at | (PAGE - 1)
                }
                (Found::Refused, _) => return Err(Failure::Refused { addr: at }),
            },
        };
        if last >= range.last().0 {
            enter(pieces, &mut run);
            return Ok(ready);
        }
        at = last + 1;
    }
}
