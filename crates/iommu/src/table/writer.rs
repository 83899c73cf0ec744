//! Linking and unlinking, with the accounting: only for the holder of the lock.

use alloc::boxed::Box;
use core::ptr;

use ringfence_sync::atomic::{AtomicU64, Ordering};

use super::{
    node::Node,
    pages::Chain,
    slot::{FANOUT, ROOT_LEVEL, Slot, index},
};
use crate::Range;

/// One slot of the tree.
#[derive(Clone, Copy)]
pub(super) struct SlotRef<'t> {
    slot: &'t AtomicU64,
    /// The node the slot is in; `None` for the root slot.
    node: Option<&'t Node>,
    /// What the slot stands for.
    pub(super) span: Range,
}

impl<'t> SlotRef<'t> {
    pub(super) fn root(root: &'t AtomicU64) -> SlotRef<'t> {
        SlotRef { slot: root, node: None, span: Range::ALL }
    }

    pub(super) fn of(node: &'t Node, at: usize) -> SlotRef<'t> {
        SlotRef { slot: node.slot(at), node: Some(node), span: node.slot_span(at) }
    }

    // Ordering: the lock orders it.
    pub(super) fn load(&self) -> Slot {
        Slot(self.slot.load(Ordering::Acquire))
    }

    /// The level of the node the slot is in.
    pub(super) fn level(&self) -> u32 {
        self.node.map_or(ROOT_LEVEL, |node| node.level)
    }

    /// The slot that points to `node`.
    fn that_holds(node: &Node, root: &'t AtomicU64) -> SlotRef<'t> {
        // SAFETY: the node is linked, so its parent is, and the lock is held.
        match unsafe { node.parent.get().as_ref() } {
            None => SlotRef::root(root),
            Some(parent) => SlotRef::of(parent, index(parent.level, node.base)),
        }
    }
}

/// The writer's own state: what the lock protects, besides the cells of all linked nodes.
pub(super) struct Writer {
    /// The nodes that have no slot in use, linked through `before` and `after`.
    empties: *const Node,
    /// How many mappings are allowed: the table's limit, or what it has taken from a budget.
    pub(super) granted: u64,
}

// SAFETY: the nodes belong to the tree, and the writer moves from thread to thread with the lock.
unsafe impl Send for Writer {}

impl Writer {
    pub(super) fn new(granted: u64) -> Writer {
        Writer { empties: ptr::null(), granted }
    }

    /// Changes one slot. Every change becomes visible to readers here.
    #[inline]
    pub(super) fn set(&mut self, place: SlotRef<'_>, word: Slot) {
        if let Some(node) = place.node {
            match (place.load().is_empty(), word.is_empty()) {
                (true, false) => self.fill(node, 1),
                (false, true) => self.drain(node, 1),
                _ => {}
            }
        }
        // Release: a reader that sees the word sees the node or block behind it.
        place.slot.store(word.0, Ordering::Release);
    }

    /// Counts `slots` more slots of a node as in use.
    #[inline]
    pub(super) fn fill(&mut self, node: &Node, slots: u32) {
        if node.live.get() == 0 {
            self.forget_empty(node);
        }
        node.live.set(node.live.get() + slots);
    }

    /// Counts `slots` slots of a node as no longer in use.
    #[inline]
    pub(super) fn drain(&mut self, node: &Node, slots: u32) {
        node.live.set(node.live.get() - slots);
        if node.live.get() == 0 && slots > 0 {
            self.note_empty(node);
        }
    }

    fn note_empty(&mut self, node: &Node) {
        node.before.set(ptr::null());
        node.after.set(self.empties);
        // SAFETY: the nodes on the list are linked, and the lock is held.
        if let Some(after) = unsafe { self.empties.as_ref() } {
            after.before.set(node);
        }
        self.empties = node;
    }

    fn forget_empty(&mut self, node: &Node) {
        // SAFETY: as above, for both neighbours.
        let (before, after) = unsafe { (node.before.get().as_ref(), node.after.get().as_ref()) };
        if let Some(after) = after {
            after.before.set(node.before.get());
        }
        match before {
            Some(before) => before.after.set(node.after.get()),
            None => self.empties = node.after.get(),
        }
    }

    /// Turns `node` into one of `level` around `address`, not linked yet, with no slot in use.
    pub(super) fn adopt<'t>(&mut self, node: Box<Node>, level: u32, address: u64) -> &'t Node {
        let node = node.place(level, address);
        self.note_empty(node);
        node
    }

    /// Makes a slot point to `node`, which is new or is being moved.
    pub(super) fn link(&mut self, place: SlotRef<'_>, node: &Node) {
        node.parent.set(place.node.map_or(ptr::null(), ptr::from_ref));
        self.set(place, Slot::child(node, place.level()));
    }

    /// Puts a node that no slot points to any more on a list.
    pub(super) fn retire(&mut self, node: &Node, pages: &mut Chain) {
        if node.live.get() == 0 {
            self.forget_empty(node);
        }
        pages.push_node(node);
    }

    /// Unlinks every empty node, those that become empty thereby, and those left with one child,
    /// which takes their place.
    pub(super) fn scavenge(&mut self, root: &AtomicU64, pages: &mut Chain) {
        // SAFETY: the nodes on the list are linked, and the lock is held.
        while let Some(node) = unsafe { self.empties.as_ref() } {
            let place = SlotRef::that_holds(node, root);
            self.set(place, Slot::EMPTY);
            self.retire(node, pages);
            if let Some(parent) = place.node.filter(|parent| parent.live.get() == 1) {
                self.shorten(parent, root, pages);
            }
        }
    }

    /// Removes a node that has only one slot in use, if that slot holds a child.
    fn shorten(&mut self, node: &Node, root: &AtomicU64, pages: &mut Chain) {
        let only = (0..FANOUT).map(|at| node.load(at)).find(|word| !word.is_empty());
        if let Some(word) = only.filter(|word| word.is_child()) {
            // SAFETY: reachable, and the lock is held.
            let child = unsafe { word.node() };
            self.link(SlotRef::that_holds(node, root), child);
            self.retire(node, pages);
        }
    }
}
