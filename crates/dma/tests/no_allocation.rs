//! Mapping and unmapping allocate nothing once they have started.
#![cfg(not(loom))]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ringfence_dma::{
    BounceLimits, BounceMemory, BouncePools, Chunk, Device, Direction, DmaBuffer, DmaConfig,
    Environment, FlushTuning, HostMemory, OsThreadClock, Policy, ThreadClock, TimerKind,
};
use ringfence_iommu::{
    Capabilities, Domain, Error, Gather, Geometry, GuestPhys, HostAddr, Iova, Map, PageSizes,
    Partial, Range, Result, SyncToken, Work,
};
use ringfence_iova::{AllocError, Allocator, FreeError, Request, ReserveError, Stats};
use ringfence_mem::{HostSlice, ReadSlice};
use ringfence_sync::{clock::ManualClock, cpu::OneCpu};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A domain that does nothing.
struct Nothing;

// SAFETY: there is no device.
unsafe impl Domain for Nothing {
    type Target = GuestPhys;

    fn geometry(&self) -> Geometry {
        Geometry::new(PageSizes::X86, Range::ALL)
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::FULL
    }
    fn map_pages(&self, _: &[Map<GuestPhys>]) -> Result<(), Partial> {
        Ok(())
    }
    fn unmap_pages(&self, ranges: &[Range], _: &mut Gather) -> Result<u128, Partial> {
        Ok(ranges.iter().map(|range| range.len()).sum())
    }
    /// Never over at once: waiting for syncs must not allocate either.
    fn sync_begin(&self, _: Work<'_>) -> Result<SyncToken> {
        Ok(SyncToken::new(1))
    }
    fn sync_poll(&self, _: SyncToken, _: Work<'_>, _: &mut dyn FnMut(Range, Error)) -> bool {
        true
    }
    fn sync_wait(&self, _: SyncToken) {}
    fn iova_to_phys(&self, _: Iova) -> Option<GuestPhys> {
        None
    }
}

/// An allocator that never runs out.
struct Endless(AtomicU64);

impl Allocator for Endless {
    fn alloc(&self, request: &Request) -> std::result::Result<u64, AllocError> {
        Ok(self.0.fetch_add(request.size, Ordering::Relaxed))
    }
    fn free(&self, _: u64, _: u64) -> std::result::Result<(), FreeError> {
        Ok(())
    }
    fn check_free(&self, _: u64, _: u64) -> std::result::Result<(), FreeError> {
        Ok(())
    }
    fn reserve(&self, _: u64, _: u64) -> std::result::Result<(), ReserveError> {
        Ok(())
    }
    fn granule(&self) -> u64 {
        4096
    }
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct Piece(u64);

// SAFETY: there is no memory behind these addresses that could be misused.
unsafe impl DmaBuffer<GuestPhys> for Piece {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        each(GuestPhys(self.0), 0x1_0000);
        each(GuestPhys(self.0 + 0x2_0000), 0x1_0000);
    }
}

fn device(policy: Policy, flush: FlushTuning) -> Device<Nothing, Endless> {
    let config = DmaConfig {
        timer: TimerKind::Manual,
        sample_every: 64,
        flush: Some(flush),
        ..DmaConfig::new(policy)
    };
    Device::builder(Nothing)
        .allocator(Endless(AtomicU64::new(1 << 20)))
        .config(config)
        .build()
        .unwrap()
}

fn map_and_unmap(device: &Device<Nothing, Endless>) {
    let policy = device.effective_policy();
    // The first mapping of a thread allocates the place that all others reuse.
    drop(device.map(Piece(0), Direction::ToDevice).unwrap());
    let before = ALLOCATIONS.with(Cell::get);
    for n in 0..10_000 {
        let mapping = device.map(Piece(n << 20), Direction::ToDevice).unwrap();
        assert_eq!(mapping.segments().len(), if policy == Policy::Off { 2 } else { 1 });
        mapping.unmap().unwrap();
    }
    let allocations = ALLOCATIONS.with(Cell::get) - before;
    assert_eq!(allocations, 0, "{policy}");
}

#[test]
fn mapping_and_unmapping_take_nothing_from_the_heap() {
    for policy in Policy::ALL {
        let device = device(policy, FlushTuning { slots: 256, ..FlushTuning::of(policy) });
        map_and_unmap(&device);
        if policy.is_lazy() {
            assert!(device.stats().flushes > 30, "the queue was filled many times");
        }
    }
}

#[test]
fn batches_take_nothing_from_the_heap_once_they_have_grown() {
    for policy in Policy::ALL {
        let device = device(policy, FlushTuning { slots: 256, ..FlushTuning::of(policy) });
        let (mut maps, mut unmaps) = (device.map_batch(), device.unmap_batch());
        let mut before = 0;
        for round in 0..1000 {
            if round == 2 {
                before = ALLOCATIONS.with(Cell::get);
            }
            for n in 0..16 {
                assert!(maps.push(Piece(n << 20), Direction::ToDevice, n).is_ok());
            }
            maps.finish(|n, mapping| unmaps.push(mapping.unwrap(), n).unwrap());
            unmaps.finish(|_, returned| drop(returned.unwrap()));
        }
        let allocations = ALLOCATIONS.with(Cell::get) - before;
        assert_eq!(allocations, 0, "{policy}");
    }
}

#[test]
fn queues_that_were_made_or_bounded_on_the_way_take_nothing_either() {
    let linux = FlushTuning::of(Policy::LazyMq);
    let device = device(Policy::StrictMap, linux);
    map_and_unmap(&device);
    device.set_policy(Policy::LazyMqMap).unwrap();
    map_and_unmap(&device);
    let flushes = device.stats().flushes;
    let tunings = [
        FlushTuning { slots: 1000, high_water: Some(20), ..linux },
        FlushTuning { slots: 100, max_exposure_ms: Some(1), ..linux },
        FlushTuning { slots: 1000, max_exposure_bytes: Some(50 * 0x2_0000), ..linux },
    ];
    for tuning in tunings {
        device.set_flush_tuning(tuning).unwrap();
        map_and_unmap(&device);
    }
    let stats = device.stats();
    assert!(stats.flushes > flushes + 200, "the queues were filled many times: {stats:?}");
    assert!(stats.bound_flushes >= 199, "{stats:?}");
}

/// The heap, as guest-physical memory.
struct Heap;

// SAFETY: the memory is that of `HostMemory`, under another address type.
unsafe impl BounceMemory<GuestPhys> for Heap {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        let chunk = HostMemory.take(len, align)?;
        Some(Chunk { target: GuestPhys(chunk.target.0), ptr: chunk.ptr, len, align })
    }
    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        let target = HostAddr(chunk.target.0);
        let Chunk { ptr, len, align, .. } = chunk;
        // SAFETY: as the caller promises: `take` is that of the heap.
        unsafe { HostMemory.give_back(Chunk { target, ptr, len, align }) };
    }
}

/// Bytes that the CPU can reach, at an address that the device need not know.
struct Copied(&'static mut [u8]);

// SAFETY: there is no memory behind the address that could be misused; the bytes are there for
// ever.
unsafe impl DmaBuffer<GuestPhys> for Copied {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        each(GuestPhys(1 << 40), self.0.len() as u64);
    }
    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each((&*self.0).into());
        true
    }
    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each((&mut *self.0).into());
        true
    }
}

/// A clock by which the CPU is never shared, so that other load on the machine does not matter.
struct Own;

impl ThreadClock for Own {
    fn thread_ns(&self) -> u64 {
        OsThreadClock.thread_ns()
    }
}

/// One CPU: on another CPU the thread would first have to fill that CPU's cache of slots.
fn one_cpu() -> Environment {
    let thread_clock = Arc::new(Own);
    Environment { cpu: Arc::new(OneCpu), thread_clock, ..Environment::default() }
}

#[test]
fn choosing_takes_nothing_from_the_heap() {
    let (domain, allocator) = (Arc::new(Nothing), Arc::new(Endless(AtomicU64::new(1 << 20))));
    let (for_domain, for_allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
    let clock = Arc::new(ManualClock::new(0));
    let environment = Environment { clock: Arc::clone(&clock) as _, ..one_cpu() };
    let pools = BouncePools::with_environment(
        for_domain,
        for_allocator,
        Heap,
        BounceLimits { idle_ms: 1 << 30, ..BounceLimits::default() },
        environment.clone(),
        TimerKind::Manual,
    )
    .unwrap();
    let config = DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(Policy::Auto) };
    let device = Device::builder(domain)
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .pools(&pools)
        .build()
        .unwrap();
    let run = |mut buffer, count| {
        for _ in 0..count {
            let mapping = device.map(buffer, Direction::Bidirectional).unwrap();
            clock.advance(50_000);
            buffer = mapping.unmap().unwrap();
        }
        buffer
    };
    let buffer = run(Copied(vec![0; 4096].leak()), 10_000);
    let before = ALLOCATIONS.with(Cell::get);
    run(buffer, 100_000);
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0);
    assert_eq!(device.choices().unwrap().cells.len(), 1);
}

#[test]
fn bouncing_takes_nothing_from_the_heap_once_there_are_slots() {
    let allocator = Arc::new(Endless(AtomicU64::new(1 << 40)));
    let limits = BounceLimits { idle_ms: 1 << 30, ..BounceLimits::default() };
    let environment = one_cpu();
    let domain = Arc::new(Nothing);
    let pools = BouncePools::with_environment(
        domain,
        Arc::clone(&allocator) as _,
        Heap,
        limits,
        environment.clone(),
        TimerKind::Manual,
    );
    let config = DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(Policy::Bounce) };
    let device = Device::builder(Nothing)
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .pools(&pools.unwrap())
        .build()
        .unwrap();
    for size in [4096, 100_000, 1 << 20] {
        // More than a CPU's cache holds.
        let mut buffers: Vec<Copied> = (0..80).map(|_| Copied(vec![0; size].leak())).collect();
        let mut mapped = Vec::with_capacity(buffers.len());
        let mut before = 0;
        for round in 0..20 {
            if round == 4 {
                before = ALLOCATIONS.with(Cell::get);
            }
            for buffer in buffers.drain(..) {
                mapped.push(device.map(buffer, Direction::FromDevice).unwrap());
            }
            assert!(mapped.iter().all(|mapping| mapping.is_bounced()));
            buffers.extend(mapped.drain(..).map(|mapping| mapping.unmap().unwrap()));
            drop(device.take_buffer(size as u64, Direction::FromDevice).unwrap());
        }
        assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0, "{size}");
    }
}
