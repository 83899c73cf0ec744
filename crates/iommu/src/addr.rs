//! Addresses and ranges of them.
//!
//! A range is inclusive at both ends, so that the whole address space, [0, 2^64-1], is a range like
//! any other and no arithmetic on a bound wraps.

use core::fmt;

/// What an I/O virtual address can be translated to: a 64-bit address of some kind.
///
/// A domain for a virtual machine maps to [`GuestPhys`]; one that represents hardware behind VFIO
/// maps to [`HostAddr`], an address of this process. The types keep the two from being mixed up.
pub trait Address: Copy + Eq + Ord + fmt::Debug + Send + Sync + 'static {
    /// The address as a number.
    fn as_u64(self) -> u64;
    /// The number as an address.
    fn from_u64(raw: u64) -> Self;
    /// `self + offset`, or `None` where that would wrap.
    fn checked_add(self, offset: u64) -> Option<Self> {
        self.as_u64().checked_add(offset).map(Self::from_u64)
    }
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        // The one kind of public tuple field: each number is an address, so there is nothing that a
        // constructor would check; vm-memory's `GuestAddress` is made the same way.
        pub struct $name(pub u64);

        impl Address for $name {
            #[inline]
            fn as_u64(self) -> u64 {
                self.0
            }
            #[inline]
            fn from_u64(raw: u64) -> Self {
                Self(raw)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// An I/O virtual address: what a device puts on the bus.
    Iova
}
address! {
    /// A guest-physical address: an address of memory as a virtual machine, or a driver process in
    /// its place, numbers it.
    GuestPhys
}
address! {
    /// An address in this process.
    HostAddr
}

/// A range of I/O virtual addresses, both ends included. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Range {
    /// Every address there is.
    pub const ALL: Range = Range { first: 0, last: u64::MAX };

    /// The range from `first` to `last`, both included; `None` if `last` lies before `first`.
    #[inline]
    pub const fn new(first: Iova, last: Iova) -> Option<Range> {
        if first.0 <= last.0 { Some(Range { first: first.0, last: last.0 }) } else { None }
    }

    /// `len` bytes from `first`; `None` if `len` is 0 or the range would pass 2^64-1.
    #[inline]
    pub const fn from_len(first: Iova, len: u64) -> Option<Range> {
        match len.checked_sub(1) {
            None => None,
            Some(extent) => match first.0.checked_add(extent) {
                None => None,
                Some(last) => Some(Range { first: first.0, last }),
            },
        }
    }

    /// The first address.
    #[inline]
    pub const fn first(self) -> Iova {
        Iova(self.first)
    }

    /// The last address, itself part of the range.
    #[inline]
    pub const fn last(self) -> Iova {
        Iova(self.last)
    }

    /// The number of bytes less one, which always fits 64 bits.
    #[inline]
    pub const fn extent(self) -> u64 {
        self.last - self.first
    }

    /// The number of bytes: up to 2^64.
    #[inline]
    pub const fn len(self) -> u128 {
        self.extent() as u128 + 1
    }

    /// Always false: a range holds at least one byte.
    #[inline]
    pub const fn is_empty(self) -> bool {
        false
    }

    /// Whether `iova` lies in the range.
    #[inline]
    pub const fn contains(self, iova: Iova) -> bool {
        self.first <= iova.0 && iova.0 <= self.last
    }

    /// Whether every address of `other` lies in the range.
    #[inline]
    pub const fn covers(self, other: Range) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Whether the two have an address in common.
    #[inline]
    pub const fn overlaps(self, other: Range) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// What the two have in common.
    #[inline]
    pub fn intersection(self, other: Range) -> Option<Range> {
        self.overlaps(other)
            .then(|| Range { first: self.first.max(other.first), last: self.last.min(other.last) })
    }

    /// Whether the two overlap or are adjacent, so that their union is one range.
    #[inline]
    pub const fn touches(self, other: Range) -> bool {
        // Nothing follows an end at 2^64-1: a range that begins there overlaps.
        self.first <= other.last.saturating_add(1) && other.first <= self.last.saturating_add(1)
    }

    /// The smallest range that covers both.
    #[inline]
    pub fn hull(self, other: Range) -> Range {
        Range { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// The granules that lie in the range whole; `None` if there is none. `granule` is a power of two.
    pub fn inward(self, granule: u64) -> Option<Range> {
        let mask = granule.wrapping_sub(1);
        let first = self.first.checked_add(mask)? & !mask;
        let last = match self.last & mask == mask {
            true => self.last,
            false => (self.last & !mask).checked_sub(1)?,
        };
        Range::new(Iova(first), Iova(last))
    }

    /// Whether both ends are aligned to `granule`, a power of two: the first address is a multiple
    /// of it and so is the address after the last (2^64 counts).
    #[inline]
    pub const fn is_aligned(self, granule: u64) -> bool {
        let mask = granule.wrapping_sub(1);
        self.first & mask == 0 && self.last & mask == mask
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x}]", self.first, self.last)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_space_is_a_range() {
        assert_eq!(Range::ALL.len(), 1u128 << 64);
        assert_eq!(Range::new(Iova(0), Iova(u64::MAX)), Some(Range::ALL));
        assert!(Range::ALL.is_aligned(1 << 63));
    }

    #[test]
    fn a_range_never_wraps_and_is_never_empty() {
        assert_eq!(Range::from_len(Iova(0), 0), None);
        assert_eq!(Range::from_len(Iova(u64::MAX), 2), None);
        let top = Range::from_len(Iova(u64::MAX), 1).unwrap();
        assert_eq!((top.first(), top.last()), (Iova(u64::MAX), Iova(u64::MAX)));
        assert_eq!(Range::new(Iova(5), Iova(4)), None);
    }

    #[test]
    fn neighbours_touch_without_overlapping_even_at_the_top() {
        let a = Range::new(Iova(0), Iova(u64::MAX - 1)).unwrap();
        let b = Range::new(Iova(u64::MAX), Iova(u64::MAX)).unwrap();
        assert!(a.touches(b) && b.touches(a) && !a.overlaps(b));
        assert_eq!(a.hull(b), Range::ALL);
        assert_eq!(a.intersection(b), None);
        let c = Range::new(Iova(2), Iova(3)).unwrap();
        let d = Range::new(Iova(5), Iova(6)).unwrap();
        assert!(!c.touches(d));
    }

    #[test]
    fn inward_is_every_granule_that_lies_in_it_whole() {
        let inward = |first, last| Range::new(Iova(first), Iova(last)).unwrap().inward(4);
        let top = u64::MAX - 15;
        for base in [0, 16, top] {
            for (first, last) in
                (0..16).flat_map(|first| (first..16).map(move |last| (first, last)))
            {
                let whole = (0..16).step_by(4).filter(|at| first <= *at && at + 3 <= last);
                let hull = (whole.clone().min(), whole.max().map(|at| at + 3));
                let found = inward(base + first, base + last);
                let found = found.map(|range| (range.first().0 - base, range.last().0 - base));
                assert_eq!(found.unzip(), hull, "{first} to {last} from {base:#x}");
            }
        }
        assert_eq!(Range::ALL.inward(1 << 63), Some(Range::ALL));
    }
}
