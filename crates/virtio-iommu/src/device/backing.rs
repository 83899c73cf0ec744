//! What a device maps into: the part that the program around a device provides.

use std::sync::Arc;

use ringfence_iommu::{Domain, GuestPhys, ReservedKind, ReservedRegion, Result, SyncToken};

/// What accesses of an endpoint go through; `T` holds a domain, such as an `Arc`.
#[derive(Clone, Debug)]
pub enum Binding<T> {
    /// Nowhere: every access is refused.
    Blocked,
    /// Straight to guest memory: addresses are guest-physical and all accesses are allowed.
    Bypass,
    /// Through a domain.
    Domain(T),
}

/// What the device knows of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Regions that are not for mapping: PROBE reports them, and MAP there is refused. They must
    /// not overlap, and at most one is for MSI (rule [V27]).
    ///
    /// [V27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v27
    pub reserved: Vec<ReservedRegion>,
}

impl EndpointInfo {
    /// Whether PROBE can report the regions: none overlaps another, at most one is for MSI.
    pub fn is_consistent(&self) -> bool {
        let msis = self.reserved.iter().filter(|region| region.kind == ReservedKind::Msi).count();
        let mut ranges: Vec<_> = self.reserved.iter().map(|region| region.range).collect();
        ranges.sort_unstable();
        msis <= 1 && ranges.windows(2).all(|pair| !pair[0].overlaps(pair[1]))
    }
}

/// The endpoints behind a device, and the domains they are put into.
///
/// Methods are called from the threads that serve request queues and must not block for long.
pub trait Backing: Send + Sync {
    /// What MAP and UNMAP go to.
    type Domain: Domain<Target = GuestPhys>;

    /// The endpoint `id`, if there is one.
    fn endpoint(&self, id: u32) -> Option<EndpointInfo>;

    /// All endpoints: those that are attached to nothing change their binding when `bypass` does.
    fn endpoints(&self) -> Vec<u32>;

    /// A new, empty domain.
    ///
    /// # Errors
    /// The ATTACH that needed it is completed with UNSUPP for
    /// [`Unsupported`](ringfence_iommu::Error::Unsupported), and otherwise with NOMEM.
    fn create_domain(&self) -> Result<Arc<Self::Domain>>;

    /// Puts an endpoint somewhere else. When it returns, lookups that begin use the new binding;
    /// those that began before, and what they cached, are dealt with by
    /// [`sync_binding_begin`](Self::sync_binding_begin). The backing ignores an unknown endpoint.
    ///
    /// # Errors
    /// It cannot go there, and is where it was. An ATTACH is completed with NOMEM for
    /// [`NoMemory`](ringfence_iommu::Error::NoMemory) and [`Full`](ringfence_iommu::Error::Full),
    /// with DEVERR for [`Gone`](ringfence_iommu::Error::Gone), and otherwise with UNSUPP (rules
    /// [V11], [V12]); a DETACH, for which even [`Binding::Blocked`] fails, with DEVERR.
    ///
    /// [V11]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v11
    /// [V12]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v12
    fn set_domain(&self, endpoint: u32, to: Binding<Arc<Self::Domain>>) -> Result<()>;

    /// Starts to invalidate what was cached of the binding that `endpoint` had before; returns the
    /// token to poll, [`SyncToken::DONE`] if it is over already. The default is for backings whose
    /// [`set_domain`](Self::set_domain) does it all.
    ///
    /// # Errors
    /// Old translations may still be in use.
    fn sync_binding_begin(&self, endpoint: u32) -> Result<SyncToken> {
        let _ = endpoint;
        Ok(SyncToken::DONE)
    }

    /// Whether the invalidation that `token` stands for is over.
    ///
    /// # Errors
    /// As [`sync_binding_begin`](Self::sync_binding_begin); the token is not polled again.
    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        let _ = token;
        Ok(true)
    }
}
