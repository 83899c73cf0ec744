//! The shootdown, explored by loom.

use loom::thread;
use ringfence_sync::{
    atomic::{AtomicBool, Ordering},
    model::{Memory, check},
};

use super::*;
use crate::Iova;

const PAGE: Range = match Range::new(Iova(0x1000), Iova(0x1fff)) {
    Some(range) => range,
    None => unreachable!(),
};
const OTHER: Range = match Range::new(Iova(0x8000), Iova(0x8fff)) {
    Some(range) => range,
    None => unreachable!(),
};

/// One page, mapped at first, and the memory it leads to. Loom fails the model if a device's
/// access to the memory overlaps its owner's, or is not ordered with it.
struct World {
    mapped: AtomicBool,
    memory: Memory,
    /// The owner sets this once it has its memory back.
    returned: AtomicBool,
}

fn world() -> Arc<World> {
    Arc::new(World {
        mapped: AtomicBool::new(true),
        memory: Memory::default(),
        returned: AtomicBool::new(false),
    })
}

impl World {
    /// A device's access with a cache of one translation.
    fn access(&self, cache: &mut bool) -> bool {
        if !*cache {
            *cache = self.mapped.load(Ordering::Acquire);
        }
        if *cache {
            self.touch();
        }
        *cache
    }

    fn touch(&self) {
        assert!(!self.returned.load(Ordering::Relaxed), "reached after it was returned");
        self.memory.read();
    }

    /// The owner unmaps the page and, if the invalidation ends within `looks` checks, uses its
    /// memory again.
    fn unmap(&self, shootdown: &Shootdown, looks: usize) {
        self.unmap_in(Scope::ALL, shootdown, looks);
    }

    /// The same for a page that only readers in `scope` look up.
    fn unmap_in(&self, scope: Scope, shootdown: &Shootdown, looks: usize) {
        self.mapped.store(false, Ordering::Relaxed);
        let token = shootdown.begin_in(scope, &[PAGE]);
        self.take_back(shootdown, token, looks);
    }

    fn take_back(&self, shootdown: &Shootdown, token: u64, looks: usize) {
        for _ in 0..looks {
            if shootdown.is_over(token) {
                self.returned.store(true, Ordering::Relaxed);
                self.memory.write();
                return;
            }
            thread::yield_now();
        }
    }
}

fn forget(cache: &mut bool, gone: Range) {
    if gone.overlaps(PAGE) {
        *cache = false;
    }
}

#[test]
fn a_cache_never_serves_what_was_invalidated() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            for _ in 0..2 {
                theirs.access(&mut cache);
                reader.poll(|gone| forget(&mut cache, gone));
            }
            theirs.access(&mut cache);
        });
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn nor_does_that_of_a_reader_which_was_offline() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            theirs.access(&mut cache);
            reader.offline();
            reader.online(|gone| forget(&mut cache, gone));
            theirs.access(&mut cache);
            drop(reader);
        });
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn nor_that_of_a_reader_which_is_born_meanwhile() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let (theirs, from) = (Arc::clone(&world), Arc::clone(&shootdown));
        let device = thread::spawn(move || {
            let mut reader = from.reader().unwrap();
            let mut cache = false;
            theirs.access(&mut cache);
            reader.poll(|gone| forget(&mut cache, gone));
            theirs.access(&mut cache);
        });
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn nor_that_of_a_reader_which_is_lapped() {
    check(Some(3), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            theirs.access(&mut cache);
            reader.poll(|gone| forget(&mut cache, gone));
            theirs.access(&mut cache);
        });
        // The log of a model holds two ranges: the third overwrites the one that matters.
        world.mapped.store(false, Ordering::Relaxed);
        let token = shootdown.begin(&[PAGE]);
        shootdown.begin(&[OTHER]);
        shootdown.begin(&[OTHER]);
        world.take_back(&shootdown, token, 2);
        device.join().unwrap();
    });
}

#[test]
fn nor_that_of_a_reader_which_replays_another_invalidation_meanwhile() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            theirs.access(&mut cache);
            for _ in 0..2 {
                reader.poll(|gone| forget(&mut cache, gone));
            }
            theirs.access(&mut cache);
        });
        shootdown.begin(&[OTHER]);
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn a_lease_holds_its_memory_beyond_a_quiet_point() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            let lease = theirs.access(&mut cache).then(|| reader.lease(PAGE));
            reader.poll(|gone| forget(&mut cache, gone));
            if lease.is_some() {
                theirs.touch();
            }
            drop(lease);
            theirs.access(&mut cache);
        });
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn a_lease_is_not_overlooked_where_others_make_room_for_theirs() {
    check(Some(3), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let lease = theirs.access(&mut false).then(|| reader.lease(PAGE));
            reader.poll(|_| ());
            if lease.is_some() {
                theirs.touch();
            }
        });
        world.mapped.store(false, Ordering::Relaxed);
        let token = shootdown.begin(&[PAGE]);
        // A model tracks two invalidations: for the third, one that is over makes room.
        shootdown.begin(&[OTHER]);
        shootdown.begin(&[OTHER]);
        world.take_back(&shootdown, token, 1);
        device.join().unwrap();
    });
}

#[test]
fn a_lease_that_is_renewed_is_not_overlooked() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let mut lease = reader.lease(OTHER);
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            lease.rest();
            let held = theirs.access(&mut cache);
            if held {
                reader.renew(&mut lease, PAGE);
            }
            reader.poll(|gone| forget(&mut cache, gone));
            if held {
                theirs.touch();
            }
            lease.rest();
            theirs.access(&mut cache);
        });
        world.unmap(&shootdown, 1);
        device.join().unwrap();
    });
}

#[test]
fn a_lease_is_over_where_its_place_is_used_for_another_range() {
    check(Some(4), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut lease = theirs.access(&mut false).then(|| reader.lease(PAGE));
            reader.poll(|_| ());
            if let Some(lease) = &mut lease {
                theirs.touch();
                lease.rest();
                // Of the same mark, if no grace period was started meanwhile.
                reader.renew(lease, OTHER);
            }
        });
        world.unmap(&shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn a_lease_is_found_in_a_place_that_others_use_and_leave() {
    // A chunk holds one lease in a model: the first lease is on another page and ends, or does not,
    // so that the one that matters goes to the same slot or to a further chunk.
    check(Some(3), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let mut reader = shootdown.reader().unwrap();
        let first = reader.lease(OTHER);
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = false;
            let lease = theirs.access(&mut cache).then(|| reader.lease(PAGE));
            reader.poll(|gone| forget(&mut cache, gone));
            let other = reader.lease(OTHER);
            if lease.is_some() {
                theirs.touch();
            }
            drop((lease, other));
        });
        let completion = thread::spawn(move || drop(first));
        world.unmap(&shootdown, 1);
        device.join().unwrap();
        completion.join().unwrap();
    });
}

/// A device that moves between two scopes, and begins in one of them, while a page of the first is
/// unmapped.
fn moving(begins: usize, device: fn(&World, &mut Reader, [Scope; 2])) {
    check(Some(4), move || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let scopes = [shootdown.scope(), shootdown.scope()];
        let mut reader = shootdown.reader().unwrap();
        reader.enter(scopes[begins]);
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || device(&theirs, &mut reader, scopes));
        world.unmap_in(scopes[0], &shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn a_reader_that_comes_from_another_scope_is_waited_for() {
    moving(1, |world, reader, [here, _]| {
        let mut cache = false;
        reader.enter(here);
        world.access(&mut cache);
        reader.poll(|gone| forget(&mut cache, gone));
        world.access(&mut cache);
    });
}

#[test]
fn one_that_leaves_and_comes_back_is_waited_for_as_long_as_it_has_something() {
    moving(0, |world, reader, [here, there]| {
        world.access(&mut false);
        reader.enter(there);
        reader.enter(here);
        world.access(&mut false);
    });
}

#[test]
fn a_lease_that_is_taken_along_elsewhere_is_not_overlooked() {
    moving(0, |world, reader, [_, there]| {
        let lease = world.access(&mut false).then(|| reader.lease(PAGE));
        reader.enter(there);
        if lease.is_some() {
            world.touch();
        }
    });
}

#[test]
fn the_next_reader_of_an_index_is_not_where_the_last_was() {
    check(Some(3), || {
        let (shootdown, world) = (Shootdown::new(1), world());
        let (here, there) = (shootdown.scope(), shootdown.scope());
        let mut reader = shootdown.reader().unwrap();
        reader.enter(there);
        drop(reader);
        let (theirs, from) = (Arc::clone(&world), Arc::clone(&shootdown));
        let device = thread::spawn(move || {
            let reader = from.reader().unwrap();
            theirs.access(&mut false);
            drop(reader);
        });
        world.unmap_in(here, &shootdown, 2);
        device.join().unwrap();
    });
}

#[test]
fn leases_that_two_threads_take_of_a_full_chain_get_places_of_their_own() {
    check(None, || {
        let (shootdown, leases) = (Shootdown::new(1), Arc::new(Leases::new()));
        let mark = shootdown.scope().token(Qsbr::new(1).start());
        leases.take(OTHER, mark);
        let theirs = Arc::clone(&leases);
        let other = thread::spawn(move || theirs.take(PAGE, mark));
        let mine = leases.take(OTHER, mark);
        let other = other.join().unwrap();
        assert_eq!([mine.min(other), mine.max(other)], [1, 2]);
        leases.give_back(mine);
        assert!(leases.stand_on(&[PAGE], u64::MAX, Scope::ALL));
    });
}
