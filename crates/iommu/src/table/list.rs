//! Listing the mappings of the tree, many at a time.

use alloc::vec::Vec;

use super::{Mapping, slot::Slot};
use crate::{Prot, Range};

/// Collects mappings in ascending order, starting at the first address of one.
pub(super) struct List<'a> {
    into: &'a mut Vec<Mapping>,
    /// The mapping whose end has not been reached yet: its first address, difference and
    /// permission.
    open: Option<(u64, u64, Prot)>,
}

impl List<'_> {
    /// A list that ends when `into` is at its capacity.
    pub(super) fn new(into: &mut Vec<Mapping>) -> List<'_> {
        List { into, open: None }
    }

    fn is_full(&self) -> bool {
        self.into.len() == self.into.capacity()
    }

    fn push(&mut self, span: Range, delta: u64, prot: Prot) {
        let target = span.first.wrapping_add(delta);
        self.into.push(Mapping { range: span, target, prot });
    }

    /// Adds the mappings that end in `within`, in the slot that stands for `slot` and holds `word`.
    ///
    /// # Safety
    /// The lock is held.
    pub(super) unsafe fn visit(&mut self, word: Slot, slot: Range, within: Range) {
        if word.is_empty() || self.is_full() {
        } else if word.is_leaf() {
            if word.starts() {
                self.open = Some((slot.first, word.delta(), word.prot()));
            }
            if word.ends()
                && let Some((first, delta, prot)) = self.open.take()
            {
                self.push(Range { first, last: slot.last }, delta, prot);
            }
        } else if word.is_block() {
            // SAFETY: reachable, and the lock is held.
            let block = unsafe { word.block_ptr().as_ref() };
            for record in block.records() {
                // Several slots may hold records of one mapping: it is counted where it begins, or
                // at its end if it began with a leaf.
                let first = record.span.first;
                let counts = first >= within.first.max(slot.first)
                    || self.open.is_some_and(|(open, ..)| open == first);
                if let (true, Some(prot), false) = (counts, record.prot(), self.is_full()) {
                    self.open = None;
                    self.push(record.span, record.delta, prot);
                }
            }
        } else {
            // SAFETY: reachable, and the lock is held.
            let node = unsafe { word.node() };
            if node.live.get() > 0 && node.span().overlaps(within) {
                for at in node.indices(within) {
                    // SAFETY: the caller's promise.
                    unsafe { self.visit(node.load(at), node.slot_span(at), within) };
                    if self.is_full() {
                        return;
                    }
                }
            }
        }
    }
}
