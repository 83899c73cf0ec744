//! virtio-net: a back end that moves packets from driver to driver.
//!
//! A packet is copied once, from the sender's memory into the receiver's buffers. A worker takes a
//! burst of packets and of buffers, looks all of them up, and copies; it never waits: if a
//! translation is missing it sends the misses of the whole burst, and goes on with other queues.

#[cfg(test)]
mod cost;
mod device;
pub mod frame;
mod lane;
mod outlet;
#[allow(unsafe_code)]
mod pieces;
mod probe;
mod receive;
mod ring;
mod round;
mod stats;
#[allow(unsafe_code)]
mod tap;
mod unit;
pub mod wire;

pub use device::{Net, NetEnd, NetOptions};
pub use round::GRACE;
pub use stats::{Lost, QueueCounters};
pub use tap::{Tap, TapError};
pub use unit::{Link, NetUnit};
