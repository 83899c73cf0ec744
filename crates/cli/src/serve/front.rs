//! A socket and the front ends that connect to it.

use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;
use ringfence_run::Closer;
use ringfence_vhost_user::Shutdown;
use tracing::warn;

use super::socket::Listener;

/// The state of a socket and of its connections.
pub(super) struct Front {
    pub(super) listener: Listener,
    /// Closes descriptors that its front ends have sent.
    pub(super) closer: Closer,
    pub(super) connections: AtomicU64,
    /// Connections taken over from the previous process.
    pub(super) resumed: AtomicU64,
    pub(super) broken: AtomicU64,
    /// Connections that sent nothing and gave way to others.
    pub(super) silent: AtomicU64,
    /// The connection being served.
    pub(super) current: Mutex<Option<Shutdown>>,
}

impl Front {
    pub(super) fn new(listener: Listener) -> Front {
        let name = listener.name.clone();
        let closer = Closer::new(move |count| {
            warn!(
                source = %name,
                "{count} descriptors of front ends wait to be closed: the servers of these files do not \
                 respond. This socket takes no more messages until they are closed"
            );
        });
        Front {
            listener,
            closer,
            connections: AtomicU64::new(0),
            resumed: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            current: Mutex::new(None),
        }
    }
}
