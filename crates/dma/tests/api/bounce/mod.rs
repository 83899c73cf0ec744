//! Bounce pools over a domain that fails on command, in memory that counts.

mod failures;
mod programs;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use ringfence_dma::{
    BounceConfig, BounceLimits, BounceMemory, BouncePools, Chunk, Device, Direction, DmaConfig,
    Environment, Error, HostMemory, Policy, TimerKind,
};
use ringfence_iommu::{Capabilities, GuestPhys, HostAddr, Iova, table::Limits};
use ringfence_sync::{clock::ManualClock, cpu::FixedCpu};

use crate::mock::{EagerAllocator, MockDomain, TestDevice, TickingClock};

/// Memory of this process, as guest-physical memory; counted, bounded, and not zeroed.
#[derive(Clone)]
pub(crate) struct Supply(Arc<State>);

struct State {
    domain: Arc<MockDomain>,
    live: Mutex<BTreeMap<u64, Chunk<HostAddr>>>,
    room: Mutex<u64>,
}

impl Supply {
    pub(crate) fn new(domain: &Arc<MockDomain>) -> Supply {
        let domain = Arc::clone(domain);
        Supply(Arc::new(State { domain, live: Mutex::default(), room: Mutex::new(u64::MAX) }))
    }

    /// Bytes that were taken and not given back.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.live.lock().unwrap().values().map(|chunk| chunk.len).sum()
    }

    /// From now on there are only `bytes`.
    pub(crate) fn set_room(&self, bytes: u64) {
        *self.0.room.lock().unwrap() = bytes;
    }

    /// Whether all of that was taken and not given back.
    pub(crate) fn holds(&self, target: u64, len: u64) -> bool {
        let live = self.0.live.lock().unwrap();
        live.range(..=target).next_back().is_some_and(|(&at, chunk)| target + len <= at + chunk.len)
    }
}

// SAFETY: the memory is that of `HostMemory`, under another address type.
unsafe impl BounceMemory<GuestPhys> for Supply {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        if self.bytes() + len > *self.0.room.lock().unwrap() {
            return None;
        }
        let chunk = HostMemory.take(len, align)?;
        // SAFETY: it is ours, and that long.
        unsafe { chunk.ptr.as_ptr().write_bytes(0xee, len as usize) };
        assert!(self.0.live.lock().unwrap().insert(chunk.target.0, chunk).is_none());
        Some(Chunk { target: GuestPhys(chunk.target.0), ptr: chunk.ptr, len, align })
    }

    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        for (range, target, _) in self.0.domain.cached() {
            let apart = target > chunk.target.0 + (chunk.len - 1)
                || target + range.extent() < chunk.target.0;
            assert!(apart, "memory is given back that the device reaches at {range}");
        }
        let taken = self.0.live.lock().unwrap().remove(&chunk.target.0).expect("it was taken once");
        assert_eq!((taken.len, taken.align), (chunk.len, chunk.align), "as it was taken");
        // SAFETY: it was taken there, and given back once.
        unsafe { HostMemory.give_back(taken) };
    }
}

/// Two devices of a domain, the second with few address bits, and their pools.
pub(crate) struct Rig {
    pub(crate) devices: [TestDevice; 2],
    pub(crate) pools: BouncePools<GuestPhys>,
    pub(crate) domain: Arc<MockDomain>,
    pub(crate) allocator: Arc<EagerAllocator>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) cpu: Arc<FixedCpu>,
    pub(crate) memory: Supply,
}

/// The highest address of the second device.
pub(crate) const NARROW: u64 = (1 << 26) - 1;

/// What a device may hold.
pub(crate) const QUOTA: u64 = 160 << 10;

impl Rig {
    pub(crate) fn new(limits: BounceLimits) -> Rig {
        let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
        let allocator = EagerAllocator::new(4096, Arc::clone(&domain.log));
        let clock = Arc::new(ManualClock::new(1_000_000));
        let cpu = Arc::new(FixedCpu::new(2));
        let memory = Supply::new(&domain);
        let environment = || Environment {
            clock: Arc::clone(&clock) as _,
            cpu: Arc::clone(&cpu) as _,
            thread_clock: Arc::new(TickingClock::default()),
        };
        let pools = BouncePools::with_environment(
            Arc::clone(&domain) as _,
            Arc::clone(&allocator) as _,
            memory.clone(),
            limits,
            environment(),
            TimerKind::Manual,
        )
        .unwrap();
        let device = |limit| {
            let config = DmaConfig {
                limit: Iova(limit),
                bounce: BounceConfig { quota: QUOTA, ..BounceConfig::default() },
                ..DmaConfig::new(Policy::Bounce)
            };
            let (domain, allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
            Device::builder(domain)
                .allocator(allocator)
                .config(config)
                .environment(environment())
                .pools(&pools)
                .build()
                .unwrap()
        };
        let devices = [device(u64::MAX), device(NARROW)];
        Rig { devices, pools, domain, allocator, clock, cpu, memory }
    }

    /// How much a device holds, by the error of a request beyond its quota.
    pub(crate) fn held_by(&self, device: usize) -> u64 {
        match self.devices[device].take_buffer(QUOTA + 4096, Direction::ToDevice) {
            Err(Error::BounceQuota { held, .. }) => held,
            other => panic!("{other:?}"),
        }
    }

    /// Drops devices and pools, and checks that exactly what could not be unmapped is left.
    pub(crate) fn end(self) {
        let held = self.held_by(0) + self.held_by(1);
        let Rig { devices, pools, domain, allocator, memory, .. } = self;
        assert_eq!(pools.stats().slots, 0, "a slot is lost: {pools:?}");
        let quarantined = pools.stats().quarantined_bytes;
        assert!(held <= quarantined, "a device holds what it gave back");
        drop((devices, pools));
        for (range, target, _) in domain.cached() {
            assert!(memory.holds(target, range.extent() + 1), "{range} leads to freed memory");
        }
        // What fails while the pools are dropped is left too, and is not counted.
        assert!(memory.bytes() >= quarantined);
        if memory.bytes() == 0 {
            assert_eq!(domain.table.mappings(), 0, "a translation leaked");
            assert_eq!(domain.cached(), [], "the device still reaches something");
            assert_eq!(allocator.live(), 0, "an IOVA leaked");
        }
    }
}
