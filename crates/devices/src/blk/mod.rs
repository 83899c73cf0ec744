//! virtio-blk.

mod backend;
mod cache;
mod figures;
mod queue;
mod reaper;
pub mod request;
mod unit;

pub use backend::{BlkBackend, BlkOptions, make_rings};
pub use figures::BlkFigures;
pub use queue::{BlkQueue, QueueError, QueueStats};
pub use unit::BlkUnit;
