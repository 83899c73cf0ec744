//! For code that is written for rust-vmm's `IommuMemory`.

use std::{fmt, ops::Deref, sync::Arc};

use ringfence_iommu::Prot;
use vm_memory::{
    GuestAddress, Permissions,
    iommu::{Error, Iommu, Iotlb, IotlbFails, IotlbIterator},
};

use ringfence_iotlb::{
    Endpoint,
    guard::{Failure, FailureScope, Guard, GuardCounters, Guards},
};

use crate::{error::into_iommu_error, memory::prot_of};

/// An [`Iommu`] over an endpoint's translations, **which is not strict**: slices of memory that
/// `IommuMemory` hands out are kept in use only as long as the iterator that they come from, so that an
/// invalidation may be over while a device still has them (rule D15). An
/// [`IotlbAddressSpace`](super::IotlbAddressSpace) keeps them by leases; this is for code that cannot
/// be given one.
///
/// rust-vmm's trait wants its own [`Iotlb`], so each access gets one, filled with as much of ours as
/// it needs: an allocation and a tree of ranges for what an
/// [`IotlbAddressSpace`](super::IotlbAddressSpace) does with neither. It waits for what is missing, as
/// that does, and stops after a failure in the same way: until [`recover`](Self::recover).
///
/// Nor is there a guard whose failure is that of one request, and a range that ends at 2^64 is
/// refused, as `Iotlb` has no words for it.
pub struct UnleasedIommu {
    source: Arc<Guards>,
}

impl UnleasedIommu {
    /// The translations of `endpoint`; `None` if the process's shootdown has no place for another
    /// reader.
    pub fn new(endpoint: Arc<Endpoint>) -> Option<UnleasedIommu> {
        Some(UnleasedIommu { source: Guards::new(endpoint, FailureScope::Space)? })
    }

    /// What it has counted.
    pub fn counters(&self) -> &Arc<GuardCounters> {
        self.source.counters()
    }

    /// Why it has stopped, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.source.failure()
    }

    /// Goes on after a failure, which is returned.
    pub fn recover(&self) -> Option<Failure> {
        self.source.recover()
    }
}

/// The translations of one access, kept in use while it lives.
pub struct FilledIotlb {
    iotlb: Iotlb,
    _held: Guard,
}

impl Deref for FilledIotlb {
    type Target = Iotlb;

    fn deref(&self) -> &Iotlb {
        &self.iotlb
    }
}

impl Iommu for UnleasedIommu {
    type IotlbGuard<'a> = FilledIotlb;

    fn translate(
        &self,
        iova: GuestAddress,
        length: usize,
        access: Permissions,
    ) -> Result<IotlbIterator<FilledIotlb>, Error> {
        let refused = |failure: Failure| into_iommu_error(failure, iova.0, length);
        let held = Guard::new(&self.source, Box::new(|_, _| true));
        // `Iotlb` counts from the address to the one behind the last.
        if iova.0.checked_add(length as u64).is_none() {
            let failure = Failure::Overflow { addr: iova.0, count: length };
            return Err(refused(held.fail(failure, Prot::empty())));
        }
        let mut parts = Vec::new();
        held.translate(iova.0, length, prot_of(access), |target, extent| {
            parts.push((target, extent as usize + 1));
        })
        .map_err(refused)?;
        let mut iotlb = Iotlb::new();
        let mut at = iova.0;
        for (target, len) in parts {
            iotlb.set_mapping(GuestAddress(at), GuestAddress(target), len, access)?;
            at += len as u64;
        }
        let filled = FilledIotlb { iotlb, _held: held };
        Iotlb::lookup(filled, iova, length, access).map_err(|IotlbFails { .. }| {
            // Not met: it was filled with all of the range.
            refused(Failure::Refused { addr: iova.0 })
        })
    }
}

impl fmt::Debug for UnleasedIommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnleasedIommu").field("source", &self.source).finish()
    }
}
