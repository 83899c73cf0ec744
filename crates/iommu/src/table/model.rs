//! Publication, retiring and reclaiming under the model checker, on a tree of the same code with
//! nodes of four slots and pages of 2^56 bytes. The checker sees every access to a node and to a
//! block: one that it cannot order before the free, or after the creation, fails the model.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ringfence-iommu --release --lib model`

use alloc::sync::Arc;

use loom::thread;
use ringfence_sync::{
    model,
    qsbr::{Qsbr, Reader},
};

use super::*;

const PAGE: u64 = 1 << 56;
const RW: Prot = Prot::RW;

fn pages(first: u64, last: u64) -> Range {
    Range::new(Iova(first * PAGE), Iova(last * PAGE + (PAGE - 1))).unwrap()
}

/// Runs `write` beside a reader that calls `read` twice with a quiet point between.
fn check(
    prepare: impl Fn(&Table) + Send + Sync + 'static,
    write: impl Fn(&Table, &Qsbr) + Send + Sync + 'static,
    read: impl Fn(&Table) + Send + Sync + 'static,
) {
    let read = Arc::new(read);
    model::check(Some(3), move || {
        let table = Arc::new(Table::new(Limits::NONE));
        prepare(&table);
        let qsbr = Arc::new(Qsbr::new(1));
        let mut reader: Reader = qsbr.register().unwrap();
        let other = {
            let (table, read) = (table.clone(), read.clone());
            thread::spawn(move || {
                read(&table);
                reader.quiescent_with(|| ());
                read(&table);
            })
        };
        write(&table, &qsbr);
        other.join().unwrap();
    });
}

/// Frees what was unlinked, once the reader has passed a quiet point.
fn reclaim(table: &Table, mut list: PageList, qsbr: &Qsbr) {
    list.append(table.take_deferred());
    let grace = qsbr.start();
    while !qsbr.is_over(grace) {
        thread::yield_now();
    }
    // SAFETY: the grace period began after the list was filled.
    unsafe { list.reclaim() };
}

/// Whether page `n` is mapped, with the one difference that all mappings of the model have.
fn is_mapped(table: &Table, n: u64) -> bool {
    let at = Iova(n * PAGE + 5);
    table.lookup(at).is_some_and(|found| {
        assert!(found.range.contains(at));
        assert_eq!((found.delta, found.prot), (0, RW));
        true
    })
}

#[test]
fn a_mapping_stays_visible_while_nodes_are_linked_above_it() {
    check(
        |table| table.map(pages(1, 1), PAGE, RW).unwrap(),
        |table, _| {
            table.map(pages(9, 9), 9 * PAGE, RW).unwrap();
            table.map(pages(200, 203), 200 * PAGE, RW).unwrap();
        },
        |table| {
            assert!(is_mapped(table, 1));
            // In this order: the first was mapped before the second.
            let second = is_mapped(table, 201);
            assert!(!second || is_mapped(table, 9));
        },
    );
}

#[test]
fn a_node_that_an_unmap_covers_is_freed_when_no_reader_is_in_it() {
    // rules L21, L40
    check(
        |table| {
            table.map(pages(1, 1), PAGE, RW).unwrap();
            table.map(pages(9, 9), 9 * PAGE, RW).unwrap();
        },
        |table, qsbr| {
            let mut list = PageList::default();
            assert_eq!(table.unmap(pages(0, 3), &mut list), Ok(u128::from(PAGE)));
            assert!(!list.is_empty());
            reclaim(table, list, qsbr);
            table.map(pages(2, 2), 2 * PAGE, RW).unwrap();
        },
        |table| {
            is_mapped(table, 1);
            is_mapped(table, 2);
            assert!(is_mapped(table, 9));
        },
    );
}

#[test]
fn an_empty_node_gives_way_to_a_leaf_and_to_scavenging() {
    // rules L21, L37, L40
    check(
        |table| {
            table.map(pages(9, 9), 9 * PAGE, RW).unwrap();
            table.map(pages(1, 1), PAGE, RW).unwrap();
            table.unmap(pages(1, 1), &mut PageList::default()).unwrap();
        },
        |table, qsbr| {
            // All of the empty node: one leaf takes its place.
            table.map(pages(0, 3), 0, RW).unwrap();
            reclaim(table, PageList::default(), qsbr);
            assert!(is_mapped(table, 1));
        },
        |table| {
            is_mapped(table, 1);
            assert!(is_mapped(table, 9));
        },
    );
    check(
        |table| {
            table.map(pages(9, 9), 9 * PAGE, RW).unwrap();
            table.map(pages(1, 1), PAGE, RW).unwrap();
            table.unmap(pages(1, 1), &mut PageList::default()).unwrap();
        },
        |table, qsbr| {
            // The empty node, and the one above it that is left with a single child.
            assert_eq!(table.scavenge(), 2 * node::Node::BYTES);
            reclaim(table, PageList::default(), qsbr);
        },
        |table| {
            assert!(!is_mapped(table, 1));
            assert!(is_mapped(table, 9));
        },
    );
}

#[test]
fn a_block_is_replaced_as_a_whole() {
    // rules L21, L40
    let part = |first: u64, last: u64| Range::new(Iova(first), Iova(last)).unwrap();
    check(
        move |table| table.map(part(0, 7), 0, RW).unwrap(),
        move |table, qsbr| {
            table.map(part(8, 15), 8, RW).unwrap();
            let mut list = PageList::default();
            table.unmap(part(0, 7), &mut list).unwrap();
            assert!(list.is_empty(), "a record dies in its place");
            table.map(part(0, 3), 0, RW).unwrap();
            reclaim(table, list, qsbr);
        },
        |table| {
            if let Some(found) = table.lookup(Iova(3)) {
                assert_eq!((found.delta, found.prot, found.range.first()), (0, RW, Iova(0)));
            }
            let late = table.lookup(Iova(7)).is_none();
            assert!(!late || table.lookup(Iova(8)).is_some());
        },
    );
}
