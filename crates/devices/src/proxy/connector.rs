//! The thread that connects to a back end, and watches it for what is not a reply: that it hangs
//! up, or that its configuration has changed.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc, Weak,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_mem::GuestRam;
use ringfence_run::{PeerFd, event};
use ringfence_vhost_user::{
    BackendChannel, BackendMessage, BackendRequest, FrontendChannel, HandlerError, Shutdown,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

/// How long a back end may take to reply: to GET_VRING_BASE once all its requests have completed. A
/// VMM waits meanwhile. When the time is over the connection ends on both sides, and the requests
/// stay on record: no promise depends on a reply.
pub(super) const REPLIES_WITHIN: Duration = Duration::from_secs(20);
/// How often messages of the back end's are taken.
const AT_MOST_ONE_IN: Duration = Duration::from_millis(1);

/// Connects to one back end, by its path: the only thread of a service that may connect to
/// anything.
pub struct Connector {
    orders: Sender<Order>,
    bell: Arc<OwnedFd>,
    /// The memory of the back end, while there is a connection.
    pool: Mutex<Weak<GuestRam>>,
}

/// What a connection to a back end begins with: its socket, the proxy's end of the back end's
/// channel, and the back end's.
pub(super) type Connected = (PeerFd, FrontendChannel, OwnedFd);

/// What the thread is to do.
pub(super) enum Order {
    /// Connect, and reply here.
    Connect(Sender<io::Result<Connected>>),
    /// From now on watch this back end.
    Watch(Watched),
    /// End this connection when the back end is gone.
    Ends(Shutdown),
    /// Pass its messages on to this front end.
    PassOn(Arc<BackendChannel>),
    /// The connection is over.
    Forget,
}

/// What is watched of a back end.
pub(super) struct Watched {
    /// Hung up when it is gone.
    pub(super) hang_up: PeerFd,
    /// Its messages, if it sends any.
    pub(super) channel: Option<FrontendChannel>,
}

/// The thread's state.
struct Watcher {
    path: PathBuf,
    name: Arc<str>,
    watched: Option<Watched>,
    ends: Option<Shutdown>,
    front: Option<Arc<BackendChannel>>,
}

impl Connector {
    /// Starts the thread, which ends when the connector is dropped.
    ///
    /// # Errors
    /// Out of threads or descriptors.
    pub fn spawn(path: PathBuf, name: Arc<str>) -> io::Result<Connector> {
        let (orders, received) = mpsc::channel();
        let bell = Arc::new(event::new()?);
        let rung = Arc::clone(&bell);
        let watcher = Watcher { path, name, watched: None, ends: None, front: None };
        thread::Builder::new().name("back end".into()).spawn(move || {
            #[cfg(feature = "sandbox")]
            ringfence_sandbox::confine(ringfence_sandbox::Role::Connector);
            watcher.run(&received, rung.as_fd());
        })?;
        Ok(Connector { orders, bell, pool: Mutex::default() })
    }

    /// How many bytes of memory the back end has now, and how many it can have at most; both are 0
    /// without a connection.
    pub fn pool_bytes(&self) -> (u64, u64) {
        let pool = self.pool.lock().upgrade();
        pool.map_or((0, 0), |pool| (pool.resident().unwrap_or(0), pool.len() as u64))
    }

    /// The memory of the back end from now on, while it is there.
    pub(super) fn counts(&self, pool: &Arc<GuestRam>) {
        *self.pool.lock() = Arc::downgrade(pool);
    }

    pub(super) fn order(&self, order: Order) {
        // The thread ends after the connector only.
        let _ = self.orders.send(order);
        event::signal(&*self.bell);
    }

    /// Connects to the back end.
    ///
    /// # Errors
    /// It does not listen, or takes no connection now.
    pub(super) fn connect(&self) -> Result<Connected, HandlerError> {
        let (reply, connected) = mpsc::channel();
        self.order(Order::Connect(reply));
        let connected = connected.recv_timeout(REPLIES_WITHIN);
        connected
            .map_err(|_| HandlerError::new("the thread that connects to it does not reply"))?
            .map_err(HandlerError::from)
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // Wakes the thread, which then finds no sender.
        drop(std::mem::replace(&mut self.orders, mpsc::channel().0));
        event::signal(&*self.bell);
    }
}

impl Watcher {
    fn run(mut self, orders: &Receiver<Order>, bell: BorrowedFd<'_>) {
        loop {
            let hung = PollFlags::RDHUP;
            let mut fds = vec![PollFd::from_borrowed_fd(bell, PollFlags::IN)];
            if let Some(Watched { hang_up, channel }) = &self.watched {
                fds.push(PollFd::new(hang_up, hung));
                fds.extend(channel.as_ref().map(|channel| PollFd::new(channel, PollFlags::IN)));
            }
            let _ = poll(&mut fds, None);
            let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
            let (ordered, gone, speaks) = (ready(0), ready(1), ready(2));
            drop(fds);
            if ordered {
                event::drain(bell);
            }
            let mut obeyed = false;
            loop {
                match orders.try_recv() {
                    Ok(order) => self.obey(order),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
                obeyed = true;
            }
            if obeyed {
                // What was seen may be of a connection that was to be forgotten, which is ordered
                // before its end: its front end may have been left to another process, which serves
                // it now.
                continue;
            }
            if gone {
                self.watched = None;
                tracing::warn!(source = %self.name, "the back end has hung up");
                self.end();
            } else if speaks && !self.pass_on() {
                // It may go on without its channel.
                self.watched.iter_mut().for_each(|watched| watched.channel = None);
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            // The caller may have given up.
            Order::Connect(reply) => _ = reply.send(self.connect()),
            Order::Watch(watched) => self.watched = Some(watched),
            Order::Ends(connection) => {
                self.ends = Some(connection);
                if self.watched.is_none() {
                    self.end();
                }
            }
            Order::PassOn(front) => self.front = Some(front),
            Order::Forget => (self.watched, self.ends, self.front) = (None, None, None),
        }
    }

    fn end(&self) {
        if let Some(connection) = &self.ends {
            connection.shutdown();
        }
    }

    /// Connects without waiting: a back end whose backlog is full serves others.
    fn connect(&self) -> io::Result<Connected> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(&*self.path)?)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        let (ours, theirs) = FrontendChannel::pair(REPLIES_WITHIN)?;
        Ok((stream.into(), ours, theirs))
    }

    /// Takes the messages of the back end's that have arrived; false if no more will come.
    fn pass_on(&mut self) -> bool {
        let Some(Watched { channel: Some(channel), .. }) = &mut self.watched else { return false };
        let mut requests = Vec::new();
        let more = channel.recv_all(None, &mut requests).unwrap_or_else(|why| {
            tracing::warn!(source = %self.name, "a message of the back end's: {why}");
            false
        });
        // A back end that sends without end gets no more of a CPU.
        thread::sleep(AT_MOST_ONE_IN);
        // It was given no IOTLB: nothing else is passed on. Changes that come together are one.
        let is_change = |request: &&BackendRequest| request.message == BackendMessage::ConfigChange;
        let changed = requests.iter().any(|request| is_change(&request))
            && self.front.as_ref().is_some_and(|front| front.config_changed());
        let mut replied =
            requests.iter().map(|request| channel.reply(request, changed && is_change(&request)));
        replied.all(|reply| reply.is_ok()) && more
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use ringfence_vhost_user::msg::{Header, code};

    use super::*;

    #[test]
    fn messages_that_come_together_are_all_replied_to() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let channel = Some(FrontendChannel::new(ours, REPLIES_WITHIN));
        let (_link, hang_up) = UnixStream::pair().unwrap();
        let watched = Some(Watched { hang_up: hang_up.into(), channel });
        let (path, name) = (PathBuf::new(), "proxy".into());
        let mut watcher = Watcher { path, name, watched, ends: None, front: None };
        let Header { request, flags, size } =
            Header::request(code::BACKEND_CONFIG_CHANGE_MSG, true, 0);
        let message = [request, flags, size].map(u32::to_ne_bytes).concat();
        theirs.write_all(&message.repeat(2)).unwrap();
        assert!(watcher.pass_on());
        // Also that before one that is invalid.
        theirs.write_all(&[message, vec![0xff; Header::LEN]].concat()).unwrap();
        assert!(!watcher.pass_on(), "no more is taken");
        theirs.set_nonblocking(true).unwrap();
        let mut replies = [0; 3 * (Header::LEN + 8)];
        theirs.read_exact(&mut replies).expect("three replies");
        // Failed: there is no front end.
        assert!(replies.chunks(Header::LEN + 8).all(|reply| reply[Header::LEN] == 1));
    }
}
