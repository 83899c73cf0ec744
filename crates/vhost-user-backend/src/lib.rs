//! What any vhost-user back end needs, whatever the device.
//!
//! - [`Backend`] is the device at the socket: it keeps what the front end has said, brings rings to the workers that
//!   serve them, answers IOTLB messages, and has writes logged. A [`Device`] is given requests;
//!   one that has its rings in hand itself is a [`RawDevice`], and its rings on a worker are [`Rings`].
//! - [`Bus`] is a worker's way to the front end's memory: through the device IOTLB, through an IOMMU of this process, or
//!   plainly. It translates, checks, takes leases and marks what it writes.
//! - [`Translation`] is the device IOTLB of a connection: what its front end has sent, and what is asked of it.
//! - [`requests`] has rings of requests in hand, for a device that knows what a request is.
//! - [`RingLog`] marks what a device writes to its rings; [`IotlbTally`] sums figures over connections.
#![deny(unsafe_code)]

mod bus;
#[allow(unsafe_code)]
mod device;
mod front_end;
mod handler;
pub mod requests;
mod ring_log;
mod tally;
mod translation;

pub use bus::Bus;
pub use device::{Device, Request, Requests};
pub use front_end::{Events, FrontEnd, RingStart, of_ring, read_config};
pub use handler::{Addresses, Backend, Connection, RawDevice, Rings, Shares};
pub use ring_log::RingLog;
pub use tally::{IotlbTally, IotlbTotals};
pub use translation::Translation;
