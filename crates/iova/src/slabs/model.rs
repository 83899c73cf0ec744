//! The slabs under the model checker: all interleavings of a few threads that allocate, free, take
//! back and steal, within the bounds below.
//!
//! Each model ends with the same check: no two ranges overlapped, and once all is freed and taken
//! back the tree has every granule again, in one piece.

use loom::thread;
use ringfence_sync::{
    Arc,
    model::{Memory, check},
};
use std::{array, cell::Cell, sync::Mutex, vec::Vec};

use super::{
    slab::{Freed, Slab},
    *,
};

loom::thread_local! {
    static CPU: Cell<usize> = Cell::new(0);
}

/// Two CPUs; each thread chooses the one it runs on.
struct TwoCpus;

impl CpuId for TwoCpus {
    fn current(&self) -> usize {
        CPU.with(Cell::get)
    }
    fn count(&self) -> usize {
        2
    }
}

fn on(cpu: usize) {
    CPU.with(|current| current.set(cpu));
}

/// Slabs, and the ranges handed out and not freed yet. The list is not part of the model: it
/// changes between its steps.
struct Space {
    slabs: Slabs<TwoCpus>,
    held: Mutex<Vec<(u64, u64)>>,
    /// What the owner of a granule does with it. Loom fails the model if it overlaps what the next
    /// owner does, or is not ordered with that.
    used: [Memory; GRANULES as usize],
}

impl Space {
    fn used(&self, iova: u64, granules: u64) {
        let first = (iova / 4096 - FIRST) as usize;
        self.used[first..first + granules as usize].iter().for_each(Memory::write);
    }

    fn alloc(&self, granules: u64) -> u64 {
        let iova = self.slabs.alloc(&Request::new(granules * 4096)).expect("room");
        let range = (iova, iova + (granules * 4096 - 1));
        let mut held = self.held.lock().expect("no thread panics with it");
        assert!(
            held.iter().all(|(first, last)| *last < range.0 || range.1 < *first),
            "{range:x?} is handed out while {held:x?} are"
        );
        held.push(range);
        drop(held);
        self.used(iova, granules);
        iova
    }

    /// As [`alloc`](Self::alloc), but the model itself never frees the range.
    fn take(&self, granules: u64) {
        self.alloc(granules);
    }

    fn free(&self, iova: u64, granules: u64) {
        self.used(iova, granules);
        self.held.lock().expect("no thread panics with it").retain(|(first, _)| *first != iova);
        self.slabs.free(iova, granules * 4096).expect("it is allocated");
    }
}

impl Space {
    fn held(&self) -> usize {
        self.held.lock().expect("no thread panics with it").len()
    }

    fn free_all(&self) {
        let held = std::mem::take(&mut *self.held.lock().expect("no thread panics with it"));
        for (first, last) in held {
            self.slabs.free(first, last - first + 1).expect("it is allocated");
        }
    }
}

/// The models' aperture in granules. A slab has four ranges.
const FIRST: u64 = 32;
const GRANULES: u64 = 64;

fn space(slab: u64, idle: u32) -> Arc<Space> {
    let last = (FIRST + GRANULES) * 4096 - 1;
    let aperture = Aperture::new(FIRST * 4096, last, 4096).expect("not empty");
    let config =
        SlabConfig { largest_slab: Some(slab * 4096), idle_slabs: idle, ..SlabConfig::default() };
    let slabs = Slabs::with_config(aperture, TwoCpus, config);
    let used = array::from_fn(|_| Memory::default());
    Arc::new(Space { slabs, held: Mutex::new(Vec::new()), used })
}

/// Takes back what is kept, and checks that the tree has every granule that is not handed out and
/// that slabs own only ranges that are. Twice, as the second time finds what the first has lost.
fn is_whole(space: &Space) {
    for held in [space.held(), 0] {
        let mut core = space.slabs.core.lock();
        space.slabs.withdraw_all(&mut core);
        let in_slabs = |slab: &Slab| u64::from(slab.owned().count_ones()) << slab.class();
        let taken: u64 = core.slabs().map(in_slabs).sum();
        let exact: u64 = core.exact.iter().map(|(first, last)| last - first + 1).sum();
        assert_eq!(core.tree.free() + taken + exact, GRANULES, "granules are lost");
        assert!(core.slabs().all(|slab| slab.free() == 0), "a free range was not found");
        let all = core.pages.iter().map(|page| page.len()).sum::<usize>();
        assert!(held != 0 || core.unused.len() == all, "a slab of nothing is left");
        drop(core);
        if held == 0 {
            break;
        }
        space.free_all();
    }
}

/// Runs both on threads of their own.
fn both(space: &Arc<Space>, one: impl FnOnce(&Space) + Send + 'static, other: impl FnOnce(&Space)) {
    let theirs = Arc::clone(space);
    let thread = thread::spawn(move || one(&theirs));
    other(space);
    thread.join().expect("the other thread");
}

#[test]
fn model_two_threads_on_one_cpu_never_get_the_same_range() {
    check(Some(3), || {
        let space = space(4, 1);
        let pair = |space: &Space| {
            let first = space.alloc(1);
            space.alloc(1);
            space.free(first, 1);
        };
        let theirs = Arc::clone(&space);
        let thread = thread::spawn(move || pair(&theirs));
        pair(&space);
        thread.join().expect("the other thread");
        is_whole(&space);
    });
}

#[test]
fn model_two_threads_that_need_a_new_slab_each_get_their_range() {
    check(Some(2), || {
        let space = space(4, 1);
        (0..3).for_each(|_| space.take(1));
        // One range is left for the two threads.
        both(&space, |space| space.take(1), |space| space.take(1));
        is_whole(&space);
    });
}

#[test]
fn model_of_two_frees_of_a_range_exactly_one_succeeds() {
    for size in [4096, 3 * 4096] {
        check(Some(3), move || {
            let space = space(4, 1);
            let iova = space.slabs.alloc(&Request::new(size)).expect("room");
            let theirs = Arc::clone(&space);
            let thread = thread::spawn(move || {
                on(1);
                theirs.slabs.free(iova, size).is_ok()
            });
            let mine = space.slabs.free(iova, size).is_ok();
            assert!(mine ^ thread.join().expect("the other thread"));
            is_whole(&space);
        });
    }
}

#[test]
fn model_a_free_while_everything_is_taken_back_loses_nothing() {
    // A range of a current slab, of one in a list, and of a detached one.
    for taken in [2, 5, 8] {
        check(Some(3), move || {
            let space = space(4, 1);
            let ranges: Vec<u64> = (0..taken).map(|_| space.alloc(1)).collect();
            if taken == 8 {
                space.free(ranges[3], 1);
            }
            both(
                &space,
                move |space| {
                    on(1);
                    space.free(ranges[0], 1);
                    space.free(ranges[1], 1);
                },
                |space| space.slabs.drain(),
            );
            is_whole(&space);
        });
    }
}

#[test]
fn model_two_frees_of_a_detached_slab_agree_on_its_owner() {
    for idle in [0, 1] {
        check(Some(3), move || {
            let space = space(4, idle);
            // The first slab is detached.
            let ranges: Vec<u64> = (0..5).map(|_| space.alloc(1)).collect();
            let (first, second, third, last) = (ranges[0], ranges[1], ranges[2], ranges[3]);
            both(
                &space,
                move |space| {
                    on(1);
                    space.free(first, 1);
                    space.free(second, 1);
                },
                move |space| {
                    space.free(third, 1);
                    space.free(last, 1);
                },
            );
            is_whole(&space);
        });
    }
}

#[test]
fn model_the_last_range_of_a_listed_slab_is_taken_while_another_is_freed() {
    check(Some(3), || {
        let space = space(4, 1);
        // Three slabs are exhausted. The first becomes current again with one free range, the second
        // gets into the list with another.
        let ranges: Vec<u64> = (0..12).map(|_| space.alloc(1)).collect();
        space.free(ranges[0], 1);
        space.free(ranges[5], 1);
        // The lowest one, which is taken first if it is free.
        let other = ranges[4];
        both(
            &space,
            move |space| {
                on(1);
                space.free(other, 1);
            },
            |space| {
                space.take(1);
                space.take(1);
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_free_while_its_slab_makes_place_for_another_is_not_lost() {
    check(Some(3), || {
        let space = space(4, 1);
        let ranges: Vec<u64> = (0..4).map(|_| space.alloc(1)).collect();
        let first = ranges[0];
        both(
            &space,
            move |space| {
                on(1);
                space.free(first, 1);
            },
            // The current slab has nothing left, or just got that range.
            |space| space.take(1),
        );
        is_whole(&space);
    });
}

#[test]
fn model_an_old_pointer_to_a_slab_gives_no_range_of_another_class() {
    check(Some(3), || {
        let space = space(4, 0);
        let first = space.alloc(1);
        both(
            &space,
            // On the same CPU: it holds a pointer to the slab that is about to be reused.
            |space| space.take(1),
            move |space| {
                space.free(first, 1);
                space.slabs.drain();
                on(1);
                let wide = space.alloc(2);
                assert_eq!(wide % 8192, 0);
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_what_another_cpu_keeps_is_found_when_nothing_else_is_left() {
    // A range in its current slab, and one in its list.
    for taken in [1, 8] {
        check(Some(2), move || {
            let space = space(4, 1);
            let ranges: Vec<u64> = (0..taken).map(|_| space.alloc(1)).collect();
            let first = ranges[0];
            if taken == 8 {
                space.free(ranges[1], 1);
                space.free(ranges[2], 1);
                space.alloc(4);
            } else {
                space.alloc(4);
                space.alloc(4);
            }
            [32, 16, 4].into_iter().for_each(|rest| space.take(rest));
            both(
                &space,
                |space| {
                    on(1);
                    space.alloc(1);
                },
                move |space| space.free(first, 1),
            );
            is_whole(&space);
        });
    }
}

#[test]
fn model_a_cpu_that_others_take_from_gives_no_range_of_another_class() {
    check(Some(3), || {
        let space = space(4, 0);
        let first = space.alloc(1);
        // Left are the other three ranges of CPU 0's slab, and two pages.
        [32, 16, 4, 4, 2].into_iter().for_each(|rest| space.take(rest));
        both(
            &space,
            |space| {
                on(1);
                // There may be none free at this moment.
                let _ = space.slabs.alloc(&Request::new(4096).flush(false)).map(|iova| {
                    space.slabs.free(iova, 4096).expect("it is allocated");
                });
            },
            move |space| {
                space.free(first, 1);
                space.slabs.drain();
                space.take(2);
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_free_on_an_offline_cpu_leaves_a_slab_to_its_owner() {
    check(Some(3), || {
        let space = space(4, 1);
        let ranges: Vec<u64> = (0..5).map(|_| space.alloc(1)).collect();
        let (first, second) = (ranges[0], ranges[1]);
        space.slabs.offline(0);
        both(
            &space,
            move |space| {
                on(1);
                space.free(first, 1);
            },
            move |space| space.free(second, 1),
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_slab_that_is_given_back_is_not_taken_from() {
    check(Some(3), || {
        let space = space(4, 0);
        // The first slab is in the list, with all but one range free; the current one is exhausted.
        let ranges: Vec<u64> = (0..8).map(|_| space.alloc(1)).collect();
        ranges[..3].iter().for_each(|range| space.free(*range, 1));
        let last = ranges[3];
        both(
            &space,
            // The last free gives the slab back, as none is kept idle,
            move |space| space.free(last, 1),
            // unless this thread takes from it.
            |space| space.take(1),
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_slab_that_others_take_over_is_not_settled_where_it_was() {
    check(Some(2), || {
        let space = space(4, 1);
        let ranges: Vec<u64> = (0..8).map(|_| space.alloc(1)).collect();
        ranges[..2].iter().for_each(|range| space.free(*range, 1));
        // Only those are left.
        [32, 16, 4, 4].into_iter().for_each(|rest| space.take(rest));
        let (third, last) = (ranges[2], ranges[3]);
        both(
            &space,
            // CPU 1 takes the slab over, and frees what it took.
            |space| {
                on(1);
                let iova = space.alloc(1);
                space.free(iova, 1);
            },
            move |space| {
                space.free(third, 1);
                space.free(last, 1);
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_cpu_that_goes_offline_keeps_nothing() {
    // rule L9
    for (taken, freed) in [(2, 2), (5, 1), (5, 2)] {
        check(Some(3), move || {
            let space = space(4, 1);
            let ranges: Vec<u64> = (0..taken).map(|_| space.alloc(1)).collect();
            both(
                &space,
                move |space| ranges[..freed].iter().for_each(|range| space.free(*range, 1)),
                |space| space.slabs.offline(0),
            );
            let core = space.slabs.core.lock();
            let left = GRANULES - (taken - freed as u64);
            assert_eq!(core.tree.free(), left, "an offline CPU keeps granules");
            drop(core);
            is_whole(&space);
        });
    }
}

/// The first of so many short ranges is freed, and another allocated (`again`), while tails are cut off.
fn cut_off(ranges: usize, again: bool) {
    check(Some(3), move || {
        let space = space(16, 1);
        let ranges: Vec<u64> = (0..ranges).map(|_| space.alloc(3)).collect();
        let first = ranges[0];
        both(
            &space,
            move |space| {
                on(1);
                space.free(first, 3);
                if again {
                    space.alloc(3);
                }
            },
            |space| {
                let mut core = space.slabs.core.lock();
                space.slabs.withdraw_all(&mut core);
                space.slabs.trim(&mut core);
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_a_tail_is_cut_off_or_freed_but_not_both() {
    cut_off(1, true);
}

#[test]
fn model_a_range_of_a_full_slab_is_cut_off_or_freed_but_not_both() {
    // All of a slab, and the first of another, so that no CPU has it.
    cut_off(5, false);
}

#[test]
fn model_a_slab_ends_with_the_last_of_its_ranges_that_are_cut_off() {
    check(Some(3), || {
        let space = space(16, 0);
        // The first slab is detached; the second is current, and has nothing but those.
        let whole = [(); 4].map(|()| space.alloc(4))[0];
        let ranges = [(); 4].map(|()| space.alloc(3));
        space.slabs.trim(&mut space.slabs.core.lock());
        ranges[1..].iter().for_each(|range| space.free(*range, 3));
        let last = ranges[0];
        both(
            &space,
            move |space| {
                on(1);
                space.free(last, 3);
            },
            // The first becomes current.
            move |space| space.free(whole, 4),
        );
        is_whole(&space);
    });
}

/// A range is freed twice, while what its slab has is given back: to the tree, so that another class can have
/// it (`all`), or but for a range that is still held.
fn freed_twice(all: bool) {
    check(Some(3), move || {
        let space = space(4, 0);
        let range = space.slabs.alloc(&Request::new(4096)).expect("room");
        let held = (!all).then(|| space.alloc(1));
        let theirs = Arc::clone(&space);
        let thread = thread::spawn(move || {
            on(1);
            theirs.slabs.free(range, 4096).is_ok()
        });
        let mine = space.slabs.free(range, 4096).is_ok();
        if mine {
            space.slabs.drain();
            let mut core = space.slabs.core.lock();
            space.slabs.withdraw_all(&mut core);
            drop(core);
            space.alloc(2);
        }
        assert!(mine ^ thread.join().expect("the other thread"), "freed twice, or not at all");
        held.into_iter().for_each(|held| space.free(held, 1));
        is_whole(&space);
    });
}

#[test]
fn model_a_second_free_is_refused_while_its_slab_becomes_another() {
    freed_twice(true);
}

#[test]
fn model_a_second_free_is_refused_while_its_slab_keeps_other_ranges() {
    freed_twice(false);
}

/// A thread frees a range with the size of its class, which is wrong, while the range's tail is cut off: the tail
/// must not return to the slab.
#[test]
fn model_a_free_of_the_wrong_size_is_refused_while_the_tail_is_cut_off() {
    check(None, || {
        const CLASS: u32 = 2;
        let key = Key::of(32, CLASS);
        let slab = Arc::new(Slab::none());
        slab.set_up(key);
        // Another range is free, so that the slab is attached and a free is one exchange.
        slab.own(1 << 0 | 1 << 1);
        slab.add_free_as_current(1 << 1);
        slab.note_missing(0, 1);
        let theirs = Arc::clone(&slab);
        let wrong = thread::spawn(move || theirs.give::<true>(key, 0, &mut 0));
        let free = slab.freeze();
        slab.cut_tails(free, |first, size, tail| assert_eq!((first, size, tail), (32, 3, 1)));
        slab.thaw(free);
        assert_eq!(wrong.join().expect("it does not panic"), Freed::Unclear);
        assert_eq!(slab.free() & !slab.owned(), 0, "a range that is not the slab's is free");
    });
}

#[test]
fn model_a_loose_slab_is_taken_once_or_given_back() {
    // On the CPU that remembers it, and on another, where it is attached.
    for (cpu, loose) in [(0, false), (0, true), (1, true)] {
        check(Some(3), move || {
            let space = space(4, 1);
            // The first slab is detached, the second current and exhausted.
            let ranges: Vec<u64> = (0..8).map(|_| space.alloc(1)).collect();
            if loose {
                space.free(ranges[0], 1);
            }
            let second = ranges[1];
            both(
                &space,
                move |space| {
                    on(cpu);
                    space.free(second, 1);
                    space.take(1);
                },
                |space| {
                    space.take(1);
                    space.slabs.drain();
                },
            );
            is_whole(&space);
        });
    }
}

#[test]
fn model_what_is_loose_is_found_even_if_it_is_attached_at_that_moment() {
    check(Some(3), || {
        let space = space(4, 1);
        let ranges: Vec<u64> = (0..8).map(|_| space.alloc(1)).collect();
        [32, 16, 8].into_iter().for_each(|rest| space.take(rest));
        space.free(ranges[0], 1);
        let second = ranges[1];
        both(
            &space,
            move |space| {
                on(1);
                space.free(second, 1);
            },
            // From a CPU that remembers nothing.
            |space| {
                let mut core = space.slabs.core.lock();
                space.slabs.withdraw_all(&mut core);
                assert!(core.tree.free() > 0, "what was free before is not found");
            },
        );
        is_whole(&space);
    });
}

#[test]
fn model_what_is_loose_is_found_when_nothing_else_is_left() {
    check(Some(3), || {
        let space = space(4, 1);
        let ranges: Vec<u64> = (0..8).map(|_| space.alloc(1)).collect();
        [32, 16, 8].into_iter().for_each(|rest| space.take(rest));
        let first = ranges[0];
        both(
            &space,
            move |space| space.free(first, 1),
            |space| {
                on(1);
                // It may not be free yet.
                let _ = space.slabs.alloc(&Request::new(4096)).map(|iova| {
                    space.used(iova, 1);
                    space.slabs.free(iova, 4096).expect("it is allocated");
                });
            },
        );
        is_whole(&space);
    });
}

/// A range of a loose slab is taken and another freed, so that the slab is loose again, while its ranges are taken back;
/// a third thread frees the second range too, which is wrong.
#[test]
fn model_a_second_free_is_refused_while_a_loose_slab_is_given_back() {
    check(Some(4), || {
        let key = Key::of(32, 0);
        let slab = Arc::new(Slab::none());
        slab.set_up(key);
        slab.own(0b11);
        assert!(slab.give_loose(key, 0));
        let [taken_back, theirs] = [(); 2].map(|()| Arc::clone(&slab));
        let core = thread::spawn(move || {
            let free = taken_back.freeze_loose();
            if let Some(free) = free {
                taken_back.disown(free);
                taken_back.thaw_detached();
            }
            free.unwrap_or(0)
        });
        let wrong = thread::spawn(move || theirs.give_loose(key, 1));
        let taken = slab.take_loose();
        let right = slab.give_loose(key, 1);
        let frees = [right, wrong.join().expect("it does not panic")];
        let back = core.join().expect("it does not panic");
        assert_eq!(slab.free() & !slab.owned(), 0, "a range that is not the slab's is free");
        assert_eq!(slab.free() & back, 0, "a range is in two places");
        assert!(frees != [true; 2] || taken.is_some(), "freed twice");
    });
}
