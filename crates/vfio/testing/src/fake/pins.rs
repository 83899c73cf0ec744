//! Pinning: pages are pinned in batches, and gathered into runs (rules L52-L54).

use rustix::io::Errno;

use super::{
    PAGE, SHIFT,
    events::{Event, Log},
    faults::{Faults, Step},
    memory::{Frames, Memory},
    table::Run,
};
use ringfence_vfio::kernel::KernelResult;

/// Most pages that are pinned in one call.
const BATCH: u64 = 512;

/// Pins pages, and counts them.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) memory: Memory,
    pub(super) faults: Faults,
    pub(super) log: Log,
    /// How many pins there are; those of reserved pages do not count.
    pub(super) pinned: u64,
    /// Whether pages are pinned in batches.
    pub(super) batches: bool,
}

/// Pages that were pinned in one call and belong to no run yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    vaddr: u64,
    pages: u64,
}

/// A run to be pinned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) vaddr: u64,
    pub(super) pages: u64,
    pub(super) write: bool,
}

impl Machine {
    pub(super) fn new(memory: Memory, batches: bool) -> Machine {
        Machine { memory, faults: Faults::default(), log: Log::default(), pinned: 0, batches }
    }

    /// Pins the run that `wanted` begins with: as many pages as are contiguous and of one kind
    /// (rule L52). `batch` holds what an earlier run left over, and receives what this one leaves.
    ///
    /// `charge` is called for ordinary pages before they join the run, with the offset of the first
    /// and their number, and refuses or admits them. On any failure nothing stays pinned, not even
    /// the batch.
    pub(super) fn pin_run(
        &mut self,
        wanted: Wanted,
        batch: &mut Batch,
        mut charge: impl FnMut(u64, u64) -> KernelResult<()>,
    ) -> KernelResult<Frames> {
        let mut run = Frames { pfn: 0, pages: 0, reserved: false };
        let failure = loop {
            if run.pages == wanted.pages {
                return Ok(run);
            }
            let vaddr = wanted.vaddr + run.pages * PAGE;
            if batch.pages == 0 {
                match self.fill(Wanted { vaddr, pages: wanted.pages - run.pages, ..wanted }) {
                    Ok(filled) => *batch = filled,
                    Err(failure) => break failure,
                }
            }
            let next = self.memory.frames(vaddr, batch.pages);
            if run.pages == 0 {
                run = Frames { pages: 0, ..next };
            } else if next.pfn != run.pfn + run.pages || next.reserved != run.reserved {
                return Ok(run);
            }
            if !next.reserved
                && let Err(failure) = charge(run.pages, next.pages)
            {
                break failure;
            }
            run.pages += next.pages;
            // After the very last page there is no next address; none is looked up then.
            batch.vaddr = batch.vaddr.wrapping_add(next.pages * PAGE);
            batch.pages -= next.pages;
        };
        if !run.reserved {
            self.pinned -= run.pages;
        }
        self.drain(batch);
        Err(failure)
    }

    /// Pins the next pages.
    fn fill(&mut self, wanted: Wanted) -> KernelResult<Batch> {
        let Wanted { vaddr, pages, write } = wanted;
        let most = if self.batches { BATCH } else { 1 };
        let mut pages = self.memory.reach(vaddr, pages.min(most), write, self.pinned)?;
        pages = self.faults.pass(Step::Pin, pages);
        if pages == 0 {
            return Err(Errno::FAULT);
        }
        self.count(vaddr, pages, |pinned, pages| pinned + pages);
        self.log.push(Event::Pinned { vaddr, pages });
        Ok(Batch { vaddr, pages })
    }

    /// Unpins the pages that no run has taken.
    pub(super) fn drain(&mut self, batch: &mut Batch) {
        self.count(batch.vaddr, batch.pages, |pinned, pages| pinned - pages);
        *batch = Batch::default();
    }

    /// Applies `change` to the count for the ordinary pages among `pages`.
    fn count(&mut self, vaddr: u64, pages: u64, change: impl Fn(u64, u64) -> u64) {
        let mut done = 0;
        while done < pages {
            let frames = self.memory.frames(vaddr + (done << SHIFT), pages - done);
            if !frames.reserved {
                self.pinned = change(self.pinned, frames.pages);
            }
            done += frames.pages;
        }
    }

    /// Unpins the pages of `runs`; returns how many were ordinary.
    pub(super) fn unpin(&mut self, runs: &[Run]) -> u64 {
        let mut unpinned = 0;
        for run in runs.iter().filter(|run| !run.reserved) {
            let (iova, pages) = (run.range.first().0, run.pages());
            self.log.push(Event::Unpinned { iova, pfn: run.pfn, pages });
            self.pinned -= pages;
            unpinned += pages;
        }
        unpinned
    }
}
