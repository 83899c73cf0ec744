//! What a guard has translated: which addresses lead where, and which pages of them were handed
//! out.

use std::collections::BTreeMap;

use ringfence_iommu::{Iova, Prot, Range, table::Translation};

use crate::misses::PAGE;

/// No piece leaves an aligned block of this size, so that its pages are the bits of one word.
const BLOCK: u64 = 64 * PAGE;

/// Addresses that lead on in the same way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    first: u64,
    last: u64,
    /// What to add to an IOVA, modulo 2^64, to reach its target.
    pub(super) delta: u64,
    pub(super) prot: Prot,
    /// What its pages were handed out for.
    pub(super) used: Prot,
    /// Which pages of the block were handed out, the lowest first.
    pages: u64,
}

impl Piece {
    pub(super) fn range(&self) -> Range {
        Range::new(Iova(self.first), Iova(self.last)).expect("ordered")
    }

    /// The addresses of the pages that were handed out, as far as they lie in the piece.
    pub(super) fn touched(&self) -> impl Iterator<Item = Range> + use<> {
        let piece = *self;
        let base = piece.first & !(BLOCK - 1);
        (0..64).filter(move |page| piece.pages >> page & 1 == 1).map(move |page| {
            let first = base + page * PAGE;
            let (first, last) = (first.max(piece.first), (first | (PAGE - 1)).min(piece.last));
            Range::new(Iova(first), Iova(last)).expect("a page that was touched lies in its piece")
        })
    }
}

/// Pieces that do not overlap.
#[derive(Default)]
pub(super) struct Pieces {
    by_last: BTreeMap<u64, Piece>,
}

impl Pieces {
    pub(super) fn len(&self) -> usize {
        self.by_last.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.by_last.values()
    }

    /// The piece that `at` lies in.
    #[inline]
    pub(super) fn find(&self, at: u64) -> Option<&Piece> {
        self.by_last.range(at..).next().map(|(_, piece)| piece).filter(|piece| piece.first <= at)
    }

    /// Whether all of `range` is there, for `prot`.
    #[inline]
    pub(super) fn covers(&self, range: Range, prot: Prot) -> bool {
        let mut at = range.first().0;
        loop {
            match self.find(at) {
                Some(piece) if piece.prot.allows(prot) && piece.last >= range.last().0 => {
                    return true;
                }
                Some(piece) if piece.prot.allows(prot) => at = piece.last + 1,
                _ => return false,
            }
        }
    }

    /// Adds what is known of `at`, which lies in no piece: as much of it as stays in a block and
    /// overlaps no other piece. Returns how much that is.
    pub(super) fn add(&mut self, at: u64, found: &Translation) -> Range {
        let block = at & !(BLOCK - 1);
        let mut first = found.range.first().0.max(block);
        let mut last = found.range.last().0.min(block | (BLOCK - 1));
        // `at` lies between the two neighbours, so that neither sum wraps.
        if let Some((&below, _)) = self.by_last.range(..at).next_back() {
            first = first.max(below + 1);
        }
        if let Some((_, above)) = self.by_last.range(at..).next() {
            last = last.min(above.first - 1);
        }
        let Translation { delta, prot, .. } = *found;
        let piece = Piece { first, last, delta, prot, used: Prot::empty(), pages: 0 };
        self.by_last.insert(last, piece);
        piece.range()
    }

    /// Calls `each` with what every part of `range`, which is covered, leads to: the target and the
    /// number of bytes less one. Parts whose targets follow each other are one.
    pub(super) fn targets(&self, range: Range, mut each: impl FnMut(u64, u64)) {
        let mut run: Option<(u64, u64)> = None;
        self.parts(range, |piece, first, last| {
            let (target, extent) = (first.wrapping_add(piece.delta), last - first);
            run = match run {
                // The sum of two extents less than that of `range`, and one more.
                Some((start, reach)) if start.checked_add(reach + 1) == Some(target) => {
                    Some((start, reach + 1 + extent))
                }
                before => {
                    before.into_iter().for_each(|(start, reach)| each(start, reach));
                    Some((target, extent))
                }
            };
        });
        run.into_iter().for_each(|(start, reach)| each(start, reach));
    }

    /// Notes that `range`, which is covered, is handed out for `prot`.
    pub(super) fn touch(&mut self, range: Range, prot: Prot) {
        for (_, piece) in self.by_last.range_mut(range.first().0..) {
            if piece.first > range.last().0 {
                break;
            }
            let page = |at: u64| at / PAGE % 64;
            let first = page(piece.first.max(range.first().0));
            let last = page(piece.last.min(range.last().0));
            piece.pages |= (u64::MAX >> (63 - (last - first))) << first;
            piece.used |= prot;
        }
    }

    /// Forgets what was never handed out.
    pub(super) fn forget_untouched(&mut self) {
        self.by_last.retain(|_, piece| piece.pages != 0);
    }

    fn parts(&self, range: Range, mut each: impl FnMut(&Piece, u64, u64)) {
        for (_, piece) in self.by_last.range(range.first().0..) {
            if piece.first > range.last().0 {
                break;
            }
            each(piece, piece.first.max(range.first().0), piece.last.min(range.last().0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    fn found(first: u64, last: u64, delta: u64) -> Translation {
        Translation { range: range(first, last), delta, prot: Prot::RW }
    }

    #[test]
    fn pieces_fill_gaps_and_never_overlap_or_leave_their_block() {
        let mut pieces = Pieces::default();
        assert_eq!(pieces.add(0x2000, &found(0x2000, 0x2fff, 0)), range(0x2000, 0x2fff));
        assert_eq!(pieces.add(0x5000, &found(0x5000, 0x5fff, 0)), range(0x5000, 0x5fff));
        let all = Translation { range: Range::ALL, delta: 7, prot: Prot::READ };
        assert_eq!(pieces.add(0x3123, &all), range(0x3000, 0x4fff));
        assert_eq!(pieces.add(0, &all), range(0, 0x1fff));
        assert_eq!(pieces.add(0x6000, &all), range(0x6000, BLOCK - 1));
        assert_eq!(pieces.add(u64::MAX, &all), range(u64::MAX - (BLOCK - 1), u64::MAX));
        assert!(pieces.covers(range(0, BLOCK - 1), Prot::READ));
        assert!(!pieces.covers(range(0, BLOCK - 1), Prot::WRITE), "the gaps may only be read");
        assert!(!pieces.covers(range(0, BLOCK), Prot::READ));
        assert!(pieces.covers(range(u64::MAX - 5, u64::MAX), Prot::READ));
        assert_eq!(pieces.find(0x5fff).unwrap().delta, 0);
        assert!(pieces.find(BLOCK).is_none());
    }

    #[test]
    fn neighbours_that_lead_on_are_one_target() {
        let mut pieces = Pieces::default();
        pieces.add(0x1000, &found(0x1000, 0x1fff, 0x10_0000));
        pieces.add(0x2000, &found(0x2000, 0x2fff, 0x10_0000));
        pieces.add(0x3000, &found(0x3000, 0x3fff, 0x20_0000));
        // Ends with the last address there is, where nothing follows.
        pieces.add(0x4000, &found(0x4000, 0x4fff, 0u64.wrapping_sub(0x5000)));
        pieces.add(0x5000, &found(0x5000, 0x5fff, 0u64.wrapping_sub(0x5000)));
        let mut targets = vec![];
        pieces.targets(range(0x1800, 0x5000), |target, extent| targets.push((target, extent)));
        let top = u64::MAX - 0xfff;
        assert_eq!(targets, [(0x10_1800, 0x17ff), (0x20_3000, 0xfff), (top, 0xfff), (0, 0)],);
    }

    #[test]
    fn pages_that_were_handed_out_are_remembered_and_others_forgotten() {
        let mut pieces = Pieces::default();
        pieces.add(0x800, &found(0x800, 0x2fff, 0));
        pieces.add(0x4_0000, &found(0x4_0000, 0x4_0fff, 0));
        pieces.add(u64::MAX, &found(u64::MAX - 0xfff, u64::MAX, 0));
        pieces.touch(range(0x900, 0x1000), Prot::READ);
        pieces.touch(range(u64::MAX, u64::MAX), Prot::WRITE);
        pieces.forget_untouched();
        assert_eq!(pieces.len(), 2);
        let touched: Vec<_> = pieces.iter().flat_map(|piece| piece.touched()).collect();
        let top = range(u64::MAX - 0xfff, u64::MAX);
        assert_eq!(touched, [range(0x800, 0xfff), range(0x1000, 0x1fff), top]);
        let used: Vec<_> = pieces.iter().map(|piece| piece.used).collect();
        assert_eq!(used, [Prot::READ, Prot::WRITE]);
        assert_eq!(pieces.iter().next().unwrap().range(), range(0x800, 0x2fff));
    }
}
