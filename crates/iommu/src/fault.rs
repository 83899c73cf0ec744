//! Accesses that translation refused.

use crate::{Iova, Prot};

/// Why an access was refused (the reasons of virtio 1.3, section 5.13.6.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultReason {
    /// Nothing more is known.
    Unknown,
    /// The endpoint is attached to no domain.
    NoDomain,
    /// The domain has no mapping there, or not with this permission.
    Mapping,
}

/// An access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// Why.
    pub reason: FaultReason,
    /// The endpoint whose access it was.
    pub endpoint: u32,
    /// The first address that could not be reached.
    pub iova: Iova,
    /// The attempted access: [`Prot::READ`], [`Prot::WRITE`] or both.
    pub access: Prot,
}

/// Where faults go: the event queue of a virtio-iommu, a log, a test.
pub trait FaultSink: Send + Sync {
    /// Records a fault. Must not block: it is called from the data path.
    fn report(&self, fault: Fault);
}
