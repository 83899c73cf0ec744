//! A back end that crashes under load, and comes back.

use std::{thread, time::Duration};

use crate::{
    blk::{MIB, no_errors, service},
    place::{Place, md5},
    qemu::{Iommu, Qemu},
};

/// No write that the guest was told of is lost, and no request: fio sees no error and verifies all
/// that it wrote.
fn killed_under_load(iommu: Iommu, more: &str) {
    let place = Place::new();
    let image = place.image("image", 64);
    let mut back = service(&place, &image, 1);
    let script = r#"
load virtio_blk
say ready
hear
[ "$line" = go ]
run_fio load --rw=randrw --bs=4k --iodepth=16 --size=48m --io_size=160m --verify=crc32c \
    --rate_iops=3000,3000
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;
    let mut guest = Qemu::new(iommu).blk(&back.socket, 1, more).start(&place, script);
    guest.hear("ready");
    guest.say("go");
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(700));
        back.kill();
        back = service(&place, &image, 1);
        // QEMU looks for it once a second.
        thread::sleep(Duration::from_millis(1200));
    }
    let said = guest.end();
    no_errors(&said.json("load"));
    assert_eq!(said.word("whole").split(' ').next().unwrap(), md5(&image, 0, 64 * MIB));
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
