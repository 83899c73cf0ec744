//! `ringfence conformance` against a virtio-iommu in another process: this one.

mod common;

use std::{
    os::fd::AsFd,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use common::{Ended, Place};
use ringfence_devices::{
    blk::{BlkBackend, BlkOptions},
    disk::{Disk, Ram},
    iommu::{Endpoints, IommuBackend, IommuOptions},
    worker::{Notify, Worker},
};
use ringfence_iommu::{
    Geometry, Iova, PageSizes, Range, ReservedKind, ReservedRegion, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_vhost_user::{Handler, Server};
use ringfence_virtio_iommu::device::Options;
use serde_json::Value;

/// The endpoints behind the IOMMU; each is a disk.
const ENDPOINTS: [u32; 2] = [0x30, 0x38];

/// A virtio-iommu at `iommu.sock` of a place, and a disk of each endpoint at `disk-N.sock`.
fn serve(place: &Place) {
    let workers: Arc<[Worker]> =
        [Worker::spawn("worker", Notify::Adaptive).expect("a worker")].into();
    let shootdown = Shootdown::new(8);
    let endpoints = ENDPOINTS.map(|id| Endpoint::new(id, Arc::clone(&shootdown), Binding::Blocked));
    let region = |first, last, kind| {
        let range = Range::new(Iova(first), Iova(last)).expect("a range");
        ReservedRegion { range, kind }
    };
    let reserved = [
        region(0xfee0_0000, 0xfeef_ffff, ReservedKind::Msi),
        region(0x4000_0000, 0x4000_ffff, ReservedKind::Reserved),
    ];
    let input_range = Range::new(Iova(0x1000), Iova((1 << 40) - 1)).expect("a range");
    let page_sizes = PageSizes::from_granule(4096).expect("a power of two");
    let geometry = Geometry { reserved: reserved.into(), ..Geometry::new(page_sizes, input_range) };
    let behind = Endpoints::new(endpoints.clone(), shootdown, geometry, Limits::NONE);
    let device = Options { page_sizes, input_range, domain_range: (1, 64), ..Options::default() };
    let options = IommuOptions { device, unit: 0 };
    let iommu = IommuBackend::new(Arc::new(behind), options, Arc::clone(&workers));
    listen(place.path("iommu.sock"), iommu);
    for (n, endpoint) in endpoints.into_iter().enumerate() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("room for a disk");
        let disk = Disk::Ram(Arc::new(Ram::map(file.as_fd(), 1 << 20).expect("a disk")));
        let unit = n as u32 + 1;
        let options =
            BlkOptions { endpoint: Some(endpoint), unit, ..BlkOptions::new(disk, "disk", 1) };
        let backend = BlkBackend::new(options, Arc::clone(&workers));
        listen(place.path(&format!("disk-{n}.sock")), backend);
    }
}

/// Serves one front end after the other at a socket, as long as this process lives.
fn listen<H: Handler + Send + 'static>(socket: PathBuf, mut handler: H) {
    let listener = UnixListener::bind(socket).expect("a socket");
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut server = Server::new(stream, handler);
            let _ = server.serve();
            handler = server.into_handler();
        }
    });
}

fn conformance(place: &Place, more: &[&str]) -> Ended {
    let mut arguments = vec!["conformance", "iommu.sock", "--endpoint", "0x30"];
    arguments.extend(more);
    place.run(&arguments)
}

const WITH_DISKS: [&str; 6] =
    ["--endpoint", "0x38", "--blk", "disk-0.sock", "--blk", "disk-1.sock"];

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn print() {
    let place = Place::new();
    serve(&place);
    let ended = conformance(&place, &WITH_DISKS);
    println!("{ended}");
    let ended = conformance(&place, &[]);
    println!("{ended}");
    let _ = json;
}
