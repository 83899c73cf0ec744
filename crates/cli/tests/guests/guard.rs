//! A stock guest with its IOMMU and all devices served by one `ringfence guard`: QEMU is started
//! with the arguments that guard prints, and translates nothing.

mod firmware;
mod untrusted;
mod vfio;

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    blk::{COMES_AND_GOES, MIB, SIZE_MIB, VERIFY, came_back, no_errors, verified},
    machine::{Guest, Transcript},
    net::{PAIR, TRAFFIC, arrived},
    place::{Guard, LIMIT, Place, md5},
    qemu::{Iommu, Qemu},
};

/// The value of `--blk` for a disk.
fn disk(place: &Place, socket: &str, image: &Path, more: &str) -> String {
    format!("{}={}{more}", place.path(socket).display(), image.display())
}

fn one_disk(place: &Place, image: &Path, more: &str) -> Guard {
    place.guard(&["--blk", &disk(place, "disk.sock", image, more)])
}

impl Guard {
    fn maps(&self) -> f64 {
        self.service.figure("ringfence_iommu_requests_total{kind=\"map\"}")
    }

    fn unmaps(&self) -> f64 {
        self.service.figure("ringfence_iommu_requests_total{kind=\"unmap\"}")
    }

    fn domains(&self) -> f64 {
        self.service.figure("ringfence_iommu_domains")
    }

    /// How many accesses of a device were refused.
    fn faults(&self, endpoint: &str) -> f64 {
        let name = format!("ringfence_iommu_faults_total{{endpoint=\"{endpoint}\"}}");
        self.service.figure(&name)
    }

    /// How many requests a disk with one queue has completed.
    fn completed(&self, disk: &str) -> f64 {
        self.service.figure(&format!("ringfence_requests_total{{queue=\"{disk}/0\"}}"))
    }

    /// Waits until an access of a device is refused.
    fn wait_for_a_fault(&self, endpoint: &str) {
        let begun = Instant::now();
        while self.faults(endpoint) == 0.0 {
            assert!(begun.elapsed() < LIMIT, "{endpoint} has tried nothing that is refused");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Refusals: of the driver's requests, of devices' accesses, and failed disk requests.
    fn refused(&self) -> [f64; 3] {
        ["iommu_refused_total", "iommu_faults_total", "failed_requests_total"]
            .map(|name| self.service.figure(&format!("ringfence_{name}")))
    }

    fn had_nothing_to_refuse(&self) {
        assert_eq!(self.refused(), [0.0; 3], "{}", self.service.figures());
    }
}

/// Waits until a script has printed `word`, looks, and lets it continue: it waits with `hear`.
fn meanwhile<R>(guest: &mut Guest, word: &str, look: impl FnOnce() -> R) -> R {
    guest.hear(word);
    let seen = look();
    guest.say("go on");
    seen
}

/// fio with verification on two disks at once.
const TWO_DISKS: &str = r#"
for disk in vda vdb; do
    fio --filename=/dev/$disk --direct=1 --ioengine=io_uring --output-format=json --eta=never \
        --output=/tmp/$disk --name=mixed --rw=randrw --bs=4k --iodepth=16 --size=8m \
        --verify=crc32c &
    eval $disk=$!
done
"#;
const TWO_DISKS_END: &str = r#"
wait $vda
wait $vdb
for disk in vda vdb; do give $disk < /tmp/$disk; done
echo 3 > /proc/sys/vm/drop_caches
for n in 0 1; do
    say disk$n $(md5sum < /dev/$(ls /sys/bus/pci/devices/$(virtio_pci 2 $n)/virtio*/block))
done
"#;

/// What [`TWO_DISKS_END`] read matches the images, and fio met no error.
fn both_verified(output: &Transcript, images: &[PathBuf; 2]) {
    for (n, image) in images.iter().enumerate() {
        no_errors(&output.json(["vda", "vdb"][n]));
        let sum = output.sum(&format!("disk{n}"));
        assert_eq!(sum, md5(image, 0, 16 * MIB));
    }
}

/// Two disks and two network devices at work at the same time, each in a domain of its own.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn devices_in_domains_of_their_own() {
    let place = Place::new();
    let images = [place.image("image0", 16), place.image("image1", 16)];
    let disks = [0, 1].map(|n| disk(&place, &format!("disk{n}.sock"), &images[n], ""));
    let net = |name: &str| place.path(name).display().to_string();
    let net = format!("{}=peer:{}", net("net0.sock"), net("net1.sock"));
    let guard = place.guard(&["--blk", &disks[0], "--blk", &disks[1], "--net", &net]);
    let begin = "load virtio_blk\nload virtio_net\nsay loaded\nhear\n";
    let script = format!("{begin}{TWO_DISKS}{PAIR}{TRAFFIC}{TWO_DISKS_END}");
    let mut guest = Qemu::guarded(Iommu::GuardLazy, &guard).start(&place, &script);
    let domains = meanwhile(&mut guest, "loaded", || guard.domains());
    let output = guest.end();
    assert_eq!(domains, 4.0);
    arrived(&output);
    both_verified(&output, &images);
    guard.had_nothing_to_refuse();
    guard.service.terminate();
}

/// Functions of one device that do not claim to be isolated from each other: Linux puts them into
/// one group, and so into one domain.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn devices_that_share_a_domain() {
    let place = Place::new();
    let images = [place.image("image0", 16), place.image("image1", 16)];
    let at = |n: usize| format!(",addr=06.{n}");
    let disks = [0, 1].map(|n| disk(&place, &format!("disk{n}.sock"), &images[n], &at(n)));
    let guard = place.guard(&["--blk", &disks[0], "--blk", &disks[1]]);
    let begin = r#"
load virtio_blk
for n in 0 1; do
    say group$n $(readlink /sys/bus/pci/devices/$(virtio_pci 2 $n)/iommu_group)
done
say loaded
hear
"#;
    let script = format!("{begin}{TWO_DISKS}{TWO_DISKS_END}");
    let mut guest = Qemu::guarded(Iommu::GuardStrict, &guard).start(&place, &script);
    let domains = meanwhile(&mut guest, "loaded", || guard.domains());
    let output = guest.end();
    assert_eq!(output.word("group0"), output.word("group1"));
    assert_eq!(domains, 1.0);
    both_verified(&output, &images);
    guard.had_nothing_to_refuse();
    guard.service.terminate();
}

/// The guest reboots, in order and as after a crash: the IOMMU is reset, its domains end, and
/// firmware and a fresh driver meet the rings that the driver before left.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_guest_that_reboots() {
    // rule V4
    let place = Place::new();
    let image = place.image("image", 32);
    let guard = one_disk(&place, &image, "");
    let script = r#"
load virtio_blk
dd if=/dev/vda of=/tmp/read bs=1M skip=31 count=1
boot=$(head -c 1 /tmp/read)
case "$boot" in 1|2) ;; *) boot=0 ;; esac
say boot $boot
hear
if [ "$boot" != 2 ]; then
    dd if=/dev/urandom of=/tmp/random bs=64k count=64
    dd if=/tmp/random of=/dev/vda bs=64k seek=$((boot * 64)) oflag=direct conv=fsync
    echo $((boot + 1)) | dd of=/dev/vda bs=1M seek=31 conv=fsync,sync
    say boot$boot $(md5sum < /tmp/random)
    hear
    if [ $boot = 1 ]; then
        fio --name=load --filename=/dev/vda --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
            --iodepth=16 --time_based --runtime=600 > /tmp/load 2>&1 &
        under_load
    fi
    reboot -f
    sleep 1000
fi
say last $(dd if=/dev/vda bs=1M count=8 | md5sum)
"#;
    let mut guest = Qemu::guarded(Iommu::GuardStrict, &guard).reboots().start(&place, script);
    for boot in 0..3 {
        let domains = meanwhile(&mut guest, &format!("boot {boot}"), || guard.domains());
        // One for the one disk: none is left of earlier boots.
        assert_eq!(domains, 1.0, "boot {boot}");
        if boot < 2 {
            meanwhile(&mut guest, &format!("boot{boot} "), || ());
        }
    }
    let output = guest.end();
    for boot in 0..2 {
        let sum = output.sum(&format!("boot{boot}"));
        assert_eq!(sum, md5(&image, boot * 4 * MIB, 4 * MIB), "boot {boot}");
    }
    assert_eq!(output.sum("last"), md5(&image, 0, 8 * MIB));
    guard.service.terminate();
}

/// One guest after the other: the first is killed with I/O under way; in the second the driver is
/// unbound and bound again.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn guest_after_guest() {
    // rule V14, rule V20
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let mut guard = one_disk(&place, &image, ",queues=2");
    let load = r#"
load virtio_blk
fio --name=load --filename=/dev/vda --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
    --iodepth=16 --time_based --runtime=600 > /tmp/load 2>&1 &
under_load
say busy
sleep 1000
"#;
    let mut killed = Qemu::guarded(Iommu::GuardLazy, &guard).start(&place, load);
    killed.hear("busy");
    drop(killed);
    for (iommu, queues, goes) in [(Iommu::GuardStrict, 1, true), (Iommu::GuardLazy, 2, false)] {
        assert!(guard.service.is_running(), "{iommu}");
        let comes_and_goes = if goes { COMES_AND_GOES } else { "" };
        let script = ["load virtio_blk\nsay loaded\nhear\n", comes_and_goes, VERIFY].concat();
        let mut guest = Qemu::guarded(iommu, &guard).cpus(queues).start(&place, &script);
        // The killed guest is gone by now, with the requests of its devices.
        let (maps, unmaps, refused) =
            meanwhile(&mut guest, "loaded", || (guard.maps(), guard.unmaps(), guard.refused()));
        let output = guest.end();
        assert_eq!(output.word("domain"), iommu.domain(), "{iommu}");
        assert_eq!(output.word("queues"), queues.to_string(), "{iommu}");
        verified(&output, &image);
        if goes {
            came_back(&output, &image);
        }
        let (maps, unmaps) = (guard.maps() - maps, guard.unmaps() - unmaps);
        assert!(maps > 1000.0 && unmaps > 1000.0, "{iommu}: {maps} MAPs, {unmaps} UNMAPs");
        assert_eq!(guard.refused(), refused, "{iommu}\n{}", guard.service.figures());
    }
    guard.service.terminate();
}
