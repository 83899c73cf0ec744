//! One ring with its buffers.

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
};

use ringfence_mem::Window;
use ringfence_vhost_user::RingAddresses;
use ringfence_virtq::{
    Desc,
    driver::{Config, Queue, Rings, Used},
};

use super::{
    Addressing, Entry, NetDriverError,
    fifo::Fifo,
    frame::{PACKET, packet},
    link::{Link, RingParts},
    space::{ROOM, Space},
};
use crate::event;

/// Most packets that are taken back at once.
const BURST: usize = 64;
/// Receive buffers are made available by so many: each time, the line of the index changes hands.
const REFILL: u16 = 32;

/// A ring, the buffers that are its own, and which of them are free.
#[derive(Debug)]
pub(super) struct Side {
    ring: u16,
    queue: Queue,
    free: Fifo,
    /// The first buffer.
    first: u32,
    buffers: Vec<Window>,
    /// Where the device sees each: for good, or for this use.
    addrs: Vec<u64>,
    kick: OwnedFd,
    config: Config,
    addresses: RingAddresses,
    addressing: Addressing,
    /// Buffers that are the device's no more when their ticket is done, and the ticket.
    parked: VecDeque<(u64, u32)>,
    /// What was added is published when this ticket is done.
    held: u64,
    unpublished: usize,
}

impl Side {
    /// Ring number `ring`, with buffers of its own.
    pub(super) fn new(
        space: &Space,
        ring: u16,
        config: Config,
        own: Range<u32>,
    ) -> Result<Side, NetDriverError> {
        let bytes = space.ring_bytes() / 2;
        let at = usize::from(ring) * bytes;
        let window = space.ram().window(at, bytes)?;
        let queue = Queue::with_config(config, Rings::placed(&window, &config)?)?;
        let base = space.device_addr(at as u64);
        let offsets = config.offsets();
        let addresses = RingAddresses {
            desc: base + offsets.desc as u64,
            avail: base + offsets.avail as u64,
            used: base + offsets.used as u64,
            log: None,
        };
        let windows = own.clone().map(|buffer| {
            let offset = space.buffer(buffer) as usize;
            space.ram().window(offset, ROOM as usize)
        });
        Ok(Side {
            ring,
            queue,
            free: Fifo::new(own.clone()),
            first: own.start,
            buffers: windows.collect::<Result<_, _>>()?,
            addrs: own.map(|buffer| space.device_addr(space.buffer(buffer))).collect(),
            kick: event::new()?,
            config,
            addresses,
            addressing: space.addressing(),
            parked: VecDeque::new(),
            held: 0,
            unpublished: 0,
        })
    }

    /// Has the device begin.
    pub(super) fn start(&mut self, link: &mut Link, space: &Space) -> Result<(), NetDriverError> {
        // The driver polls.
        self.queue.suppress_notifications();
        let Side { config: Config { size, packed, .. }, addresses, .. } = *self;
        // Of a packed ring: both indices 0, both wrap counters 1.
        let base = if packed { 0x8000_8000 } else { 0 };
        let parts = RingParts { size, base, addresses, kick: self.kick.as_fd() };
        link.start_ring(self.ring, &parts, space)
    }

    /// How many buffers the device has.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        usize::from(self.queue.in_flight()) - self.unpublished
    }

    /// Takes back what the device is done with, a burst at most; `each` gets the first bytes of
    /// every one and how many the device wrote. Returns how many.
    #[inline]
    pub(super) fn reclaim(
        &mut self,
        space: &mut Space,
        link: &mut Link,
        mut each: impl FnMut(&[u8; PACKET], u32),
    ) -> Result<u64, NetDriverError> {
        let mut used = [Used::default(); BURST];
        let count = self.queue.pop_burst(&mut used)?;
        for Used { token, len } in &used[..count] {
            let buffer = *token as u32;
            if *len > 0 {
                let mut bytes = [0; PACKET];
                self.buffers[(buffer - self.first) as usize].read(0, &mut bytes);
                each(&bytes, *len);
            }
            if !self.addressing.is_fresh() {
                self.free.put(buffer);
            }
        }
        if self.addressing.is_fresh() {
            self.unmap(&used[..count], space, link);
        }
        Ok(count as u64)
    }

    /// Takes the addresses of buffers back, and then those that can be used anew.
    fn unmap(&mut self, used: &[Used], space: &mut Space, link: &mut Link) {
        let entries = used.iter().filter_map(|used| {
            let addr = self.addrs[(used.token as u32 - self.first) as usize];
            let entry = space.entry(addr);
            space.unmap(addr);
            // Only their order matters here, not where they lead.
            entry.map(|Entry { first, last, .. }| Entry { first, last, user_addr: first })
        });
        let mut ticket = 0;
        runs(entries, |run| ticket = link.invalidate(run.first, run.last));
        self.parked.extend(used.iter().map(|used| (ticket, used.token as u32)));
        while let Some(&(ticket, buffer)) = self.parked.front() {
            if !link.is_done(ticket) {
                break;
            }
            self.parked.pop_front();
            self.free.put(buffer);
        }
    }

    /// Sends up to `most` frames, from `number` on; returns how many.
    #[inline]
    pub(super) fn send(
        &mut self,
        space: &mut Space,
        link: &mut Link,
        number: u64,
        most: usize,
    ) -> Result<usize, NetDriverError> {
        if !self.release(link) {
            return Ok(0);
        }
        let most = most.min(self.queue.free_descs().into()).min(self.free.len());
        let mut numbers = number..;
        self.fill(most, PACKET as u32, space, link, |buffer| {
            buffer.write(0, &packet(numbers.next().unwrap_or_default()));
            false
        })?;
        Ok(most)
    }

    /// Makes buffers available to write to, if the ring takes many.
    #[inline]
    pub(super) fn post(
        &mut self,
        space: &mut Space,
        link: &mut Link,
    ) -> Result<(), NetDriverError> {
        if !self.release(link) || self.queue.free_descs() < REFILL.min(self.config.size) {
            return Ok(());
        }
        let most = self.free.len().min(self.queue.free_descs().into());
        self.fill(most, ROOM, space, link, |_| true)
    }

    /// Adds `count` buffers of `len` bytes, for which there is room, prepared by `each`, which tells
    /// whether the device writes.
    #[inline]
    fn fill(
        &mut self,
        count: usize,
        len: u32,
        space: &mut Space,
        link: &mut Link,
        mut each: impl FnMut(&Window) -> bool,
    ) -> Result<(), NetDriverError> {
        let mut entries = Vec::new();
        let Side { ring, queue, free, first, buffers, addrs, addressing, .. } = self;
        let fresh = addressing.is_fresh();
        let descs = std::iter::from_fn(|| {
            let buffer = free.take()?;
            let index = (buffer - *first) as usize;
            let write = each(&buffers[index]);
            if fresh {
                addrs[index] = space.map((*ring).into(), buffer);
                entries.extend(space.entry(addrs[index]));
            }
            Some((Desc { addr: addrs[index], len, write }, u64::from(buffer)))
        });
        self.unpublished += queue.add_burst(descs.take(count))?;
        if self.addressing == (Addressing::Fresh { push: true }) {
            runs(entries, |run| self.held = link.update(run));
        }
        self.release(link);
        Ok(())
    }

    /// Publishes what was added, unless its translations are still on their way. Returns whether
    /// nothing is held back any more.
    #[inline]
    fn release(&mut self, link: &Link) -> bool {
        if !link.is_done(self.held) {
            return false;
        }
        self.queue.publish();
        self.unpublished = 0;
        if self.queue.needs_kick() {
            event::signal(&self.kick);
        }
        true
    }
}

/// Calls `each` with entries that go on where the one before ends, at both ends, as one.
fn runs(entries: impl IntoIterator<Item = Entry>, mut each: impl FnMut(Entry)) {
    let mut open: Option<Entry> = None;
    for entry in entries {
        match &mut open {
            Some(run)
                if run.last.checked_add(1) == Some(entry.first)
                    && entry.user_addr.checked_sub(run.user_addr)
                        == Some(entry.first - run.first) =>
            {
                run.last = entry.last;
            }
            _ => open.replace(entry).into_iter().for_each(&mut each),
        }
    }
    open.into_iter().for_each(each);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_go_on_are_one_message() {
        let entry = |first: u64, user_addr| Entry { first, last: first + 9, user_addr };
        let entries =
            [entry(0, 100), entry(10, 110), entry(20, 500), entry(40, 520), entry(50, 530)];
        let mut found = Vec::new();
        runs(entries, |run| found.push((run.first, run.last, run.user_addr)));
        assert_eq!(found, [(0, 19, 100), (20, 29, 500), (40, 59, 520)]);
        runs([], |_| panic!("there is none"));
    }
}
