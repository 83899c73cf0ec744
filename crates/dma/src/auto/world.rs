//! Tests in a simulated world with known costs of mappings.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::{Direction, bounce::Written, map_call::Sync};

const MS: u64 = 1_000_000;

/// What a mapping costs: time of the whole pipeline, and CPU time of the thread.
#[derive(Clone, Copy)]
struct Cost {
    wall_ns: u64,
    cpu_ns: u64,
}

/// A driver with a number of mappings in flight, which come back in order.
struct World {
    auto: Auto,
    tally: Tally,
    depth: usize,
    now_ns: u64,
    cpu_ns: u64,
    bytes: u64,
    under_way: VecDeque<(Choice, u64, Cost)>,
    random: u64,
    /// Percent by which a cost may be off.
    noise: u64,
    /// Mappings that trials made in the way that was not in force, and all mappings in trials.
    other_way: u64,
    in_trials: u64,
}

impl World {
    fn new(depth: usize, noise: u64) -> World {
        World {
            auto: Auto::new(),
            tally: Tally::default(),
            depth,
            now_ns: 5 * MS,
            cpu_ns: 0,
            bytes: 0,
            under_way: VecDeque::new(),
            random: 42,
            noise,
            other_way: 0,
            in_trials: 0,
        }
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn io(&mut self, direction: Direction, len: u64, costs: impl Fn(bool) -> Cost) {
        let cell = Cell::of(direction, len, 1);
        let (sync, written) = (Sync::Later, Written::Reported);
        let choice = self.auto.choose(cell, || Kind { direction, len, runs: 1, sync, written });
        let now_ns = self.now_ns;
        self.auto.note(cell, choice.copy, &self.tally, || now_ns, || false);
        if choice.slice != Slice::NONE {
            self.in_trials += 1;
            self.other_way += u64::from(choice.copy != self.copies(direction, len));
        }
        self.bytes += len;
        self.under_way.push_back((choice, len, costs(choice.copy)));
        if self.under_way.len() < self.depth {
            return;
        }
        let (choice, len, cost) = self.under_way.pop_front().unwrap();
        let percent = 100 - self.noise + self.random() % (2 * self.noise + 1);
        self.now_ns += cost.wall_ns * percent / 100;
        self.cpu_ns += cost.cpu_ns;
        let (now_ns, cpu_ns, bytes) = (self.now_ns, self.cpu_ns, self.bytes);
        self.auto.unmapping(choice.slice, len, || now_ns, || mark(1, cpu_ns, bytes));
    }

    /// Reads of 64 KiB for `ms` milliseconds.
    fn read(&mut self, ms: u64, costs: impl Fn(bool) -> Cost) {
        let until_ns = self.now_ns + ms * MS;
        while self.now_ns < until_ns {
            self.io(Direction::FromDevice, 65536, &costs);
        }
    }

    fn cell(&self, direction: Direction, len: u64) -> CellChoice {
        let choices = self.auto.choices(&self.tally);
        let cell = Cell::of(direction, len, 1);
        let found = |choice: &CellChoice| {
            Cell::of(choice.direction, choice.bytes, 1 + u64::from(choice.scattered)) == cell
        };
        choices.cells.into_iter().find(found).unwrap()
    }

    fn copies(&self, direction: Direction, len: u64) -> bool {
        self.auto.judge.lock().choice(Cell::of(direction, len, 1)).is_some_and(|(copy, _)| copy)
    }

    fn reads(&self) -> CellChoice {
        self.cell(Direction::FromDevice, 65536)
    }
}

/// Mappings with these times as copies and as maps.
fn wall(copy_ns: u64, map_ns: u64) -> impl Fn(bool) -> Cost + Copy {
    move |copy| {
        let wall_ns = if copy { copy_ns } else { map_ns };
        Cost { wall_ns, cpu_ns: wall_ns }
    }
}

#[test]
fn the_faster_way_is_found_within_fifty_milliseconds() {
    for depth in [1, 4, 64] {
        for (copy_ns, map_ns) in [(5_000, 10_000), (10_000, 5_000), (9_000, 10_000), (9, 10)] {
            let (copy_ns, map_ns) = (copy_ns.max(500), map_ns.max(600));
            let mut world = World::new(depth, 10);
            world.read(50, wall(copy_ns, map_ns));
            let reads = world.reads();
            assert_eq!(reads.copies, copy_ns < map_ns, "{depth} deep: {reads:?}");
            let ChoiceReason::Faster { ratio, .. } = reads.reason else { panic!("{reads:?}") };
            let expected = copy_ns.max(map_ns) as f64 / copy_ns.min(map_ns) as f64;
            assert!((ratio / expected - 1.0).abs() < 0.1, "{ratio}, not {expected}");
        }
    }
}

#[test]
fn trials_become_rare_and_the_loss_is_bounded() {
    let mut world = World::new(64, 10);
    let costs = wall(8_000, 10_000);
    world.read(200, costs);
    let (before, in_trials, other_way) = (world.now_ns, world.in_trials, world.other_way);
    world.read(20_000, costs);
    assert!(world.reads().copies);
    let mappings = (world.now_ns - before) / 8_000;
    let (in_trials, other_way) = (world.in_trials - in_trials, world.other_way - other_way);
    assert!(in_trials > 0, "none are left");
    assert!(in_trials * 33 < mappings, "{in_trials} of {mappings} in trials");
    assert!(other_way * 60 < mappings, "{other_way} of {mappings} in the slow way");
    // The most that it may lose against the faster way alone.
    let io = world.bytes / 65536;
    assert!(world.now_ns < io * 8_000 * 102 / 100, "{} ns for {io}", world.now_ns);
}

#[test]
fn where_a_trial_takes_long_the_next_is_long_in_coming() {
    // Filling the pipeline takes a slice as long as other slices take in total.
    let mut world = World::new(128, 10);
    let costs = wall(800_000, 1_000_000);
    world.read(6_000, costs);
    let (before, in_trials) = (world.now_ns, world.in_trials);
    world.read(120_000, costs);
    let mappings = (world.now_ns - before) / 800_000;
    let in_trials = world.in_trials - in_trials;
    assert!(in_trials > 0 && in_trials * 25 < mappings, "{in_trials} of {mappings} in trials");
}

#[test]
fn another_world_is_found_out() {
    let mut world = World::new(16, 10);
    world.read(30_000, wall(5_000, 10_000));
    assert!(world.reads().copies);
    // The change of pace shows it.
    world.read(1000, wall(20_000, 10_000));
    assert!(!world.reads().copies, "{:?}", world.reads());
    world.read(30_000, wall(20_000, 10_000));
    // The pace of the way in force does not: a trial shows it, when it is due.
    world.read(8_000, wall(5_000, 10_000));
    assert!(world.reads().copies, "{:?}", world.reads());
}

#[test]
fn of_equals_the_cheaper_is_taken() {
    for (copy_cpu_ns, map_cpu_ns) in [(1000, 2000), (2000, 1000)] {
        let mut world = World::new(32, 10);
        let costs = |copy: bool| {
            let cpu_ns = if copy { copy_cpu_ns } else { map_cpu_ns };
            Cost { wall_ns: 25_000, cpu_ns }
        };
        world.read(400, costs);
        let reads = world.reads();
        assert_eq!(reads.copies, copy_cpu_ns < map_cpu_ns, "{reads:?}");
        let ChoiceReason::Cheaper { copy_ns, map_ns, .. } = reads.reason else {
            panic!("{reads:?}")
        };
        assert!(copy_ns.abs_diff(copy_cpu_ns) < 100 && map_ns.abs_diff(map_cpu_ns) < 100);
    }
}

#[test]
fn where_trials_show_no_difference_the_calibration_decides() {
    for copies in [true, false] {
        let mut world = World::new(32, 10);
        let cost = CopyCost { bytes: 1 << 20, in_ns: 10, out_ns: 10 };
        let map_ns = if copies { 20 } else { 5 };
        world.auto.restart(Calibration {
            copies: vec![cost],
            map_call_ns: Some(0),
            map_run_ns: Some(map_ns),
            map_lone_ns: Some(map_ns),
            ..Calibration::default()
        });
        // At first the other way is faster.
        world.io(Direction::FromDevice, 65536, wall(10_000, 10_000));
        let reason = ChoiceReason::Prior { copy_ns: 10, map_ns };
        assert_eq!((world.reads().copies, world.reads().reason), (copies, reason));
        world.read(100, if copies { wall(20_000, 10_000) } else { wall(10_000, 20_000) });
        assert_eq!(world.reads().copies, !copies);
        world.read(30_000, wall(10_000, 10_000));
        assert_eq!(world.reads().copies, copies);
        let ChoiceReason::Even { trials } = world.reads().reason else {
            panic!("{:?}", world.reads())
        };
        assert!(trials > 1);
    }
}

#[test]
fn a_machine_that_is_busy_with_other_things_is_seen_through() {
    let mut right = 0;
    for seed in 1..=30u64 {
        let mut world = World::new(64, 10);
        world.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let until_ns = world.now_ns + 400 * MS;
        while world.now_ns < until_ns {
            // Other threads get more than half of the time, in pieces of 3 ms: longer than a slice.
            if world.random().is_multiple_of(300) {
                world.now_ns += 3 * MS;
            }
            world.io(Direction::FromDevice, 65536, wall(8_000, 10_000));
        }
        right += u32::from(world.reads().copies);
    }
    assert!(right >= 27, "{right} of 30");
}

#[test]
fn cells_are_independent() {
    let mut world = World::new(32, 10);
    let until_ns = world.now_ns + 2000 * MS;
    while world.now_ns < until_ns {
        // Both ways of each take the same time as everything else in flight.
        match world.random() % 3 {
            0 => world.io(Direction::FromDevice, 65536, wall(5_000, 10_000)),
            1 => world.io(Direction::ToDevice, 65536, wall(10_000, 5_000)),
            _ => world.io(Direction::ToDevice, 4096, wall(1_000, 3_000)),
        }
    }
    assert!(world.copies(Direction::FromDevice, 65536));
    assert!(!world.copies(Direction::ToDevice, 65536));
    assert!(world.copies(Direction::ToDevice, 4096));
}

#[test]
fn a_cell_that_falls_silent_does_not_keep_others_from_being_tried() {
    let mut world = World::new(4, 0);
    // Just enough mappings to begin its first trial.
    (0..40).for_each(|_| world.io(Direction::ToDevice, 512, wall(1_000, 2_000)));
    assert_ne!(world.auto.slice.load(Relaxed), 0);
    world.read(1_500, wall(5_000, 10_000));
    assert!(world.reads().copies, "{:?}", world.reads());
}

#[test]
fn a_new_beginning_forgets_what_was_chosen_and_ignores_old_slices() {
    let mut world = World::new(4, 0);
    world.read(100, wall(5_000, 10_000));
    assert!(world.reads().copies);
    world.auto.restart(Calibration::default());
    assert_eq!(world.auto.choices(&world.tally).cells, []);
    let slice = world.auto.judge.lock().slice;
    let counted = world.auto.mappings.load(Relaxed);
    world.auto.unmapping(Slice(slice), 1, || 0, || mark(1, 1, 1));
    assert_eq!(world.auto.mappings.load(Relaxed), counted);
    world.read(100, wall(10_000, 5_000));
    assert!(!world.reads().copies);
    assert!(world.auto.judge.lock().slice > slice, "numbers go on");
}

#[test]
fn threads_choose_together_and_none_waits_for_another() {
    let auto = Auto::new();
    let now_ns = AtomicU64::new(0);
    let tallies: [Tally; 4] = core::array::from_fn(|_| Tally::default());
    let choose = |tally: &Tally| {
        for n in 0..20_000u64 {
            let cell = Cell::of(Direction::ToDevice, 512 << (n % 3), 1);
            let (direction, len, runs) = (cell.direction(), cell.bytes(), 1);
            let (sync, written) = (Sync::Later, Written::Reported);
            let choice = auto.choose(cell, || Kind { direction, len, runs, sync, written });
            // A copy takes half as long.
            let took_ns = if choice.copy { 2_000 } else { 4_000 };
            let now_ns = now_ns.fetch_add(took_ns, Relaxed);
            auto.note(cell, choice.copy, tally, || now_ns, || false);
            let clone = core::ptr::from_ref(tally).addr();
            auto.unmapping(choice.slice, len, || now_ns, || mark(clone, now_ns, n));
        }
    };
    std::thread::scope(|scope| {
        for tally in &tallies {
            scope.spawn(|| choose(tally));
        }
        // `choices` holds the judge's lock, and a thread that needs the judge meanwhile continues
        // without it.
        (0..100).for_each(|_| _ = auto.choices(&tallies[0]));
    });
    // All threads may have continued without it, if the one that held the lock had no CPU.
    choose(&tallies[0]);
    let sum = Tally::default();
    tallies.iter().for_each(|tally| tally.add_to(&sum));
    let cells = auto.choices(&sum).cells;
    assert_eq!(cells.iter().map(|cell| cell.copied + cell.mapped).sum::<u64>(), 100_000);
    assert!(cells.len() == 3 && cells.iter().all(|cell| cell.copied > 0), "{cells:?}");
}

#[test]
fn a_words_numbers_never_run_out() {
    assert_eq!(Order::next_slice(0), 1);
    assert_eq!(Order::next_slice(u32::MAX >> Word::SLICE_SHIFT), 1);
    let last = u32::MAX >> Word::SLICE_SHIFT;
    for copy in [false, true] {
        let choice = Word::new(copy, last).choice();
        assert_eq!(choice, Some(Choice { copy, slice: Slice(last) }));
    }
    assert_eq!(Word(0).choice(), None);
}

proptest! {
    #[test]
    fn it_is_never_wrong_about_what_is_clear(
        copy_ns in 1_000..40_000u64,
        percent in prop_oneof![40..88u64, 114..250u64],
        depth in 1..128usize,
        noise in 0..20u64,
    ) {
        let map_ns = copy_ns * percent / 100;
        let mut world = World::new(depth, noise);
        world.read(400, wall(copy_ns, map_ns));
        prop_assert_eq!(world.reads().copies, copy_ns < map_ns, "{:?}", world.reads());
    }

    #[test]
    fn absurd_clocks_do_no_harm(
        steps in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 0..400),
    ) {
        let auto = Auto::new();
        let tally = Tally::default();
        let cell = Cell::of(Direction::ToDevice, 4096, 1);
        for (now_ns, len, much) in steps {
            for _ in 0..if much { 64 } else { 1 } {
                let direction = Direction::ToDevice;
                let (sync, written) = (Sync::Now, Written::Unknown);
                let kind = || Kind { direction, len, runs: 1, sync, written };
                let choice = auto.choose(cell, kind);
                auto.note(cell, choice.copy, &tally, || now_ns, || false);
                auto.unmapping(choice.slice, len, || now_ns, || mark(1, len, now_ns));
            }
        }
        prop_assert!(auto.choices(&tally).cells.len() <= 1);
    }
}

#[test]
fn on_a_shared_cpu_what_copies_soon_is_copied_and_nothing_is_tried() {
    let cost = |bytes, ns| CopyCost { bytes, in_ns: ns, out_ns: ns };
    let calibration = Calibration {
        copies: vec![cost(4096, 600), cost(1 << 20, 100_000)],
        map_call_ns: Some(100),
        map_run_ns: Some(100),
        map_lone_ns: Some(100),
        ..Calibration::default()
    };
    let mut judge = Judge::new();
    judge.restart(calibration);
    let [small, large] = [4096, 1 << 20].map(|len| {
        let (sync, written) = (Sync::Later, Written::Reported);
        let cell = Cell::of(Direction::ToDevice, len, 1);
        let kind = Kind { direction: Direction::ToDevice, len, runs: 1, sync, written };
        assert!(!judge.first(cell, kind), "a map is cheaper");
        cell
    });
    let chosen = |order: Option<Order>| order.and_then(|order| order.cell);
    // A running trial ends, and its cell is as it was.
    assert_eq!(chosen(judge.look(small, 5 * MS, false)), Some((small, false)));
    assert_eq!(chosen(judge.look(large, 6 * MS, true)), Some((small, false)));
    assert_eq!(chosen(judge.look(small, 7 * MS, true)), Some((small, true)));
    assert_eq!(judge.choice(small), Some((true, ChoiceReason::Shared)));
    assert_eq!(chosen(judge.look(large, 7 * MS, true)), None, "it takes longer than a wake-up");
    // A moment without another thread on the CPU changes nothing.
    assert_eq!(chosen(judge.look(small, 8 * MS, false)), None);
    assert_eq!(chosen(judge.look(small, 106 * MS, false)), None);
    assert_eq!(chosen(judge.look(small, 108 * MS, false)), Some((small, false)));
    assert!(matches!(judge.choice(small), Some((false, ChoiceReason::Prior { .. }))));
    let tried = (109..).find_map(|ms| chosen(judge.look(small, ms * MS, false)));
    assert_eq!(tried, Some((small, false)), "a trial again");
}
