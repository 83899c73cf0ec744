//! DMA protection for user-space I/O.
//!
//! A feature for each kind of user, of which the first is on by default:
//!
//! | feature | for | begins with |
//! |---|---|---|
//! | `driver` | drivers in user space | [`Device`], over a [`Domain`] |
//! | `vfio` | those of real devices | `vfio::Type1`, `vfio::Iommufd` |
//! | `backend` | vhost-user back ends with a device IOTLB | `backend::Device` |
//! | `vmm` | VMMs that offer a virtio-iommu | `vmm::LocalIommu` |
//! | `rust-vmm` | VMMs and devices of rust-vmm | `rust_vmm::VmmIommu`, `rust_vmm::IotlbAddressSpace` |
//!
//! What is not here is in the crate whose idea it is: ARCHITECTURE.md has the list.
#![forbid(unsafe_code)]

pub use ringfence_iommu::{
    Capabilities, Domain, Error, Fault, FaultReason, FaultSink, Gather, Geometry, GuestPhys,
    HostAddr, Iova, Map, PageSizes, Partial, Pending, Prot, Range, ReservedKind, ReservedRegion,
    Result, SoftDomain, shootdown::Shootdown, table::Limits,
};

#[cfg(feature = "driver")]
pub use ringfence_dma::{
    Device, Direction, DmaBuffer, DmaConfig, HostMemory, MapError, Mapping, Persistent, Policy,
    Segment, UnmapError,
};
#[cfg(feature = "driver")]
pub use ringfence_iova::{Allocator, Aperture, Placement, Slabs};
#[cfg(feature = "driver")]
pub use ringfence_sync::cpu::OsCpu;

/// The driver of a virtio-iommu, whose domains are [`Domain`]s.
#[cfg(feature = "driver")]
pub mod viommu {
    pub use ringfence_mem::Window;
    pub use ringfence_virtio_iommu::{
        driver::{Buffers, Driver, EventReceiver, Options, Transport, ViommuDomain, negotiate},
        wire::IommuConfig,
    };
    pub use ringfence_virtq::driver::{Queue, Rings};
}

/// What the kernel has for drivers in user space.
#[cfg(feature = "vfio")]
pub mod vfio {
    pub use ringfence_vfio::{Account, DirtyMap, Iommufd, Tuning, Type1, kernel, pin};
}

/// A vhost-user back end behind a device IOTLB: the device sees no untranslated address, and waits
/// for no miss.
#[cfg(feature = "backend")]
pub mod backend {
    pub use ringfence_iotlb::{Iotlb, IotlbConfig};
    pub use ringfence_mem::{Access, Memory, Translate};
    pub use ringfence_run::worker::{Notify, Worker};
    pub use ringfence_vhost_user::{Server, Shutdown};
    pub use ringfence_vhost_user_backend::{
        Addresses, Backend, Device, RawDevice, Request, Requests,
    };
}

/// A virtio-iommu inside a VMM, and what translates behind it.
#[cfg(feature = "vmm")]
pub mod vmm {
    pub use ringfence_devices::iommu::{Endpoints, LocalIommu, LocalIommuError, Reach};
    pub use ringfence_iotlb::{Binding, Endpoint, View};
    pub use ringfence_mem::{Access, Memory, Translate};
    pub use ringfence_run::worker::Notify;
    pub use ringfence_virtio_iommu::device::{HostRegion, Mirror, Options};
    pub use ringfence_virtq::device::RingConfig;
}

/// Ringfence over rust-vmm's memory, queues and event descriptors.
#[cfg(feature = "rust-vmm")]
pub use ringfence_rust_vmm as rust_vmm;
