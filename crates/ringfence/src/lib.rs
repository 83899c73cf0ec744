#![doc = include_str!("../README.md")]
//!
//! # A vhost-user back end
//! Feature `backend`:
#![cfg_attr(feature = "backend", doc = concat!("```no_run\n", include_str!("../examples/rng.rs"), "```"))]
//!
//! # A virtio-iommu in a VMM
//! The device, and what a guest's driver does with it (feature `rust-vmm`):
#![cfg_attr(feature = "rust-vmm", doc = concat!("```no_run\n", include_str!("../examples/vmm.rs"), "```"))]
//!
//! # A device of rust-vmm behind an IOMMU
#![cfg_attr(feature = "rust-vmm", doc = concat!("```no_run\n", include_str!("../examples/rust_vmm.rs"), "```"))]
#![forbid(unsafe_code)]

pub use ringfence_iommu::{
    Capabilities, Domain, Error, Fault, FaultReason, FaultSink, Gather, Geometry, GuestPhys,
    HostAddr, Iova, Map, PageSizes, Partial, Pending, Prot, Range, ReservedKind, ReservedRegion,
    Result, SoftDomain, shootdown::Shootdown, table::Limits,
};

/// A domain in software: what a first program maps in, and a test.
pub mod soft {
    use std::sync::Arc;

    use crate::{HostAddr, SoftDomain};

    /// An empty domain that leads to addresses of this process, as [`SoftDomain::x86`] makes it.
    pub fn domain() -> Arc<SoftDomain<HostAddr>> {
        SoftDomain::x86()
    }
}

#[cfg(feature = "driver")]
pub use ringfence_dma::{
    Device, DeviceBuilder, Direction, DmaBuffer, DmaConfig, HostMemory, MapError, Mapping,
    Persistent, Policy, Segment, UnmapError,
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
        driver::{
            Buffers, Driver, DriverConfig, EventReceiver, Transport, ViommuDomain, negotiate,
        },
        wire::IommuConfig,
    };
    pub use ringfence_virtq::{
        F_VERSION_1,
        driver::{Queue, Rings},
    };
}

/// The kernel's interfaces for drivers in user space.
#[cfg(feature = "vfio")]
pub mod vfio {
    pub use ringfence_vfio::{
        Account, DirtyMap, Iommufd, Opened, Tuning, Type1, kernel, open, pin,
    };
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
        Addresses, Backend, Device, RawDevice, Request, Requests, serve,
    };
}

/// A virtio-iommu inside a VMM, and the translation behind it.
#[cfg(feature = "vmm")]
pub mod vmm {
    pub use ringfence_devices::iommu::{Endpoints, LocalIommu, LocalIommuError, Reach};
    pub use ringfence_iotlb::{Binding, Endpoint, View};
    pub use ringfence_mem::{Access, Memory, Translate};
    pub use ringfence_run::worker::Notify;
    pub use ringfence_virtio_iommu::device::{DeviceConfig, HostRegion, Mirror};
    pub use ringfence_virtq::{device::RingConfig, layout};
}

/// Ringfence over rust-vmm's memory, queues and event descriptors.
#[cfg(feature = "rust-vmm")]
pub use ringfence_rust_vmm as rust_vmm;
