//! The device's end of a packed virtqueue (virtio 1.3, 2.8).

use core::sync::atomic::{Ordering, fence};

use ringfence_mem::{Access, Translate};

use super::{
    Burst, Config, Glimpse, PEEK_DESCS, Ring, Stored, flight::Flight, table::Table, window,
};
use crate::{
    Area, Chain, ChainFault, RingError, layout,
    packed::{DescRing, Event, Place, State, Wanted},
};

/// The three areas, where they lie now.
#[derive(Debug)]
struct Areas {
    ring: DescRing,
    driver: Event,
    device: Event,
}

impl Areas {
    fn translate(config: &Config, mem: &impl Translate) -> Result<Areas, RingError> {
        let Config { size, desc, avail, used, .. } = *config;
        let (bytes, event) = (layout::desc_bytes(size), layout::packed::EVENT_SIZE);
        let ring = window(mem, Area::Descriptors, desc, bytes, Access::ReadWrite)?;
        let driver = window(mem, Area::DriverEvent, avail, event, Access::Read)?;
        let device = window(mem, Area::DeviceEvent, used, event, Access::Write)?;
        Ok(Areas {
            ring: DescRing::new(ring, desc, size)?,
            driver: Event::new(driver, Area::DriverEvent, avail)?,
            device: Event::new(device, Area::DeviceEvent, used)?,
        })
    }
}

/// The device's end of a packed queue.
#[derive(Debug)]
pub struct Packed {
    /// None until they are found for the first time.
    areas: Option<Areas>,
    /// The addresses have changed since `areas` were found.
    moved: bool,
    config: Config,
    flight: Flight,
    table: Table,
    /// Where the next chain is taken from, and where the next one is given back.
    next_avail: Place,
    next_used: Place,
    /// How many descriptors lie between the two: those of all chains in flight.
    held: u16,
    /// Of these, how many belong to chains that were taken before the queue was made and whose ids
    /// were not named since.
    nameless: u16,
    /// The first descriptor that was given back since [`publish_used`](Ring::publish_used), which
    /// keeps those after it from the driver as long as it is not written.
    unpublished: Option<(u16, State)>,
    /// How many descriptors were given back since then.
    given: u64,
    /// Whether kicks are asked for.
    kicks: bool,
    broken: Option<RingError>,
}

impl Packed {
    /// As [`Queue::postponed`](super::Queue::postponed), for a packed ring.
    ///
    /// # Errors
    /// [`RingError::PackedSize`], [`RingError::PackedBase`].
    pub fn postponed(config: Config) -> Result<Packed, RingError> {
        let Config { size, base, .. } = config;
        if !layout::packed::is_size(size) {
            return Err(RingError::PackedSize { size });
        }
        let next_avail = Place::from_bits(base as u16);
        let next_used = match (base >> 16) as u16 {
            // Some front ends leave out the high half. Behind this place it says nothing: there,
            // chains in flight would be a whole ring or more.
            0 if next_avail.wrap => next_avail,
            bits => Place::from_bits(bits),
        };
        let held = match next_used.distance(next_avail, size) {
            Some(held) if next_avail.at < size && held <= size => held,
            _ => return Err(RingError::PackedBase { base, size }),
        };
        Ok(Packed {
            areas: None,
            moved: false,
            config,
            flight: Flight::new(size),
            table: Table::new(config.indirect),
            next_avail,
            next_used,
            held,
            nameless: held,
            unpublished: None,
            given: 0,
            kicks: true,
            broken: None,
        })
    }

    /// As [`Queue::new`](super::Queue::new), for a packed ring.
    ///
    /// # Errors
    /// As there.
    pub fn new(config: Config, mem: &impl Translate) -> Result<Packed, RingError> {
        let mut queue = Packed::postponed(config)?;
        queue.revalidate(mem)?;
        Ok(queue)
    }

    #[cold]
    fn refuse(&mut self, head: u16, fault: ChainFault) -> RingError {
        let error = RingError::Chain { index: self.next_avail.at, head, fault };
        // A translation that is missing now may be there later: the chain stays where it is.
        if !matches!(fault, ChainFault::IndirectUnreachable { .. }) {
            self.broken = Some(error);
        }
        error
    }

    /// The chain `id` of `count` descriptors is taken from the ring.
    #[inline]
    fn taken(&mut self, id: u16, count: u16) {
        self.flight.take(id, count);
        self.next_avail = self.next_avail.forward(count, self.config.size);
        self.held += count;
    }

    /// As [`Queue::take_stored`](super::Queue::take_stored).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn take_stored(
        &mut self,
        mem: &impl Translate,
        id: u16,
        stored: Stored<'_>,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        assert!(!self.flight.began(), "chains in flight are named before others are taken");
        let taken = self.flight.check(id).and_then(|()| self.walk_stored(mem, id, stored, chain));
        if let Err(fault) = taken {
            chain.clear();
            return Err(self.refuse(id, fault));
        }
        self.flight.resume(id, chain.count);
        let known = self.nameless.min(chain.count);
        self.nameless -= known;
        self.next_avail = self.next_avail.forward(chain.count - known, self.config.size);
        self.held += chain.count - known;
        Ok(())
    }

    fn walk_stored(
        &mut self,
        mem: &impl Translate,
        id: u16,
        stored: Stored<'_>,
        chain: &mut Chain,
    ) -> Result<(), ChainFault> {
        let room = self.config.size - self.held + self.nameless;
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
                walk_table(&mut self.table, mem, 0, (addr, len), chain)
            }
        }
    }
}

/// Copies the chain that begins at `from` with `first`, of at most `room` descriptors.
#[inline]
fn walk(
    ring: &DescRing,
    table: &mut Table,
    mem: &impl Translate,
    (from, first): (Place, State),
    room: u16,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    let (mut place, mut state) = (from, first);
    chain.count = 0;
    loop {
        chain.count += 1;
        let (at, more) = (place.at, state.has(layout::DESC_F_NEXT));
        if state.has(layout::DESC_F_INDIRECT) {
            // Virtio 2.8.19: not in a list of direct ones.
            if more || chain.count > 1 {
                return Err(ChainFault::IndirectNext { at });
            }
            chain.head = state.id();
            return walk_table(table, mem, at, (ring.addr(at), state.len()), chain);
        }
        chain.push(at, state.desc(ring.addr(at)))?;
        if !more {
            // The last one names the chain (virtio 2.8.6).
            chain.head = state.id();
            return Ok(());
        }
        if chain.count == room {
            return Err(ChainFault::TooMany { room });
        }
        place = place.forward(1, ring.size());
        // The driver has made the first one available last, which we have seen: all of the chain
        // is there.
        state = ring.state(place.at, Ordering::Relaxed);
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

impl Ring for Packed {
    fn config(&self) -> &Config {
        &self.config
    }

    #[inline]
    fn is_valid(&self) -> bool {
        let Some(Areas { ring, driver, device }) = &self.areas else { return false };
        !self.moved && ring.is_valid() && driver.is_valid() && device.is_valid()
    }

    fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let areas = Areas::translate(&self.config, mem)?;
        // Front ends that know nothing of packed rings and pass on what drivers negotiate (User-Mode
        // Linux) begin them as they begin split ones, at 0. Of a ring that was used before, that is
        // the beginning of every second lap.
        if self.areas.is_none() && self.next_avail() == 0 && areas.ring.is_new() {
            (self.next_avail, self.next_used) = (Place::START, Place::START);
        }
        self.areas = Some(areas);
        self.moved = false;
        Ok(())
    }

    fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        self.config = Config { desc, avail, used, ..self.config };
        self.moved = true;
        // What the new area says of kicks is not known.
        self.kicks = true;
    }

    fn broken(&self) -> Option<RingError> {
        self.broken
    }

    #[inline]
    fn pop(&mut self, mem: &impl Translate, chain: &mut Chain) -> Result<bool, RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        let (place, room) = (self.next_avail, self.config.size - self.held);
        let Some(areas) = self.areas.as_ref().filter(|_| room > 0) else { return Ok(false) };
        // Acquire pairs with the Release of the driver, whose last store to the chain this is: its
        // other descriptors and its buffers are seen by the loads that follow.
        let first = areas.ring.state(place.at, Ordering::Acquire);
        if !first.is_available(place.wrap) {
            return Ok(false);
        }
        let taken = walk(&areas.ring, &mut self.table, mem, (place, first), room, chain)
            .and_then(|()| self.flight.check(chain.head));
        if let Err(fault) = taken {
            let id = chain.head;
            chain.clear();
            return Err(self.refuse(id, fault));
        }
        self.taken(chain.head, chain.count);
        Ok(true)
    }

    #[inline]
    fn pop_burst(
        &mut self,
        mem: &impl Translate,
        most: usize,
        burst: &mut Burst,
    ) -> Result<usize, RingError> {
        burst.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        let Some(areas) = &self.areas else { return Ok(0) };
        // Copies: kept in the queue, they would be stored and loaded again for each chain.
        let (size, mut place) = (self.config.size, self.next_avail);
        let mut room = size - self.held;
        let mut fault = None;
        while burst.len() < most && room > 0 {
            // As in `pop`.
            let first = areas.ring.state(place.at, Ordering::Acquire);
            if !first.is_available(place.wrap) {
                break;
            }
            let mut id = first.id();
            let taken = if first.has(layout::DESC_F_NEXT | layout::DESC_F_INDIRECT) {
                burst.chain.clear();
                let chain = &mut burst.chain;
                let walked = walk(&areas.ring, &mut self.table, mem, (place, first), room, chain);
                id = chain.head;
                walked.and_then(|()| self.flight.check(id)).map(|()| {
                    burst.push_chain();
                    burst.chain.count
                })
            } else {
                let desc = first.desc(areas.ring.addr(place.at));
                self.flight.check(id).and_then(|()| burst.push(id, place.at, desc)).map(|()| 1)
            };
            match taken {
                Ok(count) => {
                    self.flight.take(id, count);
                    place = place.forward(count, size);
                    room -= count;
                }
                Err(found) => {
                    fault = Some((id, found));
                    break;
                }
            }
        }
        (self.next_avail, self.held) = (place, size - room);
        match fault.map(|(id, fault)| self.refuse(id, fault)) {
            Some(error) if burst.is_empty() => Err(error),
            // Those before it are given first: the next call meets it again.
            _ => Ok(burst.len()),
        }
    }

    fn peek_from(
        &mut self,
        mem: &impl Translate,
        skip: u16,
        ahead: u16,
        mut each: impl FnMut(Glimpse),
    ) -> u16 {
        let Some(areas) = &self.areas else { return 0 };
        let (mut place, mut chains) = (self.next_avail, 0);
        let size = self.config.size;
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
                for entry in self.table.glimpse(mem, (addr, state.len()), &mut entries) {
                    let (addr, state) = State::from_bytes(entry);
                    each(Glimpse::Buffer(state.desc(addr)));
                }
            } else {
                each(Glimpse::Buffer(state.desc(addr)));
            }
            chains += u16::from(!state.has(layout::DESC_F_NEXT));
            place = place.forward(1, size);
        }
        // No more will ever be seen.
        ahead.max(skip)
    }

    fn untake(&mut self, head: u16) -> bool {
        let Some(count) = self.flight.untake(head) else { return false };
        // What is given back is written over the chains before this one only: as many descriptors
        // as they had, from where the first of them began. So it is found there again; if the
        // driver changed it, that is checked again.
        self.next_avail = self.next_avail.back(count, self.config.size);
        self.held -= count;
        true
    }

    #[inline]
    fn push_used(&mut self, head: u16, len: u32) {
        self.push_used_burst([(head, len)]);
    }

    #[inline]
    fn push_used_burst(&mut self, used: impl IntoIterator<Item = (u16, u32)>) {
        let (size, mut place) = (self.config.size, self.next_used);
        let mut given = 0;
        for (head, len) in used {
            let count = self.flight.give_back(head);
            let Some(areas) = &self.areas else { unreachable!("a chain was taken from it") };
            // The place is free: it is that of a chain that was taken, and so copied.
            let state = State::used(len, head, place.wrap);
            match self.unpublished {
                None => self.unpublished = Some((place.at, state)),
                // The driver looks at one place after the other: it does not come here before the
                // first is published, whose Release this store precedes.
                Some(_) => areas.ring.set_state(place.at, state, Ordering::Relaxed),
            }
            place = place.forward(count, size);
            given += u64::from(count);
        }
        self.next_used = place;
        // They are among those held.
        self.held -= given as u16;
        self.given += given;
    }

    #[inline]
    fn publish_used(&mut self) -> bool {
        let Some(areas) = &self.areas else { return false };
        let Some((at, state)) = self.unpublished.take() else { return false };
        // Release: a driver that sees this (with Acquire) sees what was given back with it and what
        // was written to all those buffers, and we read none of them later.
        areas.ring.set_state(at, state, Ordering::Release);
        let given = core::mem::take(&mut self.given);
        // That store and the load of what the driver asked for must not change places: as on a
        // split ring, with the first descriptor in the place of the index.
        fence(Ordering::SeqCst);
        let Config { size, event_idx, .. } = self.config;
        areas.driver.load().is_due(self.next_used, given, size, event_idx)
    }

    #[inline]
    fn suppress_kicks(&mut self) {
        let Some(areas) = &self.areas else { return };
        // The line belongs to what the driver reads: do not touch it without need.
        if core::mem::replace(&mut self.kicks, false) {
            areas.device.store(Wanted::NONE);
        }
    }

    fn enable_kicks(&mut self) -> bool {
        let Some(areas) = &self.areas else { return false };
        self.kicks = true;
        let next = self.next_avail;
        areas.device.store(if self.config.event_idx { Wanted::at(next) } else { Wanted::ALL });
        // Either we see the descriptor that the driver has published, or it sees what we have just
        // asked for: argued in the driver's `needs_kick`.
        fence(Ordering::SeqCst);
        // A broken queue has something to say as well.
        self.broken.is_some()
            || self.held < self.config.size
                && areas.ring.state(next.at, Ordering::Relaxed).is_available(next.wrap)
    }

    fn next_avail(&self) -> u32 {
        u32::from(self.next_avail.bits()) | u32::from(self.next_used.bits()) << 16
    }

    fn in_flight(&self) -> u16 {
        self.flight.chains()
    }
}
