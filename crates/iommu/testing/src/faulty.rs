//! Failures on purpose.

use std::{
    fmt,
    // The atomics of `std` even under loom: counting orders nothing.
    sync::atomic::{AtomicU64, Ordering},
};

use ringfence_iommu::{Domain, Error, Gather, Iova, Map, Partial, Range, Result, SyncToken, Work};
use ringfence_sync::lock::SpinLock;

/// The calls of a [`Domain`] that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An element of [`map_pages`](Domain::map_pages)
    Map,
    /// An element of [`unmap_pages`](Domain::unmap_pages)
    Unmap,
    /// [`sync_begin`](Domain::sync_begin) of [`Work::Map`]
    SyncMap,
    /// [`sync_begin`](Domain::sync_begin) of [`Work::Unmap`]
    Sync,
    /// [`sync_begin`](Domain::sync_begin) of [`Work::All`]
    FlushAll,
    /// A [`sync_poll`](Domain::sync_poll) that finds the sync over.
    SyncEnd,
    /// [`iova_to_phys`](Domain::iova_to_phys)
    Lookup,
}

impl Kind {
    const COUNT: usize = Kind::Lookup as usize + 1;

    /// The kind of a sync's beginning.
    const fn of(work: Work<'_>) -> Kind {
        match work {
            Work::Map(_) => Kind::SyncMap,
            Work::Unmap { .. } => Kind::Sync,
            Work::All => Kind::FlushAll,
        }
    }
}

/// Which calls of a kind fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The nth call from when the rule was made on, counted from 1, and no other.
    Nth(u64),
    /// Every nth call from when the rule was made on; 0 is never.
    Every(u64),
    /// This many calls in a million, by a pseudo-random generator: with the same seed, the same
    /// calls in the same order fail.
    PerMillion(u32),
    /// Every call.
    Always,
}

/// Whether a failing call reaches the inner domain. (A failing [`Kind::SyncEnd`] always does.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It does not: the call fails with nothing done.
    Before,
    /// It does, but its result is discarded and the call is reported as failed, as by a device
    /// whose response is lost. A failed `map_pages` then breaks the promise that nothing was
    /// changed; use it to test the layers above the driver that makes this promise.
    After,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    kind: Kind,
    when: When,
    stage: Stage,
    error: Error,
    /// Calls of the kind before the rule was made.
    since: u64,
}

/// A domain that fails some of its calls, by rules. It must not wrap another `Faulty`.
///
/// A failing [`iova_to_phys`](Domain::iova_to_phys) finds nothing; a failing end of a sync reports
/// [`Range::ALL`], whatever the inner domain reports.
pub struct Faulty<D> {
    inner: D,
    rules: SpinLock<Vec<Rule>>,
    calls: [AtomicU64; Kind::COUNT],
    /// The state of the generator: each draw adds a constant to it, so that draws need no lock.
    random: AtomicU64,
    injected: AtomicU64,
}

impl<D> Faulty<D> {
    /// Nothing fails yet. `seed` is for [`When::PerMillion`].
    pub fn new(inner: D, seed: u64) -> Faulty<D> {
        Faulty {
            inner,
            rules: SpinLock::new(Vec::new()),
            calls: Default::default(),
            random: AtomicU64::new(seed),
            injected: AtomicU64::new(0),
        }
    }

    /// Makes calls of `kind` fail with [`Error::Gone`].
    pub fn inject(&self, kind: Kind, when: When, stage: Stage) {
        self.inject_error(kind, when, stage, Error::Gone("injected fault"));
    }

    /// Makes calls of `kind` fail with `error`. If several rules apply to a call, the first one
    /// made wins.
    pub fn inject_error(&self, kind: Kind, when: When, stage: Stage, error: Error) {
        let since = self.calls[kind as usize].load(Ordering::Relaxed);
        self.rules.lock().push(Rule { kind, when, stage, error, since });
    }

    /// Forgets all rules.
    pub fn clear(&self) {
        self.rules.lock().clear();
    }

    /// How many calls were made to fail.
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }

    /// The domain inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn fault(&self, kind: Kind) -> Option<(Stage, Error)> {
        let call = self.calls[kind as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let rules = self.rules.lock();
        let rule = rules.iter().filter(|rule| rule.kind == kind).find(|rule| {
            // A call that began before the rule was made may arrive here after it: the rule does
            // not apply.
            let Some(nth) = call.checked_sub(rule.since).filter(|&nth| nth != 0) else {
                return false;
            };
            match rule.when {
                When::Nth(n) => nth == n,
                When::Every(n) => n != 0 && nth % n == 0,
                When::PerMillion(share) => self.draw() % 1_000_000 < u64::from(share),
                When::Always => true,
            }
        })?;
        self.injected.fetch_add(1, Ordering::Relaxed);
        Some((rule.stage, rule.error))
    }

    /// The next number of the generator (SplitMix64).
    fn draw(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.random.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A sync that was over as soon as it began, but may still fail.
const OVER: SyncToken = SyncToken::new(u64::MAX);

impl<D: Domain> Faulty<D> {
    fn around<R>(&self, kind: Kind, call: impl FnOnce(&D) -> Result<R>) -> Result<R> {
        match self.fault(kind) {
            None => call(&self.inner),
            Some((Stage::Before, error)) => Err(error),
            Some((Stage::After, error)) => {
                let _ = call(&self.inner);
                Err(error)
            }
        }
    }
}

// SAFETY: the inner domain's promise; it does less only where it reports a failure.
unsafe impl<D: Domain> Domain for Faulty<D> {
    type Target = D::Target;

    ringfence_iommu::pass_on!(inner: geometry, capabilities, mappings_from);

    fn map_pages(&self, maps: &[Map<D::Target>]) -> Result<(), Partial> {
        Partial::each(maps, |&map| self.around(Kind::Map, |inner| inner.map(map)))
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut bytes = 0;
        Partial::each(ranges, |&range| {
            bytes += self.around(Kind::Unmap, |inner| inner.unmap(range, gather))?;
            Ok(())
        })?;
        Ok(bytes)
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        let begun = self.around(Kind::of(work), |inner| inner.sync_begin(work));
        begun.map(|token| if token == SyncToken::DONE { OVER } else { token })
    }
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        let over = token == OVER || self.inner.sync_poll(token, work, failed);
        if over && let Some((_, error)) = self.fault(Kind::SyncEnd) {
            failed(Range::ALL, error);
        }
        over
    }
    fn sync_wait(&self, token: SyncToken) {
        if token != OVER {
            self.inner.sync_wait(token);
        }
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<D::Target> {
        self.around(Kind::Lookup, |inner| Ok(inner.iova_to_phys(iova))).ok().flatten()
    }
}

impl<D: fmt::Debug> fmt::Debug for Faulty<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty")
            .field("inner", &self.inner)
            .field("rules", &self.rules)
            .field("injected", &self.injected())
            .finish_non_exhaustive()
    }
}
