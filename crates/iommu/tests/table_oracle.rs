//! The table against the simplest correct model: an ordered map of mappings.
#![cfg(not(loom))]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::BTreeMap,
};

use proptest::{prelude::*, sample::Index};
use ringfence_iommu::{
    Error, Iova, Prot, Range,
    table::{Limits, Mapping, PageList, Table, Translation},
};

/// Counts the nodes that a thread has allocated: they alone are aligned to 128 bytes.
struct Counting;

thread_local! {
    static NODES: Cell<i64> = const { Cell::new(0) };
}

// SAFETY: forwards everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(layout, -1);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn count(layout: Layout, by: i64) {
    if layout.align() == 128 {
        let _ = NODES.try_with(|nodes| nodes.set(nodes.get() + by));
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Mappings by their first address.
#[derive(Default)]
struct Oracle(BTreeMap<u64, Mapping>);

impl Oracle {
    fn overlapping(&self, range: Range) -> impl Iterator<Item = &Mapping> {
        self.0.values().filter(move |mapping| mapping.range.overlaps(range))
    }

    fn map(&mut self, range: Range, target: u64, prot: Prot) -> Result<(), Error> {
        if !prot.intersects(Prot::RW) {
            return Err(Error::NoPermission(range));
        }
        if target.checked_add(range.extent()).is_none() {
            return Err(Error::TargetOverflow(range));
        }
        if let Some(in_the_way) = self.overlapping(range).next() {
            let at = in_the_way.range.first().max(range.first());
            return Err(Error::Exists { range, at });
        }
        self.0.insert(range.first().0, Mapping { range, target, prot });
        Ok(())
    }

    fn unmap(&mut self, range: Range) -> Result<u128, Error> {
        let (first, last) = (range.first(), range.last());
        if self.at(first).is_some_and(|mapping| mapping.range.first() < first) {
            return Err(Error::WouldSplit { range, at: first });
        }
        if self.at(last).is_some_and(|mapping| mapping.range.last() > last) {
            return Err(Error::WouldSplit { range, at: last });
        }
        let gone: Vec<_> = self.overlapping(range).copied().collect();
        Ok(gone.iter().map(|m| self.0.remove(&m.range.first().0).unwrap().range.len()).sum())
    }

    fn at(&self, iova: Iova) -> Option<&Mapping> {
        let (_, mapping) = self.0.range(..=iova.0).next_back()?;
        mapping.range.contains(iova).then_some(mapping)
    }

    /// The longest run around `iova` of one difference and permission.
    fn run(&self, iova: Iova) -> Option<Translation> {
        let like = self.at(iova)?;
        let delta = like.target.wrapping_sub(like.range.first().0);
        let joins = |iova: u64| {
            let other = self.at(Iova(iova))?;
            let same = other.target.wrapping_sub(other.range.first().0) == delta;
            (same && other.prot == like.prot).then_some(other.range)
        };
        let mut range = like.range;
        while let Some(more) = range.last().0.checked_add(1).and_then(joins) {
            range = range.hull(more);
        }
        while let Some(more) = range.first().0.checked_sub(1).and_then(joins) {
            range = range.hull(more);
        }
        Some(Translation { range, delta, prot: like.prot })
    }
}

fn range(first: u64, extent: u64) -> Range {
    Range::new(Iova(first), Iova(first.saturating_add(extent))).unwrap()
}

/// Places where levels meet, and the ends of the space.
const ANCHORS: [u64; 9] = [
    0,
    0x1000,
    (2 << 20) - 0x4000,
    (1 << 30) - 0x4000,
    (512 << 30) - (2 << 20),
    (1 << 47) - 0x2000,
    (1 << 57) - (1 << 30),
    1 << 63,
    u64::MAX - 0x7fff,
];

fn ranges() -> impl Strategy<Value = Range> {
    let anchor = || proptest::sample::select(&ANCHORS[..]);
    prop_oneof![
        6 => (anchor(), 0..24u64, 1..12u64)
            .prop_map(|(a, at, n)| range(a.saturating_add(at << 12) & !0xfff, (n << 12) - 1)),
        4 => (anchor(), 0..0x3000u64, 0..0x2800u64)
            .prop_map(|(a, at, extent)| range(a.saturating_add(at), extent)),
        2 => (anchor(), 0..40u64, 0..8u64).prop_map(|(a, at, extent)| range(a.saturating_add(at), extent)),
        3 => (anchor(), 0..4u64, 1..4u64, 12..58u32, 0..3u64).prop_map(|(a, at, n, bits, more)| {
            let first = (a.saturating_add(at << bits) >> bits) << bits;
            range(first, ((n << bits.min(61)) + (more << 12)) - 1)
        }),
        1 => (anchor(), anchor()).prop_map(|(a, b)| range(a.min(b), a.abs_diff(b))),
        1 => Just(Range::ALL),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Map(Range, u64, Prot),
    /// Identity, shifted by whole pages or by some bytes: the former merges, the latter needs
    /// blocks.
    MapAway(Range, i64, Prot),
    Unmap(Range),
    /// From the start of one mapping to the end of another.
    UnmapLive(Index, Index),
    Reclaim,
    Scavenge,
}

fn ops() -> impl Strategy<Value = Op> {
    let prot = || {
        prop_oneof![
            1 => (0..8u32).prop_map(Prot::from_bits_truncate),
            4 => Just(Prot::RW),
        ]
    };
    let away = prop_oneof![4 => (-3..4i64).prop_map(|n| n << 12), 1 => -3..4i64];
    prop_oneof![
        3 => (ranges(), any::<u64>(), prot()).prop_map(|(r, t, p)| Op::Map(r, t >> 1, p)),
        6 => (ranges(), away, prot()).prop_map(|(r, away, p)| Op::MapAway(r, away, p)),
        2 => ranges().prop_map(Op::Unmap),
        5 => (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Op::UnmapLive(a, b)),
        1 => Just(Op::Reclaim),
        1 => Just(Op::Scavenge),
    ]
}

/// Compares the results of both for one address.
fn compare_at(table: &Table, oracle: &Oracle, iova: Iova) {
    let expected = oracle.at(iova);
    assert_eq!(table.mapping(iova).as_ref(), expected, "the mapping at {iova:?}");
    let found = table.lookup(iova);
    assert_eq!(found, table.lookup_locked(iova));
    let (Some(found), Some(expected)) = (found, expected) else {
        assert_eq!(found.is_some(), expected.is_some(), "at {iova:?}");
        assert_eq!(table.lookup_run(iova, Range::ALL), None);
        return;
    };
    assert_eq!(found.target(iova), expected.target + (iova.0 - expected.range.first().0));
    assert_eq!(found.prot, expected.prot);
    assert!(found.range.contains(iova) && expected.range.covers(found.range), "{found:?}");
    assert_eq!(table.lookup_run(iova, Range::ALL), oracle.run(iova), "the run at {iova:?}");
    let near = table.lookup_run(iova, Range::new(iova, iova).unwrap()).unwrap();
    assert!(near.range.covers(found.range) || near.range == found.range);
}

fn compare(table: &Table, oracle: &Oracle, around: Range) {
    assert_eq!(table.mappings(), oracle.0.len() as u64);
    assert!(table.iter().eq(oracle.0.values().copied()));
    // Many at a time, and from anywhere: the same.
    for (room, from) in [(1, 0), (3, 0x1801), (1 << 10, 1 << 13), (7, 1 << 40)] {
        let (mut found, mut batch) = (Vec::new(), Vec::with_capacity(room));
        let mut next = Some(Iova(from));
        while let Some(from) = next {
            table.mappings_from(from, &mut batch);
            let last = batch.last().filter(|_| batch.len() == room);
            next = last.and_then(|mapping| mapping.range.last().0.checked_add(1)).map(Iova);
            found.append(&mut batch);
        }
        let expected = oracle.0.values().filter(|mapping| mapping.range.last().0 >= from);
        assert!(found.iter().eq(expected), "from {from:#x}, {room} at a time");
    }
    let ends = [around.first().0, around.last().0];
    for at in ends {
        for iova in [at.saturating_sub(1), at, at.saturating_add(1)] {
            compare_at(table, oracle, Iova(iova));
        }
    }
    compare_at(table, oracle, Iova(around.first().0 + around.extent() / 2));
}

/// Maps in both, and compares; if the table is full, nothing was mapped.
fn map(table: &Table, oracle: &mut Oracle, range: Range, target: u64, prot: Prot) {
    let expected = oracle.map(range, target, prot);
    match table.map(range, target, prot) {
        Err(Error::Full { limit, .. }) if limit != u64::MAX => {
            assert_eq!(expected, Ok(()), "being full is the last error checked");
            oracle.0.remove(&range.first().0);
        }
        result => assert_eq!(result, expected),
    }
    assert!(table.table_bytes() <= table.limits().table_bytes);
    assert!(table.mappings() <= table.limits().mappings);
}

fn run(sequence: Vec<Op>, limits: Limits) {
    let nodes_before = NODES.get();
    let table = Table::new(limits);
    let mut oracle = Oracle::default();
    let mut pages = PageList::default();
    for op in sequence {
        let around = match op {
            Op::Map(range, target, prot) => {
                map(&table, &mut oracle, range, target, prot);
                range
            }
            Op::MapAway(range, away, prot) => {
                let target = range.first().0.saturating_add_signed(away);
                map(&table, &mut oracle, range, target, prot);
                range
            }
            Op::Unmap(range) => {
                assert_eq!(table.unmap(range, &mut pages), oracle.unmap(range));
                range
            }
            Op::UnmapLive(from, to) => {
                let live: Vec<Range> = oracle.0.values().map(|m| m.range).collect();
                if live.is_empty() {
                    continue;
                }
                let range = from.get(&live).hull(*to.get(&live));
                assert_eq!(table.unmap(range, &mut pages), oracle.unmap(range));
                range
            }
            Op::Reclaim => {
                pages.append(table.take_deferred());
                assert_eq!(table.retired_bytes(), pages.bytes());
                // SAFETY: there is one thread, and it is in no lookup.
                unsafe { std::mem::take(&mut pages).reclaim() };
                assert_eq!(table.retired_bytes(), 0);
                Range::ALL
            }
            Op::Scavenge => {
                table.scavenge();
                assert_eq!(table.scavenge(), 0, "once is enough");
                Range::ALL
            }
        };
        compare(&table, &oracle, around);
    }
    for mapping in oracle.0.values() {
        for at in [mapping.range.first(), mapping.range.last()] {
            compare_at(&table, &oracle, at);
        }
    }
    // One by one, so that the nodes stay; then scavenging finds all that is left.
    for mapping in oracle.0.values() {
        assert_eq!(table.unmap(mapping.range, &mut pages), Ok(mapping.range.len()));
    }
    table.scavenge();
    pages.append(table.take_deferred());
    assert_eq!(table.table_bytes(), pages.bytes());
    // SAFETY: as above.
    unsafe { pages.reclaim() };
    assert_eq!((table.table_bytes(), table.mappings()), (0, 0));
    assert_eq!(NODES.get(), nodes_before, "a node was leaked, or freed twice");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_has_the_results_of_the_oracle(
        sequence in prop::collection::vec(ops(), 1..60)
    ) {
        // rules L36, L41, L65, V20, V22, V23
        run(sequence, Limits::NONE);
    }

    #[test]
    fn a_table_keeps_to_its_limits_and_is_true_to_what_it_holds(
        sequence in prop::collection::vec(ops(), 1..60),
        table_bytes in 0..100_000u64,
        mappings in 1..40u64,
    ) {
        run(sequence, Limits { table_bytes, mappings });
    }
}
