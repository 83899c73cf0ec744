//! A device behind a domain.

use core::{fmt, mem::ManuallyDrop, panic::Location};
use std::sync::{Arc, atomic::AtomicU64};

use ringfence_iommu::{Domain, Fault};
use ringfence_iova::{Allocator, Aperture, ApertureError, Slabs};
use ringfence_sync::{cpu::OsCpu, lock::Mutex};

use crate::{
    BouncePools, Choices, Coherent, Direction, DmaBuffer, DmaConfig, Environment, Error, Explained,
    Fallback, MapError, Mapping, Persistent, Policy, PoolBuffer, SetupError, SharedMemory, Stats,
    Waits,
    auto::Auto,
    bounce::{Bytes, Client},
    counter::{Count, Sampler, TimeCounter},
    detect::Ledger,
    flush::Lazy,
    layout::Limits,
    map_call::{Failed, Lasting, Made, MapCall, Sync},
    mapping::Owner,
    mode::{Mode, ModeCell},
    placed::Placed,
    port::Port,
    shared::{Bouncer, Shared},
    stats::FreeCounters,
    trust::{Means, against, decide},
    tuning::Control,
    waits::OtherWaits,
};

/// One device behind one domain: maps buffers for it. Cheap to clone; give each thread its own
/// clone, which has its own counters, so that threads do not share a cache line.
pub struct Device<D: Domain + 'static, A: Allocator + 'static = Slabs<OsCpu>> {
    pub(crate) port: Arc<Port<D, A>>,
}

impl<D: Domain + 'static, A: Allocator + 'static> Clone for Device<D, A> {
    fn clone(&self) -> Self {
        Device { port: Port::new(Arc::clone(&self.port.shared)) }
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> fmt::Debug for Device<D, A> {
    ringfence_sync::shows!(Device as it, policy: it.effective_policy(), fallback: it.fallback());
}

impl<D: Domain + 'static> Device<D> {
    /// A device that maps through `domain`: under [`Policy::StrictMap`], trusted, at addresses of the
    /// domain's aperture, unless the builder is given something else.
    pub fn builder(domain: D) -> DeviceBuilder<D, Slabs<OsCpu>> {
        let geometry = domain.geometry();
        let (aperture, granule) = (geometry.aperture, geometry.page_sizes.granule().max(PAGE));
        let aperture = Aperture::new(aperture.first().0, aperture.last().0, granule);
        DeviceBuilder {
            domain,
            allocator: aperture.map(|aperture| Slabs::new(aperture, OsCpu::new())),
            config: DmaConfig::default(),
            environment: Environment::default(),
            pools: None,
        }
    }
}

/// The smallest granule of an allocator that is made from a geometry.
const PAGE: u64 = 4096;

/// Makes a [`Device`]: [`Device::builder`].
#[must_use = "build makes the device"]
pub struct DeviceBuilder<D: Domain, A> {
    domain: D,
    /// An error if none was given and none can be made.
    allocator: Result<A, ApertureError>,
    config: DmaConfig,
    environment: Environment,
    pools: Option<BouncePools<D::Target>>,
}

impl<D: Domain, A> fmt::Debug for DeviceBuilder<D, A> {
    ringfence_sync::shows!(DeviceBuilder as it, config: it.config, pools: it.pools.is_some());
}

impl<D: Domain + 'static, A: Allocator + 'static> DeviceBuilder<D, A> {
    /// The I/O virtual addresses come from `allocator`, in which the domain's reserved regions are
    /// reserved. Default: [`Slabs`] over the domain's aperture, in pages of 4 KiB or the domain's
    /// granules, whichever are larger.
    pub fn allocator<B: Allocator + 'static>(self, allocator: B) -> DeviceBuilder<D, B> {
        let DeviceBuilder { domain, config, environment, pools, .. } = self;
        DeviceBuilder { domain, allocator: Ok(allocator), config, environment, pools }
    }

    /// How it maps. Default: [`Policy::StrictMap`] for a trusted device.
    pub fn config(self, config: DmaConfig) -> Self {
        DeviceBuilder { config, ..self }
    }

    /// Clocks and CPU numbers. Default: those of the operating system.
    pub fn environment(self, environment: Environment) -> Self {
        DeviceBuilder { environment, ..self }
    }

    /// Memory for copies, of the same domain, perhaps shared with its other devices: what
    /// [`Policy::Bounce`] and [`Policy::Auto`] need, and an untrusted device whose buffers do not
    /// fill their granules. Default: none.
    pub fn pools(self, pools: &BouncePools<D::Target>) -> Self {
        DeviceBuilder { pools: Some(pools.clone()), ..self }
    }

    /// The device.
    ///
    /// # Errors
    /// The configuration does not fit this domain or allocator, a policy is demanded that the
    /// device cannot have, or the timer thread does not start: see [`SetupError`].
    pub fn build(self) -> Result<Device<D, A>, SetupError> {
        let DeviceBuilder { domain, allocator, config, environment, pools } = self;
        let geometry = domain.geometry();
        let allocator = allocator?;
        let granule = geometry.page_sizes.granule();
        check(&config, granule, allocator.granule())?;
        for region in geometry.reserved.iter() {
            let range = region.range;
            allocator.reserve(range.first().0, range.last().0)?;
        }
        let means = Means {
            trust: config.trust,
            detecting: config.detect.is_some(),
            deferred_flush: domain.capabilities().deferred_flush,
            pools: pools.is_some(),
        };
        let (policy, fallback) = decide(config.policy, config.demand, means)?;
        let control = Control::new(policy, fallback, config.flush)?;
        let Environment { clock, cpu, thread_clock } = environment;
        // Rule L27: if it is to be lazy, it becomes so in the same way as a device in use.
        let at_first = Mode { policy: policy.to_strict(), bounds_bytes: false };
        let limit = config.limit.0.min(geometry.aperture.last().0);
        let bouncer = pools.map(|pools| Bouncer {
            client: Client::new(pools, (limit, config.bounce.quota), Arc::clone(&cpu)),
            config: config.bounce,
            auto: Auto::new(),
        });
        let detector = config.detect.map(|bounds| Ledger::new(bounds, allocator.granule()));
        let shared = Arc::new(Shared {
            bouncer,
            mode: ModeCell::new(at_first),
            limits: Limits::new(&config, granule),
            limit,
            sampler: Sampler::new(thread_clock, Arc::clone(&clock), config.sample_every),
            domain,
            allocator,
            clock,
            lazy: Lazy::new(cpu.count()),
            cpu,
            timer_kind: config.timer,
            means,
            detector: detector.map(Mutex::new),
            control: Mutex::new(control),
            flush_failures: AtomicU64::default(),
            expiry_time: TimeCounter::default(),
            frees: FreeCounters::default(),
            waits: OtherWaits::default(),
            quarantined: Default::default(),
            clones: Mutex::default(),
        });
        shared.begin(policy)?;
        Ok(Device { port: Port::new(shared) })
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// Maps a buffer, or a list of them. The pieces are laid out in one contiguous IOVA range; pieces
    /// that are adjacent in memory are mapped at once.
    ///
    /// # Errors
    /// See [`Error`] for the causes. Nothing is mapped, and the buffer is in the error, unless
    /// undoing failed too: see [`MapError`].
    #[track_caller]
    pub fn map<B: DmaBuffer<D::Target>>(
        &self,
        buffer: B,
        direction: Direction,
    ) -> Result<Mapping<B>, MapError<B>> {
        let made = Made { direction, at: Location::caller(), bytes: Bytes::of::<D::Target>() };
        self.map_one(buffer, made, Lasting::Streaming)
    }

    fn map_one<B: DmaBuffer<D::Target>>(
        &self,
        buffer: B,
        made: Made<B>,
        lasting: Lasting,
    ) -> Result<Mapping<B>, MapError<B>> {
        // If something below panics, the buffer is leaked rather than freed while mapped.
        let buffer = ManuallyDrop::new(buffer);
        let placed = self.place(&MapCall {
            buffer: &*buffer,
            direction: made.direction,
            at: made.at,
            lasting,
            sync: Sync::Now,
        });
        self.finish(ManuallyDrop::into_inner(buffer), made, placed)
    }

    /// Maps memory for as long as the result lives, shared by the device and the CPU, such as rings
    /// and mailboxes. The device may read and write it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    #[track_caller]
    pub fn alloc_coherent<B: DmaBuffer<D::Target> + SharedMemory>(
        &self,
        memory: B,
    ) -> Result<Coherent<B>, MapError<B>> {
        let (direction, at) = (Direction::Bidirectional, Location::caller());
        let made = Made { direction, at, bytes: Bytes::of::<D::Target>() };
        self.map_one(memory, made, Lasting::Long).map(Coherent)
    }

    /// Maps a buffer once for many I/Os: the result returns the segments of any part of it, and no
    /// I/O needs a request to the IOMMU.
    ///
    /// The price: until it is unmapped, the device can reach all of the buffer at any time, under a
    /// strict policy too. [`Stats::persistent_bytes`] counts these bytes.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    #[track_caller]
    pub fn map_persistent<B: DmaBuffer<D::Target>>(
        &self,
        buffer: B,
        direction: Direction,
    ) -> Result<Persistent<B>, MapError<B>> {
        let made = Made { direction, at: Location::caller(), bytes: Bytes::of::<D::Target>() };
        let mapping = self.map_one(buffer, made, Lasting::Long)?;
        self.port.counters.persistent.add(1);
        self.port.counters.persistent_bytes.add(mapping.len());
        Ok(Persistent::new(mapping))
    }

    /// A buffer of `len` bytes in pool memory, mapped already, to be written or read in place: no
    /// copy, and no request to the IOMMU. It is exposed while it lives, and counted as such.
    ///
    /// # Errors
    /// The device has no pools, or is under policy `off` ([`Error::NoPools`]); `len` is 0
    /// ([`Error::Empty`]); or there is no slot.
    #[track_caller]
    pub fn take_buffer(&self, len: u64, direction: Direction) -> Result<PoolBuffer, Error> {
        let shared = self.shared();
        let bouncer = shared.bouncer.as_ref().ok_or(Error::NoPools)?;
        if len == 0 {
            return Err(Error::Empty);
        }
        // The device's addresses are not translated then: a slot's address would lead elsewhere.
        if shared.mode.get().policy == Policy::Off {
            return Err(Error::NoPools);
        }
        let slot = bouncer.client.take_for_cpu(len, direction, Location::caller())?;
        let mut placed = Placed::new();
        (placed.iova, placed.len) = (slot.range.first(), len);
        shared.limits.add(&mut placed.segments, slot.range.first().0, len);
        placed.slot = Some(slot);
        self.port.counters.taken.add(1);
        self.port.counters.taken_bytes.add(len);
        let owner: Arc<dyn Owner> = Arc::<Port<D, A>>::clone(&self.port);
        Ok(PoolBuffer { placed, owner })
    }

    /// The pools that the device bounces in, if it has any.
    pub fn pools(&self) -> Option<&BouncePools<D::Target>> {
        self.shared().bouncer.as_ref().map(|bouncer| &bouncer.client.pools)
    }

    /// What [`Policy::Auto`] chose for each kind of mapping so far, and why. `None` under any other
    /// policy.
    pub fn choices(&self) -> Option<Choices> {
        self.shared().choices()
    }

    /// The policy in force.
    pub fn effective_policy(&self) -> Policy {
        self.shared().mode.get().policy
    }

    /// Why the policy in force is not the requested one; `None` if it is.
    pub fn fallback(&self) -> Option<Fallback> {
        self.shared().control.lock().fallback
    }

    /// Why the device cannot have `policy`, neither from the start nor by a change at run time.
    /// `None` if it can; but no device in use changes from or to `off`
    /// ([`SwitchError::Off`](crate::SwitchError::Off)).
    pub fn refuses(&self, policy: Policy) -> Option<Fallback> {
        against(policy, self.shared().means)
    }

    /// Explains the access behind a fault of the domain. `None` if no record relates to it, or if
    /// the device has no [`DmaConfig::detect`](crate::DmaConfig::detect).
    pub fn explain(&self, fault: &Fault) -> Option<Explained> {
        let shared = self.shared();
        let (detector, now_ns) = (shared.detector.as_ref()?, shared.clock.now_ns());
        detector.lock().explain(fault, now_ns)
    }

    /// The domain.
    pub fn domain(&self) -> &D {
        &self.shared().domain
    }

    /// The allocator.
    pub fn allocator(&self) -> &A {
        &self.shared().allocator
    }

    /// How often and how long threads waited for the device, in the calls of all clones and outside
    /// them.
    pub fn waits(&self) -> Waits {
        self.shared().waits()
    }

    /// Statistics so far, over all clones.
    pub fn stats(&self) -> Stats {
        self.shared().stats()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<D, A>> {
        &self.port.shared
    }

    /// Makes a mapping, or an error, from the result for a buffer.
    pub(crate) fn finish<B>(
        &self,
        buffer: B,
        made: Made<B>,
        placed: Result<Placed, Failed>,
    ) -> Result<Mapping<B>, MapError<B>> {
        match placed {
            Ok(placed) => {
                if let (Some(detector), Some(span)) = (&self.shared().detector, placed.span) {
                    let now_ns = self.shared().clock.now_ns();
                    detector.lock().mapped(span.range, made.direction, made.at, now_ns);
                }
                let owner: Arc<dyn Owner> = Arc::<Port<D, A>>::clone(&self.port);
                Ok(Mapping::new(buffer, placed, owner, made.bytes))
            }
            Err(failed) => Err(self.failed(buffer, failed)),
        }
    }

    pub(crate) fn failed<B>(&self, buffer: B, failed: Failed) -> MapError<B> {
        self.port.counters.map_failures.add(1);
        let buffer = if failed.undone { Ok(buffer) } else { Err(ManuallyDrop::new(buffer)) };
        MapError { error: failed.error, buffer }
    }
}

fn check(config: &DmaConfig, granule: u64, allocator: u64) -> Result<(), SetupError> {
    if !allocator.is_multiple_of(granule) || allocator == 0 {
        return Err(SetupError::Granule { allocator, domain: granule });
    }
    let boundary = config.segment_boundary;
    if boundary & boundary.wrapping_add(1) != 0 || boundary < granule - 1 {
        return Err(SetupError::Boundary { boundary, granule });
    }
    let max_segment = config.max_segment;
    if max_segment < granule {
        return Err(SetupError::MaxSegment { max_segment, granule });
    }
    if config.sample_every != 0 && !config.sample_every.is_power_of_two() {
        return Err(SetupError::SampleEvery(config.sample_every));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringfence_iommu::{
        Geometry, HostAddr, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown, table::Limits,
    };

    use super::*;

    fn domain(first: u64, last: u64, granule: u64) -> Arc<SoftDomain<HostAddr>> {
        let aperture = Range::new(Iova(first), Iova(last)).unwrap();
        let geometry = Geometry::new(PageSizes::from_granule(granule).unwrap(), aperture);
        SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1))
    }

    #[test]
    fn without_an_allocator_addresses_are_those_of_the_geometry() {
        for (first, last, granule) in [
            (0x10_0000, 0x1f_ffff, 4096),
            (0, u64::MAX, 1),
            (u64::MAX - 0xf_ffff, u64::MAX, 0x1_0000),
        ] {
            let device = Device::builder(domain(first, last, granule)).build().unwrap();
            assert_eq!(device.effective_policy(), Policy::StrictMap);
            let mapping = device.map(vec![0u8; 4096], Direction::FromDevice).unwrap();
            let range = mapping.iova();
            assert!(range.0 >= first && range.0 + 4095 <= last, "{range:?} of {first:#x}");
            mapping.unmap().unwrap();
        }
    }

    #[test]
    fn an_aperture_without_a_whole_page_is_refused() {
        let error = Device::builder(domain(0x1001, 0x1fff, 1)).build().unwrap_err();
        assert!(matches!(error, SetupError::Aperture(ApertureError::Empty { .. })), "{error}");
    }
}
