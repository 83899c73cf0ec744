//! The operations that the checks use on a subject.

use std::fmt::Display;

use super::subject::{MEMORY, Subject};
use ringfence_iommu::{Address, Domain, Error, Gather, Geometry, Iova, Prot, Range, Result};

/// Why a check ended early.
pub(super) enum Stop {
    /// The domain violates the contract.
    Fail(String),
    /// The check does not apply to the domain.
    NotApplicable(&'static str),
}

impl From<String> for Stop {
    fn from(why: String) -> Stop {
        Stop::Fail(why)
    }
}

/// Fails the check unless it `holds`.
pub(super) fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Stop> {
    if holds { Ok(()) } else { Err(Stop::Fail(why())) }
}

/// Granules in a row that can be mapped.
#[derive(Clone, Copy)]
pub(super) struct Area {
    first: u64,
    granule: u64,
}

impl Area {
    /// The lowest of them that are aligned to their size.
    pub(super) fn of(geometry: &Geometry) -> Option<Area> {
        let granule = geometry.page_sizes.granule();
        let size = granule.checked_mul(MEMORY)?;
        let mut first = geometry.aperture.first().0.checked_next_multiple_of(size)?;
        loop {
            let range = Range::from_len(Iova(first), size)?;
            if !geometry.aperture.covers(range) {
                return None;
            }
            let Some(reserved) = geometry.reserved_in(range) else {
                return Some(Area { first, granule });
            };
            first = reserved.range.last().0.checked_add(1)?.checked_next_multiple_of(size)?;
        }
    }
}

/// A subject, and where the checks map.
pub(super) struct Bench<'s, S> {
    pub(super) subject: &'s mut S,
    pub(super) area: Area,
}

impl<S: Subject> Bench<'_, S> {
    pub(super) fn domain(&self) -> &S::Domain {
        self.subject.domain()
    }

    pub(super) fn granule(&self) -> u64 {
        self.area.granule
    }

    /// Granules `first` to `last`, both included.
    pub(super) fn pages(&self, first: u64, last: u64) -> Range {
        let Area { first: base, granule } = self.area;
        let end = base + last * granule + (granule - 1);
        Range::new(Iova(base + first * granule), Iova(end)).expect("in ascending order")
    }

    pub(super) fn page(&self, n: u64) -> Range {
        self.pages(n, n)
    }

    /// Unmaps all of the area, and syncs.
    pub(super) fn empty(&mut self) -> Result<(), String> {
        let all = self.pages(0, MEMORY - 1);
        self.unmap(all).map(drop).map_err(|error| format!("emptying {all}: {error}"))
    }

    /// Maps and syncs.
    pub(super) fn map(&mut self, range: Range, to: u64, prot: Prot) -> Result<()> {
        let map = self.subject.map(range, to, prot);
        self.domain().map(map)?;
        self.domain().iotlb_sync_map(range).map(drop)
    }

    /// As [`map`](Self::map), where only success passes.
    pub(super) fn must_map(&mut self, range: Range, to: u64, prot: Prot) -> Result<(), Stop> {
        self.map(range, to, prot).map_err(|error| fail(format!("mapping {range}"), error))
    }

    /// Unmaps and syncs.
    pub(super) fn unmap(&mut self, range: Range) -> Result<u128> {
        let mut gather = Gather::new();
        let bytes = self.domain().unmap(range, &mut gather)?;
        self.domain().iotlb_sync(&mut gather).map(|_synced| bytes)
    }

    /// As [`unmap`](Self::unmap), where only success passes.
    pub(super) fn must_unmap(&mut self, range: Range) -> Result<u128, Stop> {
        self.unmap(range).map_err(|error| fail(format!("unmapping {range}"), error))
    }

    /// The device reaches granule `n`, which leads to the subject's granule `to`.
    pub(super) fn reaches(&mut self, n: u64, to: u64) -> Result<(), Stop> {
        let page = self.page(n);
        let wanted = self.subject.map(page, to, Prot::RW).target().as_u64();
        // Aligned to words, so that a subject may access memory; the second is not the first word
        // of the granule, so that an offset shows.
        for offset in [0, self.granule() / 2] {
            let offset = offset & !7;
            let iova = Iova(page.first().0 + offset);
            let found = self.subject.access(iova, Prot::READ);
            ensure(found == Some(wanted + offset), || {
                format!("{iova} leads to {}, not to {:#x}", shown(found), wanted + offset)
            })?;
        }
        Ok(())
    }

    /// The device does not reach granule `n`.
    pub(super) fn refused(&mut self, n: u64) -> Result<(), Stop> {
        let iova = self.page(n).first();
        let found = self.subject.access(iova, Prot::READ);
        ensure(found.is_none(), || format!("{iova} leads to {}", shown(found)))
    }

    /// Checks that a call was refused with such an error.
    pub(super) fn must_refuse<T>(
        &self,
        what: &str,
        result: Result<T>,
        with: impl FnOnce(&Error) -> bool,
    ) -> Result<(), Stop> {
        match result {
            Ok(_) => Err(Stop::Fail(format!("{what}: done"))),
            Err(error) => ensure(with(&error), || format!("{what}: another error: {error}")),
        }
    }
}

/// Reports an error where none is allowed.
pub(super) fn fail(what: String, error: impl Display) -> Stop {
    Stop::Fail(format!("{what}: {error}"))
}

fn shown(found: Option<u64>) -> String {
    found.map_or_else(|| "nothing".to_string(), |target| format!("{target:#x}"))
}
