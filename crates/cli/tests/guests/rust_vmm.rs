//! Devices of rust-vmm's behind `ringfence proxy`, in front of a stock guest.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
};

use crate::{
    blk,
    isolated::proxy,
    place::{LIMIT, Place, Service},
    qemu::{Iommu, Qemu},
    rng,
    strangers::Stranger,
};

#[test]
#[ignore = "long: cargo xtask test --all --only rust-vmm"]
fn random_bytes() {
    for iommu in [Iommu::None, Iommu::IntelStrict] {
        let place = Place::new();
        let socket = place.path("rng0");
        let _back = Stranger::of_rust_vmm("vhost-device-rng", &[], &socket);
        let front = proxy(&place, "rng.p", &socket);
        let output = Qemu::new(iommu).newer().rng(&front.socket).start(&place, rng::SCRIPT).end();
        rng::is_random(&output, iommu);
        assert!(front.figure("ringfence_requests_total") > 0.0);
        front.terminate();
    }
}

#[test]
#[ignore = "long: cargo xtask test --all --only rust-vmm"]
fn a_console() {
    let place = Place::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (number, socket) = (port.to_string(), place.path("console0"));
    let arguments = ["--backend", "network", "--tcp-port", &number];
    let _back = Stranger::of_rust_vmm("vhost-device-console", &arguments, &socket);
    let front = proxy(&place, "console.p", &socket);
    let script = r#"
await [ -e /dev/hvc0 ]
exec 4<>/dev/hvc0
stty raw -echo <&4
say opened
hear go
for number in $(seq 200); do echo "line $number of the guest's"; done >&4
# One byte: version 0.1.0 takes all buffers for it, gives the first back, once for each byte in it, and
# loses the others; with them one that the driver returns before it has looked again.
say next
say byte $(dd bs=1 count=1 <&4)
"#;
    let machine = Qemu::new(Iommu::None).newer().other(&front.socket, 3, 4, 12);
    let mut guest = machine.start(&place, script);
    guest.hear("opened");
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut terminal = BufReader::new(stream);
    guest.say("go");
    for number in 1..=200 {
        let mut line = String::new();
        terminal.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), format!("line {number} of the guest's"));
    }
    guest.hear("next");
    terminal.get_mut().write_all(b"x").unwrap();
    assert_eq!(guest.end().word("byte"), "x");
    front.terminate();
}

/// QEMU connects to neither again: what was requested of them does not come, and nothing else waits for it.
#[test]
#[ignore = "long: cargo xtask test --all --only rust-vmm"]
fn ends_that_are_killed_fail_alone() {
    let place = Place::new();
    let (image, shared) = (place.image("image", 16), place.path("shared"));
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("file"), "content").unwrap();
    let [files, random] = ["fsd", "rng0"].map(|name| place.path(name));
    let back = Stranger::virtiofsd(&shared, &files);
    let _random = Stranger::of_rust_vmm("vhost-device-rng", &[], &random);
    let disk = blk::service(&place, &image, 1);
    let front = proxy(&place, "fs.p", &files);
    let mut dies = proxy(&place, "rng.p", &random);
    let script = r#"
load virtio_blk
modprobe virtio_rng
mkdir -p /mnt
mount -t virtiofs host /mnt
[ "$(cat /mnt/file)" = content ]
dd if=/dev/hwrng of=/dev/null bs=16 count=1
say ready
hear
: > /tmp/late
(ls -l /mnt/other; echo files >> /tmp/late) &
(dd if=/dev/hwrng of=/tmp/random bs=64k count=1; echo random >> /tmp/late) &
sleep 2
dd if=/dev/zero of=/dev/vda bs=64k count=16 oflag=direct
say disk written
say late $(wc -l < /tmp/late)
# Not poweroff: that syncs all file systems, and this one never replies.
echo o > /proc/sysrq-trigger
sleep 600
"#;
    let machine = Qemu::new(Iommu::None).newer().fs(&front.socket).rng(&dies.socket);
    let mut guest = machine.blk(&disk.socket, 1, "").start(&place, script);
    guest.hear("ready");
    drop(back);
    dies.kill();
    front.reaches("ringfence_broken_connections_total", 1.0);
    guest.say("go on");
    let (status, output) = guest.dies();
    assert!(status.success(), "{status}");
    assert_eq!(output.word("disk"), "written");
    assert_eq!(output.word("late"), "0");
    // The next front end is served.
    let back = Stranger::virtiofsd(&shared, &files);
    let script =
        "mkdir -p /mnt\nmount -t virtiofs host /mnt\nsay file $(cat /mnt/file)\numount /mnt";
    let output = Qemu::new(Iommu::None).newer().fs(&front.socket).start(&place, script).end();
    assert_eq!(output.word("file"), "content");
    drop(back);
    [front, disk].into_iter().for_each(Service::terminate);
}
