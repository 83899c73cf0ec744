//! The translation table: a radix tree over 64-bit I/O virtual addresses, read without locks.
//!
//! # Shape
//!
//! A *node* is an array of 512 slots, each one 64-bit word; a slot of a level-0 node stands for
//! 4 KiB, one of a level-1 node for 2 MiB, and so on up to level 5. The root is a single slot that
//! stands for all 2^64 addresses. A slot holds one of four things:
//!
//! * nothing;
//! * a *leaf*: permission bits and the **difference** of addresses (target = IOVA + difference,
//!   modulo 2^64). Because it is a difference, the target needs no alignment to the slot's size,
//!   and every slot of a mapping holds the same number. A leaf may stand at every level, the root
//!   included: [0, 2^64-1] is one entry, and a mapping is cut into the fewest, largest slots;
//! * a *block* of records {first, last, difference, permission} for what a leaf cannot encode:
//!   mappings that begin or end inside a 4 KiB page, and differences that are not a multiple of 4
//!   KiB. The table is exact to the byte; the domain above it enforces the granule;
//! * a *child*: another node. A child need not be of the next level: chains of nodes with one child
//!   each are never built; the slot encodes how far it skips, and the node its addresses. A lone
//!   page costs one node wherever it lies, and the length of a walk depends on where the mappings
//!   differ, not on the bits of the address.
//!
//! # Boundaries
//!
//! The table keeps the boundaries of mappings: leaves carry a bit for "a mapping begins here" and
//! one for "ends here". An unmap that would split a mapping is refused before anything is touched,
//! and adjacent mappings stay separate even if their differences agree (rules [V22], [V40], [L65]).
//!
//! # Concurrency
//!
//! [`Table::lookup`] and [`Table::lookup_run`] are lock-free: one acquire load per level.
//! Everything else takes the table's lock, a spin lock that is held for the whole operation: some
//! ten nanoseconds for a page, and in proportion to the slots and nodes of a large range. A writer
//! publishes slot by slot: a reader sees each slot as it was or as it is, never a mixture; a
//! mapping of several slots becomes visible slot by slot, as on hardware, and is complete when
//! [`Table::map`] returns.
//!
//! Unlinked pages go onto a [`PageList`], and [`PageList::reclaim`], which states the contract,
//! frees them after a grace period (rules [L21], [L40]).
//!
//! # Bounds
//!
//! [`Limits`] bound the bytes of nodes and blocks, unlinked ones included until they are freed, and
//! the number of mappings; a [`Budget`] bounds both for several tables together. An unmap frees a
//! node only if it covers all of the node's addresses (rule [L41]): otherwise the emptied node
//! stays for the next mapping, so that a map/unmap pair allocates nothing. When a map would exceed
//! the limit, all empty nodes are unlinked ("scavenged") and the map fails; see [`Table::map`] for
//! how the caller proceeds. Unmapping never allocates.
//!
//! [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
//! [V40]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v40
//! [L65]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l65
//! [L21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l21
//! [L40]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l40
//! [L41]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l41

mod budget;
mod map;
mod node;
mod pages;
mod slot;
mod unmap;
mod walk;
mod writer;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;

use alloc::{sync::Arc, vec::Vec};
use core::fmt;

use ringfence_sync::{
    atomic::{AtomicU64, Ordering},
    lock::{SpinGuard, SpinLock},
};

use self::{
    budget::CHUNK,
    map::{Commit, Need},
    pages::{Chain, Ledger},
    slot::{ROOT_LEVEL, Slot},
    unmap::Removed,
    walk::{Leaf, first_mapped, leaf_at, run_at},
    writer::{SlotRef, Writer},
};
use crate::{Address as _, Error, Iova, Prot, Range, Result};

pub use budget::Budget;
pub(crate) use budget::Sharer;
pub use pages::PageList;

/// What a lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Addresses around the one looked up that share `delta` and `prot`: all of the leaf, or of the
    /// merged leaves. Clipped neither to the requested range nor to a mapping's boundaries.
    pub range: Range,
    /// What to add to an IOVA, modulo 2^64, to reach its target.
    pub delta: u64,
    /// The permitted accesses.
    pub prot: Prot,
}

impl Translation {
    /// The target of `iova`, an address in [`range`](Self::range).
    #[inline]
    pub const fn target(&self, iova: Iova) -> u64 {
        iova.0.wrapping_add(self.delta)
    }
}

/// One mapping, with the boundaries it was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// What is mapped.
    pub range: Range,
    /// The target of its first address.
    pub target: u64,
    /// The permitted accesses.
    pub prot: Prot,
}

/// How much a table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of table memory: nodes and blocks, those that wait for their grace period included.
    pub table_bytes: u64,
    /// Mappings.
    pub mappings: u64,
}

impl Limits {
    /// No limit but the memory of the machine. For tables whose mappings come from a trusted
    /// source.
    pub const NONE: Limits = Limits { table_bytes: u64::MAX, mappings: u64::MAX };
}

/// A translation table. See the [module](self) for its structure.
pub struct Table {
    root: AtomicU64,
    mappings: AtomicU64,
    limits: Limits,
    /// How many unused mappings it may hold back from a budget.
    spare: u64,
    ledger: Arc<Ledger>,
    writer: SpinLock<Writer>,
}

impl Table {
    /// An empty table.
    pub fn new(limits: Limits) -> Table {
        Table::with(limits, None)
    }

    /// An empty table that shares `budget` with others, all of which together stay within it.
    pub fn within(budget: Arc<Budget>) -> Table {
        Table::with(budget.limits(), Some(budget))
    }

    fn with(limits: Limits, budget: Option<Arc<Budget>>) -> Table {
        let (granted, spare) = match budget {
            Some(_) => (0, 2 * CHUNK),
            None => (limits.mappings, u64::MAX),
        };
        Table {
            root: AtomicU64::new(Slot::EMPTY.0),
            mappings: AtomicU64::new(0),
            limits,
            spare,
            ledger: Arc::new(Ledger::new(budget)),
            writer: SpinLock::new(Writer::new(granted)),
        }
    }

    /// The limits that it was created with: its own, or those of its budget.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Maps `range` to `target` and the addresses after it, byte-exact. All or nothing.
    ///
    /// # Errors
    /// Nothing was changed. In this order:
    /// * [`NoPermission`](crate::Error::NoPermission): neither reads nor writes are allowed
    ///   (rule [L31]).
    /// * [`TargetOverflow`](crate::Error::TargetOverflow): the target would pass 2^64.
    /// * [`Exists`](crate::Error::Exists): part of the range is mapped; `at` is the first mapped
    ///   address in it (rule [L36]).
    /// * [`Full`](crate::Error::Full) of "mappings" or of "table bytes", its own or its budget's.
    ///   In the latter case all empty nodes have been unlinked and are in
    ///   [`take_deferred`](Self::take_deferred), with whatever else waits: if that list is not
    ///   empty, the caller passes a grace period, [reclaims](PageList::reclaim) it and tries once
    ///   more.
    /// * [`NoMemory`](crate::Error::NoMemory): the allocator failed.
    ///
    /// [L31]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l31
    /// [L36]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l36
    pub fn map(&self, range: Range, target: u64, prot: Prot) -> Result<()> {
        if !prot.intersects(Prot::RW) {
            return Err(Error::NoPermission(range));
        }
        if target.checked_add(range.extent()).is_none() {
            return Err(Error::TargetOverflow(range));
        }
        self.locked().map(Mapping { range, target, prot })
    }

    /// Removes every mapping in `range`, which may contain holes, and returns how many bytes were
    /// mapped (0 if none). Nodes and blocks that were unlinked are added to `pages`. All or
    /// nothing; the cost is in proportion to the nodes in the range, not to its span.
    ///
    /// # Errors
    /// [`WouldSplit`](crate::Error::WouldSplit): `at` is the first address of `range` if a mapping
    /// reaches into the range from below, else the last if one reaches out of it above. Nothing was
    /// removed (rules [V22], [L65]). Never fails for lack of memory.
    ///
    /// [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
    /// [L65]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l65
    pub fn unmap(&self, range: Range, pages: &mut PageList) -> Result<u128> {
        let removed = self.remove_in(&mut self.writer.lock(), range)?;
        Ok(self.retire(removed, pages))
    }

    /// The table with its lock held: for lists.
    #[inline]
    pub(crate) fn locked(&self) -> Locked<'_> {
        Locked { table: self, writer: self.writer.lock() }
    }

    /// Translates `iova`, lock-free. The calling thread must be one that the grace periods of
    /// [`PageList::reclaim`] wait for, between two of its quiet points.
    #[inline]
    pub fn lookup(&self, iova: Iova) -> Option<Translation> {
        // SAFETY: this is the lookup that reclaiming waits for, by the contract of
        // `PageList::reclaim`; the table itself cannot be dropped while it is borrowed here.
        unsafe { leaf_at(&self.root, iova.0) }.map(Leaf::translation)
    }

    /// As [`lookup`](Self::lookup), merged with the leaves on both sides that have the same
    /// difference and the same permission, as far as they lie in `within` (the result may extend
    /// beyond `within` by a leaf on each side). Costs a load for each leaf of a node, and a lookup
    /// where the run continues in another node.
    #[inline]
    pub fn lookup_run(&self, iova: Iova, within: Range) -> Option<Translation> {
        // SAFETY: as in `lookup`.
        unsafe { run_at(&self.root, iova.0, within) }.map(Leaf::translation)
    }

    /// As [`lookup`](Self::lookup), under the table's lock: any thread may call it at any time.
    pub fn lookup_locked(&self, iova: Iova) -> Option<Translation> {
        let _writer = self.writer.lock();
        // SAFETY: the lock is held.
        unsafe { leaf_at(&self.root, iova.0) }.map(Leaf::translation)
    }

    /// The mapping that `iova` lies in, with its boundaries. Takes the lock.
    pub fn mapping(&self, iova: Iova) -> Option<Mapping> {
        let _writer = self.writer.lock();
        self.whole(iova.0)
    }

    /// The first mapping that ends at or after `iova`. Takes the lock.
    pub fn mapping_from(&self, iova: Iova) -> Option<Mapping> {
        let _writer = self.writer.lock();
        self.first_from(iova)
    }

    /// Adds to `into` the mappings that end at or after `iova`, in ascending order, as many as it
    /// has room for without growing: if room is left, there are no more. Takes the lock, once.
    pub fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) {
        let _writer = self.writer.lock();
        let mut next = Some(iova);
        while into.len() < into.capacity()
            && let Some(mapping) = next.and_then(|next| self.first_from(next))
        {
            into.push(mapping);
            next = mapping.range.last().checked_add(1);
        }
    }

    /// All mappings in ascending order. Takes the lock anew for each step: a mapping that exists
    /// throughout is visited once, one that comes or goes meanwhile may or may not be.
    pub fn iter(&self) -> impl Iterator<Item = Mapping> {
        let mut next = Some(Iova(0));
        core::iter::from_fn(move || {
            let mapping = self.mapping_from(next?);
            next = mapping.and_then(|m| m.range.last().checked_add(1));
            mapping
        })
    }

    /// The number of mappings.
    pub fn mappings(&self) -> u64 {
        self.mappings.load(Ordering::Relaxed)
    }

    /// Bytes of table memory: nodes and blocks, those that wait for their grace period included.
    pub fn table_bytes(&self) -> u64 {
        self.ledger.used()
    }

    /// The part of [`table_bytes`](Self::table_bytes) that was unlinked but not freed yet, on a
    /// [`PageList`] or deferred.
    pub fn retired_bytes(&self) -> u64 {
        self.ledger.retired()
    }

    /// Unlinks every empty node and defers it. Returns how many bytes those were.
    pub fn scavenge(&self) -> u64 {
        self.scavenge_with(&mut self.writer.lock())
    }

    /// Gives back the mappings that were taken from the budget but are not in use.
    pub(crate) fn give_back_spare(&self) {
        self.give_back_mappings(&mut self.writer.lock(), 0);
    }

    /// The budget it shares, if it does.
    pub fn budget(&self) -> Option<&Arc<Budget>> {
        self.ledger.budget.as_ref()
    }

    /// The unlinked pages that no list holds: from maps (which replace blocks and empty nodes),
    /// from scavenging, and from page lists that were dropped. The caller frees them after a grace
    /// period that starts after this call.
    pub fn take_deferred(&self) -> PageList {
        PageList::of(self.ledger.take_deferred(), &self.ledger)
    }

    #[inline(always)]
    fn map_in(&self, writer: &mut Writer, mapping: Mapping) -> Result<()> {
        let mappings = self.mappings();
        if mappings >= writer.granted || !map::quick(writer, &self.root, &mapping) {
            self.map_slowly(writer, mapping)?;
        }
        // The lock is held: no other thread changes it.
        self.mappings.store(mappings + 1, Ordering::Relaxed);
        Ok(())
    }

    #[inline]
    fn remove_in(&self, writer: &mut Writer, range: Range) -> Result<Removed> {
        let removed = match unmap::quick(writer, &self.root, range) {
            Some(removed) => removed,
            None => {
                if let Some(at) = unmap::splits(&self.root, range) {
                    return Err(Error::WouldSplit { range, at: Iova(at) });
                }
                let mut removed = Removed::default();
                unmap::sweep(writer, SlotRef::root(&self.root), range, &mut removed);
                removed
            }
        };
        let left = self.mappings() - removed.mappings;
        self.mappings.store(left, Ordering::Relaxed);
        if writer.granted - left > self.spare {
            self.give_back_mappings(writer, CHUNK);
        }
        Ok(removed)
    }

    /// Adds to `pages` what was unlinked, and returns how many bytes were mapped.
    #[inline]
    fn retire(&self, removed: Removed, pages: &mut PageList) -> u128 {
        if !removed.pages.is_empty() {
            self.ledger.retire(&removed.pages);
            pages.append(PageList::of(removed.pages, &self.ledger));
        }
        removed.bytes
    }

    /// The slow path of a map: it may need memory, and may fail.
    fn map_slowly(&self, writer: &mut Writer, mapping: Mapping) -> Result<()> {
        let span = mapping.range;
        let root = SlotRef::root(&self.root);
        let fits = Slot::fits(slot::delta(&mapping));
        let mut need = Need::default();
        map::rehearse(root.load(), ROOT_LEVEL, span, fits, &mut need)
            .map_err(|at| Error::Exists { range: mapping.range, at: Iova(at) })?;
        let full = |what, used, limit| Err(Error::Full { what, used, limit });
        if self.mappings() >= writer.granted {
            let granted = self.budget().map_or(0, |budget| budget.take_mappings(CHUNK));
            writer.granted += granted;
            if granted == 0 {
                let used = self.budget().map_or(self.mappings(), |all| all.taken_mappings());
                return full("mappings", used, self.limits.mappings);
            }
        }
        let limit = self.limits.table_bytes;
        if !self.ledger.charge(need.bytes(), limit) {
            let used = self.budget().map_or(self.table_bytes(), |all| all.table_bytes());
            self.scavenge_with(writer);
            return full("table bytes", used, limit);
        }
        let Some(stock) = need.allocate(&mapping) else {
            self.ledger.discharge(need.bytes());
            return Err(Error::NoMemory { operation: "map", range: mapping.range });
        };
        let mut commit = Commit { writer, mapping, stock, pages: Chain::default() };
        commit.put(root, span);
        self.ledger.retire(&commit.pages);
        self.ledger.defer(commit.pages);
        Ok(())
    }

    /// Keeps `spare` of the mappings that were taken from the budget but are not in use.
    fn give_back_mappings(&self, writer: &mut Writer, spare: u64) {
        if let Some(budget) = self.budget() {
            let more = (writer.granted - self.mappings()).saturating_sub(spare);
            writer.granted -= more;
            budget.give_mappings(more);
        }
    }

    fn scavenge_with(&self, writer: &mut Writer) -> u64 {
        let mut pages = Chain::default();
        writer.scavenge(&self.root, &mut pages);
        let bytes = pages.bytes;
        self.ledger.retire(&pages);
        self.ledger.defer(pages);
        bytes
    }

    /// The first mapping that ends at or after `iova`. The lock is held.
    fn first_from(&self, iova: Iova) -> Option<Mapping> {
        // Ordering: the lock orders it.
        let root = Slot(self.root.load(Ordering::Acquire));
        let above = Range { first: iova.0, last: u64::MAX };
        // SAFETY: the lock is held.
        let at = unsafe { first_mapped(root, ROOT_LEVEL, above) }?;
        self.whole(at)
    }

    /// The whole mapping that contains `address`. The lock is held.
    fn whole(&self, address: u64) -> Option<Mapping> {
        // SAFETY: the lock is held.
        let look = |address| unsafe { leaf_at(&self.root, address) };
        let leaf = look(address)?;
        let (mut low, mut high) = (leaf, leaf);
        // A leaf stands for its own slot only, a record for its whole mapping.
        while !low.starts {
            low = look(low.span.first.checked_sub(1)?)?;
        }
        while !high.ends {
            high = look(high.span.last.checked_add(1)?)?;
        }
        let range = Range::new(Iova(low.span.first), Iova(high.span.last))?;
        let target = low.span.first.wrapping_add(leaf.delta);
        Some(Mapping { range, target, prot: leaf.prot })
    }
}

/// A table whose lock is held.
pub(crate) struct Locked<'t> {
    table: &'t Table,
    writer: SpinGuard<'t, Writer>,
}

impl Locked<'_> {
    /// As [`Table::map`], for a mapping that passed
    /// [`Geometry::check_map`](crate::Geometry::check_map).
    #[inline]
    pub(crate) fn map(&mut self, mapping: Mapping) -> Result<()> {
        let prot = mapping.prot & Prot::all();
        self.table.map_in(&mut self.writer, Mapping { prot, ..mapping })
    }

    /// As [`Table::unmap`].
    #[inline]
    pub(crate) fn unmap(&mut self, range: Range, pages: &mut PageList) -> Result<u128> {
        let removed = self.table.remove_in(&mut self.writer, range)?;
        Ok(self.table.retire(removed, pages))
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let mut removed = Removed::default();
        let mut pages = {
            let mut writer = self.writer.lock();
            unmap::sweep(&mut writer, SlotRef::root(&self.root), Range::ALL, &mut removed);
            if let Some(budget) = self.budget() {
                budget.give_mappings(writer.granted);
            }
            removed.pages
        };
        self.ledger.retire(&pages);
        pages.append(self.ledger.take_deferred());
        // SAFETY: all of it is unlinked, and there are no lookups: they borrow the table.
        unsafe { self.ledger.free(pages) };
    }
}

impl fmt::Debug for Table {
    ringfence_sync::shows!(
        Table as it, mappings: it.mappings(), table_bytes: it.table_bytes(),
        retired_bytes: it.retired_bytes(), limits: it.limits
    );
}
