//! Requests through a worker's step: virtio-blk over a disk in memory, virtio-net as a loop.

use std::{fs::File, hint::black_box, os::fd::AsFd, sync::Arc};

use gungraun::{Callgrind, EntryPoint, prelude::*};
use ringfence_devices::{
    blk::{BlkQueue, BlkServer},
    disk::{Disk, Ram},
    net::{Link, Net, NetEnd, NetOptions, NetUnit, wire as net_wire},
};
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, View};
use ringfence_mem::{GuestRam, Memory};
use ringfence_run::worker::{Notify, Unit, Worker};
use ringfence_vhost_user::{Handler, RingAddresses, RingSetup};
use ringfence_vhost_user_backend::{Backend, Bus};
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM, F_VERSION_1, blk as blk_wire, device,
    driver::{self, Used},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{fixed::mix, rings};

const PAGE: u64 = 4096;
/// Descriptors of a ring.
const SIZE: u16 = 256;
/// Pages before this one hold rings: their IOVA is their address in memory.
const RINGS: u64 = 32;
/// Pages for data, no two of which are contiguous in memory.
const PAGES: u64 = 256;
/// The time, in ns, that the steps are given.
const NOW: u64 = 1_000_000_000;

/// Memory of a driver, and the endpoint by which a device reaches it through an IOTLB that has all of
/// it.
struct Guest {
    ram: Arc<GuestRam>,
    memory: Arc<Memory>,
    endpoint: Arc<Endpoint>,
}

/// Where a page of data lies in memory.
fn place(page: u64) -> u64 {
    (RINGS + page * 89 % PAGES) * PAGE
}

/// Its IOVA.
fn iova(page: u64) -> u64 {
    (RINGS + page) * PAGE
}

impl Guest {
    fn new() -> Guest {
        let ram = GuestRam::new(((RINGS + PAGES) * PAGE) as usize, 0).expect("memory");
        let memory = Memory::of_ram(&ram).expect("memory");
        let shootdown = Shootdown::new(1);
        let iotlb = Iotlb::new(IotlbConfig::default(), Arc::clone(&shootdown));
        let update = |iova: u64, len: u64, target: u64| {
            let range = Range::from_len(Iova(iova), len).expect("far below the end");
            iotlb.update(range, GuestPhys(target), Prot::RW).expect("there is room");
        };
        update(0, RINGS * PAGE, 0);
        (0..PAGES).for_each(|page| update(iova(page), PAGE, place(page)));
        let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(iotlb));
        Guest { ram, memory, endpoint }
    }

    /// The driver's end of the ring at the start of page `page`, and where the device finds it.
    fn ring(&self, page: u64) -> (driver::Queue, RingAddresses) {
        let config = driver::QueueConfig { size: SIZE, event_idx: false, packed: false };
        rings::driver_end(&self.ram, page * PAGE, config)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.ram.slice(at as usize, bytes.len()).expect("memory").copy_from(bytes);
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram.slice(at as usize, N).expect("memory").copy_to(&mut bytes);
        bytes
    }
}

/// The bytes of a block, or of a packet.
fn content<const N: usize>(of: u64) -> [u8; N] {
    std::array::from_fn(|at| mix(of * 1000 + at as u64) as u8)
}

/// Requests that are served, in several rounds.
const REQUESTS: u64 = 8;
const BLOCK: usize = 4096;

/// A block device and its driver.
pub(crate) struct Blk {
    guest: Guest,
    bus: Bus,
    disk: Arc<Ram>,
    driver: driver::Queue,
    queue: BlkQueue,
    write: bool,
    busy: bool,
}

impl Blk {
    fn new(write: bool) -> Box<Blk> {
        let guest = Guest::new();
        let len = REQUESTS * BLOCK as u64;
        let file = File::from(memfd_create("disk", MemfdFlags::CLOEXEC).expect("memory"));
        ftruncate(&file, len).expect("memory");
        let disk = Arc::new(Ram::map(file.as_fd(), len).expect("memory"));
        let view = View::new(Arc::clone(&guest.endpoint), Arc::clone(&guest.memory));
        let bus = Bus::Iommu(Box::new(view.expect("the first view")));
        let (mut driver, RingAddresses { desc, avail, used, .. }) = guest.ring(0);
        driver.suppress_notifications();
        let (event_idx, indirect, packed, base) = (false, true, false, 0);
        let size = SIZE;
        let ring =
            device::RingConfig { size, desc, avail, used, event_idx, indirect, packed, base };
        let ring = device::Queue::new(ring, &bus).expect("a legal ring");
        let id = "gate".into();
        let memory = Disk::Ram(Arc::clone(&disk));
        let serve = BlkServer::new((&memory, false), &id, SIZE, Arc::default());
        let queue = BlkQueue::new(ring, serve.expect("no descriptor is needed"), id, None);
        let mut blk = Box::new(Blk { guest, bus, disk, driver, queue, write, busy: false });
        // From now on the view's caches and the queue's allocations are there.
        blk.submit();
        blk.step();
        blk.finish();
        blk.submit();
        blk
    }

    /// Where request `n` has its data, and its header with its status.
    fn pages(n: u64) -> [u64; 2] {
        [2 * n, 2 * n + 1]
    }

    fn submit(&mut self) {
        let write = self.write;
        let kind = if write { blk_wire::Kind::Out } else { blk_wire::Kind::In };
        for n in 0..REQUESTS {
            let [data, header] = Blk::pages(n);
            let mut bytes = [0; blk_wire::HEADER_BYTES];
            bytes[..4].copy_from_slice(&kind.code().to_le_bytes());
            let sector = n * BLOCK as u64 / blk_wire::SECTOR;
            bytes[8..].copy_from_slice(&sector.to_le_bytes());
            self.guest.write(place(header), &bytes);
            self.guest.write(place(header) + bytes.len() as u64, &[0xff]);
            // One side has the content, the other has not.
            let (block, other) = (content::<BLOCK>(n), [0; BLOCK]);
            self.guest.write(place(data), if write { &block } else { &other });
            let scratch =
                self.guest.ram.slice((RINGS as usize - 1) * BLOCK, BLOCK).expect("memory");
            scratch.copy_from(if write { &other } else { &block });
            self.disk.write(n * BLOCK as u64, scratch);
            let descs = [
                Desc::readable(iova(header), bytes.len() as u32),
                Desc { addr: iova(data), len: BLOCK as u32, write: !write },
                Desc::writable(iova(header) + bytes.len() as u64, 1),
            ];
            self.driver.add(&descs, n).expect("there is room");
        }
        self.driver.publish();
    }

    /// A worker's steps, until it finds nothing.
    fn step(&mut self) {
        self.busy = false;
        let mut poll = || {
            self.bus.quiet();
            self.queue.poll(&self.bus, NOW).expect("the ring is sound")
        };
        while poll() {
            self.busy = true;
        }
    }

    /// All requests were served, and what they moved is where it belongs.
    fn finish(&mut self) {
        assert!(self.busy, "the step has found nothing");
        let mut used = [Used::default(); REQUESTS as usize + 1];
        let count = self.driver.pop_burst(&mut used).expect("the ring is sound");
        let len = if self.write { 1 } else { BLOCK as u32 + 1 };
        let back = used[..count].iter().map(|used| (used.token, used.len));
        assert!(back.eq((0..REQUESTS).map(|n| (n, len))), "requests do not come back");
        for n in 0..REQUESTS {
            let [data, header] = Blk::pages(n);
            let status = place(header) + blk_wire::HEADER_BYTES as u64;
            assert_eq!(self.guest.read::<1>(status), [0], "the status of request {n}");
            let scratch =
                self.guest.ram.slice((RINGS as usize - 1) * BLOCK, BLOCK).expect("memory");
            self.disk.read(n * BLOCK as u64, scratch);
            for at in [place(data), (RINGS - 1) * PAGE] {
                assert_eq!(self.guest.read::<BLOCK>(at), content(n), "the data of request {n}");
            }
        }
    }
}

fn check_blk(mut blk: Box<Blk>) {
    blk.finish();
}

#[library_benchmark]
#[bench::read_4k(args = (false), setup = Blk::new, teardown = check_blk)]
#[bench::write_4k(args = (true), setup = Blk::new, teardown = check_blk)]
fn blk(mut blk: Box<Blk>) -> Box<Blk> {
    blk.step();
    blk
}

/// Packets that a step moves.
const PACKETS: u64 = 32;
/// Bytes of one, without its header.
const PACKET: usize = 64;
const WITH_HEADER: usize = net_wire::HEADER + PACKET;
/// Bytes of a receive buffer.
const BUFFER: u32 = 2048;
/// Receive buffers lie in pages from this one on.
const BUFFERS: u64 = 128;

/// A network device that loops packets back, and its driver.
///
/// The device's rings can only be reached on a worker's thread. So the driver runs there too, in
/// one call: nothing else touches the rings in between.
pub(crate) struct Loop {
    workers: Arc<[Worker]>,
    backend: Backend<NetEnd>,
    driver: Option<NetDriver>,
}

struct NetDriver {
    guest: Guest,
    receive: driver::Queue,
    transmit: driver::Queue,
}

impl Loop {
    fn new() -> Box<Loop> {
        let guest = Guest::new();
        let workers: Arc<[Worker]> =
            [Worker::spawn("gate", Notify::Poll).expect("a thread")].into();
        let options = NetOptions::new("gate", Link::Loopback);
        let net = Net::new(options, Arc::clone(&workers)).expect("descriptors");
        let mut backend = net.connect_behind(0, Arc::clone(&guest.endpoint), None);
        let features = F_VERSION_1 | F_ACCESS_PLATFORM | net_wire::feature::MRG_RXBUF;
        backend.set_features(features).expect("they are offered");
        backend.set_memory(Arc::clone(&guest.memory)).expect("it is mapped");
        let mut start = |ring: u16| {
            let (mut queue, addresses) = guest.ring(u64::from(ring) * RINGS / 2);
            queue.suppress_notifications();
            let setup = RingSetup {
                size: SIZE,
                addresses,
                base: Some(0),
                kick: None,
                enabled: true,
                resumed: false,
            };
            backend.start_ring(ring, setup).expect("a legal ring");
            queue
        };
        let [receive, transmit] = [0, 1].map(&mut start);
        let driver = Some(NetDriver { guest, receive, transmit });
        let mut rig = Box::new(Loop { workers, backend, driver });
        // From now on the view's caches and the unit's allocations are there.
        rig.on_worker(|driver, unit| {
            driver.submit(0);
            unit.quiet();
            assert!(unit.poll(NOW), "the step has found nothing");
            driver.finish(0);
        });
        rig
    }

    /// Runs `job` on the worker's thread.
    fn on_worker(&mut self, job: impl FnOnce(&mut NetDriver, &mut NetUnit) + Send + 'static) {
        let mut driver = self.driver.take().expect("it is always given back");
        let done = self.workers[0].call(move |work| {
            job(&mut driver, work.unit::<NetUnit>(0).expect("it is there"));
            driver
        });
        self.driver = Some(done.expect("the worker has not panicked"));
    }
}

impl NetDriver {
    fn submit(&mut self, lap: u64) {
        for n in 0..PACKETS {
            let mut packet = [0; WITH_HEADER];
            packet[net_wire::HEADER..].copy_from_slice(&content::<PACKET>(lap * PACKETS + n));
            self.guest.write(place(n), &packet);
            self.guest.write(place(BUFFERS + n), &[0; WITH_HEADER]);
            let buffer = Desc::writable(iova(BUFFERS + n), BUFFER);
            self.receive.add(&[buffer], n).expect("there is room");
            let packet = Desc::readable(iova(n), WITH_HEADER as u32);
            self.transmit.add(&[packet], n).expect("there is room");
        }
        self.receive.publish();
        self.transmit.publish();
    }

    /// All packets have come back.
    fn finish(&mut self, lap: u64) {
        for (queue, len) in [(&mut self.transmit, 0), (&mut self.receive, WITH_HEADER as u32)] {
            let mut used = [Used::default(); PACKETS as usize + 1];
            let count = queue.pop_burst(&mut used).expect("the ring is sound");
            let back = used[..count].iter().map(|used| (used.token, used.len));
            assert!(back.eq((0..PACKETS).map(|n| (n, len))), "packets are lost");
        }
        for n in 0..PACKETS {
            let at = place(BUFFERS + n) + net_wire::HEADER as u64;
            let expected = content::<PACKET>(lap * PACKETS + n);
            assert_eq!(self.guest.read::<PACKET>(at), expected, "packet {n}");
        }
    }
}

/// A worker's step. This function is what is counted, as it runs on another thread than the rest.
#[inline(never)]
fn net_step(unit: &mut NetUnit) -> bool {
    unit.quiet();
    unit.poll(NOW)
}

fn stop_net(rig: Box<Loop>) {
    let Loop { backend, workers, .. } = *rig;
    drop(backend);
    drop(workers);
}

#[library_benchmark(
    config = LibraryBenchmarkConfig::default().tool_override(
        Callgrind::with_args(["--cache-sim=no"])
            .entry_point(EntryPoint::Custom("*::net_step".to_owned()))
    )
)]
#[bench::loop_64(setup = Loop::new, teardown = stop_net)]
fn net(mut rig: Box<Loop>) -> Box<Loop> {
    rig.on_worker(|driver, unit| {
        driver.submit(1);
        assert!(black_box(net_step(black_box(unit))), "the step has found nothing");
        driver.finish(1);
    });
    rig
}

library_benchmark_group!(name = worker, benchmarks = [blk, net]);
