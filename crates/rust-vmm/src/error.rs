//! Failures as rust-vmm's errors.

use ringfence_iotlb::guard::Failure;
use vm_memory::{
    GuestAddress, GuestMemoryError,
    iommu::{Error, IovaRange},
};

/// The error of an access to the `count` bytes at `addr`.
pub(crate) fn into_iommu_error(failure: Failure, addr: u64, count: usize) -> Error {
    let iova_range = IovaRange { base: GuestAddress(addr), length: count };
    Error::CannotResolve { iova_range, reason: failure.to_string() }
}

/// As [`into_iommu_error`], for an access.
pub(crate) fn into_error(failure: Failure, addr: u64, count: usize) -> GuestMemoryError {
    GuestMemoryError::IommuError(into_iommu_error(failure, addr, count))
}
