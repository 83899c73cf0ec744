//! Batches: the guarantee of single mappings, for one sync.

use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use proptest::{collection::vec, prelude::*};
use ringfence_dma::{
    Direction, Error, MapBatch, Mapping, Policy, ThreadClock, UnmapBatch, UnmapError,
};
use ringfence_iommu::{Error as DomainError, Iova, Range};
use ringfence_sync::clock::Clock;

use crate::mock::{Bench, Broken, Buf, EagerAllocator, Event, MockDomain, STATUS, Setup};

type Unmaps = UnmapBatch<std::sync::Arc<MockDomain>, std::sync::Arc<EagerAllocator>, Buf, usize>;
type Maps = MapBatch<std::sync::Arc<MockDomain>, std::sync::Arc<EagerAllocator>, Buf, usize>;
/// Buffers that came back, and those that did not, by their tags.
type Polled = (Vec<(usize, Buf)>, Vec<(usize, UnmapError<Buf>)>);

/// Maps pages that are far apart in memory, and that the allocator places side by side.
fn map_pages(bench: &Bench, count: u64) -> Vec<Mapping<Buf>> {
    let page = |n: u64| Buf::new(&[(0x10_0000 * (n + 1), 0x1000)]);
    (0..count).map(|n| bench.device.map(page(n), Direction::FromDevice).unwrap()).collect()
}

/// The buffers that come back, and the errors of those that do not, by tag.
fn poll(batch: &mut Unmaps) -> Polled {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    batch.poll(|tag, returned| match returned {
        Ok(returned) => good.push((tag, returned.buffer)),
        Err(error) => bad.push((tag, error)),
    });
    (good, bad)
}

fn count(bench: &Bench, wanted: impl Fn(&Event) -> bool) -> usize {
    bench.domain.events().iter().filter(|event| wanted(event)).count()
}

/// A clock that panics where it is read for the `n`th time from now.
#[derive(Default)]
struct Panics(AtomicU64);

impl ThreadClock for Panics {
    fn thread_ns(&self) -> u64 {
        assert_ne!(self.0.fetch_sub(1, Ordering::Relaxed), 1, "a panic of the test's");
        0
    }
}

impl Clock for Panics {
    fn now_ns(&self) -> u64 {
        self.thread_ns()
    }
}

#[test]
fn each_buffer_of_a_batch_waits_for_its_own_sync_whatever_has_panicked() {
    let mut panicked = 0;
    for (watched, nth) in [false, true].into_iter().flat_map(|it| (1..9).map(move |n| (it, n))) {
        let clock = Arc::new(Panics::default());
        let mut setup = Setup::new(Policy::StrictMap);
        setup.config.sample_every = 1;
        setup.thread_clock = Arc::clone(&clock) as _;
        let bench = setup.build();
        let mut mappings = map_pages(&bench, 3).into_iter();
        let mut batch: Unmaps = bench.device.unmap_batch();
        let mut push = |batch: &mut Unmaps, tag| {
            let mapping = mappings.next().unwrap();
            match watched {
                true => batch.push_watched(mapping, tag).unwrap(),
                false => batch.push(mapping, tag).unwrap(),
            }
        };
        bench.domain.hold();
        push(&mut batch, 0);
        clock.0.store(nth, Ordering::Relaxed);
        panicked += usize::from(catch_unwind(AssertUnwindSafe(|| batch.begin())).is_err());
        clock.0.store(0, Ordering::Relaxed);
        push(&mut batch, 1);
        batch.begin();
        push(&mut batch, 2);
        batch.begin();
        let mut tags = Vec::new();
        while bench.domain.let_go() {
            batch.poll(|tag, returned| {
                tags.push(tag);
                let at = returned.unwrap().buffer.pieces[0].0;
                let reached = bench.domain.cached().iter().any(|(_, target, _)| *target == at);
                assert!(!reached, "buffer {tag} is back, and the device reaches it");
            });
        }
        assert_eq!((tags, batch.is_empty()), (vec![0, 1, 2], true), "panic at {nth}");
        bench.assert_nothing_leaked();
    }
    assert!(panicked > 2, "{panicked}");
}

#[test]
fn the_range_of_a_member_is_freed_once_whatever_has_panicked() {
    let mut panicked = 0;
    for nth in 1..16 {
        let clock = Arc::new(Panics::default());
        let mut setup = Setup::new(Policy::StrictMap);
        setup.config.sample_every = 1;
        setup.thread_clock = Arc::clone(&clock) as _;
        setup.clock = Some(Arc::clone(&clock) as _);
        let bench = setup.build();
        let mut batch: Unmaps = bench.device.unmap_batch();
        map_pages(&bench, 3).into_iter().enumerate().for_each(|(tag, it)| {
            batch.push(it, tag).unwrap();
        });
        batch.begin();
        clock.0.store(nth, Ordering::Relaxed);
        panicked += usize::from(catch_unwind(AssertUnwindSafe(|| poll(&mut batch))).is_err());
        clock.0.store(0, Ordering::Relaxed);
        // They may have the ranges that are free now.
        let mut live = map_pages(&bench, 2);
        poll(&mut batch);
        assert!(batch.is_empty(), "panic at {nth}");
        live.extend(map_pages(&bench, 6));
        let ranges: BTreeSet<u64> = live.iter().map(|it| it.segments()[0].addr).collect();
        assert_eq!(ranges.len(), live.len(), "panic at {nth}: two mappings have one address");
        live.into_iter().for_each(|mapping| _ = mapping.unmap().unwrap());
    }
    assert!(panicked > 4, "{panicked}");
}

#[test]
fn what_completes_together_is_one_unmap_and_one_sync_and_returns_only_then() {
    // rules L17, L39
    let bench = Bench::new(Policy::StrictMap);
    let mappings = map_pages(&bench, 4);
    let iovas: Vec<u64> = mappings.iter().map(|mapping| mapping.iova().0).collect();
    let mut batch: Unmaps = bench.device.unmap_batch();
    // Not in the order of their addresses.
    let mut order: Vec<_> = mappings.into_iter().enumerate().collect();
    order.swap(0, 3);
    for (tag, mapping) in order {
        batch.push(mapping, tag).unwrap();
    }
    bench.domain.forget_events();
    bench.domain.hold();
    batch.begin();
    assert!(poll(&mut batch).0.is_empty(), "handed out while the device still reaches them");
    assert!(iovas.iter().all(|&iova| bench.domain.reach(iova).is_some()));
    assert!(iovas.iter().all(|&iova| bench.allocator.is_live(iova)), "free before the sync");
    assert!(bench.domain.let_go());
    let (good, _) = poll(&mut batch);
    assert_eq!(good.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [3, 1, 2, 0]);
    assert!(batch.is_empty());
    let whole = Range::from_len(Iova(iovas[0]), 0x4000).unwrap();
    assert_eq!(
        bench.domain.events()[..2],
        [Event::Unmap { range: whole, queued: false }, Event::Sync]
    );
    assert_eq!(bench.device.stats().unmap_syncs, 1);
    assert_eq!(bench.device.stats().unmaps, 4);
    bench.assert_nothing_leaked();
}

#[test]
fn ranges_that_do_not_touch_share_the_sync_only() {
    let bench = Bench::new(Policy::StrictMap);
    let mut mappings = map_pages(&bench, 3);
    let left = mappings.remove(1);
    let mut batch: Unmaps = bench.device.unmap_batch();
    for mapping in mappings {
        batch.push(mapping, 0).unwrap();
    }
    bench.domain.forget_events();
    batch.finish(|_, returned| drop(returned.unwrap()));
    assert_eq!(count(&bench, |event| matches!(event, Event::Unmap { .. })), 2);
    assert_eq!(count(&bench, |event| *event == Event::Sync), 1);
    assert!(
        bench.domain.reach(left.iova().0).is_some(),
        "what lies between belongs to another mapping"
    );
    drop(left);
    bench.assert_nothing_leaked();
}

#[test]
fn other_policies_unmap_each_by_itself() {
    for policy in Policy::ALL.into_iter().filter(|policy| !policy.batches_unmaps()) {
        let bench = Bench::new(policy);
        let mut batch: Unmaps = bench.device.unmap_batch();
        for mapping in map_pages(&bench, 3) {
            batch.push(mapping, 0).unwrap();
        }
        batch.begin();
        assert_eq!(poll(&mut batch).0.len(), 3, "{policy}");
        let syncs = if policy == Policy::Strict { 3 } else { 0 };
        assert_eq!(bench.device.stats().unmap_syncs, syncs, "{policy}");
        let queued = if policy.is_lazy() { 3 } else { 0 };
        assert_eq!(bench.device.stats().queued, queued, "{policy}");
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn lazily_what_completes_together_is_one_unmap_and_each_range_waits_for_a_flush() {
    // rules L18, L19, L26
    let bench = Bench::new(Policy::LazySqMap);
    let mappings = map_pages(&bench, 5);
    let iovas: Vec<u64> = mappings.iter().map(|mapping| mapping.iova().0).collect();
    let mut batch: Unmaps = bench.device.unmap_batch();
    bench.domain.forget_events();
    for (tag, mapping) in mappings.into_iter().enumerate() {
        match tag {
            2 => batch.push_watched(mapping, tag).unwrap(),
            _ => batch.push(mapping, tag).unwrap(),
        }
    }
    batch.begin();
    let mut stale = None;
    let mut count = 0;
    batch.poll(|_, returned| {
        let returned = returned.unwrap();
        stale = stale.take().or(returned.stale);
        count += 1;
    });
    assert_eq!(count, 5, "a lazy unmap waits for no sync");
    let whole = Range::from_len(Iova(iovas[0]), 0x5000).unwrap();
    assert_eq!(bench.domain.events(), [Event::Unmap { range: whole, queued: true }]);
    assert_eq!((bench.device.stats().queued, bench.device.stats().queued_bytes), (5, 0x5000));
    assert!(iovas.iter().all(|&iova| bench.allocator.is_live(iova)));
    bench.device.flush().unwrap();
    let live: Vec<bool> = iovas.iter().map(|&iova| bench.allocator.is_live(iova)).collect();
    assert_eq!(live, [false, false, true, false, false], "all but the watched one are free");
    assert!(stale.take().unwrap().released_at_ns().is_some());
    bench.assert_nothing_leaked();
}

#[test]
fn a_lazy_unmap_that_fails_quarantines_what_it_was_for_and_queues_the_rest() {
    let bench = Bench::new(Policy::LazyMqMap);
    let mut mappings = map_pages(&bench, 4);
    let between = mappings.remove(1);
    let mut batch: Unmaps = bench.device.unmap_batch();
    for (tag, mapping) in mappings.into_iter().enumerate() {
        batch.push(mapping, tag).unwrap();
    }
    bench.domain.fail_after(0);
    batch.begin();
    let (good, bad) = poll(&mut batch);
    assert_eq!(bad.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [0]);
    assert_eq!(good.len(), 2);
    let stats = bench.device.stats();
    assert_eq!((stats.queued, stats.quarantined, stats.unmap_failures), (2, 1, 1));
    drop(between);
}

#[test]
fn a_sync_that_fails_quarantines_the_whole_batch() {
    for held in [false, true] {
        let bench = Bench::new(Policy::StrictMap);
        let mappings = map_pages(&bench, 3);
        let ranges: Vec<u64> = mappings.iter().map(|mapping| mapping.iova().0).collect();
        let mut batch: Unmaps = bench.device.unmap_batch();
        for mapping in mappings {
            batch.push(mapping, 0).unwrap();
        }
        *bench.domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
        if held {
            bench.domain.hold();
        }
        batch.begin();
        bench.domain.let_go();
        let (good, bad) = poll(&mut batch);
        assert!(good.is_empty() && bad.len() == 3);
        for (_, error) in bad {
            assert!(matches!(error.error(), DomainError::Device { status: STATUS, .. }));
        }
        assert!(ranges.iter().all(|&iova| bench.allocator.is_live(iova)), "used again");
        let stats = bench.device.stats();
        assert_eq!((stats.quarantined, stats.unmap_failures, stats.unmaps), (3, 3, 0));
    }
}

#[test]
fn an_unmap_that_fails_quarantines_what_it_was_for_and_nothing_else() {
    let bench = Bench::new(Policy::StrictMap);
    let mut mappings = map_pages(&bench, 4);
    drop(mappings.remove(1));
    let mut batch: Unmaps = bench.device.unmap_batch();
    for (tag, mapping) in mappings.into_iter().enumerate() {
        batch.push(mapping, tag).unwrap();
    }
    // The first range is one page, the second two.
    bench.domain.fail_after(1);
    batch.begin();
    let (good, bad) = poll(&mut batch);
    assert_eq!(good.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [0]);
    assert_eq!(bad.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(bench.device.stats().quarantined, 2);
}

#[test]
fn a_mapping_of_another_device_is_given_back() {
    let (one, other) = (Bench::new(Policy::StrictMap), Bench::new(Policy::StrictMap));
    let mapping = map_pages(&one, 1).remove(0);
    let mut batch: Unmaps = other.device.unmap_batch();
    let mapping = batch.push(mapping, 0).unwrap_err();
    assert!(batch.is_empty());
    mapping.unmap().unwrap();
    one.assert_nothing_leaked();
    // Another clone belongs to the same device.
    let mapping = map_pages(&other, 1).remove(0);
    let mut batch: Unmaps = other.device.clone().unmap_batch();
    batch.push(mapping, 0).unwrap();
    drop(batch);
    other.assert_nothing_leaked();
}

#[test]
fn dropping_a_batch_unmaps_what_it_holds_and_waits_for_it() {
    let bench = Bench::new(Policy::StrictMap);
    let buffer = Buf::new(&[(0x5000, 0x1000)]);
    let drops = buffer.drops();
    let mapping = bench.device.map(buffer, Direction::FromDevice).unwrap();
    let mut batch: Unmaps = bench.device.unmap_batch();
    batch.push(mapping, 0).unwrap();
    bench.domain.hold();
    batch.begin();
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(batch);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    bench.assert_nothing_leaked();
}

#[test]
fn the_iova_of_a_watched_member_stays_parked() {
    let bench = Bench::new(Policy::StrictMap);
    let mapping = map_pages(&bench, 1).remove(0);
    let iova = mapping.iova();
    let mut batch: Unmaps = bench.device.unmap_batch();
    batch.push_watched(mapping, 0).unwrap();
    let mut stale = None;
    batch.finish(|_, returned| stale = returned.unwrap().stale);
    let stale = stale.unwrap();
    assert_eq!(stale.iova(), iova);
    assert!(stale.released_at_ns().is_some());
    assert!(bench.allocator.is_live(iova.0));
    drop(stale);
    bench.assert_nothing_leaked();
}

#[test]
fn what_is_submitted_together_is_one_map_sync_and_handed_out_only_then() {
    // rule L34
    let bench = Bench::new(Policy::StrictMap);
    let mut batch: Maps = bench.device.map_batch();
    for n in 0..4 {
        let buffer = Buf::new(&[(0x10_0000 * (n + 1), 0x1000)]);
        batch.push(buffer, Direction::ToDevice, n as usize).unwrap();
    }
    bench.domain.hold();
    batch.begin();
    assert_eq!(batch.poll(|_, _| panic!("handed out before the device knows")), 0);
    assert!(bench.domain.let_go());
    let mut mappings = Vec::new();
    batch.poll(|tag, mapping| mappings.push((tag, mapping.unwrap())));
    assert_eq!(mappings.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!((bench.device.stats().maps, bench.device.stats().map_syncs), (4, 1));
    for (n, (_, mapping)) in mappings.iter().enumerate() {
        let reached = bench.domain.reach(mapping.iova().0).unwrap();
        assert_eq!(reached.0, 0x10_0000 * (n as u64 + 1));
    }
    drop(mappings);
    bench.assert_nothing_leaked();
}

#[test]
fn neighbours_pushed_as_one_list_are_one_map_call_and_one_unmap() {
    // rules L35, L44
    let bench = Bench::new(Policy::StrictMap);
    let list: Vec<Buf> = (0..4).map(|n| Buf::new(&[(0x8000 + n * 0x1000, 0x1000)])).collect();
    let mut batch = bench.device.map_batch::<Vec<Buf>, ()>();
    batch.push(list, Direction::ToDevice, ()).unwrap();
    let mut mapping = None;
    batch.finish(|(), made| mapping = Some(made.unwrap()));
    let mapping = mapping.unwrap();
    assert_eq!(count(&bench, |event| matches!(event, Event::Map(..))), 1);
    // Each mapping leads to its buffer's own bytes.
    for n in 0..4 {
        let bytes = n * 0x1000 + 0x10..n * 0x1000 + 0x30;
        let segments: Vec<_> = mapping.segments_of(bytes).collect();
        let [segment] = segments[..] else { panic!("{segments:?}") };
        assert_eq!(segment.len, 0x20);
        assert_eq!(bench.domain.reach(segment.addr).unwrap().0, 0x8010 + n * 0x1000);
    }
    let beyond: Vec<_> = mapping.segments_of(0x3ff0..u64::MAX).collect();
    assert_eq!(beyond.iter().map(|segment| segment.len).sum::<u64>(), 0x10);
    assert_eq!(mapping.segments_of(0x4000..0x5000).count(), 0);
    bench.domain.forget_events();
    assert_eq!(mapping.unmap().unwrap().len(), 4);
    assert_eq!(count(&bench, |event| matches!(event, Event::Unmap { .. })), 1);
    bench.assert_nothing_leaked();
}

#[test]
fn a_map_sync_that_fails_undoes_the_whole_batch_and_reports_the_devices_status() {
    // rules L29, L33, L34
    for policy in [Policy::StrictMap, Policy::LazyMqMap] {
        for held in [false, true] {
            let bench = Bench::new(policy);
            let mut batch: Maps = bench.device.map_batch();
            for n in 0..3u64 {
                let buffer = Buf::new(&[(0x10_0000 * (n + 1), 0x1000)]);
                batch.push(buffer, Direction::ToDevice, n as usize).unwrap();
            }
            if held {
                bench.domain.hold();
            }
            bench.domain.fail_after(0);
            batch.begin();
            bench.domain.let_go();
            let mut back = Vec::new();
            batch.poll(|tag, mapping| {
                let error = mapping.unwrap_err();
                let (operation, range) = ("map", Range::ALL);
                let device = DomainError::Device { operation, range, status: STATUS };
                assert_eq!(error.error(), Error::Domain(device));
                back.push((tag, error.into_buffer().unwrap()));
            });
            assert_eq!(back.len(), 3);
            let stats = bench.device.stats();
            assert_eq!((stats.maps, stats.bytes, stats.map_failures), (0, 0, 3));
            assert_eq!(stats.queued, 0, "a failed map goes through no flush queue");
            bench.assert_nothing_leaked();
        }
    }
}

#[test]
fn what_was_pushed_before_the_policy_changed_is_synced_all_the_same() {
    // rules L27, L34
    let bench = Bench::new(Policy::StrictMap);
    let (mut maps, mut unmaps): (Maps, Unmaps) =
        (bench.device.map_batch(), bench.device.unmap_batch());
    for n in 0..4u64 {
        // Every second one under a policy that syncs each alone.
        let policy = if n % 2 == 0 { Policy::StrictMap } else { Policy::Strict };
        bench.device.set_policy(policy).unwrap();
        let buffer = Buf::new(&[(0x10_0000 * (n + 1), 0x1000)]);
        maps.push(buffer, Direction::ToDevice, 0).unwrap();
    }
    bench.domain.hold();
    maps.begin();
    assert_eq!(maps.poll(|_, _| panic!("handed out before the device knows")), 0);
    bench.domain.let_go();
    assert_eq!(maps.poll(|_, mapping| unmaps.push(mapping.unwrap(), 0).unwrap()), 4);
    bench.device.set_policy(Policy::StrictMap).unwrap();
    unmaps.begin();
    // Begun strictly, they end strictly.
    bench.device.set_policy(Policy::LazySqMap).unwrap();
    assert!(poll(&mut unmaps).0.is_empty());
    bench.domain.let_go();
    assert_eq!(poll(&mut unmaps).0.len(), 4);
    bench.assert_nothing_leaked();
}

#[test]
fn a_buffer_that_cannot_be_mapped_leaves_the_rest_of_the_batch_alone() {
    let bench = Bench::new(Policy::StrictMap);
    let mut batch: Maps = bench.device.map_batch();
    batch.push(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice, 0).unwrap();
    let (tag, error) = batch.push(Buf::new(&[]), Direction::ToDevice, 7).unwrap_err();
    assert_eq!((tag, error.error()), (7, Error::Empty));
    let mut made = Vec::new();
    batch.finish(|tag, mapping| made.push((tag, mapping.unwrap())));
    assert_eq!(made.len(), 1);
    drop(made);
    bench.assert_nothing_leaked();
}

#[derive(Clone, Debug)]
enum Step {
    Push { pages: u64 },
    BeginMaps,
    PollMaps,
    Complete { which: usize },
    BeginUnmaps,
    PollUnmaps,
    LetGo,
    FailAfter(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..4u64).prop_map(|pages| Step::Push { pages }),
        2 => Just(Step::BeginMaps),
        3 => Just(Step::PollMaps),
        6 => any::<usize>().prop_map(|which| Step::Complete { which }),
        2 => Just(Step::BeginUnmaps),
        3 => Just(Step::PollUnmaps),
        3 => Just(Step::LetGo),
        1 => (0..6i64).prop_map(Step::FailAfter),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_buffer_that_was_handed_out_is_out_of_the_devices_reach(
        policy in prop_oneof![Just(Policy::StrictMap), Just(Policy::Strict)],
        steps in vec(step(), 1..80),
    ) {
        // rules L17, L33, L34
        let bench = Bench::new(policy);
        bench.domain.hold();
        let mut maps: Maps = bench.device.map_batch();
        let mut unmaps: Unmaps = bench.device.unmap_batch();
        let mut mapped: Vec<Mapping<Buf>> = Vec::new();
        // Each buffer has pages of its own, so that what the device reaches identifies the buffer.
        let mut next = 1u64;
        let mut safe: BTreeSet<u64> = BTreeSet::new();
        let note = |safe: &mut BTreeSet<u64>, buffer: &Buf| {
            let (target, len) = buffer.pieces[0];
            safe.extend((target..target + len).step_by(0x1000));
        };
        for step in steps {
            match step {
                Step::Push { pages } => {
                    let buffer = Buf::new(&[(next << 12, pages << 12)]);
                    next += pages + 1;
                    if let Err((_, error)) = maps.push(buffer, Direction::Bidirectional, 0)
                        && let Some(buffer) = error.into_buffer()
                    {
                        note(&mut safe, &buffer);
                    }
                }
                Step::BeginMaps => maps.begin(),
                Step::PollMaps => {
                    maps.poll(|_, mapping| match mapping {
                        Ok(mapping) => mapped.push(mapping),
                        Err(error) => {
                            if let Some(buffer) = error.into_buffer() {
                                note(&mut safe, &buffer);
                            }
                        }
                    });
                }
                Step::Complete { which } if !mapped.is_empty() => {
                    let mapping = mapped.swap_remove(which % mapped.len());
                    unmaps.push(mapping, 0).unwrap();
                }
                Step::Complete { .. } => {}
                Step::BeginUnmaps => unmaps.begin(),
                Step::PollUnmaps => {
                    unmaps.poll(|_, returned| {
                        if let Ok(returned) = returned {
                            note(&mut safe, &returned.buffer);
                        }
                    });
                }
                Step::LetGo => _ = bench.domain.let_go(),
                Step::FailAfter(good) => bench.domain.fail_after(good),
            }
            for (range, target, _) in bench.domain.cached() {
                let pages = (target..=target + range.extent()).step_by(0x1000);
                let reached: Vec<u64> = pages.filter(|page| safe.contains(page)).collect();
                prop_assert!(reached.is_empty(), "the device reaches {reached:x?}");
            }
        }
        bench.domain.fail_after(i64::MAX);
        drop((maps, unmaps, mapped));
        let quarantined = bench.device.stats().quarantined;
        prop_assert_eq!(bench.allocator.live() as u64, quarantined);
        if quarantined == 0 {
            bench.assert_nothing_leaked();
        }
    }
}
