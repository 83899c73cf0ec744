//! Queues that open, close, become bounded and are dropped while threads unmap.
//!
//! The code around the queues is modelled on the DMA API's, with everything by which threads
//! synchronise: the mode, the timer's time, the budget.

use super::*;

/// The mode: how many queues are in use.
const STRICT: usize = 0;
const SINGLE: usize = 1;
const PER_CPU: usize = 2;

/// The rules for the code around the queues. Breaking one shows that the models can fail.
trait Around: Rules + Send + Sync + 'static {
    /// A thread that finds its queue closed flushes its entry itself.
    const FLUSHES_WHAT_IS_REFUSED: bool = true;
    /// A queue is closed before it is flushed for the last time.
    const CLOSES_FIRST: bool = true;
    /// An expiry also reaps the queues that are not in use.
    const REAPS_ALL: bool = true;
    /// A flush for a change of policy also clears the flag of the timer that it stops.
    const CLEARS_FLAG: bool = true;
    /// So does an expiry that finds nothing to flush.
    const CLEARS_FLAG_FIRST: bool = true;
    /// Bytes are reserved before they are exposed.
    const RESERVES_FIRST: bool = true;
    /// A queue that becomes bounded refuses entries without reserved bytes.
    const REQUIRES_RESERVATIONS: bool = true;
    /// Entries that are queued at the end are flushed.
    const FLUSHES_AT_END: bool = true;
}

impl Around for Sound {}

struct Live<R> {
    world: World<R>,
    mode: AtomicUsize,
    bounded: AtomicBool,
    /// Whether the timer will expire.
    due: AtomicBool,
    /// How many bytes are exposed.
    exposed: AtomicUsize,
    bound: usize,
}

impl<R: Around> Live<R> {
    fn new(mode: usize, slots: usize) -> Arc<Self> {
        let live = Live {
            world: World::closed(2),
            mode: AtomicUsize::new(mode),
            bounded: AtomicBool::new(false),
            due: AtomicBool::new(false),
            exposed: AtomicUsize::new(0),
            bound: 2,
        };
        live.world.open(mode, slots, false);
        Arc::new(live)
    }

    fn bounded(bound: usize) -> Arc<Self> {
        let live = Live {
            world: World::closed(2),
            mode: AtomicUsize::new(PER_CPU),
            bounded: AtomicBool::new(true),
            due: AtomicBool::new(false),
            exposed: AtomicUsize::new(0),
            bound,
        };
        live.world.open(PER_CPU, 3, true);
        live.world.queues.budget.set(bound as u64);
        Arc::new(live)
    }

    fn unmap(&self, cpu: usize, which: usize) {
        if self.mode.load(Ordering::Acquire) == STRICT {
            return self.unmap_strictly(which);
        }
        let bounded = self.bounded.load(Ordering::Acquire);
        if bounded && R::RESERVES_FIRST && !self.reserve() {
            return self.unmap_strictly(which);
        }
        let exposed = self.exposed.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(exposed <= self.bound, "more is exposed than may be");
        self.world.remove(which);
        if bounded && !R::RESERVES_FIRST {
            while !self.reserve() {}
        }
        let mut entry = Some(Unmapped { which, reserved: bounded });
        loop {
            let ring = if self.mode.load(Ordering::Acquire) == PER_CPU { cpu } else { 0 };
            let mut batch = Batch::new();
            let enqueued = self.world.queues.enqueue(ring, &mut entry, &mut batch);
            self.release(batch);
            match enqueued {
                Enqueued::Queued { arm: true, .. } => {
                    break self.due.store(true, Ordering::Relaxed);
                }
                Enqueued::Queued { .. } => break,
                Enqueued::Full => self.world.flush(),
                Enqueued::Closed => {
                    if R::FLUSHES_WHAT_IS_REFUSED {
                        self.world.flush();
                    }
                    break self.release_one(entry.take().unwrap());
                }
            }
        }
    }

    fn unmap_strictly(&self, which: usize) {
        self.world.remove(which);
        self.world.cached.lock().unwrap()[which] = false;
        self.world.release_one(Unmapped { which, reserved: false });
    }

    fn reserve(&self) -> bool {
        let budget = &self.world.queues.budget;
        if budget.reserve(1) {
            return true;
        }
        self.world.flush();
        self.reap();
        budget.reserve(1)
    }

    fn release(&self, batch: Batch<Unmapped>) {
        batch.entries.into_iter().for_each(|entry| self.release_one(entry));
    }

    fn release_one(&self, entry: Unmapped) {
        let reserved = entry.reserved;
        self.world.release_one(entry);
        self.exposed.fetch_sub(1, Ordering::Relaxed);
        if reserved {
            self.world.queues.budget.give_back(1);
        }
    }

    fn reap(&self) {
        let rings = if R::REAPS_ALL { 2 } else { self.mode.load(Ordering::Acquire) };
        for ring in 0..rings {
            let mut batch = Batch::new();
            self.world.queues.reap(ring, &mut batch);
            self.release(batch);
        }
    }

    fn expire(&self) {
        self.due.store(false, Ordering::Relaxed);
        if R::CLEARS_FLAG && R::CLEARS_FLAG_FIRST {
            self.world.queues.expiring();
        }
        if self.mode.load(Ordering::Acquire) == STRICT && self.world.queues.len() == 0 {
            return;
        }
        if R::CLEARS_FLAG && !R::CLEARS_FLAG_FIRST {
            self.world.queues.expiring();
        }
        self.world.flush();
        self.reap();
    }

    fn switch(&self, mode: usize, slots: usize) {
        if mode == STRICT {
            self.mode.store(mode, Ordering::Release);
            if !R::CLOSES_FIRST {
                self.expire();
            }
            self.world.queues.close(0);
            if R::CLOSES_FIRST {
                self.expire();
            }
        } else {
            let was_lazy = self.mode.load(Ordering::Relaxed) != STRICT;
            self.world.open(mode, slots, false);
            self.mode.store(mode, Ordering::Release);
            if was_lazy {
                self.world.queues.close(mode);
                self.expire();
            }
        }
    }

    /// From now on only entries with a reserved byte are queued.
    fn become_bounded(&self) {
        self.world.open(PER_CPU, 3, R::REQUIRES_RESERVATIONS);
        self.world.queues.budget.set(self.bound as u64);
        self.bounded.store(true, Ordering::Release);
        self.expire();
    }

    /// Checks what must hold when no thread is running, and then that nothing was lost.
    fn settle(&self, unmapped: usize) {
        let queued = self.world.queues.len();
        let strict = self.mode.load(Ordering::Relaxed) == STRICT;
        assert!(queued == 0 || !strict, "an entry is queued although the policy is strict");
        assert!(
            queued == 0 || self.due.load(Ordering::Relaxed),
            "an entry waits for a timer that is not armed"
        );
        self.world.flush();
        self.reap();
        assert_eq!(self.world.released(), unmapped, "an entry was lost, or released twice");
    }
}

/// One thread unmaps, on the second CPU, while this one does something else.
fn while_another_unmaps<R: Around>(live: Arc<Live<R>>, act: impl FnOnce(&Live<R>)) {
    let other = Arc::clone(&live);
    let unmapper = thread::spawn(move || other.unmap(1, 0));
    act(&live);
    unmapper.join().unwrap();
    live.settle(1);
}

fn becomes_strict<R: Around>() {
    while_another_unmaps(Live::<R>::new(SINGLE, 3), |live| live.switch(STRICT, 3));
}

fn becomes_strict_and_lazy_again<R: Around>() {
    while_another_unmaps(Live::<R>::new(SINGLE, 3), |live| {
        live.switch(STRICT, 3);
        live.switch(SINGLE, 3);
    });
}

fn unmaps_before_and_after_it_was_strict<R: Around>() {
    let live = Live::<R>::new(SINGLE, 3);
    live.unmap(0, 0);
    let other = Arc::clone(&live);
    let unmapper = thread::spawn(move || other.unmap(0, 1));
    live.switch(STRICT, 3);
    live.switch(SINGLE, 3);
    unmapper.join().unwrap();
    live.settle(2);
}

fn has_its_timer_expire_while_it_is_strict<R: Around>() {
    let live = Live::<R>::new(SINGLE, 3);
    let other = Arc::clone(&live);
    let unmapper = thread::spawn(move || other.unmap(0, 0));
    live.switch(STRICT, 3);
    live.expire();
    live.switch(SINGLE, 3);
    live.unmap(0, 1);
    unmapper.join().unwrap();
    live.settle(2);
}

fn loses_its_second_queue<R: Around>() {
    while_another_unmaps(Live::<R>::new(PER_CPU, 3), |live| live.switch(SINGLE, 3));
}

#[test]
fn what_is_under_way_while_the_policy_becomes_strict_is_flushed_and_not_queued() {
    // rules L19, L27
    check(becomes_strict::<Sound>);
}

#[test]
fn what_is_under_way_while_the_policy_is_strict_for_a_while_is_not_lost() {
    // rules L19, L23, L27
    check(becomes_strict_and_lazy_again::<Sound>);
    check_bounded(unmaps_before_and_after_it_was_strict::<Sound>);
    check_bounded(has_its_timer_expire_while_it_is_strict::<Sound>);
}

#[test]
fn what_is_under_way_while_queues_come_and_go_is_not_lost() {
    // rules L19, L22, L27
    check(loses_its_second_queue::<Sound>);
    check(|| while_another_unmaps(Live::<Sound>::new(SINGLE, 3), |live| live.switch(PER_CPU, 3)));
}

#[test]
fn what_a_smaller_queue_cannot_hold_is_not_lost() {
    // rules L22, L27
    check_bounded(|| {
        let live = Live::<Sound>::new(SINGLE, 3);
        live.unmap(0, 1);
        let other = Arc::clone(&live);
        let unmapper = thread::spawn(move || other.unmap(0, 0));
        live.switch(SINGLE, 2);
        unmapper.join().unwrap();
        live.settle(2);
    });
}

#[test]
fn the_timer_may_expire_while_the_policy_changes_and_others_unmap() {
    // rules L19, L23, L27
    check_bounded(|| {
        let live = Live::<Sound>::new(SINGLE, 3);
        let threads: [fn(&Live<Sound>); 2] = [|live| live.unmap(0, 0), Live::expire];
        let threads = threads.map(|act| {
            let live = Arc::clone(&live);
            thread::spawn(move || act(&live))
        });
        live.switch(STRICT, 3);
        live.switch(PER_CPU, 3);
        for thread in threads {
            thread.join().unwrap();
        }
        live.settle(1);
    });
}

fn becomes_bounded<R: Around>() {
    let live = Live::<R>::new(PER_CPU, 3);
    let other = Arc::clone(&live);
    let unmapper = thread::spawn(move || other.unmap(1, 0));
    live.become_bounded();
    unmapper.join().unwrap();
    let budget = &live.world.queues.budget;
    let all_reserved = live.world.queues.len() == 0 || !budget.reserve(live.bound as u64);
    assert!(all_reserved, "an entry is queued of which no byte was reserved");
    live.settle(1);
}

#[test]
fn what_is_under_way_while_queues_become_bounded_is_not_queued_unreserved() {
    // rule L27
    check(becomes_bounded::<Sound>);
}

fn two_unmap_under_a_bound<R: Around>() {
    let live = Live::<R>::bounded(1);
    let other = Arc::clone(&live);
    let unmapper = thread::spawn(move || other.unmap(1, 1));
    live.unmap(0, 0);
    unmapper.join().unwrap();
    live.settle(2);
}

#[test]
fn two_that_unmap_never_expose_more_than_the_bound() {
    check_bounded(two_unmap_under_a_bound::<Sound>);
}

/// A device that every thread holds: the last one to drop it ends it.
struct Device<R: Around> {
    live: Arc<Live<R>>,
}

impl<R: Around> Drop for Device<R> {
    fn drop(&mut self) {
        let Some(live) = Arc::get_mut(&mut self.live) else { return };
        if R::FLUSHES_AT_END {
            live.world.flush();
        }
        let mut left = Vec::new();
        live.world.queues.drain(&mut |entry| left.push(entry));
        left.into_iter().for_each(|entry| live.world.release_one(entry));
        assert_eq!(live.world.released(), 1, "an entry was lost, or released twice");
    }
}

fn ends_while_another_unmaps_and_the_timer_expires<R: Around>() {
    let device = Arc::new(Device { live: Live::<R>::new(SINGLE, 3) });
    let acts: [fn(&Live<R>); 2] = [|live| live.unmap(0, 0), |live| live.expire()];
    let threads = acts.map(|act| {
        let device = Arc::clone(&device);
        thread::spawn(move || {
            act(&device.live);
            drop(device);
        })
    });
    drop(device);
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn the_last_drop_of_a_device_releases_what_is_queued() {
    // rule L30
    check_bounded(ends_while_another_unmaps_and_the_timer_expires::<Sound>);
}

// The following show that the models can fail.

macro_rules! mutant {
    ($name:ident { $($rules:tt)* } { $($around:tt)* }) => {
        struct $name;
        impl Rules for $name { $($rules)* }
        impl Around for $name { $($around)* }
    };
}

#[test]
#[should_panic(expected = "an entry is queued although the policy is strict")]
fn the_model_finds_a_closed_queue_that_takes_entries() {
    // rule L27
    mutant!(TakesAll { const CLOSES: bool = false; } {});
    check(becomes_strict::<TakesAll>);
}

#[test]
#[should_panic(expected = "an entry is queued although the policy is strict")]
fn the_model_finds_a_queue_that_is_closed_after_its_last_flush() {
    // rule L27
    mutant!(ClosesLast {} { const CLOSES_FIRST: bool = false; });
    check(becomes_strict::<ClosesLast>);
}

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_a_refused_entry_that_is_left_to_another_threads_flush() {
    // rules L19, L27
    mutant!(Leaves {} { const FLUSHES_WHAT_IS_REFUSED: bool = false; });
    check(becomes_strict::<Leaves>);
}

#[test]
#[should_panic(expected = "an entry was lost")]
fn the_model_finds_a_queue_that_is_forgotten_when_it_is_not_in_use() {
    // rules L24, L27
    mutant!(Forgets {} { const REAPS_ALL: bool = false; });
    check(loses_its_second_queue::<Forgets>);
}

#[test]
#[should_panic(expected = "an entry waits for a timer that is not armed")]
fn the_model_finds_a_timer_that_is_stopped_with_its_flag_set() {
    // rules L23, L27
    mutant!(LeavesFlag {} { const CLEARS_FLAG: bool = false; });
    check(unmaps_before_and_after_it_was_strict::<LeavesFlag>);
}

#[test]
#[should_panic(expected = "an entry waits for a timer that is not armed")]
fn the_model_finds_an_idle_expiry_that_leaves_its_flag() {
    // rules L23, L27
    mutant!(LeavesFlagWhenIdle {} { const CLEARS_FLAG_FIRST: bool = false; });
    check_bounded(has_its_timer_expire_while_it_is_strict::<LeavesFlagWhenIdle>);
}

#[test]
#[should_panic(expected = "an entry is queued of which no byte was reserved")]
fn the_model_finds_a_bounded_queue_that_takes_everything() {
    // rule L27
    mutant!(TakesUnreserved {} { const REQUIRES_RESERVATIONS: bool = false; });
    check(becomes_bounded::<TakesUnreserved>);
}

#[test]
#[should_panic(expected = "more is exposed than may be")]
fn the_model_finds_a_reservation_in_two_steps() {
    mutant!(TwoSteps { const RESERVES_AT_ONCE: bool = false; } {});
    check_bounded(two_unmap_under_a_bound::<TwoSteps>);
}

#[test]
#[should_panic(expected = "more is exposed than may be")]
fn the_model_finds_a_reservation_after_the_unmap() {
    mutant!(ReservesLate {} { const RESERVES_FIRST: bool = false; });
    check_bounded(two_unmap_under_a_bound::<ReservesLate>);
}

#[test]
#[should_panic(expected = "released while the device still reaches it")]
fn the_model_finds_an_end_without_a_flush() {
    // rule L30
    mutant!(EndsAtOnce {} { const FLUSHES_AT_END: bool = false; });
    check_bounded(ends_while_another_unmaps_and_the_timer_expires::<EndsAtOnce>);
}
