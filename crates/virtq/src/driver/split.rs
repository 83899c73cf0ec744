//! The driver's end of a split virtqueue (virtio 1.3, 2.7).

use ringfence_mem::Window;
use ringfence_sync::atomic::{Ordering, fence};

use super::{
    QueueConfig, Rings,
    end::{End, Format},
    ids::{Ids, UsedChain},
};
use crate::{
    Desc, RingError, layout,
    ring::{AvailRing, DescTable, RawDesc, UsedRing},
};

/// The three areas.
#[derive(Debug)]
pub(super) struct Areas {
    desc: DescTable,
    avail: AvailRing,
    used: UsedRing,
}

/// The driver's position in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// The used index when it was last read.
    seen: u16,
    /// How many chains were published at the last [`needs_kick`](super::Queue::needs_kick).
    judged: u64,
}

/// The driver's end of a split queue.
pub(super) type Split = End<Areas>;

impl Format for Areas {
    type Position = Position;

    fn new(config: QueueConfig, rings: Rings) -> Result<(Areas, Position), RingError> {
        let QueueConfig { size, event_idx, .. } = config;
        if !layout::is_size(size) {
            return Err(RingError::Size { size });
        }
        let here = |window: &Window| window.slice().as_ptr() as u64;
        let Rings { desc, avail, used } = rings;
        let at = [here(&desc), here(&avail), here(&used)];
        let areas = Areas {
            desc: DescTable::new(desc, at[0], size)?,
            avail: AvailRing::new(avail, at[1], size, event_idx)?,
            used: UsedRing::new(used, at[2], size, event_idx)?,
        };
        // No device reads the ring yet: starting it orders these stores before its first read.
        for field in [areas.avail.flags(), areas.avail.idx(), areas.used.flags(), areas.used.idx()]
            .into_iter()
            .chain(areas.avail.event())
            .chain(areas.used.event())
        {
            field.store(0, Ordering::Relaxed);
        }
        Ok((areas, Position { seen: 0, judged: 0 }))
    }

    #[inline(always)]
    fn write(&self, _: &mut Position, ids: &Ids, descs: &[Desc]) -> u16 {
        let head = ids.first;
        let mut tail = head;
        for (position, desc) in descs.iter().enumerate() {
            if position > 0 {
                tail = ids.after(tail);
            }
            let last = position + 1 == descs.len();
            let next = (!last).then(|| ids.after(tail));
            self.desc.store(tail, RawDesc::buffer(desc, next));
        }
        self.enqueue(ids, head);
        tail
    }

    #[inline]
    fn write_one(&self, _: &mut Position, ids: &Ids, (addr, len, flags): (u64, u32, u16)) {
        let head = ids.first;
        self.desc.store(head, RawDesc { addr, len, flags, next: 0 });
        self.enqueue(ids, head);
    }

    #[inline]
    fn entry(desc: &Desc, position: usize, count: usize) -> [u8; layout::DESC_SIZE] {
        let next = position as u16 + 1;
        RawDesc::buffer(desc, (usize::from(next) < count).then_some(next)).to_bytes()
    }

    #[inline]
    fn publish(&self, _: &mut Position, ids: &Ids) {
        // Release: a device that reads this index (with Acquire) sees the entries of the ring, the
        // descriptors, indirect tables and the buffers' contents that were stored before.
        self.avail.idx().store(ids.added as u16, Ordering::Release);
    }

    #[inline]
    fn needs_kick(&self, at: &mut Position, ids: &Ids) -> bool {
        let (old, new) = (at.judged, ids.published);
        if old == new {
            return false;
        }
        at.judged = new;
        // The store of the index, before, and the load of the event or the flags, after, must not
        // be reordered. The device does the reverse before it sleeps: it stores the event, has a
        // full fence, and loads the index (its `enable_kicks`). Of two such fences one comes first
        // in their single order: if ours, the device sees the index and stays awake; if the
        // device's, we see the event and kick. No weaker order than SeqCst forbids that both loads
        // see the old value.
        fence(Ordering::SeqCst);
        match self.used.event() {
            // 2^16 chains published between two calls have passed every event.
            Some(_) if new - old > u64::from(u16::MAX) => true,
            Some(event) => {
                layout::passed_event(event.load(Ordering::Relaxed), new as u16, old as u16)
            }
            None => self.used.flags().load(Ordering::Relaxed) & layout::USED_F_NO_NOTIFY == 0,
        }
    }

    /// Reads the used index, once for as many chains as it announces.
    #[inline]
    fn look(&self, at: &mut Position, ids: &Ids, most: usize) -> Result<(), RingError> {
        let next = ids.taken as u16;
        if usize::from(at.seen.wrapping_sub(next)) >= most {
            return Ok(());
        }
        // Acquire pairs with the device's Release: the loads that follow see the elements up to the
        // index, and what the device wrote into their buffers.
        let idx = self.used.idx().load(Ordering::Acquire);
        let in_flight = (ids.published - ids.taken) as u16;
        if idx.wrapping_sub(next) > in_flight {
            return Err(RingError::UsedJump { next, idx, in_flight });
        }
        at.seen = idx;
        Ok(())
    }

    #[inline]
    fn next(&self, at: &Position, ids: &Ids) -> Option<UsedChain> {
        let index = ids.taken as u16;
        (at.seen != index).then(|| {
            let (id, len) = self.used.load(index);
            UsedChain { index, id, len, vague: false }
        })
    }

    #[inline]
    fn forward(&self, _: &mut Position, _: u16) {}

    #[inline]
    fn suppress(&self, ids: &Ids) {
        match self.avail.event() {
            // No event value means never; this one is half a lap of the index away, so that a
            // poller is interrupted once in 2^16 chains.
            Some(event) => event.store(ids.taken as u16 ^ 0x8000, Ordering::Relaxed),
            None => self.avail.flags().store(layout::AVAIL_F_NO_INTERRUPT, Ordering::Relaxed),
        }
    }

    fn enable(&self, _: &Position, ids: &Ids) {
        match self.avail.event() {
            Some(event) => event.store(ids.taken as u16, Ordering::Relaxed),
            None => self.avail.flags().store(0, Ordering::Relaxed),
        }
    }
}

impl Areas {
    /// Puts a chain into the available ring, not yet visible.
    #[inline]
    fn enqueue(&self, ids: &Ids, head: u16) {
        // The entry is free: it was last used `size` chains ago, and as there are never more than
        // `size` in flight, the device has since read it. Relaxed, as the stores to the descriptors
        // are: `publish` orders them all.
        self.avail.head(ids.added as u16).store(head, Ordering::Relaxed);
    }
}
