//! What each request does, and the state that it changes: the rings, the memory, the log.

use std::{
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
};

use ringfence_mem::{DirtyLog, MemError, Memory, Region, SharedFile};
use ringfence_run::PeerFd;

use super::{Failure, Outcome, Ring, Server};
use crate::{
    BackendChannel, Handler, HandlerError, InflightRegion, Iotlb, IotlbWire, ProtocolFeatures,
    RingAddresses, RingSetup, WireError,
    backend_channel::Replies,
    error::at_most,
    msg::{self, Inflight, Request, code},
};

impl<H: Handler> Server<H> {
    /// Refuses requests that need features that were not negotiated.
    pub(super) fn permit(&self, request: &Request) -> Result<(), WireError> {
        let permitted = match request {
            // Front ends differ in when they acknowledge the virtio bit: using it is enough.
            Request::SetVringEnable { .. } => {
                self.protocol.is_some() || self.features & msg::F_PROTOCOL_FEATURES != 0
            }
            other => self.has(other.needs()),
        };
        if permitted { Ok(()) } else { Err(WireError::Request { request: request.code() }) }
    }

    pub(super) fn carry_out(
        &mut self,
        request: Request,
        mut fds: Vec<PeerFd>,
    ) -> Result<Outcome, Failure> {
        let code = request.code();
        let value = |field, value, must| WireError::Value { request: code, field, value, must };
        let state = |why| WireError::State { request: code, why };
        match request {
            Request::GetFeatures => return word(self.offer.features),
            Request::GetProtocolFeatures => return word(self.offer.protocol.bits()),
            Request::GetQueueNum => return word(self.offer.queue_num.into()),
            Request::GetMaxMemSlots => return word(Memory::MAX_REGIONS as u64),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetProtocolFeatures(features) => {
                if !self.offer.protocol.contains(features) {
                    let beyond = features.difference(self.offer.protocol).bits();
                    let field = "protocol features beyond those offered";
                    return Err(value(field, beyond, "0".to_owned()).into());
                }
                self.protocol = Some(features);
            }
            Request::SetOwner => {}
            Request::ResetOwner | Request::ResetDevice => self.reset()?,
            Request::SetMemTable(regions) => {
                self.admit(regions.iter(), self.log_bytes())?;
                let memory = Memory::map(regions.into_iter().zip(fds).collect());
                self.set_memory(memory.map_err(HandlerError::from)?)?;
            }
            Request::AddMemReg(region) => {
                let fd = fds.pop().ok_or(state("a region without a file"))?;
                // QEMU (7.2, with several pairs of queues) keeps a table for each pair, and so adds
                // and removes each region once for each of them.
                if self.memory.as_ref().is_some_and(|memory| memory.has(&region, fd.as_fd())) {
                    return Ok(Outcome::Done);
                }
                self.admit(self.regions().chain([&region]), self.log_bytes())?;
                let memory = match &self.memory {
                    Some(memory) => memory.with(region, fd.as_fd()),
                    None => Memory::map(vec![(region, fd)]),
                };
                self.set_memory(memory.map_err(HandlerError::from)?)?;
            }
            Request::RemMemReg(region) => {
                let memory = self.memory.as_ref().ok_or(state("there is no memory yet"))?;
                match memory.without(&region) {
                    Ok(memory) => self.set_memory(memory)?,
                    // For another pair: see above.
                    Err(MemError::NoSuchRegion { .. }) => {}
                    Err(error) => return Err(HandlerError::from(error).into()),
                }
            }
            Request::SetVringNum { ring, num } => {
                let ring = self.ring(code, ring)?;
                let (packed, most) = (self.is_packed(), self.offer.max_ring_size);
                let size = u16::try_from(num).unwrap_or(0);
                let fits = size != 0 && size <= most;
                if !fits || !(packed || size.is_power_of_two()) {
                    let what = if packed { "" } else { ", a power of two" };
                    return Err(value("ring size", num.into(), format!("1 to {most}{what}")).into());
                }
                if self.rings[ring].running {
                    return Err(state("the ring runs").into());
                }
                self.rings[ring].size = Some(size);
            }
            Request::SetVringAddr { ring, addresses } => {
                let ring = self.ring(code, ring)?;
                aligned(code, &addresses)?;
                if self.rings[ring].running {
                    self.move_ring(ring, addresses)?;
                }
                self.rings[ring].addresses = Some(addresses);
            }
            Request::SetVringBase { ring, base } => {
                let ring = self.ring(code, ring)?;
                if !self.is_packed() && base > u16::MAX.into() {
                    return Err(value("base", base.into(), at_most(u16::MAX)).into());
                }
                if self.rings[ring].running {
                    return Err(state("the ring runs").into());
                }
                self.rings[ring].base = base;
                self.rings[ring].base_unknown = false;
            }
            Request::GetVringBase { ring: number } => {
                let ring = self.ring(code, number)?;
                self.stop(ring)?;
                return Ok(Outcome::Reply(msg::vring_base(number, self.rings[ring].base)));
            }
            Request::SetVringKick { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                // Reads and waits on any other file may block, or never end.
                let kick = fds.pop();
                if kick.as_ref().is_some_and(|kick| !kick.is_eventfd()) {
                    let why = format!("the kick of ring {ring} is not an eventfd");
                    return Err(HandlerError::new(why).into());
                }
                self.start(code, ring, kick)?;
            }
            Request::SetVringCall { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                self.handler.set_call(ring as u16, fds.pop())?;
            }
            Request::SetVringErr { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                self.handler.set_err(ring as u16, fds.pop())?;
            }
            Request::SetVringEnable { ring, enabled } => {
                let ring = self.ring(code, ring)?;
                self.enable(ring, enabled)?;
            }
            Request::SetBackendReqFd => {
                let fd = fds.pop().ok_or(state("a channel without a descriptor"))?;
                let acks = self.has(ProtocolFeatures::REPLY_ACK);
                let owed = if self.resuming { self.replies_owed } else { Some(0) };
                let channel = BackendChannel::resumed(fd, acks, owed);
                let channel = Arc::new(channel.map_err(HandlerError::from)?);
                channel.set_silent(!self.rings.iter().any(|ring| ring.running));
                let replies = Replies::read(Arc::clone(&channel)).map_err(HandlerError::from)?;
                self.handler.set_backend_channel(channel)?;
                self.backend = Some(replies);
            }
            // They were carried out or refused before this, unless descriptors came with one, which end the
            // connection.
            Request::Iotlb(_) => return Err(state("an IOTLB message out of its place").into()),
            Request::SetLogBase { len, offset } => {
                let fd = fds.pop().ok_or(state("a log without a descriptor"))?;
                self.admit(self.regions(), len)?;
                self.set_log(
                    SharedFile::map(fd.as_fd(), offset, len).map_err(HandlerError::from)?,
                )?;
                // Always replied to. Front ends ignore the reply's value: a log that cannot be used
                // ends the connection.
                return word(0);
            }
            Request::SetLogFd => {
                let fd = fds.pop().ok_or(state("an event without a descriptor"))?;
                self.handler.set_log_event(fd)?;
            }
            Request::SendRarp(mac) => self.handler.send_rarp(mac)?,
            Request::NetSetMtu(mtu) => self.handler.set_mtu(mtu)?,
            Request::GetStatus => return word(self.status.into()),
            Request::SetStatus(0) => self.reset()?,
            Request::SetStatus(status) => {
                self.handler.set_status(status)?;
                self.status = status;
            }
            Request::GetInflight(wanted) => {
                let place = self.inflight_shape(code, &wanted)?;
                let made = InflightRegion::allocate(place.queues, place.size, self.is_packed());
                return Ok(match made {
                    Ok((region, fd)) => Outcome::ReplyFd(msg::inflight(&region.place()), fd),
                    Err(why) => {
                        // A length of 0: the front end goes on without a region.
                        self.handler.refused(code, &HandlerError::from(why));
                        Outcome::Reply(msg::inflight(&msg::Inflight { len: 0, ..place }))
                    }
                });
            }
            Request::SetInflight(place) => {
                let place = self.inflight_shape(code, &place)?;
                if self.rings.iter().any(|ring| ring.running) {
                    return Err(state("a ring runs").into());
                }
                let fd = fds.pop().ok_or(state("an in-flight region without a descriptor"))?;
                let region = InflightRegion::open(fd.as_fd(), &place, self.is_packed());
                self.handler.set_inflight(Arc::new(region.map_err(HandlerError::from)?))?;
            }
            Request::GetConfig { offset, size } => {
                let mut data = [0; msg::MAX_CONFIG];
                let data = &mut data[..size as usize];
                return Ok(Outcome::Reply(match self.handler.config(offset, data) {
                    Ok(()) => msg::config(offset, 0, data),
                    Err(why) => {
                        self.handler.refused(code, &why);
                        Vec::new()
                    }
                }));
            }
            Request::SetConfig { offset, why, data } => {
                self.handler.set_config(offset, why, &data)?;
            }
        }
        Ok(Outcome::Done)
    }

    /// The regions of memory that there are.
    fn regions(&self) -> impl Iterator<Item = &Region> {
        self.memory.iter().flat_map(|memory| memory.regions())
    }

    /// How many bytes the log has.
    fn log_bytes(&self) -> u64 {
        self.log.as_ref().map_or(0, |log| log.len())
    }

    /// Refuses to map more than the limit. A region whose file is no memory counts as well.
    fn admit<'r>(
        &self,
        regions: impl Iterator<Item = &'r Region>,
        log: u64,
    ) -> Result<(), HandlerError> {
        let size = bytes(regions, log);
        match size <= self.most_mapped {
            true => Ok(()),
            false => Err(MemError::TooManyBytes { size, most: self.most_mapped }.into()),
        }
    }

    pub(super) fn ring(&self, request: u32, ring: u32) -> Result<usize, WireError> {
        let index = ring as usize;
        if index < self.rings.len() {
            return Ok(index);
        }
        let must = format!("less than {}", self.rings.len());
        Err(WireError::Value { request, field: "ring", value: ring.into(), must })
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.handler.set_memory(Arc::clone(&memory))?;
        self.memory = Some(memory);
        self.note_mapped();
        Ok(())
    }

    fn start(&mut self, request: u32, ring: usize, kick: Option<PeerFd>) -> Result<(), Failure> {
        let missing = |why| Failure::Wire(WireError::State { request, why });
        let Ring { size, addresses, enabled, .. } = self.rings[ring];
        let size = size.ok_or_else(|| missing("the ring has no size yet"))?;
        let addresses = addresses.ok_or_else(|| missing("the ring has no addresses yet"))?;
        if self.memory.is_none() {
            return Err(missing("there is no memory yet"));
        }
        self.suits(request, size, self.rings[ring].base)?;
        // A new kick for a running ring: it goes on where it is.
        self.stop(ring)?;
        let Ring { base, base_unknown, .. } = self.rings[ring];
        let base = (!base_unknown).then_some(base);
        let resumed = self.resuming;
        let setup = RingSetup { size, addresses, base, kick, enabled, resumed };
        // The device may ask for the ring's translations at once.
        self.speak(true);
        let started = self.handler.start_ring(ring as u16, setup);
        self.rings[ring].running = started.is_ok();
        self.speak(false);
        Ok(started?)
    }

    /// Cross-checks what several messages, which may have come in any order, have set for a ring:
    /// the size and the base were valid given what was known when each of them came.
    fn suits(&self, request: u32, size: u16, base: u32) -> Result<(), WireError> {
        let value = |field, value, must| Err(WireError::Value { request, field, value, must });
        if !self.is_packed() {
            if !size.is_power_of_two() {
                return value("the size of a split ring", size.into(), "a power of two".into());
            }
            if base > u16::MAX.into() {
                return value("the base of a split ring", base.into(), at_most(u16::MAX));
            }
        } else if [base, base >> 16].into_iter().any(|place| place & 0x7fff >= size.into()) {
            // The ring checks how far its places may be from each other.
            let must = format!("of places less than {size}");
            return value("the base of a packed ring", base.into(), must);
        }
        Ok(())
    }

    /// Stops a ring, if it runs, and records its position. A device that fails to stop it is not
    /// called again: another request that needs the ring stopped would then succeed.
    pub(super) fn stop(&mut self, ring: usize) -> Result<(), Failure> {
        if self.rings[ring].running {
            self.rings[ring].running = false;
            let base = self.handler.stop_ring(ring as u16);
            self.speak(false);
            if !self.rings.iter().any(|ring| ring.running) {
                self.handler.suspended();
            }
            self.rings[ring].base = base.map_err(Failure::Broken)?;
            self.rings[ring].base_unknown = false;
        }
        Ok(())
    }

    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), HandlerError> {
        if self.rings[ring].running && self.rings[ring].enabled != enabled {
            self.handler.enable_ring(ring as u16, enabled)?;
        }
        self.rings[ring].enabled = enabled;
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Failure> {
        for ring in 0..self.rings.len() {
            self.stop(ring)?;
            self.rings[ring] = Ring::default();
        }
        if self.features & msg::F_LOG_ALL != 0 {
            self.handler.set_log(None)?;
        }
        self.features = 0;
        self.status = 0;
        Ok(self.handler.reset()?)
    }

    /// Reads an IOTLB message, and checks it against the memory (rule [D14]). Without
    /// ACCESS_PLATFORM (rule [D1]) it may be the reply to a miss from before a reset: no reason to
    /// hang up either.
    ///
    /// [D14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d14
    /// [D1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d1
    pub(super) fn read_iotlb(&self, message: &IotlbWire) -> Result<Iotlb, HandlerError> {
        if self.features & msg::F_ACCESS_PLATFORM == 0 {
            return Err(HandlerError::new("an IOTLB message without ACCESS_PLATFORM"));
        }
        let message = message.parse()?;
        match message {
            Iotlb::Update { first, last, user_addr, .. } => {
                let memory = self.memory.as_ref().ok_or_else(|| HandlerError::new("no memory"))?;
                if !msg::within(memory.regions(), user_addr, user_addr + (last - first)) {
                    return Err(HandlerError::new("an update outside of memory"));
                }
            }
            Iotlb::Invalidate { .. } => {}
            Iotlb::Miss { .. } | Iotlb::AccessFail { .. } => {
                return Err(HandlerError::new("a message that only a back end sends"));
            }
        }
        Ok(message)
    }

    /// SET_VRING_ADDR for a running ring: a front end that begins to log sends the addresses again.
    fn move_ring(&mut self, ring: usize, addresses: RingAddresses) -> Result<(), HandlerError> {
        let before = self.rings[ring].addresses.unwrap_or_default();
        if (RingAddresses { log: addresses.log, ..before }) != addresses {
            return self.handler.move_ring(ring as u16, addresses);
        }
        if before.log != addresses.log {
            return self.handler.log_ring(ring as u16, addresses.log);
        }
        Ok(())
    }

    /// SET_FEATURES. Only F_LOG_ALL may change while a ring runs; it holds once there is a log.
    fn set_features(&mut self, features: u64) -> Result<(), Failure> {
        let request = code::SET_FEATURES;
        let value = features & !(self.offer.features | self.offer.tolerated);
        if value != 0 {
            let field = "features beyond those offered";
            return Err(WireError::Value { request, field, value, must: "0".to_owned() }.into());
        }
        let running = self.rings.iter().any(|ring| ring.running);
        if (features ^ self.features) & !msg::F_LOG_ALL != 0 && running {
            let why = "features change while a ring runs";
            return Err(WireError::State { request, why }.into());
        }
        let logs = features & msg::F_LOG_ALL != 0;
        if !running {
            self.handler.set_features(features & !super::OWN_FEATURES)?;
        }
        if logs != (self.features & msg::F_LOG_ALL != 0) {
            self.handler.set_log(self.log.clone().filter(|_| logs))?;
        }
        self.features = features;
        if features & msg::F_PROTOCOL_FEATURES == 0 {
            for ring in 0..self.rings.len() {
                self.enable(ring, true)?;
            }
        }
        Ok(())
    }

    /// SET_LOG_BASE: writes are logged there from now on, if logging is on.
    fn set_log(&mut self, file: SharedFile) -> Result<(), HandlerError> {
        let log = Arc::new(DirtyLog::new(file));
        if self.features & msg::F_LOG_ALL != 0 {
            self.handler.set_log(Some(Arc::clone(&log)))?;
        }
        self.log = Some(log);
        self.note_mapped();
        Ok(())
    }

    fn note_mapped(&self) {
        let mapped = bytes(self.regions(), self.log_bytes());
        self.mapped.store(mapped, Ordering::Relaxed);
    }

    /// Checks the number and the size of the queues that an in-flight region is for.
    fn inflight_shape(&self, request: u32, place: &Inflight) -> Result<Inflight, WireError> {
        let (rings, most) = (self.rings.len(), self.offer.max_ring_size.into());
        for (field, value, most) in
            [("queues", place.queues.into(), rings), ("queue size", place.size.into(), most)]
        {
            if !(1..=most).contains(&value) {
                let (value, must) = (value as u64, format!("1 to {most}"));
                return Err(WireError::Value { request, field, value, must });
            }
        }
        Ok(*place)
    }

    fn is_packed(&self) -> bool {
        self.features & msg::F_RING_PACKED != 0
    }

    /// Sets whether the device may send messages of its own: while a ring runs, or is about to
    /// (rule D27).
    fn speak(&self, now: bool) {
        if let Some(backend) = &self.backend {
            backend.channel.set_silent(!now && !self.rings.iter().any(|ring| ring.running));
        }
    }
}

/// The total size of regions and a log, in bytes.
fn bytes<'r>(regions: impl Iterator<Item = &'r Region>, log: u64) -> u64 {
    regions.fold(log, |sum, region| sum.saturating_add(region.size))
}

fn word(word: u64) -> Result<Outcome, Failure> {
    Ok(Outcome::Reply(word.to_ne_bytes().to_vec()))
}

/// The virtio specification's alignment (2.7) of a split ring's areas; a packed ring's must be
/// aligned at least as much.
fn aligned(request: u32, addresses: &RingAddresses) -> Result<(), WireError> {
    for (field, value, align) in [
        ("descriptor table", addresses.desc, 16),
        ("available ring", addresses.avail, 2),
        ("used ring", addresses.used, 4),
    ] {
        if value % align != 0 {
            let must = format!("a multiple of {align}");
            return Err(WireError::Value { request, field, value, must });
        }
    }
    Ok(())
}
