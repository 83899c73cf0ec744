//! A service manager ends and restarts back ends under load: the guest sees a pause, and neither it
//! nor QEMU has to connect again, which QEMU does not do for an IOMMU.

use crate::{
    blk::{MIB, no_errors},
    net::PAIR,
    place::{Guard, Place, Service, md5},
    qemu::{Iommu, Qemu},
    strangers::Stranger,
};

/// So many kills never all come in the middle of a request.
const MANY: usize = 10;

/// How often each way: a few times, or as often as this variable says.
fn times() -> usize {
    std::env::var("RINGFENCE_ENDS").map_or(4, |times| times.parse().unwrap())
}

/// How much each process does before it ends.
const SOME: f64 = 200.0;

/// Writes, reads back and verifies until the test ends it.
const LOAD: &str = r#"
load virtio_blk
passes() {
    while [ ! -e /tmp/enough ]; do
        fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
            --output=/tmp/load --name=load --rw=randrw --bs=4k --iodepth=16 --size=24m \
            --io_size=24m --verify=crc32c
        say pause $(grep -A 3 '"clat_ns"' /tmp/load | grep '"max"' | tr -dc '0-9\n' | sort -n | tail -n 1)
        grep -q '"error" : 0' /tmp/load || exit 1
    done
}
say ready
hear go
passes &
passes=$!
hear enough
touch /tmp/enough
wait $passes
give load < /tmp/load
echo 3 > /proc/sys/vm/drop_caches
say whole $(md5sum < /dev/vda)
"#;

/// Kills the process several times and asks it to end as often, each time once `figure` has counted
/// some of its work, and starts the next one. Each of its `sockets` is resumed each time, unless it
/// was killed in the middle of an IOTLB message: then QEMU connects again.
fn ends_often(
    iommu: Iommu,
    sockets: usize,
    mut service: Service,
    figure: &str,
    next: impl Fn() -> Service,
) -> Service {
    let (times, mut cut) = (times(), Vec::new());
    for killed in [true, false] {
        for _ in 0..times {
            service.reaches(figure, SOME);
            match killed {
                true => service.kill(),
                false => service.ends(),
            }
            service = next();
        }
        service.reaches(figure, SOME);
        let log = service.log();
        let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
        cut.push(count("in the middle of a request"));
        let all = cut.len() * times * sockets;
        let (new, on) = (count("has connected"), count("going on with its front end"));
        assert_eq!((new, on), (sockets + cut[0], all - cut[0]), "{log}");
    }
    eprintln!("{} of {} connections were in the middle of a request", cut[0], times * sockets);
    // None in an orderly end, and none without translations by QEMU; of many ends never all.
    assert_eq!(cut[0], cut[1]);
    assert!(cut[0] == 0 || iommu == Iommu::VirtioStrict);
    assert!(cut[0] < times * sockets || times < MANY);
    service
}

const COMPLETED: &str = "ringfence_requests_total";

fn disk(
    iommu: Iommu,
    sockets: usize,
    place: &Place,
    qemu: Qemu,
    first: Service,
    next: impl Fn() -> Service,
) {
    let image = place.path("image");
    let mut guest = qemu.start(place, LOAD);
    guest.hear("ready");
    guest.say("go");
    let last = ends_often(iommu, sockets, first, COMPLETED, next);
    guest.say("enough");
    let output = guest.end();
    no_errors(&output.json("load"));
    eprintln!("the longest request of the last pass: {} ns", output.word("pause"));
    assert_eq!(output.sum("whole"), md5(&image, 0, 32 * MIB));
    last.terminate();
}

fn unguarded(iommu: Iommu) {
    let place = Place::new().managed();
    place.image("image", 32);
    let image = place.path("image");
    let next = || {
        let image = image.to_str().unwrap();
        place.service("blk.sock", &["blk", "--image", image, "--log", "info"])
    };
    let first = next();
    let qemu = Qemu::new(iommu).blk(&first.socket, 1, "");
    disk(iommu, 1, &place, qemu, first, next);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk() {
    unguarded(Iommu::None);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_whose_translations_come_from_qemu() {
    unguarded(Iommu::VirtioStrict);
}

/// Each process connects to the back end anew.
fn proxied(iommu: Iommu) {
    let place = Place::new().managed();
    let (image, socket) = (place.image("image", 32), place.path("qsd"));
    let _back = Stranger::storage_daemon(&image, &socket);
    let next = || {
        let back = socket.to_str().unwrap();
        place.service("disk.p", &["proxy", "--backend", back, "--log", "info"])
    };
    let first = next();
    let qemu = Qemu::new(iommu).blk(&first.socket, 1, "");
    disk(iommu, 1, &place, qemu, first, next);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_proxy() {
    proxied(Iommu::None);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_proxy_whose_translations_come_from_qemu() {
    proxied(Iommu::VirtioStrict);
}

/// QEMU gets no option to connect again, and does not for the IOMMU.
fn guarded(iommu: Iommu) {
    let place = Place::new().managed();
    let image = place.image("image", 32);
    let disk_of = format!("{}={}", place.path("disk.sock").display(), image.display());
    let next = || place.guard(&["--blk", &disk_of]);
    let first: Guard = next();
    let qemu = Qemu::guarded(iommu, &first);
    disk(iommu, 2, &place, qemu, first.service, || next().service);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guard_whose_guest_is_strict() {
    guarded(Iommu::GuardStrict);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guard_whose_guest_is_lazy() {
    guarded(Iommu::GuardLazy);
}

/// Fetches a file and compares it until the test ends it.
const FETCHES: &str = r#"
sum=$(md5sum < /tmp/www/file)
passes() {
    while [ ! -e /tmp/enough ]; do
        [ "$(wget -q -O - http://10.0.0.2/file | md5sum)" = "$sum" ] || exit 1
        echo . >> /tmp/fetched
    done
}
say ready
hear go
passes &
passes=$!
hear enough
touch /tmp/enough
wait $passes && say fetched $(wc -l < /tmp/fetched)
"#;

fn network(iommu: Iommu) {
    let place = Place::new().managed();
    let peer = place.path("peer.sock");
    let next = || {
        let peer = peer.to_str().unwrap();
        place.service("net.sock", &["net", "--peer", peer, "--log", "info"])
    };
    let first = next();
    let qemu = Qemu::new(iommu).net(&first.socket, 1, "").net(&peer, 1, "");
    let mut guest = qemu.start(&place, &format!("{PAIR}{FETCHES}"));
    guest.hear("ready");
    guest.say("go");
    let last = ends_often(iommu, 2, first, "ringfence_net_packets_total", next);
    guest.say("enough");
    let output = guest.end();
    let fetched: u32 = output.word("fetched").parse().unwrap();
    assert!(fetched > 0);
    last.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_network() {
    network(Iommu::None);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_network_whose_translations_come_from_qemu() {
    network(Iommu::VirtioStrict);
}
