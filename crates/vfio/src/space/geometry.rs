//! A domain's geometry, from what a kernel says about addresses.

use ringfence_iommu::{Geometry, Iova, PageSizes, Range, ReservedKind, ReservedRegion};

/// The geometry for a kernel that can map `ranges` only. The gaps between them are reserved: with
/// the kind that `regions` give, or else (a bridge's window, a hole of the IOMMU) as plain
/// reserved. `None` if there is no range.
pub(crate) fn geometry(
    page_sizes: PageSizes,
    ranges: &[Range],
    regions: &[ReservedRegion],
) -> Option<Geometry> {
    let mut ranges = ranges.to_vec();
    ranges.sort();
    let aperture = Range::new(ranges.first()?.first(), ranges.iter().map(|it| it.last()).max()?)?;
    let mut reserved = Vec::new();
    let mut next = Some(aperture.first());
    for range in &ranges {
        if let Some(hole) = next.and_then(|from| before(from, range.first())) {
            fill(hole, regions, &mut reserved);
        }
        next = next.and_then(|from| Some(from.max(after(range.last())?)));
    }
    Some(Geometry { page_sizes, aperture, reserved: reserved.into() })
}

/// Cuts a hole along the regions of known kind.
fn fill(hole: Range, regions: &[ReservedRegion], reserved: &mut Vec<ReservedRegion>) {
    let plain = |range| ReservedRegion { range, kind: ReservedKind::Reserved };
    let mut named: Vec<_> = regions
        .iter()
        .filter_map(|it| Some(ReservedRegion { range: it.range.intersection(hole)?, ..*it }))
        .collect();
    named.sort_by_key(|region| region.range);
    let mut next = Some(hole.first());
    for region in named {
        // Regions of two groups may overlap: the first gets the common part.
        let Some(from) = next.filter(|&from| from <= region.range.last()) else { continue };
        reserved.extend(before(from, region.range.first()).map(plain));
        let rest = Range::new(from.max(region.range.first()), region.range.last());
        reserved.extend(rest.map(|range| ReservedRegion { range, ..region }));
        next = after(region.range.last());
    }
    reserved.extend(next.and_then(|from| Range::new(from, hole.last())).map(plain));
}

/// From `from` to just before `to`.
fn before(from: Iova, to: Iova) -> Option<Range> {
    Range::new(from, Iova(to.0.checked_sub(1)?))
}

fn after(last: Iova) -> Option<Iova> {
    last.0.checked_add(1).map(Iova)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    #[test]
    fn a_machine_of_intels_has_its_msi_window_in_a_hole() {
        let ranges = [range(0, 0xfedf_ffff), range(0xfef0_0000, (1 << 39) - 1)];
        let kind = ReservedKind::Msi;
        let msi = [ReservedRegion { range: range(0xfee0_0000, 0xfeef_ffff), kind }];
        let geometry = geometry(PageSizes::X86, &ranges, &msi).unwrap();
        assert_eq!(geometry.aperture, range(0, (1 << 39) - 1));
        assert_eq!(*geometry.reserved, msi);
        assert!(super::geometry(PageSizes::X86, &[], &msi).is_none());
        let whole = super::geometry(PageSizes::X86, &[Range::ALL], &msi).unwrap();
        assert_eq!((whole.aperture, whole.reserved.len()), (Range::ALL, 0));
    }

    proptest! {
        #[test]
        fn what_is_mappable_is_what_the_ranges_hold(
            base in prop_oneof![Just(0_u64), Just(u64::MAX - 63)],
            ranges in prop::collection::vec((0..64_u64, 0..20_u64), 1..6),
            regions in prop::collection::vec((0..64_u64, 0..20_u64, 0..3_u8), 0..6),
        ) {
            let at = |first: u64, len: u64| range(base + first, base + (first + len).min(63));
            let ranges: Vec<_> = ranges.into_iter().map(|(first, len)| at(first, len)).collect();
            let kinds = [ReservedKind::Reserved, ReservedKind::Msi, ReservedKind::Direct];
            let regions: Vec<_> = regions.into_iter().map(|(first, len, kind)| {
                ReservedRegion { range: at(first, len), kind: kinds[usize::from(kind)] }
            }).collect();
            let geometry = geometry(PageSizes::X86, &ranges, &regions).unwrap();
            prop_assert!(geometry.reserved.windows(2)
                .all(|two| two[0].range.last() < two[1].range.first()));
            for page in 0..64 {
                let iova = Iova(base + page);
                let mappable = ranges.iter().any(|range| range.contains(iova));
                prop_assert_eq!(geometry.is_mappable(iova), mappable);
                let held = geometry.reserved.iter().find(|region| region.range.contains(iova));
                let mut named = regions.iter().filter(|region| region.range.contains(iova)).peekable();
                if let Some(held) = held {
                    let named_so = match named.peek() {
                        None => held.kind == ReservedKind::Reserved,
                        Some(_) => named.any(|region| region.kind == held.kind),
                    };
                    prop_assert!(named_so, "{:?}", held);
                }
            }
        }
    }
}
