//! The back end: serves one connection, and keeps the state of the rings straight.

use crate::{
    BackendChannel, Handler, HandlerError, Iotlb, ProtocolFeatures, RingAddresses, RingSetup,
    WireError,
    channel::{Channel, Message},
    iotlb::IotlbWire,
    msg::{self, Header, Request},
};
use ringfence_mem::Memory;
use rustix::fs::{self, OFlags};
use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// How long a front end may take to finish a message that it began, or to take an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why serving ended before the front end hung up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The peer's bytes are no valid message, or not valid now.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The device refused a request whose sender did not ask to be told.
    #[error("request {request} was refused: {why}")]
    Refused {
        /// The request.
        request: u32,
        /// Why.
        why: HandlerError,
    },
}

/// What came of a request.
enum Outcome {
    /// Nothing to say, unless an acknowledgement is wanted.
    Done,
    /// The request's own answer.
    Reply(Vec<u8>),
}

/// Why a request was not carried out.
enum Failure {
    /// It can be told, and the connection goes on.
    Refused(HandlerError),
    /// It must not have been sent: the connection ends.
    Wire(WireError),
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Failure {
        Failure::Wire(error)
    }
}

impl From<HandlerError> for Failure {
    fn from(error: HandlerError) -> Failure {
        Failure::Refused(error)
    }
}

/// One ring, as the front end has described it (rule D28: stopped and disabled at first).
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    size: Option<u16>,
    addresses: Option<RingAddresses>,
    base: u32,
    running: bool,
    enabled: bool,
}

/// Serves one connection: checks every message against the protocol and the state of the
/// connection, and calls the [`Handler`].
#[derive(Debug)]
pub struct Server<H> {
    channel: Channel,
    stopping: Arc<AtomicBool>,
    handler: H,
    /// Offered, `F_PROTOCOL_FEATURES` included.
    offered: u64,
    offered_protocol: ProtocolFeatures,
    /// Settled on.
    features: u64,
    /// Settled on; `None` until SET_PROTOCOL_FEATURES.
    protocol: Option<ProtocolFeatures>,
    memory: Option<Arc<Memory>>,
    rings: Vec<Ring>,
}

/// Ends a [`Server::serve`] from another thread.
#[derive(Clone, Debug)]
pub struct Shutdown {
    stopping: Arc<AtomicBool>,
    stream: Arc<UnixStream>,
}

impl Shutdown {
    /// Ends the connection: `serve` stops all rings and returns `Ok` soon.
    pub fn shutdown(&self) {
        self.stopping.store(true, Ordering::Release);
        // It fails only if the connection has ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl<H: Handler> Server<H> {
    /// A server for one connection.
    pub fn new(stream: UnixStream, handler: H) -> Server<H> {
        Server {
            channel: Channel::new(stream, PATIENCE),
            stopping: Arc::new(AtomicBool::new(false)),
            offered: handler.features() | msg::F_PROTOCOL_FEATURES,
            offered_protocol: handler.protocol_features() & ProtocolFeatures::KNOWN,
            features: 0,
            protocol: None,
            memory: None,
            rings: vec![Ring::default(); handler.queues().into()],
            handler,
        }
    }

    /// How long the front end may take to finish a message that it began, or to take an answer
    /// (10 s unless told). How long it is silent between messages does not matter.
    pub fn set_patience(&mut self, patience: Duration) {
        self.channel.set_patience(patience);
    }

    /// A handle that ends [`serve`](Self::serve).
    ///
    /// # Errors
    /// The operating system refused.
    pub fn shutdown_handle(&self) -> io::Result<Shutdown> {
        let stream = Arc::new(self.channel.stream().try_clone()?);
        Ok(Shutdown { stopping: Arc::clone(&self.stopping), stream })
    }

    /// The device.
    pub fn handler(&mut self) -> &mut H {
        &mut self.handler
    }

    /// The device, at the end.
    pub fn into_handler(self) -> H {
        self.handler
    }

    /// Serves until the front end hangs up or [`Shutdown`] is used (`Ok`), or the connection must
    /// end for another reason. All rings are stopped, and the connection is closed, when it
    /// returns.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn serve(&mut self) -> Result<(), ServeError> {
        let result = loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                // Cut off in the middle, but by ourselves.
                Err(_) if self.stopping.load(Ordering::Acquire) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.channel.close();
        for ring in 0..self.rings.len() {
            // Nobody is left to be told that a ring cannot be stopped.
            let _ = self.stop(ring);
        }
        result
    }

    /// Serves one request; `false` if the front end hung up instead.
    fn step(&mut self) -> Result<bool, ServeError> {
        let Some(Message { header, payload, fds }) = self.channel.recv_request()? else {
            return Ok(false);
        };
        let code = header.request;
        let request = Request::parse(code, &payload)?;
        if !request.takes_fds(fds.len()) {
            return Err(WireError::Fds { request: code, count: fds.len() }.into());
        }
        self.permit(&request)?;
        // As it was negotiated when the request was sent.
        let acks = self.protocol.is_some_and(|p| p.contains(ProtocolFeatures::REPLY_ACK));
        let ack = acks && header.needs_reply() && !request.has_reply();
        let outcome = self.carry_out(request, fds);
        match outcome {
            Ok(Outcome::Reply(payload)) => {
                self.channel.send(Header::reply(code, payload.len()), &payload, &[])?;
            }
            Ok(Outcome::Done) if ack => self.acknowledge(code, 0)?,
            Ok(Outcome::Done) => {}
            Err(Failure::Refused(why)) if ack => {
                self.handler.refused(code, &why);
                self.acknowledge(code, 1)?;
            }
            Err(Failure::Refused(why)) => return Err(ServeError::Refused { request: code, why }),
            Err(Failure::Wire(error)) => return Err(error.into()),
        }
        Ok(true)
    }

    fn acknowledge(&self, request: u32, word: u64) -> Result<(), WireError> {
        let payload = word.to_ne_bytes();
        self.channel.send(Header::reply(request, payload.len()), &payload, &[])
    }

    /// Refuses what was not negotiated.
    fn permit(&self, request: &Request) -> Result<(), WireError> {
        let protocol = self.protocol.unwrap_or(ProtocolFeatures::empty());
        let permitted = match request {
            Request::GetQueueNum => protocol.contains(ProtocolFeatures::MQ),
            Request::SetBackendReqFd => protocol.contains(ProtocolFeatures::BACKEND_REQ),
            Request::GetConfig { .. } | Request::SetConfig { .. } => {
                protocol.contains(ProtocolFeatures::CONFIG)
            }
            Request::ResetDevice => protocol.contains(ProtocolFeatures::RESET_DEVICE),
            Request::GetMaxMemSlots | Request::AddMemReg(_) | Request::RemMemReg(_) => {
                protocol.contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
            }
            // Front ends differ in when they acknowledge the virtio bit: using it is enough.
            Request::SetVringEnable { .. } => {
                self.protocol.is_some() || self.features & msg::F_PROTOCOL_FEATURES != 0
            }
            Request::Iotlb(_) => self.features & msg::F_ACCESS_PLATFORM != 0,
            _ => true,
        };
        if permitted { Ok(()) } else { Err(WireError::Request { request: request.code() }) }
    }

    fn carry_out(&mut self, request: Request, mut fds: Vec<OwnedFd>) -> Result<Outcome, Failure> {
        let code = request.code();
        let value = |field, value| WireError::Value { request: code, field, value };
        let state = |why| WireError::State { request: code, why };
        match request {
            Request::GetFeatures => return word(self.offered),
            Request::GetProtocolFeatures => return word(self.offered_protocol.bits()),
            Request::GetQueueNum => return word(self.rings.len() as u64),
            Request::GetMaxMemSlots => return word(Memory::MAX_REGIONS as u64),
            Request::SetFeatures(features) => {
                if features & !self.offered != 0 {
                    return Err(
                        value("features beyond those offered", features & !self.offered).into()
                    );
                }
                let changed = (features ^ self.features) & !msg::F_LOG_ALL;
                if changed != 0 && self.rings.iter().any(|ring| ring.running) {
                    return Err(state("features change while a ring runs").into());
                }
                self.handler.set_features(features & !msg::F_PROTOCOL_FEATURES)?;
                self.features = features;
                if features & msg::F_PROTOCOL_FEATURES == 0 {
                    for ring in 0..self.rings.len() {
                        self.enable(ring, true)?;
                    }
                }
            }
            Request::SetProtocolFeatures(features) => {
                if !self.offered_protocol.contains(features) {
                    let beyond = features & !self.offered_protocol;
                    return Err(
                        value("protocol features beyond those offered", beyond.bits()).into()
                    );
                }
                self.protocol = Some(features);
            }
            Request::SetOwner => {}
            Request::ResetOwner | Request::ResetDevice => self.reset()?,
            Request::SetMemTable(regions) => {
                let memory = Memory::map(regions.into_iter().zip(fds).collect());
                self.set_memory(memory.map_err(HandlerError::from)?)?;
            }
            Request::AddMemReg(region) => {
                let fd = fds.pop().ok_or(state("a region without a file"))?;
                let memory = match &self.memory {
                    Some(memory) => memory.with(region, fd),
                    None => Memory::map(vec![(region, fd)]),
                };
                self.set_memory(memory.map_err(HandlerError::from)?)?;
            }
            Request::RemMemReg(region) => {
                let memory = self.memory.as_ref().ok_or(state("there is no memory yet"))?;
                let memory = memory.without(&region).map_err(HandlerError::from)?;
                self.set_memory(memory)?;
            }
            Request::SetVringNum { ring, num } => {
                let ring = self.ring(code, ring)?;
                let size = u16::try_from(num).map_err(|_| value("ring size", num.into()))?;
                let packed = self.features & msg::F_RING_PACKED != 0;
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
                    self.handler.move_ring(ring as u16, addresses)?;
                }
                self.rings[ring].addresses = Some(addresses);
            }
            Request::SetVringBase { ring, base } => {
                let ring = self.ring(code, ring)?;
                if self.features & msg::F_RING_PACKED == 0 && base > u16::MAX.into() {
                    return Err(value("base", base.into()).into());
                }
                if self.rings[ring].running {
                    return Err(state("the ring runs").into());
                }
                self.rings[ring].base = base;
            }
            Request::GetVringBase { ring: number } => {
                let ring = self.ring(code, number)?;
                self.stop(ring)?;
                return Ok(Outcome::Reply(msg::vring_base(number, self.rings[ring].base)));
            }
            Request::SetVringKick { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                let kick = event(fds.pop())?;
                self.start(code, ring, kick)?;
            }
            Request::SetVringCall { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                self.handler.set_call(ring as u16, event(fds.pop())?)?;
            }
            Request::SetVringErr { ring, .. } => {
                let ring = self.ring(code, ring.into())?;
                self.handler.set_err(ring as u16, event(fds.pop())?)?;
            }
            Request::SetVringEnable { ring, enabled } => {
                let ring = self.ring(code, ring)?;
                self.enable(ring, enabled)?;
            }
            Request::SetBackendReqFd => {
                let fd = fds.pop().ok_or(state("a channel without a descriptor"))?;
                let acks = self.protocol.is_some_and(|p| p.contains(ProtocolFeatures::REPLY_ACK));
                let channel = BackendChannel::new(UnixStream::from(fd), acks);
                self.handler.set_backend_channel(Arc::new(channel.map_err(HandlerError::from)?))?;
            }
            Request::Iotlb(message) => {
                // Its answer says how it went: refusing it is no reason to hang up (rule D14).
                let result = self.iotlb(&message);
                if let Err(why) = &result {
                    self.handler.refused(code, why);
                }
                return word(u64::from(result.is_err()));
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

    fn ring(&self, request: u32, ring: u32) -> Result<usize, WireError> {
        let index = ring as usize;
        if index < self.rings.len() {
            return Ok(index);
        }
        Err(WireError::Value { request, field: "ring", value: ring.into() })
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.handler.set_memory(Arc::clone(&memory))?;
        self.memory = Some(memory);
        Ok(())
    }

    fn start(&mut self, request: u32, ring: usize, kick: Option<OwnedFd>) -> Result<(), Failure> {
        let missing = |why| Failure::Wire(WireError::State { request, why });
        let Ring { size, addresses, enabled, .. } = self.rings[ring];
        let size = size.ok_or_else(|| missing("the ring has no size yet"))?;
        let addresses = addresses.ok_or_else(|| missing("the ring has no addresses yet"))?;
        if self.memory.is_none() {
            return Err(missing("there is no memory yet"));
        }
        // A new kick for a running ring: it goes on where it is.
        self.stop(ring)?;
        let base = self.rings[ring].base;
        let setup = RingSetup { size, addresses, base, kick, enabled };
        self.handler.start_ring(ring as u16, setup)?;
        self.rings[ring].running = true;
        Ok(())
    }

    /// Stops a ring, if it runs, and remembers where.
    fn stop(&mut self, ring: usize) -> Result<(), HandlerError> {
        if self.rings[ring].running {
            self.rings[ring].running = false;
            self.rings[ring].base = self.handler.stop_ring(ring as u16)?;
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

    fn reset(&mut self) -> Result<(), HandlerError> {
        for ring in 0..self.rings.len() {
            self.stop(ring)?;
            self.rings[ring] = Ring::default();
        }
        self.features = 0;
        self.handler.reset()
    }

    fn iotlb(&mut self, message: &IotlbWire) -> Result<(), HandlerError> {
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
        self.handler.iotlb(message)
    }
}

fn word(word: u64) -> Result<Outcome, Failure> {
    Ok(Outcome::Reply(word.to_ne_bytes().to_vec()))
}

/// Makes an event descriptor non-blocking: with one that blocks (an eventfd whose counter is full, a
/// pipe) the front end could stop a worker for good.
fn event(fd: Option<OwnedFd>) -> Result<Option<OwnedFd>, HandlerError> {
    if let Some(fd) = &fd {
        let flags = fs::fcntl_getfl(fd)?;
        if !flags.contains(OFlags::NONBLOCK) {
            fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
        }
    }
    Ok(fd)
}

/// What the virtio specification (2.7) asks of the areas of a split ring; a packed ring's must be
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
