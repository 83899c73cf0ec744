use alloc::{sync::Arc, vec, vec::Vec};
use core::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::{node::Node, *};

const RW: Prot = Prot::RW;
const GIB: u64 = 1 << 30;

fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).unwrap()
}

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

fn table() -> Table {
    Table::new(Limits::NONE)
}

fn table_of(nodes: u64) -> Table {
    Table::new(Limits { table_bytes: nodes * Node::BYTES, ..Limits::NONE })
}

/// Unmaps, in a test without readers.
fn unmap(table: &Table, range: Range) -> Result<u128> {
    let mut pages = PageList::default();
    let result = table.unmap(range, &mut pages);
    // SAFETY: there are no lookups.
    unsafe { pages.reclaim() };
    result
}

fn free_deferred(table: &Table) {
    // SAFETY: there are no lookups.
    unsafe { table.take_deferred().reclaim() };
}

fn ranges(table: &Table) -> Vec<Range> {
    table.iter().map(|mapping| mapping.range).collect()
}

fn split(range: Range, at: u64) -> Result<u128> {
    Err(Error::WouldSplit { range, at: Iova(at) })
}

#[test]
fn the_seven_unmap_examples_of_the_virtio_specification() {
    // rules L38, V22, V23, V40, L65
    // (what is mapped, what is unmapped, what that gives, what is left)
    type Example<'a> = (&'a [(u64, u64)], (u64, u64), Result<u128>, &'a [(u64, u64)]);
    for unit in [1u64, 4096, 2 << 20] {
        let scaled = |&(a, b): &(u64, u64)| range(a * unit, b * unit + unit - 1);
        let bytes = |n: u128| Ok(n * u128::from(unit));
        let examples: [Example<'_>; 7] = [
            (&[], (0, 4), Ok(0), &[]),
            (&[(0, 9)], (0, 9), bytes(10), &[]),
            (&[(0, 4), (5, 9)], (0, 9), bytes(10), &[]),
            (&[(0, 9)], (0, 4), split(scaled(&(0, 4)), 5 * unit - 1), &[(0, 9)]),
            (&[(0, 4), (5, 9)], (0, 4), bytes(5), &[(5, 9)]),
            (&[(0, 4)], (0, 9), bytes(5), &[]),
            (&[(0, 4), (10, 14)], (0, 14), bytes(10), &[]),
        ];
        for (mapped, unmapped, result, left) in examples {
            let table = table();
            for mapping in mapped {
                let range = scaled(mapping);
                // Equal differences: only the boundaries separate the mappings.
                table.map(range, range.first().0, RW).unwrap();
            }
            assert_eq!(unmap(&table, scaled(&unmapped)), result, "{mapped:?} - {unmapped:?}");
            assert_eq!(ranges(&table), left.iter().map(scaled).collect::<Vec<_>>());
        }
    }
}

#[test]
fn an_unmap_that_would_split_removes_nothing() {
    // rules V22, L65
    let table = table();
    for at in [0u64, 0x10_0000, 0x40_0000] {
        table.map(range(at, at + 0x8_0fff), at, RW).unwrap();
    }
    let before = ranges(&table);
    for (first, last, at) in [
        (0x1000, 0x50_0000, 0x1000),
        (0, 0x44_0fff, 0x44_0fff),
        (0x8_0000, 0x17_ffff, 0x8_0000),
        (0x800, 0x17ff, 0x800),
    ] {
        assert_eq!(unmap(&table, range(first, last)), split(range(first, last), at));
        assert_eq!(ranges(&table), before);
    }
}

#[test]
fn the_whole_space_is_one_entry_and_costs_nothing() {
    let table = table();
    table.map(Range::ALL, 0, RW).unwrap();
    assert_eq!(table.table_bytes(), 0);
    for at in [0, 1, 1 << 40, u64::MAX] {
        let found = table.lookup(Iova(at)).unwrap();
        assert_eq!((found.range, found.target(Iova(at))), (Range::ALL, at));
    }
    let top = range(u64::MAX, u64::MAX);
    assert_eq!(table.map(top, 0, RW), Err(Error::Exists { range: top, at: Iova(u64::MAX) }));
    assert_eq!(unmap(&table, Range::ALL), Ok(1 << 64));
    assert_eq!(table.lookup(Iova(0)), None);
}

#[test]
fn a_range_is_cut_into_the_largest_slots_and_targets_need_no_alignment() {
    let table = table();
    // One slot of a level-2 node, although the target is aligned to a page only.
    table.map(range(GIB, 2 * GIB - 1), 0x1234_5000, RW).unwrap();
    assert_eq!(table.table_bytes(), Node::BYTES);
    let found = table.lookup(Iova(GIB + 0x1234)).unwrap();
    assert_eq!(found.range, range(GIB, 2 * GIB - 1));
    assert_eq!(found.target(Iova(GIB + 0x1234)), 0x1234_6234);
}

#[test]
fn a_lone_page_costs_one_node_wherever_it_lies() {
    let table = table();
    for (n, at) in [0, 1 << 30, 1 << 47, u64::MAX >> 12].into_iter().enumerate() {
        table.map(page(at & u64::MAX >> 12), 0, RW).unwrap();
        // One for the page, and at most one where the path to it branches off the others.
        assert!(table.table_bytes() <= (2 * n as u64 + 1) * Node::BYTES, "{n}");
    }
}

#[test]
fn byte_exact_ranges_share_a_page() {
    let table = table();
    table.map(range(0x1001, 0x1001), 0x9999, Prot::READ).unwrap();
    table.map(range(0x1003, 0x2ffe), 0x7, RW).unwrap();
    table.map(range(0x1000, 0x1000), 0x1000, RW).unwrap();
    assert_eq!(table.lookup(Iova(0x1002)), None);
    assert_eq!(table.lookup(Iova(0x2fff)), None);
    assert_eq!(table.lookup(Iova(0x1001)).unwrap().target(Iova(0x1001)), 0x9999);
    assert_eq!(table.lookup(Iova(0x2abc)).unwrap().target(Iova(0x2abc)), 0x2abc - 0x1003 + 7);
    // One mapping, although its second half is a block that its pages share.
    assert_eq!(table.lookup(Iova(0x2abc)).unwrap().range, range(0x1003, 0x2ffe));
    assert_eq!(table.mappings(), 3);
    assert_eq!(unmap(&table, range(0x1002, 0x2ffe)), Ok(0x1ffc));
    assert_eq!(ranges(&table), [range(0x1000, 0x1000), range(0x1001, 0x1001)]);
}

#[test]
fn a_map_that_fails_changes_nothing() {
    // rules L31, L36
    let table = table_of(3);
    table.map(page(5), 0, RW).unwrap();
    let wide = range(0x1000, GIB - 1);
    let bytes = table.table_bytes();
    assert_eq!(table.map(wide, 0, RW), Err(Error::Exists { range: wide, at: Iova(0x5000) }));
    assert_eq!(table.map(page(6), 0, Prot::MMIO), Err(Error::NoPermission(page(6))));
    assert_eq!(table.map(page(6), 0, Prot::empty()), Err(Error::NoPermission(page(6))));
    let top = u64::MAX - 0xffe;
    assert_eq!(table.map(page(6), top, RW), Err(Error::TargetOverflow(page(6))));
    assert_eq!(table.map(page(6), top - 1, RW), Ok(()));
    let far = range(0x7000, 1 << 50);
    let full = Error::Full { what: "table bytes", used: bytes, limit: 3 * Node::BYTES };
    assert_eq!(table.map(far, 0, RW), Err(full));
    assert_eq!((table.table_bytes(), table.retired_bytes()), (bytes, 0));
    assert_eq!(ranges(&table), [page(5), page(6)]);
}

#[test]
fn mappings_are_limited() {
    let table = Table::new(Limits { mappings: 2, ..Limits::NONE });
    table.map(page(0), 0, RW).unwrap();
    table.map(page(1), 0, RW).unwrap();
    let full = Error::Full { what: "mappings", used: 2, limit: 2 };
    assert_eq!(table.map(page(2), 0, RW), Err(full));
    // An existing mapping is reported first.
    assert!(matches!(table.map(page(1), 0, RW), Err(Error::Exists { .. })));
    unmap(&table, page(0)).unwrap();
    table.map(page(2), 0, RW).unwrap();
}

#[test]
fn a_node_is_reclaimed_only_by_an_unmap_that_covers_it() {
    // rule L41
    let table = table();
    for n in 0..512 {
        table.map(page(n), n << 13, RW).unwrap();
    }
    let mut pages = PageList::default();
    for n in 0..512 {
        table.unmap(page(n), &mut pages).unwrap();
    }
    assert!(pages.is_empty());
    assert_eq!(table.table_bytes(), Node::BYTES);
    table.map(page(3), 0, RW).unwrap();
    assert_eq!(table.table_bytes(), Node::BYTES, "the empty node was used again");
    assert_eq!(table.unmap(range(0, (2 << 20) - 1), &mut pages), Ok(4096));
    assert_eq!(pages.bytes(), Node::BYTES);
    // rule L40
    assert_eq!(table.table_bytes(), Node::BYTES, "it counts until it is freed");
    // SAFETY: there are no lookups.
    unsafe { pages.reclaim() };
    assert_eq!(table.table_bytes(), 0);
}

#[test]
fn emptied_nodes_give_way_when_the_limit_is_reached() {
    let table = table_of(6);
    // Each pair leaves an empty node, and the nodes where the paths to them branch.
    let lone = |n: u64| page(n << 20);
    let mut full = 0;
    for n in 0..1000 {
        if table.map(lone(n), 0, RW).is_err() {
            full += 1;
            assert!(table.retired_bytes() > 0, "there was something to give way");
            free_deferred(&table);
            table.map(lone(n), 0, RW).unwrap();
        }
        assert!(table.table_bytes() <= 6 * Node::BYTES);
        unmap(&table, lone(n)).unwrap();
    }
    assert!(full > 0);
    table.scavenge();
    free_deferred(&table);
    assert_eq!(table.table_bytes(), 0);
}

#[test]
fn scavenging_leaves_no_chain_of_single_children() {
    let table = table();
    let far = [0, 1, 1 << 9, 1 << 18, 1 << 27, 1 << 36, 1 << 45];
    for n in far {
        table.map(page(n), 0, RW).unwrap();
    }
    for n in &far[1..6] {
        unmap(&table, page(*n)).unwrap();
    }
    table.scavenge();
    free_deferred(&table);
    assert_eq!(table.table_bytes(), 3 * Node::BYTES, "two pages, and where they part");
    assert_eq!(ranges(&table), [page(0), page(1 << 45)]);
}

#[test]
fn unmapping_everything_costs_what_is_there_not_what_could_be() {
    let table = table();
    for n in 0..64u64 {
        table.map(page(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12), 0, RW).unwrap();
    }
    assert_eq!(unmap(&table, Range::ALL), Ok(64 * 4096));
    assert_eq!((table.mappings(), table.table_bytes()), (0, 0));
}

#[test]
fn a_dropped_page_list_is_deferred_and_not_freed() {
    // rule L40
    let (table, other) = (table(), table());
    let mut pages = PageList::default();
    for table in [&table, &other] {
        table.map(range(0x800, 0xfff), 0, RW).unwrap();
        table.unmap(Range::ALL, &mut pages).unwrap();
    }
    // A list holds the pages of one table: those of the other are deferred in it.
    assert_eq!(pages.bytes(), table.retired_bytes());
    assert_eq!(other.take_deferred().bytes(), other.retired_bytes());
    drop(pages);
    assert!(table.retired_bytes() > 0);
    let pages = table.take_deferred();
    assert_eq!(pages.bytes(), table.table_bytes());
    let ledger = Arc::clone(&table.ledger);
    drop(table);
    assert_eq!(ledger.used(), pages.bytes(), "pages may outlive their table");
    // SAFETY: there are no lookups.
    unsafe { pages.reclaim() };
    assert_eq!(ledger.used(), 0);
}

#[test]
fn dropping_a_table_frees_all_of_it() {
    let table = table();
    table.map(range(0x1234, 1 << 40), 0x77, RW).unwrap();
    table.map(page(1 << 40), 0, RW).unwrap();
    unmap(&table, page(1 << 40)).unwrap();
    table.scavenge();
    let ledger = Arc::clone(&table.ledger);
    assert!(ledger.used() > 0 && ledger.retired() > 0);
    drop(table);
    assert_eq!((ledger.used(), ledger.retired()), (0, 0));
}

#[test]
fn runs_merge_what_leads_on_and_stop_at_what_does_not() {
    let table = table();
    for n in 0..8 {
        let away = if n < 6 { 0x10_0000 } else { 0x20_0000 };
        let prot = if n == 0 { Prot::READ } else { RW };
        table.map(page(n), (n << 12) + away, prot).unwrap();
    }
    let run = |within| table.lookup_run(Iova(0x2345), within).unwrap().range;
    assert_eq!(run(Range::ALL), range(0x1000, 0x5fff));
    assert_eq!(run(range(0x2345, 0x2345)), page(2));
    assert_eq!(run(range(0x2345, 0x3000)), range(0x2000, 0x3fff));
}

#[test]
fn mappings_come_in_order_with_their_targets() {
    let table = table();
    let made = vec![
        Mapping { range: range(0x10, 0x1f), target: 5, prot: RW },
        Mapping { range: range(0x20, 0x5_4fff), target: 0x1020, prot: Prot::READ },
        Mapping { range: range(GIB, 3 * GIB - 1), target: 0x1000, prot: RW },
        Mapping { range: range(u64::MAX - 4, u64::MAX), target: 0, prot: Prot::WRITE },
    ];
    for mapping in made.iter().rev() {
        table.map(mapping.range, mapping.target, mapping.prot).unwrap();
    }
    assert_eq!(table.iter().collect::<Vec<_>>(), made);
    assert_eq!(table.mapping_from(Iova(0x3000)), Some(made[1]));
    assert_eq!(table.mapping(Iova(0x3000)), Some(made[1]));
    assert_eq!(table.mapping_from(Iova(3 * GIB)), Some(made[3]));
}

#[test]
fn a_reader_sees_a_mapping_that_was_made_or_none() {
    // Every mapping ever made at `iova` leads to `iova + 1 TiB` or, where pages are split into
    // bytes, to `iova + 2 TiB + 1`; the permissions show which. Nodes are linked above and beside
    // the reader, replaced by leaves, unlinked and, after a grace period, freed.
    let table = table();
    let stop = AtomicBool::new(false);
    let qsbr = Arc::new(ringfence_sync::qsbr::Qsbr::new(2));
    let check = |iova: u64| match table.lookup(Iova(iova)) {
        None => false,
        Some(found) => {
            let (away, prot) = (found.target(Iova(iova)) - iova, found.prot);
            assert!(found.range.contains(Iova(iova)));
            assert!((away, prot) == (1 << 40, RW) || (away, prot) == ((2 << 40) + 1, Prot::READ));
            true
        }
    };
    thread::scope(|scope| {
        for seed in 1..3u64 {
            let mut reader = qsbr.register().unwrap();
            let (check, stop) = (&check, &stop);
            scope.spawn(move || {
                let mut x = seed;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed);
                        check((x >> 33) % (8 << 20) + if x & 1 == 0 { 0 } else { 1 << 41 });
                    }
                    reader.quiescent_with(|| ());
                }
            });
        }
        let mut x = 7u64;
        for _ in 0..1000 {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let at = (x >> 33) % (8 << 20) + if x & 1 == 0 { 0 } else { 1 << 41 };
            let (first, extent, away, prot) = match x >> 61 {
                0 => (at & !0x1f_ffff, 0x1f_ffff, 1 << 40, RW),
                1..4 => (at, x >> 50 & 0x1fff, (2 << 40) + 1, Prot::READ),
                _ => (at & !0xfff, 0xfff + (x >> 40 & 0x7000), 1 << 40, RW),
            };
            let range = range(first, first + extent);
            let mut pages = PageList::default();
            if let Err(Error::Exists { at, .. }) = table.map(range, first + away, prot) {
                let there = table.mapping(at).unwrap().range;
                table.unmap(there, &mut pages).unwrap();
            } else {
                assert!(check(first) && check(first + extent));
            }
            if x >> 50 & 0x3f == 0 {
                table.unmap(Range::ALL, &mut pages).unwrap();
            }
            pages.append(table.take_deferred());
            if !pages.is_empty() {
                let grace = qsbr.start();
                while !qsbr.is_over(grace) {
                    thread::yield_now();
                }
                // SAFETY: the grace period began after the list was filled, and both readers look
                // up only between their quiet points. The writer makes no lookup.
                unsafe { pages.reclaim() };
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    unmap(&table, Range::ALL).unwrap();
    assert_eq!((table.mappings(), table.table_bytes()), (0, 0));
}
