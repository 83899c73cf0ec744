//! The service under attack, and what must hold after each attack.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal};
use tempfile::NamedTempFile;

use crate::{
    common::{LIMIT, Place, Process, Running},
    guest::{Desc, IOMMU, NEXT, PLATFORM, Ring, Session, WRITE},
    honest::{Device, Neighbour, next_front_end},
    iommu::FEATURES,
    pending::BOUND,
};

/// An attack on the device at a socket.
pub(crate) type Attack = fn(&Target);

/// The device under attack.
pub(crate) struct Target {
    pub(crate) socket: PathBuf,
    pub(crate) device: Device,
    /// A folder for what an attack needs.
    pub(crate) folder: PathBuf,
}

impl Target {
    /// The ring on which requests complete without further input.
    pub(crate) fn index(&self) -> u32 {
        u32::from(self.device == Device::Net)
    }

    /// A request for such a ring.
    pub(crate) fn chain(&self, session: &Session) -> Vec<Desc> {
        let at = session.ram.data();
        session.ram.put(at, &[0; 32]);
        if self.device == Device::Net {
            return vec![Desc(at, 76, 0, 0)];
        }
        // The disk's name.
        session.ram.put(at, &8u32.to_le_bytes());
        let data = Desc(at + 64, 20, NEXT | WRITE, 2);
        vec![Desc(at, 16, NEXT, 1), data, Desc(at + 128, 1, WRITE, 0)]
    }

    /// Makes the device do something with a ring of that index, so that it notifies.
    pub(crate) fn works(&self, session: &Session, ring: &mut Ring) {
        ring.place(&session.ram, 0, &self.chain(session));
        for _ in 0..4 {
            ring.offer(&session.ram, 0);
        }
        ring.settle(&session.ram);
    }

    /// A connection with features and memory set, and all of `wanted` that the device has.
    pub(crate) fn open(&self, wanted: u64) -> Session {
        Session::open(&self.socket, self.device.features() | wanted)
    }

    /// Such a connection behind an IOMMU, and the front end's end of the back end's channel.
    pub(crate) fn open_with_channel(&self) -> (Session, UnixStream) {
        let session = self.open(PLATFORM);
        let channel = session.give_channel();
        (session, channel)
    }
}

/// The resources of a process.
#[derive(Debug, PartialEq, Eq)]
struct Holds {
    threads: usize,
    descriptors: Vec<String>,
}

pub(crate) struct Service {
    // Dropped before the process.
    neighbour: Option<Neighbour>,
    running: Running,
    place: Rc<Place>,
    /// The image of the neighbour's disk. On a busy machine a flush of a real disk takes seconds, which
    /// are none of the service's.
    _memory: NamedTempFile,
    device: Device,
    /// The front end of `guard`'s IOMMU: without one there is no machine that its disks could
    /// serve.
    iommu: Option<Session>,
    /// Before the first attack.
    holds: Holds,
    number: u8,
}

impl Service {
    pub(crate) fn start(device: Device) -> Service {
        Service::with(Place::new(), device, "disk.img")
    }

    /// With a device at the socket `hostile`, with this image if it is a disk, and another at
    /// `other` unless it is alone.
    pub(crate) fn with(place: Place, device: Device, image: &str) -> Service {
        place.write("disk.img", vec![0; 4 << 20]);
        Service::run(Rc::new(place), device, image, &[])
    }

    /// The same, with more of its options.
    pub(crate) fn with_more(place: Place, device: Device, image: &str, more: &[&str]) -> Service {
        Service::run(Rc::new(place), device, image, more)
    }

    /// Another service in its place, which is free again.
    pub(crate) fn again(&self) -> Service {
        Service::run(Rc::clone(&self.place), self.device, "disk.img", &[])
    }

    fn run(place: Rc<Place>, device: Device, image: &str, more: &[&str]) -> Service {
        let disk = format!("hostile={image},queues=2");
        let memory = NamedTempFile::new_in("/dev/shm").unwrap();
        memory.as_file().set_len(4 << 20).unwrap();
        let other = format!("other={}", memory.path().display());
        let arguments: &[&str] = match device {
            Device::Disk => &["blk", "--socket", "hostile", "--image", image, "--queues", "2"],
            Device::Guarded => &["guard", "--iommu", "iommu", "--blk", &disk, "--blk", &other],
            Device::Net => &["net", "--socket", "hostile", "--peer", "other"],
        };
        // One worker for all, so that what holds it up holds up everything.
        let running =
            place.start(&[arguments, &["--workers", "1", "--log", "warn"], more].concat());
        let mut service = Service {
            place,
            _memory: memory,
            running,
            device,
            iommu: None,
            neighbour: None,
            holds: Holds { threads: 0, descriptors: Vec::new() },
            number: 0,
        };
        service.begin();
        service.still_serves("the beginning");
        service.holds = service.settled();
        service
    }

    /// Starts what is not attacked.
    fn begin(&mut self) {
        if self.device == Device::Guarded {
            self.iommu = Some(Session::open_at(IOMMU, &self.place.path("iommu"), PLATFORM));
        }
        if self.device != Device::Disk {
            let (path, service) = (self.place.path("other"), Some(self.process().id));
            self.neighbour = Some(Neighbour::of(path, self.device, service));
        }
    }

    pub(crate) fn target(&self) -> Target {
        Target {
            socket: self.place.path("hostile"),
            device: self.device,
            folder: self.place.path("."),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    /// Attacks, and checks that only the attacker's connection has suffered.
    pub(crate) fn attack(&mut self, name: &str, attack: impl Fn(&Target)) {
        eprint!("{:?}: {name}: ", self.device);
        let begun = Instant::now();
        attack(&self.target());
        eprint!("{:.1?}", begun.elapsed());
        self.holds_as_before(name);
        eprintln!(", all well after {:.1?}", begun.elapsed());
    }

    /// The same, with the IOMMU's front end as the attacker: the next one's devices are served
    /// again.
    pub(crate) fn attack_iommu(&mut self, name: &str, attack: impl Fn(&Target)) {
        eprintln!("IOMMU: {name}");
        self.neighbour = None;
        self.iommu = None;
        attack(&self.target());
        self.begin();
        self.holds_as_before(name);
    }

    fn holds_as_before(&mut self, name: &str) {
        self.still_serves(name);
        let begun = Instant::now();
        loop {
            let holds = self.holds();
            if holds == self.holds {
                return;
            }
            assert!(
                begun.elapsed() < LIMIT,
                "after {name} there is {holds:?}, and was {:?}",
                self.holds
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks that the neighbour and the next front end are served.
    pub(crate) fn still_serves(&mut self, after: &str) {
        self.number = self.number.wrapping_add(1);
        self.is_there(after);
        self.neighbour_goes_on(after);
        next_front_end(&self.place.path("hostile"), self.device, self.number);
        self.neighbour_goes_on(after);
        self.is_there(after);
    }

    fn is_there(&mut self, after: &str) {
        let log = self.running.stderr();
        assert!(self.running.is_running(), "the service has ended after {after}:\n{log}");
    }

    /// A front end for `guard`'s IOMMU, in place of the one that does nothing; the neighbour is
    /// dropped.
    pub(crate) fn take_iommu(&mut self) -> Session {
        self.drop_neighbour();
        self.iommu = None;
        Session::open_at(IOMMU, &self.place.path("iommu"), FEATURES)
    }

    /// Only the test sends it requests from now on.
    pub(crate) fn drop_neighbour(&mut self) {
        self.neighbour = None;
    }

    pub(crate) fn process(&self) -> Process {
        self.running.process()
    }

    /// How long the neighbour's requests take, µs, while `something` is repeated for that time.
    pub(crate) fn neighbour_beside(&self, time: Duration, something: impl Fn(&Target)) -> Vec<u64> {
        let (neighbour, target) = (self.neighbour.as_ref().unwrap(), self.target());
        neighbour.two_more();
        let begun = Instant::now();
        while begun.elapsed() < time {
            something(&target);
        }
        neighbour.two_more()
    }

    pub(crate) fn neighbour_goes_on(&self, after: &str) {
        let held_up = self.neighbour_held_up();
        assert!(held_up < BOUND, "{after}: a neighbour's request was held up for {held_up:?}");
    }

    /// The longest time for which it has held up a request of the neighbour's since the last call.
    pub(crate) fn neighbour_held_up(&self) -> Duration {
        self.neighbour.as_ref().map(Neighbour::held_up).unwrap_or_default()
    }

    /// Its resources once they stay the same, and none of its threads wants a CPU: one that waits for it
    /// may be about to start another, or to close what a front end has left.
    fn settled(&self) -> Holds {
        let (mut last, begun) = (self.holds(), Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let next = self.holds();
            if next == last && !self.process().states().contains(&'R') {
                return next;
            }
            assert!(begun.elapsed() < LIMIT, "it does not settle: {next:?}");
            last = next;
        }
    }

    /// Its threads, and their names.
    pub(crate) fn threads(&self) -> impl Iterator<Item = (Pid, String)> {
        threads(self.running.process().id.to_string())
    }

    fn holds(&self) -> Holds {
        let process = PathBuf::from(format!("/proc/{}", self.running.process().id));
        let names = |folder: &Path| fs::read_dir(folder).unwrap().flatten().collect::<Vec<_>>();
        let links = names(&process.join("fd")).into_iter().filter_map(|file| {
            let link = fs::read_link(file.path()).ok()?;
            // Sockets and pipes have numbers, which are new each time.
            let link = link.to_string_lossy().into_owned();
            Some(link.split(':').next().unwrap_or_default().to_owned())
        });
        let mut descriptors: Vec<String> = links.collect();
        descriptors.sort();
        // The kernel's own threads for I/O come and go.
        let threads = self.threads().filter(|(_, name)| !name.starts_with("iou-")).count();
        Holds { threads, descriptors }
    }

    /// A metric of its `--metrics unix:figures`: the sum, if it has several values.
    pub(crate) fn figure(&self, name: &str) -> usize {
        let mut stream = UnixStream::connect(self.path("figures")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let lines =
            page.lines().filter_map(|line| line.strip_prefix("ringfence_")?.split_once(' '));
        let of_name = |label: &str| {
            label.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        let values = lines
            .filter(|(label, _)| of_name(label))
            .map(|(_, value)| value.parse::<usize>().unwrap());
        values.reduce(|sum, value| sum + value).unwrap_or_else(|| panic!("no {name}: {page}"))
    }

    /// Its log so far.
    pub(crate) fn log(&self) -> String {
        self.running.stderr()
    }

    /// Asks it to end. The neighbour goes first: its later requests are no longer served.
    pub(crate) fn terminate(&mut self) {
        self.neighbour.take();
        self.running.signal(Signal::TERM);
    }

    /// Waits until its sockets are gone and it has ended, or has named an image that the kernel
    /// holds.
    pub(crate) fn ends_or_names(&mut self, image: &str) {
        self.ends_or_logs(&format!("{image}: the disk has not completed"));
    }

    /// Waits until its sockets are gone and it has ended, or has said why it cannot.
    pub(crate) fn ends_or_logs(&mut self, why: &str) {
        let begun = Instant::now();
        while self.running.is_running() && !self.running.stderr().contains(why) {
            assert!(begun.elapsed() < LIMIT, "it neither ends nor logs why");
            std::thread::sleep(Duration::from_millis(1));
        }
        sockets_are_gone(&self.place);
    }

    /// Ends it and checks that this succeeds.
    pub(crate) fn end(mut self) {
        self.terminate();
        self.ended_with(0);
    }

    /// Waits for its end; returns its log.
    pub(crate) fn ended_with(self, code: i32) -> String {
        let ended = self.running.wait();
        assert_eq!(ended.code(), code, "{ended}");
        assert!(!ended.err.contains("panicked"), "{ended}");
        sockets_are_gone(&self.place);
        ended.err
    }
}

/// The threads of a process, and their names.
pub(crate) fn threads(process: String) -> impl Iterator<Item = (Pid, String)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.flatten().map(|thread| {
        let id = thread.file_name().to_str().unwrap().parse().unwrap();
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        (Pid::from_raw(id).unwrap(), name.trim_end().to_owned())
    })
}

fn sockets_are_gone(place: &Place) {
    for socket in ["hostile", "other", "iommu"] {
        assert!(!place.path(socket).exists(), "{socket} is left");
    }
}

/// Every attack on every device, each on its own.
pub(crate) fn all(attacks: &[(&str, Attack)]) {
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        for (name, attack) in attacks {
            service.attack(name, *attack);
        }
        service.end();
    }
}
