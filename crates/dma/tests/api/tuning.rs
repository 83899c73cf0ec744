//! The tuning of flush queues, and bounds of exposure.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use proptest::prelude::*;
use ringfence_dma::{
    Device, Direction, DmaConfig, Environment, FlushTuning, Mapping, Policy, QueueKind,
    SwitchError, TimerKind, TuningError,
};
use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial, Range,
    Result, SyncToken, Work, table::Limits,
};
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

use crate::mock::{
    Bench, Broken, Buf, EagerAllocator, Log, MockDomain, Setup, Stop, TickingClock, eventually,
};

const LAZY: [Policy; 4] = [Policy::LazySq, Policy::LazyMq, Policy::LazySqMap, Policy::LazyMqMap];

const MS: u64 = 1_000_000;
const PAGE: u64 = 0x1000;

fn map_pages(bench: &Bench, pages: u64) -> Mapping<Buf> {
    bench.device.map(Buf::new(&[(0x10_0000, pages * PAGE)]), Direction::ToDevice).unwrap()
}

fn map(bench: &Bench) -> Mapping<Buf> {
    map_pages(bench, 1)
}

fn tuned(policy: Policy, change: impl Fn(FlushTuning) -> FlushTuning) -> Bench {
    let mut setup = Setup::new(policy);
    setup.config.flush = Some(change(FlushTuning::of(policy)));
    setup.build()
}

#[test]
fn a_queue_at_its_mark_makes_the_timer_due_and_no_unmap_waits() {
    // rule L22
    for policy in LAZY {
        let bench = tuned(policy, |linux| FlushTuning { slots: 16, high_water: Some(4), ..linux });
        let mappings: Vec<_> = (0..6).map(|_| map(&bench)).collect();
        let interval = FlushTuning::of(policy).interval_ms * MS;
        for (n, mapping) in mappings.into_iter().enumerate() {
            drop(mapping);
            let due = if n < 3 { MS + interval } else { MS };
            assert_eq!(bench.device.timer_due_at_ns(), Some(due), "{policy}, entry {n}");
            assert_eq!(bench.device.stats().flushes, 0, "that is the timer's work");
        }
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
        drop(map(&bench));
        assert_eq!(bench.device.timer_due_at_ns(), Some(MS + interval), "as before");
    }
}

#[test]
fn the_mark_wakes_the_timers_thread() {
    let tuning = FlushTuning {
        high_water: Some(4),
        interval_ms: 600_000,
        ..FlushTuning::of(Policy::LazyMq)
    };
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    // All of it on one CPU, so that one queue reaches its mark.
    let environment = Environment { cpu: Arc::new(FixedCpu::new(1)), ..Environment::default() };
    let config = DmaConfig { flush: Some(tuning), ..DmaConfig::new(Policy::LazyMqMap) };
    let device = Device::builder(domain)
        .allocator(Arc::clone(&allocator))
        .config(config)
        .environment(environment)
        .build()
        .unwrap();
    for _ in 0..3 {
        for _ in 0..4 {
            drop(device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap());
        }
        eventually("the timer", || allocator.live() == 0);
    }
    let stats = device.stats();
    assert_eq!((stats.full_queue_flushes, stats.queued), (0, 0));
    assert_eq!(device.waits().timer.count(), stats.flushes);
}

#[test]
fn an_unmap_that_would_exceed_the_bound_of_bytes_flushes_first() {
    for policy in LAZY {
        let bench =
            tuned(policy, |linux| FlushTuning { max_exposure_bytes: Some(3 * PAGE), ..linux });
        let mappings: Vec<_> = (0..4).map(|_| map(&bench)).collect();
        for (n, mapping) in mappings.into_iter().enumerate() {
            // On any CPU.
            bench.cpu.set(n);
            drop(mapping);
            let stats = bench.device.stats();
            let (pages, flushes) = if n < 3 { (n as u64 + 1, 0) } else { (1, 1) };
            assert_eq!((stats.queued_bytes, stats.bound_flushes), (pages * PAGE, flushes));
        }
        assert_eq!(bench.device.stats().exposure.released, 3);
        assert_eq!(bench.device.waits().full.count(), 1, "that one waited");
        bench.device.expire().unwrap();
        bench.assert_nothing_leaked();
        // What was given back can be used again.
        drop(map_pages(&bench, 3));
        assert_eq!(bench.device.stats().bound_flushes, 1);
        assert_eq!(bench.device.stats().queued_bytes, 3 * PAGE);
    }
}

#[test]
fn an_unmap_larger_than_the_bound_of_bytes_is_strict() {
    // rule L17
    for policy in LAZY {
        let bench =
            tuned(policy, |linux| FlushTuning { max_exposure_bytes: Some(3 * PAGE), ..linux });
        drop(map(&bench));
        let mapping = map_pages(&bench, 4);
        let iova = mapping.iova().0;
        drop(mapping.unmap().unwrap());
        assert_eq!(bench.domain.reach(iova), None);
        assert!(!bench.allocator.is_live(iova));
        let stats = bench.device.stats();
        assert_eq!((stats.bound_unmaps, stats.unmap_syncs, stats.flushes), (1, 1, 0));
        assert_eq!(stats.queued, 1, "what was queued stays queued");
    }
}

#[test]
fn an_unmap_that_cannot_make_room_by_a_flush_is_strict() {
    let bench =
        tuned(Policy::LazySq, |linux| FlushTuning { max_exposure_bytes: Some(PAGE), ..linux });
    let (one, two) = (map(&bench), map(&bench));
    let iova = two.iova().0;
    drop(one);
    bench.domain.broken.lock().unwrap().flush = true;
    drop(two.unmap().unwrap());
    assert_eq!(bench.domain.reach(iova), None);
    let stats = bench.device.stats();
    assert_eq!((stats.queued, stats.bound_unmaps, stats.quarantined), (1, 1, 0));
    *bench.domain.broken.lock().unwrap() = Broken::default();
    bench.device.flush().unwrap();
    bench.assert_nothing_leaked();
}

#[test]
fn what_fails_to_unmap_gives_its_bytes_back() {
    let bench = tuned(Policy::LazySq, |linux| FlushTuning {
        slots: 2,
        max_exposure_bytes: Some(2 * PAGE),
        ..linux
    });
    let mappings: Vec<_> = (0..3).map(|_| map(&bench)).collect();
    let mut mappings = mappings.into_iter();
    bench.domain.broken.lock().unwrap().unmap = true;
    assert!(mappings.next().unwrap().unmap().is_err());
    *bench.domain.broken.lock().unwrap() = Broken::default();
    drop(mappings.next());
    // The queue is full, and there is no room in it.
    bench.domain.broken.lock().unwrap().flush = true;
    assert!(mappings.next().unwrap().unmap().is_err());
    *bench.domain.broken.lock().unwrap() = Broken::default();
    bench.device.flush().unwrap();
    drop(map_pages(&bench, 2));
    let stats = bench.device.stats();
    assert_eq!((stats.queued_bytes, stats.quarantined), (2 * PAGE, 2));
    assert_eq!((stats.bound_flushes, stats.bound_unmaps), (0, 0), "both pages were left");
}

/// A domain that accounts for what is exposed: unmapped lazily, and not flushed since.
#[derive(Default)]
struct Gauge {
    /// Bytes, by a number of their own.
    exposed: Mutex<(u64, Vec<(u64, u64)>)>,
    most: AtomicU64,
    flushes: AtomicU64,
}

// SAFETY: there is no device.
unsafe impl Domain for Gauge {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        Geometry::new(PageSizes::from_granule(PAGE).unwrap(), Range::ALL)
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }
    fn map_pages(&self, _: &[Map<GuestPhys>]) -> Result<(), Partial> {
        Ok(())
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        for range in ranges.iter().filter(|_| gather.is_queued()) {
            let (number, exposed) = &mut *self.exposed.lock().unwrap();
            *number += 1;
            exposed.push((*number, range.extent() + 1));
            let sum = exposed.iter().map(|(_, bytes)| bytes).sum();
            self.most.fetch_max(sum, Ordering::Relaxed);
        }
        // So that other threads are in the middle of an unmap, too.
        thread::yield_now();
        Ok(ranges.iter().map(|range| range.len()).sum())
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        if work == Work::All {
            self.flushes.fetch_add(1, Ordering::Relaxed);
            let begun = self.exposed.lock().unwrap().0;
            thread::yield_now();
            self.exposed.lock().unwrap().1.retain(|(number, _)| *number > begun);
        }
        Ok(SyncToken::DONE)
    }
    fn sync_poll(&self, _: SyncToken, _: Work<'_>, _: &mut dyn FnMut(Range, Error)) -> bool {
        true
    }
    fn sync_wait(&self, _: SyncToken) {}
    fn iova_to_phys(&self, _: Iova) -> Option<GuestPhys> {
        None
    }
}

fn gauged(
    policy: Policy,
    tuning: FlushTuning,
) -> (Device<Arc<Gauge>, Arc<EagerAllocator>>, Arc<Gauge>) {
    let domain = Arc::new(Gauge::default());
    let allocator = EagerAllocator::new(PAGE, Log::default());
    let config = DmaConfig {
        flush: Some(FlushTuning { kind: policy.queue_kind().unwrap(), ..tuning }),
        ..DmaConfig::new(policy)
    };
    (
        Device::builder(Arc::clone(&domain)).allocator(allocator).config(config).build().unwrap(),
        domain,
    )
}

#[test]
fn many_threads_together_never_exceed_the_bound_of_bytes() {
    for policy in [Policy::LazySqMap, Policy::LazyMqMap] {
        let bound = 8 * PAGE;
        let tuning = FlushTuning {
            max_exposure_bytes: Some(bound),
            interval_ms: 1,
            ..FlushTuning::default()
        };
        let (device, domain) = gauged(policy, tuning);
        thread::scope(|scope| {
            for thread in 0..4u64 {
                let device = device.clone();
                scope.spawn(move || {
                    for n in 0..1000 {
                        let pages = 1 + (thread + n) % 3;
                        let buffer = Buf::new(&[(0x10_0000, pages * PAGE)]);
                        drop(device.map(buffer, Direction::ToDevice).unwrap());
                    }
                });
            }
        });
        let most = domain.most.load(Ordering::Relaxed);
        assert!(most <= bound, "{policy}: {most:#x} bytes were exposed");
        assert!(most > bound / 2, "{policy}: the test hardly comes near the bound");
        device.flush().unwrap();
        let stats = device.stats();
        assert_eq!(stats.exposure.released + stats.bound_unmaps, 4000);
        assert!(stats.bound_flushes > 100, "{stats:?}");
    }
}

#[test]
fn a_bound_of_bytes_holds_for_what_is_unmapped_after_it_was_set() {
    for policy in LAZY {
        let bench = tuned(policy, |linux| linux);
        drop((map(&bench), map(&bench), map(&bench)));
        assert_eq!(bench.device.stats().queued, 3);
        let tuning = bench.device.flush_tuning();
        let bounded = |pages: u64| FlushTuning { max_exposure_bytes: Some(pages * PAGE), ..tuning };
        bench.device.set_flush_tuning(bounded(2)).unwrap();
        assert_eq!(bench.device.stats().queued, 0, "what was queued is flushed");
        let most = |pages| {
            for _ in 0..2 * pages + 1 {
                drop(map(&bench));
                assert!(bench.device.stats().queued_bytes <= pages * PAGE);
            }
            bench.device.stats().bound_flushes
        };
        assert_eq!(most(2), 2);
        bench.device.set_flush_tuning(bounded(4)).unwrap();
        assert_eq!(most(4), 4);
        bench.device.set_flush_tuning(bounded(1)).unwrap();
        assert_eq!(most(1), 6);
        bench.device.set_flush_tuning(tuning).unwrap();
        drop((map(&bench), map(&bench), map(&bench), map(&bench), map(&bench)));
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.bound_flushes), (5, 6), "not bounded any more");
        bench.device.set_flush_tuning(bounded(3)).unwrap();
        assert_eq!(most(3), 8);
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn bounds_may_change_while_threads_unmap() {
    let single = FlushTuning { interval_ms: 1, ..FlushTuning::default() };
    let (device, domain) = gauged(Policy::LazySq, single);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop_at_end = Stop(&stop);
        for _ in 0..3 {
            let (device, stop) = (device.clone(), &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let buffer = Buf::new(&[(0x10_0000, PAGE)]);
                    drop(device.map(buffer, Direction::ToDevice).unwrap());
                }
            });
        }
        for round in 0..60u64 {
            let kind = if round % 3 == 0 { QueueKind::PerCpu } else { QueueKind::Single };
            let max_exposure_bytes = (round % 4 != 0).then_some((1 + round % 4) * PAGE);
            let tuning = FlushTuning { kind, slots: 64, max_exposure_bytes, ..single };
            device.set_flush_tuning(tuning).unwrap();
            assert_eq!(device.flush_tuning(), tuning);
            let begun = domain.flushes.load(Ordering::Relaxed);
            // Concurrent unmaps have ended after a few more flushes.
            eventually("flushes", || {
                if let Some(bytes) = max_exposure_bytes {
                    // No entry was accepted without reserved bytes, even from a concurrent unmap.
                    let queued = device.stats().queued_bytes;
                    assert!(queued <= bytes + 3 * PAGE, "{queued:#x} of {bytes:#x}");
                }
                domain.flushes.load(Ordering::Relaxed) >= begun + 8
            });
        }
        drop(stop_at_end);
    });
    device.flush().unwrap();
    let stats = device.stats();
    assert_eq!((stats.queued, device.allocator().live()), (0, 0));
    assert_eq!(stats.exposure.released + stats.bound_unmaps, stats.unmaps);
}

#[test]
fn the_timer_is_due_before_a_bound_in_time() {
    // rule L23
    for policy in LAZY {
        let bench = tuned(policy, |linux| FlushTuning {
            interval_ms: 1000,
            max_exposure_ms: Some(80),
            ..linux
        });
        drop(map(&bench));
        assert_eq!(bench.device.timer_due_at_ns(), Some(MS + 70 * MS), "an eighth to spare");
        bench.clock.advance(70 * MS);
        let clock = Arc::clone(&bench.clock);
        *bench.domain.during_flush.lock().unwrap() = Some(Box::new(move || clock.advance(8 * MS)));
        bench.device.expire().unwrap();
        let stats = bench.device.stats();
        assert_eq!((stats.exposure.max_age_ns, stats.late_releases), (78 * MS, 0));
        let now = MS + 78 * MS;
        drop(map(&bench));
        assert_eq!(bench.device.timer_due_at_ns(), Some(now + 70 * MS), "8 and 2 fit into 10");
        // The next expiry is late, and its flush is slow.
        bench.clock.advance(76 * MS);
        let clock = Arc::clone(&bench.clock);
        *bench.domain.during_flush.lock().unwrap() = Some(Box::new(move || clock.advance(10 * MS)));
        bench.device.expire().unwrap();
        let stats = bench.device.stats();
        assert_eq!((stats.exposure.max_age_ns, stats.late_releases), (86 * MS, 1), "not hidden");
        let now = now + 86 * MS;
        drop(map(&bench));
        let due = now + 80 * MS - (10 + 6) * MS * 5 / 4;
        assert_eq!(bench.device.timer_due_at_ns(), Some(due), "it learned from both");
    }
}

#[test]
fn an_unmap_that_finds_the_timer_overdue_flushes() {
    for policy in LAZY {
        let bench = tuned(policy, |linux| FlushTuning {
            interval_ms: 1000,
            max_exposure_ms: Some(80),
            ..linux
        });
        let (first, second) = (map(&bench), map(&bench));
        bench.cpu.set(1);
        drop(first);
        bench.cpu.set(0);
        bench.clock.advance(75 * MS);
        drop(second);
        assert_eq!(bench.device.stats().flushes, 0, "it might come any moment");
        bench.clock.advance(1);
        drop(map(&bench));
        let stats = bench.device.stats();
        assert_eq!((stats.flushes, stats.bound_flushes, stats.queued), (1, 1, 0), "{policy}");
        assert_eq!((stats.exposure.max_age_ns, stats.late_releases), (75 * MS + 1, 0));
        assert_eq!(bench.device.waits().full.count(), 1);
        bench.assert_nothing_leaked();
        // The timer starts over.
        assert_eq!(bench.device.timer_due_at_ns(), None);
        drop(map(&bench));
        assert_eq!(bench.device.timer_due_at_ns(), Some(MS + 145 * MS + 1));
    }
}

#[test]
fn late_releases_are_reported_however_late_the_timer_is() {
    for policy in [Policy::LazySqMap, Policy::LazyMqMap] {
        let tuning = FlushTuning {
            interval_ms: 1000,
            max_exposure_ms: Some(2),
            slots: 4096,
            ..FlushTuning::default()
        };
        let (device, domain) = gauged(policy, tuning);
        thread::scope(|scope| {
            for _ in 0..3 {
                let device = device.clone();
                scope.spawn(move || {
                    while device.stats().flushes < 20 {
                        let buffer = Buf::new(&[(0x10_0000, PAGE)]);
                        drop(device.map(buffer, Direction::ToDevice).unwrap());
                    }
                });
            }
        });
        device.set_policy(Policy::StrictMap).unwrap();
        // A flush is counted when it begins, and its wait when it ends: the timer's thread may be
        // in one.
        let (stats, waits) = loop {
            let (stats, waits) = (device.stats(), device.waits());
            let waited = waits.timer.count() + waits.full.count() + waits.asked.count();
            if waited == stats.flushes {
                break (stats, waits);
            }
            thread::yield_now();
        };
        assert_eq!(stats.flushes, domain.flushes.load(Ordering::Relaxed));
        assert_eq!(stats.exposure.released, stats.unmaps);
        // How well the bound was kept depends on the machine; the report must be right.
        assert_eq!(stats.late_releases > 0, stats.exposure.max_age_ns > 2 * MS, "{stats:?}");
        let (timer, full) = (waits.timer.count(), waits.full.count());
        assert_eq!(full, stats.bound_flushes + stats.full_queue_flushes);
        assert!(timer + full >= 20, "{stats:?}");
    }
}

#[test]
fn smaller_queues_lose_nothing_of_what_is_queued() {
    // rule L22
    for policy in LAZY {
        let bench = tuned(policy, |linux| FlushTuning { slots: 8, ..linux });
        let mappings: Vec<_> = (0..8).map(|_| map(&bench)).collect();
        let mut mappings = mappings.into_iter();
        mappings.by_ref().take(6).for_each(drop);
        // The flush fails, so that they stay.
        bench.domain.broken.lock().unwrap().flush = true;
        let smaller = FlushTuning { slots: 3, ..bench.device.flush_tuning() };
        let error = bench.device.set_flush_tuning(smaller).unwrap_err();
        assert!(matches!(error, TuningError::Flush(_)), "{error}");
        assert_eq!(bench.device.flush_tuning(), smaller);
        assert_eq!(bench.device.stats().queued, 6);
        assert!(bench.device.timer_due_at_ns().is_some(), "the timer tries again");
        *bench.domain.broken.lock().unwrap() = Broken::default();
        drop(mappings.next());
        let stats = bench.device.stats();
        assert_eq!((stats.queued, stats.full_queue_flushes, stats.exposure.released), (1, 1, 6));
        drop(mappings.next());
        assert_eq!(bench.device.stats().queued, 2);
        drop(map(&bench));
        assert_eq!(bench.device.stats().queued, 1, "two at most");
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn bounds_that_were_set_while_the_flush_failed_hold_once_any_change_succeeds() {
    for policy in LAZY {
        for to in LAZY.into_iter().filter(|to| to.queue_kind() == policy.queue_kind()) {
            let bench = Bench::new(policy);
            drop(map(&bench));
            bench.domain.broken.lock().unwrap().flush = true;
            let bounded =
                FlushTuning { max_exposure_bytes: Some(0x1000), ..bench.device.flush_tuning() };
            bench.device.set_flush_tuning(bounded).unwrap_err();
            let error = bench.device.set_policy(to).unwrap_err();
            assert!(matches!(error, SwitchError::Queues(TuningError::Flush(_))), "{error}");
            assert_eq!(bench.device.stats().queued, 1);
            *bench.domain.broken.lock().unwrap() = Broken::default();
            bench.device.set_policy(to).unwrap();
            assert_eq!(bench.device.stats().queued, 0, "from {policy} to {to}");
            bench.assert_nothing_leaked();
        }
    }
}

#[test]
fn larger_queues_hold_more() {
    for policy in LAZY {
        let bench = tuned(policy, |linux| FlushTuning { slots: 3, ..linux });
        let larger = FlushTuning { slots: 1000, ..bench.device.flush_tuning() };
        bench.device.set_flush_tuning(larger).unwrap();
        for n in 1..1000 {
            drop(map(&bench));
            assert_eq!((bench.device.stats().queued, bench.device.stats().flushes), (n, 1));
        }
        drop(map(&bench));
        assert_eq!((bench.device.stats().queued, bench.device.stats().flushes), (1, 2));
    }
}

#[test]
fn a_shorter_interval_holds_at_once() {
    let bench = Bench::new(Policy::LazySq);
    drop(map(&bench));
    let shorter = FlushTuning { interval_ms: 5, ..FlushTuning::default() };
    bench.device.set_flush_tuning(shorter).unwrap();
    assert_eq!((bench.device.stats().queued, bench.device.timer_due_at_ns()), (0, None));
    drop(map(&bench));
    assert_eq!(bench.device.timer_due_at_ns(), Some(6 * MS));
}

#[test]
fn each_kind_of_queue_keeps_its_tuning() {
    let bench = Bench::new(Policy::LazySqMap);
    let device = &bench.device;
    assert_eq!(device.flush_tuning(), FlushTuning::default());
    let per_cpu = FlushTuning { slots: 32, ..FlushTuning::of(Policy::LazyMq) };
    device.set_flush_tuning(per_cpu).unwrap();
    assert_eq!(device.effective_policy(), Policy::LazyMqMap, "the kind that was tuned is in use");
    assert_eq!(device.flush_tuning(), per_cpu);
    device.set_policy(Policy::LazySq).unwrap();
    assert_eq!(device.flush_tuning(), FlushTuning::default());
    device.set_policy(Policy::Strict).unwrap();
    let single = FlushTuning { slots: 5, ..FlushTuning::default() };
    device.set_flush_tuning(single).unwrap();
    assert_eq!((device.effective_policy(), device.flush_tuning()), (Policy::Strict, single));
    device.set_policy(Policy::LazyMq).unwrap();
    assert_eq!(device.flush_tuning(), per_cpu);
    device.set_policy(Policy::LazySq).unwrap();
    (0..5).for_each(|_| drop(map(&bench)));
    assert_eq!(device.stats().full_queue_flushes, 1, "four fit");
}

#[test]
fn an_invalid_tuning_changes_nothing() {
    for policy in [Policy::LazySq, Policy::StrictMap] {
        let bench = Bench::new(policy);
        drop(map(&bench));
        let before = (bench.device.stats(), bench.device.flush_tuning());
        let invalid = [
            FlushTuning { slots: 1, ..FlushTuning::of(Policy::LazyMq) },
            FlushTuning { high_water: Some(256), ..FlushTuning::of(Policy::LazyMq) },
            FlushTuning { interval_ms: 0, ..FlushTuning::of(Policy::LazyMq) },
            FlushTuning { max_exposure_ms: Some(0), ..FlushTuning::of(Policy::LazyMq) },
            FlushTuning { max_exposure_bytes: Some(0), ..FlushTuning::of(Policy::LazyMq) },
        ];
        for tuning in invalid {
            assert_eq!(bench.device.set_flush_tuning(tuning), Err(tuning.check().unwrap_err()));
            assert_eq!((bench.device.stats(), bench.device.flush_tuning()), before);
            assert_eq!(bench.device.effective_policy(), policy);
        }
    }
}

#[test]
fn waits_are_counted_by_their_cause() {
    let clock = Arc::new(ManualClock::stepping(10));
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let environment = Environment {
        clock,
        cpu: Arc::new(FixedCpu::new(1)),
        thread_clock: Arc::new(TickingClock::default()),
    };
    let tuning = FlushTuning { slots: 3, ..FlushTuning::default() };
    let config = DmaConfig {
        timer: TimerKind::Manual,
        flush: Some(tuning),
        ..DmaConfig::new(Policy::Strict)
    };
    let device = Device::builder(domain)
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .build()
        .unwrap();
    let map = || {
        // On a clone that is dropped; two pieces.
        let buffer = Buf::new(&[(0x1000, 0x1000), (0x8000, 0x1000)]);
        drop(device.clone().map(buffer, Direction::ToDevice).unwrap());
    };
    let counts = || {
        let waits = device.waits();
        let kinds = [&waits.map, &waits.unmap, &waits.timer, &waits.full, &waits.asked];
        // Two readings of the clock lie between beginning and end of each.
        kinds.iter().for_each(|kind| assert_eq!(kind.sum(), 10 * kind.count()));
        kinds.map(|kind| kind.count())
    };
    map();
    assert_eq!(counts(), [2, 1, 0, 0, 0]);
    device.set_policy(Policy::LazySqMap).unwrap();
    (0..3).for_each(|_| map());
    assert_eq!(counts(), [5, 1, 0, 1, 0], "the queue was full");
    device.flush().unwrap();
    assert_eq!(counts(), [5, 1, 0, 1, 1]);
    device.expire().unwrap();
    assert_eq!(counts(), [5, 1, 1, 1, 1]);
    device.set_policy(Policy::StrictMap).unwrap();
    assert_eq!(counts(), [5, 1, 1, 1, 1], "nothing was queued");
    let stats = device.stats();
    assert_eq!((stats.map_syncs, stats.unmap_syncs, stats.flushes), (5, 1, 3));
}

proptest! {
    #[test]
    fn what_is_queued_never_exceeds_its_bounds_and_is_all_released(
        per_cpu: bool,
        slots in 2..10usize,
        high_water in proptest::option::of(1..10usize),
        bytes in proptest::option::of(1..6u64),
        ms in proptest::option::of(1..40u64),
        steps in proptest::collection::vec((1..6u64, 0..2usize, 0..10u64), 1..60),
    ) {
        let policy = if per_cpu { Policy::LazyMqMap } else { Policy::LazySqMap };
        let bench = tuned(policy, |linux| FlushTuning {
            slots,
            high_water: high_water.filter(|mark| *mark < slots),
            interval_ms: 15,
            max_exposure_bytes: bytes.map(|pages| pages * PAGE),
            max_exposure_ms: ms,
            ..linux
        });
        for &(pages, cpu, wait_ms) in &steps {
            // The timer is polled whenever it is due, so it is never late.
            let mut now = bench.device.timer_due_at_ns().unwrap_or(u64::MAX);
            let until = bench.clock.now_ns() + wait_ms * MS;
            while now <= until {
                let clock = bench.clock.now_ns();
                bench.clock.advance(now.saturating_sub(clock));
                bench.device.expire().unwrap();
                now = bench.device.timer_due_at_ns().unwrap_or(u64::MAX);
            }
            let clock = bench.clock.now_ns();
            bench.clock.advance(until.saturating_sub(clock));
            bench.cpu.set(cpu);
            drop(map_pages(&bench, pages));
            let stats = bench.device.stats();
            prop_assert!(stats.queued as usize <= (slots - 1) * 2);
            prop_assert!(stats.queued_bytes <= bytes.map_or(u64::MAX, |pages| pages * PAGE));
            let armed = bench.device.timer_due_at_ns().is_some();
            prop_assert!(stats.queued == 0 || armed, "an entry waits for a timer that is not armed");
        }
        let interval = ms.map_or(15, |ms| ms.min(15));
        prop_assert!(bench.device.stats().exposure.max_age_ns <= interval * MS);
        prop_assert_eq!(bench.device.stats().late_releases, 0);
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
        let stats = bench.device.stats();
        prop_assert_eq!(stats.exposure.released + stats.bound_unmaps, steps.len() as u64);
        let too_large = steps.iter().filter(|(pages, ..)| bytes.is_some_and(|b| *pages > b));
        prop_assert_eq!(stats.bound_unmaps, too_large.count() as u64);
    }
}
