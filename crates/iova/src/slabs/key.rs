//! The identity of a slab and its listing, each in one word.

/// Ranges of a slab: a power of two, so that they form one aligned block; and half a word of bits,
/// so that the other half holds flags and the version.
#[cfg(not(loom))]
pub(super) const SLOTS: u32 = 32;
/// A model needs several slabs but few ranges.
#[cfg(loom)]
pub(super) const SLOTS: u32 = 4;
pub(super) const SLOT_BITS: u32 = SLOTS.trailing_zeros();

/// The identity of a slab: the number of its first granule, which is a multiple of 32 at least, and
/// the class in its low bits. In one word, so that they are loaded and compared at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

impl Key {
    const CLASS: u64 = SLOTS as u64 - 1;

    /// The key of the slab of a class that contains the granule.
    #[inline]
    pub(super) const fn of(number: u64, class: u32) -> Key {
        // The class is less than 32, and with the slots' bits the shift is less than 64.
        Key(number & !((1 << (class + SLOT_BITS)) - 1) | class as u64)
    }

    /// The key of a slab by its [region](Self::region).
    #[inline]
    pub(super) const fn at(region: u64, class: u32) -> Key {
        Key(region << SLOT_BITS << class | class as u64)
    }

    #[inline]
    pub(super) const fn class(self) -> u32 {
        (self.0 & Key::CLASS) as u32
    }

    #[inline]
    pub(super) const fn first(self) -> u64 {
        self.0 & !Key::CLASS
    }

    /// The slab's number among those of its class.
    #[inline]
    pub(super) const fn region(self) -> u64 {
        self.0 >> SLOT_BITS >> self.class()
    }

    /// The number of the first granule of a range.
    #[inline]
    pub(super) const fn number(self, slot: u32) -> u64 {
        self.first() + ((slot as u64) << self.class())
    }
}

/// The slot of a granule in its slab of a class.
#[inline]
pub(super) const fn slot_of(number: u64, class: u32) -> u32 {
    (number >> class) as u32 & (SLOTS - 1)
}

/// Where a slab is listed: a CPU, and how many ranges it counts as idle there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listing(pub(super) u32);

impl Listing {
    /// In no list.
    pub(super) const NOWHERE: Listing = Listing(0);
    /// Enough for all ranges of a slab.
    const IDLE_BITS: u32 = SLOT_BITS + 1;

    pub(super) const fn new(cpu: usize, idle: u32) -> Listing {
        Listing((cpu as u32 + 1) << Listing::IDLE_BITS | idle)
    }

    /// The CPU, if there is one.
    pub(super) fn cpu(self) -> Option<usize> {
        (self.0 >> Listing::IDLE_BITS).checked_sub(1).map(|cpu| cpu as usize)
    }

    pub(super) const fn idle(self) -> u32 {
        self.0 & ((1 << Listing::IDLE_BITS) - 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_from_a_granule_and_from_its_region() {
        for class in 0..31 {
            // A region is at least 32 granules, and at most 2^64 granules are numbered.
            for number in [0, 1, 31 << class, u64::MAX / 3, u64::MAX >> 1, u64::MAX] {
                let key = Key::of(number, class);
                assert_eq!(Key::at(key.region(), class), key, "{number:#x} {class}");
                let slot = slot_of(number, class);
                assert!(key.number(slot) <= number, "{number:#x} {class}");
                assert!(number - key.number(slot) < 1 << class, "{number:#x} {class}");
            }
        }
    }
}
