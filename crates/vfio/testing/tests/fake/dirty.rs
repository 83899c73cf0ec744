//! Dirty tracking.

use std::sync::Arc;

use ringfence_iommu::Range;
use ringfence_vfio::kernel::{Bitmap, KernelResult, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{FakeConfig, Group, Memory, Step, Type1};
use rustix::io::Errno;

use crate::common::{PAGE, RW, group, map, pages, pretended, unmap};

/// Reads a bitmap into words that hold `before`.
fn read(kernel: &Type1, iova: u64, pages: u64, before: &[u64]) -> KernelResult<Vec<u64>> {
    let mut words = before.to_vec();
    let bitmap = Bitmap { page: PAGE, words: &mut words };
    kernel.dirty(iova * PAGE, pages * PAGE, bitmap)?;
    Ok(words)
}

/// A container with an emulated group only.
fn emulated(memory: Memory) -> Type1 {
    let kernel = Type1::new(FakeConfig { memory, ..FakeConfig::default() });
    let notify = |kernel: &Type1, iova, size| kernel.unpin_pages(iova, size / PAGE);
    kernel.attach_emulated(1, Arc::new(notify)).unwrap();
    kernel
}

// rule L63
#[test]
fn a_group_whose_writes_are_unknown_makes_every_mapped_page_dirty() {
    let (kernel, _) = pretended(1000, pages(1000));
    map(&kernel, 3, 0, 70).unwrap();
    map(&kernel, 80, 0, 2).unwrap();
    assert_eq!(read(&kernel, 0, 128, &[0, 0]), Err(Errno::INVAL), "not tracking");
    kernel.track_dirty(true).unwrap();
    kernel.track_dirty(true).unwrap();
    // Bits before an unaligned start stay; those after it in the mapping's words are overwritten;
    // holes keep theirs.
    let words = read(&kernel, 0, 192, &[0b101, 0, 7]).unwrap();
    assert_eq!(words, [u64::MAX << 3 | 0b101, 0b1_1111_1111 | 0b11 << 16, 7]);
    assert_eq!(read(&kernel, 3, 70, &[0, 0]).unwrap(), [u64::MAX, 0b11_1111]);
    // Still dirty: the devices' writes are not known.
    assert_eq!(read(&kernel, 3, 70, &[0, 0]).unwrap(), [u64::MAX, 0b11_1111]);
    kernel.track_dirty(false).unwrap();
    kernel.track_dirty(false).unwrap();
    assert_eq!(read(&kernel, 0, 128, &[0, 0]), Err(Errno::INVAL));
}

// rule L63
#[test]
fn a_range_must_fit_the_mappings_the_granule_and_the_bitmap() {
    let (kernel, _) = pretended(1000, pages(1000));
    map(&kernel, 8, 0, 8).unwrap();
    kernel.track_dirty(true).unwrap();
    let read =
        |iova, size, page, words: &mut [u64]| kernel.dirty(iova, size, Bitmap { page, words });
    let good = (8 * PAGE, 8 * PAGE, PAGE);
    assert_eq!(read(good.0, good.1, good.2, &mut [0]), Ok(()));
    for (iova, size, page) in [
        (9 * PAGE, 7 * PAGE, PAGE),
        (8 * PAGE, 7 * PAGE, PAGE),
        (8 * PAGE + 1, 8 * PAGE, PAGE),
        (8 * PAGE, 8 * PAGE + 1, PAGE),
        (8 * PAGE, 0, PAGE),
        (8 * PAGE, 8 * PAGE, 2 * PAGE),
        (8 * PAGE, 8 * PAGE, 2048),
        (8 * PAGE, 8 * PAGE, 0),
        (8 * PAGE, 65 * PAGE, PAGE),
        (!(PAGE - 1), 2 * PAGE, PAGE),
    ] {
        assert_eq!(
            read(iova, size, page, &mut [0]),
            Err(Errno::INVAL),
            "{iova:#x} {size:#x} {page}"
        );
    }
    assert_eq!(read(good.0, good.1, good.2, &mut []), Err(Errno::INVAL));
    // 256 MiB hold 2^31 bits, of which at most 2^31 - 1 may be requested; a longer bitmap is
    // refused.
    let info = kernel.info().unwrap().dirty.unwrap();
    assert_eq!((info.page_sizes, info.max_bytes), (PAGE, 1 << 28));
}

// rule L63
#[test]
fn what_is_pinned_externally_stays_dirty_and_the_rest_is_clean_after_a_read() {
    let mut buffer = vec![0_u8; 65 * PAGE as usize];
    let vaddr = (buffer.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
    let kernel = emulated(Memory::process());
    // SAFETY: the buffer outlives the container, and its bytes are not read.
    unsafe { kernel.map(RW, 0, vaddr, 64 * PAGE) }.unwrap();
    kernel.pin_pages(1, 2 * PAGE, 1, RW).unwrap();
    kernel.track_dirty(true).unwrap();
    kernel.pin_pages(1, 60 * PAGE, 2, RW).unwrap();
    kernel.rw_write(10 * PAGE - 1, &[1, 2]).unwrap();
    kernel.rw_read(20 * PAGE, &mut [0; 2]).unwrap();
    let pinned = 1 << 2 | 0b11 << 60;
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![pinned | 0b11 << 9]));
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![pinned]));
    kernel.unpin_pages(60 * PAGE, 2);
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![pinned]), "it was pinned since the last read");
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![1 << 2]));
    // A group behind an IOMMU makes everything dirty; after it is detached, its writes are still
    // not known.
    kernel.attach(&Group::default()).unwrap();
    kernel.attach(&group(7)).unwrap();
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![u64::MAX]));
    // The writes of a group that pins pages are known.
    kernel.pin_pages(0, 2 * PAGE, 1, RW).unwrap();
    kernel.detach(7).unwrap();
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![u64::MAX]));
    assert_eq!(read(&kernel, 0, 64, &[0]), Ok(vec![1 << 2]));
    drop(buffer);
}

// rule L63
#[test]
fn an_unmap_with_get_dirty_reports_before_the_mapping_goes() {
    let (kernel, _) = pretended(1000, pages(1000));
    map(&kernel, 10, 0, 4).unwrap();
    let unmap = |iova: u64, pages: u64, page, words: &mut [u64]| {
        let bitmap = Some(Bitmap { page, words });
        kernel.unmap(UnmapFlags::GET_DIRTY, iova * PAGE, pages * PAGE, bitmap)
    };
    assert_eq!(unmap(8, 8, PAGE, &mut [0]), Err(Errno::INVAL), "not tracking");
    kernel.track_dirty(true).unwrap();
    assert_eq!(unmap(8, 8, 2 * PAGE, &mut [0]), Err(Errno::INVAL));
    assert_eq!(unmap(8, 65, PAGE, &mut [0]), Err(Errno::INVAL), "it does not fit");
    assert_eq!(kernel.unmap(UnmapFlags::GET_DIRTY, 8 * PAGE, 8 * PAGE, None), Err(Errno::INVAL));
    assert_eq!(kernel.mappings(), 1);
    let mut words = [0];
    assert_eq!(unmap(8, 8, PAGE, &mut words), Ok(4 * PAGE));
    assert_eq!((words, kernel.mappings()), ([0b11_1100], 0));
}

// rule L63
#[test]
fn without_memory_for_a_bitmap_nothing_is_begun() {
    let (kernel, owner) = pretended(1000, pages(1000));
    map(&kernel, 0, 0, 4).unwrap();
    map(&kernel, 10, 0, 4).unwrap();
    kernel.fail(Step::Bitmap, 2);
    assert_eq!(kernel.track_dirty(true), Err(Errno::NOMEM));
    assert_eq!(read(&kernel, 0, 64, &[0]), Err(Errno::INVAL));
    kernel.track_dirty(true).unwrap();
    kernel.fail(Step::Bitmap, 1);
    assert_eq!(map(&kernel, 20, 0, 4), Err(Errno::NOMEM));
    assert_eq!((owner.used(), kernel.pinned(), kernel.mappings()), (8, 8, 2));
    assert_eq!(unmap(&kernel, 20, 4), Ok(0));
}

// rule L63
#[test]
fn a_mapping_has_2_to_the_31_less_1_pages_at_most_while_it_is_tracked() {
    let kernel = emulated(pages(1));
    let wide = (1_u64 << 31) * PAGE;
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    let map = |iova, size| unsafe { kernel.map(RW, iova, 0, size) };
    map(0, wide).unwrap();
    assert_eq!(kernel.track_dirty(true), Err(Errno::INVAL));
    unmap(&kernel, 0, 1 << 31).unwrap();
    map(0, wide - PAGE).unwrap();
    kernel.track_dirty(true).unwrap();
    assert_eq!(map(wide, wide), Err(Errno::INVAL));
    // All of it: more pages than a bitmap can have.
    let all = Range::ALL.extent() & !(PAGE - 1);
    assert_eq!(kernel.dirty(0, all, Bitmap { page: PAGE, words: &mut [0] }), Err(Errno::INVAL));
}
