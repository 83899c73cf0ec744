#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`fake`]: VFIO's type1 containers and iommufd (rules L51-L63).
//! * [`backing`]: what a pinner holds pages with, recorded and failing on request.
//! * [`suite`]: the checks that any kernel must pass.
//!
//! The kernels are behind the seam that [`ringfence_vfio::kernel`] defines.

pub mod backing;
pub mod fake;
pub mod suite;
