//! MAP (rules L51-L54, L60).

use std::collections::BTreeMap;

use ringfence_iommu::{Iova, Range};
use rustix::io::Errno;

use super::{
    super::{
        PAGE,
        faults::Step,
        memory::Frames,
        pins::{Batch, Machine, Wanted},
        table::{Run, pages},
    },
    Domain, State,
    dirty::Dirty,
    mapping::Mapping,
    whole,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

impl State {
    /// `VFIO_IOMMU_MAP_DMA`, check by check in the kernel's order.
    pub(super) fn map(
        &mut self,
        flags: MapFlags,
        iova: u64,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<()> {
        let known = MapFlags::READ | MapFlags::WRITE | MapFlags::VADDR;
        let prot = flags & (MapFlags::READ | MapFlags::WRITE);
        let updates = flags.contains(MapFlags::VADDR);
        if !(flags - known).is_empty() || prot.is_empty() != updates {
            return Err(Errno::INVAL);
        }
        let range = whole(iova, size, self.granule())?;
        whole(vaddr, size, self.granule())?;
        if updates {
            return self.update_vaddr(range, vaddr);
        }
        if self.find(range).is_some() {
            return Err(Errno::EXIST);
        }
        if self.available == 0 {
            return Err(Errno::NOSPC);
        }
        if !self.allows(range) {
            return Err(Errno::INVAL);
        }
        if self.machine.faults.hits(Step::Record) {
            return Err(Errno::NOMEM);
        }
        let mut mapping = Mapping {
            range,
            vaddr,
            prot,
            owner: self.caller.clone(),
            capable: self.caller.is_capable(),
            charged: 0,
            invalid: false,
            mapped: false,
            external: BTreeMap::new(),
            dirty: None,
        };
        if !self.domains.is_empty() {
            self.pin_and_map(&mut mapping)?;
        }
        if self.tracking {
            let granule = self.granule();
            match Dirty::new(&mut self.machine.faults, range, granule) {
                Ok(dirty) => mapping.dirty = Some(dirty),
                Err(failure) => {
                    self.unmap_and_unpin(&mut mapping, range);
                    return Err(failure);
                }
            }
        }
        // The state is locked: taking the budget only now makes no difference.
        self.available -= 1;
        self.mappings.insert(iova, mapping);
        Ok(())
    }

    /// MAP with VADDR (rule L60).
    fn update_vaddr(&mut self, range: Range, vaddr: u64) -> KernelResult<()> {
        let found = self.find(range).ok_or(Errno::NOENT)?;
        if !found.invalid || found.range != range {
            return Err(Errno::INVAL);
        }
        let mapping = self.mappings.get_mut(&range.first().0).ok_or(Errno::NOENT)?;
        mapping.change_owner(&self.caller)?;
        (mapping.vaddr, mapping.invalid) = (vaddr, false);
        self.invalid -= 1;
        Ok(())
    }

    /// Pins all of a mapping and puts it into the IOMMUs' tables, run by run; if that fails,
    /// nothing of it stays.
    fn pin_and_map(&mut self, mapping: &mut Mapping) -> KernelResult<()> {
        let mut batch = Batch::default();
        let (first, last) = (mapping.range.first().0, mapping.range.last().0);
        let mut next = Some(first);
        while let Some(iova) = next {
            let (range, step) = self.pin_and_map_run(mapping, iova, &mut batch);
            if let Err(failure) = step {
                self.machine.drain(&mut batch);
                if let Some(done) = iova.checked_sub(1).filter(|_| iova > first) {
                    let done = Range::new(Iova(first), Iova(done)).unwrap_or(mapping.range);
                    self.unmap_and_unpin(mapping, done);
                }
                return Err(failure);
            }
            next = (range.last().0 < last).then(|| range.last().0 + 1);
        }
        mapping.mapped = true;
        Ok(())
    }

    /// Pins and maps one run of a mapping, from `iova` on; returns its range, and the result.
    fn pin_and_map_run(
        &mut self,
        mapping: &mut Mapping,
        iova: u64,
        batch: &mut Batch,
    ) -> (Range, KernelResult<()>) {
        let rest = mapping.rest(iova).unwrap_or(mapping.range);
        let run = pin_run(&mut self.machine, mapping, rest, batch)
            .and_then(|frames| Run::new(iova, frames, mapping.prot));
        let run = match run {
            Ok(run) => run,
            Err(failure) => return (rest, Err(failure)),
        };
        let Machine { faults, log, .. } = &mut self.machine;
        for at in 0..self.domains.len() {
            let Err(failure) = self.domains[at].table.map(run, faults, log) else { continue };
            for Domain { table, .. } in &mut self.domains[..at] {
                table.unmap(run.range, log);
                table.sync(1, log);
            }
            let unpinned = self.machine.unpin(&[run]);
            mapping.release(unpinned - mapping.external_in(run.range).min(unpinned));
            return (run.range, Err(failure));
        }
        (run.range, Ok(()))
    }
}

/// Pins the run that `range` of a mapping begins with, and charges it: each ordinary page that is
/// not pinned externally already, and never above the limit (rule L53).
pub(super) fn pin_run(
    machine: &mut Machine,
    mapping: &mut Mapping,
    range: Range,
    batch: &mut Batch,
) -> KernelResult<Frames> {
    let iova = range.first().0;
    let wanted = Wanted {
        vaddr: mapping.vaddr(iova),
        pages: pages(range),
        write: mapping.prot.contains(MapFlags::WRITE),
    };
    let mut pending = 0;
    let frames = machine.pin_run(wanted, batch, |offset, count| {
        let part = Range::from_len(Iova(iova + offset * PAGE), count * PAGE);
        let already = part.map_or(0, |part| mapping.external_in(part));
        mapping.may_charge(pending + (count - already))?;
        pending += count - already;
        Ok(())
    })?;
    if let Err(failure) = mapping.charge(pending) {
        // Another container of the same owner has used up the limit meanwhile.
        if let Ok(run) = Run::new(iova, frames, mapping.prot) {
            machine.unpin(&[run]);
        }
        machine.drain(batch);
        return Err(failure);
    }
    Ok(frames)
}
