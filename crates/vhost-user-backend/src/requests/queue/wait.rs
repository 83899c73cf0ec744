//! Requests that meet a missing translation.

use std::sync::atomic::Ordering;

use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};
use ringfence_sync::clock::nanos;
use ringfence_virtq::{ChainFault, Desc, RingError, device::Glimpse, layout};

use super::{
    RequestQueue,
    inflight::take_next,
    parked::{Look, Ready},
};
use crate::{
    Bus,
    requests::{Missing, QueueError, Serve},
};

/// The size of the smallest page, in bytes.
const PAGE: u64 = 4096;
/// For how many pages of a request misses are sent in one go, and of a buffer of a chain that is
/// not taken.
const PREFETCH_PAGES: u64 = 512;
const PEEK_PAGES: u64 = 32;
/// Bytes of the longest indirect table.
const LONGEST_TABLE: u32 = layout::MAX_INDIRECT as u32 * layout::DESC_SIZE as u32;
/// How many chains behind one that cannot be taken yet are peeked at.
const AHEAD: u16 = 64;
/// How often a queue warns that requests timed out.
const WARN_NS: u64 = 1_000_000_000;

/// What a request waits for.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    missing: Missing,
    since_ns: u64,
    /// The count of misses then: if a later one is refused, the request fails.
    pub(super) misses: u64,
    /// It was waiting at an earlier check of all.
    seen: bool,
}

/// The next chain of the ring, whose table has no translation.
#[derive(Clone, Copy)]
pub(super) struct Head {
    since_ns: u64,
    /// As for a request that waits.
    pub(super) misses: u64,
    /// How many chains, itself included, were peeked at to send misses for what they need.
    peeked: u16,
}

impl<S: Serve> RequestQueue<S> {
    /// The next chain's table has no translation: sends misses for what it and those behind it
    /// need. False if it has timed out.
    #[cold]
    pub(super) fn wait_for_head(&mut self, bus: &Bus, error: &AccessError) -> bool {
        let Some(missing) = Missing::of(*error) else { return false };
        let Some(head) = self.head else {
            if !self.waits() {
                self.parked.begin(self.updates, self.now_ns);
            }
            self.stats.parked += 1;
            self.head = Some(Head { since_ns: self.now_ns, misses: bus.misses(), peeked: 0 });
            self.look_behind(bus);
            return true;
        };
        let waits = self.now_ns.saturating_sub(head.since_ns) < nanos(bus.timeout());
        if !waits {
            self.timed_out(missing, bus);
        }
        waits
    }

    /// Sends misses for what the chain that cannot be taken yet and those behind it need, unless
    /// that was done: the driver may have added some since.
    #[inline]
    pub(super) fn look_behind(&mut self, bus: &Bus) {
        if let Some(head) = &mut self.head
            && head.peeked < AHEAD
        {
            head.peeked = self.ring.peek_from(bus, head.peeked, AHEAD, |glimpse| {
                match glimpse {
                    Glimpse::Buffer(desc) => prefetch(&desc, bus, PEEK_PAGES),
                    Glimpse::Table { addr, len } => {
                        bus.prefetch(addr, len.min(LONGEST_TABLE).into(), Access::Read)
                    }
                };
            });
        }
    }

    /// Takes the next chain into `at` without its table, and completes it at once: neither its
    /// request nor the place of its status is known.
    #[cold]
    pub(super) fn give_head_up(&mut self, at: u16) -> Result<(), QueueError> {
        if !S::FAILS {
            return Err(QueueError::Lost(1));
        }
        let slot = &mut self.slots[usize::from(at)];
        let recorded = self.recorded.as_mut();
        if let Some(entry) = take_next(&mut self.ring, recorded, &Blank, &mut slot.chain)? {
            self.begin(at, entry);
            self.hold(at);
            self.finish(at, false, 0);
        }
        Ok(())
    }

    /// Parks a request: sends misses for all that it needs, not only for what it has met.
    #[cold]
    pub(super) fn park(&mut self, at: u16, missing: Missing, bus: &Bus) {
        if !self.waits() {
            self.parked.begin(self.updates, self.now_ns);
        }
        self.stats.parked += 1;
        let slot = &mut self.slots[usize::from(at)];
        let since_ns = self.now_ns;
        let begun = || Box::new(Wait { missing, since_ns, misses: bus.misses(), seen: false });
        let wait = slot.wait.get_or_insert_with(begun);
        (wait.missing, wait.seen) = (missing, false);
        self.parked.add(at);
        let mut left = PREFETCH_PAGES;
        for desc in slot.chain.descs() {
            prefetch(desc, bus, left);
            left = left.saturating_sub(pages(desc));
        }
    }

    /// Goes on with requests that need not wait longer; true if there were any.
    #[cold]
    pub(super) fn resume(&mut self, bus: &Bus, look: Look) -> bool {
        let (slots, now_ns) = (&mut self.slots, self.now_ns);
        let timeout_ns = nanos(bus.timeout());
        let mut ready = std::mem::take(&mut self.ready);
        self.parked.sort(look, &mut ready, |at| {
            let slot = &mut slots[usize::from(at)];
            let Some(wait) = &mut slot.wait else { return Ready::Yes };
            let Missing { addr, access } = wait.missing;
            if bus.since(wait.misses, || bus.prefetch(addr, 1, access))
                || now_ns.saturating_sub(wait.since_ns) >= timeout_ns
            {
                return Ready::Yes;
            }
            match look == Look::All && std::mem::replace(&mut wait.seen, true) {
                true => Ready::Late,
                false => Ready::No,
            }
        });
        let resumed = !ready.is_empty();
        for at in ready.drain(..) {
            let slot = &self.slots[usize::from(at)];
            let since_ns = slot.wait.as_ref().map_or(now_ns, |wait| wait.since_ns);
            match now_ns.saturating_sub(since_ns) >= timeout_ns {
                true => self.give_up(at, bus),
                // A round goes on with no more freed requests than it takes from the ring. One that has
                // begun has the room that others wait for.
                false if self.is_spent() && self.serve.is_begun(&slot.request) => {
                    self.stalled.push_front(at);
                }
                false if self.is_spent() => self.stall(at),
                false => self.go_on(at, bus),
            }
        }
        self.ready = ready;
        resumed
    }

    /// The request has timed out: an I/O error, if its status can be written.
    fn give_up(&mut self, at: u16, bus: &Bus) {
        if let Some(wait) = &self.slots[usize::from(at)].wait {
            self.timed_out(wait.missing, bus);
        }
        self.fail(at, bus);
    }

    fn timed_out(&mut self, Missing { addr, access }: Missing, bus: &Bus) {
        if let Some(iotlb) = bus.iotlb() {
            iotlb.stats().timeouts.fetch_add(1, Ordering::Relaxed);
        }
        if self.now_ns >= self.warn_at {
            self.warn_at = self.now_ns.saturating_add(WARN_NS);
            tracing::warn!(
                source = %self.name,
                "no translation of {addr:#x} ({access:?}) in time: request failed"
            );
        }
    }

    /// Completes a request that cannot go on: with an I/O error if it was not done, and if the
    /// status can be written.
    pub(super) fn fail(&mut self, at: u16, bus: &Bus) {
        let slot = &mut self.slots[usize::from(at)];
        let (ok, used) = self.serve.fail(&mut slot.request, &slot.chain, bus);
        self.finish(at, ok, used);
    }
}

/// Why the table of a chain could not be read, if that is what the error reports.
pub(super) fn unreachable_table(error: &RingError) -> Option<&AccessError> {
    match error {
        RingError::Chain { fault: ChainFault::IndirectUnreachable { error, .. }, .. } => {
            Some(error)
        }
        _ => None,
    }
}

/// Memory that reads as zeroes: a table in it holds buffers without bytes.
struct Blank;

impl Translate for Blank {
    fn slices<F>(&self, addr: u64, _: u64, access: Access, _: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        Err(AccessError::Unmapped { addr, access })
    }

    fn window(&self, addr: u64, _: u64, access: Access) -> Result<Window, AccessError> {
        Err(AccessError::Unmapped { addr, access })
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), AccessError> {
        out.fill(0);
        Ok(())
    }
}

/// Sends misses for a buffer, for at most so many pages of it.
fn prefetch(desc: &Desc, bus: &Bus, most: u64) -> bool {
    let len = u64::from(desc.len).min(most * PAGE);
    bus.prefetch(desc.addr, len, if desc.write { Access::Write } else { Access::Read })
}

/// How many pages a buffer touches, at most.
fn pages(desc: &Desc) -> u64 {
    u64::from(desc.len) / PAGE + 2
}
