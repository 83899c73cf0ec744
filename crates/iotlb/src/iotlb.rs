//! The IOTLB of a device: what its front end, or an IOMMU in this process, has told.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, PageSizes, Prot, Range, Result,
    SoftDomain, SyncToken,
    shootdown::{Reader, Shootdown},
    table::{Limits, Translation},
};
use ringfence_sync::clock::{Clock, MonotonicClock};

use crate::misses::{Lack, Miss, MissSink, Misses, Times, Waiter};

/// How an [`Iotlb`] is made.
#[derive(Clone, Copy, Debug)]
pub struct IotlbConfig {
    /// The most entries (rule D24).
    pub entries: u64,
    /// The most bytes of table memory.
    pub table_bytes: u64,
    /// The most questions that are open at a time (rule D17).
    pub misses: usize,
    /// How long an access waits for its translation before it fails.
    pub patience: Duration,
    /// After how long without an answer a question is asked again, this time for an answer in any
    /// case.
    pub again: Duration,
}

impl Default for IotlbConfig {
    fn default() -> IotlbConfig {
        IotlbConfig {
            entries: 1 << 16,
            table_bytes: 64 << 20,
            misses: 1024,
            patience: Duration::from_secs(5),
            again: Duration::from_millis(20),
        }
    }
}

/// What an [`Iotlb`] counts.
#[derive(Debug, Default)]
pub struct IotlbStats {
    /// Entries that were put in.
    pub updates: AtomicU64,
    /// Invalidations.
    pub invalidations: AtomicU64,
    /// Entries that made room for others.
    pub evictions: AtomicU64,
    /// Questions that were sent.
    pub misses: AtomicU64,
    /// Of these, those that had been asked before.
    pub asked_again: AtomicU64,
    /// Answers that there is no such translation.
    pub refusals: AtomicU64,
    /// Accesses that gave up waiting for an answer.
    pub timeouts: AtomicU64,
}

/// The IOTLB of a device: one table, read by the [`View`](crate::View)s of all its workers without
/// locks.
///
/// It is fed in one of two ways. A front end answers its misses: set a [`MissSink`], and call
/// [`update`](Self::update) and [`invalidate`](Self::invalidate) with what comes. When it is full, an
/// entry picked at random makes room, which costs a miss later and nothing else (rule D24). Or an
/// IOMMU in this process maps and unmaps through it as a [`Domain`]: then it holds all there is, an
/// address that is not there is a fault, and when it is full a map fails (rule D30).
pub struct Iotlb {
    domain: Arc<SoftDomain<GuestPhys>>,
    config: IotlbConfig,
    writer: Mutex<Victims>,
    misses: Misses,
    sink: Mutex<Option<Arc<dyn MissSink>>>,
    /// Whether there is a sink: read on each miss.
    asks: OnceLock<()>,
    stats: IotlbStats,
}

/// The beginnings of entries, for picking one at random; some may be gone.
#[derive(Default)]
struct Victims {
    firsts: Vec<Iova>,
    random: u64,
}

impl Victims {
    fn add(&mut self, first: Iova, domain: &SoftDomain<GuestPhys>) {
        if self.firsts.len() as u64 > 2 * domain.mappings() + 64 {
            self.firsts.sort_unstable_by_key(|first| first.0);
            self.firsts.dedup();
            self.firsts.retain(|&first| domain.mapping(first).is_some());
        }
        self.firsts.push(first);
    }

    fn pick(&mut self, domain: &SoftDomain<GuestPhys>) -> Option<Range> {
        while !self.firsts.is_empty() {
            // SplitMix64; seeded so that nobody can tell which entry goes.
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.random;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let at =
                ((u128::from(mixed ^ (mixed >> 31)) * self.firsts.len() as u128) >> 64) as usize;
            let first = self.firsts.swap_remove(at);
            if let Some(mapping) = domain.mapping(first) {
                return Some(mapping.range);
            }
        }
        None
    }
}

impl Iotlb {
    /// An empty IOTLB whose views belong to `shootdown`.
    pub fn new(config: IotlbConfig, shootdown: Arc<Shootdown>) -> Arc<Iotlb> {
        // To the byte: what a front end announces need not be aligned.
        let sizes = PageSizes::from_granule(1).expect("a power of two");
        let limits = Limits { table_bytes: config.table_bytes, mappings: config.entries };
        let domain = SoftDomain::new(Geometry::new(sizes, Range::ALL), limits, shootdown);
        let times = Times { again_ns: nanos(config.again), refused_ns: nanos(config.again) };
        let seed =
            std::hash::BuildHasher::hash_one(&std::collections::hash_map::RandomState::new(), 0u8);
        Arc::new(Iotlb {
            domain,
            config,
            writer: Mutex::new(Victims { firsts: Vec::new(), random: seed }),
            misses: Misses::new(config.misses, times),
            sink: Mutex::new(None),
            asks: OnceLock::new(),
            stats: IotlbStats::default(),
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &IotlbConfig {
        &self.config
    }

    /// What it has counted.
    pub fn stats(&self) -> &IotlbStats {
        &self.stats
    }

    /// How many entries there are.
    pub fn entries(&self) -> u64 {
        self.domain.mappings()
    }

    /// How many questions are open.
    pub fn open_misses(&self) -> usize {
        self.misses.open()
    }

    /// What tells its views of invalidations.
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        self.domain.shootdown()
    }

    /// Has `sink` asked for what is lacking from now on; `None`: the one who answered is gone, and
    /// accesses wait for another until their patience is over.
    pub fn ask_through(&self, sink: Option<Arc<dyn MissSink>>) {
        if sink.is_some() {
            let _ = self.asks.set(());
        }
        *self.sink.lock() = sink;
        self.misses.clear();
    }

    /// Whether what is not in it may be had by asking.
    #[inline]
    pub fn asks(&self) -> bool {
        self.asks.get().is_some()
    }

    /// A translation, as the one who knows it tells it: replaces what was there. Returns a token:
    /// if part of the range led elsewhere before, the update is in force when
    /// [`Shootdown::is_over`] says so of it (0: at once).
    ///
    /// # Errors
    /// [`NoPermission`](Error::NoPermission), [`TargetOverflow`](Error::TargetOverflow),
    /// [`Full`](Error::Full) or [`NoMemory`](Error::NoMemory) where even eviction makes no room. What
    /// was there before may be gone then.
    pub fn update(&self, range: Range, target: GuestPhys, prot: Prot) -> Result<u64> {
        let mut victims = self.writer.lock();
        let same = |mapping: ringfence_iommu::table::Mapping| {
            mapping.prot == prot
                && mapping.range.covers(range)
                && mapping.target.wrapping_add(range.first().0 - mapping.range.first().0)
                    == target.0
        };
        let mut token = 0;
        if !self.domain.mapping(range.first()).is_some_and(same) {
            if self.domain.mapping_from(range.first()).is_some_and(|m| m.range.overlaps(range)) {
                token = self.remove(range)?;
            }
            while self.domain.mappings() >= self.config.entries {
                self.evict(&mut victims)?;
            }
            // Each eviction frees some of the table's memory, in the end all of it.
            loop {
                match self.domain.map_pages(range, target, prot) {
                    Err(full @ Error::Full { .. }) => {
                        self.evict(&mut victims).map_err(|_| full)?;
                    }
                    done => break done?,
                }
            }
            victims.add(range.first(), &self.domain);
        }
        drop(victims);
        self.stats.updates.fetch_add(1, Ordering::Relaxed);
        self.misses.answer(range, prot);
        Ok(token)
    }

    /// Removes every entry that overlaps `range`, as a whole, and begins to invalidate the range
    /// whether there were any or not: a view may hold what was evicted. Over when
    /// [`Shootdown::is_over`] says so of the token (rule D15).
    ///
    /// # Errors
    /// The table failed.
    pub fn invalidate(&self, range: Range) -> Result<u64> {
        let _victims = self.writer.lock();
        self.stats.invalidations.fetch_add(1, Ordering::Relaxed);
        self.remove(range)
    }

    /// Removes every entry that does not lead into what `keep` accepts, which is given the first and
    /// the last address that an entry leads to (rule D25). Returns a token, as
    /// [`invalidate`](Self::invalidate).
    ///
    /// # Errors
    /// The table failed.
    pub fn retain_targets(&self, keep: impl Fn(GuestPhys, GuestPhys) -> bool) -> Result<u64> {
        let _victims = self.writer.lock();
        let mut token = 0;
        let mut gone = Vec::new();
        self.domain.for_each(|mapping| {
            let last = mapping.target.wrapping_add(mapping.range.extent());
            if !keep(GuestPhys(mapping.target), GuestPhys(last)) {
                gone.push(mapping.range);
            }
        });
        for range in gone {
            token = self.remove(range)?;
        }
        Ok(token)
    }

    /// The one who knows says that there is no translation of `range` for `access`: who waits for
    /// one fails.
    pub fn refuse(&self, range: Range, access: Prot) {
        self.stats.refusals.fetch_add(1, Ordering::Relaxed);
        self.misses.refuse(range, access, MonotonicClock.now_ns());
    }

    fn remove(&self, range: Range) -> Result<u64> {
        // Entries go as a whole: what goes too much costs a miss, no more.
        let first = self.domain.mapping(range.first()).map_or(range.first(), |m| m.range.first());
        let last = self.domain.mapping(range.last()).map_or(range.last(), |m| m.range.last());
        let whole = Range::new(first, last).expect("they enclose a range");
        let mut gather = Gather::new();
        self.domain.unmap_pages(whole, &mut gather)?;
        gather.add(whole);
        Ok(self.domain.iotlb_sync_begin(&mut gather)?.0)
    }

    fn evict(&self, victims: &mut Victims) -> Result<()> {
        let range = victims.pick(&self.domain).ok_or(Error::NoMemory)?;
        self.stats.evictions.fetch_add(1, Ordering::Relaxed);
        self.remove(range).map(|_| ())
    }

    pub(crate) fn translate(&self, reader: &Reader, iova: Iova) -> Option<Translation> {
        self.domain.translate(reader, iova)
    }

    /// What to do about an address that is not there.
    pub(crate) fn lack(&self, iova: Iova, access: Prot) -> Lack {
        if !self.asks() {
            return Lack::Refused;
        }
        self.misses.lack(iova, access, MonotonicClock.now_ns())
    }

    /// Asks for what a view lacks; `wanted` is emptied.
    pub(crate) fn ask(&self, wanted: &mut Vec<Miss>, waiter: &Arc<Waiter>) {
        self.misses.note(wanted, waiter, MonotonicClock.now_ns());
        if !wanted.is_empty() {
            let sink = self.sink.lock().clone();
            let sent = sink.map_or(0, |sink| sink.ask(wanted)).min(wanted.len());
            self.stats.misses.fetch_add(sent as u64, Ordering::Relaxed);
            let again = wanted[..sent].iter().filter(|miss| miss.again).count();
            self.stats.asked_again.fetch_add(again as u64, Ordering::Relaxed);
            self.misses.forget(&wanted[sent..]);
            wanted.clear();
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Fed by an IOMMU in this process.
impl Domain for Iotlb {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        self.domain.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.domain.capabilities()
    }

    fn map_pages(&self, range: Range, target: GuestPhys, prot: Prot) -> Result<()> {
        let _victims = self.writer.lock();
        self.domain.map_pages(range, target, prot)?;
        self.misses.answer(range, prot);
        Ok(())
    }

    fn iotlb_sync_map(&self, range: Range) -> Result<()> {
        self.domain.iotlb_sync_map(range)
    }

    fn unmap_pages(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let _victims = self.writer.lock();
        self.domain.unmap_pages(range, gather)
    }

    fn iotlb_sync(&self, gather: &mut Gather) -> Result<()> {
        self.domain.iotlb_sync(gather)
    }

    fn flush_iotlb_all(&self) -> Result<()> {
        self.domain.flush_iotlb_all()
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        self.domain.iova_to_phys(iova)
    }

    fn iotlb_sync_begin(&self, gather: &mut Gather) -> Result<SyncToken> {
        self.domain.iotlb_sync_begin(gather)
    }

    fn iotlb_sync_poll(&self, token: SyncToken, ranges: &[Range]) -> Result<bool> {
        self.domain.iotlb_sync_poll(token, ranges)
    }

    fn iotlb_sync_wait(&self, token: SyncToken) -> Result<()> {
        self.domain.iotlb_sync_wait(token)
    }
}

impl fmt::Debug for Iotlb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iotlb")
            .field("config", &self.config)
            .field("entries", &self.entries())
            .field("open_misses", &self.open_misses())
            .finish_non_exhaustive()
    }
}
