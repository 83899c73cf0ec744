//! Tests of the shootdown.

use alloc::{vec, vec::Vec};

use super::{leases::CHUNK, log::LOG, *};
use crate::Iova;

fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).unwrap()
}

fn polled(reader: &mut Reader) -> Vec<Range> {
    let mut received = Vec::new();
    reader.poll(|gone| received.push(gone));
    received
}

#[test]
fn every_reader_gets_every_range_once_and_in_order() {
    let shootdown = Shootdown::new(2);
    let (mut a, mut b) = (shootdown.reader().unwrap(), shootdown.reader().unwrap());
    let first = shootdown.begin(&[range(0, 9)]);
    assert_eq!(polled(&mut a), [range(0, 9)]);
    let second = shootdown.begin(&[range(20, 29)]);
    assert!(!shootdown.is_over(first) && second > first);
    assert_eq!(polled(&mut a), [range(20, 29)]);
    assert!(polled(&mut a).is_empty());
    assert!(!shootdown.is_over(first));
    let both = [range(0, 9), range(20, 29)];
    assert_eq!(polled(&mut b), both);
    assert!(shootdown.is_over(first) && shootdown.is_over(second) && shootdown.is_over(0));
    let (last, _) = Scope::of_token(second);
    let next = Scope::ALL.token(Grace::from_u64(last.as_u64() + 1));
    assert!(!shootdown.is_over(next), "it has not begun");
}

#[test]
fn all_is_all() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    shootdown.begin(&[Range::ALL]);
    shootdown.begin(&[Range::ALL]);
    assert_eq!(polled(&mut reader), [Range::ALL]);
}

#[test]
fn without_ranges_it_is_a_grace_period_alone() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let lease = reader.lease(Range::ALL);
    let token = shootdown.begin(&[]);
    assert!(!shootdown.is_over(token));
    assert!(polled(&mut reader).is_empty());
    assert!(shootdown.is_over(token));
    drop(lease);
}

#[test]
fn a_reader_that_was_lapped_drops_everything() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let tokens: Vec<_> =
        (0..=LOG as u64).map(|n| shootdown.begin(&[range(n * 10, n * 10)])).collect();
    assert_eq!(polled(&mut reader), [Range::ALL]);
    assert!(tokens.iter().all(|&token| shootdown.is_over(token)));
    // Exactly as many as the log holds are still separate.
    for n in 0..LOG as u64 {
        shootdown.begin(&[range(n * 10, n * 10)]);
    }
    assert_eq!(polled(&mut reader).len(), LOG);
}

#[test]
fn too_many_ranges_are_widened_and_none_is_lost() {
    // rule L42
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let gone: Vec<_> = (0..100).map(|n| range(n * n * 16, n * n * 16 + 3)).collect();
    shootdown.begin(&gone);
    let received = polled(&mut reader);
    assert!(received.len() <= RANGES);
    for part in gone {
        assert!(received.iter().any(|r| r.covers(part)), "{part} was lost");
    }
}

#[test]
fn a_reader_that_was_offline_gets_the_ranges_on_coming_back() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    reader.offline();
    let token = shootdown.begin(&[range(5, 6)]);
    assert!(shootdown.is_over(token), "an offline reader is not waited for");
    assert!(polled(&mut reader).is_empty() && !reader.is_online());
    let mut received = vec![];
    reader.online(|gone| received.push(gone));
    assert_eq!(received, [range(5, 6)]);
    reader.online(|_| panic!("it is online already"));
    assert!(!shootdown.is_over(shootdown.begin(&[range(5, 6)])));
    drop(reader);
    shootdown.wait(shootdown.begin(&[range(5, 6)]));
    let mut new_reader = shootdown.reader().unwrap();
    assert!(polled(&mut new_reader).is_empty(), "its cache was empty when that was removed");
}

#[test]
fn a_range_at_which_the_cache_panics_is_delivered_again() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let panics = |f: &mut dyn FnMut()| {
        assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(f)).is_err());
    };
    let token = shootdown.begin(&[range(5, 6)]);
    panics(&mut || reader.poll(|_| panic!("in the cache")));
    assert!(!shootdown.is_over(token));
    assert_eq!(polled(&mut reader), [range(5, 6)]);
    reader.offline();
    shootdown.begin(&[range(7, 8)]);
    panics(&mut || reader.online(|_| panic!("in the cache")));
    assert!(!reader.is_online());
    let mut received = vec![];
    reader.online(|gone| received.push(gone));
    assert_eq!(received, [range(7, 8)]);
}

#[test]
fn an_invalidation_waits_for_older_leases_on_its_ranges_and_for_no_others() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let elsewhere = reader.lease(range(100, 199));
    let on_it = reader.lease(range(0, 50));
    let token = shootdown.begin(&[range(40, 60), range(300, 400)]);
    let all = shootdown.begin(&[Range::ALL]);
    // Taken before the quiet point: it may stand on what was removed.
    let late = reader.lease(range(60, 60));
    polled(&mut reader);
    // Taken after it: it stands on what has been mapped there since.
    let newer = reader.lease(range(0, 50));
    assert!(!shootdown.is_over(token) && shootdown.is_quiet(token));
    drop(on_it);
    assert!(!shootdown.is_over(token));
    std::thread::spawn(move || drop(late)).join().unwrap();
    assert!(shootdown.is_over(token));
    assert!(!shootdown.is_over(all));
    drop(elsewhere);
    assert!(shootdown.is_over(all));
    let next = shootdown.begin(&[range(0, 0)]);
    polled(&mut reader);
    assert!(!shootdown.is_over(next));
    drop(newer);
    assert!(shootdown.is_over(next));
}

#[test]
fn a_lease_is_renewed_on_another_range_and_for_a_later_time() {
    let shootdown = Shootdown::new(2);
    let mut reader = shootdown.reader().unwrap();
    let mut lease = reader.lease(range(0, 9));
    let index = lease.index;
    let old = shootdown.begin(&[range(0, 9)]);
    reader.poll(|_| ());
    assert!(!shootdown.is_over(old));
    lease.rest();
    assert!(shootdown.is_over(old), "it is over, though its place is kept");

    // On the current mapping: older invalidations do not wait for it, newer ones do.
    let older = shootdown.begin(&[range(20, 29)]);
    reader.poll(|_| ());
    reader.renew(&mut lease, range(20, 29));
    assert_eq!(lease.index, index);
    assert!(shootdown.is_over(older));
    let newer = [range(20, 20), range(0, 9)].map(|gone| shootdown.begin(&[gone]));
    reader.poll(|_| ());
    assert!(!shootdown.is_over(newer[0]));
    assert!(shootdown.is_over(newer[1]), "not on what it was taken on at first");
    drop(lease);
    assert!(shootdown.is_over(newer[0]));
    assert_eq!(reader.lease(range(0, 0)).index, index, "its place is free");

    // Renewed by another reader it is a new lease; one that is still held ends.
    let mut other = shootdown.reader().unwrap();
    let mut lease = reader.lease(range(0, 9));
    other.renew(&mut lease, range(30, 39));
    let gone = [range(0, 9), range(30, 39)].map(|gone| shootdown.begin(&[gone]));
    reader.poll(|_| ());
    other.poll(|_| ());
    assert_eq!(gone.map(|token| shootdown.is_over(token)), [true, false]);
}

#[test]
fn a_lease_outlives_its_reader_and_the_next_of_that_index() {
    let shootdown = Shootdown::new(1);
    let reader = shootdown.reader().unwrap();
    let lease = reader.lease(range(0, 9));
    drop(reader);
    let token = shootdown.begin(&[range(0, 9)]);
    let next = shootdown.reader().unwrap();
    let theirs = next.lease(range(0, 9));
    drop((next, theirs));
    assert!(!shootdown.is_over(token));
    drop(lease);
    assert!(shootdown.is_over(token));
}

#[test]
fn there_is_no_limit_to_leases_and_their_places_are_used_again() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    for _ in 0..2 {
        let mut leases: Vec<_> = (0..3 * CHUNK as u64).map(|n| reader.lease(range(n, n))).collect();
        let places: alloc::collections::BTreeSet<_> =
            leases.iter().map(|lease| lease.index).collect();
        assert_eq!(places.len(), leases.len());
        assert_eq!(places.last(), Some(&(3 * CHUNK - 1)));
        let token = shootdown.begin(&[Range::ALL]);
        polled(&mut reader);
        while let Some(lease) = leases.pop() {
            assert!(!shootdown.is_over(token));
            drop(lease);
        }
        assert!(shootdown.is_over(token));
    }
}

#[test]
fn forgotten_tokens_are_merged_and_none_is_over_too_early() {
    let shootdown = Shootdown::new(1);
    let mut reader = shootdown.reader().unwrap();
    let lease = reader.lease(range(0, 0));
    // The lease holds up the first one; the others wait only for the quiet point.
    let tokens: Vec<_> =
        (0..3 * PENDING as u64).map(|n| shootdown.begin(&[range(n * 16, n * 16)])).collect();
    polled(&mut reader);
    assert!(!shootdown.is_over(tokens[0]));
    assert!(shootdown.is_over(*tokens.last().unwrap()));
    drop(lease);
    assert!(tokens.iter().all(|&token| shootdown.is_over(token)));
    // Invalidations that are over make room by themselves.
    for _ in 0..3 * PENDING {
        shootdown.begin(&[range(7, 7)]);
        polled(&mut reader);
    }
    assert!(shootdown.pending.lock().entries.len() <= PENDING);
}

#[test]
fn caches_and_leases_keep_their_promise_under_load() {
    use core::sync::atomic::{AtomicBool, AtomicU64 as Plain, Ordering};
    // Each of 16 pages is mapped to the version it had when mapped, or to 0. Once an invalidation
    // is over the version's memory is poisoned, and no reader may ever see that.
    const PAGES: usize = 16;
    const VERSIONS: usize = 1 << 13;
    struct World {
        table: [Plain; PAGES],
        poisoned: Vec<AtomicBool>,
        stop: AtomicBool,
    }
    let shootdown = Shootdown::new(4);
    let world = Arc::new(World {
        table: Default::default(),
        poisoned: (0..VERSIONS).map(|_| AtomicBool::new(false)).collect(),
        stop: AtomicBool::new(false),
    });
    let page = |n: usize| range(n as u64 * 4096, n as u64 * 4096 + 4095);
    let readers: Vec<_> = (1..=3usize)
        .map(|seed| {
            let (world, mut reader) = (Arc::clone(&world), shootdown.reader().unwrap());
            std::thread::spawn(move || {
                let mut cache = [0u64; PAGES];
                let mut leases: Vec<(Lease, u64)> = vec![];
                let mut turn = seed;
                let check = |version: u64| {
                    let poisoned = &world.poisoned[version as usize];
                    assert!(!poisoned.load(Ordering::Relaxed), "stale: {version}");
                };
                while !world.stop.load(Ordering::Relaxed) {
                    turn = turn.wrapping_mul(25_214_903_917).wrapping_add(11);
                    let n = (turn >> 20) % PAGES;
                    if cache[n] == 0 {
                        cache[n] = world.table[n].load(Ordering::Acquire);
                    }
                    check(cache[n]);
                    if turn >> 30 & 3 == 0 && cache[n] != 0 {
                        leases.push((reader.lease(page(n)), cache[n]));
                    }
                    leases.iter().for_each(|&(_, version)| check(version));
                    if leases.len() > 5 {
                        leases.clear();
                    }
                    let drop_from = |cache: &mut [u64; PAGES], gone: Range| {
                        for (n, entry) in cache.iter_mut().enumerate() {
                            if gone.overlaps(page(n)) {
                                *entry = 0;
                            }
                        }
                    };
                    if turn >> 34 & 15 == 0 {
                        reader.offline();
                        std::thread::yield_now();
                        reader.online(|gone| drop_from(&mut cache, gone));
                    } else if turn >> 33 & 1 == 0 {
                        // Otherwise, with more threads than CPUs, others wait a time slice for us.
                        std::thread::yield_now();
                        reader.poll(|gone| drop_from(&mut cache, gone));
                    }
                }
            })
        })
        .collect();
    let mut pending: Vec<(u64, u64)> = vec![];
    for version in 1..VERSIONS {
        let n = version * 7 % PAGES;
        let old = world.table[n].swap(0, Ordering::AcqRel);
        if old != 0 {
            pending.push((shootdown.begin(&[page(n)]), old));
        }
        world.table[n].store(version as u64, Ordering::Release);
        while pending.len() > version % 50 {
            pending.retain(|&(token, old)| {
                let over = shootdown.is_over(token);
                if over {
                    world.poisoned[old as usize].store(true, Ordering::Relaxed);
                }
                !over
            });
            std::thread::yield_now();
        }
    }
    world.stop.store(true, Ordering::Relaxed);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

#[test]
fn an_invalidation_in_a_scope_waits_for_readers_that_may_be_in_it() {
    let shootdown = Shootdown::new(4);
    let (here, there) = (shootdown.scope(), shootdown.scope());
    assert_ne!(here, there);
    let mut readers: Vec<_> = (0..4).map(|_| shootdown.reader().unwrap()).collect();
    for (reader, scope) in readers.iter_mut().zip([here, there, Scope::NONE, Scope::ALL]) {
        reader.enter(scope);
        assert_eq!(reader.scope(), scope);
    }
    let token = shootdown.begin_in(here, &[range(0, 9)]);
    assert!(!shootdown.is_over(token));
    polled(&mut readers[0]);
    assert!(!shootdown.is_over(token), "the one that may be anywhere");
    polled(&mut readers[3]);
    assert!(shootdown.is_over(token) && !shootdown.is_quiet(token));
    // A reader that enters later finds nothing there.
    readers[1].enter(here);
    let all = shootdown.begin(&[range(20, 29)]);
    polled(&mut readers[0]);
    polled(&mut readers[3]);
    assert!(!shootdown.is_over(all));
    // Every reader receives every invalidation.
    let expected = [range(0, 9), range(20, 29)];
    assert_eq!(polled(&mut readers[1]), expected);
    assert_eq!(polled(&mut readers[2]), expected);
    assert!(shootdown.is_over(all) && shootdown.is_quiet(token));
}

#[test]
fn a_lease_holds_up_its_own_scope_and_those_that_are_everywhere() {
    let shootdown = Shootdown::new(2);
    let (here, there) = (shootdown.scope(), shootdown.scope());
    let mut reader = shootdown.reader().unwrap();
    reader.enter(here);
    let mut lease = reader.lease(range(0, 9));
    // The lease stays in the scope in which it was taken.
    reader.enter(there);
    let begin = |scope| shootdown.begin_in(scope, &[range(0, 9)]);
    let [own, other, all] = [here, there, Scope::ALL].map(begin);
    polled(&mut reader);
    assert_eq!([own, other, all].map(|token| shootdown.is_over(token)), [false, true, false]);
    reader.renew(&mut lease, range(0, 9));
    assert!(shootdown.is_over(own) && shootdown.is_over(all));
    let [own, other, all] = [here, there, Scope::ALL].map(begin);
    polled(&mut reader);
    assert_eq!([own, other, all].map(|token| shootdown.is_over(token)), [true, false, false]);
    drop(lease);
    assert!(shootdown.is_over(other) && shootdown.is_over(all));
}

#[test]
fn merged_invalidations_of_several_scopes_wait_for_the_leases_of_each() {
    let shootdown = Shootdown::new(2);
    let mut reader = shootdown.reader().unwrap();
    let scopes: Vec<_> = (0..2 * PENDING).map(|_| shootdown.scope()).collect();
    // It may stand on a translation of any scope.
    let lease = reader.lease(range(0, 9));
    let tokens: Vec<_> =
        scopes.iter().map(|&scope| shootdown.begin_in(scope, &[range(0, 9)])).collect();
    polled(&mut reader);
    assert!(tokens.iter().all(|&token| !shootdown.is_over(token)), "the lease is on all of them");
    drop(lease);
    assert!(tokens.iter().all(|&token| shootdown.is_over(token)));
}
