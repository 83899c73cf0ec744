//! A domain that lives in this process: a translation table and the shootdown of its readers.

use alloc::{sync::Arc, vec::Vec};
use core::{fmt, marker::PhantomData};

use arrayvec::ArrayVec;
use ringfence_sync::{Backoff, lock::SpinLock};

use crate::{
    Address, Capabilities, Domain, Error, Gather, Geometry, Iova, Prot, Range, Result, SyncToken,
    shootdown::{Reader, Scope, Shootdown},
    table::{Budget, Limits, Mapping, PageList, Sharer, Table, Translation},
};

/// How many batches of table pages can wait for their own grace period; later ones join the
/// youngest.
const LIMBO: usize = 8;

/// A [`Domain`] in software: what stands behind a virtio-iommu, or is one by itself in tests.
///
/// Mapping and unmapping change a [`Table`], which threads with a [`Reader`] of the same
/// [`Shootdown`] [`translate`](Self::translate) with, without locks. A walk fails at once after an
/// unmap, queued or not; what the syncs are for is the caches of the readers (rule L18).
///
/// The waiting calls, [`iotlb_sync`](Domain::iotlb_sync) and
/// [`flush_iotlb_all`](Domain::flush_iotlb_all), are not for a thread that has a reader online: it
/// would wait for itself. Such a thread uses [`iotlb_sync_begin`](Domain::iotlb_sync_begin) and polls
/// its reader between two calls of [`iotlb_sync_poll`](Domain::iotlb_sync_poll).
///
/// # Table pages
/// What an unmap unlinks travels in the caller's [`Gather`], which the caller may drop, keep for
/// ever, or give to another domain's sync. None of that frees a page: a dropped list returns to
/// its table's deferred pages. Pages are freed here and nowhere else: a sync drops the gather's
/// list, takes *all* pages that this domain's table has deferred, starts a grace period, and frees
/// them after it (rules L21, L40).
pub struct SoftDomain<T> {
    geometry: Geometry,
    table: Table,
    shootdown: Arc<Shootdown>,
    /// Its readers say that they are here, or may be: others need not be waited for.
    scope: Scope,
    /// Pages with the token of a grace period that was started after they were unlinked; tokens
    /// ascend.
    limbo: SpinLock<ArrayVec<(u64, PageList), LIMBO>>,
    target: PhantomData<fn() -> T>,
}

impl<T: Address> SoftDomain<T> {
    /// An empty domain whose readers are those of `shootdown`.
    pub fn new(
        geometry: Geometry,
        limits: Limits,
        shootdown: Arc<Shootdown>,
    ) -> Arc<SoftDomain<T>> {
        Arc::new(Self::over(Table::new(limits), geometry, shootdown))
    }

    /// An empty domain that, with all others of `budget`, holds no more than that says.
    pub fn within(
        geometry: Geometry,
        budget: Arc<Budget>,
        shootdown: Arc<Shootdown>,
    ) -> Arc<SoftDomain<T>> {
        let table = Table::within(Arc::clone(&budget));
        let domain = Arc::new(Self::over(table, geometry, shootdown));
        let sharer: Arc<dyn Sharer> = domain.clone();
        budget.enter(Arc::downgrade(&sharer));
        domain
    }

    fn over(table: Table, geometry: Geometry, shootdown: Arc<Shootdown>) -> SoftDomain<T> {
        let (limbo, scope) = (SpinLock::new(ArrayVec::new()), shootdown.scope());
        SoftDomain { geometry, table, shootdown, scope, limbo, target: PhantomData }
    }

    /// Where `iova` leads, and which addresses around it lead there with it. Takes no lock.
    ///
    /// The answer holds until the reader's next quiet point, or as long as a
    /// [`Lease`](crate::shootdown::Lease) on it that was taken before. Permissions are in the answer: the
    /// caller compares them with the access it is about to make (rule V19).
    ///
    /// # Panics
    /// If `reader` is one of another [`Shootdown`] than this domain's, is offline, or has said that it
    /// is elsewhere: its quiet points would not be waited for.
    #[inline]
    pub fn translate(&self, reader: &Reader, iova: Iova) -> Option<Translation> {
        self.assert_reader(reader);
        self.table.lookup(iova)
    }

    /// As [`translate`](Self::translate), with the neighbours in `within` that lead on in the same
    /// way, be they other mappings. For filling a cache that has few and large entries.
    ///
    /// # Panics
    /// As [`translate`](Self::translate).
    #[inline]
    pub fn translate_run(&self, reader: &Reader, iova: Iova, within: Range) -> Option<Translation> {
        self.assert_reader(reader);
        self.table.lookup_run(iova, within)
    }

    /// The mapping that `iova` lies in, with the boundaries it was made with. Takes a lock.
    pub fn mapping(&self, iova: Iova) -> Option<Mapping> {
        self.table.mapping(iova)
    }

    /// The first mapping that ends at or after `iova`. Takes a lock.
    pub fn mapping_from(&self, iova: Iova) -> Option<Mapping> {
        self.table.mapping_from(iova)
    }

    /// Calls `f` with every mapping, in ascending order; it may call the domain. A mapping that
    /// comes or goes meanwhile may be met or not.
    pub fn for_each(&self, f: impl FnMut(Mapping)) {
        self.table.iter().for_each(f);
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> u64 {
        self.table.mappings()
    }

    /// Bytes of table memory, pages that wait for their grace period included.
    pub fn table_bytes(&self) -> u64 {
        self.table.table_bytes()
    }

    /// Those of the [`table_bytes`](Self::table_bytes) that wait for their grace period.
    pub fn retired_bytes(&self) -> u64 {
        self.table.retired_bytes()
    }

    /// What tells this domain's readers about invalidations.
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        &self.shootdown
    }

    /// The scope of its translations: where a reader of nothing else says that it is
    /// ([`Reader::enter`]).
    pub fn scope(&self) -> Scope {
        self.scope
    }

    #[inline]
    fn assert_reader(&self, reader: &Reader) {
        let scope = reader.scope();
        assert!(scope == self.scope || scope == Scope::ALL, "a reader that is elsewhere");
        assert!(Arc::ptr_eq(reader.shootdown(), &self.shootdown), "a reader of another shootdown");
        assert!(reader.is_online(), "a reader that is offline");
    }

    /// Begins an invalidation; table pages that are deferred now are freed after it.
    fn begin(&self, ranges: &[Range], all: bool) -> u64 {
        let pages =
            if self.nothing_retired() { PageList::default() } else { self.table.take_deferred() };
        // After taking the pages: the grace period that this starts counts for all on the list.
        let token = self.shootdown.begin_in(self.scope, ranges, all);
        self.collect(Some((token, pages)));
        token
    }

    /// As [`begin`](Self::begin) for a gather, which is emptied; 0 if there is nothing to wait for.
    fn begin_gather(&self, gather: &mut Gather) -> u64 {
        // Perhaps not ours: see the comment on table pages above.
        let unlinked = !gather.pages_mut().is_empty();
        if unlinked {
            drop(gather.take_pages());
        }
        // A queued gather has not noted its ranges (rule L26).
        let all = gather.is_queued();
        if !all && gather.ranges().is_empty() {
            if unlinked {
                // Tables that were empty already: freed when the time has come, and nobody cares
                // when.
                self.begin(&[], false);
            }
            return 0;
        }
        let token = self.begin(gather.ranges(), all);
        gather.clear_ranges();
        token
    }

    /// Whether there are no table pages to free, now or later: mostly so, as a table keeps what a
    /// small unmap empties. What other threads retire at this moment is for their own syncs.
    fn nothing_retired(&self) -> bool {
        self.table.retired_bytes() == 0
    }

    /// Puts pages into limbo and frees those whose grace period is over.
    fn collect(&self, new: Option<(u64, PageList)>) {
        if self.nothing_retired() {
            return;
        }
        let mut free = PageList::default();
        {
            let mut limbo = self.limbo.lock();
            while limbo.first().is_some_and(|&(token, _)| self.shootdown.is_quiet(token)) {
                free.append(limbo.remove(0).1);
            }
            if let Some((token, pages)) = new.filter(|(_, pages)| !pages.is_empty()) {
                let full = limbo.is_full();
                match limbo.last_mut() {
                    // Two threads may have begun in one order and come here in the other: the
                    // later grace period will do for both.
                    Some((last, list)) if full || *last >= token => {
                        *last = token.max(*last);
                        list.append(pages);
                    }
                    _ => limbo.push((token, pages)),
                }
            }
        }
        // SAFETY: every page came from this table's `take_deferred` before the grace period that it
        // was entered with, or one that started later, was started (`begin`), and that one is over
        // (`is_quiet`, which also makes what its readers did before happen before). The lock-free
        // look-ups of this table are made in `translate` and `translate_run` only, by a thread that
        // borrows a reader of the same shootdown, online (`assert_reader`); a quiet point borrows
        // the reader exclusively, so a look-up lies between two of them.
        unsafe { free.reclaim() };
    }

    /// Frees what only waits for its grace period, if that is soon over: the calling thread may have
    /// a reader itself.
    fn free_retired(&self) {
        if self.nothing_retired() {
            return;
        }
        let token = self.begin(&[], false);
        let backoff = Backoff::new();
        while !self.shootdown.is_quiet(token) && !backoff.is_completed() {
            backoff.spin();
        }
        self.collect(None);
    }

    /// The checks that need no look at the table.
    fn check_map(&self, range: Range, target: u64, prot: Prot) -> Result<()> {
        let granule = self.geometry.page_sizes.granule();
        if !range.is_aligned(granule) || target & (granule - 1) != 0 {
            return Err(Error::Unaligned { range, granule });
        }
        if !prot.intersects(Prot::RW) {
            return Err(Error::NoPermission(range));
        }
        if target.checked_add(range.extent()).is_none() {
            return Err(Error::TargetOverflow(range));
        }
        let aperture = self.geometry.aperture;
        if !aperture.covers(range) {
            return Err(Error::OutsideAperture { range, aperture });
        }
        match self.geometry.reserved_in(range) {
            Some(region) => Err(Error::Reserved { range, reserved: region.range }),
            None => Ok(()),
        }
    }
}

impl<T: Address> Sharer for SoftDomain<T> {
    fn give_back(&self) {
        self.table.scavenge();
        self.table.give_back_spare();
        self.free_retired();
    }
}

impl<T: Address> Domain for SoftDomain<T> {
    type Target = T;

    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }

    fn map_pages(&self, range: Range, target: T, prot: Prot) -> Result<()> {
        let target = target.as_u64();
        self.check_map(range, target, prot)?;
        match self.table.map(range, target, prot) {
            Err(Error::Full { .. })
                if self.table.retired_bytes() != 0 || self.table.budget().is_some() =>
            {
                match self.table.budget() {
                    Some(budget) => budget.relieve(),
                    None => self.free_retired(),
                }
                self.table.map(range, target, prot)
            }
            done => done,
        }
    }

    /// Nothing to do: a mapping can be used when [`map_pages`](Domain::map_pages) returns, as
    /// readers do not cache that something is not there.
    fn iotlb_sync_map(&self, _range: Range) -> Result<()> {
        Ok(())
    }

    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let granule = self.geometry.page_sizes.granule();
        if !range.is_aligned(granule) {
            return Err(Error::Unaligned { range, granule });
        }
        let bytes = self.table.unmap(range, gather.pages_mut())?;
        if bytes != 0 {
            gather.add(range);
        }
        Ok(bytes)
    }

    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        let token = self.begin_gather(gather);
        self.shootdown.wait(token);
        self.collect(None);
        Ok(())
    }

    fn flush_iotlb_all(&self) -> Result<()> {
        let token = self.begin(&[], true);
        self.shootdown.wait(token);
        self.collect(None);
        Ok(())
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<T> {
        self.table.lookup_locked(iova).map(|found| T::from_u64(found.target(iova)))
    }

    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        self.table.mappings_from(iova, into);
        Ok(())
    }

    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        Ok(SyncToken(self.begin_gather(gather)))
    }

    fn iotlb_sync_poll(&self, token: SyncToken, _ranges: &[Range]) -> Result<bool> {
        let over = self.shootdown.is_over(token.0);
        if over {
            self.collect(None);
        }
        Ok(over)
    }

    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        self.shootdown.wait(token.0);
        Ok(())
    }
}

impl<T> fmt::Debug for SoftDomain<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftDomain")
            .field("geometry", &self.geometry)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom), not(ringfence_mutant = "no-invalidation")))]
mod tests;
