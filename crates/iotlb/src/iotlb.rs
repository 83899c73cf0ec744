//! The IOTLB of a device, filled by its front end or by an IOMMU in this process.

use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::BuildHasher,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial, Pending, Prot,
    Range, Result, SoftDomain, Work,
    shootdown::{Reader, Scope, Shootdown},
    table::{Limits, Mapping},
};
use ringfence_sync::{
    Backoff,
    clock::{Clock, MonotonicClock, nanos},
};

use crate::{
    misses::{Miss, MissSink, Misses, Times, Waiter, point},
    victims::Victims,
};

/// How an [`Iotlb`] is made.
#[derive(Clone, Copy, Debug)]
pub struct IotlbConfig {
    /// The most entries (rule [D24]). An access needs all of its own at once: one that covers more
    /// pages waits until its time-out.
    ///
    /// [D24]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d24
    pub entries: u64,
    /// The most bytes of table memory.
    pub table_bytes: u64,
    /// The most misses that are listed at a time (rule [D17]): open ones, and in their pages those that
    /// wait for the same update or were refused a moment ago.
    ///
    /// [D17]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d17
    pub misses: usize,
    /// How long an access waits for its translation before it fails.
    pub timeout: Duration,
    /// After how long without an update a miss is sent again, then with a request for a reply.
    pub again: Duration,
    /// Determines which entries are evicted and where open misses are listed, for tests that must repeat
    /// exactly; `None`: a number that a guest cannot know.
    pub seed: Option<u64>,
}

impl Default for IotlbConfig {
    fn default() -> IotlbConfig {
        IotlbConfig {
            entries: 1 << 16,
            table_bytes: 64 << 20,
            misses: 1024,
            timeout: Duration::from_secs(5),
            again: Duration::from_millis(20),
            seed: None,
        }
    }
}

/// How long a refusal holds for accesses that do not pass since when they wait: long enough to see
/// it. The driver may map the address at any time, and no message reports that.
const REFUSED: Duration = Duration::from_millis(2);

/// What an [`Iotlb`] counts.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct IotlbStats {
    /// Updates that were applied.
    pub updates: AtomicU64,
    /// Invalidations.
    pub invalidations: AtomicU64,
    /// Entries that were evicted to make room for others.
    pub evictions: AtomicU64,
    /// Misses that were sent.
    pub misses: AtomicU64,
    /// Calls of the sink that sent any.
    pub batches: AtomicU64,
    /// Of the misses, those that were sent again.
    pub sent_again: AtomicU64,
    /// Replies that there is no such translation.
    pub refusals: AtomicU64,
    /// Accesses that timed out waiting for a translation.
    pub timeouts: AtomicU64,
}

/// The IOTLB of a device: one table, read by the [`View`](crate::View)s of all its workers without
/// locks.
///
/// It is fed in one of two ways. A front end resolves its misses: set a [`MissSink`], and call
/// [`update`](Self::update) and [`invalidate`](Self::invalidate) with what arrives. When it is
/// full, an entry picked at random is evicted, which only costs a miss later (rule [D24]). Or an
/// IOMMU in this process maps and unmaps through it as a [`Domain`]: then it holds every mapping, a
/// missing address is a fault, and when it is full a map fails (rule [D30]).
///
/// [D24]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d24
/// [D30]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d30
pub struct Iotlb {
    pub(crate) domain: Arc<SoftDomain<GuestPhys>>,
    config: IotlbConfig,
    writer: Mutex<Writer>,
    misses: Misses,
    sink: Mutex<Option<Arc<dyn MissSink>>>,
    /// Set once there has been a sink; read on each miss.
    had_sink: OnceLock<()>,
    stats: IotlbStats,
}

impl Iotlb {
    /// An empty IOTLB whose views belong to `shootdown`.
    pub fn new(config: IotlbConfig, shootdown: Arc<Shootdown>) -> Arc<Iotlb> {
        // To the byte: what a front end announces need not be aligned.
        let sizes = PageSizes::from_granule(1).expect("a power of two");
        let limits = Limits { table_bytes: config.table_bytes, mappings: config.entries };
        let domain = SoftDomain::new(Geometry::new(sizes, Range::ALL), limits, shootdown);
        let times =
            Times { again_ns: nanos(config.again), refused_ns: nanos(config.again.min(REFUSED)) };
        let seed = config.seed.unwrap_or_else(|| RandomState::new().hash_one(0u8));
        Arc::new(Iotlb {
            domain,
            config,
            writer: Mutex::new(Writer { victims: Victims::new(seed), evicted: Vec::new() }),
            misses: Misses::new(config.misses, times, seed),
            sink: Mutex::new(None),
            had_sink: OnceLock::new(),
            stats: IotlbStats::default(),
        })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &IotlbConfig {
        &self.config
    }

    /// Its counters.
    pub fn stats(&self) -> &IotlbStats {
        &self.stats
    }

    /// How many entries there are.
    pub fn entries(&self) -> u64 {
        self.domain.mappings()
    }

    /// How many misses are open: sent, without an update or a refusal yet. Those whose accesses gave
    /// up count too, as an update may still come, until their places in the list are needed.
    pub fn open_misses(&self) -> usize {
        self.misses.open()
    }

    /// The shootdown that delivers invalidations to its views.
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        self.domain.shootdown()
    }

    /// The scope in which its views translate.
    pub(crate) fn scope(&self) -> Scope {
        self.domain.scope()
    }

    /// Sends misses to `sink` from now on; `None`: the front end is gone, and accesses wait for
    /// another until they time out. Open misses are dropped: accesses that wait look up, and miss,
    /// again.
    pub fn set_miss_sink(&self, sink: Option<Arc<dyn MissSink>>) {
        if sink.is_some() {
            let _ = self.had_sink.set(());
        }
        *self.sink.lock() = sink;
        self.misses.clear();
    }

    /// Enters a translation and replaces what was there: entries that overlap `range` are removed
    /// as a whole. Returns a token: if part of the range led elsewhere before, the update is in
    /// force once [`Shootdown::is_over`] returns true for the token (0: at once).
    ///
    /// # Errors
    /// [`NoPermission`](Error::NoPermission) or [`TargetOverflow`](Error::TargetOverflow): nothing
    /// was changed (rule [D14]). [`Full`](Error::Full) or [`NoMemory`](Error::NoMemory) if even
    /// eviction makes no room, or views pass no quiet point for 0.1 s, which freed table memory
    /// waits for: what was there before may be gone.
    ///
    /// [D14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d14
    pub fn update(&self, range: Range, target: GuestPhys, prot: Prot) -> Result<u64> {
        if !prot.intersects(Prot::RW) {
            return Err(Error::NoPermission(range));
        }
        if target.0.checked_add(range.extent()).is_none() {
            return Err(Error::TargetOverflow(range));
        }
        let mut writer = self.writer.lock();
        let same = |mapping: Mapping| {
            mapping.prot == prot
                && mapping.range.covers(range)
                && mapping.target.wrapping_add(range.first().0 - mapping.range.first().0)
                    == target.0
        };
        let is_there = || self.domain.mapping(range.first()).is_some_and(same);
        let mut token = 0;
        // Evicted entries may still be in use, as replaced ones may.
        if writer.was_evicted(range, self.shootdown()) && !is_there() {
            token = self.remove(range)?;
        }
        loop {
            // The map itself finds what overlaps: mostly nothing does.
            let mapped = match self.domain.mappings() < self.config.entries {
                true => self.domain.map(Map::new(range, target, prot)),
                false if self.overlaps(range) => Err(Error::Exists { range, at: range.first() }),
                false => {
                    self.evict(&mut writer)?;
                    continue;
                }
            };
            match mapped {
                Ok(()) => {
                    writer.victims.add(range.first(), &self.domain);
                    break;
                }
                Err(Error::Exists { .. }) if is_there() => break,
                // This token is later than those of evicted entries, and covers the whole range.
                Err(Error::Exists { .. }) => token = self.remove(range)?,
                Err(error) => {
                    if let Err(error) = self.make_room(&mut writer, range, error) {
                        // What was replaced is in no table now, wherever it was.
                        self.note_evicted(&mut writer, Range::ALL, token);
                        return Err(error);
                    }
                }
            }
        }
        count(&self.stats.updates);
        drop(writer);
        self.misses.update(range, prot);
        Ok(token)
    }

    /// Removes every entry that overlaps `range`, as a whole, and begins to invalidate the range
    /// whether there were any or not: a view may hold what was evicted. Over when
    /// [`Shootdown::is_over`] returns true for the token (rule [D15]).
    ///
    /// # Errors
    /// The table failed.
    ///
    /// [D15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d15
    pub fn invalidate(&self, range: Range) -> Result<u64> {
        let _writer = self.writer.lock();
        count(&self.stats.invalidations);
        self.remove(range)
    }

    /// Removes everything, open misses included: accesses that wait look up, and miss, again. Over
    /// as [`invalidate`](Self::invalidate) is.
    ///
    /// # Errors
    /// The table failed.
    pub fn forget(&self) -> Result<u64> {
        let token = self.invalidate(Range::ALL);
        self.misses.clear();
        token
    }

    /// Removes every entry whose target `keep` rejects; `keep` gets the first and the last address
    /// that an entry leads to (rule [D25]). Returns a token, as [`invalidate`](Self::invalidate).
    ///
    /// # Errors
    /// The table failed.
    ///
    /// [D25]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d25
    pub fn retain_targets(&self, keep: impl Fn(GuestPhys, GuestPhys) -> bool) -> Result<u64> {
        let writer = self.writer.lock();
        let mut gone = Vec::new();
        self.domain.for_each(|mapping| {
            let last = mapping.target.wrapping_add(mapping.range.extent());
            if !keep(GuestPhys(mapping.target), GuestPhys(last)) {
                gone.push(mapping.range);
            }
        });
        // One token for all of them, which waits for the leases on each.
        let mut gather = Gather::new();
        let unmapped = self.domain.unmap_pages(&gone, &mut gather);
        drop(gather.take_pages());
        // And for those on evicted entries, wherever these led.
        let evicted = writer.evicted.iter().filter(|(_, token)| !self.shootdown().is_over(*token));
        evicted.for_each(|&(range, _)| gather.add(range));
        let token = self.begin(gather.ranges());
        unmapped.map_err(|partial| partial.error)?;
        token
    }

    /// Begins to invalidate what views may hold of `ranges`.
    fn begin(&self, ranges: &[Range]) -> Result<u64> {
        Ok(self.domain.sync_begin(Work::Unmap { ranges, exact: true })?.as_u64())
    }

    /// Notes that the front end has no translation of `range` for `access`: accesses that wait for
    /// one, or for one that allows more, fail.
    ///
    /// This must have returned before an access may begin for which the front end has mapped the range
    /// again: such an access, if it waits by then, may fail too. [`reply`](Self::reply) has no such
    /// condition.
    pub fn refuse(&self, range: Range, access: Prot) {
        self.refuse_as(range, access, None);
    }

    fn refuse_as(&self, range: Range, access: Prot, number: Option<u64>) {
        self.stats.refusals.fetch_add(1, Ordering::Relaxed);
        let now_ns = MonotonicClock.now_ns();
        let mut refused = self.misses.refuse(range, access, number, now_ns);
        // Present, but forbidden (rule D16).
        refused.retain(|miss| self.forbids(miss.iova, miss.access));
        if !refused.is_empty()
            && let Some(sink) = self.sink()
        {
            sink.fail(&refused);
        }
    }

    /// Takes the reply to a miss that was sent again with this number ([`Miss::again`]).
    ///
    /// `done`: the front end has sent whatever there is. If that is a translation that does not
    /// allow the access, the access is refused, but not at the first such reply: the translation
    /// may still be on its way. Not `done`: there is none, and accesses that waited for it before
    /// the miss was sent again fail. A miss that was first sent after this one is not concerned: a
    /// translation may have come and gone meanwhile.
    pub fn reply(&self, iova: Iova, access: Prot, number: u64, done: bool) {
        let forbidden =
            || self.misses.acknowledge(iova, access, number) && self.forbids(iova, access);
        if !done || forbidden() {
            self.refuse_as(point(iova), access, Some(number));
        }
    }

    /// Whether there is an entry that does not allow `access`.
    fn forbids(&self, iova: Iova, access: Prot) -> bool {
        self.domain.mapping(iova).is_some_and(|mapping| !mapping.prot.allows(access))
    }

    /// Whether there is an entry in part of `range`.
    fn overlaps(&self, range: Range) -> bool {
        let there = self.domain.mapping_from(range.first());
        there.is_some_and(|mapping| mapping.range.overlaps(range))
    }

    fn remove(&self, range: Range) -> Result<u64> {
        // Neither the ranges nor the table pages of the gather matter: `begin` covers the whole
        // range, which is what views may hold.
        let whole = match self.domain.unmap(range, &mut Gather::queued()) {
            // Entries are removed whole: what is removed in excess costs only a miss.
            Err(Error::WouldSplit { .. }) => {
                let [first, last] = [range.first(), range.last()]
                    .map(|at| self.domain.mapping(at).map_or(point(at), |there| there.range));
                let whole = first.hull(last);
                self.domain.unmap(whole, &mut Gather::queued())?;
                whole
            }
            removed => removed.map(|_| range)?,
        };
        self.begin(&[whole])
    }

    fn evict(&self, writer: &mut Writer) -> Result<()> {
        let full = || {
            let (used, limit) = (self.domain.mappings(), self.config.entries);
            Error::Full { what: "mappings", used, limit }
        };
        let range = writer.victims.pick(&self.domain).ok_or_else(full)?;
        count(&self.stats.evictions);
        let token = self.remove(range)?;
        self.note_evicted(writer, range, token);
        Ok(())
    }

    /// Notes that a view may use what was in `range` until `token` is over.
    fn note_evicted(&self, writer: &mut Writer, range: Range, token: u64) {
        writer.evicted.push((range, token));
        if writer.evicted.len() > EVICTED {
            writer.evicted.retain(|&(_, token)| !self.shootdown().is_over(token));
        }
        if let Some(all) = writer.evicted.iter().map(|&(range, _)| range).reduce(Range::hull)
            && writer.evicted.len() > EVICTED
        {
            // Some views have passed no quiet point for long: one invalidation of the hull replaces
            // all.
            writer.evicted = vec![(all, self.shootdown().begin(&[all]))];
        }
    }

    /// Frees some of the table's memory. Fails with `error`, which is why it was called, if it
    /// cannot.
    fn make_room(&self, writer: &mut Writer, range: Range, error: Error) -> Result<()> {
        if !matches!(error, Error::Full { .. }) {
            return Err(error);
        }
        if self.domain.retired_bytes() == 0 {
            // A sixteenth of them at a time: each round waits for all views.
            for _ in 0..=self.domain.mappings() / 16 {
                self.evict(writer).map_err(|_| error)?;
            }
            return Ok(());
        }
        // Emptied table pages are free once every view has passed a quiet point.
        let mut gather = Gather::new();
        gather.add(range);
        let mut sync = Pending::unmap(&*self.domain, vec![range], &mut gather);
        let (begun, backoff) = (Instant::now(), Backoff::new());
        while !sync.poll(&*self.domain) {
            if begun.elapsed() > QUIET_WITHIN {
                return Err(error);
            }
            backoff.snooze();
        }
        Ok(())
    }

    fn sink(&self) -> Option<Arc<dyn MissSink>> {
        self.sink.lock().clone()
    }

    /// How many misses there were so far, those sent again included.
    pub(crate) fn misses_sent(&self) -> u64 {
        self.misses.count()
    }

    /// Whether a missing translation will not arrive, for an access that has waited `since` there
    /// were so many misses, if given.
    pub(crate) fn is_refused(
        &self,
        wanted: (Iova, Prot),
        since: Option<u64>,
        waiter: &Arc<Waiter>,
    ) -> bool {
        // Without a sink none can be requested.
        self.had_sink.get().is_none()
            || self.misses.is_refused(wanted, since, waiter, || MonotonicClock.now_ns())
    }

    /// Notes that `waiter` waits for `wanted`, and leaves there what is to be
    /// [sent](Self::send_misses).
    pub(crate) fn note_misses(
        &self,
        wanted: &mut Vec<Miss>,
        waiter: &Arc<Waiter>,
        reader: &Reader,
    ) {
        self.misses.note(wanted, waiter, MonotonicClock.now_ns(), |miss| {
            let found = self.domain.translate(reader, miss.iova);
            found.is_some_and(|found| found.prot.allows(miss.access))
        });
    }

    /// Sends misses that were noted. `wanted` is emptied.
    pub(crate) fn send_misses(&self, wanted: &mut Vec<Miss>) {
        if !wanted.is_empty() {
            let sent = self.sink().map_or(0, |sink| sink.send(wanted)).min(wanted.len());
            self.stats.misses.fetch_add(sent as u64, Ordering::Relaxed);
            self.stats.batches.fetch_add(u64::from(sent > 0), Ordering::Relaxed);
            let again = wanted[..sent].iter().filter(|miss| miss.again.is_some()).count();
            self.stats.sent_again.fetch_add(again as u64, Ordering::Relaxed);
            if sent < wanted.len() {
                self.misses.unsent(&wanted[sent..]);
            }
            wanted.clear();
        }
    }
}

/// What only the thread that changes the table touches.
struct Writer {
    victims: Victims,
    /// Evicted ranges, with the tokens of their invalidations: a view may still use them.
    evicted: Vec<(Range, u64)>,
}

/// How long a full table waits for views to pass a quiet point.
const QUIET_WITHIN: Duration = Duration::from_millis(100);

/// The most evictions that are tracked separately.
const EVICTED: usize = 32;

impl Writer {
    /// Whether a view may still use an evicted entry of `range`.
    fn was_evicted(&mut self, range: Range, shootdown: &Shootdown) -> bool {
        let held =
            |&(evicted, token): &(Range, u64)| evicted.overlaps(range) && !shootdown.is_over(token);
        self.evicted.iter().any(held)
    }
}

/// Counts one more, for the thread that has the writer's lock.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// Fed by an IOMMU in this process.
// SAFETY: calls pass to the table, which fulfils the contract; what a peer's updates map besides is
// between the peer and the device.
unsafe impl Domain for Iotlb {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(
        domain: geometry, capabilities, sync_begin, sync_poll, sync_wait, iova_to_phys, mappings_from
    );

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let _writer = self.writer.lock();
        let mapped = self.domain.map_pages(maps);
        let done = mapped.map_or_else(|partial| partial.done, |()| maps.len());
        maps[..done].iter().for_each(|map| self.misses.update(map.range(), map.prot()));
        mapped
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let _writer = self.writer.lock();
        self.domain.unmap_pages(ranges, gather)
    }
}

impl fmt::Debug for Iotlb {
    ringfence_sync::shows!(
        Iotlb as it, config: it.config, entries: it.entries(), open_misses: it.open_misses()
    );
}

#[cfg(all(test, not(loom)))]
mod oracle;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod model;
