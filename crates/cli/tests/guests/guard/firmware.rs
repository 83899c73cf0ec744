//! Before the guest has a driver for the IOMMU, its firmware uses a disk that may bypass it. A read
//! from any other disk never ends: SeaBIOS waits for it for ever, so QEMU's arguments keep it from
//! such disks.

use std::path::{Path, PathBuf};

use super::{disk, meanwhile, no_errors};
use crate::{
    firmware::{COPIED, copies},
    place::{Guard, Place},
    qemu::{Iommu, Qemu},
};

/// Linux uses a disk behind the IOMMU, whatever the firmware could.
const LINUX: &str = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
run_fio mixed --rw=randrw --bs=4k --iodepth=16 --offset=1m --size=2m --verify=crc32c
"#;

fn pattern() -> Vec<u8> {
    (0..COPIED).map(|at| (at * 31 + at / 512 + 1) as u8).collect()
}

/// An image of 16 MiB for a firmware that copies.
pub(super) fn image(place: &Place, name: &str) -> PathBuf {
    let image = place.image(name, 16);
    std::fs::write(&image, [&pattern()[..], &vec![0; (16 << 20) - COPIED]].concat()).unwrap();
    image
}

/// Whether the beginning of the disk was copied right behind it.
pub(super) fn is_copied(image: &Path) -> bool {
    let disk = std::fs::read(image).unwrap();
    assert!(disk[..COPIED] == pattern());
    disk[COPIED..2 * COPIED] == pattern()
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn it_reads_and_writes_a_disk_that_bypasses() {
    // rule V5
    let place = Place::new();
    let image = image(&place, "image");
    let mut guard = place.guard(&["--blk", &disk(&place, "disk.sock", &image, "")]);
    let device = guard.arguments.iter_mut().find(|word| word.starts_with("vhost-user-blk-pci"));
    device.expect("a disk").push_str(",bootindex=1");
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).option_rom(&place, &copies());
    let output = machine.start(&place, LINUX).end();
    assert_eq!(output.word("domain"), "DMA");
    no_errors(&output.json("mixed"));
    assert!(is_copied(&image));
    assert_eq!(guard.faults("0x30"), 0.0);
    guard.service.terminate();
}

/// A guard with arguments that let the firmware start a disk which it cannot use.
fn let_at_it(place: &Place, image: &Path, option: &str, more: &[&str]) -> Guard {
    let disk = disk(place, "disk.sock", image, option);
    let mut guard = place.guard(&[&["--blk", &disk], more].concat());
    let strict = guard.arguments.iter().position(|word| word == "strict=on").expect("-boot");
    guard.arguments.drain(strict - 1..=strict);
    guard
}

/// The firmware is refused even the disk's ring. If nothing reads from the disk then, Linux can use
/// it.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn an_untrusted_disk_is_out_of_its_reach() {
    // rule V6
    let place = Place::new();
    let guard = let_at_it(&place, &image(&place, "image"), ",untrusted", &[]);
    let machine = Qemu::guarded(Iommu::GuardStrict, &guard).kernel_parameters("edd=skipmbr");
    let mut guest = machine.start(&place, &format!("say begin\nhear\n{LINUX}"));
    let refused =
        meanwhile(&mut guest, "begin", || (guard.faults("0x30"), guard.completed("06.0")));
    let output = guest.end();
    assert!(refused.0 > 0.0 && refused.1 == 0.0, "{refused:?}");
    assert_eq!(output.word("domain"), "DMA");
    no_errors(&output.json("mixed"));
    assert_eq!(guard.faults("0x30"), refused.0, "behind the IOMMU it is refused nothing");
    guard.service.terminate();
}

/// Early code of Linux reads from the disk, and waits for ever.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn without_bypass_every_disk_is_out_of_its_reach() {
    // rule V6
    let place = Place::new();
    let guard = let_at_it(&place, &image(&place, "image"), "", &["--no-bypass"]);
    let stopped = Qemu::guarded(Iommu::GuardStrict, &guard).start(&place, "");
    guard.wait_for_a_fault("0x30");
    assert_eq!(guard.completed("06.0"), 0.0);
    drop(stopped);
    guard.service.terminate();
}
