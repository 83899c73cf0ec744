//! virtio-blk.

mod backend;
mod cache;
mod driver;
mod figures;
pub mod load;
mod mapped;
mod queue;
mod reaper;
pub mod request;
mod unit;
pub mod wire;

pub use backend::{BlkBackend, BlkOptions, make_rings};
pub use driver::{Done, DriverQueue, QueueLayout};
pub use figures::BlkFigures;
pub use mapped::{Batching, Completion, FOREIGN, MappedError, MappedQueue, NotAsked, Unmapped};
pub use queue::{BlkQueue, QueueError, QueueStats};
pub use unit::BlkUnit;
