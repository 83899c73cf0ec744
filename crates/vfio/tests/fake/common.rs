//! What the tests share.

use ringfence_iommu::{Iova, Range};
use ringfence_vfio::{
    fake::{Config, Group, Memory, Owner, Type1},
    kernel::{Answer, MapFlags, Type1Kernel, UnmapFlags},
};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const RW: MapFlags = MapFlags::READ.union(MapFlags::WRITE);

/// A container for memory that nobody has, with its owner and one group.
pub(crate) fn pretended(limit: u64, memory: Memory) -> (Type1, Owner) {
    let owner = Owner::new(limit);
    let kernel = Type1::new(Config { owner: owner.clone(), memory, ..Config::default() });
    kernel.attach(&Group::default()).unwrap();
    (kernel, owner)
}

/// So many pages of pretended memory.
pub(crate) fn pages(pages: u64) -> Memory {
    Memory::pretended(pages)
}

/// Maps pages: `iova` and `vaddr` are numbers of pages.
pub(crate) fn map(kernel: &Type1, iova: u64, vaddr: u64, pages: u64) -> Answer<()> {
    // SAFETY: the memory is pretended: nobody reaches a byte of it.
    unsafe { kernel.map(RW, iova * PAGE, vaddr * PAGE, pages * PAGE) }
}

/// Unmaps pages.
pub(crate) fn unmap(kernel: &Type1, iova: u64, pages: u64) -> Answer<u64> {
    let unmapped = kernel.unmap(UnmapFlags::empty(), iova * PAGE, pages * PAGE, None)?;
    assert_eq!(unmapped % PAGE, 0);
    Ok(unmapped / PAGE)
}

/// The range of pages.
#[expect(dead_code)]
pub(crate) fn range(first: u64, pages: u64) -> Range {
    Range::from_len(Iova(first * PAGE), pages * PAGE).unwrap()
}
