//! Descriptors that a peer has sent, and the thread that drops what a peer can make slow to drop.

use std::{
    collections::VecDeque,
    fmt,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    fs::{fcntl_get_seals, readlink},
    net::{AddressFamily, SocketType, sockopt},
};

/// What `/proc` shows for an eventfd, and for nothing else.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// A descriptor that a peer has sent, or a socket whose other end a peer has. Closing it may take
/// as long as the peer likes: the server of a file replies when it likes, a socket has other
/// descriptors in its queue, and the last close of a pollable file waits for each epoll that has
/// it, which the peer can hold up. Dropping a `PeerFd` leaves closing it to the connection's
/// [`Closer`], except for memory, to which none of this applies.
pub struct PeerFd {
    /// `None` only while it is dropped.
    fd: Option<OwnedFd>,
    kind: Kind,
    closer: Closer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// On tmpfs, where memfds are, or hugetlbfs: the kernel itself serves these.
    Memory,
    Event,
    /// Its queue may hold descriptors of any kind.
    Stream,
    Other,
}

impl Kind {
    /// None of these calls reaches a file's server.
    fn of(fd: BorrowedFd<'_>) -> Kind {
        // Only memory has seals.
        if fcntl_get_seals(fd).is_ok() {
            return Kind::Memory;
        }
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        if readlink(link, Vec::new()).is_ok_and(|name| name.as_bytes() == EVENTFD) {
            return Kind::Event;
        }
        match (sockopt::socket_domain(fd), sockopt::socket_type(fd)) {
            (Ok(AddressFamily::UNIX), Ok(SocketType::STREAM)) => Kind::Stream,
            _ => Kind::Other,
        }
    }
}

impl PeerFd {
    /// A descriptor that `closer` closes, if closing it may take long.
    pub fn new(fd: impl Into<OwnedFd>, closer: &Closer) -> PeerFd {
        let fd = fd.into();
        PeerFd { kind: Kind::of(fd.as_fd()), fd: Some(fd), closer: closer.clone() }
    }

    /// Whether it is an eventfd.
    pub fn is_eventfd(&self) -> bool {
        self.kind == Kind::Event
    }

    /// Whether it is a Unix stream socket.
    pub fn is_unix_stream(&self) -> bool {
        self.kind == Kind::Stream
    }

    /// What closes it.
    pub fn closer(&self) -> &Closer {
        &self.closer
    }
}

/// With a closer of its own.
impl From<UnixStream> for PeerFd {
    fn from(stream: UnixStream) -> PeerFd {
        PeerFd::new(stream, &Closer::default())
    }
}

/// With a closer of its own.
impl From<OwnedFd> for PeerFd {
    fn from(fd: OwnedFd) -> PeerFd {
        PeerFd::new(fd, &Closer::default())
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take()
            && self.kind != Kind::Memory
        {
            self.closer.close(fd);
        }
    }
}

impl fmt::Debug for PeerFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerFd({:?}, {:?})", self.fd, self.kind)
    }
}

/// How many things may wait to be dropped before their peers' messages are left unread. One message
/// more adds up to 253 descriptors, the most that the kernel passes at a time.
const MOST: usize = 64;

/// How long a closer is full before it reports that.
const LONG: Duration = Duration::from_secs(1);

/// Drops things in order of arrival, for a socket or for a single connection.
///
/// The server of a file (FUSE, NFS) decides how long closing it takes: the wait can be neither
/// interrupted nor refused. The same holds for a socket with such files in its queue, and for a
/// file in an epoll that its owner holds up. A `Closer` starts a thread once there is something to
/// drop and ends it after the last.
///
/// A thing that is never dropped holds up those behind it, and with [64](Self::is_full) of these a
/// vhost-user server takes no further request: it waits until the peer lets go, or until it is shut
/// down. Give each socket of a service its own `Closer` and accept no connection while it is full,
/// since a connection is one thing more to close: then only the front end that caused this is
/// affected, and those after it. A process that ends closes its files too: it becomes a zombie only
/// once the last is closed.
#[derive(Clone, Default)]
pub struct Closer(Arc<Inner>);

#[derive(Default)]
struct Inner {
    waiting: Mutex<Waiting>,
    full: Option<Box<dyn Fn(usize) + Send + Sync>>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Box<dyn FnOnce() + Send>>,
    /// Whether there is a thread.
    runs: bool,
    /// Since when it has been full, and whether that was reported.
    full: Option<(Instant, bool)>,
}

impl Closer {
    /// A closer whose [`is_full`](Self::is_full) calls `full`, with the number of things that wait,
    /// once it has returned true for a second.
    pub fn new(full: impl Fn(usize) + Send + Sync + 'static) -> Closer {
        Closer(Arc::new(Inner { full: Some(Box::new(full)), ..Inner::default() }))
    }

    /// Drops a thing on the closer's thread, now or later.
    pub fn close(&self, thing: impl Send + 'static) {
        self.run(move || drop(thing));
    }

    /// Runs a job on the closer's thread, in turn with what is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut waiting = self.0.waiting.lock();
        waiting.jobs.push_back(Box::new(job));
        self.work(&mut waiting);
    }

    /// Starts a thread if there is something to drop and none runs. If that fails, the next call
    /// tries again.
    fn work(&self, waiting: &mut Waiting) {
        if !waiting.runs && !waiting.jobs.is_empty() {
            let inner = Arc::clone(&self.0);
            let thread = thread::Builder::new().name("closer".into());
            waiting.runs = thread.spawn(move || inner.drop_all()).is_ok();
        }
    }

    /// Whether nothing waits or is being dropped.
    pub fn is_idle(&self) -> bool {
        let mut waiting = self.0.waiting.lock();
        self.work(&mut waiting);
        !waiting.runs && waiting.jobs.is_empty()
    }

    /// Whether so much waits that the peers' messages should be left unread. A caller that waits
    /// for this to change polls now and then.
    pub fn is_full(&self) -> bool {
        let mut waiting = self.0.waiting.lock();
        self.work(&mut waiting);
        let count = waiting.jobs.len();
        if count < MOST {
            waiting.full = None;
            return false;
        }
        let (since, reported) = waiting.full.get_or_insert_with(|| (Instant::now(), false));
        let reports = !*reported && since.elapsed() >= LONG;
        *reported |= reports;
        drop(waiting);
        if reports && let Some(full) = &self.0.full {
            full(count);
        }
        true
    }
}

impl Inner {
    fn drop_all(&self) {
        loop {
            let job = {
                let mut waiting = self.waiting.lock();
                let job = waiting.jobs.pop_front();
                waiting.runs = job.is_some();
                job
            };
            let Some(job) = job else { return };
            // One that panics is over; those behind it have their turn.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Closer({} wait)", self.0.waiting.lock().jobs.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    };

    use rustix::{
        event::{EventfdFlags, eventfd},
        fs::{MemfdFlags, memfd_create},
        time::{TimerfdClockId, TimerfdFlags, timerfd_create},
    };

    use super::*;

    #[test]
    fn each_kind_is_known() {
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        let (stream, _) = UnixStream::pair().unwrap();
        let (datagram, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let memory = memfd_create("anon_inode:[eventfd]", MemfdFlags::CLOEXEC).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
        let disk = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let files = [disk, env!("CARGO_MANIFEST_DIR"), "/dev/null", "/proc/self/maps"];
        let files = files.map(|path| OwnedFd::from(std::fs::File::open(path).unwrap()));
        let others = [pipe, datagram.into(), tcp.into(), timer].into_iter().chain(files);
        let known = [(stream.into(), Kind::Stream), (memory, Kind::Memory), (event, Kind::Event)];
        for (fd, kind) in known.into_iter().chain(others.map(|fd| (fd, Kind::Other))) {
            let fd = PeerFd::from(fd);
            assert_eq!(fd.kind, kind, "{fd:?}");
            assert_eq!(fd.is_eventfd(), kind == Kind::Event);
        }
    }

    #[test]
    fn only_what_may_take_long_is_closed_elsewhere() {
        // A closer that is held up: its descriptors stay open.
        let closer = Closer::default();
        let (hold, held) = std::sync::mpsc::channel::<()>();
        struct Held(std::sync::mpsc::Receiver<()>);
        impl Drop for Held {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        closer.close(Held(held));
        let open = |number: i32| std::fs::exists(format!("/proc/self/fd/{number}")).unwrap();
        let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (stream, _) = UnixStream::pair().unwrap();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        // Numbers far from those in other tests.
        let apart = |fd: OwnedFd, least: i32| rustix::io::fcntl_dupfd_cloexec(&fd, least).unwrap();
        for (at, (fd, kept)) in
            [(memory, false), (event, true), (stream.into(), true), (pipe, true)]
                .into_iter()
                .enumerate()
        {
            let fd = apart(fd, 900 + 10 * at as i32);
            let number = fd.as_raw_fd();
            drop(PeerFd::new(fd, &closer));
            assert_eq!(open(number), kept, "{number}");
        }
        drop(hold);
    }

    /// Its drop waits until it is let go, and reports then.
    struct Held(Receiver<()>, Sender<usize>, usize);

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
            self.1.send(self.2).unwrap();
        }
    }

    #[test]
    fn things_that_cannot_be_dropped_delay_the_caller_only_once_it_is_full() {
        let warned = Arc::new(AtomicUsize::new(0));
        let closer = Closer::new({
            let warned = Arc::clone(&warned);
            move |count| {
                assert!(count > MOST);
                warned.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (report, dropped) = channel();
        let held: Vec<_> = (0..=MOST + 10)
            .map(|number| {
                let (hold, held) = channel();
                closer.close(Held(held, report.clone(), number));
                hold
            })
            .collect();
        assert!(closer.is_full());
        assert_eq!(warned.load(Ordering::Relaxed), 0, "it may pass");
        while warned.load(Ordering::Relaxed) == 0 {
            assert!(closer.is_full());
            thread::yield_now();
        }
        assert!(closer.is_full());
        assert_eq!(warned.load(Ordering::Relaxed), 1);
        drop(held);
        let numbers: Vec<_> = (0..=MOST + 10).map(|_| dropped.recv().unwrap()).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
        assert!(!closer.is_full());
        // The thread may have ended by now: another is started.
        closer.close(Held(channel().1, report, 0));
        assert_eq!(dropped.recv(), Ok(0));
        while !closer.is_idle() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_job_that_panics_holds_up_nothing() {
        let closer = Closer::default();
        closer.run(|| panic!("on purpose"));
        let (report, done) = channel();
        closer.run(move || report.send(()).unwrap());
        // Without a thread the job would be dropped with it.
        drop(closer);
        assert_eq!(done.recv(), Ok(()));
    }
}
