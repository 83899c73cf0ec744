//! Reserved regions: what is left beside them, and the window for MSIs.

use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};

/// Where Linux puts the window for MSIs if the device names none (rule L66).
pub(super) const SOFTWARE_MSI: (u64, u64) = (0x800_0000, 1 << 20);

/// Adds the window for MSIs that Linux uses, unless there is one.
pub(super) fn add_software_msi(regions: &mut Vec<ReservedRegion>) {
    if !regions.iter().any(|region| region.kind == ReservedKind::Msi) {
        let (first, len) = SOFTWARE_MSI;
        let range = Range::from_len(Iova(first), len).expect("a legal range");
        regions.push(ReservedRegion { range, kind: ReservedKind::Msi });
        regions.sort_by_key(|region| region.range);
    }
}

/// `whole` without `regions`, which are in ascending order and grow to whole granules. Single bytes
/// between them, where a granule is one, are left out: no MAP can map them (rule V38).
pub(super) fn around(whole: Range, regions: &[ReservedRegion], granule: u64) -> Vec<Range> {
    let mask = granule - 1;
    let mut free = Vec::new();
    let mut next = Some(whole.first().0);
    for region in regions {
        let Some(from) = next else { break };
        let (first, last) = (region.range.first().0 & !mask, region.range.last().0 | mask);
        if let Some(before) = first.checked_sub(1)
            && let Some(range) = Range::new(Iova(from), Iova(before.min(whole.last().0)))
        {
            free.push(range);
        }
        next = last.checked_add(1).map(|after| after.max(from));
    }
    if let Some(range) = next.and_then(|from| Range::new(Iova(from), whole.last())) {
        free.push(range);
    }
    free.retain(|range| range.extent() > 0);
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    fn region(first: u64, last: u64) -> ReservedRegion {
        ReservedRegion { range: range(first, last), kind: ReservedKind::Reserved }
    }

    #[test]
    fn identity_mappings_leave_out_reserved_regions_rounded_outward() {
        // rule L66
        let regions = [region(0, 0x10), region(0x5800, 0x5fff), region(0x6000, 0x6001)];
        let free = around(range(0, u64::MAX), &regions, 0x1000);
        assert_eq!(free, [range(0x1000, 0x4fff), range(0x7000, u64::MAX)]);
        assert_eq!(around(Range::ALL, &[], 0x1000), [Range::ALL]);
        assert_eq!(around(Range::ALL, &[region(0, u64::MAX)], 0x1000), []);
        let high = [region(0x8000, u64::MAX)];
        assert_eq!(around(range(0, 0xffff), &high, 0x1000), [range(0, 0x7fff)]);
        // rule V38
        let bytes = [region(0, 7), region(9, 9), region(12, u64::MAX)];
        assert_eq!(around(Range::ALL, &bytes, 1), [range(10, 11)]);
        let below = [region(0, 0xfff), region(0x1000, 0x1fff)];
        assert_eq!(around(range(0x8000, 0xffff), &below, 0x1000), [range(0x8000, 0xffff)]);
    }
}
