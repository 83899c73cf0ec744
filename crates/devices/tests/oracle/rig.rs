//! A device process in this process: workers, what translates, and a probe on each worker; and the
//! driver's end of it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_devices::disk::DiskBuffers;
use ringfence_dma::{BounceLimits, BouncePools, Device, DmaConfig, Environment, Trust};
use ringfence_iommu::{
    Domain, FaultReason, Geometry, GuestPhys, Iova, PageSizes, Range, ReservedKind, ReservedRegion,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iommu_testing::Faulty;
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_iova::{Allocator, Aperture, Magazines, RbTree, SlabConfig, Slabs};
use ringfence_mem::{GuestRam, Memory};
use ringfence_run::worker::{Notify, Worker};
use ringfence_sync::cpu::OsCpu;
use ringfence_virtio_iommu::wire::FaultRecord;

use crate::{
    front::Front,
    history::{History, Recorded},
    lying::{Lie, Lying},
    pages::Pages,
    probe::Probe,
    slots::{Lent, SlotMemory},
    source::{Here, Source, Viommu},
};

/// The endpoint ID of the probes.
pub(crate) const ENDPOINT: u32 = 7;
/// Guest-physical base of the memory.
const GPA: u64 = 1 << 32;
/// The IOMMU's unit; probes come before it or after it in a worker's turn.
pub(crate) const IOMMU_UNIT: u32 = 5;
/// Longer than any reply takes on a busy machine; a test that waits so long has failed.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Reserved by the device: never to be mapped.
pub(crate) const RESERVED: Range = match Range::new(Iova(0x4_0000), Iova(0x4_ffff)) {
    Some(range) => range,
    None => panic!("not empty"),
};
/// How many pages of data there are.
pub(crate) const PAGES: usize = 96;
/// What translates for the device.
pub(crate) type Translates = Arc<dyn Domain<Target = GuestPhys>>;
/// The driver's side, from what fails on demand down to what sends requests.
pub(crate) type Stack = Faulty<Recorded<Lying<Translates>>>;
pub(crate) type Dma = Device<Arc<Stack>, Arc<dyn Allocator>>;
pub(crate) type MapBatch<B, T> = ringfence_dma::MapBatch<Arc<Stack>, Arc<dyn Allocator>, B, T>;
pub(crate) type UnmapBatch<B, T> = ringfence_dma::UnmapBatch<Arc<Stack>, Arc<dyn Allocator>, B, T>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    Slabs,
    /// Of few ranges each, none of which is kept when it is all free.
    FewSlabs,
    Magazines,
    Tree,
}

/// What the device's addresses go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A virtio-iommu, with requests in a ring.
    Viommu,
    /// One that completes an UNMAP before its invalidation.
    LazyViommu,
    /// A table in this process.
    Table,
    /// A device IOTLB, which asks a front end for what it misses.
    Asked,
    /// That of a vhost-user back end, which does so by messages.
    VhostUser,
}

/// How a rig is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) config: DmaConfig,
    pub(crate) granule: u64,
    pub(crate) addresses: Addresses,
    /// IOVAs end at 2^64-1.
    pub(crate) at_the_top: bool,
    /// How many mappings the device holds before it refuses more.
    pub(crate) mappings: u64,
    /// And how many bytes of table.
    pub(crate) table_bytes: u64,
    pub(crate) notify: Notify,
    /// Requests under way at a time, twice.
    pub(crate) ring_size: u16,
    pub(crate) probe_first: bool,
    pub(crate) kind: Kind,
    /// How many bytes of address space there are for data.
    pub(crate) space: u64,
    /// How many translations a device IOTLB holds before it evicts.
    pub(crate) entries: u64,
    /// Whether the device of the DMA API is dropped with entries in its flush queues.
    pub(crate) leaves_queued: bool,
    /// For how many microseconds the device is attached, and for how many not, while two drivers
    /// run; `None`: it stays attached.
    pub(crate) renews: Option<(u64, u64)>,
    /// The limits of its bounce pools, and pages of memory for them; `None` for no pools.
    pub(crate) bounces: Option<(BounceLimits, usize)>,
    /// Where disks have the data of asynchronous I/O; `None`: that is of no disk.
    pub(crate) disk: Option<DiskBuffers>,
    pub(crate) lie: Lie,
}

impl Setup {
    /// Whether the device may refuse mappings.
    pub(crate) fn is_limited(&self) -> bool {
        self.mappings < 1 << 16 || self.table_bytes < 16 << 20
    }

    /// Whether a map may fail, even if nothing else does.
    pub(crate) fn may_fail(&self) -> bool {
        self.is_limited() || self.space < 1 << 20
    }
}

pub(crate) struct Rig {
    pub(crate) pools: Option<BouncePools<GuestPhys>>,
    pub(crate) slots: Arc<SlotMemory>,
    pub(crate) allocator: Arc<dyn Allocator>,
    pub(crate) history: History,
    pub(crate) pages: Arc<Pages>,
    /// One on each worker.
    pub(crate) probes: Vec<Probe>,
    pub(crate) probe_unit: u32,
    /// The ID of their endpoint.
    pub(crate) endpoint: u32,
    source: Source,
    attached: bool,
    lie: Lie,
    pub(crate) workers: Arc<[Worker]>,
}

impl Rig {
    /// The device's end, the driver, and a DMA API over both.
    pub(crate) fn new(setup: &Setup, environment: Environment) -> (Rig, Dma) {
        let notify = setup.notify;
        let workers: Arc<[Worker]> =
            (0..2).map(|n| Worker::spawn(&format!("worker-{n}"), notify).unwrap()).collect();
        let page_sizes = PageSizes::from_granule(setup.granule).unwrap();
        let reserved = ReservedRegion { range: RESERVED, kind: ReservedKind::Reserved };
        let geometry =
            Geometry { reserved: [reserved].into(), ..Geometry::new(page_sizes, Range::ALL) };
        let limits = Limits { table_bytes: setup.table_bytes, mappings: setup.mappings };
        let ram = GuestRam::new(2 << 20, GPA).unwrap();
        let memory = Memory::of_ram(&ram).unwrap();
        let probe_unit = if setup.probe_first { IOMMU_UNIT - 1 } else { IOMMU_UNIT + 1 };
        let endpoint = Endpoint::new(ENDPOINT, Shootdown::new(workers.len()), Binding::Blocked);
        let mut served = None;
        let (mut source, domain) = match setup.kind {
            Kind::Viommu | Kind::LazyViommu => {
                let (viommu, domain) =
                    Viommu::start(setup, &endpoint, geometry, limits, &workers, &ram, &memory);
                (Source::Viommu(Box::new(viommu)), domain)
            }
            Kind::Table => {
                let (here, domain) = Here::table(&endpoint, geometry, limits);
                (Source::Here(here), domain)
            }
            Kind::Asked => {
                let (here, domain) = Here::asked(&endpoint, geometry, limits, setup.entries);
                (Source::Here(here), domain)
            }
            Kind::VhostUser => {
                let limited = (geometry, limits);
                let (front, probes, endpoint) =
                    Front::connect(limited, setup, &workers, probe_unit, &ram);
                let (here, domain) = Here::of(front, &endpoint);
                served = Some((probes, endpoint.id()));
                (Source::Here(here), domain)
            }
        };
        source.attach().unwrap();
        let lie = setup.lie;
        let (probes, endpoint) = served.unwrap_or_else(|| {
            let start = |w| Probe::start(w, probe_unit, &endpoint, &memory, lie);
            (workers.iter().map(start).collect(), ENDPOINT)
        });
        let pages = Pages::carve(&ram, PAGES);
        let history = History::default();
        let stack = Lying::new(domain, setup.lie);
        let stack = Arc::new(Faulty::new(Recorded::new(stack, history.clone()), 1));
        let allocator: Arc<dyn Allocator> = Arc::from(allocator(setup));
        let room = setup.bounces.map_or(1, |(_, pages)| pages);
        let slots = SlotMemory::carve(&ram, room, history.clone(), setup.lie);
        let pools = setup.bounces.map(|(limits, _)| {
            let (domain, addresses) = (Arc::clone(&stack), Arc::clone(&allocator));
            let (memory, environment) = (Lent(Arc::clone(&slots)), environment.clone());
            // As the device's own: by the caller, or by a thread.
            let timer = setup.config.timer;
            BouncePools::with_environment(domain, addresses, memory, limits, environment, timer)
                .unwrap()
        });
        let (mut config, addresses) = (setup.config.clone(), Arc::clone(&allocator));
        if setup.lie == Lie::Trusts {
            config.trust = Trust::Trusted;
        }
        let mut dma =
            Device::builder(stack).allocator(addresses).config(config).environment(environment);
        if let Some(pools) = &pools {
            dma = dma.pools(pools);
        }
        let dma = dma.build().unwrap();
        let rig = Rig {
            pools,
            slots,
            allocator,
            history,
            pages,
            probes,
            probe_unit,
            endpoint,
            source,
            attached: true,
            lie,
            workers,
        };
        (rig, dma)
    }

    /// Lets the device reach what is mapped.
    ///
    /// # Errors
    /// What translates refused.
    pub(crate) fn attach(&mut self) -> Result<(), String> {
        let attached = self.source.attach();
        self.attached = attached.is_ok();
        attached
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.attached
    }

    /// Lets it reach nothing, from when this returns on.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub(crate) fn detach(&mut self) -> Result<(), String> {
        if self.lie != Lie::StaysAttached {
            self.source.detach()?;
        }
        self.attached = false;
        Ok(())
    }

    /// Why an access is refused while the device is detached.
    pub(crate) fn detached_reason(&self) -> FaultReason {
        self.source.detached_reason()
    }

    /// Ends what outlives the driver's domain: from now on the device is in none.
    pub(crate) fn end(&mut self) {
        self.source.end();
    }

    /// Calls `each` with every fault record that has come.
    pub(crate) fn poll_events(&mut self, each: impl FnMut(FaultRecord)) {
        self.source.poll_events(each);
    }

    /// How many fault records were dropped for lack of room.
    pub(crate) fn dropped_faults(&self) -> u64 {
        self.source.dropped_faults()
    }

    /// Waits for `count` fault records, in order; an error if they do not arrive.
    pub(crate) fn wait_for_events(&mut self, count: usize) -> Result<Vec<FaultRecord>, String> {
        let start = Instant::now();
        let mut records = Vec::new();
        while records.len() < count {
            self.poll_events(|record| records.push(record));
            if start.elapsed() > LONG {
                return Err(format!("{} fault records of {count} came", records.len()));
            }
            std::thread::yield_now();
        }
        Ok(records)
    }

    /// How many mappings the device has in its table.
    pub(crate) fn mappings_in_the_device(&self) -> u64 {
        self.source.mappings()
    }

    /// What the driver noted of a device that it gave up.
    pub(crate) fn failed(&self) -> Option<String> {
        self.source.failed()
    }
}

fn allocator(setup: &Setup) -> Box<dyn Allocator> {
    let aperture = match setup.at_the_top {
        true => Aperture::new(u64::MAX - (setup.space - 1), u64::MAX, setup.granule),
        false => Aperture::new(0, setup.space - 1, setup.granule),
    };
    let aperture = aperture.unwrap();
    match setup.addresses {
        Addresses::Slabs => Box::new(Slabs::new(aperture, OsCpu::new())),
        Addresses::FewSlabs => {
            let largest_slab = Some(4 * setup.granule);
            let config = SlabConfig { largest_slab, idle_slabs: 0, ..SlabConfig::default() };
            Box::new(Slabs::with_config(aperture, OsCpu::new(), config))
        }
        Addresses::Magazines => Box::new(Magazines::new(RbTree::new(aperture), OsCpu::new())),
        Addresses::Tree => Box::new(RbTree::new(aperture)),
    }
}
