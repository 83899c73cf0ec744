//! UNMAP (rules L55-L59, L62, L63).

use ringfence_iommu::{Iova, Range};
use rustix::io::Errno;

use super::{
    super::{
        PAGE,
        events::Event,
        faults::Step,
        pins::Machine,
        table::{Run, Table},
    },
    Notify, State, Type1, dirty,
    mapping::Mapping,
    whole,
};
use ringfence_vfio::kernel::{Bitmap, KernelResult, UnmapFlags};

/// Most regions that are unmapped before the IOTLB is invalidated (rule L57).
const REGIONS: usize = 512;
/// How often holders of external pins are notified again; after that a kernel hits a BUG.
const NOTICES: u32 = 10;

/// How far an unmap got.
enum Came {
    /// To its end.
    ToTheEnd,
    /// To a mapping with external pins.
    ToPins(Range, Vec<Notify>),
}

impl Type1 {
    /// `VFIO_IOMMU_UNMAP_DMA`, check by check in the kernel's order. EBUSY if external pins are not
    /// released.
    pub(super) fn unmap_range(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        mut bitmap: Option<Bitmap<'_>>,
    ) -> KernelResult<u64> {
        let get_dirty = flags.contains(UnmapFlags::GET_DIRTY);
        let known = UnmapFlags::GET_DIRTY | UnmapFlags::ALL | UnmapFlags::VADDR;
        if !(flags - known).is_empty() || get_dirty && flags != UnmapFlags::GET_DIRTY {
            return Err(Errno::INVAL);
        }
        let page = match &mut bitmap {
            _ if !get_dirty => None,
            None => return Err(Errno::INVAL),
            Some(bitmap) => Some(dirty::check(size, bitmap)?),
        };
        let (mut unmapped, mut notified, mut notices) = (0_u64, None, 0);
        loop {
            let mut state = self.attached()?;
            let range = state.check_unmap(flags, iova, size, page)?;
            let cuts = !self.v1 && !flags.contains(UnmapFlags::ALL) && state.bisects(range);
            if cuts {
                return Err(Errno::INVAL);
            }
            if flags.contains(UnmapFlags::VADDR) {
                return state.invalidate(range, self.v1);
            }
            let into = bitmap.as_mut().filter(|_| get_dirty);
            match state.unmap_mappings(range, self.v1, into, &mut unmapped)? {
                Came::ToTheEnd => return Ok(unmapped),
                Came::ToPins(mapping, holders) => {
                    notices = if notified == Some(mapping) { notices + 1 } else { 0 };
                    if notices > NOTICES {
                        return Err(Errno::BUSY);
                    }
                    notified = Some(mapping);
                    let (iova, size) = (mapping.first().0, mapping.extent().saturating_add(1));
                    state.machine.log.push(Event::Notified { iova, size });
                    drop(state);
                    holders.iter().for_each(|holder| holder(self, iova, size));
                }
            }
        }
    }
}

impl State {
    /// The checks of UNMAP before it looks at mappings; returns the range. `page`: the page size of
    /// the requested bitmap.
    fn check_unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        page: Option<u64>,
    ) -> KernelResult<Range> {
        if flags.contains(UnmapFlags::VADDR) && self.has_emulated() {
            return Err(Errno::BUSY);
        }
        let range = if !flags.contains(UnmapFlags::ALL) {
            whole(iova, size, self.granule())?
        } else if iova == 0 && size == 0 {
            Range::ALL
        } else {
            return Err(Errno::INVAL);
        };
        match page {
            Some(page) if !self.tracking || page != self.granule() => Err(Errno::INVAL),
            _ => Ok(range),
        }
    }

    /// The first addresses of the mappings that an unmap of `range` covers. In a v1 container, a
    /// mapping that begins before the range ends the search (rule L55).
    fn targets(&self, range: Range, v1: bool) -> Vec<u64> {
        let first = self.find(range).map_or(range.last().0, |found| found.range.first().0);
        if v1 && first < range.first().0 {
            return Vec::new();
        }
        let last = first.max(range.last().0);
        let found = self.mappings.range(first..=last).filter(|(_, at)| at.range.overlaps(range));
        found.map(|(&iova, _)| iova).collect()
    }

    /// Marks the addresses of mappings invalid: of all in `range` or, if one is marked already, of
    /// none (rule L59).
    fn invalidate(&mut self, range: Range, v1: bool) -> KernelResult<u64> {
        let targets = self.targets(range, v1);
        if targets.iter().any(|iova| self.mappings[iova].invalid) {
            return Err(Errno::INVAL);
        }
        let mut bytes = 0_u64;
        for iova in targets {
            if let Some(mapping) = self.mappings.get_mut(&iova) {
                mapping.invalid = true;
                self.invalid += 1;
                bytes = bytes.saturating_add(mapping.range.extent() + 1);
            }
        }
        Ok(bytes)
    }

    /// Unmaps the mappings in `range` one after another, up to one with external pins.
    fn unmap_mappings(
        &mut self,
        range: Range,
        v1: bool,
        mut bitmap: Option<&mut Bitmap<'_>>,
        unmapped: &mut u64,
    ) -> KernelResult<Came> {
        for iova in self.targets(range, v1) {
            let Some(mapping) = self.mappings.get(&iova) else { continue };
            if !mapping.external.is_empty() {
                return Ok(Came::ToPins(mapping.range, self.holders()));
            }
            if let Some(bitmap) = &mut bitmap {
                let all = self.dirties_all();
                dirty::write_bits(mapping, all, range.first().0, bitmap);
            }
            *unmapped = unmapped.saturating_add(mapping.range.extent() + 1);
            self.remove(iova);
        }
        Ok(Came::ToTheEnd)
    }

    /// Removes a mapping and all that belongs to it.
    pub(super) fn remove(&mut self, iova: u64) {
        let Some(mut mapping) = self.mappings.remove(&iova) else { return };
        let range = mapping.range;
        self.unmap_and_unpin(&mut mapping, range);
        self.invalid -= u64::from(mapping.invalid);
        self.available += 1;
    }

    /// Takes `range` of a mapping out of the IOMMUs' tables, unpins its pages and uncharges them.
    pub(super) fn unmap_and_unpin(&mut self, mapping: &mut Mapping, range: Range) {
        let unpinned = self.unmap_unpin(range);
        mapping.mapped = false;
        mapping.release(unpinned);
    }

    /// Takes `range` out of the IOMMUs' tables and unpins the pages; returns how many were
    /// ordinary.
    ///
    /// No page is unpinned before the invalidation that covers it: first all of it is removed from
    /// the other IOMMUs, then from the first one, region by region, at most 512 for each sync (rule
    /// L57).
    pub(super) fn unmap_unpin(&mut self, range: Range) -> u64 {
        let Some((first, others)) = self.domains.split_first_mut() else { return 0 };
        let machine = &mut self.machine;
        for other in others {
            other.table.unmap(range, &mut machine.log);
            other.table.sync(1, &mut machine.log);
        }
        let mut gathered = Gathered::default();
        let mut unpinned = 0;
        let mut rest = Some(range);
        while let Some(next) = rest.and_then(|rest| {
            let iova = first.table.next(rest)?;
            Range::new(Iova(iova), rest.last())
        }) {
            // The longest contiguous run of frames; where there are superpages, the IOMMU itself
            // removes more than it is asked for (rule L58).
            let page = Range::from_len(next.first(), PAGE).unwrap_or(next);
            let stretch = if first.superpages { page } else { stretch(&first.table, next) };
            if machine.faults.hits(Step::Region) {
                unpinned += gathered.sync(&mut first.table, machine);
                gathered.add(first.table.unmap(stretch, &mut machine.log));
                unpinned += gathered.sync(&mut first.table, machine);
            } else {
                gathered.add(first.table.unmap(stretch, &mut machine.log));
                if gathered.regions >= REGIONS {
                    unpinned += gathered.sync(&mut first.table, machine);
                }
            }
            rest = super::super::table::around(next, stretch)[1];
        }
        unpinned + gathered.sync(&mut first.table, machine)
    }
}

/// The contiguous frames at the start of `range`, at which something is mapped.
fn stretch(table: &Table, range: Range) -> Range {
    table.contiguous(range).unwrap_or(range)
}

/// Unmapped regions that the IOTLB may still hold.
#[derive(Default)]
struct Gathered {
    regions: usize,
    runs: Vec<Run>,
}

impl Gathered {
    fn add(&mut self, runs: Vec<Run>) {
        self.regions += 1;
        self.runs.extend(runs);
    }

    /// Invalidates the IOTLB for them and unpins their pages; returns how many were ordinary.
    fn sync(&mut self, table: &mut Table, machine: &mut Machine) -> u64 {
        if self.regions == 0 {
            return 0;
        }
        table.sync(self.regions as u64, &mut machine.log);
        self.regions = 0;
        machine.unpin(&std::mem::take(&mut self.runs))
    }
}
