//! Misses: waiting for them, and what happens meanwhile.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use ringfence_iommu::{Prot, Range};
use ringfence_iotlb::{IotlbConfig, Miss, MissSink};
use ringfence_rust_vmm::{Failure, IotlbAddressSpace, IotlbMemory};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory, Permissions};

use crate::front_end::*;

fn read(memory: &impl GuestMemory, addr: u64) -> Option<u64> {
    memory.read_obj(GuestAddress(addr)).ok()
}

#[test]
fn an_access_waits_for_its_update() {
    let bench = bench();
    let space = bench.space();
    let front_end = |bench: &Bench, misses: Vec<_>| {
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_0000 + page_of(miss), PAGE));
    };
    bench.with_front_end(front_end, || {
        let memory = space.memory();
        assert_eq!(read(&*memory, 0x2008), Some(0x20_2008));
        assert!(memory.check_range(GuestAddress(0x5000), 8, Permissions::Read));
        memory.store(1u32, GuestAddress(0x6000), Ordering::Relaxed).unwrap();
        assert_eq!(read(&*memory, 0x2ff8), Some(0x20_2ff8), "known by now");
    });
    let counters = space.counters();
    assert_eq!(counters.waits.load(Ordering::Relaxed), 3);
    assert!(counters.waited_ns.load(Ordering::Relaxed) > 0);
    assert_eq!(counters.failures.load(Ordering::Relaxed), 0);
    assert_eq!(bench.iotlb.open_misses(), 0);
}

#[test]
fn all_misses_of_an_access_are_sent_together() {
    // Sends no miss twice, however slow the machine.
    let timeout = Duration::from_secs(60);
    let bench = bench_with(IotlbConfig { timeout, again: timeout, ..IotlbConfig::default() });
    let batches = Mutex::new(Vec::new());
    let front_end = |bench: &Bench, misses: Vec<_>| {
        batches.lock().unwrap().push(misses.iter().map(page_of).collect::<Vec<_>>());
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_0000 + page_of(miss), PAGE));
    };
    bench.map(0x2000, 0x20_2000, PAGE);
    bench.with_front_end(front_end, || {
        let memory = bench.space().memory();
        memory.read_slice(&mut [0; 0x3000], GuestAddress(0x1001)).unwrap();
        let (r, w) = (Permissions::Read, Permissions::Write);
        let buffers = [(0x8123, 8, r), (0x6000, 0, w), (0x9000, 0x1001, w), (0x1000, 8, r)];
        memory
            .prefetch(buffers.map(|(addr, len, access)| (GuestAddress(addr), len, access)))
            .unwrap();
        memory.write_slice(&[0; 0x1001], GuestAddress(0x9000)).unwrap();
    });
    let batches = batches.into_inner().unwrap();
    assert_eq!(batches[0], [0x1000, 0x3000, 0x4000]);
    assert_eq!(batches[1], [0x8000, 0x9000, 0xa000]);
}

#[test]
fn a_front_end_that_never_replies_costs_an_access_its_timeout_and_no_more() {
    let bench = short_timeout();
    bench.map(0x1000, 0x20_1000, PAGE);
    ignore_misses(&bench);
    let space = bench.space();
    let memory = space.memory();
    assert_eq!(read(&*memory, 0x1000), Some(0x20_1000));
    assert!(!memory.check_range(GuestAddress(0x5000), 1, Permissions::Read));
    assert_eq!(memory.check(), Ok(()));
    assert_eq!(read(&*memory, 0x1008), Some(0x20_1008), "nothing it had was lost");
    assert_eq!(read(&*memory, 0x1ff9), None, "not even the part that is there");
    assert_eq!(memory.check(), Err(Failure::TimedOut { addr: 0x2000 }));
    assert_eq!(space.counters().timeouts.load(Ordering::Relaxed), 2);
    assert_eq!(bench.iotlb.stats().timeouts.load(Ordering::Relaxed), 2);
    assert_eq!(read(&*space.memory(), 0x1000), Some(0x20_1000));
}

#[test]
fn a_refusal_ends_the_wait() {
    // rule D18
    let bench = bench();
    let front_end = |bench: &Bench, misses: Vec<Miss>| {
        misses.iter().for_each(|miss| {
            if miss.access == Prot::READ {
                bench.map_for(page_of(miss), 0x20_0000, PAGE, Prot::READ);
            } else {
                bench.iotlb.refuse(range(miss.iova.0, 1), miss.access);
            }
        });
    };
    let space = bench.space();
    bench.with_front_end(front_end, || {
        let memory = space.memory();
        assert_eq!(read(&*memory, 0x1000), Some(0x20_0000));
        assert!(memory.write_obj(1u8, GuestAddress(0x1000)).is_err());
        assert_eq!(memory.check(), Err(Failure::Refused { addr: 0x1000 }));
    });
    assert_eq!(space.counters().timeouts.load(Ordering::Relaxed), 0);
}

/// A front end that first flushes everything, as QEMU does in lazy mode, and serves a miss when
/// that is over; pages that were mapped before are then mapped again on a miss, `moved` by so much.
fn flushes_first(moved: u64) -> impl FnMut(&Bench, Vec<Miss>) + Send {
    let mut flushed = false;
    move |bench, misses| {
        if !std::mem::replace(&mut flushed, true) {
            let token = bench.iotlb.invalidate(Range::ALL).unwrap();
            // Hangs if an access that waits for us holds a lease.
            bench.shootdown.wait(token);
        }
        for miss in misses {
            let page = page_of(&miss);
            bench.map(page, 0x20_0000 + page + if page < 0x3000 { moved } else { 0 }, PAGE);
        }
    }
}

#[test]
fn an_invalidation_completes_while_a_guard_waits_and_the_guard_goes_on() {
    // rule D15
    // rule D19
    let bench = bench();
    bench.map(0x1000, 0x20_1000, 2 * PAGE);
    let space = bench.space();
    bench.with_front_end(flushes_first(0), || {
        let memory = space.memory();
        let slices = memory.get_slices(GuestAddress(0x1ff8), 0x10, Permissions::Read).unwrap();
        let slices: Vec<_> = slices.map(Result::unwrap).collect();
        assert_eq!(read(&*memory, 0x5008), Some(0x20_5008));
        assert_eq!(slices[0].read_obj::<u64>(0).unwrap(), 0x20_1ff8);
        assert_eq!(memory.check(), Ok(()));
        // It is in use again.
        let token = bench.unmap(0x2000, PAGE);
        assert!(!bench.shootdown.is_over(token));
        drop(slices);
        drop(memory);
        assert!(bench.shootdown.is_over(token));
    });
    assert_eq!(space.counters().waits.load(Ordering::Relaxed), 1);
}

#[test]
fn a_guard_whose_translations_changed_while_it_waited_has_failed() {
    // rule D15
    let bench = bench();
    bench.map(0x1000, 0x20_1000, 2 * PAGE);
    let space = bench.space();
    bench.with_front_end(flushes_first(0x8000), || {
        let memory = space.memory();
        assert_eq!(read(&*memory, 0x2008), Some(0x20_2008));
        assert_eq!(read(&*memory, 0x5008), None, "although it is there by now");
        assert_eq!(memory.check(), Err(Failure::Changed { addr: 0x2000 }));
        assert_eq!(read(&*memory, 0x2008), None);
        let memory = space.memory();
        assert_eq!(read(&*memory, 0x2008), Some(0x20_a008));
        assert_eq!(read(&*memory, 0x5008), Some(0x20_5008));
    });
}

#[test]
fn all_guards_of_a_thread_let_go_while_it_waits() {
    let bench = bench();
    bench.map(0x1000, 0x20_1000, 2 * PAGE);
    let (space, other) = (bench.space(), bench.space());
    bench.with_front_end(flushes_first(0), || {
        let guards = [space.memory(), other.memory()];
        assert!(guards.iter().all(|memory| read(&**memory, 0x2008) == Some(0x20_2008)));
        // A guard of its own, as a device takes to publish.
        assert_eq!(read(&*space.memory(), 0x5008), Some(0x20_5008));
        assert!(guards.iter().all(|memory| memory.check().is_ok()));
    });
    bench.map(0x1000, 0x20_1000, 2 * PAGE);
    let token = bench.unmap(0x7000, PAGE);
    bench.shootdown.wait(token);
    bench.with_front_end(flushes_first(0x8000), || {
        let guards = [space.memory(), other.memory()];
        assert!(guards.iter().all(|memory| read(&**memory, 0x2008) == Some(0x20_2008)));
        // The access that waited fails too, since slices of the other guards may be in use without
        // another check.
        assert_eq!(read(&*space.memory(), 0x7008), None);
        let changed = Err(Failure::Changed { addr: 0x2000 });
        assert!(guards.iter().all(|memory| memory.check() == changed));
    });
}

#[test]
fn other_threads_keep_what_they_use() {
    let bench = bench();
    bench.map(0x1000, 0x20_1000, PAGE);
    let space = bench.space();
    let other = space.another().unwrap();
    let (used, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let front_end = |bench: &Bench, misses: Vec<_>| {
        // Only for the first miss.
        if !done.load(Ordering::Acquire) {
            let token = bench.unmap(0x1000, PAGE);
            // The other thread blocks it, whichever thread waits.
            assert!(!bench.shootdown.is_over(token));
            done.store(true, Ordering::Release);
            bench.shootdown.wait(token);
        }
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_2000, PAGE));
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let memory = other.memory();
            assert_eq!(read(&*memory, 0x1000), Some(0x20_1000));
            used.store(true, Ordering::Release);
            while !done.load(Ordering::Acquire) {
                assert_eq!(read(&*memory, 0x1000), Some(0x20_1000));
            }
        });
        bench.with_front_end(front_end, || {
            while !used.load(Ordering::Acquire) {
                thread::yield_now();
            }
            assert_eq!(read(&*space.memory(), 0x2000), Some(0x20_2000));
        });
    });
}

#[test]
fn a_held_guard_keeps_what_it_has_and_never_waits() {
    let bench = short_timeout();
    bench.map(0x1000, 0x20_1000, PAGE);
    ignore_misses(&bench);
    let space = bench.space();
    let held = space.memory();
    assert_eq!(read(&*held, 0x1000), Some(0x20_1000));
    held.hold();
    let token = bench.unmap(0x1000, PAGE);
    assert_eq!(read(&*space.memory(), 0x5000), None, "waited in vain");
    assert!(!bench.shootdown.is_over(token), "through the wait");
    assert_eq!(read(&*held, 0x1008), Some(0x20_1008));
    assert_eq!(read(&*held, 0x5000), None);
    assert_eq!(held.check(), Err(Failure::WouldWait { addr: 0x5000 }));
    drop(held);
    assert!(bench.shootdown.is_over(token));
}

#[test]
fn a_wider_permission_is_obtained_by_a_miss() {
    // rule D18
    let bench = bench();
    bench.map_for(0x1000, 0x20_1000, PAGE, Prot::READ);
    let front_end = |bench: &Bench, misses: Vec<_>| {
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_1000, PAGE));
    };
    bench.with_front_end(front_end, || {
        let memory = bench.space().memory();
        assert_eq!(read(&*memory, 0x1000), Some(0x20_1000));
        // It holds the very entry that the update replaces.
        memory.write_obj(5u64, GuestAddress(0x1008)).unwrap();
        assert_eq!(read(&*memory, 0x1008), Some(5));
    });
}

#[test]
fn what_is_replaced_by_something_wider_is_looked_at_anew() {
    // rule D15
    let bench = bench();
    bench.map_for(0x1000, 0x20_1000, PAGE, Prot::READ);
    let space = bench.space();
    let replace = |gpa| {
        let memory = space.memory();
        assert!(read(&*memory, 0x1000).is_some());
        let range = range(0x1000, PAGE);
        let token = bench.iotlb.update(range, ringfence_iommu::GuestPhys(gpa), Prot::RW).unwrap();
        assert!(token == 0 || !bench.shootdown.is_over(token));
        let result = memory.write_obj(5u64, GuestAddress(0x1008));
        drop(memory);
        bench.shootdown.wait(token);
        result.is_ok()
    };
    assert!(replace(0x20_1000), "the same place");
    bench.map_for(0x1000, 0x20_1000, PAGE, Prot::READ);
    assert!(!replace(0x20_2000), "another");
    let there = |gpa| bench.memory.read_obj::<u64>(GuestAddress(gpa)).unwrap();
    assert_eq!((there(0x20_1008), there(0x20_2008)), (5, 0x20_2008));
}

#[test]
fn a_failed_wait_fails_other_guards_whose_translations_are_gone() {
    let bench = bench();
    bench.map(0x1000, 0x20_1000, PAGE);
    let space = bench.space();
    let front_end = |bench: &Bench, misses: Vec<Miss>| {
        bench.shootdown.wait(bench.iotlb.invalidate(Range::ALL).unwrap());
        misses.iter().for_each(|miss| bench.iotlb.refuse(range(miss.iova.0, 1), miss.access));
    };
    bench.with_front_end(front_end, || {
        let first = space.memory();
        assert_eq!(read(&*first, 0x1000), Some(0x20_1000));
        let second = space.memory();
        assert_eq!(read(&*second, 0x5000), None);
        assert_eq!(second.check(), Err(Failure::Refused { addr: 0x5000 }));
        assert_eq!(first.check(), Err(Failure::Changed { addr: 0x1000 }));
    });
}

/// Memory that is replaced as a whole.
#[derive(Clone)]
struct Replaced(Arc<Mutex<Plain>>);

impl GuestAddressSpace for Replaced {
    type M = vm_memory::GuestMemoryMmap;
    type T = Plain;

    fn memory(&self) -> Plain {
        Arc::clone(&self.0.lock().unwrap())
    }
}

#[test]
fn the_same_address_of_other_memory_is_a_change() {
    // rule D25
    let bench = bench();
    let both = Replaced(Arc::new(Mutex::new(Arc::clone(&bench.memory))));
    bench.map(0x1000, 0x20_1000, PAGE);
    let space = IotlbAddressSpace::new(Arc::clone(&bench.endpoint), both.clone()).unwrap();
    let front_end = |bench: &Bench, misses: Vec<_>| {
        *both.0.lock().unwrap() = memory();
        let token = bench.iotlb.retain_targets(|_, _| false).unwrap();
        bench.shootdown.wait(token);
        misses.iter().for_each(|miss| bench.map(page_of(miss), 0x20_0000 + page_of(miss), PAGE));
    };
    bench.with_front_end(front_end, || {
        let memory = space.memory();
        assert_eq!(read(&*memory, 0x1000), Some(0x20_1000));
        assert_eq!(read(&*memory, 0x5000), None);
        assert!(matches!(memory.check(), Err(Failure::Changed { .. })));
    });
}

#[test]
fn what_was_invalidated_is_not_written_while_devices_wait_and_fail_and_go_on() {
    // rule D15
    // rule D19
    let bench = bench();
    let turn = Mutex::new(0u64);
    let done = AtomicBool::new(false);
    let front_end = |bench: &Bench, misses: Vec<Miss>| {
        // The owner has its memory to itself while it has the turn.
        let mut turn = turn.lock().unwrap();
        for miss in misses {
            *turn += 1;
            bench.map(page_of(&miss), 0x20_0000 + *turn * 3 % 16 * PAGE, PAGE);
        }
    };
    // Two threads for each of two address spaces.
    let spaces = [bench.space(), bench.space()];
    let spaces = [&spaces[0], &spaces[0], &spaces[1], &spaces[1]];
    let served = AtomicU64::new(0);
    let device = &|space: &Space, mine: u64| {
        while !done.load(Ordering::Relaxed) {
            let memory = space.memory();
            let (one, two) = (GuestAddress(mine), GuestAddress(mine + 3 * PAGE - 4));
            let written = memory.get_slices(one, 64, Permissions::Write).and_then(|one| {
                let slices: Vec<_> = one.collect::<Result<_, _>>()?;
                let value = served.load(Ordering::Relaxed);
                memory.write_slice(&value.to_le_bytes(), two)?;
                slices.iter().for_each(|slice| slice.copy_from(&[value as u8; 64]));
                Ok(())
            });
            assert_eq!(written.is_ok(), memory.check().is_ok());
            served.fetch_add(u64::from(written.is_ok()), Ordering::Relaxed);
        }
    };
    let snapshot = || {
        let mut bytes = vec![0; 0x1_0000];
        bench.memory.read_slice(&mut bytes, GuestAddress(0x20_0000)).unwrap();
        bytes
    };
    let mut broken = 0;
    bench.with_front_end(front_end, || {
        thread::scope(|scope| {
            for (at, space) in (0u64..).zip(spaces) {
                scope.spawn(move || device(space, at << 20));
            }
            for _ in 0..200 {
                let turn = turn.lock().unwrap();
                bench.shootdown.wait(bench.iotlb.invalidate(Range::ALL).unwrap());
                let before = snapshot();
                for _ in 0..3 {
                    thread::yield_now();
                    broken += u32::from(snapshot() != before);
                }
                drop(turn);
                thread::yield_now();
            }
            while served.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            done.store(true, Ordering::Relaxed);
        });
    });
    assert_eq!(broken, 0);
}

thread_local! {
    /// A guard that has handed out memory, for use by a miss sink.
    static OTHER: RefCell<Option<Rc<IotlbMemory<Plain>>>> = const { RefCell::new(None) };
}

/// Reads through the other guard while the thread that sent the miss waits.
struct Reads(Mutex<Vec<bool>>);

impl MissSink for Reads {
    fn send(&self, misses: &[Miss]) -> usize {
        let read = OTHER.with_borrow(|other| other.as_ref().map(|other| reads(other)));
        self.0.lock().unwrap().extend(read);
        misses.len()
    }
}

fn reads(memory: &IotlbMemory<Plain>) -> bool {
    memory.read_obj::<u64>(GuestAddress(0x1008)).is_ok()
}

// rule D15
#[test]
fn what_a_thread_calls_while_it_waits_gets_nothing_of_its_guards() {
    let bench = short_timeout();
    bench.map(0x1000, REGIONS[0].0, PAGE);
    let other = bench.space().memory();
    assert!(reads(&other));
    OTHER.set(Some(Rc::clone(&other)));
    let sink = Arc::new(Reads(Mutex::default()));
    bench.iotlb.set_miss_sink(Some(Arc::clone(&sink) as _));
    let waits = bench.space().memory();
    assert!(waits.read_obj::<u64>(GuestAddress(0x9000)).is_err(), "no update comes");
    OTHER.set(None);
    let seen = sink.0.lock().unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|read| !read), "no lease stood on it: {seen:?}");
    assert!(reads(&other), "it leads where it led");
}
