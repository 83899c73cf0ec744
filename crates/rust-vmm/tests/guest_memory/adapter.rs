//! rust-vmm's own `IommuMemory` over an IOTLB.

use std::sync::Arc;

use ringfence_rust_vmm::{Failure, UnleasedIommu};
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, IommuMemory, Permissions, iommu::Iommu,
};

use crate::front_end::*;

fn iommu_memory(bench: &Bench) -> IommuMemory<GuestMemoryMmap, UnleasedIommu> {
    let iommu = UnleasedIommu::new(Arc::clone(&bench.endpoint)).unwrap();
    IommuMemory::new((*bench.memory).clone(), iommu, true, ())
}

#[test]
fn it_reads_and_writes_over_entries_and_waits_for_misses() {
    let bench = bench();
    let memory = iommu_memory(&bench);
    bench.map(0x1000, 0x20_8000, PAGE);
    let front_end = |bench: &Bench, misses: Vec<_>| {
        // Unmaps the whole space before each update; no waiting access blocks that.
        bench.shootdown.wait(bench.unmap(0, u64::MAX));
        bench.map(0x1000, 0x20_8000, PAGE);
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_0000, PAGE));
    };
    bench.with_front_end(front_end, || {
        memory.write_slice(&[9; 16], GuestAddress(0x1ff8)).unwrap();
        assert_eq!(memory.read_obj::<[u8; 16]>(GuestAddress(0x1ff8)).unwrap(), [9; 16]);
    });
    let there = |gpa| bench.memory.read_obj::<[u8; 8]>(GuestAddress(gpa)).unwrap();
    assert_eq!((there(0x20_8ff8), there(0x20_0000)), ([9; 8], [9; 8]));
}

#[test]
fn what_vm_memory_gets_wrong_by_itself_is_right_over_it() {
    let bench = bench();
    let memory = iommu_memory(&bench);
    let iommu = memory.iommu();
    let near = GuestAddress(u64::MAX - 10);
    assert!(!memory.check_range(near, 4096, Permissions::ReadWrite));
    assert!(iommu.recover().is_some());
    assert!(memory.read(&mut [0; 4096], near).is_err());
    assert!(iommu.recover().is_some());
    bench.map(u64::MAX - 0xfff, 0x20_0000, PAGE);
    // A range that it cannot express is an error. Everything before the last byte works.
    assert!(memory.read_obj::<u64>(GuestAddress(u64::MAX - 7)).is_err());
    assert_eq!(iommu.failure(), Some(Failure::Overflow { addr: u64::MAX - 7, count: 8 }));
    assert!(memory.read_obj::<u8>(GuestAddress(u64::MAX - 7)).is_err(), "until it recovers");
    iommu.recover();
    assert_eq!(memory.read_obj::<u64>(GuestAddress(u64::MAX - 15)).unwrap(), 0x20_0ff0);
    for addr in [0, 0x5000, u64::MAX] {
        assert_eq!(memory.read(&mut [], GuestAddress(addr)).unwrap(), 0);
    }
    assert_eq!(iommu.failure(), None);
}

#[test]
fn an_invalidation_waits_for_the_iterator_and_no_longer() {
    // rule D15
    let bench = bench();
    bench.map(0x1000, 0x20_0000, PAGE);
    let iommu = UnleasedIommu::new(Arc::clone(&bench.endpoint)).unwrap();
    let found = iommu.translate(GuestAddress(0x1ff0), 8, Permissions::Read).unwrap();
    let token = bench.unmap(0x1000, PAGE);
    assert!(!bench.shootdown.is_over(token));
    let found: Vec<_> = found.map(|range| (range.base.0, range.length)).collect();
    assert_eq!(found, [(0x20_0ff0, 8)]);
    assert!(bench.shootdown.is_over(token));
    assert!(iommu.translate(GuestAddress(0x1ff0), 8, Permissions::Read).is_err());
}
