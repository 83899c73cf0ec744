//! The virtio-iommu of a guest, from its first front end to the last.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use parking_lot::Mutex;
use ringfence_mem::Memory;
use ringfence_run::worker::Worker;
use ringfence_vhost_user::HandlerError;
use ringfence_vhost_user_backend::Shares;
use ringfence_virtio_iommu::device::{Completions, Counters, Device, DeviceConfig};
use ringfence_virtq::F_ACCESS_PLATFORM;

use super::{
    Endpoints,
    faults::Reported,
    reach::Shared,
    unit::{INVALIDATION_TIMEOUT, IommuUnit},
};

/// A virtio-iommu as it is set up.
#[derive(Default)]
pub struct IommuOptions {
    /// What the device offers.
    pub device: DeviceConfig,
    /// The number of its unit among the worker's.
    pub unit: u32,
}

/// A virtio-iommu. Its front ends come and go, one at a time, and while there is none all endpoints
/// are blocked: no driver defines what they may reach.
pub struct Iommu {
    pub(super) device: Arc<Device<Endpoints>>,
    pub(super) reported: Arc<Reported>,
    pub(super) shares: Shares<FrontUnit>,
    pub(super) state: Mutex<State>,
}

/// The rings of a front end.
pub(super) type FrontUnit = IommuUnit<Endpoints, Shared>;

/// What the front ends of the IOMMU and of the devices behind it have to agree on.
#[derive(Default)]
pub(super) struct State {
    /// What has become of the request queue.
    pub(super) requests: Requests,
    /// Completions of an earlier process, until the request queue goes on.
    pub(super) completed: Completions,
    /// Whether a later process takes over the state.
    pub(super) handed_over: bool,
    /// The memory that each connection brought, by its number.
    memories: BTreeMap<u64, Arc<Memory>>,
    next_client: u64,
    /// What the units of earlier front ends have counted.
    past: Counters,
}

/// What has become of the request queue of the front end that is there.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Requests {
    /// It has not run since the device was reset.
    #[default]
    Reset,
    Running,
    /// It was stopped at this index, and may go on.
    Stopped(u32),
    /// It ran in an earlier process, and may go on.
    Left,
}

/// What an IOMMU has done and holds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct IommuFigures {
    /// What its request queue has done.
    pub requests: Counters,
    /// How many domains there are.
    pub domains: usize,
    /// How many mappings they hold.
    pub mappings: u64,
    /// The bytes of their tables.
    pub table_bytes: u64,
    /// How many accesses of each endpoint were refused.
    pub faults: Vec<(u32, u64)>,
    /// How many faults found no room, and were not reported to the driver.
    pub dropped_faults: u64,
}

impl Iommu {
    /// An IOMMU for `endpoints`. Its rings are served by the first of `workers`, which there must
    /// be.
    ///
    /// # Panics
    /// If there is no worker, or no descriptor is left.
    pub fn new(
        endpoints: Arc<Endpoints>,
        options: IommuOptions,
        workers: Arc<[Worker]>,
    ) -> Arc<Iommu> {
        let IommuOptions { device, unit } = options;
        let reported = Reported::of(&endpoints).expect("a descriptor for fault reports");
        // Before the first front end there is nothing to block yet.
        endpoints.shut().expect("no endpoint is bound");
        let device = Arc::new(Device::new(endpoints, device));
        let (shares, state) = (Shares::new(workers, unit), Mutex::default());
        Arc::new(Iommu { device, reported, shares, state })
    }

    /// What it has done and holds.
    pub fn figures(&self) -> IommuFigures {
        let now = self.shares.on(0, |unit| unit.counters()).ok().flatten().unwrap_or_default();
        let requests = self.state.lock().past + now;
        let endpoints = self.device.backing();
        IommuFigures {
            requests,
            domains: self.device.domains(),
            mappings: endpoints.mappings(),
            table_bytes: endpoints.budget().table_bytes(),
            faults: self.reported.by_endpoint(),
            dropped_faults: self.reported.faults.dropped(),
        }
    }

    /// A connection of a device behind this IOMMU, or of its own front end.
    pub fn client(self: &Arc<Self>) -> IommuClient {
        let mut state = self.state.lock();
        state.next_client += 1;
        IommuClient { iommu: Arc::clone(self), number: state.next_client }
    }

    /// The request queue is about to start, at this place of its ring, or `at_used`, where an
    /// earlier process has left it; returns that process's completions. Unless it goes on where it was
    /// stopped or left, the driver is a new one, for which no endpoint is attached (rule V4): front
    /// ends that reset a device only stop its rings.
    ///
    /// # Errors
    /// I/O under way does not end.
    pub(super) fn requests_start(
        &self,
        base: u32,
        at_used: bool,
        features: u64,
    ) -> Result<Completions, HandlerError> {
        let mut state = self.state.lock();
        let completed = std::mem::take(&mut state.completed);
        let goes_on = match state.requests {
            Requests::Stopped(at) => at_used || base != 0 && base == at,
            // Its connection goes on, wherever the ring stood: also at 0, after 2^16 requests.
            Requests::Left => true,
            Requests::Reset | Requests::Running => false,
        };
        if !goes_on {
            self.reset()?;
            self.device.set_features(features);
        }
        self.note(&mut state, Requests::Running);
        Ok(if goes_on { completed } else { Completions::default() })
    }

    /// The request queue was stopped.
    pub(super) fn requests_stopped(&self, next: u32) {
        self.note(&mut self.state.lock(), Requests::Stopped(next));
    }

    /// The front end resets the device.
    ///
    /// # Errors
    /// I/O under way does not end.
    pub(super) fn front_end_resets(&self) -> Result<(), HandlerError> {
        let mut state = self.state.lock();
        self.reset()?;
        self.note(&mut state, Requests::Reset);
        Ok(())
    }

    /// The front end is gone: its driver's mappings are void, and nothing is reachable until there
    /// is another front end.
    pub(super) fn front_end_gone(&self, client: u64) {
        let handed_over = self.state.lock().handed_over;
        if handed_over {
            // Nothing is unmapped any more in this process, and the devices finish what they have under way.
            self.device.leave_journal();
        } else {
            if let Err(error) = self.device.backing().shut() {
                tracing::error!(source = %"iommu", "an endpoint could not be blocked: {error}");
            }
            if self.state.lock().memories.keys().any(|&other| other != client) {
                tracing::warn!(source = %"iommu", "its front end is gone: the devices behind it reach nothing now");
            }
        }
        let unit = self.shares.unit();
        let counted = self.shares.on_worker(0, move |work| {
            let counters = work.unit::<FrontUnit>(unit).map(|unit| unit.counters());
            drop(work.remove(unit));
            counters
        });
        let mut state = self.state.lock();
        state.past = state.past + counted.ok().flatten().unwrap_or_default();
        if !handed_over {
            if let Err(error) = self.reset_system() {
                tracing::error!(source = %"iommu", "{error}");
            }
            self.note(&mut state, Requests::Reset);
        }
    }

    fn reset(&self) -> Result<(), HandlerError> {
        self.device.reset()?;
        self.settle()
    }

    fn reset_system(&self) -> Result<(), HandlerError> {
        self.device.system_reset()?;
        self.settle()
    }

    /// When a reset is acknowledged to the front end, nothing is reachable any more (rule V4), and
    /// older faults are dropped: their driver is gone.
    fn settle(&self) -> Result<(), HandlerError> {
        if !in_time(|| self.device.backing().is_settled()) {
            return Err(HandlerError::new("I/O under way does not end"));
        }
        self.reported.faults.clear();
        Ok(())
    }
}

/// A connection of an [`Iommu`]'s guest: of a device behind it, or of its own front end.
pub struct IommuClient {
    pub(super) iommu: Arc<Iommu>,
    pub(super) number: u64,
}

impl IommuClient {
    /// The memory that the connection brings. All connections must belong to the same guest: a
    /// mapping names guest-physical memory, which must be the same for every device.
    ///
    /// # Errors
    /// It belongs to another guest than that of the other connections.
    pub fn set_memory(&self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        let mut state = self.iommu.state.lock();
        let mut others = state.memories.iter().filter(|&(&of, _)| of != self.number);
        if others.any(|(_, other)| !other.agrees_with(memory)) {
            let why = "this is not the memory of the guest whose IOMMU it is: one guest at a time";
            tracing::warn!(source = %"iommu", "{why}");
            return Err(HandlerError::new(why));
        }
        state.memories.insert(self.number, Arc::clone(memory));
        Ok(())
    }

    /// The features that the driver of a device behind the IOMMU has accepted.
    ///
    /// # Errors
    /// `VIRTIO_F_ACCESS_PLATFORM` is not among them: its addresses would not be translated.
    pub fn set_features(&self, features: u64) -> Result<(), HandlerError> {
        if features & F_ACCESS_PLATFORM == 0 {
            let why = "VIRTIO_F_ACCESS_PLATFORM is needed: this device is behind an IOMMU";
            tracing::warn!(source = %"iommu", "{why}");
            return Err(HandlerError::new(why));
        }
        Ok(())
    }

    /// A ring of the device is about to start. If the request queue was stopped and does not run
    /// again by then, the guest was reset, and so the IOMMU is, too: the firmware uses its disk
    /// before there is a driver for the IOMMU. (A guest that was paused goes on with the IOMMU
    /// first, as the VMM has made it first.)
    ///
    /// # Errors
    /// The guest was reset, and I/O under way does not end.
    pub fn ring_starts(&self) -> Result<(), HandlerError> {
        let mut state = self.iommu.state.lock();
        // With a successor no guest was reset; and a queue left by an earlier process goes on, in
        // whichever order rings start.
        if !state.handed_over && matches!(state.requests, Requests::Stopped(_)) {
            tracing::info!(source = %"iommu", "the guest was reset");
            self.iommu.reset_system()?;
            self.iommu.note(&mut state, Requests::Reset);
        }
        Ok(())
    }
}

impl Drop for IommuClient {
    fn drop(&mut self) {
        self.iommu.state.lock().memories.remove(&self.number);
    }
}

/// Waits until `come` returns true; false if that takes longer than `INVALIDATION_TIMEOUT`.
pub(super) fn in_time(come: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + INVALIDATION_TIMEOUT;
    while !come() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[cfg(test)]
mod tests {
    use ringfence_iommu::{
        Domain, Geometry, GuestPhys, HostAddr, Iova, PageSizes, Range, SoftDomain,
        shootdown::Shootdown, table::Limits,
    };
    use ringfence_iommu_testing::{Faulty, Kind, Stage, When};
    use ringfence_run::worker::Notify;
    use ringfence_virtio_iommu::{
        device::{HostRegion, Mirror, Session},
        wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, TAIL_LEN},
    };

    use super::*;

    #[test]
    fn no_ring_starts_before_a_reset_that_failed_was_done_again() {
        // rule V4
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let soft = SoftDomain::new(geometry.clone(), Limits::NONE, Shootdown::new(0));
        let far = Arc::new(Faulty::new(soft, 0));
        let guest = (GuestPhys(0), GuestPhys(0xffff));
        let memory = [HostRegion { guest, host: HostAddr(0x10_0000) }];
        let endpoints = Endpoints::new([], Shootdown::new(1), geometry, Limits::NONE);
        // SAFETY: no device reaches it: it is pretended.
        let mirror = unsafe { Mirror::new(far.clone(), memory, false) };
        endpoints.add_outside(1, mirror, &[]).unwrap();
        let options = IommuOptions { device: DeviceConfig::default(), unit: 0 };
        let workers = Arc::new([Worker::spawn("test", Notify::Sleep).unwrap()]);
        let iommu = Iommu::new(Arc::new(endpoints), options, workers);
        let _front_end = iommu.connect();
        iommu.requests_start(0, false, iommu.device.features().bits()).unwrap();
        let range = Range::new(Iova(0x1000), Iova(0x1fff)).unwrap();
        for request in [
            Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() },
            Request::Map(MapRequest { domain: 1, range, phys: 0, flags: MapFlags::READ }),
        ] {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let len = request.emit(&mut bytes);
            iommu.device.handle(&mut Session::new(), &bytes[..len], &mut [0; TAIL_LEN]);
        }
        let reached = || far.iova_to_phys(range.first()).is_some();
        assert!(reached());
        iommu.requests_stopped(2);
        far.inject(Kind::Unmap, When::Always, Stage::Before);
        let client = iommu.client();
        for _ in 0..2 {
            assert!(client.ring_starts().is_err() && reached());
        }
        far.clear();
        client.ring_starts().unwrap();
        assert!(!reached());
    }
}
