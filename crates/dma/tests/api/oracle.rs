//! Random programs against a naive oracle: the set of bytes that the device may touch, over time.
//!
//! The oracle keeps a list of every mapping ever made, with its pieces rounded to granules. A live
//! one may be reached. One that was unmapped strictly may not; one unmapped lazily may until a flush
//! that started later has finished. After each step everything that the device has cached (and it
//! caches all it can) must be on the list.

use proptest::{collection::vec, prelude::*};
use ringfence_dma::{Direction, FlushTuning, Mapping, Policy, StaleIova};
use ringfence_iommu::Prot;

use crate::mock::{Bench, Buf, Setup};

#[derive(Clone, Debug)]
enum Step {
    Map { pieces: Vec<(u64, u64)>, direction: Direction },
    Unmap { which: usize },
    UnmapWatched { which: usize },
    Unwatch { which: usize },
    Flush,
    Expire,
    MoveToCpu(usize),
    Wait(u64),
    FailAfter(i64),
    SetPolicy(Policy),
    Tune { slots: usize, pages: Option<u64> },
}

fn step() -> impl Strategy<Value = Step> {
    let direction = prop_oneof![
        Just(Direction::ToDevice),
        Just(Direction::FromDevice),
        Just(Direction::Bidirectional)
    ];
    let pieces = vec((0x10_0000..0x14_0000u64, 1..0x3000u64), 1..4);
    prop_oneof![
        6 => (pieces, direction).prop_map(|(pieces, direction)| Step::Map { pieces, direction }),
        5 => any::<usize>().prop_map(|which| Step::Unmap { which }),
        1 => any::<usize>().prop_map(|which| Step::UnmapWatched { which }),
        1 => any::<usize>().prop_map(|which| Step::Unwatch { which }),
        1 => Just(Step::Flush),
        1 => Just(Step::Expire),
        1 => (0..2usize).prop_map(Step::MoveToCpu),
        1 => (0..1_000_000u64).prop_map(Step::Wait),
        1 => (0..4i64).prop_map(Step::FailAfter),
        1 => policy().prop_map(Step::SetPolicy),
        1 => (2..6usize, proptest::option::of(1..6u64))
            .prop_map(|(slots, pages)| Step::Tune { slots, pages }),
    ]
}

/// What the device may touch: granules of an IOVA range, and where they lead.
#[derive(Clone, Debug)]
struct Allowed {
    /// First IOVA, first target byte, bytes; in whole granules.
    pieces: Vec<(u64, u64, u64)>,
    prot: Prot,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Live,
    /// Unmapped when so many flushes had begun.
    Stale {
        after_flush: u64,
    },
    /// Its unmap failed.
    Quarantined,
    Gone,
}

struct Oracle {
    bench: Bench,
    granule: u64,
    allowed: Vec<Allowed>,
    mappings: Vec<(usize, Mapping<Buf>)>,
    watched: Vec<StaleIova>,
}

impl Oracle {
    fn run(&mut self, step: Step) {
        match step {
            Step::Map { pieces, direction } => {
                let failures = self.bench.device.stats().quarantined;
                if let Ok(mapping) = self.bench.device.map(Buf::new(&pieces), direction) {
                    self.allow(&mapping, &pieces, direction);
                    self.mappings.push((self.allowed.len() - 1, mapping));
                } else if self.bench.device.stats().quarantined != failures {
                    // Its undoing failed too: the oracle does not know how far it got.
                    self.allowed.push(Allowed {
                        pieces: vec![(0, 0, u64::MAX)],
                        prot: Prot::RW,
                        state: State::Quarantined,
                    });
                }
            }
            Step::Unmap { which } => self.unmap(which, |mapping| mapping.unmap().map(|_| None)),
            Step::UnmapWatched { which } => {
                self.unmap(which, |mapping| mapping.unmap_watched().map(|(_, stale)| Some(stale)))
            }
            Step::Unwatch { which } => {
                if !self.watched.is_empty() {
                    let which = which % self.watched.len();
                    drop(self.watched.swap_remove(which));
                }
            }
            Step::Flush => drop(self.bench.device.flush()),
            Step::Expire => drop(self.bench.device.expire()),
            Step::MoveToCpu(cpu) => self.bench.cpu.set(cpu),
            Step::Wait(ns) => self.bench.clock.advance(ns),
            Step::FailAfter(good) => self.bench.domain.fail_after(good),
            // Whatever fails of these, the policy in force decides.
            Step::SetPolicy(policy) => _ = self.bench.device.set_policy(policy),
            Step::Tune { slots, pages } => {
                let max_exposure_bytes = pages.map(|pages| pages * 0x1000);
                let tuning = self.bench.device.flush_tuning();
                let tuning = FlushTuning { slots, max_exposure_bytes, ..tuning };
                let _ = self.bench.device.set_flush_tuning(tuning);
            }
        }
    }

    fn allow(&mut self, mapping: &Mapping<Buf>, pieces: &[(u64, u64)], direction: Direction) {
        // Where a byte of the buffer lies follows from the segments alone.
        let mask = self.granule - 1;
        let mut iovas = mapping.segments().iter().map(|s| (s.addr, s.len));
        let (mut iova, mut left) = iovas.next().unwrap();
        let mut granules = Vec::new();
        for &(target, len) in pieces {
            let mut done = 0;
            while done < len {
                if left == 0 {
                    (iova, left) = iovas.next().unwrap();
                }
                let take = left.min(len - done);
                let first = (target + done) & !mask;
                let last = (target + done + take - 1) | mask;
                granules.push((iova & !mask, first, last - first + 1));
                (iova, left, done) = (iova + take, left - take, done + take);
            }
        }
        self.allowed.push(Allowed { pieces: granules, prot: direction.prot(), state: State::Live });
    }

    fn unmap<E>(
        &mut self,
        which: usize,
        how: impl FnOnce(Mapping<Buf>) -> Result<Option<StaleIova>, E>,
    ) {
        if self.mappings.is_empty() {
            return;
        }
        let (allowed, mapping) = self.mappings.swap_remove(which % self.mappings.len());
        let lazy = self.bench.device.effective_policy().is_lazy();
        let strictly = self.bench.device.stats().bound_unmaps;
        // Whatever flush the unmap itself makes, it makes for others.
        self.allowed[allowed].state = match how(mapping) {
            Ok(stale) => {
                self.watched.extend(stale);
                match lazy && self.bench.device.stats().bound_unmaps == strictly {
                    true => State::Stale { after_flush: self.flushes() },
                    false => State::Gone,
                }
            }
            Err(_) => State::Quarantined,
        };
    }

    /// Flushes that did what they should.
    fn flushes(&self) -> u64 {
        let stats = self.bench.device.stats();
        stats.flushes - stats.flush_failures
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let flushes = self.flushes();
        for allowed in &mut self.allowed {
            if matches!(allowed.state, State::Stale { after_flush } if after_flush < flushes) {
                allowed.state = State::Gone;
            }
        }
        for (range, target, prot) in self.bench.domain.cached() {
            for offset in (0..=range.extent()).step_by(self.granule as usize) {
                let (iova, target) = (range.first().0 + offset, target + offset);
                let found = self.allowed.iter().any(|allowed| {
                    let here = |&(first, to, len): &(u64, u64, u64)| {
                        allowed.state == State::Quarantined
                            || (first..first + len).contains(&iova) && to + (iova - first) == target
                    };
                    allowed.state != State::Gone
                        && (allowed.prot == prot || allowed.state == State::Quarantined)
                        && allowed.pieces.iter().any(here)
                });
                prop_assert!(found, "the device reaches {target:#x} at {iova:#x}");
            }
        }
        Ok(())
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::Strict),
        Just(Policy::StrictMap),
        Just(Policy::LazySq),
        Just(Policy::LazyMq),
        Just(Policy::LazySqMap),
        Just(Policy::LazyMqMap),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_device_never_reaches_a_byte_that_it_may_not(
        policy in policy(),
        granule in prop_oneof![Just(0x100u64), Just(0x1000)],
        slots in 2..6usize,
        steps in vec(step(), 1..60),
    ) {
        // rules L17, L18, L19, L22, L27, L33
        let mut setup = Setup { granule, ..Setup::new(policy) };
        setup.config.flush = Some(FlushTuning { slots, ..FlushTuning::of(policy) });
        let mut oracle = Oracle {
            bench: setup.build(),
            granule,
            allowed: Vec::new(),
            mappings: Vec::new(),
            watched: Vec::new(),
        };
        for step in steps {
            oracle.run(step);
            oracle.check()?;
        }
        // What is left goes away without a trace, but for what is quarantined.
        oracle.bench.domain.fail_after(i64::MAX);
        oracle.mappings.clear();
        oracle.watched.clear();
        oracle.bench.device.flush().unwrap();
        let quarantined = oracle.bench.device.stats().quarantined;
        prop_assert_eq!(oracle.bench.allocator.live() as u64, quarantined);
        if quarantined == 0 {
            oracle.bench.assert_nothing_leaked();
        }
    }
}
