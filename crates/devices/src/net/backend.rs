//! A network device as a vhost-user back end.

use std::{io, sync::Arc, time::Duration};

use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{PeerFd, worker::Worker};
use ringfence_vhost_user::{
    BackendChannel, Handler, HandlerError, Iotlb, ProtocolFeatures, RingAddresses, RingSetup,
    WireError,
};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1,
};
use tracing::{debug, warn};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    round::Terms,
    stats::QueueCounters,
    unit::{Connected, NetUnit, Start, Way},
    wire::{Config, LINK_UP, feature},
};
use crate::{
    backend::{FrontEnd, read_config},
    iommu::Seat,
    tally::{IotlbTally, IotlbTotals},
    translation::Translation,
};

/// A network device as it is set up.
#[derive(Clone)]
pub struct NetOptions {
    /// Its name in messages.
    pub name: Arc<str>,
    /// Where packets go.
    pub way: Way,
    /// How many pairs of queues it offers.
    pub pairs: u16,
    /// The address that it tells; `None`: none.
    pub mac: Option<[u8; 6]>,
    /// The MTU that it tells; `None`: none.
    pub mtu: Option<u16>,
    /// Whether it offers `VIRTIO_F_ACCESS_PLATFORM`.
    pub iommu: bool,
    /// How long a receiver may be without buffers before packets are dropped; mostly
    /// [`GRACE`](super::GRACE).
    pub grace: Duration,
    /// What its device IOTLB may hold, and how long a packet waits for a translation.
    pub iotlb: IotlbConfig,
}

/// A network device, or two that are back to back. It outlives its drivers.
pub struct Net {
    options: NetOptions,
    workers: Arc<[Worker]>,
    /// The number of its units among a worker's.
    unit: u32,
    ends: Vec<End>,
}

/// What stays of one device when its driver changes.
#[derive(Default)]
struct End {
    /// By ring.
    counters: Vec<Arc<QueueCounters>>,
    tally: IotlbTally,
}

impl Net {
    /// A device whose pairs of queues are served by `workers`, in turn. They serve nothing else but
    /// units of other numbers than 0.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(options: NetOptions, workers: Arc<[Worker]>) -> io::Result<Arc<Net>> {
        Net::with_unit(options, 0, workers)
    }

    /// As [`new`](Self::new), with another number for its units among those of a worker.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_unit(
        options: NetOptions,
        unit: u32,
        workers: Arc<[Worker]>,
    ) -> io::Result<Arc<Net>> {
        for worker in &*workers {
            let (way, pairs, grace) = (options.way.clone(), options.pairs, options.grace);
            let made = worker.call(move |work| {
                work.insert(unit, Box::new(NetUnit::new(way, pairs, grace)?));
                Ok(())
            });
            made.unwrap_or_else(|| Err(io::Error::other("the worker is gone")))?;
        }
        let end = || End {
            counters: (0..2 * options.pairs).map(|_| Arc::default()).collect(),
            ..End::default()
        };
        let ends = (0..options.way.ends()).map(|_| end()).collect();
        Ok(Arc::new(Net { options, workers, unit, ends }))
    }

    /// A back end for a driver of device `end` (0, or of two also 1). The one before it must be
    /// gone.
    pub fn connect(self: &Arc<Self>, end: usize) -> NetBackend {
        // A shootdown of its own: who waits for this driver's invalidations waits for no other's.
        let shootdown = Shootdown::new(self.workers.len());
        let translation = Translation::new(self.options.iotlb, shootdown);
        self.ends[end].tally.begin(translation.iotlb());
        let front = FrontEnd::default();
        NetBackend { net: Arc::clone(self), end, translation, behind: None, seat: None, front }
    }

    /// As [`connect`](Self::connect), behind an IOMMU of this process: addresses mean what they mean
    /// to `endpoint`, whose shootdown has a place for each worker. The front end is asked for nothing,
    /// and what it says of translations changes nothing.
    pub fn connect_behind(self: &Arc<Self>, end: usize, endpoint: Arc<Endpoint>) -> NetBackend {
        let mut backend = self.connect(end);
        backend.behind = Some(endpoint);
        backend
    }

    /// As [`connect_behind`](Self::connect_behind), for front ends of the guest alone whose IOMMU
    /// `seat` is of, and whose addresses are translated.
    pub fn connect_seated(
        self: &Arc<Self>,
        end: usize,
        endpoint: Arc<Endpoint>,
        seat: Seat,
    ) -> NetBackend {
        let mut backend = self.connect_behind(end, endpoint);
        backend.seat = Some(seat);
        backend
    }

    /// What it was made with.
    pub fn options(&self) -> &NetOptions {
        &self.options
    }

    /// What the rings of device `end` count, by their number: pair n receives in ring 2 n and sends
    /// in ring 2 n + 1.
    pub fn counters(&self, end: usize) -> &[Arc<QueueCounters>] {
        &self.ends[end].counters
    }

    /// What the IOTLBs of device `end` have counted.
    pub fn iotlb(&self, end: usize) -> IotlbTotals {
        self.ends[end].tally.totals()
    }

    /// Runs `job` on the share of the worker that serves `ring`.
    fn on_unit<R: Send + 'static>(
        &self,
        ring: u16,
        job: impl FnOnce(&mut NetUnit) -> R + Send + 'static,
    ) -> Result<R, HandlerError> {
        self.on_worker(usize::from(ring / 2) % self.workers.len(), job)
    }

    fn on_worker<R: Send + 'static>(
        &self,
        worker: usize,
        job: impl FnOnce(&mut NetUnit) -> R + Send + 'static,
    ) -> Result<R, HandlerError> {
        let unit = self.unit;
        let found = self.workers[worker].call(move |work| work.unit::<NetUnit>(unit).map(job));
        found.flatten().ok_or_else(|| HandlerError::new("the worker is gone"))
    }

    /// On each worker in turn.
    fn on_all(&self, job: impl Fn(&mut NetUnit) + Clone + Send + 'static) {
        for worker in 0..self.workers.len() {
            // One that is gone has nothing any more.
            let _ = self.on_worker(worker, job.clone());
        }
    }
}

/// A network device as a vhost-user back end, for one driver.
pub struct NetBackend {
    net: Arc<Net>,
    end: usize,
    translation: Translation,
    /// What it translates by, if it is not by `translation`.
    behind: Option<Arc<Endpoint>>,
    seat: Option<Seat>,
    front: FrontEnd,
}

impl NetBackend {
    fn name(&self) -> Arc<str> {
        match self.net.ends.len() {
            1 => Arc::clone(&self.net.options.name),
            _ => format!("{} {}", self.net.options.name, self.end).into(),
        }
    }

    fn endpoint(&self) -> &Arc<Endpoint> {
        self.behind.as_ref().unwrap_or_else(|| self.translation.endpoint())
    }

    /// Takes what is this driver's from the workers.
    fn forget(&self) {
        let end = self.end;
        self.net.on_all(move |unit| unit.forget(end));
    }

    fn on_ring(
        &self,
        ring: u16,
        job: impl FnOnce(&mut NetUnit, usize) + Send + 'static,
    ) -> Result<(), HandlerError> {
        let end = self.end;
        self.net.on_unit(ring, move |unit| job(unit, end))
    }
}

impl Drop for NetBackend {
    fn drop(&mut self) {
        self.translation.set_channel(None);
        self.forget();
        self.net.ends[self.end].tally.end();
    }
}

impl Handler for NetBackend {
    fn features(&self) -> u64 {
        let NetOptions { pairs, mac, mtu, way, iommu, .. } = &self.net.options;
        let mut features = feature::MRG_RXBUF
            | feature::STATUS
            | way.offloads()
            | 1 << F_INDIRECT_DESC
            | 1 << F_EVENT_IDX
            | 1 << F_VERSION_1
            | 1 << F_RING_PACKED;
        for (offered, bit) in [
            (*pairs > 1, feature::MQ),
            (mac.is_some(), feature::MAC),
            (mtu.is_some(), feature::MTU),
            (*iommu, 1 << F_ACCESS_PLATFORM),
        ] {
            features |= if offered { bit } else { 0 };
        }
        features
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        // QEMU answers its driver's questions itself and warns of a back end that would. A front end
        // that has no IOMMU for its drivers passes them on, as User-Mode Linux does.
        let config = match self.net.options.iommu {
            true => ProtocolFeatures::empty(),
            false => ProtocolFeatures::CONFIG,
        };
        config
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::RARP
            | ProtocolFeatures::BACKEND_REQ
            | ProtocolFeatures::MQ
            | ProtocolFeatures::RESET_DEVICE
            | ProtocolFeatures::CONFIGURE_MEM_SLOTS
            | ProtocolFeatures::NET_MTU
            | ProtocolFeatures::LOG_SHMFD
    }

    fn queues(&self) -> u16 {
        2 * self.net.options.pairs
    }

    fn max_ring_size(&self) -> u16 {
        // As large as DPDK's drivers like them.
        4096
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.seat.iter().try_for_each(|seat| seat.set_features(features))?;
        // Rings are stopped. What addresses mean may not change under a way to memory that is left.
        if self.front.set_features(features) {
            self.forget();
        }
        debug!(source = %self.name(), "features {features:#x}");
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.seat.iter().try_for_each(|seat| seat.set_memory(&memory))?;
        self.front.set_memory(&self.name(), &memory, Some(&mut self.translation))?;
        let end = self.end;
        self.net.on_all(move |unit| unit.set_memory(end, &memory));
        Ok(())
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        if !setup.resumed {
            self.seat.iter().try_for_each(Seat::ring_starts)?;
        }
        let translated = self.front.has(F_ACCESS_PLATFORM);
        let start = Start {
            ring: self.front.start(ring, setup),
            counters: Arc::clone(&self.net.ends[self.end].counters[usize::from(ring)]),
            name: self.name(),
        };
        let connected = Connected {
            memory: self.front.memory()?,
            endpoint: translated.then(|| Arc::clone(self.endpoint())),
            terms: Terms { features: self.front.features() },
            patience_ns: nanos(self.net.options.iotlb.patience),
        };
        let end = self.end;
        let view = self
            .net
            .on_unit(ring, move |unit| unit.start(end, ring, start, connected))?
            .map_err(HandlerError::new)?;
        if let Some(view) = view {
            self.net.ends[end].tally.view(view);
        }
        Ok(())
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        let end = self.end;
        let stopped = self.net.on_unit(ring, move |unit| unit.stop(end, ring))?;
        let (next, _) = stopped.ok_or_else(|| HandlerError::new("the ring is not running"))?;
        next.ok_or_else(|| {
            HandlerError::new("the ring was not found: nobody knows where it stands")
        })
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.on_ring(ring, move |unit, end| unit.enable(end, ring, enabled))
    }

    fn move_ring(&mut self, ring: u16, addresses: RingAddresses) -> Result<(), HandlerError> {
        let memory = self.front.memory()?;
        self.on_ring(ring, move |unit, end| unit.relocate(end, ring, addresses, &memory))
    }

    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        let call = self.front.set_call(ring, call)?;
        self.on_ring(ring, move |unit, end| {
            if let Some(ring) = unit.ring(end, ring) {
                ring.set_call(call);
            }
        })
    }

    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
        let err = self.front.set_err(ring, err)?;
        self.on_ring(ring, move |unit, end| {
            if let Some(ring) = unit.ring(end, ring) {
                ring.set_err(err);
            }
        })
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let NetOptions { pairs, mac, mtu, .. } = &self.net.options;
        let mut config = Config::new_zeroed();
        config.mac = mac.unwrap_or_default();
        config.status.set(LINK_UP);
        config.max_virtqueue_pairs.set(*pairs);
        config.mtu.set(mtu.unwrap_or_default());
        config.speed.set(u32::MAX);
        config.duplex = u8::MAX;
        read_config(config.as_bytes(), offset, out)
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.front.set_features(0);
        self.forget();
        Ok(())
    }

    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        self.translation.set_channel(Some(channel));
        Ok(())
    }

    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        match self.behind {
            // The IOMMU is in this process and knows better: QEMU sends one at the start of a ring.
            Some(_) => outcomes.extend(messages.iter().map(|_| Ok(()))),
            None => self.translation.messages(messages, outcomes),
        }
    }

    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        match self.behind {
            Some(_) => Ok(()),
            None => self.translation.message(message),
        }
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        self.front.set_log(log.as_ref());
        let end = self.end;
        self.net.on_all(move |unit| unit.set_log(end, log.as_ref()));
        Ok(())
    }

    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        self.on_ring(ring, move |unit, end| unit.log_ring(end, ring, log))
    }

    fn channel_lost(&mut self, why: &WireError) {
        warn!(source = %self.name(), "the front end takes no more misses: {why}");
        self.translation.set_channel(None);
    }

    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), HandlerError> {
        // Between two drivers there is nobody to learn it.
        if let Way::Tap(tap) = &self.net.options.way {
            tap.announce(mac, Terms { features: self.front.features() })?;
        }
        Ok(())
    }

    fn suspended(&mut self) {
        self.translation.suspend();
    }

    fn channel_answer(&mut self, message: Iotlb, number: u64, done: bool) {
        self.translation.answer(message, number, done);
    }

    fn refused(&mut self, request: u32, why: &HandlerError) {
        warn!(source = %self.name(), "request {request} was refused: {why}");
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
