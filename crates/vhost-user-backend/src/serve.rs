//! A whole back end: a socket, a worker, and a device for each front end.

use std::{io, os::unix::net::UnixListener, sync::Arc};

use ringfence_iotlb::IotlbConfig;
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::Server;

use crate::{Addresses, Device, Requests};

/// Serves the front ends that connect to `listener`, one after the other, each by a device that
/// `device` makes, behind a device IOTLB. One worker thread serves the queues; `name` stands in
/// messages. A connection that ends in an error is logged (by `tracing`), and the next is accepted.
/// A front end that stays connected keeps all others waiting, even one that sends nothing.
///
/// A service that needs more (several sockets, silent peers, an orderly end, an upgrade under load)
/// makes its own [`Worker`]s and [`Server`]s, from [`Requests::backend`].
///
/// # Errors
/// The worker cannot be started, no connection can be accepted, or `device` failed.
pub fn serve<D: Device>(
    name: &str,
    listener: &UnixListener,
    iotlb: IotlbConfig,
    mut device: impl FnMut() -> io::Result<D>,
) -> io::Result<()> {
    let workers: Arc<[Worker]> = [Worker::spawn(name, Notify::Adaptive)?].into();
    loop {
        let (front_end, _) = listener.accept()?;
        let (device, addresses) = (device()?, Addresses::Iotlb(iotlb));
        let backend = Requests::backend(device, name, addresses, Arc::clone(&workers), 0);
        if let Err(error) = Server::new(front_end, backend).serve() {
            tracing::warn!("{name}: the connection has ended: {error}");
        }
    }
}
