//! Why a device is not as it was.

use ringfence_iommu::Error;

use crate::wire::Status;

/// Why a state was not taken over. Nothing is attached, then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device has domains already.
    #[error("the device is in use")]
    InUse,
    /// The bytes are too short, too long or not a saved state.
    #[error("not a saved state: {0}")]
    Format(&'static str),
    /// It has another version.
    #[error("the saved state has version {0}")]
    Version(u32),
    /// The device offers something else than the saved one.
    #[error("the device differs from the one that was saved: {0}")]
    Differs(&'static str),
    /// Restoring the state failed; this is the answer of the request for it.
    #[error("the state cannot be restored: domain {domain}, {status}")]
    Refused {
        /// The domain.
        domain: u32,
        /// The answer.
        status: Status,
    },
    /// A request that was answered with OK is answered with something else.
    #[error("request {at} after the state cannot be carried out here: {status}")]
    Request {
        /// Which of them.
        at: usize,
        /// The answer.
        status: Status,
    },
    /// An invalidation failed.
    #[error("an invalidation: {0}")]
    Invalidation(Error),
    /// An invalidation does not end.
    #[error("an invalidation does not end")]
    Stuck,
}
