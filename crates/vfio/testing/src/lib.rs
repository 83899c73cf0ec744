#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`fake`]: VFIO's type1 containers and iommufd (rules [L51]-[L63]).
//! * [`backing`]: what a pinner holds pages with, recorded and failing on request.
//! * [`suite`]: the checks that any kernel must pass.
//!
//! The kernels are behind the seam that [`ringfence_vfio::kernel`] defines.
//!
//! [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
//! [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63

pub mod backing;
pub mod fake;
pub mod suite;
