//! Page pinning with accounting, and the kernel's IOMMU interfaces as domains.

mod dirty;
pub mod fake;
pub mod kernel;
pub mod pin;
pub mod suite;

pub use dirty::DirtyMap;
