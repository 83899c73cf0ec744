//! The three areas of a split queue as fields in memory: each checked once for size and alignment,
//! then read and written without a check.
//!
//! Every accessor reduces its index modulo the queue's size, so none can leave its area for any
//! index; and all fields are atomics, since the peer may access them at any time. The caller is
//! responsible for the *order* of accesses, and explains it; only single fields are here.
//!
//! Fields are little-endian (virtio 1.x); conversion is free on little-endian machines.

use core::ptr::NonNull;

use ringfence_mem::{Window, soon_written};
use ringfence_sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::{Area, Desc, RingError, layout};

/// The memory of an area.
#[derive(Debug)]
pub(crate) struct Place {
    base: NonNull<u8>,
    window: Window,
}

// SAFETY: `base` leads into `window`, which may be sent and keeps its memory mapped; every access
// is atomic.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// Checks that `window` can be the area: at least `needed` bytes, aligned here and, at `addr`,
    /// for the device.
    pub(crate) fn new(
        window: Window,
        area: Area,
        addr: u64,
        needed: usize,
        align: usize,
    ) -> Result<Place, RingError> {
        if window.len() < needed {
            return Err(RingError::TooSmall { area, len: window.len(), needed });
        }
        let base = window.slice().as_ptr();
        let aligned = addr.is_multiple_of(align as u64) && (base as usize).is_multiple_of(align);
        match NonNull::new(base).filter(|_| aligned) {
            Some(base) => Ok(Place { base, window }),
            None => Err(RingError::Misaligned { area, addr, align: align as u64 }),
        }
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.window.is_valid()
    }

    /// The area itself.
    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// Where the area begins in this process, as long as `self` lives.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

/// A descriptor as it lies in memory, in our byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawDesc {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl RawDesc {
    /// A buffer, followed by descriptor `next` if there is one.
    #[inline]
    pub(crate) fn buffer(desc: &Desc, next: Option<u16>) -> RawDesc {
        let write = if desc.write { layout::DESC_F_WRITE } else { 0 };
        let more = if next.is_some() { layout::DESC_F_NEXT } else { 0 };
        RawDesc {
            addr: desc.addr,
            len: desc.len,
            flags: write | more,
            next: next.unwrap_or_default(),
        }
    }

    /// The buffer that it names.
    #[inline]
    pub(crate) fn desc(&self) -> Desc {
        Desc { addr: self.addr, len: self.len, write: self.has(layout::DESC_F_WRITE) }
    }

    #[inline]
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The two 64-bit words that it is made of, in our byte order: in a little-endian structure
    /// the earlier field is the less significant.
    #[inline]
    fn words(self) -> [u64; 2] {
        let rest = u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        [self.addr, rest]
    }

    #[inline]
    fn from_words([addr, rest]: [u64; 2]) -> RawDesc {
        RawDesc { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    #[inline]
    pub(crate) fn to_bytes(self) -> [u8; layout::DESC_SIZE] {
        let [addr, rest] = self.words();
        (u128::from(addr) | u128::from(rest) << 64).to_le_bytes()
    }

    #[inline]
    pub(crate) fn from_bytes(bytes: &[u8; layout::DESC_SIZE]) -> RawDesc {
        let value = u128::from_le_bytes(*bytes);
        RawDesc::from_words([value as u64, (value >> 64) as u64])
    }
}

/// The descriptor table.
#[derive(Debug)]
pub(crate) struct DescTable {
    place: Place,
    mask: u16,
}

impl DescTable {
    /// The table of a queue of `size`, a power of two, at the device's address `addr`.
    pub(crate) fn new(window: Window, addr: u64, size: u16) -> Result<DescTable, RingError> {
        debug_assert!(layout::is_size(size));
        let needed = layout::desc_bytes(size);
        let place = Place::new(window, Area::Descriptors, addr, needed, layout::DESC_ALIGN)?;
        Ok(DescTable { place, mask: size - 1 })
    }

    /// How many descriptors it has.
    #[inline]
    pub(crate) fn size(&self) -> u16 {
        self.mask + 1
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.place.is_valid()
    }

    /// The two 64-bit words of a descriptor.
    #[inline]
    fn words(&self, index: u16) -> [&AtomicU64; 2] {
        let offset = layout::DESC_SIZE * usize::from(index & self.mask);
        // SAFETY: the index is below the queue's size, for which `new` checked that the area has
        // room; it is aligned to 16 (checked there too); `place`, which lives as long as the
        // references, keeps the memory mapped.
        unsafe {
            let at = self.place.base().add(offset).cast::<u64>();
            [AtomicU64::from_ptr(at.as_ptr()), AtomicU64::from_ptr(at.add(1).as_ptr())]
        }
    }

    /// Copies a descriptor out. Two loads: each field is read exactly once.
    #[inline]
    pub(crate) fn load(&self, index: u16) -> RawDesc {
        let words = self.words(index);
        RawDesc::from_words(words.map(|word| u64::from_le(word.load(Ordering::Relaxed))))
    }

    #[inline]
    pub(crate) fn store(&self, index: u16, desc: RawDesc) {
        for (word, value) in self.words(index).into_iter().zip(desc.words()) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }
}

/// One 16-bit field of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Field<'a>(&'a AtomicU16);

impl Field<'_> {
    #[inline]
    #[cfg_attr(loom, track_caller)]
    pub(crate) fn load(self, order: Ordering) -> u16 {
        u16::from_le(self.0.load(order))
    }

    #[inline]
    #[cfg_attr(loom, track_caller)]
    pub(crate) fn store(self, value: u16, order: Ordering) {
        self.0.store(value.to_le(), order);
    }
}

/// What the available and the used ring have in common: flags, an index, entries of `ENTRY` bytes,
/// and with `EVENT_IDX` an event after them.
#[derive(Debug)]
pub(crate) struct Ring<const ENTRY: usize> {
    place: Place,
    mask: u16,
    event: bool,
}

/// The available ring: written by the driver, read by the device.
pub(crate) type AvailRing = Ring<2>;
/// The used ring: written by the device, read by the driver.
pub(crate) type UsedRing = Ring<8>;

impl<const ENTRY: usize> Ring<ENTRY> {
    /// Which area it is, and how it is aligned.
    const AREA: (Area, usize) = match ENTRY {
        2 => (Area::Avail, layout::AVAIL_ALIGN),
        _ => (Area::Used, layout::USED_ALIGN),
    };

    /// The ring of a queue of `size` at the device's address `addr`, with an event or without.
    pub(crate) fn new(
        window: Window,
        addr: u64,
        size: u16,
        event: bool,
    ) -> Result<Self, RingError> {
        debug_assert!(layout::is_size(size));
        let needed = layout::RING + ENTRY * usize::from(size) + if event { 2 } else { 0 };
        let (area, align) = Self::AREA;
        let place = Place::new(window, area, addr, needed, align)?;
        Ok(Ring { place, mask: size - 1, event })
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.place.is_valid()
    }

    /// The area itself.
    pub(crate) fn window(&self) -> &Window {
        self.place.window()
    }

    #[inline]
    pub(crate) fn flags(&self) -> Field<'_> {
        // SAFETY: `new` found that the area holds the flags, the index and all entries, and that
        // it begins at an even address; `place` keeps the memory mapped.
        Field(unsafe { AtomicU16::from_ptr(self.place.base().add(layout::FLAGS).cast().as_ptr()) })
    }

    #[inline]
    pub(crate) fn idx(&self) -> Field<'_> {
        // SAFETY: as in `flags`.
        Field(unsafe { AtomicU16::from_ptr(self.place.base().add(layout::IDX).cast().as_ptr()) })
    }

    /// The address of the entry of a running index: inside the area, for any index.
    #[inline]
    fn entry(&self, index: u16) -> NonNull<u8> {
        // SAFETY: the index is reduced below the queue's size, for which `new` has
        // checked the area.
        unsafe { self.place.base().add(layout::RING + ENTRY * usize::from(index & self.mask)) }
    }

    /// The field after the entries, if `EVENT_IDX` was negotiated: the index at which the end that
    /// writes this ring wants to be notified.
    #[inline]
    pub(crate) fn event(&self) -> Option<Field<'_>> {
        self.event.then(|| {
            let offset = layout::RING + ENTRY * (usize::from(self.mask) + 1);
            // SAFETY: with `event` set, `new` found that the area has two bytes there; the
            // offset is even, as the area's beginning is.
            Field(unsafe { AtomicU16::from_ptr(self.place.base().add(offset).cast().as_ptr()) })
        })
    }
}

impl AvailRing {
    /// The head of the chain at a running index.
    #[inline]
    pub(crate) fn head(&self, index: u16) -> Field<'_> {
        // SAFETY: `entry` lies inside of the area, which is mapped and begins at an even address,
        // and so are the offsets of entries of two bytes.
        Field(unsafe { AtomicU16::from_ptr(self.entry(index).cast().as_ptr()) })
    }
}

/// How many used elements a line of the processor's cache holds.
const PER_LINE: usize = 8;

impl UsedRing {
    #[inline]
    fn words(&self, index: u16) -> [&AtomicU32; 2] {
        let at = self.entry(index).cast::<u32>();
        // SAFETY: `entry` gives 8 bytes inside of the area, which is mapped and aligned to
        // 4, and so are the offsets of the entries (4 + 8 n).
        unsafe { [AtomicU32::from_ptr(at.as_ptr()), AtomicU32::from_ptr(at.add(1).as_ptr())] }
    }

    /// Id and length of the used element at a running index. Each is read exactly once.
    #[inline]
    pub(crate) fn load(&self, index: u16) -> (u32, u32) {
        let [id, len] = self.words(index).map(|word| u32::from_le(word.load(Ordering::Relaxed)));
        (id, len)
    }

    #[inline]
    pub(crate) fn store(&self, index: u16, id: u32, len: u32) {
        let [id_word, len_word] = self.words(index);
        id_word.store(id.to_le(), Ordering::Relaxed);
        len_word.store(len.to_le(), Ordering::Relaxed);
    }

    /// Before the element at a running index is written: with each eighth, fetches the cache line of the
    /// eighth after it. Where one is given back there are more, most often. A hint.
    #[inline]
    pub(crate) fn soon_next(&self, index: u16) {
        if usize::from(index).is_multiple_of(PER_LINE) {
            soon_written(self.entry(index.wrapping_add(PER_LINE as u16)).as_ptr());
        }
    }

    /// Fetches the cache lines of `count` elements from a running index on, which are about to be
    /// written: the driver has read them. A hint.
    #[inline]
    pub(crate) fn soon(&self, index: u16, count: usize) {
        // Rather one line too many than one too few.
        for line in (0..count + PER_LINE).step_by(PER_LINE) {
            soon_written(self.entry(index.wrapping_add(line as u16)).as_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_laid_out_as_virtio_says() {
        let raw =
            RawDesc { addr: 0x0807060504030201, len: 0x0c0b0a09, flags: 0x0e0d, next: 0x100f };
        let bytes = raw.to_bytes();
        assert_eq!(bytes, core::array::from_fn(|at| at as u8 + 1));
        assert_eq!(RawDesc::from_bytes(&bytes), raw);
        assert_eq!(RawDesc::from_words(raw.words()), raw);
    }
}
