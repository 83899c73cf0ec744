//! virtio-blk.

mod backend;
mod driver;
mod queue;
pub mod request;
mod unit;
pub mod wire;

pub use backend::{BlkBackend, BlkOptions};
pub use driver::{Done, DriverQueue, QueueLayout};
pub use queue::{BlkQueue, QueueError, QueueStats};
pub use unit::{BlkUnit, Start};
