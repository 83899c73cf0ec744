//! An IOMMU's page table.

use std::collections::BTreeMap;

use ringfence_iommu::{Iova, Range};
use rustix::io::Errno;

use super::{
    PAGE, SHIFT,
    events::{Event, Log},
    faults::{Faults, Step},
    memory::Frames,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

/// A run of frames as it was mapped, or what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Its addresses: whole pages.
    pub(super) range: Range,
    /// The first frame.
    pub(super) pfn: u64,
    /// Whether the frames are not ordinary memory.
    pub(super) reserved: bool,
    /// What a device may do.
    pub(super) prot: MapFlags,
}

impl Run {
    /// `frames` at `iova`; EINVAL if that would wrap.
    pub(super) fn new(iova: u64, frames: Frames, prot: MapFlags) -> KernelResult<Run> {
        let len = frames.pages.checked_mul(PAGE).ok_or(Errno::INVAL)?;
        let range = Range::from_len(Iova(iova), len).ok_or(Errno::INVAL)?;
        Ok(Run { range, pfn: frames.pfn, reserved: frames.reserved, prot })
    }

    /// How many pages.
    pub(super) fn pages(&self) -> u64 {
        pages(self.range)
    }

    /// The part that lies in `range`, which is of whole pages.
    fn part(&self, range: Range) -> Option<Run> {
        let range = self.range.intersection(range)?;
        let skipped = (range.first().0 - self.range.first().0) >> SHIFT;
        Some(Run { range, pfn: self.pfn + skipped, ..*self })
    }
}

/// How many pages a range of whole pages has.
pub(super) fn pages(range: Range) -> u64 {
    (range.extent() >> SHIFT) + 1
}

/// The parts of `range` before and behind `cut`.
pub(super) fn around(range: Range, cut: Range) -> [Option<Range>; 2] {
    let before =
        cut.first().0.checked_sub(1).and_then(|last| Range::new(range.first(), Iova(last)));
    let behind =
        cut.last().0.checked_add(1).and_then(|first| Range::new(Iova(first), range.last()));
    [before, behind]
}

/// The page table of one IOMMU.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Its number, for the log.
    pub(super) iommu: u32,
    /// Whether unmapping a page removes all of the run that it was mapped with.
    pub(super) coarse: bool,
    /// Most runs; more are out of memory.
    pub(super) most: usize,
    runs: BTreeMap<u64, Run>,
}

impl Table {
    pub(super) fn new(iommu: u32, coarse: bool, most: usize) -> Table {
        Table { iommu, coarse, most, runs: BTreeMap::new() }
    }

    /// The run that contains `iova`.
    pub(super) fn at(&self, iova: u64) -> Option<&Run> {
        let (_, run) = self.runs.range(..=iova).next_back()?;
        run.range.contains(Iova(iova)).then_some(run)
    }

    /// The first address of `range` at which something is mapped.
    pub(super) fn next(&self, range: Range) -> Option<u64> {
        if self.at(range.first().0).is_some() {
            return Some(range.first().0);
        }
        self.runs.range(range.first().0..=range.last().0).next().map(|(&iova, _)| iova)
    }

    /// The part in `range` of the run at its first address.
    pub(super) fn run(&self, range: Range) -> Option<Run> {
        self.at(range.first().0)?.part(range)
    }

    /// The part of `range` from its first address on whose frames are contiguous.
    pub(super) fn contiguous(&self, range: Range) -> Option<Range> {
        let run = self.at(range.first().0)?;
        let (first, mut last) = (range.first(), run.range.last().0);
        let mut next_pfn = run.pfn + run.pages();
        while last < range.last().0 {
            let Some(run) = self.runs.get(&(last + 1)).filter(|run| run.pfn == next_pfn) else {
                break;
            };
            (last, next_pfn) = (run.range.last().0, next_pfn + run.pages());
        }
        Range::new(first, Iova(last.min(range.last().0)))
    }

    /// Maps a run where nothing is mapped; if that fails, nothing of it stays mapped.
    pub(super) fn map(&mut self, run: Run, faults: &mut Faults, log: &mut Log) -> KernelResult<()> {
        if faults.hits(Step::Map) || self.runs.len() >= self.most {
            return Err(Errno::NOMEM);
        }
        debug_assert!(self.next(run.range).is_none(), "mapped over a mapping");
        let (iova, pages) = (run.range.first().0, run.pages());
        if faults.hits(Step::Table) {
            // The memory for tables ends when half of it is mapped: the IOMMU layer unmaps that
            // again.
            let half = Range::from_len(run.range.first(), pages.div_ceil(2) * PAGE);
            if let Some(part) = half.and_then(|half| run.part(half)) {
                self.runs.insert(iova, part);
                self.unmap(part.range, log);
                self.sync(1, log);
            }
            return Err(Errno::NOMEM);
        }
        self.runs.insert(iova, run);
        let Run { pfn, reserved, .. } = run;
        log.push(Event::Mapped { iommu: self.iommu, iova, pfn, pages, reserved });
        Ok(())
    }

    /// Removes what lies in `range`, and from coarse tables all runs that it touches. Returns what
    /// was removed, in order; the caller must invalidate the IOTLB.
    pub(super) fn unmap(&mut self, range: Range, log: &mut Log) -> Vec<Run> {
        let mut removed = Vec::new();
        let mut at = self.next(range);
        while let Some(run) = at.and_then(|iova| self.at(iova)).copied() {
            self.runs.remove(&run.range.first().0);
            let part = if self.coarse { None } else { run.part(range) };
            removed.push(part.unwrap_or(run));
            if let Some(part) = part {
                for rest in around(run.range, part.range).into_iter().flatten() {
                    self.runs.extend(run.part(rest).map(|rest_run| (rest.first().0, rest_run)));
                }
            }
            let rest = around(range, run.range)[1];
            at = rest.and_then(|rest| self.next(rest));
        }
        log.push(Event::Unmapped {
            iommu: self.iommu,
            iova: range.first().0,
            asked: pages(range),
            removed: removed.iter().map(Run::pages).sum(),
        });
        removed
    }

    /// Invalidates the IOTLB for what was unmapped, `regions` regions.
    pub(super) fn sync(&mut self, regions: u64, log: &mut Log) {
        log.push(Event::Synced { iommu: self.iommu, regions });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pfn(table: &Table, page: u64) -> Option<u64> {
        table.run(range(page, 1)).map(|run| run.pfn)
    }

    fn range(first: u64, pages: u64) -> Range {
        Range::from_len(Iova(first << SHIFT), pages << SHIFT).unwrap()
    }

    fn table(coarse: bool) -> (Table, Faults, Log) {
        let (mut table, mut faults, mut log) =
            (Table::new(1, coarse, 100), Faults::default(), Log::default());
        for (page, pfn, pages) in [(0, 100, 4), (4, 104, 2), (6, 200, 2)] {
            let frames = Frames { pfn, pages, reserved: false };
            let run = Run::new(page << SHIFT, frames, MapFlags::READ).unwrap();
            table.map(run, &mut faults, &mut log).unwrap();
        }
        (table, faults, log)
    }

    #[test]
    fn runs_are_found_cut_and_taken_whole() {
        let (mut table, _, mut log) = table(false);
        assert_eq!(table.contiguous(range(1, 9)), Some(range(1, 5)));
        assert_eq!(table.contiguous(range(1, 2)), Some(range(1, 2)));
        let removed = table.unmap(range(3, 4), &mut log);
        assert_eq!(
            removed.iter().map(|run| (run.range, run.pfn)).collect::<Vec<_>>(),
            [(range(3, 1), 103), (range(4, 2), 104), (range(6, 1), 200)]
        );
        assert_eq!(pfn(&table, 2), Some(102));
        assert_eq!(pfn(&table, 3), None);
        assert_eq!(pfn(&table, 7), Some(201));
        assert_eq!(table.next(range(3, 100)), Some(7 << SHIFT));
        let last = Range::new(Iova(u64::MAX - 4095), Iova(u64::MAX)).unwrap();
        assert_eq!(table.next(last), None);
    }

    #[test]
    fn coarse_tables_lose_whole_runs() {
        let (mut table, _, mut log) = table(true);
        assert_eq!(table.unmap(range(1, 1), &mut log)[0].range, range(0, 4));
        assert_eq!(pfn(&table, 0), None);
        assert_eq!(pfn(&table, 4), Some(104));
    }

    #[test]
    fn a_map_that_fails_leaves_nothing() {
        let (mut table, mut faults, mut log) = table(false);
        let frames = Frames { pfn: 7, pages: 5, reserved: false };
        let run = Run::new(8 << SHIFT, frames, MapFlags::READ).unwrap();
        for step in [Step::Map, Step::Table] {
            faults.fail(step, 1);
            assert_eq!(table.map(run, &mut faults, &mut log), Err(Errno::NOMEM));
            assert_eq!(table.next(range(8, 5)), None);
        }
        table.most = 3;
        assert_eq!(table.map(run, &mut faults, &mut log), Err(Errno::NOMEM));
    }
}
