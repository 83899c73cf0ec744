//! Attaching and detaching groups (rules L58, L61).

use std::fmt;

use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};
use rustix::io::Errno;

use super::{
    super::{
        PAGE,
        events::Event,
        memory::Frames,
        pins::{Batch, Machine},
        table::{Run, Table, around},
    },
    Notify, State, Type1,
    map::pin_run,
};
use ringfence_vfio::kernel::{KernelResult, MapFlags};

/// The page sizes of a container without an IOMMU.
pub(super) const ANY_PAGES: u64 = !(PAGE - 1);

/// A group of devices behind an IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub id: u32,
    /// The IOMMU that it is behind: groups behind one IOMMU share its tables.
    pub iommu: u32,
    /// What the IOMMU translates.
    pub aperture: Range,
    /// The ranges that it does not translate, or must not: MSI windows, identity-mapped regions.
    pub reserved: Vec<ReservedRegion>,
    /// Page sizes, as a bitmap.
    pub page_sizes: u64,
    /// Whether unmapping a page removes all of the larger page that it lies in (rule [L58]).
    ///
    /// [L58]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l58
    pub superpages: bool,
    /// Whether its interrupts are remapped.
    pub remaps_interrupts: bool,
}

impl Default for Group {
    /// A VT-d with 39 bits.
    fn default() -> Group {
        let range = |first, last| Range::new(Iova(first), Iova(last)).unwrap_or(Range::ALL);
        Group {
            id: 0,
            iommu: 0,
            aperture: range(0, (1 << 39) - 1),
            reserved: vec![ReservedRegion {
                range: range(0xfee0_0000, 0xfeef_ffff),
                kind: ReservedKind::Msi,
            }],
            page_sizes: 1 << 12 | 1 << 21 | 1 << 30,
            superpages: false,
            remaps_interrupts: true,
        }
    }
}

/// An IOMMU, and how the container uses it.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) table: Table,
    pub(super) page_sizes: u64,
    /// Whether the probe showed that it removes more than it is asked for.
    pub(super) superpages: bool,
}

/// An attached group.
pub(super) struct Member {
    pub(super) id: u32,
    /// Whether its writes are known: its devices pin the pages that they use.
    pub(super) writes_are_known: bool,
    pub(super) kind: MemberKind,
}

/// What a group is behind.
pub(super) enum MemberKind {
    /// An IOMMU.
    Hardware(Group),
    /// Software that pins the pages it uses, and is notified to release them.
    Emulated(Notify),
}

impl Type1 {
    /// Attaches a group, maps for it all that is mapped, and narrows what may be mapped (rule
    /// [L61]).
    ///
    /// # Errors
    /// EBUSY while addresses are marked invalid; EINVAL if it is attached already, or where its
    /// aperture or reserved regions conflict with mappings; EPERM without interrupt remapping;
    /// ENOMEM and EFAULT as MAP. Nothing has changed then.
    ///
    /// [L61]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l61
    pub fn attach(&self, group: &Group) -> KernelResult<()> {
        self.state.lock().attach(group, self.unsafe_interrupts, self.runs)
    }

    /// The attached groups behind IOMMUs.
    pub fn groups(&self) -> Vec<Group> {
        self.state.lock().hardware().cloned().collect()
    }

    /// Attaches a group with emulated devices: it has no IOMMU, and its devices
    /// [pin](Self::pin_pages) the pages that they use. `notify` is called before a mapping with
    /// pins is removed, and must release them.
    ///
    /// # Errors
    /// EBUSY and EINVAL as [`attach`](Self::attach).
    pub fn attach_emulated(&self, id: u32, notify: Notify) -> KernelResult<()> {
        let mut state = self.state.lock();
        state.check_new(id)?;
        state.members.push(Member {
            id,
            writes_are_known: true,
            kind: MemberKind::Emulated(notify),
        });
        Ok(())
    }

    /// Detaches a group. The last one removes all mappings; the last one behind an IOMMU leaves
    /// them charged only for what is pinned externally.
    ///
    /// # Errors
    /// EINVAL if it is not attached.
    pub fn detach(&self, id: u32) -> KernelResult<()> {
        self.state.lock().detach(id)
    }
}

impl State {
    fn check_new(&self, id: u32) -> KernelResult<()> {
        if self.invalid > 0 {
            return Err(Errno::BUSY);
        }
        if self.members.iter().any(|member| member.id == id) { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// Whether there is a group with emulated devices.
    pub(super) fn has_emulated(&self) -> bool {
        self.members.iter().any(|member| matches!(member.kind, MemberKind::Emulated(_)))
    }

    /// The callbacks for mappings with external pins that are to be removed.
    pub(super) fn holders(&self) -> Vec<Notify> {
        let notify = |member: &Member| match &member.kind {
            MemberKind::Emulated(notify) => Some(notify.clone()),
            MemberKind::Hardware(_) => None,
        };
        self.members.iter().filter_map(notify).collect()
    }

    fn attach(&mut self, group: &Group, unsafe_interrupts: bool, runs: usize) -> KernelResult<()> {
        self.check_new(group.id)?;
        // Mappings outside of the new aperture, or in a region that it does not translate.
        let outside = around(Range::ALL, group.aperture).into_iter().flatten();
        let blind: Vec<Range> =
            outside.chain(group.reserved.iter().map(|region| region.range)).collect();
        if blind.iter().any(|&range| self.find(range).is_some()) {
            return Err(Errno::INVAL);
        }
        let ranges = narrowed(&self.ranges, group);
        let page_sizes = self.domains.iter().fold(group.page_sizes, |all, at| all & at.page_sizes);
        if ranges.is_empty() || page_sizes == 0 {
            return Err(Errno::INVAL);
        }
        if !unsafe_interrupts && !group.remaps_interrupts {
            return Err(Errno::PERM);
        }
        if !self.domains.iter().any(|domain| domain.table.iommu == group.iommu) {
            let mut domain = Domain {
                table: Table::new(group.iommu, group.superpages, runs),
                page_sizes: group.page_sizes,
                superpages: false,
            };
            domain.probe(&mut self.machine, ranges[0]);
            self.replay(&mut domain)?;
            self.domains.push(domain);
        }
        self.ranges = ranges;
        let kind = MemberKind::Hardware(group.clone());
        self.members.push(Member { id: group.id, writes_are_known: false, kind });
        self.update_page_sizes();
        Ok(())
    }

    /// Maps all that is mapped for another IOMMU. Pages that are not pinned yet are pinned, and
    /// charged unless they are pinned externally. On failure only what was added is removed.
    fn replay(&mut self, domain: &mut Domain) -> KernelResult<()> {
        let iovas: Vec<u64> = self.mappings.keys().copied().collect();
        let mut added: Vec<(u64, Run)> = Vec::new();
        for &at in &iovas {
            let Some(mapping) = self.mappings.get_mut(&at) else { continue };
            let (mut rest, mut batch) = (Some(mapping.range), Batch::default());
            while let Some(range) = rest {
                let known = self.domains.first().filter(|_| mapping.mapped);
                let run = match known.map(|first| first.table.run(range)) {
                    Some(Some(run)) => Ok(run),
                    // A mapping in the tables has no holes.
                    Some(None) => break,
                    None => pin_run(&mut self.machine, mapping, range, &mut batch)
                        .and_then(|frames| Run::new(range.first().0, frames, mapping.prot)),
                };
                let Machine { faults, log, .. } = &mut self.machine;
                let failure = match run.map(|run| (run, domain.table.map(run, faults, log))) {
                    Ok((run, Ok(()))) => {
                        added.push((at, run));
                        rest = around(range, run.range)[1];
                        continue;
                    }
                    Ok((run, Err(failure))) => {
                        if !mapping.mapped {
                            let unpinned = self.machine.unpin(&[run]);
                            let external = mapping.external_in(run.range).min(unpinned);
                            mapping.release(unpinned - external);
                        }
                        failure
                    }
                    Err(failure) => failure,
                };
                self.machine.drain(&mut batch);
                self.undo_replay(domain, &added);
                return Err(failure);
            }
        }
        self.mappings.values_mut().for_each(|mapping| mapping.mapped = true);
        Ok(())
    }

    /// Removes what a replay has added.
    fn undo_replay(&mut self, domain: &mut Domain, added: &[(u64, Run)]) {
        for (at, run) in added.iter().rev() {
            domain.table.unmap(run.range, &mut self.machine.log);
            domain.table.sync(1, &mut self.machine.log);
            let Some(mapping) = self.mappings.get_mut(at).filter(|at| !at.mapped) else { continue };
            let unpinned = self.machine.unpin(std::slice::from_ref(run));
            mapping.release(unpinned - mapping.external_in(run.range).min(unpinned));
        }
    }

    fn detach(&mut self, id: u32) -> KernelResult<()> {
        let at = self.members.iter().position(|member| member.id == id).ok_or(Errno::INVAL)?;
        let member = self.members.remove(at);
        if let MemberKind::Hardware(group) = &member.kind {
            let shared = self.hardware().any(|other| other.iommu == group.iommu);
            if !shared {
                self.drop_iommu(group.iommu);
            }
            if !member.writes_are_known && self.tracking {
                // Its writes were not tracked: all that is mapped may be dirty.
                let mapped = self.mappings.values_mut().filter(|mapping| mapping.mapped);
                mapped.filter_map(|at| at.dirty.as_mut()).for_each(|dirty| dirty.mark_all());
            }
        }
        if self.members.is_empty() {
            self.drop_external();
            while let Some((&iova, _)) = self.mappings.first_key_value() {
                self.remove(iova);
            }
            self.tracking = false;
        }
        self.ranges = self.hardware().fold(Vec::new(), |ranges, group| narrowed(&ranges, group));
        self.update_page_sizes();
        Ok(())
    }

    /// The groups behind IOMMUs.
    fn hardware(&self) -> impl Iterator<Item = &Group> {
        self.members.iter().filter_map(|member| match &member.kind {
            MemberKind::Hardware(group) => Some(group),
            MemberKind::Emulated(_) => None,
        })
    }

    /// Removes an IOMMU. The last one unpins all that was pinned for it; what is pinned externally
    /// stays pinned and charged.
    fn drop_iommu(&mut self, iommu: u32) {
        let Some(at) = self.domains.iter().position(|domain| domain.table.iommu == iommu) else {
            return;
        };
        if self.domains.len() > 1 {
            let mut domain = self.domains.remove(at);
            for mapping in self.mappings.values() {
                domain.table.unmap(mapping.range, &mut self.machine.log);
                domain.table.sync(1, &mut self.machine.log);
            }
            return;
        }
        let ranges: Vec<Range> = self.mappings.values().map(|mapping| mapping.range).collect();
        for range in ranges {
            let unpinned = self.unmap_unpin(range);
            if let Some(mapping) = self.mappings.get_mut(&range.first().0) {
                mapping.mapped = false;
                mapping.release(unpinned - mapping.external_in(range).min(unpinned));
            }
        }
        self.domains.clear();
    }

    fn update_page_sizes(&mut self) {
        let all = self.domains.iter().fold(u64::MAX, |sizes, domain| sizes & domain.page_sizes);
        // An IOMMU with smaller pages than the CPU uses the CPU's.
        let large = all & ANY_PAGES;
        self.page_sizes = if all != large { large | PAGE } else { large };
    }
}

impl Domain {
    /// Maps two pages and unmaps one: if both are removed, looking for contiguous frames at unmap
    /// is of no use (rule L58).
    fn probe(&mut self, machine: &mut Machine, within: Range) {
        let frames = Frames { pfn: 0, pages: 2, reserved: true };
        // At the very end of the address space two pages do not fit; any other address will do.
        let iova = within.first().0.checked_next_multiple_of(2 * PAGE).unwrap_or(0);
        let Ok(run) = Run::new(iova, frames, MapFlags::READ | MapFlags::WRITE) else { return };
        let mut quiet = Machine::new(machine.memory.clone(), false);
        let Machine { faults, log, .. } = &mut quiet;
        let Ok(()) = self.table.map(run, faults, log) else { return };
        let page = Range::from_len(Iova(iova), PAGE).unwrap_or(run.range);
        let removed: u64 = self.table.unmap(page, log).iter().map(Run::pages).sum();
        self.table.unmap(run.range, log);
        self.superpages = removed == 2;
        let iommu = self.table.iommu;
        machine.log.push(Event::Probed { iommu, both: self.superpages });
    }
}

/// What may be mapped once `group` joins; an empty `before` means everything.
fn narrowed(before: &[Range], group: &Group) -> Vec<Range> {
    let all = [Range::ALL];
    let before = if before.is_empty() { &all[..] } else { before };
    let within = before.iter().filter_map(|range| range.intersection(group.aperture));
    let mut ranges: Vec<Range> = within.collect();
    for hole in group.reserved.iter().map(|region| region.range) {
        let cut = |range: Range| match range.intersection(hole) {
            Some(part) => around(range, part),
            None => [Some(range), None],
        };
        ranges = ranges.into_iter().flat_map(cut).flatten().collect();
    }
    ranges
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("id", &self.id).finish_non_exhaustive()
    }
}
