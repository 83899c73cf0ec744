//! IOVA allocation.

use gungraun::prelude::*;
use ringfence_iova::{Allocator, Aperture, Request, Slabs};
use ringfence_sync::cpu::FixedCpu;

use crate::fixed::{cpus, mix};

/// How many ranges are allocated, and then freed.
const RANGES: usize = 64;

pub(crate) struct Space {
    slabs: Slabs<FixedCpu>,
    size: u64,
    taken: Vec<u64>,
}

impl Space {
    fn take_and_free(&mut self) {
        let request = Request::new(self.size);
        for _ in 0..RANGES {
            self.taken.push(self.slabs.alloc(&request).expect("there is room"));
        }
        for &iova in &self.taken {
            self.slabs.free(iova, self.size).expect("it was taken");
        }
    }
}

/// A space without allocations.
fn fresh(size: u64) -> Box<Space> {
    let aperture = Aperture::new(0, (1 << 48) - 1, 4096).expect("48 bits of pages");
    Box::new(Space { slabs: Slabs::new(aperture, cpus()), size, taken: Vec::with_capacity(RANGES) })
}

/// A space with its slabs allocated.
fn used(size: u64) -> Box<Space> {
    let mut space = fresh(size);
    space.take_and_free();
    space.taken.clear();
    space
}

fn check(space: Box<Space>) {
    let Space { slabs, size, mut taken } = *space;
    assert_eq!(taken.len(), RANGES);
    taken.sort_unstable();
    assert!(taken.windows(2).all(|pair| pair[0] + size <= pair[1]), "ranges overlap");
    // Each was freed: a second free is refused.
    assert!(taken.iter().all(|&iova| slabs.free(iova, size).is_err()));
}

#[library_benchmark]
#[bench::page(args = (4096), setup = used, teardown = check)]
#[bench::page_first(args = (4096), setup = fresh, teardown = check)]
#[bench::run_64k(args = (64 << 10), setup = used, teardown = check)]
fn alloc_and_free(mut space: Box<Space>) -> Box<Space> {
    space.take_and_free();
    space
}

/// How many ranges are live, beyond what lies in one slab or two.
const LIVE: usize = 4096;

/// A space of live ranges; one in random order is freed, another allocated.
fn live(size: u64) -> Box<Space> {
    let mut space = fresh(size);
    let request = Request::new(size);
    space.taken = (0..LIVE).map(|_| space.slabs.alloc(&request).expect("there is room")).collect();
    for n in 0..LIVE {
        space.free_and_take(mix(n as u64));
    }
    space
}

impl Space {
    fn free_and_take(&mut self, random: u64) {
        let place = random as usize % LIVE;
        self.slabs.free(self.taken[place], self.size).expect("it was taken");
        self.taken[place] = self.slabs.alloc(&Request::new(self.size)).expect("there is room");
    }
}

fn check_live(space: Box<Space>) {
    let Space { slabs, size, mut taken } = *space;
    taken.sort_unstable();
    assert!(taken.windows(2).all(|pair| pair[0] + size <= pair[1]), "ranges overlap");
    assert!(taken.iter().all(|&iova| slabs.free(iova, size).is_ok()));
}

#[library_benchmark]
#[bench::page(args = (4096), setup = live, teardown = check_live)]
fn free_at_random(mut space: Box<Space>) -> Box<Space> {
    (0..RANGES as u64).for_each(|n| space.free_and_take(mix(n << 32)));
    space
}

library_benchmark_group!(name = iova, benchmarks = [alloc_and_free, free_at_random]);
