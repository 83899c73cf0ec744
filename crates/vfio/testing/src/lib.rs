//! For tests of VFIO: kernels in this process, and checks that any kernel must pass.
//!
//! * [`fake`]: VFIO's type1 containers and iommufd, check by check and error number by error number
//!   as in the kernel (rules L51-L63), to test users of VFIO without it.
//! * [`suite`]: the checks that any kernel, fake or real, must pass.
//!
//! Both are behind the seam that [`ringfence_vfio::kernel`] defines.

pub mod fake;
pub mod suite;
