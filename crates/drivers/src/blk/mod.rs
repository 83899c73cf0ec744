//! virtio-blk.

mod mapped;
mod queue;

pub use mapped::{Batching, Completion, FOREIGN, MappedError, MappedQueue, NotAsked, Unmapped};
pub use queue::{Done, DriverQueue, QueueLayout};
