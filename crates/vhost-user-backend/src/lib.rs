#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! - [`Backend`] is the device at the socket: it keeps the front end's settings, brings rings to
//!   the workers that serve them, carries out IOTLB messages, and has writes logged. A [`Device`]
//!   receives requests; one that handles its rings itself is a [`RawDevice`], and its rings on a
//!   worker are [`Rings`].
//! - [`Bus`] is a worker's way to the front end's memory: through the device IOTLB, through an
//!   IOMMU of this process, or directly. It translates, checks, takes leases and marks what it
//!   writes.
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
mod tally;
mod translation;

pub use bus::Bus;
pub use device::{Device, Request, Requests, serve};
pub use front_end::{Events, FrontEnd, RingStart, of_ring, read_config};
pub use handler::{Addresses, Backend, Change, Common, RawDevice, Rings, Shares};
pub use ring_log::RingLog;
pub use tally::{IotlbTally, IotlbTotals};
