//! An untrusted disk beside a trusted one: wherever the trusted one bypasses the IOMMU the other is
//! refused, and behind the IOMMU both are disks like any other.

use std::path::PathBuf;

use super::{
    TWO_DISKS, TWO_DISKS_END, both_verified, disk,
    firmware::{image, is_copied},
    meanwhile, no_errors,
};
use crate::{
    firmware::copies,
    place::{Guard, Place},
    qemu::{Iommu, Qemu},
};

/// Two disks, the first of them with `options[0]`.
fn two_disks(place: &Place, options: [&str; 2]) -> (Guard, [PathBuf; 2]) {
    let images = [image(place, "image0"), image(place, "image1")];
    let disks = [0, 1].map(|n| disk(place, &format!("disk{n}.sock"), &images[n], options[n]));
    (place.guard(&["--blk", &disks[0], "--blk", &disks[1]]), images)
}

/// With the printed arguments the firmware boots from the trusted disk, though it is the second,
/// and leaves the first to Linux, which has both behind the IOMMU.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn firmware_leaves_it_to_linux() {
    // rule V20
    let place = Place::new();
    let (guard, images) = two_disks(&place, [",untrusted", ""]);
    let begin = r#"
load virtio_blk
for n in 0 1; do say domain$n $(domain $(virtio_pci 2 $n)); done
say loaded
hear
"#;
    let few = TWO_DISKS.replace("--size=8m", "--size=2m");
    let script = format!("{begin}{few}{TWO_DISKS_END}");
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).option_rom(&place, &copies());
    let mut guest = machine.start(&place, &script);
    let copied = meanwhile(&mut guest, "loaded", || [0, 1].map(|n| is_copied(&images[n])));
    let output = guest.end();
    assert_eq!(copied, [false, true]);
    assert_eq!([output.word("domain0"), output.word("domain1")], ["DMA", "DMA"]);
    both_verified(&output, &images);
    guard.had_nothing_to_refuse();
    guard.service.terminate();
}

/// With a firmware that starts no device: after a reset of the machine no device's ring shows it.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guest_reboots_whose_firmware_starts_nothing() {
    // rule V4
    let place = Place::new();
    let image = place.image("image", 16);
    let guard = place.guard(&["--blk", &disk(&place, "disk.sock", &image, ",untrusted")]);
    let script = r#"
load virtio_blk
dd if=/dev/vda of=/tmp/read bs=512 count=1
boot=$(head -c 1 /tmp/read)
[ "$boot" = 1 ] || boot=0
say boot $boot
hear
if [ $boot = 0 ]; then
    echo 1 | dd of=/dev/vda bs=512 conv=fsync,sync
    reboot -f
    sleep 1000
fi
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --size=1m --verify=crc32c
"#;
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).with("-bios", "qboot.rom");
    let mut guest = machine.reboots().start(&place, script);
    for boot in 0..2 {
        let word = format!("boot {boot}");
        let domains = meanwhile(&mut guest, &word, || guard.domains());
        assert_eq!(domains, 1.0, "{word}");
    }
    no_errors(&guest.end().json("mixed"));
    guard.had_nothing_to_refuse();
    guard.service.terminate();
}

/// Linux uses the first disk without translation. The driver of the second waits for its request,
/// which never ends, and the machine can only be powered off by force.
const WITHOUT_TRANSLATION: &str = r#"
modprobe virtio_blk &
reads() { dd if=/dev/vda of=/dev/null count=1 2> /dev/null; }
await reads
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --size=2m --verify=crc32c
for n in 0 1; do say domain$n $(domain $(virtio_pci 2 $n)); done
busy() { [ -e /sys/block/vdb/inflight ] && [ "$(cat /sys/block/vdb/inflight | xargs)" = "1 0" ]; }
await busy
say busy
hear
busy
dmesg | grep -E 'WARNING:|fault from' | give log
say done 0
echo b > /proc/sysrq-trigger
sleep 1000
"#;

/// The trusted disk works untranslated, all accesses of the other are refused; returns what the
/// guest's log says about it. `refused`: how many of the driver's requests are.
fn one_of_two_bypasses(iommu: Iommu, refused: f64) -> String {
    let place = Place::new();
    let (guard, _) = two_disks(&place, ["", ",untrusted"]);
    let mut guest = Qemu::guarded(iommu, &guard).start(&place, WITHOUT_TRANSLATION);
    meanwhile(&mut guest, "busy", || guard.wait_for_a_fault("0x38"));
    let output = guest.end();
    no_errors(&output.json("mixed"));
    assert_eq!([output.word("domain0"), output.word("domain1")], [iommu.domain(), "none"]);
    assert_eq!(guard.faults("0x30"), 0.0);
    assert!(guard.completed("06.0") > 500.0);
    assert_eq!(guard.completed("07.0"), 0.0);
    assert_eq!((guard.maps(), guard.domains()), (0.0, 0.0));
    assert_eq!(guard.service.figure("ringfence_iommu_refused_total"), refused);
    guard.service.terminate();
    output.given("log")
}

/// A guest without knowledge of the IOMMU, like an early driver of any guest.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn without_a_driver_for_the_iommu_it_reaches_nothing() {
    // rule V5, rule V6
    assert_eq!(one_of_two_bypasses(Iommu::GuardUnknown, 0.0), "");
}

/// With `iommu.passthrough=1` Linux wants every device in a bypass domain. It does not expect a
/// refusal: it warns, and continues as though the device were behind no IOMMU.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_bypass_domain_is_refused() {
    // rule V5, rule V12
    let log = one_of_two_bypasses(Iommu::GuardPassthrough, 1.0);
    assert!(log.contains("iommu_setup_default_domain"), "{log}");
    assert!(log.contains("domain fault from EP 56"), "{log}");
}
