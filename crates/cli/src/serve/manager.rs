//! The service manager, as far as it wants to know how the service is (`sd_notify(3)`).

use std::{
    env, io,
    os::{
        fd::{AsFd, BorrowedFd},
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use rustix::net::{self, SendFlags};
use tracing::warn;

use super::memo;

/// The names of what it keeps.
pub(super) const ENDS: [&str; 2] = ["ringfence-write", "ringfence-read"];

/// A socket to it, if there is one. Opened before the process gives up to open any.
pub(super) struct Manager {
    socket: Option<UnixDatagram>,
    stores: bool,
}

impl Manager {
    /// The one that has started this process and named its socket.
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

    /// Whether it keeps descriptors for the next process: it has said so in `FDSTORE`, as systemd does since version
    /// 254, and for [both](Self::store).
    pub(super) fn stores(&self) -> bool {
        self.stores
    }

    /// Has it keep the ends of an estate, each by the name that [`socket::passed`](super::socket::passed) looks for. A
    /// manager that does not read is waited for, for a while: without this a successor has nothing to go on with.
    pub(super) fn store(&self, ends: [BorrowedFd<'_>; 2]) {
        let Some(socket) = self.socket.as_ref().filter(|_| self.stores) else { return };
        // Of processes before, which have left nothing or only half of it: there is room for two.
        for name in ENDS {
            self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), SendFlags::empty());
        }
        for (name, end) in ENDS.into_iter().zip(ends) {
            // Nothing is to be learnt from its being hung up.
            let state = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
            if let Err(error) = memo::send(socket.as_fd(), state.as_bytes(), &[], &[end]) {
                warn!("the service manager takes no descriptor: {error}");
            }
        }
    }

    /// Says that the service is ready. It would be taken for one that is not if this were lost: a manager that does not
    /// read is waited for, for a while.
    pub(super) fn is_ready(&self, state: &str) {
        self.send(state, SendFlags::empty());
    }

    /// Says how the service is: assignments, a line each. A manager that does not read holds up nobody.
    pub(super) fn say(&self, state: &str) {
        self.send(state, SendFlags::DONTWAIT);
    }

    fn send(&self, state: &str, how: SendFlags) {
        if let Some(socket) = &self.socket
            && let Err(error) = net::send(socket, state.as_bytes(), how | SendFlags::NOSIGNAL)
        {
            warn!("the service manager takes no message: {error}");
        }
    }
}

/// How long the manager is waited for.
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
