//! A device as the IOMMU sees it.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use ringfence_iommu::{
    Fault, FaultSink, GuestPhys, Range, SoftDomain,
    shootdown::{Scope, Shootdown},
};
use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::Mutex,
    mutant,
};

use crate::Iotlb;

/// Where an endpoint's accesses go.
#[derive(Clone, Debug, Default)]
pub enum Binding {
    /// Nowhere: every access faults (rule [V6]).
    ///
    /// [V6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v6
    #[default]
    Blocked,
    /// To guest-physical memory as they are (rule [V5]).
    ///
    /// [V5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v5
    Bypass,
    /// Through the table of a domain.
    Domain(Arc<SoftDomain<GuestPhys>>),
    /// Through an IOTLB, which sends misses for what it does not hold.
    Iotlb(Arc<Iotlb>),
}

impl Binding {
    /// The IOTLB, if it is one.
    pub(crate) fn iotlb(&self) -> Option<&Arc<Iotlb>> {
        match self {
            Binding::Iotlb(iotlb) => Some(iotlb),
            _ => None,
        }
    }

    /// The scope in which an endpoint with this binding translates.
    pub(crate) fn scope(&self) -> Scope {
        match self {
            Binding::Blocked | Binding::Bypass => Scope::NONE,
            Binding::Domain(domain) => domain.scope(),
            Binding::Iotlb(iotlb) => iotlb.scope(),
        }
    }
}

/// A device as the IOMMU sees it, shared by the IOMMU that binds it and the views of its workers.
pub struct Endpoint {
    id: u32,
    shootdown: Arc<Shootdown>,
    binding: Mutex<Binding>,
    /// Counts the changes of the binding, so that a view sees with one load that there was none.
    changes: AtomicU64,
    faults: OnceLock<Arc<dyn FaultSink>>,
}

impl fmt::Debug for Endpoint {
    ringfence_sync::shows!(Endpoint as it, id: it.id, binding: it.binding());
}

impl Endpoint {
    /// An endpoint with this ID, bound to `binding`, whose views belong to `shootdown`.
    pub fn new(id: u32, shootdown: Arc<Shootdown>, binding: Binding) -> Arc<Endpoint> {
        Arc::new(Endpoint {
            id,
            shootdown,
            binding: Mutex::new(binding),
            changes: AtomicU64::new(0),
            faults: OnceLock::new(),
        })
    }

    /// The ID by which the IOMMU's driver names it.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The process's shootdown.
    pub fn shootdown(&self) -> &Arc<Shootdown> {
        &self.shootdown
    }

    /// Where its accesses go now.
    pub fn binding(&self) -> Binding {
        self.binding.lock().clone()
    }

    /// Changes the binding. The change has reached every view, and no in-flight I/O uses the old
    /// binding, once [`Shootdown::is_over`] returns true for the token returned (rule [V14]).
    ///
    /// [V14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v14
    // Ordering: the lock orders the binding, and the grace period has a view look at the count that has
    // not seen it change.
    pub fn bind(&self, to: Binding) -> u64 {
        let old = {
            let mut binding = self.binding.lock();
            let old = std::mem::replace(&mut *binding, to);
            if !mutant!("a change is counted after its grace period begins") {
                self.changes.fetch_add(1, Ordering::Release);
            }
            old
        };
        let token = self.shootdown.begin(&[Range::ALL]);
        if mutant!("a change is counted after its grace period begins") {
            self.changes.fetch_add(1, Ordering::Release);
        }
        // Views hold their own reference to the old domain until they have seen the change.
        drop(old);
        token
    }

    /// Where faults of this endpoint are reported; the first call decides.
    pub fn report_to(&self, faults: Arc<dyn FaultSink>) {
        let _ = self.faults.set(faults);
    }

    pub(crate) fn report(&self, fault: Fault) {
        if let Some(faults) = self.faults.get() {
            faults.report(fault);
        }
    }

    // Ordering: see `bind`.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ringfence_iommu::{FaultReason, Iova, Prot};

    struct Names(&'static str, Mutex<Vec<&'static str>>);

    impl FaultSink for Names {
        fn report(&self, _: Fault) {
            self.1.lock().push(self.0);
        }
    }

    #[test]
    fn the_first_place_for_faults_stays() {
        let endpoint = Endpoint::new(5, Shootdown::new(1), Binding::Blocked);
        let (reason, iova, access) = (FaultReason::Mapping, Iova(0), Prot::READ);
        let fault = Fault { reason, endpoint: 5, iova, access };
        // No sink is set yet.
        endpoint.report(fault);
        let [first, second] =
            ["first", "second"].map(|name| Arc::new(Names(name, Mutex::default())));
        endpoint.report_to(Arc::clone(&first) as _);
        endpoint.report_to(Arc::clone(&second) as _);
        endpoint.report(fault);
        assert_eq!(*first.1.lock(), ["first"]);
        assert!(second.1.lock().is_empty());
    }

    #[test]
    fn a_binding_without_views_is_in_force_at_once() {
        let shootdown = Shootdown::new(1);
        let endpoint = Endpoint::new(5, Arc::clone(&shootdown), Binding::default());
        assert!(matches!(endpoint.binding(), Binding::Blocked));
        let before = endpoint.changes();
        let token = endpoint.bind(Binding::Bypass);
        assert!(shootdown.is_over(token));
        assert!(matches!(endpoint.binding(), Binding::Bypass));
        assert_ne!(endpoint.changes(), before);
    }
}
