//! A worker's share of a device whose rings are of requests.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, atomic::Ordering, mpsc::Sender},
};

use ringfence_iotlb::{Endpoint, View};
use ringfence_mem::{DirtyLog, Memory, Physical, Translate, UserAddresses};
use ringfence_run::{
    event::{Bells, Doorbell},
    notifier::Notifier,
    worker::{Kick, Unit},
};
use ringfence_vhost_user::{HandlerError, RingAddresses};
use ringfence_virtq::RingError;

use super::{QueueError, QueueStats, Reaper, RequestFigures, RequestQueue, Serve};
use crate::{Bus, Change, Rings};

/// A queue that has stopped, and its kick descriptor.
pub type Stopped<S> = (RequestQueue<S>, Option<Kick>);

/// A queue that is served.
pub(super) struct Served<S: Serve> {
    index: u16,
    // Dropped before `kick`, although it does not use it.
    queue: RequestQueue<S>,
    kick: Option<Kick>,
    err: Option<Arc<Notifier>>,
    enabled: bool,
    /// Why it stopped.
    failed: Option<QueueError>,
    /// Set while it stops: takes the queue at the end.
    stopping: Option<Sender<Stopped<S>>>,
    /// The part of its stats that the figures include.
    reported: QueueStats,
}

impl<S: Serve> Served<S> {
    /// A ring's queue, the descriptors of its driver's kicks and of its failure, and whether it may
    /// work at once.
    pub(super) fn new(
        index: u16,
        queue: RequestQueue<S>,
        kick: Option<Kick>,
        err: Option<Arc<Notifier>>,
        enabled: bool,
    ) -> Served<S> {
        let (failed, stopping, reported) = (None, None, QueueStats::default());
        Served { index, queue, kick, err, enabled, failed, stopping, reported }
    }

    fn works(&self) -> bool {
        self.enabled && self.failed.is_none() && self.stopping.is_none()
    }

    /// Stops this queue; all others go on.
    fn fail(&mut self, unit: &Shared<S>, error: QueueError) {
        tracing::warn!(source = %unit.name, "queue {} stopped: {error}", self.index);
        unit.figures.failures.fetch_add(1, Ordering::Relaxed);
        if let Some(err) = &self.err {
            err.notify();
        }
        self.failed = Some(error);
    }

    fn report(&mut self, figures: &RequestFigures<S>) {
        let now = self.queue.stats();
        let more = now.since(self.reported);
        if let Some(kick) = &self.kick {
            kick.found(more.requests as usize);
        }
        figures.add(self.index, more);
        self.reported = now;
    }
}

/// What all queues of a unit share.
struct Shared<S: Serve> {
    name: String,
    figures: Arc<RequestFigures<S>>,
}

/// A worker's share of a device: some of its queues, and the worker's way to memory.
pub struct RequestUnit<S: Serve> {
    // Before the bus: a queue may have I/O under way in the memory that the bus reaches.
    queues: Vec<Served<S>>,
    bus: Bus,
    /// What the bus translates through while there are queues.
    endpoint: Option<Arc<Endpoint>>,
    /// Written by io_uring when something completes, and when a translation comes.
    bell: Arc<Doorbell>,
    /// Ring it when a translation comes.
    bells: Arc<Bells>,
    shared: Shared<S>,
    reaper: Reaper<S>,
    /// Whether no queue was served in the last round.
    held: bool,
}

impl<S: Serve> RequestUnit<S> {
    /// A share without queues, on `memory` as `endpoint` sees it; `bells` wake its worker when a
    /// translation comes. `name` appears in messages.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(
        name: &str,
        endpoint: Option<Arc<Endpoint>>,
        bells: Arc<Bells>,
        memory: &Arc<Memory>,
        figures: Arc<RequestFigures<S>>,
    ) -> io::Result<RequestUnit<S>> {
        Ok(RequestUnit {
            queues: Vec::new(),
            bus: Bus::Physical(Physical::new(Arc::clone(memory))),
            endpoint,
            bell: Arc::new(Doorbell::new()?),
            bells,
            reaper: Reaper::new(&figures),
            held: false,
            shared: Shared { name: name.to_owned(), figures },
        })
    }

    /// Starts a queue. If its addresses are the front end's own, `memory` translates them; a ring
    /// behind an IOMMU need not be mapped yet (rule D21). `start` is taken if it succeeds.
    ///
    /// # Errors
    /// The ring cannot be reached; no descriptor can be registered; too many workers go through the
    /// IOMMU.
    pub(super) fn start(
        &mut self,
        start: &mut Option<Served<S>>,
        memory: &Arc<Memory>,
    ) -> Result<(), QueueError> {
        let Some(Served { queue, .. }) = start else { return Ok(()) };
        if let (Some(endpoint), Bus::Physical(_)) = (&self.endpoint, &self.bus) {
            self.bus = self.through(endpoint).ok_or(QueueError::Readers)?;
        }
        self.bus.set_log(queue.log.log());
        match &self.bus {
            bus if bus.iotlb().is_some() => {}
            // A front end that is refused a ring gives the device up for good. The driver may yet
            // map the ring, like a driver after a firmware that may not use the device (rule D22).
            Bus::Iommu(view) => match view.silently(|| queue.find(&**view)) {
                Err(QueueError::Ring(RingError::Unreachable { .. })) => {}
                found => found.map(|()| queue.note_found(view.bindings()))?,
            },
            Bus::Physical(_) => queue.find(&UserAddresses::new(Arc::clone(memory)))?,
        }
        queue.set_ordered(self.bus.iotlb().is_some() && self.bus.is_logged());
        queue.notify(&self.bell)?;
        queue.disarm();
        self.queues.extend(start.take());
        Ok(())
    }

    /// The way to memory through an IOMMU; `None` if it has no place for another reader.
    fn through(&self, endpoint: &Arc<Endpoint>) -> Option<Bus> {
        let mut view = View::new(Arc::clone(endpoint), Arc::clone(self.bus.memory()))?;
        let (bell, bells) = (Arc::clone(&self.bell), Arc::clone(&self.bells));
        view.wake_with(Box::new(move || bells.ring(&bell)));
        self.shared.figures.iotlb.view(view.counters());
        Some(Bus::Iommu(Box::new(view)))
    }

    /// Stops a queue, for good, once all its requests are completed or put back: then sends it to
    /// `stopped`, to be dropped elsewhere. The disk may take as long as it likes: other queues go
    /// on meanwhile. False if there is no such queue.
    pub fn begin_stop(&mut self, index: u16, stopped: Sender<Stopped<S>>) -> bool {
        let Some(at) = self.position(index) else { return false };
        let served = &mut self.queues[at];
        if served.failed.is_none() {
            served.queue.begin_stop(&self.bus);
        }
        served.stopping = Some(stopped);
        self.wind_down(at);
        true
    }

    /// Continues the stop of a queue; true if it has ended.
    fn wind_down(&mut self, at: usize) -> bool {
        let served = &mut self.queues[at];
        if self.shared.figures.holds() && served.queue.must_do_record() {
            // As in `poll`.
            served.queue.idle();
            return false;
        }
        let mut ended = None;
        if served.failed.is_none() {
            match served.queue.wind_down(&self.bus) {
                Ok(over) => ended = Some(over),
                // The ring is broken: it stops all the same.
                Err(error) => served.fail(&self.shared, error),
            }
        }
        let ended = ended.unwrap_or_else(|| {
            served.queue.idle();
            served.queue.in_kernel() == 0
        });
        served.report(&self.shared.figures);
        if ended {
            let Served { queue, kick, stopping, .. } = self.remove(at);
            if let Some(stopped) = stopping {
                // There is no receiver if the connection is over.
                let _ = stopped.send((queue, kick));
            }
        }
        ended
    }

    /// Removes a queue at once, as its connection is over. With `S::KEEPS`, what the kernel still
    /// uses is kept until the kernel is done, and no ring of the device is served before. Returns
    /// how many requests the kernel has.
    pub fn abandon(&mut self, index: u16) -> u32 {
        let Some(at) = self.position(index) else { return 0 };
        let memory = Arc::clone(self.bus.memory());
        let served = self.remove(at);
        let left = served.queue.in_kernel();
        if left > 0 {
            tracing::error!(
                source = %self.shared.name,
                "queue {index}: {} has not completed {left} requests", S::NAME
            );
        }
        if left > 0 && S::KEEPS {
            self.shared.figures.keep(served.queue.into_remains(&memory));
        }
        left
    }

    fn position(&self, index: u16) -> Option<usize> {
        self.queues.iter().position(|served| served.index == index)
    }

    fn remove(&mut self, at: usize) -> Served<S> {
        let served = self.queues.swap_remove(at);
        if self.queues.is_empty() {
            // Without rings nothing is translated, and no miss is sent (rule D27).
            self.bus = Bus::Physical(Physical::new(Arc::clone(self.bus.memory())));
        }
        served
    }

    /// What serves the requests of a queue.
    pub fn serve(&mut self, index: u16) -> Option<&mut S> {
        self.find(index).map(|served| &mut served.queue.serve)
    }

    fn find(&mut self, index: u16) -> Option<&mut Served<S>> {
        self.queues.iter_mut().find(|served| served.index == index)
    }
}

impl<S: Serve> Rings for RequestUnit<S> {
    type Part = ();

    fn change(&mut self, _: (), index: u16, change: Change) {
        let Some(served) = self.find(index) else { return };
        match change {
            Change::Enabled(enabled) => served.enabled = enabled,
            Change::Call(call) => served.queue.set_call(call),
            Change::Err(err) => served.err = err,
            Change::Log(at) => served.queue.log.set_at(&mut served.queue.ring, at),
        }
    }

    fn set_memory(&mut self, _: (), memory: &Arc<Memory>) {
        for served in &mut self.queues {
            served.queue.keep(self.bus.memory());
            served.queue.log.set_memory(memory);
        }
        self.bus.set_memory(Arc::clone(memory));
        if let Bus::Physical(_) = self.bus {
            let addresses = UserAddresses::new(Arc::clone(memory));
            for served in self.queues.iter_mut().filter(|served| served.failed.is_none()) {
                match served.queue.move_to(&addresses) {
                    Err(QueueError::Ring(RingError::Unreachable { .. })) => {
                        served.queue.is_gone(&self.bus);
                    }
                    Err(error) => served.fail(&self.shared, error),
                    Ok(()) => {}
                }
            }
        }
    }

    fn set_log(&mut self, _: (), log: Option<&Arc<DirtyLog>>) {
        self.bus.set_log(log.cloned());
        for served in &mut self.queues {
            let RequestQueue { log: of_ring, ring, .. } = &mut served.queue;
            of_ring.set_log(ring, log.cloned(), self.bus.memory());
            served.queue.set_ordered(self.bus.iotlb().is_some() && log.is_some());
        }
    }

    fn relocate(&mut self, _: (), index: u16, to: RingAddresses) -> Result<(), HandlerError> {
        let Some(served) = self.queues.iter_mut().find(|served| served.index == index) else {
            return Ok(());
        };
        served.queue.relocate(to.desc, to.avail, to.used);
        // Behind an IOMMU it is found when it is mapped.
        if let Bus::Physical(physical) = &self.bus
            && let Err(error) =
                served.queue.move_to(&UserAddresses::new(Arc::clone(physical.memory())))
        {
            served.fail(&self.shared, error);
            return Err(QueueError::Moved.into());
        }
        Ok(())
    }
}

impl<S: Serve> Unit for RequestUnit<S> {
    fn poll(&mut self, now_ns: u64) -> bool {
        let mut busy = self.reaper.poll(now_ns);
        let mut at = 0;
        while at < self.queues.len() {
            match self.queues[at].stopping.is_some() && self.wind_down(at) {
                true => busy = true,
                false => {
                    let served = &self.queues[at];
                    let more = served.queue.must_do_record() && served.queue.in_kernel() == 0;
                    let more = more && served.failed.is_none() && !self.shared.figures.holds();
                    busy |= served.stopping.is_some() && (served.queue.is_spent() || more);
                    at += 1;
                }
            }
        }
        // I/O of an earlier ring might take effect after what the driver requests now.
        let held = self.shared.figures.holds();
        self.held = held;
        for served in self.queues.iter_mut().filter(|served| served.stopping.is_none()) {
            if held || !served.works() {
                // I/O that the kernel has completed must not hold up an unmap for ever.
                busy |= served.queue.idle();
                continue;
            }
            match served.queue.poll(&self.bus, now_ns) {
                Ok(false) if served.queue.stats().away == served.reported.away => {}
                Ok(false) => served.report(&self.shared.figures),
                Ok(true) => {
                    busy = true;
                    served.report(&self.shared.figures);
                }
                Err(error) => served.fail(&self.shared, error),
            }
        }
        busy
    }

    fn quiet(&mut self) {
        self.bus.quiet();
    }

    fn next_due(&self) -> Option<u64> {
        let working = self.queues.iter().filter(|served| served.works() && !self.held);
        let due = working.filter_map(|served| served.queue.next_due());
        // The hold may end on another worker, and held queues report no time of their own.
        due.chain(self.reaper.next_due()).chain(self.held.then_some(self.reaper.due_ns)).min()
    }

    fn waits(&self) -> bool {
        self.queues.iter().any(|served| served.works() && served.queue.waits())
    }

    fn arm(&mut self) -> bool {
        self.bell.arm();
        // Including queues that stop, or have failed.
        let mut more = false;
        for served in &mut self.queues {
            more |= served.queue.serve.arm();
        }
        // A ring that is held is not checked before its time.
        for served in self.queues.iter_mut().filter(|served| served.works() && !self.held) {
            more |= served.queue.arm(&self.bus);
        }
        more
    }

    fn disarm(&mut self) {
        self.bell.disarm();
        for served in &mut self.queues {
            served.queue.serve.disarm();
            if served.failed.is_none() {
                served.queue.disarm();
            }
        }
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push((*self.bell).as_fd());
    }

    fn kicks<'a>(&'a self, into: &mut Vec<&'a Kick>) {
        let working = self.queues.iter().filter(|served| served.failed.is_none());
        for served in working {
            into.extend(served.kick.iter().chain(served.queue.serve().kick_back()));
        }
    }

    fn offline(&mut self) {
        self.bus.offline();
    }

    fn online(&mut self) {
        self.bus.online();
    }
}

/// What tests look at.
#[cfg(any(test, feature = "testing"))]
impl<S: Serve> RequestUnit<S> {
    /// Why a queue has stopped, if it has.
    pub fn failure(&self, index: u16) -> Option<&QueueError> {
        self.get(index)?.failed.as_ref()
    }

    /// Whether a queue is being stopped.
    pub fn is_stopping(&self, index: u16) -> bool {
        self.get(index).is_some_and(|served| served.stopping.is_some())
    }

    /// How many requests a queue has taken and not completed.
    pub fn under_way(&self, index: u16) -> u16 {
        self.get(index).map_or(0, |served| served.queue.ring().in_flight())
    }

    /// How many requests of a queue the kernel has.
    pub fn in_kernel(&self, index: u16) -> u32 {
        self.get(index).map_or(0, |served| served.queue.in_kernel())
    }

    /// Whether a queue's ring is not mapped, so that the queue waits.
    pub fn is_away(&self, index: u16) -> bool {
        self.get(index).is_some_and(|served| served.queue.is_away())
    }

    fn get(&self, index: u16) -> Option<&Served<S>> {
        self.queues.iter().find(|served| served.index == index)
    }
}
