//! Disks: the guest's writes are in the image and can be read back, whatever the IOMMU in between.

use std::path::Path;

use serde_json::Value;

use crate::{
    machine::Transcript,
    place::{Place, Service, md5},
    qemu::{Iommu, Qemu},
};

pub(crate) const MIB: u64 = 1 << 20;

/// Writes with verification and reads back; gives the sum of a part that is written without
/// verification, and of the whole disk.
pub(crate) const VERIFY: &str = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
say queues $(ls /sys/block/vda/mq | wc -l)
dd if=/dev/urandom of=/tmp/random bs=64k count=64
dd if=/tmp/random of=/dev/vda bs=64k oflag=direct conv=fsync
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --numjobs=$(nproc) --offset=4m --size=4m \
    --offset_increment=4m --verify=crc32c --fsync=64 --group_reporting
run_fio large --rw=write --bs=128k --iodepth=4 --offset=12m --size=4m --verify=crc32c
say random $(md5sum < /tmp/random)
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;

/// How large an image is for [`VERIFY`]: an emulated processor takes a second to sum 16 MiB.
pub(crate) const SIZE_MIB: u64 = 20;

/// `ringfence blk` with an image, and the image.
pub(crate) fn service(place: &Place, image: &Path, queues: u32) -> Service {
    let (image, queues) = (image.to_str().unwrap(), queues.to_string());
    let arguments = ["blk", "--image", image, "--queues", &queues, "--log", "debug"];
    place.service("blk.sock", &[&arguments[..], &PATIENT].concat())
}

/// A long time-out for translations: the result must not depend on how busy the machine is.
pub(crate) const PATIENT: [&str; 2] = ["--iotlb-timeout-ms", "600000"];

/// Every job of a fio report moved bytes and had no error.
pub(crate) fn no_errors(report: &Value) {
    for job in report["jobs"].as_array().unwrap() {
        assert_eq!(job["error"], 0, "{job:#}");
        assert!(job["write"]["total_ios"].as_u64().unwrap() > 0, "{job:#}");
    }
}

/// The output of [`VERIFY`] is right, and matches the content of the image.
pub(crate) fn verified(output: &Transcript, image: &Path) {
    no_errors(&output.json("mixed"));
    no_errors(&output.json("large"));
    assert_eq!(output.sum("random"), md5(image, 0, 4 * MIB));
    assert_eq!(output.sum("whole"), md5(image, 0, SIZE_MIB * MIB));
}

/// How many translations a back end has requested.
pub(crate) struct Misses {
    count: f64,
    calls: f64,
}

impl Misses {
    pub(crate) fn of(service: &Service) -> Misses {
        let count = service.figure("ringfence_iotlb_misses_total");
        Misses { count, calls: service.figure("ringfence_iotlb_asks_total") }
    }
}

/// Checks the run of [`VERIFY`] by a guest on a disk of ours with that many queues, and that we had
/// no errors. `before`: the misses of the back end before it.
pub(crate) fn was_served(
    output: &Transcript,
    image: &Path,
    service: &Service,
    iommu: Iommu,
    queues: u32,
    before: Misses,
) {
    assert_eq!(output.word("domain"), iommu.domain(), "{iommu}");
    assert_eq!(output.word("queues"), queues.to_string());
    verified(output, image);
    // With an IOMMU there were misses, and no request had to be given up.
    let now = Misses::of(service);
    let (misses, calls) = (now.count - before.count, now.calls - before.calls);
    assert_eq!(misses > 1000.0, iommu != Iommu::None, "{misses} misses");
    // Many misses with one call, where a guest has many requests in flight.
    assert!(misses >= 2.0 * calls, "{misses} misses in {calls} calls");
    assert_eq!(service.figure("ringfence_iotlb_timeouts_total"), 0.0);
    assert_eq!(service.figure("ringfence_failed_requests_total"), 0.0);
    assert_eq!(service.figure("ringfence_ring_failures_total"), 0.0);
}

/// The driver is unbound from the device and bound again, under load. Its last writes go where
/// [`VERIFY`] does not write.
pub(crate) const COMES_AND_GOES: &str = r#"
load virtio_blk
pci=$(virtio_pci 2 0)
dd if=/dev/urandom of=/tmp/again bs=64k count=32
for round in 1 2 3 4 5; do
    # Whatever is under way then may fail, but not hang.
    fio --name=load --filename=/dev/vda --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
        --iodepth=16 --time_based --runtime=600 --offset=8m > /tmp/load 2>&1 &
    load=$!
    under_load
    echo $pci > /sys/bus/pci/drivers/virtio-pci/unbind
    # Mostly it would go on without a disk; it ends when nothing is under way any more.
    kill $load || true
    wait $load || true
    await [ ! -e /dev/vda ]
    echo $pci > /sys/bus/pci/drivers/virtio-pci/bind
    await ready virtio_blk
    dd if=/tmp/again of=/dev/vda bs=64k seek=$((272 + round)) oflag=direct conv=fsync
done
say again $(md5sum < /tmp/again)
run_fio after --rw=randrw --bs=4k --iodepth=16 --offset=8m --size=4m --verify=crc32c
"#;

/// The last writes of [`COMES_AND_GOES`] are on the disk.
pub(crate) fn came_back(output: &Transcript, image: &Path) {
    no_errors(&output.json("after"));
    let sum = output.sum("again");
    assert_eq!(sum, md5(image, (272 + 5) * 64 * 1024, 2 * MIB));
}

/// The guest reboots: firmware and a fresh driver meet the rings that the driver before left.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guest_that_reboots() {
    let place = Place::new();
    let image = place.image("image", 32);
    let service = service(&place, &image, 1);
    let script = r#"
load virtio_blk
dd if=/dev/vda of=/tmp/read bs=1M skip=31 count=1
boot=$(head -c 1 /tmp/read)
case "$boot" in 1|2) ;; *) boot=0 ;; esac
if [ "$boot" != 2 ]; then
    dd if=/dev/urandom of=/tmp/random bs=64k count=64
    dd if=/tmp/random of=/dev/vda bs=64k seek=$((boot * 64)) oflag=direct conv=fsync
    echo $((boot + 1)) | dd of=/dev/vda bs=1M seek=31 conv=fsync,sync
    say boot$boot $(md5sum < /tmp/random)
    hear
    # Once in an orderly way, once as a crash does, with I/O under way.
    if [ $boot = 1 ]; then
        fio --name=load --filename=/dev/vda --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
            --iodepth=16 --time_based --runtime=600 > /tmp/load 2>&1 &
        under_load
    fi
    reboot -f
    sleep 1000
fi
say last $(dd if=/dev/vda bs=1M count=8 | md5sum)
"#;
    let machine = Qemu::new(Iommu::VirtioStrict).reboots().blk(&service.socket, 1, "");
    let mut guest = machine.start(&place, script);
    for boot in 0..2 {
        guest.hear(&format!("boot{boot} "));
        guest.say("go on");
    }
    let output = guest.end();
    for boot in 0..2 {
        let sum = output.sum(&format!("boot{boot}"));
        assert_eq!(sum, md5(&image, boot * 4 * MIB, 4 * MIB), "boot {boot}");
    }
    assert_eq!(output.sum("last"), md5(&image, 0, 8 * MIB));
    service.terminate();
}

/// A failing command of a guest's script is noticed.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
#[should_panic(expected = "the guest's script failed")]
fn a_script_that_fails_is_seen() {
    let place = Place::new();
    Qemu::new(Iommu::None).start(&place, "false | true\nfalse\ntrue").end();
}
