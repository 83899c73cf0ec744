//! The chains that a driver has added and not taken back.

use super::Used;
use crate::RingError;

/// Our record of an id. Nothing is ever read back from the ring: the device may have changed it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The caller's token for the chain.
    token: u64,
    /// The chain's sequence number, or [`IDLE`].
    seq: u64,
    /// How many bytes the device may write.
    room: u32,
    /// The next id of the chain, or of the free list: the same link serves both, so that a whole
    /// chain is freed by one store to its tail.
    next: u16,
    /// The last id of the chain.
    tail: u16,
    /// How many descriptors the chain takes.
    count: u16,
}

/// The `seq` of an id without a chain in flight: later than any chain.
const IDLE: u64 = u64::MAX;

/// The ids of chains, as many as there are descriptors. On a split ring they are the indices of
/// descriptors: a chain has those of all its descriptors, and its own is the first. On a packed one
/// they are buffer ids: a chain has one, and for each free descriptor there is a free id.
#[derive(Debug)]
pub(super) struct Ids {
    slots: Box<[Slot]>,
    /// First of the free list, meaningful while `free` is not 0. The list is a stack: the id used
    /// last is the one most likely still in the cache.
    pub(super) first: u16,
    /// How many descriptors are free.
    pub(super) free: u16,
    /// How many chains were ever added, published, and taken back. The rings' indices are the low
    /// 16 bits; 64 bits never wrap, so that they can be compared.
    pub(super) added: u64,
    /// How many were published.
    pub(super) published: u64,
    /// How many were taken back.
    pub(super) taken: u64,
}

/// A chain that the device reports as given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedChain {
    /// The place of the report, for errors.
    pub(super) index: u16,
    pub(super) id: u32,
    pub(super) len: u32,
    /// Whether the length is to be ignored if it is invalid.
    pub(super) vague: bool,
}

impl Ids {
    pub(super) fn new(size: u16) -> Ids {
        let slot = |id: u16| Slot {
            token: 0,
            seq: IDLE,
            room: 0,
            // The last link is meaningless: by then `free` is 0.
            next: id.wrapping_add(1),
            tail: id,
            count: 0,
        };
        let slots = (0..size).map(slot).collect();
        Ids { slots, first: 0, free: size, added: 0, published: 0, taken: 0 }
    }

    pub(super) fn size(&self) -> u16 {
        self.slots.len() as u16
    }

    /// How many chains are added and not taken back.
    pub(super) fn in_flight(&self) -> u16 {
        // Each has a descriptor of its own, so the difference is at most the size.
        (self.added - self.taken) as u16
    }

    /// The free id after this one.
    #[inline]
    pub(super) fn after(&self, id: u16) -> u16 {
        self.slots[usize::from(id)].next
    }

    /// Records a chain of `count` descriptors under the first free id; the ids up to `tail` are
    /// its own.
    #[inline]
    pub(super) fn add(&mut self, tail: u16, count: u16, room: u32, token: u64) {
        let id = self.first;
        self.first = self.slots[usize::from(tail)].next;
        self.free -= count;
        let slot = &mut self.slots[usize::from(id)];
        (slot.token, slot.seq, slot.room) = (token, self.added, room);
        (slot.tail, slot.count) = (tail, count);
        self.added += 1;
    }

    /// Records that all added chains are published. True if any was not before.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let any = self.published != self.added;
        self.published = self.added;
        any
    }

    /// Takes a chain back; also returns how many descriptors it had.
    ///
    /// # Errors
    /// The device broke the rules.
    #[inline]
    pub(super) fn take(&mut self, used: UsedChain) -> Result<(Used, u16), RingError> {
        let UsedChain { index, id, mut len, vague } = used;
        let size = self.size();
        let Some(slot) = self.slots.get_mut(id as usize) else {
            return Err(RingError::UsedId { index, id, size });
        };
        let id = id as u16;
        // One comparison for two rules: `IDLE` is not below any count, and the device may not give
        // back a chain that is added but not published.
        if slot.seq >= self.published {
            return Err(RingError::UsedNotInFlight { index, id });
        }
        if len > slot.room {
            // Devices report what they have read, where there is nothing to write: it means nothing.
            if !vague && slot.room > 0 {
                return Err(RingError::UsedLength { index, id, len, room: slot.room });
            }
            len = 0;
        }
        slot.seq = IDLE;
        let Slot { token, tail, count, .. } = *slot;
        self.slots[usize::from(tail)].next = self.first;
        self.first = id;
        self.free += count;
        self.taken += 1;
        Ok((Used { token, len }, count))
    }
}
