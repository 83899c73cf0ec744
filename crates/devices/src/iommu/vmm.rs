//! virtio-iommu as a device inside a VMM that is built on rust-vmm.

use std::{
    io,
    marker::PhantomData,
    ops::Deref,
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    sync::Arc,
};

use parking_lot::Mutex;
use ringfence_iommu::{FaultSink, GuestPhys, HostAddr};
use ringfence_mem::GuestBus;
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_virtio_iommu::{
    device::{Answers, Counters, Device, FaultQueue, HostRegion, Options},
    wire::DEVICE_ID,
};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, RingError, device};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryError};
use vmm_sys_util::eventfd::EventFd;

use super::{
    Endpoints,
    device::{WAITING_FAULTS, in_time},
    faults::Reported,
    reach::Reach,
    unit::{self, Call, IommuUnit},
};

/// A virtio-iommu, with a thread that serves its rings.
///
/// Its methods are those of the trait that VMMs have for their virtio devices, whose implementation
/// hands them on: the type, the sizes of its queues, features offered and accepted, the configuration
/// space, [`activate`](Self::activate) when the driver says DRIVER_OK, [`reset`](Self::reset). `A` is
/// the VMM's memory, such as `GuestMemoryAtomic<GuestMemoryMmap>`; its map may change at any time.
///
/// Devices behind it are [`Endpoints`]: those of the VMM translate through an
/// [`Endpoint`](ringfence_iotlb::Endpoint) (as rust-vmm's memory, with
/// [`IotlbAddressSpace`](ringfence_iotlb::guest_memory::IotlbAddressSpace)), those handed through by
/// VFIO have a [`Mirror`](ringfence_virtio_iommu::device::Mirror) of [`host_regions`].
pub struct VmmIommu<A> {
    device: Arc<Device<Arc<Endpoints>>>,
    faults: Arc<FaultQueue>,
    wake: Arc<OwnedFd>,
    reported: Arc<Reported>,
    worker: Worker,
    /// The queues that run, by index.
    running: Mutex<Vec<(usize, Queue)>>,
    memory: PhantomData<fn() -> A>,
}

/// Why a device in a VMM does not do what it is told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmIommuError {
    /// It is active.
    #[error("it is active already: reset or stop it first")]
    Active,
    /// The driver is a legacy one.
    #[error("VIRTIO_F_VERSION_1 was not accepted: there is no legacy virtio-iommu")]
    Legacy,
    /// There is no such queue, or it is there twice.
    #[error("queue {0}: there are queues 0 (requests) and 1 (events), each once")]
    NoSuchQueue(usize),
    /// The driver has not set the queue up.
    #[error("queue {0} is not ready")]
    NotReady(usize),
    /// A region of the guest's memory has no address in this process.
    #[error("the guest's memory: {0}")]
    Memory(#[from] GuestMemoryError),
    /// The driver's ring cannot be reached or makes no sense.
    #[error("queue {index}: {error}")]
    Ring {
        /// Which.
        index: usize,
        /// Why.
        error: RingError,
    },
    /// I/O under way does not end, so that an invalidation is not over: what was unmapped may be
    /// reached still.
    #[error("I/O under way does not end")]
    Stuck,
    /// An invalidation could not be begun: what was unmapped may be reached still.
    #[error("{0}")]
    Iommu(#[from] ringfence_iommu::Error),
    /// The descriptor for kicks cannot be used.
    #[error("the event descriptor: {0}")]
    Event(#[from] io::Error),
    /// The thread that serves the rings is gone.
    #[error("the thread that serves the rings is gone")]
    NoWorker,
}

impl From<unit::NoWorker> for VmmIommuError {
    fn from(_: unit::NoWorker) -> VmmIommuError {
        VmmIommuError::NoWorker
    }
}

/// The only unit of its worker.
const UNIT: u32 = 0;
/// Descriptors of a queue at most.
const MAX_SIZE: u16 = 1024;

type Unit<A> = IommuUnit<Arc<Endpoints>, Own<A>>;

impl<A> VmmIommu<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static> + Send + 'static,
{
    /// The number of the device type, for the transport.
    pub const DEVICE_TYPE: u32 = DEVICE_ID;
    /// The most descriptors of each queue: requests and events.
    pub const QUEUE_MAX_SIZES: [u16; 2] = [MAX_SIZE; 2];

    /// A device in front of `endpoints`, not active. `notify` is how its thread waits for kicks.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn new(
        endpoints: Arc<Endpoints>,
        options: Options,
        notify: Notify,
    ) -> io::Result<VmmIommu<A>> {
        let faults = FaultQueue::new(WAITING_FAULTS);
        let wake = Arc::new(event::new()?);
        let device = Arc::new(Device::new(Arc::clone(&endpoints), options));
        let known = ringfence_virtio_iommu::device::Backing::endpoints(&*endpoints);
        let reported = Arc::new(Reported::new(Arc::clone(&faults), Arc::clone(&wake), known));
        endpoints.report_to(&(Arc::clone(&reported) as Arc<dyn FaultSink>));
        let (worker, running) = (Worker::spawn("iommu", notify)?, Mutex::default());
        Ok(VmmIommu { device, faults, wake, reported, worker, running, memory: PhantomData })
    }

    /// The device itself: to tell it of endpoints that come and go, for a system reset, and to save and
    /// restore what it holds (while it is not active).
    pub fn device(&self) -> &Arc<Device<Arc<Endpoints>>> {
        &self.device
    }

    /// The feature bits on offer, those of the transport included that it needs.
    pub fn features(&self) -> u64 {
        self.device.features().bits() | 1 << F_VERSION_1 | 1 << F_EVENT_IDX
    }

    /// Takes the features that the driver accepted.
    ///
    /// # Errors
    /// [`VmmIommuError::Legacy`]: FEATURES_OK must not be set.
    pub fn ack_features(&self, features: u64) -> Result<(), VmmIommuError> {
        if features & (1 << F_VERSION_1) == 0 {
            return Err(VmmIommuError::Legacy);
        }
        self.device.set_features(features);
        Ok(())
    }

    /// Reads configuration bytes from `offset`; zeroes beyond the end.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.device.read_config(usize::try_from(offset).unwrap_or(usize::MAX), data);
    }

    /// A driver's write to the configuration.
    ///
    /// # Errors
    /// See [`Device::write_config`].
    pub fn write_config(&self, offset: u64, data: &[u8]) -> Result<(), VmmIommuError> {
        let Ok(offset) = usize::try_from(offset) else { return Ok(()) };
        Ok(self.device.write_config(offset, data)?)
    }

    /// Serves the queues from now on: each with its index and the descriptor of its kicks. `interrupt`
    /// is called with the index of a queue when the driver is to look at it, from the device's thread.
    ///
    /// What the device holds stays: after [`stop`](Self::stop), or a restore, it goes on where it was.
    ///
    /// # Errors
    /// It does not run, and the queues are gone; see [`VmmIommuError`].
    pub fn activate(
        &self,
        memory: A,
        queues: Vec<(usize, Queue, EventFd)>,
        interrupt: impl Fn(u16) + Send + Sync + 'static,
    ) -> Result<(), VmmIommuError> {
        let mut running = self.running.lock();
        if !running.is_empty() {
            return Err(VmmIommuError::Active);
        }
        let (device, faults) = (Arc::clone(&self.device), Arc::clone(&self.faults));
        let mut unit = Unit::new(device, faults, Arc::clone(&self.wake), Own::new(memory)?);
        let interrupt = Arc::new(interrupt);
        for ring in 0..2 {
            let interrupt = Arc::clone(&interrupt);
            unit.set_call(ring, Some(Arc::new(move || interrupt(ring)) as Call));
        }
        let mut started: Vec<(usize, Queue)> = Vec::new();
        for (index, queue, kick) in queues {
            let ring = u16::try_from(index).ok().filter(|&ring| ring < 2);
            let ring = ring.filter(|_| started.iter().all(|&(other, _)| other != index));
            let ring = ring.ok_or(VmmIommuError::NoSuchQueue(index))?;
            if !queue.ready() {
                return Err(VmmIommuError::NotReady(index));
            }
            let config = device::Config {
                size: queue.size(),
                desc: queue.desc_table(),
                avail: queue.avail_ring(),
                used: queue.used_ring(),
                event_idx: queue.event_idx_enabled(),
                indirect: false,
                packed: false,
                base: queue.next_avail().into(),
            };
            // SAFETY: the descriptor was the `EventFd`'s own, which is no more.
            let kick = unsafe { OwnedFd::from_raw_fd(kick.into_raw_fd()) };
            // A wake-up without a kick must not block the thread.
            let flags = fcntl_getfl(&kick).and_then(|flags| {
                let flags = flags | OFlags::NONBLOCK;
                fcntl_setfl(&kick, flags)
            });
            flags.map_err(io::Error::from)?;
            unit.start(ring, config, false, Answers::default(), Some(kick.into()), true)
                .map_err(|error| VmmIommuError::Ring { index, error })?;
            started.push((index, queue));
        }
        self.worker
            .call(move |work| work.insert(UNIT, Box::new(unit)))
            .ok_or(VmmIommuError::NoWorker)?;
        *running = started;
        Ok(())
    }

    /// Stops to serve the queues, once what was carried out is answered, and gives them back with
    /// their indices: for a pause, or to move the guest. What the device holds stays. Without queues
    /// it was not active.
    ///
    /// # Errors
    /// [`VmmIommuError::Stuck`]: it is stopped, but answers that waited for an invalidation are lost.
    pub fn stop(&self) -> Result<Vec<(usize, Queue)>, VmmIommuError> {
        let mut running = self.running.lock();
        let mut stuck = false;
        for (index, queue) in running.iter_mut() {
            if let Some((next, lost)) = Unit::<A>::stop_on(&self.worker, UNIT, *index as u16)? {
                stuck |= lost;
                queue.set_next_avail(next as u16);
                // Whatever was taken is given back.
                queue.set_next_used(next as u16);
            }
        }
        self.worker.call(|work| drop(work.remove(UNIT))).ok_or(VmmIommuError::NoWorker)?;
        let queues = std::mem::take(&mut *running);
        if stuck { Err(VmmIommuError::Stuck) } else { Ok(queues) }
    }

    /// A device reset: nothing is served, no endpoint is attached, nothing is accepted any more. When
    /// it returns nobody reaches what was mapped (rule V4).
    ///
    /// # Errors
    /// [`VmmIommuError::Stuck`] or [`VmmIommuError::Iommu`]: something may be reached still.
    pub fn reset(&self) -> Result<(), VmmIommuError> {
        // Who waits for an answer that is lost was reset, too.
        match self.stop() {
            Ok(_) | Err(VmmIommuError::Stuck) => {}
            Err(error) => return Err(error),
        }
        self.device.reset()?;
        if !in_time(|| self.device.backing().is_settled()) {
            return Err(VmmIommuError::Stuck);
        }
        self.faults.clear();
        Ok(())
    }

    /// What its request queue has done since it was activated.
    pub fn counters(&self) -> Counters {
        let unit = self.worker.call(|work| work.unit::<Unit<A>>(UNIT).map(|unit| unit.counters()));
        unit.flatten().unwrap_or_default()
    }

    /// How many accesses of each endpoint were refused.
    pub fn faults(&self) -> Vec<(u32, u64)> {
        self.reported.by_endpoint()
    }

    /// How many faults found no room, so that the driver was not told (rule V29).
    pub fn dropped_faults(&self) -> u64 {
        self.faults.dropped()
    }
}

/// Where the guest's memory lies in this process: for the
/// [`Mirror`](ringfence_virtio_iommu::device::Mirror) of a device that is handed through.
///
/// # Errors
/// A region has no address in this process.
pub fn host_regions<T>(memory: T) -> Result<Vec<HostRegion>, GuestMemoryError>
where
    T: Deref<Target: GuestMemoryBackend> + Send + Sync + 'static,
{
    let bus = GuestBus::new(memory)?;
    let regions = bus.regions().map(|(first, last, host)| HostRegion {
        guest: (GuestPhys(first), GuestPhys(last)),
        host: HostAddr(host.as_ptr() as u64),
    });
    Ok(regions.collect())
}

/// The memory of this process's own guest, whose map may change.
struct Own<A: GuestAddressSpace> {
    space: A,
    bus: GuestBus<A::T>,
}

impl<A> Own<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static>,
{
    fn new(space: A) -> Result<Own<A>, GuestMemoryError> {
        let bus = GuestBus::new(space.memory())?;
        Ok(Own { space, bus })
    }
}

impl<A> Reach for Own<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static> + Send + 'static,
{
    type Rings = GuestBus<A::T>;
    type Buffers = GuestBus<A::T>;

    const CHANGES: bool = true;

    fn rings(&self) -> &GuestBus<A::T> {
        &self.bus
    }

    #[inline]
    fn buffers(&self) -> &GuestBus<A::T> {
        &self.bus
    }

    #[inline]
    fn refresh(&mut self) -> bool {
        let now = self.space.memory();
        // The old one is held: no other can have its address.
        if std::ptr::eq::<A::M>(&*now, &**self.bus.memory()) {
            return false;
        }
        match GuestBus::new(now) {
            Ok(bus) => self.bus = bus,
            Err(error) => {
                tracing::error!(source = %"iommu", "the guest's new memory cannot be used: {error}");
                return false;
            }
        }
        true
    }

    fn mark_ring(&self, addr: u64, len: usize) {
        self.bus.mark_range(addr, len as u64);
    }
}
