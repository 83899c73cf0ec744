//! What the IOTLB of a device has counted, over all its connections.

use std::sync::{Arc, atomic::Ordering};

use parking_lot::Mutex;
use ringfence_iotlb::{Counters, Iotlb};

/// What the IOTLB of a device has counted. All but `entries` and `open` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IotlbTotals {
    /// Translations in the table now.
    pub entries: u64,
    /// Misses without an update or a refusal so far.
    pub open: u64,
    /// Lookups that hit a worker's own cache.
    pub hits: u64,
    /// Lookups that went to the table.
    pub walks: u64,
    /// Accesses that were refused.
    pub faults: u64,
    /// Misses that were sent.
    pub misses: u64,
    /// How often misses were sent, one or many together.
    pub batches: u64,
    /// Misses that had been sent before.
    pub sent_again: u64,
    /// Updates received.
    pub updates: u64,
    /// Invalidations.
    pub invalidations: u64,
    /// Entries that made room for others.
    pub evictions: u64,
    /// Misses for which there is no translation.
    pub refusals: u64,
    /// Requests that timed out.
    pub timeouts: u64,
}

ringfence_sync::sums! {
    IotlbTotals: entries open hits walks faults misses batches sent_again updates invalidations
    evictions refusals timeouts
}

/// Sums the counters of a device's IOTLBs, one per connection. Shared by the device's back ends,
/// one after the other, and by readers of the figures.
#[derive(Default)]
pub struct IotlbTally {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Of connections that are over.
    past: IotlbTotals,
    iotlb: Option<Arc<Iotlb>>,
    views: Vec<Arc<Counters>>,
}

impl IotlbTally {
    /// A connection begins, with this table. The one before it is over.
    pub fn begin(&self, iotlb: &Arc<Iotlb>) {
        let mut inner = self.inner.lock();
        inner.end();
        inner.iotlb = Some(Arc::clone(iotlb));
    }

    /// Counts a worker's view of the table too.
    pub fn view(&self, counters: Arc<Counters>) {
        let mut inner = self.inner.lock();
        let Inner { past, views, .. } = &mut *inner;
        // Views come and go with the rings.
        views.retain(|view| {
            let used = Arc::strong_count(view) > 1;
            if !used {
                past.add(view);
            }
            used
        });
        views.push(counters);
    }

    /// The connection is over.
    pub fn end(&self) {
        self.inner.lock().end();
    }

    /// The figures.
    pub fn totals(&self) -> IotlbTotals {
        self.inner.lock().totals()
    }
}

impl Inner {
    fn end(&mut self) {
        self.past = IotlbTotals { entries: 0, open: 0, ..self.totals() };
        self.iotlb = None;
        self.views.clear();
    }

    fn totals(&self) -> IotlbTotals {
        let mut sum = self.past;
        if let Some(iotlb) = &self.iotlb {
            let stats = iotlb.stats();
            sum.entries = iotlb.entries();
            sum.open = iotlb.open_misses() as u64;
            for (into, from) in [
                (&mut sum.misses, &stats.misses),
                (&mut sum.batches, &stats.batches),
                (&mut sum.sent_again, &stats.sent_again),
                (&mut sum.updates, &stats.updates),
                (&mut sum.invalidations, &stats.invalidations),
                (&mut sum.evictions, &stats.evictions),
                (&mut sum.refusals, &stats.refusals),
                (&mut sum.timeouts, &stats.timeouts),
            ] {
                *into += from.load(Ordering::Relaxed);
            }
        }
        self.views.iter().for_each(|view| sum.add(view));
        sum
    }
}

impl IotlbTotals {
    fn add(&mut self, view: &Counters) {
        self.hits += view.hits.load(Ordering::Relaxed);
        self.walks += view.misses.load(Ordering::Relaxed);
        self.faults += view.faults.load(Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
    use ringfence_iotlb::IotlbConfig;

    #[test]
    fn what_a_connection_counted_stays_when_it_is_over() {
        let tally = IotlbTally::default();
        let range = Range::from_len(Iova(0x1000), 0x1000).unwrap();
        for connection in 1..=3 {
            let iotlb = Iotlb::new(IotlbConfig::default(), Shootdown::new(1));
            tally.begin(&iotlb);
            let counters = Arc::<Counters>::default();
            tally.view(Arc::clone(&counters));
            counters.hits.store(5, Ordering::Relaxed);
            iotlb.update(range, GuestPhys(0), Prot::RW).unwrap();
            let totals = tally.totals();
            assert_eq!((totals.entries, totals.updates), (1, connection));
            // Every view but the last of a connection is gone by now.
            let more = Arc::<Counters>::default();
            drop(counters);
            tally.view(Arc::clone(&more));
            more.hits.store(1, Ordering::Relaxed);
            assert_eq!(tally.inner.lock().views.len(), 1);
            assert_eq!(tally.totals().hits, 6 * connection);
        }
        tally.end();
        let totals = tally.totals();
        assert_eq!((totals.entries, totals.updates, totals.hits), (0, 3, 18));
    }
}
