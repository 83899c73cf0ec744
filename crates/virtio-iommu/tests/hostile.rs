//! A driver in another process that changes bytes while the device reads them.
//!
//! The other process stores one of a few values into bytes of a request, or of its descriptors, as
//! fast as it can. The device must do what it would have done for *one* value of each byte: all of
//! them are tried on a model beforehand, which gives the set of allowed outcomes. A device that
//! reads a field twice does something else sooner or later: it maps what was checked under another
//! value.

mod common;

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    os::fd::AsFd,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use common::{
    model::{Completion, Mapping, Model, Space},
    twin::{Shape, Twin, all_mappings},
};
use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_mem::{
    Access, AccessError, GuestRam, HostSlice, Memory, PAGE_SIZE, Physical, SharedFile, Translate,
    Window,
};
use ringfence_virtio_iommu::device::RequestQueue;
use ringfence_virtq::{
    device::{Queue, RingConfig},
    layout,
};

const GPA: u64 = 0x1_0000;
const SIZE: u16 = 8;
const LEN: usize = 2 * PAGE_SIZE;

// Where things lie in the shared memory; buffers are 256 bytes apart, so that one byte of a
// descriptor's address distinguishes them.
const REQUESTS: [usize; 2] = [0x800, 0x900];
const REPLIES: [usize; 2] = [0xa00, 0xb00];
const TABLE: usize = 0xc00;
/// How often the other process has stored something, and a byte that ends it.
const FLIPS: usize = PAGE_SIZE;
const STOP: usize = PAGE_SIZE + 8;
/// Counts requests: while this grows the first process is alive.
const BEAT: usize = PAGE_SIZE + 16;

/// Which site changes at the moment; all of them if no site has this number. One alone changes
/// faster, hence more often between two reads of it.
const TURN: usize = PAGE_SIZE + 24;
/// How many requests a turn lasts.
const TURN_LEN: u64 = 256;

/// The bytes of a reply's buffer that are looked at.
const SEEN: usize = 12;

/// A byte, and the values that the other process stores there; a value that is listed twice is
/// stored twice as often.
type Site = (usize, &'static [u8]);

/// What memory holds at first, and which bytes of it change.
struct Scene {
    image: Vec<u8>,
    sites: Vec<Site>,
    indirect: bool,
}

impl Scene {
    fn new() -> Scene {
        let mut scene = Scene { image: vec![0; PAGE_SIZE], sites: vec![], indirect: false };
        for (at, len) in REPLIES.map(|at| (at, 0x100)) {
            scene.image[at..at + len].fill(0xee);
        }
        scene
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn desc(&mut self, at: usize, (to, len): (usize, u32), flags: u16, next: u16) {
        self.put(at, &(GPA + to as u64).to_le_bytes());
        self.put(at + 8, &len.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
        self.put(at + 14, &next.to_le_bytes());
    }

    fn request(&mut self, at: usize, first: u64, last: u64, phys: u64) {
        self.put(at, &[3, 0, 0, 0, 1, 0, 0, 0]);
        self.put(at + 8, &[first, last, phys].map(u64::to_le_bytes).concat());
        self.put(at + 32, &[3, 0, 0, 0]);
    }

    /// The ring's first entry leads to descriptor `head`.
    fn offer(&mut self, head: u16) {
        let avail = layout::offsets(SIZE).avail;
        self.put(avail + layout::IDX, &[1, 0]);
        self.put(avail + layout::RING, &head.to_le_bytes());
    }

    /// The bytes of a request change: its type, its domain, both ends, the target, the flags.
    fn bytes() -> Scene {
        let mut scene = Scene::new();
        let at = REQUESTS[0];
        scene.request(at, 0x4_0000, 0x4_1fff, 0x70_0000);
        scene.desc(0, (at, 36), layout::DESC_F_NEXT, 1);
        scene.desc(16, (REPLIES[0], 4), layout::DESC_F_WRITE, 0);
        scene.offer(0);
        scene.sites = vec![
            (at, &[3, 3, 3, 4, 2]),
            // Where the endpoint of the reserved regions is; another; none.
            (at + 4, &[1, 1, 1, 2, 9]),
            // Misaligned; in a reserved region; where something is mapped.
            (at + 8 + 1, &[0, 0, 0, 8]),
            (at + 8 + 2, &[4, 4, 0, 5]),
            (at + 16 + 1, &[0x1f, 0x1f, 0x1f, 0x17]),
            (at + 16 + 2, &[4, 4, 5]),
            (at + 24 + 1, &[0, 0, 0, 4]),
            (at + 24 + 2, &[0x70, 0x60, 0]),
            (at + 32, &[3, 1, 2, 0x80]),
        ];
        scene
    }

    /// The descriptors change: which request, its length, what follows, where the reply goes.
    fn descriptors(indirect: bool) -> Scene {
        let mut scene = Scene::new();
        let table = if indirect { TABLE } else { 0 };
        scene.indirect = indirect;
        scene.request(REQUESTS[0], 0x4_0000, 0x4_1fff, 0x70_0000);
        scene.request(REQUESTS[1], 0x6_0000, 0x6_0fff, 0x80_0000);
        scene.desc(table, (REQUESTS[0], 36), layout::DESC_F_NEXT, 1);
        scene.desc(table + 16, (REPLIES[0], 4), layout::DESC_F_WRITE, 0);
        scene.desc(table + 32, (REPLIES[1], 4), layout::DESC_F_WRITE, 0);
        let (next, write) = (layout::DESC_F_NEXT as u8, layout::DESC_F_WRITE as u8);
        assert_eq!((next, write), (1, 2));
        scene.sites = vec![
            (table + 1, &[8, 9]),
            (table + 8, &[36, 28]),
            (table + 12, &[1, 1, 0, 3]),
            (table + 14, &[1, 2, 200]),
            (table + 16 + 1, &[0xa, 0xb]),
            // Outside of memory.
            (table + 16 + 7, &[0, 0x40]),
            (table + 16 + 8, &[4, 3, 8]),
            (table + 16 + 12, &[2, 2, 0]),
        ];
        match indirect {
            true => {
                scene.desc(3 * 16, (TABLE, 48), layout::DESC_F_INDIRECT, 0);
                scene.offer(3);
            }
            false => {
                scene.offer(0);
                let head = layout::offsets(SIZE).avail + layout::RING;
                scene.sites.push((head, &[0, 200]));
            }
        }
        scene
    }
}

/// The observable outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Outcome {
    /// The name and the used length of what was given back; `None`: the ring is broken.
    used: Option<(u32, u32)>,
    replies: [[u8; SEEN]; 2],
    /// What endpoints 8 and 1 reach.
    mappings: [Option<Vec<Mapping>>; 2],
}

fn mappings_of(model: &Model) -> [Option<Vec<Mapping>>; 2] {
    [8, 1].map(|endpoint| match &model.domains[model.attached.get(&endpoint)?] {
        Space::Mappings(mappings) => Some(mappings.values().copied().collect()),
        Space::Bypass => None,
    })
}

/// What a device that follows the model does with the ring in `image`, if that is all it sees.
fn naive(image: &[u8], indirect: bool, model: &Model, into: &mut BTreeSet<Outcome>) {
    let half = |at: usize| u16::from_le_bytes(image[at..at + 2].try_into().unwrap());
    let untouched =
        Outcome { used: None, replies: [[0xee; SEEN]; 2], mappings: mappings_of(model) };
    let head = half(layout::offsets(SIZE).avail + layout::RING);
    let (table, entries) = if indirect { (TABLE, 3) } else { (0, SIZE) };
    let mut next = if indirect { 0 } else { head };
    let (mut readable, mut writable) = (vec![], vec![]);
    let broken = loop {
        if next >= entries {
            break true;
        }
        let at = table + usize::from(next) * 16;
        let addr = u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
        let (len, flags) = (usize::from(half(at + 8)), half(at + 12));
        match flags & layout::DESC_F_WRITE != 0 {
            true => writable.push((addr, len)),
            false if !writable.is_empty() => break true,
            false => readable.push((addr, len)),
        }
        if flags & layout::DESC_F_NEXT == 0 {
            break false;
        }
        next = half(at + 14);
    };
    if broken {
        into.insert(untouched);
        return;
    }
    let used = |len| Some((head.into(), len));
    let room: usize = writable.iter().map(|(_, len)| len).sum();
    let mut bytes = vec![];
    for &(addr, len) in &readable {
        let Some(at) = addr.checked_sub(GPA).filter(|at| *at < LEN as u64) else {
            // Nothing that changes here makes such a request completable.
            assert_eq!(room, 0);
            into.insert(Outcome { used: used(0), ..untouched });
            return;
        };
        bytes.extend(&image[at as usize..at as usize + len]);
    }
    let (completion, effect) = model.judge(&bytes, room);
    let any_of = match completion {
        Completion::Unwritten => {
            into.insert(Outcome { used: used(0), ..untouched });
            return;
        }
        Completion::Tail { at: 0, any_of } => any_of,
        other => panic!("{other:?} is not expected here"),
    };
    let &[(addr, _)] = &writable[..] else { panic!("one buffer is all there is") };
    for status in any_of {
        let mut outcome = untouched.clone();
        if status == 0 {
            let mut after = model.clone();
            after.commit(effect);
            outcome.mappings = mappings_of(&after);
        }
        match REPLIES.iter().position(|&at| GPA + at as u64 == addr) {
            Some(reply) => {
                outcome.replies[reply][..4].copy_from_slice(&[status, 0, 0, 0]);
                outcome.used = used(4);
            }
            None => outcome.used = used(0),
        }
        into.insert(outcome);
    }
}

/// All that may happen: every value of every byte that changes, with every one of the others.
fn all_outcomes(scene: &Scene, model: &Model) -> BTreeSet<Outcome> {
    let mut outcomes = BTreeSet::new();
    let mut image = scene.image.clone();
    let distinct = |&(at, values): &Site| (at, Vec::from_iter(BTreeSet::from_iter(values)));
    let sites: Vec<_> = scene.sites.iter().map(distinct).collect();
    let combinations: usize = sites.iter().map(|(_, values)| values.len()).product();
    for n in 0..combinations {
        let mut rest = n;
        for &(at, ref values) in &sites {
            image[at] = *values[rest % values.len()];
            rest /= values.len();
        }
        naive(&image, scene.indirect, model, &mut outcomes);
    }
    outcomes
}

/// The name of the scene, in the environment of the process that changes bytes.
const CHILD: &str = "RINGFENCE_TEST_FLIPS";

/// What the other process does, with the memory as its standard input, until it is stopped or the
/// first process is gone.
fn flip(scene: &Scene) {
    let fd = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let shared = SharedFile::map(fd, 0, LEN as u64).expect("shared memory");
    let mut random = TestRunner::default().rng().next_u64() | 1;
    let (mut beat, mut since) = (0, Instant::now());
    while shared.u8_at(STOP).load(Relaxed) == 0 {
        let turn = usize::from(shared.u8_at(TURN).load(Relaxed));
        let sites = scene.sites.get(turn..=turn).unwrap_or(&scene.sites);
        for _ in 0..32 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (at, values) = sites[(random >> 40) as usize % sites.len()];
            shared.u8_at(at).store(values[(random >> 20) as usize % values.len()], Relaxed);
        }
        shared.u64_at(FLIPS).fetch_add(32, Relaxed);
        let now = shared.u64_at(BEAT).load(Relaxed);
        if now != beat {
            (beat, since) = (now, Instant::now());
        } else if since.elapsed() > Duration::from_secs(120) {
            return;
        }
    }
}

/// The other process. Ends with its owner.
struct Flipper {
    child: Child,
    shared: SharedFile,
}

impl Flipper {
    fn start(test: &str, ram: &GuestRam) -> Flipper {
        let fd = || ram.fd().try_clone_to_owned().expect("a descriptor");
        let shared = SharedFile::map(fd(), 0, LEN as u64).expect("shared memory");
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, test)
            .stdin(Stdio::from(fd()))
            .stdout(Stdio::null())
            .spawn()
            .expect("another process");
        Flipper { child, shared }
    }

    fn flips(&mut self) -> u64 {
        if let Some(status) = self.child.try_wait().expect("a child") {
            panic!("the other process has ended: {status}");
        }
        self.shared.u64_at(FLIPS).load(Relaxed)
    }
}

impl Drop for Flipper {
    fn drop(&mut self) {
        self.shared.u8_at(STOP).store(1, Relaxed);
        let _ = self.child.wait();
    }
}

/// The same memory for a device that is slow: after each read the other process has some time, so
/// that a second read finds something else.
struct Slow<'a> {
    memory: &'a Physical,
    flips: &'a SharedFile,
    reads: Cell<u64>,
}

impl Translate for Slow<'_> {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        self.memory.slices(addr, len, access, each)?;
        if access == Access::Read {
            self.reads.set(self.reads.get() + 1);
            // Both may be on one processor.
            if self.reads.get().is_multiple_of(256) {
                std::thread::yield_now();
            }
            let before = self.flips.u64_at(FLIPS).load(Relaxed);
            let flipped = || self.flips.u64_at(FLIPS).load(Relaxed) != before;
            (0..100).find(|_| {
                std::hint::spin_loop();
                flipped()
            });
        }
        Ok(())
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.memory.window(addr, len, access)
    }
}

/// A device in the state that each request finds: endpoint 8, which has reserved regions, in domain
/// 1 with a mapping; endpoint 1 in domain 2, with none.
fn twin() -> Twin {
    let mut twin = Twin::new(Shape::default());
    prepare(&mut twin);
    twin
}

fn prepare(twin: &mut Twin) {
    let attach = |domain, endpoint| [1, domain, endpoint, 0, 0].map(u32::to_le_bytes).concat();
    let mut map = vec![3, 0, 0, 0, 1, 0, 0, 0];
    map.extend([0x5_0000, 0x5_1fff, 0x50_0000].map(u64::to_le_bytes).concat());
    map.extend([3, 0, 0, 0]);
    for request in [attach(1, 8), attach(2, 1), map] {
        assert_eq!(twin.request(0, &request, 4, true), Some(0));
    }
}

fn device_mappings(twin: &Twin) -> [Option<Vec<Mapping>>; 2] {
    [8, 1].map(|endpoint| twin.domain_of(endpoint).map(|domain| all_mappings(&domain)))
}

/// How many requests must have been changed while they were served.
const CHANGED: u64 = 200;

fn serve(test: &str, scene: Scene) {
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        return flip(&scene);
    }
    let mut twin = twin();
    let base = device_mappings(&twin);
    let allowed = all_outcomes(&scene, &twin.model);
    // Several mappings, in several states of the reply, and several refusals.
    assert!(allowed.len() >= 8, "{allowed:x?}");
    let ram = GuestRam::new(LEN, GPA).expect("shared memory");
    let all = ram.window(0, LEN).expect("all of it");
    all.write(0, &scene.image);
    let mem = Physical::new(Memory::of_ram(&ram).expect("the same memory"));
    let at = layout::offsets(SIZE);
    let config = RingConfig {
        size: SIZE,
        desc: GPA + at.desc as u64,
        avail: GPA + at.avail as u64,
        used: GPA + at.used as u64,
        event_idx: false,
        indirect: true,
        packed: false,
        base: 0,
    };
    let fd = ram.fd().try_clone_to_owned().expect("a descriptor");
    let flips = SharedFile::map(fd, 0, LEN as u64).expect("shared memory");
    let slow = Slow { memory: &mem, flips: &flips, reads: Cell::new(0) };
    let mut flipper = Flipper::start(test, &ram);
    let (mut requests, mut changed) = (0u64, 0);
    let mut met: BTreeMap<Outcome, u64> = BTreeMap::new();
    while flipper.flips() == 0 {
        std::thread::yield_now();
    }
    let sites = || -> Vec<u8> {
        scene.sites.iter().map(|&(at, _)| flipper.shared.u8_at(at).load(Relaxed)).collect()
    };
    while requests < 20_000 || changed < CHANGED || met.len() * 2 < allowed.len() {
        requests += 1;
        assert!(
            requests < 10_000_000,
            "{changed} changed meanwhile, {} of {} outcomes",
            met.len(),
            allowed.len()
        );
        flipper.shared.u64_at(BEAT).store(requests, Relaxed);
        let turn = requests / TURN_LEN % (2 * scene.sites.len() as u64);
        flipper.shared.u8_at(TURN).store(turn as u8, Relaxed);
        all.write(at.used, &vec![0; layout::used_bytes(SIZE)]);
        REPLIES.iter().for_each(|&reply| all.write(reply, &[0xee; SEEN]));
        let before = sites();
        let queue = Queue::new(config, &mem).expect("a legal queue");
        let mut queue = RequestQueue::new(Arc::clone(&twin.device), queue);
        let served = queue.poll(&slow);
        changed += u64::from(before != sites());
        let mut used = [0; 12];
        all.read(at.used, &mut used);
        let word = |at: usize| u32::from_le_bytes(used[at..at + 4].try_into().unwrap());
        let used = match served {
            Ok(progress) => {
                assert_eq!((progress.published, progress.pending), (1, false));
                assert_eq!(used[2], 1);
                Some((word(4), word(8)))
            }
            Err(_) => {
                assert_eq!(used[2], 0, "given back, though the ring is broken");
                None
            }
        };
        let replies = REPLIES.map(|reply| {
            let mut bytes = [0; SEEN];
            all.read(reply, &mut bytes);
            bytes
        });
        let outcome = Outcome { used, replies, mappings: device_mappings(&twin) };
        assert!(allowed.contains(&outcome), "request {requests}: {outcome:x?}");
        if outcome.mappings != base {
            twin.reset(false);
            twin.negotiate(u64::MAX);
            prepare(&mut twin);
        }
        *met.entry(outcome).or_default() += 1;
    }
    println!(
        "{test}: {requests} requests, {changed} of them changed meanwhile, {} flips; {} of {} outcomes",
        flipper.flips(),
        met.len(),
        allowed.len()
    );
}

#[test]
fn a_request_that_changes_while_it_is_read() {
    serve("a_request_that_changes_while_it_is_read", Scene::bytes());
}

#[test]
fn descriptors_that_change_while_they_are_read() {
    serve("descriptors_that_change_while_they_are_read", Scene::descriptors(false));
}

#[test]
fn an_indirect_table_that_changes_while_it_is_read() {
    serve("an_indirect_table_that_changes_while_it_is_read", Scene::descriptors(true));
}
