//! The suite for any domain, run on those over a kernel.

use ringfence_iommu::{Domain, HostAddr, Iova, Map, Prot, Range};
use ringfence_iommu_testing::suite::{MEMORY, Subject, pass};
use ringfence_vfio::Tuning;
use ringfence_vfio_testing::fake::{Memory, Refused};

use crate::common::{Ioas, MERGE, PAGE, memory, process, to, type1};

/// A domain, memory in which each word holds its own address, and a device that reads and writes
/// it.
struct Rig<D, R, W> {
    domain: D,
    first: u64,
    read: R,
    write: W,
}

impl<D, R, W> Subject for Rig<D, R, W>
where
    D: Domain<Target = HostAddr>,
    R: Fn(u64, &mut [u8]) -> Result<(), Refused>,
    W: Fn(u64, &[u8]) -> Result<(), Refused>,
{
    type Domain = D;
    fn domain(&self) -> &D {
        &self.domain
    }
    fn map(&self, range: Range, page: u64, prot: Prot) -> Map<HostAddr> {
        to(range, HostAddr(self.first + page * PAGE), prot)
    }
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64> {
        let mut word = [0; 8];
        (self.read)(iova.0, &mut word).ok()?;
        if prot.contains(Prot::WRITE) {
            (self.write)(iova.0, &word).ok()?;
        }
        Some(u64::from_ne_bytes(word))
    }
}

/// Memory for a suite.
fn words() -> (Vec<u8>, u64) {
    let (mut memory, first) = memory(MEMORY);
    let offset = first as usize - memory.as_ptr().addr();
    let words = memory[offset..offset + (MEMORY * PAGE) as usize].chunks_exact_mut(8);
    for (at, word) in (first..).step_by(8).zip(words) {
        word.copy_from_slice(&at.to_ne_bytes());
    }
    (memory, first)
}

fn passes(mut subject: impl Subject) {
    let left = pass(&mut subject).unwrap_or_else(|failed| panic!("{failed}"));
    // At most three checks do not apply: it keeps no list, its syncs never fail, and its last
    // granule may be out of reach.
    assert!(left.len() <= 3, "{left:?}");
}

#[test]
fn a_type1_container_keeps_it() {
    for tuning in [Tuning::default(), MERGE] {
        let (_memory, first) = words();
        let (fake, _owner) = process(1000);
        let domain = type1(&fake, tuning);
        let read = |iova, into: &mut [u8]| fake.dma_read(iova, into);
        let write = |iova, bytes: &[u8]| fake.dma_write(iova, bytes);
        passes(Rig { domain, first, read, write });
    }
}

#[test]
fn an_iommufd_keeps_it() {
    for tuning in [Tuning::default(), MERGE] {
        let (_memory, first) = words();
        let ioas = Ioas::new(1000, Memory::process());
        let domain = ioas.domain(tuning);
        let read = |iova, into: &mut [u8]| ioas.kernel.dma_read(ioas.device, iova, into);
        let write = |iova, bytes: &[u8]| ioas.kernel.dma_write(ioas.device, iova, bytes);
        passes(Rig { domain, first, read, write });
    }
}
