//! A virtual machine without a guest: memory, the driver's end of a disk's queues, and a front end.

use std::{
    collections::HashMap,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ringfence_dma::Segment;
use ringfence_drivers::blk::{DriverQueue, QueueLayout};
use ringfence_mem::{Access, GuestRam, Window};
use ringfence_run::{PeerFd, event, worker::Notify};
use ringfence_vhost_user::{
    BackendMessage, Frontend, FrontendChannel, Iotlb, ProtocolFeatures, RingAddresses, msg::Request,
};
use ringfence_virtq::blk::Kind;
use rustix::fs::{FlockOperation, flock};

use crate::common::{LIMIT, Place};

pub(crate) const LONG: Duration = LIMIT;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const PAGE: usize = 4096;
/// Most requests in flight in a queue.
pub(crate) const DEPTH: u16 = 16;
/// VERSION_1, EVENT_IDX, INDIRECT_DESC, ACCESS_PLATFORM.
pub(crate) const PLAIN: u64 = 1 << 32 | 1 << 29 | 1 << 28;
pub(crate) const PLATFORM: u64 = 1 << 33;
/// The memory's first address, for a device behind an IOMMU.
pub(crate) const IOVA: u64 = 1 << 40;

/// A virtual machine without a guest: memory and the driver's end of queues, which outlive the
/// device's process.
pub(crate) struct Machine {
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) queues: Vec<Queue>,
    /// Whether the device is behind an IOMMU.
    pub(crate) translated: bool,
    pub(crate) data: Window,
    pub(crate) data_at: u64,
}

pub(crate) struct Queue {
    pub(crate) driver: DriverQueue,
    pub(crate) at: u64,
    pub(crate) layout: QueueLayout,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Arc<OwnedFd>,
}

/// A machine's connection to a device.
pub(crate) struct Connection {
    pub(crate) main: Arc<Mutex<Frontend>>,
    pub(crate) ended: Arc<AtomicBool>,
    pub(crate) serving: Option<std::thread::JoinHandle<()>>,
}

impl Machine {
    pub(crate) fn new(queues: usize, translated: bool) -> Machine {
        let ram = GuestRam::new(4 * MIB, 1 << 30).unwrap();
        let layout = QueueLayout::new(DEPTH, 4);
        let bus = |offset: usize| offset as u64 + if translated { IOVA } else { ram.gpa() };
        let queues = (0..queues)
            .map(|_| {
                let offset = ram.carve(layout.bytes(), PAGE).unwrap();
                let memory = ram.window(offset, layout.bytes()).unwrap();
                let [kick, call] = [(); 2].map(|()| Arc::new(event::new().unwrap()));
                let [k, c] = [Arc::clone(&kick), Arc::clone(&call)];
                let driver = DriverQueue::new(layout, &memory, bus(offset), k, c, Notify::Adaptive);
                let at = match translated {
                    true => bus(offset),
                    false => ram.user_addr() + offset as u64,
                };
                Queue { driver: driver.unwrap(), at, layout, kick, call }
            })
            .collect();
        let offset = ram.carve(MIB, PAGE).unwrap();
        let (data, data_at) = (ram.window(offset, MIB).unwrap(), bus(offset));
        Machine { ram, queues, translated, data, data_at }
    }

    /// Connects to the socket, and starts all queues.
    pub(crate) fn connect(&self, socket: &Path, kept: Option<&mut Kept>) -> Connection {
        let mut main = Frontend::new(connected(socket), LONG);
        let features = PLAIN | if self.translated { PLATFORM } else { 0 };
        let mut protocol = ProtocolFeatures::MQ
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::CONFIG
            | ProtocolFeatures::INFLIGHT_SHMFD;
        if self.translated {
            protocol |= ProtocolFeatures::BACKEND_REQ;
        }
        assert_eq!(main.negotiate(features, protocol).unwrap(), features);
        let (mut channel, theirs) = FrontendChannel::pair(LONG).unwrap();
        if self.translated {
            main.set_backend_channel(theirs.as_fd()).unwrap();
        }
        drop(theirs);
        main.set_mem_table(&[(self.ram.region(), self.ram.fd())]).unwrap();
        if let Some(kept) = kept {
            if kept.region.is_none() {
                kept.region = main.inflight(self.queues.len() as u16, DEPTH).unwrap();
            }
            let (place, file) = kept.region.as_ref().unwrap();
            main.request(Request::SetInflight(*place), &[file.as_fd()]).unwrap();
        }
        let (main, ended) = (Arc::new(Mutex::new(main)), Arc::new(AtomicBool::new(false)));
        let (front, over) = (Arc::clone(&main), Arc::clone(&ended));
        let (user, last) = (self.ram.user_addr(), IOVA + self.ram.len() as u64 - 1);
        let serving = self.translated.then(|| {
            std::thread::spawn(move || {
                let mut received = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let more = channel.recv_all(Some(Duration::from_millis(20)), &mut received);
                    if !more.unwrap_or(false) {
                        return;
                    }
                    for miss in received.drain(..) {
                        let BackendMessage::Iotlb(Iotlb::Miss { iova, .. }) = miss.message else {
                            panic!("{miss:?}")
                        };
                        let known = (IOVA..=last).contains(&iova);
                        if known {
                            let first = iova & !0xfff;
                            let update = Iotlb::Update {
                                first,
                                last: first | 0xfff,
                                user_addr: user + (first - IOVA),
                                access: Some(Access::ReadWrite),
                            };
                            // The back end may have been killed.
                            let _ = front.lock().unwrap().iotlb(&update);
                        }
                        let _ = channel.reply(&miss, known);
                    }
                }
            })
        });
        let connection = Connection { main, ended, serving };
        for (index, queue) in (0..).zip(&self.queues) {
            let mut main = connection.main.lock().unwrap();
            main.set_vring_num(index, DEPTH).unwrap();
            main.set_vring_base(index, 0).unwrap();
            let addresses = RingAddresses {
                desc: queue.at,
                avail: queue.at + queue.layout.avail_at() as u64,
                used: queue.at + queue.layout.used_at() as u64,
                log: None,
            };
            main.set_vring_addr(index, &addresses).unwrap();
            main.set_vring_call(index, Some(queue.call.as_fd())).unwrap();
            main.set_vring_kick(index, Some(queue.kick.as_fd())).unwrap();
            main.set_vring_enable(index, true).unwrap();
            // This back end does not know of earlier kicks.
            event::signal(&queue.kick);
        }
        connection
    }

    /// Does one request with data at an offset of the data area.
    pub(crate) fn request(
        &mut self,
        queue: usize,
        kind: Kind,
        sector: u64,
        at: usize,
        len: usize,
    ) -> bool {
        let data = [Segment { addr: self.data_at + at as u64, len: len as u64 }];
        let data = if len == 0 { &[][..] } else { &data[..] };
        let driver = &mut self.queues[queue].driver;
        driver.submit(kind, sector, data, 1).unwrap();
        driver.publish();
        let begun = Instant::now();
        loop {
            if let Some(done) = driver.reap().unwrap() {
                return done.ok;
            }
            assert!(begun.elapsed() < LONG, "no completion");
            driver.wait(Duration::from_millis(50));
        }
    }

    /// What any disk of 1 MiB of ones does: reports its size, writes three pages of `byte` behind
    /// its first page, flushes, and reads them back with the sector before them.
    pub(crate) fn writes_and_reads(&mut self, connection: &Connection, byte: u8) {
        let mut capacity = [0; 8];
        connection.main.lock().unwrap().config(0, &mut capacity).unwrap();
        assert_eq!(u64::from_le_bytes(capacity), MIB as u64 / 512);
        self.data.write(0, &vec![byte; 3 * PAGE]);
        assert!(self.request(0, Kind::Out, 8, 0, 3 * PAGE));
        assert!(self.request(1, Kind::Flush, 0, 0, 0));
        assert!(self.request(1, Kind::In, 7, 8 * PAGE, 4 * PAGE));
        let back = self.bytes(8 * PAGE, 4 * PAGE);
        assert_eq!(back[..512], [1; 512]);
        assert_eq!(back[512..512 + 3 * PAGE], vec![byte; 3 * PAGE]);
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.data.read(at, &mut bytes);
        bytes
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(serving) = self.serving.take() {
            assert!(serving.join().is_ok() || std::thread::panicking());
        }
    }
}

/// What a front end keeps when the back end crashes.
#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) region: Option<(ringfence_vhost_user::msg::Inflight, PeerFd)>,
}

/// Waits until no process has the image any more. Linux completes the requests of one that was
/// killed first, which a slow disk may take longer for than the next process waits.
pub(crate) fn await_unlocked(image: &Path) {
    let (file, begun) = (std::fs::File::open(image).unwrap(), Instant::now());
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(begun.elapsed() < LONG, "{} stays locked", image.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn connected(socket: &Path) -> UnixStream {
    let begun = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < LONG, "{}: {error}", socket.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn figure(text: &str, name: &str) -> u64 {
    let of = |line: &&str| line.starts_with(name) && !line.starts_with('#');
    let lines = text.lines().filter(of);
    lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

pub(crate) fn figures(place: &Place) -> String {
    let mut stream = UnixStream::connect(place.path("m")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    text
}

/// One write at a time to each block; acknowledged versions are remembered.
#[derive(Default)]
pub(crate) struct Load {
    pub(crate) versions: HashMap<u64, u32>,
    /// By token: the block and its new version.
    pub(crate) under_way: HashMap<u64, (u64, u32)>,
    pub(crate) acknowledged: usize,
    pub(crate) tokens: u64,
}

pub(crate) const BLOCKS: u64 = 64;

impl Load {
    /// Does what is possible now on a queue. Its blocks are `queue` modulo the number of queues.
    pub(crate) fn step(&mut self, machine: &mut Machine, submit: bool) {
        let count = machine.queues.len() as u64;
        for index in 0..machine.queues.len() {
            while let Some(done) = machine.queues[index].driver.reap().unwrap() {
                let (block, version) = self.under_way.remove(&done.token).expect("completed once");
                assert!(done.ok, "block {block}, version {version} failed");
                self.versions.insert(block, version);
                self.acknowledged += 1;
            }
            while submit && machine.queues[index].driver.room() > 0 {
                let token = self.tokens;
                let block = (token / count) % (BLOCKS / count) * count + index as u64;
                if self.under_way.values().any(|&(busy, _)| busy == block) {
                    break;
                }
                self.tokens += 1;
                let version = self.versions.get(&block).map_or(1, |version| version + 1);
                let at = block as usize * PAGE;
                machine.data.write(at, &content(block, version));
                let data = [Segment { addr: machine.data_at + at as u64, len: PAGE as u64 }];
                machine.queues[index].driver.submit(Kind::Out, block * 8, &data, token).unwrap();
                self.under_way.insert(token, (block, version));
            }
            machine.queues[index].driver.publish();
        }
    }
}

pub(crate) fn content(block: u64, version: u32) -> Vec<u8> {
    let word = block << 32 | u64::from(version);
    word.to_le_bytes().repeat(PAGE / 8)
}
