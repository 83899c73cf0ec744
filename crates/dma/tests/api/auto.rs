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
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

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

    fn give_back(&self, chunk: Chunk<GuestPhys>) {
        let Chunk { target, ptr, len, align } = chunk;
        HostMemory.give_back(Chunk {
            target: ringfence_iommu::HostAddr(target.0),
            ptr,
            len,
            align,
        });
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
        HostMemory.give_back(self.0);
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
    clock: Arc<ManualClock>,
    memory: Memory,
    /// The byte that the device wrote last.
    written: u8,
}

impl World {
    fn new(policy: Policy) -> World {
        World::with(policy, |_, _| ())
    }

    fn with(policy: Policy, before: impl FnOnce(&MockDomain, &Memory)) -> World {
        let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
        let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
        let clock = Arc::new(ManualClock::new(MS));
        let memory = Memory::default();
        before(&domain, &memory);
        let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
        let limits = BounceLimits::default();
        let pools = BouncePools::new(for_domain, for_allocator, memory.clone(), limits).unwrap();
        let mut config = Setup::new(policy).config;
        config.bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
        let environment = Environment {
            clock: Arc::clone(&clock) as _,
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
        World { device, domain, allocator, pools, clock, memory, written: 0 }
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

    /// Reads for `ms`, with these times for copies and maps.
    fn reads(&mut self, ms: u64, copy_ns: u64, map_ns: u64) {
        let until_ns = self.clock.now_ns() + ms * MS;
        while self.clock.now_ns() < until_ns {
            let copied = self.read();
            self.clock.advance(if copied { copy_ns } else { map_ns });
        }
    }

    fn copies(&self) -> Option<bool> {
        let choices = self.device.choices().unwrap();
        let cell = choices.cells.iter().find(|cell| cell.direction == Direction::FromDevice)?;
        assert_eq!((cell.bytes, cell.scattered), (LEN as u64, false));
        Some(cell.copies)
    }
}

#[test]
fn it_takes_the_faster_way_and_is_strict_in_both() {
    // rule L17
    let mut world = World::new(Policy::Auto);
    world.reads(200, 50_000, 200_000);
    assert_eq!(world.copies(), Some(true), "{}", world.device.choices().unwrap());
    let before = world.device.stats();
    assert!(before.bounced > 0 && before.bounced < before.maps, "both were tried");
    world.reads(3_000, 200_000, 50_000);
    assert_eq!(world.copies(), Some(false), "{}", world.device.choices().unwrap());
    let stats = world.device.stats();
    assert!(stats.maps - stats.bounced > (before.maps - before.bounced) * 2);
    assert_eq!((stats.not_bounced, stats.unmap_failures), (0, 0));
    let cell = &world.device.choices().unwrap().cells[0];
    assert_eq!((cell.copied, cell.mapped), (stats.bounced, stats.maps - stats.bounced));
    assert!(matches!(cell.reason, ChoiceReason::Faster { ratio, .. } if ratio > 3.0), "{cell:?}");
    world.pools.trim();
    assert_eq!(world.domain.table.mappings(), 0);
    let World { device, pools, allocator, .. } = world;
    drop((device, pools));
    assert_eq!(allocator.live(), 0);
}

#[test]
fn what_clones_that_are_gone_did_is_not_forgotten() {
    let world = World::new(Policy::Auto);
    let clone = world.device.clone();
    (0..10).for_each(|_| drop(clone.map(Bytes::new(1), Direction::ToDevice).unwrap()));
    drop(clone);
    let cell = &world.device.choices().unwrap().cells[0];
    assert_eq!((cell.direction, cell.copied + cell.mapped), (Direction::ToDevice, 10));
}

#[test]
fn batches_are_tried_in_both_ways_too() {
    for (copy_ns, map_ns) in [(20_000, 40_000), (40_000, 20_000)] {
        let world = World::new(Policy::Auto);
        let (mut maps, mut unmaps) = (world.device.map_batch(), world.device.unmap_batch());
        for _ in 0..500 {
            for _ in 0..16 {
                assert!(maps.push(Bytes::new(2), Direction::ToDevice, ()).is_ok());
            }
            maps.finish(|(), mapping| {
                let mapping = mapping.unwrap();
                assert!(world.domain.reach(mapping.iova().0).is_some());
                world.clock.advance(if mapping.is_bounced() { copy_ns } else { map_ns });
                unmaps.push(mapping, ()).unwrap();
            });
            unmaps.finish(|(), returned| {
                assert!(returned.unwrap().buffer.slice().iter().all(|&byte| byte == 2));
            });
        }
        let choices = world.device.choices().unwrap();
        assert_eq!(choices.cells[0].copies, copy_ns < map_ns, "{choices}");
    }
}

#[test]
fn a_copy_that_finds_no_slot_is_mapped() {
    let mut world = World::with(Policy::Auto, |_, memory| {
        memory.exhausted.store(true, Ordering::Relaxed);
    });
    let choices = world.device.choices().unwrap();
    assert!(choices.calibration.failed.is_some(), "{choices}");
    assert_eq!(choices.calibration.copies, []);
    // With slots, copying would be far faster, so trials attempt copies.
    world.reads(200, 10_000, 200_000);
    let stats = world.device.stats();
    assert_eq!(stats.bounced, 0);
    assert!(stats.not_bounced > 0, "{stats:?}");
    let cell = &world.device.choices().unwrap().cells[0];
    assert_eq!((cell.copied, cell.mapped), (0, stats.maps));
    world.memory.exhausted.store(false, Ordering::Relaxed);
    let found = (0..20).any(|_| {
        world.reads(400, 10_000, 200_000);
        world.copies() == Some(true)
    });
    assert!(found, "{}", world.device.choices().unwrap());
}

#[test]
fn a_calibration_that_fails_is_reported_and_leaves_nothing_reachable() {
    let mut world = World::with(Policy::Auto, |domain, _| {
        *domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
    });
    let calibration = world.device.choices().unwrap().calibration;
    assert!(calibration.failed.is_some() && calibration.map_run_ns.is_none(), "{calibration:?}");
    assert_eq!(world.device.stats().quarantined, 1, "the device may still reach it");
    let held = world.pools.stats();
    assert_eq!((held.slots, held.quarantined_bytes > 0), (0, true), "its slot is quarantined");
    *world.domain.broken.lock().unwrap() = Broken::default();
    world.read();
    assert_eq!(world.device.choices().unwrap().cells[0].reason, ChoiceReason::Untried);
    world.reads(300, 50_000, 200_000);
    assert_eq!(world.copies(), Some(true));
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
    assert!(calibration.map_run_ns.is_some() && !calibration.copies.is_empty());
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
    let mut world = World::new(Policy::StrictMap);
    assert!(world.device.choices().is_none());
    assert!(!world.read());
    world.domain.forget_events();
    world.device.set_policy(Policy::Auto).unwrap();
    let maps = world.domain.events().into_iter().filter(|e| matches!(e, Event::Map(..))).count();
    assert!(maps > 32, "it has measured");
    world.reads(200, 50_000, 200_000);
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
