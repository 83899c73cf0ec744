//! The policy `Auto`.

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringfence_dma::{
    BounceConfig, BounceLimits, BounceMemory, BouncePools, ChoiceReason, Chunk, Device, Direction,
    DmaBuffer, Environment, HostMemory, Policy, Written,
};
use ringfence_iommu::{Capabilities, GuestPhys, Iova, table::Limits};
use ringfence_mem::{HostSlice, ReadSlice};
use ringfence_sync::{clock::ManualClock, cpu::FixedCpu};

use crate::mock::{Broken, EagerAllocator, Event, MockDomain, Setup, TestDevice, TickingClock};

const MS: u64 = 1_000_000;
const LEN: usize = 16384;

/// The process's memory, as guest memory with the process's own addresses.
#[derive(Clone, Default)]
struct Memory {
    exhausted: Arc<AtomicBool>,
}

// SAFETY: the heap's guarantee is passed on.
unsafe impl BounceMemory<GuestPhys> for Memory {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        if self.exhausted.load(Ordering::Relaxed) {
            return None;
        }
        let Chunk { target, ptr, len, align } = HostMemory.take(len, align)?;
        Some(Chunk { target: GuestPhys(target.0), ptr, len, align })
    }

    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        let Chunk { target, ptr, len, align } = chunk;
        let target = ringfence_iommu::HostAddr(target.0);
        // SAFETY: as the caller promises: `take` is that of the heap.
        unsafe { HostMemory.give_back(Chunk { target, ptr, len, align }) };
    }
}

/// A buffer in whole granules of the heap.
struct Bytes(Chunk<ringfence_iommu::HostAddr>);

impl Bytes {
    fn new(fill: u8) -> Bytes {
        let chunk = HostMemory.take(LEN as u64, 4096).unwrap();
        let mut bytes = Bytes(chunk);
        bytes.slice_mut().fill(fill);
        bytes
    }

    fn ptr(&self) -> NonNull<u8> {
        self.0.ptr
    }

    fn slice(&self) -> &[u8] {
        // SAFETY: the chunk is this value's own, and initialised.
        unsafe { core::slice::from_raw_parts(self.ptr().as_ptr(), LEN) }
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.ptr().as_ptr(), LEN) }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: it was taken for this value, and goes with it.
        unsafe { HostMemory.give_back(self.0) };
    }
}

// SAFETY: a chunk of the heap, which only this value frees.
unsafe impl DmaBuffer<GuestPhys> for Bytes {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        each(GuestPhys(self.0.target.0), LEN as u64);
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each(self.slice().into());
        true
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each(self.slice_mut().into());
        true
    }
}

struct World {
    device: TestDevice,
    domain: Arc<MockDomain>,
    allocator: Arc<EagerAllocator>,
    pools: BouncePools<GuestPhys>,
    memory: Memory,
    /// The byte that the device wrote last.
    written: u8,
}

impl World {
    /// A copy takes no time, and each operation of the domain `map_ns`.
    fn new(policy: Policy, map_ns: u64) -> World {
        World::with(policy, map_ns, |_, _| ())
    }

    fn with(policy: Policy, map_ns: u64, before: impl FnOnce(&MockDomain, &Memory)) -> World {
        let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
        let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
        let clock = Arc::new(ManualClock::new(MS));
        *domain.takes.lock().unwrap() = Some((Arc::clone(&clock), map_ns));
        let memory = Memory::default();
        before(&domain, &memory);
        let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
        let limits = BounceLimits::default();
        let pools = BouncePools::new(for_domain, for_allocator, memory.clone(), limits).unwrap();
        let mut config = Setup::new(policy).config;
        config.bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
        let environment = Environment {
            clock,
            cpu: Arc::new(FixedCpu::new(1)),
            thread_clock: Arc::new(TickingClock::default()),
        };
        let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
        let device = Device::builder(for_domain)
            .allocator(for_allocator)
            .config(config)
            .environment(environment)
            .pools(&pools)
            .build()
            .unwrap();
        World { device, domain, allocator, pools, memory, written: 0 }
    }

    /// Writes to a mapping as the device does, and checks whether the buffer is exposed.
    fn access(&self, iova: Iova, buffer: u64, copied: bool, byte: u8) {
        let (at, _) = self.domain.reach(iova.0).expect("a mapping is reachable");
        assert_eq!(at == buffer, !copied, "it is a copy, or it is not");
        let exposed = self.domain.cached().iter().any(|(range, target, _)| {
            *target < buffer + LEN as u64 && buffer <= target.saturating_add(range.extent())
        });
        assert_eq!(exposed, !copied, "a copied buffer is never reachable");
        // SAFETY: the addresses are the process's own; slot or buffer, it is mapped memory that no
        // other code accesses while the device has it.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(at as usize).write_bytes(byte, LEN) };
    }

    /// A read from the disk; returns whether it was copied.
    fn read(&mut self) -> bool {
        self.written = self.written % 200 + 1;
        let buffer = Bytes::new(0xee);
        let at = buffer.0.target.0;
        let mapping = self.device.map(buffer, Direction::FromDevice).unwrap();
        let (iova, copied) = (mapping.iova(), mapping.is_bounced());
        self.access(iova, at, copied, self.written);
        let buffer = mapping.unmap().unwrap();
        assert!(buffer.slice().iter().all(|&byte| byte == self.written), "what the device wrote");
        if !copied {
            assert_eq!(self.domain.reach(iova.0), None, "strict, whatever is chosen");
        }
        copied
    }

    fn copies(&self) -> Option<bool> {
        let choices = self.device.choices().unwrap();
        let cell = choices.cells.iter().find(|cell| cell.direction == Direction::FromDevice)?;
        assert_eq!((cell.bytes, cell.scattered), (LEN as u64, false));
        Some(cell.copies)
    }
}

/// Pools may be of another domain than the device's, with the same address for something else.
#[test]
fn what_is_mapped_to_measure_is_memory_of_the_pools() {
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let other = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let of_other = EagerAllocator::new(4096, Arc::clone(&other.log));
    let memory = Memory::default();
    let pools = BouncePools::new(other, of_other, memory, BounceLimits::default()).unwrap();
    let plain = Device::builder(Arc::clone(&domain))
        .allocator(Arc::clone(&allocator))
        .config(Setup::new(Policy::StrictMap).config)
        .build()
        .unwrap();
    // All that the pools could have taken.
    let buffer = crate::mock::Buf::new(&[(1 << 40, 64 << 20)]);
    let mapping = plain.map(buffer, Direction::Bidirectional).unwrap();
    domain.forget_events();
    let auto = Device::builder(Arc::clone(&domain))
        .allocator(allocator)
        .config(Setup::new(Policy::Auto).config)
        .pools(&pools)
        .build()
        .unwrap();
    let mapped: Vec<u64> = domain
        .events()
        .iter()
        .filter_map(|event| if let Event::Map(_, target, _) = event { Some(*target) } else { None })
        .collect();
    assert!(!mapped.is_empty(), "nothing was measured");
    let buffers = (1 << 40)..(1 << 40) + (64 << 20);
    assert!(!mapped.iter().any(|target| buffers.contains(target)), "a buffer is mapped twice");
    drop((auto, mapping.unmap()));
}

#[test]
fn it_takes_the_cheaper_way_and_is_strict_in_both() {
    // rule L17
    for map_ns in [0, 1_000] {
        let mut world = World::new(Policy::Auto, map_ns);
        let copied = (0..100).filter(|_| world.read()).count() as u64;
        assert_eq!(copied, if map_ns > 0 { 100 } else { 0 });
        assert_eq!(world.copies(), Some(map_ns > 0), "{}", world.device.choices().unwrap());
        let stats = world.device.stats();
        assert_eq!((stats.maps, stats.bounced), (100, copied));
        assert_eq!((stats.not_bounced, stats.unmap_failures), (0, 0));
        let cell = &world.device.choices().unwrap().cells[0];
        assert_eq!((cell.copied, cell.mapped), (copied, 100 - copied));
        // A map and an unmap, with a sync each; the domain is as busy as the driver.
        let cost = ChoiceReason::Cost { copy_ns: 0, map_ns: 4 * map_ns };
        assert_eq!(cell.reason, cost);
        world.pools.trim();
        assert_eq!(world.domain.table.mappings(), 0);
        let World { device, pools, allocator, .. } = world;
        drop((device, pools));
        assert_eq!(allocator.live(), 0);
    }
}

/// A domain that is slower in use than when it was calibrated, as its device sleeps.
#[test]
fn it_copies_where_threads_wait_longer_than_a_copy_takes_and_tries_again_later() {
    let mut world = World::new(Policy::Auto, 0);
    let clock = world.domain.takes.lock().unwrap().as_ref().map(|(clock, _)| Arc::clone(clock));
    let clock = clock.expect("operations of the domain take time by it");
    assert!((0..100).all(|_| !world.read()), "nothing waits, and a map costs nothing");
    for _ in 0..2 {
        *world.domain.takes.lock().unwrap() = Some((Arc::clone(&clock), MS / 10));
        let maps = (0..10_000).take_while(|_| !world.read()).count();
        let choices = world.device.choices().unwrap();
        assert!(maps < 10_000, "{choices}");
        match choices.cells[0].reason {
            ChoiceReason::Waits { copy_ns, map_ns } => assert!(copy_ns < map_ns, "{choices}"),
            _ => panic!("{choices}"),
        }
        // Copies show nothing of the device, which is fast again: it is tried after a second.
        *world.domain.takes.lock().unwrap() = Some((Arc::clone(&clock), 0));
        assert!((0..1000).all(|_| world.read()), "{}", world.device.choices().unwrap());
        clock.advance(1000 * MS);
        assert!((0..100).any(|_| !world.read()), "{}", world.device.choices().unwrap());
    }
}

#[test]
fn what_clones_that_are_gone_did_is_not_forgotten() {
    let world = World::new(Policy::Auto, 0);
    let clone = world.device.clone();
    (0..10).for_each(|_| drop(clone.map(Bytes::new(1), Direction::ToDevice).unwrap()));
    drop(clone);
    let cell = &world.device.choices().unwrap().cells[0];
    assert_eq!((cell.direction, cell.copied + cell.mapped), (Direction::ToDevice, 10));
}

#[test]
fn batches_choose_too() {
    for map_ns in [0, 1_000] {
        let world = World::new(Policy::Auto, map_ns);
        let (mut maps, mut unmaps) = (world.device.map_batch(), world.device.unmap_batch());
        for _ in 0..16 {
            assert!(maps.push(Bytes::new(2), Direction::ToDevice, ()).is_ok());
        }
        maps.finish(|(), mapping| {
            let mapping = mapping.unwrap();
            assert!(world.domain.reach(mapping.iova().0).is_some());
            assert_eq!(mapping.is_bounced(), map_ns > 0);
            unmaps.push(mapping, ()).unwrap();
        });
        unmaps.finish(|(), returned| {
            assert!(returned.unwrap().buffer.slice().iter().all(|&byte| byte == 2));
        });
    }
}

#[test]
fn a_copy_that_finds_no_slot_is_mapped() {
    let mut world = World::new(Policy::Auto, 1_000);
    world.pools.trim();
    world.memory.exhausted.store(true, Ordering::Relaxed);
    assert!((0..50).all(|_| !world.read()));
    let stats = world.device.stats();
    assert_eq!((stats.bounced, stats.not_bounced), (0, 50));
    let cell = &world.device.choices().unwrap().cells[0];
    assert_eq!((cell.copied, cell.mapped), (0, 50));
    world.memory.exhausted.store(false, Ordering::Relaxed);
    assert!(world.read());
}

#[test]
fn without_memory_nothing_is_measured_and_all_is_mapped() {
    let mut world = World::with(Policy::Auto, 1_000, |_, memory| {
        memory.exhausted.store(true, Ordering::Relaxed);
    });
    let calibration = world.device.choices().unwrap().calibration;
    assert!(calibration.failed.is_some(), "{calibration:?}");
    assert_eq!(calibration.copies, []);
    assert!(!world.read());
    assert_eq!(world.device.choices().unwrap().cells[0].reason, ChoiceReason::Unknown);
}

#[test]
fn a_calibration_that_fails_is_reported_and_leaves_nothing_reachable() {
    let mut world = World::with(Policy::Auto, 1_000, |domain, _| {
        *domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
    });
    let calibration = world.device.choices().unwrap().calibration;
    assert!(calibration.failed.is_some() && calibration.map_run_ns.is_none(), "{calibration:?}");
    assert_eq!(world.device.stats().quarantined, 1, "the device may still reach it");
    let held = world.pools.stats();
    assert_eq!((held.slots, held.quarantined_bytes > 0), (0, true), "its slot is quarantined");
    *world.domain.broken.lock().unwrap() = Broken::default();
    assert!(!world.read());
    assert_eq!(world.device.choices().unwrap().cells[0].reason, ChoiceReason::Unknown);
}

#[test]
fn calibrating_takes_no_more_than_it_may_and_undoes_all() {
    // A reading of the clock takes a millisecond, and so does everything that is timed.
    let clock = Arc::new(ManualClock::stepping(MS));
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
    let limits = BounceLimits::default();
    let pools = BouncePools::new(for_domain, for_allocator, Memory::default(), limits).unwrap();
    let environment = Environment { clock: clock as _, ..Environment::default() };
    let config = Setup::new(Policy::Auto).config;
    let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
    let device = Device::builder(for_domain)
        .allocator(for_allocator)
        .config(config)
        .environment(environment)
        .pools(&pools)
        .build()
        .unwrap();
    let calibration = device.choices().unwrap().calibration;
    assert!(calibration.took_ns < 200 * MS, "{calibration:?}");
    assert_eq!(calibration.failed, None);
    assert!(calibration.map_wall_ns.is_some() && !calibration.copies.is_empty());
    assert_eq!(
        (device.stats().maps, device.stats().map_calls),
        (0, 0),
        "calibration is not counted"
    );
    pools.trim();
    assert_eq!(domain.table.mappings(), 0);
    drop((device, pools));
    assert_eq!(allocator.live(), 0);
}

#[test]
fn a_policy_that_is_switched_to_calibrates_then() {
    let mut world = World::new(Policy::StrictMap, 1_000);
    assert!(world.device.choices().is_none());
    assert!(!world.read());
    world.domain.forget_events();
    world.device.set_policy(Policy::Auto).unwrap();
    let maps = world.domain.events().into_iter().filter(|e| matches!(e, Event::Map(..))).count();
    assert!(maps > 32, "it has measured");
    assert!(world.read());
    assert_eq!(world.copies(), Some(true));
    // Setting the policy in force again costs nothing.
    world.domain.forget_events();
    world.device.set_policy(Policy::Auto).unwrap();
    assert_eq!((world.domain.events(), world.copies()), (Vec::new(), Some(true)));
    world.device.set_policy(Policy::StrictMap).unwrap();
    assert!(world.device.choices().is_none());
    assert!(!world.read());
    world.device.set_policy(Policy::Auto).unwrap();
    assert_eq!(world.copies(), None, "it begins anew");
}

#[test]
fn a_change_from_off_is_refused_before_anything_is_measured() {
    let world = World::new(Policy::Off, 1_000);
    world.domain.forget_events();
    world.device.set_policy(Policy::Auto).unwrap_err();
    assert!(world.domain.events().is_empty());
}
