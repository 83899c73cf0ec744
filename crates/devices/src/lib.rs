//! Devices in user space: virtio-blk and virtio-iommu back ends, and the virtio-blk driver.

mod backend;
pub mod blk;
pub mod bus;
mod dirty;
pub mod disk;
pub mod event;
pub mod iommu;
pub mod net;
pub mod ram;
pub mod tally;
pub mod translation;
pub mod worker;
