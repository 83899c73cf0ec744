//! virtio-iommu as a vhost-user back end, in the process of the devices behind it.
//!
//! The devices' endpoints translate through the very tables that the virtio-iommu's requests
//! change: no IOTLB message is needed, and a mapping is usable when its MAP is answered.

mod backend;
mod backing;
mod unit;

pub use backend::{IommuBackend, IommuOptions};
pub use backing::{Endpoints, JointDomain};
pub use unit::IommuUnit;
