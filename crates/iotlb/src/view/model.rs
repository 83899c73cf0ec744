//! A view whose endpoint is put elsewhere, explored by loom.

use loom::thread;
use ringfence_iommu::{
    Domain, Gather, Geometry, GuestPhys, Map, PageSizes, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_mem::{Region, Translate};
use ringfence_sync::{
    atomic::{AtomicBool, Ordering},
    model::{self, check},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::Binding;

/// A slot of the model's smallest node.
const PAGE: u64 = 1 << 56;

/// A view belongs to one thread, here to the one that it is moved to before its first access.
struct Moved(Option<View>);

// SAFETY: all threads of a model run on one thread of the system.
unsafe impl Send for Moved {}

fn memory() -> Arc<Memory> {
    let file = memfd_create("model", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    Memory::map(vec![(Region { gpa: 0, size: 4096, user_addr: 0, mmap_offset: 0 }, file)]).unwrap()
}

/// An endpoint, and what it reaches at first. Loom fails the model if a device's access there overlaps its
/// owner's, or is not ordered with it.
struct World {
    endpoint: Arc<Endpoint>,
    reached: model::Memory,
    returned: AtomicBool,
}

impl World {
    fn access(&self, view: &View) {
        if view.slices(0, 1, Access::Read, |_| ()).is_ok() {
            self.touch();
        }
    }

    fn touch(&self) {
        assert!(!self.returned.load(Ordering::Relaxed), "reached after it was returned");
        self.reached.read();
    }

    /// Binds the endpoint to nothing; what it reached is the owner's again once that is in force.
    fn unbind(&self) {
        let token = self.endpoint.bind(Binding::Blocked);
        self.take_back(|| self.endpoint.shootdown().is_over(token));
    }

    /// Unmaps the page; what it led to is the owner's again once that is in force.
    fn unmap(&self, domain: &SoftDomain<GuestPhys>) {
        let mut gather = Gather::new();
        assert_eq!(domain.unmap_pages(&[page()], &mut gather), Ok(PAGE.into()));
        let token = domain.sync_begin(gather.work()).unwrap();
        self.take_back(|| domain.sync_poll(token, gather.work(), &mut |_, _| ()));
    }

    /// What it reached is the owner's again if `is_over` soon.
    fn take_back(&self, is_over: impl Fn() -> bool) {
        for _ in 0..2 {
            if is_over() {
                self.returned.store(true, Ordering::Relaxed);
                self.reached.write();
                return;
            }
            thread::yield_now();
        }
    }
}

/// One page.
fn page() -> Range {
    Range::from_len(Iova(0), PAGE).unwrap()
}

/// A domain in which it is mapped.
fn domain(shootdown: &Arc<Shootdown>) -> Arc<SoftDomain<GuestPhys>> {
    let geometry = Geometry::new(PageSizes::new(PAGE).unwrap(), Range::ALL);
    let domain = SoftDomain::new(geometry, Limits::NONE, Arc::clone(shootdown));
    domain.map_pages(&[Map::new(page(), GuestPhys(0), Prot::RW)]).unwrap();
    domain
}

/// An endpoint that nothing was reached through yet.
fn world(shootdown: Arc<Shootdown>, binding: Binding) -> Arc<World> {
    let endpoint = Endpoint::new(1, shootdown, binding);
    let (reached, returned) = (model::Memory::default(), AtomicBool::new(false));
    Arc::new(World { endpoint, reached, returned })
}

/// Unbinds the endpoint while a device accesses through a view that was there before, or is made by
/// it. The endpoint was bound before, or is bound meanwhile (`twice`).
fn race(there: bool, twice: bool, device: fn(&World, View)) {
    // rule V14
    check(Some(3), move || {
        let shootdown = Shootdown::new(1);
        let domain = domain(&shootdown);
        // Loom does not know how `Arc` orders the last drop: the domain lives longer than the threads.
        let bound = || Binding::Domain(Arc::clone(&domain));
        let world = world(shootdown, if twice { Binding::Blocked } else { bound() });
        let (memory, of) = (memory(), Arc::clone(&world.endpoint));
        let view = move || View::new(Arc::clone(&of), Arc::clone(&memory)).unwrap();
        let before = Moved(there.then(&view));
        let theirs = Arc::clone(&world);
        let thread = thread::spawn(move || {
            let Moved(before) = { before };
            device(&theirs, before.unwrap_or_else(view));
        });
        if twice {
            world.endpoint.bind(bound());
        }
        world.unbind();
        thread.join().unwrap();
        drop(domain);
    });
}

#[test]
fn a_view_whose_endpoint_is_put_elsewhere_translates_as_before_up_to_its_quiet_point_only() {
    race(true, false, |world, mut view| {
        for _ in 0..2 {
            world.access(&view);
            view.quiet();
        }
        world.access(&view);
    });
}

#[test]
fn nor_does_one_that_was_offline_meanwhile() {
    race(true, false, |world, mut view| {
        world.access(&view);
        view.offline();
        view.online();
        world.access(&view);
    });
}

#[test]
fn nor_one_that_is_made_meanwhile() {
    race(false, false, |world, mut view| {
        world.access(&view);
        view.quiet();
        world.access(&view);
    });
}

#[test]
fn a_lease_holds_what_was_reached_beyond_the_change() {
    race(true, false, hold);
}

#[test]
fn of_two_changes_the_last_counts() {
    race(true, true, |world, mut view| {
        for _ in 0..2 {
            view.quiet();
        }
        world.access(&view);
    });
}

/// Table, log and views together: each view looks the page up in the table, and has it in a cache of its own
/// until it reads the log. The owner unmaps it meanwhile.
fn unmapped_under(devices: [fn(&World, View); 2]) {
    check(Some(2), move || {
        let shootdown = Shootdown::new(devices.len());
        let domain = domain(&shootdown);
        let world = world(shootdown, Binding::Domain(Arc::clone(&domain)));
        let memory = memory();
        let threads = devices.map(|device| {
            let view = View::new(Arc::clone(&world.endpoint), Arc::clone(&memory));
            let (view, theirs) = (Moved(view), Arc::clone(&world));
            thread::spawn(move || {
                let Moved(view) = { view };
                device(&theirs, view.unwrap());
            })
        });
        world.unmap(&domain);
        for thread in threads {
            thread.join().unwrap();
        }
        drop(domain);
    });
}

fn look_twice(world: &World, mut view: View) {
    world.access(&view);
    view.quiet();
    world.access(&view);
}

fn hold(world: &World, mut view: View) {
    let lease = view.slices(0, 1, Access::Read, |_| ()).is_ok().then(|| view.lease(0, 1));
    view.quiet();
    if lease.is_some() {
        world.touch();
    }
    drop(lease);
    world.access(&view);
}

#[test]
fn what_was_unmapped_is_forgotten_by_both_views_that_have_it() {
    // rule L18
    unmapped_under([look_twice, look_twice]);
}

#[test]
fn a_lease_of_one_view_holds_what_was_unmapped_and_the_other_view_does_not() {
    unmapped_under([hold, look_twice]);
}

/// The owner unmaps the page while another thread puts the endpoint elsewhere: an invalidation there no longer
/// waits for the view.
#[test]
fn what_a_view_found_is_gone_when_it_translates_elsewhere() {
    // rule L18
    check(Some(2), || {
        let shootdown = Shootdown::new(1);
        let domain = domain(&shootdown);
        let world = world(shootdown, Binding::Domain(Arc::clone(&domain)));
        let view = Moved(View::new(Arc::clone(&world.endpoint), memory()));
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let Moved(view) = { view };
            look_twice(&theirs, view.unwrap());
        });
        let (theirs, there) = (Arc::clone(&world), Arc::clone(&domain));
        let owner = thread::spawn(move || theirs.unmap(&there));
        world.endpoint.bind(Binding::Blocked);
        [device, owner].into_iter().for_each(|thread| thread.join().unwrap());
        drop(domain);
    });
}
