//! Policies that change while the device is in use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use ringfence_dma::{
    BounceLimits, Device, Direction, DmaConfig, Fallback, FlushTuning, Mapping, Policy,
    SwitchError, TimerKind,
};
use ringfence_iommu::{Capabilities, table::Limits};

use crate::{
    bounce::Rig,
    mock::{Bench, Broken, Buf, EagerAllocator, MockDomain, Setup, Stop, eventually},
};

const LAZY: [Policy; 4] = [Policy::LazySq, Policy::LazyMq, Policy::LazySqMap, Policy::LazyMqMap];
const STRICT: [Policy; 2] = [Policy::Strict, Policy::StrictMap];

const MS: u64 = 1_000_000;

fn map(bench: &Bench) -> Mapping<Buf> {
    let pieces = [(0x1000, 0x1000), (0x8000, 0x1000)];
    bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap()
}

#[test]
fn strict_becomes_lazy_while_mappings_live() {
    // rule L27
    for (strict, lazy) in STRICT.into_iter().flat_map(|s| LAZY.map(|l| (s, l))) {
        let bench = Bench::new(strict);
        let mapping = map(&bench);
        let clone = bench.device.clone();
        assert_eq!(clone.set_policy(lazy), Ok(()));
        assert_eq!((bench.device.effective_policy(), bench.device.fallback()), (lazy, None));
        let iova = mapping.iova().0;
        drop(mapping);
        assert!(bench.domain.reach(iova).is_some(), "{lazy}: it waits for its flush");
        let interval = FlushTuning::of(lazy).interval_ms * MS;
        assert_eq!(bench.device.timer_due_at_ns(), Some(MS + interval));
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.unmap_syncs, stats.flushes), (1, 0, 0));
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn lazy_becomes_strict_and_what_was_queued_is_released() {
    // rules L17, L24, L27
    for (lazy, strict) in LAZY.into_iter().flat_map(|l| STRICT.map(|s| (l, s))) {
        let bench = Bench::new(lazy);
        let (first, second, third) = (map(&bench), map(&bench), map(&bench));
        drop(first);
        bench.cpu.set(1);
        drop(second);
        assert_eq!(bench.device.set_policy(strict), Ok(()));
        assert_eq!(bench.device.effective_policy(), strict);
        assert_eq!(bench.allocator.live(), 1, "only the third is in use");
        assert_eq!(bench.device.timer_due_at_ns(), None);
        let iova = third.iova().0;
        drop(third.unmap().unwrap());
        assert_eq!(bench.domain.reach(iova), None);
        bench.assert_nothing_leaked();
        let stats = bench.device.stats();
        assert_eq!((stats.flushes, stats.unmap_syncs, stats.exposure.released), (1, 1, 2));
        // And lazy again.
        assert_eq!(bench.device.set_policy(lazy), Ok(()));
        drop(map(&bench));
        assert!(bench.device.timer_due_at_ns().is_some());
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn queues_change_their_kind_and_what_was_queued_is_released() {
    // rules L24, L27
    for (from, to) in LAZY.into_iter().flat_map(|from| LAZY.map(|to| (from, to))) {
        let bench = Bench::new(from);
        let (first, second, third) = (map(&bench), map(&bench), map(&bench));
        drop(first);
        bench.cpu.set(1);
        drop(second);
        assert_eq!(bench.device.set_policy(to), Ok(()));
        assert_eq!(bench.device.effective_policy(), to);
        let same = from.queue_kind() == to.queue_kind();
        assert_eq!(bench.device.stats().queued, if same { 2 } else { 0 });
        drop(third);
        assert!(bench.device.timer_due_at_ns().is_some());
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn maps_are_synced_as_the_policy_in_force_requires() {
    let bench = Bench::new(Policy::Strict);
    let mut syncs = 0;
    let changes = [Policy::StrictMap, Policy::LazySq, Policy::LazySqMap, Policy::LazyMq];
    for policy in changes {
        bench.device.set_policy(policy).unwrap();
        drop(map(&bench));
        syncs += if policy.batches_maps() { 1 } else { 2 };
        assert_eq!(bench.device.stats().map_syncs, syncs, "{policy}");
    }
}

#[test]
fn what_was_pushed_under_another_policy_is_synced_all_the_same() {
    // rules L27, L34
    for (before, after) in STRICT.into_iter().chain(LAZY).flat_map(|b| STRICT.map(|a| (b, a))) {
        let bench = Bench::new(before);
        let mut maps = bench.device.map_batch();
        maps.push(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice, ()).unwrap();
        let each = if before.batches_maps() { 0 } else { 1 };
        assert_eq!(bench.device.stats().map_syncs, each, "from {before}");
        bench.device.set_policy(after).unwrap();
        let mut mappings = Vec::new();
        maps.finish(|(), mapping| mappings.push(mapping.unwrap()));
        assert_eq!(bench.device.stats().map_syncs, 1, "from {before} to {after}");
        // Mappings unmapped together follow the policy in force.
        let mut unmaps = bench.device.unmap_batch();
        mappings.into_iter().for_each(|mapping| unmaps.push(mapping, ()).unwrap());
        bench.device.set_policy(before).unwrap();
        unmaps.finish(|(), returned| drop(returned.unwrap()));
        assert_eq!(bench.device.stats().queued, u64::from(before.is_lazy()));
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_change_to_off_or_from_off_is_refused() {
    let all = || Policy::ALL.into_iter().filter(|policy| !policy.bounces());
    for policy in all() {
        let bench = Bench::new(policy);
        assert_eq!(bench.device.set_policy(policy), Ok(()), "that is not a change");
        for other in all().filter(|other| *other != policy) {
            let result = bench.device.set_policy(other);
            if policy == Policy::Off || other == Policy::Off {
                let error = SwitchError::Off { from: policy, to: other };
                assert_eq!(result, Err(error));
                let text = error.to_string();
                assert!(text.contains(&format!("from {policy} to {other}")), "{text}");
                assert_eq!(bench.device.effective_policy(), policy);
            } else {
                assert_eq!(result, Ok(()));
                bench.device.set_policy(policy).unwrap();
            }
        }
    }
}

#[test]
fn a_domain_that_cannot_defer_flushes_stays_strict_and_reports_why() {
    for lazy in LAZY {
        let mut setup = Setup::new(lazy);
        setup.capabilities = Capabilities::default();
        let bench = setup.build();
        assert_eq!(bench.device.fallback(), Some(Fallback::NoDeferredFlush));
        let error = SwitchError::Fallback(Fallback::NoDeferredFlush);
        assert_eq!(bench.device.set_policy(lazy), Err(error));
        assert!(error.to_string().contains("cannot defer its flushes"));
        assert_eq!(bench.device.effective_policy(), lazy.to_strict());
        // A strict policy is in force once it is requested.
        bench.device.set_policy(lazy.to_strict()).unwrap();
        assert_eq!(bench.device.fallback(), None);
        drop(map(&bench));
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_flush_that_fails_leaves_a_strict_policy_and_its_old_debt_to_the_timer() {
    // rules L19, L27
    for lazy in LAZY {
        let bench = Bench::new(lazy);
        let (first, second) = (map(&bench), map(&bench));
        drop(first);
        bench.domain.broken.lock().unwrap().flush = true;
        let error = bench.device.set_policy(Policy::Strict).unwrap_err();
        assert!(matches!(error, SwitchError::Flush(_)), "{error}");
        assert_eq!(bench.device.effective_policy(), Policy::Strict);
        assert_eq!((bench.device.stats().queued, bench.allocator.live()), (1, 2));
        assert!(bench.device.timer_due_at_ns().is_some());
        let iova = second.iova().0;
        drop(second);
        assert_eq!(bench.domain.reach(iova), None, "what comes now is strict");
        *bench.domain.broken.lock().unwrap() = Broken::default();
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
        assert_eq!(bench.device.timer_due_at_ns(), None);
    }
}

#[test]
fn no_change_to_strict_succeeds_while_what_was_queued_is_reachable() {
    // rules L19, L27
    let strict = || Policy::ALL.into_iter().filter(|policy| policy.is_strict());
    for (lazy, first, second) in LAZY
        .into_iter()
        .flat_map(|lazy| strict().flat_map(move |f| strict().map(move |s| (lazy, f, s))))
    {
        let rig = Rig::new(BounceLimits::default());
        let device = &rig.devices[0];
        device.set_policy(lazy).unwrap();
        let mapping = device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap();
        let iova = mapping.iova().0;
        drop(mapping);
        rig.domain.broken.lock().unwrap().flush = true;
        // As often as it is requested, even if it is in force.
        for strict in [first, second, second, first] {
            let switched = device.set_policy(strict);
            assert!(
                matches!(switched, Err(SwitchError::Flush(_))),
                "{lazy}, {strict}: {switched:?}"
            );
            assert_eq!(device.effective_policy(), strict);
            assert!(rig.domain.reach(iova).is_some() && device.timer_due_at_ns().is_some());
        }
        *rig.domain.broken.lock().unwrap() = Broken::default();
        assert_eq!(device.set_policy(second), Ok(()), "{lazy}, {first}, {second}");
        assert_eq!((rig.domain.reach(iova), device.stats().queued), (None, 0));
        assert_eq!(device.timer_due_at_ns(), None);
    }
}

#[test]
fn the_queue_of_a_cpu_that_went_away_is_released_by_any_flush() {
    // rules L23, L24
    for policy in [Policy::LazyMq, Policy::LazyMqMap] {
        let flushes: [fn(&Bench); 3] = [
            |bench| bench.device.expire().unwrap(),
            |bench| bench.device.flush().unwrap(),
            |bench| bench.device.set_policy(Policy::LazySq).unwrap(),
        ];
        for flush in flushes {
            let bench = Bench::new(policy);
            bench.cpu.set(1);
            drop((map(&bench), map(&bench)));
            // From now on no thread runs there.
            bench.cpu.set(0);
            flush(&bench);
            bench.assert_nothing_leaked();
        }
    }
}

#[test]
fn a_device_that_becomes_lazy_has_a_timer_of_its_own_from_then_on() {
    // rules L23, L30
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let config = DmaConfig {
        flush: Some(FlushTuning { interval_ms: 1, ..FlushTuning::default() }),
        ..DmaConfig::new(Policy::StrictMap)
    };
    let device = Device::builder(Arc::clone(&domain))
        .allocator(Arc::clone(&allocator))
        .config(config)
        .build()
        .unwrap();
    for _ in 0..3 {
        device.set_policy(Policy::LazySqMap).unwrap();
        let (sender, receiver) = mpsc::channel();
        let hook = move || sender.send(thread::current().name().map(str::to_owned)).unwrap();
        *domain.during_flush.lock().unwrap() = Some(Box::new(hook));
        drop(device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap());
        assert_eq!(receiver.recv().unwrap().as_deref(), Some("ringfence-flush"));
        eventually("the timer", || allocator.live() == 0);
        device.set_policy(Policy::StrictMap).unwrap();
    }
    drop(device);
    assert_eq!(Arc::strong_count(&domain), 1, "the timer's thread is gone");
}

#[test]
fn once_strict_is_in_force_no_unmap_that_was_under_way_is_queued() {
    // rules L17, L27
    for lazy in LAZY {
        let mut setup = Setup::new(lazy);
        setup.config.flush = Some(FlushTuning { slots: 16, ..FlushTuning::of(lazy) });
        let bench = setup.build();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stop_at_end = Stop(&stop);
            for _ in 0..2 {
                let (device, stop) = (bench.device.clone(), &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        // The mock asserts that nothing is mapped where something is still cached.
                        let buffer = Buf::new(&[(0x1000, 0x1000)]);
                        drop(device.map(buffer, Direction::ToDevice).unwrap());
                    }
                });
            }
            for _ in 0..12 {
                let released = bench.device.stats().exposure.released;
                eventually("lazy unmaps", || {
                    bench.device.stats().exposure.released >= released + 32
                });
                bench.device.set_policy(Policy::StrictMap).unwrap();
                let unmaps = bench.device.stats().unmaps;
                eventually("strict unmaps", || {
                    let stats = bench.device.stats();
                    assert_eq!(stats.queued, 0, "{lazy}");
                    stats.unmaps >= unmaps + 16
                });
                bench.device.set_policy(lazy).unwrap();
            }
            drop(stop_at_end);
        });
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn threads_unmap_while_the_policy_goes_round() {
    // rules L19, L22, L27
    let mut setup = Setup::new(Policy::LazySq);
    setup.config.timer = TimerKind::Manual;
    let bench = setup.build();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop_at_end = Stop(&stop);
        for thread in 0..3u64 {
            let (device, stop) = (bench.device.clone(), &stop);
            scope.spawn(move || {
                let mut held = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let buffer = Buf::new(&[(thread * 0x10_0000, 0x1000)]);
                    held.push(device.map(buffer, Direction::ToDevice).unwrap());
                    if held.len() == 8 {
                        held.clear();
                    }
                }
            });
        }
        for round in 0..200usize {
            bench.cpu.set(round);
            let policy = Policy::ALL[1 + (round * 5) % 6];
            bench.device.set_policy(policy).unwrap();
            if round % 7 == 0 {
                bench.device.expire().unwrap();
            }
            let unmaps = bench.device.stats().unmaps;
            eventually("unmaps", || bench.device.stats().unmaps >= unmaps + 8);
        }
        drop(stop_at_end);
    });
    // Under a lazy policy at the end, no entry is left without a timer.
    assert!(bench.device.stats().queued == 0 || bench.device.timer_due_at_ns().is_some());
    bench.device.flush().unwrap();
    bench.assert_nothing_leaked();
    let stats = bench.device.stats();
    assert_eq!(stats.exposure.released + stats.unmap_syncs, stats.unmaps);
}
