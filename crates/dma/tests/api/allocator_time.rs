//! The allocator's time.

use std::sync::Arc;

use ringfence_dma::{Device, Direction, DmaConfig, Environment, Policy, TimerKind};
use ringfence_iommu::{Capabilities, table::Limits};
use ringfence_iova::{AllocError, Allocator, FreeError, Request, ReserveError, Stats};
use ringfence_sync::{clock::ManualClock, cpu::FixedCpu};

use crate::mock::{Buf, EagerAllocator, MockDomain, TickingClock};

const ALLOC_NS: u64 = 5;
const FREE_NS: u64 = 7;

/// An allocator with slow calls.
struct Slow {
    inner: Arc<EagerAllocator>,
    clock: Arc<ManualClock>,
}

impl Allocator for Slow {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        self.clock.advance(ALLOC_NS);
        self.inner.alloc(request)
    }
    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.clock.advance(FREE_NS);
        self.inner.free(iova, size)
    }
    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        self.inner.check_free(iova, size)
    }
    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        self.inner.reserve(first, last)
    }
    fn granule(&self) -> u64 {
        self.inner.granule()
    }
    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

fn device(policy: Policy, sample_every: u32) -> Device<Arc<MockDomain>, Slow> {
    let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
    // Each reading of the clock takes 30 ns.
    let clock = Arc::new(ManualClock::stepping(30));
    let inner = EagerAllocator::new(4096, Arc::clone(&domain.log));
    let allocator = Slow { inner, clock: Arc::clone(&clock) };
    let environment = Environment {
        clock,
        cpu: Arc::new(FixedCpu::new(1)),
        thread_clock: Arc::new(TickingClock::default()),
    };
    let config = DmaConfig { timer: TimerKind::Manual, sample_every, ..DmaConfig::new(policy) };
    Device::builder(domain)
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .build()
        .unwrap()
}

#[test]
fn the_allocators_time_is_counted_whichever_call_frees() {
    for policy in Policy::ALL {
        let device = device(policy, 1);
        for n in 1..=100 {
            let buffer = Buf::new(&[(n * 0x1000, 0x1000)]);
            drop(device.map(buffer, Direction::ToDevice).unwrap().unmap().unwrap());
        }
        let queued = device.stats().queued;
        assert_eq!(queued != 0, policy.is_lazy(), "{policy}");
        assert_eq!(device.stats().frees + queued, if policy == Policy::Off { 0 } else { 100 });
        // Queued ranges are freed outside any unmap, but are counted all the same.
        device.flush().unwrap();
        let stats = device.stats();
        let calls = if policy == Policy::Off { 0 } else { 100 };
        assert_eq!((stats.alloc_time.count, stats.alloc_time.ns), (calls, calls * ALLOC_NS));
        assert_eq!((stats.free_time.count, stats.free_time.ns), (calls, calls * FREE_NS));
        assert_eq!(stats.frees, calls, "{policy}");
    }
}

#[test]
fn one_call_of_the_allocator_in_n_is_timed() {
    for policy in [Policy::StrictMap, Policy::LazySq] {
        let device = device(policy, 64);
        for n in 0..6400 {
            let buffer = Buf::new(&[(n * 0x1000, 0x1000)]);
            drop(device.map(buffer, Direction::ToDevice).unwrap().unmap().unwrap());
        }
        device.flush().unwrap();
        let stats = device.stats();
        for time in [stats.alloc_time, stats.free_time] {
            assert!(time.count.abs_diff(100) <= 2, "{policy}: {time:?}");
        }
        assert_eq!(stats.alloc_time.mean_ns(), ALLOC_NS as f64);
        assert_eq!(stats.free_time.mean_ns(), FREE_NS as f64);
    }
}
