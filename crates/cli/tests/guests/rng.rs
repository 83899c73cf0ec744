//! A back end that is one trait (as the example `rng`), in front of a stock guest.

use std::{fs::File, io::Read, os::unix::net::UnixListener, sync::Arc, thread};

use ringfence_iotlb::IotlbConfig;
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::Server;
use ringfence_vhost_user_backend::{Addresses, Device, Request, Requests};

use crate::{
    machine::Transcript,
    place::Place,
    qemu::{Iommu, Qemu},
};

struct Rng(File);

impl Device for Rng {
    fn request(&mut self, _: u16, mut request: Request) {
        let mut bytes = [0; 4096];
        let len = request.writable_len().min(bytes.len());
        self.0.read_exact(&mut bytes[..len]).unwrap();
        request.write(&bytes[..len]);
    }
}

pub(crate) const SCRIPT: &str = r#"
modprobe virtio_rng
named() { grep -q virtio_rng /sys/class/misc/hw_random/rng_current; }
await named
say domain $(domain $(virtio_pci 4 0))
dd if=/dev/hwrng of=/tmp/bytes bs=1k count=64 iflag=fullblock 2> /dev/null
say bytes $(wc -c < /tmp/bytes)
say packed $(gzip -c < /tmp/bytes | wc -c)
"#;

/// What [`SCRIPT`] has read is random.
pub(crate) fn is_random(output: &Transcript, iommu: Iommu) {
    assert_eq!(output.word("domain"), iommu.domain());
    assert_eq!(output.word("bytes"), "65536");
    // Random bytes cannot be compressed.
    assert!(output.word("packed").parse::<u32>().unwrap() > 65536);
}

fn served(iommu: Iommu) {
    let place = Place::new();
    let socket = place.path("rng.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let serving = thread::spawn(move || {
        let workers: Arc<[Worker]> = [Worker::spawn("rng", Notify::Adaptive).unwrap()].into();
        let device = Rng(File::open("/dev/urandom").unwrap());
        let addresses = Addresses::Iotlb(IotlbConfig::default());
        let backend = Requests::backend(device, "rng", addresses, workers, 0);
        let figures = Arc::clone(backend.device().figures());
        let (stream, _) = listener.accept().unwrap();
        Server::new(stream, backend).serve().unwrap();
        (figures.sum(), figures.iotlb.totals())
    });
    let output = Qemu::new(iommu).newer().rng(&socket).start(&place, SCRIPT).end();
    let (queue, iotlb) = serving.join().unwrap();
    is_random(&output, iommu);
    assert!(queue.requests > 0 && queue.bytes >= 65536 && queue.failed == 0, "{queue:?}");
    assert_eq!(iotlb.updates > 0, iommu != Iommu::None, "{iotlb:?}");
    assert_eq!((iotlb.refusals, iotlb.timeouts), (0, 0), "{iotlb:?}");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn random_bytes_without_an_iommu() {
    served(Iommu::None);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn random_bytes_behind_a_strict_iommu() {
    served(Iommu::IntelStrict);
}
