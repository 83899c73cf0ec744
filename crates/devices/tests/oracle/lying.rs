//! A domain that is wrong in one thing, for tests of the tests.

use ringfence_iommu::{
    Capabilities, Domain, Gather, Geometry, GuestPhys, Iova, Prot, Range, Result, SyncToken,
};

/// What a domain is wrong in, or what is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// It does all that it says.
    Nothing,
    /// A sync after an unmap waits for nobody.
    NoSync,
    /// A flush of everything waits for nobody.
    NoFlush,
    /// A sync after a map waits for nobody, and hears of no refusal.
    NoSyncMap,
    /// What is unmapped stays.
    NoUnmap,
    /// Whatever may be reached may be read and written.
    AllPermitted,
    /// A mapping goes on for a granule after its end.
    OneMore,
    /// A mapping leads to the page after the one that it should lead to.
    Elsewhere,
    /// A device that is not trusted is taken for one that is.
    Trusts,
    /// All memory for slots is the same.
    OneSlot,
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

impl<D: Domain<Target = GuestPhys>> Domain for Lying<D> {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn map_pages(&self, range: Range, target: GuestPhys, prot: Prot) -> Result<()> {
        let granule = self.inner.geometry().page_sizes.granule();
        match self.lie {
            Lie::AllPermitted => self.inner.map_pages(range, target, Prot::RW),
            Lie::OneMore => {
                let len = (range.len() as u64).saturating_add(granule);
                match Range::from_len(range.first(), len) {
                    Some(more) => self.inner.map_pages(more, target, prot),
                    None => self.inner.map_pages(range, target, prot),
                }
            }
            Lie::Elsewhere => self.inner.map_pages(range, GuestPhys(target.0 + granule), prot),
            _ => self.inner.map_pages(range, target, prot),
        }
    }

    fn iotlb_sync_map(&self, range: Range) -> Result<()> {
        match self.lie {
            Lie::NoSyncMap => Ok(()),
            _ => self.inner.iotlb_sync_map(range),
        }
    }

    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        match self.lie {
            Lie::NoUnmap => {
                gather.add(range);
                Ok(range.len())
            }
            _ => self.inner.unmap_pages(range, gather),
        }
    }

    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        match self.lie {
            Lie::NoSync => {
                gather.clear_ranges();
                Ok(())
            }
            _ => self.inner.iotlb_sync(gather),
        }
    }

    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        match self.lie {
            Lie::NoSync => {
                gather.clear_ranges();
                Ok(SyncToken::DONE)
            }
            _ => self.inner.iotlb_sync_begin(gather),
        }
    }

    fn iotlb_sync_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        match self.lie {
            Lie::NoSync => Ok(true),
            _ => self.inner.iotlb_sync_poll(token, ranges),
        }
    }

    fn iotlb_sync_map_begin(&self, ranges: &[Range]) -> Result<SyncToken> {
        match self.lie {
            Lie::NoSyncMap => Ok(SyncToken::DONE),
            _ => self.inner.iotlb_sync_map_begin(ranges),
        }
    }

    fn iotlb_sync_map_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        match self.lie {
            Lie::NoSyncMap => Ok(true),
            _ => self.inner.iotlb_sync_map_poll(token, ranges),
        }
    }

    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        self.inner.iotlb_sync_wait(token)
    }

    fn flush_iotlb_all(&self) -> Result<()> {
        match self.lie {
            Lie::NoFlush => Ok(()),
            _ => self.inner.flush_iotlb_all(),
        }
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        self.inner.iova_to_phys(iova)
    }
}
