//! Unmapping: check that no mapping would be split, then do what cannot fail.

use ringfence_sync::atomic::AtomicU64;

use super::{
    node::Node,
    pages::Chain,
    slot::Slot,
    walk::{leaf_at, slots_of},
    writer::{SlotRef, Writer},
};
use crate::Range;

/// What was removed.
#[derive(Default)]
pub(super) struct Removed {
    pub(super) bytes: u128,
    pub(super) mappings: u64,
    pub(super) pages: Chain,
    /// The block that was retired last: slots that share a block follow one another.
    block: Option<Slot>,
}

impl Removed {
    fn leaf(&mut self, word: Slot, slot: Range) {
        self.bytes += slot.len();
        self.mappings += u64::from(word.starts());
    }

    fn retire_block(&mut self, word: Slot) {
        if self.block != Some(word) {
            self.block = Some(word);
            // SAFETY: the lock is held and no remaining slot will hold the block. All slots that
            // share it are visited one after the other, so this is the first time.
            unsafe { self.pages.push_block(word) };
        }
    }
}

/// The end of `span` at which a mapping would be split, if there is one.
pub(super) fn splits(root: &AtomicU64, span: Range) -> Option<u64> {
    // SAFETY: the lock is held.
    let (low, high) = unsafe { (leaf_at(root, span.first), leaf_at(root, span.last)) };
    if low.is_some_and(|leaf| leaf.span.first < span.first || !leaf.starts) {
        Some(span.first)
    } else if high.is_some_and(|leaf| leaf.span.last > span.last || !leaf.ends) {
        Some(span.last)
    } else {
        None
    }
}

/// The fast path for by far the commonest case: the range is one or more slots of a node, not all
/// of them, that hold leaves or nothing. `None`: nothing was done (a split is refused elsewhere).
#[inline(always)]
pub(super) fn quick(writer: &mut Writer, root: &AtomicU64, span: Range) -> Option<Removed> {
    // SAFETY: the lock is held.
    let part = unsafe { slots_of(root, span) }?;
    if part.are_all() {
        return None;
    }
    let (node, slots) = (part.node, part.indices());
    let (low, high) = (node.load(*slots.start()), node.load(*slots.end()));
    let splits = low.is_leaf() && !low.starts() || high.is_leaf() && !high.ends();
    if splits || !slots.clone().all(|at| node.load(at).is_empty() || node.load(at).is_leaf()) {
        return None;
    }
    let mut removed = Removed::default();
    let mut leaves = 0;
    for at in slots {
        let word = node.load(at);
        if word.is_leaf() {
            leaves += 1;
            removed.leaf(word, part.span_of(at));
            node.store(at, Slot::EMPTY);
        }
    }
    writer.drain(node, leaves);
    Some(removed)
}

/// Removes every mapping from `part`, some or all of the slot at `place`. The caller has checked
/// that this splits none.
pub(super) fn sweep(writer: &mut Writer, place: SlotRef<'_>, part: Range, removed: &mut Removed) {
    let word = place.load();
    if word.is_empty() {
    } else if word.is_leaf() {
        writer.set(place, Slot::EMPTY);
        removed.leaf(word, place.span);
    } else if word.is_block() {
        sweep_block(writer, place, part, removed);
    } else {
        // SAFETY: reachable, and the lock is held.
        let node = unsafe { word.node() };
        let span = node.span();
        if part.covers(span) {
            // Rule L41: all of the node's addresses are unmapped at once, so it goes.
            writer.set(place, Slot::EMPTY);
            discard(writer, node, removed);
        } else if node.live.get() > 0 && span.overlaps(part) {
            for at in node.indices(part) {
                let place = SlotRef::of(node, at);
                sweep(writer, place, part.clip(place.span), removed);
            }
        }
    }
}

fn sweep_block(writer: &mut Writer, place: SlotRef<'_>, part: Range, removed: &mut Removed) {
    let word = place.load();
    // SAFETY: reachable, and the lock is held.
    let block = unsafe { word.block_ptr().as_ref() };
    let mut stays = false;
    for record in block.records().iter().filter(|record| record.is_live()) {
        if record.span.overlaps(part) {
            removed.bytes += record.span.clip(place.span).len();
            removed.mappings += u64::from(record.span.first >= place.span.first);
        } else {
            stays = true;
        }
    }
    if !stays {
        writer.set(place, Slot::EMPTY);
        removed.retire_block(word);
    } else {
        for record in block.records().iter().filter(|record| record.span.overlaps(part)) {
            record.kill();
        }
    }
}

/// Counts and retires everything under a node that no slot points to any more. Its slots stay as
/// they are: readers may be in it.
fn discard(writer: &mut Writer, node: &Node, removed: &mut Removed) {
    if node.live.get() > 0 {
        for at in node.indices(node.span()) {
            let (word, slot) = (node.load(at), node.slot_span(at));
            if word.is_leaf() {
                removed.leaf(word, slot);
            } else if word.is_block() {
                // SAFETY: it was reachable until a moment ago, and the lock is held.
                let block = unsafe { word.block_ptr().as_ref() };
                for record in block.records().iter().filter(|record| record.is_live()) {
                    removed.bytes += record.span.clip(slot).len();
                    removed.mappings += u64::from(record.span.first >= slot.first);
                }
                removed.retire_block(word);
            } else if word.is_child() {
                // SAFETY: as above.
                discard(writer, unsafe { word.node() }, removed);
            }
        }
    }
    writer.retire(node, &mut removed.pages);
}
