//! Nodes and blocks: what they hold, and how they are allocated, bounded and freed.

use alloc::{boxed::Box, vec::Vec};
use core::{
    alloc::Layout,
    cell::Cell,
    ptr::{self, NonNull},
};

use ringfence_sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::slot::{FANOUT, Slot, index, shift};
use crate::{Prot, Range};

/// A node: an array of slots for the addresses from `base` on.
///
/// Readers touch the slots, `base` and `level`; the last two do not change once the node is linked.
/// The cells belong to the writer: they are accessed only under the table's lock, or, once the node
/// is unlinked, by the owner of the list it is on.
#[repr(C, align(128))]
pub(super) struct Node {
    // First, so that a slot's address is the pointer plus a scaled index.
    slots: [AtomicU64; FANOUT],
    pub(super) base: u64,
    pub(super) level: u32,
    /// How many slots are not empty.
    pub(super) live: Cell<u32>,
    /// The node whose slot points here; null for the root slot.
    pub(super) parent: Cell<*const Node>,
    /// Neighbours in the list of empty nodes.
    pub(super) before: Cell<*const Node>,
    pub(super) after: Cell<*const Node>,
    /// The next entry in a list of retired pages.
    pub(super) next: Cell<u64>,
    #[cfg(loom)]
    canary: ringfence_sync::cell::UnsafeCell<()>,
}

impl Node {
    /// What a node counts against the table's limit.
    pub(super) const BYTES: u64 = size_of::<Node>() as u64;

    /// An empty node; `None` if there is no memory.
    #[cfg(not(loom))]
    pub(super) fn new() -> Option<Box<Node>> {
        // SAFETY: a node has a size. All-zero is a valid node: numbers, null pointers and atomics
        // of zero. The box frees it with the layout it was allocated with.
        unsafe {
            let memory = alloc::alloc::alloc_zeroed(Layout::new::<Node>()).cast::<Node>();
            if memory.is_null() { None } else { Some(Box::from_raw(memory)) }
        }
    }

    #[cfg(loom)]
    pub(super) fn new() -> Option<Box<Node>> {
        Some(Box::new(Node {
            slots: core::array::from_fn(|_| AtomicU64::new(0)),
            base: 0,
            level: 0,
            live: Cell::new(0),
            parent: Cell::new(ptr::null()),
            before: Cell::new(ptr::null()),
            after: Cell::new(ptr::null()),
            next: Cell::new(0),
            canary: ringfence_sync::cell::UnsafeCell::new(()),
        }))
    }

    /// Makes a node that is not linked yet the one of `level` that stands for `address`, and hands
    /// it over to the tree, which frees it through [`Slot`] words.
    pub(super) fn place<'n>(mut self: Box<Self>, level: u32, address: u64) -> &'n Node {
        self.base = Range::of_node(level, address).first;
        self.level = level;
        let node = Box::into_raw(self);
        // Freeing needs this pointer's provenance; one made from a reference would not do.
        node.expose_provenance();
        // SAFETY: the box's memory, released from the box and valid until the tree frees it.
        unsafe { &*node }
    }

    /// The addresses that the node stands for.
    #[inline]
    pub(super) fn span(&self) -> Range {
        Range::of_node(self.level, self.base)
    }

    #[inline]
    pub(super) fn slot(&self, at: usize) -> &AtomicU64 {
        // The mask avoids the bounds check.
        &self.slots[at & (FANOUT - 1)]
    }

    /// The content of a slot. Acquire: what it points to was written before it.
    #[inline]
    pub(super) fn load(&self, at: usize) -> Slot {
        Slot(self.slot(at).load(Ordering::Acquire))
    }

    /// Changes the content of a slot. The caller keeps `live` correct.
    // Ordering: a leaf that comes or goes has nothing behind it; what has is set by `Writer::set`.
    #[inline]
    pub(super) fn store(&self, at: usize, word: Slot) {
        self.slot(at).store(word.0, Ordering::Release);
    }

    /// The slots, by index, that stand for an address of `span`, which overlaps the node's own.
    #[inline]
    pub(super) fn indices(&self, span: Range) -> core::ops::RangeInclusive<usize> {
        let inside = span.clip(self.span());
        index(self.level, inside.first)..=index(self.level, inside.last)
    }

    /// What the slot at an index stands for.
    #[inline]
    pub(super) fn slot_span(&self, at: usize) -> Range {
        let address = self.base | (at as u64) << shift(self.level);
        Range::of_slot(self.level, address)
    }

    /// Marks the node as being read, for the model checker.
    #[inline(always)]
    pub(super) fn touch(&self) {
        #[cfg(loom)]
        self.canary.with(|_| ());
    }

    /// Frees a node.
    ///
    /// # Safety
    /// It came from [`place`](Self::place), no thread can reach it, and none is reading it.
    pub(super) unsafe fn free(node: *mut Node) {
        // SAFETY: the pointer came from `Box::into_raw` in `place`; the caller owns it.
        let node = unsafe { Box::from_raw(node) };
        #[cfg(loom)]
        node.canary.with_mut(|_| ());
        drop(node);
    }
}

/// A mapping, or part of one, that a leaf cannot encode.
pub(super) struct Record {
    /// All of the mapping, not only the part in this slot.
    pub(super) span: Range,
    pub(super) delta: u64,
    /// The permission; 0 once it is unmapped. A record never maps anything else: it dies, and a
    /// later mapping in the same page makes a new block. So an unmap needs no memory.
    prot: AtomicU32,
}

impl Record {
    pub(super) fn new(span: Range, delta: u64, prot: Prot) -> Record {
        Record { span, delta, prot: AtomicU32::new(prot.bits()) }
    }

    /// The permission, while it is mapped.
    // Ordering: a record is seen with the block that it is in. That it dies is in force with the quiet
    // points after it, as where a slot becomes empty.
    #[inline]
    pub(super) fn prot(&self) -> Option<Prot> {
        match self.prot.load(Ordering::Acquire) {
            0 => None,
            bits => Some(Prot::from_bits_truncate(bits)),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.prot().is_some()
    }

    // Ordering: see `prot`.
    pub(super) fn kill(&self) {
        self.prot.store(0, Ordering::Release);
    }

    fn copy(&self) -> Option<Record> {
        Some(Record::new(self.span, self.delta, self.prot()?))
    }
}

/// Records of mappings that do not overlap, in ascending order; once linked, the only change is
/// that records die.
///
/// A block is for one slot of a level-0 node, or it holds one record and is shared by all the slots
/// that the record's mapping covers wholly. As a mapping is only removed whole, the unmap visits
/// those slots one after the other and retires the block once.
pub(super) struct Block {
    records: Vec<Record>,
    /// The next entry in a list of retired pages; it belongs to the owner of the list.
    pub(super) next: Cell<u64>,
    #[cfg(loom)]
    canary: ringfence_sync::cell::UnsafeCell<()>,
}

impl Block {
    /// What a block of `records` counts against the table's limit.
    pub(super) const fn bytes_for(records: usize) -> u64 {
        size_of::<Block>() as u64 + records as u64 * size_of::<Record>() as u64
    }

    /// An empty block with room for `records`; `None` if there is no memory.
    pub(super) fn new(records: usize) -> Option<Box<Block>> {
        let mut room = Vec::new();
        room.try_reserve_exact(records).ok()?;
        let block = Block {
            records: room,
            next: Cell::new(0),
            #[cfg(loom)]
            canary: ringfence_sync::cell::UnsafeCell::new(()),
        };
        // SAFETY: a block has a size; the memory is written before it becomes a box, which frees it
        // with the layout it was allocated with.
        unsafe {
            let memory = alloc::alloc::alloc(Layout::new::<Block>()).cast::<Block>();
            if memory.is_null() {
                return None;
            }
            ptr::write(memory, block);
            Some(Box::from_raw(memory))
        }
    }

    /// Fills a new block with the live records of `old` and one more.
    pub(super) fn fill(&mut self, old: &[Record], new: Record) {
        let (below, above) = old.split_at(old.partition_point(|r| r.span.first < new.span.first));
        self.records.extend(below.iter().filter_map(Record::copy));
        self.records.push(new);
        self.records.extend(above.iter().filter_map(Record::copy));
    }

    pub(super) fn records(&self) -> &[Record] {
        #[cfg(loom)]
        self.canary.with(|_| ());
        &self.records
    }

    /// The live record that contains `address`.
    pub(super) fn find(&self, address: u64) -> Option<(&Record, Prot)> {
        let records = self.records();
        let at = records.partition_point(|record| record.span.first <= address);
        let record = records.get(at.checked_sub(1)?)?;
        let prot = record.prot()?;
        (address <= record.span.last).then_some((record, prot))
    }

    /// What it counts against the table's limit.
    pub(super) fn bytes(&self) -> u64 {
        Self::bytes_for(self.records.len())
    }

    /// Frees a block.
    ///
    /// # Safety
    /// It came from a box, no thread can reach it, and none is reading it.
    pub(super) unsafe fn free(block: *mut Block) {
        // SAFETY: the caller's promise.
        let block = unsafe { Box::from_raw(block) };
        #[cfg(loom)]
        block.canary.with_mut(|_| ());
        drop(block);
    }
}

const _: () = assert!(align_of::<Node>() >= 128, "a child pointer has seven low bits to spare");
const _: () = assert!(align_of::<Block>() >= 4, "a block pointer has two low bits to spare");

/// Pointers in words.
impl Slot {
    /// A pointer to `node` for a slot of `level`.
    pub(super) fn child(node: &Node, level: u32) -> Slot {
        let shift = if node.level + 1 == level { 0 } else { shift(node.level) };
        let address = ptr::from_ref(node).expose_provenance() as u64;
        Slot(address | u64::from(shift) << 1 | Self::CHILD)
    }

    /// A pointer to `block`.
    pub(super) fn block(block: NonNull<Block>) -> Slot {
        Slot(block.as_ptr().expose_provenance() as u64)
    }

    /// Of a child: the node.
    ///
    /// # Safety
    /// The word is a child that was read from a slot, and the node has not been freed and will not
    /// be during `'n`: it is reachable and the lock is held, or the call is part of a lookup that
    /// reclaiming waits for.
    #[inline]
    pub(super) unsafe fn node<'n>(self) -> &'n Node {
        // SAFETY: the word was made by `child` from a reference to a node on the heap, and the
        // caller vouches for its life. The acquire load of the word saw the node initialised.
        let node = unsafe { &*self.node_ptr() };
        node.touch();
        node
    }

    /// Of a child: where the node is.
    #[inline]
    pub(super) fn node_ptr(self) -> *mut Node {
        ptr::with_exposed_provenance_mut((self.0 & !127) as usize)
    }

    /// Of a block: the block. The pointer is valid to dereference under the terms of
    /// [`node`](Self::node).
    #[inline]
    pub(super) fn block_ptr(self) -> NonNull<Block> {
        let address = self.0 as usize;
        NonNull::new(ptr::with_exposed_provenance_mut(address))
            .expect("a slot holds no null pointer")
    }
}
