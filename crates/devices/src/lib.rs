//! Devices in user space: virtio-blk and virtio-iommu back ends, the virtio-blk driver, and an NVMe
//! driver.

mod backend;
pub mod blk;
pub mod bus;
pub mod conformance;
mod dirty;
pub mod disk;
pub mod event;
pub mod iommu;
mod kick;
pub mod net;
pub mod notifier;
pub mod nvme;
pub mod path;
pub mod peer;
pub mod ram;
mod restricted;
pub mod slice;
pub mod tally;
pub mod translation;
pub mod worker;
