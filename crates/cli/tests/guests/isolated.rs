//! `ringfence proxy` in front of back ends, ours and others: the guest sees the same device as without
//! it, behind an IOMMU too, and loses nothing when either of the two is killed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    blk::{PATIENT, SIZE_MIB, VERIFY, no_errors},
    crash::{COMPLETED, LOAD, MANY, lost_nothing},
    machines::{Ends, Machine},
    net::{LOOPBACK, LOSSY, PAIR, TRAFFIC, back_to_back},
    place::{Place, Service},
    qemu::{Iommu, Qemu},
    strangers::Stranger,
};

/// `ringfence proxy` that listens at `name`, before the back end at `back`.
pub(crate) fn proxy(place: &Place, name: &str, back: &Path) -> Service {
    let arguments = ["proxy", "--backend", back.to_str().unwrap(), "--log", "debug"];
    place.service(name, &[&arguments[..], &PATIENT].concat())
}

/// Two machines, whose disk has its back end at `disk` and whose networks have theirs at `networks`: the
/// last of these returns what it receives, if there are three.
fn machines(place: Place, image: PathBuf, queues: u32, disk: &Path, networks: &[PathBuf]) {
    let disk = proxy(&place, "disk.p", disk);
    let names = ["one.p", "other.p", "loopback.p"];
    let proxies = names.iter().zip(networks).map(|(name, back)| proxy(&place, name, back));
    let mut proxies: Vec<Service> = proxies.collect();
    let (peer, loopback) = (proxies[1].socket.clone(), proxies.last().unwrap().socket.clone());
    let mut ends = Ends { place, image, disk, network: proxies.swap_remove(0), peer, loopback };
    let some: &[&str] = &[VERIFY, LOSSY, PAIR, TRAFFIC];
    let all: &[&str] = &[VERIFY, PAIR, TRAFFIC, LOOPBACK];
    let scripts = if networks.len() > 2 { all } else { some };
    let plain = Machine { iommu: Iommu::None, queues, options: ["", ""], scripts };
    let options = [",packed=on", ",packed=on"];
    ends.serve(&plain);
    ends.serve(&Machine { iommu: Iommu::VirtioStrict, queues, options, scripts });
    let Ends { disk, network, .. } = ends;
    [disk, network].into_iter().chain(proxies).for_each(Service::terminate);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn machines_with_back_ends_of_ours() {
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let disk = crate::blk::service(&place, &image, 2);
    let (network, peer) = back_to_back(&place, &["--queues", "2"]);
    let loopback = place.service("loopback.sock", &["net", "--loopback", "--log", "debug"]);
    let networks = [network.socket.clone(), peer, loopback.socket.clone()];
    machines(place, image, 2, &disk.socket.clone(), &networks);
    [disk, network, loopback].into_iter().for_each(Service::terminate);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn machines_with_back_ends_of_qemu_and_dpdk() {
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let (disk, networks) = (place.path("qsd"), ["pmd0", "pmd1"].map(|name| place.path(name)));
    let _disk = Stranger::storage_daemon(&image, &disk);
    let _network = Stranger::testpmd(&networks);
    machines(place, image, 1, &disk, &networks);
}

/// A file system is made and mounted, and again after a reboot.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guest_that_reboots() {
    let place = Place::new();
    let (image, socket) = (place.image("image", 32), place.path("qsd"));
    let _back = Stranger::storage_daemon(&image, &socket);
    let front = proxy(&place, "disk.p", &socket);
    let script = r#"
load virtio_blk
mkdir -p /mnt
if mount -t ext4 /dev/vda /mnt; then
    say again $(md5sum < /mnt/file)
    umount /mnt
    exit
fi
mke2fs /dev/vda
mount -t ext4 /dev/vda /mnt
dd if=/dev/urandom of=/mnt/file bs=64k count=64
umount /mnt
mount -t ext4 /dev/vda /mnt
say first $(md5sum < /mnt/file)
umount /mnt
hear
reboot -f
sleep 1000
"#;
    let machine = Qemu::new(Iommu::VirtioStrict).reboots().blk(&front.socket, 1, "");
    let mut guest = machine.start(&place, script);
    guest.hear("first ");
    guest.say("go on");
    let output = guest.end();
    assert_eq!(output.sum("again"), output.sum("first"));
    front.terminate();
}

/// No acknowledged write is lost, and no request: fio sees no error and verifies all that it wrote.
fn is_killed_under_load(iommu: Iommu, proxy_dies: bool) {
    let place = Place::new();
    let (image, socket) = (place.image("image", 64), place.path("qsd"));
    let mut back = Stranger::storage_daemon(&image, &socket);
    let mut front = proxy(&place, "disk.p", &socket);
    let mut guest = Qemu::new(iommu).blk(&front.socket, 1, "").start(&place, LOAD);
    guest.hear("ready");
    let mut before = front.figure(COMPLETED);
    guest.say("go");
    for _ in 0..3 {
        front.reaches(COMPLETED, before + MANY);
        if proxy_dies {
            front.kill();
            front = proxy(&place, "disk.p", &socket);
            before = 0.0;
        } else {
            drop(back);
            before = front.figure(COMPLETED);
            back = Stranger::storage_daemon(&image, &socket);
        }
    }
    front.reaches(COMPLETED, before + MANY);
    lost_nothing(guest, &image);
    front.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn the_proxy_is_killed_under_load() {
    is_killed_under_load(Iommu::VirtioStrict, true);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn the_back_end_is_killed_under_load() {
    is_killed_under_load(Iommu::None, false);
}

/// All files below a folder, by their names there.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            files.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap());
        }
    }
    files
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_tree_of_files_is_copied() {
    let place = Place::new();
    let (shared, socket) = (place.path("shared"), place.path("fsd"));
    // Of all lengths from nothing to more than a request holds.
    for number in 0..120_u32 {
        let folder = shared.join(format!("tree/{}/{}", number % 7, number % 3));
        fs::create_dir_all(&folder).unwrap();
        let len = if number == 77 { 5 << 20 } else { number * number * 7 };
        let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + number) as u8).collect();
        fs::write(folder.join(number.to_string()), bytes).unwrap();
    }
    let _back = Stranger::virtiofsd(&shared, &socket);
    let front = proxy(&place, "fs.p", &socket);
    let script = r#"
mkdir -p /mnt
mount -t virtiofs host /mnt
cp -a /mnt/tree /tmp/tree
cp -a /tmp/tree /mnt/copy
diff -r /mnt/tree /mnt/copy
fio --name=file --directory=/mnt --ioengine=psync --rw=randrw --bs=4k --size=4m --verify=crc32c \
    --output-format=json --eta=never --output=/tmp/fio
give file < /tmp/fio
mv /mnt/copy /mnt/moved
rm -r /mnt/tree/1
umount /mnt
mount -t virtiofs host /mnt
say files $(find /mnt/moved -type f | wc -l)
[ ! -e /mnt/tree/1 ]
umount /mnt
"#;
    let before = tree(&shared.join("tree"));
    let output = Qemu::new(Iommu::None).fs(&front.socket).start(&place, script).end();
    no_errors(&output.json("file"));
    assert_eq!(output.word("files"), "120");
    assert!(tree(&shared.join("moved")) == before, "the files are not the same");
    assert!(!shared.join("tree/1").exists());
    assert_eq!(front.figure("ringfence_ring_failures_total"), 0.0);
    front.terminate();
}
