//! virtio-iommu as a vhost-user back end, in the process of the devices behind it.
//!
//! The devices' endpoints translate through the very tables that the virtio-iommu's requests
//! change: no IOTLB message is needed, and a mapping is usable when its MAP is completed.
//!
//! [`Iommu`] is the device, which outlives its front ends; [`IommuBackend`] serves one of them.
//! Devices behind it interact with it through an [`IommuClient`].
//!
//! Inside a VMM there is no front end: a [`LocalIommu`] is started with the VMM's rings and event
//! descriptors, and reaches its memory as the VMM's [`Reach`] does.

mod backend;
mod backing;
#[allow(unsafe_code)]
mod device;
mod faults;
mod journal;
mod local;
mod reach;
mod unit;

pub use backend::IommuBackend;
pub use backing::{Endpoints, JointDomain};
pub use device::{Iommu, IommuClient, IommuFigures, IommuOptions};
pub use local::{LocalIommu, LocalIommuError};
pub use reach::Reach;
