//! A block device as a vhost-user back end.

use std::{
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{
    PeerFd,
    event::Bells,
    worker::{Work, Worker},
};
use ringfence_vhost_user::{
    BackendChannel, ConfigWrite, Handler, HandlerError, InflightRegion, Iotlb, ProtocolFeatures,
    RingAddresses, RingSetup, Shutdown, WireError,
};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1,
    blk::{Config, SECTOR, feature},
    device::Queue,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    BlkFigures, BlkQueue, BlkUnit, QueueStats, cache::Cache, figures::MOST_LEFT, reaper::Reaper,
    request, unit::Start,
};
use crate::{
    backend::{Events, FrontEnd, RingStart, read_config},
    disk::{Disk, Image, ImageError},
    iommu::{Iommu, Seat},
    translation::Translation,
};

/// The most buffers of data in a request: what fits a queue's chain beside header and status.
const SEG_MAX: u32 = 254;
/// The most bytes of each. With [`SEG_MAX`] of them a request is shorter than [`request::MOST_MOVED`]. Not less: a FreeBSD
/// does without a device whose buffers are shorter than its longest request, 1 MiB.
const SIZE_MAX: u32 = 1 << 20;
const _: () = assert!(SEG_MAX as u64 * SIZE_MAX as u64 <= request::MOST_MOVED);

/// How often a ring that stops, but for what the disk has, is looked after.
const LOOK: Duration = Duration::from_millis(10);
/// How long the disk is waited for when a front end stops a ring whose data is in buffers of the service's own:
/// then the connection ends, without an answer. What the kernel has is no longer the front end's affair, but it
/// must not take the ring for one that has done everything. (Where the data is in the guest's memory, the
/// stop waits: the memory is not the guest's before.)
const STOPS_WITHIN: Duration = Duration::from_secs(20);
/// How long the disk is waited for when a connection was ended at this end, so that what is under way is
/// answered: all rings together, and less than a service may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// How long when the front end is gone, and the next one may be waiting: longer than a disk that works takes
/// as a rule. What is not answered by then is done, and on record if there is one.
const GONE_WITHIN: Duration = Duration::from_millis(100);

/// A block device as it is set up.
#[derive(Clone)]
pub struct BlkOptions {
    /// What it serves.
    pub disk: Disk,
    /// Whether nothing may be written.
    pub read_only: bool,
    /// The name that it gives.
    pub id: Arc<str>,
    /// How many queues it offers.
    pub queues: u16,
    /// Which endpoint of an IOMMU in this process it is; with one it offers
    /// `VIRTIO_F_ACCESS_PLATFORM`.
    pub endpoint: Option<Arc<Endpoint>>,
    /// The IOMMU that the endpoint is behind, if each connection has to be of its guest and has to
    /// have its addresses translated.
    pub iommu: Option<Arc<Iommu>>,
    /// Without an endpoint: an IOTLB for each connection, which its front end fills; it offers
    /// `VIRTIO_F_ACCESS_PLATFORM` too.
    pub iotlb: Option<IotlbConfig>,
    /// The number of its units among a worker's.
    pub unit: u32,
    /// Where it counts.
    pub figures: Arc<BlkFigures>,
}

impl BlkOptions {
    /// A device without IOMMU, unit 0, that may be written.
    pub fn new(disk: Disk, id: &str, queues: u16) -> BlkOptions {
        BlkOptions {
            disk,
            read_only: false,
            id: Arc::from(id),
            queues,
            endpoint: None,
            iommu: None,
            iotlb: None,
            unit: 0,
            figures: Arc::new(BlkFigures::new(queues)),
        }
    }
}

/// The most requests that a ring has.
const RING_SIZE: u16 = 1024;

/// Makes all io_urings that a device of so many queues takes, for a process that gives the right to make them up. There
/// is one for each ring, for each that is [left behind](BlkFigures::stuck) before that holds up the others, and for the
/// rings whose requests the disk has when it does.
///
/// # Errors
/// The kernel has no io_uring, or forbids it here.
pub fn make_rings(image: &Image, queues: u16) -> std::io::Result<()> {
    image.make_rings(MOST_LEFT + 2 * usize::from(queues), RING_SIZE)
}

/// A block device as a vhost-user back end, for one connection.
pub struct BlkBackend {
    options: BlkOptions,
    workers: Arc<[Worker]>,
    translation: Option<Translation>,
    seat: Option<Seat>,
    front: FrontEnd,
    inflight: Option<Arc<InflightRegion>>,
    cache: Cache,
    /// The front end's, once it is served, and when it was found to be over.
    connection: Option<Shutdown>,
    over: Option<Instant>,
    /// Through which workers that wait for translations are woken.
    bells: Arc<Bells>,
}

impl BlkBackend {
    /// A device whose queues are served by `workers`, in turn.
    pub fn new(options: BlkOptions, workers: Arc<[Worker]>) -> BlkBackend {
        let translation = match (&options.endpoint, options.iotlb) {
            (None, Some(config)) => {
                let translation = Translation::new(config, Shootdown::new(workers.len()));
                options.figures.iotlb.begin(translation.iotlb());
                Some(translation)
            }
            _ => None,
        };
        let seat = options.iommu.as_ref().map(Iommu::seat);
        BlkBackend {
            options,
            workers,
            translation,
            seat,
            front: FrontEnd::default(),
            inflight: None,
            cache: Cache::default(),
            connection: None,
            over: None,
            bells: Arc::default(),
        }
    }

    /// What all queues have done.
    pub fn stats(&self) -> QueueStats {
        self.options.figures.sum()
    }

    /// What the IOTLBs of all workers have counted: hits, misses and faults. `None` without an
    /// IOMMU.
    pub fn iotlb(&self) -> Option<(u64, u64, u64)> {
        self.endpoint()?;
        let totals = self.options.figures.iotlb.totals();
        Some((totals.hits, totals.walks, totals.faults))
    }

    /// What its accesses go through, if they are translated.
    fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        let own = self.translation.as_ref().map(Translation::endpoint);
        self.options.endpoint.as_ref().or(own)
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

    /// Runs `job` on each unit that there is.
    fn on_all(
        &self,
        job: impl Fn(&mut BlkUnit) + Clone + Send + 'static,
    ) -> Result<(), HandlerError> {
        (0..self.workers.len() as u16)
            .try_for_each(|ring| self.on_unit(ring, job.clone()).map(|_| ()))
    }

    /// Whether a disk that does not answer is waited for no longer by a ring that began to stop at `begun`.
    fn is_given_up(&mut self, begun: Instant) -> bool {
        let over = self.connection.as_ref().filter(|connection| connection.is_over());
        let Some(connection) = over else {
            let own = matches!(&self.options.disk, Disk::File(image) if image.has_own_buffers());
            return own && begun.elapsed() >= STOPS_WITHIN;
        };
        let most = if connection.is_shut_down() { ENDS_WITHIN } else { GONE_WITHIN };
        self.over.get_or_insert_with(Instant::now).elapsed() >= most
    }

    fn take_image(&mut self) -> Result<(), HandlerError> {
        if let Disk::File(image) = &self.options.disk {
            let gone = || self.connection.as_ref().is_some_and(Shutdown::is_over);
            image.take(gone).map_err(|error| HandlerError::new(error.to_string()))?;
        }
        Ok(())
    }

    /// No ring runs. What the disk still has of those before holds the lock, and nobody up.
    fn release_image(&mut self) {
        let Disk::File(image) = &self.options.disk else { return };
        let (image, left) = (Arc::clone(image), self.options.figures.left());
        let is_busy = move || left.load(Ordering::Acquire) > 0;
        let (begun, is_stuck) = (Instant::now(), is_busy());
        // It holds no memory of the guest's, so that nothing depends on it but the lock.
        let given_up = || is_stuck || begun.elapsed() >= STOPS_WITHIN || self.is_given_up(begun);
        match image.release(is_busy, given_up) {
            Ok(()) => {}
            Err(ImageError::NoAnswer) => {
                tracing::warn!(source = %self.options.id, "the image stays locked until its disk answers");
            }
            Err(error) => tracing::error!(source = %self.options.id, "{error}: it stays locked"),
        }
    }

    /// Takes the device's units from their workers. The next driver may negotiate otherwise: the
    /// way to memory is made anew then. What the kernel still has is looked after.
    fn forget_units(&self) {
        let unit = self.options.unit;
        for worker in &*self.workers {
            let figures = Arc::clone(&self.options.figures);
            let _ = worker.call(move |work| {
                drop(work.remove(unit));
                if figures.stuck() > 0 {
                    work.insert(unit, Box::new(Reaper::new(&figures)));
                }
            });
        }
    }
}

/// The unit of the device on this worker, made if it is not there yet.
fn unit_of<'w>(
    work: &'w mut Work,
    options: &BlkOptions,
    endpoint: Option<Arc<Endpoint>>,
    bells: Arc<Bells>,
    memory: &Arc<Memory>,
) -> std::io::Result<&'w mut BlkUnit> {
    if work.unit::<BlkUnit>(options.unit).is_none() {
        let figures = Arc::clone(&options.figures);
        let unit = BlkUnit::new(&options.id, endpoint, bells, memory, figures)?;
        work.insert(options.unit, Box::new(unit));
    }
    Ok(work.unit(options.unit).expect("inserted above"))
}

/// The connection is over: nobody answers any more, and what the workers have of it goes.
impl Drop for BlkBackend {
    fn drop(&mut self) {
        if let Some(translation) = &self.translation {
            translation.set_channel(None);
        }
        self.forget_units();
        self.release_image();
        if self.translation.is_some() {
            self.options.figures.iotlb.end();
        }
    }
}

impl Handler for BlkBackend {
    fn connected(&mut self, connection: Shutdown) {
        if let Some(translation) = &mut self.translation {
            translation.set_connection(connection.clone());
        }
        self.connection = Some(connection);
    }

    fn features(&self) -> u64 {
        let mut features = feature::SIZE_MAX
            | feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ
            | 1 << F_INDIRECT_DESC
            | 1 << F_EVENT_IDX
            | 1 << F_RING_PACKED
            | 1 << F_VERSION_1;
        if self.endpoint().is_some() {
            features |= 1 << F_ACCESS_PLATFORM;
        }
        let holes = self.options.disk.holes();
        match self.options.read_only {
            true => features |= feature::RO,
            false => {
                features |= if holes.punch { feature::DISCARD } else { 0 };
                features |= if holes.punch || holes.zero { feature::WRITE_ZEROES } else { 0 };
            }
        }
        features
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::MQ
            | ProtocolFeatures::CONFIG
            | ProtocolFeatures::CONFIGURE_MEM_SLOTS
            | ProtocolFeatures::INFLIGHT_SHMFD
            | ProtocolFeatures::LOG_SHMFD
            | ProtocolFeatures::RESET_DEVICE
            // Whether or not there is something to ask for: User-Mode Linux has no interrupt
            // without it.
            | ProtocolFeatures::BACKEND_REQ
    }

    fn queues(&self) -> u16 {
        self.options.queues
    }

    fn max_ring_size(&self) -> u16 {
        RING_SIZE
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & (1 << F_VERSION_1) == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        self.seat.iter().try_for_each(|seat| seat.set_features(features))?;
        // Rings are stopped. What addresses mean may not change under a unit that is left.
        self.cache.set_features(features);
        if self.front.set_features(features) {
            self.forget_units();
        }
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.seat.iter().try_for_each(|seat| seat.set_memory(&memory))?;
        self.front.set_memory(&self.options.id, &memory, self.translation.as_mut())?;
        self.on_all(move |unit| unit.set_memory(&memory))
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        if !setup.resumed {
            self.seat.iter().try_for_each(Seat::ring_starts)?;
        }
        let memory = self.front.memory()?;
        let RingStart { config, events, enabled, log, at_used } = self.front.start(ring, setup);
        if at_used && self.inflight.is_none() {
            return Err(HandlerError::new("nobody knows which requests the ring had under way"));
        }
        let Events { kick, call, err } = events;
        let own = Queue::postponed(config).map_err(|error| HandlerError::new(error.to_string()))?;
        let disk = (&self.options.disk, self.options.read_only);
        // Here: its io_uring and its buffers take the kernel longer than other rings should wait.
        let queue = BlkQueue::new(own, disk, Arc::clone(&self.options.id), call);
        let mut queue = queue.map_err(|error| HandlerError::new(error.to_string()))?;
        queue.set_write_through(self.cache.through());
        let start = Start { queue, kick, err, enabled, log, inflight: self.inflight.clone() };
        self.take_image()?;
        let options = self.options.clone();
        let endpoint = self.endpoint().filter(|_| self.front.has(F_ACCESS_PLATFORM)).cloned();
        let bells = Arc::clone(&self.bells);
        self.worker(ring)
            .call(move |work| {
                let mut start = Some(start);
                let unit = unit_of(work, &options, endpoint, bells, &memory);
                let started = unit.map_err(|error| error.to_string()).and_then(|unit| {
                    unit.start(ring, &mut start, &memory).map_err(|error| error.to_string())
                });
                // What is left of it goes elsewhere than on the worker.
                (started, start)
            })
            .map_or_else(|| Err("the worker is gone".into()), |(started, _)| started)
            .map_err(|error| HandlerError::new(&error))
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        let (reply, stopped) = mpsc::channel();
        let begun = Instant::now();
        self.on_unit(ring, move |unit| unit.begin_stop(ring, reply))?;
        loop {
            match stopped.recv_timeout(LOOK) {
                Ok((queue, _)) => return Ok(queue.ring().next_avail()),
                Err(RecvTimeoutError::Timeout) if !self.is_given_up(begun) => {}
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(HandlerError::new("the ring is not running"));
                }
            }
        }
        let left = self.on_unit(ring, move |unit| unit.abandon(ring))?.unwrap_or(0);
        // It may have ended meanwhile.
        if let Ok((queue, _)) = stopped.try_recv() {
            return Ok(queue.ring().next_avail());
        }
        Err(HandlerError::new(format!("the disk has not answered {left} requests of ring {ring}")))
    }

    fn move_ring(&mut self, ring: u16, to: RingAddresses) -> Result<(), HandlerError> {
        let memory = self.front.memory()?;
        let RingAddresses { desc, avail, used, log } = to;
        let moved = self.on_unit(ring, move |unit| {
            unit.log_ring(ring, log);
            unit.relocate(ring, (desc, avail, used), &memory).map_err(|error| error.to_string())
        })?;
        moved.unwrap_or(Ok(())).map_err(|error| HandlerError::new(&error))
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.on_unit(ring, move |unit| unit.enable(ring, enabled)).map(|_| ())
    }

    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        let call = self.front.set_call(ring, call)?;
        self.on_unit(ring, move |unit| unit.set_call(ring, call)).map(|_| ())
    }

    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
        let err = self.front.set_err(ring, err)?;
        self.on_unit(ring, move |unit| unit.set_err(ring, err)).map(|_| ())
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let mut config = Config::new_zeroed();
        config.capacity.set(self.options.disk.len() / SECTOR);
        config.size_max.set(SIZE_MAX);
        config.seg_max.set(SEG_MAX);
        config.blk_size.set(SECTOR as u32);
        config.writeback = self.cache.read(offset, out.len());
        config.num_queues.set(self.options.queues);
        config.max_discard_sectors.set(request::MOST_ZEROED);
        config.max_discard_seg.set(1);
        config.discard_sector_alignment.set(1);
        config.max_write_zeroes_sectors.set(request::MOST_ZEROED);
        config.max_write_zeroes_seg.set(1);
        config.write_zeroes_may_unmap = u8::from(self.options.disk.holes().punch);
        read_config(config.as_bytes(), offset, out)
    }

    fn set_config(&mut self, offset: u32, _: ConfigWrite, data: &[u8]) -> Result<(), HandlerError> {
        self.cache.write(offset, data)
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.front.set_features(0);
        self.cache.reset();
        self.inflight = None;
        self.forget_units();
        Ok(())
    }

    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        if let Some(translation) = &self.translation {
            translation.set_channel(Some(channel));
        }
        Ok(())
    }

    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        match &mut self.translation {
            // A request needs several answers, which come one by one: a worker that sleeps is not
            // woken for each. The front end has ours first, too.
            Some(translation) if messages.iter().all(|m| matches!(m, Iotlb::Update { .. })) => {
                self.bells.hold();
                translation.messages(messages, outcomes);
                self.bells.pass();
            }
            Some(translation) => translation.messages(messages, outcomes),
            None => outcomes.extend(messages.iter().map(|message| self.iotlb(*message))),
        }
    }

    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        match &self.translation {
            Some(translation) => translation.message(message),
            // The IOMMU is in this process and knows better: QEMU sends one at the start of a ring.
            None => Ok(()),
        }
    }

    fn settled(&mut self) {
        self.bells.release();
    }

    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        self.cache.keep_in(Arc::clone(&inflight));
        self.inflight = Some(inflight);
        Ok(())
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        self.front.set_log(log.as_ref());
        self.on_all(move |unit| unit.set_log(log.as_ref()))
    }

    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        self.on_unit(ring, move |unit| unit.log_ring(ring, log)).map(|_| ())
    }

    fn channel_lost(&mut self, why: &WireError) {
        tracing::warn!(source = %self.options.id, "the front end takes no more misses: {why}");
        if let Some(translation) = &self.translation {
            translation.set_channel(None);
        }
    }

    fn suspended(&mut self) {
        self.release_image();
        if let Some(translation) = &self.translation {
            translation.suspend();
        }
    }

    fn channel_answer(&mut self, message: Iotlb, number: u64, done: bool) {
        if let Some(translation) = &self.translation {
            translation.answer(message, number, done);
        }
    }

    fn refused(&mut self, request: u32, why: &HandlerError) {
        tracing::debug!(source = %self.options.id, "request {request} was refused: {why}");
    }
}
