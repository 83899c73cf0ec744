//! Table pages on their way from the tree to the allocator.

use alloc::sync::Arc;
use core::fmt;

use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::SpinLock,
};

use super::{
    Budget,
    node::{Block, Node},
    slot::Slot,
};

/// Shared by a table and the page lists that came from it, which keep it alive after the table.
pub(super) struct Ledger {
    /// Bytes of all nodes and blocks that are allocated.
    used: AtomicU64,
    /// The part of them that was unlinked.
    retired: AtomicU64,
    /// Unlinked pages that are on no list.
    deferred: SpinLock<Chain>,
    /// The budget shared with other tables.
    pub(super) budget: Option<Arc<Budget>>,
}

impl Ledger {
    pub(super) fn new(budget: Option<Arc<Budget>>) -> Ledger {
        Ledger {
            used: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            deferred: SpinLock::new(Chain::default()),
            budget,
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn retired(&self) -> u64 {
        self.retired.load(Ordering::Relaxed)
    }

    /// Counts `bytes` that are about to be allocated; returns false, with nothing counted, if that
    /// exceeds `limit` or the budget. The table's lock is held: no other thread counts up.
    pub(super) fn charge(&self, bytes: u64, limit: u64) -> bool {
        let fits = bytes <= limit.saturating_sub(self.used())
            && self.budget.as_ref().is_none_or(|budget| budget.take_bytes(bytes));
        if fits {
            self.used.fetch_add(bytes, Ordering::Relaxed);
        }
        fits
    }

    pub(super) fn discharge(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.give_bytes(bytes);
        }
    }

    /// Counts the pages of `chain` as unlinked.
    pub(super) fn retire(&self, chain: &Chain) {
        if chain.bytes > 0 {
            self.retired.fetch_add(chain.bytes, Ordering::Relaxed);
        }
    }

    /// Keeps retired pages until a caller takes the deferred ones.
    pub(super) fn defer(&self, chain: Chain) {
        if !chain.is_empty() {
            self.deferred.lock().append(chain);
        }
    }

    pub(super) fn take_deferred(&self) -> Chain {
        core::mem::take(&mut *self.deferred.lock())
    }

    /// Frees pages that were retired.
    ///
    /// # Safety
    /// No thread can reach them and none is reading them.
    pub(super) unsafe fn free(&self, chain: Chain) {
        self.retired.fetch_sub(chain.bytes, Ordering::Relaxed);
        self.discharge(chain.bytes);
        // SAFETY: the caller's promise.
        unsafe { chain.free() };
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let deferred = self.take_deferred();
        // SAFETY: the table is gone (it holds the ledger), and with it every lookup, which borrows
        // the table: no thread reads what was unlinked from it.
        unsafe { self.free(deferred) };
    }
}

/// Unlinked nodes and blocks, linked through their own `next`: needs no memory to grow.
#[derive(Default)]
pub(super) struct Chain {
    /// A child or block word, or empty.
    head: u64,
    tail: u64,
    pub(super) bytes: u64,
}

impl Chain {
    pub(super) fn is_empty(&self) -> bool {
        self.head == 0
    }

    /// Adds a node that no slot points to any more.
    pub(super) fn push_node(&mut self, node: &Node) {
        node.next.set(0);
        self.append(Chain {
            head: Slot::child(node, 0).0,
            tail: Slot::child(node, 0).0,
            bytes: Node::BYTES,
        });
    }

    /// Adds the block of a block word that is no longer in any slot.
    ///
    /// # Safety
    /// The lock is held and the block is on no other list.
    pub(super) unsafe fn push_block(&mut self, word: Slot) {
        // SAFETY: it was linked until now and is not freed before it leaves this list.
        let block = unsafe { word.block_ptr().as_ref() };
        block.next.set(0);
        self.append(Chain { head: word.0, tail: word.0, bytes: block.bytes() });
    }

    pub(super) fn append(&mut self, other: Chain) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            *self = other;
            return;
        }
        // SAFETY: the pages of a chain are alive and their `next` belongs to the chain's owner.
        unsafe { next_of(Slot(self.tail)) }.set(other.head);
        self.tail = other.tail;
        self.bytes += other.bytes;
    }

    /// # Safety
    /// No thread can reach the pages and none is reading them.
    unsafe fn free(self) {
        let mut word = Slot(self.head);
        while !word.is_empty() {
            // SAFETY: the page is alive and its `next` is ours; the caller promises that no other
            // thread accesses it.
            unsafe {
                let next = Slot(next_of(word).get());
                if word.is_block() {
                    Block::free(word.block_ptr().as_ptr());
                } else {
                    Node::free(word.node_ptr());
                }
                word = next;
            }
        }
    }
}

/// The link of a page on a chain.
///
/// # Safety
/// The page is alive and on a chain that the caller owns.
unsafe fn next_of<'p>(word: Slot) -> &'p core::cell::Cell<u64> {
    // SAFETY: the caller's promise.
    unsafe {
        if word.is_block() { &(*word.block_ptr().as_ptr()).next } else { &(*word.node_ptr()).next }
    }
}

/// Table pages that were unlinked and wait for a grace period.
///
/// Dropping a list is safe and frees nothing: its pages go back to their table's *deferred* ones
/// ([`Table::take_deferred`](super::Table::take_deferred)), which are freed with the table at the
/// latest. They count against the limit until they are freed.
#[derive(Default)]
pub struct PageList {
    pages: Chain,
    /// The ledger of the pages' table; `None` only if there are no pages.
    ledger: Option<Arc<Ledger>>,
}

impl PageList {
    pub(super) fn of(pages: Chain, ledger: &Arc<Ledger>) -> PageList {
        if pages.is_empty() {
            return PageList::default();
        }
        PageList { pages, ledger: Some(ledger.clone()) }
    }

    /// Adds the pages of `other`. If they belong to another table than this list's, they are
    /// deferred in their own table instead, as if `other` had been dropped.
    pub fn append(&mut self, mut other: PageList) {
        match (&self.ledger, &other.ledger) {
            (_, None) => {}
            (None, Some(_)) => core::mem::swap(self, &mut other),
            (Some(mine), Some(theirs)) => {
                if Arc::ptr_eq(mine, theirs) {
                    self.pages.append(core::mem::take(&mut other.pages));
                }
            }
        }
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// How many bytes of table memory the pages hold.
    pub fn bytes(&self) -> u64 {
        self.pages.bytes
    }

    /// Frees the pages (rules [L21], [L40]).
    ///
    /// # Safety
    /// Every call of [`Table::lookup`](super::Table::lookup) or
    /// [`Table::lookup_run`](super::Table::lookup_run) on the pages' table that began before the
    /// pages were put on the list (when [`Table::unmap`](super::Table::unmap) or
    /// [`Table::take_deferred`](super::Table::take_deferred) returned) has returned, and what those
    /// calls did happens-before this call. That is: a grace period that *started* after the list
    /// was filled is over, and every thread that uses the lock-free lookups takes part in it,
    /// making them only between two of its quiet points. After an append the younger of the two
    /// lists counts.
    ///
    /// The other methods of the table do not matter: they take its lock, under which nothing
    /// unlinked before is reachable. Nor does the table's lifetime: its pages may outlive it.
    ///
    /// [L21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l21
    /// [L40]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l40
    pub unsafe fn reclaim(mut self) {
        if let Some(ledger) = self.ledger.take() {
            // SAFETY: the pages are unlinked, so out of reach of later lookups; the caller promises
            // that earlier lookups are over.
            unsafe { ledger.free(core::mem::take(&mut self.pages)) };
        }
    }
}

impl PageList {
    #[cold]
    fn defer(&mut self) {
        if let Some(ledger) = self.ledger.take() {
            ledger.defer(core::mem::take(&mut self.pages));
        }
    }
}

impl Drop for PageList {
    // Usually empty; inlined, so that the check happens where the list is dropped.
    #[inline]
    fn drop(&mut self) {
        if self.ledger.is_some() {
            self.defer();
        }
    }
}

impl fmt::Debug for PageList {
    ringfence_sync::shows!(PageList as it, bytes: it.bytes());
}
