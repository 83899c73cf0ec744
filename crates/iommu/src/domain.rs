//! The trait of everything that translates addresses.

use alloc::{sync::Arc, vec::Vec};

use crate::{
    Address, Capabilities, Error, Gather, Geometry, Iova, Map, Partial, Range, Result, SyncToken,
    Synced, Work, table::Mapping,
};

/// An address space for devices: I/O virtual addresses mapped to a target.
///
/// Terms and order of calls are Linux's (`struct iommu_domain_ops`):
///
/// * [`map_pages`](Self::map_pages) any number of times, then
///   [`iotlb_sync_map`](Self::iotlb_sync_map) once: when that returns, the device can use them;
/// * [`unmap_pages`](Self::unmap_pages) any number of times into one [`Gather`], then
///   [`iotlb_sync`](Self::iotlb_sync): when *that* returns, the device can no longer use them;
/// * or, lazily, `unmap_pages` into a queued gather and, much later,
///   [`flush_iotlb_all`](Self::flush_iotlb_all) for all of them at once.
///
/// A caller with other work in the meantime begins a sync as a [`Pending`](crate::Pending).
///
/// All methods take `&self`: a domain is shared by the threads that map and unmap.
///
/// # What is required, and what is provided
/// An implementation supplies `geometry`, `capabilities`, `map_pages`, `unmap_pages`, the three
/// parts of a sync and `iova_to_phys`. The provided methods are built on those. (A domain that
/// wraps another may override them to forward the call, which is a little faster; only this crate's
/// syncs can make the [`Synced`] to return.)
///
/// `ringfence-iommu-testing` checks any domain.
///
/// # Safety
/// Safe code frees memory, and gives addresses to other buffers, once a sync has succeeded. So when
/// [`sync_begin`](Self::sync_begin) has returned [`SyncToken::DONE`], or
/// [`sync_poll`](Self::sync_poll) has returned true and reported no failure, what the [`Work`]
/// states must hold: from then on no device access goes through what was unmapped. Excepted are
/// ranges that an earlier sync, or an unmap, reported as failed: the caller must keep those from
/// use. And a device can reach only what was passed to [`map_pages`](Self::map_pages), with the
/// permissions passed for it.
pub unsafe trait Domain: Send + Sync {
    /// What an IOVA maps to.
    type Target: Address;

    /// What can be mapped, and where. Only an action of the domain's owner changes it, such as
    /// attaching an endpoint.
    fn geometry(&self) -> Geometry;

    /// What the domain supports.
    fn capabilities(&self) -> Capabilities;

    /// Makes mappings, in order, each whole or not at all, taking its locks once for many.
    ///
    /// They need not be usable before a sync of [`Work::Map`], and a failure may be reported only
    /// there.
    ///
    /// # Errors
    /// The first mapping that is refused: unaligned, without permission, outside the aperture
    /// ([`Geometry::check_map`]), overlapping, or the domain is full (rules [L31], [L36]). Those
    /// before it are made.
    ///
    /// [L31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l31
    /// [L36]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l36
    fn map_pages(&self, maps: &[Map<Self::Target>]) -> Result<(), Partial>;

    /// Removes every mapping in `ranges`, which may contain holes, in order, taking its locks once
    /// for many, and returns how many bytes were mapped. Adds to `gather` the ranges, and the table
    /// pages that were unlinked, also for what was removed before an error. A range in which nothing
    /// is mapped is added too: another caller may have removed it and not have synced, so that it
    /// may still be cached.
    ///
    /// The caller does not map an unmapped range again before its sync has succeeded.
    ///
    /// # Errors
    /// The first range that is refused: unaligned ([`Geometry::check_unmap`]); or
    /// [`WouldSplit`](crate::Error::WouldSplit): nothing in it was removed. After any other error,
    /// the device's, it is unknown what was removed, and the caller must treat the whole range as
    /// reachable. The ranges before it were removed.
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial>;

    /// Begins a sync without waiting for it, except that [`Work::All`] may wait, and any work may
    /// wait for room in a queue of requests to a device. Returns [`SyncToken::DONE`], which is not
    /// polled, if the sync has already succeeded.
    ///
    /// The caller polls a token until its sync is over. A token that is dropped before may cost the
    /// domain some bytes, and its ranges must be treated as reachable.
    ///
    /// # Errors
    /// Nothing was begun: what was unmapped may still be reachable, what was mapped must not be
    /// used.
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken>;

    /// Whether the sync that returned `token` for this `work` is over. If so, and only then, the
    /// token is spent, and `failed` is called for each range that failed: what was mapped there is
    /// not mapped, what was unmapped may still be reachable. [`Range::ALL`] means that the whole
    /// sync failed. A later sync need not report the same failure again. `failed` must not call the
    /// domain.
    ///
    /// A poll may name other ranges than [`sync_begin`](Self::sync_begin) did, if both include all
    /// that the caller unmapped: one may have the ranges of a [`Gather`] that had to widen some,
    /// the other the ranges that were added to it.
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool;

    /// Sleeps or spins until a poll of `token` will find its sync over. There is no time-out: if
    /// the device is gone, the domain fails the sync.
    fn sync_wait(&self, token: SyncToken);

    /// The address that `iova` maps to; `None` if it is not mapped.
    fn iova_to_phys(&self, iova: Iova) -> Option<Self::Target>;

    /// Adds to `into` the mappings that end at or after `iova`, in ascending order, as many as it
    /// has room for without growing: if room is left, there are no more. What other threads map or
    /// unmap meanwhile may or may not be included.
    ///
    /// # Errors
    /// [`Unsupported`](Error::Unsupported), the default: the domain keeps no list.
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        let _ = (iova, into);
        Err(Error::Unsupported("the domain does not list its mappings"))
    }

    /// Makes one mapping. All or nothing. Provided.
    ///
    /// # Errors
    /// As [`map_pages`](Self::map_pages).
    #[inline]
    fn map(&self, map: Map<Self::Target>) -> Result<()> {
        self.map_pages(&[map]).map_err(|partial| partial.error)
    }

    /// Removes every mapping in one range and returns how many bytes were mapped. Provided.
    ///
    /// # Errors
    /// As [`unmap_pages`](Self::unmap_pages).
    #[inline]
    fn unmap(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        self.unmap_pages(&[range], gather).map_err(|partial| partial.error)
    }

    /// Syncs and waits. Provided.
    ///
    /// # Errors
    /// The error from beginning the sync, or the first failure that it reported.
    #[inline]
    fn sync(&self, work: Work<'_>) -> Result<Synced> {
        match self.sync_begin(work)? {
            SyncToken::DONE => Ok(Synced::PROOF),
            token => end(self, token, work),
        }
    }

    /// Makes every mapping made in `range` since the last sync usable. Provided.
    ///
    /// # Errors
    /// At least one of them failed, and those that failed are not mapped; the caller unmaps the
    /// whole range to remove the others (rule [L34]).
    ///
    /// [L34]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l34
    #[inline]
    fn iotlb_sync_map(&self, range: Range) -> Result<Synced> {
        self.sync(Work::Map(&[range]))
    }

    /// Invalidates what `gather` holds and empties it: when it returns, no device access to what
    /// was unmapped succeeds, and unlinked table pages may be reused. Provided.
    ///
    /// # Errors
    /// The device failed; what the gather held may still be reachable.
    #[inline]
    fn iotlb_sync(&self, gather: &mut Gather) -> Result<Synced> {
        gather.release_pages();
        let result = self.sync(gather.work());
        gather.clear_ranges();
        result
    }

    /// Invalidates everything that was unmapped before the call. Provided.
    ///
    /// # Errors
    /// The device failed; what was unmapped may still be reachable.
    #[inline]
    fn flush_iotlb_all(&self) -> Result<Synced> {
        self.sync(Work::All)
    }
}

/// Waits for a sync that was begun.
fn end<D: Domain + ?Sized>(domain: &D, token: SyncToken, work: Work<'_>) -> Result<Synced> {
    let mut result = Ok(Synced::PROOF);
    loop {
        domain.sync_wait(token);
        if domain.sync_poll(token, work, &mut |_, error| result = result.and(Err(error))) {
            return result;
        }
    }
}

// SAFETY: it forwards to the domain itself.
unsafe impl<D: Domain + ?Sized> Domain for Arc<D> {
    type Target = D::Target;

    crate::pass_on!(
        @all self, **self;
        geometry, capabilities, sync_begin, sync_poll, sync_wait, sync, iova_to_phys, mappings_from
    );

    #[inline]
    fn map_pages(&self, maps: &[Map<Self::Target>]) -> Result<(), Partial> {
        (**self).map_pages(maps)
    }

    #[inline]
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        (**self).unmap_pages(ranges, gather)
    }

    #[inline]
    fn map(&self, map: Map<Self::Target>) -> Result<()> {
        (**self).map(map)
    }

    #[inline]
    fn unmap(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        (**self).unmap(range, gather)
    }
}
