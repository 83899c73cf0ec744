//! Devices in user space: virtio-blk and virtio-iommu back ends, and the virtio-blk driver.

pub mod disk;
