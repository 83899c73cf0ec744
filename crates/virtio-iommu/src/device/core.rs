//! The device itself: domains, attachments, configuration.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::{Mutex, RwLock};
use ringfence_iommu::{PageSizes, Range, ReservedRegion, Result, SyncToken};

use super::{Backing, Binding, journal::Kept, lazy::Lazy};
use crate::wire::{CONFIG_LEN, Features, IommuConfig};

/// What a device offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The features on offer. [`Features::BYPASS`] is left out: a new device should not offer it
    /// (rule [V1]). [`Features::PROPOSED`] ones are no part of the specification: with them the
    /// device is experimental.
    ///
    /// [V1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v1
    pub features: Features,
    /// Page sizes; the lowest is the granule.
    pub page_sizes: PageSizes,
    /// The addresses that can be mapped.
    pub input_range: Range,
    /// The first and the last domain number.
    pub domain_range: (u32, u32),
    /// The bytes of properties in a PROBE.
    pub probe_size: u32,
    /// The initial value of `bypass`.
    pub bypass: bool,
    /// How many domains may exist at a time.
    pub max_domains: usize,
}

impl Default for DeviceConfig {
    /// All features of the specification but the old BYPASS, 4 KiB to 1 GiB pages, all addresses,
    /// at most 65,536 domains, 512 bytes of properties, no bypass.
    fn default() -> DeviceConfig {
        DeviceConfig {
            features: Features::all().difference(Features::BYPASS | Features::PROPOSED),
            page_sizes: PageSizes::X86,
            input_range: Range::ALL,
            domain_range: (0, u32::MAX),
            probe_size: 512,
            bypass: false,
            max_domains: 1 << 16,
        }
    }
}

/// A virtio-iommu device over the endpoints and domains of a [`Backing`].
///
/// Requests of several queues may be carried out at the same time. ATTACH and DETACH exclude each
/// other; MAP and UNMAP take no lock of the device's but once after each ATTACH or DETACH.
pub struct Device<B: Backing> {
    pub(super) backing: Arc<B>,
    pub(super) options: DeviceConfig,
    pub(super) negotiated: AtomicU64,
    bypass: AtomicBool,
    pub(super) state: RwLock<State<B::Domain>>,
    /// Counts changes of `state`: what a [`Session`] caches of it is valid for one count.
    pub(super) generation: AtomicU64,
    /// The journal, if there ever was one. Locked before `state`.
    pub(super) kept: OnceLock<Mutex<Kept>>,
}

/// Which domains exist and which endpoints are attached to them.
pub(super) struct State<D> {
    pub(super) domains: HashMap<u32, Entry<D>>,
    /// The domain of each attached endpoint.
    pub(super) attached: HashMap<u32, u32>,
}

/// A domain, and what of each member it has to respect.
pub(super) struct Entry<D> {
    pub(super) view: View<Arc<D>>,
    pub(super) members: Vec<(u32, Vec<ReservedRegion>)>,
}

impl<D> Entry<D> {
    /// To be called when the members have changed.
    pub(super) fn gather_reserved(&mut self) {
        let mut reserved: Vec<Range> =
            self.members.iter().flat_map(|(_, regions)| regions).map(|r| r.range).collect();
        reserved.sort_unstable();
        reserved.dedup();
        self.view.reserved = reserved.into();
    }
}

/// What MAP and UNMAP need to know of a domain.
#[derive(Clone)]
pub(super) struct View<T> {
    /// `None`: a bypass domain.
    pub(super) domain: Option<T>,
    /// Of a lazy domain: what waits for its IOTLB_FLUSH.
    pub(super) lazy: Option<Arc<Lazy>>,
    /// Where nothing may be mapped, for the sake of any member.
    pub(super) reserved: Arc<[Range]>,
}

impl<B: Backing> fmt::Debug for Device<B> {
    ringfence_sync::shows!(Device as it, options: it.options);
}

impl<B: Backing> Device<B> {
    /// A device with these `options`. All endpoints are unattached: blocked; or they bypass, if
    /// `bypass` is set, BYPASS_CONFIG is on offer and the backing can.
    pub fn new(backing: Arc<B>, mut options: DeviceConfig) -> Device<B> {
        options.features.remove(Features::BYPASS);
        let device = Device {
            backing,
            bypass: AtomicBool::new(options.bypass),
            options,
            negotiated: AtomicU64::new(0),
            state: RwLock::new(State { domains: HashMap::new(), attached: HashMap::new() }),
            generation: AtomicU64::new(0),
            kept: OnceLock::new(),
        };
        for endpoint in device.backing.endpoints() {
            // Where that cannot be done it reaches what it did before there was a device.
            let _ = device.unbind(endpoint);
        }
        device
    }

    /// What the device maps into.
    pub fn backing(&self) -> &Arc<B> {
        &self.backing
    }

    /// The features on offer (bits of the device type only).
    pub fn features(&self) -> Features {
        self.options.features
    }

    /// Accepts what the driver negotiated; bits that are not on offer are left out, as are those
    /// above the device type's (VIRTIO_F_VERSION_1 and so on).
    pub fn set_features(&self, features: u64) {
        let features = Features::from_bits_truncate(features) & self.options.features;
        if features != self.negotiated() {
            self.beyond_record(false, || self.negotiate(features));
        }
    }

    pub(super) fn negotiated(&self) -> Features {
        Features::from_bits_truncate(self.negotiated.load(Ordering::Relaxed))
    }

    pub(super) fn negotiate(&self, features: Features) {
        self.negotiated.store(features.bits(), Ordering::Relaxed);
    }

    pub(super) fn has(&self, feature: Features) -> bool {
        self.negotiated.load(Ordering::Relaxed) & feature.bits() != 0
    }

    /// The configuration space as it is now.
    pub fn config(&self) -> [u8; CONFIG_LEN] {
        self.configuration().emit()
    }

    fn configuration(&self) -> IommuConfig {
        IommuConfig {
            page_sizes: self.options.page_sizes,
            input_range: self.options.input_range,
            domain_range: self.options.domain_range,
            probe_size: self.options.probe_size,
            bypass: self.bypasses(),
        }
    }

    /// Reads configuration bytes from `offset`; zeroes beyond the end.
    pub fn read_config(&self, offset: usize, out: &mut [u8]) {
        self.configuration().read(offset, out);
    }

    /// A driver's write to the configuration: only `bypass` changes, and only if BYPASS_CONFIG was
    /// negotiated and the value is 0 or 1. Endpoints that are attached to nothing have the new
    /// binding when it returns (one that cannot bypass is blocked); what was cached of the old is
    /// used at most until the next quiet point of its user.
    ///
    /// # Errors
    /// An endpoint could not be blocked, or an invalidation could not be begun: old translations
    /// may stay in use; the device needs a reset (rule [V30]).
    ///
    /// [V30]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v30
    pub fn write_config(&self, offset: usize, data: &[u8]) -> Result<()> {
        match IommuConfig::bypass_written(offset, data) {
            Some(bypass) if self.has(Features::BYPASS_CONFIG) => match bypass == self.bypasses() {
                true => self.put_bypass(bypass),
                false => self.beyond_record(false, || self.put_bypass(bypass)),
            },
            _ => Ok(()),
        }
    }

    pub(super) fn bypasses(&self) -> bool {
        self.bypass.load(Ordering::Relaxed)
    }

    pub(super) fn put_bypass(&self, bypass: bool) -> Result<()> {
        let state = self.state.write();
        self.bypass.store(bypass, Ordering::Relaxed);
        // Also if it is what it was: a change before may have failed.
        self.unbind_all(&state)
    }

    /// Puts all endpoints where they go that are attached to nothing.
    fn unbind_all(&self, state: &State<B::Domain>) -> Result<()> {
        let mut result = Ok(());
        for endpoint in self.backing.endpoints() {
            if !state.attached.contains_key(&endpoint) {
                let unbound = self.unbind(endpoint);
                let begun = self.backing.sync_binding_begin(endpoint).map(|_| ());
                result = result.and(unbound).and(begun);
            }
        }
        result
    }

    /// Puts an endpoint where it goes that is attached to nothing: nowhere, if it should bypass
    /// and cannot.
    pub(super) fn unbind(&self, endpoint: u32) -> Result<()> {
        let to = self.unattached();
        if matches!(to, Binding::Bypass) && self.backing.set_domain(endpoint, to).is_ok() {
            return Ok(());
        }
        self.backing.set_domain(endpoint, Binding::Blocked)
    }

    /// The backing knows a new endpoint: it is attached to nothing (rules [V5], [V6]).
    ///
    /// # Errors
    /// It cannot be bound: what it reaches depends on the backing.
    ///
    /// [V5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v5
    /// [V6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v6
    pub fn endpoint_added(&self, endpoint: u32) -> Result<()> {
        let state = self.state.write();
        if state.attached.contains_key(&endpoint) {
            return Ok(());
        }
        self.unbind(endpoint)
    }

    /// An endpoint is gone, and the backing does not [know](Backing::endpoint) it any more: it is
    /// detached, and its domain is removed if it was the last (rule [V14]). It may reach its old
    /// targets until [`Backing::sync_binding_poll`] returns true for the token.
    ///
    /// # Errors
    /// It is detached, but old translations may stay in use.
    ///
    /// [V14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v14
    pub fn endpoint_removed(&self, endpoint: u32) -> Result<SyncToken> {
        self.beyond_record(false, || self.remove(endpoint))
    }

    fn remove(&self, endpoint: u32) -> Result<SyncToken> {
        let mut state = self.state.write();
        // Threads that still translate in the domain have references of their own.
        let mut orphans = Vec::new();
        if let Some(id) = state.attached.remove(&endpoint) {
            state.leave(id, endpoint, &mut orphans);
            // Ordering: see `Device::find`.
            self.generation.fetch_add(1, Ordering::Release);
        }
        self.backing.set_domain(endpoint, Binding::Blocked)?;
        self.backing.sync_binding_begin(endpoint)
    }

    /// Where an endpoint goes that is attached to nothing (rules [V5], [V6]): what is *offered*
    /// counts.
    ///
    /// [V5]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v5
    /// [V6]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v6
    pub(super) fn unattached(&self) -> Binding<Arc<B::Domain>> {
        let offered = self.options.features.contains(Features::BYPASS_CONFIG);
        if offered && self.bypasses() { Binding::Bypass } else { Binding::Blocked }
    }

    /// Device reset: no endpoint is attached, no domain exists, nothing is negotiated; `bypass`
    /// stays (rules [V3], [V4]). Request queues must have been stopped.
    ///
    /// # Errors
    /// An endpoint could not be blocked, or an invalidation could not be begun: old translations
    /// may stay in use.
    ///
    /// [V3]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v3
    /// [V4]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v4
    pub fn reset(&self) -> Result<()> {
        self.beyond_record(true, || self.clear())
    }

    /// As [`reset`](Self::reset), without a new snapshot in the journal.
    pub(super) fn clear(&self) -> Result<()> {
        let mut state = self.state.write();
        self.negotiated.store(0, Ordering::Relaxed);
        state.attached.clear();
        state.domains.clear();
        // Ordering: see `Device::find`.
        self.generation.fetch_add(1, Ordering::Release);
        // Those too that were not attached: where a reset has failed they may be anywhere.
        self.unbind_all(&state)
    }

    /// System reset: `bypass` has its initial value again, and all that [`reset`](Self::reset)
    /// does.
    ///
    /// # Errors
    /// As [`reset`](Self::reset).
    pub fn system_reset(&self) -> Result<()> {
        self.beyond_record(true, || {
            let bypass = self.put_bypass(self.options.bypass);
            self.clear().and(bypass)
        })
    }

    /// How many domains exist.
    pub fn domains(&self) -> usize {
        self.state.read().domains.len()
    }
}
