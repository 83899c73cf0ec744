//! Our device, as the device process has it: software domains, in which a view translates.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringfence_devices::iommu::Endpoints;
use ringfence_iommu::{
    Geometry, GuestPhys, HostAddr, PageSizes, Range, SoftDomain, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint, View};
use ringfence_mem::{Access, Memory, Physical, Translate};
use ringfence_virtio_iommu::{
    device::{Device, DeviceConfig, HostRegion, Mirror, RequestQueue, Session},
    driver::negotiate,
    wire::{IommuConfig, MAX_REQUEST_LEN, Request, Status, TAIL_LEN},
};

use super::rig::{Rig, Server, Serving};

/// Where a mirror has guest memory: nothing accesses it.
pub(super) const MIRRORED: HostAddr = HostAddr(1 << 40);

/// The device behind one or more request queues.
pub(super) struct Machine {
    device: Arc<Device<Endpoints>>,
    pub(super) endpoints: Vec<Arc<Endpoint>>,
}

impl Machine {
    /// A device with so many endpoints, numbered from 1.
    pub(super) fn new(endpoints: u32) -> Machine {
        let shootdown = Shootdown::new(8);
        let endpoints: Vec<_> = (1..=endpoints)
            .map(|id| Endpoint::new(id, Arc::clone(&shootdown), Binding::Blocked))
            .collect();
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let backing = Endpoints::new(endpoints.clone(), shootdown, geometry, Limits::NONE);
        let device = Device::new(Arc::new(backing), DeviceConfig::default());
        device.set_features(negotiate(device.features().bits()).bits());
        Machine { device: Arc::new(device), endpoints }
    }

    /// Adds endpoint `id`, which translates in a table of its own (the result) and reaches `bytes`
    /// of memory from guest-physical address 0.
    pub(super) fn add_mirror(&self, id: u32, bytes: u64) -> Result<Arc<SoftDomain<HostAddr>>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let table = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1));
        let guest = (GuestPhys(0), GuestPhys(bytes - 1));
        let region = HostRegion { guest, host: MIRRORED };
        // SAFETY: a table that no device reads.
        let mirror = unsafe { Mirror::new(Arc::clone(&table) as _, [region], false) };
        self.device.backing().add_outside(id, mirror, &[])?;
        self.device.endpoint_added(id)?;
        Ok(table)
    }

    /// Carries out a request without a ring, while nothing translates.
    pub(super) fn send(&self, session: &mut Session<Endpoints>, request: &Request) -> Result<()> {
        let (mut bytes, mut reply) = ([0; MAX_REQUEST_LEN], [0xff; TAIL_LEN]);
        let len = request.emit(&mut bytes);
        let used = self.device.handle(session, &bytes[..len], &mut reply);
        if session.needs_sync() {
            self.device.begin_sync(session);
            ensure!(self.device.poll_sync(session)?, "an invalidation did not complete");
        }
        let ok = used as usize == TAIL_LEN && reply[0] == Status::Ok as u8;
        ensure!(ok, "{request:?} is completed with {reply:?}");
        Ok(())
    }

    /// A request queue of `size` descriptors, whose server translates for endpoint `id`.
    pub(super) fn rig(&self, size: u16, id: u32) -> Result<Rig<Ours>> {
        let config = IommuConfig::parse(&self.device.config()).context("our own configuration")?;
        let features = negotiate(self.device.features().bits());
        Rig::new(size, (config, features), id, |queue, memory| Ours {
            requests: RequestQueue::new(Arc::clone(&self.device), queue),
            bus: Physical::new(Arc::clone(&memory)),
            memory,
            endpoint: Arc::clone(&self.endpoints[id as usize - 1]),
        })
    }
}

/// Our end of a request queue.
pub(super) struct Ours {
    requests: RequestQueue<Endpoints>,
    bus: Physical,
    memory: Arc<Memory>,
    endpoint: Arc<Endpoint>,
}

/// Serves the queue and translates for the endpoint too, as a worker of the device process does.
pub(super) struct Worker<'s> {
    requests: &'s mut RequestQueue<Endpoints>,
    bus: &'s Physical,
    view: View,
}

impl Server for Ours {
    type Serving<'s> = Worker<'s>;

    fn begin(&mut self) -> Result<Worker<'_>> {
        let view = View::new(Arc::clone(&self.endpoint), Arc::clone(&self.memory));
        let view = view.context("no place for a view")?;
        Ok(Worker { requests: &mut self.requests, bus: &self.bus, view })
    }

    fn counts(&self) -> (u64, u64) {
        let mappings = match self.endpoint.binding() {
            Binding::Domain(domain) => domain.mappings(),
            _ => 0,
        };
        (mappings, self.requests.counters().refused)
    }
}

impl Serving for Worker<'_> {
    #[inline]
    fn serve(&mut self) -> Result<bool> {
        let mut progress = self.requests.poll(self.bus)?;
        // A quiet point: an UNMAP completes right after it, as in a worker.
        self.view.quiet();
        if progress.pending {
            progress = self.requests.poll(self.bus)?;
        }
        Ok(progress.pending || !progress.is_idle())
    }

    fn access(&mut self, iova: u64) -> Option<u64> {
        let base = self.view.memory().find_gpa(0)?.slice.as_ptr() as u64;
        let mut found = None;
        let _ = self.view.slices(iova, 1, Access::Read, |piece| {
            found = Some(piece.as_ptr() as u64 - base);
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use ringfence_dma::{Direction, DmaBuffer, DmaConfig, Policy, TimerKind};
    use ringfence_iommu::{Domain, Map, Pending, Prot};
    use ringfence_iova::{Aperture, Slabs};
    use ringfence_sync::cpu::FixedCpu;

    use super::{
        super::{
            load::{page, target},
            rig::served,
        },
        *,
    };

    /// A buffer of pages that are not contiguous.
    struct Scattered(Vec<GuestPhys>);

    // SAFETY: the guest of these addresses does not exist: only this test's accesses use them.
    unsafe impl DmaBuffer<GuestPhys> for Scattered {
        fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
            self.0.iter().for_each(|&page| each(page, 4096));
        }
    }

    const PAGES: u64 = 16;

    /// MAPs, syncs and kicks so far.
    fn counts(rig: &Rig<Ours>) -> (u64, u64, u64) {
        let stats = rig.driver.stats();
        (stats.maps, stats.syncs, stats.kicks)
    }

    #[test]
    fn the_dma_api_sends_the_device_the_requests_of_the_benchmark() {
        let targets: Vec<GuestPhys> =
            (0..PAGES).map(|n| GuestPhys(target(n).0 | n << 32)).collect();
        // The benchmark: a list, and a sync that is begun for it.
        let mut rig = Machine::new(1).rig(256, 1).unwrap();
        let before = counts(&rig);
        let maps = (0..PAGES).zip(&targets).map(|(n, &at)| Map::new(page(2 * n), at, Prot::RW));
        let maps: Vec<_> = maps.collect();
        rig.domain.map_pages(&maps).unwrap();
        let mut sync = Pending::map(&*rig.domain, maps.iter().map(Map::range).collect());
        let counted = counts(&rig);
        served(&mut rig.server, || {
            sync.wait(&*rig.domain);
            Ok(())
        })
        .unwrap();
        let bench = (counted.0 - before.0, counted.1 - before.1, counted.2 - before.2);
        // The DMA API: a buffer of such pages, pushed and begun.
        let mut rig = Machine::new(1).rig(256, 1).unwrap();
        let aperture = Aperture::new(1 << 32, (1 << 40) - 1, 4096).unwrap();
        let allocator = Arc::new(Slabs::new(aperture, FixedCpu::new(1)));
        let config = DmaConfig { timer: TimerKind::Manual, ..DmaConfig::new(Policy::StrictMap) };
        let domain = Arc::clone(&rig.domain);
        let device = ringfence_dma::Device::builder(domain)
            .allocator(allocator)
            .config(config)
            .build()
            .unwrap();
        let before = counts(&rig);
        let mut batch = device.map_batch();
        batch.push(Scattered(targets), Direction::Bidirectional, ()).map_err(|_| ()).unwrap();
        batch.begin();
        let counted = counts(&rig);
        served(&mut rig.server, || {
            batch.wait();
            let mut mapped = 0;
            batch.poll(|(), mapping| {
                mapped += 1;
                drop(mapping.map_err(|_| ()).unwrap());
            });
            assert_eq!(mapped, 1);
            Ok(())
        })
        .unwrap();
        let api = (counted.0 - before.0, counted.1 - before.1, counted.2 - before.2);
        assert_eq!((api, api.0), (bench, PAGES));
    }
}
