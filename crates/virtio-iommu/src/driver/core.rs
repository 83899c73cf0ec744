//! One driver per device: its request queue, its configuration, its domain numbers.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use ringfence_iommu::{Error, Iova, Range, ReservedKind, ReservedRegion, Result};
use ringfence_mem::{PAGE_SIZE, Window};
use ringfence_virtq::driver::Queue;

use super::{
    Histogram, HistogramSnapshot, Notify, Transport,
    report::{Reports, Sent},
    retired::Retired,
    ring::{Ring, SLOT, probe_bytes, slots},
};
use crate::wire::{Features, IommuConfig, Properties, Request, Status};

/// The features that this driver accepts of those on `offer` (the whole 64 bits or the device
/// type's): all but the old BYPASS (rule [V31]).
///
/// [V31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v31
pub fn negotiate(offer: u64) -> Features {
    Features::from_bits_truncate(offer).difference(Features::BYPASS | Features::PROPOSED)
}

/// As [`negotiate`], with those of `proposed` that are not part of the specification
/// ([`Features::PROPOSED`]).
pub fn negotiate_proposed(offer: u64, proposed: Features) -> Features {
    let proposed = proposed.intersection(Features::PROPOSED);
    negotiate(offer) | Features::from_bits_truncate(offer).intersection(proposed)
}

/// Shared memory for requests and replies.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The memory: at least [`Driver::buffer_bytes`].
    pub window: Window,
    /// Where the device sees it.
    pub addr: u64,
}

/// How a driver behaves. Default: adaptive, no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverConfig {
    /// How threads wait for the device.
    pub notify: Notify,
    /// How long a device may complete no request before it counts as gone; `None` for as long as
    /// its [transport](Transport::is_alive) lives. An UNMAP is completed when no access can follow,
    /// which may take as long as a disk that uses the memory: a limit is for transports that cannot
    /// detect whether the device is there.
    pub timeout: Option<Duration>,
}

/// The driver of one virtio-iommu.
///
/// The driver gives up a device that breaks the ring, whose transport is gone, or that completes
/// nothing for [`DriverConfig::timeout`](DriverConfig#structfield.timeout), if there is one: from
/// then on everything that needs the device fails with [`Error::Gone`].
pub struct Driver {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) ring: Mutex<Ring>,
    pub(super) retired: Retired,
    /// Whether a thread waits for the device's notification.
    pub(super) led: Mutex<bool>,
    pub(super) changed: Condvar,
    pub(super) failed: OnceLock<&'static str>,
    pub(super) options: DriverConfig,
    pub(super) kicks: AtomicU64,
    config: IommuConfig,
    features: Features,
    numbers: Mutex<Numbers>,
    /// The domain of each attached endpoint.
    attached: Mutex<HashMap<u32, u32>>,
    /// PROBE's memory is one request's at a time.
    probing: Mutex<()>,
    syncs: AtomicU64,
    ring_full: AtomicU64,
    sync_wait_ns: Histogram,
}

/// The domain numbers: those never used and those given back.
#[derive(Debug)]
struct Numbers {
    /// How many there are in all.
    limit: u64,
    fresh: core::ops::RangeInclusive<u32>,
    returned: Vec<u32>,
}

impl fmt::Debug for Driver {
    ringfence_sync::shows!(
        Driver as it, features: it.features, config: it.config, failed: it.failed()
    );
}

impl Driver {
    /// The bytes of shared memory that a request queue of `size` descriptors needs for its
    /// requests.
    pub fn buffer_bytes(size: u16, config: &IommuConfig) -> usize {
        slots(size) * SLOT + probe_bytes(config.probe_size as usize)
    }

    /// A driver for a device with `config` and the negotiated `features`, over its request queue.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: the granule is larger than a page (rule [L66]), a queue of one
    /// descriptor, or `buffers` is too small or passes the end of the device's addresses.
    ///
    /// [L66]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l66
    pub fn new(
        transport: Arc<dyn Transport>,
        queue: Queue,
        buffers: Buffers,
        config: IommuConfig,
        features: Features,
        options: DriverConfig,
    ) -> Result<Arc<Driver>> {
        if config.page_sizes.granule() > PAGE_SIZE as u64 {
            return Err(Error::Unsupported("the granule is larger than a page"));
        }
        if slots(queue.size()) == 0 {
            return Err(Error::Unsupported("a request takes two descriptors"));
        }
        let needed = Self::buffer_bytes(queue.size(), &config);
        if buffers.window.len() < needed || buffers.addr.checked_add(needed as u64).is_none() {
            return Err(Error::Unsupported(
                "buffers of fewer than Driver::buffer_bytes, or past the device's addresses",
            ));
        }
        let fresh = match features.contains(Features::DOMAIN_RANGE) {
            true => config.domain_range.0..=config.domain_range.1,
            false => 0..=u32::MAX,
        };
        let limit = fresh.size_hint().0 as u64;
        let mut ring = Ring::new(queue, buffers.window, buffers.addr);
        ring.queue().suppress_notifications();
        Ok(Arc::new(Driver {
            transport,
            ring: Mutex::new(ring),
            retired: Retired::default(),
            led: Mutex::new(false),
            changed: Condvar::new(),
            failed: OnceLock::new(),
            options,
            kicks: AtomicU64::new(0),
            config,
            features,
            numbers: Mutex::new(Numbers { limit, fresh, returned: Vec::new() }),
            attached: Mutex::new(HashMap::new()),
            probing: Mutex::new(()),
            syncs: AtomicU64::new(0),
            ring_full: AtomicU64::new(0),
            sync_wait_ns: Histogram::default(),
        }))
    }

    /// Requests the properties of an endpoint: its reserved regions.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without PROBE; [`Error::Device`] if the device refuses it.
    pub fn probe(&self, endpoint: u32) -> Result<Vec<ReservedRegion>> {
        if !self.features.contains(Features::PROBE) {
            return Err(Error::Unsupported("the device offers no PROBE"));
        }
        let _one_at_a_time = self.probing.lock();
        let size = self.config.probe_size as usize;
        let seq = self.put(|ring| ring.submit_probe(endpoint, size))?;
        self.result("name the reserved regions of", seq)?;
        let bytes = self.ring()?.properties(size);
        Ok(Properties::new(&bytes).collect())
    }

    /// The regions of an endpoint that are not for mapping, in ascending order, from PROBE if there
    /// is one; and, if the device names no window for MSIs, the one that Linux uses: 1 MiB at
    /// 0x800_0000 (rule [L66]).
    ///
    /// # Errors
    /// As [`probe`](Self::probe), except that PROBE is not required.
    ///
    /// [L66]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l66
    pub fn reserved_regions(&self, endpoint: u32) -> Result<Vec<ReservedRegion>> {
        let mut regions = self.probed_regions(endpoint)?;
        add_software_msi(&mut regions);
        Ok(regions)
    }

    /// The regions that the device itself names, in ascending order.
    pub(super) fn probed_regions(&self, endpoint: u32) -> Result<Vec<ReservedRegion>> {
        if !self.features.contains(Features::PROBE) {
            return Ok(Vec::new());
        }
        let mut regions = self.probe(endpoint)?;
        regions.sort_by_key(|region| region.range);
        Ok(regions)
    }

    /// Sets whether endpoints that are attached to nothing bypass the IOMMU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without BYPASS_CONFIG (rule [V32]). Otherwise the transport's.
    ///
    /// [V32]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v32
    pub fn set_bypass(&self, bypass: bool) -> Result<()> {
        if !self.features.contains(Features::BYPASS_CONFIG) {
            return Err(Error::Unsupported("the device has no bypass to set"));
        }
        self.transport.set_bypass(bypass)
    }

    /// The negotiated features.
    pub fn features(&self) -> Features {
        self.features
    }

    /// The configuration as it was when the driver was made.
    pub fn config(&self) -> &IommuConfig {
        &self.config
    }

    /// Why the driver gave up on the device, if it did.
    pub fn failed(&self) -> Option<Error> {
        self.failed.get().map(|why| Error::Gone(why))
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let counts = self.ring.lock().counts;
        Stats {
            maps: counts.maps,
            unmaps: counts.unmaps,
            others: counts.others,
            syncs: self.syncs.load(Ordering::Relaxed),
            ring_full: self.ring_full.load(Ordering::Relaxed),
            kicks: self.kicks.load(Ordering::Relaxed),
            errors: counts.errors,
            sync_wait_ns: self.sync_wait_ns.snapshot(),
        }
    }

    /// Puts a request into the ring if there is room, without a kick (rule L64); its number.
    #[inline]
    pub(super) fn try_send(&self, request: &Request, sent: Sent) -> Result<Option<u64>> {
        let mut ring = self.ring()?;
        if let Some(seq) = ring.submit(request, sent) {
            return Ok(Some(seq));
        }
        // The device may have completed requests that no thread has reaped yet.
        self.reap(&mut ring)?;
        Ok(ring.submit(request, sent))
    }

    /// Waits until there is room in the ring.
    pub(super) fn make_room(&self) -> Result<()> {
        self.ring_full.fetch_add(1, Ordering::Relaxed);
        self.drain()
    }

    /// As [`try_send`](Self::try_send), waiting for room.
    pub(super) fn send(&self, request: &Request, sent: Sent) -> Result<u64> {
        self.put(|ring| ring.submit(request, sent))
    }

    fn put(&self, mut submit: impl FnMut(&mut Ring) -> Option<u64>) -> Result<u64> {
        loop {
            if let Some(seq) = submit(&mut *self.ring()?) {
                return Ok(seq);
            }
            self.make_room()?;
        }
    }

    /// Sends a request and waits for its reply; `operation` is for the error.
    pub(super) fn call(&self, operation: &'static str, request: &Request) -> Result<()> {
        let seq = self.send(request, Sent::Sync)?;
        self.result(operation, seq)
    }

    /// Waits for the reply to the request `seq`, sent as [`Sent::Sync`].
    pub(super) fn result(&self, operation: &'static str, seq: u64) -> Result<()> {
        self.drain()?;
        let status = self.ring()?.result(seq);
        refused(operation, status.ok_or(Error::Gone("a reply was lost"))?)
    }

    /// As [`begin`](Self::begin), for a sync point.
    pub(super) fn begin_sync(&self) -> Result<u64> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        self.begin()
    }

    /// As [`wait_until`](Self::wait_until), for a sync point.
    pub(super) fn wait_for(&self, seq: u64) -> Result<()> {
        let start = Instant::now();
        let result = self.wait_until(seq);
        self.sync_wait_ns.record(start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX));
        result
    }

    /// The result of the IOTLB_FLUSH `seq`, which is completed; returned once.
    pub(super) fn flushed(&self, seq: u64) -> Result<()> {
        let status = self.ring()?.result(seq);
        status.map_or(Ok(()), |status| refused("flush", status))
    }

    /// Reserves a domain number; failures of the domain go to `reports`.
    pub(super) fn open(&self, reports: &Arc<Reports>) -> Result<u32> {
        let mut numbers = self.numbers.lock();
        let Some(id) = numbers.returned.pop().or_else(|| numbers.fresh.next()) else {
            let limit = numbers.limit;
            return Err(Error::Full { what: "domains", used: limit, limit });
        };
        self.ring.lock().reports.insert(id, Arc::clone(reports));
        Ok(id)
    }

    /// Gives a domain number back. Nothing of the domain may be in the ring.
    pub(super) fn close(&self, id: u32) {
        self.ring.lock().reports.remove(&id);
        self.numbers.lock().returned.push(id);
    }

    /// Notes that `endpoint` belongs to `domain`.
    pub(super) fn claim(&self, endpoint: u32, domain: u32) -> Result<()> {
        match *self.attached.lock().entry(endpoint).or_insert(domain) {
            held if held == domain => Ok(()),
            _ => Err(Error::Unsupported("the endpoint is attached to another domain")),
        }
    }

    pub(super) fn release(&self, endpoint: u32) {
        self.attached.lock().remove(&endpoint);
    }
}

/// What a driver has done since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// MAP requests sent.
    pub maps: u64,
    /// UNMAP requests sent.
    pub unmaps: u64,
    /// Other requests sent.
    pub others: u64,
    /// Sync points (`iotlb_sync_map`, `iotlb_sync`, `flush_iotlb_all`) of domains with an endpoint.
    pub syncs: u64,
    /// Times a thread found the ring full and had to wait.
    pub ring_full: u64,
    /// Notifications sent to the device.
    pub kicks: u64,
    /// Requests that the device did not complete with OK.
    pub errors: u64,
    /// How long threads waited at sync points, in nanoseconds. A sync that is polled has no value.
    pub sync_wait_ns: HistogramSnapshot,
}

impl Stats {
    /// All requests sent.
    pub fn requests(&self) -> u64 {
        self.maps + self.unmaps + self.others
    }

    /// What was done after `earlier`, taken from the same driver.
    pub fn since(&self, earlier: &Stats) -> Stats {
        Stats {
            maps: self.maps - earlier.maps,
            unmaps: self.unmaps - earlier.unmaps,
            others: self.others - earlier.others,
            syncs: self.syncs - earlier.syncs,
            ring_full: self.ring_full - earlier.ring_full,
            kicks: self.kicks - earlier.kicks,
            errors: self.errors - earlier.errors,
            sync_wait_ns: self.sync_wait_ns.since(&earlier.sync_wait_ns),
        }
    }
}

/// Where Linux puts the window for MSIs if the device names none (rule L66).
const SOFTWARE_MSI: (u64, u64) = (0x800_0000, 1 << 20);

/// Adds the window for MSIs that Linux uses, unless there is one.
pub(super) fn add_software_msi(regions: &mut Vec<ReservedRegion>) {
    if !regions.iter().any(|region| region.kind == ReservedKind::Msi) {
        let (first, len) = SOFTWARE_MSI;
        let range = Range::from_len(Iova(first), len).expect("a legal range");
        regions.push(ReservedRegion { range, kind: ReservedKind::Msi });
        regions.sort_by_key(|region| region.range);
    }
}

/// The error for a status of a request that is not about a range of its own.
fn refused(operation: &'static str, status: u8) -> Result<()> {
    if status == Status::Ok as u8 {
        return Ok(());
    }
    Err(Error::Device { operation, range: Range::ALL, status })
}
