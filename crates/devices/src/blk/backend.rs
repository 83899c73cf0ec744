//! A block device as a vhost-user back end.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
};

use ringfence_iotlb::{Endpoint, View};
use ringfence_mem::{Memory, Physical};
use ringfence_vhost_user::{Handler, HandlerError, RingSetup};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, device};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    BlkUnit, QueueStats, Start,
    wire::{Config, SECTOR, feature},
};
use crate::{
    bus::Bus,
    disk::Disk,
    worker::{Work, Worker},
};

/// The most buffers of data in a request: what fits a queue's chain beside header and status.
const SEG_MAX: u32 = 254;

/// A block device as it is set up.
#[derive(Clone)]
pub struct BlkOptions {
    /// What it serves.
    pub disk: Disk,
    /// The name that it gives.
    pub id: Arc<str>,
    /// How many queues it offers.
    pub queues: u16,
    /// Which endpoint it is; with one it offers `VIRTIO_F_ACCESS_PLATFORM`.
    pub endpoint: Option<Arc<Endpoint>>,
    /// The number of its units among a worker's.
    pub unit: u32,
}

/// A block device as a vhost-user back end.
pub struct BlkBackend {
    options: BlkOptions,
    workers: Arc<[Worker]>,
    memory: Option<Arc<Memory>>,
    features: u64,
    calls: HashMap<u16, Arc<OwnedFd>>,
    errs: HashMap<u16, Arc<OwnedFd>>,
}

impl BlkBackend {
    /// A device whose queues are served by `workers`, in turn.
    pub fn new(options: BlkOptions, workers: Arc<[Worker]>) -> BlkBackend {
        let (calls, errs) = (HashMap::new(), HashMap::new());
        BlkBackend { options, workers, memory: None, features: 0, calls, errs }
    }

    /// What all queues have done.
    pub fn stats(&self) -> QueueStats {
        let mut sum = QueueStats::default();
        let unit = self.options.unit;
        for worker in &*self.workers {
            let stats = worker.call(move |work| work.unit::<BlkUnit>(unit).map(|u| u.stats()));
            if let Some(stats) = stats.flatten() {
                sum += stats;
            }
        }
        sum
    }

    /// What the IOTLBs of all workers have counted: hits, misses and faults. `None` without an
    /// IOMMU.
    pub fn iotlb(&self) -> Option<(u64, u64, u64)> {
        let unit = self.options.unit;
        let mut sum = None;
        for worker in &*self.workers {
            let found = worker.call(move |work| work.unit::<BlkUnit>(unit).and_then(|u| u.iotlb()));
            if let Some(counters) = found.flatten() {
                let (hits, misses, faults) = sum.get_or_insert((0, 0, 0));
                *hits += counters.hits.load(Ordering::Relaxed);
                *misses += counters.misses.load(Ordering::Relaxed);
                *faults += counters.faults.load(Ordering::Relaxed);
            }
        }
        sum
    }

    fn worker(&self, ring: u16) -> &Worker {
        &self.workers[usize::from(ring) % self.workers.len()]
    }

    /// Runs `job` on the unit of the worker that serves `ring`, if there is one.
    fn on_unit<R: Send + 'static>(
        &self,
        ring: u16,
        job: impl FnOnce(&mut BlkUnit) -> R + Send + 'static,
    ) -> Result<Option<R>, HandlerError> {
        let unit = self.options.unit;
        self.worker(ring)
            .call(move |work| work.unit::<BlkUnit>(unit).map(job))
            .ok_or_else(|| HandlerError::new("the worker is gone"))
    }

    /// Takes the device's units from their workers. The next driver may negotiate otherwise: the
    /// way to memory is made anew then.
    fn forget_units(&self) {
        let unit = self.options.unit;
        for worker in &*self.workers {
            let _ = worker.call(move |work| drop(work.remove(unit)));
        }
    }

    fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// The unit of the device on this worker, made if it is not there yet.
fn unit_of<'w>(
    work: &'w mut Work,
    options: &BlkOptions,
    translated: bool,
    memory: &Arc<Memory>,
) -> Result<&'w mut BlkUnit, String> {
    if work.unit::<BlkUnit>(options.unit).is_none() {
        let bus = match &options.endpoint {
            Some(endpoint) if translated => {
                let view = View::new(Arc::clone(endpoint), Arc::clone(memory));
                Bus::Iommu(Box::new(view.ok_or("too many workers for one IOMMU")?))
            }
            _ => Bus::Physical(Physical::new(Arc::clone(memory))),
        };
        let unit = BlkUnit::new(&options.id, bus).map_err(|error| error.to_string())?;
        work.insert(options.unit, Box::new(unit));
    }
    Ok(work.unit(options.unit).expect("inserted above"))
}

impl Handler for BlkBackend {
    fn features(&self) -> u64 {
        let mut features = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::MQ
            | 1 << F_INDIRECT_DESC
            | 1 << F_EVENT_IDX
            | 1 << F_VERSION_1;
        if self.options.endpoint.is_some() {
            features |= 1 << F_ACCESS_PLATFORM;
        }
        features
    }

    fn queues(&self) -> u16 {
        self.options.queues
    }

    fn max_ring_size(&self) -> u16 {
        1024
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & (1 << F_VERSION_1) == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        // Rings are stopped. What addresses mean may not change under a unit that is left.
        if (self.features ^ features) & (1 << F_ACCESS_PLATFORM) != 0 {
            self.forget_units();
        }
        self.features = features;
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        if !memory.is_sealed() {
            tracing::warn!("{}: the memory's file can be truncated under us", self.options.id);
        }
        for ring in 0..self.workers.len() as u16 {
            let new = Arc::clone(&memory);
            self.on_unit(ring, move |unit| unit.set_memory(&new))?;
        }
        self.memory = Some(memory);
        Ok(())
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        let memory = self.memory.clone().ok_or_else(|| HandlerError::new("there is no memory"))?;
        let start = Start {
            config: device::Config {
                size: setup.size,
                desc: setup.addresses.desc,
                avail: setup.addresses.avail,
                used: setup.addresses.used,
                event_idx: self.has(F_EVENT_IDX),
                indirect: self.has(F_INDIRECT_DESC),
                packed: false,
                base: setup.base,
            },
            disk: self.options.disk.clone(),
            id: Arc::clone(&self.options.id),
            kick: setup.kick,
            call: self.calls.get(&ring).cloned(),
            err: self.errs.get(&ring).cloned(),
            enabled: setup.enabled,
        };
        let options = self.options.clone();
        let translated = self.has(F_ACCESS_PLATFORM);
        self.worker(ring)
            .call(move |work| {
                let unit = unit_of(work, &options, translated, &memory)?;
                unit.start(ring, start, &memory).map_err(|error| error.to_string())
            })
            .unwrap_or_else(|| Err("the worker is gone".into()))
            .map_err(|error| HandlerError::new(&error))
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        let next = self.on_unit(ring, move |unit| unit.stop(ring))?;
        next.flatten().ok_or_else(|| HandlerError::new("the ring is not running"))
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.on_unit(ring, move |unit| unit.enable(ring, enabled)).map(|_| ())
    }

    fn set_call(&mut self, ring: u16, call: Option<OwnedFd>) -> Result<(), HandlerError> {
        let call = call.map(Arc::new);
        match &call {
            Some(call) => self.calls.insert(ring, Arc::clone(call)),
            None => self.calls.remove(&ring),
        };
        self.on_unit(ring, move |unit| unit.set_call(ring, call)).map(|_| ())
    }

    fn set_err(&mut self, ring: u16, err: Option<OwnedFd>) -> Result<(), HandlerError> {
        let err = err.map(Arc::new);
        match &err {
            Some(err) => self.errs.insert(ring, Arc::clone(err)),
            None => self.errs.remove(&ring),
        };
        self.on_unit(ring, move |unit| unit.set_err(ring, err)).map(|_| ())
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let mut config = Config::new_zeroed();
        config.capacity.set(self.options.disk.len() / SECTOR);
        config.seg_max.set(SEG_MAX);
        config.blk_size.set(SECTOR as u32);
        config.num_queues.set(self.options.queues);
        // Front ends ask for the whole of a later, longer layout: what we do not have reads as 0.
        let mut space = [0; 256];
        space[..size_of::<Config>()].copy_from_slice(config.as_bytes());
        let from = offset as usize;
        let part = from.checked_add(out.len()).and_then(|end| space.get(from..end));
        out.copy_from_slice(part.ok_or_else(|| HandlerError::new("past the configuration space"))?);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.features = 0;
        self.forget_units();
        Ok(())
    }
}
