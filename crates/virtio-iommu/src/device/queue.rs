//! Serving a request virtqueue without blocking.

use std::{fmt, sync::Arc};

use ringfence_mem::{AccessError, Translate};
use ringfence_virtq::{Chain, Desc, RingError, cut, device::Queue};

use super::{
    Backing, Completions, Device, Session,
    journal::{Completion, changes},
    requests::Reply,
};
use crate::wire::{Kind, MAX_REQUEST_LEN, Status, TAIL_LEN, emit_tail};

/// A batch ends once it has touched this many domains, which bounds the invalidations that it waits
/// for.
const TOUCHED: usize = 64;

/// How many requests are read before the first of them is carried out. Another processor wrote
/// them: so their cache lines are fetched in parallel, where the locks that a request takes would
/// serialize the fetches.
const AHEAD: usize = 8;

/// How many bytes of a buffer for properties are zeroed, however long the driver makes it.
const MAX_PROPERTIES: usize = 1 << 16;

/// What a poll of a [`RequestQueue`], or of an [`EventQueue`](super::EventQueue), did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// How many requests were carried out, or faults taken.
    pub handled: usize,
    /// How many replies were published, or event buffers given back.
    pub published: usize,
    /// Whether replies wait for an invalidation: poll again soon, even if the ring is empty.
    pub pending: bool,
    /// Whether the driver wants an interrupt for what was published.
    pub interrupt: bool,
}

impl Progress {
    /// Whether nothing was carried out or published. Replies may be `pending`.
    pub fn is_idle(&self) -> bool {
        self.handled == 0 && self.published == 0
    }
}

/// What a request queue has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// MAP requests.
    pub maps: u64,
    /// UNMAP requests.
    pub unmaps: u64,
    /// Other requests: also unknown ones, those that could not be read, and those that are
    /// completed from a journal.
    pub others: u64,
    /// Requests that were refused, or could not be carried out. One whose invalidation failed
    /// afterwards does not count.
    pub refused: u64,
    /// Invalidations waited for, one per domain and batch.
    pub syncs: u64,
}

ringfence_sync::sums!(Counters: maps unmaps others refused syncs);

/// Where the tail of a request is to be written.
#[derive(Debug)]
enum Tail {
    /// Nowhere.
    None,
    /// All of it at one address: what every sane driver does.
    At(u64),
    /// In pieces.
    Split(Box<[Desc]>),
}

/// A request that was taken out of the ring.
struct Taken {
    chain: Chain,
    bytes: [u8; MAX_REQUEST_LEN],
    /// How many bytes were read.
    len: Result<usize, AccessError>,
}

/// A reply that has not been published.
#[derive(Debug)]
struct Pending {
    head: u16,
    used: u32,
    status: Status,
    /// Whether the status becomes DEVERR should the invalidation fail.
    waits: bool,
    tail: Tail,
}

/// Copies the part of a request that is read; how many bytes there are.
#[inline]
fn read(
    mem: &impl Translate,
    chain: &Chain,
    bytes: &mut [u8; MAX_REQUEST_LEN],
) -> Result<usize, AccessError> {
    const MAP: usize = Kind::Map.request_len();
    const UNMAP: usize = Kind::Unmap.request_len();
    let &[Desc { addr, len, .. }] = chain.readable() else { return chain.read_at(mem, 0, bytes) };
    // Lengths that the compiler knows.
    match len as usize {
        MAP => mem.read(addr, &mut bytes[..MAP]).map(|()| MAP),
        UNMAP => mem.read(addr, &mut bytes[..UNMAP]).map(|()| UNMAP),
        _ => chain.read_at(mem, 0, bytes),
    }
}

/// Writes a tail in pieces.
#[cold]
fn write_pieces(mem: &impl Translate, pieces: &[Desc], bytes: &[u8]) -> Result<(), AccessError> {
    let mut at = 0;
    pieces.iter().try_for_each(|piece| {
        let len = piece.len as usize;
        at += len;
        mem.write(piece.addr, &bytes[at - len..at])
    })
}

/// Serves one request virtqueue. Belongs to one thread at a time.
///
/// Requests are carried out in the order of the ring and completed in it. Those found together make
/// a batch: when none of them needs an invalidation their replies are published at once, else
/// together once all invalidations of the batch are over, one per domain. So after the reply to an
/// UNMAP (in a lazy domain, to the next IOTLB_FLUSH) no access to what it removed succeeds,
/// whatever the device's threads had cached; and a MAP that follows it in the ring is not completed
/// before it.
pub struct RequestQueue<B: Backing> {
    device: Arc<Device<B>>,
    queue: Queue,
    session: Session<B>,
    counters: Counters,
    /// Memory for requests, [`AHEAD`] of them.
    taken: Box<[Taken]>,
    pending: Vec<Pending>,
    /// Whether `pending` waits for an invalidation.
    waiting: bool,
    properties: Vec<u8>,
    /// Completions of an earlier process, which the driver may not have seen.
    completions: Completions,
}

impl<B: Backing> fmt::Debug for RequestQueue<B> {
    ringfence_sync::shows!(
        RequestQueue as it, queue: it.queue, counters: it.counters, pending: it.pending.len()
    );
}

impl<B: Backing> RequestQueue<B> {
    /// Serves `queue` for `device`.
    pub fn new(device: Arc<Device<B>>, queue: Queue) -> RequestQueue<B> {
        RequestQueue {
            device,
            pending: Vec::with_capacity(queue.config().size.into()),
            queue,
            session: Session::new(),
            counters: Counters::default(),
            taken: (0..AHEAD)
                .map(|_| Taken { chain: Chain::new(), bytes: [0; MAX_REQUEST_LEN], len: Ok(0) })
                .collect(),
            waiting: false,
            properties: Vec::new(),
            completions: Completions::default(),
        }
    }

    /// Goes on with `queue`, which must be [valid](Queue::is_valid), for a device that was
    /// [recovered](Device::recover): requests that are still in the ring and were carried out get
    /// the same completions again.
    pub fn resume(
        device: Arc<Device<B>>,
        queue: Queue,
        completions: Completions,
    ) -> RequestQueue<B> {
        let mut requests = RequestQueue::new(device, queue);
        let (next, size) = (requests.position(), requests.queue.config().size);
        requests.completions = completions.at(next, size);
        requests
    }

    /// Where the next request lies, in a split ring.
    fn position(&self) -> u16 {
        self.queue.next_avail() as u16
    }

    /// Does what can be done now: carries out all requests in the ring, in order, starts the
    /// invalidations that they need, and publishes the replies once these are over. While replies
    /// wait, no further request is carried out; the poll only looks whether the wait is over.
    ///
    /// # Errors
    /// The driver broke the ring; the device needs a reset (rule [V30]).
    ///
    /// [V30]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v30
    pub fn poll(&mut self, mem: &impl Translate) -> Result<Progress, RingError> {
        self.poll_some(mem, usize::MAX)
    }

    /// How many requests lie in the ring: all, or as many as one look counts, which is enough for
    /// one [`poll_some`](Self::poll_some).
    pub fn ready(&mut self, mem: &impl Translate) -> usize {
        self.queue.peek_from(mem, 0, u16::MAX, |_| ()).into()
    }

    /// As [`poll`](Self::poll), but takes no more than `most` requests out of the ring.
    ///
    /// Where the guest's memory changes at any time, `mem` must be what it was when, or after, the
    /// requests were seen in the ring: a later one may lie in memory that `mem` does not cover.
    ///
    /// # Errors
    /// As there.
    pub fn poll_some(&mut self, mem: &impl Translate, most: usize) -> Result<Progress, RingError> {
        let mut progress = Progress::default();
        if !self.queue.is_valid() {
            self.queue.revalidate(mem)?;
        }
        if !self.waiting {
            let mut taken = core::mem::take(&mut self.taken);
            let mut result = Ok(AHEAD);
            if self.device.kept.get().is_some() || !self.completions.open.is_empty() {
                (progress.handled, result) = self.carry_out_recorded(mem, &mut taken, most);
            } else {
                while result == Ok(AHEAD) {
                    let count;
                    let left = most - progress.handled;
                    (count, result) = self.take(mem, &mut taken, left);
                    taken[..count].iter_mut().for_each(|taken| self.carry_out(mem, taken));
                    progress.handled += count;
                }
            }
            self.taken = taken;
            result?;
            if self.session.needs_sync() {
                self.device.begin_sync(&mut self.session);
                self.counters.syncs = self.session.syncs;
                self.waiting = true;
            }
        }
        let mut failed = false;
        if self.waiting {
            match self.device.poll_sync(&mut self.session) {
                Ok(true) => {}
                Ok(false) => {
                    progress.pending = true;
                    return Ok(progress);
                }
                Err(_) => {
                    failed = true;
                    self.amend();
                }
            }
            self.waiting = false;
        }
        progress.published = self.pending.len();
        progress.interrupt = self.publish(mem, failed);
        Ok(progress)
    }

    /// Takes requests out of the ring, as many as there is room for: how many, and the same or what
    /// the driver did to the ring after them.
    #[inline]
    fn take(
        &mut self,
        mem: &impl Translate,
        taken: &mut [Taken],
        most: usize,
    ) -> (usize, Result<usize, RingError>) {
        let room = most.min(self.pending.capacity() - self.pending.len());
        // Each may touch a domain.
        let room = room.min(TOUCHED.saturating_sub(self.session.used));
        let mut count = 0;
        for Taken { chain, bytes, len } in taken.iter_mut().take(room) {
            match self.queue.pop(mem, chain) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return (count, Err(error)),
            }
            // The bytes are read once; what the driver does to them afterwards changes nothing.
            *len = read(mem, chain, bytes);
            count += 1;
        }
        (count, Ok(count))
    }

    /// Carries out a request; its reply becomes pending.
    #[inline(always)]
    fn carry_out(&mut self, mem: &impl Translate, taken: &mut Taken) {
        let Taken { chain, bytes, len: Ok(len) } = taken else {
            return self.carry_out_any(mem, taken);
        };
        let [first, ..] = chain.writable() else { return self.carry_out_any(mem, taken) };
        if first.len < TAIL_LEN as u32 {
            return self.carry_out_any(mem, taken);
        }
        let request = &bytes[..*len];
        let Some((status, waits)) = self.device.execute_common(&mut self.session, request) else {
            return self.carry_out_any(mem, taken);
        };
        match request[0] == Kind::Map as u8 {
            true => self.counters.maps += 1,
            false => self.counters.unmaps += 1,
        }
        self.counters.refused += u64::from(status != Status::Ok);
        let (used, tail) = (TAIL_LEN as u32, Tail::At(first.addr));
        self.pending.push(Pending { head: chain.head(), used, status, waits, tail });
    }

    /// As [`carry_out`](Self::carry_out), of any request, with a reply that may lie in pieces.
    #[cold]
    fn carry_out_any(&mut self, mem: &impl Translate, taken: &mut Taken) {
        let Taken { chain, bytes, len } = taken;
        let room = chain.writable_len();
        let reply = match *len {
            Ok(len) => {
                let request = &bytes[..len];
                match request.first().copied().and_then(Kind::from_u8) {
                    Some(Kind::Map) => self.counters.maps += 1,
                    Some(Kind::Unmap) => self.counters.unmaps += 1,
                    _ => self.counters.others += 1,
                }
                self.device.execute(&mut self.session, request, room)
            }
            Err(_) => {
                self.counters.others += 1;
                match room < TAIL_LEN as u64 {
                    true => Reply::Unwritten,
                    false => Reply::Status { status: Status::IoErr, waits: false },
                }
            }
        };
        let end = room.saturating_sub(TAIL_LEN as u64);
        let (status, waits, tail_at) = match reply {
            Reply::Unwritten => return self.leave_unwritten(chain),
            Reply::Status { status, waits } => (status, waits, 0),
            Reply::Probe(Err(status)) => (status, false, end),
            Reply::Probe(Ok(info)) => {
                let size = usize::try_from(end).unwrap_or(usize::MAX);
                // If the buffer is as long as `probe_size` requires, tail included, this is all of
                // it.
                let probe = self.device.options.probe_size as usize;
                self.properties.clear();
                self.properties.resize(size.min(probe.max(MAX_PROPERTIES)), 0);
                let mut status = self.device.emit_properties(&info, &mut self.properties);
                if status == Status::Ok && chain.write_at(mem, 0, &self.properties).is_err() {
                    status = Status::IoErr;
                }
                (status, false, end)
            }
        };
        self.reply(chain, tail_at, status, waits);
    }

    /// Returns a request without a reply.
    fn leave_unwritten(&mut self, chain: &Chain) {
        let (head, used, tail) = (chain.head(), 0, Tail::None);
        self.counters.refused += 1;
        self.pending.push(Pending { head, used, status: Status::Unsupp, waits: false, tail });
    }

    /// A request is completed with a tail at `tail_at`, for which there is room.
    fn reply(&mut self, chain: &Chain, tail_at: u64, status: Status, waits: bool) {
        if status != Status::Ok {
            self.counters.refused += 1;
        }
        let used = u32::try_from(tail_at).unwrap_or(u32::MAX).saturating_add(TAIL_LEN as u32);
        let tail = match chain.writable() {
            [first, ..] if tail_at == 0 && first.len >= TAIL_LEN as u32 => Tail::At(first.addr),
            all => Tail::Split(cut(all, tail_at, TAIL_LEN as u64).collect()),
        };
        self.pending.push(Pending { head: chain.head(), used, status, waits, tail });
    }

    /// Carries out all requests in the ring, as [`poll`](Self::poll) does, and records each; or completes it as it is
    /// on record. Returns how many there were.
    #[inline(never)]
    fn carry_out_recorded(
        &mut self,
        mem: &impl Translate,
        taken: &mut [Taken],
        most: usize,
    ) -> (usize, Result<usize, RingError>) {
        let device = Arc::clone(&self.device);
        let (mut handled, mut kept) = (0, None);
        loop {
            let mut position = self.position();
            let (count, result) = self.take(mem, taken, most - handled);
            if kept.is_none() && count > 0 {
                // Locked for all requests of the batch: records are in the order of execution.
                kept = device.kept.get().map(|kept| kept.lock());
                if let Some(kept) = &mut kept
                    && self.pending.is_empty()
                    && self.completions.open.is_empty()
                {
                    kept.journal.settle();
                }
            }
            for taken in &mut taken[..count] {
                match self.completions.take(position) {
                    Some(completion) => self.complete_as(mem, taken, completion),
                    None => {
                        self.carry_out(mem, taken);
                        if let Some(kept) = &mut kept {
                            let (completion, changed) = self.record_of(taken);
                            kept.record(&device, position, completion, changed);
                        }
                    }
                }
                position = position.wrapping_add(1);
            }
            handled += count;
            if result != Ok(AHEAD) {
                return (handled, result);
            }
        }
    }

    /// The completion of the request that was carried out last, and its bytes if it changed something.
    fn record_of<'t>(&self, taken: &'t Taken) -> (Completion, &'t [u8]) {
        let request = taken.len.map_or(&[][..], |len| &taken.bytes[..len]);
        let kind = request.first().copied().and_then(Kind::from_u8);
        match (self.pending.last(), kind) {
            (None | Some(Pending { tail: Tail::None, .. }), _) => (Completion::Unwritten, &[]),
            (_, Some(Kind::Probe)) => (Completion::Again, &[]),
            (Some(&Pending { status: Status::Ok, .. }), Some(kind)) if changes(kind) => {
                let len = kind.request_len().min(request.len());
                (Completion::Status(Status::Ok), &request[..len])
            }
            (Some(&Pending { status, .. }), _) => (Completion::Status(status), &[]),
        }
    }

    /// Completes a request as another process did, without carrying it out.
    #[cold]
    fn complete_as(&mut self, mem: &impl Translate, taken: &mut Taken, completion: Completion) {
        let has_room = taken.chain.writable_len() >= TAIL_LEN as u64;
        let is_probe = taken.len.is_ok() && taken.bytes[0] == Kind::Probe as u8;
        match completion {
            Completion::Again if is_probe => self.carry_out_any(mem, taken),
            Completion::Status(status) if has_room => {
                self.counters.others += 1;
                self.reply(&taken.chain, 0, status, false);
            }
            // Or the driver has changed the request.
            Completion::Status(_) | Completion::Unwritten | Completion::Again => {
                self.counters.others += 1;
                self.leave_unwritten(&taken.chain);
            }
        }
    }

    /// Records that requests failed because of their invalidation.
    #[cold]
    fn amend(&mut self) {
        let Some(kept) = self.device.kept.get() else { return };
        let mut kept = kept.lock();
        // A ring has no more places than positions have values.
        let mut position = self.position().wrapping_sub(self.pending.len() as u16);
        for Pending { waits, .. } in &self.pending {
            if *waits {
                kept.amend(&self.device, position, Status::DevErr);
            }
            position = position.wrapping_add(1);
        }
    }

    /// Writes and publishes all pending replies; returns whether the driver wants an interrupt.
    fn publish(&mut self, mem: &impl Translate, failed: bool) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        for Pending { used, status, waits, tail, .. } in &mut self.pending {
            let status = if failed && *waits { Status::DevErr } else { *status };
            let bytes = emit_tail(status);
            let written = match tail {
                Tail::None => Ok(()),
                Tail::At(addr) => mem.write(*addr, &bytes),
                Tail::Split(pieces) => write_pieces(mem, pieces, &bytes),
            };
            if written.is_err() {
                // A used length of 0 reports that nothing was written.
                *used = 0;
            }
        }
        self.queue.push_used_burst(self.pending.iter().map(|reply| (reply.head, reply.used)));
        self.pending.clear();
        self.queue.publish_used()
    }

    /// Whether replies wait for an invalidation.
    pub fn is_pending(&self) -> bool {
        self.waiting
    }

    /// The virtqueue, to suppress and enable kicks or to read its indices.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}
