//! Devices in user space: virtio-blk, virtio-net and virtio-iommu back ends, and disks.
#![deny(unsafe_code)]

pub mod blk;
pub mod disk;
pub mod iommu;
pub mod net;
pub mod path;
#[allow(unsafe_code)]
pub mod peer;
