//! A device's IOTLB, and a worker's view of it.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use gungraun::prelude::*;
use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink, View};
use ringfence_mem::{Access, AccessError, GuestRam, Memory, Translate};

use crate::fixed::mix;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
/// Pages of memory.
const PAGES: u64 = 2048;
const GPA: u64 = 1 << 32;
/// Where IOVAs begin.
const BASE: u64 = 1 << 40;
/// Lookups, updates and invalidations that are counted.
const STEPS: u64 = 64;

/// How IOVAs map to memory.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    /// All pages are contiguous.
    Run,
    /// The pages of each 2 MiB are contiguous, and no two blocks of 2 MiB are.
    Blocks,
    /// No page is contiguous with the one before.
    Scattered,
}

impl Layout {
    fn iova(self, page: u64) -> u64 {
        match self {
            Layout::Run | Layout::Scattered => BASE + page * PAGE,
            // As many pages as each block has, in every other block.
            Layout::Blocks => BASE + page / 64 * 2 * BLOCK + page % 64 * PAGE,
        }
    }

    fn target(self, page: u64) -> u64 {
        GPA + match self {
            Layout::Run | Layout::Blocks => page * PAGE,
            // An odd factor: each page once.
            Layout::Scattered => page * 389 % PAGES * PAGE,
        }
    }
}

/// Counts misses.
#[derive(Default)]
struct Misses(AtomicUsize);

impl MissSink for Misses {
    fn send(&self, misses: &[Miss]) -> usize {
        self.0.fetch_add(misses.len(), Ordering::Relaxed);
        misses.len()
    }
}

pub(crate) struct Rig {
    iotlb: Arc<Iotlb>,
    view: View,
    misses: Arc<Misses>,
    layout: Layout,
    /// Pages that are looked up.
    pages: Vec<u64>,
    /// Where they were found.
    found: Vec<u64>,
    /// Lookups that the view's caches and the table had served when the counted part began.
    before: (u64, u64),
}

impl Rig {
    /// An IOTLB without entries.
    fn new(layout: Layout) -> Box<Rig> {
        let ram = GuestRam::new((PAGES * PAGE) as usize, GPA).expect("memory");
        let memory = Memory::of_ram(&ram).expect("memory");
        let shootdown = Shootdown::new(1);
        // A miss is sent once, however long it takes.
        let hour = Duration::from_secs(3600);
        let config = IotlbConfig { again: hour, timeout: hour, ..IotlbConfig::default() };
        let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
        let misses = Arc::<Misses>::default();
        iotlb.set_miss_sink(Some(Arc::clone(&misses) as _));
        let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(Arc::clone(&iotlb)));
        let view = View::new(endpoint, memory).expect("the first view");
        let pages = (0..STEPS).map(|n| mix(n) % PAGES).collect();
        let found = Vec::with_capacity(STEPS as usize);
        Box::new(Rig { iotlb, view, misses, layout, pages, found, before: (0, 0) })
    }

    fn update(&self, page: u64) -> u64 {
        let range = Range::from_len(Iova(self.layout.iova(page)), PAGE).expect("far below the end");
        let target = GuestPhys(self.layout.target(page));
        self.iotlb.update(range, target, Prot::RW).expect("there is room")
    }

    fn look_up(&mut self) {
        for &page in &self.pages {
            let addr = self.layout.iova(black_box(page)) + 0x40;
            let mut found = 0;
            let result =
                self.view.slices(addr, 64, Access::Read, |piece| found = piece.as_ptr() as u64);
            if let Err(AccessError::Again { .. }) = result {
                found = u64::MAX;
            }
            self.found.push(found);
        }
    }

    fn counts(&mut self) -> (u64, u64) {
        self.view.quiet();
        let counters = self.view.counters();
        (counters.hits.load(Ordering::Relaxed), counters.misses.load(Ordering::Relaxed))
    }

    /// Whether all lookups found what they should; by the caches and by the table.
    fn check(&mut self) -> (u64, u64) {
        let base = self.view.memory().find_gpa(GPA).expect("memory").slice.as_ptr() as u64;
        let expected = self.pages.iter().map(|&page| base + self.layout.target(page) - GPA + 0x40);
        assert!(self.found.iter().copied().eq(expected), "something else was found");
        let (before, after) = (self.before, self.counts());
        (after.0 - before.0, after.1 - before.1)
    }
}

/// All entries are there, and the view has cached none of them yet.
fn cold(layout: Layout) -> Box<Rig> {
    let mut rig = Rig::new(layout);
    (0..PAGES).for_each(|page| _ = rig.update(page));
    rig.before = rig.counts();
    rig
}

/// All entries are there, and the view has cached them.
fn warm(layout: Layout) -> Box<Rig> {
    let mut rig = cold(layout);
    let mut pages = std::mem::replace(&mut rig.pages, (0..PAGES).collect());
    // The caches grow at quiet points, if they were too small.
    for _ in 0..16 {
        rig.look_up();
        rig.view.quiet();
        rig.found.clear();
    }
    std::mem::swap(&mut rig.pages, &mut pages);
    rig.before = rig.counts();
    rig
}

fn check_hits(mut rig: Box<Rig>) {
    assert_eq!(rig.check(), (STEPS, 0));
}

fn check_table(mut rig: Box<Rig>) {
    let (hits, misses) = rig.check();
    // Few pages are among them twice.
    assert!(hits + misses == STEPS && misses >= STEPS - 4, "{hits} hits");
}

/// No entry is there.
fn empty(layout: Layout) -> Box<Rig> {
    let mut rig = Rig::new(layout);
    rig.pages = (0..STEPS).collect();
    rig
}

fn check_missing(rig: Box<Rig>) {
    assert_eq!(rig.found, [u64::MAX; STEPS as usize]);
    assert_eq!(rig.misses.0.load(Ordering::Relaxed), STEPS as usize);
}

fn check_updated(rig: Box<Rig>) {
    let mut rig = rig;
    assert_eq!(rig.iotlb.entries(), STEPS);
    rig.look_up();
    rig.check();
}

/// Some entries, which the view has cached.
fn few(layout: Layout) -> Box<Rig> {
    let mut rig = empty(layout);
    // Table memory that waits for a quiet point exists from now on.
    for _ in 0..2 {
        (0..STEPS).for_each(|page| _ = rig.update(page));
        rig.look_up();
        rig.found.clear();
        rig.invalidate();
    }
    (0..STEPS).for_each(|page| _ = rig.update(page));
    rig.look_up();
    rig.found.clear();
    rig
}

impl Rig {
    fn invalidate(&mut self) {
        for &page in &self.pages {
            let range =
                Range::from_len(Iova(self.layout.iova(page)), PAGE).expect("far below the end");
            let token = self.iotlb.invalidate(range).expect("the table does not fail");
            self.view.quiet();
            assert!(self.iotlb.shootdown().is_over(token), "the view has passed a quiet point");
        }
    }
}

fn check_invalidated(mut rig: Box<Rig>) {
    assert_eq!(rig.iotlb.entries(), 0);
    rig.look_up();
    assert_eq!(rig.found, [u64::MAX; STEPS as usize]);
}

#[library_benchmark]
#[bench::last_run(args = (Layout::Run), setup = warm, teardown = check_hits)]
#[bench::run_in_2m(args = (Layout::Blocks), setup = warm, teardown = check_hits)]
#[bench::page(args = (Layout::Scattered), setup = warm, teardown = check_hits)]
#[bench::table(args = (Layout::Scattered), setup = cold, teardown = check_table)]
fn lookup(mut rig: Box<Rig>) -> Box<Rig> {
    rig.look_up();
    rig
}

#[library_benchmark]
#[bench::asked(args = (Layout::Scattered), setup = empty, teardown = check_missing)]
fn miss(mut rig: Box<Rig>) -> Box<Rig> {
    rig.look_up();
    rig.view.quiet();
    rig
}

#[library_benchmark]
#[bench::page(args = (Layout::Scattered), setup = empty, teardown = check_updated)]
fn update(rig: Box<Rig>) -> Box<Rig> {
    for &page in &rig.pages {
        black_box(rig.update(page));
    }
    rig
}

#[library_benchmark]
#[bench::page(args = (Layout::Scattered), setup = few, teardown = check_invalidated)]
fn invalidate(mut rig: Box<Rig>) -> Box<Rig> {
    rig.invalidate();
    rig
}

library_benchmark_group!(name = iotlb, benchmarks = [lookup, miss, update, invalidate]);
