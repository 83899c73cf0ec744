//! What a domain can map, and where.

use alloc::sync::Arc;
use core::fmt;

use crate::{Address, Error, Iova, Map, Prot, Range, Result};

/// The page sizes that a domain supports: a bitmap in which bit n stands for 2^n bytes.
///
/// The lowest bit is the granule (rule [L1]): every address and every size that is mapped is a
/// multiple of it.
///
/// [L1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l1
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageSizes(u64);

impl PageSizes {
    /// 4 KiB, 2 MiB and 1 GiB.
    pub const X86: PageSizes = PageSizes(1 << 12 | 1 << 21 | 1 << 30);

    /// The sizes of `bitmap`; `None` if it is empty.
    pub const fn new(bitmap: u64) -> Option<PageSizes> {
        if bitmap == 0 { None } else { Some(PageSizes(bitmap)) }
    }

    /// Every power of two from `granule` up; `None` unless `granule` is a power of two.
    pub const fn from_granule(granule: u64) -> Option<PageSizes> {
        if granule.is_power_of_two() { Some(PageSizes(!(granule - 1))) } else { None }
    }

    /// The bitmap.
    #[inline]
    pub const fn bitmap(self) -> u64 {
        self.0
    }

    /// The smallest page, in bytes.
    #[inline]
    pub const fn granule(self) -> u64 {
        self.0 & self.0.wrapping_neg()
    }

    /// The largest page that divides both addresses and is no larger than `len`: one step of a
    /// mapping (rule [L32]). `None` if not even the granule fits.
    ///
    /// [L32]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l32
    pub const fn largest(self, iova: u64, target: u64, len: u64) -> Option<u64> {
        let fits = if len == 0 { 0 } else { u64::MAX >> len.leading_zeros() };
        let addresses = iova | target;
        // All powers of two up to and including the lowest set bit of either address.
        let divides = addresses ^ addresses.wrapping_sub(1);
        let usable = self.0 & fits & if addresses == 0 { u64::MAX } else { divides };
        if usable == 0 { None } else { Some(1 << (63 - usable.leading_zeros())) }
    }
}

impl fmt::Debug for PageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSizes({:#x})", self.0)
    }
}

/// Why a range of I/O virtual addresses is not for mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReservedKind {
    /// Not usable: what is there is unknown or belongs to others.
    Reserved,
    /// Writes there raise message-signalled interrupts; translation does not apply.
    Msi,
    /// Mapped to itself, always.
    Direct,
}

/// A range of I/O virtual addresses that a domain never hands out for mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReservedRegion {
    /// Where it is.
    pub range: Range,
    /// What it is.
    pub kind: ReservedKind,
}

/// What a domain can map, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The page sizes; the smallest is the granule.
    pub page_sizes: PageSizes,
    /// The addresses that can be mapped.
    pub aperture: Range,
    /// Holes in the aperture, in ascending order.
    pub reserved: Arc<[ReservedRegion]>,
}

impl Geometry {
    /// A domain of `page_sizes` over `aperture`, without holes.
    pub fn new(page_sizes: PageSizes, aperture: Range) -> Geometry {
        Geometry { page_sizes, aperture, reserved: Arc::from([]) }
    }

    /// The first reserved region that `range` overlaps.
    #[inline]
    pub fn reserved_in(&self, range: Range) -> Option<ReservedRegion> {
        self.reserved.iter().copied().find(|region| region.range.overlaps(range))
    }

    /// Checks a mapping without regard to what is already mapped.
    ///
    /// # Errors
    /// In this order: [`Unaligned`](Error::Unaligned), [`NoPermission`](Error::NoPermission) (rule
    /// [L31]), [`TargetOverflow`](Error::TargetOverflow),
    /// [`OutsideAperture`](Error::OutsideAperture), [`Reserved`](Error::Reserved).
    ///
    /// [L31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l31
    #[inline]
    pub fn check_map<T: Address>(&self, map: &Map<T>) -> Result<()> {
        let (range, target) = (map.range(), map.target().as_u64());
        let granule = self.page_sizes.granule();
        if !range.is_aligned(granule) || target & (granule - 1) != 0 {
            return Err(Error::Unaligned { range, granule });
        }
        if !map.prot().intersects(Prot::RW) {
            return Err(Error::NoPermission(range));
        }
        if target.checked_add(range.extent()).is_none() {
            return Err(Error::TargetOverflow(range));
        }
        let aperture = self.aperture;
        if !aperture.covers(range) {
            return Err(Error::OutsideAperture { range, aperture });
        }
        match self.reserved_in(range) {
            Some(region) => Err(Error::Reserved { range, reserved: region.range }),
            None => Ok(()),
        }
    }

    /// Checks an unmap without regard to what is mapped.
    ///
    /// # Errors
    /// [`Unaligned`](Error::Unaligned).
    #[inline]
    pub fn check_unmap(&self, range: Range) -> Result<()> {
        let granule = self.page_sizes.granule();
        match range.is_aligned(granule) {
            true => Ok(()),
            false => Err(Error::Unaligned { range, granule }),
        }
    }

    /// Whether this domain could ever map `iova`.
    pub fn is_mappable(&self, iova: Iova) -> bool {
        self.aperture.contains(iova) && !self.reserved.iter().any(|r| r.range.contains(iova))
    }
}

/// What a domain supports beyond mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// An unmap may be queued and made effective later by
    /// [`flush_iotlb_all`](crate::Domain::flush_iotlb_all): the condition for lazy policies.
    /// Without it (VFIO type1, where each unmap is a system call that has completed when it
    /// returns) lazy falls back to strict, and the caller can see that it did.
    pub deferred_flush: bool,
    /// [`Prot`](crate::Prot) is kept and enforced: a read-only mapping refuses writes.
    pub enforces_prot: bool,
}

impl Capabilities {
    /// A domain that can defer flushes and enforces permissions.
    pub const FULL: Capabilities = Capabilities { deferred_flush: true, enforces_prot: true };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_granule_is_the_lowest_bit() {
        // rule L1
        assert_eq!(PageSizes::X86.granule(), 4096);
        assert_eq!(PageSizes::new(1 << 63).unwrap().granule(), 1 << 63);
        assert_eq!(PageSizes::new(0), None);
    }

    #[test]
    fn each_step_uses_the_largest_page_that_divides_both_addresses_and_fits() {
        // rule L32
        let sizes = PageSizes::X86;
        assert_eq!(sizes.largest(0, 0, 1 << 40), Some(1 << 30));
        assert_eq!(sizes.largest(1 << 30, 1 << 21, 1 << 40), Some(1 << 21));
        assert_eq!(sizes.largest(1 << 30, 1 << 30, (1 << 30) - 1), Some(1 << 21));
        assert_eq!(sizes.largest(0x1000, 0, 1 << 40), Some(4096));
        assert_eq!(sizes.largest(0x800, 0, 1 << 40), None);
        assert_eq!(sizes.largest(0, 0, 4095), None);
        assert_eq!(sizes.largest(0, 0, 0), None);
        assert_eq!(PageSizes::from_granule(1).unwrap().largest(0, 0, u64::MAX), Some(1 << 63));
    }
}
