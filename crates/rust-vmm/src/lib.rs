#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * A device of rust-vmm behind an IOMMU, unchanged: [`IotlbAddressSpace`], which is a
//!   [`GuestAddressSpace`](vm_memory::GuestAddressSpace); [`shared_regions`] makes the memory
//!   behind it from what a vhost-user front end shared.
//! * Our rings and devices over a VMM's memory: [`GuestBus`].
//! * A virtio-iommu in a VMM (feature `iommu`, on by default): [`VmmIommu`].
//!
//! # A device behind an IOMMU
//! It takes its memory from the address space for each piece of work. The [`IotlbMemory`] that it
//! gets translates IOVAs as a [`Guard`](ringfence_iotlb::guard::Guard): an access that misses sends
//! the miss and waits, and memory that was handed out stays in use for as long as the memory, or a
//! clone of it, lives. Slices come from the regions behind it and mark writes in their bitmaps, by
//! guest-physical address.
//!
//! # An error is not an end
//! `virtio-queue`'s iterator over a chain ends where the next descriptor cannot be read, as if the
//! chain ended there: the device would serve a shorter request than was made. So after a failed
//! translation everything else fails as well, and such a request cannot be published:
//!
//! * by default ([`FailureScope::Space`]) no guard of the address space works until the device, or
//!   a reset of it, calls [`IotlbAddressSpace::recover`]: right for a device that was written
//!   without an IOMMU in mind;
//! * with [`FailureScope::Guard`] only the guard in which the failure happened. The device takes a
//!   guard for each request, walks the chain, reads, writes *and publishes* through it, and calls
//!   [`IotlbMemory::check`] where it would have to distinguish an error from an end. If it failed,
//!   it completes the request with an error through a new guard.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod bus;
#[allow(unsafe_code)]
#[cfg(feature = "iommu")]
mod iommu;
mod memory;
#[allow(unsafe_code)]
mod regions;

pub use bus::GuestBus;
#[cfg(feature = "iommu")]
pub use iommu::{VmmIommu, VmmIommuError, VmmMemory, host_regions};
pub use memory::{IotlbAddressSpace, IotlbMemory};
pub use regions::{SharedRegion, shared_regions};

// Of the releases that this crate is built with.
pub use vm_memory;
#[cfg(feature = "iommu")]
pub use {virtio_queue, vmm_sys_util};

pub use ringfence_iotlb::guard::{Failure, FailureScope, GuardCounters};
