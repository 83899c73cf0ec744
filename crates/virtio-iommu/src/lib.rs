//! virtio-iommu: wire format, driver (as a Domain) and device (over any Domain)
