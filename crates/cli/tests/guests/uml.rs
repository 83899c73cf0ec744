//! User-Mode Linux: a front end of its own, without an IOMMU and at native speed.
//!
//! Its drivers would accept an IOMMU, but it cannot translate.

use std::{path::Path, process::Command};

use crate::{
    blk::{MIB, no_errors},
    machine::{Guest, Transcript, initramfs},
    net::{PAIR, TRAFFIC, arrived, back_to_back},
    place::{Place, md5, part},
    proxy::{Message, Recording, SET_FEATURES, SET_VRING_BASE},
};

/// Virtio's numbers of device types.
const NET: u32 = 1;
const BLK: u32 = 2;
const RING_PACKED: u64 = 1 << 34;

/// Runs `script` on a machine with these devices, each of a type and behind a socket.
fn run(place: &Place, devices: &[(&Path, u32)], script: &str) -> Transcript {
    let (root, state) = (place.path("initramfs"), place.path("uml"));
    // As in the other machines; here it finds its devices at once.
    let script = format!("load() {{ modprobe $1; }}\n{script}");
    std::fs::write(&root, initramfs("initramfs.uml", &script, &[])).unwrap();
    let mut command = Command::new(part("linux.uml"));
    command.args(["mem=256M", "con=null", "con0=fd:0,fd:1", "panic=-1", "quiet"]);
    command.arg(format!("initrd={}", root.display()));
    command.arg(format!("uml_dir={}/", state.display()));
    for (socket, kind) in devices {
        command.arg(format!("virtio_uml.device={}:{kind}", socket.display()));
    }
    Guest::start(&mut command, None).end()
}

/// It passes on whatever its driver negotiates, packed rings too, and starts all of them at 0: for
/// a packed ring that was used before, that is not the start.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_is_written_and_read() {
    let place = Place::new();
    let image = place.image("image", 32);
    let path = image.to_str().unwrap();
    let back = place.service("blk.sock", &["blk", "--image", path, "--no-iommu", "--log", "debug"]);
    let between = place.path("between.sock");
    let wire = Recording::between(between.clone(), &back.socket);
    let script = r#"
load virtio_blk
dd if=/dev/urandom of=/tmp/random bs=64k count=64
dd if=/tmp/random of=/dev/vda bs=64k oflag=direct conv=fsync
say random $(md5sum < /tmp/random)
fio --name=mixed --filename=/dev/vda --direct=1 --rw=randrw --bs=4k --ioengine=psync \
    --offset=4m --size=16m --verify=crc32c --output-format=json --eta=never --output=/tmp/fio
give mixed < /tmp/fio
sync
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;
    let output = run(&place, &[(&between, BLK)], script);
    no_errors(&output.json("mixed"));
    assert_eq!(output.sum("random"), md5(&image, 0, 4 * MIB));
    assert_eq!(output.sum("whole"), md5(&image, 0, 32 * MIB));
    let first = |request| wire.requests(request).first().map(Message::number);
    assert!(first(SET_FEATURES).unwrap() & RING_PACKED != 0, "what this test is about");
    // The ring, and in the high half its base.
    assert_eq!(first(SET_VRING_BASE), Some(0));
    assert_eq!(back.figure("ringfence_failed_requests_total"), 0.0);
    back.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn two_networks_back_to_back() {
    let place = Place::new();
    let (back, peer) = back_to_back(&place, &["--no-iommu"]);
    arrived(&run(&place, &[(&back.socket, NET), (&peer, NET)], &[PAIR, TRAFFIC].concat()));
    back.terminate();
}
