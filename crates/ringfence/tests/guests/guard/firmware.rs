//! Before the guest has a driver for the IOMMU its firmware uses a disk that may bypass it, and no
//! other.

use super::{disk, no_errors};
use crate::{
    firmware::{COPIED, copies},
    place::Place,
    qemu::{Iommu, Qemu},
};

/// The firmware is to copy what lies at the disk's beginning to behind it, then Linux uses the disk;
/// whether the copy is there.
fn copied(options: &str, more: &[&str]) -> bool {
    let place = Place::new();
    let image = place.image("image", 32);
    let pattern: Vec<u8> = (0..COPIED).map(|at| (at * 31 + at / 512 + 1) as u8).collect();
    std::fs::write(&image, [&pattern[..], &vec![0; (32 << 20) - COPIED]].concat()).unwrap();
    let disk = disk(&place, "disk.sock", &image, options);
    let mut guard = place.guard(&[&["--blk", &disk], more].concat());
    let device = guard.arguments.iter_mut().find(|word| word.starts_with("vhost-user-blk-pci"));
    device.expect("a disk").push_str(",bootindex=1");
    let script = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --offset=1m --size=4m --verify=crc32c
"#;
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).option_rom(&place, &copies());
    let said = machine.start(&place, script).end();
    assert_eq!(said.word("domain"), "DMA");
    no_errors(&said.json("mixed"));
    guard.service.terminate();
    let disk = std::fs::read(&image).unwrap();
    assert!(disk[..COPIED] == pattern);
    let copy = &disk[COPIED..2 * COPIED];
    assert!(copy == pattern || copy.iter().all(|&byte| byte == 0), "half a copy");
    copy == pattern
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn it_reads_and_writes_a_disk_that_bypasses() {
    // rule V5
    assert!(copied("", &[]));
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn an_untrusted_disk_is_out_of_its_reach() {
    // rule V6
    assert!(!copied(",untrusted", &[]));
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn without_bypass_every_disk_is_out_of_its_reach() {
    // rule V6
    assert!(!copied("", &["--no-bypass"]));
}
