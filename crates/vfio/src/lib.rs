//! Page pinning with accounting, and the kernel's IOMMU interfaces as domains.
//!
//! * [`pin`]: pages of this process held in place by IOVA, in runs, over io_uring, mlock or a fake;
//!   [`Account`]: how much an owner has pinned, and its limit.
//! * [`kernel`]: VFIO containers, groups and devices, and iommufd, close to the kernel's interface:
//!   a container has methods to map only once a group is in it.
//! * [`Type1`] and [`Iommufd`]: both as a [`Domain`](ringfence_iommu::Domain) whose targets are
//!   addresses of this process; [`DirtyMap`]: what devices have written to.
//!
//! `ringfence-vfio-testing` has both in this process, for tests without VFIO.

mod account;
mod dirty;
mod error;
mod iommufd;
pub mod kernel;
pub mod pin;
mod privilege;
mod space;
mod type1;
mod vaddr;

pub use account::{Account, LimitError};
pub use dirty::DirtyMap;
pub use error::{Error, Result};
pub use iommufd::Iommufd;
pub use space::{Tuning, Usage};
pub use type1::Type1;
pub use vaddr::VaddrUpdate;
