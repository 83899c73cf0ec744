//! How one worker thread reaches memory for one endpoint.

mod find;

use std::{
    cell::{Cell, RefCell},
    mem,
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use ringfence_iommu::{
    Fault, FaultReason, GuestPhys, Iova, Prot, Range, SoftDomain,
    shootdown::{Lease, Reader},
};
use ringfence_mem::{Access, AccessError, DirtyLog, HostSlice, Memory, Translate, Window};
use ringfence_sync::mutant;

use self::find::Region;
use crate::{Binding, Endpoint, Iotlb, Miss, cache::Cache, misses::Waiter};

/// The counters of a view.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Translations that the cache gave, each for one access or for [several](View::around).
    pub hits: AtomicU64,
    /// Translations that were looked up in the domain's table.
    pub misses: AtomicU64,
    /// Accesses that were refused.
    pub faults: AtomicU64,
}

/// How one worker thread reaches memory for one endpoint: a cache of translations resolved to
/// pointers of this process, in which entries side by side that lead on from each other cost as
/// one.
///
/// Between two calls of [`quiet`](Self::quiet) what it translates stays usable, whatever the
/// IOMMU's driver does meanwhile; that is why an invalidation waits for the next one. While it is
/// [`offline`](Self::offline) none waits, and an access panics.
pub struct View {
    endpoint: Arc<Endpoint>,
    memory: Arc<Memory>,
    reader: Reader,
    binding: Binding,
    /// The domain that it was bound to when it went offline.
    left: Option<Weak<SoftDomain<GuestPhys>>>,
    /// The count of changes of the endpoint's binding that `binding` reflects.
    changes: u64,
    /// Empty while the view is offline: invalidations do not wait for the view then, so no lookup
    /// may find an old translation. Each lookup therefore ends at the table, where being online is
    /// checked; a hit needs no check.
    cache: Cache,
    /// While the view is offline, the cache that it had before.
    other: Cache,
    /// The region of memory that was used last.
    region: Cell<Option<Region>>,
    windows: RefCell<Vec<(Range, Window)>>,
    /// Misses that are not sent yet.
    wanted: RefCell<Vec<Miss>>,
    waiter: Arc<Waiter>,
    /// How many misses there were when the current access began to wait, if known.
    since: Cell<Option<u64>>,
    hits: Cell<u64>,
    misses: Cell<u64>,
    faults: Cell<u64>,
    /// Faults are neither counted nor reported.
    silent: Cell<bool>,
    counters: Arc<Counters>,
    log: Option<Arc<DirtyLog>>,
}

impl View {
    /// A view of `memory` as `endpoint` sees it, for the calling thread; `None` if the process's
    /// shootdown has no place for another reader.
    pub fn new(endpoint: Arc<Endpoint>, memory: Arc<Memory>) -> Option<View> {
        let mut reader = endpoint.shootdown().reader()?;
        // Registered first, looked second: a change in between is then seen by `quiet`.
        let changes = endpoint.changes();
        let binding = endpoint.binding();
        reader.enter(binding.scope());
        Some(View {
            endpoint,
            memory,
            reader,
            binding,
            left: None,
            changes,
            cache: Cache::new(),
            other: Cache::none(),
            region: Cell::new(None),
            windows: RefCell::default(),
            wanted: RefCell::default(),
            waiter: Waiter::new(Box::new(|| ())),
            since: Cell::new(None),
            hits: Cell::new(0),
            misses: Cell::new(0),
            faults: Cell::new(0),
            silent: Cell::new(false),
            counters: Arc::default(),
            log: None,
        })
    }

    /// What it has counted; brought up to date by [`quiet`](Self::quiet).
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// A quiet point: nothing that was translated before is in use any more, except by leases and
    /// windows. Replays invalidations into the cache. To be called between bursts of work. Without
    /// effect while [offline](Self::offline).
    #[inline]
    pub fn quiet(&mut self) {
        if !self.reader.is_online() {
            return;
        }
        if !self.wanted.get_mut().is_empty() {
            self.send_misses();
        }
        if self.endpoint.changes() != self.changes {
            self.rebind();
        }
        self.cache.grow();
        let (cache, windows) = (&self.cache, &self.windows);
        let mut all = false;
        self.reader.poll(|gone| {
            // Windows and cache entries go before the reader announces that they are gone.
            drop_range(cache, windows, gone);
            all |= gone == Range::ALL;
        });
        if all && !mutant!("who drops everything does not look at the binding") {
            self.rebind();
        }
        self.publish();
    }

    /// Sets `wake`, which any thread calls when a miss of this view is resolved, for a worker that
    /// sleeps. To be set before the first access.
    pub fn wake_with(&mut self, wake: Box<dyn Fn() + Send + Sync>) {
        self.waiter = Waiter::new(wake);
    }

    /// Sends misses for all that accesses found [missing](AccessError::Again) since the last call,
    /// as a [quiet point](Self::quiet) does.
    pub fn send_misses(&self) {
        let mut misses = self.wanted.borrow_mut();
        // Offline it has looked up nothing, so nothing is missing.
        if let (false, true, Some(iotlb)) =
            (misses.is_empty(), self.reader.is_online(), self.iotlb())
        {
            iotlb.note_misses(&mut misses, &self.waiter, &self.reader);
            iotlb.send_misses(&mut misses);
        }
        misses.clear();
    }

    /// Counts the updates and refusals for this view's misses: while it stays the same there is no
    /// need to retry an access (except to [send a miss again](crate::IotlbConfig::again)). To be
    /// read before the access: the update may arrive before the access returns.
    #[inline]
    pub fn updates_seen(&self) -> u64 {
        self.waiter.updates()
    }

    /// Counts changes of the endpoint's binding, as far as this view has seen them: what was found
    /// before may lead elsewhere now, or nowhere, without an unmap.
    #[inline]
    pub fn bindings(&self) -> u64 {
        self.changes
    }

    /// How many misses there were so far, those sent again included. An access that begins to wait
    /// notes the number, and looks again [since](Self::set_since) then.
    pub fn misses_sent(&self) -> u64 {
        self.iotlb().map_or(0, |iotlb| iotlb.misses_sent())
    }

    /// Accesses from now on have waited since there were so many
    /// [`misses_sent`](Self::misses_sent): they fail if a later miss for their addresses was
    /// refused, and no other refusal concerns them. For accesses that have not waited, `u64::MAX`.
    /// With `None` they fail if a miss of this view for their addresses was refused a moment ago.
    /// Returns what was set before, for the caller to put it back.
    #[must_use]
    pub fn set_since(&self, misses: Option<u64>) -> Option<u64> {
        self.since.replace(misses)
    }

    /// The IOTLB that it looks up, if it is bound to one.
    pub fn iotlb(&self) -> Option<&Arc<Iotlb>> {
        self.binding.iotlb()
    }

    /// The largest cached piece of memory around `addr` that allows the access, and its first
    /// address: one lookup for the accesses of a whole burst. `None` if there is none now: this
    /// reports no fault and sends no miss, the access itself does.
    #[inline]
    pub fn around(&self, addr: u64, access: Access) -> Option<(u64, HostSlice<'_>)> {
        let entry = match self.cache.get(addr, prot_of(access)) {
            Some(entry) => {
                self.hits.set(self.hits.get() + 1);
                entry
            }
            None => self.silently(|| self.walk(addr, access)).ok()?,
        };
        // SAFETY: as in `slices`, of all bytes of the entry.
        Some((entry.first, unsafe { entry.here(entry.first).piece(entry.extent) }))
    }

    /// The worker goes to sleep: invalidations no longer wait for it. Until it is back
    /// [online](Self::online), an access through the view panics, and windows must not be used:
    /// what they lead to may be gone, and their validity is only updated when the view is back.
    pub fn offline(&mut self) {
        if self.reader.is_online() {
            self.send_misses();
            self.publish();
            mem::swap(&mut self.cache, &mut self.other);
            self.reader.offline();
            // A domain that goes meanwhile gives back its tables, which count against a limit that
            // other domains share, however long the worker sleeps.
            if let Binding::Domain(domain) = &self.binding {
                self.left = Some(Arc::downgrade(domain));
                self.binding = Binding::Blocked;
            }
        }
    }

    /// The worker is back.
    pub fn online(&mut self) {
        if !self.reader.is_online() {
            let (cache, windows) = (&self.other, &self.windows);
            self.reader.online(|gone| drop_range(cache, windows, gone));
            mem::swap(&mut self.cache, &mut self.other);
            match self.left.take().map(|left| left.upgrade()) {
                Some(Some(domain)) => self.binding = Binding::Domain(domain),
                // It has gone, so the endpoint's binding has changed, whether the count of changes
                // shows that yet or not: the lock around the binding orders it, the count need not.
                Some(None) => return self.bind(self.endpoint.changes()),
                None => {}
            }
            if !mutant!("who wakes does not look at the binding") {
                self.rebind();
            }
        }
    }

    /// Keeps the translation of a range in use beyond the next quiet point, for asynchronous I/O:
    /// an invalidation of the range is not over before the lease is dropped. `None` if `len` is 0
    /// or the range passes 2^64.
    pub fn lease(&self, addr: u64, len: u64) -> Option<Lease> {
        Some(self.reader.lease(Range::from_len(Iova(addr), len)?))
    }

    /// As [`lease`](Self::lease), in the place of one that was [put to rest](Lease::rest), which is
    /// cheaper; false, with nothing changed, where `lease` returns `None`.
    pub fn renew(&self, lease: &mut Lease, addr: u64, len: u64) -> bool {
        let range = Range::from_len(Iova(addr), len);
        range.map(|range| self.reader.renew(lease, range)).is_some()
    }

    /// The memory that it reaches.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Runs `job`, and neither counts nor reports its faults: for retries after a fault that was
    /// reported.
    pub fn silently<R>(&self, job: impl FnOnce() -> R) -> R {
        let before = self.silent.replace(true);
        let result = job();
        self.silent.set(before);
        result
    }

    /// Replaces the memory, as after a new memory table; all that was cached is dropped, and the
    /// view's windows are no longer valid.
    pub fn set_memory(&mut self, memory: Arc<Memory>) {
        drop_range(&self.cache, &self.windows, Range::ALL);
        drop_range(&self.other, &self.windows, Range::ALL);
        self.region.set(None);
        self.memory = memory;
    }

    /// Sets where written pages are marked from now on, by guest-physical address whatever the
    /// IOMMU maps (rule [D26]); `None`: nowhere. See [`mark`](Translate::mark).
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    fn rebind(&mut self) {
        let changes = self.endpoint.changes();
        if changes != self.changes {
            self.bind(changes);
        }
    }

    /// Looks the endpoint's binding up; `changes` were counted before.
    fn bind(&mut self, changes: u64) {
        // In this order: nothing found elsewhere is left, and nothing is looked up yet.
        if !mutant!("what was found elsewhere is kept") {
            drop_range(&self.cache, &self.windows, Range::ALL);
        }
        self.binding = self.endpoint.binding();
        self.changes = changes;
        if mutant!("changes are counted after the binding is read") {
            self.changes = self.endpoint.changes();
        }
        self.reader.enter(self.binding.scope());
    }

    fn publish(&self) {
        let Counters { hits, misses, faults } = &*self.counters;
        hits.store(self.hits.get(), Ordering::Relaxed);
        misses.store(self.misses.get(), Ordering::Relaxed);
        faults.store(self.faults.get(), Ordering::Relaxed);
    }

    fn fault(&self, reason: FaultReason, addr: u64, access: Access) {
        if self.silent.get() {
            return;
        }
        self.faults.set(self.faults.get() + 1);
        let (endpoint, iova) = (self.endpoint.id(), Iova(addr));
        self.endpoint.report(Fault { reason, endpoint, iova, access: prot_of(access) });
    }
}

impl Translate for View {
    // Where it stands more than once the compiler would make it a call, which slows each lookup that hits
    // (`bench iotlb`).
    #[inline(always)]
    fn slices<F>(&self, addr: u64, len: u64, access: Access, mut each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        let Some(left) = len.checked_sub(1) else { return Ok(()) };
        if addr.checked_add(left).is_none() {
            return Err(AccessError::Overflow { addr, len });
        }
        let here = self.find(addr, access)?;
        if left > here.more {
            return self.pieces(here, addr, left, access, each);
        }
        // SAFETY: the entry was made from `self.memory`, which lives as long as `self` is borrowed,
        // and the bytes are the entry's.
        each(unsafe { here.piece(left) });
        Ok(())
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        let range = Range::from_len(Iova(addr), len).ok_or(AccessError::Overflow { addr, len })?;
        let mut base: Option<NonNull<u8>> = None;
        let (mut done, mut broken) = (0usize, false);
        self.slices(addr, len, access, |piece| {
            let here = NonNull::new(piece.as_ptr()).expect("mapped memory is not at 0");
            let start = *base.get_or_insert(here);
            broken |= start.as_ptr().wrapping_add(done) != here.as_ptr();
            done += piece.len();
        })?;
        let base = base.filter(|_| !broken).ok_or(AccessError::Fragmented { addr, len })?;
        // SAFETY: the pieces follow each other without a gap and belong to `memory`, which the
        // window keeps.
        let window = unsafe { Window::new(base, done, Arc::clone(&self.memory) as _) };
        let mut windows = self.windows.borrow_mut();
        windows.retain(|(_, held)| !held.is_last() && held.is_valid());
        windows.push((range, window.clone()));
        Ok(window)
    }

    #[inline]
    fn mark(&self, piece: HostSlice<'_>) {
        if let Some(log) = &self.log {
            log.mark_piece(&self.memory, piece);
        }
    }

    #[inline]
    fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    fn check(&self) -> Result<(), AccessError> {
        // Which region was touched is not known here.
        self.memory.check()
    }
}

/// The permission that an access needs.
#[inline]
pub fn prot_of(access: Access) -> Prot {
    match access {
        Access::Read => Prot::READ,
        Access::Write => Prot::WRITE,
        Access::ReadWrite => Prot::RW,
    }
}

fn drop_range(cache: &Cache, windows: &RefCell<Vec<(Range, Window)>>, range: Range) {
    match range {
        Range::ALL => cache.clear(),
        _ => cache.invalidate(range),
    }
    // Dropped too: each keeps its memory mapped.
    windows.borrow_mut().retain(|(held, window)| {
        let gone = held.overlaps(range);
        if gone {
            window.invalidate();
        }
        !gone
    });
}

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod oracle;
#[cfg(all(test, not(loom)))]
mod suite;
#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
