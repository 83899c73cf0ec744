//! Lazy domains (proposal oasis-tcs/virtio-spec#204), by themselves and between both ends.

mod common;

use std::{collections::BTreeMap, sync::Arc, thread};

use common::{
    Bench, Endpoints, map, range, refused,
    ring::{Served, link},
};
use proptest::{collection::vec, prelude::*};
use ringfence_iommu::{
    Domain, Gather, Iova, Pending, Prot, Range,
    shootdown::{Lease, Reader},
    table::Limits,
};
use ringfence_virtio_iommu::{
    device::{Binding, DeviceConfig, RequestQueue, Session},
    driver::{DriverConfig, negotiate, negotiate_proposed},
    wire::{
        AttachFlags, Features, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status, TAIL_LEN,
        UnmapRequest, parse_tail,
    },
};

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

/// A device that offers what is proposed, too.
fn proposed() -> Bench {
    let features = DeviceConfig::default().features | Features::LAZY_IOTLB_FLUSH;
    Bench::with(DeviceConfig { features, ..DeviceConfig::default() }, Limits::NONE)
}

fn attach_lazily(bench: &mut Bench, domain: u32, endpoint: u32) -> Status {
    bench.send(Request::Attach { domain, endpoint, flags: AttachFlags::LAZY })
}

/// Translates for an endpoint: keeps what it looked up until that is invalidated.
struct Cache {
    reader: Reader,
    held: BTreeMap<u64, u64>,
}

impl Cache {
    fn new(endpoints: &Endpoints) -> Cache {
        let reader = endpoints.shootdown.reader().expect("a free reader");
        Cache { reader, held: BTreeMap::new() }
    }

    /// Where the page leads, from the cache if it is there.
    fn look(&mut self, endpoints: &Endpoints, endpoint: u32, n: u64) -> Option<u64> {
        if !self.held.contains_key(&n)
            && let Some(Binding::Domain(domain)) = endpoints.bindings.lock().get(&endpoint)
            && let Some(found) = domain.translate(&self.reader, Iova(n << 12))
        {
            self.held.insert(n, found.target(Iova(n << 12)) >> 12);
        }
        self.held.get(&n).copied()
    }

    fn quiet(&mut self) {
        let Cache { reader, held } = self;
        reader.poll(|gone| held.retain(|&n, _| !gone.overlaps(page(n))));
    }
}

#[test]
fn without_the_feature_there_is_neither_a_lazy_domain_nor_a_flush() {
    // rule V8: an unknown type is returned unwritten; rule V9: an unknown flag is refused
    let mut bench = Bench::new();
    assert!(!bench.device.features().intersects(Features::PROPOSED), "off by default");
    for negotiated in [false, true] {
        if negotiated {
            bench = proposed();
            bench.device.set_features(DeviceConfig::default().features.bits());
        }
        assert_eq!(attach_lazily(&mut bench, 1, 1), Status::Inval);
        assert_eq!(bench.attach(1, 1), Status::Ok);
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = Request::IotlbFlush { domain: 1 }.emit(&mut bytes);
        for len in [4, len - 1, len] {
            assert_eq!(bench.raw(&bytes[..len], 8), (0, vec![0xee; 8]));
        }
        bytes[len - 1] = 1;
        assert_eq!(bench.raw(&bytes[..len], 8), (0, vec![0xee; 8]));
    }
    let offer = DeviceConfig::default().features | Features::PROPOSED;
    assert!(!negotiate(offer.bits()).intersects(Features::PROPOSED));
    assert!(negotiate_proposed(offer.bits(), Features::all()).contains(Features::PROPOSED));
    assert!(!negotiate_proposed(offer.bits(), Features::all()).contains(Features::BYPASS));
    let without = offer.difference(Features::PROPOSED).bits();
    assert_eq!(negotiate_proposed(without, Features::all()), negotiate(without));
}

#[test]
fn a_domain_is_lazy_or_not_for_all_its_endpoints() {
    let mut bench = proposed();
    let flush = |bench: &mut Bench, domain| bench.send(Request::IotlbFlush { domain });
    assert_eq!(flush(&mut bench, 1), Status::NoEnt);
    assert_eq!(attach_lazily(&mut bench, 1, 1), Status::Ok);
    assert_eq!(bench.attach(1, 2), Status::Inval, "as rule V10 has it of bypass domains");
    assert_eq!(bench.attach_bypass(1, 2), Status::Inval);
    assert_eq!(bench.attach(2, 2), Status::Ok);
    assert_eq!(attach_lazily(&mut bench, 2, 1), Status::Inval);
    assert_eq!(bench.attach_bypass(3, 3), Status::Ok);
    let both = AttachFlags::LAZY | AttachFlags::BYPASS;
    let both = Request::Attach { domain: 4, endpoint: 8, flags: both };
    assert_eq!(bench.send(both), Status::Inval);
    let statuses = [1, 2, 3, 4].map(|domain| flush(&mut bench, domain));
    assert_eq!(statuses, [Status::Ok, Status::Inval, Status::Inval, Status::NoEnt]);
    let reserved = bench.changed(Request::IotlbFlush { domain: 1 }, |bytes| bytes[8] = 1);
    assert_eq!(reserved, Status::Inval);
    // The number is free again after the last member, and keeps nothing of the old domain.
    assert_eq!(bench.detach(1, 1), Status::Ok);
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach_bypass(1, 2), Status::Inval);
}

#[test]
fn however_much_was_unmapped_a_flush_covers_it_all() {
    let mut bench = proposed();
    assert_eq!(attach_lazily(&mut bench, 1, 1), Status::Ok);
    let mut cache = Cache::new(&bench.endpoints);
    let scattered = |n: u64| n * n + 1;
    for n in (0..500).map(scattered) {
        assert_eq!(bench.map(1, page(n), n << 12), Status::Ok);
        assert_eq!(cache.look(&bench.endpoints, 1, n), Some(n));
    }
    // `send` waits for what a reply must wait for: nothing here, as the reader passes no quiet
    // point.
    for n in (0..500).map(scattered) {
        assert_eq!(bench.unmap(1, page(n)), Status::Ok);
    }
    assert_eq!(bench.unmap(1, Range::ALL), Status::Ok);
    let domain = match bench.endpoints.bindings.lock().get(&1) {
        Some(Binding::Domain(domain)) => Arc::clone(domain),
        other => panic!("{other:?}"),
    };
    assert!(domain.retired_bytes() > 0, "tables wait with the rest");
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = Request::IotlbFlush { domain: 1 }.emit(&mut bytes);
    let used = bench.device.handle(&mut bench.session, &bytes[..len], &mut [0; TAIL_LEN]);
    assert_eq!(used as usize, TAIL_LEN);
    assert!(bench.session.needs_sync());
    bench.device.begin_sync(&mut bench.session);
    assert_eq!(bench.device.poll_sync(&mut bench.session), Ok(false));
    assert_eq!(cache.held.len(), 500);
    cache.quiet();
    assert_eq!(bench.device.poll_sync(&mut bench.session), Ok(true));
    assert_eq!(cache.held.len(), 0);
    assert_eq!((domain.mappings(), domain.table_bytes()), (0, 0), "and are freed with it");
    // And then there is nothing left to flush.
    let used = bench.device.handle(&mut bench.session, &bytes[..len], &mut [0; TAIL_LEN]);
    assert_eq!((used as usize, bench.session.needs_sync()), (TAIL_LEN, false));
}

#[test]
fn a_reset_flushes_everything() {
    // rule V4
    let mut bench = proposed();
    assert_eq!(attach_lazily(&mut bench, 1, 1), Status::Ok);
    let mut cache = Cache::new(&bench.endpoints);
    for n in 0..2 {
        assert_eq!(bench.map(1, page(n), n << 12), Status::Ok);
        assert_eq!(cache.look(&bench.endpoints, 1, n), Some(n));
    }
    assert_eq!(bench.unmap(1, page(0)), Status::Ok);
    bench.device.reset().unwrap();
    cache.quiet();
    assert!(cache.held.is_empty());
    assert_eq!((cache.look(&bench.endpoints, 1, 1), bench.device.domains()), (None, 0));
    assert_eq!(attach_lazily(&mut bench, 1, 1), Status::Inval, "nothing is negotiated");
}

/// Domains 1 and 3 are lazy, 2 is not.
fn is_lazy(domain: u32) -> bool {
    domain != 2
}

#[derive(Clone, Debug)]
enum Step {
    Map {
        queue: usize,
        domain: u32,
        page: u64,
        target: u64,
    },
    Unmap {
        queue: usize,
        domain: u32,
        first: u64,
        pages: u64,
    },
    Flush {
        queue: usize,
        domain: u32,
    },
    Move {
        queue: usize,
        endpoint: u32,
        to: Option<u32>,
    },
    /// The queue is stopped with what it waits for, and another one begins.
    Restart {
        queue: usize,
    },
    Poll {
        queue: usize,
    },
    Quiet {
        endpoint: u32,
    },
    Look {
        endpoint: u32,
        page: u64,
    },
    Lease {
        endpoint: u32,
        page: u64,
    },
    EndLease,
}

fn step() -> impl Strategy<Value = Step> {
    let (queue, domain, endpoint) = (0..2usize, 1..4u32, 1..4u32);
    let page = 0..6u64;
    prop_oneof![
        6 => (queue.clone(), domain.clone(), page.clone(), 0..3u64).prop_map(
            |(queue, domain, page, target)| Step::Map { queue, domain, page, target }
        ),
        5 => (queue.clone(), domain.clone(), page.clone(), 1..4u64).prop_map(
            |(queue, domain, first, pages)| Step::Unmap { queue, domain, first, pages }
        ),
        4 => (queue.clone(), domain.clone()).prop_map(
            |(queue, domain)| Step::Flush { queue, domain }
        ),
        2 => (queue.clone(), endpoint.clone(), prop::option::weighted(0.8, domain)).prop_map(
            |(queue, endpoint, to)| Step::Move { queue, endpoint, to }
        ),
        1 => queue.clone().prop_map(|queue| Step::Restart { queue }),
        5 => queue.prop_map(|queue| Step::Poll { queue }),
        4 => endpoint.clone().prop_map(|endpoint| Step::Quiet { endpoint }),
        6 => (endpoint.clone(), page.clone()).prop_map(
            |(endpoint, page)| Step::Look { endpoint, page }
        ),
        2 => (endpoint, page).prop_map(|(endpoint, page)| Step::Lease { endpoint, page }),
        2 => Just(Step::EndLease),
    ]
}

/// A request queue, as far as the device is concerned.
struct Queue {
    session: Session<Endpoints>,
    /// Whether its last request still waits for a reply.
    waits: bool,
    /// What is unreachable once the reply is there.
    releases: Vec<u64>,
}

/// What an endpoint may still reach although it is unmapped.
struct Stale {
    id: u64,
    endpoint: u32,
    /// The domain that it was unmapped of, if that is why: a flush there is to release it. Else the
    /// endpoint has left the domain, or the domain is gone, and the reply to that request releases
    /// it.
    domain: Option<u32>,
    page: u64,
    target: u64,
}

/// The device with two queues and three endpoints, and what is expected of it.
struct World {
    bench: Bench,
    queues: [Queue; 2],
    caches: [Cache; 3],
    leases: Vec<(u32, u64, u64, Lease)>,
    mapped: BTreeMap<(u32, u64), u64>,
    attached: BTreeMap<u32, u32>,
    stale: Vec<Stale>,
    next: u64,
}

impl World {
    fn new() -> World {
        let bench = proposed();
        let queue = || Queue { session: Session::new(), waits: false, releases: Vec::new() };
        let caches = [(); 3].map(|()| Cache::new(&bench.endpoints));
        World {
            bench,
            queues: [queue(), queue()],
            caches,
            leases: Vec::new(),
            mapped: BTreeMap::new(),
            attached: BTreeMap::new(),
            stale: Vec::new(),
            next: 0,
        }
    }

    /// Sends a request on a queue that waits for nothing.
    fn send(&mut self, queue: usize, request: Request) -> Status {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut tail = [0xff; TAIL_LEN];
        let Queue { session, waits, .. } = &mut self.queues[queue];
        assert_eq!(self.bench.device.handle(session, &bytes[..len], &mut tail), 4);
        *waits = session.needs_sync();
        if *waits {
            self.bench.device.begin_sync(session);
        }
        parse_tail(tail).expect("a status")
    }

    /// What queue `queue` releases when it completes a request; if it has completed already, at once.
    fn releases(&mut self, queue: usize, which: impl Fn(&Stale) -> bool) {
        let ids = self.stale.iter().filter(|&stale| which(stale)).map(|stale| stale.id).collect();
        self.queues[queue].releases = ids;
        if !self.queues[queue].waits {
            self.completed(queue);
        }
    }

    fn completed(&mut self, queue: usize) {
        let released = core::mem::take(&mut self.queues[queue].releases);
        self.stale.retain(|stale| !released.contains(&stale.id));
    }

    fn exists(&self, domain: u32) -> bool {
        self.attached.values().any(|&of| of == domain)
    }

    fn goes_stale(&mut self, endpoint: u32, domain: Option<u32>, page: u64, target: u64) {
        self.next += 1;
        self.stale.push(Stale { id: self.next, endpoint, domain, page, target });
    }

    fn members(&self, domain: u32) -> Vec<u32> {
        let of = |(&endpoint, &of): (&u32, &u32)| (of == domain).then_some(endpoint);
        self.attached.iter().filter_map(of).collect()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Map { queue, .. }
            | Step::Unmap { queue, .. }
            | Step::Flush { queue, .. }
            | Step::Move { queue, .. }
                if self.queues[queue].waits => {}
            Step::Map { queue, domain, page: n, target } => {
                let flags = MapFlags::READ;
                let map =
                    Request::Map(MapRequest { domain, range: page(n), phys: target << 12, flags });
                let expected = match self.exists(domain) {
                    false => Status::NoEnt,
                    true if self.mapped.contains_key(&(domain, n)) => Status::Inval,
                    true => Status::Ok,
                };
                assert_eq!(self.send(queue, map), expected);
                if expected == Status::Ok {
                    self.mapped.insert((domain, n), target);
                }
            }
            Step::Unmap { queue, domain, first, pages } => {
                let whole = range(first << 12, ((first + pages) << 12) - 1);
                let status =
                    self.send(queue, Request::Unmap(UnmapRequest { domain, range: whole }));
                let expected = if self.exists(domain) { Status::Ok } else { Status::NoEnt };
                assert_eq!(status, expected);
                let before = self.next;
                for n in first..first + pages {
                    if let Some(target) = self.mapped.remove(&(domain, n)) {
                        for endpoint in self.members(domain) {
                            self.goes_stale(endpoint, Some(domain), n, target);
                        }
                    }
                }
                match is_lazy(domain) {
                    true => assert!(!self.queues[queue].waits, "a completion that waits"),
                    false => self.releases(queue, |stale| stale.id > before),
                }
            }
            Step::Flush { queue, domain } => {
                let expected = match self.exists(domain) {
                    false => Status::NoEnt,
                    true if !is_lazy(domain) => Status::Inval,
                    true => Status::Ok,
                };
                assert_eq!(self.send(queue, Request::IotlbFlush { domain }), expected);
                if expected == Status::Ok {
                    self.releases(queue, |stale| stale.domain == Some(domain));
                }
            }
            Step::Move { queue, endpoint, to } => self.relocate(queue, endpoint, to),
            Step::Restart { queue } => {
                self.queues[queue] =
                    Queue { session: Session::new(), waits: false, releases: Vec::new() };
            }
            Step::Poll { queue } => {
                let Queue { session, waits, .. } = &mut self.queues[queue];
                if *waits && self.bench.device.poll_sync(session) == Ok(true) {
                    *waits = false;
                    self.completed(queue);
                }
            }
            Step::Quiet { endpoint } => self.caches[endpoint as usize - 1].quiet(),
            Step::Look { endpoint, page } => _ = self.look(endpoint, page),
            Step::Lease { endpoint, page: n } => {
                if let Some(target) = self.look(endpoint, n) {
                    let lease = self.caches[endpoint as usize - 1].reader.lease(page(n));
                    self.leases.push((endpoint, n, target, lease));
                }
            }
            Step::EndLease => _ = self.leases.pop(),
        }
        self.check();
    }

    fn relocate(&mut self, queue: usize, endpoint: u32, to: Option<u32>) {
        let from = self.attached.get(&endpoint).copied();
        let flags = match to.is_some_and(is_lazy) {
            true => AttachFlags::LAZY,
            false => AttachFlags::empty(),
        };
        let request = match to {
            Some(domain) => Request::Attach { domain, endpoint, flags },
            None => Request::Detach { domain: from.unwrap_or(1), endpoint },
        };
        let expected = if to.is_none() && from.is_none() { Status::Inval } else { Status::Ok };
        assert_eq!(self.send(queue, request), expected);
        if expected != Status::Ok || from == to {
            return;
        }
        if let Some(from) = from {
            let all: Vec<_> = self.mapped.range((from, 0)..=(from, u64::MAX)).collect();
            let all: Vec<_> = all.into_iter().map(|(&(_, n), &target)| (n, target)).collect();
            for (n, target) in all {
                self.goes_stale(endpoint, None, n, target);
            }
            self.attached.remove(&endpoint);
            if !self.exists(from) {
                // Rule V14: the domain goes with its last member, and so do its mappings.
                self.mapped.retain(|&(domain, _), _| domain != from);
                let of = self.stale.iter_mut().filter(|stale| stale.domain == Some(from));
                of.for_each(|stale| stale.domain = None);
            }
        }
        self.attached.extend(to.map(|to| (endpoint, to)));
        self.releases(queue, |stale| stale.endpoint == endpoint);
    }

    /// An access: it leads where it is mapped to, or where it was before.
    fn look(&mut self, endpoint: u32, n: u64) -> Option<u64> {
        let cache = &mut self.caches[endpoint as usize - 1];
        let found = cache.look(&self.bench.endpoints, endpoint, n);
        let mapped = self.attached.get(&endpoint).and_then(|&of| self.mapped.get(&(of, n)));
        assert!(found.is_some() || mapped.is_none(), "what is mapped is not found");
        found
    }

    fn check(&self) {
        let caches = self.caches.iter().zip(1..);
        let cached = caches.flat_map(|(cache, endpoint)| {
            cache.held.iter().map(move |(&n, &target)| (endpoint, n, target))
        });
        let leased = self.leases.iter().map(|&(endpoint, n, target, _)| (endpoint, n, target));
        for (endpoint, n, target) in cached.chain(leased) {
            let domain = self.attached.get(&endpoint);
            let mapped = domain.and_then(|&of| self.mapped.get(&(of, n))) == Some(&target);
            let may = self
                .stale
                .iter()
                .any(|stale| (stale.endpoint, stale.page, stale.target) == (endpoint, n, target));
            assert!(mapped || may, "endpoint {endpoint} reaches {target} at page {n}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// What a lazy domain unmapped is unreachable once a flush that was sent afterwards is
    /// completed, whichever queue sent it, whatever other flushes are under way. Before, it leads
    /// where it led, and nowhere else.
    #[test]
    fn what_was_unmapped_before_a_flush_is_unreachable_after_its_completion(
        steps in vec(step(), 1..120),
    ) {
        let mut world = World::new();
        for endpoint in 1..4 {
            world.step(Step::Move { queue: 0, endpoint, to: Some(endpoint % 2 + 1) });
            world.caches.iter_mut().for_each(Cache::quiet);
            world.step(Step::Poll { queue: 0 });
        }
        steps.into_iter().for_each(|step| world.step(step));
    }
}

#[test]
fn a_flush_waits_for_what_another_one_invalidates_and_for_one_that_was_given_up() {
    for given_up in [false, true] {
        let mut world = World::new();
        let both = |world: &mut World, queue| {
            world.step(Step::Poll { queue });
            world.queues[queue].waits
        };
        world.step(Step::Move { queue: 0, endpoint: 1, to: Some(1) });
        world.caches.iter_mut().for_each(Cache::quiet);
        assert!(!both(&mut world, 0));
        world.step(Step::Map { queue: 0, domain: 1, page: 3, target: 2 });
        // I/O under way.
        world.step(Step::Lease { endpoint: 1, page: 3 });
        world.step(Step::Unmap { queue: 0, domain: 1, first: 3, pages: 1 });
        world.step(Step::Flush { queue: 0, domain: 1 });
        world.caches.iter_mut().for_each(Cache::quiet);
        assert!(both(&mut world, 0), "the I/O has not ended");
        if given_up {
            world.step(Step::Restart { queue: 0 });
        }
        world.step(Step::Flush { queue: 1, domain: 1 });
        world.caches.iter_mut().for_each(Cache::quiet);
        assert!(both(&mut world, 1), "nor is this one completed before it has");
        world.step(Step::EndLease);
        assert!(!both(&mut world, 1));
        assert!(!both(&mut world, 0));
        // Nothing is kept for the next.
        world.step(Step::Flush { queue: 1, domain: 1 });
        assert!(!world.queues[1].waits);
    }
}

#[test]
fn a_flush_that_ends_before_another_takes_nothing_away_from_it() {
    let mut world = World::new();
    let completed = |world: &mut World, queue| {
        world.caches.iter_mut().for_each(Cache::quiet);
        world.step(Step::Poll { queue });
        !world.queues[queue].waits
    };
    world.step(Step::Move { queue: 0, endpoint: 1, to: Some(1) });
    assert!(completed(&mut world, 0));
    for page in [1, 4] {
        world.step(Step::Map { queue: 0, domain: 1, page, target: 2 });
    }
    world.step(Step::Look { endpoint: 1, page: 1 });
    world.step(Step::Lease { endpoint: 1, page: 4 });
    let unmap = |first| Step::Unmap { queue: 1, domain: 1, first, pages: 1 };
    world.step(unmap(1));
    world.step(Step::Flush { queue: 0, domain: 1 });
    world.step(unmap(4));
    world.step(Step::Flush { queue: 1, domain: 1 });
    assert!(!completed(&mut world, 1), "the I/O at page 4 has not ended");
    assert!(completed(&mut world, 0));
    world.step(Step::Flush { queue: 0, domain: 1 });
    assert!(!completed(&mut world, 0), "for this one, too, page 4 was unmapped before");
    world.step(Step::EndLease);
    assert!(completed(&mut world, 0) && completed(&mut world, 1));
}

#[test]
fn the_driver_waits_for_an_invalidation_only_when_it_flushes() {
    let bench = proposed();
    let features = bench.device.features();
    let link = link(64, bench.config(), features, DriverConfig::default());
    let mut requests = RequestQueue::new(bench.device, link.queue);
    let domain = link.driver.lazy_domain().unwrap();
    assert!(domain.is_lazy());
    map(&domain, page(1), 0x5000).unwrap();
    let mut cache = Cache::new(&bench.endpoints);
    thread::scope(|scope| {
        let attached = scope.spawn(|| domain.attach(1));
        while !attached.is_finished() {
            requests.poll(&link.ram).unwrap();
            cache.quiet();
            link.bells.used.raise();
        }
        attached.join().unwrap().unwrap();
    });
    let mut syncs = requests.counters().syncs;
    let mut synced = |requests: &RequestQueue<_>| {
        let now = requests.counters().syncs;
        now - core::mem::replace(&mut syncs, now)
    };
    assert_eq!(cache.look(&bench.endpoints, 1, 1), Some(5));
    let mut gather = Gather::queued();
    domain.unmap(page(1), &mut gather).unwrap();
    map(&domain, page(2), 0x6000).unwrap();
    let mut mapped = Pending::map(&*domain, vec![page(2)]);
    let progress = requests.poll(&link.ram).unwrap();
    assert_eq!((progress.handled, progress.published, progress.pending), (2, 2, false));
    assert!(mapped.poll(&*domain), "a MAP waits for nothing");
    assert!(matches!(mapped.outcome(page(2)), Some(Ok(_))));
    assert_eq!(cache.look(&bench.endpoints, 1, 1), Some(5), "until the flush");
    assert_eq!(cache.look(&bench.endpoints, 1, 2), Some(6));
    assert_eq!(synced(&requests), 0);

    let mut flush = Pending::unmap(&*domain, vec![page(1)], &mut gather);
    assert!(!flush.is_over());
    for _ in 0..3 {
        assert!(requests.poll(&link.ram).unwrap().pending);
        assert!(!flush.poll(&*domain));
    }
    cache.quiet();
    assert_eq!(requests.poll(&link.ram).unwrap().published, 1);
    assert!(flush.poll(&*domain));
    assert!(matches!(flush.outcome(page(1)), Some(Ok(_))));
    assert_eq!(cache.look(&bench.endpoints, 1, 1), None);
    assert_eq!(synced(&requests), 1);
    link.bells.alive.store(false, std::sync::atomic::Ordering::Relaxed);
}

#[test]
fn a_lazy_domain_also_serves_callers_that_sync() {
    let served = Served::start(proposed(), 16, DriverConfig::default(), false);
    let domain = served.driver.lazy_domain().unwrap();
    let others = || served.driver.stats().others;
    map(&domain, page(50), 0x5000).unwrap();
    domain.flush_iotlb_all().unwrap();
    assert_eq!(others(), 0, "unattached, nothing is sent");
    domain.attach(1).unwrap();
    let before = others();
    thread::scope(|scope| {
        for thread in 0..3u64 {
            let (domain, served) = (&domain, &served);
            scope.spawn(move || {
                for n in (0..40).map(|n| thread * 1000 + n) {
                    map(domain, page(n), n << 12).unwrap();
                    domain.iotlb_sync_map(page(n)).unwrap();
                    assert_eq!(served.endpoints.access(1, n << 12, Prot::READ), Some(n << 12));
                    let mut gather = Gather::new();
                    assert_eq!(domain.unmap(page(n), &mut gather), Ok(4096));
                    domain.iotlb_sync(&mut gather).unwrap();
                    assert!(gather.is_empty());
                    assert_eq!(served.endpoints.access(1, n << 12, Prot::READ), None);
                }
                domain.flush_iotlb_all().unwrap();
            });
        }
    });
    assert_eq!(others() - before, 3 * 41, "an IOTLB_FLUSH for each sync");
    domain.attach(2).unwrap();
    domain.detach(1).unwrap();
    domain.flush_iotlb_all().unwrap();
    domain.detach(2).unwrap();
    let before = served.driver.stats().requests();
    domain.flush_iotlb_all().unwrap();
    let stats = served.driver.stats();
    assert_eq!((stats.requests(), stats.errors), (before, 0));
}

#[test]
fn a_device_that_knows_no_lazy_domains_gets_an_ordinary_one() {
    for bench in [Bench::new(), proposed()] {
        // The second one offers it, and it is not negotiated.
        bench.device.set_features(DeviceConfig::default().features.bits());
        let config = bench.config();
        let features = negotiate(bench.device.features().bits());
        assert!(!features.contains(Features::LAZY_IOTLB_FLUSH));
        let Bench { device, .. } = bench;
        let link = link(16, config, features, DriverConfig::default());
        let domain = link.driver.lazy_domain().unwrap();
        assert!(!domain.is_lazy());
        let mut requests = RequestQueue::new(device, link.queue);
        thread::scope(|scope| {
            let used = scope.spawn(|| {
                domain.attach(1)?;
                map(&domain, page(1), 0)?;
                let mut gather = Gather::new();
                domain.unmap(page(1), &mut gather)?;
                domain.iotlb_sync(&mut gather)?;
                domain.flush_iotlb_all()?;
                domain.detach(1)
            });
            while !used.is_finished() {
                requests.poll(&link.ram).unwrap();
                link.bells.used.raise();
            }
            assert_eq!(used.join().unwrap(), Ok(()));
        });
        assert_eq!(link.driver.stats().others, 3, "PROBE, ATTACH and DETACH, and no flush");
    }
}

#[test]
fn a_flush_that_the_device_refuses_is_an_error_of_every_kind_of_sync() {
    let served = Served::start(proposed(), 16, DriverConfig::default(), false);
    let domain = served.driver.lazy_domain().unwrap();
    domain.attach(1).unwrap();
    map(&domain, page(1), 0).unwrap();
    domain.iotlb_sync_map(page(1)).unwrap();
    // Behind the driver's back the domain goes.
    let mut theirs = Session::new();
    let device = served.device();
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = Request::Detach { domain: domain.id(), endpoint: 1 }.emit(&mut bytes);
    device.handle(&mut theirs, &bytes[..len], &mut [0; TAIL_LEN]);
    let gone = Some(Status::NoEnt as u8);
    assert_eq!(refused(domain.flush_iotlb_all()), gone);
    assert_eq!(refused(domain.iotlb_sync(&mut Gather::new())), gone);
    let mut sync = Pending::unmap(&*domain, vec![page(1)], &mut Gather::new());
    sync.wait(&*domain);
    for _ in 0..2 {
        assert!(sync.poll(&*domain));
        assert_eq!(refused(sync.outcome(page(1)).unwrap()), gone);
    }
}
