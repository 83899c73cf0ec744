//! How often, how much, how many failed.

use core::{
    fmt,
    ops,
    // The atomics of `core` even under loom: counting orders nothing.
    sync::atomic::{AtomicU64, Ordering},
};

use ringfence_sync::CachePadded;

use super::{Kind, domain_around};
use crate::{Domain, Result};

/// A domain that counts the calls that go through it.
///
/// A call costs two or three relaxed atomic additions on a cache line of its kind; threads that make
/// the same kind of call at the same time share that line.
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
    /// How many bytes were mapped, or unmapped, by those that did not; 0 for other kinds. Stops at
    /// 2^64-1.
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

    /// The counters as they stand.
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

impl<D: Domain> Counted<D> {
    fn around<R>(
        &self,
        kind: Kind,
        call: impl FnOnce(&D) -> Result<R>,
        bytes: impl FnOnce(&R) -> u128,
    ) -> Result<R> {
        let result = call(&self.inner);
        let counters = &self.counters[kind.index()];
        counters.calls.fetch_add(1, Ordering::Relaxed);
        match &result {
            Ok(done) => {
                let bytes = u64::try_from(bytes(done)).unwrap_or(u64::MAX);
                if bytes != 0 {
                    // A mapping of all addresses is 2^64 bytes: a sum can pass 64 bits.
                    let add = |sum: u64| Some(sum.saturating_add(bytes));
                    let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
                    let _ = counters.bytes.fetch_update(set, fetch, add);
                }
            }
            Err(_) => {
                counters.errors.fetch_add(1, Ordering::Relaxed);
            }
        }
        result
    }
}

domain_around!(Counted<D>);

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
    use crate::{
        Gather, GuestPhys, Prot, Range,
        wrap::fake::{Fake, page},
    };

    #[test]
    fn calls_bytes_and_errors_are_counted_by_kind() {
        let domain = Counted::new(Fake::default());
        domain.map_pages(page(1), GuestPhys(0), Prot::RW).unwrap();
        assert!(domain.map_pages(page(1), GuestPhys(0), Prot::RW).is_err());
        let before = domain.counts();
        assert_eq!(before[Kind::Map], Count { calls: 2, errors: 1, bytes: 4096 });
        domain.unmap_pages(page(1), &mut Gather::new()).unwrap();
        domain.unmap_pages(page(1), &mut Gather::new()).unwrap();
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
            domain.map_pages(Range::ALL, GuestPhys(0), Prot::RW).unwrap();
            domain.unmap_pages(Range::ALL, &mut Gather::new()).unwrap();
        }
        assert_eq!(domain.counts()[Kind::Map].bytes, u64::MAX);
        assert_eq!(domain.counts()[Kind::Unmap].bytes, u64::MAX);
    }
}
