//! A virtual machine without a guest: its memory, a driver of the IOMMU and drivers of disks.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_dma::Segment;
use ringfence_drivers::blk::{DriverQueue, QueueLayout};
use ringfence_iommu::{Iova, Range};
use ringfence_mem::{GuestRam, Window};
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::{Frontend, FrontendError, ProtocolFeatures, RingAddresses};
use ringfence_virtio_iommu::wire::{
    AttachFlags, FAULT_LEN, FaultRecord, Features, MAX_REQUEST_LEN, MapFlags, MapRequest, Request,
    Status, TAIL_LEN, UnmapRequest, parse_tail,
};
use ringfence_virtq::{Desc, blk::Kind, driver, layout};

use crate::common::{LIMIT, Place, Running};

pub(crate) const LONG: Duration = LIMIT;
pub(crate) const PAGE: u64 = 4096;
/// VERSION_1, INDIRECT_DESC, EVENT_IDX and ACCESS_PLATFORM.
pub(crate) const PLAIN: u64 = 1 << 32 | 1 << 28 | 1 << 29;
pub(crate) const PLATFORM: u64 = 1 << 33;
/// The first address of every machine's memory.
pub(crate) const BASE: u64 = 2 << 20;
/// Descriptors of a ring of the IOMMU.
const RING: u16 = 8;
/// Room for a request and its reply.
const SLOT: usize = 1024;
/// Most requests of a disk in flight.
const DEPTH: u16 = 4;

/// `ringfence guard`, listening, with its metrics at `m`.
pub(crate) fn started(place: &Place, arguments: &[&str]) -> Running {
    let fixed = ["guard", "--iommu", "i", "--memory", "16M", "--metrics", "unix:m"];
    let mut running = place.start(&[&fixed[..], arguments].concat());
    running.wait_for(|line| line.contains("QEMU's arguments"));
    running
}

/// The metrics as served.
pub(crate) fn figures(place: &Place) -> String {
    let mut stream = UnixStream::connect(place.path("m")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A metric with exactly this name and label.
pub(crate) fn figure(text: &str, name: &str) -> u64 {
    let name = format!("ringfence_{name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name}in {text}")).parse().unwrap()
}

/// Waits for something that another thread of the service does.
pub(crate) fn wait_until(mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < LONG, "it does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The memory of a machine.
pub(crate) fn memory() -> Arc<GuestRam> {
    GuestRam::new(1 << 20, BASE).unwrap()
}

fn connected(socket: &Path) -> Frontend {
    Frontend::new(UnixStream::connect(socket).unwrap(), LONG)
}

/// A ring of the IOMMU, with slots for its buffers.
struct Ring {
    queue: driver::Queue,
    addresses: RingAddresses,
    kick: OwnedFd,
    call: OwnedFd,
    slots: Window,
    slots_at: u64,
}

impl Ring {
    fn new(ram: &Arc<GuestRam>) -> Ring {
        let areas = layout::offsets(RING);
        let at = ram.carve(areas.len, PAGE as usize).unwrap();
        let window = ram.window(at, areas.len).unwrap();
        let rings = driver::Rings::in_window(&window, RING).unwrap();
        let queue = driver::Queue::new(RING, rings, false).unwrap();
        let user = ram.user_addr() + at as u64;
        let addresses = RingAddresses {
            desc: user,
            avail: user + areas.avail as u64,
            used: user + areas.used as u64,
            log: None,
        };
        let bytes = SLOT * usize::from(RING);
        let slots_at = ram.carve(bytes, PAGE as usize).unwrap();
        let slots = ram.window(slots_at, bytes).unwrap();
        let [kick, call] = [(); 2].map(|()| event::new().unwrap());
        Ring { queue, addresses, kick, call, slots, slots_at: ram.gpa() + slots_at as u64 }
    }

    fn start(&self, main: &mut Frontend, index: u16, base: u32) {
        main.set_vring_num(index, RING).unwrap();
        main.set_vring_base(index, base).unwrap();
        main.set_vring_addr(index, &self.addresses).unwrap();
        main.set_vring_call(index, Some(self.call.as_fd())).unwrap();
        main.set_vring_kick(index, Some(self.kick.as_fd())).unwrap();
        main.set_vring_enable(index, true).unwrap();
    }

    fn publish(&mut self) {
        self.queue.publish();
        event::signal(&self.kick);
    }

    /// The next completed buffer: its token and its length.
    fn next(&mut self) -> (u64, u32) {
        let mut next = None;
        wait_until(|| {
            next = self.queue.pop().unwrap();
            next.is_some()
        });
        next.map(|used| (used.token, used.len)).unwrap()
    }
}

/// A driver of the IOMMU.
pub(crate) struct Iommu {
    pub(crate) main: Frontend,
    ram: Arc<GuestRam>,
    requests: Ring,
    events: Ring,
}

impl Iommu {
    /// Connects; the rings are not started, as while firmware runs.
    pub(crate) fn connect(place: &Place, ram: &Arc<GuestRam>) -> Iommu {
        let mut main = connected(&place.path("i"));
        // Like QEMU, which passes call descriptors before it shares memory.
        let (requests, events) = (Ring::new(ram), Ring::new(ram));
        let features = Features::all().difference(Features::BYPASS).bits() | 1 << 32;
        let protocol =
            ProtocolFeatures::CONFIG | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::RESET_DEVICE;
        assert_eq!(main.negotiate(features, protocol).unwrap() >> 32, 1);
        main.set_vring_call(0, Some(requests.call.as_fd())).unwrap();
        Iommu { main, ram: Arc::clone(ram), requests, events }
    }

    /// The same, and starts a driver.
    pub(crate) fn begin(place: &Place, ram: &Arc<GuestRam>) -> Iommu {
        let mut iommu = Iommu::connect(place, ram);
        iommu.start(0);
        iommu
    }

    /// Starts the rings, the request ring at `base`.
    pub(crate) fn start(&mut self, base: u32) {
        self.main.set_mem_table(&[(self.ram.region(), self.ram.fd())]).unwrap();
        if base == 0 {
            (self.requests, self.events) = (Ring::new(&self.ram), Ring::new(&self.ram));
        }
        self.requests.start(&mut self.main, 0, base);
        self.events.start(&mut self.main, 1, 0);
        for slot in 0..u64::from(RING) * u64::from(base == 0) {
            let at = self.events.slots_at + slot * SLOT as u64;
            self.events.queue.add(&[Desc::writable(at, FAULT_LEN as u32)], slot).unwrap();
        }
        self.events.publish();
    }

    /// Stops the rings, as QEMU does when the machine is paused or reset; returns the position of
    /// the request ring.
    pub(crate) fn stop(&mut self) -> u32 {
        self.main.get_vring_base(1).unwrap();
        self.main.get_vring_base(0).unwrap()
    }

    pub(crate) fn request(&mut self, request: Request) -> Status {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        self.requests.slots.write(0, &bytes[..len]);
        let at = self.requests.slots_at;
        let reply = Desc::writable(at + SLOT as u64 / 2, TAIL_LEN as u32);
        self.requests.queue.add(&[Desc::readable(at, len as u32), reply], 0).unwrap();
        self.requests.publish();
        assert_eq!(self.requests.next(), (0, TAIL_LEN as u32));
        let mut tail = [0; TAIL_LEN];
        self.requests.slots.read(SLOT / 2, &mut tail);
        parse_tail(tail).unwrap()
    }

    pub(crate) fn attach(&mut self, domain: u32, endpoint: u32) {
        let flags = AttachFlags::empty();
        assert_eq!(self.request(Request::Attach { domain, endpoint, flags }), Status::Ok);
    }

    pub(crate) fn bypass(&mut self, domain: u32, endpoint: u32) -> Status {
        self.request(Request::Attach { domain, endpoint, flags: AttachFlags::BYPASS })
    }

    pub(crate) fn map(&mut self, domain: u32, iova: u64, phys: u64, len: u64, flags: MapFlags) {
        let range = Range::new(Iova(iova), Iova(iova + len - 1)).unwrap();
        assert_eq!(
            self.request(Request::Map(MapRequest { domain, range, phys, flags })),
            Status::Ok
        );
    }

    pub(crate) fn unmap(&mut self, domain: u32, iova: u64, len: u64) {
        let range = Range::new(Iova(iova), Iova(iova + len - 1)).unwrap();
        assert_eq!(self.request(Request::Unmap(UnmapRequest { domain, range })), Status::Ok);
    }

    /// The next fault that is reported.
    pub(crate) fn fault(&mut self) -> FaultRecord {
        let (slot, len) = self.events.next();
        assert_eq!(len as usize, FAULT_LEN);
        let mut record = [0; FAULT_LEN];
        self.events.slots.read(slot as usize * SLOT, &mut record);
        let at = self.events.slots_at + slot * SLOT as u64;
        self.events.queue.add(&[Desc::writable(at, FAULT_LEN as u32)], slot).unwrap();
        self.events.publish();
        FaultRecord::parse(&record).unwrap()
    }

    /// Whether no fault was reported.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.events.queue.pop().unwrap().is_none()
    }
}

/// A disk and its driver.
pub(crate) struct Disk {
    pub(crate) main: Frontend,
    ram: Arc<GuestRam>,
    layout: QueueLayout,
    /// The ring's address in the machine's memory.
    pub(crate) ring: u64,
    pub(crate) ring_bytes: u64,
    /// A page of the memory for data.
    pub(crate) page: u64,
    data: Window,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
    driver: Option<DriverQueue>,
}

impl Disk {
    pub(crate) fn connect(place: &Place, socket: &str, ram: &Arc<GuestRam>) -> Disk {
        Disk::with(place, socket, ram, PLAIN | PLATFORM).unwrap()
    }

    pub(crate) fn with(
        place: &Place,
        socket: &str,
        ram: &Arc<GuestRam>,
        features: u64,
    ) -> Result<Disk, FrontendError> {
        let mut main = connected(&place.path(socket));
        main.negotiate(features, ProtocolFeatures::CONFIG | ProtocolFeatures::REPLY_ACK)?;
        main.set_mem_table(&[(ram.region(), ram.fd())])?;
        let layout = QueueLayout::new(DEPTH, 2);
        let bytes = layout.bytes().next_multiple_of(PAGE as usize);
        let ring = ram.carve(bytes, PAGE as usize).unwrap();
        let page = ram.carve(PAGE as usize, PAGE as usize).unwrap();
        let [kick, call] = [(); 2].map(|()| Arc::new(event::new().unwrap()));
        Ok(Disk {
            main,
            ram: Arc::clone(ram),
            layout,
            ring: ram.gpa() + ring as u64,
            ring_bytes: bytes as u64,
            page: ram.gpa() + page as u64,
            data: ram.window(page, PAGE as usize).unwrap(),
            kick,
            call,
            driver: None,
        })
    }

    /// Starts the queue; the device finds its ring at `at`.
    pub(crate) fn start(&mut self, at: u64) -> Result<(), FrontendError> {
        let offset = (self.ring - self.ram.gpa()) as usize;
        let memory = self.ram.window(offset, self.layout.bytes()).unwrap();
        memory.slice().fill_zero();
        let [kick, call] = [&self.kick, &self.call].map(Arc::clone);
        let driver = DriverQueue::new(self.layout, &memory, at, kick, call, Notify::Sleep);
        self.driver = Some(driver.unwrap());
        let main = &mut self.main;
        main.set_vring_num(0, DEPTH)?;
        main.set_vring_base(0, 0)?;
        let addresses = RingAddresses {
            desc: at,
            avail: at + self.layout.avail_at() as u64,
            used: at + self.layout.used_at() as u64,
            log: None,
        };
        main.set_vring_addr(0, &addresses)?;
        main.set_vring_call(0, Some(self.call.as_fd()))?;
        main.set_vring_kick(0, Some(self.kick.as_fd()))?;
        main.set_vring_enable(0, true)
    }

    /// Maps the ring and the page of data one to one in a domain of their own, and starts.
    pub(crate) fn start_in(&mut self, iommu: &mut Iommu, domain: u32, endpoint: u32) {
        iommu.attach(domain, endpoint);
        let all = MapFlags::READ | MapFlags::WRITE;
        iommu.map(domain, self.ring, self.ring, self.ring_bytes, all);
        iommu.map(domain, self.page, self.page, PAGE, all);
        self.start(self.ring).unwrap();
    }

    /// Starts, with a ring that the device cannot access.
    pub(crate) fn starts_away(&mut self, place: &Place, queue: &str) {
        let name = format!("ring_away_total{{queue=\"{queue}\"}}");
        let before = figure(&figures(place), &name);
        self.start(self.ring).unwrap();
        wait_until(|| figure(&figures(place), &name) > before);
    }

    pub(crate) fn stop(&mut self) {
        self.main.get_vring_base(0).unwrap();
    }

    /// Reads or writes a sector, with data at an address of the bus; returns whether the device
    /// succeeded.
    pub(crate) fn does(&mut self, kind: Kind, sector: u64, at: u64) -> bool {
        let driver = self.driver.as_mut().unwrap();
        driver.submit(kind, sector, &[Segment { addr: at, len: 512 }], 1).unwrap();
        driver.publish();
        let begun = Instant::now();
        loop {
            if let Some(done) = driver.reap().unwrap() {
                return done.ok;
            }
            assert!(begun.elapsed() < LONG, "no completion");
            driver.wait(Duration::from_millis(20));
        }
    }

    /// Writes a sector of `byte` and reads it back, with data at `at`, which is mapped to the page.
    pub(crate) fn works(&mut self, byte: u8, at: u64) -> bool {
        self.data.write(0, &[byte; 512]);
        if !self.does(Kind::Out, 3, at) {
            return false;
        }
        self.data.write(0, &[!byte; 512]);
        let mut back = [0; 512];
        assert!(self.does(Kind::In, 3, at));
        self.data.read(0, &mut back);
        assert_eq!(back, [byte; 512]);
        true
    }

    /// The first bytes of the page.
    pub(crate) fn bytes(&self) -> [u8; 512] {
        let mut bytes = [0; 512];
        self.data.read(0, &mut bytes);
        bytes
    }
}
