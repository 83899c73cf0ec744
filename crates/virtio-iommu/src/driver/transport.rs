//! How the driver and the device wake each other.

use std::time::Duration;

use ringfence_iommu::{Error, Result};

/// The way to the device beside the rings: notifications, and the one writable field.
pub trait Transport: Send + Sync {
    /// Notifies the device that there is something in `queue`.
    fn kick(&self, queue: u16);

    /// Waits until the device has notified of used buffers in `queue`, or until `timeout` is over.
    /// Must not lose a notification that arrived before the call; may return early. Called by one
    /// thread at a time.
    fn wait(&self, queue: u16, timeout: Duration);

    /// Whether the device can still reply: false once its process or connection is known to be
    /// gone. A driver without a time-out waits for as long as this is true.
    fn is_alive(&self) -> bool {
        true
    }

    /// Writes `bypass` into the configuration.
    ///
    /// # Errors
    /// The default returns [`Error::Unsupported`].
    fn set_bypass(&self, bypass: bool) -> Result<()> {
        let _ = bypass;
        Err(Error::Unsupported("this transport cannot write the configuration"))
    }
}
