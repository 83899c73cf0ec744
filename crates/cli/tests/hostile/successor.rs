//! Services that survive their own end: the next process serves front ends, which do not notice.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::unix::{net::UnixStream, process::CommandExt as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    common::{LIMIT, Place},
    guest::{IOMMU, PLATFORM, Ring, Session},
    honest::{Device, Neighbour},
    iommu::{self, FEATURES},
    manager::Manager,
    service::threads,
    wire::{Client, request::GET_FEATURES},
};

/// How a process makes way for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It is killed, and the service manager starts another.
    Killed,
    /// The service manager asks it to end, and starts another.
    Restarted,
    /// The next one takes over.
    HandedOver,
}

/// How often.
const TIMES: usize = 10;

/// A service, one process after the other.
pub(crate) struct Line {
    place: Place,
    manager: Manager,
    arguments: Vec<String>,
    end: End,
    now: Child,
}

impl Line {
    pub(crate) fn start(arguments: &[&str], end: End) -> Line {
        let place = Place::in_memory();
        for name in ["disk.img", "other.img"] {
            place.write(name, vec![0; 4 << 20]);
        }
        let manager = Manager::new(&place.path("."));
        let arguments = [arguments, &["--workers", "1"]].concat();
        let mut arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        if end == End::HandedOver {
            arguments.extend(["--hand-over", "door"].map(str::to_owned));
        }
        let now = Line::process(&place, &manager, &arguments, end);
        Line { place, manager, arguments, end, now }
    }

    fn process(place: &Place, manager: &Manager, arguments: &[String], end: End) -> Child {
        let program = env!("CARGO_BIN_EXE_ringfence");
        let mut command = match end {
            End::HandedOver => Command::new(program),
            End::Killed | End::Restarted => manager.command(program),
        };
        let log = File::options().create(true).append(true).open(place.path("log")).unwrap();
        command.args(arguments).current_dir(place.path(".")).stderr(Stdio::from(log));
        command.process_group(0).spawn().unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Waits until each thread of the process has been seen asleep. The front ends have the replies
    /// to their requests, but a thread that was held up since may have yet to record that no
    /// request is in progress: killing the process before that would cut a request.
    fn settles(&self) {
        self.threads_settle(|_| true);
    }

    /// The same, of threads whose names are chosen.
    fn threads_settle(&self, chosen: impl Fn(&str) -> bool) {
        let process = self.now.id();
        let begun = Instant::now();
        for (thread, name) in threads(process.to_string()).filter(|(_, name)| chosen(name)) {
            let file = format!("/proc/{process}/task/{}/stat", thread.as_raw_nonzero());
            // The state follows the name, which is in parentheses.
            let sleeps =
                |stat: String| stat.rsplit_once(") ").is_some_and(|s| s.1.starts_with('S'));
            while std::fs::read_to_string(&file).is_ok_and(|stat| !sleeps(stat)) {
                assert!(begun.elapsed() < LIMIT, "thread {name} does not come to rest");
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// Waits until those threads of the process are at rest that reply to front ends.
    pub(crate) fn fronts_settle(&self) {
        self.threads_settle(|name| name == "front");
    }

    /// Kills the process whatever it does for drivers. The kernel may keep it until a disk completes requests.
    pub(crate) fn kill(&mut self) {
        self.now.kill().unwrap();
    }

    /// Starts the next process once the killed one is gone; between the two there is `meanwhile`.
    pub(crate) fn follow(&mut self, meanwhile: impl FnOnce()) {
        self.now.wait().unwrap();
        meanwhile();
        self.now = Line::process(&self.place, &self.manager, &self.arguments, self.end);
    }

    /// Starts the next process.
    fn goes_on(&mut self) {
        self.settles();
        let Line { place, manager, arguments, end, now } = self;
        let before = Pid::from_child(now);
        match end {
            End::Killed => now.kill().unwrap(),
            End::Restarted => kill_process(before, Signal::TERM).unwrap(),
            End::HandedOver => {
                let next = Line::process(place, manager, arguments, *end);
                let mut before = std::mem::replace(now, next);
                self.ended(&before.wait().unwrap().success());
                return;
            }
        }
        let status = now.wait().unwrap();
        let next = Line::process(place, manager, arguments, *end);
        *now = next;
        self.ended(&(self.end == End::Killed || status.success()));
    }

    fn ended(&self, well: &bool) {
        assert!(well, "{}", self.log());
    }

    /// Every connection was resumed by each next process: none was made anew.
    fn no_front_end_connected_again(&self, sockets: usize) {
        let wanted = [sockets, TIMES * sockets];
        let words = ["a front end has connected", "going on with its front end"];
        let count =
            |log: &str| words.map(|words| log.lines().filter(|line| line.contains(words)).count());
        // A thread of its own writes the log: the last process's lines may be yet to come.
        let least = if self.end == End::Killed { 1 } else { wanted[1] };
        let begun = Instant::now();
        while count(&self.log())[1] < least && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = self.log();
        let found = count(&log);
        match self.end {
            // The lines that a thread had yet to write are lost with a process that is killed: on a
            // busy machine some are, but not all, and none is added.
            End::Killed => {
                assert!(found[0] <= wanted[0], "{log}");
                assert!((1..=wanted[1]).contains(&found[1]), "{log}");
            }
            End::Restarted | End::HandedOver => assert_eq!(found, wanted, "{log}"),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let _ = self.now.kill();
        let _ = self.now.wait();
        if std::thread::panicking() {
            eprintln!("{:?}:\n{}", self.end, self.log());
        }
    }
}

/// Lets the service be replaced ten times while the neighbours work, and waits each time until all
/// of them are served.
fn ten_times(line: &mut Line, neighbours: &[Neighbour]) {
    for _ in 0..TIMES {
        neighbours.iter().for_each(|one| drop(one.two_more()));
        line.goes_on();
    }
    let longest = neighbours.iter().flat_map(Neighbour::two_more).max().unwrap();
    eprintln!("{:?}: the longest request took {:?}", line.end, Duration::from_micros(longest));
}

/// Starts a process in the same folder that is to take over, with other arguments; returns its log.
fn cannot_take_over(line: &Line, arguments: &[&str]) -> String {
    let program = env!("CARGO_BIN_EXE_ringfence");
    let arguments = [arguments, &["--hand-over", "door"]].concat();
    let ended = Command::new(program).args(arguments).current_dir(line.path(".")).output();
    let ended = ended.unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", line.log());
    String::from_utf8(ended.stderr).unwrap()
}

fn each(check: impl Fn(End)) {
    [End::HandedOver, End::Restarted, End::Killed].into_iter().for_each(check);
}

#[test]
fn a_disk_goes_on_in_the_next_process() {
    each(|end| {
        let blk = ["blk", "--socket", "disk", "--image", "disk.img"];
        let mut line = Line::start(&blk, end);
        let neighbours = [Neighbour::start(line.path("disk"), Device::Disk)];
        ten_times(&mut line, &neighbours);
        drop(neighbours);
        line.no_front_end_connected_again(1);
    });
}

#[test]
fn packets_are_passed_by_the_next_process() {
    each(|end| {
        let net = ["net", "--socket", "one", "--peer", "two"];
        let mut line = Line::start(&net, end);
        let neighbours = ["one", "two"].map(|name| Neighbour::start(line.path(name), Device::Net));
        ten_times(&mut line, &neighbours);
        drop(neighbours);
        line.no_front_end_connected_again(2);
    });
}

#[test]
fn an_iommu_and_its_devices_go_on_in_the_next_process() {
    each(|end| {
        let guard =
            ["guard", "--iommu", "iommu", "--blk", "disk=disk.img", "--blk", "other=other.img"];
        let mut line = Line::start(&guard, end);
        let _iommu = Session::open_at(IOMMU, &line.path("iommu"), PLATFORM);
        let neighbours = [Neighbour::start(line.path("disk"), Device::Guarded)];
        // It has no driver yet, as while firmware waits.
        let early = Client::connect(&line.path("other"));
        let offered = early.number(GET_FEATURES).unwrap();
        ten_times(&mut line, &neighbours);
        assert_eq!(early.number(GET_FEATURES), Some(offered));
        drop(neighbours);
        line.no_front_end_connected_again(3);
    });
}

#[test]
fn a_successor_that_cannot_take_over_says_so_and_the_process_before_goes_on() {
    let mut line = Line::start(&["net", "--socket", "one", "--peer", "two"], End::HandedOver);
    let neighbours = ["one", "two"].map(|name| Neighbour::start(line.path(name), Device::Net));
    neighbours.iter().for_each(|one| drop(one.two_more()));
    for (arguments, why) in [
        (&["blk", "--socket", "one", "--image", "disk.img"][..], "was `ringfence net`"),
        (&["net", "--socket", "one", "--loopback"], "had 2 sockets, and this one has 1"),
    ] {
        let log = cannot_take_over(&line, arguments);
        assert!(log.contains(why) && log.contains("goes on"), "{log}");
        neighbours.iter().for_each(|one| drop(one.two_more()));
    }
    // One that sends nothing, and one that sends something else.
    for words in ["", "no"] {
        let mut stream = UnixStream::connect(line.path("door")).unwrap();
        stream.write_all(words.as_bytes()).unwrap();
    }
    line.goes_on();
    neighbours.iter().for_each(|one| drop(one.two_more()));
}

/// Waits until a line of the log has these words.
fn logged(line: &Line, words: &str) {
    let begun = Instant::now();
    while !line.log().contains(words) {
        assert!(begun.elapsed() < LIMIT, "{words}: {}", line.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_successor_that_says_nothing_holds_up_no_end() {
    let mut line = Line::start(&["net", "--socket", "one", "--loopback"], End::HandedOver);
    logged(&line, "listening on");
    let mut stream = UnixStream::connect(line.path("door")).unwrap();
    // It looks: the service waits for its reply.
    stream.read_exact(&mut [0]).unwrap();
    kill_process(Pid::from_child(&line.now), Signal::TERM).unwrap();
    assert!(line.now.wait().unwrap().success(), "{}", line.log());
}

/// As when both are done by one script. Whichever comes first, the successor serves, once the
/// process before is gone.
#[test]
fn a_process_that_is_to_end_while_its_successor_comes_has_one() {
    let mut line = Line::start(
        &["blk", "--socket", "disk", "--image", "disk.img", "--metrics", "unix:figures"],
        End::HandedOver,
    );
    for delay in 0..TIMES as u64 {
        // Two that begin at the same time are another matter.
        let begun = Instant::now();
        while line.log().matches("listening on").count() <= delay as usize {
            assert!(begun.elapsed() < LIMIT, "{}", line.log());
            std::thread::sleep(Duration::from_millis(1));
        }
        let next = Line::process(&line.place, &line.manager, &line.arguments, line.end);
        let mut before = std::mem::replace(&mut line.now, next);
        std::thread::sleep(Duration::from_millis(delay));
        kill_process(Pid::from_child(&before), Signal::TERM).unwrap();
        let status = before.wait().unwrap();
        // The second signal, if the first was the successor's, would end it at once.
        assert!(status.success(), "{status}, {delay} ms: {}", line.log());
        let begun = Instant::now();
        while UnixStream::connect(line.path("disk")).is_err() {
            let ended = line.now.try_wait().unwrap();
            assert!(ended.is_none() && begun.elapsed() < LIMIT, "{delay} ms: {}", line.log());
            std::thread::sleep(Duration::from_millis(1));
        }
        Neighbour::start(line.path("disk"), Device::Disk).two_more();
    }
}

/// A check of the port is no front end: nothing changes for the devices, such as the bypass of those behind an IOMMU.
#[test]
fn a_connection_that_only_hangs_up_is_not_served() {
    let line = Line::start(&["net", "--socket", "one", "--loopback"], End::Restarted);
    logged(&line, "listening on");
    for _ in 0..20 {
        drop(UnixStream::connect(line.path("one")).unwrap());
    }
    Neighbour::start(line.path("one"), Device::Net).two_more();
    let log = line.log();
    assert_eq!(log.matches("a front end has connected").count(), 1, "{log}");
}

/// The manager keeps the socket of a process that was killed; what leads to it may be gone.
#[test]
fn a_socket_whose_file_is_gone_is_made_anew() {
    let mut line = Line::start(&["net", "--socket", "one", "--loopback"], End::Killed);
    logged(&line, "listening on");
    line.settles();
    std::fs::remove_file(line.path("one")).unwrap();
    line.goes_on();
    let begun = Instant::now();
    while UnixStream::connect(line.path("one")).is_err() {
        assert!(begun.elapsed() < LIMIT, "{}", line.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// How many mappings the IOMMU holds.
const MAPPINGS: u64 = 100_000;

/// An IOMMU's front end that has made that many mappings.
fn mapped(line: &Line) -> (Session, Ring) {
    let session = Session::open_at(IOMMU, &line.path("iommu"), FEATURES);
    let mut ring = session.ring(0);
    // The disk without a front end.
    let mut request = |bytes: &[u8]| iommu::request(&session, &mut ring, bytes, 4);
    assert_eq!(request(&iommu::attach(1, 1, 0x38, 0)), 0);
    for page in 0..MAPPINGS {
        // Not adjacent, so that no mapping is merged with the next.
        let at = (1 << 20) + (page << 13);
        assert_eq!(request(&iommu::map(1, at, at + 0xfff, IOMMU, 3)), 0, "{page}");
    }
    (session, ring)
}

#[test]
#[ignore = "takes minutes: cargo xtask test --all --only ends"]
fn a_pause_with_100000_mappings() {
    each(|end| {
        let guard = [
            "guard",
            "--iommu",
            "iommu",
            "--blk",
            "disk=disk.img",
            "--blk",
            "other=other.img",
            "--memory",
            "2G",
        ];
        let mut line = Line::start(&guard, end);
        let (session, mut ring) = mapped(&line);
        let neighbours = [Neighbour::start(line.path("disk"), Device::Guarded)];
        ten_times(&mut line, &neighbours);
        let there = iommu::map(1, 1 << 20, (1 << 20) + 0xfff, IOMMU, 3);
        assert_ne!(iommu::request(&session, &mut ring, &there, 4), 0, "it is mapped still");
        assert!(line.log().contains(&format!("goes on with {MAPPINGS} mappings")));
    });
}
