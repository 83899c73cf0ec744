//! The slots of one queue: the memory that the back end sees instead of the guest's.
//!
//! A chain is copied into one slot. Buffers of a sector and more come first, each aligned to a
//! sector, so that a back end can read and write them without the page cache; then the small ones,
//! such as a header and a status; then the table of descriptors, if there is one.

use std::cell::Cell;

use ringfence_iova::{Align, Allocator, Aperture, Request, SlabConfig, Slabs};
use ringfence_mem::{HostSlice, PAGE_SIZE, Window};
use ringfence_sync::cpu::OneCpu;
use ringfence_virtq::{Chain, Desc, layout::DESC_SIZE};

/// Buffers of at least so many bytes are aligned to as many.
const SECTOR: u64 = 512;
/// The alignment of all others, and the granule of slots: a cache line.
const LINE: u64 = 64;
/// The alignment of a small buffer within its slot.
const SMALL: u64 = 16;

/// The slots of a queue.
///
/// Each chain of the ring has a short one of its own, if the memory is large for that; for what does
/// not fit there slots are taken from the rest.
pub(super) struct Slots {
    area: Window,
    /// Where the back end sees `area`.
    first: u64,
    /// Where the short slots end, and the rest begins.
    rest: u64,
    space: Slabs<OneCpu>,
    /// How many are taken from the rest.
    taken: Cell<usize>,
}

/// A part of the memory that holds one chain: buffers of a sector and more, the small ones, and the
/// table.
#[derive(Debug, Default)]
pub(super) struct Slot {
    addr: u64,
    len: u64,
    /// Where the small buffers begin.
    small: u64,
}

/// The room of a short slot: a network's frame as it is without offloads, at any distance from a
/// sector. An odd number of lines, so that the first lines of many do not compete for the same
/// places of a cache.
const SHORT: u64 = 33 * LINE;

/// How a chain lies in its slot.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// The length of the slot.
    pub(super) len: u64,
    small: u64,
}

impl Layout {
    /// The layout of a chain, with a table of its descriptors if `by_table`.
    #[inline]
    pub(super) fn of(chain: &Chain, by_table: bool) -> Layout {
        let descs = chain.descs();
        let mut len = if by_table { (descs.len() * DESC_SIZE) as u64 } else { 0 };
        let mut small = 0;
        for &Desc { len: bytes, .. } in descs {
            let bytes = u64::from(bytes);
            if bytes >= SECTOR {
                small += bytes.next_multiple_of(SECTOR);
            } else {
                len += bytes.next_multiple_of(SMALL);
            }
        }
        // Buffers may be empty, and a slot may not.
        Layout { len: (len + small).max(1), small }
    }
}

impl Slot {
    /// Calls `each` with the buffers of its chain, each with its offset, until one fails. That of an
    /// empty one lies in the slot as well.
    #[inline(always)]
    pub(super) fn each<E>(
        &self,
        chain: &Chain,
        mut each: impl FnMut(Desc, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        // Most frames of a network are one buffer.
        if let [only] = chain.descs() {
            return each(*only, 0);
        }
        let (mut large, mut small) = (0, self.small);
        chain.descs().iter().try_for_each(|&desc| {
            let len = u64::from(desc.len);
            let (next, align) =
                if len >= SECTOR { (&mut large, SECTOR) } else { (&mut small, SMALL) };
            let place = if len == 0 { 0 } else { *next };
            *next += len.next_multiple_of(align);
            each(desc, place)
        })
    }

    /// The offset of the table of so many descriptors, which is its end.
    #[inline]
    pub(super) fn table(&self, descs: usize) -> u64 {
        self.len - (descs * DESC_SIZE) as u64
    }

    /// Where the back end sees the byte at `at`.
    #[inline]
    pub(super) fn addr(&self, at: u64) -> u64 {
        self.addr + at
    }
}

impl Slots {
    /// Slots in `area` for a ring of `size`; the back end sees it from address `first` on. Both begin
    /// and end with a page.
    pub(super) fn new(area: Window, first: u64, size: u16) -> Slots {
        let (bytes, short) = (area.len() as u64, SHORT * u64::from(size));
        let short = short.next_multiple_of(PAGE_SIZE as u64);
        let rest = first + if short <= bytes / 4 { short } else { 0 };
        let aperture = Aperture::new(rest, first + (bytes - 1), LINE).expect("whole pages");
        let config = SlabConfig { limits: Vec::new(), ..SlabConfig::default() };
        let space = Slabs::with_config(aperture, OneCpu, config);
        Slots { area, first, rest, space, taken: Cell::new(0) }
    }

    /// How many bytes a slot may have.
    pub(super) fn most(&self) -> u64 {
        self.area.len() as u64 - (self.rest - self.first)
    }

    /// A slot for chain `at` of the ring, if there is one now.
    #[inline]
    pub(super) fn take(&self, at: u16, Layout { len, small }: Layout) -> Option<Slot> {
        let mut addr = self.first + SHORT * u64::from(at);
        let end = addr + SHORT;
        if small > 0 {
            addr = addr.next_multiple_of(SECTOR);
        }
        if end > self.rest || addr + len > end {
            addr = self.take_long(len)?;
        }
        Some(Slot { addr, len, small })
    }

    fn take_long(&self, len: u64) -> Option<u64> {
        let aligned = Request::new(len);
        // Where there is little room a sector's alignment is enough.
        let other = aligned.align(Align::Bytes(SECTOR));
        let addr = self.space.alloc(&aligned).or_else(|_| self.space.alloc(&other)).ok()?;
        self.taken.set(self.taken.get() + 1);
        Some(addr)
    }

    /// Whether no slot is taken that is not the chain's own.
    pub(super) fn is_unused(&self) -> bool {
        self.taken.get() == 0
    }

    /// Takes back a slot; what it holds stays in it.
    #[inline]
    pub(super) fn give_back(&self, slot: &Slot) {
        if slot.addr >= self.rest {
            self.give_back_long(slot);
        }
    }

    fn give_back_long(&self, slot: &Slot) {
        self.space.free(slot.addr, slot.len).expect("a slot is given back once");
        self.taken.set(self.taken.get() - 1);
    }

    /// `len` bytes of a slot.
    #[inline]
    pub(super) fn piece(&self, slot: &Slot, at: u64, len: u64) -> HostSlice<'_> {
        debug_assert!(at + len <= slot.len);
        self.area.slice().part((slot.addr - self.first + at) as usize, len as usize)
    }

    /// The end of a slot, from `at` on.
    #[inline]
    pub(super) fn rest(&self, slot: &Slot, at: u64) -> HostSlice<'_> {
        self.piece(slot, at, slot.len - at)
    }

    /// The same, to keep.
    pub(super) fn window(&self, slot: &Slot, at: u64) -> Window {
        let (from, len) = (slot.addr - self.first + at, slot.len - at);
        self.area.part(from as usize, len as usize).expect("a slot lies in the area")
    }
}
