//! The device itself: domains, attachments, configuration, and what each request does to them.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;
use ringfence_iommu::{
    Domain, Error, Gather, GuestPhys, Iova, PageSizes, Range, ReservedRegion, Result, SyncToken,
};

use super::{Backing, Binding, EndpointInfo};
use crate::wire::{
    AttachFlags, CONFIG_LEN, Config, Features, Kind, MapFlags, ParseError, Property, Request,
    Status, TAIL_LEN, emit_tail, write_properties,
};

/// How many addresses are tried, when an endpoint joins a domain in use, to see whether something
/// is mapped in one of its reserved regions; a region with more granules counts as in use.
const PROBED_GRANULES: u64 = 1 << 14;

/// What a device offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The features on offer. [`Features::BYPASS`] is left out: a new device should not offer it
    /// (rule V1).
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

impl Default for Options {
    /// All features but the old BYPASS, 4 KiB to 1 GiB pages, all addresses, 65,536 domains, 512
    /// bytes of properties, no bypass.
    fn default() -> Options {
        Options {
            features: Features::all().difference(Features::BYPASS),
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
    backing: B,
    options: Options,
    negotiated: AtomicU64,
    bypass: AtomicBool,
    state: RwLock<State<B::Domain>>,
    /// Counts changes of `state`: what a [`Session`] remembers of it is good for one number.
    generation: AtomicU64,
}

/// Which domains exist and who is attached to them.
struct State<D> {
    domains: HashMap<u32, Entry<D>>,
    /// The domain of each attached endpoint.
    attached: HashMap<u32, u32>,
}

/// A domain, and what of each member it has to respect.
struct Entry<D> {
    view: View<D>,
    members: Vec<(u32, Vec<ReservedRegion>)>,
}

impl<D> Entry<D> {
    /// To be called when the members have changed.
    fn gather_reserved(&mut self) {
        let mut reserved: Vec<Range> =
            self.members.iter().flat_map(|(_, regions)| regions).map(|r| r.range).collect();
        reserved.sort_unstable();
        reserved.dedup();
        self.view.reserved = reserved.into();
    }
}

/// What MAP and UNMAP need to know of a domain.
struct View<D> {
    /// `None`: a bypass domain.
    domain: Option<Arc<D>>,
    /// Where nothing may be mapped, for the sake of any member.
    reserved: Arc<[Range]>,
}

impl<D> Clone for View<D> {
    fn clone(&self) -> View<D> {
        View { domain: self.domain.clone(), reserved: Arc::clone(&self.reserved) }
    }
}

impl<B: Backing> fmt::Debug for Device<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<B: Backing> Device<B> {
    /// A device that offers what `options` say. All endpoints are unattached.
    pub fn new(backing: B, mut options: Options) -> Device<B> {
        options.features.remove(Features::BYPASS);
        let device = Device {
            backing,
            bypass: AtomicBool::new(options.bypass),
            options,
            negotiated: AtomicU64::new(0),
            state: RwLock::new(State { domains: HashMap::new(), attached: HashMap::new() }),
            generation: AtomicU64::new(0),
        };
        for endpoint in device.backing.endpoints() {
            device.backing.set_domain(endpoint, device.unattached());
        }
        device
    }

    /// What the device maps into.
    pub fn backing(&self) -> &B {
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
        self.negotiated.store(features.bits(), Ordering::Relaxed);
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    fn has(&self, feature: Features) -> bool {
        self.negotiated.load(Ordering::Relaxed) & feature.bits() != 0
    }

    /// The configuration space as it is now.
    pub fn config(&self) -> [u8; CONFIG_LEN] {
        self.configuration().emit()
    }

    fn configuration(&self) -> Config {
        Config {
            page_sizes: self.options.page_sizes,
            input_range: self.options.input_range,
            domain_range: self.options.domain_range,
            probe_size: self.options.probe_size,
            bypass: self.bypass.load(Ordering::Relaxed),
        }
    }

    /// Reads configuration bytes from `offset`; zeroes beyond the end.
    pub fn read_config(&self, offset: usize, out: &mut [u8]) {
        self.configuration().read(offset, out);
    }

    /// A driver's write to the configuration: only `bypass` changes, and only if BYPASS_CONFIG was
    /// negotiated and the value is 0 or 1. Endpoints that are attached to nothing have the new
    /// binding when it returns; what was cached of the old is used at most until the next quiet
    /// point of its user.
    ///
    /// # Errors
    /// An invalidation could not be begun: old translations may stay in use; the device needs a
    /// reset (rule V30).
    pub fn write_config(&self, offset: usize, data: &[u8]) -> Result<()> {
        match Config::bypass_written(offset, data) {
            Some(bypass) if self.has(Features::BYPASS_CONFIG) => self.set_bypass(bypass),
            _ => Ok(()),
        }
    }

    fn set_bypass(&self, bypass: bool) -> Result<()> {
        let state = self.state.write();
        if self.bypass.swap(bypass, Ordering::Relaxed) == bypass {
            return Ok(());
        }
        let mut result = Ok(());
        for endpoint in self.backing.endpoints() {
            if !state.attached.contains_key(&endpoint) {
                self.backing.set_domain(endpoint, self.unattached());
                result = result.and(self.backing.sync_binding_begin(endpoint).map(|_| ()));
            }
        }
        result
    }

    /// Where an endpoint goes that is attached to nothing (rules V5, V6): what is *offered* counts.
    fn unattached(&self) -> Binding<B::Domain> {
        let offered = self.options.features.contains(Features::BYPASS_CONFIG);
        match offered && self.bypass.load(Ordering::Relaxed) {
            true => Binding::Bypass,
            false => Binding::Blocked,
        }
    }

    /// Device reset: no endpoint is attached, no domain exists, nothing is negotiated; `bypass`
    /// stays (rules V3, V4). Request queues must have been stopped.
    ///
    /// # Errors
    /// An invalidation could not be begun: old translations may stay in use.
    pub fn reset(&self) -> Result<()> {
        let mut state = self.state.write();
        self.negotiated.store(0, Ordering::Relaxed);
        let mut result = Ok(());
        for (endpoint, _) in state.attached.drain() {
            self.backing.set_domain(endpoint, self.unattached());
            result = result.and(self.backing.sync_binding_begin(endpoint).map(|_| ()));
        }
        state.domains.clear();
        self.generation.fetch_add(1, Ordering::Release);
        result
    }

    /// System reset: `bypass` has its initial value again, and all that [`reset`](Self::reset)
    /// does.
    ///
    /// # Errors
    /// As [`reset`](Self::reset).
    pub fn system_reset(&self) -> Result<()> {
        let bypass = self.set_bypass(self.options.bypass);
        self.reset().and(bypass)
    }

    /// How many domains exist.
    pub fn domains(&self) -> usize {
        self.state.read().domains.len()
    }

    /// Carries out one request from its device-readable bytes and writes what is to be written;
    /// the used length. For whoever has no virtqueue at hand, such as a fuzzer.
    ///
    /// If the [`session`](Session::needs_sync) needs a sync afterwards, the reply is not to be
    /// given before that is over.
    pub fn handle(&self, session: &mut Session<B>, request: &[u8], reply: &mut [u8]) -> u32 {
        match self.execute(session, request, reply.len() as u64) {
            Reply::Unwritten => 0,
            Reply::Status { status, .. } => {
                reply[..TAIL_LEN].copy_from_slice(&emit_tail(status));
                TAIL_LEN as u32
            }
            Reply::Properties(info) => {
                let (properties, tail) = reply.split_at_mut(reply.len() - TAIL_LEN);
                let status = self.emit_properties(&info, properties);
                tail.copy_from_slice(&emit_tail(status));
                reply.len().try_into().unwrap_or(u32::MAX)
            }
            Reply::ProbeRefused(status) => {
                let at = reply.len() - TAIL_LEN;
                reply[at..].copy_from_slice(&emit_tail(status));
                reply.len().try_into().unwrap_or(u32::MAX)
            }
        }
    }

    /// Writes the properties of an endpoint; the status to answer with.
    pub(super) fn emit_properties(&self, info: &EndpointInfo, out: &mut [u8]) -> Status {
        let properties = info.reserved.iter().copied().map(Property::from_region);
        match info.is_consistent() && write_properties(properties, out) {
            true => Status::Ok,
            // Whoever made the device promised that they fit, and make sense (rule V27).
            false => Status::DevErr,
        }
    }

    /// Carries out one request; `room` is how many bytes may be written.
    #[inline]
    pub(super) fn execute(&self, session: &mut Session<B>, request: &[u8], room: u64) -> Reply {
        // Too small to hold a tail: returned unwritten (rule V8).
        if room < TAIL_LEN as u64 {
            return Reply::Unwritten;
        }
        let request = match Request::parse(request) {
            Ok(request) => request,
            Err(ParseError::Short { kind: Kind::Probe, .. }) if self.has(Features::PROBE) => {
                return Reply::ProbeRefused(Status::Inval);
            }
            Err(error) => return error.status().map_or(Reply::Unwritten, Reply::now),
        };
        match request {
            Request::Map { domain, range, phys, flags } => {
                match self.map(session, domain, range, phys, flags) {
                    Ok(()) => Reply::now(Status::Ok),
                    Err(status) => Reply::now(status),
                }
            }
            Request::Unmap { domain, range } => match self.unmap(session, domain, range) {
                Ok(()) => Reply::Status { status: Status::Ok, waits: true },
                Err(status) => Reply::now(status),
            },
            Request::Attach { domain, endpoint, flags } => {
                match self.attach(session, domain, endpoint, flags) {
                    Ok(()) => Reply::Status { status: Status::Ok, waits: true },
                    Err(status) => Reply::now(status),
                }
            }
            Request::Detach { domain, endpoint } => match self.detach(session, domain, endpoint) {
                Ok(()) => Reply::Status { status: Status::Ok, waits: true },
                Err(status) => Reply::now(status),
            },
            Request::Probe { endpoint } => {
                if !self.has(Features::PROBE) {
                    return Reply::Unwritten;
                }
                if room - (TAIL_LEN as u64) < self.options.probe_size.into() {
                    return Reply::ProbeRefused(Status::Inval);
                }
                match self.backing.endpoint(endpoint) {
                    Some(info) => Reply::Properties(info),
                    None => Reply::ProbeRefused(Status::NoEnt),
                }
            }
        }
    }

    fn granule(&self) -> u64 {
        self.options.page_sizes.granule()
    }

    /// Makes `session` remember the domain `id`.
    #[inline]
    fn find<'s>(&self, session: &'s mut Session<B>, id: u32) -> Answer<&'s View<B::Domain>> {
        let generation = self.generation.load(Ordering::Acquire);
        if !matches!(session.last, Some((held, of, _)) if held == id && of == generation) {
            // Taken before the look-up: if an ATTACH comes between, the next look-up is repeated.
            let view = self.state.read().domains.get(&id).ok_or(Status::NoEnt)?.view.clone();
            session.last = Some((id, generation, view));
        }
        match &session.last {
            Some((_, _, view)) => Ok(view),
            None => Err(Status::NoEnt),
        }
    }

    #[inline]
    fn map(
        &self,
        session: &mut Session<B>,
        id: u32,
        range: Range,
        phys: u64,
        flags: MapFlags,
    ) -> Answer<()> {
        if !self.has(Features::MAP_UNMAP) {
            return Err(Status::Unsupp);
        }
        if flags.contains(MapFlags::MMIO) && !self.has(Features::MMIO) {
            return Err(Status::Inval);
        }
        let granule = self.granule();
        if range.extent() == 0 && granule != 1 {
            return Err(Status::Inval);
        }
        let View { domain, reserved } = self.find(session, id)?;
        let domain = domain.as_ref().ok_or(Status::Inval)?;
        if !range.is_aligned(granule) || phys & (granule - 1) != 0 {
            return Err(Status::Range);
        }
        if !self.options.input_range.covers(range) {
            return Err(Status::Range);
        }
        if reserved.iter().any(|reserved| reserved.overlaps(range)) {
            return Err(Status::Inval);
        }
        domain.map_pages(range, GuestPhys(phys), flags.prot()).map_err(status_of)?;
        if let Err(error) = domain.iotlb_sync_map(range) {
            let domain = Arc::clone(domain);
            // Whatever could be mapped of it goes again; the driver is told that nothing is.
            let _ = domain.unmap_pages(range, session.gather(&domain));
            return Err(status_of(error));
        }
        Ok(())
    }

    #[inline]
    fn unmap(&self, session: &mut Session<B>, id: u32, range: Range) -> Answer<()> {
        if !self.has(Features::MAP_UNMAP) {
            return Err(Status::Unsupp);
        }
        let domain = self.find(session, id)?.domain.as_ref().ok_or(Status::Inval)?;
        let (granule, input) = (self.granule(), self.options.input_range);
        let range = if range.is_aligned(granule) && input.covers(range) {
            range
        } else {
            match inward(&**domain, granule, input, range)? {
                Some(range) => range,
                None => return Ok(()),
            }
        };
        let domain = Arc::clone(domain);
        domain.unmap_pages(range, session.gather(&domain)).map_err(status_of)?;
        Ok(())
    }

    fn attach(
        &self,
        session: &mut Session<B>,
        id: u32,
        endpoint: u32,
        flags: AttachFlags,
    ) -> Answer<()> {
        let bypass = flags.contains(AttachFlags::BYPASS);
        if bypass && !self.has(Features::BYPASS_CONFIG) {
            return Err(Status::Inval);
        }
        let (first, last) = self.options.domain_range;
        if !(first..=last).contains(&id) {
            return Err(Status::Range);
        }
        let info = self.backing.endpoint(endpoint).ok_or(Status::NoEnt)?;
        let mut state = self.state.write();
        let state = &mut *state;
        let before = state.attached.get(&endpoint).copied();
        // Everything that can fail comes first: a refused ATTACH leaves the endpoint where it is.
        match state.domains.get(&id) {
            Some(entry) => {
                if entry.view.domain.is_none() != bypass {
                    return Err(Status::Inval);
                }
                if before == Some(id) {
                    return Ok(());
                }
                if let Some(domain) = &entry.view.domain
                    && info.reserved.iter().any(|region| {
                        !entry.view.reserved.contains(&region.range)
                            && in_use(&**domain, self.granule(), region.range)
                    })
                {
                    return Err(Status::Unsupp);
                }
            }
            None => {
                // A domain that loses its last member by this request makes room.
                let leaves = before.and_then(|id| state.domains.get(&id));
                let leaves = usize::from(leaves.is_some_and(|entry| entry.members.len() == 1));
                if state.domains.len() - leaves >= self.options.max_domains {
                    return Err(Status::NoMem);
                }
                let domain = match bypass {
                    true => None,
                    false => {
                        Some(self.backing.create_domain().map_err(|e| match status_of(e) {
                            Status::Unsupp => Status::Unsupp,
                            _ => Status::NoMem,
                        })?)
                    }
                };
                let view = View { domain, reserved: Arc::from([]) };
                state.domains.insert(id, Entry { view, members: Vec::new() });
            }
        }
        if let Some(before) = before {
            state.leave(before, endpoint, &mut session.orphans);
        }
        let entry = state.domains.get_mut(&id).expect("found or made above");
        entry.members.push((endpoint, info.reserved));
        entry.gather_reserved();
        let binding = match &entry.view.domain {
            Some(domain) => Binding::Domain(Arc::clone(domain)),
            None => Binding::Bypass,
        };
        state.attached.insert(endpoint, id);
        self.rebind(session, endpoint, binding);
        Ok(())
    }

    fn detach(&self, session: &mut Session<B>, id: u32, endpoint: u32) -> Answer<()> {
        self.backing.endpoint(endpoint).ok_or(Status::NoEnt)?;
        let mut state = self.state.write();
        if state.attached.get(&endpoint) != Some(&id) {
            return Err(Status::Inval);
        }
        state.attached.remove(&endpoint);
        state.leave(id, endpoint, &mut session.orphans);
        self.rebind(session, endpoint, self.unattached());
        Ok(())
    }

    /// Puts an endpoint elsewhere. Called with the state locked, so that bindings change in the
    /// order of the requests.
    fn rebind(&self, session: &mut Session<B>, endpoint: u32, to: Binding<B::Domain>) {
        self.backing.set_domain(endpoint, to);
        session.rebound.push(endpoint);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Starts the invalidations that `session` has gathered.
    pub fn begin_sync(&self, session: &mut Session<B>) {
        for (domain, gather) in &mut session.touched[..session.used] {
            if gather.is_empty() {
                continue;
            }
            match domain.as_ref().map(|domain| domain.iotlb_sync_begin(gather)) {
                Some(Ok(token)) if token != SyncToken::DONE => {
                    session.waits.push((domain.clone(), token));
                }
                Some(Err(error)) => session.failed = Some(error),
                _ => {}
            }
            session.syncs += 1;
        }
        for endpoint in session.rebound.drain(..) {
            match self.backing.sync_binding_begin(endpoint) {
                Ok(SyncToken::DONE) => {}
                Ok(token) => session.waits.push((None, token)),
                Err(error) => session.failed = Some(error),
            }
        }
    }

    /// Whether the invalidations begun are over. Once they are, the session is as new.
    ///
    /// # Errors
    /// One of them failed: what was unmapped may still be reachable.
    pub fn poll_sync(&self, session: &mut Session<B>) -> Result<bool> {
        let (waits, failed) = (&mut session.waits, &mut session.failed);
        waits.retain(|(domain, token)| {
            let over = match domain {
                Some(domain) => domain.iotlb_sync_poll(*token),
                None => self.backing.sync_binding_poll(*token),
            };
            match over {
                Ok(over) => !over,
                Err(error) => {
                    *failed = Some(error);
                    false
                }
            }
        });
        if !session.waits.is_empty() {
            return Ok(false);
        }
        for (domain, gather) in &mut session.touched[..session.used] {
            *domain = None;
            *gather = Gather::new();
        }
        session.used = 0;
        session.orphans.clear();
        match session.failed.take() {
            None => Ok(true),
            Some(error) => Err(error),
        }
    }
}

impl<D> State<D> {
    /// Takes `endpoint` out of the domain `id`, which goes with its last member (rule V14); its
    /// mappings go to `orphans`, to live until nothing uses them any more.
    fn leave(&mut self, id: u32, endpoint: u32, orphans: &mut Vec<Arc<D>>) {
        let Some(entry) = self.domains.get_mut(&id) else { return };
        entry.members.retain(|&(member, _)| member != endpoint);
        entry.gather_reserved();
        if entry.members.is_empty()
            && let Some(Entry { view: View { domain: Some(domain), .. }, .. }) =
                self.domains.remove(&id)
        {
            orphans.push(domain);
        }
    }
}

/// The answer to a request.
type Answer<T> = std::result::Result<T, Status>;

/// What is to be written for a request, and when.
#[derive(Debug)]
pub(super) enum Reply {
    /// Nothing; used length 0.
    Unwritten,
    /// A tail.
    Status {
        status: Status,
        /// Whether it may be given only after the session's sync.
        waits: bool,
    },
    /// The properties of an endpoint, then a tail that says how that went.
    Properties(EndpointInfo),
    /// A tail where the properties end, and none of these.
    ProbeRefused(Status),
}

impl Reply {
    fn now(status: Status) -> Reply {
        Reply::Status { status, waits: false }
    }
}

/// What one request queue keeps between requests of a batch: which domains wait for their
/// invalidation, and the domain that the last request was for.
pub struct Session<B: Backing> {
    last: Option<(u32, u64, View<B::Domain>)>,
    /// Domains with something to invalidate, the first `used`; the others are kept for reuse.
    touched: Vec<(Option<Arc<B::Domain>>, Gather)>,
    used: usize,
    rebound: Vec<u32>,
    orphans: Vec<Arc<B::Domain>>,
    waits: Vec<(Option<Arc<B::Domain>>, SyncToken)>,
    failed: Option<Error>,
    pub(super) syncs: u64,
}

impl<B: Backing> Default for Session<B> {
    fn default() -> Session<B> {
        Session {
            last: None,
            touched: Vec::new(),
            used: 0,
            rebound: Vec::new(),
            orphans: Vec::new(),
            waits: Vec::new(),
            failed: None,
            syncs: 0,
        }
    }
}

impl<B: Backing> fmt::Debug for Session<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("touched", &self.used)
            .field("rebound", &self.rebound)
            .field("waits", &self.waits.len())
            .finish_non_exhaustive()
    }
}

impl<B: Backing> Session<B> {
    /// A session in which nothing has happened.
    pub fn new() -> Session<B> {
        Session::default()
    }

    /// Whether replies must wait for [`Device::begin_sync`] and [`Device::poll_sync`].
    pub fn needs_sync(&self) -> bool {
        self.used > 0 || !self.rebound.is_empty()
    }

    /// How many domains wait for an invalidation.
    pub fn touched(&self) -> usize {
        self.used
    }

    /// The gather for `domain`. Requests come in runs for one domain, so the newest is tried
    /// first.
    #[inline]
    fn gather(&mut self, domain: &Arc<B::Domain>) -> &mut Gather {
        let is_it = |(held, _): &(Option<Arc<B::Domain>>, Gather)| {
            held.as_ref().is_some_and(|held| Arc::ptr_eq(held, domain))
        };
        let at = match self.touched[..self.used].iter().rposition(is_it) {
            Some(at) => at,
            None => {
                if self.used == self.touched.len() {
                    self.touched.push((None, Gather::new()));
                }
                self.touched[self.used].0 = Some(Arc::clone(domain));
                self.used += 1;
                self.used - 1
            }
        };
        &mut self.touched[at].1
    }
}

/// The status that tells a driver of an error.
fn status_of(error: Error) -> Status {
    match error {
        Error::Unaligned { .. }
        | Error::TargetOverflow(_)
        | Error::OutsideAperture { .. }
        | Error::WouldSplit { .. } => Status::Range,
        Error::NoPermission(_) | Error::Reserved { .. } | Error::Exists { .. } => Status::Inval,
        Error::Full { .. } | Error::NoMemory => Status::NoMem,
        Error::Unsupported(_) => Status::Unsupp,
        _ => Status::DevErr,
    }
}

/// The part of an UNMAP's range that can hold mappings, cut to granules; `None` if there is none.
/// An UNMAP may begin and end anywhere outside of mappings (rule V40); an end inside of one would
/// split it (rule V22).
fn inward<D: Domain>(
    domain: &D,
    granule: u64,
    input: Range,
    range: Range,
) -> Answer<Option<Range>> {
    let Some(range) = range.intersection(input) else { return Ok(None) };
    let mask = granule - 1;
    let (mut first, mut last) = (range.first().0, range.last().0);
    let split = |at: u64| domain.iova_to_phys(Iova(at)).is_some();
    if first & mask != 0 {
        if split(first) {
            return Err(Status::Range);
        }
        let Some(up) = (first | mask).checked_add(1) else { return Ok(None) };
        first = up;
    }
    if last & mask != mask {
        if split(last) {
            return Err(Status::Range);
        }
        let Some(down) = (last & !mask).checked_sub(1) else { return Ok(None) };
        last = down;
    }
    Ok(Range::new(Iova(first), Iova(last)))
}

/// Whether something may be mapped in `range`.
fn in_use<D: Domain>(domain: &D, granule: u64, range: Range) -> bool {
    let first = range.first().0 & !(granule - 1);
    let granules = (range.last().0 - first) / granule;
    granules >= PROBED_GRANULES
        || (0..=granules).any(|n| domain.iova_to_phys(Iova(first + n * granule)).is_some())
}
