//! rust-vmm's memory traits over an IOTLB, so that its devices run behind an IOMMU unchanged.
//!
//! A device of rust-vmm is given a [`GuestAddressSpace`](vm_memory::GuestAddressSpace) and takes its
//! memory from it for each piece of work. Give it an [`IotlbAddressSpace`]: the
//! [`IotlbMemory`] that comes from it translates IOVAs through an [`Endpoint`](crate::Endpoint),
//! straight from the table that invalidations act on. What was looked up is kept in use by leases for
//! as long as the guard, or a clone of it, lives: an invalidation of it is not over before
//! (rule D15), one of anything else is.
//!
//! # Waiting
//! These traits know no "come again later", so an access that meets a gap asks for it and waits
//! (a [`View`](crate::View) does not; a device written for it serves other requests meanwhile). The
//! front end may want to invalidate before it answers, even all there is. So while a thread waits
//! its guards hold nothing. When the answer is there, all that they had handed out is translated
//! anew: if it leads to the same places the access goes on, and if not the guard has failed, and so
//! has the access. Nothing is touched in between, because guards stay with their thread; for
//! asynchronous I/O there is [`IotlbMemory::hold`]. A device that keeps slices of a guard that failed
//! must not use them any more.
//!
//! What the guards of a thread have handed out must be in the table all at once to be taken up
//! again: a request must not need more entries than
//! [`IotlbConfig::entries`](crate::IotlbConfig::entries), or it runs out of patience.
//!
//! # An error is not an end
//! `virtio-queue`'s iterator over a chain ends where the next descriptor cannot be read, as if the
//! chain ended there: the device would serve a shorter request than was made. So whatever follows
//! a translation that failed fails as well, and such a request cannot be published:
//!
//! * by default ([`FailureScope::Space`]) no guard of the address space works until the device, or
//!   whoever resets it, calls [`IotlbAddressSpace::recover`]: right for a device that was written
//!   without an IOMMU in mind;
//! * with [`FailureScope::Guard`] only the guard that it happened to. The device takes a guard for
//!   each request, walks the chain, reads, writes *and publishes* through it, and asks
//!   [`IotlbMemory::check`] where it would have to tell an error from an end. If it failed, it answers
//!   the request with an error through a new guard.
//!
//! # What is behind it
//! Any [`GuestMemoryBackend`](vm_memory::GuestMemoryBackend). Slices come from its regions and mark
//! what is written in their bitmaps, by guest-physical address. [`shared_regions`] makes one of the
//! memory that a vhost-user front end shared.
//!
//! For code that is written for `IommuMemory` there is an [`UnleasedIommu`], which is not strict.

mod adapter;
mod held;
mod memory;
mod pieces;
mod regions;
mod source;
mod space;

pub use adapter::{FilledIotlb, UnleasedIommu};
pub use memory::IotlbMemory;
pub use regions::{SharedRegion, shared_regions};
pub use source::GuestMemoryCounters;
pub use space::IotlbAddressSpace;

use vm_memory::{
    GuestAddress, GuestMemoryError,
    iommu::{Error as IommuError, IovaRange},
};

/// What is unusable after a translation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureScope {
    /// The guard that it happened to, and its clones.
    Guard,
    /// Every guard of the address space and of its clones, old and new.
    Space,
}

/// Why an access could not be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// There is no such translation, or none that permits the access.
    #[error("{addr:#x}: no translation for this access")]
    Refused {
        /// The first address without.
        addr: u64,
    },
    /// Nobody said whether there is one in time.
    #[error("{addr:#x}: no answer to a miss in time")]
    TimedOut {
        /// The first address that is missing.
        addr: u64,
    },
    /// What had been handed out leads elsewhere, or nowhere, after a wait.
    #[error("{addr:#x}: changed while another translation was waited for")]
    Changed {
        /// The first address that does.
        addr: u64,
    },
    /// It would have had to wait, and the guard is [held](IotlbMemory::hold).
    #[error("{addr:#x}: not translated yet, and the guard is held")]
    WouldWait {
        /// The first address that is missing.
        addr: u64,
    },
    /// The translation leads out of memory.
    #[error("{addr:#x}: leads out of memory")]
    OutsideMemory {
        /// The first address of the access.
        addr: u64,
    },
    /// The access passes 2^64.
    #[error("{count} bytes at {addr:#x} pass the end of the address space")]
    Overflow {
        /// The address.
        addr: u64,
        /// The number of bytes.
        count: usize,
    },
    /// One access with more translations than any has (rule D23).
    #[error("{addr:#x}: an access with too many parts")]
    TooManyParts {
        /// The first address of the access.
        addr: u64,
    },
}

impl Failure {
    fn into_iommu_error(self, addr: u64, count: usize) -> IommuError {
        let iova_range = IovaRange { base: GuestAddress(addr), length: count };
        IommuError::CannotResolve { iova_range, reason: self.to_string() }
    }

    fn into_error(self, addr: u64, count: usize) -> GuestMemoryError {
        GuestMemoryError::IommuError(self.into_iommu_error(addr, count))
    }
}
