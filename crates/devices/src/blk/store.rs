//! Where the data of requests comes from and goes to.

use std::{
    collections::VecDeque,
    io,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_iommu::shootdown::Lease;
use ringfence_mem::{Access, AccessError, HostSlice, Memory, Translate};
use ringfence_vhost_user_backend::{
    Bus, RingLog,
    requests::{KEPT, MOST_HELD, Slot},
};
use ringfence_virtq::{Chain, blk::Status};

use super::request::{self, Action};
use crate::disk::{Buffers, Disk, FileIo, FileOp, Pacer, Ram};

/// The most pieces of memory that one request to a file may have (Linux's `UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;

/// The most bytes of a request that the kernel is handed at a time: of what lies in its page cache
/// it copies all before it returns to the worker. The default limit of Linux for a request, so that
/// few requests have more than one part.
const PART: u64 = 4 << 20;
/// The same of a request whose part of that size has more than [`MAX_PIECES`]. Of as many buffers as
/// a request may have (`SEG_MAX`), in pages that lie apart, it has 1020 pieces at most.
const SCATTERED_PART: u64 = 2 << 20;
/// How many bytes a round hands to the kernel, or copies, before others have their turn; with the last request it may be
/// [`PART`] more. A round costs a system call, so that it is not less.
const ROUND: u64 = 1 << 20;

/// Where the data comes from and goes to.
// One per queue, of which there are few: the size of the largest costs nothing.
#[allow(clippy::large_enum_variant)]
pub(super) enum Store {
    Ram(Arc<Ram>),
    Paced {
        ram: Arc<Ram>,
        /// The disk's own: queues share it.
        pacer: Arc<Mutex<Pacer>>,
        /// Slots in order of completion, with its time.
        due: VecDeque<(u64, u16)>,
    },
    File(FileStore),
}

/// A file, and what the kernel is doing with it.
pub(super) struct FileStore {
    pub(super) io: FileIo,
    /// Completed by the disk, but not to the driver yet, the oldest first.
    pub(super) done: VecDeque<(u16, bool)>,
    /// Memory that the bus no longer reaches, but the kernel perhaps still does.
    pub(super) old: Vec<Arc<Memory>>,
    /// Whether writes are durable when they are completed.
    pub(super) through: Arc<AtomicBool>,
    /// Where data is while the kernel has it, if not where the driver has it.
    pub(super) buffers: Option<Buffers>,
    /// How many bytes this round has handed to the kernel, or copied.
    pub(super) round: u64,
    /// How many pieces all requests have together, of those that count towards the bound.
    pub(super) held: usize,
}

impl Store {
    /// For a queue of `size` requests.
    pub(super) fn new(disk: &Disk, size: u16) -> io::Result<Store> {
        Ok(match disk {
            Disk::Ram(ram) => Store::Ram(Arc::clone(ram)),
            Disk::Paced(ram, pacer) => Store::Paced {
                ram: Arc::clone(ram),
                pacer: Arc::clone(pacer),
                due: VecDeque::with_capacity(size.into()),
            },
            Disk::File(image) => Store::File(FileStore {
                buffers: if image.has_own_buffers() { Some(Buffers::new()?) } else { None },
                io: FileIo::new(Arc::clone(image), size.into())?,
                done: VecDeque::with_capacity(size.into()),
                old: Vec::new(),
                through: Arc::default(),
                round: 0,
                held: 0,
            }),
        })
    }

    pub(super) fn file(&self) -> Option<&FileStore> {
        if let Store::File(file) = self { Some(file) } else { None }
    }

    pub(super) fn file_mut(&mut self) -> Option<&mut FileStore> {
        if let Store::File(file) = self { Some(file) } else { None }
    }
}

/// What the kernel has of a request.
#[derive(Default)]
pub(super) struct Transfer {
    /// The memory; kept until the completion.
    pieces: Vec<libc::iovec>,
    /// How many of the pieces count towards the bound on all requests.
    held: usize,
    /// Keep the translations of `pieces` alive.
    leases: Leases,
    /// The buffers that `pieces` are of, if they are the service's own.
    own: Vec<u32>,
    /// Of these, how much the kernel has moved; without them, how much of the request it had moved before `pieces`.
    moved: u64,
    /// What is still to be moved, from where on in the file: of the request, or without own buffers of this part.
    left: u64,
    offset: u64,
    write: bool,
    /// Whether it is to be durable when it is completed.
    through: bool,
}

/// What is to be done next with a request.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Step {
    /// Read its header.
    #[default]
    Parse,
    /// Begin it.
    Start,
    /// Wait: the kernel has it, or its time has not come.
    Busy,
    /// Move the data now.
    Move,
    /// Copy what the disk has read into the driver's buffers, and go on.
    Deliver,
    /// Write the status.
    Complete,
}

/// A request of a block device that is under way.
pub struct BlkRequest {
    pub(super) step: Step,
    /// What is done for it, from [`Start`](Step::Start) on: what it asks for, and after a write that is to be
    /// durable a flush. It stays in place from step to step.
    pub(super) action: Action,
    /// Its status, and how many bytes of data came before that, once it is [complete](Step::Complete).
    pub(super) outcome: (Status, u32),
    pub(super) transfer: Transfer,
}

impl Default for BlkRequest {
    fn default() -> BlkRequest {
        BlkRequest {
            step: Step::Parse,
            action: Action::Nothing,
            outcome: (Status::IoErr, 0),
            transfer: Transfer::default(),
        }
    }
}

impl BlkRequest {
    /// Whether the kernel is moving data for it.
    pub(super) fn moves_data(&self) -> bool {
        self.step == Step::Busy && matches!(self.action, Action::Transfer { .. })
    }

    /// The next step writes this status, after this many bytes of data.
    pub(super) fn complete(&mut self, status: Status, written: u32) {
        (self.step, self.outcome) = (Step::Complete, (status, written));
    }
}

/// The leases of a request: after its end the first one is kept, to be renewed.
#[derive(Default)]
struct Leases {
    first: Option<Lease>,
    /// Whether the first is not over.
    held: bool,
    others: Vec<Lease>,
}

impl Leases {
    /// One more, on this range.
    fn take(&mut self, bus: &Bus, addr: u64, len: u64) {
        if self.held {
            self.others.extend(bus.lease(addr, len));
            return;
        }
        self.held = match &mut self.first {
            Some(first) => bus.renew(first, addr, len),
            None => {
                self.first = bus.lease(addr, len);
                self.first.is_some()
            }
        };
    }

    /// All are over.
    fn end(&mut self) {
        if std::mem::take(&mut self.held)
            && let Some(first) = &mut self.first
        {
            first.rest();
        }
        self.others.clear();
    }
}

// SAFETY: the pointers are for the kernel; no thread looks through them.
unsafe impl Send for Transfer {}

impl Transfer {
    /// For how many pieces it keeps room.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.pieces.capacity()
    }

    fn op(&self) -> FileOp {
        match (self.write, self.through) {
            (true, true) => FileOp::WriteThrough(self.offset),
            (true, false) => FileOp::Write(self.offset),
            (false, _) => FileOp::Read(self.offset),
        }
    }

    /// Accounts for `moved` bytes.
    fn advance(&mut self, moved: u64) {
        self.left -= moved;
        self.offset += moved;
        let mut skip = moved as usize;
        let whole = self.pieces.iter().take_while(|piece| {
            let is_whole = piece.iov_len <= skip;
            skip -= if is_whole { piece.iov_len } else { 0 };
            is_whole
        });
        let whole = whole.count();
        self.pieces.drain(..whole);
        if let Some(first) = self.pieces.first_mut() {
            first.iov_base = first.iov_base.wrapping_byte_add(skip);
            first.iov_len -= skip;
        }
    }

    /// Marks what the kernel wrote of the pieces, if it did: `moved` bytes, as far as is known.
    fn mark(&self, moved: Option<u64>, log: &RingLog, before: &[Arc<Memory>]) {
        if self.write || !log.is_on() {
            return;
        }
        let mut left = moved.unwrap_or(self.left) as usize;
        for piece in &self.pieces {
            let len = piece.iov_len.min(left);
            left -= len;
            if let Some(base) = NonNull::new(piece.iov_base.cast()) {
                // SAFETY: the memory is the bus's, or among `before`, so that it is mapped; nothing
                // borrows it (it is only ever copied).
                log.mark_piece(before, unsafe { HostSlice::new(base, len) });
            }
        }
    }

    /// Translates the next part of the data of `chain`, all of it or nothing: a smaller one if it is in
    /// too many pieces.
    fn translate(
        &mut self,
        chain: &Chain,
        bus: &Bus,
        (write, offset, len): (bool, u64, u64),
    ) -> Result<(), request::Stop> {
        // Neither wraps: what was moved is of these bytes.
        (self.offset, self.write) = (offset + self.moved, write);
        let left = len - self.moved;
        let mut done = self.translate_part(chain, bus, left.min(PART));
        if self.pieces.len() > MAX_PIECES && left > SCATTERED_PART {
            done = self.translate_part(chain, bus, SCATTERED_PART);
        }
        if done.is_err() {
            // An invalidation does not wait for what waits itself, and that holds no long list.
            self.leases.end();
            if self.pieces.capacity() > KEPT {
                self.pieces = Vec::new();
            }
        }
        done
    }

    /// Translates the next `most` bytes. The leases are taken first, so that an invalidation of what
    /// is translated after them waits.
    fn translate_part(&mut self, chain: &Chain, bus: &Bus, most: u64) -> Result<(), request::Stop> {
        self.pieces.clear();
        self.leases.end();
        self.left = most;
        let write = self.write;
        let access = if write { Access::Read } else { Access::Write };
        for desc in request::part(chain, write, self.moved, self.left) {
            self.leases.take(bus, desc.addr, desc.len.into());
            let pieces = &mut self.pieces;
            let visited = bus.slices(desc.addr, desc.len.into(), access, |piece| {
                let base: *mut libc::c_void = piece.as_ptr().cast();
                let full = pieces.len() > MAX_PIECES;
                match pieces.last_mut() {
                    Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => {
                        last.iov_len += piece.len();
                    }
                    // More than that is refused below: a longer list is not needed for it.
                    _ if full => {}
                    _ => pieces.push(libc::iovec { iov_base: base, iov_len: piece.len() }),
                }
            });
            visited?;
            // Too many pieces are an error, never a shorter transfer (rule D23).
            if self.pieces.len() > MAX_PIECES {
                return Err(Status::IoErr.into());
            }
        }
        Ok(())
    }
}

impl FileStore {
    /// Whether the round has moved enough, or the kernel takes no more: others have their turn before
    /// this goes on.
    pub(super) fn is_spent(&self) -> bool {
        self.round >= ROUND || self.io.is_refused()
    }

    /// A request that the kernel has completed, unless the round has moved enough.
    pub(super) fn completed(&mut self) -> Option<(u16, bool)> {
        if self.round < ROUND { self.done.pop_front() } else { None }
    }

    /// Translates the data of a request and hands it to the kernel. False: there is no room now.
    ///
    /// # Errors
    /// It fails, or a translation is missing.
    pub(super) fn hand_over(
        &mut self,
        (at, chain, transfer): (u16, &Chain, &mut Transfer),
        action: Action,
        bus: &Bus,
    ) -> Result<bool, request::Stop> {
        let op = match action {
            Action::Flush => FileOp::Flush,
            Action::Zero { offset, len, punch } => FileOp::Zero { offset, len, punch },
            Action::Transfer { write, offset, len } => {
                // Ordering: see `Cache::settle`.
                transfer.through = self.through.load(Ordering::Acquire);
                if self.buffers.is_some() {
                    if !self.fill((chain, transfer), (write, offset, len), bus)? {
                        return Ok(false);
                    }
                } else {
                    transfer.translate(chain, bus, (write, offset, len))?;
                    if !self.admits(transfer) {
                        transfer.leases.end();
                        return Ok(false);
                    }
                }
                transfer.op()
            }
            Action::Identify | Action::Nothing => unreachable!("completed without the file"),
        };
        let pieces = match action {
            Action::Transfer { .. } => {
                // By way of own buffers what was copied counts.
                self.round += if self.buffers.is_none() { transfer.left } else { 0 };
                &transfer.pieces[..]
            }
            _ => &[],
        };
        // SAFETY: `pieces` lives in its slot, which is not touched before the completion. The memory
        // it names belongs to the `Memory` that the queue's bus keeps, or `old` once the bus has
        // another, and the leases keep the driver's unmap from being completed before; nothing
        // borrows it (it is only ever copied).
        let over = unsafe { self.io.submit(op, pieces, at.into()) };
        if !over {
            transfer.leases.end();
            self.let_go(transfer);
        }
        Ok(over)
    }

    /// Begins or continues a transfer through own buffers.
    fn fill(
        &mut self,
        (chain, transfer): (&Chain, &mut Transfer),
        (write, offset, len): (bool, u64, u64),
        bus: &Bus,
    ) -> Result<bool, AccessError> {
        let Some(buffers) = &mut self.buffers else { return Ok(true) };
        if transfer.own.is_empty() {
            (transfer.left, transfer.offset, transfer.write) = (len, offset, write);
            if !write {
                // So that it is there when the data is. What is refused then fails then.
                for desc in request::part(chain, write, 0, len.min(PART)) {
                    bus.prefetch(desc.addr, desc.len.into(), Access::Write);
                }
            }
            if buffers.take(len.max(1), &mut transfer.own) == 0 {
                return Ok(false);
            }
        }
        transfer.pieces.clear();
        let mut left = transfer.left;
        for &buffer in &transfer.own {
            let piece = buffers.piece(buffer, left);
            left -= piece.iov_len as u64;
            transfer.pieces.push(piece);
            if left == 0 {
                break;
            }
        }
        if write {
            let at = len - transfer.left;
            // SAFETY: the pieces are these buffers'.
            let pieces = transfer.pieces.iter().map(|piece| unsafe { buffers.slice(piece) });
            if let Err(error) = request::copy(chain, bus, (write, len, at), pieces) {
                // What waits for a translation holds no buffer.
                if at == 0 {
                    buffers.give_back(&mut transfer.own);
                }
                return Err(error);
            }
            self.round += transfer.left - left;
        }
        Ok(true)
    }

    /// Copies what the kernel has moved of a transfer through own buffers to the driver, by the
    /// current translations. True if that was the last part.
    ///
    /// # Errors
    /// It is refused, or a translation is missing: then it must be retried.
    pub(super) fn deliver(
        &mut self,
        (chain, transfer): (&Chain, &mut Transfer),
        len: u64,
        bus: &Bus,
    ) -> Result<bool, AccessError> {
        let Some(buffers) = &self.buffers else { return Ok(true) };
        if !transfer.write {
            let mut left = transfer.moved as usize;
            let pieces = transfer.pieces.iter().map(|piece| {
                // SAFETY: the pieces are these buffers', and the kernel is done with them.
                let piece = unsafe { buffers.slice(piece) }.part(0, left);
                left -= piece.len();
                piece
            });
            request::copy(chain, bus, (false, len, len - transfer.left), pieces)?;
        }
        self.round += if transfer.write { 0 } else { transfer.moved };
        transfer.left -= transfer.moved;
        transfer.offset += transfer.moved;
        transfer.moved = 0;
        Ok(transfer.left == 0)
    }

    /// The kernel has moved a part of a transfer of `len` bytes at `offset`. True if that was the
    /// last part.
    pub(super) fn part_is_done(&mut self, transfer: &mut Transfer, offset: u64, len: u64) -> bool {
        self.let_go(transfer);
        // Neither wraps: a part lies within its request.
        transfer.moved = transfer.offset + transfer.left - offset;
        transfer.moved == len
    }

    /// Sets what follows the last step of a request that the disk has done: a flush, if the request is to
    /// be durable when it completes and is not by itself.
    pub(super) fn after(&self, request: &mut BlkRequest, written: u32) {
        let flushes = match request.action {
            Action::Transfer { write, .. } => {
                write && request.transfer.through && !self.io.writes_through()
            }
            // The kernel has no request that zeroes and is durable. Ordering: see `Cache::settle`.
            Action::Zero { .. } => self.through.load(Ordering::Acquire),
            Action::Flush | Action::Identify | Action::Nothing => false,
        };
        match flushes {
            // Nothing is written to the driver's memory by what is flushed.
            true => (request.step, request.action) = (Step::Start, Action::Flush),
            false => request.complete(Status::Ok, written),
        }
    }

    /// Whether there is room for the pieces of a transfer, which it then takes.
    fn admits(&mut self, transfer: &mut Transfer) -> bool {
        let count = transfer.pieces.len();
        if count <= KEPT {
            return true;
        }
        let fits = self.held == 0 || self.held + count <= MOST_HELD;
        if fits {
            (self.held, transfer.held) = (self.held + count, count);
        } else {
            transfer.pieces = Vec::new();
        }
        fits
    }

    /// The pieces of a transfer are used no more.
    fn let_go(&mut self, transfer: &mut Transfer) {
        if transfer.held > 0 {
            self.held -= std::mem::take(&mut transfer.held);
            transfer.pieces = Vec::new();
        }
    }

    /// A request has ended.
    pub(super) fn end(&mut self, transfer: &mut Transfer) {
        self.let_go(transfer);
        transfer.moved = 0;
        if let Some(buffers) = &mut self.buffers {
            buffers.give_back(&mut transfer.own);
        }
    }

    /// Takes what the kernel has done into `done`; what was moved in part is handed over again.
    /// True if there was anything.
    pub(super) fn reap(&mut self, slots: &mut [Slot<BlkRequest>], log: &RingLog) -> bool {
        let before = self.done.len();
        let (done, old, mut again) = (&mut self.done, &self.old, Vec::new());
        let own = self.buffers.is_some();
        self.io.reap(|token, result| {
            let at = token as u16;
            let request = &mut slots[usize::from(at)].request;
            if let (Step::Busy, Action::Zero { .. }) = (request.step, request.action)
                && let Err(error) = &result
                && error.raw_os_error() == Some(libc::EOPNOTSUPP)
            {
                // A driver writes the zeroes itself then.
                request.complete(Status::Unsupported, 0);
            }
            let (moves, transfer) = (request.moves_data(), &mut request.transfer);
            let moved = result.as_ref().map_or(0, |&moved| u64::from(moved));
            if moves && own {
                transfer.moved = moved.min(transfer.left);
                // A partial transfer goes on when that part is delivered.
                done.push_back((at, result.is_ok() && (moved > 0 || transfer.left == 0)));
                return;
            }
            if moves {
                // A read that fails may have written something.
                transfer.mark(result.as_ref().ok().map(|_| moved), log, old);
            }
            if moves && moved > 0 && moved < transfer.left {
                transfer.advance(moved);
                again.push(at);
                return;
            }
            transfer.leases.end();
            done.push_back((at, result.is_ok() && (!moves || moved == transfer.left)));
        });
        for at in again {
            let transfer = &mut slots[usize::from(at)].request.transfer;
            // SAFETY: as in `hand_over`; the leases were kept.
            if !unsafe { self.io.submit(transfer.op(), &transfer.pieces, at.into()) } {
                // It had a place before, so this does not happen.
                transfer.leases.end();
                self.done.push_back((at, false));
            }
        }
        if self.io.in_flight() == 0 {
            self.old.clear();
        }
        self.done.len() != before
    }
}
