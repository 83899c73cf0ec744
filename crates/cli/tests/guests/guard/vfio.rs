//! Drivers in user space inside a guest, over VFIO, in domains that are tables of `ringfence
//! guard`.

use std::fs;

use super::{disk, meanwhile};
use crate::{
    place::{Place, part},
    qemu::{Iommu, Qemu},
    vfio::{TRY, reached_what_was_mapped},
};

/// In one machine: an endpoint that does nothing, and requests as fast as the guest sends them
/// (`RINGFENCE_REQUESTS` sets how many); one device, whose refused accesses are in the guest's log,
/// with address and direction; two devices in two domains, where the same address leads each to a
/// page of its own or nowhere, and both in one.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn drivers_in_user_space() {
    // rule V6, rule V14, rule V20, rule V28
    let count = std::env::var("RINGFENCE_REQUESTS").map_or(100_000, |n| n.parse().unwrap());
    let place = Place::new();
    let disks = [0, 1].map(|n| {
        let image = place.image(&format!("image{n}"), 32);
        disk(&place, &format!("disk{n}.sock"), &image, "")
    });
    let guard = place.guard(&["--blk", &disks[0], "--blk", &disks[1], "--idle", "08.0"]);
    let script = format!(
        r#"{TRY}
to_vfio 0000:00:08.0
say begin
hear
try requests requests $group {count}
say over
hear
one=$(virtio_pci 2 0)
other=$(virtio_pci 2 1)
load virtio_blk
to_vfio $one
first=$group
try one $one $first
dmesg | grep -i fault | give log
say alone
hear
to_vfio $other
[ $first != $group ]
try groups groups $one $first $other $group
"#
    );
    let program = fs::read(part("vfio-blk")).unwrap();
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).file("bin/vfio-blk", program);
    let mut guest = machine.start(&place, &script);
    let look = || {
        let figure = |name: &str| guard.service.figure(&format!("ringfence_iommu_{name}"));
        (guard.maps(), guard.unmaps(), figure("mappings"), figure("refused_total"))
    };
    let before = meanwhile(&mut guest, "begin", look);
    let after = meanwhile(&mut guest, "over", look);
    let faults = || ["0x30", "0x38"].map(|endpoint| guard.faults(endpoint));
    let alone = meanwhile(&mut guest, "alone", faults);
    let all = guest.end();

    let output = all.given("requests");
    assert!(output.starts_with("requests "), "{output}");
    println!("{output}");
    assert!(after.0 - before.0 >= f64::from(count), "{before:?} {after:?}");
    assert!(after.1 - before.1 >= f64::from(count / 16), "{before:?} {after:?}");
    assert_eq!(after.2, before.2, "mappings are left");
    assert_eq!(after.3, 0.0, "refused");

    let output = all.given("one");
    reached_what_was_mapped(&output);
    // Slot 6 is endpoint 0x30. The disk's read writes to memory.
    let log = all.given("log");
    for way in ["W", "R"] {
        let fault = format!("page fault from EP 48 at 0x5000000 [{way}]");
        assert!(log.contains(&fault), "{fault}\n{log}");
    }
    assert!(alone[0] >= 6.0 && alone[1] == 0.0, "{alone:?}");

    let output = all.given("groups");
    assert!(output.ends_with("apart\ntogether"), "{output}");
    for (now, alone) in faults().iter().zip(alone) {
        assert!(now - alone >= 4.0, "{now} after {alone}\n{}", guard.service.figures());
    }
    assert_eq!(guard.service.figure("ringfence_iommu_dropped_faults_total"), 0.0);
    guard.service.terminate();
}
