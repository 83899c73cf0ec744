//! The trait of everything that translates.

use alloc::vec::Vec;

use crate::{
    Address, Capabilities, Error, Gather, Geometry, Iova, Prot, Range, Result, table::Mapping,
};

/// An address space for devices: I/O virtual addresses mapped to a target.
///
/// The words and their order are Linux's (`struct iommu_domain_ops`):
///
/// * [`map_pages`](Self::map_pages) any number of times, then
///   [`iotlb_sync_map`](Self::iotlb_sync_map) once: when that returns, the device can use them;
/// * [`unmap_pages`](Self::unmap_pages) any number of times into one [`Gather`], then
///   [`iotlb_sync`](Self::iotlb_sync): when *that* returns, the device can no longer use them;
/// * or, lazily, `unmap_pages` into a queued gather and, much later,
///   [`flush_iotlb_all`](Self::flush_iotlb_all) for all of them at once.
///
/// All methods take `&self`: a domain is shared by the threads that map and unmap.
pub trait Domain: Send + Sync {
    /// What an IOVA maps to.
    type Target: Address;

    /// What can be mapped, and where.
    fn geometry(&self) -> Geometry;

    /// What the domain is able to do.
    fn capabilities(&self) -> Capabilities;

    /// Maps `range` to `target` and what follows it. All or nothing.
    ///
    /// The mapping need not be usable before [`iotlb_sync_map`](Self::iotlb_sync_map) returned,
    /// and may be reported as failed only there.
    ///
    /// # Errors
    /// Unaligned, without permission, outside the aperture, overlapping, full (rules L31, L36).
    /// Nothing was changed.
    fn map_pages(&self, range: Range, target: Self::Target, prot: Prot) -> Result<()>;

    /// Makes every mapping made in `range` since usable.
    ///
    /// # Errors
    /// At least one of them failed. The ones that failed are not mapped; the caller unmaps the
    /// whole range to be rid of the others (rule L34).
    fn iotlb_sync_map(&self, range: Range) -> Result<()>;

    /// Removes every mapping in `range`, which may hold holes, and returns how many bytes were
    /// mapped. What may still be cached is added to `gather`.
    ///
    /// # Errors
    /// Unaligned; [`WouldSplit`](crate::Error::WouldSplit), and then nothing was removed.
    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128>;

    /// Invalidates what `gather` holds and empties it: when it returns, no device access to what
    /// was unmapped succeeds, and unlinked table pages may be reused.
    ///
    /// # Errors
    /// The device failed; what the gather held may still be reachable.
    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()>;

    /// Invalidates everything that was unmapped before the call.
    ///
    /// # Errors
    /// The device failed; what was unmapped may still be reachable.
    fn flush_iotlb_all(&self) -> Result<()>;

    /// Where `iova` leads.
    fn iova_to_phys(&self, iova: Iova) -> Option<Self::Target>;

    /// Adds to `into` the mappings that end at or after `iova`, in ascending order, as many as it has
    /// room for without growing: if room is left, there are no more. What other threads map or unmap
    /// meanwhile may be among them or not.
    ///
    /// # Errors
    /// [`Unsupported`](Error::Unsupported), and so it is by default: the domain cannot tell.
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        let _ = (iova, into);
        Err(Error::Unsupported("the domain does not tell what is mapped"))
    }

    /// Starts what [`iotlb_sync`](Self::iotlb_sync) does, without waiting for it; the gather is
    /// emptied. For a device that serves other work meanwhile. The default does it all at once.
    ///
    /// # Errors
    /// As [`iotlb_sync`](Self::iotlb_sync).
    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        self.iotlb_sync(gather).map(|()| SyncToken::DONE)
    }

    /// Whether the sync that gave `token` is over. `ranges` are those that were unmapped before it
    /// began: a failure in one of them is told, once, by the call that finds the sync over.
    ///
    /// # Errors
    /// As [`iotlb_sync`](Self::iotlb_sync).
    fn iotlb_sync_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        let _ = (token, ranges);
        Ok(true)
    }

    /// Starts what [`iotlb_sync_map`](Self::iotlb_sync_map) does for each of `ranges`, without
    /// waiting for it: one sync for many mappings. The default does it all at once.
    ///
    /// # Errors
    /// As [`iotlb_sync_map`](Self::iotlb_sync_map).
    fn iotlb_sync_map_begin(&self, ranges: &[Range]) -> Result<SyncToken> {
        ranges.iter().try_for_each(|&range| self.iotlb_sync_map(range))?;
        Ok(SyncToken::DONE)
    }

    /// Whether the sync that [`iotlb_sync_map_begin`](Self::iotlb_sync_map_begin) began for
    /// `ranges` is over.
    ///
    /// # Errors
    /// As [`iotlb_sync_map`](Self::iotlb_sync_map), once, by the call that finds the sync over.
    fn iotlb_sync_map_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        let _ = (token, ranges);
        Ok(true)
    }

    /// Waits until the sync of either kind that gave `token` is over; the poll that follows tells
    /// how it ended.
    ///
    /// # Errors
    /// [`Gone`](crate::Error::Gone): it never will be.
    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        let _ = token;
        Ok(())
    }
}

/// Names a sync that was begun on a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncToken(pub u64);

impl SyncToken {
    /// A sync that was over as soon as it began.
    pub const DONE: SyncToken = SyncToken(0);
}

impl<D: Domain + ?Sized> Domain for alloc::sync::Arc<D> {
    type Target = D::Target;

    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    fn map_pages(&self, range: Range, target: Self::Target, prot: Prot) -> Result<()> {
        (**self).map_pages(range, target, prot)
    }
    fn iotlb_sync_map(&self, range: Range) -> Result<()> {
        (**self).iotlb_sync_map(range)
    }
    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        (**self).unmap_pages(range, gather)
    }
    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        (**self).iotlb_sync(gather)
    }
    fn flush_iotlb_all(&self) -> Result<()> {
        (**self).flush_iotlb_all()
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<Self::Target> {
        (**self).iova_to_phys(iova)
    }
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        (**self).mappings_from(iova, into)
    }
    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        (**self).iotlb_sync_begin(gather)
    }
    fn iotlb_sync_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        (**self).iotlb_sync_poll(token, ranges)
    }
    fn iotlb_sync_map_begin(&self, ranges: &[Range]) -> Result<SyncToken> {
        (**self).iotlb_sync_map_begin(ranges)
    }
    fn iotlb_sync_map_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        (**self).iotlb_sync_map_poll(token, ranges)
    }
    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        (**self).iotlb_sync_wait(token)
    }
}
