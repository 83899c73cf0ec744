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

/// An [`Iommu`] over an endpoint's translations, **which is not strict**: slices of memory from
/// `IommuMemory` are kept in use only as long as the iterator that they come from, so that an
/// invalidation may complete while a device still has them (rule D15). An
/// [`IotlbAddressSpace`](super::IotlbAddressSpace) keeps them in use through leases; this is for
/// code that cannot use one.
///
/// rust-vmm's trait needs its own [`Iotlb`], so each access gets one, filled with as much of ours
/// as it needs: an allocation and a tree of ranges, where an
/// [`IotlbAddressSpace`](super::IotlbAddressSpace) needs neither. An access waits for missing
/// translations as there, and a failure stops it in the same way: until [`recover`](Self::recover).
///
/// Nor is there a guard that limits a failure to one request, and a range that ends at 2^64 is
/// refused, as `Iotlb` cannot express it.
pub struct UnleasedIommu {
    source: Arc<Guards>,
}

impl UnleasedIommu {
    /// The translations of `endpoint`; `None` if the process's shootdown has no place for another
    /// reader.
    pub fn new(endpoint: Arc<Endpoint>) -> Option<UnleasedIommu> {
        Some(UnleasedIommu { source: Guards::new(endpoint, FailureScope::Space)? })
    }

    /// Its counters.
    pub fn counters(&self) -> &Arc<GuardCounters> {
        self.source.counters()
    }

    /// Why it has stopped, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.source.failure()
    }

    /// Resumes after a failure, which it returns.
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
        // `Iotlb` needs the address behind the last one.
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
            // Unreachable: it was filled with all of the range.
            refused(Failure::Refused { addr: iova.0 })
        })
    }
}

impl fmt::Debug for UnleasedIommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnleasedIommu").field("source", &self.source).finish()
    }
}
