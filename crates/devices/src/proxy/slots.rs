//! The slots of one queue: the memory that the back end sees instead of the guest's.
//!
//! A chain is copied into one slot. Buffers of a sector and more come first, each aligned to a
//! sector, so that a back end can read and write them without the page cache; then the small ones,
//! such as a header and a status; then the table of descriptors, if there is one.

use std::cell::Cell;

use ringfence_iova::{Align, Allocator, Aperture, Request, SlabConfig, Slabs};
use ringfence_mem::{HostSlice, Window};
use ringfence_sync::cpu::OneCpu;
use ringfence_virtq::{Chain, Desc, layout::DESC_SIZE};

/// Buffers of at least so many bytes are aligned to as many.
const SECTOR: u64 = 512;
/// The alignment of all others, and the granule of slots: a cache line.
const LINE: u64 = 64;
/// The alignment of a small buffer within its slot.
const SMALL: u64 = 16;

/// The slots of a queue.
pub(super) struct Slots {
    area: Window,
    /// Where the back end sees `area`.
    first: u64,
    space: Slabs<OneCpu>,
    /// How many are taken.
    taken: Cell<usize>,
}

/// A part of the memory that holds one chain.
#[derive(Debug)]
pub(super) struct Slot {
    addr: u64,
    len: u64,
}

/// Where the buffers of a chain lie in its slot, one after the other.
struct Places {
    large: u64,
    small: u64,
}

impl Places {
    fn of(chain: &Chain) -> Places {
        let lens = chain.descs().iter().map(|desc| u64::from(desc.len));
        let large = lens.filter(|&len| len >= SECTOR).map(|len| len.next_multiple_of(SECTOR));
        Places { large: 0, small: large.sum() }
    }

    /// The offset of the next buffer, of `len` bytes. That of an empty one lies in the slot as well.
    fn next(&mut self, len: u32) -> u64 {
        let len = u64::from(len);
        if len == 0 {
            return 0;
        }
        let (next, align) = match len >= SECTOR {
            true => (&mut self.large, SECTOR),
            false => (&mut self.small, SMALL),
        };
        let place = *next;
        *next += len.next_multiple_of(align);
        place
    }
}

/// The buffers of a chain, each with its offset in the slot.
pub(super) fn places(chain: &Chain) -> impl Iterator<Item = (Desc, u64)> + '_ {
    let mut places = Places::of(chain);
    chain.descs().iter().map(move |&desc| (desc, places.next(desc.len)))
}

/// The offset of a chain's table in its slot, and how long the slot is, with the table if there is one.
pub(super) fn layout(chain: &Chain, by_table: bool) -> (u64, u64) {
    let mut places = Places::of(chain);
    chain.descs().iter().for_each(|desc| _ = places.next(desc.len));
    let table = if by_table { chain.descs().len() * DESC_SIZE } else { 0 };
    // Buffers may be empty, and a slot may not.
    (places.small, (places.small + table as u64).max(1))
}

impl Slots {
    /// Slots in `area`, which the back end sees from address `first` on; both begin and end with a
    /// page.
    pub(super) fn new(area: Window, first: u64) -> Slots {
        let last = first + (area.len() as u64 - 1);
        let aperture = Aperture::new(first, last, LINE).expect("whole pages");
        let config = SlabConfig { limits: Vec::new(), ..SlabConfig::default() };
        let space = Slabs::with_config(aperture, OneCpu, config);
        Slots { area, first, space, taken: Cell::new(0) }
    }

    /// The bytes of all slots together.
    pub(super) fn len(&self) -> u64 {
        self.area.len() as u64
    }

    /// A slot of at least `len` bytes, if there is one now.
    pub(super) fn take(&self, len: u64) -> Option<Slot> {
        let aligned = Request::new(len);
        // Where there is little room a sector's alignment is enough.
        let other = aligned.align(Align::Bytes(SECTOR));
        let addr = self.space.alloc(&aligned).or_else(|_| self.space.alloc(&other)).ok()?;
        self.taken.set(self.taken.get() + 1);
        Some(Slot { addr, len })
    }

    /// Whether no slot is taken.
    pub(super) fn is_unused(&self) -> bool {
        self.taken.get() == 0
    }

    /// Takes back a slot; what it holds stays in it.
    pub(super) fn give_back(&self, slot: Slot) {
        self.space.free(slot.addr, slot.len).expect("a slot is given back once");
        self.taken.set(self.taken.get() - 1);
    }

    /// `len` bytes of a slot.
    pub(super) fn piece(&self, slot: &Slot, at: u64, len: u64) -> HostSlice<'_> {
        debug_assert!(at + len <= slot.len);
        self.area.slice().part((slot.addr - self.first + at) as usize, len as usize)
    }

    /// All bytes of a slot.
    pub(super) fn whole(&self, slot: &Slot) -> HostSlice<'_> {
        self.piece(slot, 0, slot.len)
    }

    /// The end of a slot, from `at` on.
    pub(super) fn rest(&self, slot: &Slot, at: u64) -> HostSlice<'_> {
        self.piece(slot, at, slot.len - at)
    }

    /// The same, to keep.
    pub(super) fn window(&self, slot: &Slot, at: u64) -> Window {
        let (from, len) = (slot.addr - self.first + at, slot.len - at);
        self.area.part(from as usize, len as usize).expect("a slot lies in the area")
    }
}

impl Slot {
    /// Where the back end sees the byte at `at`.
    pub(super) fn addr(&self, at: u64) -> u64 {
        self.addr + at
    }
}
