//! A device that serves requests behind a device IOTLB, and its front end.

use std::{
    collections::BTreeMap,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, GuestRam, SharedFile, Window};
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, Iotlb, IotlbWire, ProtocolFeatures, RingAddresses,
    Server, Shutdown,
};
use ringfence_vhost_user_backend::{Addresses, Device, Request, Requests};
use ringfence_virtq::{
    Desc, F_ACCESS_PLATFORM, F_VERSION_1,
    driver::{Queue, QueueConfig, Rings},
};
use zerocopy::FromBytes;

const PAGE: usize = 4096;
const FEATURES: u64 = F_VERSION_1 | F_ACCESS_PLATFORM;
/// The memory in IOVAs: page n is at this address plus n times two pages.
const IOVA: u64 = 1 << 40;
/// A guard against hanging, not a measurement.
const LONG: Duration = Duration::from_secs(60);

fn iova(page: usize) -> u64 {
    IOVA + (2 * PAGE * page) as u64
}

/// Sends its requests to the test, and the queues that stop.
struct Recorder(Mutex<Sender<Request>>, Arc<AtomicUsize>, Mutex<Sender<u16>>);

impl Device for Recorder {
    fn request(&mut self, queue: u16, request: Request) {
        assert_eq!(queue, 0);
        self.1.fetch_add(1, Ordering::Relaxed);
        let _ = self.0.lock().unwrap().send(request);
    }

    fn stop(&mut self, queue: u16) {
        let _ = self.2.lock().unwrap().send(queue);
    }
}

/// The front end and the driver. It sends updates for misses from `mapped`.
struct Rig {
    main: Arc<Mutex<Frontend>>,
    mapped: Arc<Mutex<BTreeMap<u64, u64>>>,
    ram: Arc<GuestRam>,
    queue: Queue,
    kick: OwnedFd,
    call: OwnedFd,
    shutdown: Shutdown,
    serving: Option<JoinHandle<()>>,
    updating: Option<JoinHandle<()>>,
    requests: Receiver<Request>,
    stops: Receiver<u16>,
    delivered: Arc<AtomicUsize>,
    workers: Arc<[Worker]>,
}

impl Rig {
    fn new() -> Rig {
        let ((send, requests), (stop, stops)) = (channel(), channel());
        let delivered = Arc::new(AtomicUsize::new(0));
        let device = Recorder(Mutex::new(send), Arc::clone(&delivered), Mutex::new(stop));
        let workers: Arc<[Worker]> = [Worker::spawn("test", Notify::Sleep).unwrap()].into();
        let addresses = Addresses::Iotlb(IotlbConfig { timeout: LONG, ..IotlbConfig::default() });
        let backend = Requests::backend(device, "test", addresses, Arc::clone(&workers), 0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, backend);
        let shutdown = server.shutdown_handle();
        let serving = Some(thread::spawn(move || _ = server.serve()));
        let mut main = Frontend::new(ours, LONG);
        let protocol = ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::BACKEND_REQ
            | ProtocolFeatures::LOG_SHMFD;
        assert_eq!(main.negotiate(FEATURES, protocol).unwrap(), FEATURES);
        let (misses, other) = UnixStream::pair().unwrap();
        main.set_backend_channel(other.as_fd()).unwrap();
        let ram = GuestRam::new(64 * PAGE, 1 << 32).unwrap();
        main.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let main = Arc::new(Mutex::new(main));
        let mapped: Arc<Mutex<BTreeMap<u64, u64>>> = Arc::default();
        let updating = {
            let (main, mapped) = (Arc::clone(&main), Arc::clone(&mapped));
            Some(thread::spawn(move || serve_misses(misses, &main, &mapped)))
        };
        // The ring occupies the first page.
        let config = QueueConfig { size: 128, event_idx: false, packed: false };
        let rings = Rings::placed(&ram.window(0, PAGE).unwrap(), &config).unwrap();
        let queue = Queue::with_config(config, rings).unwrap();
        let (kick, call) = (event::new().unwrap(), event::new().unwrap());
        let rig = Rig {
            main,
            mapped,
            ram,
            queue,
            kick,
            call,
            shutdown,
            serving,
            updating,
            requests,
            stops,
            delivered,
            workers,
        };
        rig.map(0);
        let offsets = config.offsets();
        let [desc, avail, used] =
            [offsets.desc, offsets.avail, offsets.used].map(|offset| iova(0) + offset as u64);
        let mut main = rig.main.lock().unwrap();
        main.set_vring_num(0, config.size).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_base(0, 0).unwrap();
        main.set_vring_call(0, Some(rig.call.as_fd())).unwrap();
        main.set_vring_kick(0, Some(rig.kick.as_fd())).unwrap();
        main.set_vring_enable(0, true).unwrap();
        drop(main);
        rig
    }

    fn user(&self, page: usize) -> u64 {
        self.ram.user_addr() + (page * PAGE) as u64
    }

    /// From now on misses of this page get an update.
    fn map(&self, page: usize) {
        self.mapped.lock().unwrap().insert(iova(page), self.user(page));
    }

    fn page(&self, page: usize) -> Window {
        self.ram.window(page * PAGE, PAGE).unwrap()
    }

    fn send(&mut self, chain: &[Desc], token: u64) {
        self.queue.add(chain, token).unwrap();
        self.queue.publish();
        event::signal(&self.kick);
    }

    fn next(&self) -> Request {
        self.requests.recv_timeout(LONG).expect("a request")
    }

    /// The next completed request, and how many bytes were written.
    fn completed(&mut self) -> (u64, u32) {
        let begun = Instant::now();
        loop {
            if let Some(used) = self.queue.pop().unwrap() {
                return (used.token, used.len);
            }
            assert!(begun.elapsed() < LONG, "no completion");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.shutdown.shutdown();
        for thread in [&mut self.serving, &mut self.updating] {
            assert!(thread.take().unwrap().join().is_ok() || thread::panicking());
        }
    }
}

/// Sends updates for misses until the back end hangs up.
fn serve_misses(
    mut misses: UnixStream,
    main: &Mutex<Frontend>,
    mapped: &Mutex<BTreeMap<u64, u64>>,
) {
    let mut bytes = [0; 12 + size_of::<IotlbWire>()];
    while misses.read_exact(&mut bytes).is_ok() {
        let wire = IotlbWire::read_from_bytes(&bytes[12..]).unwrap();
        let Ok(Iotlb::Miss { iova, .. }) = wire.parse() else { continue };
        let first = iova & !0xfff;
        let begun = Instant::now();
        // A page that is not mapped yet gets its update when it is.
        let user_addr = loop {
            match mapped.lock().unwrap().get(&first) {
                Some(user_addr) => break *user_addr,
                None if begun.elapsed() > LONG => return,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        let (last, access) = (first | 0xfff, Some(Access::ReadWrite));
        let update = Iotlb::Update { first, last, user_addr, access };
        if main.lock().unwrap().iotlb(&update).is_err() {
            return;
        }
    }
}

#[test]
fn buffers_are_there_whatever_pieces_they_lie_in() {
    let mut rig = Rig::new();
    (1..5).for_each(|page| rig.map(page));
    rig.page(1).write(PAGE - 3, b"one");
    rig.page(2).write(0, b"and two");
    let chain = [
        Desc::readable(iova(1) + PAGE as u64 - 3, 3),
        Desc::readable(iova(2), 7),
        Desc::writable(iova(3) + 100, 5),
        Desc::writable(iova(4), 10),
    ];
    rig.send(&chain, 7);
    let mut request = rig.next();
    assert_eq!((request.readable_len(), request.writable_len()), (10, 15));
    let mut bytes = [0; 6];
    assert_eq!(request.read(&mut bytes), 6);
    assert_eq!(&bytes, b"oneand");
    assert_eq!((request.read(&mut bytes), &bytes[..4]), (4, &b" two"[..]));
    assert_eq!(request.read(&mut bytes), 0);
    assert_eq!(request.write(b"123"), 3);
    assert_eq!(request.write(b"45678"), 5);
    request.complete();
    assert_eq!(rig.completed(), (7, 8));
    let mut written = [0; 5];
    rig.page(3).read(100, &mut written);
    assert_eq!(&written, b"12345");
    rig.page(4).read(0, &mut written);
    assert_eq!(&written, b"678\0\0");
}

#[test]
fn requests_are_completed_by_any_thread_in_any_order() {
    let mut rig = Rig::new();
    rig.map(1);
    for token in 0..8 {
        rig.send(&[Desc::writable(iova(1) + 8 * token, 8)], token);
    }
    let mut requests: Vec<Request> = (0..8).map(|_| rig.next()).collect();
    // Nothing else wakes the worker, which sleeps by then.
    for token in (0..8).rev() {
        let request = requests.pop().unwrap();
        let completes = thread::spawn(move || match token % 3 {
            0 => drop(request),
            1 => request.complete(),
            _ => request.fail(std::io::Error::other("no reason")),
        });
        assert_eq!(rig.completed(), (token, 0));
        completes.join().unwrap();
    }
}

#[test]
fn a_request_whose_translation_is_missing_holds_up_no_other() {
    let mut rig = Rig::new();
    rig.map(1);
    // There is no update for page 9 yet, and misses are served in order: page 1 comes first.
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    rig.next().complete();
    assert_eq!(rig.completed(), (0, 0));
    rig.send(&[Desc::writable(iova(9), 8)], 1);
    rig.send(&[Desc::writable(iova(1), 8)], 2);
    rig.next().complete();
    assert_eq!(rig.completed(), (2, 0));
    rig.map(9);
    rig.next().complete();
    assert_eq!(rig.completed(), (1, 0));
}

// rule D15
#[test]
fn an_invalidation_waits_until_the_device_has_completed_what_uses_the_range() {
    let mut rig = Rig::new();
    (1..3).for_each(|page| rig.map(page));
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    let mut request = rig.next();
    let done = Arc::new(AtomicBool::new(false));
    let invalidates = {
        let (main, done) = (Arc::clone(&rig.main), Arc::clone(&done));
        thread::spawn(move || {
            let (first, last) = (iova(1), iova(1) + 0xfff);
            main.lock().unwrap().iotlb(&Iotlb::Invalidate { first, last }).unwrap();
            done.store(true, Ordering::Release);
        })
    };
    thread::sleep(Duration::from_millis(50));
    assert!(
        !done.load(Ordering::Acquire),
        "the invalidation ended while the device could still write"
    );
    assert_eq!(request.write(b"late"), 4);
    request.complete();
    invalidates.join().unwrap();
    assert_eq!(rig.completed(), (0, 4));
}

#[test]
fn a_ring_that_stops_waits_for_what_the_device_has() {
    let mut rig = Rig::new();
    rig.map(1);
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    let request = rig.next();
    let main = Arc::clone(&rig.main);
    let stops = thread::spawn(move || main.lock().unwrap().get_vring_base(0).unwrap());
    assert_eq!(rig.stops.recv_timeout(LONG), Ok(0));
    thread::sleep(Duration::from_millis(50));
    assert!(!stops.is_finished());
    request.complete();
    assert_eq!(stops.join().unwrap(), 1);
    assert_eq!(rig.completed(), (0, 0));
}

#[test]
fn an_interrupt_that_is_set_is_notified_of_what_was_given_back_before() {
    let mut rig = Rig::new();
    rig.map(1);
    // As QEMU does: it sets the interrupt last.
    rig.main.lock().unwrap().set_vring_call(0, None).unwrap();
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    rig.next().complete();
    assert_eq!(rig.completed(), (0, 0));
    let call = event::new().unwrap();
    rig.main.lock().unwrap().set_vring_call(0, Some(call.as_fd())).unwrap();
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(&call, &mut count), Ok(8), "the completion is not notified");
}

#[test]
fn completions_that_wait_for_their_turn_come_when_it_has_come() {
    let mut rig = Rig::new();
    (1..17).for_each(|page| rig.map(page));
    let (_log, fd) = SharedFile::create(1 << 20).unwrap();
    {
        let mut main = rig.main.lock().unwrap();
        main.request(
            ringfence_vhost_user::msg::Request::SetLogBase { len: 1 << 20, offset: 0 },
            &[fd.as_fd()],
        )
        .unwrap();
        main.set_features(FEATURES | F_PROTOCOL_FEATURES | F_LOG_ALL).unwrap();
    }
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    let first = rig.next();
    // More bytes than a round moves, each.
    let pages: Vec<Desc> = (1..17).map(|page| Desc::writable(iova(page), PAGE as u32)).collect();
    let mut others = Vec::new();
    for token in 1..5 {
        rig.send(&pages, token);
        let mut request = rig.next();
        assert_eq!(request.write(&[token as u8; 16 * PAGE]), 16 * PAGE);
        others.push(request);
    }
    // All at once, as the worker sees it.
    rig.workers[0].call(move |_| others.into_iter().for_each(Request::complete)).unwrap();
    thread::sleep(Duration::from_millis(50));
    assert!(rig.queue.pop().unwrap().is_none(), "writes are logged: completions are in order");
    first.complete();
    assert_eq!((0..5).map(|_| rig.completed().0).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

#[test]
fn what_is_longer_than_the_device_takes_never_comes_to_it() {
    let mut rig = Rig::new();
    rig.map(1);
    rig.send(&[Desc::writable(iova(1), (1 << 20) + 1)], 0);
    assert_eq!(rig.completed(), (0, 0));
    rig.send(&[Desc::writable(iova(1), 8)], 1);
    rig.next().complete();
    assert_eq!(rig.completed(), (1, 0));
    assert_eq!(rig.delivered.load(Ordering::Relaxed), 1);
}

#[test]
fn what_the_device_still_has_of_a_front_end_that_has_gone_reaches_nothing() {
    let mut rig = Rig::new();
    rig.map(1);
    rig.send(&[Desc::writable(iova(1), 8)], 0);
    let mut request = rig.next();
    let page = rig.page(1);
    drop(rig);
    // The guest lives on, and has reused the page.
    assert_eq!((request.writable_len(), request.write(b"nowhere?")), (0, 0));
    let mut bytes = [0; 8];
    page.read(0, &mut bytes);
    assert_eq!(bytes, [0; 8]);
    request.complete();
}

#[test]
#[should_panic(expected = "a device needs a worker")]
fn a_device_without_a_worker_is_refused_when_it_is_made() {
    let recorder = Recorder(Mutex::new(channel().0), Arc::default(), Mutex::new(channel().0));
    Requests::backend(recorder, "test", Addresses::Physical, Arc::new([]), 0);
}
