//! What outlives the process of a service: its listening sockets, the connections of its front
//! ends, and the memory in which its devices keep what a successor needs. All of it lies in the
//! queues of sockets ([`Memo`]); another process (the service manager, or a successor) needs to
//! hold only the two ends of one of them.

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

use super::memo::{Memo, Message};

/// The magic number of the service's own message, with its version.
const MAGIC: [u8; 4] = *b"RFsv";
const VERSION: u32 = 1;

/// A connection's page: no requests are under way on it.
const SETTLED: u64 = 0;
const UNSETTLED: u64 = 1;
/// Its state could not be written down.
const UNKNOWN: u64 = 2;

/// What this process leaves to its successor.
pub(super) struct Estate {
    service: Memo,
    name: &'static str,
    fronts: Vec<Arc<Mutex<Memo>>>,
    listeners: Vec<OwnedFd>,
    memory: Option<OwnedFd>,
}

/// What the process before has left.
pub(super) struct Inherited {
    service: Memo,
    fronts: Vec<Memo>,
    pub(super) listeners: Vec<UnixListener>,
    memory: Option<OwnedFd>,
}

/// A connection to resume.
pub(super) struct Resumed {
    pub(super) stream: PeerFd,
    pub(super) saved: SavedConnection,
}

impl Inherited {
    /// Checks what is left for a service of that name with that many sockets, without changing it.
    /// Versions must match: another program may have left it.
    ///
    /// # Errors
    /// It cannot be read, or belongs to another service.
    pub(super) fn check(ends: &[OwnedFd; 2], name: &str, sockets: usize) -> Result<()> {
        let [write, read] = ends;
        let memo = Memo::of([write.try_clone()?, read.try_clone()?], None);
        let Some(message) = memo.peek(true)? else { return Ok(()) };
        let (_, fronts, memory) = parse(message, name, sockets)?;
        if let Some(memory) = memory {
            // Only `guard` has any.
            Journal::check(&SharedFile::map(&memory, 0, Journal::HEADER as u64)?)?;
        }
        for front in fronts {
            let begin = front.peek(false)?;
            if let Some((bytes, _)) = begin.filter(|(bytes, _)| !bytes.is_empty()) {
                SavedConnection::check(&bytes)?;
            }
        }
        Ok(())
    }

    /// Takes what is left; `None` if there is nothing.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(super) fn read(
        ends: [OwnedFd; 2],
        name: &str,
        sockets: usize,
    ) -> Result<Option<Inherited>> {
        let mut service = Memo::of(ends, None);
        let Some(message) = service.read()? else { return Ok(None) };
        let (listeners, fronts, memory) = parse(message, name, sockets)?;
        Ok(Some(Inherited { service, fronts, listeners, memory }))
    }

    /// The connections that can be resumed, by socket.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn connections(
        &mut self,
        names: &[&str],
        closers: &[Closer],
    ) -> Result<Vec<Option<Resumed>>> {
        let all = self.fronts.iter_mut().zip(names.iter().zip(closers));
        all.map(|(memo, (name, closer))| {
            memo.set_closer(closer);
            let message = memo.read().with_context(|| format!("a connection of {name}"))?;
            let Some((bytes, fds)) = message.filter(|(bytes, _)| !bytes.is_empty()) else {
                return Ok(None);
            };
            let mut fds = fds.into_iter();
            let (Some(stream), Some(page)) = (fds.next(), fds.next()) else {
                bail!("a connection of {name} without its descriptors");
            };
            let page = SharedFile::map(&page, 0, 8).context("a connection's page")?;
            let why = if page.u64_at(0).load(Ordering::Acquire) == SETTLED {
                let fds = fds.map(|fd| PeerFd::new(fd, closer)).collect();
                match SavedConnection::parse(&bytes, fds) {
                    Ok(saved) => {
                        let stream = PeerFd::new(stream, closer);
                        return Ok(Some(Resumed { stream, saved }));
                    }
                    // An exit would not help: the restarted process would find the same.
                    Err(error) => format!("the process before has left {error}"),
                }
            } else {
                memo.spend_all(fds);
                "the process before has ended in the middle of requests".to_owned()
            };
            warn!(source = %name, "{why}: the front end is hung up on");
            let _ = rustix::net::shutdown(&stream, rustix::net::Shutdown::Both);
            memo.spend_all([stream]);
            Ok(None)
        })
        .collect()
    }
}

type Parsed = (Vec<UnixListener>, Vec<Memo>, Option<OwnedFd>);

/// Parses the service's own message.
fn parse(message: Message, name: &str, sockets: usize) -> Result<Parsed> {
    let (bytes, fds) = message;
    let number = |at: usize| {
        let word = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*word))
    };
    let (begin, version, count) = (bytes.first_chunk(), number(4), number(8));
    let (Some(begin), Some(version), Some(count)) = (begin, version, count) else {
        bail!("what the process before has left is cut off");
    };
    ensure!(*begin == MAGIC, "what is left here does not belong to a service of this program");
    ensure!(
        version == VERSION,
        "what the process before has left has version {version}; this program knows {VERSION}"
    );
    let (count, of) = (count as usize, String::from_utf8_lossy(&bytes[12..]));
    ensure!(of == name, "the process before was `ringfence {of}`, and this is `ringfence {name}`");
    ensure!(
        count == sockets,
        "the process before had {count} sockets, and this one has {sockets}: it must have the same devices"
    );
    ensure!(
        fds.len() == 3 * count || fds.len() == 3 * count + 1,
        "the process before has left {} descriptors for {count} sockets",
        fds.len()
    );
    let mut fds = fds.into_iter();
    let (mut listeners, mut fronts) = (Vec::new(), Vec::new());
    for [listener, write, read] in (0..count).map_while(|_| next_three(&mut fds)) {
        listeners.push(UnixListener::from(listener));
        fronts.push(Memo::of([write, read], None));
    }
    Ok((listeners, fronts, fds.next()))
}

fn next_three(fds: &mut impl Iterator<Item = OwnedFd>) -> Option<[OwnedFd; 3]> {
    Some([fds.next()?, fds.next()?, fds.next()?])
}

impl Estate {
    /// An estate for these listeners, each with its closer: the inherited one, or a new one.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn new<'l>(
        name: &'static str,
        listeners: impl Iterator<Item = BorrowedFd<'l>>,
        closers: &[Closer],
        inherited: Option<Inherited>,
    ) -> io::Result<Estate> {
        let listeners = listeners.map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
        let (service, fronts, memory) = match inherited {
            Some(Inherited { service, fronts, memory, .. }) => (service, fronts, memory),
            None => {
                let fronts = closers.iter().map(|closer| Memo::new(Some(closer)));
                (Memo::new(None)?, fronts.collect::<io::Result<_>>()?, None)
            }
        };
        let fronts = fronts.into_iter().map(|memo| Arc::new(Mutex::new(memo))).collect();
        let mut estate = Estate { service, name, fronts, listeners, memory };
        estate.write()?;
        Ok(estate)
    }

    /// The ends of the queue that leads to everything else.
    pub(super) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        self.service.ends()
    }

    /// Memory for what a successor needs of the devices, and whether the process before has left
    /// it; with `anew`, that is ignored.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn memory(&mut self, bytes: usize, anew: bool) -> Result<(SharedFile, bool)> {
        if let Some(memory) = self.memory.as_ref().filter(|_| !anew) {
            match SharedFile::map(memory, 0, bytes as u64) {
                Ok(file) => return Ok((file, true)),
                Err(error) => warn!("what the process before has kept of its devices: {error}"),
            }
        }
        let (file, fd) = SharedFile::create(bytes).context("the devices' memory")?;
        self.memory = Some(fd);
        self.write()?;
        Ok((file, false))
    }

    /// Keeps the state of a connection of socket `at`.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(super) fn keeper(
        &self,
        at: usize,
        name: &str,
        stream: &PeerFd,
        turn: Option<Arc<Turn>>,
    ) -> io::Result<FrontKeeper> {
        let (page, page_fd) = SharedFile::create(8).map_err(io::Error::other)?;
        let stream = stream.as_fd().try_clone_to_owned()?;
        let (memo, name) = (Arc::clone(&self.fronts[at]), name.to_owned());
        Ok(FrontKeeper { memo, name, stream, page, page_fd, settles: SETTLED, turn, at })
    }

    fn write(&mut self) -> io::Result<()> {
        let count = (self.listeners.len() as u32).to_ne_bytes();
        let bytes = [&MAGIC, &VERSION.to_ne_bytes(), &count, self.name.as_bytes()].concat();
        let fronts: Vec<_> = self.fronts.iter().map(|front| front.lock()).collect();
        let mut fds = Vec::new();
        for (listener, front) in self.listeners.iter().zip(&fronts) {
            fds.push(listener.as_fd());
            fds.extend(front.ends());
        }
        fds.extend(self.memory.as_ref().map(|memory| memory.as_fd()));
        self.service.write(&bytes, &fds)
    }
}

/// Which socket's connection may resume: one after the other, since that of an IOMMU must come
/// before those of the devices behind it.
#[derive(Default)]
pub(super) struct Turn {
    at: Mutex<usize>,
    changed: Condvar,
}

impl Turn {
    /// Waits until it is the turn of socket `at`.
    pub(super) fn wait(&self, at: usize) {
        let mut now = self.at.lock();
        while *now < at {
            self.changed.wait(&mut now);
        }
    }

    /// Socket `at` has resumed, or has nothing to resume.
    pub(super) fn over(&self, at: usize) {
        let mut now = self.at.lock();
        *now = (*now).max(at + 1);
        self.changed.notify_all();
    }
}

/// Keeps the state of a connection.
pub(super) struct FrontKeeper {
    memo: Arc<Mutex<Memo>>,
    name: String,
    stream: OwnedFd,
    page: SharedFile,
    page_fd: OwnedFd,
    /// The value of the page between requests.
    settles: u64,
    /// The turn to end once the connection has resumed.
    turn: Option<Arc<Turn>>,
    at: usize,
}

impl Keeper for FrontKeeper {
    fn unsettled(&mut self) {
        self.page.u64_at(0).store(UNSETTLED, Ordering::Release);
    }

    fn settled(&mut self) {
        self.page.u64_at(0).store(self.settles, Ordering::Release);
        self.turn.take().into_iter().for_each(|turn| turn.over(self.at));
    }

    fn keep(&mut self, state: Option<&ConnectionState<'_>>) {
        let mut memo = self.memo.lock();
        let kept = match state.map(ConnectionState::emit) {
            Some((bytes, fds)) => {
                let own = [self.stream.as_fd(), self.page_fd.as_fd()];
                memo.write(&bytes, &[&own[..], &fds].concat())
            }
            None => memo.write(&[], &[]),
        };
        let before =
            std::mem::replace(&mut self.settles, if kept.is_ok() { SETTLED } else { UNKNOWN });
        if let Err(error) = kept
            && before == SETTLED
        {
            warn!(source = %self.name, "{error}: this connection cannot outlive the process");
        }
    }
}
