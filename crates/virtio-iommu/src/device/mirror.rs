//! A copy of a domain's mappings where a real IOMMU translates.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, HostAddr, Iova, Map, Prot, Range, ReservedKind,
    ReservedRegion, Result, table::Mapping,
};

/// A piece of guest memory, and where it lies in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRegion {
    /// Its first and its last guest-physical address.
    pub guest: (GuestPhys, GuestPhys),
    /// Where the first address lies.
    pub host: HostAddr,
}

/// The domain of an endpoint whose DMA a real IOMMU translates: it leads to host addresses, and a
/// [`Joint`](super::Joint) repeats its mappings there.
///
/// A mapping may lie in several regions of guest memory and then becomes several mappings of the
/// domain. Adjacent mappings are never merged: the domain would refuse to remove one of them.
///
/// The domain must not need the calling thread for its [`iotlb_sync`](Domain::iotlb_sync): VFIO's
/// have done everything when an unmap returns.
pub struct Mirror {
    domain: Arc<dyn Domain<Target = HostAddr>>,
    granule: u64,
    /// In ascending order.
    memory: Box<[HostRegion]>,
    can_bypass: bool,
    failures: AtomicU64,
}

impl Mirror {
    /// A mirror in `domain`, in which nothing is mapped, of mappings to `memory`. With `can_bypass`
    /// an endpoint that bypasses gets all of `memory` mapped; without, bypass is refused.
    ///
    /// # Safety
    /// `memory` stays mapped in this process, and is used as guest memory only, as long as the
    /// mirror or its domain exists.
    ///
    /// # Panics
    /// If regions of the memory overlap, end before they begin, or pass the end of the address
    /// space.
    pub unsafe fn new(
        domain: Arc<dyn Domain<Target = HostAddr>>,
        memory: impl IntoIterator<Item = HostRegion>,
        can_bypass: bool,
    ) -> Arc<Mirror> {
        let mut memory: Box<[HostRegion]> = memory.into_iter().collect();
        memory.sort_unstable_by_key(|region| region.guest);
        let apart = memory.windows(2).all(|two| two[0].guest.1 < two[1].guest.0);
        let legal = memory.iter().all(|HostRegion { guest: (first, last), host }| {
            first <= last && host.0.checked_add(last.0 - first.0).is_some()
        });
        assert!(apart && legal, "memory that lies in two places, or in none");
        let granule = domain.geometry().page_sizes.granule();
        Arc::new(Mirror { domain, granule, memory, can_bypass, failures: AtomicU64::new(0) })
    }

    /// How often a mapping could not be removed, or not be put back: something may be reachable
    /// that should not be, or not reachable that should.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// What cannot be mapped there: the reserved regions of its domain, and what lies outside of
    /// the domain's aperture.
    pub fn reserved(&self) -> Vec<ReservedRegion> {
        let Geometry { aperture, reserved, .. } = self.domain.geometry();
        let (first, last) = (aperture.first().0, aperture.last().0);
        let below = first.checked_sub(1).and_then(|last| Range::new(Iova(0), Iova(last)));
        let above = last.checked_add(1).and_then(|first| Range::new(Iova(first), Iova(u64::MAX)));
        let outside = |range| ReservedRegion { range, kind: ReservedKind::Reserved };
        let holes = below.map(outside).into_iter().chain(reserved.iter().copied());
        holes.chain(above.map(outside)).collect()
    }

    /// Makes a mapping. All or nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: it leads where there is no memory. Otherwise the domain's.
    pub(super) fn map(&self, mapping: &Mapping) -> Result<()> {
        // Looked through to the end first, so that in most cases nothing is undone.
        self.pieces(mapping).try_for_each(|piece| piece.map(drop))?;
        let mut made = 0;
        let mapped = self.pieces(mapping).try_for_each(|piece| {
            let (range, host) = piece?;
            self.make(range, host, mapping.prot)?;
            made += 1;
            self.domain.iotlb_sync_map(range).map(drop)
        });
        mapped.inspect_err(|_| {
            // Counted where it fails.
            let made = self.pieces(mapping).take(made).flatten();
            made.for_each(|(range, _)| _ = self.unmap(range));
        })
    }

    fn make(&self, range: Range, host: HostAddr, prot: Prot) -> Result<()> {
        // SAFETY: a piece of the memory, as the caller of `Mirror::new` guaranteed.
        self.domain.map(unsafe { Map::of(range, host, prot) })
    }

    /// Makes the missing parts of a mapping, as after a failure. What was made stays.
    ///
    /// # Errors
    /// As [`map`](Self::map); and something else may be there.
    pub(super) fn fill(&self, mapping: &Mapping) -> Result<()> {
        self.pieces(mapping).try_for_each(|piece| {
            let (range, host) = piece?;
            if !self.has((range, host)) {
                self.make(range, host, mapping.prot)?;
                self.domain.iotlb_sync_map(range)?;
            }
            Ok(())
        })
    }

    /// Removes all mappings in `range`, none of which it may split.
    ///
    /// # Errors
    /// The domain's, counted: some of them may be there.
    pub(super) fn unmap(&self, range: Range) -> Result<()> {
        // The domain's granule may be larger: its mappings consist of whole ones.
        let Some(range) = range.inward(self.granule) else { return Ok(()) };
        let mut gather = Gather::new();
        let unmapped = self.domain.unmap(range, &mut gather);
        let synced = unmapped.and_then(|_| self.domain.iotlb_sync(&mut gather)).map(drop);
        synced.inspect_err(|_| self.count())
    }

    /// # Errors
    /// [`Error::Unsupported`]: it may not have all of guest memory.
    pub(super) fn may_bypass(&self) -> Result<()> {
        if self.can_bypass { Ok(()) } else { Err(Error::Unsupported("the endpoint cannot bypass")) }
    }

    /// Maps all of guest memory to itself.
    ///
    /// # Errors
    /// The domain's; some of it may be mapped.
    pub(super) fn map_all_memory(&self) -> Result<()> {
        self.memory.iter().try_for_each(|region| self.map(&identity(region)))
    }

    /// As [`fill`](Self::fill), of what [`map_all_memory`](Self::map_all_memory) makes.
    pub(super) fn fill_all_memory(&self) -> Result<()> {
        self.memory.iter().try_for_each(|region| self.fill(&identity(region)))
    }

    /// Notes that something could not be removed or put back.
    pub(super) fn count(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a piece is there. It is there whole or not at all.
    fn has(&self, (range, host): (Range, HostAddr)) -> bool {
        self.domain.iova_to_phys(range.first()) == Some(host)
    }

    /// What the domain has to map for a mapping: in ascending order, an error where memory ends.
    fn pieces(&self, mapping: &Mapping) -> impl Iterator<Item = Result<(Range, HostAddr)>> {
        let Mapping { range, target, .. } = *mapping;
        let mut next = Some(range.first());
        // The target of its last address passes 2^64 in no mapping.
        std::iter::from_fn(move || {
            let first = next?;
            let phys = GuestPhys(first.0 - range.first().0 + target);
            let at = self.memory.partition_point(|region| region.guest.1 < phys);
            let Some(region) = self.memory.get(at).filter(|region| region.guest.0 <= phys) else {
                next = None;
                return Some(Err(Error::Unsupported("no memory there")));
            };
            let extent = (region.guest.1.0 - phys.0).min(range.last().0 - first.0);
            let last = Iova(first.0 + extent);
            next = (last < range.last()).then(|| Iova(last.0 + 1));
            let host = HostAddr(region.host.0 + (phys.0 - region.guest.0.0));
            Range::new(first, last).map(|range| Ok((range, host)))
        })
    }
}

fn identity(region: &HostRegion) -> Mapping {
    let (first, last) = region.guest;
    let range = Range::new(Iova(first.0), Iova(last.0)).expect("checked when it was made");
    Mapping { range, target: first.0, prot: Prot::RW }
}

impl fmt::Debug for Mirror {
    ringfence_sync::shows!(Mirror as it, memory: it.memory, failures: it.failures());
}
