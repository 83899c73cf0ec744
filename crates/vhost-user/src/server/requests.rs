//! What each request does.

use std::{os::fd::AsFd, sync::Arc};

use ringfence_mem::{MemError, Memory, Region, SharedFile};
use ringfence_run::PeerFd;

use super::{Failure, Outcome, Server, replies::Replies};
use crate::{
    BackendChannel, Handler, HandlerError, InflightRegion, ProtocolFeatures, RingAddresses,
    WireError,
    msg::{self, Request},
};

impl<H: Handler> Server<H> {
    /// Refuses requests that need features that were not negotiated.
    pub(super) fn permit(&self, request: &Request) -> Result<(), WireError> {
        let permitted = match request {
            // Front ends differ in when they acknowledge the virtio bit: using it is enough.
            Request::SetVringEnable { .. } => {
                self.protocol.is_some() || self.features & msg::F_PROTOCOL_FEATURES != 0
            }
            Request::Iotlb(_) => self.features & msg::F_ACCESS_PLATFORM != 0,
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
        let value = |field, value| WireError::Value { request: code, field, value };
        let state = |why| WireError::State { request: code, why };
        match request {
            Request::GetFeatures => return word(self.offered),
            Request::GetProtocolFeatures => return word(self.offered_protocol.bits()),
            Request::GetQueueNum => return word(self.rings.len() as u64),
            Request::GetMaxMemSlots => return word(Memory::MAX_REGIONS as u64),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetProtocolFeatures(features) => {
                if !self.offered_protocol.contains(features) {
                    let beyond = features.difference(self.offered_protocol).bits();
                    return Err(value("protocol features beyond those offered", beyond).into());
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
                let size = u16::try_from(num).map_err(|_| value("ring size", num.into()))?;
                let packed = self.is_packed();
                let fits = size != 0 && size <= self.handler.max_ring_size();
                if !fits || !(packed || size.is_power_of_two()) {
                    return Err(value("ring size", num.into()).into());
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
                    return Err(value("base", base.into()).into());
                }
                if self.rings[ring].running {
                    return Err(state("the ring runs").into());
                }
                self.rings[ring].base = base;
                self.rings[ring].lost = false;
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
                let to_come = if self.resuming { self.to_come } else { Some(0) };
                let channel = BackendChannel::resumed(fd, acks, to_come);
                let channel = Arc::new(channel.map_err(HandlerError::from)?);
                channel.set_silent(!self.rings.iter().any(|ring| ring.running));
                let replies = Replies::read(Arc::clone(&channel)).map_err(HandlerError::from)?;
                self.handler.set_backend_channel(channel)?;
                self.backend = Some(replies);
            }
            // IOTLB messages were carried out before this, unless descriptors came with one or
            // ACCESS_PLATFORM is missing, which end the connection.
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
}

impl<H: Handler> Server<H> {
    /// The regions of memory that there are.
    pub(super) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.memory.iter().flat_map(|memory| memory.regions())
    }

    /// How many bytes the log has.
    pub(super) fn log_bytes(&self) -> u64 {
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
}

/// The total size of regions and a log, in bytes.
pub(super) fn bytes<'r>(regions: impl Iterator<Item = &'r Region>, log: u64) -> u64 {
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
            return Err(WireError::Value { request, field, value });
        }
    }
    Ok(())
}
