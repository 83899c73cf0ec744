//! Trials: where mappings come fast, two ways take turns, and the one by which more gets done is taken.
//!
//! What calibration cannot know is who waits for whom. A copy takes the driver's time, a map also the device's, and
//! only that of the slower one counts; requests wait for the syncs of maps, whether a thread does or not; and a device
//! reads one slot faster than the pages of a buffer. How many bytes are mapped in a time shows all of it. A
//! device with a rate of its own has it either way: then nothing is faster, and it is done as calibrated.
//!
//! A trial is up to [`PAIRS`] pairs of slices, one of each way. Of a slice the first part does not count, as what was
//! mapped in the slice before is still being done. Another way than the calibrated one is kept only as long as
//! trials show that it is faster. They come after a second, and after twice the time each as long as nothing
//! changes, up to [`LONGEST_PAUSE_S`].

/// What a slice takes at least: until it counts, and from then on. Longer than requests wait in the queue of a
/// device that is fast enough for the choice to matter.
const LEAD_NS: u64 = 5_000_000;
const COUNTED_NS: u64 = 9_000_000;
/// A slice that takes longer than this has no result: mappings have become rare.
const LONGEST_NS: u64 = 2 * (LEAD_NS + COUNTED_NS);
/// With fewer looks in the part of the first slice that counts, nothing is tried: the noise would decide.
const BUSY: u32 = 6;
const PAIRS: usize = 6;
/// In so many pairs copies may seem slow because the pools grow.
const COLD: usize = 2;
const SECOND_NS: u64 = 1_000_000_000;
const LONGEST_PAUSE_S: u64 = 16;

/// How many times as fast another way has to be: more than the noise of a trial.
const FASTER: f64 = 1.08;
/// The same, or its inverse, if two pairs in a row are to end a trial early.
const CLEARLY: f64 = 1.2;

/// How it is chosen which mappings are copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Way {
    /// By the calibration, cell by cell, and by the waits.
    Calibrated,
    /// All are.
    Copies,
    /// None is.
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
    /// When it began to count, and what had been done then.
    from: Option<(u64, Done)>,
    /// The looks since then.
    looks: u32,
}

/// A trial of another way.
struct Trial {
    other: Way,
    /// Bytes per nanosecond: in turn of the way before, and of the other.
    rates: [f64; 2 * PAIRS],
    slices: usize,
}

/// The trials of a device.
pub(super) struct Trials {
    /// The way between trials; if it is not the calibrated one, by how many percent it is faster.
    way: Way,
    percent: u32,
    trial: Option<Trial>,
    /// None, between trials.
    slice: Option<Slice>,
    due_ns: u64,
    pause_s: u64,
    /// Whether the last trial was of what is less like the way before.
    opposite: bool,
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
            opposite: false,
        }
    }

    /// The way to go now.
    pub(super) fn way(&self) -> Way {
        match &self.trial {
            Some(trial) if trial.slices % 2 == 1 => trial.other,
            _ => self.way,
        }
    }

    /// By how many percent another way than the calibrated one is faster, if one is.
    pub(super) fn faster(&self) -> Option<u32> {
        (self.way != Way::Calibrated).then_some(self.percent)
    }

    /// Whether [`step`](Self::step) needs to know what is done.
    pub(super) fn counts(&self) -> bool {
        self.slice.is_some()
    }

    /// Goes on, now and then; `done`: what has been done since any time before.
    pub(super) fn step(&mut self, now_ns: u64, done: Done) {
        let Some(slice) = &mut self.slice else {
            if now_ns >= self.due_ns {
                self.slice = Some(Slice::new(now_ns));
            }
            return;
        };
        let since_ns = now_ns.saturating_sub(slice.began_ns);
        if since_ns > LONGEST_NS {
            return self.stop();
        }
        let Some((from_ns, before)) = slice.from else {
            if since_ns >= LEAD_NS {
                slice.from = Some((now_ns, done));
            }
            return;
        };
        slice.looks += 1;
        let took_ns = now_ns.saturating_sub(from_ns);
        if took_ns < COUNTED_NS {
            return;
        }
        let done = done.since(before);
        if done.bytes() == 0 || self.trial.is_none() && slice.looks < BUSY {
            return self.stop();
        }
        self.slice = Some(Slice::new(now_ns));
        let (way, opposite) = (self.way, !self.opposite);
        let trial = self.trial.get_or_insert_with(|| Trial {
            other: way.other(done, opposite),
            rates: [0.0; 2 * PAIRS],
            slices: 0,
        });
        trial.rates[trial.slices] = done.bytes() as f64 / took_ns as f64;
        trial.slices += 1;
        if let Some(times) = trial.result() {
            self.end(now_ns, times);
        }
    }

    /// Ends the trial that runs, if any, without a result.
    pub(super) fn stop(&mut self) {
        (self.slice, self.trial) = (None, None);
    }

    /// Ends the trial: the other way was so many times as fast.
    fn end(&mut self, now_ns: u64, times: f64) {
        let Some(Trial { other, .. }) = self.trial.take() else { return };
        let before = self.way;
        let (way, times) = if times >= FASTER { (other, times) } else { (before, 1.0 / times) };
        // What is not shown to be faster is done as calibrated.
        self.way = if times >= FASTER { way } else { Way::Calibrated };
        self.percent = ((times - 1.0) * 100.0).round() as u32;
        self.pause_s =
            if self.way == before { (2 * self.pause_s).clamp(1, LONGEST_PAUSE_S) } else { 1 };
        self.due_ns = now_ns.saturating_add(self.pause_s * SECOND_NS);
        self.opposite = !self.opposite;
        self.slice = None;
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

    /// Another way, where this one does so much: the opposite of what it mostly does, or the other that is left.
    fn other(self, done: Done, opposite: bool) -> Way {
        let copies = done.copied > done.mapped;
        match self {
            Way::Calibrated if copies != opposite => Way::Copies,
            Way::Calibrated => Way::Maps,
            Way::Copies if opposite => Way::Maps,
            Way::Maps if opposite => Way::Copies,
            _ => Way::Calibrated,
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
        Slice { began_ns, from: None, looks: 0 }
    }
}

impl Trial {
    /// How many times as fast the other way is, once that is known.
    fn result(&self) -> Option<f64> {
        let (pairs, rest) = self.rates[..self.slices].as_chunks::<2>();
        if !rest.is_empty() {
            return None;
        }
        let clear = pairs.last_chunk::<2>().is_some_and(|last| {
            last.iter().all(|[before, other]| *other >= CLEARLY * before)
                || pairs.len() > COLD
                    && last.iter().all(|[before, other]| CLEARLY * other <= *before)
        });
        let counted = match pairs.len() {
            PAIRS => &pairs[COLD..],
            pairs_so_far if clear => &pairs[pairs_so_far - 2..],
            _ => return None,
        };
        let logs = counted.iter().map(|[before, other]| (other / before).ln());
        Some((logs.sum::<f64>() / counted.len() as f64).exp())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LOOK_NS: u64 = 200_000;

    /// Mappings that go at some rate, as calibrated without copies.
    struct Load {
        trials: Trials,
        now_ns: u64,
        done: Done,
        noise: u64,
    }

    impl Load {
        fn new() -> Load {
            Load { trials: Trials::new(), now_ns: 7, done: Done::default(), noise: 1 }
        }

        /// For so many milliseconds mappings take turns at `rate`, in MB/s, by way; returns how long they went
        /// each way, in milliseconds.
        fn run(&mut self, ms: u64, rate: impl Fn(Way) -> u64) -> [u64; 3] {
            let mut went_ns = [0; 3];
            for _ in 0..ms * 1_000_000 / LOOK_NS {
                let way = self.trials.way();
                went_ns[way as usize] += LOOK_NS;
                self.now_ns += LOOK_NS;
                let bytes = rate(way) * LOOK_NS / 1000;
                match way {
                    Way::Copies => self.done.copied += bytes,
                    _ => self.done.mapped += bytes,
                }
                self.trials.step(self.now_ns, self.done);
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
        assert_eq!((load.trials.way(), load.trials.faster()), (Way::Copies, Some(40)));
        let went = load.run(60_000, by_way(1000, 1400, 1000));
        assert_eq!((load.trials.way, load.trials.faster()), (Way::Copies, Some(40)));
        assert!(went[1] > 59_500, "{went:?}");
        // A rate of its own: it is done as calibrated, after the next trial.
        load.run(17_000, by_way(1000, 1000, 1000));
        assert_eq!((load.trials.way, load.trials.faster()), (Way::Calibrated, None));
        // It is not only copies that are tried.
        load.run(3_000, by_way(1000, 1000, 1300));
        assert_eq!((load.trials.way, load.trials.faster()), (Way::Maps, Some(30)));
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
        let (mut load, mut went) = (Load::new(), [0; 3]);
        for _ in 0..100_000 / 15 {
            let noisy = load.noisy();
            let some = load.run(15, |way| noisy(by_way(1000, 1000, 1000)(way)));
            went.iter_mut().zip(some).for_each(|(sum, some)| *sum += some);
        }
        assert!(went[0] > 60_000, "{went:?}");
        // And what is worse is never kept.
        let (mut load, mut went) = (Load::new(), [0; 3]);
        for _ in 0..100_000 / 15 {
            let noisy = load.noisy();
            let some = load.run(15, |way| noisy(by_way(1000, 700, 700)(way)));
            went.iter_mut().zip(some).for_each(|(sum, some)| *sum += some);
        }
        assert!(went[0] > 95_000, "{went:?}");
    }

    #[test]
    fn pools_that_grow_do_not_count() {
        let mut load = Load::new();
        // The first two slices of copies.
        let cold_ns = 4 * (LEAD_NS + COUNTED_NS + LOOK_NS) / 1_000_000;
        load.run(cold_ns, by_way(1000, 200, 1000));
        assert!(load.trials.trial.is_some());
        load.run(200, by_way(1000, 1500, 1000));
        assert_eq!((load.trials.way, load.trials.faster()), (Way::Copies, Some(50)));
    }

    #[test]
    fn nothing_is_tried_where_mappings_are_rare() {
        let mut trials = Trials::new();
        for at in 0..1000 {
            trials.step(at * 2_000_000, Done { copied: 0, mapped: at << 20 });
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
        for at in [u64::MAX, 0, 1 << 40, u64::MAX, 5] {
            for _ in 0..100 {
                trials.step(at, Done { copied: at, mapped: u64::MAX - at });
                trials.step(at.wrapping_add(LEAD_NS), Done::default());
            }
        }
        assert_eq!(trials.way, Way::Calibrated);
    }
}
