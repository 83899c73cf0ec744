//! A device that records the calls it gets, and a connection to it.
#![allow(dead_code, reason = "each test uses its part")]

use ringfence_mem::{Access, DirtyLog, Memory};
use ringfence_run::{Closer, PeerFd};
use ringfence_vhost_user::msg::{Header, Request};
use ringfence_vhost_user::{
    BackendChannel, ConfigWrite, F_ACCESS_PLATFORM, Frontend, Handler, HandlerError,
    InflightRegion, Iotlb, Offer, ProtocolFeatures, RingAddresses, RingSetup, ServeError, Server,
    WireError,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use zerocopy::IntoBytes;

pub(crate) const VERSION_1: u64 = 1 << 32;

/// A call that a device got.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    Features(u64),
    Memory(usize),
    Start { ring: u16, size: u16, base: Option<u32>, kick: bool, enabled: bool, desc: u64 },
    Stop(u16),
    Enable(u16, bool),
    Move(u16, u64),
    Call(u16, bool),
    Err(u16, bool),
    SetConfig(u32, ConfigWrite, Vec<u8>),
    Reset,
    Channel,
    Iotlb(Iotlb),
    Reply(Iotlb, u64, bool),
    ChannelLost,
    Inflight(u16, u16),
    Log(bool),
    LogFd,
    LogRing(u16, Option<u64>),
    Status(u8),
    Rarp([u8; 6]),
    Mtu(u16),
    Disconnected,
    Refused(u32),
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) events: Vec<Event>,
    pub(crate) config: [u8; 64],
    pub(crate) memory: Option<Arc<Memory>>,
    pub(crate) channel: Option<Arc<BackendChannel>>,
    pub(crate) features: u64,
    pub(crate) tolerated: u64,
    pub(crate) protocol: ProtocolFeatures,
    pub(crate) log: Option<Arc<DirtyLog>>,
    pub(crate) inflight: Option<Arc<InflightRegion>>,
    /// How many IOTLB messages came together, each time.
    pub(crate) together: Vec<usize>,
    /// How many IOTLB messages have taken effect.
    pub(crate) carried_out: Arc<AtomicU64>,
    /// How many of them had taken effect at the last call of `settled`.
    pub(crate) settled: Arc<AtomicU64>,
    /// How many replies came on the channel.
    pub(crate) replied: Arc<AtomicU64>,
    /// How many channels the front end has closed.
    pub(crate) lost: Arc<AtomicU64>,
    /// Whether the end of a connection is recorded.
    pub(crate) notes_end: bool,
    /// What the device does when a ring is to stop.
    pub(crate) on_stop: Option<fn(&mut Device)>,
    /// Whether rings start.
    pub(crate) refuses_rings: bool,
    /// The IOVA of the miss that the device sends, asking for a reply, when a ring starts.
    pub(crate) miss_at: Option<u64>,
    /// The result of `stop_ring`; `None`: an error.
    pub(crate) stopped_at: Option<u32>,
}

impl Default for Device {
    fn default() -> Device {
        Device {
            events: Vec::new(),
            config: core::array::from_fn(|i| i as u8),
            memory: None,
            channel: None,
            log: None,
            inflight: None,
            together: Vec::new(),
            carried_out: Arc::default(),
            settled: Arc::default(),
            replied: Arc::default(),
            lost: Arc::default(),
            notes_end: false,
            on_stop: None,
            features: VERSION_1 | F_ACCESS_PLATFORM,
            tolerated: 0,
            protocol: ProtocolFeatures::KNOWN,
            refuses_rings: false,
            miss_at: None,
            stopped_at: Some(77),
        }
    }
}

impl Device {
    fn note(&mut self, event: Event) -> Result<(), HandlerError> {
        self.events.push(event);
        Ok(())
    }
}

impl Handler for Device {
    fn offer(&self) -> Offer {
        Offer {
            tolerated: self.tolerated,
            protocol: self.protocol,
            max_ring_size: 1024,
            ..Offer::new(self.features, 2)
        }
    }
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.note(Event::Features(features))
    }
    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        let regions = memory.regions().len();
        self.memory = Some(memory);
        self.note(Event::Memory(regions))
    }
    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        if self.refuses_rings {
            return Err(HandlerError::new("no rings today"));
        }
        if let (Some(iova), Some(channel)) = (self.miss_at, &self.channel) {
            let miss = Iotlb::Miss { iova, access: Access::Read };
            assert_eq!(channel.try_send([(miss, Some(iova))]), 1);
        }
        let RingSetup { size, addresses, base, kick, enabled, resumed: _ } = setup;
        let (kick, desc) = (kick.is_some(), addresses.desc);
        self.note(Event::Start { ring, size, base, kick, enabled, desc })
    }
    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        if let Some(on_stop) = self.on_stop {
            on_stop(self);
        }
        self.note(Event::Stop(ring))?;
        self.stopped_at.ok_or_else(|| HandlerError::new("the disk does not reply"))
    }
    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.note(Event::Enable(ring, enabled))
    }
    fn move_ring(&mut self, ring: u16, addresses: RingAddresses) -> Result<(), HandlerError> {
        self.note(Event::Move(ring, addresses.desc))
    }
    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        self.note(Event::Call(ring, call.is_some()))
    }
    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
        self.note(Event::Err(ring, err.is_some()))
    }
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let offset = offset as usize;
        let bytes = self.config.get(offset..offset + out.len());
        out.copy_from_slice(bytes.ok_or_else(|| HandlerError::new("beyond the end"))?);
        Ok(())
    }
    fn set_config(&mut self, at: u32, why: ConfigWrite, data: &[u8]) -> Result<(), HandlerError> {
        if at as usize >= self.config.len() {
            return Err(HandlerError::new("beyond the end"));
        }
        self.note(Event::SetConfig(at, why, data.to_vec()))
    }
    fn reset(&mut self) -> Result<(), HandlerError> {
        self.note(Event::Reset)
    }
    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        self.channel = Some(channel);
        self.note(Event::Channel)
    }
    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        self.together.push(messages.len());
        outcomes.extend(messages.iter().map(|message| self.iotlb(*message)));
    }
    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        // A reply that does not wait for this call comes before it.
        thread::yield_now();
        self.carried_out.fetch_add(1, Ordering::Relaxed);
        self.note(Event::Iotlb(message))
    }
    fn settled(&mut self) {
        self.settled.store(self.carried_out.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    fn channel_reply(&mut self, message: Iotlb, number: u64, done: bool) {
        // A device may send from here, such as the failure of an access: the channel holds no lock.
        if let Some(channel) = &self.channel {
            channel.try_send([]);
        }
        self.events.push(Event::Reply(message, number, done));
        self.replied.fetch_add(1, Ordering::Relaxed);
    }
    fn channel_lost(&mut self, _why: &WireError) {
        self.events.push(Event::ChannelLost);
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        let place = inflight.place();
        self.inflight = Some(inflight);
        self.note(Event::Inflight(place.queues, place.size))
    }
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        let logs = log.is_some();
        self.log = log;
        self.note(Event::Log(logs))
    }
    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        self.note(Event::LogRing(ring, log))
    }
    fn set_log_event(&mut self, _event: PeerFd) -> Result<(), HandlerError> {
        self.note(Event::LogFd)
    }
    fn set_status(&mut self, status: u8) -> Result<(), HandlerError> {
        self.note(Event::Status(status))
    }
    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), HandlerError> {
        self.note(Event::Rarp(mac))
    }
    fn set_mtu(&mut self, mtu: u16) -> Result<(), HandlerError> {
        self.note(Event::Mtu(mtu))
    }
    fn disconnected(&mut self) {
        if self.notes_end {
            self.events.push(Event::Disconnected);
        }
    }
    fn refused(&mut self, request: u32, _why: &HandlerError) {
        self.events.push(Event::Refused(request));
    }
}

/// How serving ended, and the device.
pub(crate) type Served = JoinHandle<(Result<(), ServeError>, Device)>;

/// Serves the device on a thread; returns the other end of the connection.
pub(crate) fn serve(device: Device) -> (UnixStream, Served) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let served = thread::spawn(move || {
        let mut server = Server::new(end(theirs), device);
        let result = server.serve();
        (result, server.into_handler())
    });
    (ours, served)
}

/// The same, with a front end on the other end that has not sent anything yet.
pub(crate) fn connect(device: Device) -> (Frontend, Served) {
    let (stream, served) = serve(device);
    (Frontend::new(end(stream), LONG), served)
}

/// How long to wait for what must come: only a test that hangs takes so long.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Tests here count this process's descriptors: one at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// How many descriptors this process has of the kinds that connections use and messages carry:
/// sockets, events, pipes, memory. Files that have a path are not counted: the back trace of
/// another test that fails meanwhile opens some, and so does this count. Waits for descriptors that
/// are being closed.
pub(crate) fn open_fds() -> usize {
    let begun = Instant::now();
    while !closer().is_idle() {
        assert!(begun.elapsed() < LONG, "something is closed for ever");
        thread::yield_now();
    }
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    // A descriptor that is closed by now is a file of another thread.
    let targets = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    let named = |target: &std::path::PathBuf| {
        target.starts_with("/") && !target.to_string_lossy().starts_with("/memfd:")
    };
    targets.filter(|target| !named(target)).count()
}

/// A socket whose other end a peer has, closed by the tests' one closer.
pub(crate) fn end(stream: UnixStream) -> PeerFd {
    PeerFd::new(stream, closer())
}

fn closer() -> &'static Closer {
    static CLOSER: LazyLock<Closer> = LazyLock::new(Closer::default);
    &CLOSER
}

pub(crate) fn bytes(header: Header, payload: &[u8]) -> Vec<u8> {
    [header.as_bytes(), payload].concat()
}

pub(crate) fn message(request: &Request, need_reply: bool) -> Vec<u8> {
    let payload = request.payload();
    bytes(Header::request(request.code(), need_reply, payload.len()), &payload)
}

/// Sends bytes with descriptors; it is no error if the peer has hung up already.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
}
