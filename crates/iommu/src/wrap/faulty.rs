//! Failures on purpose.

use alloc::vec::Vec;
use core::{
    fmt,
    // The atomics of `core` even under loom: counting orders nothing.
    sync::atomic::{AtomicU64, Ordering},
};

use ringfence_sync::lock::SpinLock;

use super::Kind;
use crate::{Domain, Error, Gather, Iova, Map, Partial, Range, Result, SyncToken, Work};

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

/// Whether a failing call reaches the inner domain.
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
    calls: [AtomicU64; Kind::ALL.len()],
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
        let since = self.calls[kind.index()].load(Ordering::Relaxed);
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
        let call = self.calls[kind.index()].fetch_add(1, Ordering::Relaxed) + 1;
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
const OVER: SyncToken = SyncToken(u64::MAX);

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

    crate::pass_on!(inner: geometry, capabilities, mappings_from);

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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::wrap::fake::{Fake, map, page};

    const INJECTED: Error = Error::Gone("injected fault");

    #[test]
    fn the_nth_call_of_its_kind_fails_and_no_other() {
        let domain = Faulty::new(Fake::default(), 0);
        domain.flush_iotlb_all().unwrap();
        domain.inject(Kind::FlushAll, When::Nth(2), Stage::Before);
        domain.iotlb_sync_map(page(0)).unwrap();
        domain.flush_iotlb_all().unwrap();
        assert_eq!(domain.flush_iotlb_all(), Err(INJECTED));
        domain.flush_iotlb_all().unwrap();
        assert_eq!(domain.injected(), 1);
    }

    #[test]
    fn a_failure_before_changes_nothing_and_one_after_has_changed_it() {
        let domain = Faulty::new(Fake::default(), 0);
        domain.inject_error(Kind::Map, When::Nth(1), Stage::Before, Error::NoMemory);
        domain.inject(Kind::Map, When::Nth(2), Stage::After);
        let map = |n| domain.map(map(page(n), 0));
        assert_eq!(map(1), Err(Error::NoMemory));
        assert_eq!(domain.iova_to_phys(page(1).first()), None);
        assert_eq!(map(2), Err(INJECTED));
        assert!(domain.iova_to_phys(page(2).first()).is_some());
        assert_eq!(map(3), Ok(()));
        domain.inject(Kind::Sync, When::Nth(1), Stage::Before);
        domain.inject(Kind::SyncEnd, When::Nth(1), Stage::After);
        for _ in 0..2 {
            let mut gather = Gather::new();
            domain.unmap(page(3), &mut gather).unwrap();
            domain.unmap(page(5), &mut gather).unwrap();
            assert_eq!(domain.iotlb_sync(&mut gather), Err(INJECTED));
            assert!(gather.is_empty());
        }
    }

    #[test]
    fn every_nth_always_and_never() {
        let domain = Faulty::new(Fake::default(), 0);
        domain.inject(Kind::FlushAll, When::Every(3), Stage::Before);
        domain.inject(Kind::FlushAll, When::Every(0), Stage::Before);
        let failed: Vec<_> = (1..10).filter(|_| domain.flush_iotlb_all().is_err()).collect();
        assert_eq!(failed, [3, 6, 9]);
        domain.inject(Kind::Lookup, When::Always, Stage::Before);
        domain.map(map(page(1), 0)).unwrap();
        assert_eq!(domain.iova_to_phys(page(1).first()), None);
        domain.clear();
        assert!(domain.iova_to_phys(page(1).first()).is_some());
    }

    #[test]
    fn chance_is_about_as_configured_and_repeats_with_its_seed() {
        let run = |seed| {
            let domain = Faulty::new(Fake::default(), seed);
            domain.inject(Kind::FlushAll, When::PerMillion(100_000), Stage::Before);
            (0..2000).filter(|_| domain.flush_iotlb_all().is_err()).collect::<Vec<u32>>()
        };
        let first = run(42);
        assert!((100..300).contains(&first.len()), "{} of 2000 at 10 %", first.len());
        assert_eq!(first, run(42));
        assert_ne!(first, run(43));
    }
}
