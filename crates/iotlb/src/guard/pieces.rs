//! What a guard has translated: which addresses lead where, and which pages of them were handed
//! out.

use ringfence_iommu::{Iova, Prot, Range, table::Translation};

use crate::misses::PAGE;

/// Addresses that lead on in the same way.
#[derive(Debug)]
pub(super) struct Piece {
    first: u64,
    last: u64,
    /// What to add to an IOVA, modulo 2^64, to reach its target.
    pub(super) delta: u64,
    pub(super) prot: Prot,
    /// What its pages were handed out for.
    pub(super) used: Prot,
    touched: Touched,
}

/// Which pages of a piece were handed out.
#[derive(Debug)]
enum Touched {
    Nothing,
    /// In particular of a piece that lies in one page: nothing is allocated for it.
    All,
    /// Runs of pages with gaps between them, in order, by their first and last addresses.
    Runs(Vec<(u64, u64)>),
}

impl Piece {
    pub(super) fn range(&self) -> Range {
        Range::new(Iova(self.first), Iova(self.last)).expect("ordered")
    }

    /// The addresses of the pages that were handed out, as far as they lie in the piece.
    pub(super) fn touched(&self) -> impl Iterator<Item = Range> {
        let whole = [(self.first, self.last)];
        let (all, runs) = match &self.touched {
            Touched::Nothing => (None, [].as_slice()),
            Touched::All => (Some(whole), [].as_slice()),
            Touched::Runs(runs) => (None, runs.as_slice()),
        };
        all.into_iter()
            .flatten()
            .chain(runs.iter().copied())
            .map(|(first, last)| Range::new(Iova(first), Iova(last)).expect("runs are ordered"))
    }

    /// Notes that its part of the addresses from `first` to `last` is handed out. Returns how many
    /// runs there are more than before.
    fn touch(&mut self, first: u64, last: u64) -> isize {
        let whole = (self.first, self.last);
        let (first, last) = ((first & !(PAGE - 1)).max(whole.0), (last | (PAGE - 1)).min(whole.1));
        if let Touched::Nothing = self.touched {
            self.touched = Touched::Runs(Vec::new());
        }
        let Touched::Runs(runs) = &mut self.touched else { return 0 };
        let before = runs.len() as isize;
        // Those that it overlaps or touches become one with it.
        let from = runs.partition_point(|run| run.1 < first.saturating_sub(1));
        let to = runs.partition_point(|run| run.0 <= last.saturating_add(1));
        let run = match &runs[from..to] {
            [] => (first, last),
            [head, .., tail] => (head.0.min(first), tail.1.max(last)),
            [one] => (one.0.min(first), one.1.max(last)),
        };
        if run == whole {
            self.touched = Touched::All;
            return -before;
        }
        match &mut runs[from..to] {
            [] => runs.insert(from, run),
            [one] => *one = run,
            [head, ..] => {
                *head = run;
                runs.drain(from + 1..to);
            }
        }
        runs.len() as isize - before
    }
}

/// Pieces that do not overlap.
#[derive(Default)]
pub(super) struct Pieces {
    /// In no order; few are ever taken away.
    pieces: Vec<Piece>,
    /// Their last addresses and their places, in order: mostly a handful, so that a search in it is
    /// cheaper than one in a tree.
    order: Vec<(u64, u32)>,
    /// Runs of pages, of all pieces together.
    runs: usize,
}

impl Pieces {
    /// How many pieces and runs there are.
    pub(super) fn len(&self) -> usize {
        self.pieces.len() + self.runs
    }

    /// In ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.order.iter().map(|&(_, at)| &self.pieces[at as usize])
    }

    /// The place in the order of the first piece that ends at or after `at`.
    #[inline]
    fn position(&self, at: u64) -> usize {
        self.order.partition_point(|&(last, _)| last < at)
    }

    /// The piece that `at` lies in.
    #[inline]
    pub(super) fn find(&self, at: u64) -> Option<&Piece> {
        let &(_, piece) = self.order.get(self.position(at))?;
        Some(&self.pieces[piece as usize]).filter(|piece| piece.first <= at)
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

    /// As much of `range` around `at`, which lies in no piece, as overlaps none.
    pub(super) fn gap(&self, at: u64, range: Range) -> Range {
        let (mut first, mut last) = (range.first().0, range.last().0);
        let position = self.position(at);
        // `at` lies between the two neighbours, so that neither sum wraps.
        if let Some(&(below, _)) = position.checked_sub(1).map(|below| &self.order[below]) {
            first = first.max(below + 1);
        }
        if let Some(&(_, above)) = self.order.get(position) {
            last = last.min(self.pieces[above as usize].first - 1);
        }
        Range::new(Iova(first), Iova(last)).expect("both are around `at`")
    }

    /// Adds a translation whose range overlaps no piece.
    pub(super) fn add(&mut self, found: &Translation) {
        let &Translation { range, delta, prot } = found;
        let (first, last) = (range.first().0, range.last().0);
        let (used, touched) = (Prot::empty(), Touched::Nothing);
        self.order.insert(self.position(first), (last, self.pieces.len() as u32));
        self.pieces.push(Piece { first, last, delta, prot, used, touched });
    }

    /// Calls `each` with what every part of `range`, which is covered, leads to: the target and the
    /// number of bytes less one. Parts whose targets follow each other are one.
    pub(super) fn targets(&self, range: Range, mut each: impl FnMut(u64, u64)) {
        let mut run: Option<(u64, u64)> = None;
        for &(_, at) in &self.order[self.position(range.first().0)..] {
            let piece = &self.pieces[at as usize];
            if piece.first > range.last().0 {
                break;
            }
            let first = piece.first.max(range.first().0);
            let extent = piece.last.min(range.last().0) - first;
            let target = first.wrapping_add(piece.delta);
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
        }
        run.into_iter().for_each(|(start, reach)| each(start, reach));
    }

    /// Notes that `range`, which is covered, is handed out for `prot`.
    pub(super) fn touch(&mut self, range: Range, prot: Prot) {
        for position in self.position(range.first().0)..self.order.len() {
            if self.touch_at(position, range, prot).first > range.last().0 {
                break;
            }
        }
    }

    /// Notes that `range` is handed out for `prot`, if one piece is all of it. Returns the piece.
    #[inline]
    pub(super) fn touch_one(&mut self, range: Range, prot: Prot) -> Option<&Piece> {
        let position = self.position(range.first().0);
        let piece = &self.pieces[self.order.get(position)?.1 as usize];
        let is_all = piece.range().covers(range) && piece.prot.allows(prot);
        is_all.then(|| self.touch_at(position, range, prot))
    }

    fn touch_at(&mut self, position: usize, range: Range, prot: Prot) -> &Piece {
        let piece = &mut self.pieces[self.order[position].1 as usize];
        if piece.first <= range.last().0 {
            let more = piece.touch(range.first().0, range.last().0);
            self.runs = self.runs.checked_add_signed(more).expect("runs are counted");
            piece.used |= prot;
        }
        piece
    }

    /// Drops what was never handed out.
    pub(super) fn forget_untouched(&mut self) {
        self.pieces.retain(|piece| !matches!(piece.touched, Touched::Nothing));
        self.order.clear();
        self.order.extend((0..).zip(&self.pieces).map(|(at, piece)| (piece.last, at)));
        self.order.sort_unstable();
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

    fn add(pieces: &mut Pieces, at: u64, found: &Translation) -> Range {
        let range = pieces.gap(at, found.range);
        pieces.add(&Translation { range, ..*found });
        range
    }

    #[test]
    fn pieces_fill_gaps_and_never_overlap() {
        let mut pieces = Pieces::default();
        assert_eq!(add(&mut pieces, 0x2000, &found(0x2000, 0x2fff, 0)), range(0x2000, 0x2fff));
        assert_eq!(add(&mut pieces, 0x5000, &found(0x5000, 0x5fff, 0)), range(0x5000, 0x5fff));
        let all = Translation { range: Range::ALL, delta: 7, prot: Prot::READ };
        assert_eq!(add(&mut pieces, 0x3123, &all), range(0x3000, 0x4fff));
        assert_eq!(add(&mut pieces, 0, &all), range(0, 0x1fff));
        assert!(!pieces.covers(range(0, 0x6000), Prot::READ));
        assert_eq!(add(&mut pieces, u64::MAX, &all), range(0x6000, u64::MAX));
        assert!(pieces.covers(Range::ALL, Prot::READ));
        assert!(!pieces.covers(Range::ALL, Prot::WRITE), "the gaps may only be read");
        assert!(pieces.covers(range(0x2fff, 0x2fff), Prot::WRITE));
        assert_eq!(pieces.find(0x5fff).unwrap().delta, 0);
        assert_eq!(pieces.len(), 5);
    }

    #[test]
    fn neighbours_that_lead_on_are_one_target() {
        let mut pieces = Pieces::default();
        add(&mut pieces, 0x1000, &found(0x1000, 0x1fff, 0x10_0000));
        add(&mut pieces, 0x2000, &found(0x2000, 0x2fff, 0x10_0000));
        add(&mut pieces, 0x3000, &found(0x3000, 0x3fff, 0x20_0000));
        // Ends with the last address there is, where nothing follows.
        add(&mut pieces, 0x4000, &found(0x4000, 0x4fff, 0u64.wrapping_sub(0x5000)));
        add(&mut pieces, 0x5000, &found(0x5000, 0x5fff, 0u64.wrapping_sub(0x5000)));
        let mut targets = vec![];
        pieces.targets(range(0x1800, 0x5000), |target, extent| targets.push((target, extent)));
        let top = u64::MAX - 0xfff;
        assert_eq!(targets, [(0x10_1800, 0x17ff), (0x20_3000, 0xfff), (top, 0xfff), (0, 0)],);
    }

    fn touched(pieces: &Pieces) -> Vec<Range> {
        pieces.iter().flat_map(|piece| piece.touched()).collect()
    }

    #[test]
    fn pages_that_were_handed_out_are_remembered_and_others_forgotten() {
        let mut pieces = Pieces::default();
        add(&mut pieces, 0x800, &found(0x800, 0x2fff, 0));
        add(&mut pieces, 0x4_0000, &found(0x4_0000, 0x4_0fff, 0));
        add(&mut pieces, u64::MAX, &found(u64::MAX - 0xfff, u64::MAX, 0));
        pieces.touch(range(0x900, 0x1000), Prot::READ);
        pieces.touch(range(u64::MAX, u64::MAX), Prot::WRITE);
        pieces.forget_untouched();
        let top = range(u64::MAX - 0xfff, u64::MAX);
        assert_eq!(touched(&pieces), [range(0x800, 0x1fff), top]);
        let used: Vec<_> = pieces.iter().map(|piece| piece.used).collect();
        assert_eq!(used, [Prot::READ, Prot::WRITE]);
        assert_eq!(pieces.iter().next().unwrap().range(), range(0x800, 0x2fff));
        assert_eq!(pieces.len(), 3);
        pieces.touch(range(0x2000, 0x2000), Prot::READ);
        assert_eq!(touched(&pieces), [range(0x800, 0x2fff), top]);
    }

    proptest::proptest! {
        #[test]
        fn the_runs_are_the_pages_that_were_touched(
            touches in proptest::collection::vec((0u64..64, 0u64..6), 0..40),
            low in proptest::bool::ANY,
        ) {
            // 64 pages at either end of the address space, less a part of the first and the last.
            let base = if low { 0 } else { u64::MAX - (64 * PAGE - 1) };
            let whole = range(base + 0x800, base + (64 * PAGE - 1) - 0x800);
            let mut pieces = Pieces::default();
            add(&mut pieces, whole.first().0, &Translation { range: whole, delta: 0, prot: Prot::RW });
            let mut pages = [false; 64];
            for (page, more) in touches {
                let last = (page + more).min(63);
                pages[page as usize..=last as usize].fill(true);
                let first = Iova(base + page * PAGE + 0x900).min(whole.last());
                let last = Iova(base + last * PAGE + 0xa00).min(whole.last());
                pieces.touch(Range::new(first.min(last), last).unwrap(), Prot::READ);
            }
            let runs = touched(&pieces);
            let expected: Vec<Range> = (0..64)
                .filter(|&page| pages[page])
                .map(|page| range(base + page as u64 * PAGE, base + page as u64 * PAGE + 0xfff))
                .map(|page| page.intersection(whole).unwrap())
                .collect();
            let flat: Vec<Range> = runs
                .iter()
                .flat_map(|run| (0..64).filter_map(move |page| {
                    range(base + page * PAGE, base + page * PAGE + 0xfff).intersection(*run)
                }))
                .collect();
            proptest::prop_assert_eq!(flat, expected);
            // Those that touch are one.
            for pair in runs.windows(2) {
                proptest::prop_assert!(pair[0].last().0 + 1 < pair[1].first().0);
            }
            let all = runs == [whole];
            proptest::prop_assert_eq!(pieces.len(), 1 + if all { 0 } else { runs.len() });
        }
    }
}
