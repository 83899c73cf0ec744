//! A worker's share of a network device: some of its pairs of queues, and what lies between them.

mod ways;

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use ringfence_iotlb::{Counters, View};
use ringfence_mem::{DirtyLog, Memory, Physical, UserAddresses};
use ringfence_run::{
    event::Doorbell,
    worker::{Kick, Unit},
};
use ringfence_vhost_user::{HandlerError, RingAddresses};
use ringfence_vhost_user_backend::{Bus, Change, RingStart, Rings};
use ringfence_virtq::device;

use self::ways::{between, nowhere, outside, receiver};
use super::{
    outlet::Outlet,
    probe::Probe,
    ring::NetRing,
    round::{Lane, Terms},
    stats::QueueCounters,
    tap::Tap,
    wire::feature,
};

/// Where packets go that a driver sends.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Link {
    /// Back to the driver, on the same pair of queues.
    Loopback,
    /// To the driver of the other of two devices.
    Peer,
    /// To a tap device, with a queue for each pair, from which come those that the driver receives.
    Tap(Arc<Tap>),
    /// Nowhere; the driver receives one frame again and again. To measure one way at a time.
    Probe,
}

impl Link {
    /// How many devices there are.
    pub fn ends(&self) -> usize {
        match self {
            Link::Loopback | Link::Tap(_) | Link::Probe => 1,
            Link::Peer => 2,
        }
    }

    /// What a sender may leave to be done: what a receiver can be left to do.
    pub(super) fn offloads(&self) -> u64 {
        match self {
            Link::Loopback | Link::Peer => feature::HOST_OFFLOADS | feature::GUEST_OFFLOADS,
            Link::Tap(tap) => tap.offloads(),
            Link::Probe => 0,
        }
    }
}

/// What a ring is started with.
pub(super) struct Start {
    pub(super) ring: RingStart,
    pub(super) counters: Arc<QueueCounters>,
    pub(super) name: Arc<str>,
    pub(super) terms: Terms,
}

/// One device, as far as this worker has to do with it.
#[derive(Default)]
pub(super) struct End {
    /// `None`: no driver is there.
    pub(super) bus: Option<Bus>,
    pub(super) terms: Terms,
    /// By pair.
    pub(super) receive: Vec<Option<Box<NetRing>>>,
    pub(super) transmit: Vec<Option<Box<NetRing>>>,
    /// For each transmit ring.
    pub(super) lanes: Vec<Lane>,
}

impl End {
    fn rings(&self) -> impl Iterator<Item = &NetRing> {
        self.receive.iter().chain(&self.transmit).flatten().map(|ring| &**ring)
    }

    fn rings_mut(&mut self) -> impl Iterator<Item = &mut NetRing> {
        let End { receive, transmit, .. } = self;
        receive.iter_mut().chain(transmit).flatten().map(|ring| &mut **ring)
    }
}

/// A worker's share of a network device, or of two that are back to back.
pub struct NetUnit {
    ends: Vec<End>,
    link: Link,
    /// [`NetOptions::grace`](super::NetOptions::grace).
    grace: Duration,
    /// By pair, if they lead to a tap.
    outlets: Vec<Outlet>,
    /// By pair, if they lead nowhere.
    probes: Vec<Probe>,
    /// Wakes the worker when its misses are resolved.
    bell: Arc<Doorbell>,
    polled_ns: u64,
}

impl NetUnit {
    /// A share without queues, of devices with `pairs` pairs of queues each.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(link: Link, pairs: u16, grace: Duration) -> std::io::Result<NetUnit> {
        let bell = Arc::new(Doorbell::new()?);
        let end = || End {
            receive: (0..pairs).map(|_| None).collect(),
            transmit: (0..pairs).map(|_| None).collect(),
            lanes: (0..pairs).map(|_| Lane::new(grace)).collect(),
            ..End::default()
        };
        let outlets = match &link {
            Link::Tap(tap) => {
                (0..usize::from(pairs)).map(|pair| Outlet::new(tap, pair)).collect::<Result<_, _>>()
            }
            _ => Ok(Vec::new()),
        };
        let probes = match link {
            Link::Probe => (0..pairs).map(|_| Probe::new()).collect(),
            _ => Vec::new(),
        };
        let ends = (0..link.ends()).map(|_| end()).collect();
        Ok(NetUnit { ends, link, grace, outlets: outlets?, probes, bell, polled_ns: 0 })
    }

    /// Starts a ring; the first one of a driver determines how its memory is reached, and returns
    /// the counters of the view, if one was made.
    ///
    /// # Errors
    /// What is wrong with the ring, or that there are too many workers for one IOMMU.
    pub(super) fn start(
        &mut self,
        at: usize,
        ring: u16,
        start: Start,
    ) -> Result<Option<Arc<Counters>>, HandlerError> {
        self.stop(at, ring);
        let end = &mut self.ends[at];
        let Start { ring: started, counters, name, terms } = start;
        let RingStart { memory, endpoint, config, events, enabled, log, at_used, .. } = started;
        let mut counted = None;
        let bus = match &mut end.bus {
            Some(bus) => bus,
            none => none.insert(match endpoint {
                None => Bus::Physical(Physical::new(Arc::clone(&memory))),
                Some(endpoint) => {
                    let mut view = View::new(endpoint, Arc::clone(&memory))
                        .ok_or_else(|| HandlerError::new("too many workers for one IOMMU"))?;
                    let bell = Arc::clone(&self.bell);
                    view.wake_with(Box::new(move || bell.ring()));
                    counted = Some(view.counters());
                    Bus::Iommu(Box::new(view))
                }
            }),
        };
        end.terms = terms;
        if let Link::Tap(tap) = &self.link {
            tap.settle(terms)?;
        }
        bus.set_log(log.log());
        // Behind an IOMMU the translation of a ring may not have arrived yet (rule D22).
        let mut queue = match at_used {
            false => device::Queue::postponed(config)?,
            true => device::Queue::postponed_at_used(config)?,
        };
        if matches!(bus, Bus::Physical(_)) {
            queue.revalidate(&UserAddresses::new(memory))?;
        }
        let mut net = NetRing::new(ring, queue, events, counters, name, log);
        net.enabled = enabled;
        *self.slot(at, ring) = Some(Box::new(net));
        self.open_outlet(ring, enabled);
        Ok(counted)
    }

    /// The tap is to give a pair packets, or not.
    fn open_outlet(&mut self, ring: u16, open: bool) {
        if ring.is_multiple_of(2)
            && let Some(outlet) = self.outlets.get_mut(usize::from(ring / 2))
        {
            outlet.set_open(open);
        }
    }

    fn slot(&mut self, at: usize, ring: u16) -> &mut Option<Box<NetRing>> {
        let (end, pair) = (&mut self.ends[at], usize::from(ring / 2));
        if ring.is_multiple_of(2) { &mut end.receive[pair] } else { &mut end.transmit[pair] }
    }

    /// A ring that was started.
    pub(super) fn ring(&mut self, at: usize, ring: u16) -> Option<&mut NetRing> {
        self.slot(at, ring).as_deref_mut()
    }

    /// Stops a ring, for good; returns the next available index.
    pub(super) fn stop(&mut self, at: usize, ring: u16) -> Option<(Option<u32>, Option<Kick>)> {
        let stopped = self.slot(at, ring).take()?;
        self.open_outlet(ring, false);
        let end = &mut self.ends[at];
        end.lanes[usize::from(ring / 2)] = Lane::new(self.grace);
        Some(stopped.stop(end.bus.as_ref()?))
    }

    /// The ring that takes what comes from a pair of this end.
    fn receiver(&mut self, at: usize, pair: usize) -> Option<&mut NetRing> {
        match &mut self.ends[..] {
            [end] => end.receive[pair].as_deref_mut(),
            ends => receiver(&mut ends[1 - at].receive, pair),
        }
    }

    /// All lanes, out and in.
    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        let out = self.ends.iter().flat_map(|end| &end.lanes);
        let taken_in = self.outlets.iter().map(|outlet| &outlet.inward);
        out.chain(taken_in).chain(self.probes.iter().map(|probe| &probe.inward))
    }

    /// The driver is gone.
    pub(super) fn forget(&mut self, at: usize) {
        self.outlets.iter_mut().for_each(|outlet| outlet.set_open(false));
        self.probes.iter_mut().for_each(|probe| probe.inward = Lane::default());
        let end = &mut self.ends[at];
        end.receive.iter_mut().chain(&mut end.transmit).for_each(|ring| *ring = None);
        end.lanes.iter_mut().for_each(|lane| *lane = Lane::new(self.grace));
        end.bus = None;
    }
}

impl Rings for NetUnit {
    /// Which end.
    type Part = usize;

    fn change(&mut self, at: usize, ring: u16, change: Change) {
        let Some(found) = self.ring(at, ring) else { return };
        match change {
            Change::Enabled(enabled) => {
                found.enabled = enabled;
                self.open_outlet(ring, enabled);
            }
            Change::Call(call) => found.call = call,
            Change::Err(err) => found.err = err,
            Change::Log(log) => found.log.set_at(&mut found.queue, log),
        }
    }

    fn set_memory(&mut self, at: usize, memory: &Arc<Memory>) {
        let end = &mut self.ends[at];
        let Some(bus) = &mut end.bus else { return };
        bus.set_memory(Arc::clone(memory));
        let plain = matches!(bus, Bus::Physical(_));
        end.rings_mut().for_each(|ring| ring.log.set_memory(memory));
        if plain {
            let addresses = UserAddresses::new(Arc::clone(memory));
            end.rings_mut().for_each(|ring| ring.move_to(&addresses));
        }
    }

    fn set_log(&mut self, at: usize, log: Option<&Arc<DirtyLog>>) {
        let end = &mut self.ends[at];
        let Some(bus) = &mut end.bus else { return };
        bus.set_log(log.cloned());
        for ring in end.receive.iter_mut().chain(&mut end.transmit).flatten() {
            ring.log.set_log(&mut ring.queue, log.cloned(), bus.memory());
        }
    }

    fn relocate(&mut self, at: usize, ring: u16, to: RingAddresses) -> Result<(), HandlerError> {
        let plain = match &self.ends[at].bus {
            Some(Bus::Physical(physical)) => Some(Arc::clone(physical.memory())),
            _ => None,
        };
        if let Some(ring) = self.ring(at, ring) {
            ring.relocate(to);
            plain.into_iter().for_each(|memory| ring.move_to(&UserAddresses::new(memory)));
        }
        Ok(())
    }
}

impl Unit for NetUnit {
    fn poll(&mut self, now_ns: u64) -> bool {
        self.polled_ns = now_ns;
        match (&self.link, &mut self.ends[..]) {
            (Link::Peer, [a, b]) => between(a, Some(b), now_ns) | between(b, Some(a), now_ns),
            (Link::Tap(_), [end]) => outside(end, &mut self.outlets, now_ns),
            (Link::Probe, [end]) => nowhere(end, &mut self.probes, now_ns),
            (_, ends) => ends.iter_mut().fold(false, |busy, end| between(end, None, now_ns) | busy),
        }
    }

    fn quiet(&mut self) {
        self.ends.iter_mut().filter_map(|end| end.bus.as_mut()).for_each(Bus::quiet);
    }

    fn next_due(&self) -> Option<u64> {
        let rings = self.ends.iter().flat_map(End::rings).filter_map(NetRing::next_look);
        let due = self.lanes().filter_map(Lane::next_due).chain(rings);
        // What was due at the last poll was handled by it, or needs no handling: its ring is
        // disabled, or no packets come.
        due.filter(|&due| due > self.polled_ns).min()
    }

    fn waits(&self) -> bool {
        self.lanes().any(Lane::is_stalled)
    }

    fn arm(&mut self) -> bool {
        self.bell.arm();
        let mut more = false;
        let updates = self.ends.iter().map(|end| end.bus.as_ref().map_or(0, Bus::updates));
        let updates: [u64; 2] = {
            let mut each = updates.cycle();
            std::array::from_fn(|_| each.next().unwrap_or(0))
        };
        for at in 0..self.ends.len() {
            let updates = (updates[at], updates[1 - at]);
            for pair in 0..self.ends[at].lanes.len() {
                let End { transmit, lanes, .. } = &mut self.ends[at];
                let (Some(ring), lane) = (&mut transmit[pair], &lanes[pair]) else { continue };
                // Packets that would only wait are no reason to stay awake.
                more |= lane.may_go_on(updates) || !lane.holds_packets() && ring.arm();
                // Once packets are dropped there is nothing to do before there are others.
                if lane.waits_for_buffers() {
                    // Another lane may have taken some since.
                    let too_few = lane.too_few;
                    let comes = |ring: &mut NetRing| ring.held() > too_few || ring.arm();
                    more |= self.receiver(at, pair).is_some_and(comes);
                }
            }
        }
        for (pair, outlet) in self.outlets.iter().enumerate() {
            if outlet.waits_for_buffers() {
                let ring = self.ends[0].receive[pair].as_mut();
                more |= ring.is_some_and(|ring| ring.arm());
            }
            more |= outlet.is_due() || outlet.inward.may_go_on((updates[0], updates[0]));
        }
        for (pair, probe) in self.probes.iter().enumerate() {
            more |= probe.inward.may_go_on((updates[0], updates[0]));
            let ring = self.ends[0].receive[pair].as_mut();
            more |= ring.is_some_and(|ring| !probe.inward.is_stalled() && ring.arm());
        }
        more
    }

    fn disarm(&mut self) {
        self.bell.disarm();
        for end in &mut self.ends {
            end.rings_mut().for_each(NetRing::disarm);
        }
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push(self.bell.as_fd());
        into.extend(self.outlets.iter().filter_map(Outlet::waker));
    }

    fn kicks<'a>(&'a self, into: &mut Vec<&'a Kick>) {
        into.extend(self.ends.iter().flat_map(End::rings).filter_map(NetRing::kick));
    }

    fn offline(&mut self) {
        self.ends.iter_mut().filter_map(|end| end.bus.as_mut()).for_each(Bus::offline);
    }

    fn online(&mut self) {
        self.ends.iter_mut().filter_map(|end| end.bus.as_mut()).for_each(Bus::online);
    }
}
