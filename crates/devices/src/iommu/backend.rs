//! virtio-iommu as a vhost-user back end.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_iommu::{Fault, FaultSink};
use ringfence_mem::Memory;
use ringfence_vhost_user::{ConfigWrite, Handler, HandlerError, RingSetup};
use ringfence_virtio_iommu::device::{Counters, Device, FaultQueue, Options};
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1, device};

use super::{Endpoints, IommuUnit};
use crate::{event, worker::Worker};

/// How many faults wait for the driver before more are dropped and counted.
const WAITING_FAULTS: usize = 256;
/// How long invalidations may hold up the end of a ring, or a reset. They wait for I/O under way,
/// and some disks never answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Keeps faults for the event queue, and wakes the worker that serves it.
struct Reported {
    faults: Arc<FaultQueue>,
    wake: Arc<OwnedFd>,
}

impl FaultSink for Reported {
    fn report(&self, fault: Fault) {
        self.faults.report(fault);
        event::signal(&self.wake);
    }
}

/// A virtio-iommu as it is set up.
pub struct IommuOptions {
    /// What the device offers.
    pub device: Options,
    /// The number of its unit among the worker's.
    pub unit: u32,
}

/// A virtio-iommu as a vhost-user back end. Its rings are served by the first worker.
pub struct IommuBackend {
    device: Arc<Device<Arc<Endpoints>>>,
    faults: Arc<FaultQueue>,
    reported: Arc<OwnedFd>,
    workers: Arc<[Worker]>,
    unit: u32,
    features: u64,
}

impl IommuBackend {
    /// An IOMMU for `endpoints`.
    ///
    /// # Panics
    /// If no descriptor is left.
    pub fn new(
        endpoints: Arc<Endpoints>,
        options: IommuOptions,
        workers: Arc<[Worker]>,
    ) -> IommuBackend {
        let faults = FaultQueue::new(WAITING_FAULTS);
        let reported = Arc::new(event::new().expect("a descriptor for fault reports"));
        let (queue, wake) = (Arc::clone(&faults), Arc::clone(&reported));
        let sink: Arc<dyn FaultSink> = Arc::new(Reported { faults: queue, wake });
        endpoints.report_to(&sink);
        let IommuOptions { device, unit } = options;
        let device = Arc::new(Device::new(endpoints, device));
        IommuBackend { device, faults, reported, workers, unit, features: 0 }
    }

    /// What its request queue has done.
    pub fn counters(&self) -> Counters {
        let counted = self.on_unit(|unit| unit.counters());
        counted.ok().flatten().unwrap_or_default()
    }

    /// How many faults found no room.
    pub fn dropped_faults(&self) -> u64 {
        self.faults.dropped()
    }

    fn on_unit<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut IommuUnit) -> R + Send + 'static,
    ) -> Result<Option<R>, HandlerError> {
        let unit = self.unit;
        self.workers[0]
            .call(move |work| work.unit::<IommuUnit>(unit).map(job))
            .ok_or_else(|| HandlerError::new("the worker is gone"))
    }

    fn must<T>(made: Option<T>) -> Result<T, HandlerError> {
        made.ok_or_else(|| HandlerError::new("there is no memory yet"))
    }
}

impl Handler for IommuBackend {
    fn features(&self) -> u64 {
        self.device.features().bits() | 1 << F_VERSION_1 | 1 << F_EVENT_IDX
    }

    fn queues(&self) -> u16 {
        2
    }

    fn max_ring_size(&self) -> u16 {
        1024
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & (1 << F_VERSION_1) == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        self.device.set_features(features);
        self.features = features;
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        let (device, faults) = (Arc::clone(&self.device), Arc::clone(&self.faults));
        let (number, reported) = (self.unit, Arc::clone(&self.reported));
        self.workers[0]
            .call(move |work| match work.unit::<IommuUnit>(number) {
                Some(unit) => unit.set_memory(&memory),
                None => {
                    let unit = IommuUnit::new(device, faults, reported, memory);
                    work.insert(number, Box::new(unit));
                }
            })
            .ok_or_else(|| HandlerError::new("the worker is gone"))
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        let config = device::Config {
            size: setup.size,
            desc: setup.addresses.desc,
            avail: setup.addresses.avail,
            used: setup.addresses.used,
            event_idx: self.features & (1 << F_EVENT_IDX) != 0,
            indirect: false,
            packed: false,
            base: setup.base,
        };
        let RingSetup { kick, enabled, .. } = setup;
        let started = self.on_unit(move |unit| unit.start(ring, config, kick, enabled))?;
        Self::must(started)?.map_err(|error| HandlerError::new(error.to_string()))
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let late = Instant::now() >= deadline;
            // Every reply is given that can be: the driver waits for it.
            let stopped = self
                .on_unit(move |unit| (late || !unit.is_pending(ring)).then(|| unit.stop(ring)))?;
            match stopped {
                Some(Some(Some(next))) => return Ok(next),
                Some(None) => std::thread::yield_now(),
                _ => return Err(HandlerError::new("the ring is not running")),
            }
        }
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.on_unit(move |unit| unit.enable(ring, enabled)).map(|_| ())
    }

    fn set_call(&mut self, ring: u16, call: Option<OwnedFd>) -> Result<(), HandlerError> {
        let call = call.map(Arc::new);
        let set = self.on_unit(move |unit| unit.set_call(ring, call))?;
        Self::must(set)
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        self.device.read_config(offset as usize, out);
        Ok(())
    }

    fn set_config(&mut self, offset: u32, _: ConfigWrite, data: &[u8]) -> Result<(), HandlerError> {
        self.device
            .write_config(offset as usize, data)
            .map_err(|error| HandlerError::new(error.to_string()))
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.features = 0;
        self.device.reset().map_err(|error| HandlerError::new(error.to_string()))?;
        // When the front end hears of it, nothing is reachable any more (rule V4).
        let deadline = Instant::now() + PATIENCE;
        while !self.device.backing().is_settled() {
            if Instant::now() >= deadline {
                return Err(HandlerError::new("I/O under way does not end"));
            }
            std::thread::yield_now();
        }
        // Of what was before there is nobody to tell.
        self.faults.clear();
        Ok(())
    }
}
