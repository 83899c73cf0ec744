//! A ring over the tree, against a list of the taken ranges.
#![cfg(not(loom))]

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;
use ringfence_iova::{Align, Allocator, Aperture, RbTree, Request, ReserveError, Ring};

/// Pages of the aperture.
const PAGES: u64 = 256;
const PAGE: u64 = 4096;

/// Operations; numbers in pages from the aperture's start.
#[derive(Clone, Debug)]
enum Op {
    Alloc { size: u64, align: Option<u32>, limit: Option<u64>, boundary: Option<u32> },
    Free { which: usize },
    FreeWrongly { at: u64, size: u64 },
    Reserve { at: u64, size: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 1..6u64, 2 => 6..40u64, 1 => 40..300u64];
    let bits = proptest::option::weighted(0.4, 0..7u32);
    let limit = proptest::option::weighted(0.3, 0..260u64);
    let boundary = proptest::option::weighted(0.3, 0..9u32);
    prop_oneof![
        8 => (size, bits, limit, boundary).prop_map(|(size, align, limit, boundary)| {
            Op::Alloc { size, align, limit, boundary }
        }),
        6 => (0..1000usize).prop_map(|which| Op::Free { which }),
        1 => (0..260u64, 1..40u64).prop_map(|(at, size)| Op::FreeWrongly { at, size }),
        1 => (0..260u64, 1..8u64).prop_map(|(at, size)| Op::Reserve { at, size }),
    ]
}

struct Oracle {
    first: u64,
    last: u64,
    chunk: Aperture,
    /// The first address of the range taken from below: that of the lead.
    taken: u64,
    live: BTreeMap<u64, u64>,
    reserved: Vec<(u64, u64)>,
}

impl Oracle {
    /// Whether a range lies within the chunk; `None` if it lies across an end of it, or touches its
    /// lead.
    fn side(&self, first: u64, last: u64) -> Option<bool> {
        if self.chunk.first() <= first && last <= self.chunk.last() {
            Some(true)
        } else {
            (last < self.taken || self.chunk.last() < first).then_some(false)
        }
    }

    fn overlaps_live(&self, first: u64, last: u64) -> bool {
        self.live.iter().any(|(&a, &b)| a <= last && first <= b)
    }

    /// The last address of the range at `iova`, if it may be handed out.
    fn meets(&self, request: &Request, iova: u64) -> Option<u64> {
        let pages = request.size.div_ceil(PAGE);
        let last = iova.checked_add(pages * PAGE - 1)?;
        let align = match request.align {
            Align::Size => pages.next_power_of_two() * PAGE,
            Align::Bytes(bytes) => bytes.max(PAGE),
        };
        let met = iova != 0
            && iova.is_multiple_of(align)
            && iova >= self.first
            && last <= self.last.min(request.limit)
            && (request.boundary == u64::MAX || (iova ^ last) & !request.boundary == 0)
            && self.side(iova, last).is_some()
            && !self.overlaps_live(iova, last)
            && !self.reserved.iter().any(|&(a, b)| a <= last && iova <= b);
        met.then_some(last)
    }

    /// A place for the request within the chunk, or outside it.
    fn hole(&self, request: &Request, within: bool) -> Option<u64> {
        (0..PAGES)
            .map(|n| self.first + n * PAGE)
            .filter(|&iova| (self.chunk.first() <= iova && iova <= self.chunk.last()) == within)
            .find(|&iova| self.meets(request, iova).is_some())
    }
}

fn run(base: u64, chunk_pages: u64, lead: u64, ops: &[Op]) -> Result<(), TestCaseError> {
    let last = base + (PAGES * PAGE - 1);
    let tree = Arc::new(RbTree::new(Aperture::new(base, last, PAGE).expect("not empty")));
    let ring = Ring::with_lead(Arc::clone(&tree), chunk_pages * PAGE, lead * PAGE).expect("free");
    let chunk = ring.chunk();
    let taken = chunk.first() - lead * PAGE;
    // A lead undoes the alignment.
    let align = chunk_pages.next_power_of_two() * PAGE;
    prop_assert!(lead > 0 || taken.is_multiple_of(align));
    prop_assert_eq!(chunk.last() - chunk.first() + 1, chunk_pages * PAGE);
    let mut oracle =
        Oracle { first: base, last, chunk, taken, live: BTreeMap::new(), reserved: Vec::new() };
    let mut fallbacks = 0;
    let mut reserved_in_chunk = false;
    let at = |n: u64| base.saturating_add(n.saturating_mul(PAGE));
    for op in ops {
        match *op {
            Op::Alloc { size, align, limit, boundary } => {
                let request = Request {
                    // Not always a multiple of the page.
                    size: size * PAGE - u64::from(size % 2 == 0),
                    align: align.map_or(Align::Size, |bit| Align::Bytes(PAGE << bit)),
                    limit: limit.map_or(u64::MAX, |n| at(n).saturating_sub(n % 2)),
                    boundary: boundary.map_or(u64::MAX, |bit| (PAGE << bit) - 1),
                    flush: true,
                };
                let within = oracle.hole(&request, true);
                match ring.alloc(&request) {
                    Ok(iova) => {
                        let last = oracle.meets(&request, iova);
                        let last = last.ok_or_else(|| {
                            TestCaseError::fail(format!("{iova:#x} for {request:x?}"))
                        })?;
                        // A request that fits into the chunk comes from there.
                        prop_assert_eq!(oracle.side(iova, last), Some(within.is_some()));
                        fallbacks += u64::from(within.is_none());
                        oracle.live.insert(iova, last);
                    }
                    Err(error) => {
                        prop_assert_eq!(error.request, request);
                        prop_assert_eq!(within, None);
                        prop_assert_eq!(oracle.hole(&request, false), None, "but {}", error);
                    }
                }
            }
            Op::Free { which } => {
                let Some((&first, &last)) =
                    oracle.live.iter().nth(which % oracle.live.len().max(1))
                else {
                    continue;
                };
                oracle.live.remove(&first);
                let size = last - first + 1;
                prop_assert_eq!(ring.check_free(first, size), Ok(()));
                prop_assert_eq!(ring.free(first, size), Ok(()));
                prop_assert!(ring.free(first, size).is_err(), "once is enough");
            }
            Op::FreeWrongly { at: n, size } => {
                let (iova, size) = (at(n), size * PAGE);
                if oracle.live.get(&iova).is_none_or(|last| last - iova + 1 != size) {
                    prop_assert!(ring.check_free(iova, size).is_err());
                    prop_assert!(ring.free(iova, size).is_err());
                }
            }
            Op::Reserve { at: n, size } => {
                let first = at(n);
                let last = first.saturating_add(size * PAGE - 1);
                let in_chunk = first <= chunk.last() && taken <= last;
                match ring.reserve(first, last) {
                    Ok(()) => {
                        prop_assert!(!oracle.overlaps_live(first, last));
                        oracle.reserved.push((first, last));
                        reserved_in_chunk |= in_chunk;
                    }
                    Err(ReserveError::InUse { taken: at, .. }) => {
                        prop_assert!(oracle.overlaps_live(first, last));
                        prop_assert!(first <= at && at <= last);
                        if oracle.side(first, last).is_none() {
                            // Across an end of the chunk: the part within stays reserved, if that
                            // was free.
                            let part = (first.max(taken), last.min(chunk.last()));
                            if !oracle.overlaps_live(part.0, part.1) {
                                oracle.reserved.push(part);
                                reserved_in_chunk = true;
                            }
                        }
                    }
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
        }
    }
    let stats = ring.stats();
    let live = oracle.live.len() as u64;
    let bytes: u64 = oracle.live.iter().map(|(first, last)| last - first + 1).sum();
    prop_assert_eq!(stats.allocs - stats.frees, live);
    prop_assert_eq!((stats.live_ranges, stats.live_bytes), (live, bytes));
    prop_assert_eq!(ring.fallbacks(), fallbacks);
    for (&first, &last) in &oracle.live {
        prop_assert_eq!(ring.free(first, last - first + 1), Ok(()));
    }
    drop(ring);
    prop_assert_eq!(tree.stats().live_ranges, u64::from(reserved_in_chunk));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_ring_never_hands_out_what_is_taken_and_prefers_its_chunk(
        base in prop_oneof![
            Just(0),
            Just((1u64 << 32) - 128 * PAGE),
            Just(u64::MAX - (PAGES * PAGE - 1)),
        ],
        chunk in prop_oneof![Just(1u64), Just(3), Just(48), Just(64)],
        lead in 0..20u64,
        ops in proptest::collection::vec(op(), 1..250),
    ) {
        run(base, chunk, lead, &ops)?;
    }
}
