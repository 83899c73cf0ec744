//! The state of a service that outlives its process: its listening sockets, the connections of its
//! front ends, and the memory in which its devices keep what a successor needs. All of it lies in
//! the queues of sockets ([`Mailbox`]); another process (the service manager, or a successor) needs
//! to hold only the two ends of one of them, which carries the ends of the others.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    sync::{Arc, atomic::Ordering},
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::{Condvar, Mutex};
use ringfence_mem::SharedFile;
use ringfence_run::{Closer, PeerFd};
use ringfence_vhost_user::{ConnectionState, Keeper, SavedConnection};
use ringfence_virtio_iommu::device::Journal;
use tracing::warn;

use super::mailbox::{Mailbox, Message};

/// The magic number of the service's own message, with its version.
const MAGIC: [u8; 4] = *b"RFsv";
const VERSION: u32 = 1;

/// The values of a connection's page. No request is being handled: the connection can be resumed.
const SETTLED: u64 = 0;
/// A request is being handled.
const UNSETTLED: u64 = 1;
/// The state of the connection could not be saved.
const UNSAVED: u64 = 2;

/// The state that this process keeps for a successor.
pub(super) struct SavedState {
    /// Carries the service's own message, with the listeners and the ends of `connections`.
    service: Mailbox,
    name: &'static str,
    /// One for each socket.
    connections: Vec<Arc<Mutex<Mailbox>>>,
    listeners: Vec<OwnedFd>,
    memory: Option<OwnedFd>,
}

/// The state that the previous process has left.
pub(super) struct Inherited {
    service: Mailbox,
    connections: Vec<Mailbox>,
    pub(super) listeners: Vec<UnixListener>,
    memory: Option<OwnedFd>,
}

/// A connection to resume.
pub(super) struct Resumed {
    pub(super) stream: PeerFd,
    pub(super) saved: SavedConnection,
}

impl Inherited {
    /// Checks the state behind `ends`, without changing it: it must be of the service `name` with
    /// `sockets` sockets, and of this version.
    ///
    /// # Errors
    /// It cannot be read, or belongs to another service.
    pub(super) fn check(ends: &[OwnedFd; 2], name: &str, sockets: usize) -> Result<()> {
        let [write, read] = ends;
        let service = Mailbox::from_ends([write.try_clone()?, read.try_clone()?], None);
        let Some(message) = service.peek(true)? else { return Ok(()) };
        let (_, connections, memory) = parse(message, name, sockets)?;
        if let Some(memory) = memory {
            // Only `ringfence guard` keeps memory: the journal of its IOMMU.
            Journal::check(&SharedFile::map(&memory, 0, Journal::HEADER as u64)?)?;
        }
        for connection in connections {
            let first = connection.peek(false)?;
            if let Some((bytes, _)) = first.filter(|(bytes, _)| !bytes.is_empty()) {
                SavedConnection::check(&bytes)?;
            }
        }
        Ok(())
    }

    /// Takes the state over; `None` if there is none.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(super) fn read(
        ends: [OwnedFd; 2],
        name: &str,
        sockets: usize,
    ) -> Result<Option<Inherited>> {
        let mut service = Mailbox::from_ends(ends, None);
        let Some(message) = service.read()? else { return Ok(None) };
        let (listeners, connections, memory) = parse(message, name, sockets)?;
        Ok(Some(Inherited { service, connections, listeners, memory }))
    }

    /// The connections that can be resumed, by socket. Hangs up on those that cannot be.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn connections(
        &mut self,
        names: &[&str],
        closers: &[Closer],
    ) -> Result<Vec<Option<Resumed>>> {
        let all = self.connections.iter_mut().zip(names.iter().zip(closers));
        all.map(|(mailbox, (name, closer))| {
            mailbox.set_closer(closer);
            let message = mailbox.read().with_context(|| format!("a connection of {name}"))?;
            let Some((bytes, fds)) = message.filter(|(bytes, _)| !bytes.is_empty()) else {
                return Ok(None);
            };
            let mut fds = fds.into_iter();
            let (Some(stream), Some(page)) = (fds.next(), fds.next()) else {
                bail!("a connection of {name} without its descriptors");
            };
            let page = SharedFile::map(&page, 0, 8).context("a connection's page")?;
            // Ordering: the writer is the previous process, which writes no more once its state is here.
            let why = if page.u64_at(0).load(Ordering::Acquire) == SETTLED {
                let fds = fds.map(|fd| PeerFd::new(fd, closer)).collect();
                match SavedConnection::parse(&bytes, fds) {
                    Ok(saved) => {
                        let stream = PeerFd::new(stream, closer);
                        return Ok(Some(Resumed { stream, saved }));
                    }
                    // An exit would not help: the restarted process would find the same.
                    Err(error) => format!("the previous process has left {error}"),
                }
            } else {
                mailbox.discard_all(fds);
                "the previous process has ended in the middle of a request".to_owned()
            };
            warn!(source = %name, "{why}: the connection is closed");
            let _ = rustix::net::shutdown(&stream, rustix::net::Shutdown::Both);
            mailbox.discard_all([stream]);
            Ok(None)
        })
        .collect()
    }
}

type Parsed = (Vec<UnixListener>, Vec<Mailbox>, Option<OwnedFd>);

/// Parses the service's own message.
fn parse(message: Message, name: &str, sockets: usize) -> Result<Parsed> {
    let (bytes, fds) = message;
    let number = |at: usize| {
        let word = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*word))
    };
    let (magic, version, count) = (bytes.first_chunk(), number(4), number(8));
    let (Some(magic), Some(version), Some(count)) = (magic, version, count) else {
        bail!("the saved state of the previous process has only {} bytes", bytes.len());
    };
    ensure!(*magic == MAGIC, "the saved state is not that of a ringfence service");
    ensure!(
        version == VERSION,
        "the saved state of the previous process has version {version}; this program reads {VERSION}"
    );
    let (count, writer) = (count as usize, String::from_utf8_lossy(&bytes[12..]));
    ensure!(
        writer == name,
        "the previous process was `ringfence {writer}`, and this is `ringfence {name}`"
    );
    ensure!(
        count == sockets,
        "the previous process had {count} sockets, and this one has {sockets}: give it the same devices"
    );
    ensure!(
        fds.len() == 3 * count || fds.len() == 3 * count + 1,
        "the previous process has left {} descriptors for {count} sockets",
        fds.len()
    );
    let mut fds = fds.into_iter();
    let (mut listeners, mut connections) = (Vec::new(), Vec::new());
    for [listener, write, read] in (0..count).map_while(|_| next_three(&mut fds)) {
        listeners.push(UnixListener::from(listener));
        connections.push(Mailbox::from_ends([write, read], None));
    }
    Ok((listeners, connections, fds.next()))
}

fn next_three(fds: &mut impl Iterator<Item = OwnedFd>) -> Option<[OwnedFd; 3]> {
    Some([fds.next()?, fds.next()?, fds.next()?])
}

impl SavedState {
    /// The state for these listeners, each with its closer: the inherited one, or a new one.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new<'l>(
        name: &'static str,
        listeners: impl Iterator<Item = BorrowedFd<'l>>,
        closers: &[Closer],
        inherited: Option<Inherited>,
    ) -> io::Result<SavedState> {
        let listeners = listeners.map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
        let (service, connections, memory) = match inherited {
            Some(Inherited { service, connections, memory, .. }) => (service, connections, memory),
            None => {
                let new = closers.iter().map(|closer| Mailbox::new(Some(closer)));
                (Mailbox::new(None)?, new.collect::<io::Result<_>>()?, None)
            }
        };
        let connections =
            connections.into_iter().map(|mailbox| Arc::new(Mutex::new(mailbox))).collect();
        let mut saved_state = SavedState { service, name, connections, listeners, memory };
        saved_state.write()?;
        Ok(saved_state)
    }

    /// The ends of the service's own mailbox, which leads to everything else.
    pub(super) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        self.service.ends()
    }

    /// Memory in which the devices keep what a successor needs, and whether it is that of the
    /// previous process; with `anew`, it never is.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn memory(&mut self, bytes: usize, anew: bool) -> Result<(SharedFile, bool)> {
        if let Some(memory) = self.memory.as_ref().filter(|_| !anew) {
            match SharedFile::map(memory, 0, bytes as u64) {
                Ok(file) => return Ok((file, true)),
                Err(error) => warn!("the devices' memory of the previous process: {error}"),
            }
        }
        let (file, fd) = SharedFile::create(bytes).context("the devices' memory")?;
        self.memory = Some(fd);
        self.write()?;
        Ok((file, false))
    }

    /// Makes a keeper for the state of a connection of socket number `socket`.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub(super) fn keeper(
        &self,
        socket: usize,
        name: &str,
        stream: &PeerFd,
        turn: Option<Arc<Turn>>,
    ) -> io::Result<FrontKeeper> {
        let (page, page_fd) = SharedFile::create(8).map_err(io::Error::other)?;
        let stream = stream.as_fd().try_clone_to_owned()?;
        let (mailbox, name) = (Arc::clone(&self.connections[socket]), name.to_owned());
        Ok(FrontKeeper { mailbox, name, stream, page, page_fd, idle: SETTLED, turn, socket })
    }

    fn write(&mut self) -> io::Result<()> {
        let count = (self.listeners.len() as u32).to_ne_bytes();
        let bytes = [&MAGIC, &VERSION.to_ne_bytes(), &count, self.name.as_bytes()].concat();
        let connections: Vec<_> = self.connections.iter().map(|mailbox| mailbox.lock()).collect();
        let mut fds = Vec::new();
        for (listener, mailbox) in self.listeners.iter().zip(&connections) {
            fds.push(listener.as_fd());
            fds.extend(mailbox.ends());
        }
        fds.extend(self.memory.as_ref().map(|memory| memory.as_fd()));
        self.service.write(&bytes, &fds)
    }
}

/// The order in which connections resume: that of their sockets, since the connection of an IOMMU
/// must resume before those of the devices behind it.
#[derive(Default)]
pub(super) struct Turn {
    /// The first socket that has not resumed.
    next: Mutex<usize>,
    changed: Condvar,
}

impl Turn {
    /// Waits until all sockets before `socket` have resumed.
    pub(super) fn wait(&self, socket: usize) {
        let mut next = self.next.lock();
        while *next < socket {
            self.changed.wait(&mut next);
        }
    }

    /// Ends the turn of `socket`: it has resumed, or has nothing to resume.
    pub(super) fn end(&self, socket: usize) {
        let mut next = self.next.lock();
        *next = (*next).max(socket + 1);
        self.changed.notify_all();
    }
}

/// Saves the state of a connection whenever it changes.
pub(super) struct FrontKeeper {
    mailbox: Arc<Mutex<Mailbox>>,
    name: String,
    stream: OwnedFd,
    page: SharedFile,
    page_fd: OwnedFd,
    /// The value of the page between requests: `SETTLED`, or `UNSAVED` after a failure.
    idle: u64,
    /// The turn to end once the connection has resumed.
    turn: Option<Arc<Turn>>,
    /// The number of its socket.
    socket: usize,
}

impl Keeper for FrontKeeper {
    // Ordering: read by the next process only, which has the page after this one has ended, or has
    // sent it; Release keeps what the compiler could move away from the mark.
    fn unsettled(&mut self) {
        self.page.u64_at(0).store(UNSETTLED, Ordering::Release);
    }

    // Ordering: as above.
    fn settled(&mut self) {
        self.page.u64_at(0).store(self.idle, Ordering::Release);
        self.turn.take().into_iter().for_each(|turn| turn.end(self.socket));
    }

    fn keep(&mut self, state: Option<&ConnectionState<'_>>) {
        let mut mailbox = self.mailbox.lock();
        let saved = match state.map(ConnectionState::emit) {
            Some((bytes, fds)) => {
                let own = [self.stream.as_fd(), self.page_fd.as_fd()];
                mailbox.write(&bytes, &[&own[..], &fds].concat())
            }
            None => mailbox.write(&[], &[]),
        };
        let before =
            std::mem::replace(&mut self.idle, if saved.is_ok() { SETTLED } else { UNSAVED });
        if let Err(error) = saved
            && before == SETTLED
        {
            warn!(source = %self.name, "{error}: this connection cannot outlive the process");
        }
    }
}
