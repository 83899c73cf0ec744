//! virtio-iommu as a device inside a VMM, for any kind of memory.

use std::{io, os::fd::OwnedFd, sync::Arc};

use parking_lot::Mutex;
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::HandlerError;
use ringfence_vhost_user_backend::Shares;
use ringfence_virtio_iommu::device::{Completions, Counters, Device, DeviceConfig};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, RingError, device};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{
    Endpoints,
    device::in_time,
    faults::Reported,
    reach::Reach,
    unit::{Call, IommuUnit},
};

/// A virtio-iommu of this process, with a thread that serves its rings.
///
/// Its methods are those that VMMs need of their virtio devices: features offered and accepted, the
/// configuration space, [`start`](Self::start) when the driver sets DRIVER_OK,
/// [`reset`](Self::reset). `R` is how the guest's memory is reached, which may change at any time.
///
/// Devices behind it are [`Endpoints`]: those of the VMM translate through an
/// [`Endpoint`](ringfence_iotlb::Endpoint), those passed through by VFIO have a
/// [`Mirror`](ringfence_virtio_iommu::device::Mirror).
pub struct LocalIommu<R> {
    device: Arc<Device<Endpoints>>,
    reported: Arc<Reported>,
    shares: Shares<Unit<R>>,
    /// The rings that run.
    running: Mutex<Vec<u16>>,
}

/// Why a call to a device in a VMM failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalIommuError {
    /// It is active.
    #[error("it is active already: reset or stop it first")]
    Active,
    /// The driver is a legacy one.
    #[error("VIRTIO_F_VERSION_1 was not accepted: there is no legacy virtio-iommu")]
    Legacy,
    /// There is no such queue, or it is there twice.
    #[error("queue {0}: there are queues 0 (requests) and 1 (events), each once")]
    NoSuchQueue(usize),
    /// The driver's ring cannot be reached or is invalid.
    #[error("queue {index}: {error}")]
    Ring {
        /// Which.
        index: usize,
        /// Why.
        #[source]
        error: RingError,
    },
    /// I/O under way does not end, so that an invalidation is not over: what was unmapped may be
    /// reached still.
    #[error(
        "I/O under way has not ended within 10 s, so that what was unmapped may be reached still: \
         reset the device again once the I/O has ended"
    )]
    Stuck,
    /// An invalidation could not be begun: what was unmapped may be reached still.
    #[error(transparent)]
    Iommu(#[from] ringfence_iommu::Error),
    /// The descriptor for kicks cannot be used.
    #[error("the event descriptor for kicks cannot be made non-blocking: {0}")]
    Event(#[source] io::Error),
    /// The thread that serves the rings is gone.
    #[error("the thread that serves the rings is gone")]
    NoWorker,
}

/// The only unit of its worker.
const UNIT: u32 = 0;

type Unit<R> = IommuUnit<Endpoints, R>;

fn no_worker(_: HandlerError) -> LocalIommuError {
    LocalIommuError::NoWorker
}

impl<R: Reach> LocalIommu<R> {
    /// A device in front of `endpoints`, not active. `notify` is how its thread waits for kicks.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn new(
        endpoints: Arc<Endpoints>,
        options: DeviceConfig,
        notify: Notify,
    ) -> io::Result<LocalIommu<R>> {
        let reported = Reported::of(&endpoints)?;
        let device = Arc::new(Device::new(endpoints, options));
        let shares = Shares::new(Arc::new([Worker::spawn("iommu", notify)?]), UNIT);
        Ok(LocalIommu { device, reported, shares, running: Mutex::default() })
    }

    /// The device itself: to add and remove endpoints, for a system reset, and to save and restore
    /// its state (while it is not active).
    pub fn device(&self) -> &Arc<Device<Endpoints>> {
        &self.device
    }

    /// The feature bits on offer, including those of the transport that it needs.
    pub fn features(&self) -> u64 {
        self.device.features().bits() | F_VERSION_1 | F_EVENT_IDX
    }

    /// Takes the features that the driver accepted.
    ///
    /// # Errors
    /// [`LocalIommuError::Legacy`]: FEATURES_OK must not be set.
    pub fn ack_features(&self, features: u64) -> Result<(), LocalIommuError> {
        if features & F_VERSION_1 == 0 {
            return Err(LocalIommuError::Legacy);
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
    pub fn write_config(&self, offset: u64, data: &[u8]) -> Result<(), LocalIommuError> {
        let Ok(offset) = usize::try_from(offset) else { return Ok(()) };
        Ok(self.device.write_config(offset, data)?)
    }

    /// Serves the rings from now on: each with its index and the descriptor of its kicks. `interrupt`
    /// is called with the index of a ring when the driver is to look at it, from the device's thread.
    ///
    /// The device keeps its state: after [`stop`](Self::stop), or a restore, it goes on where it
    /// was.
    ///
    /// # Errors
    /// See [`LocalIommuError`]; no ring is served then.
    pub fn start(
        &self,
        reach: R,
        rings: Vec<(usize, device::RingConfig, OwnedFd)>,
        interrupt: impl Fn(u16) + Send + Sync + 'static,
    ) -> Result<(), LocalIommuError> {
        let mut running = self.running.lock();
        if !running.is_empty() {
            return Err(LocalIommuError::Active);
        }
        let mut unit = Unit::new(Arc::clone(&self.device), Arc::clone(&self.reported), reach);
        let interrupt = Arc::new(interrupt);
        for ring in 0..2 {
            let interrupt = Arc::clone(&interrupt);
            unit.set_call(ring, Some(Arc::new(move || interrupt(ring)) as Call));
        }
        let mut started: Vec<u16> = Vec::new();
        for (index, config, kick) in rings {
            let ring =
                u16::try_from(index).ok().filter(|ring| *ring < 2 && !started.contains(ring));
            let ring = ring.ok_or(LocalIommuError::NoSuchQueue(index))?;
            // A wake-up without a kick must not block the thread.
            fcntl_getfl(&kick)
                .and_then(|flags| fcntl_setfl(&kick, flags | OFlags::NONBLOCK))
                .map_err(|error| LocalIommuError::Event(error.into()))?;
            unit.start(ring, config, false, Completions::default(), Some(kick.into()), true)
                .map_err(|error| LocalIommuError::Ring { index, error })?;
            started.push(ring);
        }
        self.shares
            .on_worker(0, move |work| work.insert(UNIT, Box::new(unit)))
            .map_err(no_worker)?;
        *running = started;
        Ok(())
    }

    /// Stops serving the rings, once requests that were carried out are completed (at most 10 s
    /// later), and returns the number of each and its next available index, which is its next used
    /// index, too: for a pause, or to migrate the guest. The device keeps its state. An empty list:
    /// it was not active.
    ///
    /// # Errors
    /// [`LocalIommuError::Stuck`]: it is stopped, but replies that waited for an invalidation are
    /// lost. [`LocalIommuError::NoWorker`].
    pub fn stop(&self) -> Result<Vec<(usize, u32)>, LocalIommuError> {
        let mut running = self.running.lock();
        let (mut stuck, mut stopped) = (false, Vec::new());
        for &ring in running.iter() {
            if let Some((next, lost)) = Unit::stop_on(&self.shares, ring).map_err(no_worker)? {
                stuck |= lost;
                // All chains that were taken are given back.
                stopped.push((usize::from(ring), next));
            }
        }
        self.shares.on_worker(0, |work| drop(work.remove(UNIT))).map_err(no_worker)?;
        running.clear();
        if stuck { Err(LocalIommuError::Stuck) } else { Ok(stopped) }
    }

    /// A device reset: no ring is served, no endpoint is attached, no feature is negotiated any
    /// more. When it has succeeded no device reaches what was mapped (rule [V4]). For that it
    /// waits, as [`stop`](Self::stop) does, for 10 s at most.
    ///
    /// # Errors
    /// [`LocalIommuError::Stuck`] or [`LocalIommuError::Iommu`]: something may be reached still.
    /// [`LocalIommuError::NoWorker`].
    ///
    /// [V4]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v4
    pub fn reset(&self) -> Result<(), LocalIommuError> {
        // The driver that waits for a lost reply was reset, too.
        match self.stop() {
            Ok(_) | Err(LocalIommuError::Stuck) => {}
            Err(error) => return Err(error),
        }
        self.device.reset()?;
        if !in_time(|| self.device.backing().is_settled()) {
            return Err(LocalIommuError::Stuck);
        }
        self.reported.faults.clear();
        Ok(())
    }

    /// What its request queue has done since it was started.
    pub fn counters(&self) -> Counters {
        self.shares.on(0, |unit| unit.counters()).ok().flatten().unwrap_or_default()
    }

    /// How many accesses of each endpoint were refused.
    pub fn faults(&self) -> Vec<(u32, u64)> {
        self.reported.by_endpoint()
    }

    /// How many faults found no room, and were not reported to the driver (rule [V29]).
    ///
    /// [V29]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v29
    pub fn dropped_faults(&self) -> u64 {
        self.reported.faults.dropped()
    }
}
