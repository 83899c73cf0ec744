//! A fixed cost a call.

use core::fmt;

use ringfence_sync::{atomic::hint, clock::Clock};

use super::{Kind, domain_around};
use crate::{Domain, Result};

/// A domain whose calls take longer: each kind keeps the CPU busy for a fixed time before the call
/// goes on. For experiments ("what if an invalidation cost 5 µs?").
pub struct Slow<D, C> {
    inner: D,
    clock: C,
    /// In nanoseconds.
    costs: [u64; Kind::ALL.len()],
}

impl<D, C: Clock> Slow<D, C> {
    /// Nothing costs anything yet. `clock` must move by itself.
    pub fn new(inner: D, clock: C) -> Slow<D, C> {
        Slow { inner, clock, costs: [0; Kind::ALL.len()] }
    }

    /// Every call of `kind` costs `ns` nanoseconds more.
    #[must_use]
    pub fn with_cost(mut self, kind: Kind, ns: u64) -> Slow<D, C> {
        self.costs[kind.index()] = ns;
        self
    }

    /// The domain inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }
}

impl<D: Domain, C: Clock> Slow<D, C> {
    fn around<R>(
        &self,
        kind: Kind,
        call: impl FnOnce(&D) -> Result<R>,
        _bytes: impl FnOnce(&R) -> u128,
    ) -> Result<R> {
        let cost = self.costs[kind.index()];
        if cost != 0 {
            let start = self.clock.now_ns();
            while self.clock.now_ns().saturating_sub(start) < cost {
                hint::spin_loop();
            }
        }
        call(&self.inner)
    }
}

domain_around!(Slow<D, C: Clock>);

impl<D: fmt::Debug, C> fmt::Debug for Slow<D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slow")
            .field("inner", &self.inner)
            .field("costs", &self.costs)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::sync::Arc;
    use ringfence_sync::clock::ManualClock;

    use super::*;
    use crate::wrap::fake::{Fake, page};

    #[test]
    fn only_the_kind_that_was_named_costs_its_time() {
        let clock = Arc::new(ManualClock::stepping(100));
        let domain =
            Slow::new(Fake::default(), Arc::clone(&clock)).with_cost(Kind::FlushAll, 5_000);
        let start = clock.now_ns();
        domain.iotlb_sync_map(page(1)).unwrap();
        // The one reading that this line makes itself.
        assert_eq!(clock.now_ns() - start, 100);
        let start = clock.now_ns();
        domain.flush_iotlb_all().unwrap();
        assert!(clock.now_ns() - start >= 5_000);
    }
}
