//! Which bytes an access reads and writes, and which accesses fail.

use std::{
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
};

use ringfence_iommu::{
    Domain, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, SoftDomain,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_mem::{Memory, Region};
use ringfence_rust_vmm::{Failure, IotlbAddressSpace, shared_regions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, Permissions,
    bitmap::{AtomicBitmap, Bitmap},
};

use crate::front_end::*;

#[test]
fn an_access_crosses_entries_and_regions_at_any_alignment() {
    // rule D23
    let bench = bench();
    // Three entries that are not adjacent in memory, and the first spans two regions.
    bench.map(0x4000, 0x10_7000, 0x2000);
    bench.map(0x6000, 0x20_0000, 0x1000);
    bench.map(0x7000, 0x20_8000, 0x1000);
    let memory = bench.space().memory();
    let mut whole = vec![0; 0x4000];
    memory.read_slice(&mut whole, GuestAddress(0x4000)).unwrap();
    let mut expected = vec![0; 0x4000];
    for (at, gpa, len) in
        [(0, 0x10_7000, 0x2000), (0x2000, 0x20_0000, 0x1000), (0x3000, 0x20_8000, 0x1000)]
    {
        bench.memory.read_slice(&mut expected[at..at + len], GuestAddress(gpa)).unwrap();
    }
    assert!(whole == expected);
    let mut part = [0; 0x1003];
    memory.read_slice(&mut part, GuestAddress(0x4fff)).unwrap();
    assert!(part[..] == expected[0xfff..0x2002]);
    memory.write_slice(&[7; 9], GuestAddress(0x5ffd)).unwrap();
    for (gpa, len) in [(0x10_8ffd, 3), (0x20_0000, 6)] {
        let mut written = [0; 9];
        bench.memory.read_slice(&mut written[..len], GuestAddress(gpa)).unwrap();
        assert_eq!(written[..len], [7; 9][..len]);
    }
    // Adjacent memory is one slice, and the end of a region ends a slice.
    let lens: Vec<_> = memory
        .get_slices(GuestAddress(0x4000), 0x4000, Permissions::ReadWrite)
        .unwrap()
        .map(|slice| slice.unwrap().len())
        .collect();
    assert_eq!(lens, [0x1000, 0x1000, 0x1000, 0x1000]);
    assert!(memory.check_range(GuestAddress(0x4001), 0x3fff, Permissions::ReadWrite));
    assert!(!memory.check_range(GuestAddress(0x4001), 0x4000, Permissions::ReadWrite));
    assert!(memory.physical_memory().is_none());
    assert_eq!(memory.check(), Ok(()), "a check is not an access");
}

#[test]
fn neighbours_in_memory_are_one_slice_however_many_entries_there_are() {
    let bench = bench();
    for page in 0..0x7000 / PAGE {
        bench.map(0x10_0000 + page * PAGE, 0x20_0000 + page * PAGE, PAGE);
    }
    let memory = bench.space().memory();
    let slices = memory.get_slices(GuestAddress(0x10_0123), 0x6000, Permissions::Read).unwrap();
    assert_eq!(slices.map(|slice| slice.unwrap().len()).collect::<Vec<_>>(), [0x6000]);
}

#[test]
fn nothing_is_accessed_anywhere() {
    let bench = bench();
    let memory = bench.space().memory();
    for addr in [0, 0x1234, u64::MAX] {
        let addr = GuestAddress(addr);
        assert!(memory.check_range(addr, 0, Permissions::ReadWrite));
        assert_eq!(memory.get_slices(addr, 0, Permissions::Write).unwrap().count(), 0);
        assert_eq!(memory.read(&mut [], addr).unwrap(), 0);
        memory.write_slice(&[], addr).unwrap();
    }
    assert_eq!(memory.check(), Ok(()));
}

#[test]
fn a_range_that_ends_with_the_last_address_works() {
    // rule D30
    let bench = bench();
    let top = u64::MAX - 0xfff;
    bench.map(top, 0x20_0000, PAGE);
    let memory = bench.space().memory();
    assert!(memory.check_range(GuestAddress(top), 4096, Permissions::ReadWrite));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(u64::MAX - 7)).unwrap(), 0x20_0ff8);
    memory.write_obj(1u8, GuestAddress(u64::MAX)).unwrap();
    assert_eq!(bench.memory.read_obj::<u8>(GuestAddress(0x20_0fff)).unwrap(), 1);
    assert!(!memory.check_range(GuestAddress(u64::MAX), 2, Permissions::Read));
    assert!(memory.read(&mut [0; 2], GuestAddress(u64::MAX)).is_err(), "it would wrap");
    let failure = Failure::Overflow { addr: u64::MAX, count: 2 };
    assert_eq!(memory.check(), Err(failure));
    // The whole space, as one identity entry.
    bench.unmap(0, 1);
    let token = bench.iotlb.update(Range::ALL, GuestPhys(0), Prot::RW).unwrap();
    drop(memory);
    bench.shootdown.wait(token);
    let memory = bench.space().memory();
    assert_eq!(memory.read_obj::<u64>(GuestAddress(0x20_1000)).unwrap(), 0x20_1000);
    assert!(memory.read_obj::<u64>(GuestAddress(u64::MAX - 7)).is_err(), "no memory there");
    assert_eq!(memory.check(), Err(Failure::OutsideMemory { addr: u64::MAX - 7 }));
}

#[test]
fn an_empty_iotlb_serves_nothing_at_the_top_and_no_range_panics() {
    // Properties that vm-memory's own `Iotlb` does not have.
    let bench = bench();
    let memory = bench.space().memory();
    let near = GuestAddress(u64::MAX - 10);
    assert!(!memory.check_range(near, 4096, Permissions::ReadWrite));
    assert!(!memory.check_range(near, 11, Permissions::ReadWrite));
    assert!(memory.read(&mut [0; 4096], near).is_err());
    // From 0x1000 to the end, and a length of nothing.
    bench.map(0x1000, 0x20_0000, PAGE);
    let token = bench.iotlb.invalidate(Range::new(Iova(0x1000), Iova(u64::MAX)).unwrap());
    bench.shootdown.wait(token.unwrap());
    assert_eq!(bench.iotlb.entries(), 0);
    assert!(Range::from_len(Iova(0x1000), 0).is_none());
}

#[test]
fn permissions_are_kept_and_a_failure_stays() {
    let bench = bench();
    bench.map_for(0, 0x20_0000, PAGE, Prot::READ);
    bench.map_for(PAGE, 0x20_1000, PAGE, Prot::WRITE);
    let space = bench.space();
    let memory = space.memory();
    assert!(memory.check_range(GuestAddress(0), 8, Permissions::Read));
    assert!(memory.check_range(GuestAddress(0), 8, Permissions::No));
    assert!(!memory.check_range(GuestAddress(0), 8, Permissions::ReadWrite));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(0)).unwrap(), 0x20_0000);
    memory.write_obj(5u64, GuestAddress(PAGE)).unwrap();
    let clone = memory.clone();
    // Across both: the second may not be read, so nothing of the first is either.
    let mut bytes = [0xaa; 16];
    assert!(memory.read(&mut bytes, GuestAddress(PAGE - 8)).is_err());
    assert_eq!(bytes, [0xaa; 16]);
    let failure = Failure::Refused { addr: PAGE };
    assert_eq!((memory.check(), clone.check()), (Err(failure), Err(failure)));
    assert!(clone.read_obj::<u64>(GuestAddress(0)).is_err());
    assert!(clone.get_slices(GuestAddress(0), 0, Permissions::Read).is_err());
    assert!(!clone.check_range(GuestAddress(0), 0, Permissions::Read));
    // Another guard is another request.
    assert_eq!(space.memory().read_obj::<u64>(GuestAddress(0)).unwrap(), 0x20_0000);
    assert_eq!(space.counters().failures.load(Ordering::Relaxed), 1);
}

#[test]
fn a_number_in_two_places_is_refused_and_not_torn() {
    let bench = bench();
    bench.map(0, 0x20_0000, PAGE);
    bench.map(PAGE, 0x20_8000, PAGE);
    let memory = bench.space().memory();
    let order = Ordering::Relaxed;
    assert_eq!(memory.load::<u64>(GuestAddress(PAGE - 8), order).unwrap(), 0x20_0ff8);
    assert!(memory.load::<u64>(GuestAddress(PAGE - 4), order).is_err());
    assert!(memory.store(0u64, GuestAddress(PAGE - 4), order).is_err());
    assert_eq!(memory.read_obj::<u64>(GuestAddress(PAGE)).unwrap(), 0x20_8000);
}

#[test]
fn what_leads_out_of_memory_is_an_error_even_in_part() {
    let bench = bench();
    bench.map(0, 0x20_f000, 2 * PAGE);
    let memory = bench.space().memory();
    assert!(memory.check_range(GuestAddress(0), 4096, Permissions::Read));
    assert!(!memory.check_range(GuestAddress(0), 4097, Permissions::Read));
    assert!(memory.read(&mut [0; 4097], GuestAddress(0)).is_err());
    assert_eq!(memory.check(), Err(Failure::OutsideMemory { addr: 0 }));
}

#[test]
fn what_is_written_is_marked_where_it_lies_in_memory() {
    let ranges = [(GuestAddress(0x10_0000), 0x8000)];
    let plain = Arc::new(GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap());
    let bench = bench();
    bench.map(0x4000, 0x10_2000, PAGE);
    bench.map(0x5000, 0x10_6000, PAGE);
    let space = IotlbAddressSpace::new(Arc::clone(&bench.endpoint), Arc::clone(&plain)).unwrap();
    let memory = space.memory();
    memory.read_slice(&mut [0; 0x2000], GuestAddress(0x4000)).unwrap();
    let dirty = || {
        let bitmap = plain.find_region(GuestAddress(0x10_0000)).unwrap().bitmap();
        (0..8).filter(|page| bitmap.dirty_at(page << 12)).collect::<Vec<_>>()
    };
    assert!(dirty().is_empty());
    memory.write_slice(&[1; 2], GuestAddress(0x4fff)).unwrap();
    assert_eq!(dirty(), [2, 6]);
}

#[test]
fn an_endpoint_may_have_any_binding() {
    let shootdown = Shootdown::new(2);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let domain = SoftDomain::new(geometry, Limits::NONE, Arc::clone(&shootdown));
    domain.map(Map::new(range(0, PAGE), GuestPhys(0x20_3000), Prot::READ)).unwrap();
    let endpoint = Endpoint::new(1, Arc::clone(&shootdown), Binding::Blocked);
    let plain = memory();
    let space = IotlbAddressSpace::new(Arc::clone(&endpoint), Arc::clone(&plain)).unwrap();
    let read = |addr| {
        let value = space.memory().read_obj::<u64>(GuestAddress(addr)).ok();
        assert_eq!(space.recover().is_some(), value.is_none());
        value
    };
    assert_eq!((read(0), read(0x20_0000)), (None, None));
    endpoint.bind(Binding::Bypass);
    assert_eq!((read(0), read(0x20_0000)), (None, Some(0x20_0000)));
    endpoint.bind(Binding::Domain(domain));
    assert_eq!((read(0), read(0x20_0000)), (Some(0x20_3000), None));
    assert!(space.another().is_some());
    assert!(space.another().is_some_and(|other| other.another().is_none()), "two readers");
}

#[test]
fn a_domain_that_nothing_is_bound_to_is_not_kept_by_a_device_that_looked_in_it() {
    let shootdown = Shootdown::new(1);
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let domain = SoftDomain::new(geometry, Limits::NONE, Arc::clone(&shootdown));
    domain.map(Map::new(range(0, PAGE), GuestPhys(0x20_3000), Prot::READ)).unwrap();
    let there = Arc::downgrade(&domain);
    let endpoint = Endpoint::new(1, shootdown, Binding::Domain(domain));
    let space = IotlbAddressSpace::new(Arc::clone(&endpoint), memory()).unwrap();
    for _ in 0..2 {
        assert_eq!(space.memory().read_obj::<u64>(GuestAddress(0)).unwrap(), 0x20_3000);
    }
    endpoint.bind(Binding::Blocked);
    assert!(there.upgrade().is_none(), "its tables count against a limit that others share");
    assert!(space.memory().read_obj::<u64>(GuestAddress(0)).is_err());
}

#[test]
fn memory_that_a_front_end_shared_is_regions() {
    let top = u64::MAX - 0x1fff;
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 0x6000).unwrap();
    let regions = [(0x4000, 0x4000, 0), (top, 0x2000, 0x4000)].map(|(gpa, size, mmap_offset)| {
        let fd = file.as_fd().try_clone_to_owned().unwrap();
        (Region { gpa, size, user_addr: 0x7000_0000 + mmap_offset, mmap_offset }, fd)
    });
    let shared = Memory::map(regions.into()).unwrap();
    let regions = Arc::new(shared_regions::<AtomicBitmap>(&shared).unwrap());
    let last = regions.find_region(GuestAddress(u64::MAX)).unwrap();
    assert_eq!((last.start_addr(), last.last_addr().0), (GuestAddress(top), u64::MAX));
    assert!(Arc::ptr_eq(last.memory(), &shared));
    let outside = vm_memory::MemoryRegionAddress(0x2000);
    assert!(last.get_host_address(outside).is_err() && last.get_slice(outside, 1).is_err());
    assert!(last.get_slice(outside, 0).is_ok());

    let bench = bench();
    bench.map(0x1000, top + 0x1000, PAGE);
    bench.map(0x2000, 0x4000, PAGE);
    let space = IotlbAddressSpace::new(Arc::clone(&bench.endpoint), Arc::clone(&regions)).unwrap();
    space.memory().write_slice(b"both", GuestAddress(0x1ffe)).unwrap();
    let found = shared.find_gpa(u64::MAX - 1).unwrap();
    let mut bytes = [0; 2];
    found.slice.copy_to(&mut bytes);
    assert_eq!(&bytes, b"bo");
    shared.find_gpa(0x4000).unwrap().slice.part(0, 2).copy_to(&mut bytes);
    assert_eq!(&bytes, b"th");
    assert!(last.bitmap().dirty_at(0x1fff) && !last.bitmap().dirty_at(0xfff));
}
