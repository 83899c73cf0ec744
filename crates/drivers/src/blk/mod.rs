//! virtio-blk.

mod mapped;
mod queue;

pub use mapped::{Batching, Completion, FOREIGN, MappedError, MappedQueue, NotSubmitted, Unmapped};
pub use queue::{Done, DriverQueue, QueueLayout};
