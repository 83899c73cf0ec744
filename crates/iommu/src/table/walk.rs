//! Reading the tree: by lookups without a lock, by the writer under it.

use ringfence_sync::atomic::{AtomicU64, Ordering};

use super::{
    Translation,
    node::Node,
    slot::{FANOUT, RADIX_BITS, ROOT_LEVEL, Slot, index, shift},
};
use crate::{Prot, Range};

/// What a slot holds for an address: a leaf, or the record of a block.
#[derive(Clone, Copy)]
pub(super) struct Leaf {
    /// The slot's addresses, or all of the record's mapping.
    pub(super) span: Range,
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
        Translation { range: self.span, delta: self.delta, prot: self.prot }
    }

    /// Whether two leaves have the same difference and permission.
    #[inline]
    fn joins(&self, other: &Leaf) -> bool {
        self.delta == other.delta && self.prot == other.prot
    }
}

/// What a slot that holds no child holds for `address`.
#[inline]
fn leaf_of(word: Slot, shift: u32, address: u64) -> Option<Leaf> {
    if word.is_leaf() {
        return Some(Leaf {
            span: Range::around(address, shift),
            delta: word.delta(),
            prot: word.prot(),
            starts: word.starts(),
            ends: word.ends(),
        });
    }
    if word.is_empty() { None } else { record_of(word, address) }
}

/// What a block holds for `address`: rare, so it is kept out of the walk.
#[cold]
fn record_of(word: Slot, address: u64) -> Option<Leaf> {
    // SAFETY: read from a slot by a lookup or by the writer, as in `leaf_at`.
    let block = unsafe { word.block_ptr().as_ref() };
    let (record, prot) = block.find(address)?;
    Some(Leaf { span: record.span, delta: record.delta, prot, starts: true, ends: true })
}

/// Where a walk ends: a slot that holds no child.
struct End<'n> {
    word: Slot,
    shift: u32,
    /// The node that has the slot; `None` for the root slot, and if no node contains the address.
    node: Option<&'n Node>,
}

impl End<'_> {
    const NOWHERE: End<'static> = End { word: Slot::EMPTY, shift: 0, node: None };
}

/// The leaf or record that holds `address`.
///
/// # Safety
/// The lock is held, or the call is part of a lookup that reclaiming waits for.
#[inline(always)]
pub(super) unsafe fn leaf_at(root: &AtomicU64, address: u64) -> Option<Leaf> {
    // SAFETY: the caller's promise.
    let end = unsafe { end_at(root, address) };
    leaf_of(end.word, end.shift, address)
}

/// The slot where the walk to `address` ends.
///
/// The three lowest levels are written out for the commonest case, without skips among them. The
/// shifts are then constants, and the index into a node is computed while the word that points to
/// it is still being loaded.
///
/// # Safety
/// As [`leaf_at`].
#[inline(always)]
unsafe fn end_at<'n>(root: &AtomicU64, address: u64) -> End<'n> {
    // SAFETY: it was reachable a moment ago; the caller promises that it is not freed meanwhile.
    let enter = |word: Slot| unsafe { word.node::<'n>() };
    // SAFETY: the caller's promise.
    let walk_on = |node, word, shift| unsafe { walk_on(node, word, shift, address) };
    // Every load is Acquire and pairs with the Release store of `Writer::set`: the node behind a
    // pointer is seen initialised.
    let mut word = Slot(root.load(Ordering::Acquire));
    let mut top = shift(ROOT_LEVEL);
    let mut node: Option<&'n Node> = None;
    let mut inner;
    loop {
        if !word.is_child() {
            return End { word, shift: top, node };
        }
        inner = enter(word);
        node = Some(inner);
        if word.skip() == 0 {
            top -= RADIX_BITS;
        } else {
            top = word.skip();
            if !node_has(inner, top, address) {
                return End::NOWHERE;
            }
        }
        if top <= shift(2) {
            break;
        }
        word = inner.load((address >> top) as usize & (FANOUT - 1));
    }
    if top == shift(2) {
        let word = inner.load(index(2, address));
        if !word.is_next() {
            return walk_on(inner, word, shift(2));
        }
        inner = enter(word);
    }
    if top >= shift(1) {
        let word = inner.load(index(1, address));
        if !word.is_next() {
            return walk_on(inner, word, shift(1));
        }
        inner = enter(word);
    }
    End { word: inner.load(index(0, address)), shift: shift(0), node: Some(inner) }
}

/// Whether the node contains `address`; `shift` is from the word that points to the node. Needed
/// where levels were skipped, as the walk has not compared those bits.
#[inline]
fn node_has(node: &Node, shift: u32, address: u64) -> bool {
    (address ^ node.base) >> shift < FANOUT as u64
}

/// The rest of the walk from a slot of `node`, of `shift`, that holds `word`.
///
/// # Safety
/// As [`leaf_at`].
#[inline(always)]
unsafe fn walk_on<'n>(node: &'n Node, word: Slot, shift: u32, address: u64) -> End<'n> {
    if word.is_child() {
        // SAFETY: the caller's promise.
        unsafe { walk_down(word, shift, address) }
    } else {
        End { word, shift, node: Some(node) }
    }
}

/// The walk for any tree, from a child on.
///
/// # Safety
/// As [`leaf_at`].
#[inline(never)]
unsafe fn walk_down<'n>(mut word: Slot, mut shift: u32, address: u64) -> End<'n> {
    let mut node = None;
    while word.is_child() {
        // SAFETY: it was reachable a moment ago; the caller promises that it is not freed
        // meanwhile.
        let inner = unsafe { word.node::<'n>() };
        shift = if word.skip() == 0 { shift - RADIX_BITS } else { word.skip() };
        if word.skip() != 0 && !node_has(inner, shift, address) {
            return End::NOWHERE;
        }
        word = inner.load((address >> shift) as usize & (FANOUT - 1));
        node = Some(inner);
    }
    End { word, shift, node }
}

/// The longest run around `address` with one difference and one permission, looked for in `within`.
///
/// # Safety
/// As [`leaf_at`].
#[inline]
pub(super) unsafe fn run_at(root: &AtomicU64, address: u64, within: Range) -> Option<Leaf> {
    // SAFETY: the caller's promise.
    let end = unsafe { end_at(root, address) };
    let mut run = leaf_of(end.word, end.shift, address)?;
    if within.first >= run.span.first && within.last <= run.span.last {
        return Some(run);
    }
    // SAFETY: the caller's promise.
    let look = |address| unsafe { leaf_at(root, address) };
    let (mut down, mut up) = (true, true);
    if let (Some(node), true) = (end.node, end.word.is_leaf()) {
        (run.span, down, up) = run_in(node, end.word, address, within.hull(run.span));
    }
    while up && run.span.last < within.last {
        match look(run.span.last + 1) {
            Some(next) if next.joins(&run) => run.span.last = next.span.last,
            _ => break,
        }
    }
    while down && run.span.first > within.first {
        match look(run.span.first - 1) {
            Some(next) if next.joins(&run) => run.span.first = next.span.first,
            _ => break,
        }
    }
    Some(run)
}

/// The slots of `node` around the one of `address`, which holds the leaf `word`, that hold the
/// same; and whether the run may continue below and above, in another node or in a block.
#[inline]
fn run_in(node: &Node, word: Slot, address: u64, within: Range) -> (Range, bool, bool) {
    let inside = node.indices(within);
    let (mut first, mut last) = (index(node.level, address), index(node.level, address));
    let mut down = Slot::EMPTY;
    while first > *inside.start() {
        down = node.load(first - 1);
        if !down.is_like(word) {
            break;
        }
        first -= 1;
    }
    let mut up = Slot::EMPTY;
    while last < *inside.end() {
        up = node.load(last + 1);
        if !up.is_like(word) {
            break;
        }
        last += 1;
    }
    let ends = |slot: Slot| slot.is_leaf() || slot.is_empty();
    (
        node.slot_span(first).hull(node.slot_span(last)),
        first == 0 || !ends(down),
        last == FANOUT - 1 || !ends(up),
    )
}

/// The lowest mapped address of `within` under a slot of `level` that holds `word`.
/// `within` overlaps the slot's addresses.
///
/// # Safety
/// The lock is held.
pub(super) unsafe fn first_mapped(word: Slot, level: u32, within: Range) -> Option<u64> {
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
        debug_assert!(node.level < level);
        if node.live.get() == 0 || !node.span().overlaps(within) {
            return None;
        }
        node.indices(within).find_map(|at| {
            let word = node.load(at);
            if word.is_empty() {
                return None;
            }
            // SAFETY: as above.
            unsafe { first_mapped(word, node.level, within.clip(node.slot_span(at))) }
        })
    }
}

/// Adjacent slots of a node.
///
/// What they stand for follows from the walk to the node. The node's header lies apart from its
/// slots, so that reading it first would wait for memory twice.
pub(super) struct Slots<'n> {
    pub(super) node: &'n Node,
    shift: u32,
    span: Range,
}

impl Slots<'_> {
    /// Which slots of the node they are.
    #[inline]
    pub(super) fn indices(&self) -> core::ops::RangeInclusive<usize> {
        let index = |address| (address >> self.shift) as usize & (FANOUT - 1);
        index(self.span.first)..=index(self.span.last)
    }

    /// Whether they are all slots of the node.
    #[inline]
    pub(super) fn are_all(&self) -> bool {
        self.span == self.node_span()
    }

    /// What the slot at an index of the node stands for.
    #[inline]
    pub(super) fn span_of(&self, at: usize) -> Range {
        Range::around(self.node_span().first | (at as u64) << self.shift, self.shift)
    }

    #[inline]
    fn node_span(&self) -> Range {
        Range::around(self.span.first, self.shift + RADIX_BITS)
    }
}

/// The slots that `span` consists of, if it does: slots of the deepest node that contains it, one
/// or more. `None` if the walk ends before that node.
///
/// # Safety
/// The lock is held.
#[inline]
pub(super) unsafe fn slots_of<'n>(root: &AtomicU64, span: Range) -> Option<Slots<'n>> {
    // Ordering: the lock orders it.
    let mut word = Slot(root.load(Ordering::Acquire));
    let differ = span.first ^ span.last;
    let mut shift = shift(ROOT_LEVEL);
    while word.is_child() {
        // SAFETY: reachable, and the lock is held.
        let node = unsafe { word.node() };
        let mut outside = 0;
        if word.skip() == 0 {
            shift -= RADIX_BITS;
        } else {
            shift = word.skip();
            outside = span.first ^ node.base;
        }
        debug_assert_eq!(shift, super::slot::shift(node.level));
        if (outside | differ) >> shift >= FANOUT as u64 {
            return None;
        }
        let slot = (1 << shift) - 1;
        if differ >= slot {
            let aligned = span.first & slot == 0 && span.last & slot == slot;
            return aligned.then_some(Slots { node, shift, span });
        }
        word = node.load((span.first >> shift) as usize & (FANOUT - 1));
    }
    None
}
