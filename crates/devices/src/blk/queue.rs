//! The device's end of one request queue of a block device.

use std::{collections::VecDeque, ops::AddAssign, os::fd::OwnedFd, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::shootdown::Lease;
use ringfence_mem::{Access, AccessError, Memory, Translate};
use ringfence_virtq::{Chain, RingError, device};

use super::{
    request::{self, Action},
    wire::Status,
};
use crate::{
    bus::Bus,
    disk::{Disk, FileIo, FileOp, Pacer, Ram},
    event,
};

/// How many bytes one round moves before it looks at other queues: a request to the IOMMU, say,
/// for whose answer a driver waits.
const ROUND_BYTES: u64 = 64 << 10;
/// How many new requests one round takes at most.
const ROUND_REQUESTS: usize = 32;
/// The most pieces of memory that one request to a file may have (Linux's `UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// How long a ring that is not mapped is left alone before it is looked for again: at first, and at
/// most.
const AWAY_NS: (u64, u64) = (500_000, 16_000_000);

/// Why a queue stopped.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The driver broke the rules of the ring, or the ring cannot be reached.
    #[error("ring: {0}")]
    Ring(#[from] RingError),
    /// Memory that was in use is gone.
    #[error("memory: {0}")]
    Memory(#[from] AccessError),
    /// io_uring cannot be used.
    #[error("io_uring: {0}")]
    Io(#[from] std::io::Error),
}

/// What a queue has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueStats {
    /// Requests answered.
    pub requests: u64,
    /// Of these, answered with another status than OK.
    pub failed: u64,
    /// Bytes of data moved.
    pub bytes: u64,
    /// Interrupts sent.
    pub interrupts: u64,
}

impl AddAssign for QueueStats {
    fn add_assign(&mut self, more: QueueStats) {
        self.requests += more.requests;
        self.failed += more.failed;
        self.bytes += more.bytes;
        self.interrupts += more.interrupts;
    }
}

/// A request that was taken from the ring.
#[derive(Default)]
struct Slot {
    chain: Chain,
    action: Option<Action>,
    /// What the kernel was told of the memory; kept until the completion.
    pieces: Vec<libc::iovec>,
    /// Keep the translations of `pieces` alive.
    leases: Vec<Lease>,
}

/// Where the data comes from and goes to.
// One a queue, of which there are few: the size of the largest costs nothing.
#[allow(clippy::large_enum_variant)]
enum Store {
    Ram(Arc<Ram>),
    Paced {
        ram: Arc<Ram>,
        /// The disk's own: queues share it.
        pacer: Arc<Mutex<Pacer>>,
        /// Slots in order of completion, with its time.
        due: VecDeque<(u64, u16)>,
    },
    File {
        io: FileIo,
        /// A request that found no room in the io_uring.
        stalled: Option<u16>,
        /// Completed, and not answered yet.
        done: Vec<(u16, bool)>,
        /// What the bus no longer reaches, and the kernel perhaps still does.
        old: Vec<Arc<Memory>>,
    },
}

/// A ring whose addresses lead nowhere now.
#[derive(Clone, Copy)]
struct Away {
    retry_at: u64,
    pause_ns: u64,
}

/// The device's end of one request queue.
pub struct BlkQueue {
    // Dropped in this order: the store waits for what the kernel still has under way, and only
    // then go the slots, whose pieces and leases it uses, and the ring, which keeps the memory.
    store: Store,
    slots: Vec<Slot>,
    ring: device::Queue,
    /// Set while the ring is not mapped.
    away: Option<Away>,
    free: Vec<u16>,
    capacity: u64,
    id: Arc<str>,
    call: Option<Arc<OwnedFd>>,
    stats: QueueStats,
}

impl BlkQueue {
    /// Serves `disk` on `ring`. Interrupts go to `call`.
    ///
    /// # Errors
    /// The kernel gives no io_uring.
    pub fn new(
        ring: device::Queue,
        disk: &Disk,
        id: Arc<str>,
        call: Option<Arc<OwnedFd>>,
    ) -> std::io::Result<BlkQueue> {
        let size = ring.config().size;
        let store = match disk {
            Disk::Ram(ram) => Store::Ram(Arc::clone(ram)),
            Disk::Paced(ram, pacer) => Store::Paced {
                ram: Arc::clone(ram),
                pacer: Arc::clone(pacer),
                due: VecDeque::with_capacity(size.into()),
            },
            Disk::File { file, .. } => Store::File {
                io: FileIo::new(Arc::clone(file), size.into())?,
                stalled: None,
                done: Vec::with_capacity(size.into()),
                old: Vec::new(),
            },
        };
        Ok(BlkQueue {
            store,
            slots: (0..size).map(|_| Slot::default()).collect(),
            ring,
            away: None,
            free: (0..size).rev().collect(),
            capacity: disk.len(),
            id,
            call,
            stats: QueueStats::default(),
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
    pub fn set_call(&mut self, call: Option<Arc<OwnedFd>>) {
        self.call = call;
    }

    /// Has completions of io_uring write to `event`, for a worker that sleeps.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn notify(&self, event: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        match &self.store {
            Store::File { io, .. } => io.notify(event),
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
        let reaped = self.reap();
        if !self.find_ring(bus, now_ns)? {
            return Ok(reaped);
        }
        let before = self.stats.requests;
        let stop_at = self.stats.bytes + ROUND_BYTES;
        self.complete(bus, now_ns, stop_at);
        let taken = self.take(bus, now_ns, stop_at)?;
        if let Store::File { io, .. } = &mut self.store {
            io.kick()?;
        }
        let answered = self.stats.requests != before;
        if answered {
            self.publish(bus)?;
        }
        Ok(taken || answered || reaped)
    }

    /// Takes what the kernel has done, so that unmaps no longer wait for it; answers nothing and
    /// does not touch the ring. True if there was anything. All that is to be done for a queue that
    /// is disabled or has failed.
    pub fn reap(&mut self) -> bool {
        let Store::File { io, done, old, .. } = &mut self.store else { return false };
        let (slots, before) = (&mut self.slots, done.len());
        io.reap(|token, result| {
            let at = token as u16;
            let slot = &mut slots[usize::from(at)];
            slot.leases.clear();
            let wanted = match slot.action {
                Some(Action::Transfer { len, .. }) => len,
                _ => 0,
            };
            done.push((at, result.is_ok_and(|moved| u64::from(moved) == wanted)));
        });
        if io.in_flight() == 0 {
            old.clear();
        }
        done.len() != before
    }

    /// Answers all that is under way, and waits for it where it must, so that nothing is lost when
    /// the ring stops. If the ring is not mapped nothing can be answered.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn drain(&mut self, bus: &Bus) -> Result<(), QueueError> {
        if !self.ring.is_valid() || !self.is_busy() {
            return Ok(());
        }
        while self.is_busy() {
            if let Store::File { io, stalled, done, .. } = &mut self.store {
                let stalled = stalled.take();
                if stalled.is_none() && done.is_empty() {
                    io.kick()?;
                    io.wait()?;
                }
                if let Some(at) = stalled {
                    self.start(at, bus, 0);
                }
            }
            self.reap();
            // Whatever the time is: a real disk may be faster, too.
            self.complete(bus, u64::MAX, u64::MAX);
        }
        self.publish(bus)
    }

    /// Looks whether the ring is where it was, and for where it is else; false if it is away.
    #[inline]
    fn find_ring(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        // Ring addresses are IOVAs only behind an IOMMU; plain ones never become invalid.
        if self.ring.is_valid() { Ok(true) } else { self.look_for_ring(bus, now_ns) }
    }

    #[cold]
    fn look_for_ring(&mut self, bus: &Bus, now_ns: u64) -> Result<bool, QueueError> {
        let found = match self.away {
            Some(Away { retry_at, .. }) if now_ns < retry_at => return Ok(false),
            // The driver has been told the first time.
            Some(_) => bus.silently(|| self.ring.revalidate(bus)),
            None => self.ring.revalidate(bus),
        };
        match found {
            Ok(()) => self.away = None,
            Err(RingError::Unreachable { .. }) => {
                let (first, most) = AWAY_NS;
                let pause_ns = self.away.map_or(first, |away| (away.pause_ns * 2).min(most));
                self.away = Some(Away { retry_at: now_ns.saturating_add(pause_ns), pause_ns });
            }
            Err(error) => return Err(error.into()),
        }
        Ok(self.away.is_none())
    }

    fn publish(&mut self, bus: &Bus) -> Result<(), QueueError> {
        // Nothing is published that may have been read from memory that is gone.
        bus.check()?;
        if self.ring.publish_used() {
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
        if let Store::File { io, old, .. } = &mut self.store
            && io.in_flight() > 0
        {
            old.push(Arc::clone(memory));
        }
    }

    /// Translates the ring's addresses anew, after the memory has changed.
    ///
    /// # Errors
    /// The ring is not there.
    pub fn move_to(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        self.ring.revalidate(mem)
    }

    /// Whether requests are under way.
    pub fn is_busy(&self) -> bool {
        self.free.len() != self.slots.len()
    }

    /// When there is something to do by the clock, if there will be.
    pub fn next_due(&self) -> Option<u64> {
        if let Some(away) = self.away {
            // Nobody tells when it is mapped again, and the driver may think us awake.
            return Some(away.retry_at);
        }
        match &self.store {
            Store::Paced { due, .. } => due.front().map(|&(at, _)| at),
            _ => None,
        }
    }

    /// Asks for kicks before a sleep; true if there is something to do already.
    pub fn arm(&mut self) -> bool {
        self.ring.is_valid() && self.ring.broken().is_none() && self.ring.enable_kicks()
    }

    /// Asks for no kicks while the worker is awake.
    pub fn disarm(&mut self) {
        if self.ring.is_valid() && self.ring.broken().is_none() {
            self.ring.suppress_kicks();
        }
    }

    fn take(&mut self, bus: &Bus, now_ns: u64, stop_at: u64) -> Result<bool, QueueError> {
        if let Store::File { stalled, .. } = &mut self.store
            && let Some(at) = stalled.take()
        {
            self.start(at, bus, now_ns);
        }
        let mut taken = 0;
        while taken < ROUND_REQUESTS && self.stats.bytes < stop_at && !self.is_stalled() {
            let Some(&at) = self.free.last() else { break };
            if !self.ring.pop(bus, &mut self.slots[usize::from(at)].chain)? {
                break;
            }
            self.free.pop();
            taken += 1;
            let chain = &self.slots[usize::from(at)].chain;
            match request::parse(chain, bus, self.capacity) {
                Ok(action) => {
                    self.slots[usize::from(at)].action = Some(action);
                    self.start(at, bus, now_ns);
                }
                Err(status) => self.finish(at, bus, status, 0),
            }
        }
        Ok(taken > 0)
    }

    fn is_stalled(&self) -> bool {
        matches!(&self.store, Store::File { stalled: Some(_), .. })
    }

    /// Begins what a slot asks for; what can be done at once is done.
    fn start(&mut self, at: u16, bus: &Bus, now_ns: u64) {
        let slot = &mut self.slots[usize::from(at)];
        match (slot.action.expect("set when the chain was parsed"), &mut self.store) {
            (Action::Identify, _) => {
                let written = request::identify(&slot.chain, bus, &self.id);
                let status = if written.is_ok() { Status::Ok } else { Status::IoErr };
                self.finish(at, bus, status, written.unwrap_or(0));
            }
            (Action::Flush, Store::Ram(_) | Store::Paced { .. }) => {
                self.finish(at, bus, Status::Ok, 0);
            }
            (Action::Transfer { .. }, Store::Ram(_)) => self.move_now(at, bus),
            (Action::Transfer { len, .. }, Store::Paced { pacer, due, .. }) => {
                // Times never run backwards, whoever else schedules: the queue stays in order.
                due.push_back((pacer.lock().schedule(now_ns, len), at));
            }
            (action, Store::File { io, stalled, .. }) => match hand_over(slot, action, io, bus, at)
            {
                Handed::Over => {}
                Handed::Later => *stalled = Some(at),
                Handed::Failed => self.finish(at, bus, Status::IoErr, 0),
            },
        }
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
                    self.move_now(at, bus);
                }
            }
            Store::File { done, .. } => {
                let mut done = std::mem::take(done);
                for (at, ok) in done.drain(..) {
                    let action = self.slots[usize::from(at)].action;
                    let written = match action {
                        Some(Action::Transfer { write: false, len, .. }) if ok => len as u32,
                        _ => 0,
                    };
                    if let (true, Some(Action::Transfer { len, .. })) = (ok, action) {
                        self.stats.bytes += len;
                    }
                    self.finish(at, bus, if ok { Status::Ok } else { Status::IoErr }, written);
                }
                if let Store::File { done: kept, .. } = &mut self.store {
                    *kept = done;
                }
            }
        }
    }

    /// Moves the data of a transfer now. The addresses are translated here, at the moment of the
    /// access, so that a mapping that is gone by then is refused however old the request is.
    fn move_now(&mut self, at: u16, bus: &Bus) {
        let (Store::Ram(ram) | Store::Paced { ram, .. }) = &self.store else {
            unreachable!("only memory is moved by us")
        };
        let slot = &self.slots[usize::from(at)];
        let Some(Action::Transfer { write, offset, len }) = slot.action else {
            unreachable!("only transfers are scheduled")
        };
        match request::transfer(&slot.chain, bus, ram, write, offset, len) {
            Ok(()) => {
                self.stats.bytes += len;
                self.finish(at, bus, Status::Ok, if write { 0 } else { len as u32 });
            }
            Err(_) => self.finish(at, bus, Status::IoErr, 0),
        }
    }

    fn finish(&mut self, at: u16, bus: &Bus, status: Status, written: u32) {
        let slot = &mut self.slots[usize::from(at)];
        let used = request::answer(&slot.chain, bus, status, written);
        self.ring.push_used(slot.chain.head(), used);
        slot.action = None;
        self.free.push(at);
        self.stats.requests += 1;
        self.stats.failed += u64::from(status != Status::Ok);
    }

    fn interrupt(&mut self) {
        if let Some(call) = &self.call {
            event::signal(call);
            self.stats.interrupts += 1;
        }
    }
}

enum Handed {
    Over,
    Later,
    Failed,
}

/// Translates the data of a slot and hands it to the kernel.
fn hand_over(slot: &mut Slot, action: Action, io: &mut FileIo, bus: &Bus, at: u16) -> Handed {
    let Slot { chain, pieces, leases, .. } = slot;
    pieces.clear();
    leases.clear();
    let op = match action {
        Action::Flush => FileOp::Flush,
        Action::Transfer { write, offset, len } => {
            let access = if write { Access::Read } else { Access::Write };
            for desc in request::data(chain, write, len) {
                leases.extend(bus.lease(desc.addr, desc.len.into()));
                let visited = bus.slices(desc.addr, desc.len.into(), access, |piece| {
                    let base: *mut libc::c_void = piece.as_ptr().cast();
                    match pieces.last_mut() {
                        Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => {
                            last.iov_len += piece.len();
                        }
                        _ => pieces.push(libc::iovec { iov_base: base, iov_len: piece.len() }),
                    }
                });
                if visited.is_err() || pieces.len() > MAX_PIECES {
                    leases.clear();
                    return Handed::Failed;
                }
            }
            if write { FileOp::Write(offset) } else { FileOp::Read(offset) }
        }
        Action::Identify => unreachable!("answered without the file"),
    };
    // SAFETY: `pieces` lives in its slot, which is not touched before the completion. The memory
    // it names belongs to the `Memory` that the queue's bus keeps, or `old` once the bus has another,
    // and the leases keep the driver's unmap from being answered before; nothing borrows it (it is
    // only ever copied).
    match unsafe { io.submit(op, pieces, at.into()) } {
        true => Handed::Over,
        false => {
            leases.clear();
            Handed::Later
        }
    }
}
