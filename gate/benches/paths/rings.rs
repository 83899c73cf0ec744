//! Both ends of a virtqueue.

use std::{hint::black_box, sync::Arc};

use gungraun::prelude::*;
use ringfence_mem::{GuestRam, Memory, Physical};
use ringfence_vhost_user::RingAddresses;
use ringfence_virtq::{
    Chain, Desc, device,
    driver::{self, Rings, Used},
};

/// Descriptors of a ring.
const SIZE: u16 = 256;
/// Chains of three descriptors in the ring at a time.
const CHAINS: u64 = 64;
/// The ring lies before the buffers.
const BUFFERS_AT: u64 = 1 << 16;
const PAGE: u64 = 4096;

/// A request as a block device has it: header, data, status.
fn descs(n: u64) -> [Desc; 3] {
    let at = BUFFERS_AT + n * PAGE;
    [Desc::readable(at, 16), Desc::writable(at + 64, 2048), Desc::writable(at + 16, 1)]
}

/// A ring between a driver and a device in this thread.
pub(crate) struct Ring {
    bus: Physical,
    driver: driver::Queue,
    device: device::Queue,
    chain: Chain,
    /// Heads of chains that the device took, and how many bytes it may write of each.
    taken: Vec<(u16, u64)>,
    used: Vec<Used>,
}

impl Ring {
    fn new(packed: bool) -> Box<Ring> {
        let ram = GuestRam::new((BUFFERS_AT + CHAINS * PAGE) as usize, 0).expect("memory");
        let bus = Physical::new(Memory::of_ram(&ram).expect("memory"));
        let (driver, device) =
            ends(&ram, &bus, driver::QueueConfig { size: SIZE, event_idx: true, packed });
        let (taken, used) =
            (Vec::with_capacity(CHAINS as usize), Vec::with_capacity(CHAINS as usize));
        Box::new(Ring { bus, driver, device, chain: Chain::new(), taken, used })
    }

    fn add(&mut self) {
        for n in 0..CHAINS {
            self.driver.add(black_box(&descs(n)), n).expect("there is room");
        }
        self.driver.publish();
        black_box(self.driver.needs_kick());
    }

    fn take(&mut self) {
        while self.device.pop(&self.bus, &mut self.chain).expect("the ring is sound") {
            self.taken.push((self.chain.head(), self.chain.writable_len()));
        }
    }

    fn complete(&mut self) {
        for &(head, len) in &self.taken {
            self.device.push_used(head, len as u32);
        }
        black_box(self.device.publish_used());
    }

    fn get(&mut self) {
        while let Some(used) = self.driver.pop().expect("the ring is sound") {
            self.used.push(used);
        }
    }

    /// Continues until all chains are back, and checks each.
    fn check(mut self: Box<Self>) {
        if self.taken.is_empty() {
            self.take();
        }
        let lens = self.taken.iter().map(|&(_, len)| len);
        assert!(lens.eq([2049; CHAINS as usize]), "chains are lost or changed");
        if self.device.in_flight() > 0 {
            self.complete();
        }
        if self.used.is_empty() {
            self.get();
        }
        let tokens = self.used.iter().map(|used| (used.token, used.len));
        assert!(tokens.eq((0..CHAINS).map(|n| (n, 2049))), "chains do not come back");
        assert_eq!((self.driver.in_flight(), self.device.in_flight()), (0, 0));
        // The device finds what the driver has put there.
        self.driver.add(&descs(7), 0).expect("there is room");
        self.driver.publish();
        assert_eq!(self.device.pop(&self.bus, &mut self.chain), Ok(true));
        assert_eq!(self.chain.descs(), descs(7));
    }
}

/// The driver's end of a ring at `at` in `ram`, and its addresses for a device without an IOMMU.
pub(crate) fn driver_end(
    ram: &Arc<GuestRam>,
    at: u64,
    config: driver::QueueConfig,
) -> (driver::Queue, RingAddresses) {
    let offsets = config.offsets();
    let window = ram.window(at as usize, offsets.len).expect("the ring lies in the memory");
    let rings = Rings::placed(&window, &config).expect("there is room");
    let queue = driver::Queue::with_config(config, rings).expect("a legal queue");
    let [desc, avail, used] =
        [offsets.desc, offsets.avail, offsets.used].map(|area| ram.gpa() + at + area as u64);
    (queue, RingAddresses { desc, avail, used, log: None })
}

/// Both ends of a ring at the beginning of `ram`.
pub(crate) fn ends(
    ram: &Arc<GuestRam>,
    bus: &Physical,
    config: driver::QueueConfig,
) -> (driver::Queue, device::Queue) {
    let (driver, RingAddresses { desc, avail, used, .. }) = driver_end(ram, 0, config);
    let driver::QueueConfig { size, event_idx, packed } = config;
    let (indirect, base) = (true, device::RingConfig::start(packed));
    let config = device::RingConfig { size, desc, avail, used, event_idx, indirect, packed, base };
    (driver, device::Queue::new(config, bus).expect("a legal queue"))
}

fn empty(packed: bool) -> Box<Ring> {
    let mut ring = Ring::new(packed);
    // A lap, so that the ends' records of chains are allocated.
    ring.add();
    ring.take();
    ring.complete();
    ring.get();
    ring.taken.clear();
    ring.used.clear();
    ring
}

fn filled(packed: bool) -> Box<Ring> {
    let mut ring = empty(packed);
    ring.add();
    ring
}

fn taken(packed: bool) -> Box<Ring> {
    let mut ring = filled(packed);
    ring.take();
    ring
}

fn completed(packed: bool) -> Box<Ring> {
    let mut ring = taken(packed);
    ring.complete();
    ring
}

fn check(ring: Box<Ring>) {
    ring.check();
}

#[library_benchmark(teardown = check)]
#[bench::split(args = (false), setup = empty)]
#[bench::packed(args = (true), setup = empty)]
fn driver_add(mut ring: Box<Ring>) -> Box<Ring> {
    ring.add();
    ring
}

#[library_benchmark(teardown = check)]
#[bench::split(args = (false), setup = filled)]
#[bench::packed(args = (true), setup = filled)]
fn device_take(mut ring: Box<Ring>) -> Box<Ring> {
    ring.take();
    ring
}

#[library_benchmark(teardown = check)]
#[bench::split(args = (false), setup = taken)]
#[bench::packed(args = (true), setup = taken)]
fn device_complete(mut ring: Box<Ring>) -> Box<Ring> {
    ring.complete();
    ring
}

#[library_benchmark(teardown = check)]
#[bench::split(args = (false), setup = completed)]
#[bench::packed(args = (true), setup = completed)]
fn driver_get(mut ring: Box<Ring>) -> Box<Ring> {
    ring.get();
    ring
}

library_benchmark_group!(
    name = virtq,
    benchmarks = [driver_add, device_take, device_complete, driver_get]
);
