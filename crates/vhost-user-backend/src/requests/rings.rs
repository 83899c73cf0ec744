//! The request rings of a device, for one connection.

use std::{
    cell::Cell,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use ringfence_run::{event::Bells, worker::Worker};
use ringfence_vhost_user::{HandlerError, InflightRegion, Shutdown};
use ringfence_virtq::device;

use super::{Reaper, RequestFigures, RequestQueue, RequestUnit, Serve, unit::Served};
use crate::{Common, Events, RingStart, Shares};

/// How often to check whether a wait for a ring's end is given up.
const LOOK: Duration = Duration::from_millis(10);
/// How long to wait for requests in progress when a connection was ended at this end: all rings
/// together, and less than a service may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// How long when the front end is gone, and the next one may be waiting: longer than a working disk
/// takes as a rule. Requests that are not completed by then are done, and on record if there is
/// one.
const GONE_WITHIN: Duration = Duration::from_millis(100);

/// What a [`RawDevice`](crate::RawDevice) with request rings keeps of a connection: where they are
/// served and recorded.
pub struct RequestRings<S: Serve> {
    name: Arc<str>,
    shares: Shares<RequestUnit<S>>,
    figures: Arc<RequestFigures<S>>,
    inflight: Option<Arc<InflightRegion>>,
    /// Wake workers that wait for translations.
    bells: Arc<Bells>,
    /// When the connection was found to be over.
    over: Cell<Option<Instant>>,
}

/// Where a ring that has stopped goes on.
fn next_avail<S: Serve>(queue: &RequestQueue<S>) -> Result<u32, HandlerError> {
    let lost = || HandlerError::new("the ring's requests in flight are lost");
    queue.next_avail().ok_or_else(lost)
}

impl<S: Serve> RequestRings<S> {
    /// Rings that `workers` share (ring n is that of worker n modulo their number), as their unit
    /// number `unit`, counted in `figures`.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn new(
        name: Arc<str>,
        workers: Arc<[Worker]>,
        unit: u32,
        figures: Arc<RequestFigures<S>>,
    ) -> RequestRings<S> {
        let shares = Shares::new(workers, unit);
        let (bells, over) = (Arc::default(), Cell::default());
        RequestRings { name, shares, figures, inflight: None, bells, over }
    }

    /// Where they are served.
    pub fn shares(&self) -> &Shares<RequestUnit<S>> {
        &self.shares
    }

    /// What a [`Backend`](crate::Backend) needs to know of the device at any time.
    pub fn common(&self) -> Common<'_, RequestUnit<S>> {
        let (name, tally, bells) = (&*self.name, &self.figures.iotlb, Some(&*self.bells));
        Common { name, shares: &self.shares, part: (), tally, bells }
    }

    /// Sets where requests in progress are recorded, from the next start of a ring on; `None`:
    /// nowhere.
    pub fn set_inflight(&mut self, inflight: Option<Arc<InflightRegion>>) {
        self.inflight = inflight;
    }

    /// Starts a ring; `serve` gets the number of requests in progress at a time.
    ///
    /// # Errors
    /// The ring is invalid or cannot be started; an error of `serve`.
    pub fn start(
        &self,
        ring: u16,
        start: RingStart,
        serve: impl FnOnce(u16) -> Result<S, HandlerError>,
    ) -> Result<(), HandlerError> {
        let RingStart { memory, endpoint, config, enabled, log, at_used, .. } = start;
        let Events { kick, call, err } = start.events;
        if at_used && self.inflight.is_none() {
            return Err(HandlerError::new("the ring's requests in flight are unknown"));
        }
        let own = device::Queue::postponed(config)?;
        // Not on the worker: the kernel may take longer to set up `serve` than other rings should
        // wait.
        let serve = serve(config.size)?;
        let mut queue = RequestQueue::new(own, serve, Arc::clone(&self.name), call);
        queue.log = log;
        queue.at_used = at_used;
        if let Some(region) = &self.inflight {
            queue.record(Arc::clone(region), ring);
        }
        let served = Served::new(ring, queue, kick, err, enabled);
        let (name, number, figures) =
            (Arc::clone(&self.name), self.shares.unit(), Arc::clone(&self.figures));
        let bells = Arc::clone(&self.bells);
        let (started, _) = self.shares.on_worker(ring.into(), move |work| {
            let mut start = Some(served);
            let started = || {
                if work.unit::<RequestUnit<S>>(number).is_none() {
                    let unit = RequestUnit::new(&name, endpoint, bells, &memory, figures)?;
                    work.insert(number, Box::new(unit));
                }
                let unit: &mut RequestUnit<S> = work.unit(number).expect("inserted above");
                Ok(unit.start(&mut start, &memory)?)
            };
            // The worker does not drop what is left of it.
            (started(), start)
        })?;
        started
    }

    /// Stops a ring: waits until all its requests have ended, unless `given_up` returns true.
    /// Returns the next available entry.
    ///
    /// # Errors
    /// The ring does not run; it was given up.
    pub fn stop(&self, ring: u16, mut given_up: impl FnMut() -> bool) -> Result<u32, HandlerError> {
        let (reply, stopped) = mpsc::channel();
        self.shares.on(ring.into(), move |unit| unit.begin_stop(ring, reply))?;
        loop {
            match stopped.recv_timeout(LOOK) {
                Ok((queue, _)) => return next_avail(&queue),
                Err(RecvTimeoutError::Timeout) if !given_up() => {}
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(HandlerError::new("the ring is not running"));
                }
            }
        }
        let left = self.shares.on(ring.into(), move |unit| unit.abandon(ring))?.unwrap_or(0);
        // It may have ended meanwhile.
        if let Ok((queue, _)) = stopped.try_recv() {
            return next_avail(&queue);
        }
        let name = S::NAME;
        Err(HandlerError::new(format!("{name} has not completed {left} requests of ring {ring}")))
    }

    /// Whether to give up waiting for requests in progress, since the connection is over: 0.1 s
    /// after the front end was found gone, 3 s after a shutdown at this end. `None` while it is not
    /// over.
    pub fn is_given_up(&self, connection: Option<&Shutdown>) -> Option<bool> {
        let Some(connection) = connection.filter(|connection| connection.is_over()) else {
            self.over.set(None);
            return None;
        };
        let most = if connection.is_shut_down() { ENDS_WITHIN } else { GONE_WITHIN };
        let over = self.over.get().unwrap_or_else(Instant::now);
        self.over.set(Some(over));
        Some(over.elapsed() >= most)
    }

    /// Takes the shares from their workers: the next ring sets up the way to memory anew. A
    /// [`Reaper`] looks after I/O that has not ended.
    pub fn forget(&self) {
        let unit = self.shares.unit();
        for share in 0..self.shares.count() {
            let figures = Arc::clone(&self.figures);
            // A worker that is gone has nothing any more.
            let _ = self.shares.on_worker(share, move |work| {
                drop(work.remove(unit));
                if figures.stuck() > 0 {
                    work.insert(unit, Box::new(Reaper::new(&figures)));
                }
            });
        }
    }
}
