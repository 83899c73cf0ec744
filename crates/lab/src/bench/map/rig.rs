//! Both ends of a request queue over memory that they share.

use std::{
    hint,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use ringfence_iommu::{Domain, GuestPhys, Iova};
use ringfence_mem::{Access, GuestRam, Memory, Physical, Translate};
use ringfence_virtio_iommu::{
    driver::{self, Buffers, Driver, Notify, Transport, ViommuDomain},
    wire::{Features, IommuConfig},
};
use ringfence_virtq::{
    device as virtq,
    driver::{Queue, Rings},
    layout,
};

/// Memory for one ring of the largest size and its requests.
const BYTES: usize = 1 << 21;

/// A device behind one request queue.
pub(super) trait Server: Send {
    /// What serves the queue, on the serving thread.
    type Serving<'s>: Serving
    where
        Self: 's;

    /// Begins to serve.
    fn begin(&mut self) -> Result<Self::Serving<'_>>;

    /// How many mappings there are, and how many requests were refused.
    fn counts(&self) -> (u64, u64);
}

/// A thread that serves a request queue.
pub(super) trait Serving {
    /// Does what can be done now. True if something was done, or waits.
    fn serve(&mut self) -> Result<bool>;

    /// The target of the endpoint's access at `iova`.
    fn access(&mut self, iova: u64) -> Option<u64>;
}

/// A transport without kicks: the device polls the ring until it is gone.
struct Polled(Weak<()>);

impl Transport for Polled {
    fn kick(&self, _queue: u16) {}
    fn wait(&self, _queue: u16, timeout: Duration) {
        thread::sleep(timeout.min(Duration::from_millis(1)));
    }
    fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// A domain of the driver's with an endpoint in it, and the device behind it.
pub(super) struct Rig<S> {
    // While this exists, the device counts as alive. First: dropped before the domain, which would
    // wait for its endpoint to be detached.
    _alive: Arc<()>,
    pub(super) driver: Arc<Driver>,
    pub(super) domain: Arc<ViommuDomain>,
    pub(super) server: S,
}

impl<S: Server> Rig<S> {
    /// A split ring of `size` descriptors for a device with this configuration and these features,
    /// whose end `server` makes, with `endpoint` attached to a new domain.
    pub(super) fn new(
        size: u16,
        (config, features): (IommuConfig, Features),
        endpoint: u32,
        server: impl FnOnce(virtq::Queue, Arc<Memory>) -> S,
    ) -> Result<Rig<S>> {
        // The drivers of several queues are independent: each has a domain number of its own.
        let config = IommuConfig { domain_range: (endpoint, endpoint), ..config };
        let ram = GuestRam::new(BYTES, 0)?;
        let memory = Memory::of_ram(&ram)?;
        let bus = Physical::new(Arc::clone(&memory));
        let window = |at: usize, len: usize| {
            bus.window(at as u64, len as u64, Access::ReadWrite)
                .map_err(|error| anyhow!("memory for requests: {error}"))
        };
        let areas = layout::offsets(size);
        let requests = areas.len.next_multiple_of(64);
        let ring = window(0, areas.len)?;
        let front = Rings::in_window(&ring, size).and_then(|rings| Queue::new(size, rings, true));
        let front = front.context("the driver's end of the ring")?;
        let [desc, avail, used] = [areas.desc, areas.avail, areas.used].map(|at| at as u64);
        let (event_idx, indirect, packed, base) = (true, false, false, 0);
        let at = virtq::RingConfig { size, desc, avail, used, event_idx, indirect, packed, base };
        let mut queue = virtq::Queue::new(at, &bus).context("the device's end of the ring")?;
        queue.suppress_kicks();
        let window = window(requests, Driver::buffer_bytes(size, &config))?;
        let buffers = Buffers { window, addr: requests as u64 };
        let timeout = Some(Duration::from_secs(60));
        let options = driver::DriverConfig { notify: Notify::Poll, timeout };
        let alive = Arc::new(());
        let transport = Arc::new(Polled(Arc::downgrade(&alive)));
        let driver = Driver::new(transport, front, buffers, config, features, options)?;
        let mut server = server(queue, memory);
        let domain = driver.domain()?;
        served(&mut server, || Ok(domain.attach(endpoint)?))?;
        Ok(Rig { _alive: alive, driver, domain, server })
    }

    /// Checks that requests were carried out: nothing was refused, and both ends hold `expected`
    /// mappings.
    pub(super) fn check(&mut self, expected: u64) -> Result<()> {
        let errors = self.driver.stats().errors;
        let (mappings, refused) = self.server.counts();
        ensure!(
            errors == 0 && refused == 0,
            "the device refused {refused} requests, the driver saw {errors} errors"
        );
        let noted = self.domain.mappings() as u64;
        ensure!(
            mappings == expected && noted == expected,
            "{mappings} mappings in the device and {noted} in the driver, not {expected}"
        );
        Ok(())
    }

    /// Serves until nothing is left to do.
    pub(super) fn serve(&mut self) -> Result<()> {
        let mut serving = self.server.begin()?;
        while serving.serve()? {}
        Ok(())
    }

    /// The target of an access at `iova`, if the driver and the device agree.
    pub(super) fn access(&mut self, iova: Iova) -> Result<Option<u64>> {
        let noted = self.domain.iova_to_phys(iova).map(|GuestPhys(at)| at);
        let found = self.server.begin()?.access(iova.0);
        ensure!(noted == found, "{iova:?} leads to {found:?}, not to {noted:?}");
        Ok(found)
    }
}

/// The device's side, until it is stopped.
pub(super) fn attend<S: Server>(server: &mut S, stop: &AtomicBool) -> Result<()> {
    let mut serving = server.begin()?;
    let mut idle = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        if serving.serve()? {
            idle = 0;
            continue;
        }
        hint::spin_loop();
        idle = idle.wrapping_add(1);
        // One CPU for both: the driver needs it.
        if idle.is_multiple_of(4096) {
            thread::yield_now();
        }
    }
    Ok(())
}

/// Runs `work` while another thread serves.
pub(super) fn served<S: Server, R>(server: &mut S, work: impl FnOnce() -> Result<R>) -> Result<R> {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let serving = scope.spawn(|| attend(server, stop));
        let result = work();
        stop.store(true, Ordering::Relaxed);
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served.and(result)
    })
}
