//! The endpoints behind the IOMMU, and the domains they are put into.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::{
    Error, FaultSink, Geometry, GuestPhys, ReservedRegion, Result, SoftDomain, SyncToken,
    shootdown::Shootdown,
    table::{Budget, Limits},
};
use ringfence_iotlb::{self as iotlb, Endpoint};
use ringfence_virtio_iommu::device::{Backing, Binding, EndpointInfo, Joint, Mirror, Outside};

/// What the endpoints of a virtio-iommu are put into: a table of this process, repeated where a real
/// IOMMU translates.
pub type JointDomain = Joint<SoftDomain<GuestPhys>>;

/// The endpoints behind one virtio-iommu, which may come and go. Those of this process translate in the
/// domains' own tables; those behind a real IOMMU have them repeated there.
///
/// After adding or removing one while the device exists, call
/// [`endpoint_added`](ringfence_virtio_iommu::device::Device::endpoint_added) or
/// [`endpoint_removed`](ringfence_virtio_iommu::device::Device::endpoint_removed) of the device.
pub struct Endpoints {
    slots: Mutex<BTreeMap<u32, Slot>>,
    /// Whether endpoints are where the device wants them, rather than blocked. Held while one is bound.
    open: Mutex<bool>,
    shootdown: Arc<Shootdown>,
    geometry: Geometry,
    budget: Arc<Budget>,
    faults: Mutex<Option<Arc<dyn FaultSink>>>,
}

/// An endpoint.
struct Slot {
    translator: Translator,
    reserved: Vec<ReservedRegion>,
    /// Where the device wants it, once it wants it anywhere.
    wanted: Option<Binding<Arc<JointDomain>>>,
    /// The invalidation that its last change of binding began.
    change: SyncToken,
    presence: Presence,
    may_bypass: bool,
}

/// Whether an endpoint is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    There,
    /// No request finds it any more.
    Leaving,
    /// And it reaches nothing once its last change of binding is over.
    Left,
}

/// Where an endpoint's addresses are translated: in this process, or by a real IOMMU.
#[derive(Clone)]
enum Translator {
    Here(Arc<Endpoint>),
    Outside(Arc<Outside<SoftDomain<GuestPhys>>>),
}

impl Endpoints {
    /// Endpoints with views that all belong to `shootdown`. Each domain has this `geometry`, its
    /// reserved regions apply to every endpoint, and all domains together hold no more than
    /// `limits`.
    pub fn new(
        endpoints: impl IntoIterator<Item = Arc<Endpoint>>,
        shootdown: Arc<Shootdown>,
        geometry: Geometry,
        limits: Limits,
    ) -> Endpoints {
        let slot = |endpoint: Arc<Endpoint>| {
            let reserved = geometry.reserved.to_vec();
            (endpoint.id(), Slot::new(Translator::Here(endpoint), reserved))
        };
        Endpoints {
            slots: Mutex::new(endpoints.into_iter().map(slot).collect()),
            open: Mutex::new(true),
            shootdown,
            budget: Budget::new(limits),
            geometry,
            faults: Mutex::default(),
        }
    }

    /// Adds an endpoint of this process, with reserved regions of its own besides those of all.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: there is one with its number already, or one that was removed and is
    /// not detached yet; or PROBE could not report the regions: two overlap, or are for MSIs (rule
    /// [V27]).
    ///
    /// [V27]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v27
    pub fn add(&self, endpoint: Arc<Endpoint>, reserved: &[ReservedRegion]) -> Result<()> {
        self.insert(endpoint.id(), Translator::Here(endpoint), reserved)
    }

    /// Adds the endpoint `id`, for DMA that a real IOMMU translates. What cannot be mapped in that
    /// IOMMU is reserved, besides regions of its own and those of all.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn add_outside(
        &self,
        id: u32,
        mirror: Arc<Mirror>,
        reserved: &[ReservedRegion],
    ) -> Result<()> {
        let mut own = mirror.reserved();
        own.extend_from_slice(reserved);
        self.insert(id, Translator::Outside(Arc::new(Outside::new(mirror))), &own)
    }

    fn insert(&self, id: u32, translator: Translator, own: &[ReservedRegion]) -> Result<()> {
        let mut reserved = self.geometry.reserved.to_vec();
        for region in own {
            if !reserved.contains(region) {
                reserved.push(*region);
            }
        }
        if !(EndpointInfo { reserved: reserved.clone() }).is_consistent() {
            return Err(Error::Unsupported("reserved regions that overlap, or two for MSIs"));
        }
        let mut slots = self.slots.lock();
        slots.retain(|_, slot| slot.presence != Presence::Left || !self.is_over(slot.change));
        if slots.contains_key(&id) {
            return Err(Error::Unsupported("the endpoint exists already"));
        }
        if let (Translator::Here(endpoint), Some(faults)) = (&translator, &*self.faults.lock()) {
            endpoint.report_to(Arc::clone(faults));
        }
        slots.insert(id, Slot::new(translator, reserved));
        Ok(())
    }

    /// Removes an endpoint: no request finds it any more. Returns whether there was one. It reaches
    /// what it did until `endpoint_removed` is called.
    pub fn remove(&self, id: u32) -> bool {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(&id).filter(|slot| slot.is_there());
        slot.map(|slot| slot.presence = Presence::Leaving).is_some()
    }

    /// Forbids an endpoint to bypass: its attachment to a bypass domain is refused with UNSUPP, and
    /// it reaches nothing while it is attached to no domain (rule [V6]). For devices that are not
    /// trusted; to be called before the device exists, or before `endpoint_added`. Returns whether
    /// there is such an endpoint.
    ///
    /// [V6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v6
    pub fn forbid_bypass(&self, id: u32) -> bool {
        let mut slots = self.slots.lock();
        slots.get_mut(&id).map(|slot| slot.may_bypass = false).is_some()
    }

    /// What all domains together hold.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Whether every change of binding so far has reached all views, and no I/O under way uses an
    /// older one.
    pub fn is_settled(&self) -> bool {
        self.slots.lock().values().all(|slot| self.is_over(slot.change))
    }

    /// Makes all endpoints, later ones too, report their faults to `faults`.
    pub(super) fn report_to(&self, faults: Arc<dyn FaultSink>) {
        let slots = self.slots.lock();
        for slot in slots.values() {
            if let Translator::Here(endpoint) = &slot.translator {
                endpoint.report_to(Arc::clone(&faults));
            }
        }
        *self.faults.lock() = Some(faults);
    }

    /// Puts every endpoint where the device wants it, now and from now on. So it is at first.
    ///
    /// # Errors
    /// One cannot go there, and is blocked.
    pub(super) fn open(&self) -> Result<()> {
        let mut open = self.open.lock();
        *open = true;
        let bind = |(endpoint, to)| {
            self.bind(endpoint, to).or_else(|why| {
                self.bind(endpoint, Binding::Blocked)?;
                Err(why)
            })
        };
        self.wanted().into_iter().map(bind).fold(Ok(()), Result::and)
    }

    /// Blocks every endpoint until they are [open](Self::open) again, whatever the device requests.
    /// Earlier translations may be in use until [`is_settled`](Self::is_settled) returns true.
    ///
    /// # Errors
    /// One cannot be blocked.
    pub(super) fn shut(&self) -> Result<()> {
        let mut open = self.open.lock();
        *open = false;
        let block = |(endpoint, _)| self.bind(endpoint, Binding::Blocked);
        self.wanted().into_iter().map(block).fold(Ok(()), Result::and)
    }

    /// Where the device wants endpoints.
    fn wanted(&self) -> Vec<(u32, Binding<Arc<JointDomain>>)> {
        let slots = self.slots.lock();
        slots.iter().filter_map(|(&id, slot)| Some((id, slot.wanted.clone()?))).collect()
    }

    /// How many mappings the domains hold that endpoints are in.
    pub(super) fn mappings(&self) -> u64 {
        let domains = self.wanted().into_iter().filter_map(|(_, to)| match to {
            Binding::Domain(domain) => Some((Arc::as_ptr(&domain), domain)),
            _ => None,
        });
        let once: BTreeMap<_, _> = domains.collect();
        once.values().map(|domain| domain.primary().mappings()).sum()
    }

    fn bind(&self, endpoint: u32, to: Binding<Arc<JointDomain>>) -> Result<()> {
        // Not under the lock: it may take long.
        let translator = self.slots.lock().get(&endpoint).map(|slot| slot.translator.clone());
        let change = match translator {
            None => return Ok(()),
            Some(Translator::Here(known)) => SyncToken::new(known.bind(match to {
                Binding::Blocked => iotlb::Binding::Blocked,
                Binding::Bypass => iotlb::Binding::Bypass,
                Binding::Domain(domain) => iotlb::Binding::Domain(Arc::clone(domain.primary())),
            })),
            Some(Translator::Outside(known)) => {
                known.bind(to)?;
                SyncToken::DONE
            }
        };
        if let Some(slot) = self.slots.lock().get_mut(&endpoint) {
            slot.change = change;
        }
        Ok(())
    }

    fn is_over(&self, change: SyncToken) -> bool {
        change == SyncToken::DONE || self.shootdown.is_over(change.as_u64())
    }
}

impl Slot {
    fn new(translator: Translator, reserved: Vec<ReservedRegion>) -> Slot {
        let (change, presence) = (SyncToken::DONE, Presence::There);
        Slot { translator, reserved, wanted: None, change, presence, may_bypass: true }
    }

    fn is_there(&self) -> bool {
        self.presence == Presence::There
    }
}

impl Backing for Endpoints {
    type Domain = JointDomain;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        let slots = self.slots.lock();
        let slot = slots.get(&id).filter(|slot| slot.is_there())?;
        Some(EndpointInfo { reserved: slot.reserved.clone() })
    }

    fn endpoints(&self) -> Vec<u32> {
        let slots = self.slots.lock();
        slots.iter().filter(|(_, slot)| slot.is_there()).map(|(&id, _)| id).collect()
    }

    fn create_domain(&self) -> Result<Arc<JointDomain>> {
        let (geometry, shootdown) = (self.geometry.clone(), Arc::clone(&self.shootdown));
        Ok(Joint::new(SoftDomain::within(geometry, Arc::clone(&self.budget), shootdown)))
    }

    fn set_domain(&self, endpoint: u32, to: Binding<Arc<JointDomain>>) -> Result<()> {
        let open = self.open.lock();
        let known = self.slots.lock().get(&endpoint).map(|slot| slot.may_bypass);
        let Some(may_bypass) = known else { return Ok(()) };
        if matches!(to, Binding::Bypass) && !may_bypass {
            return Err(Error::Unsupported("the endpoint may not bypass"));
        }
        // Blocked again, where it is to be: one that leaves must reach nothing, whatever became of
        // an earlier attempt.
        if *open || matches!(to, Binding::Blocked) {
            self.bind(endpoint, to.clone())?;
        }
        if let Some(slot) = self.slots.lock().get_mut(&endpoint) {
            if matches!(to, Binding::Blocked) && !slot.is_there() {
                slot.presence = Presence::Left;
            }
            slot.wanted = Some(to);
        }
        Ok(())
    }

    fn sync_binding_begin(&self, endpoint: u32) -> Result<SyncToken> {
        Ok(self.slots.lock().get(&endpoint).map_or(SyncToken::DONE, |slot| slot.change))
    }

    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        Ok(self.is_over(token))
    }
}
