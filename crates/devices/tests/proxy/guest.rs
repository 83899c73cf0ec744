//! A guest in front of the proxy, and a model of its memory that judges every byte.

use std::{
    collections::HashMap,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringfence_devices::proxy::{Connector, Proxy, ProxyOptions};
use ringfence_mem::GuestRam;
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{Frontend, ProtocolFeatures, RingAddresses, Server};
use ringfence_virtq::{
    Desc,
    driver::{Queue, QueueConfig, Rings},
};

use crate::{F_EVENT_IDX, F_INDIRECT, F_PACKED, F_VERSION_1, back_end::reply};

const PAGE: usize = 4096;
/// Pages of the ring, and of all memory.
const RING_PAGES: usize = 4;
const PAGES: usize = 64;
/// A guard against hanging, not a measurement.
pub(crate) const LONG: Duration = Duration::from_secs(120);
pub(crate) const SIZE: u16 = 32;

/// A chain in flight.
struct Flight {
    readable: Vec<u8>,
    /// Offset and length of what the device may write.
    writable: Vec<(usize, usize)>,
    pages: Vec<usize>,
}

pub(crate) struct Guest {
    ram: Arc<GuestRam>,
    main: Frontend,
    queue: Queue,
    kick: OwnedFd,
    err: OwnedFd,
    /// What each byte behind the ring must be.
    model: Vec<u8>,
    flights: HashMap<u64, Flight>,
    free: Vec<usize>,
    tokens: u64,
    packed: bool,
    /// How many chains have come back, and how many descriptors they had.
    back: (u32, u32),
    random: u64,
    serving: Option<JoinHandle<()>>,
}

/// The canary of a word of the guest's memory that is in no request.
fn canary(at: usize) -> [u8; 8] {
    (0xc0ff_ee00_dead_0000 | (at / PAGE) as u64).to_le_bytes()
}

impl Guest {
    /// A guest whose proxy has the back end at `path`; `features` are those of its own ring.
    pub(crate) fn new(path: &Path, features: u64, seed: u64) -> Guest {
        let name: Arc<str> = "proxy".into();
        let connector = Arc::new(Connector::spawn(path.to_owned(), name).unwrap());
        let workers: Arc<[Worker]> = [Worker::spawn("test", Notify::Sleep).unwrap()].into();
        let options = ProxyOptions { pool_size: 1 << 20, ..ProxyOptions::new("proxy", 4) };
        let proxy = Proxy::connect(options, &connector, workers).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, proxy);
        let serving = Some(thread::spawn(move || _ = server.serve()));
        let mut main = Frontend::new(ours, LONG);
        let wanted = features | 1 << F_VERSION_1;
        let accepted = main.negotiate(wanted, ProtocolFeatures::REPLY_ACK | ProtocolFeatures::MQ);
        assert_eq!(accepted.unwrap(), wanted);
        let ram = GuestRam::new(PAGES * PAGE, 1 << 32).unwrap();
        main.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let has = |bit: u32| features & (1 << bit) != 0;
        let config = QueueConfig { size: SIZE, event_idx: has(F_EVENT_IDX), packed: has(F_PACKED) };
        let window = ram.window(0, RING_PAGES * PAGE).unwrap();
        let queue = Queue::with_config(config, Rings::placed(&window, &config).unwrap()).unwrap();
        let [kick, call, err] = [(); 3].map(|()| event::new().unwrap());
        let at = config.offsets();
        let [desc, avail, used] =
            [at.desc, at.avail, at.used].map(|at| ram.user_addr() + at as u64);
        main.set_vring_num(0, SIZE).unwrap();
        main.set_vring_base(0, if config.packed { 0x8000_8000 } else { 0 }).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_call(0, Some(call.as_fd())).unwrap();
        main.set_vring_err(0, Some(err.as_fd())).unwrap();
        main.set_vring_kick(0, Some(kick.as_fd())).unwrap();
        main.set_vring_enable(0, true).unwrap();
        let mut model = vec![0; (PAGES - RING_PAGES) * PAGE];
        for (at, word) in model.chunks_mut(8).enumerate() {
            word.copy_from_slice(&canary(at * 8));
        }
        let _ = F_INDIRECT;
        let guest = Guest {
            ram,
            main,
            queue,
            kick,
            err,
            model,
            flights: HashMap::new(),
            free: (0..PAGES - RING_PAGES).collect(),
            tokens: 0,
            packed: config.packed,
            back: (0, 0),
            random: seed * 2 + 1,
            serving,
        };
        guest.write(0, &guest.model);
        guest
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.ram.slice(RING_PAGES * PAGE + at, bytes.len()).unwrap().copy_from(bytes);
    }

    /// Submits a chain of random buffers, if there is room.
    pub(crate) fn submit(&mut self) -> bool {
        let count = 1 + self.random(5);
        if self.free.len() < count || usize::from(self.queue.free_descs()) < count {
            return false;
        }
        let readable = self.random(count + 1);
        let (mut descs, mut bytes, mut writable) = (Vec::new(), Vec::new(), Vec::new());
        let pages: Vec<usize> = (0..count)
            .map(|_| {
                let at = self.random(self.free.len());
                self.free.swap_remove(at)
            })
            .collect();
        for (number, page) in pages.iter().enumerate() {
            let small = self.random(2) == 0;
            let len = 1 + self.random(if small { 40 } else { PAGE });
            let offset = page * PAGE + self.random(PAGE - len + 1);
            let addr = self.ram.gpa() + (RING_PAGES * PAGE + offset) as u64;
            if number < readable {
                let content: Vec<u8> = (0..len).map(|_| self.random(256) as u8).collect();
                self.write(offset, &content);
                self.model[offset..offset + len].copy_from_slice(&content);
                bytes.extend(content);
                descs.push(Desc::readable(addr, len as u32));
            } else {
                writable.push((offset, len));
                descs.push(Desc::writable(addr, len as u32));
            }
        }
        self.tokens += 1;
        self.queue.add(&descs, self.tokens).unwrap();
        self.flights.insert(self.tokens, Flight { readable: bytes, writable, pages });
        true
    }

    pub(crate) fn publish(&mut self) {
        self.queue.publish();
        event::signal(&self.kick);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Takes what the device has used; `honest`: checks what it has written.
    pub(crate) fn reap(&mut self, honest: bool) -> usize {
        let mut count = 0;
        while let Some(used) = self.queue.pop().unwrap() {
            let Flight { readable, writable, pages } = self.flights.remove(&used.token).unwrap();
            let written = reply(&readable, used.len as usize);
            let mut at = 0;
            for (offset, len) in writable {
                let part = len.min(used.len as usize - at);
                let now = self.ram.slice(RING_PAGES * PAGE + offset, part).unwrap().to_vec();
                if honest {
                    assert!(
                        now == written[at..at + part],
                        "chain {}: what was written",
                        used.token
                    );
                }
                self.model[offset..offset + part].copy_from_slice(&now);
                at += part;
            }
            self.back = (self.back.0 + 1, self.back.1 + pages.len() as u32);
            self.free.extend(pages);
            count += 1;
        }
        count
    }

    /// Waits until `count` chains at most are in flight.
    pub(crate) fn wait(&mut self, count: usize, honest: bool) {
        let begun = Instant::now();
        while self.flights.len() > count {
            if self.reap(honest) == 0 {
                assert!(begun.elapsed() < LONG, "{} chains do not come back", self.flights.len());
                thread::sleep(std::time::Duration::from_micros(100));
            }
        }
    }

    /// Waits until the device has given the ring up.
    pub(crate) fn wait_for_failure(&self) {
        let begun = Instant::now();
        let mut count = [0; 8];
        while rustix::io::read(&self.err, &mut count).is_err() {
            assert!(begun.elapsed() < LONG, "the ring goes on");
            thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    /// Checks every byte but those that the device may be writing.
    pub(crate) fn check(&self) {
        let mut now = self.ram.slice(RING_PAGES * PAGE, self.model.len()).unwrap().to_vec();
        for flight in self.flights.values() {
            for &(offset, len) in &flight.writable {
                now[offset..offset + len].copy_from_slice(&self.model[offset..offset + len]);
            }
        }
        let wrong = now.iter().zip(&self.model).position(|(now, model)| now != model);
        assert_eq!(wrong, None, "a byte that no request was to change");
    }

    /// Whether `bytes` hold a word of the guest's memory that was in no request.
    pub(crate) fn is_seen_in(bytes: &[u8]) -> bool {
        let magic = &canary(0)[2..];
        let last = magic.len() - 1;
        let ends = bytes.iter().enumerate().skip(last).filter(|(_, byte)| **byte == magic[last]);
        ends.into_iter().any(|(at, _)| bytes[at - last..=at] == *magic)
    }

    /// Stops the ring, which must go on with the chains that have not come back.
    pub(crate) fn stop(&mut self) {
        let (chains, descs) = self.back;
        let size = u32::from(SIZE);
        let wrap = 1 - descs / size % 2;
        let position = (descs % size) | (wrap << 15);
        let expected = if self.packed { (position << 16) | position } else { chains };
        assert_eq!(self.main.get_vring_base(0).unwrap(), expected);
    }

    /// Waits until the proxy has ended the connection.
    pub(crate) fn wait_for_end(&mut self) {
        let begun = Instant::now();
        while self.serving.as_ref().is_some_and(|serving| !serving.is_finished()) {
            assert!(begun.elapsed() < LONG, "the connection goes on");
            thread::sleep(std::time::Duration::from_micros(100));
        }
    }
}
