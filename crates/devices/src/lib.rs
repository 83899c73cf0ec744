//! Devices in user space: virtio-blk, virtio-net and virtio-iommu back ends, and disks.

pub mod blk;
pub mod disk;
pub mod iommu;
pub mod net;
pub mod path;
pub mod peer;
