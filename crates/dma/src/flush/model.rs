//! The flush queues under the model checker: every interleaving, and every order in which memory
//! accesses may become visible.
//!
//! The world is a device with a translation cache over two translations, each with a table page of
//! its own. It is the worst possible device: as soon as its cache has been invalidated it walks the
//! table and caches again whatever it finds. Releasing an entry asserts that the cache does not
//! hold it, and a walk asserts that it reaches no released page.

use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use ringfence_sync::model::Memory;

use super::{
    budget::Budget,
    counters::{Rules, Sound},
    queues::{Enqueued, FlushQueues},
    ring::{Batch, Queued, Shape},
};

mod live;

/// The watcher of an IOVA goes while the flush that it waits for ends: one of the two gives the IOVA
/// back, after all that the other has done.
#[test]
fn an_iova_that_is_watched_is_given_back_once_and_last() {
    check(|| {
        let world = Arc::new((super::Watch::default(), Memory::default(), Memory::default()));
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
        let world = Arc::new((Budget::<Sound>::new(), Memory::default()));
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

struct Unmapped {
    which: usize,
    reserved: bool,
}

impl Queued for Unmapped {
    fn bytes(&self) -> u64 {
        1
    }
    fn since_ns(&self) -> u64 {
        0
    }
    fn is_reserved(&self) -> bool {
        self.reserved
    }
}

struct World<R> {
    /// What each translation leads to: the device reads it while it is mapped or cached, and its
    /// owner writes it once it is released.
    memory: [Memory; 2],
    queues: FlushQueues<Unmapped, R>,
    /// The table: whether each translation is present.
    present: [AtomicBool; 2],
    /// Whether each one's table page went back to its owner.
    freed: [AtomicBool; 2],
    /// What the device has cached.
    cached: Mutex<[bool; 2]>,
    released: AtomicUsize,
}

impl<R: Rules> World<R> {
    fn new(rings: usize, slots: usize) -> Arc<Self> {
        let world = World::closed(rings);
        world.open(rings, slots, false);
        Arc::new(world)
    }

    /// A world with closed queues.
    fn closed(rings: usize) -> Self {
        World {
            memory: Default::default(),
            queues: FlushQueues::new(rings),
            present: [AtomicBool::new(true), AtomicBool::new(true)],
            freed: [AtomicBool::new(false), AtomicBool::new(false)],
            cached: Mutex::new([true; 2]),
            released: AtomicUsize::new(0),
        }
    }

    fn open(&self, rings: usize, slots: usize, reserved_only: bool) {
        let (high_water, late_after_ns) = (usize::MAX, u64::MAX);
        let shape = Shape { capacity: slots - 1, high_water, late_after_ns, reserved_only };
        self.queues.open(rings, shape).unwrap();
    }

    /// Unmaps; returns whether the caller must arm the timer.
    fn unmap(&self, ring: usize, which: usize) -> bool {
        self.remove(which);
        self.enqueue(ring, which)
    }

    fn remove(&self, which: usize) {
        // Relaxed: a domain's table guarantees no more.
        self.present[which].store(false, Ordering::Relaxed);
    }

    fn enqueue(&self, ring: usize, which: usize) -> bool {
        let mut entry = Some(Unmapped { which, reserved: false });
        loop {
            let mut batch = Batch::new();
            let enqueued = self.queues.enqueue(ring, &mut entry, &mut batch);
            self.release(batch);
            match enqueued {
                Enqueued::Queued { arm, .. } => return arm,
                Enqueued::Full => self.flush(),
                Enqueued::Closed => unreachable!("these queues are never closed"),
            }
        }
    }

    fn flush(&self) {
        let ticket = self.queues.counters.start();
        {
            let mut cached = self.cached.lock().unwrap();
            for (which, cached) in cached.iter_mut().enumerate() {
                if *cached {
                    // The last access by way of the cache: the flush waits for it.
                    self.memory[which].read();
                }
                *cached = self.present[which].load(Ordering::Relaxed);
                assert!(
                    !(*cached && self.freed[which].load(Ordering::Relaxed)),
                    "the device walks a table page that was released"
                );
            }
        }
        self.queues.counters.finish(ticket, 0);
    }

    fn reap(&self) {
        for ring in 0..self.queues.rings() {
            let mut batch = Batch::new();
            self.queues.reap(ring, &mut batch);
            self.release(batch);
        }
    }

    fn release(&self, batch: Batch<Unmapped>) {
        batch.entries.into_iter().for_each(|entry| self.release_one(entry));
    }

    fn release_one(&self, Unmapped { which, .. }: Unmapped) {
        self.memory[which].write();
        assert!(!self.cached.lock().unwrap()[which], "released while the device still reaches it");
        self.freed[which].store(true, Ordering::Relaxed);
        self.released.fetch_add(1, Ordering::Relaxed);
    }

    fn expire(&self) {
        self.queues.expiring();
        self.flush();
        self.reap();
    }

    fn released(&self) -> usize {
        self.released.load(Ordering::Relaxed)
    }
}

fn check(f: impl Fn() + Sync + Send + 'static) {
    ringfence_sync::model::check(None, f);
}

/// For three threads, as all interleavings would take minutes: those with up to three preemptions.
fn check_bounded(f: impl Fn() + Sync + Send + 'static) {
    ringfence_sync::model::check(Some(3), f);
}

fn one_unmaps_while_another_flushes<R: Rules + Send + Sync + 'static>() {
    let world = World::<R>::new(1, 2);
    let other = Arc::clone(&world);
    let unmapper = thread::spawn(move || {
        other.unmap(0, 0);
    });
    world.flush();
    world.reap();
    unmapper.join().unwrap();
    world.flush();
    world.reap();
    assert_eq!(world.released(), 1, "an entry was lost, or released twice");
}

#[test]
fn nothing_is_released_before_a_flush_that_started_after_it_was_queued_has_finished() {
    // rules L19, L20, L21, L25
    check(one_unmaps_while_another_flushes::<Sound>);
}

#[test]
fn two_that_unmap_and_one_that_flushes_lose_nothing_and_release_nothing_early() {
    // rules L19, L21, L24
    check_bounded(|| {
        let world = World::<Sound>::new(2, 2);
        let unmappers = [0, 1].map(|which| {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.unmap(which, which);
            })
        });
        world.flush();
        world.reap();
        for unmapper in unmappers {
            unmapper.join().unwrap();
        }
        world.flush();
        world.reap();
        assert_eq!(world.released(), 2, "an entry was lost, or released twice");
    });
}

#[test]
fn of_two_that_share_a_full_queue_each_gets_its_entry_in() {
    // rules L19, L22
    check(|| {
        // One usable slot.
        let world = World::<Sound>::new(1, 2);
        let other = Arc::clone(&world);
        let unmapper = thread::spawn(move || {
            other.unmap(0, 1);
        });
        world.unmap(0, 0);
        unmapper.join().unwrap();
        assert_eq!(world.released(), 1);
        world.flush();
        world.reap();
        assert_eq!(world.released(), 2);
    });
}

fn expire_while_another_unmaps(expire: fn(&World<Sound>)) {
    let world = World::<Sound>::new(2, 3);
    assert!(world.unmap(0, 0), "the first entry arms the timer");
    let other = Arc::clone(&world);
    let unmapper = thread::spawn(move || {
        other.unmap(1, 1);
    });
    expire(&world);
    unmapper.join().unwrap();
    assert!(!world.queues.rearm(), "an entry waits for a timer that is not armed");
}

#[test]
fn what_an_expiry_leaves_behind_finds_the_timer_armed_again() {
    // rule L23
    check(|| expire_while_another_unmaps(World::expire));
}

// The following show that the models can fail: each breaks one rule.

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_a_missing_barrier() {
    // rule L25
    struct NoBarrier;
    impl Rules for NoBarrier {
        const BARRIER: bool = false;
    }
    check(one_unmaps_while_another_flushes::<NoBarrier>);
}

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_a_comparison_that_is_off_by_one() {
    // rule L19
    struct OffByOne;
    impl Rules for OffByOne {
        fn covers(stamp: u64, finished: u64) -> bool {
            stamp <= finished
        }
    }
    check(one_unmaps_while_another_flushes::<OffByOne>);
}

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_a_stamp_that_ignores_flushes_in_flight() {
    // rule L20
    use ringfence_sync::atomic::AtomicU64;
    struct OnlyFinished;
    impl Rules for OnlyFinished {
        fn stamp(_started: &AtomicU64, finished: &AtomicU64) -> u64 {
            finished.load(Ordering::Acquire)
        }
    }
    check(one_unmaps_while_another_flushes::<OnlyFinished>);
}

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_a_stamp_taken_before_the_unmap() {
    // rule L25
    check(|| {
        let world = World::<Sound>::new(1, 2);
        let other = Arc::clone(&world);
        let unmapper = thread::spawn(move || {
            other.enqueue(0, 0);
            other.remove(0);
        });
        world.flush();
        world.reap();
        unmapper.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "an entry waits for a timer that is not armed")]
fn the_model_finds_a_timer_whose_flag_is_cleared_after_its_flush() {
    // rule L23
    check(|| {
        expire_while_another_unmaps(|world| {
            world.flush();
            world.reap();
            world.queues.expiring();
        });
    });
}
