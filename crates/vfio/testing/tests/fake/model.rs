//! Any sequence of calls against a model of single pages.

mod pages;

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_iommu::HostAddr;
use ringfence_vfio::kernel::{Bitmap, KernelResult, MapFlags, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{Event, FakeConfig, Owner, Step, Type1};
use rustix::io::Errno;

use self::pages::{Model, World};
use crate::common::{PAGE, RW, assert_invalidated_before_unpin, group, invalidate, unmap};

/// Pages of memory, and of IOVAs.
const PAGES: u64 = 48;
const BUDGET: u32 = 6;
/// The number of the group with emulated devices.
const SOFT: u32 = 9;

/// The kernel and the model, with the same calls made to both.
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
        let config = FakeConfig {
            budget: BUDGET,
            owner: owners[0].clone(),
            memory: world.memory.clone(),
            ..FakeConfig::default()
        };
        let model = Model { limits: [40, 20], ..Model::default() };
        Pair { kernel: Type1::new(config), world, owners, model }
    }

    fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, pages: u64) -> KernelResult<u64> {
        let vaddr = self.world.at + vaddr * PAGE;
        // SAFETY: the world's memory outlives the container, and its bytes are not read.
        unsafe { self.kernel.map(flags, iova * PAGE, vaddr, pages * PAGE) }.map(|()| 0)
    }

    /// Makes a call to both; returns the kernel's result, the model's, and the model after it.
    fn call(&mut self, call: Call) -> (KernelResult<u64>, KernelResult<u64>, Model) {
        let mut after = self.model.clone();
        let kernel = &self.kernel;
        let gives_up = |kernel: &Type1, iova, size| {
            (0..64).for_each(|_| kernel.unpin_pages(iova, size / PAGE));
        };
        let (found, expected) = match call {
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
                    // A device releases its pins before it is detached.
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
        (found, expected, after)
    }

    /// A device writes; if that succeeds and is tracked, the page must be dirty.
    fn write(&self, iova: u64) {
        let Ok(()) = self.kernel.dma_write(iova * PAGE + 1, &[1]) else { return };
        let (at, mapping) = self.model.mappings.range(..=iova).next_back().unwrap();
        let mut words = [0; 2];
        let bitmap = Bitmap { page: PAGE, words: &mut words };
        if self.kernel.dirty(at * PAGE, mapping.pages * PAGE, bitmap).is_ok() {
            assert!(words[0] >> (iova - at) & 1 == 1, "written, but not dirty");
        }
    }

    /// Compares the states of both.
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
    // Addresses and sizes that often overlap.
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
            let (found, expected, after) = pair.call(call);
            // An injected failure hits the next call, or none.
            if matches!(call, Call::Fail(..)) {
                armed = true;
                continue;
            }
            let failed = std::mem::take(&mut armed) && !pair.kernel.heal();
            match (found, expected) {
                _ if found == expected => {
                    pair.model = if expected.is_ok() { after } else { pair.model }
                }
                (Err(Errno::NOMEM | Errno::FAULT), _) if failed => {}
                _ => prop_assert!(false, "{call:?}: {found:?}, but {expected:?}"),
            }
            events.extend(pair.kernel.events());
            pair.compare();
        }
        for id in [0, 1, 2, SOFT] {
            let _ = pair.kernel.detach(id);
        }
        events.extend(pair.kernel.events());
        assert_invalidated_before_unpin(&events);
        prop_assert_eq!((pair.kernel.mappings(), pair.kernel.pinned()), (0, 0));
        prop_assert_eq!((pair.owners[0].used(), pair.owners[1].used()), (0, 0));
    }
}
