//! A back end in this process, and a driver that can write anything into its rings.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ringfence_devices::{
    blk::{Blk, BlkOptions, BlkUnit},
    disk::{Disk, Ram},
    iommu::{self, Endpoints, IommuBackend, IommuOptions},
};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::{
    Domain, FaultReason, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_mem::{GuestRam, Region, Window};
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses, msg::Request};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    driver::{self, Buffers, Driver, EventReceiver, Transport, ViommuDomain},
    wire::{CONFIG_LEN, FaultRecord, IommuConfig},
};
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, blk, driver as ring, layout,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use zerocopy::IntoBytes;

use crate::serving::Serving;

pub(crate) const PAGE: usize = 4096;
/// The endpoint ID of the block device.
pub(crate) const ENDPOINT: u32 = 7;
/// Another endpoint, without a device.
pub(crate) const OTHER_ENDPOINT: u32 = 8;
/// Guest-physical base of the memory.
pub(crate) const GPA: u64 = 1 << 32;
/// Where queue n's page is mapped: `RING_IOVA + n * RING_STRIDE`.
pub(crate) const RING_IOVA: u64 = 0x1000_0000;
const RING_STRIDE: u64 = 0x10_0000;
/// The number of the block device's units.
pub(crate) const BLK_UNIT: u32 = 1;
/// Descriptors of a raw queue.
pub(crate) const SIZE: u16 = 16;
/// The name that the disk gives.
pub(crate) const ID: &str = "hostile";
/// Longer than any reply takes on a busy machine; a test that waits so long has failed.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Where the parts of a raw queue lie in its page.
const HEADER_AT: usize = 2048;
const STATUS_AT: usize = 2064;
/// Where tests may put an indirect table.
pub(crate) const TABLE_AT: usize = 3072;
const NO_STATUS: u8 = 0xee;

/// Waits for something that another thread does.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "this does not come: {what}");
        std::thread::yield_now();
    }
}

pub(crate) fn ram_disk(len: u64) -> Disk {
    let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    Disk::Ram(Arc::new(Ram::map(file.as_fd(), len).unwrap()))
}

/// How many mappings these workers have unmapped: must be 0, whatever front ends do with their
/// memory, because the rings of others would wait meanwhile.
pub(crate) fn unmapped_by(workers: &[Worker]) -> u64 {
    workers.iter().map(|worker| worker.call(|_| ringfence_mem::unmapped_here()).unwrap()).sum()
}

/// How a rig is set up.
pub(crate) struct Setup {
    pub(crate) disk: Disk,
    pub(crate) queues: u16,
    pub(crate) workers: usize,
    pub(crate) notify: Notify,
    /// Whether ACCESS_PLATFORM is negotiated.
    pub(crate) translated: bool,
    /// Whether EVENT_IDX is.
    pub(crate) event_idx: bool,
}

impl Setup {
    pub(crate) fn new(translated: bool) -> Setup {
        Setup {
            disk: ram_disk(1 << 20),
            queues: 2,
            workers: 1,
            notify: Notify::Adaptive,
            translated,
            event_idx: false,
        }
    }
}

/// A device process with a virtio-blk behind a virtio-iommu, and the front ends of both.
pub(crate) struct Rig {
    pub(crate) translated: bool,
    event_idx: bool,
    // In the order of an end: the domain needs the device.
    pub(crate) domain: Arc<ViommuDomain>,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) blk: Frontend,
    pub(crate) iommu: Iommu,
    _blk_serving: Serving,
    pub(crate) workers: Arc<[Worker]>,
    pub(crate) options: BlkOptions,
}

pub(crate) struct Iommu {
    pub(crate) driver: Arc<Driver>,
    pub(crate) front: Frontend,
    events: EventReceiver,
    event_kick: OwnedFd,
    /// Set when the driver need not wait for the device any more.
    pub(crate) given_up: Arc<AtomicBool>,
    _serving: Serving,
}

impl Rig {
    pub(crate) fn new(setup: Setup) -> Rig {
        let Setup { disk, queues, workers, notify, translated, event_idx } = setup;
        let workers: Arc<[Worker]> =
            (0..workers).map(|n| Worker::spawn(&format!("worker-{n}"), notify).unwrap()).collect();
        let shootdown = Shootdown::new(workers.len() * 2);
        let endpoint = Endpoint::new(ENDPOINT, Arc::clone(&shootdown), Binding::Blocked);
        let geometry = Geometry::new(PageSizes::from_granule(4096).unwrap(), Range::ALL);
        let limits = Limits { table_bytes: 16 << 20, mappings: 1 << 16 };
        let page_sizes = geometry.page_sizes;
        let other = Endpoint::new(OTHER_ENDPOINT, Arc::clone(&shootdown), Binding::Blocked);
        let both = [Arc::clone(&endpoint), other];
        let endpoints = Endpoints::new(both, shootdown, geometry, limits);
        let device = DeviceConfig { page_sizes, ..DeviceConfig::default() };
        let iommu_options = IommuOptions { device, unit: 0 };
        let backend =
            iommu::Iommu::new(Arc::new(endpoints), iommu_options, Arc::clone(&workers)).connect();
        let ram = GuestRam::new(1 << 20, GPA).unwrap();
        let iommu = Iommu::start(backend, &ram, notify);
        let domain = iommu.driver.domain().unwrap();
        if translated {
            domain.attach(ENDPOINT).unwrap();
        }
        let endpoint = Some(endpoint);
        let options = BlkOptions { endpoint, unit: BLK_UNIT, ..BlkOptions::new(disk, ID, queues) };
        let (serving, blk) = connect(&options, &workers);
        let mut rig = Rig {
            translated,
            event_idx,
            domain,
            ram,
            blk,
            iommu,
            _blk_serving: serving,
            workers,
            options,
        };
        rig.negotiate();
        rig
    }

    /// Agrees on the features and shares the memory.
    pub(crate) fn negotiate(&mut self) {
        let mut features = F_VERSION_1 | F_INDIRECT_DESC;
        if self.translated {
            features |= F_ACCESS_PLATFORM;
        }
        if self.event_idx {
            features |= F_EVENT_IDX;
        }
        let protocol = ProtocolFeatures::MQ
            | ProtocolFeatures::CONFIG
            | ProtocolFeatures::LOG_SHMFD
            | ProtocolFeatures::RESET_DEVICE;
        assert_eq!(self.blk.negotiate(features, protocol).unwrap(), features);
        self.share(&[]);
    }

    /// Shares the memory and more.
    pub(crate) fn share(&mut self, more: &[(Region, &OwnedFd)]) {
        let mut table = vec![(self.ram.region(), self.ram.fd())];
        table.extend(more.iter().map(|(region, fd)| (*region, fd.as_fd())));
        self.blk.set_mem_table(&table).unwrap();
    }

    /// A new connection to the device, as if the driver's process had been started again.
    pub(crate) fn reconnect(&mut self) {
        let (serving, blk) = connect(&self.options, &self.workers);
        self.blk = blk;
        self._blk_serving = serving;
        self.negotiate();
    }

    /// Sets pages aside; returns the address in guest-physical memory, and the view.
    pub(crate) fn pages(&self, count: usize) -> RamPart {
        RamPart::carve(&self.ram, count * PAGE, PAGE).unwrap()
    }

    pub(crate) fn map(&self, iova: u64, gpa: u64, len: u64, prot: Prot) {
        map(&self.domain, iova, gpa, len, prot);
    }

    /// Unmaps as a strict policy does: when this returns, the device uses the range no more.
    pub(crate) fn unmap(&self, iova: u64, len: u64) {
        unmap(&self.domain, iova, len);
    }

    /// A ring in a page of its own, started and enabled.
    pub(crate) fn queue(&mut self, index: u16) -> RawQueue {
        let part = self.pages(1);
        let user = self.ram.user_addr() + (part.gpa() - self.ram.gpa());
        let mut queue = RawQueue::new(index, part.window().clone(), part.gpa(), user);
        if self.translated {
            queue.bus = RING_IOVA + u64::from(index) * RING_STRIDE;
            queue.addr = queue.bus;
            self.map(queue.bus, part.gpa(), PAGE as u64, Prot::RW);
        }
        queue.start(&mut self.blk, 0);
        queue
    }

    /// Runs `job` on the unit of the worker that serves a queue.
    pub(crate) fn on_unit<R: Send + 'static>(
        &self,
        queue: u16,
        job: impl FnOnce(&mut BlkUnit) -> R + Send + 'static,
    ) -> R {
        let worker = &self.workers[usize::from(queue) % self.workers.len()];
        let done = worker.call(move |work| work.unit::<BlkUnit>(BLK_UNIT).map(job));
        done.expect("the worker is there").expect("the unit is there")
    }

    /// Why a queue has stopped.
    pub(crate) fn failure(&self, queue: u16) -> Option<String> {
        self.on_unit(queue, move |unit| unit.failure(queue).map(|error| error.to_string()))
    }

    /// Has the worker of a queue go through all its queues, and a quiet point, at least once.
    pub(crate) fn round(&self, queue: u16) {
        for _ in 0..2 {
            self.on_unit(queue, |_| ());
        }
    }

    /// Checks that the virtio-iommu completes requests.
    pub(crate) fn iommu_works(&self) {
        self.iommu.driver.probe(ENDPOINT).unwrap();
        let page = 0x7000_0000;
        self.map(page, GPA, PAGE as u64, Prot::READ);
        self.unmap(page, PAGE as u64);
    }

    /// The next fault that is reported for an address.
    pub(crate) fn fault_at(&mut self, addr: u64) -> FaultRecord {
        let mut found = None;
        until("a report of the fault", || {
            self.iommu.poll_events(|record| {
                if record.address == Some(Iova(addr)) {
                    found = Some(record);
                }
            });
            found.is_some()
        });
        let record: FaultRecord = found.unwrap();
        assert_eq!(record.endpoint, ENDPOINT);
        assert_ne!(record.reason, FaultReason::Unknown);
        record
    }
}

fn connect(options: &BlkOptions, workers: &Arc<[Worker]>) -> (Serving, Frontend) {
    let backend = Blk::backend(options.clone(), Arc::clone(workers));
    let (serving, socket) = Serving::start(backend);
    (serving, Frontend::new(socket, LONG))
}

pub(crate) fn map(domain: &ViommuDomain, iova: u64, gpa: u64, len: u64, prot: Prot) {
    let range = Range::from_len(Iova(iova), len).unwrap();
    domain.map(Map::new(range, GuestPhys(gpa), prot)).unwrap();
    domain.iotlb_sync_map(range).unwrap();
}

pub(crate) fn unmap(domain: &ViommuDomain, iova: u64, len: u64) {
    let mut gather = Gather::new();
    let range = Range::from_len(Iova(iova), len).unwrap();
    assert_eq!(domain.unmap(range, &mut gather).unwrap(), u128::from(len));
    domain.iotlb_sync(&mut gather).unwrap();
}

/// The virtio-iommu's notifications.
struct Events {
    kick: OwnedFd,
    call: OwnedFd,
    given_up: Arc<AtomicBool>,
}

impl Transport for Events {
    fn kick(&self, _: u16) {
        event::signal(&self.kick);
    }

    fn wait(&self, _: u16, timeout: Duration) {
        wait_for(&self.call, timeout);
    }

    fn is_alive(&self) -> bool {
        !self.given_up.load(Ordering::Relaxed)
    }
}

/// Waits until an event is signalled, and takes it.
pub(crate) fn wait_for(event: &OwnedFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(event, PollFlags::IN)];
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    let woken = poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0);
    if woken {
        event::drain(event);
    }
    woken
}

/// A ring of the virtio-iommu in guest memory.
fn iommu_ring(
    front: &mut Frontend,
    ram: &Arc<GuestRam>,
    index: u16,
    size: u16,
    kick: &OwnedFd,
    call: Option<&OwnedFd>,
) -> ring::Queue {
    let at = layout::offsets(size);
    let part = RamPart::carve(ram, at.len, PAGE).unwrap();
    let rings = ring::Rings::in_window(part.window(), size).unwrap();
    let queue = ring::Queue::new(size, rings, true).unwrap();
    let user = ram.user_addr() + (part.gpa() - ram.gpa());
    let addresses = RingAddresses {
        desc: user,
        avail: user + at.avail as u64,
        used: user + at.used as u64,
        log: None,
    };
    front.set_vring_num(index, size).unwrap();
    front.set_vring_base(index, 0).unwrap();
    front.set_vring_addr(index, &addresses).unwrap();
    front.set_vring_call(index, call.map(AsFd::as_fd)).unwrap();
    front.set_vring_kick(index, Some(kick.as_fd())).unwrap();
    front.set_vring_enable(index, true).unwrap();
    queue
}

impl Iommu {
    fn start(backend: IommuBackend, ram: &Arc<GuestRam>, notify: Notify) -> Iommu {
        let (serving, socket) = Serving::start(backend);
        let mut front = Frontend::new(socket, LONG);
        let offer = F_VERSION_1 | F_EVENT_IDX | driver::negotiate(u64::MAX).bits();
        let protocol = ProtocolFeatures::CONFIG | ProtocolFeatures::RESET_DEVICE;
        let agreed = front.negotiate(offer, protocol).unwrap();
        front.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let mut config = [0; CONFIG_LEN];
        front.config(0, &mut config).unwrap();
        let config = IommuConfig::parse(&config).unwrap();
        let given_up = Arc::new(AtomicBool::new(false));
        let events = Events {
            kick: event::new().unwrap(),
            call: event::new().unwrap(),
            given_up: Arc::clone(&given_up),
        };
        let queue = iommu_ring(&mut front, ram, 0, 64, &events.kick, Some(&events.call));
        let memory = RamPart::carve(ram, Driver::buffer_bytes(64, &config), PAGE).unwrap();
        let buffers = Buffers { window: memory.window().clone(), addr: memory.gpa() };
        let notify = match notify {
            Notify::Adaptive => driver::Notify::default(),
            Notify::Poll => driver::Notify::Poll,
            Notify::Sleep => driver::Notify::Sleep,
        };
        let options = driver::DriverConfig { notify, timeout: Some(LONG) };
        let driver = Driver::new(
            Arc::new(events),
            queue,
            buffers,
            config,
            driver::negotiate(agreed),
            options,
        )
        .unwrap();

        let event_kick = event::new().unwrap();
        let queue = iommu_ring(&mut front, ram, 1, 16, &event_kick, None);
        let memory = RamPart::carve(ram, EventReceiver::buffer_bytes(16), PAGE).unwrap();
        let events = EventReceiver::new(queue, memory.window().clone(), memory.gpa());
        event::signal(&event_kick);
        Iommu { driver, front, events, event_kick, given_up, _serving: serving }
    }

    pub(crate) fn poll_events(&mut self, each: impl FnMut(FaultRecord)) {
        if self.events.poll(each).unwrap() {
            event::signal(&self.event_kick);
        }
    }
}

/// A piece of data as a descriptor names it.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

pub(crate) fn piece(addr: u64, len: usize) -> Piece {
    Piece { addr, len: len as u32 }
}

/// A queue in which the test controls every byte.
pub(crate) struct RawQueue {
    pub(crate) index: u16,
    pub(crate) page: Window,
    /// The address of the page in descriptors.
    pub(crate) bus: u64,
    /// The address in SET_VRING_ADDR.
    pub(crate) addr: u64,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) err: OwnedFd,
    avail: u16,
    taken: u16,
}

impl RawQueue {
    pub(crate) fn new(index: u16, page: Window, bus: u64, addr: u64) -> RawQueue {
        page.slice().fill_zero();
        let [kick, call, err] = [(); 3].map(|()| event::new().unwrap());
        RawQueue { index, page, bus, addr, kick, call, err, avail: 0, taken: 0 }
    }

    pub(crate) fn addresses(&self) -> RingAddresses {
        let at = layout::offsets(SIZE);
        RingAddresses {
            desc: self.addr,
            avail: self.addr + at.avail as u64,
            used: self.addr + at.used as u64,
            log: None,
        }
    }

    /// Describes the ring, starts and enables it.
    pub(crate) fn start(&self, front: &mut Frontend, base: u16) {
        self.start_disabled(front, base);
        front.set_vring_enable(self.index, true).unwrap();
    }

    pub(crate) fn start_disabled(&self, front: &mut Frontend, base: u16) {
        let index = self.index;
        front.set_vring_num(index, SIZE).unwrap();
        front.set_vring_base(index, base.into()).unwrap();
        front.set_vring_addr(index, &self.addresses()).unwrap();
        front.set_vring_call(index, Some(self.call.as_fd())).unwrap();
        let err = Request::SetVringErr { ring: index.try_into().unwrap(), fd: true };
        front.request(err, &[self.err.as_fd()]).unwrap();
        front.set_vring_kick(index, Some(self.kick.as_fd())).unwrap();
    }

    /// Resets the ring to zeroed memory: start it again afterwards.
    pub(crate) fn clear(&mut self) {
        self.page.slice().fill_zero();
        (self.avail, self.taken) = (0, 0);
    }

    /// After [`clear`](Self::clear): goes on as if `index` requests had been completed.
    pub(crate) fn resume_at(&mut self, index: u16) {
        (self.avail, self.taken) = (index, index);
        let at = layout::offsets(SIZE);
        self.page.write(at.avail + layout::IDX, &index.to_le_bytes());
        self.page.write(at.used + layout::IDX, &index.to_le_bytes());
    }

    /// Writes a descriptor into the table.
    pub(crate) fn desc(&self, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.page.write(usize::from(at) * 16, &desc_bytes(addr, len, flags, next));
    }

    /// Makes a chain available.
    pub(crate) fn push(&mut self, head: u16) {
        let avail = layout::offsets(SIZE).avail;
        let entry = avail + layout::RING + 2 * usize::from(self.avail % SIZE);
        self.page.write(entry, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
        self.set_avail(self.avail);
    }

    pub(crate) fn set_avail(&self, index: u16) {
        let at = layout::offsets(SIZE).avail + layout::IDX;
        self.page.u16_at(at).store(index.to_le(), Ordering::Release);
        event::signal(&self.kick);
    }

    pub(crate) fn used_index(&self) -> u16 {
        let at = layout::offsets(SIZE).used + layout::IDX;
        u16::from_le(self.page.u16_at(at).load(Ordering::Acquire))
    }

    /// The next used element: head and length.
    pub(crate) fn take(&mut self) -> Option<(u32, u32)> {
        if self.used_index() == self.taken {
            return None;
        }
        let entry = layout::offsets(SIZE).used + layout::RING + 8 * usize::from(self.taken % SIZE);
        self.taken = self.taken.wrapping_add(1);
        let word = |at| u32::from_le(self.page.u32_at(at).load(Ordering::Relaxed));
        Some((word(entry), word(entry + 4)))
    }

    pub(crate) fn wait(&mut self) -> (u32, u32) {
        let mut found = None;
        until("a completion in the ring", || {
            found = self.take();
            found.is_some()
        });
        found.unwrap()
    }

    /// Lays a request out from descriptor 0 on, without making it available.
    pub(crate) fn lay(&self, kind: blk::Kind, sector: u64, data: &[Piece]) {
        let header =
            blk::Header { kind: kind.code().into(), reserved: 0.into(), sector: sector.into() };
        self.page.write(HEADER_AT, header.as_bytes());
        self.page.write(STATUS_AT, &[NO_STATUS]);
        let next = layout::DESC_F_NEXT;
        let write = match kind {
            blk::Kind::In | blk::Kind::GetId => layout::DESC_F_WRITE,
            _ => 0,
        };
        self.desc(0, self.bus + HEADER_AT as u64, 16, next, 1);
        for (at, piece) in (1..).zip(data) {
            self.desc(at, piece.addr, piece.len, next | write, at + 1);
        }
        let last = data.len() as u16 + 1;
        self.desc(last, self.bus + STATUS_AT as u64, 1, layout::DESC_F_WRITE, 0);
    }

    /// Submits a request, without waiting.
    pub(crate) fn submit(&mut self, kind: blk::Kind, sector: u64, data: &[Piece]) {
        self.lay(kind, sector, data);
        self.push(0);
    }

    /// Waits for the request; returns its status, `None` if the device could not write any.
    pub(crate) fn finish(&mut self) -> Option<u8> {
        let (head, len) = self.wait();
        assert_eq!(head, 0);
        let status = self.status();
        assert_eq!(status == NO_STATUS, len == 0, "status {status}, used length {len}");
        (len > 0).then_some(status)
    }

    pub(crate) fn status(&self) -> u8 {
        let mut status = [0];
        self.page.read(STATUS_AT, &mut status);
        status[0]
    }

    /// Does a request and returns its status.
    pub(crate) fn request(&mut self, kind: blk::Kind, sector: u64, data: &[Piece]) -> Option<u8> {
        self.submit(kind, sector, data);
        self.finish()
    }

    pub(crate) fn read(&mut self, sector: u64, data: Piece) -> Option<u8> {
        self.request(blk::Kind::In, sector, &[data])
    }

    pub(crate) fn write(&mut self, sector: u64, data: Piece) -> Option<u8> {
        self.request(blk::Kind::Out, sector, &[data])
    }

    /// Some requests without data. When they are completed, the worker has been through all its
    /// queues, and through a quiet point, since this was called.
    pub(crate) fn go_round(&mut self) {
        for _ in 0..3 {
            assert_eq!(self.request(blk::Kind::Flush, 0, &[]), OK);
        }
    }

    /// As [`go_round`](Self::go_round) on a disk that cannot flush.
    pub(crate) fn go_round_with(&mut self, page: Piece) {
        for _ in 0..3 {
            assert_eq!(self.request(blk::Kind::GetId, 0, &[page]), OK);
        }
    }
}

pub(crate) const OK: Option<u8> = Some(0);
pub(crate) const IOERR: Option<u8> = Some(1);

/// A descriptor as it lies in memory.
pub(crate) fn desc_bytes(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// Fills a view with a byte.
pub(crate) fn fill(window: &Window, byte: u8) {
    window.write(0, &vec![byte; window.len()]);
}

/// Whether every byte of a view is this one.
pub(crate) fn holds(window: &Window, byte: u8) -> bool {
    let mut bytes = vec![0; window.len()];
    window.read(0, &mut bytes);
    bytes.iter().all(|&b| b == byte)
}
