//! The translation table and its domain.

use std::{hint::black_box, sync::Arc};

use gungraun::prelude::*;
use ringfence_iommu::{
    Domain, Gather, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, SoftDomain,
    shootdown::{Reader, Shootdown},
    table::Limits,
};

use crate::fixed::mix;

/// Pages that are mapped, in no order.
const PAGES: u64 = 4096;
/// How many of them are looked up, or unmapped and mapped again.
const STEPS: usize = 64;
const BASE: u64 = 1 << 32;

fn page(n: u64) -> Range {
    Range::from_len(Iova(BASE + (n << 12)), 4096).expect("far below the end")
}

fn target(n: u64) -> GuestPhys {
    GuestPhys((mix(n) % PAGES) << 12)
}

pub(crate) struct Rig {
    domain: Arc<SoftDomain<GuestPhys>>,
    reader: Reader,
    gather: Gather,
    pages: Vec<u64>,
    found: Vec<u64>,
}

fn rig() -> Box<Rig> {
    let sizes = PageSizes::from_granule(4096).expect("a power of two");
    let shootdown = Shootdown::new(1);
    let reader = shootdown.reader().expect("the first");
    let domain = SoftDomain::new(Geometry::new(sizes, Range::ALL), Limits::NONE, shootdown);
    for n in 0..PAGES {
        domain.map(Map::new(page(n), target(n), Prot::RW)).expect("nothing is there");
    }
    let pages = (0..STEPS as u64).map(|n| mix(n) % PAGES).collect();
    let found = Vec::with_capacity(STEPS);
    let mut rig = Box::new(Rig { domain, reader, gather: Gather::new(), pages, found });
    // What grows at a quiet point has grown from now on.
    rig.renew();
    rig
}

impl Rig {
    fn renew(&mut self) {
        for &n in &self.pages {
            self.domain.unmap(page(n), &mut self.gather).expect("whole pages");
            let token = self.domain.sync_begin(self.gather.work()).expect("it never fails");
            self.reader.poll(|invalidation| _ = black_box(invalidation));
            let failed = &mut |range, error| panic!("{range}: {error}");
            let over = self.domain.sync_poll(token, self.gather.work(), failed);
            assert!(over, "the only reader has passed a quiet point");
            self.gather.clear_ranges();
            self.domain.map(Map::new(page(n), target(n), Prot::RW)).expect("nothing is there");
        }
    }
}

fn check_found(rig: Box<Rig>) {
    let expected: Vec<u64> = rig.pages.iter().map(|&n| target(n).0 + 0x123).collect();
    assert_eq!(rig.found, expected);
}

fn check_renewed(rig: Box<Rig>) {
    assert_eq!(rig.domain.mappings(), PAGES);
    assert_eq!(rig.domain.shootdown().logged(), 2 * STEPS as u64);
    for n in 0..PAGES {
        assert_eq!(rig.domain.iova_to_phys(page(n).first()), Some(target(n)));
    }
}

#[library_benchmark]
#[bench::random(setup = rig, teardown = check_found)]
fn lookup(mut rig: Box<Rig>) -> Box<Rig> {
    for &n in &rig.pages {
        let iova = Iova(page(black_box(n)).first().0 + 0x123);
        let found = rig.domain.translate(&rig.reader, iova).map_or(u64::MAX, |at| at.target(iova));
        rig.found.push(found);
    }
    rig
}

#[library_benchmark]
#[bench::page(setup = rig, teardown = check_renewed)]
fn unmap_and_map(mut rig: Box<Rig>) -> Box<Rig> {
    rig.renew();
    rig
}

library_benchmark_group!(name = table, benchmarks = [lookup, unmap_and_map]);
