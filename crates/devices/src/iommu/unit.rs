//! A worker's share of a virtio-iommu: its rings.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_run::worker::{Kick, Unit, Worker};
use ringfence_virtio_iommu::device::{
    Answers, Backing, Counters, Device, EventQueue, FaultQueue, Progress, RequestQueue,
};
use ringfence_virtq::{RingError, device};

use super::reach::Reach;

/// How long invalidations may hold up the end of a ring, or a reset. They wait for I/O under way,
/// and some disks never answer.
pub(super) const INVALIDATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Interrupts the driver.
pub(super) type Call = Arc<dyn Fn() + Send + Sync>;

/// One ring and its notifications.
struct Ring<Q> {
    queue: Q,
    kick: Option<Kick>,
    enabled: bool,
    failed: bool,
}

impl<Q> Ring<Q> {
    fn found(&self, progress: &Progress) {
        if let Some(kick) = &self.kick {
            kick.found(progress.published);
        }
    }
}

/// The rings of a virtio-iommu: requests and events.
pub(super) struct IommuUnit<B: Backing, R> {
    device: Arc<Device<B>>,
    faults: Arc<FaultQueue>,
    reach: R,
    requests: Option<Ring<RequestQueue<B>>>,
    events: Option<Ring<EventQueue>>,
    calls: [Option<Call>; 2],
    /// Written when a fault was reported, perhaps by another worker.
    reported: Arc<OwnedFd>,
    /// Whether replies wait for an invalidation.
    pending: bool,
    /// Since when they do, and when to look again, by the monotonic clock: once they wait for long.
    waits: Option<(u64, u64)>,
    past: Counters,
}

/// An invalidation that takes longer waits for a disk that has the guest's memory. One that waits
/// only for other workers takes less, and the worker stays awake for it.
const LONG_NS: u64 = 200_000;

/// The most that the end of such an invalidation is noticed late, unless the disk is this worker's own,
/// which it wakes.
const LOOK_NS: u64 = 1_000_000;

/// The worker is gone.
pub(super) struct NoWorker;

/// The number of the request queue.
pub(super) const REQUESTS: u16 = 0;
/// The number of the event queue.
pub(super) const EVENTS: u16 = 1;

impl<B: Backing + 'static, R: Reach> IommuUnit<B, R> {
    /// A unit without rings yet. After a report to `faults`, `reported` must be written.
    pub(super) fn new(
        device: Arc<Device<B>>,
        faults: Arc<FaultQueue>,
        reported: Arc<OwnedFd>,
        reach: R,
    ) -> IommuUnit<B, R> {
        IommuUnit {
            device,
            faults,
            reach,
            requests: None,
            events: None,
            calls: [None, None],
            reported,
            pending: false,
            waits: None,
            past: Counters::default(),
        }
    }

    /// Starts ring 0 (requests) or 1 (events); `at_used`: at its used index. Requests in the ring
    /// that another process has carried out get the answers in `answered`.
    ///
    /// # Errors
    /// The ring cannot be reached or makes no sense.
    pub(super) fn start(
        &mut self,
        ring: u16,
        config: device::RingConfig,
        at_used: bool,
        answered: Answers,
        kick: Option<Kick>,
        enabled: bool,
    ) -> Result<(), RingError> {
        let mut queue = match at_used {
            false => device::Queue::postponed(config)?,
            true => device::Queue::postponed_at_used(config)?,
        };
        queue.revalidate(self.reach.rings())?;
        if ring == REQUESTS {
            let mut queue = RequestQueue::resume(Arc::clone(&self.device), queue, answered);
            queue.queue().suppress_kicks();
            self.requests = Some(Ring { queue, kick, enabled, failed: false });
            self.pending = false;
        } else {
            let mut queue = EventQueue::new(Arc::clone(&self.faults), queue);
            queue.queue().suppress_kicks();
            self.events = Some(Ring { queue, kick, enabled, failed: false });
        }
        Ok(())
    }

    /// Stops a ring; returns the next available index, and the kick descriptor, to be dropped
    /// elsewhere.
    pub(super) fn stop(&mut self, ring: u16) -> Option<(u32, Option<Kick>)> {
        if ring == REQUESTS {
            let mut stopped = self.requests.take()?;
            self.past = self.counters_with(&stopped.queue);
            self.pending = false;
            Some((stopped.queue.queue().next_avail(), stopped.kick))
        } else {
            let mut stopped = self.events.take()?;
            Some((stopped.queue.queue().next_avail(), stopped.kick))
        }
    }

    /// [Stops](Self::stop) a ring of unit `number` of `worker`, once every reply is given that can be: the
    /// driver waits for it. Whether some are lost, too, as I/O under way does not end. `None` if there
    /// is no such ring.
    ///
    /// # Errors
    /// The worker is gone.
    pub(super) fn stop_on(
        worker: &Worker,
        number: u32,
        ring: u16,
    ) -> Result<Option<(u32, bool)>, NoWorker> {
        let deadline = Instant::now() + INVALIDATION_TIMEOUT;
        loop {
            let late = Instant::now() >= deadline;
            let stop = move |unit: &mut Self| match unit.is_pending(ring) {
                true if !late => None,
                lost => Some(unit.stop(ring).map(|stopped| (stopped, lost))),
            };
            let stopped = worker.call(move |work| work.unit::<Self>(number).map(stop));
            match stopped.ok_or(NoWorker)? {
                Some(Some(stopped)) => return Ok(stopped.map(|((next, _), lost)| (next, lost))),
                Some(None) => std::thread::yield_now(),
                None => return Ok(None),
            }
        }
    }

    /// Notes at what time replies wait, or that they do not; whether they have for long.
    fn has_waited_long(&mut self, now_ns: u64) -> bool {
        if !self.pending {
            self.waits = None;
            return false;
        }
        let (since, look) = self.waits.get_or_insert((now_ns, now_ns));
        let waited = now_ns.saturating_sub(*since);
        // An eighth longer, so that the wait is not much longer than what is waited for.
        *look = now_ns + (waited / 8).min(LOOK_NS);
        waited >= LONG_NS
    }

    /// Whether replies of this ring wait for an invalidation to be over: they are lost if it is
    /// stopped now.
    fn is_pending(&self, ring: u16) -> bool {
        ring == REQUESTS && self.pending
    }

    /// Lets a ring work, or not.
    pub(super) fn enable(&mut self, ring: u16, enabled: bool) {
        match ring {
            REQUESTS => self.requests.iter_mut().for_each(|ring| ring.enabled = enabled),
            _ => self.events.iter_mut().for_each(|ring| ring.enabled = enabled),
        }
    }

    /// Replaces what a ring's interrupts go to.
    pub(super) fn set_call(&mut self, ring: u16, call: Option<Call>) {
        if let Some(held) = self.calls.get_mut(usize::from(ring)) {
            *held = call;
        }
    }

    /// Replaces the memory under the running rings. A ring that is not in the new memory stops.
    pub(super) fn set_reach(&mut self, reach: R) {
        self.reach = reach;
        self.revalidate();
    }

    fn revalidate(&mut self) {
        let rings = self.reach.rings();
        if let Some(ring) = self.requests.as_mut().filter(|ring| !ring.failed)
            && let Err(error) = ring.queue.queue().revalidate(rings)
        {
            tracing::warn!(source = %"iommu", "request queue stopped: {error}");
            ring.failed = true;
            self.pending = false;
        }
        if let Some(ring) = self.events.as_mut().filter(|ring| !ring.failed)
            && let Err(error) = ring.queue.queue().revalidate(rings)
        {
            tracing::warn!(source = %"iommu", "event queue stopped: {error}");
            ring.failed = true;
        }
    }

    /// What all request rings have done, those that are gone included.
    pub(super) fn counters(&self) -> Counters {
        self.requests.as_ref().map_or(self.past, |ring| self.counters_with(&ring.queue))
    }

    fn counters_with(&self, queue: &RequestQueue<B>) -> Counters {
        sum(self.past, queue.counters())
    }

    fn interrupt(&self, ring: u16) {
        if let Some(call) = &self.calls[usize::from(ring)] {
            call();
        }
    }
}

/// Marks the used ring, before its entries are published. (Enabling kicks writes to it too; a
/// successor that goes on with the ring enables them again.)
fn mark_used(reach: &impl Reach, progress: &Progress, queue: &device::Queue) {
    if progress.published > 0 {
        let [_, _, (used, len, _)] = queue.config().areas();
        reach.mark_ring(used, len);
    }
}

impl<B: Backing + 'static, R: Reach> Unit for IommuUnit<B, R> {
    fn poll(&mut self, now_ns: u64) -> bool {
        let (mut requests, mut buffers) = (usize::MAX, usize::MAX);
        if R::CHANGES {
            // Requests that are there now lie in the current memory. Later ones may not.
            let mem = self.reach.buffers();
            requests = self.requests.as_mut().map_or(0, |ring| ring.queue.ready(mem));
            buffers = self.events.as_mut().map_or(0, |ring| ring.queue.ready(mem));
        }
        if self.reach.refresh() {
            self.revalidate();
        }
        let mut busy = false;
        if let Some(ring) = &mut self.requests
            // Requests that were carried out are answered, enabled or not.
            && (ring.enabled || self.pending)
            && !ring.failed
        {
            match ring.queue.poll_some(self.reach.buffers(), requests) {
                Ok(progress) => {
                    busy |= !progress.is_idle();
                    ring.found(&progress);
                    self.pending = progress.pending;
                    mark_used(&self.reach, &progress, ring.queue.queue());
                    if progress.interrupt {
                        self.interrupt(REQUESTS);
                    }
                }
                Err(error) => {
                    tracing::warn!(source = %"iommu", "request queue stopped: {error}");
                    ring.failed = true;
                    self.pending = false;
                }
            }
        }
        busy |= !self.has_waited_long(now_ns) && self.pending;
        if let Some(ring) = &mut self.events
            && ring.enabled
            && !ring.failed
            && self.faults.waiting() > 0
        {
            match ring.queue.poll_some(self.reach.buffers(), buffers) {
                Ok(progress) => {
                    busy |= !progress.is_idle();
                    ring.found(&progress);
                    mark_used(&self.reach, &progress, ring.queue.queue());
                    if progress.interrupt {
                        self.interrupt(EVENTS);
                    }
                }
                Err(error) => {
                    tracing::warn!(source = %"iommu", "event queue stopped: {error}");
                    ring.failed = true;
                }
            }
        }
        busy
    }

    fn wants_quiet(&self) -> bool {
        self.pending
    }

    fn next_due(&self) -> Option<u64> {
        self.waits.map(|(_, look)| look)
    }

    fn arm(&mut self) -> bool {
        let mut more = false;
        // No further request is taken while replies wait.
        if let Some(ring) = self.requests.as_mut().filter(|ring| ring.enabled && !ring.failed)
            && !self.pending
        {
            more |= ring.queue.queue().enable_kicks();
        }
        // Faults that wait have found no buffer.
        if let Some(ring) = self.events.as_mut().filter(|ring| ring.enabled && !ring.failed)
            && self.faults.waiting() > 0
        {
            more |= ring.queue.queue().enable_kicks();
        }
        more
    }

    fn disarm(&mut self) {
        if let Some(ring) = &mut self.requests
            && !ring.failed
        {
            ring.queue.queue().suppress_kicks();
        }
        if let Some(ring) = &mut self.events
            && !ring.failed
        {
            ring.queue.queue().suppress_kicks();
        }
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push(self.reported.as_fd());
    }

    fn kicks<'a>(&'a self, into: &mut Vec<&'a Kick>) {
        let requests = self.requests.as_ref().and_then(|ring| ring.kick.as_ref());
        let events = self.events.as_ref().and_then(|ring| ring.kick.as_ref());
        into.extend(requests.into_iter().chain(events));
    }
}

/// What two units have counted together.
pub(super) fn sum(a: Counters, b: Counters) -> Counters {
    Counters {
        maps: a.maps + b.maps,
        unmaps: a.unmaps + b.unmaps,
        others: a.others + b.others,
        refused: a.refused + b.refused,
        syncs: a.syncs + b.syncs,
    }
}
