//! Stretches by their numbers, found fast where the last ones were.

use std::{cell::Cell, collections::HashMap};

use ringfence_sync::mix::Mix;

use super::stretch::Stretch;

/// How many stretches may be empty before empty ones are freed.
pub(super) const EMPTIES: usize = 64;

/// How many places are remembered, a power of two. A driver's buffers come from few slabs of addresses.
const RECENT: usize = 64;

/// The entry for no stretch: no address has this stretch number.
const NO_STRETCH: (u64, u32) = (u64::MAX, 0);

/// The stretches of a domain in which something is, or was not long ago, mapped.
pub(super) struct Stretches {
    /// Where in `all` each is. The numbers are those of the driver's own allocator.
    places: HashMap<u64, u32, Mix>,
    all: Vec<Stretch>,
    /// The places that were looked up last, by the low bits of the number: a comparison is most of
    /// what a look-up costs then.
    recent: Box<[Cell<(u64, u32)>; RECENT]>,
    /// How many stretches there are when empty ones are looked for next.
    sweep_at: usize,
}

impl Stretches {
    pub(super) fn new() -> Stretches {
        Stretches {
            places: HashMap::default(),
            all: Vec::new(),
            recent: Box::new([const { Cell::new(NO_STRETCH) }; RECENT]),
            sweep_at: EMPTIES,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    #[inline]
    fn place(&self, number: u64) -> Option<usize> {
        let (held, place) = self.recent[number as usize % RECENT].get();
        if held == number { Some(place as usize) } else { self.look_up(number) }
    }

    #[cold]
    fn look_up(&self, number: u64) -> Option<usize> {
        let place = *self.places.get(&number)?;
        self.recent[number as usize % RECENT].set((number, place));
        Some(place as usize)
    }

    #[inline]
    pub(super) fn get(&self, number: u64) -> Option<&Stretch> {
        Some(&self.all[self.place(number)?])
    }

    #[inline]
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Stretch> {
        let place = self.place(number)?;
        Some(&mut self.all[place])
    }

    /// The stretch of this number, made if there is none. An emptied one stays for the next mapping
    /// there; empty ones are freed when there are twice as many stretches as were in use the last
    /// time, so that a domain whose addresses wander does not keep a stretch for each address that
    /// it ever used.
    #[inline]
    pub(super) fn get_or_make(&mut self, number: u64) -> &mut Stretch {
        let place = match self.place(number) {
            Some(place) => place,
            None => self.make(number),
        };
        &mut self.all[place]
    }

    #[cold]
    fn make(&mut self, number: u64) -> usize {
        if self.len() >= self.sweep_at {
            self.sweep();
        }
        let place = self.len();
        self.all.push(Stretch::new());
        // A stretch takes a kilobyte: there is no memory for 2^32 of them.
        self.places.insert(number, place as u32);
        place
    }

    fn sweep(&mut self) {
        let mut held: Vec<_> = core::mem::take(&mut self.all).into_iter().map(Some).collect();
        let all = &mut self.all;
        self.places.retain(|_, place| {
            let stretch = held[*place as usize].take().filter(|stretch| !stretch.is_empty());
            *place = all.len() as u32;
            let kept = stretch.is_some();
            all.extend(stretch);
            kept
        });
        self.recent.iter().for_each(|recent| recent.set(NO_STRETCH));
        self.sweep_at = EMPTIES + 2 * self.len();
    }

    /// All of them by number, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Stretch)> {
        self.places.iter().map(|(&number, &place)| (number, &self.all[place as usize]))
    }

    /// Calls `f` with all of them, in no order.
    pub(super) fn for_each_mut(&mut self, mut f: impl FnMut(u64, &mut Stretch)) {
        for (&number, &place) in &self.places {
            f(number, &mut self.all[place as usize]);
        }
    }
}
