//! Errors in the memory that a front end brings are logged, for every device.

use std::{fs::File, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::{Geometry, PageSizes, Range, shootdown::Shootdown, table::Limits};
use ringfence_mem::{GuestRam, Memory, Region};
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::Handler;
use ringfence_virtio_iommu::device::DeviceConfig;
use tracing::{
    Event, Level, Metadata, Subscriber,
    span::{Attributes, Id, Record},
};

use ringfence_devices::{
    blk::{Blk, BlkOptions},
    disk::{Disk, Ram},
    iommu::{Endpoints, Iommu, IommuOptions},
    net::{Link, Net, NetOptions},
};

/// Records the levels of log messages.
#[derive(Default)]
struct Levels(Arc<Mutex<Vec<Level>>>);

impl Subscriber for Levels {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.target().starts_with("ringfence_vhost_user_backend")
    }
    fn event(&self, event: &Event<'_>) {
        self.0.lock().push(*event.metadata().level());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn workers() -> Arc<[Worker]> {
    [Worker::spawn("test", Notify::Sleep).unwrap()].into()
}

fn blk() -> Box<dyn Handler> {
    let ram = GuestRam::new(4096, 0).unwrap();
    let disk = Disk::Ram(Arc::new(Ram::map(ram.fd(), 4096).unwrap()));
    Box::new(Blk::backend(BlkOptions::new(disk, "disk", 1), workers()))
}

fn net() -> Box<dyn Handler> {
    let options = NetOptions::new("net", Link::Loopback);
    Box::new(Net::new(options, workers()).unwrap().connect(0))
}

fn iommu() -> Box<dyn Handler> {
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    let endpoints = Endpoints::new([], Shootdown::new(1), geometry, Limits::NONE);
    let options = IommuOptions { device: DeviceConfig::default(), unit: 0 };
    Box::new(Iommu::new(Arc::new(endpoints), options, workers()).connect())
}

#[test]
fn whatever_the_device_a_connection_is_warned_once_of_memory_that_is_not_mapped() {
    let known = Memory::of_ram(&GuestRam::new(4096, 0).unwrap()).unwrap();
    let region = Region { gpa: 1 << 40, size: 4096, user_addr: 1 << 40, mmap_offset: 0 };
    let with_foreign = || known.with(region, File::open("/dev/zero").unwrap()).unwrap();
    for connect in [blk, net, iommu] {
        let subscriber = Levels::default();
        let levels = Arc::clone(&subscriber.0);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..2 {
                let mut connection = connect();
                for (memory, level) in [
                    (Arc::clone(&known), None),
                    (with_foreign(), Some(Level::WARN)),
                    (with_foreign(), Some(Level::DEBUG)),
                    (Arc::clone(&known), None),
                    (with_foreign(), Some(Level::DEBUG)),
                ] {
                    connection.set_memory(memory).unwrap();
                    assert_eq!(std::mem::take(&mut *levels.lock()), Vec::from_iter(level));
                }
            }
        });
    }
}
