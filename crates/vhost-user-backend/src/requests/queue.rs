//! The device's end of one request queue.
//!
//! A queue never waits: a step of a request that meets a missing translation parks the request, and
//! sends misses for all that the request will need. The request goes on when an update has come,
//! and fails when its time-out is over.
//!
//! At a limit nothing fails: the ring is not read further, and chains that stay in it cost nothing.
//! Reading goes on when requests have ended. No request needs one behind it to end: it ends when
//! the disk completes it, or when a translation comes or times out.

mod inflight;
mod parked;
mod ring;
mod stop;
mod wait;

use std::{collections::VecDeque, sync::Arc};

use ringfence_mem::{AccessError, Memory, Translate};
use ringfence_run::{event::Doorbell, notifier::Notifier};
use ringfence_virtq::{Chain, device};

use self::{
    inflight::{Recorded, take_next},
    parked::{Look, Parked},
    ring::Away,
    stop::Order,
    wait::{Head, Wait},
};
use super::{Advance, Next, QueueError, QueueStats, Serve};
use crate::{Bus, RingLog};

/// How many bytes one round moves before other queues have their turn: one of them may have an
/// IOMMU request that a driver waits for.
const ROUND_BYTES: u64 = 64 << 10;
/// How many new requests one round takes at most.
const ROUND_REQUESTS: usize = 32;
/// About this part of what the driver has made available, and at least so many requests, a round does at
/// once before it publishes them: the driver goes on with these while the device does the rest. With
/// all of it in a round, each end would wait while the other works. What goes to the kernel does not
/// count: it goes together. A driver that wants interrupts, and so does not look by itself, gets one for
/// what a whole round has done.
const ROUND_SHARE: u16 = 4;
const ROUND_LEAST: u16 = 2;
/// For how many descriptors of a request, and as many pieces of memory, a slot keeps its
/// allocations when the request is over: a little more than most reads and writes of 128 KiB have.
pub const KEPT: usize = 64;
/// The most descriptors, and pieces of memory, that all requests in progress with more than
/// [`KEPT`] have together. A ring at this limit is not read further; one request of a ring of up to
/// 1024 exceeds it by no more than 2048.
pub const MOST_HELD: usize = 1 << 15;

/// A request that was taken from the ring, or room for one. It shares no line of a cache with others: where many are
/// in progress, each access may wait for its lines.
#[derive(Default)]
#[repr(align(64))]
pub struct Slot<R> {
    chain: Chain,
    state: State,
    /// What its [`Serve`] keeps of it.
    pub request: R,
    /// Its number among all that were taken.
    number: u64,
    /// Its entry in the in-flight record.
    entry: u16,
    wait: Option<Box<Wait>>,
}

impl<R> Slot<R> {
    /// Whether it is done and waits for its turn to be completed.
    fn is_done(&self) -> bool {
        matches!(self.state, State::Done { .. })
    }
}

impl<R: Default> Slot<R> {
    /// Ends the request. Its descriptors no longer count in `held`, if they did.
    fn end(&mut self, held: &mut usize) {
        (self.state, self.wait) = (State::Free, None);
        let descs = self.chain.descs().len();
        if descs > KEPT {
            *held -= descs;
            (self.chain, self.request) = (Chain::default(), R::default());
        }
    }
}

#[derive(Clone, Copy, Default)]
enum State {
    /// There is no request.
    #[default]
    Free,
    /// It is in progress.
    Taken,
    /// It is done, with so many bytes, and is completed when those before it are.
    Done { ok: bool, used: u32 },
}

/// What became of an attempt to take a chain.
enum Taken {
    /// There is none.
    Nothing,
    /// It was taken.
    Chain,
    /// Its table has no translation.
    Table(AccessError),
}

/// What the kernel still uses of a queue that is gone: the memory, and the leases on its
/// translations.
pub(super) struct Remains<S: Serve> {
    // Dropped in this order, as in `RequestQueue`.
    serve: S,
    slots: Vec<Slot<S::Request>>,
}

impl<S: Serve> Remains<S> {
    /// Whether no other ring may be served before the kernel is done: its requests may still change
    /// the disk, or the memory of a guest.
    pub(super) fn holds(&self) -> bool {
        let mut taken = self.slots.iter().filter(|slot| matches!(slot.state, State::Taken));
        taken.any(|slot| self.serve.holds(&slot.request))
    }

    /// Takes what the kernel has completed; returns how many requests it still has.
    pub(super) fn reap(&mut self) -> u32 {
        self.serve.begin_round();
        self.serve.reap(&mut self.slots, &RingLog::default());
        while let Some((at, _)) = self.serve.completed(u64::MAX, false) {
            // No request is completed. One that has ended holds nothing up.
            self.slots[usize::from(at)].state = State::Free;
        }
        // Transfers that were done in part go on.
        let _ = self.serve.kick();
        self.serve.in_kernel()
    }
}

/// The device's end of one request queue.
pub struct RequestQueue<S: Serve> {
    // Dropped in this order: `serve` waits for what the kernel still has in progress; only then go
    // the slots, whose memory and leases the kernel uses, and the ring, which keeps the memory.
    pub(super) serve: S,
    slots: Vec<Slot<S::Request>>,
    pub(super) ring: device::Queue,
    pub(super) log: RingLog,
    order: Option<Order>,
    recorded: Option<Recorded>,
    /// Set while the ring is not mapped.
    away: Option<Away>,
    /// Whether the ring was mapped when it [began to stop](Self::begin_stop).
    mapped_at_stop: bool,
    /// Requests that can neither be completed nor be put back: where the ring goes on is unknown.
    lost: bool,
    /// The front end has sent no base: the record has it, once that is opened.
    pub(super) at_used: bool,
    /// How often the endpoint had been rebound when the ring was last found.
    found: Option<u64>,
    parked: Parked,
    /// Requests for which there was no room, in their order.
    stalled: VecDeque<u16>,
    /// Set while the next chain cannot be taken because its table has no translation.
    head: Option<Head>,
    free: Vec<u16>,
    /// How many descriptors requests in progress have that have more than [`KEPT`](super::KEPT)
    /// each.
    held: usize,
    /// How many requests were taken: a number for each.
    taken: u64,
    name: Arc<str>,
    call: Option<Arc<Notifier>>,
    stats: QueueStats,
    /// How many requests were completed at the last publication, and whether the driver wanted an
    /// interrupt then.
    published: u64,
    interrupts: bool,
    now_ns: u64,
    /// The count of updates and refusals when this round began.
    updates: u64,
    warn_at: u64,
    ready: Vec<u16>,
}

impl<S: Serve> RequestQueue<S> {
    /// Serves the requests on `ring` with `serve`. Interrupts go to `call`; `name` appears in
    /// messages.
    pub fn new(
        ring: device::Queue,
        serve: S,
        name: Arc<str>,
        call: Option<Arc<Notifier>>,
    ) -> RequestQueue<S> {
        let size = ring.config().size;
        RequestQueue {
            serve,
            slots: (0..size).map(|_| Slot::default()).collect(),
            ring,
            log: RingLog::default(),
            order: None,
            recorded: None,
            away: None,
            mapped_at_stop: false,
            lost: false,
            at_used: false,
            found: None,
            parked: Parked::default(),
            stalled: VecDeque::new(),
            head: None,
            free: (0..size).rev().collect(),
            held: 0,
            taken: 0,
            name,
            call,
            stats: QueueStats::default(),
            published: 0,
            interrupts: true,
            now_ns: 0,
            updates: 0,
            warn_at: 0,
            ready: Vec::new(),
        }
    }

    /// The queue's figures.
    pub fn stats(&self) -> QueueStats {
        QueueStats { bytes: self.serve.bytes(), ..self.stats }
    }

    /// The [`Serve`] of its requests.
    pub fn serve(&self) -> &S {
        &self.serve
    }

    /// The position at which the ring goes on (see [`RingConfig::base`](device::RingConfig::base));
    /// `None` if it is unknown and the guest may move, as writes are logged. A guest that stays
    /// does not need it: its driver begins anew, as one that shuts down, or the next process reads
    /// it from the record. With neither, the driver waits for the requests that are lost.
    pub fn next_avail(&self) -> Option<u32> {
        let closed = self.recorded.as_ref().is_some_and(Recorded::is_closed);
        let unknown = self.log.is_on() && (self.lost || self.at_used && closed);
        (!unknown).then(|| self.ring.next_avail())
    }

    /// Replaces the descriptor that interrupts are sent through.
    pub fn set_call(&mut self, call: Option<Arc<Notifier>>) {
        self.call = call;
    }

    /// Makes later completions ring `bell`, for a worker that sleeps.
    ///
    /// # Errors
    /// A system call failed.
    pub fn notify(&self, bell: &Arc<Doorbell>) -> std::io::Result<()> {
        self.serve.notify(bell)
    }

    /// Does what there is to do; true if there was anything. A ring behind an IOMMU that is not
    /// mapped is left alone until it is mapped again (rule [D22]).
    ///
    /// # Errors
    /// The queue must be stopped; nothing else is harmed. Keep calling [`reap`](Self::reap).
    ///
    /// [D22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d22
    pub fn poll(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        self.work(bus, now_ns).map_err(|error| match error {
            // A ring in a file that was truncated reads as zeroes and looks broken in some way.
            QueueError::Ring(_) => bus.check().map_or_else(QueueError::Memory, |()| error),
            other => other,
        })
    }

    fn work(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        self.now_ns = now_ns;
        self.serve.begin_round();
        // Before any lookup: an update that comes meanwhile is a reason to look again.
        self.updates = bus.updates();
        let reaped = self.reap();
        if !self.find_ring(bus)? {
            return Ok(reaped);
        }
        self.check_record()?;
        self.end_order(false);
        let stop_at = self.serve.bytes() + ROUND_BYTES;
        let look = if self.waits() { self.parked.look(self.updates, now_ns) } else { Look::None };
        let resumed = look != Look::None && self.resume(bus, look);
        self.complete(bus, now_ns, stop_at);
        let taken = self.take(bus, look, stop_at)?;
        self.serve.kick()?;
        let completed = self.publish_if_any(bus)?;
        Ok(taken || completed || reaped || resumed || self.is_spent())
    }

    /// Whether something waits for a translation.
    pub(super) fn waits(&self) -> bool {
        self.head.is_some() || !self.parked.is_empty()
    }

    /// Takes what the kernel has completed, so that unmaps no longer wait for it; completes no
    /// requests and does not touch the ring. True if there was anything.
    pub fn reap(&mut self) -> bool {
        let reaped = self.serve.reap(&mut self.slots, &self.log);
        // Transfers that were done in part go on, whatever becomes of the queue. The next round
        // reports an io_uring that cannot be used.
        let _ = self.serve.kick();
        reaped
    }

    /// All that there is to do for a queue that is disabled or has failed: [`reap`](Self::reap).
    /// True if there was anything, or the kernel has refused what is to be submitted again.
    pub(super) fn idle(&mut self) -> bool {
        self.serve.begin_round();
        self.reap() || self.is_spent()
    }

    /// Publishes completed requests; true if there were any.
    fn publish_if_any(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        let completed = self.stats.requests != self.published && self.serve.is_whole();
        if completed {
            self.publish(bus)?;
        }
        Ok(completed)
    }

    fn publish(&mut self, bus: &Bus) -> Result<(), QueueError> {
        // Publish nothing that may have been read from memory that is gone, or that is not on
        // record.
        bus.check()?;
        self.check_record()?;
        self.published = self.stats.requests;
        let wanted = match &mut self.recorded {
            Some(recorded) => recorded.publish(&mut self.ring),
            None => self.ring.publish_used(),
        };
        self.log.mark(&mut self.ring);
        self.interrupts = wanted;
        if wanted {
            self.interrupt();
        }
        Ok(())
    }

    /// Keeps `memory`, which the bus is about to lose, for as long as the kernel moves data there.
    pub fn keep(&mut self, memory: &Arc<Memory>) {
        self.serve.keep(memory);
    }

    /// Translates the ring's addresses again, after the memory has changed.
    ///
    /// # Errors
    /// The ring is not there.
    pub fn move_to(&mut self, mem: &impl Translate) -> Result<(), QueueError> {
        self.find(mem)?;
        if self.away.take().is_some() {
            self.disarm();
        }
        Ok(())
    }

    /// Moves the ring to these addresses, at which [`move_to`](Self::move_to) must find it.
    pub fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        self.ring.relocate(desc, avail, used);
    }

    /// Whether requests are under way.
    pub fn is_busy(&self) -> bool {
        self.free.len() != self.slots.len()
    }

    /// How many requests the kernel has.
    pub fn in_kernel(&self) -> u32 {
        self.serve.in_kernel()
    }

    /// What the kernel still uses of a queue that goes, whose bus reaches `memory`.
    pub(super) fn into_remains(mut self, memory: &Arc<Memory>) -> Remains<S> {
        self.keep(memory);
        Remains { serve: self.serve, slots: self.slots }
    }

    fn take(&mut self, bus: &Bus, look: Look, stop_at: u64) -> Result<bool, QueueError> {
        self.advance_stalled(bus);
        if self.head.is_some() && look == Look::None {
            self.look_behind(bus);
            return Ok(false);
        }
        let mut most = if self.is_full() { 0 } else { ROUND_REQUESTS };
        let enough = self.stats.requests + if self.interrupts { most as u64 } else { self.share() };
        let mut taken = 0;
        while taken < most
            && self.serve.bytes() < stop_at
            && self.stats.requests < enough
            && !self.is_occupied()
        {
            let Some(&at) = self.free.last() else { break };
            match self.take_one(at, bus)? {
                Taken::Nothing => break,
                Taken::Table(why) => {
                    if self.wait_for_head(bus, &why) {
                        break;
                    }
                    self.give_head_up(at)?;
                }
                Taken::Chain => {
                    if !self.hold(at) {
                        most = 0;
                    }
                    self.advance(at, bus);
                }
            }
            taken += 1;
        }
        Ok(taken > 0)
    }

    /// How many requests a round does at once, if the driver looks for them by itself.
    fn share(&self) -> u64 {
        let ready = self.ring.ready(ROUND_REQUESTS as u16 * ROUND_SHARE);
        (ready / ROUND_SHARE).max(ROUND_LEAST).into()
    }

    /// Takes the next chain into `at`, if there is one.
    #[inline(always)]
    fn take_one(&mut self, at: u16, bus: &Bus) -> Result<Taken, QueueError> {
        let slot = &mut self.slots[usize::from(at)];
        let (ring, recorded) = (&mut self.ring, self.recorded.as_mut());
        let since = self.head.map_or(u64::MAX, |head| head.misses);
        match bus.since(since, || take_next(ring, recorded, bus, &mut slot.chain)) {
            Ok(Some(entry)) => self.begin(at, entry),
            Ok(None) => return Ok(Taken::Nothing),
            // Behind an IOTLB the translation may yet come, and if not, the next chain is
            // unaffected.
            Err(error) => match wait::unreachable_table(&error) {
                Some(why) if bus.iotlb().is_some() => return Ok(Taken::Table(*why)),
                _ => return Err(error.into()),
            },
        }
        Ok(Taken::Chain)
    }

    /// A chain was taken into `at`.
    #[inline]
    fn begin(&mut self, at: u16, entry: u16) {
        self.head = None;
        self.free.pop();
        let slot = &mut self.slots[usize::from(at)];
        (slot.state, slot.entry, slot.number) = (State::Taken, entry, self.taken);
        self.taken += 1;
        self.enqueue(at);
    }

    /// Goes on with a request, as far as it goes.
    #[inline(always)]
    fn advance(&mut self, at: u16, bus: &Bus) {
        let slot = &mut self.slots[usize::from(at)];
        let since = slot.wait.as_ref().map_or(u64::MAX, |wait| wait.misses);
        let (serve, now_ns) = (&mut self.serve, self.now_ns);
        let with = Advance { at, chain: &slot.chain, bus, now_ns };
        match bus.since(since, || serve.advance(&mut slot.request, with)) {
            Next::Done { ok, used } => self.finish(at, ok, used),
            Next::Busy => {}
            Next::Later => self.stall(at),
            Next::Missing(missing) => bus.since(since, || self.park(at, missing, bus)),
        }
    }

    /// [`advance`](Self::advance) where that is rare, and not inlined.
    #[inline(never)]
    fn go_on(&mut self, at: u16, bus: &Bus) {
        self.advance(at, bus);
    }

    /// Goes on with requests whose operation has completed.
    fn complete(&mut self, bus: &Bus, now_ns: u64, stop_at: u64) {
        while let enough = self.serve.bytes() >= stop_at
            && let Some((at, ok)) = self.serve.completed(now_ns, enough)
        {
            let slot = &mut self.slots[usize::from(at)];
            // It waits for something else from now on.
            slot.wait = None;
            self.serve.complete(&mut slot.request, ok);
            self.advance(at, bus);
        }
    }

    #[inline]
    fn finish(&mut self, at: u16, ok: bool, used: u32) {
        let slot = &mut self.slots[usize::from(at)];
        self.serve.end(&mut slot.request);
        if self.order.is_none() {
            return self.give_back(at, ok, used);
        }
        (slot.state, slot.wait) = (State::Done { ok, used }, None);
        self.give_back_in_order();
    }

    #[inline]
    fn give_back(&mut self, at: u16, ok: bool, used: u32) {
        let slot = &mut self.slots[usize::from(at)];
        if let Some(recorded) = &mut self.recorded {
            recorded.complete(slot.chain.head(), slot.entry);
        }
        self.ring.push_used(slot.chain.head(), used);
        slot.end(&mut self.held);
        self.free.push(at);
        self.stats.requests += 1;
        self.stats.failed += u64::from(!ok);
    }

    fn interrupt(&mut self) {
        if let Some(call) = &self.call {
            call.notify();
            self.stats.interrupts += 1;
        }
    }

    /// When the clock next gives the queue something to do, in ns, if it does.
    pub fn next_due(&self) -> Option<u64> {
        if let Some(away) = self.away {
            // No event signals that it is mapped again, and the driver may omit kicks.
            return away.retry_at;
        }
        let parked = self.waits().then_some(self.parked.at_ns);
        parked.into_iter().chain(self.serve.next_due()).min()
    }

    /// Enables kicks before a sleep; true if there is something to do already.
    pub fn arm(&mut self, bus: &Bus) -> bool {
        match self.away {
            Some(away) => bus.updates() != away.updates,
            None if self.ring.is_valid() && self.ring.broken().is_none() => {
                // A chain that cannot be taken yet is not new. Misses for what it needs were sent.
                let takes = self.head.is_none() && !self.is_stalled() && !self.is_full();
                let more = self.ring.enable_kicks() && takes;
                self.look_behind(bus);
                self.log.mark(&mut self.ring);
                more || self.waits() && self.parked.has_updates(bus.updates())
            }
            None => false,
        }
    }

    /// Disables kicks while the worker is awake.
    pub fn disarm(&mut self) {
        if self.ring.is_valid() && self.ring.broken().is_none() {
            self.ring.suppress_kicks();
            self.log.mark(&mut self.ring);
        }
    }

    /// Whether requests wait for room.
    fn is_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// Counts the descriptors of a request that was taken, if they are many. False if no more are
    /// to be taken now.
    fn hold(&mut self, at: u16) -> bool {
        let descs = self.slots[usize::from(at)].chain.descs().len();
        if descs <= KEPT {
            return true;
        }
        self.held += descs;
        self.stats.full += u64::from(self.is_full());
        !self.is_full()
    }

    /// Whether requests in progress take as much memory as they may: the ring is read further when
    /// some have ended.
    fn is_full(&self) -> bool {
        self.held >= MOST_HELD
    }

    /// Whether there is something to do before another request is taken.
    fn is_occupied(&self) -> bool {
        self.is_stalled() || self.is_spent()
    }

    /// Queues a request until its [`Serve`] has room.
    fn stall(&mut self, at: u16) {
        self.stalled.push_back(at);
    }

    /// Goes on with requests that found no room, as far as there is some now.
    fn advance_stalled(&mut self, bus: &Bus) {
        while !self.is_spent()
            && let Some(at) = self.stalled.pop_front()
        {
            let others = self.stalled.len();
            self.go_on(at, bus);
            if self.stalled.len() > others {
                // It stays first.
                self.stalled.rotate_right(1);
                return;
            }
        }
    }

    /// Whether the last round ended because it had moved enough, so that there may be more to do.
    pub fn is_spent(&self) -> bool {
        self.serve.is_spent()
    }
}

/// What tests look at.
#[cfg(any(test, feature = "testing"))]
impl<R> Slot<R> {
    /// Its buffers.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }
}

/// What tests look at.
#[cfg(any(test, feature = "testing"))]
impl<S: Serve> RequestQueue<S> {
    /// The ring, for its position.
    pub fn ring(&self) -> &device::Queue {
        &self.ring
    }

    /// How many requests wait for translations.
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// How many descriptors count towards the limit on large requests.
    pub fn held(&self) -> usize {
        self.held
    }

    /// The requests in progress, and room for others: as many as the ring has descriptors.
    pub fn slots(&self) -> &[Slot<S::Request>] {
        &self.slots
    }

    /// Whether the ring is not mapped now.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }
}
