//! [`Policy::Auto`](crate::Policy::Auto): which mappings are copies.
//!
//! When the policy comes into force, [`calibrate()`] measures on this machine, over this domain, what
//! copies and maps cost: the driver's calls, and what the device takes for each request meanwhile.
//! The cheaper way is chosen once for each [`Cell`], a class of mappings.
//!
//! What a calibration cannot foresee is how long threads wait for syncs in use: the device may be
//! asleep, or busy with I/O. [`Auto::note`] averages that over the mappings of all cells, as syncs are
//! shared. Cells whose copies take less than calls and waits together are then copied. Copies show
//! nothing of it: [`RECALL_NS`] after the last mapping that did it is forgotten, and shows anew.
//!
//! Nor can it foresee whether driver or device is the slower one. Where mappings come fast, copying all and
//! mapping all are [tried](trial), and taken while they are faster, on a shared CPU too. Waits count only where
//! neither is.
//!
//! While other threads want the CPU of a mapping thread
//! ([`ThreadClock::is_shared`](crate::ThreadClock::is_shared)), a sync waits for a time slice of the
//! device's thread. Mappings that take less time to copy than a thread takes to wake are then
//! copied.
//!
//! A map call reads its choice from [`Auto::choose`] with two to four loads. Every [`LOOK_EVERY`]
//! mappings [`Auto::note`] looks at the CPU, at the waits and at the trials.
//!
//! Both choices are strict.

#[allow(unsafe_code)]
mod calibrate;
mod cell;
mod choices;
mod costs;
mod trial;

// The atomics of `std` under loom too: what they hold is advice. They publish nothing, and a choice
// that is a moment old is as safe as a new one.
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use self::{
    cell::CELLS,
    costs::Prior,
    trial::{Done, Trials, Way},
};
pub(crate) use self::{cell::Cell, costs::Kind};
pub use choices::{Calibration, CellChoice, ChoiceReason, Choices, CopyCost};

/// How many mappings of a cell a clone of a device makes between two looks; a power of two. Of large ones it is
/// fewer, as they take longer.
const LOOK_EVERY: u64 = 32;
const LOOK_EVERY_LARGE: u64 = 4;
/// How many mappings a clone counts for itself, in a trial, before it counts them for the device.
const COUNT_EVERY: u64 = 8;
/// What is longer than this, in bytes, is large.
const LARGE: u64 = 32 << 10;
/// For how long a CPU counts as shared after it was last seen to be.
const LINGER_NS: u64 = 100_000_000;
/// The least that a sync takes on a shared CPU, for the wake-up of a thread and the switches to it
/// and back: a shorter copy is the better choice, as it waits for no other thread's time slice. A
/// longer one uses up CPU time that others want.
const WAKE_NS: u64 = 10_000;

/// How long the waits that were seen count, if no mapping shows others.
const RECALL_NS: u64 = 1_000_000_000;
/// The waits of so many mappings of a clone are one sample, and an average is of so many samples: a
/// sync that is waited for is seldom, and long. One of them must not decide.
const SAMPLE: u64 = 256;
const SAMPLES: u32 = 8;

/// What is known of a cell, in a word: 0 until its first mapping. Above the bits is for how long its
/// mappings may wait, on average, before copies take less: in nanoseconds.
#[derive(Clone, Copy)]
struct Word(u32);

impl Word {
    const KNOWN: u32 = 1;
    /// Its mappings are copies.
    const COPY: u32 = 2;
    /// They are while the CPU is shared.
    const COPY_IF_SHARED: u32 = 4;
    /// What a copy takes is known: they may be.
    const MAY_COPY: u32 = 8;
    const BITS: u32 = 4;
    /// The longest wait that counts.
    const LONGEST_NS: u32 = u32::MAX >> Word::BITS;

    fn new(prior: Option<Prior>) -> Word {
        let bit =
            |holds: fn(&Prior) -> bool, bit| if prior.is_some_and(|p| holds(&p)) { bit } else { 0 };
        let copy = bit(|prior| prior.copies(), Word::COPY);
        let hurry = bit(|prior| prior.copy_ns < WAKE_NS, Word::COPY_IF_SHARED);
        let bearable_ns = prior.map_or(u64::MAX, |p| p.copy_ns.saturating_sub(p.calls_ns));
        let bearable_ns = bearable_ns.min(Word::LONGEST_NS.into()) as u32;
        let may = bit(|_| true, Word::MAY_COPY);
        Word(Word::KNOWN | may | copy | hurry | bearable_ns << Word::BITS)
    }

    fn has(self, bits: u32) -> bool {
        self.0 & bits != 0
    }

    /// Whether copies take less time than what mappings wait.
    fn is_outweighed_by(self, wait_ns: u32) -> bool {
        wait_ns > self.0 >> Word::BITS
    }
}

/// What a clone of a device copied and mapped, cell by cell.
#[derive(Debug)]
pub(crate) struct Tally {
    /// What is mapped, and what is copied.
    counts: [[AtomicU64; CELLS]; 2],
    /// Bytes of each in a trial, of which the device does not know yet.
    bytes: [AtomicU64; 2],
    /// What there was at the last sample: mappings, and their waits; and in which calibration.
    seen: [AtomicU64; 2],
    epoch: AtomicU32,
}

impl Default for Tally {
    fn default() -> Tally {
        let counts = [(); 2].map(|()| [const { AtomicU64::new(0) }; CELLS]);
        let (bytes, seen) = (Default::default(), Default::default());
        Tally { counts, bytes, seen, epoch: AtomicU32::new(0) }
    }
}

/// What a clone of a device sees of its CPU and of its waits. Batches map by a clone of their own: the
/// waits for what they map count, those for what they unmap do not.
pub(crate) struct Look {
    pub(crate) now_ns: u64,
    /// Whether other threads want the CPU, so that a sync waits for a time slice.
    pub(crate) shared: bool,
    /// How many mappings were no copies, and for how long threads have waited for their syncs.
    pub(crate) mapped: u64,
    pub(crate) waited_ns: u64,
}

impl Tally {
    fn of(&self, cell: Cell, copied: bool) -> &AtomicU64 {
        &self.counts[usize::from(copied)][cell.index()]
    }

    pub(crate) fn add_to(&self, sum: &Tally) {
        let all = sum.counts.iter().flatten().zip(self.counts.iter().flatten());
        all.for_each(|(sum, n)| _ = sum.fetch_add(n.load(Relaxed), Relaxed));
    }
}

/// Whether a mapping is a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    Yes,
    /// It was not to be one.
    No,
    /// There was no slot for it.
    NoSlot,
}

/// What is known, for [`Auto::first`] and for readers.
struct Known {
    calibration: Calibration,
    /// Of each cell in use: what a mapping is expected to cost, if that could be measured.
    priors: [Option<Prior>; CELLS],
    trials: Trials,
}

impl Known {
    fn new(calibration: Calibration) -> Known {
        Known { calibration, priors: [None; CELLS], trials: Trials::new() }
    }
}

/// Decides for a device which of its mappings are copies.
pub(crate) struct Auto {
    words: [AtomicU32; CELLS],
    /// Until when the CPU counts as shared; 0 while it does not.
    shared_until_ns: AtomicU64,
    /// How long a mapping waits on average, and until when that counts.
    wait_ns: AtomicU32,
    wait_until_ns: AtomicU64,
    /// Counts calibrations: what a clone did under another policy is no sample.
    epoch: AtomicU32,
    /// The [`Way`] to go; whether bytes are counted, for a trial; and the bytes of what was mapped, and of what was copied.
    way: AtomicU8,
    counts: AtomicBool,
    bytes: [AtomicU64; 2],
    known: Mutex<Known>,
}

impl Auto {
    pub(crate) fn new() -> Auto {
        Auto {
            words: [const { AtomicU32::new(0) }; CELLS],
            shared_until_ns: AtomicU64::new(0),
            wait_ns: AtomicU32::new(0),
            wait_until_ns: AtomicU64::new(0),
            epoch: AtomicU32::new(0),
            way: AtomicU8::new(Way::Calibrated as u8),
            counts: AtomicBool::new(false),
            bytes: [const { AtomicU64::new(0) }; 2],
            known: Mutex::new(Known::new(Calibration::default())),
        }
    }

    /// Starts over, with a new calibration.
    pub(crate) fn restart(&self, calibration: Calibration) {
        let mut known = self.known.lock();
        *known = Known::new(calibration);
        self.follow(&known.trials);
        self.words.iter().for_each(|word| word.store(0, Relaxed));
        self.wait_ns.store(0, Relaxed);
        self.epoch.fetch_add(1, Relaxed);
    }

    /// Whether a mapping is to be a copy.
    #[inline]
    pub(crate) fn choose(&self, cell: Cell, kind: impl FnOnce() -> Kind) -> bool {
        let mut word = Word(self.words[cell.index()].load(Relaxed));
        if word.0 == 0 {
            word = self.first(cell, kind());
        }
        self.copies(Way::from_repr(self.way.load(Relaxed)), word) || self.hurries(word)
    }

    #[inline]
    fn copies(&self, way: Way, word: Word) -> bool {
        match way {
            Way::Calibrated => {
                word.has(Word::COPY) || word.is_outweighed_by(self.wait_ns.load(Relaxed))
            }
            Way::Copies => word.has(Word::MAY_COPY),
            Way::Maps => false,
        }
    }

    #[inline]
    fn hurries(&self, word: Word) -> bool {
        word.has(Word::COPY_IF_SHARED) && self.is_shared()
    }

    /// The choice for a cell, by its first mapping. Waits for no other thread: while one has the
    /// lock, it maps and leaves the choice to a later mapping.
    #[cold]
    fn first(&self, cell: Cell, kind: Kind) -> Word {
        let Some(mut known) = self.known.try_lock() else { return Word::new(None) };
        let word = &self.words[cell.index()];
        // Another thread may have been first.
        if word.load(Relaxed) == 0 {
            let prior = known.calibration.expect(kind);
            known.priors[cell.index()] = prior;
            word.store(Word::new(prior).0, Relaxed);
        }
        Word(word.load(Relaxed))
    }

    fn is_shared(&self) -> bool {
        self.shared_until_ns.load(Relaxed) != 0
    }

    /// Counts a mapping that was made, of so many bytes, and takes a look from time to time; at once if there is no slot
    /// for it while all are to be copies.
    #[inline]
    pub(crate) fn note(
        &self,
        cell: Cell,
        len: u64,
        copied: Copied,
        tally: &Tally,
        look: impl Fn() -> Look,
    ) {
        let is_copy = copied == Copied::Yes;
        let count = tally.of(cell, is_copy).fetch_add(1, Relaxed) + 1;
        let large = len > LARGE;
        if self.counts.load(Relaxed) {
            let (own, all) =
                (&tally.bytes[usize::from(is_copy)], &self.bytes[usize::from(is_copy)]);
            own.fetch_add(len, Relaxed);
            if large || count.is_multiple_of(COUNT_EVERY) {
                all.fetch_add(own.swap(0, Relaxed), Relaxed);
            }
        }
        let refused = copied == Copied::NoSlot && self.way.load(Relaxed) == Way::Copies as u8;
        let look_every = if large { LOOK_EVERY_LARGE } else { LOOK_EVERY };
        if refused || count.is_multiple_of(look_every) {
            self.look(look(), tally, refused);
        }
    }

    /// A copy that has to be one found no slot.
    #[inline]
    pub(crate) fn refused(&self, now_ns: impl FnOnce() -> u64) {
        if self.way.load(Relaxed) == Way::Copies as u8 {
            self.step(now_ns(), true);
        }
    }

    /// Goes on with the trials. Waits for no other thread.
    fn step(&self, now_ns: u64, refused: bool) {
        let Some(mut known) = self.known.try_lock() else { return };
        if refused {
            known.trials.give_up(now_ns);
        } else {
            let [mapped, copied] = self.bytes.each_ref().map(|bytes| bytes.load(Relaxed));
            known.trials.step(now_ns, Done { copied, mapped }, self.is_shared());
        }
        self.follow(&known.trials);
    }

    fn follow(&self, trials: &Trials) {
        // A line that all threads read is written only if it changes.
        let (way, counts) = (trials.way() as u8, trials.counts());
        if self.way.load(Relaxed) != way {
            self.way.store(way, Relaxed);
        }
        if self.counts.load(Relaxed) != counts {
            self.counts.store(counts, Relaxed);
        }
    }

    #[cold]
    fn look(&self, look: Look, tally: &Tally, refused: bool) {
        let Look { now_ns, shared, mapped, waited_ns } = look;
        let until_ns = self.shared_until_ns.load(Relaxed);
        if shared {
            self.shared_until_ns.store(now_ns.saturating_add(LINGER_NS), Relaxed);
        } else if until_ns != 0 && now_ns >= until_ns {
            self.shared_until_ns.store(0, Relaxed);
        }
        let [seen_mapped, seen_waited_ns] = &tally.seen;
        let rebase = || {
            seen_mapped.store(mapped, Relaxed);
            seen_waited_ns.store(waited_ns, Relaxed);
        };
        let more = mapped.saturating_sub(seen_mapped.load(Relaxed));
        let epoch = self.epoch.load(Relaxed);
        if tally.epoch.swap(epoch, Relaxed) != epoch
            || self.way.load(Relaxed) != Way::Calibrated as u8
        {
            rebase();
        } else if self.is_shared() {
            // A wait for another thread's time slice says nothing of the device.
            rebase();
            self.wait_ns.store(0, Relaxed);
        } else if more >= SAMPLE {
            let waited_ns = waited_ns.saturating_sub(seen_waited_ns.load(Relaxed));
            rebase();
            let each_ns = (waited_ns / more).min(Word::LONGEST_NS.into()) as u32;
            let wait_ns = self.wait_ns.load(Relaxed);
            self.wait_ns.store(wait_ns - wait_ns / SAMPLES + each_ns / SAMPLES, Relaxed);
            self.wait_until_ns.store(now_ns.saturating_add(RECALL_NS), Relaxed);
        } else if now_ns >= self.wait_until_ns.load(Relaxed) {
            self.wait_ns.store(0, Relaxed);
        }
        self.step(now_ns, refused);
    }

    /// What was chosen, and why; `tally` is the sum over all clones.
    pub(crate) fn choices(&self, tally: &Tally) -> Choices {
        let (known, wait_ns) = (self.known.lock(), self.wait_ns.load(Relaxed));
        let cells = Cell::all().filter_map(|cell| {
            let word = Word(self.words[cell.index()].load(Relaxed));
            let (way, faster) = known.trials.kept();
            let copies = self.copies(way, word);
            let hurried = !copies && self.hurries(word);
            let waits = !word.has(Word::COPY) && word.is_outweighed_by(wait_ns);
            let reason = match known.priors[cell.index()] {
                _ if hurried => ChoiceReason::Shared,
                Some(_) if let Some(percent) = faster => ChoiceReason::Faster { percent },
                Some(Prior { copy_ns, calls_ns, .. }) if waits => {
                    ChoiceReason::Waits { copy_ns, map_ns: calls_ns.saturating_add(wait_ns.into()) }
                }
                Some(prior) => prior.reason(),
                None => ChoiceReason::Unknown,
            };
            word.has(Word::KNOWN).then(|| CellChoice {
                direction: cell.direction(),
                bytes: cell.bytes(),
                scattered: cell.is_scattered(),
                copied: tally.of(cell, true).load(Relaxed),
                mapped: tally.of(cell, false).load(Relaxed),
                copies: copies || hurried,
                reason,
            })
        });
        let cells = cells.collect();
        Choices { calibration: known.calibration.clone(), cells }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Direction, bounce::Written, map_call::Sync};

    const MS: u64 = 1_000_000;

    fn calibrated() -> Auto {
        let cost = |bytes, ns| CopyCost { bytes, in_ns: ns, out_ns: ns };
        let auto = Auto::new();
        auto.restart(Calibration {
            copies: vec![cost(512, 100), cost(4096, 600), cost(1 << 20, 100_000)],
            map_call_ns: Some(100),
            map_run_ns: Some(100),
            map_wall_ns: Some(400),
            map_lone_ns: Some(5_000),
            ..Calibration::default()
        });
        auto
    }

    fn at(now_ns: u64) -> Look {
        Look { now_ns, shared: false, mapped: 0, waited_ns: 0 }
    }

    fn choose(auto: &Auto, len: u64, runs: u64) -> bool {
        let (direction, sync, written) = (Direction::ToDevice, Sync::Later, Written::Reported);
        let kind = || Kind { direction, len, runs, sync, written };
        auto.choose(Cell::of(direction, len, runs), kind)
    }

    #[test]
    fn what_is_cheaper_is_chosen_by_size_and_runs() {
        let auto = calibrated();
        let chosen = [(512, 1), (4096, 1), (4096, 2), (1 << 20, 1), (1 << 20, 256)];
        let chosen = chosen.map(|(len, runs)| choose(&auto, len, runs));
        // The device takes 400 ns for a run, and works while the driver does.
        assert_eq!(chosen, [true, false, true, false, true]);
        let choices = auto.choices(&Tally::default());
        let reason = ChoiceReason::Cost { copy_ns: 600, map_ns: 800 };
        let found = choices.cells.iter().find(|cell| cell.bytes == 4096 && cell.scattered);
        assert_eq!(found.map(|cell| (cell.copies, cell.reason)), Some((true, reason)));
        assert_eq!(choices.cells.len(), 5);
    }

    #[test]
    fn what_was_not_measured_is_mapped() {
        let auto = Auto::new();
        assert!(!choose(&auto, 512, 1));
        auto.look(Look { shared: true, ..at(MS) }, &Tally::default(), false);
        assert!(!choose(&auto, 512, 1));
        let waits = Look { mapped: SAMPLE, waited_ns: u64::MAX, ..at(200 * MS) };
        auto.look(waits, &Tally::default(), false);
        assert!(!choose(&auto, 512, 1));
        assert_eq!(auto.choices(&Tally::default()).cells[0].reason, ChoiceReason::Unknown);
        auto.restart(calibrated().choices(&Tally::default()).calibration);
        assert_eq!(auto.choices(&Tally::default()).cells, []);
        assert!(choose(&auto, 512, 1), "a new calibration is a new choice");
    }

    #[test]
    fn on_a_shared_cpu_what_copies_soon_is_copied() {
        let auto = calibrated();
        let chosen = || [4096, 1 << 20].map(|len| choose(&auto, len, 1));
        assert_eq!(chosen(), [false, false]);
        let look = |shared, ms| auto.look(Look { shared, ..at(ms * MS) }, &Tally::default(), false);
        look(true, 7);
        assert_eq!(chosen(), [true, false], "the large one takes longer than a wake-up");
        let cell = auto.choices(&Tally::default()).cells[0].clone();
        assert_eq!((cell.bytes, cell.copies, cell.reason), (4096, true, ChoiceReason::Shared));
        // A moment without another thread on the CPU changes nothing.
        look(false, 106);
        assert_eq!(chosen(), [true, false]);
        look(false, 107);
        assert_eq!(chosen(), [false, false]);
    }

    #[test]
    fn what_waits_for_longer_than_a_copy_takes_is_copied() {
        let (auto, tally) = (calibrated(), Tally::default());
        let chosen = || [4096, 1 << 20].map(|len| choose(&auto, len, 1));
        assert_eq!(chosen(), [false, false]);
        let (mut mapped, mut waited_ns) = (0, 0);
        let mut look = |count, each_ns, ms| {
            mapped += count;
            waited_ns += each_ns * count;
            auto.look(Look { mapped, waited_ns, ..at(ms * MS) }, &tally, false);
            (mapped, waited_ns)
        };
        // What was before the policy came into force does not count.
        look(100 * SAMPLE, 1_000_000, 0);
        // A copy takes 400 ns more than the calls.
        (0..100).for_each(|_| _ = look(SAMPLE, 350, 0));
        assert_eq!(chosen(), [false, false]);
        // In parts, as between copies of other cells.
        look(SAMPLE / 2, 1000, 1);
        assert_eq!(chosen(), [false, false]);
        let (mapped, waited_ns) = look(SAMPLE / 2, 1000, 1);
        assert_eq!(chosen(), [true, false]);
        let cell = auto.choices(&tally).cells[0].clone();
        let reason = ChoiceReason::Waits { copy_ns: 600, map_ns: 626 };
        assert_eq!((cell.bytes, cell.copies, cell.reason), (4096, true, reason));
        // Copies wait for nothing; what was seen is forgotten in the end.
        let copies = |ms| auto.look(Look { mapped, waited_ns, ..at(ms * MS) }, &tally, false);
        copies(1000);
        assert_eq!(chosen(), [true, false]);
        copies(1001);
        assert_eq!(chosen(), [false, false]);
        // Where another thread has the CPU, waits are those for its slice.
        let look = |shared, mapped| {
            auto.look(Look { shared, mapped, waited_ns: u64::MAX, ..at(2000 * MS) }, &tally, false);
        };
        look(false, mapped + SAMPLE);
        assert_eq!(chosen(), [true, true]);
        look(true, mapped + 2 * SAMPLE);
        assert_eq!(chosen(), [true, false], "the small one, as the CPU is shared");
        auto.restart(calibrated().choices(&tally).calibration);
        assert_eq!(auto.wait_ns.load(Relaxed), 0);
    }

    /// 1 MiB after 1 MiB, where a device reads a slot faster than it maps and reads a buffer.
    struct Use {
        auto: Auto,
        tally: Tally,
        now_ns: u64,
        shared: bool,
        no_slot: bool,
    }

    impl Use {
        fn new() -> Use {
            let (auto, tally) = (calibrated(), Tally::default());
            Use { auto, tally, now_ns: 0, shared: false, no_slot: false }
        }

        /// For so long; returns how many were to be mapped, and how many copied.
        fn work(&mut self, ms: u64) -> [u64; 2] {
            let cell = Cell::of(Direction::ToDevice, 1 << 20, 1);
            let until_ns = self.now_ns + ms * MS;
            let mut done = [0; 2];
            while self.now_ns < until_ns {
                let copies = choose(&self.auto, 1 << 20, 1);
                done[usize::from(copies)] += 1;
                self.now_ns += if copies { 100_000 } else { 150_000 };
                let copied = match copies {
                    true if self.no_slot => Copied::NoSlot,
                    true => Copied::Yes,
                    false => Copied::No,
                };
                let look = || Look { shared: self.shared, ..at(self.now_ns) };
                self.auto.note(cell, 1 << 20, copied, &self.tally, look);
            }
            done
        }

        fn chosen(&self) -> [bool; 2] {
            [1 << 20, 4096].map(|len| choose(&self.auto, len, 1))
        }
    }

    #[test]
    fn what_gets_more_done_in_use_is_taken_for_all_cells() {
        let mut it = Use::new();
        assert_eq!((it.work(10)[1], it.chosen()), (0, [false, false]));
        // While a turn of copies is tried, that is not the choice yet.
        while !it.chosen()[0] {
            it.work(1);
        }
        let choices = it.auto.choices(&it.tally);
        assert!(choices.cells.iter().all(|cell| !cell.copies), "{choices}");
        it.work(500);
        assert_eq!(it.chosen(), [true, true]);
        let reason = ChoiceReason::Faster { percent: 50 };
        let choices = it.auto.choices(&it.tally);
        assert!(choices.cells.iter().all(|cell| cell.copies && cell.reason == reason), "{choices}");
        it.auto.restart(calibrated().choices(&it.tally).calibration);
        assert_eq!(it.chosen(), [false, false]);
    }

    #[test]
    fn it_is_tried_on_a_shared_cpu_too() {
        let mut it = Use { shared: true, ..Use::new() };
        it.work(1);
        assert_eq!(it.chosen(), [false, true], "the small one, as the CPU is shared");
        it.work(500);
        assert_eq!(it.chosen(), [true, true]);
        let reason = ChoiceReason::Faster { percent: 50 };
        let choices = it.auto.choices(&it.tally);
        assert!(choices.cells.iter().all(|cell| cell.reason == reason), "{choices}");
        it.shared = false;
        it.work(5_000);
        assert_eq!(it.chosen(), [true, true], "it is kept when the CPU is free again");
    }

    #[test]
    fn what_there_is_no_slot_for_is_not_copied_for_a_trials_sake() {
        let mut it = Use::new();
        it.work(300);
        assert_eq!(it.chosen(), [true, true]);
        it.no_slot = true;
        assert_eq!(it.work(15_000)[1], 1);
        assert!(!it.auto.counts.load(Relaxed));
        assert_eq!(it.work(15_000)[1], 1, "tried again after a while");
        // What has to be copied found no slot.
        it.no_slot = false;
        it.work(20_000);
        assert_eq!(it.chosen(), [true, true]);
        it.auto.refused(|| it.now_ns);
        assert_eq!(it.chosen(), [false, false]);
    }

    #[test]
    fn a_look_is_taken_now_and_then() {
        let (auto, tally) = (calibrated(), Tally::default());
        let cell = Cell::of(Direction::ToDevice, 4096, 1);
        let look = || Look { shared: true, ..at(u64::MAX) };
        let note = |copied| auto.note(cell, 4096, copied, &tally, look);
        (1..LOOK_EVERY).for_each(|_| note(Copied::No));
        assert!(!auto.is_shared());
        note(Copied::No);
        assert!(auto.is_shared());
        note(Copied::Yes);
        let cells = auto.choices(&tally).cells;
        assert_eq!(cells, [], "it was not chosen for");
        choose(&auto, 4096, 1);
        let cell = auto.choices(&tally).cells.remove(0);
        assert_eq!((cell.mapped, cell.copied), (LOOK_EVERY, 1));
    }

    #[test]
    fn threads_choose_together_and_none_waits_for_another() {
        for _ in 0..200 {
            let auto = calibrated();
            std::thread::scope(|scope| {
                (0..3).for_each(|_| _ = scope.spawn(|| choose(&auto, 4096, 2)));
                // Has the lock, too.
                _ = auto.choices(&Tally::default());
            });
            assert!(choose(&auto, 4096, 2));
        }
        let auto = calibrated();
        let held = auto.known.lock();
        assert!(!choose(&auto, 4096, 2), "it is mapped, and the next one may be copied");
        drop(held);
        assert!(choose(&auto, 4096, 2));
    }
}
