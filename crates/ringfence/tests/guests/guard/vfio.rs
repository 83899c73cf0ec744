//! Drivers in user space inside a guest, over VFIO, whose domains are tables of `ringfence guard`.

use std::fs;

use super::{disk, meanwhile, one_disk};
use crate::{
    place::{Place, part},
    qemu::{Iommu, Qemu},
};

const TRY: &str = r#"
try() { vfio-blk "$@" > /tmp/vfio 2>&1 || { give vfio < /tmp/vfio; false; }; give vfio < /tmp/vfio; }
"#;

fn program() -> Vec<u8> {
    fs::read(part("vfio-blk")).unwrap()
}

/// What a device is refused the guest's log tells, with the address and the way.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn what_is_not_mapped_is_out_of_reach_and_in_the_log() {
    // rule V14, rule V28
    let place = Place::new();
    let guard = one_disk(&place, &place.image("image", 32), "");
    let script = r#"
pci=$(virtio_pci 2 0)
load virtio_blk
to_vfio $pci
try $pci $group
dmesg | grep -i fault | give log
"#;
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).file("bin/vfio-blk", program());
    let all = machine.start(&place, &format!("{TRY}{script}")).end();
    let said = all.given("vfio");
    for found in ["capacity 65536", "static 4096 256", "unmapped is out of reach"] {
        assert!(said.contains(found), "{found}\n{said}");
    }
    assert!(said.ends_with("mapped again is in reach\nover"), "{said}");
    // Slot 6 is endpoint 0x30. The disk's read writes to memory.
    let log = all.given("log");
    for way in ["W", "R"] {
        let fault = format!("page fault from EP 48 at 0x5000000 [{way}]");
        assert!(log.contains(&fault), "{fault}\n{log}");
    }
    assert!(guard.service.figure("ringfence_iommu_faults_total") >= 6.0);
    assert_eq!(guard.service.figure("ringfence_iommu_dropped_faults_total"), 0.0);
    guard.service.terminate();
}

/// Two devices in two domains, where the same address leads each to a page of its own or nowhere; and
/// both in one domain.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn one_device_does_not_reach_the_others_domain() {
    // rule V6, rule V20
    let place = Place::new();
    let disks = [0, 1].map(|n| {
        let image = place.image(&format!("image{n}"), 16);
        disk(&place, &format!("disk{n}.sock"), &image, "")
    });
    let guard = place.guard(&["--blk", &disks[0], "--blk", &disks[1]]);
    let script = r#"
load virtio_blk
one=$(virtio_pci 2 0)
other=$(virtio_pci 2 1)
to_vfio $one
first=$group
to_vfio $other
[ $first != $group ]
try groups $one $first $other $group
"#;
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).file("bin/vfio-blk", program());
    let said = machine.start(&place, &format!("{TRY}{script}")).end().given("vfio");
    assert!(said.ends_with("apart\ntogether"), "{said}");
    for endpoint in ["0x30", "0x38"] {
        let faults = format!("ringfence_iommu_faults_total{{endpoint=\"{endpoint}\"}}");
        assert!(guard.service.figure(&faults) >= 4.0, "{faults}\n{}", guard.service.figures());
    }
    guard.service.terminate();
}

/// An endpoint that does nothing, and requests as fast as the guest sends them. How many is told by
/// `RINGFENCE_REQUESTS`.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn requests_in_great_numbers() {
    let count = std::env::var("RINGFENCE_REQUESTS").map_or(100_000, |n| n.parse().unwrap());
    let place = Place::new();
    let guard = place.guard(&["--idle", "06.0"]);
    let script = format!(
        "to_vfio 0000:00:06.0\nsay begin\nhear\ntry requests $group {count}\nsay over\nhear\n"
    );
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).file("bin/vfio-blk", program());
    let mut guest = machine.start(&place, &format!("{TRY}{script}"));
    let look = || {
        let mappings = guard.service.figure("ringfence_iommu_mappings");
        (guard.maps(), guard.unmaps(), mappings)
    };
    let before = meanwhile(&mut guest, "begin", look);
    let after = meanwhile(&mut guest, "over", look);
    let said = guest.end().given("vfio");
    assert!(said.starts_with("requests "), "{said}");
    println!("{said}");
    assert!(after.0 - before.0 >= f64::from(count), "{before:?} {after:?}");
    assert!(after.1 - before.1 >= f64::from(count / 16), "{before:?} {after:?}");
    assert_eq!(after.2, before.2, "mappings are left");
    assert_eq!(guard.service.figure("ringfence_iommu_refused_total"), 0.0);
    guard.service.terminate();
}
