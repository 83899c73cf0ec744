//! The endpoints behind the IOMMU, and the domains they are put into.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;
use ringfence_iommu::{
    FaultSink, Geometry, GuestPhys, Result, SoftDomain, SyncToken, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iotlb::{self as iotlb, Endpoint};
use ringfence_virtio_iommu::device::{Backing, Binding, EndpointInfo};

/// The endpoints behind one virtio-iommu, whose domains are tables in this process.
pub struct Endpoints {
    endpoints: BTreeMap<u32, Arc<Endpoint>>,
    shootdown: Arc<Shootdown>,
    geometry: Geometry,
    limits: Limits,
    /// The invalidation that each endpoint's last change of binding began.
    changes: Mutex<HashMap<u32, u64>>,
}

impl Endpoints {
    /// Endpoints whose views all belong to `shootdown`. Each domain maps what `geometry` says and
    /// holds no more than `limits`.
    pub fn new(
        endpoints: impl IntoIterator<Item = Arc<Endpoint>>,
        shootdown: Arc<Shootdown>,
        geometry: Geometry,
        limits: Limits,
    ) -> Endpoints {
        let endpoints = endpoints.into_iter().map(|endpoint| (endpoint.id(), endpoint)).collect();
        Endpoints { endpoints, shootdown, geometry, limits, changes: Mutex::default() }
    }

    /// Whether every change of binding so far has reached all who translate, and no I/O under way
    /// uses an older one.
    pub fn is_settled(&self) -> bool {
        self.changes.lock().values().all(|&token| self.shootdown.is_over(token))
    }

    /// Has all endpoints report their faults to `faults`.
    pub fn report_to(&self, faults: &Arc<dyn FaultSink>) {
        self.endpoints.values().for_each(|endpoint| endpoint.report_to(Arc::clone(faults)));
    }
}

impl Backing for Endpoints {
    type Domain = SoftDomain<GuestPhys>;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        let reserved = self.geometry.reserved.to_vec();
        self.endpoints.contains_key(&id).then_some(EndpointInfo { reserved })
    }

    fn endpoints(&self) -> Vec<u32> {
        self.endpoints.keys().copied().collect()
    }

    fn create_domain(&self) -> Result<Arc<Self::Domain>> {
        Ok(SoftDomain::new(self.geometry.clone(), self.limits, Arc::clone(&self.shootdown)))
    }

    fn set_domain(&self, endpoint: u32, to: Binding<Self::Domain>) {
        let Some(known) = self.endpoints.get(&endpoint) else { return };
        let token = known.bind(match to {
            Binding::Blocked => iotlb::Binding::Blocked,
            Binding::Bypass => iotlb::Binding::Bypass,
            Binding::Domain(domain) => iotlb::Binding::Domain(domain),
        });
        self.changes.lock().insert(endpoint, token);
    }

    fn sync_binding_begin(&self, endpoint: u32) -> Result<SyncToken> {
        let token = self.changes.lock().get(&endpoint).copied();
        Ok(token.map_or(SyncToken::DONE, SyncToken))
    }

    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        Ok(token == SyncToken::DONE || self.shootdown.is_over(token.0))
    }
}
