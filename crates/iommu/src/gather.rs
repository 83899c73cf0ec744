//! What an unmap leaves to be invalidated.

use arrayvec::ArrayVec;

use crate::{Range, Work, table::PageList};

/// How many separate ranges a [`Gather`] keeps before it widens one: about as many scattered
/// buffers as a driver unmaps together.
const RANGES: usize = 32;

/// Ranges that do not touch each other, at most `N`.
#[derive(Debug, Default)]
pub(crate) struct Ranges<const N: usize> {
    pub(crate) ranges: ArrayVec<Range, N>,
    widened: bool,
}

impl<const N: usize> Ranges<N> {
    /// Adds a range: joined with those that it touches (rule L39), or with the nearest if there
    /// are too many (rule L42).
    #[inline]
    pub(crate) fn add(&mut self, range: Range) {
        // Fast path: the ranges that a driver unmaps often form a single one.
        if let [only] = self.ranges.as_mut_slice()
            && only.touches(range)
        {
            *only = only.hull(range);
            return;
        }
        self.add_to_many(range);
    }

    fn add_to_many(&mut self, mut range: Range) {
        // Joining two may make the union touch a third: start over until nothing joins. The newest
        // range is the most likely to join.
        while let Some(at) = self.ranges.iter().rposition(|held| held.touches(range)) {
            range = range.hull(self.ranges.swap_remove(at));
        }
        match self.ranges.is_full() {
            false => self.ranges.push(range),
            true => self.widen(range),
        }
    }

    #[cold]
    fn widen(&mut self, range: Range) {
        self.widened = true;
        let nearest = self
            .ranges
            .iter()
            .enumerate()
            .min_by_key(|(_, held)| held.hull(range).extent() - held.extent())
            .map(|(at, _)| at)
            .expect("a full gather holds ranges");
        let widened = self.ranges.swap_remove(nearest).hull(range);
        self.add_to_many(widened);
    }

    fn clear(&mut self) {
        self.ranges.clear();
        self.widened = false;
    }
}

/// The ranges whose translations were removed but may still be cached, and the table pages that
/// were unlinked with them: filled by [`unmap_pages`](crate::Domain::unmap_pages), emptied by
/// [`iotlb_sync`](crate::Domain::iotlb_sync).
///
/// Linux's gather holds one range of one page size and syncs when the next does not join
/// it (rule [L39]). This one holds several; when there are too many it widens one of them, so that
/// it may over-invalidate but never under-invalidates (rule [L42]).
///
/// [L39]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l39
/// [L42]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l42
#[derive(Debug, Default)]
pub struct Gather {
    ranges: Ranges<RANGES>,
    pub(crate) pages: PageList,
    queued: bool,
}

impl Gather {
    /// An empty gather, for a caller that will sync.
    #[inline]
    pub fn new() -> Gather {
        Gather::default()
    }

    /// An empty gather for a caller that queues the unmap and later flushes the whole domain, so
    /// that it records no ranges (rule [L26]), only table pages.
    ///
    /// [L26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l26
    #[inline]
    pub fn queued() -> Gather {
        Gather { queued: true, ..Gather::default() }
    }

    /// Whether a whole-domain flush will follow instead of a sync of the ranges.
    pub fn is_queued(&self) -> bool {
        self.queued
    }

    /// Adds a range to invalidate.
    #[inline]
    pub fn add(&mut self, range: Range) {
        if !self.queued {
            self.ranges.add(range);
        }
    }

    /// As [`add`](Self::add), for many ranges. Unless they are `exact`, parts of them may belong to
    /// other threads.
    pub(crate) fn add_all(&mut self, ranges: &[Range], exact: bool) {
        ranges.iter().for_each(|&range| self.add(range));
        self.ranges.widened |= !exact;
    }

    /// Whether the ranges cover exactly what was added: none was widened. A widened range may
    /// contain addresses that belong to another thread.
    pub fn is_exact(&self) -> bool {
        !self.ranges.widened
    }

    /// Adds table pages that were unlinked: they are not reused before the invalidation (rule
    /// [L40]).
    ///
    /// [L40]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l40
    pub fn add_pages(&mut self, pages: PageList) {
        self.pages.append(pages);
    }

    /// The ranges to invalidate, in no order; they do not touch each other.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges.ranges
    }

    /// The work for a sync of this gather.
    #[inline]
    pub fn work(&self) -> Work<'_> {
        match self.queued {
            true => Work::All,
            false => Work::Unmap { ranges: self.ranges(), exact: self.is_exact() },
        }
    }

    /// Whether it holds no ranges and no table pages. One that is [queued](Self::queued) never
    /// holds ranges, so it may be empty although a flush is due.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ranges().is_empty() && self.pages.is_empty()
    }

    /// Takes the table pages out, to be dropped once an invalidation that covers them is over.
    #[inline]
    pub fn take_pages(&mut self) -> PageList {
        core::mem::take(&mut self.pages)
    }

    /// Gives the table pages back to their table, whose domain frees them after a sync that begins
    /// now or later.
    #[inline]
    pub fn release_pages(&mut self) {
        if !self.pages.is_empty() {
            drop(self.take_pages());
        }
    }

    /// Forgets the ranges: they have been invalidated.
    #[inline]
    pub fn clear_ranges(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Iova;

    fn range(first: u64, last: u64) -> Range {
        Range::new(Iova(first), Iova(last)).unwrap()
    }

    #[test]
    fn touching_ranges_become_one() {
        // rule L39
        let mut gather = Gather::new();
        gather.add(range(0, 0xfff));
        gather.add(range(0x2000, 0x2fff));
        gather.add(range(0x1000, 0x1fff));
        assert_eq!(gather.ranges(), &[range(0, 0x2fff)]);
    }

    #[test]
    fn too_many_ranges_over_invalidate_and_never_under_invalidate() {
        // rule L42
        let mut gather = Gather::new();
        let wanted: alloc::vec::Vec<_> =
            (0..3 * RANGES as u64).map(|n| range((n * n) << 16, ((n * n) << 16) + 0xfff)).collect();
        for (n, &r) in wanted.iter().enumerate() {
            assert_eq!(gather.is_exact(), n <= RANGES);
            gather.add(r);
        }
        for r in wanted {
            assert!(gather.ranges().iter().any(|held| held.covers(r)), "{r} was lost");
        }
        assert!(!gather.is_exact());
        gather.clear_ranges();
        assert!(gather.is_exact(), "nothing is left of what was widened");
    }

    #[test]
    fn a_queued_unmap_skips_the_ranges() {
        // rule L26
        let mut gather = Gather::queued();
        gather.add(range(0, 0xfff));
        assert!(gather.ranges().is_empty());
    }
}
