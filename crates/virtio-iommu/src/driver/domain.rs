//! An address space behind a virtio-iommu.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Address, Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, Partial, Prot,
    Range, ReservedRegion, Result, SyncToken, Work,
};

use super::{
    Driver,
    core::add_software_msi,
    report::{Failure, Failures, Reports, Sent},
    shadow::Shadow,
};
use crate::wire::{AttachFlags, Features, MapRequest, Request, Status, UnmapRequest};

/// In a token: the number is that of an IOTLB_FLUSH. Request numbers never reach this bit.
const FLUSH: u64 = 1 << 63;

const DETACH: &str = "detach an endpoint from";

/// The number of the request that a sync waits for.
const fn seq_of(token: SyncToken) -> u64 {
    token.as_u64() & !FLUSH
}

/// A domain of a virtio-iommu. Made by [`Driver::domain`].
///
/// As long as no endpoint is attached, mappings are only noted; the first
/// [`attach`](Self::attach) sends them all (rule [L65]).
///
/// What the device refuses is reported: a MAP by the [`iotlb_sync_map`](Domain::iotlb_sync_map)
/// of its range, and it is not mapped; an UNMAP by [`iotlb_sync`](Domain::iotlb_sync) or
/// [`flush_iotlb_all`](Domain::flush_iotlb_all), and then what it was to remove may still be
/// reachable: its addresses must not be used again. A flush sends the UNMAP once more, and fails as
/// long as it is refused.
///
/// Dropping it detaches its endpoints, and waits for the device.
///
/// [L65]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l65
pub struct ViommuDomain {
    pub(super) driver: Arc<Driver>,
    pub(super) id: u32,
    /// Whether it is lazy for the device: memory may be reachable after its UNMAP is completed.
    lazy: bool,
    reports: Arc<Reports>,
    /// Whether any endpoint is; changed under the lock of `state`.
    attached: AtomicBool,
    /// Comes before the ring's lock. Held while waiting in attach and detach only.
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) shadow: Shadow,
    pub(super) geometry: Geometry,
    /// The endpoints, each with the regions that the device named.
    pub(super) endpoints: Vec<(u32, Vec<ReservedRegion>)>,
    pub(super) failed_maps: Failures,
    failed_unmaps: Failures,
    failed_replay: Option<Error>,
    /// The only endpoint is attached although the device does not have all that is mapped.
    torn: bool,
}

impl fmt::Debug for ViommuDomain {
    ringfence_sync::shows!(ViommuDomain as it, id: it.id);
}

impl Driver {
    /// A new, empty domain that maps.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without MAP_UNMAP; [`Error::Full`] if all numbers are taken.
    pub fn domain(self: &Arc<Self>) -> Result<Arc<ViommuDomain>> {
        if !self.features().contains(Features::MAP_UNMAP) {
            return Err(Error::Unsupported("the device offers no MAP and UNMAP"));
        }
        ViommuDomain::new(self, false)
    }

    /// A domain that maps, lazy if the device supports that: the device completes an UNMAP at once,
    /// and invalidates on an IOTLB_FLUSH. For callers that unmap much and flush rarely: each
    /// [`iotlb_sync`](ringfence_iommu::Domain::iotlb_sync) takes one request more than in an
    /// ordinary domain. If the feature was not offered or not negotiated, this is an ordinary
    /// domain ([`ViommuDomain::is_lazy`]).
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn lazy_domain(self: &Arc<Self>) -> Result<Arc<ViommuDomain>> {
        if !self.features().contains(Features::MAP_UNMAP | Features::LAZY_IOTLB_FLUSH) {
            return self.domain();
        }
        ViommuDomain::new(self, true)
    }
}

impl ViommuDomain {
    fn new(driver: &Arc<Driver>, lazy: bool) -> Result<Arc<ViommuDomain>> {
        let config = driver.config();
        let aperture = match driver.features().contains(Features::INPUT_RANGE) {
            true => config.input_range,
            false => Range::ALL,
        };
        let reports = Arc::default();
        Ok(Arc::new(ViommuDomain {
            id: driver.open(&reports)?,
            driver: Arc::clone(driver),
            lazy,
            reports,
            attached: AtomicBool::new(false),
            state: Mutex::new(State {
                shadow: Shadow::new(config.page_sizes.granule()),
                geometry: Geometry::new(config.page_sizes, aperture),
                endpoints: Vec::new(),
                failed_maps: Failures::default(),
                failed_unmaps: Failures::default(),
                failed_replay: None,
                torn: false,
            }),
        }))
    }

    /// The number of the domain in requests.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The driver of the device.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Probes `endpoint` (rule [V33]) and attaches it, waiting for the device. Its reserved regions
    /// become part of the geometry.
    ///
    /// # Errors
    /// [`Error::Device`] if the device refuses; [`Error::Reserved`] if something is mapped in one
    /// of the endpoint's reserved regions; [`Error::Unsupported`] if it is attached to another
    /// domain. The endpoint is not attached then; or, if the device failed at the ATTACH or refused
    /// a mapping, and then failed at the DETACH too, it may reach what the device did map, until it
    /// is detached or that is unmapped.
    ///
    /// [V33]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v33
    pub fn attach(&self, endpoint: u32) -> Result<()> {
        let regions = self.driver.probed_regions(endpoint)?;
        let mut state = self.settled();
        if state.torn
            && let Some(&(held, _)) = state.endpoints.first()
        {
            self.leave(&mut state, held)?;
        }
        if state.endpoints.iter().any(|&(held, _)| held == endpoint) {
            return Ok(());
        }
        for region in &regions {
            if let Some(range) = state.shadow.overlapping(region.range) {
                return Err(Error::Reserved { range, reserved: region.range });
            }
        }
        self.driver.claim(endpoint, self.id)?;
        let refused = self.driver.call("attach an endpoint to", &self.attach_of(endpoint)).err();
        if let Some(error) = &refused
            && self.is_away(endpoint, error)
        {
            self.driver.release(endpoint);
            return Err(*error);
        }
        let first = state.endpoints.is_empty();
        state.endpoints.push((endpoint, regions));
        state.refresh_geometry();
        // Ordering: see `is_attached`.
        self.attached.store(true, Ordering::Release);
        if let Some(error) = refused {
            state.torn |= first;
            return Err(error);
        }
        if first && let Err(error) = self.replay(&mut state) {
            state.torn = true;
            // The domain is destroyed with its only endpoint, and so are its mappings. If the
            // DETACH fails, the mappings that the device has are reachable.
            let _ = self.leave(&mut state, endpoint);
            return Err(error);
        }
        Ok(())
    }

    /// Whether an endpoint is not attached although its ATTACH failed with `error`: a device that
    /// failed may have attached it, and is asked to detach it.
    fn is_away(&self, endpoint: u32, error: &Error) -> bool {
        let refuses = |error: &Error| {
            use Status::{Inval, NoEnt, NoMem, Range, Unsupp};
            matches!(error, Error::Device { status, .. } if matches!(
                Status::from_u8(*status),
                Some(Unsupp | Inval | Range | NoEnt | NoMem)
            ))
        };
        refuses(error)
            || match self.driver.call(DETACH, &Request::Detach { domain: self.id, endpoint }) {
                Ok(()) => true,
                Err(error) => refuses(&error),
            }
    }

    fn attach_of(&self, endpoint: u32) -> Request {
        let flags = if self.lazy { AttachFlags::LAZY } else { AttachFlags::empty() };
        Request::Attach { domain: self.id, endpoint, flags }
    }

    /// Sends all that was noted, for the first endpoint.
    fn replay(&self, state: &mut State) -> Result<()> {
        for (range, mapping) in state.shadow.iter() {
            let flags = mapping.prot;
            let map =
                Request::Map(MapRequest { domain: self.id, range, phys: mapping.target.0, flags });
            self.driver.send(&map, Sent::Replay)?;
        }
        self.driver.drain()?;
        self.settle(state);
        state.failed_replay.take().map_or(Ok(()), Err)
    }

    /// Detaches `endpoint`, waiting for the device. Mappings stay noted for a later attach.
    ///
    /// # Errors
    /// [`Error::Device`] if the device refuses, and the endpoint stays attached;
    /// [`Error::Unsupported`] if it was not attached.
    pub fn detach(&self, endpoint: u32) -> Result<()> {
        let mut state = self.settled();
        self.leave(&mut state, endpoint)
    }

    fn leave(&self, state: &mut State, endpoint: u32) -> Result<()> {
        let Some(at) = state.endpoints.iter().position(|&(held, _)| held == endpoint) else {
            return Err(Error::Unsupported("the endpoint is not attached to the domain"));
        };
        self.driver.call(DETACH, &Request::Detach { domain: self.id, endpoint })?;
        state.endpoints.swap_remove(at);
        state.refresh_geometry();
        self.driver.release(endpoint);
        if state.endpoints.is_empty() {
            // Ordering: see `is_attached`.
            self.attached.store(false, Ordering::Release);
            state.torn = false;
            // Nothing is reachable any more, whatever was refused.
            self.settle(state);
            state.failed_unmaps = Failures::default();
        }
        Ok(())
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> usize {
        self.settled().shadow.len()
    }

    /// The state, with all of the device's replies taken into account.
    #[inline]
    pub(super) fn settled(&self) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        self.settle(&mut state);
        state
    }

    #[inline]
    fn settle(&self, state: &mut State) {
        for failure in self.reports.take() {
            match failure.sent {
                // For a mapping that was unmapped meanwhile there is nothing to report.
                Sent::Map if state.shadow.roll_back(failure.range, failure.seq) => {
                    state.failed_maps.add(failure.range, failure.status);
                }
                Sent::Unmap => state.failed_unmaps.add(failure.range, failure.status),
                Sent::Replay => {
                    let Failure { range, status, .. } = failure;
                    let refused = Error::Device { operation: "map", range, status };
                    state.failed_replay.get_or_insert(refused);
                }
                Sent::Map | Sent::Sync => {}
            }
        }
    }

    /// Requests are retired in order: the number of the newest one identifies the sync. Without an
    /// endpoint nothing is reachable, so the sync waits for nothing; but what the device refused
    /// before is reported.
    fn begin_sync(&self) -> Result<SyncToken> {
        match self.is_attached() {
            true => self.driver.begin_sync().map(SyncToken::new),
            false => Ok(SyncToken::new(self.driver.retired())),
        }
    }

    /// Whether an UNMAP is completed before its invalidation, so that a lazy policy waits for the
    /// device only when it flushes. Made by [`Driver::lazy_domain`](super::Driver::lazy_domain).
    pub fn is_lazy(&self) -> bool {
        self.lazy
    }

    /// Begins a sync of unmaps. In a lazy domain that is an IOTLB_FLUSH; its reply is kept for the
    /// poll that finds the sync over.
    fn begin_unmaps(&self) -> Result<SyncToken> {
        if self.lazy
            && let Some(seq) = self.send_flush()?
        {
            self.driver.begin_sync()?;
            return Ok(SyncToken::new(seq | FLUSH));
        }
        self.begin_sync()
    }

    /// The result of the IOTLB_FLUSH of a sync that is over, if it had one.
    fn flushed(&self, token: SyncToken) -> Result<()> {
        match token.as_u64() & FLUSH {
            0 => Ok(()),
            _ => self.driver.flushed(seq_of(token)),
        }
    }

    /// Puts an IOTLB_FLUSH behind all UNMAPs in the ring; its number, or `None` if no endpoint is
    /// attached.
    fn send_flush(&self) -> Result<Option<u64>> {
        self.send_while(&Request::IotlbFlush { domain: self.id }, |_| true)
    }

    /// Puts a request into the ring, whose reply is kept; its number, or `None` if no endpoint is
    /// attached, or the state is not `wanted`. Under the domain's lock, so that it does not come behind
    /// the last DETACH.
    fn send_while(
        &self,
        request: &Request,
        wanted: impl Fn(&State) -> bool,
    ) -> Result<Option<u64>> {
        loop {
            let state = self.settled();
            if !self.is_attached() || !wanted(&state) {
                return Ok(None);
            }
            if let Some(seq) = self.driver.try_send(request, Sent::Sync)? {
                return Ok(Some(seq));
            }
            drop(state);
            self.driver.make_room()?;
        }
    }

    /// Sends again the UNMAPs that the device refused, unless something else is mapped there by
    /// now. In a lazy domain they stay failures until an IOTLB_FLUSH behind them has succeeded:
    /// another thread's sync may look for them before this one's flush is over.
    fn unmap_again(&self) -> Result<()> {
        let failed = self.settled().failed_unmaps.ranges();
        let mut done = Vec::new();
        for range in failed {
            let unmap = Request::Unmap(UnmapRequest { domain: self.id, range });
            let is_free = |state: &State| state.shadow.overlapping(range).is_none();
            if let Some(seq) = self.send_while(&unmap, is_free)?
                && self.driver.result("unmap", seq).is_ok()
            {
                done.push(range);
            }
        }
        let flush = if self.lazy && !done.is_empty() { self.send_flush()? } else { None };
        if flush.is_none_or(|seq| self.driver.result("flush", seq).is_ok()) {
            let mut state = self.settled();
            done.into_iter().for_each(|range| state.failed_unmaps.forget(range));
        }
        Ok(())
    }

    /// Whether the domain and the device have mappings of this kind.
    #[inline]
    pub(super) fn check_kind(&self, range: Range, prot: Prot) -> Result<()> {
        if prot.contains(Prot::MMIO) && !self.driver.features().contains(Features::MMIO) {
            return Err(Error::Unsupported("the device does not support MMIO mappings"));
        }
        if range.extent() == 0 {
            // virt_end must be strictly greater than virt_start (rule V38).
            return Err(Error::Unsupported("a one-byte mapping cannot be expressed in a MAP"));
        }
        Ok(())
    }

    // Ordering: written under the state's lock, and read under it but where a sync begins. The unmaps that a
    // sync is for took the lock before it: it sees what they saw, or something later. That nothing was
    // attached counts once the sync's poll has taken the lock.
    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }
}

impl State {
    /// Reports the refused MAPs in ranges that their callers have mapped. What is mapped now was not refused,
    /// whatever an entry says that stands for several.
    fn report_maps(&mut self, ranges: &[Range], failed: &mut dyn FnMut(Range, Error)) {
        if self.failed_maps.is_empty() {
            return;
        }
        for &range in ranges {
            let mapped = self.shadow.covered(range).ok().flatten();
            match mapped.is_some_and(|mapped| mapped.bytes == range.len()) {
                true => self.failed_maps.forget(range),
                false => self.failed_maps.report("map", &[range], true, failed),
            }
        }
    }

    /// To be called when the endpoints have changed.
    fn refresh_geometry(&mut self) {
        let mut reserved: Vec<_> =
            self.endpoints.iter().flat_map(|(_, regions)| regions).copied().collect();
        if !self.endpoints.is_empty() {
            add_software_msi(&mut reserved);
        }
        reserved.sort_by_key(|region| region.range);
        reserved.dedup();
        self.geometry.reserved = reserved.into();
    }

    /// Whether a mapping could be made, as far as the driver can check.
    #[inline]
    pub(super) fn check(&self, map: &Map<GuestPhys>) -> Result<()> {
        self.geometry.check_map(map)?;
        match self.shadow.overlapping(map.range()) {
            Some(held) => Err(Error::Exists { range: map.range(), at: held.first() }),
            None => Ok(()),
        }
    }
}

// SAFETY: a sync of unmaps is over once the device, which the driver trusts, has completed every
// UNMAP before it, or no endpoint is attached; what it refused is reported as failed.
unsafe impl Domain for ViommuDomain {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        self.state.lock().geometry.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        self.send_maps(maps)
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        self.send_unmaps(ranges, gather)
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        match work {
            Work::Map(_) => self.begin_sync(),
            Work::Unmap { .. } => self.begin_unmaps(),
            Work::All => {
                self.unmap_again()?;
                self.begin_unmaps()
            }
        }
    }

    fn sync_poll(
        &self,
        token: SyncToken,
        work: Work<'_>,
        failed: &mut dyn FnMut(Range, Error),
    ) -> bool {
        let flushed = match self.driver.poll(seq_of(token)) {
            Ok(false) => return false,
            Ok(true) => self.flushed(token),
            Err(gone) => Err(gone),
        };
        if let Err(error) = flushed {
            failed(Range::ALL, error);
        }
        let mut state = self.settled();
        match work {
            Work::Map(ranges) => state.report_maps(ranges, failed),
            Work::Unmap { ranges, exact } => {
                state.failed_unmaps.report("unmap", ranges, exact, failed);
            }
            Work::All => state.failed_unmaps.report("unmap", &[Range::ALL], false, failed),
        }
        true
    }

    fn sync_wait(&self, token: SyncToken) {
        // `sync_poll` reports a device that is gone.
        let _ = self.driver.wait_for(seq_of(token));
    }

    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        let (range, mapping) = self.settled().shadow.find(iova)?;
        mapping.target.checked_add(iova.0 - range.first().0)
    }
}

impl Drop for ViommuDomain {
    fn drop(&mut self) {
        let mut state = self.settled();
        while let Some(&(endpoint, _)) = state.endpoints.first() {
            // The number may be used again only if the device has destroyed the domain.
            if self.leave(&mut state, endpoint).is_err() {
                return;
            }
        }
        drop(state);
        self.driver.close(self.id);
    }
}
