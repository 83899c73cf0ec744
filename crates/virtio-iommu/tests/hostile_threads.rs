//! Two request queues in two domains and in one, endpoints that come and go, and threads that
//! access all the while: nothing is reached after its UNMAP or its DETACH was completed.

mod common;

use std::{
    array,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use common::{Bench, Endpoints, Soft, range};
use proptest::{prelude::Rng, test_runner::TestRunner};
use ringfence_iommu::{Iova, Range, table::Translation};
use ringfence_virtio_iommu::{
    device::{Binding, Device, Session},
    wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, UnmapRequest},
};

/// Pages in a domain that are mapped now and then; each queue has every other one.
const PAGES: u64 = 64;
/// What one queue maps in all.
const BATCHES: u64 = 1500;
const BATCH: u64 = 16;
/// The domain of each queue alone, and the one of both, with the endpoint in it.
const OWN: [(u32, u32); 2] = [(1, 1), (2, 8)];
const SHARED: (u32, u32) = (3, 3);
/// The endpoint that comes and goes.
const GUEST: u32 = 2;

/// The pages lie outside of all reserved regions, and cross a table's nodes.
fn page(n: u64) -> Range {
    let first = 0x1000_0000 - ((PAGES / 2) << 12) + (n << 12);
    range(first, first + 0xfff)
}

/// What all threads know.
struct World {
    device: Arc<Device<Endpoints>>,
    endpoints: Arc<Endpoints>,
    /// Every mapping leads elsewhere: whether that was given back.
    returned: Vec<AtomicBool>,
    next: AtomicU64,
    /// How often the guest was attached, counted before; and which attachment has ended.
    tenure: AtomicU64,
    ended: AtomicU64,
    /// How often each device's thread has looked at all.
    turns: [AtomicU64; 2],
    over: AtomicBool,
}

impl World {
    fn send(&self, session: &mut Session<Endpoints>, request: Request) -> u8 {
        let (mut bytes, mut reply) = ([0; MAX_REQUEST_LEN], [0xee; 4]);
        let len = request.emit(&mut bytes);
        assert_eq!(self.device.handle(session, &bytes[..len], &mut reply), 4);
        reply[0]
    }

    /// Waits until replies may be given.
    fn completed(&self, session: &mut Session<Endpoints>) {
        self.device.begin_sync(session);
        while !self.device.poll_sync(session).expect("no invalidation fails") {
            thread::yield_now();
        }
    }

    fn attach(&self, session: &mut Session<Endpoints>, (domain, endpoint): (u32, u32)) {
        let flags = AttachFlags::empty();
        assert_eq!(self.send(session, Request::Attach { domain, endpoint, flags }), 0);
    }

    fn domain_of(&self, endpoint: u32) -> Option<Arc<Soft>> {
        match self.endpoints.bindings.lock().get(&endpoint) {
            Some(Binding::Domain(domain)) => Some(Arc::clone(domain)),
            _ => None,
        }
    }

    /// Waits until each device's thread has looked at all again: on a busy machine it might not run at all while
    /// something is mapped.
    fn await_devices(&self) {
        let before = [0, 1].map(|at| self.turns[at].load(SeqCst));
        let looks = |at: usize| self.turns[at].load(SeqCst) > before[at] + 1;
        while !(self.over.load(SeqCst) || looks(0) && looks(1)) {
            thread::yield_now();
        }
    }

    /// A request queue: batches of MAPs, then of UNMAPs, in its own domain and in the shared one.
    fn queue(&self, number: usize) {
        let mut session = Session::new();
        // The third queue has begun.
        while self.ended.load(SeqCst) < 8 && !self.over.load(SeqCst) {
            thread::yield_now();
        }
        for batch in 0..BATCHES {
            let mut held = vec![];
            for n in 0..BATCH {
                let domain = if n % 2 == 0 { OWN[number].0 } else { SHARED.0 };
                let at = page((batch * 7 + n) % (PAGES / 2) * 2 + number as u64);
                let id = self.next.fetch_add(1, SeqCst);
                let flags = MapFlags::READ | MapFlags::WRITE;
                let map = Request::Map(MapRequest { domain, range: at, phys: id << 12, flags });
                assert_eq!(self.send(&mut session, map), 0, "{map:x?}");
                held.push((domain, at, id));
            }
            if batch % 8 == 0 {
                self.await_devices();
            }
            thread::yield_now();
            for &(domain, range, _) in &held {
                assert_eq!(
                    self.send(&mut session, Request::Unmap(UnmapRequest { domain, range })),
                    0
                );
            }
            self.completed(&mut session);
            held.iter().for_each(|&(_, _, id)| self.returned[id as usize].store(true, SeqCst));
        }
    }

    /// A third queue, on which an endpoint joins and leaves domains that are in use.
    fn churn(&self) -> u64 {
        let mut session = Session::new();
        let mut rounds = 0;
        while !self.over.load(SeqCst) || rounds < 20 {
            rounds += 1;
            self.tenure.store(rounds, SeqCst);
            let domain = [OWN[0].0, SHARED.0, OWN[1].0, 4][rounds as usize % 4];
            self.attach(&mut session, (domain, GUEST));
            self.completed(&mut session);
            if rounds <= 8 {
                self.await_devices();
            }
            thread::yield_now();
            let detach = Request::Detach { domain, endpoint: GUEST };
            assert_eq!(self.send(&mut session, detach), 0);
            self.completed(&mut session);
            self.ended.store(rounds, SeqCst);
        }
        rounds
    }

    fn check(&self, found: Translation, at: Iova) {
        let id = (found.target(at) >> 12) as usize;
        assert!(!self.returned[id].load(SeqCst), "{id} is reached after its UNMAP was completed");
    }

    /// A device's thread: it uses what it looked up until that is invalidated.
    fn accesses(&self, number: usize) -> [u64; 2] {
        let mut reader = self.endpoints.shootdown.reader().expect("a free reader");
        let domains = [OWN[0], OWN[1], SHARED].map(|(_, endpoint)| self.domain_of(endpoint));
        let domains = domains.map(|domain| domain.expect("attached throughout"));
        let mut caches: [Cache; 4] = array::from_fn(|_| Cache::default());
        let mut guest: Option<(Arc<Soft>, u64)> = None;
        let (mut random, mut hits) = (TestRunner::default().rng().next_u64() | 1, [0, 0]);
        while !self.over.load(SeqCst) {
            for _ in 0..256 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let n = (random >> 20) % PAGES;
                let at = page(n).first();
                let which = (random >> 40) as usize % 4;
                let domain = match which {
                    3 => {
                        guest = guest.or_else(|| {
                            let domain = self.domain_of(GUEST)?;
                            // Perhaps of an attachment before this one, never of a later.
                            Some((domain, self.tenure.load(SeqCst)))
                        });
                        let Some((domain, tenure)) = &guest else { continue };
                        let ended = self.ended.load(SeqCst);
                        assert!(ended < *tenure, "attachment {tenure} is used after its end");
                        hits[1] += 1;
                        domain
                    }
                    _ => &domains[which],
                };
                if let Some(found) = caches[which].get(n, || domain.translate(&reader, at)) {
                    self.check(found, at);
                    std::hint::spin_loop();
                    self.check(found, at);
                    hits[0] += 1;
                }
            }
            self.turns[number].fetch_add(1, SeqCst);
            // A quiet point that lasts: no invalidation waits for a thread that does not run.
            reader.offline();
            thread::yield_now();
            reader.online(|gone| {
                caches
                    .iter_mut()
                    .for_each(|cache| cache.0.retain(|(n, _)| !gone.overlaps(page(*n))));
                // Nothing is mapped there: this invalidates everything, bindings included.
                if gone.overlaps(range(u64::MAX, u64::MAX)) {
                    guest = None;
                    caches[3].0.clear();
                }
            });
        }
        hits
    }
}

#[derive(Default)]
struct Cache(Vec<(u64, Translation)>);

impl Cache {
    fn get(&mut self, n: u64, find: impl FnOnce() -> Option<Translation>) -> Option<Translation> {
        if let Some((_, found)) = self.0.iter().find(|(held, _)| *held == n) {
            return Some(*found);
        }
        let found = find()?;
        self.0.push((n, found));
        Some(found)
    }
}

#[test]
fn nothing_is_reached_after_its_unmap_or_its_detach_was_completed() {
    // rule V14
    // rule V20
    let Bench { endpoints, device, mut session } = Bench::new();
    let ids = 1 + 2 * BATCHES * BATCH;
    let world = World {
        device,
        endpoints,
        returned: (0..ids).map(|_| AtomicBool::new(false)).collect(),
        next: AtomicU64::new(1),
        tenure: AtomicU64::new(0),
        ended: AtomicU64::new(0),
        turns: [0, 0].map(AtomicU64::new),
        over: AtomicBool::new(false),
    };
    OWN.into_iter().chain([SHARED]).for_each(|to| world.attach(&mut session, to));
    world.completed(&mut session);
    let (rounds, hits) = thread::scope(|scope| {
        let world = &world;
        let devices = [0, 1].map(|number| scope.spawn(move || world.accesses(number)));
        let churn = scope.spawn(|| {
            let rounds = panic::catch_unwind(AssertUnwindSafe(|| world.churn()));
            // No thread may wait for it in vain.
            rounds.inspect_err(|_| world.over.store(true, SeqCst))
        });
        let queues = [0, 1].map(|number| scope.spawn(move || world.queue(number)));
        let queues = queues.map(|queue| queue.join());
        // However they ended: the others wait for it.
        world.over.store(true, SeqCst);
        queues.into_iter().for_each(|queue| queue.expect("a queue"));
        (
            churn.join().expect("it was caught").expect("a queue"),
            devices.map(|device| device.join().expect("a device")),
        )
    });
    assert_eq!(world.next.load(SeqCst), ids);
    assert_eq!(world.device.domains(), 3);
    for endpoint in [OWN[0].1, OWN[1].1, SHARED.1] {
        let domain = world.domain_of(endpoint).expect("attached throughout");
        assert_eq!(domain.mappings(), 0);
    }
    println!("{rounds} attachments; accesses to what was mapped, and through them: {hits:?}");
    assert!(rounds >= 20 && hits.iter().all(|hits| hits.iter().all(|&hits| hits > 0)));
}
