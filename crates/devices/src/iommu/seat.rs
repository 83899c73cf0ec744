//! How a device behind an IOMMU of this process interacts with it.

use std::sync::Arc;

use ringfence_mem::Memory;
use ringfence_vhost_user::HandlerError;
use ringfence_virtq::F_ACCESS_PLATFORM;

use super::Iommu;

/// A connection's place behind a guest's [`Iommu`], or in front of it. It ends when it is dropped.
pub struct Seat {
    iommu: Arc<Iommu>,
    number: u64,
}

impl Iommu {
    /// A place for a device behind this IOMMU, for one connection.
    pub fn seat(self: &Arc<Self>) -> Seat {
        let mut state = self.state.lock();
        state.next_seat += 1;
        Seat::new(Arc::clone(self), state.next_seat)
    }
}

impl Seat {
    pub(super) fn new(iommu: Arc<Iommu>, number: u64) -> Seat {
        Seat { iommu, number }
    }

    pub(super) fn iommu(&self) -> &Arc<Iommu> {
        &self.iommu
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The memory that the connection brings.
    ///
    /// # Errors
    /// It belongs to another guest than that of the other connections.
    pub fn set_memory(&self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        self.iommu.set_memory(self.number, memory)
    }

    /// The features that the driver of a device behind the IOMMU has accepted.
    ///
    /// # Errors
    /// Its addresses would not be translated.
    pub fn set_features(&self, features: u64) -> Result<(), HandlerError> {
        if features & (1 << F_ACCESS_PLATFORM) == 0 {
            let why = "VIRTIO_F_ACCESS_PLATFORM is needed: this device is behind an IOMMU";
            tracing::warn!(source = %"iommu", "{why}");
            return Err(HandlerError::new(why));
        }
        Ok(())
    }

    /// A ring of the device is about to start.
    ///
    /// # Errors
    /// The guest was reset, and I/O under way does not end.
    pub fn ring_starts(&self) -> Result<(), HandlerError> {
        self.iommu.device_starts()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.iommu.leave(self.number);
    }
}
