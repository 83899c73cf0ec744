//! A virtio-iommu at a vhost-user socket, for the conformance kit.
//!
//! The front end is ours: it makes the memory, fills the rings and sends the requests. Accesses are
//! those of virtio-blk devices at sockets of their own, which the same back end serves as endpoints
//! of the IOMMU: their rings and buffers lie behind it too, and are mapped around each access.
//!
//! | module | what it holds |
//! |---|---|
//! | this one | the virtio-iommu: its connection, rings and memory, as the kit's subject |
//! | `disk` | a disk behind it, whose requests are the accesses |
//! | `ring` | a ring of a driver: memory, notifications, waiting for completions |
#![forbid(unsafe_code)]

mod disk;
mod ring;

use std::{
    collections::{HashMap, VecDeque},
    error::Error,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use ringfence_iommu::{Iova, Range};
use ringfence_mem::{GuestRam, Window};
use ringfence_vhost_user::{F_PROTOCOL_FEATURES, Frontend, ProtocolFeatures};
use ringfence_virtio_iommu::{
    kit::{Event, Failed, Refused, Subject},
    wire::{
        AttachFlags, CONFIG_LEN, EVENT_QUEUE, Features, MAX_REQUEST_LEN, MapFlags, MapRequest,
        REQUEST_QUEUE, Request, Status, TAIL_LEN, UnmapRequest,
    },
};
use ringfence_virtq::{Desc, F_VERSION_1};

use disk::Disk;
use ring::Ring;

/// The time-out for the reply to a message.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// The time-out for an event that nothing seems to cause.
const EVENT: Duration = Duration::from_millis(200);
/// The most that an access may take of an endpoint that seems to reach nothing.
const NOTHING: Duration = Duration::from_secs(1);
/// The request time-out divided by this is the time-out of an access; one that does not complete in
/// time counts as refused, since most refused accesses never complete.
const ACCESS_DIVISOR: u32 = 10;
/// Where the configuration has the field `bypass`.
const BYPASS: usize = 36;
/// Descriptors in each ring.
const SIZE: u16 = 256;
/// Granules of memory that the kit uses.
const KIT_PAGES: u64 = 32;
/// Guest memory begins here if the device's input range allows it.
const BASE: u64 = 16 << 20;
/// The layout of the subject's own memory, which follows the kit's.
const EVENT_RING: usize = 8 << 10;
const REQUEST: usize = 16 << 10;
const REPLY: usize = 20 << 10;
const EVENTS: usize = 40 << 10;
const OWN: usize = 64 << 10;
/// The size of an event buffer, and how many there are.
const EVENT_ROOM: usize = 256;
const EVENT_BUFFERS: usize = 64;

/// Where the device is, and the endpoints behind it.
#[derive(Clone, Debug)]
pub struct Target {
    /// The virtio-iommu's socket.
    pub socket: PathBuf,
    /// Endpoints that may be used, some with the socket of the disk that is this endpoint. The
    /// disk's first sector is overwritten.
    pub endpoints: Vec<(u32, Option<PathBuf>)>,
    /// A number that no endpoint has.
    pub absent: u32,
    /// The time-out for a request, and for the report of a refused access. An access of a disk's
    /// has a tenth of it, and no more than a second if the disk is in no domain.
    pub timeout: Duration,
}

fn broken(error: impl Into<Box<dyn Error + Send + Sync>>) -> Failed {
    Failed::Broken(error.into())
}

/// What makes an error of a step.
fn at_step<E: Into<Box<dyn Error + Send + Sync>>>(
    step: impl Into<String>,
) -> impl FnOnce(E) -> Failed {
    |error| broken(format!("{}: {}", step.into(), error.into()))
}

/// A virtio-iommu at a socket, as the kit sees it.
pub struct VhostSubject {
    target: Target,
    /// `None` once a reply has timed out: the next start reconnects.
    front: Option<Frontend>,
    offered: u64,
    ram: Arc<GuestRam>,
    /// All of it.
    memory: Window,
    /// Where the subject's own memory begins, after the kit's.
    own: usize,
    /// The bytes of each disk's memory, which follows that.
    disk_bytes: usize,
    requests: Option<Ring>,
    events: Option<Ring>,
    /// Buffers in the event ring by token, and those that are free.
    posted: HashMap<u64, usize>,
    free: VecDeque<u64>,
    /// Whether an access was refused while there was a buffer for the report of that.
    expects_event: bool,
    disks: Vec<Disk>,
    /// The domain of each attached endpoint, and whether that is a bypass domain.
    attached: HashMap<u32, (u32, bool)>,
}

impl VhostSubject {
    /// Connects, and reads the features that the device offers.
    ///
    /// # Errors
    /// A socket cannot be reached, the device is no virtio-iommu, or a disk is not behind an IOMMU.
    pub fn open(target: Target) -> Result<VhostSubject, Failed> {
        let (mut front, offered) = connect(&target)?;
        let mut config = [0; CONFIG_LEN];
        front.set_features(offered & F_PROTOCOL_FEATURES | F_VERSION_1).map_err(broken)?;
        let step = "reading its configuration (is it an IOMMU?)";
        front.config(0, &mut config).map_err(at_step(step))?;
        let word = |at: usize| u64::from_le_bytes(config[at..at + 8].try_into().expect("eight"));
        // Clamped: that a granule is absurd is for a check of the kit to report.
        let granule = (word(0) & word(0).wrapping_neg()).clamp(4096, 1 << 20);
        let (first, last) = match offered & Features::INPUT_RANGE.bits() {
            0 => (0, u64::MAX),
            _ => (word(8), word(16)),
        };
        let whole = |bytes: usize| (bytes as u64).next_multiple_of(granule) as usize;
        let (own, disk_bytes) = ((KIT_PAGES * granule) as usize, whole(disk::BYTES));
        let disks = target.endpoints.iter().filter(|(_, socket)| socket.is_some()).count();
        let len = own + whole(OWN) + disks * disk_bytes;
        let fits = |base: &u64| {
            let end = base.checked_add(len as u64 - 1);
            *base >= first && end.is_some_and(|end| end <= last)
        };
        let up = first.checked_next_multiple_of(granule);
        let gpa = [Some(BASE), up].into_iter().flatten().find(fits).unwrap_or(BASE);
        let ram = GuestRam::new(len, gpa).map_err(broken)?;
        let mut subject = VhostSubject {
            front: Some(front),
            offered,
            own,
            disk_bytes,
            requests: None,
            events: None,
            posted: HashMap::new(),
            free: VecDeque::new(),
            expects_event: false,
            disks: Vec::new(),
            attached: HashMap::new(),
            memory: ram.window(0, len).map_err(broken)?,
            ram,
            target,
        };
        let mut offset = own + whole(OWN);
        for (endpoint, socket) in &subject.target.endpoints {
            let Some(socket) = socket.clone() else { continue };
            let mut disk = Disk::new(*endpoint, socket, &subject.ram, offset)?;
            disk.connect()?;
            subject.disks.push(disk);
            offset += disk_bytes;
        }
        Ok(subject)
    }

    fn gpa(&self, offset: usize) -> u64 {
        self.ram.gpa() + offset as u64
    }

    /// Resets the device: by the message for it, or else by a new connection.
    fn reset(&mut self) -> Result<(), Failed> {
        let running = self.requests.take().is_some() | self.events.take().is_some();
        let Some(front) = &mut self.front else { return Ok(()) };
        if running {
            for ring in [REQUEST_QUEUE, EVENT_QUEUE] {
                front.get_vring_base(ring).map_err(broken)?;
            }
        }
        if front.protocol().contains(ProtocolFeatures::RESET_DEVICE) {
            front.reset_device().map_err(broken)
        } else if front.protocol().contains(ProtocolFeatures::STATUS) {
            front.set_status(0).map_err(broken)
        } else {
            self.front = None;
            Ok(())
        }
    }

    fn bring_up(&mut self, features: u64) -> Result<(), Failed> {
        let front = match &mut self.front {
            Some(front) => front,
            None => {
                let (front, offered) = connect(&self.target)?;
                self.offered = offered;
                self.front.insert(front)
            }
        };
        let transport = F_VERSION_1 | self.offered & F_PROTOCOL_FEATURES;
        front.set_features(features | transport).map_err(broken)?;
        front.set_mem_table(&[(self.ram.region(), self.ram.fd())]).map_err(broken)?;
        let user = self.ram.user_addr();
        let mut ring = |index, offset: usize| {
            let offset = self.own + offset;
            let memory = self.ram.window(offset, EVENT_RING).map_err(broken)?;
            Ring::start(front, &memory, (index, SIZE), user + offset as u64)
        };
        self.requests = Some(ring(REQUEST_QUEUE, 0)?);
        self.events = Some(ring(EVENT_QUEUE, EVENT_RING)?);
        if front.protocol().contains(ProtocolFeatures::STATUS) {
            // ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK.
            front.set_status(0xf).map_err(broken)?;
        }
        Ok(())
    }

    /// Notes which endpoint is in which domain after a request that succeeded.
    fn follow(&mut self, request: &[u8]) {
        match Request::parse(request) {
            Ok(Request::Attach { domain, endpoint, flags }) => {
                let bypass = flags.contains(AttachFlags::BYPASS);
                self.attached.insert(endpoint, (domain, bypass));
            }
            Ok(Request::Detach { endpoint, .. }) => _ = self.attached.remove(&endpoint),
            _ => {}
        }
    }

    /// The state of a device that hangs is unknown: the next start reconnects.
    fn hang_up(&mut self) {
        self.requests = None;
        self.events = None;
        self.front = None;
    }

    /// Sends a request of the subject's own, to map or unmap a disk's memory; returns whether it
    /// succeeded.
    fn own_request(&mut self, request: Request) -> bool {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut tail = [0xff; TAIL_LEN];
        self.request(usize::MAX, &bytes[..len], &mut tail).is_ok() && tail[0] == Status::Ok as u8
    }

    /// The memory of disk `n`. During an access it is mapped at its guest-physical addresses.
    fn disk_range(&self, n: usize) -> Option<Range> {
        let from = self.ram.len() - (self.disks.len() - n) * self.disk_bytes;
        let first = self.gpa(from);
        Range::new(Iova(first), Iova(first + (self.disk_bytes as u64 - 1)))
    }
}

/// A connection, and the features that are offered over it.
fn connect(target: &Target) -> Result<(Frontend, u64), Failed> {
    let at = target.socket.display();
    let stream =
        UnixStream::connect(&target.socket).map_err(at_step(format!("connecting to {at}")))?;
    let mut front = Frontend::new(stream, REPLY_TIMEOUT);
    front.set_owner().map_err(broken)?;
    let offered = front.features().map_err(broken)?;
    if offered & F_PROTOCOL_FEATURES == 0 {
        let why = format!("the device at {at} offers no protocol features: no configuration");
        return Err(broken(why));
    }
    if offered & F_VERSION_1 == 0 {
        return Err(broken(format!("the device at {at} does not offer VERSION_1")));
    }
    let mut wanted = front.protocol_features().map_err(broken)?
        & (ProtocolFeatures::CONFIG
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::RESET_DEVICE
            | ProtocolFeatures::STATUS);
    if wanted.contains(ProtocolFeatures::RESET_DEVICE) {
        wanted.remove(ProtocolFeatures::STATUS);
    }
    front.set_protocol_features(wanted).map_err(broken)?;
    Ok((front, offered))
}

impl Subject for VhostSubject {
    fn offered(&self) -> u64 {
        self.offered & Features::all().bits()
    }

    fn start(&mut self, features: u64) -> Result<(), Failed> {
        self.attached.clear();
        self.posted.clear();
        self.expects_event = false;
        self.free = (0..EVENT_BUFFERS as u64).collect();
        if self.reset().is_err() {
            self.hang_up();
        }
        self.bring_up(features).inspect_err(|_| self.hang_up())
    }

    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        let front = self.front.as_mut().ok_or(Failed::Timeout)?;
        front.config(offset as u32, out).map_err(broken)
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        let front = self.front.as_mut().ok_or(Failed::Timeout)?;
        match front.set_config(offset as u32, data) {
            // A device may refuse a write.
            Ok(()) | Err(ringfence_vhost_user::FrontendError::Refused { .. }) => Ok(()),
            Err(error) => Err(broken(error)),
        }
    }

    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        let (request, reply) = (self.own + REQUEST, self.own + REPLY);
        if readable.len() > REPLY - REQUEST || writable.len() > EVENTS - REPLY {
            return Err(broken("a request larger than its room"));
        }
        self.memory.write(request, readable);
        self.memory.write(reply, writable);
        let pieces = |from: usize, len: usize, write: bool| {
            let gpa = self.gpa(from);
            (0..len).step_by(piece.max(1)).map(move |at| {
                let len = piece.min(len - at) as u32;
                Desc { addr: gpa + at as u64, len, write }
            })
        };
        let descs: Vec<Desc> = pieces(request, readable.len(), false)
            .chain(pieces(reply, writable.len(), true))
            .collect();
        let Some(ring) = &mut self.requests else { return Err(Failed::Timeout) };
        ring.submit(&descs, 0)?;
        let Some(used) = ring.wait(self.target.timeout)? else {
            self.hang_up();
            return Err(Failed::Timeout);
        };
        self.memory.read(reply, writable);
        if writable.first() == Some(&(Status::Ok as u8)) && used.len as usize >= TAIL_LEN {
            self.follow(readable);
        }
        Ok(used.len)
    }

    fn endpoints(&self) -> Vec<u32> {
        self.target.endpoints.iter().map(|&(endpoint, _)| endpoint).collect()
    }

    fn absent_endpoint(&self) -> u32 {
        self.target.absent
    }

    fn memory(&self) -> (u64, u64) {
        (self.ram.gpa(), self.gpa(self.own - 1))
    }

    fn kept(&self) -> Option<(u64, u64)> {
        let (first, last) =
            (self.disk_range(0)?, self.disk_range(self.disks.len().checked_sub(1)?)?);
        Some((first.first().0, last.last().0))
    }

    fn peek(&mut self, address: u64, out: &mut [u8]) {
        self.memory.read((address - self.ram.gpa()) as usize, out);
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.memory.write((address - self.ram.gpa()) as usize, bytes);
    }

    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        let n = self.disks.iter().position(|disk| disk.endpoint == endpoint)?;
        let range = self.disk_range(n)?;
        let domain = self.attached.get(&endpoint).filter(|(_, bypass)| !bypass);
        let mapped = domain.map(|&(domain, _)| domain).filter(|&domain| {
            let (phys, flags) = (range.first().0, MapFlags::READ | MapFlags::WRITE);
            self.own_request(Request::Map(MapRequest { domain, range, phys, flags }))
        });
        // Nothing is reached without a domain, unless the device says that it then lets through all.
        let mut bypass = [0];
        let reaches = self.attached.contains_key(&endpoint)
            || self.read_config(BYPASS, &mut bypass).is_err()
            || bypass != [0];
        let timeout = self.target.timeout / ACCESS_DIVISOR;
        let timeout = if reaches { timeout } else { timeout.min(NOTHING) };
        let result = self.disks[n].access(iova, write, bytes, timeout);
        if let Some(domain) = mapped {
            self.own_request(Request::Unmap(UnmapRequest { domain, range }));
        }
        self.expects_event |= result.is_err() && !self.posted.is_empty();
        Some(result)
    }

    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        let Some(ring) = &mut self.events else { return Some(Err(Failed::Timeout)) };
        let Some(token) = self.free.pop_front() else {
            return Some(Err(broken("no room for another event buffer")));
        };
        let len = len.min(EVENT_ROOM);
        let at = self.own + EVENTS + token as usize * EVENT_ROOM;
        let desc = Desc::writable(self.ram.gpa() + at as u64, len as u32);
        self.posted.insert(token, len);
        self.memory.write(at, &[0; EVENT_ROOM]);
        Some(ring.submit(&[desc], token))
    }

    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        let Some(ring) = &mut self.events else { return Ok(None) };
        let expected = std::mem::take(&mut self.expects_event);
        let timeout = if expected { self.target.timeout } else { EVENT };
        let Some(used) = ring.wait(timeout)? else { return Ok(None) };
        let len = self.posted.remove(&used.token).unwrap_or(0);
        let mut bytes = vec![0; len];
        self.memory.read(self.own + EVENTS + used.token as usize * EVENT_ROOM, &mut bytes);
        self.free.push_back(used.token);
        Ok(Some(Event { used: used.len, bytes }))
    }
}
