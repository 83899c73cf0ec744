//! Whatever the arguments, a call returns a result.

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};
use ringfence_vfio::kernel::{Bitmap, Id, IommufdKernel, MapFlags, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{FakeConfig, Group, Iommufd, Owner, Type1};

use crate::common::{PAGE, pages};

/// A number near one of the places where arithmetic wraps.
fn number() -> impl Strategy<Value = u64> {
    let edges = [0, 1, PAGE, 16 * PAGE, 1 << 31, 0xfee0_0000, 1 << 39, 1 << 52, 1 << 63, u64::MAX];
    let near = (prop::sample::select(edges.to_vec()), -2_i64..3, -2_i64..3);
    let near = near.prop_map(|(edge, pages, bytes)| {
        edge.wrapping_add_signed(pages * 4096).wrapping_add_signed(bytes * bytes.abs() / 2)
    });
    prop_oneof![
        4 => (0..64_u64).prop_map(|page| page * PAGE),
        4 => near.clone().prop_map(|at| at & !(PAGE - 1)),
        1 => near,
        1 => any::<u64>(),
    ]
}

/// The result does not matter, only that there is one.
fn seen<T>(_: T) {}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_arguments_have_a_result(
        calls in prop::collection::vec((0..10_u8, any::<u32>(), number(), number(), number()), 1..40),
        v1 in prop::bool::weighted(0.1),
    ) {
        let owner = Owner::new(1 << 20);
        let memory = pages(1 << 16);
        let config = FakeConfig { v1, owner: owner.clone(), memory, budget: 5, ..FakeConfig::default() };
        let kernel = Type1::new(config);
        for (call, bits, a, b, c) in calls {
            let mut words = vec![0; (c % 9) as usize];
            let page = if bits & 16 == 0 { PAGE } else { b };
            let bitmap = Bitmap { page, words: &mut words };
            // Mostly flags that are defined.
            let flags = if bits & 0x300 == 0 { bits } else { [1, 2, 3, 3, 4, 7, 0, 3][(bits & 7) as usize] };
            match call {
                // SAFETY: the memory is pretended: no byte of it is ever accessed.
                0..=2 => seen(unsafe { kernel.map(MapFlags::from_bits_retain(flags), a, b, c) }),
                3 | 4 => {
                    let flags = UnmapFlags::from_bits_retain(bits & 0x307 & !(bits >> 4));
                    let bitmap = (bits & 32 == 0).then_some(bitmap);
                    if let Ok(bytes) = kernel.unmap(flags, a, b, bitmap) {
                        prop_assert!(bytes % PAGE == 0);
                    }
                }
                5 => seen(kernel.track_dirty(bits & 1 == 0)),
                6 => seen(kernel.dirty(a, b, bitmap)),
                7 => {
                    let range = |x: u64, y: u64| Range::new(Iova(x.min(y)), Iova(x.max(y))).unwrap();
                    let reserved = vec![ReservedRegion { range: range(b, c), kind: ReservedKind::Msi }];
                    seen(kernel.attach(&Group {
                        id: bits & 3,
                        iommu: bits >> 2 & 3,
                        aperture: range(a, !b),
                        reserved: if bits & 16 == 0 { vec![] } else { reserved },
                        page_sizes: if bits & 32 == 0 { !(PAGE - 1) } else { a },
                        superpages: bits & 64 == 0,
                        remaps_interrupts: bits & 128 == 0,
                    }));
                }
                8 => {
                    let gives_up = |kernel: &Type1, iova, size| kernel.unpin_pages(iova, size / PAGE);
                    seen(kernel.attach_emulated(bits & 7, Arc::new(gives_up)));
                    seen(kernel.pin_pages(bits & 7, a, b >> 12, MapFlags::from_bits_retain(bits & 3)));
                    kernel.unpin_pages(c, b);
                }
                _ => {
                    seen(kernel.dma_read(a, &mut [0; 3]));
                    seen(kernel.dma_write(b, &[0; 3]));
                    seen(kernel.rw_write(c, &[0; 3]));
                    if bits & 7 == 0 {
                        seen(kernel.detach(bits >> 3 & 7));
                    }
                }
            }
            prop_assert!(kernel.mappings() <= 5);
        }
        (0..8).for_each(|id| seen(kernel.detach(id)));
        prop_assert_eq!((kernel.mappings(), kernel.pinned(), owner.used()), (0, 0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn any_arguments_of_an_iommufd_have_a_result(
        calls in prop::collection::vec((0..10_u8, any::<u32>(), number(), number(), number()), 1..40),
    ) {
        let owner = Owner::new(1 << 20);
        let kernel = Iommufd::new(owner.clone(), pages(1 << 16));
        let mut mapped: Vec<Range> = Vec::new();
        for (call, bits, a, b, c) in calls {
            // Objects of all kinds, and some that do not exist.
            let [one, two] = [Id::new(bits & 7), Id::new(bits >> 3 & 7)];
            let flags = if bits & 0xf00 == 0 { bits } else { 1 + bits % 3 };
            match call {
                0 => seen(kernel.new_ioas()),
                1 | 2 => {
                    let flags = MapFlags::from_bits_retain(flags);
                    let iova = (bits & 64 == 0).then_some(a);
                    // SAFETY: the memory is pretended: no byte of it is ever accessed.
                    let at = unsafe { kernel.map(one, flags, iova, b, c) };
                    mapped.extend(at.ok().and_then(|at| Range::from_len(Iova(at), c)));
                }
                3 => {
                    seen(kernel.unmap(one, a, b));
                    // Also what is mapped.
                    let range = mapped.get(bits as usize % (mapped.len() + 1));
                    seen(range.map(|range| kernel.unmap(two, range.first().0, range.extent() + 1)));
                }
                4 => {
                    let range = Range::new(Iova(a.min(b)), Iova(a.max(b))).unwrap();
                    let reserved = vec![ReservedRegion { range, kind: ReservedKind::Msi }];
                    let group = Group {
                        iommu: bits & 3,
                        aperture: Range::new(Iova(0), Iova(c)).unwrap(),
                        reserved: if bits & 4 == 0 { vec![] } else { reserved },
                        page_sizes: if bits & 8 == 0 { !(PAGE - 1) } else { a },
                        ..Group::default()
                    };
                    seen(kernel.bind(&group, bits & 16 == 0));
                }
                5 => seen((kernel.attach(one, two), kernel.new_hwpt(two, one, bits & 64 == 0))),
                6 => seen((kernel.detach(one), kernel.track_dirty(two, bits & 64 == 0))),
                7 => {
                    let page = if bits & 64 == 0 { PAGE } else { c };
                    let words = &mut vec![0; (c % 9) as usize];
                    seen(kernel.dirty(one, a, b, Bitmap { page, words }));
                }
                8 => {
                    let range = Range::new(Iova(a.min(b)), Iova(a.max(b))).unwrap();
                    seen((kernel.allow(one, &[range]), kernel.iova_ranges(two)));
                }
                _ => {
                    seen((kernel.dma_read(one, a, &mut [0; 3]), kernel.dma_write(two, b, &[0; 3])));
                    seen((bits & 64 == 0).then(|| kernel.destroy(one)));
                }
            }
        }
        // Everything is removed in the end, and nothing stays pinned.
        (0..100).for_each(|id| seen(kernel.detach(Id::new(id))));
        for _ in 0..2 {
            (0..100).for_each(|id| seen((kernel.unmap(Id::new(id), 0, u64::MAX), kernel.destroy(Id::new(id)))));
        }
        prop_assert_eq!((kernel.pinned(), owner.used()), (0, 0));
    }
}
