//! A device behind a domain.

use core::{fmt, mem::ManuallyDrop};
use std::sync::Arc;

use ringfence_iommu::{Address, Domain, Iova, Range};
use ringfence_iova::{Align, Allocator, Request};

use crate::{
    Coherent, Config, Direction, DmaBuffer, Environment, Error, Fallback, MapBatch, MapError,
    Mapping, Policy, SetupError, SharedMemory, Stats, TimerKind, UnmapBatch,
    flush::{self, FlushQueues, Timer},
    layout::Limits,
    mapper::{Mapper, Pieces, Sync, measure},
    mapping::{DeviceId, Owner, Placed},
    segment::Segments,
    shared::{Lazy, Parts, Shared, Span, Unmapped},
    stats::{Count, Counters},
    thread_time::{BriefSampler, Sampler},
};

/// One device behind one domain: maps buffers for it. Cheap to clone; give each thread its own
/// clone, which has counters of its own, so that threads do not share a cache line.
pub struct Device<D: Domain + 'static, A: Allocator + 'static> {
    port: Arc<Port<D, A>>,
}

/// A clone of a device: what its mappings hold on to.
pub(crate) struct Port<D: Domain, A: Allocator> {
    pub(crate) shared: Arc<Shared<D, A>>,
    pub(crate) counters: Arc<Counters>,
}

impl<D: Domain, A: Allocator> Port<D, A> {
    fn new(shared: Arc<Shared<D, A>>) -> Arc<Self> {
        let counters = Arc::new(Counters::default());
        shared.add_clone(&counters);
        Arc::new(Port { shared, counters })
    }

    /// What follows the invalidation of something that was unmapped strictly, in a batch.
    pub(crate) fn settle(
        &self,
        span: Option<Span>,
        unmapped: Option<Unmapped>,
        result: ringfence_iommu::Result<()>,
    ) -> ringfence_iommu::Result<Option<Unmapped>> {
        let counters = &*self.counters;
        let settled = match span {
            Some(span) => self.shared.settle(span.range, unmapped, result, counters),
            None => Ok(unmapped),
        };
        match &settled {
            Ok(_) => counters.unmaps.add(1),
            Err(_) => counters.unmap_failures.add(1),
        }
        settled
    }
}

impl<D: Domain, A: Allocator> Drop for Port<D, A> {
    fn drop(&mut self) {
        self.shared.remove_clone(&self.counters);
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Clone for Device<D, A> {
    fn clone(&self) -> Self {
        Device { port: Port::new(Arc::clone(&self.port.shared)) }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> fmt::Debug for Device<D, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("policy", &self.effective_policy())
            .field("fallback", &self.fallback())
            .finish_non_exhaustive()
    }
}

/// A map call that failed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether nothing of it is left.
    pub(crate) undone: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, undone: true }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// A device that maps through `domain` at addresses from `allocator`. The domain's reserved
    /// regions are reserved in the allocator.
    ///
    /// # Errors
    /// The configuration makes no sense with this domain or allocator.
    pub fn new(domain: D, allocator: A, config: Config) -> Result<Self, SetupError> {
        Self::with_environment(domain, allocator, config, Environment::default())
    }

    /// As [`new`](Self::new), with clocks and CPU numbers of the caller's.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_environment(
        domain: D,
        allocator: A,
        config: Config,
        environment: Environment,
    ) -> Result<Self, SetupError> {
        let geometry = domain.geometry();
        let granule = geometry.page_sizes.granule();
        check(&config, granule, allocator.granule())?;
        for region in geometry.reserved.iter() {
            let range = region.range;
            allocator.reserve(range.first().0, range.last().0)?;
        }
        let (policy, fallback) = if config.policy.is_lazy() && !domain.capabilities().deferred_flush
        {
            (config.policy.to_strict(), Some(Fallback::NoDeferredFlush))
        } else {
            (config.policy, None)
        };
        let Environment { clock, cpu, thread_clock } = environment;
        let rings = if policy.is_per_cpu() { cpu.count() } else { 1 };
        let mut no_thread = false;
        // Rule L27: the timer's thread holds a reference that leads nowhere until all is made.
        let shared = Arc::new_cyclic(|weak: &std::sync::Weak<Shared<D, A>>| {
            let timer = match config.timer {
                TimerKind::Thread if policy.is_lazy() => {
                    let weak = weak.clone();
                    let expire = move || match weak.upgrade() {
                        // A flush that fails is counted, and tried again: the timer is armed.
                        Some(shared) => shared.expire().map_or(true, |()| true),
                        None => false,
                    };
                    Timer::spawn(Arc::clone(&clock), expire).unwrap_or_else(|_| {
                        no_thread = true;
                        Timer::manual()
                    })
                }
                _ => Timer::manual(),
            };
            let lazy = policy.is_lazy().then(|| {
                let (slots, ms) = tuning(&config, policy);
                Lazy {
                    queues: FlushQueues::new(rings, slots),
                    interval_ns: ms.saturating_mul(1_000_000),
                    timer,
                }
            });
            Shared::new(Parts {
                limits: Limits::new(&config, granule),
                limit: config.limit.0.min(geometry.aperture.last().0),
                sampler: Sampler::new(thread_clock, config.sample_every),
                brief_sampler: BriefSampler::new(Arc::clone(&clock), config.sample_every),
                domain,
                allocator,
                policy,
                fallback,
                clock,
                cpu,
                lazy,
            })
        });
        if no_thread {
            return Err(SetupError::Thread);
        }
        Ok(Device { port: Port::new(shared) })
    }

    /// Maps one buffer. Its pieces are laid out in one contiguous IOVA range; where they follow
    /// each other in memory they are mapped at once.
    ///
    /// # Errors
    /// Nothing is mapped, and the buffer is in the error.
    pub fn map<B: DmaBuffer<D::Target>>(
        &self,
        buffer: B,
        direction: Direction,
    ) -> Result<Mapping<B>, MapError<B>> {
        // Were something below to panic, the buffer would be leaked rather than freed while mapped.
        let buffer = ManuallyDrop::new(buffer);
        let placed = self.place(&|each| buffer.for_each_segment(each), direction, Sync::Now);
        self.finish(ManuallyDrop::into_inner(buffer), placed)
    }

    /// Maps a scatter list: several buffers at one contiguous IOVA range (rules L35, L44-L46).
    ///
    /// Each buffer begins at its own offset in a granule, so that on a domain of 4 KiB granules the
    /// device sees as many segments as there are buffers that do not join in whole granules; never
    /// more than there are pieces, unless one is longer than a segment may be.
    ///
    /// # Errors
    /// As [`map`](Self::map); all buffers are in the error, in their order.
    pub fn map_sg<B: DmaBuffer<D::Target>>(
        &self,
        list: Vec<B>,
        direction: Direction,
    ) -> Result<Mapping<Vec<B>>, MapError<Vec<B>>> {
        let list = ManuallyDrop::new(list);
        let pieces = |each: &mut dyn FnMut(D::Target, u64)| {
            list.iter().for_each(|buffer| buffer.for_each_segment(each));
        };
        let placed = self.place(&pieces, direction, Sync::Now);
        self.finish(ManuallyDrop::into_inner(list), placed)
    }

    /// Maps memory for as long as the result lives, for the device and the CPU at once: rings,
    /// mailboxes. The device may read and write it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn alloc_coherent<B: DmaBuffer<D::Target> + SharedMemory>(
        &self,
        memory: B,
    ) -> Result<Coherent<B>, MapError<B>> {
        self.map(memory, Direction::Bidirectional).map(Coherent::new)
    }

    /// A queue in which mappings of this device, once they were pushed, are made known to it
    /// together.
    pub fn map_batch<B, T>(&self) -> MapBatch<D, A, B, T> {
        MapBatch::new(self.clone())
    }

    /// A queue in which mappings of this device are unmapped together.
    pub fn unmap_batch<B, T>(&self) -> UnmapBatch<D, A, B, T> {
        UnmapBatch::new(Arc::clone(&self.port))
    }

    /// The policy in force.
    pub fn effective_policy(&self) -> Policy {
        self.shared().policy
    }

    /// Why the policy in force is not the one asked for; `None` if it is.
    pub fn fallback(&self) -> Option<Fallback> {
        self.shared().fallback
    }

    /// The domain.
    pub fn domain(&self) -> &D {
        &self.shared().domain
    }

    /// The allocator.
    pub fn allocator(&self) -> &A {
        &self.shared().allocator
    }

    /// Flushes the domain and releases everything that this covers, now. Under a policy that is not
    /// lazy there is nothing to do.
    ///
    /// # Errors
    /// The flush failed; what was queued stays queued.
    pub fn flush(&self) -> ringfence_iommu::Result<()> {
        self.shared().flush()
    }

    /// When the flush queue's timer is due, by the environment's clock; `None` if it is not armed.
    pub fn timer_due_at_ns(&self) -> Option<u64> {
        self.shared().timer_due_ns()
    }

    /// What the timer does when it expires: one flush, and every queue reaped (rule L23).
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the timer is armed again.
    pub fn expire(&self) -> ringfence_iommu::Result<()> {
        self.shared().expire()
    }

    /// What was done so far, by all clones together.
    pub fn stats(&self) -> Stats {
        self.shared().stats()
    }

    pub(crate) fn shared(&self) -> &Shared<D, A> {
        &self.port.shared
    }

    pub(crate) fn port(&self) -> &Arc<Port<D, A>> {
        &self.port
    }

    /// Makes a mapping, or an error, of what became of a buffer.
    pub(crate) fn finish<B>(
        &self,
        buffer: B,
        placed: Result<Placed, Failed>,
    ) -> Result<Mapping<B>, MapError<B>> {
        match placed {
            Ok(placed) => {
                let owner: Arc<dyn Owner> = Arc::<Port<D, A>>::clone(&self.port);
                Ok(Mapping::new(buffer, placed, owner))
            }
            Err(failed) => Err(self.failed(buffer, failed)),
        }
    }

    pub(crate) fn failed<B>(&self, buffer: B, failed: Failed) -> MapError<B> {
        self.port.counters.map_failures.add(1);
        MapError::new(failed.error, buffer, failed.undone)
    }

    /// The same clone, not another.
    pub(crate) fn same(&self) -> Device<D, A> {
        Device { port: Arc::clone(&self.port) }
    }

    pub(crate) fn place(
        &self,
        pieces: Pieces<'_, D::Target>,
        direction: Direction,
        sync: Sync,
    ) -> Result<Placed, Failed> {
        let (shared, counters) = (self.shared(), &*self.port.counters);
        let start = shared.sampler.start(counters.maps.get());
        let placed = if shared.policy == Policy::Off {
            self.place_unmapped(pieces)
        } else {
            self.place_mapped(pieces, direction, sync)
        };
        if let Ok(placed) = &placed {
            counters.maps.add(1);
            counters.bytes.add(placed.len);
        }
        shared.sampler.stop(start, &counters.map_time);
        placed
    }

    /// Policy `off`: the device uses the buffer's own addresses.
    fn place_unmapped(&self, pieces: Pieces<'_, D::Target>) -> Result<Placed, Failed> {
        let limits = self.shared().limits;
        let mut segments = Segments::new();
        let mut len = Some(0u64);
        pieces(&mut |target, piece| {
            let target = target.as_u64();
            if piece == 0 {
                return;
            }
            len = len
                .and_then(|len| len.checked_add(piece))
                .filter(|_| target.checked_add(piece - 1).is_some());
            if len.is_some() {
                limits.add(&mut segments, target, piece);
            }
        });
        let len = len.ok_or(Error::TooLong)?;
        let first = segments.as_slice().first().ok_or(Error::Empty)?.addr;
        Ok(Placed { iova: Iova(first), len, span: None, segments })
    }

    fn place_mapped(
        &self,
        pieces: Pieces<'_, D::Target>,
        direction: Direction,
        sync: Sync,
    ) -> Result<Placed, Failed> {
        let shared = self.shared();
        let (size, len) = measure(shared.limits, pieces)?;
        let base = self.allocate(size)?;
        let Some(range) = Range::from_len(Iova(base), size) else {
            // An allocator that returns what would pass 2^64 is broken; do not believe in its range.
            return Err(Error::TooLong.into());
        };
        let mut mapper = Mapper::new(shared, &self.port.counters, range, direction, sync);
        match mapper.map(pieces) {
            Ok(()) => {
                let iova =
                    Iova(mapper.segments.as_slice().first().map_or(base, |first| first.addr));
                let span = Span { range, mapped: mapper.mapped };
                Ok(Placed { iova, len, span: Some(span), segments: mapper.segments })
            }
            Err(error) => {
                let undone = if mapper.any {
                    shared.unwind(range, &self.port.counters)
                } else {
                    shared.free_counted(range, &self.port.counters);
                    true
                };
                Err(Failed { error, undone })
            }
        }
    }

    fn allocate(&self, size: u64) -> Result<u64, Error> {
        let shared = self.shared();
        let size = shared.allocation_size(size).ok_or(Error::TooLong)?;
        let request = Request {
            size,
            align: Align::Size,
            limit: shared.limit,
            boundary: shared.limits.allocation_boundary(size),
            flush: true,
        };
        let counters = &*self.port.counters;
        let number = counters.maps.get();
        let alloc = |calls| {
            let (sampler, time) = (&shared.brief_sampler, &counters.alloc_time);
            sampler.time(number, calls, time, || shared.allocator.alloc(&request))
        };
        match alloc(1) {
            Ok(base) => Ok(base),
            // What is queued holds IOVAs that only wait for a flush: better now than not at all.
            Err(error) if !error.reason.is_invalid() && shared.has_queued() => {
                shared.flush()?;
                Ok(alloc(0)?)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl<D: Domain, A: Allocator> Owner for Port<D, A> {
    fn unmap(
        &self,
        span: Option<Span>,
        strictly: bool,
        watched: bool,
    ) -> ringfence_iommu::Result<Option<Unmapped>> {
        let (shared, counters) = (&*self.shared, &*self.counters);
        let start = shared.sampler.start(counters.unmaps.get());
        let result = match span {
            Some(span) => shared.unmap(span, strictly, watched, counters),
            None => Ok(None),
        };
        match &result {
            Ok(_) => counters.unmaps.add(1),
            Err(_) => counters.unmap_failures.add(1),
        }
        shared.sampler.stop(start, &counters.unmap_time);
        result
    }

    fn free(&self, range: Range) {
        self.shared.free_counted(range, &self.counters);
    }

    fn device_id(&self) -> DeviceId {
        DeviceId(Arc::as_ptr(&self.shared).addr())
    }

    fn now_ns(&self) -> u64 {
        self.shared.clock.now_ns()
    }

    fn note_sync_for_cpu(&self) {
        self.counters.syncs_for_cpu.add(1);
    }

    fn note_sync_for_device(&self) {
        self.counters.syncs_for_device.add(1);
    }
}

/// Slots and milliseconds of the flush queues.
fn tuning(config: &Config, policy: Policy) -> (usize, u64) {
    let (slots, ms) = if policy.is_per_cpu() {
        (flush::PER_CPU_SLOTS, flush::PER_CPU_MS)
    } else {
        (flush::SINGLE_SLOTS, flush::SINGLE_MS)
    };
    (config.flush_queue_slots.unwrap_or(slots), config.flush_queue_ms.unwrap_or(ms))
}

fn check(config: &Config, granule: u64, allocator: u64) -> Result<(), SetupError> {
    if !allocator.is_multiple_of(granule) || allocator == 0 {
        return Err(SetupError::Granule { allocator, domain: granule });
    }
    let boundary = config.segment_boundary;
    if boundary & boundary.wrapping_add(1) != 0 || boundary < granule - 1 {
        return Err(SetupError::Boundary(boundary));
    }
    if config.max_segment < granule {
        return Err(SetupError::MaxSegment(config.max_segment));
    }
    if let Some(slots) = config.flush_queue_slots.filter(|slots| *slots < 2) {
        return Err(SetupError::Slots(slots));
    }
    if config.sample_every != 0 && !config.sample_every.is_power_of_two() {
        return Err(SetupError::SampleEvery(config.sample_every));
    }
    Ok(())
}
