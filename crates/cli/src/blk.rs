//! `ringfence blk`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use ringfence_devices::{
    blk::{self, BlkOptions, make_rings},
    disk::{Disk, DiskBuffers, Image, ImageError, ImageOptions},
};
use ringfence_iotlb::IotlbConfig;
use ringfence_run::{PeerFd, worker::Worker};
use ringfence_vhost_user::Server;
use ringfence_vhost_user_backend::requests::{QueueStats, RequestFigures, Serve};
use ringfence_virtq::blk::ID_BYTES;

use crate::{
    serve::{self, Connection, Options, Page, Service},
    usage,
};

/// How long to wait for the image's lock: the process before this one may just have been killed.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(3);

/// A block device for virtual machines, over vhost-user.
///
/// Serves a file or block device as a virtio-blk disk, to one front end after the other. The driver
/// may keep its IOMMU on: the device accesses only what the front end translates for it.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence blk --socket disk.sock --image disk.img
    ringfence blk --socket disk.sock --image /dev/vg/data --direct --queues 4 --metrics [::1]:9100

  and for QEMU
    -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem
    -device intel-iommu,intremap=on,device-iotlb=on -device pcie-root-port,id=rp1,slot=1
    -chardev socket,id=c,path=disk.sock,reconnect-ms=1000
    -device vhost-user-blk-pci,chardev=c,bus=rp1,disable-legacy=on,iommu_platform=on,ats=on")]
pub(crate) struct Arguments {
    #[command(flatten)]
    service: Options,

    /// The file or block device that holds the disk; no other process may write it meanwhile
    #[arg(long, value_name = "FILE")]
    image: PathBuf,

    /// Writes are refused
    #[arg(long)]
    read_only: bool,

    /// Lock the image only while a guest uses it, so that the guest can move to another process
    /// that serves it
    #[arg(long)]
    share_image: bool,

    /// Bypass the page cache where a request is aligned for that
    #[arg(long)]
    direct: bool,

    /// Where the data of requests in flight lies: own (memory of the service: a disk that does not
    /// complete requests holds up no invalidation), guest (the guest's memory: no copy, for disks
    /// that always complete them), or auto
    #[arg(long, value_name = "WHERE", default_value_t)]
    disk_buffers: DiskBuffers,

    /// How many queues to offer
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,

    /// The disk's name, as the driver reads it, up to 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "ringfence", value_parser = id)]
    id: String,

    #[command(flatten)]
    iotlb: serve::Iotlb<64, 600_000>,

    /// How many IOTLB misses may be outstanding at a time
    #[arg(long, value_name = "N", default_value_t = IotlbConfig::default().misses as u16,
          value_parser = clap::value_parser!(u16).range(1..=1 << 14))]
    iotlb_misses: u16,
}

fn id(text: &str) -> Result<String, String> {
    match text.len() {
        0..=ID_BYTES => Ok(text.to_owned()),
        long => Err(format!("it has {long} bytes, more than {ID_BYTES}")),
    }
}

/// Opens an image.
///
/// # Errors
/// [`Usage`](usage::Usage) if the file cannot be an image; errors of the system.
pub(crate) fn open(path: &Path, how: ImageOptions) -> Result<Image> {
    match Image::open(path, how) {
        Ok(image) => Ok(image),
        Err(error @ (ImageError::Kind | ImageError::Empty(_))) => {
            Err(usage::wrong(format!("{}: {error}", path.display())))
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Serves until a signal.
pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { service, image: path, read_only, direct, share_image, queues, .. } = &arguments;
    let begun = serve::begin(&service.common, "blk", 1)?;
    let how = ImageOptions {
        read_only: *read_only,
        direct: *direct,
        wait: LOCK_WAIT,
        hand_over: *share_image,
        buffers: arguments.disk_buffers,
        reader: begun.socket(0, service.socket.as_deref()).as_deref().map(serve::reader),
    };
    let image = open(path, how)?;
    let paths: Vec<&Path> = service.socket.as_deref().into_iter().collect();
    let ready = serve::open(begun, &service.common, &paths, usize::from(*queues), || {
        make_rings(&image, *queues).context("io_uring")
    })?;
    let workers = ready.workers("blk", *queues)?;
    let iotlb = IotlbConfig { misses: arguments.iotlb_misses.into(), ..arguments.iotlb.config() };
    let disk = Disk::File(Arc::new(image));
    let options = BlkOptions {
        read_only: *read_only,
        iotlb: (!arguments.iotlb.no_iommu).then_some(iotlb),
        ..BlkOptions::new(disk, &arguments.id, *queues)
    };
    let image = path.display().to_string();
    serve::run(ready, Blk { image, options, workers })
}

struct Blk {
    image: String,
    options: BlkOptions,
    workers: Arc<[Worker]>,
}

impl Service for Blk {
    fn name(&self) -> &'static str {
        "blk"
    }

    fn connect(&self, _: usize, stream: PeerFd) -> Result<Box<dyn Connection>> {
        let backend = blk::Blk::backend(self.options.clone(), Arc::clone(&self.workers));
        Ok(Box::new(Server::new(stream, backend)))
    }

    fn left(&self) -> Vec<(String, usize)> {
        let rings = self.options.figures.stuck();
        let releasing = matches!(&self.options.disk, Disk::File(image) if image.is_releasing());
        if rings > 0 || releasing { vec![(self.image.clone(), rings)] } else { Vec::new() }
    }

    fn figures(&self, page: &mut Page) {
        let own = &*self.options.figures;
        figures(page, &[(String::new(), own)]);
        serve::iotlb_figures(page, &own.iotlb.totals());
    }
}

/// The metrics of block devices, except those of their IOTLBs. A queue is named by its device and
/// its number.
pub(crate) fn figures<S: Serve>(page: &mut Page, devices: &[(String, &RequestFigures<S>)]) {
    type Read = fn(&QueueStats) -> u64;
    for (name, help, of) in [
        ("requests_total", "Requests completed.", (|q| q.requests) as Read),
        ("failed_requests_total", "Requests completed with an error.", |q| q.failed),
        ("bytes_total", "Bytes of data moved.", |q| q.bytes),
        ("interrupts_total", "Notifications of the driver.", |q| q.interrupts),
        ("waits_total", "Times that a request waited for a translation.", |q| q.parked),
        ("ring_away_total", "Times that a ring was not mapped.", |q| q.away),
        ("ring_full_total", "Times that a ring was not read further for a while.", |q| q.full),
    ] {
        let queues = devices.iter().flat_map(|(device, figures)| {
            let queues = (0..).zip(figures.queues());
            queues.map(move |(queue, stats): (u16, _)| (format!("{device}{queue}"), of(&stats)))
        });
        page.many(name, help, "queue", queues);
    }
    let all = || devices.iter().map(|(_, figures)| figures);
    let failures: u64 = all().map(|figures| figures.failures.load(Ordering::Relaxed)).sum();
    page.one("ring_failures_total", "Rings that stopped because of an error.", failures);
    let stuck: usize = all().map(|figures| figures.stuck()).sum();
    page.one("stuck_rings", "Rings that were stopped and whose I/O has not ended.", stuck);
}
