//! A driver that maps and unmaps in batches.

use std::mem;

use anyhow::{Context, Result};
use ringfence_iommu::{Domain, Gather, GuestPhys, Iova, Map, Pending, Prot, Range};
use ringfence_virtio_iommu::driver::ViommuDomain;

use super::params::Order;
use crate::block::mix;

/// Where batches lie: above the window for MSIs.
const BASE: u64 = 1 << 32;
/// Pages of memory that are mapped.
pub(super) const MEMORY: u64 = 256;
/// How many batches take turns: one is mapped, one is in use, one is unmapped.
const SETS: usize = 3;

/// The range of page `n`.
pub(super) fn page(n: u64) -> Range {
    Range::from_len(Iova(BASE + (n << 12)), 4096).expect("far below the end")
}

/// The target of page `n`: in no order, as memory is after a while.
pub(super) fn target(n: u64) -> GuestPhys {
    GuestPhys((mix(n) % MEMORY) << 12)
}

/// Called again and again until the device has completed.
pub(super) trait Wait: FnMut() -> Result<()> {}

impl<F: FnMut() -> Result<()>> Wait for F {}

/// Whether a sync that is over has succeeded.
pub(super) fn succeeded(sync: &Pending) -> Result<()> {
    let outcome = sync.outcome(Range::ALL).context("a sync under way")?;
    outcome.map(|_synced| ()).context("a sync")
}

/// Waits until a sync is over, and has succeeded.
#[inline]
pub(super) fn over(sync: &mut Pending, domain: &ViommuDomain, mut wait: impl Wait) -> Result<()> {
    while !sync.poll(domain) {
        wait()?;
    }
    succeeded(sync)
}

/// A batch of pages that come and go together.
struct Set {
    maps: Vec<Map<GuestPhys>>,
    places: Vec<Range>,
    /// The same pages, those that touch as one, unless a sync has them.
    ranges: Vec<Range>,
    sync: Option<Pending>,
}

impl Set {
    /// Waits until the sync under way is over, if there is one.
    #[inline]
    fn end(&mut self, domain: &ViommuDomain, wait: &mut impl Wait) -> Result<()> {
        if let Some(mut sync) = self.sync.take() {
            over(&mut sync, domain, wait)?;
            self.ranges = sync.into_ranges();
        }
        Ok(())
    }
}

/// Maps a batch, begins to unmap the one before it, and waits for the one before that: requests of
/// two batches are in flight at a time, and the driver waits only when it has nothing else to do.
pub(super) struct Load {
    sets: [Set; SETS],
    gather: Gather,
    /// How many batches were begun.
    begun: usize,
}

impl Load {
    pub(super) fn new(batch: usize, order: Order) -> Load {
        let sets = [0, 1, 2].map(|set| {
            let at = |n: usize| match order {
                Order::Contiguous => (set * batch + n) as u64,
                // Each batch has every third place, and no two places are adjacent.
                Order::Scattered => 2 * ((shuffled(n, batch) * SETS + set) as u64),
            };
            let maps: Vec<_> =
                (0..batch).map(|n| Map::new(page(at(n)), target(at(n)), Prot::RW)).collect();
            let places: Vec<_> = maps.iter().map(Map::range).collect();
            let ranges = match order {
                Order::Contiguous => vec![places[0].hull(places[batch - 1])],
                Order::Scattered => places.clone(),
            };
            Set { maps, places, ranges, sync: None }
        });
        Load { sets, gather: Gather::new(), begun: 0 }
    }

    /// How many mappings come and go together.
    pub(super) fn batch(&self) -> usize {
        self.sets[0].maps.len()
    }

    /// One batch.
    #[inline]
    pub(super) fn step(&mut self, domain: &ViommuDomain, mut wait: impl Wait) -> Result<()> {
        let [new, used] = [self.begun % SETS, (self.begun + SETS - 1) % SETS];
        let set = &mut self.sets[new];
        domain.map_pages(&set.maps)?;
        set.sync = Some(Pending::map(domain, mem::take(&mut set.ranges)));
        self.begun += 1;
        if self.begun > 1 {
            self.unmap(used, domain, &mut wait)?;
        }
        if self.begun > 2 {
            self.sets[(used + SETS - 1) % SETS].end(domain, &mut wait)?;
        }
        Ok(())
    }

    /// Unmaps the batch that is left.
    pub(super) fn finish(&mut self, domain: &ViommuDomain, mut wait: impl Wait) -> Result<()> {
        if self.begun > 0 {
            let last = (self.begun - 1) % SETS;
            self.unmap(last, domain, &mut wait)?;
            self.sets.iter_mut().try_for_each(|set| set.end(domain, &mut wait))?;
            self.begun = 0;
        }
        Ok(())
    }

    /// Unmaps a set once it is mapped.
    #[inline]
    fn unmap(&mut self, set: usize, domain: &ViommuDomain, wait: &mut impl Wait) -> Result<()> {
        let set = &mut self.sets[set];
        set.end(domain, wait)?;
        domain.unmap_pages(&set.places, &mut self.gather)?;
        set.sync = Some(Pending::unmap(domain, mem::take(&mut set.ranges), &mut self.gather));
        Ok(())
    }
}

/// The place of the `n`-th of `of`: each has another.
fn shuffled(n: usize, of: usize) -> usize {
    // An odd step visits all of a power of two; other numbers take the next one above, and skip
    // places beyond their own.
    let size = of.next_power_of_two();
    let mut at = n;
    loop {
        at = (at * 0x9e5 + 0x55) % size;
        if at < of {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn sets_are_apart_and_lie_as_they_are_said_to() {
        for batch in [1, 2, 3, 8, 64, 100, 256] {
            for order in Order::ALL {
                let load = Load::new(batch, order);
                let pages = load.sets.iter().flat_map(|set| &set.places).copied();
                let distinct: BTreeSet<Range> = pages.collect();
                assert_eq!(distinct.len(), SETS * batch, "{batch} {order}");
                let touch =
                    distinct.iter().zip(distinct.iter().skip(1)).all(|(a, b)| a.touches(*b));
                assert_eq!(touch, order == Order::Contiguous);
                let in_order = load.sets[0].places.is_sorted();
                assert!(batch < 8 || in_order == (order == Order::Contiguous), "{batch} {order}");
            }
        }
    }
}
