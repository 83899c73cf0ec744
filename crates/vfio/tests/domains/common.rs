//! What the tests share.

use std::sync::Arc;

use ringfence_iommu::{Domain, Gather, HostAddr, Iova, Prot, Range, Result};
use ringfence_vfio::{
    Iommufd, Tuning, Type1,
    fake::{self, Config, Group, Memory, Owner},
    kernel::{Answer, Bitmap, Id, IommufdKernel, IovaRanges, MapFlags, Type1Kernel, UnmapFlags},
};
use rustix::io::Errno;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MERGE: Tuning = Tuning { merge: true, chunk: GIB };

pub(crate) type Kernel = Arc<fake::Type1>;

/// A container over memory that nobody has, with one group; its owner may lock `pages`.
pub(crate) fn kernel(pages: u64) -> (Kernel, Owner) {
    container(pages, Memory::pretended(1 << 40))
}

/// As [`kernel`], over this process's memory.
pub(crate) fn process(pages: u64) -> (Kernel, Owner) {
    container(pages, Memory::process())
}

fn container(pages: u64, memory: Memory) -> (Kernel, Owner) {
    let owner = Owner::new(pages);
    let config = Config { owner: owner.clone(), memory, ..Config::default() };
    let kernel = fake::Type1::new(config);
    kernel.attach(&Group::default()).unwrap();
    (Arc::new(kernel), owner)
}

/// A domain over it.
pub(crate) fn type1(kernel: &Kernel, tuning: Tuning) -> Type1<Kernel> {
    // SAFETY: the memory is pretended, or the test's own and mapped while it has it.
    unsafe { Type1::new(Arc::clone(kernel), tuning) }.unwrap()
}

/// A domain over an address space that is a container in truth.
pub(crate) fn iommufd(kernel: &Kernel, tuning: Tuning) -> Iommufd<Ioas> {
    // SAFETY: as above.
    unsafe { Iommufd::new(Ioas(Arc::clone(kernel)), tuning) }.unwrap()
}

/// Pages of this process, whole ones: where they begin.
pub(crate) fn memory(pages: u64) -> (Vec<u8>, u64) {
    let memory = vec![0_u8; ((pages + 1) * PAGE) as usize];
    let first = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
    (memory, first)
}

/// `pages` pages from page `first` on.
pub(crate) fn range(first: u64, pages: u64) -> Range {
    Range::from_len(Iova(first * PAGE), pages * PAGE).unwrap()
}

pub(crate) fn bytes(first: u64, len: u64) -> Range {
    Range::from_len(Iova(first), len).unwrap()
}

/// Maps and syncs.
pub(crate) fn map(domain: &impl Domain<Target = HostAddr>, range: Range, to: u64) -> Result<()> {
    domain.map_pages(range, HostAddr(to), Prot::RW)?;
    domain.iotlb_sync_map(range)
}

/// Unmaps and syncs.
pub(crate) fn unmap(domain: &impl Domain, range: Range) -> Result<u128> {
    let mut gather = Gather::new();
    let bytes = domain.unmap_pages(range, &mut gather)?;
    domain.iotlb_sync(&mut gather)?;
    Ok(bytes)
}

/// An iommufd of one address space, in the container of a fake kernel.
#[derive(Debug)]
pub(crate) struct Ioas(pub(crate) Kernel);

const IOAS: Id = Id(1);
const HWPT: Id = Id(2);

impl IommufdKernel for Ioas {
    fn new_ioas(&self) -> Answer<Id> {
        Ok(IOAS)
    }
    fn destroy(&self, _id: Id) -> Answer<()> {
        Ok(())
    }
    fn iova_ranges(&self, _ioas: Id) -> Answer<IovaRanges> {
        let ranges = self.0.info()?.ranges.ok_or(Errno::NOENT)?;
        Ok(IovaRanges { ranges, alignment: PAGE })
    }
    unsafe fn map(
        &self,
        ioas: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> Answer<u64> {
        assert_eq!(ioas, IOAS);
        let iova = iova.ok_or(Errno::OPNOTSUPP)?;
        // SAFETY: the caller's promise.
        unsafe { self.0.map(flags, iova, vaddr, size) }.map(|()| iova)
    }
    fn unmap(&self, ioas: Id, iova: u64, size: u64) -> Answer<u64> {
        assert_eq!(ioas, IOAS);
        let answer = match (iova, size) {
            (0, u64::MAX) => self.0.unmap(UnmapFlags::ALL, 0, 0, None),
            (iova, size) => self.0.unmap(UnmapFlags::empty(), iova, size, None),
        };
        answer.and_then(|bytes| if bytes == 0 { Err(Errno::NOENT) } else { Ok(bytes) })
    }
    fn new_hwpt(&self, _device: Id, ioas: Id, dirty: bool) -> Answer<Id> {
        assert_eq!(ioas, IOAS);
        if dirty { Ok(HWPT) } else { Err(Errno::INVAL) }
    }
    fn track_dirty(&self, hwpt: Id, on: bool) -> Answer<()> {
        assert_eq!(hwpt, HWPT);
        self.0.track_dirty(on)
    }
    fn dirty(&self, hwpt: Id, iova: u64, size: u64, dirty: Bitmap<'_>) -> Answer<()> {
        assert_eq!(hwpt, HWPT);
        self.0.dirty(iova, size, dirty)
    }
}
