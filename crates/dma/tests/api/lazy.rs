//! Lazy invalidation.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
};

use ringfence_dma::{
    Device, Direction, DmaConfig, Fallback, FlushTuning, Mapping, Policy, TimerKind,
};
use ringfence_iommu::{Capabilities, Iova, table::Limits};

use crate::mock::{Bench, Broken, Buf, EagerAllocator, Event, MockDomain, Setup, eventually};

const LAZY: [Policy; 4] = [Policy::LazySq, Policy::LazyMq, Policy::LazySqMap, Policy::LazyMqMap];

const MS: u64 = 1_000_000;

fn map(bench: &Bench) -> Mapping<Buf> {
    bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap()
}

fn small(policy: Policy, slots: usize) -> Bench {
    let mut setup = Setup::new(policy);
    setup.config.flush = Some(FlushTuning { slots, ..FlushTuning::of(policy) });
    setup.build()
}

#[test]
fn a_lazy_unmap_removes_the_translation_and_defers_only_the_rest() {
    // rules L18, L26
    for policy in LAZY {
        let bench = Bench::new(policy);
        let mapping = map(&bench);
        let iova = mapping.iova().0;
        bench.domain.forget_events();
        drop(mapping.unmap().unwrap());
        assert!(matches!(bench.domain.events()[..], [Event::Unmap { queued: true, .. }]));
        assert_eq!(bench.domain.table.lookup_locked(Iova(iova)), None, "a walk fails at once");
        assert!(bench.domain.reach(iova).is_some(), "what is cached may still hit");
        assert_eq!(bench.allocator.live(), 1);
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.queued_bytes, stats.unmap_syncs), (1, 0x1000, 0));
    }
}

#[test]
fn a_lazily_freed_iova_is_not_reused_before_its_flush() {
    // rule L19
    for policy in LAZY {
        let bench = Bench::new(policy);
        let mapping = map(&bench);
        let iova = mapping.iova();
        drop(mapping);
        let other = map(&bench);
        assert_ne!(other.iova(), iova);
        drop(other);
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
        assert!(map(&bench).iova().0 >= iova.0);
    }
}

#[test]
fn a_flush_in_flight_when_an_entry_is_queued_does_not_release_it() {
    // rule L20
    for policy in LAZY {
        let bench = Bench::new(policy);
        let (before, during) = (map(&bench), map(&bench));
        let iova = during.iova();
        drop(before);
        *bench.domain.during_flush.lock().unwrap() = Some(Box::new(move || drop(during)));
        bench.device.expire().unwrap();
        assert!(bench.domain.reach(iova.0).is_some(), "the flush was too early for it");
        assert!(bench.allocator.is_live(iova.0));
        assert_eq!(bench.allocator.live(), 1, "the other one is released");
        assert!(bench.device.timer_due_at_ns().is_some(), "and the timer runs for this one");
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn table_pages_wait_for_the_flush_as_iovas_do() {
    // rule L21
    for policy in LAZY {
        let bench = Bench::new(policy);
        // 2 MiB in 4 KiB pages fill a table page, and unmapping all of them unlinks it.
        let pieces: Vec<_> = (0..512).map(|n| (0x4000_0000 - n * 0x2000, 0x1000)).collect();
        let mapping = bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap();
        drop(mapping);
        assert!(bench.domain.table.retired_bytes() > 0, "the test unlinks no page");
        let given_back = bench.domain.table.take_deferred();
        assert_eq!(given_back.bytes(), 0, "a page was given back before the flush");
        bench.device.flush().unwrap();
        let given_back = bench.domain.table.take_deferred();
        assert_eq!(given_back.bytes(), bench.domain.table.retired_bytes());
        assert!(given_back.bytes() > 0);
    }
}

#[test]
fn a_queue_of_n_slots_holds_one_less_and_then_its_caller_flushes() {
    // rule L22
    for policy in [Policy::LazySq, Policy::LazyMq] {
        let bench = small(policy, 8);
        let mappings: Vec<_> = (0..9).map(|_| map(&bench)).collect();
        for (n, mapping) in mappings.into_iter().enumerate() {
            drop(mapping);
            let stats = bench.device.stats();
            if n < 7 {
                assert_eq!((stats.queued, stats.flushes), (n as u64 + 1, 0));
            } else {
                // All seven were released, and nothing was dropped.
                assert_eq!((stats.queued, stats.flushes), (n as u64 - 6, 1));
                assert_eq!(stats.full_queue_flushes, 1);
                assert_eq!(stats.exposure.released, 7);
            }
        }
        assert_eq!(bench.allocator.live(), 2);
    }
}

#[test]
fn linuxs_tuning_is_the_default() {
    let full = |policy, capacity: u64| {
        let bench = Bench::new(policy);
        for _ in 0..capacity {
            drop(map(&bench));
        }
        assert_eq!(bench.device.stats().queued, capacity);
        drop(map(&bench));
        assert_eq!((bench.device.stats().queued, bench.device.stats().flushes), (1, 1));
    };
    full(Policy::LazySq, 32_767);
    full(Policy::LazyMq, 255);
    for (policy, ms) in [(Policy::LazySqMap, 1000), (Policy::LazyMqMap, 10)] {
        let bench = Bench::new(policy);
        drop(map(&bench));
        assert_eq!(bench.device.timer_due_at_ns(), Some(MS + ms * MS));
    }
}

#[test]
fn the_timer_is_armed_by_the_first_entry_since_it_expired_and_by_no_other() {
    // rule L23
    let bench = Bench::new(Policy::LazyMq);
    assert_eq!(bench.device.timer_due_at_ns(), None);
    drop(map(&bench));
    let due = bench.device.timer_due_at_ns();
    assert_eq!(due, Some(11 * MS));
    bench.clock.advance(5 * MS);
    bench.cpu.set(1);
    drop(map(&bench));
    assert_eq!(bench.device.timer_due_at_ns(), due, "only one is pending");
    bench.clock.advance(5 * MS);
    bench.device.expire().unwrap();
    assert_eq!(bench.device.timer_due_at_ns(), None);
    // One flush, and both queues are empty.
    let stats = bench.device.stats();
    assert_eq!((stats.flushes, stats.queued, bench.allocator.live()), (1, 0, 0));
    drop(map(&bench));
    assert_eq!(bench.device.timer_due_at_ns(), Some(21 * MS));
}

#[test]
fn a_flush_by_one_cpu_lets_every_queue_reap_without_flushing_again() {
    // rules L22, L24
    let bench = small(Policy::LazyMqMap, 4);
    bench.cpu.set(1);
    let first = map(&bench);
    let iova = first.iova().0;
    drop(first);
    bench.cpu.set(0);
    let mappings: Vec<_> = (0..4).map(|_| map(&bench)).collect();
    drop(mappings);
    assert_eq!(bench.device.stats().flushes, 1, "CPU 0 had to flush");
    assert!(bench.allocator.is_live(iova), "CPU 1 has not looked yet");
    let mapping = map(&bench);
    bench.cpu.set(1);
    drop(mapping);
    assert!(!bench.allocator.is_live(iova), "CPU 1 reaped before it queued");
    assert_eq!(bench.device.stats().flushes, 1);
}

#[test]
fn dropping_the_device_stops_its_timer_and_gives_back_what_was_queued() {
    // rule L30
    for policy in LAZY {
        for kind in [TimerKind::Manual, TimerKind::Thread] {
            let mut setup = Setup::new(policy);
            setup.config.timer = kind;
            let bench = setup.build();
            let pieces: Vec<_> = (0..512).map(|n| (0x4000_0000 - n * 0x2000, 0x1000)).collect();
            drop(bench.device.map(Buf::new(&pieces), Direction::ToDevice).unwrap());
            drop(map(&bench));
            let Bench { device, domain, allocator, .. } = bench;
            drop(device);
            assert_eq!((allocator.live(), domain.cached().len()), (0, 0));
            assert_eq!(domain.table.take_deferred().bytes(), domain.table.retired_bytes());
            assert_eq!(Arc::strong_count(&domain), 1, "the timer's thread is gone");
        }
    }
}

#[test]
fn a_device_that_cannot_flush_at_its_end_gives_no_iova_back() {
    let bench = Bench::new(Policy::LazySq);
    drop(map(&bench));
    bench.domain.broken.lock().unwrap().flush = true;
    let Bench { device, allocator, .. } = bench;
    drop(device);
    assert_eq!(allocator.live(), 1);
}

#[test]
fn a_flush_that_fails_releases_nothing_and_is_tried_again() {
    // rule L19
    for policy in LAZY {
        let bench = Bench::new(policy);
        drop(map(&bench));
        bench.domain.broken.lock().unwrap().flush = true;
        assert!(bench.device.expire().is_err());
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.flushes, stats.flush_failures), (1, 1, 1));
        assert!(bench.device.timer_due_at_ns().is_some());
        assert!(bench.device.flush().is_err());
        *bench.domain.broken.lock().unwrap() = Broken::default();
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn so_is_one_that_panics() {
    for policy in LAZY {
        let bench = Bench::new(policy);
        drop(map(&bench));
        let hook = || panic!("a panic of the test's");
        *bench.domain.during_flush.lock().unwrap() = Some(Box::new(hook));
        assert!(catch_unwind(AssertUnwindSafe(|| bench.device.expire())).is_err());
        assert_eq!(bench.device.stats().queued, 1);
        assert!(bench.device.timer_due_at_ns().is_some());
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn an_entry_for_which_a_full_queue_cannot_make_room_is_quarantined_and_the_others_stay() {
    // rule L22
    for policy in LAZY {
        let bench = small(policy, 3);
        let mappings: Vec<_> = (0..2).map(|_| map(&bench)).collect();
        drop(mappings);
        bench.domain.broken.lock().unwrap().flush = true;
        let mapping = map(&bench);
        let iova = mapping.iova();
        let error = mapping.unmap().unwrap_err();
        assert_eq!(error.quarantined.first(), iova);
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.quarantined, bench.allocator.live()), (2, 1, 3));
        *bench.domain.broken.lock().unwrap() = Broken::default();
        bench.device.flush().unwrap();
        assert_eq!(bench.allocator.live(), 1);
        assert!(bench.allocator.is_live(iova.0));
    }
}

#[test]
fn a_lazy_unmap_that_fails_keeps_the_buffer() {
    let bench = Bench::new(Policy::LazyMq);
    let buffer = Buf::new(&[(0x1000, 0x1000)]);
    let drops = buffer.drops();
    let mapping = bench.device.map(buffer, Direction::ToDevice).unwrap();
    bench.domain.broken.lock().unwrap().unmap = true;
    let _ = mapping.unmap().unwrap_err();
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    assert_eq!((bench.device.stats().quarantined, bench.device.stats().queued), (1, 0));
}

#[test]
fn a_domain_that_cannot_defer_flushes_falls_back_to_strict_and_reports_it() {
    for policy in LAZY {
        let mut setup = Setup::new(policy);
        setup.capabilities = Capabilities::default();
        let bench = setup.build();
        assert_eq!(bench.device.effective_policy(), policy.to_strict());
        assert_eq!(bench.device.fallback(), Some(Fallback::NoDeferredFlush));
        let mapping = map(&bench);
        drop(mapping);
        bench.assert_nothing_leaked();
        assert_eq!(bench.device.stats().unmap_syncs, 1);
    }
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        // A device without pools cannot bounce.
        let in_force = if policy.bounces() { Policy::StrictMap } else { policy };
        let fallback = policy.bounces().then_some(Fallback::NoPools);
        assert_eq!(
            (bench.device.effective_policy(), bench.device.fallback()),
            (in_force, fallback)
        );
    }
}

#[test]
fn exposure_is_bytes_times_time_until_release() {
    let bench = Bench::new(Policy::LazySq);
    let (one, two) = (map(&bench), map(&bench));
    drop(one);
    bench.clock.advance(100);
    drop(two);
    bench.clock.advance(50);
    assert_eq!(bench.device.stats().exposure.byte_ns, 0);
    bench.device.flush().unwrap();
    let exposure = bench.device.stats().exposure;
    assert_eq!(exposure.byte_ns, 0x1000 * (150 + 50));
    assert_eq!((exposure.max_age_ns, exposure.released), (150, 2));
}

#[test]
fn the_timers_thread_flushes_by_itself() {
    // rule L23
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let tuning = FlushTuning { interval_ms: 1, ..FlushTuning::of(Policy::LazyMq) };
    let config = DmaConfig { flush: Some(tuning), ..DmaConfig::new(Policy::LazyMqMap) };
    let device = Device::builder(Arc::clone(&domain))
        .allocator(Arc::clone(&allocator))
        .config(config)
        .build()
        .unwrap();
    for _ in 0..3 {
        let (sender, receiver) = mpsc::channel();
        let hook = move || sender.send(thread::current().name().map(str::to_owned)).unwrap();
        *domain.during_flush.lock().unwrap() = Some(Box::new(hook));
        drop(device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap());
        assert_eq!(receiver.recv().unwrap().as_deref(), Some("ringfence-flush"));
        eventually("the timer", || allocator.live() == 0);
    }
    assert_eq!(device.stats().queued, 0);
}

#[test]
fn many_threads_lose_nothing_and_reuse_nothing_too_early() {
    // rules L19, L22, L24
    for policy in LAZY {
        let mut setup = Setup::new(policy);
        setup.config.flush = Some(FlushTuning { slots: 16, ..FlushTuning::of(policy) });
        let bench = setup.build();
        thread::scope(|scope| {
            for _ in 0..3 {
                let device = bench.device.clone();
                scope.spawn(move || {
                    for n in 0..300 {
                        // The mock asserts that nothing is mapped where something is still cached.
                        let buffer = Buf::new(&[(n * 0x1000, 0x1000)]);
                        drop(device.map(buffer, Direction::ToDevice).unwrap());
                        if n % 64 == 0 {
                            device.expire().unwrap();
                        }
                    }
                });
            }
        });
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
        let stats = bench.device.stats();
        assert_eq!((stats.maps, stats.unmaps, stats.exposure.released), (900, 900, 900));
    }
}
