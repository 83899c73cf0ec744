//! Random programs against a naive oracle: the set of bytes that the device may touch, over time.
//!
//! The oracle keeps a list of every mapping ever made, with its pieces rounded to granules. A live
//! mapping is reachable. One that was unmapped strictly is not; one unmapped lazily may be until a
//! flush that started later has finished. After each step everything that the device has cached
//! (and it caches all it can) must be on the list.
//!
//! A mapping may be a copy in a slot. Then its buffer must not be reachable, and the slots and all
//! buffers must hold what the model of copies says ([`copied`](crate::copied)).

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};
use ringfence_dma::{
    BounceConfig, BounceLimits, Direction, Distrust, DmaConfig, FlushTuning, Mapping, Policy,
    StaleIova, Trust, Written,
};
use ringfence_iommu::Prot;

use crate::{
    copied::{Copied, Shadow, Slots, pick},
    mock::Setup,
    ram::{END, Pooled, RamBuf, SLOTS},
};

/// Where buffers are.
const DATA: core::ops::Range<u64> = 0x10_0000..0x11_4000;

#[derive(Clone, Debug)]
enum Step {
    Map {
        pieces: Vec<(u64, u64)>,
        direction: Direction,
    },
    Unmap {
        which: usize,
    },
    UnmapWatched {
        which: usize,
    },
    Unwatch {
        which: usize,
    },
    Flush,
    Expire,
    MoveToCpu(usize),
    Wait(u64),
    FailAfter(i64),
    SetPolicy(Policy),
    Tune {
        slots: usize,
        pages: Option<u64>,
    },
    /// The device writes somewhere it can.
    Write {
        which: usize,
        at: u64,
        byte: u8,
    },
    /// Some of a copy's bytes are made visible to the CPU, or, after the CPU wrote all, to the
    /// device.
    Sync {
        which: usize,
        part: (u64, u64),
        for_cpu: bool,
    },
    /// A part of a copy is noted as written by the device.
    Note {
        which: usize,
        part: (u64, u64),
    },
    /// A mapping is dropped.
    Drop {
        which: usize,
    },
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    let direction = prop_oneof![
        Just(Direction::ToDevice),
        Just(Direction::FromDevice),
        Just(Direction::Bidirectional)
    ];
    let pieces = vec(
        prop_oneof![
            2 => (DATA.start..DATA.end - 0x4000, 1..0x3000u64),
            1 => (0..16u64, 1..3u64).prop_map(|(at, len)| (DATA.start + at * 0x1000, len * 0x1000)),
        ],
        1..4,
    );
    let which = any::<usize>;
    let part =
        || (prop_oneof![Just(0u64), 0..0x6000u64], prop_oneof![Just(u64::MAX), 0..0x2000u64]);
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
        5 => (which(), any::<u64>(), any::<u8>())
            .prop_map(|(which, at, byte)| Step::Write { which, at, byte }),
        2 => (which(), part(), any::<bool>())
            .prop_map(|(which, part, for_cpu)| Step::Sync { which, part, for_cpu }),
        2 => (which(), part()).prop_map(|(which, part)| Step::Note { which, part }),
        1 => which().prop_map(|which| Step::Drop { which }),
        1 => Just(Step::Trim),
    ]
}

/// What the device may access: granules of an IOVA range, and their targets.
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
    /// Unmapped when `after_flush` flushes had begun.
    Stale {
        after_flush: u64,
    },
    /// Its unmap failed.
    Quarantined,
    Gone,
}

struct Oracle {
    pooled: Pooled,
    granule: u64,
    trusted: bool,
    /// Whether calls of the domain sometimes fail.
    fails: bool,
    written: Written,
    allowed: Vec<Allowed>,
    mappings: Vec<(usize, Mapping<RamBuf>)>,
    /// The entries of `allowed` that are copies.
    copies: BTreeMap<usize, Copied>,
    watched: Vec<StaleIova>,
    data: Shadow,
    slots: Slots,
}

impl Oracle {
    fn new(setup: Setup, room: u64, fails: bool) -> Oracle {
        let (granule, config) = (setup.granule, setup.config.clone());
        let pooled = Pooled::with(setup, BounceLimits::default(), room);
        let mut seed = 1u64;
        let bytes: Vec<u8> = DATA
            .map(|_| {
                seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (seed >> 33) as u8
            })
            .collect();
        pooled.ram.write(DATA.start, &bytes);
        Oracle {
            pooled,
            granule,
            trusted: config.trust == Trust::Trusted,
            fails,
            written: config.bounce.written,
            allowed: Vec::new(),
            mappings: Vec::new(),
            copies: BTreeMap::new(),
            watched: Vec::new(),
            data: Shadow { base: DATA.start, bytes },
            slots: Slots::new(SLOTS, (END - SLOTS) as usize),
        }
    }

    fn run(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Map { pieces, direction } => self.map(&pieces, direction)?,
            Step::Write { which, at, byte } => self.write(which, at, byte),
            Step::Sync { which, part, for_cpu } => self.sync(which, part, for_cpu),
            Step::Note { which, part } => self.note(which, part),
            Step::Drop { which } => {
                if let Some(which) = which.checked_rem(self.mappings.len())
                    && self.copies.contains_key(&self.mappings[which].0)
                {
                    let (allowed, mapping) = self.mappings.swap_remove(which);
                    drop(mapping);
                    self.ended(allowed, true);
                }
            }
            Step::Trim => self.pooled.pools.trim(),
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
            Step::Flush => drop(self.pooled.bench.device.flush()),
            Step::Expire => drop(self.pooled.bench.device.expire()),
            Step::MoveToCpu(cpu) => self.pooled.bench.cpu.set(cpu),
            Step::Wait(ns) => self.pooled.bench.clock.advance(ns),
            Step::FailAfter(good) if self.fails => self.pooled.bench.domain.fail_after(good),
            Step::FailAfter(_) => {}
            // If these fail, the policy in force still decides.
            Step::SetPolicy(policy) => _ = self.pooled.bench.device.set_policy(policy),
            Step::Tune { slots, pages } => {
                let max_exposure_bytes = pages.map(|pages| pages * 0x1000);
                let tuning = self.pooled.bench.device.flush_tuning();
                let tuning = FlushTuning { slots, max_exposure_bytes, ..tuning };
                let _ = self.pooled.bench.device.set_flush_tuning(tuning);
            }
        }
        Ok(())
    }

    fn map(&mut self, pieces: &[(u64, u64)], direction: Direction) -> Result<(), String> {
        let failures = self.pooled.bench.device.stats().quarantined;
        let mut copied = Copied::new(pieces, direction, self.written, &self.data);
        let mapped = self.pooled.bench.device.map(self.pooled.ram.buffer(pieces), direction);
        self.refresh();
        match mapped {
            Ok(mapping) if mapping.is_bounced() => {
                let there = self.pooled.bench.domain.cached();
                let slot = there.iter().find(|(range, ..)| range.first() == mapping.iova());
                let (range, target, _) = slot.ok_or("a copy lies in no slot")?;
                if !self.slots.holds(*target) {
                    return Err(format!("a copy lies at {target:#x}"));
                }
                let at = (*target, range.len() as u64);
                let bytes = self.pooled.ram.read(at.0, at.1);
                copied.load(at, &mut self.slots, |addr| bytes[(addr - at.0) as usize])?;
                let (pieces, prot, state) = (Vec::new(), direction.prot(), State::Live);
                self.allowed.push(Allowed { pieces, prot, state });
                self.copies.insert(self.allowed.len() - 1, copied);
                self.mappings.push((self.allowed.len() - 1, mapping));
            }
            Ok(mapping) => {
                let fills = |(addr, len): &(u64, u64)| (addr | len) & (self.granule - 1) == 0;
                // rules L48, L50
                if !self.trusted && !pieces.iter().all(fills) {
                    return Err(format!("the neighbours of {pieces:x?} are mapped"));
                }
                self.allow(&mapping, pieces, direction);
                self.mappings.push((self.allowed.len() - 1, mapping));
            }
            Err(_) if self.pooled.bench.device.stats().quarantined != failures => {
                // Undoing failed too: the oracle does not know how far it got.
                self.allowed.push(Allowed {
                    pieces: vec![(0, 0, u64::MAX)],
                    prot: Prot::RW,
                    state: State::Quarantined,
                });
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Clears the record of memory that a pool newly took.
    fn refresh(&mut self) {
        self.pooled.memory.fresh().into_iter().for_each(|fresh| self.slots.fresh(fresh));
    }

    fn write(&mut self, which: usize, at: u64, byte: u8) {
        // A calibration takes memory outside of maps.
        self.refresh();
        let mut there = self.pooled.bench.domain.cached();
        there.retain(|(.., prot)| prot.contains(Prot::WRITE));
        let Some(which) = which.checked_rem(there.len()) else { return };
        let (range, target, _) = there[which];
        let target = target + at % (range.len() as u64);
        self.pooled.ram.write(target, &[byte]);
        if self.slots.holds(target) {
            self.slots.written(target, byte);
        } else if self.data.holds(target) {
            *self.data.at(target) = byte;
        }
    }

    /// The copy, and its bytes, that a step applies to.
    fn copy(&self, which: usize, part: (u64, u64)) -> Option<(usize, core::ops::Range<u64>)> {
        pick(&self.copies, self.mappings.iter().map(|(number, _)| *number), which, part)
    }

    fn sync(&mut self, which: usize, part: (u64, u64), for_cpu: bool) {
        let Some((at, bytes)) = self.copy(which, part) else { return };
        let (allowed, mapping) = &mut self.mappings[at];
        let copied = self.copies.get_mut(allowed).expect("a copy");
        let ram = &self.pooled.ram;
        if for_cpu {
            mapping.sync_for_cpu(bytes.clone()).unwrap();
            let found = |addr| ram.read(addr, 1)[0];
            copied.sync_for_cpu(bytes, &mut self.data, &self.slots, &found);
            return;
        }
        // The CPU writes all of it, and syncs a part.
        for (n, &addr) in (0u8..=250).cycle().zip(copied.bytes()) {
            let byte = n ^ part.0 as u8;
            ram.write(addr, &[byte]);
            *self.data.at(addr) = byte;
        }
        mapping.sync_for_device(bytes.clone()).unwrap();
        let found = |addr| ram.read(addr, 1)[0];
        copied.sync_for_device(bytes, &self.data, &mut self.slots, found);
    }

    fn note(&mut self, which: usize, part: (u64, u64)) {
        let Some((at, bytes)) = self.copy(which, part) else { return };
        let (allowed, mapping) = &mut self.mappings[at];
        mapping.note_written(bytes.clone()).unwrap();
        let copied = self.copies.get_mut(allowed).expect("a copy");
        let ram = &self.pooled.ram;
        let found = |addr| ram.read(addr, 1)[0];
        copied.note_written(bytes, &mut self.data, &mut self.slots, &found);
    }

    /// Ends a copy; returns false if it is not one.
    fn ended(&mut self, allowed: usize, dropped: bool) -> bool {
        let Some(mut copied) = self.copies.remove(&allowed) else { return false };
        let ram = &self.pooled.ram;
        let found = |addr| ram.read(addr, 1)[0];
        copied.end(dropped, &mut self.data, &mut self.slots, &found);
        self.allowed[allowed].state = State::Gone;
        true
    }

    fn allow(&mut self, mapping: &Mapping<RamBuf>, pieces: &[(u64, u64)], direction: Direction) {
        // The address of a buffer's byte follows from the segments alone.
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
        how: impl FnOnce(Mapping<RamBuf>) -> Result<Option<StaleIova>, E>,
    ) {
        if self.mappings.is_empty() {
            return;
        }
        let (allowed, mapping) = self.mappings.swap_remove(which % self.mappings.len());
        let lazy = self.pooled.bench.device.effective_policy().is_lazy();
        let strictly = self.pooled.bench.device.stats().bound_unmaps;
        // A flush by the unmap itself is for earlier entries.
        let unmapped = how(mapping);
        if self.ended(allowed, false) {
            let unmapped = unmapped.ok().expect("a copy cannot fail to be unmapped");
            return self.watched.extend(unmapped);
        }
        self.allowed[allowed].state = match unmapped {
            Ok(stale) => {
                self.watched.extend(stale);
                match lazy && self.pooled.bench.device.stats().bound_unmaps == strictly {
                    true => State::Stale { after_flush: self.flushes() },
                    false => State::Gone,
                }
            }
            Err(_) => State::Quarantined,
        };
    }

    /// Flushes that succeeded.
    fn flushes(&self) -> u64 {
        let stats = self.pooled.bench.device.stats();
        stats.flushes - stats.flush_failures
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let flushes = self.flushes();
        for allowed in &mut self.allowed {
            if matches!(allowed.state, State::Stale { after_flush } if after_flush < flushes) {
                allowed.state = State::Gone;
            }
        }
        for (range, target, prot) in self.pooled.bench.domain.cached() {
            if self.slots.holds(target) {
                let out = self.pooled.memory.out();
                let whole = out.get(&target).is_some_and(|len| u128::from(*len) >= range.len());
                prop_assert!(whole, "the device reaches {target:#x}, which is not a slot in use");
                continue;
            }
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
        let len = DATA.end - DATA.start;
        let there = self.pooled.ram.read(DATA.start, len);
        if there != self.data.bytes {
            let at = there.iter().zip(&self.data.bytes).position(|(a, b)| a != b).unwrap_or(0);
            let addr = DATA.start + at as u64;
            prop_assert!(false, "the byte at {addr:#x} was changed");
        }
        self.check_slots()
    }

    /// Checks that slots hold only what their owner, their last owner or the device put there.
    fn check_slots(&self) -> Result<(), TestCaseError> {
        for (slot, len) in self.pooled.memory.out() {
            let there = self.pooled.ram.read(slot, len);
            if there == self.slots.now.slice(slot, len) {
                continue;
            }
            let here = self.copies.values().find(|copied| copied.place().start == slot);
            for (addr, byte) in (slot..).zip(there) {
                let known =
                    here.is_some_and(|copied| copied.place().contains(&addr) && copied.knows(addr));
                let right = match known {
                    true => self.slots.now.holds_at(addr, byte),
                    false => self.slots.may_hold(addr, byte),
                };
                prop_assert!(right, "a slot holds {byte:#x} at {addr:#x}, of another mapping");
            }
        }
        Ok(())
    }

    /// Releases what is left, and checks that only what is quarantined remains.
    fn finish(mut self) -> Result<(), TestCaseError> {
        self.pooled.bench.domain.fail_after(i64::MAX);
        self.mappings.clear();
        self.watched.clear();
        self.pooled.bench.device.flush().unwrap();
        let stats = self.pooled.bench.device.stats();
        prop_assert_eq!(self.pooled.pools.stats().slots, 0, "a slot is lost");
        // If slots were ever requested, even by a calibration, the pools keep addresses.
        let never_bounced = self.pooled.pools.classes().is_empty() && self.trusted;
        if never_bounced {
            prop_assert_eq!(self.pooled.bench.allocator.live() as u64, stats.quarantined);
        }
        if stats.quarantined == 0 && (never_bounced || !self.fails) {
            self.pooled.assert_no_slot_is_lost();
        }
        Ok(())
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        1 => Just(Policy::Strict),
        1 => Just(Policy::StrictMap),
        1 => Just(Policy::LazySq),
        1 => Just(Policy::LazyMq),
        1 => Just(Policy::LazySqMap),
        1 => Just(Policy::LazyMqMap),
        3 => Just(Policy::Bounce),
        3 => Just(Policy::Auto),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_device_never_reaches_a_byte_that_it_may_not(
        policy in policy(),
        granule in prop_oneof![Just(0x100u64), Just(0x1000)],
        slots in 2..6usize,
        untrusted in prop::bool::weighted(0.2),
        threshold in prop_oneof![Just(1u64 << 20), 0..0x4000u64],
        reported in any::<bool>(),
        room in prop_oneof![2 => Just(END - SLOTS), 1 => 0..0x8000u64],
        fails in any::<bool>(),
        steps in vec(step(), 1..60),
    ) {
        // rules L17, L18, L19, L22, L27, L33, L48, L49, L50
        let written = if reported { Written::Reported } else { Written::Unknown };
        let mut setup = Setup { granule, ..Setup::new(policy) };
        setup.config = DmaConfig {
            flush: Some(FlushTuning { slots, ..FlushTuning::of(policy) }),
            bounce: BounceConfig { threshold, written, ..BounceConfig::default() },
            trust: match untrusted {
                true => Trust::Untrusted { why: Distrust::Described },
                false => Trust::Trusted,
            },
            ..setup.config
        };
        let mut oracle = Oracle::new(setup, room, fails);
        for step in steps {
            oracle.run(step).map_err(TestCaseError::fail)?;
            oracle.check()?;
        }
        oracle.finish()?;
    }
}
