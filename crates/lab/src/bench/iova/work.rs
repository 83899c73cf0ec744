//! The patterns, operation by operation, the same whether they are timed or checked.

use super::{
    fill::{Slot, random},
    oracle::{Oracle, Violation},
    pattern::{BATCH, Pattern},
    peers::Subject,
};
use crate::{bench::clock::Clock, random::SplitMix, stats::Latencies};

/// Allocates and frees for a pattern. What is between `begin` and `end` is one operation, or the rest of one
/// whose first part took `before`: the `lap` since its own `begin`.
pub(super) trait Operate {
    fn alloc(&mut self, granules: u64) -> Option<u64>;
    fn free(&mut self, first: u64, granules: u64);
    #[inline]
    fn begin(&mut self) {}
    #[inline]
    fn lap(&self) -> u64 {
        0
    }
    #[inline]
    fn end(&mut self, _before: u64) {}
}

/// One thread's part of a pattern.
pub(super) struct Worker<'a> {
    /// Its part of the live set.
    slots: &'a mut [Slot],
    sizes: &'a [u64],
    next_size: usize,
    rng: SplitMix,
    batch: [Slot; BATCH],
}

impl<'a> Worker<'a> {
    /// `part` seeds the choices.
    pub(super) fn new(slots: &'a mut [Slot], sizes: &'a [u64], part: u64) -> Worker<'a> {
        let mut rng = random(part);
        let next_size = rng.below(sizes.len() as u64) as usize;
        Worker { slots, sizes, next_size, rng, batch: [Slot::default(); BATCH] }
    }

    /// Runs one operation, or a whole batch; returns how many operations that were.
    #[inline]
    pub(super) fn step(&mut self, pattern: Pattern, with: &mut impl Operate) -> u64 {
        match pattern {
            Pattern::Hot | Pattern::Aligned16 => self.hot(with),
            Pattern::Batch => self.batch(with),
            Pattern::Random => self.random(with),
        }
    }

    #[inline]
    fn size(&mut self) -> u64 {
        self.next_size += 1;
        if self.next_size >= self.sizes.len() {
            self.next_size = 0;
        }
        self.sizes[self.next_size]
    }

    #[inline]
    fn hot(&mut self, with: &mut impl Operate) -> u64 {
        let granules = self.size();
        with.begin();
        if let Some(first) = with.alloc(granules) {
            with.free(first, granules);
        }
        with.end(0);
        1
    }

    #[inline]
    fn batch(&mut self, with: &mut impl Operate) -> u64 {
        let mut laps = [0; BATCH];
        for (index, lap) in laps.iter_mut().enumerate() {
            let granules = self.size();
            with.begin();
            let first = with.alloc(granules);
            *lap = with.lap();
            self.batch[index] = first.map_or(Slot::default(), |first| Slot { first, granules });
        }
        for (slot, lap) in self.batch.iter().zip(laps) {
            with.begin();
            if slot.granules > 0 {
                with.free(slot.first, slot.granules);
            }
            with.end(lap);
        }
        BATCH as u64
    }

    #[inline]
    fn random(&mut self, with: &mut impl Operate) -> u64 {
        let index = self.rng.below(self.slots.len() as u64) as usize;
        let granules = self.size();
        let Some(slot) = self.slots.get_mut(index) else { return 1 };
        let old = *slot;
        with.begin();
        if old.granules > 0 {
            with.free(old.first, old.granules);
        }
        let first = with.alloc(granules);
        with.end(0);
        *slot = first.map_or(Slot::default(), |first| Slot { first, granules });
        1
    }
}

/// Nothing but the operations, and a count of what failed.
pub(super) struct Plain<'a, S: ?Sized> {
    pub(super) subject: &'a S,
    /// Requests that failed.
    pub(super) failures: u64,
    /// A free that was refused.
    pub(super) refused: Option<Violation>,
}

impl<S: Subject + ?Sized> Operate for Plain<'_, S> {
    #[inline]
    fn alloc(&mut self, granules: u64) -> Option<u64> {
        let found = self.subject.take(granules);
        if found.is_none() {
            self.failures += 1;
        }
        found
    }

    #[inline]
    fn free(&mut self, first: u64, granules: u64) {
        if !self.subject.give(first, granules) {
            self.refused = Some(Violation::Refused { first, granules });
        }
    }
}

/// The operations, each timed by itself.
pub(super) struct Timed<'a, S: ?Sized> {
    plain: Plain<'a, S>,
    clock: Clock,
    begun: u64,
    /// What each took.
    pub(super) latencies: &'a mut Latencies,
}

impl<'a, S: ?Sized> Timed<'a, S> {
    pub(super) fn new(subject: &'a S, clock: Clock, latencies: &'a mut Latencies) -> Self {
        let plain = Plain { subject, failures: 0, refused: None };
        Timed { plain, clock, begun: 0, latencies }
    }
}

impl<S: Subject + ?Sized> Operate for Timed<'_, S> {
    #[inline]
    fn alloc(&mut self, granules: u64) -> Option<u64> {
        self.plain.alloc(granules)
    }

    #[inline]
    fn free(&mut self, first: u64, granules: u64) {
        self.plain.free(first, granules);
    }

    #[inline]
    fn begin(&mut self) {
        self.begun = self.clock.now();
    }

    #[inline]
    fn lap(&self) -> u64 {
        self.clock.now().wrapping_sub(self.begun)
    }

    #[inline]
    fn end(&mut self, before: u64) {
        let ticks = before + self.lap();
        self.latencies.record(self.clock.ns(ticks).round() as u64);
    }
}

/// What a check saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    pub(super) operations: u64,
    /// Requests that failed.
    pub(super) failures: u64,
    /// Failures although there was a hole.
    pub(super) with_hole: u64,
}

/// An allocator checked by the oracle.
pub(super) struct Watched<'a, S: ?Sized> {
    pub(super) subject: &'a S,
    pub(super) oracle: &'a mut Oracle,
    /// The counts so far.
    pub(super) checked: &'a mut Checked,
    /// The first thing that was wrong.
    pub(super) violation: Option<Violation>,
}

impl<S: Subject + ?Sized> Operate for Watched<'_, S> {
    fn alloc(&mut self, granules: u64) -> Option<u64> {
        let found = self.subject.take(granules);
        match found.map(|first| self.oracle.take(first, granules)) {
            Some(Ok(())) => {}
            Some(Err(violation)) => {
                self.violation.get_or_insert(violation);
            }
            None => {
                self.checked.failures += 1;
                self.checked.with_hole += u64::from(self.oracle.has_hole(granules));
            }
        }
        found
    }

    fn free(&mut self, first: u64, granules: u64) {
        if self.subject.give(first, granules) {
            self.oracle.give(first, granules);
        } else {
            self.violation.get_or_insert(Violation::Refused { first, granules });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out one range after the other, and records the calls.
    #[derive(Default)]
    struct Script {
        next: u64,
        calls: Vec<String>,
    }

    impl Operate for Script {
        fn alloc(&mut self, granules: u64) -> Option<u64> {
            self.next += 1;
            self.calls.push(format!("alloc {granules}"));
            // Every fifth fails.
            (!self.next.is_multiple_of(5)).then_some(self.next)
        }

        fn free(&mut self, first: u64, _granules: u64) {
            self.calls.push(format!("free {first}"));
        }
    }

    #[test]
    fn hot_frees_what_it_has_just_got() {
        let mut script = Script::default();
        let mut worker = Worker::new(&mut [], &[3], 0);
        for _ in 0..5 {
            assert_eq!(worker.step(Pattern::Hot, &mut script), 1);
        }
        assert_eq!(script.calls[..4], ["alloc 3", "free 1", "alloc 3", "free 2"]);
        assert_eq!(script.calls[8..], ["alloc 3"], "nothing to free after a failure");
    }

    #[test]
    fn a_batch_is_freed_in_the_order_it_came() {
        let mut script = Script::default();
        let mut worker = Worker::new(&mut [], &[1], 0);
        assert_eq!(worker.step(Pattern::Batch, &mut script), BATCH as u64);
        assert!(script.calls[..BATCH].iter().all(|calls| calls == "alloc 1"));
        assert_eq!(
            script.calls[BATCH..BATCH + 5],
            ["free 1", "free 2", "free 3", "free 4", "free 6"]
        );
        assert_eq!(script.calls.len(), BATCH * 2 - BATCH / 5);
    }

    #[test]
    fn random_keeps_as_many_as_there_were_and_fills_empty_slots_again() {
        let mut slots: Vec<Slot> = (0..10).map(|n| Slot { first: 1000 + n, granules: 1 }).collect();
        let mut script = Script::default();
        let mut worker = Worker::new(&mut slots, &[2], 7);
        for _ in 0..1000 {
            worker.step(Pattern::Random, &mut script);
        }
        let allocs = script.calls.iter().filter(|calls| calls.starts_with("alloc")).count();
        assert_eq!(allocs, 1000);
        // All that was ever handed out was freed once, except what is still live.
        let live = slots.iter().filter(|slot| slot.granules > 0).count();
        let frees = script.calls.iter().filter(|calls| calls.starts_with("free")).count();
        assert_eq!(10 + 1000 - 200, frees + live);
        assert!(slots.iter().all(|slot| slot.first < 1000), "every slot was chosen");
    }

    #[test]
    fn the_same_part_makes_the_same_choices() {
        let run = |part| {
            let mut slots = vec![Slot { first: 1, granules: 1 }; 100];
            let mut script = Script::default();
            let sizes: Vec<u64> = (1..50).collect();
            let mut worker = Worker::new(&mut slots, &sizes, part);
            for _ in 0..50 {
                worker.step(Pattern::Random, &mut script);
            }
            script.calls
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
