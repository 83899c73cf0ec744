//! Devices in user space: virtio-blk and virtio-iommu back ends, and the virtio-blk driver.

pub mod blk;
pub mod bus;
pub mod disk;
pub mod event;
pub mod iommu;
pub mod net;
pub mod ram;
pub mod tally;
pub mod translation;
pub mod worker;
