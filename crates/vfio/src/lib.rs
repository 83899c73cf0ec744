//! Page pinning with accounting, and the kernel's IOMMU interfaces as domains.

mod dirty;
mod error;
pub mod fake;
mod iommufd;
pub mod kernel;
pub mod pin;
mod space;
pub mod suite;
mod type1;
mod vaddr;

pub use dirty::DirtyMap;
pub use error::{Error, Result};
pub use iommufd::Iommufd;
pub use space::{Tuning, Usage};
pub use type1::Type1;
pub use vaddr::VaddrUpdate;
