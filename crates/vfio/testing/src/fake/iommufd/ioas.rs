//! Address spaces: what is mapped, and whether it is pinned.

use std::collections::BTreeMap;

use ringfence_iommu::{Iova, Range};
use rustix::io::Errno;

use super::{
    super::{
        PAGE,
        faults::Step,
        owner::Owner,
        pins::{Batch, Machine, Wanted},
        table::{Run, around, pages},
    },
    State, bytes,
};
use ringfence_vfio::kernel::{Id, IovaRanges, KernelResult, MapFlags};

/// Most runs of one mapping; more are out of memory.
const RUNS: usize = 1 << 20;

/// An address space.
#[derive(Debug, Default)]
pub(super) struct Ioas {
    pub(super) areas: BTreeMap<u64, Area>,
    allowed: Vec<Range>,
}

/// A mapping.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) range: Range,
    pub(super) vaddr: u64,
    prot: MapFlags,
    owner: Owner,
    /// Whether the owner held the capability at the time of the map: nothing is charged then.
    capable: bool,
    /// The pinned runs: all of the mapping, or none.
    pub(super) runs: Vec<Run>,
}

impl Area {
    /// Pins all of it, charging each page before it is counted; if that fails, nothing stays
    /// pinned.
    pub(super) fn pin(&mut self, machine: &mut Machine) -> KernelResult<()> {
        let (mut rest, mut batch) = (Some(self.range), Batch::default());
        while let Some(range) = rest {
            let wanted = Wanted {
                vaddr: self.vaddr + (range.first().0 - self.range.first().0),
                pages: pages(range),
                write: self.prot.contains(MapFlags::WRITE),
            };
            let (owner, capable, mut charged) = (&self.owner, self.capable, 0);
            let frames = machine.pin_run(wanted, &mut batch, |_, count| {
                if !capable {
                    owner.charge(count, false)?;
                    charged += count;
                }
                Ok(())
            });
            // The kernel cannot pin device memory long-term here.
            let run = frames.and_then(|frames| match frames.reserved || self.runs.len() >= RUNS {
                false => Run::new(range.first().0, frames, self.prot),
                true if frames.reserved => Err(Errno::FAULT),
                true => {
                    machine.unpin(&[Run::new(range.first().0, frames, self.prot)?]);
                    Err(Errno::NOMEM)
                }
            });
            match run {
                Ok(run) => {
                    self.runs.push(run);
                    rest = around(range, run.range)[1];
                }
                Err(failure) => {
                    self.owner.release(charged);
                    machine.drain(&mut batch);
                    self.unpin(machine);
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// Unpins all of it.
    pub(super) fn unpin(&mut self, machine: &mut Machine) {
        let unpinned = machine.unpin(&std::mem::take(&mut self.runs));
        self.owner.release(if self.capable { 0 } else { unpinned });
    }
}

impl Ioas {
    /// Whether `range` overlaps a mapping, or a range that must stay mappable.
    pub(super) fn needs(&self, range: Range) -> bool {
        self.overlapping(range).next().is_some()
            || self.allowed.iter().any(|allowed| allowed.overlaps(range))
    }

    /// The mappings that overlap `range`, in order.
    pub(super) fn overlapping(&self, range: Range) -> impl Iterator<Item = &Area> {
        let before = self.areas.range(..range.first().0).next_back().map(|(_, area)| area);
        let inside = self.areas.range(range.first().0..=range.last().0).map(|(_, area)| area);
        before.filter(move |area| area.range.overlaps(range)).into_iter().chain(inside)
    }

    /// Whether all of `range` is mapped, without a gap.
    pub(super) fn covers(&self, range: Range) -> bool {
        let mut next = Some(range.first().0);
        for area in self.overlapping(range) {
            if !next.is_some_and(|next| area.range.contains(Iova(next))) {
                return false;
            }
            next = area.range.last().0.checked_add(1);
        }
        next.is_none_or(|next| next > range.last().0)
    }
}

impl State {
    pub(super) fn allow(&mut self, ioas: Id, ranges: &[Range]) -> KernelResult<()> {
        let blind = self.blind(ioas);
        let space = self.ioas.get_mut(&ioas).ok_or(Errno::NOENT)?;
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0].overlaps(pair[1])) {
            return Err(Errno::INVAL);
        }
        if sorted.iter().any(|range| blind.iter().any(|blind| blind.overlaps(*range))) {
            return Err(Errno::ADDRINUSE);
        }
        space.allowed = sorted;
        Ok(())
    }

    pub(super) fn iova_ranges(&self, ioas: Id) -> KernelResult<IovaRanges> {
        if !self.ioas.contains_key(&ioas) {
            return Err(Errno::NOENT);
        }
        let mut ranges = vec![Range::ALL];
        for blind in self.blind(ioas) {
            let cut = |range: Range| match range.intersection(blind) {
                Some(part) => around(range, part),
                None => [Some(range), None],
            };
            ranges = ranges.into_iter().flat_map(cut).flatten().collect();
        }
        Ok(IovaRanges { ranges, alignment: self.alignment(ioas) })
    }

    pub(super) fn map(
        &mut self,
        id: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64> {
        let prot = MapFlags::READ | MapFlags::WRITE;
        if !(flags - prot).is_empty() {
            return Err(Errno::OPNOTSUPP);
        }
        if iova == Some(u64::MAX) || size == u64::MAX {
            return Err(Errno::OVERFLOW);
        }
        if flags.is_empty() {
            return Err(Errno::INVAL);
        }
        let space = self.ioas.get(&id).ok_or(Errno::NOENT)?;
        if size == 0 {
            return Err(Errno::INVAL);
        }
        vaddr.checked_add(size).ok_or(Errno::OVERFLOW)?;
        let aligned = self.alignment(id) - 1;
        if (vaddr | size | iova.unwrap_or(0)) & aligned != 0 {
            return Err(Errno::INVAL);
        }
        let range = match iova {
            None => self.choose(id, vaddr, size)?,
            Some(iova) => {
                let range = bytes(iova, size)?;
                if self.blind(id).iter().any(|blind| blind.overlaps(range)) {
                    return Err(Errno::INVAL);
                }
                if space.overlapping(range).next().is_some() {
                    return Err(Errno::EXIST);
                }
                range
            }
        };
        if self.machine.faults.hits(Step::Record) {
            return Err(Errno::NOMEM);
        }
        let capable = self.caller.is_capable();
        let owner = self.caller.clone();
        let mut area = Area { range, vaddr, prot: flags, owner, capable, runs: Vec::new() };
        let mut tables = self.hwpts.values_mut().filter(|hwpt| hwpt.ioas == id);
        let mut done = Vec::new();
        if let Some(first) = tables.next() {
            area.pin(&mut self.machine)?;
            for hwpt in std::iter::once(first).chain(tables) {
                if let Err(failure) = hwpt.insert(&area, &mut self.machine) {
                    done.into_iter().for_each(|hwpt: &mut super::Hwpt| {
                        hwpt.remove(range, &mut self.machine);
                    });
                    area.unpin(&mut self.machine);
                    return Err(failure);
                }
                done.push(hwpt);
            }
        }
        let space = self.ioas.get_mut(&id).ok_or(Errno::NOENT)?;
        space.areas.insert(range.first().0, area);
        Ok(range.first().0)
    }

    /// Finds room for `size` bytes: the lowest address with the alignment of the memory's address.
    fn choose(&self, id: Id, vaddr: u64, size: u64) -> KernelResult<Range> {
        let space = self.ioas.get(&id).ok_or(Errno::NOENT)?;
        let natural = 1_u64 << (vaddr | size).trailing_zeros().min(30);
        let align = natural.max(self.alignment(id));
        let mut free = self.iova_ranges(id)?.ranges;
        if !space.allowed.is_empty() {
            free.clone_from(&space.allowed);
        }
        for range in free {
            let mut at = Some(range.first().0);
            while let Some(first) = at.and_then(|at| at.checked_next_multiple_of(align)) {
                let Ok(place) = bytes(first, size) else { break };
                if !range.covers(place) {
                    break;
                }
                let Some(area) = space.overlapping(place).last() else { return Ok(place) };
                at = area.range.last().0.checked_add(1);
            }
        }
        Err(Errno::NOSPC)
    }

    pub(super) fn unmap(&mut self, id: Id, iova: u64, size: u64) -> KernelResult<u64> {
        let all = iova == 0 && size == u64::MAX;
        let range = if all { Range::ALL } else { bytes(iova, size)? };
        let space = self.ioas.get(&id).ok_or(Errno::NOENT)?;
        let areas: Vec<Range> = space.overlapping(range).map(|area| area.range).collect();
        if areas.is_empty() && !all {
            return Err(Errno::NOENT);
        }
        let mut unmapped = 0_u64;
        for area in areas {
            // Mappings before one that would be split are removed by then.
            if !range.covers(area) {
                return Err(Errno::NOENT);
            }
            self.remove_area(id, area);
            unmapped = unmapped.saturating_add(area.extent()).saturating_add(1);
        }
        Ok(unmapped)
    }

    /// Removes a mapping: from every page table before its pages are unpinned.
    fn remove_area(&mut self, id: Id, range: Range) {
        let space = self.ioas.get_mut(&id);
        let Some(mut area) = space.and_then(|space| space.areas.remove(&range.first().0)) else {
            return;
        };
        for hwpt in self.hwpts.values_mut().filter(|hwpt| hwpt.ioas == id) {
            hwpt.remove(range, &mut self.machine);
        }
        area.unpin(&mut self.machine);
    }

    /// The alignment of addresses and sizes: a page as soon as there is a page table.
    pub(super) fn alignment(&self, ioas: Id) -> u64 {
        if self.hwpts.values().any(|hwpt| hwpt.ioas == ioas) { PAGE } else { 1 }
    }
}
