//! Back ends that end and are started again by a service manager, under load: the guest sees a pause, and neither it
//! nor QEMU has to connect again, which QEMU does not for an IOMMU.

use crate::{
    blk::{MIB, no_errors},
    net::PAIR,
    place::{Guard, Place, Service, md5},
    qemu::{Iommu, Qemu},
};

/// How often each way.
const TIMES: usize = 10;
/// What each process answers before it ends.
const SOME: f64 = 200.0;

/// Writes, reads back and verifies until told that it is enough.
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

/// Killed, and asked to end.
const BOTH: &[bool] = &[true, false];

/// Ends the process ten times by each of these ways, each time once it has done some of what `figure` counts, and starts
/// the next.
fn ends_often(
    ways: &[bool],
    mut service: Service,
    figure: &str,
    next: impl Fn() -> Service,
) -> Service {
    for killed in ways {
        for _ in 0..TIMES {
            service.reaches(figure, SOME);
            match killed {
                true => service.kill(),
                false => service.ends(),
            }
            service = next();
        }
    }
    service.reaches(figure, SOME);
    let log = service.log();
    let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    let (again, on) = (count("has connected"), count("going on with its front end"));
    assert_eq!(on, ways.len() * TIMES * again, "who connects again is no part of this:\n{log}");
    service
}

const ANSWERED: &str = "ringfence_requests_total";

fn disk(ways: &[bool], place: &Place, qemu: Qemu, first: Service, next: impl Fn() -> Service) {
    let image = place.path("image");
    let mut guest = qemu.start(place, LOAD);
    guest.hear("ready");
    guest.say("go");
    let last = ends_often(ways, first, ANSWERED, next);
    guest.say("enough");
    let said = guest.end();
    no_errors(&said.json("load"));
    eprintln!("the longest request of the last pass: {} ns", said.word("pause"));
    assert_eq!(said.sum("whole"), md5(&image, 0, 32 * MIB));
    last.terminate();
}

fn unguarded(iommu: Iommu, ways: &[bool]) {
    let place = Place::new().managed();
    place.image("image", 32);
    let image = place.path("image");
    let next = || {
        let image = image.to_str().unwrap();
        place.service("blk.sock", &["blk", "--image", image, "--log", "info"])
    };
    let first = next();
    let qemu = Qemu::new(iommu).blk(&first.socket, 1, "");
    disk(ways, &place, qemu, first, next);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk() {
    unguarded(Iommu::None, BOTH);
}

/// A process that is killed may be in the middle of a translation's message: QEMU has to connect again then.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_whose_translations_come_from_qemu() {
    unguarded(Iommu::VirtioStrict, &[false]);
}

/// QEMU is not told to connect again, and does not for the IOMMU.
fn guarded(iommu: Iommu) {
    let place = Place::alone().managed();
    let image = place.image("image", 32);
    let disk_of = format!("{}={}", place.path("disk.sock").display(), image.display());
    let next = || place.guard(&["--blk", &disk_of]);
    let first: Guard = next();
    let qemu = Qemu::guarded(iommu, &first);
    disk(BOTH, &place, qemu, first.service, || next().service);
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

/// Fetches a file and compares it until told that it is enough.
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

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_network() {
    let place = Place::new().managed();
    let peer = place.path("peer.sock");
    let next = || {
        let peer = peer.to_str().unwrap();
        place.service("net.sock", &["net", "--peer", peer, "--log", "info"])
    };
    let first = next();
    let qemu = Qemu::new(Iommu::None).net(&first.socket, 1, "").net(&peer, 1, "");
    let mut guest = qemu.start(&place, &format!("{PAIR}{FETCHES}"));
    guest.hear("ready");
    guest.say("go");
    let last = ends_often(BOTH, first, "ringfence_net_packets_total", next);
    guest.say("enough");
    let said = guest.end();
    let fetched: u32 = said.word("fetched").parse().unwrap();
    assert!(fetched > 0);
    last.terminate();
}
