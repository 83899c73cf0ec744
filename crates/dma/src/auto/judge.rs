//! Who decides: from the calibration first, then from trials.
//!
//! A cell is tried until it is known which way is faster, or that neither is: then that which costs
//! the threads less CPU time is taken. After that trials become rarer as long as they confirm what is
//! known, and soon come again when they do not, or when the cell's pace changes.
//!
//! One cell is tried at a time, so that no trial is disturbed by another. But for a cell's first
//! trials, of which there are at most [`FIRST_TRIALS`] in [`EARLY_NS`], there is none before [`PAUSE`] times as much
//! time has passed as the one before took: at most 3 % of the time is spent in trials, and half of
//! that with the way in force.

use super::{
    Order,
    cell::{CELLS, Cell},
    choices::{Calibration, ChoiceReason},
    costs::{Kind, Prior},
    evidence::Evidence,
    trial::{Cpu, Mark, Next, Outcome, Seen, Trial},
};

const MS: u64 = 1_000_000;
/// The time from one trial of a cell to the next, at the least and at the most.
const SOON_NS: u64 = 100 * MS;
const RARELY_NS: u64 = 4000 * MS;
/// How many times its own duration a trial keeps others away.
const PAUSE: u64 = 32;
/// A cell's first trials may take so long together without any pause.
const EARLY_NS: u64 = 200 * MS;
/// So many trials without a result are a result: it is a tie.
const FIRST_TRIALS: u32 = 8;
/// Who is known as well as this is faster by nothing that matters, if he is not known to be faster.
const KNOWN: f64 = 0.05;
/// By how much a way must be faster, and cheaper, to be taken for that.
const FASTER: f64 = 0.03;
const CHEAPER: f64 = 0.05;
/// A slice during which nothing happens for so long is given up.
const STALE_NS: u64 = 1000 * MS;
/// For how long, and over how many looks, a pace is taken.
const WINDOW_NS: u64 = 50 * MS;
const WINDOW_LOOKS: u32 = 8;
/// For how long a CPU that was shared is expected to be shared again, after it last was.
const LINGER_NS: u64 = 100 * MS;
/// What a sync takes on a shared CPU at the least, the wake-up of a thread and the switches to it and back: a copy that
/// takes less waits for no other thread's turn. What takes longer uses up CPU time, which others want.
const WAKE_NS: u64 = 10_000;
/// By what ratio a pace must change, in two windows in a row, to be another.
const OTHER_PACE: f64 = 1.5;

/// All that is known of a cell.
#[derive(Clone, Copy)]
struct Record {
    used: bool,
    prior: Option<Prior>,
    copy: bool,
    reason: ChoiceReason,
    speed: Evidence,
    /// Logarithms of how many times the CPU time of a map a copy takes.
    cost: Evidence,
    cpu: Option<Cpu>,
    /// Whether its first trials are over.
    settled: bool,
    /// How long these took.
    early_ns: u64,
    interval_ns: u64,
    due_ns: u64,
    pace: Pace,
    /// It is copied while the CPU is shared.
    hurried: bool,
}

/// How fast a cell's mappings come.
#[derive(Clone, Copy, Default)]
struct Pace {
    since_ns: u64,
    looks: u32,
    /// Looks per nanosecond, 0 before it is known.
    usual: f64,
    /// The last window had another.
    strayed: bool,
}

impl Pace {
    /// Notes a look; whether the pace has become another.
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
    /// Whether its trials need not wait for their share of the time: where they take long, as with
    /// large blocks deep in a queue, what is known before must do until it comes.
    fn is_early(&self) -> bool {
        !self.settled && self.early_ns < EARLY_NS
    }

    /// Takes in what a trial has shown; whether that changed the choice.
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
        // What is clear at once is chosen at once; but the next trial is long in coming.
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
                // A thread that spins has no CPU time left to compare: what the driver alone does
                // with it was calibrated.
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
    /// No trial but a cell's first before this.
    free_ns: u64,
    /// Until when the CPU is taken for a shared one; 0 once it is not.
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

    /// Forgets everything but the number of the last slice: mappings of it may be under way.
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

    /// The choice for a cell that is used, and why.
    pub(super) fn choice(&self, cell: Cell) -> Option<(bool, ChoiceReason)> {
        let record = &self.records[cell.index()];
        let chosen = match record.hurried {
            true => (true, ChoiceReason::Shared),
            false => (record.copy, record.reason),
        };
        record.used.then_some(chosen)
    }

    /// Looks whether a trial of a cell is due, a certain number of mappings after it did so last. `shared`: others
    /// want the CPU.
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

    /// A mapping of the slice under way is unmapped.
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

    /// The CPU is shared: no trial, and copies where these are short.
    fn hurry(&mut self, cell: Cell) -> Option<Order> {
        if let Some(trial) = self.trial.take() {
            // What it saw so far was another world.
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

    /// During a trial nobody's looks were counted.
    fn restart_paces(&mut self, now_ns: u64) {
        self.records.iter_mut().for_each(|record| record.pace.restart(now_ns));
    }

    fn slice(&mut self, cell: Cell, copy: bool) -> Order {
        self.slice = Order::next_slice(self.slice);
        Order { cell: Some((cell, copy)), slice: self.slice, wake_ns: 0 }
    }

    /// 3 to 5, so that what has a rhythm of its own is not always tried at the same beat.
    fn jitter(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        3 + self.random % 3
    }
}
