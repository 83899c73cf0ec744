//! The service manager, as far as it wants to know how the service is (`sd_notify(3)`).

use std::{
    env, io,
    os::{
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

/// A socket to it, if there is one. Opened before the process gives up to open any.
pub(super) struct Manager(Option<UnixDatagram>);

impl Manager {
    /// The one that has started this process and named its socket.
    pub(super) fn of_this_process() -> Manager {
        let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Manager(None) };
        match connect(path.as_bytes()) {
            Ok(socket) => Manager(Some(socket)),
            Err(error) => {
                warn!("the service manager at {} cannot be reached: {error}", path.display());
                Manager(None)
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
        if let Some(socket) = &self.0
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
