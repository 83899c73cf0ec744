//! What stands between the virtio-iommu and the endpoints: whether it is there at all, and which of
//! them may never go past it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use ringfence_iommu::{FaultSink, GuestPhys, Result, SoftDomain, SyncToken};
use ringfence_virtio_iommu::device::{Backing, Binding, EndpointInfo};

use super::Endpoints;

type Domain = SoftDomain<GuestPhys>;

/// A [`Backing`] over [`Endpoints`]. While it is shut, as when nobody is there who could say what
/// endpoints may reach, all of them are blocked, whatever the device says.
pub(super) struct Gate {
    endpoints: Arc<Endpoints>,
    /// Endpoints that are blocked where others bypass.
    untrusted: BTreeSet<u32>,
    wanted: Mutex<Wanted>,
    /// For the figures.
    domains: Mutex<Vec<Weak<Domain>>>,
}

/// Where the device wants the endpoints.
#[derive(Default)]
struct Wanted {
    open: bool,
    bindings: BTreeMap<u32, Binding<Domain>>,
}

impl Gate {
    /// A gate, shut.
    pub(super) fn new(endpoints: Arc<Endpoints>, untrusted: BTreeSet<u32>) -> Gate {
        let (wanted, domains) = (Mutex::default(), Mutex::default());
        Gate { endpoints, untrusted, wanted, domains }
    }

    /// Puts every endpoint where the device wants it, now and from now on.
    pub(super) fn open(&self) {
        let mut wanted = self.wanted.lock();
        wanted.open = true;
        for (&endpoint, binding) in &wanted.bindings {
            self.bind(endpoint, binding.clone());
        }
    }

    /// Blocks every endpoint until the gate is open again. What was translated before is in use
    /// until [`is_settled`](Self::is_settled) says otherwise.
    pub(super) fn shut(&self) {
        let mut wanted = self.wanted.lock();
        wanted.open = false;
        for &endpoint in wanted.bindings.keys() {
            self.bind(endpoint, Binding::Blocked);
        }
    }

    /// See [`Endpoints::is_settled`].
    pub(super) fn is_settled(&self) -> bool {
        self.endpoints.is_settled()
    }

    /// See [`Endpoints::report_to`].
    pub(super) fn report_to(&self, faults: &Arc<dyn FaultSink>) {
        self.endpoints.report_to(faults);
    }

    /// What all domains hold: mappings, and bytes of their tables.
    pub(super) fn held(&self) -> (u64, u64) {
        let domains = self.domains.lock();
        let domains = domains.iter().filter_map(Weak::upgrade);
        domains.fold((0, 0), |(mappings, bytes), domain| {
            (mappings + domain.mappings(), bytes + domain.table_bytes())
        })
    }

    fn bind(&self, endpoint: u32, to: Binding<Domain>) {
        let to = match to {
            Binding::Bypass if self.untrusted.contains(&endpoint) => Binding::Blocked,
            to => to,
        };
        self.endpoints.set_domain(endpoint, to);
    }
}

impl Backing for Gate {
    type Domain = Domain;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        self.endpoints.endpoint(id)
    }

    fn endpoints(&self) -> Vec<u32> {
        self.endpoints.endpoints()
    }

    fn create_domain(&self) -> Result<Arc<Domain>> {
        let made = self.endpoints.create_domain()?;
        let mut domains = self.domains.lock();
        domains.retain(|domain| domain.strong_count() > 0);
        domains.push(Arc::downgrade(&made));
        Ok(made)
    }

    fn set_domain(&self, endpoint: u32, to: Binding<Domain>) {
        let mut wanted = self.wanted.lock();
        wanted.bindings.insert(endpoint, to.clone());
        if wanted.open {
            self.bind(endpoint, to);
        }
    }

    fn sync_binding_begin(&self, endpoint: u32) -> Result<SyncToken> {
        self.endpoints.sync_binding_begin(endpoint)
    }

    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        self.endpoints.sync_binding_poll(token)
    }
}
