//! A VMM of rust-vmm with a virtio-iommu of ours, its guest's driver, and devices behind it.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use ringfence_devices::iommu::Endpoints;
use ringfence_iommu::{
    Geometry, Iova, PageSizes, Range, ReservedKind, ReservedRegion, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_mem::{Access, Translate};
use ringfence_run::worker::Notify;
use ringfence_rust_vmm::GuestBus;
use ringfence_rust_vmm::{FailureScope, IotlbAddressSpace};
use ringfence_rust_vmm::{VmmIommu, VmmIommuError};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    kit::{Event, Failed, Refused, Subject},
    wire::{EVENT_QUEUE, Features, MAX_REQUEST_LEN, REQUEST_QUEUE, Request, TAIL_LEN},
};
use ringfence_virtq::{
    Desc, F_EVENT_IDX, F_VERSION_1,
    driver::{Queue as Front, Rings},
    layout,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryLoadGuard,
    GuestMemoryMmap, bitmap::AtomicBitmap,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) type Map = GuestMemoryMmap<AtomicBitmap>;

/// Runs when the device has looked up the memory map.
type Then = Box<dyn FnOnce() + Send>;

/// Guest memory of a VMM, which can change right after the device has looked it up.
#[derive(Clone)]
pub(crate) struct Guest {
    memory: GuestMemoryAtomic<Map>,
    then: Arc<Mutex<Option<Then>>>,
}

impl Guest {
    fn new(map: Map) -> Guest {
        Guest { memory: GuestMemoryAtomic::new(map), then: Arc::default() }
    }

    /// Replaces the map.
    pub(crate) fn replace(&self, map: Map) {
        self.memory.lock().unwrap().replace(map);
    }

    /// Runs `then` on the device's thread, once it has looked up the current map.
    pub(crate) fn then(&self, then: impl FnOnce() + Send + 'static) {
        *self.then.lock() = Some(Box::new(then));
    }
}

impl GuestAddressSpace for Guest {
    type M = Map;
    type T = GuestMemoryLoadGuard<Map>;

    fn memory(&self) -> Self::T {
        let seen = self.memory.memory();
        if std::thread::current().name() == Some("iommu") {
            // `then` may look up the memory itself.
            let then = self.then.lock().take();
            then.into_iter().for_each(|then| then());
        }
        seen
    }
}

/// The beginning of guest memory: no device has anything below it.
pub(crate) const BASE: u64 = 0x10_0000;
/// The size of the part that the kit uses.
const KIT: u64 = 32 << 12;
const RINGS: [u64; 2] = [BASE + KIT, BASE + KIT + 0x2000];
/// Requests and their replies; a test may choose the place.
pub(crate) const REQUESTS: u64 = RINGS[1] + 0x2000;
const REPLY: u64 = 0x1000;
const EVENTS: u64 = REQUESTS + 0x8000;
pub(crate) const BYTES: u64 = 0x10_0000;
pub(crate) const SIZE: u16 = 64;
/// Longer than any completion takes on a busy machine; a test that waits so long has failed.
const LONG: Duration = Duration::from_secs(120);

/// The driver's end of a queue.
pub(crate) struct Line {
    pub(crate) front: Front,
    pub(crate) kick: EventFd,
    irq: EventFd,
}

impl Line {
    /// Waits for an interrupt, and takes the next completion.
    pub(crate) fn wait(&mut self) -> Result<ringfence_virtq::driver::Used, Failed> {
        let begun = Instant::now();
        loop {
            if let Some(used) = self.front.pop().map_err(failed)? {
                return Ok(used);
            }
            // Enabled before the last check.
            if self.front.enable_notifications() {
                continue;
            }
            while self.irq.read().is_err() {
                if begun.elapsed() > LONG {
                    return Err(Failed::Timeout);
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    pub(crate) fn submit(&mut self, descs: &[Desc], token: u64) -> Result<(), Failed> {
        self.front.add(descs, token).map_err(failed)?;
        self.front.publish();
        if self.front.needs_kick() {
            self.kick.write(1).map_err(failed)?;
        }
        Ok(())
    }
}

pub(crate) struct Vmm {
    pub(crate) memory: Guest,
    pub(crate) iommu: VmmIommu<Guest>,
    /// The devices behind it.
    devices: HashMap<u32, IotlbAddressSpace<Guest>>,
    pub(crate) lines: Vec<Line>,
    /// Where requests are written.
    pub(crate) requests_at: u64,
    posted: HashMap<u64, usize>,
}

pub(crate) fn failed(error: impl Display) -> Failed {
    Failed::Broken(error.to_string().into())
}

impl Vmm {
    /// With endpoints 1 and 8, the latter with reserved regions.
    pub(crate) fn new(notify: Notify) -> Vmm {
        let memory = Map::from_ranges(&[(GuestAddress(BASE), BYTES as usize)]).unwrap();
        let memory = Guest::new(memory);
        let shootdown = Shootdown::new(8);
        let range = |first, last| Range::new(Iova(first), Iova(last)).unwrap();
        let input_range = range(0x1000, (1 << 40) - 1);
        let geometry = Geometry::new(PageSizes::X86, input_range);
        let endpoints = Endpoints::new([], Arc::clone(&shootdown), geometry, Limits::NONE);
        let region = |first, last, kind| ReservedRegion { range: range(first, last), kind };
        let reserved = [
            region(0xfee0_0000, 0xfeef_ffff, ReservedKind::Msi),
            region(0x8000_0000, 0x8000_ffff, ReservedKind::Reserved),
        ];
        let mut devices = HashMap::new();
        for (id, reserved) in [(1, &[][..]), (8, &reserved[..])] {
            let endpoint = Endpoint::new(id, Arc::clone(&shootdown), Binding::Blocked);
            endpoints.add(Arc::clone(&endpoint), reserved).unwrap();
            let scope = FailureScope::Guard;
            let device = IotlbAddressSpace::with_scope(endpoint, memory.clone(), scope);
            devices.insert(id, device.unwrap());
        }
        let options =
            DeviceConfig { input_range, domain_range: (1, 64), ..DeviceConfig::default() };
        let iommu = VmmIommu::new(Arc::new(endpoints), options, notify).unwrap();
        let (lines, posted) = (Vec::new(), HashMap::new());
        Vmm { memory, iommu, devices, lines, requests_at: REQUESTS, posted }
    }

    /// The transport's queue for a ring that the driver has set up at `ring`.
    pub(crate) fn queue(ring: u64, event_idx: bool) -> Queue {
        let mut queue = Queue::new(VmmIommu::<Guest>::QUEUE_MAX_SIZES[0]).unwrap();
        queue.set_size(SIZE);
        let at = layout::offsets(SIZE);
        let place = |offset: usize| GuestAddress(ring + offset as u64);
        queue.try_set_desc_table_address(place(at.desc)).unwrap();
        queue.try_set_avail_ring_address(place(at.avail)).unwrap();
        queue.try_set_used_ring_address(place(at.used)).unwrap();
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        queue
    }

    /// The guest's driver sets its queues up, and sets DRIVER_OK.
    pub(crate) fn bring_up(&mut self, features: u64) -> Result<(), VmmIommuError> {
        let event_idx = features & F_EVENT_IDX != 0;
        self.iommu.local().ack_features(features | F_VERSION_1)?;
        let bus = GuestBus::new(self.memory.memory()).unwrap();
        self.lines = RINGS
            .iter()
            .map(|&ring| {
                let window = bus.window(ring, 0x2000, Access::ReadWrite).unwrap();
                let rings = Rings::in_window(&window, SIZE).unwrap();
                let front = Front::new(SIZE, rings, event_idx).unwrap();
                let event = || EventFd::new(EFD_NONBLOCK).unwrap();
                Line { front, kick: event(), irq: event() }
            })
            .collect();
        self.activate(RINGS.map(|ring| Vmm::queue(ring, event_idx)).into_iter().enumerate())
    }

    pub(crate) fn activate(
        &mut self,
        queues: impl Iterator<Item = (usize, Queue)>,
    ) -> Result<(), VmmIommuError> {
        let kicked = |(index, queue): (usize, Queue)| {
            (index, queue, self.lines[index].kick.try_clone().unwrap())
        };
        let queues = queues.map(kicked).collect();
        let irqs: Vec<EventFd> =
            self.lines.iter().map(|line| line.irq.try_clone().unwrap()).collect();
        let interrupt = move |queue: u16| irqs[usize::from(queue)].write(1).unwrap();
        self.iommu.activate(self.memory.clone(), queues, interrupt)
    }

    /// Sends a request; returns its status.
    pub(crate) fn send_request(&mut self, request: Request) -> u8 {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut tail = [0xff; TAIL_LEN];
        assert_eq!(self.send(1 << 20, &bytes[..len], &mut tail).unwrap(), TAIL_LEN as u32);
        tail[0]
    }

    fn send(&mut self, piece: usize, readable: &[u8], writable: &mut [u8]) -> Result<u32, Failed> {
        let memory = self.memory.memory();
        let (request, reply) = (self.requests_at, self.requests_at + REPLY);
        memory.write_slice(readable, GuestAddress(request)).map_err(failed)?;
        memory.write_slice(writable, GuestAddress(reply)).map_err(failed)?;
        let pieces = |from: u64, len: usize, write: bool| {
            (0..len).step_by(piece).map(move |at| {
                let len = piece.min(len - at) as u32;
                Desc { addr: from + at as u64, len, write }
            })
        };
        let readable = pieces(request, readable.len(), false);
        let descs: Vec<_> = readable.chain(pieces(reply, writable.len(), true)).collect();
        let line = &mut self.lines[usize::from(REQUEST_QUEUE)];
        line.submit(&descs, 1)?;
        let used = line.wait()?;
        memory.read_slice(writable, GuestAddress(reply)).map_err(failed)?;
        Ok(used.len)
    }

    /// An access of a device behind the IOMMU.
    pub(crate) fn dma(&self, endpoint: u32, iova: u64, write: bool, bytes: &mut [u8]) -> bool {
        let guard = self.devices[&endpoint].memory();
        let at = GuestAddress(iova);
        let done = if write { guard.write_slice(bytes, at) } else { guard.read_slice(bytes, at) };
        done.is_ok() && guard.check().is_ok()
    }
}

impl Subject for Vmm {
    fn offered(&self) -> u64 {
        self.iommu.local().features() & Features::all().bits()
    }

    fn start(&mut self, features: u64) -> Result<(), Failed> {
        self.posted.clear();
        self.iommu.reset().map_err(failed)?;
        self.bring_up(features).map_err(failed)
    }

    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        self.iommu.local().read_config(offset as u64, out);
        Ok(())
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        self.iommu.local().write_config(offset as u64, data).map_err(failed)
    }

    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        self.send(piece, readable, writable)
    }

    fn endpoints(&self) -> Vec<u32> {
        vec![1, 8]
    }

    fn absent_endpoint(&self) -> u32 {
        77
    }

    fn memory(&self) -> (u64, u64) {
        (BASE, BASE + KIT - 1)
    }

    fn peek(&mut self, address: u64, out: &mut [u8]) {
        self.memory.memory().read_slice(out, GuestAddress(address)).unwrap();
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.memory.memory().write_slice(bytes, GuestAddress(address)).unwrap();
    }

    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        Some(self.dma(endpoint, iova, write, bytes).then_some(()).ok_or(Refused))
    }

    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        let token = self.posted.len() as u64;
        let desc = Desc::writable(EVENTS + token * 64, len.min(64) as u32);
        self.posted.insert(token, len.min(64));
        Some(self.lines[usize::from(EVENT_QUEUE)].submit(&[desc], token))
    }

    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        // A fault is recorded when the access returns. The worker checks between two calls, and has
        // reported by the third what it may.
        (0..3).for_each(|_| _ = self.iommu.local().counters());
        let line = &mut self.lines[usize::from(EVENT_QUEUE)];
        let Some(used) = line.front.pop().map_err(failed)? else { return Ok(None) };
        let mut bytes = vec![0; self.posted[&used.token]];
        self.peek(EVENTS + used.token * 64, &mut bytes);
        Ok(Some(Event { used: used.len, bytes }))
    }

    fn system_reset(&mut self) -> Option<Result<(), Failed>> {
        let stopped = self.iommu.reset().map_err(failed);
        Some(stopped.and_then(|()| self.iommu.local().device().system_reset().map_err(failed)))
    }
}
