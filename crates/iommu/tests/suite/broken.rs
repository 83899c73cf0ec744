//! Domains with one defect each.

use std::sync::Arc;

use ringfence_iommu::{
    Domain, Gather, GuestPhys, Iova, Map, Partial, Prot, Range, Result, SyncToken, Work,
    table::Mapping,
};
use ringfence_iommu_testing::Faulty;

use crate::Soft;

/// The defect of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// A sync of unmaps does nothing.
    NoSync,
    /// A flush does nothing.
    NoFlush,
    /// A sync covers only the first range of its list.
    FirstOnly,
    /// A mapping extends by one granule too many.
    OneMore,
    /// A mapping translates to the next granule.
    Elsewhere,
    /// Every mapping may be written.
    AllPermitted,
    /// An unaligned range is rounded.
    Rounds,
    /// A map replaces an existing mapping.
    Replaces,
    /// A list continues after a refused element.
    MapsOn,
    /// The same, for unmaps.
    UnmapsOn,
    /// An unmap that would split a mapping removes all of it.
    Splits,
    /// An unmap leaves a range out of the gather in which nothing is mapped.
    Omits,
    /// An unmap also removes the next granule.
    TakesMore,
    /// An unmap returns the size of its range.
    Miscounts,
    /// A sync that fails is reported as a success.
    Swallows,
    /// The first target of an address is its target for ever.
    KeepsOld,
    /// A look-up finds the granule instead of the address.
    Truncates,
    /// The list of mappings is empty.
    ListsNothing,
}

impl Wrong {
    /// Each with the check that detects it.
    pub(crate) const ALL: [(Wrong, &str); 18] = [
        (Wrong::NoSync, "unmaps_for_good"),
        (Wrong::NoFlush, "flushes_what_was_queued"),
        (Wrong::FirstOnly, "syncs_a_list"),
        (Wrong::OneMore, "maps_nothing_besides"),
        (Wrong::Elsewhere, "leads_where_it_was_mapped_to"),
        (Wrong::AllPermitted, "enforces_permissions"),
        (Wrong::Rounds, "refuses_what_its_geometry_refuses"),
        (Wrong::Replaces, "refuses_to_map_twice"),
        (Wrong::MapsOn, "maps_a_list_up_to_the_first_refused"),
        (Wrong::UnmapsOn, "unmaps_a_list_up_to_the_first_refused"),
        (Wrong::Splits, "splits_nothing"),
        (Wrong::Omits, "unmaps_what_another_removed"),
        (Wrong::TakesMore, "keeps_the_neighbours"),
        (Wrong::Miscounts, "unmaps_over_holes"),
        (Wrong::Swallows, "reports_a_sync_that_failed"),
        (Wrong::KeepsOld, "leads_anew_after_a_sync"),
        (Wrong::Truncates, "finds_what_is_mapped"),
        (Wrong::ListsNothing, "lists_what_is_mapped"),
    ];
}

pub(crate) struct Broken {
    inner: Arc<Faulty<Arc<Soft>>>,
    wrong: Wrong,
}

impl Broken {
    pub(crate) fn new(inner: Arc<Faulty<Arc<Soft>>>, wrong: Wrong) -> Broken {
        Broken { inner, wrong }
    }

    fn soft(&self) -> &Soft {
        self.inner.inner()
    }

    fn map_one(&self, map: &Map<GuestPhys>) -> Result<()> {
        let (mut range, mut target, mut prot) = (map.range(), map.target(), map.prot());
        match self.wrong {
            Wrong::OneMore => range = next_to(range).map_or(range, |next| range.hull(next)),
            Wrong::Elsewhere => target = GuestPhys(target.0 + 4096),
            Wrong::AllPermitted if !prot.is_empty() => prot = Prot::RW,
            Wrong::Rounds => range = rounded(range),
            Wrong::Replaces => {
                while let Some(there) = self.soft().mapping_from(range.first())
                    && there.range.overlaps(range)
                {
                    self.inner.unmap(there.range, &mut Gather::new())?;
                }
            }
            Wrong::KeepsOld if range.len() == 4096 => target = GuestPhys(0x40_0000),
            _ => {}
        }
        self.inner.map(Map::new(range, target, prot))
    }

    fn unmap_one(&self, mut range: Range, gather: &mut Gather) -> Result<u128> {
        match self.wrong {
            Wrong::Rounds => range = rounded(range),
            // Widened to the whole mappings at both ends.
            Wrong::Splits | Wrong::OneMore => {
                for end in [range.first(), range.last()] {
                    let there = self.soft().mapping(end);
                    range = there.map_or(range, |there| range.hull(there.range));
                }
            }
            Wrong::TakesMore => {
                if let Some(next) = next_to(range) {
                    // If that fails, the next granule stays mapped.
                    let _ = self.inner.unmap(next, gather);
                }
            }
            _ => {}
        }
        if self.wrong == Wrong::Omits && self.soft().mapping_from(range.first()).is_none() {
            return Ok(0);
        }
        let bytes = self.inner.unmap(range, gather)?;
        Ok(if self.wrong == Wrong::Miscounts { range.len() } else { bytes })
    }
}

fn next_to(range: Range) -> Option<Range> {
    Range::from_len(Iova(range.last().0.checked_add(1)?), 4096)
}

fn rounded(range: Range) -> Range {
    Range::new(Iova(range.first().0 & !4095), Iova(range.last().0 | 4095)).unwrap()
}

// SAFETY: none: these domains are broken on purpose. Their targets are not memory.
unsafe impl Domain for Broken {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(inner: geometry, capabilities, sync_poll, sync_wait);

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        let mut first = Ok(());
        for (done, map) in maps.iter().enumerate() {
            let mapped = self.map_one(map).map_err(|error| Partial { done, error });
            first = first.and(mapped);
            if first.is_err() && self.wrong != Wrong::MapsOn {
                break;
            }
        }
        first
    }
    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        let mut sum = Ok(0);
        for (done, &range) in ranges.iter().enumerate() {
            match self.unmap_one(range, gather) {
                Ok(bytes) => sum = sum.map(|sum| sum + bytes),
                Err(error) => sum = sum.and(Err(Partial { done, error })),
            }
            if sum.is_err() && self.wrong != Wrong::UnmapsOn {
                break;
            }
        }
        sum
    }
    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        match (self.wrong, work) {
            (Wrong::NoSync, Work::Unmap { .. }) | (Wrong::NoFlush, Work::All) => {
                Ok(SyncToken::DONE)
            }
            (Wrong::FirstOnly, Work::Unmap { ranges: [first, ..], exact }) => {
                self.inner.sync_begin(Work::Unmap { ranges: &[*first], exact })
            }
            (Wrong::Swallows, _) => self.inner.sync_begin(work).or(Ok(SyncToken::DONE)),
            _ => self.inner.sync_begin(work),
        }
    }
    fn iova_to_phys(&self, iova: Iova) -> Option<GuestPhys> {
        match self.wrong {
            Wrong::Truncates => self.inner.iova_to_phys(Iova(iova.0 & !4095)),
            _ => self.inner.iova_to_phys(iova),
        }
    }
    fn mappings_from(&self, iova: Iova, into: &mut Vec<Mapping>) -> Result<()> {
        match self.wrong {
            Wrong::ListsNothing => Ok(()),
            _ => self.inner.mappings_from(iova, into),
        }
    }
}
