//! Descriptors that a peer has sent.

use std::{
    fmt,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::{
    fs::{fcntl_get_seals, readlink},
    net::{AddressFamily, SocketType, sockopt},
};

use crate::Closer;

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

#[cfg(test)]
mod tests {
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
}
