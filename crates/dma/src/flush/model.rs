//! Lazy unmaps under the model checker: every interleaving, and every order in which memory accesses
//! may become visible.
//!
//! What runs is a [`Device`], over a domain and an allocator of the model's. The world behind them is a
//! device with a translation cache over two pages. It is the worst possible one: as soon as its cache
//! has been invalidated it walks the table and caches again whatever it finds. The allocator asserts
//! that a page which it gets back is not cached, and a walk that it reaches no page that was given back.

use std::sync::{
    Mutex as StdMutex,
    atomic::{AtomicBool as StdBool, AtomicUsize as StdUsize},
};

use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
};
use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Partial, Range,
    Result, SyncToken, Work,
};
use ringfence_iova::{AllocError, Allocator, FreeError, Request, ReserveError, Stats};
use ringfence_sync::{clock::ManualClock, cpu::CpuId, model::Memory};

use super::{Span, Watch, budget::Budget};
use crate::{
    Device, DmaConfig, Environment, FlushTuning, OsThreadClock, Policy, QueueKind, TimerKind,
};

const PAGE: u64 = 4096;

/// What the device reaches.
struct World {
    /// What each translation leads to: the device reads it while it is mapped or cached, and its
    /// owner writes it once it is released.
    memory: [Memory; 2],
    /// The table: whether each translation is present.
    present: [AtomicBool; 2],
    /// What the device has cached.
    cached: Mutex<[bool; 2]>,
    /// How many pages may be exposed at a time.
    bound: usize,
    /// How many flushes fail.
    failures: StdUsize,
    // The account, in the order of the execution. No thread of the product sees it.
    exposed: [StdBool; 2],
    returned: [StdBool; 2],
    releases: StdUsize,
}

impl World {
    /// The device's cache forgets these pages, and fills again from the table.
    fn invalidate(&self, pages: impl Iterator<Item = usize>) {
        let mut cached = self.cached.lock().unwrap();
        for page in pages {
            if cached[page] {
                // The last access by way of the cache: the invalidation waits for it.
                self.memory[page].read();
            }
            // Relaxed: a domain's table guarantees no more.
            cached[page] = self.present[page].load(Ordering::Relaxed);
            let returned = self.returned[page].load(Ordering::Relaxed);
            assert!(!(cached[page] && returned), "the device walks a page that was released");
        }
    }

    fn releases(&self) -> usize {
        self.releases.load(Ordering::Relaxed)
    }
}

/// The domain.
struct Behind(Arc<World>);

fn page(range: &Range) -> usize {
    (range.first().0 / PAGE) as usize
}

// SAFETY: a sync is over when it returns, and nothing is freed on the domain's word: the model reports what
// is still reached.
#[allow(unsafe_code)]
unsafe impl Domain for Behind {
    type Target = GuestPhys;

    /// Has no whole page: the allocator is the model's.
    fn geometry(&self) -> Geometry {
        let aperture = Range::new(Iova(1), Iova(PAGE)).unwrap();
        Geometry::new(PageSizes::from_granule(PAGE).unwrap(), aperture)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }

    fn map_pages(&self, _: &[Map<GuestPhys>]) -> std::result::Result<(), Partial> {
        unreachable!("all is mapped")
    }

    fn unmap_pages(
        &self,
        ranges: &[Range],
        gather: &mut Gather,
    ) -> std::result::Result<u128, Partial> {
        for range in ranges {
            self.0.present[page(range)].store(false, Ordering::Relaxed);
            self.0.exposed[page(range)].store(gather.is_queued(), Ordering::Relaxed);
            gather.add(*range);
        }
        let exposed = self.0.exposed.iter().filter(|exposed| exposed.load(Ordering::Relaxed));
        assert!(exposed.count() <= self.0.bound, "more is exposed than may be");
        Ok(u128::from(PAGE))
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        match work {
            Work::Map(_) => {}
            Work::Unmap { ranges, .. } => self.0.invalidate(ranges.iter().map(page)),
            Work::All => match self.0.failures.load(Ordering::Relaxed) {
                0 => self.0.invalidate(0..2),
                more => {
                    self.0.failures.store(more - 1, Ordering::Relaxed);
                    return Err(Error::NoMemory { operation: "unmap", range: Range::ALL });
                }
            },
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

/// The allocator: gets pages back.
struct Owner(Arc<World>);

impl Allocator for Owner {
    fn alloc(&self, _: &Request) -> std::result::Result<u64, AllocError> {
        unreachable!("all is mapped")
    }

    fn free(&self, iova: u64, _: u64) -> std::result::Result<(), FreeError> {
        let page = (iova / PAGE) as usize;
        self.0.memory[page].write();
        assert!(!self.0.cached.lock().unwrap()[page], "released while the device still reaches it");
        self.0.exposed[page].store(false, Ordering::Relaxed);
        let before = self.0.returned[page].swap(true, Ordering::Relaxed);
        assert!(!before, "released twice");
        self.0.releases.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn reserve(&self, _: u64, _: u64) -> std::result::Result<(), ReserveError> {
        Ok(())
    }

    fn check_free(&self, _: u64, _: u64) -> std::result::Result<(), FreeError> {
        Ok(())
    }

    fn granule(&self) -> u64 {
        PAGE
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// Two CPUs: the threads have them in turn, in the order in which they ask first. The model's own has
/// the first.
#[derive(Default)]
struct Cpus(StdMutex<Vec<ThreadId>>);

impl CpuId for Cpus {
    fn current(&self) -> usize {
        let (thread, mut seen) = (thread::current().id(), self.0.lock().unwrap());
        let at = seen.iter().position(|one| *one == thread).unwrap_or_else(|| {
            seen.push(thread);
            seen.len() - 1
        });
        at % 2
    }

    fn count(&self) -> usize {
        2
    }
}

/// Both pages are mapped.
struct Live {
    device: Device<Behind, Owner>,
    world: Arc<World>,
}

impl Live {
    /// A device with flush queues of so many slots.
    fn new(kind: QueueKind, slots: usize) -> Arc<Live> {
        Live::tuned(FlushTuning { slots, ..FlushTuning::linux(kind) })
    }

    fn tuned(tuning: FlushTuning) -> Arc<Live> {
        let world = Arc::new(World {
            memory: Default::default(),
            present: [(); 2].map(|()| AtomicBool::new(true)),
            cached: Mutex::new([true; 2]),
            bound: tuning.max_exposure_bytes.map_or(2, |bytes| (bytes / PAGE) as usize),
            failures: StdUsize::new(0),
            exposed: Default::default(),
            returned: Default::default(),
            releases: StdUsize::new(0),
        });
        let cpus = Cpus::default();
        cpus.current();
        let environment = Environment {
            clock: std::sync::Arc::new(ManualClock::new(1)),
            cpu: std::sync::Arc::new(cpus),
            thread_clock: std::sync::Arc::new(OsThreadClock),
        };
        let config = DmaConfig {
            flush: Some(tuning),
            timer: TimerKind::Manual,
            ..DmaConfig::new(lazy(tuning.kind))
        };
        let builder = Device::builder(Behind(Arc::clone(&world))).environment(environment);
        let device = builder.allocator(Owner(Arc::clone(&world))).config(config).build().unwrap();
        Arc::new(Live { device, world })
    }

    fn unmap(&self, page: u64) {
        let range = Range::from_len(Iova(page * PAGE), PAGE).unwrap();
        let (span, port) = (Span { range, mapped: PAGE }, &self.device.port);
        port.shared.unmap(span, false, false, &port.counters).unwrap();
    }

    fn flush(&self) {
        self.device.flush().unwrap();
    }

    fn expire(&self) {
        self.device.expire().unwrap();
    }

    fn becomes_strict(&self) {
        self.device.set_policy(Policy::Strict).unwrap();
    }

    fn becomes_lazy(&self, kind: QueueKind) {
        self.device.set_policy(lazy(kind)).unwrap();
    }

    fn has_queues(&self, tuning: FlushTuning) {
        self.device.set_flush_tuning(tuning).unwrap();
    }

    fn queued(&self) -> u64 {
        self.device.stats().queued
    }

    /// Checks what must hold when no thread is running, and then that nothing was lost.
    fn settle(&self, unmapped: usize) {
        let (queued, strict) = (self.queued(), !self.device.effective_policy().is_lazy());
        assert!(queued == 0 || !strict, "an entry is queued although the policy is strict");
        let armed = self.device.timer_due_at_ns().is_some();
        assert!(queued == 0 || armed, "an entry waits for a timer that is not armed");
        self.flush();
        assert_eq!(self.world.releases(), unmapped, "an entry was lost");
    }
}

fn lazy(kind: QueueKind) -> Policy {
    Policy::LazySq.with_queue_kind(kind)
}

fn check(f: impl Fn() + Sync + Send + 'static) {
    ringfence_sync::model::check(None, f);
}

/// For three threads, as all interleavings would take minutes: those with up to three preemptions.
fn check_bounded(f: impl Fn() + Sync + Send + 'static) {
    ringfence_sync::model::check(Some(3), f);
}

/// Runs `act` while other threads do each of `others`.
fn beside<const N: usize>(live: &Arc<Live>, others: [fn(&Live); N], act: impl FnOnce(&Live)) {
    let threads = others.map(|other| {
        let live = Arc::clone(live);
        thread::spawn(move || other(&live))
    });
    act(live);
    for thread in threads {
        thread.join().unwrap();
    }
}

/// The watcher of an IOVA goes while the flush that it waits for ends: one of the two gives the IOVA
/// back, after all that the other has done.
#[test]
fn an_iova_that_is_watched_is_given_back_once_and_last() {
    check(|| {
        let world = Arc::new((Watch::default(), Memory::default(), Memory::default()));
        let theirs = Arc::clone(&world);
        let flush = thread::spawn(move || {
            let (watch, flushed, watched) = &*theirs;
            flushed.write();
            let last = watch.release(7);
            last.then(|| watched.write()).is_some()
        });
        let (watch, flushed, watched) = &*world;
        if watch.released_at_ns() == Some(7) {
            assert_eq!(flushed.read(), 1);
        }
        watched.write();
        let last = watch.unwatch();
        if last {
            flushed.write();
        }
        assert!(flush.join().unwrap() ^ last);
    });
}

/// A byte that is given back after a flush is exposed again after that flush.
#[test]
fn what_is_reserved_again_was_given_back_before() {
    check(|| {
        let world = Arc::new((Budget::new(), Memory::default()));
        world.0.set(1);
        let expose = |(budget, exposed): &(Budget, Memory)| {
            if budget.reserve(1) {
                exposed.write();
                budget.give_back(1);
            }
        };
        let theirs = Arc::clone(&world);
        let other = thread::spawn(move || expose(&theirs));
        expose(&world);
        other.join().unwrap();
        assert!(world.0.reserve(1));
    });
}

#[test]
fn nothing_is_released_before_a_flush_that_started_after_it_was_queued_has_finished() {
    // rules L19, L20, L21, L25
    check(|| {
        let live = Live::new(QueueKind::Single, 2);
        beside(&live, [|live| live.unmap(0)], Live::flush);
        live.settle(1);
    });
}

#[test]
fn two_that_unmap_and_one_that_flushes_lose_nothing_and_release_nothing_early() {
    // rules L19, L21, L24
    check_bounded(|| {
        let live = Live::new(QueueKind::PerCpu, 2);
        beside(&live, [|live| live.unmap(0), |live| live.unmap(1)], Live::flush);
        live.settle(2);
    });
}

#[test]
fn of_two_that_share_a_full_queue_each_gets_its_entry_in() {
    // rules L19, L22
    check(|| {
        // One usable slot.
        let live = Live::new(QueueKind::Single, 2);
        beside(&live, [|live| live.unmap(1)], |live| live.unmap(0));
        assert_eq!((live.world.releases(), live.queued()), (1, 1));
        live.settle(2);
    });
}

#[test]
fn what_an_expiry_leaves_behind_finds_the_timer_armed_again() {
    // rule L23
    check(|| {
        let live = Live::new(QueueKind::PerCpu, 3);
        live.unmap(0);
        assert!(live.device.timer_due_at_ns().is_some(), "the first entry arms the timer");
        beside(&live, [|live| live.unmap(1)], Live::expire);
        live.settle(2);
    });
}

#[test]
fn what_an_expiry_whose_flush_fails_leaves_behind_finds_the_timer_armed_again() {
    // rule L23
    check(|| {
        let live = Live::new(QueueKind::PerCpu, 3);
        live.unmap(0);
        live.world.failures.store(1, Ordering::Relaxed);
        beside(&live, [|live| live.unmap(1)], |live| assert!(live.device.expire().is_err()));
        live.settle(2);
    });
}

#[test]
fn what_is_under_way_while_the_policy_becomes_strict_is_flushed_and_not_queued() {
    // rules L19, L27
    check(|| {
        let live = Live::new(QueueKind::Single, 3);
        beside(&live, [|live| live.unmap(0)], Live::becomes_strict);
        live.settle(1);
    });
}

#[test]
fn what_is_under_way_while_the_policy_is_strict_for_a_while_is_not_lost() {
    // rules L19, L23, L27
    check_bounded(|| {
        let live = Live::new(QueueKind::Single, 3);
        live.unmap(1);
        beside(&live, [|live| live.unmap(0)], |live| {
            live.becomes_strict();
            live.becomes_lazy(QueueKind::Single);
        });
        live.settle(2);
    });
}

#[test]
fn nor_is_it_where_the_timer_expires_while_the_policy_is_strict() {
    // rules L19, L23, L27
    check_bounded(|| {
        let live = Live::new(QueueKind::Single, 3);
        beside(&live, [|live| live.unmap(0)], |live| {
            live.becomes_strict();
            live.expire();
            live.becomes_lazy(QueueKind::Single);
            live.unmap(1);
        });
        live.settle(2);
    });
}

#[test]
fn what_is_under_way_while_queues_come_and_go_is_not_lost() {
    // rules L19, L22, L27
    for (from, to) in
        [(QueueKind::PerCpu, QueueKind::Single), (QueueKind::Single, QueueKind::PerCpu)]
    {
        check_bounded(move || {
            let live = Live::new(from, 3);
            beside(&live, [|live| live.unmap(0)], |live| {
                live.has_queues(FlushTuning { slots: 3, ..FlushTuning::linux(to) });
            });
            live.settle(1);
        });
    }
}

#[test]
fn what_a_smaller_queue_cannot_hold_is_not_lost() {
    // rules L22, L27
    check_bounded(|| {
        let live = Live::new(QueueKind::Single, 3);
        live.unmap(1);
        beside(&live, [|live| live.unmap(0)], |live| {
            live.has_queues(FlushTuning { slots: 2, ..live.device.flush_tuning() });
        });
        live.settle(2);
    });
}

#[test]
fn the_timer_may_expire_while_the_policy_changes_and_others_unmap() {
    // rules L19, L23, L27
    ringfence_sync::model::check(Some(2), || {
        let live = Live::new(QueueKind::Single, 3);
        beside(&live, [|live| live.unmap(0), Live::expire], |live| {
            live.becomes_strict();
            live.becomes_lazy(QueueKind::PerCpu);
        });
        live.settle(1);
    });
}

#[test]
fn what_is_under_way_while_queues_become_bounded_is_not_queued_unreserved() {
    // rule L27
    check_bounded(|| {
        let live = Live::new(QueueKind::PerCpu, 3);
        beside(&live, [|live| live.unmap(0)], |live| {
            let max_exposure_bytes = Some(PAGE);
            live.has_queues(FlushTuning { max_exposure_bytes, ..live.device.flush_tuning() });
        });
        let budget = &live.device.shared().lazy.queues.budget;
        let all_reserved = live.queued() == 0 || !budget.reserve(PAGE);
        assert!(all_reserved, "an entry is queued of which no byte was reserved");
        live.settle(1);
    });
}

#[test]
fn two_that_unmap_never_expose_more_than_the_bound() {
    check_bounded(|| {
        let tuning = FlushTuning::linux(QueueKind::PerCpu);
        let live = Live::tuned(FlushTuning { slots: 3, max_exposure_bytes: Some(PAGE), ..tuning });
        beside(&live, [|live| live.unmap(1)], |live| live.unmap(0));
        live.settle(2);
    });
}

#[test]
fn the_last_drop_of_a_device_releases_what_is_queued() {
    // rule L30
    check_bounded(|| {
        let live = Live::new(QueueKind::Single, 3);
        let world = Arc::clone(&live.world);
        let acts: [fn(&Live); 2] = [|live| live.unmap(0), Live::expire];
        let threads = acts.map(|act| {
            let live = Arc::clone(&live);
            thread::spawn(move || act(&live))
        });
        drop(live);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(world.releases(), 1, "an entry was lost");
    });
}
