//! One 64-bit word of the tree: what it encodes, and the arithmetic of levels.

use super::Mapping;
use crate::{Prot, Range};

/// log2 of the bytes that a slot of a level-0 node stands for. The model checker explores a tree of
/// the same height order over a far smaller one: 256 "pages" of 2^56 bytes in nodes of four slots.
pub(super) const PAGE_BITS: u32 = if cfg!(loom) { 56 } else { 12 };
/// log2 of the slots of a node.
pub(super) const RADIX_BITS: u32 = if cfg!(loom) { 2 } else { 9 };
/// The slots of a node.
pub(super) const FANOUT: usize = 1 << RADIX_BITS;
/// The level of the root slot: one above the highest node.
pub(super) const ROOT_LEVEL: u32 = (64 - PAGE_BITS).div_ceil(RADIX_BITS);

/// The low bits of a leaf that are not part of the difference.
const FLAGS: u64 = 0xfff;

const _: () = assert!(Prot::all().bits() < 8, "a leaf has three bits for permissions");

/// log2 of the bytes that a slot of a node of `level` stands for.
#[inline]
pub(super) const fn shift(level: u32) -> u32 {
    PAGE_BITS + RADIX_BITS * level
}

/// Which slot of a node of `level` stands for `address`.
#[inline]
pub(super) const fn index(level: u32, address: u64) -> usize {
    (address >> shift(level)) as usize & (FANOUT - 1)
}

/// The ranges of a tree.
impl Range {
    /// The 2^`bits` addresses, so aligned, around `address`.
    #[inline]
    pub(super) const fn around(address: u64, bits: u32) -> Range {
        let low = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
        Range { first: address & !low, last: address | low }
    }

    /// The addresses of the slot at `level` that contains `address`.
    #[inline]
    pub(super) const fn of_slot(level: u32, address: u64) -> Range {
        Range::around(address, shift(level))
    }

    /// The addresses of the node of `level` that contains `address`.
    #[inline]
    pub(super) const fn of_node(level: u32, address: u64) -> Range {
        Range::around(address, shift(level + 1))
    }

    /// The level of the lowest node that contains the span.
    #[inline]
    pub(super) const fn level(self) -> u32 {
        let differ = self.first ^ self.last;
        match (63 - (differ | 1).leading_zeros()).checked_sub(PAGE_BITS) {
            None => 0,
            Some(above) => above / RADIX_BITS,
        }
    }

    /// What two ranges that overlap have in common.
    #[inline]
    pub(super) fn clip(self, other: Range) -> Range {
        debug_assert!(self.overlaps(other));
        Range { first: self.first.max(other.first), last: self.last.min(other.last) }
    }
}

/// The content of a slot. See the constants for the meaning of the bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(pub(super) u64);

impl Slot {
    /// Nothing is mapped there.
    pub(super) const EMPTY: Slot = Slot(0);

    /// `pointer (bits 7..64) | shift (bits 1..7) | CHILD`. The shift is the child's if levels are
    /// skipped between the slot and the child, so that the child does not contain every address of
    /// the slot; it is 0 if the child is of the next level.
    pub(super) const CHILD: u64 = 1;
    /// `difference (bits 12..64) | ENDS | STARTS | permission (bits 2..5) | LEAF`.
    const LEAF: u64 = 2;
    // Neither bit: nothing, or the pointer to a block.

    const PROT_AT: u32 = 2;
    /// A mapping begins with the first address of the slot.
    const STARTS: u64 = 1 << 5;
    /// A mapping ends with the last address of the slot.
    const ENDS: u64 = 1 << 6;

    /// A leaf for a slot that stands for `slot`, wholly covered by `mapping`. Only if the
    /// difference [fits](Self::fits).
    #[inline]
    pub(super) fn leaf(slot: Range, mapping: &Mapping) -> Slot {
        let mut word =
            delta(mapping) | u64::from(mapping.prot.bits()) << Self::PROT_AT | Self::LEAF;
        if slot.first == mapping.range.first {
            word |= Self::STARTS;
        }
        if slot.last == mapping.range.last {
            word |= Self::ENDS;
        }
        Slot(word)
    }

    /// Whether a leaf can hold the difference.
    #[inline]
    pub(super) const fn fits(delta: u64) -> bool {
        delta & FLAGS == 0
    }

    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub(super) const fn is_child(self) -> bool {
        self.0 & Self::CHILD != 0
    }

    /// Whether it is a child of the next level, which contains every address of the slot.
    #[inline]
    pub(super) const fn is_next(self) -> bool {
        self.0 & 127 == Self::CHILD
    }

    #[inline]
    pub(super) const fn is_leaf(self) -> bool {
        self.0 & (Self::CHILD | Self::LEAF) == Self::LEAF
    }

    #[inline]
    pub(super) const fn is_block(self) -> bool {
        self.0 & (Self::CHILD | Self::LEAF) == 0 && !self.is_empty()
    }

    /// Of a leaf: whether `other` is a leaf with the same difference and permission.
    #[inline]
    pub(super) const fn is_like(self, other: Slot) -> bool {
        (self.0 ^ other.0) & !(Self::STARTS | Self::ENDS) == 0
    }

    /// Of a child: its shift if levels are skipped between the slot and the child, else 0.
    #[inline]
    pub(super) const fn skip(self) -> u32 {
        (self.0 >> 1) as u32 & 63
    }

    /// Of a leaf: the difference of addresses.
    #[inline]
    pub(super) const fn delta(self) -> u64 {
        self.0 & !FLAGS
    }

    /// Of a leaf: the permission.
    #[inline]
    pub(super) const fn prot(self) -> Prot {
        Prot::from_bits_truncate((self.0 >> Self::PROT_AT) as u32 & 7)
    }

    /// Of a leaf: whether a mapping begins with the slot.
    #[inline]
    pub(super) const fn starts(self) -> bool {
        self.0 & Self::STARTS != 0
    }

    /// Of a leaf: whether a mapping ends with the slot.
    #[inline]
    pub(super) const fn ends(self) -> bool {
        self.0 & Self::ENDS != 0
    }
}

/// The difference of addresses of a mapping.
#[inline]
pub(super) fn delta(mapping: &Mapping) -> u64 {
    mapping.target.wrapping_sub(mapping.range.first().0)
}
