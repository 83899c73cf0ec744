//! The driver's end of a packed virtqueue (virtio 1.3, 2.8).

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::Window;

use super::{Config, Ring, Rings, Used, checked};
use crate::{
    AddError, Area, Desc, RingError, layout,
    packed::{DescRing, Event, Place, State, Wanted},
};

/// What we know of a buffer id. Nothing is ever read back from the ring.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The caller's name for the chain.
    token: u64,
    /// The how manieth chain it is, or [`IDLE`].
    seq: u64,
    /// How many bytes the device may write.
    room: u32,
    /// How many descriptors the chain takes.
    count: u16,
    /// Of a free id: the next free one.
    next: u16,
}

/// The `seq` of an id that is free: later than any chain.
const IDLE: u64 = u64::MAX;

/// The driver's end of a packed queue.
#[derive(Debug)]
pub struct Packed {
    ring: DescRing,
    driver: Event,
    device: Event,
    size: u16,
    event_idx: bool,
    slots: Box<[Slot]>,
    /// First id of the free list. There are as many ids as descriptors, and a chain takes one of
    /// these at least: where a descriptor is free, so is an id.
    free_id: u16,
    free: u16,
    /// Where the next chain is put, and where the next one comes back.
    next_avail: Place,
    next_used: Place,
    /// The first descriptor of the first chain that was added since [`publish`](Ring::publish),
    /// which keeps those after it from the device as long as it is not written.
    unpublished: Option<(u16, State)>,
    /// How many chains were ever added, published, and taken back.
    added: u64,
    published: u64,
    taken: u64,
    /// How many descriptors were published since [`needs_kick`](Ring::needs_kick) last looked, and
    /// how many were added since they were published.
    fresh: u64,
    waiting: u16,
    /// Whether interrupts are asked for.
    notify: bool,
    broken: Option<RingError>,
}

impl Packed {
    /// As [`Queue::with_config`](super::Queue::with_config), for a packed ring.
    ///
    /// # Errors
    /// As there.
    pub fn new(config: Config, rings: Rings) -> Result<Packed, RingError> {
        let Config { size, event_idx, .. } = config;
        if !layout::packed::is_size(size) {
            return Err(RingError::PackedSize { size });
        }
        let here = |window: &Window| window.slice().as_ptr() as u64;
        let Rings { desc, avail, used } = rings;
        let at = [here(&desc), here(&avail), here(&used)];
        let queue = Packed {
            ring: DescRing::new(desc, at[0], size)?,
            driver: Event::new(avail, Area::DriverEvent, at[1])?,
            device: Event::new(used, Area::DeviceEvent, at[2])?,
            size,
            event_idx,
            slots: (0..size)
                .map(|id| Slot { token: 0, seq: IDLE, room: 0, count: 0, next: id.wrapping_add(1) })
                .collect(),
            free_id: 0,
            free: size,
            next_avail: Place::START,
            next_used: Place::START,
            unpublished: None,
            added: 0,
            published: 0,
            taken: 0,
            fresh: 0,
            waiting: 0,
            notify: true,
            broken: None,
        };
        // No device looks yet: whatever starts it orders these stores before its first look.
        for at in 0..size {
            queue.ring.set_addr(at, 0);
            queue.ring.set_state(at, State::new(0, 0, 0), Ordering::Relaxed);
        }
        queue.driver.store(Wanted::ALL);
        queue.device.store(Wanted::ALL);
        Ok(queue)
    }

    /// Takes a free id.
    #[inline]
    fn enqueue(&mut self, count: u16, room: u32, token: u64) -> u16 {
        let id = self.free_id;
        let slot = &mut self.slots[usize::from(id)];
        self.free_id = slot.next;
        *slot = Slot { token, seq: self.added, room, count, next: 0 };
        self.added += 1;
        id
    }

    /// Writes the first descriptor of a chain, or keeps it for [`publish`](Ring::publish) if it is
    /// the first chain since.
    #[inline]
    fn put_first(&mut self, at: u16, state: State) {
        match self.unpublished {
            None => self.unpublished = Some((at, state)),
            // The device looks at one place after the other: it does not come here before the first
            // is published, whose Release this store precedes.
            Some(_) => self.ring.set_state(at, state, Ordering::Relaxed),
        }
    }

    /// The descriptors up to `place`, `count` of them, were written.
    #[inline]
    fn advance(&mut self, place: Place, count: u16) {
        self.next_avail = place;
        self.free -= count;
        self.waiting += count;
    }

    /// Takes back the chain that came back at `place`, as `state` says.
    #[inline]
    fn take(&mut self, place: Place, state: State) -> Result<(Used, u16), RingError> {
        let (index, id) = (place.at, state.id());
        let Some(slot) = self.slots.get_mut(usize::from(id)) else {
            return Err(RingError::UsedId { index, id: id.into(), size: self.size });
        };
        // One comparison for two rules: `IDLE` is no earlier than anything, and a chain that is
        // added but not published is not the device's to give back.
        if slot.seq >= self.published {
            return Err(RingError::UsedNotInFlight { index, id });
        }
        let (mut len, room) = (state.len(), slot.room);
        if len > room {
            if state.has(layout::DESC_F_WRITE) {
                return Err(RingError::UsedLength { index, id, len, room });
            }
            // Virtio 2.8.5: where the device wrote nothing the field means nothing.
            len = 0;
        }
        let Slot { token, count, .. } = *slot;
        (slot.seq, slot.next) = (IDLE, self.free_id);
        self.free_id = id;
        Ok((Used { token, len }, count))
    }

    #[cold]
    fn break_with(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }
}

/// The flag of a buffer that the device writes.
#[inline]
fn write_flag(desc: &Desc) -> u16 {
    if desc.write { layout::DESC_F_WRITE } else { 0 }
}

impl Ring for Packed {
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
        let count = descs.len() as u16;
        let id = self.enqueue(count, room, token);
        let (first, mut place) = (self.next_avail, self.next_avail);
        let mut held = State::new(0, 0, 0);
        for (position, desc) in (0..count).zip(descs) {
            let more = if position + 1 < count { layout::DESC_F_NEXT } else { 0 };
            let state = State::available(desc.len, id, write_flag(desc) | more, place.wrap);
            // The place is free: fewer than `size` descriptors lie between the next used one and it.
            self.ring.set_addr(place.at, desc.addr);
            // The device may be waiting at this place: the first descriptor is written when all
            // others are there, by the Release of `publish` or before it.
            match position {
                0 => held = state,
                _ => self.ring.set_state(place.at, state, Ordering::Relaxed),
            }
            place = place.forward(1, self.size);
        }
        self.put_first(first.at, held);
        self.advance(place, count);
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
            let entry = State::new(desc.len, 0, write_flag(desc)).to_bytes(desc.addr);
            table.write(position * layout::DESC_SIZE, &entry);
        }
        let id = self.enqueue(1, room, token);
        let Place { at, wrap } = self.next_avail;
        self.ring.set_addr(at, table_addr);
        let flags = layout::DESC_F_INDIRECT;
        self.put_first(at, State::available(bytes as u32, id, flags, wrap));
        self.advance(self.next_avail.forward(1, self.size), 1);
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
        // Copies: kept in the queue, they would be stored and loaded again for each buffer.
        let (size, free, mut place) = (self.size, self.free, self.next_avail);
        let mut added = 0;
        let mut buffers = buffers.into_iter();
        let mut refused = None;
        while added < free
            && let Some((desc, token)) = buffers.next()
        {
            if desc.wraps() {
                refused = Some(AddError::Wraps { at: added.into() });
                break;
            }
            let id = self.enqueue(1, if desc.write { desc.len } else { 0 }, token);
            // The place is free, as in `add`.
            self.ring.set_addr(place.at, desc.addr);
            let state = State::available(desc.len, id, write_flag(&desc), place.wrap);
            self.put_first(place.at, state);
            place = place.forward(1, size);
            added += 1;
        }
        self.advance(place, added);
        refused.map_or(Ok(added.into()), Err)
    }

    #[inline]
    fn publish(&mut self) {
        if let Some((at, state)) = self.unpublished.take() {
            // Release: whoever sees this descriptor (with Acquire) sees all that were added with
            // it, indirect tables, and the buffers' contents that were stored before.
            self.ring.set_state(at, state, Ordering::Release);
            self.published = self.added;
            self.fresh = self.fresh.saturating_add(core::mem::take(&mut self.waiting).into());
        }
    }

    #[inline]
    fn needs_kick(&mut self) -> bool {
        let fresh = core::mem::take(&mut self.fresh);
        if fresh == 0 {
            return false;
        }
        // The store of the descriptor, before, and the load of the event structure, after, must not
        // change places. The device does the reverse before it sleeps: it stores its event
        // structure, has a full fence, and loads the descriptor that it waits for (its
        // `enable_kicks`), which is the one that was published first, or an earlier one. Of two
        // such fences one comes first in their single order: if ours, the device sees the
        // descriptor and stays awake; if the device's, we see what it asks for and kick.
        fence(Ordering::SeqCst);
        // What is added and not published yet is not the device's: behind it we do not look.
        let now = self.next_avail.back(self.waiting, self.size);
        self.device.load().is_due(now, fresh, self.size, self.event_idx)
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<Used>, RingError> {
        let mut out = [Used::default()];
        Ok(match self.pop_burst(&mut out)? {
            0 => None,
            _ => Some(out[0]),
        })
    }

    #[inline]
    fn pop_burst(&mut self, out: &mut [Used]) -> Result<usize, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let (size, mut place) = (self.size, self.next_used);
        let (mut done, mut freed, mut error) = (0, 0, None);
        for slot in out {
            // Acquire pairs with the device's Release: what it wrote into the buffers, and what
            // else it gave back with this, is seen by the loads that follow.
            let state = self.ring.state(place.at, Ordering::Acquire);
            if !state.is_used(place.wrap) {
                break;
            }
            match self.take(place, state) {
                Ok((used, count)) => {
                    *slot = used;
                    place = place.forward(count, size);
                    freed += count;
                    done += 1;
                }
                Err(found) => {
                    error = Some(found);
                    break;
                }
            }
        }
        self.next_used = place;
        // Each chain comes back once: no more than were taken.
        self.free += freed;
        self.taken += done as u64;
        match error.map(|error| self.break_with(error)) {
            Some(error) if done == 0 => Err(error),
            // Those before it are given first: the next call says it again.
            _ => Ok(done),
        }
    }

    #[inline]
    fn suppress_notifications(&mut self) {
        // The line belongs to what the device reads: do not touch it without need.
        if core::mem::replace(&mut self.notify, false) {
            self.driver.store(Wanted::NONE);
        }
    }

    fn enable_notifications(&mut self) -> bool {
        self.notify = true;
        let Place { at, wrap } = self.next_used;
        self.driver.store(if self.event_idx { Wanted::at(self.next_used) } else { Wanted::ALL });
        // The mirror image of the device's `publish_used`, argued as in `needs_kick`: either we
        // see the descriptor that the device has published, or it sees what we have just asked for.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some() || self.ring.state(at, Ordering::Relaxed).is_used(wrap)
    }
}
