//! The driver's end of a packed virtqueue (virtio 1.3, 2.8).

use ringfence_mem::Window;
use ringfence_sync::atomic::{Ordering, fence};

use super::{
    QueueConfig, Rings,
    end::{End, Format, write_flag},
    ids::{Ids, UsedChain},
};
use crate::{
    Area, Desc, RingError, layout,
    packed::{DescRing, Event, EventWord, RingPos, State},
};

/// The three areas.
#[derive(Debug)]
pub(super) struct Areas {
    ring: DescRing,
    driver: Event,
    device: Event,
    event_idx: bool,
}

/// The driver's position in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// Where the next chain is put, and where the next one comes back.
    next_avail: RingPos,
    next_used: RingPos,
    /// The first descriptor of the first chain that was added since [`publish`](Format::publish):
    /// as long as it is not written, the device does not see those after it.
    unpublished: Option<(u16, State)>,
    /// How many descriptors were published since the last [`needs_kick`](Format::needs_kick), and
    /// how many were added since the last publication.
    fresh: u64,
    waiting: u16,
}

/// The driver's end of a packed queue.
pub(super) type Packed = End<Areas>;

impl Areas {
    /// Writes the first descriptor of a chain of `count`, or keeps it for
    /// [`publish`](Format::publish) if it is the first chain since; `end` is where the chain ends.
    #[inline]
    fn put_first(&self, at: &mut Position, state: State, count: u16, end: RingPos) {
        let place = at.next_avail.at;
        match at.unpublished {
            None => at.unpublished = Some((place, state)),
            // The device polls one place after the other: it does not reach this one before the
            // first is published, whose Release this store precedes.
            Some(_) => self.ring.set_state(place, state, Ordering::Relaxed),
        }
        at.next_avail = end;
        at.waiting += count;
    }
}

impl Format for Areas {
    type Position = Position;

    fn new(config: QueueConfig, rings: Rings) -> Result<(Areas, Position), RingError> {
        let QueueConfig { size, event_idx, .. } = config;
        if !layout::packed::is_size(size) {
            return Err(RingError::PackedSize { size });
        }
        let here = |window: &Window| window.slice().as_ptr() as u64;
        let Rings { desc, avail, used } = rings;
        let at = [here(&desc), here(&avail), here(&used)];
        let areas = Areas {
            ring: DescRing::new(desc, at[0], size)?,
            driver: Event::new(avail, Area::DriverEvent, at[1])?,
            device: Event::new(used, Area::DeviceEvent, at[2])?,
            event_idx,
        };
        // No device reads the ring yet: starting it orders these stores before its first read.
        for at in 0..size {
            areas.ring.set_addr(at, 0);
            areas.ring.set_state(at, State::new(0, 0, 0), Ordering::Relaxed);
        }
        areas.driver.store(EventWord::ALL);
        areas.device.store(EventWord::ALL);
        let at = Position {
            next_avail: RingPos::START,
            next_used: RingPos::START,
            unpublished: None,
            fresh: 0,
            waiting: 0,
        };
        Ok((areas, at))
    }

    #[inline]
    fn write(&self, at: &mut Position, ids: &Ids, descs: &[Desc]) -> u16 {
        let (id, count) = (ids.first, descs.len() as u16);
        let mut place = at.next_avail;
        let mut first = State::new(0, 0, 0);
        for (position, desc) in (0..count).zip(descs) {
            let more = if position + 1 < count { layout::DESC_F_NEXT } else { 0 };
            let state = State::available(desc.len, id, write_flag(desc) | more, place.wrap);
            // The place is free: fewer than `size` descriptors lie between the next used one and
            // it.
            self.ring.set_addr(place.at, desc.addr);
            // The device may be polling this place: the first descriptor is written when all others
            // are there, by the Release of `publish` or before it.
            match position {
                0 => first = state,
                _ => self.ring.set_state(place.at, state, Ordering::Relaxed),
            }
            place = place.forward(1, self.ring.size());
        }
        self.put_first(at, first, count, place);
        id
    }

    #[inline]
    fn write_one(&self, at: &mut Position, ids: &Ids, (addr, len, flags): (u64, u32, u16)) {
        let place = at.next_avail;
        // The place is free, as in `write`.
        self.ring.set_addr(place.at, addr);
        let state = State::available(len, ids.first, flags, place.wrap);
        self.put_first(at, state, 1, place.forward(1, self.ring.size()));
    }

    #[inline]
    fn entry(desc: &Desc, _: usize, _: usize) -> [u8; layout::DESC_SIZE] {
        State::new(desc.len, 0, write_flag(desc)).to_bytes(desc.addr)
    }

    #[inline]
    fn publish(&self, at: &mut Position, _: &Ids) {
        if let Some((place, state)) = at.unpublished.take() {
            // Release: a device that sees this descriptor (with Acquire) sees all that were added
            // with it, indirect tables, and the buffers' contents that were stored before.
            self.ring.set_state(place, state, Ordering::Release);
            at.fresh = at.fresh.saturating_add(core::mem::take(&mut at.waiting).into());
        }
    }

    #[inline]
    fn needs_kick(&self, at: &mut Position, _: &Ids) -> bool {
        let fresh = core::mem::take(&mut at.fresh);
        if fresh == 0 {
            return false;
        }
        // The store of the descriptor, before, and the load of the event structure, after, must not
        // be reordered. The device does the reverse before it sleeps: it stores its event
        // structure, has a full fence, and loads the descriptor that it waits for (its
        // `enable_kicks`), which is the one that was published first, or an earlier one. Of two
        // such fences one comes first in their single order: if ours, the device sees the
        // descriptor and stays awake; if the device's, we see its event structure and kick.
        fence(Ordering::SeqCst);
        // Chains that are added and not published yet are not the device's: the check ends before
        // them.
        let size = self.ring.size();
        let now = at.next_avail.back(at.waiting, size);
        self.device.load().is_due(now, fresh, size, self.event_idx)
    }

    #[inline]
    fn look(&self, _: &mut Position, _: &Ids, _: usize) -> Result<(), RingError> {
        // Each descriptor's flags show whether it is used.
        Ok(())
    }

    #[inline]
    fn next(&self, at: &Position, _: &Ids) -> Option<UsedChain> {
        let RingPos { at: index, wrap } = at.next_used;
        // Acquire pairs with the device's Release: the loads that follow see what it wrote into the
        // buffers, and what else it gave back with this.
        let state = self.ring.state(index, Ordering::Acquire);
        state.is_used(wrap).then(|| {
            // Virtio 2.8.5: if the device wrote nothing, the field means nothing. QEMU's devices
            // have the length there and never the flag, so one that fits is taken.
            let vague = !state.has(layout::DESC_F_WRITE);
            UsedChain { index, id: state.id().into(), len: state.len(), vague }
        })
    }

    #[inline]
    fn forward(&self, at: &mut Position, count: u16) {
        at.next_used = at.next_used.forward(count, self.ring.size());
    }

    #[inline]
    fn suppress(&self, _: &Ids) {
        self.driver.store(EventWord::NONE);
    }

    fn enable(&self, at: &Position, _: &Ids) {
        let wanted = if self.event_idx { EventWord::at(at.next_used) } else { EventWord::ALL };
        self.driver.store(wanted);
    }
}
