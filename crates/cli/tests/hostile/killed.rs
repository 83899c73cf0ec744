//! Ends that are killed at work, again and again: a service, whose next process resumes, and a
//! driver. What was completed is on the disk; what was under way is, or is not, and is completed at
//! most once.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    common::{LIMIT, Place},
    fuse::Fuse,
    guest::{BASE, PLATFORM, Session},
    honest::Device,
    service::{Service, Target},
    successor::{End, Line},
    writer::{FLUSH, Kind, LONGEST, OK, Random, Request, SECTOR, Writer, word, word_of},
};

/// How often, in an ordinary run and in a long one.
const TIMES: u64 = 20;
const MANY: u64 = 1000;
/// The sectors that are written, which no other driver of the tests uses.
const FIRST: u64 = 4096;
const SECTORS: u64 = 128;

/// A driver's writes.
struct Load {
    writer: Writer,
    random: Random,
    number: u64,
    /// Of each sector the last write that is completed, and the one that is under way.
    completed: BTreeMap<u64, u64>,
    under_way: BTreeMap<u64, u64>,
}

impl Load {
    fn new(writer: Writer, seed: u64) -> Load {
        let (completed, under_way) = (BTreeMap::new(), BTreeMap::new());
        Load { writer, random: Random(seed), number: 0, completed, under_way }
    }

    /// The next write, if it can begin.
    fn next(&mut self) -> Option<Request> {
        let count = if self.random.below(2) == 0 { 1 } else { LONGEST };
        let sector = FIRST + self.random.below(SECTORS / count) * count;
        let request = Request { kind: Kind::Write, sector, count, number: self.number + 1 };
        if !self.writer.admits(&request) {
            return None;
        }
        self.number += 1;
        Some(request)
    }

    fn begin(&mut self, request: Request) {
        self.under_way.extend(request.sectors().map(|sector| (sector, request.number)));
        self.writer.submit(request);
    }

    fn begin_next(&mut self) {
        if let Some(request) = self.next() {
            self.begin(request);
        }
    }

    /// Takes what is completed; returns what that was.
    fn take(&mut self) -> Vec<Request> {
        let mut taken = Vec::new();
        while let Some((request, status)) = self.writer.take() {
            assert_eq!(status, OK, "{request:?}");
            for sector in request.sectors() {
                assert_eq!(self.under_way.remove(&sector), Some(request.number));
                self.completed.insert(sector, request.number);
            }
            taken.push(request);
        }
        taken
    }

    /// Checks what is on the disk.
    fn check(&self, image: &File) {
        for (&sector, &completed) in &self.completed {
            let found = found(image, sector);
            let under_way = self.under_way.get(&sector);
            let fits = found == word(sector, completed)
                || under_way.is_some_and(|&number| found == word(sector, number));
            assert!(
                fits,
                "sector {sector}: {found:x}, completed {completed}, under way {under_way:?}"
            );
        }
    }
}

/// What fills a sector.
fn found(image: &File, sector: u64) -> u64 {
    let mut bytes = [0; SECTOR];
    image.read_exact_at(&mut bytes, sector * SECTOR as u64).unwrap();
    word_of(&bytes)
}

fn services_are_killed(times: u64) {
    let blk = ["blk", "--socket", "disk", "--image", "disk.img"];
    let mut line = Line::start(&blk, End::Killed);
    let image = File::open(line.path("disk.img")).unwrap();
    let session = Session::open_at(BASE, &line.path("disk"), FLUSH);
    let mut load = Load::new(Writer::start_recorded(session), 1);
    let mut when = Random(2);
    let mut resumed = 0;
    for time in 0..times {
        let (mut left, begun) = (1 + when.below(60), Instant::now());
        while left > 0 {
            load.begin_next();
            left = left.saturating_sub(load.take().len() as u64);
            assert!(begun.elapsed() < LIMIT, "it stands still after {time} kills");
        }
        // At any point of what is under way: nothing comes between that and the kill.
        line.fronts_settle();
        (0..when.below(20)).for_each(|_| load.begin_next());
        (0..when.below(2000)).for_each(|_| std::hint::spin_loop());
        line.kill();
        line.follow(|| {
            load.take();
            load.check(&image);
        });
        resumed += load.writer.busy();
    }
    let begun = Instant::now();
    while load.writer.busy() > 0 {
        load.take();
        assert!(begun.elapsed() < LIMIT, "{} requests are lost", load.writer.busy());
    }
    load.check(&image);
    // The kills met requests under way.
    assert!(resumed as u64 >= times, "{resumed} requests were resumed");
    // No other request is completed after that.
    assert!(load.writer.session.stop(0).is_some());
    assert!(load.take().is_empty());
    eprintln!("{times} kills, {} writes, {resumed} of them resumed", load.number);
}

#[test]
fn a_service_that_is_killed_at_work_loses_nothing_and_repeats_nothing() {
    services_are_killed(TIMES);
}

#[test]
#[ignore = "long"]
fn a_service_that_is_killed_a_thousand_times() {
    services_are_killed(MANY);
}

/// A local disk completes requests in their order, mostly: what is left then is the end of the ring, which the used
/// index alone shows. Here one is left from before others that are completed, and whose descriptors
/// are used again.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_request_that_a_killed_service_left_behind_others_is_completed_once_by_the_next() {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 4 << 20);
    let image = place.path("fuse/image");
    let blk = ["blk", "--socket", "disk", "--image", image.to_str().unwrap()];
    let mut line = Line::start(&blk, End::Killed);
    let session = Session::open_at(BASE, &line.path("disk"), FLUSH);
    let mut writer = Writer::start_recorded(session);
    for (time, kind) in [Kind::Read, Kind::Write].into_iter().cycle().take(6).enumerate() {
        let number = time as u64;
        // Far enough from what was read before and read ahead.
        let sector = FIRST - 512 * (number + 1);
        let left = Request { kind, sector, count: LONGEST, number };
        let at = sector as usize * SECTOR;
        fuse.hold_bytes(at..at + LONGEST as usize * SECTOR);
        writer.submit(left);
        fuse.await_held(1);
        // While a write is under way Linux begins no other to the same file of FUSE.
        let other = if kind == Kind::Read { Kind::Write } else { Kind::Read };
        let other = Request { kind: other, sector: FIRST, count: LONGEST, number };
        for _ in 0..20 {
            writer.submit(other);
            assert_eq!(writer.wait(), (other, OK));
        }
        line.fronts_settle();
        line.kill();
        fuse.hold(false);
        line.follow(|| assert!(writer.take().is_none(), "{left:?} was not done"));
        assert_eq!(writer.wait(), (left, OK));
        if kind == Kind::Write {
            assert_eq!(writer.one(Kind::Read, sector, LONGEST, 0), OK);
            assert!(writer.words.iter().zip(left.sectors()).all(|(&w, s)| w == word(s, number)));
        }
    }
    // No other request is completed after that.
    assert!(writer.session.stop(0).is_some());
    assert!(writer.take().is_none());
}

/// Names the folder of the service to a driver that is a process of its own, which is to be killed.
const DRIVER: &str = "RINGFENCE_TEST_DRIVER";
const SEED: &str = "RINGFENCE_TEST_DRIVER_SEED";
/// Of what it says: a write begins, or is completed. Its first sector, their count, its number.
const BEGINS: u64 = 1;
const COMPLETED: u64 = 2;
const LINE: usize = 4 * 8;

/// Writes until it is killed, and says so before each write and after it.
fn driver(folder: &Path, seed: u64) -> ! {
    let session = Session::open_at(BASE, &folder.join("hostile"), PLATFORM | FLUSH);
    let mut load = Load::new(Writer::start(session), seed);
    // Numbers of different drivers differ.
    load.number = seed << 20;
    let mut said = File::create(folder.join(seed.to_string())).unwrap();
    let mut say = |what: u64, Request { sector, count, number, .. }: Request| {
        let line = [what, sector, count, number].map(u64::to_le_bytes).concat();
        said.write_all(&line).unwrap();
    };
    loop {
        if let Some(request) = load.next() {
            say(BEGINS, request);
            load.begin(request);
        }
        load.take().into_iter().for_each(|request| say(COMPLETED, request));
    }
}

/// Starts a driver, and kills it once it has said so much.
fn killed_driver(test: &str, target: &Target, seed: u64, lines: u64) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(DRIVER, &target.folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (said, begun) = (target.folder.join(seed.to_string()), Instant::now());
    let len = || fs::metadata(&said).map_or(0, |about| about.len());
    while len() < lines * LINE as u64 {
        assert!(child.try_wait().unwrap().is_none(), "the driver has ended by itself");
        assert!(begun.elapsed() < LIMIT, "the driver stands still at {}", len());
        std::thread::sleep(Duration::from_micros(100));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn drivers_are_killed(test: &str, times: u64) {
    if let (Some(folder), Ok(seed)) = (std::env::var_os(DRIVER), std::env::var(SEED)) {
        driver(Path::new(&folder), seed.parse().unwrap());
    }
    let mut service = Service::start(Device::Guarded);
    let image = File::open(service.path("disk.img")).unwrap();
    let mut when = Random(3);
    // Of each sector the last write that is completed, and those that began later.
    let mut completed: BTreeMap<u64, u64> = BTreeMap::new();
    let mut later: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for seed in 1..=times {
        let lines = 1 + when.below(400);
        // The next front end is served once no write of this one can come any more.
        service
            .attack("a driver that is killed", |target| killed_driver(test, target, seed, lines));
        let said = fs::read(service.path(&seed.to_string())).unwrap();
        for line in said.chunks_exact(LINE) {
            let word = |at: usize| u64::from_le_bytes(line[8 * at..][..8].try_into().unwrap());
            let (what, number) = (word(0), word(3));
            for sector in word(1)..word(1) + word(2) {
                if what == BEGINS {
                    later.entry(sector).or_default().push(number);
                    continue;
                }
                assert_eq!(what, COMPLETED);
                later.remove(&sector);
                completed.insert(sector, number);
            }
        }
        for sector in FIRST..FIRST + SECTORS {
            let (found, later) = (found(&image, sector), later.entry(sector).or_default());
            let last = completed.get(&sector).map_or(0, |&number| word(sector, number));
            let fits = found == last || later.iter().any(|&n| found == word(sector, n));
            assert!(fits, "sector {sector}: {found:x}, completed {last:x}, later {later:x?}");
            // From now on that is what there is: none of the others comes any more.
            later.clear();
            if found != 0 {
                completed.insert(sector, found & 0xffff_ffff);
            }
        }
    }
    service.end();
}

#[test]
fn a_driver_that_is_killed_at_work_has_what_was_completed_and_nothing_comes_later() {
    drivers_are_killed(
        "killed::a_driver_that_is_killed_at_work_has_what_was_completed_and_nothing_comes_later",
        TIMES,
    );
}

#[test]
#[ignore = "long"]
fn a_driver_that_is_killed_a_thousand_times() {
    drivers_are_killed("killed::a_driver_that_is_killed_a_thousand_times", MANY);
}
