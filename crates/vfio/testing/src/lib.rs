//! What tests of VFIO need: kernels in this process, and what any kernel must answer.
//!
//! * [`fake`]: VFIO's type1 containers and iommufd, check by check and number by number as the kernel
//!   has them (rules L51-L63), for who drives VFIO and is to be tested without it.
//! * [`suite`]: the questions that any of them, fake or real, must answer alike.
//!
//! Both stand behind the seam that [`ringfence_vfio::kernel`] is.

pub mod fake;
pub mod suite;
