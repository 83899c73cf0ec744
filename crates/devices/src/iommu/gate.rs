//! The gate between the virtio-iommu and the endpoints: whether there is a front end, and which
//! endpoints may never bypass.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use ringfence_iommu::{Error, FaultSink, Result, SyncToken};
use ringfence_virtio_iommu::device::{Backing, Binding, EndpointInfo};

use super::{Endpoints, JointDomain};

/// A [`Backing`] over [`Endpoints`]. While it is shut, as without a front end, all endpoints are
/// blocked, whatever the device requests.
pub(super) struct Gate {
    endpoints: Arc<Endpoints>,
    /// Endpoints that are blocked when others bypass.
    untrusted: BTreeSet<u32>,
    wanted: Mutex<WantedBindings>,
    /// For the figures.
    domains: Mutex<Vec<Weak<JointDomain>>>,
}

/// Where the device wants the endpoints.
#[derive(Default)]
struct WantedBindings {
    open: bool,
    bindings: BTreeMap<u32, Binding<JointDomain>>,
}

impl Gate {
    /// A gate, shut.
    pub(super) fn new(endpoints: Arc<Endpoints>, untrusted: BTreeSet<u32>) -> Gate {
        let (wanted, domains) = (Mutex::default(), Mutex::default());
        Gate { endpoints, untrusted, wanted, domains }
    }

    /// Puts every endpoint where the device wants it, now and from now on.
    ///
    /// # Errors
    /// One cannot go there, and is blocked.
    pub(super) fn open(&self) -> Result<()> {
        let mut wanted = self.wanted.lock();
        wanted.open = true;
        let bind = |(&endpoint, to): (&u32, &Binding<JointDomain>)| {
            let bound = self.endpoints.set_domain(endpoint, to.clone());
            bound.or_else(|why| {
                self.endpoints.set_domain(endpoint, Binding::Blocked)?;
                Err(why)
            })
        };
        wanted.bindings.iter().map(bind).fold(Ok(()), Result::and)
    }

    /// Blocks every endpoint until the gate is open again. Earlier translations may be in use until
    /// [`is_settled`](Self::is_settled) returns true.
    ///
    /// # Errors
    /// One cannot be blocked.
    pub(super) fn shut(&self) -> Result<()> {
        let mut wanted = self.wanted.lock();
        wanted.open = false;
        let block = |&endpoint| self.endpoints.set_domain(endpoint, Binding::Blocked);
        wanted.bindings.keys().map(block).fold(Ok(()), Result::and)
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
            let table = domain.primary();
            (mappings + table.mappings(), bytes + table.table_bytes())
        })
    }
}

impl Backing for Gate {
    type Domain = JointDomain;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        self.endpoints.endpoint(id)
    }

    fn endpoints(&self) -> Vec<u32> {
        self.endpoints.endpoints()
    }

    fn create_domain(&self) -> Result<Arc<JointDomain>> {
        let made = self.endpoints.create_domain()?;
        let mut domains = self.domains.lock();
        // Not each time: there may be very many. Then there is room for as many more.
        if domains.len() == domains.capacity() {
            domains.retain(|domain| domain.strong_count() > 0);
            let more = domains.len();
            domains.reserve(more);
        }
        domains.push(Arc::downgrade(&made));
        Ok(made)
    }

    fn set_domain(&self, endpoint: u32, to: Binding<JointDomain>) -> Result<()> {
        if matches!(to, Binding::Bypass) && self.untrusted.contains(&endpoint) {
            return Err(Error::Unsupported("an untrusted endpoint never bypasses"));
        }
        let mut wanted = self.wanted.lock();
        if wanted.open {
            self.endpoints.set_domain(endpoint, to.clone())?;
        }
        wanted.bindings.insert(endpoint, to);
        Ok(())
    }

    fn sync_binding_begin(&self, endpoint: u32) -> Result<SyncToken> {
        self.endpoints.sync_binding_begin(endpoint)
    }

    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        self.endpoints.sync_binding_poll(token)
    }
}
