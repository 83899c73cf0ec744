//! `ringfence blk`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use ringfence_devices::{
    blk::{BlkOptions, make_rings},
    disk::{Disk, DiskBuffers, Image, ImageError, ImageOptions},
};
use ringfence_iotlb::IotlbConfig;
use ringfence_virtq::blk::ID_BYTES;

use crate::{
    device::{Device, DeviceKind, Devices},
    serve::{self, Options},
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
    let begun = serve::begin(&service.common, "blk", &[service.socket.as_deref()])?;
    let how = ImageOptions {
        read_only: *read_only,
        direct: *direct,
        wait: LOCK_WAIT,
        hand_over: *share_image,
        buffers: arguments.disk_buffers,
        reader: begun.socket(0).as_deref().map(serve::reader),
    };
    let image = open(path, how)?;
    let ready = serve::open(begun, usize::from(*queues), || {
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
    let kind = DeviceKind::Blk { options, image, workers };
    let devices = vec![Device { prefix: String::new(), kind }];
    serve::run(ready, Devices { name: "blk", devices })
}
