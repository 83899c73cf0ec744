//! A domain that is wrong in one thing, for tests of the tests.

use ringfence_iommu::{
    Domain, Gather, GuestPhys, Map, Partial, Prot, Range, Result, SyncToken, Work,
};

/// A defect of a domain, or of what is built on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// No defect.
    Nothing,
    /// A sync after an unmap waits for no reader.
    NoSync,
    /// A flush of everything waits for no reader.
    NoFlush,
    /// A sync after a map does not wait for the device, and reports no refusal.
    NoSyncMap,
    /// What is unmapped stays.
    NoUnmap,
    /// Whatever may be reached may be read and written.
    AllPermitted,
    /// A mapping goes on for a granule after its end.
    OneMore,
    /// A mapping leads to the page after the one that it should lead to.
    Elsewhere,
    /// An untrusted device is treated as trusted.
    Trusts,
    /// All memory for slots is the same.
    OneSlot,
    /// Asynchronous I/O takes no lease that lasts as long as it does.
    NoLeases,
    /// A disk's requests go where their addresses led in the beginning, and hold no lease.
    NoDiskLeases,
    /// A device that was detached reaches what it reached before.
    StaysAttached,
}

pub(crate) struct Lying<D> {
    inner: D,
    lie: Lie,
}

impl<D> Lying<D> {
    pub(crate) fn new(inner: D, lie: Lie) -> Lying<D> {
        Lying { inner, lie }
    }
}

// SAFETY: the contract is broken on purpose, so that the oracle is seen to find it. Only simulated
// guest memory is behind it.
unsafe impl<D: Domain<Target = GuestPhys>> Domain for Lying<D> {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(inner: geometry, capabilities, sync_poll, sync_wait, iova_to_phys);

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let granule = self.inner.geometry().page_sizes.granule();
        let lie = |map: &Map<GuestPhys>| {
            let (range, target, prot) = (map.range(), map.target(), map.prot());
            match self.lie {
                Lie::AllPermitted => Map::new(range, target, Prot::RW),
                Lie::OneMore => {
                    let len = (range.len() as u64).saturating_add(granule);
                    let more = Range::from_len(range.first(), len);
                    Map::new(more.unwrap_or(range), target, prot)
                }
                Lie::Elsewhere => Map::new(range, GuestPhys(target.0 + granule), prot),
                _ => *map,
            }
        };
        self.inner.map_pages(&maps.iter().map(lie).collect::<Vec<_>>())
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        match self.lie {
            Lie::NoUnmap => {
                ranges.iter().for_each(|&range| gather.add(range));
                Ok(ranges.iter().map(|range| range.len()).sum())
            }
            _ => self.inner.unmap_pages(ranges, gather),
        }
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        match (self.lie, work) {
            (Lie::NoSyncMap, Work::Map(_))
            | (Lie::NoSync, Work::Unmap { .. })
            | (Lie::NoFlush, Work::All) => Ok(SyncToken::DONE),
            _ => self.inner.sync_begin(work),
        }
    }
}
