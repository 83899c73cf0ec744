//! The device process: a virtio-blk and a virtio-iommu, each behind a vhost-user socket.

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
    blk::{BlkBackend, BlkOptions},
    disk::{Disk, Image, Pace, Pacer, Ram},
    iommu::{Endpoints, IommuBackend, IommuOptions},
    worker::{Notify, Worker},
};
use ringfence_iommu::{
    Geometry, PageSizes, Range, ReservedKind, ReservedRegion, shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_vhost_user::Server;
use ringfence_virtio_iommu::device::Options;
use serde::{Deserialize, Serialize};

/// The endpoint ID of the block device.
pub(crate) const ENDPOINT: u32 = 1;
/// What the block device answers to GET_ID; the probe looks for it.
pub(crate) const DISK_ID: &str = "ringfence-lab";
/// Where a machine has its message-signalled interrupts, and no device its data.
const MSI_WINDOW: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
/// More than any job needs; a bound all the same, since a driver decides what is used of it.
const LIMITS: Limits = Limits { table_bytes: 256 << 20, mappings: 1 << 20 };

/// Which disk the device process serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskKind {
    /// The file is memory.
    Ram,
    /// The file is memory; answers come at a real disk's pace.
    Paced,
    /// The file is a file or a block device.
    File,
}

/// What the device process is told, as JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) blk: RawFd,
    pub(crate) iommu: RawFd,
    pub(crate) disk: RawFd,
    pub(crate) report: RawFd,
    pub(crate) kind: DiskKind,
    pub(crate) disk_bytes: u64,
    pub(crate) queues: u16,
    pub(crate) notify: String,
}

/// What the device process did, as JSON at its end.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
    pub(crate) interrupts: u64,
    pub(crate) iotlb_hits: u64,
    pub(crate) iotlb_misses: u64,
    pub(crate) faults: u64,
    pub(crate) iommu_requests: u64,
    pub(crate) iommu_refused: u64,
    pub(crate) iommu_syncs: u64,
}

/// The disk that a descriptor stands for.
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
    let descriptors = [setup.blk, setup.iommu, setup.disk, setup.report];
    for (at, fd) in descriptors.iter().enumerate() {
        ensure!(*fd > 2 && !descriptors[..at].contains(fd), "descriptor {fd} in the setup");
    }
    // SAFETY: the parent passed these descriptors for this process alone, they are distinct and
    // not the standard ones (checked above), and nothing else here owns them.
    let [blk, iommu, disk, report] = descriptors.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    // Should the parent die without hanging up (it cannot), or this process hang, it goes too.
    // SAFETY: `prctl` with this option takes a number.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    ringfence_mem::sigbus::install().context("installing the SIGBUS handler")?;

    let notify: Notify = setup.notify.parse().map_err(anyhow::Error::msg)?;
    let disk = open_disk(setup.kind, disk, setup.disk_bytes)?;
    let found = serve(blk.into(), iommu.into(), disk, setup.queues, notify)?;
    std::fs::File::from(report).write_all(&serde_json::to_vec(&found)?)?;
    Ok(())
}

/// Serves both sockets until both are hung up.
pub(crate) fn serve(
    blk: UnixStream,
    iommu: UnixStream,
    disk: Disk,
    queues: u16,
    notify: Notify,
) -> Result<Report> {
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
    let endpoints = Arc::new(Endpoints::new([Arc::clone(&endpoint)], shootdown, geometry, LIMITS));
    let iommu_options =
        IommuOptions { device: Options { page_sizes, ..Options::default() }, unit: 0 };
    let iommu_backend = IommuBackend::new(endpoints, iommu_options, Arc::clone(&workers));
    let blk_options =
        BlkOptions { endpoint: Some(endpoint), unit: 1, ..BlkOptions::new(disk, DISK_ID, queues) };
    let blk_backend = BlkBackend::new(blk_options, Arc::clone(&workers));

    let mut iommu_server = Server::new(iommu, iommu_backend);
    let mut blk_server = Server::new(blk, blk_backend);
    let (blk_ended, iommu_ended) = std::thread::scope(|scope| {
        let iommu = scope.spawn(|| iommu_server.serve());
        (blk_server.serve(), iommu.join())
    });
    blk_ended.context("the block device's socket")?;
    iommu_ended
        .map_err(|_| anyhow::anyhow!("the thread that serves the IOMMU's socket panicked"))?
        .context("the IOMMU's socket")?;

    let stats = blk_server.handler().stats();
    let (iotlb_hits, iotlb_misses, faults) = blk_server.handler().iotlb().unwrap_or_default();
    let counters = iommu_server.handler().counters();
    Ok(Report {
        requests: stats.requests,
        failed: stats.failed,
        bytes: stats.bytes,
        interrupts: stats.interrupts,
        iotlb_hits,
        iotlb_misses,
        faults,
        iommu_requests: counters.maps + counters.unmaps + counters.others,
        iommu_refused: counters.refused,
        iommu_syncs: counters.syncs,
    })
}
