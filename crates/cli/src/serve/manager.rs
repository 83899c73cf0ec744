//! The service manager, and what it is notified of (`sd_notify(3)`).

use std::{
    env, io,
    os::{
        fd::BorrowedFd,
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use ringfence_run::passing;
use rustix::net::{self, SendFlags};
use tracing::warn;

/// The names of the descriptors that it keeps.
pub(super) const ENDS: [&str; 2] = ["ringfence-write", "ringfence-read"];

/// A socket to it, if there is one. Opened before the process gives up opening sockets.
pub(super) struct Manager {
    socket: Option<UnixDatagram>,
    /// Whether it keeps descriptors for the next process: `FDSTORE` says so, set by systemd since
    /// version 254, and that there is room for [both](Self::store).
    pub(super) stores: bool,
}

impl Manager {
    /// The manager that has started this process and named its socket.
    pub(super) fn of_this_process() -> Manager {
        let none = Manager { socket: None, stores: false };
        let Some(path) = env::var_os("NOTIFY_SOCKET") else { return none };
        let most = env::var("FDSTORE").ok().and_then(|most| most.parse().ok());
        let stores = most.is_some_and(|most: u32| most >= 2);
        match connect(path.as_bytes()) {
            Ok(socket) => Manager { socket: Some(socket), stores },
            Err(error) => {
                warn!("the service manager at {} cannot be reached: {error}", path.display());
                none
            }
        }
    }

    /// Makes it keep the ends of a saved state, each by the name that
    /// [`socket::passed`](super::socket::passed) looks for. Waits for a while for a manager that
    /// does not read: without this, a successor has nothing to resume.
    pub(super) fn store(&self, ends: [BorrowedFd<'_>; 2]) {
        let Some(socket) = self.socket.as_ref().filter(|_| self.stores) else { return };
        // Those of earlier processes, which have left nothing or only half of it: there is room for
        // two.
        for name in ENDS {
            self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), SendFlags::empty());
        }
        for (name, end) in ENDS.into_iter().zip(ends) {
            // FDPOLL=0: a hang-up of it means nothing.
            let state = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
            let sent = passing::send(socket, state.as_bytes(), &[end], SendFlags::NOSIGNAL);
            if let Err(error) = sent {
                warn!("the service manager does not take a descriptor: {error}");
            }
        }
    }

    /// Reports that the service is ready. Waits for a while for a manager that does not read: if
    /// the message were lost, the manager would consider the service not ready.
    pub(super) fn is_ready(&self, state: &str) {
        self.send(state, SendFlags::empty());
    }

    /// Reports the service's state: assignments, a line each. Never blocks on a manager that does
    /// not read.
    pub(super) fn report(&self, state: &str) {
        self.send(state, SendFlags::DONTWAIT);
    }

    fn send(&self, state: &str, how: SendFlags) {
        if let Some(socket) = &self.socket
            && let Err(error) = net::send(socket, state.as_bytes(), how | SendFlags::NOSIGNAL)
        {
            warn!("the service manager does not take a message: {error}");
        }
    }
}

/// How long to wait for the manager.
const TIME_OUT: Duration = Duration::from_secs(10);

fn connect(path: &[u8]) -> io::Result<UnixDatagram> {
    let address = match path.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(TIME_OUT))?;
    socket.connect_addr(&address)?;
    Ok(socket)
}
