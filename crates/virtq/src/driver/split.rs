//! The driver's end of a split virtqueue (virtio 1.3, 2.7).

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::Window;

use super::{Config, Ring, Rings, Used, checked};
use crate::{
    AddError, Desc, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// What we know of a descriptor. Nothing is ever read back from the table: the device may have
/// changed it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Of a head: the caller's name for the chain.
    token: u64,
    /// Of a head: the how manieth chain it was, or [`IDLE`].
    seq: u64,
    /// Of a head: how many bytes the device may write.
    room: u32,
    /// The next descriptor of the chain, or of the free list: the same link serves both, so that
    /// a whole chain is freed by one store to its tail.
    next: u16,
    /// Of a head: the last descriptor of the chain.
    tail: u16,
    /// Of a head: how many descriptors the chain takes.
    count: u16,
}

/// The `seq` of a descriptor that is no head of a chain in flight: later than any chain.
const IDLE: u64 = u64::MAX;

/// The driver's end of a split queue.
#[derive(Debug)]
pub struct Split {
    desc: DescTable,
    avail: AvailRing,
    used: UsedRing,
    size: u16,
    slots: Box<[Slot]>,
    /// First descriptor of the free list, meaningful while `free` is not 0. The list is a stack:
    /// the descriptor used last is the one most likely still in the cache.
    free_head: u16,
    free: u16,
    /// How many chains were ever added, published, and taken back. The rings' indices are the low
    /// 16 bits; in 64 bits "earlier" has a meaning.
    added: u64,
    published: u64,
    taken: u64,
    /// The used index when it was last read.
    seen: u16,
    /// How many chains had been published when [`needs_kick`](Ring::needs_kick) last looked.
    judged: u64,
    /// Whether interrupts are asked for.
    notify: bool,
    broken: Option<RingError>,
}

impl Split {
    /// As [`Queue::with_config`](super::Queue::with_config), for a split ring.
    ///
    /// # Errors
    /// As there.
    pub fn new(config: Config, rings: Rings) -> Result<Split, RingError> {
        let Config { size, event_idx, .. } = config;
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let here = |window: &Window| window.slice().as_ptr() as u64;
        let Rings { desc, avail, used } = rings;
        let at = [here(&desc), here(&avail), here(&used)];
        let queue = Split {
            desc: DescTable::new(desc, at[0], size)?,
            avail: AvailRing::new(avail, at[1], size, event_idx)?,
            used: UsedRing::new(used, at[2], size, event_idx)?,
            size,
            slots: (0..size)
                .map(|index| Slot {
                    token: 0,
                    seq: IDLE,
                    room: 0,
                    // The last one leads nowhere: by then `free` is 0.
                    next: index.wrapping_add(1),
                    tail: index,
                    count: 0,
                })
                .collect(),
            free_head: 0,
            free: size,
            added: 0,
            published: 0,
            taken: 0,
            seen: 0,
            judged: 0,
            notify: true,
            broken: None,
        };
        // No device looks yet: whatever starts it orders these stores before its first look.
        for field in [queue.avail.flags(), queue.avail.idx(), queue.used.flags(), queue.used.idx()]
            .into_iter()
            .chain(queue.avail.used_event())
            .chain(queue.used.avail_event())
        {
            field.store(0, Ordering::Relaxed);
        }
        Ok(queue)
    }

    /// Takes the descriptors `head ..= tail` off the free list and puts the chain into the
    /// available ring, not yet visible.
    #[inline]
    fn enqueue(&mut self, head: u16, tail: u16, count: u16, room: u32, token: u64) {
        self.free_head = self.slots[usize::from(tail)].next;
        self.free -= count;
        let slot = &mut self.slots[usize::from(head)];
        (slot.token, slot.seq, slot.room) = (token, self.added, room);
        (slot.tail, slot.count) = (tail, count);
        // The entry is free: it was last used `size` chains ago, and as there are never more than
        // `size` in flight, the device has since read it. Relaxed, as the stores to the
        // descriptors are: `publish` orders them all.
        self.avail.head(self.added as u16).store(head, Ordering::Relaxed);
        self.added += 1;
    }

    /// Takes back the chain at the next used index, which was seen.
    #[inline]
    fn take(&mut self) -> Result<Used, RingError> {
        let index = self.taken as u16;
        let (id, len) = self.used.load(index);
        if id >= u32::from(self.size) {
            return Err(self.break_with(RingError::UsedId { index, id, size: self.size }));
        }
        let id = id as u16;
        let slot = &mut self.slots[usize::from(id)];
        // One comparison for two rules: `IDLE` is no earlier than anything, and a chain that is
        // added but not published is not the device's to give back.
        if slot.seq >= self.published {
            return Err(self.break_with(RingError::UsedNotInFlight { index, id }));
        }
        if len > slot.room {
            let room = slot.room;
            return Err(self.break_with(RingError::UsedLength { index, id, len, room }));
        }
        slot.seq = IDLE;
        let Slot { token, tail, count, .. } = *slot;
        self.slots[usize::from(tail)].next = self.free_head;
        self.free_head = id;
        self.free += count;
        self.taken += 1;
        Ok(Used { token, len })
    }

    /// Reads the used index.
    #[inline]
    fn look(&mut self) -> Result<(), RingError> {
        // Acquire pairs with the device's Release: the elements up to the index, and what the
        // device wrote into their buffers, are seen by the loads that follow.
        let idx = self.used.idx().load(Ordering::Acquire);
        let next = self.taken as u16;
        let in_flight = (self.published - self.taken) as u16;
        if idx.wrapping_sub(next) > in_flight {
            return Err(self.break_with(RingError::UsedJump { next, idx, in_flight }));
        }
        self.seen = idx;
        Ok(())
    }

    #[cold]
    fn break_with(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }
}

impl Ring for Split {
    fn size(&self) -> u16 {
        self.size
    }

    fn free_descs(&self) -> u16 {
        self.free
    }

    fn in_flight(&self) -> u16 {
        // Each has a descriptor of its own, so the difference is at most the size.
        (self.added - self.taken) as u16
    }

    fn broken(&self) -> Option<RingError> {
        self.broken
    }

    #[inline]
    fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        let room = checked(self, descs, descs.len())?;
        let head = self.free_head;
        let mut tail = head;
        for (position, desc) in descs.iter().enumerate() {
            if position > 0 {
                tail = self.slots[usize::from(tail)].next;
            }
            let last = position + 1 == descs.len();
            let next = (!last).then(|| self.slots[usize::from(tail)].next);
            self.desc.store(tail, RawDesc::buffer(desc, next));
        }
        self.enqueue(head, tail, descs.len() as u16, room, token);
        Ok(())
    }

    #[inline]
    fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        let room = checked(self, descs, 1)?;
        let bytes = descs.len() * layout::DESC_SIZE;
        if table.len() < bytes {
            return Err(AddError::Table { wanted: descs.len(), len: table.len() });
        }
        for (position, desc) in descs.iter().enumerate() {
            // Fits: `checked` held the chain to the queue's size.
            let next = position as u16 + 1;
            let next = (usize::from(next) < descs.len()).then_some(next);
            table.write(position * layout::DESC_SIZE, &RawDesc::buffer(desc, next).to_bytes());
        }
        let head = self.free_head;
        let flags = layout::DESC_F_INDIRECT;
        self.desc.store(head, RawDesc { addr: table_addr, len: bytes as u32, flags, next: 0 });
        self.enqueue(head, head, 1, room, token);
        Ok(())
    }

    #[inline]
    fn add_burst(
        &mut self,
        buffers: impl IntoIterator<Item = (Desc, u64)>,
    ) -> Result<usize, AddError> {
        if let Some(error) = self.broken {
            return Err(AddError::Broken(error));
        }
        let mut buffers = buffers.into_iter();
        let mut added = 0;
        while self.free > 0
            && let Some((desc, token)) = buffers.next()
        {
            if desc.wraps() {
                return Err(AddError::Wraps { at: added });
            }
            let (at, room) = (self.free_head, if desc.write { desc.len } else { 0 });
            self.desc.store(at, RawDesc::buffer(&desc, None));
            self.enqueue(at, at, 1, room, token);
            added += 1;
        }
        Ok(added)
    }

    #[inline]
    fn publish(&mut self) {
        if self.published != self.added {
            // Release: whoever reads this index (with Acquire) sees the entries of the ring, the
            // descriptors, indirect tables and the buffers' contents that were stored before.
            self.avail.idx().store(self.added as u16, Ordering::Release);
            self.published = self.added;
        }
    }

    #[inline]
    fn needs_kick(&mut self) -> bool {
        let (old, new) = (self.judged, self.published);
        if old == new {
            return false;
        }
        self.judged = new;
        // The store of the index, before, and the load of the event or the flags, after, must not
        // change places. The device does the reverse before it sleeps: it stores the event, has a
        // full fence, and loads the index (its `enable_kicks`). Of two such fences one comes first
        // in their single order: if ours, the device sees the index and stays awake; if the
        // device's, we see the event and kick. No weaker order than SeqCst forbids that both loads
        // see the old value.
        fence(Ordering::SeqCst);
        match self.used.avail_event() {
            // Who publishes 2^16 chains without asking once has passed every event there is.
            Some(_) if new - old > u64::from(u16::MAX) => true,
            Some(event) => {
                layout::passed_event(event.load(Ordering::Relaxed), new as u16, old as u16)
            }
            None => self.used.flags().load(Ordering::Relaxed) & layout::USED_F_NO_NOTIFY == 0,
        }
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<Used>, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        if self.seen == self.taken as u16 {
            self.look()?;
            if self.seen == self.taken as u16 {
                return Ok(None);
            }
        }
        self.take().map(Some)
    }

    #[inline]
    fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        if usize::from(self.seen.wrapping_sub(self.taken as u16)) < out.len() {
            self.look()?;
        }
        let ready = usize::from(self.seen.wrapping_sub(self.taken as u16)).min(out.len());
        for (done, place) in out[..ready].iter_mut().enumerate() {
            match self.take() {
                Ok(used) => *place = used,
                // Those before it are given first: the next call says it again.
                Err(error) => return if done == 0 { Err(error) } else { Ok(done) },
            }
        }
        Ok(ready)
    }

    #[inline]
    fn suppress_notifications(&mut self) {
        // The line belongs to what the device reads: do not touch it without need.
        if core::mem::replace(&mut self.notify, false) {
            match self.avail.used_event() {
                // There is no event that says never; this one is half a lap of the index away, so
                // that a poller is interrupted once in 2^16 chains.
                Some(event) => event.store(self.taken as u16 ^ 0x8000, Ordering::Relaxed),
                None => {
                    self.avail.flags().store(layout::AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
                }
            }
        }
    }

    fn enable_notifications(&mut self) -> bool {
        self.notify = true;
        match self.avail.used_event() {
            Some(event) => event.store(self.taken as u16, Ordering::Relaxed),
            None => self.avail.flags().store(0, Ordering::Relaxed),
        }
        // The mirror image of the device's `publish_used`, argued as in `needs_kick`: either we
        // see the index that the device has published, or it sees what we have just asked for.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some() || self.look().is_err() || self.seen != self.taken as u16
    }
}
