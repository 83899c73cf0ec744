//! The request queue with its buffers: requests in, replies out. Everything here happens under
//! the driver's one lock, and none of it waits.

use std::{collections::HashMap, sync::Arc};

use ringfence_iommu::Range;
use ringfence_mem::Window;
use ringfence_virtq::{
    Desc,
    driver::{Queue, Used},
};

use super::report::{Failure, Reports, Sent};
use crate::wire::{MAX_REQUEST_LEN, MapRequest, Request, Status, TAIL_LEN, UnmapRequest};

/// The bytes of a slot: the longest request but PROBE, and a tail, in one cache line.
pub(super) const SLOT: usize = 64;
/// The offset of the tail in a slot.
const TAIL_AT: usize = SLOT - TAIL_LEN;
/// Where the written part of a PROBE begins in the memory kept for it.
const PROBE_REPLY_AT: usize = 128;
/// How many replies are taken out of the ring at a time.
const BURST: usize = 16;
/// What a tail holds before the device writes it: no status.
const UNWRITTEN: [u8; TAIL_LEN] = [0xff; TAIL_LEN];

/// The bytes kept for PROBE.
pub(super) const fn probe_bytes(probe_size: usize) -> usize {
    PROBE_REPLY_AT + probe_size + TAIL_LEN
}

/// How many requests a queue of `size` descriptors holds: each takes two. A power of two, also of a packed
/// queue of another size.
pub(super) const fn slots(size: u16) -> usize {
    match size / 2 {
        0 => 0,
        half => 1 << half.ilog2(),
    }
}

/// A request on its way.
#[derive(Clone, Copy, Debug)]
struct Slot {
    sent: Sent,
    domain: u32,
    range: Range,
    /// Where its tail is to be found.
    tail: usize,
    /// Whether the reply is there.
    done: bool,
}

/// How many requests of each kind were sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) maps: u64,
    pub(super) unmaps: u64,
    pub(super) others: u64,
    pub(super) errors: u64,
}

/// The request queue.
///
/// Requests are numbered from 1 in the order of the ring; request n has the slot n mod the number
/// of slots. Should the device complete requests out of order, a slot is free again only once all
/// requests before its own are completed, so that "everything up to n" is one comparison.
#[derive(Debug)]
pub(super) struct Ring {
    queue: Queue,
    memory: Window,
    addr: u64,
    slots: Box<[Slot]>,
    /// The number of the last request.
    pub(super) issued: u64,
    /// The device has completed all requests up to this one.
    pub(super) retired: u64,
    /// Where failures are reported, by domain.
    pub(super) reports: HashMap<u32, Arc<Reports>>,
    /// Statuses that a thread waits for, by request.
    results: HashMap<u64, u8>,
    /// Memory for replies that are taken out.
    burst: Box<[Used; BURST]>,
    pub(super) counts: Counts,
}

/// The device did with the ring what it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

impl Ring {
    pub(super) fn new(queue: Queue, memory: Window, addr: u64) -> Ring {
        let idle = Slot { sent: Sent::Sync, domain: 0, range: Range::ALL, tail: 0, done: false };
        let slots = vec![idle; slots(queue.size())].into();
        let (reports, results) = (HashMap::new(), HashMap::new());
        let counts = Counts::default();
        let burst = Box::new([Used::default(); BURST]);
        Ring { queue, memory, addr, slots, issued: 0, retired: 0, reports, results, burst, counts }
    }

    pub(super) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    #[inline]
    fn slot_of(&self, seq: u64) -> usize {
        // A power of two: a division would be the dearest instruction of a request.
        debug_assert!(self.slots.len().is_power_of_two());
        (seq & (self.slots.len() as u64 - 1)) as usize
    }

    /// Whether no further request fits.
    pub(super) fn is_full(&self) -> bool {
        self.issued - self.retired >= self.slots.len() as u64
    }

    /// Puts a request (not PROBE) into the ring, visible to the device; its number, or `None` if
    /// the ring is full.
    pub(super) fn submit(&mut self, request: &Request, sent: Sent) -> Option<u64> {
        let seq = self.put(request, sent);
        self.queue.publish();
        seq
    }

    /// As [`submit`](Self::submit), not visible before [`publish`](Self::publish). Inlined, so that
    /// the kind of the request is a constant.
    #[inline(always)]
    pub(super) fn put(&mut self, request: &Request, sent: Sent) -> Option<u64> {
        if self.is_full() {
            return None;
        }
        let at = self.slot_of(self.issued + 1) * SLOT;
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        // The whole slot at once: a copy of a length that the compiler knows.
        bytes[TAIL_AT..SLOT].copy_from_slice(&UNWRITTEN);
        self.memory.write(at, &bytes[..SLOT]);
        let (domain, range) = match *request {
            Request::Map(MapRequest { domain, range, .. }) => {
                self.counts.maps += 1;
                (domain, range)
            }
            Request::Unmap(UnmapRequest { domain, range }) => {
                self.counts.unmaps += 1;
                (domain, range)
            }
            Request::Attach { domain, .. }
            | Request::Detach { domain, .. }
            | Request::IotlbFlush { domain } => {
                self.counts.others += 1;
                (domain, Range::ALL)
            }
            Request::Probe { .. } => unreachable!("PROBE has memory of its own"),
        };
        let descs = [
            Desc::readable(self.addr + at as u64, len as u32),
            Desc::writable(self.addr + (at + TAIL_AT) as u64, TAIL_LEN as u32),
        ];
        Some(self.send((sent, domain, range, at + TAIL_AT), &descs))
    }

    /// Makes visible what was put into the ring.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.queue.publish();
    }

    /// As [`submit`](Self::submit), for PROBE. One at a time: the caller sees to it.
    pub(super) fn submit_probe(&mut self, endpoint: u32, probe_size: usize) -> Option<u64> {
        if self.is_full() {
            return None;
        }
        let at = self.slots.len() * SLOT;
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = Request::Probe { endpoint }.emit(&mut bytes);
        self.memory.write(at, &bytes[..len]);
        let reply = at + PROBE_REPLY_AT;
        let tail = reply + probe_size;
        self.memory.write(reply, &vec![0; probe_size]);
        self.memory.write(tail, &UNWRITTEN);
        self.counts.others += 1;
        let descs = [
            Desc::readable(self.addr + at as u64, len as u32),
            Desc::writable(self.addr + reply as u64, (probe_size + TAIL_LEN) as u32),
        ];
        let seq = self.send((Sent::Sync, 0, Range::ALL, tail), &descs);
        self.queue.publish();
        Some(seq)
    }

    /// The properties that the last PROBE returned.
    pub(super) fn properties(&self, probe_size: usize) -> Vec<u8> {
        let mut out = vec![0; probe_size];
        self.memory.read(self.slots.len() * SLOT + PROBE_REPLY_AT, &mut out);
        out
    }

    #[inline(always)]
    fn send(
        &mut self,
        (sent, domain, range, tail): (Sent, u32, Range, usize),
        descs: &[Desc; 2],
    ) -> u64 {
        self.issued += 1;
        let at = self.slot_of(self.issued);
        // Field by field: a copy of all of it would wait until the stores to the original are done.
        let slot = &mut self.slots[at];
        slot.sent = sent;
        slot.domain = domain;
        slot.range = range;
        slot.tail = tail;
        slot.done = false;
        // Two descriptors a slot: there is room whenever a slot is free. A broken queue takes
        // nothing, which the next access to it reports.
        let _ = self.queue.add(descs, at as u64);
        self.issued
    }

    /// Takes all replies out. True if there were any.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub(super) fn reap(&mut self) -> Result<bool, Broken> {
        let before = self.retired;
        loop {
            let count = self.queue.pop_burst(&mut self.burst[..]).map_err(|_| Broken)?;
            for at in 0..count {
                let Used { token, len } = self.burst[at];
                self.complete(token as usize, len)?;
            }
            if count < BURST {
                break;
            }
        }
        while self.retired < self.issued {
            let at = self.slot_of(self.retired + 1);
            if !self.slots[at].done {
                break;
            }
            self.retired += 1;
        }
        Ok(self.retired != before)
    }

    #[inline]
    fn complete(&mut self, at: usize, used: u32) -> Result<(), Broken> {
        let count = self.slots.len() as u64;
        let slot = self.slots.get_mut(at).ok_or(Broken)?;
        slot.done = true;
        // The request in this slot: the only candidate in retired+1..=retired+count.
        let next = self.retired + 1;
        let seq = next + ((at as u64).wrapping_sub(next) & (count - 1));
        // A tail that was not written in full is invalid: an I/O error (rules V34, L64).
        let status = if (used as usize) < TAIL_LEN {
            Status::IoErr as u8
        } else {
            let mut tail = UNWRITTEN;
            self.memory.read(slot.tail, &mut tail);
            tail[0]
        };
        let failed = status != Status::Ok as u8;
        self.counts.errors += u64::from(failed);
        if slot.sent == Sent::Sync {
            self.results.insert(seq, status);
        } else if failed && let Some(reports) = self.reports.get(&slot.domain) {
            reports.push(Failure { sent: slot.sent, seq, range: slot.range, status });
        }
        Ok(())
    }

    /// The status of a request that was sent as [`Sent::Sync`], once.
    pub(super) fn result(&mut self, seq: u64) -> Option<u8> {
        self.results.remove(&seq)
    }
}
