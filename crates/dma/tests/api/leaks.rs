//! Whatever fails, and wherever: afterwards exactly what was there before is there.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use ringfence_dma::{
    Device, Direction, DmaBuffer, DmaConfig, Environment, Mapping, Policy, SharedMemory, TimerKind,
};
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, Iova, PageSizes, Range, SoftDomain,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iommu_testing::{Faulty, Kind, Stage, When};
use ringfence_iova::{Allocator, Aperture, Slabs};
use ringfence_sync::cpu::FixedCpu;

type Soft = SoftDomain<GuestPhys>;
type Slab = Slabs<Arc<FixedCpu>>;
type TestDevice = Device<Arc<Faulty<Arc<Soft>>>, Arc<Slab>>;

/// A buffer that is counted for as long as it exists.
#[derive(Debug)]
struct Counted {
    pieces: Vec<(u64, u64)>,
    count: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: there is no memory behind these addresses that could be misused.
unsafe impl DmaBuffer<GuestPhys> for Counted {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.pieces.iter().for_each(|&(addr, len)| each(GuestPhys(addr), len));
    }
}

// SAFETY: as above.
unsafe impl SharedMemory for Counted {}

/// All that can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Assets {
    iova_ranges: u64,
    iova_bytes: u64,
    mappings: u64,
    table_bytes: u64,
    buffers: usize,
}

struct Bench {
    device: TestDevice,
    faulty: Arc<Faulty<Arc<Soft>>>,
    soft: Arc<Soft>,
    slabs: Arc<Slab>,
    buffers: Arc<AtomicUsize>,
}

impl Bench {
    fn new(policy: Policy) -> Bench {
        let aperture = Range::new(Iova(0), Iova((1 << 40) - 1)).unwrap();
        let geometry = Geometry::new(PageSizes::from_granule(4096).unwrap(), aperture);
        let soft = Soft::new(geometry, Limits::NONE, Shootdown::new(1));
        let faulty = Arc::new(Faulty::new(Arc::clone(&soft), 0));
        let cpu = Arc::new(FixedCpu::new(1));
        let slabs = Slabs::new(Aperture::new(0, (1 << 40) - 1, 4096).unwrap(), Arc::clone(&cpu));
        let slabs = Arc::new(slabs);
        let config = DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(policy) };
        let environment = Environment { cpu, ..Environment::default() };
        let device = Device::builder(Arc::clone(&faulty))
            .allocator(Arc::clone(&slabs))
            .config(config)
            .environment(environment)
            .build();
        Bench { device: device.unwrap(), faulty, soft, slabs, buffers: Arc::default() }
    }

    /// Pieces that need three map calls, gigabytes apart, so that each has table pages of its own.
    fn buffer(&self, n: u64) -> Counted {
        self.buffers.fetch_add(1, Ordering::Relaxed);
        let at = (n + 1) << 30;
        let pieces = vec![(at, 0x1000), (at + 0x8000, 0x20_0000), (at + (1 << 29), 0x1800)];
        Counted { pieces, count: Arc::clone(&self.buffers) }
    }

    /// The assets, when nothing is queued any more.
    ///
    /// A table that an unmap covers only in part stays, for the next mapping there (rule L41): the
    /// states compared have mapped the same before.
    fn assets(&self) -> Assets {
        self.faulty.clear();
        self.device.flush().unwrap();
        self.soft.flush_iotlb_all().unwrap();
        let stats = self.slabs.stats();
        Assets {
            iova_ranges: stats.live_ranges - stats.cached_ranges,
            iova_bytes: stats.live_bytes,
            mappings: self.soft.mappings(),
            table_bytes: self.soft.table_bytes(),
            buffers: self.buffers.load(Ordering::Relaxed),
        }
    }
}

impl Bench {
    /// Makes five mappings at once, then none.
    fn five_maps(&self) {
        let map = |n| self.device.map(self.buffer(n), Direction::ToDevice).unwrap();
        drop((0..5).map(map).collect::<Vec<_>>());
    }

    /// Checks that every table page can be reached from the root: an unmap of everything frees all.
    fn assert_no_table_is_lost(&self) {
        let mut gather = Gather::new();
        self.soft.unmap(Range::ALL, &mut gather).unwrap();
        self.soft.iotlb_sync(&mut gather).unwrap();
        self.soft.flush_iotlb_all().unwrap();
        assert_eq!((self.soft.mappings(), self.soft.table_bytes()), (0, 0));
    }
}

/// A name, and an operation on a device that returns whether it failed.
type Operation = (&'static str, fn(&Bench, &mut Vec<Mapping<Counted>>) -> bool);

const MAPS: [Operation; 4] = [
    ("map", |bench, _| match bench.device.map(bench.buffer(0), Direction::ToDevice) {
        Ok(mapping) => mapping.unmap().is_err(),
        Err(failed) => failed.into_buffer().is_some(),
    }),
    ("map_sg", |bench, _| {
        let list = (0..3).map(|n| bench.buffer(n)).collect::<Vec<_>>();
        match bench.device.map(list, Direction::FromDevice) {
            Ok(mapping) => mapping.unmap().is_err(),
            Err(failed) => failed.into_buffer().is_some_and(|list| list.len() == 3),
        }
    }),
    ("alloc_coherent", |bench, _| match bench.device.alloc_coherent(bench.buffer(0)) {
        Ok(coherent) => coherent.free().is_err(),
        Err(failed) => failed.into_buffer().is_some(),
    }),
    ("map_persistent", |bench, _| {
        match bench.device.map_persistent(bench.buffer(0), Direction::Bidirectional) {
            Ok(persistent) => persistent.unmap().is_err(),
            Err(failed) => failed.into_buffer().is_some(),
        }
    }),
];

const MAPPING: [Policy; 6] = [
    Policy::Strict,
    Policy::StrictMap,
    Policy::LazySq,
    Policy::LazyMq,
    Policy::LazySqMap,
    Policy::LazyMqMap,
];

const STATUS: Error = Error::Device { operation: "map", range: Range::ALL, status: 9 };

#[test]
fn a_map_of_any_kind_that_fails_anywhere_leaves_what_there_was() {
    // rules L33, L34, L46
    for policy in MAPPING {
        for (name, operation) in MAPS {
            for kind in [Kind::Map, Kind::SyncMap] {
                for stage in [Stage::Before, Stage::After] {
                    // A failing `map_pages` must have changed nothing, so this is not a valid
                    // domain.
                    if (kind, stage) == (Kind::Map, Stage::After) {
                        continue;
                    }
                    let mut failures = 0;
                    for nth in 1.. {
                        let bench = Bench::new(policy);
                        // A mapping that exists before, and stays.
                        let mut kept = Vec::new();
                        let buffer = bench.buffer(9);
                        kept.push(bench.device.map(buffer, Direction::ToDevice).unwrap());
                        assert!(!operation(&bench, &mut kept));
                        let before = bench.assets();
                        bench.faulty.inject_error(kind, When::Nth(nth), stage, STATUS);
                        let failed = operation(&bench, &mut kept);
                        let hit = bench.faulty.injected() > 0;
                        let case = format!("{policy}, {name}, {kind:?} {nth} {stage:?}");
                        assert_eq!(failed, hit, "{case}");
                        assert_eq!(bench.assets(), before, "{case}");
                        assert_eq!(bench.device.stats().quarantined, 0, "{case}");
                        bench.assert_no_table_is_lost();
                        if !hit {
                            break;
                        }
                        failures += 1;
                    }
                    let pieces = if name == "map_sg" { 9 } else { 3 };
                    let wanted =
                        if kind == Kind::SyncMap && policy.batches_maps() { 1 } else { pieces };
                    assert_eq!(failures, wanted, "{policy}, {name}, {kind:?}");
                }
            }
        }
    }
}

#[test]
fn an_exhausted_allocator_and_a_full_domain_leave_what_there_was() {
    // rule L33
    for policy in MAPPING {
        for full in [Limits { mappings: 2, ..Limits::NONE }, Limits::NONE] {
            for pages in [2, 16] {
                let last = (pages << 12) - 1;
                let aperture = Range::new(Iova(0), Iova(last)).unwrap();
                let geometry = Geometry::new(PageSizes::from_granule(4096).unwrap(), aperture);
                let soft = Soft::new(geometry, full, Shootdown::new(1));
                let cpu = Arc::new(FixedCpu::new(1));
                let slabs = Arc::new(Slabs::new(Aperture::new(0, last, 4096).unwrap(), cpu));
                let config = DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(policy) };
                let device = Device::builder(Arc::clone(&soft))
                    .allocator(Arc::clone(&slabs))
                    .config(config)
                    .build()
                    .unwrap();
                let count = Arc::new(AtomicUsize::new(0));
                let mut failures = 0;
                for _ in 0..20 {
                    count.fetch_add(1, Ordering::Relaxed);
                    let pieces = vec![(0x1000, 0x1000), (0x4000, 0x1000), (0x9000, 0x1000)];
                    let buffer = Counted { pieces, count: Arc::clone(&count) };
                    match device.map(buffer, Direction::ToDevice) {
                        Ok(mapping) => drop(mapping),
                        Err(_) => failures += 1,
                    }
                }
                assert_eq!(failures == 0, pages == 16 && full == Limits::NONE);
                device.flush().unwrap();
                soft.flush_iotlb_all().unwrap();
                slabs.drain();
                let stats = slabs.stats();
                assert_eq!((stats.live_ranges, soft.mappings()), (0, 0));
                assert_eq!(count.load(Ordering::Relaxed), 0);
            }
        }
    }
}

#[test]
fn an_unmap_that_fails_keeps_exactly_its_own_and_reports_how_much() {
    for policy in MAPPING {
        for kind in [Kind::Unmap, Kind::Sync] {
            for stage in [Stage::Before, Stage::After] {
                if kind == Kind::Sync && policy.is_lazy() {
                    continue;
                }
                let bench = Bench::new(policy);
                drop(bench.device.map(bench.buffer(0), Direction::ToDevice).unwrap());
                let before = bench.assets();
                let mapping = bench.device.map(bench.buffer(0), Direction::ToDevice).unwrap();
                let held = bench.assets();
                bench.faulty.inject_error(kind, When::Nth(1), stage, STATUS);
                let error = mapping.unmap().unwrap_err();
                let after = bench.assets();
                let stats = bench.device.stats();
                assert_eq!((stats.quarantined, stats.unmap_failures), (1, 1));
                assert_eq!(after.iova_bytes, held.iova_bytes, "its addresses are not reused");
                assert_eq!(stats.quarantined_bytes, error.quarantined.extent() + 1);
                assert_eq!(after.buffers, held.buffers, "nor is its memory");
                // If the domain did its part, the tables are as they were.
                if kind == Kind::Sync || stage == Stage::After {
                    assert_eq!(
                        (after.mappings, after.table_bytes),
                        (before.mappings, before.table_bytes)
                    );
                }
            }
        }
    }
}

/// Maps two buffers as a batch; returns the mappings, and how many could not be made.
fn map_two(bench: &Bench) -> (Vec<Mapping<Counted>>, usize) {
    let (mut mappings, mut failed) = (Vec::new(), 0);
    let mut batch = bench.device.map_batch();
    for n in 0..2 {
        if let Err(((), refused)) = batch.push(bench.buffer(n), Direction::ToDevice, ()) {
            assert!(refused.into_buffer().is_some());
            failed += 1;
        }
    }
    batch.finish(|(), outcome| match outcome {
        Ok(mapping) => mappings.push(mapping),
        Err(refused) => {
            assert!(refused.into_buffer().is_some());
            failed += 1;
        }
    });
    (mappings, failed)
}

#[test]
fn a_batch_of_maps_that_fails_anywhere_leaves_what_there_was() {
    // rules L33, L34
    let kinds = [Kind::Map, Kind::SyncMap, Kind::SyncEnd];
    for policy in MAPPING {
        for kind in kinds {
            let mut failures = 0;
            for nth in 1.. {
                let bench = Bench::new(policy);
                drop(map_two(&bench));
                let before = bench.assets();
                bench.faulty.inject_error(kind, When::Nth(nth), Stage::Before, STATUS);
                let (mappings, failed) = map_two(&bench);
                let hit = bench.faulty.injected() > 0;
                bench.faulty.clear();
                assert_eq!((failed > 0, mappings.len()), (hit, 2 - failed), "{policy}, {kind:?}");
                drop(mappings);
                assert_eq!(bench.assets(), before, "{policy}, {kind:?} {nth}");
                assert_eq!(bench.device.stats().quarantined, 0);
                bench.assert_no_table_is_lost();
                if !hit {
                    break;
                }
                failures += 1;
            }
            let wanted = match (kind, policy.batches_maps()) {
                (Kind::Map, _) | (_, false) => 6,
                (_, true) => 1,
            };
            assert_eq!(failures, wanted, "{policy}, {kind:?}");
        }
    }
}

#[test]
fn a_batch_of_unmaps_that_fails_keeps_exactly_those_it_reports() {
    let kinds = [Kind::Unmap, Kind::Sync, Kind::SyncEnd];
    for policy in [Policy::Strict, Policy::StrictMap] {
        let mut hits = 0;
        for kind in kinds {
            let bench = Bench::new(policy);
            drop(map_two(&bench));
            let before = bench.assets();
            let (mappings, _) = map_two(&bench);
            let mut batch = bench.device.unmap_batch();
            mappings.into_iter().for_each(|mapping| batch.push(mapping, ()).unwrap());
            bench.faulty.inject_error(kind, When::Nth(1), Stage::Before, STATUS);
            let mut kept = 0;
            batch.finish(|(), outcome| kept += u64::from(outcome.is_err()));
            hits += usize::from(bench.faulty.injected() > 0);
            assert_eq!(kept > 0, bench.faulty.injected() > 0);
            let (after, stats) = (bench.assets(), bench.device.stats());
            assert_eq!((stats.quarantined, stats.unmap_failures), (kept, kept));
            assert_eq!(after.iova_ranges, before.iova_ranges + kept);
            assert_eq!(after.buffers as u64, before.buffers as u64 + kept);
        }
        assert_eq!(hits, kinds.len(), "{policy}");
    }
}

#[test]
fn a_flush_that_fails_keeps_what_is_queued_for_the_next() {
    for policy in MAPPING.into_iter().filter(|policy| policy.is_lazy()) {
        for stage in [Stage::Before, Stage::After] {
            for expire in [false, true] {
                let bench = Bench::new(policy);
                bench.five_maps();
                let before = bench.assets();
                bench.five_maps();
                bench.faulty.inject_error(Kind::FlushAll, When::Nth(1), stage, STATUS);
                let device = &bench.device;
                assert_eq!(if expire { device.expire() } else { device.flush() }, Err(STATUS));
                let stats = device.stats();
                assert_eq!((stats.queued, stats.flush_failures, stats.quarantined), (5, 1, 0));
                assert_eq!(bench.assets(), before);
                assert_eq!(device.stats().queued, 0);
            }
        }
    }
}

#[test]
fn what_a_device_leaves_behind_when_it_goes_is_nothing() {
    for policy in MAPPING {
        let bench = Bench::new(policy);
        bench.five_maps();
        let before = bench.assets();
        bench.five_maps();
        let Bench { device, soft, slabs, buffers, .. } = bench;
        drop(device);
        soft.flush_iotlb_all().unwrap();
        slabs.drain();
        let stats = slabs.stats();
        assert_eq!((stats.live_ranges, soft.mappings()), (0, 0));
        assert_eq!(soft.table_bytes(), before.table_bytes);
        assert_eq!(buffers.load(Ordering::Relaxed), 0);
    }
}
