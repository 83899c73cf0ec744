//! Which addresses a guest's driver may map.

use std::sync::Arc;

use ringfence_iommu::{Geometry, Iova, PageSizes, Range, ReservedKind, ReservedRegion};

/// From this size on, a q35 machine has only 2 GiB of its memory below 4 GiB.
const SPLIT: u64 = 0xb000_0000;
const GIB: u64 = 1 << 30;
const GRANULE: u64 = 4096;
/// Not memory: display and firmware.
const LEGACY: (u64, u64) = (0xa_0000, 0xf_ffff);
/// The window of message-signalled interrupts on a PC.
const MSI: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// What can be mapped in the guest of a q35 machine with `memory` bytes, except `holes`.
///
/// When a ring starts, QEMU looks its addresses up in its own idle IOMMU, which translates nothing,
/// and gives up unless it finds memory there. So an I/O virtual address must also be the address of
/// some memory, whatever it is mapped to; the memory's own address is not used otherwise.
pub(super) fn geometry(memory: u64, holes: &[Range]) -> Geometry {
    let below = if memory < SPLIT { memory } else { 2 * GIB };
    let range = |(first, last)| Range::new(Iova(first), Iova(last)).expect("in order");
    let reserved = |range| ReservedRegion { range, kind: ReservedKind::Reserved };
    let mut regions = vec![
        reserved(range(LEGACY)),
        ReservedRegion { range: range(MSI), kind: ReservedKind::Msi },
    ];
    regions.extend(holes.iter().copied().map(reserved));
    regions.sort_by_key(|region| region.range.first());
    Geometry {
        reserved: Arc::from(regions),
        ..Geometry::new(
            PageSizes::from_granule(GRANULE).expect("a power of two"),
            range((0, below - 1)),
        )
    }
}

/// A range of whole granules, `FIRST-LAST` in hexadecimal digits.
pub(super) fn hole(text: &str) -> Result<Range, String> {
    let number = |text: &str| {
        let digits = text.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))
    };
    let wrong =
        || format!("{text:?} is not a range: give one such as 0xf000000-0xfffffff, of whole 4 KiB");
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let (first, last) = number(first).zip(number(last)).ok_or_else(wrong)?;
    let range = Range::new(Iova(first), Iova(last)).ok_or_else(wrong)?;
    match range {
        _ if !range.is_aligned(GRANULE) => Err(wrong()),
        _ if [LEGACY, MSI].iter().any(|&(from, to)| first <= to && from <= last) => {
            Err(format!("{text:?} overlaps a range that is left out anyway"))
        }
        _ => Ok(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_mapped_ends_with_the_memory_below_4_gib() {
        let last = |memory| geometry(memory, &[]).aperture.last().0;
        assert_eq!(last(256 << 20), 0x0fff_ffff);
        assert_eq!(last(SPLIT - GRANULE), SPLIT - GRANULE - 1);
        assert_eq!(last(SPLIT), 0x7fff_ffff);
        assert_eq!(last(64 * GIB), 0x7fff_ffff);
    }

    #[test]
    fn holes_are_left_out_in_order_and_overlap_nothing() {
        let geometry = geometry(GIB, &[hole("3f000000-3fffffff").unwrap(), hole("0-fff").unwrap()]);
        let firsts: Vec<u64> = geometry.reserved.iter().map(|r| r.range.first().0).collect();
        assert_eq!(firsts, [0, 0xa_0000, 0x3f00_0000, 0xfee0_0000]);
        for wrong in ["", "0-ffe", "1000-fff", "9f000-a0fff", "fee00000-ffffffff", "x-y", "1000"] {
            assert!(hole(wrong).is_err(), "{wrong}");
        }
    }
}
