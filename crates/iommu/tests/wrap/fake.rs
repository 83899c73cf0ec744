//! A domain of the simplest kind, to wrap in tests.

use std::collections::BTreeMap;

use ringfence_sync::lock::SpinLock;

use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial, Range,
    Result, SyncToken, Work,
};

/// Mappings by their first address.
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) mappings: SpinLock<BTreeMap<u64, (Range, GuestPhys)>>,
}

/// The token of a sync of everything.
pub(crate) const ALL: SyncToken = SyncToken::new(7);

// SAFETY: there is no device that could reach anything.
unsafe impl Domain for Fake {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        Geometry::new(PageSizes::X86, Range::ALL)
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }
    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let mut mappings = self.mappings.lock();
        for (done, map) in maps.iter().enumerate() {
            let range = map.range();
            if mappings.values().any(|(held, _)| held.overlaps(range)) {
                let error = Error::Exists { range, at: range.first() };
                return Err(Partial { done, error });
            }
            mappings.insert(range.first().0, (range, map.target()));
        }
        Ok(())
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut mappings = self.mappings.lock();
        ranges.iter().for_each(|&range| gather.add(range));
        let removed = ranges.iter().filter_map(|range| mappings.remove(&range.first().0));
        Ok(removed.map(|(held, _)| held.len()).sum())
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        Ok(match work {
            Work::Map(_) => SyncToken::DONE,
            Work::Unmap { ranges, .. } => SyncToken::new(ranges.len() as u64),
            Work::All => ALL,
        })
    }
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        assert_eq!(self.sync_begin(work), Ok(token), "another's token");
        if let Work::Unmap { ranges: [only], .. } = work {
            failed(*only, Error::Gone("alone"));
        }
        true
    }
    fn sync_wait(&self, _token: SyncToken) {}
    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        let mappings = self.mappings.lock();
        let (range, target) = *mappings.range(..=iova.0).next_back()?.1;
        range.contains(iova).then(|| GuestPhys(iova.0 - range.first().0 + target.0))
    }
}

pub(crate) fn page(n: u64) -> Range {
    Range::from_len(Iova(n << 12), 4096).unwrap()
}

pub(crate) fn map(range: Range, target: u64) -> Map<GuestPhys> {
    Map::new(range, GuestPhys(target), ringfence_iommu::Prot::RW)
}
