//! Page pinning with accounting, and the kernel's IOMMU interfaces as domains.

mod dirty;
mod error;
pub mod fake;
pub mod kernel;
pub mod pin;

pub use dirty::DirtyMap;
pub use error::{Error, Result};
