//! Disks.

use serde_json::Value;

use crate::{
    place::{Place, md5},
    qemu::{Iommu, Qemu},
};

const MIB: u64 = 1 << 20;

/// Writes with verification and reads it back, then gives the sum of a part written by hand.
const VERIFY: &str = r#"
modprobe virtio_blk
say domain $(domain $(virtio_pci 2 0))
dd if=/dev/urandom of=/tmp/random bs=64k count=64
dd if=/tmp/random of=/dev/vda bs=64k oflag=direct conv=fsync
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --offset=4m --size=8m --verify=crc32c
run_fio large --rw=write --bs=128k --iodepth=4 --offset=12m --size=16m --verify=crc32c
say random $(md5sum < /tmp/random)
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;

/// Every job of a fio report moved bytes and had no error.
pub(crate) fn no_errors(report: &Value) {
    for job in report["jobs"].as_array().unwrap() {
        assert_eq!(job["error"], 0, "{job:#}");
        assert!(job["write"]["total_ios"].as_u64().unwrap() > 0, "{job:#}");
    }
}

/// The guests can run at all, and what these tests look at can be seen: on QEMU's own disk.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn qemus_own_disk_passes() {
    let place = Place::new();
    let image = place.image("image", 32);
    let guest = Qemu::new(Iommu::VirtioStrict).own_blk(&image, 1).start(&place, VERIFY);
    let said = guest.end();
    assert_eq!(said.word("domain"), "DMA");
    no_errors(&said.json("mixed"));
    assert_eq!(said.word("random").split(' ').next().unwrap(), md5(&image, 0, 4 * MIB));
    assert_eq!(said.word("whole").split(' ').next().unwrap(), md5(&image, 0, 32 * MIB));
}

/// What a guest's script does wrong is not passed over.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
#[should_panic(expected = "the guest's script failed")]
fn a_script_that_fails_is_seen() {
    let place = Place::new();
    Qemu::new(Iommu::None).start(&place, "false | true\nfalse\ntrue").end();
}
