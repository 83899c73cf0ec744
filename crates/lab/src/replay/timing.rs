//! What an allocator takes for the recorded operations.
//!
//! Two kinds of pass, each with fresh allocators: one between two readings of the clock, for the
//! time an operation takes, and one that reads the clock around every operation, for the split
//! between allocations and frees and for the slow ones. The cost of the clock itself is measured in
//! the same pass and subtracted.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use ringfence_iova::{Allocator, Aperture, FreeError, Placement, Request};

use super::stream::Stream;
use crate::{allocators::AllocatorKind, bench::rounds::Sample, stats::Latencies};

/// A pass of fewer operations is repeated, so that a round takes long enough to be timed.
const FEWEST_OPS: usize = 20_000;
/// But no more often than this: each pass begins with fresh allocators, which take time to make.
const MOST_PASSES: usize = 8;
/// So many operations, then a look at whether to stop.
const BETWEEN_LOOKS: usize = 4096;

/// The operations of a stream and nothing else of it, so that little memory passes the caches.
pub(super) struct Script {
    steps: Vec<Step>,
    slots: usize,
    domains: usize,
    aperture: Aperture,
    placement: Placement,
}

struct Step {
    /// Bytes to allocate; 0 frees what the slot holds.
    size: u64,
    slot: u32,
    domain: u16,
}

/// What a slot holds; no bytes: nothing, its allocation failed.
#[derive(Clone, Copy, Default)]
struct SlotRange {
    iova: u64,
    size: u64,
}

/// What serves the operations: an allocator, or none, for what the loop itself takes.
pub(super) type Server = Option<AllocatorKind>;

/// Of every operation, the shortest time that any round found: what it takes by itself. A single
/// round's slowest operations are those that the machine interrupted.
pub(super) struct Fastest(Vec<u32>);

impl Fastest {
    pub(super) fn new(script: &Script) -> Fastest {
        Fastest(vec![u32::MAX; script.steps.len()])
    }

    /// The longest of them; `None` before the first complete round.
    pub(super) fn longest(&self) -> Option<f64> {
        self.0.iter().copied().max().filter(|ns| *ns != u32::MAX).map(f64::from)
    }
}

impl Script {
    pub(super) fn new(stream: &Stream, aperture: Aperture, placement: Placement) -> Script {
        let step = |op| {
            let allocation = stream.allocation(op);
            let size = if op.free { 0 } else { allocation.size() };
            Step { size, slot: allocation.slot, domain: allocation.domain }
        };
        Script {
            steps: stream.ops().iter().map(step).collect(),
            slots: stream.slots,
            domains: stream.domains,
            aperture,
            placement,
        }
    }

    /// One round: both kinds of pass. What it found, nanoseconds: for an operation, allocations and frees
    /// together (`both`), an allocation (`alloc`), a free (`free`; NaN if there is none, as `alloc`), how
    /// long 99 of 100 operations took at most (`p99`), and the slowest (`worst`). Nothing of it counts if
    /// it was stopped.
    ///
    /// # Errors
    /// An allocator refused to take back what it had handed out.
    pub(super) fn round(
        &self,
        server: Server,
        fastest: &mut Fastest,
        stop: &AtomicBool,
    ) -> Result<Sample> {
        let mut sample = vec![("both", self.unclocked(server, stop)?)];
        if server.is_some() && !stop.load(Ordering::Relaxed) {
            sample.extend(self.clocked(server, fastest, stop)?);
        }
        Ok(sample)
    }

    /// An allocator for each domain, or none.
    fn serve(&self, server: Server) -> Vec<Box<dyn Allocator>> {
        let one = |kind: AllocatorKind| kind.make(self.aperture, self.placement);
        server.iter().flat_map(|kind| (0..self.domains).map(move |_| one(*kind))).collect()
    }

    /// Nanoseconds an operation.
    fn unclocked(&self, server: Server, stop: &AtomicBool) -> Result<f64> {
        let passes = FEWEST_OPS.div_ceil(self.steps.len()).min(MOST_PASSES);
        let mut spent = Duration::ZERO;
        for _ in 0..passes {
            let allocators = self.serve(server);
            let mut held = vec![SlotRange::default(); self.slots];
            let begun = Instant::now();
            for steps in self.steps.chunks(BETWEEN_LOOKS) {
                for step in steps {
                    let allocator = allocators.get(usize::from(step.domain)).map(Box::as_ref);
                    take(step, allocator, &mut held[step.slot as usize])
                        .map_err(|error| refused(server, error))?;
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            spent += begun.elapsed();
        }
        Ok(spent.as_nanos() as f64 / (self.steps.len() * passes) as f64)
    }

    fn clocked(&self, server: Server, fastest: &mut Fastest, stop: &AtomicBool) -> Result<Sample> {
        let allocators = self.serve(server);
        let mut held = vec![SlotRange::default(); self.slots];
        let clock = clock_cost();
        let mut all = Latencies::default();
        let mut worst = 0;
        // Allocations, frees: how many, how long.
        let mut sums = [(0u64, 0u64); 2];
        let chunks = self.steps.chunks(BETWEEN_LOOKS).zip(fastest.0.chunks_mut(BETWEEN_LOOKS));
        for (steps, fastest) in chunks {
            for (step, fastest) in steps.iter().zip(fastest) {
                let allocator = allocators.get(usize::from(step.domain)).map(Box::as_ref);
                let held = &mut held[step.slot as usize];
                let begun = Instant::now();
                let done = take(step, allocator, held);
                let ns = begun.elapsed().saturating_sub(clock).as_nanos() as u64;
                done.map_err(|error| refused(server, error))?;
                let (count, sum) = &mut sums[usize::from(step.size == 0)];
                *count += 1;
                *sum += ns;
                all.record(ns);
                worst = worst.max(ns);
                // Those that take four seconds and more are all alike.
                *fastest = (*fastest).min(u32::try_from(ns).unwrap_or(u32::MAX - 1));
            }
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let mean = |(count, sum): (u64, u64)| sum as f64 / count as f64;
        Ok(vec![
            ("alloc", mean(sums[0])),
            ("free", mean(sums[1])),
            ("p99", all.quantile(0.99) as f64),
            ("worst", worst as f64),
        ])
    }
}

/// Carries out an operation; without an allocator, all but its part.
#[inline]
fn take(
    step: &Step,
    allocator: Option<&dyn Allocator>,
    held: &mut SlotRange,
) -> Result<(), FreeError> {
    if step.size == 0 {
        return match (black_box(held.size), allocator) {
            (0, _) | (_, None) => Ok(()),
            (size, Some(allocator)) => allocator.free(held.iova, size),
        };
    }
    let found = match allocator {
        Some(allocator) => allocator.alloc(&Request::new(step.size)),
        None => Ok(black_box(0)),
    };
    *held = match found {
        Ok(iova) => SlotRange { iova, size: step.size },
        // Counted elsewhere, where nothing is timed.
        Err(_) => SlotRange::default(),
    };
    Ok(())
}

fn refused(server: Server, error: FreeError) -> anyhow::Error {
    let kind = server.map_or("of nothing", AllocatorKind::name);
    anyhow!("the allocator {kind} handed out what it denies: {error}")
}

/// The median time of two readings of the clock with nothing between them.
fn clock_cost() -> Duration {
    let mut costs: Vec<Duration> = (0..1001).map(|_| Instant::now().elapsed()).collect();
    costs.sort();
    costs[costs.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::sample;

    #[test]
    fn a_round_of_every_allocator_has_figures() {
        let aperture = Aperture::new(0, u32::MAX.into(), 4096).unwrap();
        let script = Script::new(&sample::stream(), aperture, Placement::default());
        let go = AtomicBool::new(false);
        for kind in AllocatorKind::ALL {
            let mut fastest = Fastest::new(&script);
            assert_eq!(fastest.longest(), None);
            let round = script.round(Some(kind), &mut fastest, &go).unwrap();
            let [both, alloc, free, p99, worst] = round[..] else { panic!("{round:?}") };
            assert_eq!(fastest.longest(), Some(worst.1));
            script.round(Some(kind), &mut fastest, &go).unwrap();
            assert!(fastest.longest().unwrap() <= worst.1);
            for (name, ns) in [both, alloc, free, p99, worst] {
                assert!(ns.is_finite() && ns >= 0.0, "{kind}, {name}: {round:?}");
            }
            assert!(p99.1 <= worst.1 * 1.001, "{kind}: {round:?}");
        }
        let mut fastest = Fastest::new(&script);
        let round = script.round(None, &mut fastest, &go).unwrap();
        assert!(matches!(round[..], [("both", ns)] if ns > 0.0), "{round:?}");
    }

    #[test]
    fn a_round_stops_on_request() {
        let aperture = Aperture::new(0, u32::MAX.into(), 4096).unwrap();
        let script = Script::new(&sample::stream(), aperture, Placement::default());
        let stop = AtomicBool::new(true);
        let mut fastest = Fastest::new(&script);
        let server = Some(AllocatorKind::RbTree);
        script.round(server, &mut fastest, &stop).unwrap();
        assert_eq!(fastest.longest(), None);
    }
}
