#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`open`]: a PCI device, and its domain.
//! * [`Type1`] and [`Iommufd`]: a container and an address space as a
//!   [`Domain`](ringfence_iommu::Domain) whose targets are addresses of this process; [`DirtyMap`]:
//!   what devices have written to.
//! * [`kernel`]: VFIO containers, groups and devices, and iommufd, close to the kernel's interface:
//!   a container has methods to map only once a group is in it.
//! * [`pin`]: pages of this process held in place by IOVA, in runs, over io_uring; [`Account`]: how
//!   much an owner has pinned, and its limit.
//!
//! `ringfence-vfio-testing` has kernels in this process, for tests without VFIO.

#[cfg(test)]
extern crate self as ringfence_vfio;

mod account;
mod dirty;
mod error;
mod iommufd;
pub mod kernel;
mod memlock;
mod open;
pub mod pin;
mod space;
mod type1;
mod vaddr;

pub use account::{Account, LimitError};
pub use dirty::DirtyMap;
pub use error::{Error, Result};
pub use iommufd::Iommufd;
pub use open::{Opened, open};
pub use space::{Space, Tuning, Usage};
pub use type1::Type1;
pub use vaddr::VaddrUpdate;
