//! One ring whose buffers are mapped for each use.

use std::{collections::VecDeque, sync::Arc};

use crate::load::net::PACKET;
use anyhow::{Context, Result, bail};
use ringfence_dma::{Direction, DmaBuffer, Returned, Segment, UnmapError};
use ringfence_drivers::{ram::PagedBuffer, transfers::Transfers};
use ringfence_mem::HostSlice;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::{
    Desc,
    driver::{Queue, Used},
};

use super::{Mapped, link::Parts};
use crate::run::{Dma, space::AnyAllocator};

const PAGE: u64 = 4096;
/// Most frames that are taken back at once.
const BURST: usize = 64;
/// Buffers that are mapped while the ring has no room for them, at most: so that it never waits for
/// the IOMMU.
const AHEAD: usize = 128;
/// What a device may write of a receive buffer: packets may take several.
const ROOM: u32 = 1024;

/// Neighbouring buffers that are one mapping.
struct Bundle {
    /// The buffers, a page each, while they are the driver's.
    own: Option<PagedBuffer>,
    /// The number of their transfer, while they are the device's.
    transfer: usize,
    /// Where the device finds each frame.
    addrs: Vec<u64>,
    /// How much the device reports to have written to each.
    lens: Vec<u32>,
    /// How many are in the ring.
    left: usize,
}

/// A ring, and the buffers that are its own.
pub(super) struct Ring {
    queue: Queue,
    /// Maps and unmaps, and has the bundle number of each transfer; `None`: buffers are not mapped.
    transfers: Option<Transfers<Arc<ViommuDomain>, AnyAllocator, PagedBuffer, usize>>,
    receives: bool,
    /// Whether frames are copied to where they are mapped.
    copied: bool,
    size: usize,
    bundles: Vec<Bundle>,
    /// Bundles that the driver has, the longest held first.
    free: VecDeque<usize>,
    /// Mapped, and not in the ring.
    ready: VecDeque<usize>,
    /// How many are being mapped.
    mapping: usize,
    /// Empty between two calls.
    unmapped: Vec<usize>,
}

impl Ring {
    pub(super) fn new(
        mapped: Mapped,
        dma: Option<&Dma>,
        (queue, buffers): Parts,
        receives: bool,
    ) -> Ring {
        let copied = mapped.policy.bounces();
        let bundles = buffers.into_iter().enumerate().map(|(at, mut own)| {
            if copied {
                // Otherwise all of a buffer would be copied.
                own.set_len(if receives { ROOM as usize } else { PACKET });
            }
            let mut segments = Vec::new();
            own.for_each_segment(&mut |addr, len| segments.push(Segment { addr: addr.0, len }));
            let mut addrs = vec![0; mapped.bundle];
            locate(&segments, &mut addrs, |index| colour(copied, at, index));
            Bundle { own: Some(own), transfer: 0, addrs, lens: vec![0; mapped.bundle], left: 0 }
        });
        let bundles: Vec<Bundle> = bundles.collect();
        Ring {
            queue,
            transfers: dma.map(|dma| Transfers::new(dma, bundles.len())),
            receives,
            copied,
            size: mapped.bundle,
            free: (0..bundles.len()).collect(),
            bundles,
            ready: VecDeque::new(),
            mapping: 0,
            unmapped: Vec::new(),
        }
    }

    /// How many buffers the device has.
    pub(super) fn in_flight(&self) -> usize {
        self.queue.in_flight().into()
    }

    /// How many buffers the device has, or soon will.
    pub(super) fn under_way(&self) -> usize {
        self.in_flight() + (self.ready.len() + self.mapping) * self.size
    }

    /// Calls `fill` to write the frames of free bundles, of `most` buffers at most, and begins to
    /// map them; returns how many buffers.
    #[inline]
    pub(super) fn post(
        &mut self,
        most: usize,
        mut fill: impl FnMut(&mut [u8; PACKET]),
    ) -> Result<usize> {
        let room = usize::from(self.queue.size()) + AHEAD;
        let most = most.min(room.saturating_sub(self.under_way())) / self.size;
        let direction = if self.receives { Direction::FromDevice } else { Direction::ToDevice };
        let mut count = 0;
        while count < most
            && let Some(at) = self.free.pop_front()
        {
            let bundle = &mut self.bundles[at];
            if !self.receives {
                let own = bundle.own.as_mut().context("a free buffer")?;
                for index in 0..self.size {
                    let (place, mut bytes) = (colour(self.copied, at, index), [0; PACKET]);
                    let piece = frame(own, index, place);
                    piece.copy_to(&mut bytes);
                    fill(&mut bytes);
                    piece.copy_from(&bytes);
                }
            }
            match &mut self.transfers {
                None => self.ready.push_back(at),
                Some(transfers) => {
                    let own = bundle.own.take().context("a free buffer")?;
                    bundle.transfer = transfers.take().context("a number for each bundle")?;
                    *transfers.work(bundle.transfer) = at;
                    if let Err(error) = transfers.map(bundle.transfer, own, direction) {
                        transfers.release(bundle.transfer);
                        return Err(error.error()).context("mapping buffers");
                    }
                    self.mapping += 1;
                }
            }
            count += 1;
        }
        if let Some(transfers) = &mut self.transfers {
            transfers.begin_maps();
        }
        Ok(count * self.size)
    }

    /// Makes buffers available to the device once they are mapped, as far as there is room.
    #[inline]
    pub(super) fn advance(&mut self) -> Result<()> {
        if let Some(transfers) = &mut self.transfers {
            let (bundles, ready, copied) = (&mut self.bundles, &mut self.ready, self.copied);
            let mut failed = None;
            self.mapping -= transfers.poll_maps(|_, &mut at, mapping| match mapping {
                Ok(mapping) => {
                    let addrs = &mut bundles[at].addrs;
                    locate(mapping.segments(), addrs, |index| colour(copied, at, index));
                    ready.push_back(at);
                    true
                }
                Err(error) => {
                    failed = Some(error.error());
                    false
                }
            });
            failed.map_or(Ok(()), Err).context("mapping buffers")?;
        }
        let mut added = 0;
        while usize::from(self.queue.free_descs()) >= self.size
            && let Some(at) = self.ready.pop_front()
        {
            let (receives, bundle) = (self.receives, &mut self.bundles[at]);
            let buffers = bundle.addrs.iter().enumerate().map(|(index, &addr)| {
                let desc = match receives {
                    true => Desc::writable(addr, ROOM),
                    false => Desc::readable(addr, PACKET as u32),
                };
                (desc, (at as u64) << 32 | index as u64)
            });
            added += self.queue.add_burst(buffers)?;
            bundle.left = self.size;
            bundle.lens.fill(0);
        }
        if added > 0 {
            self.queue.publish();
        }
        Ok(())
    }

    /// Takes back what the device has used, a burst at most; returns how many. A bundle of which
    /// all was used is unmapped, and when that is over, `each` gets its frames with the lengths
    /// that the device reports.
    #[inline]
    pub(super) fn reap(&mut self, mut each: impl FnMut(&[u8; PACKET], u32)) -> Result<usize> {
        let mut used = [Used::default(); BURST];
        let count = self.queue.pop_burst(&mut used)?;
        for used in &used[..count] {
            let (at, index) = ((used.token >> 32) as usize, used.token as u32 as usize);
            let bundle = &mut self.bundles[at];
            bundle.lens[index] = used.len;
            bundle.left -= 1;
            if bundle.left == 0 {
                self.retire(at, &mut each)?;
            }
        }
        if let Some(transfers) = &mut self.transfers {
            transfers.begin_unmaps();
            if transfers.is_unmapping() {
                self.take_unmapped(&mut each, false)?;
            }
        }
        Ok(count)
    }

    /// Begins to unmap a bundle.
    fn retire(&mut self, at: usize, each: &mut impl FnMut(&[u8; PACKET], u32)) -> Result<()> {
        let Some(transfers) = &mut self.transfers else {
            self.take_back(at, each);
            return Ok(());
        };
        let bundle = &self.bundles[at];
        let Some((_, Some(mapping))) = transfers.submitted(bundle.transfer) else {
            bail!("a buffer that was used is not mapped")
        };
        if self.copied && self.receives {
            let written = u64::from(bundle.lens[0]).min(mapping.len());
            mapping.note_written(0..written)?;
        }
        transfers.end(bundle.transfer);
        Ok(())
    }

    /// Takes back what is unmapped; all of it if it is to `wait`.
    fn take_unmapped(
        &mut self,
        each: &mut impl FnMut(&[u8; PACKET], u32),
        wait: bool,
    ) -> Result<()> {
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        let (bundles, unmapped, mut failed) = (&mut self.bundles, &mut self.unmapped, None);
        let take =
            |_, at: &mut usize, returned: core::result::Result<Returned<_>, UnmapError<_>>| {
                match returned {
                    Ok(Returned { buffer, .. }) => {
                        bundles[*at].own = Some(buffer);
                        unmapped.push(*at);
                    }
                    Err(error) => failed = Some(error.error()),
                }
            };
        if wait {
            transfers.finish_unmaps(take);
        } else {
            transfers.poll_unmaps(take);
        }
        for next in 0..self.unmapped.len() {
            self.take_back(self.unmapped[next], each);
        }
        self.unmapped.clear();
        failed.map_or(Ok(()), Err).context("unmapping buffers")
    }

    /// Gives a bundle back to the driver.
    #[inline]
    fn take_back(&mut self, at: usize, each: &mut impl FnMut(&[u8; PACKET], u32)) {
        if self.receives {
            let Bundle { own, lens, .. } = &mut self.bundles[at];
            for (index, &len) in lens.iter().enumerate() {
                if let Some(own) = own
                    && len > 0
                {
                    let mut bytes = [0; PACKET];
                    frame(own, index, colour(self.copied, at, index)).copy_to(&mut bytes);
                    each(&bytes, len);
                }
            }
        }
        self.free.push_back(at);
    }

    /// The device has stopped: takes back all that it used, and unmaps everything.
    pub(super) fn finish(&mut self, mut each: impl FnMut(&[u8; PACKET], u32)) -> Result<u64> {
        let mut taken = 0;
        loop {
            match self.reap(&mut each)? {
                0 => break,
                count => taken += count as u64,
            }
        }
        self.take_unmapped(&mut each, true)?;
        if let Some(transfers) = &mut self.transfers {
            // The device never saw it.
            transfers.finish_maps(|_, _, _| false);
            transfers.finish_unmaps(|_, _, _| ());
        }
        for at in 0..self.bundles.len() {
            // Some of its buffers were used: their frames are checked too.
            if std::mem::take(&mut self.bundles[at].left) > 0 {
                self.retire(at, &mut each)?;
            }
        }
        self.take_unmapped(&mut each, true)?;
        // What is left: mappings for the ring that were not used.
        self.transfers.iter_mut().flat_map(Transfers::take_submitted).for_each(drop);
        Ok(taken)
    }

    /// The first of the buffers that came back last: its address for the device, and its frame.
    #[cfg(test)]
    pub(super) fn stale(&mut self) -> (u64, HostSlice<'_>) {
        let at = *self.free.back().expect("some are the driver's");
        let Bundle { own, addrs, .. } = &mut self.bundles[at];
        let own = own.as_mut().expect("the driver's");
        (addrs[0], frame(own, 0, colour(self.copied, at, 0)))
    }

    /// Makes an address available to the device, whatever is there. [`reap`](Self::reap) cannot be
    /// called any more until [`pop_stray`](Self::pop_stray) has it back.
    #[cfg(test)]
    pub(super) fn add_stray(&mut self, addr: u64) -> Result<()> {
        let desc = match self.receives {
            true => Desc::writable(addr, ROOM),
            false => Desc::readable(addr, PACKET as u32),
        };
        self.queue.add(&[desc], u64::MAX)?;
        self.queue.publish();
        Ok(())
    }

    /// The next used buffer, whatever it is: how much was written.
    #[cfg(test)]
    pub(super) fn pop_stray(&mut self) -> Result<Option<u32>> {
        Ok(self.queue.pop()?.map(|used| used.len))
    }
}

/// Where in its page a frame lies. Not all at the same place: they would compete for a few lines of
/// the cache. A copy's place is the slot's.
#[inline]
fn colour(copied: bool, bundle: usize, index: usize) -> u64 {
    if copied { 0 } else { (bundle * 7 + index) as u64 % 32 * 64 }
}

/// The frame in a page of a bundle.
#[inline]
fn frame(buffer: &PagedBuffer, index: usize, colour: u64) -> HostSlice<'_> {
    let at = index * PAGE as usize + colour as usize;
    let frame = buffer.piece().part(at, PACKET);
    assert_eq!(frame.len(), PACKET, "a frame lies in its page");
    frame
}

/// Where the frames of a mapping lie, of buffers of a page each (or of one that is shorter).
#[inline]
fn locate(segments: &[Segment], addrs: &mut [u64], colour: impl Fn(usize) -> u64) {
    let (mut index, mut at) = (0, 0);
    for segment in segments {
        while index < addrs.len() && at < segment.len {
            addrs[index] = segment.addr + at + colour(index);
            (index, at) = (index + 1, at + PAGE);
        }
        at = at.saturating_sub(segment.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_found_whatever_the_segments() {
        let segment = |addr, pages: u64| Segment { addr, len: pages * PAGE };
        let found = |segments: &[Segment], count: usize| {
            let mut addrs = vec![0; count];
            locate(segments, &mut addrs, |index| index as u64 * 64);
            addrs
        };
        assert_eq!(found(&[segment(0x10000, 3)], 3), [0x10000, 0x11040, 0x12080]);
        let apart = [segment(0x10000, 1), segment(0x50000, 2)];
        assert_eq!(found(&apart, 3), [0x10000, 0x50040, 0x51080]);
        assert_eq!(found(&[Segment { addr: 0x3000, len: 76 }], 1), [0x3000]);
    }
}
