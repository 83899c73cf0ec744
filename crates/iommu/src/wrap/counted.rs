//! Counting calls, bytes and failures.

use core::{
    fmt,
    ops,
    // The atomics of `core` even under loom: counting orders nothing.
    sync::atomic::{AtomicU64, Ordering},
};

use ringfence_sync::CachePadded;

use super::Kind;
use crate::{Domain, Error, Gather, Iova, Map, Partial, Range, Result, SyncToken, Work};

/// A domain that counts the calls that go through it.
///
/// A call costs two or three relaxed atomic additions on a cache line of its kind; threads that
/// make the same kind of call at the same time share that line.
pub struct Counted<D> {
    inner: D,
    counters: [CachePadded<Counters>; Kind::ALL.len()],
}

#[derive(Default)]
struct Counters {
    calls: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
}

/// What was counted of one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Count {
    /// How many calls returned.
    pub calls: u64,
    /// How many of them returned an error.
    pub errors: u64,
    /// How many bytes were mapped, or unmapped by lists without an error; 0 for other kinds. Stops
    /// at 2^64-1.
    pub bytes: u64,
}

/// A snapshot of all counters: `counts[Kind::Map].calls`.
///
/// Taken while calls go on, its numbers are from slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    of: [Count; Kind::ALL.len()],
}

impl Counts {
    /// What was counted between `earlier` and this snapshot.
    pub fn since(&self, earlier: &Counts) -> Counts {
        let mut of = self.of;
        for (now, then) in of.iter_mut().zip(&earlier.of) {
            now.calls = now.calls.saturating_sub(then.calls);
            now.errors = now.errors.saturating_sub(then.errors);
            now.bytes = now.bytes.saturating_sub(then.bytes);
        }
        Counts { of }
    }
}

impl ops::Index<Kind> for Counts {
    type Output = Count;
    fn index(&self, kind: Kind) -> &Count {
        &self.of[kind.index()]
    }
}

impl<D> Counted<D> {
    /// Counts from 0.
    pub fn new(inner: D) -> Counted<D> {
        Counted { inner, counters: Default::default() }
    }

    /// The domain inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The current counts.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for (count, counters) in counts.of.iter_mut().zip(&self.counters) {
            *count = Count {
                calls: counters.calls.load(Ordering::Relaxed),
                errors: counters.errors.load(Ordering::Relaxed),
                bytes: counters.bytes.load(Ordering::Relaxed),
            };
        }
        counts
    }
}

impl<D> Counted<D> {
    /// Counts calls of a kind, some of which may have failed, and the bytes of the others.
    fn count(&self, kind: Kind, calls: usize, errors: usize, bytes: u128) {
        let counters = &self.counters[kind.index()];
        counters.calls.fetch_add(calls as u64, Ordering::Relaxed);
        counters.errors.fetch_add(errors as u64, Ordering::Relaxed);
        if bytes != 0 {
            // A mapping of all addresses is 2^64 bytes: a sum can pass 64 bits.
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            let add = |sum: u64| Some(sum.saturating_add(bytes));
            let _ = counters.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }

    /// Counts the elements of a list of `all`: those that were done, and the one that was refused.
    fn count_list<R>(&self, kind: Kind, all: usize, done: &Result<R, Partial>, bytes: u128) {
        match done {
            Ok(_) => self.count(kind, all, 0, bytes),
            Err(partial) => self.count(kind, partial.done + 1, 1, bytes),
        }
    }
}

// SAFETY: the inner domain's promise.
unsafe impl<D: Domain> Domain for Counted<D> {
    type Target = D::Target;

    crate::pass_on!(inner: geometry, capabilities, sync_wait, mappings_from);

    fn map_pages(&self, maps: &[Map<D::Target>]) -> Result<(), Partial> {
        let result = self.inner.map_pages(maps);
        let done = result.map_or_else(|partial| partial.done, |()| maps.len());
        let bytes = maps[..done].iter().map(|map| map.range().len()).sum();
        self.count_list(Kind::Map, maps.len(), &result, bytes);
        result
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let result = self.inner.unmap_pages(ranges, gather);
        self.count_list(Kind::Unmap, ranges.len(), &result, result.unwrap_or(0));
        result
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        let result = self.inner.sync_begin(work);
        self.count(Kind::of(work), 1, usize::from(result.is_err()), 0);
        result
    }
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        let mut failures = 0;
        let over = self.inner.sync_poll(token, work, &mut |range, error| {
            failures += 1;
            failed(range, error);
        });
        if over {
            self.count(Kind::SyncEnd, 1, failures.min(1), 0);
        }
        over
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<D::Target> {
        self.count(Kind::Lookup, 1, 0, 0);
        self.inner.iova_to_phys(iova)
    }
}

impl<D: fmt::Debug> fmt::Debug for Counted<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counted")
            .field("inner", &self.inner)
            .field("counts", &self.counts())
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::wrap::fake::{Fake, map, page};

    #[test]
    fn calls_bytes_and_errors_are_counted_by_kind() {
        let domain = Counted::new(Fake::default());
        domain.map(map(page(1), 0)).unwrap();
        assert!(domain.map(map(page(1), 0)).is_err());
        let before = domain.counts();
        assert_eq!(before[Kind::Map], Count { calls: 2, errors: 1, bytes: 4096 });
        domain.unmap(page(1), &mut Gather::new()).unwrap();
        domain.unmap(page(1), &mut Gather::new()).unwrap();
        domain.flush_iotlb_all().unwrap();
        let delta = domain.counts().since(&before);
        assert_eq!(delta[Kind::Map], Count::default());
        assert_eq!(delta[Kind::Unmap], Count { calls: 2, errors: 0, bytes: 4096 });
        assert_eq!(delta[Kind::FlushAll], Count { calls: 1, errors: 0, bytes: 0 });
    }

    #[test]
    fn the_sum_of_bytes_stops_instead_of_wrapping() {
        let domain = Counted::new(Fake::default());
        for _ in 0..2 {
            domain.map(map(Range::ALL, 0)).unwrap();
            domain.unmap(Range::ALL, &mut Gather::new()).unwrap();
        }
        assert_eq!(domain.counts()[Kind::Map].bytes, u64::MAX);
        assert_eq!(domain.counts()[Kind::Unmap].bytes, u64::MAX);
    }
}
