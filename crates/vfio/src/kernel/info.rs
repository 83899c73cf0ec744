//! A type1 container's reply to `VFIO_IOMMU_GET_INFO`.

use std::mem::offset_of;

use ringfence_iommu::{Iova, Range};
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, vfio_iommu_type1_info,
    vfio_iommu_type1_info_cap_iova_range, vfio_iommu_type1_info_cap_migration,
    vfio_iommu_type1_info_dma_avail,
};

use super::{
    DirtyInfo, Type1Info,
    chain::{Capability, Chain, u32_at, u64_at},
};

/// Parses it.
pub(super) fn parse(info_bytes: &[u8]) -> Type1Info {
    let flags = u32_at(info_bytes, offset_of!(vfio_iommu_type1_info, flags)).unwrap_or(0);
    let mut info = Type1Info::default();
    if flags & VFIO_IOMMU_INFO_PGSIZES != 0 {
        let at = offset_of!(vfio_iommu_type1_info, iova_pgsizes);
        info.page_sizes = u64_at(info_bytes, at).unwrap_or(0);
    }
    if flags & VFIO_IOMMU_INFO_CAPS != 0 {
        let at = offset_of!(vfio_iommu_type1_info, cap_offset);
        for capability in Chain::new(info_bytes, u32_at(info_bytes, at).unwrap_or(0)) {
            note(&mut info, &capability);
        }
    }
    info
}

fn note(info: &mut Type1Info, capability: &Capability<'_>) {
    match capability.id {
        VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
            type Cap = vfio_iommu_type1_info_cap_iova_range;
            let count = u32_at(capability.bytes, offset_of!(Cap, nr_iovas)).unwrap_or(0);
            let pairs = capability.pairs(offset_of!(Cap, iova_ranges), count);
            let mut ranges: Vec<_> =
                pairs.filter_map(|(first, last)| Range::new(Iova(first), Iova(last))).collect();
            ranges.sort();
            info.ranges = Some(ranges);
        }
        VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION => {
            type Cap = vfio_iommu_type1_info_cap_migration;
            let page_sizes = u64_at(capability.bytes, offset_of!(Cap, pgsize_bitmap));
            let max_bytes = u64_at(capability.bytes, offset_of!(Cap, max_dirty_bitmap_size));
            let both = page_sizes.zip(max_bytes);
            info.dirty = both.map(|(page_sizes, max_bytes)| DirtyInfo { page_sizes, max_bytes });
        }
        VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => {
            let at = offset_of!(vfio_iommu_type1_info_dma_avail, avail);
            info.available = u32_at(capability.bytes, at);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two numbers that follow each other in memory.
    fn both(first: u32, second: u32) -> u64 {
        u64::from_ne_bytes([first.to_ne_bytes(), second.to_ne_bytes()].concat().try_into().unwrap())
    }

    /// A reply with every capability, as a kernel lays it out.
    fn info_bytes() -> Vec<u8> {
        let mut words =
            vec![both(0, VFIO_IOMMU_INFO_PGSIZES | VFIO_IOMMU_INFO_CAPS), 0x4020_1000, both(24, 0)];
        let header = |id: u32, next: u32| both(1 << 16 | id, next);
        words.extend([header(VFIO_IOMMU_TYPE1_INFO_CAP_MIGRATION, 56), 0, 0x1000, 0x1000_0000]);
        words.extend([header(VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, 72), 65_535]);
        words.extend([header(VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, 0), 2]);
        words.extend([0xfef0_0000, u64::MAX, 0, 0xfedf_ffff]);
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn info_is_read_as_it_is_laid_out() {
        let range = |first, last| Range::new(Iova(first), Iova(last)).unwrap();
        assert_eq!(
            parse(&info_bytes()),
            Type1Info {
                page_sizes: 0x4020_1000,
                ranges: Some(vec![range(0, 0xfedf_ffff), range(0xfef0_0000, u64::MAX)]),
                available: Some(65_535),
                dirty: Some(DirtyInfo { page_sizes: 0x1000, max_bytes: 0x1000_0000 }),
            }
        );
        // A kernel from before capabilities reports only its page sizes.
        let old = parse(&info_bytes()[..16]);
        assert_eq!(old, Type1Info { page_sizes: 0x4020_1000, ..Type1Info::default() });
    }

    proptest! {
        #[test]
        fn no_info_is_too_strange(
            flips in prop::collection::vec((0..120_usize, any::<u8>()), 0..8),
            cut in 0..130_usize,
        ) {
            let mut info_bytes = info_bytes();
            for (at, byte) in flips {
                if let Some(there) = info_bytes.get_mut(at) {
                    *there = byte;
                }
            }
            info_bytes.truncate(cut);
            let info = parse(&info_bytes);
            prop_assert!(info.ranges.unwrap_or_default().is_sorted());
        }
    }
}
