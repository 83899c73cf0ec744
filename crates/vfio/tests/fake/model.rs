//! Any sequence of calls against a model that knows of pages only.

use std::{collections::BTreeMap, ptr, sync::Arc};

use proptest::prelude::*;
use ringfence_iommu::HostAddr;
use ringfence_vfio::{
    fake::{Config, Event, Kind, Memory, Owner, Step, Type1},
    kernel::{Answer, Bitmap, MapFlags, Type1Kernel, UnmapFlags},
};
use rustix::{
    io::Errno,
    mm::{MapFlags as Map, ProtFlags, mmap_anonymous, munmap},
};

use crate::common::{PAGE, RW, assert_civil, group, invalidate, unmap};

/// Pages of memory, and of IOVAs.
const PAGES: u64 = 48;
const BUDGET: u32 = 6;
/// The group whose devices are software.
const SOFT: u32 = 9;

/// Memory of all kinds, at an address of this process.
struct World {
    at: u64,
    memory: Memory,
}

impl World {
    fn new() -> World {
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
    fn ordinary(page: u64, write: bool) -> Option<bool> {
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
        // SAFETY: no container that had it mapped is there any more.
        unsafe { munmap(at, (PAGES * PAGE) as usize) }.unwrap();
    }
}

/// A mapping; all numbers are of pages.
#[derive(Clone, Debug)]
struct Mapping {
    vaddr: u64,
    pages: u64,
    prot: MapFlags,
    /// Which owner, and whether it held the capability.
    owner: usize,
    capable: bool,
    invalid: bool,
    /// Page by page, whether it is ordinary: what is pinned for IOMMUs.
    pinned: Vec<bool>,
    /// Pins of software by page: how many, and whether it is ordinary.
    external: BTreeMap<u64, (u64, bool)>,
}

/// What there should be.
#[derive(Clone, Debug, Default)]
struct Model {
    mappings: BTreeMap<u64, Mapping>,
    hardware: Vec<u32>,
    software: bool,
    limits: [u64; 2],
    capable: [bool; 2],
    caller: usize,
}

impl Model {
    fn overlapping(&self, iova: u64, pages: u64) -> Vec<u64> {
        let overlaps =
            |(at, mapping): &(&u64, &Mapping)| **at < iova + pages && iova < *at + mapping.pages;
        self.mappings.iter().filter(overlaps).map(|(at, _)| *at).collect()
    }

    fn bisects(&self, iova: u64, pages: u64) -> bool {
        self.overlapping(iova, pages)
            .iter()
            .any(|at| *at < iova || iova + pages < at + self.mappings[at].pages)
    }

    /// What an owner is charged for.
    fn charged(&self, owner: usize) -> u64 {
        let own = self.mappings.values().filter(|mapping| mapping.owner == owner);
        own.map(|mapping| {
            let external = mapping.external.values().filter(|(_, ordinary)| *ordinary).count();
            let pinned = mapping.pinned.iter().filter(|ordinary| **ordinary).count();
            (if self.hardware.is_empty() { external } else { pinned }) as u64
        })
        .sum()
    }

    fn pins(&self) -> u64 {
        let pins = |mapping: &Mapping| {
            let external = mapping.external.values().filter(|(_, ordinary)| *ordinary).count();
            mapping.pinned.iter().filter(|ordinary| **ordinary).count() + external
        };
        self.mappings.values().map(pins).sum::<usize>() as u64
    }

    /// Pins pages of a mapping, one after another; nothing changes.
    fn pin(&self, mapping: &Mapping, pending: &mut [u64; 2]) -> Answer<Vec<bool>> {
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

    fn map(&mut self, iova: u64, vaddr: u64, pages: u64, prot: MapFlags) -> Answer<u64> {
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

    fn unmap(&mut self, iova: u64, pages: u64, flags: UnmapFlags) -> Answer<u64> {
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

    fn another_address(&mut self, iova: u64, vaddr: u64, pages: u64) -> Answer<u64> {
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

    fn attach(&mut self, id: u32) -> Answer<u64> {
        if self.mappings.values().any(|mapping| mapping.invalid) {
            return Err(Errno::BUSY);
        }
        if self.hardware.contains(&id) {
            return Err(Errno::INVAL);
        }
        if self.hardware.is_empty() {
            let mut pending = [0; 2];
            let pins: Answer<Vec<_>> =
                self.mappings.values().map(|mapping| self.pin(mapping, &mut pending)).collect();
            for (mapping, pinned) in self.mappings.values_mut().zip(pins?) {
                mapping.pinned = pinned;
            }
        }
        self.hardware.push(id);
        Ok(0)
    }

    fn attach_software(&mut self) -> Answer<u64> {
        if self.mappings.values().any(|mapping| mapping.invalid) {
            return Err(Errno::BUSY);
        }
        if self.software {
            return Err(Errno::INVAL);
        }
        self.software = true;
        Ok(0)
    }

    fn detach(&mut self, id: u32) -> Answer<u64> {
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

    fn pin_external(&mut self, iova: u64, pages: u64, prot: MapFlags) -> Answer<u64> {
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

    fn unpin_external(&mut self, iova: u64, pages: u64) {
        for (at, mapping) in &mut self.mappings {
            mapping.external.retain(|page, (count, _)| {
                *count -= u64::from((iova..iova + pages).contains(&(at + *page)));
                *count > 0
            });
        }
    }
}

/// The kernel and the model, and what both are told.
struct Pair {
    world: World,
    kernel: Type1,
    owners: [Owner; 2],
    model: Model,
}

impl Pair {
    fn new() -> Pair {
        let world = World::new();
        let owners = [40, 20].map(Owner::new);
        let config = Config {
            budget: BUDGET,
            owner: owners[0].clone(),
            memory: world.memory.clone(),
            ..Config::default()
        };
        let model = Model { limits: [40, 20], ..Model::default() };
        Pair { kernel: Type1::new(config), world, owners, model }
    }

    fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, pages: u64) -> Answer<u64> {
        let vaddr = self.world.at + vaddr * PAGE;
        // SAFETY: the world's memory outlives the container, and nobody looks at it.
        unsafe { self.kernel.map(flags, iova * PAGE, vaddr, pages * PAGE) }.map(|()| 0)
    }

    /// Makes a call to both: what the kernel said, what the model says, and the model after it.
    fn call(&mut self, call: Call) -> (Answer<u64>, Answer<u64>, Model) {
        let mut after = self.model.clone();
        let kernel = &self.kernel;
        let gives_up = |kernel: &Type1, iova, size| {
            (0..64).for_each(|_| kernel.unpin_pages(iova, size / PAGE));
        };
        let (said, says) = match call {
            Call::Map(iova, vaddr, pages, prot) => {
                (self.map(prot, iova, vaddr, pages), after.map(iova, vaddr, pages, prot))
            }
            Call::Unmap(iova, pages) => {
                (unmap(kernel, iova, pages), after.unmap(iova, pages, UnmapFlags::empty()))
            }
            Call::Mark(iova, pages) => {
                (invalidate(kernel, iova, pages), after.unmap(iova, pages, UnmapFlags::VADDR))
            }
            Call::Another(iova, vaddr, pages) => (
                self.map(MapFlags::VADDR, iova, vaddr, pages),
                after.another_address(iova, vaddr, pages),
            ),
            Call::Attach(id) => (kernel.attach(&group(id)).map(|()| 0), after.attach(id)),
            Call::AttachSoftware => {
                let attached = kernel.attach_emulated(SOFT, Arc::new(gives_up));
                (attached.map(|()| 0), after.attach_software())
            }
            Call::Detach(id) => {
                if id == SOFT && after.software {
                    // A device gives up what it holds before it goes.
                    while kernel.external_pins() > 0 {
                        kernel.unpin_pages(0, PAGES * 2);
                    }
                    after.mappings.values_mut().for_each(|mapping| mapping.external.clear());
                }
                (kernel.detach(id).map(|()| 0), after.detach(id))
            }
            Call::Pin(iova, pages, prot) => (
                kernel.pin_pages(SOFT, iova * PAGE, pages, prot).map(|_| 0),
                after.pin_external(iova, pages, prot),
            ),
            Call::Unpin(iova, pages) => {
                kernel.unpin_pages(iova * PAGE, pages);
                after.unpin_external(iova, pages);
                (Ok(0), Ok(0))
            }
            Call::Caller(owner) => {
                kernel.set_caller(&self.owners[owner]);
                after.caller = owner;
                (Ok(0), Ok(0))
            }
            Call::Limit(owner, limit, capable) => {
                self.owners[owner].set_limit(limit);
                self.owners[owner].set_capable(capable);
                (after.limits[owner], after.capable[owner]) = (limit, capable);
                (Ok(0), Ok(0))
            }
            Call::Fail(step, nth) => {
                kernel.fail(step, nth);
                (Ok(0), Ok(0))
            }
            Call::Track(on) => {
                let _ = kernel.track_dirty(on);
                (Ok(0), Ok(0))
            }
            Call::Write(iova) => {
                self.write(iova);
                (Ok(0), Ok(0))
            }
        };
        (said, says, after)
    }

    /// A device writes, and if that is tracked and it succeeds, it is told.
    fn write(&self, iova: u64) {
        let Ok(()) = self.kernel.dma_write(iova * PAGE + 1, &[1]) else { return };
        let (at, mapping) = self.model.mappings.range(..=iova).next_back().unwrap();
        let mut words = [0; 2];
        let bitmap = Bitmap { page: PAGE, words: &mut words };
        if self.kernel.dirty(at * PAGE, mapping.pages * PAGE, bitmap).is_ok() {
            assert!(words[0] >> (iova - at) & 1 == 1, "written, but not dirty");
        }
    }

    /// Both have come to the same.
    fn compare(&self) {
        let model = &self.model;
        for (owner, account) in self.owners.iter().enumerate() {
            assert_eq!(account.used(), model.charged(owner), "charged to {owner}");
        }
        assert_eq!(self.kernel.pinned(), model.pins());
        let external: u64 =
            model.mappings.values().flat_map(|at| at.external.values()).map(|page| page.0).sum();
        assert_eq!(self.kernel.external_pins(), external);
        assert_eq!(self.kernel.mappings(), model.mappings.len());
        if let Ok(info) = self.kernel.info() {
            assert_eq!(info.available, Some(BUDGET - model.mappings.len() as u32));
        }
        for iova in 0..PAGES {
            let mapping = model.overlapping(iova, 1).first().map(|at| (*at, &model.mappings[at]));
            let mapping = mapping.filter(|(_, at)| !at.invalid && !model.hardware.is_empty());
            for (write, flag) in [(false, MapFlags::READ), (true, MapFlags::WRITE)] {
                let reached = mapping.filter(|(_, mapping)| mapping.prot.contains(flag));
                let reached =
                    reached.map(|(at, mapping)| self.world.at + (mapping.vaddr + iova - at) * PAGE);
                let found = self.kernel.translate(iova * PAGE, write);
                assert_eq!(found.map(|(addr, _)| addr), reached.map(HostAddr), "{iova}");
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Map(u64, u64, u64, MapFlags),
    Unmap(u64, u64),
    Mark(u64, u64),
    Another(u64, u64, u64),
    Attach(u32),
    AttachSoftware,
    Detach(u32),
    Pin(u64, u64, MapFlags),
    Unpin(u64, u64),
    Caller(usize),
    Limit(usize, u64, bool),
    Fail(Step, u64),
    Track(bool),
    Write(u64),
}

fn call() -> impl Strategy<Value = Call> {
    let prot = prop::sample::select(vec![RW, RW, MapFlags::READ, MapFlags::WRITE]);
    let steps = vec![
        Step::Record,
        Step::Pin,
        Step::Table,
        Step::Map,
        Step::Bitmap,
        Step::Region,
        Step::ExternalPin,
    ];
    // Places and sizes that meet often.
    let place = (0..12_u64).prop_map(|n| n * 4);
    let size = prop::sample::select(vec![4_u64, 4, 4, 8, 8, 3, 12]);
    let vaddr = 0..PAGES - 12;
    prop_oneof![
        12 => (place.clone(), vaddr.clone(), size.clone(), prot.clone())
            .prop_map(|(iova, vaddr, pages, prot)| Call::Map(iova, vaddr, pages, prot)),
        4 => (place.clone(), size.clone()).prop_map(|(iova, pages)| Call::Unmap(iova, pages)),
        1 => Just(Call::Unmap(0, 2 * PAGES)),
        2 => (place.clone(), size.clone()).prop_map(|(iova, pages)| Call::Mark(iova, pages)),
        3 => (place.clone(), vaddr, size).prop_map(|(iova, at, pages)| Call::Another(iova, at, pages)),
        3 => (0..3_u32).prop_map(Call::Attach),
        1 => Just(Call::AttachSoftware),
        1 => prop::sample::select(vec![0, 1, 2, SOFT]).prop_map(Call::Detach),
        4 => (0..PAGES, 1..6_u64, prot).prop_map(|(iova, pages, prot)| Call::Pin(iova, pages, prot)),
        2 => (0..PAGES, 1..9_u64).prop_map(|(iova, pages)| Call::Unpin(iova, pages)),
        1 => (0..2_usize).prop_map(Call::Caller),
        1 => (0..2_usize, 0..50_u64, prop::bool::weighted(0.3))
            .prop_map(|(owner, limit, capable)| Call::Limit(owner, limit, capable)),
        3 => (prop::sample::select(steps), 1..12_u64).prop_map(|(step, nth)| Call::Fail(step, nth)),
        1 => any::<bool>().prop_map(Call::Track),
        2 => (0..PAGES).prop_map(Call::Write),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    // rules L51, L53, L54, L55, L57, L59, L60, L61, L62, L63
    #[test]
    fn any_sequence_of_calls_comes_to_what_a_model_of_pages_says(
        calls in prop::collection::vec(call(), 1..60),
    ) {
        let mut pair = Pair::new();
        let mut events: Vec<Event> = Vec::new();
        let mut armed = false;
        for call in std::iter::once(Call::Attach(0)).chain(calls) {
            if matches!(call, Call::Fail(..)) {
                pair.kernel.heal();
            }
            let (said, says, after) = pair.call(call);
            // What is made to fail fails in the call behind it, or never.
            if matches!(call, Call::Fail(..)) {
                armed = true;
                continue;
            }
            let failed = std::mem::take(&mut armed) && !pair.kernel.heal();
            match (said, says) {
                _ if said == says => pair.model = if says.is_ok() { after } else { pair.model },
                (Err(Errno::NOMEM | Errno::FAULT), _) if failed => {}
                _ => prop_assert!(false, "{call:?}: {said:?}, but {says:?}"),
            }
            events.extend(pair.kernel.events());
            pair.compare();
        }
        for id in [0, 1, 2, SOFT] {
            let _ = pair.kernel.detach(id);
        }
        events.extend(pair.kernel.events());
        assert_civil(&events);
        prop_assert_eq!((pair.kernel.mappings(), pair.kernel.pinned()), (0, 0));
        prop_assert_eq!((pair.owners[0].used(), pair.owners[1].used()), (0, 0));
    }
}
