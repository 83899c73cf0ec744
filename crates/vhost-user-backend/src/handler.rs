//! The handler that all devices share.

use std::{marker::PhantomData, sync::Arc};

use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{
    PeerFd,
    event::Bells,
    notifier::Notifier,
    worker::{Unit, Work, Worker},
};
use ringfence_vhost_user::{
    BackendChannel, ConfigWrite, Handler, HandlerError, InflightRegion, Iotlb, Offer,
    ProtocolFeatures, RingAddresses, RingSetup, Shutdown, WireError, msg::code,
};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1,
};

use crate::{FrontEnd, IotlbTally, RingStart, translation::Translation};

/// The rings of a device that one worker serves.
pub trait Rings: Unit {
    /// Which one of several devices whose rings a worker serves together; `()` if there is only
    /// one.
    type Part: Copy + Send + 'static;

    /// Changes a running ring.
    fn change(&mut self, part: Self::Part, ring: u16, change: Change);
    /// Replaces the memory under running rings. A ring that is not in the new memory is left alone
    /// until it is in one again.
    fn set_memory(&mut self, part: Self::Part, memory: &Arc<Memory>);
    /// Sets where pages that are written are marked from now on; `None`: nowhere (rule [D26]).
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    fn set_log(&mut self, part: Self::Part, log: Option<&Arc<DirtyLog>>);
    /// Moves a running ring (rule [D21]).
    ///
    /// # Errors
    /// The ring cannot be reached: it stops.
    ///
    /// [D21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d21
    fn relocate(
        &mut self,
        part: Self::Part,
        ring: u16,
        to: RingAddresses,
    ) -> Result<(), HandlerError>;
}

/// A change of a running ring.
pub enum Change {
    /// Whether it works.
    Enabled(bool),
    /// The descriptor for its interrupts.
    Call(Option<Arc<Notifier>>),
    /// The descriptor that signals its failure to the front end.
    Err(Option<Arc<Notifier>>),
    /// Where its writes to its used ring are marked; `None`: nowhere (rule [D26]).
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    Log(Option<u64>),
}

/// What a [`Backend`] needs to know of its device at any time.
pub struct Common<'a, R: Rings> {
    /// Its name in messages.
    pub name: &'a str,
    /// The workers' shares that serve its rings.
    pub shares: &'a Shares<R>,
    /// Which one it is of the devices whose rings its workers serve together.
    pub part: R::Part,
    /// Where its IOTLB's counters are summed.
    pub tally: &'a IotlbTally,
    /// The bells that wake its workers when a translation comes, so that several updates wake a
    /// worker once; `None`: each update wakes it.
    pub bells: Option<&'a Bells>,
}

/// The interface between a device and a [`Backend`], for one connection.
#[allow(unused_variables, reason = "defaults that do nothing")]
pub trait RawDevice {
    /// Its rings on a worker.
    type Rings: Rings;

    /// The front end's connection is served from now on.
    fn connected(&mut self, connection: &Shutdown) {}
    /// What does not change.
    fn common(&self) -> Common<'_, Self::Rings>;
    /// Which share a ring belongs to, modulo their number: rings that one worker must serve
    /// together have the same one.
    fn share_of(&self, ring: u16) -> usize {
        ring.into()
    }
    /// What it offers. The back end adds the features of rings, and the protocol features REPLY_ACK,
    /// MQ, CONFIGURE_MEM_SLOTS, RESET_DEVICE, LOG_SHMFD and BACKEND_REQ.
    fn offer(&self) -> Offer;
    /// The features of rings that it does not offer, as a mask.
    fn withheld(&self) -> u64 {
        0
    }
    /// These features were negotiated, while no ring runs.
    ///
    /// # Errors
    /// The device cannot work with them.
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        Ok(())
    }
    /// The device is reset, as if no driver had used it.
    fn reset(&mut self) {}
    /// The front end brings this memory.
    ///
    /// # Errors
    /// The device cannot take it.
    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        Ok(())
    }
    /// Starts a ring on its share.
    ///
    /// # Errors
    /// As [`Handler::start_ring`].
    fn start(&mut self, ring: u16, start: RingStart) -> Result<(), HandlerError>;
    /// Stops a ring; returns the next available entry.
    ///
    /// # Errors
    /// As [`Handler::stop_ring`].
    fn stop(&mut self, ring: u16, connection: Option<&Shutdown>) -> Result<u32, HandlerError>;
    /// The front end enables or disables a ring; called before the [change](Rings::change).
    ///
    /// # Errors
    /// It cannot be done.
    fn enable(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        Ok(())
    }
    /// The front end's channel, for messages to it.
    fn set_channel(&mut self, channel: &Arc<BackendChannel>) {}
    /// Has its shares drop all that they have of this connection: the connection is over, the
    /// device is reset, or the meaning of addresses changes.
    fn forget(&mut self);
    /// The last ring has stopped.
    fn suspended(&mut self, connection: Option<&Shutdown>) {}
    /// The front end reads the configuration space; see [`Handler::config`].
    ///
    /// # Errors
    /// It cannot be read now, or not there.
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError>;
    /// The front end writes to the configuration space.
    ///
    /// # Errors
    /// The field is not writable, or does not exist.
    fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<(), HandlerError> {
        Err(HandlerError::new("the configuration space cannot be written"))
    }
    /// Sets where the device records what it has taken; see [`Handler::set_inflight`].
    ///
    /// # Errors
    /// It keeps no such record.
    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        Err(HandlerError::new("the device keeps no record of requests in flight"))
    }
    /// A guest with this address has arrived by migration; see [`Handler::send_rarp`].
    ///
    /// # Errors
    /// It cannot be announced.
    fn send_rarp(&mut self, mac: [u8; 6], features: u64) -> Result<(), HandlerError> {
        Ok(())
    }
    /// A request of the front end was refused, and the front end notified; for logs.
    fn refused(&self, request: u32, why: &HandlerError) {
        tracing::debug!(source = %self.common().name, "{} was refused: {why}", code::name(request));
    }
}

/// Where the rings of a device are served: one share of each of some workers.
pub struct Shares<R> {
    workers: Arc<[Worker]>,
    unit: u32,
    rings: PhantomData<fn() -> R>,
}

impl<R> Clone for Shares<R> {
    fn clone(&self) -> Self {
        Shares { workers: Arc::clone(&self.workers), unit: self.unit, rings: PhantomData }
    }
}

impl<R: Unit> Shares<R> {
    /// A share of each of these workers: their unit number `unit`.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn new(workers: Arc<[Worker]>, unit: u32) -> Shares<R> {
        assert!(!workers.is_empty(), "a device needs a worker");
        Shares { workers, unit, rings: PhantomData }
    }

    /// How many shares there are.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// The number of the unit.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// Runs `job` on the worker of a share, modulo their number, with all that the worker works on.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn on_worker<T: Send + 'static>(
        &self,
        share: usize,
        job: impl FnOnce(&mut Work) -> T + Send + 'static,
    ) -> Result<T, HandlerError> {
        let done = self.workers[share % self.workers.len()].call(job);
        done.ok_or_else(|| HandlerError::new("the worker is gone"))
    }

    /// Runs `job` on a share, modulo their number, if there is one.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn on<T: Send + 'static>(
        &self,
        share: usize,
        job: impl FnOnce(&mut R) -> T + Send + 'static,
    ) -> Result<Option<T>, HandlerError> {
        let unit = self.unit;
        self.on_worker(share, move |work| work.unit::<R>(unit).map(job))
    }

    /// Runs `job` on each share in turn, even if another fails.
    ///
    /// # Errors
    /// A worker is gone.
    pub fn on_all(
        &self,
        job: impl Fn(&mut R) + Clone + Send + 'static,
    ) -> Result<(), HandlerError> {
        let mut done = Ok(());
        for share in 0..self.count() {
            done = done.and(self.on(share, job.clone()).map(|_| ()));
        }
        done
    }
}

/// What translates a device's addresses where ACCESS_PLATFORM was negotiated.
#[non_exhaustive]
pub enum Addresses {
    /// ACCESS_PLATFORM is not offered.
    Physical,
    /// An IOMMU of this process, with this endpoint; the front end's messages change nothing.
    Behind(Arc<Endpoint>),
    /// A device IOTLB, which the front end fills.
    Iotlb(IotlbConfig),
}

type PartOf<D> = <<D as RawDevice>::Rings as Rings>::Part;

/// A device as a vhost-user back end, for one connection.
pub struct Backend<D: RawDevice> {
    device: D,
    /// What translates addresses where ACCESS_PLATFORM was negotiated.
    endpoint: Option<Arc<Endpoint>>,
    /// The device IOTLB, if that is the endpoint's.
    translation: Option<Translation>,
    front: FrontEnd,
    /// The front end's connection, once it is served.
    connection: Option<Shutdown>,
}

impl<D: RawDevice> Backend<D> {
    /// `device` as a back end; `addresses` translates its addresses.
    pub fn new(device: D, addresses: Addresses) -> Backend<D> {
        let (endpoint, translation) = match addresses {
            Addresses::Physical => (None, None),
            Addresses::Behind(endpoint) => (Some(endpoint), None),
            Addresses::Iotlb(config) => {
                // A shootdown of its own: this front end's invalidations wait for no other's.
                let Common { shares, tally, .. } = device.common();
                let translation = Translation::new(config, Shootdown::new(shares.count()));
                tally.begin(&translation.iotlb);
                (Some(Arc::clone(&translation.endpoint)), Some(translation))
            }
        };
        Backend { device, endpoint, translation, front: FrontEnd::default(), connection: None }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Runs `job` on the share of `ring`, if there is one.
    fn on(
        &self,
        ring: u16,
        job: impl FnOnce(&mut D::Rings, PartOf<D>) -> Result<(), HandlerError> + Send + 'static,
    ) -> Result<(), HandlerError> {
        let Common { shares, part, .. } = self.device.common();
        let done = shares.on(self.device.share_of(ring), move |rings| job(rings, part))?;
        done.unwrap_or(Ok(()))
    }

    fn change(&self, ring: u16, change: Change) -> Result<(), HandlerError> {
        self.on(ring, move |rings, part| {
            rings.change(part, ring, change);
            Ok(())
        })
    }
}

/// The connection is over: no replies are sent any more, and the workers drop their part of it.
impl<D: RawDevice> Drop for Backend<D> {
    fn drop(&mut self) {
        if let Some(translation) = &self.translation {
            translation.set_channel(None);
        }
        self.device.forget();
        self.device.suspended(self.connection.as_ref());
        if self.translation.is_some() {
            self.device.common().tally.end();
        }
    }
}

impl<D: RawDevice> Handler for Backend<D> {
    fn connected(&mut self, connection: Shutdown) {
        if let Some(translation) = &mut self.translation {
            translation.connection = Some(connection.clone());
        }
        self.device.connected(&connection);
        self.connection = Some(connection);
    }

    fn offer(&self) -> Offer {
        use ProtocolFeatures as P;
        let mut offer = self.device.offer();
        let translated = if self.endpoint.is_some() { F_ACCESS_PLATFORM } else { 0 };
        let rings = F_INDIRECT_DESC | F_EVENT_IDX | F_RING_PACKED | F_VERSION_1;
        offer.features = (offer.features | rings | translated) & !self.device.withheld();
        offer.protocol |= P::REPLY_ACK | P::MQ | P::CONFIGURE_MEM_SLOTS | P::LOG_SHMFD;
        // BACKEND_REQ even without IOTLB misses: User-Mode Linux has no interrupt without it.
        offer.protocol |= P::RESET_DEVICE | P::BACKEND_REQ;
        offer
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.device.set_features(features)?;
        // Rings are stopped. The meaning of addresses may not change for a bus that is left.
        if self.front.set_features(features) {
            self.device.forget();
        }
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.device.set_memory(&memory)?;
        if let Some(translation) = &mut self.translation {
            translation.set_memory(&memory)?;
        }
        let Common { name, shares, part, .. } = self.device.common();
        self.front.set_memory(name, &memory);
        shares.on_all(move |rings| rings.set_memory(part, &memory))
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        let mut start = self.front.start(ring, setup)?;
        start.endpoint = self.endpoint.clone().filter(|_| self.front.has(F_ACCESS_PLATFORM));
        start.shutdown.clone_from(&self.connection);
        self.device.start(ring, start)
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        self.device.stop(ring, self.connection.as_ref())
    }

    fn move_ring(&mut self, ring: u16, to: RingAddresses) -> Result<(), HandlerError> {
        self.on(ring, move |rings, part| {
            rings.change(part, ring, Change::Log(to.log));
            rings.relocate(part, ring, to)
        })
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.device.enable(ring, enabled)?;
        self.change(ring, Change::Enabled(enabled))
    }

    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        let call = self.front.set_call(ring, call)?;
        self.change(ring, Change::Call(call.clone()))?;
        call.iter().for_each(|call| call.notify());
        Ok(())
    }

    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
        let err = self.front.set_err(ring, err)?;
        self.change(ring, Change::Err(err))
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        self.device.config(offset, out)
    }

    fn set_config(&mut self, offset: u32, _: ConfigWrite, data: &[u8]) -> Result<(), HandlerError> {
        self.device.set_config(offset, data)
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.front.set_features(0);
        self.device.reset();
        self.device.forget();
        Ok(())
    }

    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        self.device.set_channel(&channel);
        if let Some(translation) = &self.translation {
            translation.set_channel(Some(channel));
        }
        Ok(())
    }

    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        let Some(translation) = &mut self.translation else {
            // An IOMMU in this process is authoritative: QEMU sends one at the start of a ring.
            outcomes.extend(messages.iter().map(|_| Ok(())));
            return;
        };
        // A request needs several updates, which come one by one: a sleeping worker is not woken
        // for each. The front end gets our reply sooner, too.
        let updates = messages.iter().all(|message| matches!(message, Iotlb::Update { .. }));
        match self.device.common().bells {
            Some(bells) if updates => {
                bells.hold();
                translation.messages(messages, outcomes);
                bells.pass();
            }
            bells => {
                bells.into_iter().for_each(Bells::release);
                translation.messages(messages, outcomes);
            }
        }
    }

    fn settled(&mut self) {
        if let Some(bells) = self.device.common().bells {
            bells.release();
        }
    }

    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        self.device.set_inflight(inflight)
    }

    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        self.front.set_log(log.as_ref());
        let Common { shares, part, .. } = self.device.common();
        shares.on_all(move |rings| rings.set_log(part, log.as_ref()))
    }

    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        self.change(ring, Change::Log(log))
    }

    fn channel_lost(&mut self, why: &WireError) {
        // Others have none to send.
        if let Some(translation) = &self.translation {
            let name = self.device.common().name;
            tracing::warn!(source = %name, "the front end takes no more misses: {why}");
            translation.set_channel(None);
        }
    }

    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), HandlerError> {
        self.device.send_rarp(mac, self.front.features())
    }

    fn suspended(&mut self) {
        self.device.suspended(self.connection.as_ref());
        if let Some(translation) = &self.translation {
            translation.suspend();
        }
    }

    fn channel_reply(&mut self, message: Iotlb, number: u64, done: bool) {
        if let Some(translation) = &self.translation {
            translation.reply(message, number, done);
        }
    }

    fn refused(&mut self, request: u32, why: &HandlerError) {
        self.device.refused(request, why);
    }
}
