//! Times one device under one load.
//!
//! Ordering: `stop` ends a loop.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ringfence_devices::iommu::Endpoints;
use ringfence_iommu::{Domain, Gather, HostAddr, Iova, Map, Pending, Prot, SoftDomain};
use ringfence_virtio_iommu::{
    device::Session,
    driver::ViommuDomain,
    wire::{AttachFlags, Request},
};

use super::{
    load::{Load, MEMORY, Wait, over, page, succeeded, target},
    ours::{MIRRORED, Machine, Ours},
    rig::{Rig, Server, Serving, attend},
};
use crate::{
    bench::{clock::Clock, rounds::Sample, threads::together},
    block::mix,
};

/// With which clock, on which CPUs, and for about how long.
#[derive(Clone, Copy)]
pub(super) struct How<'a> {
    pub(super) clock: &'a Clock,
    pub(super) cpus: &'a [usize],
    pub(super) budget: Duration,
}

/// One device under one load.
pub(super) trait Subject {
    /// Runs for about the budget.
    fn sample(&mut self, how: How<'_>) -> Result<Sample>;

    /// Checks that every request was carried out.
    fn check(&mut self) -> Result<()>;
}

/// Maps and unmaps a batch, and checks each page before, in between and afterwards.
fn check<S: Server>(rig: &mut Rig<S>, live: u64) -> Result<()> {
    rig.check(live)?;
    let pages = || (0..8).map(|n| (page(FREE + n), target(n)));
    let mut gather = Gather::new();
    for (range, _) in pages() {
        ensure!(rig.access(range.first())?.is_none(), "{range} is mapped already");
    }
    let mut ranges = Vec::new();
    for (range, target) in pages() {
        rig.domain.map(Map::new(range, target, Prot::RW))?;
        ranges.push(range);
    }
    let mut sync = Pending::map(&*rig.domain, ranges);
    rig.serve()?;
    ensure!(sync.poll(&*rig.domain), "MAPs are not completed");
    succeeded(&sync)?;
    for (range, target) in pages() {
        let at = Iova(range.first().0 + 0x123);
        ensure!(rig.access(at)? == Some(target.0 + 0x123), "{range} leads elsewhere");
    }
    rig.check(live + 8)?;
    for (range, _) in pages() {
        rig.domain.unmap(range, &mut gather)?;
    }
    let mut sync = Pending::gathered(&*rig.domain, Vec::new(), &mut gather);
    rig.serve()?;
    ensure!(sync.poll(&*rig.domain), "UNMAPs are not completed");
    succeeded(&sync)?;
    for (range, _) in pages() {
        ensure!(rig.access(range.first())?.is_none(), "{range} is mapped still");
    }
    rig.check(live)
}

/// No load uses pages from here on.
const FREE: u64 = 1 << 30;

/// Pairs of MAP and UNMAP.
pub(super) struct Pairs<S> {
    pub(super) rig: Rig<S>,
    pub(super) load: Load,
    /// One end on each of two cores; else both are on one.
    pub(super) two: bool,
}

/// Nanoseconds of a pair, and how many there were.
type Done = Result<(f64, u64)>;

/// What an end of a ring does meanwhile.
type End<'a> = Box<dyn FnOnce() -> Done + Send + 'a>;

impl<S: Server> Pairs<S> {
    fn measure(&mut self, how: How<'_>) -> Done {
        let Pairs { rig: Rig { domain, server, .. }, load, two } = self;
        if !*two {
            // Driver and device take turns in one thread.
            let mut serving = server.begin()?;
            return drive(domain, load, how, || serving.serve().map(drop));
        }
        let stop = &AtomicBool::new(false);
        let ends: Vec<End<'_>> = vec![
            Box::new(|| drive(domain, load, how, spin(stop))),
            Box::new(|| attend(server, stop).map(|()| (0.0, 0))),
        ];
        let mut results = together(how.cpus, ends, |_, end| {
            let result = end();
            stop.store(true, Ordering::Release);
            result
        });
        // An error of the device explains the driver's.
        results.pop().context("the device's side")??;
        results.pop().context("the driver's side")?
    }
}

/// The driver's side, until the budget is spent; `wait` is called until the device has completed.
fn drive(domain: &ViommuDomain, load: &mut Load, how: How<'_>, mut wait: impl Wait) -> Done {
    let batch = load.batch();
    let steps = (64 / batch).max(1);
    let (begun, budget) = (how.clock.now(), how.budget.as_nanos() as f64);
    let mut operations = 0;
    while operations == 0 || how.clock.ns(how.clock.now().wrapping_sub(begun)) < budget {
        for _ in 0..steps {
            load.step(domain, &mut wait)?;
        }
        operations += (steps * batch) as u64;
    }
    load.finish(domain, &mut wait)?;
    let ns = how.clock.ns(how.clock.now().wrapping_sub(begun)) / operations as f64;
    Ok((ns, operations))
}

/// Waits for a device on another core.
fn spin(stop: &AtomicBool) -> impl Wait {
    let mut looks = 0_u32;
    move || {
        hint::spin_loop();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1024) {
            ensure!(!stop.load(Ordering::Acquire), "the device has stopped");
            thread::yield_now();
        }
        Ok(())
    }
}

/// Pairs; if there are several, on one core each, with a thread and a request queue for each of several
/// domains of one device.
pub(super) struct Domains<S>(pub(super) Vec<Pairs<S>>);

impl<S: Server> Subject for Domains<S> {
    fn sample(&mut self, how: How<'_>) -> Result<Sample> {
        let results = match &mut self.0[..] {
            [one] => vec![one.measure(how)],
            all => together(how.cpus, all.iter_mut().collect(), |_, one| one.measure(how)),
        };
        let samples = results.into_iter().collect::<Result<Vec<_>>>()?;
        let a_ns: f64 = samples.iter().map(|(ns, _)| 1.0 / ns).sum();
        let operations: u64 = samples.iter().map(|(_, operations)| operations).sum();
        Ok(vec![("ns", 1.0 / a_ns), ("operations", operations as f64)])
    }

    fn check(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|one| check(&mut one.rig, 0))
    }
}

/// Maps so many pages, in batches.
fn fill<S: Server>(rig: &mut Rig<S>, live: usize) -> Result<()> {
    const AT_ONCE: usize = 64;
    let Rig { domain, server, .. } = rig;
    let mut serving = server.begin()?;
    for first in (0..live).step_by(AT_ONCE) {
        let pages = first as u64..live.min(first + AT_ONCE) as u64;
        let maps: Vec<_> = pages.map(|n| Map::new(page(n), target(n), Prot::RW)).collect();
        domain.map_pages(&maps)?;
        let mut sync = Pending::map(&**domain, maps.iter().map(Map::range).collect());
        over(&mut sync, domain, || serving.serve().map(drop))?;
    }
    Ok(())
}

/// One mapping after the other among many, in random order.
pub(super) struct OneOf<S> {
    rig: Rig<S>,
    live: usize,
    next: u64,
    map: Vec<u64>,
    unmap: Vec<u64>,
}

impl<S: Server> OneOf<S> {
    pub(super) fn new(mut rig: Rig<S>, live: usize) -> Result<OneOf<S>> {
        fill(&mut rig, live)?;
        Ok(OneOf { rig, live, next: 0, map: Vec::new(), unmap: Vec::new() })
    }
}

impl<S: Server> Subject for OneOf<S> {
    fn sample(&mut self, How { clock, budget, .. }: How<'_>) -> Result<Sample> {
        let Rig { domain, server, .. } = &mut self.rig;
        let mut serving = server.begin()?;
        let (mut gather, mut list) = (Gather::new(), Vec::new());
        self.map.clear();
        self.unmap.clear();
        let (start, budget) = (clock.now(), budget.as_nanos() as f64);
        loop {
            self.next += 1;
            let n = mix(self.next) % self.live as u64;
            let (range, target) = (page(n), target(n));
            let begun = clock.now();
            domain.unmap(range, &mut gather)?;
            let mut sync = Pending::gathered(&**domain, list, &mut gather);
            over(&mut sync, domain, || serving.serve().map(drop))?;
            let unmapped = clock.now();
            domain.map(Map::new(range, target, Prot::RW))?;
            let mut sync = Pending::map(&**domain, sync.into_ranges());
            over(&mut sync, domain, || serving.serve().map(drop))?;
            list = sync.into_ranges();
            let mapped = clock.now();
            self.unmap.push(unmapped.wrapping_sub(begun));
            self.map.push(mapped.wrapping_sub(unmapped));
            if clock.ns(mapped.wrapping_sub(start)) >= budget {
                break;
            }
        }
        let operations = self.map.len() as f64;
        let (map, unmap) = (clock.middle(&mut self.map), clock.middle(&mut self.unmap));
        Ok(vec![("ns", map + unmap), ("map", map), ("unmap", unmap), ("operations", operations)])
    }

    fn check(&mut self) -> Result<()> {
        check(&mut self.rig, self.live as u64)
    }
}

/// A second endpoint joins a domain in which much is mapped, and leaves it.
pub(super) struct Attach {
    rig: Rig<Ours>,
    machine: Machine,
    session: Session<Endpoints>,
    live: usize,
    /// The table of its own in which it translates, if it has one.
    mirror: Option<Arc<SoftDomain<HostAddr>>>,
}

impl Attach {
    /// Endpoint 1 is in the domain, endpoint 2 comes and goes: in this process, or with a table of its
    /// own.
    pub(super) fn new(live: usize, mirrored: bool) -> Result<Attach> {
        let machine = Machine::new(if mirrored { 1 } else { 2 });
        let mut rig = machine.rig(256, 1)?;
        fill(&mut rig, live)?;
        let mirror = mirrored.then(|| machine.add_mirror(2, MEMORY << 12)).transpose()?;
        Ok(Attach { rig, machine, session: Session::new(), live, mirror })
    }

    /// Endpoint 2 joins the domain, or leaves it.
    fn join(&mut self, leave: bool) -> Result<()> {
        let (domain, endpoint, flags) = (self.rig.domain.id(), 2, AttachFlags::empty());
        let request = match leave {
            false => Request::Attach { domain, endpoint, flags },
            true => Request::Detach { domain, endpoint },
        };
        self.machine.send(&mut self.session, &request)
    }
}

impl Subject for Attach {
    fn sample(&mut self, How { clock, budget, .. }: How<'_>) -> Result<Sample> {
        let (start, budget) = (clock.now(), budget.as_nanos() as f64);
        let (mut ns, mut times) = (0.0, 0.0);
        loop {
            let begun = clock.now();
            self.join(false)?;
            let attached = clock.now();
            ns += clock.ns(attached.wrapping_sub(begun));
            times += 1.0;
            self.join(true)?;
            if clock.ns(attached.wrapping_sub(start)) >= budget {
                break;
            }
        }
        let ns = ns / times;
        Ok(vec![("ns", ns / self.live as f64), ("map", ns), ("operations", times)])
    }

    fn check(&mut self) -> Result<()> {
        check(&mut self.rig, self.live as u64)?;
        let Some(mirror) = self.mirror.clone() else { return Ok(()) };
        self.join(false)?;
        let mapped = mirror.mappings();
        ensure!(mapped == self.live as u64, "{mapped} of {} mappings are there", self.live);
        for n in (0..self.live as u64).step_by(self.live.div_ceil(100)) {
            let (at, HostAddr(host)) = (page(n).first(), MIRRORED);
            let found = mirror.iova_to_phys(at);
            let expected = HostAddr(host + target(n).0);
            ensure!(found == Some(expected), "{at:?} leads to {found:?}, not to {expected:?}");
        }
        self.join(true)?;
        ensure!(mirror.mappings() == 0, "mappings are left when the endpoint has gone");
        Ok(())
    }
}
