//! The expected state, page by page.

use std::{collections::BTreeMap, ptr};

use ringfence_vfio::kernel::{KernelResult, MapFlags, UnmapFlags};
use ringfence_vfio_testing::fake::{Kind, Memory};
use rustix::{
    io::Errno,
    mm::{MapFlags as Map, ProtFlags, mmap_anonymous, munmap},
};

use super::{BUDGET, PAGES, SOFT};
use crate::common::PAGE;

/// Memory of all kinds, at an address of this process.
pub(super) struct World {
    pub(super) at: u64,
    pub(super) memory: Memory,
}

impl World {
    pub(super) fn new() -> World {
        let len = (PAGES * PAGE) as usize;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, Map::PRIVATE);
        // SAFETY: new memory, which lives as long as the world.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }.unwrap();
        let at = at.expose_provenance() as u64;
        let part =
            |memory: Memory, page: u64, pages, kind| memory.with(at + page * PAGE, pages, kind);
        let memory = part(Memory::process(), 8, 8, Kind::Scattered(1));
        let memory = part(memory, 16, 8, Kind::Scattered(3));
        let memory = part(memory, 24, 4, Kind::Reserved);
        let memory = part(memory, 36, 2, Kind::ReadOnly);
        World { at, memory: part(memory, 44, 2, Kind::Absent) }
    }

    /// Whether a page is ordinary; `None`: it cannot be pinned.
    pub(super) fn ordinary(page: u64, write: bool) -> Option<bool> {
        match page {
            24..28 => Some(false),
            36..38 if write => None,
            44..46 => None,
            _ => Some(true),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let at = ptr::with_exposed_provenance_mut(self.at as usize);
        // SAFETY: no container that had it mapped exists any more.
        unsafe { munmap(at, (PAGES * PAGE) as usize) }.unwrap();
    }
}

/// A mapping; all numbers are of pages.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub(super) vaddr: u64,
    pub(super) pages: u64,
    pub(super) prot: MapFlags,
    /// Which owner, and whether it held the capability.
    pub(super) owner: usize,
    pub(super) capable: bool,
    pub(super) invalid: bool,
    /// Whether each page is ordinary: what is pinned for IOMMUs.
    pub(super) pinned: Vec<bool>,
    /// External pins by page: how many, and whether it is ordinary.
    pub(super) external: BTreeMap<u64, (u64, bool)>,
}

/// The expected state.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) mappings: BTreeMap<u64, Mapping>,
    pub(super) hardware: Vec<u32>,
    pub(super) software: bool,
    pub(super) limits: [u64; 2],
    pub(super) capable: [bool; 2],
    pub(super) caller: usize,
}

impl Model {
    pub(super) fn overlapping(&self, iova: u64, pages: u64) -> Vec<u64> {
        let overlaps =
            |(at, mapping): &(&u64, &Mapping)| **at < iova + pages && iova < *at + mapping.pages;
        self.mappings.iter().filter(overlaps).map(|(at, _)| *at).collect()
    }

    pub(super) fn bisects(&self, iova: u64, pages: u64) -> bool {
        self.overlapping(iova, pages)
            .iter()
            .any(|at| *at < iova || iova + pages < at + self.mappings[at].pages)
    }

    /// How many pages an owner is charged for.
    pub(super) fn charged(&self, owner: usize) -> u64 {
        let own = self.mappings.values().filter(|mapping| mapping.owner == owner);
        own.map(|mapping| {
            let external = mapping.external.values().filter(|(_, ordinary)| *ordinary).count();
            let pinned = mapping.pinned.iter().filter(|ordinary| **ordinary).count();
            (if self.hardware.is_empty() { external } else { pinned }) as u64
        })
        .sum()
    }

    pub(super) fn pins(&self) -> u64 {
        let pins = |mapping: &Mapping| {
            let external = mapping.external.values().filter(|(_, ordinary)| *ordinary).count();
            mapping.pinned.iter().filter(|ordinary| **ordinary).count() + external
        };
        self.mappings.values().map(pins).sum::<usize>() as u64
    }

    /// Pins pages of a mapping, one after another; does not change the model.
    pub(super) fn pin(&self, mapping: &Mapping, pending: &mut [u64; 2]) -> KernelResult<Vec<bool>> {
        let write = mapping.prot.contains(MapFlags::WRITE);
        (0..mapping.pages)
            .map(|page| {
                let ordinary = World::ordinary(mapping.vaddr + page, write).ok_or(Errno::FAULT)?;
                if ordinary && !mapping.external.contains_key(&page) {
                    let sum = self.charged(mapping.owner) + pending[mapping.owner] + 1;
                    if !mapping.capable && sum > self.limits[mapping.owner] {
                        return Err(Errno::NOMEM);
                    }
                    pending[mapping.owner] += 1;
                }
                Ok(ordinary)
            })
            .collect()
    }

    pub(super) fn map(
        &mut self,
        iova: u64,
        vaddr: u64,
        pages: u64,
        prot: MapFlags,
    ) -> KernelResult<u64> {
        if self.hardware.is_empty() && !self.software {
            return Err(Errno::INVAL);
        }
        if !self.overlapping(iova, pages).is_empty() {
            return Err(Errno::EXIST);
        }
        if self.mappings.len() == BUDGET as usize {
            return Err(Errno::NOSPC);
        }
        let (owner, capable) = (self.caller, self.capable[self.caller]);
        let mut mapping = Mapping {
            vaddr,
            pages,
            prot,
            owner,
            capable,
            invalid: false,
            pinned: Vec::new(),
            external: BTreeMap::new(),
        };
        if !self.hardware.is_empty() {
            mapping.pinned = self.pin(&mapping, &mut [0; 2])?;
        }
        self.mappings.insert(iova, mapping);
        Ok(0)
    }

    pub(super) fn unmap(&mut self, iova: u64, pages: u64, flags: UnmapFlags) -> KernelResult<u64> {
        if self.hardware.is_empty() && !self.software {
            return Err(Errno::INVAL);
        }
        let marks = flags.contains(UnmapFlags::VADDR);
        if marks && self.software {
            return Err(Errno::BUSY);
        }
        if self.bisects(iova, pages) {
            return Err(Errno::INVAL);
        }
        let found = self.overlapping(iova, pages);
        let sum = found.iter().map(|at| self.mappings[at].pages).sum();
        if marks && found.iter().any(|at| self.mappings[at].invalid) {
            return Err(Errno::INVAL);
        }
        for at in found {
            match self.mappings.get_mut(&at) {
                Some(mapping) if marks => mapping.invalid = true,
                _ => drop(self.mappings.remove(&at)),
            }
        }
        Ok(sum)
    }

    pub(super) fn another_address(
        &mut self,
        iova: u64,
        vaddr: u64,
        pages: u64,
    ) -> KernelResult<u64> {
        if self.hardware.is_empty() && !self.software {
            return Err(Errno::INVAL);
        }
        let at = *self.overlapping(iova, pages).first().ok_or(Errno::NOENT)?;
        let mapping = &self.mappings[&at];
        if !mapping.invalid || (at, mapping.pages) != (iova, pages) {
            return Err(Errno::INVAL);
        }
        let (from, to) = (mapping.owner, self.caller);
        let pages = mapping.pinned.iter().filter(|ordinary| **ordinary).count() as u64;
        let above = self.charged(to) + pages > self.limits[to];
        if from != to && pages > 0 && above && !self.capable[to] {
            return Err(Errno::NOMEM);
        }
        let capable = self.capable[to];
        let mapping = self.mappings.get_mut(&at).unwrap();
        (mapping.vaddr, mapping.invalid) = (vaddr, false);
        if from != to {
            (mapping.owner, mapping.capable) = (to, capable);
        }
        Ok(0)
    }

    pub(super) fn attach(&mut self, id: u32) -> KernelResult<u64> {
        if self.mappings.values().any(|mapping| mapping.invalid) {
            return Err(Errno::BUSY);
        }
        if self.hardware.contains(&id) {
            return Err(Errno::INVAL);
        }
        if self.hardware.is_empty() {
            let mut pending = [0; 2];
            let pins: KernelResult<Vec<_>> =
                self.mappings.values().map(|mapping| self.pin(mapping, &mut pending)).collect();
            for (mapping, pinned) in self.mappings.values_mut().zip(pins?) {
                mapping.pinned = pinned;
            }
        }
        self.hardware.push(id);
        Ok(0)
    }

    pub(super) fn attach_software(&mut self) -> KernelResult<u64> {
        if self.mappings.values().any(|mapping| mapping.invalid) {
            return Err(Errno::BUSY);
        }
        if self.software {
            return Err(Errno::INVAL);
        }
        self.software = true;
        Ok(0)
    }

    pub(super) fn detach(&mut self, id: u32) -> KernelResult<u64> {
        if id == SOFT && self.software {
            self.software = false;
        } else {
            let at = self.hardware.iter().position(|&of| of == id).ok_or(Errno::INVAL)?;
            self.hardware.remove(at);
        }
        if self.hardware.is_empty() {
            self.mappings.values_mut().for_each(|mapping| mapping.pinned.clear());
            if !self.software {
                self.mappings.clear();
            }
        }
        Ok(0)
    }

    pub(super) fn pin_external(
        &mut self,
        iova: u64,
        pages: u64,
        prot: MapFlags,
    ) -> KernelResult<u64> {
        if self.mappings.values().any(|mapping| mapping.invalid) {
            return Err(Errno::BUSY);
        }
        if !self.software {
            return Err(Errno::INVAL);
        }
        let mut after = self.clone();
        for page in iova..iova + pages {
            let at = *after.overlapping(page, 1).first().ok_or(Errno::INVAL)?;
            let mapping = after.mappings[&at].clone();
            if !mapping.prot.contains(prot) {
                return Err(Errno::PERM);
            }
            let offset = page - at;
            let write = mapping.prot.contains(MapFlags::WRITE);
            if let Some((count, _)) = after.mappings.get_mut(&at).unwrap().external.get_mut(&offset)
            {
                *count += 1;
                continue;
            }
            let ordinary = World::ordinary(mapping.vaddr + offset, write).ok_or(Errno::FAULT)?;
            let above = after.charged(mapping.owner) + 1 > after.limits[mapping.owner];
            if after.hardware.is_empty() && ordinary && !mapping.capable && above {
                return Err(Errno::NOMEM);
            }
            after.mappings.get_mut(&at).unwrap().external.insert(offset, (1, ordinary));
        }
        *self = after;
        Ok(0)
    }

    pub(super) fn unpin_external(&mut self, iova: u64, pages: u64) {
        for (at, mapping) in &mut self.mappings {
            mapping.external.retain(|page, (count, _)| {
                *count -= u64::from((iova..iova + pages).contains(&(at + *page)));
                *count > 0
            });
        }
    }
}
