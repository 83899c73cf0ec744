//! What the translation table costs, beside a `BTreeMap` of ranges: nanoseconds a random lookup, a
//! dependent one (its address comes out of the lookup before), and an unmap and map of one page.
//!
//! `cargo run --release -p ringfence-iommu --example lookup`
use std::{collections::BTreeMap, hint::black_box, time::Instant};

use ringfence_iommu::table::{Limits, PageList, Table};
use ringfence_iommu::{Iova, Prot, Range};

const BASE: u64 = 0x1_0000_0000;
const STEPS: u64 = 1 << 20;

/// Nanoseconds a step, starting with `seed`, in the best of 15 rounds: other work only adds.
fn time(seed: u64, mut step: impl FnMut(u64) -> u64) -> f64 {
    let mut round = |_| {
        let start = Instant::now();
        black_box((0..STEPS).fold(black_box(seed), |x, _| step(x)));
        start.elapsed().as_nanos() as f64 / STEPS as f64
    };
    (0..15).map(&mut round).fold(f64::MAX, f64::min)
}

/// Prints a row, given how to look up an address and how to renew page `n`.
fn row(name: &str, entries: u64, look: impl Fn(u64) -> u64, mut renew: impl FnMut(u64)) {
    let next = |x: u64| x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    let page = |x: u64| (x >> 40) & (entries - 1);
    let random = time(1, |x| (next(x), black_box(look(BASE + page(x) * 4096 + 64))).0);
    let dependent = time(64, |x| look(BASE + x));
    let churn = time(1, |x| (next(x), renew(page(x))).0);
    println!("{entries:>8} {name:>9} {random:>8.2} {dependent:>10.2} {churn:>10.1}");
}

fn main() {
    println!("{:>8} {:>9} {:>8} {:>10} {:>10}", "entries", "", "random", "dependent", "unmap+map");
    for entries in [64u64, 2048, 65536] {
        // Targets make a cycle through all pages: a lookup gives the page to look up next.
        let target = |n: u64| ((n * 5 + 1) % entries) << 12;
        let page = |n: u64| Range::from_len(Iova(BASE + (n << 12)), 4096).unwrap();
        let (table, mut tree) = (Table::new(Limits::NONE), BTreeMap::new());
        for n in 0..entries {
            table.map(page(n), target(n), Prot::RW).unwrap();
            tree.insert(page(n).first().0, (page(n).last().0, target(n), Prot::RW));
        }
        let (frozen, mut pages) = (tree.clone(), PageList::default());
        let in_table = |iova| table.lookup(Iova(iova)).unwrap().target(Iova(iova));
        row("Table", entries, in_table, |n| {
            table.unmap(page(n), &mut pages).unwrap();
            table.map(page(n), target(n), Prot::RW).unwrap();
        });
        let in_tree = |iova: u64| {
            let (first, (last, target, _)) = frozen.range(..=iova).next_back().unwrap();
            if iova <= *last { target + (iova - first) } else { unreachable!() }
        };
        row("BTreeMap", entries, in_tree, |n| {
            let mapping = tree.remove(&page(n).first().0).unwrap();
            tree.insert(page(n).first().0, mapping);
        });
    }
}
