//! What any vhost-user back end needs, whatever the device.
//!
//! ```no_run
//! use std::{fs::File, io::Read, os::unix::net::UnixListener};
//!
//! use ringfence_iotlb::IotlbConfig;
//! use ringfence_vhost_user_backend::{Device, Request, serve};
//!
//! struct Rng(File);
//!
//! impl Device for Rng {
//!     /// Its buffers are translated and checked; a miss has parked the request, not the worker.
//!     fn request(&mut self, _queue: u16, mut request: Request) {
//!         let mut bytes = [0; 4096];
//!         let len = request.writable_len().min(bytes.len());
//!         match self.0.read_exact(&mut bytes[..len]) {
//!             Ok(()) => _ = request.write(&bytes[..len]), // and completes it
//!             Err(error) => request.fail(error),
//!         }
//!     }
//! }
//!
//! let listener = UnixListener::bind("/run/rng.sock")?;
//! serve("rng", &listener, IotlbConfig::default(), || Ok(Rng(File::open("/dev/urandom")?)))?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! - [`Backend`] is the device at the socket: it keeps the front end's settings, brings rings to
//!   the workers that serve them, carries out IOTLB messages, and has writes logged. A [`Device`]
//!   receives requests; one that handles its rings itself is a [`RawDevice`], and its rings on a
//!   worker are [`Rings`].
//! - [`Bus`] is a worker's way to the front end's memory: through the device IOTLB, through an
//!   IOMMU of this process, or directly. It translates, checks, takes leases and marks what it
//!   writes.
//! - [`Translation`] is the device IOTLB of a connection: its front end's updates and its own
//!   misses.
//! - [`requests`] handles rings of requests, for a device that implements the requests themselves.
//! - [`RingLog`] marks what a device writes to its rings; [`IotlbTally`] sums figures over
//!   connections.
#![deny(unsafe_code)]

mod bus;
#[allow(unsafe_code)]
mod device;
mod front_end;
mod handler;
pub mod requests;
mod ring_log;
mod serve;
mod tally;
mod translation;

pub use bus::Bus;
pub use device::{Device, Request, Requests};
pub use front_end::{Events, FrontEnd, RingStart, of_ring, read_config};
pub use handler::{Addresses, Backend, Connection, RawDevice, Rings, Shares};
pub use ring_log::RingLog;
pub use serve::serve;
pub use tally::{IotlbTally, IotlbTotals};
pub use translation::Translation;
