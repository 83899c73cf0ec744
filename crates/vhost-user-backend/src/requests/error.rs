//! Why a queue stopped.

use ringfence_mem::AccessError;
use ringfence_vhost_user::InflightError;
use ringfence_virtq::RingError;

/// Why a queue stopped.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The driver broke the rules of the ring, or the ring cannot be reached.
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    /// Memory that was in use is gone.
    #[error("memory: {0}")]
    Memory(#[from] AccessError),
    /// The record of an earlier process is invalid.
    #[error(transparent)]
    Record(#[from] InflightError),
    /// The record of what is in flight is gone.
    #[error("the in-flight region was truncated")]
    RecordLost,
    /// io_uring cannot be used.
    #[error("io_uring: {0}")]
    Io(#[from] std::io::Error),
    /// The ring is not at its new addresses.
    #[error("the ring is not where it was moved to")]
    Moved,
    /// More workers than the IOMMU has places for.
    #[error("too many workers for one IOMMU")]
    Readers,
}
