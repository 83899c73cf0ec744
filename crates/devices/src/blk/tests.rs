//! How much a round moves, and how much requests under way hold.

use std::{
    fs::File,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ringfence_iommu::{Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink, View};
use ringfence_mem::{GuestRam, Memory, Physical};
use ringfence_vhost_user_backend::{Bus, requests::KEPT};
use ringfence_virtq::{
    Desc,
    blk::{HEADER_BYTES, Kind, SECTOR, Status},
    driver, testing,
};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{BlkQueue, BlkServer};
use crate::disk::{Disk, Image};

const GPA: u64 = 1 << 32;
const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Where a header lies, and a status.
const HEADER: u64 = GPA;
const STATUS: u64 = GPA + PAGE - 1;
/// Where data and tables lie.
const DATA: u64 = GPA + MIB;

/// A front end that takes all misses and sends no updates.
struct Silent;

impl MissSink for Silent {
    fn send(&self, misses: &[Miss]) -> usize {
        misses.len()
    }
}

/// A queue that is polled round by round, and its driver.
struct Rig {
    /// What a silent disk waits for; dropped first, so that a test that fails ends.
    pipe: Option<File>,
    driver: driver::Queue,
    queue: BlkQueue,
    bus: Bus,
    ram: Arc<GuestRam>,
    now_ns: u64,
}

impl Rig {
    /// With `image` as its disk, and `memory` bytes of guest memory.
    fn new(image: Image, ring: u16, memory: u64) -> Rig {
        Rig::of(image, driver::QueueConfig { size: ring, event_idx: false, packed: false }, memory)
    }

    fn of(image: Image, config: driver::QueueConfig, memory: u64) -> Rig {
        let areas = testing::Ram::new(0, 1 << 16);
        let (driver, device) = testing::pair_of(&areas, 0, config);
        let ring = config.size;
        let ram = GuestRam::new(memory as usize, GPA).unwrap();
        let bus = Bus::Physical(Physical::new(Memory::of_ram(&ram).unwrap()));
        let disk = (&Disk::File(Arc::new(image)), false);
        let id = Arc::from("test");
        let serve = BlkServer::new(disk, &id, ring, Arc::default()).unwrap();
        let queue = BlkQueue::new(device, serve, id, None);
        Rig { pipe: None, driver, queue, bus, ram, now_ns: 1 }
    }

    /// With a disk that hangs until its pipe is dropped.
    fn silent(ring: u16) -> Rig {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let rig = Rig::new(Image::new(read, MIB), ring, 8 * MIB);
        Rig { pipe: Some(write.into()), ..rig }
    }

    /// Translates its data through an IOTLB with `pages` pages of it, in reverse order: the nth
    /// page from the end lies at the nth place.
    fn translated(&mut self, pages: u64) -> Arc<Iotlb> {
        let shootdown = Shootdown::new(1);
        let timeout = Duration::from_nanos(1000);
        let config = IotlbConfig { timeout, ..IotlbConfig::default() };
        let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
        iotlb.set_miss_sink(Some(Arc::new(Silent)));
        let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(Arc::clone(&iotlb)));
        let maps = |iova: u64, target: u64, len: u64| {
            let range = Range::from_len(Iova(iova), len).unwrap();
            iotlb.update(range, ringfence_iommu::GuestPhys(target), Prot::RW).unwrap();
        };
        maps(GPA, GPA, MIB);
        (0..pages)
            .for_each(|page| maps(DATA + page * PAGE, DATA + (pages - 1 - page) * PAGE, PAGE));
        let memory = Arc::clone(self.bus.memory());
        self.bus = Bus::Iommu(Box::new(View::new(endpoint, memory).unwrap()));
        iotlb
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.window((at - GPA) as usize, bytes.len()).unwrap().write(0, bytes);
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.ram.window((at - GPA) as usize, 1).unwrap().read(0, &mut byte);
        byte[0]
    }

    fn header(&self, kind: Kind, sector: u64) {
        self.put(HEADER, &[u64::from(kind.code()), sector].map(u64::to_le_bytes).concat());
        self.put(STATUS, &[0xff]);
    }

    /// A read of `data` from the disk's beginning.
    fn reads(&mut self, data: &[Desc], token: u64) {
        self.header(Kind::In, 0);
        let header = Desc::readable(HEADER, HEADER_BYTES as u32);
        let chain = [&[header], data, &[Desc::writable(STATUS, 1)]].concat();
        self.driver.add(&chain, token).unwrap();
    }

    /// Reads of 1022 buffers each.
    fn reads_by_tables(&mut self, count: u64) {
        self.header(Kind::In, 0);
        let at = GPA + PAGE;
        let table = self.ram.window((at - GPA) as usize, 1024 * 16).unwrap();
        let header = [Desc::readable(HEADER, HEADER_BYTES as u32)];
        // Not side by side.
        let data = (0..1022).map(|n| Desc::writable(DATA + n * 1024, SECTOR as u32));
        let status = [Desc::writable(STATUS, 1)];
        let chain: Vec<Desc> = header.into_iter().chain(data).chain(status).collect();
        for token in 0..count {
            self.driver.add_indirect(at, &table, &chain, token).unwrap();
        }
    }

    fn round(&mut self) -> bool {
        self.now_ns += 1;
        let busy = self.queue.poll(&self.bus, self.now_ns).unwrap();
        self.bus.quiet();
        busy
    }

    /// Runs until `count` requests are completed, all with this status.
    fn finish(&mut self, mut count: usize, status: Status) {
        while count > 0 {
            self.round();
            while self.driver.pop().unwrap().is_some() {
                assert_eq!(self.byte(STATUS), status.code());
                count -= 1;
            }
        }
        assert!(!self.queue.is_busy());
        assert_eq!(
            (self.queue.held(), self.queue.serve().store.file().map_or(0, |file| file.held)),
            (0, 0)
        );
    }
}

fn image(len: u64) -> Image {
    let file = File::from(memfd_create("disk", MemfdFlags::CLOEXEC).unwrap());
    std::io::Write::write_all(&mut &file, &vec![7; len as usize]).unwrap();
    Image::new(file.into(), len)
}

#[test]
fn a_long_request_goes_in_parts_one_a_round() {
    for own in [false, true] {
        let len = 9 * MIB + SECTOR;
        let image = if own { image(len).with_own_buffers() } else { image(len) };
        let mut rig = Rig::new(image, 16, 16 * MIB);
        rig.reads(
            &[
                Desc::writable(DATA, 3 * MIB as u32),
                Desc::writable(DATA + 3 * MIB, (len - 3 * MIB) as u32),
            ],
            0,
        );
        rig.driver.publish();
        let most = if own { MIB } else { 4 * MIB };
        let mut moved = 0;
        let mut rounds = 0;
        while rig.driver.pop().unwrap().is_none() {
            rig.round();
            rounds += 1;
            // How far it has come: a part may arrive in a later round than the one that began it.
            while moved < len && rig.byte(DATA + moved) == 7 {
                moved += SECTOR;
            }
            assert!(moved <= rounds * most, "{moved} bytes in {rounds} rounds");
        }
        assert_eq!((moved, rig.byte(STATUS)), (len, Status::Ok.code()));
        assert_eq!(rig.queue.stats().bytes, len);
        assert!(!rig.queue.is_busy());
    }
}

#[test]
fn a_long_write_goes_in_parts_too() {
    let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    let len = 9 * MIB;
    rustix::fs::ftruncate(&file, len).unwrap();
    let kept = File::from(file.try_clone().unwrap());
    let mut rig = Rig::new(Image::new(file, len), 16, 16 * MIB);
    rig.header(Kind::Out, 0);
    let bytes: Vec<u8> = (0..len).map(|at| (at / 4093) as u8).collect();
    rig.put(DATA, &bytes);
    let header = Desc::readable(HEADER, HEADER_BYTES as u32);
    let data =
        [(0, 5), (5, 4)].map(|(at, len)| Desc::readable(DATA + at * MIB, (len * MIB) as u32));
    rig.driver.add(&[header, data[0], data[1], Desc::writable(STATUS, 1)], 0).unwrap();
    rig.driver.publish();
    rig.finish(1, Status::Ok);
    let mut written = vec![0; len as usize];
    std::os::unix::fs::FileExt::read_exact_at(&kept, &mut written, 0).unwrap();
    assert!(written == bytes);
}

#[test]
fn a_flush_follows_a_write_that_is_not_durable_by_itself() {
    for own in [false, true] {
        for through in [false, true] {
            // A pipe takes what is written, and cannot be flushed.
            let (read, write) = rustix::pipe::pipe().unwrap();
            let image = Image::new(write, MIB);
            let image = if own { image.with_own_buffers() } else { image };
            let mut rig = Rig::new(image, 16, 8 * MIB);
            let serve = rig.queue.serve();
            serve.store.file().unwrap().through.store(through, Ordering::Release);
            rig.header(Kind::Out, 0);
            rig.put(DATA, &[7; PAGE as usize]);
            let header = Desc::readable(HEADER, HEADER_BYTES as u32);
            let data = Desc::readable(DATA, PAGE as u32);
            rig.driver.add(&[header, data, Desc::writable(STATUS, 1)], 0).unwrap();
            rig.driver.publish();
            rig.finish(1, if through { Status::IoErr } else { Status::Ok });
            drop(rig);
            let mut written = Vec::new();
            std::io::Read::read_to_end(&mut File::from(read), &mut written).unwrap();
            assert_eq!(written, [7; PAGE as usize]);
        }
    }
}

#[test]
fn a_round_hands_over_no_more_than_a_mebibyte_and_a_request() {
    let mut rig = Rig::silent(64);
    for token in 0..16 {
        rig.reads(&[Desc::writable(DATA, 384 << 10)], token);
    }
    rig.driver.publish();
    for handed in [3, 6, 9, 12, 15, 16] {
        rig.round();
        assert_eq!(rig.queue.in_kernel(), handed);
    }
    // Ends the requests that wait for the disk.
    rig.pipe = None;
    rig.finish(16, Status::IoErr);
}

#[test]
fn a_round_publishes_a_part_of_what_can_be_done_at_once_to_a_driver_that_looks() {
    // A packed ring counts descriptors, three a request here, and by powers of two.
    let rounds: [(bool, &[usize]); 2] =
        [(false, &[8, 6, 4, 3, 2, 2, 2, 2, 2, 1]), (true, &[16, 8, 4, 2, 2])];
    for (packed, rounds) in rounds {
        for event_idx in [false, true] {
            let config = driver::QueueConfig { size: 128, event_idx, packed };
            let mut rig = Rig::of(image(MIB), config, 8 * MIB);
            let mut check = |rounds: &[usize]| {
                rig.header(Kind::GetId, 0);
                let header = Desc::readable(HEADER, HEADER_BYTES as u32);
                let chain = [header, Desc::writable(DATA, 20), Desc::writable(STATUS, 1)];
                for token in 0..32 {
                    rig.driver.add(&chain, token).unwrap();
                }
                rig.driver.publish();
                for &wanted in rounds {
                    assert!(rig.round());
                    let published = std::iter::from_fn(|| rig.driver.pop().unwrap()).count();
                    assert_eq!(published, wanted, "{config:?}");
                }
                assert!(!rig.round() && !rig.queue.is_busy());
                rig.driver.suppress_notifications();
            };
            // Until it is known that the driver wants no interrupts.
            check(&[32]);
            check(&[32]);
            check(rounds);
        }
    }
}

#[test]
fn what_one_translation_frees_is_handed_over_in_as_many_rounds_as_what_is_taken() {
    let mut rig = Rig::silent(64);
    let iotlb = rig.translated(0);
    for token in 0..16 {
        rig.reads(&[Desc::writable(DATA, 384 << 10)], token);
    }
    rig.driver.publish();
    for _ in 0..4 {
        rig.round();
    }
    assert_eq!((rig.queue.in_kernel(), rig.queue.parked()), (0, 16));
    let range = Range::from_len(Iova(DATA), MIB).unwrap();
    iotlb.update(range, ringfence_iommu::GuestPhys(DATA), Prot::RW).unwrap();
    for handed in [3, 6, 9, 12, 15, 16] {
        let goes_on = rig.round();
        assert_eq!((rig.queue.in_kernel(), goes_on), (handed, handed < 16));
    }
    rig.pipe = None;
    rig.finish(16, Status::IoErr);
}

#[test]
fn a_ring_is_not_read_further_while_too_many_descriptors_are_held() {
    let mut rig = Rig::new(image(MIB), 1024, 8 * MIB);
    let iotlb = rig.translated(0);
    rig.reads_by_tables(64);
    rig.driver.publish();
    for _ in 0..16 {
        rig.round();
    }
    assert_eq!(
        (rig.queue.ring().in_flight(), rig.queue.parked(), rig.queue.held()),
        (32, 32, 1 << 15)
    );
    assert_eq!(rig.queue.stats().full, 1);
    // No polling is needed: a worker may sleep.
    assert!(!rig.round() && !rig.queue.arm(&rig.bus));
    // With a translation these requests go on, and then the others.
    let range = Range::from_len(Iova(DATA), MIB).unwrap();
    iotlb.update(range, ringfence_iommu::GuestPhys(DATA), Prot::RW).unwrap();
    rig.finish(64, Status::Ok);
    // Nothing of it is kept.
    assert!(rig.queue.slots().iter().all(|slot| slot.chain().descs().len() <= KEPT));
}

#[test]
fn a_request_within_the_limits_whose_pages_lie_apart_succeeds() {
    let mut rig = Rig::new(image(4 * MIB), 1024, 16 * MIB);
    let _iotlb = rig.translated(5 * 256);
    // 257 pages each, none beside another.
    let data = [0, 1, 2, 3].map(|n| Desc::writable(DATA + 512 + n * (MIB + PAGE), MIB as u32));
    rig.reads(&data, 0);
    rig.driver.publish();
    rig.finish(1, Status::Ok);
    for n in 0..4 {
        let first = DATA + 512 + n * (MIB + PAGE);
        for iova in [first, first + MIB - 1] {
            let page = (iova - DATA) / PAGE;
            let place = DATA + (5 * 256 - 1 - page) * PAGE + (iova - DATA) % PAGE;
            assert_eq!(rig.byte(place), 7, "buffer {n}");
        }
    }
}

#[test]
fn what_waits_for_a_translation_holds_no_long_list() {
    let mut rig = Rig::new(image(4 * MIB), 1024, 16 * MIB);
    let _iotlb = rig.translated(1000);
    rig.reads(&[Desc::writable(DATA, 4 * MIB as u32)], 0);
    rig.driver.publish();
    rig.round();
    assert_eq!(rig.queue.parked(), 1);
    assert!(rig.queue.slots().iter().all(|slot| slot.request.transfer.room() <= KEPT));
    rig.now_ns += 10_000_000;
    rig.finish(1, Status::IoErr);
}

#[test]
fn what_is_given_up_makes_room_for_the_rest_of_the_ring() {
    let mut rig = Rig::new(image(MIB), 1024, 8 * MIB);
    let _iotlb = rig.translated(0);
    rig.reads_by_tables(64);
    rig.driver.publish();
    // Each round is later than what is waited for.
    let mut completed = 0;
    while completed < 64 {
        rig.now_ns += 10_000_000;
        rig.round();
        while rig.driver.pop().unwrap().is_some() {
            assert_eq!(rig.byte(STATUS), Status::IoErr.code());
            completed += 1;
        }
        assert!(rig.queue.held() <= 1 << 15);
    }
    assert_eq!(rig.queue.stats().full, 1 + 1);
}

#[test]
fn requests_in_many_pieces_wait_for_their_turn() {
    let mut rig = Rig::silent(1024);
    // A mebibyte in 256 pieces.
    let _iotlb = rig.translated(256);
    for token in 0..200 {
        rig.reads(&[Desc::writable(DATA, MIB as u32)], token);
    }
    rig.driver.publish();
    for _ in 0..300 {
        rig.round();
    }
    assert_eq!(
        (rig.queue.in_kernel(), rig.queue.serve().store.file().map_or(0, |file| file.held)),
        (128, 1 << 15)
    );
    rig.pipe = None;
    rig.finish(200, Status::IoErr);
}

/// The front end, which stops the ring, sends no translations any more.
#[test]
fn a_ring_stops_while_its_requests_hold_all_buffers_and_wait_for_translations() {
    let mut rig = Rig::new(image(MIB).with_own_buffers(), 1024, 8 * MIB);
    let _iotlb = rig.translated(0);
    for token in 0..8 {
        rig.reads(&[Desc::writable(DATA, MIB as u32)], token);
    }
    rig.driver.publish();
    while rig.queue.parked() < 4 || rig.queue.in_kernel() > 0 {
        rig.round();
        rig.now_ns = 1;
    }
    rig.queue.begin_stop(&rig.bus);
    while !rig.queue.wind_down(&rig.bus).unwrap() {
        assert!(rig.queue.in_kernel() > 0 || rig.queue.is_spent(), "nothing would wake it");
    }
    assert!(!rig.queue.is_busy());
}

#[test]
fn a_ring_stops_while_its_requests_wait_for_their_turn() {
    let mut rig = Rig::silent(1024);
    let _iotlb = rig.translated(256);
    for token in 0..200 {
        rig.reads(&[Desc::writable(DATA, MIB as u32)], token);
    }
    rig.driver.publish();
    for _ in 0..300 {
        rig.round();
    }
    rig.queue.begin_stop(&rig.bus);
    assert!(!rig.queue.wind_down(&rig.bus).unwrap());
    rig.pipe = None;
    // As a worker does that sleeps until the kernel completes something.
    while !rig.queue.wind_down(&rig.bus).unwrap() {
        assert!(rig.queue.in_kernel() > 0 || rig.queue.is_spent(), "nothing would wake it");
    }
    let mut completed = 0;
    while rig.driver.pop().unwrap().is_some() {
        completed += 1;
    }
    assert_eq!(completed, rig.queue.stats().requests);
}
