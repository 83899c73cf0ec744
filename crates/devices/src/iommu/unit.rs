//! A worker's share of a virtio-iommu: its rings.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_mem::Translate;
use ringfence_run::worker::{Kick, Unit};
use ringfence_vhost_user::HandlerError;
use ringfence_vhost_user_backend::Shares;
use ringfence_virtio_iommu::device::{
    Backing, Completions, Counters, Device, EventQueue, Progress, RequestQueue,
};
use ringfence_virtq::{RingError, device};

use super::{faults::Reported, reach::Reach};

/// How long invalidations may hold up the end of a ring, or a reset. They wait for I/O under way,
/// and some disks never complete a request.
pub(super) const INVALIDATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Interrupts the driver.
pub(super) type Call = Arc<dyn Fn() + Send + Sync>;

/// One ring and its notifications.
struct Ring<B: Backing> {
    queue: Queue<B>,
    kick: Option<Kick>,
    enabled: bool,
    failed: bool,
    /// It lies in no region of the front end's memory now: one that changes is removed and added again.
    gone: bool,
}

#[allow(clippy::large_enum_variant, reason = "there is one of each")]
enum Queue<B: Backing> {
    Requests(RequestQueue<B>),
    Events(EventQueue),
}

impl<B: Backing> Queue<B> {
    fn ring(&mut self) -> &mut device::Queue {
        match self {
            Queue::Requests(queue) => queue.queue(),
            Queue::Events(queue) => queue.queue(),
        }
    }

    fn ready(&mut self, mem: &impl Translate) -> usize {
        match self {
            Queue::Requests(queue) => queue.ready(mem),
            Queue::Events(queue) => queue.ready(mem),
        }
    }

    fn poll_some(&mut self, mem: &impl Translate, most: usize) -> Result<Progress, RingError> {
        match self {
            Queue::Requests(queue) => queue.poll_some(mem, most),
            Queue::Events(queue) => queue.poll_some(mem, most),
        }
    }
}

impl<B: Backing> Ring<B> {
    fn is_there(&self) -> bool {
        !self.failed && !self.gone
    }

    fn works(&self) -> bool {
        self.enabled && self.is_there()
    }

    /// Stops it; its replies that wait, if it is the request queue, are not `pending` any more.
    fn fail(&mut self, pending: &mut bool, error: &RingError) {
        self.failed = true;
        let name = match self.queue {
            Queue::Requests(_) => {
                *pending = false;
                "request"
            }
            Queue::Events(_) => "event",
        };
        tracing::warn!(source = %"iommu", "{name} queue stopped: {error}");
    }

    fn counters(&self) -> Counters {
        match &self.queue {
            Queue::Requests(queue) => queue.counters(),
            Queue::Events(_) => Counters::default(),
        }
    }
}

/// The rings of a virtio-iommu, by their numbers: requests and events.
pub(super) struct IommuUnit<B: Backing, R> {
    device: Arc<Device<B>>,
    reported: Arc<Reported>,
    reach: R,
    rings: [Option<Ring<B>>; 2],
    calls: [Option<Call>; 2],
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

/// The number of the request queue.
pub(super) const REQUESTS: u16 = 0;
/// The number of the event queue.
const EVENTS: u16 = 1;

impl<B: Backing + 'static, R: Reach> IommuUnit<B, R> {
    /// A unit without rings yet, which delivers what was `reported`.
    pub(super) fn new(
        device: Arc<Device<B>>,
        reported: Arc<Reported>,
        reach: R,
    ) -> IommuUnit<B, R> {
        IommuUnit {
            device,
            reported,
            reach,
            rings: [None, None],
            calls: [None, None],
            pending: false,
            waits: None,
            past: Counters::default(),
        }
    }

    /// Starts ring 0 (requests) or 1 (events); `at_used`: at its used index. Requests in the ring
    /// that another process has carried out get the completions in `completed`.
    ///
    /// # Errors
    /// The ring cannot be reached or makes no sense.
    pub(super) fn start(
        &mut self,
        ring: u16,
        config: device::RingConfig,
        at_used: bool,
        completed: Completions,
        kick: Option<Kick>,
        enabled: bool,
    ) -> Result<(), RingError> {
        let mut queue = match at_used {
            false => device::Queue::postponed(config)?,
            true => device::Queue::postponed_at_used(config)?,
        };
        queue.revalidate(self.reach.rings())?;
        queue.suppress_kicks();
        let queue = match ring {
            REQUESTS => {
                self.pending = false;
                Queue::Requests(RequestQueue::resume(Arc::clone(&self.device), queue, completed))
            }
            _ => Queue::Events(EventQueue::new(Arc::clone(&self.reported.faults), queue)),
        };
        self.rings[usize::from(ring)] =
            Some(Ring { queue, kick, enabled, failed: false, gone: false });
        Ok(())
    }

    /// Stops a ring; returns the next available index, and the kick descriptor, to be dropped
    /// elsewhere.
    fn stop(&mut self, ring: u16) -> Option<(u32, Option<Kick>)> {
        let mut stopped = self.rings[usize::from(ring)].take()?;
        self.past = self.past + stopped.counters();
        self.pending &= ring != REQUESTS;
        Some((stopped.queue.ring().next_avail(), stopped.kick))
    }

    /// [Stops](Self::stop) a ring of the first share, once every reply is given that can be: the driver
    /// waits for it. Whether some are lost, too, as I/O under way does not end. `None` if there
    /// is no such ring.
    ///
    /// # Errors
    /// The worker is gone.
    pub(super) fn stop_on(
        shares: &Shares<Self>,
        ring: u16,
    ) -> Result<Option<(u32, bool)>, HandlerError> {
        let deadline = Instant::now() + INVALIDATION_TIMEOUT;
        loop {
            let late = Instant::now() >= deadline;
            let stop = move |unit: &mut Self| match unit.is_pending(ring) {
                true if !late => None,
                lost => Some(unit.stop(ring).map(|stopped| (stopped, lost))),
            };
            match shares.on(0, stop)? {
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
        self.rings[usize::from(ring)].iter_mut().for_each(|ring| ring.enabled = enabled);
    }

    /// Replaces what a ring's interrupts go to.
    pub(super) fn set_call(&mut self, ring: u16, call: Option<Call>) {
        if let Some(held) = self.calls.get_mut(usize::from(ring)) {
            *held = call;
        }
    }

    /// Replaces the memory under the running rings. A ring that is not in the new memory is left alone until it is
    /// in one again.
    pub(super) fn set_reach(&mut self, reach: R) {
        self.reach = reach;
        self.revalidate();
    }

    fn revalidate(&mut self) {
        for ring in self.rings.iter_mut().flatten().filter(|ring| !ring.failed) {
            let found = ring.queue.ring().revalidate(self.reach.rings());
            ring.gone = matches!(found, Err(RingError::Unreachable { .. }));
            match found {
                Err(error) if !ring.gone => ring.fail(&mut self.pending, &error),
                _ => {}
            }
        }
    }

    /// What all request rings have done, those that are gone included.
    pub(super) fn counters(&self) -> Counters {
        self.rings.iter().flatten().fold(self.past, |past, ring| past + ring.counters())
    }

    /// Whether a ring is served: requests that were carried out are completed, enabled or not, and an
    /// event queue has work while faults wait.
    fn has_work(&self, ring: u16) -> bool {
        self.rings[usize::from(ring)].as_ref().is_some_and(|found| match ring {
            REQUESTS => (found.enabled || self.pending) && found.is_there(),
            _ => found.works() && self.reported.faults.waiting() > 0,
        })
    }

    /// Takes up to `most` chains of a ring; true if anything was done.
    fn serve(&mut self, ring: u16, most: usize) -> bool {
        if !self.has_work(ring) {
            return false;
        }
        let Some(found) = &mut self.rings[usize::from(ring)] else { return false };
        let progress = match found.queue.poll_some(self.reach.buffers(), most) {
            Ok(progress) => progress,
            Err(error) => {
                found.fail(&mut self.pending, &error);
                return false;
            }
        };
        if let Some(kick) = &found.kick {
            kick.found(progress.published);
        }
        if ring == REQUESTS {
            self.pending = progress.pending;
        }
        if progress.published > 0 {
            // (Enabling kicks writes to the used ring too; a successor that goes on with it enables
            // them again.)
            let [_, _, (used, len, _)] = found.queue.ring().config().areas();
            self.reach.mark_ring(used, len);
        }
        if let Some(call) = self.calls[usize::from(ring)].as_ref().filter(|_| progress.interrupt) {
            call();
        }
        !progress.is_idle()
    }
}

impl<B: Backing + 'static, R: Reach> Unit for IommuUnit<B, R> {
    fn poll(&mut self, now_ns: u64) -> bool {
        let mut most = [usize::MAX; 2];
        if R::CHANGES {
            // Requests that are there now lie in the current memory. Later ones may not.
            let mem = self.reach.buffers();
            for (most, ring) in most.iter_mut().zip(&mut self.rings) {
                *most = ring.as_mut().map_or(0, |ring| ring.queue.ready(mem));
            }
        }
        if self.reach.refresh() {
            self.revalidate();
        }
        let mut busy = self.serve(REQUESTS, most[0]);
        busy |= !self.has_waited_long(now_ns) && self.pending;
        self.serve(EVENTS, most[1]) | busy
    }

    fn wants_quiet(&self) -> bool {
        self.pending
    }

    fn next_due(&self) -> Option<u64> {
        self.waits.map(|(_, look)| look)
    }

    fn arm(&mut self) -> bool {
        // No further request is taken while replies wait. Faults that wait have found no buffer.
        let wanted = [!self.pending, self.reported.faults.waiting() > 0];
        let rings = self.rings.iter_mut().zip(wanted).filter(|(_, wanted)| *wanted);
        let rings = rings.filter_map(|(ring, _)| ring.as_mut()).filter(|ring| ring.works());
        rings.fold(false, |more, ring| ring.queue.ring().enable_kicks() | more)
    }

    fn disarm(&mut self) {
        let rings = self.rings.iter_mut().flatten().filter(|ring| ring.is_there());
        rings.for_each(|ring| ring.queue.ring().suppress_kicks());
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push(self.reported.wake.as_fd());
    }

    fn kicks<'a>(&'a self, into: &mut Vec<&'a Kick>) {
        let rings = self.rings.iter().flatten().filter(|ring| !ring.failed);
        into.extend(rings.filter_map(|ring| ring.kick.as_ref()));
    }
}
