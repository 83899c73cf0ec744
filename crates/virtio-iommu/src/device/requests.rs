//! What each request does.

use std::sync::{Arc, atomic::Ordering};

use ringfence_iommu::{self as iommu, Domain, Error, GuestPhys, Iova, Range};

use super::{
    Backing, Binding, Device, EndpointInfo, Session,
    core::{Entry, State, View},
    session::gather,
};
use crate::wire::{
    AttachFlags, Features, Kind, MapFlags, MapRequest, ParseError, Request, Status, TAIL_LEN,
    UnmapRequest, emit_tail, write_properties,
};

/// How many addresses are tried to find a mapping in a reserved region of an endpoint, when the
/// endpoint joins a domain that cannot list its mappings; a region with more granules counts as in
/// use.
const PROBED_GRANULES: u64 = 1 << 14;

impl<B: Backing> Device<B> {
    /// Carries out one request from its device-readable bytes and writes what is to be written;
    /// returns the used length. For callers without a virtqueue, such as a fuzzer.
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
            Reply::Probe(found) => {
                let (properties, tail) = reply.split_at_mut(reply.len() - TAIL_LEN);
                let emitted = found.map(|info| self.emit_properties(&info, properties));
                tail.copy_from_slice(&emit_tail(emitted.unwrap_or_else(|refused| refused)));
                reply.len().try_into().unwrap_or(u32::MAX)
            }
        }
    }

    /// Writes the properties of an endpoint; the status of the request.
    pub(super) fn emit_properties(&self, info: &EndpointInfo, out: &mut [u8]) -> Status {
        match info.is_consistent() && write_properties(&info.reserved, out) {
            true => Status::Ok,
            // The creator of the device guarantees that they fit, and are consistent (rule V27).
            false => Status::DevErr,
        }
    }

    /// As [`execute`](Self::execute), of a MAP or an UNMAP for which there is room for a tail: the
    /// status, and whether it waits for the session's sync. `None` if it is neither, or cut short.
    #[inline(always)]
    pub(super) fn execute_common(
        &self,
        session: &mut Session<B>,
        request: &[u8],
    ) -> Option<(Status, bool)> {
        let refused = |error: ParseError| (error.status().unwrap_or(Status::Inval), false);
        if let Some(map) = MapRequest::parse(request) {
            return Some(match map {
                Ok(map) => outcome_of(self.map(session, map).map(|()| false)),
                Err(error) => refused(error),
            });
        }
        Some(match UnmapRequest::parse(request)? {
            Ok(unmap) => outcome_of(self.unmap(session, unmap)),
            Err(error) => refused(error),
        })
    }

    /// Carries out one request; `room` is how many bytes may be written.
    pub(super) fn execute(&self, session: &mut Session<B>, request: &[u8], room: u64) -> Reply {
        // Too small to hold a tail: returned unwritten (rule V8).
        if room < TAIL_LEN as u64 {
            return Reply::Unwritten;
        }
        let request = match Request::parse(request) {
            Ok(request) => request,
            Err(ParseError::Short(Kind::Probe)) => {
                return match self.has(Features::PROBE) {
                    true => Reply::Probe(Err(Status::Inval)),
                    // However short: left alone where the feature is not (rule V24).
                    false => Reply::Unwritten,
                };
            }
            // Without the feature there is no such type (rule V8).
            Err(error) if error.kind() == Some(Kind::IotlbFlush) && !self.flushes() => {
                return Reply::Unwritten;
            }
            Err(error) => return error.status().map_or(Reply::Unwritten, Reply::now),
        };
        self.perform(session, &request, room)
    }

    /// As [`execute`](Self::execute), of a request that was parsed and has room for a tail.
    pub(super) fn perform(&self, session: &mut Session<B>, request: &Request, room: u64) -> Reply {
        match *request {
            Request::Map(map) => Reply::to(self.map(session, map).map(|()| false)),
            Request::Unmap(unmap) => Reply::to(self.unmap(session, unmap)),
            Request::Attach { domain, endpoint, flags } => {
                Reply::to(self.attach(session, domain, endpoint, flags).map(|()| true))
            }
            Request::Detach { domain, endpoint } => {
                Reply::to(self.detach(session, domain, endpoint).map(|()| true))
            }
            Request::IotlbFlush { domain } => {
                if !self.flushes() {
                    return Reply::Unwritten;
                }
                Reply::to(self.iotlb_flush(session, domain).map(|()| true))
            }
            Request::Probe { endpoint } => {
                if !self.has(Features::PROBE) {
                    return Reply::Unwritten;
                }
                if room - (TAIL_LEN as u64) < self.options.probe_size.into() {
                    return Reply::Probe(Err(Status::Inval));
                }
                Reply::Probe(self.backing.endpoint(endpoint).ok_or(Status::NoEnt))
            }
        }
    }

    fn granule(&self) -> u64 {
        self.options.page_sizes.granule()
    }

    /// Caches the domain `id` in `session`.
    #[inline]
    pub(super) fn find<'s>(
        &self,
        session: &'s mut Session<B>,
        id: u32,
    ) -> Outcome<&'s View<Arc<B::Domain>>> {
        // Ordering: a driver that relies on an earlier request has seen its reply, so that rings order the
        // two; of others either may come first.
        let generation = self.generation.load(Ordering::Acquire);
        if !matches!(session.last, Some((held, of, _)) if held == id && of == generation) {
            self.look_up(session, id, generation)?;
        }
        match &session.last {
            Some((_, _, view)) => Ok(view),
            None => Err(Status::NoEnt),
        }
    }

    #[cold]
    fn look_up(&self, session: &mut Session<B>, id: u32, generation: u64) -> Outcome<()> {
        // A domain that has gone is not held any longer.
        session.last = None;
        // The generation was taken before: if an ATTACH comes between, the next look-up is repeated.
        let view = self.state.read().domains.get(&id).ok_or(Status::NoEnt)?.view.clone();
        session.last = Some((id, generation, view));
        Ok(())
    }

    /// Whether there are lazy domains and IOTLB_FLUSH.
    fn flushes(&self) -> bool {
        self.has(Features::LAZY_IOTLB_FLUSH)
    }

    /// Carries out an IOTLB_FLUSH, whose reply waits for the session's sync.
    fn iotlb_flush(&self, session: &mut Session<B>, id: u32) -> Outcome<()> {
        let View { domain, lazy, .. } = self.find(session, id)?.clone();
        let (Some(domain), Some(lazy)) = (domain, lazy) else { return Err(Status::Inval) };
        let Session { touched, used, flights, .. } = session;
        flights.extend(lazy.flush(|| gather(touched, used, &domain)));
        Ok(())
    }

    #[inline(always)]
    pub(super) fn map(&self, session: &mut Session<B>, map: MapRequest) -> Outcome<()> {
        let MapRequest { domain: id, range, phys, flags } = map;
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
        let View { domain, reserved, .. } = self.find(session, id)?;
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
        let map = iommu::Map::new(range, GuestPhys(phys), flags);
        domain.map(map).map_err(status_of)?;
        if let Err(error) = domain.iotlb_sync_map(range) {
            let domain = Arc::clone(domain);
            // Whatever was mapped of it is removed: the reply says that nothing is mapped.
            let Session { touched, used, .. } = session;
            let _ = domain.unmap(range, gather(touched, used, &domain));
            return Err(status_of(error));
        }
        Ok(())
    }

    /// Whether the reply waits for the session's sync: not in a lazy domain.
    #[inline]
    fn unmap(&self, session: &mut Session<B>, unmap: UnmapRequest) -> Outcome<bool> {
        let UnmapRequest { domain: id, range } = unmap;
        if !self.has(Features::MAP_UNMAP) {
            return Err(Status::Unsupp);
        }
        self.find(session, id)?;
        // The session's own: a count for each request would be two more atomic operations.
        let Session { last: Some((.., View { domain, lazy, .. })), touched, used, .. } = session
        else {
            return Err(Status::NoEnt);
        };
        let domain = domain.as_ref().ok_or(Status::Inval)?;
        let (granule, input) = (self.granule(), self.options.input_range);
        let range = if range.is_aligned(granule) && input.covers(range) {
            range
        } else {
            match inward(&**domain, granule, input, range)? {
                Some(range) => range,
                None => return Ok(false),
            }
        };
        if let Some(lazy) = lazy {
            return lazy.unmap(&**domain, range).map(|()| false).map_err(status_of);
        }
        domain.unmap(range, gather(touched, used, domain)).map_err(status_of)?;
        Ok(true)
    }

    pub(super) fn attach(
        &self,
        session: &mut Session<B>,
        id: u32,
        endpoint: u32,
        flags: AttachFlags,
    ) -> Outcome<()> {
        let bypass = flags.contains(AttachFlags::BYPASS);
        let lazy = flags.contains(AttachFlags::LAZY);
        if bypass && !self.has(Features::BYPASS_CONFIG) || lazy && (bypass || !self.flushes()) {
            return Err(Status::Inval);
        }
        let mut state = self.state.write();
        // Under the lock: an endpoint that goes is detached under it, too.
        let info = self.backing.endpoint(endpoint).ok_or(Status::NoEnt)?;
        let (first, last) = self.options.domain_range;
        if !(first..=last).contains(&id) {
            return Err(Status::Range);
        }
        let state = &mut *state;
        let before = state.attached.get(&endpoint).copied();
        // Everything that can fail comes first: a refused ATTACH leaves the endpoint where it is.
        let domain = match state.domains.get(&id) {
            Some(entry) => {
                if entry.view.domain.is_none() != bypass || entry.view.lazy.is_some() != lazy {
                    return Err(Status::Inval);
                }
                if before == Some(id) {
                    // It is there, unless an ATTACH elsewhere failed and could not be undone.
                    self.backing
                        .set_domain(endpoint, binding_to(entry.view.domain.as_ref()))
                        .map_err(cannot_join)?;
                    self.rebound(session, endpoint);
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
                entry.view.domain.clone()
            }
            None => {
                // A domain that loses its last member by this request makes room.
                let leaves = before.and_then(|id| state.domains.get(&id));
                let leaves = usize::from(leaves.is_some_and(|entry| entry.members.len() == 1));
                if state.domains.len() - leaves >= self.options.max_domains {
                    return Err(Status::NoMem);
                }
                match bypass {
                    true => None,
                    false => {
                        Some(self.backing.create_domain().map_err(|e| match status_of(e) {
                            Status::Unsupp => Status::Unsupp,
                            _ => Status::NoMem,
                        })?)
                    }
                }
            }
        };
        self.backing.set_domain(endpoint, binding_to(domain.as_ref())).map_err(cannot_join)?;
        if let Some(before) = before {
            state.leave(before, endpoint, &mut session.orphans);
        }
        let entry = state.domains.entry(id).or_insert_with(|| {
            let lazy = lazy.then(Arc::default);
            let view = View { domain, lazy, reserved: Arc::from([]) };
            Entry { view, members: Vec::new() }
        });
        entry.members.push((endpoint, info.reserved));
        entry.gather_reserved();
        state.attached.insert(endpoint, id);
        self.rebound(session, endpoint);
        Ok(())
    }

    fn detach(&self, session: &mut Session<B>, id: u32, endpoint: u32) -> Outcome<()> {
        let mut state = self.state.write();
        self.backing.endpoint(endpoint).ok_or(Status::NoEnt)?;
        if state.attached.get(&endpoint) != Some(&id) {
            return Err(Status::Inval);
        }
        self.unbind(endpoint).map_err(|_| Status::DevErr)?;
        state.attached.remove(&endpoint);
        state.leave(id, endpoint, &mut session.orphans);
        self.rebound(session, endpoint);
        Ok(())
    }

    /// Notes that an endpoint was put elsewhere. Called with the state locked, so that bindings
    /// change in the order of the requests.
    fn rebound(&self, session: &mut Session<B>, endpoint: u32) {
        if !session.rebound.contains(&endpoint) {
            session.rebound.push(endpoint);
        }
        // Ordering: see `find`.
        self.generation.fetch_add(1, Ordering::Release);
    }
}

impl<D> State<D> {
    /// Takes `endpoint` out of the domain `id`, which goes with its last member (rule V14); its
    /// mappings go to `orphans`, to live until nothing uses them any more.
    pub(super) fn leave(&mut self, id: u32, endpoint: u32, orphans: &mut Vec<Arc<D>>) {
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

/// What a request returns, or the status that it fails with.
pub(super) type Outcome<T> = std::result::Result<T, Status>;

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
    /// The properties of an endpoint, unless refused, then a tail where they end.
    Probe(Outcome<EndpointInfo>),
}

impl Reply {
    fn now(status: Status) -> Reply {
        Reply::Status { status, waits: false }
    }

    #[inline]
    fn to(done: Outcome<bool>) -> Reply {
        let (status, waits) = outcome_of(done);
        Reply::Status { status, waits }
    }
}

/// The status for what was carried out, or refused, and whether it waits for the session's sync.
#[inline]
fn outcome_of(done: Outcome<bool>) -> (Status, bool) {
    done.map_or_else(|status| (status, false), |waits| (Status::Ok, waits))
}

/// The status that reports an error to the driver.
fn status_of(error: Error) -> Status {
    match error {
        Error::Unaligned { .. }
        | Error::TargetOverflow(_)
        | Error::OutsideAperture { .. }
        | Error::WouldSplit { .. } => Status::Range,
        Error::NoPermission(_) | Error::Reserved { .. } | Error::Exists { .. } => Status::Inval,
        Error::Full { .. } | Error::NoMemory { .. } => Status::NoMem,
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
) -> Outcome<Option<Range>> {
    let Some(range) = range.intersection(input) else { return Ok(None) };
    let (first, last, mask) = (range.first(), range.last(), granule - 1);
    let is_mapped = |at| domain.iova_to_phys(at).is_some();
    if first.0 & mask != 0 && is_mapped(first) || last.0 & mask != mask && is_mapped(last) {
        return Err(Status::Range);
    }
    Ok(range.inward(granule))
}

/// Where an endpoint of a domain is put.
fn binding_to<D>(domain: Option<&Arc<D>>) -> Binding<Arc<D>> {
    domain.map_or(Binding::Bypass, |domain| Binding::Domain(Arc::clone(domain)))
}

/// The status of an ATTACH whose endpoint the backing could not put there.
fn cannot_join(error: Error) -> Status {
    match error {
        Error::Full { .. } | Error::NoMemory { .. } => Status::NoMem,
        Error::Gone(_) => Status::DevErr,
        _ => Status::Unsupp,
    }
}

/// Whether something may be mapped in `range`.
fn in_use<D: Domain>(domain: &D, granule: u64, range: Range) -> bool {
    let mut first = Vec::with_capacity(1);
    match domain.mappings_from(range.first(), &mut first) {
        Ok(()) => first.first().is_some_and(|mapping| mapping.range.overlaps(range)),
        // The domain cannot list its mappings.
        Err(_) => {
            let first = range.first().0 & !(granule - 1);
            let granules = (range.last().0 - first) / granule;
            let mapped = |n| domain.iova_to_phys(Iova(first + n * granule)).is_some();
            granules >= PROBED_GRANULES || (0..=granules).any(mapped)
        }
    }
}
