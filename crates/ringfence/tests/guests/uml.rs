//! User-Mode Linux: a front end of its own, without an IOMMU and at native speed.

use std::process::Command;

use crate::{
    blk::{MIB, no_errors},
    machine::{Guest, initramfs},
    place::{Place, md5, part},
    proxy::Recording,
};

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn user_mode_linux_is_served_too() {
    let place = Place::new();
    let image = place.image("image", 32);
    // Its drivers would take an IOMMU that is offered, and it has no way to translate.
    let path = image.to_str().unwrap();
    let back = place.service("blk.sock", &["blk", "--image", path, "--no-iommu", "--log", "debug"]);
    let between = place.path("between.sock");
    let _wire = Recording::between(between.clone(), &back.socket);
    let script = r#"
modprobe virtio_blk
fio --name=mixed --filename=/dev/vda --direct=1 --rw=randrw --bs=4k --ioengine=psync --size=16m \
    --verify=crc32c --output-format=json --eta=never --output=/tmp/fio
give mixed < /tmp/fio
sync
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;
    let (root, state) = (place.path("initramfs"), place.path("uml"));
    std::fs::write(&root, initramfs("initramfs.uml", script, &[])).unwrap();
    let mut command = Command::new(part("linux.uml"));
    command.args(["mem=256M", "con=null", "con0=fd:0,fd:1", "panic=-1", "quiet"]);
    command.arg(format!("initrd={}", root.display()));
    command.arg(format!("uml_dir={}/", state.display()));
    // 2: a block device.
    command.arg(format!("virtio_uml.device={}:2", between.display()));
    let said = Guest::start(&mut command, None).end();
    no_errors(&said.json("mixed"));
    assert_eq!(said.word("whole").split(' ').next().unwrap(), md5(&image, 0, 32 * MIB));
    back.terminate();
}
