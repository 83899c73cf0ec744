//! One ring with its buffers.

use std::ops::Range;

use ringfence_mem::Window;
use ringfence_virtq::{
    Desc,
    driver::{QueueConfig, Used},
};

use super::{
    Addressing, Entry, NetDriverError,
    link::Link,
    ring::Ring,
    space::{ROOM, Space},
};
use ringfence_devices::net::frame::{PACKET, packet};

/// Most packets that are taken back at once.
const BURST: usize = 64;
/// Receive buffers are made available by so many: each time, the line of the index changes hands.
const REFILL: u16 = 32;

/// A ring, and the buffers that are its own.
#[derive(Debug)]
pub(super) struct Side {
    ring: Ring,
    /// The first buffer.
    first: u32,
    buffers: Vec<Window>,
    /// Where the device sees each: for good, or for this use.
    addrs: Vec<u64>,
    addressing: Addressing,
    /// So many descriptors are free before buffers are made available again.
    refill: u16,
}

impl Side {
    /// Starts ring number `ring`, with buffers of its own.
    pub(super) fn start(
        link: &mut Link,
        space: &Space,
        ring: u16,
        config: QueueConfig,
        own: Range<u32>,
    ) -> Result<Side, NetDriverError> {
        let windows = own.clone().map(|buffer| {
            let offset = space.buffer(buffer) as usize;
            space.ram.window(offset, ROOM as usize)
        });
        Ok(Side {
            ring: Ring::start(link, space, ring, config, own.clone(), false)?,
            first: own.start,
            buffers: windows.collect::<Result<_, _>>()?,
            addrs: own.map(|buffer| space.device_addr(space.buffer(buffer))).collect(),
            addressing: space.addressing,
            refill: REFILL.min(config.size),
        })
    }

    /// How many buffers the device has.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        usize::from(self.ring.queue.in_flight()) - self.ring.unpublished
    }

    /// Takes back what the device has used, a burst at most; `each` gets the first bytes of every
    /// one and how many the device wrote. Returns how many.
    #[inline]
    pub(super) fn reclaim(
        &mut self,
        space: &mut Space,
        link: &mut Link,
        mut each: impl FnMut(&[u8; PACKET], u32),
    ) -> Result<u64, NetDriverError> {
        let mut used = [Used::default(); BURST];
        let count = self.ring.queue.pop_burst(&mut used)?;
        for Used { token, len } in &used[..count] {
            let buffer = *token as u32;
            if *len > 0 {
                let mut bytes = [0; PACKET];
                self.buffers[(buffer - self.first) as usize].read(0, &mut bytes);
                each(&bytes, *len);
            }
            if !self.addressing.is_fresh() {
                self.ring.free.push_back(buffer);
            }
        }
        if self.addressing.is_fresh() {
            self.unmap(&used[..count], space, link);
        }
        Ok(count as u64)
    }

    /// Unmaps buffers, and frees those that can be used again.
    fn unmap(&mut self, used: &[Used], space: &mut Space, link: &mut Link) {
        let entries = used.iter().filter_map(|used| {
            let addr = self.addrs[(used.token as u32 - self.first) as usize];
            let entry = space.entry(addr);
            space.unmap(addr);
            // Only their order matters here, not their targets.
            entry.map(|Entry { first, last, .. }| Entry { first, last, user_addr: first })
        });
        let mut ticket = 0;
        runs(entries, |run| ticket = link.invalidate(run.first, run.last));
        used.iter().for_each(|used| self.ring.park(ticket, used.token as u32));
        self.ring.unpark(link);
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
        if !self.ring.release(link) {
            return Ok(0);
        }
        let most = most.min(self.ring.queue.free_descs().into()).min(self.ring.free.len());
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
        if !self.ring.release(link) || self.ring.queue.free_descs() < self.refill {
            return Ok(());
        }
        let most = self.ring.free.len().min(self.ring.queue.free_descs().into());
        self.fill(most, ROOM, space, link, |_| true)
    }

    /// Adds `count` buffers of `len` bytes, for which there is room, prepared by `each`, which
    /// returns whether the device writes.
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
        let Side { ring, first, buffers, addrs, addressing, .. } = self;
        let Ring { number, queue, free, .. } = ring;
        let fresh = addressing.is_fresh();
        let descs = std::iter::from_fn(|| {
            let buffer = free.pop_front()?;
            let index = (buffer - *first) as usize;
            let write = each(&buffers[index]);
            if fresh {
                addrs[index] = space.map((*number).into(), buffer);
                entries.extend(space.entry(addrs[index]));
            }
            Some((Desc { addr: addrs[index], len, write }, u64::from(buffer)))
        });
        self.ring.unpublished += queue.add_burst(descs.take(count))?;
        if self.addressing == (Addressing::Fresh { push: true }) {
            runs(entries, |run| self.ring.held = link.update(run));
        }
        self.ring.release(link);
        Ok(())
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
