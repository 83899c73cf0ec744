//! A back end that crashes under load, and comes back.

use std::path::Path;

use crate::{
    blk::{MIB, no_errors, service},
    machine::Guest,
    place::{Place, md5},
    qemu::{Iommu, Qemu},
};

/// How much of the load a back end has completed when it is killed.
pub(crate) const MANY: f64 = 500.0;
pub(crate) const COMPLETED: &str = "ringfence_requests_total";

/// Writes, reads back and verifies until the test ends it.
pub(crate) const LOAD: &str = r#"
load virtio_blk
# Again and again, until it is enough.
passes() {
    while [ ! -e /tmp/enough ]; do
        fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
            --output=/tmp/load --name=load --rw=randrw --bs=4k --iodepth=16 --size=48m \
            --io_size=32m --verify=crc32c
    done
}
say ready
hear go
passes &
passes=$!
hear
touch /tmp/enough
wait $passes
give load < /tmp/load
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;

/// Ends [`LOAD`] on an image of 64 MiB: it saw no error, and what it wrote is there.
pub(crate) fn lost_nothing(mut guest: Guest, image: &Path) {
    guest.say("enough");
    let output = guest.end();
    no_errors(&output.json("load"));
    assert_eq!(output.sum("whole"), md5(image, 0, 64 * MIB));
}

/// No acknowledged write is lost, and no request: fio sees no error and verifies all that it wrote.
fn killed_under_load(iommu: Iommu, more: &str) {
    let place = Place::new();
    let image = place.image("image", 64);
    let mut back = service(&place, &image, 1);
    let mut guest = Qemu::new(iommu).blk(&back.socket, 1, more).start(&place, LOAD);
    guest.hear("ready");
    let mut before = back.figure(COMPLETED);
    guest.say("go");
    for _ in 0..3 {
        back.reaches(COMPLETED, before + MANY);
        back.kill();
        back = service(&place, &image, 1);
        before = 0.0;
    }
    back.reaches(COMPLETED, MANY);
    lost_nothing(guest, &image);
    back.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn killed_under_load_behind_a_virtio_iommu() {
    killed_under_load(Iommu::VirtioStrict, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn killed_under_load_without_an_iommu() {
    killed_under_load(Iommu::None, "");
}
