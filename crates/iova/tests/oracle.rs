//! Every allocator, and stacks of them, against a list of the taken ranges.
#![cfg(not(loom))]

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;
use ringfence_iova::{
    Align, AllocReason, Allocator, Aperture, Bitmap, LARGEST_CACHED, MagazineConfig, Magazines,
    Placement, Preferred32, RbTree, Request, ReserveError, SlabConfig, Slabs,
};
use ringfence_sync::cpu::{CpuId, FixedCpu};

/// Operations on an allocator; all numbers in granules from the aperture's start.
#[derive(Clone, Debug)]
enum Op {
    Alloc { size: u64, align: Option<u32>, limit: Option<u64>, boundary: Option<u32>, flush: bool },
    Free { which: usize },
    FreeWrongly { at: u64, size: u64 },
    Reserve { at: u64, size: u64 },
    Cpu { number: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 1..6u64, 2 => 6..40u64, 1 => 40..300u64];
    prop_oneof![
        8 => (
            size,
            proptest::option::weighted(0.4, 0..7u32),
            proptest::option::weighted(0.4, 0..260u64),
            proptest::option::weighted(0.3, 0..9u32),
            proptest::bool::weighted(0.8),
        )
            .prop_map(|(size, align, limit, boundary, flush)| Op::Alloc {
                size,
                align,
                limit,
                boundary,
                flush
            }),
        6 => (0..1000usize).prop_map(|which| Op::Free { which }),
        1 => (0..260u64, 1..40u64).prop_map(|(at, size)| Op::FreeWrongly { at, size }),
        1 => (0..260u64, 1..8u64).prop_map(|(at, size)| Op::Reserve { at, size }),
        1 => (0..3usize).prop_map(|number| Op::Cpu { number }),
    ]
}

/// Where the aperture lies: at the bottom, across 4 GiB, at the top; with granules of 4 KiB and 1
/// B.
fn apertures() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        Just((0, 4096)),
        Just(((1 << 32) - 128 * 4096, 4096)),
        Just((u64::MAX - (256 * 4096 - 1), 4096)),
        Just((0, 1)),
        Just((u64::MAX - 255, 1)),
    ]
}

/// What is taken, in inclusive ranges of addresses.
struct Oracle {
    first: u64,
    last: u64,
    granule: u64,
    /// Magazines round small sizes up to a power of two and align to that.
    rounds: bool,
    live: BTreeMap<u64, u64>,
    reserved: Vec<(u64, u64)>,
}

impl Oracle {
    fn granules(&self, size: u64) -> u64 {
        let granules = size.div_ceil(self.granule);
        if self.rounds && granules < LARGEST_CACHED {
            granules.next_power_of_two()
        } else {
            granules
        }
    }

    fn is_taken(&self, first: u64, last: u64) -> bool {
        let overlaps = |&(a, b): &(u64, u64)| a <= last && first <= b;
        self.reserved.iter().any(overlaps) || self.overlaps_live(first, last).is_some()
    }

    fn overlaps_live(&self, first: u64, last: u64) -> Option<u64> {
        self.live.iter().find(|&(&a, &b)| a <= last && first <= b).map(|(&a, _)| a)
    }

    fn meets(&self, request: &Request, iova: u64, granules: u64) -> Result<u64, String> {
        let bytes = u128::from(granules) * u128::from(self.granule);
        let last = u128::from(iova) + bytes - 1;
        let last = u64::try_from(last).map_err(|_| "passes the end of the space")?;
        let align = match request.align {
            Align::Size => u128::from(granules.next_power_of_two()) * u128::from(self.granule),
            Align::Bytes(bytes) => u128::from(bytes.max(self.granule)),
        };
        // A size that may be cached is aligned to itself, whatever the request.
        let cached = self.rounds && granules <= LARGEST_CACHED;
        let align = if cached { align.max(bytes) } else { align };
        if iova == 0 {
            return Err("IOVA 0".into());
        }
        if u128::from(iova) % align != 0 {
            return Err("misaligned".into());
        }
        if iova < self.first || last > self.last {
            return Err("outside of the aperture".into());
        }
        if last > request.limit {
            return Err("above the limit".into());
        }
        if request.boundary != u64::MAX && (iova ^ last) & !request.boundary != 0 {
            return Err("across a boundary".into());
        }
        if self.is_taken(iova, last) {
            return Err("taken".into());
        }
        Ok(last)
    }

    fn hole(&self, request: &Request) -> Option<u64> {
        let granules = self.granules(request.size);
        let count = (self.last - self.first) / self.granule + 1;
        (0..count)
            .map(|n| self.first + n * self.granule)
            .find(|&iova| self.meets(request, iova, granules).is_ok())
    }
}

struct Case<'a> {
    allocator: &'a dyn Allocator,
    rounds: bool,
    /// Whether freed ranges may still be in the way of a reservation.
    lazy: bool,
    cpu: &'a FixedCpu,
}

fn run(case: &Case<'_>, base: u64, granule: u64, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut oracle = Oracle {
        first: base,
        last: base + (256 * granule - 1),
        granule,
        rounds: case.rounds,
        live: BTreeMap::new(),
        reserved: Vec::new(),
    };
    let at = |n: u64| base.saturating_add(n.saturating_mul(granule));
    for op in ops {
        match *op {
            Op::Alloc { size, align, limit, boundary, flush } => {
                let request = Request {
                    // Not always a multiple of the granule.
                    size: size * granule - u64::from(granule > 1 && size % 2 == 0),
                    align: align.map_or(Align::Size, |bit| Align::Bytes(granule << bit)),
                    limit: limit.map_or(u64::MAX, |n| at(n).saturating_sub(n % 2)),
                    boundary: boundary.map_or(u64::MAX, |bit| (granule << bit) - 1),
                    flush,
                };
                match case.allocator.alloc(&request) {
                    Ok(iova) => {
                        let met = oracle.meets(&request, iova, oracle.granules(request.size));
                        let last = met.map_err(|why| {
                            TestCaseError::fail(format!("{iova:#x} for {request:x?}: {why}"))
                        })?;
                        oracle.live.insert(iova, last);
                    }
                    Err(error) => {
                        prop_assert_eq!(error.request, request);
                        // rule L14
                        if flush {
                            let hole = oracle.hole(&request);
                            prop_assert_eq!(hole, None, "a hole, but {}", error);
                        }
                        if error.reason.is_invalid() {
                            prop_assert!(request.size > request.boundary.saturating_add(1));
                        }
                    }
                }
            }
            Op::Free { which } => {
                if oracle.live.is_empty() {
                    continue;
                }
                let (&first, &last) =
                    oracle.live.iter().nth(which % oracle.live.len()).expect("not empty");
                oracle.live.remove(&first);
                let size = last - first + 1;
                prop_assert_eq!(case.allocator.check_free(first, size), Ok(()));
                prop_assert_eq!(case.allocator.free(first, size), Ok(()));
                // A second free is refused.
                prop_assert!(case.allocator.free(first, size).is_err());
            }
            Op::FreeWrongly { at: n, size } => {
                let (iova, size) = (at(n), size * granule);
                let granules = oracle.granules(size);
                let right = oracle
                    .live
                    .get(&iova)
                    .is_some_and(|last| (last - iova) / granule + 1 == granules);
                if !right {
                    prop_assert!(case.allocator.check_free(iova, size).is_err());
                    prop_assert!(case.allocator.free(iova, size).is_err());
                }
            }
            Op::Reserve { at: n, size } => {
                let first = at(n);
                let last = first.saturating_add(size * granule - 1);
                let in_use = oracle.overlaps_live(first, last).is_some();
                match case.allocator.reserve(first, last) {
                    Ok(()) => {
                        prop_assert!(!in_use);
                        oracle.reserved.push((first, last));
                    }
                    Err(ReserveError::InUse { taken, .. }) => {
                        prop_assert!(in_use || case.lazy);
                        prop_assert!(first <= taken && taken <= last);
                    }
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
            Op::Cpu { number } => case.cpu.set(number),
        }
    }
    let stats = case.allocator.stats();
    prop_assert_eq!(stats.allocs - stats.frees, oracle.live.len() as u64);
    prop_assert!(stats.live_ranges >= oracle.live.len() as u64);
    Ok(())
}

fn aperture(base: u64, granule: u64) -> Aperture {
    Aperture::new(base, base + (256 * granule - 1), granule).expect("not empty")
}

fn magazines<A: Allocator>(inner: A, cpu: &FixedCpu) -> Magazines<A, &FixedCpu> {
    let config = MagazineConfig { checked: true, ..MagazineConfig::default() };
    Magazines::with_config(inner, cpu, config)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_never_hands_out_what_is_taken_and_fails_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(1);
        let tree = RbTree::new(aperture(base, granule));
        run(&Case { allocator: &tree, rounds: false, lazy: false, cpu: &cpu }, base, granule, &ops)?;
    }

    #[test]
    fn the_bitmap_never_hands_out_what_is_taken_and_fails_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(1);
        let bitmap = Bitmap::new(aperture(base, granule), 1 << 32);
        run(&Case { allocator: &bitmap, rounds: false, lazy: false, cpu: &cpu }, base, granule, &ops)?;
    }

    #[test]
    fn the_lazy_bitmap_never_hands_out_what_is_taken_and_fails_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(1);
        let bitmap = Bitmap::lazy(aperture(base, granule), 1 << 32, Box::new(|| Ok(())));
        run(&Case { allocator: &bitmap, rounds: false, lazy: true, cpu: &cpu }, base, granule, &ops)?;
    }

    #[test]
    fn magazines_over_the_tree_never_hand_out_what_is_taken_and_fail_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(3);
        let tree = Arc::new(RbTree::new(aperture(base, granule)));
        let stack = magazines(Arc::clone(&tree), &cpu);
        run(&Case { allocator: &stack, rounds: true, lazy: false, cpu: &cpu }, base, granule, &ops)?;
        // Ranges that the caller has freed are cached; dropping the caches gives them back.
        let stats = stack.stats();
        prop_assert_eq!(stats.live_ranges, stats.allocs - stats.frees + stats.cached_ranges);
        drop(stack);
        prop_assert_eq!(tree.stats().live_ranges, stats.live_ranges - stats.cached_ranges);
    }

    #[test]
    fn magazines_over_the_lazy_bitmap_never_hand_out_what_is_taken_and_fail_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(3);
        let bitmap = Bitmap::lazy(aperture(base, granule), 1 << 32, Box::new(|| Ok(())));
        let stack = magazines(bitmap, &cpu);
        run(&Case { allocator: &stack, rounds: true, lazy: true, cpu: &cpu }, base, granule, &ops)?;
    }

    #[test]
    fn the_stack_of_a_device_never_hands_out_what_is_taken_and_fails_only_when_full(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(3);
        let shared = Arc::new(magazines(RbTree::new(aperture(base, granule)), &cpu));
        let device = Preferred32::new(shared);
        let case = Case { allocator: &device, rounds: true, lazy: false, cpu: &cpu };
        run(&case, base, granule, &ops)?;
    }
}

/// Slabs of up to 64 granules in an aperture of 256, so that slabs are used at all.
fn slabs(aperture: Aperture, cpu: &FixedCpu, placement: Placement) -> Slabs<&FixedCpu> {
    let config = SlabConfig {
        largest_slab: Some(64 * aperture.granule()),
        placement,
        ..SlabConfig::default()
    };
    Slabs::with_config(aperture, cpu, config)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 384, ..ProptestConfig::default() })]

    #[test]
    fn slabs_never_hand_out_what_is_taken_and_fail_only_when_nothing_fits(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
        placement in prop_oneof![
            4 => Just(Placement::SizeAligned), 1 => Just(Placement::Lowest),
            1 => Just(Placement::Highest),
        ],
    ) {
        let cpu = FixedCpu::new(3);
        let slabs = slabs(aperture(base, granule), &cpu, placement);
        run(&Case { allocator: &slabs, rounds: false, lazy: false, cpu: &cpu }, base, granule, &ops)?;
        let stats = slabs.stats();
        prop_assert_eq!(stats.live_ranges, stats.allocs - stats.frees + stats.cached_ranges);
        slabs.drain();
        let stats = slabs.stats();
        prop_assert_eq!(stats.cached_ranges, 0);
        prop_assert_eq!(stats.live_ranges, stats.allocs - stats.frees);
    }

    #[test]
    fn slabs_for_a_pci_device_never_hand_out_what_is_taken_and_fail_only_when_nothing_fits(
        (base, granule) in apertures(), ops in proptest::collection::vec(op(), 1..250),
    ) {
        let cpu = FixedCpu::new(3);
        let slabs = Arc::new(slabs(aperture(base, granule), &cpu, Placement::SizeAligned));
        let device = Preferred32::new(slabs);
        let case = Case { allocator: &device, rounds: false, lazy: false, cpu: &cpu };
        run(&case, base, granule, &ops)?;
    }
}

#[test]
fn allocators_are_used_through_pointers_and_trait_objects() {
    let boxed: Box<dyn Allocator> = Box::new(RbTree::new(aperture(0, 4096)));
    let shared: Arc<dyn Allocator> = Arc::new(magazines(boxed, leak(FixedCpu::new(1))));
    let iova = shared.alloc(&Request::new(4096)).unwrap();
    assert_eq!(iova, 255 * 4096);
    assert_eq!(shared.granule(), 4096);
    shared.free(iova, 4096).unwrap();
    let error = shared.alloc(&Request::new(0)).unwrap_err();
    assert_eq!(error.reason, AllocReason::ZeroSize);
}

fn leak(cpu: FixedCpu) -> &'static FixedCpu {
    assert_eq!(cpu.current(), 0);
    Box::leak(Box::new(cpu))
}
