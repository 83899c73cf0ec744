//! What the translation table costs, beside a `BTreeMap` of ranges: nanoseconds a random lookup, a
//! dependent one (its address comes out of the lookup before), and a map and unmap of one page.
//!
//! `cargo run --release -p ringfence-iommu --example lookup`
use std::{collections::BTreeMap, hint::black_box, time::Instant};

use ringfence_iommu::{
    Iova, Prot, Range,
    table::{Limits, PageList, Table},
};

const STEPS: u64 = 2 << 20;

/// The median of nine rounds of steps that begin with `seed`, in nanoseconds a step.
fn time(seed: u64, mut step: impl FnMut(u64) -> u64) -> f64 {
    let mut round = |_| {
        let start = Instant::now();
        black_box((0..STEPS).fold(black_box(seed), |x, _| step(x)));
        start.elapsed().as_nanos() as f64 / STEPS as f64
    };
    let mut times = std::array::from_fn::<f64, 9, _>(&mut round);
    times.sort_by(f64::total_cmp);
    times[4]
}

const BASE: u64 = 0x1_0000_0000;

fn main() {
    println!("{:>8} {:>9} {:>8} {:>10} {:>10}", "entries", "", "random", "dependent", "map+unmap");
    for entries in [64u64, 2048, 65536] {
        let page = |n: u64| Range::from_len(Iova(BASE + (n << 12)), 4096).unwrap();
        // A cycle through all pages: a lookup gives the page to look up next.
        let target = |n: u64| ((n * 5 + 1) % entries) << 12;
        let (table, mut tree) = (Table::new(Limits::NONE), BTreeMap::new());
        for n in 0..entries {
            table.map(page(n), target(n), Prot::RW).unwrap();
            tree.insert(page(n).first().0, (page(n).last().0, target(n), Prot::RW));
        }
        // The work of finding the next address is the same, and small, for all.
        let next = |x: u64| x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let iova = |x: u64| BASE + (x >> 40 & (entries - 1)) * 4096 + 64;
        let in_table = |iova: u64| table.lookup(Iova(iova)).unwrap().target(Iova(iova));
        let in_tree = |iova: u64| {
            let (first, (last, target, _)) = tree.range(..=iova).next_back().unwrap();
            assert!(iova <= *last);
            target + (iova - first)
        };
        let mut pages = PageList::default();
        let churn = time(1, |x| {
            let n = x >> 40 & (entries - 1);
            table.unmap(page(n), &mut pages).unwrap();
            table.map(page(n), target(n), Prot::RW).unwrap();
            next(x)
        });
        let random = time(1, |x| {
            black_box(in_table(iova(x)));
            next(x)
        });
        let dependent = time(64, |x| in_table(BASE + x));
        println!("{entries:>8} {:>9} {random:>8.2} {dependent:>10.2} {churn:>10.1}", "Table");
        let churn = time(1, |x| {
            let n = x >> 40 & (entries - 1);
            tree.remove(&page(n).first().0).unwrap();
            tree.insert(page(n).first().0, (page(n).last().0, target(n), Prot::RW));
            next(x)
        });
        let random = time(1, |x| {
            black_box(in_tree(iova(x)));
            next(x)
        });
        let dependent = time(64, |x| in_tree(BASE + x));
        println!("{:>8} {:>9} {random:>8.2} {dependent:>10.2} {churn:>10.1}", "", "BTreeMap");
    }
}
