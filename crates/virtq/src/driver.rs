//! The driver's end of a split virtqueue.

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::Window;

use crate::{
    AddError, Area, Desc, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// The memory of the three areas. Sizes and alignments: see [`layout`].
#[derive(Clone, Debug)]
pub struct Rings {
    /// The descriptor table.
    pub desc: Window,
    /// The available ring, which this end writes.
    pub avail: Window,
    /// The used ring, which the device writes.
    pub used: Window,
}

impl Rings {
    /// The areas of a queue of `size` at the beginning of `memory`, placed as
    /// [`layout::offsets`] says.
    ///
    /// # Errors
    /// [`RingError::TooSmall`].
    pub fn in_window(memory: &Window, size: u16) -> Result<Rings, RingError> {
        let at = layout::offsets(size);
        let small = RingError::TooSmall { area: Area::Used, len: memory.len(), needed: at.len };
        let part = |offset, len| memory.part(offset, len).ok_or(small);
        Ok(Rings {
            desc: part(at.desc, layout::desc_bytes(size))?,
            avail: part(at.avail, layout::avail_bytes(size))?,
            used: part(at.used, layout::used_bytes(size))?,
        })
    }
}

/// A chain that the device has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`add`](Queue::add) was given with the chain.
    pub token: u64,
    /// How many bytes the device says it wrote: at most the chain's writable bytes.
    pub len: u32,
}

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

/// The driver's end: adds chains, publishes them in batches, takes them back.
///
/// Chains come back in any order. Dropping the queue forgets the chains in flight: stop the device
/// first, or it goes on using their buffers.
#[derive(Debug)]
pub struct Queue {
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
    /// How many chains had been published when [`needs_kick`](Queue::needs_kick) last looked.
    judged: u64,
    /// Whether interrupts are asked for.
    notify: bool,
    broken: Option<RingError>,
}

impl Queue {
    /// A new queue over zeroed or old memory: the areas are initialised, so the device must not
    /// yet use them. Interrupts are wanted at first.
    ///
    /// # Errors
    /// [`RingError::Size`], [`RingError::TooSmall`], [`RingError::Misaligned`].
    pub fn new(size: u16, rings: Rings, event_idx: bool) -> Result<Queue, RingError> {
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let here = |window: &Window| window.slice().as_ptr() as u64;
        let Rings { desc, avail, used } = rings;
        let at = [here(&desc), here(&avail), here(&used)];
        let queue = Queue {
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

    /// How many descriptors the queue has.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// How many descriptors are free.
    pub fn free_descs(&self) -> u16 {
        self.free
    }

    /// How many chains are added and not yet taken back.
    pub fn in_flight(&self) -> u16 {
        // Each has a descriptor of its own, so the difference is at most the size.
        (self.added - self.taken) as u16
    }

    /// What broke the queue, if something did.
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// Adds a chain of buffers, readable ones first. `token` comes back with it from
    /// [`pop`](Self::pop). The device sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    #[inline]
    pub fn add(&mut self, descs: &[Desc], token: u64) -> Result<(), AddError> {
        let room = self.check(descs, descs.len())?;
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

    /// Adds a chain through an indirect table, which takes one descriptor of the queue only. The
    /// table is written to `table`, which the device sees at `table_addr`, and must stay as it is
    /// until the chain comes back. `INDIRECT_DESC` must have been negotiated.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    #[inline]
    pub fn add_indirect(
        &mut self,
        table_addr: u64,
        table: &Window,
        descs: &[Desc],
        token: u64,
    ) -> Result<(), AddError> {
        let room = self.check(descs, 1)?;
        let bytes = descs.len() * layout::DESC_SIZE;
        if table.len() < bytes {
            return Err(AddError::Table { wanted: descs.len(), len: table.len() });
        }
        for (position, desc) in descs.iter().enumerate() {
            // Fits: `check` held the chain to the queue's size.
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

    /// Checks a chain that takes `wanted` descriptors of the queue; returns its writable bytes.
    #[inline]
    fn check(&self, descs: &[Desc], wanted: usize) -> Result<u32, AddError> {
        if let Some(error) = self.broken {
            return Err(AddError::Broken(error));
        }
        if descs.is_empty() {
            return Err(AddError::Empty);
        }
        if descs.len() > usize::from(self.size) {
            return Err(AddError::TooMany { wanted: descs.len(), size: self.size });
        }
        if wanted > usize::from(self.free) {
            return Err(AddError::Full { wanted, free: self.free });
        }
        // At most 2^15 lengths of 32 bits: the sums cannot overflow.
        let (mut total, mut room) = (0_u64, 0);
        let mut writes = false;
        for (at, desc) in descs.iter().enumerate() {
            if writes && !desc.write {
                return Err(AddError::Order { at });
            }
            if desc.wraps() {
                return Err(AddError::Wraps { at });
            }
            writes = desc.write;
            total += u64::from(desc.len);
            room += if desc.write { u64::from(desc.len) } else { 0 };
        }
        if total > u64::from(u32::MAX) {
            return Err(AddError::TooLong { total });
        }
        Ok(room as u32)
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

    /// Makes all chains added so far visible to the device.
    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.added {
            // Release: whoever reads this index (with Acquire) sees the entries of the ring, the
            // descriptors, indirect tables and the buffers' contents that were stored before.
            self.avail.idx().store(self.added as u16, Ordering::Release);
            self.published = self.added;
        }
    }

    /// Whether the device wants a kick for what was published since the last call.
    #[inline]
    #[must_use]
    pub fn needs_kick(&mut self) -> bool {
        let (old, new) = (self.judged, self.published);
        if old == new {
            return false;
        }
        self.judged = new;
        // The store of the index, before, and the load of the event or the flags, after, must not
        // change places. The device does the reverse before it sleeps: it stores the event, has a
        // full fence, and loads the index (`device::Queue::enable_kicks`). Of two such fences one
        // comes first in their single order: if ours, the device sees the index and stays awake;
        // if the device's, we see the event and kick. No weaker order than SeqCst forbids that
        // both loads see the old value.
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

    /// Takes back the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`RingError`]: the device broke the rules; every later call returns the same.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let index = self.taken as u16;
        if self.seen == index {
            self.look()?;
            if self.seen == index {
                return Ok(None);
            }
        }
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
        Ok(Some(Used { token, len }))
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

    /// Asks the device for no interrupts. A hint: one may still come.
    #[inline]
    pub fn suppress_notifications(&mut self) {
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

    /// Asks the device for an interrupt with the next used chain. True if one is there already,
    /// for which none may come: look again before going to sleep. To be called before each sleep,
    /// also when the last call was not followed by
    /// [`suppress_notifications`](Self::suppress_notifications).
    #[must_use]
    pub fn enable_notifications(&mut self) -> bool {
        self.notify = true;
        match self.avail.used_event() {
            Some(event) => event.store(self.taken as u16, Ordering::Relaxed),
            None => self.avail.flags().store(0, Ordering::Relaxed),
        }
        // The mirror image of `device::Queue::publish_used`, argued as in `needs_kick`: either we
        // see the index that the device has published, or it sees what we have just asked for.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some() || self.look().is_err() || self.seen != self.taken as u16
    }
}
