//! Reading the tree: by lookups without a lock, by the writer under it.

use ringfence_sync::atomic::{AtomicU64, Ordering};

use super::{
    Translation,
    node::Node,
    slot::{FANOUT, RADIX_BITS, ROOT_LEVEL, Slot, Span, index, shift},
};
use crate::Prot;

/// What a slot says about an address: a leaf, or the record of a block.
#[derive(Clone, Copy)]
pub(super) struct Leaf {
    /// The slot's addresses, or all of the record's mapping.
    pub(super) span: Span,
    pub(super) delta: u64,
    pub(super) prot: Prot,
    /// Whether a mapping begins with `span`.
    pub(super) starts: bool,
    /// Whether a mapping ends with `span`.
    pub(super) ends: bool,
}

impl Leaf {
    #[inline]
    pub(super) fn translation(self) -> Translation {
        Translation { range: self.span.range(), delta: self.delta, prot: self.prot }
    }

    /// Whether two leaves lead on from each other.
    #[inline]
    fn joins(&self, other: &Leaf) -> bool {
        self.delta == other.delta && self.prot == other.prot
    }
}

/// What the content of a slot that is no child says about `address`.
#[inline]
fn leaf_of(word: Slot, shift: u32, address: u64) -> Option<Leaf> {
    if word.is_leaf() {
        return Some(Leaf {
            span: Span::around(address, shift),
            delta: word.delta(),
            prot: word.prot(),
            starts: word.starts(),
            ends: word.ends(),
        });
    }
    if word.is_empty() { None } else { record_of(word, address) }
}

/// What a block says about `address`: rare, so it is kept out of the walk.
#[cold]
fn record_of(word: Slot, address: u64) -> Option<Leaf> {
    // SAFETY: read from a slot by a lookup or by the writer, as in `leaf_at`.
    let block = unsafe { word.block_ptr().as_ref() };
    let (record, prot) = block.find(address)?;
    Some(Leaf { span: record.span, delta: record.delta, prot, starts: true, ends: true })
}

/// The leaf or record that holds `address`.
///
/// The three lowest levels are written out for the commonest case, that nothing skips among them. The
/// shifts are then constants, and the index into a node is computed while the word that leads to it
/// is still on its way.
///
/// # Safety
/// The lock is held, or the call is part of a lookup that reclaiming waits for.
#[inline(always)]
pub(super) unsafe fn leaf_at(root: &AtomicU64, address: u64) -> Option<Leaf> {
    // SAFETY: reachable a moment ago; the caller promises that it is not freed meanwhile.
    let enter = |word: Slot| unsafe { word.node() };
    // SAFETY: the caller's promise.
    let walk_on = |word, shift| unsafe { walk_on(word, shift, address) };
    // Every load is Acquire and pairs with the Release store of `Writer::set`: the node that a
    // pointer leads to is seen as it was made.
    let mut word = Slot(root.load(Ordering::Acquire));
    let mut top = shift(ROOT_LEVEL);
    let mut node;
    loop {
        if !word.is_child() {
            return leaf_of(word, top, address);
        }
        node = enter(word);
        if word.skip() == 0 {
            top -= RADIX_BITS;
        } else {
            top = word.skip();
            if !node_has(node, top, address) {
                return None;
            }
        }
        if top <= shift(2) {
            break;
        }
        word = node.load((address >> top) as usize & (FANOUT - 1));
    }
    if top == shift(2) {
        let word = node.load(index(2, address));
        if !word.is_next() {
            return walk_on(word, shift(2));
        }
        node = enter(word);
    }
    if top >= shift(1) {
        let word = node.load(index(1, address));
        if !word.is_next() {
            return walk_on(word, shift(1));
        }
        node = enter(word);
    }
    leaf_of(node.load(index(0, address)), shift(0), address)
}

/// Whether `address` is one of the node's, whose shift the word that led there told: what must be
/// asked after levels were left out, as nothing on the way has compared those bits.
#[inline]
fn node_has(node: &Node, shift: u32, address: u64) -> bool {
    (address ^ node.base()) >> shift < FANOUT as u64
}

/// The rest of the walk from a slot of `shift` that holds `word`.
///
/// # Safety
/// As [`leaf_at`].
#[inline(always)]
unsafe fn walk_on(word: Slot, shift: u32, address: u64) -> Option<Leaf> {
    if word.is_child() {
        // SAFETY: the caller's promise.
        unsafe { walk_down(word, shift, address) }
    } else {
        leaf_of(word, shift, address)
    }
}

/// The walk for every tree there can be.
///
/// # Safety
/// As [`leaf_at`].
#[inline(never)]
unsafe fn walk_down(mut word: Slot, mut shift: u32, address: u64) -> Option<Leaf> {
    while word.is_child() {
        // SAFETY: reachable a moment ago; the caller promises that it is not freed meanwhile.
        let node = unsafe { word.node() };
        shift = if word.skip() == 0 { shift - RADIX_BITS } else { word.skip() };
        if word.skip() != 0 && !node_has(node, shift, address) {
            return None;
        }
        word = node.load((address >> shift) as usize & (FANOUT - 1));
    }
    leaf_of(word, shift, address)
}

/// The longest run around `address` with one difference and one permission, looked for in `within`.
///
/// # Safety
/// As [`leaf_at`].
pub(super) unsafe fn run_at(root: &AtomicU64, address: u64, within: Span) -> Option<Leaf> {
    // SAFETY: the caller's promise.
    let look = |address| unsafe { leaf_at(root, address) };
    let mut run = look(address)?;
    while run.span.last < within.last {
        match look(run.span.last + 1) {
            Some(next) if next.joins(&run) => run.span.last = next.span.last,
            _ => break,
        }
    }
    while run.span.first > within.first {
        match look(run.span.first - 1) {
            Some(next) if next.joins(&run) => run.span.first = next.span.first,
            _ => break,
        }
    }
    Some(run)
}

/// The lowest mapped address of `within` under a slot of `level` that holds `word`.
/// `within` overlaps the slot's addresses.
///
/// # Safety
/// The lock is held.
pub(super) unsafe fn first_mapped(word: Slot, level: u32, within: Span) -> Option<u64> {
    if word.is_empty() {
        None
    } else if word.is_leaf() {
        Some(within.first)
    } else if word.is_block() {
        // SAFETY: reachable, and the lock is held.
        let block = unsafe { word.block_ptr().as_ref() };
        let records = block.records();
        let from = records.partition_point(|record| record.span.last < within.first);
        let first = records[from..].iter().find(|record| record.is_live())?.span.first;
        (first <= within.last).then_some(first.max(within.first))
    } else {
        // SAFETY: reachable, and the lock is held.
        let node = unsafe { word.node() };
        debug_assert!(node.level() < level);
        if node.live.get() == 0 || !node.span().overlaps(within) {
            return None;
        }
        node.indices(within).find_map(|at| {
            let word = node.load(at);
            if word.is_empty() {
                return None;
            }
            // SAFETY: as above.
            unsafe { first_mapped(word, node.level(), within.clip(node.slot_span(at))) }
        })
    }
}

/// The node whose slots `span` is made of, if there is one: the deepest that has all of it, if the
/// span has more than one of its slots or exactly one. `None` where the walk ends before.
///
/// # Safety
/// The lock is held.
#[inline]
pub(super) unsafe fn node_of<'n>(root: &AtomicU64, span: Span) -> Option<&'n Node> {
    let mut word = Slot(root.load(Ordering::Acquire));
    let differ = span.first ^ span.last;
    while word.is_child() {
        // SAFETY: reachable, and the lock is held.
        let node = unsafe { word.node() };
        let shift = shift(node.level());
        let outside = if word.skip() != 0 { span.first ^ node.base() } else { 0 };
        if (outside | differ) >> shift >= FANOUT as u64 {
            return None;
        }
        let slot = (1 << shift) - 1;
        if differ >= slot {
            let aligned = span.first & slot == 0 && span.last & slot == slot;
            return aligned.then_some(node);
        }
        word = node.load(index(node.level(), span.first));
    }
    None
}
