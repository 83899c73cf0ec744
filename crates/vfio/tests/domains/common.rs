//! What the tests share.

use ringfence_iommu::{Domain, Gather, HostAddr, Iova, Map, Prot, Range, Result};
use ringfence_vfio::{Iommufd, Tuning, Type1, kernel::Id};
use ringfence_vfio_testing::fake::{self, FakeConfig, Group, Memory, Owner};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MERGE: Tuning = Tuning { merge: true, chunk: GIB };

pub(crate) type Kernel = fake::Type1;

/// A container over pretended memory, with one group; its owner may lock `pages`.
pub(crate) fn kernel(pages: u64) -> (Kernel, Owner) {
    container(pages, Memory::pretended(1 << 40))
}

/// As [`kernel`], over this process's memory.
pub(crate) fn process(pages: u64) -> (Kernel, Owner) {
    container(pages, Memory::process())
}

fn container(pages: u64, memory: Memory) -> (Kernel, Owner) {
    let owner = Owner::new(pages);
    let config = FakeConfig { owner: owner.clone(), memory, ..FakeConfig::default() };
    let kernel = fake::Type1::new(config);
    kernel.attach(&Group::default()).unwrap();
    (kernel, owner)
}

/// A domain over a container.
pub(crate) fn type1(kernel: &Kernel, tuning: Tuning) -> Type1<Kernel> {
    Type1::new(kernel.clone(), tuning).unwrap()
}

/// An iommufd with one device; its owner may lock `pages`.
pub(crate) struct Ioas {
    pub(crate) kernel: fake::Iommufd,
    pub(crate) device: Id,
    pub(crate) owner: Owner,
}

impl Ioas {
    pub(crate) fn new(pages: u64, memory: Memory) -> Ioas {
        let owner = Owner::new(pages);
        let kernel = fake::Iommufd::new(owner.clone(), memory);
        let device = kernel.bind(&Group::default(), true);
        Ioas { kernel, device, owner }
    }

    /// A domain over it, with the device attached.
    pub(crate) fn domain(&self, tuning: Tuning) -> Iommufd<fake::Iommufd> {
        let domain = Iommufd::new(self.kernel.clone(), tuning).unwrap();
        self.kernel.attach(self.device, domain.ioas()).unwrap();
        domain.refresh().unwrap();
        domain
    }
}

/// Whole pages of this process; returns the address of the first too.
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

/// A mapping to be made.
pub(crate) fn to(range: Range, target: HostAddr, prot: Prot) -> Map<HostAddr> {
    // SAFETY: the memory is pretended, or the test's own and mapped while the domain has it.
    unsafe { Map::of(range, target, prot) }
}

/// Maps and syncs.
pub(crate) fn map(domain: &impl Domain<Target = HostAddr>, range: Range, at: u64) -> Result<()> {
    domain.map(to(range, HostAddr(at), Prot::RW))?;
    domain.iotlb_sync_map(range).map(drop)
}

/// Unmaps and syncs.
pub(crate) fn unmap(domain: &impl Domain, range: Range) -> Result<u128> {
    let mut gather = Gather::new();
    let bytes = domain.unmap(range, &mut gather)?;
    domain.iotlb_sync(&mut gather)?;
    Ok(bytes)
}
