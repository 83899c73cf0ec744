//! The judge, which decides from the calibration first, then from trials.
//!
//! Trials of a cell go on until one way is shown to be faster, or neither is: then the one that
//! costs the threads less CPU time is taken. After that trials become rarer as long as they confirm
//! the choice, and more frequent when they do not, or when the cell's pace changes.
//!
//! One cell is tried at a time, so that trials do not disturb each other. A cell's first trials, at
//! most [`FIRST_TRIALS`] in [`EARLY_NS`], follow at once; any other waits for [`PAUSE`] times the
//! duration of the one before: at most 3 % of the time is spent in trials, and half of that with
//! the way in force.

use super::{
    Order,
    cell::{CELLS, Cell},
    choices::{Calibration, ChoiceReason},
    costs::{Kind, Prior},
    evidence::Evidence,
    trial::{Cpu, Mark, Next, Outcome, Seen, Trial},
};

const MS: u64 = 1_000_000;
/// The shortest and the longest time from one trial of a cell to the next.
const SOON_NS: u64 = 100 * MS;
const RARELY_NS: u64 = 4000 * MS;
/// The pause after a trial, in multiples of its duration.
const PAUSE: u64 = 32;
/// A cell's first trials may take this long together without a pause.
const EARLY_NS: u64 = 200 * MS;
/// After this many trials without a result it is a tie.
const FIRST_TRIALS: u32 = 8;
/// If the error of the ratio is below this and neither way is shown to be faster, any difference is
/// negligible.
const KNOWN: f64 = 0.05;
/// By how much a way must be faster, and cheaper, to count as such.
const FASTER: f64 = 0.03;
const CHEAPER: f64 = 0.05;
/// A trial is abandoned if nothing happens in a slice for this long.
const STALE_NS: u64 = 1000 * MS;
/// The least time, and the least number of looks, over which a pace is measured.
const WINDOW_NS: u64 = 50 * MS;
const WINDOW_LOOKS: u32 = 8;
/// For how long a CPU counts as shared after it was last seen to be.
const LINGER_NS: u64 = 100 * MS;
/// The least that a sync takes on a shared CPU, for the wake-up of a thread and the switches to it
/// and back: a shorter copy is the better choice, as it waits for no other thread's time slice. A
/// longer one uses up CPU time that others want.
const WAKE_NS: u64 = 10_000;
/// By what ratio a pace must change, in two windows in a row, to count as changed.
const OTHER_PACE: f64 = 1.5;

/// The state of a cell.
#[derive(Clone, Copy)]
struct Record {
    used: bool,
    prior: Option<Prior>,
    copy: bool,
    reason: ChoiceReason,
    speed: Evidence,
    /// Logarithms of the ratio of a copy's CPU time to a map's.
    cost: Evidence,
    cpu: Option<Cpu>,
    /// Whether its first trials are over.
    settled: bool,
    /// How long its first trials took.
    early_ns: u64,
    interval_ns: u64,
    due_ns: u64,
    pace: Pace,
    /// Whether its mappings are copied because the CPU is shared.
    hurried: bool,
}

/// How fast a cell's mappings come.
#[derive(Clone, Copy, Default)]
struct Pace {
    since_ns: u64,
    looks: u32,
    /// Looks per nanosecond; 0 until it is measured.
    usual: f64,
    /// Whether the last window had a different pace.
    strayed: bool,
}

impl Pace {
    /// Counts a look; returns whether the pace has changed.
    fn look(&mut self, now_ns: u64) -> bool {
        self.looks = self.looks.saturating_add(1);
        let elapsed_ns = now_ns.saturating_sub(self.since_ns);
        if elapsed_ns < WINDOW_NS || self.looks < WINDOW_LOOKS {
            return false;
        }
        let pace = f64::from(self.looks) / elapsed_ns as f64;
        self.restart(now_ns);
        if self.usual == 0.0 {
            self.usual = pace;
            return false;
        }
        let strays = !(self.usual / OTHER_PACE..self.usual * OTHER_PACE).contains(&pace);
        let changed = strays && self.strayed;
        self.strayed = strays && !changed;
        if changed {
            self.usual = pace;
        }
        changed
    }

    fn restart(&mut self, now_ns: u64) {
        (self.since_ns, self.looks) = (now_ns, 0);
    }
}

const NEW: Record = Record {
    used: false,
    prior: None,
    copy: false,
    reason: ChoiceReason::Untried,
    speed: Evidence::NONE,
    cost: Evidence::NONE,
    cpu: None,
    settled: false,
    early_ns: 0,
    interval_ns: SOON_NS,
    due_ns: 0,
    pace: Pace { since_ns: 0, looks: 0, usual: 0.0, strayed: false },
    hurried: false,
};

impl Record {
    /// Whether its trials may follow without a pause. Where trials take long, as with large blocks
    /// deep in a queue, this ends early, and the choice so far stands until the next trial.
    fn is_early(&self) -> bool {
        !self.settled && self.early_ns < EARLY_NS
    }

    /// Adds the outcome of a trial; returns whether that changed the choice.
    fn learn(&mut self, outcome: Outcome) -> bool {
        if self.speed.contradicts(outcome.speed) {
            (self.speed, self.cost) = (Evidence::NONE, Evidence::NONE);
            self.interval_ns = SOON_NS;
        }
        self.speed.add(outcome.speed, outcome.noise);
        if let Some(cpu) = outcome.cpu {
            self.cost.add((cpu.copy_ns / cpu.map_ns).ln(), 0.0);
            self.cpu = Some(cpu);
        }
        let trials = self.speed.trials();
        let faster = self.speed.verdict(FASTER);
        let is_known = trials >= FIRST_TRIALS || trials > 1 && self.speed.margin() < KNOWN;
        // A result that is clear at once takes effect at once, but the next trial is a long time
        // away.
        self.settled |= trials > 1 && faster.is_some() || is_known;
        let before = self.copy;
        if let Some(copy) = faster {
            self.copy = copy;
            self.reason = ChoiceReason::Faster {
                ratio: self.speed.mean().abs().exp(),
                plus_minus: self.speed.margin().exp_m1(),
                trials,
            };
        } else if is_known {
            self.tie(trials);
        }
        self.copy != before
    }

    fn tie(&mut self, trials: u32) {
        match (self.cost.verdict(CHEAPER), self.cpu) {
            (Some(copy_is_dearer), Some(Cpu { copy_ns, map_ns })) => {
                self.copy = !copy_is_dearer;
                let (copy_ns, map_ns) = (copy_ns as u64, map_ns as u64);
                self.reason = ChoiceReason::Cheaper { copy_ns, map_ns, trials };
            }
            _ => {
                // For a thread that spins, CPU time says nothing: the calibrated costs of the
                // driver decide.
                self.copy = self.prior.map_or(self.copy, Prior::copies);
                self.reason = ChoiceReason::Even { trials };
            }
        }
    }
}

/// Decides for all cells of a device.
pub(super) struct Judge {
    calibration: Calibration,
    records: Box<[Record; CELLS]>,
    trial: Option<Trial>,
    /// The number of the last slice.
    pub(super) slice: u32,
    /// No trial begins before this, except a cell's first ones.
    free_ns: u64,
    /// Until when the CPU counts as shared; 0 once it does not.
    shared_until_ns: u64,
    random: u64,
}

impl Judge {
    pub(super) fn new() -> Judge {
        Judge {
            calibration: Calibration::default(),
            records: Box::new([NEW; CELLS]),
            trial: None,
            slice: 0,
            free_ns: 0,
            shared_until_ns: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Forgets everything except the number of the last slice, whose mappings may be in flight.
    pub(super) fn restart(&mut self, calibration: Calibration) {
        *self = Judge { slice: self.slice, calibration, ..Judge::new() };
    }

    pub(super) fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// The first choice for a cell, by a mapping of it.
    pub(super) fn first(&mut self, cell: Cell, kind: Kind) -> bool {
        let record = &mut self.records[cell.index()];
        if !record.used {
            record.used = true;
            record.prior = self.calibration.expect(kind);
            if let Some(prior) = record.prior {
                record.copy = prior.copies();
                record.reason = prior.reason();
            }
        }
        record.copy
    }

    /// The choice for a cell in use, and why.
    pub(super) fn choice(&self, cell: Cell) -> Option<(bool, ChoiceReason)> {
        let record = &self.records[cell.index()];
        let chosen = match record.hurried {
            true => (true, ChoiceReason::Shared),
            false => (record.copy, record.reason),
        };
        record.used.then_some(chosen)
    }

    /// Checks whether a trial of a cell is due; called every [`LOOK_EVERY`](super::LOOK_EVERY)
    /// mappings. `shared`: other threads want the CPU.
    pub(super) fn look(&mut self, cell: Cell, now_ns: u64, shared: bool) -> Option<Order> {
        if shared {
            self.shared_until_ns = now_ns.saturating_add(LINGER_NS);
        }
        if now_ns < self.shared_until_ns {
            return self.hurry(cell);
        }
        if std::mem::take(&mut self.shared_until_ns) != 0 {
            self.restart_paces(now_ns);
        }
        if let Some(trial) = &self.trial {
            let quiet_ns = now_ns.saturating_sub(trial.turned_ns);
            return if quiet_ns < STALE_NS { None } else { self.give_up(now_ns) };
        }
        let free = now_ns >= self.free_ns;
        let record = &mut self.records[cell.index()];
        if std::mem::take(&mut record.hurried) {
            return Some(Order::end(cell, record.copy));
        }
        if !record.used {
            return None;
        }
        if record.pace.look(now_ns) {
            record.speed.fade();
            record.cost.fade();
            record.interval_ns = SOON_NS;
            record.due_ns = record.due_ns.min(now_ns);
        }
        if now_ns < record.due_ns || !record.is_early() && !free {
            return None;
        }
        let copy = record.copy;
        self.trial = Some(Trial::new(cell, copy, now_ns));
        Some(self.slice(cell, copy))
    }

    /// A mapping of the current slice is unmapped.
    pub(super) fn unmapped(&mut self, seen: Seen, mark: impl Fn() -> Mark) -> Option<Order> {
        let trial = self.trial.as_mut()?;
        let cell = trial.cell;
        match trial.unmapped(seen, mark) {
            Next::Wait(until_ns) => {
                Some(Order { cell: None, slice: self.slice, wake_ns: until_ns })
            }
            Next::Slice(copy) => Some(self.slice(cell, copy)),
            Next::Over(outcome) => {
                let took_ns = seen.now_ns.saturating_sub(trial.began_ns);
                self.trial = None;
                let jitter = self.jitter();
                let record = &mut self.records[cell.index()];
                let changed = record.learn(outcome);
                record.early_ns = record.early_ns.saturating_add(took_ns);
                if !record.is_early() {
                    let sooner = changed || record.speed.trials() <= 1;
                    let longer_ns = record.interval_ns.saturating_mul(2).min(RARELY_NS);
                    record.interval_ns = if sooner { SOON_NS } else { longer_ns };
                    record.due_ns = seen.now_ns.saturating_add(record.interval_ns / 4 * jitter);
                    let pause_ns = took_ns.saturating_mul(PAUSE);
                    self.free_ns = seen.now_ns.saturating_add(pause_ns);
                }
                let order = Order::end(cell, record.copy);
                self.restart_paces(seen.now_ns);
                Some(order)
            }
        }
    }

    /// The CPU is shared: no trials, and copies where these are short.
    fn hurry(&mut self, cell: Cell) -> Option<Order> {
        if let Some(trial) = self.trial.take() {
            // Its slices so far were measured under other conditions.
            return Some(Order::end(trial.cell, self.records[trial.cell.index()].copy));
        }
        let record = &mut self.records[cell.index()];
        let copies = record.prior.is_some_and(|prior| prior.copy_ns < WAKE_NS);
        if record.hurried || !record.used || !copies {
            return None;
        }
        record.hurried = true;
        Some(Order::end(cell, true))
    }

    fn give_up(&mut self, now_ns: u64) -> Option<Order> {
        let trial = self.trial.take()?;
        let record = &mut self.records[trial.cell.index()];
        record.interval_ns = record.interval_ns.saturating_mul(2).min(RARELY_NS);
        record.due_ns = now_ns.saturating_add(record.interval_ns);
        let order = Order::end(trial.cell, record.copy);
        let took_ns = now_ns.saturating_sub(trial.began_ns);
        self.free_ns = now_ns.saturating_add(took_ns.saturating_mul(PAUSE));
        self.restart_paces(now_ns);
        Some(order)
    }

    /// Restarts all paces: no cell's looks were counted during a trial.
    fn restart_paces(&mut self, now_ns: u64) {
        self.records.iter_mut().for_each(|record| record.pace.restart(now_ns));
    }

    fn slice(&mut self, cell: Cell, copy: bool) -> Order {
        self.slice = Order::next_slice(self.slice);
        Order { cell: Some((cell, copy)), slice: self.slice, wake_ns: 0 }
    }

    /// 3 to 5, so that trials do not fall into step with a periodic load.
    fn jitter(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        3 + self.random % 3
    }
}
