//! The in-flight region of a packed ring.

use ringfence_virtq::{
    RingPos,
    layout::packed::{DESC_F_AVAIL, DESC_F_USED},
};

use super::{InflightError, Part, broken};

/// Bytes before the entries: features, version, size, then these.
pub(super) const HEAD: usize = 32;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
/// used_idx, old_used_idx (u16 each), used_wrap_counter, old_used_wrap_counter (u8 each), padding:
/// written as one word, so that no crash comes between an index and its wrap counter.
const USED: usize = 16;

/// Bytes of an entry.
pub(super) const ENTRY: usize = 32;
const INFLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
/// id, flags (u16 each), len (u32).
const WHAT: usize = 16;
const ADDR: usize = 24;

fn entry(index: u16) -> usize {
    HEAD + usize::from(index) * ENTRY
}

/// A descriptor of a packed ring, as the driver wrote it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDescriptor {
    /// The buffer's address.
    pub addr: u64,
    /// The buffer's length in bytes.
    pub len: u32,
    /// The descriptor's flags.
    pub flags: u16,
    /// The buffer's id.
    pub id: u16,
}

/// A buffer that was taken and not completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedBuffer {
    /// Its entry, for [`PackedInflight::complete`].
    pub slot: u16,
    /// Its descriptors, in order.
    pub descriptors: Vec<PackedDescriptor>,
}

/// A packed ring's in-flight entries, recorded for the next process.
///
/// Call [`take`](Self::take) for each buffer before it is carried out, [`complete`](Self::complete)
/// before the driver sees it, and show it in [`publish`](Self::publish).
#[derive(Debug)]
pub struct PackedInflight {
    part: Part,
    /// How many descriptors the ring has: perhaps fewer than the region has entries.
    ring: u16,
    counter: u64,
    free_head: u16,
    /// Of each entry, as it was written: a peer may change the region.
    links: Box<[Link]>,
    used: RingPos,
    available: RingPos,
    /// Completed, not published.
    batch: Vec<u16>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    next: u16,
    last: u16,
    /// How many entries the buffer that begins here has; 0: none begins here.
    num: u16,
    /// It is in the batch.
    done: bool,
}

impl PackedInflight {
    pub(super) fn open<E: From<InflightError>>(
        part: Part,
        ring: u16,
        base: u32,
        flags_at: impl FnOnce(u16) -> Result<u16, E>,
    ) -> Result<(PackedInflight, Vec<PackedBuffer>), E> {
        let size = part.size;
        if part.is_new()? {
            let used = Self::checked(RingPos::from_bits((base >> 16) as u16), ring)?;
            part.clear(entry(size));
            for index in 0..size {
                part.put16(entry(index) + NEXT, index + 1);
            }
            Self::put_used(&part, used, used);
            part.born();
        }
        let (now, old) = Self::get_used(&part);
        let (now, old) = (Self::checked(now, ring)?, Self::checked(old, ring)?);
        let mut free_head = part.get16(OLD_FREE_HEAD);
        let mut used = old;
        if now != old {
            let flags = flags_at(old.at)? & (DESC_F_AVAIL | DESC_F_USED);
            let available = if old.wrap { DESC_F_AVAIL } else { DESC_F_USED };
            // The driver was shown the batch: what was recorded of it holds.
            if flags != available {
                free_head = part.get16(FREE_HEAD);
                part.put16(OLD_FREE_HEAD, free_head);
                Self::put_used(&part, now, now);
                used = now;
            }
        }
        // An unfinished take or completion is undone.
        part.put16(FREE_HEAD, free_head);
        Self::put_used(&part, used, used);

        let mut links = vec![Link::default(); size.into()].into_boxed_slice();
        let mut seen = vec![false; size.into()];
        let mut meet = |what, index: u16| match seen.get_mut(usize::from(index)) {
            Some(seen) if !*seen => {
                *seen = true;
                Ok(())
            }
            _ => Err(broken(what, index)),
        };
        let next_of = |index| part.get16(entry(index) + NEXT);
        let mut at = free_head;
        while at < size {
            meet("a free entry", at)?;
            part.put8(entry(at) + INFLIGHT, 0);
            let next = next_of(at);
            links[usize::from(at)].next = next;
            at = next;
        }
        let mut buffers = Vec::new();
        for slot in 0..size {
            let at = entry(slot);
            if part.get8(at + INFLIGHT) == 0 {
                continue;
            }
            let num = part.get16(at + NUM);
            if num == 0 || num > size {
                return Err(broken("the length of a buffer", num).into());
            }
            let mut descriptors = Vec::new();
            let (mut index, mut last) = (slot, slot);
            for _ in 0..num {
                meet("an entry in flight", index)?;
                let at = entry(index);
                let [a, b, c, d, e, f, g, h] = part.get64(at + WHAT).to_ne_bytes();
                descriptors.push(PackedDescriptor {
                    addr: part.get64(at + ADDR),
                    len: u32::from_ne_bytes([e, f, g, h]),
                    flags: u16::from_ne_bytes([c, d]),
                    id: u16::from_ne_bytes([a, b]),
                });
                last = index;
                let next = next_of(index);
                links[usize::from(index)].next = next;
                index = next;
            }
            links[usize::from(slot)].num = num;
            links[usize::from(slot)].last = last;
            buffers.push((part.get64(at + COUNTER), PackedBuffer { slot, descriptors }));
        }
        buffers.sort_by_key(|&(counter, _)| counter);
        let counter = buffers.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let buffers: Vec<_> = buffers.into_iter().map(|(_, buffer)| buffer).collect();
        // No entry is counted twice, so that this is at most the region's size.
        let taken = buffers.iter().map(|buffer| buffer.descriptors.len()).sum::<usize>() as u16;
        if taken > ring {
            return Err(broken("the number of descriptors in flight", taken).into());
        }
        let available = used.forward(taken, ring);
        let batch = Vec::with_capacity(size.into());
        let inflight =
            PackedInflight { part, ring, counter, free_head, links, used, available, batch };
        Ok((inflight, buffers))
    }

    fn checked(place: RingPos, size: u16) -> Result<RingPos, InflightError> {
        if place.at < size {
            return Ok(place);
        }
        Err(broken("the used index", place.at))
    }

    fn get_used(part: &Part) -> (RingPos, RingPos) {
        let [a, b, c, d, wrap, old_wrap, ..] = part.get64(USED).to_ne_bytes();
        let place = |index, wrap| RingPos { at: u16::from_ne_bytes(index), wrap: wrap != 0 };
        (place([a, b], wrap), place([c, d], old_wrap))
    }

    fn put_used(part: &Part, now: RingPos, old: RingPos) {
        let ([a, b], [c, d]) = (now.at.to_ne_bytes(), old.at.to_ne_bytes());
        let bytes = [a, b, c, d, now.wrap.into(), old.wrap.into(), 0, 0];
        part.put64(USED, u64::from_ne_bytes(bytes));
    }

    /// Where the ring goes on: behind all that was taken, and where the next used descriptor goes
    /// (see [`RingSetup::base`](crate::RingSetup::base)).
    pub fn base(&self) -> u32 {
        u32::from(self.available.bits()) | u32::from(self.used.bits()) << 16
    }

    /// Takes a buffer of these descriptors; call it before the buffer has any effect. Returns its
    /// entry; `None` if `descriptors` is empty, or has more than the ring or than there are free
    /// entries.
    pub fn take(&mut self, descriptors: &[PackedDescriptor]) -> Option<u16> {
        let size = self.part.size;
        let free = core::iter::successors(Some(self.free_head), |&index| {
            (index < size).then(|| self.links[usize::from(index)].next)
        });
        let enough = free.take(descriptors.len()).all(|index| index < size);
        if descriptors.is_empty() || descriptors.len() > usize::from(self.ring) || !enough {
            return None;
        }
        let slot = self.free_head;
        let head = entry(slot);
        self.part.put16(head + NUM, 0);
        self.part.put64(head + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.part.put8(head + INFLIGHT, 1);
        for (index, descriptor) in descriptors.iter().enumerate() {
            let at = entry(self.free_head);
            if index + 1 == descriptors.len() {
                self.part.put16(head + LAST, self.free_head);
                self.links[usize::from(slot)].last = self.free_head;
            }
            self.part.put16(head + NUM, index as u16 + 1);
            self.part.put64(at + ADDR, descriptor.addr);
            let [a, b] = descriptor.id.to_ne_bytes();
            let [c, d] = descriptor.flags.to_ne_bytes();
            let [e, f, g, h] = descriptor.len.to_ne_bytes();
            self.part.put64(at + WHAT, u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
            self.free_head = self.links[usize::from(self.free_head)].next;
            self.part.put16(FREE_HEAD, self.free_head);
        }
        self.links[usize::from(slot)].num = descriptors.len() as u16;
        self.available = self.available.forward(descriptors.len() as u16, self.ring);
        // Before this store, the buffer counts as not taken.
        self.part.put16(OLD_FREE_HEAD, self.free_head);
        Some(slot)
    }

    /// Completes the buffer of this entry; the next [`publish`](Self::publish) shows its used
    /// descriptor.
    pub fn complete(&mut self, slot: u16) {
        if let Some(link) = self.links.get_mut(usize::from(slot))
            && link.num != 0
            && !link.done
        {
            link.done = true;
            self.batch.push(slot);
        }
    }

    /// Shows the driver what was completed since the last call: `show` writes the flags of the
    /// *first* used descriptor, after those of the others.
    pub fn publish(&mut self, show: impl FnOnce()) {
        let old = self.used;
        for at in 0..self.batch.len() {
            let num = self.free(self.batch[at]);
            self.used = self.used.forward(num, self.ring);
        }
        Self::put_used(&self.part, self.used, old);
        show();
        for slot in self.batch.drain(..) {
            self.part.put8(entry(slot) + INFLIGHT, 0);
            let link = &mut self.links[usize::from(slot)];
            (link.num, link.done) = (0, false);
        }
        self.part.put16(OLD_FREE_HEAD, self.free_head);
        Self::put_used(&self.part, self.used, self.used);
    }

    /// Forgets the buffer of this entry, which was taken last of those that are in flight, and is
    /// put back into the ring. Only while nothing is completed and not [published](Self::publish).
    pub fn forget(&mut self, slot: u16) {
        debug_assert!(self.batch.is_empty());
        let num = self.free(slot);
        self.available = self.available.back(num, self.ring);
        // Before this store the buffer counts as taken. What is free is not in flight, whatever its entry says.
        self.part.put16(OLD_FREE_HEAD, self.free_head);
        self.part.put8(entry(slot) + INFLIGHT, 0);
        self.links[usize::from(slot)].num = 0;
    }

    /// Puts a buffer's entries before those that are free; returns how many they are.
    fn free(&mut self, slot: u16) -> u16 {
        let Link { last, num, .. } = self.links[usize::from(slot)];
        self.part.put16(entry(last) + NEXT, self.free_head);
        self.links[usize::from(last)].next = self.free_head;
        self.free_head = slot;
        self.part.put16(FREE_HEAD, slot);
        num
    }
}
