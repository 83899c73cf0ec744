//! Trials: where mappings come fast, two ways take turns, and the one by which more gets done is taken.
//!
//! What calibration cannot know is who waits for whom. A copy takes the driver's time, a map also the device's, and
//! only that of the slower one counts; requests wait for the syncs of maps, whether a thread does or not; and a device
//! reads one slot faster than the pages of a buffer. How many bytes are mapped in a time shows all of it. A
//! device with a rate of its own has it either way: then nothing is faster, and it is done as calibrated.
//!
//! A trial is up to [`PAIRS`] pairs of slices, one of each way, whose order changes from pair to pair, so that a load
//! that grows favours neither. Of a slice the first part does not count, as what was mapped in the slice before is
//! still being done. Another way than the calibrated one is kept only as long as trials show that it is
//! faster, and mappings come fast. Trials come after a second, and after twice the time each as long as nothing
//! changes, up to [`LONGEST_PAUSE_S`]; so they do if they find no end, because the load is one of short bursts or
//! because the other way is very slow.

use arrayvec::ArrayVec;

/// What a slice takes at least: until it counts, and from then on. Longer than requests wait in the queue of a
/// device that is fast enough for the choice to matter.
const LEAD_NS: u64 = 5_000_000;
const COUNTED_NS: u64 = 9_000_000;
/// How many looks it has at least in each of these parts: in the first, more mappings than wait in a queue, as a rule.
const LEAD_LOOKS: u32 = 32;
const LOOKS: u32 = 16;
/// A slice that takes longer than this has no result: mappings are too rare, so that noise would decide.
const LONGEST_NS: u64 = 150_000_000;
/// So does one with such a gap between two looks: a burst has ended, or the thread was without a CPU.
const GAP_NS: u64 = 20_000_000;
const PAIRS: usize = 6;
/// In so many pairs copies may seem slow because the pools grow.
const COLD: usize = 2;
/// How soon it looks again whether mappings come fast.
const AGAIN_NS: u64 = 50_000_000;
const SECOND_NS: u64 = 1_000_000_000;
const LONGEST_PAUSE_S: u64 = 16;

/// How many times as fast another way has to be: more than the noise of a trial.
const FASTER: f64 = 1.08;
/// The same, or its inverse, if two pairs in a row are to end a trial early: of any slices of theirs.
const CLEARLY: f64 = 1.2;

/// How it is chosen which mappings are copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Way {
    /// By the calibration, cell by cell, and by the waits.
    Calibrated,
    /// All are.
    Copies,
    /// None is, but what is copied because the CPU is shared.
    Maps,
}

/// Bytes of mappings that are copies, and of those that are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) copied: u64,
    pub(super) mapped: u64,
}

/// A slice of a trial.
#[derive(Clone, Copy)]
struct Slice {
    began_ns: u64,
    /// The last look, or the beginning.
    last_ns: u64,
    /// When it began to count, and what had been done then.
    from: Option<(u64, Done)>,
    /// The looks since then, or since it began.
    looks: u32,
}

/// A trial of another way.
struct Trial {
    other: Way,
    /// Bytes per nanosecond of each slice.
    rates: [f64; 2 * PAIRS],
    slices: usize,
}

/// The trials of a device.
pub(super) struct Trials {
    /// The way between trials; if it is not the calibrated one, by how many percent it is faster.
    way: Way,
    percent: u32,
    /// None, in the first slice of a trial, too.
    trial: Option<Trial>,
    /// None, between trials.
    slice: Option<Slice>,
    due_ns: u64,
    pause_s: u64,
    /// Whether the next trial is of what is most unlike the calibrated way, or of what is more like it.
    unlike: bool,
}

impl Trials {
    pub(super) const fn new() -> Trials {
        Trials {
            way: Way::Calibrated,
            percent: 0,
            trial: None,
            slice: None,
            due_ns: 0,
            pause_s: 0,
            unlike: true,
        }
    }

    /// The way to go now.
    pub(super) fn way(&self) -> Way {
        match &self.trial {
            Some(trial) if Trial::is_other(trial.slices) => trial.other,
            _ => self.way,
        }
    }

    /// The way to go between trials, and by how many percent it is faster than the calibrated one, if it is another.
    pub(super) fn kept(&self) -> (Way, Option<u32>) {
        (self.way, (self.way != Way::Calibrated).then_some(self.percent))
    }

    /// Whether [`step`](Self::step) needs to know what is done.
    pub(super) fn counts(&self) -> bool {
        self.slice.is_some()
    }

    /// Goes on, now and then; `done`: what has been done since any time before; `shared`: whether the CPU is.
    pub(super) fn step(&mut self, now_ns: u64, done: Done, shared: bool) {
        let Some(slice) = &mut self.slice else {
            if now_ns >= self.due_ns {
                self.slice = Some(Slice::new(now_ns));
            }
            return;
        };
        let since_ns = now_ns.saturating_sub(slice.began_ns);
        // A thread may look with a time that it read before another one looked, and a little earlier.
        if now_ns.abs_diff(slice.last_ns) > GAP_NS {
            return self.stop(now_ns);
        }
        if since_ns > LONGEST_NS {
            // If it is one of the other way, that is so slow that the slice finds no end.
            let slow = self.trial.as_ref().is_some_and(|trial| Trial::is_other(trial.slices));
            return if slow { self.close(now_ns, self.way) } else { self.stop(now_ns) };
        }
        slice.last_ns = slice.last_ns.max(now_ns);
        slice.looks += 1;
        let Some((from_ns, before)) = slice.from else {
            if since_ns >= LEAD_NS && slice.looks >= LEAD_LOOKS {
                (slice.from, slice.looks) = (Some((now_ns, done)), 0);
            }
            return;
        };
        let took_ns = now_ns.saturating_sub(from_ns);
        if took_ns < COUNTED_NS || slice.looks < LOOKS {
            return;
        }
        let done = done.since(before);
        if done.bytes() == 0 {
            return self.stop(now_ns);
        }
        self.slice = Some(Slice::new(now_ns));
        let (way, unlike) = (self.way, self.unlike);
        let trial = self.trial.get_or_insert_with(|| Trial {
            other: way.other(done, unlike, shared),
            rates: [0.0; 2 * PAIRS],
            slices: 0,
        });
        trial.rates[trial.slices] = done.bytes() as f64 / took_ns as f64;
        trial.slices += 1;
        if let (other, Some(times)) = (trial.other, trial.result()) {
            self.end(now_ns, other, times);
        }
    }

    /// Ends the trial that runs, if any, without a result. A way that no trial can confirm is not kept.
    fn stop(&mut self, now_ns: u64) {
        if self.trial.is_some() {
            return self.close(now_ns, Way::Calibrated);
        }
        (self.slice, self.way) = (None, Way::Calibrated);
        self.due_ns = now_ns.saturating_add(AGAIN_NS);
    }

    /// A copy found no slot: others may need those that there are. Nothing is tried, or kept, for a while.
    pub(super) fn give_up(&mut self, now_ns: u64) {
        if self.way() == Way::Copies {
            self.close(now_ns, Way::Calibrated);
            self.pause(now_ns, LONGEST_PAUSE_S);
        }
    }

    /// Ends the trial: the other way was so many times as fast.
    fn end(&mut self, now_ns: u64, other: Way, times: f64) {
        // Against the calibrated way, whichever of the two that is.
        let (way, times) =
            if self.way == Way::Calibrated { (other, times) } else { (self.way, 1.0 / times) };
        self.percent = ((times - 1.0) * 100.0).round() as u32;
        self.close(now_ns, if times >= FASTER { way } else { Way::Calibrated });
    }

    /// Ends the trial that runs, if any; from now on it goes this way.
    fn close(&mut self, now_ns: u64, way: Way) {
        let before = self.way;
        self.unlike ^= self.trial.is_some() && before == Way::Calibrated;
        (self.slice, self.trial, self.way) = (None, None, way);
        let longer_s = (2 * self.pause_s).clamp(1, LONGEST_PAUSE_S);
        self.pause(now_ns, if way == before { longer_s } else { 1 });
    }

    fn pause(&mut self, now_ns: u64, pause_s: u64) {
        self.pause_s = pause_s;
        self.due_ns = now_ns.saturating_add(pause_s * SECOND_NS);
    }
}

impl Way {
    pub(super) const fn from_repr(repr: u8) -> Way {
        match repr {
            1 => Way::Copies,
            2 => Way::Maps,
            _ => Way::Calibrated,
        }
    }

    /// The way to try, where this one does so much; itself, if there is no other.
    fn other(self, done: Done, unlike: bool, shared: bool) -> Way {
        let copies = done.copied > done.mapped;
        match self {
            Way::Calibrated if done.copied == 0 => Way::Copies,
            // They may all be copied because the CPU is shared: then they are so either way.
            Way::Calibrated if done.mapped == 0 && shared => Way::Calibrated,
            Way::Calibrated if done.mapped == 0 => Way::Maps,
            Way::Calibrated if copies != unlike => Way::Copies,
            Way::Calibrated => Way::Maps,
            Way::Copies | Way::Maps => Way::Calibrated,
        }
    }
}

impl Done {
    fn since(self, before: Done) -> Done {
        Done {
            copied: self.copied.saturating_sub(before.copied),
            mapped: self.mapped.saturating_sub(before.mapped),
        }
    }

    fn bytes(self) -> u64 {
        self.copied.saturating_add(self.mapped)
    }
}

impl Slice {
    fn new(began_ns: u64) -> Slice {
        Slice { began_ns, last_ns: began_ns, from: None, looks: 0 }
    }
}

impl Trial {
    /// Whether a slice is one of the other way: the second of the first pair, the first of the next, and so on.
    fn is_other(slice: usize) -> bool {
        slice.div_ceil(2) % 2 == 1
    }

    /// How many times as fast the other way is, once that is known.
    fn result(&self) -> Option<f64> {
        let rates = &self.rates[..self.slices];
        let pairs = rates.len() / 2;
        if !rates.len().is_multiple_of(2) || pairs < 2 {
            return None;
        }
        // Of the pairs from this one on, each way's slices, the slowest first.
        let of = |way, from: usize| {
            let slices = rates.iter().enumerate().skip(2 * from);
            let of =
                slices.filter(|(slice, _)| Trial::is_other(*slice) == way).map(|(_, rate)| *rate);
            let mut of: ArrayVec<f64, PAIRS> = of.collect();
            of.sort_by(f64::total_cmp);
            of
        };
        let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
        if pairs == PAIRS {
            // The slowest slice of each is left out: another thread may have had the CPU.
            return Some(mean(&of(true, COLD)[1..]) / mean(&of(false, COLD)[1..]));
        }
        // The last two pairs.
        let (other, before) = (of(true, pairs - 2), of(false, pairs - 2));
        let clear =
            other[0] >= CLEARLY * before[1] || pairs >= COLD + 2 && before[0] >= CLEARLY * other[1];
        clear.then(|| mean(&other) / mean(&before))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const STEP_NS: u64 = 200_000;
    /// 32 pages.
    const LOOK_BYTES: u64 = 128 << 10;

    /// Mappings that go at some rate.
    struct Load {
        /// Whether they are copies as calibrated.
        copies: bool,
        shared: bool,
        trials: Trials,
        now_ns: u64,
        done: Done,
        looked: u64,
        noise: u64,
    }

    impl Load {
        fn new() -> Load {
            Load {
                copies: false,
                shared: false,
                trials: Trials::new(),
                now_ns: 7,
                done: Done::default(),
                looked: 0,
                noise: 1,
            }
        }

        /// For so many milliseconds mappings take turns at `rate`, in MB/s, by way; returns how long they went
        /// each way, in milliseconds.
        fn run(&mut self, ms: u64, rate: impl Fn(Way) -> u64) -> [u64; 3] {
            let mut went_ns = [0; 3];
            for _ in 0..ms * 1_000_000 / STEP_NS {
                let way = self.trials.way();
                went_ns[way as usize] += STEP_NS;
                self.now_ns += STEP_NS;
                let bytes = rate(way) * STEP_NS / 1000;
                match way == Way::Copies || way == Way::Calibrated && self.copies {
                    true => self.done.copied += bytes,
                    false => self.done.mapped += bytes,
                }
                if self.done.bytes() - self.looked >= LOOK_BYTES {
                    self.looked = self.done.bytes();
                    self.trials.step(self.now_ns, self.done, self.shared);
                }
            }
            went_ns.map(|ns| ns / 1_000_000)
        }

        /// Between 3/4 and 5/4 of it.
        fn noisy(&mut self) -> impl Fn(u64) -> u64 + use<> {
            self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let part = 750 + (self.noise >> 33) % 500;
            move |rate| rate * part / 1000
        }
    }

    fn by_way(calibrated: u64, copies: u64, maps: u64) -> impl Fn(Way) -> u64 {
        move |way| [calibrated, copies, maps][way as usize]
    }

    #[test]
    fn what_is_faster_is_taken_soon_and_kept() {
        let mut load = Load::new();
        load.run(100, by_way(1000, 1400, 1000));
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
        let went = load.run(60_000, by_way(1000, 1400, 1000));
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
        assert!(went[1] > 59_500, "{went:?}");
        // A rate of its own: it is done as calibrated, after the next trial.
        load.run(17_000, by_way(1000, 1000, 1000));
        assert_eq!(load.trials.kept(), (Way::Calibrated, None));
    }

    #[test]
    fn mapping_is_tried_where_copies_are_calibrated() {
        let mut load = Load { copies: true, ..Load::new() };
        load.run(100, by_way(1000, 1000, 1300));
        assert_eq!(load.trials.kept(), (Way::Maps, Some(30)));
    }

    #[test]
    fn what_is_copied_because_the_cpu_is_shared_is_not_tried_as_maps() {
        let mut load = Load { copies: true, shared: true, ..Load::new() };
        let went = load.run(60_000, by_way(1000, 1000, 1300));
        assert_eq!(
            (went[1..].iter().sum::<u64>(), load.trials.kept()),
            (0, (Way::Calibrated, None))
        );
    }

    #[test]
    fn a_look_of_a_moment_before_changes_nothing() {
        let mut load = Load::new();
        for _ in 0..1_000 {
            load.run(1, by_way(1000, 1400, 1000));
            load.trials.step(load.now_ns - 50_000, load.done, false);
        }
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
        assert_eq!(load.trials.pause_s, 1, "the first trial showed it");
    }

    #[test]
    fn a_way_is_kept_although_the_calibrated_one_has_become_very_slow() {
        let mut load = Load::new();
        load.run(100, by_way(1000, 1400, 1000));
        let went = load.run(60_000, by_way(30, 1400, 30));
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
        assert!(went[0] < 2_000, "{went:?}");
    }

    #[test]
    fn each_of_the_others_has_its_turn() {
        // Half of it is copied as it is; copies find no slot.
        let mut trials = Trials::new();
        let mut tried = [0; 3];
        for at in 1..400_000u64 {
            let way = trials.way();
            tried[way as usize] += 1;
            match way {
                Way::Copies => trials.give_up(at * STEP_NS),
                _ => trials.step(at * STEP_NS, Done { copied: at << 20, mapped: at << 20 }, false),
            }
        }
        assert!(tried[Way::Maps as usize] > 100, "{tried:?}");
    }

    #[test]
    fn only_the_calibrated_way_takes_the_place_of_one_that_is_kept() {
        let mut load = Load::new();
        load.run(100, by_way(1000, 1400, 1400));
        let went = load.run(60_000, by_way(1000, 1400, 1400));
        assert!(went[0] < 500, "{went:?}");
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
    }

    #[test]
    fn a_way_is_kept_no_longer_than_mappings_come_fast() {
        let mut load = Load::new();
        load.run(100, by_way(1000, 1400, 1000));
        assert_eq!(load.trials.kept(), (Way::Copies, Some(40)));
        // A look in 6.5 ms.
        load.run(1_500, |_| 20);
        assert_eq!(load.trials.kept(), (Way::Calibrated, None));
        let went = load.run(60_000, |_| 20);
        assert_eq!(went[1..], [0, 0]);
    }

    #[test]
    fn a_trial_without_an_end_is_not_repeated_at_once() {
        // Bursts of 80 ms: too short, where the other way is not clearly faster or slower.
        let (mut load, mut went) = (Load::new(), [0; 3]);
        for _ in 0..1000 {
            let some = load.run(80, by_way(1000, 900, 1000));
            went.iter_mut().zip(some).for_each(|(sum, some)| *sum += some);
            load.now_ns += 50_000_000;
        }
        assert!(went[1] < 1_000, "{went:?}");
        // So slow that a slice does not end.
        let mut load = Load::new();
        let went = load.run(100_000, by_way(1000, 1, 1000));
        assert!(went[1] < 3_000, "{went:?}");
    }

    #[test]
    fn a_load_that_grows_is_no_reason() {
        for start in [10.0, 100.0, 1000.0f64] {
            let mut load = Load::new();
            let mut rate = start;
            for _ in 0..100 {
                load.run(14, |_| rate as u64);
                assert_eq!(load.trials.kept(), (Way::Calibrated, None));
                rate = (rate * 1.3).min(10_000.0);
            }
        }
    }

    #[test]
    fn what_is_not_faster_costs_little_to_know() {
        for copies in [1000, 600, 1070] {
            let mut load = Load::new();
            let went = load.run(1000, by_way(1000, copies, 1000));
            assert!(went[1] < 100, "{went:?}");
            let went = load.run(99_000, by_way(1000, copies, 1000));
            assert_eq!(load.trials.way, Way::Calibrated);
            assert!(went[0] > 98_000, "{went:?}");
        }
    }

    #[test]
    fn noise_decides_seldom() {
        // How long a load goes which way in 100 s whose rates are between 3/4 and 5/4 of these.
        let went = |copies, maps| {
            let (mut load, mut went) = (Load::new(), [0; 3]);
            for _ in 0..100_000 / 15 {
                let noisy = load.noisy();
                let some = load.run(15, |way| noisy(by_way(1000, copies, maps)(way)));
                went.iter_mut().zip(some).for_each(|(sum, some)| *sum += some);
            }
            went
        };
        let alike = went(1000, 1000);
        assert!(alike[0] > 75_000, "{alike:?}");
        let worse = went(700, 700);
        assert!(worse[0] > 98_000, "{worse:?}");
        let better = went(1400, 1000);
        assert!(better[1] > 90_000, "{better:?}");
    }

    #[test]
    fn turns_of_another_thread_decide_seldom() {
        // It has the CPU for 2 to 6 ms of about 8.
        let went = |copies| {
            let mut load = Load { shared: true, ..Load::new() };
            let mut went = [0; 3];
            for _ in 0..100_000 / 4 {
                let noisy = load.noisy();
                load.now_ns += noisy(4_000_000) - 2_000_000 + noisy(2_000_000);
                let some = load.run(4, by_way(1000, copies, 1000));
                went.iter_mut().zip(some).for_each(|(sum, some)| *sum += some);
            }
            went
        };
        let alike = went(1000);
        assert!(alike[0] > 70_000, "{alike:?}");
        let worse = went(700);
        assert!(worse[0] > 95_000, "{worse:?}");
        let better = went(1400);
        assert!(better[1] > 85_000, "{better:?}");
    }

    #[test]
    fn pools_that_grow_do_not_count() {
        let mut load = Load::new();
        // The first two slices of copies.
        let cold_ns = 4 * (LEAD_NS + COUNTED_NS + STEP_NS) / 1_000_000;
        load.run(cold_ns, by_way(1000, 200, 1000));
        assert!(load.trials.trial.is_some());
        load.run(200, by_way(1000, 1500, 1000));
        assert_eq!(load.trials.kept(), (Way::Copies, Some(50)));
    }

    #[test]
    fn nothing_is_tried_where_mappings_are_rare() {
        let mut trials = Trials::new();
        for at in 0..1000 {
            trials.step(at * 8_000_000, Done { copied: 0, mapped: at << 20 }, false);
            assert_eq!(trials.way(), Way::Calibrated);
        }
        // Nor is a way kept that a load left behind.
        let mut load = Load::new();
        while load.trials.way() == Way::Calibrated {
            load.run(1, by_way(1000, 1000, 1000));
        }
        load.now_ns += LONGEST_NS;
        load.run(1, by_way(1000, 1000, 1000));
        assert_eq!(load.trials.way(), Way::Calibrated);
        assert!(load.trials.trial.is_none());
    }

    #[test]
    fn counts_and_clocks_may_go_backwards() {
        let mut trials = Trials::new();
        for at in [5, 1 << 40, u64::MAX, 0, 1 << 50, 7] {
            for ns in (0..100).map(|n| n * COUNTED_NS / 10) {
                let done = Done { copied: at, mapped: u64::MAX - ns };
                trials.step(at.saturating_add(ns), done, false);
            }
        }
        assert_eq!(trials.kept(), (Way::Calibrated, None));
        assert!(trials.slice.is_none_or(|slice| slice.began_ns < 1 << 40), "it waits for 7 again");
        assert!(trials.due_ns < 1 << 51, "{}", trials.due_ns);
    }
}
