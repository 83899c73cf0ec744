//! virtio-iommu as a vhost-user back end, in the process of the devices behind it.
//!
//! The devices' endpoints translate through the very tables that the virtio-iommu's requests
//! change: no IOTLB message is needed, and a mapping is usable when its MAP is answered.
//!
//! [`Iommu`] is the device, which outlives its front ends; [`IommuBackend`] serves one of them.
//! What the devices behind it have to do with it, they do through a [`Seat`].
//!
//! In a VMM that is built on rust-vmm there is no front end: with the feature `rust-vmm`, a `VmmIommu`
//! is activated with the VMM's memory, queues and event descriptors.

mod backend;
mod backing;
mod device;
mod faults;
mod gate;
mod journal;
mod reach;
mod seat;
mod unit;
#[cfg(feature = "rust-vmm")]
mod vmm;

pub use backend::IommuBackend;
pub use backing::{Endpoints, JointDomain};
pub use device::{Iommu, IommuFigures, IommuOptions};
pub use seat::Seat;
#[cfg(feature = "rust-vmm")]
pub use vmm::{VmmIommu, VmmIommuError, host_regions};
