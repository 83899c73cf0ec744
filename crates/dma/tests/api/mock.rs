//! A domain with a cache, an eager allocator, and buffers that count their drops.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ringfence_dma::{
    Device, DmaBuffer, DmaConfig, Environment, Policy, SharedMemory, ThreadClock, TimerKind,
};
use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial, Prot,
    Range, ReservedKind, ReservedRegion, Result, SyncToken, Work,
    table::{Limits, Table},
};
use ringfence_iova::{
    AllocError, AllocReason, Allocator, FreeError, FreeReason, Request, ReserveError, Stats,
};
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

/// The status of the device's failures on command.
pub(crate) const STATUS: u8 = 7;

/// The reserved region of every mock domain.
pub(crate) const MSI: Range = match Range::new(Iova(0x8000), Iova(0x8fff)) {
    Some(range) => range,
    None => panic!("not empty"),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Map(Range, u64, Prot),
    SyncMap(Range),
    Unmap { range: Range, queued: bool },
    Sync,
    FlushAll,
    Free(u64, u64),
}

pub(crate) type Log = Arc<Mutex<Vec<Event>>>;

type Hook = Box<dyn FnOnce() + Send>;

/// A domain whose device caches every translation as soon as it is made, drops it only when it is
/// invalidated, and fails on command.
pub(crate) struct MockDomain {
    geometry: Geometry,
    capabilities: Capabilities,
    pub(crate) table: Table,
    /// What the device can reach, whatever the table says.
    cached: Mutex<Vec<(Range, u64, Prot)>>,
    /// Serialises invalidations: what one has walked is not cached after the next.
    invalidating: Mutex<()>,
    pub(crate) log: Log,
    /// How many operations succeed before one fails.
    fail_after: AtomicI64,
    /// The operations that always fail.
    pub(crate) broken: Mutex<Broken>,
    /// Syncs that were begun but are not over, kept so by [`hold`](Self::hold).
    begun: Mutex<Begun>,
    /// Runs in the middle of the next flush.
    pub(crate) during_flush: Mutex<Option<Hook>>,
    /// What each operation takes, by this clock.
    pub(crate) takes: Mutex<Option<(Arc<ManualClock>, u64)>>,
}

#[derive(Default)]
struct Begun {
    held: bool,
    last: u64,
    /// The ranges of each, and whether it is for maps.
    under_way: BTreeMap<u64, (Vec<Range>, bool)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Broken {
    pub(crate) unmap: bool,
    pub(crate) sync: bool,
    pub(crate) flush: bool,
    /// The failures of syncs that are polled for are of this range alone.
    pub(crate) only: Option<Range>,
}

impl MockDomain {
    pub(crate) fn new(granule: u64, capabilities: Capabilities, limits: Limits) -> Arc<MockDomain> {
        Arc::new(MockDomain {
            geometry: Geometry {
                reserved: Arc::from([ReservedRegion { range: MSI, kind: ReservedKind::Msi }]),
                ..Geometry::new(PageSizes::from_granule(granule).unwrap(), Range::ALL)
            },
            capabilities,
            table: Table::new(limits),
            cached: Mutex::default(),
            invalidating: Mutex::default(),
            log: Log::default(),
            fail_after: AtomicI64::new(i64::MAX),
            broken: Mutex::default(),
            begun: Mutex::default(),
            during_flush: Mutex::default(),
            takes: Mutex::default(),
        })
    }

    /// From now on syncs that are begun are over only after [`let_go`](Self::let_go), or when a
    /// caller waits for them.
    pub(crate) fn hold(&self) {
        self.begun.lock().unwrap().held = true;
    }

    /// Carries out the oldest sync that is held; returns whether there was one.
    pub(crate) fn let_go(&self) -> bool {
        let oldest = self.begun.lock().unwrap().under_way.pop_first();
        if let Some((_, (ranges, false))) = &oldest {
            self.invalidate(ranges);
        }
        oldest.is_some()
    }

    fn begin(&self, ranges: &[Range], map: bool) -> Option<SyncToken> {
        let mut begun = self.begun.lock().unwrap();
        begun.held.then(|| {
            begun.last += 1;
            let token = begun.last;
            begun.under_way.insert(token, (ranges.to_vec(), map));
            SyncToken::new(token)
        })
    }

    fn is_over(&self, token: SyncToken) -> bool {
        !self.begun.lock().unwrap().under_way.contains_key(&token.as_u64())
    }

    fn invalidate(&self, ranges: &[Range]) {
        let _one_at_a_time = self.invalidating.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cached = self.cached.lock().unwrap();
        cached.retain(|(held, ..)| ranges.iter().all(|range| !range.overlaps(*held)));
    }

    /// Makes the operation after `good` successful ones fail, once.
    pub(crate) fn fail_after(&self, good: i64) {
        self.fail_after.store(good, Ordering::Relaxed);
    }

    /// Whether the requested failure is still to come.
    pub(crate) fn failure_pending(&self) -> bool {
        self.fail_after.load(Ordering::Relaxed) >= 0
    }

    fn step(&self, event: Event, broken: fn(&Broken) -> bool) -> Result<()> {
        self.log.lock().unwrap().push(event);
        if let Some((clock, ns)) = &*self.takes.lock().unwrap() {
            clock.advance(*ns);
        }
        if self.fail_after.fetch_sub(1, Ordering::Relaxed) == 0
            || broken(&self.broken.lock().unwrap())
        {
            return Err(Error::Device { operation: "map", range: Range::ALL, status: STATUS });
        }
        Ok(())
    }

    /// The target that the device reaches at `iova`.
    pub(crate) fn reach(&self, iova: u64) -> Option<(u64, Prot)> {
        let hit = self.cached().into_iter().find(|(range, ..)| range.contains(Iova(iova)));
        hit.map(|(range, target, prot)| (target + (iova - range.first().0), prot))
    }

    /// Everything the device can reach.
    pub(crate) fn cached(&self) -> Vec<(Range, u64, Prot)> {
        self.cached.lock().unwrap().clone()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn forget_events(&self) {
        self.log.lock().unwrap().clear();
    }
}

impl MockDomain {
    fn map_one(&self, map: &Map<GuestPhys>) -> Result<()> {
        let (range, target, prot) = (map.range(), map.target(), map.prot());
        self.step(Event::Map(range, target.0, prot), |_| false)?;
        self.geometry.check_map(map)?;
        // Locked first: a flush on another CPU must not see one change without the other.
        let mut cached = self.cached.lock().unwrap();
        self.table.map(range, target.0, prot)?;
        assert!(
            cached.iter().all(|(held, ..)| !held.overlaps(range)),
            "{range} is mapped while the device still has something cached there"
        );
        cached.push((range, target.0, prot));
        Ok(())
    }

    fn unmap_one(&self, range: Range, gather: &mut Gather) -> Result<u128> {
        let queued = gather.is_queued();
        self.step(Event::Unmap { range, queued }, |broken| broken.unmap)?;
        let mut pages = Default::default();
        let bytes = self.table.unmap(range, &mut pages)?;
        gather.add(range);
        gather.add_pages(pages);
        Ok(bytes)
    }

    fn sync_map(&self, range: Range) -> Result<()> {
        let result = self.step(Event::SyncMap(range), |_| false);
        if result.is_err() {
            // The device refuses the last mapping, which is then not mapped.
            let mut cached = self.cached.lock().unwrap();
            if let Some(at) = cached.iter().rposition(|(held, ..)| range.covers(*held)) {
                let (refused, ..) = cached.swap_remove(at);
                self.table.unmap(refused, &mut Default::default())?;
            }
        }
        result
    }

    fn flush(&self) -> Result<()> {
        self.step(Event::FlushAll, |broken| broken.flush)?;
        let _one_at_a_time = self.invalidating.lock().unwrap_or_else(PoisonError::into_inner);
        // The device walks the table while it flushes, before what the hook changes ...
        let walked = self.table.iter().map(|m| (m.range, m.target, m.prot)).collect();
        let hook = self.during_flush.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        // ... and caches that afterwards.
        *self.cached.lock().unwrap() = walked;
        Ok(())
    }
}

// SAFETY: there is no memory behind its targets.
unsafe impl Domain for MockDomain {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        Partial::each(maps, |map| self.map_one(map))
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut bytes = 0;
        Partial::each(ranges, |&range| {
            bytes += self.unmap_one(range, gather)?;
            Ok(())
        })?;
        Ok(bytes)
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        match work {
            Work::Map(ranges) => {
                if let Some(token) = self.begin(ranges, true) {
                    return Ok(token);
                }
                ranges.iter().try_for_each(|&range| self.sync_map(range))?;
            }
            Work::Unmap { ranges, .. } => {
                if let Some(token) = self.begin(ranges, false) {
                    return Ok(token);
                }
                self.step(Event::Sync, |broken| broken.sync)?;
                self.invalidate(ranges);
            }
            Work::All => self.flush()?,
        }
        Ok(SyncToken::DONE)
    }

    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        if !self.is_over(token) {
            return false;
        }
        match work {
            Work::Map(ranges) => ranges.iter().for_each(|&range| {
                _ = self.sync_map(range).inspect_err(|&error| failed(range, error));
            }),
            _ => {
                let synced = self.step(Event::Sync, |broken| broken.sync);
                let of = self.broken.lock().unwrap().only.unwrap_or(Range::ALL);
                _ = synced.inspect_err(|&error| failed(of, error));
            }
        }
        true
    }

    fn sync_wait(&self, token: SyncToken) {
        while !self.is_over(token) {
            self.let_go();
        }
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        self.table.lookup_locked(iova).map(|found| GuestPhys(found.target(iova)))
    }
}

/// Reuses at once what was freed last, so that a premature free shows.
pub(crate) struct EagerAllocator {
    state: Mutex<State>,
    granule: u64,
    log: Log,
}

#[derive(Default)]
struct State {
    next: u64,
    free: Vec<(u64, u64)>,
    live: BTreeMap<u64, u64>,
    reserved: Vec<(u64, u64)>,
}

impl EagerAllocator {
    pub(crate) fn new(granule: u64, log: Log) -> Arc<EagerAllocator> {
        let state = State { next: 0x10_0000, ..State::default() };
        Arc::new(EagerAllocator { state: Mutex::new(state), granule, log })
    }

    pub(crate) fn live(&self) -> usize {
        self.state.lock().unwrap().live.len()
    }

    pub(crate) fn is_live(&self, iova: u64) -> bool {
        self.state.lock().unwrap().live.contains_key(&iova)
    }

    pub(crate) fn reserved(&self) -> Vec<(u64, u64)> {
        self.state.lock().unwrap().reserved.clone()
    }
}

impl Allocator for EagerAllocator {
    fn alloc(&self, request: &Request) -> std::result::Result<u64, AllocError> {
        let fail = |reason| Err(AllocError { request: *request, reason });
        assert_eq!(request.size % self.granule, 0);
        assert!(request.boundary == u64::MAX || request.size - 1 <= request.boundary);
        let Some(align) = request.size.checked_next_power_of_two() else {
            return fail(AllocReason::TooBig);
        };
        let mut state = self.state.lock().unwrap();
        let fits =
            |&(iova, size): &(u64, u64)| size == request.size && iova + (size - 1) <= request.limit;
        if let Some(at) = state.free.iter().rposition(fits) {
            let (iova, size) = state.free.remove(at);
            state.live.insert(iova, size);
            return Ok(iova);
        }
        let exhausted = AllocReason::Exhausted { first: 0, last: request.limit };
        let Some(iova) = state.next.checked_next_multiple_of(align) else {
            return fail(exhausted);
        };
        match iova.checked_add(request.size - 1) {
            Some(last) if last <= request.limit => state.next = last.saturating_add(1),
            _ => return fail(exhausted),
        }
        state.live.insert(iova, request.size);
        Ok(iova)
    }

    fn free(&self, iova: u64, size: u64) -> std::result::Result<(), FreeError> {
        self.log.lock().unwrap().push(Event::Free(iova, size));
        let mut state = self.state.lock().unwrap();
        if state.live.remove(&iova) != Some(size) {
            return Err(FreeError { iova, size, reason: FreeReason::NotAllocated });
        }
        state.free.push((iova, size));
        Ok(())
    }

    fn reserve(&self, first: u64, last: u64) -> std::result::Result<(), ReserveError> {
        self.state.lock().unwrap().reserved.push((first, last));
        Ok(())
    }

    fn check_free(&self, iova: u64, size: u64) -> std::result::Result<(), FreeError> {
        match self.state.lock().unwrap().live.get(&iova) {
            Some(held) if *held == size => Ok(()),
            _ => Err(FreeError { iova, size, reason: FreeReason::NotAllocated }),
        }
    }

    fn granule(&self) -> u64 {
        self.granule
    }

    fn stats(&self) -> Stats {
        let live = &self.state.lock().unwrap().live;
        let mut stats = Stats::default();
        (stats.live_ranges, stats.live_bytes) = (live.len() as u64, live.values().sum());
        stats
    }
}

/// A buffer of pieces that exist only as addresses.
#[derive(Debug)]
pub(crate) struct Buf {
    pub(crate) pieces: Vec<(u64, u64)>,
    drops: Arc<AtomicUsize>,
}

impl Buf {
    pub(crate) fn new(pieces: &[(u64, u64)]) -> Buf {
        Buf { pieces: pieces.to_vec(), drops: Arc::default() }
    }

    /// The counter of how often this buffer was dropped.
    pub(crate) fn drops(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.drops)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: there is no memory behind these addresses that could be misused.
unsafe impl DmaBuffer<GuestPhys> for Buf {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.pieces.iter().for_each(|&(addr, len)| each(GuestPhys(addr), len));
    }
}

// SAFETY: as above.
unsafe impl SharedMemory for Buf {}

/// Each reading takes 1000 ns more than the one before.
#[derive(Default)]
pub(crate) struct TickingClock(AtomicUsize);

impl ThreadClock for TickingClock {
    fn thread_ns(&self) -> u64 {
        self.0.fetch_add(1000, Ordering::Relaxed) as u64
    }
}

pub(crate) type TestDevice = Device<Arc<MockDomain>, Arc<EagerAllocator>>;

/// A device with everything around it under the test's control.
pub(crate) struct Bench {
    pub(crate) device: TestDevice,
    pub(crate) domain: Arc<MockDomain>,
    pub(crate) allocator: Arc<EagerAllocator>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) cpu: Arc<FixedCpu>,
}

/// How a [`Bench`] is made.
pub(crate) struct Setup {
    pub(crate) granule: u64,
    pub(crate) capabilities: Capabilities,
    pub(crate) limits: Limits,
    pub(crate) config: DmaConfig,
    pub(crate) thread_clock: Arc<dyn ThreadClock>,
    /// In place of the bench's.
    pub(crate) clock: Option<Arc<dyn Clock>>,
}

impl Setup {
    pub(crate) fn new(policy: Policy) -> Setup {
        Setup {
            granule: 4096,
            capabilities: Capabilities::FULL,
            limits: Limits::NONE,
            config: DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(policy) },
            thread_clock: Arc::new(TickingClock::default()),
            clock: None,
        }
    }

    pub(crate) fn build(self) -> Bench {
        let Setup { granule, capabilities, limits, config, thread_clock, clock: other } = self;
        let domain = MockDomain::new(granule, capabilities, limits);
        let allocator = EagerAllocator::new(granule.max(4096), Arc::clone(&domain.log));
        let clock = Arc::new(ManualClock::new(1_000_000));
        let cpu = Arc::new(FixedCpu::new(2));
        let environment = Environment {
            clock: other.unwrap_or(Arc::clone(&clock) as _),
            cpu: Arc::clone(&cpu) as _,
            thread_clock,
        };
        let device = Device::builder(Arc::clone(&domain))
            .allocator(Arc::clone(&allocator))
            .config(config)
            .environment(environment)
            .build()
            .unwrap();
        Bench { device, domain, allocator, clock, cpu }
    }
}

impl Bench {
    pub(crate) fn new(policy: Policy) -> Bench {
        Setup::new(policy).build()
    }

    /// Asserts that nothing is left.
    pub(crate) fn assert_nothing_leaked(&self) {
        assert_eq!(self.allocator.live(), 0, "an IOVA leaked");
        assert_eq!(self.domain.table.mappings(), 0, "a translation leaked");
        assert_eq!(self.domain.cached(), [], "the device still reaches something");
    }
}

/// Waits for other threads; fails rather than waiting for ever.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{what}: not within two minutes");
        thread::yield_now();
    }
}

/// Stops threads when dropped, so that a failed assertion does not wait for them.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
