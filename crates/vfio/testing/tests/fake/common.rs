//! What the tests share.

use ringfence_iommu::{Iova, Range};
use ringfence_vfio::kernel::{KernelResult, MapFlags, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{Event, FakeConfig, Group, Memory, Owner, Type1};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const RW: MapFlags = MapFlags::READ.union(MapFlags::WRITE);

/// A container for pretended memory, with its owner and one group.
pub(crate) fn pretended(limit: u64, memory: Memory) -> (Type1, Owner) {
    let owner = Owner::new(limit);
    let kernel = Type1::new(FakeConfig { owner: owner.clone(), memory, ..FakeConfig::default() });
    kernel.attach(&Group::default()).unwrap();
    (kernel, owner)
}

/// `pages` pages of pretended memory.
pub(crate) fn pages(pages: u64) -> Memory {
    Memory::pretended(pages)
}

/// Maps pages: `iova` and `vaddr` are numbers of pages.
pub(crate) fn map(kernel: &Type1, iova: u64, vaddr: u64, pages: u64) -> KernelResult<()> {
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    unsafe { kernel.map(RW, iova * PAGE, vaddr * PAGE, pages * PAGE) }
}

/// Unmaps pages.
pub(crate) fn unmap(kernel: &Type1, iova: u64, pages: u64) -> KernelResult<u64> {
    let unmapped = kernel.unmap(UnmapFlags::empty(), iova * PAGE, pages * PAGE, None)?;
    assert_eq!(unmapped % PAGE, 0);
    Ok(unmapped / PAGE)
}

/// The range of pages.
pub(crate) fn range(first: u64, pages: u64) -> Range {
    Range::from_len(Iova(first * PAGE), pages * PAGE).unwrap()
}

/// A group behind an IOMMU of its own.
pub(crate) fn group(id: u32) -> Group {
    Group { id, iommu: id, ..Group::default() }
}

/// Marks the addresses of mappings invalid; in pages.
pub(crate) fn invalidate(kernel: &Type1, iova: u64, pages: u64) -> KernelResult<u64> {
    Ok(kernel.unmap(UnmapFlags::VADDR, iova * PAGE, pages * PAGE, None)? / PAGE)
}

/// Gives a mapping another address; in pages.
pub(crate) fn revalidate(kernel: &Type1, iova: u64, vaddr: u64, pages: u64) -> KernelResult<()> {
    // SAFETY: the memory is pretended: no byte of it is ever accessed.
    unsafe { kernel.map(MapFlags::VADDR, iova * PAGE, vaddr * PAGE, pages * PAGE) }
}

/// Follows the log, and fails where a page is unpinned before every IOMMU has invalidated it (rule
/// L57), or more than 512 regions are gathered.
pub(crate) fn assert_invalidated_before_unpin(events: &[Event]) {
    // The unmapped ranges that each IOMMU's IOTLB may still hold.
    let mut stale: Vec<(u32, Range)> = Vec::new();
    let mut mapped: Vec<(u32, Range)> = Vec::new();
    for event in events {
        match *event {
            Event::Mapped { iommu, iova, pages, .. } => {
                mapped.push((iommu, range(iova / PAGE, pages)));
            }
            Event::Unmapped { iommu, iova, asked, removed } => {
                let gone = range(iova / PAGE, asked.max(removed));
                stale.push((iommu, gone));
                mapped.retain(|&(of, at)| of != iommu || !gone.covers(at));
            }
            Event::Synced { iommu, regions } => {
                assert!(regions <= 512, "{regions} regions for one sync");
                stale.retain(|&(of, _)| of != iommu);
            }
            Event::Unpinned { iova, pages, .. } => {
                let pages = range(iova / PAGE, pages);
                let reached = stale.iter().chain(&mapped).find(|(_, at)| at.overlaps(pages));
                assert_eq!(reached, None, "unpinned at {pages} but reachable");
            }
            _ => {}
        }
    }
}
