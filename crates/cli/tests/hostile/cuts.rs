//! Power cuts: of the disk, a file of FUSE, what was written since its last flush may be there or not. Whatever
//! is left, it has all that the device has completed as durable.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    common::Place,
    fuse::{Event, Fuse},
    guest::{BASE, Session},
    honest::Device,
    service::Service,
    wire::request::SET_CONFIG,
    writer::{
        CONFIG_WCE, FLUSH, Kind, LONGEST, OK, Random, Request, SECTOR, WRITE_ZEROES, Writer, word,
        word_of,
    },
};

/// As many as are looked at.
const SECTORS: u64 = 128;
/// Requests of a driver.
const REQUESTS: usize = 250;
/// How many cuts of each moment leave a part of what was written last.
const PARTS: usize = 4;

/// When a completion promises that a write is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// It has not accepted flushes: with each write.
    NoFlush,
    /// With a flush.
    Flush,
    /// It changes between the two.
    Chosen,
}

/// What a driver has seen.
#[derive(Default)]
struct Seen {
    /// What filled a sector, write by write.
    written: BTreeMap<u64, Vec<u64>>,
    /// The last write of each sector that is completed, by its place among these.
    completed: BTreeMap<u64, usize>,
    /// From so many events on this write of the sector, or a later one, is on the disk.
    durable: Vec<(usize, u64, usize)>,
}

impl Seen {
    fn is_durable(&mut self, since: usize, sectors: impl IntoIterator<Item = (u64, usize)>) {
        self.durable.extend(sectors.into_iter().map(|(sector, at)| (since, sector, at)));
    }

    /// The last write of each sector, each of which is under way or completed.
    fn last(&self, sectors: Range<u64>) -> Vec<(u64, usize)> {
        sectors.map(|sector| (sector, self.written[&sector].len() - 1)).collect()
    }
}

/// A driver at work.
struct Work<'a> {
    fuse: &'a Fuse,
    writer: Writer,
    random: Random,
    mode: Mode,
    /// Whether a write is durable when it completes.
    through: bool,
    seen: Seen,
    /// Of the writes under way, whether they were submitted with `through`, by their numbers; what each flush under way
    /// makes durable.
    were_through: BTreeMap<u64, bool>,
    flushes: BTreeMap<u64, BTreeMap<u64, usize>>,
    number: u64,
}

impl Work<'_> {
    /// The next request, if it can be made now.
    fn next(&mut self) -> bool {
        self.number += 1;
        let number = self.number;
        let kind = match self.random.below(10) {
            0 if self.mode != Mode::NoFlush => Kind::Flush,
            1 => Kind::Zero,
            _ => Kind::Write,
        };
        let count = if self.random.below(2) == 0 { 1 } else { LONGEST };
        let sector = self.random.below(SECTORS / count) * count;
        let request = Request { kind, sector, count, number };
        let request =
            if kind == Kind::Flush { Request { number, ..Request::FLUSH } } else { request };
        if !self.writer.admits(&request) {
            return false;
        }
        for sector in request.sectors() {
            let word = if kind == Kind::Zero { 0 } else { word(sector, number) };
            self.seen.written.entry(sector).or_insert_with(|| vec![0]).push(word);
        }
        match kind {
            Kind::Flush => drop(self.flushes.insert(number, self.seen.completed.clone())),
            _ => drop(self.were_through.insert(number, self.through)),
        }
        self.writer.submit(request);
        true
    }

    fn completed(&mut self, (request, status): (Request, u8)) {
        assert_eq!(status, OK, "{request:?}");
        let since = self.fuse.recorded();
        if request.kind == Kind::Flush {
            let flushed = self.flushes.remove(&request.number).unwrap();
            return self.seen.is_durable(since, flushed);
        }
        let last = self.seen.last(request.sectors());
        self.seen.completed.extend(last.iter().copied());
        if self.were_through.remove(&request.number).unwrap() {
            self.seen.is_durable(since, last);
        }
    }

    /// The byte `writeback` of the configuration space.
    fn choose(&mut self, through: bool) {
        let mut payload: Vec<u8> = [32_u32, 1, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
        payload.push(u8::from(!through));
        assert!(self.writer.session.client.set(SET_CONFIG, &payload, &[]));
        self.through = through;
    }

    fn run(mut self) -> Seen {
        for at in 0..REQUESTS {
            if self.mode == Mode::Chosen && at % 50 == 0 {
                // Of what is under way, the mode could be either.
                self.finish();
                self.choose(at % 100 == 0);
            }
            while !self.next() {
                let taken = self.writer.wait();
                self.completed(taken);
            }
        }
        self.finish();
        self.seen
    }

    fn finish(&mut self) {
        while self.writer.busy() > 0 {
            let taken = self.writer.wait();
            self.completed(taken);
        }
    }
}

/// Looks at what each cut could leave.
fn check(seen: &Seen, journal: &[Event], random: &mut Random, name: &str) {
    let mut durable: BTreeMap<u64, u64> = (0..SECTORS).map(|sector| (sector, 0)).collect();
    // Written since the last flush: a sector is never torn.
    let mut later: Vec<(u64, u64)> = Vec::new();
    let mut least: BTreeMap<u64, usize> = BTreeMap::new();
    let mut promises = seen.durable.iter().peekable();
    let mut cuts = 0;
    for (at, event) in journal.iter().map(Some).chain([None]).enumerate() {
        while let Some(&(_, sector, write)) = promises.next_if(|(since, ..)| *since <= at) {
            let least = least.entry(sector).or_default();
            *least = write.max(*least);
        }
        for part in 0..PARTS + 2 {
            // All of it, nothing of it, or a part.
            let keeps = |random: &mut Random| part == 0 || part > 1 && random.below(2) == 0;
            let mut left = durable.clone();
            left.extend(later.iter().copied().filter(|_| keeps(random)));
            for (sector, &least) in &least {
                let word = left[sector];
                let newer = &seen.written[sector][least..];
                assert!(
                    newer.contains(&word),
                    "{name}: a cut after {at} of {} events leaves {word:x} in sector {sector}, where \
                     {:x} is durable",
                    journal.len(),
                    newer[0]
                );
            }
            cuts += 1;
        }
        match event {
            Some(Event::Write(place, bytes)) => {
                assert!(place % SECTOR == 0 && bytes.len() % SECTOR == 0);
                let first = (place / SECTOR) as u64;
                later.extend((first..).zip(bytes.chunks(SECTOR).map(word_of)));
            }
            Some(Event::Flush) => durable.extend(later.drain(..)),
            None => {}
        }
    }
    assert!(promises.next().is_none() && !least.is_empty(), "{name}: nothing was durable");
    eprintln!("{name}: {} events, {} promises, {cuts} cuts", journal.len(), seen.durable.len());
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_power_cut_leaves_what_was_completed_as_durable() {
    // Where the cache is bypassed Linux does not pass to FUSE's server that a write is to be
    // durable.
    for (bypasses, more) in [
        (false, &["--disk-buffers", "own"][..]),
        (false, &["--disk-buffers", "guest"]),
        (false, &["--direct"]),
        (true, &["--disk-buffers", "own"]),
        (true, &["--disk-buffers", "guest"]),
    ] {
        let place = Place::new();
        let fuse = Fuse::mount(&place.path("fuse"), 1 << 20);
        if bypasses {
            fuse.bypass_the_cache();
        }
        let service = Service::with_more(place, Device::Disk, "fuse/image", more);
        for (seed, mode) in [Mode::NoFlush, Mode::Flush, Mode::Chosen].into_iter().enumerate() {
            let features = match mode {
                Mode::NoFlush => 0,
                Mode::Flush => FLUSH,
                Mode::Chosen => FLUSH | CONFIG_WCE,
            };
            let wanted = WRITE_ZEROES | features;
            let session = Session::open_at(BASE, &service.path("hostile"), wanted);
            let mut writer = Writer::start(session);
            // What other drivers have left goes.
            assert_eq!(writer.one(Kind::Zero, 0, SECTORS, 0), OK);
            fuse.record();
            let work = Work {
                fuse: &fuse,
                writer,
                random: Random(seed as u64),
                mode,
                through: mode == Mode::NoFlush,
                seen: Seen::default(),
                were_through: BTreeMap::new(),
                flushes: BTreeMap::new(),
                number: 0,
            };
            let seen = work.run();
            let name = format!("{more:?}, {bypasses}, {mode:?}");
            check(&seen, &fuse.journal(), &mut Random(seed as u64), &name);
        }
        service.end();
    }
}
