//! A packed ring as fields in memory (virtio 1.3, 2.8), and the places in it.
//!
//! A descriptor's state, with its length, id and flags, is one aligned 64-bit word: one load reads
//! all of them, and one store changes all of them. So no field of it is read twice, and none is
//! seen without the others.
//!
//! As for a split ring, the caller is responsible for the *order* of accesses, and explains it.

use ringfence_mem::Window;
use ringfence_sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{
    Area, Desc, RingError,
    layout::{self, packed},
    ring::Place,
};

/// A place in a packed ring: the descriptor, and the wrap counter of the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPos {
    /// Below the queue's size.
    pub at: u16,
    /// True in the first lap, false in the second, and so on.
    pub wrap: bool,
}

impl RingPos {
    /// Where both ends begin.
    pub(crate) const START: RingPos = RingPos { at: 0, wrap: true };

    /// `steps` descriptors further, at most the ring's length.
    #[inline]
    pub fn forward(self, steps: u16, size: u16) -> RingPos {
        // Both are at most 2^15, and the place is less: no overflow.
        let at = self.at + steps;
        if at < size { RingPos { at, ..self } } else { RingPos { at: at - size, wrap: !self.wrap } }
    }

    /// `steps` descriptors back, at most the ring's length.
    #[inline]
    pub fn back(self, steps: u16, size: u16) -> RingPos {
        match self.at.checked_sub(steps) {
            Some(at) => RingPos { at, ..self },
            None => RingPos { at: self.at + size - steps, wrap: !self.wrap },
        }
    }

    /// The distance from `self` on to `later`, if that is at most the ring's length. `self` may be
    /// written by the peer, and lie outside the ring.
    #[inline]
    pub(crate) fn distance(self, later: RingPos, size: u16) -> Option<u16> {
        match self.wrap == later.wrap {
            true => later.at.checked_sub(self.at),
            // At most `size`, or `later` has passed this place more than once.
            false if later.at <= self.at => Some(later.at + size.checked_sub(self.at)?),
            false => None,
        }
    }

    /// As in event structures and vhost-user: the wrap counter in bit 15.
    #[inline]
    pub fn bits(self) -> u16 {
        self.at | u16::from(self.wrap) << 15
    }

    /// From an event structure, which the peer writes: it may lie outside the ring.
    #[inline]
    pub fn from_bits(bits: u16) -> RingPos {
        RingPos { at: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// The place `bits` in a ring of `size`; `None` if it has no such descriptor.
    pub(crate) fn in_ring(bits: u16, size: u16) -> Option<RingPos> {
        Some(RingPos::from_bits(bits)).filter(|place| place.at < size)
    }
}

/// Length, id and flags of a descriptor: its second word, in our byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    #[inline]
    pub(crate) fn new(len: u32, id: u16, flags: u16) -> State {
        State(u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48)
    }

    /// Of a buffer that is made available in the lap of `wrap`; `flags` are the others, besides
    /// AVAIL and USED.
    #[inline]
    pub(crate) fn available(len: u32, id: u16, flags: u16, wrap: bool) -> State {
        let lap = if wrap { packed::DESC_F_AVAIL } else { packed::DESC_F_USED };
        State::new(len, id, flags | lap)
    }

    /// Of a buffer that is given back in the lap of `wrap`.
    #[inline]
    pub(crate) fn used(len: u32, id: u16, wrap: bool) -> State {
        let lap = if wrap { packed::DESC_F_AVAIL | packed::DESC_F_USED } else { 0 };
        // Virtio 2.8.5: the length is valid if the device wrote something.
        let written = if len > 0 { layout::DESC_F_WRITE } else { 0 };
        State::new(len, id, lap | written)
    }

    #[inline]
    pub(crate) fn len(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(crate) fn id(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }

    #[inline]
    pub(crate) fn has(self, flags: u16) -> bool {
        self.flags() & flags != 0
    }

    /// Whether the driver has made it available in the lap of `wrap`.
    #[inline]
    pub(crate) fn is_available(self, wrap: bool) -> bool {
        self.has(packed::DESC_F_AVAIL) == wrap && self.has(packed::DESC_F_USED) != wrap
    }

    /// Whether the device has given it back in the lap of `wrap`.
    #[inline]
    pub(crate) fn is_used(self, wrap: bool) -> bool {
        self.has(packed::DESC_F_AVAIL) == wrap && self.has(packed::DESC_F_USED) == wrap
    }

    /// The buffer at `addr` that it describes.
    #[inline]
    pub(crate) fn desc(self, addr: u64) -> Desc {
        Desc { addr, len: self.len(), write: self.has(layout::DESC_F_WRITE) }
    }

    /// A descriptor of an indirect table, in which only the write flag is used.
    pub(crate) fn to_bytes(self, addr: u64) -> [u8; layout::DESC_SIZE] {
        (u128::from(addr) | u128::from(self.0) << 64).to_le_bytes()
    }

    /// Address and state of a descriptor of an indirect table.
    #[inline]
    pub(crate) fn from_bytes(bytes: &[u8; layout::DESC_SIZE]) -> (u64, State) {
        let value = u128::from_le_bytes(*bytes);
        (value as u64, State((value >> 64) as u64))
    }
}

/// The ring of descriptors, which both ends read and write.
#[derive(Debug)]
pub(crate) struct DescRing {
    place: Place,
    size: u16,
}

impl DescRing {
    /// The ring of a queue of `size` at the device's address `addr`.
    pub(crate) fn new(window: Window, addr: u64, size: u16) -> Result<DescRing, RingError> {
        let needed = layout::desc_bytes(size);
        let place = Place::new(window, Area::Descriptors, addr, needed, layout::DESC_ALIGN)?;
        Ok(DescRing { place, size })
    }

    /// How many descriptors it has.
    #[inline]
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.place.is_valid()
    }

    /// The area itself.
    pub(crate) fn window(&self) -> &Window {
        self.place.window()
    }

    /// Whether nothing was ever given back in it; called when both ends are at the beginning of a
    /// lap. In the lap before at least one descriptor was given back, as no step is longer than the
    /// ring; that set this flag, and making it available in the new lap leaves it set. A driver
    /// clears the ring before it begins.
    pub(crate) fn is_new(&self) -> bool {
        (0..self.size).all(|at| !self.state(at, Ordering::Relaxed).has(packed::DESC_F_USED))
    }

    /// Word 0 or 1 of descriptor `at`.
    ///
    /// # Panics
    /// `at` lies beyond the ring: a [`RingPos`] never does.
    #[inline]
    fn word(&self, at: u16, word: usize) -> &AtomicU64 {
        assert!(at < self.size && word < 2, "descriptor {at} of a ring of {}", self.size);
        let offset = layout::DESC_SIZE * usize::from(at) + 8 * word;
        // SAFETY: the descriptor is one of the queue's, for which `new` checked that the area has
        // room and is aligned to 16; `place`, which lives as long as the reference, keeps the
        // memory mapped.
        unsafe { AtomicU64::from_ptr(self.place.base().add(offset).cast().as_ptr()) }
    }

    #[inline]
    pub(crate) fn addr(&self, at: u16) -> u64 {
        u64::from_le(self.word(at, 0).load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn set_addr(&self, at: u16, addr: u64) {
        self.word(at, 0).store(addr.to_le(), Ordering::Relaxed);
    }

    #[inline]
    #[cfg_attr(loom, track_caller)]
    pub(crate) fn state(&self, at: u16, order: Ordering) -> State {
        State(u64::from_le(self.word(at, 1).load(order)))
    }

    #[inline]
    #[cfg_attr(loom, track_caller)]
    pub(crate) fn set_state(&self, at: u16, state: State, order: Ordering) {
        self.word(at, 1).store(state.0.to_le(), order);
    }
}

/// The notifications that one end wants, written by it and read by the other. A single word too.
#[derive(Debug)]
pub(crate) struct Event(Place);

impl Event {
    pub(crate) fn new(window: Window, area: Area, addr: u64) -> Result<Event, RingError> {
        Place::new(window, area, addr, packed::EVENT_SIZE, packed::EVENT_ALIGN).map(Event)
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.0.is_valid()
    }

    /// The area itself.
    pub(crate) fn window(&self) -> &Window {
        self.0.window()
    }

    #[inline]
    fn word(&self) -> &AtomicU32 {
        // SAFETY: `new` checked that the area holds it and is aligned to 4; the place keeps the
        // memory mapped.
        unsafe { AtomicU32::from_ptr(self.0.base().cast().as_ptr()) }
    }

    #[inline]
    pub(crate) fn load(&self) -> EventWord {
        EventWord(u32::from_le(self.word().load(Ordering::Relaxed)))
    }

    #[inline]
    pub(crate) fn store(&self, wanted: EventWord) {
        self.word().store(wanted.0.to_le(), Ordering::Relaxed);
    }
}

/// The contents of an event structure, in our byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventWord(pub(crate) u32);

impl EventWord {
    pub(crate) const ALL: EventWord = EventWord((packed::EVENT_ENABLE as u32) << 16);
    pub(crate) const NONE: EventWord = EventWord((packed::EVENT_DISABLE as u32) << 16);

    /// A notification once the descriptor at `place` has been passed.
    #[inline]
    pub(crate) fn at(place: RingPos) -> EventWord {
        EventWord(u32::from(place.bits()) | u32::from(packed::EVENT_DESC) << 16)
    }

    /// Whether an end that has moved on by `moved` descriptors, to `now`, must notify the one that
    /// wants this.
    #[inline]
    pub(crate) fn is_due(self, now: RingPos, moved: u64, size: u16, event_idx: bool) -> bool {
        match (self.0 >> 16) as u16 & 3 {
            packed::EVENT_DISABLE => false,
            packed::EVENT_DESC if event_idx => {
                // A move longer than the ring has passed every place.
                moved > u64::from(size)
                    || RingPos::from_bits(self.0 as u16)
                        .distance(now, size)
                        .is_some_and(|since| 1 <= since && u64::from(since) <= moved)
            }
            // Reserved values must not lose a wake-up.
            _ => true,
        }
    }
}
