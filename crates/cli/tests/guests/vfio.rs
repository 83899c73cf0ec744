//! The device IOTLB's purpose: a driver in user space, inside the guest, over VFIO, without unsafe
//! mode. The device can access what the driver maps, and nothing else.

use std::fs;

use crate::{
    blk::service,
    place::{Place, part},
    proxy::{MISS, Recording},
    qemu::{Iommu, Qemu},
};

/// A shell function that gives the output of a run of our driver, by a name.
pub(crate) const TRY: &str = r#"
try() {
    name=$1
    shift
    vfio-blk "$@" > /tmp/vfio 2>&1 || { give $name < /tmp/vfio; false; }
    give $name < /tmp/vfio
}
"#;

const SCRIPT: &str = r#"
pci=$(virtio_pci 2 0)
to_vfio $pci
"#;

/// Checks our driver's output for a disk of 32 MiB.
pub(crate) fn reached_what_was_mapped(output: &str) {
    for found in ["capacity 65536", "static 4096 256", "unmapped is out of reach"] {
        assert!(output.contains(found), "{found}\n{output}");
    }
    assert!(output.ends_with("mapped again is in reach\nover"), "{output}");
}

/// Static mappings, and isolation by the device; then, in the same machine, the same figures and
/// behaviour from a real kernel that the tests of the domain get from a fake one.
fn a_driver_and_a_domain(iommu: Iommu) {
    let place = Place::new();
    let image = place.image("image", 32);
    let back = service(&place, &image, 1);
    let between = place.path("between.sock");
    let wire = Recording::between(between.clone(), &back.socket);
    let program = fs::read(part("vfio-blk")).unwrap();
    let machine = Qemu::new(iommu).blk(&between, 1, "").file("bin/vfio-blk", program);
    let script = format!("{TRY}{SCRIPT}\ntry driver $pci $group\ntry domain domain $group\n");
    let all = machine.start(&place, &script).end();
    let output = all.given("driver");
    reached_what_was_mapped(&output);
    // There was a miss for the page that was removed, and a second one with NEED_REPLY, which must
    // get a reply: the first never gets one.
    let misses = wire.iotlb(MISS);
    let misses: Vec<_> = misses.iter().filter(|miss| miss.iova & !0xfff == 0x0500_0000).collect();
    assert!(misses.iter().any(|miss| miss.need_reply), "{misses:?}");
    back.terminate();

    let output = all.given("domain");
    for found in ["Msi", "budget 65536 maps Some(1) entries", "dirty 512", "addresses updated"] {
        assert!(output.contains(found), "{found}\n{output}");
    }
    assert!(output.ends_with("a domain as in the tests"), "{output}");
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn a_driver_and_a_domain_over_a_real_kernel_with_intels_iommu() {
    // rule L51, rule L55, rule L60, rule L63
    a_driver_and_a_domain(Iommu::IntelStrict);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_driver_and_a_domain_over_a_real_kernel_with_a_virtio_iommu() {
    // rule L51, rule L55, rule L60, rule L63
    a_driver_and_a_domain(Iommu::VirtioStrict);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_driver_over_a_kernel_with_iommufd() {
    let place = Place::new();
    let image = place.image("image", 32);
    let back = service(&place, &image, 1);
    let program = fs::read(part("vfio-blk")).unwrap();
    let machine = Qemu::new(Iommu::IntelStrict).iommufd();
    let machine = machine.blk(&back.socket, 1, "").file("bin/vfio-blk", program);
    let script = format!("{TRY}{SCRIPT}\nmodprobe iommufd\ntry driver $pci iommufd\n");
    let output = machine.start(&place, &script).end().given("driver");
    let found =
        ["UNMAP pass: nothing is cut", "Msi", "static 4096 256", "unmapped is out of reach"];
    for found in found {
        assert!(output.contains(found), "{found}\n{output}");
    }
    assert!(output.ends_with("mapped again is in reach\nover"), "{output}");
    back.terminate();
}
