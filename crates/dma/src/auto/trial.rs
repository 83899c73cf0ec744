//! One trial: slices of time in which a cell's mappings are made in one way and in the other.
//!
//! Slices alternate A B B A, so that drift favours neither. A slice lasts until enough of *its own*
//! mappings were unmapped: first the mappings from before come back; then, for as long again as its
//! own first mapping took, the pipeline fills with work of its kind; then it counts. So the trial
//! compares the two ways end to end, with the device's part, whatever the queue depth.
//!
//! No trial ends early, however slow a slice was: another thread may have had the CPU meanwhile,
//! and stopping whenever the way on trial looks bad would reject it too often.

use super::cell::Cell;

const MS: u64 = 1_000_000;
/// The shortest time that a slice counts, if its pipeline is not longer from end to end.
const LEAST_NS: u64 = 2 * MS;
/// The least number of mappings that it counts; fewer if that takes too long.
const ENOUGH: u64 = 16;
const FEW: u64 = 8;
const LONG_NS: u64 = 32 * MS;
/// The longest that it waits, after its first unmap, before it counts.
const WARM_NS: u64 = 2 * MS;
/// What a thread has done up to some moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mark {
    /// The thread, and the clone of the device.
    pub(crate) source: (usize, usize),
    /// Its CPU time.
    pub(crate) cpu_ns: u64,
    /// Bytes that it has mapped.
    pub(crate) bytes: u64,
}

/// What of the trial's cell was unmapped before some moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) now_ns: u64,
    pub(crate) mappings: u64,
    pub(crate) bytes: u64,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Next {
    /// Nothing before this time.
    Wait(u64),
    /// Another slice, and whether its mappings are copies.
    Slice(bool),
    Over(Outcome),
}

/// What a trial has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The logarithm of the ratio of bytes per second by copies to bytes per second by maps.
    pub(crate) speed: f64,
    /// The variance of that, estimated from the slices.
    pub(crate) noise: f64,
    /// What a mapping cost the threads, if that could be measured.
    pub(crate) cpu: Option<Cpu>,
}

/// A thread's CPU time per mapping, including all that it does for and with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cpu {
    pub(crate) copy_ns: f64,
    pub(crate) map_ns: f64,
}

#[derive(Clone, Copy)]
enum Phase {
    /// The mappings that come back were made before the slice.
    Filling,
    /// Its first mapping came back, `through_ns` after the slice began; the pipeline has not
    /// settled yet.
    Warming {
        through_ns: u64,
    },
    Counting {
        from: Seen,
        mark: Mark,
    },
}

#[derive(Clone, Copy, Default)]
struct Slice {
    /// The logarithm of bytes per nanosecond.
    speed: f64,
    cpu_ns: Option<f64>,
}

/// A trial under way.
pub(crate) struct Trial {
    pub(crate) cell: Cell,
    /// The way in force: that of the first and the last slice.
    pub(crate) in_force: bool,
    pub(crate) began_ns: u64,
    /// When the current slice began.
    pub(crate) turned_ns: u64,
    phase: Phase,
    over: usize,
    slices: [Slice; 4],
}

impl Trial {
    pub(crate) fn new(cell: Cell, in_force: bool, now_ns: u64) -> Trial {
        Trial {
            cell,
            in_force,
            began_ns: now_ns,
            turned_ns: now_ns,
            phase: Phase::Filling,
            over: 0,
            slices: [Slice::default(); 4],
        }
    }

    /// A mapping of the current slice is unmapped; `seen` is what was unmapped before it.
    pub(crate) fn unmapped(&mut self, seen: Seen, mark: impl Fn() -> Mark) -> Next {
        let now_ns = seen.now_ns;
        match self.phase {
            Phase::Filling => {
                let through_ns = now_ns.saturating_sub(self.turned_ns);
                self.phase = Phase::Warming { through_ns };
                Next::Wait(now_ns.saturating_add(through_ns.min(WARM_NS)))
            }
            Phase::Warming { through_ns } => {
                self.phase = Phase::Counting { from: seen, mark: mark() };
                Next::Wait(now_ns.saturating_add(through_ns.clamp(LEAST_NS, LONG_NS)))
            }
            Phase::Counting { from, mark: first } => {
                let elapsed_ns = now_ns.saturating_sub(from.now_ns).max(1);
                let mappings = seen.mappings.saturating_sub(from.mappings);
                let enough = if elapsed_ns < LONG_NS { ENOUGH } else { FEW };
                if mappings < enough {
                    // The end is a time chosen beforehand, not the unmap that completes the count:
                    // unmaps come in bursts, and a count that ends with one is too high.
                    return Next::Wait(now_ns.saturating_add(elapsed_ns));
                }
                let bytes = seen.bytes.saturating_sub(from.bytes).max(1) as f64;
                let speed = bytes.ln() - (elapsed_ns as f64).ln();
                let per_mapping = bytes / mappings as f64;
                let cpu_ns = cpu_per_byte(first, mark()).map(|ns| ns * per_mapping);
                self.slices[self.over] = Slice { speed, cpu_ns };
                self.turn(now_ns)
            }
        }
    }

    fn turn(&mut self, now_ns: u64) -> Next {
        self.over += 1;
        self.turned_ns = now_ns;
        self.phase = Phase::Filling;
        match self.over {
            1 | 2 => Next::Slice(!self.in_force),
            3 => Next::Slice(self.in_force),
            _ => {
                let [a, b, other_b, other_a] = self.slices;
                let square = |one: Slice, other: Slice| (one.speed - other.speed).powi(2);
                // For each mean of two, a quarter of their squared difference.
                let noise = (square(a, other_a) + square(b, other_b)) / 4.0;
                Next::Over(self.outcome(&[a, other_a], &[b, other_b], noise))
            }
        }
    }

    fn outcome(&self, a: &[Slice], b: &[Slice], noise: f64) -> Outcome {
        let (copies, maps) = if self.in_force { (a, b) } else { (b, a) };
        let speed = |slices: &[Slice]| mean(slices.iter().map(|slice| slice.speed));
        let cpu = |slices: &[Slice]| mean(slices.iter().filter_map(|slice| slice.cpu_ns));
        let speed = speed(copies).zip(speed(maps)).map_or(0.0, |(copies, maps)| copies - maps);
        let cpu = cpu(copies).zip(cpu(maps)).map(|(copy_ns, map_ns)| Cpu { copy_ns, map_ns });
        Outcome { speed, noise, cpu }
    }
}

fn cpu_per_byte(first: Mark, last: Mark) -> Option<f64> {
    // The CPU times of two threads cannot be compared.
    let bytes = last.bytes.checked_sub(first.bytes).filter(|&bytes| bytes > 0)?;
    let cpu_ns = last.cpu_ns.checked_sub(first.cpu_ns).filter(|&ns| ns > 0)?;
    (first.source == last.source).then(|| cpu_ns as f64 / bytes as f64)
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Direction;

    const LEN: u64 = 4096;

    fn cell() -> Cell {
        Cell::of(Direction::ToDevice, LEN, 1)
    }

    /// Runs a trial with the given times per mapping, in which mappings come back in bursts of
    /// `burst`.
    fn run(in_force: bool, burst: u64, copy_ns: u64, map_ns: u64) -> (Outcome, u32) {
        let mut trial = Trial::new(cell(), in_force, 0);
        let (mut now_ns, mut mappings, mut cpu_ns) = (0, 0, 0);
        let (mut wake_ns, mut copies, mut slices) = (0, in_force, 1);
        loop {
            let each_ns = if copies { copy_ns } else { map_ns };
            now_ns += each_ns * burst;
            for _ in 0..burst {
                // A copy costs the thread 300 ns, a map 200.
                cpu_ns += if copies { 300 } else { 200 };
                let seen = Seen { now_ns, mappings, bytes: mappings * LEN };
                mappings += 1;
                if now_ns < wake_ns {
                    continue;
                }
                let mark = || Mark { source: (1, 1), cpu_ns, bytes: mappings * LEN };
                match trial.unmapped(seen, mark) {
                    Next::Wait(until_ns) => wake_ns = until_ns,
                    Next::Slice(copy) => {
                        (copies, wake_ns, slices) = (copy, 0, slices + 1);
                        // The rest of the burst was made in the slice before.
                        break;
                    }
                    Next::Over(outcome) => return (outcome, slices),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn it_finds_the_ratio_whatever_the_bursts(
            in_force in any::<bool>(),
            burst in 1..64u64,
            copy_ns in 1000..50_000u64,
            percent in 60..160u64,
        ) {
            let map_ns = copy_ns * percent / 100;
            let (outcome, slices) = run(in_force, burst, copy_ns, map_ns);
            let expected = (map_ns as f64 / copy_ns as f64).ln();
            // A slice may have a burst more or less.
            prop_assert!((outcome.speed - expected).abs() < 0.02, "{} {expected}", outcome.speed);
            prop_assert_eq!(slices, 4);
            let cpu = outcome.cpu.unwrap();
            prop_assert!((cpu.copy_ns - 300.0).abs() < 10.0 && (cpu.map_ns - 200.0).abs() < 10.0);
        }

        #[test]
        fn absurd_clocks_and_counts_neither_wrap_nor_panic(
            seen in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..200),
            began_ns in any::<u64>(),
        ) {
            let mut trial = Trial::new(cell(), true, began_ns);
            for (now_ns, mappings, bytes) in seen {
                let mark = || Mark { source: (1, 1), cpu_ns: bytes, bytes: mappings };
                let next = trial.unmapped(Seen { now_ns, mappings, bytes }, mark);
                if let Next::Over(outcome) = next {
                    prop_assert!(outcome.speed.is_finite());
                    break;
                }
            }
        }
    }

    #[test]
    fn threads_are_not_mixed_up() {
        let mark = |thread, cpu_ns| Mark { source: (thread, 1), cpu_ns, bytes: cpu_ns };
        assert_eq!(cpu_per_byte(mark(1, 5), mark(1, 10)), Some(1.0));
        assert_eq!(cpu_per_byte(mark(1, 5), mark(2, 10)), None);
        assert_eq!(cpu_per_byte(mark(1, 5), mark(1, 5)), None);
    }
}
