//! The memory that a guard keeps in use, and the rest.

use ringfence_iommu::{GuestPhys, Prot};
use ringfence_iotlb::{Binding, IotlbConfig};
use ringfence_rust_vmm::Failure;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory, Permissions};

use crate::front_end::*;

#[test]
fn an_invalidation_waits_for_the_guards_that_used_the_range_and_for_no_other() {
    // rule D15
    let bench = bench();
    bench.map(0, 0x20_0000, PAGE);
    bench.map(0x10_0000, 0x20_1000, PAGE);
    let space = bench.space();
    let (memory, other) = (space.memory(), space.memory());
    assert_eq!(memory.read_obj::<u64>(GuestAddress(8)).unwrap(), 0x20_0008);
    assert_eq!(other.read_obj::<u64>(GuestAddress(0x10_0008)).unwrap(), 0x20_1008);
    let clone = memory.clone();
    let (used, unused) = (bench.unmap(0, PAGE), bench.unmap(0x20_0000, PAGE));
    assert!(bench.shootdown.is_over(unused));
    drop(memory);
    assert!(!bench.shootdown.is_over(used), "the clone counts");
    // Until then it can use what it has, through its clones too.
    assert_eq!(clone.read_obj::<u64>(GuestAddress(8)).unwrap(), 0x20_0008);
    drop(clone);
    assert!(bench.shootdown.is_over(used));
    assert_eq!(other.read_obj::<u64>(GuestAddress(0x10_0008)).unwrap(), 0x20_1008);
    assert!(space.memory().read_obj::<u64>(GuestAddress(8)).is_err());
}

#[test]
fn slices_are_good_while_the_guard_lives() {
    // rule D15
    let bench = bench();
    bench.map(0, 0x20_0000, PAGE);
    let memory = bench.space().memory();
    let slice = memory
        .get_slices(GuestAddress(0), 8, Permissions::ReadWrite)
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let token = bench.unmap(0, PAGE);
    assert!(!bench.shootdown.is_over(token));
    slice.write_obj(3u64, 0).unwrap();
    drop(memory);
    assert!(bench.shootdown.is_over(token));
    assert_eq!(bench.memory.read_obj::<u64>(GuestAddress(0x20_0000)).unwrap(), 3);
}

#[test]
fn an_idle_address_space_delays_no_invalidation() {
    let bench = bench();
    bench.map(0, 0x20_0000, PAGE);
    let space = bench.space();
    space.memory().read_obj::<u64>(GuestAddress(0)).unwrap();
    let unused = space.memory();
    assert!(bench.shootdown.is_over(bench.unmap(0, PAGE)));
    assert!(bench.shootdown.is_over(bench.endpoint.bind(Binding::Bypass)));
    assert_eq!(unused.read_obj::<u64>(GuestAddress(0x20_0000)).unwrap(), 0x20_0000);
    assert!(!bench.shootdown.is_over(bench.endpoint.bind(Binding::Blocked)), "used now");
}

#[test]
fn entries_that_an_access_meets_are_kept_apart_where_they_differ() {
    let bench = bench();
    // Byte-granular entries, some of them adjacent in memory, and some used before.
    let places = [(0u64, 100u64, 0x20_0000u64), (100, 60, 0x20_0064), (160, 40, 0x20_1000)];
    places.iter().for_each(|&(at, len, gpa)| bench.map(at, gpa, len));
    for known in [None, Some(0), Some(99), Some(120), Some(160), Some(199)] {
        let memory = bench.space().memory();
        if let Some(at) = known {
            memory.read_obj::<u8>(GuestAddress(at)).unwrap();
        }
        let slices = memory.get_slices(GuestAddress(10), 190, Permissions::Read).unwrap();
        let lens: Vec<_> = slices.map(|slice| slice.unwrap().len()).collect();
        assert_eq!(lens, [150, 40], "{known:?}");
        for (at, _, _) in places {
            let token = bench.unmap(at, 1);
            assert!(!bench.shootdown.is_over(token));
        }
        drop(memory);
        places.iter().for_each(|&(at, len, gpa)| bench.map(at, gpa, len));
    }
}

#[test]
fn what_a_guard_has_stays_as_it_is_whatever_comes_around_it() {
    let bench = bench();
    let last = 0x3f_f000;
    bench.map(last, 0x20_3000, PAGE);
    let memory = bench.space().memory();
    assert_eq!(memory.read_obj::<u64>(GuestAddress(last)).unwrap(), 0x20_3000);
    // One large entry that ends with the same page, which it maps elsewhere.
    let range = range(0x20_0000, 0x20_0000);
    let token = bench.iotlb.update(range, GuestPhys(0x1_0000), Prot::RW).unwrap();
    assert!(!bench.shootdown.is_over(token));
    assert_eq!(memory.read_obj::<u64>(GuestAddress(last - 8)).unwrap(), 0x20_eff8);
    assert_eq!(memory.read_obj::<u64>(GuestAddress(last + 8)).unwrap(), 0x20_3008);
    let mut both = [0; 16];
    memory.read_slice(&mut both, GuestAddress(last - 8)).unwrap();
    assert_eq!(both[8..], 0x20_3000u64.to_le_bytes());
    drop(memory);
    bench.shootdown.wait(token);
    let memory = bench.space().memory();
    assert_eq!(memory.read_obj::<u64>(GuestAddress(last + 8)).unwrap(), 0x20_f008);
}

#[test]
fn a_guard_that_used_very_much_holds_all_there_is() {
    let bench = bench();
    let pages = 300;
    for page in 0..pages {
        bench.map(page * 2 * PAGE, 0x20_0000 + page % 16 * PAGE, PAGE);
    }
    let memory = bench.space().memory();
    for page in 0..pages {
        let value = memory.read_obj::<u64>(GuestAddress(page * 2 * PAGE)).unwrap();
        assert_eq!(value, 0x20_0000 + page % 16 * PAGE);
    }
    let tokens = [bench.unmap(0, PAGE), bench.unmap((pages - 1) * 2 * PAGE, PAGE)];
    assert!(tokens.iter().all(|&token| !bench.shootdown.is_over(token)));
    // More than it can remember one by one.
    assert!(!bench.shootdown.is_over(bench.unmap(1 << 40, PAGE)));
    drop(memory);
    assert!(tokens.iter().all(|&token| bench.shootdown.is_over(token)));
}

#[test]
fn a_guard_remembers_a_bounded_number_of_pieces() {
    // rule D23
    // rule D30
    const ENTRIES: u64 = 70_000;
    let bench = bench_with(IotlbConfig { entries: 2 * ENTRIES, ..IotlbConfig::default() });
    let place = |entry: u64| 0x20_0000 + entry * 48 % 0xfff0;
    for entry in 0..ENTRIES {
        bench.map(entry * 16, place(entry), 16);
    }
    ignore_misses(&bench);
    let space = bench.space();
    let memory = space.memory();
    let mut whole = vec![0; 16 * ENTRIES as usize];
    assert!(memory.read(&mut whole, GuestAddress(0)).is_err());
    assert_eq!(memory.check(), Err(Failure::TooManyParts { addr: 0 }));
    drop(memory);
    let memory = space.memory();
    for entry in 0..ENTRIES {
        assert_eq!(memory.read_obj::<u64>(GuestAddress(entry * 16)).unwrap(), place(entry));
    }
    let tokens = [bench.unmap(0, 16), bench.unmap(16 * (ENTRIES - 1), 16)];
    assert!(tokens.iter().all(|&token| !bench.shootdown.is_over(token)));
    // After a wait it could not check whether what it has handed out is unchanged.
    assert!(memory.read_obj::<u64>(GuestAddress(1 << 40)).is_err());
    assert_eq!(memory.check(), Err(Failure::WouldWait { addr: 1 << 40 }));
    drop(memory);
    assert!(tokens.iter().all(|&token| bench.shootdown.is_over(token)));
}
