//! Several devices and several threads on the same pools.

use core::panic::Location;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex as StdMutex},
    thread,
};

use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_iommu::{
    Geometry, HostAddr, Iova, PageSizes, Prot, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iova::{Aperture, RbTree};
use ringfence_sync::{
    clock::ManualClock,
    cpu::{CpuId, OsCpu},
};

use super::*;
use crate::{
    Direction,
    bounce::{HostMemory, Slot},
};

const LAST: u64 = (1 << 40) - 1;

struct Rig {
    domain: Arc<SoftDomain<HostAddr>>,
    allocator: Arc<RbTree>,
    clock: Arc<ManualClock>,
    pools: Option<BouncePools<HostAddr>>,
}

impl Rig {
    fn new(limits: BounceLimits) -> Rig {
        let aperture = Range::new(Iova(0), Iova(LAST)).unwrap();
        let geometry = Geometry::new(PageSizes::X86, aperture);
        let domain = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(8));
        let allocator = Arc::new(RbTree::new(Aperture::new(0, LAST, 4096).unwrap()));
        let clock = Arc::new(ManualClock::new(1_000_000));
        let environment = Environment { clock: Arc::clone(&clock) as _, ..Environment::default() };
        let pools = BouncePools::with_environment(
            Arc::clone(&domain) as _,
            Arc::clone(&allocator) as _,
            HostMemory,
            limits,
            environment,
            TimerKind::Manual,
        );
        Rig { domain, allocator, clock, pools: Some(pools.unwrap()) }
    }

    fn pools(&self) -> &BouncePools<HostAddr> {
        self.pools.as_ref().unwrap()
    }

    fn client(&self, limit: u64, quota: u64) -> Client<HostAddr> {
        let cpu: Arc<dyn CpuId> = Arc::new(OsCpu::new());
        Client::new(self.pools().clone(), (limit, quota), cpu)
    }

    /// Drops the pools, and checks that nothing is left.
    fn end(mut self) {
        let inner = Arc::downgrade(&self.pools().0);
        self.pools = None;
        assert!(inner.upgrade().is_none(), "the pools are still referenced");
        assert_eq!(self.domain.mappings(), 0);
        assert_eq!(self.allocator.stats().live_ranges, 0);
    }
}

/// Whether a slot for one use is there; it has a holder.
fn is_single(rig: &Rig, iova: Iova) -> bool {
    let held = rig.pools().0.singles.held();
    find(rig, iova).is_none() && held.iter().any(|single| single.range.contains(iova))
}

/// The slot of a class at `iova`, and whether it is held.
fn find(rig: &Rig, iova: Iova) -> Option<(Range, bool)> {
    let zones = rig.pools().0.zones();
    let zone = zones.iter().find(|zone| zone.range.contains(iova))?;
    let number = zone.number(iova);
    zone.chunk(number)?;
    Some((zone.range_of(&(number..number + 1)), zone.marks.get(number).is_some()))
}

fn held_by(client: &Client<HostAddr>) -> u64 {
    client.account.held.load(Ordering::Relaxed)
}

fn take(client: &Client<HostAddr>, len: u64, direction: Direction) -> Result<Slot, Error> {
    client.take(len, direction, Location::caller())
}

fn size(slot: &Slot) -> u64 {
    slot.range.extent() + 1
}

const SMALL: BounceLimits = BounceLimits { largest: 64 << 10, max_bytes: 256 << 10, idle_ms: 10 };

#[test]
fn a_slot_is_found_by_its_address_and_lies_as_its_size_says() {
    let rig = Rig::new(BounceLimits::default());
    let client = rig.client(u64::MAX, 1 << 30);
    for (len, expected) in [(1, 4096), (4096, 4096), (4097, 8192), (100_000, 128 << 10)] {
        let slot = take(&client, len, Direction::ToDevice).unwrap();
        assert_eq!(size(&slot), expected);
        assert!(slot.range.first().0.is_multiple_of(expected), "naturally aligned");
        for iova in [slot.range.first(), slot.range.last()] {
            assert_eq!(find(&rig, iova), Some((slot.range, true)));
            let mapping = rig.domain.mapping(iova).unwrap();
            assert_eq!((mapping.range, mapping.prot), (slot.range, Prot::READ));
            assert_eq!(mapping.target, slot.ptr.as_ptr().addr() as u64);
        }
        let range = slot.range;
        client.give_back(slot);
        assert_eq!(find(&rig, range.first()), Some((range, false)));
    }
    assert!(find(&rig, Iova(0)).is_none());
    let sizes: Vec<u64> = rig.pools().classes().iter().map(|class| class.slot_bytes).collect();
    assert_eq!(sizes, [4096, 8192, 128 << 10], "a class has addresses from its first use on");
    drop(client);
    rig.end();
}

#[test]
fn what_fits_no_class_or_no_memory_is_mapped_for_one_use() {
    let rig = Rig::new(SMALL);
    let client = rig.client(u64::MAX, 1 << 30);
    let odd = take(&client, (64 << 10) + 1, Direction::Bidirectional).unwrap();
    assert_eq!(size(&odd), 68 << 10, "whole granules, no class");
    let pooled: Vec<Slot> =
        (0..4).map(|_| take(&client, 65536, Direction::Bidirectional).unwrap()).collect();
    let beyond = take(&client, 65536, Direction::Bidirectional).unwrap();
    assert!(is_single(&rig, beyond.range.last()));
    let stats = rig.pools().stats();
    assert_eq!((stats.single_use, stats.grown, stats.slots, stats.kept_bytes), (2, 4, 6, 0));
    assert_eq!(stats.slot_bytes, (68 << 10) + 5 * 65536);
    assert_eq!(stats.peak_bytes, stats.slot_bytes);
    for slot in [odd, beyond] {
        let first = slot.range.first();
        client.give_back(slot);
        assert!(rig.domain.mapping(first).is_none(), "unmapped when it was given back");
    }
    pooled.into_iter().for_each(|slot| client.give_back(slot));
    let stats = rig.pools().stats();
    assert_eq!((stats.slots, stats.kept_bytes), (0, 4 * 65536));
    drop(client);
    rig.end();
}

#[test]
fn slots_are_kept_by_all_they_allow_and_mapped_anew_only_if_there_is_no_room() {
    let rig = Rig::new(BounceLimits { largest: 65536, max_bytes: 2 * 65536, idle_ms: 10 });
    let client = rig.client(u64::MAX, 1 << 30);
    let directions = [Direction::ToDevice, Direction::FromDevice];
    let slots: Vec<Slot> =
        directions.map(|direction| take(&client, 65536, direction).unwrap()).into();
    let places: Vec<Range> = slots.iter().map(|slot| slot.range).collect();
    for mut slot in slots {
        slot.zero(0..0);
        slot.dirty = 65536;
        // SAFETY: the slot is ours, and that long.
        unsafe { slot.ptr.as_ptr().write_bytes(0xff, 65536) };
        client.give_back(slot);
    }
    for (direction, place) in directions.into_iter().zip(&places) {
        let slot = take(&client, 65536, direction).unwrap();
        assert_eq!((slot.range, slot.direction, slot.dirty), (*place, direction, 65536));
        client.give_back(slot);
    }
    assert_eq!(rig.pools().stats().remapped, 0);
    let slot = take(&client, 65536, Direction::Bidirectional).unwrap();
    assert_eq!(rig.domain.mapping(slot.range.first()).unwrap().prot, Prot::RW);
    assert_eq!(bytes(&slot), vec![0; 65536], "nothing is left of what it held");
    let stats = rig.pools().stats();
    assert_eq!((slot.dirty, stats.remapped, stats.grown, stats.single_use), (0, 1, 2, 0));
    client.give_back(slot);
    // No memory is left for another class either: it gets that of idle slots.
    let small = take(&client, 4096, Direction::ToDevice).unwrap();
    let stats = rig.pools().stats();
    assert_eq!((stats.single_use, stats.slots, stats.given_back), (0, 1, 1));
    assert!(stats.slot_bytes + stats.kept_bytes <= 2 * 65536);
    client.give_back(small);
    drop(client);
    rig.end();
}

fn bytes(slot: &Slot) -> Vec<u8> {
    // SAFETY: the slot is that long, and no other thread has it.
    unsafe { std::slice::from_raw_parts(slot.ptr.as_ptr(), size(slot) as usize) }.to_vec()
}

#[test]
fn the_program_sees_what_its_own_device_left_and_zeros_of_others() {
    let rig = Rig::new(SMALL);
    let (one, other) = (rig.client(u64::MAX, 1 << 20), rig.client(u64::MAX, 1 << 20));
    let mut slot = take(&one, 4096, Direction::Bidirectional).unwrap();
    // SAFETY: the slot is ours, and that long.
    unsafe { slot.ptr.as_ptr().write_bytes(7, 100) };
    slot.dirty = 100;
    one.give_back(slot);
    let again = one.take_for_cpu(4096, Direction::Bidirectional, Location::caller()).unwrap();
    assert_eq!((again.dirty, bytes(&again)[99]), (100, 7));
    let place = again.range;
    one.give_back(again);
    let other_slot =
        other.take_for_cpu(4096, Direction::Bidirectional, Location::caller()).unwrap();
    assert_eq!(other_slot.range, place);
    assert_eq!((other_slot.dirty, bytes(&other_slot)), (0, vec![0; 4096]));
    other.give_back(other_slot);
    drop((one, other));
    rig.end();
}

#[test]
fn what_was_needed_is_kept_for_an_interval_and_a_quarter_of_what_is_for_good() {
    let rig = Rig::new(BounceLimits { max_bytes: 16 << 20, ..SMALL });
    let client = rig.client(u64::MAX, 1 << 30);
    let pools = rig.pools();
    assert_eq!(pools.due_at_ns(), None, "nothing to look after");
    let mut held: Vec<Slot> =
        (0..200).map(|_| take(&client, 8192, Direction::ToDevice).unwrap()).collect();
    assert!(pools.due_at_ns().is_some());
    held.drain(40..).for_each(|slot| client.give_back(slot));
    let interval = || {
        let due = pools.due_at_ns().unwrap();
        rig.clock.advance(due - rig.clock.now_ns());
        pools.expire();
        pools.stats().kept_bytes / 8192
    };
    // The 200 were needed in the interval that ends.
    assert!(interval() >= 160);
    // The next two needed 40 and 60 at a time: that many stay, and a quarter more.
    let more: Vec<Slot> =
        (0..60).map(|_| take(&client, 8192, Direction::ToDevice).unwrap()).collect();
    more.into_iter().for_each(|slot| client.give_back(slot));
    let kept = interval();
    assert!((60..=60 + 64 + 25).contains(&kept), "{kept}");
    let kept = interval();
    assert_eq!(kept, 10, "a quarter of the 40 in use");
    assert_eq!(pools.due_at_ns(), None, "it sleeps");
    let stats = pools.stats();
    assert_eq!(stats.slots, 40);
    assert_eq!(stats.grown - stats.given_back, 50);
    assert_eq!(rig.domain.mappings(), 50);
    // Giving a slot back counts as a use, too.
    client.give_back(held.pop().unwrap());
    assert!(pools.due_at_ns().is_some());
    held.into_iter().for_each(|slot| client.give_back(slot));
    interval();
    assert_eq!(interval(), 0, "nothing is in use");
    assert_eq!((pools.due_at_ns(), rig.domain.mappings()), (None, 0));
    drop(client);
    rig.end();
}

#[test]
fn the_thread_gives_back_what_is_idle_and_ends_with_the_pools() {
    let rig = Rig::new(SMALL);
    let pools = BouncePools::new(
        Arc::clone(&rig.domain) as _,
        Arc::clone(&rig.allocator) as _,
        HostMemory,
        BounceLimits { idle_ms: 1, ..SMALL },
    );
    let pools = pools.unwrap();
    let cpu: Arc<dyn CpuId> = Arc::new(OsCpu::new());
    let client = Client::new(pools.clone(), (u64::MAX, 1 << 20), cpu);
    client.give_back(take(&client, 1, Direction::ToDevice).unwrap());
    while pools.stats().kept_bytes > 0 {
        thread::yield_now();
    }
    drop((client, pools));
    // If the pools' thread is still running, it holds the last reference to them.
    while rig.domain.mappings() > 0 || rig.allocator.stats().live_ranges > 0 {
        thread::yield_now();
    }
    rig.end();
}

#[test]
fn the_leak_detector_names_places() {
    let rig = Rig::new(SMALL);
    let (one, other) = (rig.client(u64::MAX, 1 << 20), rig.client(u64::MAX, 1 << 21));
    let many: Vec<Slot> = (0..5).map(|_| take(&one, 4096, Direction::ToDevice).unwrap()).collect();
    rig.clock.advance(60_000_000_000);
    rig.pools().expire();
    let (large, line) =
        (other.take(1 << 20, Direction::ToDevice, Location::caller()).unwrap(), line!());
    let holders = rig.pools().holders();
    assert_eq!(holders.len(), 2);
    assert_eq!((holders[0].slots, holders[0].bytes), (1, 1 << 20), "the largest first");
    assert_eq!((holders[0].at.file(), holders[0].at.line()), (file!(), line));
    assert!(holders[0].oldest.as_millis() < 20);
    assert_eq!((holders[1].slots, holders[1].bytes), (5, 5 * 4096));
    assert_eq!(holders[1].oldest.as_secs(), 60);
    assert_eq!((held_by(&one), held_by(&other)), (5 * 4096, 1 << 20));
    many.into_iter().for_each(|slot| one.give_back(slot));
    other.give_back(large);
    assert_eq!(rig.pools().holders().len(), 0);
    drop((one, other));
    rig.end();
}

#[test]
fn a_device_gets_no_slot_beyond_its_limit() {
    const NARROW: u64 = (1 << 30) - 1;
    let rig = Rig::new(BounceLimits { max_bytes: 8 << 20, ..SMALL });
    let (wide, narrow) = (rig.client(LAST, 1 << 30), rig.client(NARROW, 1 << 30));
    let high = take(&wide, 4096, Direction::ToDevice).unwrap();
    assert!(high.range.first().0 > NARROW, "this allocator begins at the top");
    let low = take(&narrow, 4096, Direction::ToDevice).unwrap();
    assert!(low.range.last().0 <= NARROW);
    wide.give_back(high);
    narrow.give_back(low);
    for _ in 0..100 {
        let (high, low) = (
            take(&wide, 4096, Direction::ToDevice).unwrap(),
            take(&narrow, 4096, Direction::ToDevice).unwrap(),
        );
        assert!(high.range.first().0 > NARROW && low.range.last().0 <= NARROW);
        narrow.give_back(low);
        wide.give_back(high);
    }
    // Concurrently, in any order, each device gets slots that it can reach.
    thread::scope(|scope| {
        for (client, limit) in [(&wide, LAST), (&narrow, NARROW), (&wide, LAST), (&narrow, NARROW)]
        {
            scope.spawn(move || {
                for round in 0..300u64 {
                    let held: Vec<Slot> = (0..1 + round % 40)
                        .map(|n| take(client, 4096 << (n % 5), Direction::FromDevice).unwrap())
                        .collect();
                    assert!(held.iter().all(|slot| slot.range.last().0 <= limit));
                    held.into_iter().for_each(|slot| client.give_back(slot));
                }
            });
        }
    });
    assert_eq!(rig.pools().stats().slots, 0);
    drop((wide, narrow));
    rig.end();
}

#[test]
fn a_narrow_device_that_finds_no_addresses_for_a_zone_maps_for_one_use() {
    let rig = Rig::new(SMALL);
    // A 64th of these addresses is less than a slot.
    let narrow = rig.client(0x1_ffff, 1 << 20);
    let slot = take(&narrow, 4096, Direction::ToDevice).unwrap();
    assert!(slot.range.last().0 <= 0x1_ffff);
    assert!(is_single(&rig, slot.range.first()));
    narrow.give_back(slot);
    // A quarter of the slots of a zone, as there are addresses for no more.
    let halved = rig.client((1 << 22) - 1, 1 << 20);
    let slot = take(&halved, 4096, Direction::ToDevice).unwrap();
    assert_eq!(rig.pools().classes()[0].room, 16);
    halved.give_back(slot);
    drop((narrow, halved));
    rig.end();
}

#[test]
fn memory_of_a_calibration_is_charged_to_its_device_for_ever_if_that_may_reach_it() {
    let rig = Rig::new(SMALL);
    let (quota, client) = (16 << 10, rig.client(u64::MAX, 16 << 10));
    let held = |held| Error::BounceQuota { size: 16 << 10, held, quota };
    let used = client.with_memory(16 << 10, |_| {
        assert_eq!(client.with_memory(16 << 10, |_| ((), true)), Err(held(16 << 10)));
        (7, true)
    });
    assert_eq!(used, Ok(7));
    assert_eq!(client.with_memory(4096, |_| ((), false)), Ok(()));
    assert_eq!(client.with_memory(16 << 10, |_| ((), true)), Err(held(4096)));
    assert_eq!(rig.pools().stats().quarantined_bytes, 4096);
    drop(client);
    rig.end();
}

#[test]
fn a_quota_is_exact_under_concurrent_requests() {
    let rig = Rig::new(BounceLimits { max_bytes: 1 << 20, ..SMALL });
    let (quota, client) = (40 << 10, rig.client(u64::MAX, 40 << 10));
    let error = take(&client, 64 << 10, Direction::ToDevice).unwrap_err();
    assert_eq!(error, Error::BounceQuota { size: 64 << 10, held: 0, quota });
    for _ in 0..200 {
        let taken = StdMutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let Ok(slot) = take(&client, 4096, Direction::ToDevice) {
                        taken.lock().unwrap().push(slot);
                    }
                });
            }
        });
        let taken = taken.into_inner().unwrap();
        assert_eq!(taken.len(), 10, "what the quota holds, neither more nor less");
        taken.into_iter().for_each(|slot| client.give_back(slot));
    }
    // The quota also holds beyond the classes, and beyond the memory of the pools.
    let large = rig.client(u64::MAX, 3 << 20);
    let one = take(&large, 2 << 20, Direction::ToDevice).unwrap();
    assert!(matches!(take(&large, 2 << 20, Direction::ToDevice), Err(Error::BounceQuota { .. })));
    large.give_back(one);
    drop((client, large));
    rig.end();
}

#[test]
fn threads_that_hammer_the_pools_lose_no_slot_and_share_none() {
    let rig = Rig::new(BounceLimits { largest: 32 << 10, max_bytes: 512 << 10, idle_ms: 1 });
    let (one, other) = (rig.client(LAST, 1 << 20), rig.client((1 << 32) - 1, 400 << 10));
    let owners = StdMutex::new(BTreeMap::new());
    let start = TestRunner::default().rng().next_u64();
    thread::scope(|scope| {
        for seed in 1..=4u64 {
            let (client, rig, owners) = (if seed % 2 == 0 { &one } else { &other }, &rig, &owners);
            scope.spawn(move || {
                let mut random = start.wrapping_add(seed);
                let mut held: Vec<Slot> = Vec::new();
                for _ in 0..4000 {
                    random =
                        random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (dice, len) = (random >> 60, 1 + (random >> 20) % (40 << 10));
                    let direction =
                        [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional]
                            [(random >> 50) as usize % 3];
                    if dice < 8 && held.len() < 24 {
                        match take(client, len, direction) {
                            Ok(slot) => {
                                assert!(slot.direction == direction && size(&slot) >= len);
                                let place = slot.range.first();
                                assert!(owners.lock().unwrap().insert(place, seed).is_none());
                                held.push(slot);
                            }
                            Err(Error::BounceQuota { held, quota, .. }) => assert!(held <= quota),
                            Err(error) => panic!("{error}"),
                        }
                    } else if dice < 15 && !held.is_empty() {
                        let slot = held.swap_remove((random >> 30) as usize % held.len());
                        owners.lock().unwrap().remove(&slot.range.first());
                        client.give_back(slot);
                    } else if random >> 40 & 31 == 0 {
                        rig.pools().trim();
                    } else if random >> 40 & 31 == 1 {
                        rig.clock.advance(1_000_000);
                        rig.pools().expire();
                    }
                }
                for slot in held {
                    owners.lock().unwrap().remove(&slot.range.first());
                    client.give_back(slot);
                }
            });
        }
    });
    let stats = rig.pools().stats();
    assert_eq!((stats.slots, stats.slot_bytes), (0, 0));
    assert!(stats.kept_bytes <= 512 << 10);
    assert_eq!((held_by(&one), held_by(&other)), (0, 0));
    rig.pools().trim();
    let stats = rig.pools().stats();
    assert_eq!((stats.grown, stats.quarantined_bytes), (stats.given_back, 0));
    drop((one, other));
    rig.end();
}

#[test]
fn invalid_limits_are_refused() {
    let refused = |largest, max_bytes| {
        let rig = Rig::new(SMALL);
        let limits = BounceLimits { largest, max_bytes, idle_ms: 1 };
        let (domain, allocator) = (Arc::clone(&rig.domain), Arc::clone(&rig.allocator));
        matches!(
            BouncePools::new(domain, allocator, HostMemory, limits),
            Err(SetupError::Slots { granule: 4096, .. })
        )
    };
    assert!(refused(5000, 1 << 20) && refused(2048, 1 << 20) && refused(8192, 4096));
    assert!(!refused(8192, 8192));
}
