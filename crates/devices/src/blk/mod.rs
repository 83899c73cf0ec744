//! virtio-blk.

mod cache;
mod device;
mod figures;
mod queue;
mod reaper;
pub mod request;
mod unit;

pub use device::{Blk, BlkOptions, make_rings};
pub use figures::BlkFigures;
pub use queue::{BlkQueue, QueueError, QueueStats};
pub use unit::BlkUnit;
