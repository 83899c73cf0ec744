//! A device whose process dies, at any of its stores, against the model of a device that never
//! does.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::{
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use proptest::prelude::*;
use ringfence_iommu::table::Limits;
use ringfence_mem::{Access, AccessError, HostSlice, SharedFile, Translate, Window};
use ringfence_virtq::{
    Desc,
    device::{self, Queue},
    driver,
    testing::{Ram, areas},
};

use self::common::{
    Bench, Endpoints,
    program::{Author, Program},
    range,
    twin::{Shape, Twin},
};
use super::{
    super::{Device, RequestQueue},
    crash::{self, Died},
    *,
};
use crate::wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Status, TAIL_LEN};

const BASE: u64 = 0x10_0000;
const SIZE: u16 = 8;
/// Where the buffers are: of each place of the ring, this many bytes, a request and the room for its reply.
const BUFFERS: u64 = BASE + 0x1000;
const BUFFER: u64 = 0x800;
const REPLY: u64 = 0x100;

/// Memory of which every write may be the last.
struct Mortal<'a>(&'a Ram);

impl Translate for Mortal<'_> {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        if access != Access::Read {
            crash::point();
        }
        self.0.slices(addr, len, access, each)
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.0.window(addr, len, access)
    }
}

/// Whether `part` of a process ends before it dies, which it does after `stores` more stores; sets
/// how many are left.
fn lives(stores: &mut u64, part: impl FnOnce()) -> bool {
    crash::after(*stores);
    let ended = catch_unwind(AssertUnwindSafe(part));
    *stores = crash::left();
    crash::after(u64::MAX);
    match ended {
        Ok(()) => true,
        Err(payload) if payload.is::<Died>() => false,
        Err(payload) => resume_unwind(payload),
    }
}

/// A guest, and the file that a process leaves to the next.
struct Guest {
    ram: Ram,
    driver: driver::Queue,
    at: device::RingConfig,
    file: OwnedFd,
    len: usize,
    /// Whether the journal could not go on.
    lost: Arc<AtomicBool>,
    queue: Option<RequestQueue<Endpoints>>,
    twin: Twin,
    sent: VecDeque<(u64, Vec<u8>, usize)>,
    next: u64,
    /// How many stores the process has left, by default.
    left: u64,
    deaths: u64,
}

impl Guest {
    fn new(shape: Shape, len: usize) -> Guest {
        let ram = Ram::new(BASE, 0x1000 + usize::from(SIZE) * BUFFER as usize);
        let (rings, at) = areas(&ram, BASE, SIZE, true);
        let driver = driver::QueueConfig { size: SIZE, event_idx: true, packed: false };
        let driver = driver::Queue::with_config(driver, rings).unwrap();
        let (file, fd) = SharedFile::create(len).unwrap();
        let twin = Twin::new(shape);
        let lost = Arc::new(AtomicBool::new(false));
        let mut guest = Guest {
            ram,
            driver,
            at,
            file: fd,
            len,
            lost,
            queue: None,
            twin,
            sent: VecDeque::new(),
            next: 0,
            left: u64::MAX,
            deaths: 0,
        };
        guest.set_journal(Journal::new(file).unwrap()).unwrap();
        let queue = Queue::new(at, &guest.ram).unwrap();
        guest.queue = Some(RequestQueue::new(Arc::clone(&guest.twin.device), queue));
        guest
    }

    fn set_journal(&self, journal: Journal) -> Result<(), JournalError> {
        let lost = Arc::clone(&self.lost);
        self.twin.device.set_journal(journal, move |_| lost.store(true, Relaxed))
    }

    fn map(&self) -> SharedFile {
        SharedFile::map(&self.file, 0, self.len as u64).unwrap()
    }

    /// Puts a request into the ring; false if it is full.
    fn send(&mut self, request: &[u8], room: usize) -> bool {
        if self.sent.len() == usize::from(SIZE) / 2 || (request.is_empty() && room == 0) {
            return false;
        }
        let buffer = BUFFERS + self.next % u64::from(SIZE) * BUFFER;
        self.ram.write(buffer, request).unwrap();
        self.ram.write(buffer + REPLY, &[0xee; (BUFFER - REPLY) as usize]).unwrap();
        let mut descs = Vec::new();
        if !request.is_empty() {
            descs.push(Desc::readable(buffer, request.len() as u32));
        }
        if room > 0 {
            descs.push(Desc::writable(buffer + REPLY, room as u32));
        }
        self.driver.add(&descs, self.next).unwrap();
        self.sent.push_back((self.next, request.to_vec(), room));
        self.next += 1;
        true
    }

    /// The process serves what is in the ring; or dies, and those after it do.
    fn serve(&mut self, stores: impl IntoIterator<Item = u64>) {
        let mut stores = stores.into_iter();
        self.driver.publish();
        let (mut queue, ram) = (self.queue.take(), self.ram.clone());
        let mut left = stores.next().unwrap_or(self.left);
        loop {
            let lives = lives(&mut left, || {
                let mut serving = match queue.take() {
                    Some(queue) => queue,
                    None => self.successor(),
                };
                serving.poll(&Mortal(&ram)).unwrap();
                queue = Some(serving);
            });
            if lives {
                break;
            }
            self.deaths += 1;
            (queue, left) = (None, stores.next().unwrap_or(u64::MAX));
        }
        self.left = if self.left == u64::MAX { u64::MAX } else { left };
        self.queue = queue;
        self.hear();
    }

    /// The next process.
    fn successor(&mut self) -> RequestQueue<Endpoints> {
        let (journal, recovered) = Journal::open(self.map()).unwrap();
        let Bench { endpoints, device, .. } =
            Bench::with(self.twin.shape.options.clone(), self.twin.shape.limits);
        device.recover(&recovered).unwrap();
        (self.twin.device, self.twin.endpoints) = (device, endpoints);
        self.set_journal(journal).unwrap();
        let mut queue =
            Queue::postponed_at_used(device::RingConfig { base: 77, ..self.at }).unwrap();
        queue.revalidate(&self.ram).unwrap();
        RequestQueue::resume(Arc::clone(&self.twin.device), queue, recovered.into_completions())
    }

    /// The driver takes the replies.
    fn hear(&mut self) {
        while let Some(used) = self.driver.pop().unwrap() {
            let (token, request, room) = self.sent.pop_front().unwrap();
            assert_eq!(used.token, token, "completions come in the order of the ring");
            let mut reply = vec![0; room];
            let buffer = BUFFERS + token % u64::from(SIZE) * BUFFER;
            self.ram.read(buffer + REPLY, &mut reply).unwrap();
            self.twin.compare_completion(&request, used.len as usize, &reply);
        }
        assert!(self.sent.is_empty());
        self.twin.compare();
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Resets the device; the ring is kept.
    fn reset(&mut self, system: bool) {
        self.twin.reset(system);
        self.twin.negotiate(u64::MAX);
    }
}

/// Runs a program whose processes each die after that many `stores`; returns how many died.
fn run(bytes: &[u8], mut guest: Guest, mut stores: impl Iterator<Item = u64>) -> u64 {
    let granule = guest.twin.shape.options.page_sizes.granule();
    let mut author = Author::new(bytes, granule);
    for endpoint in [1_u32, 2, 8] {
        let attach = [1, endpoint / 2, endpoint, 0, 0].map(u32::to_le_bytes).concat();
        guest.send(&attach, TAIL_LEN);
    }
    while !author.is_done() && !guest.is_lost() {
        let what = author.byte();
        let burst = usize::from(what % 4) + 1;
        for _ in 0..burst {
            let (request, room) = author.request(&guest.twin);
            guest.send(&request, room);
        }
        // Now and then several die over the same requests.
        let deaths: Vec<u64> = stores.by_ref().take(usize::from(what % 7 / 2)).collect();
        guest.serve(deaths);
        match what {
            250.. => guest.reset(what.is_multiple_of(2)),
            240.. => guest.twin.write_config(36, &[what % 3]),
            _ => {}
        }
        guest.twin.compare_accesses();
    }
    guest.deaths
}

fn shapes() -> impl Strategy<Value = Shape> {
    let limits = [Limits::NONE, Limits { mappings: 5, ..Limits::NONE }];
    let scarce = Limits { table_bytes: 9 << 12, ..Limits::NONE };
    let limits = prop_oneof![prop::sample::select(limits.to_vec()), Just(scarce)];
    (limits, prop::sample::select(vec![1 << 16, 2]), any::<bool>()).prop_map(
        |(limits, max_domains, bypass)| {
            let mut shape = Shape { limits, ..Shape::default() };
            shape.options.max_domains = max_domains;
            shape.options.bypass = bypass;
            shape
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every reply, every mapping and every access are as if no process had died.
    #[test]
    fn a_device_that_dies_goes_on(
        program in prop::collection::vec(any::<u8>(), 0..3000).prop_map(Program),
        shape in shapes(),
        len in prop::sample::select(vec![4 << 10, 10 << 10, 1 << 20]),
        stores in prop::collection::vec(0_u64..60, 1..20),
    ) {
        run(&program.0, Guest::new(shape, len), stores.into_iter().cycle());
    }

    /// Arbitrary bytes cause no panic, and what is taken over is legal.
    #[test]
    fn arbitrary_bytes_do_no_harm(
        changes in prop::collection::vec((0_usize..400, any::<u64>(), any::<bool>()), 0..6),
        len in prop::sample::select(vec![0x1000, 0x1000, 0x1000, 1, HEADER + 2 * LEAST, 0x801]),
    ) {
        let (file, fd) = SharedFile::create(0x1000).unwrap();
        let mut bench = Bench::new();
        let _ = bench.attach(1, 1);
        let journal = Journal::new(file).unwrap();
        bench.device.set_journal(journal, |_| ()).unwrap();
        let file = || SharedFile::map(&fd, 0, len as u64).unwrap();
        {
            let kept = bench.device.kept.get().unwrap();
            for n in 0..6_u64 {
                let at = range(n << 12, (n << 12) + 0xfff);
                let flags = MapFlags::READ;
                let map = Request::Map(MapRequest { domain: 1, range: at, phys: 0, flags });
                let mut bytes = [0; MAX_REQUEST_LEN];
                let len = map.emit(&mut bytes);
                let ok = Completion::Status(Status::Ok);
                kept.lock().record(&bench.device, n as u16, ok, &bytes[..len]);
            }
        }
        for (at, word, near) in changes {
            let words = len / 8;
            let at = if near { at % 20 } else { at };
            if at < words {
                // Small numbers are plausible lengths.
                let word = if near { word % 600 } else { word };
                file().u64_at(at * 8).store(word, Relaxed);
            }
        }
        if let Ok((journal, recovered)) = Journal::open(file()) {
            let next = Bench::new();
            match next.device.recover(&recovered) {
                Ok(()) => {
                    next.device.set_journal(journal, |_| ()).ok();
                    let again = next.device.save().unwrap();
                    prop_assert_eq!(Bench::new().device.restore(&again), Ok(()));
                }
                Err(_) => prop_assert_eq!(next.device.domains(), 0),
            }
        }
    }
}

#[test]
fn it_may_die_before_any_store() {
    let program = common::program::random(7, 1500);
    let mut stores = 0;
    loop {
        let mut guest = Guest::new(Shape::default(), HEADER + 2 * 1200);
        guest.left = stores;
        match run(&program, guest, std::iter::empty()) {
            0 => break,
            deaths => assert_eq!(deaths, 1),
        }
        stores += 1;
    }
    assert!(stores > 500, "{stores}");
}

#[test]
fn positions_wrap_and_completions_elsewhere_are_dropped() {
    let mut guest = Guest::new(Shape::default(), 1 << 20);
    // Up to there nothing of interest.
    for n in 0..u32::from(u16::MAX) - 1 {
        assert!(guest.send(&[0; 4], TAIL_LEN));
        if n % 4 == 3 {
            guest.serve([]);
        }
    }
    guest.serve([]);
    let attach = [1, 1, 1, 0, 0].map(u32::to_le_bytes).concat();
    for _ in 0..4 {
        guest.send(&attach, TAIL_LEN);
    }
    // Recorded, and none published.
    guest.serve([22]);
    assert_eq!(guest.deaths, 1);
    let completions = |from: u16| {
        let all = (0..6).map(|n| (from.wrapping_add(n), Completion::Unwritten)).collect();
        Completions { open: all }.at(0xfffe, 8).open.len()
    };
    assert_eq!([0xfffe, 0xfffc, 0xfff8, 4, 6, 0x8000].map(completions), [6, 4, 0, 2, 0, 0]);
}

#[test]
fn a_completion_that_became_another_is_the_other() {
    // rule V20
    let (file, fd) = SharedFile::create(0x1000).unwrap();
    let device = Bench::new().device;
    device.set_journal(Journal::new(file).unwrap(), |_| ()).unwrap();
    let kept = device.kept.get().unwrap();
    kept.lock().journal.settle();
    for position in 7..10 {
        kept.lock().record(&device, position, Completion::Status(Status::Ok), &[]);
    }
    kept.lock().amend(&device, 8, Status::DevErr);
    for renewed in [false, true] {
        if renewed {
            device.reset().unwrap();
            kept.lock().record(&device, 8, Completion::Status(Status::DevErr), &[]);
            device.set_features(0);
            device.set_features(u64::MAX);
        }
        let (_, recovered) = Journal::open(SharedFile::map(&fd, 0, 0x1000).unwrap()).unwrap();
        let completions = recovered.into_completions().open;
        assert!(completions.contains(&(8, Completion::Status(Status::DevErr))));
        assert_eq!(completions.len(), if renewed { 1 } else { 3 });
    }
}

#[test]
fn a_restore_into_a_device_in_use_leaves_its_journal_as_it_is() {
    let (file, fd) = SharedFile::create(0x1000).unwrap();
    let mut bench = Bench::new();
    let journal = || Journal::open(SharedFile::map(&fd, 0, 0x1000).unwrap()).unwrap().1;
    bench.device.set_journal(Journal::new(file).unwrap(), |_| ()).unwrap();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    let kept = bench.device.kept.get().unwrap();
    kept.lock().record(&bench.device, 7, Completion::Status(Status::Ok), &[]);
    assert_eq!(bench.device.recover(&journal()), Err(RestoreError::InUse));
    assert_eq!(bench.device.restore(&journal().snapshot), Err(RestoreError::InUse));
    assert_eq!(journal().into_completions().open, [(7, Completion::Status(Status::Ok))]);
}

#[test]
fn a_journal_that_is_full_is_reported_once_and_invalidated() {
    let (file, fd) = SharedFile::create(0x1000).unwrap();
    let mut bench = Bench::new();
    let reported = Arc::new(AtomicBool::new(false));
    let report = Arc::clone(&reported);
    let once = move |error: &JournalError| {
        assert!(matches!(error, JournalError::Full { .. }), "{error}");
        assert!(!report.swap(true, Relaxed));
    };
    bench.device.set_journal(Journal::new(file).unwrap(), once).unwrap();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    for n in 0..100 {
        assert_eq!(bench.map(1, range(n << 12, (n << 12) + 0xfff), 0), Status::Ok);
    }
    assert!(bench.device.has_journal());
    for bypass in [1, 0] {
        bench.device.write_config(36, &[bypass]).unwrap();
        assert!(reported.load(Relaxed) && !bench.device.has_journal());
    }
    let file = SharedFile::map(fd, 0, 0x1000).unwrap();
    assert!(matches!(Journal::open(file), Err(JournalError::Nothing)));
    let (empty, _fd) = SharedFile::create(0x1000).unwrap();
    assert!(matches!(Journal::open(empty), Err(JournalError::Format(_))));
    let (short, _fd) = SharedFile::create(100).unwrap();
    assert!(matches!(Journal::new(short), Err(JournalError::Short { len: 100, .. })));
}

#[test]
#[ignore = "a measurement"]
fn how_long_it_takes() {
    const MAPPINGS: u64 = 100_000;
    let (file, fd) = SharedFile::create(Journal::bytes_for(MAPPINGS, 1)).unwrap();
    let len = file.len() as u64;
    let mut bench = Bench::new();
    bench.device.set_journal(Journal::new(file).unwrap(), |error| panic!("{error}")).unwrap();
    let mut n = 0;
    let device: Arc<Device<_>> = Arc::clone(&bench.device);
    let mut record = |bench: &mut Bench, request: Request| {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        assert_eq!(bench.send(request), Status::Ok);
        let kept = device.kept.get().unwrap();
        kept.lock().journal.settle();
        kept.lock().record(&device, n, Completion::Status(Status::Ok), &bytes[..len]);
        n = n.wrapping_add(1);
    };
    record(&mut bench, Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() });
    let map = |n: u64| {
        Request::Map(MapRequest {
            domain: 1,
            range: range(n << 12, (n << 12) + 0xfff),
            phys: n << 13,
            flags: MapFlags::READ,
        })
    };
    let begun = Instant::now();
    (0..MAPPINGS).for_each(|n| record(&mut bench, map(n)));
    println!("{MAPPINGS} MAPs, each recorded: {:?}", begun.elapsed());
    for what in ["a log of them", "a snapshot of them"] {
        let begun = Instant::now();
        let file = SharedFile::map(&fd, 0, len).unwrap();
        let (journal, recovered) = Journal::open(file).unwrap();
        let read = begun.elapsed();
        let next = Bench::new();
        next.device.recover(&recovered).unwrap();
        let recovering = begun.elapsed();
        next.device.set_journal(journal, |error| panic!("{error}")).unwrap();
        let all = begun.elapsed();
        println!("{what}: read after {read:?}, recovered {recovering:?}, written anew {all:?}");
        assert_eq!(next.reads(1, (MAPPINGS - 1) << 12), Some((MAPPINGS - 1) << 13));
    }
}
