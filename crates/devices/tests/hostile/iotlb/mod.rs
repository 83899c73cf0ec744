//! A block device with a front end that translates for it, and is slow, or refuses, or never
//! replies.

mod invalidations;
mod misses;
mod packed;
mod stops;

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use ringfence_devices::{
    blk::{Blk, BlkOptions, BlkUnit},
    disk::Disk,
};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, GuestRam};
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::{Frontend, Iotlb, IotlbWire, ProtocolFeatures, ServeError};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_INDIRECT_DESC, F_VERSION_1};
use zerocopy::FromBytes;

use crate::{rig::*, serving::Serving};

/// Where page `n` of the memory is mapped, when it is: not side by side, so that nothing merges.
pub(crate) fn iova(page: usize) -> u64 {
    0x1_0000_0000 + page as u64 * 0x1_0000
}

/// What the front end does about a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Updates {
    /// Updates at once.
    Now,
    /// Keeps it until the test releases it.
    Held,
    /// Does not reply, even if the miss is sent again.
    Never,
}

/// What the front end's two threads share.
struct Front {
    main: Mutex<Frontend>,
    /// Pages that are mapped: where to, and whether they may be written.
    table: Mutex<BTreeMap<u64, (u64, Access)>>,
    updates: Mutex<Updates>,
    /// All misses that came.
    missed: Mutex<Vec<(u64, Access)>>,
    held: Mutex<Vec<u64>>,
    /// How many misses were read and, unless they are held, resolved.
    read: AtomicU64,
    ended: AtomicBool,
    /// Nothing is read from the channel meanwhile.
    deaf: AtomicBool,
}

/// A block device with an IOTLB, and its front end.
pub(crate) struct Behind {
    front: Arc<Front>,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) workers: Arc<[Worker]>,
    pub(crate) options: BlkOptions,
    /// How many misses earlier connections had sent.
    earlier: u64,
    pages: usize,
    serving: Serving,
    /// The front end's end of the connection.
    socket: UnixStream,
    updating: Option<JoinHandle<()>>,
}

pub(crate) fn config() -> IotlbConfig {
    let again = Duration::from_millis(20);
    IotlbConfig { timeout: LONG, again, ..IotlbConfig::default() }
}

pub(crate) fn options(config: IotlbConfig, disk: Disk) -> BlkOptions {
    let options = BlkOptions::new(disk, ID, 4);
    BlkOptions { iotlb: Some(config), unit: BLK_UNIT, ..options }
}

pub(crate) fn workers(count: usize) -> Arc<[Worker]> {
    let spawn = |n| Worker::spawn(&format!("worker-{n}"), Notify::Adaptive).unwrap();
    (0..count).map(spawn).collect()
}

impl Behind {
    pub(crate) fn new(workers: usize, config: IotlbConfig, disk: Disk) -> Behind {
        Behind::connect(self::workers(workers), options(config, disk))
    }

    /// A new connection to the same device.
    pub(crate) fn connect(workers: Arc<[Worker]>, options: BlkOptions) -> Behind {
        Behind::connect_with(workers, options, 0)
    }

    /// With more virtio features than most tests need.
    pub(crate) fn connect_with(workers: Arc<[Worker]>, options: BlkOptions, more: u64) -> Behind {
        let ram = GuestRam::new(4 << 20, GPA).unwrap();
        let backend = Blk::backend(options.clone(), Arc::clone(&workers));
        let earlier = options.figures.iotlb.totals().misses;
        let (serving, ours) = Serving::start(backend);
        let socket = ours.try_clone().unwrap();
        let mut main = Frontend::new(ours, LONG);
        let features = F_VERSION_1 | F_INDIRECT_DESC | F_ACCESS_PLATFORM | more;
        let protocol = ProtocolFeatures::MQ
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::BACKEND_REQ
            | ProtocolFeatures::INFLIGHT_SHMFD
            | ProtocolFeatures::LOG_SHMFD
            | ProtocolFeatures::CONFIG;
        assert_eq!(main.negotiate(features, protocol).unwrap(), features);
        let (channel, other) = UnixStream::pair().unwrap();
        main.set_backend_channel(other.as_fd()).unwrap();
        main.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let front = Arc::new(Front {
            main: Mutex::new(main),
            table: Mutex::default(),
            updates: Mutex::new(Updates::Now),
            missed: Mutex::default(),
            held: Mutex::default(),
            read: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
        });
        let shared = Arc::clone(&front);
        let updating = Some(std::thread::spawn(move || shared.serve_misses(channel)));
        let pages = 0;
        Behind { front, ram, workers, options, earlier, pages, serving, socket, updating }
    }

    pub(crate) fn main(&self) -> MutexGuard<'_, Frontend> {
        self.front.main.lock().unwrap()
    }

    /// Sets how misses are handled from now on. Earlier ones are handled as was set before.
    pub(crate) fn updates(&self, updates: Updates) {
        self.settle();
        *self.front.updates.lock().unwrap() = updates;
    }

    /// Waits until every miss that was sent has been read, and resolved unless it is held: a worker
    /// may go on after the first update of several, long before the front end has read the last
    /// miss.
    pub(crate) fn settle(&self) {
        until("the misses that were sent", || {
            let sent = self.options.figures.iotlb.totals().misses - self.earlier;
            self.front.read.load(Ordering::Acquire) == sent
        });
    }

    pub(crate) fn deaf(&self, deaf: bool) {
        self.front.deaf.store(deaf, Ordering::Relaxed);
    }

    /// The misses that were read so far.
    pub(crate) fn missed(&self) -> Vec<(u64, Access)> {
        self.front.missed.lock().unwrap().clone()
    }

    /// Forgets which misses came.
    pub(crate) fn forget_missed(&self) {
        self.settle();
        self.front.missed.lock().unwrap().clear();
    }

    /// Waits until a miss for `page` was read.
    pub(crate) fn wait_missed(&self, page: usize) {
        until("a miss", || self.missed().iter().any(|&(addr, _)| addr / 4096 == iova(page) / 4096));
    }

    /// Resolves the misses that are held, in the order that `sort` gives them.
    pub(crate) fn release(&self, sort: impl FnOnce(&mut Vec<u64>)) {
        let mut held = std::mem::take(&mut *self.front.held.lock().unwrap());
        sort(&mut held);
        for addr in held {
            self.front.update(addr);
        }
    }

    /// An unused page of the memory, as a window; and its number.
    pub(crate) fn page(&mut self) -> (usize, ringfence_mem::Window) {
        let page = self.pages;
        self.pages += 1;
        (page, self.ram.window(page * PAGE, PAGE).unwrap())
    }

    /// A page that is mapped: a miss for it gets an update.
    pub(crate) fn mapped(&mut self) -> (usize, ringfence_mem::Window) {
        let (page, window) = self.page();
        self.map(page, Access::ReadWrite);
        (page, window)
    }

    pub(crate) fn map(&self, page: usize, access: Access) {
        let user = self.ram.user_addr() + (page * PAGE) as u64;
        self.front.table.lock().unwrap().insert(iova(page), (user, access));
    }

    /// Sends the update for a mapped page before any miss, for tests that must not depend on how
    /// soon an update arrives.
    pub(crate) fn push(&self, page: usize) {
        assert!(self.front.update(iova(page)));
    }

    pub(crate) fn unmap(&self, page: usize) {
        self.front.table.lock().unwrap().remove(&iova(page));
        self.invalidate(iova(page), iova(page) + 0xfff);
    }

    pub(crate) fn invalidate(&self, first: u64, last: u64) {
        self.main().iotlb(&Iotlb::Invalidate { first, last }).unwrap();
    }

    /// As an intel-iommu's lazy mode does it: all but the window of message interrupts.
    pub(crate) fn invalidate_all(&self) {
        self.invalidate(0, 0xfedf_ffff);
        self.invalidate(0xfef0_0000, u64::MAX);
    }

    /// A ring in a page of its own, which is mapped, started and enabled.
    pub(crate) fn queue(&mut self, index: u16) -> RawQueue {
        let (page, window) = self.mapped();
        let queue = RawQueue::new(index, window, iova(page), iova(page));
        queue.start(&mut self.main(), 0);
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

    /// Has the worker of a queue go through all its queues, and a quiet point, at least once.
    pub(crate) fn round(&self, queue: u16) {
        for _ in 0..3 {
            self.on_unit(queue, |_| ());
        }
    }

    pub(crate) fn timeouts(&self) -> u64 {
        self.options.figures.iotlb.totals().timeouts
    }

    /// The front end disconnects, whatever it waits for.
    pub(crate) fn hang_up(&self) {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Waits until the back end has ended the connection; returns why.
    pub(crate) fn ended(&mut self) -> Result<(), ServeError> {
        self.serving.ended()
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.front.ended.store(true, Ordering::Relaxed);
        self.serving.end();
        let updated = self.updating.take().unwrap().join();
        assert!(updated.is_ok() || std::thread::panicking());
    }
}

impl Front {
    /// Reads misses until the back end hangs up, and handles them as the test has set.
    fn serve_misses(&self, mut channel: UnixStream) {
        let mut bytes = [0; 12 + size_of::<IotlbWire>()];
        loop {
            while self.deaf.load(Ordering::Relaxed) && !self.ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if channel.read_exact(&mut bytes).is_err() {
                return;
            }
            let wants_reply = bytes[4] & 8 != 0;
            let wire = IotlbWire::read_from_bytes(&bytes[12..]).unwrap();
            let (iova, access) = match wire.parse() {
                Ok(Iotlb::Miss { iova, access }) => (iova, access),
                Ok(Iotlb::AccessFail { .. }) => continue,
                _ => panic!("{wire:?}"),
            };
            self.missed.lock().unwrap().push((iova, access));
            let updates = *self.updates.lock().unwrap();
            let done = match updates {
                Updates::Now => Some(self.update(iova)),
                Updates::Held => {
                    let mut held = self.held.lock().unwrap();
                    if !held.contains(&iova) {
                        held.push(iova);
                    }
                    None
                }
                Updates::Never => None,
            };
            if let Some(done) = done.filter(|_| wants_reply) {
                let mut reply = bytes[..12].to_vec();
                reply[4..8].copy_from_slice(&5u32.to_ne_bytes());
                reply[8..12].copy_from_slice(&8u32.to_ne_bytes());
                reply.extend(u64::from(!done).to_ne_bytes());
                if channel.write_all(&reply).is_err() {
                    return;
                }
            }
            self.read.fetch_add(1, Ordering::Release);
        }
    }

    /// Sends the translation of an address, if there is one.
    fn update(&self, addr: u64) -> bool {
        // As a VMM, it does one thing at a time: it sends no update for what is unmapped meanwhile.
        let mut main = self.main.lock().unwrap();
        let first = addr & !0xfff;
        let Some(&(user_addr, access)) = self.table.lock().unwrap().get(&first) else {
            return false;
        };
        let (last, access) = (first | 0xfff, Some(access));
        // The back end may be gone.
        main.iotlb(&Iotlb::Update { first, last, user_addr, access }).is_ok()
    }
}
