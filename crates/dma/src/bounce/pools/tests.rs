//! Several devices, and several threads, at the same pools.

use core::panic::Location;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex as StdMutex},
    thread,
};

use ringfence_iommu::{
    Domain, Geometry, HostAddr, Iova, PageSizes, Prot, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iova::{Aperture, RbTree};
use ringfence_sync::{
    clock::ManualClock,
    cpu::{CpuId, OsCpu},
};

use super::*;
use crate::{
    OsThreadClock, ThreadClock,
    bounce::{HostMemory, Slot},
};

const LAST: u64 = (1 << 40) - 1;

struct Rig {
    domain: Arc<SoftDomain<HostAddr>>,
    allocator: Arc<RbTree>,
    clock: Arc<ManualClock>,
    pools: Option<BouncePools<HostAddr>>,
}

impl Rig {
    fn new(limits: BounceLimits) -> Rig {
        let aperture = Range::new(Iova(0), Iova(LAST)).unwrap();
        let geometry = Geometry::new(PageSizes::X86, aperture);
        let domain = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(8));
        let allocator = Arc::new(RbTree::new(Aperture::new(0, LAST, 4096).unwrap()));
        let clock = Arc::new(ManualClock::new(1_000_000));
        let environment = Environment { clock: Arc::clone(&clock) as _, ..Environment::default() };
        let pools = BouncePools::with_environment(
            Arc::clone(&domain) as _,
            Arc::clone(&allocator) as _,
            HostMemory,
            limits,
            environment,
            TimerKind::Manual,
        );
        Rig { domain, allocator, clock, pools: Some(pools.unwrap()) }
    }

    fn pools(&self) -> &BouncePools<HostAddr> {
        self.pools.as_ref().unwrap()
    }

    fn client(&self, limit: u64, quota: u64) -> Client<HostAddr> {
        let cpu: Arc<dyn CpuId> = Arc::new(OsCpu::new());
        Client::new(self.pools().clone(), ClientParts { limit, quota, cpu })
    }

    /// Drops the pools; nothing may be left.
    fn end(mut self) {
        let inner = Arc::downgrade(&self.pools().0);
        self.pools = None;
        assert!(inner.upgrade().is_none(), "somebody holds the pools");
        assert_eq!(self.domain.mappings(), 0);
        assert_eq!(self.allocator.stats().live_ranges, 0);
    }
}

fn take(client: &Client<HostAddr>, len: u64, prot: Prot) -> Result<Slot, Error> {
    client.take(len, prot, Location::caller())
}

/// What a take and give back of a slot that a CPU has cached cost: printed, not judged.
/// `cargo test --release -p ringfence-dma --lib measure -- --ignored --nocapture`
#[test]
#[ignore = "it measures"]
fn measure() {
    const ROUNDS: u64 = 200_000;
    let limits = BounceLimits { idle_ms: 1 << 30, ..BounceLimits::default() };
    let rig = Rig::new(limits);
    let same = rig.client(u64::MAX, 1 << 30);
    // The best of ten, in time of the thread: the machine does other things too.
    let run = |client: &Client<HostAddr>, size: u64, depth: usize| {
        let mut held: Vec<Slot> = Vec::new();
        let mut round = || {
            let begun = OsThreadClock.thread_ns();
            for _ in 0..ROUNDS / depth as u64 {
                held.extend((0..depth).map(|_| take(client, size, Prot::WRITE).unwrap()));
                held.drain(..).for_each(|slot| client.give_back(slot));
            }
            (OsThreadClock.thread_ns() - begun) as f64 / ROUNDS as f64
        };
        (0..10).map(|_| round()).fold(f64::INFINITY, f64::min)
    };
    for (size, depth) in [(4096, 1), (4096, 64), (16384, 1), (65536, 4), (65536, 64), (1 << 20, 1)]
    {
        println!(
            "{size:>8} bytes, {depth:>2} at a time, 1 thread: {:.1} ns",
            run(&same, size, depth)
        );
    }
    let (one, other) = (rig.client(u64::MAX, 1 << 30), rig.client(u64::MAX, 1 << 30));
    for (name, a, b) in [("one device", &same, &same), ("a device each", &one, &other)] {
        let times = thread::scope(|scope| {
            let threads = [a, b].map(|client| scope.spawn(move || run(client, 4096, 1)));
            threads.map(|thread| thread.join().unwrap())
        });
        println!("    4096 bytes, 2 threads, {name}: {times:.1?} ns");
    }
}
