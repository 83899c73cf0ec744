//! The device process: a virtio-blk or a virtio-net and a virtio-iommu, each behind a vhost-user
//! socket.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use ringfence_devices::{
    blk::{Blk, BlkOptions},
    disk::{Disk, Image, Pace, Pacer, Ram},
    iommu::{Endpoints, Iommu, IommuBackend, IommuOptions},
    net::{Link, Lost, Net, NetOptions, QueueCounters},
};
use ringfence_iommu::{
    Geometry, PageSizes, Range, ReservedKind, ReservedRegion, shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::{Handler, Server};
use ringfence_vhost_user_backend::IotlbTotals;
use ringfence_virtio_iommu::{device::DeviceConfig, wire::Features};
use serde::{Deserialize, Serialize};

/// The endpoint ID of the device.
pub(crate) const ENDPOINT: u32 = 1;
/// The block device's ID for GET_ID; the probe looks for it.
pub(crate) const DISK_ID: &str = "ringfence-lab";
/// Where a machine has its message-signalled interrupts, and no device its data.
const MSI_WINDOW: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
/// More than any job needs; a bound all the same, since a driver decides how much of it is used.
const LIMITS: Limits = Limits { table_bytes: 256 << 20, mappings: 1 << 20 };

/// Which disk the device process serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskKind {
    /// The file is memory.
    Ram,
    /// The file is memory; completions come at a real disk's pace.
    Paced,
    /// The file is a file or a block device.
    File,
}

/// What the device process serves, besides the virtio-iommu in front of it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Served {
    /// A virtio-blk.
    Disk {
        /// What the disk is made of.
        file: RawFd,
        kind: DiskKind,
        bytes: u64,
    },
    /// A virtio-net with one pair of queues.
    Net {
        /// Whether it loops back what is sent; else it drops that, and sends one frame again and
        /// again.
        loops: bool,
    },
}

/// The setup of the device process, as JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Of the device and of the virtio-iommu.
    pub(crate) sockets: [RawFd; 2],
    pub(crate) served: Served,
    pub(crate) queues: u16,
    pub(crate) notify: String,
}

impl Setup {
    /// What the process inherits.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.sockets.to_vec();
        if let Served::Disk { file, .. } = self.served {
            all.push(file);
        }
        all
    }
}

/// What the device process did, as JSON at its end.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) iotlb_hits: u64,
    pub(crate) iotlb_misses: u64,
    pub(crate) faults: u64,
    pub(crate) iommu_refused: u64,
    pub(crate) iommu_syncs: u64,
    /// Of a network device: frames that it took from the driver, gave to it, and lost.
    pub(crate) taken: u64,
    pub(crate) given: u64,
    pub(crate) lost: u64,
}

/// Opens the disk of a descriptor.
pub(crate) fn open_disk(kind: DiskKind, file: OwnedFd, len: u64) -> Result<Disk> {
    Ok(match kind {
        DiskKind::File => Disk::File(Arc::new(Image::new(file, len))),
        DiskKind::Ram => Disk::Ram(Arc::new(Ram::map(file.as_fd(), len)?)),
        DiskKind::Paced => {
            let ram = Arc::new(Ram::map(file.as_fd(), len)?);
            Disk::Paced(ram, Arc::new(Mutex::new(Pacer::new(Pace::default()))))
        }
    })
}

/// The device process, from its setup to its report. Not for people: `compare` starts it.
///
/// # Errors
/// The setup makes no sense, a peer misbehaved, the system refused something.
pub fn device_main() -> Result<()> {
    let mut text = String::new();
    std::io::stdin().take(1 << 16).read_to_string(&mut text).context("reading the setup")?;
    let setup: Setup = serde_json::from_str(&text)
        .context("this command is started by `ringfence compare`, not by hand")?;
    let descriptors = setup.descriptors();
    for (at, fd) in descriptors.iter().enumerate() {
        ensure!(*fd > 2 && !descriptors[..at].contains(fd), "descriptor {fd} in the setup");
    }
    // SAFETY: the parent passed these descriptors for this process alone, they are distinct and
    // not the standard ones (checked above), and nothing else here owns them.
    let own = |fd: RawFd| unsafe { OwnedFd::from_raw_fd(fd) };
    let sockets = setup.sockets.map(|fd| UnixStream::from(own(fd)));
    // This process ends with its parent, even if it hangs. (A parent that dies hangs up in any
    // case.)
    // SAFETY: `prctl` with this option takes a number.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    ringfence_mem::sigbus::install().context("installing the SIGBUS handler")?;

    let notify: Notify = setup.notify.parse().map_err(anyhow::Error::msg)?;
    let found = match setup.served {
        Served::Disk { file, kind, bytes } => {
            let [device, iommu] = sockets;
            let mut behind = Behind::new(iommu, setup.queues, notify, 0)?;
            let options = BlkOptions {
                endpoint: Some(Arc::clone(&behind.endpoint)),
                unit: 1,
                ..BlkOptions::new(open_disk(kind, own(file), bytes)?, DISK_ID, setup.queues)
            };
            let figures = Arc::clone(&options.figures);
            let backend = Blk::backend(options, Arc::clone(&behind.workers));
            let mut server = Server::new(device, backend);
            behind.serve(&mut server, "block device")?;
            behind.report(figures.iotlb.totals())
        }
        Served::Net { loops } => serve_net(sockets, loops, notify)?,
    };
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &found)?;
    Ok(out.flush()?)
}

/// What stands behind the sockets of a device process: workers, and an IOMMU whose tables the
/// device at its only endpoint translates in. No mapping needs an UPDATE, and nothing ever misses.
struct Behind {
    workers: Arc<[Worker]>,
    endpoint: Arc<Endpoint>,
    iommu: Server<IommuBackend>,
}

impl Behind {
    /// `unit` is the IOMMU's number among a worker's units.
    fn new(iommu: UnixStream, queues: u16, notify: Notify, unit: u32) -> Result<Behind> {
        let workers: Arc<[Worker]> = (0..queues.max(1))
            .map(|n| Worker::spawn(&format!("worker-{n}"), notify))
            .collect::<std::io::Result<_>>()?;
        let shootdown = Shootdown::new(usize::from(queues) + 1);
        let endpoint = Endpoint::new(ENDPOINT, Arc::clone(&shootdown), Binding::Blocked);
        let (first, last) = MSI_WINDOW;
        let msi = Range::new(ringfence_iommu::Iova(first), ringfence_iommu::Iova(last));
        let geometry = Geometry {
            reserved: Arc::from([ReservedRegion {
                range: msi.expect("the window is in order"),
                kind: ReservedKind::Msi,
            }]),
            ..Geometry::new(PageSizes::from_granule(4096).expect("a power of two"), Range::ALL)
        };
        let page_sizes = geometry.page_sizes;
        let endpoints = Endpoints::new([Arc::clone(&endpoint)], shootdown, geometry, LIMITS);
        // The driver decides what of it is used.
        let features = DeviceConfig::default().features | Features::PROPOSED;
        let device = DeviceConfig { page_sizes, features, ..DeviceConfig::default() };
        let options = IommuOptions { device, unit };
        let backend = Iommu::new(Arc::new(endpoints), options, Arc::clone(&workers)).connect();
        Ok(Behind { workers, endpoint, iommu: Server::new(iommu, backend) })
    }

    /// Serves both sockets until both are hung up. Errors name the device `what`.
    fn serve<H: Handler>(&mut self, device: &mut Server<H>, what: &'static str) -> Result<()> {
        let (device_ended, iommu_ended) = std::thread::scope(|scope| {
            let iommu = scope.spawn(|| self.iommu.serve());
            (device.serve(), iommu.join())
        });
        device_ended.with_context(|| format!("the {what}'s socket"))?;
        iommu_ended
            .map_err(|_| anyhow::anyhow!("the thread that serves the IOMMU's socket panicked"))?
            .context("the IOMMU's socket")
    }

    /// What the IOMMU has to report, and the device's IOTLB.
    fn report(&mut self, iotlb: IotlbTotals) -> Report {
        let counters = self.iommu.handler().iommu().figures().requests;
        Report {
            iotlb_hits: iotlb.hits,
            iotlb_misses: iotlb.walks,
            faults: iotlb.faults,
            iommu_refused: counters.refused,
            iommu_syncs: counters.syncs,
            ..Report::default()
        }
    }
}

/// Serves a network device of one pair of queues and its IOMMU until both sockets are hung up.
pub(crate) fn serve_net(sockets: [UnixStream; 2], loops: bool, notify: Notify) -> Result<Report> {
    let [net, iommu] = sockets;
    // A network device's unit is the first of a worker's.
    let mut behind = Behind::new(iommu, 1, notify, 1)?;
    let link = if loops { Link::Loopback } else { Link::Probe };
    let device = Net::new(NetOptions::new("net", link), Arc::clone(&behind.workers))?;
    let mut server = Server::new(net, device.connect_behind(0, Arc::clone(&behind.endpoint), None));
    behind.serve(&mut server, "network device")?;
    // So that its views have added their counts.
    drop(server);
    let rings = device.counters(0);
    let lost = |ring: &QueueCounters| Lost::ALL.iter().map(|&why| ring.lost(why)).sum::<u64>();
    Ok(Report {
        given: rings[0].packets(),
        taken: rings[1].packets(),
        lost: rings.iter().map(|ring| lost(ring)).sum(),
        ..behind.report(device.iotlb(0))
    })
}
