//! What the device's ends of both formats share: the chains that are taken and given back, and the
//! lookup of the areas.

use core::fmt;

use ringfence_mem::Translate;
use ringfence_sync::atomic::{Ordering, fence};

use super::{Burst, Glimpse, RingConfig, Written, flight::Flight, table::Table};
use crate::{Chain, ChainFault, Desc, RingError};

/// The parts specific to a format: its areas, and the device's position in them. The position is
/// copied out for a burst and back after it: kept in the queue, it would be stored and loaded again
/// for each chain.
///
/// Chains occupy places of the ring: in a split one each takes one, in a packed one as many as it
/// has descriptors.
pub(super) trait Format: Copy + fmt::Debug {
    /// The three areas, at their current addresses.
    type Areas: fmt::Debug;
    /// The first descriptor of a chain, our copy of it.
    type First: Copy;

    /// The initial position of a queue.
    ///
    /// # Errors
    /// The size or the base is invalid.
    fn new(config: &RingConfig) -> Result<Self, RingError>;

    /// Finds the areas.
    ///
    /// # Errors
    /// They cannot be reached, or are not aligned.
    fn translate(config: &RingConfig, mem: &impl Translate) -> Result<Self::Areas, RingError>;

    /// Whether the translations of all areas are still valid.
    fn is_valid(areas: &Self::Areas) -> bool;

    /// Called when the areas are first found; `at_used`: start at their used index, not at the
    /// base.
    ///
    /// # Errors
    /// The base does not match the areas.
    fn begin(
        &mut self,
        areas: &Self::Areas,
        config: &RingConfig,
        at_used: bool,
    ) -> Result<(), RingError>;

    /// Looks for new chains, if fewer than `most` are known.
    ///
    /// # Errors
    /// More chains are announced than there can be.
    fn look(&mut self, areas: &Self::Areas, size: u16, most: usize) -> Result<(), RingError>;

    /// The next chain that is known to be available.
    fn next(&self, areas: &Self::Areas, size: u16) -> Option<Self::First>;

    /// Its head or id, the number of its descriptor, and its buffer, if it has no more descriptors.
    fn single(&self, first: Self::First) -> Option<(u16, u16, Desc)>;

    /// Copies the chain that begins with `first`; its head or id is checked.
    ///
    /// # Errors
    /// What is wrong with it; its head or id is in `chain` all the same.
    fn walk(
        &self,
        areas: &Self::Areas,
        first: Self::First,
        room: u16,
        with: (&Flight, &mut Table, &impl Translate),
        chain: &mut Chain,
    ) -> Result<(), ChainFault>;

    /// How many places a chain of `count` descriptors takes.
    fn places(count: u16) -> u16;

    /// Advances past a chain of so many places that was taken.
    fn forward(&mut self, places: u16, size: u16);

    /// As [`forward`](Self::forward), for a chain that is not read from the ring.
    fn skip(&mut self, places: u16, size: u16);

    /// Moves back over a chain that is put back.
    fn back(&mut self, places: u16, size: u16);

    /// How many places are between the next chain to be taken and the next to be given back.
    fn held(&self) -> u16;

    /// How many chains are in flight, some of which `flight` has.
    fn in_flight(&self, flight: &Flight) -> u16;

    /// Gives a chain back, not yet visible.
    fn put(&mut self, areas: &Self::Areas, used: (u16, u32), places: u16, size: u16);

    /// `count` chains will be given back before long: a hint to the processor.
    fn soon(&self, areas: &Self::Areas, count: usize) {
        let _ = (areas, count);
    }

    /// As [`soon`](Self::soon), before a chain is given back that others follow, most often.
    fn soon_next(&self, areas: &Self::Areas) {
        let _ = areas;
    }

    /// Makes chains that were given back visible; true if the driver wants an interrupt.
    fn publish(&mut self, areas: &Self::Areas, config: &RingConfig) -> bool;

    /// Disables kicks.
    fn suppress(&self, areas: &Self::Areas);

    /// Enables a kick with the next chain.
    fn enable(&self, areas: &Self::Areas, config: &RingConfig);

    /// As [`Queue::ready`](super::Queue::ready).
    fn ready(&self, areas: &Self::Areas, most: u16, size: u16) -> u16;

    /// As [`Queue::peek_from`](super::Queue::peek_from), for the chains from `skip` to `ahead`.
    fn peek(
        &self,
        areas: &Self::Areas,
        chains: (u16, u16),
        with: (&RingConfig, &mut Table, &impl Translate),
        each: impl FnMut(Glimpse),
    ) -> u16;

    /// As [`Queue::written`](super::Queue::written), for what was published.
    fn written<'w>(
        &mut self,
        areas: &'w Self::Areas,
        config: &RingConfig,
        each: impl FnMut(Written<'w>),
    );

    /// The field that enables kicks.
    fn wanted<'w>(areas: &'w Self::Areas, config: &RingConfig) -> Written<'w>;

    /// The number of the next chain's place, for errors.
    fn index(&self) -> u16;

    /// As [`Queue::next_avail`](super::Queue::next_avail).
    fn next_avail(&self) -> u32;
}

/// The device's end of a queue of format `F`.
#[derive(Debug)]
pub(super) struct End<F: Format> {
    /// `None` until they are found for the first time.
    areas: Option<F::Areas>,
    /// The addresses have changed since `areas` were found.
    moved: bool,
    config: RingConfig,
    flight: Flight,
    table: Table,
    at: F,
    /// How many places belong to chains that were taken before the queue was made and were not
    /// resumed since.
    nameless: u16,
    /// Whether kicks are enabled.
    kicks: bool,
    /// Whether that was written since the last [`written`](super::Queue::written).
    kicks_written: bool,
    broken: Option<RingError>,
    /// It continues at the used index, once that can be read.
    pub(super) at_used: bool,
}

impl<F: Format> End<F> {
    /// As [`Queue::postponed`](super::Queue::postponed), for this format.
    ///
    /// # Errors
    /// As there.
    pub(super) fn postponed(config: RingConfig) -> Result<End<F>, RingError> {
        let at = F::new(&config)?;
        Ok(End {
            areas: None,
            moved: false,
            config,
            flight: Flight::new(config.size),
            table: Table::new(config.indirect),
            at,
            nameless: at.held(),
            kicks: true,
            kicks_written: false,
            broken: None,
            at_used: false,
        })
    }

    /// As [`Queue::is_lost`](super::Queue::is_lost).
    pub(super) fn is_lost(&self) -> bool {
        self.at_used && self.areas.is_none()
    }

    #[cold]
    fn refuse(&mut self, name: u16, fault: ChainFault) -> RingError {
        let error = RingError::Chain { index: self.at.index(), head: name, fault };
        // A missing translation may come later: the chain stays where it is.
        if !matches!(fault, ChainFault::IndirectUnreachable { .. }) {
            self.broken = Some(error);
        }
        error
    }

    /// Takes the chain `name`, which an earlier device took and did not give back. `walk` copies
    /// it, given the room for it.
    ///
    /// # Errors
    /// What broke the queue, or what is wrong with the chain.
    ///
    /// # Panics
    /// Chains were taken from the ring already.
    pub(super) fn resume(
        &mut self,
        name: u16,
        chain: &mut Chain,
        walk: impl FnOnce(Option<&F::Areas>, &mut Table, u16, &mut Chain) -> Result<(), ChainFault>,
    ) -> Result<(), RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        assert!(!self.flight.began(), "chains in flight are named before others are taken");
        let size = self.config.size;
        let room = size - self.at.held() + self.nameless;
        let taken = self
            .flight
            .check(name)
            .and_then(|()| walk(self.areas.as_ref(), &mut self.table, room, chain));
        if let Err(fault) = taken {
            chain.clear();
            return Err(self.refuse(name, fault));
        }
        let places = F::places(chain.count);
        self.flight.resume(name, places);
        let known = self.nameless.min(places);
        self.nameless -= known;
        self.at.skip(places - known, size);
        Ok(())
    }

    /// Looks for new chains, if fewer than `most` are known.
    #[inline]
    fn look(&mut self, most: usize) -> Result<(), RingError> {
        let Some(areas) = &self.areas else { return Ok(()) };
        let looked = self.at.look(areas, self.config.size, most);
        looked.inspect_err(|&error| self.broken = Some(error))
    }
}

impl<F: Format> End<F> {
    pub(super) fn config(&self) -> &RingConfig {
        &self.config
    }

    #[inline]
    pub(super) fn is_valid(&self) -> bool {
        !self.moved && self.areas.as_ref().is_some_and(F::is_valid)
    }

    pub(super) fn revalidate(&mut self, mem: &impl Translate) -> Result<(), RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let areas = F::translate(&self.config, mem)?;
        if self.areas.is_none() {
            let before = self.at.held();
            if let Err(error) = self.at.begin(&areas, &self.config, self.at_used) {
                self.broken = Some(error);
                return Err(error);
            }
            self.nameless += self.at.held() - before;
        }
        self.areas = Some(areas);
        self.moved = false;
        Ok(())
    }

    pub(super) fn relocate(&mut self, desc: u64, avail: u64, used: u64) {
        self.config = RingConfig { desc, avail, used, ..self.config };
        self.moved = true;
        // The kick field in the new area is unknown.
        self.kicks = true;
    }

    pub(super) fn broken(&self) -> Option<RingError> {
        self.broken
    }

    #[inline]
    pub(super) fn pop(
        &mut self,
        mem: &impl Translate,
        chain: &mut Chain,
    ) -> Result<bool, RingError> {
        chain.clear();
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.look(1)?;
        let (Some(areas), size) = (&self.areas, self.config.size) else { return Ok(false) };
        let Some(first) = self.at.next(areas, size) else { return Ok(false) };
        let copied = match self.at.single(first) {
            Some((name, number, desc)) => {
                (chain.head, chain.count) = (name, 1);
                self.flight.check(name).and_then(|()| chain.push_only(number, desc))
            }
            None => {
                let with = (&self.flight, &mut self.table, mem);
                self.at.walk(areas, first, size - self.at.held(), with, chain)
            }
        };
        if let Err(fault) = copied {
            let name = chain.head;
            chain.clear();
            return Err(self.refuse(name, fault));
        }
        let places = F::places(chain.count);
        self.flight.take(chain.head, places);
        self.at.forward(places, size);
        Ok(true)
    }

    #[inline]
    pub(super) fn pop_more(
        &mut self,
        mem: &impl Translate,
        most: usize,
        burst: &mut Burst,
    ) -> Result<usize, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        self.look(most)?;
        let Some(areas) = &self.areas else { return Ok(0) };
        let (size, mut at) = (self.config.size, self.at);
        let (mut count, mut fault) = (0, None);
        while count < most
            && let Some(first) = at.next(areas, size)
        {
            let (name, taken) = if let Some((name, number, desc)) = at.single(first) {
                let taken = self.flight.check(name).and_then(|()| burst.push(name, number, desc));
                (name, taken.map(|()| 1))
            } else {
                burst.chain.clear();
                let with = (&self.flight, &mut self.table, mem);
                let room = size - at.held();
                let taken = at.walk(areas, first, room, with, &mut burst.chain).map(|()| {
                    burst.push_chain();
                    F::places(burst.chain.count)
                });
                (burst.chain.head, taken)
            };
            match taken {
                Ok(places) => {
                    self.flight.take(name, places);
                    at.forward(places, size);
                    count += 1;
                }
                Err(found) => {
                    fault = Some((name, found));
                    break;
                }
            }
        }
        self.at = at;
        at.soon(areas, count);
        match fault.map(|(name, fault)| self.refuse(name, fault)) {
            Some(error) if count == 0 => Err(error),
            // Those before it are returned first: the next call meets it again.
            _ => Ok(count),
        }
    }

    pub(super) fn ready(&self, most: u16) -> u16 {
        let size = self.config.size;
        self.areas.as_ref().map_or(0, |areas| self.at.ready(areas, most.min(size), size))
    }

    pub(super) fn peek_from(
        &mut self,
        mem: &impl Translate,
        skip: u16,
        ahead: u16,
        each: impl FnMut(Glimpse),
    ) -> u16 {
        let Some(areas) = &self.areas else { return 0 };
        self.at.peek(areas, (skip, ahead), (&self.config, &mut self.table, mem), each)
    }

    pub(super) fn untake(&mut self, head: u16) -> bool {
        let places = self.flight.untake(head);
        if let Some(places) = places {
            // Neither end has overwritten its descriptors, or the entry that points to them: the
            // driver may not before it is given back, and we give back only into the places of the
            // chains before this one. So it is found there again; if the driver changed it, it is
            // checked again.
            self.at.back(places, self.config.size);
        }
        places.is_some()
    }

    #[inline]
    pub(super) fn push_used(&mut self, head: u16, len: u32) {
        let places = self.flight.give_back(head);
        let Some(areas) = &self.areas else { unreachable!("a chain was taken from it") };
        self.at.soon_next(areas);
        self.at.put(areas, (head, len), places, self.config.size);
    }

    #[inline]
    pub(super) fn push_used_burst(&mut self, used: impl IntoIterator<Item = (u16, u32)>) {
        let (size, mut at) = (self.config.size, self.at);
        for used in used {
            let places = self.flight.give_back(used.0);
            let Some(areas) = &self.areas else { unreachable!("a chain was taken from it") };
            at.put(areas, used, places, size);
        }
        self.at = at;
    }

    #[inline]
    pub(super) fn publish_used(&mut self) -> bool {
        self.areas.as_ref().is_some_and(|areas| self.at.publish(areas, &self.config))
    }

    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        // The driver reads this cache line: do not touch it without need.
        if let Some(areas) = &self.areas
            && core::mem::replace(&mut self.kicks, false)
        {
            self.kicks_written = true;
            self.at.suppress(areas);
        }
    }

    pub(super) fn enable_kicks(&mut self) -> bool {
        let Some(areas) = &self.areas else { return false };
        (self.kicks, self.kicks_written) = (true, true);
        self.at.enable(areas, &self.config);
        // Either we see what the driver has published, or it sees that kicks are enabled: argued in
        // the driver's `needs_kick`.
        fence(Ordering::SeqCst);
        // A broken queue must be reported as well.
        self.broken.is_some()
            || self.look(1).is_err()
            || self
                .areas
                .as_ref()
                .is_some_and(|areas| self.at.next(areas, self.config.size).is_some())
    }

    pub(super) fn next_avail(&self) -> u32 {
        self.at.next_avail()
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.at.in_flight(&self.flight)
    }

    pub(super) fn written(&mut self, mut each: impl FnMut(Written<'_>)) {
        let Some(areas) = &self.areas else { return };
        self.at.written(areas, &self.config, &mut each);
        if core::mem::take(&mut self.kicks_written) {
            each(F::wanted(areas, &self.config));
        }
    }
}
