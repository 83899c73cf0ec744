//! Mapping and unmapping under each policy, over a domain in this process.

use std::{hint::black_box, sync::Arc};

use gungraun::prelude::*;
use ringfence_dma::{
    BounceConfig, BounceLimits, BouncePools, Device, Direction, DmaConfig, HostMemory, MapBatch,
    Policy, QueueKind, Stats, TimerKind, UnmapBatch, Written,
};
use ringfence_iommu::{
    Domain, Geometry, HostAddr, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::FixedCpu;

use crate::fixed::{cpus, environment};

/// Bytes of a buffer.
const LEN: usize = 4096;

type Soft = Arc<SoftDomain<HostAddr>>;
type Allocator = Arc<Slabs<FixedCpu>>;
type Buffer = Vec<u8>;

/// A device, and the buffers that are mapped for it and unmapped.
pub(crate) struct Rig {
    domain: Soft,
    device: Device<Soft, Allocator>,
    maps: MapBatch<Soft, Allocator, Buffer, usize>,
    unmaps: UnmapBatch<Soft, Allocator, Buffer, usize>,
    direction: Direction,
    /// By number; empty while it is mapped.
    buffers: Vec<Buffer>,
    addrs: Vec<Iova>,
    /// What the device had done when the counted part began.
    before: Stats,
}

impl Rig {
    fn new(policy: Policy, direction: Direction, buffers: usize) -> Box<Rig> {
        let sizes = PageSizes::from_granule(4096).expect("a power of two");
        let aperture = Range::new(Iova(0), Iova((1 << 48) - 1)).expect("not empty");
        let geometry = Geometry::new(sizes, aperture);
        let domain: Soft = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1));
        let aperture = Aperture::new(0, (1 << 48) - 1, 4096).expect("48 bits of pages");
        let allocator: Allocator = Arc::new(Slabs::new(aperture, cpus()));
        let bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
        let config =
            DmaConfig { timer: TimerKind::Manual, demand: true, bounce, ..DmaConfig::new(policy) };
        let (in_domain, at) = (Arc::clone(&domain), Arc::clone(&allocator));
        let device = if policy.bounces() {
            let (domain, allocator) = (Arc::clone(&domain), Arc::clone(&allocator));
            let pools = BouncePools::with_environment(
                domain,
                allocator,
                HostMemory,
                BounceLimits::default(),
                environment(),
                TimerKind::Manual,
            );
            let pools = pools.expect("pools of the default size");
            Device::builder(in_domain)
                .allocator(at)
                .config(config)
                .environment(environment())
                .pools(&pools)
                .build()
        } else {
            Device::builder(in_domain)
                .allocator(at)
                .config(config)
                .environment(environment())
                .build()
        };
        let device = device.expect("a device under the given policy");
        let (maps, unmaps) = (device.map_batch(), device.unmap_batch());
        let mut rig = Rig {
            domain,
            device,
            maps,
            unmaps,
            direction,
            buffers: (0..buffers).map(|n| vec![n as u8; LEN]).collect(),
            addrs: Vec::with_capacity(buffers),
            before: Stats::default(),
        };
        // Slabs, table pages, slots and the boxes of mappings are allocated from now on.
        rig.one_by_one();
        rig.together();
        rig.device.flush().expect("a flush");
        rig.addrs.clear();
        rig.before = rig.device.stats();
        Box::new(rig)
    }

    /// Maps and unmaps each buffer.
    fn one_by_one(&mut self) {
        for slot in &mut self.buffers {
            let buffer = std::mem::take(slot);
            let mapped = self.device.map(black_box(buffer), self.direction);
            let mut mapping = mapped.expect("there is room");
            self.addrs.push(mapping.iova());
            if self.direction == Direction::FromDevice {
                mapping.note_written(0..LEN as u64).expect("all of it");
            }
            *slot = mapping.unmap().expect("it was mapped");
        }
    }

    /// Maps all buffers with one sync, and unmaps all with another.
    fn together(&mut self) {
        let Rig { maps, unmaps, buffers, addrs, .. } = self;
        for (n, slot) in buffers.iter_mut().enumerate() {
            let buffer = std::mem::take(slot);
            assert!(maps.push(black_box(buffer), self.direction, n).is_ok(), "there is room");
        }
        maps.begin();
        maps.poll(|n, mapping| {
            let mapping = mapping.expect("its sync is over");
            addrs.push(mapping.iova());
            assert!(unmaps.push(mapping, n).is_ok(), "a mapping of this device");
        });
        unmaps.begin();
        unmaps.poll(|n, returned| {
            buffers[n] = returned.expect("it was mapped").buffer;
        });
    }

    /// Checks the counted part: each buffer was mapped once, and is whole. Returns what the device
    /// has counted meanwhile.
    fn check(self: Box<Self>) -> Stats {
        let count = self.buffers.len() as u64;
        assert_eq!(self.addrs.len() as u64, count);
        for (n, buffer) in self.buffers.iter().enumerate() {
            // The device has written nothing, so that unmapping copied what the slot held.
            let written = self.direction == Direction::FromDevice && self.before.bounced > 0;
            let expected = if written { 0 } else { n as u8 };
            assert!(buffer.len() == LEN && buffer.iter().all(|&byte| byte == expected), "{n}");
        }
        let (before, mut done) = (self.before, self.device.stats());
        done.maps -= before.maps;
        done.unmaps -= before.unmaps;
        done.map_calls -= before.map_calls;
        done.map_syncs -= before.map_syncs;
        done.unmap_syncs -= before.unmap_syncs;
        done.flushes -= before.flushes;
        done.bounced -= before.bounced;
        done.copied_bytes -= before.copied_bytes;
        assert_eq!((done.maps, done.unmaps, done.map_failures), (count, count, 0));
        if done.bounced == 0 && done.queued == 0 {
            let gone = |&iova: &Iova| self.domain.iova_to_phys(iova).is_none();
            assert!(self.addrs.iter().all(gone), "it is reachable still");
        }
        // A mapping leads to its buffer: the same calls, not counted.
        let buffer = vec![7; LEN];
        let at = buffer.as_ptr() as u64;
        let mapping = self.device.map(buffer, self.direction).expect("there is room");
        let found = match self.device.effective_policy() {
            Policy::Off => Some(HostAddr(mapping.iova().0)),
            _ => self.domain.iova_to_phys(mapping.iova()),
        };
        assert_eq!(found == Some(HostAddr(at)), !mapping.is_bounced());
        assert!(found.is_some());
        done
    }
}

fn to_device(policy: Policy, buffers: usize) -> Box<Rig> {
    Rig::new(policy, Direction::ToDevice, buffers)
}

fn bounce(direction: Direction) -> Box<Rig> {
    Rig::new(Policy::Bounce, direction, 16)
}

fn check_off(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let done = rig.check();
    assert_eq!((done.maps, done.map_calls, done.unmap_syncs), (count, 0, 0));
}

fn check_strict(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let done = rig.check();
    assert_eq!((done.map_calls, done.unmap_syncs, done.bounced), (count, count, 0));
}

fn check_strict_batch(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let done = rig.check();
    assert_eq!((done.map_calls, done.map_syncs, done.unmap_syncs), (count, 1, 1));
    assert_eq!(done.bounced, 0);
}

fn check_lazy(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let per_cpu = rig.device.effective_policy().queue_kind() == Some(QueueKind::PerCpu);
    let done = rig.check();
    // One entry more than a CPU's queue holds: one flush. A single queue holds more.
    let expected = (count, 0, u64::from(per_cpu));
    assert_eq!((done.map_calls, done.unmap_syncs, done.flushes), expected);
}

fn check_auto(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let done = rig.check();
    assert_eq!(done.map_calls + done.bounced, count);
}

fn check_bounce(rig: Box<Rig>) {
    let count = rig.buffers.len() as u64;
    let done = rig.check();
    assert_eq!((done.map_calls, done.bounced), (0, count));
    assert_eq!(done.copied_bytes, count * LEN as u64);
}

#[library_benchmark]
#[bench::off(args = (Policy::Off, 16), setup = to_device, teardown = check_off)]
#[bench::strict(args = (Policy::Strict, 16), setup = to_device, teardown = check_strict)]
#[bench::strict_map(args = (Policy::StrictMap, 16), setup = to_device, teardown = check_strict)]
#[bench::lazy_sq(args = (Policy::LazySq, 256), setup = to_device, teardown = check_lazy)]
#[bench::lazy_mq(args = (Policy::LazyMq, 256), setup = to_device, teardown = check_lazy)]
#[bench::lazy_sq_map(args = (Policy::LazySqMap, 256), setup = to_device, teardown = check_lazy)]
#[bench::lazy_mq_map(args = (Policy::LazyMqMap, 256), setup = to_device, teardown = check_lazy)]
#[bench::auto(args = (Policy::Auto, 64), setup = to_device, teardown = check_auto)]
fn one_by_one(mut rig: Box<Rig>) -> Box<Rig> {
    rig.one_by_one();
    rig
}

#[library_benchmark]
#[bench::strict_map(args = (Policy::StrictMap, 16), setup = to_device, teardown = check_strict_batch)]
fn batch(mut rig: Box<Rig>) -> Box<Rig> {
    rig.together();
    rig
}

#[library_benchmark]
#[bench::copy_in_4k(args = (Direction::ToDevice), setup = bounce, teardown = check_bounce)]
#[bench::copy_out_4k(args = (Direction::FromDevice), setup = bounce, teardown = check_bounce)]
fn bounced(mut rig: Box<Rig>) -> Box<Rig> {
    rig.one_by_one();
    rig
}

library_benchmark_group!(name = map, benchmarks = [one_by_one, batch, bounced]);
