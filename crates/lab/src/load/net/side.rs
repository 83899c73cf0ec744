//! One ring with its buffers.

use std::ops::Range;

use anyhow::{Context, Result};
use ringfence_mem::Window;
use ringfence_virtq::{
    Desc,
    driver::{QueueConfig, Used},
};

use super::{Addressing, Entry, link::Link, ring::Ring, space::ROOM};
use ringfence_devices::net::frame::{PACKET, packet};

/// Most packets that are taken back at once.
const BURST: usize = 64;
/// Receive buffers are made available by so many: each time, the line of the index changes hands.
const REFILL: u16 = 32;

/// A ring, and the buffers that are its own.
#[derive(Debug)]
pub(super) struct Side {
    ring: Ring,
    buffers: Vec<Window>,
    /// Where the device sees each: for good, or for this use.
    addrs: Vec<u64>,
    /// So many descriptors are free before buffers are made available again.
    refill: u16,
}

impl Side {
    /// Starts ring number `ring`, with buffers of its own.
    pub(super) fn start(
        link: &mut Link,
        ring: u16,
        config: QueueConfig,
        own: Range<u32>,
    ) -> Result<Side> {
        let ring = Ring::start(link, ring, config, own.clone(), false)?;
        let (space, refill) = (&link.space, REFILL.min(config.size));
        let offsets = own.map(|buffer| space.buffer(buffer));
        let addrs = offsets.clone().map(|offset| space.device_addr(offset)).collect();
        let windows = offsets.map(|offset| space.ram.window(offset as usize, ROOM as usize));
        Ok(Side { ring, buffers: windows.collect::<Result<_, _>>()?, addrs, refill })
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
        link: &mut Link,
        mut each: impl FnMut(&[u8; PACKET], u32),
    ) -> Result<u64> {
        let fresh = link.space.addressing.is_fresh();
        let mut used = [Used::default(); BURST];
        let count = self.ring.queue.pop_burst(&mut used).context("the back end broke a ring")?;
        for Used { token, len } in &used[..count] {
            let buffer = *token as u32;
            if *len > 0 {
                let mut bytes = [0; PACKET];
                self.buffers[self.ring.index(buffer)].read(0, &mut bytes);
                each(&bytes, *len);
            }
            if !fresh {
                self.ring.free.push_back(buffer);
            }
        }
        if fresh {
            self.unmap(&used[..count], link);
        }
        Ok(count as u64)
    }

    /// Unmaps buffers, and frees those that can be used again.
    fn unmap(&mut self, used: &[Used], link: &mut Link) {
        let Link { space, pipe, .. } = link;
        let entries = used.iter().filter_map(|used| {
            let addr = self.addrs[self.ring.index(used.token as u32)];
            let entry = space.entry(addr);
            space.unmap(addr);
            // Only their order matters here, not their targets.
            entry.map(|Entry { first, last, .. }| Entry { first, last, user_addr: first })
        });
        let mut ticket = 0;
        runs(entries, |run| ticket = pipe.invalidate(run.first, run.last));
        used.iter().for_each(|used| self.ring.park(ticket, used.token as u32));
        self.ring.unpark(link);
    }

    /// Sends up to `most` frames, from `number` on; returns how many.
    #[inline]
    pub(super) fn send(&mut self, link: &mut Link, number: u64, most: usize) -> Result<usize> {
        if !self.ring.release(link) {
            return Ok(0);
        }
        let most = most.min(self.ring.queue.free_descs().into()).min(self.ring.free.len());
        let mut numbers = number..;
        self.fill(most, PACKET as u32, link, |buffer| {
            buffer.write(0, &packet(numbers.next().unwrap_or_default()));
            false
        })?;
        Ok(most)
    }

    /// Makes buffers available to write to, if the ring takes many.
    #[inline]
    pub(super) fn post(&mut self, link: &mut Link) -> Result<()> {
        if !self.ring.release(link) || self.ring.queue.free_descs() < self.refill {
            return Ok(());
        }
        let most = self.ring.free.len().min(self.ring.queue.free_descs().into());
        self.fill(most, ROOM, link, |_| true)
    }

    /// Adds `count` buffers of `len` bytes, for which there is room, prepared by `each`, which
    /// returns whether the device writes.
    #[inline]
    fn fill(
        &mut self,
        count: usize,
        len: u32,
        link: &mut Link,
        mut each: impl FnMut(&Window) -> bool,
    ) -> Result<()> {
        let mut entries = Vec::new();
        let Side { ring, buffers, addrs, .. } = self;
        let Ring { number, queue, first, free, .. } = ring;
        let space = &mut link.space;
        let fresh = space.addressing.is_fresh();
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
        if link.space.addressing == (Addressing::Fresh { push: true }) {
            runs(entries, |run| self.ring.held = link.pipe.update(run));
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
