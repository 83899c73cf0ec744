//! Devices, and the page tables that they use.

use std::collections::BTreeSet;

use ringfence_iommu::{HostAddr, Iova, Range};
use rustix::io::Errno;

use super::{
    super::{
        Group, PAGE, SHIFT,
        copy::{REMEMBERED, Refused},
        pins::Machine,
        table::{Table, around},
    },
    State, bytes,
    ioas::Area,
};
use ringfence_vfio::kernel::{Bitmap, Id, KernelResult, MapFlags};

/// Most runs of a page table.
const RUNS: usize = 1 << 20;

/// A bound device.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) group: Group,
    pub(super) tracks_dirty: bool,
    pub(super) hwpt: Option<Id>,
}

/// A page table.
#[derive(Debug)]
pub(super) struct Hwpt {
    pub(super) ioas: Id,
    aperture: Range,
    table: Table,
    /// Whether it is removed with the last device that uses it.
    automatic: bool,
    /// Whether it can track writes, and whether it does.
    can_track: bool,
    tracking: bool,
    /// Pages that were written to, by number.
    dirty: BTreeSet<u64>,
}

impl Hwpt {
    /// Maps a pinned mapping; if that fails, nothing of it stays mapped.
    pub(super) fn insert(&mut self, area: &Area, machine: &mut Machine) -> KernelResult<()> {
        for (at, &run) in area.runs.iter().enumerate() {
            if let Err(failure) = self.table.map(run, &mut machine.faults, &mut machine.log) {
                if at > 0 {
                    self.remove(area.range, machine);
                }
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Removes what lies in `range`, and invalidates the IOTLB for it.
    pub(super) fn remove(&mut self, range: Range, machine: &mut Machine) {
        self.table.unmap(range, &mut machine.log);
        self.table.sync(1, &mut machine.log);
        let (first, last) = (range.first().0 >> SHIFT, range.last().0 >> SHIFT);
        let gone: Vec<u64> = self.dirty.range(first..=last).copied().collect();
        for page in gone {
            self.dirty.remove(&page);
        }
    }
}

impl State {
    /// The ranges of an address space that cannot be mapped: those that its page tables do not
    /// translate, and those that the attached devices reserve.
    pub(super) fn blind(&self, ioas: Id) -> Vec<Range> {
        let tables = self.hwpts.iter().filter(|(_, hwpt)| hwpt.ioas == ioas);
        let mut blind = Vec::new();
        for (id, hwpt) in tables {
            blind.extend(around(Range::ALL, hwpt.aperture).into_iter().flatten());
            let users = self.devices.values().filter(|device| device.hwpt == Some(*id));
            blind.extend(users.flat_map(|user| user.group.reserved.iter().map(|at| at.range)));
        }
        blind
    }

    pub(super) fn new_hwpt(
        &mut self,
        device: Id,
        ioas: Id,
        dirty: bool,
        automatic: bool,
    ) -> KernelResult<Id> {
        let Device { group, tracks_dirty, .. } = self.devices.get(&device).ok_or(Errno::NOENT)?;
        let (group, tracks_dirty) = (group.clone(), *tracks_dirty);
        let Some(space) = self.ioas.get(&ioas) else {
            let other = self.hwpts.contains_key(&ioas) || self.devices.contains_key(&ioas);
            return Err(if other { Errno::INVAL } else { Errno::NOENT });
        };
        if dirty && !tracks_dirty {
            return Err(Errno::OPNOTSUPP);
        }
        let granule = 1 << group.page_sizes.trailing_zeros().min(63);
        if granule > PAGE {
            return Err(Errno::INVAL);
        }
        let outside = around(Range::ALL, group.aperture).into_iter().flatten();
        let uneven = |area: &Area| !area.range.is_aligned(PAGE) || area.vaddr & (PAGE - 1) != 0;
        if outside.into_iter().any(|range| space.needs(range)) || space.areas.values().any(uneven) {
            return Err(Errno::ADDRINUSE);
        }
        let mut hwpt = Hwpt {
            ioas,
            aperture: group.aperture,
            table: Table::new(group.iommu, group.superpages, RUNS),
            automatic,
            can_track: dirty,
            tracking: false,
            dirty: BTreeSet::new(),
        };
        // The first page table of an address space pins all of it.
        let first = !self.hwpts.values().any(|hwpt| hwpt.ioas == ioas);
        let space = self.ioas.get_mut(&ioas).ok_or(Errno::NOENT)?;
        let mut failure = None;
        let mut done = 0;
        for area in space.areas.values_mut() {
            if first && let Err(failed) = area.pin(&mut self.machine) {
                failure = Some(failed);
                break;
            }
            if let Err(failed) = hwpt.insert(area, &mut self.machine) {
                if first {
                    area.unpin(&mut self.machine);
                }
                failure = Some(failed);
                break;
            }
            done += 1;
        }
        if let Some(failure) = failure {
            for area in space.areas.values_mut().take(done) {
                hwpt.remove(area.range, &mut self.machine);
                if first {
                    area.unpin(&mut self.machine);
                }
            }
            return Err(failure);
        }
        let id = self.new_id();
        self.hwpts.insert(id, hwpt);
        Ok(id)
    }

    /// Removes an unused page table. The last one of an address space unpins all of it.
    pub(super) fn remove_hwpt(&mut self, id: Id) {
        let Some(mut hwpt) = self.hwpts.remove(&id) else { return };
        let last = !self.hwpts.values().any(|other| other.ioas == hwpt.ioas);
        let Some(space) = self.ioas.get_mut(&hwpt.ioas) else { return };
        for area in space.areas.values_mut() {
            hwpt.remove(area.range, &mut self.machine);
            if last {
                area.unpin(&mut self.machine);
            }
        }
    }

    pub(super) fn attach(&mut self, device: Id, to: Id) -> KernelResult<Id> {
        let bound = self.devices.get(&device).ok_or(Errno::NOENT)?;
        let (group, before) = (bound.group.clone(), bound.hwpt);
        let suits = |hwpt: &Hwpt| hwpt.table.iommu == group.iommu;
        let (hwpt, made) = if let Some(hwpt) = self.hwpts.get(&to) {
            if !suits(hwpt) || hwpt.can_track && !bound.tracks_dirty {
                return Err(Errno::INVAL);
            }
            (to, false)
        } else if self.ioas.contains_key(&to) {
            let mut tables = self.hwpts.iter();
            let known = tables.find(|(_, hwpt)| hwpt.ioas == to && hwpt.automatic && suits(hwpt));
            match known.map(|(&id, _)| id) {
                Some(id) => (id, false),
                None => (self.new_hwpt(device, to, false, true)?, true),
            }
        } else {
            let other = self.devices.contains_key(&to);
            return Err(if other { Errno::INVAL } else { Errno::NOENT });
        };
        let ioas = self.hwpts.get(&hwpt).map(|hwpt| hwpt.ioas);
        let space = ioas.and_then(|ioas| self.ioas.get(&ioas));
        if space.is_some_and(|space| group.reserved.iter().any(|at| space.needs(at.range))) {
            if made {
                self.remove_hwpt(hwpt);
            }
            return Err(Errno::ADDRINUSE);
        }
        if let Some(bound) = self.devices.get_mut(&device) {
            bound.hwpt = Some(hwpt);
        }
        before.into_iter().for_each(|before| self.let_go(before));
        Ok(hwpt)
    }

    pub(super) fn detach(&mut self, device: Id) -> KernelResult<()> {
        let bound = self.devices.get_mut(&device).ok_or(Errno::NOENT)?;
        let hwpt = bound.hwpt.take().ok_or(Errno::INVAL)?;
        self.let_go(hwpt);
        Ok(())
    }

    /// A device no longer uses a page table.
    fn let_go(&mut self, id: Id) {
        let used = self.devices.values().any(|device| device.hwpt == Some(id));
        if !used && self.hwpts.get(&id).is_some_and(|hwpt| hwpt.automatic) {
            self.remove_hwpt(id);
        }
    }

    pub(super) fn track(&mut self, id: Id, on: bool) -> KernelResult<()> {
        let hwpt = self.hwpts.get_mut(&id).ok_or(Errno::NOENT)?;
        if !hwpt.can_track {
            return Err(Errno::OPNOTSUPP);
        }
        if on && !hwpt.tracking {
            hwpt.dirty.clear();
        }
        hwpt.tracking = on;
        Ok(())
    }

    /// `IOMMU_HWPT_GET_DIRTY_BITMAP`: sets bits, but clears none.
    pub(super) fn read_dirty(
        &mut self,
        id: Id,
        iova: u64,
        size: u64,
        bitmap: Bitmap<'_>,
    ) -> KernelResult<()> {
        let hwpt = self.hwpts.get_mut(&id).ok_or(Errno::NOENT)?;
        if !hwpt.can_track {
            return Err(Errno::OPNOTSUPP);
        }
        let range = bytes(iova, size)?;
        let page = bitmap.page;
        if !page.is_power_of_two() || !range.is_aligned(page) || !range.is_aligned(PAGE) {
            return Err(Errno::INVAL);
        }
        let bits = range.extent() / page + 1;
        let covered = self.ioas.get(&hwpt.ioas).is_some_and(|space| space.covers(range));
        if !hwpt.tracking || !covered || (bitmap.words.len() as u64) < bits.div_ceil(64) {
            return Err(Errno::INVAL);
        }
        let pages = range.first().0 >> SHIFT..=range.last().0 >> SHIFT;
        let found: Vec<u64> = hwpt.dirty.range(pages).copied().collect();
        for number in found {
            hwpt.dirty.remove(&number);
            // A page may take many bits, or a part of one.
            let first = ((number << SHIFT) - iova) / page;
            for bit in first..=first + (PAGE / page).saturating_sub(1) {
                bitmap.words[(bit / 64) as usize] |= 1 << (bit % 64);
            }
        }
        Ok(())
    }

    /// Visits the pieces of a device's access.
    pub(super) fn pieces(
        &mut self,
        device: Id,
        iova: u64,
        len: usize,
        write: bool,
        mut each: impl FnMut(HostAddr, std::ops::Range<usize>),
    ) -> Result<(), Refused> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64);
            let Some((at, addr, rest)) = at.and_then(|at| {
                let (addr, rest) = self.translate(device, at, write)?;
                Some((at, addr, rest))
            }) else {
                let refused = Refused { iova: iova.wrapping_add(done as u64), write };
                if self.refused.len() < REMEMBERED {
                    self.refused.push(refused);
                }
                return Err(refused);
            };
            let count = usize::try_from(rest).map_or(len - done, |rest| rest.min(len - done));
            each(addr, done..done + count);
            if write {
                self.mark(device, at, count as u64);
            }
            done += count;
        }
        Ok(())
    }

    /// The address that a device's access reaches, and for how many bytes.
    fn translate(&self, device: Id, iova: u64, write: bool) -> Option<(HostAddr, u64)> {
        let hwpt = self.hwpts.get(&self.devices.get(&device)?.hwpt?)?;
        let run = hwpt.table.at(iova)?;
        let wanted = if write { MapFlags::WRITE } else { MapFlags::READ };
        let at = Range::new(Iova(iova), Iova(iova))?;
        let area = self.ioas.get(&hwpt.ioas)?.overlapping(at).next()?;
        if !run.prot.contains(wanted) || !self.machine.memory.has_bytes() {
            return None;
        }
        let addr = HostAddr(area.vaddr + (iova - area.range.first().0));
        Some((addr, (run.range.last().0 - iova).saturating_add(1)))
    }

    fn mark(&mut self, device: Id, iova: u64, len: u64) {
        let hwpt = self.devices.get(&device).and_then(|device| device.hwpt);
        let Some(hwpt) = hwpt.and_then(|id| self.hwpts.get_mut(&id)) else { return };
        if hwpt.tracking && len > 0 {
            hwpt.dirty.extend(iova >> SHIFT..=(iova + (len - 1)) >> SHIFT);
        }
    }
}
