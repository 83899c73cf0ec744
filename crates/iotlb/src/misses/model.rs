//! A miss, its update and the wake-up, explored by loom.

use loom::thread;
use ringfence_sync::atomic::AtomicBool;

use super::*;

const TIMES: Times = Times { again_ns: u64::MAX, refused_ns: u64::MAX };

fn miss() -> Miss {
    Miss { iova: Iova(0x1000), access: Prot::READ, again: None }
}

fn page() -> Range {
    Range::from_len(Iova(0x1000), PAGE).unwrap()
}

/// A table of one page, and its list of misses.
struct World {
    mapped: AtomicBool,
    misses: Misses,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World { mapped: AtomicBool::new(false), misses: Misses::new(2, TIMES, 7) })
    }

    fn there(&self) -> bool {
        self.mapped.load(Ordering::Acquire)
    }

    fn update(&self) {
        self.mapped.store(true, Ordering::Release);
        self.misses.update(page(), Prot::READ);
    }

    fn refused(&self, since: Option<u64>, waiter: &Arc<Waiter>) -> bool {
        self.misses.is_refused((miss().iova, Prot::READ), since, waiter, || 1)
    }

    /// Looks once. Returns whether the page was there, and whether a miss must be sent.
    fn look(&self, waiter: &Arc<Waiter>) -> (bool, bool) {
        self.look_at(miss(), waiter)
    }

    fn look_at(&self, miss: Miss, waiter: &Arc<Waiter>) -> (bool, bool) {
        if self.there() {
            return (true, false);
        }
        let mut wanted = vec![miss];
        self.misses.note(&mut wanted, waiter, 0, |_| self.there());
        (false, !wanted.is_empty())
    }
}

fn check(f: impl Fn() + Send + Sync + 'static) {
    ringfence_sync::model::check(Some(3), f);
}

/// A view with a miss finds the page, or is woken and finds it then, or sends the miss after the
/// update was over.
#[test]
fn no_update_is_lost() {
    check(|| {
        let world = World::new();
        let theirs = Arc::clone(&world);
        let front_end = thread::spawn(move || theirs.update());
        let waiter = Waiter::new(Box::new(|| ()));
        let (there, _) = world.look(&waiter);
        front_end.join().unwrap();
        assert!(there || waiter.updates() > 0, "it waits for what is there");
        assert!(world.there());
        assert_eq!(world.misses.listed(), 0);
    });
}

/// Two views miss the same page, each another part of it; one miss is sent, and its update wakes both.
#[test]
fn one_miss_serves_all_waiters() {
    check(|| {
        let world = World::new();
        let waiters = [(); 2].map(|()| Waiter::new(Box::new(|| ())));
        let views = [0, 1].map(|at| {
            let (world, waiter) = (Arc::clone(&world), Arc::clone(&waiters[at]));
            let miss = Miss { iova: Iova(0x1000 + 0xe00 * at as u64), ..miss() };
            thread::spawn(move || {
                let (there, sends) = world.look_at(miss, &waiter);
                if sends {
                    // The front end sends updates for misses only.
                    world.update();
                }
                there
            })
        });
        let there = views.map(|view| view.join().unwrap());
        for (there, waiter) in there.into_iter().zip(&waiters) {
            assert!(there || waiter.updates() > 0, "it was not woken");
        }
    });
}

/// A waiter that sees that it was woken finds the translation.
#[test]
fn a_woken_waiter_finds_the_translation() {
    check(|| {
        let world = World::new();
        let waiter = Waiter::new(Box::new(|| ()));
        world.look(&waiter);
        let theirs = Arc::clone(&world);
        let front_end = thread::spawn(move || theirs.update());
        if waiter.updates() > 0 {
            assert!(world.there());
        }
        front_end.join().unwrap();
    });
}

/// A refusal reaches the waiter: it looks again and sees it, or has sent its miss afterwards.
#[test]
fn a_refusal_is_not_lost_either() {
    check(|| {
        let world = World::new();
        let waiter = Waiter::new(Box::new(|| ()));
        let (_, sends) = world.look(&waiter);
        assert!(sends);
        let theirs = Arc::clone(&world);
        let front_end = thread::spawn(move || theirs.misses.refuse(page(), Prot::READ, None, 0));
        let (_, again) = world.look(&waiter);
        front_end.join().unwrap();
        let refused = world.refused(None, &waiter);
        assert!(refused && waiter.updates() > 0 || again);
    });
}

/// A waiter that sees that it was woken for a refusal finds it, without a lock in between.
#[test]
fn a_woken_waiter_finds_the_refusal() {
    check(|| {
        let world = World::new();
        let waiter = Waiter::new(Box::new(|| ()));
        let since = world.misses.count();
        assert!(world.look(&waiter).1);
        let theirs = Arc::clone(&world);
        let front_end = thread::spawn(move || theirs.misses.refuse(page(), Prot::READ, None, 0));
        if waiter.updates() > 0 {
            assert!(world.refused(Some(since), &waiter));
        }
        front_end.join().unwrap();
    });
}

/// It is not lost either if another view sends the same miss before it is seen.
#[test]
fn a_refusal_outlives_the_next_miss() {
    check(|| {
        let world = World::new();
        let [waiter, other] = [(); 2].map(|()| Waiter::new(Box::new(|| ())));
        let since = world.misses.count();
        assert!(world.look(&waiter).1);
        let threads = [
            thread::spawn({
                let world = Arc::clone(&world);
                move || drop(world.misses.refuse(page(), Prot::READ, None, 0))
            }),
            thread::spawn({
                let world = Arc::clone(&world);
                move || {
                    let since = world.misses.count();
                    let (_, sends) = world.look(&other);
                    assert!(
                        sends || !world.refused(Some(since), &other),
                        "the miss was sent before it came"
                    );
                }
            }),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(waiter.updates() > 0 && world.refused(Some(since), &waiter));
    });
}
