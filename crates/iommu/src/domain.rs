//! The trait of everything that translates.

use alloc::{sync::Arc, vec::Vec};

use crate::{
    Address, Capabilities, Error, Gather, Geometry, Iova, Map, Partial, Range, Result, SyncToken,
    Synced, Work, table::Mapping,
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
/// A caller that has other work meanwhile begins a sync as a [`Pending`](crate::Pending).
///
/// All methods take `&self`: a domain is shared by the threads that map and unmap.
///
/// # What is required, and what is provided
/// An implementation has `map_pages`, `unmap_pages`, the three parts of a sync and the look-ups. What
/// is provided consists of those. (A domain around another may pass the call on, which is a little
/// faster; nothing but a sync of this crate has a [`Synced`] to return.)
///
/// [`suite`](crate::suite) checks any domain.
///
/// # Safety
/// Safe code frees memory, and gives addresses to other buffers, when a sync has succeeded: when
/// [`sync_begin`](Self::sync_begin) has returned [`SyncToken::DONE`], or
/// [`sync_poll`](Self::sync_poll) has returned true and reported no failure, what the [`Work`] says is
/// true: no device access goes through what was unmapped, from then on; but for ranges that an earlier
/// sync, or an unmap, reported as failed, which stay the caller's to keep from use. And nothing is
/// reachable but what [`map_pages`](Self::map_pages) was given, with the permissions that it was given.
pub unsafe trait Domain: Send + Sync {
    /// What an IOVA maps to.
    type Target: Address;

    /// What can be mapped, and where. It changes only by what the owner of the domain does to it, such
    /// as attaching an endpoint.
    fn geometry(&self) -> Geometry;

    /// What the domain is able to do.
    fn capabilities(&self) -> Capabilities;

    /// Makes mappings, in order, and takes its locks once for many; each whole or not at all.
    ///
    /// They need not be usable before a sync of [`Work::Map`], and may be reported as failed only
    /// there.
    ///
    /// # Errors
    /// The first that is refused: unaligned, without permission, outside the aperture
    /// ([`Geometry::check_map`]), overlapping, full (rules L31, L36). Those before it are made.
    fn map_pages(&self, maps: &[Map<Self::Target>]) -> Result<(), Partial>;

    /// Removes every mapping in `ranges`, which may hold holes, in order, taking its locks once for many,
    /// and returns how many bytes were mapped. What may still be cached is added to `gather`, with the
    /// table pages that were unlinked: also of what was removed before an error.
    ///
    /// A range that was unmapped is not mapped again before its sync has succeeded.
    ///
    /// # Errors
    /// The first range that is refused: unaligned ([`Geometry::check_unmap`]);
    /// [`WouldSplit`](crate::Error::WouldSplit): nothing of it was removed. Another error, the device's:
    /// what of it was removed is not known, and all of it is to be taken for reachable. Those before it
    /// were removed.
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial>;

    /// Begins a sync, without waiting for it; but the beginning of [`Work::All`] may wait, and any may wait
    /// for room where requests to a device are queued. One that is over and has succeeded at once is
    /// [`SyncToken::DONE`], which is not polled.
    ///
    /// A token is polled until it is over: one that is dropped may cost the domain some bytes, and its
    /// ranges are to be taken for reachable.
    ///
    /// # Errors
    /// Nothing was begun: what was unmapped may still be reachable, what was mapped is not to be used.
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken>;

    /// Whether the sync that gave `token` for this `work` is over. If so, and only then, `failed` is
    /// called for each range that failed: what was mapped there is not mapped, what was unmapped may
    /// still be reachable; and the token is spent. A failure of the whole is one of [`Range::ALL`]. What
    /// was reported need not be reported by a later sync. `failed` must not call the domain.
    ///
    /// A poll may name other ranges than the beginning did, if all that the caller unmapped is in both:
    /// those of a [`Gather`] that had to widen some, and those that it was given.
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool;

    /// Sleeps, or spins, until a poll of `token` will find its sync over. It has no time-out: a domain
    /// whose device is gone fails the sync.
    fn sync_wait(&self, token: SyncToken);

    /// Where `iova` leads.
    fn iova_to_phys(&self, iova: Iova) -> Option<Self::Target>;

    /// Adds to `into` the mappings that end at or after `iova`, in ascending order, as many as it has
    /// room for without growing: if room is left, there are no more. What other threads map or unmap
    /// meanwhile may be among them or not.
    ///
    /// # Errors
    /// [`Unsupported`](Error::Unsupported), and so it is by default: the domain keeps no list.
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

    /// Removes every mapping in one range; how many bytes were mapped. Provided.
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
    /// What the sync's beginning returned, or the first failure it reported.
    #[inline]
    fn sync(&self, work: Work<'_>) -> Result<Synced> {
        match self.sync_begin(work)? {
            SyncToken::DONE => Ok(Synced::PROOF),
            token => end(self, token, work),
        }
    }

    /// Makes every mapping made in `range` since usable. Provided.
    ///
    /// # Errors
    /// At least one of them failed. The ones that failed are not mapped; the caller unmaps the
    /// whole range to be rid of the others (rule L34).
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

// SAFETY: it is the domain itself.
unsafe impl<D: Domain + ?Sized> Domain for Arc<D> {
    type Target = D::Target;

    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    #[inline]
    fn map_pages(&self, maps: &[Map<Self::Target>]) -> Result<(), Partial> {
        (**self).map_pages(maps)
    }
    #[inline]
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        (**self).unmap_pages(ranges, gather)
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        (**self).sync_begin(work)
    }
    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        (**self).sync_poll(token, work, failed)
    }
    fn sync_wait(&self, token: SyncToken) {
        (**self).sync_wait(token);
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<Self::Target> {
        (**self).iova_to_phys(iova)
    }
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        (**self).mappings_from(iova, into)
    }
    #[inline]
    fn map(&self, map: Map<Self::Target>) -> Result<()> {
        (**self).map(map)
    }
    #[inline]
    fn unmap(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        (**self).unmap(range, gather)
    }
    #[inline]
    fn sync(&self, work: Work<'_>) -> Result<Synced> {
        (**self).sync(work)
    }
}
