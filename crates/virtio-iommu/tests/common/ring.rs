//! Both ends of a request queue in one process, with notifications.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use ringfence_mem::{Access, Translate, Window};
use ringfence_virtio_iommu::{
    device::{Device, RequestQueue},
    driver::{Buffers, Driver, DriverConfig, Transport},
    wire::{Features, IommuConfig},
};
use ringfence_virtq::{
    device::Queue,
    driver::QueueConfig,
    layout,
    testing::{Ram, pair_of},
};

use super::{Bench, Endpoints};

pub(crate) const BASE: u64 = 0x10_0000;

/// An event: raised by one side, waited for by the other.
#[derive(Default)]
pub(crate) struct Event {
    raised: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    pub(crate) fn raise(&self) {
        *self.raised.lock() = true;
        self.changed.notify_one();
    }

    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let mut raised = self.raised.lock();
        if !*raised {
            self.changed.wait_for(&mut raised, timeout);
        }
        std::mem::take(&mut *raised)
    }
}

/// The notifications of a queue, both ways.
pub(crate) struct Bells {
    pub(crate) kick: Event,
    pub(crate) used: Event,
    pub(crate) kicks: AtomicU64,
    pub(crate) alive: AtomicBool,
}

impl Transport for Bells {
    fn kick(&self, queue: u16) {
        assert_eq!(queue, 0);
        self.kicks.fetch_add(1, Ordering::Relaxed);
        self.kick.raise();
    }
    fn wait(&self, _queue: u16, timeout: Duration) {
        self.used.wait(timeout);
    }
    fn is_alive(&self) -> bool {
        // What a failed test drops must not wait for its device.
        self.alive.load(Ordering::Relaxed) && !thread::panicking()
    }
}

/// Memory with a request queue in it, of which the device's end is still to be served.
pub(crate) struct Link {
    pub(crate) ram: Ram,
    pub(crate) bells: Arc<Bells>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) queue: Queue,
    /// The used ring.
    pub(crate) used: Window,
}

pub(crate) fn link(
    size: u16,
    config: IommuConfig,
    features: Features,
    options: DriverConfig,
) -> Link {
    let bytes = Driver::buffer_bytes(size, &config);
    // Packed where a split ring cannot have that size.
    let ring = QueueConfig { size, event_idx: true, packed: !size.is_power_of_two() };
    let at = ring.offsets();
    let buffers = at.len.next_multiple_of(64);
    let ram = Ram::new(BASE, buffers + bytes);
    let (front, queue) = pair_of(&ram, BASE, ring);
    let addr = BASE + buffers as u64;
    let window = ram.window(addr, bytes as u64, Access::ReadWrite).unwrap();
    let used_len = layout::used_bytes(size) as u64;
    let used = ram.window(BASE + at.used as u64, used_len, Access::ReadWrite).unwrap();
    let bells = Arc::new(Bells {
        kick: Event::default(),
        used: Event::default(),
        kicks: AtomicU64::new(0),
        alive: AtomicBool::new(true),
    });
    let transport: Arc<dyn Transport> = Arc::<Bells>::clone(&bells);
    let buffers = Buffers { window, addr };
    let driver = Driver::new(transport, front, buffers, config, features, options).unwrap();
    Link { ram, bells, driver, queue, used }
}

/// A device that serves in a thread of its own until it is dropped.
pub(crate) struct Served {
    pub(crate) driver: Arc<Driver>,
    pub(crate) bells: Arc<Bells>,
    pub(crate) endpoints: Arc<Endpoints>,
    device: Arc<Device<Endpoints>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// `polling`: the device looks all the time; else it sleeps until it is kicked.
    pub(crate) fn start(bench: Bench, size: u16, options: DriverConfig, polling: bool) -> Served {
        let config = bench.config();
        Served::with_config(bench, size, options, polling, config)
    }

    pub(crate) fn with_config(
        bench: Bench,
        size: u16,
        options: DriverConfig,
        polling: bool,
        config: IommuConfig,
    ) -> Served {
        let Link { ram, bells, driver, queue, .. } =
            link(size, config, bench.device.features(), options);
        let stop = Arc::new(AtomicBool::new(false));
        let endpoints = Arc::clone(&bench.endpoints);
        let device = Arc::clone(&bench.device);
        let thread = thread::spawn({
            let (bells, stop) = (Arc::clone(&bells), Arc::clone(&stop));
            move || {
                let mut queue = RequestQueue::new(bench.device, queue);
                if polling {
                    queue.queue().suppress_kicks();
                }
                while !stop.load(Ordering::Relaxed) {
                    let progress = queue.poll(&ram).expect("a sane driver");
                    if progress.interrupt {
                        bells.used.raise();
                    }
                    if !progress.is_idle() {
                        continue;
                    }
                    if polling || progress.pending {
                        thread::yield_now();
                    } else if !queue.queue().enable_kicks() {
                        bells.kick.wait(Duration::from_millis(200));
                    }
                }
            }
        });
        Served { driver, bells, endpoints, device, stop, thread: Some(thread) }
    }

    /// The device, for what a driver cannot do.
    pub(crate) fn device(&self) -> &Device<Endpoints> {
        &self.device
    }

    /// Ends the device's thread: from here on the device completes nothing.
    pub(crate) fn silence(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.bells.kick.raise();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the device's thread");
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.silence();
    }
}
