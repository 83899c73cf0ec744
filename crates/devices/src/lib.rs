//! Devices in user space: virtio-blk, virtio-net and virtio-iommu back ends, and disks.

mod backend;
pub mod blk;
pub mod bus;
mod dirty;
pub mod disk;
pub mod iommu;
pub mod net;
pub mod path;
pub mod peer;
pub mod tally;
pub mod translation;
