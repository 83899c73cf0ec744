//! Mapping: check that it fits and what it needs, allocate that, then do what cannot fail.

use alloc::boxed::Box;
use core::ptr::NonNull;

use arrayvec::ArrayVec;
use ringfence_sync::atomic::AtomicU64;

use super::{
    Mapping,
    node::{Block, Node, Record},
    pages::Chain,
    slot::{FANOUT, ROOT_LEVEL, Slot, delta, index, shift},
    walk::{first_mapped, slots_of},
    writer::{SlotRef, Writer},
};
use crate::Range;

/// How many nodes a map may need: two per level, for its two ends.
const NODES: usize = 2 * ROOT_LEVEL as usize;

/// What a map will need, found by a dry run.
#[derive(Default)]
pub(super) struct Need {
    nodes: usize,
    /// The records of each new block for a page that the mapping covers in part.
    parts: ArrayVec<usize, 2>,
    /// Whether slots will share a block, because leaves cannot hold the difference.
    shared: bool,
}

impl Need {
    /// What it counts against the table's limit.
    pub(super) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().map(|&records| Block::bytes_for(records)).sum::<u64>();
        let shared = if self.shared { Block::bytes_for(1) } else { 0 };
        self.nodes as u64 * Node::BYTES + parts + shared
    }

    /// Allocates it all; `None` if there is no memory.
    pub(super) fn allocate(&self, mapping: &Mapping) -> Option<Stock> {
        let mut stock = Stock::default();
        for _ in 0..self.nodes {
            stock.nodes.push(Node::new()?);
        }
        for &records in &self.parts {
            stock.parts.push(Block::new(records)?);
        }
        if self.shared {
            let mut block = Block::new(1)?;
            block.fill(&[], record(mapping));
            stock.shared = Some(link(block));
        }
        Some(stock)
    }
}

/// What a map needs, allocated.
#[derive(Default)]
pub(super) struct Stock {
    nodes: ArrayVec<Box<Node>, NODES>,
    parts: ArrayVec<Box<Block>, 2>,
    shared: Option<NonNull<Block>>,
}

/// Hands a block over to the tree.
fn link(block: Box<Block>) -> NonNull<Block> {
    NonNull::from(Box::leak(block))
}

fn record(mapping: &Mapping) -> Record {
    Record::new(mapping.range, delta(mapping), mapping.prot)
}

/// The level of the node to make for `part` of a mapping in an empty slot: the lowest that contains
/// it, or the next if the part fills that node and so is one slot of the next.
fn level_for(part: Range) -> u32 {
    let level = part.level();
    if part == Range::of_node(level, part.first) { level + 1 } else { level }
}

/// How a map continues below a slot of which it covers a part.
enum Step<'t> {
    /// Into the existing node.
    Into(&'t Node),
    /// By a new node that replaces what is there: nothing, or a node without mappings.
    New { level: u32, old: Option<&'t Node> },
    /// By a new node above the existing one, which becomes its child.
    Above { level: u32, old: &'t Node },
}

/// Decides that, for the rehearsal and for the real map alike. The slot holds no leaf or block.
fn step<'t>(word: Slot, part: Range) -> Step<'t> {
    if word.is_empty() {
        return Step::New { level: level_for(part), old: None };
    }
    // SAFETY: reachable, and the lock is held.
    let node = unsafe { word.node() };
    let span = node.span();
    if part.covers(span) {
        Step::New { level: level_for(part), old: Some(node) }
    } else if span.covers(part) {
        Step::Into(node)
    } else {
        Step::Above { level: span.hull(part).level(), old: node }
    }
}

/// Adds to `need` what it takes to map `part`, some or all of a slot of `level` that holds `word`.
/// Fails with the first address in it that is already mapped.
pub(super) fn rehearse(
    word: Slot,
    level: u32,
    part: Range,
    fits: bool,
    need: &mut Need,
) -> Result<(), u64> {
    // SAFETY: the lock is held.
    let mapped = |word| unsafe { first_mapped(word, level, part) };
    if part == Range::of_slot(level, part.first) {
        need.shared |= !fits;
        return mapped(word).map_or(Ok(()), Err);
    }
    if level == 0 || word.is_leaf() || word.is_block() {
        if let Some(at) = mapped(word) {
            return Err(at);
        }
        need.parts.push(1 + living(word));
        return Ok(());
    }
    let (new_level, carried) = match step(word, part) {
        Step::Into(node) => {
            for at in node.indices(part) {
                let part = part.clip(node.slot_span(at));
                rehearse(node.load(at), node.level, part, fits, need)?;
            }
            return Ok(());
        }
        Step::New { level, old } => {
            // Only an old node without mappings is replaced.
            if let Some(at) = old.and_then(|_| mapped(word)) {
                return Err(at);
            }
            (level, None)
        }
        Step::Above { level, old } => (level, Some(old)),
    };
    need.nodes += 1;
    // The slots of the node to be made: empty, except the one for the old node below it.
    for at in index(new_level, part.first)..=index(new_level, part.last) {
        let slot = slot_in(new_level, part, at);
        let word = match carried {
            Some(node) if slot.covers(node.span()) => Slot::child(node, new_level),
            _ => Slot::EMPTY,
        };
        rehearse(word, new_level, part.clip(slot), fits, need)?;
    }
    Ok(())
}

/// What slot `at` stands for in the node of `level` that contains `part`.
fn slot_in(level: u32, part: Range, at: usize) -> Range {
    let base = Range::of_node(level, part.first).first;
    Range::of_slot(level, base | (at as u64) << shift(level))
}

/// How many live records the block of a slot has.
fn living(word: Slot) -> usize {
    if word.is_empty() {
        return 0;
    }
    // SAFETY: reachable, and the lock is held.
    let block = unsafe { word.block_ptr().as_ref() };
    block.records().iter().filter(|record| record.is_live()).count()
}

/// The fast path for by far the commonest case: the range is one or more slots of an existing node,
/// all of them empty, and leaves can hold the difference. False: nothing was done.
#[inline(always)]
pub(super) fn quick(writer: &mut Writer, root: &AtomicU64, mapping: &Mapping) -> bool {
    let span = mapping.range;
    // SAFETY: the lock is held.
    let Some(part) = (unsafe { slots_of(root, span) }) else { return false };
    let (node, slots) = (part.node, part.indices());
    // A whole node is one slot of the next level up.
    if !Slot::fits(delta(mapping))
        || part.are_all()
        || !slots.clone().all(|at| node.load(at).is_empty())
    {
        return false;
    }
    writer.fill(node, 1 + (slots.end() - slots.start()) as u32);
    for at in slots {
        node.store(at, Slot::leaf(part.span_of(at), mapping));
    }
    true
}

/// Puts a mapping into the tree, step by step as it was rehearsed.
pub(super) struct Commit<'w> {
    pub(super) writer: &'w mut Writer,
    pub(super) mapping: Mapping,
    pub(super) stock: Stock,
    /// Collects what is replaced.
    pub(super) pages: Chain,
}

impl Commit<'_> {
    /// Maps `part`, some or all of the slot at `place`.
    pub(super) fn put(&mut self, place: SlotRef<'_>, part: Range) {
        let word = place.load();
        if part == place.span {
            let new = match self.stock.shared {
                Some(block) => Slot::block(block),
                None => Slot::leaf(part, &self.mapping),
            };
            self.writer.set(place, new);
            self.clear_away(word);
        } else if place.level() == 0 {
            let mut block = self.stock.parts.remove(0);
            if word.is_empty() {
                block.fill(&[], record(&self.mapping));
            } else {
                // SAFETY: reachable, and the lock is held.
                let old = unsafe { word.block_ptr().as_ref() };
                block.fill(old.records(), record(&self.mapping));
            }
            self.writer.set(place, Slot::block(link(block)));
            if !word.is_empty() {
                // SAFETY: no slot holds it any more: a block with live records beside a mapping's
                // part of a page belongs to that page alone.
                unsafe { self.pages.push_block(word) };
            }
        } else {
            let node = match step(word, part) {
                Step::Into(node) => node,
                Step::New { level, .. } => {
                    let node = self.node(level, part);
                    self.writer.link(place, node);
                    self.clear_away(word);
                    node
                }
                Step::Above { level, old } => {
                    let node = self.node(level, part);
                    let at = index(level, old.span().first);
                    // Before readers can get there, so that they reach `old` one way or the other.
                    self.writer.link(SlotRef::of(node, at), old);
                    self.writer.link(place, node);
                    node
                }
            };
            for at in node.indices(part) {
                let place = SlotRef::of(node, at);
                self.put(place, part.clip(place.span));
            }
        }
    }

    fn node<'t>(&mut self, level: u32, part: Range) -> &'t Node {
        let node = self.stock.nodes.pop().expect("the rehearsal counted the nodes");
        self.writer.adopt(node, level, part.first)
    }

    /// Retires what a slot held before it was changed: nothing, or nodes without mappings.
    fn clear_away(&mut self, word: Slot) {
        if !word.is_child() {
            return;
        }
        // SAFETY: it was reachable until a moment ago, and the lock is held.
        let node = unsafe { word.node() };
        if node.live.get() > 0 {
            for at in 0..FANOUT {
                self.clear_away(node.load(at));
            }
        }
        self.writer.retire(node, &mut self.pages);
    }
}
