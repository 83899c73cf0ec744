//! The device's end of a packed virtqueue (virtio 1.3, 2.8).

use ringfence_mem::Translate;
use ringfence_sync::atomic::{Ordering, fence};

use super::{
    Glimpse, PEEK_DESCS, RingConfig, Stored, Written,
    end::{End, Format},
    flight::Flight,
    table::Table,
    window,
    written::{PACKED, entries},
};
use crate::{
    Area, Chain, ChainFault, Desc, RingError, layout,
    packed::{DescRing, Event, EventWord, RingPos, State},
};

/// The three areas, at their current addresses.
#[derive(Debug)]
pub(super) struct Areas {
    ring: DescRing,
    driver: Event,
    device: Event,
}

/// The device's position in a packed ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// Where the next available chain begins, and where the next used descriptor is written.
    next_avail: RingPos,
    next_used: RingPos,
    /// How many descriptors lie between the two: those of all chains in flight.
    held: u16,
    /// The first descriptor that was given back since [`publish`](Format::publish): as long as it
    /// is not written, the driver does not see those after it.
    unpublished: Option<(u16, State)>,
    /// How many descriptors were given back since then.
    given: u64,
    /// How many descriptors were published since the last [`written`](Format::written).
    unlogged: u64,
}

/// The device's end of a packed queue.
pub(super) type Packed = End<Position>;

impl Packed {
    /// As [`Queue::take_stored`](super::Queue::take_stored).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub(super) fn take_stored(
        &mut self,
        mem: &impl Translate,
        id: u16,
        stored: Stored<'_>,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        self.resume(id, chain, |_, table, room, chain| {
            chain.head = id;
            match stored {
                Stored::Buffers(descs) => {
                    if descs.is_empty() || descs.len() > usize::from(room) {
                        return Err(ChainFault::TooMany { room });
                    }
                    chain.count = descs.len() as u16;
                    (0..).zip(descs).try_for_each(|(at, &desc)| chain.push(at, desc))
                }
                Stored::Table { addr, len } => {
                    if room == 0 {
                        return Err(ChainFault::TooMany { room });
                    }
                    chain.count = 1;
                    walk_table(table, mem, 0, (addr, len), chain)
                }
            }
        })
    }
}

impl Format for Position {
    type Areas = Areas;
    /// Its address and its state.
    type First = (u64, State);

    fn new(config: &RingConfig) -> Result<Position, RingError> {
        let RingConfig { size, base, .. } = *config;
        if !layout::packed::is_size(size) {
            return Err(RingError::PackedSize { size });
        }
        let invalid = RingError::PackedBase { base, size };
        let next_avail = RingPos::in_ring(base as u16, size).ok_or(invalid)?;
        let next_used = match (base >> 16) as u16 {
            // Some front ends send the available position only. While its wrap counter is 1, a used
            // position of 0 can mean nothing else: a whole ring or more would be in flight.
            0 if next_avail.wrap => next_avail,
            bits => RingPos::in_ring(bits, size).ok_or(invalid)?,
        };
        match next_used.distance(next_avail, size) {
            Some(held) if held <= size => Ok(Position {
                next_avail,
                next_used,
                held,
                unpublished: None,
                given: 0,
                unlogged: 0,
            }),
            _ => Err(invalid),
        }
    }

    fn translate(config: &RingConfig, mem: &impl Translate) -> Result<Areas, RingError> {
        let [desc, avail, used] = config.areas();
        let ring = window(mem, Area::Descriptors, desc)?;
        let driver = window(mem, Area::DriverEvent, avail)?;
        let device = window(mem, Area::DeviceEvent, used)?;
        Ok(Areas {
            ring: DescRing::new(ring, desc.0, config.size)?,
            driver: Event::new(driver, Area::DriverEvent, avail.0)?,
            device: Event::new(device, Area::DeviceEvent, used.0)?,
        })
    }

    #[inline]
    fn is_valid(areas: &Areas) -> bool {
        areas.ring.is_valid() && areas.driver.is_valid() && areas.device.is_valid()
    }

    #[inline]
    fn begin(&mut self, areas: &Areas, _: &RingConfig, _: bool) -> Result<(), RingError> {
        // A front end that does not know packed rings but passes on the driver's features
        // (User-Mode Linux) starts them at 0, as it starts split rings. In a ring that was used
        // before, 0 is a valid position: the beginning of every second lap.
        if Format::next_avail(self) == 0 && areas.ring.is_new() {
            (self.next_avail, self.next_used) = (RingPos::START, RingPos::START);
        }
        Ok(())
    }

    #[inline]
    fn look(&mut self, _: &Areas, _: u16, _: usize) -> Result<(), RingError> {
        // Each descriptor's flags show whether it is available.
        Ok(())
    }

    #[inline]
    fn next(&self, areas: &Areas, size: u16) -> Option<(u64, State)> {
        let RingPos { at, wrap } = self.next_avail;
        if self.held >= size {
            return None;
        }
        // Acquire pairs with the Release of the driver, whose last store to the chain this is: the
        // loads that follow see its other descriptors and its buffers.
        let state = areas.ring.state(at, Ordering::Acquire);
        state.is_available(wrap).then(|| (areas.ring.addr(at), state))
    }

    #[inline]
    fn single(&self, (addr, state): (u64, State)) -> Option<(u16, u16, Desc)> {
        let single = !state.has(layout::DESC_F_NEXT | layout::DESC_F_INDIRECT);
        single.then(|| (state.id(), self.next_avail.at, state.desc(addr)))
    }

    #[inline]
    fn walk(
        &self,
        areas: &Areas,
        first: (u64, State),
        room: u16,
        (flight, table, mem): (&Flight, &mut Table, &impl Translate),
        chain: &mut Chain,
    ) -> Result<(), ChainFault> {
        walk(&areas.ring, table, mem, (self.next_avail, first), room, chain)?;
        flight.check(chain.head)
    }

    #[inline]
    fn places(count: u16) -> u16 {
        count
    }

    #[inline]
    fn forward(&mut self, places: u16, size: u16) {
        self.next_avail = self.next_avail.forward(places, size);
        self.held += places;
    }

    fn skip(&mut self, places: u16, size: u16) {
        self.forward(places, size);
    }

    fn back(&mut self, places: u16, size: u16) {
        self.next_avail = self.next_avail.back(places, size);
        self.held -= places;
    }

    #[inline]
    fn held(&self) -> u16 {
        self.held
    }

    fn in_flight(&self, flight: &Flight) -> u16 {
        flight.chains
    }

    #[inline]
    fn put(&mut self, areas: &Areas, (id, len): (u16, u32), places: u16, size: u16) {
        let RingPos { at, wrap } = self.next_used;
        // The place is free: it belongs to a chain that was taken, and so copied.
        let state = State::used(len, id, wrap);
        match self.unpublished {
            None => self.unpublished = Some((at, state)),
            // The driver reads used descriptors in order: it does not reach this one before it has
            // seen the first, which `publish` stores later, with Release.
            Some(_) => areas.ring.set_state(at, state, Ordering::Relaxed),
        }
        self.next_used = self.next_used.forward(places, size);
        self.held -= places;
        self.given += u64::from(places);
    }

    #[inline]
    fn publish(&mut self, areas: &Areas, config: &RingConfig) -> bool {
        let Some((at, state)) = self.unpublished.take() else { return false };
        // Release: a driver that sees this (with Acquire) sees all that was given back with it and
        // all that was written to those buffers, and the device's reads of them are over.
        areas.ring.set_state(at, state, Ordering::Release);
        let given = core::mem::take(&mut self.given);
        self.unlogged += given;
        // That store and the load of the driver's event structure must not be reordered: as on a
        // split ring, with the first descriptor in the place of the index.
        fence(Ordering::SeqCst);
        areas.driver.load().is_due(self.next_used, given, config.size, config.event_idx)
    }

    #[inline]
    fn suppress(&self, areas: &Areas) {
        areas.device.store(EventWord::NONE);
    }

    fn enable(&self, areas: &Areas, config: &RingConfig) {
        areas.device.store(match config.event_idx {
            true => EventWord::at(self.next_avail),
            false => EventWord::ALL,
        });
    }

    #[inline]
    fn ready(&self, areas: &Areas, most: u16, size: u16) -> u16 {
        let most = most.min(size - self.held);
        let is_ready = |count: u16| {
            let RingPos { at, wrap } = self.next_avail.forward(count - 1, size);
            // No descriptor is read on its word.
            areas.ring.state(at, Ordering::Relaxed).is_available(wrap)
        };
        // Where one is those before it are, or will be: a driver writes the first of a batch last.
        let mut ready = 0;
        for bits in 0..u16::BITS {
            match 1 << bits {
                count if count <= most && is_ready(count) => ready = count,
                _ => break,
            }
        }
        ready
    }

    fn peek(
        &self,
        areas: &Areas,
        (skip, ahead): (u16, u16),
        (config, table, mem): (&RingConfig, &mut Table, &impl Translate),
        mut each: impl FnMut(Glimpse),
    ) -> u16 {
        let (mut place, mut chains) = (self.next_avail, 0);
        let size = config.size;
        let mut entries = PEEK_DESCS;
        for _ in 0..PEEK_DESCS.min(usize::from(size - self.held)) {
            if chains == ahead {
                return chains;
            }
            let state = areas.ring.state(place.at, Ordering::Acquire);
            if !state.is_available(place.wrap) {
                return chains.max(skip);
            }
            let addr = areas.ring.addr(place.at);
            if chains < skip {
                // Seen before.
            } else if state.has(layout::DESC_F_INDIRECT) {
                each(Glimpse::Table { addr, len: state.len() });
                for entry in table.glimpse(mem, (addr, state.len()), &mut entries) {
                    let (addr, state) = State::from_bytes(entry);
                    each(Glimpse::Buffer(state.desc(addr)));
                }
            } else {
                each(Glimpse::Buffer(state.desc(addr)));
            }
            chains += u16::from(!state.has(layout::DESC_F_NEXT));
            place = place.forward(1, size);
        }
        // The end of the ring or the limit is reached: a later look from here would see no more, so
        // all that was asked for counts as seen.
        ahead.max(skip)
    }

    fn written<'w>(
        &mut self,
        areas: &'w Areas,
        config: &RingConfig,
        mut each: impl FnMut(Written<'w>),
    ) {
        let size = config.size;
        let count = core::mem::take(&mut self.unlogged).min(size.into()) as u16;
        let first = self.next_used.back(count, size).at;
        for (offset, len) in entries(PACKED, first, count, size) {
            each(Written::new(Area::Descriptors, areas.ring.window(), offset, len));
        }
    }

    #[inline]
    fn wanted<'w>(areas: &'w Areas, _: &RingConfig) -> Written<'w> {
        let (window, len) = (areas.device.window(), layout::packed::EVENT_SIZE);
        Written::new(Area::DeviceEvent, window, 0, len)
    }

    fn index(&self) -> u16 {
        self.next_avail.at
    }

    fn next_avail(&self) -> u32 {
        u32::from(self.next_avail.bits()) | u32::from(self.next_used.bits()) << 16
    }
}

/// Copies the chain that begins at `from` with `first`, of at most `room` descriptors.
#[inline]
fn walk(
    ring: &DescRing,
    table: &mut Table,
    mem: &impl Translate,
    (from, (addr, first)): (RingPos, (u64, State)),
    room: u16,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    let (mut place, mut addr, mut state) = (from, addr, first);
    chain.count = 0;
    loop {
        chain.count += 1;
        let (at, more) = (place.at, state.has(layout::DESC_F_NEXT));
        if state.has(layout::DESC_F_INDIRECT) {
            // Virtio 2.8.19: an indirect descriptor must be the only one of its chain.
            if more || chain.count > 1 {
                return Err(ChainFault::IndirectNext { at });
            }
            chain.head = state.id();
            return walk_table(table, mem, at, (addr, state.len()), chain);
        }
        chain.push(at, state.desc(addr))?;
        if !more {
            // The last descriptor holds the chain's id (virtio 2.8.6).
            chain.head = state.id();
            return Ok(());
        }
        if chain.count == room {
            return Err(ChainFault::TooMany { room });
        }
        place = place.forward(1, ring.size());
        // The driver makes the first descriptor of a chain available last. It is available, so all
        // the others are written.
        state = ring.state(place.at, Ordering::Relaxed);
        addr = ring.addr(place.at);
    }
}

/// Copies the indirect table that descriptor `at` refers to: each entry of it is a buffer (virtio
/// 2.8.7).
fn walk_table(
    table: &mut Table,
    mem: &impl Translate,
    at: u16,
    place: (u64, u32),
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    if table.is_absent() {
        return Err(ChainFault::NotNegotiated { at });
    }
    chain.table = Some(place);
    for (at, entry) in (0..).zip(table.load(mem, at, place)?) {
        let (addr, state) = State::from_bytes(entry);
        if state.has(layout::DESC_F_INDIRECT) {
            return Err(ChainFault::Nested { at });
        }
        chain.push(at, state.desc(addr))?;
    }
    Ok(())
}
