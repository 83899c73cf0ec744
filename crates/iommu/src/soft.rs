//! A domain that lives in this process: a translation table and the shootdown of its readers.

use alloc::{sync::Arc, vec::Vec};
use core::{fmt, marker::PhantomData};

use arrayvec::ArrayVec;
use ringfence_sync::{Backoff, lock::SpinLock};

use crate::{
    Address, Capabilities, Domain, Error, Gather, Geometry, Iova, Map, PageSizes, Partial, Range,
    Result, SyncToken, Synced, Work,
    shootdown::{Reader, Scope, Shootdown},
    table::{Budget, Limits, Mapping, PageList, Sharer, Table, Translation},
};

/// How many batches of table pages can wait each for its own grace period; later batches join the
/// youngest.
const LIMBO: usize = 8;

/// How many elements of a list are mapped or unmapped before the lock is released.
const AT_ONCE: usize = 64;

/// A [`Domain`] in software: the one behind a virtio-iommu, or a domain by itself in tests.
///
/// Mapping and unmapping change a [`Table`], with which threads that have a [`Reader`] of the same
/// [`Shootdown`] [`translate`](Self::translate), without locks. A walk fails at once after an
/// unmap, queued or not; the syncs are for the caches of the readers (rule [L18]).
///
/// The waiting calls, [`iotlb_sync`](Domain::iotlb_sync) and
/// [`flush_iotlb_all`](Domain::flush_iotlb_all), must not be called by a thread that has a reader
/// online: it would wait for itself. Such a thread begins a [`Pending`](crate::Pending) sync, and
/// polls its reader between two polls of the sync.
///
/// # Table pages
/// The pages that an unmap unlinks travel in the caller's [`Gather`], which the caller may drop,
/// keep for ever, or give to another domain's sync. None of that frees a page: a dropped list
/// returns to its table's deferred pages. Pages are freed only here: a sync drops the gather's
/// list, takes *all* pages that this domain's table has deferred, starts a grace period, and frees
/// them after it (rules [L21], [L40]).
///
/// [L18]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l18
/// [L21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l21
/// [L40]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l40
pub struct SoftDomain<T> {
    geometry: Geometry,
    table: Table,
    shootdown: Arc<Shootdown>,
    /// Its readers have entered this scope or [`Scope::ALL`]: invalidations wait for no others.
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

    /// An empty domain of 48 bits in pages of 4 KiB, 2 MiB and 1 GiB, as most IOMMUs of x86 have
    /// them, for up to 64 threads that look addresses up, without limits.
    pub fn x86() -> Arc<SoftDomain<T>> {
        let aperture = Range::new(Iova(0), Iova((1 << 48) - 1)).expect("not empty");
        let geometry = Geometry::new(PageSizes::X86, aperture);
        Self::new(geometry, Limits::NONE, Shootdown::new(64))
    }

    /// An empty domain that shares `budget` with others, all of which together stay within it.
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

    /// The target of `iova`, and the addresses around it that translate with the same difference;
    /// `None` if it is not mapped. Takes no lock.
    ///
    /// The translation is valid until the reader's next quiet point, or for as long as a
    /// [`Lease`](crate::shootdown::Lease) on it that was taken before then. It includes the
    /// permissions: the caller compares them with the access it is about to make (rule [V19]).
    ///
    /// # Panics
    /// If `reader` belongs to another [`Shootdown`] than this domain's, is offline, or has entered
    /// another scope: invalidations would not wait for its quiet points.
    ///
    /// [V19]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v19
    #[inline]
    pub fn translate(&self, reader: &Reader, iova: Iova) -> Option<Translation> {
        self.assert_reader(reader);
        self.table.lookup(iova)
    }

    /// As [`translate`](Self::translate), merged with the neighbours in `within` that continue with
    /// the same difference and permission, even of other mappings. For filling a cache with few,
    /// large entries.
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

    /// Calls `f` with every mapping, in ascending order; `f` may call the domain. A mapping that
    /// comes or goes meanwhile may or may not be visited.
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

    /// The part of [`table_bytes`](Self::table_bytes) that waits for its grace period.
    pub fn retired_bytes(&self) -> u64 {
        self.table.retired_bytes()
    }

    /// The shootdown that delivers invalidations to this domain's readers.
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        &self.shootdown
    }

    /// The scope of its translations, which a reader of this domain alone [enters](Reader::enter).
    pub fn scope(&self) -> Scope {
        self.scope
    }

    #[inline]
    fn assert_reader(&self, reader: &Reader) {
        let scope = reader.scope();
        assert!(scope == self.scope || scope == Scope::ALL, "the reader has entered another scope");
        assert!(
            Arc::ptr_eq(reader.shootdown(), &self.shootdown),
            "the reader belongs to another shootdown"
        );
        assert!(reader.is_online(), "the reader is offline");
    }

    /// Begins an invalidation; table pages that are deferred now are freed after it.
    fn begin(&self, ranges: &[Range]) -> u64 {
        let pages =
            if self.nothing_retired() { PageList::default() } else { self.table.take_deferred() };
        // After taking the pages: the grace period that this starts covers all on the list.
        let token = self.shootdown.begin_in(self.scope, ranges);
        self.collect(Some((token, pages)));
        token
    }

    /// Whether there are no table pages to free, now or later: the usual case, as a table keeps the
    /// nodes that a small unmap empties. Pages that other threads retire at this moment are left to
    /// their own syncs.
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
                    // Two threads may have begun in one order and arrived here in the other: the
                    // later grace period covers both.
                    Some((last, list)) if full || *last >= token => {
                        *last = token.max(*last);
                        list.append(pages);
                    }
                    _ => limbo.push((token, pages)),
                }
            }
        }
        // SAFETY: every page came from this table's `take_deferred` before the start (`begin`) of
        // the grace period that it was entered with, or of a later one that replaced it, and that
        // grace period is over (`is_quiet`, which also makes what its readers did before it happen
        // before this). Only `translate` and `translate_run` make lock-free look-ups of this table,
        // on a thread that borrows an online reader of the same shootdown (`assert_reader`); a
        // quiet point borrows the reader exclusively, so a look-up lies between two of them.
        unsafe { free.reclaim() };
    }

    /// Frees the retired pages if their grace period ends soon. It cannot wait longer, as the
    /// calling thread may have a reader itself.
    fn free_retired(&self) {
        if self.nothing_retired() {
            return;
        }
        let token = self.begin(&[]);
        let backoff = Backoff::new();
        for _ in 0..7 {
            if self.shootdown.is_quiet(token) {
                break;
            }
            backoff.spin();
        }
        self.collect(None);
    }

    /// As [`map_pages`](Domain::map_pages), for a list of any length.
    fn map_list(&self, maps: &[Map<T>]) -> Result<(), Partial> {
        let mut locked = None;
        for (done, map) in maps.iter().enumerate() {
            let partial = |error| Partial { done, error };
            self.geometry.check_map(map).map_err(partial)?;
            if done % AT_ONCE == 0 {
                locked = None;
            }
            let table = locked.get_or_insert_with(|| self.table.locked());
            if let Err(error) = table.map(map.mapping()) {
                // To make room takes the lock again.
                locked = None;
                self.map_in_made_room(map, error).map_err(partial)?;
            }
        }
        Ok(())
    }

    /// As [`unmap_pages`](Domain::unmap_pages), for a list of any length.
    fn unmap_list(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let (mut done, mut bytes) = (0, 0);
        for chunk in ranges.chunks(AT_ONCE) {
            let mut table = self.table.locked();
            for &range in chunk {
                let checked = self.geometry.check_unmap(range);
                match checked.and_then(|()| table.unmap(range, &mut gather.pages)) {
                    Ok(removed) => {
                        bytes += removed;
                        gather.add(range);
                    }
                    Err(error) => return Err(Partial { done, error }),
                }
                done += 1;
            }
        }
        Ok(bytes)
    }

    /// Makes room, if possible, and tries a refused map once more.
    #[cold]
    fn map_in_made_room(&self, map: &Map<T>, error: Error) -> Result<()> {
        match self.make_room(&error) {
            true => self.table.locked().map(map.mapping()),
            false => Err(error),
        }
    }

    /// Makes room after a map was refused for lack of it; returns whether to try again.
    #[cold]
    fn make_room(&self, error: &Error) -> bool {
        let full = matches!(error, Error::Full { .. });
        match self.table.budget() {
            Some(budget) if full => budget.relieve(),
            None if full && !self.nothing_retired() => self.free_retired(),
            _ => return false,
        }
        true
    }
}

impl<T: Address> Sharer for SoftDomain<T> {
    fn give_back(&self) {
        self.table.scavenge();
        self.table.give_back_spare();
        self.free_retired();
    }
}

// SAFETY: a sync is over once the shootdown's readers, the only ones to look translations up, have
// passed a quiet point or were in another scope all the time; later look-ups find what the table
// holds.
unsafe impl<T: Address> Domain for SoftDomain<T> {
    type Target = T;

    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }

    #[inline]
    fn map_pages(&self, maps: &[Map<T>]) -> Result<(), Partial> {
        match maps {
            [map] => self.map(*map).map_err(|error| Partial { done: 0, error }),
            _ => self.map_list(maps),
        }
    }

    #[inline]
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        match ranges {
            &[range] => self.unmap(range, gather).map_err(|error| Partial { done: 0, error }),
            _ => self.unmap_list(ranges, gather),
        }
    }

    #[inline]
    fn map(&self, map: Map<T>) -> Result<()> {
        self.geometry.check_map(&map)?;
        // Not in one expression: to make room takes the lock again.
        let mapped = self.table.locked().map(map.mapping());
        mapped.or_else(|error| self.map_in_made_room(&map, error))
    }

    #[inline]
    fn unmap(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        self.geometry.check_unmap(range)?;
        let bytes = self.table.unmap(range, &mut gather.pages)?;
        gather.add(range);
        Ok(bytes)
    }

    /// Polls once for the end, where the provided method polls twice.
    #[inline]
    fn sync(&self, work: Work<'_>) -> Result<Synced> {
        let token = self.sync_begin(work)?;
        if token != SyncToken::DONE {
            self.shootdown.wait(token.as_u64());
            self.collect(None);
        }
        Ok(Synced::PROOF)
    }

    /// Maps need no work: a mapping is usable when [`map_pages`](Domain::map_pages) returns, as
    /// readers do not cache the absence of a mapping.
    #[inline]
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        let ranges = match work {
            Work::Map(_) => return Ok(SyncToken::DONE),
            Work::Unmap { ranges, .. } => ranges,
            Work::All => &[Range::ALL],
        };
        if ranges.is_empty() {
            // Table pages deferred earlier are freed after this grace period; the caller does not
            // wait for it.
            if !self.nothing_retired() {
                self.begin(&[]);
                self.collect(None);
            }
            return Ok(SyncToken::DONE);
        }
        Ok(SyncToken::new(self.begin(ranges)))
    }

    fn sync_poll(
        &self,
        token: SyncToken,
        _work: Work<'_>,
        _failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        let over = self.shootdown.is_over(token.as_u64());
        if over {
            self.collect(None);
        }
        over
    }

    fn sync_wait(&self, token: SyncToken) {
        self.shootdown.wait(token.as_u64());
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<T> {
        self.table.lookup_locked(iova).map(|found| T::from_u64(found.target(iova)))
    }

    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        self.table.mappings_from(iova, into);
        Ok(())
    }
}

impl<T> fmt::Debug for SoftDomain<T> {
    ringfence_sync::shows!(SoftDomain as it, geometry: it.geometry, table: it.table);
}

#[cfg(all(test, not(loom), not(ringfence_mutant = "no-invalidation")))]
mod tests;
