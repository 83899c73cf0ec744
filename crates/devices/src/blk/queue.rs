//! The device's end of one request queue of a block device.
//!
//! A queue never waits: a step of a request that meets a translation that is missing parks the
//! request, and all that the request will need is asked for at once. It goes on when there was an
//! answer, and fails when its patience is over.

mod error;
mod inflight;
mod order;
mod parked;
mod ring;
mod room;
mod sleep;
mod stats;
mod stop;
mod store;
#[cfg(test)]
mod tests;
mod wait;

pub use error::QueueError;
pub use stats::QueueStats;

use std::{
    os::fd::BorrowedFd,
    sync::{Arc, atomic::AtomicBool},
};

use ringfence_mem::{Memory, Translate};
use ringfence_run::notifier::Notifier;
use ringfence_vhost_user_backend::{Bus, RingLog};
use ringfence_virtq::{Chain, blk::Status, device};

use self::{
    inflight::{Recorded, take_next},
    order::Order,
    parked::{Look, Parked},
    ring::Away,
    store::{Handed, Store, Transfer},
    wait::{Head, Wait},
};
use super::request::{self, Action, Limits, Stop};
use crate::disk::Disk;

/// How many bytes one round moves before it looks at other queues: a request to the IOMMU, say,
/// for whose answer a driver waits.
const ROUND_BYTES: u64 = 64 << 10;
/// How many new requests one round takes at most.
const ROUND_REQUESTS: usize = 32;

/// A request that was taken from the ring.
#[derive(Default)]
struct Slot {
    chain: Chain,
    step: Step,
    transfer: Transfer,
    /// Its number among all that were taken.
    number: u64,
    /// Its entry in the record of what is in flight.
    entry: u16,
    wait: Option<Wait>,
}

impl Slot {
    /// Whether what the kernel has of it moves data.
    fn moves_data(&self) -> bool {
        matches!(self.step, Step::Busy(Action::Transfer { .. }))
    }

    /// Whether it waits for its turn to be answered.
    fn is_done(&self) -> bool {
        matches!(self.step, Step::Done(..))
    }
}

/// What is to be done next with a request.
#[derive(Clone, Copy, Default)]
enum Step {
    /// Nothing: there is none.
    #[default]
    Free,
    /// Read its header.
    Parse,
    /// Begin it.
    Start(Action),
    /// Wait: the kernel has it, or its time has not come.
    Busy(Action),
    /// Move the data now.
    Move(Action),
    /// Bring what the disk has read to where the driver wants it, and go on.
    Deliver(Action),
    /// Write this status, after so many bytes of data.
    Answer(Status, u32),
    /// Wait: this is answered, with so many bytes in all, when those before it are.
    Done(Status, u32),
}

/// What the kernel still uses of a queue that is gone: the memory, and the leases on its translations.
pub(super) struct Remains {
    // Dropped in this order, as in `BlkQueue`.
    store: Store,
    slots: Vec<Slot>,
}

impl Remains {
    /// Whether no other ring may be served before it is over: what the kernel has may still change the
    /// disk, or the memory of a guest.
    pub(super) fn holds(&self) -> bool {
        let own = matches!(&self.store, Store::File(file) if file.buffers.is_some());
        let reads = |step| matches!(step, Step::Busy(Action::Transfer { write: false, .. }));
        let busy = |step| matches!(step, Step::Busy(_));
        self.slots.iter().any(|slot| busy(slot.step) && !(own && reads(slot.step)))
    }

    /// Takes what the kernel has done; how many requests it still has.
    pub(super) fn reap(&mut self) -> u32 {
        if let Store::File(file) = &mut self.store {
            file.reap(&mut self.slots, &RingLog::default());
            for (at, _) in file.done.drain(..) {
                // Nobody is answered. What has ended holds nothing up.
                self.slots[usize::from(at)].step = Step::Free;
            }
            // What was moved in part goes on.
            let _ = file.io.kick();
        }
        self.store.in_kernel()
    }
}

/// The device's end of one request queue.
pub struct BlkQueue {
    // Dropped in this order: the store waits for what the kernel still has under way, and only
    // then go the slots, whose pieces and leases it uses, and the ring, which keeps the memory.
    store: Store,
    slots: Vec<Slot>,
    ring: device::Queue,
    log: RingLog,
    order: Option<Order>,
    recorded: Option<Recorded>,
    /// Set while the ring is not mapped.
    away: Option<Away>,
    /// Whether the ring was mapped when it [began to stop](Self::begin_stop).
    answers_to_the_end: bool,
    /// How often the endpoint had been bound anew when the ring was found last.
    found: Option<u64>,
    parked: Parked,
    /// Set while the next chain cannot be taken, for want of a translation of its table.
    head: Option<Head>,
    free: Vec<u16>,
    /// How many descriptors requests under way have, all that have more than [`KEPT`].
    held: usize,
    /// How many requests were taken, less those that were put back.
    taken: u64,
    limits: Limits,
    id: Arc<str>,
    call: Option<Arc<Notifier>>,
    stats: QueueStats,
    /// How many requests were answered when that was published last.
    published: u64,
    now_ns: u64,
    /// The count of answers when this round began.
    answers: u64,
    say_at: u64,
    ready: Vec<u16>,
}

impl BlkQueue {
    /// Serves `disk` on `ring`. Interrupts go to `call`.
    ///
    /// # Errors
    /// The kernel gives no io_uring.
    pub fn new(
        ring: device::Queue,
        (disk, read_only): (&Disk, bool),
        id: Arc<str>,
        call: Option<Arc<Notifier>>,
    ) -> std::io::Result<BlkQueue> {
        let size = ring.config().size;
        Ok(BlkQueue {
            store: Store::new(disk, size)?,
            slots: (0..size).map(|_| Slot::default()).collect(),
            ring,
            log: RingLog::default(),
            order: None,
            recorded: None,
            away: None,
            answers_to_the_end: false,
            found: None,
            parked: Parked::default(),
            head: None,
            free: (0..size).rev().collect(),
            held: 0,
            taken: 0,
            limits: Limits::of(disk, read_only),
            id,
            call,
            stats: QueueStats::default(),
            published: 0,
            now_ns: 0,
            answers: 0,
            say_at: 0,
            ready: Vec::new(),
        })
    }

    /// What it has done.
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// The ring, to be asked where it stands.
    pub fn ring(&self) -> &device::Queue {
        &self.ring
    }

    /// Replaces the descriptor that interrupts are sent through.
    pub fn set_call(&mut self, call: Option<Arc<Notifier>>) {
        self.call = call;
    }

    /// Has writes durable when they are answered, while this is set.
    pub(super) fn set_write_through(&mut self, through: Arc<AtomicBool>) {
        if let Store::File(file) = &mut self.store {
            file.through = through;
        }
    }

    /// Has what is written marked, where `log` says.
    pub(super) fn set_log(&mut self, log: RingLog) {
        self.log = log;
    }

    /// Where what is written is marked, and the ring.
    pub(super) fn log(&mut self) -> (&mut RingLog, &mut device::Queue) {
        (&mut self.log, &mut self.ring)
    }

    /// Has completions of io_uring write to `event`, for a worker that sleeps.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn notify(&self, event: BorrowedFd<'_>) -> std::io::Result<()> {
        match &self.store {
            Store::File(file) => file.io.notify(event),
            _ => Ok(()),
        }
    }

    /// Does what there is to do; true if there was anything. A ring behind an IOMMU that is not
    /// mapped now is left alone until it is again (rule D22).
    ///
    /// # Errors
    /// The queue must be stopped; nothing else is harmed. It is to be [reaped](Self::reap) still.
    pub fn poll(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        self.work(bus, now_ns).map_err(|error| match error {
            // A ring in a file that was truncated reads as zeroes and looks broken in some way.
            QueueError::Ring(_) => bus.check().map_or_else(QueueError::Memory, |()| error),
            other => other,
        })
    }

    fn work(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        self.now_ns = now_ns;
        self.store.begin_round();
        // Before anything is looked up: an answer that comes meanwhile is one to look again for.
        self.answers = bus.answers();
        let reaped = self.reap();
        if !self.find_ring(bus)? {
            return Ok(reaped);
        }
        self.check_record()?;
        self.end_order(false);
        let stop_at = self.stats.bytes + ROUND_BYTES;
        let look = if self.waits() { self.parked.look(self.answers, now_ns) } else { Look::None };
        let resumed = look != Look::None && self.resume(bus, look);
        self.complete(bus, now_ns, stop_at);
        let taken = self.take(bus, look, stop_at)?;
        if let Store::File(file) = &mut self.store {
            file.io.kick()?;
        }
        let answered = self.publish_if_any(bus)?;
        Ok(taken || answered || reaped || resumed || self.is_spent())
    }

    /// Whether something waits for a translation.
    pub(super) fn waits(&self) -> bool {
        self.head.is_some() || !self.parked.is_empty()
    }

    /// Takes what the kernel has done, so that unmaps no longer wait for it; answers nothing and
    /// does not touch the ring. True if there was anything. All that is to be done for a queue that
    /// is disabled or has failed.
    pub fn reap(&mut self) -> bool {
        match &mut self.store {
            Store::File(file) => {
                let reaped = file.reap(&mut self.slots, &self.log);
                // What was moved in part goes on, whatever becomes of the queue. A ring that cannot
                // be used is found out by the next round.
                let _ = file.io.kick();
                reaped
            }
            _ => false,
        }
    }

    /// Publishes what was answered; true if anything was.
    fn publish_if_any(&mut self, bus: &Bus) -> Result<bool, QueueError> {
        let answered = self.stats.requests != self.published;
        if answered {
            self.publish(bus)?;
        }
        Ok(answered)
    }

    fn publish(&mut self, bus: &Bus) -> Result<(), QueueError> {
        // Nothing is published that may have been read from memory that is gone, or that is not on record.
        bus.check()?;
        self.check_record()?;
        self.published = self.stats.requests;
        let wanted = match &mut self.recorded {
            Some(recorded) => recorded.publish(&mut self.ring),
            None => self.ring.publish_used(),
        };
        self.log.mark(&mut self.ring);
        if wanted {
            self.interrupt();
        }
        Ok(())
    }

    /// Whether the ring is not mapped now.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Keeps `memory`, which the bus is about to lose, for as long as the kernel moves data there.
    pub fn keep(&mut self, memory: &Arc<Memory>) {
        if let Store::File(file) = &mut self.store
            && file.buffers.is_none()
            && file.io.in_flight() > 0
        {
            file.old.push(Arc::clone(memory));
        }
    }

    /// Translates the ring's addresses anew, after the memory has changed.
    ///
    /// # Errors
    /// The ring is not there.
    pub fn move_to(&mut self, mem: &impl Translate) -> Result<(), QueueError> {
        self.find(mem)
    }

    /// The ring lies elsewhere from now on; it is to be [found](Self::move_to) there.
    pub fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        self.ring.relocate(desc, avail, used);
    }

    /// Whether requests are under way.
    pub fn is_busy(&self) -> bool {
        self.free.len() != self.slots.len()
    }

    /// How many requests the kernel has.
    pub fn in_kernel(&self) -> u32 {
        self.store.in_kernel()
    }

    /// What the kernel still uses of a queue that goes, whose bus reaches `memory`.
    pub(super) fn into_remains(mut self, memory: &Arc<Memory>) -> Remains {
        self.keep(memory);
        Remains { store: self.store, slots: self.slots }
    }

    fn take(&mut self, bus: &Bus, look: Look, stop_at: u64) -> Result<bool, QueueError> {
        self.advance_stalled(bus);
        if self.head.is_some() && look == Look::None {
            self.look_behind(bus);
            return Ok(false);
        }
        let mut most = if self.is_full() { 0 } else { ROUND_REQUESTS };
        let mut taken = 0;
        while taken < most && self.stats.bytes < stop_at && !self.is_occupied() {
            let Some(&at) = self.free.last() else { break };
            let slot = &mut self.slots[usize::from(at)];
            let (ring, recorded) = (&mut self.ring, self.recorded.as_mut());
            let since = self.head.map_or(u64::MAX, |head| head.questions);
            match bus.since(since, || take_next(ring, recorded, bus, &mut slot.chain)) {
                Ok(Some(entry)) => {
                    self.head = None;
                    slot.entry = entry;
                }
                Ok(None) => break,
                // Behind an IOTLB it may yet come, and if not, the next chain is none the worse.
                Err(error) => match wait::unreachable_table(&error) {
                    Some(why) if bus.iotlb().is_some() => {
                        if self.wait_for_head(bus, why) {
                            break;
                        }
                        self.give_head_up(at)?;
                        taken += 1;
                        continue;
                    }
                    _ => return Err(error.into()),
                },
            }
            self.free.pop();
            slot.step = Step::Parse;
            slot.number = self.taken;
            self.taken += 1;
            self.enqueue(at);
            taken += 1;
            if !self.hold(at) {
                most = 0;
            }
            self.advance(at, bus);
        }
        Ok(taken > 0)
    }

    /// Goes on with a request, as far as it goes.
    fn advance(&mut self, at: u16, bus: &Bus) {
        let since = self.slots[usize::from(at)].wait.map_or(u64::MAX, |wait| wait.questions);
        bus.since(since, || self.go_on(at, bus));
    }

    fn go_on(&mut self, at: u16, bus: &Bus) {
        loop {
            let slot = &mut self.slots[usize::from(at)];
            let next = match slot.step {
                Step::Parse => request::parse(&slot.chain, bus, &self.limits).map(Step::Start),
                Step::Start(action) => match self.start(at, action, bus) {
                    Ok(Some(step)) => Ok(step),
                    Ok(None) => return,
                    Err(stop) => Err(stop),
                },
                Step::Move(action) => self.move_now(at, action, bus),
                Step::Deliver(action) => self.deliver(at, action, bus),
                Step::Answer(status, written) => {
                    match request::answer(&slot.chain, bus, status, written) {
                        Ok(used) => return self.finish(at, status, used),
                        Err(missing) => Err(Stop::Missing(missing)),
                    }
                }
                Step::Free | Step::Busy(_) | Step::Done(..) => unreachable!("it cannot go on"),
            };
            self.slots[usize::from(at)].step = match next {
                Ok(step) => step,
                Err(Stop::Status(status)) => Step::Answer(status, 0),
                Err(Stop::Missing(missing)) => return self.park(at, missing, bus),
            };
        }
    }

    /// Begins what a request asks for: what comes next, or nothing for now.
    fn start(&mut self, at: u16, action: Action, bus: &Bus) -> Result<Option<Step>, Stop> {
        let slot = &mut self.slots[usize::from(at)];
        let done = Step::Answer(Status::Ok, 0);
        match (action, &mut self.store) {
            (Action::Identify, _) => {
                let written = request::identify(&slot.chain, bus, &self.id)?;
                return Ok(Some(Step::Answer(Status::Ok, written)));
            }
            (Action::Nothing, _) => return Ok(Some(done)),
            (Action::Transfer { .. }, Store::Ram(_)) => return Ok(Some(Step::Move(action))),
            (Action::Transfer { len, .. }, Store::Paced { pacer, due, .. }) => {
                // Times never run backwards, whoever else schedules: the queue stays in order.
                due.push_back((pacer.lock().schedule(self.now_ns, len), at));
            }
            (Action::Zero { offset, len, .. }, Store::Ram(ram) | Store::Paced { ram, .. }) => {
                ram.zero(offset, len);
                return Ok(Some(done));
            }
            (Action::Flush, Store::Ram(_) | Store::Paced { .. }) => return Ok(Some(done)),
            (action, Store::File(file)) => {
                match file.hand_over((at, &slot.chain, &mut slot.transfer), action, bus) {
                    Handed::Over => {}
                    Handed::Later => {
                        file.stalled.push_back(at);
                        return Ok(None);
                    }
                    Handed::Failed => return Err(Status::IoErr.into()),
                    Handed::Missing(missing) => return Err(Stop::Missing(missing)),
                }
            }
        }
        slot.step = Step::Busy(action);
        Ok(None)
    }

    fn complete(&mut self, bus: &Bus, now_ns: u64, stop_at: u64) {
        match &mut self.store {
            Store::Ram(_) => {}
            Store::Paced { .. } => {
                while self.stats.bytes < stop_at
                    && let Store::Paced { due, .. } = &mut self.store
                    && let Some(&(when, at)) = due.front()
                    && when <= now_ns
                {
                    due.pop_front();
                    let slot = &mut self.slots[usize::from(at)];
                    let Step::Busy(action) = slot.step else { unreachable!("it was scheduled") };
                    slot.step = Step::Move(action);
                    self.advance(at, bus);
                }
            }
            Store::File(file) => {
                let mut done = std::mem::take(&mut file.done);
                let mut taken = 0;
                while let Some(&(at, ok)) = done.get(taken)
                    && !self.is_spent()
                {
                    taken += 1;
                    self.complete_one(at, ok);
                    self.advance(at, bus);
                }
                done.drain(..taken);
                if let Store::File(file) = &mut self.store {
                    file.done = done;
                }
            }
        }
    }

    /// The kernel is done with a request, or a part of it: what comes next.
    fn complete_one(&mut self, at: u16, ok: bool) {
        let Store::File(file) = &mut self.store else {
            unreachable!("only files are the kernel's")
        };
        let slot = &mut self.slots[usize::from(at)];
        slot.step = match slot.step {
            Step::Busy(action @ Action::Transfer { write, offset, len }) if ok => {
                if file.buffers.is_some() {
                    Step::Deliver(action)
                } else if file.part_is_done(&mut slot.transfer, offset, len) {
                    self.stats.bytes += len;
                    Step::Answer(Status::Ok, if write { 0 } else { len as u32 })
                } else {
                    // What it waits for from now on is something else.
                    slot.wait = None;
                    Step::Start(action)
                }
            }
            _ => Step::Answer(if ok { Status::Ok } else { Status::IoErr }, 0),
        };
    }

    /// Moves the data of a transfer now. The addresses are translated here, at the moment of the
    /// access, so that a mapping that is gone by then is refused however old the request is. What
    /// meets a missing translation in the middle is done again from its beginning.
    fn move_now(&mut self, at: u16, action: Action, bus: &Bus) -> Result<Step, Stop> {
        let (Store::Ram(ram) | Store::Paced { ram, .. }) = &self.store else {
            unreachable!("only memory is moved by us")
        };
        let Action::Transfer { write, offset, len } = action else {
            unreachable!("only transfers are moved")
        };
        let slot = &self.slots[usize::from(at)];
        request::transfer(&slot.chain, bus, ram, write, offset, len)?;
        self.stats.bytes += len;
        Ok(Step::Answer(Status::Ok, if write { 0 } else { len as u32 }))
    }

    /// A disk has read or written data in buffers of the service's own: it is brought to the driver, and what
    /// is left goes on.
    fn deliver(&mut self, at: u16, action: Action, bus: &Bus) -> Result<Step, Stop> {
        let Action::Transfer { write, len, .. } = action else {
            unreachable!("only transfers have data")
        };
        let Store::File(file) = &mut self.store else { unreachable!("only files have buffers") };
        let slot = &mut self.slots[usize::from(at)];
        if !file.deliver((&slot.chain, &mut slot.transfer), len, bus)? {
            slot.wait = None;
            return Ok(Step::Start(action));
        }
        self.stats.bytes += len;
        Ok(Step::Answer(Status::Ok, if write { 0 } else { len as u32 }))
    }

    fn finish(&mut self, at: u16, status: Status, used: u32) {
        if let Store::File(file) = &mut self.store {
            file.end(&mut self.slots[usize::from(at)].transfer);
        }
        if self.order.is_none() {
            return self.give_back(at, status, used);
        }
        let slot = &mut self.slots[usize::from(at)];
        (slot.step, slot.wait) = (Step::Done(status, used), None);
        self.give_back_in_order();
    }

    fn give_back(&mut self, at: u16, status: Status, used: u32) {
        let slot = &mut self.slots[usize::from(at)];
        if let Some(recorded) = &mut self.recorded {
            recorded.complete(slot.chain.head(), slot.entry);
        }
        self.ring.push_used(slot.chain.head(), used);
        slot.end(&mut self.held);
        self.free.push(at);
        self.stats.requests += 1;
        self.stats.failed += u64::from(status != Status::Ok);
    }

    fn interrupt(&mut self) {
        if let Some(call) = &self.call {
            call.notify();
            self.stats.interrupts += 1;
        }
    }
}
