//! A device without an IOMMU: a ring with a record of what an earlier process has left, one whose memory goes
//! and comes back, and one without kicks.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringfence_mem::{GuestRam, SharedFile, Window};
use ringfence_run::{
    event,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, InflightRegion, ProtocolFeatures, RingAddresses,
    Server, Shutdown,
};
use ringfence_vhost_user_backend::{Addresses, Device, Request, Requests};
use ringfence_virtq::{
    Desc, F_VERSION_1,
    driver::{Queue, QueueConfig, Rings},
};

const PAGE: usize = 4096;
const GPA: u64 = 1 << 32;
const SIZE: u16 = 16;
const CONFIG: QueueConfig = QueueConfig { size: SIZE, event_idx: false, packed: false };
const FEATURES: u64 = F_VERSION_1;
const PROTOCOL: ProtocolFeatures = ProtocolFeatures::REPLY_ACK
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
/// A guard against hanging, not a measurement.
const LONG: Duration = Duration::from_secs(60);

/// Sends its requests to the test.
struct Recorder(Mutex<Sender<Request>>);

impl Device for Recorder {
    fn request(&mut self, _: u16, request: Request) {
        let _ = self.0.lock().unwrap().send(request);
    }
}

/// The front end and the driver, of a ring in the first page.
struct Rig {
    main: Frontend,
    ram: Arc<GuestRam>,
    page: Window,
    queue: Queue,
    kick: OwnedFd,
    shutdown: Shutdown,
    serving: Option<JoinHandle<()>>,
    requests: Receiver<Request>,
}

impl Rig {
    fn new() -> Rig {
        let (send, requests) = channel();
        let workers: Arc<[Worker]> = [Worker::spawn("test", Notify::Sleep).unwrap()].into();
        let device = Recorder(Mutex::new(send));
        let backend = Requests::backend(device, "test", Addresses::Physical, workers, 0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, backend);
        let shutdown = server.shutdown_handle();
        let serving = Some(thread::spawn(move || _ = server.serve()));
        let mut main = Frontend::new(ours, LONG);
        assert_eq!(main.negotiate(FEATURES, PROTOCOL).unwrap(), FEATURES);
        let ram = GuestRam::new(8 * PAGE, GPA).unwrap();
        main.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
        let page = ram.window(0, PAGE).unwrap();
        let queue = Queue::with_config(CONFIG, Rings::placed(&page, &CONFIG).unwrap()).unwrap();
        let kick = event::new().unwrap();
        Rig { main, ram, page, queue, kick, shutdown, serving, requests }
    }

    fn add(&mut self, token: u64) {
        self.queue.add(&[Desc::writable(GPA + PAGE as u64, 8)], token).unwrap();
        self.queue.publish();
    }

    fn start(&mut self, kicks: bool, enabled: bool) {
        let offsets = CONFIG.offsets();
        let [desc, avail, used] = [offsets.desc, offsets.avail, offsets.used]
            .map(|offset| self.ram.user_addr() + offset as u64);
        let main = &mut self.main;
        main.set_vring_num(0, SIZE).unwrap();
        main.set_vring_addr(0, &RingAddresses { desc, avail, used, log: None }).unwrap();
        main.set_vring_base(0, 0).unwrap();
        main.set_vring_kick(0, kicks.then(|| self.kick.as_fd())).unwrap();
        main.set_vring_enable(0, enabled).unwrap();
    }

    fn next(&self) -> Request {
        self.requests.recv_timeout(LONG).expect("a request")
    }

    fn completed(&mut self) -> u64 {
        let begun = Instant::now();
        loop {
            if let Some(used) = self.queue.pop().unwrap() {
                return used.token;
            }
            assert!(begun.elapsed() < LONG, "no completion");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.shutdown.shutdown();
        assert!(self.serving.take().unwrap().join().is_ok() || thread::panicking());
    }
}

/// The guest moves: no other process of this front end's does what is on record.
#[test]
fn a_ring_that_stops_while_writes_are_logged_does_what_an_earlier_process_left() {
    let mut rig = Rig::new();
    (0..3).for_each(|token| rig.add(token));
    let avail = CONFIG.offsets().avail;
    let head = |at: usize| {
        let mut bytes = [0; 2];
        rig.page.read(avail + 4 + 2 * at, &mut bytes);
        u16::from_le_bytes(bytes)
    };
    let heads = [0, 1, 2].map(head);
    let (place, fd) = rig.main.inflight(1, SIZE).unwrap().unwrap();
    {
        let fd = fd.as_fd().try_clone_to_owned().unwrap();
        let region = InflightRegion::open(fd, &place, false).unwrap();
        let (mut earlier, _) = region.split(0, SIZE, 0).unwrap();
        heads.into_iter().for_each(|head| earlier.take(head));
    }
    rig.main
        .request(ringfence_vhost_user::msg::Request::SetInflight(place), &[fd.as_fd()])
        .unwrap();
    rig.start(true, false);
    let (_log, fd) = SharedFile::create(1 << 20).unwrap();
    rig.main
        .request(
            ringfence_vhost_user::msg::Request::SetLogBase { len: 1 << 20, offset: 0 },
            &[fd.as_fd()],
        )
        .unwrap();
    rig.main.set_features(FEATURES | F_PROTOCOL_FEATURES | F_LOG_ALL).unwrap();
    assert!(rig.requests.try_recv().is_err(), "the ring is disabled");
    let base = thread::scope(|scope| {
        let Rig { main, requests, .. } = &mut rig;
        let stops = scope.spawn(|| main.get_vring_base(0).unwrap());
        for _ in 0..3 {
            requests.recv_timeout(LONG).expect("a request on record").complete();
        }
        stops.join().unwrap()
    });
    assert_eq!(base, 3);
    assert_eq!([(); 3].map(|()| rig.completed()), [0, 1, 2]);
}

/// As QEMU changes a region: it removes it, and adds it again.
#[test]
fn a_ring_whose_memory_goes_and_comes_back_goes_on() {
    let mut rig = Rig::new();
    rig.start(true, true);
    for round in 0..4 {
        rig.add(round);
        event::signal(&rig.kick);
        rig.next().complete();
        assert_eq!(rig.completed(), round);
        rig.add(10 + round);
        let (ram, main) = (&rig.ram, &mut rig.main);
        main.request(ringfence_vhost_user::msg::Request::RemMemReg(ram.region()), &[]).unwrap();
        event::signal(&rig.kick);
        thread::sleep(Duration::from_millis(20));
        assert!(rig.requests.try_recv().is_err(), "it is served in memory that is gone");
        main.request(ringfence_vhost_user::msg::Request::AddMemReg(ram.region()), &[ram.fd()])
            .unwrap();
        rig.next().complete();
        assert_eq!(rig.completed(), 10 + round);
    }
    rig.main.request(ringfence_vhost_user::msg::Request::RemMemReg(rig.ram.region()), &[]).unwrap();
    assert_eq!(rig.main.get_vring_base(0).unwrap(), 8);
}

#[test]
fn a_ring_without_kicks_is_polled() {
    let mut rig = Rig::new();
    rig.start(false, true);
    for round in 0..5 {
        thread::sleep(Duration::from_millis(20));
        rig.add(round);
        rig.next().complete();
        assert_eq!(rig.completed(), round);
    }
    assert_eq!(rig.main.get_vring_base(0).unwrap(), 5);
}
