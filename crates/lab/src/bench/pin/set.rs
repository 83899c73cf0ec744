//! The pages of a list.

use ringfence_iommu::Iova;

use super::params::Lie;
use crate::random::SplitMix;

/// The size of a page in bytes.
pub(super) const PAGE: usize = 4096;
/// The I/O virtual address of the memory's first page.
pub(super) const BASE: u64 = 1 << 40;
/// Pages side by side, where not all of them are.
const RUN: usize = 16;

/// So many pages that lie side by side, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) pages: usize,
}

/// A list of pages, each by its place in the memory.
#[derive(Clone, Debug)]
pub(super) struct Set {
    /// The IOVAs of all pages, in the order of the list.
    pub(super) iovas: Vec<Iova>,
    /// Those that were not pinned before, in the same order.
    pub(super) fresh: Vec<usize>,
    /// The same, as runs.
    pub(super) runs: Vec<Run>,
    /// Those that are pinned before, and stay so.
    pub(super) held: Vec<Run>,
}

impl Set {
    /// How many pages of memory a list of so many needs.
    pub(super) const fn span(pages: usize) -> usize {
        2 * pages
    }

    pub(super) fn new(list: Lie, count: usize) -> Set {
        let run = RUN.min(count.div_ceil(2));
        let pages: Vec<usize> = match list {
            Lie::Contiguous | Lie::Pinned => (0..count).collect(),
            Lie::Random => shuffled(count),
            Lie::Mixed => mixed(count, run),
        };
        let is_held = |page: &usize| list == Lie::Pinned && page / run % 2 == 1;
        let iovas = pages.iter().map(|page| iova(*page)).collect();
        let (held, fresh): (Vec<usize>, Vec<usize>) = pages.into_iter().partition(is_held);
        Set { iovas, runs: runs(&fresh), fresh, held: runs(&held) }
    }
}

/// The IOVA of a page.
pub(super) fn iova(page: usize) -> Iova {
    Iova(BASE + (page * PAGE) as u64)
}

/// Every other place, in no order.
fn shuffled(count: usize) -> Vec<usize> {
    let mut pages: Vec<usize> = (0..count).map(|n| 2 * n).collect();
    SplitMix(0x9e37_79b9_7f4a_7c15).shuffle(&mut pages);
    pages
}

/// A run, as many pages that lie alone, and so on.
fn mixed(count: usize, run: usize) -> Vec<usize> {
    let mut pages = Vec::with_capacity(count);
    let mut at = 0;
    for n in 0..count {
        pages.push(at);
        let in_run = (n / run).is_multiple_of(2) && !(n + 1).is_multiple_of(run);
        at += if in_run { 1 } else { 2 };
    }
    pages
}

fn runs(pages: &[usize]) -> Vec<Run> {
    let runs = pages.chunk_by(|page, next| page + 1 == *next);
    runs.map(|run| Run { first: run[0], pages: run.len() }).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn lists_are_what_they_are_called() {
        for count in [1, 2, 3, 8, 64, 500, 4096] {
            let of = |list| Set::new(list, count);
            for list in Lie::ALL {
                let set = of(list);
                assert_eq!(set.iovas.len(), count);
                let sum = |runs: &[Run]| runs.iter().map(|run| run.pages).sum::<usize>();
                assert_eq!(sum(&set.runs), set.fresh.len());
                assert_eq!(sum(&set.runs) + sum(&set.held), count);
                let distinct: BTreeSet<Iova> = set.iovas.iter().copied().collect();
                assert_eq!(distinct.len(), count, "{list}");
                assert!(
                    distinct.iter().all(|at| *at < iova(Set::span(count))),
                    "{list} of {count}"
                );
            }
            assert_eq!(of(Lie::Contiguous).runs, [Run { first: 0, pages: count }]);
            assert_eq!(of(Lie::Random).runs.len(), count);
        }
    }

    #[test]
    fn half_of_a_mixed_list_lies_alone_and_half_of_a_pinned_one_is_held() {
        for count in [2, 8, 64, 512, 4096] {
            let mixed = Set::new(Lie::Mixed, count);
            let longest = RUN.min(count / 2);
            let whole = mixed.runs.iter().filter(|run| run.pages == longest).count() * longest;
            assert!(count == 2 || whole == count / 2, "{count}: {whole}");
            let alone = mixed.runs.iter().filter(|run| run.pages == 1).count();
            assert!(count == 2 || alone == count / 2, "{count}: {alone}");
            let held = Set::new(Lie::Pinned, count).held;
            assert_eq!(held.iter().map(|run| run.pages).sum::<usize>(), count / 2);
            assert!(held.iter().all(|run| run.first >= longest));
        }
        assert!(Set::new(Lie::Pinned, 1).held.is_empty());
    }
}
