//! A guest in front of the proxy, and a model of its memory that judges every byte.

use std::{
    collections::{BTreeSet, HashMap},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use ringfence_devices::proxy::{Connector, CopyBack, Proxy, ProxyOptions};
use ringfence_mem::{Access, GuestRam, Region};
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{
    BackendMessage, F_PROTOCOL_FEATURES, Frontend, FrontendChannel, Iotlb, IotlbHandle,
    ProtocolFeatures, RingAddresses, Server, msg::Request,
};
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM,
    driver::{Queue, QueueConfig, Rings},
};

use crate::{F_EVENT_IDX, F_INDIRECT, F_PACKED, F_VERSION_1, back_end::reply};

const PAGE: usize = 4096;
/// Pages of the ring, and of all memory.
pub(crate) const RING_PAGES: usize = 4;
const PAGES: usize = 64;
/// Pages behind the ring's.
pub(crate) const DATA: usize = PAGES - RING_PAGES;
/// Pages of the first region of memory; the rest is the second.
pub(crate) const FIRST: usize = 40;
/// Tables of descriptors, in the pages behind the ring's first.
const TABLES: usize = 12;
const TABLE_BYTES: usize = 1024;
/// The most buffers of a chain with a table: more than the ring has descriptors.
pub(crate) const MOST_BUFFERS: usize = 40;
/// A guard against hanging, not a measurement.
pub(crate) const LONG: Duration = Duration::from_secs(120);
pub(crate) const SIZE: u16 = 32;

/// A chain in flight.
struct Flight {
    readable: Vec<u8>,
    /// How many of these are in the first buffer.
    first: usize,
    /// Offset and length of what the device may write.
    writable: Vec<(usize, usize)>,
    pages: Vec<usize>,
    /// The number of its table.
    table: Option<usize>,
    /// Whether the back end was silent all the time.
    untouched: bool,
    /// Whether it may have been written to before a log was begun, and has not come back since.
    before_log: bool,
}

/// The page that each page of the guest's is mapped to, behind the ring, by its IOMMU if it has one.
type Table = Arc<Mutex<Vec<Option<usize>>>>;

pub(crate) struct Guest {
    pub(crate) ram: Arc<GuestRam>,
    /// Until the guest hangs up.
    main: Option<Frontend>,
    queue: Queue,
    config: QueueConfig,
    features: u64,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    pub(crate) table: Table,
    /// What each byte behind the ring must be.
    model: Vec<u8>,
    flights: HashMap<u64, Flight>,
    pub(crate) free: Vec<usize>,
    /// Tables that are free; none without INDIRECT_DESC.
    tables: Vec<usize>,
    tokens: u64,
    /// Whether the back end is silent.
    pub(crate) silent: bool,
    /// The pages that were written to.
    pub(crate) written: BTreeSet<usize>,
    /// Whether all that is writable comes back, whatever is reported.
    gets_all: bool,
    /// How many chains have come back, and how many descriptors they had.
    back: (u32, u32),
    random: u64,
    serving: Option<JoinHandle<()>>,
}

/// The canary of a word of the guest's memory that is in no request.
fn canary(at: usize) -> [u8; 8] {
    (0xc0ff_ee00_dead_0000 | (at / PAGE) as u64).to_le_bytes()
}

/// A worker that serves a proxy.
pub(crate) fn workers() -> Arc<[Worker]> {
    [Worker::spawn("test", Notify::Sleep).unwrap()].into()
}

impl Guest {
    /// A guest whose proxy has the back end at `path`; `features` are those of its own ring.
    pub(crate) fn new(path: &Path, features: u64, seed: u64) -> Guest {
        Guest::with_pool(path, features, seed, 1 << 20)
    }

    /// The same, with so many bytes of slots.
    pub(crate) fn with_pool(path: &Path, features: u64, seed: u64, pool_size: u64) -> Guest {
        let connector = Arc::new(Connector::spawn(path.to_owned(), "proxy".into()).unwrap());
        let options = ProxyOptions { pool_size, ..ProxyOptions::new("proxy", 4) };
        Guest::behind(&connector, features, seed, options)
    }

    /// The same, whose proxy has these options and connects by `connector`.
    pub(crate) fn behind(
        connector: &Arc<Connector>,
        features: u64,
        seed: u64,
        options: ProxyOptions,
    ) -> Guest {
        let mut guest = Guest::apart(features, seed);
        guest.connect(connector, options);
        guest.announce();
        guest.start(guest.position());
        guest
    }

    /// A guest that has no device yet.
    pub(crate) fn apart(features: u64, seed: u64) -> Guest {
        let ram = GuestRam::new(PAGES * PAGE, 1 << 32).unwrap();
        let has = |feature: u64| features & feature != 0;
        let config = QueueConfig { size: SIZE, event_idx: has(F_EVENT_IDX), packed: has(F_PACKED) };
        let [kick, call, err] = [(); 3].map(|()| event::new().unwrap());
        let mut model = vec![0; DATA * PAGE];
        for (at, word) in model.chunks_mut(8).enumerate() {
            word.copy_from_slice(&canary(at * 8));
        }
        let guest = Guest {
            queue: queue(&ram, &config),
            ram,
            main: None,
            config,
            features: features | F_VERSION_1,
            kick,
            call,
            err,
            table: Arc::new(Mutex::new((0..DATA).map(Some).collect())),
            model,
            flights: HashMap::new(),
            free: (0..DATA).collect(),
            tables: (0..TABLES).filter(|_| has(F_INDIRECT)).collect(),
            tokens: 0,
            silent: false,
            written: BTreeSet::new(),
            gets_all: false,
            back: (0, 0),
            random: seed * 2 + 1,
            serving: None,
        };
        guest.write(0, &guest.model);
        guest
    }

    pub(crate) fn main(&mut self) -> &mut Frontend {
        self.main.as_mut().expect("it is connected")
    }

    /// Connects to a proxy that has these options and connects by `connector`.
    pub(crate) fn connect(&mut self, connector: &Arc<Connector>, options: ProxyOptions) {
        self.gets_all = options.copy_back == CopyBack::All;
        let translated = options.iotlb.is_some();
        let proxy = Proxy::connect(options, connector, workers()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, proxy);
        self.serving = Some(thread::spawn(move || _ = server.serve()));
        let mut main = Frontend::new(ours, LONG);
        self.features |= u64::from(translated) * F_ACCESS_PLATFORM;
        let protocol = ProtocolFeatures::KNOWN - ProtocolFeatures::CONFIG;
        assert_eq!(main.negotiate(self.features, protocol).unwrap(), self.features);
        if translated {
            let (ours, theirs) = UnixStream::pair().unwrap();
            main.set_backend_channel(theirs.as_fd()).unwrap();
            let channel = FrontendChannel::new(ours, LONG);
            let (handle, ram) = (main.iotlb_handle(), Arc::clone(&self.ram));
            let table = Arc::clone(&self.table);
            thread::spawn(move || serve_misses(channel, &handle, &ram, &table));
        }
        self.main = Some(main);
    }

    /// Ends the connection; what served it has ended when this returns.
    pub(crate) fn hang_up(&mut self) {
        self.main = None;
        self.serving.take().expect("it is connected").join().unwrap();
    }

    /// The two regions of memory.
    pub(crate) fn regions(&self) -> [Region; 2] {
        let all = self.ram.region();
        [(0, FIRST), (FIRST, PAGES - FIRST)].map(|(first, count)| {
            let (at, size) = ((first * PAGE) as u64, (count * PAGE) as u64);
            let (gpa, user_addr) = (all.gpa + at, all.user_addr + at);
            Region { gpa, size, user_addr, mmap_offset: all.mmap_offset + at }
        })
    }

    /// Gives the device all memory.
    pub(crate) fn announce(&mut self) {
        let (ram, regions) = (Arc::clone(&self.ram), self.regions());
        self.main().set_mem_table(&regions.map(|region| (region, ram.fd()))).unwrap();
    }

    /// Starts the ring where it is.
    pub(crate) fn start(&mut self, base: u32) {
        let at = self.config.offsets();
        let translated = self.features & F_ACCESS_PLATFORM != 0;
        let first = if translated { self.ram.gpa() } else { self.ram.user_addr() };
        let [desc, avail, used] = [at.desc, at.avail, at.used].map(|at| first + at as u64);
        let main = self.main.as_mut().expect("it is connected");
        main.set_vring_num(0, SIZE).unwrap();
        main.set_vring_base(0, base).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_call(0, Some(self.call.as_fd())).unwrap();
        main.request(Request::SetVringErr { ring: 0, fd: true }, &[self.err.as_fd()]).unwrap();
        main.set_vring_kick(0, Some(self.kick.as_fd())).unwrap();
        main.set_vring_enable(0, true).unwrap();
    }

    /// Resets the device, and takes the buffers back that it has.
    pub(crate) fn reset(&mut self) {
        self.main().reset_device().unwrap();
        for flight in std::mem::take(&mut self.flights).into_values() {
            // What it has written until now stays, and nothing comes later.
            for (offset, len) in flight.writable {
                let at = self.place(offset);
                let now = self.ram.slice(RING_PAGES * PAGE + at, len).unwrap().to_vec();
                self.model[at..at + len].copy_from_slice(&now);
            }
            self.free.extend(flight.pages);
            self.tables.extend(flight.table);
        }
        self.back = (0, 0);
        self.ram.slice(0, RING_PAGES * PAGE).unwrap().fill_zero();
        self.queue = queue(&self.ram, &self.config);
        let features = self.features | F_PROTOCOL_FEATURES;
        self.main().set_features(features).unwrap();
    }

    /// The features that were negotiated.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// Where the ring goes on behind what has come back.
    pub(crate) fn position(&self) -> u32 {
        let (chains, descs) = self.back;
        let size = u32::from(SIZE);
        let position = (descs % size) | ((1 - descs / size % 2) << 15);
        if self.config.packed { (position << 16) | position } else { chains & 0xffff }
    }

    /// A page of a buffer in flight that no byte was written to.
    pub(crate) fn untouched(&mut self) -> Option<usize> {
        let untouched = self.flights.values().filter(|flight| flight.untouched);
        let pages: BTreeSet<usize> =
            untouched.flat_map(|flight| &flight.writable).map(|(at, _)| at / PAGE).collect();
        let at = self.random(pages.len().max(1));
        pages.into_iter().nth(at)
    }

    /// The back end speaks: what it has, it may complete.
    pub(crate) fn speaks(&mut self) {
        self.silent = false;
        self.flights.values_mut().for_each(|flight| flight.untouched = false);
    }

    /// A log has begun: what was written before, all memory that is copied holds.
    pub(crate) fn is_logged(&mut self) {
        self.reap(true);
        self.written.clear();
        self.flights.values_mut().for_each(|flight| flight.before_log = !flight.untouched);
    }

    /// Where a byte of the guest's lies.
    fn place(&self, offset: usize) -> usize {
        let page = self.table.lock()[offset / PAGE].expect("it is mapped");
        page * PAGE + offset % PAGE
    }

    pub(crate) fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.ram.slice(RING_PAGES * PAGE + at, bytes.len()).unwrap().copy_from(bytes);
    }

    /// Submits a chain of random buffers, if there is room.
    pub(crate) fn submit(&mut self) -> bool {
        let has_tables = !self.tables.is_empty();
        let most = if has_tables && self.random(8) == 0 { MOST_BUFFERS } else { 5 };
        let count = 1 + self.random(most);
        self.submit_of(count)
    }

    /// Submits a chain of `count` random buffers, if there is room.
    pub(crate) fn submit_of(&mut self, count: usize) -> bool {
        let readable = self.random(count + 1);
        self.submit_with(count, readable)
    }

    /// The same, whose first `readable` buffers are read, and all others written.
    pub(crate) fn submit_with(&mut self, count: usize, readable: usize) -> bool {
        if self.free.len() < count
            || usize::from(self.queue.free_descs()) < if self.tables.is_empty() { count } else { 1 }
        {
            return false;
        }
        let (mut descs, mut bytes, mut writable) = (Vec::new(), Vec::new(), Vec::new());
        let pages: Vec<usize> = (0..count)
            .map(|_| {
                let at = self.random(self.free.len());
                self.free.swap_remove(at)
            })
            .collect();
        for (number, page) in pages.iter().enumerate() {
            let small = self.random(2) == 0;
            // Empty ones, too, but the first that is written: scripts lie of its length.
            let len = self.random(if small { 41 } else { PAGE + 1 });
            let len = len.max(usize::from(number == readable));
            let offset = page * PAGE + self.random(PAGE - len + 1);
            let addr = self.ram.gpa() + (RING_PAGES * PAGE + offset) as u64;
            if number < readable {
                let content: Vec<u8> = (0..len).map(|_| self.random(256) as u8).collect();
                let at = self.place(offset);
                self.write(at, &content);
                self.model[at..at + len].copy_from_slice(&content);
                bytes.extend(content);
                descs.push(Desc::readable(addr, len as u32));
            } else {
                writable.push((offset, len));
                descs.push(Desc::writable(addr, len as u32));
            }
        }
        self.tokens += 1;
        let table = self.tables.pop();
        match table {
            Some(table) => {
                let at = PAGE + table * TABLE_BYTES;
                let window = self.ram.window(at, TABLE_BYTES).unwrap();
                let addr = self.ram.gpa() + at as u64;
                self.queue.add_indirect(addr, &window, &descs, self.tokens).unwrap();
            }
            None => self.queue.add(&descs, self.tokens).unwrap(),
        }
        let first = if readable > 0 { descs[0].len as usize } else { 0 };
        let untouched = self.silent;
        let flight =
            Flight { readable: bytes, first, writable, pages, table, untouched, before_log: false };
        self.flights.insert(self.tokens, flight);
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
            let Flight { readable, writable, pages, table, before_log, .. } =
                self.flights.remove(&used.token).unwrap();
            let room: usize = writable.iter().map(|(_, len)| len).sum();
            let all = if self.gets_all { room } else { used.len as usize };
            let written = reply(&readable, all);
            let mut at = 0;
            for (offset, len) in writable {
                let (part, offset) = (len.min(all - at), self.place(offset));
                let now = self.ram.slice(RING_PAGES * PAGE + offset, part).unwrap().to_vec();
                if honest {
                    assert!(
                        now == written[at..at + part],
                        "chain {}: what was written",
                        used.token
                    );
                }
                self.model[offset..offset + part].copy_from_slice(&now);
                self.written.extend((part > 0 && !before_log).then_some(offset / PAGE));
                at += part;
            }
            let descs = if table.is_some() { 1 } else { pages.len() as u32 };
            self.back = (self.back.0 + 1, self.back.1 + descs);
            self.free.extend(pages);
            self.tables.extend(table);
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

    /// Waits until all chains have come back, or the device has given the ring up: true.
    pub(crate) fn comes_back_or_fails(&mut self) -> bool {
        let begun = Instant::now();
        loop {
            self.reap(true);
            if self.flights.is_empty() {
                return false;
            }
            if rustix::io::read(&self.err, &mut [0; 8]).is_ok() {
                return true;
            }
            assert!(begun.elapsed() < LONG, "neither");
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// The first bytes that a chain in flight is read of, if one has so many in one buffer.
    pub(crate) fn readable(&self) -> Option<&[u8; 8]> {
        self.flights.values().find_map(|flight| flight.readable[..flight.first].first_chunk())
    }

    /// Whether `bytes` hold what some chain in flight is to be read of.
    pub(crate) fn readable_in(&self, bytes: &[u8]) -> bool {
        self.readable().is_some_and(|first| bytes.windows(8).any(|eight| eight == first))
    }

    /// Checks every byte but those that the device may be writing.
    pub(crate) fn check(&self) {
        let mut now = self.ram.slice(RING_PAGES * PAGE, self.model.len()).unwrap().to_vec();
        for flight in self.flights.values() {
            for &(offset, len) in &flight.writable {
                let offset = self.place(offset);
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

    /// Disables the ring, as VMMs do before they stop it.
    pub(crate) fn disable(&mut self) {
        self.main().set_vring_enable(0, false).unwrap();
    }

    pub(crate) fn enable(&mut self) {
        self.main().set_vring_enable(0, true).unwrap();
    }

    /// Stops the ring, and takes what has come back: it goes on with the chains that have not.
    pub(crate) fn stop(&mut self) {
        let base = self.base().unwrap();
        self.reap(true);
        assert_eq!(base, self.position());
    }

    /// Stops the ring; where it goes on, if the proxy says so.
    pub(crate) fn base(&mut self) -> Option<u32> {
        self.main().get_vring_base(0).ok()
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

/// The guest's end of the ring, with nothing in it.
fn queue(ram: &Arc<GuestRam>, config: &QueueConfig) -> Queue {
    let window = ram.window(0, RING_PAGES * PAGE).unwrap();
    Queue::with_config(*config, Rings::placed(&window, config).unwrap()).unwrap()
}

/// What maps `count` pages from `page` on to those from `to` on, all counted from the ring's first.
pub(crate) fn update(ram: &GuestRam, page: usize, to: usize, count: usize) -> Iotlb {
    let first = ram.gpa() + (page * PAGE) as u64;
    let last = first + (count * PAGE) as u64 - 1;
    let user_addr = ram.user_addr() + (to * PAGE) as u64;
    Iotlb::Update { first, last, user_addr, access: Some(Access::ReadWrite) }
}

/// Replies to misses until the connection ends. One of a page that is not mapped comes again.
fn serve_misses(mut channel: FrontendChannel, handle: &IotlbHandle, ram: &GuestRam, table: &Table) {
    while let Ok(Some(request)) = channel.recv() {
        let BackendMessage::Iotlb(Iotlb::Miss { iova, .. }) = request.message else { continue };
        let page = (iova - ram.gpa()) as usize / PAGE;
        // What is unmapped meanwhile is invalidated after this update.
        let table = table.lock();
        let found = match page.checked_sub(RING_PAGES) {
            None => Some(update(ram, 0, 0, RING_PAGES)),
            Some(at) => table[at].map(|to| update(ram, page, RING_PAGES + to, 1)),
        };
        if let Some(update) = found {
            let _ = handle.post(&[update]).map(|_| handle.flush());
        }
    }
}
