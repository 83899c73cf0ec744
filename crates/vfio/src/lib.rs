//! Page pinning with accounting, and the kernel's IOMMU interfaces as domains.

mod account;
mod dirty;
pub mod fake;
pub mod kernel;
pub mod pin;

pub use account::{Account, LimitError};
pub use dirty::DirtyMap;
